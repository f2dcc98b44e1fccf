"""Time on a Hopper GPU, without a card: `python -m tests.kernels.nvfp4.bench_one [repack|line] [--shape M,N,K]...`.

line: every form of line.py (warpgroups, CTAs that share x, stages) and of wgmma_gemm.cu (tokens a tile, CTAs that share
x, halves of k) beside what cuda_gemm takes, at the shapes of the card w4a16-33-tokens and where tiles are few, each
checked first. repack: the launch of repack.py by source and layout. Weights rotate over more bytes than L2 holds;
graphs of all sets, arms in turn; the median of ROUNDS. A JSON line each, status 1 where one is wrong.
"""

import argparse
import contextlib
import functools
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels.nvfp4 import cases, checkpoints, cuda_gemm, line, repack, row_tiles
from kernels.nvfp4 import format as fmt
from kernels.nvfp4.reference import reference
from lab.check.accuracy import compare

SHAPES = (
    (32, 17408, 5120),
    (33, 17408, 5120),
    (48, 17408, 5120),
    (64, 17408, 5120),
    (96, 17408, 5120),
    (128, 17408, 5120),
    (16, 5120, 17408),
    (32, 5120, 17408),
    (64, 5120, 17408),
    (100, 2048, 7168),
    (33, 1000, 4112),
    (64, 5120, 6144),
    (128, 5120, 6144),
    (64, 4096, 2048),
    (97, 5120, 17408),
    (128, 2048, 7168),
    (256, 2048, 7168),
)
ROUNDS, L2_SETS_BYTES = 21, 200e6


def graph_of(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """The calls in turn, captured after a round of them."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for call in calls:
            call()
    return graph


def medians(arms: dict[str, list[Callable[[], object]]]) -> dict[str, float]:
    """us a call of each arm, by events around a graph of its calls, arms in turn."""
    graphs = {name: graph_of(calls) for name, calls in arms.items()}
    seen: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            seen[name].append(start.elapsed_time(end) * 1e3 / len(arms[name]))
    return {name: statistics.median(values[3:]) for name, values in seen.items()}


def forms(m: int, n: int, k: int) -> dict[str, line.LineConfig | cuda_gemm.GemmConfig]:
    """What can be asked of line.py and wgmma_gemm.cu at a shape, by its name; those that do not fit are left out."""
    found: dict[str, line.LineConfig | cuda_gemm.GemmConfig] = {}
    by_groups = itertools.product((4, 2), (1, 2), (4, 8))
    lines: list[dict[str, int]] = [{}, *({"groups": g, "cluster": c, "stages": s} for g, c, s in by_groups)]
    lines += [{"groups": g, "workers": w} for g in (4, 2) for w in (33, 66, 99)]  # fewer who share a block
    by_tokens = itertools.product(cuda_gemm.TOKEN_TILES, (1, 2))
    tiles: list[dict[str, int]] = [{}, *({"tokens": t, "cluster": c} for t, c in by_tokens), {"split_k": True}]
    for choose, ways in ((line.choose_config, lines), (cuda_gemm.choose_config, tiles)):
        for fixed in ways:
            with contextlib.suppress(ValueError):
                config = choose(m, n, k, "bf16", **fixed)
                found[str(config)] = config
    return found


def times_of(m: int, n: int, k: int) -> list[dict[str, Any]]:
    """A record for each form, cuda_gemm's own first."""
    sets = max(2, int(L2_SETS_BYTES / (n * k * 0.5625)) + 1)
    problem, chosen = cases._measure(m, n, k, ""), cuda_gemm.choose(m, n, k, "bf16")
    limit = cases.tolerance(problem, "nvfp4-w4a16")["y"]
    arms: dict[str, list[Callable[[], object]]] = {}
    right: dict[str, bool] = {}
    for i in range(sets):
        inputs = cases.inputs(problem, seed=i, device="cuda")
        gemm, y = cuda_gemm.prepare(inputs), cases.outputs(problem, inputs)["y"]
        w = row_tiles.tile_weights(inputs["w_packed"], inputs["w_scale"], inputs["x"].dtype)
        calls: dict[str, Callable[[], object]] = {f"today {chosen}": functools.partial(cuda_gemm.run, gemm, {"y": y})}
        for name, config in forms(m, n, k).items():
            own = line.workspace if isinstance(config, line.LineConfig) else cuda_gemm.workspace
            args = inputs | {"w": w} | own(config, w.device)  # type: ignore[arg-type]
            calls[name] = functools.partial(cuda_gemm.perform, args, y, config)
        wanted = reference(inputs)["y"].cpu() if i == 0 else None
        for name, call in calls.items():
            arms.setdefault(name, []).append(call)
            if wanted is not None:
                y.fill_(float("nan"))
                call()
                right[name] = compare("y", y.cpu(), wanted, limit).ok
    us = medians(arms)
    return [{"m": m, "n": n, "k": k, "form": name, "us": us[name], "right": right[name]} for name in arms]


def repack_times() -> list[dict[str, Any]]:
    """GB/s, read plus written, of 17408 x 5120 in every layout and order."""
    made = []
    q = fmt.quantise(torch.randn(17408, 5120, device="cuda"))
    blocks = checkpoints.to_ggml(q)
    for name in repack.LAYOUTS:
        wanted = repack.from_modelopt(q.packed, q.scale, torch.bfloat16, name)
        moved = q.packed.numel() + q.scale.numel() + wanted.numel()
        same = torch.equal(repack.from_ggml(blocks, torch.bfloat16, name), wanted)
        arms: dict[str, list[Callable[[], object]]] = {
            "modelopt": [functools.partial(repack.from_modelopt, q.packed, q.scale, torch.bfloat16, name)] * 4,
            "ggml": [functools.partial(repack.from_ggml, blocks, torch.bfloat16, name)] * 4,
        }
        for order, us in medians(arms).items():
            made.append({"repack": order, "layout": name, "us": us, "gb_s": moved / us / 1e3, "right": same})
    return made


def main() -> int:
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("what", choices=("line", "repack"))
    asked.add_argument("--out", type=Path, help="keep the lines there too")
    asked.add_argument("--shape", action="append", type=lambda text: tuple(map(int, text.split(","))), default=[])
    given = asked.parse_args()
    records = (
        repack_times() if given.what == "repack" else [r for shape in given.shape or SHAPES for r in times_of(*shape)]
    )
    lines = [json.dumps({"gpu": torch.cuda.get_device_name(), **record}) for record in records]
    print("\n".join(lines))
    if given.out:
        given.out.write_text("\n".join(lines) + "\n")
    return int(any(not record["right"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
