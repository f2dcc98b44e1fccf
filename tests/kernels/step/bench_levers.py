"""Captured steps of several configurations: `python -m tests.kernels.step.bench_levers WORKLOAD [NAME ...]`, on a GPU.

A quick look before a card is measured: medians of 5 x 11 replays, the configurations in turn, each on states of its
own; logits held against those of `served`. No rows.
"""

import statistics
import sys
import time

import torch

from kernels.step import cases, config, triton_served
from tests.kernels.replayed import replay_us, require_gpu

ROUNDS, REPLAYS = 5, 11


def main(workload_id: str, *names: str) -> None:
    """A line for each configuration."""
    require_gpu()
    began = time.monotonic()
    workload = next(w for w in cases.WORKLOADS if w.id == workload_id)
    inputs = cases.held(workload, "cuda") | cases.own(workload, 1, "cuda")
    graphs, logits = {}, {}
    for name in ("served", *(names or config.NAMED)):
        own = config.of(name, workload)
        if (why := own.refuses(workload)) or own.replayed:
            print(f"{name}: {why or 'replays itself'}", flush=True)
            continue
        args = triton_served.prepare(inputs, own) | {"tokens": inputs["tokens"]}
        out = cases.outputs(workload, inputs)
        for state in cases.IN_PLACE:
            if state in out:
                out[state].copy_(inputs[state])
        triton_served.run(args, out)
        logits[name] = out["logits"].double()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            triton_served.run(args, out)
        graphs[name] = graph, args, out
    for name in graphs:
        for _ in range(3):
            replay_us(graphs[name][0])
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name in graphs:
            times[name] += [replay_us(graphs[name][0]) for _ in range(REPLAYS)]
    served = statistics.median(times["served"])
    for name, taken in times.items():
        us, apart = statistics.median(taken), (logits[name] - logits["served"]).norm() / logits["served"].norm()
        print(f"{workload_id} {name:24} {us:9.1f} us {100 * (us / served - 1):+6.1f} %  logits apart {apart:.1e}")
    print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
