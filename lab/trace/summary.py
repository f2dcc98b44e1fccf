"""What `lab trace` prints: every microsecond of a trace, shares with their denominators, identities that must hold.

Four sums look alike: the kernel sum adds durations; the kernel union is the time in which any kernel ran; busy adds
copies, fills and opaque graphs to that union; the span is the window, or first activity to last. Sums exceed unions
where work overlaps: within a stream (dependent launches), between streams, between devices.

What cannot be known is None with a reason in `warnings` or `refused`: shares of kernels when opaque graphs hide some of
them, everything that needs a timeline when the file has totals only.

The identities are computed from both sides (idle as the measure of the gaps, categories by kernel name); one that fails
is a defect, and the command exits with 1. The structs are what `--json` prints; an UNSET field is left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace
from numpy.typing import NDArray

from lab.trace import intervals, windows
from lab.trace.categories import MEMCPY, MEMSET, OPAQUE, OTHER, Rules, default, other_warning
from lab.trace.intervals import Device, Spans, Stream, group, merged, pieces, streams, union
from lab.trace.model import COPY_KINDS, NONE, Copies, Fills, NameTotal, Trace, short_name, totals_by_name

TOP = 20
# PyTorch's emit_nvtx appends numbers to every label, which would make each a label of its own.
NUMBERED = re.compile(r",? (seq|op_id|sizes|input_op_ids|stack) ?=.*$")
FAR = 0.01  # of the busy time; startup above it is worth a warning


class Gpu(Struct, frozen=True):
    """A GPU of the trace; name None where the file has none."""

    device: int
    name: str | None


class DeviceTime(Struct, frozen=True):
    """One device's times, us."""

    device: int
    span_us: float
    kernel_count: int
    kernel_sum_us: float
    kernel_union_us: float
    busy_union_us: float
    idle_us: float
    overlap_us: float
    waiting_us: float


class StreamTime(Struct, frozen=True):
    """One stream's times, us. overlap: within the stream; concurrent: while another stream of its device was active."""

    device: int
    process: int | None
    context: int | None
    stream: int
    count: int
    sum_us: float
    union_us: float
    overlap_us: float
    concurrent_us: float


class Graph(Struct, frozen=True):
    """The launches of one CUDA graph. nodes: of a whole launch, None where it was captured as one row."""

    graph: int | None
    launches: int
    nodes: int | None
    truncated: int
    median_us: float
    decomposed: bool


class Startup(Struct, frozen=True):
    """Kernels that run only before the first replayed graph, which begins at until_us."""

    until_us: float
    kernel_count: int
    sum_us: float
    union_us: float
    names: list[str]


class Moved(Struct, frozen=True):
    """Copies of one direction, or fills."""

    count: int
    bytes: int
    sum_us: float


class CategoryTime(Struct, frozen=True):
    """One category. kind: "kernel", "wait", "memcpy", "memset" or "graph"."""

    name: str
    kind: str
    count: int
    sum_us: float
    share_of_busy: float | None
    share_of_kernel_sum: float | None
    us_per_launch: float | None
    us_per_step: float | None
    us_per_token: float | None


class KernelTime(Struct, frozen=True):
    """One kernel name."""

    name: str
    short_name: str
    category: str
    count: int
    sum_us: float
    us_per_launch: float | None
    share_of_kernel_sum: float | None


class RangeTime(Struct, frozen=True):
    """NVTX ranges of one label: host time, nested ranges count in each level."""

    name: str
    domain: str | None
    count: int
    host_us: float


class HostTime(Struct, frozen=True):
    """Host waits or profiler overhead; never busy time."""

    count: int
    sum_us: float


class Identity(Struct, frozen=True):
    """Two sides that must agree to the nanosecond (0.001 us, less the doubles' rounding)."""

    identity: str
    left_us: float
    right_us: float
    holds: bool


class Summary(Struct, frozen=True, kw_only=True):
    """A trace or a window of it. All times in us, exact to the nanosecond; steps and tokens: made in the window.

    From `span_us` to `per_stream`, without the kernel count and sum, a field needs a timeline.
    """

    source: str
    tool: str
    tool_version: str
    schema_version: str
    graph_mode: str
    graph_setting: str
    window: str
    gpus: list[Gpu]
    steps: float | None
    tokens: float | None
    span_us: float | None = None
    kernel_count: int
    kernel_sum_us: float
    kernel_span_us: float | None = None
    kernel_union_us: float | None = None
    busy_union_us: float | None = None
    idle_us: float | None = None
    overlap_us: float | None = None
    waiting_us: float | None = None
    graph_launches: int | None = None
    graph_launches_truncated: int | UnsetType = UNSET
    graphs: list[Graph] | UnsetType = UNSET
    kernels_without_api: int | None = None
    startup: Startup | UnsetType | None = UNSET
    per_device: list[DeviceTime] = []
    per_stream: list[StreamTime] = []
    memcpy: dict[str, Moved]
    memset: Moved
    opaque_graph_us: float
    categories: list[CategoryTime] = []
    top_kernels: list[KernelTime]
    nvtx: list[RangeTime]
    host: dict[str, HostTime]
    identities: list[Identity] = []
    refused: list[str]
    warnings: list[str] = []

    @property
    def holds(self) -> bool:
        """Whether every identity holds."""
        return all(i.holds for i in self.identities)

    def plain(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return dict(msgspec.to_builtins(self))


def summarise(
    trace: Trace, rules: Rules | None = None, steps: float | None = None, tokens: float | None = None, top: int = TOP
) -> Summary:
    """The summary of a trace or of a window of it.

    steps: decode steps in the window, default what the window knows. tokens: made in the window. top: kernels listed.
    """
    rules = rules or default()
    totals = totals_by_name(trace)
    kernel_ns = sum(t.sum_ns for t in totals)
    opaque_us = int(trace.graphs.duration_ns.sum()) / 1e3
    refused = []
    if len(trace.graphs):  # the kernels inside are not in the file
        what = f"{len(trace.graphs)} opaque graphs hold {opaque_us:,.1f} us of kernels that the file does not name"
        refused.append(f"shares of kernels: {what}; capture with --cuda-graph-trace=node")
    known_ns = None if refused else kernel_ns
    times, warnings = _timeline(trace, rules) if trace.timeline else ({}, [])
    s = Summary(
        source=trace.source,
        tool=trace.tool,
        tool_version=trace.tool_version,
        schema_version=trace.schema_version,
        graph_mode=trace.graph_mode,
        graph_setting=trace.graph_setting,
        window=trace.window_label or "whole capture",
        gpus=[Gpu(d, n or None) for d, n in sorted(trace.gpus.items())],
        steps=steps if steps is not None else trace.steps,
        tokens=tokens,
        kernel_count=trace.kernels.count,
        kernel_sum_us=kernel_ns / 1e3,
        **times,
        memcpy=_copies(trace),
        memset=_moved(trace.memset),
        opaque_graph_us=opaque_us,
        top_kernels=[_kernel(t, rules, known_ns) for t in totals[:top]],
        nvtx=_nvtx(trace, top),
        host={k: HostTime(n, ns / 1e3) for k, (n, ns) in trace.host.items()},
        refused=refused,
    )
    s = replace(s, categories=_categories(s, totals, rules, known_ns, len(trace.graphs)))
    others = {t.name: t.sum_ns / 1e3 for t in totals if rules.category(t.name) == OTHER}
    warnings = [*trace.warnings, *warnings, *_warnings(trace, s), other_warning(others, kernel_ns / 1e3)]
    return replace(s, identities=_identities(s), warnings=[w for w in warnings if w])


def _timeline(trace: Trace, rules: Rules) -> tuple[dict[str, Any], list[str]]:
    """The fields that need a timeline, and what limits them."""
    waiting = rules.waits(trace.names)
    split = pieces(trace, waiting)
    found = intervals.devices(trace, waiting, split)
    over = intervals.window(trace, found)
    busy, kernels, waits = (union([getattr(d, kind) for d in found]) for kind in ("busy", "kernels", "waits"))
    replayed = windows.replays(trace)
    span, sum_ns = over.ns / 1e3, sum(d.sum_ns for d in found)
    overlap = (sum_ns - busy.ns) / 1e3
    per_device = [_device(d, over if trace.windows_ns is not None else None) for d in found]
    fields = {
        "span_us": span,
        "kernel_span_us": (int(kernels.end[-1]) - int(kernels.start[0])) / 1e3 if len(kernels) else 0.0,
        "kernel_union_us": kernels.ns / 1e3,
        "busy_union_us": busy.ns / 1e3,
        "idle_us": intervals.idle(busy, over).ns / 1e3,
        "overlap_us": overlap,
        "waiting_us": waits.ns / 1e3,
        "graph_launches": len(replayed),
        "graph_launches_truncated": int(replayed.truncated.sum()),
        "graphs": _graphs(replayed),
        "kernels_without_api": without_api(trace),
        "startup": startup(trace, replayed),
        "per_device": per_device,
        "per_stream": [_stream(stream, ns) for stream, ns in streams(split)],
    }
    warnings = [windows.truncation_warning(replayed)]
    if sum_ns / 1e3 > span > 0:
        inside = sum(d.overlap_us for d in per_device)
        warnings.append(
            f"summed time {sum_ns / 1e3:,.1f} us exceeds the span of {span:,.1f} us because work overlaps: "
            f"{inside:,.1f} us within devices, {overlap - inside:,.1f} us between {len(per_device)} devices"
        )
    return fields, warnings


def _device(device: Device, over: Spans | None) -> DeviceTime:
    own = over if over is not None else merged(np.array([device.first_ns]), np.array([device.last_ns]))
    return DeviceTime(
        device=device.number,
        span_us=own.ns / 1e3,
        kernel_count=device.kernel_count,
        kernel_sum_us=device.kernel_sum_ns / 1e3,
        kernel_union_us=device.kernels.ns / 1e3,
        busy_union_us=device.busy.ns / 1e3,
        idle_us=intervals.idle(device.busy, own).ns / 1e3,
        overlap_us=(device.sum_ns - device.busy.ns) / 1e3,
        waiting_us=device.waits.ns / 1e3,
    )


def _stream(s: Stream, concurrent_ns: int) -> StreamTime:
    device, process, context, stream = s.key
    return StreamTime(
        device=device,
        process=None if process == NONE else process,
        context=None if context == NONE else context,
        stream=stream,
        count=s.count,
        sum_us=s.sum_ns / 1e3,
        union_us=s.busy.ns / 1e3,
        overlap_us=(s.sum_ns - s.busy.ns) / 1e3,
        concurrent_us=concurrent_ns / 1e3,
    )


def _graphs(replayed: windows.Replays) -> list[Graph]:
    """Launches of each graph; the most launched first."""
    rows = []
    for number in np.unique(replayed.graph):
        mine = replayed.graph == number
        rows.append(
            Graph(
                graph=None if number == NONE else int(number),
                launches=int(mine.sum()),
                nodes=None if replayed.opaque else int(replayed.expected[mine].max()),
                truncated=int(replayed.truncated[mine].sum()),
                median_us=float(np.median((replayed.end_ns - replayed.start_ns)[mine])) / 1e3,
                decomposed=not replayed.opaque,
            )
        )
    return sorted(rows, key=lambda r: -r.launches)


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


def startup(trace: Trace, replayed: windows.Replays) -> Startup | None:
    """Kernels that run only before the first replayed graph (initialisation, warm-up, capture): not serving time.

    None when the trace has no graph that is replayed, so that nothing marks where the work begins.
    """
    begin = windows.first_steady_ns(replayed if trace.whole is None else windows.replays(trace.whole))
    if begin is None:
        return None
    kernels = trace.kernels
    later = np.zeros(len(trace.names), bool)
    later[kernels.name[kernels.start_ns >= begin]] = True
    mine = kernels.take(~later[kernels.name]) if len(kernels) else kernels
    first = min((int(r.start_ns[0]) for r in trace.activities if len(r)), default=begin)
    return Startup(
        until_us=(begin - first) / 1e3,
        kernel_count=len(mine),
        sum_us=int(mine.duration_ns.sum()) / 1e3,
        union_us=merged(mine.start_ns, mine.end_ns).ns / 1e3,
        names=[short_name(t.name) for t in totals_by_name(trace.but(kernels=mine))[:5]],
    )


def _warnings(trace: Trace, s: Summary) -> list[str]:
    found = []
    if len(trace.graphs):
        share = s.busy_union_us and s.opaque_graph_us / s.busy_union_us
        found.append(
            f"{len(trace.graphs)} CUDA graph launches were captured as a whole ({share or 0:.0%} of busy time): not "
            "decomposed; capture with --cuda-graph-trace=node"
        )
    if s.kernels_without_api:
        what = f"{s.kernels_without_api} of {len(trace.kernels)} kernels have no API row"
        found.append(f"{what}: launched outside the captured window")
    early = s.startup
    if isinstance(early, Startup) and s.busy_union_us and early.union_us > FAR * s.busy_union_us:
        found.append(
            f"startup kernels ({', '.join(early.names[:3])}) are {early.union_us / s.busy_union_us:.1%} of busy time "
            "and no part of the work: take a window (steady decode, a replay, an NVTX range)"
        )
    if s.waiting_us:
        found.append(f"kernels that only wait ran for {s.waiting_us:,.1f} us: not counted as busy")
    return found


def _moved(rows: Copies | Fills, mine: NDArray[np.bool_] | slice = slice(None)) -> Moved:
    took = rows.duration_ns[mine]
    return Moved(len(took), int(rows.bytes[mine].sum()), int(took.sum()) / 1e3)


def _copies(trace: Trace) -> dict[str, Moved]:
    """Copies by direction; the four usual ones always."""
    copies, by = trace.memcpy, {}
    for kind, label in enumerate(COPY_KINDS):
        mine = copies.kind == kind
        if label in ("HtoD", "DtoH", "DtoD", "PtoP") or mine.any():
            by[label] = _moved(copies, mine)
    strange = (copies.kind < 0) | (copies.kind >= len(COPY_KINDS))
    return by | ({"of unknown kind": _moved(copies, strange)} if strange.any() else {})


def _categories(
    s: Summary, totals: Sequence[NameTotal], rules: Rules, kernel_ns: int | None, opaque: int
) -> list[CategoryTime]:
    """Kernels by category ("other" always), then copies, fills and opaque graphs as categories of their own."""
    sums: dict[str, list[int]] = {OTHER: [0, 0]} if totals else {}
    for t in totals:
        cell = sums.setdefault(rules.category(t.name), [0, 0])
        cell[0] += t.count
        cell[1] += t.sum_ns
    rows = [(name, "kernel" if rules.busy(name) else "wait", n, ns / 1e3) for name, (n, ns) in sums.items()]
    moved = [*((f"{MEMCPY} {k}", MEMCPY, c.count, c.sum_us) for k, c in s.memcpy.items())]
    moved += [(MEMSET, MEMSET, s.memset.count, s.memset.sum_us), (OPAQUE, "graph", opaque, s.opaque_graph_us)]
    rows += [row for row in moved if row[2]]
    return [
        CategoryTime(
            name=name,
            kind=kind,
            count=count,
            sum_us=us,
            share_of_busy=us / s.busy_union_us if s.busy_union_us and kind != "wait" else None,
            share_of_kernel_sum=us * 1e3 / kernel_ns if kernel_ns and kind in ("kernel", "wait") else None,
            us_per_launch=us / count if count else None,
            us_per_step=us / s.steps if s.steps else None,
            us_per_token=us / s.tokens if s.tokens else None,
        )
        for name, kind, count, us in sorted(rows, key=lambda row: (-row[3], row[0]))
    ]


def _kernel(t: NameTotal, rules: Rules, kernel_ns: int | None) -> KernelTime:
    return KernelTime(
        name=t.name,
        short_name=short_name(t.name),
        category=rules.category(t.name),
        count=t.count,
        sum_us=t.sum_ns / 1e3,
        us_per_launch=t.sum_ns / t.count / 1e3 if t.count else None,
        share_of_kernel_sum=t.sum_ns / kernel_ns if kernel_ns else None,
    )


def _nvtx(trace: Trace, top: int) -> list[RangeTime]:
    """Ranges by label and domain; the longest first."""
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
    rows = [RangeTime(name, trace.domains.get(d, "") or None, int(n), ns / 1e3) for (name, d), (n, ns) in by.items()]
    return sorted(rows, key=lambda r: (-r.host_us, r.name))[:top]


def _identities(s: Summary) -> list[Identity]:
    sides = [(f"device {d.device}: busy + idle = span", d.busy_union_us + d.idle_us, d.span_us) for d in s.per_device]
    if s.span_us is not None:
        sides.append(("busy + idle = span", (s.busy_union_us or 0.0) + (s.idle_us or 0.0), s.span_us))
        sums = sum(d.kernel_sum_us for d in s.per_device)
        sides.append(("kernels of all devices = kernel sum", sums, s.kernel_sum_us))
    total = s.kernel_sum_us + s.memset.sum_us + s.opaque_graph_us + sum(c.sum_us for c in s.memcpy.values())
    shown = sum(c.sum_us for c in s.categories)
    sides.append(("categories = kernels + copies + fills + opaque graphs", shown, total))
    # Sums of doubles of us: a part in 1e12 of the larger side, and half a nanosecond.
    return [Identity(name, a, b, abs(a - b) <= 5e-4 + 1e-12 * max(abs(a), abs(b))) for name, a, b in sides]
