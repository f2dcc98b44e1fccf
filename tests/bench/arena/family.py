"""The arena's family: y = x @ w in float32, the backends that its adversaries run on, and what a launch is on each.

On a GPU a launch is a launch. On the CPU it is a piece of Python that a capture records and a replay works through, as
in tests/check/fake_candidates.py: `clock` is real there, so what does less takes less. Candidates come from the modules
beside this one, by the names of data/arena.toml, and each is made when it is asked for: what its module does to a
process it does to the one that asks.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from kernels.common import Candidate, Cost, Tensors, Tolerance, Workload, poisoned
from lab.base.errors import REPOSITORY
from lab.bench import backend, sampling
from lab.check import families
from lab.row.records import Clocks
from tests.check import fake_candidates

MODULES = ("honest", "answers", "timed", "patches", "channel", "outputs", "stealing", "neighbours")
WORKLOADS = (
    Workload("cpu", {"M": 64, "K": 384, "N": 384}),
    Workload("cuda", {"M": 128, "K": 4096, "N": 4096}, role="measure"),
)
ACTIVATIONS = ("x",)
IN_PLACE: tuple[str, ...] = ()
# Of ||y||. float32: 2^-24 for each of up to 4,096 terms, which add as a walk. bf16: two roundings of 2^-9 / sqrt(3) at
# most, 1.6e-3 together; e4m3 has 2.6e-2 and int8 with a scale for each row 1e-2.
LIMITS = {"f32": (4e-6, 1e-4), "bf16": (2.4e-3, 2e-2)}
TARGET_US = 800.0
CLOCK_PCT = 20.0  # a request and its reply are part of what the harness reads

# The problem ---------------------------------------------------------------------------------------------------------


def inputs(workload: Workload, seed: int, device: str) -> Tensors:
    """x [M, K], the activation, and w [K, N], the weight; float32, standard normal."""
    import torch

    rng = torch.Generator(device).manual_seed(seed)
    x = torch.randn(workload["M"], workload["K"], generator=rng, device=device)
    return {"x": x, "w": torch.randn(workload["K"], workload["N"], generator=rng, device=device)}


def activations(workload: Workload, seed: int, device: str) -> Tensors:
    """x alone."""
    import torch

    rng = torch.Generator(device).manual_seed(seed)
    return {"x": torch.randn(workload["M"], workload["K"], generator=rng, device=device)}


def outputs(workload: Workload, inputs: Tensors) -> Tensors:
    """y [M, N], float32, NaN."""
    import torch

    return {"y": poisoned((workload["M"], workload["N"]), torch.float32, inputs["x"].device)}


def tolerance(workload: Workload, precision: str) -> dict[str, Tolerance]:
    """See LIMITS."""
    return {"y": Tolerance(*LIMITS[precision], "rounding of the operands and of the sum")}


def reference(inputs: Tensors) -> Tensors:
    """x @ w in float64."""
    return {"y": inputs["x"].double() @ inputs["w"].double()}


def cost(workload: Workload, precision: str) -> Cost:
    """A multiply-add for each of M N K; every operand once."""
    m, k, n = workload["M"], workload["K"], workload["N"]
    return Cost(2.0 * m * n * k, 4.0 * (m * k + k * n + m * n), "f32")


# Launches ------------------------------------------------------------------------------------------------------------


def launch(args: Tensors, work: Callable[[], Any], own_stream: bool = False) -> None:
    """Launch `work`; own_stream: on a stream of the candidate's own, which no capture and no timer sees."""
    if not args["x"].is_cuda:
        fake_candidates.launch(work, own_stream)
    elif own_stream:
        import torch

        with torch.cuda.stream(_side_stream()):
            work()
    else:
        work()


@cache
def _side_stream() -> Any:
    import torch

    return torch.cuda.Stream()


def capturing(args: Tensors) -> bool:
    """Whether what is launched now is recorded and not done."""
    import torch

    return torch.cuda.is_current_stream_capturing() if args["x"].is_cuda else bool(fake_candidates.CAPTURED)


def begins_now(args: Tensors) -> bool:
    """Whether nothing is recorded yet of a capture on the host."""
    return not args["x"].is_cuda and not fake_candidates.CAPTURED[-1]


def above(levels: int) -> int:
    """The process so many levels above this one: what arms are forked from, the harness."""
    pid = os.getpid()
    for _ in range(levels):
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    return pid


def multiply(args: Tensors, out: Tensors) -> None:
    """The honest work, not yet launched."""
    import torch

    torch.mm(args["x"], args["w"], out=out["y"])


def honest(args: Tensors, out: Tensors) -> None:
    """The honest work, launched."""
    launch(args, lambda: multiply(args, out))


def made(
    run: Callable[[Tensors, Tensors], Any], precision: str = "f32", prepare: Callable[[Tensors], Tensors] | None = None
) -> Candidate:
    """A candidate that has no name yet; see `Candidates`."""
    return Candidate("", precision, run, prepare=prepare or (lambda inputs: inputs))


# The adversaries -----------------------------------------------------------------------------------------------------


@cache
def adversaries() -> dict[str, dict[str, Any]]:
    """The table data/arena.toml by name."""
    return {a["name"]: a for a in tomllib.loads((REPOSITORY / "data/arena.toml").read_text())["adversary"]}


class Candidates(Mapping[str, Candidate]):
    """By name; each is made by the function of its name when it is first asked for."""

    def __init__(self) -> None:
        self.made: dict[str, Candidate] = {}

    def __getitem__(self, name: str) -> Candidate:
        if name not in self.made:
            for module in MODULES:
                if make := vars(importlib.import_module(f"tests.bench.arena.{module}")).get(name):
                    self.made[name] = replace(make(), name=name)
                    break
            else:
                raise KeyError(name)
        return self.made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(("plain", *adversaries()))

    def __len__(self) -> int:
        return 1 + len(adversaries())


@cache
def bare(name: str) -> families.Family:
    """The family, whatever it is called, without candidates."""
    here: Any = sys.modules[__name__]
    return families.Family("arena", "Arena", reference, cost, here, {}, (), {})


@cache
def load(name: str) -> families.Family:
    """The family with its candidates."""
    return replace(bare(name), candidates=Candidates())


# Backends ------------------------------------------------------------------------------------------------------------


class HostGraph:
    """lab.bench.timers.GraphTimer on the host: a graph is a list of what was launched.

    Its clock is the processor's time of this process, so that a busy machine changes little.
    """

    name = "graph"

    def prepare(self, arm: sampling.Arm) -> None:
        def walk(rounds: int = 1) -> None:
            for _ in range(rounds):
                for args, out in arm.sets:
                    arm.run(args, out)

        walk()
        began = time.process_time()
        walk()
        each_us = 1e6 * (time.process_time() - began) / len(arm.sets)
        rounds = max(1, math.ceil(TARGET_US / max(each_us, 5.0) / len(arm.sets)))
        arm.calls = rounds * len(arm.sets)
        arm.state, arm.once = (fake_candidates.capture(lambda n=n: walk(n)) for n in (rounds, 1))  # type: ignore[misc]

    def visit(self, arm: sampling.Arm, samples: int) -> list[float]:
        marks = [time.process_time()]
        for _ in range(samples):
            for work in arm.state:
                work()
            marks.append(time.process_time())
        arm.turn += samples
        return [1e6 * (after - before) / arm.calls for before, after in itertools.pairwise(marks)]

    def one_pass(self, arm: sampling.Arm) -> None:
        for work in arm.once:
            work()

    def release(self, arm: sampling.Arm) -> None:
        arm.state = arm.once = None


def clocks() -> Clocks:
    """What a simulated device says of its clocks."""
    return Clocks("simulated", 1980, 3201, "")


def cpu() -> backend.Backend:
    """The simulated device: real work, real checks, and the processor's time, which the harness asks the system for."""

    def clock(pid: int) -> float:
        return time.clock_gettime(~pid << 3 | 2)  # Linux: the clock of a process, of any

    sampling.WARM_UP_S = 0.0
    return backend.Backend(
        "cpu", 0, lambda name, l2, size: HostGraph(), clocks, load, apart=True, bare=bare, clock=clock,
        clock_pct=CLOCK_PCT,
    )  # fmt: skip


def cuda() -> backend.Backend:
    """The GPU, as it measures every other family."""
    return replace(backend.gpu(), load=load, bare=bare)
