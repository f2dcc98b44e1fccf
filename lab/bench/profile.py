"""A card's arms under a profiler: returns the profiler's file, which lab/trace/capture.py reads and stores.

Two profilers, and the capture says which: nsys where it is on the PATH together with its importer (a collector alone
writes a file that nothing there can read), else PyTorch's profiler, which also lists each kernel inside a CUDA graph.
nsys runs this very command again as its child, with node-level graph tracing (without it a replayed graph is one opaque
row), CUDA and NVTX only, recording nothing but the range CAPTURE, so that checks and warm-ups are outside.

What is composed of other families' kernels (calls.py) is captured first where its card times it so: its gaps are then
a graph's and not the host's.

An arm is checked against its reference first, at the shape that is profiled: a breakdown of a wrong kernel explains
nothing. Ranges are called phase/arm/workload and, inside, phase/arm/workload/step N; `lab trace --nvtx` takes them by
name. Profiled times are perturbed and are not measurements: they say where time goes, `lab measure` how long it takes.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lab.base.errors import REPOSITORY, BadInput
from lab.bench import measure
from lab.card import phases
from lab.check import accuracy, families

CAPTURE = "killgate"  # the range that nsys records
SEED = 20261121
WARM_UPS = 3
NSYS_OPTIONS = (
    *("--trace=cuda,nvtx", "--cuda-graph-trace=node", "--sample=none", "--cpuctxsw=none"),
    *("--capture-range=nvtx", f"--nvtx-capture={CAPTURE}@*", "--capture-range-end=stop", "--export=sqlite"),
    *("--force-overwrite=true", "--show-output=false"),
)
# nsys takes ranges with unregistered names (what torch.cuda.nvtx pushes) only when this is 0.
NSYS_ENVIRONMENT = {"NSYS_NVTX_PROFILER_REGISTER_ONLY": "0"}


@dataclass(frozen=True)
class Tool:
    """The profiler that is used: "nsys" or "torch.profiler", why, and nsys's path."""

    name: str
    why: str
    path: Path | None = None


@dataclass(frozen=True)
class Job:
    """One arm at one workload: `run` launches a step; label is phase/arm/workload."""

    label: str
    run: Callable[[int], None]


@dataclass(frozen=True)
class Capture:
    """The profiler's file. about: phase, device, run, tool, steps, arms. left_out: arms not run, with the reason."""

    raw: Path
    about: dict[str, Any]
    left_out: tuple[str, ...]


def choose(find: Callable[[str], str | None] = shutil.which) -> Tool:
    """nsys when it and its importer are here, else PyTorch's profiler, with the reason."""
    found = find("nsys")
    if found is None:
        return Tool("torch.profiler", "nsys is not on the PATH")
    path = Path(found).resolve()
    if not any(any(folder.glob("host-linux-*/QdstrmImporter")) for folder in list(path.parents)[:3]):
        return Tool("torch.profiler", "nsys is on the PATH without its importer, so it could write no report")
    return Tool("nsys", "nsys and its importer are here", path)


def jobs(card: phases.Card, only: str | None, device: str) -> tuple[list[Job], list[str]]:
    """The card's arms at its workloads that pass their check on `device`, and a sentence for each that does not.

    only: one workload id, also one that the card does not list. On a CPU the default is the first check workload
    that both arms take, because a model's shape would take hours in Triton's interpreter.
    """
    if not card.family:
        raise BadInput(card.path, "has no family, so there is nothing to run", "profile a card that has one")
    family = families.load(card.family)
    if only:
        wanted = [family.workload(only)]
    elif device == "cpu":
        wanted = [w for w in family.cases.WORKLOADS if w.role == "check"]
    else:
        wanted = [w for w in family.cases.WORKLOADS if w.id in card.workloads]
    if not wanted:
        raise BadInput(card.path, f"none of its workloads is one of {family.name}", "name one with --workload")
    captured = device == "cuda" and (card.measure.timer or "graph") == "graph"
    captured = captured and (families.FOLDER / family.name / "calls.py").exists()
    found, left_out, held = [], [], dict[str, Any]()
    for workload in wanted:
        for arm, name in (("control", card.control), ("candidate", card.candidate)):
            candidate = family.candidate(name)
            check = accuracy.check(family, candidate, workload, SEED, device)
            if check.status != "ok":
                left_out.append(f"{card.id}/{arm}/{workload.id}: {check.status}: {check.message}")
                continue
            eager: Any = candidate.eager
            if card.measure.timer == "host" and eager:  # what its rows time
                candidate = replace(candidate, run=eager)
            found.append(
                Job(f"{card.id}/{arm}/{workload.id}", _stepper(family, candidate, workload, device, held, captured))
            )
        if device == "cpu" and [job.label.rpartition("/")[2] for job in found[-2:]] == [workload.id] * 2:
            return found[-2:], []  # one workload that both arms take is enough to see the ranges
    return found, left_out


def _stepper(
    family: families.Family, candidate: Any, workload: Any, device: str, held: dict[str, Any], captured: bool
) -> Callable[[int], None]:
    """A function that launches one step; inputs are made at the first call, which is a warm-up and not recorded.

    held: what steps of one workload have in common, here as the first of them makes it. captured: as a graph.
    """
    state: list[tuple[Any, Any, Callable[[], Any]]] = []

    def inputs_of(seed: int) -> Any:
        cases: Any = family.cases
        if not hasattr(cases, "held"):
            return cases.inputs(workload, seed, device)
        if workload.id not in held:
            held[workload.id] = cases.held(workload, device)
        return held[workload.id] | cases.own(workload, seed, device)

    def run(step: int) -> None:
        if not state:
            for number in range(2):  # two sets in turn, so that a step does not find its own inputs in the cache
                inputs = inputs_of(SEED + number)
                out = accuracy.outputs(family, candidate, workload, inputs)
                args = accuracy.prepared(family, candidate, inputs)
                call: Callable[[], Any] = partial(candidate.run, args, out)
                if captured:
                    from lab.bench import timers

                    call()
                    call = timers.captured(call).replay
                state.append((args, out, call))  # a graph reads args and writes out
        state[step % len(state)][-1]()

    return run


def work(todo: Iterable[Job], steps: int, named: Callable[[str], Any], sync: Callable[[], None]) -> None:
    """Run each job `steps` times inside its ranges. named: label -> context manager; sync: waits for the device."""
    for job in todo:
        with named(job.label):
            for step in range(steps):
                with named(f"{job.label}/step {step}"):
                    job.run(step)
                    sync()


def _recorded(todo: Sequence[Job], steps: int, device: str, named: Callable[[str], Any], recording: Any) -> None:
    """Warm the jobs up, then run them inside the context `recording`."""
    import torch

    sync: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    for job in todo:
        for step in range(WARM_UPS):
            job.run(step)
    sync()
    with recording:
        work(todo, steps, named, sync)


def with_torch(todo: Sequence[Job], steps: int, device: str, folder: Path) -> Path:
    """Run the jobs under PyTorch's profiler; returns the Kineto file in `folder`."""
    from torch.profiler import ProfilerActivity, profile, record_function

    profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])])
    _recorded(todo, steps, device, record_function, profiler)
    path = folder / "kineto.json"
    profiler.export_chrome_trace(str(path))
    return path


def inside_nsys(todo: Sequence[Job], steps: int, device: str) -> None:
    """What nsys's child does: run the jobs inside the range that nsys records, named by nvtx where it is installed."""
    if importlib.util.find_spec("nvtx") is None:
        import torch

        _recorded(todo, steps, device, torch.cuda.nvtx.range, torch.cuda.nvtx.range(CAPTURE))
    else:
        import nvtx

        _recorded(todo, steps, device, nvtx.annotate, nvtx.annotate(CAPTURE))


def nsys_command(tool: Tool, card: str, only: str | None, steps: int, output: Path) -> list[str]:
    """The command that profiles this command under nsys."""
    assert tool.path is not None
    child = [sys.executable, "-m", "lab", "profile", card, "--steps", str(steps), "--inside"]
    child += ["--workload", only] if only else []
    return [str(tool.path), "profile", *NSYS_OPTIONS, "-o", str(output), *child]


def with_nsys(tool: Tool, card: phases.Card, only: str | None, steps: int, folder: Path) -> Path:
    """Run the phase under nsys; returns the SQLite export in `folder`. Raises BadInput with nsys's last line."""
    command = nsys_command(tool, card.id, only, steps, folder / "capture")
    environment = {**os.environ, **NSYS_ENVIRONMENT}
    # From the repository, so that the child finds `lab` in a checkout that was never installed.
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPOSITORY, check=False)
    path = folder / "capture.sqlite"
    if run.returncode or not path.exists():
        last = (run.stderr.strip() or run.stdout.strip() or "no message").splitlines()[-1]
        raise BadInput("nsys", f"exit status {run.returncode}, {last}", "use --tool torch.profiler")
    return path


def capture(
    card: phases.Card, only: str | None, steps: int, device: str, tool: Tool, run: str, folder: Path
) -> Capture:
    """Profile a card's arms; the profiler's file goes into `folder`. run: the id of the run that this belongs to.

    Raises BadInput for a card without a family and when no arm passes its check. Under nsys the check runs in the
    child, so an arm that failed it is only missing from the ranges.
    """
    left_out: list[str] = []
    if tool.name == "nsys":
        raw = with_nsys(tool, card, only, steps, folder)
    else:
        todo, left_out = jobs(card, only, device)
        if not todo:
            raise BadInput(card.path, f"no arm passes its check ({'; '.join(left_out)})", "see `lab check`")
        raw = with_torch(todo, steps, device, folder)
    about = {"phase": card.id, "device": place(device), "run": run, "tool": tool.name, "steps": steps}
    about |= {"control": card.control, "candidate": card.candidate, "left_out": left_out}
    return Capture(raw, about, tuple(left_out))


def place(device: str) -> str:
    """The id of the GPU here, or "cpu"; raises BadInput when a GPU is asked for and there is none."""
    return "cpu" if device == "cpu" else measure.require_gpu("lab profile").id
