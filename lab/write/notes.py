"""The results in a family's NOTES.md: one table, by card, made from the newest rows by `lab write --notes`.

A figure in prose is true until the next measurement; a table that a command writes, and a test compares, stays true.
A card's lines are of the runs that its verdict stands on (evidence.pairs), the change is the judge's own (the median of
the paired blocks), and beside them stand the card's other arms and the fastest rival of the same run.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lab.base import devices
from lab.base.console import between
from lab.base.errors import REPOSITORY, BadInput
from lab.bench import counters
from lab.card import phases
from lab.check import families
from lab.judge import evidence, verdicts
from lab.place import roofline
from lab.row import store
from lab.row.records import Measurement
from lab.study import composed, own
from lab.trace import stored, windows
from lab.trace.model import NONE, short_name
from lab.trace.summary import summarise
from lab.write import figures

IMPORTED = REPOSITORY / "data" / "imported"

# Between these lines of each kernels/<family>/NOTES.md stands the table.
MARKS = ("<!-- written by lab write --notes -->", "<!-- end -->")
FLOORS = ("<!-- floors by lab write --notes -->", "<!-- end of floors -->")
LLAMA_CPP = ("<!-- llama.cpp by lab write --notes -->", "<!-- end of llama.cpp -->")
EXPECTED = ("<!-- expected by lab write --notes -->", "<!-- end of expected -->")
COUNTERS = ("<!-- counters by lab write --notes -->", "<!-- end of counters -->")
PARTS = ("<!-- parts by lab write --notes -->", "<!-- end of parts -->")
GAPS = ("<!-- gaps by lab write --notes -->", "<!-- end of gaps -->")
HEAD = (
    "Median us of the runs that each verdict stands on. Change: the candidate's, median of the paired blocks. Of",
    "roofline: the datasheet's floor over the candidate's time. Other arms: the card's, and the run's fastest rival.",
    "",
    "| workload | control us | candidate us | change | of roofline | other arms, us |",
    "|---|---|---|---|---|---|",
)


def path(family: str) -> Path:
    """Where a family's notes lie."""
    return families.FOLDER / family / "NOTES.md"


def written(family: str, text: str) -> str:
    """The notes' text with their tables made again; BadInput where the marks of the results are gone."""
    tables = ((FLOORS, floors), (EXPECTED, expected), (LLAMA_CPP, llama_cpp), (PARTS, in_parts), (GAPS, gaps),
              (COUNTERS, counted))  # fmt: skip
    for marks, lines in tables:
        if marks[0] in text:
            text = between(text, marks, lines(family), path(family))
    return between(text, MARKS, table(family), path(family))


def floors(family: str, device_id: str = "h200") -> list[str]:
    """Each part's floor at the measured ceilings, ms, by real shape, in the precision that moves the fewest bytes."""
    parts = importlib.import_module(f"kernels.{family}.cost").parts
    loaded, device = families.load(family), devices.get(device_id)
    shapes = [w for w in loaded.cases.WORKLOADS if w.source]
    precision = min({c.precision for c in loaded.candidates.values() if not c.no_route},
                    key=lambda word: loaded.cost(shapes[0], word).bytes)  # fmt: skip
    lines: list[str] = []
    for w in shapes:
        each = {name: composed.floor_us(device, cost) / 1e3 for name, cost in parts(w, precision).items()}
        if not lines:
            lines = [f"| {precision}, ms | {' | '.join(each)} | sum |", "|---" * (len(each) + 2) + "|"]
        cells = [f"{ms:.2f}" if ms < 100 else f"{ms:.0f}" for ms in (*each.values(), sum(each.values()))]
        lines.append(f"| `{w.id}` | {' | '.join(cells)} |")
    return lines


def expected(family: str) -> list[str]:
    """Of a family that is made of others' kernels: what its cards are expected to show, and what they showed."""
    lines = ["| card, arm | workload | control ms | expected | within | measured |", "|---|---|---|---|---|---|"]
    for card in (card for card in composed.cards() if card.family == family):
        for one in composed.lines(card):
            seen = "-" if one.measured_pct is None else f"{one.measured_pct:+.1f} %" + " outside" * (not one.inside)
            within = f"{one.change_pct:+.1f} % | {one.low_pct:+.1f} to {one.high_pct:+.1f} %"
            what = f"{one.card}, {one.candidate} | `{one.workload}`"
            lines.append(f"| {what} | {one.control_us / 1e3:.2f} | {within} | {seen} |")
    return lines


class Beside(NamedTuple):
    """A step of llama-batched-bench's, and the fastest arm that a row has of the workload."""

    workload: str
    theirs_ms: float
    ours: Measurement | None

    @property
    def ours_ms(self) -> float:
        """Infinite without a row."""
        return ((self.ours and self.ours.time_us) or math.inf) / 1e3


def beside_llama_cpp(family: str, device_id: str) -> list[Beside]:
    """Steps of llama-batched-bench's files of data/imported.

    A file is named llama-batched-bench-MODEL-DEVICE.jsonl, and MODEL is the workload's between the step and npl.
    """
    fastest: dict[str, Measurement] = {}
    for row in store.rows(device_id, family=family):
        before = fastest.get(row.workload_id)
        if row.time_us and (before is None or row.time_us < (before.time_us or math.inf)):
            fastest[row.workload_id] = row
    found = []
    for file in sorted(IMPORTED.glob(f"llama-batched-bench-*-{device_id}.jsonl")):
        model = file.stem.removeprefix("llama-batched-bench-").removesuffix(f"-{device_id}")
        for sample in own.read(file).samples:
            npl, tokens, generated = (int(sample.axes[name]) for name in ("npl", "npp", "ntg"))
            decode = sample.metric == "decode_tps"
            if decode == (generated < tokens / 100):  # a prompt that only fills the cache, and a few steps
                continue
            of = f"decode_{model}_npl{npl}_ctx{tokens}" if decode else f"prefill_{model}_npl{npl}_t{tokens}_ctx0"
            theirs_ms = 1e3 * npl * (1 if decode else tokens) / sample.values[0]
            found.append(Beside(of, theirs_ms, fastest.get(of)))
    return found


def llama_cpp(family: str, device_id: str = "h200") -> list[str]:
    """The steps that llama.cpp's times are there of, beside ours."""
    lines = ["| workload | llama.cpp ms | ours ms | times as fast | arm, run |", "|---|---|---|---|---|"]
    for one in beside_llama_cpp(family, device_id):
        cells = [f"`{one.workload}`", f"{one.theirs_ms:.4g}", "", "", ""]
        if one.ours:
            times = f"{one.theirs_ms / one.ours_ms:.2f}"
            cells[2:] = f"{one.ours_ms:.4g}", times, f"{one.ours.name}, {one.ours.run}"
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def gaps(family: str, device_id: str = "h200") -> list[str]:
    """Of the newest trace of each captured arm and workload: the time of its last replay in which no node ran."""
    found: dict[tuple[str, str], tuple[str, str]] = {}  # the time of the run, and the cells
    for card in (card for card in phases.cards().values() if card.family == family):
        for file in store.found(f"{device_id}/{card.id}/*/trace.parquet"):
            about, trace, run = stored.about(file), stored.load(file), file.parent.name
            labels = {label for label in trace.labels if label.startswith(f"{card.id}/") and label.count("/") == 2}
            for label in sorted(labels):
                _, arm, workload = label.split("/")
                with contextlib.suppress(BadInput):  # an eager arm has no replay
                    step = summarise(windows.by_replay(windows.by_nvtx(trace, f"{label}*"), -1))
                    if not step.gaps:
                        continue
                    longest = step.gaps[0]
                    cells = f"{step.kernel_count:,} | {step.span_us:,.0f} | {step.idle_us:.1f} | {longest.us:.1f} | "
                    cells += f"{longest.after}, {longest.before} | {run}"
                    key = about[arm], workload
                    found[key] = max(found.get(key, ("", "")), (run, cells))
    return [
        "| arm | workload | kernels | step us | idle us | longest gap us | behind, ahead of | trace |",
        "|---|---|---|---|---|---|---|---|",
        *(f"| {arm} | `{workload}` | {cells} |" for (arm, workload), (_, cells) in sorted(found.items())),
    ]


def in_parts(family: str, device_id: str = "h200") -> list[str]:
    """Of each workload's fastest traced arm: a captured step by its parts (composed.by_part), and times their floor."""
    cost, device = importlib.import_module(f"kernels.{family}.cost"), devices.get(device_id)
    loaded, known = families.load(family), {w.id for w in families.load(family).cases.WORKLOADS}
    found: dict[str, tuple[float, str]] = {}  # the step's us, and the cells
    heads: dict[str, str] = {}
    for card in (card for card in phases.cards().values() if card.family == family):
        for file in store.found(f"{device_id}/{card.id}/*/trace.parquet"):
            about, trace = stored.about(file), stored.load(file)
            every = {tuple(label.split("/")[:3]) for label in trace.labels if label.startswith(f"{card.id}/")}
            for _, arm, workload in sorted(every):
                steps, name = f"{card.id}/{arm}/{workload}/step *", about[arm]
                captured = (windows.by_nvtx(trace, steps).kernels.graph != NONE).any()
                if name not in loaded.candidates or workload not in known or not captured:
                    continue
                whole = composed.by_part(trace, steps, family, workload)
                if whole is None or whole.whole >= found.get(workload, (math.inf, ""))[0]:
                    continue
                costs = cost.parts(loaded.workload(workload), loaded.candidates[name].precision)
                floors_us = {part: composed.floor_us(device, of) for part, of in costs.items()}
                us = {part: whole.by_category()[part].value for part in costs if not part.endswith(" products")}
                heads |= {part: f"{part} us | x floor" for part in us}
                times = [us[part] / (floors_us[part] + floors_us.get(f"{part} products", 0.0)) for part in us]
                cells = [f"{one:,.0f} | {x:.2f}" for one, x in zip(us.values(), times, strict=True)]
                cells += [f"{whole.whole - sum(us.values()):,.0f}", f"{whole.whole / sum(floors_us.values()):.2f}"]
                parts = " | ".join((name, f"{whole.whole:,.0f}", *cells, file.parent.name))
                found[workload] = whole.whole, parts
    return [
        f"| workload | arm | step us | {' | '.join(heads.values())} | small, idle us | step x floor | trace |",
        "|---" * (6 + 2 * len(heads)) + "|",
        *(f"| `{workload}` | {cells} |" for workload, (_, cells) in sorted(found.items())),
    ]


def counted(family: str, device_id: str = "h200") -> list[str]:
    """Of the newest counters of each call of many launches: what binds its kernels, alone and from a cold L2."""
    lines = [
        "| arm | workload | kernel | launches | us each | DRAM | tensor | issue | what binds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (arm, workload), rows in sorted(counters.newest(device_id).items()):
        if rows[0].family != family or len(rows) == 1:
            continue
        for row, launches in counters.typical(rows):
            shares = " | ".join(f"{share or 0:.0f} %" for share in (row.dram_pct, row.tensor_pct, row.issue_pct))
            cells = f"`{short_name(row.kernel)}` | {launches} | {row.duration_us:.1f} | {shares}"
            lines.append(f"| {arm} | `{workload}` | {cells} | {counters.bound(row)} |")
    return lines


def table(family: str) -> list[str]:
    """The lines of the table: each measured card of the family, each of its workloads."""
    lines = list(HEAD)
    for card in phases.cards().values():
        if card.family == family:
            for device_id in store.measured_devices(card.id):
                lines += _card(card, devices.get(device_id))
    return lines


def _card(card: phases.Card, device: devices.Device) -> list[str]:
    peers, lines, runs = set(families.load(card.family).peers), [], set()
    for workload, rows in figures.judged_runs(card, device.id).items():
        arms = {r.name: r for r in rows}
        control, candidate = arms.get(card.control), arms.get(card.candidate)
        if candidate is None:
            continue
        right = [r for r in rows if r.status == "ok"]
        others = [r for r in right if r.name in card.beside]
        rivals = [r for r in right if r.name in peers - {card.control, card.candidate, *card.beside}]
        others += sorted(rivals, key=lambda r: r.own_us or math.inf)[:1]
        by_block, share = evidence.change_pct(control, candidate), roofline.fraction_of(device, candidate)
        cells = [f"`{workload}`", _us(control), _us(candidate), "" if by_block is None else f"{by_block[0]:+.1f} %"]
        cells += ["" if share is None else f"{100 * share:.0f} %", ", ".join(f"{r.name} {_us(r)}" for r in others)]
        lines.append("| " + " | ".join(cells) + " |")
        runs.add(candidate.run)
    if not lines:
        return []
    word = verdicts.judge_measured(card, device.id).verdict.word
    head = f"**{card.id}: {word}** on {device.id}, {card.candidate} against {card.control}, {_runs(runs)}"
    if card.measure.timer == "host":
        head += ", us of the host"
    return [f"| {head} | | | | | |", *lines]


def _us(row: Measurement | None) -> str:
    """The median, or the status of an arm that has none."""
    if row is None:
        return ""
    us = row.own_us
    if us is None:
        return row.status
    return f"{us:,.0f}" if us >= 1000 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def _runs(runs: Iterable[str]) -> str:
    """ "run 2026-11-22T182122Z" or "runs 2026-11-22T182122Z, 220039Z": the day once."""
    shown, day = [], ""
    for run in sorted(runs):
        date, _, time = run.partition("T")
        shown.append(time if date == day else run)
        day = date
    return ("run " if len(shown) == 1 else "runs ") + ", ".join(shown)
