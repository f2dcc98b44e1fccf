"""kernels/moe/router.cu and router_once.cu as they are, run on a CPU."""

from __future__ import annotations

import ctypes

import pytest
import torch

from kernels.common import Workload
from kernels.moe import cases, cuda_experts, cuda_many
from kernels.moe.reference import routed
from tests.kernels.on_cpu.moe_on_cpu import BY_ID, Simulated, on_cpu
from tests.kernels.on_cpu.stand_in import UNCHANGED, Change, needs_compiler, unless_stopped


def _by_router(
    monkeypatch: pytest.MonkeyPatch, experts: int, once: bool, calls: tuple[int, ...], change: Change = UNCHANGED
) -> list[torch.Tensor]:
    """y and the lists of calls of so many tokens on one scratch, by router.cu or by router_once.cu."""
    workload = cases._workload(75, experts, 5, 64, 48, "zipf", shared=32)
    given = cases.inputs(workload, 1)
    simulated = Simulated(monkeypatch, 5, teams=2, n_tiles=1, round_items=5, h_stages=2)
    simulated.changes = {cuda_many.ONCE_SOURCE: change}
    kept = cuda_experts.prepare(given)
    found = []
    for seed, tokens in enumerate(calls):
        simulated.seed = seed
        own = {name: t[:tokens] for name, t in cases.activations(workload, seed, "cpu").items()}
        y = torch.full_like(own["x"], float("nan"))
        cuda_experts.run(kept | own, {"y": y}, once=once)
        found += [y, kept["rows"][: 6 * tokens].clone(), kept["blocks"][: kept["state"][0]].clone()]
    monkeypatch.undo()
    return found


@needs_compiler
@pytest.mark.parametrize("experts", [40, 300])
def test_the_router_of_one_wait_leaves_the_same(monkeypatch: pytest.MonkeyPatch, experts: int) -> None:
    """To the bit, of one block of tokens and of ten."""
    both = [_by_router(monkeypatch, experts, once, (75, 9, 17, 75)) for once in (False, True)]
    assert [torch.equal(a, b) for a, b in zip(*both, strict=True)] == [True] * 12


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("c < counters; c += THREADS", "c < 1; c += THREADS"),
        ("% TOKENS) - 1)", "% 2) - 1)"),
        ("turns[TURN] = 1 - turn;", ""),
        ("FEW ? FEW_TOKENS : 32", "FEW ? 2 * FEW_TOKENS : 32"),
    ],
)
def test_the_simulation_sees_mistakes_in_the_router_of_one_wait(monkeypatch, change: Change) -> None:
    calls = 75, 75, 75  # what an earlier one left is of tokens that are there
    wanted = _by_router(monkeypatch, 40, False, calls)

    def same() -> bool:
        found = _by_router(monkeypatch, 40, True, calls, change)
        return all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))

    assert not unless_stopped(same)


def _routed(simulated: Simulated, tokens: int, experts: int, top_k: int, block_tokens: int, routing: str) -> bool:
    """Whether router.cu's rows and blocks are the reference's choice, sorted by expert and then by token."""
    axes: dict[str, int | str] = {
        "T": tokens, "experts": experts, "top_k": top_k, "H": 64, "routing": routing, "dtype": "bf16",
    }  # fmt: skip
    given = cases.activations(Workload("", axes), 3, "cpu")
    given["logits"] -= 3  # so that some of those chosen are negative
    gate = torch.randn(64).to(torch.bfloat16)
    pairs = tokens * (top_k + 1)
    source = cuda_experts.router_source(experts, "bf16", block_tokens)
    rows, blocks = torch.full((pairs, 2), -1, dtype=torch.int32), torch.full((pairs + 1, 2), -1, dtype=torch.int32)
    state = torch.full((7,), 9, dtype=torch.int32)
    state[1] = 0
    scratch = torch.zeros(pairs, 2, dtype=torch.int32), torch.zeros(tokens, -(-experts // 32), dtype=torch.int32)
    warps = cuda_experts.router_warps(experts)
    arguments = (given["logits"], given["x"], gate, *scratch, rows, blocks, state, tokens, 64, top_k, 5)
    kernel = on_cpu(source, simulated.changes.get(source.path, UNCHANGED))
    addresses = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
    bytes_ = cuda_experts.router_shared_bytes(experts)
    kernel.simulated(*addresses, *map(ctypes.c_int, (-(-tokens // warps), 32 * warps, bytes_, simulated.seed)))

    chosen, weight = routed(given["logits"], top_k)
    share = torch.sigmoid(given["x"].double() @ gate.double())
    by_expert = sorted((e, t, float(weight[t, j])) for t in range(tokens) for j, e in enumerate(chosen[t].tolist()))
    by_expert += [(experts, t, float(share[t])) for t in range(tokens)]
    listed = []
    for e in range(experts + 1):
        its = [i for i, (of, *_) in enumerate(by_expert) if of == e]
        cuts = [its[i : i + block_tokens] for i in range(0, len(its), block_tokens)]
        listed += [[e | len(cut) << 16, cut[0]] for cut in cuts]
    odds = torch.tensor([p for *_, p in by_expert])
    return (
        blocks[: state[0]].tolist() == listed
        and not state[1:].any()
        and rows[:, 0].tolist() == [t for _, t, _ in by_expert]
        and bool(((rows[:, 1].view(torch.float32) - odds).abs() <= 1e-5 * odds).all())
    )


ROUTINGS = [(1, 8, 2, 8, "uniform"), (9, 300, 8, 8, "uniform"), (40, 40, 5, 16, "zipf"), (128, 16, 3, 16, "one")]


@needs_compiler
@pytest.mark.parametrize(("tokens", "experts", "top_k", "block_tokens", "routing"), ROUTINGS)
def test_the_router_sorts_the_choice(monkeypatch, tokens, experts, top_k, block_tokens, routing):
    assert _routed(Simulated(monkeypatch, 4), tokens, experts, top_k, block_tokens, routing)


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("if (lane == leader && i == which) keys[i] = 0;", ""),
        ("(bits >> 31 ? ALL : 0x80000000u)", "0x80000000u"),
        ("(1u << (t & 31)) - 1", "(2u << (t & 31)) - 1"),
        ("== gridDim.x - 1", "== gridDim.x"),
        ("count - begin) << 16", "count) << 16"),
        ("if (w == warp) upto += total;", ""),
        ("state[1] = 0", "state[1] = 1"),
        ("odds / all", "odds"),
    ],
)
def test_the_simulation_sees_mistakes_in_the_router(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    simulated = Simulated(monkeypatch, 4)
    simulated.changes = {cuda_experts.ROUTER_SOURCE: change}
    assert not unless_stopped(lambda: _routed(simulated, 40, 40, 5, 16, "zipf"))


@needs_compiler
def test_a_negative_zero_and_infinite_logits_are_taken_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    w = BY_ID["t1_e8_k2_h64_f32_bf16"]
    given = cases.inputs(w, 0)
    given["logits"] = torch.tensor([[-1.0, -0.0, -2.0, float("-inf"), -3.0, 1e-30, -1e-30, -5.0]])
    kept = cuda_experts.prepare(given) | {name: given[name] for name in cases.ACTIVATIONS}
    Simulated(monkeypatch, 5)
    kept = cuda_experts.prepare(given) | {name: given[name] for name in cases.ACTIVATIONS}
    cuda_experts.run(kept, cases.outputs(w, given))
    assert sorted(kept["blocks"][:2, 0].bitwise_and(0xFFFF).tolist()) == [1, 5]
