"""The timers on a GPU, and the two cheats whose disguise only a GPU has: another stream, and a remembered answer.

Their twins for a CPU, with a capture that is played by a list, are in test_comparison.py.
"""

import time
from typing import Any

import pytest

from kernels.common import Candidate, Tensors, Workload
from lab.bench import comparison, sampling, timers
from lab.bench.backend import Backend
from lab.bench.sampling import Arm
from tests.bench import fake_bench
from tests.check import fake_candidates
from tests.refused import refused


def test_names() -> None:
    for name in timers.NAMES:
        assert timers.named(name, "warm", 0).name == name
    with refused("--timer", '"graf"', remedy='"graph"'):
        timers.named("graf", "cold", 0)


def test_events_flush_only_when_cold() -> None:
    assert vars(timers.named("events", "cold", 60))["flush_bytes"] == 60 * timers.FLUSH_FACTOR
    assert vars(timers.named("events", "warm", 60))["flush_bytes"] == 0


def test_the_hosts_timer_calls_what_a_server_calls_and_keeps_its_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen: list[bool] = []

    def eager(args: Any, out: Any) -> Any:
        seen.append(torch.is_inference_mode_enabled())
        return {"y": args * 2}

    sets = [(torch.full((3,), float(number)), {"y": torch.zeros(3)}) for number in range(3)]
    arm, timer = Arm("eager", lambda args, out: out["y"].fill_(-1), sets, eager=eager), timers.named("host", "cold", 0)
    timer.prepare(arm)
    assert (arm.calls, seen.count(True)) == (99, len(seen))
    seen.clear()
    times = timer.visit(arm, 2)
    assert (len(times), len(seen), arm.turn) == (2, 2 * 99, 2)
    assert all(0 < us < 1e5 for us in times)
    assert all(torch.equal(out["y"], 2 * args) for args, out in sets)
    arm.eager = None
    timer.visit(arm, 1)
    assert all(bool((out["y"] == -1).all()) for _, out in sets)


@pytest.mark.parametrize(("gpu_us", "calls"), [(0.0, 100), (timers.HOST_LONG_US, 2)])
def test_a_step_is_called_once_a_set_for_the_hosts_time(
    gpu_us: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred of a thousand launches each would fill the queue, and the host would wait for the GPU."""
    monkeypatch.setattr(timers, "_wait", lambda: time.sleep(1e-6 * gpu_us))
    seen: list[Any] = []
    sets: Any = [(number, {}) for number in range(2)]
    arm, timer = Arm("replay", lambda args, _: seen.append(args), sets), timers.named("host", "warm", 0)
    timer.prepare(arm)
    assert arm.calls == calls
    seen.clear()
    timer.visit(arm, 3)
    assert seen == [0, 1] * (3 * calls // 2)


def doubling(elements: int, sets: int, name: str = "control") -> Arm:
    import torch

    # Drawn on the CPU: a capture that fails leaves the GPU's generator unusable for the tests after it.
    pairs = [(torch.randn(elements).cuda(), torch.empty(elements, device="cuda")) for _ in range(sets)]

    def run(args: Any, out: Any) -> None:
        torch.mul(args, 2, out=out)

    return Arm(name, run, pairs)


@pytest.mark.gpu
def test_the_hosts_time_has_none_of_the_gpus() -> None:
    timer, small, large = timers.named("host", "cold", 0), doubling(2**10, 3), doubling(2**26, 3)
    for one in (small, large):
        timer.prepare(one)
    times = [min(timer.visit(one, 10)) for one in (small, large)]
    assert times[1] < 2 * times[0] < 60  # on the GPU the large ones take more than 100 us


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in timers.NAMES if name != "host"])
def test_four_times_the_bytes_take_four_times_as_long(name: str) -> None:
    import torch

    timer = timers.named(name, "cold", 60 * 2**20)
    small, large = doubling(2**24, 3), doubling(2**26, 3, "candidate")
    for one in (small, large):
        for _, out in one.sets:
            out.fill_(float("nan"))
        timer.prepare(one)
        assert timer.visit(one, len(one.sets))[-1] > 0
        assert all(torch.equal(out, 2 * args) for args, out in one.sets)
        assert one.calls % len(one.sets) == 0 or name == "events"
    found = sampling.compare([small, large], timer, seconds=0.5)
    assert found.timer == name
    assert 3 < found.arms["candidate"].median_us / found.arms["control"].median_us < 5


@pytest.mark.gpu
def test_kernels_take_no_longer_than_the_replay_that_holds_them() -> None:
    timer, one = timers.GraphTimer(), doubling(2**20, 3)
    timer.prepare(one)
    for _ in range(20):
        timer.visit(one, 1)
    assert 0.5 < timers.CuptiTimer().visit(one, 1)[0] / min(timer.visit(one, 20)) < 1.02


@pytest.mark.gpu
def test_a_long_call_is_a_sample_by_itself_on_one_set_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "ALONE_US", 20.0)
    timer, long, together, short = timers.GraphTimer(), doubling(2**24, 3), doubling(2**24, 3), doubling(2**12, 3)
    together.alone = False
    for one in (long, short, together):
        timer.prepare(one)
    assert (long.calls, len(long.state), long.alone) == (1, 3, True)
    assert (len(short.state), short.alone, len(together.state), together.calls % 3) == (1, False, 1, 0)
    for given, out in long.sets:
        out.fill_(0)
        timer.visit(long, 1)
        assert (out == 2 * given).all()
    assert abs(min(timer.visit(long, 20)) - min(timer.visit(together, 5))) < 10


@pytest.mark.gpu
def test_cold_is_slower_than_warm() -> None:
    """16 MiB read and as much written: within the 50 MiB of an L2, so a warm call never goes to memory."""
    times = {}
    for l2, sets in (("cold", sampling.sets_for(2**25, 60 * 2**20)), ("warm", 1)):
        timer, one = timers.GraphTimer(), doubling(2**22, sets)
        timer.prepare(one)
        times[l2] = sampling.compare([one], timer, seconds=0.3).arms["control"].median_us
    assert times["cold"] > 1.2 * times["warm"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["graph", "cupti"])
def test_an_arm_that_cannot_be_captured_raises(name: str) -> None:
    bad = doubling(63, 2)
    bad.run = lambda args, out: args.sum().item()
    with pytest.raises(RuntimeError):
        timers.named(name, "cold", 0).prepare(bad)


# Cheats on a GPU -----------------------------------------------------------------------------------------------------

SIDE: list[Any] = []


def own_stream(args: Tensors, out: Tensors) -> None:
    """Works on a stream of its own that nobody waits for: a capture does not see it, nor do the events."""
    import torch

    if not SIDE:
        SIDE.append(torch.cuda.Stream())
    with torch.cuda.stream(SIDE[0]):
        torch.mul(args["x"], args["scale"], out=out["y"])


def memoises(args: Tensors, out: Tensors) -> None:
    """Computes once for a pointer and copies the remembered answer from then on."""
    key = args["x"].data_ptr()
    if key not in fake_candidates.MEMORY:
        fake_candidates.HELD.append(args["x"])
        fake_candidates.MEMORY[key] = args["x"] * args["scale"]
    out["y"].copy_(fake_candidates.MEMORY[key])


def honest(args: Tensors, out: Tensors) -> None:
    import torch

    torch.mul(args["x"], args["scale"], out=out["y"])


def joined_stream(args: Tensors, out: Tensors) -> None:
    """A stream of its own, forked from the current one and joined to it again: honest, and captured."""
    import torch

    if not SIDE:
        SIDE.append(torch.cuda.Stream())
    SIDE[0].wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(SIDE[0]):
        torch.mul(args["x"], args["scale"], out=out["y"])
    torch.cuda.current_stream().wait_stream(SIDE[0])


def load(name: str) -> Any:
    family = fake_bench.load(name)
    runs = (honest, own_stream, memoises, joined_stream)
    candidates = {run.__name__: Candidate(run.__name__, "f32", run) for run in runs}

    def inputs(workload: Workload, seed: int, device: str) -> Tensors:
        return {key: tensor.to(device) for key, tensor in fake_bench.make_inputs(workload, seed, "cpu").items()}

    cases: Any = family.cases
    cases.inputs, cases.WORKLOADS = inputs, (Workload("n", {"N": 2**22}),)
    return type(family)(**{**vars(family), "candidates": candidates})


def backend() -> Backend:
    return Backend("cuda", 60 * 2**20, timers.named, lambda: None, load)


@pytest.mark.gpu
@pytest.mark.parametrize("timer", ["graph", "events"])
@pytest.mark.parametrize(
    ("name", "status"),
    [("honest", "ok"), ("joined_stream", "ok"), ("own_stream", "incorrect"), ("memoises", "incorrect")],
)
def test_cheat_on_a_gpu(name: str, status: str, timer: str) -> None:
    import torch

    arms: Any = (("control", "honest"),) if name == "honest" else (("control", "honest"), ("candidate", name))
    job = comparison.Job("toy", "n", arms, 0.3, timer, backend="tests.bench.test_timers:backend")
    *_, last = comparison.execute(job)
    assert isinstance(last, comparison.Done)
    torch.cuda.synchronize()
    found = last.arms[-1]
    assert (found.status, bool(found.timing)) == (status, status == "ok"), found.message
    assert last.arms[0].status == "ok"
