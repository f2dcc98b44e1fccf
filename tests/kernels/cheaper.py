"""Formats cheaper than a declared one, as roundings of one operand, and whether a tolerance sees them.

A precision is earned where the checker refuses what the next cheaper format would give. So each family's test takes the
reference in float64, rounds one operand with the scale that serves it best in practice (the largest magnitude of a row
or of a block, never of the whole tensor), stores the outputs in their declared types, which is all that a kernel with
otherwise exact arithmetic would do, and asks the bench's own `compare`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from kernels.common import Tensors, Workload
from kernels.nvfp4 import format as nvfp4
from lab.check.accuracy import compare

Rounding = Callable[[torch.Tensor], torch.Tensor]


def blocks_of(size: int, rounding: Rounding) -> Rounding:
    """`rounding`, which scales by the last axis, for each `size` values of it (for all where they do not divide it)."""

    def apply(x: torch.Tensor) -> torch.Tensor:
        return rounding(x.unflatten(-1, (-1, size))).reshape(x.shape) if x.shape[-1] % size == 0 else rounding(x)

    return apply


def scaled(top: float, rounding: Rounding) -> Rounding:
    """x / s rounded, times s, with s so that the largest magnitude of each row is `top`; float64."""

    def apply(x: torch.Tensor) -> torch.Tensor:
        scale = x.double().abs().amax(-1, keepdim=True) / top
        scale = torch.where(scale > 0, scale, 1.0)
        return rounding(x.double() / scale).double() * scale

    return apply


def cast(dtype: torch.dtype) -> Rounding:
    """Rounded to a floating type and back to float64."""
    return lambda x: x.float().to(dtype).double()


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """To the nearest of the sixteen values of e2m1."""
    return nvfp4.decode_e2m1(nvfp4.round_e2m1(x.float())).double()


def mxfp4(x: torch.Tensor) -> torch.Tensor:
    """e2m1 by blocks of 32 with the power of two that OCP Microscaling takes: of the largest magnitude, over 4."""

    def block(x: torch.Tensor) -> torch.Tensor:
        scale = torch.exp2(x.double().abs().amax(-1, keepdim=True).clamp_min(1e-300).log2().floor() - 2)
        return e2m1(x / scale) * scale

    return blocks_of(32, block)(x)


INT8, INT4 = scaled(127, torch.round), scaled(7, torch.round)
FORMATS: Mapping[str, Rounding] = {
    "bf16": cast(torch.bfloat16),
    "int8": INT8,
    "int8/32": blocks_of(32, INT8),
    "e4m3": scaled(448, cast(torch.float8_e4m3fn)),
    "int4": INT4,
    "int4/32": blocks_of(32, INT4),
    "e2m1/16": blocks_of(16, scaled(6, e2m1)),
    "mxfp4": mxfp4,
}
EIGHT_BITS, FOUR_BITS = ("int8", "int8/32", "e4m3"), ("int4", "int4/32", "e2m1/16", "mxfp4")


def stored(cases: Any, workload: Workload, inputs: Tensors, outputs: Tensors) -> Tensors:
    """Outputs in the types that the workload declares."""
    declared = cases.outputs(workload, {name: tensor.to("meta") for name, tensor in inputs.items()})
    return {name: tensor.to(declared[name].dtype) for name, tensor in outputs.items()}


def refused(cases: Any, workload: Workload, precision: str, out: Tensors, wanted: Tensors) -> bool:
    """Whether one of the outputs is outside its limits."""
    limits = cases.tolerance(workload, precision)
    return not all(compare(name, out[name], wanted[name], limit).ok for name, limit in limits.items())


def admitted(
    cases: Any, workload: Workload, precision: str, wanted: Tensors, of: Callable[[str, Rounding], Tensors],
    cheaper: Mapping[str, tuple[str, ...]],
) -> Iterator[tuple[str, str, str]]:  # fmt: skip
    """(precision, operand, format) of what passes for the declared format; of(operand, rounding) -> outputs."""
    for operand, names in cheaper.items():
        for name in names:
            if not refused(cases, workload, precision, of(operand, FORMATS[name]), wanted):
                yield precision, operand, name
