"""`lab profile PHASE`: a phase's arms under a profiler (lab/bench/profile.py), stored as one small trace.

The profiler's own file holds the environment, the command line and the output of the process: it lives in a temporary
folder that is deleted.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

from lab.base.errors import BadInput
from lab.bench import profile
from lab.card import phases
from lab.check import families
from lab.row import store
from lab.trace import files, stored
from lab.trace.model import Trace


def run(arguments: argparse.Namespace) -> int:
    """`lab profile`: one stored trace of each phase's arms."""
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
        path, trace, left_out = profiled(card, arguments.workload, arguments.steps, arguments.device, tool, out)
        size = path.stat().st_size / 1000
        said = [f"{card.id}: {tool.name} ({tool.why}); {len(trace.kernels)} kernels, {size:.0f} KB in {path}"]
        said += [f"left out: {reason}" for reason in left_out]
        print("\n".join([*said, *(f"warning: {warning}" for warning in trace.warnings)]), flush=True)
    return 0


def profiled(
    card: phases.Card, only: str | None, steps: int, device: str, tool: profile.Tool, out: Path | None = None
) -> tuple[Path, Trace, list[str]]:
    """Profile a card's arms and store the trace; returns its file, the trace, and why arms were left out.

    out: folder for trace.parquet; default profiles/<device>/<phase>/<run>.
    Raises BadInput as `profile.capture` does, and for a trace without a single range of ours.
    """
    run_id, default = store.new_run(profile.place(device), card.id)
    with tempfile.TemporaryDirectory(prefix="killgate-") as temporary:
        capture = profile.capture(card, only, steps, device, tool, run_id, Path(temporary))
        trace = files.read(capture.raw)
        path = stored.save(trace, (out or default) / "trace.parquet", capture.about)
    seen = {label.split("/")[1] for label in trace.labels if label.startswith(f"{card.id}/")}
    if not seen:
        raise BadInput(path, "the profiler recorded no range of ours", "see NSYS_NVTX_PROFILER_REGISTER_ONLY in nsys")
    left_out = list(capture.left_out)
    if tool.name == "nsys":  # the check ran in the child, and its output is not kept
        missing = [arm for arm in ("control", "candidate") if arm not in seen]
        left_out += [f"{card.id}/{arm}: no range recorded, see `lab check`" for arm in missing]
    return path, trace, left_out
