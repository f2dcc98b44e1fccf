"""kernels/moe/router_once.cu for few tokens as it is, run on a CPU. Of many tokens: test_moe_many_cpu.py."""

from __future__ import annotations

import ctypes

import pytest
import torch

from kernels.common import Workload
from kernels.moe import cases, cuda_experts
from tests.kernels.on_cpu.moe_on_cpu import FP16, ONE, Simulated, on_cpu, right, sorted_choice
from tests.kernels.on_cpu.stand_in import UNCHANGED, Change, needs_compiler, unless_stopped

BLOCK, WIDTH, COUNTERS = cuda_experts.BLOCK_TOKENS, 128, 5
OF_K = [64 * i + 16 * j + 8 * upper + 2 * t + e for i in range(2) for t in range(4) for j in range(4)
        for upper in range(2) for e in range(2)]  # fmt: skip
"""The k of a row of x in the order that a warp's quads multiply: see kernels/nvfp4/row_tiles.py."""


def _routed(
    simulated: Simulated, calls: tuple[int, ...], experts: int, top_k: int, routing: str, change: Change = UNCHANGED
) -> bool:
    """Whether rows and blocks are the reference's choice, sorted by expert and then by token, and x is dealt.

    calls: of so many tokens on one scratch, as each leaves the next one its counters.
    """
    source, warps = cuda_experts.router_source(experts, "bf16"), cuda_experts.router_warps(experts)
    kernel, gate, most = on_cpu(source, change), torch.randn(WIDTH).to(torch.bfloat16), max(calls)
    masks = torch.zeros(-(-most // warps) * experts, dtype=torch.int32)
    turns, dealt = torch.zeros(3, dtype=torch.int32), torch.zeros(most, WIDTH, dtype=torch.bfloat16)
    for seed, tokens in enumerate(calls):
        axes: dict[str, int | str] = {
            "T": tokens, "experts": experts, "top_k": top_k, "H": WIDTH, "routing": routing, "dtype": "bf16",
        }  # fmt: skip
        given = cases.activations(Workload("", axes), 3 + seed, "cpu")
        given["logits"] -= 3  # so that some of those chosen are negative
        pairs, routers = tokens * (top_k + 1), -(-tokens // warps)
        rows, blocks = (torch.full((pairs + 1, 2), -1, dtype=torch.int32) for _ in range(2))
        state, chosen_pairs = torch.full((2 + COUNTERS,), 9, dtype=torch.int32), torch.zeros(pairs, 2).int()
        state[1] = 0
        arguments = (given["logits"], given["x"], gate, chosen_pairs, masks, rows, blocks, state, tokens, WIDTH, top_k,
                     COUNTERS, turns, dealt, routers)  # fmt: skip
        addresses = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
        grid, bytes_ = routers + -(-tokens * WIDTH // 8 // (32 * warps)), cuda_experts.router_shared_bytes(experts)
        kernel.simulated(*addresses, *map(ctypes.c_int, (grid, 32 * warps, bytes_, simulated.seed + seed)))

        by_expert, listed = sorted_choice(given, gate, top_k, BLOCK)
        odds = torch.tensor([p for *_, p in by_expert])
        if not (
            blocks[: state[0]].tolist() == listed
            and not state[1:].any()
            and (int(turns[0]), int(turns[1 + turns[0]])) == ((seed + 1) % 2, 0)  # what the next one counts in
            and rows[:-1, 0].tolist() == [t for _, t, _ in by_expert]
            and bool(((rows[:-1, 1].view(torch.float32) - odds).abs() <= 1e-5 * odds).all())
            and torch.equal(dealt[:tokens], given["x"][:, OF_K])
        ):
            return False
    return True


ROUTINGS = [((1,), 8, 2, "uniform"), ((9, 3, 9), 300, 8, "uniform"), ((40,), 40, 5, "zipf"), ((128, 75), 16, 3, "one")]


@needs_compiler
@pytest.mark.parametrize(("calls", "experts", "top_k", "routing"), ROUTINGS)
def test_the_router_sorts_the_choice_and_deals_x(monkeypatch, calls, experts, top_k, routing):
    assert _routed(Simulated(monkeypatch, 4), calls, experts, top_k, routing)


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("if (lane == leader && i == which) keys[i] = 0;", ""),
        ("(bits >> 31 ? ALL : 0x80000000u)", "0x80000000u"),
        ("odds / all", "odds"),
        ("c < counters; c += THREADS", "c < 1; c += THREADS"),
        ("% TOKENS) - 1)", "% 2) - 1)"),
        ("turns[TURN] = 1 - turn;", ""),
        ("FEW ? FEW_TOKENS : 32", "FEW ? 2 * FEW_TOKENS : 32"),
        ("blockIdx.x - routers) * THREADS", "blockIdx.x - routers) * 32"),
        ("piece >= tokens * (width / 8)", "piece >= 32"),
        ("to[8] = words.y, to[16] = words.z", "to[16] = words.y, to[8] = words.z"),
        ("dealt_place(8 * (piece % 8)) / 2", "dealt_place(8 * (piece % 8 ^ 1)) / 2"),  # within what is there
    ],
)
def test_the_simulation_sees_mistakes_in_the_router(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    simulated = Simulated(monkeypatch, 4)
    assert not unless_stopped(lambda: _routed(simulated, (75, 40, 75), 40, 5, "zipf", change))


@needs_compiler
def test_a_mistake_in_what_is_dealt_is_seen_in_y(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = Simulated(monkeypatch, 3, stages=2)
    simulated.changes = {cuda_experts.ONCE_SOURCE: ("to[8] = words.y, to[16]", "to[16] = words.y, to[8]")}
    assert not unless_stopped(lambda: right(simulated, FP16))


@needs_compiler
def test_a_negative_zero_and_infinite_logits_are_taken_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    given = cases.inputs(ONE, 0)
    given["logits"] = torch.tensor([[-1.0, -0.0, -2.0, float("-inf"), -3.0, 1e-30, -1e-30, -5.0]])
    Simulated(monkeypatch, 5)
    kept = cuda_experts.prepare(given) | {name: given[name] for name in cases.ACTIVATIONS}
    cuda_experts.run(kept, cases.outputs(ONE, given))
    assert sorted(kept["blocks"][:2, 0].bitwise_and(0xFFFF).tolist()) == [1, 5]
