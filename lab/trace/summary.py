"""What `lab trace` prints: every microsecond of a trace in one place, with its denominator and its identities.

Four sums look alike and mean different things. The kernel sum adds durations; the kernel union is the time in which any
kernel ran; busy adds copies, fills and opaque graphs to that union; the span is from the first activity to the last, or
the window. A share says which of them it is of. Sums exceed unions when work overlaps, within a stream (dependent
launches), between streams or between devices, and the summary says where the difference comes from.

What cannot be known is None and has a reason in `warnings` or `refused`: shares of kernels when opaque graphs hide an
unknown part of them, everything that needs a timeline when the file has totals only. Nothing is filled in.

The identities are computed from both sides (idle as the measure of the gaps, categories by kernel name) and printed
with their difference; one that fails is a defect, and the command says so and exits with 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lab.trace import graphs
from lab.trace.categories import MEMCPY, MEMSET, OPAQUE, OTHER, Rules, default, other_warning
from lab.trace.intervals import group, merged, union
from lab.trace.model import COPY_KINDS, NONE, NameTotal, Trace, short_name, totals_by_name
from lab.trace.occupancy import Device, devices, idle, pieces, streams, window

TOP = 20
# PyTorch's emit_nvtx appends numbers to every label, which would make each a label of its own.
NUMBERED = re.compile(r",? (seq|op_id|sizes|input_op_ids|stack) ?=.*$")
FAR = 0.01  # of the busy time; startup above it is worth a warning


def summarise(
    trace: Trace, rules: Rules | None = None, steps: float | None = None, tokens: float | None = None, top: int = TOP
) -> dict[str, Any]:
    """The summary of a trace or of a window of it, as plain data. All times in us, exact to the nanosecond.

    steps:  decode steps in the window, for per-step figures; default what the window knows.
    tokens: tokens made in the window, for per-token figures.
    """
    rules = rules or default()
    steps = steps if steps is not None else trace.steps
    waiting = rules.waits(trace.names)
    totals = totals_by_name(trace)
    kernel_sum_ns = sum(t.sum_ns for t in totals)
    head = {
        "source": trace.source,
        "tool": trace.tool,
        "tool_version": trace.tool_version,
        "schema_version": trace.schema_version,
        "graph_mode": trace.graph_mode,
        "graph_setting": trace.graph_setting,
        "window": trace.window_label or "whole capture",
        "gpus": [{"device": d, "name": n or None} for d, n in sorted(trace.gpus.items())],
        "steps": steps,
        "tokens": tokens,
    }
    memory = _memory(trace)
    opaque_ns = int(trace.graphs.duration_ns.sum())
    body, warnings = _timeline(trace, waiting, rules, totals) if trace.timeline else (_no_timeline(trace), [])
    busy_us = body["busy_union_us"]
    parts = _categories(trace, rules, totals, memory, opaque_ns)
    refused = _refused(trace, opaque_ns)
    shares = _with_shares(parts, busy_us, None if refused else kernel_sum_ns, steps, tokens)
    others = {t.name: t.sum_ns / 1e3 for t in totals if rules.category(t.name) == OTHER}
    warnings += [w for w in [other_warning(others, kernel_sum_ns / 1e3)] if w]
    result = head | {
        "span_us": body.pop("span_us"),
        "kernel_count": trace.kernels.count,
        "kernel_sum_us": kernel_sum_ns / 1e3,
        **body,
        **memory,
        "opaque_graph_us": opaque_ns / 1e3,
        "categories": shares,
        "top_kernels": _top(totals, rules, None if refused else kernel_sum_ns, top),
        "nvtx": _nvtx(trace, top),
        "host": {k: {"count": n, "sum_us": ns / 1e3} for k, (n, ns) in trace.host.items()},
    }
    result["identities"] = _identities(result)
    return result | {"refused": refused, "warnings": [*trace.warnings, *warnings]}


def _no_timeline(trace: Trace) -> dict[str, Any]:
    keys = ("span_us", "kernel_span_us", "kernel_union_us", "busy_union_us", "idle_us", "overlap_us", "waiting_us")
    empty = {key: None for key in keys}
    return empty | {"graph_launches": None, "kernels_without_api": None, "per_device": [], "per_stream": []}


def _timeline(
    trace: Trace, waiting: Any, rules: Rules, totals: Sequence[NameTotal]
) -> tuple[dict[str, Any], list[str]]:
    """Everything that needs a timeline, and the warnings that follow from it."""
    split = pieces(trace, waiting)
    found = devices(trace, waiting, split)
    over = window(trace, found)
    busy = union([d.busy for d in found])
    kernels = union([d.kernels for d in found])
    waits = union([d.waits for d in found])
    replayed = graphs.replays(trace)
    span, sum_ns = over.ns, sum(d.sum_ns for d in found)
    per_device = [_device(d, over if trace.windows_ns is not None else None) for d in found]
    body = {
        "span_us": span / 1e3,
        "kernel_span_us": (int(kernels.end[-1]) - int(kernels.start[0])) / 1e3 if len(kernels) else 0.0,
        "kernel_union_us": kernels.ns / 1e3,
        "busy_union_us": busy.ns / 1e3,
        "idle_us": idle(busy, over).ns / 1e3,
        "overlap_us": (sum_ns - busy.ns) / 1e3,
        "waiting_us": waits.ns / 1e3,
        "graph_launches": len(replayed),
        "graph_launches_truncated": int(replayed.truncated.sum()),
        "graphs": _graphs(replayed),
        "kernels_without_api": without_api(trace),
        "startup": startup(trace, replayed),
        "per_device": per_device,
        "per_stream": [
            {
                "device": s.key[0],
                "process": None if s.key[1] == NONE else s.key[1],
                "context": None if s.key[2] == NONE else s.key[2],
                "stream": s.key[3],
                "count": s.count,
                "sum_us": s.sum_ns / 1e3,
                "union_us": s.busy.ns / 1e3,
                "overlap_us": (s.sum_ns - s.busy.ns) / 1e3,
                "concurrent_us": other_ns / 1e3,
            }
            for s, other_ns in streams(split)
        ],
    }
    return body, _warnings(trace, body, sum_ns, replayed)


def _device(device: Device, over: Any) -> dict[str, Any]:
    own = over if over is not None else merged(np.array([device.first_ns]), np.array([device.last_ns]))
    return {
        "device": device.number,
        "span_us": own.ns / 1e3,
        "kernel_count": device.kernel_count,
        "kernel_sum_us": device.kernel_sum_ns / 1e3,
        "kernel_union_us": device.kernels.ns / 1e3,
        "busy_union_us": device.busy.ns / 1e3,
        "idle_us": idle(device.busy, own).ns / 1e3,
        "overlap_us": (device.sum_ns - device.busy.ns) / 1e3,
        "waiting_us": device.waits.ns / 1e3,
    }


def _graphs(replayed: graphs.Replays) -> list[dict[str, Any]]:
    """Launches of each graph; the most launched first."""
    rows = []
    for number in np.unique(replayed.graph):
        mine = replayed.graph == number
        length = (replayed.end_ns - replayed.start_ns)[mine]
        rows.append(
            {
                "graph": None if number == NONE else int(number),
                "launches": int(mine.sum()),
                "nodes": None if replayed.opaque else int(replayed.expected[mine].max()),
                "truncated": int(replayed.truncated[mine].sum()),
                "median_us": float(np.median(length)) / 1e3,
                "decomposed": not replayed.opaque,
            }
        )
    return sorted(rows, key=lambda r: -r["launches"])


def without_api(trace: Trace) -> int | None:
    """Kernels whose launching call is not in the file, joined by process and correlation; None without any call."""
    if not len(trace.calls):
        return None
    kernels, calls, joined = trace.kernels, trace.calls, 0
    for process in np.intersect1d(group(kernels.process)[0], group(calls.process)[0]):
        mine, theirs = kernels.process == process, calls.process == process
        numbers = kernels.correlation if mine.all() else kernels.correlation[mine]
        joined += int(np.isin(numbers, calls.correlation if theirs.all() else calls.correlation[theirs]).sum())
    return len(kernels) - joined


def startup(trace: Trace, replayed: graphs.Replays) -> dict[str, Any] | None:
    """Kernels that run only before the first replayed graph (initialisation, warm-up, capture): not serving time.

    None when the trace has no graph that is replayed, so that nothing marks where the work begins.
    """
    begin = graphs.first_steady_ns(replayed if trace.whole is None else graphs.replays(trace.whole))
    if begin is None:
        return None
    kernels = trace.kernels
    later = np.zeros(len(trace.names), bool)
    later[kernels.name[kernels.start_ns >= begin]] = True
    mine = kernels.take(~later[kernels.name]) if len(kernels) else kernels
    spans = merged(mine.start_ns, mine.end_ns)
    first = min((int(r.start_ns[0]) for r in trace.activities if len(r)), default=begin)
    names = [short_name(t.name) for t in totals_by_name(trace.but(kernels=mine))[:5]]
    return {
        "until_us": (begin - first) / 1e3,
        "kernel_count": len(mine),
        "sum_us": int(mine.duration_ns.sum()) / 1e3,
        "union_us": spans.ns / 1e3,
        "names": names,
    }


def _warnings(trace: Trace, body: Mapping[str, Any], sum_ns: int, replayed: graphs.Replays) -> list[str]:
    found = [graphs.truncation_warning(replayed)]
    span, busy = body["span_us"], body["busy_union_us"]
    if sum_ns / 1e3 > span > 0:
        inside = sum(d["overlap_us"] for d in body["per_device"])
        across = body["overlap_us"] - inside
        found.append(
            f"summed time {sum_ns / 1e3:,.1f} us exceeds the span of {span:,.1f} us because work overlaps: "
            f"{inside:,.1f} us within devices, {across:,.1f} us between {len(body['per_device'])} devices"
        )
    if len(trace.graphs):
        share = body["busy_union_us"] and int(trace.graphs.duration_ns.sum()) / 1e3 / busy
        found.append(
            f"{len(trace.graphs)} CUDA graph launches were captured as a whole ({share:.0%} of busy time): not "
            "decomposed; capture with --cuda-graph-trace=node"
        )
    missing = body["kernels_without_api"]
    if missing:
        found.append(f"{missing} of {len(trace.kernels)} kernels have no API row: launched outside the captured window")
    early = body["startup"]
    if early and busy and early["union_us"] > FAR * busy:
        found.append(
            f"startup kernels ({', '.join(early['names'][:3])}) are {early['union_us'] / busy:.1%} of busy time and no "
            "part of the work: take a window (steady decode, a replay, an NVTX range)"
        )
    if body["waiting_us"]:
        found.append(f"kernels that only wait ran for {body['waiting_us']:,.1f} us: not counted as busy")
    return [f for f in found if f]


def _memory(trace: Trace) -> dict[str, Any]:
    """Copies by direction, and fills."""
    copies, by = trace.memcpy, {}
    for kind, label in enumerate(COPY_KINDS):
        mine = copies.kind == kind
        if label in ("HtoD", "DtoH", "DtoD", "PtoP") or mine.any():
            moved, took = int(copies.bytes[mine].sum()), int(copies.duration_ns[mine].sum())
            by[label] = {"count": int(mine.sum()), "bytes": moved, "sum_us": took / 1e3}
    strange = (copies.kind < 0) | (copies.kind >= len(COPY_KINDS))
    if strange.any():
        moved, took = int(copies.bytes[strange].sum()), int(copies.duration_ns[strange].sum())
        by["of unknown kind"] = {"count": int(strange.sum()), "bytes": moved, "sum_us": took / 1e3}
    fills = trace.memset
    filled = {"count": len(fills), "bytes": int(fills.bytes.sum()), "sum_us": int(fills.duration_ns.sum()) / 1e3}
    return {"memcpy": by, "memset": filled}


def _categories(
    trace: Trace, rules: Rules, totals: Sequence[NameTotal], memory: Mapping[str, Any], opaque_ns: int
) -> list[dict[str, Any]]:
    """Kernels by category, then copies, fills and opaque graphs as categories of their own; "other" always shown."""
    sums: dict[str, list[int]] = {OTHER: [0, 0]} if totals else {}
    for t in totals:
        cell = sums.setdefault(rules.category(t.name), [0, 0])
        cell[0] += t.count
        cell[1] += t.sum_ns
    rows = [
        {"name": name, "kind": "kernel" if rules.busy(name) else "wait", "count": n, "sum_us": ns / 1e3}
        for name, (n, ns) in sums.items()
    ]
    for label, cell in memory["memcpy"].items():
        if cell["count"]:
            rows.append(
                {"name": f"{MEMCPY} {label}", "kind": "memcpy", "count": cell["count"], "sum_us": cell["sum_us"]}
            )
    if memory["memset"]["count"]:
        cell = memory["memset"]
        rows.append({"name": MEMSET, "kind": "memset", "count": cell["count"], "sum_us": cell["sum_us"]})
    if len(trace.graphs):
        rows.append({"name": OPAQUE, "kind": "graph", "count": len(trace.graphs), "sum_us": opaque_ns / 1e3})
    return sorted(rows, key=lambda r: (-r["sum_us"], r["name"]))


def _with_shares(
    rows: list[dict[str, Any]], busy_us: float | None, kernel_ns: int | None, steps: float | None, tokens: float | None
) -> list[dict[str, Any]]:
    for row in rows:
        us = row["sum_us"]
        row["share_of_busy"] = us / busy_us if busy_us and row["kind"] != "wait" else None
        row["share_of_kernel_sum"] = us * 1e3 / kernel_ns if kernel_ns and row["kind"] in ("kernel", "wait") else None
        row["us_per_launch"] = us / row["count"] if row["count"] else None
        row["us_per_step"] = us / steps if steps else None
        row["us_per_token"] = us / tokens if tokens else None
    return rows


def _refused(trace: Trace, opaque_ns: int) -> list[str]:
    """What is not answered, and why."""
    if not len(trace.graphs):
        return []
    return [
        f"shares of kernels: {len(trace.graphs)} opaque graphs hold {opaque_ns / 1e3:,.1f} us of kernels that the file "
        "does not name; capture with --cuda-graph-trace=node"
    ]


def _top(totals: Sequence[NameTotal], rules: Rules, kernel_ns: int | None, top: int) -> list[dict[str, Any]]:
    return [
        {
            "name": t.name,
            "short_name": short_name(t.name),
            "category": rules.category(t.name),
            "count": t.count,
            "sum_us": t.sum_ns / 1e3,
            "us_per_launch": t.sum_ns / t.count / 1e3 if t.count else None,
            "share_of_kernel_sum": t.sum_ns / kernel_ns if kernel_ns else None,
        }
        for t in totals[:top]
    ]


def _nvtx(trace: Trace, top: int) -> list[dict[str, Any]]:
    """Ranges by label, host time (nested ranges count in each level); the longest first."""
    if not len(trace.ranges):
        return []
    keys, codes = group(trace.ranges.label, trace.ranges.domain)
    counts = np.bincount(codes, minlength=len(keys))
    sums = np.bincount(codes, weights=trace.ranges.duration_ns, minlength=len(keys))
    by: dict[tuple[str, int], list[float]] = {}
    for (label, domain), n, ns in zip(keys, counts.tolist(), sums.tolist(), strict=True):
        cell = by.setdefault((NUMBERED.sub("", trace.labels[label]), domain), [0, 0.0])
        cell[0] += n
        cell[1] += ns
    rows: list[dict[str, Any]] = [
        {"name": name, "domain": trace.domains.get(domain, "") or None, "count": int(n), "host_us": ns / 1e3}
        for (name, domain), (n, ns) in by.items()
    ]
    return sorted(rows, key=lambda r: (-r["host_us"], r["name"]))[:top]


def _identities(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each identity with both sides; they must agree to the nanosecond (0.001 us, less the doubles' rounding)."""
    found = []

    def hold(name: str, left: float, right: float) -> None:
        # Sums of doubles of us: a part in 1e12 of the larger side, and half a nanosecond.
        fine = abs(left - right) <= 5e-4 + 1e-12 * max(abs(left), abs(right))
        found.append({"identity": name, "left_us": left, "right_us": right, "holds": fine})

    for d in result["per_device"]:
        hold(f"device {d['device']}: busy + idle = span", d["busy_union_us"] + d["idle_us"], d["span_us"])
    if result["span_us"] is not None:
        hold("busy + idle = span", result["busy_union_us"] + result["idle_us"], result["span_us"])
        sums = sum(d["kernel_sum_us"] for d in result["per_device"])
        hold("kernels of all devices = kernel sum", sums, result["kernel_sum_us"])
    total = result["kernel_sum_us"] + result["memset"]["sum_us"] + result["opaque_graph_us"]
    total += sum(c["sum_us"] for c in result["memcpy"].values())
    hold("categories = kernels + copies + fills + opaque graphs", sum(c["sum_us"] for c in result["categories"]), total)
    return found
