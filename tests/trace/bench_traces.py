"""How long `lab trace` takes and how much memory it needs, by rows: `make bench`, or with ARGS="200000 --against".

Each size is a synthetic nsys export (tests/trace/nsys_synthetic.py) in a temporary folder: the given number of kernel
rows, a tenth as many copies, 40 % as many API calls. The command runs as a user runs it, in a process of its own,
`--repeat` times; the table shows the fastest wall clock, that run's processor time, and the largest peak of resident
memory over the runs. On a machine that others use, read the processor time. Cost per row is what must not grow with the
rows.

--against adds the plain way on the same file: pandas.read_sql of the same columns and the same union, in a process of
its own, so that its memory is its own as well.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.trace.nsys_synthetic import decode  # noqa: E402  a script finds the repository first

SIZES = (500_000, 1_000_000, 2_000_000, 5_000_000)
PANDAS = """
import sqlite3, sys
import pandas
base = sqlite3.connect(sys.argv[1])
columns = 'start, "end", deviceId, contextId, streamId, correlationId, globalPid, demangledName, graphNodeId, graphId'
kernels = pandas.read_sql(f"SELECT {columns} FROM CUPTI_ACTIVITY_KIND_KERNEL", base)
copies = pandas.read_sql('SELECT start, "end", bytes, copyKind FROM CUPTI_ACTIVITY_KIND_MEMCPY', base)
calls = pandas.read_sql("SELECT correlationId, globalTid FROM CUPTI_ACTIVITY_KIND_RUNTIME", base)
by_name = (kernels.end - kernels.start).groupby(kernels.demangledName).agg(["count", "sum"])
rows = pandas.concat([kernels[["start", "end"]], copies[["start", "end"]]]).sort_values("start")
reach = rows.end.cummax().shift(fill_value=0)
print((rows.end - rows[["start"]].assign(reach=reach).max(axis=1)).clip(lower=0).sum(), kernels.correlationId.isin(
    calls.correlationId).sum(), len(by_name))
"""


def measured(command: list[str]) -> tuple[float, float, float]:
    """(wall s, processor s, peak MB) of one run; raises when it fails."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    if status:
        raise SystemExit(f"{' '.join(command[:4])} ... exited with {os.waitstatus_to_exitcode(status)}")
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def best(command: list[str], repeat: int) -> tuple[float, float, float]:
    """The fastest of several runs, with the largest peak of all."""
    runs = [measured(command) for _ in range(repeat)]
    wall, cpu, _ = min(runs)
    return wall, cpu, max(peak for _, _, peak in runs)


def main() -> None:
    """Build, time and print each size; the last line is the same as JSON."""
    parser = argparse.ArgumentParser(description="time `lab trace` by rows")
    parser.add_argument("sizes", nargs="*", type=int, help="kernel rows; default 0.5, 1, 2 and 5 million")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--against", action="store_true", help="the same figures by pandas, for comparison")
    parser.add_argument("--folder", help="where the files are built; default the system's temporary folder")
    arguments = parser.parse_args()
    found = []
    print(f"{'kernel rows':>12}{'all rows':>12}{'wall s':>9}{'cpu s':>9}{'us/row':>9}{'peak MB':>9}  what", flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for kernels in arguments.sizes or SIZES:
            path = decode(Path(folder) / f"{kernels}.sqlite", kernels)
            commands = {"lab trace": [sys.executable, "-m", "lab", "trace", str(path), "--json"]}
            if arguments.against:
                commands["pandas.read_sql"] = [sys.executable, "-c", PANDAS, str(path)]
            for what, command in commands.items():
                wall, cpu, peak = best(command, arguments.repeat)
                rows = kernels + kernels // 10 + kernels * 2 // 5
                line = f"{kernels:12,}{rows:12,}{wall:9.2f}{cpu:9.2f}{cpu / rows * 1e6:9.2f}{peak:9.0f}  {what}"
                print(line, flush=True)
                found.append(
                    {"what": what, "kernels": kernels, "rows": rows, "wall_s": wall, "cpu_s": cpu, "peak_mb": peak}
                )
            path.unlink()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
