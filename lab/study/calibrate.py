"""`lab routes FAMILY --calibrate`: measures where the time model knows least, and fits it.

The pool are the shapes of public models (data/public_models.csv), from 0.5B to 405B. Of it the places are taken one
after another, each the farthest from all before it and from what is measured already, so that whatever the minutes
allow is spread as evenly as so many places can be. At each, all that a router may take and the rivals that are
installed are timed and checked as for a card but briefly (lab/bench/comparison.py: Job.brief): one placement of three
blocks, which holds a median to about 2 %, in arms' processes that live on from place to place. Nothing is judged; the
rows are kept as phase `calibration-<family>` and never take the place of a card's. The router's file is written from
all rows of the device, so this makes routes from nothing on a GPU that no list has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from lab.base import devices, files
from lab.base.errors import REPOSITORY, BadInput
from lab.bench import measure
from lab.card import phases
from lab.check import families
from lab.row import store
from lab.row.records import CALIBRATION, Measurement, Role

if TYPE_CHECKING:  # kernels/ is imported late, so that a package that shadows it is told in one line
    from kernels.routing import Router

FILE = REPOSITORY / "data" / "public_models.csv"
MOST = 60  # places of one calibration
MINUTES = 2.0  # of one family
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096)
LENGTHS, CACHES = (16, 64, 256, 1024, 4096), (256, 1024, 8192, 32768)
BATCHES, SHARES = (1, 4, 16, 64), (1, 2, 4, 8)
LARGEST = 1 / 40  # of the GPU's memory, of what a product of 16-bit operands reads: its reference takes float64
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


def spread(places: Sequence[Place], known: Sequence[Mapping[str, int]], most: int) -> list[Place]:
    """Up to `most` of the places, each the farthest from those before it and from `known`; the first where it starts.

    Distance: Euclidean, of log2 of the axes. Without any known place it starts at the middle one.
    """
    points = [tuple(math.log2(v) for _, v in p.axes) for p in places]
    names = [axis for axis, _ in places[0].axes] if places else []
    there = [tuple(math.log2(axes[name]) for name in names) for axes in known if set(names) <= axes.keys()]
    apart = [min((math.dist(p, q) for q in there), default=math.inf) for p in points]
    chosen: list[Place] = []
    for _ in range(min(most, len(places))):
        if not there and not chosen:
            middle = tuple(sum(axis) / len(points) for axis in zip(*points, strict=True))
            at = min(range(len(points)), key=lambda i: math.dist(points[i], middle))
        else:
            at = max(range(len(points)), key=apart.__getitem__)
        if apart[at] == 0:
            break
        chosen.append(places[at])
        apart = [min(far, math.dist(p, points[at])) for far, p in zip(apart, points, strict=True)]
    return chosen


def words(asks: Router, place: Place) -> str:
    """A place as the workload that its row names: its axes, and what the router's question fixes."""
    fixed = {axis: value for axis, value in asks.fixed.items() if value != ""}
    return " ".join(f"{axis}={value}" for axis, value in {**dict(place.axes), **fixed}.items())


def items(asks: Router, device: devices.Device, known: Sequence[Mapping[str, int]]) -> list[measure.Item]:
    """The comparisons, in the order in which they tell most: every candidate that takes the workload, and rivals."""
    family = families.bare(asks.family)
    room = device.vram.base * LARGEST if device.vram else math.inf
    told = measure.described(asks.family)
    fitting = [
        place
        for place in pool(asks)
        if max(family.cost(_workload(family, asks, place), p).bytes for p in set(told.precisions.values())) <= room
    ]
    chosen = spread(fitting, known, MOST)
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


def _workload(family: families.Family, asks: Router, place: Place) -> Any:
    return family.workload(words(asks, place))


def run(
    asks: Router,
    minutes: float = MINUTES,
    device: devices.Device | None = None,
    settings: measure.Settings = SETTINGS,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[list[Measurement]]:
    """Measure where it tells most for so many minutes; yields the rows of each place once they are on the disk."""
    device = device or measure.require_gpu("lab routes --calibrate")
    axes = {asks.axis, *asks.shape}
    rows = (row.workload for row in store.rows(device.id, family=asks.family) if row.ok)
    known = [{axis: int(workload[axis]) for axis in axes} for workload in rows if axes <= workload.keys()]
    budget = replace(settings, budget_s=60 * minutes)
    yield from measure.measure(items(asks, device, known), budget, None, device, tell)
