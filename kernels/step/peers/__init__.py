"""An engine beside the step: llama.cpp on the same weights, whose rows come from a program that a user has."""
