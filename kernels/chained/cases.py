"""Workloads of sequences of products, their inputs, and how far an output may lie from the reference.

Weights are normal with standard deviation K^-1/2, so every result is about unit normal.
"""

from __future__ import annotations

import torch

from kernels.chained.cost import products
from kernels.common import Tensors, Tolerance, Workload, poisoned
from kernels.nvfp4 import format as fmt

ACTIVATIONS = ("x",)
IN_PLACE: tuple[str, ...] = ()
LAYER = (5120, 6144, 5120, 17408, 5120)  # of a dense model of 27 B: into the recurrence and out of it, up and down


def _workload(m: int, dims: tuple[int, ...], role: str, source: str = "") -> Workload:
    axes: dict[str, int | str] = {"M": m, **{f"D{i}": width for i, width in enumerate(dims)}, "dtype": "bf16"}
    return Workload(f"m{m}_d{'-'.join(map(str, dims))}", axes, role, "standard normal", source)


WORKLOADS = (
    _workload(1, (64, 96, 48), "check"),
    _workload(3, (128, 64, 128, 32), "check"),
    *(_workload(m, LAYER, "measure", "q36-27b.products") for m in (1, 8)),
)


def inputs(workload: Workload, seed: int = 0, device: torch.device | str = "cpu") -> Tensors:
    """x and the weights of every product, as the package's docstring has them."""
    rng = torch.Generator(device=device).manual_seed(seed)
    made = activations(workload, seed, device)
    for number, product in enumerate(products(workload)):
        n, k = product["N"], product["K"]
        w = fmt.quantise(torch.randn(n, k, generator=rng, device=device) * k**-0.5)
        made |= {f"w{number}_{part}": getattr(w, part) for part in ("packed", "scale", "tensor_scale")}
    return made


def activations(workload: Workload, seed: int, device: torch.device | str) -> Tensors:
    """x alone, of the same distribution."""
    rng = torch.Generator(device=device).manual_seed(seed + 1)
    x = torch.randn(workload["M"], products(workload)[0]["K"], generator=rng, device=device)
    return {"x": x.to(torch.bfloat16)}


def outputs(workload: Workload, inputs: Tensors) -> Tensors:
    """{"y": [M, N]} in x's dtype, every element NaN."""
    return {"y": poisoned((workload["M"], products(workload)[-1]["N"]), torch.bfloat16, inputs["x"].device)}


def tolerance(workload: Workload, precision: str) -> dict[str, Tolerance]:
    """Limits for "y" at `precision`; raises ValueError for another than the two.

    Roundings to bf16 are independent, and a product with such weights keeps the relative error of its operand: between
    the products one each, of 0.58 * 2^-8 at most (kernels/nvfp4/cases.py), and with bf16 weights one more for each. A
    fifth more for the sums and few outputs; six deviations for the worst element.
    """
    count = len(products(workload))
    if precision not in ("nvfp4-w4a16", "bf16"):
        raise ValueError(f'precision={precision!r} is not one of ["bf16", "nvfp4-w4a16"]; use one of them')
    roundings = count - 1 + (1.11**2 * 1.2 * count / 0.58**2 if precision == "bf16" else 0)
    few = 1 + 20 / (workload["M"] * products(workload)[-1]["N"])
    limit = 1.2 * few * 0.58 * 2.0**-8 * roundings**0.5
    return {"y": Tolerance(limit, 6 * limit, "independent roundings to bf16 between products and of weights")}
