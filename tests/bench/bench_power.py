"""How often is a verdict wrong, and what can a measurement see: `python -m tests.bench.bench_power [--write]`.

Answered by the judge itself over simulated noise, a minute or two; bench_aa.py asks the same of kernels on a GPU.

`simulate` makes rows as the bench does, with a change that is known and noise of one kind, and has evidence and judge
decide them. Each comparison is judged three times: with no effect against "change < 0", with a change just on the wrong
side of "change <= -5 %", and with a change of -3 % against "change < 0". The noise is multiplicative and has mean zero
on logarithms, so that the change is the ratio of the arms' means over placements. A comparison has the fewest
placements and blocks that the bench takes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lab.base import devices, files, interval
from lab.base.console import between, table
from lab.base.errors import REPOSITORY
from lab.bench import sampling
from lab.card.gate import Condition, Gate
from lab.judge import evidence, rules
from lab.row import samples
from lab.row.records import Clocks, Measurement

FILE = REPOSITORY / "data" / "false_go.csv"
PAGE = REPOSITORY / "lab" / "write" / "docs" / "wrong.md"
MARKS = ("<!-- written by python -m tests.bench.bench_power --write -->", "<!-- end -->")
COMPARISONS, SEED = 2000, 20261123
BLOCKS = 3  # of a placement
LINE_PCT, BESIDE_PCT, EFFECT_PCT = -5.0, -4.99, -3.0
OWN = 0.003  # standard deviation from block to block where the noise is of placements
RESAMPLES = 1000
HIGHEST_MHZ, CAPPED_MHZ = 1980, 1886  # an H200's clock, and one 5 % below

Draw = Any
"""numpy.random.Generator"""


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate every kind of noise and print what came of it; with --write keep it."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_power", description=__doc__)
    parser.add_argument("--comparisons", type=int, default=COMPARISONS, help=f"of each kind (default {COMPARISONS})")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--write", action="store_true", help="keep the table: data/false_go.csv and its page")
    arguments = parser.parse_args(argv)
    if arguments.comparisons < 1:
        parser.error(f"--comparisons {arguments.comparisons} show nothing")
    lines = [simulate(name, arguments.comparisons, arguments.seed) for name in NOISES]
    if arguments.write:
        write(lines)
    print(render(lines))
    return 0


def _normal(draw: Draw, sd: float, blocks: int = 1) -> Any:
    return draw.normal(0.0, sd, (3, interval.PLACEMENTS, blocks))


def _placement(draw: Draw, sd: float) -> Any:
    return _normal(draw, sd) + _normal(draw, OWN, BLOCKS)


def _walk(draw: Draw, correlation: float, sd: float, blocks: int) -> Any:
    """A first-order autoregression [3, placements, blocks]: within a placement, or, with all its blocks, across."""
    runs = 3 * interval.PLACEMENTS * BLOCKS // blocks
    steps = draw.normal(0.0, sd, (runs, blocks))
    for i in range(1, blocks):
        steps[:, i] = correlation * steps[:, i - 1] + math.sqrt(1 - correlation**2) * steps[:, i]
    return steps.reshape(3, interval.PLACEMENTS, BLOCKS)


def _drift(draw: Draw, sd: float) -> Any:
    """A random walk that all arms share, with this deviation at its end."""
    count = interval.PLACEMENTS * BLOCKS
    return draw.normal(0.0, sd / math.sqrt(count), count).cumsum().reshape(interval.PLACEMENTS, BLOCKS)


def _modes(draw: Draw, gap: float, share: float, arms: Sequence[int]) -> Any:
    """Placements of these arms (0 and 1 are the control and its second self) in one of two modes."""
    slow = draw.random((3, interval.PLACEMENTS, 1)) < share
    chosen = [[[arm in arms]] for arm in range(3)]
    return gap * (slow - share) * chosen


def _candidate(draw: Draw, sd: float) -> Any:
    noise = _normal(draw, 0.001, BLOCKS)
    noise[2] += draw.normal(0.0, sd, (interval.PLACEMENTS, 1)) + draw.normal(0.0, sd, (interval.PLACEMENTS, BLOCKS))
    return noise


def _heavy(draw: Draw, sd: float, blocks: int = BLOCKS) -> Any:
    return sd * draw.standard_t(3, (3, interval.PLACEMENTS, blocks))


def _last(draw: Draw, gap: float, sd: float) -> Any:
    """Who allocates last is faster; the arms take turns at that as on the bench."""
    noise = _placement(draw, sd)
    turns = sampling.orders(("0", "1", "2"), random.Random(int(draw.integers(1 << 32))))
    for number, order in enumerate(itertools.islice(turns, interval.PLACEMENTS)):
        noise[int(order[-1]), number] -= gap
    return noise


def _held(draw: Draw) -> Any:
    """Clocks [placements, blocks] under a cap that comes and goes, MHz."""
    return draw.integers(CAPPED_MHZ, HIGHEST_MHZ, (interval.PLACEMENTS, BLOCKS), endpoint=True)


class Noise(NamedTuple):
    """One kind of noise: of log times [control, its second self, candidate][placements][blocks].

    promised: whether the targets hold under it; powered: whether an effect of 3 % has to be seen too; bound: whether
    intervals are wider than they need be, for all of it is taken for chance. held: the clock at which a cap held an
    H200's multiprocessors in each block, MHz: the control takes longer by all that it can cost, which nothing in its
    times tells from an effect. by_block: whether the rows have these clocks, or the lowest alone.
    """

    says: str
    of: Callable[[Draw], Any]
    promised: bool = True
    powered: bool = False
    bound: bool = False
    held: Callable[[Draw], Any] | None = None
    by_block: bool = False


NOISES: dict[str, Noise] = {
    "iid": Noise("1 % from block to block", lambda d: _normal(d, 0.01, BLOCKS), powered=True),
    "ar1": Noise("1 %, correlated by 0.9 within a placement", lambda d: _walk(d, 0.9, 0.01, BLOCKS), powered=True),
    "drift": Noise(
        "5 % of drift that the arms share", lambda d: _drift(d, 0.05) + _normal(d, OWN, BLOCKS), powered=True
    ),
    "drift-20": Noise(
        "20 % of drift that the arms share", lambda d: _drift(d, 0.2) + _normal(d, OWN, BLOCKS), powered=True
    ),
    "placement-0.5": Noise("0.5 % from placement to placement", lambda d: _placement(d, 0.005), powered=True),
    "placement-1": Noise("1 % from placement to placement", lambda d: _placement(d, 0.01), powered=True),
    "placement-1.5": Noise("1.5 % from placement to placement", lambda d: _placement(d, 0.015)),
    "placement-2": Noise("2 % from placement to placement", lambda d: _placement(d, 0.02)),
    "bimodal": Noise(
        "the control in two modes 4 % apart", lambda d: _modes(d, 0.04, 0.5, (0, 1)) + _normal(d, OWN, BLOCKS)
    ),
    "candidate": Noise("the candidate alone, 2 % by placement and block", lambda d: _candidate(d, 0.02)),
    "heavy": Noise(
        "heavy tails (Student's t, 3 degrees): 0.5 % by placement, 1 % by block",
        lambda d: _heavy(d, 0.005, 1) + _heavy(d, 0.01),
    ),
    "mixture": Noise(
        "drift 5 %, placements 1 %, the control in two modes 3 % apart, heavy tails 0.5 %",
        lambda d: _drift(d, 0.05) + _normal(d, 0.01) + _modes(d, 0.03, 0.5, (0, 1)) + _heavy(d, 0.005),
    ),
    "last": Noise(
        "who allocates last 1 % faster, 0.5 % from placement to placement",
        lambda d: _last(d, 0.01, 0.005),
        powered=True,
        bound=True,
    ),
    "cap": Noise(
        "a power cap that slows the control alone by 5 %",
        lambda d: _normal(d, OWN, BLOCKS),
        bound=True,
        held=lambda d: d.integers(CAPPED_MHZ, CAPPED_MHZ, (interval.PLACEMENTS, BLOCKS), endpoint=True),
    ),
    "cap-blocks": Noise(
        "the same by 0 to 5 %, and each block's clock is known",
        lambda d: _normal(d, OWN, BLOCKS),
        bound=True,
        held=_held,
        by_block=True,
    ),
    "rare-mode": Noise(
        "one placement in five of the candidate 4 % slower",
        lambda d: _modes(d, 0.04, 0.2, (2,)) + _normal(d, OWN, BLOCKS),
        promised=False,
    ),
    "outlives": Noise(
        "1 % in each arm, correlated by 0.95 from block to block across placements",
        lambda d: _walk(d, 0.95, 0.01, interval.PLACEMENTS * BLOCKS),
        promised=False,
    ),
}


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What came of one kind of noise, in % of its comparisons.

    false_go_pct:         GO with no effect, gate "change < 0".
    false_go_at_line_pct: GO with a change of BESIDE_PCT, gate "change <= LINE_PCT".
    coverage_pct:         intervals that hold the true change; bootstrap_pct: those of a bootstrap of the placements.
    power_pct:            GO with a change of EFFECT_PCT, gate "change < 0".
    """

    id: str
    comparisons: int
    false_go_pct: float
    false_go_at_line_pct: float
    coverage_pct: float
    bootstrap_pct: float
    power_pct: float


HEAD = ("noise", "false GO, no effect", f"false GO, {BESIDE_PCT:g} % at {LINE_PCT:g} %", "interval holds the truth",
        "a bootstrap's holds it", f"GO at {EFFECT_PCT:g} %")  # fmt: skip


def simulate(name: str, comparisons: int = COMPARISONS, seed: int = SEED) -> Line:
    """One kind of noise through rows, evidence and judge."""
    import numpy

    draw = numpy.random.default_rng([seed, *name.encode()])
    device = devices.get("h200")
    zero, line = (_gate("<", 0.0), _gate("<=", LINE_PCT))
    counts = dict.fromkeys(Line.__struct_fields__[2:], 0)
    noise = NOISES[name]
    for _ in range(comparisons):
        times = 100.0 * numpy.exp(noise.of(draw))
        held = noise.held(draw) if noise.held else None
        if held is not None:
            times[:2] *= HIGHEST_MHZ / held
        clocks = _clocks(held, noise.by_block)
        control = _row("control", times[0], times[1], **clocks)

        def judged(
            change_pct: float, gate: Gate, times: Any = times, control: Measurement = control, clocks: Any = clocks
        ) -> str:
            candidate = _row("candidate", (1.0 + change_pct / 100.0) * times[2], **clocks)
            return rules.judge(gate, evidence.readings([control, candidate], device)).word

        counts["false_go_pct"] += judged(0.0, zero) == "GO"
        counts["false_go_at_line_pct"] += judged(BESIDE_PCT, line) == "GO"
        counts["power_pct"] += judged(EFFECT_PCT, zero) == "GO"
        alike = _row("candidate", times[2], **clocks)
        low, high = evidence.readings([control, alike], device)["kernel_us", "w"].interval_pct or (0.0, 0.0)
        counts["coverage_pct"] += low <= 0.0 <= high
        counts["bootstrap_pct"] += _resampled(times, draw)
    return Line(name, comparisons, **{key: 100.0 * n / comparisons for key, n in counts.items()})


def _gate(op: Any, threshold: float) -> Gate:
    return Gate(require=(Condition("kernel_us", op, "%", threshold, "change", "w"),))


def _clocks(held: Any, by_block: bool) -> dict[str, Any]:
    """What a row holds of the clocks of its blocks; None where nothing held them down."""
    why = "" if held is None else "software power cap"
    lowest = HIGHEST_MHZ if held is None else int(held.min())
    read = tuple(held.flatten().tolist()) if by_block else ()
    return {"throttled": why, "clocks": (Clocks("bench", lowest, 3201, why),), "block_mhz": read}


def _row(arm: Any, blocks: Any, again: Any = None, **clocks: Any) -> Measurement:
    """A row of the bench: each block is two visits of one sample."""
    shape = (*blocks.shape, 2)
    return Measurement(
        device="h200", phase="power", family="power", arm=arm, name=arm, precision="bf16", workload_id="w", workload={},
        status="ok", run="r", relative_error=0.0, placements=shape[0], processes=evidence.PROCESSES, shape=shape,
        samples=samples.encode(blocks.repeat(2).tolist()),
        again_samples=None if again is None else samples.encode(again.repeat(2).tolist()), **clocks,
    )  # fmt: skip


def _resampled(times: Any, draw: Draw) -> bool:
    """Whether a bootstrap of the placements, at the same level, holds the truth."""
    import numpy

    logs = numpy.median(numpy.log(2.0 * times[2] / (times[0] + times[1])), axis=1)
    means = logs[draw.integers(0, len(logs), (RESAMPLES, len(logs)))].mean(axis=1)
    low, high = numpy.quantile(means, [(1 - interval.PLACEMENT_LEVEL) / 2, (1 + interval.PLACEMENT_LEVEL) / 2])
    return bool(low <= 0.0 <= high)


def committed() -> tuple[Line, ...]:
    """The lines of data/false_go.csv."""

    def typed(row: dict[str, Any]) -> dict[str, Any]:
        numbers = {key: files.number(text) for key, text in row.items() if key != "id"}
        count = numbers["comparisons"]
        return row | numbers | ({"comparisons": round(count)} if isinstance(count, float) else {})

    return tuple(files.table(FILE, Line, typed).values())


def write(lines: Sequence[Line], file: Path = FILE, page: Path = PAGE) -> None:
    """Keep the lines as data, and as the table of their page."""
    rows = [Line.__struct_fields__, *(tuple(f"{x:g}" if x != line.id else x for x in msgspec.structs.astuple(line))
                                      for line in lines)]  # fmt: skip
    file.write_text("".join(",".join(row) + "\n" for row in rows), encoding="utf-8")
    page.write_text(between(page.read_text(encoding="utf-8"), MARKS, markdown(lines), page), encoding="utf-8")


def markdown(lines: Sequence[Line]) -> list[str]:
    """The lines as a Markdown table."""
    cells = [[*HEAD], ["---", *["--:"] * (len(HEAD) - 1)], *_cells(lines)]
    return ["| " + " | ".join(row) + " |" for row in cells]


def render(lines: Sequence[Line]) -> str:
    """The lines as text."""
    return table(HEAD, _cells(lines), (44, 10, 12, 12, 10, 8))


def _cells(lines: Sequence[Line]) -> list[list[str]]:
    def says(x: Line) -> str:
        return NOISES[x.id].says + ("" if NOISES[x.id].promised else " (not covered)")

    numbers = Line.__struct_fields__[2:]
    return [[says(x), *(f"{getattr(x, n):.{2 if 'go' in n else 1}f} %" for n in numbers)] for x in lines]


if __name__ == "__main__":
    sys.exit(main())
