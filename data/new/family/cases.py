"""Workloads, their inputs and outputs, and how far an output may lie from the reference."""

from __future__ import annotations

import torch

from kernels.common import Tensors, Tolerance, Workload, poisoned

ACTIVATIONS = ("x",)  # new with every call: `prepare` sees no values of them, and no weights are among them
IN_PLACE: tuple[str, ...] = ()  # outputs that are updated where they stand, e.g. a state
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def _workload(m: int, n: int, dtype: str, role: str = "check") -> Workload:
    return Workload(f"m{m}_n{n}_{dtype}", {"M": m, "N": n, "dtype": dtype}, role)


WORKLOADS = (
    _workload(1, 75, "f32"),  # odd sizes, so that a tail is checked
    _workload(63, 131, "bf16"),
    _workload(3, 1024, "bf16"),
    *(_workload(m, 4096, "bf16", "measure") for m in (1, 64, 4096)),
)


def inputs(workload: Workload, seed: int = 0, device: torch.device | str = "cpu") -> Tensors:
    """x [M, N] and w [N], standard normal, in the workload's dtype."""
    m, n, dtype = workload["M"], workload["N"], DTYPES[workload["dtype"]]
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(m, n, generator=generator, device=device)
    return {"x": x.to(dtype), "w": torch.randn(n, generator=generator, device=device).to(dtype)}


def outputs(workload: Workload, inputs: Tensors) -> Tensors:
    """{"y": [M, N]} in x's dtype, every element NaN."""
    return {"y": poisoned((workload["M"], workload["N"]), DTYPES[workload["dtype"]], inputs["x"].device)}


def tolerance(workload: Workload, precision: str) -> dict[str, Tolerance]:
    """Limits for "y": one product in float32 is off by half a unit, 2^-24; storing y is added by the checker."""
    return {"y": Tolerance(2.0**-24, 16 * 2.0**-24, "one product in float32; the largest is 16 rms at most")}
