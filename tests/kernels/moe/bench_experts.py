"""The experts' kernels over tokens: `python -m tests.kernels.moe.bench_experts [T ...] [NAME ...]`, on a Hopper GPU.

A quick look before a card is measured: medians of 21 graphs of ten calls, each on activations of its own, so that few
tokens do not find their experts in the L2 cache; checked once against the float64 reference. NAME: only candidates
whose name begins so, and what each of their kernels takes (Kineto, of the graph). No rows.
"""

import re
import statistics
import sys
import time

import torch

from kernels.common import Candidate, Tensors
from kernels.moe import cases, cuda_experts, cuda_many
from kernels.moe.reference import reference
from lab.check.accuracy import compare
from tests.kernels.replayed import replay_us, require_gpu

CALLS = 10
TOKENS = (1, 2, 8, 17, 32, 128, 257, 512, 1024, 2048)


def captured(candidate: Candidate, kept: list[Tensors], outs: list[Tensors]) -> torch.cuda.CUDAGraph:
    """A graph of one call on each of `kept`."""
    candidate.run(kept[0], outs[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for args, out in zip(kept, outs, strict=True):
            candidate.run(args, out)
    return graph


def kernels(graph: torch.cuda.CUDAGraph) -> str:
    """What a call's kernels take, us, as Kineto sees them in the graph."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profile.events():
        name = re.sub(r"moe_(router\w*?|experts|many_up|many_down|sum)_.*", r"\1", event.name)
        found[name] = found.get(name, 0.0) + event.device_time / CALLS
    return ", ".join(f"{name[:40]} {time:.1f}" for name, time in found.items())


def main(*words: str) -> None:
    """A line for each number of tokens and candidate."""
    require_gpu()
    began = time.monotonic()
    names = tuple(word for word in words if not word.isdigit())
    weights: Tensors = {}
    every: tuple[Candidate, ...] = (*cuda_experts.CANDIDATES, *cuda_many.CANDIDATES)
    for tokens in [int(word) for word in words if word.isdigit()] or TOKENS:
        workload = cases._35b(tokens)
        weights = weights or cases.inputs(workload, 1, "cuda")
        acts = [cases.activations(workload, 100 + n, "cuda") for n in range(CALLS)]
        wanted = reference(weights | acts[0])["y"]
        print(f"T = {tokens}, {time.monotonic() - began:.0f} s", flush=True)
        for candidate in every:
            if candidate.refuses(workload) or (names and not candidate.name.startswith(names)):
                continue
            made = candidate.prepare(weights | acts[0])
            outs = [cases.outputs(workload, weights | given) for given in acts]
            graph = captured(candidate, [made | given for given in acts], outs)
            parts = kernels(graph) if names else ""
            took_us = statistics.median(replay_us(graph) for _ in range(21)) / CALLS
            seen = compare("y", outs[0]["y"], wanted, cases.tolerance(workload, candidate.precision)["y"])
            said = "right" if seen.ok else f"WRONG {seen}"
            print(f"  {candidate.name:24} {took_us:8.1f} us  {said}  {parts or candidate.config(workload)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
