"""Rivals: their products one after the other, launched as the library does, which is to wait."""
