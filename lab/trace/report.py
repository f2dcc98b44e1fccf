"""The summary of a trace as text, and the window that the command line's arguments choose."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from lab.base.errors import BadInput

if TYPE_CHECKING:
    from pathlib import Path

    from lab.trace.model import Trace
    from lab.trace.summary import KernelTime, Summary

WIDTH = 100  # of the report's tables
UNITS_US = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}


def summaries_of(arguments: Namespace, file: Path) -> list[tuple[Trace, Summary]]:
    """The window and the summary of each trace in a file; raises BadInput for arguments that do not go together."""
    from lab.trace import categories
    from lab.trace.files import read_all
    from lab.trace.summary import summarise

    for flag in ("steps", "tokens"):
        value = getattr(arguments, flag)
        if value is not None and not 0 < value < float("inf"):
            raise BadInput(f"--{flag}", f"{value:g} is no count", "give a number above zero")
    if arguments.top < 0:
        raise BadInput("--top", f"{arguments.top}", "give 0 or more")
    rules = categories.load(arguments.rules, arguments.rules_only)
    parts = [windowed(trace, arguments) for trace in read_all(file, arguments.unpack * 1_000_000)]
    return [(part, summarise(part, rules, arguments.steps, arguments.tokens, arguments.top)) for part in parts]


def render_ranks(found: Sequence[Summary]) -> str:
    """Several files, a line each: the ranks of one run, by the rank that each says it is."""
    rows = []
    for s in sorted(found, key=lambda s: -1 if s.rank is None else s.rank):
        shared = next((c for c in s.categories if c.name == "collective"), None)
        both = (shared.sum_us, shared.exposed_us) if shared else (0.0, 0.0)
        times = (s.span_us, s.busy_union_us, s.idle_us, *both)
        rows.append((s.source, "-" if s.rank is None else str(s.rank), *(_us(us, 1) for us in times)))
    head = ["file", "rank", "span us", "busy", "idle", "collectives", "exposed"]
    spans = [s.span_us for s in found if s.span_us]
    said = f"spans differ by {max(spans) / min(spans) - 1:.1%}" if spans else "no file has a timeline"
    return "\n".join([*table(head, rows), said])


def windowed(trace: Trace, arguments: Namespace) -> Trace:
    """The window of a trace that the arguments choose; the whole trace when they choose none."""
    from lab.trace import steady, windows

    trace = windows.only(trace, **{k: getattr(arguments, k, None) for k in ("device", "stream", "process")})
    for flag, needs in (("nth", "nvtx"), ("graph", "replay")):
        if getattr(arguments, flag) is not None and getattr(arguments, needs) is None:
            raise BadInput(f"--{flag}", f"needs --{needs}", f"add --{needs}")
    if arguments.nvtx is not None:
        return windows.by_nvtx(trace, arguments.nvtx, arguments.nth)
    if arguments.time is not None:
        return windows.by_time(trace, *_interval(arguments.time))
    if arguments.replay is not None:
        return windows.by_replay(trace, arguments.replay, arguments.graph)
    asked = getattr(arguments, "step", None)
    return steady.steady_decode(trace, asked) if arguments.steady or asked else trace


def _interval(text: str) -> tuple[float, float]:
    """`100:250`, `2ms:3.5ms`: two times in us."""
    found = re.fullmatch(r"([\d.]+)([a-z]*):([\d.]+)([a-z]*)", text.strip())
    try:
        if found is None:
            raise ValueError
        return float(found[1]) * UNITS_US[found[2] or "us"], float(found[3]) * UNITS_US[found[4] or "us"]
    except (ValueError, KeyError):
        raise BadInput("--time", f'"{text}"', "give START:END, e.g. 100us:2.5ms; units ns, us, ms, s") from None


def render(s: Summary) -> str:
    """The summary for a person, at most WIDTH columns wide."""
    version = f" {s.tool_version}" if s.tool_version else ""
    schema = f", schema {s.schema_version}" if s.schema_version else ""
    lines = [f"{s.source}: {s.tool}{version}{schema}, CUDA graphs: {s.graph_mode}, {s.window}"]
    lines += [f"GPU {g.device}: {g.name or 'not named in the file'}" for g in s.gpus]
    lines += ["", *_times(s), ""]
    per = {f"us/{s.unit}": s.steps, "us/token": s.tokens}
    shown = [title for title, count in per.items() if count]
    timed = s.span_us is not None
    but = () if timed else ("exposed us", "<hidden behind")
    head = ["category", "count", "us", "us/launch", "exposed us", "of busy", "of kernels", *shown, "<hidden behind"]
    lines += table(head, [
        (c.name, str(c.count), f"{c.sum_us:,.1f}", _us(c.us_per_launch), _us(c.exposed_us, 1),
         _percent(c.share_of_busy), _percent(c.share_of_kernel_sum),
         *(_us(us) for us in (c.us_per_step, c.us_per_token) if us is not None),
         next(iter(c.behind), ""))
        for c in s.categories
    ], but)  # fmt: skip
    if s.top_kernels:
        lines += ["", *table(["kernel", "<category", "count", "us", "us/launch", "exposed us", "of kernels"], [
            (k.short_name, k.category, str(k.count), f"{k.sum_us:,.1f}", _us(k.us_per_launch), _us(k.exposed_us, 1),
             _percent(k.share_of_kernel_sum))
            for k in s.top_kernels
        ], but)]  # fmt: skip
    if any(k.median_us is not None or k.registers is not None for k in s.top_kernels):
        head = ["of a launch, us", "min", "median", "max", "sigma", "registers", "shared KB", "block", "grid"]
        lines += ["", *table(head, [
            (k.short_name, *(_us(us) for us in (k.min_us, k.median_us, k.max_us, k.sigma_us)), *_launched(k))
            for k in s.top_kernels
        ])]  # fmt: skip
    if s.roofline:
        head = ["roofline", "<shape", "launches", "us", "TFLOP/s", "GB/s", "FLOP/byte", "of roof", "<bound"]
        lines += ["", *table(head, [
            (p.short_name, p.shape, str(p.launches), _us(p.us, 2), _us(p.tflop_s, 1), _us(p.gb_s, 0),
             _us(p.flop_per_byte, 1), _percent(p.of_roof), p.bound)
            for p in s.roofline
        ]), *s.roofline_of.split("; ")]  # fmt: skip
    if timed:
        lines += ["", *_idle(s)]
    for title, ranges in (("NVTX range", s.nvtx), ("operator or module", s.operators)):
        if ranges:
            spans = [
                (n.name, str(n.count), f"{n.host_us:,.1f}", _us(n.gpu_us, 1), _us(n.self_us, 1), _us(n.first_us, 1))
                for n in ranges
            ]
            lines += ["", *table([title, "count", "host us", "GPU us", "of its own", "first at us"], spans)]
    if s.api:
        calls = [(c.name, str(c.count), f"{c.sum_us:,.1f}", _us(c.median_us), _us(c.max_us)) for c in s.api[:8]]
        lines += ["", *table(["API call", "count", "host us", "median", "max"], calls)]
    if s.launch_delay_us:
        d = s.launch_delay_us
        what = "us from a call to its kernel"
        lines += ["", f"launch delay: median {d['median']:,.1f}, 95 % {d['p95']:,.1f}, longest {d['max']:,.1f} {what}"]
    lines.append("")
    for i in s.identities:
        word = "holds" if i.holds else "DOES NOT HOLD"
        lines.append(f"{word}: {i.identity}: {i.left_us:,.3f} and {i.right_us:,.3f} us")
    lines += [f"refused: {text}" for text in s.refused]
    return "\n".join([*lines, *(f"warning: {text}" for text in s.warnings)])


def _launched(k: KernelTime) -> tuple[str, ...]:
    if k.registers is None or k.shared_bytes is None:
        return "-", "-", "-", "-"
    return str(k.registers), f"{k.shared_bytes / 1024:.1f}", k.block, k.grid


def _idle(s: Summary) -> list[str]:
    """Each device's exposed, overlapped and idle time, the causes, and the longest gaps."""
    rows = [
        (f"device {d.device}", *(f"{us:,.1f}" for us in (d.span_us, d.exposed_us, d.overlapped_us, d.idle_us)))
        for d in s.per_device
    ]
    lines = table(["us by device", "span", "exposed", "overlapped", "idle"], rows)
    found = [(d, cause, us) for d in s.per_device for cause, us in d.idle_by.items()]
    if found:
        causes = [(f"device {d.device}: {cause}", f"{us:,.1f}", _part(us, d.idle_us)) for d, cause, us in found]
        lines += ["", *table(["idle because", "us", "of idle"], causes)]
    if s.gaps:
        gaps = [(g.after, g.before, str(g.device), f"{g.start_us:,.1f}", f"{g.us:,.1f}", g.cause) for g in s.gaps]
        lines += ["", *table(["longest gaps: after", "<before", "GPU", "at us", "us", "<mostly"], gaps)]
    return lines


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], but: Collection[str] = ()) -> list[str]:
    """Lines of a table at most WIDTH wide; texts, in the first column and under "<TITLE", to the left, and cut.

    but: titles of columns that are left out.
    """
    titles, *rows = ([c for c, title in zip(row, titles, strict=True) if title not in but] for row in (titles, *rows))
    sides = ["<" if i == 0 or t.startswith("<") else ">" for i, t in enumerate(titles)]
    cells = [[t.removeprefix("<") for t in titles], *rows]
    width = [max(len(row[i]) for row in cells) for i in range(len(titles))]
    texts = [i for i, side in enumerate(sides) if side == "<"]
    while sum(width) + 2 * (len(width) - 1) > WIDTH and max(width[i] for i in texts) > 8:
        width[max(texts, key=lambda i: width[i])] -= 1
    return [
        "  ".join(f"{_cut(c, w):{at}{w}}" for c, w, at in zip(row, width, sides, strict=True)).rstrip() for row in cells
    ]


def _times(s: Summary) -> list[str]:
    if s.span_us is None:
        return [f"kernels: {s.kernel_count}, {s.kernel_sum_us:,.1f} us summed"]
    busy, idle, union, span = s.busy_union_us or 0.0, s.idle_us or 0.0, s.kernel_union_us or 0.0, s.span_us
    rows = [
        ("span", span, "first activity to last, or the window"),
        ("busy", busy, f"{_part(busy, span)} of span; kernels, copies, fills, opaque graphs"),
        ("idle", idle, f"{_part(idle, span)} of span"),
        ("kernels, union", union, f"{_part(union, span)} of span; {s.kernel_count} kernels"),
        ("kernels, sum", s.kernel_sum_us, "durations added up"),
        ("overlap", s.overlap_us, "summed less busy"),
    ]
    if len(s.per_device) > 1:
        every = sum(d.busy_union_us for d in s.per_device), sum(d.idle_us for d in s.per_device)
        rows.insert(3, ("devices, busy", every[0], f'of {len(s.per_device)} added up, of which "of busy" is a share'))
        rows.insert(4, ("devices, idle", every[1], "added up"))
    if s.graph_launches:
        text = f"{s.graph_launches} graph launches, {s.graph_launches_truncated} truncated"
        rows.append(("opaque graphs, sum", s.opaque_graph_us, text))
    lines = [f"{name:20}{us:16,.1f} us  {text}" for name, us, text in rows]
    for t in s.per_stream[:12] if len(s.per_stream) > 1 else ():
        lines.append(
            f"device {t.device} process {t.process} stream {t.stream}: {t.union_us:,.1f} us busy, "
            f"{t.overlap_us:,.1f} us overlap within, {t.concurrent_us:,.1f} us beside other streams"
        )
    return lines


def _part(us: float, whole: float) -> str:
    return f"{us / whole:.1%}" if whole else "-"


def _us(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
