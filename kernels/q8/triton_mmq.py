"""Integer tensor cores: activations quantised to int8 by blocks of 32, int8 x int8 products, scales on each 32-sum.

Two kernels a call: the quantiser of x (its time is part of the candidate's) and the product. A scale group is 32 along
K, which is one step of the integer instruction, so every step's int32 result is turned into float32 and scaled before
it is added: a conversion, a product and a multiply-add for 32 products of each output, on the CUDA cores. That, not the
tensor core, is the price of this format: NOTES.md counts the issue slots. While one block scales, another's product
runs; so a tile is small enough for several blocks a multiprocessor. Scales lie transposed, [K / 32, rows]: those of x
so written by the quantiser, those of w turned at load. One row of x runs without tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.common import Build, Candidate, Needs, Tensors, Work, Workload, device_of, interpreted
from kernels.rounding import round_output

VECTOR_MAX = 1
# By block_m, the clocks that a block of 32 along K adds, relatively: NOTES.md has 620, 740 and 1,360 for three tiles at
# 16, 32 and 128; calibration-q8's lone tiles at 64 take six sevenths of those at 128.
STEP = {16: 96, 32: 112, 64: 164, 128: 208}


@triton.jit
def quantise_kernel(
    x_ptr,  # [M, K] bf16 or fp16
    q_ptr,  # int8 [M, K]
    d_ptr,  # float32 [K / 32, M]
    M,
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
    tl.store(d_ptr + block.to(tl.int64) * M + m, d, mask=block < K // 32)


@triton.jit
def mmq_kernel(
    q_ptr,  # int8 [M, K]
    qd_ptr,  # float32 [K / 32, M]
    w_ptr,  # int8 [N, K]
    wd_ptr,  # float32 [K / 32, N]: side by side, and 4 bytes a thread, which is what the pipeliner fetches ahead
    y_ptr,  # [M, N]
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,  # scale blocks a trip of the loop; divides K / 32
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """y^T tile [BLOCK_N, BLOCK_M]: weight rows on the wide side of the instruction, so few tokens cost no padding."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    m = tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)  # neighbours share the weights through L2
    n = tl.program_id(0) // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, 32)
    # Codes past the end wrap; their scales are masked instead, because m % M would hide that scales lie side by side.
    q_tile = q_ptr + (m % M).to(tl.int64)[None, :] * K + k[:, None]
    w_tile = w_ptr + (n % N).to(tl.int64)[:, None] * K + k[None, :]
    qd_tile, wd_tile, has_m, has_n = qd_ptr + m, wd_ptr + n, m < M, n < N
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    # The stages stand at the loop, because the pipeliner else fetches ahead only what a product reads, not the scales.
    for _ in tl.range(0, K // 32, STEPS, num_stages=STAGES):
        for step in tl.static_range(STEPS):
            sums = tl.dot(tl.load(w_tile + 32 * step), tl.load(q_tile + 32 * step), out_dtype=tl.int32).to(tl.float32)
            d_m = tl.load(qd_tile + step * M, mask=has_m, other=0.0)
            d_n = tl.load(wd_tile + step * N, mask=has_n, other=0.0)
            acc += (sums * d_m[None, :]) * d_n[:, None]  # a product and a multiply-add for each 32 products
        q_tile += 32 * STEPS
        w_tile += 32 * STEPS
        qd_tile += M * STEPS
        wd_tile += N * STEPS
    y = round_output(tl.trans(acc), y_ptr.dtype.element_ty, INTERPRETED)
    tl.store(y_ptr + m.to(tl.int64)[:, None] * N + n[None, :], y, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def mmvq_kernel(
    q_ptr,  # int8 [M, K]
    qd_ptr,  # float32 [K / 32, M]
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
    first_m = tl.program_id(1) * ROWS
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
            m = min(first_m + r, M - 1)
            q = tl.load(q_ptr + m.to(tl.int64) * K + first + at, mask=held, other=0).to(tl.int32)
            qd = tl.load(qd_ptr + blocks * M + m, mask=blocks < K // 32, other=0.0)
            sums = tl.sum(tl.reshape(w * q[None, :], (BLOCK_N, CHUNKS, 32)), axis=2).to(tl.float32)
            # Triton's tuples grow by + and have no star (RUF005); mypy takes () for a tuple that stays empty.
            summed = summed + (accs[r] + sums * d * qd[None, :],)  # type: ignore[assignment]  # noqa: RUF005
        accs = summed
    for r in tl.static_range(ROWS):
        y = round_output(tl.sum(accs[r], axis=1), y_ptr.dtype.element_ty, INTERPRETED)
        m = first_m + r
        tl.store(y_ptr + m.to(tl.int64) * N + n, y, mask=n < tl.where(m < M, N, 0))


@dataclass(frozen=True)
class MmqConfig:
    """A launch of the product: block_m rows of x by block_n weight rows, `steps` scale blocks a trip of the loop.

    block_m 0 is the vector form. max_registers: most registers a thread may use, 0 for what the compiler takes.
    """

    block_m: int
    block_n: int
    steps: int
    num_warps: int
    num_stages: int
    max_registers: int = 0

    def __str__(self) -> str:
        what = f"block_m={self.block_m}" if self.block_m else "vector"
        steps = f" steps={self.steps}" if self.block_m else ""
        capped = f" registers<={self.max_registers}" if self.max_registers else ""
        return f"{what} block_n={self.block_n}{steps} warps={self.num_warps} stages={self.num_stages}{capped}"


def choose_config(m: int, k: int) -> MmqConfig:
    """Vector form up to VECTOR_MAX rows; then the smallest tile that holds the rows, up to 128.

    64 weight rows by 128 tokens in four warps would take over 240 registers at two steps a trip, two blocks a
    multiprocessor. The cap is what leaves three: 65536 / (3 * 128) = 170, in whole eights.
    """
    steps = next(s for s in (4, 2, 1) if k % (32 * s) == 0)
    if m <= VECTOR_MAX:
        return MmqConfig(0, 4, 1, 4, 2)
    block_m = min(128, max(16, triton.next_power_of_2(m)))
    if block_m == 128:
        return MmqConfig(128, 64, min(2, steps), 4, 4, max_registers=168)
    return MmqConfig(block_m, 64, steps, 4, 4)


def prepare(inputs: Tensors) -> Tensors:
    """What the launch for x's shape reads: see `operands`."""
    return operands(inputs, choose_config(*inputs["x"].shape))


def operands(inputs: Tensors, config: MmqConfig) -> Tensors:
    """x and the codes as they lie, room for the quantised x, and the scales of w in the order that `config` reads.

    w_d is fp16 [N, K / 32] where it lies for the vector form, float32 [K / 32, N] of its own for a tile. Only one of
    them is handed on: a check that changes operands in place must find nothing there that the kernel does not read.
    """
    x, device = inputs["x"], device_of(inputs)
    m, k = x.shape
    return {
        "x": x,
        "w_q": inputs["w_q"],
        "w_d": inputs["w_d"].T.float().contiguous() if config.block_m else inputs["w_d"],
        "q": torch.empty(m, k, dtype=torch.int8, device=device),
        "q_d": torch.empty(k // 32, m, dtype=torch.float32, device=device),
    }


def run(args: Tensors, out: Tensors) -> None:
    """y = dequant(quant(x)) @ w^T: the quantiser, then the product."""
    launch(args, out, choose_config(*args["x"].shape))


def launch(args: Tensors, out: Tensors, config: MmqConfig) -> None:
    """The same with a given tile; the vector form takes VECTOR_MAX rows a pass and repeats it along the grid."""
    x, w, y, q, q_d = args["x"], args["w_q"], out["y"], args["q"], args["q_d"]
    (m, k), n = x.shape, w.shape[0]
    quantise_kernel[(m, triton.cdiv(k // 32, 32))](x, q, q_d, m, k, BLOCKS=32, num_warps=2)
    if config.block_m:
        options = {"maxnreg": config.max_registers} if config.max_registers else {}
        grid = (triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n),)
        mmq_kernel[grid](
            q, q_d, w, args["w_d"], y, m, n, k, BLOCK_M=config.block_m, BLOCK_N=config.block_n, STEPS=config.steps,
            STAGES=config.num_stages, INTERPRETED=interpreted(), num_warps=config.num_warps, **options,
        )  # fmt: skip
    else:
        rows = min(triton.next_power_of_2(m), VECTOR_MAX)
        mmvq_kernel[(triton.cdiv(n, config.block_n), triton.cdiv(m, rows))](
            q, q_d, w, args["w_d"], y, m, n, k, ROWS=rows, BLOCK_N=config.block_n, CHUNKS=32,
            INTERPRETED=interpreted(), num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip


def _builds(capability: int) -> tuple[Build, ...]:
    builds = []
    for m in (1, 32, 128):
        config = choose_config(m, 5120)
        signature = {"q_ptr": "*i8", "qd_ptr": "*fp32", "w_ptr": "*i8"}
        signature |= {"wd_ptr": "*fp32" if config.block_m else "*fp16", "y_ptr": "*bf16"}
        signature |= dict.fromkeys(("M", "N", "K"), "i32")
        aligned = (*(name for name in signature if name.endswith("_ptr")), "N", "K")
        if config.block_m:
            constexprs: dict[str, int | bool] = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
            constexprs |= {"STEPS": config.steps, "STAGES": config.num_stages}
            aligned, kernel = (*aligned, "M"), mmq_kernel
        else:
            constexprs = {"ROWS": m, "BLOCK_N": config.block_n, "CHUNKS": 32}
            kernel = mmvq_kernel
        constexprs["INTERPRETED"] = False
        signature |= dict.fromkeys(constexprs, "constexpr")
        label = f"mmq {config}" if config.block_m else f"mmvq rows {m}"
        builds.append(
            Build(
                label, kernel, signature, constexprs, config.num_warps, config.num_stages, aligned=aligned,
                max_registers=config.max_registers,
            )
        )  # fmt: skip
    return tuple(builds)


def resident(config: MmqConfig) -> int:
    """Blocks that share an sm_90 multiprocessor, by the shared memory and registers that Triton 3.6 gives a tile."""
    shared = config.num_stages * (config.block_m + config.block_n) * 35 * config.steps + 1024
    by_registers = 65536 // (32 * config.num_warps * config.max_registers) if config.max_registers else 4
    return min(232_448 // shared, by_registers)


def work(workload: Workload, sms: int) -> Work:
    """The quantiser, then waves of tiles, or passes of the vector form.

    A block of 32 along K is a step of a tile (STEP): a latency for all blocks of a multiprocessor, and what each of
    them adds. Ahead of the first step the pipeline fills.
    """
    m, n, k = (int(workload[axis]) for axis in "MNK")
    config, quantised, moved = choose_config(m, k), 3.0 * m * k, n * k * 1.0625 + m * (k + 2.0 * n)
    in_turn = {"launches": 2.0, "bytes": quantised}
    if not config.block_m:
        trips = -(-n // config.block_n) / sms * (-(-k // 1024) + 1)
        return Work({"bytes": moved, "vector": trips * config.block_n * 32}, in_turn)
    beside = resident(config)
    waves, rest = divmod(-(-m // config.block_m) * -(-n // config.block_n), sms * beside)
    step = k / 32 * STEP[config.block_m]
    at_once = {"bytes": moved, "issue": 1.3 * step * (waves * beside + -(-rest // sms))}
    return Work(at_once, in_turn | {"steps": (waves + (rest > 0)) * (1500 + 1.5 * step)})


CANDIDATES = (
    Candidate(
        name="triton_mmq",
        precision="q8_0-w8a8",
        run=run,
        needs=Needs(triton="3.6"),
        prepare=prepare,
        builds=_builds,
        config=lambda workload: str(choose_config(workload["M"], workload["K"])),
        work=work,
    ),
)
