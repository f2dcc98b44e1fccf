"""Tables that a page of lab/write/docs holds a place for: adversaries, kernels beside themselves and on two GPUs.

In: data/arena.toml, the rows that `python -m tests.bench.arena.run` and `python -m tests.bench.bench_aa` wrote, and
those of cards, whose controls are timed beside a second self. Out: Markdown.
"""

from __future__ import annotations

import itertools
import statistics
import tomllib
from collections import Counter
from typing import Literal

import msgspec

from lab.base import devices, files, interval
from lab.base.errors import REPOSITORY
from lab.card.gate import Condition, Gate
from lab.judge import evidence, rules
from lab.row import store
from lab.row.records import Measurement
from lab.study import repeats

ADVERSARIES = REPOSITORY / "data/arena.toml"
ARENA, BESIDE = REPOSITORY / "data/arena.jsonl", REPOSITORY / "data/aa.jsonl"
NOT_RUN = "GPU: not run yet. What holds there has been read and not shown, and its column is empty.\n"
BANDS_US = (0.0, 10.0, 50.0, 250.0, float("inf"))
TURNED = "2026-11-27T143817Z"  # runs from here on let arms take turns at allocating, and start them both ways round


class Trial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One adversary on one device. ratio: its time over the honest control's, None without a number."""

    name: str
    device: Literal["cpu", "cuda"]
    status: str
    message: str
    ratio: float | None
    gets: Literal["no number", "its honest time", "a false number"]
    seconds: float
    gpu: str
    driver: str | None
    torch: str
    commit: str


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One comparison of a kernel with its second self. us: its time; *_pct: the change and its interval.

    word: what evidence and judge make of "kernel_us change < 0 %".
    """

    family: str
    workload: str
    candidate: str
    us: float
    change_pct: float
    low_pct: float
    high_pct: float
    word: str
    gpu: str
    driver: str
    torch: str
    commit: str


def trials() -> list[Trial]:
    """The committed rows of the arena; raises BadInput for a line that is no row."""
    return files.read_lines(ARENA, Trial, "write it with `python -m tests.bench.arena.run --out`")


def comparisons() -> list[Comparison]:
    """The committed rows of kernels beside themselves; raises BadInput for a line that is no row."""
    return files.read_lines(BESIDE, Comparison, "write it with `python -m tests.bench.bench_aa --out`")


def beside_itself(row: Measurement) -> Comparison | None:
    """A control and its second self, judged as two kernels; None where the row has none that was timed."""
    if row.again_samples is None or row.time_us is None or row.metric != "kernel_us":
        return None
    one = msgspec.structs.replace(row, arm="control", again_samples=None)
    pair = (one, msgspec.structs.replace(one, arm="candidate", samples=row.again_samples))
    gate = Gate(require=(Condition("kernel_us", "<", "%", 0.0, "change", row.workload_id),))
    word = rules.judge(gate, evidence.readings(pair, devices.get(row.device))).word
    told = (row.gpu or "", row.driver or "", row.torch or "", row.code)
    change = evidence.change_pct(*pair)
    return change and Comparison(row.family, row.workload_id, row.name, row.time_us, *change, word, *told)


def of_cards(since: str = "") -> list[Comparison]:
    """The controls of all comparisons over placements that profiles/ holds, of runs from `since` on."""
    rows = (row for row in store.rows() if row.run >= since)
    placed = (r for r in rows if r.placements >= interval.PLACEMENTS and r.processes >= evidence.PROCESSES)
    return [found for row in placed if row.arm == "control" and (found := beside_itself(row))]


def adversaries() -> int:
    """How many adversaries of data/arena.toml have a row, on a device of either kind."""
    table = tomllib.loads(ADVERSARIES.read_text(encoding="utf-8"))
    return len({a["name"] for a in table["adversary"]} & {t.name for t in trials()})


def arena() -> str:
    """A sentence for each device; of each adversary where it is known from, what has to catch it, and what it got."""
    table = tomllib.loads(ADVERSARIES.read_text(encoding="utf-8"))
    found = {(t.name, t.device): t for t in trials()}
    lines = []
    for device in sorted({t.device for t in found.values()}):
        of = [t for t in found.values() if t.device == device and t.name in {a["name"] for a in table["adversary"]}]
        where = ", ".join(sorted({t.gpu or "simulated device" for t in of}))
        false = sum(t.gets == "a false number" for t in of)
        at = " and ".join(f"{n} at commit {c}" for c, n in Counter(t.commit for t in of).most_common())
        many = f"{len(of)} of {len(table['adversary'])} adversaries"
        lines.append(f"{where}: {many}, {at}; {false} get a false number.\n")
    lines += [] if any(device == "cuda" for _, device in found) else [NOT_RUN]
    lines += ["| adversary | known from | caught by | simulated device | GPU |", "|---|---|---|---|---|"]
    for a in table["adversary"]:
        got = [found.get((a["name"], device)) for device in ("cpu", "cuda")]
        cells = [f"`{a['name']}` {a['does']}", a["known_from"], table["defences"][a["caught_by"]]]
        cells += [f"{t.gets} ({t.status})" if t else "" for t in got]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)


def beside() -> str:
    """A line for each GPU and band of times: comparisons, false verdicts, intervals that hold zero, the widest."""
    every, turned = comparisons() + of_cards(), of_cards(TURNED)
    lines = [
        "| GPU | a call takes | comparisons | GO or NO-GO | intervals that hold zero | median half-width | widest |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for gpu in sorted({row.gpu for row in every}):
        for low, high in itertools.pairwise(BANDS_US):
            if of := [row for row in every if row.gpu == gpu and low <= row.us < high]:
                said = f"{low:g} to {high:g} us" if high < BANDS_US[-1] else f"{low:g} us and more"
                lines.append(f"| {gpu} | {said} | {_counted(of)} |")
        lines.append(f"| {gpu} | all | {_counted([row for row in every if row.gpu == gpu])} |")
        if of := [row for row in turned if row.gpu == gpu]:
            lines.append(f"| {gpu} | all since arms allocate and start in turn | {_counted(of)} |")
    return "\n".join(lines) + "\n"


def _counted(of: list[Comparison]) -> str:
    called = sum(row.word in ("GO", "NO-GO") for row in of)
    held = sum(row.low_pct <= 0.0 <= row.high_pct for row in of)
    half = [(row.high_pct - row.low_pct) / 2 for row in of]
    return f"{len(of)} | {called} | {held} of {len(of)} | {statistics.median_high(half):.2f} % | {max(half):.2f} %"


def gpus() -> str:
    """A line for each device of which two GPUs compared the same launches: how far the ratios lie apart."""
    lines = [
        "| device | comparisons on two GPUs | median difference | largest | intervals with nothing in common |",
        "|---|--:|--:|--:|--:|",
    ]
    for device in devices.ids():
        if of := repeats.on_two_gpus(device):
            apart = sorted(pair.difference_pct for pair in of)
            figures = f"{statistics.median_high(apart):.2f} % | {apart[-1]:.2f} % | {sum(pair.apart for pair in of)}"
            lines.append(f"| {device} | {len(of)} | {figures} |")
    return "\n".join(lines) + "\n"


PLACES = {"{arena}": arena, "{beside}": beside, "{gpus}": gpus}
