"""`lab routes FAMILY --calibrate`: measures where the time model knows least, and fits it.

The pool are the shapes of public models (data/public_models.csv), from 0.5B to 405B. Of it the places are taken one
after another, each the one whose times would say most of all the others' (`Doubt`, `spread`), so that whatever the
minutes allow is spent on what the model's parameters and its own errors leave open. At each, all that a router may take
and the rivals that are installed are timed and checked as for a card but briefly (lab/bench/comparison.py: Job.brief):
one placement of three blocks, which holds a median to about 2 %, in arms' processes that live on from place to place.
Nothing is judged; the rows are kept as phase `calibration-<family>` and never take the place of a card's. The router's
file is written from all rows of the device, so this makes routes from nothing on a GPU that no list has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from lab.base import devices, files
from lab.base.errors import REPOSITORY, BadInput
from lab.bench import measure, sampling
from lab.card import phases
from lab.check import families
from lab.row import store
from lab.row.records import CALIBRATION, Measurement, Role
from lab.study import timefit

if TYPE_CHECKING:  # kernels/ is imported late, so that a package that shadows it is told in one line
    from kernels.common import Work, Workload
    from kernels.routing import Router

FILE = REPOSITORY / "data" / "public_models.csv"
MOST = 60  # places of one calibration
MINUTES = 2.0  # of one family
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096)
LENGTHS, CACHES = (16, 64, 256, 1024, 4096), (256, 1024, 8192, 32768)
BATCHES, SHARES = (1, 4, 16, 64), (1, 2, 4, 8)
LARGEST = 1 / 40  # of the GPU's memory, of what a product of 16-bit operands reads: its reference takes float64
SLOW_BYTES = 1e9  # a place of so many takes about twice as long as a small one: its inputs, and its reference
OCTAVES = 2.0  # between places at which a candidate's own deviation from the model is still much alike
DEVIATES, HELD = 0.1, 0.02  # of log time: that deviation, and what a calibration's median is held to
Known = Mapping[str, Sequence[Mapping[str, int]]]
SETTINGS = measure.Settings(seconds=0.3, placements=1, processes=1, brief=True)


class PublicModel(Struct, frozen=True):
    """A model's sizes as its published configuration has them; 0 where it has no gated delta net."""

    id: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    gdn_k_heads: int
    gdn_v_heads: int
    gdn_dim: int
    source: str


@dataclass(frozen=True)
class Place:
    """Where to measure: the axes of a router's question, and the models of which they are."""

    axes: tuple[tuple[str, int], ...]
    models: tuple[str, ...]


def public_models() -> tuple[PublicModel, ...]:
    """The rows of data/public_models.csv; BadInput naming file and line for one that is none."""

    def numbers(row: dict[str, str]) -> dict[str, Any]:
        return {k: v if k in ("id", "source") else int(v or 0) for k, v in row.items()}

    return tuple(files.table(FILE, PublicModel, numbers).values())


def linear_shapes(m: PublicModel) -> tuple[tuple[int, int], ...]:
    """(N, K) of a model's linear layers: queries, keys and values together, the output, up (as gate), and down."""
    heads = m.head_dim * (m.heads + 2 * m.kv_heads)
    return (heads, m.hidden), (m.hidden, m.heads * m.head_dim), (m.ffn, m.hidden), (m.hidden, m.ffn)


def _linear(m: PublicModel) -> Iterator[dict[str, int]]:
    return ({"M": rows, "N": n, "K": k} for (n, k), rows in product(linear_shapes(m), ROWS))


def _attention(m: PublicModel) -> Iterator[dict[str, int]]:
    for share, batch, ctx in product(SHARES, BATCHES, CACHES):
        if m.kv_heads % share == 0 and m.heads % share == 0:
            heads = {"Hq": m.heads // share, "Hkv": m.kv_heads // share, "D": m.head_dim}
            yield {"ctx": ctx, "batch": batch, **heads, "page": 16}


def _delta_net(m: PublicModel) -> Iterator[dict[str, int]]:
    for share, batch, tokens in product(SHARES, BATCHES, LENGTHS) if m.gdn_dim else ():
        yield {"T": tokens, "batch": batch, "Hk": m.gdn_k_heads // share, "Hv": m.gdn_v_heads // share, "D": m.gdn_dim}


# By the axes of a router's question, whatever the family is called.
POOLS: tuple[Callable[[PublicModel], Iterator[dict[str, int]]], ...] = (_linear, _attention, _delta_net)


def pool(asks: Router) -> tuple[Place, ...]:
    """The places of public models that answer a router's question; BadInput where none has its axes."""
    wanted: set[str] = {asks.axis, *asks.shape}
    found: dict[tuple[tuple[str, int], ...], tuple[str, ...]] = {}
    for model in public_models():
        for axes in (axes for make in POOLS for axes in make(model) if axes.keys() == wanted):
            key = tuple(sorted(axes.items()))
            found[key] = (*found.get(key, ()), model.id)
    if not found:
        what = f"no public model has shapes of the axes {', '.join(sorted(wanted))}"
        raise BadInput("--calibrate", what, f"add them to {FILE.name} and to POOLS, or measure a card")
    return tuple(Place(axes, tuple(dict.fromkeys(named))) for axes, named in found.items())


@dataclass(frozen=True)
class Doubt:
    """What is not known of a candidate's times at places of a pool.

    at: numbers of the places; works: its counts there; known: points and counts where it was measured; us: the present
    values of its parameters.
    """

    at: tuple[int, ...]
    works: tuple[Work, ...]
    known: tuple[tuple[tuple[float, ...], Work], ...]
    us: Mapping[str, float]

    def covariance(self, points: Sequence[tuple[float, ...]], device: devices.Device) -> np.ndarray:
        """Of its log times [at, at], given those that are known.

        By the priors of the parameters, whose slopes are taken at their present values, and by the candidate's own
        deviation from the model, which is much alike at near places. points: log2 of the axes, of the whole pool.
        """
        from kernels.timing import shares

        here = [*(points[i] for i in self.at), *(point for point, _ in self.known)]
        shared = [shares(work, self.us)[1] for work in (*self.works, *(work for _, work in self.known))]
        slopes = np.array([[share.get(name, 0.0) for name in self.us] for share in shared])
        scaled = slopes * timefit.priors(tuple(self.us), device)[1]
        apart = np.square(np.array(here)[:, None] - np.array(here)).sum(axis=2)
        every = scaled @ scaled.T + DEVIATES**2 * np.exp(-apart / (2 * OCTAVES**2))
        n = len(self.at)
        seen = every[n:, n:] + HELD**2 * np.eye(len(self.known))
        return np.asarray(every[:n, :n] - every[:n, n:] @ np.linalg.solve(seen, every[n:, :n]))


def spread(doubts: Sequence[tuple[Sequence[int], np.ndarray]], price: Sequence[float], most: int) -> list[int]:
    """Up to `most` numbers of places, each the one that tells most, for its price, of what is in doubt at all.

    doubts: of a candidate, numbers of places and the covariance of its log times there. A place tells of a candidate
    the sum, over its places, by how much their variances shrink.
    """
    left = [(np.asarray(at), covariance.copy()) for at, covariance in doubts]
    chosen: list[int] = []
    for _ in range(most):
        told = np.zeros(len(price))
        for at, covariance in left:
            told[at] += np.square(covariance).sum(axis=0) / (np.diag(covariance) + HELD**2)
        told[chosen] = 0.0
        best = int(np.argmax(told / price))
        if not told[best]:
            break
        chosen.append(best)
        for at, covariance in left:
            for i in np.flatnonzero(at == best):
                row = covariance[i].copy()
                covariance -= np.outer(row, row) / (row[i] + HELD**2)
    return chosen


def words(asks: Router, place: Place) -> str:
    """A place as the workload that its row names: its axes, and what the router's question fixes."""
    fixed = {axis: value for axis, value in asks.fixed.items() if value != ""}
    return " ".join(f"{axis}={value}" for axis, value in {**dict(place.axes), **fixed}.items())


def items(asks: Router, device: devices.Device, known: Known) -> list[measure.Item]:
    """The comparisons, in the order in which they tell most: every candidate that takes the workload, and rivals.

    known: candidate -> the axes of the places where it was measured. A place whose sets stay in L2, of which a router
    would learn a time that no cold call takes, is only taken where all are such.
    """
    family = families.bare(asks.family)
    room = device.vram.base * LARGEST if device.vram else math.inf
    least = device.l2_bytes.base / sampling.MOST_SETS if device.l2_bytes else 0.0
    told = measure.described(asks.family)
    precisions = set(told.precisions.values())
    posed = [(place, family.workload(words(asks, place))) for place in pool(asks)]
    every = [(place, [family.cost(workload, p).bytes for p in precisions]) for place, workload in posed]
    fitting = [(place, max(moved)) for place, moved in every if max(moved) <= room]
    cold = {place for place, moved in every if min(moved) >= least}
    fitting = [pair for pair in fitting if pair[0] in cold] or fitting
    places = [place for place, _ in fitting]
    points = [_point(place.axes) for place in places]
    doubts = [(doubt.at, doubt.covariance(points, device)) for doubt in _doubts(asks, device, places, known)]
    chosen = [places[i] for i in spread(doubts, [1 + moved / SLOW_BYTES for _, moved in fitting], MOST)]
    names = [words(asks, place) for place in chosen]
    families.together(asks.family, families.gpu_capability() or measure.HOPPER, names)
    found: list[measure.Item] = []
    for name in names:
        here = measure.described(asks.family, name)
        takes = [n for n, by in here.configs.items() if by[name] is not None and n not in here.never]
        ours = [n for n in takes if n not in here.peers]
        rivals = [n for n in takes if n in here.peers and n not in ours]
        if not ours:
            continue
        roles: list[tuple[Role, str]] = [("control", ours[0]), *(("candidate", n) for n in ours[1:])]
        arms = (*roles, *(("peer", n) for n in rivals))
        say = CALIBRATION + asks.family
        card = phases.ungated(say, asks.family, ours[0], ours[-1], tuple(names), FILE)
        # `bytes` only orders: the place's turn stands in for them.
        found.append(measure.Item(card, family.workload(name), arms, False, len(found)))
    return found


def _point(axes: Iterable[tuple[str, int]]) -> tuple[float, ...]:
    return tuple(math.log2(value) for _, value in sorted(axes))


def _doubts(asks: Router, device: devices.Device, places: Sequence[Place], known: Known) -> list[Doubt]:
    """Of each candidate that a router may take: the places where it could take another, but those already measured."""
    from kernels import routing
    from kernels.common import described_for

    every, sms = families.load(asks.family).candidates, timefit.sms(device)
    able = {n: c for n, c in every.items() if c.work and not c.no_route and not families.unfit(c, device.capability)}
    stored = routing.table(device.id, asks.family)
    found = []

    def posed(axes: Iterable[tuple[str, int]]) -> Workload:
        return asks.asked({axis: str(value) for axis, value in axes})[0]

    with described_for(device.capability):
        workloads = [posed(place.axes) for place in places]
        takes = {name: [not c.refuses(w) for w in workloads] for name, c in able.items()}
        for name, work in ((name, c.work) for name, c in able.items() if c.work):
            rivals = [n for n in able if n != name and asks.question(able[n]) == asks.question(able[name])]
            there = dict.fromkeys(tuple(sorted(axes.items())) for axes in known.get(name, ()))
            at = [
                i for i, place in enumerate(places)
                if takes[name][i] and any(takes[rival][i] for rival in rivals) and place.axes not in there
            ]  # fmt: skip
            if not at:
                continue
            works = [work(workloads[i], sms) for i in at]
            seen = [(_point(x), work(posed(x), sms)) for x in there if not able[name].refuses(posed(x))]
            names = tuple(dict.fromkeys(n for w in (*works, *dict(seen).values()) for n in (*w.in_turn, *w.at_once)))
            fitted = stored.fits[name].us if stored and name in stored.fits else {}
            usual = np.exp(timefit.priors(names, device)[0])
            us = {n: fitted.get(n, float(value)) for n, value in zip(names, usual, strict=True)}
            found.append(Doubt(tuple(at), tuple(works), tuple(seen), us))
    return found


def run(
    asks: Router,
    minutes: float = MINUTES,
    device: devices.Device | None = None,
    settings: measure.Settings = SETTINGS,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[list[Measurement]]:
    """Measure where it tells most for so many minutes; yields the rows of each place once they are on the disk."""
    device = device or measure.require_gpu("lab routes --calibrate")
    axes, known = {asks.axis, *asks.shape}, dict[str, list[dict[str, int]]]()
    for row in store.rows(device.id, family=asks.family):
        if row.ok and axes <= row.workload.keys():
            known.setdefault(row.name, []).append({axis: int(row.workload[axis]) for axis in axes})
    budget = replace(settings, budget_s=60 * minutes)
    yield from measure.measure(items(asks, device, known), budget, None, device, tell)
