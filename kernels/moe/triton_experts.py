"""Two grouped products on packed weights, unpacked in registers: tokens sorted by expert, a block has one expert.

    up_kernel    h = SiLU(x Wg^T) * (x Wu^T): a block reads the same rows of Wg and of Wu and keeps two sums, so that
                 gate and up never leave the chip
    down_kernel  p_e h Wd^T in float32, a row for each token and expert; the rows of a token are added up in its own
                 order behind it, so that every run gives the same bits

Which block is of which expert is worked out in torch from the sorted choice, with as many blocks as any routing may
need: nothing is asked of the host. Weights are in the layout of kernels/nvfp4/layout.py, the arithmetic is that of
kernels/nvfp4/triton_gemm.py. Given up here: blocks of one expert read its weights one after the other, and a block of
few tokens pads them to 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.common import Build, Candidate, Needs, Tensors, Workload, asked_capability, interpreted
from kernels.moe import torch_grouped
from kernels.nvfp4 import layout
from kernels.nvfp4.decode import BF16_SHIFT, FP16_SHIFT, dequantise_tile
from kernels.nvfp4.layout import HALF, SPAN
from kernels.nvfp4.triton_gemm import capability_of
from kernels.rounding import round_output


@triton.jit
def _unpacked_dot(
    acc, w_tile, s_tile, x_low, x_high, BLOCK_N: tl.constexpr, HALF: tl.constexpr, BF16: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_M] plus 128 values of K."""
    w = tl.load(w_tile)
    s_low, s_high = tl.split(tl.reshape(tl.load(s_tile), (BLOCK_N, HALF // 16, 2)))
    w_low = dequantise_tile(w & 15, s_low, BF16, BLOCK_N, HALF, 16)
    w_high = dequantise_tile(w >> 4, s_high, BF16, BLOCK_N, HALF, 16)
    if WIDEN:
        acc += tl.dot(w_low.to(tl.float32), x_low.to(tl.float32), input_precision="ieee")
        acc += tl.dot(w_high.to(tl.float32), x_high.to(tl.float32), input_precision="ieee")
    else:
        acc = tl.dot(w_low, x_low, acc)
        acc = tl.dot(w_high, x_high, acc)
    return acc


@triton.jit
def up_kernel(
    x_ptr,  # [T, K]
    token_ptr,  # i64 [rows]: the token of a sorted row
    w_ptr,  # u8 [E, 2 N, SPANS * HALF]
    s_ptr,  # u8 [E, 2 N, SPANS * SPAN / 16]
    ts_ptr,  # f32 [E]
    expert_ptr,  # i64 [blocks]; E where a block has no work
    start_ptr,  # i64 [blocks]: its first row
    end_ptr,  # i32 [E]: one behind an expert's last row
    h_ptr,  # [rows, N]
    E,
    N,
    K,
    SPANS,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    BF16: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    HALF: tl.constexpr = SPAN // 2
    expert = tl.load(expert_ptr + tl.program_id(0))
    if expert < E:
        rows = tl.load(start_ptr + tl.program_id(0)) + tl.arange(0, BLOCK_M)
        live = rows < tl.load(end_ptr + expert)
        token = tl.load(token_ptr + rows, mask=live, other=0)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        gate_row = expert * 2 * N + (n % N).to(tl.int64)  # past the end they are read again and not stored
        at = tl.arange(0, HALF)
        w_gate = w_ptr + gate_row[:, None] * (SPANS * HALF) + at[None, :]
        w_up = w_gate + N.to(tl.int64) * (SPANS * HALF)
        s_gate = s_ptr + gate_row[:, None] * (SPANS * (SPAN // 16)) + tl.arange(0, SPAN // 16)[None, :]
        s_up = s_gate + N.to(tl.int64) * (SPANS * (SPAN // 16))
        x_tile = x_ptr + token[None, :] * K + at[:, None]
        gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for span in range(0, SPANS):
            left = K - span * SPAN
            x_low = tl.load(x_tile, mask=at[:, None] < left, other=0.0)
            x_high = tl.load(x_tile + HALF, mask=at[:, None] < left - HALF, other=0.0)
            gate = _unpacked_dot(gate, w_gate, s_gate, x_low, x_high, BLOCK_N, HALF, BF16, WIDEN)
            up = _unpacked_dot(up, w_up, s_up, x_low, x_high, BLOCK_N, HALF, BF16, WIDEN)
            w_gate += HALF
            w_up += HALF
            s_gate += SPAN // 16
            s_up += SPAN // 16
            x_tile += SPAN
        scale = tl.load(ts_ptr + expert) * (1 << SHIFT)
        gate, up = gate * scale, up * scale
        h = round_output(tl.trans(gate * tl.sigmoid(gate) * up), h_ptr.dtype.element_ty, WIDEN)
        tl.store(h_ptr + rows[:, None] * N + n[None, :], h, mask=live[:, None] & (n < N)[None, :])


@triton.jit
def down_kernel(
    h_ptr,  # [rows, K]
    weight_ptr,  # f32 [rows]: p of a sorted row
    w_ptr,  # u8 [E, N, SPANS * HALF]
    s_ptr,  # u8 [E, N, SPANS * SPAN / 16]
    ts_ptr,  # f32 [E]
    expert_ptr,  # i64 [blocks]
    start_ptr,  # i64 [blocks]
    end_ptr,  # i32 [E]
    y_ptr,  # f32 [rows, N]
    E,
    N,
    K,
    SPANS,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    BF16: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    HALF: tl.constexpr = SPAN // 2
    expert = tl.load(expert_ptr + tl.program_id(0))
    if expert < E:
        rows = tl.load(start_ptr + tl.program_id(0)) + tl.arange(0, BLOCK_M)
        live = rows < tl.load(end_ptr + expert)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = expert * N + (n % N).to(tl.int64)
        at = tl.arange(0, HALF)
        w_tile = w_ptr + row[:, None] * (SPANS * HALF) + at[None, :]
        s_tile = s_ptr + row[:, None] * (SPANS * (SPAN // 16)) + tl.arange(0, SPAN // 16)[None, :]
        h_tile = h_ptr + tl.where(live, rows, 0)[None, :] * K + at[:, None]
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for span in range(0, SPANS):
            left = K - span * SPAN
            low = tl.load(h_tile, mask=at[:, None] < left, other=0.0)
            high = tl.load(h_tile + HALF, mask=at[:, None] < left - HALF, other=0.0)
            acc = _unpacked_dot(acc, w_tile, s_tile, low, high, BLOCK_N, HALF, BF16, WIDEN)
            w_tile += HALF
            s_tile += SPAN // 16
            h_tile += SPAN
        p = tl.load(weight_ptr + rows, mask=live, other=0.0)
        y = tl.trans(acc) * (tl.load(ts_ptr + expert) * (1 << SHIFT)) * p[:, None]
        tl.store(y_ptr + rows[:, None] * N + n[None, :], y, mask=live[:, None] & (n < N)[None, :])


@dataclass(frozen=True)
class ExpertConfig:
    """A launch: blocks of `block_m` tokens of one expert by `block_n` rows of weights."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"block_m={self.block_m} block_n={self.block_n} warps={self.num_warps} stages={self.num_stages}"


def choose_config(tokens: int, top_k: int, experts: int, capability: int) -> ExpertConfig:
    """By the tokens an expert has where routing is even: the narrow side is what tokens pad to.

    Two sums of 64 x 64 spill where the product is mma.sync (capability 80, 86, 89, 120, 121).
    """
    block_m = min(64 if 90 <= capability < 120 else 32, max(16, triton.next_power_of_2(-(-tokens * top_k // experts))))
    return ExpertConfig(block_m, 64, 8 if block_m == 64 else 4, 4 if block_m < 64 else 3)


def blocks(ends: torch.Tensor, rows: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(expert, first row) of each block of `block_m` sorted rows that share an expert, from `ends` int32 [E].

    As many blocks as any routing of so many rows needs; the expert of those left over is E.
    """
    experts = len(ends)
    begins = torch.cat((ends.new_zeros(1), ends[:-1]))
    upto = ((ends - begins + block_m - 1) // block_m).cumsum(0)
    block = torch.arange(rows // block_m + min(experts, rows), device=ends.device)
    expert = torch.searchsorted(upto, block, right=True)
    held = expert.clamp(max=experts - 1)
    before = upto[held] - (ends - begins + block_m - 1)[held] // block_m
    return expert, begins[held].long() + (block - before) * block_m


def _packed(inputs: Tensors, name: str, x: torch.Tensor) -> Tensors:
    each = []
    for e in range(len(inputs[f"{name}_packed"])):
        parts = {f"w_{part}": inputs[f"{name}_{part}"][e] for part in ("packed", "scale", "tensor_scale")}
        each.append(layout.prepare({"x": x, **parts}))
    return {
        f"{name}_w": torch.stack([p["w"] for p in each]),
        f"{name}_s": torch.stack([p["w_scale"] for p in each]),
        f"{name}_ts": inputs[f"{name}_tensor_scale"],
    }


def prepare(inputs: Tensors) -> dict[str, Any]:
    """Weights in the paired layout."""
    names = ["gate_up", "down"] + ["shared_gate_up", "shared_down"] * ("shared_gate" in inputs)
    kept: dict[str, Any] = {"k": int(inputs["top_k"])}
    for name in names:
        kept |= _packed(inputs, name, inputs["x"])
    return kept | {key: inputs[key] for key in ("shared_gate",) if key in inputs}


def _experts(
    args: dict[str, Any], prefix: str, x: torch.Tensor, token: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor,
    config: ExpertConfig,
) -> torch.Tensor:  # fmt: skip
    """float32 [rows, H]: what each sorted row's expert gives for its token, times its weight."""
    up_w, down_w = args[f"{prefix}gate_up_w"], args[f"{prefix}down_w"]
    experts, inner, width, rows = len(ends), up_w.shape[1] // 2, down_w.shape[1], len(token)
    expert, start = blocks(ends, rows, config.block_m)
    bf16 = x.dtype != torch.float16 and not interpreted()
    shared = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "SPAN": SPAN, "BF16": bf16,
        "SHIFT": BF16_SHIFT if bf16 else FP16_SHIFT, "WIDEN": interpreted(), "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }  # fmt: skip
    h = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
    up_kernel[(len(expert), triton.cdiv(inner, config.block_n))](
        x, token, up_w, args[f"{prefix}gate_up_s"], args[f"{prefix}gate_up_ts"], expert, start, ends, h, experts, inner,
        x.shape[1], up_w.shape[2] // HALF, **shared,
    )  # fmt: skip
    y = torch.empty(rows, width, dtype=torch.float32, device=x.device)
    down_kernel[(len(expert), triton.cdiv(width, config.block_n))](
        h, weight, down_w, args[f"{prefix}down_s"], args[f"{prefix}down_ts"], expert, start, ends, y, experts, width,
        inner, down_w.shape[2] // HALF, **shared,
    )  # fmt: skip
    return y


def run(args: dict[str, Any], out: Tensors) -> None:
    """Route, sort, two grouped products, sum; the shared expert is a group of one."""
    x, tokens = args["x"], len(args["x"])
    experts = len(args["down_w"])
    chosen, token, weight, ends, back = torch_grouped.sorted_by_expert(args["logits"], args["k"], experts)
    here = capability_of(x)
    config = choose_config(tokens, args["k"], experts, here)
    total = _experts(args, "", x, token, weight, ends, config)[back].view(*chosen.shape, -1).sum(1)
    if "shared_gate" in args:
        every = torch.arange(tokens, device=x.device)
        share = torch.sigmoid(x.float() @ args["shared_gate"].float())
        whole = torch.full((1,), tokens, dtype=torch.int32, device=x.device)
        total += _experts(args, "shared_", x, every, share, whole, choose_config(tokens, 1, 1, here))
    out["y"].copy_(total)


def _config(workload: Workload) -> str:
    major, minor = asked_capability.get() or (9, 0)
    return str(choose_config(workload["T"], workload["top_k"], workload["experts"], 10 * major + minor))


def _builds(capability: int) -> tuple[Build, ...]:
    """At the sizes of Qwen3.6-35B-A3B, for few tokens and for many."""
    made = []
    for tokens in (8, 2048):
        config = choose_config(tokens, 8, 256, capability)
        for kernel, first, last in (
            (up_kernel, ("x:bf16", "token:i64"), "h:bf16"), (down_kernel, ("h:bf16", "weight:fp32"), "y:fp32"),
        ):  # fmt: skip
            kinds = dict(
                pair.split(":")
                for pair in (*first, "w:u8", "s:u8", "ts:fp32", "expert:i64", "start:i64", "end:i32", last)
            )
            constexprs = {
                "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "SPAN": SPAN, "BF16": True, "SHIFT": BF16_SHIFT,
                "WIDEN": False,
            }  # fmt: skip
            signature = {f"{name}_ptr": f"*{kind}" for name, kind in kinds.items()}
            signature |= dict.fromkeys(("E", "N", "K", "SPANS"), "i32") | dict.fromkeys(constexprs, "constexpr")
            label = f"{kernel.fn.__name__} {config.block_n}x{config.block_m}"
            aligned = (*(f"{name}_ptr" for name in kinds), "N", "K")
            made.append(
                Build(label, kernel, signature, constexprs, config.num_warps, config.num_stages, aligned=aligned)
            )
    return tuple(made)


CANDIDATES = (
    Candidate(
        "triton_experts", "nvfp4-w4a16", run, Needs(triton="3.6"), prepare=prepare, builds=_builds, config=_config
    ),
)
