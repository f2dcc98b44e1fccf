"""Gated DeltaNet: the reference against transformers, every candidate against the reference, and the invariants.

Runs on a CPU: Triton's interpreter is switched on before Triton is imported, unless a GPU is there. Ahead-of-time
builds need it off and run in a process of their own.
"""

from __future__ import annotations

import importlib
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from kernels.common import Candidate, Tensors, Tolerance, Workload, has_triton
from kernels.gdn import cases, cost
from kernels.gdn.reference import reference
from lab.check.accuracy import compare
from tests.kernels import ahead

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODULES = (
    ("torch_chunk", "triton_decode", "triton_fused", "triton_segments", "triton_split")
    if has_triton()
    else ("torch_chunk",)
)
CANDIDATES = [c for name in MODULES for c in importlib.import_module(f"kernels.gdn.{name}").CANDIDATES]
CHECKS = [w for w in cases.WORKLOADS if w.role == "check"]
DENSE = [w for w in CHECKS if w["op"] == "prefill" and not w["lengths"]]
PREFILL = [c for c in CANDIDATES if not c.refuses(next(w for w in CHECKS if w["op"] == "prefill"))]
# The fp16 variants differ from the others in two casts: the comparison with the reference is enough for them.
VARIED = [c for c in PREFILL if c.precision != "fp16"]


def candidate_name(candidate: Candidate) -> str:
    return candidate.name


def workload(name: str) -> Workload:
    return next(w for w in cases.WORKLOADS if w.id == name)


def run(candidate: Candidate, problem: Workload, inputs: Tensors) -> Tensors:
    out = cases.outputs(problem, inputs)
    candidate.run(candidate.prepare(inputs), out)
    return out


def errors(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """(relative Frobenius error, largest error over rms); NaN in `got` makes both NaN, which no limit admits."""
    difference = got.double() - want
    norm = want.norm()
    return float(difference.norm() / norm), float(difference.abs().max() / (norm / want.numel() ** 0.5))


def assert_close(got: Tensors, want: Tensors, limits: dict[str, Tolerance]) -> None:
    assert got.keys() == want.keys() == limits.keys()
    for name, limit in limits.items():
        error = compare(name, got[name], want[name], limit)
        assert error.ok, error


# --- the reference ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
@pytest.mark.parametrize(
    "problem", [w for w in CHECKS if w["op"] == "prefill" and not w["lengths"]], ids=lambda w: w.id
)
def test_reference_agrees_with_transformers(problem: Workload, name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is the independent implementation")
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs = cases.inputs(problem, 1, "cpu")
    ratio = problem["Hv"] // problem["Hk"]
    q, k = (inputs[n].float().repeat_interleave(ratio, dim=2) for n in ("q", "k"))
    o, state = getattr(module, name)(
        q, k, inputs["v"].float(), inputs["g"], inputs["beta"], initial_state=inputs["initial_state"],
        output_final_state=True, use_qk_l2norm_in_kernel=bool(problem["qk_l2norm"]),
    )  # fmt: skip
    want = reference(inputs)
    for got, expected in ((o, want["o"]), (state, want["final_state"])):
        # float32 there: sums of D terms; exp of gate sums as large as 1500 ("forget") costs |G| 2^-24 = 9e-5 relative.
        limit = 2e-4 if problem["regime"] == "forget" else 5e-6
        assert errors(got, expected)[0] < limit


def test_decode_of_T_steps_is_prefill() -> None:
    problem = workload("t63_hk1_hv3_d64_f32")
    inputs = cases.inputs(problem, 2, "cpu")
    want = reference(inputs)
    state, reads = inputs["initial_state"].double(), []
    for t in range(problem["T"]):
        token = {n: inputs[n][:, t] for n in ("q", "k", "v", "g", "beta")}
        out = reference(token | {"state": state, "state_rows": torch.zeros(1, dtype=torch.int32)})
        state = out["state"]
        reads.append(out["o"])
    torch.testing.assert_close(torch.stack(reads, dim=1), want["o"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, want["final_state"], rtol=1e-12, atol=1e-12)


def test_reference_names_a_head_count_that_does_not_divide() -> None:
    inputs = cases.inputs(workload("t5_hk1_hv2_d64_f32"), 0, "cpu")
    inputs["q"] = inputs["k"] = torch.zeros(1, 5, 3, 64)
    with pytest.raises(ValueError, match=r"Hv = 2\b.*Hk = 3\b"):
        reference(inputs)


# --- candidates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidate", "problem"),
    [
        pytest.param(c, w, id=f"{c.name}-{w.id}", marks=pytest.mark.slow if w["op"] == "prefill" and w["T"] > 5 else ())
        for c in CANDIDATES
        for w in CHECKS
        if not c.refuses(w)
    ],
)
def test_candidate_agrees_with_reference(candidate: Candidate, problem: Workload) -> None:
    inputs = cases.inputs(problem, 0, DEVICE)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    out = run(candidate, problem, inputs)
    assert_close(out, reference(inputs), cases.tolerance(problem, candidate.precision))
    for name, tensor in before.items():
        assert torch.equal(inputs[name], tensor), f"{candidate.name} changed its input {name}"


@pytest.mark.parametrize("candidate", VARIED, ids=candidate_name)
@pytest.mark.slow
def test_second_run_reuses_its_workspace(candidate: Candidate) -> None:
    problem = workload("t75_hk1_hv2_d64_l2norm")
    inputs = cases.inputs(problem, 0, DEVICE)
    args = candidate.prepare(inputs)
    first, second = cases.outputs(problem, inputs), cases.outputs(problem, inputs)
    candidate.run(args, first)
    candidate.run(args, second)
    for name in first:
        assert torch.equal(first[name], second[name])


@pytest.mark.parametrize("candidate", VARIED, ids=candidate_name)
@pytest.mark.slow
def test_state_carried_over_two_calls_is_one_call(candidate: Candidate) -> None:
    problem = workload("t130_hk1_hv1_d64_f32_l2norm")
    inputs = cases.inputs(problem, 3, DEVICE)
    whole = run(candidate, problem, inputs)
    cut = 67  # not a chunk edge, so the chunks of the second call lie differently
    names = ("q", "k", "v", "g", "beta")
    head = inputs | {n: inputs[n][:, :cut].contiguous() for n in names}
    left = run(candidate, problem, head)
    tail = inputs | {n: inputs[n][:, cut:].contiguous() for n in names} | {"initial_state": left["final_state"]}
    right = run(candidate, problem, tail)
    limits = cases.tolerance(problem, candidate.precision)
    joined = {"o": torch.cat((left["o"], right["o"]), dim=1), "final_state": right["final_state"]}
    assert_close(joined, {n: t.double() for n, t in whole.items()}, limits)
    assert_close(joined, reference(inputs), limits)


@pytest.mark.parametrize("candidate", VARIED, ids=candidate_name)
@pytest.mark.slow
def test_a_sequence_is_the_same_alone_in_a_batch_and_packed(candidate: Candidate) -> None:
    problem = workload("b2_t65_hk1_hv1_d64_f32")
    inputs = cases.inputs(problem, 4, DEVICE)
    batch = run(candidate, problem, inputs)
    names = ("q", "k", "v", "g", "beta")
    packed = inputs | {n: inputs[n].flatten(0, 1)[None] for n in names}
    packed["cu_seqlens"] = torch.tensor([0, 65, 130], dtype=torch.int32, device=DEVICE)
    together = run(candidate, problem, packed)
    for i in range(2):
        alone = run(candidate, problem, {n: t[i : i + 1].contiguous() for n, t in inputs.items()})
        # Bit-identical where a kernel is one; torch's batched products may sum in another order.
        bits = {"rtol": 1e-5, "atol": 1e-5} if candidate.name == "torch_chunk" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(alone["o"][0], batch["o"][i], **bits)
        torch.testing.assert_close(alone["final_state"][0], batch["final_state"][i], **bits)
        torch.testing.assert_close(together["o"][0, 65 * i : 65 * (i + 1)], batch["o"][i], **bits)
        torch.testing.assert_close(together["final_state"][i], batch["final_state"][i], **bits)


@pytest.mark.parametrize("candidate", VARIED, ids=candidate_name)
@pytest.mark.slow
def test_later_tokens_do_not_reach_back(candidate: Candidate) -> None:
    problem = workload("t75_hk1_hv1_d64_f32_beta1")
    inputs = cases.inputs(problem, 5, DEVICE)
    changed = {n: t.clone() for n, t in inputs.items()}
    for name, factor in (("q", -3.0), ("k", -1.0), ("v", -3.0)):  # keys stay normalised, or the state would blow up
        changed[name][:, 40:] *= factor
    one, other = run(candidate, problem, inputs), run(candidate, problem, changed)
    # Zeros times the changed rows: equal up to the order of a blocked triangular solve in torch, else to the bit.
    assert errors(other["o"][:, :40], one["o"][:, :40].double())[0] < 1e-6
    assert errors(other["o"][:, 40:], one["o"][:, 40:].double())[0] > 0.1


@pytest.mark.skipif(not has_triton(), reason="the tiles are Triton's: pip install triton")
@pytest.mark.parametrize(
    ("family_file", "precision"),
    [("triton_fused", "bf16"), ("triton_fused", "fp16"), ("triton_split", "bf16"), ("triton_split", "tf32")],
)
@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.slow
def test_every_tile_size_gives_the_same_answer(
    family_file: str, chunk: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs use other tiles than the interpreter's defaults (one v tile, chunks of 64): more v tiles, shorter chunks."""
    module = importlib.import_module(f"kernels.gdn.{family_file}")
    candidate = next(c for c in module.CANDIDATES if c.precision == precision)
    if family_file == "triton_fused":
        config = module.FusedConfig(chunk, 32, 4, 1, "tf32")
    else:
        config = module.SplitConfig(chunk, 32, 32, 4, 1, 1, "tf32")
    monkeypatch.setattr(module, "config_for", lambda *_: config)
    problem = workload("t75_hk1_hv2_d64_l2norm")
    inputs = cases.inputs(problem, 11, DEVICE)
    assert_close(run(candidate, problem, inputs), reference(inputs), cases.tolerance(problem, precision))


decode_only = pytest.mark.skipif(not has_triton(), reason="recurrent_decode needs triton: pip install triton")


def decoder() -> Candidate:
    return next(c for c in CANDIDATES if c.name == "recurrent_decode")


@decode_only
def test_decode_leaves_other_rows_of_the_pool_alone() -> None:
    problem = workload("decode_b5_hk1_hv2_d64_f32_pad2")
    inputs = cases.inputs(problem, 6, DEVICE)
    out = run(decoder(), problem, inputs)
    used = {row for row in inputs["state_rows"].tolist() if row >= 0}
    assert len(used) == 3
    for row in range(inputs["state"].shape[0]):
        assert torch.equal(out["state"][row], inputs["state"][row]) == (row not in used), f"row {row}"
    assert torch.equal(out["o"][3:], torch.zeros_like(out["o"][3:])), "empty slots read as zero"


@decode_only
@pytest.mark.parametrize("v_tile", [16, 32])
def test_decode_of_narrow_tiles(v_tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.gdn import triton_decode

    monkeypatch.setattr(triton_decode, "config_for", lambda *_: triton_decode.DecodeConfig(v_tile, 1))
    problem = workload("decode_b3_hk1_hv2_d64_state-bf16")
    inputs = cases.inputs(problem, 12, DEVICE)
    limits = cases.tolerance(problem, "f32")
    assert_close(run(decoder(), problem, inputs), reference(inputs), limits)


@decode_only
def test_decode_follows_its_row_ids() -> None:
    problem = workload("decode_b3_hk1_hv3_d128_f32")
    inputs = cases.inputs(problem, 7, DEVICE)
    rows = inputs["state"].shape[0]
    move = torch.randperm(rows, generator=torch.Generator().manual_seed(8)).to(DEVICE)
    assert not torch.equal(move.cpu(), torch.arange(rows))
    state = torch.empty_like(inputs["state"])
    state[move] = inputs["state"]  # row r goes to move[r]
    moved = inputs | {"state": state, "state_rows": move[inputs["state_rows"].long()].to(torch.int32)}
    here, there = run(decoder(), problem, inputs), run(decoder(), problem, moved)
    assert torch.equal(here["o"], there["o"])
    assert torch.equal(here["state"], there["state"][move])


@decode_only
def test_decode_continues_a_prefill() -> None:
    problem = workload("t5_hk1_hv2_d64_f32")
    inputs = cases.inputs(problem, 9, DEVICE)
    want = reference(inputs)
    state = inputs["initial_state"].clone()
    for t in range(5):
        token = {n: inputs[n][:, t].contiguous() for n in ("q", "k", "v", "g", "beta")}
        token |= {"state": state, "state_rows": torch.zeros(1, dtype=torch.int32, device=DEVICE)}
        out = {"o": torch.full_like(token["v"], float("nan")), "state": state}
        decoder().run(decoder().prepare(token), out)
        assert errors(out["o"], want["o"][:, t])[0] < 5e-6
    assert errors(state, want["final_state"])[0] < 5e-6


# --- what the checks reject ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32", "f32"])
@pytest.mark.parametrize("damage", ["zeros", "sign", "one_element", "nan", "stale_state", "wrong_head"])
def test_limits_reject(damage: str, precision: str) -> None:
    problem = workload("t63_hk1_hv3_d64_f32")
    inputs = cases.inputs(problem, 10, "cpu")
    want = reference(inputs)
    got = {name: tensor.clone() for name, tensor in want.items()}
    limits = cases.tolerance(problem, precision)
    assert_close(got, want, limits)
    o = got["o"]
    if damage == "zeros":
        o.zero_()
    elif damage == "sign":
        o.neg_()
    elif damage == "one_element":
        o.view(-1)[o.abs().argmax()] *= -1
    elif damage == "nan":
        o[0, 62, 2, 63] = float("nan")
    elif damage == "stale_state":
        got["final_state"] = inputs["initial_state"].double()
    else:
        got["o"] = o.roll(1, dims=2)
    with pytest.raises(AssertionError):
        assert_close(got, want, limits)


@pytest.mark.parametrize("candidate", [c for c in PREFILL if c.name != "torch_chunk"], ids=candidate_name)
def test_prepare_names_what_is_wrong(candidate: Candidate) -> None:
    inputs = cases.inputs(workload("t5_hk1_hv2_d64_f32"), 0, "cpu")
    with pytest.raises(ValueError, match=r"\bv\b.*contiguous"):
        candidate.prepare(inputs | {"v": inputs["v"].transpose(1, 2)})
    with pytest.raises(ValueError, match=r"cu_seqlens.*\[0, 3, 3, 5\]"):
        candidate.prepare(inputs | {"cu_seqlens": torch.tensor([0, 3, 3, 5], dtype=torch.int32)})


def test_each_candidate_refuses_with_a_reason_or_runs() -> None:
    for candidate in CANDIDATES:
        refused = [w for w in cases.WORKLOADS if candidate.refuses(w)]
        assert 0 < len(refused) < len(cases.WORKLOADS)
        assert all(f"op = {w['op']}" in candidate.refuses(w) for w in refused)


# --- workloads and cost ----------------------------------------------------------------------------------------------


def test_workload_ids_are_unique_and_the_measured_ones_have_sources() -> None:
    ids = [w.id for w in cases.WORKLOADS]
    assert len(set(ids)) == len(ids)
    assert {"t2048_hk16_hv48_d128", "decode_b128_hk16_hv48_d128"} <= set(ids)
    # But for a GPU's share of a layer.
    assert all(bool(w.source) == (w["Hk"] == 16) for w in cases.WORKLOADS if w.role == "measure")


@pytest.mark.parametrize(
    ("name", "state", "floor_us"),
    [("decode_b1_hk16_hv48_d128", 3_145_728, 1.37), ("decode_b128_hk16_hv48_d128", 402_653_184, 175.8)],
)
def test_decode_cost_is_the_state_twice(name: str, state: int, floor_us: float) -> None:
    problem = workload(name)
    assert cost.state_bytes(problem) == state
    total = cost.cost(problem, "f32")
    assert total.pipe == "f32"
    assert 2 * state < total.bytes < 2.02 * state
    assert total.bytes / 4.6e6 == pytest.approx(floor_us, rel=0.01)


def test_prefill_cost_by_hand() -> None:
    total = cost.cost(workload("t2048_hk16_hv48_d128"), "bf16")
    tokens, per_head = 2048, 6 * 128 * 128 + 4 * 64 * 128 + 4 * 64 * 128 / 3
    assert total.flops == pytest.approx(tokens * 48 * per_head)
    activations = tokens * (2 * 16 * 128 + 2 * 48 * 128) * 2 + tokens * 48 * 2 * 4
    assert total.bytes == activations + 2 * 48 * 128 * 128 * 4
    assert total.pipe == "bf16"
    assert cost.sequences(workload("n4_t137_hk1_hv1_d64_f32")) == 4


def test_cost_of_an_algorithm() -> None:
    """With the convention's chunk and nothing between kernels it is `cost`; six kernels add what their tensors hold."""
    one = workload("t2048_hk16_hv48_d128")
    assert cost.algorithm_cost(one, 64, 2) == cost.cost(one, "bf16")
    split = cost.algorithm_cost(one, 16, 2, through_memory=True)
    short = cost.algorithm_cost(one, 16, 2)
    assert split.flops - short.flops == 2048 * 48 * cost.w_flops(16, 128)
    pytest.importorskip("triton")
    triton_split = importlib.import_module("kernels.gdn.triton_split")
    shapes = triton_split.workspace_shapes(2048, 128, 48, 128, 16, torch.bfloat16)
    held = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes.values())
    assert split.bytes - short.bytes == pytest.approx(2 * held)


@pytest.mark.parametrize(
    ("name", "chunk", "tile", "places", "steps"),
    [
        ("t2048_hk16_hv48_d128", 64, 64, 264, 32),  # 96 programs: one wave
        ("t2048_hk16_hv48_d128", 16, 64, 264, 128),
        ("b8_t2048_hk16_hv48_d128", 64, 64, 264, 96),  # 768 programs: 2.9 waves
        ("b8_t2048_hk16_hv48_d128", 64, 128, 132, 96),  # 384 heads, one per CTA: 2.9
        ("b32_t512_hk16_hv32_d128", 64, 64, 264, 64),  # 2,048 programs: 7.8
        ("t75_hk1_hv2_d128", 64, 64, 1, 8),  # four programs in turn, each a full and a partial chunk
    ],
)
def test_steps_of_a_chain_by_hand(name: str, chunk: int, tile: int, places: int, steps: int) -> None:
    assert cost.chain_steps(workload(name), chunk, tile, places) == steps


# --- ahead of time ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not has_triton(), reason="ahead-of-time builds need triton: pip install triton")
def test_every_build_compiles_and_fits() -> None:
    rows = ahead.rows("gdn")
    assert len(rows) == len(ahead.TARGETS) * (3 + 4 + 3 * 6 + 2)
    for row in rows:
        matrix = row["build"].startswith(("fused_chunk", "split", "segments")) and "cumsum" not in row["build"]
        assert row["status"] == "ok", row
        assert row["fits"], row
        assert (row["instruction"] != "none") == matrix, row
    scans = [
        r for r in rows if r["target"] == 90 and ("scan_kernel bf16" in r["build"] or "fused_chunk bf16" in r["build"])
    ]
    assert len(scans) == 4
    assert all("wgmma" in row["instruction"] for row in scans), scans
