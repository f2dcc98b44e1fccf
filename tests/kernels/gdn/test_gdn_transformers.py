"""The reference against transformers' torch functions of Qwen3-Next and Qwen3.5, wider than test_gdn.py's sweep.

Another project's text of the same recurrence, chunked and token by token, in float32. Skipped where transformers is
not installed. Shapes: odd lengths from 1 to 8,193, one to four v heads per k head, both head sizes, every regime,
keys normalised outside and inside. kernels/gdn/NOTES.md keeps the errors seen with their version. conv_decode (short
convolution, gates, step) is held to the layer itself, whose decode step is watched at its calls.
"""

import importlib
from typing import Any

import pytest
import torch

from kernels.common import Tensors, Workload, has_triton
from kernels.gdn import cases
from kernels.gdn.reference import before_the_step, reference
from lab.check import accuracy, families
from tests.loops import over
from tests.ran import run_once

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


SHAPED = [problem(*shape) for shape in SHAPES]
ASKED = {f"{form} {model} {w.id}": (w, model, form) for form in FORMS for model in MODELS for w in SHAPED}


@pytest.mark.slow
@over(ASKED)
def test_reference_agrees(workload: Workload, model: str, form: str) -> None:
    inputs = cases.inputs(workload, 3, "cpu")
    error = worst(*theirs(model, form, workload, inputs), reference(inputs))
    assert error < LIMIT


@pytest.mark.slow
def test_a_long_odd_length() -> None:
    """8,193 tokens: transformers' two functions and torch_chunk against the float64 recurrence.

    Triton's kernels, which its interpreter runs a thousand times slower, at 2,049: 32 chunks and one token.
    """
    gdn = families.load("gdn")
    for T, names in ((LONG, ("torch_chunk",)), (2049, ("fused_chunk", "split_pipeline") if has_triton() else ())):
        workload = problem(T, 1, 1, 64, "keep", 0)
        inputs = cases.inputs(workload, 4, "cpu")
        want = reference(inputs)
        for form in FORMS if T == LONG else ():
            assert worst(*theirs(MODELS[0], form, workload, inputs), want) < LIMIT
        for name in names:
            out = run_once(gdn, gdn.candidates[name], workload, inputs)
            limits = cases.tolerance(workload, gdn.candidates[name].precision)
            for output, limit in limits.items():
                assert accuracy.compare(output, out[output], want[output], limit).ok, f"{name}: {output}"


def clones(values: dict[Any, Any]) -> dict[Any, Any]:
    return {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in values.items()}


def a_decode_step_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> tuple[Tensors, Tensors]:
    """One token of three sequences behind a prefill of five through Qwen3NextGatedDeltaNet with random weights.

    Returns what it computes from as inputs of conv_decode, their rows permuted, and what it handed on and found.
    """
    transformers = pytest.importorskip(
        "transformers", reason="the independent implementation: pip install transformers"
    )
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    dims = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "hidden_size": 32, "num_hidden_layers": 1}
    config = transformers.Qwen3NextConfig(**heads, **dims, layer_types=["linear_attention"])
    torch.manual_seed(0)
    layer = module.Qwen3NextGatedDeltaNet(config, 0)
    torch.nn.init.normal_(layer.dt_bias)
    seen: dict[str, Any] = {}

    def watch(owner: Any, name: str) -> None:
        own = getattr(owner, name)

        def watched(*given: Any, **named: Any) -> Any:
            before = clones(dict(enumerate(given))), clones(named)  # some are updated in place
            seen[name] = *before, own(*given, **named)
            return seen[name][2]

        monkeypatch.setattr(owner, name, watched)

    watch(module, "causal_conv1d_update")
    watch(module, "torch_recurrent_gated_delta_rule")
    watch(layer, "fix_query_key_value_ordering")
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        layer(torch.randn(3, 5, 32), cache_params=cache)
        layer(torch.randn(3, 1, 32), cache_params=cache)
    (mixed, before, weight, *_) = seen["causal_conv1d_update"][0].values()
    given, named, (o, state) = seen["torch_recurrent_gated_delta_rule"]
    q, k, v = given.values()
    *_, b, a = seen["fix_query_key_value_ordering"][2]
    rows = torch.tensor([2, 0, 1], dtype=torch.int32)
    place = rows.argsort()
    inputs = {"mixed_qkv": mixed[..., 0], "conv_weight": weight, "a": a[:, 0], "b": b[:, 0], "A_log": layer.A_log}
    inputs |= {"dt_bias": layer.dt_bias, "conv_state": before[..., 1:].transpose(1, 2)[place], "state_rows": rows}
    inputs |= {"state": named["initial_state"][place], "raw_qk": torch.ones(1)}
    found = {"q": q[:, 0], "k": k[:, 0], "v": v[:, 0], "g": named["g"][:, 0], "beta": named["beta"][:, 0], "o": o[:, 0]}
    after = cache.get_conv_state(0, state_idx=0)[..., 1:].transpose(1, 2)
    found |= {"state": state[place], "conv_state": after[place]}
    return {n: x.detach() for n, x in inputs.items()}, {n: x.detach() for n, x in found.items()}


@pytest.mark.slow
def test_convolution_gates_and_step_are_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    given, found = a_decode_step_of_the_layer(monkeypatch)
    step, _ = before_the_step(given)
    wanted = step | reference(given)
    assert wanted.keys() == found.keys()
    for name, got in found.items():
        assert float((got.double() - wanted[name]).norm() / wanted[name].norm()) < LIMIT, name


@pytest.mark.slow
def test_another_recurrence_is_told_apart() -> None:
    """The comparison can fail: without the decay, or with the learning rate applied to the guess alone."""
    workload = problem(33, 1, 1, 64, "mixed", 0)
    inputs = cases.inputs(workload, 3, "cpu")
    for change in ({"g": inputs["g"] * 0}, {"beta": inputs["beta"] * 1.01}):
        o, state = theirs(MODELS[0], FORMS[0], workload, inputs | change)
        assert worst(o, state, reference(inputs)) > 1e-3
