"""The one layout in the mixture's kernel for few tokens (controls/cuda_one.py), on a CPU and compiled ahead of time."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.moe import cases, cuda_experts
from kernels.moe.controls import cuda_one
from lab.check import aot_worker
from tests.kernels.on_cpu.moe_on_cpu import AHEAD, BY_ID, EARLY, FP16, ONE_ROUTED, Simulated, right
from tests.kernels.on_cpu.stand_in import UNCHANGED, Change, StandIn, needs_compiler, unless_stopped


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("+ 16 * t + 4 * j + 2 * upper", "+ 16 * t + 4 * j"),
        ("TILE_CODE_BYTES + 8 * (lane / 4)", "TILE_CODE_BYTES + 8 * (lane / 8)"),
        ("t = k / 2 % 4;", "t = k / 4 % 4;"),
    ],
)
def test_the_simulation_sees_mistakes_in_the_one_layout(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    simulated = Simulated(monkeypatch, 5, teams=2, n_tiles=1, round_items=5, h_stages=2, one_layout=True)
    simulated.changes = {cuda_experts.TEAMS_SOURCE: change}
    assert not unless_stopped(lambda: right(simulated, BY_ID["t9_e8_k2_h128_f128_s128_bf16"]))


X_HERE = {**ONE_ROUTED, "teams": 2, "n_tiles": 1, "round_items": 5}


@needs_compiler
@pytest.mark.parametrize(
    ("tokens", "rows", "switches"),
    [(1, {"h_rows": 4, "x_rows": 4}, AHEAD), (2, {"h_rows": 4, "x_rows": 4}, EARLY), (7, {"x_rows": 8}, ())],
)
def test_x_is_copied_while_a_cta_chooses(
    monkeypatch: pytest.MonkeyPatch, tokens: int, rows: dict[str, int], switches: tuple[str, ...]
) -> None:
    """x of nine tiles of k, one more than a team has warps, with a shared expert."""
    workload = cases._workload(tokens, 5, 3, 576, 128, shared=64)
    assert right(Simulated(monkeypatch, 10, **X_HERE, **rows, switches=switches), workload)


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
    simulated = Simulated(monkeypatch, 10, **X_HERE, x_rows=8)
    simulated.changes = {cuda_experts.TEAMS_SOURCE: change}

    def load(*source: Any) -> StandIn:
        kernel = simulated.load(*source)
        kernel.slow_copies()
        return kernel

    monkeypatch.setattr(cuda_experts.cuda, "load", load)
    found = unless_stopped(lambda: right(simulated, cases._workload(4, 5, 3, 576, 128, shared=64)))
    assert found == (change == UNCHANGED)


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("blockIdx.x - routers) * THREADS", "blockIdx.x - routers) * 32"),
        ("piece >= tokens * (width / 8)", "piece >= 32"),
        ("to[8] = words.y, to[16] = words.z", "to[16] = words.y, to[8] = words.z"),
        ("dealt_place(8 * (piece % 8)) / 2", "dealt_place(8 * (piece % 8 ^ 1)) / 2"),  # within what is there
    ],
)
def test_the_simulation_sees_mistakes_where_the_router_deals(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    levers = {"one_layout": True, "teams": 1, "n_tiles": 1, "round_items": 5, "stages": 2}
    simulated = Simulated(monkeypatch, 3, **levers)
    simulated.changes = {cuda_experts.ONCE_SOURCE: change}
    assert not unless_stopped(lambda: right(simulated, FP16))


@pytest.mark.slow
@pytest.mark.parametrize(
    "source", [s for s in cuda_one.CUDA_SOURCES if s.path == cuda_experts.TEAMS_SOURCE], ids=lambda s: s.kernels[0]
)
def test_sources_compile_without_spills(source: Any) -> None:
    (row,) = aot_worker.compile_cuda(source, 90)
    assert (row["status"], row["fits"], row["spill_bytes"]) == ("ok", True, 0), row
    assert row["instruction"].startswith("mma.sync m16n8k16")
