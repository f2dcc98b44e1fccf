"""Arms in processes of their own: the harness imports no candidate, keeps its own clock, and believes no line that it
did not ask for. Real processes and real work on the CPU; the arena (tests/bench/arena) has the list of adversaries. A
comparison is four processes and half a second: `make quick` has one that is honest and one that fails.
"""

import functools
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernels.common import Tensors, Workload
from lab.bench import apart, comparison, sampling, shared
from lab.bench import arm as far
from lab.bench.comparison import Done, Job, execute
from lab.check import child
from tests.bench import fake_bench
from tests.bench.fake_arms import SIZE, wait_for


def compared(*names: str, where: str = "backend", **how: Any) -> Done:
    arms: Any = (("control", "plain"), *(("candidate", name) for name in names))
    job = Job("toy", "n", arms, 0.0, backend=f"tests.bench.fake_arms:{where}", **how)
    *_, last = execute(job)
    assert isinstance(last, Done)
    return last


@pytest.fixture(scope="module", autouse=True)
def meeting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where `meets` meets. Every comparison forks its arms from one process, which imports torch once."""

    def stop() -> None:
        if comparison._nurseries.cache_info().currsize:
            comparison._nurseries()[0].stop()
            comparison._nurseries.cache_clear()

    stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KILLGATE_TEST_MEETING", str(folder := tmp_path_factory.mktemp("meeting")))
        yield folder
    stop()


@pytest.mark.slow
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


@pytest.mark.slow
def test_arms_compile_at_the_same_time(meeting: Path) -> None:
    assert list(meeting.iterdir()) == []
    assert [(a.status, a.message) for a in compared("meets", "meets_too").arms] == [("ok", "")] * 3


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        pytest.param("remembers", "incorrect", "on inputs changed in place: set", marks=pytest.mark.slow),
        pytest.param("keeps", "incorrect", "it remembers answers", marks=pytest.mark.slow),
        pytest.param("writes_ahead", "error", "not asked", marks=pytest.mark.slow),
        pytest.param("dies", "error", "exit code 3", marks=pytest.mark.slow),
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_where_a_call_is_a_sample_by_itself_it_is_for_every_arm(meeting: Path) -> None:
    """The timer of tests/bench/fake_arms.py finds only the first arm's call long."""
    (meeting / "first").unlink(missing_ok=True)
    done = compared("honest", where="long", placements=2)
    assert [(a.status, a.timing and a.timing.calls) for a in done.arms] == [("ok", 1)] * 2
    assert (meeting / "first").exists()


@pytest.mark.slow
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


def test_the_clock_of_a_visit_stops_at_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arm with hundreds of threads takes milliseconds to be stopped, which are none of its work."""
    done: list[str] = []

    def noted(name: str, *_: Any, **__: Any) -> far.Reply:
        done.append(name)
        return far.Reply("")

    for name in ("_go", "_send", "_reply", "_freeze"):
        monkeypatch.setattr(apart.Hand, name, functools.partial(noted, name))
    hand: Any = object.__new__(apart.Hand)
    hand.pid = 1
    times = iter((3.0, 3.5))

    def clock(pid: int) -> float:
        done.append("clock")
        return next(times)

    assert hand.timed(far.Visit, clock, samples=0) == (far.Reply(""), 0.5)
    assert done == ["clock", "_go", "_send", "_reply", "clock", "_freeze"]


def test_a_second_process_starts_its_arms_the_other_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    count = itertools.count()
    monkeypatch.setattr(apart.Hands, "_hand", lambda self, name: (name, next(count)))
    begun: list[list[tuple[str, int]]] = []
    for backwards in (False, True):
        hands: Any = apart.Hands(comparison.nursery(), ["plain", "honest"], {}, backwards=backwards)
        begun.append([*hands.hands.values(), hands.again[0]])
    assert sorted(begun[0], key=lambda hand: hand[1]) == [("plain", 0), ("honest", 1), ("plain", 2)]
    assert begun[0][-1] == ("plain", 2)  # the second self comes last here, and first there
    assert begun[1][-1] == ("plain", 3)
    assert ("honest", 4) in begun[1]


@pytest.mark.slow
def test_who_changes_what_all_arms_read_has_no_number() -> None:
    done = compared("spoils", where="held")
    assert done.arms[1].status == "incorrect"
    assert 'changed its input "table"' in done.arms[1].message


def test_an_arm_that_was_not_asked_stands_still_and_leaves_nobody() -> None:
    import torch

    nursery = comparison.nursery()
    greeting = {"backend": "tests.bench.fake_arms:backend", "family": "toy", "workload": "n", "timer": "graph"}
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


def state(pid: int) -> str:
    """The letter of a process's state, empty where it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.slow
def test_a_nursery_that_an_arm_ended_is_replaced() -> None:
    first = comparison.nursery()
    assert comparison.nursery() is first
    first.process.kill()
    first.process.wait()
    second = comparison.nursery()
    assert second is not first
    assert second.arm()[1] > 0


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_arms_of_brief_comparisons_live_on_unless_their_candidate_threw(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    make = fake_bench.make_inputs

    def inputs(workload: Workload, seed: int, device: str) -> Tensors:
        drawn.append(seed)
        return make(workload, seed, device)

    monkeypatch.setattr(fake_bench, "make_inputs", inputs)
    arms: Any = (("control", "plain"), ("candidate", "honest"), ("candidate", "raises"))
    job = Job("toy", "n", arms, 0.0, backend="tests.bench.fake_arms:backend", blocks=sampling.PLACED_BLOCKS, brief=True)
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
        for hand in itertools.chain(*comparison._spare().values()):
            hand.stop()
        comparison._spare().clear()
