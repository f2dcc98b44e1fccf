"""Kernels beside themselves, on a GPU: `python -m tests.bench.bench_aa --out data/aa.jsonl [--count 100]`.

Each is a measurement as `lab measure` makes it, placements over two processes, of one candidate and its second self,
which has inputs and a process of its own; evidence and judge then decide "kernel_us change < 0" as for two kernels.
A line of the file is an `inserts.Comparison`. What the file holds is not measured again; --budget S leaves the rest for
another call, and --part 1/2 measures every second of them, for two GPUs of one host. Exits 1 where any word is GO or
NO-GO, or where fewer intervals hold zero than chance leaves of what is promised.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from lab.base import devices, files, interval
from lab.bench import machine, measure
from lab.bench.comparison import Outcome
from lab.bench.sampling import Comparison
from lab.bench.worker import Worker
from lab.check import families
from lab.row import samples
from lab.row.records import Measurement
from lab.write import inserts

SEED = 20261123
MACHINE = ("gpu", "driver", "torch", "commit")
LEFT_OUT = ("step",)  # a whole step is no kernel, and takes longer than the 2,000 us that are asked about
MOST_TOKENS = 2048  # in a sequence: a longer recurrence takes minutes in the float64 reference


def items(count: int) -> Iterator[measure.Item]:
    """Kernels of ours at real models' shapes, in drawn order, no two of a kind before every kind was there."""
    every: dict[tuple[str, str], list[Any]] = {}
    for name in families.names():
        if name in LEFT_OUT:
            continue
        told = measure.described(name)
        for workload in (w for w in families.bare(name).cases.WORKLOADS if w.role == "measure"):
            if int(workload.axes.get("T", 0)) > MOST_TOKENS:
                continue
            for candidate, configs in told.configs.items():
                if candidate not in told.peers and configs[workload.id] is not None:
                    every.setdefault((name, candidate), []).append(workload)
    draw = random.Random(SEED)
    kinds = sorted(every)
    for workloads in every.values():
        draw.shuffle(workloads)
    while count and any(every.values()):
        draw.shuffle(kinds)
        for name, candidate in [kind for kind in kinds if every[kind]][:count]:
            count -= 1
            card: Any = SimpleNamespace(id="aa", family=name, control=candidate)
            yield measure.Item(card, every[name, candidate].pop(), (("control", candidate),), False, 0.0)


def judged(arm: Outcome, comparison: Comparison | None, device: devices.Device) -> dict[str, Any] | None:
    """What evidence and judge make of a control and its second self; None where it was not timed."""
    if arm.timing is None or comparison is None or comparison.again is None:
        return None
    row = Measurement(
        device=device.id, phase="aa", family="aa", arm="control", name="aa", precision="", workload_id="w", workload={},
        status="ok", run="r", relative_error=0.0, placements=comparison.shape[0], shape=comparison.shape,
        processes=comparison.processes, samples=samples.encode(arm.timing.samples_us),
        again_samples=samples.encode(comparison.again.samples_us),
    )  # fmt: skip
    found = msgspec.to_builtins(inserts.beside_itself(row))
    return {name: found[name] for name in ("us", "change_pct", "low_pct", "high_pct", "word")}


def wrong(lines: Sequence[dict[str, Any]]) -> list[str]:
    """What speaks against the promise, in sentences."""
    said = [f"{x['word']} for {x['candidate']} {x['workload']}" for x in lines if x["word"] in ("GO", "NO-GO")]
    held = sum(x["low_pct"] <= 0.0 <= x["high_pct"] for x in lines)
    n, p = len(lines), interval.PLACEMENT_LEVEL
    if held < n * p - 2.33 * math.sqrt(n * p * (1 - p)):  # in one of a hundred such runs by chance
        said.append(f"{held} of {n} intervals hold zero")
    return said


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, append to the file, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_aa", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a file of JSON lines")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds; the rest is left for the next call")
    parser.add_argument("--part", default="1/1", help="I/N: of the comparisons the I-th, and each N-th behind it")
    asked = parser.parse_args(arguments)
    part, parts = map(int, asked.part.split("/"))
    device, made, began = measure.require_gpu(), machine.provenance(), time.monotonic()
    known = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    done = {(x["family"], x["workload"], x["candidate"]) for x in known}
    settings = measure.Settings(seconds=0.5)
    workers = [Worker() for _ in range(settings.processes)]
    try:
        for item in itertools.islice(items(asked.count), part - 1, None, parts):
            key = (item.card.family, item.workload.id, item.card.control)
            if key in done or time.monotonic() - began > asked.budget:
                continue
            outcomes, comparison, _ = measure.compare(item, settings, workers, lambda line: None)
            found = judged(outcomes[0], comparison, device)
            print(*key, json.dumps(found) if found else outcomes[0].message, flush=True)
            if found:
                line = dict(zip(("family", "workload", "candidate"), key, strict=True)) | found
                line |= {name: getattr(made, name) or "" for name in MACHINE}
                known.append(msgspec.to_builtins(msgspec.convert(line, inserts.Comparison)))
                files.write(asked.out, "".join(json.dumps(x) + "\n" for x in known))
    finally:
        for worker in workers:
            worker.stop()
    print(f"{len(known)} comparisons", *wrong(known), sep="\n")
    return int(bool(wrong(known)))


if __name__ == "__main__":
    sys.exit(main())
