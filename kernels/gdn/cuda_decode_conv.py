"""A decode step from the mixed row on, in one launch (decode_conv.cu): short convolution, SiLU, gates, state.

q, k, v, g and beta are never written: a block forms them while its slice of the state is on the way. Both states are
found by the same row id and updated in place; nothing is allocated, nothing read on the host, so a graph may hold it.
triton_decode_conv has the same work in three launches.

Given up: all blocks of a k head repeat the convolution of its q and k (from L2, about 4 KB beside 64 KB of state), and
one of them moves the columns after the others have read, which a ticket per sequence and k head tells (`arrived`,
zero between launches). The ticket has no fence: a load whose value went through the block's barrier is over, and the
next launch is what reads the columns that were moved.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kernels import cuda
from kernels.common import Candidate, CudaSource, Needs, Tensors, Workload
from kernels.gdn import cuda_decode
from kernels.gdn.cuda_decode import FORMATS, STATES, DecodeVariant

WIDTH = 4
NAMES = ("conv_weight", "conv_state", "a", "b", "A_log", "dt_bias", "state", "state_rows")


def warps(variant: DecodeVariant) -> int:
    """Of a block of decode_conv.cu where cuda_decode takes `variant`: eight for many float32 states, else as many."""
    return 8 if variant in (cuda_decode.MANY["f32"], cuda_decode.ORDERED["f32"]) else variant.warps


def kernel_name(variant: DecodeVariant) -> str:
    """The extern "C" name in decode_conv.cu: all its kernels take rows in turns and sequences as they come."""
    return f"gdn_decode_conv_d{variant.dim}_v{variant.v_tile}_w{warps(variant)}_{variant.state}_h{variant.hint}"


SOURCE = CudaSource(
    path=Path(__file__).with_name("decode_conv.cu"),
    kernels=tuple(dict.fromkeys(kernel_name(v) for v in cuda_decode.VARIANTS)),
    capability=(9, 0),
    architecture="sm_90a",
)
# By the form of a launch. Programmatic ones wait for the kernel ahead by themselves; "early" asks L2 for states first.
FORMS = {"": SOURCE} | {
    form: replace(SOURCE, options=(*SOURCE.options, f"-DPDL={pdl}")) for pdl, form in ((1, "chained"), (2, "early"))
}
CUDA_SOURCES = (SOURCE,)


def checked(inputs: Tensors) -> None:
    """Raise ValueError for strides that the kernel does not take, and for shapes that do not belong together.

    Rows of mixed_qkv may be columns of wider ones; all else is contiguous.
    """
    if inputs["mixed_qkv"].stride(1) != 1:
        raise ValueError(f"mixed_qkv has strides {inputs['mixed_qkv'].stride()}: pass one whose columns are adjacent")
    for name in NAMES:
        if not inputs[name].is_contiguous():
            shape, strides = tuple(inputs[name].shape), inputs[name].stride()
            raise ValueError(f"{name} has strides {strides} for shape {shape}: pass {name}.contiguous()")
    channels, (rows, heads_v, dim, _) = inputs["mixed_qkv"].shape[1], inputs["state"].shape
    rest = channels - heads_v * dim
    if rest <= 0 or rest % (2 * dim) or heads_v % (rest // (2 * dim)):
        raise ValueError(f"mixed_qkv has {channels} channels: pass (2 Hk + {heads_v}) * {dim}, with {heads_v} = r * Hk")
    for name, shape in (("conv_weight", (channels, WIDTH)), ("conv_state", (rows, WIDTH - 1, channels))):
        if tuple(inputs[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(inputs[name].shape)}: pass {shape}")


def _prepare(inputs: Tensors) -> Tensors:
    checked(inputs)
    (batch, channels), (_, heads_v, dim, _) = inputs["mixed_qkv"].shape, inputs["state"].shape
    heads_k = (channels // dim - heads_v) // 2
    device = inputs["state"].device
    return inputs | {"arrived": torch.zeros(batch, heads_k, dtype=torch.int32, device=device)}


def launch(args: Tensors, out: Tensors, variant: DecodeVariant | None = None, form: str = "") -> None:
    """One token for each sequence: out["state"] and out["conv_state"] are updated at args["state_rows"], o written.

    form: of FORMS, a programmatic one where all kernels of a step are launched so and none of them writes state_rows.
    """
    (batch, heads_k), (_, heads_v, dim, _) = args["arrived"].shape, out["state"].shape
    chosen = variant or cuda_decode.choose_config(batch, heads_v, dim, STATES[out["state"].dtype])
    kernel = cuda.load(FORMS[form], kernel_name(chosen), out["o"].device.index or 0)
    tensors = [args[n] for n in ("mixed_qkv", "a", "b", "conv_weight", "A_log", "dt_bias")]
    tensors += [out["conv_state"], out["state"], args["state_rows"], args["arrived"], out["o"]]
    mixed = args["mixed_qkv"]
    numbers = (mixed.stride(0), batch, heads_k, heads_v, int("raw_qk" in args), FORMATS[mixed.dtype])
    arguments: list[Any] = [*tensors, cuda.f32(dim**-0.5), *map(cuda.i32, numbers)]
    grid = (dim // chosen.v_tile, heads_v, batch)
    cuda.launch(kernel, grid, 32 * warps(chosen), arguments, programmatic=form != "")


def refuses(workload: Workload) -> str:
    """conv_decode only, with the head sizes and the state formats that decode_conv.cu instantiates."""
    if workload["op"] != "conv_decode":
        return f"op = {workload['op']}: this takes a decode step from the convolution on (conv_decode)"
    if workload["D"] not in (64, 128):
        return f"D = {workload['D']}: decode_conv.cu is instantiated for D = 64 and 128"
    return ""


def describe(workload: Workload) -> str:
    """The launch choice in one line."""
    axes = (workload["batch"], workload["Hv"], workload["D"], str(workload["state_dtype"]))
    return f"float32 arithmetic, {kernel_name(cuda_decode.choose_config(*axes))}"


CANDIDATES = (
    Candidate(
        name="cuda_decode_conv",
        precision="f32",
        run=launch,
        needs=Needs((9, 0), packages=("cupy",)),
        prepare=_prepare,
        refuses=refuses,
        config=describe,
    ),
)
