"""kernels/nvfp4/cuda_gemm.py: the weight tiles, the configuration and the whole kernel on a CPU; the kernel on a GPU.

On a CPU wgmma_gemm.cu runs as it is, on_cpu/sm90.cuh in place of its PTX: pipelines, clusters, stream-K, swizzles
and fragments are the kernel's own, timing is not. tests/kernels/nvfp4/test_nvfp4_stream_cuda.py and
test_nvfp4_resident_cuda.py do the same for the kernels of few tokens, test_nvfp4_one_cuda.py for line.py.
"""

import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.common import Tensors, Workload
from kernels.nvfp4 import cases, cuda_gemm, gated, gemm_tiles, line, ops, resident, row_tiles, stream, tiles
from kernels.nvfp4.reference import reference, weights
from lab.check import families
from lab.check.aot_worker import compile_cuda
from tests.kernels.on_cpu.nvfp4_on_cpu import library, right_every_time, simulated, skip_unless_hopper, within_tolerance
from tests.kernels.on_cpu.stand_in import Change, StandIn, needs_compiler, unless_stopped

TAKEN = [w for w in cases.WORKLOADS if not (cuda_gemm._refuses(w) or cases.refuses(w, "nvfp4-w4a16"))]
CHECKS = [w for w in TAKEN if w.role == "check"]
MEASURED = [w for w in TAKEN if w.role == "measure"]
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"cluster": 1}, {"waves": 0}, {"waves": 1, "tokens": 128})
START = "    if (threadIdx.x == 128 * CONSUMERS) {\n"
LATE = (
    START,
    "    for (int i = 0; i < 600 * int(cluster_rank()); i++) others();\n" + START,
)  # the second CTA of a cluster
ENTRY = """
struct Arguments {
  TensorMap map, y_map, w; const float* scale; unsigned short* y; float* parts; unsigned* flags;
  int m, n, iters, n_tiles, m_tiles, waves;
} given;
static void entry() {
  KERNEL(given.map, given.y_map, given.w, given.scale, given.y, given.parts, given.flags, given.m, given.n, given.iters,
         given.n_tiles, given.m_tiles, given.waves);
}
extern "C" int shared_bytes() { return SHARED_BYTES; }
extern "C" int part_floats() { return SPLIT_K ? 0 : 2 * PART_FLOATS; }
extern "C" void simulated(const void* x, const void* w, const void* scale, void* y, void* parts, void* flags, int m,
                          int n, int k, int row_tiles, int k_tiles, int iters, int n_tiles, int m_tiles, int waves,
                          int blocks, int seed) {
  given = {{(unsigned char*)x, m, k, BLOCK_M / CLUSTER}, {(unsigned char*)y, m, n, BLOCK_M, 0, GATED ? 64 : 128},
           {(unsigned char*)w, row_tiles, 72 * k_tiles, 8, 72}, (const float*)scale, (unsigned short*)y, (float*)parts,
           (unsigned*)flags, m, n, iters, n_tiles, m_tiles, waves};
  launch_on_cpu({{blocks, 1, 1}, THREADS, CLUSTER << SPLIT_K, 1, SHARED_BYTES, seed}, entry);
}
"""


def on_cpu(config: cuda_gemm.GemmConfig, *changes: Change) -> StandIn:
    return library(cuda_gemm.source(config), ENTRY, *changes)


def tiled(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What prepare() makes where wgmma_gemm.cu is chosen, for any shape, but for the workspace."""
    tiled = row_tiles.tile_weights(inputs["w_packed"], inputs["w_scale"], inputs["x"].dtype)
    return {"x": inputs["x"], "w": tiled, "w_tensor_scale": inputs["w_tensor_scale"]}


def simulate(kernel: StandIn, config: cuda_gemm.GemmConfig, inputs: Tensors, seed: int) -> tuple[torch.Tensor, int]:
    """(y, flags left up); raises Stopped."""
    x, n = inputs["x"], inputs["w_packed"].shape[0]
    args, out = tiled(inputs), n // (1 + config.gated)
    parts = torch.full((config.grid, kernel.part_floats()), float("nan"))
    flags = torch.zeros(config.grid, 2, dtype=torch.int32)
    y = torch.full((x.shape[0], out), float("nan"), dtype=x.dtype)
    depth = gemm_tiles.k_blocks_of(x.shape[1]) // cuda_gemm.ITERATION_K_BLOCKS
    tile_counts = -(-n // config.rows), -(-x.shape[0] // config.tokens)
    tensors = (x, args["w"], args["w_tensor_scale"], y, parts, flags)
    numbers = (x.shape[0], out, x.shape[1], *args["w"].shape[:2], depth, *tile_counts, config.waves, config.grid, seed)
    simulated(kernel, tensors, numbers)
    return y, int(flags.sum())


@pytest.mark.parametrize("problem", CHECKS, ids=lambda w: w.id)
def test_tiles_hold_the_weights_where_the_fragments_want_them(problem):
    inputs = cases.inputs(problem, seed=3)
    inputs["w_scale"].view(-1)[::5] = 0
    inputs["w_scale"].view(-1)[1::7] = 3  # subnormal
    dtype = cases.DTYPES[problem["dtype"]]
    tiled = gemm_tiles.tile_weights(inputs["w_packed"], inputs["w_scale"], dtype)
    codes, scales = tiled.split((tiles.CODE_BYTES, 64), dim=-1)
    words = (codes.contiguous().view(torch.int32).to(torch.int64) & tiles.WORD).unflatten(-1, (8, 4, 2, 2))
    decode = tiles.decode16_bf16 if problem["dtype"] == "bf16" else tiles.decode16_fp16
    pairs = torch.stack(decode(words[..., 0], words[..., 1]), dim=-1)
    halves = torch.stack((pairs & 0xFFFF, pairs >> 16), dim=-1).flatten(-2).to(torch.uint16).view(dtype).double()
    turn = 4 if problem["dtype"] == "bf16" else 7
    word = scales.contiguous().view(torch.int32).to(torch.int64).unflatten(-1, (8, 2)) & tiles.WORD
    word = word >> turn | word << (32 - turn)
    byte = torch.stack([word >> 8 * place & 255 for place in (0, 2, 1, 3)], dim=-1).to(torch.int32)
    scale = torch.ldexp(1 + (byte & 7) / 8.0, (byte >> 3) - tiles.SCALE_BIAS).double()
    n, k = problem["N"], problem["K"]
    wanted = torch.zeros(tiled.shape[0] * 128, tiled.shape[1] * 64, dtype=torch.float64)
    wanted[:n, :k] = weights(inputs) / inputs["w_tensor_scale"].double()
    exponent = 126 if problem["dtype"] == "bf16" else 14
    for row_tile, g, t, half, j, part, pair in ((0, 0, 0, 0, 0, 0, 0), (7, 7, 3, 1, 3, 1, 1), (2, 5, 1, 0, 2, 1, 0)):
        value = (
            halves[:, :, row_tile, g, t, half, 4 * j + 2 * part + pair]
            * 2.0**exponent
            * scale[:, :, row_tile, g, half, j]
        )
        row, column = 16 * row_tile + 8 * half + g, 16 * j + 8 * part + 2 * t + pair
        assert torch.equal(value, wanted[row::128, column::64])


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("problem", CHECKS + MEASURED, ids=lambda w: w.id)
def test_configurations_fit_and_share_the_work(problem, variant):
    config = cuda_gemm.choose_config(problem["M"], problem["N"], problem["K"], problem["dtype"], **variant)
    assert config.shared_bytes <= cuda_gemm.SHARED_BYTES
    assert config.grid <= cuda_gemm.SMS
    assert config.grid % config.cluster == 0
    assert config.stages >= 3
    assert gemm_tiles.k_blocks_of(problem["K"]) % (2 * cuda_gemm.ITERATION_K_BLOCKS) == 0  # iterations halve


@pytest.mark.parametrize(
    ("m", "n", "k", "tokens", "cluster", "waves", "grid"),
    [
        (512, 4096, 2048, 128, 1, 1, 128),  # 128 tiles: nothing is shared
        (512, 5120, 6144, 176, 1, 1, 120),
        (512, 5120, 17408, 256, 2, 0, 132),
        (2048, 4096, 2048, 256, 2, 2, 132),
        (2048, 5120, 6144, 256, 2, 2, 132),  # 2.42 tiles a worker
        (2048, 17408, 5120, 256, 2, 7, 132),  # 8.24 tiles a worker: shares of 0.24 would mean five workers a tile
        (128, 17408, 5120, 128, 2, 0, 132),  # 1.03
        (128, 5120, 6144, 128, 1, 0, 132),  # 40 tiles, each cut in k: no clusters
        (64, 4096, 2048, 64, 1, 0, 64),  # split
        (128, 4096, 2048, 64, 1, 0, 128),  # split
    ],
)
def test_tile_cluster_and_whole_tiles_follow_from_the_shape(m, n, k, tokens, cluster, waves, grid):
    config = cuda_gemm.choose_config(m, n, k, "bf16")
    assert (config.tokens, config.cluster, config.waves, config.grid) == (tokens, cluster, waves, grid)
    assert config.split_k == (m <= 128 and k == 2048)


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (9, 5120, 17408, stream.StreamConfig),
        (24, 17408, 5120, stream.StreamConfig),
        (25, 17408, 5120, line.LineConfig),
        (33, 17408, 5120, line.LineConfig),
        (33, 1000, 4112, line.LineConfig),
        (96, 5120, 17408, line.LineConfig),
        (97, 5120, 17408, cuda_gemm.GemmConfig),
        (33, 4096, 2048, cuda_gemm.GemmConfig),
        (9, 5120, 6144, resident.ResidentConfig),
        (32, 5120, 5120, resident.ResidentConfig),
        (16, 5120, 4096, cuda_gemm.GemmConfig),
        (16, 256, 65536, cuda_gemm.GemmConfig),  # x does not fit in shared memory
    ],
)
def test_few_tokens_get_kernels_of_their_own_where_these_pay_and_fit(m, n, k, config):
    assert isinstance(cuda_gemm.choose(m, n, k, "bf16"), config)
    assert not cuda_gemm._refuses(Workload("any", {"M": m, "N": n, "K": k, "dtype": "bf16"}))


def test_one_scratch_fits_every_launch_of_a_layout_and_two_kernels_share_none():
    """line.py leaves its sums all ones, wgmma_gemm.cu leaves its own as they are."""
    cpu, meta = torch.device("cpu"), torch.device("meta")
    for problem in CHECKS + MEASURED:
        config = cuda_gemm.choose(problem["M"], problem["N"], problem["K"], problem["dtype"])
        most = cuda_gemm.most_workspace(cuda_gemm.layout_of(config), cpu)
        asked: Tensors = {}
        if isinstance(config, line.LineConfig):
            asked = line.workspace(config, meta)
        elif isinstance(config, stream.StreamConfig):
            asked = stream.workspace(config, meta)
        elif isinstance(config, cuda_gemm.GemmConfig):
            asked = cuda_gemm.workspace(config, meta)
        for name, tensor in asked.items():
            assert most[name].dtype == tensor.dtype, name
            assert most[name].numel() >= tensor.numel(), problem.id
    shared = cuda_gemm.most_workspace("row_tiles", cpu)
    assert set(shared) == {"sums", "parts", "flags"}
    assert (shared["sums"] == -1).all()
    assert not shared["flags"].any()
    assert set(shared) <= set(ops.SCRATCH)


def test_refuses_what_it_cannot_do():
    assert "cuda_decode" in cuda_gemm._refuses(next(w for w in cases.WORKLOADS if w["M"] == 8))
    with pytest.raises(ValueError, match=r"k=72\b.*\b16\b"):
        cuda_gemm.choose_config(128, 128, 72, "bf16")
    with pytest.raises(ValueError, match="split_k"):
        cuda_gemm.choose_config(256, 4096, 2048, "bf16", tokens=64, split_k=True)
    problem = CHECKS[0]
    inputs = cases.inputs(problem)
    args, y = tiled(inputs), cases.outputs(problem, inputs)["y"]
    config = cuda_gemm.choose_config(problem["M"], problem["N"], problem["K"], problem["dtype"])
    with pytest.raises(ValueError, match="contiguous"):
        cuda_gemm.launch(args | {"x": args["x"].T}, y, config)
    with pytest.raises(ValueError, match="prepare this pair"):
        cuda_gemm.launch(args, y[1:], config)
    few = replace(config, grid=config.grid - 1)
    with pytest.raises(ValueError, match="workspace"):
        cuda_gemm.launch(args | cuda_gemm.workspace(few, y.device), y, config)
    both, half = replace(config, gated=True), y[:, : y.shape[1] // 2].contiguous()
    with pytest.raises(ValueError, match="prepare this pair"):
        cuda_gemm.launch(args, y, both)
    with pytest.raises(ValueError, match="workspace"):  # of half as many columns it is the pair
        cuda_gemm.launch(args | cuda_gemm.workspace(replace(both, grid=0), y.device), half, both)


@needs_compiler
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "sms", "variant"),
    [
        (130, 300, 1040, "bf16", 4, {"tokens": 128, "cluster": 1, "stages": 3, "waves": 1}),
        (130, 600, 528, "fp16", 10, {"tokens": 128, "waves": 0}),
        (250, 704, 272, "bf16", 4, {"tokens": 256, "cluster": 1, "waves": 1}),
        (63, 300, 1040, "bf16", 8, {"tokens": 64, "waves": 0}),
        (63, 600, 272, "bf16", 4, {"tokens": 64, "cluster": 2, "waves": 1}),
        (31, 500, 528, "fp16", 8, {"waves": 0}),
        (9, 300, 272, "bf16", 4, {}),
        (300, 304, 272, "bf16", 4, {"tokens": 176, "waves": 0}),
        (200, 200, 272, "fp16", 4, {"tokens": 176, "cluster": 1, "waves": 1}),
        (90, 304, 1024, "bf16", 12, {"tokens": 64, "stages": 4, "split_k": True}),
        (63, 300, 240, "fp16", 6, {"split_k": True}),
        (130, 136, 512, "bf16", 8, {"tokens": 128, "split_k": True}),
    ],
)
def test_the_kernel_runs_on_a_cpu(m, n, k, dtype, sms, variant):
    problem = cases._check(m, n, k, dtype)
    inputs = cases.inputs(problem, seed=1)
    inputs["w_scale"].view(-1)[::5] = 0
    config = cuda_gemm.choose_config(m, n, k, dtype, sms, **variant)
    kernel = on_cpu(config)
    assert kernel.shared_bytes() == config.shared_bytes
    assert kernel.part_floats() == config.part_floats

    def simulated_with(seed: int) -> torch.Tensor:
        y, flags = simulate(kernel, config, inputs, seed)
        assert flags == 0
        return y

    right_every_time(map(simulated_with, range(2 if m < 128 else 1)), problem, inputs)


def gated_is_right(m: int, f: int, k: int, dtype: str, sms: int, variant: dict[str, Any], *changes: Change) -> bool:
    """Gate is the first f rows of the problem's weights, up the others."""
    inputs = cases.inputs(cases._check(m, 2 * f, k, dtype), seed=1)
    gate, up = reference(inputs)["y"].double().split(f, dim=1)
    config = cuda_gemm.choose_config(m, 2 * f, k, dtype, sms, gated=True, **variant)
    for name in ("w_packed", "w_scale"):
        inputs[name] = gated.alternating(inputs[name][:f], inputs[name][f:])
    y, flags = simulate(on_cpu(config, *changes), config, inputs, 0)
    wanted = torch.nn.functional.silu(gate) * up
    return flags == 0 and near(y, wanted)


def near(y: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within two roundings of 16 bits; NaN is not."""
    off = (y.double() - wanted).norm() / wanted.norm()
    return bool(off < (2e-3 if y.dtype == torch.bfloat16 else 3e-4))


GATED: tuple[tuple[int, int, int, str, int, dict[str, Any]], ...] = (
    (130, 152, 1040, "bf16", 4, {"tokens": 128, "cluster": 1, "stages": 3, "waves": 1}),
    (250, 352, 272, "bf16", 4, {"tokens": 256, "cluster": 1, "waves": 1}),
    (130, 304, 528, "fp16", 10, {"tokens": 128, "waves": 0}),
    (63, 304, 272, "bf16", 4, {"tokens": 64, "cluster": 2, "waves": 1}),
    (300, 152, 272, "bf16", 4, {"tokens": 176, "waves": 0}),
    (200, 104, 272, "fp16", 4, {"tokens": 176, "cluster": 1, "waves": 1}),
    (60, 64, 256, "bf16", 4, {"split_k": True}),
)


@needs_compiler
@pytest.mark.parametrize(("m", "f", "k", "dtype", "sms", "variant"), GATED)
def test_a_gated_tile_is_silu_of_its_gate_times_up(m, f, k, dtype, sms, variant):
    assert gated_is_right(m, f, k, dtype, sms, variant)


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("16 * (warp ^ lane / 2 % 4)", "16 * (warp ^ lane % 4)"),
        ("row_of(work.tile) / (1 + GATED)", "row_of(work.tile)"),
        ("v[4 * p + 1] * scale, v[4 * p + 3]", "v[4 * p + 1] * scale, v[4 * p + 2]"),
        ("min(at, BLOCK_M - TOKENS)", "at - at % 64"),
        ("i * 2 * OUT_ROWS", "i * OUT_ROWS"),
    ],
)
def test_the_simulation_sees_mistakes_in_a_gated_tile(change):
    assert not unless_stopped(lambda: gated_is_right(300, 152, 272, "bf16", 4, {"tokens": 176, "waves": 0}, change))


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("wgmma_wait<1>();", "wgmma_wait<2>();"),
        ("if (before >= 0) release(before);", "release(stage);"),
        ("named_barrier_arrive(PARTIAL_STORED + group, 128 + 32);", ""),
        ("begin(worker + 1 + count) < tile_end", "begin(worker + 1 + count) < 0"),
        ("x + 2 * j", "x + 4 * j"),
        ("rotate_right(scales.y, 8)", "rotate_right(scales.y, 16)"),
        ("if (thread == 0) tma_store_wait_read<0>();  // the tile before", ""),
        ("16 * ((2 * warp + lane / 8 % 2) ^ lane % 8)", "16 * (2 * warp + lane / 8 % 2)"),
        ("TILE_BYTES / 8 * k", "TILE_BYTES / 8 * (k + 1)"),
        ("row_of(work.tile) / 16", "0"),
    ],
)
def test_the_simulation_sees_mistakes(change):
    problem = cases._check(130, 304, 512, "bf16")
    inputs = cases.inputs(problem, seed=1)
    config = cuda_gemm.choose_config(130, 304, 512, "bf16", 4, tokens=128, cluster=1, stages=3, waves=0)

    def sound() -> bool:
        y, _ = simulate(on_cpu(config, change), config, inputs, 0)
        return within_tolerance(y, problem, inputs, "nvfp4-w4a16")

    assert not unless_stopped(sound)


@needs_compiler
@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (("", ""), False),
        (("cluster_wait();  // the other CTA's barrier is made", ""), True),
        (("mbarrier_wait_cluster(base + PEER_SUMS, 0);", ""), True),
        (("there + 512 * i", "there + 256 * i"), True),
        (("(at - base) + 512 * i", "(at - base)"), True),
    ],
)
def test_the_simulation_sees_mistakes_in_a_split_tile(change, wrong):
    problem = cases._check(60, 136, 256, "bf16")
    config = cuda_gemm.choose_config(60, 136, 256, "bf16", 4, split_k=True)
    inputs = cases.inputs(problem, seed=1)

    def sound() -> bool:
        y, _ = simulate(on_cpu(config, LATE, change), config, inputs, 0)
        return within_tolerance(y, problem, inputs, "nvfp4-w4a16")

    assert unless_stopped(sound) != wrong


@pytest.mark.parametrize(
    ("m", "n", "k", "kernel"),
    [(24, 17408, 5120, stream), (32, 5120, 6144, resident), (64, 17408, 5120, line), (128, 17408, 5120, cuda_gemm)],
)
def test_every_kernel_of_a_chained_product_is_launched_programmatically(m, n, k, kernel, monkeypatch):
    seen = []
    for module in (cuda_gemm, line, resident, stream):
        monkeypatch.setattr(
            module, "launch", lambda args, y, config, programmatic=False, own=module: seen.append((own, programmatic))
        )
    both = {candidate.name: candidate for candidate in cuda_gemm.CANDIDATES}
    args, out = {"x": torch.empty(m, k, dtype=torch.bfloat16)}, {"y": torch.empty(m, n, dtype=torch.bfloat16)}
    for name in ("cuda_gemm", "cuda_gemm_chained"):
        both[name].run(args, out)
    assert seen == [(kernel, False), (kernel, True)]
    assert both["cuda_gemm_chained"].no_route


def test_a_gated_product_refuses_another_number_of_tokens_form():
    parts = {"packed": torch.zeros(8, 16, dtype=torch.uint8), "scale": torch.zeros(8, 2, dtype=torch.uint8)}
    gate = parts | {"tensor_scale": torch.ones(1)}
    for tokens, form in ((8, "cuda_gemm_chained"), (9, "cuda_decode_chained")):
        with pytest.raises(ValueError, match=f"{form}' with {tokens} tokens: pass one of"):
            gated.Gated(gate, gate, form=form, tokens=tokens)
    for tokens, form in ((8, "cuda_decode_chained"), (9, "cuda_gemm_chained")):
        assert gated.Gated(gate, gate, form=form, tokens=tokens).form == form


def test_a_gated_product_has_the_kernel_and_layout_of_its_number_of_tokens():
    found = [str(gated.many(m, 2 * 17408, 5120, "bf16", 132)).split("_t")[0] for m in (9, 24, 25, 96, 97, 2048)]
    assert found == ["nvfp4_stream_bf16"] * 2 + ["nvfp4_line_bf16"] * 2 + ["nvfp4_gemm_bf16"] * 2
    parts = {"packed": torch.zeros(8, 2560, dtype=torch.uint8), "scale": torch.zeros(8, 320, dtype=torch.uint8)}
    gate = parts | {"tensor_scale": torch.ones(1)}
    layouts = [gated.Gated(gate, gate, tokens=m).layout for m in (8, 9, 24, 25, 128)]
    assert layouts == ["tiles", "tiles", "tiles", "row_tiles", "row_tiles"]
    sources = [cuda_gemm.source(gated.many(m, 2 * 17408, 5120, "bf16", 132)) for m in (24, 32, 64, 128)]
    assert all("-DGATED=1" in source.options for source in sources)


def test_a_chain_takes_the_chosen_kernels_own_form(monkeypatch):
    """cuda_decode is chosen for short K up to 32 tokens; a candidate without such a form stays."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    there = dict.fromkeys(families.load("nvfp4").candidates)  # here, without the packages that some of them need
    monkeypatch.setattr(ops.operators, "candidates", lambda family, capability: there)
    names = "cuda_decode", "cuda_gemm", "cuda_gemv"
    found = [ops.in_chain(name, torch.device("cuda", 0)) for name in names]
    assert found == ["cuda_decode_chained", "cuda_gemm_chained", "cuda_gemv"]
    chosen = iter(("cuda_gemv", "cuda_decode"))
    monkeypatch.setattr(ops.operators, "choose", lambda *given, **axes: SimpleNamespace(name=next(chosen)))
    made = ops.segments.__wrapped__(4096, 2048, torch.bfloat16, torch.device("cuda", 0), (9, 10), "", True)
    assert [name for _, name, _ in made] == ["cuda_gemv", "cuda_decode_chained"]


@pytest.mark.gpu
@pytest.mark.parametrize("m", [16, 32, 64, 128, 512])
def test_chained_products_have_the_bits_of_those_that_wait(m):
    """Each reads what the one ahead of it wrote, out of one workspace, and its result is written over at once."""
    skip_unless_hopper()
    first, second = (cases.inputs(cases._check(m, *nk, "bf16"), seed=1, device="cuda")
                     for nk in ((17408, 5120), (5120, 17408)))  # fmt: skip
    found = []
    for chained in (False, True):
        up, down = (ops.Linear(*(given[name] for name in ("w_packed", "w_scale", "w_tensor_scale")), tokens=(m, m),
                               chained=chained) for given in (first, second))  # fmt: skip
        assert [part[1].split()[0].endswith("_chained") for part in (*up.parts, *down.parts)] == [chained, chained]
        x = first["x"]
        for _ in range(20):
            y = down(up(x))
            x = (y.float() / y.float().std()).to(x.dtype)
        found.append(x)
    assert torch.equal(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["", "cuda_gemm_chained"])
@pytest.mark.parametrize(
    ("m", "f", "k"),
    [(16, 17408, 5120), (32, 17408, 5120), (64, 17408, 5120), (97, 352, 1040), (128, 17408, 5120), (512, 17408, 5120),
     (700, 3000, 2064)],
)  # fmt: skip
def test_gated_products_of_many_tokens_on_a_gpu(m, f, k, form):
    skip_unless_hopper()
    inputs = cases.inputs(cases._check(m, 2 * f, k, "bf16"), seed=1, device="cuda")
    parts = {"packed": inputs["w_packed"], "scale": inputs["w_scale"]}
    gate, up = ({n: t[at : at + f] for n, t in parts.items()} | {"tensor_scale": inputs["w_tensor_scale"]}
                for at in (0, f))  # fmt: skip
    layer, x = gated.Gated(gate, up, tokens=m, form=form), inputs["x"]
    y = [layer(x) for _ in range(3)]
    both = (x.double() @ weights(inputs).T).split(f, dim=1)
    assert near(y[0], torch.nn.functional.silu(both[0]) * both[1])
    assert all(torch.equal(y[0], again) for again in y)


WITH_GATE = [  # gate and up of Qwen3.6-27B
    cuda_gemm.source(gated.many(m, 2 * 17408, 5120, "bf16", 132)) for m in (24, 32, 48, 64, 96, 128, 2048)
]


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("source", [*cuda_gemm.CUDA_SOURCES, *WITH_GATE], ids=lambda s: s.kernels[0])
def test_sources_compile_without_spills_to_wgmma(source):
    (row,) = compile_cuda(source, 90)
    assert (row["status"], row["spill_bytes"], row["fits"]) == ("ok", 0, True), row
    assert "wgmma" in row["instruction"]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("problem", CHECKS + MEASURED, ids=lambda w: w.id)
def test_on_a_gpu_within_tolerance_and_the_same_twice(problem, variant):
    skip_unless_hopper()
    inputs = cases.inputs(problem, seed=1, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    config = cuda_gemm.choose_config(problem["M"], problem["N"], problem["K"], problem["dtype"], sms, **variant)
    args = tiled(inputs) | cuda_gemm.workspace(config, inputs["x"].device)

    def launched() -> torch.Tensor:
        y = cases.outputs(problem, inputs)["y"]
        cuda_gemm.launch(args, y, config)
        return y

    right_every_time((launched() for _ in range(3)), problem, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [33, 128])
@pytest.mark.parametrize("programmatic", [False, True])
def test_split_tiles_are_right_on_a_gpu_every_time(m, programmatic):
    skip_unless_hopper()
    problem = cases._check(m, 4096, 2048, "bf16")
    inputs = cases.inputs(problem, seed=1, device="cuda")
    config = cuda_gemm.choose_config(m, 4096, 2048, "bf16")
    assert config.split_k
    args, y = tiled(inputs) | cuda_gemm.workspace(config, inputs["x"].device), cases.outputs(problem, inputs)["y"]
    first = None
    for _ in range(100):
        y.fill_(float("nan"))
        cuda_gemm.launch(args, y, config, programmatic)
        first = y.clone() if first is None else first
        assert torch.equal(first, y)
    assert within_tolerance(y, problem, inputs, "nvfp4-w4a16")
