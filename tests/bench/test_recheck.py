"""What the check after the timing stands on: fresh inputs, poisoned outputs, a head start, and sets of their own.

Each test is one that a mistake once got past; the mistakes themselves are in tests/mistakes.toml.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs

from kernels.common import Candidate, Tensors, Workload
from lab.bench import recheck, sampling, sets
from lab.bench.comparison import Done, Job, execute
from lab.check import accuracy
from tests.bench import fake_bench

JOB = Job("toy", "n63", (("control", "plain"), ("candidate", "faster")), 0.05, backend=fake_bench.BACKEND)


def one_arm(name: str = "plain") -> tuple[Any, Workload, sampling.Arm, Any]:
    """A captured arm with one set, as `execute` hands it to `recheck`: family, workload, arm, timer."""
    family = fake_bench.load("toy")
    workload = family.workload("n63")
    inputs = family.cases.inputs(workload, 1, "cpu")
    own = accuracy.outputs(family, family.candidate(name), workload, inputs)
    sets = [(inputs, accuracy.handed(own))]
    arm = sampling.Arm(name, family.candidate(name).run, sets, inputs=[inputs], outputs=[own])
    timer = fake_bench.FakeGraph()
    timer.prepare(arm)
    return family, workload, arm, timer


def rechecked(family: Any, workload: Any, arm: sampling.Arm, timer: Any, backend: Any = None) -> Any:
    bench = sets.Bench(JOB, backend or fake_bench.cpu(), family, workload)
    return recheck.recheck(bench, family.candidate(arm.name), arm, timer, 7)


def test_no_two_checks_and_no_two_sets_see_the_same_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a candidate has seen once it may remember: first check, sets of every arm, and second check differ."""
    asked: dict[str, list[int]] = {"check": [], "sets": [], "recheck": []}
    stage = "check"
    make = fake_bench.make_inputs

    def inputs(workload: Workload, seed: int, device: str) -> Tensors:
        asked[stage].append(seed)
        return make(workload, seed, device)

    monkeypatch.setattr(fake_bench, "make_inputs", inputs)

    def tell(message: Any) -> None:
        nonlocal stage
        stage = {"prepare": "sets", "time": "sets", "recheck": "recheck"}.get(getattr(message, "stage", ""), stage)

    for message in execute(structs.replace(JOB, seed=7), tell):
        tell(message)
    assert set(asked["check"]) == {7}
    assert set(asked["recheck"]).isdisjoint({*asked["check"], *asked["sets"]})
    assert set(asked["sets"]).isdisjoint(asked["check"])
    assert len(asked["recheck"]) == 2 * len(set(asked["recheck"]))  # both arms are asked the same


def test_the_second_control_has_inputs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two controls on the same values are one: what the values do to the clock would be in neither floor."""
    values: dict[str, list[torch.Tensor]] = {}
    prepare = fake_bench.FakeGraph.prepare

    def kept(self: Any, arm: sampling.Arm) -> None:
        values[arm.name] = [args["x"].clone() for args, _ in arm.sets]
        prepare(self, arm)

    monkeypatch.setattr(fake_bench.FakeGraph, "prepare", kept)
    *_, last = execute(JOB)
    assert set(values) == {"plain", sampling.AGAIN, "faster"}
    assert not any(torch.equal(a, b) for a in values["plain"] for b in values[sampling.AGAIN])
    assert len({tuple(x.tolist()) for x in values["plain"]}) == len(values["plain"]) >= 2
    assert isinstance(last, Done)
    assert last.comparison
    assert last.comparison.aa_pct


def test_outputs_are_poisoned_before_the_timed_work_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """First the old answer stands there, to other inputs; then it must be gone, by junk alone and by junk and NaN."""
    family, workload, arm, timer = one_arm()
    timer.visit(arm, 1)
    out = arm.sets[0][1]["y"]
    answer, seen = out.clone(), []
    visit = timer.visit

    def watched(again: sampling.Arm, samples: int) -> list[float]:
        seen.append((torch.equal(out, answer), bool(out.isnan().any()), bool(out.isfinite().any())))
        taken = visit(again, samples)
        assert not torch.equal(out, answer)
        return taken

    monkeypatch.setattr(timer, "visit", watched)
    message, _ = rechecked(family, workload, arm, timer)
    assert (message, seen) == ("", [(True, False, True), (False, False, True), (False, True, True)])


def test_the_poison_waits_until_another_stream_would_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on a stream that does not wait for ours lands under the poison only when that falls milliseconds later."""
    family, workload, arm, timer = one_arm()
    timer.visit(arm, 1)
    out, order = arm.sets[0][1]["y"], []

    def sleep(cycles: int) -> None:
        order.append(("sleep", cycles, bool(torch.isnan(out).any())))

    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    for name in ("synchronize", "ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    backend = replace(fake_bench.cpu(), device="cuda")
    rechecked(family, workload, arm, timer, backend)
    assert all(cycles >= 2e9 * 5e-3 for _, cycles, _ in order)  # at least 5 ms of a clock of 2 GHz
    assert [poisoned for _, _, poisoned in order] == [False] * len(accuracy.FILLS)


def test_the_fastest_prepare_is_what_a_row_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first set pays for memory and caches, a late one for whatever else ran."""
    took = iter([3e-3, 1e-3, 2e-3, 5e-3, 4e-3, *[9e-3] * 100])
    now = 0.0

    def prepare(inputs: Tensors) -> Tensors:
        nonlocal now
        now += next(took)
        return inputs

    monkeypatch.setattr(sets, "time", SimpleNamespace(perf_counter=lambda: now))
    family = fake_bench.load("toy")
    candidate = Candidate("slow", "f32", family.candidate("plain").run, prepare=prepare)
    workload = family.workload("n63")
    backend = replace(fake_bench.cpu(), l2_bytes=10**6)
    arm = sampling.Arm("slow", candidate.run, [])
    sets.armed(sets.Bench(JOB, backend, family, workload), candidate, arm, 1e12, 1)
    assert len(arm.sets) >= 5
    assert arm.prepare_us == pytest.approx(1e3)


def test_what_is_wanted_is_known_before_the_candidate_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference that looks only afterwards sees whatever the candidate left in its inputs."""
    family, workload, arm, timer = one_arm()
    order: list[str] = []
    visit = timer.visit

    def reference(given: Tensors) -> Tensors:
        order.append("reference")
        return fake_bench.reference(given)

    def watched(again: sampling.Arm, samples: int) -> list[float]:
        order.append("candidate")
        return visit(again, samples)

    monkeypatch.setattr(timer, "visit", watched)
    message, error = rechecked(replace(family, reference=reference), workload, arm, timer)
    assert (message, order) == ("", ["reference", *["candidate"] * len(accuracy.FILLS)])
    assert error is not None


def test_an_arm_with_too_little_room_keeps_two_sets_and_a_warm_one_has_one() -> None:
    family = fake_bench.load("toy")
    candidate, workload = family.candidate("plain"), family.workload("n500")
    moved = int(family.cost(workload, candidate.precision).bytes)
    small, large = moved // 100, 10**6  # beside a small cache a call of one set is cold by itself
    for l2, l2_bytes, room, wanted in (
        ("cold", large, 1.0, 2), ("warm", large, 1.0, 1), ("cold", large, 3.0 * moved, 3), ("cold", small, 1.0, 1),
        ("cold", small + 1, 1.0, 2), ("cold", small, 2.0 * moved, 2),
    ):  # fmt: skip
        backend = replace(fake_bench.cpu(), l2_bytes=l2_bytes)
        bench = sets.Bench(structs.replace(JOB, l2=l2), backend, family, workload)
        arm = sampling.Arm("plain", candidate.run, [])
        fewer_would_do = sets.armed(bench, candidate, arm, room, 1)
        assert len(arm.sets) == wanted, (l2, l2_bytes, room)
        assert fewer_would_do == (room > moved)


class OneByOne:
    """As lab.bench.timers.EventsTimer: a sample is one call, on the set behind that of the sample before."""

    def visit(self, arm: sampling.Arm, samples: int) -> list[float]:
        for _ in range(samples):
            arm.run(*arm.sets[arm.turn % len(arm.sets)])
            arm.turn += 1
        return [1.0] * samples


def test_an_input_that_is_updated_in_place_may_not_be_written() -> None:
    """Of a state the output is updated; its input, which is too large to copy, is known by a fingerprint."""
    toy = fake_bench.load("toy")
    made = SimpleNamespace(**vars(toy.cases) | {"IN_PLACE": ("s",)})
    made.inputs = lambda workload, seed, device: {
        **toy.cases.inputs(workload, seed, device), "s": torch.full((4,), float(seed)),
    }  # fmt: skip
    made.outputs = lambda workload, given: {**toy.cases.outputs(workload, given), "s": given["s"].clone()}
    limit = next(iter(toy.cases.tolerance(toy.workload("n63"), "f32").values()))
    made.tolerance = lambda workload, precision: {"y": limit, "s": limit}

    def honest(args: Tensors, out: Tensors) -> None:
        torch.mul(args["x"], args["scale"], out=out["y"])
        out["s"] += 1

    def writes(args: Tensors, out: Tensors) -> None:
        honest(args, out)
        args["s"] += 1

    def reference(given: Tensors) -> Tensors:
        return {"y": given["x"].double() * given["scale"].double(), "s": given["s"].double() + 1}

    def twice(given: Tensors, calls: int) -> Tensors:
        return reference(given) | {"s": given["s"].double() + 2 * calls}

    def answer(run: Any, count: int, repeated: Any = None) -> str:
        candidate = Candidate(run.__name__, "f32", run)
        family = replace(toy, cases=made, reference=reference, candidates={run.__name__: candidate}, repeated=repeated)
        workload = family.workload("n63")
        given = [made.inputs(workload, 1 + number, "cpu") for number in range(count)]
        own = [accuracy.outputs(family, candidate, workload, inputs) for inputs in given]
        pairs = [(inputs, accuracy.handed(out)) for inputs, out in zip(given, own, strict=True)]
        arm = sampling.Arm(run.__name__, run, pairs, inputs=given, outputs=own)
        return str(rechecked(family, workload, arm, OneByOne())[0])

    assert answer(writes, 1) == 'set 1 of 1: the candidate changed its input "s"'
    assert [answer(honest, count) for count in (1, 3, 7)] == [""] * 3
    assert "s: relative error" in answer(honest, 1, twice)  # where a family has it, it says what many calls leave


def test_nothing_of_the_first_check_lies_beside_the_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where results stay on the GPU they would take the room of an arm's sets."""
    armed, left = sets.armed, []

    def watched(*args: Any) -> bool:
        left.append(len(accuracy._known))
        return armed(*args)

    monkeypatch.setattr("lab.bench.comparison.armed", watched)
    *_, last = execute(JOB)
    assert isinstance(last, Done)
    assert last.comparison
    assert set(left) == {0}
