"""Run the arena: `python -m tests.bench.arena.run [--device cuda] [--out FILE] [NAME ...]`.

Each adversary of data/arena.toml is compared with an honest control through the bench's own entry, in a process of its
own that a deadline ends, and what became of it is a row: a JSON line with name, device, status and message of its arm,
ratio (its time over the control's), gets ("no number", "its honest time", "a false number"), GPU, driver, torch and
commit. An honest candidate stands first: the arena shows nothing where that one gets no number. Exits 1 when any gets a
false number.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lab.bench.comparison import Done, Job
from lab.bench.worker import Death, Worker
from tests.bench.arena import family

HONEST = {"name": "plain_again", "does": "nothing wrong", "whole": True}
LEAST_RATIO = 0.8  # of the control's time, for the same work
TRIES = 3
MACHINE = ("gpu", "driver", "torch", "commit")
SECONDS = {"cpu": 0.05, "cuda": 0.5}
DEADLINE_S = {"cpu": 60.0, "cuda": 200.0}
LIMITS_S = {"cpu": dict.fromkeys(("start", "check", "prepare", "time", "recheck"), 15.0), "cuda": {}}


def verdict(entry: dict[str, Any], answer: Done | Death, name: str) -> dict[str, Any]:
    """status, message, ratio and `gets` of the adversary in one comparison."""
    if isinstance(answer, Death):
        return {"status": answer.status, "message": answer.message, "ratio": None, "gets": "no number"}
    arms = {a.name: a for a in answer.arms}
    own, other = arms[name], arms["plain"]
    row = {"status": own.status, "message": own.message, "ratio": None, "gets": "no number"}
    if own.status != "ok":
        return row
    if other.status != "ok" or own.timing is None or other.timing is None:
        return row | {"status": other.status, "message": f"the control: {other.message}"}
    blocks = zip(own.timing.blocks_us, other.timing.blocks_us, strict=True)
    ratio = statistics.median(mine / theirs for mine, theirs in blocks)
    forged = answer.comparison is not None and any(c and c.source == "forged" for c in answer.comparison.clocks)
    false = not entry.get("whole") or ratio < LEAST_RATIO or forged
    return row | {"ratio": round(ratio, 3), "gets": "a false number" if false else "its honest time"}


def compared(entry: dict[str, Any], device: str) -> dict[str, Any]:
    """One adversary against the honest control; `then`, the arm that must not profit from what it left behind."""
    limits = LIMITS_S[device]
    worker = Worker(limits)

    def against_control(name: str, of: dict[str, Any], anew: bool) -> dict[str, Any]:
        nonlocal worker
        if anew:
            worker.stop()
            worker = Worker(limits)
        arms: Any = (("control", "plain"), ("candidate", name))
        job = Job("arena", device, arms, SECONDS[device], backend=f"tests.bench.arena.family:{device}")
        return verdict(of, worker.run(job), name)

    try:
        for _ in range(TRIES if entry.get("whole") else 1):  # noise makes an honest arm look fast once, not always
            found = against_control(entry["name"], entry, anew=True)
            if found["gets"] != "a false number":
                break
        if then := entry.get("then"):
            left = against_control(then, {}, entry.get("anew", False))
            if left["gets"] == "a false number":
                found = left | {"message": f"{then}, compared after it, has a number"}
        return found
    finally:
        worker.stop()


def _process(entry: dict[str, Any], device: str, place: str, send: Any) -> None:
    os.setsid()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in tests/conftest.py
    # The first place in which a Python that starts looks: for what an adversary may leave behind.
    os.environ["PYTHONPATH"] = os.pathsep.join([place, *filter(None, [os.environ.get("PYTHONPATH")])])
    send.send(compared(entry, device))


def rows(names: Sequence[str], device: str, side_by_side: int) -> Iterator[dict[str, Any]]:
    """A row for each adversary that this device can run, as they end; those that slow others run alone, at the end."""
    entries = [HONEST, *(a for a in family.adversaries().values() if device in a.get("device", [device]))]
    entries = [e for e in entries if not names or e["name"] in names]
    alone = [e for e in entries if e.get("caught_by") == "still"]
    waiting = [e for e in entries if e not in alone]
    for group, most in ((waiting, side_by_side), (alone, 1)):
        yield from _side_by_side(group, device, most)


def _side_by_side(waiting: list[dict[str, Any]], device: str, most: int) -> Iterator[dict[str, Any]]:
    fork = multiprocessing.get_context("fork")
    running: list[tuple[dict[str, Any], Any, Any, float, Any]] = []
    waiting = list(waiting)
    while waiting or running:
        while waiting and len(running) < most:
            entry = waiting.pop(0)
            ours, theirs = fork.Pipe(duplex=False)
            place = tempfile.TemporaryDirectory(prefix="arena-")
            process = fork.Process(target=_process, args=(entry, device, place.name, theirs))
            process.start()
            theirs.close()
            running.append((entry, process, ours, time.monotonic(), place))
        time.sleep(0.02)
        for item in list(running):
            entry, process, ours, began, place = item
            late = time.monotonic() - began > DEADLINE_S[device]
            if process.is_alive() and not late and not ours.poll():
                continue
            found: dict[str, Any] = {"status": "error", "message": f"the harness died of exit code {process.exitcode}"}
            if late:
                found = {"status": "timeout", "message": f"no answer of the harness for {DEADLINE_S[device]:.0f} s"}
                os.killpg(process.pid, signal.SIGKILL)
            found |= {"ratio": None, "gets": "no number"}
            try:
                if ours.poll():
                    found = ours.recv()
            except EOFError:
                pass
            process.join()
            place.cleanup()
            running.remove(item)
            yield {"name": entry["name"], "device": device, **found, "seconds": round(time.monotonic() - began, 1)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each row, write the rows to --out, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.arena.run", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="adversaries; default all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="a file of JSON lines")
    parser.add_argument(
        "--jobs", type=int, default=0, help="comparisons side by side; default 2 on the CPU, 1 on a GPU"
    )
    asked = parser.parse_args(arguments)
    found = []
    for row in rows(asked.names, asked.device, asked.jobs or {"cpu": 2, "cuda": 1}[asked.device]):
        found.append(row)
        print(f"{row['gets']:16} {row['name']:32} {row['ratio'] or '':7} {row['status']}: {row['message']}", flush=True)
    false = [r["name"] for r in found if r["gets"] == "a false number"]
    if asked.out:
        _write(asked.out, found)
    print(f"{len(found)} run, {len(false)} get a false number" + (": " + ", ".join(false) if false else ""))
    return int(bool(false))


def _write(out: Path, found: Sequence[dict[str, Any]]) -> None:
    """Rows beside those of the file that are of another adversary or device, in order of name."""
    from lab.bench import machine

    made = machine.provenance()
    own = {(r["name"], r["device"]): r | {key: getattr(made, key) for key in MACHINE} for r in found}
    kept = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    every = {(r["name"], r["device"]): r for r in kept} | own
    out.write_text("".join(json.dumps(every[key]) + "\n" for key in sorted(every)))


if __name__ == "__main__":
    sys.exit(main())
