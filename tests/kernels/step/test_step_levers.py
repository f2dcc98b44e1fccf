"""The levers of a step: what each promises, which exclude each other, and the memory that a configuration takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import timeit
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from kernels.common import Tensors, has_triton, interpreted
from kernels.kv import format as kv_format
from kernels.nvfp4 import format as nvfp4
from kernels.step import cases, torch_eager, wiring
from kernels.step.config import NAMED, PROMPT, PROMPT_PACKED, STAIRCASE, Config, fastest, memory, of
from lab.base.errors import REPOSITORY
from lab.check import accuracy, families

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(
    not has_triton() or (DEVICE == "cpu" and not interpreted()), reason="needs Triton, on a GPU or in its interpreter"
)
BY_ID = {w.id: w for w in cases.WORKLOADS}
CPU = DEVICE == "cpu"  # kernels on a GPU are for heads of 64 and 128
DECODE = BY_ID["decode_odd_npl3_ctx17" if CPU else "decode_small_npl5_ctx33"]
MIXED = BY_ID["mixed_odd_npl3_n1-12-1_ctx6" if CPU else "prefill_small_npl2_t9_ctx15"]
MANY = BY_ID["prefill_small_l4_npl2_t49_ctx0"]
MIXTURE = BY_ID["decode_odd-moe_npl3_ctx17" if CPU else "decode_small-moe_npl5_ctx33"]
PERMUTED = 1  # a seed whose rows are not 0, 1, 2
SAME = {  # lever: what it must equal bit for bit
    "served_gathered": "served_apart", "served_copied": "served_apart", "stock_in_place": "stock",
    "stock_by_id": "stock", "stock_2d": "served_apart", "served_per_sequence": "served", "served_alpha_beta": "served",
    "served_packed": "served", "served_few_packed": "served_few_gated", "served_gate_up": "served",
    "served_few_state": "served_few_packed", "served_few_attention": "served_few_packed",
    "served_few_router_norms": "served_few_router",
    "served_few_norms": "served_few_ends",
    "served_few_qkv": "served_few_ends",
    "served_many_router_chained": "served_many_router",
    "served_many_chained": "served_many_packed", "served_many_gated_chained": "served_many_gated",
    "served_all_logits": "served", "served_scratch": "served",
    "served_replayed": "served", "served_replayed_waits": "served", "served_fused_scan": "served",
    "served_split_scan": "served",
}  # fmt: skip


@cache
def step(name: str, at: str = DECODE.id, seed: int = 0, times: int = 1) -> Tensors:
    workload = BY_ID[at]
    family = families.load("step")
    candidate = family.candidate(name)
    inputs = cases.inputs(workload, seed, DEVICE)
    out = cases.outputs(workload, inputs)
    args = accuracy.prepared(family, candidate, inputs)
    for _ in range(times):
        candidate.run(args, out)
    return out


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("name", NAMED)
def test_a_lever_is_a_step(name: str) -> None:
    family = families.load("step")
    workload = next(w for w in (DECODE, MIXED, MIXTURE, MANY) if not NAMED[name].refuses(w))
    found = accuracy.check(family, family.candidate(name), workload, 0, DEVICE)
    assert found.status == "ok", found.message


@needs_triton
@pytest.mark.slow  # two steps in Triton's interpreter for each; that a lever is a step at all is quick
@pytest.mark.parametrize("workload", [DECODE, MIXED], ids=lambda w: w.id)
@pytest.mark.parametrize(("name", "control"), SAME.items())
def test_what_a_lever_must_not_change_has_the_same_bits(name: str, control: str, workload: Any) -> None:
    if Config().refuses(workload) or NAMED[name].refuses(workload):
        return
    times = 2 if workload is DECODE else 1  # a graph is replayed from the second call on
    got, wanted = (step(n, workload.id, PERMUTED, times) for n in (name, control))
    for output in wanted:
        if DEVICE == "cpu" or output == "next_token":
            assert torch.equal(got[output], wanted[output]), output


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("workload", [DECODE, MIXED, MIXTURE], ids=lambda w: w.id)
def test_the_fastest_step_has_the_levers_of_its_number_of_tokens(workload: Any) -> None:
    wanted = of("served_fastest", workload)
    name = next(name for name, config in NAMED.items() if replace(config, qkv=wanted.qkv) == wanted)
    got, expected = (step(n, workload.id, PERMUTED) for n in ("served_fastest", name))
    assert all(torch.equal(got[output], expected[output]) for output in expected)
    assert families.load("step").candidate("served_fastest").config(workload) == str(wanted)


def test_which_levers_are_fastest_is_asked_of_tokens() -> None:
    found = [str(fastest([1] * n, mixture=False)) for n in (1, 2, 8, 9, 96, 97, 128, 129)]
    assert found[0] != found[1] == found[2] != found[3] == found[4] != found[5] == found[6] != found[7] == "served"
    assert fastest([1, 2], mixture=False) == fastest([2048], mixture=False) == PROMPT_PACKED
    assert fastest([2048], mixture=True) == PROMPT
    assert fastest([1], mixture=True) != fastest([1], mixture=False)
    for workload in cases.WORKLOADS:
        assert of("served_fastest", workload).refuses(workload) == "", workload.id


def divergence(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the softmax of logits, the mean KL in nats."""
    p, q = wanted.double().log_softmax(-1), got.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@needs_triton
def test_a_replayed_step_launches_its_own_outputs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for CUDA graphs: what a capture notes runs at each replay, and other outputs have another."""
    from contextlib import contextmanager

    from kernels.step import triton_served

    noted: list[Any] = []
    ran: list[str] = []

    class Graph:
        work: str = ""

        def replay(self) -> None:
            ran.append(self.work)

    @contextmanager
    def graph(made: Graph) -> Any:
        noted.append(made)
        yield
        made.work = f"replay of {ran.pop()}"  # captured, not run

    class Output:
        is_cuda = True

        def __init__(self, at: int) -> None:
            self.at = at

        def data_ptr(self) -> int:
            return self.at

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(triton_served, "run", lambda args, out: ran.append(str(out["logits"].at)))
    args: Any = {"graphs": {}, "tokens": Output(0), "config": Config(replayed=True)}
    for at in (1, 1, 2, 1):
        triton_served.replay(args, {"logits": Output(at)})  # type: ignore[dict-item]
    assert ran == ["1", "replay of 1", "2", "replay of 1"]
    assert len(noted) == 2

    class Stream:
        device = "one"

        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            ran.append(f"{self.name} waits for {other.name}")

    ran.clear()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("caller"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(triton_served, "_stream", lambda device: Stream("own"))
    triton_served.replay(args | {"config": Config(replayed=True, waits=True)}, {"logits": Output(2)})  # type: ignore[dict-item]
    assert ran == ["own waits for caller", "replay of 2", "caller waits for own"]


@needs_triton
def test_a_replay_takes_the_host_a_few_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what the driver takes for the graph itself; a captured step's host work is to stay below 50 us."""
    from kernels.step import triton_served

    class Output:
        is_cuda = True

        def data_ptr(self) -> int:
            return 7

    class Graph:
        def replay(self) -> None:
            replayed.append(1)

    replayed: list[int] = []
    out: Any = {name: Output() for name in cases.outputs(DECODE, cases.inputs(DECODE))}
    args: Any = {"graphs": {(7,) * (1 + len(out)): Graph()}, "tokens": Output(), "config": Config(replayed=True)}
    took = min(timeit.repeat(lambda: triton_served.replay(args, out), number=100, repeat=5)) / 100
    assert len(replayed) == 500
    assert took < 20e-6


@needs_triton
def test_a_wide_stream_is_nearer_to_the_reference() -> None:
    from kernels.step.reference import reference

    ratios = []
    for seed in range(3):
        wanted = reference(cases.inputs(DECODE, seed, DEVICE))["logits"]
        narrow, wide = (divergence(step(n, seed=seed)["logits"], wanted) for n in ("served", "served_stream_f32"))
        assert 0 < wide < narrow < 1e-3
        ratios.append(wide / narrow)
    assert max(ratios) < 0.8


def test_the_references_head_is_the_same_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of more rows than are float64 at once, the last slice a short one."""
    from kernels.step.reference import reference

    whole = reference(cases.inputs(DECODE, 0, DEVICE))
    rows = 37
    assert whole["logits"].shape[1] > 2 * rows
    assert whole["logits"].shape[1] % rows
    monkeypatch.setitem(reference.__globals__, "HEAD_ROWS", rows)
    sliced = reference(cases.inputs(DECODE, 0, DEVICE))
    assert torch.allclose(sliced["logits"], whole["logits"], rtol=1e-12, atol=1e-12)
    assert torch.equal(sliced["next_token"], whole["next_token"])


@needs_triton
def test_products_in_e4m3_cost_what_their_rounding_says() -> None:
    from kernels.step.reference import reference

    at = DECODE if CPU else BY_ID["prefill_small_npl2_t9_ctx15"]  # on a GPU fewer than 17 tokens keep W4A16
    wanted = reference(cases.inputs(at, 0, DEVICE))["logits"]
    rounded, exact = (divergence(step(n, at.id)["logits"], wanted) for n in ("served_w4a8", "served"))
    assert 10 * exact < rounded < 0.03


@needs_triton
@pytest.mark.parametrize(("axis", "value", "limit"), [
    ("state_dtype", "bf16", 1e-3), ("cache", "fp8", 1e-2), ("cache", "q8_0", 1e-3),
])  # fmt: skip
def test_a_narrow_format_costs_little_after_one_step(axis: str, value: str, limit: float) -> None:
    """The same states or caches rounded to it once, against as they are, by the float64 reference."""
    from kernels.step.reference import reference

    inputs = cases.inputs(DECODE, 0, DEVICE)
    wanted = reference(inputs)["logits"]
    if axis == "state_dtype":
        inputs["state"] = inputs["state"].bfloat16()
    else:
        for name in ("k", "v"):
            cache = inputs[f"{name}_cache"].float()
            if value == "q8_0":
                layers = [kv_format.quantise_q8_0(layer) for layer in cache]
                inputs[f"{name}_cache"], inputs[f"{name}_block"] = map(torch.stack, zip(*layers, strict=True))
                continue
            scale = cache.abs().amax((1, 3, 4)) / 448
            inputs[f"{name}_cache"] = (cache / scale[:, None, :, None, None]).to(torch.float8_e4m3fn)
            inputs[f"{name}_scale"] = scale
    found = divergence(reference(inputs)["logits"], wanted)
    assert 0 < found < limit


@needs_triton
@pytest.mark.parametrize("few", [0, 128])
def test_a_cache_of_fp8_takes_the_plain_codes(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    from kernels.step import triton_fused

    monkeypatch.setattr(triton_fused, "FEW_TOKENS", few)
    monkeypatch.setattr(triton_fused, "TURNED", 2)
    drawn = torch.Generator().manual_seed(1)
    gated, k, v = (torch.randn(5, *shape, generator=drawn).to(DEVICE, torch.bfloat16) for shape in
                   ((4, 2, 32), (2, 32), (2, 32)))  # fmt: skip
    v[0, 0, :3] = torch.tensor([1000.0, -1000.0, 0.0])
    args: dict[str, Any] = {name: torch.ones(5, 1, 4, device=DEVICE) * x for name, x in (("cos", 0.8), ("sin", 0.6))}
    args |= {"slots": torch.tensor([0, 15, 16, 47, 33], device=DEVICE)}
    args |= {f"{name}_norm.weight": torch.ones(32, device=DEVICE) for name in ("q", "k")}
    args |= {f"{name}_scale": torch.tensor([0.01, 0.02], device=DEVICE) for name in ("k", "v")}
    found = []
    for one in (torch_eager.PLAIN, triton_fused.FUSED):
        caches = [torch.zeros((3, 2, 16, 32), device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2)]
        one.rotate(args, "", gated, k, v, *caches)
        found.append(caches)
    assert torch.equal(found[0][1].view(torch.uint8), found[1][1].view(torch.uint8))
    assert float(found[1][1].float().max()) == 448.0
    keys = [caches[0].float() for caches in found]  # k is rounded to bf16 on the plain way
    assert torch.equal(keys[0] == 0, keys[1] == 0)
    assert float((keys[0] - keys[1]).abs().max()) <= 0.126 * float(keys[0].abs().max())
    assert float((keys[0] != keys[1]).float().mean()) < 0.05


@needs_triton
@pytest.mark.parametrize("few", [0, 128])
@pytest.mark.parametrize("dim", [32, 64, 256])
def test_a_cache_of_q8_0_takes_the_plain_codes_and_scales(monkeypatch: pytest.MonkeyPatch, dim: int, few: int) -> None:
    """V bit for bit, a block of zeros and the largest halves among them; K as near as bf16 on the plain way allows."""
    from kernels.step import triton_fused

    monkeypatch.setattr(triton_fused, "FEW_TOKENS", few)
    monkeypatch.setattr(triton_fused, "TURNED", 2)
    drawn = torch.Generator().manual_seed(1)
    gated, k, v = (torch.randn(5, *shape, generator=drawn).to(DEVICE, torch.bfloat16) for shape in
                   ((4, 2, dim), (2, dim), (2, dim)))  # fmt: skip
    v[0, 0, :32], v[1, 1, 3] = 0.0, 60000.0
    args: dict[str, Any] = {name: torch.ones(5, 1, 4, device=DEVICE) * x for name, x in (("cos", 0.8), ("sin", 0.6))}
    args |= {"slots": torch.tensor([0, 15, 16, 47, 33], device=DEVICE)}
    args |= {f"{name}_norm.weight": torch.ones(dim, device=DEVICE) for name in ("q", "k")}
    found = []
    for one in (torch_eager.PLAIN, triton_fused.FUSED):
        caches = [torch.full((3, 2, 16, dim), -128, dtype=torch.int8, device=DEVICE) for _ in range(2)]
        blocks = [torch.full((3, 2, 16, dim // 32), 0.5, dtype=torch.float16, device=DEVICE) for _ in range(2)]
        one.rotate(args | {"k_block": blocks[0], "v_block": blocks[1]}, "", gated, k, v, *caches)
        found.append((*caches, *blocks))
    (k0, v0, kb0, vb0), (k1, v1, kb1, vb1) = found
    assert torch.equal(vb0, vb1)
    assert float((v0.int() - v1.int()).abs().max()) <= (0 if CPU else 1)  # a GPU's reciprocal is of two units
    assert torch.equal(kb0 == 0.5, kb1 == 0.5)
    assert torch.equal(k0 == -128, k1 == -128)
    wide = [kv_format.dequantise_q8_0(*pair) for pair in ((k0, kb0), (k1, kb1))]
    assert float((wide[0] - wide[1]).norm() / wide[0].norm()) < 0.012


@needs_triton
@pytest.mark.parametrize(
    ("tokens", "vocab", "hidden"),
    [(1, 64, 256), (3, 259, 80), (8, 130, 512), (5, 193, 600), (9, 129, 144), (33, 300, 256), (128, 257, 80)],
)
def test_fused_ends_are_the_librarys(tokens: int, vocab: int, hidden: int) -> None:
    """Sizes that no tile divides, the highest logit in the last row, and three equal ones: the lowest token counts."""
    from kernels.step import fused_ends

    drawn = torch.Generator().manual_seed(vocab)
    weight = (torch.randn(vocab, hidden, generator=drawn) / hidden**0.5).to(DEVICE, torch.bfloat16)
    x = torch.randn(tokens, hidden, generator=drawn).to(DEVICE, torch.bfloat16)
    weight[vocab - 1] = x[0]
    if tokens > 1:
        weight[vocab // 2] = weight[7] = weight[5] = x[1] * 2
    out = {
        "logits": torch.full((tokens, vocab), torch.nan, device=DEVICE),
        "next_token": torch.full((tokens,), -1, device=DEVICE),
        "next_logit": torch.full((tokens,), torch.nan, device=DEVICE),
    }
    fused_ends.head(weight, x, out)
    wanted = x.double() @ weight.double().T
    assert torch.allclose(out["logits"].double(), wanted, rtol=0, atol=2e-6 * float(wanted.abs().max()))
    highest = out["logits"].max(-1)
    assert torch.equal(out["next_logit"], highest.values)
    assert torch.equal(out["next_token"], (out["logits"] == highest.values[:, None]).int().argmax(-1))
    assert out["next_token"][:2].tolist() == [vocab - 1, 5][:tokens]

    args: dict[str, Any] = {"tokens": torch.randint(vocab, (tokens,), generator=drawn).to(DEVICE)}
    args |= {"model.embed_tokens.weight": weight, "positions": torch.arange(tokens, device=DEVICE).int() * 251}
    args["inv_freq"] = 1e4 ** -(torch.arange(5, device=DEVICE) / 5.0)
    for stream in (torch.bfloat16, torch.float32):
        made = fused_ends.begin(args, stream)
        assert torch.equal(made["x"], weight[args["tokens"]].to(stream))
        angle = args["positions"][:, None, None].double() * args["inv_freq"].double()
        for name, wanted in (("cos", angle.cos()), ("sin", angle.sin())):
            assert made[name].shape == (tokens, 1, 5)
            assert float((made[name] - wanted).abs().max()) < 2e-3  # an angle of 31,877 has float32's 2^-9


@needs_triton
@pytest.mark.parametrize(
    ("tokens", "heads", "hidden"), [(1, 5, 96), (8, 4, 80), (9, 24, 128), (33, 48, 300), (128, 17, 512)]
)
def test_skinny_gemms_are_rounded_once(tokens: int, heads: int, hidden: int) -> None:
    """As a GEMV and split along K; sizes that no split and no tile divides."""
    from kernels.step import triton_fused

    drawn = torch.Generator().manual_seed(tokens)
    weight = (torch.randn(2 * heads, hidden, generator=drawn) / hidden**0.5).to(DEVICE, torch.bfloat16)
    x = torch.randn(tokens, hidden, generator=drawn).to(DEVICE, torch.bfloat16)
    wanted = x.double() @ weight.double().T
    for made, sides in zip(triton_fused.alpha_beta(weight, x), wanted.split(heads, dim=1), strict=True):
        assert made.is_contiguous()
        assert torch.allclose(made.double(), sides, rtol=2.0**-8, atol=1e-6)
    logits = triton_fused.router(weight, x)
    assert logits.dtype == torch.float32
    assert torch.allclose(logits.double(), wanted, rtol=0, atol=1e-6 * float(wanted.abs().max() + 1))


@needs_triton
@pytest.mark.parametrize("lengths", [(1,), (2, 1, 3), (40,), (33, 1, 32, 5), (150,), (64, 66)])
def test_a_prompts_convolution_is_the_plain_one(lengths: tuple[int, ...]) -> None:
    """Sequences that are shorter than the filter, and rows of a pool that stand in another order."""
    from kernels.step import fused_prompt

    drawn, (heads_k, heads_v, dim) = torch.Generator().manual_seed(len(lengths)), (2, 3, 32)
    channels, total = (2 * heads_k + heads_v) * dim, sum(lengths)
    wider = torch.randn(total, channels + 16, generator=drawn).to(DEVICE, torch.bfloat16)
    mixed = wider[:, :channels]  # as of a product with z
    weight = torch.randn(channels, 4, generator=drawn).to(DEVICE, torch.bfloat16)
    conv = torch.randn(len(lengths) + 1, 3, channels, generator=drawn).to(DEVICE, torch.bfloat16)
    pool_rows = torch.arange(len(lengths), 0, -1, dtype=torch.int32, device=DEVICE)
    spans = [(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(len(lengths))]
    of = [(int(row), place) for row, length in zip(pool_rows, lengths, strict=True) for place in range(length)]
    rows, places = torch.tensor(of, dtype=torch.int32, device=DEVICE).T.contiguous()
    bounds = torch.tensor([0, *(last for _, last in spans)], dtype=torch.int32, device=DEVICE)
    kept, wanted = conv.clone(), torch.empty(total, channels, dtype=torch.float64, device=DEVICE)
    for (first, last), row in zip(spans, pool_rows.tolist(), strict=True):
        window = torch.cat((conv[row], mixed[first:last]))
        kept[row] = window[-3:]
        taps = [window[tap : tap + last - first].double() * weight[:, tap].double() for tap in range(4)]
        y = torch.stack(taps).sum(0)
        wanted[first:last] = y * y.sigmoid()
    made = fused_prompt.convolved(
        mixed, weight, conv, rows, places, pool_rows, bounds, heads_k, heads_v, dim
    )  # fmt: skip
    assert torch.equal(conv, kept)
    sides = wanted.unflatten(1, (-1, dim)).split((heads_k, heads_k, heads_v), dim=1)
    for one, side in zip(made, sides, strict=True):
        assert one.is_contiguous()
        assert torch.allclose(one.double(), side, rtol=2.0**-8, atol=1e-5)

    a, b = (torch.randn(total, heads_v, generator=drawn).to(DEVICE, torch.bfloat16) * 9 for _ in range(2))
    rate, bias = (torch.randn(heads_v, generator=drawn).to(DEVICE) for _ in range(2))
    g, beta = fused_prompt.gates(a, b, rate, bias)
    decay = -rate.double().exp() * torch.nn.functional.softplus(a.double() + bias.double())
    assert torch.allclose(g.double(), decay, rtol=1e-5, atol=1e-6)
    assert torch.allclose(beta.double(), b.double().sigmoid(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rows", [[2, 3], [3, 2], [0, 2], [1]], ids=str)
def test_a_prompts_states_are_at_their_rows(rows: list[int]) -> None:
    from kernels.step.triton_served import delta_rule

    dim, pool, tokens = 8, 5, 3 * len(rows)
    state = torch.arange(pool, dtype=torch.float32).view(pool, 1, 1, 1).expand(pool, 1, dim, dim).clone()
    conv, before = torch.zeros(pool, 3, 3 * dim, dtype=torch.bfloat16), state.clone()
    spans = [(3 * n, 3 * n + 3) for n in range(len(rows))]
    args = {"decode": False, "equal": True, "config": Config(), "rows": rows, "spans": spans}
    args |= {"state_rows": torch.tensor(rows, dtype=torch.int32), "A_log": torch.zeros(1), "dt_bias": torch.zeros(1)}
    args |= {"conv1d.weight": torch.ones(3 * dim, 1, 4, dtype=torch.bfloat16)}
    args |= {"prompt": lambda q, k, v, g, b, first: (torch.zeros_like(v), first * 10 + 1)}
    a = torch.zeros(tokens, 1, dtype=torch.bfloat16)
    delta_rule(args, "", torch.zeros(tokens, 3 * dim, dtype=torch.bfloat16), a, a, state, conv)
    before[rows] = before[rows] * 10 + 1
    assert torch.equal(state, before)


@needs_triton
def test_a_head_of_nan_names_a_token_that_there_is() -> None:
    from kernels.step import fused_ends

    weight, x = torch.full((64, 32), torch.nan), torch.ones(2, 32)
    out = {"logits": torch.zeros(2, 64), "next_token": torch.full((2,), -1), "next_logit": torch.zeros(2)}
    out = {name: t.to(DEVICE) for name, t in out.items()}
    fused_ends.head(weight.to(DEVICE, torch.bfloat16), x.to(DEVICE, torch.bfloat16), out)
    assert all(0 <= token < 64 for token in out["next_token"].tolist())
    assert out["logits"].isnan().all()


@needs_triton
@pytest.mark.parametrize("tokens", [3, 17])
def test_a_head_of_negative_logits_names_none_past_its_vocabulary(tokens: int) -> None:
    """130 rows are no whole tiles, by addresses and by tensor maps."""
    from kernels.step import fused_ends

    vocab, hidden = 130, 48
    weight = -torch.ones(vocab, hidden, device=DEVICE, dtype=torch.bfloat16)
    weight[77] /= 2
    out = {
        "logits": torch.zeros(tokens, vocab, device=DEVICE),
        "next_token": torch.full((tokens,), -1, device=DEVICE),
        "next_logit": torch.zeros(tokens, device=DEVICE),
    }
    fused_ends.head(weight, torch.ones(tokens, hidden, device=DEVICE, dtype=torch.bfloat16), out)
    assert out["next_token"].tolist() == [77] * tokens
    assert out["next_logit"].tolist() == [-hidden / 2] * tokens


@needs_triton
def test_scratch_of_every_call_is_new_and_filled_as_between_launches() -> None:
    from kernels.step.triton_served import anew

    seen = []
    absent = torch.full((2,), -1, dtype=torch.int32)
    idle = [torch.zeros(3, dtype=torch.int32), absent, torch.empty(0)]

    class Product:
        parts = [(4, "", [torch.ones(2)], idle)]  # noqa: RUF012 (as the module has them)
        plans: dict[str, str] = {}  # noqa: RUF012

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(self.parts[0])
            for t in self.parts[0][3]:
                t += 7
            return x

    product: Any = Product()
    kept = product.parts
    x, served = torch.ones(1), anew(product)
    assert served(x) is x
    assert served(x) is x
    assert product.parts is kept
    for _, _, operands, scratch in seen:
        assert operands is kept[0][2]
        assert [t.tolist() for t in scratch] == [[7, 7, 7], [6, 6], []]
    assert [t.tolist() for t in idle] == [[0, 0, 0], [-1, -1], []]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [32, 64, 128])
def test_scratch_of_every_call_changes_no_bit_of_a_product(tokens: int) -> None:
    from kernels.nvfp4 import ops
    from kernels.step.triton_served import anew

    packed = nvfp4.quantise(torch.randn(5120, 17408, device="cuda") / 64)
    linear = ops.Linear(packed.packed, packed.scale, packed.tensor_scale, tokens=(tokens, tokens))
    x = torch.randn(tokens, 17408, dtype=torch.bfloat16, device="cuda")
    expected, served = linear(x), anew(linear)
    for _ in range(5):
        assert torch.equal(served(x), expected)


@pytest.mark.parametrize(
    ("levers", "named"),
    [
        ({"state": "copied"}, ("state", "recurrence")),
        ({"launch": "chained", "products": "w4a8"}, ("launch", "products")),
        ({"launch": "chained", "scratch": True}, ("scratch", "launch")),
        ({"waits": True}, ("waits", "replayed")),
        ({"norms": "in_gemv", "packing": "alpha_beta"}, ("norms", "alpha_beta")),
        ({"ends": "fused", "all_logits": True}, ("ends", "all_logits")),
        ({"packing": "both"}, ("packing", "both", "alpha_beta")),
    ],
)
def test_levers_that_exclude_each_other_are_refused_in_one_line(levers: Any, named: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=levers[named[0]] if isinstance(levers[named[0]], str) else "True") as raised:
        Config(**levers)
    said = str(raised.value)
    assert "\n" not in said
    assert all(word in said for word in named)


@pytest.mark.parametrize("lever", [{"ahead": "state"}, {"chained_attention": True}])
def test_a_place_in_the_chain_needs_the_chain(lever: Any) -> None:
    assert Config(launch="chained", **lever)
    with pytest.raises(ValueError, match='without launch="chained": chain the others'):
        Config(**lever)


@pytest.mark.parametrize(
    ("name", "at", "said"),
    [
        ("served_few_router", "decode_q36-27b_l16_npl1_ctx1024", "a lever of mixtures"),
        ("served_few_norms", "decode_q36-35b-a3b_l20_npl1_ctx1024", "a lever of dense layers"),
        ("served_many", "prefill_q36-27b_l8_npl1_t512_ctx0", "512 tokens, 128 are the most"),
        ("served_prompt_conv", "decode_q36-27b_l16_npl1_ctx1024", "a lever of prompts"),
    ],
)
def test_a_lever_names_the_step_that_it_does_not_take(name: str, at: str, said: str) -> None:
    assert said in NAMED[name].refuses(BY_ID[at])
    taken = Config(packing="alpha_beta_gemv", norms="in_gemv")
    assert "8 are the most of a vector product" in taken.refuses(BY_ID["decode_q36-27b_l16_npl32_ctx1024"])
    assert "together with router" in taken.refuses(BY_ID["decode_q36-35b-a3b_l20_npl1_ctx1024"])
    assert "decode steps" in Config(ends="fused").refuses(BY_ID["prefill_odd_npl1_t21_ctx0"])


def test_memory_is_refused_with_the_number_before_anything_is_made() -> None:
    """128 sequences of 1,024 tokens: products of 13.7 GB twice, 5.1 of embedding and head, states 19.7, caches 8.7."""
    workload = BY_ID["decode_q36-27b_npl128_ctx1024"]
    sizes = memory(workload)
    assert sizes["products"] == pytest.approx(13.7e9, rel=0.01)
    assert sizes["states"] == 48 * 128 * (48 * 128 * 128 * 4 + 3 * 10240 * 2)
    assert sizes["caches"] == 16 * 128 * 1040 * 2 * 4 * 256 * 2
    needed = sum(sizes.values())
    assert Config().refuses(workload, needed) == ""
    said = Config().refuses(workload, needed - 1)
    assert f"{needed / 1e9:.1f} GB" in said
    assert "128 sequences of 1025 tokens" in said
    few = BY_ID["decode_q36-27b_npl1_ctx1024"]
    assert sum(memory(few, Config(gate_up=True)).values()) > sum(memory(few).values()) + 6e9
    fp8 = BY_ID["decode_q36-27b_l16_npl32_ctx1024_cache-fp8"]
    q8_0 = BY_ID["decode_q36-27b_l16_npl32_ctx1024_cache-q8_0"]
    assert memory(q8_0)["caches"] == memory(fp8)["caches"] * 34 / 32
    assert memory(fp8)["caches"] * 2 == memory(BY_ID["decode_q36-27b_l16_npl32_ctx1024"])["caches"]


def test_a_prompt_on_a_full_cache_has_its_scores_in_memory() -> None:
    """24 heads of 8,192 new tokens by 16,384 keys, twice in 16 bits."""
    at_once, behind = (cases._workload("prefill", "q36-27b", 1, ctx, 8192, layers=4) for ctx in (0, 8192))
    more = memory(behind)["activations"] - memory(at_once)["activations"]
    assert more == 2 * 2 * 24 * 8192 * 16384
    assert f"{sum(memory(behind).values()) / 1e9:.1f} GB" in Config().refuses(behind, 1e9)


def test_a_candidate_refuses_what_its_gpu_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.common import described_for

    pytest.importorskip("triton")
    candidate = families.load("step").candidate("served")

    class Small:
        total_memory = 10e9

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Small)
    workload = BY_ID["decode_q36-27b_npl1_ctx1024"]
    assert "10.0 are there" in candidate.refuses(workload)
    with described_for((9, 0)):  # what would be launched on another device
        assert candidate.refuses(workload) == ""


def test_weights_of_two_tensor_scales_are_not_packed() -> None:
    inputs = cases.inputs(BY_ID["decode_odd_npl3_ctx17"], 0, DEVICE)
    found, replaced = wiring.packed(inputs, Config(packing="all", gate_up=True))
    at = "model.layers.0."
    assert found[f"{at}mlp.gate_up_proj.weight_packed"].shape == (224, 40)
    assert f"{at}mlp.gate_proj" in replaced
    assert f"{at}mlp.down_proj" not in replaced
    assert found[f"{at}linear_attn.in_proj_ab.weight"].shape == (8, 80)
    inputs[f"{at}mlp.up_proj.weight_tensor_scale"] = inputs[f"{at}mlp.up_proj.weight_tensor_scale"] * 2
    with pytest.raises(ValueError, match="tensor scales") as raised:
        wiring.packed(inputs, Config(gate_up=True))
    assert "gate_proj, up_proj" in str(raised.value)


def test_a_stair_pulls_one_lever() -> None:
    def levers(name: str) -> dict[str, Any]:
        config = Config() if name == "served" else NAMED[name]
        return {field: getattr(config, field) for field in Config.__dataclass_fields__}

    for lower, upper in pairwise(STAIRCASE):
        below, above = levers(lower), levers(upper)
        assert sum(below[field] != above[field] for field in below) == 1, (lower, upper)
    assert replace(Config(), replayed=True) == NAMED["served_replayed"]


# In a process of its own: here Triton interprets.
PDL_PTX = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.step import fused_ends, triton_fused
found = {}
for build in triton_fused.builds(90) + fused_ends.builds(90):
    if "PDL" not in build.kernel.arg_names:
        continue
    source = ASTSource(build.kernel, dict(build.signature), {**build.constexprs, "PDL": True})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": build.num_warps})
    found[build.label] = made.asm["ptx"]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_small_kernel_of_the_chain_writes_nothing_before_the_kernel_ahead_has_ended() -> None:
    """Before its wait it says that its own dependent may start, and reads what no kernel writes at most."""
    pytest.importorskip("triton")
    from kernels.step.triton_served import SMALL

    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    said = subprocess.run(
        [sys.executable, "-c", PDL_PTX], capture_output=True, text=True, check=True, cwd=REPOSITORY, env=environment
    )
    found = json.loads(said.stdout)
    assert {label.split()[0] for label in found} == {*SMALL, "greedy", "split_k", "split_k_sum", "head_boxes"}
    early = "add_norm", "norm_gemv", "alpha_beta", "router", "gated_norm", "begin", "head ", "split_k "
    for label, ptx in found.items():
        ahead, _, behind = ptx.partition("griddepcontrol.wait")
        assert "griddepcontrol.launch_dependents" in ahead, label
        assert "st.global" not in ahead, label
        assert "st.global" in behind, label
        assert "ld.global" in behind or "cp.async.bulk.tensor" in behind, label
        assert "cp.async.bulk.tensor" not in ahead, label
        assert ("ld.global" in ahead) == label.startswith(early), label
