"""The one layout of the weights (row_tiles.py) and the kernels that read it, on a CPU and on a GPU.

line.py (wgmma_stream.cu by tensor maps) has its tests here; of ring_decode.cu what is different with this
layout, the rest is in its own tests. wgmma_gemm.cu knows no other: test_nvfp4_gemm_cuda.py.
"""

import functools
import shutil
import sys
from typing import Any

import pytest
import torch

from kernels.common import Tensors
from kernels.nvfp4 import cases, cuda_gemm, gemm_tiles, hopper, line, ring_config, row_tiles, tiles
from kernels.nvfp4.controls import cuda_one
from lab.check.aot_worker import compile_cuda
from tests.kernels.nvfp4 import test_nvfp4_decode_cpu as ring
from tests.kernels.nvfp4 import test_nvfp4_stream_cuda as streamed
from tests.kernels.on_cpu.nvfp4_on_cpu import library, right_every_time, simulated, skip_unless_hopper, within_tolerance
from tests.kernels.on_cpu.stand_in import UNCHANGED, Change, StandIn, needs_compiler, unless_stopped

EXACT = [w for w in cases.WORKLOADS if not cases.refuses(w, "nvfp4-w4a16")]
TAKEN = [w for w in EXACT if w["M"] <= max(line.TOKENS)]
ENTRY = """
struct Arguments {
  TensorMap x, w; const float* scale; unsigned short* y; float4* parts; int m, n, iters, each, more;
} given;
static void entry() {
  KERNEL(given.x, given.w, given.scale, given.y, given.parts, given.m, given.n, given.iters, given.each, given.more);
}
extern "C" void simulated(const void* x, const void* w, const void* scale, void* y, void* parts, int m, int n,
                          int iters, int each, int more, int k, int row_tiles, int k_tiles, int shared, int blocks,
                          int threads, int seed) {
  given = {{(unsigned char*)x, m, k, BLOCK_M / CLUSTER}, {(unsigned char*)w, row_tiles, 72 * k_tiles, WARPS, 144},
           (const float*)scale, (unsigned short*)y, (float4*)parts, m, n, iters, each, more};
  if (threads != THREADS) why_stopped = "other threads than the kernel's";
  else launch_on_cpu({{blocks, 1, 1}, THREADS, CLUSTER, blocks, (u32)shared, seed}, entry);
}
"""


def on_cpu(config: line.LineConfig, change: Change = UNCHANGED) -> StandIn:
    return library(line.source(config), ENTRY, change)


def simulate(kernel: StandIn, config: line.LineConfig, inputs: Tensors, seed: int) -> torch.Tensor:
    """y, NaN where the launch leaves sums behind; raises Stopped."""
    x, n = inputs["x"], inputs["w_packed"].shape[0] // (1 + config.gated)
    w = row_tiles.tile_weights(inputs["w_packed"], inputs["w_scale"], x.dtype)
    y = torch.full((x.shape[0], n), float("nan"), dtype=x.dtype)
    sums = line.workspace(config, x.device)["sums"]
    told = (*line.numbers(x.shape[0], n, x.shape[1], config), x.shape[1], *w.shape[:2], config.shared_bytes)
    blocks = config.workers * config.cluster
    simulated(kernel, (x, w, inputs["w_tensor_scale"], y, sums), (*told, blocks, config.threads, seed))
    return y if (sums == -1).all() else torch.full_like(y, float("nan"))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_row_tiles_are_the_gemms_side_by_side_along_k(dtype):
    inputs = cases.inputs(cases._check(1, 300, 208, dtype), seed=3)
    blocks = gemm_tiles.tile_weights(inputs["w_packed"], inputs["w_scale"], inputs["x"].dtype)
    tiled = row_tiles.tile_weights(inputs["w_packed"], inputs["w_scale"], inputs["x"].dtype)
    assert tuple(tiled.shape) == row_tiles.shape(300, 208) == (19, 4, tiles.TILE_BYTES)
    for row_tile in range(19):
        assert torch.equal(tiled[row_tile], blocks[row_tile // 8, :4, row_tile % 8])


def test_configurations_fit_and_share_all_iterations():
    for problem in TAKEN:
        m, n, k = problem["M"], problem["N"], problem["K"]
        config = line.choose_config(m, n, k, problem["dtype"])
        assert config.tokens >= m
        assert config.shared_bytes <= hopper.SHARED_BYTES
        assert config.workers * config.cluster <= 132
        iterations = line.iterations_of(n, k, config.rows)
        each, more = line.numbers(m, n, k, config)[-2:]
        assert each * config.workers + more == iterations
    assert str(line.choose_config(33, 17408, 5120, "bf16")) == "nvfp4_line_bf16_t48_g4_x1_s4 workers=132"
    assert str(line.choose_config(64, 17408, 5120, "bf16")) == "nvfp4_line_bf16_t64_g4_x2_s4 workers=66"
    assert str(line.choose_config(33, 1000, 4112, "bf16")) == "nvfp4_line_bf16_t48_g2_x1_s4 workers=132"


def test_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match=r"m=129\b.*\b128\b"):
        line.choose_config(129, 128, 128, "bf16")
    with pytest.raises(ValueError, match=r"k=72\b.*\b16\b"):
        line.choose_config(32, 128, 72, "bf16")
    for fixed in ({"stages": 3}, {"stages": 16}, {"groups": 4}):
        with pytest.raises(ValueError, match="power of two"):
            line.choose_config(128, 128, 128, "bf16", **fixed)
    problem = cases._check(20, 300, 528, "bf16")
    inputs, config = cases.inputs(problem), line.choose_config(20, 300, 528, "bf16")
    w = row_tiles.tile_weights(inputs["w_packed"], inputs["w_scale"], inputs["x"].dtype)
    args, y = inputs | {"w": w} | line.workspace(config, w.device), cases.outputs(problem, inputs)["y"]
    for wrong, told in (
        ({"x": args["x"].T}, "contiguous"),
        ({"w": w[1:]}, "prepare this pair"),
        ({"sums": args["sums"][1:]}, r"workspace\(\)"),
    ):
        with pytest.raises(ValueError, match=told):
            line.launch(args | wrong, y, config)
    with pytest.raises(ValueError, match=r"\(20, 528\).*\b16$"):
        line.launch(args, y, line.choose_config(16, 300, 528, "bf16"))


@needs_compiler
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "fixed"),
    [
        (33, 500, 1040, "bf16", {"workers": 5}),  # two to three CTAs a block, an odd number of tiles of k
        (64, 300, 528, "fp16", {"workers": 2, "cluster": 2}),
        (17, 201, 2064, "fp16", {"workers": 7}),  # seven of one block, y two bytes at a time
        (24, 520, 528, "bf16", {"workers": 1}),  # whole blocks, more iterations than stages
        (90, 700, 656, "bf16", {"workers": 3, "cluster": 2, "groups": 2}),  # x of half a cluster's rows past N
        (100, 264, 2096, "bf16", {"workers": 8}),
        (128, 160, 1040, "fp16", {"workers": 4, "cluster": 1}),
    ],
)
def test_the_kernel_runs_on_a_cpu(m, n, k, dtype, fixed):
    problem = cases._check(m, n, k, dtype)
    inputs = cases.inputs(problem, seed=1)
    inputs["w_scale"].view(-1)[::5] = 0
    config = line.choose_config(m, n, k, dtype, **fixed)
    kernel = on_cpu(config)
    right_every_time((simulate(kernel, config, inputs, seed) for seed in range(2)), problem, inputs)


@needs_compiler
@pytest.mark.parametrize(
    ("m", "f", "k", "dtype", "fixed"),
    [
        (32, 248, 1040, "bf16", {"workers": 5}),
        (33, 248, 1040, "bf16", {"workers": 5}),
        (64, 152, 528, "fp16", {"workers": 2, "cluster": 2}),
        (90, 352, 656, "bf16", {"workers": 3, "cluster": 2, "groups": 2}),
    ],
)
def test_a_gated_block_is_silu_of_its_gate_times_up(m, f, k, dtype, fixed):
    config = line.choose_config(m, 2 * f, k, dtype, gated=True, **fixed)
    assert streamed.gated_is_right(sys.modules[__name__], on_cpu(config), config, m, f, k)


MISTAKES = [
    ("wgmma_wait<1>();", "wgmma_wait<2>();"),
    ("if (c == 0 && (!NATURAL || at > 0)) release((at - 1) % STAGES);", "if (c == 0) release(at % STAGES);"),
    ("8 * (lane / 4)", "8 * (lane % 4)"),
    ("72 * K_BLOCKS * iter", "72 * iter"),
    ("WARPS * (CLUSTER * block + rank)", "WARPS * (CLUSTER * block)"),
    ("if (++iter == iters) iter = 0, block++;", "iter++;"),
    ("pipeline.init(1, WARPS * CLUSTER);", "pipeline.init(1, WARPS);"),
    ("rank * (BLOCK_M / 2), full", "0, full"),
    ("BLOCK_N * (CLUSTER * block + rank)", "BLOCK_N * CLUSTER * block"),
    ("2 * workers * PART_LANES * rank", "0"),
    ("warp * K_BLOCKS * TILE_BYTES", "warp * TILE_BYTES"),
]


@needs_compiler
@pytest.mark.parametrize("change", MISTAKES, ids=lambda c: c[0][:40])
def test_the_simulation_sees_mistakes(change):
    problem = cases._check(64, 500, 1040, "bf16")
    inputs = cases.inputs(problem, seed=1)
    config = line.choose_config(64, 500, 1040, "bf16", workers=3, cluster=2, groups=2)

    def sound() -> bool:
        return within_tolerance(simulate(on_cpu(config, change), config, inputs, 0), problem, inputs, "nvfp4-w4a16")

    assert not unless_stopped(sound)


def ring_is_right(m: int, n: int, k: int, dtype: str, sms: int, change: Change = UNCHANGED, **fixed: Any) -> bool:
    config = ring_config.choose_ring(m, n, k, dtype, sms, natural=True, **fixed)
    x, _, scale, wanted, limit = ring.given(cases._check(m, n, k, dtype))
    inputs = cases.inputs(cases._check(m, n, k, dtype), seed=1)
    inputs["w_scale"].view(-1)[::5] = 0
    w = row_tiles.tile_weights(inputs["w_packed"], inputs["w_scale"], x.dtype)
    return ring.right(ring.on_cpu(config, change), config, (x, w, scale, wanted, limit), 2)


@needs_compiler
def test_the_ring_deals_x_in_the_order_of_row_tiles_on_a_cpu():
    assert ring_is_right(8, 500, 1040, "bf16", 4, cluster=2, warps=6, stage_tiles=2)
    assert ring_is_right(13, 600, 1040, "fp16", 4, cluster=2, warps=2, stage_tiles=3)
    for change in (("t & mask", "!(t & mask)"), ("TILE_CODE_BYTES + 8 * g", "TILE_CODE_BYTES + 8 * t")):
        assert not unless_stopped(functools.partial(ring_is_right, 8, 500, 1040, "bf16", 4, change, cluster=2, warps=6))


def test_one_layout_serves_every_number_of_tokens():
    for problem in EXACT:
        m, n, k = problem["M"], problem["N"], problem["K"]
        config = cuda_one.choose(m, n, k, problem["dtype"])
        natural = isinstance(config, (line.LineConfig, cuda_gemm.GemmConfig))
        natural = natural or getattr(config, "natural", getattr(config, "row_tiles", False))
        assert natural, f"{problem.id}: {config}"
        if m <= ring_config.M_MAX // 4 or m > cuda_gemm.LINE_TOKENS:
            assert type(config) is (ring_config.RingConfig if m <= 8 else cuda_gemm.GemmConfig)
        meta = {"x": torch.empty(m, k, dtype=cases.DTYPES[problem["dtype"]], device="meta")}
        if problem.role == "check":
            made = cuda_one.prepare(cases.inputs(problem) | meta)
            assert tuple(made["w"].shape) == row_tiles.shape(n, k)
    chosen = {m: str(cuda_one.choose(m, 5120, 6144, "bf16")) for m in (8, 16, 24, 32, 64, 96, 128, 512)}
    kinds = ["ring", "ring", "ring", "line", "line", "line", "gemm", "gemm"]
    assert [config.split("_")[1] for config in chosen.values()] == kinds, chosen
    assert "split_rows" in str(cuda_one.choose(64, 4096, 2048, "bf16"))


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    [
        (16, 17408, 5120, "bf16"),
        (32, 17408, 5120, "fp16"),
        (32, 5120, 6144, "bf16"),
        (32, 5120, 6144, "fp16"),
    ],
)
def test_sources_compile_without_spills_to_wgmma(m, n, k, dtype):
    (row,) = compile_cuda(cuda_one.source(cuda_one.choose(m, n, k, dtype)), 90)
    assert (row["status"], row["spill_bytes"], row["fits"]) == ("ok", 0, True), row
    assert "wgmma" in row["instruction"]


@pytest.mark.gpu
@pytest.mark.parametrize("problem", [w for w in TAKEN if w["M"] >= 9], ids=lambda w: w.id)
def test_on_a_gpu_within_tolerance_and_the_same_twice(problem):
    skip_unless_hopper()
    inputs = cases.inputs(problem, seed=1, device="cuda")
    m, n, k, dtype = problem["M"], problem["N"], problem["K"], problem["dtype"]
    for cluster in (1, 2):
        choose = functools.partial(line.choose_config, m, n, k, dtype, hopper.multiprocessors(0))
        config = choose(cluster=cluster)
        w = row_tiles.tile_weights(inputs["w_packed"], inputs["w_scale"], inputs["x"].dtype)
        args = inputs | {"w": w} | line.workspace(config, w.device)

        def launched(args: Tensors, config: line.LineConfig) -> torch.Tensor:
            y = cases.outputs(problem, inputs)["y"]
            line.launch(args, y, config)
            assert (args["sums"] == -1).all()
            return y

        right_every_time((launched(args, config) for _ in range(3)), problem, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem", [w for w in cases.WORKLOADS if not cases.refuses(w, "nvfp4-w4a16")], ids=lambda w: w.id
)
def test_one_copy_is_right_on_a_gpu(problem):
    skip_unless_hopper()
    inputs = cases.inputs(problem, seed=1, device="cuda")
    args = cuda_one.prepare(inputs)

    def launched() -> torch.Tensor:
        out = cases.outputs(problem, inputs)
        cuda_one.run(args, out)
        return out["y"]

    right_every_time((launched() for _ in range(2)), problem, inputs)
