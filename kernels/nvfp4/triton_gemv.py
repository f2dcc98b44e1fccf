"""W4A16 for few rows: one kernel that reads every weight byte once and keeps all rows of x in flight beside it.

A thread owns sixteen consecutive bytes of a weight row in the paired layout of `layout.py`: sixteen low nibbles, which
are one scale group, and sixteen high nibbles, which are another. It multiplies them by the two matching runs of x for
each row of x, sums inside the thread, applies the two scales to the two sums (not to 32 weights), and only after the
whole of K are the threads of a row summed across. Decoding goes through fp16 (exact, see `decode.py`) and the products
and sums are float32, for bf16 and fp16 x alike, so this kernel is the same arithmetic on the CPU and on the GPU.

Up to ROWS_MAX rows of x are served by one pass over the weights; more rows repeat the pass along the grid's second
axis, which is what the route is there to prevent. CUDA cores do 2 flops per weight and row: on an H200 (about 60
TFLOP/s in float32) eight rows already cost more than the read, so the tensor-core product should take over early.

Given up: splitting K across CTAs (needs a second pass or atomics). N = 5120 makes 320 to 640 CTAs, enough for any part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.common import Build, Candidate, Needs, Tensors, Work, Workload, interpreted
from kernels.nvfp4.decode import e2m1_to_fp16, ue4m3_to_fp16
from kernels.nvfp4.layout import HALF, SPAN, group_of, prepare
from kernels.rounding import round_output

ROWS_MAX = 8


@triton.jit
def gemv_kernel(
    x_ptr,  # [M, K] bf16 or fp16, row stride K
    w_ptr,  # uint8 [N, SPANS * 64], paired nibbles
    s_ptr,  # uint8 [N, SPANS * 128 / GROUP], low and high halves of a run interleaved
    ts_ptr,  # float32 [1]
    y_ptr,  # [M, N], dtype of x
    M,
    N,
    K,
    SPANS,  # K padded / 128
    ROWS: tl.constexpr,  # rows of x per pass, a power of two
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,  # 16-byte chunks of a weight row per trip
    INTERPRETED: tl.constexpr,
    GROUP: tl.constexpr = 16,  # weights that share a scale: 16 e4m3 (NVFP4) or 32 e8m0 (MXFP4)
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first_m = tl.program_id(1) * ROWS
    row = (n % N).to(tl.int64)
    # Everything large is two-dimensional and x is one-dimensional: a [None, :] then moves x (1 KB) between threads, and
    # never the weights. Three- and four-dimensional forms did the opposite (NOTES.md, dead ends).
    byte = tl.arange(0, 16 * CHUNKS)
    chunk = tl.arange(0, CHUNKS)
    k_low = byte // 64 * 128 + byte % 64  # k of the low nibbles; the high ones are 64 further
    w_tile = w_ptr + row[:, None] * (SPANS * 64) + byte[None, :]
    # A chunk's low scale, its high one beside it; with groups of 32 two chunks share them.
    s_tile = s_ptr + row[:, None] * (SPANS * (128 // GROUP)) + 2 * (chunk // (GROUP // 16))[None, :]

    accs = (tl.zeros((BLOCK_N, CHUNKS), dtype=tl.float32),) * ROWS
    for first in range(0, SPANS * 4, CHUNKS):
        held = chunk < SPANS * 4 - first
        w = tl.load(w_tile, mask=(byte < SPANS * 64 - first * 16)[None, :], other=0)
        s_low, s_high = tl.load(s_tile, mask=held[None, :], other=0), tl.load(s_tile + 1, mask=held[None, :], other=0)
        if GROUP == 16:
            s_low, s_high = ue4m3_to_fp16(s_low).to(tl.float32), ue4m3_to_fp16(s_high).to(tl.float32)
        else:  # e8m0 is the exponent byte of float32
            s_low = (s_low.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
            s_high = (s_high.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
        w_low = e2m1_to_fp16(w).to(tl.float32)
        w_high = e2m1_to_fp16(w >> 4).to(tl.float32)
        k = first * 32 + k_low
        summed = ()
        for r in tl.static_range(ROWS):
            x_tile = x_ptr + min(first_m + r, M - 1).to(tl.int64) * K + k
            x_low = tl.load(x_tile, mask=k < K, other=0.0).to(tl.float32)
            x_high = tl.load(x_tile + 64, mask=k < K - 64, other=0.0).to(tl.float32)
            sum_low = tl.sum(tl.reshape(w_low * x_low[None, :], (BLOCK_N, CHUNKS, 16)), axis=2)
            sum_high = tl.sum(tl.reshape(w_high * x_high[None, :], (BLOCK_N, CHUNKS, 16)), axis=2)
            total = accs[r] + sum_low * s_low + sum_high * s_high
            # Triton's tuples grow by + and have no star (RUF005); mypy takes () for a tuple that stays empty.
            summed = summed + (total,)  # type: ignore[assignment]  # noqa: RUF005
        accs = summed
        w_tile += 16 * CHUNKS
        s_tile += 32 * CHUNKS // GROUP

    # Codes were decoded as value * 2^-14, e4m3 scales as scale * 2^-8, e8m0 ones as they are.
    scale = tl.load(ts_ptr) * (4194304.0 if GROUP == 16 else 16384.0)  # 2^22 or 2^14
    for r in tl.static_range(ROWS):
        m = first_m + r
        y = round_output(tl.sum(accs[r], axis=1) * scale, y_ptr.dtype.element_ty, INTERPRETED)
        tl.store(y_ptr + m.to(tl.int64) * N + n, y, mask=n < tl.where(m < M, N, 0))


@dataclass(frozen=True)
class GemvConfig:
    """A launch: `rows` of x per pass, `block_n` weight rows a CTA, `chunks` of 16 bytes of each row per trip."""

    rows: int
    block_n: int
    chunks: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return (
            f"rows={self.rows} block_n={self.block_n} chunks={self.chunks} warps={self.num_warps} "
            f"stages={self.num_stages}"
        )


def choose_config(m: int, n: int) -> GemvConfig:
    """The launch for `m` rows of x and `n` weight rows.

    A warp covers 512 consecutive bytes of a weight row (32 chunks). For one row of x a thread holds four weight rows,
    64 bytes in flight; with more it holds one, because the accumulators and the values of x take the registers.
    """
    rows = min(ROWS_MAX, triton.next_power_of_2(m))
    block_n = {1: 16, 2: 8, 4: 8, 8: 8}[rows]
    return GemvConfig(rows, block_n, chunks=32, num_warps=4 if rows == 1 else 8, num_stages=2)


def launch(args: Tensors, x: torch.Tensor, y: torch.Tensor, rows_per_pass: int = ROWS_MAX) -> None:
    """y[M, N] = x[M, K] @ w^T in one launch; x and y contiguous, weights from `layout.prepare` (its x is not used).

    rows_per_pass: rows of x that share one pass over the weights; 1 reads the weights once for every row.
    """
    w = args["w"]
    (m, k), n = x.shape, w.shape[0]
    if not x.is_contiguous() or x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"x is {x.dtype} with strides {x.stride()}; pass a contiguous bf16 or fp16 [M, K]")
    if not 0 <= 2 * w.shape[1] - k < SPAN:
        raise ValueError(
            f"x has K={k} but the weights hold K={2 * w.shape[1]} (padded to {SPAN}); pass a matching pair"
        )
    config = choose_config(min(m, rows_per_pass), n)
    grid = (triton.cdiv(n, config.block_n), triton.cdiv(m, config.rows))
    gemv_kernel[grid](
        x,
        w,
        args["w_scale"],
        args["w_tensor_scale"],
        y,
        m,
        n,
        k,
        w.shape[1] // HALF,
        ROWS=config.rows,
        BLOCK_N=config.block_n,
        CHUNKS=config.chunks,
        INTERPRETED=interpreted(),
        GROUP=group_of(args),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def run(args: Tensors, out: Tensors) -> None:
    launch(args, args["x"], out["y"])


def _refuses(workload: Workload) -> str:
    m = workload["M"]
    return "" if m <= 2 * ROWS_MAX else f"M={m} > {2 * ROWS_MAX}: the weights would be read {-(-m // ROWS_MAX)} times"


def _config(workload: Workload) -> str:
    return str(choose_config(workload["M"], workload["N"]))


def work(workload: Workload, sms: int) -> Work:
    """Products on CUDA cores, a pass over the weights for every `rows` of x."""
    m, n, k = (int(workload[axis]) for axis in "MNK")
    rows = choose_config(m, n).rows
    passes = -(-m // rows)
    weights = passes * n * k / sms
    moved = passes * n * k * 9 / 16 + 2.0 * m * (k + n)
    return Work(
        {"bytes": moved, "unpack": weights / 32, "multiply": weights * rows / 128}, {"launches": 1.0, "row": k / 4}
    )


def _builds(capability: int) -> tuple[Build, ...]:
    builds = []
    for m, dtype in ((1, "bf16"), (1, "fp16"), (4, "bf16"), (8, "bf16")):
        config = choose_config(m, 17408)
        signature = {"x_ptr": f"*{dtype}", "w_ptr": "*u8", "s_ptr": "*u8", "ts_ptr": "*fp32", "y_ptr": f"*{dtype}"}
        signature |= dict.fromkeys(("M", "N", "K", "SPANS"), "i32")
        constexprs = {"ROWS": config.rows, "BLOCK_N": config.block_n, "CHUNKS": config.chunks, "INTERPRETED": False}
        constexprs["GROUP"] = 16
        builds.append(
            Build(
                label=f"gemv {dtype} rows {config.rows} block_n {config.block_n}",
                kernel=gemv_kernel,
                signature=signature | dict.fromkeys(constexprs, "constexpr"),
                constexprs=constexprs,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                aligned=("x_ptr", "w_ptr", "s_ptr", "ts_ptr", "y_ptr", "N", "K"),
            )
        )
    return tuple(builds)


CANDIDATES = (
    Candidate(
        name="triton_gemv",
        precision="nvfp4-w4a16",
        run=run,
        needs=Needs(triton="3.6"),
        prepare=prepare,
        refuses=_refuses,
        builds=_builds,
        config=_config,
        work=work,
    ),
)
