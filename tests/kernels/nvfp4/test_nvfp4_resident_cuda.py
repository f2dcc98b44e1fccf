"""kernels/nvfp4/resident.py: the configuration and wgmma_resident.cu on a CPU; the kernel on a GPU.

On a CPU the kernel runs as it is, on_cpu/sm90.cuh in place of its PTX: clusters, pipelines, the order of x,
items, sends and the reducer are the kernel's own, timing is not.
"""

import shutil

import pytest
import torch

from kernels.common import Tensors
from kernels.nvfp4 import cases, hopper, resident, tiles
from lab.check.aot_worker import compile_cuda
from tests.kernels.on_cpu.nvfp4_on_cpu import library, right_every_time, simulated, skip_unless_hopper, within_tolerance
from tests.kernels.on_cpu.stand_in import UNCHANGED, Change, StandIn, needs_compiler, unless_stopped

TAKEN = [w for w in cases.WORKLOADS if w["M"] <= resident.TOKENS and not cases.refuses(w, "nvfp4-w4a16")]
CHECKS = [w for w in TAKEN if w.role == "check"]
MEASURED = [w for w in TAKEN if w.role == "measure" and w["M"] >= 17]
ENTRY = """
struct Arguments {
  const unsigned char* x; TensorMap w; const float* scale; unsigned short* y; int m, n, k, depth;
} given;
static void entry() {
  KERNEL(given.x, given.w, given.scale, given.y, given.m, given.n, given.k, given.depth);
}
extern "C" int x_begin() { return X; }
extern "C" void simulated(const void* x, const void* w, const void* scale, void* y, int m, int n, int k, int depth,
                          int shared, int blocks, int threads, int seed) {
  const TensorMap w_map{(unsigned char*)w, (n + 15) / 16, 72 * ((k + 63) / 64), 4, 144};
  given = {(const unsigned char*)x, w_map, (const float*)scale, (unsigned short*)y, m, n, k, depth};
  if (threads != THREADS) why_stopped = "other threads than the kernel's";
  else launch_on_cpu({{blocks, 1, 1}, THREADS, CLUSTER, 1, (u32)shared, seed}, entry);
}
"""


def on_cpu(config: resident.ResidentConfig, change: Change = UNCHANGED) -> StandIn:
    return library(resident.source(config), ENTRY, change)


def simulate(kernel: StandIn, config: resident.ResidentConfig, inputs: Tensors, seed: int) -> torch.Tensor:
    """y; raises Stopped."""
    x, n = inputs["x"], inputs["w_packed"].shape[0]
    w = tiles.tile_weights(inputs["w_packed"], inputs["w_scale"], x.dtype)
    y = torch.full((x.shape[0], n), float("nan"), dtype=x.dtype)
    numbers = (
        x.shape[0],
        n,
        x.shape[1],
        resident.depth_of(x.shape[1]),
        config.shared_bytes,
        config.clusters * config.cluster,
    )
    simulated(kernel, (x, w, inputs["w_tensor_scale"], y), (*numbers, config.threads, seed))
    return y


@pytest.mark.parametrize("problem", CHECKS + MEASURED, ids=lambda w: w.id)
def test_configurations_fit_or_are_refused(problem):
    m, n, k = problem["M"], problem["N"], problem["K"]
    x_bytes = -(-resident.depth_of(k) // resident.CLUSTER) * 256 * resident.TOKENS
    if x_bytes > 200_000:
        with pytest.raises(ValueError, match=r"x of \d+ k"):
            resident.choose_config(m, n, k, problem["dtype"])
        return
    config = resident.choose_config(m, n, k, problem["dtype"])
    assert x_bytes < config.shared_bytes <= resident.SHARED_BYTES
    assert config.stages >= 2
    assert config.clusters * config.cluster <= hopper.SMS_HELD[config.cluster]


@needs_compiler
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "clusters", "variant"),
    [
        (31, 500, 1040, "bf16", 2, {"cluster": 2, "groups": 2, "stages": 2}),  # rounds, then shared tiles
        (17, 300, 528, "fp16", 1, {"cluster": 4, "groups": 3, "stages": 2}),
        (32, 321, 1552, "bf16", 1, {"cluster": 8, "groups": 2, "stages": 3}),  # odd N: y two bytes at a time
        (9, 200, 400, "fp16", 1, {"cluster": 2, "groups": 4, "stages": 2}),
    ],
)
def test_the_kernel_runs_on_a_cpu(m, n, k, dtype, clusters, variant):
    problem = cases._check(m, n, k, dtype)
    inputs = cases.inputs(problem, seed=1)
    inputs["w_scale"].view(-1)[::5] = 0
    config = resident.choose_config(m, n, k, dtype, clusters, **variant)
    kernel = on_cpu(config)
    assert kernel.x_begin() + config.depth * 256 * resident.TOKENS == config.shared_bytes
    seeds = range(2 if config.cluster < 8 else 1)
    right_every_time((simulate(kernel, config, inputs, seed) for seed in seeds), problem, inputs)


@needs_compiler
@pytest.mark.parametrize("change", [UNCHANGED, ("W_BEFORE_X = 2", "W_BEFORE_X = 3")])
def test_two_copies_of_a_ring_go_before_x(change):
    problem = cases._check(32, 400, 1600, "bf16")
    config = resident.choose_config(32, 400, 1600, "bf16", 1, cluster=2, groups=2, stages=3)
    kernel = on_cpu(config, change)
    simulate(kernel, config, cases.inputs(problem, seed=1), 0)
    assert (kernel.copies_before_loads() == 2 * config.groups) == (change == UNCHANGED)


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        UNCHANGED,
        ("2 * 72 * (slice + at)", "72 * (slice + at)"),
        ("row_tile = 4 * (", "row_tile = ("),
        ("2 * warp * TILE_BYTES", "warp * TILE_BYTES"),
        ("wgmma_wait<1>();", "wgmma_wait<2>();"),
        ("if (use > 0) mbarrier_wait_cluster", "if (false) mbarrier_wait_cluster"),
        ("mbarrier_wait(pipeline.empty(stage), phase);", "mbarrier_wait(pipeline.empty(stage), phase ^ 1);"),
        ("int i = service, at = 0", "int i = 0, at = 0"),
        ("base + 8 * service * STAGES", "base"),
        ("named_barrier_sync_unaligned(X_READY, 160 * CONSUMERS);\n        cluster_wait();", "cluster_wait();"),
        ("row + 16 * (p ^ r)", "row + 16 * p"),
        ("static_cast<unsigned>(m) >> 31", "1"),
        ("if (item.part == 0) sum", "sum"),
    ],
)
def test_the_simulation_sees_mistakes(change):
    problem = cases._check(32, 400, 800, "bf16")
    inputs = cases.inputs(problem, seed=1)
    config = resident.choose_config(32, 400, 800, "bf16", 1, cluster=2, groups=2, stages=2)

    def sound() -> bool:
        y = simulate(on_cpu(config, change), config, inputs, 0)
        return within_tolerance(y, problem, inputs, "nvfp4-w4a16")

    assert unless_stopped(sound) == (change == UNCHANGED)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sources_compile_without_spills_to_wgmma(dtype):
    (row,) = compile_cuda(resident.source(resident.choose_config(32, 17408, 5120, dtype)), 90)
    assert (row["status"], row["spill_bytes"], row["fits"]) == ("ok", 0, True), row
    assert "wgmma" in row["instruction"]


@pytest.mark.gpu
@pytest.mark.parametrize("problem", CHECKS + MEASURED, ids=lambda w: w.id)
def test_on_a_gpu_within_tolerance_and_the_same_twice(problem):
    skip_unless_hopper()
    inputs = cases.inputs(problem, seed=1, device="cuda")
    m, n, k, dtype = problem["M"], problem["N"], problem["K"], problem["dtype"]
    try:
        config = resident.choose_config(m, n, k, dtype)
    except ValueError as problem_with_it:
        pytest.skip(str(problem_with_it))
    clusters = hopper.most_clusters(resident.source(config), config, 0)
    config = resident.choose_config(m, n, k, dtype, clusters)
    w = tiles.tile_weights(inputs["w_packed"], inputs["w_scale"], inputs["x"].dtype)

    def launched() -> torch.Tensor:
        y = cases.outputs(problem, inputs)["y"]
        resident.launch(inputs | {"w": w}, y, config)
        return y

    right_every_time((launched() for _ in range(3)), problem, inputs)
