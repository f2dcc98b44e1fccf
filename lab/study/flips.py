"""The flip map: a recorded verdict beside ours of the same question on another device, and what bounds each arm.

A verdict belongs to a device. Where the word changes, the roofline says whether it had to: the map places both arms of
a question on both devices and names the larger of three times, bytes over bandwidth, operations over the peak of their
pipe, and launches times the gap between two kernels of a graph. The ratio of the arms' bounds is what the model
expects of the change; the measured ratio stands beside it. Where a bound is the same in both arms (an occupancy lever,
a fusion that moves nothing) the model expects no change and says so: then the word is about how a kernel is written.

data/flips.toml pairs verdicts with cards and carries what cost.py cannot know (which pipe the recorded kernel used, how
often an arm walks its bytes). Words, times and ratios are computed here from cards, rows, cost.py and devices.toml.
The gap is measured on the device (profiles/<device>/ceilings) and stands for the recorded device too, which has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lab.base import devices, files, vocabulary
from lab.base.errors import REPOSITORY
from lab.base.files import Positive, Text
from lab.card import phases
from lab.check import families
from lab.judge import evidence, verdicts
from lab.place import ceilings, roofline
from lab.row import store

if TYPE_CHECKING:  # kernels/ is imported late, so that a package that shadows it is told in one line
    from kernels.common import Cost

FILE = REPOSITORY / "data" / "flips.toml"
ARMS = ("control", "candidate")
# Where a device has no peak with a source for a pipe, its bf16 one bounds from above what the operations take there.
INSTEAD = "bf16"
UNDECIDED = ("BLOCKED", "INVALID", "VACUOUS")


class Pair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pair of data/flips.toml, whose head says what each key is."""

    recorded: Text
    card: Text
    workload: Text
    question: Text
    control: str = ""
    control_there: str = ""
    control_walks: Positive = 1.0
    control_launches: Positive = 1.0
    control_workload: str = ""
    candidate: str = ""
    candidate_there: str = ""
    candidate_walks: Positive = 1.0
    candidate_launches: Positive = 1.0
    asks_otherwise: str = ""
    why: str = ""
    front: bool = False


class Pairs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """data/flips.toml."""

    flip: tuple[Pair, ...] = ()


@dataclass(frozen=True)
class Bound:
    """The least time of one arm on one device, by term; pipe: where the operations run there."""

    bytes_us: float
    flops_us: float
    launch_us: float
    pipe: str

    @property
    def us(self) -> float:
        """The largest term."""
        return max(self.bytes_us, self.flops_us, self.launch_us)

    @property
    def term(self) -> str:
        """Its name: bytes, flops or launch."""
        return {self.bytes_us: "bytes", self.flops_us: "flops", self.launch_us: "launch"}[self.us]

    def __str__(self) -> str:
        return f"{self.term} {self.us:.3g} us" + (f" ({self.pipe})" if self.term == "flops" else "")


class Flip(Pair, frozen=True, kw_only=True):
    """A pair judged: one question on two devices.

    phase, row:      of the recorded verdict. there, here: device ids.
    word_there, word_here: verdict words, word_here "" without rows.
    bounds:          (device id, arm) -> Bound.
    expected_pct:    device id -> change from the control's bound to the candidate's in %.
    measured_pct:    the measured change at the workload on `here`, None without rows.
    errors:          relative errors of the control and the candidate there, () without both.
    """

    row: str
    phase: str
    there: str
    here: str
    word_there: str
    word_here: str
    bounds: Mapping[tuple[str, str], Bound]
    expected_pct: Mapping[str, float]
    measured_pct: float | None
    errors: tuple[float, ...] = ()

    @property
    def flips(self) -> str:
        """ "yes", "no", "partly", or "" where there are no two words on one question."""
        if self.asks_otherwise or not self.word_here or {self.word_there, self.word_here} & set(UNDECIDED):
            return ""
        if "PARTIAL" in (self.word_there, self.word_here) and self.word_there != self.word_here:
            return "partly"
        return "no" if _kept(self.word_there) == _kept(self.word_here) else "yes"

    @property
    def explained_by(self) -> str:
        """What bounds the arms on the two devices, in one sentence."""
        terms = {d: [self.bounds[d, arm].term for arm in ARMS] for d in (self.there, self.here)}
        words = {d: t[0] if t[0] == t[1] else f"{t[0]} then {t[1]}" for d, t in terms.items()}
        same = terms[self.there] == terms[self.here]
        on = f"{words[self.here]} on both" if same else ", ".join(f"{w} on {d}" for d, w in words.items())
        changes = {d: self.expected_pct[d] for d in words}
        if all(abs(change) < 1 for change in changes.values()):
            return f"{on}; the arms have the same bound: a question of how the kernel is written"
        figures = ", ".join(f"{change:+.0f} % on {d}" for d, change in changes.items())
        return f"{on}; the bounds alone would make {figures}" + (f" ({self.why})" if self.why else "")


def _kept(word: str) -> str:
    """GO on modelled evidence is still a GO, and an effect inside the noise is no reason to keep a change."""
    return {"CONDITIONAL-GO": "GO", "NEUTRAL": "NO-GO"}.get(word, word)


def bound(device: devices.Device, cost: Cost, walks: float, launches: float, gap_us: float) -> Bound:
    """The three terms of a cost, us; walks: how often its bytes are moved. A pipe without a peak counts as bf16."""
    pipe = cost.pipe if cost.pipe in device.peaks else INSTEAD
    floor = roofline.place(device, cost.flops, cost.bytes, pipe)
    return Bound(walks * floor.memory_us, floor.compute_us, launches * gap_us, pipe)


def gap_us(device_id: str) -> float:
    """The gap between two kernels of a replayed graph, us, from the newest ceilings of the device; 0 without any."""
    found = ceilings.latest(device_id).get("graph_gap")
    return found.value if found else 0.0


def flips(here: str = "h200", path: Path = FILE) -> list[Flip]:
    """Every pair of the file, in the order of the rows. Raises BadInput for an unknown verdict, card or workload."""
    replayed = {j.recorded_id: j for j in verdicts.judge_recorded(phases.cards().values()) if j.recorded_id}
    order = list(vocabulary.words().row)
    found = [
        _flip(pair, files.called(pair.recorded, replayed, "verdict", path), here, path)
        for pair in files.read(path, Pairs).flip
    ]
    return sorted(found, key=lambda flip: order.index(flip.row))


def _flip(pair: Pair, judged: verdicts.Judgement, here: str, path: Path) -> Flip:
    card = phases.card(pair.card)
    family = families.load(card.family)
    workload = family.workload(pair.workload)
    base = family.workload(pair.control_workload or workload.id)
    gap = gap_us(here)

    def bounding(device_id: str, arm: str) -> Bound:
        first = arm == "control"
        name = card.control if first and not pair.control_workload else card.candidate
        there = getattr(pair, f"{arm}_there") if device_id != here else ""
        precision = there or getattr(pair, arm) or family.candidate(name).precision
        cost = family.cost(base if first else workload, precision)
        walks, launches = getattr(pair, f"{arm}_walks"), getattr(pair, f"{arm}_launches")
        return bound(devices.get(device_id, path), cost, walks, launches, gap)

    places = dict.fromkeys((judged.device, here))
    bounds = {(device_id, arm): bounding(device_id, arm) for device_id in places for arm in ARMS}
    rows = evidence.asked(store.rows(here, card.id), card)
    pairs = evidence.pairs(rows)
    control, candidate = pairs.get(workload.id, (None, None))
    errors = tuple(e for row in (control, candidate) if row and (e := evidence.errors(row).get("")) is not None)
    if base.id != workload.id:
        _, control = pairs.get(base.id, (None, None))
    return Flip(
        **msgspec.structs.asdict(pair),
        row=phases.card(judged.phase).row,
        phase=judged.phase,
        there=judged.device,
        here=here,
        word_there=judged.verdict.word,
        word_here=verdicts.judge_measured(card, here).verdict.word if rows else "",
        bounds=bounds,
        expected_pct={d: 100 * (bounds[d, "candidate"].us / bounds[d, "control"].us - 1) for d in places},
        measured_pct=evidence.change_alone(control, candidate),
        errors=errors if len(errors) == 2 else (),
    )
