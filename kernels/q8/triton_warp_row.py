"""Warps per weight row, no tensor core: int8 codes times x in float32, the block's scale on the sum of 32.

The path for few rows: one pass over the weights serves up to ROWS_MAX rows of x, and more rows repeat the pass along
the grid's second axis, which is what makes it lose. Arithmetic is exact but for the float32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from kernels.common import Build, Candidate, Needs, Tensors, Work, Workload, interpreted
from kernels.rounding import round_output

ROWS_MAX = 8
# Blocks that share a multiprocessor, by rows of a pass: 72, 72, 95 and 104 registers a thread by Triton 3.6 for sm_90.
RESIDENT = {1: 7, 2: 7, 4: 5, 8: 4}
L1_BYTES = 192 * 1024  # of 256 KB, what is not shared memory


@triton.jit
def warp_row_kernel(
    x_ptr,  # [M, K] bf16 or fp16
    w_ptr,  # int8 [N, K]
    d_ptr,  # fp16 [N, K / 32]
    y_ptr,  # [M, N]
    M,
    N,
    K,
    ROWS: tl.constexpr,  # rows of x a pass, a power of two
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,  # blocks of 32 of a weight row per trip
    INTERPRETED: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first_m = tl.program_id(1) * ROWS
    row = (n % N).to(tl.int64)
    at, chunk = tl.arange(0, 32 * CHUNKS), tl.arange(0, CHUNKS)
    accs = (tl.zeros((BLOCK_N, CHUNKS), dtype=tl.float32),) * ROWS
    for first in range(0, K, 32 * CHUNKS):
        held = first + at < K
        w = tl.load(w_ptr + row[:, None] * K + (first + at)[None, :], mask=held[None, :], other=0).to(tl.float32)
        blocks = first // 32 + chunk
        scale_at = d_ptr + row[:, None] * (K // 32) + blocks[None, :]
        d = tl.load(scale_at, mask=(blocks < K // 32)[None, :], other=0.0).to(tl.float32)
        summed = ()
        for r in tl.static_range(ROWS):
            at_x = min(first_m + r, M - 1).to(tl.int64) * K + first + at
            x = tl.load(x_ptr + at_x, mask=held, other=0.0).to(tl.float32)
            total = accs[r] + d * tl.sum(tl.reshape(w * x[None, :], (BLOCK_N, CHUNKS, 32)), axis=2)
            # Triton's tuples grow by + and have no star (RUF005); mypy takes () for a tuple that stays empty.
            summed = summed + (total,)  # type: ignore[assignment]  # noqa: RUF005
        accs = summed
    for r in tl.static_range(ROWS):
        m = first_m + r
        y = round_output(tl.sum(accs[r], axis=1), y_ptr.dtype.element_ty, INTERPRETED)
        tl.store(y_ptr + m.to(tl.int64) * N + n, y, mask=n < tl.where(m < M, N, 0))


@dataclass(frozen=True)
class RowConfig:
    """A launch: `rows` of x a pass, `block_n` weight rows a CTA, `chunks` of 32 codes of each row a trip."""

    rows: int
    block_n: int
    chunks: int
    num_warps: int

    def __str__(self) -> str:
        return f"rows={self.rows} block_n={self.block_n} chunks={self.chunks} warps={self.num_warps}"


def choose_config(m: int) -> RowConfig:
    """16 codes a thread and load: 32 blocks of 32 over two warps; more weight rows while x leaves registers free."""
    rows = min(ROWS_MAX, triton.next_power_of_2(m))
    return RowConfig(rows, {1: 8, 2: 4, 4: 4, 8: 4}[rows], chunks=32, num_warps=4)


def run(args: Tensors, out: Tensors) -> None:
    """y = x @ w^T in one launch, ceil(M / 8) passes over the weights."""
    x, w, y = args["x"], args["w_q"], out["y"]
    (m, k), n = x.shape, w.shape[0]
    config = choose_config(m)
    warp_row_kernel[(triton.cdiv(n, config.block_n), triton.cdiv(m, config.rows))](
        x, w, args["w_d"], y, m, n, k, ROWS=config.rows, BLOCK_N=config.block_n, CHUNKS=config.chunks,
        INTERPRETED=interpreted(), num_warps=config.num_warps,
    )  # fmt: skip


def _builds(capability: int) -> tuple[Build, ...]:
    builds = []
    for m in (1, 8):
        config = choose_config(m)
        signature = {"x_ptr": "*bf16", "w_ptr": "*i8", "d_ptr": "*fp16", "y_ptr": "*bf16"}
        signature |= dict.fromkeys(("M", "N", "K"), "i32")
        constexprs = {"ROWS": config.rows, "BLOCK_N": config.block_n, "CHUNKS": config.chunks, "INTERPRETED": False}
        signature |= dict.fromkeys(constexprs, "constexpr")
        aligned = ("x_ptr", "w_ptr", "d_ptr", "y_ptr", "N", "K")
        label = f"warp_row rows {config.rows}"
        builds.append(Build(label, warp_row_kernel, signature, constexprs, config.num_warps, aligned=aligned))
    return tuple(builds)


def _refuses(workload: Workload) -> str:
    passes = -(-workload["M"] // ROWS_MAX)
    return "" if passes <= 16 else f"M={workload['M']}: the weights would be read {passes} times"


def work(workload: Workload, sms: int) -> Work:
    """A chain of loads of x, each behind the one before, and products on CUDA cores, of all blocks of a multiprocessor.

    A block takes a row of x at a time: 900 clocks where nobody has brought it from memory yet, which is where a block
    starts with the first ones of its pass, and 300 where one before it has. Rows of a pass that L1 does not hold come
    from L2 again for every block: walked in a circle, they push out what is next.
    """
    m, n, k = (int(workload[axis]) for axis in "MNK")
    config = choose_config(m)
    passes, blocks, trips = -(-m // config.rows), -(-n // config.block_n), -(-k // (32 * config.chunks))
    slots = sms * RESIDENT[config.rows]
    first = sum(min(blocks, slots - one * blocks % slots) for one in range(passes)) / min(slots, passes * blocks)
    chain = trips * config.rows * (600 * first + 300 * -(-passes * blocks // slots))
    held = -(-passes * blocks // sms) * trips * config.block_n * 32.0 * config.chunks
    rows = [min(config.rows, m - one * config.rows) for one in range(passes)]
    again = sum(2.0 * k * own for own in rows if 2 * k * own > L1_BYTES) * blocks / sms
    moved = passes * n * k * 1.0625 + 2.0 * m * (k + n)
    issue = held * (1 + config.rows) / config.chunks + again / 32
    return Work({"bytes": moved, "issue": issue}, {"launches": 1.0, "chain": float(chain)})


CANDIDATES = (
    Candidate(
        name="triton_warp_row",
        precision="q8_0-w8a16",
        run=run,
        needs=Needs(triton="3.6"),
        refuses=_refuses,
        builds=_builds,
        config=lambda workload: str(choose_config(workload["M"])),
        work=work,
    ),
)
