"""kernels/moe/experts.cu and experts_teams.cu as they are, run on a CPU, and compiled ahead of time."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from kernels.common import Workload
from kernels.moe import cases, cuda_experts
from kernels.moe.controls import cuda_levers
from kernels.moe.reference import reference
from kernels.nvfp4 import hopper
from lab.check import aot_worker
from lab.check.accuracy import compare
from tests.kernels.on_cpu.moe_on_cpu import (
    AHEAD,
    BY_ID,
    EARLY,
    EARLY_WORDS,
    FP16,
    ONE_ROUTED,
    Simulated,
    each_call_is_right,
    right,
)
from tests.kernels.on_cpu.nvfp4_on_cpu import skip_unless_hopper
from tests.kernels.on_cpu.stand_in import UNCHANGED, Change, needs_compiler, unless_stopped


@needs_compiler
@pytest.mark.parametrize(
    ("name", "sms", "levers"),
    [
        ("t1_e8_k2_h64_f32_bf16", 5, {}),
        ("t2_e8_k2_h80_f48_s32_bf16", 5, {}),
        ("t8_e16_k4_h64_f48_zipf_fp16", 4, {"round_items": 2}),
        ("t17_e8_k2_h128_f64_one_s64_bf16", 8, {}),
        ("t63_e5_k3_h64_f80_bf16", 3, {"stages": 2, "round_items": 3, "h_stages": 1}),
        ("t75_e32_k8_h80_f32_zipf_bf16", 6, {}),
        *(
            (name, sms, {"teams": teams, "n_tiles": 1, "round_items": 5, **more})
            for name, sms, teams, more in (
                ("t1_e8_k2_h64_f32_bf16", 5, 2, {}),
                ("t2_e8_k2_h80_f48_s32_bf16", 5, 1, {"stages": 3}),
                ("t8_e16_k4_h64_f48_zipf_fp16", 4, 2, {"h_stages": 2}),
                ("t17_e8_k2_h128_f64_one_s64_bf16", 8, 2, {}),
                ("t63_e5_k3_h64_f80_bf16", 3, 1, {"stages": 2}),
                ("t75_e32_k8_h80_f32_zipf_bf16", 6, 2, {"stages": 6}),
                ("t75_e32_k8_h80_f32_zipf_bf16", 6, 2, {"stages": 6, "prefetch": 4}),
                ("t17_e8_k2_h128_f64_one_s64_bf16", 8, 2, {"prefetch": 2}),
                ("t1_e8_k2_h64_f32_bf16", 5, 2, {"routed": True}),
                ("t2_e8_k2_h80_f48_s32_bf16", 5, 2, {"routed": True}),
                ("t8_e16_k4_h64_f48_zipf_fp16", 4, 2, {"routed": True, "h_stages": 2}),
                ("t1_e8_k2_h64_f32_bf16", 5, 2, {"routed": True, "h_rows": 1, "h_stages": 4, "stages": 8}),
                ("t2_e8_k2_h80_f48_s32_bf16", 5, 2, {"routed": True, "h_rows": 2, "switches": EARLY}),
                ("t8_e16_k4_h64_f48_zipf_fp16", 4, 2, {"routed": True, "row_tiles": 2, "parts": 2, "switches": EARLY}),
                ("t8_e16_k4_h64_f48_zipf_fp16", 4, 2, {"routed": True, "h_stages": 2, "switches": EARLY}),
                ("t17_e8_k2_h128_f64_one_s64_bf16", 8, 2, {"routed": True, "most_tokens": 32, "switches": AHEAD}),
                ("t1_e8_k2_h64_f32_bf16", 5, 2, {"routed": True, "most_tokens": 32}),
                ("t9_e8_k2_h128_f128_s128_bf16", 5, 2, {"one_layout": True}),
                ("t9_e8_k2_h128_f128_s128_bf16", 5, 2, {**ONE_ROUTED, "most_tokens": 16, "x_rows": 16}),
                ("t17_e8_k2_h128_f64_one_s64_bf16", 8, 2, {"one_layout": True, "stages": 4}),
                ("t63_e5_k3_h192_f128_fp16", 3, 1, {"one_layout": True, "stages": 2}),
            )
        ),
    ],
)
def test_the_kernels_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch, name: str, sms: int, levers: dict[str, int]) -> None:
    assert right(Simulated(monkeypatch, sms, **levers), BY_ID.get(name) or FP16)


@needs_compiler
@pytest.mark.parametrize(("tokens", "width", "inner", "sms"), [(12, 528, 144, 9), (9, 1040, 528, 17)])
@pytest.mark.parametrize("levers", [{}, {"teams": 2, "n_tiles": 1}], ids=["one", "teams"])
def test_the_kernels_walk_several_tiles_of_k(monkeypatch, tokens, width, inner, sms, levers):
    """More than one tile a warp in both products, with warps that have one less, and a last tile that is not full."""
    assert right(Simulated(monkeypatch, sms, **levers), cases._workload(tokens, 3, 2, width, inner))


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("weights.init(1, WARPS)", "weights.init(1, 1)"),
        ("hidden.init(1, WARPS)", "hidden.init(1, 1)"),
        ("ld_acquire(block_items + index) >= UP_ROWS", "ld_acquire(block_items + index) >= 1"),
        ("__ffs(others) - 1 : 32", "__ffs(others) : 32"),
        ("atomic_add_acq_rel(block_items + index, items)", "atomic_add_acq_rel(block_items + index, 1)"),
        ("if (use > 0) mbarrier_wait", "if (0) mbarrier_wait"),
        ("group_parts + group) < PARTS", "group_parts + group) < 1"),
        ("(8 * b + g) * H_ROW + 2 * k", "(8 * b + g) * H_BYTES + 2 * k"),
        ("line.at / UP_ROWS != loaded_block", "loaded_block < 0"),
        ("OPERAND_TO_VALUE = 128", "OPERAND_TO_VALUE = 127"),
        ("weight = __uint_as_float(row.y) * scale", "weight = scale"),
        ("p < PARTS; p++", "p < PARTS - 1; p++"),
        ("round % 2 ? workers - 1 - worker : worker", "worker / 2"),
    ],
)
def test_the_simulation_sees_mistakes_in_the_experts(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    simulated = Simulated(monkeypatch, 8, stages=2, round_items=3, h_stages=1)
    simulated.changes = {cuda_experts.SOURCE: change}
    assert not unless_stopped(lambda: right(simulated, BY_ID["t17_e8_k2_h128_f64_one_s64_bf16"], 4))


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
    def sound(sms: int, name: str, **levers: int) -> bool:
        simulated = Simulated(monkeypatch, sms, teams=2, n_tiles=1, round_items=5, h_stages=2, **levers)
        simulated.changes = {cuda_experts.TEAMS_SOURCE: change}
        found = unless_stopped(lambda: right(simulated, BY_ID[name], 4))
        monkeypatch.undo()
        return found

    assert not (
        sound(8, "t17_e8_k2_h128_f64_one_s64_bf16", stages=2, row_tiles=4, parts=1)
        and sound(4, "t8_e16_k4_h64_f48_zipf_fp16")
    )


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        UNCHANGED,
        ("state[1] = which ^ 1;", ""),
        ("THREADS) state[other + i] = 0;", "THREADS) continue;"),
        ("            state[0] = 0;", ""),
        ("make_uint2(EXPERTS, __float_as_uint(share))", "make_uint2(EXPERTS, 0)"),
        ("i == which) keys[i] = 0;", "i == which) keys[i] += 0;"),
        ("logits + static_cast<size_t>(token) * EXPERTS + e", "logits + e"),
        ("weigh(warp - MOST_TOKENS);", "weigh(0 * warp);"),
        ("__float_as_uint(odds / all)", "__float_as_uint(odds)"),
        ("state[1] = first == 2;", ""),
        ("i < bank; i += 32) state[other + i] = 0;", "i < 1; i += 32) state[other + i] = 0;"),
        ("(keys[i] == most) << i", "(keys[i] == most) << 0"),
    ],
)
def test_the_simulation_sees_mistakes_where_the_teams_route(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    def sound(workload: Workload, sms: int) -> bool:
        simulated = Simulated(
            monkeypatch, sms, teams=2, n_tiles=1, round_items=5, h_stages=2, routed=True, switches=switches
        )
        simulated.changes = {cuda_experts.TEAMS_SOURCE: change}
        found = unless_stopped(lambda: each_call_is_right(simulated, workload, 4))
        monkeypatch.undo()
        return found

    # Text of one form alone; the other form's is tried in its own kernel.
    switches = EARLY if any(word in change[0] for word in EARLY_WORDS) else ()
    wide = cases._workload(7, 40, 5, 64, 48, shared=32)
    if change == UNCHANGED:
        assert sound(wide, 5)
        return
    assert not (sound(wide, 5) and sound(BY_ID["t8_e16_k4_h64_f48_zipf_fp16"], 4))


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
def test_the_simulation_sees_mistakes_where_the_teams_route_more_tokens(monkeypatch, change: Change) -> None:
    """More than there are warps, and experts of several blocks."""
    routing = {"routed": True, "most_tokens": 32, "switches": AHEAD}
    simulated = Simulated(monkeypatch, 5, teams=2, n_tiles=1, round_items=5, h_stages=2, **routing)
    simulated.changes = {cuda_experts.TEAMS_SOURCE: change}
    workload = cases._workload(27, 6, 3, 64, 48, "zipf", shared=32)
    assert unless_stopped(lambda: each_call_is_right(simulated, workload, 3)) == (change == UNCHANGED)


@needs_compiler
@pytest.mark.parametrize("most", [8, 32])
def test_routed_inside_the_bits_are_those_of_two_launches(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Of calls with fewer and more tokens on one scratch too."""
    workload = cases._workload(most, 40, 5, 64, 48, "zipf", shared=32)
    given = cases.inputs(workload, 1)
    found = []
    routing = {"routed": True, "most_tokens": most}
    for levers in ({"routed": False}, routing, routing | {"switches": EARLY}):
        simulated = Simulated(monkeypatch, 5, teams=2, n_tiles=1, round_items=5, h_stages=2, **levers)
        kept = cuda_experts.prepare(given)
        for seed, tokens in enumerate((most, 3, 1, most)):
            simulated.seed = seed
            own = {name: given[name][:tokens] for name in cases.ACTIVATIONS}
            y = torch.empty_like(given["x"][:tokens])
            cuda_experts.run(kept | own, {"y": y})
            found.append(y)
        monkeypatch.undo()
    assert [torch.equal(a, b) for a, b in zip(2 * found[:4], found[4:], strict=True)] == [True] * 8


@needs_compiler
def test_scratch_for_more_tokens_serves_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a layer keeps it for all its calls, whatever the last one left there."""
    simulated = Simulated(monkeypatch, 8)
    most = BY_ID["t17_e8_k2_h128_f64_one_s64_bf16"]
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
    ("T", 129, "triton_experts"), ("H", 88, "16"), ("shared", 600, "linear"), ("experts", 2000, "1024"),
    ("H", 16384, "shared memory"),
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
    """As far as a thread an expert goes, and not in the arm that compares."""
    axes = dict(BY_ID["t8_e256_k8_h2048_f512_s512"].axes)

    def launches(name: str, **other: int) -> float:
        candidates = {c.name: c for c in (*cuda_experts.CANDIDATES, *cuda_levers.CANDIDATES)}
        return 2.0 - ("_routed" in candidates[name].config(Workload("", axes | other)))

    for tokens, experts, wanted in ((1, 256, 1), (16, 512, 1), (8, 513, 2), (17, 256, 2)):
        workload = Workload("", axes | {"T": tokens, "experts": experts})
        assert launches("cuda_experts", T=tokens, experts=experts) == wanted
        assert cuda_experts.work(workload, hopper.SMS).in_turn["launches"] == wanted
        assert launches("experts_router_launch", T=tokens, experts=experts) == 2


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
    """But for two words that a math warp reads once a turn behind its waits, where it routes and has two row tiles."""
    (row,) = aot_worker.compile_cuda(source, 90)
    allowed = 8 if "routed" in source.kernels[0] and "_r2_" in source.kernels[0] else 0
    assert (row["status"], row["fits"]) == ("ok", True), row
    assert row["spill_bytes"] <= allowed
    if source.path == cuda_experts.TEAMS_SOURCE:
        assert row["instruction"].startswith("mma.sync m16n8k16")
        teams = int(source.kernels[0].partition("teams")[2][0])
        assert row["registers"] <= 65536 // (32 * (cuda_experts.WARPS * teams + 6))


ON_A_GPU = [w for w in cases.WORKLOADS if not cuda_experts.CANDIDATES[0].refuses(w)]


@pytest.mark.gpu
@pytest.mark.parametrize("workload", ON_A_GPU, ids=lambda w: w.id)
@pytest.mark.parametrize("arm", ["", "experts_router_launch", "experts_early"])
def test_on_a_gpu_within_tolerance_and_the_same_bits_captured(workload: Workload, arm: str) -> None:
    skip_unless_hopper()
    if arm and workload["T"] > cuda_experts.ROUTED_MAX:
        pytest.skip("the same there")
    choose = cuda_levers.LEVERS[arm] if arm else cuda_experts.choose_config
    run = functools.partial(cuda_experts.run, choose=choose)
    given = cases.inputs(workload, 1, "cuda")
    kept = cuda_experts.prepare(given, choose) | {name: given[name] for name in cases.ACTIVATIONS}
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
