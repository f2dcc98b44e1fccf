"""One trace as one HTML file that needs nothing else: a timeline to zoom, and the tables of `lab trace`, which sort.

The timeline holds the longest ROWS rows, and says how many more there are; names reach the page as JSON and become text
nodes, so that no name is ever markup.
"""

from __future__ import annotations

import html
import json
from pathlib import Path

import numpy as np

from lab.base.errors import BadInput
from lab.trace import categories
from lab.trace.model import Trace, labels, short_name
from lab.trace.summary import Summary
from lab.write.objects import html_table

ROWS = 20_000
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#999999")
STYLE = """body{font:14px system-ui,sans-serif;margin:1.5em;max-width:78em}table{border-collapse:collapse}
td,th{padding:.15em .8em .15em 0;text-align:left;font-variant-numeric:tabular-nums}th{cursor:pointer}
td{border-top:1px solid #ddd}canvas{width:100%;border:1px solid #999}.w{color:#a33}"""
SCRIPT = Path(__file__).with_name("templates") / "trace.js"


def page(trace: Trace, s: Summary) -> str:
    """The page of a trace and its summary; raises BadInput without a timeline or without device activity."""
    trace.require_timeline("timeline")
    if not any(map(len, trace.activities)):
        raise BadInput(trace.source, "has no device activity", "choose another window")
    data, left_out = _timeline(trace)
    script = json.dumps(data, ensure_ascii=True).replace("<", "\\u003c")
    parts = [f"<h1>{html.escape(s.source)}</h1><p>{html.escape(f'{s.tool} {s.tool_version}, {s.window}')}</p>"]
    parts += [f'<p class="w">{html.escape(text)}</p>' for text in (*s.refused, *s.warnings)]
    parts.append(
        "<p>Wheel: zoom; drag: move; double click: all. Click a head to sort.</p><canvas id=t></canvas><p id=s></p>"
    )
    if left_out:
        parts.append(f"<p>The longest {ROWS:,} rows are drawn; {left_out:,} shorter ones are not.</p>")
    for title, head, rows in _tables(s):
        if rows:
            parts.append(f"<h2>{title}</h2>{html_table(head, rows)}")
    body = "".join(parts)
    start = f"<!doctype html><meta charset=utf-8><title>{html.escape(s.source)}</title><style>{STYLE}</style>"
    return f"{start}{body}<script id=d type=application/json>{script}</script><script>{SCRIPT.read_text()}</script>"


def _timeline(trace: Trace) -> tuple[dict[str, object], int]:
    texts, codes = labels(trace)
    columns = ("start_ns", "end_ns", "device", "process", "stream")
    start, end, device, process, stream = map(trace.column, columns)
    code = np.concatenate(codes)
    keep = np.sort(np.argsort(start - end, kind="stable")[:ROWS])
    origin = int(start.min())
    keys = sorted(set(zip(device[keep].tolist(), process[keep].tolist(), stream[keep].tolist(), strict=True)))
    lane = {key: i for i, key in enumerate(keys)}
    used, name = np.unique(code[keep], return_inverse=True)
    rules = categories.default()
    kinds = {k: i for i, k in enumerate(dict.fromkeys(rules.category(texts[i]) for i in used.tolist()))}
    rows = []
    for i, n in zip(keep.tolist(), name.tolist(), strict=True):
        at, us = (int(start[i]) - origin) / 1e3, int(end[i] - start[i]) / 1e3
        rows.append([at, us, n, lane[int(device[i]), int(process[i]), int(stream[i])]])
    data = {
        "rows": rows,
        "names": [short_name(texts[i]) if i < len(trace.names) else texts[i] for i in used.tolist()],
        "kind": [kinds[rules.category(texts[i])] for i in used.tolist()],
        "lanes": [f"GPU {d} process {p} stream {q}" for d, p, q in keys],
        "colours": COLOURS,
        "span": (int(end.max()) - origin) / 1e3,
    }
    return data, len(start) - len(keep)


def _tables(s: Summary) -> list[tuple[str, list[str], list[list[object]]]]:
    kernels: list[list[object]] = [
        [k.short_name, k.category, k.count, k.sum_us, k.us_per_launch, k.min_us, k.median_us, k.max_us, k.sigma_us,
         k.exposed_us, k.hidden_behind, k.registers, k.shared_bytes, k.block, k.grid] for k in s.top_kernels
    ]  # fmt: skip
    timed = ["count", "us", "us/launch"]
    return [
        ("By category", ["category", *timed, "exposed us", "hidden us", "hidden behind"],
         [[c.name, c.count, c.sum_us, c.us_per_launch, c.exposed_us, c.hidden_us, ", ".join(list(c.behind)[:3])]
          for c in s.categories]),
        ("By kernel", ["kernel", "category", *timed, "min", "median", "max", "sigma", "exposed us", "hidden behind",
                       "registers", "shared bytes", "block", "grid"], kernels),
        ("Roofline: " + s.roofline_of, ["kernel", "shape", "launches", "us", "TFLOP/s", "GB/s", "FLOP/byte",
                                        "floor us", "of the roof", "bound"],
         [[p.short_name, p.shape, p.launches, p.us, p.tflop_s, p.gb_s, p.flop_per_byte, p.floor_us, p.of_roof, p.bound]
          for p in s.roofline]),
        ("By device", ["device", "span us", "exposed", "overlapped", "idle"],
         [[d.device, d.span_us, d.exposed_us, d.overlapped_us, d.idle_us] for d in s.per_device]),
        ("Idle because", ["device", "cause", "us"],
         [[d.device, c, us] for d in s.per_device for c, us in d.idle_by.items()]),
        ("The longest gaps", ["device", "at us", "us", "after", "before", "mostly"],
         [[g.device, g.start_us, g.us, g.after, g.before, g.cause] for g in s.gaps]),
        ("Ranges, operators and modules", ["name", "domain", "count", "host us", "GPU us", "of its own"],
         [[r.name, r.domain or "", r.count, r.host_us, r.gpu_us, r.self_us] for r in (*s.nvtx, *s.operators)]),
        ("API calls", ["call", "count", "us", "median", "max"],
         [[c.name, c.count, c.sum_us, c.median_us, c.max_us] for c in s.api]),
    ]  # fmt: skip
