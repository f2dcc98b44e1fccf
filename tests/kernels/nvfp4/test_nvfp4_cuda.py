"""kernels/nvfp4 in CUDA: the weight tiles, the configuration and the fragments on a CPU; the kernels on a GPU.

The fragments are put together as the PTX ISA's tables for mma.m16n8k16 say, by code that shares nothing with the kernel
but the decoding, and that is compared with operand.cuh itself where there is a C++ compiler.
"""

import ctypes
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.nvfp4 import cases, cuda_decode, hopper, ring_config, tiles
from kernels.nvfp4 import format as fmt
from kernels.nvfp4.reference import reference, weights
from lab.check.accuracy import compare
from lab.check.aot_worker import compile_cuda
from tests.kernels.on_cpu import stand_in
from tests.kernels.on_cpu.nvfp4_on_cpu import skip_unless_hopper

TAKEN = [w for w in cases.WORKLOADS if not (cases.refuses(w, "nvfp4-w4a16") or cuda_decode._refuses(w))]
CHECKS = [w for w in TAKEN if w.role == "check"]
MEASURED = [w for w in TAKEN if w.role == "measure"]
OPERAND_TO_VALUE = 2.0**7
SCALE_EXPONENT = {"bf16": 119, "fp16": 7}
RINGS: tuple[dict[str, Any], ...] = (
    {},
    {"cluster": 1},
    {"cluster": 2, "warps": 8},
    {"cluster": 4, "warps": 12},
    {"reducers": 1},
    {"warps": 16},
    {"stage_tiles": 2, "stages": 7},
    {"stage_tiles": 3, "sum_stages": 4},
    {"stages": 1, "sum_stages": 1},
    {"evict_first": False, "pdl": True},
    {"warps": 14, "stage_tiles": 2},
)


def operands(words: torch.Tensor, scale: torch.Tensor, dtype: str) -> torch.Tensor:
    """float64 [..., 16] of value * 2^-7: words int64 [..., 2] of one row of a lane, its scale byte [...]."""
    decode = tiles.decode16_bf16 if dtype == "bf16" else tiles.decode16_fp16
    pairs = torch.stack(decode(words[..., 0], words[..., 1]), dim=-1)
    halves = torch.stack((pairs & 0xFFFF, pairs >> 16), dim=-1).flatten(-2)
    value = halves.to(torch.uint16).view(cases.DTYPES[dtype])
    factor = torch.ldexp(1 + (scale & 7) / 8.0, (scale >> 3) - 22 + SCALE_EXPONENT[dtype]).to(cases.DTYPES[dtype])
    return (value * factor[..., None]).double()


def lane_words(tiled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [row tiles, k tiles, 32, 2, 2] words by lane, row half and word, and [row tiles, k tiles, 32, 2] scales."""
    codes, scales = tiled.split((tiles.CODE_BYTES, tiles.TILE_BYTES - tiles.CODE_BYTES), dim=-1)
    words = codes.contiguous().view(torch.int32).to(torch.int64) & tiles.WORD
    return words.unflatten(-1, (32, 2, 2)), scales.unflatten(-1, (32, 2)).to(torch.int64)


def product(inputs: dict[str, torch.Tensor], dtype: str) -> torch.Tensor:
    """float64 y from the tiles, through A and B fragments: lane 4 g + t, register r, half h."""
    tiled = tiles.tile_weights(inputs["w_packed"], inputs["w_scale"], cases.DTYPES[dtype])
    words, scales = lane_words(tiled)
    held = operands(words, scales, dtype)  # [row tile, k_tile, lane, row half, 16]
    row_tiles, k_tiles = tiled.shape[:2]
    (m, k), n = inputs["x"].shape, inputs["w_packed"].shape[0]
    x = torch.zeros(-(-m // 8) * 8, k_tiles * 64, dtype=torch.float64)
    x[:m, :k] = inputs["x"].double()
    y = torch.zeros(x.shape[0], row_tiles * 16, dtype=torch.float64)
    g, t = torch.arange(32) // 4, torch.arange(32) % 4
    for k_tile in range(k_tiles):
        for j in range(4):
            a = torch.zeros(row_tiles, 16, 16, dtype=torch.float64)
            b = torch.zeros(16, x.shape[0], dtype=torch.float64)
            for register in range(4):
                for h in range(2):
                    code = 4 * j + 2 * (register // 2) + h  # what tile_fragments puts there
                    a[:, g + 8 * (register % 2), 2 * t + h + 8 * (register // 2)] = held[
                        :, k_tile, torch.arange(32), register % 2, code
                    ]
            for register in range(2):
                for h in range(2):
                    for column in range(0, x.shape[0], 8):
                        at = 64 * k_tile + 16 * t + 2 * (2 * j + register) + h
                        b[2 * t + h + 8 * register, column + g] = x[column + g, at]
            y += (a @ b).permute(2, 0, 1).flatten(1)
    return y[:m, :n] * OPERAND_TO_VALUE * inputs["w_tensor_scale"].double()


@pytest.mark.parametrize("problem", CHECKS, ids=lambda w: w.id)
def test_fragments_multiply_to_the_reference(problem):
    inputs = cases.inputs(problem, seed=3)
    inputs["w_scale"].view(-1)[::5] = 0
    inputs["w_scale"].view(-1)[1::7] = 3  # subnormal
    torch.testing.assert_close(product(inputs, problem["dtype"]), reference(inputs)["y"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_code_times_every_scale_is_exact(dtype: str):
    scale = torch.arange(127, dtype=torch.uint8)[:, None].repeat(1, 4)
    packed = fmt.pack(torch.arange(64, dtype=torch.uint8).remainder(16).repeat(127, 1))
    inputs = {"w_packed": packed, "w_scale": scale, "w_tensor_scale": torch.ones(1)}
    words, scales = lane_words(tiles.tile_weights(packed, scale, cases.DTYPES[dtype]))
    held = operands(words, scales, dtype).view(8, 8, 4, 2, 16).permute(0, 3, 1, 2, 4).reshape(128, 64)[:127]
    assert torch.equal(held * OPERAND_TO_VALUE, weights(inputs))


def test_bit_orders_are_permutations():
    for decode, lowest in ((tiles.decode16_bf16, 6), (tiles.decode16_fp16, 9)):
        places = [place for row in tiles.bit_order(decode, lowest) for place in row]
        assert sorted(places) == [(code, bit) for code in range(16) for bit in range(4)]


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++ to run operand.cuh on a CPU")
def test_the_header_decodes_as_tiles_py_does():
    entry = (
        '#include "operand.cuh"\n'
        "template <bool B> void all(unsigned a, unsigned b, unsigned s, unsigned* out) {\n"
        "  unsigned pair[8]; decode16<B>(a, b, pair);\n  for (int i = 0; i < 8; i++) out[i] = pair[i];\n"
        "  out[8] = scale_pair<B>(s, 0); out[9] = scale_pair<B>(s, 1);\n}\n"
        'extern "C" void probe(int bf16, unsigned a, unsigned b, unsigned s, unsigned* out) {\n'
        "  bf16 ? all<true>(a, b, s, out) : all<false>(a, b, s, out);\n}\n"
    )
    probe = stand_in.built(ring_config.SOURCE, entry, keep=lambda line: False).probe  # its headers alone
    out = (ctypes.c_uint32 * 10)()
    for first, second in torch.randint(0, 2**32, (200, 2), generator=torch.Generator().manual_seed(0)).tolist():
        scales = first >> 7 & 0x7F7F | 0x4040  # bytes of finite scales
        for bf16, decode in ((1, tiles.decode16_bf16), (0, tiles.decode16_fp16)):
            probe(bf16, ctypes.c_uint32(first), ctypes.c_uint32(second), ctypes.c_uint32(scales), out)
            assert tuple(out)[:8] == decode(first, second)
            for which in range(2):
                byte = scales >> 8 * which & 255
                half = (out[8 + which] & 0xFFFF, out[8 + which] >> 16)
                assert half == (0x7000 | byte << 4,) * 2 if bf16 else half == (byte << 7,) * 2


def test_scale_bytes_keep_every_finite_scale():
    byte = torch.arange(127, dtype=torch.uint8)
    coded = tiles.scale_bytes(byte).to(torch.int32)
    value = torch.ldexp(1 + (coded & 7) / 8.0, (coded >> 3) - tiles.SCALE_BIAS)
    assert torch.equal(value[1:], fmt.decode_ue4m3(byte)[1:])
    assert coded[0] == 0


def fits(problem, variant: dict[str, Any]) -> bool:
    m, k = problem["M"], problem["K"]
    cluster = min(variant.get("cluster") or ring_config.choose_cluster(m, k), math.ceil(k / 64))
    return ring_config.fits(m, k, cluster, variant.get("warps") or ring_config.choose_warps(m, k, cluster) or 8)


@pytest.mark.parametrize("variant", RINGS, ids=str)
@pytest.mark.parametrize("problem", CHECKS + MEASURED, ids=lambda w: w.id)
def test_rings_fit_the_device_and_cover_k(problem, variant):
    m, n, k = problem["M"], problem["N"], problem["K"]
    if not fits(problem, variant):
        with pytest.raises(ValueError, match=r"K=\d+.*use cuda_"):
            ring_config.choose_ring(m, n, k, problem["dtype"], hopper.SMS, **variant)
        return
    c = ring_config.choose_ring(m, n, k, problem["dtype"], hopper.SMS, **variant)
    total = math.ceil(k / 64)
    half = math.ceil(total / c.cluster)
    assert c.tokens >= m
    for mine in (half, max(0, total - (c.cluster - 1) * half)):
        assert c.k_tiles - c.ragged_tiles <= mine // c.warps
        assert math.ceil(mine / c.warps) <= c.k_tiles
    assert 1 <= c.stage_tiles <= c.k_tiles
    assert 1 <= c.stages <= ring_config.MAX_STAGES
    assert c.sum_stages >= 1
    assert 16 * c.stages + 16 * c.sum_stages + 8 * ring_config.PLACES * c.reducers <= ring_config.BARRIER_BYTES
    assert c.tokens // 8 % c.reducers == 0
    assert c.shared_bytes <= hopper.SHARED_BYTES
    assert c.grid % c.cluster == 0
    assert c.grid <= hopper.SMS


def test_the_shape_chooses_warps_and_stage_tiles():
    def chosen(m: int, n: int, k: int) -> tuple[int, int, int]:
        c = ring_config.choose_ring(m, n, k, "bf16")
        return c.cluster, c.warps, c.stage_tiles

    assert [chosen(m, 17408, 5120) for m in (1, 16, 24)] == [(2, 8, 5), (2, 8, 5), (2, 8, 5)]
    assert [chosen(m, 5120, 6144) for m in (8, 16, 24)] == [(2, 8, 3), (2, 12, 2), (2, 8, 3)]
    assert [chosen(m, 4096, 2048) for m in (1, 16, 32)] == [(1, 8, 2), (1, 8, 2), (2, 8, 1)]
    assert [chosen(m, 5120, 17408) for m in (1, 8, 9, 16)] == [(2, 12, 4)] * 2 + [(4, 12, 3)] * 2
    assert chosen(4, 5120, 20480) == (2, 14, 4)  # 12 and 13 warps would have too many tiles each
    assert chosen(4, 5120, 21760) == (2, 10, 6)  # and 14 have too few registers for these
    assert chosen(4, 5120, 28672) == (4, 12, 4)  # and two CTAs for these
    assert ring_config.choose_ring(8, 5120, 17408, "bf16", pdl=True).kernel.endswith("_pdl")


def test_two_stages_at_least_are_under_way_and_one_is_read():
    def flight(m: int, n: int, k: int) -> tuple[int, float]:
        c = ring_config.choose_ring(m, n, k, "bf16")
        return c.stages, (c.stages - 1) * c.stage_bytes / 1024

    assert flight(8, 17408, 5120) == (3, 45.0)
    assert flight(8, 5120, 6144) == (4, 40.5)
    assert flight(8, 5120, 17408) == (4, 81.0)  # x takes longer
    assert flight(16, 5120, 17408) == (3, 40.5)
    assert flight(8, 5120, 9216)[0] == 3  # a stage of 41 KB


def test_warps_that_need_more_registers_get_them():
    assert ring_config.registers(16, 17408, 4, 12) == 152
    assert ring_config.registers(24, 6144, 2, 8) == 224
    assert ring_config.registers(24, 5120, 2, 8) == 0
    assert ring_config.registers(24, 8192, 2, 8) is None
    assert ring_config.registers(16, 17408, 4, 8) is None


def test_a_launch_asks_the_device_how_many_clusters_of_four_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def most_clusters(function: int, *config: int) -> int:
        asked.append((function, *config))
        return 26

    monkeypatch.setattr(
        hopper.cuda, "load", lambda source, name, device, limit: SimpleNamespace(function=SimpleNamespace(ptr=7))
    )
    monkeypatch.setattr(hopper.cuda_driver, "most_clusters", most_clusters)
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 114)
    cuda_decode.configured.cache_clear()
    four = cuda_decode.configured(16, 5120, 17408, "bf16", 97)
    assert (four.cluster, four.grid) == (4, 4 * 26)  # a grid of more would be a second wave
    assert asked == [(7, 4, four.threads, four.shared_bytes)]
    assert cuda_decode.configured(8, 17408, 5120, "bf16", 97).grid == 114
    assert len(asked) == 1
    cuda_decode.configured.cache_clear()


def test_finishing_warps_take_no_registers_from_those_that_multiply():
    assert [ring_config.choose_reducers(m, 8) for m in (8, 16, 24, 32)] == [1, 2, 3, 2]
    assert [ring_config.choose_reducers(m, 10) for m in (8, 16, 24, 32)] == [1, 1, 1, 1]
    assert [ring_config.choose_reducers(16, warps) for warps in (7, 11, 12, 13, 14)] == [2, 2, 2, 2, 1]


def test_kernels_that_differ_have_names_that_differ() -> None:
    one, two = (ring_config.choose_ring(16, 17408, 5120, "bf16", reducers=f) for f in (1, 2))
    assert one.kernel != two.kernel
    even = ring_config.choose_ring(16, 5120, 17408, "bf16")
    assert even.registers
    assert even.kernel != replace(even, registers=0).kernel


def test_refusals_name_the_values():
    for m, k, other in ((33, 64, "gemm"), (32, 5120, "gemm"), (17, 17408, "gemm"), (8, 45056, "gemv")):
        with pytest.raises(ValueError, match=f"M={m}, K={k}: .* use cuda_{other}"):
            ring_config.choose_ring(m, 64, k, "bf16")
    with pytest.raises(ValueError, match="k=40"):
        ring_config.choose_ring(1, 64, 40, "bf16")
    args = cuda_decode.prepare(cases.inputs(CHECKS[0]))
    config = ring_config.choose_ring(1, 75, 64, "bf16")
    with pytest.raises(ValueError, match=r"\(5, 1, 576\)"):
        cuda_decode.launch(args | {"x": torch.zeros(1, 128, dtype=torch.bfloat16)}, torch.zeros(1, 75), config)
    with pytest.raises(ValueError, match="strides"):
        cuda_decode.launch(args | {"x": torch.zeros(64, 2, dtype=torch.bfloat16).T}, torch.zeros(2, 75), config)
    refused = {w.id: cuda_decode._refuses(w) for w in cases.WORKLOADS if w["dtype"] != "f32"}
    assert "M=63" in refused["m63_n75_k1040_bf16"]
    assert "M=32, K=17408" in refused["m32_n5120_k17408"]
    assert not refused["m8_n5120_k17408"]


# Gate and up of Qwen3.6-27B in one product.
GATED = ring_config.source(ring_config.choose_ring(8, 2 * 17408, 5120, "bf16", pdl=True, gated=True))


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("source", [*cuda_decode.CUDA_SOURCES, GATED], ids=lambda s: s.kernels[0])
@pytest.mark.slow
def test_sources_compile_without_spills_to_tensor_core_products(source):
    (row,) = compile_cuda(source, 90)
    assert (row["status"], row["spill_bytes"], row["fits"]) == ("ok", 0, True), row
    assert "mma.sync" in row["instruction"]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", RINGS, ids=str)
@pytest.mark.parametrize("problem", CHECKS + MEASURED, ids=lambda w: w.id)
def test_on_a_gpu_within_tolerance_and_the_same_twice(problem, variant):
    skip_unless_hopper()
    if not fits(problem, variant):
        pytest.skip("x does not fit in registers")
    inputs = cases.inputs(problem, seed=1, device="cuda")
    args = cuda_decode.prepare(inputs)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    config = ring_config.choose_ring(problem["M"], problem["N"], problem["K"], problem["dtype"], sms, **variant)
    wanted, limit = reference(inputs)["y"], cases.tolerance(problem, "nvfp4-w4a16")["y"]
    first = None
    for _ in range(3):
        y = cases.outputs(problem, inputs)["y"]
        cuda_decode.launch(args, y, config)
        assert compare("y", y, wanted, limit).ok
        first = y if first is None else first
        assert torch.equal(first, y)
