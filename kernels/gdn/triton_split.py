"""Chunked prefill as a pipeline of six kernels: everything that needs no state runs in parallel over chunks.

What: cumsum, kkt, inverse, wu, scan, output (split_kernels.py has the mathematics). Only `scan` is sequential, and it
does two products per chunk; the rest fills the device from the first microsecond, also at one sequence and few heads.
This is the shape of the published pipelines, and of the arm that gate P5 compared with a fused scan.

Given up: traffic. A, its inverse, W, U, V' and every chunk's state pass through memory (`workspace_bytes`), and six
launches stand where `triton_fused` has one. The workspace is allocated in `prepare`, so `run` only launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import triton

from kernels.common import Build, Candidate, Needs, Tensors, Work, Workload, device_of, interpreted
from kernels.gdn import split_kernels as stages
from kernels.gdn.cost import algorithm_cost, chain_steps, sequences, state_bytes
from kernels.gdn.launch import capability, checked, current_capability, sequence_bounds

OPERANDS = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}
HEAD_TILE = 16


@dataclass(frozen=True)
class SplitConfig:
    """A launch choice: tokens per chunk, state columns per program in scan and output, warps, the merges' precision."""

    chunk: int
    scan_tile: int
    output_tile: int
    warps: int
    inverse_warps: int
    scan_stages: int
    solve: str


def config_for(cc: tuple[int, int], dim: int, precision: str) -> SplitConfig:
    """Choose by compute capability, head dimension and operand precision; not yet tuned on any device.

    The inverse works on 16 x 16 tiles, so one warp keeps its reductions inside shuffles. float32 operands halve the
    tiles: they take twice the shared memory and the limit is 99 KB on 8.6, 8.9 and 12.x.
    """
    if cc == (0, 0):
        return SplitConfig(64, dim, dim, 4, 1, 1, "tf32" if precision == "tf32" else "fp16")
    small = cc[0] == 12 or cc in ((8, 6), (8, 9))
    if precision == "tf32":
        return SplitConfig(64, 32, 32, 4, 1, 1, precision)
    return SplitConfig(64, 32 if small else 64, 64, 4, 1, 2, "fp16")


def workspace_shapes(
    tokens: int, chunks: int, heads_v: int, dim: int, chunk: int, operand: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each intermediate, by name."""
    return {
        "running": ((tokens, heads_v), torch.float32),
        "a": ((tokens, heads_v, chunk), torch.float32),
        "x": ((tokens, heads_v, chunk), operand),
        "w": ((tokens, heads_v, dim), operand),
        "u": ((tokens, heads_v, dim), operand),
        "v_new": ((tokens, heads_v, dim), operand),
        "h": ((chunks, heads_v, dim, dim), operand),
    }


def prepare(inputs: Tensors, precision: str) -> Tensors:
    """The args of `run`: tables of chunks and sequences, and room for what passes between the launches."""
    checked(inputs, ("q", "k", "v", "g", "beta", "initial_state"))
    heads_v, dim = inputs["v"].shape[-2:]
    device = device_of(inputs)
    bounds = sequence_bounds(inputs)
    size = config_for(capability(device), dim, precision).chunk
    spans, offsets, points = [], [0], bounds.tolist()
    for first, last in pairwise(points):
        spans += [(start, last) for start in range(first, last, size)]
        offsets.append(len(spans))
    shapes = workspace_shapes(points[-1], len(spans), heads_v, dim, size, OPERANDS[precision])
    workspace = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}
    tables = {
        "cu_seqlens": bounds,
        "chunks": torch.tensor(spans, dtype=torch.int32, device=device),
        "chunk_offsets": torch.tensor(offsets, dtype=torch.int32, device=device),
    }
    return inputs | workspace | tables


def launch_scan(
    args: Tensors, config: SplitConfig, initial: torch.Tensor, final: torch.Tensor, keywords: dict[str, Any]
) -> None:
    """`scan_kernel` over the sequences [cu_seqlens[i], cu_seqlens[i + 1]), with a state of each in and out."""
    names = ("running", "h", "v_new", "cu_seqlens", "chunk_offsets")
    running, h, v_new, bounds, offsets = (args[name] for name in names)
    stages.scan_kernel[(keywords["D"] // config.scan_tile, keywords["HV"], bounds.numel() - 1)](
        args["k"], args["w"], args["u"], running, initial, h, v_new, final, bounds, offsets,
        **keywords, V_TILE=config.scan_tile, num_warps=config.warps, num_stages=config.scan_stages,
    )  # fmt: skip


def _scan(args: Tensors, out: Tensors, config: SplitConfig, keywords: dict[str, Any]) -> None:
    launch_scan(args, config, args["initial_state"], out["final_state"], keywords)


def run(args: Tensors, out: Tensors, precision: str, scan: Callable[..., None] = _scan) -> None:
    """The six launches; scan: (args, out, config, keywords) does the fourth, from k, w, u to h, v_new, final_state."""
    q, k, v, g, beta, chunks = (args[name] for name in ("q", "k", "v", "g", "beta", "chunks"))
    running, a, x, w, u, v_new, h = (args[name] for name in ("running", "a", "x", "w", "u", "v_new", "h"))
    heads_k, (heads_v, dim), count = k.shape[-2], v.shape[-2:], chunks.shape[0]
    config = config_for(capability(v.device), dim, precision)
    shape = {"HK": heads_k, "HV": heads_v, "D": dim, "C": config.chunk}
    numerics = {"PRECISION": precision, "INTERPRETED": interpreted()}
    norm = {"L2_NORM": "raw_qk" in args}
    warps = {"num_warps": config.warps}

    stages.cumsum_kernel[(count, triton.cdiv(heads_v, HEAD_TILE))](
        g, running, chunks, HV=heads_v, C=config.chunk, HEAD_TILE=HEAD_TILE, **warps
    )
    stages.kkt_kernel[(count, heads_v)](k, running, beta, a, chunks, **shape, **norm, **numerics, **warps)
    stages.inverse_kernel[(count, heads_v)](
        a, x, chunks, HV=heads_v, C=config.chunk, SOLVE=config.solve, INTERPRETED=interpreted(),
        num_warps=config.inverse_warps,
    )  # fmt: skip
    stages.wu_kernel[(count, heads_v)](k, v, running, beta, x, w, u, chunks, **shape, **norm, **numerics, **warps)
    scan(args, out, config, shape | norm | numerics)
    stages.output_kernel[(count, heads_v, dim // config.output_tile)](
        q, k, running, h, v_new, out["o"], chunks, dim**-0.5,
        **shape, V_TILE=config.output_tile, **norm, **numerics, **warps,
    )  # fmt: skip


def refuses(workload: Workload) -> str:
    """Prefill, D = 64 or 128."""
    if workload["op"] != "prefill":
        return f"op = {workload['op']}: split_pipeline does prefill; decode is recurrent_decode's"
    if workload["D"] not in (64, 128):
        return f"D = {workload['D']}: the tiles are written for D = 64 or 128"
    return ""


def work(workload: Workload, sms: int, precision: str) -> Work:
    """Six launches: the chain of the scan's steps, then chunks side by side, whose tensors go through memory.

    A chunk's state is written and read whole however few tokens the chunk has.
    """
    config, element = config_for(current_capability(), workload["D"], precision), 4 if precision == "tf32" else 2
    steps = chain_steps(workload, config.chunk, config.scan_tile, 2 * sms)
    states = 2.0 * state_bytes(workload)
    moved = algorithm_cost(workload, config.chunk, element, through_memory=True).bytes - states
    chunks, heads = -(-workload["T"] // config.chunk), sequences(workload) * workload["Hv"]
    moved += 2.0 * element * heads * workload["D"] ** 2 * (chunks - workload["T"] / config.chunk)
    in_turn = {"launches": 6.0, "bytes": states, "steps": 2000.0 * steps}
    return Work({"bytes": moved, "chunks": 5000.0 * chunks * heads / sms}, in_turn)


def _builds(cc: int, precision: str) -> tuple[Build, ...]:
    """The six kernels at Hk = 16, Hv = 48, D = 128 with bf16 activations."""
    config = config_for(divmod(cc, 10), 128, precision)
    operand = {"bf16": "*bf16", "fp16": "*fp16", "tf32": "*fp32"}[precision]
    types = dict.fromkeys(("q", "k", "v", "o"), "*bf16")
    types |= dict.fromkeys(("g", "beta", "running", "a", "initial_state", "final_state"), "*fp32")
    types |= dict.fromkeys(("x", "w", "u", "v_new", "h"), operand)
    types |= dict.fromkeys(("chunks", "cu_seqlens", "chunk_offsets"), "*i32") | {"scale": "fp32"}
    values: dict[str, Any] = {
        "HK": 16, "HV": 48, "D": 128, "C": config.chunk, "HEAD_TILE": HEAD_TILE, "L2_NORM": True,
        "PRECISION": precision, "SOLVE": config.solve, "INTERPRETED": False,
    }  # fmt: skip

    def build(kernel: Any, v_tile: int = 0, warps: int = config.warps, load_stages: int = 3) -> Build:
        names = kernel.arg_names
        signature = {name: types.get(name, "constexpr") for name in names}
        constants = values | {"V_TILE": v_tile}
        return Build(
            label=f"split {kernel.__name__} {precision} C{config.chunk} D128",
            kernel=kernel,
            signature=signature,
            constexprs={name: constants[name] for name in names if signature[name] == "constexpr"},
            num_warps=warps,
            num_stages=load_stages,
            aligned=tuple(name for name, kind in signature.items() if kind.startswith("*")),
        )

    return (
        build(stages.cumsum_kernel),
        build(stages.kkt_kernel),
        build(stages.inverse_kernel, warps=config.inverse_warps),
        build(stages.wu_kernel),
        build(stages.scan_kernel, config.scan_tile, load_stages=config.scan_stages),
        build(stages.output_kernel, config.output_tile),
    )


def _candidate(name: str, precision: str, operand: str) -> Candidate:
    return Candidate(
        name=name,
        precision=precision,
        run=lambda args, out: run(args, out, operand),
        needs=Needs(triton="3.6"),
        prepare=lambda inputs: prepare(inputs, operand),
        refuses=refuses,
        builds=lambda cc: _builds(cc, operand),
        config=lambda workload: f"{operand} operands, {config_for(current_capability(), workload['D'], operand)}",
        work=lambda workload, sms: work(workload, sms, operand),
    )


CANDIDATES = (
    _candidate("split_pipeline", "bf16", "bf16"),
    _candidate("split_pipeline_fp16", "fp16", "fp16"),
    _candidate("split_pipeline_tf32", "tf32", "tf32"),
)
