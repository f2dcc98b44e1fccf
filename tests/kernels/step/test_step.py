"""A step's candidate against its reference, what the check must refuse, and the floor's arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.common import Tensors, Workload, has_triton, interpreted
from kernels.step import cases, torch_eager, wiring
from kernels.step.cost import cost, parts
from kernels.step.model import MODELS
from lab.base import models
from lab.check import families
from lab.check.accuracy import check
from tests.kernels import ahead

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(
    not has_triton() or (DEVICE == "cpu" and not interpreted()), reason="needs Triton, on a GPU or in its interpreter"
)
TRITON = ("triton_fused", "served")
STATEFUL = ("k_cache", "v_cache", "state", "conv_state")
CHECKS = [w for w in cases.WORKLOADS if w.role == "check"]
BY_ID = {w.id: w for w in cases.WORKLOADS}


def checked(workload: Workload, run: Any = None, seed: int = 0, name: str = "torch_eager") -> str:
    """ "" or what is wrong with the step, its `run` replaced."""
    family = families.load("step")
    candidate = family.candidate(name)
    found = check(family, replace(candidate, run=run or candidate.run), workload, seed, DEVICE)
    if DEVICE == "cuda" and found.status == "skipped":  # its kernels are for some shapes, references for all
        pytest.skip(found.message)
    if found.status == "ok" and name == "torch_eager":  # a limit that nothing comes near would let anything pass
        logits = next(e for e in found.errors if e.output == "logits")
        assert logits.relative_error > 0.25 * logits.relative_limit
    return found.message if found.status != "ok" else ""


# Triton's interpreter takes as long as there are tokens: `make quick` leaves it the steps that decode, of one seed.
RUNS = [
    pytest.param(w, name, seed, id=f"{w.id}-{name}-{seed}", marks=marks)
    for w in CHECKS
    for name in ("torch_eager", *TRITON)
    for seed in (0, 1)
    for marks in [
        [needs_triton] * (name in TRITON)
        + [pytest.mark.slow] * (name in TRITON and (bool(seed) or not w.id.startswith("decode")))
    ]
]


@pytest.mark.parametrize(("workload", "name", "seed"), RUNS)
def test_a_candidate_is_a_step(workload: Workload, name: str, seed: int) -> None:
    assert checked(workload, seed=seed, name=name) == ""


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, torch.bfloat16)


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within what rounding the wanted values once, and those in between once or twice, costs."""
    error = (got.double() - wanted.double()).norm() / wanted.double().norm()
    assert float(error) < 3 * cases.ROUNDING
    assert float((got.double() - wanted.double()).abs().max()) < 0.05 * float(wanted.double().abs().max())


@needs_triton
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 80), (3, 5120), (17, 1)])
@pytest.mark.parametrize("few", [0, 128])
def test_a_fused_part_is_the_plain_one(monkeypatch: pytest.MonkeyPatch, few: int, tokens: int, hidden: int) -> None:
    """Where a sum is stored the bits are the same; elsewhere fused kernels round less."""
    from kernels.step import triton_fused

    monkeypatch.setattr(triton_fused, "FEW_TOKENS", few)
    plain, fused = torch_eager.PLAIN, triton_fused.FUSED
    x, delta, gain = drawn(tokens, hidden), drawn(tokens, hidden + 1)[:, :hidden].contiguous(), drawn(hidden).float()
    for given in (None, delta):
        summed, normed = fused.add_norm(x, given, gain)
        assert torch.equal(summed, plain.add_norm(x, given, gain)[0])
        near(normed, plain.add_norm(x, given, gain)[1])
    near(fused.activate(x, delta), plain.activate(x, delta))
    halves = torch.cat((x, delta), dim=1).chunk(2, dim=1)
    assert torch.equal(fused.activate(*halves), fused.activate(x, delta))
    wide, narrow = fused.add_norm(x.float(), delta, gain)
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(wide, plain.add_norm(x.float(), delta, gain)[0])
    near(narrow, plain.add_norm(x.float(), delta, gain)[1])
    o, z, head = drawn(tokens, 3, 64), drawn(tokens, 192), drawn(64).float()
    near(fused.gated_norm(o, head, z), plain.gated_norm(o, head, z))
    columns = torch.cat((drawn(tokens, 16), z), dim=1)[:, 16:]
    assert torch.equal(fused.gated_norm(o, head, columns), fused.gated_norm(o, head, z))
    weight = drawn(10, hidden)
    for got, wanted in zip(fused.alpha_beta(weight, x), plain.alpha_beta(weight, x), strict=True):
        assert got.is_contiguous()
        near(got, wanted)
    gated = drawn(tokens, 6, 2, 32)
    near(fused.gate(gated[:, :, 0].contiguous(), gated), plain.gate(gated[:, :, 0].contiguous(), gated))


@needs_triton
@pytest.mark.parametrize("few", [0, 128])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary"), [(6, 1, 64, 16), (4, 2, 32, 32), (24, 4, 256, 64)])
def test_rotated_heads_lie_in_their_pages(
    monkeypatch: pytest.MonkeyPatch, few: int, heads: int, kv_heads: int, dim: int, rotary: int
) -> None:
    from kernels.step import triton_fused

    monkeypatch.setattr(triton_fused, "FEW_TOKENS", few)
    monkeypatch.setattr(triton_fused, "TURNED", 2)
    gated, k, v = drawn(5, heads, 2, dim), drawn(5, kv_heads, dim), drawn(5, kv_heads, dim + 1)[..., :dim].contiguous()
    angle = torch.tensor([0.0, 1.0, 700.0, 32767.0, 3.0])[:, None, None] * 1e7 ** -(torch.arange(0, rotary, 2) / rotary)
    args: dict[str, Any] = {"cos": angle.cos().to(DEVICE), "sin": angle.sin().to(DEVICE)}
    args |= {"slots": torch.tensor([0, 15, 16, 47, 33], device=DEVICE)}
    args |= {f"{name}_norm.weight": 1 + drawn(dim).float() for name in ("q", "k")}
    found = []
    for one in (torch_eager.PLAIN, triton_fused.FUSED):
        caches = [torch.full((3, kv_heads, 16, dim), 7.0, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
        found.append((one.rotate(args, "", gated, k, v, *caches), *caches))
    near(found[1][0], found[0][0])
    near(found[1][1], found[0][1])
    assert torch.equal(found[1][2], found[0][2])
    assert torch.equal(found[1][1] == 7.0, found[0][1] == 7.0), "a key in another place"


@pytest.mark.slow
@pytest.mark.skipif(not has_triton(), reason="needs Triton")
def test_builds_compile_ahead_of_time_without_spills() -> None:
    made = ahead.rows("step")
    assert {row["target"] for row in made} == set(ahead.TARGETS)
    assert [row for row in made if (row["status"], row["fits"], row["spill_bytes"] or 0) != ("ok", True, 0)] == []


def spoilt(name: str) -> Any:
    """torch_eager's `run` with one thing wrong."""

    def run(args: dict[str, Any], out: Tensors) -> None:
        args, parts = dict(args), torch_eager.PLAIN
        before = {key: out[key].clone() for key in cases.IN_PLACE if key in out}
        if name == "no_gate":
            args |= {k: torch.zeros_like(v) for k, v in args.items() if k.endswith("in_proj_z.weight")}
        elif name == "late_position":
            parts = replace(
                parts,
                rotate=lambda given, *rest: torch_eager.rotate(given | {"cos": given["cos"].roll(1, 0)}, *rest),
            )
        elif name == "no_mask":
            late = {"positions": args["positions"] + 5}
            parts = replace(parts, attend=lambda given, *rest: torch_eager.attend(given | late, *rest))
        elif name == "layer_left_out":
            args |= {k: torch.zeros_like(v) for k, v in args.items() if k == "model.layers.2.mlp.down_proj.weight"}
        elif name == "another_router":
            args |= {k: v.roll(1, 0) for k, v in args.items() if k == "model.layers.2.mlp.gate.weight"}
        elif name in ("one_expert_fewer", "no_shared_expert"):
            of = args["mixtures"]["model.layers.3.mlp."]
            wrong = {"k": 1} if name == "one_expert_fewer" else {"shared_gate": of["shared_gate"] * 0 - 9.0}
            args["mixtures"] = args["mixtures"] | {"model.layers.3.mlp.": of | wrong}
        elif name == "swapped_rows":
            args["rows"] = args["rows"][::-1]
        wiring.run(parts, args, out)
        if name.startswith("stale_"):  # of the last layer alone
            out[name.removeprefix("stale_")][-1].copy_(before[name.removeprefix("stale_")][-1])
        elif name == "wrong_token":
            out["next_logit"].copy_(out["logits"].min(-1).values)
        elif name == "bf16_logits_of_another":
            out["logits"].copy_(out["logits"].roll(1, 0))

    return run


@pytest.mark.parametrize(
    "name",
    [
        *("no_gate", "late_position", "no_mask", "layer_left_out", "swapped_rows", "wrong_token"),
        *("bf16_logits_of_another", *(f"stale_{name}" for name in STATEFUL)),
    ],
)
def test_a_step_with_one_thing_wrong_is_refused(name: str) -> None:
    # A token that looks ahead is seen where a layer comes behind attention.
    where = "prefill_small_npl2_t9_ctx15" if name == "no_mask" else "mixed_odd_npl3_n1-12-1_ctx6"
    said = checked(BY_ID[where], spoilt(name))
    assert "relative error" in said, said


@pytest.mark.parametrize("name", ["another_router", "one_expert_fewer", "no_shared_expert"])
def test_a_mixture_with_one_thing_wrong_is_refused(name: str) -> None:
    said = checked(BY_ID["mixed_odd-moe_npl3_n1-12-1_ctx6"], spoilt(name))
    assert "relative error" in said, said


def test_no_rounding_picks_another_expert() -> None:
    """The least of a mixture's picked logits lies far above the largest of the others, in every layer and token."""
    from kernels.step.reference import weight

    model = MODELS["small-moe"]
    weights = cases.weights(model, 0, DEVICE)
    embedded = weights["model.embed_tokens.weight"].float()
    for layer in range(model.layers):
        router = weights[f"model.layers.{layer}.mlp.gate.weight"].float()
        logits = (embedded @ router.T).sort(descending=True).values
        assert float((logits[:, model.top_k - 1] - logits[:, model.top_k]).min()) > cases.CODE
        added = weight(weights, f"model.layers.{layer}.mlp.shared_expert.down_proj")
        assert float(added[: model.experts].norm(dim=1).max()) < 0.02 * float(added[model.experts :].norm(dim=1).min())
    hits = (embedded[:, : model.experts] > 0).sum(0)
    assert set((embedded[:, : model.experts] > 0).sum(1).tolist()) == {model.top_k}
    assert float(hits.max()) < 2 * float(hits.min())


def test_a_stale_cache_is_refused_behind_a_long_context() -> None:
    """One new token in 200: next to nothing of the cache's energy, and one element off is enough."""
    workload = cases._workload("decode", "odd", 2, 200)
    assert checked(workload) == ""
    for name in ("k_cache", "v_cache"):
        assert "relative error" in checked(workload, spoilt(f"stale_{name}"))


def test_a_stale_block_of_a_quantised_cache_is_refused() -> None:
    """Codes and scales are one value: neither may stay as it was."""
    workload = BY_ID["decode_odd_npl3_ctx17_cache-q8_0"]
    for name in ("k_cache", "v_block"):

        def run(args: dict[str, Any], out: Tensors, name: str = name) -> None:
            before = out[name].clone()
            torch_eager.run(args, out)
            out[name].copy_(before)

        assert "relative error" in checked(workload, run)


def test_a_prompt_in_two_steps_is_the_prompt() -> None:
    """The reference: a prefill of 12 tokens, or of 7 and then 5 on what that left."""
    from kernels.step.reference import reference

    whole = cases.inputs(cases._workload("prefill", "odd", 2, 6, 12), 3)
    tokens = whole["tokens"].view(2, 12)

    def of(first: int, last: int, given: Tensors, before: int) -> Tensors:
        bounds = torch.tensor([0, last - first, 2 * (last - first)], dtype=torch.int32)
        new = {"tokens": tokens[:, first:last].flatten(), "cu_seqlens": bounds}
        return reference(given | new | {"seq_lens": torch.full((2,), before, dtype=torch.int32)})

    at_once, first = of(0, 12, whole, 6), of(0, 7, whole, 6)
    second = of(7, 12, whole | {name: first[name] for name in STATEFUL}, 13)
    for name, tensor in at_once.items():
        assert torch.allclose(tensor.double(), second[name].double(), rtol=1e-9, atol=1e-11), name


@pytest.mark.parametrize("name", ["decode_odd_npl3_ctx17", "mixed_small_npl3_n1-5-1_ctx6_state-bf16_cache-fp8",
                                  "decode_odd_npl3_ctx17_cache-q8_0", "mixed_odd-moe_npl3_n1-12-1_ctx6"])  # fmt: skip
def test_so_many_calls_at_once_are_one_behind_the_other(name: str) -> None:
    """To float64's own rounding, with what each call leaves rounded to the types of caches and states."""
    from kernels.step.reference import reference, repeated

    given = cases.inputs(BY_ID[name], 3)
    wanted: Tensors = {}
    for _ in range(3):
        wanted = reference(given | {n: wanted[n].to(given[n]) for n in cases.IN_PLACE if n in wanted})
    once, at_once = reference(given), repeated(given, 3)
    assert not torch.equal(once["logits"], wanted["logits"])
    apart = {n: float((wanted[n].double() - at_once[n]).norm() / wanted[n].double().norm()) for n in wanted}
    assert max(apart.values()) < 1e-12, apart  # with nothing rounded in between the logits are 5e-4 apart


def test_the_parts_are_the_27b() -> None:
    """Weights of a step in NVFP4: 13.7 GB in the layers, 2.5 GB in the head; 48 states of 3.1 MB, in and out.

    A window of the convolution is three tokens of 10,240 channels in bf16, its weights four.
    """
    one = parts(BY_ID["decode_q36-27b_npl1_ctx1024"], "nvfp4-w4a16")
    layers = one["ffn"].bytes + one["gdn products"].bytes + one["attention products"].bytes
    assert layers == pytest.approx(13.7e9, rel=0.01)
    assert one["head"].bytes == pytest.approx(2.54e9, rel=0.01)
    assert one["gdn"].bytes == 48 * 2 * (3145728 + (4 + 2 * 3) * 10240)
    assert one["attention"].bytes == 65536 * 1026
    many = cost(BY_ID["decode_q36-27b_npl128_ctx1024"], "nvfp4-w4a16")
    assert many.bytes - cost(BY_ID["decode_q36-27b_npl1_ctx1024"], "nvfp4-w4a16").bytes == pytest.approx(
        127 * (48 * 2 * 3145728 + 65536 * 1026 + 4 * 248320 + 2 * 5120 + 48 * 12 * 10240), rel=1e-6
    )


def test_weights_have_the_names_and_shapes_of_the_model() -> None:
    for name in ("small", "odd", "odd-moe"):
        model = MODELS[name]
        plain = cases.weights(model, 0, "cpu", quantised=False)
        assert {k: tuple(v.shape) for k, v in plain.items() if k not in ("inv_freq", "top_k")} == {
            **{f"{k}.weight": v for k, v in model.linears().items()},
            **model.stacks(),
            **model.others(),
        }
        packed = cases.weights(model, 0, "cpu")
        for k, (rows, columns) in model.linears().items():
            assert packed[f"{k}.weight_packed"].shape == (rows, columns // 2)


@pytest.mark.parametrize("name", ["q36-27b", "q36-35b-a3b"])
def test_a_model_is_that_of_the_models_file(name: str) -> None:
    facts = models.get(name).facts
    named = {
        "layers": "layers", "hidden": "hidden", "heads": "attention_heads", "kv_heads": "kv_heads",
        "head_dim": "head_dim", "gdn_k_heads": "gdn_k_heads", "gdn_v_heads": "gdn_v_heads", "gdn_dim": "gdn_head_dim",
        "vocab": "vocab",
    }  # fmt: skip
    model = MODELS[name]
    if model.experts:
        named |= {"experts": "experts", "top_k": "experts_per_token", "expert_ffn": "expert_ffn"}
    named["ffn"] = "shared_expert_ffn" if model.experts else "ffn"
    assert {key: getattr(model, key) for key in named} == {key: facts[name].value for key, name in named.items()}
    assert model.kinds.count("attention") == facts["attention_layers"].value
