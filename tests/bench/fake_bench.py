"""A bench without a GPU: a toy family, graphs that are lists of launches, and a clock that is made up.

The clock is a table of microseconds by candidate with seeded noise; no time passes, and half a second of timed work is
over in a moment. `cpu` is the backend for tests of the checks. `quick` does without torch, so that a process starts in
a fifth of a second: its checks call a candidate and compare nothing, because what is tested with it is who dies, who
notices and what is on the disk. `slow` sleeps as long as it says it measured, for tests/bench/bench_harness.py.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kernels.common import Candidate, Cost, Tensors, Tolerance, Workload
from lab.bench import backend, comparison, sampling
from lab.card import phases
from lab.check import accuracy, families
from lab.row.records import Clocks
from tests.check.fake_candidates import CANDIDATES, capture

BACKEND = "tests.bench.fake_bench:cpu"
SIZES = (63, 75, 500, 1)
WORKLOADS = tuple(Workload(f"n{n}", {"N": n}) for n in SIZES) + tuple(
    Workload(f"w{i:02}", {"N": 64 + i}) for i in range(40)
)
CONTROL_US, CANDIDATE_US = 100.0, 80.0
NOISE = 0.001

# The clock -----------------------------------------------------------------------------------------------------------


class FakeGraph:
    """lab.bench.timers.GraphTimer with lists for graphs; `sample` replays one call and reads the made-up clock.

    sleep: whether a sample takes as long as it says.
    """

    name = "graph"

    def __init__(self, sleep: bool = False) -> None:
        self.noise = random.Random(2)
        self.sleep, self.busy_s = sleep, 0.0
        self.names: dict[str, Any] = {}

    def prepare(self, arm: sampling.Arm) -> None:
        self.names[arm.name] = arm.run
        for args, out in arm.sets:
            arm.run(args, out)
        calls = [capture(lambda s=s: arm.run(*s)) for s in arm.sets]  # type: ignore[misc]
        arm.calls = len(arm.sets) if self.sleep else 200 * len(arm.sets)
        arm.state = calls

    def visit(self, arm: sampling.Arm, samples: int) -> list[float]:
        arm.turn += samples
        return [self.sample(arm) for _ in range(samples)]

    def release(self, arm: sampling.Arm) -> None:
        arm.state = None

    def sample(self, arm: sampling.Arm) -> float:
        start = time.perf_counter()
        for call in arm.state:
            for work in call:
                work()
        alike = [name for name, run in self.names.items() if run == arm.run and name != sampling.AGAIN]
        name = min(alike, key=lambda name: name != "plain") if arm.name == sampling.AGAIN else arm.name
        taken_us = duration_us(name) * self.noise.gauss(1.0, NOISE)
        if self.sleep:
            time.sleep(1e-5 * taken_us)  # a millisecond, which is what a replay of a graph of many calls takes
            spent_s = time.perf_counter() - start
            self.busy_s += spent_s
            return 1e6 * spent_s
        return taken_us


class FakeEvents(FakeGraph):
    """lab.bench.timers.EventsTimer: nothing is captured, samples and the call after the timing run the candidate."""

    name = "events"

    def prepare(self, arm: sampling.Arm) -> None:
        super().prepare(arm)
        arm.state = [[lambda s=s: arm.run(*s)] for s in arm.sets]


class FakeHost(FakeEvents):
    """Made-up times under the name of lab.bench.timers.HostTimer."""

    name = "host"


def duration_us(name: str) -> float:
    """The made-up clock: controls take 100 us, everything else 80."""
    return CONTROL_US if name.startswith("plain") else CANDIDATE_US


# The family: y = x * scale --------------------------------------------------------------------


def make_inputs(workload: Workload, seed: int, device: str) -> Tensors:
    import torch

    rng = torch.Generator().manual_seed(seed)
    n = workload["N"]
    return {"x": torch.randn(n, generator=rng), "scale": torch.randn(n, generator=rng), "table": torch.arange(n)}


def make_outputs(workload: Workload, inputs: Tensors) -> Tensors:
    import torch

    return {"y": torch.full_like(inputs["x"], float("nan"))}


def reference(inputs: Tensors) -> Tensors:
    return {"y": inputs["x"].double() * inputs["scale"].double()}


def load(name: str) -> families.Family:
    """The toy family, whatever it is called; `absent` is a peer whose library is missing, `peers/odd` cannot import."""
    cases: Any = SimpleNamespace(
        WORKLOADS=WORKLOADS,
        inputs=make_inputs,
        outputs=make_outputs,
        tolerance=lambda workload, precision: {"y": Tolerance(1e-6, 1e-5, "one product in float32")},
        ACTIVATIONS=("x",),
        IN_PLACE=(),
    )
    return families.Family(
        name="toy",
        title="Toy",
        reference=reference,
        cost=lambda workload, precision: Cost(workload["N"], 12.0 * workload["N"], "f32"),
        cases=cases,
        candidates=CANDIDATES,
        cuda_sources=(),
        unavailable={"peers/odd": "No module named 'odd'"},
        modules={"absent": "peers/absent", "packs": "peers/packing"},
    )


def use(monkeypatch: Any, load: Callable[[str], families.Family] = load) -> None:
    """Let this family stand for every family, also where only what it would launch is known of it.

    monkeypatch: pytest's, or what has a `setattr` that stays.
    """
    monkeypatch.setattr(families, "load", load)
    monkeypatch.setattr(families, "bare", load)
    monkeypatch.setattr(families, "gpu_capability", lambda: None)  # without an import of torch
    monkeypatch.setattr(families, "launches", lambda name, *asked: families.described(load(name), *asked))
    monkeypatch.setattr(families, "together", lambda name, capability, workloads: None)


# Backends ------------------------------------------------------------------------------------------------------------


def clocks(source: str = "made up") -> Clocks:
    return Clocks(source, 1980, 3201, "")


def cpu() -> backend.Backend:
    """Real checks on the CPU, made-up clock."""
    return backend.Backend(
        "cpu", 0, lambda name, l2, size: {"graph": FakeGraph, "events": FakeEvents}[name](), clocks, load,
        clocks_at_once=clocks,
    )  # fmt: skip


def quick() -> backend.Backend:
    """No torch in the process: no inputs, and checks that call the candidate and compare nothing."""

    def check(family: Any, candidate: Any, workload: Any, seed: int, device: str, *_: Any) -> accuracy.Check:
        def result(status: Any, message: str) -> accuracy.Check:
            return accuracy.Check(family.name, candidate.name, workload.id, "f32", status, message)

        try:
            candidate.run({}, {})
        except Exception as error:
            return result("error", f"{type(error).__name__}: {error}".splitlines()[0])
        return result("ok", "")

    def load_quick(name: str) -> families.Family:
        family = load(name)
        cases: Any = family.cases
        cases.inputs = lambda workload, seed, device: {}
        cases.outputs = lambda workload, inputs: {}
        for candidate in ("plain", "faster", "absent", "packs"):
            family.candidates[candidate] = Candidate(candidate, "f32", lambda args, out: None)  # type: ignore[index]
        return family

    accuracy.check = check  # type: ignore[assignment]
    comparison.recheck = lambda *_: ("", 1e-9)
    comparison.looked_at = lambda *_: ""
    sampling.WARM_UP_S = 0.0
    made: dict[str, type[FakeGraph]] = {"host": FakeHost}
    return backend.Backend(
        "cpu", 0, lambda name, l2, size: made.get(name, FakeGraph)(), clocks, load_quick, clocks_at_once=clocks
    )


SLOW = FakeGraph(sleep=True)


def slow() -> backend.Backend:
    """Like `cpu`, with samples that take their time; the clocks' source is its seconds inside them."""
    import torch  # as lab.comparison.gpu does, so that it is part of the process's start

    assert torch
    SLOW.names.clear()
    return backend.Backend("cpu", 0, lambda *_: SLOW, lambda: clocks(str(SLOW.busy_s)), load)


# Cards and a process that measures ------------------------------------------------------------------------------------

CARD = """id = "toy"
row = "LP17"
system = "killgate"
device = "h200"
title = "t"
question = "q"
hypothesis = "h"
null = "n"
family = "toy"
control = "{control}"
candidate = "{candidate}"
workloads = {workloads}
limits = "l"
[gate]
source = "declared in this card"
[[gate.require]]
metric = "kernel_us"
compare = "change"
op = "<"
threshold = 0
unit = "%"
workload = "{decisive}"{against}
[expected]
recovery = "r"
arithmetic = "a"
"""


def card(
    folder: Path,
    workloads: tuple[str, ...],
    control: str = "plain",
    candidate: str = "faster",
    decisive: str = "",
    against: str = "",
) -> phases.Card:
    """A card of the toy family, written to `folder`; decisive: the workload its gate asks for, default the first.

    against: the workload whose candidate that one's is compared with, default its own control.
    """
    path = folder / "toy.toml"
    listed = "[" + ", ".join(f'"{w}"' for w in workloads) + "]"
    given = {"control": control, "candidate": candidate, "workloads": listed, "decisive": decisive or workloads[0]}
    path.write_text(CARD.format(**given, against=f'\nagainst = "{against}"' if against else ""))
    return phases.load(path)


def main(folder: Path, count: int, candidate: str) -> None:
    """Measure the first `count` numbered workloads into `folder` with the quick backend; a line each as it is safe."""
    from lab.base import devices
    from lab.bench import machine, measure
    from lab.row.records import Provenance

    use(SimpleNamespace(setattr=setattr))
    machine.provenance = lambda: Provenance(commit="0")
    folder.mkdir(parents=True, exist_ok=True)
    made = folder.parent / f"card-{os.getpid()}"
    made.mkdir()
    toy = card(made, tuple(f"w{i:02}" for i in range(count)), candidate=candidate)
    settings = measure.Settings(seconds=0.0, placements=1, processes=1, backend="tests.bench.fake_bench:quick")
    for rows in measure.measure(measure.plan(toy), settings, folder, devices.get("h200")):
        print(rows[0].workload_id, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "faster")
