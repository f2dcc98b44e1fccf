"""No precision of Q8_0 products admits the next cheaper format of an operand or of the sum."""

from __future__ import annotations

import functools

import pytest
import torch

from kernels.common import Tensors, Workload
from kernels.q8 import cases
from kernels.q8.reference import reference
from tests.kernels.cheaper import EIGHT_BITS, FOUR_BITS, Rounding, admitted, refused, stored

CHECKS = [w for w in cases.WORKLOADS if w.role == "check"]
BELOW_Q8_0 = ("e4m3", *FOUR_BITS)


def weights(inputs: Tensors) -> torch.Tensor:
    return inputs["w_q"].double() * inputs["w_d"].double().repeat_interleave(32, dim=1)


def passing(workload: Workload) -> set[tuple[str, str, str]]:
    """Each (precision, operand, format) that the limits admit."""
    inputs = cases.inputs(workload, 0, "cpu")
    x, w, wanted = inputs["x"].double(), weights(inputs), reference(inputs)

    @functools.cache  # several precisions ask for the same
    def of(operand: str, rounding: Rounding) -> Tensors:
        y = (rounding(x) if operand == "x" else x) @ (rounding(w) if operand == "w" else w).T
        return stored(cases, workload, inputs, {"y": y})

    finer = ("bf16",) if workload["dtype"] == "fp16" else ()
    found: set[tuple[str, str, str]] = set()
    for precision in ("q8_0-w8a16", "q8_0-w8a8", "q8_0-expanded", "bf16"):
        below = BELOW_Q8_0 if precision == "q8_0-w8a8" else (*finer, *EIGHT_BITS)
        found |= set(admitted(cases, workload, precision, wanted, of, {"x": below, "w": BELOW_Q8_0}))
    return found


@pytest.mark.parametrize("workload", CHECKS, ids=lambda w: w.id)
def test_cheaper_formats_are_refused(workload: Workload) -> None:
    assert passing(workload) == set()


@pytest.mark.parametrize("m", [1, 32])
def test_a_measured_sum_refuses_cheaper_formats(m: int) -> None:
    """A measurement's K and distribution with fewer rows of weights."""
    assert passing(cases._workload(m, 600, 5120, role="measure")) == set()


@pytest.mark.parametrize("workload", [w for w in CHECKS if w["K"] >= 64], ids=lambda w: w.id)
def test_a_sum_rounded_on_the_way_is_refused(workload: Workload) -> None:
    """Two halves of K, added in bf16, beside exact operands."""
    inputs, half = cases.inputs(workload, 0, "cpu"), workload["K"] // 2
    x, w = inputs["x"].double(), weights(inputs)
    y = sum((x[:, k] @ w[:, k].T).to(torch.bfloat16).double() for k in (slice(half), slice(half, None)))
    out = stored(cases, workload, inputs, {"y": y})  # type: ignore[dict-item]
    assert refused(cases, workload, "q8_0-w8a16", out, reference(inputs))
