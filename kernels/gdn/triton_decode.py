"""Recurrent decode: one token per sequence, each state read once, updated and written back where it stands.

The work is traffic (3 MB of state per sequence at Hv = 48, D = 128, float32, each way), so the kernel is shaped for
memory: a program owns a [D, V_TILE] slice of one head's state, columns of which never interact, and issues every load
before the first multiply. The four lines of the recurrence need S^T k before the update and S^T q after it; the second
is rewritten so that both are sums over the state as loaded and leave the registers once:
    S_new^T q = exp(g) S^T q + (k . q) u,   u = beta (v - exp(g) S^T k).
Sequences find their state through `state_rows`, so that a server can keep states where they are when its batch changes;
-1 marks a slot without a sequence (a graph captured for a larger batch): o is zero there and no state is touched.

Given up: k and q are read by every v tile of a head (from L2: 1 KB beside a 16 KB state slice), and the pool is assumed
to be contiguous. Two sequences with the same row would race; the caller keeps rows distinct.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.common import Build, Candidate, Needs, Tensors, Workload, interpreted
from kernels.gdn.launch import capability, checked, current_capability
from kernels.gdn.tiles import L2_EPS, as_format


@triton.jit
def decode_token(s, key, query, value, decay, rate, scale, L2_NORM: tl.constexpr):
    """One token on a state slice s [D, V_TILE], all float32: (new slice, o [V_TILE])."""
    if L2_NORM:
        key = key / tl.sqrt(tl.sum(key * key, axis=0) + L2_EPS)
        query = query / tl.sqrt(tl.sum(query * query, axis=0) + L2_EPS)
    guess = decay * tl.sum(s * key[:, None], axis=0)
    read = decay * tl.sum(s * query[:, None], axis=0)
    update = rate * (value - guess)
    read = scale * (read + tl.sum(key * query, axis=0) * update)
    return decay * s + key[:, None] * update[None, :], read


@triton.jit
def recurrent_decode_kernel(
    q, k, v, g, beta, state, state_rows, o, scale,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, V_TILE: tl.constexpr,
    L2_NORM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Grid (D / V_TILE, HV, B). q, k [B, HK, D]; v, o [B, HV, D]; g, beta [B, HV] float32; state [rows, HV, D, D];
    state_rows [B] int32."""
    head = tl.program_id(1)
    b = tl.program_id(2)
    dk = tl.arange(0, D)
    dv = tl.program_id(0) * V_TILE + tl.arange(0, V_TILE)
    state_row = tl.load(state_rows + b)
    at_v = (b * HV + head) * D + dv
    if state_row < 0:
        tl.store(o + at_v, tl.zeros((V_TILE,), o.dtype.element_ty))
        return
    state += (state_row.to(tl.int64) * HV + head) * D * D
    at_state = dk[:, None] * D + dv[None, :]
    at_k = (b * HK + head // (HV // HK)) * D + dk

    s = tl.load(state + at_state).to(tl.float32)  # [D, V_TILE]
    key = tl.load(k + at_k).to(tl.float32)
    query = tl.load(q + at_k).to(tl.float32)
    value = tl.load(v + at_v).to(tl.float32)
    decay = tl.exp(tl.load(g + b * HV + head))
    rate = tl.load(beta + b * HV + head)

    s, read = decode_token(s, key, query, value, decay, rate, scale, L2_NORM)
    tl.store(state + at_state, as_format(s, state.dtype.element_ty, INTERPRETED))
    tl.store(o + at_v, as_format(read, o.dtype.element_ty, INTERPRETED))


@dataclass(frozen=True)
class DecodeConfig:
    """A launch choice: state columns per program and warps."""

    v_tile: int
    num_warps: int


def config_for(cc: tuple[int, int], batch: int, heads_v: int, dim: int) -> DecodeConfig:
    """Small tiles while programs are too few to fill the device, larger ones after; not yet tuned on any device.

    16 float32 columns are 64 bytes a row, two sectors; 32 are a full line. D x 32 floats over two warps are 64
    registers a thread at D = 128, all in flight at once.
    """
    if cc == (0, 0):
        return DecodeConfig(dim, 1)
    return DecodeConfig(16, 1) if batch * heads_v < 128 else DecodeConfig(32, 2)


def _prepare(inputs: Tensors) -> Tensors:
    checked(inputs, ("q", "k", "v", "g", "beta", "state", "state_rows"))
    return inputs


def launch(args: Tensors, state: torch.Tensor, o: torch.Tensor) -> None:
    """One token for each sequence of `args`; `state` [rows, Hv, D, D] is updated at args["state_rows"], `o` written."""
    q, v = args["q"], args["v"]
    (batch, heads_v, dim), heads_k = v.shape, q.shape[-2]
    config = config_for(capability(v.device), batch, heads_v, dim)
    recurrent_decode_kernel[(dim // config.v_tile, heads_v, batch)](
        q, args["k"], v, args["g"], args["beta"], state, args["state_rows"], o, dim**-0.5,
        HK=heads_k, HV=heads_v, D=dim, V_TILE=config.v_tile, L2_NORM="raw_qk" in args, INTERPRETED=interpreted(),
        num_warps=config.num_warps,
    )  # fmt: skip


def _run(args: Tensors, out: Tensors) -> None:
    launch(args, out["state"], out["o"])


def refuses(workload: Workload) -> str:
    """Decode only, with a state tile that is written for two head sizes."""
    if workload["op"] != "decode":
        return f"op = {workload['op']}: recurrent_decode does decode; prefill is fused_chunk's or split_pipeline's"
    if workload["D"] not in (64, 128):
        return f"D = {workload['D']}: the state tile is written for D = 64 or 128"
    return ""


def _builds(cc: int) -> tuple[Build, ...]:
    builds = []
    for batch, state in ((1, "fp32"), (128, "fp32"), (128, "bf16")):
        config = config_for(divmod(cc, 10), batch, 48, 128)
        pointers = {"q": "bf16", "k": "bf16", "v": "bf16", "g": "fp32", "beta": "fp32", "state": state}
        signature: dict[str, str] = {name: f"*{kind}" for name, kind in pointers.items()}
        signature |= {"state_rows": "*i32", "o": "*bf16", "scale": "fp32"}
        aligned = tuple(name for name, kind in signature.items() if kind.startswith("*"))
        constexprs: dict[str, Any] = {"HK": 16, "HV": 48, "D": 128, "V_TILE": config.v_tile, "L2_NORM": True}
        constexprs |= {"INTERPRETED": False}
        signature |= dict.fromkeys(constexprs, "constexpr")
        label = f"recurrent_decode b{batch} {state} state D128 v{config.v_tile}"
        builds.append(Build(label, recurrent_decode_kernel, signature, constexprs, config.num_warps, aligned=aligned))
    return tuple(builds)


def describe(workload: Workload) -> str:
    """The launch choice in one line."""
    config = config_for(current_capability(), workload["batch"], workload["Hv"], workload["D"])
    return f"float32 arithmetic, {workload['state_dtype']} state, {config}"


CANDIDATES = (
    Candidate(
        name="recurrent_decode",
        precision="f32",
        run=_run,
        needs=Needs(triton="3.6"),
        prepare=_prepare,
        refuses=refuses,
        builds=_builds,
        config=describe,
    ),
)
