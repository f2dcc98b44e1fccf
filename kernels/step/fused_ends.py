"""The start and the end of a decode step, embedding and LM head: three launches of ours for ten of the library's.

    begin    embedding rows, and the rotary cosines and sines of the tokens' positions
    head     normed x [tokens, H] times the LM head [V, H]: float32 logits, and of each tile of rows the highest one
    greedy   the argmax of those: the next token and its logit

The head is one pass over its weights: a tile of rows times all tokens, up to 128, goes through the tensor cores, since
with eight tokens the multiprocessors' own multiplications would take half of the time that its bytes do. With PDL, as
in triton_fused, a program has the first slice of its rows before it waits. More than eight tokens go through tensor
maps where the GPU has them (sm_90 on), and wait first. Of equal logits the lowest token is taken, as torch.max does;
where all are NaN, some token is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.common import Build, Tensors, interpreted
from kernels.nvfp4.triton_gemm import capability_of
from kernels.step.triton_fused import build, launch, start_dependents, wait_ahead
from kernels.step.wiring import Args

FEWEST = 8  # tokens of a tile of the tensor cores
# Of the head by tokens: rows of a tile, BLOCK_K, stages and warps, picked of a dozen on an H200 in a run that left no
# rows. A slice ahead of the loop takes a stage. Capability 80 has 163 KB of shared memory, from 120 on there are 99.
TILES = ((8, (64, 256, 4, 4)), (32, (128, 128, 5, 8)), (128, (128, 64, 7, 8)))
BOXES = ((32, (128, 128, 5, 8)), (128, (128, 64, 6, 8)))  # by tensor maps


@triton.jit
def begin_kernel(
    tokens_ptr,  # i64 [tokens]
    embedding_ptr,  # [V, H]
    positions_ptr,  # i32 [tokens]
    inv_freq_ptr,  # f32 [HALF]
    x_ptr,  # [tokens, H]
    cos_ptr,  # f32 [tokens, HALF]
    sin_ptr,  # f32 [tokens, HALF]
    H,
    HALF,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    at, pair = tl.arange(0, BLOCK), tl.arange(0, PAIRS)
    frequency = tl.load(inv_freq_ptr + pair, mask=pair < HALF, other=0.0)
    wait_ahead(PDL)
    row = tl.load(embedding_ptr + tl.load(tokens_ptr + token) * H + at, mask=at < H, other=0.0)
    tl.store(x_ptr + token * H + at, row, mask=at < H)
    angle = tl.load(positions_ptr + token).to(tl.float32) * frequency
    tl.store(cos_ptr + token * HALF + pair, tl.cos(angle), mask=pair < HALF)
    tl.store(sin_ptr + token * HALF + pair, tl.sin(angle), mask=pair < HALF)


@triton.jit
def head_kernel(
    x_ptr,  # [tokens, H]
    w_ptr,  # [V, H]
    logits_ptr,  # f32 [tokens, V]
    best_ptr,  # f32 [tokens, tiles]
    best_row_ptr,  # i32 [tokens, tiles]
    tokens,
    V,
    H,
    EVEN: tl.constexpr,  # H is a multiple of BLOCK_K
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    T_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    row, token, k = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, T_BLOCK), tl.arange(0, BLOCK_K)
    here = token < tokens
    w_tile = w_ptr + tl.minimum(row, V - 1).to(tl.int64)[:, None] * H + k[None, :]
    x_tile = x_ptr + token[None, :] * H + k[:, None]
    sums = tl.zeros([ROWS, T_BLOCK], dtype=tl.float32)
    begun: tl.constexpr = BLOCK_K if PDL else 0  # a slice ahead of the loop takes the shared memory of a stage
    if PDL:
        if EVEN:
            w = tl.load(w_tile)
        else:
            w = tl.load(w_tile, mask=(k < H)[None, :], other=0.0)
        wait_ahead(PDL)
        x = tl.load(x_tile, mask=here[None, :] & (k < H)[:, None], other=0.0)
        sums = tl.dot(w, x, sums)
    for first in tl.range(begun, H, BLOCK_K, num_stages=STAGES):
        inside = first + k < H
        if EVEN:
            w = tl.load(w_tile + first)
        else:
            w = tl.load(w_tile + first, mask=inside[None, :], other=0.0)
        x = tl.load(x_tile + first, mask=here[None, :] & inside[:, None], other=0.0)
        if INTERPRETED:
            sums += tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee")
        else:
            sums = tl.dot(w, x, sums)
    write_tile(sums, tile, tiles, logits_ptr, best_ptr, best_row_ptr, tokens, V, ROWS, T_BLOCK)


@triton.jit
def head_boxes_kernel(
    x,  # tensor map of [tokens, H], boxes of T_BLOCK by BLOCK_K
    w,  # of [V, H], boxes of ROWS by BLOCK_K
    logits_ptr,  # as above
    best_ptr,
    best_row_ptr,
    tokens,
    V,
    H,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    T_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    sums = tl.zeros([ROWS, T_BLOCK], dtype=tl.float32)
    wait_ahead(PDL)
    for first in tl.range(0, H, BLOCK_K, num_stages=STAGES):
        rows, columns = w.load([tile * ROWS, first]), x.load([0, first]).T
        if INTERPRETED:
            sums += tl.dot(rows.to(tl.float32), columns.to(tl.float32), input_precision="ieee")
        else:
            sums = tl.dot(rows, columns, sums)
    write_tile(sums, tile, tiles, logits_ptr, best_ptr, best_row_ptr, tokens, V, ROWS, T_BLOCK)


@triton.jit
def write_tile(
    sums, tile, tiles, logits_ptr, best_ptr, best_row_ptr, tokens, V, ROWS: tl.constexpr, T_BLOCK: tl.constexpr
):
    """The logits of a tile's rows, and of each token the highest, with its row."""
    row, token = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, T_BLOCK)
    here, held = token < tokens, row < V
    tl.store(logits_ptr + token.to(tl.int64)[None, :] * V + row[:, None], sums, mask=held[:, None] & here[None, :])
    sums = tl.where(held[:, None], sums, float("-inf"))
    best = tl.max(sums, axis=0)
    best_row = tl.min(tl.where(sums == best[None, :], row[:, None], V - 1), axis=0)
    tl.store(best_ptr + token * tiles + tile, best, mask=here)
    tl.store(best_row_ptr + token * tiles + tile, best_row, mask=here)


@triton.jit
def greedy_kernel(
    best_ptr,  # f32 [tokens, tiles]
    best_row_ptr,  # i32 [tokens, tiles]
    token_ptr,  # i64 [tokens]
    logit_ptr,  # f32 [tokens]
    tiles,
    V,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    token, at = tl.program_id(0), tl.arange(0, BLOCK)
    held = at < tiles
    wait_ahead(PDL)
    best = tl.load(best_ptr + token * tiles + at, mask=held, other=float("-inf"))
    row = tl.load(best_row_ptr + token * tiles + at, mask=held, other=0)
    highest = tl.max(best, axis=0)
    tl.store(logit_ptr + token, highest)
    tl.store(token_ptr + token, tl.min(tl.where(best == highest, row, V - 1), axis=0).to(tl.int64))


def begin(args: Args, stream: torch.dtype, pdl: bool = False) -> Args:
    """The residual stream's first rows, as "x" in `stream`, "cos" and "sin": see wiring.Parts."""
    tokens, embedding, inv_freq = args["tokens"], args["model.embed_tokens.weight"], args["inv_freq"]
    (count,), hidden, half = tokens.shape, embedding.shape[1], inv_freq.shape[0]
    x = torch.empty(count, hidden, dtype=stream, device=tokens.device)
    cos, sin = torch.empty(2, count, 1, half, device=tokens.device)
    begin_kernel[(count,)](
        tokens, embedding, args["positions"], inv_freq, x, cos, sin, hidden, half,
        BLOCK=triton.next_power_of_2(hidden), PAIRS=triton.next_power_of_2(half), **launch(pdl), num_warps=8,
    )  # fmt: skip
    return {"x": x, "cos": cos, "sin": sin}


def head(weight: torch.Tensor, x: torch.Tensor, out: Tensors, pdl: bool = False) -> None:
    """x [tokens, H], up to 128, to logits, next_token and next_logit: see wiring.Parts."""
    (tokens, hidden), vocab = x.shape, weight.shape[0]
    capability, t_block = capability_of(x), max(FEWEST, triton.next_power_of_2(tokens))
    boxes = tokens > FEWEST and capability >= 90 and hidden % 8 == 0  # a tensor map's rows are multiples of 16 bytes
    rows, block_k, stages, warps = next(tile for most, tile in (BOXES if boxes else TILES) if tokens <= most)
    tiles = triton.cdiv(vocab, rows)
    best = torch.empty(tokens, tiles, device=x.device)
    best_row = torch.empty(tokens, tiles, dtype=torch.int32, device=x.device)
    shape = {"ROWS": rows, "BLOCK_K": block_k, "T_BLOCK": t_block, "INTERPRETED": interpreted(), "num_warps": warps}
    made = out["logits"], best, best_row, tokens, vocab, hidden
    if boxes:
        maps = (
            TensorDescriptor.from_tensor(x, [t_block, block_k]),
            TensorDescriptor.from_tensor(weight, [rows, block_k]),
        )
        head_boxes_kernel[(tiles,)](*maps, *made, STAGES=_stages(stages, capability), **shape, **launch(pdl))
    else:
        stages = _stages(stages, capability, pdl)
        head_kernel[(tiles,)](x, weight, *made, EVEN=hidden % block_k == 0, STAGES=stages, **shape, **launch(pdl))
    greedy_kernel[(tokens,)](
        best, best_row, out["next_token"], out["next_logit"], tiles, vocab, BLOCK=triton.next_power_of_2(tiles),
        **launch(pdl), num_warps=8,
    )  # fmt: skip


def _stages(stages: int, capability: int, pdl: bool = False) -> int:
    return 2 if capability >= 120 else min(stages, 6) if capability < 90 else stages - pdl


def builds(capability: int) -> tuple[Build, ...]:
    """At the sizes of Qwen3.6-27B: a vocabulary of 248,320."""
    return (
        build(
            "begin 5120", begin_kernel,
            "tokens:i64 embedding:bf16 positions:i32 inv_freq:fp32 x:bf16 cos:fp32 sin:fp32", ("H", "HALF"), 8,
            BLOCK=8192, PAIRS=32,
        ),
        *(
            build(
                f"head 5120, {most} tokens", head_kernel, "x:bf16 w:bf16 logits:fp32 best:fp32 best_row:i32",
                ("tokens", "V", "H"), warps, EVEN=True, ROWS=rows, BLOCK_K=block_k, T_BLOCK=most,
                STAGES=_stages(stages, capability),
            )
            for most, (rows, block_k, stages, warps) in TILES
        ),
        *(
            Build(
                f"head_boxes 5120, {most} tokens", head_boxes_kernel,
                {
                    "x": f"tensordesc<bf16[{most},{block_k}]>", "w": f"tensordesc<bf16[{rows},{block_k}]>",
                    "logits_ptr": "*fp32", "best_ptr": "*fp32", "best_row_ptr": "*i32", "tokens": "i32", "V": "i32",
                    "H": "i32",
                    **dict.fromkeys(("ROWS", "BLOCK_K", "T_BLOCK", "STAGES", "INTERPRETED", "PDL"), "constexpr"),
                },
                {
                    "ROWS": rows, "BLOCK_K": block_k, "T_BLOCK": most, "STAGES": _stages(stages, capability),
                    "INTERPRETED": False, "PDL": False,
                },
                warps, aligned=("logits_ptr", "best_ptr", "best_row_ptr", "tokens", "V", "H"),
            )
            for most, (rows, block_k, stages, warps) in BOXES
            if capability >= 90
        ),
        build(
            "greedy 248320", greedy_kernel, "best:fp32 best_row:i32 token:i64 logit:fp32", ("tiles", "V"), 8,
            BLOCK=4096,
        ),
    )  # fmt: skip
