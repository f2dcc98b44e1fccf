"""Traces: read any profiler's file into one shape, account for every microsecond of it, and refuse what it hides.

    files -> model -> windows, steady -> occupancy, graphs -> summary -> report

`files.read(path)` is the only door. This file imports nothing, so that the command line can name its arguments without
NumPy; a reader imports what it needs when it reads.
"""
