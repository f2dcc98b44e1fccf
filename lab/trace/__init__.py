"""Traces: any profiler's file in one form, every microsecond of it accounted for, and no share where a file hides work.

In: exports of nsys, Kineto, rocprof, XLA and ncu, stored Parquet. Out: `Trace`, `Summary`, `Breakdown`.
Door: `files.read`, `windows`, `steady`, `summary.summarise`, `breakdowns.from_trace`, `diff.difference`,
`amdahl.project`, `capture.profiled`.
"""

import sys
from types import ModuleType
from typing import Any


class _Door(ModuleType):
    """The room, which the small lab also calls: `from lab import trace; trace(FILE)`."""

    def __call__(self, file: Any) -> Any:
        import lab

        return lab.open_trace(file)


sys.modules[__name__].__class__ = _Door
