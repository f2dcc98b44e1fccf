"""Timing: the arithmetic on samples here, the clock itself only where there is a GPU.

Without one, `compare` runs against a sampler that is replaced by known numbers, which shows the order of the visits,
the A/A spread and the stopping rule; that a graph measures what it should is for the tests marked gpu.
"""

import itertools
import math
import statistics
from typing import Any

import pytest

from lab import timing
from lab.timing import Arm, sets_for, standard_error, summarise

MIB = 2**20


@pytest.mark.parametrize(
    ("bytes_per_call", "l2_bytes", "l2", "sets"),
    [
        (100 * MIB, 50 * MIB, "cold", 2),  # one set is already twice the cache, and two are needed to rotate at all
        (40 * MIB, 60 * MIB, "cold", 4),
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
    assert others * bytes_per_call >= timing.L2_FACTOR * l2_bytes


def arm(samples: list[float], blocks: list[float] | None = None) -> Arm:
    return Arm(
        "control", lambda args, out: None, [(None, None)] * 3, calls=6, samples_us=samples, blocks_us=blocks or []
    )


def test_summary() -> None:
    found = summarise(arm([10.0, 12.0, 11.0, 13.0, 30.0], [11.0, 12.0, 13.0]), converged=False)
    assert (found.median_us, found.min_us, found.n, found.calls, found.sets) == (12.0, 10.0, 5, 6, 3)
    assert found.iqr_us == pytest.approx(21.5 - 10.5)  # quartiles of n + 1 intervals, as statistics.quantiles has them
    assert found.sd_pct == pytest.approx(100 * 1.0 / 12.0)
    assert found.drift_pct == pytest.approx(100 * (13 / 11 - 1))
    assert not found.converged
    assert found.samples_us == (10.0, 12.0, 11.0, 13.0, 30.0)


def test_summary_of_one_sample_and_of_steady_ones() -> None:
    one = summarise(arm([7.0]), converged=False)
    assert (one.median_us, one.iqr_us, one.sd_pct, one.drift_pct) == (7.0, 0.0, 0.0, 0.0)
    steady = summarise(arm([7.0] * 500, [7.0] * 10), converged=True)
    assert (steady.iqr_us, steady.sd_pct, steady.drift_pct, steady.converged) == (0.0, 0.0, 0.0, True)


def test_drift_has_its_sign() -> None:
    assert summarise(arm([10.0] * 5 + [11.0] * 5), True).drift_pct == pytest.approx(10)
    assert summarise(arm([11.0] * 5 + [10.0] * 5), True).drift_pct == pytest.approx(-100 / 11)


def test_standard_error() -> None:
    assert standard_error([]) == standard_error([3.0]) == math.inf
    assert standard_error([3.0] * 63) == 0
    samples = [9.0, 10.0, 11.0, 10.0]
    assert standard_error(samples) == pytest.approx(statistics.stdev(samples) / 2 / 10)
    assert standard_error(samples * 100) < standard_error(samples) / 9


# compare() on known samples -------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Samples of 100 us for the control and 80 for the candidate, no waiting; returns who was sampled, in order."""
    visited: list[str] = []

    def sample(which: Arm) -> float:
        visited.append(which.name)
        return which.sets[0][0](len(visited)) if which.sets[0][0] else {"control": 100.0, "candidate": 80.0}[which.name]

    monkeypatch.setattr(timing, "sample", sample)
    monkeypatch.setattr(timing, "smi", lambda *fields: "1980, 2619")
    monkeypatch.setattr(timing, "WARM_UP_S", 0.0)
    return visited


def named(name: str, values: Any = None) -> Arm:
    return Arm(name, lambda args, out: None, [(values, None)], calls=1)


def test_compare_alternates_the_order(clock: list[str]) -> None:
    found = timing.compare(named("control"), named("candidate"), seconds=0.0, visits=3)
    assert found.order.split() == ["ABBA", "BAAB"] * 5
    measured = clock[2 * timing.WARM_UP_REPLAYS :]
    assert clock[: timing.WARM_UP_REPLAYS] == ["control"] * timing.WARM_UP_REPLAYS
    runs = [(name, len(list(group))) for name, group in itertools.groupby(measured)]
    block = [("control", 3), ("candidate", 6), ("control", 3)]
    assert runs[:3] == block
    assert (found.control.n, found.candidate.n) == (60, 60)
    assert (found.control.median_us, found.candidate.median_us, found.aa_pct) == (100, 80, 0)
    assert (found.timer, found.l2, found.clocks_before) == ("graph", "cold", "1980, 2619")
    assert found.control.converged


def test_noise_of_the_control_against_itself(clock: list[str]) -> None:
    """A clock that slows by one per cent each visit: the A/A spread shows it, and nothing is called settled."""
    found = timing.compare(named("control", lambda n: 100.0 + n), named("candidate"), seconds=0.0, visits=1)
    assert 0.5 < found.aa_pct < 10
    assert not found.control.converged
    assert found.candidate.converged
    assert len(found.control.blocks_us) == timing.MIN_BLOCKS
    assert found.control.drift_pct > 5


def test_sampling_goes_on_until_the_time_is_up(clock: list[str]) -> None:
    restless = named("control", lambda n: 100.0 + 50 * (n % 2))
    found = timing.compare(restless, named("candidate"), seconds=0.05, visits=1)
    assert len(found.order.split()) > timing.MIN_BLOCKS
    assert found.control.n == len(found.control.samples_us)


# On a GPU -------------------------------------------------------------------------------------------------------------


def doubling(elements: int, sets: int) -> Arm:
    import torch

    pairs = [(torch.randn(elements, device="cuda"), torch.empty(elements, device="cuda")) for _ in range(sets)]

    def run(args: Any, out: Any) -> None:
        torch.mul(args, 2, out=out)

    return Arm("control", run, pairs)


@pytest.mark.gpu
def test_graph_covers_every_set_and_measures_the_work() -> None:
    import torch

    small, large = doubling(2**24, 3), doubling(2**26, 3)
    small.name, large.name = "control", "candidate"
    for one in (small, large):
        timing.capture(one)
        assert one.calls % len(one.sets) == 0
        for _, out in one.sets:
            out.fill_(float("nan"))
        assert timing.sample(one) > 0
        assert all(torch.equal(out, 2 * args) for args, out in one.sets)
    found = timing.compare(small, large, seconds=0.5)
    assert 3 < found.candidate.median_us / found.control.median_us < 5  # four times the bytes
    assert found.aa_pct < 5


@pytest.mark.gpu
def test_an_arm_that_cannot_be_captured_raises() -> None:
    bad = doubling(63, 2)
    bad.run = lambda args, out: args.sum().item()
    with pytest.raises(RuntimeError):
        timing.capture(bad)
