"""No precision of paged decode attention admits the next cheaper format of q, of the cache, or of the probabilities."""

from __future__ import annotations

import pytest
import torch

from kernels.common import Tensors, Workload
from kernels.kv import cases
from kernels.kv.reference import decode, reference
from tests.kernels.cheaper import EIGHT_BITS, FOUR_BITS, Rounding, admitted, cast, refused, stored

CHECKS = [w for w in cases.WORKLOADS if w.role == "check"]


def decoded(workload: Workload, inputs: Tensors, precision: str) -> Tensors:
    """The problem as `precision` sees it, with float64 caches in the place of quantised planes."""
    seen = cases.reference_inputs(workload, inputs, precision)
    found = {name: inputs[name] for name in ("q", "page_table", "seq_lens")}
    for name in ("k", "v"):
        scale = seen.get(f"{name}_scale")
        planes = seen[f"{name}_cache"].transpose(0, 1)  # heads ahead, as `decode` takes scales of e4m3
        if scale is not None and scale.dim() == 4:
            scale = scale.transpose(0, 1).flatten(1, 2)
        tokens = decode(planes.flatten(1, 2), scale)
        found[f"{name}_cache"] = tokens.reshape(planes.shape).transpose(0, 1)
    return found


def cheaper(workload: Workload, precision: str) -> dict[str, tuple[str, ...]]:
    """Below a 16-bit cache come formats of 8 bits, below one of 8 bits those of 4; q is in 16 bits but for fp8-qkv."""
    finer = ("bf16",) if workload["dtype"] == "fp16" else ()
    cache = (*finer, *EIGHT_BITS) if precision == "bf16" else FOUR_BITS
    q = FOUR_BITS if precision == "fp8-qkv" else (*finer, *EIGHT_BITS)
    return {"q": q, "k_cache": cache, "v_cache": cache}


def exceptions(workload: Workload) -> set[tuple[str, str, str]]:
    """What no limit can tell."""
    if workload["ctx"] > 1:
        return set()
    # The softmax of one token is 1 whatever q and K are.
    return {(p, o, f) for p in cases.PRECISIONS for o in ("q", "k_cache") for f in cheaper(workload, p)[o]}


@pytest.mark.parametrize("workload", CHECKS, ids=lambda w: w.id)
def test_cheaper_formats_are_refused(workload: Workload) -> None:
    inputs = cases.inputs(workload, 0, "cpu")
    found: set[tuple[str, str, str]] = set()
    for precision in cases.PRECISIONS:
        seen = decoded(workload, inputs, precision)
        wanted = reference(seen)

        def of(operand: str, rounding: Rounding, seen: Tensors = seen) -> Tensors:
            return stored(cases, workload, inputs, reference(seen | {operand: rounding(seen[operand])}))

        found |= set(admitted(cases, workload, precision, wanted, of, cheaper(workload, precision)))
    assert found == exceptions(workload)


def with_probabilities(seen: Tensors, rounding: Rounding) -> Tensors:
    """The reference with its probabilities, relative to each row's largest as kernels hold them, rounded."""
    o = torch.zeros(seen["q"].shape, dtype=torch.float64)
    group = seen["q"].shape[1] // seen["k_cache"].shape[1]
    for b, length in enumerate(seen["seq_lens"].tolist()):
        k, v = (seen[n][seen["page_table"][b].clamp_min(0).long()] for n in ("k_cache", "v_cache"))
        k, v = (x.transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(group, dim=0) for x in (k, v))
        logits = torch.einsum("hd,htd->ht", seen["q"][b].double(), k) * k.shape[-1] ** -0.5
        p = (logits - logits.amax(-1, keepdim=True)).exp()
        o[b] = torch.einsum("ht,htd->hd", rounding(p), v) / p.sum(-1, keepdim=True)
    return {"o": o}


@pytest.mark.parametrize("precision", ["fp8-kv", "q8_0-kv"])
@pytest.mark.parametrize(
    "workload", [w for w in CHECKS if w["ctx"] > 17 and w.inputs == cases.NORMAL], ids=lambda w: w.id
)
def test_probabilities_of_quantised_caches_are_not_bf16(workload: Workload, precision: str) -> None:
    """They are declared fp16. Outlier workloads do not tell: a sink's probability is 1, which every format has."""
    seen = decoded(workload, inputs := cases.inputs(workload, 0, "cpu"), precision)
    wanted = reference(seen)
    for dtype, fits in ((torch.float16, True), (torch.bfloat16, False)):
        out = stored(cases, workload, inputs, with_probabilities(seen, cast(dtype)))
        assert refused(cases, workload, precision, out, wanted) != fits


@pytest.mark.parametrize("precision", cases.PRECISIONS)
def test_a_long_context_refuses_cheaper_formats(precision: str) -> None:
    """A measurement's distribution at 2048 tokens; errors of the tokens are independent, so longer is the same."""
    workload = cases._workload(2048, 1, 6, 2, 128, role="measure")
    inputs = cases.inputs(workload, 0, "cpu")
    seen = decoded(workload, inputs, precision)

    def of(operand: str, rounding: Rounding) -> Tensors:
        return stored(cases, workload, inputs, reference(seen | {operand: rounding(seen[operand])}))

    assert not set(admitted(cases, workload, precision, reference(seen), of, cheaper(workload, precision)))
