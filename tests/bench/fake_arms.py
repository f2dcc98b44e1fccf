"""Arms for tests/bench/test_apart.py: candidates that do real work on the CPU or something else, their family and its
backends. Every arm's process imports this, so nothing here imports what takes long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from kernels.common import Candidate, Tensors, Workload
from lab.bench import sampling
from lab.bench.backend import Backend
from lab.check import families
from tests.bench import fake_bench


def wait_for(met: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not met():
        assert time.monotonic() < until
        time.sleep(0.01)


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


class Long(Processor):
    """A timer to which the first arm's call is long enough for a sample, and no other's."""

    def prepare(self, arm: sampling.Arm) -> None:
        first = Path(os.environ["KILLGATE_TEST_MEETING"]) / "first"
        if arm.alone is None:
            arm.alone = not first.exists()
            first.touch()
        arm.calls = 1 if arm.alone else 10 * len(arm.sets)

    def _sample(self, arm: sampling.Arm) -> float:
        began = time.process_time()
        for args, out in arm.sets[arm.turn % len(arm.sets) :][:1] if arm.alone else arm.sets:
            arm.run(args, out)
        arm.turn += 1
        return 1 + 1e6 * (time.process_time() - began)


def long() -> Backend:
    return replace(backend(), timer=lambda *_: Long())
