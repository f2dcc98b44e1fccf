"""Killgate's workbench: card -> check -> measure -> place -> trace -> judge -> write.

Importing `lab` imports neither torch nor triton; the modules that need them import them when called.
"""

__version__ = "0.1.0"
