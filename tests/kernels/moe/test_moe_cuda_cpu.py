"""kernels/moe/experts.cu as it is, run on a CPU, and compiled ahead of time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.common import Workload
from kernels.moe import cases, cuda_experts
from kernels.moe.reference import reference
from kernels.nvfp4 import hopper
from lab.check import aot_worker
from lab.check.accuracy import compare
from tests.kernels.on_cpu.moe_on_cpu import (
    BY_ID,
    FP16,
    MANY,
    ONE,
    SEVERAL,
    TWO,
    ZIPF,
    Simulated,
    each_call_is_right,
    right,
)
from tests.kernels.on_cpu.nvfp4_on_cpu import skip_unless_hopper
from tests.kernels.on_cpu.stand_in import UNCHANGED, Change, StandIn, needs_compiler, unless_stopped

TWO_TEAMS = {"teams": 2, "round_items": 5}
ROUTED = {**TWO_TEAMS, "routed": True}


@needs_compiler
@pytest.mark.parametrize(
    ("workload", "sms", "levers"),
    [
        (ONE, 5, {}),
        (TWO, 5, {"stages": 3}),
        (ZIPF, 4, {"round_items": 2}),
        (SEVERAL, 8, {}),
        (FP16, 3, {"stages": 2, "round_items": 3, "h_stages": 1}),
        (MANY, 6, {}),
        (BY_ID["t63_e5_k3_h64_f80_bf16"], 3, {}),  # padded to whole tiles
        (cases._workload(3, 8, 2, 64, 48, shared=32), 5, ROUTED),
        (ONE, 5, TWO_TEAMS),
        (ZIPF, 4, TWO_TEAMS),
        (SEVERAL, 8, {**TWO_TEAMS, "prefetch": 2}),
        (MANY, 6, {**TWO_TEAMS, "stages": 6}),
        (MANY, 6, {**TWO_TEAMS, "stages": 6, "prefetch": 4}),
        (ONE, 5, ROUTED),
        (TWO, 5, {**ROUTED, "h_rows": 2}),
        (ZIPF, 4, ROUTED),
        (ONE, 5, {**ROUTED, "h_rows": 1, "h_stages": 4, "stages": 8}),
        (ZIPF, 4, {**ROUTED, "row_tiles": 2, "parts": 2}),
        (SEVERAL, 8, {**ROUTED, "most_tokens": 32}),
        (ONE, 5, {**ROUTED, "most_tokens": 32}),
        (BY_ID["t9_e8_k2_h128_f128_s128_bf16"], 5, {**ROUTED, "most_tokens": 16}),
    ],
    ids=lambda w: getattr(w, "id", ""),
)
def test_the_kernel_runs_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, workload: Workload, sms: int, levers: dict[str, int]
) -> None:
    assert right(Simulated(monkeypatch, sms, **levers), workload)


@needs_compiler
@pytest.mark.parametrize(("tokens", "width", "inner", "sms"), [(12, 576, 192, 9), (9, 1088, 576, 17)])
@pytest.mark.parametrize("levers", [{}, TWO_TEAMS], ids=["one team", "two teams"])
def test_the_kernel_walks_several_tiles_of_k(monkeypatch, tokens, width, inner, sms, levers):
    """More than one tile a warp in both products, with warps that have one less."""
    assert right(Simulated(monkeypatch, sms, **levers), cases._workload(tokens, 3, 2, width, inner))


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("weights.init(1, TEAM)", "weights.init(1, 1)"),
        ("hidden.init(1, TEAM)", "hidden.init(1, 1)"),
        ("ld_acquire(block_items + index) >= UP_ROWS", "ld_acquire(block_items + index) >= 1"),
        ("__ffs(others) - 1 : 32", "__ffs(others) : 32"),
        ("group_parts + group) < PARTS", "group_parts + group) < 1"),
        ("h_row * H_ROW;", "h_row * H_BYTES;"),
        ("line.at / UP_ROWS != loaded_block", "loaded_block < 0"),
        ("weight[i] = __uint_as_float(of.y) * (", "weight[i] = ("),
        ("p < PARTS; p++", "p < PARTS - 1; p++"),
        ("round % 2 ? workers - 1 - worker : worker", "worker / 2"),
        ("+ 16 * t + 4 * j + 2 * upper", "+ 16 * t + 4 * j"),
        ("TILE_CODE_BYTES + 8 * (lane / 4)", "TILE_CODE_BYTES + 8 * (lane / 8)"),
        ("t = k / 2 % 4;", "t = k / 4 % 4;"),
    ],
)
def test_the_simulation_sees_mistakes_in_the_experts(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    simulated = Simulated(monkeypatch, 8, stages=2, round_items=3, h_stages=1)
    simulated.changes = {cuda_experts.SOURCE: change}
    assert not unless_stopped(lambda: right(simulated, SEVERAL, 4))


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("n % TEAMS != team", "n % TEAMS == 2"),
        ("mbarrier_init(barrier(FREE, i), REDUCERS)", "mbarrier_init(barrier(FREE, i), REDUCERS + 1)"),
        ("(before - up_items) / SUM_STAGES & 1", "1"),
        ("before / SUM_STAGES & 1);\n            }\n            leave", "0);\n            }\n            leave"),
        ("if (line.at / UP_ROWS != told) tell(), told", "if (line.at / UP_ROWS != told) told"),
        ("block_items() + told, items)", "block_items() + told, 1)"),
        ("named_barrier_sync_unaligned(REDUCERS_MEET, 32 * REDUCERS);", ""),
        ("n % REDUCERS != reducer", "n % REDUCERS == reducer"),
        ("row = 2 * reducer + lane / 16 + 8", "row = 2 * reducer + lane / 16 + 4"),
        ("1024 * s + 128 * reducer", "1024 * s + 64 * reducer"),
        ("sum[i * ROW_TILES + r]", "sum[i * ROW_TILES]"),
        ("column = 2 * (lane / 4 % 4)", "column = (lane / 4 % 4)"),
        ("lds32(at + 512)", "lds32(at)"),
    ],
)
def test_the_simulation_sees_mistakes_in_the_teams(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    def sound(sms: int, workload: Workload, **levers: int) -> bool:
        simulated = Simulated(monkeypatch, sms, **TWO_TEAMS | levers)
        simulated.changes = {cuda_experts.SOURCE: change}
        found = unless_stopped(lambda: right(simulated, workload, 4))
        monkeypatch.undo()
        return found

    assert not (sound(8, SEVERAL, stages=2, row_tiles=4, parts=1) and sound(4, ZIPF))


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        UNCHANGED,
        ("        state[0] = 0;", ""),
        ("make_uint2(EXPERTS, __float_as_uint(share))", "make_uint2(EXPERTS, 0)"),
        ("i == which) keys[i] = 0;", "i == which) keys[i] += 0;"),
        ("logits + static_cast<size_t>(token) * EXPERTS + e", "logits + e"),
        ("weigh(warp - MOST_TOKENS);", "weigh(0 * warp);"),
        ("__float_as_uint(odds / all)", "__float_as_uint(odds)"),
        ("state[1] = first == 2;", ""),
        ("i < bank; i += 32) state[other + i] = 0;", "i < 1; i += 32) state[other + i] = 0;"),
    ],
)
def test_the_simulation_sees_mistakes_where_it_routes(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    def sound(workload: Workload, sms: int) -> bool:
        simulated = Simulated(monkeypatch, sms, **ROUTED)
        simulated.changes = {cuda_experts.SOURCE: change}
        found = unless_stopped(lambda: each_call_is_right(simulated, workload, 4))
        monkeypatch.undo()
        return found

    wide = cases._workload(7, 40, 5, 64, 64, shared=64)
    if change == UNCHANGED:
        assert sound(wide, 5)
        return
    assert not (sound(wide, 5) and sound(ZIPF, 4))


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        UNCHANGED,
        ("i += ALL_WARPS) {\n            if (i >= 0) weigh(i);", "i += 99) {\n            if (i >= 0) weigh(i);"),
        ("min(BLOCK_TOKENS, rows_of - begin)", "rows_of - begin"),
        ("(count + BLOCK_TOKENS - 1) / BLOCK_TOKENS;\n    const int own", "count > 0;\n    const int own"),
        ("first + begin);", "first);"),
        ("(tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS);", "1);"),
    ],
)
def test_the_simulation_sees_mistakes_where_it_routes_more_tokens(monkeypatch, change: Change) -> None:
    """More than there are warps, and experts of several blocks."""
    simulated = Simulated(monkeypatch, 5, **ROUTED, most_tokens=32)
    simulated.changes = {cuda_experts.SOURCE: change}
    workload = cases._workload(27, 6, 3, 64, 64, "zipf", shared=64)
    assert unless_stopped(lambda: each_call_is_right(simulated, workload, 3)) == (change == UNCHANGED)


@needs_compiler
@pytest.mark.parametrize(("tokens", "rows"), [(2, {"h_rows": 4, "x_rows": 4}), (7, {"x_rows": 8})])
def test_x_is_copied_while_a_cta_chooses(monkeypatch: pytest.MonkeyPatch, tokens: int, rows: dict[str, int]) -> None:
    """x of nine tiles of k, one more than a team has warps, with a shared expert."""
    workload = cases._workload(tokens, 5, 3, 576, 128, shared=64)
    assert right(Simulated(monkeypatch, 10, **ROUTED, **rows), workload)


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        UNCHANGED,
        (
            "for (int i = 0; i < tokens; i++) tma_load_1d(base + X",
            "for (int i = 1; i < tokens; i++) tma_load_1d(base + X",
        ),
        ("x + i * X_BYTES, X_BYTES, base", "x, X_BYTES, base"),
        ("base + X + token * X_ROW + 16", "base + X + 16"),
        ("+ 16 * (lane / 8);", "+ 16 * (lane / 16);"),
        ("from + 128 * tile + 64);", "from + 128 * tile);"),
        (
            "min(lane % 8, block.count - 1)].x;\n                const u32 from",
            "min(g, block.count - 1)].x;\n                const u32 from",
        ),
        ("mbarrier_wait(base + X_FULL, 0);", ""),
        ("LISTS = X + X_ROWS * X_ROW;", "LISTS = X + X_ROW;"),
    ],
)
def test_the_simulation_sees_mistakes_where_x_is_copied(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Copies take long, so x is not there before it is waited for."""
    simulated = Simulated(monkeypatch, 10, **ROUTED)
    simulated.changes = {cuda_experts.SOURCE: change}

    def load(*source: Any) -> StandIn:
        kernel = simulated.load(*source)
        kernel.slow_copies()
        return kernel

    monkeypatch.setattr(cuda_experts.cuda, "load", load)
    found = unless_stopped(lambda: right(simulated, cases._workload(4, 5, 3, 576, 128, shared=64)))
    assert found == (change == UNCHANGED)


@needs_compiler
@pytest.mark.parametrize("most", [8, 32])
def test_routed_inside_the_bits_are_those_of_two_launches(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Of calls with fewer and more tokens on one scratch too."""
    workload = cases._workload(most, 40, 5, 64, 64, "zipf", shared=64)
    given = cases.inputs(workload, 1)
    found = []
    for levers in (TWO_TEAMS, ROUTED | {"most_tokens": most}):
        simulated = Simulated(monkeypatch, 5, **levers)
        kept = cuda_experts.prepare(given)
        for seed, tokens in enumerate((most, 3, 1, most)):
            simulated.seed = seed
            own = {name: given[name][:tokens] for name in cases.ACTIVATIONS}
            y = torch.empty_like(given["x"][:tokens])
            cuda_experts.run(kept | own, {"y": y})
            found.append(y)
        monkeypatch.undo()
    assert [torch.equal(a, b) for a, b in zip(found[:4], found[4:], strict=True)] == [True] * 4


@needs_compiler
def test_scratch_for_more_tokens_serves_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a layer keeps it for all its calls, whatever the last one left there."""
    simulated = Simulated(monkeypatch, 8)
    most = SEVERAL
    kept = cuda_experts.prepare(cases.inputs(most, 1))
    for tokens in (17, 3, 9, 17):
        given = cases.inputs(most, 1)
        given |= {name: given[name][:tokens].contiguous() for name in cases.ACTIVATIONS}
        y = torch.full((tokens, 128), float("nan"), dtype=torch.bfloat16)
        cuda_experts.run(kept | {name: given[name] for name in cases.ACTIVATIONS}, {"y": y})
        limit = cases.tolerance(most, cuda_experts.PRECISION)["y"]
        assert compare("y", y, reference(given)["y"], limit).ok, tokens
        simulated.seed += 1


@pytest.mark.parametrize(("axis", "value", "word"), [
    ("T", 129, "triton_experts"), ("H", 80, "64"), ("F", 520, "16"), ("shared", 600, "linear"),
    ("experts", 2000, "1024"), ("H", 16384, "shared memory"),
])  # fmt: skip
def test_what_the_kernels_cannot_hold_is_refused(axis: str, value: int, word: str) -> None:
    axes: dict[str, int | str] = {
        "T": 128,
        "experts": 256,
        "top_k": 8,
        "H": 2048,
        "F": 512,
        "shared": 512,
        "dtype": "bf16",
    }
    candidate = cuda_experts.CANDIDATES[0]
    assert candidate.refuses(Workload("", axes)) == ""
    assert word in candidate.refuses(Workload("", axes | {axis: value}))


def test_few_tokens_take_one_launch() -> None:
    """As far as a thread an expert goes."""
    axes = dict(BY_ID["t8_e256_k8_h2048_f512_s512"].axes)
    for tokens, experts, wanted in ((1, 256, 1), (16, 512, 1), (8, 513, 2), (17, 256, 2)):
        workload = Workload("", axes | {"T": tokens, "experts": experts})
        assert 2.0 - ("_routed" in cuda_experts.described(workload)) == wanted
        assert cuda_experts.work(workload, hopper.SMS).in_turn["launches"] == wanted


@pytest.mark.parametrize(("tokens", "experts", "prefetch"), [(63, 256, 0), (64, 256, 8), (64, 257, 0), (9, 8, 0)])
def test_weights_are_prefetched_where_most_experts_have_tokens(tokens: int, experts: int, prefetch: int) -> None:
    """And no choice is waited for in the same launch."""
    axes = dict(BY_ID["t128_e256_k8_h2048_f512_s512"].axes) | {"T": tokens, "experts": experts}
    assert cuda_experts.chosen(Workload("", axes)).prefetch == prefetch


@pytest.mark.parametrize("tokens", [1, 8, 17, 32, 128])
@pytest.mark.parametrize(("width", "inner", "busy"), [(2048, 512, 0.96), (2816, 704, 0.98)])
def test_nine_tenths_of_the_multiprocessors_add_up_y(tokens: int, width: int, inner: int, busy: float) -> None:
    config = cuda_experts.choose_config(tokens, width, inner, "bf16")
    assert config.groups * config.parts / hopper.SMS >= busy
    assert config.groups * config.row_tiles * 16 >= width


@pytest.mark.slow
@pytest.mark.parametrize("source", cuda_experts.CUDA_SOURCES, ids=lambda s: s.kernels[0])
def test_sources_compile_without_spills(source: Any) -> None:
    (row,) = aot_worker.compile_cuda(source, 90)
    assert (row["status"], row["fits"], row["spill_bytes"]) == ("ok", True, 0), row
    if source.path == cuda_experts.SOURCE:
        assert row["instruction"].startswith("mma.sync m16n8k16")
        teams = int(source.kernels[0].partition("teams")[2][0])
        assert row["registers"] <= 65536 // (32 * (cuda_experts.WARPS * teams + 6))


ON_A_GPU = [w for w in cases.WORKLOADS if not cuda_experts.CANDIDATES[0].refuses(w)]


@pytest.mark.gpu
@pytest.mark.parametrize("workload", ON_A_GPU, ids=lambda w: w.id)
def test_on_a_gpu_within_tolerance_and_the_same_bits_captured(workload: Workload) -> None:
    skip_unless_hopper()
    run = cuda_experts.run
    given = cases.inputs(workload, 1, "cuda")
    kept = cuda_experts.prepare(given) | {name: given[name] for name in cases.ACTIVATIONS}
    wanted, limit = reference(given)["y"], cases.tolerance(workload, cuda_experts.PRECISION)["y"]
    out = cases.outputs(workload, given)
    run(kept, out)
    first = out["y"].clone()
    assert compare("y", first, wanted, limit).ok
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(kept, out)
    for _ in range(20):
        out["y"].fill_(float("nan"))
        graph.replay()
        assert torch.equal(out["y"], first)
    # Another routing in the same graph: nothing of the choice is in it.
    other = cases.activations(workload, 7, "cuda")
    for name, tensor in other.items():
        kept[name].copy_(tensor)
    graph.replay()
    assert compare("y", out["y"], reference(given | other)["y"], limit).ok
