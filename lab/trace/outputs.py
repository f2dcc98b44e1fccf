"""A trace for other programs: the tables as CSV, the timeline as the Chrome trace that Perfetto opens."""

from __future__ import annotations

import csv
import io
from typing import Any

import msgspec

from lab.trace.model import Trace, labels
from lab.trace.summary import Summary


def table(s: Summary) -> str:
    """Categories and kernels of a summary, a line each; `level` says which, times in us, what is unknown is empty."""
    rows = [{"level": "category", **row} for row in msgspec.to_builtins(s.categories)]
    rows += [{"level": "kernel", **row} for row in msgspec.to_builtins(s.top_kernels)]
    columns = dict.fromkeys(key for row in rows for key in row if key != "behind")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def perfetto(trace: Trace) -> bytes:
    """Device rows and ranges as Chrome trace events: a process for each GPU, a track for each stream and thread."""
    trace.require_timeline("timeline")
    texts, codes = labels(trace)
    events: list[dict[str, Any]] = []
    kinds = ("kernel", "gpu_memcpy", "gpu_memset", "kernel")  # as PyTorch's profiler calls them
    for rows, code, kind in zip(trace.activities, codes, kinds, strict=True):
        columns = (code, rows.start_ns, rows.duration_ns, rows.device, rows.stream, rows.correlation)
        for name, start, ns, device, stream, correlation in zip(*(c.tolist() for c in columns), strict=True):
            at = {"ph": "X", "ts": start / 1e3, "dur": ns / 1e3, "pid": device, "tid": stream}
            events.append(at | {"name": texts[name], "cat": kind, "args": {"correlation": correlation}})
    ranges = trace.ranges
    times = zip(ranges.label.tolist(), ranges.start_ns.tolist(), ranges.duration_ns.tolist(), strict=True)
    for (label, start, ns), thread in zip(times, ranges.thread.tolist(), strict=True):
        at = {"ph": "X", "ts": start / 1e3, "dur": ns / 1e3, "pid": "host", "tid": thread}
        events.append(at | {"name": trace.labels[label], "cat": "range"})
    return msgspec.json.encode({"traceEvents": events})
