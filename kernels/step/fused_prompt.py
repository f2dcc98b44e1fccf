"""What stands ahead of a prompt's recurrence: a short causal convolution with SiLU, the split by heads, and the gates.

Three launches for the library's dozen and more: its convolution wants channels first, so what it takes and gives is
copied, and what it gives is split into three copies. Here a program has a head's channels of T_BLOCK tokens, a few
runs of RUN beside each other, and goes along them with the last three rows in registers; what lies before the prompt
comes from the sequence's row of the pool. Where a sequence begins inside the block, each token reads its last four rows
instead. The rows that the next step needs are left by a launch of its own, since other programs still read the old
ones. Computing is float32 and rounds once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.common import Build, interpreted
from kernels.gdn.triton_decode_conv import gate_kernel
from kernels.rounding import round_output
from kernels.step.triton_fused import build

T_BLOCK, RUN, GATES = 64, 8, 256  # tokens of a program, of them one after the other; gates of one
TAPS = tl.constexpr(4)


@triton.jit
def filtered(a, b, c, d, w0, w1, w2, w3):
    """SiLU of four rows times their taps, the oldest first: float32."""
    y = a.to(tl.float32) * w0 + b.to(tl.float32) * w1 + c.to(tl.float32) * w2 + d.to(tl.float32) * w3
    return y * tl.sigmoid(y)


@triton.jit
def row_of(mixed_ptr, token, held, pitch, c):
    """Rows [n, D] of these tokens, zeros where not held."""
    return tl.load(mixed_ptr + token.to(tl.int64)[:, None] * pitch + c[None, :], mask=held[:, None], other=0.0)


@triton.jit
def row_back(mixed_ptr, conv_ptr, token, held, place, row, back, pitch, C, c):
    """Rows [n, D], each `back` tokens ahead of these: the pool's where their sequence has none there."""
    new = row_of(mixed_ptr, token - back, held & (place >= back), pitch, c)
    at = (row.to(tl.int64) * (TAPS - 1) + place + TAPS - 1 - back)[:, None] * C + c[None, :]
    return new + tl.load(conv_ptr + at, mask=(held & (place < back))[:, None], other=0.0)  # one of the two is there


@triton.jit
def put(out_ptr, token, held, width, d, y, INTERPRETED: tl.constexpr):
    """y [n, D] to these tokens' rows."""
    at = out_ptr + token.to(tl.int64)[:, None] * width + d[None, :]
    tl.store(at, round_output(y, out_ptr.dtype.element_ty, INTERPRETED), mask=held[:, None])


@triton.jit
def prompt_conv_kernel(
    mixed_ptr,  # [tokens, C] of rows `pitch` apart, C = (2 Hk + Hv) D
    weight_ptr,  # [C, TAPS]
    conv_ptr,  # [rows, TAPS - 1, C]: what lies before each sequence, oldest first
    rows_ptr,  # i32 [tokens]: the token's sequence's row
    places_ptr,  # i32 [tokens]: its place in that sequence's new tokens
    q_ptr,  # [tokens, Hk, D]
    k_ptr,  # [tokens, Hk, D]
    v_ptr,  # [tokens, Hv, D]
    tokens,
    pitch,
    C,
    Hk,
    Hv,
    D: tl.constexpr,
    T_BLOCK: tl.constexpr,
    RUN: tl.constexpr,  # a multiple of TAPS
    INTERPRETED: tl.constexpr,
):
    RUNS: tl.constexpr = T_BLOCK // RUN
    head, base = tl.program_id(0), tl.program_id(1) * T_BLOCK
    d, lane = tl.arange(0, D), tl.arange(0, RUNS)
    c = head * D + d
    w0 = tl.load(weight_ptr + c * TAPS).to(tl.float32)[None, :]
    w1 = tl.load(weight_ptr + c * TAPS + 1).to(tl.float32)[None, :]
    w2 = tl.load(weight_ptr + c * TAPS + 2).to(tl.float32)[None, :]
    w3 = tl.load(weight_ptr + c * TAPS + 3).to(tl.float32)[None, :]
    width = tl.where(head < 2 * Hk, Hk, Hv) * D
    out_ptr = tl.where(
        head < Hk, q_ptr + head * D, tl.where(head < 2 * Hk, k_ptr + (head - Hk) * D, v_ptr + (head - 2 * Hk) * D)
    )
    last = tl.minimum(base + T_BLOCK, tokens) - 1
    first_place = tl.load(places_ptr + base)
    if tl.load(places_ptr + last) - first_place == last - base:  # one sequence, in runs side by side
        run = base + lane * RUN
        held, place, row = run < tokens, first_place + lane * RUN, tl.load(rows_ptr + base)
        x0 = row_back(mixed_ptr, conv_ptr, run, held, place, row, 3, pitch, C, c)
        x1 = row_back(mixed_ptr, conv_ptr, run, held, place, row, 2, pitch, C, c)
        x2 = row_back(mixed_ptr, conv_ptr, run, held, place, row, 1, pitch, C, c)
        for i in tl.static_range(0, RUN, TAPS):
            x3 = row_of(mixed_ptr, run + i, run + i < tokens, pitch, c)
            x4 = row_of(mixed_ptr, run + i + 1, run + i + 1 < tokens, pitch, c)
            x5 = row_of(mixed_ptr, run + i + 2, run + i + 2 < tokens, pitch, c)
            x6 = row_of(mixed_ptr, run + i + 3, run + i + 3 < tokens, pitch, c)
            put(out_ptr, run + i, run + i < tokens, width, d, filtered(x0, x1, x2, x3, w0, w1, w2, w3), INTERPRETED)
            y = filtered(x1, x2, x3, x4, w0, w1, w2, w3)
            put(out_ptr, run + i + 1, run + i + 1 < tokens, width, d, y, INTERPRETED)
            y = filtered(x2, x3, x4, x5, w0, w1, w2, w3)
            put(out_ptr, run + i + 2, run + i + 2 < tokens, width, d, y, INTERPRETED)
            y = filtered(x3, x4, x5, x6, w0, w1, w2, w3)
            put(out_ptr, run + i + 3, run + i + 3 < tokens, width, d, y, INTERPRETED)
            x0, x1, x2 = x4, x5, x6
    else:
        for start in tl.range(0, T_BLOCK, RUNS):
            token = base + start + lane
            here = token < tokens
            places, rows = tl.load(places_ptr + token, mask=here), tl.load(rows_ptr + token, mask=here)
            r0 = row_back(mixed_ptr, conv_ptr, token, here, places, rows, 3, pitch, C, c)
            r1 = row_back(mixed_ptr, conv_ptr, token, here, places, rows, 2, pitch, C, c)
            r2 = row_back(mixed_ptr, conv_ptr, token, here, places, rows, 1, pitch, C, c)
            r3 = row_of(mixed_ptr, token, here, pitch, c)
            put(out_ptr, token, here, width, d, filtered(r0, r1, r2, r3, w0, w1, w2, w3), INTERPRETED)


@triton.jit
def conv_state_kernel(
    mixed_ptr,  # [tokens, C] of rows `pitch` apart
    conv_ptr,  # [rows, TAPS - 1, C]
    state_rows_ptr,  # i32 [sequences]
    bounds_ptr,  # i32 [sequences + 1]
    pitch,
    C,
    BLOCK: tl.constexpr,
):
    sequence, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held, kept = c < C, tl.arange(0, TAPS)  # of TAPS rows the last is none
    first, last = tl.load(bounds_ptr + sequence), tl.load(bounds_ptr + sequence + 1)
    pool = conv_ptr + tl.load(state_rows_ptr + sequence).to(tl.int64) * (TAPS - 1) * C
    count = last - first
    source = count + kept  # of the rows that were there and the new ones, behind each other
    is_row = kept < TAPS - 1
    old = tl.load(
        pool + source[:, None] * C + c[None, :], mask=(is_row & (source < TAPS - 1))[:, None] & held[None, :], other=0.0
    )
    new = tl.load(
        mixed_ptr + (first + source - (TAPS - 1)).to(tl.int64)[:, None] * pitch + c[None, :],
        mask=(is_row & (source >= TAPS - 1))[:, None] & held[None, :], other=0.0,
    )  # fmt: skip
    tl.store(pool + kept[:, None] * C + c[None, :], old + new, mask=is_row[:, None] & held[None, :])


def convolved(
    mixed: torch.Tensor, weight: torch.Tensor, conv: torch.Tensor, rows: torch.Tensor, places: torch.Tensor,
    state_rows: torch.Tensor, bounds: torch.Tensor, heads_k: int, heads_v: int, dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """q, k [tokens, Hk, D] and v [tokens, Hv, D] of mixed [tokens, C], packed sequences whose last rows conv keeps.

    mixed: may be columns of a wider tensor; weight: [C, TAPS]; conv: [pool's rows, TAPS - 1, C]; rows, places: int32 of
    each token; state_rows, bounds: int32 of each sequence.
    """
    (tokens, channels), pitch = mixed.shape, mixed.stride(0)
    q, k = (torch.empty(tokens, heads_k, dim, dtype=mixed.dtype, device=mixed.device) for _ in range(2))
    v = torch.empty(tokens, heads_v, dim, dtype=mixed.dtype, device=mixed.device)
    prompt_conv_kernel[(2 * heads_k + heads_v, triton.cdiv(tokens, T_BLOCK))](
        mixed, weight, conv, rows, places, q, k, v, tokens, pitch, channels, heads_k, heads_v, D=dim, T_BLOCK=T_BLOCK,
        RUN=RUN, INTERPRETED=interpreted(), num_warps=4,
    )  # fmt: skip
    block = 1024
    conv_state_kernel[(len(state_rows), triton.cdiv(channels, block))](
        mixed, conv, state_rows, bounds, pitch, channels, BLOCK=block, num_warps=4
    )
    return q, k, v


def gates(
    a: torch.Tensor, b: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """g = -exp(rate) softplus(a + bias) and beta = sigmoid(b), [tokens, Hv] float32, from a and b [tokens, Hv]."""
    g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    gate_kernel[(triton.cdiv(a.numel(), GATES),)](
        a, b, rate, bias, g, beta, a.numel(), HV=a.shape[1], BLOCK=GATES, num_warps=2
    )
    return g, beta


def builds(capability: int) -> tuple[Build, ...]:
    """At the sizes of Qwen3.6-27B."""
    return (
        build(
            "prompt_conv 10240", prompt_conv_kernel,
            "mixed:bf16 weight:bf16 conv:bf16 rows:i32 places:i32 q:bf16 k:bf16 v:bf16",
            ("tokens", "pitch", "C", "Hk", "Hv"), 4, D=128, T_BLOCK=T_BLOCK, RUN=RUN,
        ),
        build(
            "conv_state 10240", conv_state_kernel, "mixed:bf16 conv:bf16 state_rows:i32 bounds:i32", ("pitch", "C"), 4,
            BLOCK=1024,
        ),
    )  # fmt: skip
