"""The ledger of expectation: what a program said its phases would give, beside what they gave, from recorded figures.

A plan that adds up its phases' hopes is a forecast, and a forecast that nobody reads again teaches nothing. So the
entries of data/ledger.toml bind each expectation, and each number measured afterwards, to figures by id, and everything
here is computed from those: what was reached, what part of it, how many of the six landed, which predictions came true.
The same ledger is kept for predictions that were good, because a roofline that calls 180 and measures 180.53 is worth
more than six hopes.

An expectation may have been withdrawn since (it is what was expected then); a delivered figure must stand.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.base import vocabulary
from lab.base.console import print_json
from lab.base.errors import REPOSITORY, BadInput, nearest
from lab.card import phases, recorded
from lab.judge import verdicts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILE = REPOSITORY / "data" / "ledger.toml"
KINDS = ("phase", "program", "prediction")
KEYS = {"id", "kind", "title", "verdict", "expected", "delivered", "before", "after", "of", "started", "better"}
KEYS |= {"caveat"}
# A number said beforehand, and one found afterwards: a ceiling is either, depending on what it was computed from.
BEFORE, AFTER = ("predicted", "ceiling", "threshold"), ("measured", "ceiling")
REACHED, SHORT, NOTHING, AGAINST = "reached", "short", "nothing", "against"
TRUE, FALSE = "came true", "did not"


@dataclass(frozen=True)
class Entry:
    """One line of the ledger.

    kind:      phase, program or prediction.
    verdict:   id of the recorded verdict, "" where the source wrote none; `source_word` and `our_word` are its words.
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

    id: str
    kind: str
    title: str
    verdict: str
    source_word: str
    our_word: str
    unit: str
    expected: tuple[float, float]
    delivered: tuple[float, float]
    started: float | None
    of: float | None
    better: str
    outcome: str
    error_pct: float | None
    ids: tuple[str, ...]
    withdrawn: str
    caveat: str

    @property
    def landed(self) -> bool:
        """Whether the source kept it."""
        return self.source_word in ("LANDED", "GO")

    @property
    def part_pct(self) -> tuple[float, float] | None:
        """Delivered over expected in %, least and most; None where a level is compared or nothing was expected."""
        if self.started is not None or self.expected[0] <= 0:
            return None
        return 100 * self.delivered[0] / self.expected[1], 100 * self.delivered[1] / self.expected[0]

    def to_json(self) -> dict[str, Any]:
        """The object that `lab ledger --json` prints."""
        return {**asdict(self), "landed": self.landed, "part_pct": self.part_pct}


@cache
def entries() -> tuple[Entry, ...]:
    """Every entry, in the file's order."""
    return load(FILE)


def load(path: Path) -> tuple[Entry, ...]:
    """The entries of one file; raises BadInput for what cannot be a ledger.

    Refused: an unknown key or kind, a missing or withdrawn delivered figure, one bound on the wrong side (a prediction
    as delivered), figures of two units, and a tolerance that is no number.
    """
    raw = vocabulary.read_toml(path)
    tolerance = raw.get("tolerance_pct")
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 < tolerance < 100:
        raise BadInput(path, f"tolerance_pct = {tolerance!r} is no share", "write a number between 0 and 100")
    words = {j.recorded_id: j.verdict.word for j in verdicts.judge_recorded(phases.cards().values())}
    found = tuple(_entry(path, table, float(tolerance), words) for table in raw.get("entry", ()))
    twice = [e.id for i, e in enumerate(found) if e.id in {other.id for other in found[:i]}]
    if twice:
        raise BadInput(path, f'entry "{twice[0]}" appears twice', "give the second one its own id")
    return found


def _entry(path: Path, table: Mapping[str, Any], tolerance: float, words: Mapping[str | None, str]) -> Entry:
    where = f"[entry {table.get('id', '?')}]"
    for key in table:
        if key not in KEYS:
            raise BadInput(path, f'{where} unknown key "{key}"', nearest(key, KEYS))
    for key in ("id", "kind", "title", "expected"):
        if not table.get(key):
            raise BadInput(path, f'{where} key "{key}" is missing', "an entry needs id, kind, title and expected")
    kind, better = table["kind"], table.get("better", "higher")
    for key, word, known in (("kind", kind, KINDS), ("better", better, ("higher", "lower"))):
        if word not in known:
            raise BadInput(path, f'{where} {key} = "{word}" is unknown', nearest(word, known))
    if ("delivered" in table) == ("before" in table and "after" in table):
        raise BadInput(path, f"{where} needs delivered, or before and after", "give exactly one of them")
    hoped = _figures(path, where, table["expected"], BEFORE)
    got = _figures(path, where, table.get("delivered", []), AFTER, stands=True)
    spans = _figures(path, where, [table[k] for k in ("before", "after") if k in table], AFTER, stands=True)
    beside = _figures(path, where, [table[k] for k in ("of", "started") if k in table], AFTER, stands=True)
    used = (*hoped, *got, *spans, *beside)
    units = sorted({vocabulary.unit(f.unit) for f in used})
    if len(units) != 1:
        raise BadInput(path, f"{where} mixes {' and '.join(units)}", "bind figures of one unit")
    numbers = [_value(path, f) for f in got] or [_value(path, spans[0]) - _value(path, spans[1])]
    expected = min(map(lambda f: _value(path, f), hoped)), max(map(lambda f: _value(path, f), hoped))
    delivered = min(numbers), max(numbers)
    verdict = table.get("verdict", "")
    error = _error_pct(expected, delivered) if kind == "prediction" else None
    by_key = dict(zip([k for k in ("of", "started") if k in table], beside, strict=True))
    return Entry(
        id=table["id"],
        kind=kind,
        title=table["title"],
        verdict=verdict,
        source_word=recorded.verdict(verdict, path).verdict if verdict else "",
        our_word=words.get(verdict, "") if verdict else "",
        unit=units[0],
        expected=expected,
        delivered=delivered,
        started=_value(path, by_key["started"]) if "started" in by_key else None,
        of=_value(path, by_key["of"]) if "of" in by_key else None,
        better=better,
        outcome=_outcome(expected, delivered, better)
        if error is None
        else (TRUE if abs(error) <= tolerance else FALSE),
        error_pct=error,
        ids=tuple(f.id for f in used),
        withdrawn=next((f.withdrawn for f in hoped if f.withdrawn), ""),
        caveat=table.get("caveat", ""),
    )


def _figures(
    path: Path, where: str, ids: Sequence[str], kinds: tuple[str, ...], stands: bool = False
) -> list[recorded.Figure]:
    found = [recorded.figure(i, path) for i in ids]
    for f in found:
        if f.kind not in kinds:
            raise BadInput(path, f"{where} {f.id} is {f.kind}", f"bind a figure that is {' or '.join(kinds)} here")
        if stands and f.withdrawn:
            raise BadInput(path, f"{where} {f.id} was withdrawn ({f.withdrawn})", "bind a figure that stands")
    return found


def _value(path: Path, figure: recorded.Figure) -> float:
    if not isinstance(figure.value, float):
        raise BadInput(path, f'{figure.id} = "{figure.value}" is not a number', "bind another figure")
    return figure.value


def _outcome(expected: tuple[float, float], delivered: tuple[float, float], better: str) -> str:
    """reached: even the least delivered is at the easy end of what was expected."""
    if better == "lower":
        return REACHED if delivered[1] <= expected[1] else SHORT
    if delivered[0] >= expected[0]:
        return REACHED
    if delivered[1] > 0:
        return SHORT
    return NOTHING if delivered[0] == 0 else AGAINST


def _error_pct(expected: tuple[float, float], delivered: tuple[float, float]) -> float:
    """Distance of the delivered number that is furthest out from the predicted range, in % of its nearer end."""
    over, under = delivered[1] - expected[1], delivered[0] - expected[0]
    return 100 * over / expected[1] if over > 0 else 100 * under / expected[0] if under < 0 else 0.0


def summary(rows: Sequence[Entry]) -> list[str]:
    """The ledger in sentences; every number computed from the entries."""
    of_phase = [e for e in rows if e.kind == "phase"]
    kept = [e.id.upper() for e in of_phase if e.landed]
    said = [e for e in rows if e.kind == "prediction"]
    came = [e for e in said if e.outcome == TRUE]
    lines = [f"{len(kept)} of {len(of_phase)} phases landed ({', '.join(kept) or 'none'})."]
    for e in rows:
        if e.kind == "program":
            since = f" from {e.started:g}" if e.started is not None else ""
            whole = f" of {e.of:g}" if e.of is not None else ""
            lines.append(
                f"{e.title[0].upper()}{e.title[1:]}: expected {_range(e.expected)}{whole} {e.unit}, "
                f"delivered {_range(e.delivered)}{since}: {e.outcome}."
            )
    lines.append(f"{len(came)} of {len(said)} predictions came true ({', '.join(e.id for e in came) or 'none'}).")
    return lines


def render(rows: Sequence[Entry]) -> str:
    """The ledger as text: one line an entry, what it stands on below a kind, and the summary."""
    blocks = []
    for kind in KINDS:
        lines = [f"{kind}s" if kind != "program" else "program"]
        for e in rows:
            if e.kind != kind:
                continue
            numbers = f"expected {_range(e.expected)}, delivered {_range(e.delivered)} {e.unit}"
            error = f" ({e.error_pct:+.2f} %)" if e.error_pct is not None else ""
            word = f" [{e.source_word}; here {e.our_word or 'no card'}]" if e.source_word else ""
            lines.append(f"  {e.title:46} {numbers}: {e.outcome}{error}{word}")
            if e.withdrawn:
                lines.append(f"  {'':46} the expectation: {e.withdrawn}")
            if e.caveat:
                lines.append(f"  {'':46} {e.caveat}")
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, "\n".join(summary(rows))])


def _range(ends: tuple[float, float]) -> str:
    low, high = (f"{round(n, 2):g}" for n in ends)
    return low if low == high else f"{low} to {high}"


def figure(rows: Sequence[Entry]) -> Figure:
    """Three panels: prefill time recovered, shares of vLLM, and predictions as measured over predicted.

    A bar is what was expected, a diamond what was delivered, a tick the level before. Entries in other units (served
    points, decode %) are in the table only: an axis of its own for one entry shows nothing.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from lab import draw

    time = [e for e in rows if e.kind != "prediction" and e.unit == "us/tok"]
    share = [e for e in rows if e.kind == "program" and e.unit == "%"]
    said = [e for e in rows if e.kind == "prediction"]
    panels = [
        ("us/token of prefill recovered", time),
        ("% of vLLM", share),
        ("measured, % of what was predicted", said),
    ]
    with matplotlib.rc_context(draw.STYLE):
        tall = sum(len(p) for _, p in panels)
        picture = Figure(figsize=(draw.WIDTH_IN, 1.9 + 0.3 * tall), facecolor=draw.CARD, layout="constrained")
        FigureCanvasAgg(picture)
        drawn = picture.subplots(len(panels), 1, height_ratios=[len(p) + 1.2 for _, p in panels])
        for axes, (label, panel) in zip(drawn, panels, strict=True):
            _panel(axes, label, panel)
        drawn[0].set_title("expected (bar) and delivered (diamond)", loc="left", fontsize=10, color=draw.INK)
    return picture


def _panel(axes: Axes, label: str, rows: Sequence[Entry]) -> None:
    from lab import draw

    axes.set_facecolor(draw.CARD)
    axes.spines[["top", "right"]].set_visible(False)
    for y, e in enumerate(rows):
        scale = 100 / e.expected[1] if e.kind == "prediction" else 1.0
        low, high = (n * scale for n in e.expected)
        got = [n * scale for n in sorted(set(e.delivered))]
        width = max(high - low, 1.0)
        axes.barh(
            y, width, left=(low + high - width) / 2, height=0.5, color="#ffffff", edgecolor=draw.BLUE, hatch="////"
        )
        good = e.outcome in (REACHED, TRUE)
        axes.plot(got, [y] * len(got), "D", color=draw.GREEN if good else draw.VERMILLION, markersize=6)
        if e.started is not None:
            axes.plot([e.started], [y], "|", color=draw.SOFT, markersize=12)
        text = f"{_range(e.delivered)} {e.unit}: {e.outcome}"
        axes.annotate(
            text, (max([high, *got]), y), xytext=(9, 0), textcoords="offset points", va="center", fontsize=8.5
        )
    if rows and rows[0].kind == "prediction":
        axes.axvline(100, color=draw.SOFT, linewidth=0.8)
    elif any(min(e.delivered) < 0 for e in rows):
        axes.axvline(0, color=draw.SOFT, linewidth=0.8)
    left, right = axes.get_xlim()
    axes.set_xlim(left, right + 0.6 * (right - left))
    axes.set_yticks(range(len(rows)), [e.title for e in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel(label)


def add(command: Callable[..., ArgumentParser]) -> None:
    """Add `lab ledger`; `command(name, run, text)` makes a parser."""
    parser = command("ledger", run, "what was expected of each recorded phase against what it delivered")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="also draw it, as .svg or .png")


def run(arguments: Namespace) -> int:
    """Print the ledger; 0 always, because a forecast that failed is a result."""

    rows = entries()
    if arguments.figure:
        from lab import draw

        draw.save(figure(rows), arguments.figure)
    if arguments.json:
        print_json({"entries": [e.to_json() for e in rows], "summary": summary(rows)})
    else:
        print(render(rows))
    return 0
