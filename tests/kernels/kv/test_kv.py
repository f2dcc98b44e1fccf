"""kernels/kv: paged decode attention over a 16-bit, fp8 or Q8_0 cache.

Every candidate is held against the reference on every check workload; the paging, the splitting and the checks
themselves each against the mistake that they exist to catch; the kernels compile ahead of time for every target. The
reference and the formats have their own file, test_kv_format.py.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.common import Tensors, Workload, has_triton, interpreted
from kernels.kv import cases, plan
from kernels.kv.cost import cost, kv_bytes
from kernels.kv.reference import reference
from lab.check import accuracy, families
from tests.kernels import ahead
from tests.ran import run_once

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KV = families.load("kv")
# What needs no further library; adapters for other libraries are tried in tests/kernels/test_peers_run.py.
CANDIDATES = tuple(c for c in KV.candidates.values() if not c.needs.packages)
# What copies the cache into another layout in `prepare`.
COPIES = ("torch_sdpa", "contiguous_bf16", "in_order_bf16")
BY_ID = {w.id: w for w in cases.WORKLOADS}
PRECISIONS = ("bf16", "fp8-kv", "q8_0-kv")

needs_triton = pytest.mark.skipif(
    not has_triton() or not (DEVICE == "cuda" or interpreted()),
    reason="needs Triton, on a GPU or in its interpreter (TRITON_INTERPRET=1 before triton is imported)",
)
if has_triton():
    from kernels.kv import triton_splitkv as splitkv


def problem(workload_id: str, seed: int = 0) -> tuple[Workload, Tensors]:
    workload = BY_ID[workload_id]
    return workload, cases.inputs(workload, seed, DEVICE)


def launch(args: Tensors, kv: str, launch_plan: plan.SplitPlan) -> torch.Tensor:
    out = {"o": torch.full_like(args["q"], math.nan)}
    splitkv.launch(splitkv.with_workspace(args, launch_plan), out, kv, launch_plan)
    return out["o"]


# The candidates ------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize(
    "workload",
    [pytest.param(w, id=w.id, marks=pytest.mark.slow if w["ctx"] > 100 else ()) for w in cases.CHECKED],
)
@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.name)
def test_candidate(candidate, workload: Workload) -> None:
    """Through the bench's own check: NaN-poisoned output, inputs unchanged, both errors within the tolerance."""
    assert not candidate.refuses(workload)
    result = accuracy.check(KV, candidate, workload, seed=0, device=DEVICE)
    assert (result.status, result.message) == ("ok", "")


def test_candidates_are_all_here() -> None:
    if has_triton():
        assert {c.name for c in CANDIDATES} == {"splitkv_bf16", "splitkv_fp8", "splitkv_q8_0", *COPIES}
    assert {w.role for w in cases.WORKLOADS} == {"check", "measure"}
    assert len(BY_ID) == len(cases.WORKLOADS)
    assert BY_ID["ctx8192_b32_hq24_hkv4_d256"].source == "q36-27b.attention"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "workload_id", ["ctx500_b2_hq6_hkv1_d128_p16_bf16", "ctx500_b1_hq8_hkv2_d128_p64_bf16_outliers"]
)
def test_tolerance_rejects(workload_id: str, precision: str) -> None:
    """What must not pass: zeros, a sign, one wrong element, NaN, swapped heads, a lost token, 2 % of scale."""
    workload, given_ = problem(workload_id)
    right = reference(cases.reference_inputs(workload, given_, precision))["o"]
    limit = cases.tolerance(workload, precision)["o"]
    assert accuracy.compare("o", right.to(given_["q"].dtype), right, limit).ok
    if precision == "fp8-kv":
        assert limit.relative_error <= 4e-3
    one = right.clone()
    one[0, 0, 7] += 3 * right.square().mean().sqrt()
    nan = right.clone()
    nan[-1, -1, -1] = math.nan
    shorter = reference(cases.reference_inputs(workload, given_ | {"seq_lens": given_["seq_lens"] - 1}, precision))["o"]
    wrong = {
        "zeros": right * 0, "sign": -right, "one element": one, "nan": nan, "heads": right.roll(1, dims=1),
        "a token": shorter, "scale": right * 1.02,
    }  # fmt: skip
    for mistake, out in wrong.items():
        assert not accuracy.compare("o", out, right, limit).ok, mistake


def test_tolerance_with_one_short_sequence() -> None:
    """Two tokens beside long sequences: their outputs are large against the batch's rms and round by as much."""
    workload = cases._workload(600, 40, 4, 1, 64)
    given_ = cases.inputs(workload, 0, DEVICE)
    given_["page_table"] = torch.randperm(given_["k_cache"].shape[0], device=DEVICE).int()[: 40 * 38].reshape(40, 38)
    given_["seq_lens"].fill_(600)
    given_["seq_lens"][5] = 2
    right = reference(given_)["o"]
    limit = cases.tolerance(workload, "bf16")["o"]
    rounded = accuracy.compare("o", right.to(torch.bfloat16), right, limit)
    assert rounded.ok
    assert rounded.max_error > 5.5 * 2.0**-8  # half an ulp at the peak that equal lengths would have
    assert cases._short_sequence(cases._workload(600, 40, 4, 1, 64, role="measure")) == 1
    rms = float(right.square().mean().sqrt())
    for b in (0, 5):
        one = right.clone()
        one[b, 1, 9] += rms
        assert not accuracy.compare("o", one, right, limit).ok


@pytest.mark.parametrize(("ctx", "batch"), [(256, 8), (1024, 4)])
def test_the_heaviest_token_of_many_is_within_the_largest_element(ctx: int, batch: int) -> None:
    """One logit as large as the largest of all is expected to be, on a value of 3.5."""
    workload = cases._workload(ctx, batch, 32, 8, 128, role="measure")
    given_ = cases.inputs(workload, 3, DEVICE)
    page = int(given_["page_table"][0, 0])
    q = given_["q"][0, 0].float()
    largest = math.sqrt(2 * math.log(ctx * batch * 32))
    given_["k_cache"][page, 0, 0] = (q * largest * 128**0.5 / q.square().sum()).to(given_["k_cache"].dtype)
    given_["v_cache"][page, 0, 0] = 3.5
    o = reference(given_)["o"]
    peak = float(o[0, 0].abs().max() / o.square().mean().sqrt())
    bound = 2 + cases._heaviest_token(workload)
    assert 0.6 * bound < peak < 1.15 * bound


def test_tolerance_and_reference_inputs_refuse_unknown_precision() -> None:
    workload, given_ = problem("ctx1_b1_hq4_hkv1_d64_p16_bf16")
    for ask in (cases.tolerance, kv_bytes):
        with pytest.raises(ValueError, match="fp4-kv"):
            ask(workload, "fp4-kv")
    with pytest.raises(ValueError, match="fp4-kv"):
        cases.reference_inputs(workload, given_, "fp4-kv")


# Paging --------------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.name)
@pytest.mark.slow
def test_where_pages_lie_does_not_matter(candidate) -> None:
    """Pages moved about in the pool, table with them: the same bits come out."""
    workload, given_ = problem("ctx130_b2_hq4_hkv4_d64_p16_bf16")
    pool = given_["k_cache"].shape[0]
    order = torch.randperm(pool, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    table = given_["page_table"]
    where = torch.argsort(order).to(torch.int32)  # old page id -> new
    moved = given_ | {
        "k_cache": given_["k_cache"][order].contiguous(),
        "v_cache": given_["v_cache"][order].contiguous(),
        "page_table": torch.where(table >= 0, where[table.clamp_min(0).long()], table),
    }
    assert not torch.equal(moved["page_table"], table)
    outs = [run_once(KV, candidate, workload, x)["o"] for x in (given_, moved)]
    assert torch.equal(*outs)


@needs_triton
@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.name)
@pytest.mark.parametrize("workload_id", ["ctx75_b3_hq6_hkv1_d128_p16_bf16_outliers", "ctx63_b2_hq8_hkv2_d64_p64_bf16"])
def test_what_no_sequence_owns_does_not_leak(candidate, workload_id: str) -> None:
    """Slots past a sequence's end, and pages of nobody, hold NaN: not one bit of the output may change.

    The master must stay finite while it is quantised, so the quantised planes are poisoned afterwards: every scale of
    Q8_0 with NaN, its values with 127, e4m3 with its NaN (0x7F). Where `prepare` copies, the master itself is poisoned.
    """
    workload, given_ = problem(workload_id)
    page = workload["page"]
    unowned = torch.ones(given_["k_cache"].shape[0], page, dtype=torch.bool, device=DEVICE)
    for b, length in enumerate(given_["seq_lens"].tolist()):
        for t in range(length):
            unowned[int(given_["page_table"][b, t // page]), t % page] = False
    assert bool(unowned.any())

    clean = run_once(KV, candidate, workload, given_)["o"]
    if candidate.name in COPIES:
        names, args = ["k_cache", "v_cache"], dict(given_)
    else:
        names, args = ["k", "v", "k_scale", "v_scale"], candidate.prepare(given_)
    for name in names:
        if args[name].dim() == 4:  # [pages, Hkv, page, ...]
            plane = args[name] = args[name].clone()
            poison = {torch.uint8: 0x7F, torch.int8: 127}.get(plane.dtype, math.nan)
            plane.transpose(1, 2)[unowned] = poison
    out = cases.outputs(workload, given_)
    candidate.run(candidate.prepare(args) if candidate.name in COPIES else args, out)
    assert torch.equal(out["o"], clean)


@needs_triton
@pytest.mark.parametrize("candidate", [c for c in CANDIDATES if c.name != "torch_sdpa"], ids=lambda c: c.name)
@pytest.mark.slow
def test_lengths_may_change_after_prepare(candidate) -> None:
    """A captured graph replays with other seq_lens in the same tensor: nothing may depend on their values at load.

    The CUDA kernel, on a CPU and in a captured graph: test_kv_cuda.py.
    """
    workload, given_ = problem("ctx500_b2_hq6_hkv1_d128_p16_bf16")
    table = torch.arange(given_["page_table"].numel(), dtype=torch.int32, device=DEVICE).reshape(2, -1)
    given_ = given_ | {"page_table": table, "seq_lens": torch.full((2,), 500, dtype=torch.int32, device=DEVICE)}
    args = candidate.prepare(given_)
    kv, limit = splitkv.KV_OF_PRECISION[candidate.precision], cases.tolerance(workload, candidate.precision)["o"]
    several = splitkv.plan_for(args, kv)
    assert several.splits > 1
    for lengths in ([1, 499], [65, 0]):  # 0: a padding row of the graph, which must come out as zeros
        given_["seq_lens"].copy_(torch.tensor(lengths))
        wanted = reference(cases.reference_inputs(workload, given_, candidate.precision))["o"]
        for chosen in (several, replace(several, splits=1)):
            out = launch(args, kv, chosen)
            error = accuracy.compare("o", out, wanted, limit)
            assert error.ok, (lengths, chosen, error)
            assert lengths[1] or not out[1].any()


# Splitting -----------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("candidate", [c for c in CANDIDATES if c.name != "torch_sdpa"], ids=lambda c: c.name)
@pytest.mark.slow
def test_splits_and_tiles_agree(candidate) -> None:
    """One part or many, tiles of 16 to 128 tokens, more parts than tiles (7 for 5): the same within the tolerance."""
    workload, given_ = problem("ctx130_b2_hq12_hkv2_d128_p64_fp16")
    args = candidate.prepare(given_)
    kv = splitkv.KV_OF_PRECISION[candidate.precision]
    wanted = reference(cases.reference_inputs(workload, given_, candidate.precision))["o"]
    limit = cases.tolerance(workload, candidate.precision)["o"]
    for splits, block_t in ((1, 64), (2, 64), (9, 16), (1, 128), (7, 32)):
        out = launch(args, kv, plan.SplitPlan(splits, block_t, 4, 2, native_fp8=True))
        error = accuracy.compare("o", out, wanted, limit)
        assert error.ok, (splits, block_t, error)


@needs_triton
def test_both_routes_from_e4m3_to_half_agree() -> None:
    """By `cvt` and by bit operations, over all 254 finite bytes.

    The operands are 2^8 apart, so float32 sums have the same bits; a tensor core aligns subnormal halves its own way,
    and there the two need only be within the tolerance.
    """
    workload, given_ = problem("ctx130_b2_hq4_hkv4_d64_p16_bf16")
    args = splitkv.prepare(given_, "fp8")
    finite = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8, device=DEVICE)
    for name in ("k", "v"):
        picks = torch.randint(len(finite), args[name].shape, generator=torch.Generator().manual_seed(6)).to(DEVICE)
        args[name] = finite[picks]
    args["k_scale"] = args["k_scale"] * 0.01  # keeps several tokens in play beside bytes of +-448
    base = plan.split_plan(2, 4, 144, 64, "fp8")
    by_bits, by_cvt = (launch(args, "fp8", replace(base, native_fp8=native)) for native in (False, True))
    if DEVICE == "cpu":
        assert torch.equal(by_bits, by_cvt)
    seen = given_ | {f"{n}_cache": args[n] for n in ("k", "v")} | {f"{n}_scale": args[f"{n}_scale"] for n in ("k", "v")}
    wanted, limit = reference(seen)["o"], cases.tolerance(workload, "fp8-kv")["o"]
    for out in (by_bits, by_cvt):
        error = accuracy.compare("o", out, wanted, limit)
        assert error.ok, error


@needs_triton
@pytest.mark.parametrize("name", ["splitkv_bf16", "splitkv_fp8"])
def test_large_queries_do_not_overflow_half(name: str) -> None:
    """q near 1e5 (beyond half's 65504) against keys near 1e-5: scaled by a power of two per row, not clipped."""
    workload, given_ = problem("ctx75_b3_hq6_hkv1_d128_p16_bf16_outliers")
    given_ = given_ | {"q": given_["q"] * 1e5, "k_cache": given_["k_cache"] * 1e-5}
    precision = KV.candidates[name].precision
    out = run_once(KV, KV.candidates[name], workload, given_)
    wanted = reference(cases.reference_inputs(workload, given_, precision))["o"]
    error = accuracy.compare("o", out["o"], wanted, cases.tolerance(workload, precision)["o"])
    assert error.ok, error


@needs_triton
def test_more_query_heads_than_sixteen() -> None:
    """20 query heads on one kv head need 32 rows of the matrix product, and a query group of 1 pads to 16."""
    workload = cases._workload(75, 2, 20, 1, 64)
    for candidate in CANDIDATES:
        assert accuracy.check(KV, candidate, workload, seed=1, device=DEVICE).status == "ok", candidate.name


@given(
    batch=st.integers(1, 256), kv_heads=st.sampled_from([1, 2, 4, 8]), ctx=st.integers(1, 40000),
    dim=st.sampled_from([64, 128, 256]), kv=st.sampled_from(["16bit", "fp8", "q8_0"]),
)  # fmt: skip
@settings(max_examples=100)
def test_plan_is_within_bounds(batch: int, kv_heads: int, ctx: int, dim: int, kv: str) -> None:
    chosen = plan.split_plan(batch, kv_heads, ctx, dim, kv)
    tiles = -(-ctx // chosen.block_t)
    assert 1 <= chosen.splits <= min(tiles, plan.MAX_SPLITS)
    assert str(chosen).startswith(f"splits={chosen.splits} block_t={chosen.block_t} ")


def test_plan_fills_the_gpu() -> None:
    for kv in ("16bit", "fp8", "q8_0"):
        for dim, kv_heads in ((256, 4), (128, 8)):
            for batch, ctx in ((1, 8192), (1, 32768), (8, 8192)):
                # Nearly one full wave of at least two blocks on each of 132 SMs.
                assert batch * kv_heads * plan.split_plan(batch, kv_heads, ctx, dim, kv).splits > 0.95 * 2 * 132
        # 34 sequences of 4 heads are 136 items on 132 SMs: unsplit, four SMs would work alone for half of the time.
        assert plan.split_plan(34, 4, 8192, 256, kv, sms=132).splits > 1
    # 99 x 4 items are exactly three blocks on each of 132 SMs: nothing to gain from a split and its merge.
    assert plan.split_plan(99, 4, 8192, 256, "16bit").splits == 1
    assert not plan.split_plan(1, 4, 8192, 256, "fp8", capability=80).native_fp8
    with pytest.raises(ValueError, match="batch=0"):
        plan.split_plan(0, 4, 8192, 256, "fp8")
    with pytest.raises(ValueError, match="fp4"):
        plan.split_plan(1, 4, 8192, 256, "fp4")


@needs_triton
def test_launch_errors_name_values_and_remedy() -> None:
    _, given_ = problem("ctx17_b2_hq6_hkv1_d64_p16_bf16")
    with pytest.raises(ValueError, match=r"contiguous\(\)"):
        splitkv.prepare(given_ | {"q": given_["q"].transpose(0, 1).contiguous().transpose(0, 1)}, "16bit")
    with pytest.raises(ValueError, match=r"D=48\b.*\b256\b"):
        splitkv.check_axes(6, 1, 48, 16)
    with pytest.raises(ValueError, match=r"Hq=7\b.*Hkv=2\b"):
        splitkv.check_axes(7, 2, 64, 16)
    assert "65" in splitkv.refusal(65, 1, 64, 16)
    args = splitkv.prepare(given_, "16bit")
    with pytest.raises(ValueError, match=r"workspace.*\b1\b.*\b3\b"):
        splitkv.launch(args, {"o": torch.empty_like(given_["q"])}, "16bit", plan.SplitPlan(3, 64, 4, 2, True))


# Cost ----------------------------------------------------------------------------------------------------------------


def test_cost_by_hand() -> None:
    """8192 tokens x 32 sequences x 4 heads x 256 x 2 (K and V) = 536,870,912 values."""
    workload = BY_ID["ctx8192_b32_hq24_hkv4_d256"]
    values = 536_870_912
    assert kv_bytes(workload, "bf16") == 2 * values
    assert kv_bytes(workload, "fp8-kv") == values + 2 * 4 * 4
    assert kv_bytes(workload, "q8_0-kv") == values * 34 / 32
    own = cost(workload, "bf16")
    # q and o: 2 x 32 x 24 x 256 values of 2 bytes; 512 page ids and one length per sequence, 4 bytes each.
    assert own.bytes == 2 * values + 786_432 + 32 * 513 * 4
    assert own.flops == 4 * 8192 * 32 * 24 * 256
    twin = BY_ID["ctx8192_b32_hq32_hkv8_d128"]
    assert kv_bytes(twin, "fp8-kv") - 2 * 4 * 8 == values


# Ahead of time -------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.slow
def test_every_build_compiles() -> None:
    """Among them the D = 256 kernels with several splits on GB10, and on sm_80, which has no e4m3 conversion."""
    rows = ahead.rows("kv")
    assert len(rows) == len(ahead.TARGETS) * 3 * 5
    for row in rows:
        assert row["status"] == "ok", row
        assert row["shared_bytes"] <= 99 * 1024, row
        # A handful of bytes is ptxas trading a register for a third block per SM; more would be a tile too large.
        assert (row["spill_bytes"] or 0) <= 64, row
        assert ("mma" in row["instruction"]) != row["build"].startswith("merge"), row
