"""A split scan's launches over plans: `python -m tests.kernels.gdn.bench_segments [T HK HV]`, on a Hopper GPU.

What segments.make's estimate stands on: us of a chunk of maps and of a scan by halves and by heads, of a composed
segment, of what a launch costs; and the same of the form that composes in the scan. Medians of 21 graphs of ten
launches, warm; no rows.
"""

import statistics
import sys
from collections.abc import Callable

import torch

from kernels.gdn import cases, cuda_scan, cuda_segments, cuda_segments_in_scan, segments
from tests.kernels.replayed import replay_us, require_gpu


def us(launch: Callable[[], None], repeats: int = 10) -> float:
    """Median time of a launch in a graph of `repeats`."""
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            launch()
    return statistics.median(replay_us(graph) for _ in range(21)) / repeats


def main(tokens: int = 32768, heads_k: int = 2, heads_v: int = 8) -> None:
    """Print a line for each plan with the times and the estimate, the chosen plan's marked, and cuda_scan's."""
    require_gpu()
    problem = cases._prefill(tokens, (heads_k, heads_v), D=128, dtype="bf16", role="measure")
    inputs = cases.inputs(problem, 0, "cuda")
    out, count = cases.outputs(problem, inputs), -(-tokens // segments.CHUNK)
    args = cuda_scan._prepare(inputs)
    print(f"{problem.id}: cuda_scan {us(lambda: cuda_scan._run(args, out)):.1f} us")
    chosen = segments.make([0, tokens], heads_v, cuda_scan.SMS)
    for pieces in (3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 17, 18, 24, 33):
        for groups in (1, 2):
            plan = segments.Plan(-(-count // pieces), groups, 0.0, pieces)
            args = cuda_segments.prepare(inputs, plan)
            cuda_segments.run(args, out)
            parts = {name: us(launch) for name, launch in cuda_segments.launches(args, out).items()}
            times = {"all": us(lambda args=args: cuda_segments.run(args, out))} | parts  # type: ignore[misc]
            own = cuda_segments_in_scan.prepare(inputs, plan)
            cuda_segments_in_scan.run(own, out)
            both = cuda_segments_in_scan.launches(own, out)
            times |= {"in scan: all": us(lambda own=own: cuda_segments_in_scan.run(own, out))}  # type: ignore[misc]
            times |= {f"its {name}": us(launch) for name, launch in both.items() if name != "prepare"}
            mark = " chosen" if chosen and (chosen.chunks, chosen.groups) == (plan.chunks, groups) else ""
            print(plan, *(f"{name} {time:.1f}" for name, time in times.items()), mark)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
