"""W4A16 product on tensor cores: packed weights are unpacked in registers and multiplied in x's dtype.

The product is formed transposed, y^T[n, m] = w[n, k] x^T[k, m]: the dequantised weight is then the left operand, which
wgmma may take straight from registers, while the tile of x goes from global to shared memory untouched. The token
dimension becomes the narrow one (16 to 128), so a tile of 16 tokens costs no padding to 64.

Weights arrive in the paired layout of `layout.py`: each trip loads 64 bytes per row, i.e. 128 values, and runs two dots
of 64 values, low nibbles and then high ones, against two contiguous tiles of x. Accumulation is float32. The operands
are exact (see `decode.py`), so the result differs from the float64 reference by the sum's rounding and the output's.

Given up here, for a kernel that Triton can express: stream-K (136 row tiles on 132 SMs are 1.03 waves), the ten-
operation unpacking of offline-permuted words, and weights pre-tiled for bulk copies. `NOTES.md` has what came after.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.common import Build, Candidate, Needs, Tensors, Work, Workload, asked_capability, interpreted
from kernels.nvfp4.decode import BF16_SHIFT, FP16_SHIFT, dequantise_tile
from kernels.nvfp4.layout import HALF, SPAN, group_of, prepare
from kernels.rounding import round_output


@triton.jit
def gemm_kernel(
    x_ptr,  # [M, K] bf16 or fp16, row stride K
    w_ptr,  # uint8 [N, K_PAD / 2], paired nibbles
    s_ptr,  # uint8 [N, K_PAD / GROUP], low and high halves of a run interleaved
    ts_ptr,  # float32 [1]
    y_ptr,  # [M, N], dtype of x
    M,
    N,
    K,
    SPANS,  # K_PAD / SPAN: row strides made from it are seen to be multiples of 64 and 8 bytes, so loads are wide
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPAN: tl.constexpr,
    BF16: tl.constexpr,  # operands in bf16, else fp16
    SHIFT: tl.constexpr,  # 2^SHIFT undoes what the operands lack
    WIDEN: tl.constexpr,  # interpreter: operands to float32 before the dot
    GROUP: tl.constexpr = 16,  # weights that share a scale: 16 e4m3 (NVFP4) or 32 e8m0 (MXFP4)
    CAST: tl.constexpr = False,  # x is float32 and is rounded to bf16 on its way to the product
):
    HALF: tl.constexpr = SPAN // 2
    # GROUP_M token tiles run next to each other over one stretch of weight rows, so the weights are read from L2 again.
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP_M * tiles_n)
    first_m = group * GROUP_M
    group_rows = min(tiles_m - first_m, GROUP_M)
    within = pid % (GROUP_M * tiles_n)
    pid_m = first_m + within % group_rows
    pid_n = within // group_rows

    rows = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    # Rows past the end are read again from the start instead of masked: their results are never stored.
    safe_rows = (rows % N).to(tl.int64)
    safe_tokens = (tokens % M).to(tl.int64)

    bytes_k = tl.arange(0, HALF)
    w_tile = w_ptr + safe_rows[:, None] * (SPANS * HALF) + bytes_k[None, :]
    # Both halves' scales in one load, 8 bytes a row: under 4 bytes a thread the pipeliner leaves it synchronous.
    s_tile = s_ptr + safe_rows[:, None] * (SPANS * (SPAN // GROUP)) + tl.arange(0, SPAN // GROUP)[None, :]
    x_tile = x_ptr + safe_tokens[None, :] * K + bytes_k[:, None]

    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for span in range(0, SPANS):
        k_left = K - span * SPAN
        w = tl.load(w_tile)
        s_low, s_high = tl.split(tl.reshape(tl.load(s_tile), (BLOCK_N, HALF // GROUP, 2)))
        x_low = tl.load(x_tile, mask=bytes_k[:, None] < k_left, other=0.0)
        x_high = tl.load(x_tile + HALF, mask=bytes_k[:, None] < k_left - HALF, other=0.0)
        if CAST:
            x_low, x_high = round_output(x_low, tl.bfloat16, WIDEN), round_output(x_high, tl.bfloat16, WIDEN)
        w_low = dequantise_tile(w & 15, s_low, BF16, BLOCK_N, HALF, GROUP)
        w_high = dequantise_tile(w >> 4, s_high, BF16, BLOCK_N, HALF, GROUP)
        if WIDEN:
            acc += tl.dot(w_low.to(tl.float32), x_low.to(tl.float32), input_precision="ieee")
            acc += tl.dot(w_high.to(tl.float32), x_high.to(tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(w_low, x_low, acc)
            acc = tl.dot(w_high, x_high, acc)
        w_tile += HALF
        s_tile += SPAN // GROUP
        x_tile += SPAN

    acc = acc * (tl.load(ts_ptr) * (1 << SHIFT))
    y = round_output(tl.trans(acc), y_ptr.dtype.element_ty, WIDEN)
    y_tile = y_ptr + tokens.to(tl.int64)[:, None] * N + rows[None, :]
    tl.store(y_tile, y, mask=(tokens[:, None] < M) & (rows[None, :] < N))


@dataclass(frozen=True)
class GemmConfig:
    """A launch: tile of `block_m` tokens by `block_n` weight rows, `group_m` token tiles per weight stretch.

    max_registers: most registers a thread may use, 0 for what the compiler takes.
    """

    block_m: int
    block_n: int
    group_m: int
    num_warps: int
    num_stages: int
    max_registers: int = 0

    def __str__(self) -> str:
        capped = f" registers<={self.max_registers}" if self.max_registers else ""
        return (
            f"block_m={self.block_m} block_n={self.block_n} group_m={self.group_m} "
            f"warps={self.num_warps} stages={self.num_stages}{capped}"
        )


def choose_config(m: int, n: int, capability: int) -> GemmConfig:
    """The tile for `m` tokens and `n` weight rows on compute `capability` (90, 121, ...).

    Tokens decide the narrow side. Where 128-wide tiles would leave most SMs of a large part idle, both sides are halved
    (64 x 128 with four warps spills where the product is mma.sync). Stages are what fits beside the one being consumed:
    one holds block_n * 72 + block_m * 256 bytes, and parts of capability 12.x have 99 KB of shared memory.
    """
    block_m = min(128, max(16, triton.next_power_of_2(m)))
    block_n = 128
    if triton.cdiv(m, block_m) * triton.cdiv(n, block_n) < 96:
        block_m, block_n = min(block_m, 64), 64
    shared_bytes = 96 * 1024 if capability >= 120 else 128 * 1024
    num_stages = 1 + max(1, min(4, shared_bytes // (block_n * 72 + block_m * 256)))
    num_warps = 8 if block_n == 128 and block_m >= 64 else 4
    return GemmConfig(block_m, block_n, 8, num_warps, num_stages)


def capability_of(tensor: torch.Tensor) -> int:
    """Compute capability as 10 * major + minor; 90 for a CPU tensor (the interpreter takes any tile)."""
    if tensor.device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


def launch(args: Tensors, y: torch.Tensor, config: GemmConfig | None = None, cast: bool = False) -> None:
    """y[M, N] = x[M, K] @ w^T for `args` from `layout.prepare`. x must be contiguous, bf16 or fp16.

    config: another tile than `choose_config`'s. cast: x is float32 and is rounded to bf16 inside the kernel.
    """
    x, w = args["x"], args["w"]
    (m, k), n = x.shape, w.shape[0]
    takes = (torch.float32,) if cast else (torch.bfloat16, torch.float16)
    if not x.is_contiguous() or x.dtype not in takes:
        raise ValueError(f"x is {x.dtype} with strides {x.stride()}; pass a contiguous [M, K] in one of {takes}")
    if not 0 <= 2 * w.shape[1] - k < SPAN:
        raise ValueError(
            f"x has K={k} but the weights hold K={2 * w.shape[1]} (padded to {SPAN}); pass a matching pair"
        )
    config = config or choose_config(m, n, capability_of(x))
    group = group_of(args)
    # The interpreter has no bf16 arithmetic, so there the fp16 decoding runs for both dtypes and is widened.
    bf16 = x.dtype != torch.float16 and not interpreted()
    nvfp4_shift = BF16_SHIFT if bf16 else FP16_SHIFT
    options = {"maxnreg": config.max_registers} if config.max_registers else {}
    grid = (triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n),)
    gemm_kernel[grid](
        x,
        w,
        args["w_scale"],
        args["w_tensor_scale"],
        y,
        m,
        n,
        k,
        w.shape[1] // HALF,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        GROUP_M=config.group_m,
        SPAN=SPAN,
        BF16=bf16,
        SHIFT=nvfp4_shift if group == 16 else 0,
        WIDEN=interpreted(),
        GROUP=group,
        CAST=cast,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **options,
    )


def run(args: Tensors, out: Tensors) -> None:
    launch(args, out["y"])


def _capability() -> int:
    """That which a description asks for, else that of the GPU here, else a Hopper's; 10 * major + minor."""
    here = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    major, minor = asked_capability.get() or here
    return 10 * major + minor


def _config(workload: Workload) -> str:
    return str(choose_config(workload["M"], workload["N"], _capability()))


def work(workload: Workload, sms: int) -> Work:
    """Waves of tiles: the weights of a tile are unpacked for each, and multiplied for its tokens."""
    m, n, k = (int(workload[axis]) for axis in "MNK")
    config = choose_config(m, n, _capability())
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    each = -(-tiles // sms) * config.block_n * k
    at_once = {"bytes": n * k * 9 / 16 + 2.0 * m * (k + n)}
    return Work(at_once, {"launches": 1.0, "unpack": each / 32, "multiply": each * config.block_m / 4096, "row": k / 4})


def _builds(capability: int) -> tuple[Build, ...]:
    builds = []
    for m, n, dtype in ((16, 17408, "bf16"), (128, 17408, "bf16"), (128, 17408, "fp16"), (128, 5120, "bf16")):
        config = choose_config(m, n, capability)
        signature = {"x_ptr": f"*{dtype}", "w_ptr": "*u8", "s_ptr": "*u8", "ts_ptr": "*fp32", "y_ptr": f"*{dtype}"}
        signature |= dict.fromkeys(("M", "N", "K", "SPANS"), "i32")
        constexprs = {
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "GROUP_M": config.group_m,
            "SPAN": SPAN,
            "BF16": dtype == "bf16",
            "SHIFT": BF16_SHIFT if dtype == "bf16" else FP16_SHIFT,
            "WIDEN": False,
            "GROUP": 16,
            "CAST": False,
        }
        builds.append(
            Build(
                label=f"gemm {dtype} {config.block_n}x{config.block_m}x{SPAN} s{config.num_stages} (m{m} n{n})",
                kernel=gemm_kernel,
                signature=signature | dict.fromkeys(constexprs, "constexpr"),
                constexprs=constexprs,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                aligned=("x_ptr", "w_ptr", "s_ptr", "ts_ptr", "y_ptr", "M", "N", "K"),
            )
        )
    return tuple(builds)


CANDIDATES = (
    Candidate(
        name="triton_gemm",
        precision="nvfp4-w4a16",
        run=run,
        needs=Needs(triton="3.6"),
        prepare=prepare,
        builds=_builds,
        config=_config,
        work=work,
    ),
)
