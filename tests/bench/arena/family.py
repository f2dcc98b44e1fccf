"""The arena's family: y = x @ w in float32, the backends that its adversaries run on, and what a launch is on each.

On a GPU a launch is a launch. On the CPU it is a piece of Python that a capture records and a replay works through, as
in tests/check/fake_candidates.py: `clock` is real there, so what does less takes less. Candidates come from the modules
beside this one, by the names of data/arena.toml, and each is made when it is asked for: what its module does to a
process it does to the one that asks.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from kernels.common import Candidate, Cost, Tensors, Tolerance, Workload, poisoned
from lab.base.errors import REPOSITORY
from lab.bench import comparison, sampling
from lab.check import families
from lab.row.records import Clocks
from tests.check import fake_candidates

MODULES = ("honest", "answers", "timed", "patches", "channel", "outputs", "stealing", "neighbours")
WORKLOADS = (
    Workload("cpu", {"M": 64, "K": 256, "N": 256}),
    Workload("cuda", {"M": 128, "K": 4096, "N": 4096}, role="measure"),
)
ACTIVATIONS = ("x",)
IN_PLACE: tuple[str, ...] = ()
# Of ||y||. float32: 2^-24 for each of up to 4,096 terms, which add as a walk. bf16: two roundings of 2^-9 / sqrt(3) at
# most, 1.6e-3 together; e4m3 has 2.6e-2 and int8 with a scale for each row 1e-2.
LIMITS = {"f32": (4e-6, 1e-4), "bf16": (2.4e-3, 2e-2)}
TARGET_US = 1500.0

# The problem ---------------------------------------------------------------------------------------------------------


def inputs(workload: Workload, seed: int, device: str) -> Tensors:
    """x [M, K], the activation, and w [K, N], the weight; float32, standard normal."""
    import torch

    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(workload["M"], workload["K"], generator=rng)
    w = torch.randn(workload["K"], workload["N"], generator=rng)
    return {"x": x.to(device), "w": w.to(device)}


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
def load(name: str) -> families.Family:
    """The family, whatever it is called."""
    here: Any = sys.modules[__name__]
    return families.Family("arena", "Arena", reference, cost, here, Candidates(), (), {})


# Backends ------------------------------------------------------------------------------------------------------------


class HostGraph:
    """lab.bench.timers.GraphTimer on the host: a graph is a list of what was launched, and the clock is the host's."""

    name = "graph"

    def prepare(self, arm: sampling.Arm) -> None:
        def walk(rounds: int = 1) -> None:
            for _ in range(rounds):
                for args, out in arm.sets:
                    arm.run(args, out)

        walk()
        began = time.perf_counter()
        walk()
        each_us = 1e6 * (time.perf_counter() - began) / len(arm.sets)
        rounds = max(1, math.ceil(TARGET_US / max(each_us, 20.0) / len(arm.sets)))
        arm.calls = rounds * len(arm.sets)
        once = fake_candidates.capture(lambda: arm.run(*arm.sets[0]))
        arm.state = fake_candidates.capture(lambda: walk(rounds)), once

    def sample(self, arm: sampling.Arm) -> float:
        began = time.perf_counter()
        for work in arm.state[0]:
            work()
        return 1e6 * (time.perf_counter() - began) / arm.calls

    def once(self, arm: sampling.Arm) -> None:
        for work in arm.state[1]:
            work()


def clocks() -> Clocks:
    """What a simulated device says of its clocks."""
    return Clocks("simulated", 1980, 3201, "")


def cpu() -> comparison.Backend:
    """The simulated device: real work, real checks, the host's clock."""
    return comparison.Backend("cpu", 0, lambda name, l2, size: HostGraph(), clocks, load)


def cuda() -> comparison.Backend:
    """The GPU, as it measures every other family."""
    return replace(comparison.gpu(), load=load)
