"""The ledger of expectation: what a program said its phases would give, beside what they gave, from recorded figures.

A plan that adds up its phases' hopes is a forecast, and a forecast that nobody reads again teaches nothing. So the
entries of data/ledger.toml bind each expectation, and each number measured afterwards, to figures by id, and everything
here is computed from those: what was reached, what part of it, how many of the six landed, which predictions came true.

An expectation may have been withdrawn since (it is what was expected then); a delivered figure must stand.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import asdict

from lab.base import files, vocabulary
from lab.base.console import show
from lab.base.errors import REPOSITORY, BadInput, shown
from lab.card import phases, recorded
from lab.judge import verdicts

FILE = REPOSITORY / "data" / "ledger.toml"
# A number said beforehand, and one found afterwards: a ceiling is either, depending on what it was computed from.
BEFORE, AFTER = ("predicted", "ceiling", "threshold"), ("measured", "ceiling")
REACHED, SHORT, NOTHING, AGAINST = "reached", "short", "nothing", "against"
TRUE, FALSE = "came true", "did not"
KINDS = {"phase": "phases", "program": "program", "prediction": "predictions"}
Range = tuple[float, float]


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What an entry is about. verdict: id of the recorded verdict, "" where the source wrote none."""

    id: str
    kind: Literal["phase", "program", "prediction"]
    title: str
    verdict: str = ""
    better: Literal["higher", "lower"] = "higher"
    caveat: str = ""


class Bound(Said, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of data/ledger.toml: every number by the id of its figure."""

    expected: Annotated[tuple[str, ...], Meta(min_length=1)]
    delivered: tuple[str, ...] = ()
    before: str = ""
    after: str = ""
    of: str = ""
    started: str = ""

    def __post_init__(self) -> None:
        if bool(self.delivered) == bool(self.before and self.after):
            raise ValueError("needs delivered, or before and after; give exactly one of them")


class Ledger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """data/ledger.toml."""

    tolerance_pct: Annotated[float, Meta(gt=0, lt=100)]
    entry: tuple[Bound, ...] = ()


class Entry(Said, frozen=True, kw_only=True):
    """One line of the ledger.

    reading:   what we read the verdict as; source_word: the source's own word for it, "" without one; our_word: the
               judge's.
    unit:      of every number here.
    expected, delivered: lowest and highest, equal where there is one number.
    started:   the level before any work, None where the numbers are gains.
    of:        the whole that the expectation is a part of, None where none is stated.
    outcome:   phase, program: reached, short (some of it), nothing, against (the wrong way). prediction: came true, did
               not.
    error_pct: prediction: measured against the predicted number, or the nearer end of a range; 0 inside it. Else None.
    ids:       every figure that it stands on.
    withdrawn: the source's word for taking the expectation back, "" while it stands.
    """

    reading: str
    source_word: str
    our_word: str
    unit: str
    expected: Range
    delivered: Range
    started: float | None
    of: float | None
    outcome: str
    error_pct: float | None
    ids: tuple[str, ...]
    withdrawn: str

    @property
    def landed(self) -> bool:
        """Whether the source kept it."""
        return self.reading in ("LANDED", "GO")

    @property
    def part_pct(self) -> Range | None:
        """Delivered over expected in %, least and most; None where a level is compared or nothing was expected."""
        if self.started is not None or self.expected[0] <= 0:
            return None
        return 100 * self.delivered[0] / self.expected[1], 100 * self.delivered[1] / self.expected[0]


@cache
def entries() -> tuple[Entry, ...]:
    """Every entry, in the file's order."""
    return load(FILE)


def load(path: Path) -> tuple[Entry, ...]:
    """The entries of one file; raises BadInput for what cannot be a ledger.

    Refused: an unknown key or kind, a missing or withdrawn delivered figure, one bound on the wrong side (a prediction
    as delivered), figures of two units, and a tolerance that is no number.
    """
    ledger = files.read(path, Ledger)
    files.once(path, "entry", (e.id for e in ledger.entry))
    words = {j.recorded_id: j.verdict.word for j in verdicts.judge_recorded(phases.cards().values())}
    return tuple(_entry(path, bound, ledger.tolerance_pct, words) for bound in ledger.entry)


def _entry(path: Path, bound: Bound, tolerance_pct: float, words: Mapping[str | None, str]) -> Entry:
    where = f"{shown(path)}: entry {bound.id}"
    used: list[recorded.Figure] = []

    def values(*ids: str, kinds: Collection[str] = AFTER, stands: bool = True) -> list[float]:
        found = [recorded.number(where, i, kinds, stands=stands) for i in ids if i]
        used.extend(found)
        return [float(f.value) for f in found]

    hoped = values(*bound.expected, kinds=BEFORE, stands=False)
    withdrawn = next((f.withdrawn for f in used if f.withdrawn), "")
    got = values(*bound.delivered)
    if not got:
        before, after = values(bound.before, bound.after)
        got = [before - after]
    of, started = values(bound.of), values(bound.started)
    units = sorted({vocabulary.unit(f.unit) for f in used})
    if len(units) != 1:
        raise BadInput(where, f"mixes {' and '.join(units)}", "bind figures of one unit")
    expected, delivered = (min(hoped), max(hoped)), (min(got), max(got))
    outcome, error = _outcome(expected, delivered, bound.better), None
    if bound.kind == "prediction":
        error = _error_pct(expected, delivered)
        outcome = TRUE if abs(error) <= tolerance_pct else FALSE
    source = recorded.verdict(bound.verdict, path) if bound.verdict else None
    return Entry(
        **{key: getattr(bound, key) for key in Said.__struct_fields__},
        reading=source.reading if source else "",
        source_word=source.word if source else "",
        our_word=words.get(bound.verdict, ""),
        unit=units[0],
        expected=expected,
        delivered=delivered,
        started=started[0] if started else None,
        of=of[0] if of else None,
        outcome=outcome,
        error_pct=error,
        ids=tuple(f.id for f in used),
        withdrawn=withdrawn,
    )


def _outcome(expected: Range, delivered: Range, better: str) -> str:
    """reached: even the least delivered is at the easy end of what was expected."""
    if better == "lower":
        return REACHED if delivered[1] <= expected[1] else SHORT
    if delivered[0] >= expected[0]:
        return REACHED
    if delivered[1] > 0:
        return SHORT
    return NOTHING if delivered[0] == 0 else AGAINST


def _error_pct(expected: Range, delivered: Range) -> float:
    """Distance of the delivered number that is furthest out from the predicted range, in % of its nearer end."""
    over, under = delivered[1] - expected[1], delivered[0] - expected[0]
    return 100 * over / expected[1] if over > 0 else 100 * under / expected[0] if under < 0 else 0.0


def summary(rows: Sequence[Entry]) -> list[str]:
    """The ledger in sentences; every number computed from the entries."""
    of_phase = [e for e in rows if e.kind == "phase"]
    kept = [e.id.upper() for e in of_phase if e.landed]
    lines = [f"{len(kept)} of {len(of_phase)} phases landed ({', '.join(kept) or 'none'})."]
    for e in (e for e in rows if e.kind == "program"):
        since = f" from {e.started:g}" if e.started is not None else ""
        whole = f" of {e.of:g}" if e.of is not None else ""
        numbers = f"expected {_range(e.expected)}{whole} {e.unit}, delivered {_range(e.delivered)}{since}"
        lines.append(f"{e.title[0].upper()}{e.title[1:]}: {numbers}: {e.outcome}.")
    said = [e for e in rows if e.kind == "prediction"]
    came = [e.id for e in said if e.outcome == TRUE]
    return [*lines, f"{len(came)} of {len(said)} predictions came true ({', '.join(came) or 'none'})."]


def render(rows: Sequence[Entry]) -> str:
    """The ledger as text: one line an entry, what it stands on below a kind, and the summary."""
    blocks = []
    for kind, title in KINDS.items():
        lines = [title]
        for e in (e for e in rows if e.kind == kind):
            error = f" ({e.error_pct:+.2f} %)" if e.error_pct is not None else ""
            word = f" [{e.reading}; here {e.our_word or 'no card'}]" if e.reading else ""
            numbers = f"expected {_range(e.expected)}, delivered {_range(e.delivered)} {e.unit}"
            lines.append(f"  {e.title:46} {numbers}: {e.outcome}{error}{word}")
            notes = [f"the expectation: {e.withdrawn}" if e.withdrawn else "", e.caveat]
            lines += [f"  {'':46} {note}" for note in notes if note]
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, "\n".join(summary(rows))])


def _range(ends: Range) -> str:
    low, high = (f"{round(n, 2):g}" for n in ends)
    return low if low == high else f"{low} to {high}"


def run(arguments: Namespace) -> int:
    """Print the ledger; 0 always, because a forecast that failed is a result."""
    rows = entries()
    objects = [{**asdict(e), "landed": e.landed, "part_pct": e.part_pct} for e in rows]
    show(arguments.json, lambda: {"entries": objects, "summary": summary(rows)}, lambda: render(rows))
    return 0
