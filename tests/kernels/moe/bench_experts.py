"""The experts' kernels and their levers over tokens: `python -m tests.kernels.moe.bench_experts [T ...]`, on a Hopper GPU.

A quick look before a card is measured: medians of 21 graphs of ten calls, each on activations of its own, so that few
tokens do not find their experts in the L2 cache; checked once against the float64 reference. No rows.
"""

import sys
import time
from functools import partial

import torch

from kernels.common import Candidate
from kernels.moe import cases, cuda_experts, cuda_many
from kernels.moe.controls import cuda_levers
from kernels.moe.reference import reference
from lab.check.accuracy import compare

CALLS = 10
MANY = 256  # tokens above which only kernels for many run


def us(candidate: Candidate, kept: list[dict], outs: list[dict]) -> float:
    """Median us of a call in a graph of one call on each of `kept`."""
    graph = torch.cuda.CUDAGraph()
    candidate.run(kept[0], outs[0])
    with torch.cuda.graph(graph):
        for args, out in zip(kept, outs, strict=True):
            candidate.run(args, out)
    times = []
    for _ in range(21):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(kept))
    return sorted(times)[10]


def main(*tokens: int) -> None:
    """A line for each number of tokens and candidate."""
    began = time.monotonic()
    say = partial(print, flush=True)
    weights: dict = {}
    for T in tokens or (1, 2, 8, 17, 32, 128, 257, 512, 1024, 2048):
        workload = cases._35b(T)
        if not weights:
            weights = cases.inputs(workload, 1, "cuda")
        acts = [cases.activations(workload, 100 + n, "cuda") for n in range(CALLS)]
        wanted = reference(weights | acts[0])["y"]
        say(f"T = {T}, {time.monotonic() - began:.0f} s")
        for candidate in (*cuda_experts.CANDIDATES, *cuda_many.CANDIDATES, *cuda_levers.CANDIDATES):
            try:
                if why := candidate.refuses(workload) if candidate.refuses else "":
                    continue
                kept = candidate.prepare(weights | acts[0]) if candidate.prepare else dict(weights)
                sets = [kept | a for a in acts]
                outs = [cases.outputs(workload, weights | a) for a in acts]
                time_us = us(candidate, sets, outs)
                seen = compare("y", outs[0]["y"], wanted, cases.tolerance(workload, candidate.precision)["y"])
                say(f"  {candidate.name:24} {time_us:8.1f} us  {'right' if seen.ok else f'WRONG {seen}'}  {candidate.config(workload) if candidate.config else ''}")
                del kept, sets, outs
            except Exception as error:
                say(f"  {candidate.name:24} {type(error).__name__}: {error} {why}")
                if "CUDA" in str(error) or "illegal" in str(error):
                    raise


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
