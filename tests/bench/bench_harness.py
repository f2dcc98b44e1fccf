"""What the harness adds to a measurement: `python -m tests.bench.bench_harness [WORKLOADS] [SECONDS]`.

A sweep over 20 workloads with the backend whose samples take the time that they say, real checks, real processes, rows
on the disk. What is left of the wall time after the time inside the timer (samples and warm-up) and the start of the
processes is the harness: checks, captures, messages, summaries, bootstrap-free rows, writes. The reference and the
candidates are trivial here, so a real sweep has less of a share, not more. Exits 1 above 15 %.

Then the imports: the seconds that `import lab, lab.cli` takes, best of five, and what it must not pull in.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from lab.base import devices
from lab.base.errors import REPOSITORY
from lab.bench import machine, measure
from tests.bench import fake_bench

LIMIT = 0.15
IMPORT_LIMIT_S = 0.4
HEAVY = ("torch", "triton", "pandas", "matplotlib", "numpy", "cupy", "rich", "IPython")
IMPORT = "import time; t = time.perf_counter(); import lab, lab.cli; t = time.perf_counter() - t; import sys, json"
IMPORT += "; print(json.dumps([t, sorted({m.split('.')[0] for m in sys.modules})]))"


def sweep(workloads: int, seconds: float) -> dict[str, float]:
    """Seconds of one sweep: wall, start (of the worker, with torch), timer (samples and warm-up), harness, by stage."""
    fake_bench.use(SimpleNamespace(setattr=setattr))
    stages: dict[str, float] = {}
    last: tuple[str, float] = ("start", time.perf_counter())

    def tell(line: str) -> None:
        nonlocal last
        (stage, since), now = last, time.perf_counter()
        stages[stage] = stages.get(stage, 0.0) + now - since
        last = line.split(": ")[1].split()[0], now

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        card = fake_bench.card(folder, tuple(f"w{i:02}" for i in range(workloads)))
        settings = measure.Settings(seconds=seconds, placements=1, processes=1, backend="tests.bench.fake_bench:slow")
        machine.provenance()  # imports torch into this process, which a real sweep does once as well
        begin = time.perf_counter()
        last = "start", begin
        busy_s = 0.0
        for rows in measure.measure(measure.plan(card), settings, folder / "run", devices.get("h200"), tell):
            tell("toy: write")
            assert [row.status for row in rows] == ["ok", "ok"], rows
            busy_s = float(rows[-1].clocks[-1].source)
        wall = time.perf_counter() - begin
    start = stages.pop("start")
    inside = {f"{stage}_s": spent for stage, spent in stages.items()}
    return {"wall_s": wall, "start_s": start, "timer_s": busy_s, "harness_s": wall - start - busy_s, **inside}


def imported() -> tuple[float, list[str]]:
    """Best of five: seconds for `import lab, lab.cli` in a fresh process, and the top-level modules it loaded."""
    found = []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", IMPORT], cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
        found.append(json.loads(done.stdout))
    return min(seconds for seconds, _ in found), found[0][1]


def main(workloads: int = 20, seconds: float = 1.0) -> int:
    """Print both figures and return the exit code."""
    found = sweep(workloads, seconds)
    share = found["harness_s"] / found["wall_s"]
    print(f"sweep of {workloads} workloads: " + ", ".join(f"{key[:-2]} {value:.2f} s" for key, value in found.items()))
    print(f"harness: {share:.1%} of the wall time, limit {LIMIT:.0%}")
    took_s, modules = imported()
    heavy = [name for name in HEAVY if name in modules]
    print(
        f"import lab, lab.cli: {took_s:.3f} s, limit {IMPORT_LIMIT_S} s; pulls in {', '.join(heavy) or 'nothing heavy'}"
    )
    return int(share > LIMIT or took_s > IMPORT_LIMIT_S or bool(heavy))


if __name__ == "__main__":
    sys.exit(main(*(float(a) if "." in a else int(a) for a in sys.argv[1:])))  # type: ignore[arg-type]
