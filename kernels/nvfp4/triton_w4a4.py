"""W4A4: activations quantised to NVFP4 by a kernel of their own, then `tl.dot_scaled` e2m1 x e2m1 for Blackwell.

Only Blackwell multiplies e2m1 with e4m3 scales per 16 in hardware (tcgen05 on sm_100, mma.sync kind::mxf4nvf4 on sm_120
and sm_121), so this candidate asks for capability 10.0. On sm_121 Triton 3.6 and 3.7.1 crash while compiling it; the
Build entries carry that as needs_triton 3.8.

Activations are quantised with one float32 scale per row instead of one per tensor: a row's largest value is known after
one pass over the row, whereas a tensor-wide one needs a grid-wide reduction before anything can be rounded, and a
calibrated constant needs data this family does not have. The row scale joins the tensor scale in the epilogue.

What the CPU checks: Triton's interpreter runs `tl.dot_scaled`, but takes every scale for an e8m0 byte (seen in 3.9.0),
so with e4m3 scales it silently returns other numbers. Under the interpreter the tiles are therefore decoded and go
through a plain float32 dot: addressing, masks, scales and epilogue are checked on the CPU, that one instruction is not.
Its float8 conversion also loses the mantissa's carry, so e4m3 is rounded by integer arithmetic here on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.common import Build, Candidate, Needs, Tensors, Workload, device_of, interpreted
from kernels.nvfp4.decode import decode_tile_float32, ue4m3_to_float32
from kernels.rounding import float32_to_ue4m3, round_output

QUANTISE_BLOCK = 1024  # values a trip of the quantiser


@triton.jit
def float32_to_e2m1(value):
    """Magnitudes (float32 >= 0) -> e2m1 codes 0..7 (uint8), nearest, ties to the even code, saturating at 6."""
    code = (value > 0.25).to(tl.uint8) + (value >= 0.75).to(tl.uint8) + (value > 1.25).to(tl.uint8)
    code += (value >= 1.75).to(tl.uint8) + (value > 2.5).to(tl.uint8) + (value >= 3.5).to(tl.uint8)
    return code + (value > 5.0).to(tl.uint8)


@triton.jit
def quantise_kernel(
    x_ptr,  # [M, K] bf16 or fp16
    packed_ptr,  # uint8 [M, K / 2], low nibble = even k
    scale_ptr,  # uint8 [M, K / 16]
    row_scale_ptr,  # float32 [M]
    K,
    BLOCK: tl.constexpr,  # values per trip, a multiple of 16
):
    row = tl.program_id(0).to(tl.int64)
    GROUPS: tl.constexpr = BLOCK // 16
    offset = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in range(0, K, BLOCK):
        x = tl.load(x_ptr + row * K + k + offset, mask=offset < K - k, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    row_scale = tl.div_rn(tl.max(largest, axis=0), 2688.0)  # 6 * 448
    row_scale = tl.where(row_scale > 0, row_scale, 1.0)
    tl.store(row_scale_ptr + row, row_scale)

    for k in range(0, K, BLOCK):
        x = tl.load(x_ptr + row * K + k + offset, mask=offset < K - k, other=0.0).to(tl.float32)
        x = tl.reshape(x, (GROUPS, 16))
        amax = tl.max(tl.abs(x), axis=1)
        scale = float32_to_ue4m3(
            tl.minimum(tl.div_rn(tl.div_rn(amax, amax * 0.0 + 6.0), amax * 0.0 + row_scale), 448.0)
        )
        step = (ue4m3_to_float32(scale) * row_scale)[:, None] + x * 0.0
        # A scale that underflowed to 0 leaves zeros of each element's sign.
        scaled = tl.where(step > 0, tl.div_rn(tl.abs(x), tl.where(step > 0, step, 1.0)), 0.0)
        sign = (x.to(tl.uint32, bitcast=True) >> 31).to(tl.uint8)
        low, high = tl.split(tl.reshape(float32_to_e2m1(scaled) | (sign << 3), (GROUPS, 8, 2)))
        packed = tl.reshape(low | (high << 4), (GROUPS * 8,))
        byte = tl.arange(0, GROUPS * 8)
        tl.store(packed_ptr + row * (K // 2) + k // 2 + byte, packed, mask=byte < (K - k) // 2)
        group = tl.arange(0, GROUPS)
        tl.store(scale_ptr + row * (K // 16) + k // 16 + group, scale, mask=group < (K - k) // 16)


@triton.jit
def w4a4_kernel(
    a_ptr,  # uint8 [M, K / 2] activations
    a_scale_ptr,  # uint8 [M, K / 16]
    a_row_scale_ptr,  # float32 [M]
    b_ptr,  # uint8 [N, K / 2] weights
    b_scale_ptr,  # uint8 [N, K / 16]
    ts_ptr,  # float32 [1]
    y_ptr,  # [M, N]
    M,
    N,
    HALF_K,  # row strides, passed apart so that each is specialised on being a multiple of 16
    GROUPS_K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    m = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    safe_m = (m % M).to(tl.int64)
    safe_n = (n % N).to(tl.int64)
    byte = tl.arange(0, BLOCK_K // 2)
    group = tl.arange(0, BLOCK_K // 16)
    a_tile = a_ptr + safe_m[:, None] * HALF_K + byte[None, :]
    b_tile = b_ptr + safe_n[:, None] * HALF_K + byte[None, :]
    a_scale_tile = a_scale_ptr + safe_m[:, None] * GROUPS_K + group[None, :]
    b_scale_tile = b_scale_ptr + safe_n[:, None] * GROUPS_K + group[None, :]

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for trip in range(0, tl.cdiv(HALF_K * 2, BLOCK_K)):
        left = HALF_K - trip * (BLOCK_K // 2)
        a = tl.load(a_tile, mask=byte[None, :] < left, other=0)
        b = tl.load(b_tile, mask=byte[None, :] < left, other=0)
        a_scale = tl.load(a_scale_tile, mask=group[None, :] < left // 8, other=0)
        b_scale = tl.load(b_scale_tile, mask=group[None, :] < left // 8, other=0)
        if INTERPRETED:
            a_wide = decode_tile_float32(a, a_scale, BLOCK_M, BLOCK_K)
            b_wide = decode_tile_float32(b, b_scale, BLOCK_N, BLOCK_K)
            acc += tl.dot(a_wide, tl.trans(b_wide), input_precision="ieee")
        else:
            a_scale = a_scale.to(tl.float8e4nv, bitcast=True)
            b_scale = b_scale.to(tl.float8e4nv, bitcast=True)
            acc = tl.dot_scaled(a, a_scale, "e2m1", tl.trans(b), b_scale, "e2m1", acc)
        a_tile += BLOCK_K // 2
        b_tile += BLOCK_K // 2
        a_scale_tile += BLOCK_K // 16
        b_scale_tile += BLOCK_K // 16

    acc = acc * (tl.load(a_row_scale_ptr + safe_m) * tl.load(ts_ptr))[:, None]
    y = round_output(acc, y_ptr.dtype.element_ty, INTERPRETED)
    tl.store(y_ptr + m.to(tl.int64)[:, None] * N + n[None, :], y, mask=(m[:, None] < M) & (n[None, :] < N))


@dataclass(frozen=True)
class W4a4Config:
    """A launch of the product; the quantiser runs one CTA per row, QUANTISE_BLOCK values a trip."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return (
            f"block_m={self.block_m} block_n={self.block_n} block_k={self.block_k} warps={self.num_warps} "
            f"stages={self.num_stages} quantise_block={QUANTISE_BLOCK}"
        )


def choose_config(capability: int) -> W4a4Config:
    """128 x 128 x 256: the smallest M of tcgen05's scaled product. 12.x parts have 99 KB, so two stages fewer there."""
    return W4a4Config(128, 128, 256, num_warps=8 if capability >= 120 else 4, num_stages=3 if capability >= 120 else 4)


def quantise_rows(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, row_scale: torch.Tensor) -> None:
    """x [M, K] -> packed uint8 [M, K / 2], scale uint8 [M, K / 16], row_scale float32 [M]; one launch."""
    m, k = x.shape
    if k % 16 or not x.is_contiguous():
        raise ValueError(f"x has K={k} and strides {x.stride()}; pass a contiguous [M, K] with K a multiple of 16")
    quantise_kernel[(m,)](x, packed, scale, row_scale, k, BLOCK=QUANTISE_BLOCK, num_warps=4)


def prepare(inputs: Tensors) -> Tensors:
    """The inputs plus workspace for the quantised activations, so that `run` allocates nothing."""
    m, k = inputs["x"].shape
    device = device_of(inputs)
    return inputs | {
        "x_packed": torch.empty(m, k // 2, dtype=torch.uint8, device=device),
        "x_scale": torch.empty(m, k // 16, dtype=torch.uint8, device=device),
        "x_row_scale": torch.empty(m, dtype=torch.float32, device=device),
    }


def run(args: Tensors, out: Tensors) -> None:
    """Two launches: quantise the rows of x, then the product."""
    x, w, y = args["x"], args["w_packed"], out["y"]
    m, n = x.shape[0], w.shape[0]
    if 2 * w.shape[1] != x.shape[1]:
        raise ValueError(f"x has K={x.shape[1]} but the weights hold K={2 * w.shape[1]}; pass a matching pair")
    quantise_rows(x, args["x_packed"], args["x_scale"], args["x_row_scale"])
    capability = 100
    if x.is_cuda:
        major, minor = torch.cuda.get_device_capability(x.device)
        capability = 10 * major + minor
    config = choose_config(capability)
    w4a4_kernel[(triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n),)](
        args["x_packed"],
        args["x_scale"],
        args["x_row_scale"],
        w,
        args["w_scale"],
        args["w_tensor_scale"],
        y,
        m,
        n,
        w.shape[1],
        args["w_scale"].shape[1],
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        INTERPRETED=interpreted(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _config(workload: Workload) -> str:
    return str(choose_config(100))


def _builds(capability: int) -> tuple[Build, ...]:
    if capability < 100:
        return ()
    config = choose_config(capability)
    quantise = {"x_ptr": "*bf16", "packed_ptr": "*u8", "scale_ptr": "*u8", "row_scale_ptr": "*fp32", "K": "i32"}
    product = {"a_ptr": "*u8", "a_scale_ptr": "*u8", "a_row_scale_ptr": "*fp32", "b_ptr": "*u8", "b_scale_ptr": "*u8"}
    product |= {"ts_ptr": "*fp32", "y_ptr": "*bf16"} | dict.fromkeys(("M", "N", "HALF_K", "GROUPS_K"), "i32")
    constexprs = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "INTERPRETED": False,
    }
    return (
        Build(
            label="quantise rows bf16",
            kernel=quantise_kernel,
            signature=quantise | {"BLOCK": "constexpr"},
            constexprs={"BLOCK": QUANTISE_BLOCK},
            num_warps=4,
            aligned=tuple(quantise),
        ),
        Build(
            label=f"w4a4 {config.block_m}x{config.block_n}x{config.block_k}",
            kernel=w4a4_kernel,
            signature=product | dict.fromkeys(constexprs, "constexpr"),
            constexprs=constexprs,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            aligned=tuple(product),
            needs_triton="3.8" if capability == 121 else "3.6",
        ),
    )


CANDIDATES = (
    Candidate(
        name="triton_w4a4",
        precision="nvfp4-w4a4",
        run=run,
        needs=Needs(capability=(10, 0), triton="3.6"),  # for dot_scaled; `lab check` runs it in the interpreter too
        prepare=prepare,
        builds=_builds,
        config=_config,
    ),
)
