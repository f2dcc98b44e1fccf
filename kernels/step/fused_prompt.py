"""What stands ahead of a prompt's recurrence: a short causal convolution with SiLU, the split by heads, and the gates.

Three launches for the library's dozen and more: its convolution wants channels first, so what it takes and gives is
copied, and what it gives is split into three copies. Here a program has a head's channels of some tokens and reads each
of their last four rows, which L2 has; what lies before the prompt comes from the sequence's row of the pool. The rows
that the next step needs are left by a launch of its own, since other programs still read the old ones. Computing is
float32 and rounds once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.common import Build, interpreted
from kernels.gdn.triton_decode_conv import gate_kernel
from kernels.rounding import round_output
from kernels.step.triton_fused import build

T_BLOCK, GATES = 32, 256  # tokens of a program; gates of one
TAPS = 4


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
    TAPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    head = tl.program_id(0)
    token, c = tl.program_id(1) * T_BLOCK + tl.arange(0, T_BLOCK), head * D + tl.arange(0, D)
    here = token < tokens
    place = tl.load(places_ptr + token, mask=here, other=0)
    row = tl.load(rows_ptr + token, mask=here, other=0).to(tl.int64)
    y = tl.zeros([T_BLOCK, D], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        inside = here & (place >= back)
        new = tl.load(
            mixed_ptr + (token - back).to(tl.int64)[:, None] * pitch + c[None, :], mask=inside[:, None], other=0.0
        )
        old = tl.load(
            conv_ptr + (row * (TAPS - 1) + place + tap)[:, None] * C + c[None, :],
            mask=(here & (place < back))[:, None], other=0.0,
        )  # fmt: skip
        w = tl.load(weight_ptr + c * TAPS + tap).to(tl.float32)
        y += (new.to(tl.float32) + old.to(tl.float32)) * w[None, :]  # one of the two is there
    y = round_output(y * tl.sigmoid(y), q_ptr.dtype.element_ty, INTERPRETED)
    at = token.to(tl.int64)[:, None]
    d = tl.arange(0, D)[None, :]
    if head < Hk:
        tl.store(q_ptr + (at * Hk + head) * D + d, y, mask=here[:, None])
    elif head < 2 * Hk:
        tl.store(k_ptr + (at * Hk + head - Hk) * D + d, y, mask=here[:, None])
    else:
        tl.store(v_ptr + (at * Hv + head - 2 * Hk) * D + d, y, mask=here[:, None])


@triton.jit
def conv_state_kernel(
    mixed_ptr,  # [tokens, C] of rows `pitch` apart
    conv_ptr,  # [rows, TAPS - 1, C]
    state_rows_ptr,  # i32 [sequences]
    bounds_ptr,  # i32 [sequences + 1]
    pitch,
    C,
    TAPS: tl.constexpr,
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
        TAPS=TAPS, INTERPRETED=interpreted(), num_warps=4,
    )  # fmt: skip
    block = 1024
    conv_state_kernel[(len(state_rows), triton.cdiv(channels, block))](
        mixed, conv, state_rows, bounds, pitch, channels, TAPS=TAPS, BLOCK=block, num_warps=4
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
            ("tokens", "pitch", "C", "Hk", "Hv"), 4, D=128, T_BLOCK=T_BLOCK, TAPS=TAPS,
        ),
        build(
            "conv_state 10240", conv_state_kernel, "mixed:bf16 conv:bf16 state_rows:i32 bounds:i32", ("pitch", "C"), 4,
            TAPS=TAPS, BLOCK=1024,
        ),
    )  # fmt: skip
