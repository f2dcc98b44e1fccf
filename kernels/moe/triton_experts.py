"""Two grouped products on packed weights, unpacked in registers: tokens sorted by expert, a block has one expert.

    first        h = SiLU(x Wg^T) * (x Wu^T): a block reads the same rows of Wg and of Wu and keeps two sums, so that
                 gate and up never leave the chip
    second       p_e h Wd^T in float32, a row for each token and expert; the rows of a token are added up in its own
                 order behind it, so that every run gives the same bits

Which block is of which expert is worked out in torch from the sorted choice, with as many blocks as any routing may
need: nothing is asked of the host. Weights are in the layout of kernels/nvfp4/layout.py, the arithmetic is that of
kernels/nvfp4/triton_gemm.py. Given up here: blocks of one expert read its weights one after the other, and a block of
few tokens pads them to 16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.common import Build, Candidate, Needs, Tensors, Work, Workload, asked_capability, interpreted
from kernels.moe import torch_grouped
from kernels.moe.cost import block_sizes, cost
from kernels.nvfp4 import layout
from kernels.nvfp4.decode import BF16_SHIFT, FP16_SHIFT, dequantise_tile
from kernels.nvfp4.layout import HALF, SPAN
from kernels.nvfp4.triton_gemm import capability_of
from kernels.rounding import round_output

FP8_SHIFT = 3  # log2(value / operand) of weights in e4m3


@triton.jit
def round_e4m3(value, WIDEN: tl.constexpr):
    """To e4m3, nearest even, where |value| <= 448. WIDEN: float32 of 4 significant bits, without e4m3's subnormals."""
    if WIDEN:  # the interpreter's conversion loses the mantissa's carry (seen in Triton 3.9.0)
        bits = value.to(tl.float32).to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
        return bits.to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float8e4nv)


@triton.jit
def _unpacked_dot(
    acc, w_tile, s_tile, x_low, x_high, BLOCK_N: tl.constexpr, HALF: tl.constexpr, BF16: tl.constexpr,
    FP8: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_M] plus 128 values of K."""
    w = tl.load(w_tile)
    s_low, s_high = tl.split(tl.reshape(tl.load(s_tile), (BLOCK_N, HALF // 16, 2)))
    w_low = dequantise_tile(w & 15, s_low, BF16, BLOCK_N, HALF, 16)
    w_high = dequantise_tile(w >> 4, s_high, BF16, BLOCK_N, HALF, 16)
    if FP8:  # fp16 of value * 2^-7, at most 21, to e4m3 of value * 2^-3
        w_low, w_high = round_e4m3(w_low * 16.0, WIDEN), round_e4m3(w_high * 16.0, WIDEN)
    if WIDEN:
        acc += tl.dot(w_low.to(tl.float32), x_low.to(tl.float32), input_precision="ieee")
        acc += tl.dot(w_high.to(tl.float32), x_high.to(tl.float32), input_precision="ieee")
    else:
        acc = tl.dot(w_low, x_low, acc)
        acc = tl.dot(w_high, x_high, acc)
    return acc


@triton.jit
def experts_kernel(
    x_ptr,  # GATED: [T, K], else [rows, K]
    x_scale_ptr,  # f32, of a row of x; read where FP8
    token_ptr,  # i64 [rows]: the token of a sorted row; read where GATED
    weight_ptr,  # f32 [rows]: p of a sorted row; read where not
    w_ptr,  # u8 [E, N or 2 N where GATED, SPANS * HALF]
    s_ptr,  # u8 [E, the same, SPANS * SPAN / 16]
    ts_ptr,  # f32 [E]
    expert_ptr,  # i64 [blocks]; E where a block has no work
    start_ptr,  # i64 [blocks]: its first row
    end_ptr,  # i32 [E]: one behind an expert's last row
    y_ptr,  # [rows, N], f32 where not GATED
    E,
    N,
    K,
    SPANS,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    BF16: tl.constexpr,
    SHIFT: tl.constexpr,
    FP8: tl.constexpr,
    WIDEN: tl.constexpr,
):
    HALF: tl.constexpr = SPAN // 2
    expert = tl.load(expert_ptr + tl.program_id(0))
    if expert < E:
        rows = tl.load(start_ptr + tl.program_id(0)) + tl.arange(0, BLOCK_M)
        live = rows < tl.load(end_ptr + expert)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        at = tl.arange(0, HALF)
        if GATED:
            source = tl.load(token_ptr + rows, mask=live, other=0)
            row = expert * 2 * N + (n % N).to(tl.int64)  # past the end they are read again and not stored
        else:
            source = tl.where(live, rows, 0)
            row = expert * N + (n % N).to(tl.int64)
        w_tile = w_ptr + row[:, None] * (SPANS * HALF) + at[None, :]
        s_tile = s_ptr + row[:, None] * (SPANS * (SPAN // 16)) + tl.arange(0, SPAN // 16)[None, :]
        x_tile = x_ptr + source[None, :] * K + at[:, None]
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for span in range(0, SPANS):
            left = K - span * SPAN
            low = tl.load(x_tile, mask=at[:, None] < left, other=0.0)
            high = tl.load(x_tile + HALF, mask=at[:, None] < left - HALF, other=0.0)
            acc = _unpacked_dot(acc, w_tile, s_tile, low, high, BLOCK_N, HALF, BF16, FP8, WIDEN)
            if GATED:
                w_up = w_tile + N.to(tl.int64) * (SPANS * HALF)
                s_up = s_tile + N.to(tl.int64) * (SPANS * (SPAN // 16))
                up = _unpacked_dot(up, w_up, s_up, low, high, BLOCK_N, HALF, BF16, FP8, WIDEN)
            w_tile += HALF
            s_tile += SPAN // 16
            x_tile += SPAN
        scale = tl.load(ts_ptr + expert) * (1 << SHIFT)
        if FP8:
            scale = (scale * tl.load(x_scale_ptr + source))[None, :]
        acc = acc * scale
        if GATED:
            y = round_output(tl.trans(acc * tl.sigmoid(acc) * (up * scale)), y_ptr.dtype.element_ty, WIDEN)
        else:
            y = tl.trans(acc) * tl.load(weight_ptr + rows, mask=live, other=0.0)[:, None]
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


Choice = Callable[[int, int, int, int], ExpertConfig]


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
    top_k, device = int(inputs["top_k"]), inputs["down_packed"].device
    kept: dict[str, Any] = {"k": torch.zeros(top_k, dtype=torch.uint8, device=device)}  # its length: see cuda_experts
    for name in names:
        kept |= _packed(inputs, name, inputs["x"])
    return kept | {key: inputs[key] for key in ("shared_gate",) if key in inputs}


def grouped(
    args: dict[str, Any], name: str, source: torch.Tensor, token: torch.Tensor, weight: torch.Tensor,
    ends: torch.Tensor, config: ExpertConfig, kind: torch.dtype | None = None, x_scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """A product of rows sorted by expert with the weights `name`: float32 [rows, N] times weight, or h of `kind`.

    source: [T, K] with the rows' tokens in `token` for h, else [rows, K]; ends: one behind an expert's last row.
    x_scale: float32, of source's rows, which are e4m3 then.
    """
    w, rows = args[f"{name}_w"], len(token)
    n = w.shape[1] // (1 if kind is None else 2)
    expert, start = blocks(ends, rows, config.block_m)
    bf16 = source.dtype == torch.bfloat16 and not interpreted()
    shift = FP8_SHIFT if x_scale is not None else BF16_SHIFT if bf16 else FP16_SHIFT
    made = torch.empty(rows, n, dtype=kind or torch.float32, device=source.device)
    experts_kernel[(len(expert), triton.cdiv(n, config.block_n))](
        source, weight if x_scale is None else x_scale, token, weight, w, args[f"{name}_s"], args[f"{name}_ts"],
        expert, start, ends, made, len(ends), n, source.shape[1], w.shape[2] // HALF, GATED=kind is not None,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, SPAN=SPAN, BF16=bf16, SHIFT=shift, FP8=x_scale is not None,
        WIDEN=interpreted(), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return made


Layer = Callable[
    [dict[str, Any], str, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, ExpertConfig], torch.Tensor
]


def layer(
    args: dict[str, Any], prefix: str, x: torch.Tensor, token: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor,
    config: ExpertConfig,
) -> torch.Tensor:  # fmt: skip
    """float32 [rows, H]: what each sorted row's expert gives for its token, times its weight."""
    h = grouped(args, f"{prefix}gate_up", x, token, weight, ends, config, x.dtype)
    return grouped(args, f"{prefix}down", h, token, weight, ends, config)


def run(args: dict[str, Any], out: Tensors, choose: Choice | None = None, experts_of: Layer = layer) -> None:
    """Route, sort, two grouped products, sum; the shared expert is a group of one.

    choose, experts_of: instead of choose_config and layer.
    """
    choose = choose or choose_config
    x, tokens = args["x"], len(args["x"])
    experts, top_k = len(args["down_w"]), len(args["k"])
    chosen, token, weight, ends, back = torch_grouped.sorted_by_expert(args["logits"], top_k, experts)
    here = capability_of(x)
    config = choose(tokens, top_k, experts, here)
    total = experts_of(args, "", x, token, weight, ends, config)[back].view(*chosen.shape, -1).sum(1)
    if "shared_gate" in args:
        every = torch.arange(tokens, device=x.device)
        share = torch.sigmoid(x.float() @ args["shared_gate"].float())
        whole = torch.full((1,), tokens, dtype=torch.int32, device=x.device)
        total += experts_of(args, "shared_", x, every, share, whole, choose(tokens, 1, 1, here))
    out["y"].copy_(total)


def _config(workload: Workload) -> str:
    major, minor = asked_capability.get() or (9, 0)
    return str(choose_config(workload["T"], workload["top_k"], workload["experts"], 10 * major + minor))


def work(workload: Workload, sms: int) -> Work:
    """Spans of 128 k of all blocks; the sort, the sum and the shared expert are torch's launches."""
    config = choose_config(workload["T"], workload["top_k"], workload["experts"], 90)
    blocks = sum(count for _, count in block_sizes(workload, config.block_m))
    spans = sum(
        math.ceil(blocks * -(-n // config.block_n) / sms) * -(-k // SPAN) * halves
        for n, k, halves in ((workload["F"], workload["H"], 2), (workload["H"], workload["F"], 1))
    )
    rows = workload["T"] * (workload["top_k"] + (workload["shared"] > 0))
    moved = cost(workload, "nvfp4-w4a16").bytes + rows * (4.0 * workload["F"] + 8.0 * workload["H"])
    clocks = {"unpack": 16.0 * config.block_n * spans, "products": 0.5 * config.block_n * config.block_m * spans}
    return Work({"bytes": moved, **clocks}, {"launches": 30.0})


def builds(
    capability: int, choose: Choice = choose_config, asked: tuple[int, ...] = (8, 2048), fp8: bool = False
) -> tuple[Build, ...]:
    """At the sizes of Qwen3.6-35B-A3B, for few tokens and for many."""
    made = []
    for tokens in asked:
        config = choose(tokens, 8, 256, capability)
        for gated in (True, False):
            kinds = {"x": "fp8e4nv" if fp8 else "bf16", "y": "bf16", "x_scale": "fp32"}
            kinds |= {"token": "i64", "weight": "fp32", "w": "u8", "s": "u8"}
            kinds |= {"ts": "fp32", "expert": "i64", "start": "i64", "end": "i32"} | ({} if gated else {"y": "fp32"})
            constexprs = {
                "GATED": gated, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "SPAN": SPAN, "BF16": not fp8,
                "SHIFT": FP8_SHIFT if fp8 else BF16_SHIFT, "FP8": fp8, "WIDEN": False,
            }  # fmt: skip
            order = ("x", "x_scale", "token", "weight", "w", "s", "ts", "expert", "start", "end", "y")
            signature = {f"{name}_ptr": f"*{kinds[name]}" for name in order}
            signature |= dict.fromkeys(("E", "N", "K", "SPANS"), "i32") | dict.fromkeys(constexprs, "constexpr")
            label = f"{'gate_up' if gated else 'down'} {config.block_n}x{config.block_m}"
            aligned = (*(f"{name}_ptr" for name in order), "N", "K")
            made.append(
                Build(label, experts_kernel, signature, constexprs, config.num_warps, config.num_stages,
                      aligned=aligned)
            )  # fmt: skip
    return tuple(made)


CANDIDATES = (
    Candidate(
        "triton_experts",
        "nvfp4-w4a16",
        run,
        Needs(triton="3.6"),
        prepare=prepare,
        builds=builds,
        config=_config,
        work=work,
    ),
)
