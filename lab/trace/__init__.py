"""Traces: any profiler's file in one form, every microsecond of it accounted for, and no share where a file hides work.

In: nsys SQLite export, nsys stats CSV, Kineto JSON, ncu --csv, stored Parquet. Out: `Trace`, `Summary`, `Breakdown`.
Door: `files.read`, `windows`, `steady`, `summary.summarise`, `breakdowns.from_trace`, `diff.difference`,
`amdahl.project`, `capture.profiled`.
"""
