"""kernels/nvfp4/controls: levers and casts, MXFP4 weights through the same kernels, and their format."""

import math

import pytest
import torch

from kernels.common import Workload, has_triton, interpreted
from kernels.nvfp4 import cases, cost, layout, mxfp4
from kernels.nvfp4 import format as fmt
from kernels.nvfp4.reference import reference, weights
from lab.check import families
from tests.kernels.nvfp4.test_nvfp4 import DEVICE, accepted

runs_triton = has_triton() and (DEVICE == "cuda" or interpreted())
needs_triton = pytest.mark.skipif(not runs_triton, reason="needs Triton, on a GPU or in its interpreter")
if has_triton():
    from kernels.nvfp4 import triton_gemm
    from kernels.nvfp4.controls import triton_levers, triton_routed

    CANDIDATES = {c.name: c for c in (*triton_levers.CANDIDATES, *triton_routed.CANDIDATES)}
NAMES = ("gemm_two_blocks", "gemm_narrow_tokens", "gemm_narrow_rows")


def problem(m: int, n: int, k: int, dtype: str = "bf16", **axes: int | str) -> Workload:
    return Workload("own", {"M": m, "N": n, "K": k, "dtype": dtype, **axes})


def run(name: str, workload: Workload, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """What the candidate wrote, and the reference."""
    inputs = cases.inputs(workload, seed=seed, device=DEVICE)
    out = cases.outputs(workload, inputs)
    CANDIDATES[name].run(CANDIDATES[name].prepare(inputs), out)
    return out["y"], reference(inputs)["y"]


# Levers ---------------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("m", "n", "k"), [(130, 75, 256), (63, 131, 1040)])
def test_levers_are_right_at_odd_sizes(name: str, m: int, n: int, k: int) -> None:
    workload = problem(m, n, k, "fp16")
    assert accepted(*run(name, workload), cases.tolerance(workload, "nvfp4-w4a16")["y"])


@needs_triton
def test_each_lever_changes_what_its_name_says() -> None:
    stock = triton_gemm.choose_config(128, 17408, 90)
    two, tokens, rows = (triton_levers.lever_config(name, 128, 17408, 90) for name in NAMES)
    assert (two.max_registers, two.block_m, two.block_n) == (128, stock.block_m, stock.block_n)
    # the operand tile, what a stage holds times those in flight and the driver's part, twice: two blocks fit on one SM
    stage = two.block_n * 72 + two.block_m * 256
    assert 2 * (32 * 1024 + (two.num_stages - 1) * stage + 1024) <= 227 * 1024 < 2 * (32 * 1024 + 2 * stage + 1024)
    assert 2 * two.max_registers * 32 * two.num_warps <= 65536
    assert (2 * tokens.block_m, tokens.block_n) == (stock.block_m, stock.block_n)
    assert (rows.block_m, 2 * rows.block_n) == (stock.block_m, stock.block_n)


@needs_triton
def test_levers_refuse_what_is_narrow_already() -> None:
    assert "already narrow" in CANDIDATES["gemm_narrow_rows"].refuses(problem(128, 5120, 6144))
    assert not CANDIDATES["gemm_narrow_rows"].refuses(problem(128, 17408, 5120))


# Casts ----------------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("name", ["gemm_precast", "gemm_cast_inside"])
@pytest.mark.parametrize(("m", "n", "k"), [(17, 75, 1040), (130, 64, 256), (3, 1, 16)])
def test_casts_round_x_to_bf16_and_nothing_else(name: str, m: int, n: int, k: int) -> None:
    """Held twice: within the tolerance that contains bf16's loss, and tightly against the product of the rounded x."""
    workload = problem(m, n, k, "f32")
    y, wanted = run(name, workload)
    assert y.dtype == torch.float32
    assert accepted(y, wanted, cases.tolerance(workload, "nvfp4-w4a16-cast")["y"])
    inputs = cases.inputs(workload, seed=1, device=DEVICE)
    rounded = inputs["x"].bfloat16().double() @ weights(inputs).T
    assert ((y.double() - rounded).norm() / rounded.norm()).item() < 1e-5


def test_cast_tolerance_rejects_zeros_a_sign_flip_one_wrong_element_and_nan() -> None:
    workload = problem(17, 75, 1040, "f32")
    tolerance = cases.tolerance(workload, "nvfp4-w4a16-cast")["y"]
    wanted = reference(cases.inputs(workload))["y"]
    broken, wrong = wanted.clone(), wanted.clone()
    broken[-1, -1] = math.nan
    wrong[0, 0] += wanted.square().mean().sqrt()
    assert not any(accepted(bad, wanted, tolerance) for bad in (torch.zeros_like(wanted), -wanted, broken, wrong))


# MXFP4 ----------------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("name", ["mxfp4_sequence_grid", "mxfp4_collapsed"])
@pytest.mark.parametrize(("m", "n", "k"), [(16, 75, 256), (3, 131, 1056), (1, 5, 32), (9, 64, 96)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.slow
def test_mxfp4_through_both_routes(name: str, m: int, n: int, k: int, dtype: str) -> None:
    workload = problem(m, n, k, dtype, n_seqs=m, weights="mxfp4")
    assert not CANDIDATES[name].refuses(workload)
    assert accepted(*run(name, workload), cases.tolerance(workload, "mxfp4-w4a16")["y"])


@needs_triton
@pytest.mark.parametrize("name", ["mxfp4_sequence_grid", "mxfp4_collapsed"])
def test_every_code_times_scales_far_apart_is_exact(name: str) -> None:
    """x picks one k a row, so y is the weight itself; scales over 20 powers of two, far from 2^0."""
    codes = torch.arange(128, dtype=torch.uint8).remainder(16).repeat(20, 1)
    scale = (torch.arange(20) + 90).to(torch.uint8)[:, None].repeat(1, 4)
    x = torch.zeros(16, 128, dtype=torch.bfloat16)
    picked = (0, 3, 13, 31, 32, 50, 63, 64, 70, 95, 96, 97, 111, 120, 126, 127)
    x[range(16), picked] = 1.0
    inputs = {key: t.to(DEVICE) for key, t in (("x", x), ("w_packed", fmt.pack(codes)), ("w_scale", scale))}
    out = {"y": torch.full((16, 20), math.nan, dtype=x.dtype, device=DEVICE)}
    CANDIDATES[name].run(CANDIDATES[name].prepare(inputs), out)
    assert torch.equal(out["y"].double(), reference(inputs)["y"])


def test_bf16_operands_are_exact_where_the_interpreter_cannot_look() -> None:
    """The bf16 branch of decode.py in torch: bits placed as it places them, one bf16 product, codes at every byte."""
    code, byte = torch.arange(16, dtype=torch.int32), torch.arange(3, 128, dtype=torch.int32)
    value = (((code & 7) << 6) | ((code & 8) << 12)).to(torch.uint16).view(torch.bfloat16)
    scale = ((byte + 126) << 7).to(torch.uint16).view(torch.bfloat16)
    wanted = fmt.decode_e2m1(code.to(torch.uint8)).double()[:, None] * torch.exp2(byte.double() - 127)[None, :]
    assert torch.equal((value[:, None] * scale[None, :]).double(), wanted)


def test_mxfp4_scale_is_the_power_of_two_of_the_specification() -> None:
    w = torch.zeros(4, 32)
    w[0, 0], w[1, 0], w[2, 5] = 4.0, 7.9, -6.0 * 2.0**-30
    packed, scale = mxfp4.quantise(w)
    # amax 4 -> 2^0; 7.9 -> 2^0 too, and the value saturates at 6; 6 * 2^-30 -> 2^-30; zeros -> byte 0
    assert scale.flatten().tolist() == [127, 127, 97, 0]
    values = mxfp4.dequantise(packed, scale)
    assert (values[0, 0].item(), values[1, 0].item(), values[2, 5].item()) == (4.0, 6.0, -6.0 * 2.0**-30)
    assert not values[3].any()
    inputs = {"w_packed": packed, "w_scale": scale}
    assert torch.equal(values.double(), weights(inputs))


def test_mxfp4_error_of_normal_values() -> None:
    """The e2m1 grid with scales a power of two apart: more than NVFP4's loss of 0.095, under 0.13."""
    x = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(0))
    error = ((mxfp4.dequantise(*mxfp4.quantise(x)) - x).norm() / x.norm()).item()
    assert cases.W4A4_NORMAL < error < 0.13


@pytest.mark.parametrize(
    ("value", "said"), [(torch.zeros(2, 48), "multiple of 32"), (torch.full((1, 32), math.inf), "NaN or infinite")]
)
def test_bad_weights_are_refused(value: torch.Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        mxfp4.quantise(value)


def test_a_nan_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN in e8m0"):
        mxfp4.relative(torch.tensor([[255]], dtype=torch.uint8))


def test_relative_scales_give_back_what_they_took() -> None:
    scale = torch.tensor([[100, 120, 90, 0]], dtype=torch.uint8)
    moved, factor = mxfp4.relative(scale)
    assert moved.tolist() == [[107, 127, 97, 7]]
    assert factor.item() == 2.0**-7


def test_mxfp4_in_the_form_of_nvfp4_has_the_same_values() -> None:
    w = torch.randn(8, 96, generator=torch.Generator().manual_seed(0)) * torch.exp2(torch.arange(-8.0, 0))[:, None]
    w[3, 32:64] = 0
    packed, scale = mxfp4.quantise(w)
    same = fmt.Nvfp4(packed, *mxfp4.as_nvfp4(scale))
    assert torch.equal(fmt.dequantise(same), mxfp4.dequantise(packed, scale))
    assert torch.equal(mxfp4.of_nvfp4(same.scale, same.tensor_scale), scale)


def test_what_is_not_in_both_formats_is_refused() -> None:
    wide = torch.tensor([[127, 110, 0, 111]], dtype=torch.uint8)
    assert mxfp4.of_nvfp4(*mxfp4.as_nvfp4(wide)).equal(wide)
    with pytest.raises(ValueError, match="17 powers"):
        mxfp4.as_nvfp4(torch.tensor([[127, 109]], dtype=torch.uint8))
    for groups in ([0x38, 0x40], [0x39, 0x39]):  # 1 and 2; 1.125 twice
        with pytest.raises(ValueError, match="not MXFP4"):
            mxfp4.of_nvfp4(torch.tensor([groups], dtype=torch.uint8), torch.ones(1))


def test_layout_tells_the_formats_apart() -> None:
    for weights_of, group in (("nvfp4", 16), ("mxfp4", 32)):
        inputs = cases.inputs(problem(2, 3, 160, weights=weights_of))
        assert layout.group_of(layout.prepare(inputs)) == group


# What is for whom -----------------------------------------------------------------------------------------------------


def test_cost_by_hand() -> None:
    workload = problem(2, 64, 128, weights="mxfp4")
    assert cost.cost(workload, "mxfp4-w4a16").bytes == 64 * 128 * 17 / 32 + 2 * 2 * (64 + 128)
    assert cost.cost(problem(2, 64, 128, "f32"), "nvfp4-w4a16-cast").bytes == 64 * 128 * 9 / 16 + 4 + 4 * 2 * 192


@needs_triton
def test_no_candidate_is_handed_weights_or_activations_that_it_would_misread() -> None:
    """Through `families.load`, which is where every command takes a family's candidates from."""
    family = families.load("nvfp4")
    strange = [w for w in cases.WORKLOADS if w.id.endswith(("_mxfp4", "_f32"))]
    kinds = {(w.role, "weights" in w.axes) for w in strange}
    assert kinds == {(role, mxfp4) for role in ("check", "measure") for mxfp4 in (True, False)}
    for workload in strange:
        taking = {c.precision for c in family.candidates.values() if not c.refuses(workload)}
        assert taking == {"mxfp4-w4a16" if workload.id.endswith("_mxfp4") else "nvfp4-w4a16-cast"}
    plain = family.workload("m128_n5120_k6144")
    assert "mxfp4_collapsed" not in [c.name for c in family.candidates.values() if not c.refuses(plain)]
    assert "triton_gemm" in [c.name for c in family.candidates.values() if not c.refuses(plain)]
