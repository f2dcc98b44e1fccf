"""The reference against transformers' torch functions of Qwen3-Next and Qwen3.5, wider than tests/test_gdn.py's sweep.

Another project's text of the same recurrence, chunked and token by token, in float32. Skipped where transformers is
not installed. Shapes: odd lengths from 1 to 8,193, one to four v heads per k head, both head sizes, every regime,
keys normalised outside and inside. kernels/gdn/NOTES.md keeps the errors seen with their version.
"""

import importlib
from typing import Any

import pytest
import torch

from kernels.common import Workload, has_triton
from kernels.gdn import cases
from kernels.gdn.reference import reference
from lab import accuracy, families

MODELS = ("qwen3_next", "qwen3_5")
FORMS = ("torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule")
REGIMES = ("mixed", "forget", "keep", "beta0", "beta1", "similar")
# (T, Hk, Hv, D, regime, l2norm)
SHAPES = (
    *((T, 1, 2, 64, "mixed", T % 2) for T in (1, 2, 3, 63, 64, 65, 127, 129, 513)),
    *((97, 1, ratio, 64, "mixed", 0) for ratio in (1, 2, 3, 4)),
    (97, 2, 6, 128, "mixed", 1),
    (129, 2, 8, 128, "mixed", 0),
    *((131, 1, 1, 64, regime, raw) for regime in REGIMES for raw in (0, 1)),
)
LIMIT = 5e-6  # float32 there: tens of chained sums of D terms, each sqrt(D) 2^-24
LONG = 8193


def problem(T: int, heads_k: int, heads_v: int, dim: int, regime: str, raw: int) -> Workload:
    axes: dict[str, int | str] = {
        "op": "prefill", "batch": 1, "T": T, "lengths": "", "Hk": heads_k, "Hv": heads_v, "D": dim, "dtype": "f32",
        "state_dtype": "f32", "qk_l2norm": raw, "regime": regime, "pad": 0,
    }  # fmt: skip
    return Workload(f"t{T}_hk{heads_k}_hv{heads_v}_d{dim}_{regime}_raw{raw}", axes)


def theirs(model: str, form: str, workload: Workload, inputs: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    pytest.importorskip("transformers", reason="the independent implementation: pip install transformers")
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    ratio = workload["Hv"] // workload["Hk"]
    q, k = (inputs[n].repeat_interleave(ratio, dim=2) for n in ("q", "k"))
    return getattr(module, form)(
        q, k, inputs["v"], inputs["g"], inputs["beta"], initial_state=inputs["initial_state"],
        output_final_state=True, use_qk_l2norm_in_kernel=bool(workload["qk_l2norm"]),
    )  # fmt: skip


def worst(o: Any, state: Any, want: dict[str, torch.Tensor]) -> float:
    pairs = ((o, want["o"]), (state, want["final_state"]))
    return max(float((got.double() - right).norm() / right.norm()) for got, right in pairs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("workload", [problem(*s) for s in SHAPES], ids=lambda w: w.id)
def test_reference_agrees(workload: Workload, model: str, form: str) -> None:
    inputs = cases.inputs(workload, 3, "cpu")
    error = worst(*theirs(model, form, workload, inputs), reference(inputs))
    assert error < LIMIT


@pytest.mark.slow
def test_a_long_odd_length() -> None:
    """8,193 tokens: transformers' two functions, and our chunked candidates, against the float64 recurrence."""
    workload = problem(LONG, 1, 1, 64, "keep", 0)
    inputs = cases.inputs(workload, 4, "cpu")
    want = reference(inputs)
    for form in FORMS:
        assert worst(*theirs(MODELS[0], form, workload, inputs), want) < LIMIT
    gdn = families.load("gdn")
    for name in ("torch_chunk", *(("fused_chunk", "split_pipeline") if has_triton() else ())):
        out = accuracy.run_once(gdn, gdn.candidates[name], workload, inputs)
        limits = cases.tolerance(workload, gdn.candidates[name].precision)
        for output, limit in limits.items():
            assert accuracy.compare(output, out[output], want[output], limit).ok, f"{name}: {output}"


def test_another_recurrence_is_told_apart() -> None:
    """The comparison can fail: without the decay, or with the learning rate applied to the guess alone."""
    workload = problem(33, 1, 1, 64, "mixed", 0)
    inputs = cases.inputs(workload, 3, "cpu")
    for change in ({"g": inputs["g"] * 0}, {"beta": inputs["beta"] * 1.01}):
        o, state = theirs(MODELS[0], FORMS[0], workload, inputs | change)
        assert worst(o, state, reference(inputs)) > 1e-3
