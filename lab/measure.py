"""`lab measure`: a phase's control and candidate on one GPU, checked, then timed together, then appended as rows.

A measured row exists for each arm and workload. The check comes first, at the very shape that is timed and on fresh
inputs; an arm that fails it gets a row with its status and no number, and the other arm is then not timed against it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab import accuracy, devices, families, phases, records, timing
from lab.errors import BadInput

SEED = 20261120


def require_gpu() -> devices.Device:
    """The device record of the GPU here; raises BadInput without one, or when data/devices.toml does not know it."""
    import torch

    if not torch.cuda.is_available():
        raise BadInput(
            "lab measure",
            "no CUDA GPU is usable here",
            "run it where there is one; `lab judge` replays the stored rows",
        )
    return devices.get(torch.cuda.get_device_name(0), "GPU")


def plan(card: phases.Card, only: str | None = None) -> tuple[families.Family, list[Any]]:
    """The family and the workloads that a card measures; raises BadInput for a card that can only be replayed."""
    if not card.family:
        raise BadInput(card.path, "has no family, so there is nothing to run", "replay it with `lab judge`")
    family = families.load(card.family)
    known = {w.id for w in family.cases.WORKLOADS}
    wanted = [w for w in card.workloads if w in known]
    if only is not None:
        wanted = [w for w in wanted if w == only]
    if not wanted:
        named = only or ", ".join(card.workloads) or "none"
        raise BadInput(
            card.path, f"none of its workloads ({named}) is a workload of {family.name}", "replay it instead"
        )
    return family, [family.workload(w) for w in wanted]


def measure(
    card: phases.Card, only: str | None = None, seconds: float = 2.0, l2: str = "cold", folder: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Measure a card and yield each row once it is on the disk.

    only:    one workload id, None for all of the card's.
    seconds: the most that sampling one comparison takes.
    folder:  where the rows go; default profiles/<device>/<phase>/<run>.
    """
    device = require_gpu()
    family, workloads = plan(card, only)
    run, default = records.new_run(device.id, card.id)
    folder = folder or default
    made = records.provenance()
    for workload in workloads:
        started = datetime.now(UTC).isoformat(timespec="seconds")
        arms = {"control": family.candidate(card.control), "candidate": family.candidate(card.candidate)}
        checks = {arm: accuracy.check(family, c, workload, SEED, "cuda") for arm, c in arms.items()}
        outcome: Any = None
        failed = ""
        if all(check.status == "ok" for check in checks.values()):
            try:
                outcome = _time(family, arms, workload, seconds, l2)
            except Exception as error:  # an arm that cannot be captured or runs out of memory is its own row's status
                failed = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        _release()
        for arm, candidate in arms.items():
            check = checks[arm]
            cost = family.cost(workload, candidate.precision)
            row: dict[str, Any] = {
                "device": device.id,
                "phase": card.id,
                "family": family.name,
                "arm": arm,
                "name": candidate.name,
                "precision": candidate.precision,
                "workload_id": workload.id,
                "workload": dict(workload.axes),
                "inputs": workload.inputs,
                "config": candidate.config(workload),
                "status": check.status,
                "message": check.message,
                "relative_error": _finite(check.relative_error),
                "flops": cost.flops,
                "bytes": cost.bytes,
                "pipe": cost.pipe,
                "seed": SEED,
                "run": run,
                "started": started,
                "card_hash": card.card_hash,
                "gate_hash": card.gate_hash,
                **made,
            }
            if check.status == "ok" and failed:
                row |= {"status": "oom" if "OutOfMemory" in failed else "error", "message": failed}
            elif check.status == "ok" and outcome is None:
                row |= {"status": "skipped", "message": "not timed: the other arm failed its check"}
            elif outcome is not None:
                row |= _performance(outcome, arm)
            records.append(folder, row)
            yield row


def _time(family: families.Family, arms: dict[str, Any], workload: Any, seconds: float, l2: str) -> timing.Comparison:
    import torch

    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    timed = {}
    for arm, candidate in arms.items():
        count = timing.sets_for(family.cost(workload, candidate.precision).bytes, l2_bytes, l2)
        sets = []
        for number in range(count):
            inputs = family.cases.inputs(workload, SEED + 1 + number, "cuda")
            sets.append((candidate.prepare(inputs), family.cases.outputs(workload, inputs)))
            del inputs
        timed[arm] = timing.Arm(arm, candidate.run, sets)
        timing.capture(timed[arm])
    return timing.compare(timed["control"], timed["candidate"], l2, seconds)


def _finite(number: float | None) -> float | None:
    """A row holds no NaN: where the output had one, the status and the message say so."""
    return number if number is not None and math.isfinite(number) else None


def _performance(outcome: timing.Comparison, arm: str) -> dict[str, Any]:
    own: timing.Timing = getattr(outcome, arm)
    return {
        "timer": outcome.timer,
        "l2": outcome.l2,
        "order": outcome.order,
        "aa_pct": outcome.aa_pct,
        "clocks_before": outcome.clocks_before,
        "clocks_after": outcome.clocks_after,
        "median_us": own.median_us,
        "iqr_us": own.iqr_us,
        "min_us": own.min_us,
        "n": own.n,
        "calls": own.calls,
        "sets": own.sets,
        "converged": own.converged,
        "sd_pct": own.sd_pct,
        "drift_pct": own.drift_pct,
        "samples_us": list(own.samples_us),
        "blocks_us": list(own.blocks_us),
    }


def _release() -> None:
    """Give the memory of one comparison back before the next is built."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()
