"""`lab counters CARD`: the GPU's hardware counters for each arm of a card, by Nsight Compute (ncu).

A time says how far a kernel is from its floor; counters say why. ncu runs this module as its child; the child checks
each arm against its reference, warms it up and lets ncu profile one call. Before each profiled call it launches one
empty kernel (torch's `spin_kernel`): ncu's table is split at those rows, so that a candidate of several launches keeps
its kernels together and no name has to be guessed.

ncu replays a launch once for each group of counters that fits the hardware, with memory restored in between. It is told
to flush the caches before every pass, because a pass that finds the weights of the previous pass in L2 counts no DRAM
traffic; so L2 is cold for each kernel, also for the second kernel of one call, which in a real run finds the output of
the first in L2. Clocks are not locked. Durations are perturbed: a row says `profiled` and none is ever judged. Rows go
to profiles/<device>/counters/<run>/counters.jsonl, so that no reader of measured rows takes one for a time.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from lab.base.console import table
from lab.base.errors import REPOSITORY, BadInput, nearest, reason, refuse_unknown
from lab.bench import machine, measure, ncu
from lab.card import phases
from lab.check import accuracy, families
from lab.row import store
from lab.row.records import Counter, Role

SEED = 20261121
WARM_UPS = 3
LIMIT_S = 900
SEPARATOR = "spin_kernel"  # what torch.cuda._sleep launches
L2 = "cold: ncu flushes the caches before every pass of every kernel"
SHARED = "l1tex__data_pipe_lsu_wavefronts_mem_shared"
PCT = ".pct_of_peak_sustained_"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


@dataclass(frozen=True)
class Metric:
    """A figure of a row: ncu's name for it, the unit it is stored in, and what it says."""

    ncu: str
    unit: str
    says: str


METRICS: dict[str, Metric] = {
    "duration_us": Metric("gpu__time_duration.sum", "us", "time of the kernel under the profiler: perturbed"),
    "sm_clock_hz": Metric("gpc__cycles_elapsed.avg.per_second", "Hz", "clock of the multiprocessors meanwhile"),
    "dram_read_bytes": Metric("dram__bytes_read.sum", "byte", "read from DRAM"),
    "dram_write_bytes": Metric("dram__bytes_write.sum", "byte", "written to DRAM"),
    "dram_pct": Metric(f"dram__throughput.avg{PCT}elapsed", "%", "of DRAM's peak rate"),
    "l2_hit_pct": Metric("lts__t_sector_hit_rate.pct", "%", "L2 lookups that hit"),
    "l2_pct": Metric(f"lts__throughput.avg{PCT}elapsed", "%", "of L2's peak, its busiest part"),
    "l2_to_sm_bytes": Metric("l1tex__m_xbar2l1tex_read_bytes.sum", "byte", "from L2 into the multiprocessors"),
    "shared_pct": Metric(f"{SHARED}.sum{PCT}elapsed", "%", "of shared memory's wavefronts, by load/store"),
    "tensor_pct": Metric(f"sm__pipe_tensor_cycles_active.avg{PCT}elapsed", "%", "cycles with a busy tensor pipe"),
    "issue_pct": Metric(f"smsp__issue_active.avg{PCT}active", "%", "scheduler cycles that issue, of the active ones"),
    "sm_active_pct": Metric(f"sm__cycles_active.avg{PCT}elapsed", "%", "cycles with a warp on the multiprocessor"),
    "occupancy_pct": Metric(f"sm__warps_active.avg{PCT}active", "%", "warps resident, of 64"),
    "registers": Metric("launch__registers_per_thread", "", "registers a thread"),
    "shared_bytes": Metric("launch__shared_mem_per_block", "byte", "shared memory a block, the driver's part with it"),
    "grid": Metric("launch__grid_size", "", "blocks"),
    "block": Metric("launch__block_size", "", "threads a block"),
    "waves": Metric("launch__waves_per_multiprocessor", "", "waves of blocks"),
}
# Warps stalled for each reason, per issued instruction; "selected" is the one that issues and is no stall.
STALLS = (
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard"),
    *("math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "short_scoreboard"),
    *("sleeping", "tex_throttle", "wait"),
)
STALLS_KEPT, STALL_LEAST = 6, 0.02
# ncu's base units (it is asked for them), as its releases write them -> the factor to the unit that a row stores.
UNITS: dict[str, dict[str, float]] = {
    "us": {"ns": 1e-3, "nsecond": 1e-3},
    "Hz": {"hz": 1.0, "cycle/second": 1.0},
    "byte": {"byte": 1.0, "byte/block": 1.0},
    "%": {"%": 1.0},
    "": {"": 1.0, "register/thread": 1.0, "thread": 1.0, "block": 1.0, "warp": 1.0, "inst": 1.0},
}
# The share of its peak from which a unit counts as the bound; below it for every unit, the kernel waits on latency.
BOUND_PCT = 60.0
COUNTED_PCT = 1.0  # of a call's time under the profiler, the least that a line has where launches are many
ALIKE = 1.2  # launches of one kernel are of one shape up to this ratio of their bytes
PARTS = {"dram_pct": "DRAM", "l2_pct": "L2", "tensor_pct": "tensor pipe", "issue_pct": "issue",
         "shared_pct": "shared memory"}  # fmt: skip


class Launch(msgspec.Struct):
    """One profiled launch: its METRICS by key, and the largest stalls. A separator has its name alone."""

    kernel: str
    figures: dict[str, float] = {}
    stalls: dict[str, float] = {}


def bound(row: Counter) -> str:
    """What binds a kernel by its counters, in a few words with the figure.

    The unit nearest to its peak when that is at least 60 % of it (the line Nsight Compute's own guide draws); else the
    first stall reason, because then every unit waits; and a note when multiprocessors stand idle for over a tenth.
    """
    shares = {name: getattr(row, key) for key, name in PARTS.items()}
    part = max(shares, key=lambda name: shares[name])
    words = f"{part} at {shares[part]:.0f} % of its peak"
    if shares[part] < BOUND_PCT:
        stall, ratio = max(row.stalls.items(), key=lambda item: item[1], default=("none", 0.0))
        words = f"latency: {stall.replace('_', ' ')} ({ratio:.1f} warps an issue), {words}"
    idle = 100 - (row.sm_active_pct or 0.0)
    return words + (f", multiprocessors idle {idle:.0f} %" if idle > 10 else "")


def parse(path: Path) -> list[Launch]:
    """The launches in ncu's CSV (raw page), in order, separators too; BadInput for a missing metric or odd unit."""
    found = []
    for launch in ncu.launches(path, path.read_text(encoding="utf-8", errors="replace")):
        kernel, metrics = launch.kernel, launch.metrics
        entry = Launch(kernel)
        if SEPARATOR not in kernel:
            entry.figures = {key: _figure(path, kernel, metric, metrics) for key, metric in METRICS.items()}
            ratios = {r: metrics.get(STALL.format(r), (0.0, ""))[0] for r in STALLS}
            known = {r: float(v) for r, v in ratios.items() if isinstance(v, float) and v >= STALL_LEAST}
            most = sorted(known, key=lambda r: -known[r])[:STALLS_KEPT]
            entry.stalls = {r: round(known[r], 3) for r in most}
        found.append(entry)
    return found


def _figure(path: Path, kernel: str, metric: Metric, metrics: Mapping[str, tuple[Any, str]]) -> float:
    value, unit = metrics.get(metric.ncu, (None, ""))
    if not isinstance(value, float):
        raise BadInput(path, f"{kernel} has no {metric.ncu}", "this ncu or GPU lacks it; see ncu --query-metrics")
    if unit not in UNITS[metric.unit]:
        raise BadInput(path, f'{metric.ncu} is in "{unit}"', f"known: {', '.join(UNITS[metric.unit])}")
    return value * UNITS[metric.unit][unit]


def cut(launches: Iterable[Launch]) -> list[list[Launch]]:
    """The launches between the separators; those before the first one are dropped."""
    groups: list[list[Launch]] = []
    for launch in launches:
        if SEPARATOR in launch.kernel:
            groups.append([])
        elif groups:
            groups[-1].append(launch)
    return groups


def plan(cards: Sequence[phases.Card], only: str | None, arm: str | None, peers: bool) -> list[Counter]:
    """One row an arm and workload, of which nothing is counted yet.

    only: this workload of the family; the card need not have it, since counters are not judged. arm: this candidate,
    or every arm of this role. Raises BadInput when none is left.
    """
    for card in cards:
        if only and only not in card.workloads and not card.own:
            family = families.bare(card.family)
            refuse_unknown("--workload", f"workload of {family.name}", only, {w.id for w in family.cases.WORKLOADS})
    every = [
        uncounted(card.family, name, item.workload, card.id, role)
        for card in (structs.replace(card, workloads=(only,)) if only else card for card in cards)
        for item in measure.plan(card, (), peers)
        for role, name in item.arms
    ]
    rows = [row for row in every if arm in (None, row.arm, row.name)]
    if not rows:
        words = {word for row in every for word in (row.arm, row.name)}
        raise BadInput("--arm", f'"{arm}" is no arm of these cards', nearest(arm or "", words))
    return rows


def uncounted(family: str, name: str, workload: Any, phase: str = "", role: Role = "candidate") -> Counter:
    """The row of a candidate that the profiled process did not get to."""
    return Counter(
        **measure.work_of(families.bare(family), measure.described(family, workload.id), name, workload),
        device="",
        phase=phase,
        family=family,
        arm=role,
        name=name,
        workload_id=workload.id,
        status="error",
        message="the profiled process ended before this arm",
        run="",
        started="",
        profiled=True,
        l2=L2,
    )


def command(program: str, jobs: Path, log: Path) -> list[str]:
    """The command that runs `inside` under ncu, its table going to `log`."""
    metrics = [m.ncu for m in METRICS.values()] + [STALL.format(stall) for stall in STALLS]
    options = "--profile-from-start off --clock-control none --cache-control all --csv --page raw --print-units base"
    files = ["--log-file", str(log), "--metrics", ",".join(metrics)]
    return [program, *options.split(), *files, sys.executable, "-m", "lab.bench.counters", str(jobs)]


def inside(path: Path) -> None:
    """What ncu's child does: check, warm up and run the candidate of each row once, and write back how each went.

    The file is written after every row, so that a child that dies leaves what it had done.
    """
    import torch

    rows = msgspec.json.decode(path.read_bytes(), type=list[Counter])
    for number, row in enumerate(rows):
        try:
            rows[number] = _watched(row)
        except Exception as error:  # what an arm throws is its row's status
            rows[number] = structs.replace(row, status="error", message=reason(error))
        path.write_bytes(msgspec.json.encode(rows))
        gc.collect()
        torch.cuda.empty_cache()


def _watched(row: Counter) -> Counter:
    import torch

    family = families.load(row.family)
    candidate, workload = family.candidate(row.name), family.workload(row.workload_id)
    checked = accuracy.check(family, candidate, workload, SEED, "cuda")
    if checked.status == "ok":
        inputs = family.cases.inputs(workload, SEED + 1, "cuda")
        args, out = accuracy.prepared(family, candidate, inputs), accuracy.outputs(family, candidate, workload, inputs)
        for _ in range(WARM_UPS):
            candidate.run(args, out)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # ncu saves what is allocated ahead of each launch, also what torch alone holds
        torch.cuda.cudart().cudaProfilerStart()
        torch.cuda._sleep(1)
        candidate.run(args, out)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
    return structs.replace(row, status=checked.status, message=checked.message, relative_error=checked.relative_error)


def collect(rows: Sequence[Counter], find: Any = shutil.which) -> list[Counter]:
    """Run the candidates under ncu: a row for each launch of a call, or the one row that says why there is none.

    Raises BadInput without ncu, without the right to read counters, or when ncu printed no table.
    """
    program = find("ncu")
    if program is None:
        raise BadInput("lab counters", "ncu is not on the PATH", "it comes with Nsight Compute and the CUDA toolkit")
    with tempfile.TemporaryDirectory(prefix="killgate-") as folder:
        file, log = Path(folder) / "rows.json", Path(folder) / "ncu.csv"
        file.write_bytes(msgspec.json.encode(rows))
        asked = command(program, file, log)
        try:
            run = subprocess.run(asked, capture_output=True, text=True, cwd=REPOSITORY, timeout=LIMIT_S, check=False)
            said = run.stdout + run.stderr
        except subprocess.TimeoutExpired:
            said = f"no end after {LIMIT_S} s"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        if "ERR_NVGPUCTRPERM" in text + said:
            remedy = "run as root, or allow it by the driver's option NVreg_RestrictProfilingToAdminUsers=0"
            raise BadInput("lab counters", "the driver lets only root read counters (ERR_NVGPUCTRPERM)", remedy)
        done = msgspec.json.decode(file.read_bytes(), type=list[Counter])
        if '"ID"' in text:
            groups = iter(cut(parse(log)))
        elif any(row.status in ("ok", "error") for row in done):
            worst = [line for line in (text + said).splitlines() if "==ERROR==" in line] or said.strip().splitlines()
            raise BadInput("ncu", f"printed no table ({(worst or ['no message'])[-1][:200]})", "see `ncu --version`")
    found = []
    for row in done:
        launches = next(groups, []) if row.status == "ok" else []
        if row.status == "ok" and not launches:
            row = structs.replace(row, status="error", message="ncu saw no kernel of this arm")
        call = structs.replace(row, launches=len(launches))
        found += [
            structs.replace(call, launch=number, kernel=one.kernel, stalls=one.stalls, **one.figures)
            for number, one in enumerate(launches)
        ] or [call]
    return found


def measured(cards: Sequence[phases.Card], only: str | None, arm: str | None, peers: bool) -> Iterator[Counter]:
    """Take the counters of the cards' arms on this GPU, append the rows and yield them, one a kernel launch.

    Each arm under an ncu of its own, which writes its table when it ends: what is interrupted loses one arm.
    """
    device = measure.require_gpu("lab counters")
    run, folder = store.new_run(device.id, "counters")
    made = structs.asdict(machine.provenance()) | {"device": device.id, "run": run}
    for card in cards:
        here = made | {"started": machine.now()}
        for row in plan([card], only, arm, peers):
            rows = collect([structs.replace(row, **here)])
            store.append_all(folder, rows)
            yield from rows


def newest(device_id: str) -> dict[tuple[str, str], list[Counter]]:
    """(candidate, workload id) -> the ok rows of the newest call of it, one a kernel launch in order."""
    found: dict[tuple[str, str], list[Counter]] = {}
    for row in chain.from_iterable(store.kept(Counter, device_id, "counters")):
        if row.status == "ok":
            calls = found.setdefault((row.name, row.workload_id), [])
            if row.launch == 0:
                calls.clear()
            calls.append(row)
    return found


def typical(rows: Iterable[Counter]) -> list[tuple[Counter, int]]:
    """Of a call's launches that are alike the one of the median time, and how many they are; the longest in sum first.

    Those of one kernel and grid that read about as much; without those that take less than COUNTED_PCT of the call.
    """
    groups: list[list[Counter]] = []
    for row in sorted(rows, key=lambda r: (r.kernel, r.grid or 0, r.dram_read_bytes or 0)):
        first = groups[-1][0] if groups else None
        same = first is not None and (first.kernel, first.grid) == (row.kernel, row.grid)
        if first is not None and same and (row.dram_read_bytes or 0) <= ALIKE * (first.dram_read_bytes or 0):
            groups[-1].append(row)
        else:
            groups.append([row])
    least = COUNTED_PCT / 100 * _sum_us(row for group in groups for row in group)
    long = [group for group in sorted(groups, key=_sum_us, reverse=True) if _sum_us(group) >= least]
    return [(sorted(group, key=lambda r: r.duration_us or 0)[len(group) // 2], len(group)) for group in long]


def _sum_us(rows: Iterable[Counter]) -> float:
    return math.fsum(row.duration_us or 0 for row in rows)


def render(rows: Sequence[Counter]) -> str:
    """A call for a terminal: two lines, or a table of what its launches are, by kernel."""
    row = rows[0]
    name = f"{row.phase} {row.workload_id} {row.arm} {row.name}"
    if row.status != "ok":
        return f"{name}: {row.status}: {row.message}"
    if len(rows) > 1:
        cells = [
            [one.kernel, str(count), f"{one.duration_us:.2f}", *(f"{share or 0:.0f} %" for share in
             (one.dram_pct, one.tensor_pct, one.issue_pct)), bound(one)]
            for one, count in typical(rows)
        ]  # fmt: skip
        head = ("kernel", "launches", "us each", "DRAM", "tensor", "issue", "what binds")
        told = f"{name}: {len(rows)} launches, {_sum_us(rows):,.1f} us profiled, each alone and from a cold L2"
        return f"{told}\n{table(head, cells, (30, 8, 7, 5, 6, 5, 26))}"
    shares = " ".join(f"{key[:-4]} {getattr(row, key):.0f}%" for key in METRICS if key.endswith("_pct"))
    size = f"{row.registers:.0f} registers, {(row.shared_bytes or 0) / 1024:.0f} KB shared"
    moved = f"DRAM {(row.dram_read_bytes or 0) / 1e6:.1f}+{(row.dram_write_bytes or 0) / 1e6:.1f} MB"
    moved += f", L2 to SM {(row.l2_to_sm_bytes or 0) / 1e6:.1f} MB"
    return (
        f"{name} [{row.kernel[:60]}] {row.duration_us:.2f} us profiled; {bound(row)}\n"
        f"    {shares}; {moved}; {size}; stalls {row.stalls}"
    )


def run(arguments: argparse.Namespace) -> int:
    """`lab counters`: what Nsight Compute counts of the cards' arms, as rows."""
    if not arguments.phase:
        raise BadInput("lab counters", "needs card ids", "see `lab phases`")
    cards = [phases.card(name) for name in arguments.phase]
    plan(cards, arguments.workload, arguments.arm, arguments.peers)  # refuses a misspelt name before a GPU is needed
    taken = measured(cards, arguments.workload, arguments.arm, arguments.peers)
    for _, call in groupby(taken, key=lambda row: (row.phase, row.workload_id, row.arm, row.name)):
        rows = list(call)
        print("\n".join(json.dumps(row.to_json()) for row in rows) if arguments.json else render(rows), flush=True)
    return 0


if __name__ == "__main__":
    inside(Path(sys.argv[1]))
