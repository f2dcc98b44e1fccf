"""kernels/kv/cases.py and cost.py: the workloads beside the plain ones, lengths that differ and one scale for a tensor.

What a workload says of itself must be what its inputs hold, its limits must let a rounded answer pass and no wrong
sequence, and every candidate that stores fp8 must take the scale that it is given. The candidates run these workloads
with all others in test_kv.py.
"""

import math

import pytest
import torch

from kernels.common import Workload
from kernels.kv import cases, cuda_decode
from kernels.kv import format as kv_format
from kernels.kv.cost import cost, kv_bytes, lengths
from kernels.kv.peers import vllm_fa3
from kernels.kv.reference import reference
from lab.check import accuracy, families

BY_ID = {w.id: w for w in cases.WORKLOADS}
SPREAD = cases._workload(2048, 16, 6, 1, 128, lengths="spread")
TENSOR = BY_ID["ctx130_b2_hq12_hkv3_d128_p16_bf16_tensor"]


def test_ids_and_axes_of_plain_workloads_do_not_grow() -> None:
    """Rows are found by them: an axis at its default is neither in the id nor among the axes."""
    plain = BY_ID["ctx8192_b32_hq24_hkv4_d256"]
    assert set(plain.axes) == {"batch", "ctx", "Hq", "Hkv", "D", "page", "lengths", "dtype"}
    assert "scales" in TENSOR.axes
    assert all(("_tensor" in i) == (w.axes.get("scales") == "tensor") for i, w in BY_ID.items())
    assert all(("_spread" in i) == (w["lengths"] == "spread") for i, w in BY_ID.items())


def test_both_models_have_every_cell() -> None:
    """Contexts 256 to 32768 and batches 1 to 128 in pages of 16, but for what two arms have no room for."""
    for q_heads, kv_heads, dim in cases.MODELS:
        for ctx in (256, 1024, 8192, 32768):
            for batch in (1, 8, 32, 128):
                there = f"ctx{ctx}_b{batch}_hq{q_heads}_hkv{kv_heads}_d{dim}" in BY_ID
                assert there == ((ctx, batch) != (32768, 128)), (ctx, batch)


# Lengths that differ --------------------------------------------------------------------------------------------------


def test_spread_lengths_are_what_the_inputs_hold() -> None:
    """In another order each time, every remainder of a page among them, and the bytes of what is there."""
    measured = BY_ID["ctx8192_b32_hq24_hkv4_d256_spread"]
    found = lengths(measured)
    assert (found[0], found[1], found[-1], len(found)) == (8192, 7935, 225, 32)
    assert {n % 16 for n in found} == set(range(16))
    assert lengths(BY_ID["ctx8192_b32_hq24_hkv4_d256"]) == [8192] * 32
    assert lengths(cases._workload(3, 5, 1, 1, 64, lengths="spread")) == [3, 2, 1, 1, 1]
    orders = [cases.inputs(SPREAD, seed, "cpu")["seq_lens"].tolist() for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(o, reverse=True) == lengths(SPREAD) for o in orders)
    table = cases.inputs(SPREAD, 0, "cpu")["page_table"]
    assert (table >= 0).sum(1).tolist() == [-(-n // 16) for n in orders[0]]
    full = kv_bytes(BY_ID["ctx8192_b32_hq24_hkv4_d256"], "bf16")
    assert kv_bytes(measured, "bf16") == full * sum(found) / (8192 * 32)
    indices = cost(SPREAD, "bf16").bytes - kv_bytes(SPREAD, "bf16") - 2 * 2 * 16 * 6 * 128
    assert indices == 4 * int((table >= 0).sum()) + 4 * 16


@pytest.mark.parametrize("seed", range(3))
def test_limits_of_a_spread_batch_pass_rounding_and_no_wrong_sequence(seed: int) -> None:
    given = cases.inputs(SPREAD, seed, "cpu")
    right = reference(given)["o"]
    limit = cases.tolerance(SPREAD, "bf16")["o"]
    rounded = accuracy.compare("o", right.to(torch.bfloat16), right, limit)
    assert rounded.ok
    rms = right.square().mean().sqrt()
    assert float(right.square().mean(dim=(1, 2)).sqrt().max() / rms) == pytest.approx(
        cases._short_sequence(SPREAD), rel=0.1
    )
    largest = float(right.abs().max() / rms)
    assert rounded.max_limit > 1.2 * largest * 2.0**-8  # half an ulp of the largest there is
    assert rounded.max_limit < 0.2
    for b in range(16):
        scaled, shorter = right.clone(), right.clone()
        scaled[b] *= 1.05
        less = given["seq_lens"].clone()
        less[b] = less[b] // 2
        shorter[b] = reference(given | {"seq_lens": less})["o"][b]
        for wrong in (scaled, shorter):
            assert not accuracy.compare("o", wrong, right, limit).ok, (b, int(given["seq_lens"][b]))


# One scale for a tensor -----------------------------------------------------------------------------------------------


def test_the_problem_brings_one_scale_for_all_heads() -> None:
    given = cases.inputs(TENSOR, 0, "cpu")
    for name in ("k", "v"):
        amax = float(given[f"{name}_cache"].float().abs().max())
        assert given[f"{name}_scale"].tolist() == pytest.approx([amax / 448] * 3)
        per_head = kv_format.scale_fp8(given[f"{name}_cache"])
        assert len(set(per_head.tolist())) == 3
    assert "k_scale" not in cases.inputs(BY_ID["ctx130_b1_hq24_hkv4_d256_p16_bf16"], 0, "cpu")


def test_the_reference_sees_the_scale_that_was_brought() -> None:
    given = cases.inputs(TENSOR, 0, "cpu")
    for precision in ("fp8-kv", "fp8-qkv"):
        seen = cases.reference_inputs(TENSOR, given, precision)
        data, scale = kv_format.quantise_fp8(given["v_cache"], per="tensor")
        assert torch.equal(seen["v_cache"], data)
        assert torch.equal(seen["v_scale"], scale)
    assert cases.reference_inputs(TENSOR, given, "fp8-kv-unit")["k_scale"].tolist() == [1] * 3
    assert cases.reference_inputs(TENSOR, given, "q8_0-kv")["k_scale"].dim() == 4
    assert torch.equal(reference(given)["o"], reference({n: t for n, t in given.items() if "scale" not in n})["o"])


def test_a_scale_per_head_where_one_was_brought_is_wrong() -> None:
    """The check would catch a candidate that overlooks the scale: the bytes it makes are others."""
    given = cases.inputs(TENSOR, 0, "cpu")
    wanted = reference(cases.reference_inputs(TENSOR, given, "fp8-kv"))["o"]
    overlooked = {n: t for n, t in given.items() if "scale" not in n}
    own = reference(cases.reference_inputs(TENSOR, overlooked, "fp8-kv"))["o"]
    limit = cases.tolerance(TENSOR, "fp8-kv")["o"]
    assert accuracy.compare("o", wanted.to(torch.bfloat16), wanted, limit).ok
    assert not accuracy.compare("o", own, wanted, limit).ok


def fp8_scales(name: str, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales that a candidate's `prepare` ends with, [Hkv] each."""
    if name == "vllm_fa3_fp8":
        constant = vllm_fa3.prepare(given, fp8=True)["constant"]
        return constant["k_descale"][0], constant["v_descale"][-1]
    args = families.load("kv").candidate(name).prepare(given)
    return args["k_scale"], args["v_scale"]


@pytest.mark.parametrize("name", ["cuda_fp8", "splitkv_fp8", "vllm_fa3_fp8"])
def test_every_fp8_candidate_takes_the_scale_and_keeps_a_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy: where a check overwrites inputs in place, the bytes stay and so must their scale."""
    monkeypatch.setattr(vllm_fa3, "load_operators", lambda *names: None)
    monkeypatch.setattr(vllm_fa3, "_metadata", lambda *given: torch.zeros(1))
    monkeypatch.setattr(vllm_fa3, "_filled", lambda operator, given: given)
    monkeypatch.setattr(vllm_fa3.torch.ops, "_vllm_fa3_C", type("Operators", (), {"fwd": None}), raising=False)
    loaded = families.load("kv")
    if name not in loaded.candidates:
        pytest.skip(f"{name} cannot be imported here: {loaded.unavailable}")
    assert not loaded.candidate(name).refuses(TENSOR)
    given = cases.inputs(TENSOR, 0, "cpu")
    for key, scale in zip(("k_scale", "v_scale"), fp8_scales(name, given), strict=True):
        assert torch.equal(scale, given[key])
        assert scale.untyped_storage().data_ptr() != given[key].untyped_storage().data_ptr()


def test_measured_workloads_with_one_scale_stand_beside_those_with_one_per_head() -> None:
    measured: list[Workload] = [w for w in cases.WORKLOADS if "_tensor" in w.id and w.role == "measure"]
    assert measured
    for workload in measured:
        twin = BY_ID[workload.id.removesuffix("_tensor")]
        assert dict(workload.axes) == dict(twin.axes) | {"scales": "tensor"}
        assert cost(workload, "fp8-kv") == cost(twin, "fp8-kv")
        assert not cuda_decode.refuses(workload)
        assert math.isclose(cases.tolerance(workload, "fp8-kv")["o"].relative_error, 4.73e-4, rel_tol=1e-3)
