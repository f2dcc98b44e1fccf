"""What a second GPU gives a sweep: `python -m tests.bench.bench_cluster CARD... [--keep] [--at-once] [--device=ID]`.

In a clean checkout. The cards are measured on a cluster of one worker, on GPU 0, then on one of two, into a folder
that is thrown away; --keep puts the rows of the second sweep where rows lie; --at-once has both at the same time, on
GPUs 0, and 1 and 2; --device and --workload are `lab measure`'s. Printed are both wall times and, for each comparison,
the interval of the change on one GPU and the change on two. Exits 1 where two are less than 1.85 times as fast, or
where the intervals of a comparison lie further apart than those of two GPUs of a model may (`evidence.GPUS`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab.base.errors import REPOSITORY
from lab.judge import evidence
from lab.row import store
from lab.row.records import Measurement

FASTER = 1.85


def sweep(
    workers: int, cards: list[str], options: list[str], home: Path, gpus: str
) -> tuple[float, dict[tuple[str, str], evidence.Pair]]:
    """(seconds, the pairs by card and workload) of cards on a cluster of so many workers, on these GPUs."""
    lab = [sys.executable, "-m", "lab"]
    command = [*lab, "cluster", "--local", str(workers), "--port", "0"]
    seen = os.environ | {"CUDA_VISIBLE_DEVICES": gpus}
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, env=seen) as made:
        try:
            assert made.stdout is not None
            address = made.stdout.readline().strip()
            began = time.monotonic()
            environment = os.environ | {"KILLGATE_PROFILES": str(home)}
            command = [*lab, "measure", *cards, *options, "--on", address]
            done = subprocess.run(command, cwd=REPOSITORY, env=environment)
            spent = time.monotonic() - began
            if done.returncode not in (0, 1):  # 1: an arm has no time, and its row says why
                raise SystemExit(f"{workers} workers: lab measure ended with {done.returncode}")
            print(f"{workers} workers: {spent:.0f} s", flush=True)  # also where the next sweep is cut off
        finally:
            made.terminate()
    rows = [row for path in home.glob(f"*/*/*/{Measurement.FILE}") for row in store.read(path, Measurement)]
    found = {(c, w): pair for c in cards for w, pair in evidence.pairs(r for r in rows if r.phase == c).items()}
    return spent, found


def main(*cards: str) -> int:
    """Print the table and return the exit status."""
    named, keep = [c for c in cards if c[:2] != "--"], "--keep" in cards
    options = [c for c in cards if c.startswith(("--device=", "--workload="))]
    with tempfile.TemporaryDirectory() as folder:
        homes = Path(folder) / "1", store.folder() if keep else Path(folder) / "2"
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(sweep, 1, named, options, homes[0], "0")
            if "--at-once" not in cards:
                first.result()
            second = pool.submit(sweep, 2, named, options, homes[1], "1,2" if "--at-once" in cards else "0,1")
        (one_s, one), (two_s, two) = first.result(), second.result()
    apart = 0
    for key, pair in one.items():
        alone, beside = evidence.change_pct(*pair), evidence.change_pct(*two[key])
        if alone is None or beside is None:
            print(*key, "not timed")
            continue
        lower, upper = sorted((alone, beside), key=lambda change: change[0])
        disjoint = (100 + upper[1]) / (100 + lower[2]) > evidence.GPUS
        apart += disjoint
        ends = [f"{change[0]:+.2f} % ({change[1]:+.2f} to {change[2]:+.2f})" for change in (alone, beside)]
        print(*key, *ends, "APART" * disjoint)
    print(
        f"one worker {one_s:.0f} s, two {two_s:.0f} s: {one_s / two_s:.2f} times as fast; {apart} of {len(one)} apart"
    )
    return int(one_s / two_s < FASTER or apart > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
