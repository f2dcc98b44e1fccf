"""`lab profile PHASE`: a phase's arms under a profiler, stored as one small trace.

Two profilers, and the result says which: nsys where it is on the PATH together with its importer (a collector alone
writes a file that nothing there can read), else PyTorch's profiler, which also lists each kernel inside a CUDA graph.
nsys runs this very command again as its child, with node-level graph tracing (without it a replayed graph is one opaque
row), CUDA and NVTX only, recording nothing but the range CAPTURE, so that checks and warm-ups are outside.

An arm is checked against its reference first, at the shape that is profiled: a breakdown of a wrong kernel explains
nothing. Ranges are called phase/arm/workload and, inside, phase/arm/workload/step N; `lab trace --nvtx` takes them by
name. Profiled times are perturbed and are not measurements: they say where time goes, `lab measure` how long it takes.

What is kept is the normalised trace (lab/trace/stored.py), never the profiler's file: that one holds the environment,
the command line and the output of the process, and lives in a temporary folder that is deleted.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.base import devices
from lab.base.errors import REPOSITORY, BadInput
from lab.card import phases
from lab.check import accuracy, families
from lab.row import store
from lab.trace import stored
from lab.trace.files import read
from lab.trace.model import Trace

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
# What is kept of a Kineto file where Arrow is absent: device rows, API calls and our ranges, and of them these keys.
KINETO_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver", "user_annotation")
KINETO_KEYS = ("ph", "cat", "name", "ts", "dur", "pid", "tid")
KINETO_ARGS = ("correlation", "device", "context", "stream", "bytes", "graph id", "graph node id")


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
class Profile:
    """A stored profile: its file, the tool, the trace, and the arms left out with their reasons."""

    path: Path
    tool: Tool
    trace: Trace
    left_out: tuple[str, ...]


def choose(find: Callable[[str], str | None] = shutil.which) -> Tool:
    """nsys when it and its importer are here, else PyTorch's profiler, with the reason."""
    found = find("nsys")
    if found is None:
        return Tool("torch.profiler", "nsys is not on the PATH")
    path = Path(found).resolve()
    if importer(path) is None:
        return Tool("torch.profiler", "nsys is on the PATH without its importer, so it could write no report")
    return Tool("nsys", "nsys and its importer are here", path)


def importer(nsys: Path) -> Path | None:
    """nsys's QdstrmImporter, which lies in host-linux-*/ beside the collector's folder; None when it is missing."""
    for folder in list(nsys.parents)[:3]:
        for candidate in sorted(folder.glob("host-linux-*/QdstrmImporter")):
            return candidate
    return None


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
    found, left_out = [], []
    for workload in wanted:
        for arm, name in (("control", card.control), ("candidate", card.candidate)):
            candidate = family.candidate(name)
            check = accuracy.check(family, candidate, workload, SEED, device)
            if check.status != "ok":
                left_out.append(f"{card.id}/{arm}/{workload.id}: {check.status}: {check.message}")
                continue
            found.append(Job(f"{card.id}/{arm}/{workload.id}", _stepper(family, candidate, workload, device)))
        if device == "cpu" and [job.label.rpartition("/")[2] for job in found[-2:]] == [workload.id] * 2:
            return found[-2:], []  # one workload that both arms take is enough to see the ranges
    return found, left_out


def _stepper(family: families.Family, candidate: Any, workload: Any, device: str) -> Callable[[int], None]:
    """A function that launches one step; inputs are made at the first call, which is a warm-up and not recorded."""
    state: list[tuple[Any, Any]] = []

    def run(step: int) -> None:
        if not state:
            for number in range(2):  # two sets in turn, so that a step does not find its own inputs in the cache
                inputs = family.cases.inputs(workload, SEED + number, device)
                state.append((candidate.prepare(inputs), family.cases.outputs(workload, inputs)))
        candidate.run(*state[step % len(state)])

    return run


def work(todo: Iterable[Job], steps: int, named: Callable[[str], Any], sync: Callable[[], None]) -> None:
    """Run each job `steps` times inside its ranges. named: label -> context manager; sync: waits for the device."""
    for job in todo:
        with named(job.label):
            for step in range(steps):
                with named(f"{job.label}/step {step}"):
                    job.run(step)
                    sync()


def _ready(todo: Sequence[Job], sync: Callable[[], None]) -> None:
    for job in todo:
        for step in range(WARM_UPS):
            job.run(step)
    sync()


def _sync(device: str) -> Callable[[], None]:
    import torch

    return torch.cuda.synchronize if device == "cuda" else lambda: None


def with_torch(todo: Sequence[Job], steps: int, device: str, folder: Path) -> Path:
    """Run the jobs under PyTorch's profiler; returns the Kineto file in `folder`."""
    import torch
    from torch.profiler import ProfilerActivity, record_function

    sync = _sync(device)
    _ready(todo, sync)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with torch.profiler.profile(activities=activities) as profiler:
        work(todo, steps, record_function, sync)
    path = folder / "kineto.json"
    profiler.export_chrome_trace(str(path))
    return path


def inside_nsys(todo: Sequence[Job], steps: int, device: str) -> None:
    """What nsys's child does: warm up, then run the jobs inside the recorded range."""
    named = _nvtx()
    sync = _sync(device)
    _ready(todo, sync)
    with named(CAPTURE):
        work(todo, steps, named, sync)


def _nvtx() -> Callable[[str], Any]:
    """Ranges by the nvtx package, else by torch; both reach nsys."""
    if importlib.util.find_spec("nvtx") is not None:
        import nvtx

        return lambda label: nvtx.annotate(label)
    import torch

    return torch.cuda.nvtx.range


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


def profile(
    card: phases.Card, only: str | None, steps: int, device: str, tool: Tool, out: Path | None = None
) -> Profile:
    """Profile a card's arms and store the trace.

    out: folder for trace.parquet; default profiles/<device>/<phase>/<run>.
    Raises BadInput for a card without a family, no arm that passes its check, and a trace without a single step.
    """
    place = devices.get(_gpu_name(), "GPU").id if device == "cuda" else "cpu"
    run, default = store.new_run(place, card.id)
    with tempfile.TemporaryDirectory(prefix="killgate-") as temporary:
        left_out: list[str] = []
        if tool.name == "nsys":
            raw = with_nsys(tool, card, only, steps, Path(temporary))
        else:
            todo, left_out = jobs(card, only, device)
            if not todo:
                raise BadInput(card.path, f"no arm passes its check ({'; '.join(left_out)})", "see `lab check`")
            raw = with_torch(todo, steps, device, Path(temporary))
        trace = read(raw)
        about = {"phase": card.id, "device": place, "run": run, "tool": tool.name, "steps": steps}
        about |= {"control": card.control, "candidate": card.candidate, "left_out": left_out}
        path = _keep(trace, raw, (out or default), about)
    seen = {label.split("/")[1] for label in trace.labels if label.startswith(f"{card.id}/")}
    if not seen:
        raise BadInput(path, "the profiler recorded no range of ours", "see NSYS_NVTX_PROFILER_REGISTER_ONLY in nsys")
    if tool.name == "nsys":  # the check ran in the child, and its output is not kept
        left_out += [
            f"{card.id}/{arm}: no range recorded, see `lab check`"
            for arm in ("control", "candidate")
            if arm not in seen
        ]
    return Profile(path, tool, trace, tuple(left_out))


def _keep(trace: Trace, raw: Path, folder: Path, about: dict[str, Any]) -> Path:
    """Store the trace as Parquet; where Arrow is absent, what `keep` needs to do it elsewhere."""
    if importlib.util.find_spec("pyarrow") is not None:
        return stored.save(trace, folder / "trace.parquet", about)
    if trace.tool != "kineto":
        raise BadInput("lab profile", "pyarrow is missing, which writes Parquet", "install it, or use torch.profiler")
    folder.mkdir(parents=True, exist_ok=True)
    return cleaned(raw, folder / "trace.json.gz", about)


def cleaned(raw: Path, target: Path, about: dict[str, Any]) -> Path:
    """Write a Kineto file with device rows, API calls and our ranges only, gzip-compressed, and what it is about."""
    content = json.loads(raw.read_text(encoding="utf-8"))
    events = []
    for event in content["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in KINETO_CATEGORIES:
            kept = {key: event[key] for key in KINETO_KEYS if key in event}
            args = {key: v for key, v in event.get("args", {}).items() if key in KINETO_ARGS}
            events.append(kept | {"args": args})
    gpus = [{"id": d.get("id"), "name": d.get("name")} for d in content.get("deviceProperties", [])]
    body = {"schemaVersion": content.get("schemaVersion", 1), "deviceProperties": gpus, "traceEvents": events}
    with gzip.open(target, "wt", encoding="utf-8") as file:
        json.dump(body | {"killgate": about}, file, separators=(",", ":"))
    return target


def keep(path: Path) -> Path:
    """Turn a file that `cleaned` wrote into trace.parquet beside it, and remove it."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            about = json.load(file).get("killgate")
    except (OSError, ValueError, EOFError, AttributeError):
        about = None
    if not isinstance(about, dict):
        raise BadInput(path, "is no profile of `lab profile` that waits for its Parquet", "give its trace.json.gz")
    target = stored.save(read(path), path.parent / "trace.parquet", about)
    path.unlink()
    return target


def _gpu_name() -> str:
    import torch

    if not torch.cuda.is_available():
        raise BadInput("lab profile", "no CUDA GPU is usable here", "run it where there is one, or try --device cpu")
    return torch.cuda.get_device_name(0)


def run(arguments: argparse.Namespace) -> Iterator[str]:
    """`lab profile`: yields the lines to print."""
    if arguments.store:
        yield f"stored {keep(arguments.store)}"
        return
    if not arguments.phase or arguments.steps < 1:
        raise BadInput("lab profile", "needs card ids and at least one step", "see `lab phases`")
    if arguments.device == "cpu":
        families.interpret_on_cpu()
    tool = choose()
    if arguments.device == "cpu":
        tool = Tool("torch.profiler", "a CPU run has host ranges only")
    if arguments.tool and arguments.tool != tool.name:
        if arguments.tool == "nsys":
            raise BadInput("--tool nsys", tool.why, "leave it out to use torch.profiler")
        tool = Tool("torch.profiler", "asked for")
    for name in arguments.phase:
        card = phases.card(name)
        if arguments.inside:
            todo, _ = jobs(card, arguments.workload, arguments.device)
            with contextlib.redirect_stdout(sys.stderr):
                inside_nsys(todo, arguments.steps, arguments.device)
            continue
        out = arguments.out / card.id if arguments.out else None
        done = profile(card, arguments.workload, arguments.steps, arguments.device, tool, out)
        size = done.path.stat().st_size / 1000
        yield f"{card.id}: {tool.name} ({tool.why}); {len(done.trace.kernels)} kernels, {size:.0f} KB in {done.path}"
        yield from (f"left out: {reason}" for reason in done.left_out)
        yield from (f"warning: {warning}" for warning in done.trace.warnings)
