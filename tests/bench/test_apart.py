"""Arms in processes of their own: the harness imports no candidate, keeps its own clock, and believes no line that it
did not ask for. Real processes and real work on the CPU; the arena (tests/bench/arena) has the list
of adversaries.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kernels.common import Candidate, Tensors, Workload
from lab.bench import apart, comparison, sampling, shared
from lab.bench import arm as far
from lab.bench.backend import Backend
from lab.bench.comparison import Done, Job, execute
from lab.check import child, families
from tests.bench import fake_bench

SIZE = 20_000


def honest(args: Tensors, out: Tensors) -> None:
    import torch

    for _ in range(20):
        torch.mul(args["x"], args["scale"], out=out["y"])


def remembers(args: Tensors, out: Tensors) -> None:
    """Compares with the input that it saw last, and computes where that was another."""
    import torch

    known = SEEN.setdefault(args["x"].data_ptr(), torch.zeros_like(args["x"]))
    if not torch.equal(known, args["x"]):
        honest(args, out)
        known.copy_(args["x"])


def keeps(args: Tensors, out: Tensors) -> None:
    """The same with a copy of its answer, which is right wherever it is looked at."""
    began = time.process_time()
    seen = [value.clone() for value in (SEEN.get(args["x"].data_ptr()),) if value is not None]
    remembers(args, out)
    if seen and bool((seen[0] == args["x"]).all()):
        out["y"].copy_(ANSWERS[out["y"].data_ptr()])
    else:
        while time.process_time() < began + 2e-3:  # far more than anything else here takes
            pass
        ANSWERS[out["y"].data_ptr()] = out["y"].clone()


SEEN: dict[int, Any] = {}
ANSWERS: dict[int, Any] = {}


def writes_ahead(args: Tensors, out: Tensors) -> None:
    """Writes answers to what nobody has asked yet on whatever is open."""
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b'{"nonce":"0","samples_us":[0.1,0.1,0.1,0.1,0.1]}\n')
        except OSError:
            continue
    honest(args, out)


def dies(args: Tensors, out: Tensors) -> None:
    os._exit(3)


def raises(args: Tensors, out: Tensors) -> None:
    raise ValueError("M = 63 must be divisible by 16")


def forks(args: Tensors, out: Tensors) -> None:
    """Leaves a child that sleeps, and one whose parent is gone, in a session of its own."""
    for escapes in (False, True):
        if os.fork() == 0:
            if escapes:
                os.setsid()
                if os.fork():
                    os._exit(0)
            time.sleep(60)
            os._exit(0)
    time.sleep(0.1)
    honest(args, out)


def spoils(args: Tensors, out: Tensors) -> None:
    """Right, and once it was checked it changes a weight that all arms read."""
    honest(args, out)
    CALLS.append(0)
    if len(CALLS) > 20:
        args["table"][0] += 1


CALLS: list[int] = []


def meets(args: Tensors, out: Tensors) -> None:
    """In its first call it waits for another arm to be in its own: as two compilers that share the host."""
    if not CALLS:
        CALLS.append(0)
        folder = Path(os.environ["KILLGATE_TEST_MEETING"])
        (folder / str(os.getpid())).touch()
        wait_for(lambda: len(list(folder.iterdir())) > 1)
    honest(args, out)


RUNS: Mapping[str, Any] = {
    run.__name__: run for run in (honest, remembers, keeps, writes_ahead, dies, raises, forks, spoils, meets)
} | {"plain": honest, "meets_too": meets}


class Processor:
    """A timer of the processor's time, which a busy machine hardly changes: a sample is ten rounds over all sets.

    lies: the factor by which it shortens its times; rounds: how many it does in the place of ten.
    """

    name = "graph"
    lies: ClassVar[dict[str, float]] = {}
    rounds: ClassVar[dict[str, int]] = {}

    def prepare(self, arm: sampling.Arm) -> None:
        arm.calls = 10 * len(arm.sets)

    def visit(self, arm: sampling.Arm, samples: int) -> list[float]:
        return [self._sample(arm) for _ in range(samples)]

    def _sample(self, arm: sampling.Arm) -> float:
        began = time.process_time()
        for _ in range(self.rounds.get(arm.name, 10)):
            self.one_pass(arm)
        arm.turn += 1
        return 1e6 * (time.process_time() - began) / arm.calls * self.lies.get(arm.name, 1.0)

    def one_pass(self, arm: sampling.Arm) -> None:
        for args, out in arm.sets:
            arm.run(args, out)

    def release(self, arm: sampling.Arm) -> None: ...


def bare(name: str) -> families.Family:
    family = replace(fake_bench.load(name), candidates={}, unavailable={}, modules={})
    cases: Any = family.cases
    cases.WORKLOADS = (Workload("n", {"N": SIZE}),)
    return family


def load(name: str) -> families.Family:
    return replace(bare(name), candidates={name: Candidate(name, "f32", run) for name, run in RUNS.items()})


def backend() -> Backend:
    return Backend("cpu", 0, lambda *_: Processor(), lambda: None, load, apart=True, bare=bare)


def held() -> Backend:
    """The same with one copy of `scale` and `table` for all arms."""

    def sharing(name: str) -> families.Family:
        family = bare(name)
        cases: Any = family.cases
        cases.held = lambda workload, device: without(cases.inputs(workload, 0, device), "x")
        cases.own = lambda workload, seed, device: {"x": cases.inputs(workload, seed, device)["x"]}
        return family

    return replace(backend(), bare=sharing)


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def liar() -> Backend:
    Processor.lies = {"honest": 0.8}
    return watched()


def forgetful() -> Backend:
    """Its `honest` does one round for ten: outputs and clocks agree with that."""
    Processor.rounds = {"honest": 1}
    return watched()


def watched() -> Backend:
    return replace(backend(), clock=lambda pid: time.clock_gettime(~pid << 3 | 2), clock_pct=18.0)  # Linux: of any


def compared(*names: str, where: str = "backend", **how: Any) -> Done:
    arms: Any = (("control", "plain"), *(("candidate", name) for name in names))
    job = Job("toy", "n", arms, 0.0, backend=f"tests.bench.test_apart:{where}", **how)
    try:
        *_, last = execute(job)
    finally:
        nursery.stop() if (nursery := _nursery()) else None
    assert isinstance(last, Done)
    return last


def _nursery() -> apart.Nursery | None:
    made = comparison._nursery() if comparison._nurseries.cache_info().currsize else None
    comparison._nurseries.cache_clear()
    return made


def test_honest_arms_are_timed_apart_over_placements() -> None:
    done = compared("honest", placements=2)
    assert [(a.status, a.message) for a in done.arms] == [("ok", "")] * 2
    assert done.comparison is not None
    placements, blocks, samples = done.comparison.shape
    assert (placements, blocks, samples) == (2, sampling.PLACED_BLOCKS, 2 * sampling.VISIT)
    assert done.comparison.again is not None
    for arm in done.arms:
        assert arm.timing is not None
        assert len(arm.timing.blocks_us) == placements * blocks
        assert len(arm.timing.samples_us) == placements * blocks * samples
        assert arm.relative_error_after is not None
        assert arm.relative_error_after < 1e-6
    control, candidate = (a.timing.median_us for a in done.arms if a.timing)
    assert 0.4 < control / candidate < 2.5  # the same work, on a busy machine


def test_arms_compile_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILLGATE_TEST_MEETING", str(tmp_path))
    assert [(a.status, a.message) for a in compared("meets", "meets_too").arms] == [("ok", "")] * 3


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("remembers", "incorrect", "on inputs changed in place: set"),
        ("keeps", "incorrect", "it remembers answers"),
        ("writes_ahead", "error", "not asked"),
        ("dies", "error", "exit code 3"),
        ("raises", "error", "ValueError: M = 63"),
    ],
)
def test_what_an_arm_does_in_its_process_costs_it_alone(name: str, status: str, said: str) -> None:
    done = compared(name, "honest")
    control, found, other = done.arms
    assert (found.status, found.timing) == (status, None), found
    assert said in found.message
    assert (control.status, other.status) == ("ok", "ok")
    assert done.fatal == ""


@pytest.mark.parametrize(
    ("where", "said"), [("liar", "the harness's clock differ by"), ("forgetful", "one call on each set takes")]
)
def test_a_time_that_the_harness_cannot_confirm_is_an_error(
    where: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.bench.recheck.FIRST_PCT", 1e9)  # a busy machine slows this one and that
    control, found = compared("honest", where=where).arms
    assert (found.status, found.timing) == ("error", None)
    assert said in found.message
    assert control.status == "ok"


def test_arms_share_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    taken = shared.Shelf.tensor

    def counted(shelf: shared.Shelf, given: Any) -> Any:
        made.append(given.numel() if given.dtype.is_floating_point else -given.numel())
        return taken(shelf, given)

    monkeypatch.setattr(shared.Shelf, "tensor", counted)
    done = compared("honest", where="held", placements=2)
    assert [(a.status, a.message) for a in done.arms] == [("ok", "")] * 2
    once = made.count(-SIZE)  # of the table: the checks ahead of the timing have copies of their own
    made.clear()
    compared("honest", where="backend", placements=2)
    assert once == 5  # each arm's first call, its check, and the shared one
    assert made.count(-SIZE) > 20


def test_who_changes_what_all_arms_read_has_no_number() -> None:
    done = compared("spoils", where="held")
    assert done.arms[1].status == "incorrect"
    assert 'changed its input "table"' in done.arms[1].message


def test_an_arm_that_was_not_asked_stands_still_and_leaves_nobody() -> None:
    import torch

    nursery = apart.Nursery()
    try:
        greeting = {"backend": "tests.bench.test_apart:backend", "family": "toy", "workload": "n", "timer": "graph"}
        with apart.Hands(nursery, ["forks"], greeting | {"l2": "cold", "l2_bytes": 0}) as hands:
            args = {"x": torch.ones(SIZE), "scale": torch.ones(SIZE)}
            hands.candidate("forks").run(args, {"y": torch.empty(SIZE)})
            pid = hands.hands["forks"].pid
            under = [each for each in child.children(pid) if state(each) != "Z"]
            assert len(under) == 1
            for each in (pid, *under):
                wait_for(lambda each=each: state(each) == "T")  # type: ignore[misc]
            left = set(child.children(nursery.process.pid)) - nursery.arms
            wait_for(lambda: {state(each) for each in left} <= {"", "Z"})
            answer = hands.hands["forks"].asked(far.Visit, samples=0)
            wait_for(lambda: state(pid) != "T")
            assert state(under[0]) == "T"  # what an arm started does not run while it is timed
            with pytest.raises(apart.Thrown):
                answer()
            wait_for(lambda: state(pid) == "T")
            answer = hands.hands["forks"].asked(far.Release)
            wait_for(lambda: state(under[0]) != "T")
            answer()
        wait_for(lambda: state(under[0]) in ("", "Z"))
    finally:
        nursery.stop()


def state(pid: int) -> str:
    """The letter of a process's state, empty where it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_for(met: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not met():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_nursery_that_an_arm_ended_is_replaced() -> None:
    try:
        first = comparison._nursery()
        assert comparison._nursery() is first
        first.process.kill()
        first.process.wait()
        second = comparison._nursery()
        assert second is not first
        assert second.arm()[1] > 0
    finally:
        nursery.stop() if (nursery := _nursery()) else None


def test_what_two_processes_share_has_no_name_and_is_gone_with_its_owner() -> None:
    import torch

    given = torch.arange(6.0).reshape(2, 3).T
    shelf = shared.Shelf()
    handle = shelf.handle(shelf.tensor(given))
    assert isinstance(handle.storage, str)
    assert handle.storage.startswith(f"/proc/{os.getpid()}/fd/")
    assert torch.equal(shared.opened(handle), given)
    shelf.clear()
    assert not os.path.exists(handle.storage)


def test_the_harness_imports_no_candidate() -> None:
    """In a process of its own, with a family of ours: its candidates are known by name alone."""
    import subprocess

    program = """
import sys
from lab.check import families
family = families.bare("nvfp4")
assert family.cases.WORKLOADS and not family.candidates
found = [m for m in sys.modules if m.startswith("kernels.nvfp4.")]
print([m for m in found if m.rpartition(".")[2].startswith(("triton_", "cuda_", "torch_"))])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_arms_of_brief_comparisons_live_on_unless_their_candidate_threw(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    make = fake_bench.make_inputs

    def inputs(workload: Workload, seed: int, device: str) -> Tensors:
        drawn.append(seed)
        return make(workload, seed, device)

    monkeypatch.setattr(fake_bench, "make_inputs", inputs)
    arms: Any = (("control", "plain"), ("candidate", "honest"), ("candidate", "raises"))
    job = Job(
        "toy", "n", arms, 0.0, backend="tests.bench.test_apart:backend", blocks=sampling.PLACED_BLOCKS, brief=True
    )
    comparison._spare().clear()
    try:
        pids = []
        for _ in range(2):
            *_, last = execute(job)
            assert isinstance(last, Done)
            assert [a.status for a in last.arms] == ["ok", "ok", "error"]
            assert last.arms[1].timing is not None
            assert last.arms[1].relative_error_after is not None
            assert last.arms[1].prepare_us is None  # they prepare side by side
            assert sum(last.seconds.values()) > 0
            spare = comparison._spare()
            pids.append({name: sorted(hand.pid for hand in hands) for (_, name), hands in spare.items()})
        assert pids[0] == pids[1]  # nobody was forked anew
        assert {name: len(mine) for name, mine in pids[0].items()} == {"plain": 2, "honest": 1}
        first = [seed for seed in drawn if seed in range(job.seed + 1, job.seed + 1 + sampling.MIN_SETS)]
        assert len(first) == 2 * sampling.MIN_SETS  # of both comparisons, once for all arms
    finally:
        nursery.stop() if (nursery := _nursery()) else None
        comparison._spare().clear()
