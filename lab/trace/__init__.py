"""Traces: read any profiler's file into one shape, account for every microsecond of it, and refuse what it hides.

In: nsys SQLite export, nsys stats CSV, Kineto JSON, ncu --csv, stored Parquet. Out: `Trace`, `Breakdown`, diffs.
Door: `files.read`, `summary.summarise`, `breakdowns.from_trace`, `diff.difference`, `windows`, `amdahl.project`.
"""
