"""Timing without a GPU: the arithmetic on samples, and `compare` against clocks that are made up.

`Bench` is a timer whose samples are known numbers and whose time is its own: a sample advances the clock that `compare`
looks at, so that half a second of timed work passes at once and the stopping rule is seen from outside. The timers that
need a GPU are in test_timers.py.
"""

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.bench import sampling
from lab.bench.sampling import AGAIN, Arm, Comparison, Hooks, ratio_interval, sets_for, settled, summarise
from lab.row.records import Clocks
from lab.row.samples import aa_floor_pct
from tests.loops import over

MIB = 2**20
CALLS = 100


def arm(samples: list[float], blocks: list[float] | None = None, calls: int = 6) -> Arm:
    return Arm(
        "control", lambda args, out: None, [(None, None)] * 3, calls=calls, samples_us=samples, blocks_us=blocks or []
    )


# Rotation ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bytes_per_call", "l2_bytes", "l2", "sets"),
    [
        (100 * MIB, 50 * MIB, "cold", sampling.MIN_SETS),  # one set is already twice the cache
        (40 * MIB, 60 * MIB, "cold", sampling.MIN_SETS),
        (30 * MIB, 60 * MIB, "cold", 5),
        (29 * MIB, 60 * MIB, "cold", 6),
        (10 * MIB, 60 * MIB, "cold", 13),
        (1, 60 * MIB, "cold", 64),
        (0, 60 * MIB, "cold", 64),
        (10 * MIB, 60 * MIB, "warm", 1),
    ],
)
def test_sets(bytes_per_call: float, l2_bytes: int, l2: str, sets: int) -> None:
    assert sets_for(bytes_per_call, l2_bytes, l2) == sets


@pytest.mark.parametrize("bytes_per_call", [MIB, 3 * MIB, 7 * MIB, 63 * MIB, 500 * MIB])
def test_a_cold_set_has_left_the_cache_when_it_comes_again(bytes_per_call: int) -> None:
    l2_bytes = 60 * MIB
    others = sets_for(bytes_per_call, l2_bytes, most=10**6) - 1
    assert others * bytes_per_call >= sampling.L2_FACTOR * l2_bytes


# The order of allocation ---------------------------------------------------------------------------------------------


@over({str(count): (count,) for count in range(1, 12)})
def test_orders_favour_nobody(count: int) -> None:
    names = [f"arm {i}" for i in range(count)]
    found = list(itertools.islice(sampling.orders(names, random.Random(count)), 4 * count))
    assert all(sorted(order) == sorted(names) for order in found)
    for whole in (found[: 2 * count], found[2 * count :]):
        for place in range(count):
            assert Counter(order[place] for order in whole) == dict.fromkeys(names, 2)
    for two in zip(found[::2], found[1::2], strict=True):
        assert two[0] == two[1][::-1]
    for place in (0, -1):
        ends = Counter(order[place] for order in found[:8])
        assert max(ends[name] for name in names) - min(ends[name] for name in names) <= 1
    assert found != list(itertools.islice(sampling.orders(names, random.Random(count + 1)), 4 * count)) or count == 1


# The stopping rule ---------------------------------------------------------------------------------------------------


def spread(count: int, deviation: float) -> list[float]:
    """`count` samples around 1,000 us with exactly this relative standard deviation (population of +1 and -1)."""
    offset = deviation * math.sqrt((count - 1) / count)
    return [1000.0 * (1 + offset * (-1) ** i) for i in range(count)]


@pytest.mark.parametrize(
    ("samples", "calls", "enough"),
    [
        (spread(10, 0.0), 51, True),
        (spread(10, 0.0), 49, False),  # 0.49 s of timed work
        ([1000.0] * 9, 1000, False),  # nine samples
        (spread(10, 0.0049), 51, True),  # by its deviation
        (spread(10, 0.0051), 51, False),  # standard error 0.16 %
        (spread(30, 0.0053), 50, True),  # by its standard error, 0.097 %
        (spread(100, 0.0098), 50, True),
        (spread(100, 0.0102), 50, False),
        (spread(10000, 0.09), 50, True),  # very noisy, but the mean is known
        ([], 50, False),
        ([1000.0], 10**6, False),
    ],
)
def test_settled(samples: list[float], calls: int, enough: bool) -> None:
    assert settled(arm(samples, calls=calls)) == enough
    if samples:
        assert summarise(arm(samples, calls=calls)).converged == enough


# Summaries -----------------------------------------------------------------------------------------------------------


def test_summary() -> None:
    found = summarise(arm([10.0, 12.0, 11.0, 13.0, 30.0], [11.0, 12.0, 13.0]))
    assert (found.median_us, found.min_us, found.n, found.calls, found.sets) == (12.0, 10.0, 5, 6, 3)
    assert found.iqr_us == pytest.approx(21.5 - 10.5)  # quartiles of n + 1 intervals, as statistics.quantiles has them
    assert found.stdev_us == pytest.approx(statistics.stdev([10, 12, 11, 13, 30]))
    assert found.sd_pct == pytest.approx(100 * 1.0 / 12.0)
    assert found.drift_pct == pytest.approx(100 * (13 / 11 - 1))
    assert not found.converged
    assert found.samples_us == (10.0, 12.0, 11.0, 13.0, 30.0)
    assert found.blocks_us == (11.0, 12.0, 13.0)


def test_summary_of_one_sample_and_of_steady_ones() -> None:
    one = summarise(arm([7.0]))
    assert (one.median_us, one.iqr_us, one.stdev_us, one.sd_pct, one.drift_pct) == (7.0, 0.0, 0.0, 0.0, 0.0)
    steady = summarise(arm([7.0] * 500, [7.0] * 10, calls=1000))
    assert (steady.iqr_us, steady.sd_pct, steady.drift_pct, steady.converged) == (0.0, 0.0, 0.0, True)


def test_drift_has_its_sign() -> None:
    assert summarise(arm([10.0] * 5 + [11.0] * 5)).drift_pct == pytest.approx(10)
    assert summarise(arm([11.0] * 5 + [10.0] * 5)).drift_pct == pytest.approx(-100 / 11)


# The A/A floor and the ratio -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("control", "again", "floor"),
    [
        ([100.0] * 5, [100.0] * 5, 0.0),
        ([100.0] * 5, [103.0] * 5, 3.0),  # no spread at all, but a bias
        ([100.0, 100.0], [99.0, 101.0], 3 * math.sqrt(2)),  # no bias, 1.41 % of spread
        ([100.0, 200.0, 50.0], [100.0, 200.0, 50.0], 0.0),  # what both suffered together is no noise of the ratio
        ([100.0], [100.0], math.inf),
        ([], [], math.inf),
    ],
)
def test_aa_floor(control: list[float], again: list[float], floor: float) -> None:
    assert aa_floor_pct(control, again) == pytest.approx(floor)


def test_aa_floor_of_unpaired_blocks_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        aa_floor_pct([100.0] * 3, [100.0] * 2)


def simulated(draw: random.Random, blocks: int, ratio: float, noise: float) -> tuple[list[float], list[float]]:
    """Block times of two arms that share each block's luck (5 %), with noise of their own."""
    luck = [draw.lognormvariate(0.0, 0.05) for _ in range(blocks)]
    return (
        [100.0 * one * draw.gauss(1.0, noise) for one in luck],
        [100.0 * ratio * one * draw.gauss(1.0, noise) for one in luck],
    )


def test_interval_covers_the_truth() -> None:
    """95 % of 400 intervals, give or take four standard deviations of that count; half of them at half the level."""
    draw = random.Random(20261120)
    hits, half = 0, 0
    for seed in range(400):
        blocks = simulated(draw, 25, 0.93, 0.01)
        _, low, high = ratio_interval(*blocks, seed=seed, resamples=300)
        hits += low <= 0.93 <= high
        _, low, high = ratio_interval(*blocks, seed=seed, resamples=300, level=0.5)
        half += low <= 0.93 <= high
    assert 0.95 - 4 * math.sqrt(0.95 * 0.05 / 400) < hits / 400 < 1.0
    assert 0.4 < half / 400 < 0.65


def test_interval_is_reproducible_and_narrows() -> None:
    few, many = (simulated(random.Random(7), n, 1.05, 0.01) for n in (10, 1000))
    assert ratio_interval(*many, seed=3, resamples=200) == ratio_interval(*many, seed=3, resamples=200)
    assert ratio_interval(*many, seed=3, resamples=200) != ratio_interval(*many, seed=4, resamples=200)
    widths = [high - low for _, low, high in (ratio_interval(*b, resamples=200) for b in (few, many))]
    assert widths[1] < widths[0] / 4


def test_interval_keeps_what_a_block_shared() -> None:
    """Blocks whose times vary by 5 % and whose ratio does not: paired they agree, taken apart they would not."""
    control, candidate = simulated(random.Random(1), 40, 1.1, 0.0)
    assert ratio_interval(control, candidate) == pytest.approx((1.1, 1.1, 1.1))
    shuffled = random.Random(2).sample(candidate, 40)
    _, low, high = ratio_interval(control, shuffled)
    assert high - low > 0.01


@pytest.mark.parametrize(("control", "candidate"), [([1.0], [1.0, 2.0]), ([], []), ([1.0, 2.0], [1.0])])
def test_interval_of_unpaired_blocks(control: list[float], candidate: list[float]) -> None:
    with pytest.raises(ValueError, match="they must be pairs"):
        ratio_interval(control, candidate)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(1, 1e3), st.floats(1, 1e3)), min_size=1, max_size=12))
def test_interval_holds_its_median(blocks: list[tuple[float, float]]) -> None:
    middle, low, high = ratio_interval([a for a, _ in blocks], [b for _, b in blocks], resamples=60)
    assert low <= middle <= high


# compare() on known clocks -------------------------------------------------------------------------------------------


class Bench:
    """A timer for `compare`. clock: (arm name, samples so far, seconds so far) -> us; its time is the only time."""

    name = "made up"

    def __init__(self, clock: Callable[[str, int, float], float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.now = clock, 0.0
        self.visited: list[str] = []
        monkeypatch.setattr(sampling, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def visit(self, one: Arm, samples: int) -> list[float]:
        return [self.sample(one) for _ in range(samples)]

    def release(self, one: Arm) -> None: ...

    def sample(self, one: Arm) -> float:
        taken = self.clock(one.name, len(self.visited), self.now)
        self.visited.append(one.name)
        self.now += 1e-6 * one.calls * taken
        return taken

    def prepare(self, one: Arm) -> None: ...


def compared(
    monkeypatch: pytest.MonkeyPatch,
    clock: Callable[[str, int, float], float],
    names: tuple[str, ...] = ("control", AGAIN, "candidate"),
    calls: int = CALLS,
    **how: Any,
) -> tuple[Comparison, Bench]:
    bench = Bench(clock, monkeypatch)
    arms = [Arm(name, lambda args, out: None, [(None, None)], calls=calls) for name in names]
    return sampling.compare(arms, bench, **how), bench


def steady(name: str, number: int, now: float) -> float:
    return 80.0 if name == "candidate" else 100.0


@pytest.mark.parametrize("count", [1, 2, 7, 24])
def test_blocks_are_drawn_as_python_draws_them(count: int) -> None:
    """The intervals of every committed verdict stand on these draws; numpy only makes them faster."""
    rng = random.Random(count)
    control, candidate = ([rng.uniform(90, 110) for _ in range(count)] for _ in range(2))
    ratios, draw = [b / a for a, b in zip(control, candidate, strict=True)], random.Random(3)
    medians = sorted(statistics.median(draw.choices(ratios, k=count)) for _ in range(200))
    assert ratio_interval(control, candidate, seed=3, resamples=200)[1:] == (medians[5], medians[-6])


def test_steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = compared(monkeypatch, steady, seconds=1000.0)
    assert set(found.arms) == {"control", "candidate"}
    assert found.again is not None
    assert len(found.again.samples_us) == found.arms["control"].n  # every sample is kept, the second control's too
    control, candidate = found.arms["control"], found.arms["candidate"]
    assert (control.median_us, candidate.median_us, found.aa_pct, found.timer) == (100, 80, 0, "made up")
    assert control.converged
    assert candidate.converged
    # It stops as soon as the fastest has its 0.5 s: 50 ms a block of 10 samples of 100 calls would do in 7 blocks.
    assert 0.5 <= 1e-6 * CALLS * sum(candidate.samples_us) < 0.6
    assert len(found.order) == len(control.blocks_us) == 7


def test_order_is_a_palindrome_from_a_recorded_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("control", AGAIN, "candidate", "peer")
    found, bench = compared(monkeypatch, steady, names, seconds=0.0, seed=5)
    per_arm = max(sampling.WARM_UP_SAMPLES, math.ceil(sampling.WARM_UP_S / (1e-6 * CALLS * 80)))
    assert bench.visited[:per_arm] == ["control"] * per_arm
    measured = bench.visited[-2 * len(names) * sampling.VISIT * len(found.order) :]
    visits = measured[:: sampling.VISIT]
    assert measured == [name for name in visits for _ in range(sampling.VISIT)]
    size = 2 * len(names)
    blocks = [visits[i : i + size] for i in range(0, len(visits), size)]
    assert [" ".join(block[: len(names)]) for block in blocks] == list(found.order)
    for block in blocks:
        assert block == block[::-1]
        assert sorted(block[: len(names)]) == sorted(names)
    assert found.seed == 5
    assert compared(monkeypatch, steady, names, seconds=0.0, seed=5)[0].order == found.order
    assert compared(monkeypatch, steady, names, seconds=0.0, seed=6)[0].order != found.order


def test_warm_up_is_long_enough_and_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first 25 ms of each arm are slow; and a slow arm is still warmed up ten times."""
    since: dict[str, float] = {}

    def clock(name: str, number: int, now: float) -> float:
        return 500.0 if now - since.setdefault(name, now) < sampling.WARM_UP_S else 100.0

    found, _ = compared(monkeypatch, clock, calls=1, seconds=0.0)
    assert all(max(a.samples_us) == 100 for a in found.arms.values())
    _, bench = compared(monkeypatch, lambda *_: 100.0, calls=10**6, seconds=0.0)
    assert bench.visited[: 3 * sampling.WARM_UP_SAMPLES] == [
        name for name in ("control", AGAIN, "candidate") for _ in range(sampling.WARM_UP_SAMPLES)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_drifting_clock_favours_no_arm(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that slows by 0.05 % a sample, 20 % over the run: equal arms stay equal, block by block."""
    found, _ = compared(monkeypatch, lambda name, n, now: 100.0 * (1 + 5e-4 * n), seconds=4.0, seed=seed)
    control, candidate = found.arms["control"], found.arms["candidate"]
    assert control.drift_pct > 5
    middle, low, high = ratio_interval(control.blocks_us, candidate.blocks_us)
    assert abs(middle - 1) < 1e-4
    assert low <= 1 + 1e-4
    assert high >= 1 - 1e-4
    assert (found.aa_pct or math.inf) < 0.1


def test_whoever_leads_a_block_has_no_lasting_advantage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first five samples of a block cost twice: each arm pays for it in its share of the blocks."""
    state = {"block": 0}

    def clock(name: str, n: int, now: float) -> float:
        state["block"] = (state["block"] + 1) % (3 * 2 * sampling.VISIT)
        return 200.0 if 0 < state["block"] <= sampling.VISIT else 100.0

    monkeypatch.setattr(sampling, "WARM_UP_S", 0.0)
    found, _ = compared(monkeypatch, clock, seconds=30.0, seed=1)
    lead = [line.split(" ")[0] for line in found.order]
    assert len(lead) > 60
    # `control again` splits into two words, so it counts as control: two thirds of the blocks.
    assert 0.2 < lead.count("candidate") / len(lead) < 0.47
    ratio = statistics.fmean(found.arms["candidate"].blocks_us) / statistics.fmean(found.arms["control"].blocks_us)
    assert abs(ratio - 1) < 0.08  # 0.5 if it always led


def test_time_up_is_not_converged(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = random.Random(3)

    def clock(name: str, n: int, now: float) -> float:
        return 100.0 * (noise.uniform(0.5, 1.5) if name == "candidate" else 1.0)

    found, bench = compared(monkeypatch, clock, seconds=5.0)
    assert not found.arms["candidate"].converged
    assert found.arms["control"].converged  # it settled long ago and went on, so that blocks stay pairs
    assert len(found.arms["control"].blocks_us) == len(found.arms["candidate"].blocks_us) == len(found.order)
    warm_up = 3 * sampling.WARM_UP_S
    assert 5.0 <= bench.now - warm_up < 5.5


def test_at_least_five_blocks_whatever_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = compared(monkeypatch, steady, seconds=0.0)
    assert len(found.order) == sampling.MIN_BLOCKS == 5
    assert found.arms["candidate"].n == sampling.MIN_BLOCKS * 2 * sampling.VISIT
    assert not found.arms["candidate"].converged  # 0.4 s of timed work


@pytest.mark.parametrize("bias", [0.03, -0.03])
def test_floor_is_the_second_control_against_the_first(bias: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def clock(name: str, n: int, now: float) -> float:
        return {"control": 100.0, AGAIN: 100.0 * (1 + bias), "candidate": 300.0}[name]

    assert compared(monkeypatch, clock, seconds=0.0)[0].aa_pct == pytest.approx(3.0)
    alone, _ = compared(monkeypatch, clock, ("control", "candidate"), seconds=0.0)
    assert (alone.aa_pct, alone.again) == (math.inf, None)


def test_the_clocks_of_a_block_are_kept_and_their_reading_is_no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whichever visit; a clock that is not known behind one of them, or reads zero, is none of any block."""

    def found(said: Callable[[int], Clocks | None]) -> Comparison:
        bench, number = Bench(steady, monkeypatch), itertools.count()
        arms = [Arm(name, lambda args, out: None, [(None, None)], calls=CALLS) for name in ("control", "candidate")]
        how = Hooks(clocks=lambda: None, clocks_at_once=lambda: said(next(number)), sleep=lambda s: None)
        return sampling.compare(arms, bench, seconds=0.0, rest=1.0, hooks=how, placements=2)

    def clock(mhz: int) -> Clocks:
        return Clocks("made up", mhz, 3201, "cap" if mhz < 1980 else "")

    blocks = 2 * sampling.PLACED_BLOCKS  # of four visits, with a clock ahead of each and one behind it
    one = found(lambda n: clock(1900 + n // 8 if n % 8 == 3 else 1950 + n // 8))
    assert one.block_mhz == tuple(1900 + block for block in range(blocks))
    assert one.block_top_mhz == tuple(1950 + block for block in range(blocks))
    assert [c.sm_mhz for c in one.clocks if c] == [one.block_mhz[0], one.block_mhz[sampling.PLACED_BLOCKS]]
    assert one.shape[:2] == (2, sampling.PLACED_BLOCKS)
    assert found(lambda n: clock(1980 if n == 8 else 1800)).block_top_mhz == (1800, 1980, *(1800,) * (blocks - 2))
    for said in (lambda n: clock(1950) if n != 9 else None, lambda n: clock(1950 * (n != 9)), lambda n: None):
        assert (found(said).block_mhz, found(said).block_top_mhz) == ((), ())


def test_clocks_are_read_at_both_ends_of_each_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    windows: list[float] = []
    bench = Bench(steady, monkeypatch)
    arms = [Arm(name, lambda args, out: None, [(None, None)], calls=CALLS) for name in ("control", "candidate")]

    def read() -> str:
        windows.append(bench.now)
        return f"throttled {len(windows)}"

    monkeypatch.setattr(sampling, "MIN_TIMED_S", 3.0)
    found = sampling.compare(arms, bench, seconds=4.0, hooks=Hooks(clocks=read), placements=2)
    assert found.clocks == tuple(f"throttled {i}" for i in (1, 2, 3, 4))  # a throttled window is kept like any other
    start, *middle, end = windows
    assert [(at - start) / (end - start) for at in middle] == pytest.approx([0.5, 0.5], abs=0.1)
    assert found.arms["control"].n == len(found.arms["control"].samples_us)


def test_rest_idles_between_visits_and_is_no_part_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(steady, monkeypatch)
    arms = [Arm(name, lambda args, out: None, [(None, None)], calls=CALLS) for name in ("control", AGAIN)]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        bench.now += seconds

    found = sampling.compare(arms, bench, seconds=0.1, rest=4.0, hooks=Hooks(sleep=sleep))
    visit_s = sampling.VISIT * CALLS * 100e-6
    assert len(slept) == 2 + 2 * 2 * sampling.MIN_BLOCKS  # after each warm-up, and after each of two visits a block
    assert slept[2:] == pytest.approx([4.0 * visit_s] * (len(slept) - 2))
    assert found.arms["control"].median_us == 100
    assert found.arms["control"].n == 2 * sampling.VISIT * sampling.MIN_BLOCKS

    slept.clear()
    sampling.compare(arms, bench, seconds=0.1, hooks=Hooks(sleep=sleep))
    assert slept == []
