"""kernels/q8: every path on every check workload, the format, the costs and the route."""

import math

import pytest
import torch

from kernels import routing
from kernels.common import Workload, has_triton, interpreted
from kernels.q8 import cases, cost, route, torch_cached
from kernels.q8 import format as fmt
from kernels.q8.reference import reference
from tests.kernels.nvfp4.test_nvfp4 import accepted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs_triton = has_triton() and (DEVICE == "cuda" or interpreted())
needs_triton = pytest.mark.skipif(not runs_triton, reason="needs Triton, on a GPU or in its interpreter")
CANDIDATES = list(torch_cached.CANDIDATES)
if has_triton():
    from kernels.q8 import triton_expand, triton_mmq, triton_warp_row
    from kernels.q8.controls import triton_routed

    CANDIDATES += [*triton_expand.CANDIDATES, *triton_warp_row.CANDIDATES, *triton_mmq.CANDIDATES]
    CANDIDATES += triton_routed.CANDIDATES
CHECKS = [w for w in cases.WORKLOADS if w.role == "check"]
PRECISIONS = ("q8_0-w8a16", "q8_0-w8a8", "q8_0-expanded", "bf16")
RUNS = [
    pytest.param(
        c,
        w,
        id=f"{c.name}-{w.id}",
        marks=[needs_triton] * bool(c.needs.triton) + [pytest.mark.slow] * (w["M"] * w["N"] * w["K"] > 100_000),
    )
    for c in CANDIDATES
    for w in CHECKS
    if not c.refuses(w)
]


@pytest.mark.parametrize(("candidate", "problem"), RUNS)
def test_candidate_against_reference(candidate, problem: Workload):
    inputs = cases.inputs(problem, seed=1, device=DEVICE)
    out = cases.outputs(problem, inputs)
    candidate.run(candidate.prepare(inputs), out)
    assert accepted(out["y"], reference(inputs)["y"], cases.tolerance(problem, candidate.precision)["y"])


# What a candidate copies does not depend on the size: its two smallest problems.
SMALLEST = [
    pytest.param(c, w, id=f"{c.name}-{w.id}", marks=[needs_triton] * bool(c.needs.triton))
    for c in CANDIDATES
    for w in sorted((w for w in CHECKS if not c.refuses(w)), key=lambda w: w["M"] * w["N"] * w["K"])[:2]
]


@pytest.mark.slow
@pytest.mark.parametrize(("candidate", "problem"), SMALLEST)
def test_what_prepare_hands_on_by_reference_is_what_the_launch_reads(candidate, problem: Workload):
    """As the check after a timing: operands are overwritten where they lie, so a copy beside its source is wrong."""
    inputs, fresh = (cases.inputs(problem, seed=seed, device=DEVICE) for seed in (1, 2))
    args, out = candidate.prepare(inputs), cases.outputs(problem, inputs)
    read = {tensor.untyped_storage().data_ptr() for tensor in args.values()}
    for name, tensor in inputs.items():
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() in read:
            tensor.copy_(fresh[name])
    candidate.run(args, out)
    assert accepted(out["y"], reference(inputs)["y"], cases.tolerance(problem, candidate.precision)["y"])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("problem", CHECKS, ids=lambda w: w.id)
def test_tolerance_rejects_zeros_a_sign_flip_one_wrong_element_and_nan(problem: Workload, precision: str):
    wanted = reference(cases.inputs(problem))["y"]
    tolerance = cases.tolerance(problem, precision)["y"]
    broken, wrong = wanted.clone(), wanted.clone()
    broken[-1, -1] = math.nan
    wrong[0, 0] += wanted.square().mean().sqrt()
    assert accepted(wanted, wanted, tolerance)
    assert not any(accepted(bad, wanted, tolerance) for bad in (torch.zeros_like(wanted), -wanted, broken, wrong))


@needs_triton
@pytest.mark.parametrize("m", [1, 3, 17])
@pytest.mark.slow
def test_mmq_is_exact_on_its_own_quantised_activations(m: int):
    """The tolerance of w8a8 contains the loss of the format; the kernel itself must lose no more than float32 does."""
    inputs = cases.inputs(Workload("own", {"M": m, "N": 75, "K": 1056, "dtype": "fp16"}), seed=3, device=DEVICE)
    candidate = triton_mmq.CANDIDATES[0]
    args = candidate.prepare(inputs)
    out = {"y": torch.full((m, 75), math.nan, dtype=torch.float16, device=DEVICE)}
    candidate.run(args, out)
    codes, scales = fmt.quantise(inputs["x"])
    apart = (args["q"].int() - codes.int()).abs()  # a quotient that is nearly a half may round either way
    assert apart.max() <= 1
    assert apart.sum() < 1e-3 * apart.numel()
    torch.testing.assert_close(args["q_d"].T, scales.float(), rtol=2**-11, atol=0)
    x = (args["q"].double().unflatten(1, (-1, 32)) * args["q_d"].T.double()[:, :, None]).flatten(1)
    wanted = x @ fmt.dequantise(inputs["w_q"], inputs["w_d"]).double().T
    assert ((out["y"].double() - wanted).norm() / wanted.norm()).item() < 2.0**-11


@needs_triton
def test_three_blocks_of_the_wide_tile_share_a_multiprocessor():
    config = triton_mmq.choose_config(512, 5120)
    assert (config.block_m, config.block_n, config.steps) == (128, 64, 2)
    assert 3 * 32 * config.num_warps * config.max_registers <= 65536
    codes = config.num_stages * config.steps * 32 * (config.block_m + config.block_n)
    scales = config.num_stages * config.steps * 4 * (config.block_m + config.block_n)
    assert 3 * (codes + scales + 1024) <= 227 * 1024
    assert triton_mmq.choose_config(512, 1056).steps == 1  # 33 scale blocks: no pairs


# Format ---------------------------------------------------------------------------------------------------------------


def test_codes_by_hand():
    w = torch.zeros(1, 32)
    w[0, :4] = torch.tensor([127.0, -127.0, 0.5, -0.5])
    codes, scales = fmt.quantise(w)
    assert codes[0, :5].tolist() == [127, -127, 1, -1, 0]  # halves away from zero
    assert scales.tolist() == [[1.0]]
    assert torch.equal(fmt.quantise(torch.zeros(2, 64))[0], torch.zeros(2, 64, dtype=torch.int8))


@pytest.mark.parametrize(
    ("w", "said"),
    [(torch.zeros(2, 33), "K a multiple of 32"), (torch.full((1, 32), math.nan), "NaN"), (torch.zeros(32), "needs")],
)
def test_bad_weights_are_refused(w: torch.Tensor, said: str):
    with pytest.raises(ValueError, match=said):
        fmt.quantise(w)


def test_int8_error_of_normal_values_is_what_the_tolerance_says():
    x = torch.randn(4096, 1024, generator=torch.Generator().manual_seed(0))
    error = (fmt.dequantise(*fmt.quantise(x)) - x).norm() / x.norm()
    assert 0.97 * cases.INT8_NORMAL < error < cases.INT8_NORMAL * 1.03


def test_cost_by_hand():
    w = Workload("w", {"M": 2, "N": 64, "K": 128, "dtype": "bf16"})
    assert cost.cost(w, "q8_0-w8a8") == cost.Cost(2.0 * 2 * 64 * 128, 64 * 128 * 34 / 32 + 2 * 2 * (64 + 128), "int8")
    assert cost.cost(w, "bf16").bytes == 64 * 128 * 2 + 2 * 2 * (64 + 128)
    with pytest.raises(ValueError, match="is not one of"):
        cost.cost(w, "q4_0")


# Route ----------------------------------------------------------------------------------------------------------------

BIG = next(w for w in cases.WORKLOADS if w.id == "m128_n17408_k5120")
PEAKS = {"bf16": 800.0, "int8": 1500.0, "f32": 60.0}


def routed(known: routing.Table | None = None) -> routing.Choice:
    return routing.route(route.ROUTER, BIG, "nowhere", tuple(CANDIDATES), 4500.0, PEAKS, known)


@needs_triton
def test_without_a_table_the_roofline_decides_and_says_so():
    choice = routed()
    assert (choice.how, choice.candidate) == ("predicted", "triton_mmq")
    # 22.8 GFLOP on 60 TFLOP/s, and 94.7 MB of codes and scales on 4.5 TB/s
    assert choice.times_us["triton_warp_row"] == pytest.approx(380, rel=0.01)
    assert choice.times_us["triton_mmq"] == pytest.approx(22.3, rel=0.02)


@needs_triton
def test_a_table_overrules_the_roofline():
    shape = (("K", 5120), ("N", 17408))
    points = tuple(routing.Point(n, shape, 128, us) for n, us in (("triton_mmq", 150.0), ("torch_cached", 55.0)))
    choice = routed(routing.Table("nowhere", "q8", "M", points, "r"))
    assert (choice.how, choice.candidate) == ("measured", "torch_cached")
