"""The product of `triton_gemm` with one thing changed: the levers that a recorded phase pulled on another device.

Occupancy (row LP6, patch 0017). There the FP4 product was squeezed for more resident blocks, and lost. Here:

    gemm_two_blocks      registers capped and fewer stages, so that two blocks are resident (their minblocks)
    gemm_narrow_tokens   half the tokens a tile (their mmq_x): more tiles, each weight decoded twice as often
    gemm_narrow_rows     half the weight rows a tile (their mmq_y, the lever they left unbuilt)

Cast (row LP16, the in-kernel gather). Activations arrive in float32; the product wants bf16. Either a kernel of its own
casts them once and the product reads half the bytes, or the product casts them on their way, in every tile again:

    gemm_precast         cast kernel, then the product
    gemm_cast_inside     one kernel; x goes through registers before it reaches the product's shared memory
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl

from kernels.common import Build, Candidate, Needs, Tensors, Workload, device_of, interpreted
from kernels.nvfp4 import triton_gemm
from kernels.nvfp4.layout import prepare
from kernels.nvfp4.triton_gemm import GemmConfig
from kernels.rounding import round_output

# 65,536 registers a multiprocessor over two blocks of eight warps; from 128 tokens on, where the tile is 128 x 128.
TWO_BLOCKS_REGISTERS = 128
CAST_BLOCK = 4096
CAST = "one of the two places where activations may be cast, for a question about casting"


def two_blocks(config: GemmConfig) -> GemmConfig:
    """Registers capped, and one stage in flight: with two in flight a block holds 114 KB, and two blocks 229 of 227."""
    return replace(config, max_registers=TWO_BLOCKS_REGISTERS, num_stages=2)


def narrow_tokens(config: GemmConfig) -> GemmConfig:
    """Half the tokens a tile."""
    return replace(config, block_m=config.block_m // 2)


def narrow_rows(config: GemmConfig) -> GemmConfig:
    """Half the weight rows a tile, with half the warps."""
    return replace(config, block_n=config.block_n // 2, num_warps=config.num_warps // 2)


LEVERS: dict[str, Callable[[GemmConfig], GemmConfig]] = {
    "gemm_two_blocks": two_blocks,
    "gemm_narrow_tokens": narrow_tokens,
    "gemm_narrow_rows": narrow_rows,
}


def lever_config(name: str, m: int, n: int, capability: int) -> GemmConfig:
    """What `triton_gemm` would launch, with the lever pulled."""
    return LEVERS[name](triton_gemm.choose_config(m, n, capability))


def _pulls(name: str) -> Callable[[Tensors, Tensors], None]:
    def run(args: Tensors, out: Tensors) -> None:
        x, w = args["x"], args["w"]
        config = lever_config(name, x.shape[0], w.shape[0], triton_gemm.capability_of(x))
        triton_gemm.launch(args, out["y"], config)

    return run


def _lever_refuses(workload: Workload) -> str:
    whole = triton_gemm.choose_config(workload["M"], workload["N"], 90)
    if (whole.block_m, whole.block_n) == (128, 128):
        return ""
    return f"M={workload['M']}, N={workload['N']}: the tile is {whole.block_m} x {whole.block_n}, already narrow"


def _lever_builds(name: str) -> Callable[[int], tuple[Build, ...]]:
    def builds(capability: int) -> tuple[Build, ...]:
        if capability != 90:  # where the questions are asked; elsewhere the squeezed tiles spill
            return ()
        config = lever_config(name, 128, 17408, capability)
        whole = next(b for b in triton_gemm.CANDIDATES[0].builds(capability) if "bf16 128x128" in b.label)
        constexprs = {**whole.constexprs, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
        return (replace(whole, label=f"{name} {config}", constexprs=constexprs, num_warps=config.num_warps,
                        num_stages=config.num_stages, max_registers=config.max_registers),)  # fmt: skip

    return builds


@triton.jit
def cast_kernel(
    x_ptr,  # float32 [elements]
    cast_ptr,  # bf16 [elements]
    elements,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """float32 to bf16, to nearest even, BLOCK elements a program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < elements, other=0.0)
    tl.store(cast_ptr + at, round_output(x, tl.bfloat16, INTERPRETED), mask=at < elements)


def prepare_precast(inputs: Tensors) -> Tensors:
    """As for `triton_gemm`, and room for the cast activations."""
    return prepare(inputs) | {"x_cast": torch.empty(inputs["x"].shape, dtype=torch.bfloat16, device=device_of(inputs))}


def run_precast(args: Tensors, out: Tensors) -> None:
    """Cast, then multiply: two launches."""
    x, cast = args["x"], args["x_cast"]
    grid = (triton.cdiv(x.numel(), CAST_BLOCK),)
    cast_kernel[grid](x, cast, x.numel(), BLOCK=CAST_BLOCK, INTERPRETED=interpreted(), num_warps=8)
    triton_gemm.launch(args | {"x": cast}, out["y"])


def inside_config(m: int, n: int, capability: int) -> GemmConfig:
    """One stage less than the plain product: its tile of x has twice the bytes, and a bf16 copy stands beside it."""
    config = triton_gemm.choose_config(m, n, capability)
    return replace(config, num_stages=min(config.num_stages, 3))


def _cast_refuses(workload: Workload) -> str:
    return "" if workload["dtype"] == "f32" else f"dtype={workload['dtype']}: there is nothing to cast"


def run_inside(args: Tensors, out: Tensors) -> None:
    """The product with the cast inside: one launch."""
    x, w = args["x"], args["w"]
    config = inside_config(x.shape[0], w.shape[0], triton_gemm.capability_of(x))
    triton_gemm.launch(args, out["y"], config, cast=True)


CANDIDATES = (
    *(
        Candidate(
            name=name,
            precision="nvfp4-w4a16",
            run=_pulls(name),
            needs=Needs(triton="3.6"),
            prepare=prepare,
            refuses=_lever_refuses,
            builds=_lever_builds(name),
            config=lambda workload, name=name: str(lever_config(name, workload["M"], workload["N"], 90)),  # type: ignore[misc]
            no_route="shows what one change does to triton_gemm",
        )
        for name in LEVERS
    ),
    Candidate(
        name="gemm_precast",
        precision="nvfp4-w4a16-cast",
        run=run_precast,
        needs=Needs(triton="3.6"),
        prepare=prepare_precast,
        refuses=_cast_refuses,
        config=lambda workload: f"cast, then {triton_gemm.choose_config(workload['M'], workload['N'], 90)}",
        no_route=CAST,
    ),
    Candidate(
        name="gemm_cast_inside",
        precision="nvfp4-w4a16-cast",
        run=run_inside,
        needs=Needs(triton="3.6"),
        prepare=prepare,
        refuses=_cast_refuses,
        config=lambda workload: str(inside_config(workload["M"], workload["N"], 90)),
        no_route=CAST,
    ),
)
