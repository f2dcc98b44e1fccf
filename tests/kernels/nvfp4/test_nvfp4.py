"""kernels/nvfp4: every candidate on every check workload, the route, and what compiles without a GPU.

Candidates are held against the reference within the tolerances of cases.py; the W4A4 kernels, whose tolerance contains
the loss of the activations' format, also tightly against their own quantised operands. The format and the reference
themselves are tested in test_nvfp4_format.py.
"""

import itertools
import math

import pytest
import torch

from kernels import cuda
from kernels.common import Tolerance, Workload, has_triton, interpreted
from kernels.nvfp4 import cases, cuda_gemv, layout, torch_bf16
from kernels.nvfp4 import format as fmt
from kernels.nvfp4.reference import reference, weights
from kernels.nvfp4.route import GEMV_MAX_COLUMNS, choose, choose_uncollapsed
from lab.check import aot_worker
from lab.check.accuracy import compare
from tests.kernels import ahead

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs_triton = has_triton() and (DEVICE == "cuda" or interpreted())
needs_triton = pytest.mark.skipif(
    not runs_triton,
    reason="needs Triton, on a GPU or in its interpreter (TRITON_INTERPRET=1 before triton is imported)",
)
CANDIDATES = list(torch_bf16.CANDIDATES)
if has_triton():
    from kernels.nvfp4 import triton_gemm, triton_gemv, triton_w4a4
    from kernels.nvfp4.controls import triton_routed

    CANDIDATES += [*triton_gemm.CANDIDATES, *triton_gemv.CANDIDATES, *triton_routed.CANDIDATES]
    if DEVICE == "cpu" or torch.cuda.get_device_capability() >= (10, 0):
        CANDIDATES += triton_w4a4.CANDIDATES
EVERY_CHECK = [w for w in cases.WORKLOADS if w.role == "check"]
CHECKS = [w for w in EVERY_CHECK if not cases.refuses(w, "nvfp4-w4a16")]  # NVFP4 weights and 16-bit x
RUNS = [
    pytest.param(
        c,
        w,
        id=f"{c.name}-{w.id}",
        marks=[needs_triton] * bool(c.needs.triton) + [pytest.mark.slow] * (w["M"] * w["N"] * w["K"] > 100_000),
    )
    for c in CANDIDATES
    for w in CHECKS
    if not c.refuses(w)  # a whole precision is refused by lab.check.families; CHECKS holds none of it
]


def accepted(out: torch.Tensor, wanted: torch.Tensor, tolerance: Tolerance) -> bool:
    """Both limits of `tolerance` hold; NaN never does."""
    return compare("y", out, wanted, tolerance).ok


# --- candidates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("candidate", "problem"), RUNS)
def test_candidate_against_reference(candidate, problem: Workload):
    inputs = cases.inputs(problem, seed=1, device=DEVICE)
    out = cases.outputs(problem, inputs)
    assert out["y"].isnan().all()
    candidate.run(candidate.prepare(inputs), out)
    tolerance = cases.tolerance(problem, candidate.precision)["y"]
    assert accepted(out["y"], reference(inputs)["y"], tolerance)


@pytest.mark.parametrize("precision", [*(f"nvfp4-w4a{x}" for x in ("16", "16-rounded", "8", "8-fast", "4")), "bf16"])
@pytest.mark.parametrize("problem", CHECKS, ids=lambda w: w.id)
def test_tolerance_rejects_zeros_a_sign_flip_and_nan(problem: Workload, precision: str):
    wanted = reference(cases.inputs(problem))["y"]
    tolerance = cases.tolerance(problem, precision)["y"]
    broken = wanted.clone()
    broken[-1, -1] = math.nan
    assert accepted(wanted, wanted, tolerance)
    assert not any(accepted(bad, wanted, tolerance) for bad in (torch.zeros_like(wanted), -wanted, broken))
    if precision != "nvfp4-w4a4":  # 4-bit activations may move one element by an rms
        wrong = wanted.clone()
        wrong[0, 0] += wanted.square().mean().sqrt()
        assert not accepted(wrong, wanted, tolerance)


@needs_triton
@pytest.mark.parametrize("name", ["triton_gemm", "triton_gemv"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_code_times_every_scale_is_decoded_exactly(name: str, dtype: str):
    """x selects one k per row, so y is the weight itself: 16 codes at 126 scales, in both halves of the pairing."""
    module = {"triton_gemm": triton_gemm, "triton_gemv": triton_gemv}[name]
    codes = torch.arange(128, dtype=torch.uint8).remainder(16).repeat(126, 1)
    scale = torch.arange(1, 127, dtype=torch.uint8)[:, None].repeat(1, 8)
    x = torch.zeros(8, 128, dtype=cases.DTYPES[dtype])
    picked = (0, 3, 13, 50, 64, 70, 111, 127)
    x[range(8), picked] = 1.0
    inputs = {"x": x, "w_packed": fmt.pack(codes), "w_scale": scale, "w_tensor_scale": torch.ones(1)}
    inputs = {key: t.to(DEVICE) for key, t in inputs.items()}
    out = {"y": torch.full((8, 126), math.nan, dtype=x.dtype, device=DEVICE)}
    module.run(module.prepare(inputs), out)
    assert torch.equal(out["y"].double(), reference(inputs)["y"])


def test_bf16_operands_are_exact_where_the_interpreter_cannot_look():
    """The bf16 branch of decode.py in torch: bits placed as it places them, one bf16 multiply, all codes and scales."""
    code = torch.arange(16, dtype=torch.int32)
    byte = torch.arange(127, dtype=torch.int32)
    value = (((code & 7) << 6) | ((code & 8) << 12)).to(torch.uint16).view(torch.bfloat16)
    scale = ((byte << 20).view(torch.float32) * 2.0**120 * 2.0**118).to(torch.bfloat16)
    product = value[:, None] * scale[None, :]
    wanted = fmt.decode_e2m1(code.to(torch.uint8))[:, None] * fmt.decode_ue4m3(byte.to(torch.uint8))
    assert torch.equal(product.double() * 2.0**8, wanted.double())


@needs_triton
@pytest.mark.parametrize("problem", [w for w in CHECKS if w["M"] <= 16], ids=lambda w: w.id)
def test_activation_quantiser_agrees_with_the_format_bit_for_bit(problem: Workload):
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs capability 8.0")
    inputs = cases.inputs(problem, seed=2, device=DEVICE)
    inputs["x"][0, :16] = 0  # a block of zeros
    inputs["x"][0, 16:32] *= 2.0**-12  # and one whose scale is subnormal or underflows
    args = triton_w4a4.prepare(inputs)
    triton_w4a4.quantise_rows(inputs["x"], args["x_packed"], args["x_scale"], args["x_row_scale"])
    for row, x in enumerate(inputs["x"]):
        q = fmt.quantise(x[None])
        assert args["x_row_scale"][row] == q.tensor_scale
        assert torch.equal(args["x_scale"][row], q.scale[0])
        assert torch.equal(args["x_packed"][row], q.packed[0])


@needs_triton
@pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.get_device_capability() < (10, 0), reason="tl.dot_scaled on e2m1 needs Blackwell"
)
@pytest.mark.parametrize("problem", [w for w in CHECKS if w["M"] <= 16], ids=lambda w: w.id)
@pytest.mark.slow
def test_w4a4_product_is_exact_on_its_own_quantised_operands(problem: Workload):
    inputs = cases.inputs(problem, seed=2, device=DEVICE)
    out = cases.outputs(problem, inputs)
    triton_w4a4.run(triton_w4a4.prepare(inputs), out)
    rows = [fmt.dequantise(fmt.quantise(x[None]), torch.float64) for x in inputs["x"]]
    wanted = torch.cat(rows) @ weights(inputs).T
    assert accepted(out["y"], wanted, cases.tolerance(problem, "nvfp4-w4a16")["y"])


@needs_triton
def test_launches_refuse_a_mismatch_with_the_values():
    inputs = cases.inputs(CHECKS[0])
    args = layout.prepare(inputs)
    y = torch.empty(1, 75, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"K=512\b.*K=128\b"):
        triton_gemm.launch(args | {"x": torch.zeros(1, 512, dtype=torch.bfloat16)}, y)
    with pytest.raises(ValueError, match="float32"):
        triton_gemv.launch(args, torch.zeros(1, 64), y)
    with pytest.raises(ValueError, match="strides"):
        triton_gemm.launch(args | {"x": torch.zeros(64, 1, dtype=torch.bfloat16).T[:, ::2]}, y)
    with pytest.raises(ValueError, match=r"K=32\b.*K=64\b"):
        triton_w4a4.run(inputs | {"x": torch.zeros(1, 32, dtype=torch.bfloat16)}, {"y": y})


def test_cuda_launch_choice():
    assert cuda_gemv.choose_config(3, 75, 1040, "fp16").kernel == "nvfp4_gemv_fp16_m4_g1"
    assert str(cuda_gemv.choose_config(1, 17408, 5120, "bf16")) == "nvfp4_gemv_bf16_m1_g2 grid=1088 threads=128"
    with pytest.raises(ValueError, match="m=9"):
        cuda_gemv.choose_config(9, 75, 64, "bf16")
    assert "M=16" in cuda_gemv.CANDIDATES[0].refuses(next(w for w in CHECKS if w["M"] == 16))


@pytest.mark.gpu
@pytest.mark.parametrize("problem", [w for w in CHECKS if w["M"] <= 8], ids=lambda w: w.id)
def test_cuda_gemv_against_reference(problem: Workload):
    pytest.importorskip("cupy", reason="the CUDA C++ candidate is compiled through CuPy")
    inputs = cases.inputs(problem, seed=1, device="cuda")
    out = cases.outputs(problem, inputs)
    cuda_gemv.run(inputs, out)
    assert accepted(out["y"], reference(inputs)["y"], cases.tolerance(problem, "nvfp4-w4a16")["y"])


# --- route ----------------------------------------------------------------------------------------------------------


def test_three_dimensional_operand_is_one_product_when_collapsed_and_128_gemvs_when_not():
    trap = choose_uncollapsed((6144, 1, 128))
    assert (trap.candidate, trap.calls, trap.columns_per_call) == ("triton_gemv", 128, 1)
    route = choose((6144, 1, 128))
    assert (route.candidate, route.calls, route.columns_per_call) == ("triton_gemm", 1, 128)
    assert str(route) == "triton_gemm x 1 (128 columns each): 128 columns > 8"


@pytest.mark.parametrize(
    ("ne", "candidate", "columns"),
    [
        ((64, 1), "triton_gemv", 1),
        ((64, GEMV_MAX_COLUMNS), "triton_gemv", 8),
        ((64, GEMV_MAX_COLUMNS + 1), "triton_gemm", 9),
        ((64, 2, 4), "triton_gemv", 8),
        ((64, 3, 3), "triton_gemm", 9),
        ((64, 1, 2, 8), "triton_gemm", 16),
    ],
)
def test_route_by_columns(ne: tuple[int, ...], candidate: str, columns: int):
    route = choose(ne)
    assert (route.candidate, route.calls, route.columns_per_call) == (candidate, 1, columns)


def test_both_choices_agree_on_two_dimensions():
    for columns in (1, 8, 9, 128):
        one, other = choose((64, columns)), choose_uncollapsed((64, columns))
        assert (one.candidate, one.calls) == (other.candidate, other.calls)


def test_route_refuses_a_vector():
    with pytest.raises(ValueError, match=r"ne=\(64,\)"):
        choose((64,))


@needs_triton
@pytest.mark.slow
def test_128_sequences_give_the_same_numbers_by_128_gemvs_and_by_one_gemm(monkeypatch):
    problem = Workload("m128_n16_k64_bf16", {"M": 128, "N": 16, "K": 64, "dtype": "bf16", "n_seqs": 128})
    inputs = cases.inputs(problem, device=DEVICE)
    calls = []

    def counted(module):
        launch = module.launch

        def count_and_launch(*arguments, **options):
            calls.append(module.__name__)
            launch(*arguments, **options)

        return count_and_launch

    for module in (triton_gemv, triton_gemm):
        monkeypatch.setattr(module, "launch", counted(module))
    results = []
    for candidate in triton_routed.CANDIDATES:
        if candidate.refuses(problem):  # the same arms for MXFP4 weights
            continue
        out = cases.outputs(problem, inputs)
        candidate.run(candidate.prepare(inputs), out)
        results.append(out["y"])
    # 128 launches, then the same 128 passes in one launch, then one product.
    assert calls == ["kernels.nvfp4.triton_gemv"] * 129 + ["kernels.nvfp4.triton_gemm"]
    for y in results:
        assert accepted(y, reference(inputs)["y"], cases.tolerance(problem, "nvfp4-w4a16")["y"])
    # Two orders of one float32 sum: the bf16 results may differ by a rounding where the sum sits on a tie, no more.
    assert (results[0].double() - results[-1].double()).abs().max() <= 2.0**-7 * results[0].abs().max()


# --- what compiles without a GPU ------------------------------------------------------------------------------------

INSTRUCTION = {80: "mma.sync", 90: "wgmma", 100: "tcgen05", 120: "mma.sync", 121: "mma.sync"}


@pytest.mark.slow
@pytest.mark.skipif(not has_triton(), reason="Triton is not installed (it is made for Linux only)")
def test_every_triton_build_compiles_and_fits():
    rows = ahead.rows("nvfp4")
    for target in ahead.TARGETS:
        of_target = [row for row in rows if row["target"] == target]
        built = {row["candidate"] for row in of_target}
        assert {"triton_gemm", "triton_gemv"} <= built
        assert ("triton_w4a4" in built) == (target >= 100)
        for row in of_target:
            assert row["status"] == "ok", row
            assert row["fits"], f"{row['build']}: {row['shared_bytes']} bytes of shared memory"
            most = 256 if "registers<=" in row["build"] else 16  # the cap is a lever asked about, spilling its price
            assert (row["spill_bytes"] or 0) <= most, f"{row['build']}: {row['spill_bytes']} bytes spilled"
            if row["candidate"] == "triton_gemm":
                assert INSTRUCTION[target] in row["instruction"]
            if row["build"].startswith("w4a4"):
                assert "mxf4nvf4" in row["instruction"]


@pytest.mark.slow
@pytest.mark.skipif(not cuda.compilers(), reason="needs nvcc, or NVRTC through CuPy")
@pytest.mark.parametrize("target", ahead.TARGETS)
def test_cuda_gemv_compiles_and_fits(target: int):
    rows = aot_worker.compile_cuda(cuda_gemv.CUDA_SOURCES[0], target)
    assert [row["build"] for row in rows] == list(cuda_gemv.CUDA_SOURCES[0].kernels)
    for row in rows:
        assert (row["status"], row["fits"]) == ("ok", True), row
        assert (row["spill_bytes"] or 0) <= 16, row


def test_cuda_source_declares_the_kernels_that_the_launch_chooses():
    text = cuda_gemv.SOURCE.read_text()
    for name in cuda_gemv.CUDA_SOURCES[0].kernels:
        assert f"_{name.split('_', 3)[3]}," in text
    chosen = {
        cuda_gemv.choose_config(m, 75, k, dtype).kernel
        for m, k, dtype in itertools.product(range(1, 9), (64, 1040), ("bf16", "fp16"))
    }
    assert chosen == set(cuda_gemv.CUDA_SOURCES[0].kernels)
