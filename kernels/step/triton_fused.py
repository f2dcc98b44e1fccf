"""What stands between the large kernels, one launch each: the small kernels that every engine fuses.

    add_norm    the residual stream plus what a sublayer gives, and its RMS norm: one pass over a row
    alpha_beta  the two skinny products into a GDN layer: a program a row of the weight; of many tokens split-K, and a
                second launch that adds up
    router      a mixture's logits in float32, by the kernels of alpha_beta
    norm_gemv   add_norm and the products of alpha_beta or router behind it: each program norms for itself
    gated_norm  the norm of each GDN head times SiLU(z)
    rotate      RMS norm and rotation of q and k, and k and v appended to their pages
    gate        attention times the sigmoid of its gate
    activate    SiLU(gate) * up

Each reads and writes its rows once; computing is float32 and nothing is rounded on the way. A row is one program: at
few tokens such a kernel is its launch, which a captured graph with programmatic launch hides, and splitting rows over
more of them would add a second one. Products, recurrence and attention are torch_eager's, so the arm shows what these
are worth.

With PDL a kernel is launched programmatically (Hopper and later): it says at once that its own dependent may start, and
waits for the kernel ahead before it reads what that one wrote or writes what that one may still read. Gains and small
weights, which no kernel writes, it reads before it waits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from kernels.common import Build, Candidate, Needs, Tensors, interpreted
from kernels.rounding import float32_to_ue4m3, round_output
from kernels.step import torch_eager, wiring
from kernels.step.model import EPS
from kernels.step.wiring import Args

ELEMENTS = 1024  # of an elementwise program
# Up to so many tokens a small kernel takes what its launch takes; of more, a program has several tokens or more rows.
FEW_TOKENS, TURNED, NORMED = 128, 8, 2048
VECTOR_TOKENS = 8  # the most of a GEMV with a program a row
SPLIT_K, SPLIT_ROWS, SUMS = 128, 32, 64  # of a skinny GEMM of more, split along K: a program's K and rows; its sums


@triton.jit
def start_dependents(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_ahead(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def add_norm_kernel(
    x_ptr,  # [tokens, H]
    delta_ptr,  # [tokens, H], not read without HAS_DELTA
    gain_ptr,  # f32 [H]
    sum_ptr,  # [tokens, H] of x's type, not written without HAS_DELTA
    out_ptr,  # [tokens, H]
    H,
    EPS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    at = tl.arange(0, BLOCK)
    held = at < H
    row = tl.program_id(0).to(tl.int64) * H + at
    gain = tl.load(gain_ptr + at, mask=held, other=0.0)
    wait_ahead(PDL)
    x = tl.load(x_ptr + row, mask=held, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + row, mask=held, other=0.0).to(tl.float32)
        stored = round_output(x, sum_ptr.dtype.element_ty, INTERPRETED)
        tl.store(sum_ptr + row, stored, mask=held)
        x = stored.to(tl.float32)  # the stream is what the next sublayer adds to
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / H + EPS)
    tl.store(out_ptr + row, round_output(x * scale * gain, out_ptr.dtype.element_ty, INTERPRETED), mask=held)


@triton.jit
def store_products(x, w, out_ptr, row, token, tokens, HEADS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Of tokens x [T_BLOCK, H] and weight row w [H], both float32, to out [rows / HEADS, tokens, HEADS]."""
    y = round_output(tl.sum(x * w[None, :], axis=1), out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptr + (row // HEADS * tokens + token) * HEADS + row % HEADS, y, mask=token < tokens)


@triton.jit
def alpha_beta_kernel(
    x_ptr,  # [tokens, H]
    w_ptr,  # [2 HEADS, H]: alpha's rows, then beta's; a router's [HEADS, H]
    out_ptr,  # [2, tokens, HEADS], [tokens, HEADS]
    tokens,
    H,
    HEADS: tl.constexpr,
    T_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    row, token = tl.program_id(0), tl.program_id(1) * T_BLOCK + tl.arange(0, T_BLOCK)
    at = tl.arange(0, BLOCK)
    held, here = at < H, token < tokens
    w = tl.load(w_ptr + row.to(tl.int64) * H + at, mask=held, other=0.0).to(tl.float32)
    of = token.to(tl.int64)[:, None] * H + at[None, :]
    wait_ahead(PDL)
    x = tl.load(x_ptr + of, mask=here[:, None] & held[None, :], other=0.0).to(tl.float32)
    store_products(x, w, out_ptr, row, token, tokens, HEADS, INTERPRETED)


@triton.jit
def split_k_kernel(
    x_ptr,  # [tokens, H]
    w_ptr,  # [R, H]
    part_ptr,  # f32 [splits, tokens, R]
    tokens,
    R,
    H,
    T_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    part = tl.program_id(0)
    row, token = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(2) * T_BLOCK + tl.arange(0, T_BLOCK)
    k = part * BLOCK_K + tl.arange(0, BLOCK_K)
    of_rows, here = row < R, token < tokens
    w = tl.load(w_ptr + row[None, :] * H + k[:, None], mask=of_rows[None, :] & (k < H)[:, None], other=0.0)
    wait_ahead(PDL)
    x = tl.load(x_ptr + token[:, None] * H + k[None, :], mask=here[:, None] & (k < H)[None, :], other=0.0)
    if INTERPRETED:
        y = tl.dot(x.to(tl.float32), w.to(tl.float32), input_precision="ieee")
    else:
        y = tl.dot(x, w)
    to = part_ptr + (part * tokens + token[:, None]) * R + row[None, :]
    tl.store(to, y, mask=here[:, None] & of_rows[None, :])


@triton.jit
def split_k_sum_kernel(
    part_ptr,  # f32 [splits, tokens, R]
    out_ptr,  # [R / HEADS, tokens, HEADS]
    splits,
    tokens,
    R,
    HEADS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    at, part = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, MOST)
    held = at < tokens * R
    wait_ahead(PDL)
    each = tl.load(
        part_ptr + part[:, None] * (tokens * R) + at[None, :], mask=(part < splits)[:, None] & held[None, :], other=0.0
    )
    token, row = at // R, at % R
    y = round_output(tl.sum(each, axis=0), out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptr + (row // HEADS * tokens + token) * HEADS + row % HEADS, y, mask=held)


@triton.jit
def norm_gemv_kernel(
    x_ptr,  # [tokens, H]
    delta_ptr,  # [tokens, H], not read without HAS_DELTA
    gain_ptr,  # f32 [H]
    w_ptr,  # as of alpha_beta_kernel
    sum_ptr,  # [tokens, H] of x's type, not written without HAS_DELTA
    h_ptr,  # [tokens, H]
    out_ptr,  # as of alpha_beta_kernel
    tokens,
    H,
    EPS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HEADS: tl.constexpr,
    T_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    row, token = tl.program_id(0), tl.program_id(1) * T_BLOCK + tl.arange(0, T_BLOCK)
    at = tl.arange(0, BLOCK)
    held, here = at < H, token < tokens
    inside = here[:, None] & held[None, :]
    gain = tl.load(gain_ptr + at, mask=held, other=0.0)
    w = tl.load(w_ptr + row.to(tl.int64) * H + at, mask=held, other=0.0).to(tl.float32)
    of = token.to(tl.int64)[:, None] * H + at[None, :]
    wait_ahead(PDL)
    x = tl.load(x_ptr + of, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + of, mask=inside, other=0.0).to(tl.float32)
        stored = round_output(x, sum_ptr.dtype.element_ty, INTERPRETED)
        if row == 0:
            tl.store(sum_ptr + of, stored, mask=inside)
        x = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / H + EPS)
    h = round_output(x * scale[:, None] * gain[None, :], h_ptr.dtype.element_ty, INTERPRETED)
    if row == 0:
        tl.store(h_ptr + of, h, mask=inside)
    store_products(h.to(tl.float32), w, out_ptr, row, token, tokens, HEADS, INTERPRETED)


@triton.jit
def gated_norm_kernel(
    o_ptr,  # [tokens, Hv, D]
    gain_ptr,  # f32 [D]
    z_ptr,  # [tokens, Hv, D], tokens z_pitch elements apart
    out_ptr,  # [tokens, Hv, D]
    rows,
    heads,
    z_pitch,
    EPS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    held = (row < rows)[:, None]
    gain = tl.load(gain_ptr + tl.arange(0, D))
    wait_ahead(PDL)
    o = tl.load(o_ptr + at, mask=held, other=0.0).to(tl.float32)
    z_at = (row // heads).to(tl.int64)[:, None] * z_pitch + (row % heads)[:, None] * D + tl.arange(0, D)[None, :]
    z = tl.load(z_ptr + z_at, mask=held, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(o * o, axis=1) / D + EPS)
    y = o * scale[:, None] * gain[None, :] * z * tl.sigmoid(z)
    tl.store(out_ptr + at, round_output(y, out_ptr.dtype.element_ty, INTERPRETED), mask=held)


@triton.jit
def in_e4m3(x):
    """float32 x -> e4m3 byte, saturating."""
    return float32_to_ue4m3(tl.minimum(tl.abs(x), 448.0)) | ((x < 0).to(tl.uint8) << 7)


@triton.jit
def store_q8_0(x, held, codes_ptr, scale_ptr, T_BLOCK: tl.constexpr, D: tl.constexpr):
    """float32 x [T_BLOCK, D] as ggml's Q8_0: of 32 values largest magnitude / 127 in half, and codes, ties away from 0.

    codes_ptr, scale_ptr: each token's own; held: which are written.
    """
    blocks = tl.reshape(x, [T_BLOCK, D // 32, 32])
    d = tl.max(tl.abs(blocks), axis=2) / 127.0
    scaled = blocks * (1.0 / tl.maximum(d, 1e-38))[:, :, None]  # zeros stay zeros
    codes = tl.where(scaled < 0, -1.0, 1.0) * tl.floor(tl.abs(scaled) + 0.5)
    written = held[:, None]
    tl.store(codes_ptr[:, None] + tl.arange(0, D)[None, :], tl.reshape(codes, [T_BLOCK, D]).to(tl.int8), mask=written)
    tl.store(scale_ptr[:, None] + tl.arange(0, D // 32)[None, :], d.to(tl.float16), mask=written)


@triton.jit
def rotate_kernel(
    q_ptr,  # [tokens, Hq, 2, D]: each head's q, then its gate
    k_ptr,  # [tokens, Hkv, D]
    v_ptr,  # [tokens, Hkv, D]; of each of these three, tokens lie its pitch apart
    q_gain_ptr,  # f32 [D]
    k_gain_ptr,  # f32 [D]
    cos_ptr,  # f32 [tokens, HALF]
    sin_ptr,  # f32 [tokens, HALF]
    slots_ptr,  # i64 [tokens]: page * PAGE + place in it
    out_ptr,  # [tokens, Hq, D]
    k_cache_ptr,  # [pages, Hkv, PAGE, D], bytes with FP8, int8 with Q8_0
    v_cache_ptr,  # [pages, Hkv, PAGE, D]
    k_scale_ptr,  # f32 [Hkv] with FP8; f16 [pages, Hkv, PAGE, D / 32] with Q8_0, written with the codes
    v_scale_ptr,  # as k_scale
    tokens,
    Hq,
    Hkv,
    q_pitch,
    k_pitch,
    v_pitch,
    EPS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # pairs that turn
    PAGE: tl.constexpr,
    FP8: tl.constexpr,  # the caches are e4m3, a value its code times the head's scale; else as k and v
    Q8_0: tl.constexpr,
    T_BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    token, head = tl.program_id(0).to(tl.int64) * T_BLOCK + tl.arange(0, T_BLOCK), tl.program_id(1)
    at, held = tl.arange(0, D), token < tokens
    here = held[:, None]
    wait_ahead(PDL)
    slot = tl.load(slots_ptr + token, mask=held, other=0)
    is_q, is_v = head < Hq, head >= Hq + Hkv
    kv_head = tl.where(is_v, head - Hq - Hkv, head - Hq)
    cached = ((slot // PAGE) * Hkv + kv_head) * PAGE * D + (slot % PAGE) * D
    to = cached[:, None] + at[None, :]
    if is_v:
        v = tl.load(v_ptr + (token * v_pitch + kv_head * D)[:, None] + at[None, :], mask=here, other=0.0)
        if Q8_0:
            store_q8_0(v.to(tl.float32), held, v_cache_ptr + cached, v_scale_ptr + cached // 32, T_BLOCK, D)
        elif FP8:
            tl.store(v_cache_ptr + to, in_e4m3(v.to(tl.float32) / tl.load(v_scale_ptr + kv_head)), mask=here)
        else:
            tl.store(v_cache_ptr + to, v, mask=here)
    else:
        partner = tl.where(at < HALF, at + HALF, tl.where(at < 2 * HALF, at - HALF, at))
        source = tl.where(is_q, q_ptr + head * 2 * D, k_ptr + kv_head * D) + token * tl.where(is_q, q_pitch, k_pitch)
        gain_ptr = tl.where(is_q, q_gain_ptr, k_gain_ptr)
        x = tl.load(source[:, None] + at[None, :], mask=here, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + EPS)[:, None]
        x = x * scale * tl.load(gain_ptr + at)[None, :]
        other = tl.load(source[:, None] + partner[None, :], mask=here, other=0.0).to(tl.float32)
        other = other * scale * tl.load(gain_ptr + partner)[None, :]
        turns = here & (at < 2 * HALF)[None, :]
        pair = (token * HALF)[:, None] + tl.where(at < HALF, at, at - HALF)[None, :]
        cos = tl.load(cos_ptr + pair, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + pair, mask=turns, other=0.0)
        y = x * cos + tl.where((at < HALF)[None, :], -other, other) * sin
        if is_q:
            made = round_output(y, out_ptr.dtype.element_ty, INTERPRETED)
            tl.store(out_ptr + ((token * Hq + head) * D)[:, None] + at[None, :], made, mask=here)
        elif Q8_0:
            store_q8_0(y, held, k_cache_ptr + cached, k_scale_ptr + cached // 32, T_BLOCK, D)
        elif FP8:
            tl.store(k_cache_ptr + to, in_e4m3(y / tl.load(k_scale_ptr + kv_head)), mask=here)
        else:
            tl.store(k_cache_ptr + to, round_output(y, k_cache_ptr.dtype.element_ty, INTERPRETED), mask=here)


@triton.jit
def gate_kernel(
    o_ptr,  # [tokens, Hq, D]
    q_ptr,  # [tokens, Hq, 2, D]: each head's q, then its gate; tokens lie q_pitch apart
    out_ptr,  # [tokens, Hq, D]
    width,  # Hq D
    q_pitch,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < width
    wait_ahead(PDL)
    o = tl.load(o_ptr + token * width + column, mask=held, other=0.0).to(tl.float32)
    gate = tl.load(q_ptr + token * q_pitch + (column // D * 2 + 1) * D + column % D, mask=held, other=0.0)
    y = round_output(o * tl.sigmoid(gate.to(tl.float32)), out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptr + token * width + column, y, mask=held)


@triton.jit
def activate_kernel(
    gate_ptr,  # [tokens, F], rows gate_stride apart
    up_ptr,  # [tokens, F], rows up_stride apart
    out_ptr,  # [tokens, F]
    count,
    F,
    gate_stride,
    up_stride,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = at < count
    row, column = at // F, at % F
    wait_ahead(PDL)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=held, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=held, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + at, round_output(y, out_ptr.dtype.element_ty, INTERPRETED), mask=held)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, gain: torch.Tensor, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, H] plus delta, and the norm of that: see wiring.Parts."""
    tokens, hidden = x.shape
    summed, out = x if delta is None else torch.empty_like(x), torch.empty_like(x, dtype=torch.bfloat16)
    block = triton.next_power_of_2(hidden)
    add_norm_kernel[(tokens,)](
        x, x if delta is None else delta, gain, summed, out, hidden, EPS=EPS, HAS_DELTA=delta is not None, BLOCK=block,
        INTERPRETED=interpreted(), **launch(pdl), num_warps=_warps(block),
    )  # fmt: skip
    return summed, out


def alpha_beta(weight: torch.Tensor, x: torch.Tensor, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, H] times both weights: see wiring.Parts."""
    a, b = _skinny(weight, x, weight.shape[0] // 2, x.dtype, pdl)
    return a, b


def router(weight: torch.Tensor, x: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    """x [tokens, H] times weight [E, H], float32: see wiring.Parts."""
    return _skinny(weight, x, weight.shape[0], torch.float32, pdl)[0]


def _skinny(weight: torch.Tensor, x: torch.Tensor, heads: int, kind: torch.dtype, pdl: bool) -> torch.Tensor:
    """x [tokens, H] times weight [parts heads, H], as [parts, tokens, heads] in `kind`.

    A program of few tokens holds a row of the weight and of two tokens at once, all loads in flight: 96 rows of 10 KB
    are 0.2 us of memory, so what counts is that a program waits for it once. Of more tokens it is
    split-K: each program has 128 of K, all in flight.
    """
    (tokens, hidden), rows = x.shape, weight.shape[0]
    out, block = torch.empty(rows // heads, tokens, heads, dtype=kind, device=x.device), triton.next_power_of_2(hidden)
    if tokens <= VECTOR_TOKENS:
        together = min(2, tokens)
        alpha_beta_kernel[(rows, triton.cdiv(tokens, together))](
            x, weight, out, tokens, hidden, HEADS=heads, T_BLOCK=together, BLOCK=block, INTERPRETED=interpreted(),
            **launch(pdl), num_warps=_warps(together * block // 2),
        )  # fmt: skip
        return out
    splits, t_block = triton.cdiv(hidden, SPLIT_K), min(64, max(16, triton.next_power_of_2(tokens)))
    part = torch.empty(splits, tokens, rows, device=x.device)
    split_k_kernel[(splits, triton.cdiv(rows, SPLIT_ROWS), triton.cdiv(tokens, t_block))](
        x, weight, part, tokens, rows, hidden, T_BLOCK=t_block, ROWS=SPLIT_ROWS, BLOCK_K=SPLIT_K,
        INTERPRETED=interpreted(), **launch(pdl), num_warps=4,
    )  # fmt: skip
    split_k_sum_kernel[(triton.cdiv(tokens * rows, SUMS),)](
        part, out, splits, tokens, rows, HEADS=heads, MOST=triton.next_power_of_2(splits), BLOCK=SUMS,
        INTERPRETED=interpreted(), **launch(pdl), num_warps=4,
    )  # fmt: skip
    return out


def norm_gemv(
    x: torch.Tensor, delta: torch.Tensor | None, gain: torch.Tensor, weight: torch.Tensor, heads: int,
    kind: torch.dtype, pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(x + delta, its norm h, h times weight [parts heads, H] as [parts, tokens, heads]): see wiring.Parts."""
    (tokens, hidden), rows = x.shape, weight.shape[0]
    summed, h = x if delta is None else torch.empty_like(x), torch.empty_like(x, dtype=torch.bfloat16)
    out = torch.empty(rows // heads, tokens, heads, dtype=kind, device=x.device)
    block, together = triton.next_power_of_2(hidden), min(2, tokens)
    norm_gemv_kernel[(rows, triton.cdiv(tokens, together))](
        x, x if delta is None else delta, gain, weight, summed, h, out, tokens, hidden, EPS=EPS,
        HAS_DELTA=delta is not None, HEADS=heads, T_BLOCK=together, BLOCK=block, INTERPRETED=interpreted(),
        **launch(pdl), num_warps=_warps(together * block),
    )  # fmt: skip
    return summed, h, out


def gated_norm(o: torch.Tensor, gain: torch.Tensor, z: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    """o [tokens, Hv, D] normed by head, times SiLU(z): see wiring.Parts."""
    (tokens, heads, dim), out = o.shape, torch.empty_like(z, memory_format=torch.contiguous_format)
    rows = max(1, (512 if tokens <= FEW_TOKENS else NORMED) // dim)
    gated_norm_kernel[(triton.cdiv(tokens * heads, rows),)](
        o,
        gain,
        z,
        out,
        tokens * heads,
        heads,
        z.stride(0),
        EPS=EPS,
        D=dim,
        ROWS=rows,
        INTERPRETED=interpreted(),
        **launch(pdl),
        num_warps=4,
    )
    return out


def rotate(
    args: Args, at: str, gated: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor,
    v_cache: torch.Tensor, pdl: bool = False,
) -> torch.Tensor:  # fmt: skip
    """q normed and turned; k and v in their pages: see wiring.Parts."""
    tokens, heads_q, _, dim = gated.shape
    heads_kv, page = k_cache.shape[1:3]
    out = torch.empty(tokens, heads_q, dim, dtype=gated.dtype, device=gated.device)
    fp8, q8_0 = f"{at}k_scale" in args, f"{at}k_block" in args
    kind = "scale" if fp8 else "block"
    scales = [args[f"{at}{name}_{kind}"] for name in ("k", "v")] if fp8 or q8_0 else [args["cos"], args["cos"]]
    caches = (c.view(torch.uint8) if fp8 else c for c in (k_cache, v_cache))
    t_block = 1 if tokens <= FEW_TOKENS else TURNED
    rotate_kernel[(triton.cdiv(tokens, t_block), heads_q + 2 * heads_kv)](
        gated, k, v, args[f"{at}q_norm.weight"], args[f"{at}k_norm.weight"], args["cos"], args["sin"], args["slots"],
        out, *caches, *scales, tokens, heads_q, heads_kv, gated.stride(0), k.stride(0), v.stride(0), EPS=EPS, D=dim,
        HALF=args["cos"].shape[-1], PAGE=page,
        FP8=fp8, Q8_0=q8_0, T_BLOCK=t_block, INTERPRETED=interpreted(), **launch(pdl), num_warps=min(4, t_block),
    )  # fmt: skip
    return out


def gate(o: torch.Tensor, gated: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    """o [tokens, Hq, D] times sigmoid of its gate: see wiring.Parts."""
    out = torch.empty_like(o)
    width = o[0].numel()
    gate_kernel[(o.shape[0], triton.cdiv(width, ELEMENTS))](
        o, gated, out, width, gated.stride(0), D=o.shape[-1], BLOCK=ELEMENTS,
        INTERPRETED=interpreted(), **launch(pdl),
    )  # fmt: skip
    return out.flatten(1)


def activate(gates: torch.Tensor, up: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    """SiLU(gates) * up: see wiring.Parts."""
    out = torch.empty_like(up, memory_format=torch.contiguous_format)
    activate_kernel[(triton.cdiv(up.numel(), ELEMENTS),)](
        gates,
        up,
        out,
        up.numel(),
        up.shape[-1],
        gates.stride(0),
        up.stride(0),
        BLOCK=ELEMENTS,
        INTERPRETED=interpreted(),
        **launch(pdl),
    )
    return out


def launch(pdl: bool) -> dict[str, bool]:
    """What a launch of a kernel with PDL is given; Triton's interpreter knows no programmatic one."""
    return {"PDL": True, "launch_pdl": True} if pdl and not interpreted() else {"PDL": False}


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


FUSED = replace(
    torch_eager.PLAIN,
    alpha_beta=alpha_beta,
    router=router,
    norm_gemv=norm_gemv,
    add_norm=add_norm,
    gated_norm=gated_norm,
    rotate=rotate,
    gate=gate,
    activate=activate,
)


def run(args: Args, out: Tensors) -> None:
    """One step."""
    wiring.run(FUSED, args, out)


def build(label: str, kernel: object, pointers: str, sizes: tuple[str, ...], warps: int, **constants: float) -> Build:
    """A Build of one of a step's kernels, in the form that waits. pointers: "name:type ..." without the _ptr."""
    kinds = dict(pair.split(":") for pair in pointers.split())
    known = kernel.arg_names  # type: ignore[attr-defined]
    constexprs = {name: False for name in ("PDL", "INTERPRETED") if name in known} | constants
    signature = {f"{k}_ptr": f"*{v}" for k, v in kinds.items()} | dict.fromkeys(sizes, "i32")
    signature |= dict.fromkeys(constexprs, "constexpr")
    return Build(label, kernel, signature, constexprs, warps, aligned=(*(f"{k}_ptr" for k in kinds), *sizes))


def builds(capability: int) -> tuple[Build, ...]:
    """At the sizes of Qwen3.6-27B; the router at those of Qwen3.6-35B-A3B."""
    return (
        build(
            "add_norm 5120", add_norm_kernel, "x:bf16 delta:bf16 gain:fp32 sum:bf16 out:bf16", ("H",), 16,
            EPS=EPS, HAS_DELTA=True, BLOCK=8192,
        ),
        *(
            build(
                f"alpha_beta 5120, {together} tokens", alpha_beta_kernel, "x:bf16 w:bf16 out:bf16", ("tokens", "H"),
                8 * together, HEADS=48, T_BLOCK=together, BLOCK=8192,
            )
            for together in (1, 2)
        ),
        *(
            build(
                f"norm_gemv {size} to {kind}", norm_gemv_kernel,
                f"x:bf16 delta:bf16 gain:fp32 w:bf16 sum:bf16 h:bf16 out:{kind}", ("tokens", "H"), warps, EPS=EPS,
                HAS_DELTA=True, HEADS=heads, T_BLOCK=1, BLOCK=block,
            )
            for size, block, kind, heads, warps in ((5120, 8192, "bf16", 48, 16), (2048, 2048, "fp32", 256, 4))
        ),
        build(
            "split_k 5120, 32 tokens", split_k_kernel, "x:bf16 w:bf16 part:fp32", ("tokens", "R", "H"), 4, T_BLOCK=32,
            ROWS=SPLIT_ROWS, BLOCK_K=SPLIT_K,
        ),
        build(
            "split_k_sum 5120", split_k_sum_kernel, "part:fp32 out:bf16", ("splits", "tokens", "R"), 4, HEADS=48,
            MOST=64, BLOCK=SUMS,
        ),
        build(
            "router 2048", alpha_beta_kernel, "x:bf16 w:bf16 out:fp32", ("tokens", "H"), 2, HEADS=256, T_BLOCK=1,
            BLOCK=2048,
        ),
        *(
            build(
                f"gated_norm 128, {rows} rows", gated_norm_kernel, "o:bf16 gain:fp32 z:bf16 out:bf16",
                ("rows", "heads", "z_pitch"), 4, EPS=EPS, D=128, ROWS=rows,
            )
            for rows in (4, NORMED // 128)
        ),
        *(
            build(
                f"rotate 256{name}, {t_block} tokens", rotate_kernel,
                "q:bf16 k:bf16 v:bf16 q_gain:fp32 k_gain:fp32 cos:fp32 sin:fp32 slots:i64 out:bf16 "
                f"k_cache:{cache} v_cache:{cache} k_scale:{scale} v_scale:{scale}",
                ("tokens", "Hq", "Hkv", "q_pitch", "k_pitch", "v_pitch"), min(4, t_block), EPS=EPS, D=256, HALF=32,
                PAGE=16, FP8=cache == "u8", Q8_0=cache == "i8", T_BLOCK=t_block,
            )
            for name, cache, scale in (("", "bf16", "fp32"), (" to fp8", "u8", "fp32"), (" to Q8_0", "i8", "fp16"))
            for t_block in (1, TURNED)
        ),
        build(
            "gate 256", gate_kernel, "o:bf16 q:bf16 out:bf16", ("width", "q_pitch"), 4, D=256, BLOCK=ELEMENTS
        ),
        build(
            "activate", activate_kernel, "gate:bf16 up:bf16 out:bf16", ("count", "F", "gate_stride", "up_stride"), 4,
            BLOCK=ELEMENTS,
        ),
    )  # fmt: skip


CANDIDATES = (
    Candidate(
        "triton_fused", "bf16", run, Needs(triton="3.6"), prepare=torch_eager.prepare, refuses=wiring.refuses,
        builds=builds,
    ),
)  # fmt: skip
