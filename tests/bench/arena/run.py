"""Run the arena: `python -m tests.bench.arena.run [--device cuda] [--budget S] [--out FILE] [NAME ...]`.

Each adversary of data/arena.toml is compared with an honest control as `lab measure` compares: by a watched process
that lives on to the next comparison while nothing ends it, with every arm in a process of its own. What became of it is
a row: a JSON line with name, device, status and message of its arm, ratio (its time over the control's), gets ("no
number", "its honest time", "a false number"), seconds, GPU, driver, torch and commit. An honest candidate stands first:
the arena shows nothing where that one gets no number. Exits 1 when any gets a false number, or that one none.

--out   rows are added as they come, in the place of earlier ones of the same adversary and device.
--rest  only what --out has no row of, on this device; for a run that --budget cut short.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lab.bench import machine
from lab.bench.comparison import Done, Job
from lab.bench.worker import Death, Worker
from tests.bench.arena import family

HONEST = {"name": "plain_again", "does": "nothing wrong", "whole": True}
LEAST_RATIO = 0.8  # of the control's time, for the same work
TRIES = 3
MACHINE = ("gpu", "driver", "torch", "commit")
SECONDS = {"cpu": 0.0, "cuda": 0.2}
PLACEMENTS = 2
STAGES = ("check", "prepare", "time", "recheck")
LIMITS_S = {"cpu": dict.fromkeys(STAGES, 12.0), "cuda": dict.fromkeys(STAGES, 40.0)}
DYING_S = 5.0  # in which what was killed is gone, on a busy machine
SIDE_BY_SIDE = {"cpu": 2, "cuda": 1}
HANGS = ("stops_the_harness",)  # until a stage's limit, while nothing runs: beside the others


def verdict(entry: dict[str, Any], answer: Done | Death, name: str) -> dict[str, Any]:
    """status, message, ratio and `gets` of the adversary in one comparison."""
    row = {"status": "error", "message": "", "ratio": None, "gets": "no number"}
    if isinstance(answer, Death):
        return row | {"status": answer.status, "message": answer.message}
    arms = {a.name: a for a in answer.arms}
    own, other = arms[name], arms["plain"]
    if own.status != "ok":
        return row | {"status": own.status, "message": own.message}
    if other.status != "ok" or own.timing is None or other.timing is None:
        return row | {"message": f"the control: {other.message or 'was not timed'}"}
    blocks = zip(own.timing.blocks_us, other.timing.blocks_us, strict=True)
    ratio = statistics.median(mine / theirs for mine, theirs in blocks)
    forged = answer.comparison is not None and any(c and c.source == "forged" for c in answer.comparison.clocks)
    false = not entry.get("whole") or ratio < LEAST_RATIO or forged
    return row | {"status": "ok", "ratio": round(ratio, 3), "gets": "a false number" if false else "its honest time"}


def compared(entry: dict[str, Any], device: str, worker: Worker) -> dict[str, Any]:
    """One adversary against the honest control; `then`, the arm that must not profit from what it left behind."""

    def against_control(name: str, of: dict[str, Any]) -> dict[str, Any]:
        arms: Any = (("control", "plain"), ("candidate", name))
        backend = f"tests.bench.arena.family:{device}"
        return verdict(of, worker.run(Job("arena", device, arms, SECONDS[device], backend=backend,
                                          placements=PLACEMENTS)), name)  # fmt: skip

    began = time.monotonic()
    for _ in range(TRIES if entry.get("whole") else 1):  # noise makes an honest arm look fast once, not always
        found = against_control(entry["name"], entry)
        if found["gets"] == "its honest time" or (entry is not HONEST and found["gets"] == "no number"):
            break
    if then := entry.get("then"):
        left = against_control(then, {})
        if left["gets"] == "a false number":
            found = left | {"message": f"{then}, compared after it, has a number"}
    return {"name": entry["name"], "device": device, **found, "seconds": round(time.monotonic() - began, 1)}


def rows(names: Sequence[str], device: str, side_by_side: int = 0, budget_s: float = 1e9) -> Iterator[dict[str, Any]]:
    """A row for each adversary that this device can run, as they end; those that slow others run alone, at the end.

    names: of those to run; default all. budget_s: after so many seconds none is begun. Raises AssertionError where a
    process outlives the run.
    """
    entries = [HONEST, *(a for a in family.adversaries().values() if device in a.get("device", [device]))]
    entries = [e for e in entries if not names or e["name"] in names]
    alone = [e for e in entries if e.get("caught_by") == "still" or "then" in e]
    hang = [e for e in entries if e["name"] in HANGS]
    others = [e for e in entries if e not in alone and e not in hang]
    lanes = [others] * min(side_by_side or SIDE_BY_SIDE[device], len(others)) + [hang] * bool(hang)
    until = time.monotonic() + budget_s
    with tempfile.TemporaryDirectory(prefix="arena-") as place:
        before = {key: os.environ.get(key) for key in ("PYTHONPATH", "OMP_NUM_THREADS")}
        # The first place in which a Python that starts looks: for what an adversary may leave behind.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (place, before["PYTHONPATH"])))
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in tests/conftest.py
        try:
            yield from _lanes(lanes, device, until)
            yield from _lanes([alone], device, until)
            patience = time.monotonic() + DYING_S
            while (left := survivors(place)) and time.monotonic() < patience:
                time.sleep(0.1)
            assert not left, f"processes {left} of an adversary are still there"
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})


def survivors(place: str) -> list[int]:
    """The processes that have this place in their environment, as all have that came of a run there."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if place.encode() in Path(f"/proc/{pid}/environ").read_bytes() and int(pid) != os.getpid():
                found.append(int(pid))
    return found


def _lanes(entries: Sequence[list[dict[str, Any]]], device: str, until: float) -> Iterator[dict[str, Any]]:
    """A worker for each list side by side, which takes its next adversary when it is done with one.

    The same list for two is what they share.
    """
    done: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def lane(waiting: list[dict[str, Any]]) -> None:
        worker = Worker(LIMITS_S[device])
        try:
            while waiting and time.monotonic() < until:
                done.put(compared(waiting.pop(0), device, worker))
        finally:
            worker.stop()
            done.put(None)

    lanes = [threading.Thread(target=lane, args=(waiting,)) for waiting in entries]
    for thread in lanes:
        thread.start()
    left = len(lanes)
    while left:
        row = done.get()
        if row is None:
            left -= 1
        else:
            yield row


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each row, write the rows to --out, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.arena.run", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="adversaries; default all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="a file of JSON lines")
    parser.add_argument("--rest", action="store_true", help="only those that --out has no row of")
    parser.add_argument("--budget", type=float, default=1e9, metavar="S", help="begin none after so many seconds")
    parser.add_argument("--jobs", type=int, default=0, help="comparisons side by side; default 2, on a GPU 1")
    asked = parser.parse_args(arguments)
    names = asked.names
    if asked.rest:
        had = {name for name, device in _read(asked.out) if device == asked.device}
        names = [name for name in family.adversaries() if name not in had] or [""]
    made = {key: getattr(machine.provenance(), key) for key in MACHINE} if asked.out else {}
    found = []
    for row in rows(names, asked.device, asked.jobs, asked.budget):
        found.append(row)
        said = f"{row['gets']:16} {row['name']:34} {row['ratio'] or '':6} {row['seconds']:5} {row['status']}"
        print(f"{said}: {row['message']}", flush=True)
        if asked.out:
            _write(asked.out, row | made)
    false = [r["name"] for r in found if r["gets"] == "a false number"]
    honest = [r for r in found if r["name"] == HONEST["name"] and r["gets"] != "its honest time"]
    print(f"{len(found)} run, {len(false)} get a false number" + (": " + ", ".join(false) if false else ""))
    if honest:
        print("the honest candidate gets no number, so that this shows nothing", file=sys.stderr)
    return int(bool(false or honest))


def _read(out: Path | None) -> dict[tuple[str, str], dict[str, Any]]:
    lines = out.read_text().splitlines() if out is not None and out.exists() else []
    return {(row["name"], row["device"]): row for row in map(json.loads, lines)}


def _write(out: Path, row: dict[str, Any]) -> None:
    """The row beside those of the file that are of another adversary or device, in order of name."""
    every = _read(out) | {(row["name"], row["device"]): row}
    out.write_text("".join(json.dumps(every[key]) + "\n" for key in sorted(every)))


if __name__ == "__main__":
    sys.exit(main())
