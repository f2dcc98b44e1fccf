"""Workloads of the Q8_0 family, their inputs, their outputs and how far an output may lie from the reference.

Weights are normal with standard deviation K^-1/2, so y is about unit normal at every K. The reference is float64 on the
Q8_0 weights and the activations as given, for every precision; so the tolerance of w8a8 contains what quantising the
activations costs by design.
"""

from __future__ import annotations

import torch

from kernels.common import Tensors, Tolerance, Workload, poisoned
from kernels.q8 import format as fmt

ACTIVATIONS = ("x",)
IN_PLACE: tuple[str, ...] = ()
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Relative rms error of one rounding of a normal value to int8 by blocks of 32: the mean amax of 32 normal values is
# 2.24, the step amax / 127, the error step / sqrt(12): 5.1e-3; 5.2e-3 seen on 4 M values (larger steps weigh more).
INT8_NORMAL = 5.2e-3


def _workload(
    m: int, n: int, k: int, dtype: str = "bf16", role: str = "check", source: str = "", n_seqs: int = 0
) -> Workload:
    """n_seqs: x is one token of each of so many sequences, which is what the routing question needs."""
    axes: dict[str, int | str] = {"M": m, "N": n, "K": k, "dtype": dtype}
    if n_seqs:
        axes["n_seqs"] = n_seqs
    return Workload(f"m{m}_n{n}_k{k}" + (f"_{dtype}" if role == "check" else ""), axes, role, source=source)


WORKLOADS = (
    _workload(1, 75, 64),
    _workload(1, 131, 1056, "fp16"),
    _workload(3, 75, 256, "fp16"),
    _workload(8, 128, 1056),
    _workload(16, 11, 32, n_seqs=16),
    _workload(17, 64, 256),
    _workload(63, 75, 1056),
    _workload(130, 64, 256, "fp16"),
    *(_workload(m, 17408, 5120, role="measure", source="q36-27b.ffn_up") for m in (1, 8, 32, 128, 512, 2048)),
    _workload(128, 5120, 6144, role="measure", source="q36-27b.ssm_out", n_seqs=128),
)


def inputs(workload: Workload, seed: int = 0, device: torch.device | str = "cpu") -> Tensors:
    """x [M, K] in the workload's dtype, w_q int8 [N, K], w_d fp16 [N, K / 32]."""
    m, n, k = workload["M"], workload["N"], workload["K"]
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(m, k, generator=generator, device=device)
    w_q, w_d = fmt.quantise(torch.randn(n, k, generator=generator, device=device) * k**-0.5)
    return {"x": x.to(DTYPES[workload["dtype"]]), "w_q": w_q, "w_d": w_d}


def activations(workload: Workload, seed: int, device: torch.device | str) -> Tensors:
    """x alone, of the same distribution."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(workload["M"], workload["K"], generator=generator, device=device)
    return {"x": x.to(DTYPES[workload["dtype"]])}


def outputs(workload: Workload, inputs: Tensors) -> Tensors:
    """{"y": [M, N]} in x's dtype, every element NaN."""
    return {"y": poisoned((workload["M"], workload["N"]), DTYPES[workload["dtype"]], inputs["x"].device)}


def tolerance(workload: Workload, precision: str) -> dict[str, Tolerance]:
    """Limits for "y" at `precision`; raises ValueError naming the known precisions otherwise.

    With exact operands only float32 sums are left: a unit of 2^-23 for each 16 products, should a tensor core cut all
    off one way. Weights rounded to the dtype of x (at most 0.58 of 2^-p rms), and activations rounded to int8, add
    relative errors of their own (errors of different k average like the products do), which scatter with the number of
    outputs and of quantised blocks. The largest of a few million errors lies under six rms.

    What that rejects, against limits of 3e-3 and, with int8 activations, 6e-3: x in int8 by blocks of 32 (INT8_NORMAL)
    where 16 bits are declared, x in e4m3 (2.65e-2) or 4 bits (9e-2), weights in e4m3 or 4 bits, a sum rounded to bf16
    on the way (1.2e-3, which the rounding of y does not hide).
    """
    m, n, k = workload["M"], workload["N"], workload["K"]
    sums = (k / 16 + 16) * 2.0**-23
    rounded = 0.58 * (2.0**-8 if workload["dtype"] == "bf16" else 2.0**-11)
    added = {"q8_0-w8a16": 0.0, "q8_0-w8a8": INT8_NORMAL, "q8_0-expanded": rounded, "bf16": rounded}
    if precision not in added:
        raise ValueError(f"precision={precision!r} is not one of {sorted(added)}; use one of them")
    scatter = 1 + 2.25 / (m * n) ** 0.5 + ((32 / (m * k)) ** 0.5 if precision == "q8_0-w8a8" else 0.0)
    reasons = {
        "q8_0-w8a16": "exact operands, float32 sums",
        "q8_0-w8a8": "activations rounded to int8 in blocks of 32",
        "q8_0-expanded": "weights rounded to the dtype of x",
        "bf16": "weights rounded to bf16",
    }
    own = scatter * 1.05 * added[precision]
    return {"y": Tolerance(own + sums, 6 * own + 16 * sums, reasons[precision])}
