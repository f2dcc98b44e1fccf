"""The summary of a trace as text, and the window that the command line's arguments choose."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from lab.base.errors import BadInput

if TYPE_CHECKING:
    from lab.trace.model import Trace
    from lab.trace.summary import Summary

UNITS_US = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}


def summary_of(arguments: Namespace) -> Summary:
    """The summary that the arguments ask for; raises BadInput for arguments that do not go together."""
    from lab.trace import categories
    from lab.trace.files import read
    from lab.trace.summary import summarise

    for flag in ("steps", "tokens"):
        value = getattr(arguments, flag)
        if value is not None and not 0 < value < float("inf"):
            raise BadInput(f"--{flag}", f"{value:g} is no count", "give a number above zero")
    if arguments.top < 0:
        raise BadInput("--top", f"{arguments.top}", "give 0 or more")
    trace = windowed(read(arguments.file), arguments)
    return summarise(trace, categories.load(arguments.rules), arguments.steps, arguments.tokens, arguments.top)


def windowed(trace: Trace, arguments: Namespace) -> Trace:
    """The window of a trace that the arguments choose; the whole trace when they choose none."""
    from lab.trace import steady, windows

    for flag, needs in (("nth", "nvtx"), ("graph", "replay")):
        if getattr(arguments, flag) is not None and getattr(arguments, needs) is None:
            raise BadInput(f"--{flag}", f"needs --{needs}", f"add --{needs}")
    if arguments.nvtx is not None:
        return windows.by_nvtx(trace, arguments.nvtx, arguments.nth)
    if arguments.time is not None:
        return windows.by_time(trace, *_interval(arguments.time))
    if arguments.replay is not None:
        return windows.by_replay(trace, arguments.replay, arguments.graph)
    return steady.steady_decode(trace) if arguments.steady else trace


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
    """The summary for a person."""
    version = f" {s.tool_version}" if s.tool_version else ""
    schema = f", schema {s.schema_version}" if s.schema_version else ""
    lines = [f"{s.source}: {s.tool}{version}{schema}, CUDA graphs: {s.graph_mode}, {s.window}"]
    lines += [f"GPU {g.device}: {g.name or 'not named in the file'}" for g in s.gpus]
    lines += ["", *_times(s), ""]
    head = {"category": "<32", "count": ">9", "us": ">14", "us/launch": ">12", "of busy": ">10", "of kernels": ">12"}
    per = {"us/step": s.steps, "us/token": s.tokens}
    lines += _table(head | {title: ">12" for title, count in per.items() if count}, [
        (_cut(c.name, 31), str(c.count), f"{c.sum_us:,.1f}", _us(c.us_per_launch), _percent(c.share_of_busy),
         _percent(c.share_of_kernel_sum), *(_us(us) for us in (c.us_per_step, c.us_per_token) if us is not None))
        for c in s.categories
    ])  # fmt: skip
    if s.top_kernels:
        head = {"kernel": "<44", "category": "<20", "count": ">9", "us": ">14", "us/launch": ">12", "of kernels": ">12"}
        lines += ["", *_table(head, [
            (_cut(k.short_name, 43), _cut(k.category, 19), str(k.count), f"{k.sum_us:,.1f}", _us(k.us_per_launch),
             _percent(k.share_of_kernel_sum))
            for k in s.top_kernels
        ])]  # fmt: skip
    if s.nvtx:
        rows = [(_cut(n.name, 63), str(n.count), f"{n.host_us:,.1f}") for n in s.nvtx]
        lines += ["", *_table({"NVTX range": "<64", "count": ">9", "host us": ">16"}, rows)]
    lines.append("")
    for i in s.identities:
        word = "holds" if i.holds else "DOES NOT HOLD"
        lines.append(f"{word}: {i.identity}: {i.left_us:,.3f} and {i.right_us:,.3f} us")
    lines += [f"refused: {text}" for text in s.refused]
    return "\n".join([*lines, *(f"warning: {text}" for text in s.warnings)])


def _table(columns: Mapping[str, str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table. columns: title -> alignment and width."""
    specs = columns.values()
    return ["".join(f"{cell:{spec}}" for cell, spec in zip(row, specs, strict=True)) for row in (columns, *rows)]


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
    if s.graph_launches:
        text = f"{s.graph_launches} graph launches, {s.graph_launches_truncated} truncated"
        rows.append(("opaque graphs, sum", s.opaque_graph_us, text))
    lines = [f"{name:20}{us:16,.1f} us  {text}" for name, us, text in rows]
    for d in s.per_device if len(s.per_device) > 1 else ():
        busy_of = f"busy {d.busy_union_us:,.1f} us of {d.span_us:,.1f} us ({_part(d.busy_union_us, d.span_us)})"
        lines.append(f"device {d.device}: {busy_of}, idle {d.idle_us:,.1f} us, kernels {d.kernel_union_us:,.1f} us")
    for t in s.per_stream[:12] if len(s.per_stream) > 1 else ():
        lines.append(
            f"device {t.device} process {t.process} stream {t.stream}: {t.union_us:,.1f} us busy, "
            f"{t.overlap_us:,.1f} us overlap within, {t.concurrent_us:,.1f} us beside other streams"
        )
    return lines


def _part(us: float, whole: float) -> str:
    return f"{us / whole:.1%}" if whole else "-"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
