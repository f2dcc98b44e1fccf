"""One comparison without a GPU: which candidates get a number, and which cheats do not.

`tests/bench/fake_bench.py` plays the GPU. Every cheat there passes the first check, which is asserted too: the second
one is what these tests are about.
"""

import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from lab.base import devices
from lab.bench import backend, comparison, measure, sampling
from lab.bench.comparison import Done, Job, Outcome, Stage, classified, execute
from lab.check import accuracy, families
from lab.row import store
from lab.row.records import PERFORMANCE, Provenance, Role
from tests.bench import fake_bench
from tests.check import fake_candidates
from tests.loops import over
from tests.refused import refused


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the 25 ms of warm-up that each arm has (tests/bench/test_sampling.py): a clock made up needs none."""
    monkeypatch.setattr(sampling, "WARM_UP_S", 0.0)


def done(*arms: str, workload: str = "n63", timer: str = "graph", roles: tuple[Role, ...] = ()) -> Any:
    """The last message of a comparison of these arms, the first as control."""
    given: Any = roles or ("control", "candidate", *["peer"] * len(arms))
    job = Job("toy", workload, tuple(zip(given, arms, strict=False)), 0.2, timer, backend=fake_bench.BACKEND)
    *stages, last = execute(job)
    assert all(isinstance(stage, Stage) for stage in stages)
    assert isinstance(last, Done)
    return last


def arm(message: Done, name: str) -> Any:
    return next(a for a in message.arms if a.name == name)


def row_of(found: Outcome, message: Done, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The row that `lab measure` writes of it."""
    fake_bench.use(monkeypatch)
    card = fake_bench.card(folder, ("n63",), candidate=found.name)
    item = measure.plan(card)[0]
    where = devices.get("h200"), measure.Settings(), Path("r"), "2026-11-20", Provenance()
    return measure.row(item, found, message.comparison, *where)


@pytest.mark.parametrize("workload", ["n63", "n75", "n500", "n1"])
@pytest.mark.parametrize("timer", ["graph", "events"])
def test_honest_candidate_passes(workload: str, timer: str) -> None:
    message = done("plain", "faster", workload=workload, timer=timer)
    assert [(a.status, a.message) for a in message.arms] == [("ok", "")] * 2
    control, candidate = (a.timing for a in message.arms)
    assert control.median_us == pytest.approx(fake_bench.CONTROL_US, rel=0.01)
    assert candidate.median_us == pytest.approx(fake_bench.CANDIDATE_US, rel=0.01)
    assert control.converged
    for found in message.arms:
        assert found.relative_error < 1e-6
        assert max(found.errors.values()) == found.relative_error
        assert found.relative_error_after < 1e-6
    facts = message.comparison
    assert (facts.timer, facts.l2, facts.control, facts.seed) == (timer, "cold", "plain", 0)
    assert 0 < facts.aa_pct < 1
    assert facts.block_mhz == (1980,) * len(facts.order)
    assert len(facts.clocks) == 3  # at both ends of the placement, and the lowest in between
    assert facts.shape == (1, len(facts.order), 2 * sampling.VISIT)
    assert facts.again.n == control.n
    assert message.fatal == ""


@pytest.mark.parametrize("name", [n for n in fake_candidates.CHEATS if n != "own_stream"])
@pytest.mark.parametrize("timer", ["graph", "events"])
def test_cheat_has_no_number(name: str, timer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caught(name, timer, tmp_path, monkeypatch)


def test_an_output_without_a_limit_has_no_number_and_names_the_familys_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arm that writes nothing would pass."""

    whole = fake_bench.load("toy")
    whole.cases.tolerance = lambda *_: {}  # type: ignore[method-assign]
    monkeypatch.setattr(fake_bench, "load", lambda name: whole)
    found = arm(done("plain"), "plain")
    assert found.status == "error"
    assert found.message.startswith('kernels/toy/cases.py: `tolerance` has no limits for the output "y"; ')


def test_what_the_family_throws_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, made = tmp_path / "toy" / "cases.py", dict[str, Any]()
    exec(compile("def tolerance(*_):\n    raise KeyError('N')\n", path, "exec"), made)
    whole = fake_bench.load("toy")
    whole.cases.tolerance = made["tolerance"]  # type: ignore[method-assign]
    monkeypatch.setattr(fake_bench, "load", lambda name: whole)
    monkeypatch.setattr(families, "FOLDER", tmp_path)
    found = arm(done("plain"), "plain")
    assert found.status == "error"
    assert found.message.endswith("toy/cases.py: in tolerance(), line 2: KeyError: 'N'; correct it there")


def test_work_outside_the_captured_stream_has_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under events only a GPU has the other stream: tests/bench/test_timers.py."""
    caught("own_stream", "graph", tmp_path, monkeypatch)


def caught(name: str, timer: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = fake_bench.load("toy")
    first = accuracy.check(family, family.candidate(name), family.workload("n63"))
    assert first.status == "ok", "the cheat must pass the first check, or the second one is not tested"
    message = done("plain", name, timer=timer)
    found = arm(message, name)
    assert found.status == "incorrect"
    assert found.message.startswith("on inputs changed in place: ")
    assert arm(message, "plain").status == "ok"  # and takes nobody with it
    row = row_of(found, message, folder, monkeypatch)
    store.append(folder, row)
    assert row.status == "incorrect"
    assert row.errors == found.errors != {}
    assert not any(getattr(row, key) for key in (*PERFORMANCE, "aa_pct", "timer", "prepare_us"))


@pytest.mark.parametrize("timer", ["graph", "events"])
def test_without_the_second_check_the_cheats_have_numbers(timer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "recheck", lambda *_: ("", 0.0))
    monkeypatch.setattr(comparison, "looked_at", lambda *_: "")
    message = done("plain", *fake_candidates.CHEATS, timer=timer)
    assert {a.status for a in message.arms} == {"ok"}


def test_a_look_at_timed_visits_alone_sees_whoever_leaves_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One computes whatever is timed. Zeros that another makes of its input are not the answer to what was asked."""
    monkeypatch.setattr(comparison, "recheck", lambda *_: ("", 0.0))
    message = done("plain", *fake_candidates.CHEATS)
    found = {a.name: a.status for a in message.arms}
    assert {name for name, status in found.items() if status == "ok"} == {"plain", "skips_known_inputs"}
    assert all(a.message.startswith("in a timed visit, on set ") for a in message.arms if a.status != "ok")


def test_inputs_changed_before_the_answer_do_not_change_what_is_wanted() -> None:
    """Zeros are the right answer to zeros: the reference must have seen the inputs before the candidate did."""
    family = fake_bench.load("toy")
    workload, candidate = family.workload("n63"), family.candidate("zeroes_first")
    inputs = family.cases.inputs(workload, 1, "cpu")
    own = accuracy.outputs(family, candidate, workload, inputs)
    sets = [(inputs, accuracy.handed(own))]
    one = sampling.Arm("zeroes_first", candidate.run, sets, inputs=[inputs], outputs=[own])
    timer = fake_bench.FakeGraph()
    timer.prepare(one)
    seen: list[float] = []

    def reference(given: dict[str, Any]) -> dict[str, Any]:
        seen.append(float(given["x"].abs().max()))
        return fake_bench.reference(given)

    family = replace(family, reference=reference)
    job = Job("toy", "n63", ())
    message, _ = comparison.recheck(comparison.Bench(job, fake_bench.cpu(), family, workload), candidate, one, timer, 7)
    assert 'changed its input "x"' in message
    assert seen[0] > 0


def test_packed_weights_stay_and_activations_are_changed() -> None:
    """`prepare` is over when inputs change: what it packed stays as it was, and what is wanted is of the two."""
    found = arm(done("plain", "packs"), "packs")
    assert found.status == "ok"
    assert found.relative_error_after < 1e-6
    # and one that remembers its answers is caught all the same
    assert arm(done("plain", "faster", "memoises_a_clone"), "memoises_a_clone").status == "incorrect"


def test_row_says_what_repacking_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies are the arm's own; an arm that takes its inputs as they are added nothing."""
    message = done("plain", "faster", "packs")
    family = fake_bench.load("toy")
    given = family.cases.inputs(family.workload("n63"), 0, "cpu")
    packed = sum(given[name].nbytes for name in given.keys() - family.cases.ACTIVATIONS)
    assert [arm(message, name).prepared_bytes for name in ("plain", "faster", "packs")] == [0, 0, packed]
    assert all(0 < one.prepare_us < 1e6 for one in message.arms)
    row = row_of(arm(message, "faster"), message, tmp_path, monkeypatch)
    assert (row.prepare_us, row.prepared_bytes) == (arm(message, "faster").prepare_us, 0)
    skipped = arm(done("plain", "absent"), "absent")
    assert (skipped.prepare_us, skipped.prepared_bytes) == (None, None)
    x = torch.ones(8)
    assert backend.added_bytes({"x": x[2:], "w": (w := torch.ones(4)), "again": w[1:], "scale": 2.0}, {"x": x}) == 16
    assert backend.added_bytes({"layer": object()}, {"x": x}) is None


def test_one_name_is_one_arm() -> None:
    """Of two arms of one name the second check could change the inputs only once, and both were called incorrect."""
    with refused("toy n63", '"faster"'):
        done("plain", "faster", "faster")


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("wrong", "incorrect", "y: relative error"),
        ("absent", "skipped", "needs the package no_such_library, which is not installed"),
        ("peers/odd", "skipped", "cannot be imported: No module named 'odd'"),
        ("choosy", "skipped", "takes no odd N"),
        ("raises", "error", "ValueError: M = 63 must be divisible by 16"),
        ("no_gpu_memory", "oom", "OutOfMemoryError: CUDA out of memory."),
        ("no_host_memory", "oom", "MemoryError"),
    ],
)
def test_failed_check_is_a_status_and_the_others_are_timed(name: str, status: str, said: str) -> None:
    message = done("plain", "faster", name)
    found = arm(message, name)
    assert (found.status, found.timing) == (status, None)
    assert said in found.message
    assert [arm(message, n).status for n in ("plain", "faster")] == ["ok", "ok"]
    assert message.fatal == ""


def test_memory_that_ran_out_beside_more_sets_than_needed_is_told_from_memory_that_no_set_could_spare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Room for four sets an arm, of which the candidate holds two."""
    prepare, moved = fake_bench.FakeGraph.prepare, 6000.0
    memory = replace(fake_bench.cpu(), memory_bytes=4.5 * moved * 3 / comparison.MEMORY_SHARE)
    monkeypatch.setattr(fake_bench, "cpu", lambda: memory)

    def short(self: Any, one: sampling.Arm) -> None:
        if one.name == "faster" and len(one.sets) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        prepare(self, one)

    monkeypatch.setattr(fake_bench.FakeGraph, "prepare", short)

    def told(room: float, candidate: str = "faster") -> Done:
        job = Job("toy", "n500", (("control", "plain"), ("candidate", candidate)), 0.2, backend=fake_bench.BACKEND)
        *_, last = execute(structs.replace(job, room=room))
        assert isinstance(last, Done)
        return last

    crowded, fits = told(1.0), told(0.5)
    assert (arm(crowded, "faster").status, crowded.spare, crowded.crowded) == ("oom", True, True)
    assert (arm(fits, "faster").status, fits.crowded) == ("ok", False)
    in_the_check = told(1.0, "no_gpu_memory")
    assert (arm(in_the_check, "no_gpu_memory").status, in_the_check.spare, in_the_check.crowded) == ("oom", True, False)


def test_failed_control_leaves_the_candidate_timed_against_itself() -> None:
    message = done("wrong", "faster")
    assert [a.status for a in message.arms] == ["incorrect", "ok"]
    assert message.comparison.control == "faster"
    assert 0 < message.comparison.aa_pct < 1


@pytest.mark.parametrize("fails", ["plain", sampling.AGAIN])
def test_a_control_that_cannot_be_prepared_is_none(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of it and its second self the one that allocates first is given back when the other fails."""
    other = "plain" if fails == sampling.AGAIN else sampling.AGAIN
    prepare, prepared, released = fake_bench.FakeGraph.prepare, list[str](), list[str]()

    def fail(self: Any, one: sampling.Arm) -> None:
        prepared.append(one.name)
        if one.name == fails and prepared.count(fails) == 1:
            raise ValueError("cannot be captured")
        prepare(self, one)

    monkeypatch.setattr(fake_bench.FakeGraph, "prepare", fail)
    monkeypatch.setattr(fake_bench.FakeGraph, "release", lambda self, one: released.append(one.name))
    arms: Any = (("control", "plain"), ("candidate", "faster"))
    seen = set()
    for seed in range(4):
        prepared.clear()
        released.clear()
        *_, message = execute(Job("toy", "n63", arms, 0.2, seed=seed, backend=fake_bench.BACKEND))
        assert isinstance(message, Done)
        assert [(a.status, a.timing is None) for a in message.arms] == [("error", True), ("ok", False)]
        assert message.comparison
        assert message.comparison.control == "faster"
        assert message.comparison.again
        assert released == [other] * (other in prepared[: prepared.index(fails)])
        seen.add(bool(released))
    assert seen == {True, False}


def test_every_arm_allocates_in_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight placements in two processes: nobody is last, or before another, more often than he must be."""
    allocated: list[str] = []
    armed = comparison.armed

    def watched(bench: Any, candidate: Any, one: sampling.Arm, *how: Any) -> bool:
        allocated.append(one.name)
        return armed(bench, candidate, one, *how)

    monkeypatch.setattr(comparison, "armed", watched)
    arms: Any = (("control", "plain"), ("candidate", "faster"))
    firsts = []
    for workload in ("n63", "n75", "n500"):
        allocated.clear()
        for first in (0, 4):
            job = Job("toy", workload, arms, 0.0, placements=4, first=first, backend=fake_bench.BACKEND)
            assert isinstance(list(execute(job))[-1], Done)
        placed = list(zip(*[iter(allocated)] * 3, strict=True))
        assert len(placed) == 8
        for place in range(3):
            count = Counter(order[place] for order in placed)
            assert sorted(count.values()) in ([2, 3, 3], [2, 2, 4])
        for one, other in itertools.combinations(("plain", sampling.AGAIN, "faster"), 2):
            assert sum(order.index(one) < order.index(other) for order in placed) == 4
        firsts.append(placed)
    assert firsts[0] != firsts[1] or firsts[1] != firsts[2]


def test_nothing_sound_is_no_comparison() -> None:
    message = done("wrong", "raises")
    assert message.comparison is None
    assert [a.timing for a in message.arms] == [None, None]


def test_stages_name_the_arm() -> None:
    turns: list[Stage] = []
    job = Job("toy", "n63", (("control", "plain"), ("candidate", "faster")), 0.2, backend=fake_bench.BACKEND)
    *stages, _ = execute(job, turns.append)
    said = [(s.stage, s.arm) for s in stages if isinstance(s, Stage)]
    assert said[:2] == [("check", "plain"), ("check", "faster")]
    prepared = [("prepare", "faster"), ("prepare", "plain"), ("prepare", "plain")]  # the control's second self
    assert sorted(said[2:5]) == prepared  # in drawn order
    assert said[5:] == [("time", "plain")]
    assert [t.arm for t in turns if t.stage == "recheck"] == ["plain", "faster"]
    assert {t.stage for t in turns} == {"time", "recheck"}
    assert {t.arm for t in turns} == {"plain", "faster"}  # the second control is the control
    assert all(a != b for a, b in itertools.pairwise(turns))


# Errors that end the process -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cuda_error", "cuda_error_late", "raises_late"])
def test_error_after_which_the_others_start_again(name: str) -> None:
    fake_candidates.REPLAYS.clear()
    message = done("plain", "faster", name)
    assert message.fatal == name
    assert message.comparison is None
    found = arm(message, name)
    assert (found.status, found.timing) == ("error", None)
    assert found.message.startswith("in the timing: " if name.endswith("late") else "RuntimeError: CUDA error")


@pytest.mark.parametrize("stage", ["prepare", "recheck", "check"])
def test_cuda_error_in_any_stage_is_fatal(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    if stage == "check":  # the kernel ran, and the check's own look at its output meets the error
        monkeypatch.setattr(accuracy, "compare", fail)
    else:
        where = {"prepare": (fake_bench.FakeGraph, "prepare"), "recheck": (comparison, "recheck")}[stage]
        monkeypatch.setattr(*where, fail)
    message = done("plain", "faster")
    assert message.fatal in ("plain", "faster")
    assert message.comparison is None
    assert arm(message, message.fatal).status == "error"
    assert "CUDA error" in arm(message, message.fatal).message


@pytest.mark.parametrize("broken", [True, False])
def test_failed_capture_may_leave_a_process_that_is_no_good(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = fake_bench.FakeGraph.prepare

    def fail(self: Any, one: sampling.Arm) -> None:
        self.broken = broken
        if one.name == "faster":
            raise ValueError("cannot be captured")
        prepare(self, one)

    monkeypatch.setattr(fake_bench.FakeGraph, "prepare", fail)
    message = done("plain", "faster")
    assert message.fatal == ("faster" if broken else "")
    assert (arm(message, "faster").status, arm(message, "plain").status) == ("error", "ok")
    assert (message.comparison is None) == broken


def test_error_in_the_second_check_is_an_error_of_its_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    recheck = comparison.recheck

    def fail(bench: Any, candidate: Any, one: sampling.Arm, *more: Any) -> Any:
        if one.name == "faster":
            raise ValueError("shape")
        return recheck(bench, candidate, one, *more)

    monkeypatch.setattr(comparison, "recheck", fail)
    message = done("plain", "faster")
    assert (arm(message, "faster").status, arm(message, "plain").status) == ("error", "ok")
    assert arm(message, "faster").message == "in the check among the blocks: ValueError: shape"


@over(
    {
        line: (line, *found)
        for line, *found in [
            ("ValueError: a", "error", False),
            ("MemoryError", "oom", False),
            ("OutOfMemoryError: CUDA out of memory. Tried", "oom", False),
            ("RuntimeError: CUDA error: out of memory", "oom", False),
            ("RuntimeError: Triton Error [CUDA]: unspecified launch failure", "error", True),
            ("RuntimeError: Triton Error [CUDA]: misaligned address", "error", True),
            ("RuntimeError: cudaErrorIllegalAddress: an illegal memory access was encountered", "error", True),
            ("RuntimeError: CUDA_ERROR_ASSERT: device-side assert triggered", "error", True),
        ]
    }
)
def test_an_error_is_a_status_and_may_cost_the_process(line: str, status: str, lost: bool) -> None:
    assert classified(line) == (status, lost)


@over({"two lines": (ValueError("a\nb"), "ValueError: a"), "no words": (ValueError(""), "ValueError")})
def test_an_error_is_told_in_one_line(error: Exception, line: str) -> None:
    state = Outcome("candidate", "faster")
    assert not comparison._blame(state, error, "somewhere: ")
    assert (state.status, state.message) == ("error", f"somewhere: {line}")


# The families' own candidates ----------------------------------------------------------------------------------------


class Still(fake_bench.FakeEvents):
    """Runs a candidate in the check alone, or at one sample a visit: of more an interpreter makes hours."""

    checking = False
    runs = False

    def prepare(self, one: sampling.Arm) -> None:
        one.calls, one.sets, one.inputs = 1, one.sets[:1], one.inputs[:1]

    def visit(self, one: sampling.Arm, samples: int) -> list[float]:
        for _ in range(samples if Still.checking or Still.runs else 0):
            one.run(*one.sets[0])
        one.turn += samples
        return [100.0] * samples


def still() -> backend.Backend:
    return backend.Backend("cpu", 0, lambda *_: Still(), lambda: None)


def first_workload(family: families.Family, candidate: Any) -> Any:
    small = [w for w in family.cases.WORKLOADS if w.role == "check" and not candidate.refuses(w)]
    return min(small, key=lambda w: family.cost(w, candidate.precision).flops, default=None)


# One candidate for each `prepare`, which is what may go wrong here: the first that can run without a GPU.
CANDIDATES = sorted(
    {
        (name, made.prepare): (name, candidate)
        for name in families.names()
        for candidate, made in reversed(list(families.load(name).candidates.items()))
        if not families.unmet(made, None)
    }.values()
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "candidate"), CANDIDATES, ids=["-".join(c) for c in CANDIDATES])
def test_own_candidate_passes_both_checks(name: str, candidate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No honest candidate keeps, among its arguments, an input that it also repacked: changed, the two would differ.

    Two calls a visit: the second begins with what the first left, and so would any more.
    """
    monkeypatch.setattr(sampling, "VISIT", 2)
    family = families.load(name)
    workload = first_workload(family, family.candidate(candidate))
    monkeypatch.setattr(families, "gpu_capability", lambda: None)
    # The check before is the families' own test.
    passed = accuracy.Check(name, candidate, workload.id, "", "ok")
    monkeypatch.setattr(accuracy, "check", lambda *_: passed)
    role: Role = "peer" if candidate in family.peers else "control"
    recheck = comparison.recheck

    def checking(bench: Any, candidate: Any, one: sampling.Arm, timer: sampling.Timer, seed: int, wanted: Any) -> Any:
        Still.checking = True
        try:
            return recheck(bench, candidate, one, timer, 7, wanted)  # a seed that is drawn is another test each time
        finally:
            Still.checking = False

    monkeypatch.setattr(comparison, "recheck", checking)
    monkeypatch.setattr(comparison, "looked_at", lambda *_: "")
    where = "tests.bench.test_comparison:still"
    *_, last = execute(Job(name, workload.id, ((role, candidate),), 0.0, l2="warm", backend=where))  # one set
    assert isinstance(last, Done)
    found = last.arms[0]
    assert found.status == "ok", found.message
    assert found.message == ""
    assert found.relative_error_after is not None  # 0.0 where a workload of one key leaves nothing to round
    assert math.isfinite(found.relative_error_after)


LOOKED_AT = [("gdn", "torch_chunk"), ("gdn", "recurrent_decode"), ("kv", "torch_sdpa"), ("q8", "torch_cached")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "candidate"), [*LOOKED_AT, ("nvfp4", "torch_bf16")])
def test_own_candidate_passes_every_look(name: str, candidate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On activations of the family's own that are drawn before each visit, with states set back."""
    family = families.load(name)
    workload = first_workload(family, family.candidate(candidate))
    monkeypatch.setattr(families, "gpu_capability", lambda: None)
    monkeypatch.setattr(Still, "runs", True)
    monkeypatch.setattr(comparison, "recheck", lambda *_: ("", 0.0))
    looks: list[comparison.Look] = []
    look = comparison.looked_at

    def kept(bench: Any, precision: str, given: Any, taken: comparison.Look) -> str:
        looks.append(taken)
        return look(bench, precision, given, taken)

    monkeypatch.setattr(comparison, "looked_at", kept)
    where = "tests.bench.test_comparison:still"
    *_, last = execute(Job(name, workload.id, (("control", candidate),), 0.0, l2="warm", backend=where))
    assert [(a.status, a.message) for a in last.arms] == [("ok", "")]  # type: ignore[union-attr]
    assert len(looks) == comparison.LOOKS
    assert len({taken.stirred for taken in looks}) == len(looks)
