"""lab.cli.cell on a simulated GPU: `python -m tests.bench.fake_cell PARENT ARGUMENT...`, for test_cluster.py.

Where KILLGATE_TOLD names a folder, `measure` answers with the rows that the toy's bench left there, and imports next to
nothing: what is tested with it is who is lost and what is on the disk, in hundreds of processes. Without, it is the
whole command on the toy family. A worker that KILLGATE_SLOW names takes half a second for each cell.
"""

from __future__ import annotations

import json
import os
import sys
import time

CARDS = tuple(f"toy{number}" for number in range(10))
WORKLOADS = tuple(f"w{number:02}" for number in range(30))


def facts(commit: str = "0", **others: object) -> dict[str, object]:
    """What a worker says of itself."""
    import importlib.metadata
    import platform

    made = {"schema": 1, "commit": commit, "dirty": False, "python": platform.python_version(), "gpu": "NVIDIA H200"}
    released = importlib.metadata.version("distributed")
    return {"made": made, "distributed": released, "gpu": os.environ.get("CUDA_VISIBLE_DEVICES", "GPU-0")} | others


def retold(arguments: list[str]) -> list[object]:
    """Write the rows of the comparison that is asked for to --out."""
    card, workload = arguments[1], arguments[arguments.index("--workload") + 1]
    out = arguments[arguments.index("--out") + 1]
    time.sleep(0.5 if os.environ["CUDA_VISIBLE_DEVICES"] == os.environ.get("KILLGATE_SLOW") else 0.05)
    os.makedirs(out)
    with open(f"{os.environ['KILLGATE_TOLD']}/{card} {workload}") as file:
        rows = json.load(file)
    with open(f"{out}/rows.jsonl", "x") as file:
        file.writelines(json.dumps(row | {"run": os.path.basename(out)}) + "\n" for row in rows)
    return []


def real(parent: str, arguments: list[str]) -> int:
    """The command itself, on the toy family and a machine that says it is an H200."""
    import functools
    from pathlib import Path
    from types import SimpleNamespace

    from lab.base import devices
    from lab.bench import machine, measure
    from lab.card import phases
    from lab.cli import cell
    from lab.row.records import Provenance
    from tests.bench import fake_bench

    fake_bench.use(SimpleNamespace(setattr=setattr))
    machine.provenance = lambda: Provenance(commit="0")
    measure.require_gpu = lambda command="": devices.get("h200")
    engine = functools.partial(measure.Settings, backend="tests.bench.fake_bench:quick")
    measure.Settings = engine  # type: ignore[assignment,misc]
    phases.card = lambda word: phases.load(Path(os.environ["KILLGATE_TOY"]) / f"{word}.toml")
    return cell.run(parent, *arguments)


def main(parent: str, *arguments: str) -> int:
    if arguments[0] == "host":
        print(json.dumps(facts()))
    elif "KILLGATE_TOLD" in os.environ:
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)  # as lab.check.child.end_with: killed when its parent dies
        if os.getppid() != int(parent):
            return 1
        print(json.dumps(retold(list(arguments))))
    else:
        return real(parent, list(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
