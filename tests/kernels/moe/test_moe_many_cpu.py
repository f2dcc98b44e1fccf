"""kernels/moe/cuda_many.py: its launches as they are, run on a CPU (tests/kernels/on_cpu), and ahead-of-time builds."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.common import Workload
from kernels.moe import cases, cuda_experts, cuda_many
from kernels.moe.cost import block_sizes, cost
from kernels.moe.reference import reference
from lab.check import aot_worker, families
from lab.check.accuracy import compare
from tests.kernels import sass
from tests.kernels.on_cpu.moe_on_cpu import sorted_choice
from tests.kernels.on_cpu.nvfp4_on_cpu import skip_unless_hopper
from tests.kernels.on_cpu.stand_in import UNCHANGED, Change, StandIn, built, needs_compiler, unless_stopped

BY_ID = {w.id: w for w in cases.WORKLOADS}
LAUNCH = """
extern "C" void simulated({parameters}, int grid, int threads, int bytes, int seed) {{
  static std::function<void()> call;
  call = [=] {{ KERNEL({names}); }};
  launch_on_cpu({{.grid = {{grid, 1, 1}}, .threads = threads, .at_once = {at_once}, .shared_bytes = (u32)bytes,
                 .seed = seed, .backwards = seed % 3 == 1, .uneven = seed % 2 == 1}}, [] {{ call(); }});
}}
"""
PREFETCHED = """
static long long offsets[4096];
static int prefetches;
extern "C" int prefetched(long long* to) {
  for (int i = 0; i < prefetches; i++) to[i] = offsets[i];
  return prefetches;
}
"""  # what a launch asked for, as bytes from w on; the stand-in runs CTAs as coroutines of one thread
NOTE = """
  prefetches = 0;
  static const unsigned char* weights;
  weights = w;
  on_prefetch = [](const void* from, u32 bytes) {
    if (bytes % TILE_BYTES || bytes > 24 * TILE_BYTES || prefetches + 24 > 4096) stop("no part of a stage");
    for (u32 at = 0; at < bytes; at += TILE_BYTES) offsets[prefetches++] = (const unsigned char*)from + at - weights;
  };
"""
PARAMETERS = {
    **dict.fromkeys(
        ("router.cu", "router_once.cu"),
        "const float* logits, const unsigned char* x, const unsigned char* gate, uint2* pairs, u32* masks, "
        "uint2* rows, uint2* blocks, u32* state, int tokens, int width, int top_k, int counters, u32* back",
    ),
    "experts_many.cu": "const unsigned char* x, const unsigned char* w, const float* scale, const uint2* rows, "
    "const uint2* blocks, const u32* state, u16* out, float* parts, u32* flags, const float* x_scale",
    "quantise_e4m3.cu": "const unsigned short* x, unsigned char* out, float* scales, int k, int padded",
    "weighted_sum.cu": "const u16* given, const uint2* pairs, const u32* back, u16* y, int chosen",
}


def of_rows(workload: Workload, count: int) -> Workload:
    return Workload(workload.id, {**workload.axes, "T": count})


@functools.cache
def on_cpu(source: Any, change: Change = UNCHANGED) -> StandIn:
    parameters = PARAMETERS[source.path.name]
    names = ", ".join(each.split()[-1].strip("*") for each in parameters.split(","))
    product = source.path == cuda_many.SOURCE
    prefetches = product and {"-DGATED=1", "-DFP8=0", "-DBLOCK_M=32"} <= set(source.options)
    if prefetches:
        parameters += ", int experts, int even_blocks"
        names += ", experts, even_blocks"
    if product and "-DFP8=0" in source.options:
        parameters += ", unsigned char* map, int map_rows, int map_words, int box_rows, int box_words"
        names += ", TensorMap{map, map_rows, map_words, box_rows, box_words}"
    at_once = 1 if source.path.name == "quantise_e4m3.cu" else "grid"  # its static shared memory is one for all
    entry = LAUNCH.format(parameters=parameters, names=names, at_once=at_once)
    if prefetches:
        entry = PREFETCHED + entry.replace("  static std::function", NOTE + "  static std::function")
    return built(source.path, entry, change, options=source.options)


class Simulated:
    """cuda_many.run on the stand-in, of so many workers, with blocks of so many rows; sources with a change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, workers: int, block: int) -> None:
        self.seed = 0
        self.changes: dict[Path, Change] = {}
        monkeypatch.setattr(cuda_many, "SMS", workers)
        monkeypatch.setattr(cuda_many, "block_tokens", lambda *_: block)
        monkeypatch.setattr(cuda_many.cuda, "load", lambda s, *_: on_cpu(s, self.changes.get(s.path, UNCHANGED)))
        monkeypatch.setattr(cuda_many.cuda, "launch", self.launch)
        monkeypatch.setattr(cuda_many.tiles.cuda_driver, "word_map", lambda at, *box: (ctypes.c_void_p(at), *box))
        for name in ("i32", "i64"):
            monkeypatch.setattr(cuda_many.cuda, name, int)

    def launch(self, kernel: StandIn, grid: Any, threads: int, arguments: Any, shared: int = 0, **_: bool) -> None:
        given = [
            ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_void_p() if i == 2 else a
            for i, a in enumerate(part for a in arguments for part in (a if isinstance(a, tuple) else (a,)))
        ]
        kernel.simulated(*given, *map(ctypes.c_int, (*grid, threads, shared, self.seed)))


def right(simulated: Simulated, workload: Workload, seeds: int = 2, fp8: bool = False) -> bool:
    """Whether y is within tolerance and the same to the bit for every order of threads and in a second call."""
    given = cases.inputs(workload, 1)
    for name in given:
        if name.endswith("_scale") and given[name].dtype == torch.uint8:
            given[name].view(-1)[::5] = 0
    wanted, precision = reference(given)["y"], cuda_many.W4A8 if fp8 else cuda_many.PRECISION
    limit = cases.tolerance(workload, precision)["y"]
    kept = cuda_many.prepare(given, fp8) | {name: given[name] for name in cases.ACTIVATIONS}
    kept["h"].fill_(float("nan")), kept["given"].fill_(float("nan"))
    first = None
    for seed in range(seeds):
        simulated.seed = seed
        out = cases.outputs(workload, given)
        cuda_many.run(kept, out, fp8)
        first = out["y"] if first is None else first
        if not (compare("y", out["y"], wanted, limit).ok and torch.equal(first, out["y"])):
            return False
    turns = kept["state"][4:].tolist()  # of router_once.cu
    return not kept["flags"].any() and not kept["state"][1:4].any() and turns[1 + turns[0]] == 0


def sees(
    monkeypatch: pytest.MonkeyPatch, change: Change, workers: int, block: int, workload: Workload, seeds: int = 2,
    **how: Any,
) -> bool:  # fmt: skip
    """Whether a mistake in experts_many.cu is seen: y is wrong or varies, or the launch is stopped. how: as `right`."""
    simulated = Simulated(monkeypatch, workers, block)
    simulated.changes = {cuda_many.SOURCE: change}
    return not unless_stopped(lambda: right(simulated, workload, seeds, **how))


OF_FEW = cases._workload(60, 6, 2, 320, 128)  # 14 to 25 rows an expert
OF_ALL_WIDTHS = cases._workload(130, 6, 2, 576, 192, "one", shared=192)  # blocks of about 26, 34 and 96 rows
SHAPES = pytest.mark.parametrize(
    ("workload", "workers", "block"),
    [
        (cases._workload(2, 8, 2, 64, 128, shared=64), 3, 32),
        (BY_ID["t17_e8_k2_h128_f64_one_s64_bf16"], 5, 32),
        (BY_ID["t63_e5_k3_h192_f128_fp16"], 4, 64),
        (cases._workload(75, 32, 8, 64, 64, "zipf"), 2, 32),
        (OF_ALL_WIDTHS, 6, 96),
        (OF_ALL_WIDTHS, 13, 96),
        (cases._workload(100, 2, 1, 320, 128, dtype="fp16"), 7, 96),
        (OF_FEW, 7, 32),
        (cases._workload(40, 6, 2, 320, 192), 2, 32),
        (cases._workload(70, 3, 2, 512, 128, shared=128), 7, 32),
        (cases._workload(63, 5, 3, 64, 80, shared=48), 4, 64),  # padded to whole tiles
    ],
    ids=lambda w: getattr(w, "id", str(w)),
)


@needs_compiler
@SHAPES
@pytest.mark.parametrize("fp8", [False, True], ids=["w4a16", "w4a8"])
def test_the_kernels_run_on_a_cpu(monkeypatch, workload, workers, block, fp8):
    """Blocks of one to 96 rows, tiles that two and more workers share, k that fills no 256, weight rows that fill no
    256 or no 128, and rows that fill boxes of 256.
    """
    assert right(Simulated(monkeypatch, workers, block), workload, fp8=fp8)


@needs_compiler
@pytest.mark.parametrize(
    ("workload", "workers", "block"),
    [
        (BY_ID["t2_e8_k2_h80_f48_s32_bf16"], 3, 32),
        (cases._workload(130, 3, 2, 528, 144, "one", shared=144), 6, 96),
        (cases._workload(100, 2, 1, 272, 80, dtype="fp16"), 7, 96),
    ],
    ids=lambda w: getattr(w, "id", str(w)),
)
def test_w4a8_takes_any_whole_scale_groups(monkeypatch, workload, workers, block):
    assert right(Simulated(monkeypatch, workers, block), workload, fp8=True)


@needs_compiler
def test_more_tokens_than_one_wait_is_for_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind router.cu, whose blocks are not by width."""
    monkeypatch.setattr(cuda_many, "ONCE_TOKENS", 100)
    assert right(Simulated(monkeypatch, 7, 96), OF_ALL_WIDTHS)


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("expert * OF_EXPERT + 16 * row_tile", "expert * OF_EXPERT + 8 * row_tile"),
        ("8 * min(2 * row_tile + half, LAST_HALF)", "8 * min(2 * row_tile, LAST_HALF)"),
        ("BOXES = LAST_HALF % 2 ? 1 : 2", "BOXES = 1"),
        ("k * (TILE_BYTES / 8)", "k * (TILE_BYTES / 16)"),
    ],
)
def test_the_simulation_sees_mistakes_in_boxes_of_weights(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    whole = "16 * row_tile" in change[0]  # of both products, or of neither
    workload = cases._workload(130, 6, 2, *((512, 128) if whole else (576, 192)), "one", shared=64)
    assert sees(monkeypatch, change, 13, 96, workload)


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("pipeline.init(1 + PRODUCERS", "pipeline.init(1"),
        ("for (int i = min(issued, LAG); i > 0; i--) told();", ""),
        ("&& 64 * g + 8 * e < block.count", "&& 64 * g + 8 * e < 8"),
        ("BLOCK_M == 64 || count <= 64", "BLOCK_M == 64 || count <= 96"),
        ("operand + 64 * 128 / 16 + 2 * j", "operand + 2 * j"),
        ("if (half == 0 && before >= 0) release(before);", "if (half == 0) release(stage);"),
        ("peer <= worker + peers", "peer < worker + peers"),
        ("GATED ? ldg32(rows + row) : row;", "GATED ? ldg32(rows + row) ^ 1 : row;"),
        ("static_cast<size_t>(from[i]) + 8 * k", "static_cast<size_t>(from[i]) + 4 * k"),
        ("(token - s) * OUT_STRIDE", "token * OUT_STRIDE"),
        ("piece ^ first % 8", "piece"),
    ],
)
def test_the_simulation_sees_mistakes_in_the_products(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    of_w4a8 = "64 * 128 / 16" in change[0]  # in two products
    assert sees(monkeypatch, change, 7, 96, OF_ALL_WIDTHS, 3, fp8=of_w4a8)


@needs_compiler
@pytest.mark.parametrize(
    ("block", "change"),
    [
        (32, ("if (asked == STAGES) return asked;", "if (asked == STAGES + 1) return asked;")),
        (32, ("issued >= asked", "issued > asked")),
        (96, ("issued >= asked", "true")),
        (96, ("expert, work.tile % ROW_TILES, k,", "expert, 0, k,")),
        (96, ("(blocks + work.tile / ROW_TILES)) & 0xFFFF", "(blocks)) & 0xFFFF")),
    ],
)
def test_the_simulation_sees_mistakes_in_what_is_asked_for_early(monkeypatch, block: int, change: Change) -> None:
    workload = OF_FEW if block == 32 else OF_ALL_WIDTHS
    workers = 2 if block == 32 else 7  # of two, each has more than a ring of stages
    assert sees(monkeypatch, change, workers, block, workload, 3)


def prefetched(
    monkeypatch: pytest.MonkeyPatch, tokens: int, shared: int = 192, change: Change = UNCHANGED
) -> tuple[list[int], list[int]]:
    """What the first product asks for ahead, and what its 5 CTAs begin with: bytes from the weights on.

    Of its first stage's 16 row tiles as many tiles along k as a CTA has stages of.
    """
    simulated = Simulated(monkeypatch, 5, 32)
    simulated.changes = {cuda_many.SOURCE: change}
    assert right(simulated, cases._workload(tokens, 6, 2, 576, 192, shared=shared), 1)
    source, _ = cuda_many.sources_of(32, 576, 192, "bf16")
    found = (ctypes.c_longlong * 4096)()
    count = on_cpu(source, change).prefetched(found)
    # Of 384 weight rows and 576 k. Blocks in the order of experts, each of up to 32 rows.
    of_expert, k_blocks, line = 24, 9, (6 + (shared > 0) * -(-tokens // 32)) * 2 * 9
    wanted = []
    for worker in range(5):
        at = worker * (line // 5) + min(worker, line % 5)
        expert, tile, k = min(at // (2 * k_blocks), 6), at % (2 * k_blocks) // k_blocks, at % k_blocks
        rows = range(16 * tile, min(16 * tile + 16, of_expert))
        wanted += [((expert * of_expert + r) * k_blocks + i) * 576 for r in rows for i in range(k, k_blocks)]
    return sorted(found[:count]), sorted(wanted)


@needs_compiler
@pytest.mark.parametrize("shared", [192, 0])
def test_what_is_prefetched_is_what_each_worker_begins_with(monkeypatch: pytest.MonkeyPatch, shared: int) -> None:
    found, wanted = prefetched(monkeypatch, 40, shared)
    assert found == wanted


@needs_compiler
def test_nothing_is_prefetched_where_experts_may_have_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prefetched(monkeypatch, 8)[0] == []


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("% OF_BLOCK / K_BLOCKS * 16 + lane", "% OF_BLOCK / K_BLOCKS * 8 + lane"),
        ("min(first / OF_BLOCK, experts)", "min(first / OF_BLOCK, experts - 1)"),
        (".begin(worker), from", ".begin(0), from"),
        ("count * TILE_BYTES);", "TILE_BYTES);"),
    ],
)
def test_a_mistake_in_what_is_prefetched_is_seen(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    found, wanted = prefetched(monkeypatch, 40, change=change)
    assert found != wanted


@needs_compiler
@pytest.mark.parametrize(
    ("block", "change"),
    [
        (32, ("count <= 16", "count <= 26")),
        (32, ("count <= 24", "count <= 32")),
        (96, ("multiply(Count<FP8 ? 64 : 96>{}", "multiply(Count<FP8 ? 64 : 80>{}")),
        (96, ("BLOCK_M == 64 || count <= 64", "BLOCK_M == 64 || count <= 96")),
        (96, (": &acc[half][0][(s + i) / 2]", ": &acc[half][0][s / 2]")),
    ],
)
def test_the_simulation_sees_mistakes_in_columns(monkeypatch: pytest.MonkeyPatch, block: int, change: Change) -> None:
    workload = OF_FEW if block == 32 else OF_ALL_WIDTHS
    assert sees(monkeypatch, change, 7, block, workload, 3)


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("return narrow + at / MIDDLE;", "return at / MIDDLE;"),
        ("return narrow + at / MIDDLE;", "return narrow + at / NARROW;"),
    ],
)
def test_the_simulation_sees_mistakes_in_shares_by_cost(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    assert sees(monkeypatch, change, 16, 96, OF_ALL_WIDTHS)


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("from[i] = at * 8 * K_BLOCKS", "from[i] = at * 4 * K_BLOCKS"),
        ("ldg32(rows + at_row) :", "(ldg32(rows + at_row) ^ 1) :"),
        ("scale[half][p % 2]", "scale[half][1 - p % 2]"),
        ("8 * (e / 2) + 2 * (lane % 4)", "8 * (e / 2)"),
        ("FP8 ? 1024 + 4 * lane", "FP8 ? 1024 + 4 * (lane / 4)"),
    ],
)
def test_the_simulation_sees_mistakes_in_w4a8(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    workload = cases._workload(130, 3, 2, 528, 144, "one", shared=144)
    assert sees(monkeypatch, change, 7, 96, workload, fp8=True)


def _routed(
    simulated: Simulated, tokens: int, experts: int, top_k: int, block: int, routing: str, once: bool = False,
    by_width: bool = False,
) -> bool:  # fmt: skip
    """Whether the router's rows, blocks and places are the reference's choice, sorted by expert and then by token.

    once: of router_once.cu, three times, as each call leaves the next one its counters. by_width: blocks of up to 32
    rows first, then of up to 64.
    """
    axes: dict[str, int | str] = {
        "T": tokens, "experts": experts, "top_k": top_k, "H": 64, "routing": routing, "dtype": "bf16",
    }  # fmt: skip
    given = cases.activations(Workload("", axes), 3, "cpu")
    gate, pairs = torch.randn(64).to(torch.bfloat16), tokens * (top_k + 1)
    warps, grid = cuda_many.router_warps(tokens, experts), -(-tokens // cuda_many.ROUTER_TOKENS)
    source = cuda_many.router_source(experts, "bf16", block, warps)
    if once:
        source = cuda_many.once_source(experts, "bf16", block, by_width)
    rows, blocks, chosen_pairs = (torch.full((pairs, 2), -1, dtype=torch.int32) for _ in range(3))
    state, back = torch.zeros(4 + 5 * once, dtype=torch.int32), torch.full((pairs,), -1, dtype=torch.int32)
    masks = torch.full(((2 * grid + 1) * experts,), -1, dtype=torch.int32)
    kernel = on_cpu(source, simulated.changes.get(source.path, UNCHANGED))
    threads, shared = 32 * warps, source.shared_of(source.kernels[0])
    arguments = (
        given["logits"],
        given["x"],
        gate,
        chosen_pairs,
        masks,
        rows,
        blocks,
        state,
        tokens,
        64,
        top_k,
        0,
        back,
    )
    for seed in range(1 + 2 * once):
        simulated.seed = seed
        masks.fill_(-1)
        simulated.launch(kernel, (grid,), threads, arguments, shared)
        turn = state[4:].tolist() or [0, 0, 0]
        if state[1:4].any() or turn[0] != (seed + 1) % 2 * once or turn[1 + turn[0]]:
            return False

    by_expert, listed = sorted_choice(given, gate, top_k, block)
    if by_width:
        kinds = [((of >> 16) - 1) // 32 for of, _ in listed]
        listed = [each for kind in range(3) for each, its in zip(listed, kinds, strict=True) if its == kind]
        if state[7:].tolist() != [sum(its <= kind for its in kinds) for kind in (0, 1)]:
            return False
    odds = torch.tensor([p for *_, p in by_expert])
    places = [by_expert[i][:2] for i in back.tolist()]
    return (
        blocks[: state[0]].tolist() == listed
        and rows[:, 0].tolist() == [t for _, t, _ in by_expert]
        and bool(((rows[:, 1].view(torch.float32) - odds).abs() <= 1e-5 * odds).all())
        and places == [(int(e), i // (top_k + 1)) for i, e in enumerate(chosen_pairs[:, 0])]
    )


ROUTINGS = [(33, 8, 2, 32, "uniform"), (70, 300, 8, 32, "uniform"), (140, 40, 5, 64, "zipf"), (300, 16, 3, 96, "one")]


@needs_compiler
@pytest.mark.parametrize(("tokens", "experts", "top_k", "block", "routing"), ROUTINGS)
def test_the_router_sorts_the_choice_of_many(monkeypatch, tokens, experts, top_k, block, routing):
    assert _routed(Simulated(monkeypatch, 4, block), tokens, experts, top_k, block, routing)


@needs_compiler
@pytest.mark.parametrize(("tokens", "experts", "top_k", "block", "routing"), [*ROUTINGS, (600, 600, 2, 96, "zipf")])
@pytest.mark.parametrize("by_width", [False, True])
def test_the_router_of_one_wait_sorts_alike(monkeypatch, tokens, experts, top_k, block, routing, by_width):
    """One thread an expert and several, with a word of each block and with more than are in flight at once."""
    assert _routed(Simulated(monkeypatch, 4, block), tokens, experts, top_k, block, routing, True, by_width)


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("(1u << static_cast<u32>(t)", "(2u << static_cast<u32>(t)"),
        ("b + j * SLICES < ahead", "b + j * SLICES <= ahead"),
        ("b += AT_ONCE * SLICES", "b += grid"),
        ("turns[TURN + 2 - turn] = 0;", ""),
        ("turns[TURN] = 1 - turn;", ""),
        ("turns + TURN + 1 + turn, 1", "turns + TURN + 1, 1"),
        ("first + (both & 0xFFFF)", "first"),
        ("if (w == warp) upto[which] += total[which];", ""),
        ("first + b * BLOCK_TOKENS", "first"),
        ("int at = begins + upto[1 + kind] - of_kind(count, kind);", "int at = begins + upto[1 + kind];"),
        ("begins += of_kind(of_shared, kind);", ""),
        ("(kind == kind_of(BLOCK_TOKENS) ? b : 0)", "b"),
        ("begins += total[1 + kind];", "begins += total[1];"),
    ],
)
def test_the_simulation_sees_mistakes_in_the_router_of_one_wait(
    monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    simulated = Simulated(monkeypatch, 4, 64)
    simulated.changes = {cuda_experts.ONCE_SOURCE: change}
    assert not unless_stopped(lambda: _routed(simulated, 600, 600, 3, 64, "zipf", True, True))


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("(1u << (t & 31)) - 1)", "(2u << (t & 31)) - 1)"),
        ("EXPERTS + e] = count;", "EXPERTS + e] = 0;"),
        ("back[i] = at;", "back[i] = at - 1;"),
        ("== grid - 1) state", "== grid) state"),
        ("st_release(state + 2, 1);", ";"),
        ("min(BLOCK_TOKENS, count - begin) << 16, first + begin", "count << 16, first + begin"),
    ],
)
def test_the_simulation_sees_mistakes_in_the_router_of_many(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    simulated = Simulated(monkeypatch, 4, 64)
    simulated.changes = {cuda_many.ROUTER_SOURCE: change}
    assert not unless_stopped(lambda: _routed(simulated, 140, 40, 5, 64, "zipf"))


@pytest.mark.parametrize(("tokens", "block"), [(129, 32), (512, 32), (1024, 64), (2048, 96)])
def test_a_block_holds_an_experts_rows_where_routing_is_even(tokens: int, block: int) -> None:
    """One block an expert, for all but one in a hundred."""
    assert cuda_many.block_tokens(tokens, 8, 256) == block
    rows = torch.distributions.Binomial(tokens, torch.tensor(8 / 256)).sample((4000,))
    assert float((rows > block).float().mean()) < 0.01


@pytest.mark.parametrize(("tokens", "words"), [
    (257, "router_once"), (512, "router_once"), (1024, "even router_once"), (2048, "even router_once"), (2049, ""),
])  # fmt: skip
def test_shares_go_by_cost_where_blocks_differ_in_width(tokens: int, words: str) -> None:
    """And no list is by width beyond the tokens of router_once.cu."""
    workload = of_rows(BY_ID["t512_e256_k8_h2048_f512_s512"], tokens)
    assert sorted(set(re.findall("even|router_once", cuda_many.described(workload)))) == sorted(words.split())
    assert not re.findall("even|router_once", cuda_many.described(workload, fp8=True))


@pytest.mark.parametrize(("axis", "value", "word"), [
    ("T", 20000, "parts"), ("H", 80, "64"), ("shared", 600, "linear"), ("experts", 2000, "1024"),
])  # fmt: skip
def test_what_the_kernels_cannot_hold_is_refused(axis: str, value: int, word: str) -> None:
    axes: dict[str, int | str] = dict(BY_ID["t512_e256_k8_h2048_f512_s512"].axes)
    candidate = cuda_many.CANDIDATES[0]
    assert candidate.refuses(Workload("", axes)) == ""
    assert word in candidate.refuses(Workload("", axes | {axis: value}))
    assert "16" in cuda_many.refuses(Workload("", axes | {"H": 88}), fp8=True)


@pytest.mark.slow
@pytest.mark.parametrize("source", cuda_many.CUDA_SOURCES, ids=lambda s: s.kernels[0])
def test_sources_compile_without_spills(source: Any) -> None:
    (row,) = aot_worker.compile_cuda(source, 90)
    assert (row["status"], row["spill_bytes"], row["fits"]) == ("ok", 0, True), row
    if source.path == cuda_many.SOURCE:
        assert row["instruction"].startswith("wgmma m64")
        # What the producers give back is what the consumers take, or their setmaxnreg never ends.
        text = source.path.read_text()
        fewer, more = (int(re.findall(rf"reg_{word}<(\d+)>", text)[0]) for word in ("dealloc", "alloc"))
        assert 128 * (row["registers"] - fewer) >= 256 * (more - row["registers"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [s for s in cuda_many.CUDA_SOURCES if s.path == cuda_many.SOURCE],
    ids=lambda s: s.kernels[0],
)
def test_a_half_is_decoded_while_the_others_products_run(source: Any) -> None:
    """A wait for all products behind each loop alone: where ptxas serialises them (C7510 to C7514), behind each."""
    (code,) = sass.kernels(sass.compiled(source)).values()
    waits = [i.text for i in code if i.text.startswith("WARPGROUP.DEPBAR")]
    loops = waits.count("WARPGROUP.DEPBAR.LE gsb0, 0x0")
    assert loops in (1, 2, 3)
    assert waits.count("WARPGROUP.DEPBAR.LE gsb0, 0x1") == 2 * loops


@needs_compiler
@pytest.mark.parametrize("fp8", [False, True], ids=["w4a16", "w4a8"])
def test_scratch_of_many_tokens_serves_fewer(monkeypatch: pytest.MonkeyPatch, fp8: bool) -> None:
    """As a layer keeps it: 70 tokens, then 9 behind them in what those have left, then 70 again."""
    Simulated(monkeypatch, 3, 32)
    workload = cases._workload(70, 5, 2, 128, 64, shared=64)
    given = cases.inputs(workload, 1)
    kept = cuda_many.prepare(given, fp8)
    for count in (70, 9, 70):
        few = {name: given[name][:count].contiguous() for name in cases.ACTIVATIONS}
        limit = cases.tolerance(of_rows(workload, count), cuda_many.W4A8 if fp8 else cuda_many.PRECISION)["y"]
        out = cases.outputs(of_rows(workload, count), few)
        cuda_many.run(kept | few, out, fp8)
        assert compare("y", out["y"], reference(given | few)["y"], limit).ok
    more = {name: given[name][[*range(70), 0]] for name in cases.ACTIVATIONS}
    with pytest.raises(ValueError, match="at least 71"):
        cuda_many.run(kept | more, {"y": more["x"]}, fp8)


def test_scratch_has_the_blocks_of_one_token_less() -> None:
    """They are narrower and so may be more: 467 for the last number of tokens that gets 64 rows, 397 for the next."""
    needed, grew = 0, False
    for tokens in range(1, 2049):
        size = torch.Size((tokens, 64))
        made = cuda_many.scratch(size, torch.bfloat16, 256, 8, 64, True, torch.device("meta"))
        assert made.keys() <= set(cuda_many.SCRATCH)
        own = cuda_many.most_blocks(tokens, 8, 256, True, cuda_many.block_tokens(tokens, 8, 256))
        grew, needed = grew or own < needed, max(own, needed)
        assert len(made["blocks"]) >= needed
    assert grew


ON_A_GPU = [w for w in cases.WORKLOADS if not cuda_many.CANDIDATES[0].refuses(w)]


@pytest.mark.gpu
@pytest.mark.parametrize("workload", ON_A_GPU, ids=lambda w: w.id)
def test_on_a_gpu_within_tolerance_and_the_same_bits_captured(workload: Workload) -> None:
    skip_unless_hopper()
    given = cases.inputs(workload, 1, "cuda")
    kept = cuda_many.prepare(given) | {name: given[name] for name in cases.ACTIVATIONS}
    wanted, limit = reference(given)["y"], cases.tolerance(workload, cuda_many.PRECISION)["y"]
    out = cases.outputs(workload, given)
    cuda_many.run(kept, out)
    first = out["y"].clone()
    assert compare("y", first, wanted, limit).ok
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda_many.run(kept, out)
    for _ in range(20):
        out["y"].fill_(float("nan"))
        graph.replay()
        assert torch.equal(out["y"], first)
    other = cases.activations(workload, 7, "cuda")
    for name, tensor in other.items():
        kept[name].copy_(tensor)
    graph.replay()
    assert compare("y", out["y"], reference(given | other)["y"], limit).ok


@pytest.mark.parametrize(
    "name", ["cuda_experts", "cuda_experts_many", "cuda_experts_many_w4a8", "triton_experts", "torch_grouped"]
)
def test_counts_of_work_grow_with_tokens_and_hold_the_bytes(name: str) -> None:
    candidate = families.load("moe").candidate(name)
    assert candidate.work
    before: dict[str, float] = {}
    for tokens in (1, 8, 32, 128, *(257, 512, 2048) * (name != "cuda_experts")):
        workload = BY_ID[f"t{tokens}_e256_k8_h2048_f512_s512"]
        counts = candidate.work(workload, 132)
        assert counts.at_once["bytes"] >= cost(workload, candidate.precision).bytes
        assert all(value >= before.get(each, 0.0) for each, value in counts.at_once.items()), tokens
        before = dict(counts.at_once)


def test_blocks_hold_every_row_once() -> None:
    workload = BY_ID["t512_e256_k8_h2048_f512_zipf_s512"]
    for block in (8, 32, 96):
        sizes = block_sizes(workload, block)
        assert sum(rows * count for rows, count in sizes) == 512 * 9
        assert max(rows for rows, _ in sizes) == block


@pytest.mark.parametrize("experts", [1, 5, 33, 256])
def test_the_router_has_room_for_a_block_s_masks(experts: int) -> None:
    """A word of 32 experts for each of 32 tokens lies where a word an expert does later; of few experts it is more."""
    for warps in (8, 32):
        behind = warps + 1 + experts  # totals of the warps and a flag, and where each expert's rows begin
        assert cuda_many.router_shared_bytes(experts, warps) >= 4 * (behind + 32 * -(-experts // 32))
