"""The six kernels of the chunked pipeline, each one line of the mathematics, with tensors in memory between them.

With G the running sum of log decays inside a chunk, C tokens per chunk and S the state at the chunk's start:
    1 cumsum    G
    2 kkt       A_ij = beta_i exp(G_i - G_j) k_i . k_j                for i > j
    3 inverse   X = (I + A)^-1                                        16 -> 32 -> 64
    4 wu        W = X beta exp(G) K,  U = X beta V
    5 scan      V' = U - W S,  S <- exp(G_C) S + K^T exp(G_C - G) V'  the only sequential kernel
    6 output    O = scale (exp(G) Q S + P V'),  P_ij = exp(G_i - G_j) q_i . k_j  for i >= j
(arXiv 2412.06464 section 3.3; the split into kernels is the one that the flash-linear-attention library made common.)

All tensors are packed along tokens. `chunks` [NT, 2] int32 holds each chunk's first token and the end of its sequence,
so that a chunk never crosses into the next sequence; the last chunk of a sequence may be short. Rows beyond the end
are neither read nor written; the parts of A and X that are zero by construction are not written either, and readers
mask them, so the workspace needs no clearing. Decays, rates and norms multiply float32 values (accumulators, or X),
so that k, q and v enter the matrix units as they came.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gdn.tiles import as_format, inverse_norm, matmul, matmul_add, pair_decay, substitute_16


@triton.jit
def chunk_span(chunks, C: tl.constexpr):
    """The chunk in grid axis 0: first token (int64), row numbers [C], which exist [C], and the row to read G from.

    Rows beyond the end read the last token's G: with zero instead, exp(0 - G_j) would overflow before it is masked.
    """
    first = tl.load(chunks + 2 * tl.program_id(0))
    last = tl.load(chunks + 2 * tl.program_id(0) + 1) - first
    row = tl.arange(0, C)
    return first.to(tl.int64), row, row < last, tl.minimum(row, last - 1)


@triton.jit
def cumsum_kernel(g, running, chunks, HV: tl.constexpr, C: tl.constexpr, HEAD_TILE: tl.constexpr):
    """Grid (NT, ceil(HV / HEAD_TILE)). g, running [tokens, HV] float32."""
    first, row, live, _ = chunk_span(chunks, C)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    at = (first + row)[:, None] * HV + head[None, :]
    mask = live[:, None] & (head < HV)[None, :]
    tl.store(running + at, tl.cumsum(tl.load(g + at, mask=mask, other=0.0), axis=0), mask=mask)


@triton.jit
def kkt_kernel(
    k, running, beta, a, chunks,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    L2_NORM: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Grid (NT, HV). k [tokens, HK, D]; running, beta [tokens, HV] float32; a [tokens, HV, C] float32, i > j only."""
    first, row, live, nearest = chunk_span(chunks, C)
    head = tl.program_id(1)
    dk = tl.arange(0, D)
    k += first * HK * D + (head // (HV // HK)) * D
    k_tile = tl.load(k + row[:, None] * (HK * D) + dk[None, :], mask=live[:, None], other=0.0)
    g = tl.load(running + (first + nearest) * HV + head)
    rate = tl.load(beta + (first + row) * HV + head, mask=live, other=0.0)
    k_norm = inverse_norm(k_tile, L2_NORM)
    value = matmul(k_tile, tl.trans(k_tile), PRECISION, INTERPRETED)
    value = value * pair_decay(g, C) * (rate * k_norm)[:, None] * k_norm[None, :]
    strict = (row[:, None] > row[None, :]) & live[:, None]
    tl.store(a + (first * HV + head) * C + row[:, None] * (HV * C) + row[None, :], value, mask=strict)


@triton.jit
def load_block(a, last, HV: tl.constexpr, C: tl.constexpr, R: tl.constexpr, S: tl.constexpr):
    """Block (R, S) of 16 x 16, R > S, of the chunk's A; rows from `last` on are zero."""
    row = R * 16 + tl.arange(0, 16)
    at = row[:, None] * (HV * C) + (S * 16 + tl.arange(0, 16))[None, :]
    return tl.load(a + at, mask=(row < last)[:, None], other=0.0)


@triton.jit
def store_block(x, value, last, HV: tl.constexpr, C: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
                INTERPRETED: tl.constexpr):  # fmt: skip
    """Write block (R, S) of 16 x 16 of the chunk's inverse, rows below `last` only."""
    row = R * 16 + tl.arange(0, 16)
    at = row[:, None] * (HV * C) + (S * 16 + tl.arange(0, 16))[None, :]
    tl.store(x + at, as_format(value, x.dtype.element_ty, INTERPRETED), mask=(row < last)[:, None])


@triton.jit
def inverse_kernel(a, x, chunks, HV: tl.constexpr, C: tl.constexpr, SOLVE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Grid (NT, HV). x = (I + a)^-1, both [tokens, HV, C], 16 x 16 blocks on and below the diagonal only.

    Diagonal blocks by substitution, X_rs of a pair by -X_rr A_rs X_ss, and the lower left 32 x 32 of C = 64 by the
    same formula over 2 x 2 blocks. SOLVE is the precision of the block products.
    """
    first = tl.load(chunks + 2 * tl.program_id(0))
    last = tl.load(chunks + 2 * tl.program_id(0) + 1) - first
    offset = (first.to(tl.int64) * HV + tl.program_id(1)) * C
    a += offset
    x += offset
    BLOCKS: tl.constexpr = C // 16
    block = tl.arange(0, BLOCKS)[:, None, None]
    row = block * 16 + tl.arange(0, 16)[None, :, None]
    col = tl.arange(0, 16)[None, None, :]
    strict = (tl.arange(0, 16)[None, :, None] > col) & (row < last)
    diagonal = substitute_16(tl.load(a + row * (HV * C) + block * 16 + col, mask=strict, other=0.0))

    x00 = tl.sum(tl.where(block == 0, diagonal, 0.0), axis=0)
    store_block(x, x00, last, HV, C, 0, 0, INTERPRETED)
    if C >= 32:
        x11 = tl.sum(tl.where(block == 1, diagonal, 0.0), axis=0)
        a10 = load_block(a, last, HV, C, 1, 0)
        x10 = -matmul(x11, matmul(a10, x00, SOLVE, INTERPRETED), SOLVE, INTERPRETED)
        store_block(x, x10, last, HV, C, 1, 0, INTERPRETED)
        store_block(x, x11, last, HV, C, 1, 1, INTERPRETED)
    if C >= 64:
        x22 = tl.sum(tl.where(block == 2, diagonal, 0.0), axis=0)
        x33 = tl.sum(tl.where(block == 3, diagonal, 0.0), axis=0)
        a32 = load_block(a, last, HV, C, 3, 2)
        x32 = -matmul(x33, matmul(a32, x22, SOLVE, INTERPRETED), SOLVE, INTERPRETED)
        a21 = load_block(a, last, HV, C, 2, 1)
        a31 = load_block(a, last, HV, C, 3, 1)
        left2 = matmul(load_block(a, last, HV, C, 2, 0), x00, SOLVE, INTERPRETED)
        left2 = matmul_add(a21, x10, left2, SOLVE, INTERPRETED)
        left3 = matmul(load_block(a, last, HV, C, 3, 0), x00, SOLVE, INTERPRETED)
        left3 = matmul_add(a31, x10, left3, SOLVE, INTERPRETED)
        right2 = matmul(a21, x11, SOLVE, INTERPRETED)
        right3 = matmul(a31, x11, SOLVE, INTERPRETED)
        store_block(x, -matmul(x22, left2, SOLVE, INTERPRETED), last, HV, C, 2, 0, INTERPRETED)
        store_block(x, -matmul(x22, right2, SOLVE, INTERPRETED), last, HV, C, 2, 1, INTERPRETED)
        x30 = matmul_add(x33, left3, matmul(x32, left2, SOLVE, INTERPRETED), SOLVE, INTERPRETED)
        x31 = matmul_add(x33, right3, matmul(x32, right2, SOLVE, INTERPRETED), SOLVE, INTERPRETED)
        store_block(x, -x30, last, HV, C, 3, 0, INTERPRETED)
        store_block(x, -x31, last, HV, C, 3, 1, INTERPRETED)
        store_block(x, x22, last, HV, C, 2, 2, INTERPRETED)
        store_block(x, x32, last, HV, C, 3, 2, INTERPRETED)
        store_block(x, x33, last, HV, C, 3, 3, INTERPRETED)


@triton.jit
def wu_kernel(
    k, v, running, beta, x, w, u, chunks,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    L2_NORM: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Grid (NT, HV). k [tokens, HK, D], v [tokens, HV, D], x [tokens, HV, C]; writes w, u [tokens, HV, D]."""
    first, row, live, nearest = chunk_span(chunks, C)
    head = tl.program_id(1)
    dim = tl.arange(0, D)
    g = tl.load(running + (first + nearest) * HV + head)
    rate = tl.load(beta + (first + row) * HV + head, mask=live, other=0.0)
    causal = (row[:, None] >= row[None, :]) & live[:, None]
    x += (first * HV + head) * C
    inverse = tl.load(x + row[:, None] * (HV * C) + row[None, :], mask=causal, other=0.0).to(tl.float32)
    at_v = (first * HV + head) * D + row[:, None] * (HV * D) + dim[None, :]

    k += first * HK * D + (head // (HV // HK)) * D
    k_tile = tl.load(k + row[:, None] * (HK * D) + dim[None, :], mask=live[:, None], other=0.0)
    factor = rate * tl.exp(g) * inverse_norm(k_tile, L2_NORM)
    value = matmul(inverse * factor[None, :], k_tile, PRECISION, INTERPRETED)
    tl.store(w + at_v, as_format(value, w.dtype.element_ty, INTERPRETED), mask=live[:, None])
    v_tile = tl.load(v + at_v, mask=live[:, None], other=0.0)
    value = matmul(inverse * rate[None, :], v_tile, PRECISION, INTERPRETED)
    tl.store(u + at_v, as_format(value, u.dtype.element_ty, INTERPRETED), mask=live[:, None])


@triton.jit
def scan_kernel(
    k, w, u, running, initial_state, h, v_new, final_state, cu_seqlens, chunk_offsets,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, C: tl.constexpr, V_TILE: tl.constexpr,
    L2_NORM: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Grid (D / V_TILE, HV, sequences). Writes h [NT, HV, D, D], each chunk's state at its start, v_new
    [tokens, HV, D] and final_state [sequences, HV, D, D]. The state is held transposed, as in triton_fused."""
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first = tl.load(cu_seqlens + sequence)
    tokens = tl.load(cu_seqlens + sequence + 1) - first
    origin = first.to(tl.int64)
    row = tl.arange(0, C)
    dk = tl.arange(0, D)
    dv = tl.program_id(0) * V_TILE + tl.arange(0, V_TILE)
    k += origin * HK * D + (head // (HV // HK)) * D
    running += origin * HV + head
    base = (origin * HV + head) * D
    at_state = dk[None, :] * D + dv[:, None]  # of S^T [V_TILE, D] within one head's state
    h += (tl.load(chunk_offsets + sequence).to(tl.int64) * HV + head) * D * D
    offset = (sequence.to(tl.int64) * HV + head) * D * D
    state = tl.load(initial_state + offset + at_state).to(tl.float32)

    for start in range(0, tokens, C):
        t = start + row
        live = t < tokens
        tl.store(h + at_state, as_format(state, h.dtype.element_ty, INTERPRETED))
        h += HV * D * D
        w_tile = tl.load(w + base + t[:, None] * (HV * D) + dk[None, :], mask=live[:, None], other=0.0)
        at_v = t[None, :] * (HV * D) + dv[:, None]
        u_tile = tl.load(u + base + at_v, mask=live[None, :], other=0.0).to(tl.float32)
        k_tile = tl.load(k + t[:, None] * (HK * D) + dk[None, :], mask=live[:, None], other=0.0)
        g = tl.load(running + tl.minimum(t, tokens - 1) * HV)
        total = tl.load(running + (tl.minimum(start + C, tokens) - 1) * HV)
        update = u_tile - matmul(state, tl.trans(w_tile), PRECISION, INTERPRETED)
        tl.store(v_new + base + at_v, as_format(update, v_new.dtype.element_ty, INTERPRETED), mask=live[None, :])
        # Rows beyond the end have zero u, w and k, so that they update nothing.
        fading = tl.exp(total - g) * inverse_norm(k_tile, L2_NORM)
        state = matmul_add(update * fading[None, :], k_tile, state * tl.exp(total), PRECISION, INTERPRETED)

    tl.store(final_state + offset + at_state, as_format(state, final_state.dtype.element_ty, INTERPRETED))


@triton.jit
def output_kernel(
    q, k, running, h, v_new, o, chunks, scale,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, C: tl.constexpr, V_TILE: tl.constexpr,
    L2_NORM: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Grid (NT, HV, D / V_TILE). h [NT, HV, D, D], v_new and o [tokens, HV, D]."""
    first, row, live, nearest = chunk_span(chunks, C)
    head = tl.program_id(1)
    dk = tl.arange(0, D)
    dv = tl.program_id(2) * V_TILE + tl.arange(0, V_TILE)
    at_qk = first * HK * D + (head // (HV // HK)) * D + row[:, None] * (HK * D) + dk[None, :]
    at_v = (first * HV + head) * D + row[:, None] * (HV * D) + dv[None, :]
    q_tile = tl.load(q + at_qk, mask=live[:, None], other=0.0)
    k_tile = tl.load(k + at_qk, mask=live[:, None], other=0.0)
    g = tl.load(running + (first + nearest) * HV + head)
    q_norm = inverse_norm(q_tile, L2_NORM) * scale
    k_norm = inverse_norm(k_tile, L2_NORM)
    h += (tl.program_id(0).to(tl.int64) * HV + head) * D * D
    state = tl.load(h + dk[:, None] * D + dv[None, :])
    read = matmul(q_tile, state, PRECISION, INTERPRETED) * (tl.exp(g) * q_norm)[:, None]
    scores = matmul(q_tile, tl.trans(k_tile), PRECISION, INTERPRETED)
    scores = scores * pair_decay(g, C) * q_norm[:, None] * k_norm[None, :]
    update = tl.load(v_new + at_v, mask=live[:, None], other=0.0)
    read = matmul_add(scores, update, read, PRECISION, INTERPRETED)
    tl.store(o + at_v, as_format(read, o.dtype.element_ty, INTERPRETED), mask=live[:, None])
