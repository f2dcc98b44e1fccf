"""The summary of a trace: every microsecond, shares with their denominators, identities that must hold.

Four sums look alike: the kernel sum adds durations; the kernel union is the time in which any kernel ran; busy adds
copies, fills and opaque graphs to that union; the span is the window, or first activity to last. Sums exceed unions
where work overlaps: within a stream (dependent launches), between streams, between devices.

What cannot be known is None with a reason in `warnings` or `refused`: shares of kernels when opaque graphs hide some of
them, everything that needs a timeline when the file has totals only. The identities are computed from both sides (idle
as the measure of the gaps, categories by kernel name); one that fails is a defect, and the command exits with 1. The
structs are what `--json` prints; an UNSET field is left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType

from lab.trace import categories, exposed, idle, intervals, kineto, model, roofline, windows
from lab.trace.categories import OTHER, Rules
from lab.trace.idle import CallTime, Gap
from lab.trace.intervals import Spans, Usage, merged
from lab.trace.model import NONE, Total, Trace, short_name, totals_by_name
from lab.trace.roofline import Placed

TOP = 20
LAUNCHES = re.compile(r"(?:cu|cuda|hip)\w*Launch")
FAR = 0.01  # of the busy time; startup above it is worth a warning
SAID = ("source", "tool", "tool_version", "schema_version", "graph_mode", "graph_setting", "unit", "rank")
ALWAYS = ("HtoD", "DtoH", "DtoD", "PtoP")  # the copies that are listed also where there is none


class Gpu(Struct, frozen=True):
    """A GPU of the trace; name None where the file has none."""

    device: int
    name: str | None


class DeviceTime(Struct, frozen=True):
    """One device's times, us.

    exposed: in which one category alone ran; overlapped: several; with idle they are the span. idle_by: idle time by
    cause (lab/trace/idle.py).
    """

    device: int
    span_us: float
    kernel_count: int
    kernel_sum_us: float
    kernel_union_us: float
    busy_union_us: float
    idle_us: float
    overlap_us: float
    waiting_us: float
    exposed_us: float
    overlapped_us: float
    idle_by: dict[str, float]


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


NOTHING = Moved(0, 0, 0.0)


class CategoryTime(Struct, frozen=True):
    """One category. kind: "kernel", "wait", "memcpy", "memset" or "graph".

    union_us: when any of it ran, exposed_us: no other category of its device, hidden_us: the rest; behind: what else
    ran then. Over several devices they are sums.
    """

    name: str
    kind: str
    count: int
    sum_us: float
    share_of_busy: float | None
    share_of_kernel_sum: float | None
    us_per_launch: float | None
    us_per_step: float | None
    us_per_token: float | None
    union_us: float | None = None
    exposed_us: float | None = None
    hidden_us: float | None = None
    behind: dict[str, float] = {}


class KernelTime(Struct, frozen=True):
    """One kernel name. exposed_us: no other kernel, copy or graph of its device ran; hidden_behind: what did most.

    registers of a thread, shared_bytes of a block, block and grid (x, y, z): of its first launch.
    """

    name: str
    short_name: str
    category: str
    count: int
    sum_us: float
    us_per_launch: float | None
    share_of_kernel_sum: float | None
    exposed_us: float | None = None
    hidden_behind: str = ""
    min_us: float | None = None
    median_us: float | None = None
    max_us: float | None = None
    sigma_us: float | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    block: str = ""
    grid: str = ""


class RangeTime(Struct, frozen=True):
    """Ranges of one label: host time, nested ranges count in each level; first_us: when the first began, from the first
    device activity, as --time takes it. gpu_us: device time launched inside, self_us: and in no range within them.
    """

    name: str
    domain: str | None
    count: int
    host_us: float
    first_us: float | None = None
    gpu_us: float | None = None
    self_us: float | None = None


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
    rank: int | None = None
    unit: str = "step"
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
    gaps: list[Gap] = []
    api: list[CallTime] = []
    launch_delay_us: dict[str, float] | None = None
    memcpy: dict[str, Moved]
    memset: Moved
    opaque_graph_us: float
    categories: list[CategoryTime] = []
    top_kernels: list[KernelTime]
    roofline: list[Placed] = []
    roofline_of: str = ""
    nvtx: list[RangeTime]
    operators: list[RangeTime] = []
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
    """The summary of a trace or a window. steps, tokens: made in it, default as it knows; top: kernels listed."""
    rules = rules or categories.default()
    steps = steps if steps is not None else trace.steps
    every = model.totals(trace)
    totals = [t for t in every if t.kind == "kernel"]
    summed = categories.sums(rules, every)
    kernel_ns, opaque_us = sum(t.sum_ns for t in totals), int(trace.graphs.duration_ns.sum()) / 1e3
    refused = []
    if len(trace.graphs):  # the kernels inside are not in the file
        what = f"{len(trace.graphs)} opaque graphs hold {opaque_us:,.1f} us of kernels that the file does not name"
        refused.append(f"shares of kernels: {what}; capture with --cuda-graph-trace=node")
    known_ns = None if refused else kernel_ns
    times, warnings = _timeline(trace, rules) if trace.timeline else ({}, [])
    parts = times.pop("parts", {})
    busy_us = sum(d.busy_union_us for d in times["per_device"]) if times else None  # of all devices, added up
    listed = _categories(summed, busy_us, known_ns, steps, tokens, parts)
    ranges, operators = _ranges(trace)
    placed, placed_of = roofline.placed(trace) if trace.whole is None else ([], "")
    moved = {t.name: Moved(t.count, t.bytes, t.sum_ns / 1e3) for t in every if t.kind != "kernel"}
    named = {kind: f"{model.MEMCPY} {kind}" for kind in (*model.COPY_KINDS, model.UNKNOWN_COPY)}
    memcpy = {k: moved.get(name, NOTHING) for k, name in named.items() if k in ALWAYS or name in moved}
    memset = moved.get(model.MEMSET, NOTHING)
    total_us = kernel_ns / 1e3 + memset.sum_us + opaque_us + sum(c.sum_us for c in memcpy.values())
    return Summary(
        **{key: getattr(trace, key) for key in SAID},
        window=trace.window_label or "whole capture",
        gpus=[Gpu(d, n or None) for d, n in sorted(trace.gpus.items())],
        steps=steps,
        tokens=tokens,
        **{"kernel_count": trace.kernels.count, "kernel_sum_us": kernel_ns / 1e3} | times,
        memcpy=memcpy,
        memset=memset,
        opaque_graph_us=opaque_us,
        categories=listed,
        top_kernels=_kernels(trace, rules, totals[:top], known_ns),
        roofline=placed[:top],
        roofline_of=placed_of,
        nvtx=ranges[:top],
        operators=operators[:top],
        host={k: HostTime(n, ns / 1e3) for k, (n, ns) in trace.host.items()},
        identities=_identities(times, listed, kernel_ns / 1e3, total_us),
        refused=refused,
        warnings=[*trace.warnings, *warnings, *categories.other_warning(rules, totals, kernel_ns)],
    )


def _timeline(trace: Trace, rules: Rules) -> tuple[dict[str, Any], list[str]]:
    waiting = rules.waits(trace.names)
    streams = intervals.used(trace, waiting, *intervals.STREAM)
    devices = intervals.devices(trace, waiting)
    used, over = intervals.together(list(devices.values())), intervals.window(trace)
    spans = {number: intervals.window(trace, own, number) for number, own in devices.items()}
    concurrent_ns = intervals.concurrent_ns(streams)
    per_stream = [_stream(stream, own, concurrent_ns[stream]) for stream, own in streams.items()]
    del streams  # of the millions of a long capture, nothing stays longer than it is needed
    parts = exposed.by_device(trace, rules)
    free = {n: intervals.idle(own.work.spans, spans[n]) for n, own in devices.items()}
    causes, gaps = idle.attribute(trace, waiting, {n: (free[n], own.waits.spans) for n, own in devices.items()})
    per_device = [
        DeviceTime(
            number,
            **_times(own, spans[number], free[number]),
            exposed_us=sum(p.exposed_ns for p in parts[number].parts.values()) / 1e3 if number in parts else 0.0,
            overlapped_us=parts[number].overlapped_ns / 1e3 if number in parts else 0.0,
            idle_by={cause: ns / 1e3 for cause, ns in causes[number].items()},
        )
        for number, own in devices.items()
    ]
    replayed, kernels = windows.replays(trace), used.kernels.spans
    call = model.callers(trace)(model.launches(trace.kernels))
    fields = _times(used, over, free[next(iter(free))] if len(free) == 1 else intervals.idle(used.work.spans, over)) | {
        "kernel_span_us": (int(kernels.end[-1]) - int(kernels.start[0])) / 1e3 if len(kernels) else 0.0,
        "graph_launches": len(replayed),
        "graph_launches_truncated": int(replayed.truncated.sum()),
        "graphs": _graphs(replayed),
        "kernels_without_api": int((call < 0).sum()) if len(trace.calls) else None,
        "startup": startup(trace, replayed),
        "per_device": per_device,
        "parts": parts,
        "gaps": gaps,
        "api": idle.api(trace, TOP),
        "launch_delay_us": idle.launch_delay_us(trace, call),
        "per_stream": per_stream,
    }
    return fields, windows.truncation_warning(replayed) + _warnings(trace, fields, used.work.sum_ns / 1e3)


def _warnings(trace: Trace, times: dict[str, Any], sum_us: float) -> list[str]:
    found, per_device, startup = [], times["per_device"], times["startup"]
    span, busy, missing = times["span_us"], times["busy_union_us"], times["kernels_without_api"]
    if sum_us > span > 0:
        inside = sum(d.overlap_us for d in per_device)
        found.append(
            f"summed time {sum_us:,.1f} us exceeds the span of {span:,.1f} us because work overlaps: {inside:,.1f} us "
            f"within devices, {times['overlap_us'] - inside:,.1f} us between {len(per_device)} devices"
        )
    if len(trace.graphs):
        share = int(trace.graphs.duration_ns.sum()) / 1e3 / busy if busy else 0
        found.append(
            f"{len(trace.graphs)} CUDA graph launches were captured as a whole ({share:.0%} of busy time): not "
            "decomposed; capture with --cuda-graph-trace=node"
        )
    if trace.whole is None and not (len(trace.kernels) or len(trace.graphs)):
        launched = int(model.named(LAUNCHES.match, trace.call_names, trace.calls.name).sum())
        beside = f" beside {launched} calls that launch one" if launched else ""
        found.append(f"no kernel is in the file{beside}: was the kernels' activity recorded?")
    if missing:
        what = f"{missing} of {len(trace.kernels)} kernels have no API row"
        found.append(f"{what}: launched outside the captured window")
    if startup and startup.union_us > FAR * busy > 0:
        found.append(
            f"startup kernels ({', '.join(startup.names[:3])}) are {startup.union_us / busy:.1%} of busy time "
            "and no part of the work: take a window (steady decode, a replay, an NVTX range)"
        )
    if times["waiting_us"]:
        found.append(f"kernels that only wait ran for {times['waiting_us']:,.1f} us: not counted as busy")
    return found


def _times(used: Usage, over: Spans, free: Spans) -> dict[str, Any]:
    return {
        "span_us": over.ns / 1e3,
        "kernel_count": used.kernels.count,
        "kernel_sum_us": used.kernels.sum_ns / 1e3,
        "kernel_union_us": used.kernels.spans.ns / 1e3,
        "busy_union_us": used.work.spans.ns / 1e3,
        "idle_us": free.ns / 1e3,
        "overlap_us": (used.work.sum_ns - used.work.spans.ns) / 1e3,
        "waiting_us": used.waits.spans.ns / 1e3,
    }


def _stream(stream: intervals.Stream, used: Usage, concurrent_ns: int) -> StreamTime:
    device, process, context, number = stream
    sum_ns, busy = used.work.sum_ns + used.waits.sum_ns, intervals.union([used.work.spans, used.waits.spans])
    return StreamTime(
        device=device,
        process=None if process == NONE else process,
        context=None if context == NONE else context,
        stream=number,
        count=used.work.count + used.waits.count,
        sum_us=sum_ns / 1e3,
        union_us=busy.ns / 1e3,
        overlap_us=(sum_ns - busy.ns) / 1e3,
        concurrent_us=concurrent_ns / 1e3,
    )


def _graphs(replayed: windows.Replays) -> list[Graph]:
    by_graph = {int(number): replayed.take(replayed.graph == number) for number in np.unique(replayed.graph)}
    rows = [
        Graph(
            graph=None if number == NONE else number,
            launches=len(mine),
            nodes=None if mine.opaque else int(mine.expected.max()),
            truncated=int(mine.truncated.sum()),
            median_us=float(np.median(mine.duration_ns)) / 1e3,
            decomposed=not mine.opaque,
        )
        for number, mine in by_graph.items()
    ]
    return sorted(rows, key=lambda r: -r.launches)


def startup(trace: Trace, replayed: windows.Replays) -> Startup | None:
    """Kernels that run only before the first replayed graph: no serving time. None where no graph is replayed."""
    begin = windows.first_steady_ns(replayed if trace.whole is None else windows.replays(trace.whole))
    if begin is None:
        return None
    kernels = trace.kernels
    later = np.zeros(len(trace.names), bool)
    later[kernels.name[kernels.start_ns >= begin]] = True
    mine = kernels.take(~later[kernels.name]) if len(kernels) else kernels
    first = trace.extent_ns[0] if any(map(len, trace.activities)) else begin
    return Startup(
        until_us=(begin - first) / 1e3,
        kernel_count=len(mine),
        sum_us=int(mine.duration_ns.sum()) / 1e3,
        union_us=merged(mine.start_ns, mine.end_ns).ns / 1e3,
        names=[short_name(t.name) for t in totals_by_name(trace.but(kernels=mine))[:5]],
    )


def _categories(
    summed: list[Total], busy_us: float | None, kernel_ns: int | None, steps: float | None, tokens: float | None,
    parts: dict[int, exposed.Device],
) -> list[CategoryTime]:  # fmt: skip
    """The largest first; "other" wherever there are kernels."""
    kernels = [c.name for c in summed if c.kind in ("kernel", "wait")]
    other = [Total(OTHER, 0, 0)] if kernels and OTHER not in kernels else []
    return [
        CategoryTime(
            name=c.name,
            kind=c.kind,
            count=c.count,
            sum_us=(us := c.sum_ns / 1e3),
            share_of_busy=us / busy_us if busy_us and c.kind != "wait" else None,
            share_of_kernel_sum=us * 1e3 / kernel_ns if kernel_ns and c.kind in ("kernel", "wait") else None,
            us_per_launch=us / c.count if c.count else None,
            us_per_step=us / steps if steps else None,
            us_per_token=us / tokens if tokens else None,
            **_hidden([d.parts[c.name] for d in parts.values() if c.name in d.parts]),
        )
        for c in sorted(summed + other, key=lambda c: (-c.sum_ns, c.name))
    ]


def _hidden(parts: Sequence[exposed.Part]) -> dict[str, Any]:
    if not parts:
        return {}
    behind: Counter[str] = Counter()
    for part in parts:
        behind.update(part.behind)
    union, alone = sum(p.union_ns for p in parts), sum(p.exposed_ns for p in parts)
    times = {"union_us": union / 1e3, "exposed_us": alone / 1e3, "hidden_us": (union - alone) / 1e3}
    return times | {"behind": {name: ns / 1e3 for name, ns in behind.most_common()}}


def _kernels(trace: Trace, rules: Rules, totals: Sequence[Total], known_ns: int | None) -> list[KernelTime]:
    """The kernels with the most time, each with the spread of its launches where the file has single ones."""
    alone = exposed.by_kernel(trace, rules) if trace.timeline and totals else {}
    found, index = [], dict[str, list[int]]()
    for i, name in enumerate(trace.names):
        index.setdefault(name, []).append(i)
    duration, rows = trace.kernels.duration_ns, intervals.rows_of(trace.kernels.name, len(trace.names))
    for t in totals:
        spread: dict[str, Any] = {}
        if trace.kernels.instances is None:
            us = np.concatenate([duration[rows[i]] for i in index[t.name]]) / 1e3
            keys = ("min_us", "median_us", "max_us", "sigma_us")
            values = (us.min(), np.median(us), us.max(), us.std(ddof=1) if len(us) > 1 else 0.0)
            spread = dict(zip(keys, map(float, values), strict=True))
        launch = trace.launched.get(t.name)
        if launch:
            sizes = {"block": "x".join(map(str, launch.block)), "grid": "x".join(map(str, launch.grid))}
            spread |= {"registers": launch.registers, "shared_bytes": launch.shared_bytes} | sizes
        ns, behind = alone.get(t.name, (None, ""))
        found.append(
            KernelTime(
                name=t.name,
                short_name=short_name(t.name),
                category=rules.category(t.name),
                count=t.count,
                sum_us=t.sum_ns / 1e3,
                us_per_launch=t.sum_ns / t.count / 1e3 if t.count else None,
                share_of_kernel_sum=t.sum_ns / known_ns if known_ns else None,
                exposed_us=None if ns is None else ns / 1e3,
                hidden_behind=short_name(behind) if behind else "",
                **spread,
            )
        )
    return found


def _ranges(trace: Trace) -> tuple[list[RangeTime], list[RangeTime]]:
    """NVTX ranges by label and domain, the longest first, and operators and modules by the device time of their own.

    Host time and count are of the part inside the window; the device time is of what ran there.
    """
    keys, codes = windows.by_label(trace)
    mine, host_ns = windows.on_host(trace, trace.ranges)
    codes = codes[mine]
    counts, sums = (np.bincount(codes, weights, len(keys)).tolist() for weights in (None, host_ns))
    begun = np.full(len(keys), np.iinfo(np.int64).max)
    np.minimum.at(begun, codes, trace.ranges.start_ns[mine])
    origin = (trace.whole or trace).extent_ns[0]
    spent = windows.gpu_time(trace) if trace.timeline else {}
    rows = []
    for key, n, ns, first in zip(keys, counts, sums, begun.tolist(), strict=True):
        if not n:
            continue
        gpu, own = (ns / 1e3 for ns in spent[key]) if key in spent else (None, None)
        domain = trace.domains.get(key[1], "") or None
        rows.append(RangeTime(key[0], domain, n, ns / 1e3, (first - origin) / 1e3, gpu, own))
    told = set(kineto.DOMAINS.values()) if trace.tool == "kineto" else set()
    return (
        sorted((r for r in rows if r.domain not in told), key=lambda r: (-r.host_us, r.name)),
        sorted((r for r in rows if r.domain in told), key=lambda r: (-(r.self_us or 0.0), r.name)),
    )


def _identities(
    times: dict[str, Any], listed: Sequence[CategoryTime], kernel_us: float, total_us: float
) -> list[Identity]:
    per_device: list[DeviceTime] = times.get("per_device", [])
    sides = [(f"device {d.device}: busy + idle = span", d.busy_union_us + d.idle_us, d.span_us) for d in per_device]
    for d in per_device:
        three, name = d.exposed_us + d.overlapped_us + d.idle_us, f"device {d.device}"
        sides.append((f"{name}: exposed + overlapped + idle = span", three, d.span_us))
        sides.append((f"{name}: idle by cause = idle", sum(d.idle_by.values()), d.idle_us))
    if times:
        sides.append(("busy + idle = span", times["busy_union_us"] + times["idle_us"], times["span_us"]))
        sides.append(("kernels of all devices = kernel sum", sum(d.kernel_sum_us for d in per_device), kernel_us))
    shown = sum(c.sum_us for c in listed)
    sides.append(("categories = kernels + copies + fills + opaque graphs", shown, total_us))
    # Sums of doubles of us: a part in 1e12 of the larger side, and half a nanosecond.
    return [Identity(name, a, b, abs(a - b) <= 5e-4 + 1e-12 * max(abs(a), abs(b))) for name, a, b in sides]
