"""kernels/nvfp4/cuda_w4a8.py: weight tiles and their rounding, quantiser and GEMM on a CPU, all on a GPU.

On a CPU the .cu files run as they are, on_cpu/sm90.cuh in place of their PTX.
"""

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.common import Tensors
from kernels.nvfp4 import cases, cuda_w4a8, w4a8_tiles
from kernels.nvfp4 import format as fmt
from kernels.nvfp4.reference import reference, weights
from lab.check.aot_worker import compile_cuda
from tests.kernels.on_cpu import nvfp4_on_cpu
from tests.kernels.on_cpu.nvfp4_on_cpu import library, simulated, skip_unless_hopper
from tests.kernels.on_cpu.stand_in import UNCHANGED, Change, StandIn, needs_compiler, unless_stopped

CHECKS = [w for w in cases.WORKLOADS if w.role == "check" and not cuda_w4a8._refuses(w)]
MEASURED = [w for w in cases.WORKLOADS if w.role == "measure" and not cuda_w4a8._refuses(w)]
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"promoted": True},
    {"waves": 0},
    {"tokens": 128, "promote": 1},
    {"tokens": 256, "waves": 1},
)
GEMM_ENTRY = """
struct Arguments {
  TensorMap map; const float* x_scale; const unsigned char* w; const float* row_scale; unsigned short* y; float* parts;
  unsigned* flags; int m, n, iters, n_tiles, m_tiles, waves;
} given;
static void entry() {
  KERNEL(given.map, given.x_scale, given.w, given.row_scale, given.y, given.parts, given.flags, given.m, given.n,
         given.iters, given.n_tiles, given.m_tiles, given.waves);
}
extern "C" int shared_bytes() { return SHARED_BYTES + 1024; }
extern "C" int part_floats() { return CONSUMERS * PART_FLOATS; }
extern "C" void simulated(const void* x, const void* x_scale, const void* w, const void* row_scale, void* y,
                          void* parts, void* flags, int m, int n, int iters, int n_tiles, int m_tiles, int waves,
                          int blocks, int seed) {
  given = {{(unsigned char*)x, m, 64 * K_BLOCKS * iters, BLOCK_M}, (const float*)x_scale,
           (const unsigned char*)w, (const float*)row_scale, (unsigned short*)y, (float*)parts, (unsigned*)flags, m, n,
           iters, n_tiles, m_tiles, waves};
  // Blocks run one after another, so that a flag raised too early would harm nobody: its sums must be there.
  on_release = [](u32* flag, u32) {
    const float* const sums = given.parts + (flag - given.flags) * PART_FLOATS;
    for (int i = 0; i < PART_FLOATS; i++) if (isnan(sums[i])) stop("a flag ahead of its sums");
  };
  launch_on_cpu({{blocks, 1, 1}, THREADS, 1, 1, SHARED_BYTES, seed}, entry);
}
"""
QUANTISER_ENTRY = """
struct Arguments { const unsigned short* x; unsigned char* out; float* scales; int k, padded; } given;
static void entry() {
  KERNEL(given.x, given.out, given.scales, given.k, given.padded);
}
extern "C" void simulated(const void* x, void* out, void* scales, int k, int padded, int threads, int blocks) {
  given = {(const unsigned short*)x, (unsigned char*)out, (float*)scales, k, padded};
  launch_on_cpu({{blocks, 1, 1}, threads, 1, 1, 16, 0}, entry);
}
"""


def on_cpu(source: Any, entry: str, change: Change = UNCHANGED) -> StandIn:
    return library(source, entry, change)


def k_order(padded: int) -> torch.Tensor:
    """The k of each byte of a row of x_e4m3, as the notes of quantise_e4m3.cu have it."""
    k = torch.arange(padded).view(-1, 4, 2, 2, 4)  # 64 k, t, j, h, i
    return k.permute(0, 2, 3, 1, 4).flatten()


def rounded_x(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 values of x / scale as float64, scale [M, 1] float32), operation by operation what the quantiser does."""
    amax = x.float().abs().amax(1, keepdim=True).clamp_min(2.0**-100)
    by, scale = torch.full_like(amax, 448.0) / amax, amax / torch.full_like(amax, 448.0)
    return (x.float() * by).clamp(-448, 448).to(torch.float8_e4m3fn).double(), scale


def rounded_w(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 operands [N, K], scale [N, 1]), float64: code times block scale, rounded by torch in units of the row."""
    codes, scales, exponents = w4a8_tiles.operands(inputs["w_packed"], inputs["w_scale"])
    value = fmt.decode_e2m1(codes).unflatten(1, (-1, 16)) * fmt.decode_ue4m3(scales).unsqueeze(-1)
    scale = inputs["w_tensor_scale"].double() * torch.ldexp(torch.ones(len(exponents)), exponents)[:, None].double()
    return value.flatten(1).to(torch.float8_e4m3fn).double(), scale


def product_of_rounded(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """float64 y of the operands that the kernel multiplies: only its sums and the rounding of y are left to judge."""
    (x, x_scale), (w, w_scale) = rounded_x(inputs["x"]), rounded_w(inputs)
    return (x @ w.T) * x_scale.double() * w_scale.T


def harsh_inputs(problem: Any, seed: int) -> dict[str, torch.Tensor]:
    """Inputs with zero, subnormal and far apart block scales, a row of zeros in x and one in w."""
    inputs = cases.inputs(problem, seed=seed)
    inputs["w_scale"].view(-1)[::5] = 0
    inputs["w_scale"].view(-1)[1::7] = 3
    inputs["w_scale"][-1] = 0
    inputs["x"][-1] = 0
    return inputs


def simulate(kernel: StandIn, config: cuda_w4a8.W4a8Config, inputs: Tensors, seed: int) -> tuple[torch.Tensor, int]:
    """(y, flags left up); x comes rounded by torch. Raises Stopped."""
    args, n = cuda_w4a8.prepare(inputs), inputs["w_packed"].shape[0]
    x, (m, padded) = args["x_e4m3"], args["x_e4m3"].shape
    values, scale = rounded_x(torch.nn.functional.pad(inputs["x"], (0, padded - inputs["x"].shape[1])))
    x.copy_(values[:, k_order(padded)].to(torch.float8_e4m3fn).view(torch.uint8))
    args["x_scale"][:m] = scale[:, 0]
    parts = torch.full((config.grid, kernel.part_floats()), float("nan"))
    flags = torch.zeros(config.grid, config.groups, dtype=torch.int32)
    y = torch.full((m, n), float("nan"), dtype=inputs["x"].dtype)
    depth = padded // w4a8_tiles.COLS // cuda_w4a8.ITERATION_K_BLOCKS
    numbers = (m, n, depth, -(-n // config.rows), -(-m // config.tokens), config.waves, config.grid, seed)
    given = (x, args["x_scale"], args["w"], args["w_row_scale"], y, parts, flags)
    simulated(kernel, given, numbers)
    return y, int(flags.sum())


def relative(y: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((y.double() - wanted).norm() / wanted.norm())


def within_tolerance(y: torch.Tensor, problem: Any, inputs: dict[str, torch.Tensor], promote: int) -> bool:
    precision = "nvfp4-w4a8" if promote in (1, 2, 4) else "nvfp4-w4a8-fast"
    if not promote and problem.inputs == cases.POSITIVE:  # forced at M = 128, where the candidate never sums all of K
        problem = cases._measure(512, problem["N"], problem["K"], "", inputs=cases.POSITIVE)
    return nvfp4_on_cpu.within_tolerance(y, problem, inputs, precision)


@pytest.mark.parametrize("problem", CHECKS, ids=lambda w: w.id)
def test_operands_are_the_weights_rounded_once(problem):
    inputs = cases.inputs(problem, seed=3)
    exact = weights(inputs)
    values, scale = rounded_w(inputs)
    assert values.abs().max() <= 448
    assert ((values != 0) <= (values.abs() >= 2.0**-6)).all()  # none is subnormal
    scaled = exact / scale
    assert torch.equal(values, scaled.float().to(torch.float8_e4m3fn).double())
    # All codes at 6 would give 2.7 % with scales of even mantissas; normal weights have half their energy there.
    assert relative(values, scaled) < (0.029 if problem.inputs == cases.OUTLIER else 0.0225)


def test_scales_far_apart_in_a_row_lose_little():
    codes = torch.randint(0, 16, (4, 126 * 16), dtype=torch.uint8)
    scale = torch.arange(1, 127, dtype=torch.uint8).repeat(4, 1)
    inputs = {"w_packed": fmt.pack(codes), "w_scale": scale, "w_tensor_scale": torch.ones(1)}
    values, row = rounded_w(inputs)
    error = ((values * row - weights(inputs)).abs() / (6 * 448)).view(4, 126, 16)
    assert error[:, : 126 - 8 * 11].max() < 2e-4
    assert relative(values * row, weights(inputs)) < 0.03


@pytest.mark.parametrize("problem", CHECKS, ids=lambda w: w.id)
def test_tiles_hold_codes_and_scales_where_the_kernel_takes_them(problem):
    inputs = harsh_inputs(problem, seed=3)
    tiled, powers = w4a8_tiles.tile_weights(inputs["w_packed"], inputs["w_scale"])
    codes, _, exponents = w4a8_tiles.operands(inputs["w_packed"], inputs["w_scale"])
    assert torch.equal(powers, torch.ldexp(torch.ones(len(exponents)), exponents))
    n, k = codes.shape
    wanted = torch.zeros(tiled.shape[0] * 128, tiled.shape[1] * 128, dtype=torch.uint8)
    wanted[:n, :k] = codes
    words = tiled[..., :1024].contiguous().view(torch.int32).view(*tiled.shape[:3], 2, 8, 4, 2, 2).to(torch.int64)
    bytes_ = tiled[..., 1024:].view(*tiled.shape[:3], 8, 4, 2, 2)
    for row_tile, part, g, t, half, j, i in ((0, 0, 0, 0, 0, 0, 0), (7, 1, 7, 3, 1, 1, 7), (2, 0, 5, 1, 1, 0, 3)):
        word = words[:, :, row_tile, part, g, t, half, j]
        sign = word >> (8 * i + 7 if i < 4 else 8 * (i - 4) + 3) & 1
        row, column = 16 * row_tile + 8 * half + g, 64 * part + 16 * t + 8 * j + i
        assert torch.equal((word >> 4 * i & 7 | sign << 3).to(torch.uint8), wanted[row::128, column::128])
        byte = bytes_[:, :, row_tile, g, t, part, half]
        low = fmt.decode_ue4m3(byte & 127)
        far = (low * 1.5).to(torch.float8_e4m3fn).view(torch.uint8) - (byte & 127)
        assert torch.equal(far, 4 + (byte >> 7))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("problem", CHECKS + MEASURED, ids=lambda w: w.id)
def test_configurations_fit_and_share_the_work(problem, variant):
    config = cuda_w4a8.choose_config(problem["M"], problem["N"], problem["K"], problem["dtype"], **variant)
    assert config.shared_bytes <= cuda_w4a8.SHARED_BYTES
    assert config.grid <= cuda_w4a8.SMS
    assert w4a8_tiles.k_blocks_of(problem["K"]) % cuda_w4a8.ITERATION_K_BLOCKS == 0
    assert cuda_w4a8.workspace(config, torch.device("cpu"))["parts"].numel() <= 128 * 256 * cuda_w4a8.SMS
    # What cases.py takes for the longest sum: 128 k are four steps.
    assert "tokens" in variant or problem["M"] > 128 or 0 < config.promote <= 32 // 4


def test_prepared_operands_have_the_room_their_launch_needs():
    problem = next(w for w in CHECKS if w["M"] == 130)
    inputs = cases.inputs(problem)
    for promoted in (False, True):
        args = cuda_w4a8.prepare(inputs, promoted)
        m, n, k, dtype = problem["M"], problem["N"], problem["K"], problem["dtype"]
        config = cuda_w4a8.choose_config(m, n, k, dtype, promoted=promoted)
        assert args["parts"].numel() == config.grid * 128 * config.tokens
        assert args["flags"].tolist() == [0] * (2 * config.grid)
        assert args["parts"].data_ptr() != cuda_w4a8.prepare(inputs, promoted)["parts"].data_ptr()


def test_a_long_shared_sum_of_much_x_is_made_of_whole_tiles():
    choose = cuda_w4a8.choose_config
    assert choose(2048, 5120, 17408, "bf16").waves == 2
    assert choose(2048, 17408, 5120, "bf16").waves == 7


@pytest.mark.parametrize("problem", [w for w in CHECKS if w.inputs == cases.OUTLIER], ids=lambda w: w.id)
def test_outliers_that_make_up_a_sum_stay_within_their_tolerance(problem):
    limit, largest = cases.tolerance(problem, "nvfp4-w4a8")["y"], 0.0
    for seed in range(100):
        inputs = cases.inputs(problem, seed=seed)
        y, wanted = product_of_rounded(inputs).to(inputs["x"].dtype), reference(inputs)["y"]
        assert nvfp4_on_cpu.accurate(y, wanted, limit), seed
        largest = max(largest, float((y.double() - wanted).abs().max() / wanted.square().mean().sqrt()))
    assert largest > limit.max_error / 3  # no looser than it has to be; seven deviations are not enough
    assert largest > 7 * limit.relative_error


def one_sign_wrong(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The packed weights, but for one nibble: the largest weight of the column with most of the energy of y."""
    w = weights(inputs)
    k = int((inputs["x"].double().square().sum(0) * w.square().sum(0)).argmax())
    packed = inputs["w_packed"].clone()
    packed[int(w[:, k].abs().argmax()), k // 2] ^= 8 << 4 * (k % 2)
    return packed


ONE_OF_16_LOST = torch.tensor([255] * 7 + [15], dtype=torch.uint8)
MISTAKES: dict[str, Any] = {
    "tensor scale dropped": lambda i: {"w_tensor_scale": torch.ones(1)},
    "block scales dropped": lambda i: {"w_scale": i["w_scale"].float().mean().to(torch.uint8).expand_as(i["w_scale"])},
    "scales shifted": lambda i: {"w_scale": i["w_scale"].roll(1, 1)},
    "groups shifted": lambda i: {"w_packed": i["w_packed"].roll(8, 1)},
    "nibbles swapped": lambda i: {"w_packed": i["w_packed"] << 4 | i["w_packed"] >> 4},
    "a nibble lost": lambda i: {"w_packed": i["w_packed"] & ONE_OF_16_LOST.repeat(i["w_packed"].shape[1] // 8)},
    "one sign wrong": lambda i: {"w_packed": one_sign_wrong(i)},
    "x shifted": lambda i: {"x": i["x"].roll(1, 1)},
}


@pytest.mark.parametrize("problem", [w for w in CHECKS if w["K"] >= 256], ids=lambda w: w.id)
def test_the_tolerance_sees_mistakes(problem):
    limit, missed = cases.tolerance(problem, "nvfp4-w4a8")["y"], []
    for seed in range(8):
        inputs = cases.inputs(problem, seed=seed)
        wanted = reference(inputs)["y"]
        for name, change in MISTAKES.items():
            y = product_of_rounded(inputs | change(inputs)).to(inputs["x"].dtype)
            missed += [name] if nvfp4_on_cpu.accurate(y, wanted, limit) else []
    # Where two outlier channels meet, the others hardly show: a draw may hide what every other workload tells.
    assert missed in ([], ["a nibble lost"] if problem.inputs == cases.OUTLIER else [])


@pytest.mark.parametrize(("m", "promoted"), [(128, False), (512, False), (512, True)])
def test_sums_of_one_sign_stay_within_their_tolerance(m, promoted):
    """The tensor cores' sums as cases.py has them: 32 products a step, cut off 13 bits below the largest number."""
    problem = next(w for w in cases.WORKLOADS if w.id == f"m{m}_n17408_k5120_positive")
    config = cuda_w4a8.choose_config(m, problem["N"], problem["K"], "bf16", promoted=promoted)
    assert config.promote == (4 if promoted else 8 if m == 128 else 0)
    small = cases._measure(8, 64, problem["K"], "", inputs=cases.POSITIVE)
    inputs = cases.inputs(small, seed=2)
    (x, x_scale), (w, w_scale) = rounded_x(inputs["x"]), rounded_w(inputs)
    products = x[:, None, :] * w[None]
    assert (products >= 0).all()
    total, sums = torch.zeros(8, 64, dtype=torch.float64), torch.zeros(8, 64, dtype=torch.float64)
    for step, terms in enumerate(products.split(32, dim=2)):
        if config.promote and step % (4 * config.promote) == 0:
            total, sums = total + sums, torch.zeros_like(sums)
        terms = torch.cat((terms, sums.unsqueeze(2)), dim=2)
        unit = torch.ldexp(torch.ones(8, 64, 1), torch.frexp(terms.amax(2, keepdim=True))[1] - 1 - 13)
        sums = ((terms / unit).floor() * unit).sum(2)
    y = (total + sums) * x_scale.double() * w_scale.T
    limit = cases.tolerance(problem, "nvfp4-w4a8" if promoted else "nvfp4-w4a8-fast")["y"].relative_error
    assert relative(product_of_rounded(inputs), reference(inputs)["y"]) < limit / 4
    assert limit / 4 < relative(y, reference(inputs)["y"]) < limit


def test_refuses_what_it_cannot_do():
    assert "reading" in cuda_w4a8._refuses(next(w for w in cases.WORKLOADS if w["M"] == 8))
    with pytest.raises(ValueError, match=r"k=\d+.*\b16\b"):
        cuda_w4a8.choose_config(128, 128, 72, "bf16")
    problem = CHECKS[0]
    inputs = cases.inputs(problem)
    args, y = cuda_w4a8.prepare(inputs), cases.outputs(problem, inputs)["y"]
    config = cuda_w4a8.choose_config(problem["M"], problem["N"], problem["K"], problem["dtype"])
    with pytest.raises(ValueError, match="contiguous"):
        cuda_w4a8.quantise(args | {"x": args["x"].T})
    with pytest.raises(ValueError, match="prepare this pair"):
        cuda_w4a8.multiply(args, y[1:], config)
    few = replace(config, grid=config.grid - 1)
    with pytest.raises(ValueError, match="workspace"):
        cuda_w4a8.multiply(args | cuda_w4a8.workspace(few, y.device), y, config)


@needs_compiler
@pytest.mark.parametrize(
    ("k", "dtype", "m"), [(5120, "bf16", 2), (1040, "fp16", 3), (17408, "bf16", 1), (64, "fp16", 5)]
)
def test_the_quantiser_on_a_cpu_rounds_as_torch_does(k, dtype, m):
    x = torch.randn(m, k).to(cases.DTYPES[dtype])
    x[0, k // 2] = -40
    if m > 2:
        x[1], x[2] = 0, x[2] * 1e-6
    items, threads = cuda_w4a8.quantiser_shape(k)
    kernel = on_cpu(cuda_w4a8.quantiser_source(dtype, items), QUANTISER_ENTRY)
    padded = w4a8_tiles.k_blocks_of(k) * 128
    out, scales = torch.full((m, padded), 0x7F, dtype=torch.uint8), torch.full((m,), float("nan"))
    simulated(kernel, (x, out, scales), (k, padded, threads, m))
    values, scale = rounded_x(torch.nn.functional.pad(x, (0, padded - k)))
    assert torch.equal(scales, scale[:, 0])
    assert torch.equal(out.view(torch.float8_e4m3fn).double(), values[:, k_order(padded)])


@needs_compiler
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "sms", "variant"),
    [
        (130, 300, 1040, "bf16", 4, {"tokens": 128, "promote": 1, "stages": 3, "waves": 1}),
        (130, 300, 1552, "fp16", 6, {"tokens": 128, "waves": 0}),
        (250, 700, 272, "bf16", 4, {"tokens": 256, "waves": 1}),
        (150, 300, 528, "bf16", 4, {"tokens": 256, "waves": 0}),
        (63, 300, 1040, "bf16", 8, {"tokens": 64, "waves": 0}),
        (31, 300, 528, "bf16", 8, {"promote": 8, "waves": 0}),
        (128, 1100, 272, "bf16", 8, {"tokens": 128, "stages": 2, "waves": 0}),
        (40, 300, 1040, "bf16", 3, {"tokens": 48, "groups": 3, "waves": 0}),  # the second tile has a block past N
        (64, 600, 528, "fp16", 2, {"tokens": 64, "groups": 3}),
    ],
)
def test_the_gemm_runs_on_a_cpu(m, n, k, dtype, sms, variant):
    problem = cases._check(m, n, k, dtype)
    inputs = harsh_inputs(problem, seed=1)
    config = cuda_w4a8.choose_config(m, n, k, dtype, sms, **variant)
    kernel = on_cpu(cuda_w4a8.source(config), GEMM_ENTRY)
    assert kernel.shared_bytes() == config.shared_bytes
    assert kernel.part_floats() == config.part_floats
    first = None
    for seed in range(2 if m == 63 else 1):
        y, flags = simulate(kernel, config, inputs, seed)
        assert flags == 0
        assert relative(y, product_of_rounded(inputs)) < (2.0**-9 if dtype == "bf16" else 2.0**-12)
        first = y if first is None else first
        assert torch.equal(first, y)


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("                        wgmma_wait<1>();\n", ""),
        ("state.stage, !fresh);", "state.stage, 1);"),
        ("promote();\n                        }", "}"),
        ("if (thread == 0) flag_raise", "if (thread + group == 0) flag_raise"),
        ("named_barrier_sync(EPILOGUE + group, 128);\n                if (thread == 0) flag", "if (thread == 0) flag"),
        ("if (before >= 0) release(before);", "release(state.stage);"),
        ("begin(worker + 1 + count) < tile_end", "begin(worker + 1 + count) < 0"),
        ("x + 2 * j", "x + 4 * j"),
        ("token_of(work.tile),", "token_of(work.tile) + 8,"),
        ("+ 0x03FFF800u", "+ 0x04FFF800u"),
        ("decode8(row ? c.z : c.x", "decode8(row ? c.w : c.x"),
        ("w << 4", "w << 3"),
    ],
)
def test_the_simulation_sees_mistakes(change):
    problem = cases._check(130, 300, 512, "bf16")
    inputs = cases.inputs(problem, seed=1)
    promote = 2 if "fresh" in change[0] or "promote" in change[0] else 0
    fixed: dict[str, Any] = {"tokens": 128, "promote": promote, "stages": 3, "waves": 0}
    config = cuda_w4a8.choose_config(130, 300, 512, "bf16", 4, **fixed)

    def sound() -> bool:
        y, _ = simulate(on_cpu(cuda_w4a8.source(config), GEMM_ENTRY, change), config, inputs, 0)
        return relative(y, product_of_rounded(inputs)) < 2.0**-9

    assert not unless_stopped(sound)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("source", cuda_w4a8.CUDA_SOURCES, ids=lambda s: s.kernels[0])
def test_sources_compile_without_spills_to_fp8_products(source):
    (row,) = compile_cuda(source, 90)
    assert (row["status"], row["spill_bytes"], row["fits"]) == ("ok", 0, True), row
    assert ("wgmma" in row["instruction"]) == (source.path == cuda_w4a8.SOURCE)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("problem", CHECKS + MEASURED, ids=lambda w: w.id)
def test_on_a_gpu_within_tolerance_and_the_same_twice(problem, variant):
    skip_unless_hopper()
    inputs = cases.inputs(problem, seed=1, device="cuda")
    args = cuda_w4a8.prepare(inputs)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    config = cuda_w4a8.choose_config(problem["M"], problem["N"], problem["K"], problem["dtype"], sms, **variant)
    args |= cuda_w4a8.workspace(config, inputs["x"].device)
    first = None
    for _ in range(3):
        y = cases.outputs(problem, inputs)["y"]
        cuda_w4a8.quantise(args)
        cuda_w4a8.multiply(args, y, config)
        assert within_tolerance(y, problem, inputs, config.promote)
        first = y if first is None else first
        assert torch.equal(first, y)
