"""What the commands take: `python tests/cli/bench_commands.py [REPEATS]`, a table; exit status 1 over a limit.

Each command runs in a fresh process, as a person runs it, and the best of the repeats counts. The limits are for two
idle cores. They are held against CPU seconds (user and system), which a busy machine changes little; where nothing else
runs, the wall time beside them is the same.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# command -> limit in seconds. p5 is judged on recorded figures alone, p5-kernel on measured rows too.
LIMITS: dict[str, float] = {
    "--help": 0.3,
    "phases": 0.8,
    "judge --all": 3.0,
    "audit": 4.0,
    "write p5": 1.5,
    "judge --all --evidence measured": 3.0,
    "write p5-kernel": 1.5,
}


def machine() -> str:
    """Cores, processor and Python of this machine."""
    info = Path("/proc/cpuinfo")
    models = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    name = models[0].partition(":")[2].strip() if models else platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores, {name}, Python {platform.python_version()}"


def seconds(command: str) -> tuple[float, float]:
    """(CPU, wall) of one run in a fresh process, its children's CPU with it."""
    before, since = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-m", "lab", *command.split()], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    after, wall = os.times(), time.perf_counter() - since
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return used, wall


def main(repeats: int = 5) -> int:
    """Print the table and return the exit status."""
    print(f"{machine()}; best of {repeats}\n")
    print("| command | limit s | CPU s | wall s |\n|---|---|---|---|")
    over = []
    for command, limit in LIMITS.items():
        runs = [seconds(command) for _ in range(repeats)]
        used, wall = (min(column) for column in zip(*runs, strict=True))
        late = used > limit
        over += [command] if late else []
        print(f"| `lab {command}` | {limit} | {used:.2f} | {wall:.2f} |{' over' if late else ''}", flush=True)
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
