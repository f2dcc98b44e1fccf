"""vLLM's Marlin kernel with NVFP4 weights: W4A16, the product most people run on GPUs without FP4 tensor cores.

    pip install vllm

The operator torch.ops._C.marlin_gemm is called directly, by the argument names of its schema, so that neither vLLM's
Python nor its engine takes part; it has an output argument and is safe in a CUDA graph. The library is looked for by
`kernels.common.load_operators`. In a bundle cut down to vLLM's operators, root/shim and root/libs, root/shim on
PYTHONPATH is all it needs; no environment variable.

The weights are repacked here, in plain torch, rather than by vLLM's own repacking operator: so the permutation can be
tested on a CPU (tests/kernels/test_peers.py decodes it by the kernel's register layout, and compares with the operator
where there is a GPU), and every NVFP4 weight is carried over bit for bit. What Marlin cannot hold is refused, not
rounded: its scale format has five exponent bits of which the first must be set, which covers the normal e4m3 numbers
and none of the subnormal ones unless all scales are small enough to be raised together by a power of two.

Layout (IST-DASLab's Marlin paper and vLLM's csrc/quantization/marlin): tiles of 16 k x 64 n. The 32 threads of a warp
hold one such tile as B fragments of mma.m16n8k16; a thread's 128 bits are four words, one per 16 columns.
"""

from __future__ import annotations

import math

import torch

from kernels.common import Candidate, Needs, Tensors, Workload, library_version, load_operators
from kernels.nvfp4 import format as fmt

FLOAT4_E2M1 = 562949953487106  # vLLM's ScalarType.float4_e2m1f as an integer: what `b_type_id` takes
TILE_K, TILE_N = 16, 64
LIBRARIES = ("_C_stable_libtorch", "_C")  # the file that holds the operator: vLLM 0.33, and before
E2M1_TO_BF16_BIAS = 126  # the kernel places e2m1's exponent bits into bf16's without adding 127 - 1
S0E5M3_SHIFT = 7  # the scale format holds scale * 2^7


def tile_order() -> torch.Tensor:
    """int64 [32, 4, 8, 2]: (k, n) within a 16 x 64 tile of nibble i of word j of thread t.

    mma.m16n8k16 gives thread t of a warp the column t // 4 and the rows 2 (t % 4) + {0, 1, 8, 9} of a 16 x 8 block. A
    word holds two such blocks, columns n and n + 8. Nibbles i and i + 4 sit 16 bits apart, so one mask yields a pair of
    16-bit values, neighbours along k.
    """
    t = torch.arange(32).view(32, 1, 1)
    j = torch.arange(4).view(1, 4, 1)
    i = torch.arange(8).view(1, 1, 8)
    k = 2 * (t % 4) + 8 * (i % 2) + i // 4
    n = 16 * j + t // 4 + 8 * (i // 2 % 2)
    return torch.stack(torch.broadcast_tensors(k, n), dim=-1)


def repack_weights(packed: torch.Tensor) -> torch.Tensor:
    """int32 [K / 16, 2 N] in Marlin's order, from uint8 [N, K / 2] in file order. N % 64 == 0 and K % 16 == 0."""
    codes = fmt.unpack(packed)
    n, k = codes.shape
    if n % TILE_N or k % TILE_K:
        raise ValueError(f"N={n} and K={k} must be multiples of {TILE_N} and {TILE_K}; pad the weights with zeros")
    order = tile_order().to(packed.device)
    tiles = codes.view(n // TILE_N, TILE_N, k // TILE_K, TILE_K).permute(2, 0, 3, 1)  # [k tile, n tile, k, n]
    nibbles = tiles[:, :, order[..., 0], order[..., 1]].to(torch.int32)  # [k tile, n tile, 32, 4, 8]
    words = torch.zeros(nibbles.shape[:-1], dtype=torch.int32, device=packed.device)
    for i in range(8):
        words |= nibbles[..., i] << (4 * i)
    return words.reshape(k // TILE_K, 2 * n).contiguous()


def scale_columns() -> torch.Tensor:
    """int64 [64]: position p of a scale row holds the scale of column scale_columns()[p] of its 64-column tile.

    A thread needs the scales of columns t // 4 + 8 b, b = 0 .. 7, side by side; within each four of them the kernel
    converts two at a time, first the even ones.
    """
    column = torch.arange(64).view(8, 8).T.reshape(-1)  # t // 4 + 8 b, b fastest
    return column.view(-1, 4)[:, [0, 2, 1, 3]].reshape(-1)


def repack_scales(scale: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(S0E5M3 bytes as float8_e4m3fn [K / 16, N], power) from ue4m3 bytes uint8 [N, K / 16].

    The bytes stand for scale * 2^power. S0E5M3 is the upper half of a float16 without its sign: five exponent bits and
    three of mantissa, so e4m3's mantissa is kept. Raises ValueError when a scale other than zero has no exact form.
    """
    n, blocks = scale.shape
    value = fmt.decode_ue4m3(scale)
    largest = float(value.max()) if value.numel() else 0.0
    power = math.floor(math.log2(fmt.E4M3_MAX / largest)) if largest > 0 else 0
    raised = value * 2.0**power
    lost = int(((raised > 0) & (raised < 2.0**-6)).sum())
    if lost:
        raise ValueError(
            f"{lost} of {value.numel()} block scales are below 2^{-6 - power} while the largest is {largest:g}; "
            "Marlin's scale format does not reach both: quantise with scales that are spread less"
        )
    half = (raised * 2.0**S0E5M3_SHIFT).to(torch.float16).view(torch.int16)  # at most 57344, exact
    byte = (half >> 7).to(torch.uint8).T.reshape(blocks, n // TILE_N, TILE_N)
    return byte[:, :, scale_columns().to(scale.device)].reshape(blocks, n).contiguous().view(torch.float8_e4m3fn), power


def prepare(inputs: Tensors) -> Tensors:
    """x as it is; weights, block scales and tensor scale in Marlin's form; the kernel's workspace of locks."""
    for library in LIBRARIES:
        try:
            load_operators("vllm", library)
            break
        except ImportError:
            if library == LIBRARIES[-1]:
                raise
    device = inputs["w_scale"].device
    scale, power = repack_scales(inputs["w_scale"])
    # Powers of two, so exact: undoes the exponent that the kernel leaves out, the scale format's 2^7 and our `power`.
    tensor_scale = inputs["w_tensor_scale"].float() * 2.0 ** (E2M1_TO_BF16_BIAS - S0E5M3_SHIFT - power)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return {
        "x": inputs["x"],
        "w": repack_weights(inputs["w_packed"]),
        "w_scale": scale,
        "w_tensor_scale": tensor_scale,
        "workspace": torch.zeros(4 * sms, dtype=torch.int32, device=device),
    }


def run(args: Tensors, out: Tensors) -> None:
    m, k = args["x"].shape
    torch.ops._C.marlin_gemm(
        a=args["x"],
        c_or_none=out["y"],
        b_q_weight=args["w"],
        b_bias_or_none=None,
        b_scales=args["w_scale"],
        a_scales=None,
        global_scale=args["w_tensor_scale"],
        b_zeros_or_none=None,
        workspace=args["workspace"],
        b_type_id=FLOAT4_E2M1,
        size_m=m,
        size_n=out["y"].shape[1],
        size_k=k,
        use_atomic_add=False,
        use_fp32_reduce=True,  # vLLM's default: partial sums of K splits are added in float32
        is_zp_float=False,
    )


def eager(args: Tensors, out: Tensors) -> Tensors:
    """The operator with a result of its own, without the Python of vLLM's layer."""
    made = {"y": args["x"].new_empty(args["x"].shape[0], args["w"].shape[1] // 2)}
    run(args, made)
    return made


def _refuses(workload: Workload) -> str:
    if workload["dtype"] != "bf16":
        return f"dtype={workload['dtype']}: this adapter is for bf16, the dtype of every measured shape"
    n, k = workload["N"], workload["K"]
    if n % TILE_N or k % 128:
        return f"N={n}, K={k}: Marlin's thread blocks take N in multiples of {TILE_N} and K in multiples of 128"
    return ""


CANDIDATES = (
    Candidate(
        name="vllm_marlin",
        precision="nvfp4-w4a16",
        run=run,
        needs=Needs(capability=(8, 0), packages=("vllm",)),
        prepare=prepare,
        refuses=_refuses,
        config=lambda workload: f"vllm {library_version('vllm')} marlin_gemm, float32 reduction, no atomics",
        eager=eager,
    ),
)
