"""What a second GPU gives a sweep: `python -m tests.bench.bench_cluster CARD... [--keep]`, in a clean checkout.

The cards are measured on a cluster of one worker, then on one of two, into a folder that is thrown away; --keep puts
the rows of the second sweep where rows lie. Printed are both wall times and, for each comparison, the interval of the
change on one GPU and the change on two. Exits 1 where two are less than 1.85 times as fast, or where the intervals of a
comparison do not overlap.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lab.base.errors import REPOSITORY
from lab.judge import evidence
from lab.row import store
from lab.row.records import Measurement

FASTER = 1.85


def sweep(workers: int, cards: list[str], home: Path) -> tuple[float, dict[tuple[str, str], evidence.Pair]]:
    """(seconds, the pairs by card and workload) of the cards on a cluster of so many workers."""
    lab = [sys.executable, "-m", "lab"]
    command = [*lab, "cluster", "--local", str(workers), "--port", "0"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as made:
        try:
            assert made.stdout is not None
            address = made.stdout.readline().strip()
            began = time.monotonic()
            environment = os.environ | {"KILLGATE_PROFILES": str(home)}
            subprocess.run([*lab, "measure", *cards, "--on", address], cwd=REPOSITORY, env=environment, check=True)
            spent = time.monotonic() - began
        finally:
            made.terminate()
    rows = [row for path in home.glob(f"*/*/*/{Measurement.FILE}") for row in store.read(path, Measurement)]
    found = {(c, w): pair for c in cards for w, pair in evidence.pairs(r for r in rows if r.phase == c).items()}
    return spent, found


def main(*cards: str) -> int:
    """Print the table and return the exit status."""
    cards, keep = tuple(c for c in cards if c != "--keep"), "--keep" in cards
    with tempfile.TemporaryDirectory() as folder:
        one_s, one = sweep(1, list(cards), Path(folder) / "1")
        two_s, two = sweep(2, list(cards), store.folder() if keep else Path(folder) / "2")
    apart = 0
    for key, pair in one.items():
        first, second = evidence.change_pct(*pair), evidence.change_pct(*two[key])
        if first is None or second is None:
            print(*key, "not timed")
            continue
        disjoint = first[1] > second[2] or second[1] > first[2]
        apart += disjoint
        ends = [f"{change[0]:+.2f} % ({change[1]:+.2f} to {change[2]:+.2f})" for change in (first, second)]
        print(*key, *ends, "APART" * disjoint)
    print(
        f"one worker {one_s:.0f} s, two {two_s:.0f} s: {one_s / two_s:.2f} times as fast; {apart} of {len(one)} apart"
    )
    return int(one_s / two_s < FASTER or apart > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
