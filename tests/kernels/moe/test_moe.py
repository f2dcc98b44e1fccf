"""kernels/moe: the reference against transformers' layer, every candidate, what the check refuses, and the floor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.common import Tensors, Workload, has_triton, interpreted
from kernels.moe import cases
from kernels.moe.cost import cost, experts_hit
from kernels.moe.reference import expert, reference, routed
from kernels.nvfp4.reference import weights
from lab.check import families
from lab.check.accuracy import check
from lab.place import ceilings
from tests.kernels import ahead

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(
    not has_triton() or (DEVICE == "cpu" and not interpreted()), reason="needs Triton, on a GPU or in its interpreter"
)
NOTES = Path(cases.__file__).with_name("NOTES.md")
CHECKS = [w for w in cases.WORKLOADS if w.role == "check"]
BY_ID = {w.id: w for w in cases.WORKLOADS}


@pytest.mark.slow  # as the other families' are: transformers takes more than a second to import
@pytest.mark.parametrize("workload", [w for w in CHECKS if w["shared"]], ids=lambda w: w.id)
def test_the_reference_is_transformers_layer(workload: Workload) -> None:
    pytest.importorskip("transformers")
    from transformers.models.qwen3_5_moe import configuration_qwen3_5_moe, modeling_qwen3_5_moe

    config = configuration_qwen3_5_moe.Qwen3_5MoeTextConfig(
        hidden_size=workload["H"], moe_intermediate_size=workload["F"], num_experts=workload["experts"],
        num_experts_per_tok=workload["top_k"], shared_expert_intermediate_size=workload["shared"],
    )  # fmt: skip
    layer = modeling_qwen3_5_moe.Qwen3_5MoeSparseMoeBlock(config).double()
    given = cases.inputs(workload, 3)

    def matrices(name: str) -> torch.Tensor:
        parts = zip(*(given[f"{name}_{part}"] for part in cases.PARTS), strict=True)
        return torch.stack(
            [weights(dict(zip(("w_packed", "w_scale", "w_tensor_scale"), p, strict=True))) for p in parts]
        )

    gate_up, down = matrices("shared_gate_up")[0].chunk(2), matrices("shared_down")[0]
    # Their router is a product of x; logits of ours come out of it where x has them in its own columns.
    x = given["x"].double()
    router = torch.linalg.lstsq(x, given["logits"].double()).solution.T
    kept = {
        "gate.weight": router, "experts.gate_up_proj": matrices("gate_up"), "experts.down_proj": matrices("down"),
        "shared_expert.gate_proj.weight": gate_up[0], "shared_expert.up_proj.weight": gate_up[1],
        "shared_expert.down_proj.weight": down, "shared_expert_gate.weight": given["shared_gate"].double()[None],
    }  # fmt: skip
    layer.load_state_dict(kept)
    with torch.no_grad():
        wanted = layer(x[None])[0]
    found = reference(given | {"logits": x @ router.T})["y"]
    assert torch.allclose(found, wanted, rtol=0, atol=1e-6 * float(wanted.std()))


LEVERS = (
    "experts_stock_tile", "experts_capped_tile", "experts_by_density", "experts_narrow_tile", "experts_narrow_rows",
    "experts_gathered", "experts_apart", "experts_w4a8",
)  # fmt: skip
RUNS = [
    pytest.param(
        name,
        w,
        id=f"{name}-{w.id}",
        # Triton's interpreter runs the largest of them and the levers' second one half a second each.
        marks=[needs_triton] * (name != "torch_grouped")
        + [pytest.mark.slow] * (name != "torch_grouped" and w["T"] > 9),
    )
    for name in ("torch_grouped", "triton_experts", *LEVERS)
    for w in (CHECKS if name not in LEVERS else (CHECKS[1], CHECKS[3]))
]


@pytest.mark.parametrize(("name", "workload"), RUNS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_candidate_is_the_reference(name: str, workload: Workload, seed: int) -> None:
    family = families.load("moe")
    candidate = family.candidate(name)
    found = check(family, candidate, workload, seed, DEVICE)
    assert (found.status, found.message) == ("ok", "") or candidate.refuses(workload)


WRONG: dict[str, Any] = {
    "another expert": lambda args: args | {"down": args["down"].roll(1, 0)},
    "gate and up changed over": lambda args: args | {"gate_up": args["gate_up"].roll(args["gate_up"].shape[1] // 2, 1)},
    "one expert less": lambda args: args | {"k": args["k"] - 1},
    "no shared expert": lambda args: {k: v for k, v in args.items() if k != "shared_gate"},
    "logits of the token before": lambda args: args | {"logits": args["logits"].roll(1, 0)},
}


@pytest.mark.parametrize("how", WRONG)
def test_a_layer_with_one_thing_wrong_is_refused(how: str) -> None:
    family = families.load("moe")
    candidate = family.candidate("torch_grouped")
    spoilt = replace(candidate, run=lambda args, out: candidate.run(WRONG[how](args), out))
    found = check(family, spoilt, BY_ID["t2_e8_k2_h80_f48_s32_bf16"], 0, DEVICE)
    assert found.status == "incorrect", found


@pytest.mark.parametrize("operand", ["x", "h"])
@pytest.mark.parametrize("name", ["t63_e5_k3_h64_f80_bf16", "t1_e8_k2_h64_f32_bf16"])
def test_int8_activations_are_refused_where_16_bits_are_declared(name: str, operand: str) -> None:
    """Of many tokens and of one, whose rms error scatters most."""
    workload = BY_ID[name]
    given = cases.inputs(workload, 0)

    def int8(t: torch.Tensor) -> torch.Tensor:
        step = t.abs().amax(-1, keepdim=True) / 127
        return (t / step).round() * step

    rounded: Tensors = given | {"x": int8(given["x"].double())} if operand == "x" else given
    chosen, weight = routed(given["logits"], workload["top_k"])
    y = torch.zeros(workload["T"], workload["H"], dtype=torch.float64)
    for t in range(workload["T"]):
        for e, p in zip(chosen[t].tolist(), weight[t], strict=True):
            parts = {f"w_{part}": given[f"gate_up_{part}"][e] for part in cases.PARTS}
            gate, up = (rounded["x"][t : t + 1].double() @ weights(parts).T).chunk(2, dim=-1)
            h = torch.nn.functional.silu(gate) * up
            down = weights({f"w_{part}": given[f"down_{part}"][e] for part in cases.PARTS})
            y[t] += p * ((int8(h) if operand == "h" else h) @ down.T)[0]
    wanted = reference(given)["y"]
    from lab.check.accuracy import compare

    limit = cases.tolerance(workload, "nvfp4-w4a16")["y"]
    assert not compare("y", y.bfloat16(), wanted, limit).ok
    assert compare("y", wanted.bfloat16(), wanted, limit).ok


def test_routing_is_what_its_name_says() -> None:
    tokens = 4096
    axes: dict[str, int | str] = {"T": tokens, "experts": 16, "top_k": 2, "H": 1, "dtype": "bf16"}
    for routing, low, high in (("uniform", 0.11, 0.14), ("zipf", 0.45, 0.6), ("one", 1.0, 1.0)):
        logits = cases.activations(Workload("", axes | {"routing": routing}), 0, "cpu")["logits"]
        chosen, weight = routed(logits, 2)
        assert all(len(set(row)) == 2 for row in chosen.tolist())
        assert torch.allclose(weight.sum(-1), torch.ones(tokens, dtype=torch.float64))
        assert low <= float((chosen == 0).any(-1).double().mean()) <= high, routing
    with pytest.raises(ValueError, match="uniform"):
        cases.activations(Workload("", axes | {"routing": "even"}), 0, "cpu")


def test_the_floor_is_that_of_the_35b() -> None:
    """1.77 MB an expert; one token has 8 of them and the shared one, 2,048 tokens have all."""
    one = BY_ID["t1_e256_k8_h2048_f512_s512"]
    assert experts_hit(one) == pytest.approx(8)
    assert cost(one, "nvfp4-w4a16").bytes == pytest.approx(9 * 1.7695e6, rel=2e-3)
    many = BY_ID["t2048_e256_k8_h2048_f512_s512"]
    assert experts_hit(many) == pytest.approx(256)
    assert cost(many, "nvfp4-w4a16").flops == 6 * 2048 * 2048 * 512 * 9
    assert experts_hit(BY_ID["t128_e256_k8_h2048_f512_zipf_s512"]) < experts_hit(BY_ID["t128_e256_k8_h2048_f512_s512"])
    with pytest.raises(ValueError, match="nvfp4-w4a16"):
        cost(one, "fp8")


def test_the_notes_floors_are_those_at_the_measured_ceilings() -> None:
    rows = [
        line.strip("| ").split(" | ")
        for line in NOTES.read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    ]
    rows = [row for row in rows if len(row) == 7 and row[0].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "8", "17", "32", "128", "257", "512", "1024", "2048"]
    for tokens, *figures in rows:
        for routing, hit, floor in zip(cases.ROUTINGS, figures[::2], figures[1::2], strict=True):
            workload = cases._35b(int(tokens), routing)
            need = cost(workload, "nvfp4-w4a16")
            us = ceilings.floor_us("h200", need.flops, need.bytes, need.pipe)
            assert (hit, floor) == (f"{experts_hit(workload):.0f}", f"{us:.1f}"), (tokens, routing)


def test_an_expert_is_its_own_weights() -> None:
    given = cases.inputs(CHECKS[0], 0)
    x = given["x"].double()
    assert not torch.allclose(expert(given, "", 0, x), expert(given, "", 1, x))


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("counts", [(0, 1, 16, 17, 0, 130), (5,), (0, 0, 3), (64, 64)])
def test_blocks_hold_every_row_once(counts: tuple[int, ...], block_m: int) -> None:
    triton_experts = pytest.importorskip("kernels.moe.triton_experts")
    ends = torch.tensor(counts).cumsum(0).int()
    expert, start = triton_experts.blocks(ends, sum(counts), block_m)
    seen: list[int] = []
    for e, first in zip(expert.tolist(), start.tolist(), strict=True):
        if e < len(counts):
            last = min(first + block_m, int(ends[e]))
            assert int(ends[e]) - counts[e] <= first < last
            seen += range(first, last)
    assert sorted(seen) == list(range(sum(counts)))


@needs_triton
def test_every_run_gives_the_same_bits() -> None:
    family, workload = families.load("moe"), BY_ID["t75_e32_k8_h80_f32_zipf_bf16"]
    candidate, given = family.candidate("triton_experts"), cases.inputs(workload, 0, DEVICE)
    args = candidate.prepare(given) | {name: given[name] for name in cases.ACTIVATIONS}
    found = []
    for _ in range(2):
        out = cases.outputs(workload, given)
        candidate.run(args, out)
        found.append(out["y"])
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.skipif(not has_triton(), reason="needs Triton")
def test_builds_compile_ahead_of_time() -> None:
    made = ahead.rows("moe")
    assert {row["target"] for row in made} == set(ahead.TARGETS)
    assert [row for row in made if (row["status"], row["fits"]) != ("ok", True) or (row["spill_bytes"] or 0) > 16] == []


def test_no_token_has_two_equal_logits() -> None:
    """Else the eighth expert may be one or the other, and both are right; of 2048 tokens three would have a pair."""
    for seed in range(3):
        logits = cases.activations(cases._35b(2048), seed, "cpu")["logits"]
        assert int((logits.sort().values.diff() == 0).sum()) == 0
