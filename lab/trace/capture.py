"""`lab profile PHASE`: a phase's arms under a profiler (lab/bench/profile.py), stored as one small trace.

The profiler's own file holds the environment, the command line and the output of the process: it lives in a temporary
folder that is deleted. Where Arrow is absent (some GPU machines) a cleaned Kineto file is kept, and
`lab profile --store` makes the Parquet of it elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lab.base.errors import BadInput
from lab.bench import profile
from lab.card import phases
from lab.check import families
from lab.row import store
from lab.trace import files, kineto, stored
from lab.trace.model import Trace

# Of a Kineto file: device rows, API calls and our ranges; of them, what kineto.Event has.
KEPT = (kineto.KERNEL, kineto.COPY, kineto.FILL, kineto.CALL, kineto.RANGE)


@dataclass(frozen=True)
class Profile:
    """A stored profile: its file, the trace, and the arms left out with their reasons."""

    path: Path
    trace: Trace
    left_out: tuple[str, ...]


def run(arguments: argparse.Namespace) -> Iterator[str]:
    """`lab profile`: yields the lines to print."""
    if arguments.store:
        yield f"stored {store_cleaned(arguments.store)}"
        return
    if not arguments.phase or arguments.steps < 1:
        raise BadInput("lab profile", "needs card ids and at least one step", "see `lab phases`")
    tool = profile.choose()
    if arguments.device == "cpu":
        families.interpret_on_cpu()
        tool = profile.Tool("torch.profiler", "a CPU run has host ranges only")
    if arguments.tool and arguments.tool != tool.name:
        if arguments.tool == "nsys":
            raise BadInput("--tool nsys", tool.why, "leave it out to use torch.profiler")
        tool = profile.Tool("torch.profiler", "asked for")
    for name in arguments.phase:
        card = phases.card(name)
        if arguments.inside:
            todo, _ = profile.jobs(card, arguments.workload, arguments.device)
            with contextlib.redirect_stdout(sys.stderr):
                profile.inside_nsys(todo, arguments.steps, arguments.device)
            continue
        out = arguments.out / card.id if arguments.out else None
        done = profiled(card, arguments.workload, arguments.steps, arguments.device, tool, out)
        size = done.path.stat().st_size / 1000
        yield f"{card.id}: {tool.name} ({tool.why}); {len(done.trace.kernels)} kernels, {size:.0f} KB in {done.path}"
        yield from (f"left out: {reason}" for reason in done.left_out)
        yield from (f"warning: {warning}" for warning in done.trace.warnings)


def profiled(
    card: phases.Card, only: str | None, steps: int, device: str, tool: profile.Tool, out: Path | None = None
) -> Profile:
    """Profile a card's arms and store the trace.

    out: folder for trace.parquet; default profiles/<device>/<phase>/<run>.
    Raises BadInput as `profile.capture` does, and for a trace without a single range of ours.
    """
    run_id, default = store.new_run(profile.place(device), card.id)
    with tempfile.TemporaryDirectory(prefix="killgate-") as temporary:
        capture = profile.capture(card, only, steps, device, tool, run_id, Path(temporary))
        trace = files.read(capture.raw)
        path = _stored(trace, capture, out or default)
    seen = {label.split("/")[1] for label in trace.labels if label.startswith(f"{card.id}/")}
    if not seen:
        raise BadInput(path, "the profiler recorded no range of ours", "see NSYS_NVTX_PROFILER_REGISTER_ONLY in nsys")
    left_out = list(capture.left_out)
    if tool.name == "nsys":  # the check ran in the child, and its output is not kept
        missing = [arm for arm in ("control", "candidate") if arm not in seen]
        left_out += [f"{card.id}/{arm}: no range recorded, see `lab check`" for arm in missing]
    return Profile(path, trace, tuple(left_out))


def _stored(trace: Trace, capture: profile.Capture, folder: Path) -> Path:
    if importlib.util.find_spec("pyarrow") is not None:
        return stored.save(trace, folder / "trace.parquet", capture.about)
    if trace.tool != "kineto":
        raise BadInput("lab profile", "pyarrow is missing, which writes Parquet", "install it, or use torch.profiler")
    folder.mkdir(parents=True, exist_ok=True)
    return cleaned(capture.raw, folder / "trace.json.gz", capture.about)


def cleaned(raw: Path, target: Path, about: dict[str, Any]) -> Path:
    """Write a Kineto file with device rows, API calls and our ranges only, gzip-compressed, and what it is about."""
    file = kineto.decode(raw, raw.read_bytes())
    events = [e for e in file.events or () if e.ph == "X" and kineto.KINDS.get(e.cat.lower()) in KEPT]
    body = msgspec.structs.replace(file, events=events, killgate=about)
    target.write_bytes(gzip.compress(msgspec.json.Encoder(decimal_format="number").encode(body)))
    return target


def store_cleaned(path: Path) -> Path:
    """Turn a file that `cleaned` wrote into trace.parquet beside it, and remove it."""
    about = kineto.decode(path, files.unpacked(path)).killgate if path.exists() else None
    if about is None:
        raise BadInput(path, "is no profile of `lab profile` that waits for its Parquet", "give its trace.json.gz")
    target = stored.save(files.read(path), path.parent / "trace.parquet", about)
    path.unlink()
    return target
