"""A list of comparisons on every GPU of this host, in a given time: `python -m tests.bench.sweep LIST --seconds 560`.

A line of LIST is a card and the workloads asked of it, none for all that are missing (`lab plan --all --missing` says
which); `profile` or `counters` before a card, one workload and options runs that command instead. Each GPU takes the
next line when it is free and runs one `lab measure`, which keeps its processes from one comparison to the next where a
cluster starts them anew, and has a line's workloads on one GPU, as a gate that compares them wants. What no time was
left for is written back to LIST, and so is a line that was refused or whose process died. --out FILE.tar gets the files
of profiles/ that are new, whole behind each line.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab.base import files
from lab.base.errors import REPOSITORY, BadInput
from lab.bench import machine
from lab.row import store

LAB = (sys.executable, "-m", "lab")
LEAST_S = 45.0  # no line is begun with less
SPARE_S = 25.0  # of a budget: what a comparison may take beyond its guess
GRACE_S = 15.0  # from an interrupt to a kill: what is measured is on the disk already
OTHERS = "profile", "counters"
OTHERS_S = 240.0  # one of them gets no more: a profiler that hangs would take the time of all that follow
AGAIN = "again"  # before a card: what has rows too


def command(line: str, left_s: float) -> list[str]:
    """The command of a line, to end within left_s."""
    first, *words = line.split()
    asked = (word if word.startswith("--") else f"--workload={word}" for word in words[1:])
    if first in OTHERS:
        return [*LAB, first, words[0], *asked]
    budget = f"--budget={left_s - SPARE_S:.0f}s"
    if first == AGAIN:
        return [*LAB, "measure", words[0], *asked, budget]
    return [*LAB, "measure", first, *(f"--workload={w}" for w in words), "--missing", budget]


def run(line: str, gpu: str, until: float) -> bool:
    """Run a line on a GPU; whether all of it was done: exit status 1 says that an arm has no time, and rows say why."""
    began = time.monotonic()
    seen = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as told_to:  # a pipe may be held open
        of = {"stdout": told_to, "stderr": told_to, "cwd": REPOSITORY, "env": seen, "start_new_session": True}
        process = subprocess.Popen(command(line, until - began), **of)  # type: ignore[call-overload]
        try:
            most = OTHERS_S if line.split()[0] in OTHERS else until - began
            whole = process.wait(min(most, until - began)) in (0, 1)
        except subprocess.TimeoutExpired:
            whole = False
            process.send_signal(signal.SIGINT)
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:  # of a candidate in a long call
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        told_to.seek(0)
        said = told_to.read()
    every = [line for line in said.splitlines() if line.strip()]
    told = [line for line in every[:-3] if ": took " in line] + every[-3:]
    print(f"{time.monotonic() - began:.0f} s, exit {process.returncode}: {line}", *told, sep="\n    ", flush=True)
    return whole and "left out, the budget" not in said


def sweep(
    lines: list[str], gpus: list[str], seconds: float, after: Callable[[list[str]], None] = lambda left: None
) -> list[str]:
    """Work the lines on the GPUs; returns those that are left, in their order. after: is told them behind each line."""
    waiting, left, lock = deque(enumerate(lines)), set(range(len(lines))), threading.Lock()
    until = time.monotonic() + seconds

    def still() -> list[str]:
        return [lines[number] for number in sorted(left)]

    def work(gpu: str) -> None:
        while until - time.monotonic() > LEAST_S:
            with lock:
                if not waiting:
                    return
                number, line = waiting.popleft()
            done = run(line, gpu, until)
            with lock:
                left.difference_update([number] if done else [])
                after(still())

    with ThreadPoolExecutor(len(gpus)) as pool:
        list(pool.map(work, gpus))
    return still()


def main() -> int:
    """Work the list; behind each line write back what is left of it, and pack what is new."""
    ask = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    ask.add_argument("list", type=Path)
    ask.add_argument("--seconds", type=float, required=True)
    ask.add_argument("--out", type=Path)
    given = ask.parse_args()
    there = {path for path in store.folder().rglob("*") if path.is_file()}
    lines = [line for line in files.read_bytes(given.list).decode().splitlines() if line.strip()]

    def new() -> list[Path]:
        every = (path for path in store.folder().rglob("*") if path.is_file() and not path.name.startswith("."))
        return sorted(path for path in every if path not in there)

    def save(left: list[str]) -> None:
        """Whole or not at all: a machine that is lent may go at any time."""
        files.write(given.list, "".join(f"{line}\n" for line in left))
        if given.out:
            part = given.out.with_suffix(".part")
            with tarfile.open(part, "w") as tar:
                for path in new():
                    tar.add(path, path.relative_to(store.folder()))
            part.replace(given.out)

    left = sweep(lines, machine.gpus() or [""], given.seconds, save)
    save(left)
    print(f"{len(lines) - len(left)} of {len(lines)} lines done; {len(new())} new files")
    return int(bool(left))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BadInput as refused:
        print(f"sweep: {refused}", file=sys.stderr)
        sys.exit(2)
