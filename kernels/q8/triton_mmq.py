"""Integer tensor cores: activations quantised to int8 by blocks of 32, int8 x int8 products, scales on each 32-sum.

Two kernels a call: the quantiser of x (its time is part of the candidate's) and the product. A scale group is 32 along
K, which is one step of the integer instruction, so every step's int32 result is turned into float32 and scaled before
it is added: one conversion and two multiplies per 32 products of each output, on the CUDA cores. That, not the tensor
core, is the price of this format. For eight rows and fewer the same arithmetic runs without tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.common import Build, Candidate, Needs, Tensors, interpreted
from kernels.q8.triton_warp_row import rounded

VECTOR_MAX = 8


@triton.jit
def quantise_kernel(
    x_ptr,  # [M, K] bf16 or fp16
    q_ptr,  # int8 [M, K]
    d_ptr,  # float32 [M, K / 32]
    K,
    BLOCKS: tl.constexpr,
):
    """Codes and scales of x as ggml's Q8: d = amax / 127, halves away from zero; a block of zeros has d = 0."""
    m = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + m * K + at, mask=at < K, other=0.0).to(tl.float32)
    d = tl.max(tl.abs(x), axis=1) / 127.0
    scaled = x / tl.where(d > 0, d, 1.0)[:, None]
    code = tl.where(scaled < 0, scaled - 0.5, scaled + 0.5).to(tl.int32)  # the conversion cuts towards zero
    tl.store(q_ptr + m * K + at, code.to(tl.int8), mask=at < K)
    tl.store(d_ptr + m * (K // 32) + block, d, mask=block < K // 32)


@triton.jit
def mmq_kernel(
    q_ptr,  # int8 [M, K]
    qd_ptr,  # float32 [M, K / 32]
    w_ptr,  # int8 [N, K]
    wd_ptr,  # fp16 [N, K / 32]
    y_ptr,  # [M, N]
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BLOCK_M)
    m = tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)  # neighbours share the weights through L2
    n = tl.program_id(0) // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, 32)
    row_m, row_n = (m % M).to(tl.int64), (n % N).to(tl.int64)
    q_tile = q_ptr + row_m[:, None] * K + k[None, :]
    w_tile = w_ptr + row_n[None, :] * K + k[:, None]
    qd_tile, wd_tile = qd_ptr + row_m * (K // 32), wd_ptr + row_n * (K // 32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(0, K // 32):
        sums = tl.dot(tl.load(q_tile + block * 32), tl.load(w_tile + block * 32), out_dtype=tl.int32)
        scale_n = tl.load(wd_tile + block).to(tl.float32)
        acc += sums.to(tl.float32) * tl.load(qd_tile + block)[:, None] * scale_n[None, :]
    y = rounded(acc, y_ptr.dtype.element_ty, INTERPRETED)
    tl.store(y_ptr + m.to(tl.int64)[:, None] * N + n[None, :], y, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def mmvq_kernel(
    q_ptr,  # int8 [M, K]
    qd_ptr,  # float32 [M, K / 32]
    w_ptr,  # int8 [N, K]
    wd_ptr,  # fp16 [N, K / 32]
    y_ptr,  # [M, N]
    M,
    N,
    K,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (n % N).to(tl.int64)
    at, chunk = tl.arange(0, 32 * CHUNKS), tl.arange(0, CHUNKS)
    accs = (tl.zeros((BLOCK_N, CHUNKS), dtype=tl.float32),) * ROWS
    for first in range(0, K, 32 * CHUNKS):
        held, blocks = first + at < K, first // 32 + chunk
        w = tl.load(w_ptr + row[:, None] * K + (first + at)[None, :], mask=held[None, :], other=0).to(tl.int32)
        scale_at = wd_ptr + row[:, None] * (K // 32) + blocks[None, :]
        d = tl.load(scale_at, mask=(blocks < K // 32)[None, :], other=0.0).to(tl.float32)
        summed = ()
        for r in tl.static_range(ROWS):
            m = min(r, M - 1)
            q = tl.load(q_ptr + m * K + first + at, mask=held, other=0).to(tl.int32)
            qd = tl.load(qd_ptr + m * (K // 32) + blocks, mask=blocks < K // 32, other=0.0)
            sums = tl.sum(tl.reshape(w * q[None, :], (BLOCK_N, CHUNKS, 32)), axis=2).to(tl.float32)
            # Triton's tuples grow by + and have no star (RUF005); mypy takes () for a tuple that stays empty.
            summed = summed + (accs[r] + sums * d * qd[None, :],)  # type: ignore[assignment]  # noqa: RUF005
        accs = summed
    for r in tl.static_range(ROWS):
        y = rounded(tl.sum(accs[r], axis=1), y_ptr.dtype.element_ty, INTERPRETED)
        tl.store(y_ptr + r * N + n, y, mask=n < tl.where(r < M, N, 0))


@dataclass(frozen=True)
class MmqConfig:
    """A launch of the product: a tile of block_m rows of x by block_n weight rows; block_m 0 is the vector form."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        what = f"block_m={self.block_m}" if self.block_m else "vector"
        return f"{what} block_n={self.block_n} warps={self.num_warps} stages={self.num_stages}"


def choose_config(m: int) -> MmqConfig:
    """Vector form up to 8 rows; then the smallest tile that holds the rows, up to 128."""
    if m <= VECTOR_MAX:
        return MmqConfig(0, 4, 4, 2)
    block_m = min(128, max(16, triton.next_power_of_2(m)))
    return MmqConfig(block_m, 64 if block_m <= 32 else 128, 4 if block_m < 128 else 8, 4)


def prepare(inputs: Tensors) -> Tensors:
    """The planes, and room for the quantised activations."""
    x = inputs["x"]
    m, k = x.shape
    room = {
        "q": torch.empty(m, k, dtype=torch.int8, device=x.device),
        "q_d": torch.empty(m, k // 32, dtype=torch.float32, device=x.device),
    }
    return inputs | room


def run(args: Tensors, out: Tensors) -> None:
    """y = dequant(quant(x)) @ w^T: the quantiser, then the product."""
    x, w, y, q, q_d = args["x"], args["w_q"], out["y"], args["q"], args["q_d"]
    (m, k), n = x.shape, w.shape[0]
    config = choose_config(m)
    quantise_kernel[(m, triton.cdiv(k // 32, 32))](x, q, q_d, k, BLOCKS=32, num_warps=2)
    if config.block_m:
        grid = (triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n),)
        mmq_kernel[grid](
            q, q_d, w, args["w_d"], y, m, n, k, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            INTERPRETED=interpreted(), num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    else:
        mmvq_kernel[(triton.cdiv(n, config.block_n),)](
            q, q_d, w, args["w_d"], y, m, n, k, ROWS=triton.next_power_of_2(m), BLOCK_N=config.block_n, CHUNKS=32,
            INTERPRETED=interpreted(), num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip


def _builds(capability: int) -> tuple[Build, ...]:
    builds = []
    for m in (1, 8, 128):
        config = choose_config(m)
        signature = {"q_ptr": "*i8", "qd_ptr": "*fp32", "w_ptr": "*i8", "wd_ptr": "*fp16", "y_ptr": "*bf16"}
        signature |= dict.fromkeys(("M", "N", "K"), "i32")
        aligned = (*(name for name in signature if name.endswith("_ptr")), "N", "K")
        if config.block_m:
            constexprs: dict[str, int | bool] = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
            kernel = mmq_kernel
        else:
            constexprs = {"ROWS": m, "BLOCK_N": config.block_n, "CHUNKS": 32}
            kernel = mmvq_kernel
        constexprs["INTERPRETED"] = False
        signature |= dict.fromkeys(constexprs, "constexpr")
        label = f"mmq {config}" if config.block_m else f"mmvq rows {m}"
        builds.append(Build(label, kernel, signature, constexprs, config.num_warps, config.num_stages, aligned=aligned))
    return tuple(builds)


CANDIDATES = (
    Candidate(
        name="triton_mmq",
        precision="q8_0-w8a8",
        run=run,
        needs=Needs(triton="3.6"),
        prepare=prepare,
        builds=_builds,
        config=lambda workload: str(choose_config(workload["M"])),
    ),
)
