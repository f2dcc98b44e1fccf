"""How long `lab trace` takes and how much memory it needs: `make bench`, or with ARGS="nsys:200000 --against".

nsys:N is a synthetic export (tests/trace/nsys_synthetic.py) of N kernel rows, a tenth as many copies, 40 % as many API
calls; kineto:MB is a public capture (profiles/vllm_eager_b200.json.gz: kernels, calls, copies and no Python stacks, the
dense case) repeated to that size. The command runs as a user runs it, in a process of its own, `--repeat` times; shown
are the fastest wall clock, that run's processor time, and the largest peak of resident memory over the runs. On a
machine that others use, read the processor time. Exposed time, idle causes and every table are part of the run.

--against adds the plain way on the same file, in a process of its own: pandas.read_sql of the same columns and the same
union, or json and pandas; and Holistic Trace Analysis, where --hta names a Python that has it. --write appends what was
measured to bench.jsonl beside this file, with the machine, its load and the git tree of lab/trace that ran.
"""

import argparse
import gzip
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.trace.nsys_synthetic import decode  # noqa: E402  a script finds the repository first

CASES = ("nsys:500000", "nsys:5000000", "kineto:30", "kineto:300")
ROWS = Path(__file__).parent / "bench.jsonl"
UNION = """
reach = rows.end.cummax().shift(fill_value=0)
print((rows.end - rows[["start"]].assign(reach=reach).max(axis=1)).clip(lower=0).sum(), len(by_name))
"""
PANDAS = {
    "nsys": """
import sqlite3, sys
import pandas
base = sqlite3.connect(sys.argv[1])
columns = 'start, "end", deviceId, contextId, streamId, correlationId, globalPid, demangledName, graphNodeId, graphId'
kernels = pandas.read_sql(f"SELECT {columns} FROM CUPTI_ACTIVITY_KIND_KERNEL", base)
copies = pandas.read_sql('SELECT start, "end", bytes, copyKind FROM CUPTI_ACTIVITY_KIND_MEMCPY', base)
calls = pandas.read_sql("SELECT correlationId, globalTid FROM CUPTI_ACTIVITY_KIND_RUNTIME", base)
by_name = (kernels.end - kernels.start).groupby(kernels.demangledName).agg(["count", "sum"])
print(kernels.correlationId.isin(calls.correlationId).sum())
rows = pandas.concat([kernels[["start", "end"]], copies[["start", "end"]]]).sort_values("start")
"""
    + UNION,
    "kineto": """
import json, sys
import pandas
with open(sys.argv[1]) as file:
    events = pandas.DataFrame([e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"])
device = events[events.cat.isin(["kernel", "gpu_memcpy", "gpu_memset"])]
by_name = device[device.cat == "kernel"].groupby("name").dur.agg(["count", "sum"])
rows = pandas.DataFrame({"start": device.ts, "end": device.ts + device.dur}).sort_values("start")
"""
    + UNION,
}
HTA = """
import os, sys
from hta.trace_analysis import TraceAnalysis
path = sys.argv[1]
one = TraceAnalysis(trace_files={0: path}, trace_dir=os.path.dirname(path))
one.get_temporal_breakdown(visualize=False)
one.get_comm_comp_overlap(visualize=False)
one.get_gpu_kernel_breakdown(visualize=False)
"""


def kineto(path: Path, megabytes: int) -> Path:
    """A Kineto file of about that size: one capture, again and again, later and with other correlations."""
    with gzip.open(Path(__file__).parent / "profiles" / "vllm_eager_b200.json.gz") as packed:
        whole = json.load(packed)
    events = [e for e in whole.pop("traceEvents") if e.get("ph") == "X"]
    length = max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events) + 100
    with path.open("w") as file:
        file.write(json.dumps(whole)[:-1] + ', "distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": [')
        turn = 0
        while file.tell() < megabytes * 1_000_000:
            later = [e | {"ts": round(e["ts"] + turn * length, 3)} for e in events]
            for e in later:
                if "correlation" in e.get("args", {}):
                    e["args"] = e["args"] | {"correlation": e["args"]["correlation"] + turn * 1_000_000}
            file.write("," * bool(turn) + "\n" + ",\n".join(map(json.dumps, later)))
            turn += 1
        file.write("\n]}\n")
    return path


def measured(command: list[str]) -> tuple[float, float, float]:
    """(wall s, processor s, peak MB) of one run; raises when it fails."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    if status:
        raise SystemExit(f"{' '.join(command[:4])} ... exited with {os.waitstatus_to_exitcode(status)}")
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def provenance() -> dict[str, Any]:
    """Where and of what the rows are."""
    said = [
        subprocess.run(["git", *of], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        for of in (["rev-parse", "HEAD:lab/trace"], ["status", "--porcelain", "--", "lab/trace"])
    ]
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "tree": said[0],
        "dirty": bool(said[1]),
        "cpu": cpu[0].partition(": ")[2] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
    } | {name: version(name) for name in ("numpy", "msgspec", "pandas")}


def main() -> None:
    """Build, time and print each case; the last line is the same as JSON."""
    parser = argparse.ArgumentParser(description="time `lab trace`")
    parser.add_argument("cases", nargs="*", help=f"kind:size; default {' '.join(CASES)}")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--against", action="store_true", help="the same figures by pandas, for comparison")
    parser.add_argument("--hta", metavar="PYTHON", help="with Kineto files: an interpreter that has HTA")
    parser.add_argument("--write", action="store_true", help=f"append to {ROWS.name}")
    parser.add_argument("--folder", help="where the files are built; default the system's temporary folder")
    arguments = parser.parse_args()
    found = []
    print(f"{'case':>16}{'MB':>7}{'wall s':>9}{'cpu s':>9}{'peak MB':>9}  what", flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for case in arguments.cases or CASES:
            kind, _, size = case.partition(":")
            path = Path(folder) / (size + (".sqlite" if kind == "nsys" else ".json"))
            (decode if kind == "nsys" else kineto)(path, int(size))
            commands = {"lab trace": [sys.executable, "-m", "lab", "trace", str(path), "--json"]}
            if arguments.against:
                commands["pandas"] = [sys.executable, "-c", PANDAS[kind], str(path)]
            if arguments.hta and kind == "kineto":
                commands["HTA"] = [arguments.hta, "-c", HTA, str(path)]
            for what, command in commands.items():
                runs = [measured(command) for _ in range(arguments.repeat)]
                (wall, cpu, _), peak, mb = min(runs), max(peak for _, _, peak in runs), path.stat().st_size / 1e6
                print(f"{case:>16}{mb:7.0f}{wall:9.2f}{cpu:9.2f}{peak:9.0f}  {what}", flush=True)
                one = {"what": what, "case": case, "file_mb": round(mb), "runs": arguments.repeat, "wall_s": wall}
                found.append(one | {"cpu_s": cpu, "peak_mb": round(peak)} | provenance())
            path.unlink()
    print(json.dumps(found))
    if arguments.write:
        with ROWS.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)


if __name__ == "__main__":
    main()
