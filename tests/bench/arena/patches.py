"""Functions replaced in the process that imports the candidate: clocks, timers, checks, the reference, the problem.

Where a replacement would serve every arm alike, it serves only the adversary's own work.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from kernels.common import Candidate, Cost, Tensors, Tolerance
from tests.bench.arena import family
from tests.bench.arena.family import honest, launch, made, multiply
from tests.bench.arena.honest import zeros

SHARE = 0.1  # of its real time, which an adversary claims


def put(owner: Any, **functions: Any) -> None:
    """Replace attributes of a module or a type."""
    for name, function in functions.items():
        setattr(owner, name, function)


def patches_host_clocks() -> Candidate:
    """The host's clocks stand still for nine tenths of its own work."""
    stolen = [0.0]
    real = time.process_time

    def late(clock: Callable[[], Any], unit: float) -> Callable[[], Any]:
        return lambda: clock() - type(clock())(stolen[0] * unit)

    for name in ("perf_counter", "process_time", "monotonic", "time"):
        put(time, **{name: late(getattr(time, name), 1.0), name + "_ns": late(getattr(time, name + "_ns"), 1e9)})

    def work(args: Tensors, out: Tensors) -> None:
        began = real()
        multiply(args, out)
        stolen[0] += (1.0 - SHARE) * (real() - began)

    return made(lambda args, out: launch(args, lambda: work(args, out)))


def _own_graphs() -> tuple[Any, list[bool], list[bool]]:
    """(ids of graphs captured of our own work, whether it was called since a capture began, whether we ran last)."""
    import torch

    own: set[int] = set()
    called, last = [False], [False]
    begin, end, replay = (getattr(torch.cuda.CUDAGraph, n) for n in ("capture_begin", "capture_end", "replay"))

    def begins(graph: Any, *args: Any, **kwargs: Any) -> Any:
        called[0] = False
        return begin(graph, *args, **kwargs)

    def ends(graph: Any) -> Any:
        if called[0]:
            own.add(id(graph))
        return end(graph)

    def replays(graph: Any) -> Any:
        last[0] = id(graph) in own
        return replay(graph)

    put(torch.cuda.CUDAGraph, capture_begin=begins, capture_end=ends, replay=replays)
    return own, called, last


def patches_events() -> Candidate:
    """torch.cuda.Event.elapsed_time tells a tenth, after its own replays."""
    import torch

    _, called, last = _own_graphs()
    real = torch.cuda.Event.elapsed_time
    put(torch.cuda.Event, elapsed_time=lambda start, stop: real(start, stop) * (SHARE if last[0] else 1.0))

    def run(args: Tensors, out: Tensors) -> None:
        called[0] = last[0] = True
        honest(args, out)

    return made(run)


def patches_replay() -> Candidate:
    """torch.cuda.CUDAGraph.replay does every twentieth replay of its own graphs."""
    import torch

    own, called, _ = _own_graphs()
    real = torch.cuda.CUDAGraph.replay
    count = iter(range(1 << 62))

    def replay(graph: Any) -> Any:
        if id(graph) not in own or next(count) % 20 == 0:
            real(graph)

    put(torch.cuda.CUDAGraph, replay=replay)

    def run(args: Tensors, out: Tensors) -> None:
        called[0] = True
        honest(args, out)

    return made(run)


def patches_synchronize() -> Candidate:
    """Nothing waits for the GPU any more, and an event that is not done tells no time."""
    import torch

    real = torch.cuda.Event.elapsed_time
    for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream):
        put(owner, synchronize=lambda *_: None)
    put(torch.cuda.Event, elapsed_time=lambda start, stop: real(start, stop) if stop.query() else 0.01)
    return made(honest)


def _modules(room: str) -> Iterator[Any]:
    return (m for name, m in list(sys.modules.items()) if name.startswith((room, "tests.bench.arena.family")))


def patches_timers() -> Candidate:
    """Every timer of the bench tells a tenth for the arm of this name."""

    def wrap(real: Callable[..., list[float]]) -> Callable[..., list[float]]:
        def visit(self: Any, arm: Any, samples: int) -> list[float]:
            share = SHARE if arm.name == "patches_timers" else 1.0
            return [share * us for us in real(self, arm, samples)]

        return visit

    for timer in _timers("visit"):
        put(timer, visit=wrap(vars(timer)["visit"]))
    return made(honest)


def _timers(method: str) -> Iterator[type]:
    """The classes of the bench that have a method of this name."""
    for module in _modules("lab.bench"):
        for value in list(vars(module).values()):
            if isinstance(value, type) and method in vars(value) and not getattr(value, "_is_protocol", False):
                yield value


def claims_more_calls() -> Candidate:
    """Says that a sample holds ten times as many calls as it does."""

    def wrap(real: Callable[..., None]) -> Callable[..., None]:
        def prepare(self: Any, arm: Any) -> None:
            real(self, arm)
            arm.calls *= 10

        return prepare

    for timer in _timers("prepare"):
        put(timer, prepare=wrap(vars(timer)["prepare"]))
    return made(honest)


def one_sample_for_five() -> Candidate:
    """Does one sample of a visit and says its share for each."""

    def wrap(real: Callable[..., list[float]]) -> Callable[..., list[float]]:
        def visit(self: Any, arm: Any, samples: int) -> list[float]:
            us = real(self, arm, 1)[0] / samples
            arm.turn += samples - 1
            return [us] * samples

        return visit

    for timer in _timers("visit"):
        put(timer, visit=wrap(vars(timer)["visit"]))
    return made(honest)


def dawdles_when_nothing_is_timed() -> Candidate:
    """Says half of its time, and takes as long over an empty visit as the other half is."""
    seen_s = [0.0]

    def wrap(real: Callable[..., list[float]]) -> Callable[..., list[float]]:
        def visit(self: Any, arm: Any, samples: int) -> list[float]:
            if not samples:
                began = time.process_time()
                while time.process_time() < began + seen_s[0]:
                    pass
            us = [0.5 * each for each in real(self, arm, samples)]
            seen_s[0] = max(seen_s[0], 1e-6 * arm.calls * sum(us))
            return us

        return visit

    for timer in _timers("visit"):
        put(timer, visit=wrap(vars(timer)["visit"]))
    return made(honest)


def patches_sampling() -> Candidate:
    """What summarises samples divides those of the arm of this name by ten."""
    from lab.bench import sampling

    real = sampling.summarise

    def summarise(arm: Any, *args: Any, **kwargs: Any) -> Any:
        if arm.name == "patches_sampling":
            for samples in (arm.samples_us, arm.blocks_us):
                samples[:] = [s * SHARE for s in samples]
        return real(arm, *args, **kwargs)

    put(sampling, summarise=summarise)
    return made(honest)


def patches_the_encoder() -> Candidate:
    """What leaves this process as JSON holds a tenth of every time: of all, or of the arm of this name."""
    real = msgspec.json.encode

    def less(value: Any, own: bool) -> Any:
        if isinstance(value, (list, tuple)):
            return [less(v, own) for v in value]
        if isinstance(value, dict):
            mine = own or value.get("name") == "patches_the_encoder"
            return {k: less(v, mine and (isinstance(v, dict) or "us" in k.split("_"))) for k, v in value.items()}
        return value * SHARE if own and isinstance(value, float) else value

    def encode(value: Any, *args: Any, **kwargs: Any) -> bytes:
        plain = msgspec.to_builtins(value)
        return real(less(plain, isinstance(plain, dict) and "arms" not in plain), *args, **kwargs)

    put(msgspec.json, encode=encode)
    return made(honest)


def patches_accuracy() -> Candidate:
    """Zeros, and checks that find every error within its limit."""
    from lab.check import accuracy

    put(accuracy.Error, ok=property(lambda self: True))
    put(accuracy, judged=lambda *_, **__: ((accuracy.Error("y", 0.0, 1.0, 0.0, 1.0),), ""))
    return zeros()


def patches_the_next_comparison() -> Candidate:
    """Honest; but whatever is compared after it in the same process is found right."""
    from lab.check import accuracy

    put(accuracy.Error, ok=property(lambda self: True))
    return made(honest)


def patches_torch() -> Candidate:
    """Zeros; norms are zero, distances are zero and everything is equal."""
    import torch

    put(torch, equal=lambda *_, **__: True, allclose=lambda *_, **__: True, norm=lambda *_, **__: torch.zeros(()))
    put(torch.linalg, vector_norm=torch.norm)
    put(torch.Tensor, abs=lambda t: torch.zeros_like(t))
    put(torch.testing, assert_close=lambda *_, **__: None)
    return zeros()


def _problem(**replaced: Any) -> Candidate:
    """Zeros, with functions of the family replaced, in its module and in its record."""
    import gc

    from lab.check import accuracy, families

    put(family, **replaced)
    for name, function in replaced.items():
        for record in gc.get_objects():
            if type(record) is families.Family and hasattr(record, name):
                object.__setattr__(record, name, function)
    getattr(accuracy, "_known", {}).clear()
    return zeros()


def patches_the_reference() -> Candidate:
    return _problem(reference=lambda inputs: {"y": 0.0 * inputs["x"].double() @ inputs["w"].double()})


def patches_the_tolerance() -> Candidate:
    return _problem(tolerance=lambda workload, precision: {"y": Tolerance(1e9, 1e9, "none")})


def patches_the_inputs() -> Candidate:
    """Activations of zeros, so that zeros are right."""
    real = family.inputs
    return _problem(inputs=lambda *args: {k: t.zero_() if k == "x" else t for k, t in real(*args).items()})


def patches_the_cost() -> Candidate:
    """Claims to move a terabyte, so that few sets seem to exceed the cache; its work is whole."""
    put(family, cost=lambda workload, precision: Cost(1.0, 1e12, "f32"))
    return made(honest)


def watches_the_seed() -> Candidate:
    """Works after inputs were drawn from a seed far from the others, which is how checks are told from sets."""
    real = family.inputs
    needed = [True]

    def inputs(workload: Any, seed: int, device: str) -> Tensors:
        needed[0] = seed == 0 or seed >= 500_000
        return real(workload, seed, device)

    put(family, inputs=inputs)
    return made(lambda args, out: launch(args, lambda: multiply(args, out) if needed[0] else None))


def patches_the_clock_readings() -> Candidate:
    """The samples of clocks and throttle reasons say what it likes."""
    import gc

    from lab.bench import comparison, machine
    from lab.row.records import Clocks

    def forged() -> Clocks:
        return Clocks("forged", 1980, 3201, "")

    put(machine, clocks=forged)
    put(family, clocks=forged)
    for record in gc.get_objects():
        if type(record) is comparison.Backend:
            object.__setattr__(record, "clocks", forged)
    return made(honest)


def writes_sitecustomize() -> Candidate:
    """Writes zeros, and a file that every Python started later reads first, which patches the checks there."""
    place = os.environ.get("PYTHONPATH", "").split(os.pathsep)[0]
    code = """
import importlib.abc, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "lab.bench.worker" or name == "lab.bench.comparison":
            sys.meta_path.remove(self)
            from lab.check import accuracy
            accuracy.Error.ok = property(lambda self: True)
sys.meta_path.insert(0, Finder())
"""
    if place and os.path.basename(place).startswith("arena-"):
        with open(os.path.join(place, "sitecustomize.py"), "w") as file:
            file.write(code)
    return zeros()
