"""kernels/nvfp4/stream.py: the configuration and wgmma_stream.cu on a CPU; the kernel on a GPU.

On a CPU the kernel runs as it is, on_cpu/sm90.cuh in place of its PTX; the CTAs of a launch run side by side there.
"""

import functools
import shutil
import sys

import pytest
import torch

from kernels import cuda
from kernels.common import Tensors
from kernels.nvfp4 import cases, gated, hopper, resident, stream, tiles
from kernels.nvfp4.reference import reference
from lab.check.aot_worker import compile_cuda
from tests.kernels.on_cpu.nvfp4_on_cpu import library, right_every_time, simulated, skip_unless_hopper, within_tolerance
from tests.kernels.on_cpu.stand_in import UNCHANGED, Change, StandIn, needs_compiler, unless_stopped

TAKEN = [w for w in cases.WORKLOADS if w["M"] <= max(stream.TOKENS) and not cases.refuses(w, "nvfp4-w4a16")]
CHECKS = [w for w in TAKEN if w.role == "check"]
MEASURED = [w for w in TAKEN if w.role == "measure" and w["M"] >= 9]
ENTRY = """
struct Arguments {
  const unsigned char* x; TensorMap w; const float* scale; unsigned short* y; float4* parts;
  int m, n, k, iters, each, more;
} given;
static void entry() {
  KERNEL(given.x, given.w, given.scale, given.y, given.parts, given.m, given.n, given.k, given.iters,
         given.each, given.more);
}
extern "C" void simulated(const void* x, const void* w, const void* scale, void* y, void* parts, int m, int n,
                          int k, int iters, int each, int more, int shared, int blocks, int threads, int seed) {
  const TensorMap w_map{(unsigned char*)w, (n * (1 + GATED) + 15) / 16, 72 * ((k + 63) / 64), WARPS, 72 * K_BLOCKS};
  given = {(const unsigned char*)x, w_map, (const float*)scale, (unsigned short*)y, (float4*)parts,
           m, n, k, iters, each, more};
  if (threads != THREADS) why_stopped = "other threads than the kernel's";
  else launch_on_cpu({{blocks, 1, 1}, THREADS, 1, blocks, (u32)shared, seed}, entry);
}
"""


def on_cpu(config: stream.StreamConfig, change: Change = UNCHANGED) -> StandIn:
    return library(stream.source(config), ENTRY, change)


def simulate(kernel: StandIn, config: stream.StreamConfig, inputs: Tensors, seed: int) -> torch.Tensor:
    """y, NaN where the launch leaves sums behind or writes past its end; raises Stopped."""
    x, n = inputs["x"], inputs["w_packed"].shape[0] // (1 + config.gated)
    w = tiles.tile_weights(inputs["w_packed"], inputs["w_scale"], x.dtype)
    y = torch.full((x.shape[0] + 1, n), float("nan"), dtype=x.dtype)
    space = stream.workspace(config, x.device)
    numbers = (*stream.numbers(x.shape[0], n, x.shape[1], config), config.shared_bytes, config.workers)
    simulated(kernel, (x, w, inputs["w_tensor_scale"], y, space["parts"]), (*numbers, config.threads, seed))
    sound = (space["parts"] == -1).all() and y[-1].isnan().all()
    return y[:-1] if sound else torch.full_like(y[:-1], float("nan"))


def test_configurations_fit_and_share_all_units():
    for m in (1, 9, 16, 17, 24):
        config = stream.choose_config(m, 17408, 5120, "bf16")
        assert (config.tokens, config.workers) == (next(t for t in (16, 24) if t >= m), 132)
        assert config.shared_bytes <= hopper.SHARED_BYTES
    config = stream.choose_config(24, 17408, 5120, "bf16")
    assert stream.numbers(24, 17408, 5120, config) == (24, 17408, 5120, 40, 20, 80)
    assert stream.choose_config(9, 300, 528, "bf16").workers == 10  # two blocks of five units
    assert stream.pays(17408, 5120, 132)
    assert stream.pays(5120, 17408, 132)
    assert not stream.pays(5120, 6144, 132)


def prepared(module):
    """Arguments, y and configuration of 20 tokens."""
    problem = cases._check(20, 300, 528, "bf16")
    inputs, config = cases.inputs(problem), module.choose_config(20, 300, 528, "bf16")
    args = inputs | {"w": tiles.tile_weights(inputs["w_packed"], inputs["w_scale"], inputs["x"].dtype)}
    args |= stream.workspace(config, inputs["x"].device) if module is stream else {}
    return args, cases.outputs(problem, inputs)["y"], config


@pytest.mark.parametrize("module", [stream, resident], ids=lambda m: m.__name__)
def test_refuses_what_neither_kernel_can_do(module):
    most = 24 if module is stream else 32
    with pytest.raises(ValueError, match=rf"m={most + 1}\b.*\b{most}\b"):
        module.choose_config(most + 1, 128, 128, "bf16")
    with pytest.raises(ValueError, match=r"k=72\b.*\b16\b"):
        module.choose_config(24, 128, 72, "bf16")
    args, y, config = prepared(module)
    with pytest.raises(ValueError, match="contiguous"):
        module.launch(args | {"x": args["x"].T}, y, config)
    with pytest.raises(ValueError, match="prepare this pair"):
        module.launch(args | {"w": args["w"][1:]}, y, config)


def test_refuses_what_it_cannot_do():
    for stages in (3, 5):
        with pytest.raises(ValueError, match=rf"stages={stages}\b"):
            stream.choose_config(24, 128, 128, "bf16", stages=stages)
    args, y, config = prepared(stream)
    with pytest.raises(ValueError, match=r"\(20, 528\).*\b16$"):
        stream.launch(args, y, stream.choose_config(16, 300, 528, "bf16"))
    with pytest.raises(ValueError, match=r"workspace\(\)"):
        stream.launch(args | {"parts": args["parts"][1:]}, y, config)


@needs_compiler
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "workers"),
    [
        (24, 500, 1040, "bf16", 5),  # two to three CTAs a block
        (17, 300, 528, "fp16", 3),
        (9, 201, 2064, "fp16", 7),  # seven of one block, y two bytes at a time
        (24, 520, 528, "bf16", 1),  # whole blocks, more units than stages
        (16, 300, 4112, "bf16", 3),
        (23, 264, 2096, "bf16", 8),
    ],
)
def test_the_kernel_runs_on_a_cpu(m, n, k, dtype, workers):
    problem = cases._check(m, n, k, dtype)
    inputs = cases.inputs(problem, seed=1)
    inputs["w_scale"].view(-1)[::5] = 0
    config = stream.choose_config(m, n, k, dtype, workers)
    kernel = on_cpu(config)
    right_every_time((simulate(kernel, config, inputs, seed) for seed in range(2)), problem, inputs)


def gated_is_right(module, kernel: StandIn, config, m: int, f: int, k: int) -> bool:
    """Gate is the first f rows of the problem's weights, up the others. module: of on_cpu and simulate."""
    inputs = cases.inputs(cases._check(m, 2 * f, k, config.dtype), seed=1)
    gate, up = reference(inputs)["y"].double().split(f, dim=1)
    for name in ("w_packed", "w_scale"):
        inputs[name] = gated.alternating(inputs[name][:f], inputs[name][f:])
    y = module.simulate(kernel, config, inputs, 0).double()
    wanted = torch.nn.functional.silu(gate) * up
    return bool((y - wanted).norm() / wanted.norm() < (2e-3 if config.dtype == "bf16" else 3e-4))


@needs_compiler
@pytest.mark.parametrize(
    ("m", "f", "k", "dtype", "workers"),
    [(24, 248, 1040, "bf16", 5), (9, 104, 2064, "fp16", 7), (24, 264, 528, "bf16", 1), (23, 136, 4112, "bf16", 3)],
)
def test_a_gated_block_is_silu_of_its_gate_times_up(m, f, k, dtype, workers):
    here = sys.modules[__name__]
    config = stream.choose_config(m, 2 * f, k, dtype, workers, gated=True)
    assert gated_is_right(here, on_cpu(config), config, m, f, k)


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("v.y * scale, v.w * scale)", "v.x * scale, v.w * scale)"),
        ("first_row / 2 + n", "first_row + n"),
        ("n * (late_lane % 2)", "8 * (late_lane % 2)"),
    ],
)
def test_the_simulation_sees_mistakes_in_a_gated_block(change):
    config = stream.choose_config(24, 496, 1040, "bf16", 5, gated=True)
    kernel = on_cpu(config, change)
    assert not unless_stopped(lambda: gated_is_right(sys.modules[__name__], kernel, config, 24, 248, 1040))


@needs_compiler
def test_a_nan_reaches_its_token_only():
    """Sums that are NaN are no sign that sums are missing."""
    problem = cases._check(24, 300, 528, "bf16")
    inputs = cases.inputs(problem, seed=1)
    inputs["x"].view(torch.int16)[3, 77] = -1  # all ones
    config = stream.choose_config(24, 300, 528, "bf16", 3)
    y = simulate(on_cpu(config), config, inputs, 0)
    assert y[3].isnan().all()
    assert not torch.cat((y[:3], y[4:])).isnan().any()


@needs_compiler
@pytest.mark.parametrize("change", [UNCHANGED, ("W_BEFORE_X = 1;", "W_BEFORE_X = 2;")])
def test_one_copy_goes_before_x(change):
    # Four units, all of whose x the warpgroups bring; fp16, since a library of other tests would remember their copies.
    problem = cases._check(24, 256, 512, "fp16")
    config = stream.choose_config(24, 256, 512, "fp16", 1)
    kernel, inputs = on_cpu(config, change), cases.inputs(problem, seed=1)
    for seed in range(4):
        simulate(kernel, config, inputs, seed)
    assert (kernel.copies_before_loads() == 1) == (change == UNCHANGED)


MISTAKES = [
    ("wgmma_wait<1>();", "wgmma_wait<2>();"),
    ("release((at - 1) % STAGES);", "release(at % STAGES);"),
    ("ring.consumer_wait(Pipe::State::of(at));", "mbarrier_wait(ring.full(stage), 1);"),
    ("(at + 1) / STAGES + 1 & 1", "at / STAGES + 1 & 1"),
    ("if (warp == WARPS) {\n            named_barrier", "if (false) {\n            named_barrier"),
    ("16 * ((4 * h + i) ^ row)", "16 * (4 * h + i)"),
    ("(first_iter + iter) % iters", "first_iter + iter"),
    ("if (++k_at == iters) k_at = 0;", "++k_at;"),
    ("while (partition.begin(last) < start + iters) last++;", ""),
    ("(of == first && before ? workers : 0)", "0"),
    ("while (warp_any(waiting));", "while (false);"),
    ("if (owned[e]) st_relaxed(theirs", "if (false) st_relaxed(theirs"),
    ("if (of != worker) st_relaxed(others", "if (false) st_relaxed(others"),
    ("16 * (late_lane / 8 % 2)", "0"),
    ("min(8, n - row)", "8"),
    ("tile_fragments_by_half<X_BF16>", "tile_fragments_by_half<!X_BF16>"),
    ("72 * K_BLOCKS * w_iter", "72 * w_iter"),
    ("WARPS * w_block", "w_block"),
    ("w_iter = first_iter", "w_iter = 0"),
    ("w_block = line_begin / iters", "w_block = 0"),
    ("if (++w_iter == iters) w_iter = 0, w_block++;", "++w_iter;"),
    ("warp * K_BLOCKS * TILE_BYTES", "warp * TILE_BYTES"),
]


@needs_compiler
@pytest.mark.parametrize("change", [UNCHANGED, *MISTAKES], ids=lambda c: c[0][:40])
def test_the_simulation_sees_mistakes(change):
    def sound(shape: tuple[int, int, int, int]) -> bool:
        m, n, k, workers = shape
        problem = cases._check(m, n, k, "bf16")
        inputs = cases.inputs(problem, seed=1)
        config = stream.choose_config(m, n, k, "bf16", workers)
        y = simulate(on_cpu(config, change), config, inputs, 0)
        return within_tolerance(y, problem, inputs, "nvfp4-w4a16")

    shapes = ((24, 500, 1040, 5), (16, 201, 2064, 5), (16, 300, 4112, 3))
    assert all(unless_stopped(functools.partial(sound, shape)) for shape in shapes) == (change == UNCHANGED)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(("m", "dtype"), [(16, "bf16"), (24, "bf16"), (24, "fp16")])
def test_sources_compile_without_spills_to_wgmma(m, dtype, gate):
    (row,) = compile_cuda(stream.source(stream.choose_config(m, 2 * 17408, 5120, dtype, gated=gate)), 90)
    assert (row["status"], row["spill_bytes"], row["fits"]) == ("ok", 0, True), row
    assert "wgmma" in row["instruction"]


@pytest.mark.gpu
@pytest.mark.parametrize("problem", CHECKS + MEASURED, ids=lambda w: w.id)
def test_on_a_gpu_within_tolerance_and_the_same_twice(problem):
    skip_unless_hopper()
    inputs = cases.inputs(problem, seed=1, device="cuda")
    m, n, k, dtype = problem["M"], problem["N"], problem["K"], problem["dtype"]
    config = stream.choose_config(m, n, k, dtype, hopper.multiprocessors(0))
    w = tiles.tile_weights(inputs["w_packed"], inputs["w_scale"], inputs["x"].dtype)
    args = inputs | {"w": w} | stream.workspace(config, w.device)

    def launched() -> torch.Tensor:
        y = cases.outputs(problem, inputs)["y"]
        stream.launch(args, y, config)
        assert (args["parts"] == -1).all()
        return y

    right_every_time((launched() for _ in range(3)), problem, inputs)


@pytest.mark.gpu
def test_kernels_that_shapes_share_run_in_any_order_on_a_gpu():
    """The limit of shared memory is the function's: a shape that needs less must not lower it for the others."""
    skip_unless_hopper()
    for n, k in ((300, 17408), (300, 6144), (300, 17408)):
        cuda.load.cache_clear()
        problem = cases._check(32, n, k, "bf16")
        inputs = cases.inputs(problem, seed=1, device="cuda")
        config = resident.choose_config(32, n, k, "bf16", 1)
        w = tiles.tile_weights(inputs["w_packed"], inputs["w_scale"], inputs["x"].dtype)
        y = cases.outputs(problem, inputs)["y"]
        resident.launch(inputs | {"w": w}, y, config)
        assert within_tolerance(y, problem, inputs, "nvfp4-w4a16")
