"""Chunked prefill in one kernel: the state never leaves the chip between the first token and the last.

One program owns V_TILE columns of one head's state for a whole sequence and walks its chunks in order. Per chunk of C
tokens, with G the running sum of log decays inside the chunk and S the state at its start, arXiv 2412.06464 section
3.3 becomes
    A_ij = beta_i exp(G_i - G_j) k_i . k_j   for i > j
    V'   = (I + A)^-1 beta (V - exp(G) K S)
    O    = scale (exp(G) Q S + P V'),        P_ij = exp(G_i - G_j) q_i . k_j   for i >= j
    S   <- exp(G_C) S + K^T exp(G_C - G) V'
W = (I + A)^-1 beta exp(G) K of the usual derivation is not formed: correcting the values by K S first saves a product
of C x C x D per chunk, and one rounding.

The state is held transposed, S^T [V_TILE, D], so that in all four products that read it or the corrected values they
are the left operand, which on Hopper may come from registers; K and Q are the right operands, from shared memory.
Norms (when q and k arrive raw), decays and the scale are applied to float32 accumulators, as row and column factors:
q and k enter the matrix units exactly as they came.

Given up. Programs of one head repeat the preparation (A, its inverse, P) for each v tile: D / V_TILE times. And the
preparation sits on the sequential path, although it depends on no state; `split_pipeline` is the opposite choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from kernels.common import Build, Candidate, Needs, Tensors, Work, Workload, interpreted
from kernels.gdn.cost import chain_work
from kernels.gdn.launch import capability, checked, current_capability, sequence_bounds
from kernels.gdn.tiles import as_format, as_operand, inverse_norm, matmul, matmul_add, pair_decay, unit_lower_inverse


@triton.jit
def fused_chunk_kernel(
    q, k, v, g, beta, initial_state, o, final_state, cu_seqlens, scale,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, C: tl.constexpr, V_TILE: tl.constexpr,
    L2_NORM: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Grid (D / V_TILE, HV, sequences). q, k [tokens, HK, D]; v, o [tokens, HV, D]; g, beta [tokens, HV] float32;
    states [sequences, HV, D, D]; cu_seqlens [sequences + 1] int32."""
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first = tl.load(cu_seqlens + sequence)
    tokens = tl.load(cu_seqlens + sequence + 1) - first
    origin = first.to(tl.int64)

    row = tl.arange(0, C)
    dk = tl.arange(0, D)
    dv = tl.program_id(0) * V_TILE + tl.arange(0, V_TILE)
    strict = row[:, None] > row[None, :]
    q += origin * HK * D + (head // (HV // HK)) * D
    k += origin * HK * D + (head // (HV // HK)) * D
    v += origin * HV * D + head * D
    o += origin * HV * D + head * D
    g += origin * HV + head
    beta += origin * HV + head
    at_state = dk[None, :] * D + dv[:, None]  # of S^T [V_TILE, D] within one head's state
    initial_state += (sequence.to(tl.int64) * HV + head) * D * D
    final_state += (sequence.to(tl.int64) * HV + head) * D * D
    state = tl.load(initial_state + at_state).to(tl.float32)

    for start in range(0, tokens, C):
        t = start + row
        live = t < tokens
        at_qk = t[:, None] * (HK * D) + dk[None, :]
        at_v = t[None, :] * (HV * D) + dv[:, None]
        # Beyond the end keys, values and beta are 0 and the decay is 1: such tokens change nothing.
        k_tile = tl.load(k + at_qk, mask=live[:, None], other=0.0)
        decay_log = tl.load(g + t * HV, mask=live, other=0.0)
        rate = tl.load(beta + t * HV, mask=live, other=0.0)
        running = tl.cumsum(decay_log, axis=0)
        total = tl.sum(decay_log, axis=0)
        decay = pair_decay(running, C)
        k_norm = inverse_norm(k_tile, L2_NORM)

        k_t = tl.trans(k_tile)
        kk = matmul(k_tile, k_t, PRECISION, INTERPRETED)
        a = tl.where(strict, kk * decay * (rate * k_norm)[:, None] * k_norm[None, :], 0.0)

        q_tile = tl.load(q + at_qk, mask=live[:, None], other=0.0)
        q_norm = inverse_norm(q_tile, L2_NORM) * scale
        scores = matmul(q_tile, k_t, PRECISION, INTERPRETED) * decay * q_norm[:, None] * k_norm[None, :]
        scores = as_operand(scores, PRECISION, INTERPRETED)  # before the inverse, which needs the registers

        inverse = unit_lower_inverse(a, C, SOLVE, INTERPRETED)
        v_tile = tl.load(v + at_v, mask=live[None, :], other=0.0)
        guess = matmul(state, k_t, PRECISION, INTERPRETED) * (tl.exp(running) * k_norm)[None, :]
        error = (v_tile.to(tl.float32) - guess) * rate[None, :]
        update = matmul(error, tl.trans(inverse), PRECISION, INTERPRETED)  # V'^T [V_TILE, C]

        read = matmul(state, tl.trans(q_tile), PRECISION, INTERPRETED) * (tl.exp(running) * q_norm)[None, :]
        read = matmul_add(update, tl.trans(scores), read, PRECISION, INTERPRETED)
        tl.store(o + at_v, as_format(read, o.dtype.element_ty, INTERPRETED), mask=live[None, :])

        fading = (tl.exp(total - running) * k_norm)[None, :]
        state = matmul_add(update * fading, k_tile, state * tl.exp(total), PRECISION, INTERPRETED)

    tl.store(final_state + at_state, as_format(state, final_state.dtype.element_ty, INTERPRETED))


@dataclass(frozen=True)
class FusedConfig:
    """A launch choice: tokens per chunk, state columns per program, warps, load stages, the merges' precision."""

    chunk: int
    v_tile: int
    num_warps: int
    num_stages: int
    solve: str


def config_for(cc: tuple[int, int], dim: int, chunk: int = 0) -> FusedConfig:
    """Choose by compute capability and head dimension; not yet tuned on any device.

    Registers decide more than shared memory (NOTES.md): chunks of 64 spill, and halve the number of dependent steps;
    32 where the opt-in shared memory is 99 KB (8.6, 8.9, 12.x).
    chunk: 16, 32 or 64 tokens instead of that choice, 0 for it.
    """
    if cc == (0, 0):
        return FusedConfig(chunk or 64, dim, 4, 1, "fp16")
    small = cc[0] == 12 or cc in ((8, 6), (8, 9))
    return FusedConfig(chunk or (32 if small else 64), 64, 4, 1, "fp16")


def _prepare(inputs: Tensors) -> Tensors:
    checked(inputs, ("q", "k", "v", "g", "beta", "initial_state"))
    return inputs | {"cu_seqlens": sequence_bounds(inputs)}


def _launch(args: Tensors, out: Tensors, precision: str, chunk: int) -> None:
    q, v = args["q"], args["v"]
    heads_k, (heads_v, dim) = q.shape[-2], v.shape[-2:]
    config = config_for(capability(v.device), dim, chunk)
    fused_chunk_kernel[(dim // config.v_tile, heads_v, args["cu_seqlens"].numel() - 1)](
        q, args["k"], v, args["g"], args["beta"], args["initial_state"], out["o"], out["final_state"],
        args["cu_seqlens"], dim**-0.5,
        HK=heads_k, HV=heads_v, D=dim, C=config.chunk, V_TILE=config.v_tile, L2_NORM="raw_qk" in args,
        PRECISION=precision, SOLVE=config.solve, INTERPRETED=interpreted(),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def _refuses(workload: Workload) -> str:
    if workload["op"] != "prefill":
        return f"op = {workload['op']}: fused_chunk does prefill; decode is recurrent_decode's"
    if workload["D"] not in (64, 128):
        return f"D = {workload['D']}: the state tile is written for D = 64 or 128"
    return ""


def work(workload: Workload, sms: int, chunk: int) -> Work:
    """One program a multiprocessor carries the columns of `v_tile`, chunk by chunk."""
    config = config_for(current_capability(), workload["D"], chunk)
    return chain_work(workload, config.chunk, config.v_tile, sms)


def _builds(cc: int, precision: str, io: str, chunk: int) -> tuple[Build, ...]:
    config = config_for(divmod(cc, 10), 128, chunk)
    pointers = {"q": io, "k": io, "v": io, "g": "fp32", "beta": "fp32", "initial_state": "fp32", "o": io}
    signature: dict[str, str] = {name: f"*{kind}" for name, kind in pointers.items()}
    signature |= {"final_state": "*fp32", "cu_seqlens": "*i32", "scale": "fp32"}
    constexprs: dict[str, Any] = {
        "HK": 16, "HV": 48, "D": 128, "C": config.chunk, "V_TILE": config.v_tile, "L2_NORM": True,
        "PRECISION": precision, "SOLVE": config.solve, "INTERPRETED": False,
    }  # fmt: skip
    aligned = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    signature |= dict.fromkeys(constexprs, "constexpr")
    label = f"fused_chunk {precision} C{config.chunk} D128 v{config.v_tile}"
    return (Build(label, fused_chunk_kernel, signature, constexprs, config.num_warps, config.num_stages, aligned),)


def _candidate(name: str, precision: str, operand: str, chunk: int = 0) -> Candidate:
    return Candidate(
        name=name,
        precision=precision,
        run=lambda args, out: _launch(args, out, operand, chunk),
        needs=Needs(triton="3.6"),
        prepare=_prepare,
        refuses=_refuses,
        builds=lambda cc: _builds(cc, operand, "bf16", chunk),
        config=lambda workload: f"{operand} operands, {config_for(current_capability(), workload['D'], chunk)}",
        work=lambda workload, sms: work(workload, sms, chunk),
    )


CANDIDATES = (
    _candidate("fused_chunk", "bf16", "bf16"),
    _candidate("fused_chunk_c16", "bf16", "bf16", chunk=16),
    _candidate("fused_chunk_c32", "bf16", "bf16", chunk=32),
    _candidate("fused_chunk_fp16", "fp16", "fp16"),
)
