"""How a comparison is timed. One method, whatever the timer:

1. Every arm rotates over `sets`, distinct (args, out) pairs. For a cold L2 their bytes exceed twice the cache that the
   device reports, so that a set has been evicted when its turn comes again; for a warm one there is a single set. The
   control is there twice, with sets of its own: the second is the A/A arm, and its spread is the measured noise floor.
2. A comparison is repeated over placements: all sets are given back and made anew, with fresh values. Blocks of one
   placement agree within 0.3 % where placements of one kernel differ by up to 3 %, on an H200. The arm that allocates
   last can be faster in all of them (NVFP4 GEMVs of card one-layout-decode), so every arm allocates in each position,
   and before each other arm, as often as the number of placements allows: see `orders`.
3. Warm-up of each arm in each placement: at least 10 samples and 25 ms.
4. Interleaved blocks in palindromic order, A B C ... C B A, the order drawn for each block from a seeded generator, so
   that neither order nor drift favours an arm; seed and order are stored. A ratio is formed within a block, never
   across blocks. Every placement has as many blocks as the first.
5. The first placement ends when every arm has converged (relative standard error below 0.1 %, or relative standard
   deviation below 0.5 %), with at least 10 samples and 0.5 s of its own timed work; or when its share of the time is
   up. The medians of the first and the second half are compared for drift.
   With `rest` the GPU idles after each visit of an arm, `rest` times as long as the visit took: a card at its power cap
   lowers its clock by what ran just before, so that arms of hundreds of us would inherit each other's heat. Rested
   figures are at the full clock, others at that of a loaded card; the row says which.
6. SM and memory clock and throttle reasons are sampled behind each placement's warm-up, ahead of and behind each visit,
   and at the placement's end; of a block's the lowest and the highest SM clock are kept, of a placement's the lowest
   sample. A throttled window is flagged, never dropped. Every time is kept.

The timer is an object with a name, which the row stores (lab/bench/timers.py). Here is only what needs no GPU, so that
all of it is tested against made-up clocks: `compare` is the schedule, `settled` and `ratio_interval` are statistics,
and lab/row/samples.py has those that a row computes too.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from lab.row import samples
from lab.row.records import Clocks

L2_FACTOR = 2.0
MIN_SETS = 5
MOST_SETS = 64
WARM_UP_SAMPLES = 10
WARM_UP_S = 0.025
STANDARD_ERROR = 0.001
STANDARD_DEVIATION = 0.005
MIN_SAMPLES = 10
MIN_TIMED_S = 0.5
MIN_BLOCKS = 5
PLACED_BLOCKS = 3  # of each of several placements: they differ by more than its blocks do
VISIT = 5  # samples taken each time an arm is visited
AGAIN = "control again"


@dataclass
class Arm:
    """One side of a comparison. `sets` are (args, out) pairs; `run` launches one call on one of them.

    calls: how many calls one sample holds (set by the timer); state, once: what the timer keeps with the arm, for
    samples and for one call on each set; turn: samples that the timer took of these sets; alone: whether a call is a
    sample by itself, None where the timer is to say. inputs, outputs: those of each set, as tensors that no candidate
    gets (see `accuracy.handed`). prepare_us, prepared_bytes: time and memory of `prepare`. made, stirred: the first
    set's seed, of the inputs and of its activations since. firsts: the first sample of each visit over the median of
    the others. eager: as in `kernels.common.Candidate`.
    """

    name: str
    run: Callable[[Any, Any], None]
    sets: list[tuple[Any, Any]]
    calls: int = 1
    state: Any = None
    once: Any = None
    turn: int = 0
    alone: bool | None = None
    samples_us: list[float] = field(default_factory=list)
    blocks_us: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    eager: Callable[[Any, Any], Any] | None = None
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    made: int = 0
    stirred: int = 0
    prepare_us: float | None = None
    prepared_bytes: int | None = None


class Timer(Protocol):
    """What a timer does; its name is what a row stores."""

    @property
    def name(self) -> str:
        """As the row stores it."""
        ...

    def prepare(self, arm: Arm) -> None:
        """Run every set once; may capture them and choose `arm.calls`. Raises what the candidate raises."""

    def visit(self, arm: Arm, samples: int) -> list[float]:
        """So many samples, us per call: of every set where `arm.calls` says so, else of one set after the other."""
        ...

    def release(self, arm: Arm) -> None:
        """Let go of the sets."""


def runs_of_sets(arm: Arm, samples: int, turn: int | None = None) -> list[int]:
    """How often each set runs in so many samples of a timer, behind those already taken or behind `turn`."""
    count = len(arm.sets)
    if arm.calls >= count:
        return [samples * arm.calls // count] * count
    turns = [((arm.turn if turn is None else turn) + i) % count for i in range(samples)]
    return [turns.count(i) for i in range(count)]


def last_set(arm: Arm) -> int:
    """The set that the last sample ended with."""
    count = len(arm.sets)
    return count - 1 if arm.calls >= count else (arm.turn - 1) % count


class Timing(msgspec.Struct, frozen=True):
    """The samples of one arm, us per call. sd_pct: standard deviation of the block medians in % of the median."""

    median_us: float
    iqr_us: float
    min_us: float
    stdev_us: float
    n: int
    calls: int
    sets: int
    converged: bool
    sd_pct: float
    drift_pct: float
    samples_us: tuple[float, ...]
    blocks_us: tuple[float, ...]


class Comparison(msgspec.Struct, frozen=True):
    """Arms timed together. aa_pct: the A/A noise floor; clocks: samples at both ends of each placement, and its lowest.

    block_mhz, block_top_mhz: the lowest and the highest SM clock around the visits of each block, by placement and
    block; () where it was not read.

    shape: (placements, blocks a placement, samples a block) of every arm; processes: how many the placements are of.

    again: the second control, None when there was none, and aa_pct is then infinite (None, once it went through JSON).
    control, l2: the arm that the others are held against, and the cache's state, as the caller asked for them.
    """

    arms: dict[str, Timing]
    order: tuple[str, ...]
    seed: int
    aa_pct: float | None
    timer: str
    clocks: tuple[Clocks | None, ...]
    again: Timing | None = None
    control: str = ""
    l2: str = ""
    shape: tuple[int, int, int] = (1, 1, 1)
    processes: int = 1
    block_mhz: tuple[int, ...] = ()
    block_top_mhz: tuple[int, ...] = ()


def sets_for(bytes_per_call: float, l2_bytes: int, l2: str = "cold", most: int = MOST_SETS) -> int:
    """How many distinct sets a cold measurement rotates over: their bytes exceed L2_FACTOR times the cache.

    At least MIN_SETS: with two sets of 178 MB a cuBLAS GEMM moved by 2 % from run to run on an H200, by the addresses
    of its buffers. At most MOST_SETS: of calls that move less than that part of the cache, all stay in it.
    """
    if l2 == "warm":
        return 1
    return max(MIN_SETS, min(most, math.ceil(L2_FACTOR * l2_bytes / max(bytes_per_call, 1.0)) + 1))


def orders(names: Sequence[str], draw: random.Random) -> Iterator[list[str]]:
    """Orders without end, in which each name stands in every position, and before every other name, equally often.

    A drawn order, turned by 0, 2, 4, ... places and then by 1, 3, 5, ..., each followed by its reverse; then another
    draw. Every two orders balance who comes before whom, and the 2 n of a draw the positions; first and last place go
    round among the names soonest.
    """
    while True:
        drawn = draw.sample(names, len(names))
        for places in (*range(0, len(names), 2), *range(1, len(names), 2)):
            turned = drawn[places:] + drawn[:places]
            yield turned
            yield turned[::-1]


def settled(arm: Arm) -> bool:
    """Whether an arm needs no more samples; see the stopping rule above."""
    if len(arm.samples_us) < MIN_SAMPLES or 1e-6 * arm.calls * math.fsum(arm.samples_us) < MIN_TIMED_S:
        return False
    deviation = statistics.stdev(arm.samples_us) / statistics.fmean(arm.samples_us)
    return deviation / math.sqrt(len(arm.samples_us)) < STANDARD_ERROR or deviation < STANDARD_DEVIATION


def summarise(arm: Arm) -> Timing:
    """An arm's samples with what they say."""
    return _timing(tuple(arm.samples_us), tuple(arm.blocks_us), arm.calls, len(arm.sets), settled(arm))


def joined(first: Timing, second: Timing) -> Timing:
    """The samples of one arm in two processes, by placement."""
    samples_us, blocks_us = first.samples_us + second.samples_us, first.blocks_us + second.blocks_us
    return _timing(samples_us, blocks_us, first.calls, first.sets, first.converged and second.converged)


def _timing(
    samples_us: tuple[float, ...], blocks_us: tuple[float, ...], calls: int, sets: int, converged: bool
) -> Timing:
    """With what the samples say (lab/row/samples.py)."""
    return Timing(
        **samples.summary(samples_us, blocks_us)._asdict(),
        calls=calls, sets=sets, converged=converged, samples_us=samples_us, blocks_us=blocks_us,
    )  # fmt: skip


def ratio_interval(
    control: Sequence[float], candidate: Sequence[float], seed: int = 0, resamples: int = 2000, level: float = 0.95
) -> tuple[float, float, float]:
    """(median, low, high) of candidate / control over blocks, with a bootstrap confidence interval of the median.

    The two sequences are block times of one comparison, in the same order; blocks are resampled in pairs. Raises
    ValueError when their lengths differ or there is no block.
    """
    if len(control) != len(candidate) or not control:
        raise ValueError(f"{len(control)} control blocks and {len(candidate)} candidate blocks; they must be pairs")
    import numpy  # here: a comparison is timed without it

    ratios = numpy.array([b / a for a, b in zip(control, candidate, strict=True)])
    ordered = numpy.sort(ratios[_draws(seed, resamples, len(ratios))])
    half = len(ratios) // 2
    medians = numpy.sort(ordered[:, half] if len(ratios) % 2 else (ordered[:, half - 1] + ordered[:, half]) / 2)
    edge = int(resamples * (1.0 - level) / 2.0)
    return statistics.median(ratios.tolist()), float(medians[edge]), float(medians[resamples - 1 - edge])


@functools.cache
def _draws(seed: int, resamples: int, count: int) -> Any:
    """Indices [resamples, count] of blocks: those that random.Random(seed).choices draws, which intervals stand on."""
    import numpy

    _, state, _ = random.Random(seed).getstate()
    draw = numpy.random.RandomState()
    draw.set_state(("MT19937", numpy.array(state[:-1], dtype=numpy.uint32), state[-1], 0, 0.0))
    return (draw.random_sample((resamples, count)) * count).astype(numpy.int64)


def warm_up(timer: Timer, arm: Arm) -> None:
    """At least WARM_UP_SAMPLES samples and WARM_UP_S seconds, thrown away."""
    until = time.perf_counter() + WARM_UP_S
    taken = 0
    while taken < WARM_UP_SAMPLES or time.perf_counter() < until:
        timer.visit(arm, VISIT)
        taken += VISIT


@dataclass(frozen=True)
class Hooks:
    """What happens around the samples; the defaults do nothing.

    visiting: before each visit, so that an error or a crash can be attributed. stir: before each visit too, outside of
    what `rest` follows. clocks_at_once: samples the clocks or says nothing, ahead of and behind each that is no
    warm-up, before the rest. visited: behind each of these. place: before each placement but the first, with its
    number, to allocate the arms anew. between: before each block, with the numbers of the placement and the block.
    """

    clocks: Callable[[], Any] = lambda: None
    sleep: Callable[[float], None] = time.sleep
    visiting: Callable[[Arm], None] = lambda arm: None
    stir: Callable[[Arm], None] = lambda arm: None
    clocks_at_once: Callable[[], Clocks | None] = lambda: None
    visited: Callable[[Arm], None] = lambda arm: None
    place: Callable[[int], None] = lambda number: None
    between: Callable[[int, int], None] = lambda number, block: None


def compare(
    arms: Sequence[Arm],
    timer: Timer,
    seconds: float = 2.0,
    seed: int = 0,
    rest: float = 0.0,
    hooks: Hooks = Hooks(),
    placements: int = 1,
    blocks: int = 0,
) -> Comparison:
    """Time prepared arms together; the first is the control, and one named AGAIN is its second self.

    seconds: the most that sampling takes, warm-up apart; at least MIN_BLOCKS blocks are taken whatever it says, or
    PLACED_BLOCKS of each of several placements. rest: idle time after each visit as a multiple of the visit's own.
    blocks: of each placement, where it is not for the first of them to say.
    """

    @contextlib.contextmanager
    def visit(arm: Arm) -> Iterator[None]:
        hooks.visiting(arm)
        hooks.stir(arm)
        began = time.perf_counter()
        yield
        if rest > 0:
            hooks.sleep(rest * (time.perf_counter() - began))

    draw = random.Random(seed)
    least = PLACED_BLOCKS if placements > 1 else MIN_BLOCKS
    order: list[str] = []
    windows: list[Clocks | None] = []
    block_mhz: list[int] = []
    block_top_mhz: list[int] = []
    for number in range(placements):
        if number:
            hooks.place(number)
        for arm in arms:
            with visit(arm):
                warm_up(timer, arm)
        windows.append(hooks.clocks())
        start, taken, lowest = time.perf_counter(), 0, list[Clocks]()
        while (
            taken < (blocks or least)
            or (not blocks and time.perf_counter() - start < seconds / placements and not all(map(settled, arms)))
        ):  # fmt: skip
            hooks.between(number, taken)
            turn = draw.sample(arms, len(arms))
            order.append(" ".join(a.name for a in turn))
            visits: dict[str, list[float]] = {a.name: [] for a in arms}
            read: list[Clocks] = []
            for arm in (*turn, *reversed(turn)):
                with visit(arm):
                    ahead = hooks.clocks_at_once()
                    samples_us = timer.visit(arm, VISIT)
                    read += filter(None, (ahead, hooks.clocks_at_once()))
                hooks.visited(arm)
                arm.samples_us += samples_us
                arm.firsts.append(samples_us[0] / statistics.median(samples_us[1:]))
                visits[arm.name].append(statistics.median(samples_us))
            for arm in arms:
                arm.blocks_us.append(statistics.fmean(visits[arm.name]))
            if len(read) == 4 * len(arms):
                lowest.append(min(read, key=lambda clock: clock.sm_mhz))
                block_mhz.append(lowest[-1].sm_mhz)
                block_top_mhz.append(max(clock.sm_mhz for clock in read))
            taken += 1
        blocks = taken
        windows += sorted(lowest, key=lambda clock: clock.sm_mhz)[:1]
        windows.append(hooks.clocks())
    control, known = arms[0], len(block_mhz) == placements * blocks and all(block_mhz)
    again = next((a for a in arms if a.name == AGAIN), None)
    return Comparison(
        arms={a.name: summarise(a) for a in arms if a.name != AGAIN},
        order=tuple(order),
        seed=seed,
        aa_pct=samples.aa_floor_pct(control.blocks_us, again.blocks_us) if again else math.inf,
        timer=timer.name,
        clocks=tuple(windows),
        again=summarise(again) if again else None,
        control=control.name,
        shape=(placements, blocks, 2 * VISIT),
        block_mhz=tuple(block_mhz) if known else (),
        block_top_mhz=tuple(block_top_mhz) if known else (),
    )
