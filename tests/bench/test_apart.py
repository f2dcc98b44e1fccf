"""Arms in processes of their own: the harness imports no candidate, keeps its own clock, and believes no line that it
did not ask for. Real processes and real time on the CPU; the arena (tests/bench/arena) has the list
of adversaries.
"""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from kernels.common import Candidate, Tensors, Workload
from lab.bench import apart, sampling
from lab.bench.backend import Backend
from lab.bench.comparison import Done, Job, execute
from lab.check import families
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
    seen = [value.clone() for value in (SEEN.get(args["x"].data_ptr()),) if value is not None]
    remembers(args, out)
    if seen and bool((seen[0] == args["x"]).all()):
        out["y"].copy_(ANSWERS[out["y"].data_ptr()])
    else:
        time.sleep(2e-3)  # far more than anything else here takes, so that a busy machine does not hide it
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


RUNS: Mapping[str, Any] = {run.__name__: run for run in (honest, remembers, keeps, writes_ahead, dies, raises)} | {
    "plain": honest
}


class Wall:
    """A timer of real time: a sample is ten rounds over all sets. `lies`: the factor by which it shortens its times."""

    name = "graph"
    lies: ClassVar[dict[str, float]] = {}

    def prepare(self, arm: sampling.Arm) -> None:
        arm.calls = 10 * len(arm.sets)

    def visit(self, arm: sampling.Arm, samples: int) -> list[float]:
        return [self._sample(arm) for _ in range(samples)]

    def _sample(self, arm: sampling.Arm) -> float:
        began = time.perf_counter()
        for _ in range(10):
            for args, out in arm.sets:
                arm.run(args, out)
        arm.turn += 1
        return 1e6 * (time.perf_counter() - began) / arm.calls * self.lies.get(arm.name, 1.0)

    def release(self, arm: sampling.Arm) -> None: ...


def bare(name: str) -> families.Family:
    family = replace(fake_bench.load(name), candidates={}, unavailable={}, modules={})
    cases: Any = family.cases
    cases.WORKLOADS = (Workload("n", {"N": SIZE}),)
    return family


def load(name: str) -> families.Family:
    return replace(bare(name), candidates={name: Candidate(name, "f32", run) for name, run in RUNS.items()})


def backend() -> Backend:
    return Backend("cpu", 0, lambda *_: Wall(), lambda: None, load, apart=True, bare=bare)


def liar() -> Backend:
    Wall.lies = {"honest": 0.8}
    return backend()


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
    from lab.bench import comparison

    made = comparison._nursery() if comparison._nursery.cache_info().currsize else None
    comparison._nursery.cache_clear()
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


def test_a_time_that_the_harness_cannot_confirm_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU the two clocks agree less well than on a GPU, where a visit takes its time whatever the host does."""
    watched = apart.RemoteTimer.__init__
    monkeypatch.setattr(apart.RemoteTimer, "__init__", lambda self, name, hands, _: watched(self, name, hands, True))
    monkeypatch.setattr("lab.bench.comparison.CLOCK_PCT", 18.0)
    control, found = compared("honest", where="liar").arms
    assert (found.status, found.timing) == ("error", None)
    assert "the harness's clock differ by" in found.message
    assert control.status == "ok"


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
