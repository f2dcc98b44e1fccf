"""The state of the recurrence: what storing it in bf16 costs over thousands of tokens, three ways to move it, and
whether a sequence's result depends on what else is in the batch.
"""

import dataclasses
import functools
import importlib
import math
import re
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.common import Candidate, Tensors, Workload, has_triton
from kernels.gdn import cases, cuda_decode, cuda_decode_conv, error_growth
from kernels.gdn.reference import step
from lab.check import accuracy, families
from tests.ran import run_once

GDN = families.load("gdn")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = ("recurrent_decode", "recurrent_decode_gathered", "recurrent_decode_copied")
needs_triton = pytest.mark.skipif(not has_triton(), reason="recurrent_decode needs triton: pip install triton")


def decode(workload_id: str) -> Workload:
    return next(w for w in cases.WORKLOADS if w.id == workload_id)


def run(name: str, workload: Workload, inputs: Tensors) -> Tensors:
    return run_once(GDN, GDN.candidates[name], workload, inputs)


# Error growth --------------------------------------------------------------------------------------------------------

EVERY_TOKEN = error_growth.STORAGES[:3]


@functools.cache
def growth() -> error_growth.Growth:
    """The study, half a second of one core; made by the first test that asks, not by whoever collects."""
    return error_growth.study(tokens=1024)


def test_the_study_is_the_recurrence() -> None:
    """Its float64 walk against the reference's step, and its float32 walk within float32's errors of both."""
    drawn = error_growth.draw("mixed", 20, 2, 64, 5)
    state = drawn["initial_state"].double()
    walk = state.clone()
    for t in range(20):
        token = [drawn[n][t].double() for n in ("q", "k", "v", "g", "beta")]
        o, state = step(state, *token)
        q, k, v, g, beta = token
        got = error_growth._step(walk, q, k, v, g.exp(), beta)
        torch.testing.assert_close(got, o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(walk, state, rtol=1e-12, atol=1e-12)
    assert all(growth().drift("f32", r, 1024) < 3e-6 for r in growth().regimes)


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_a_product_added_by_halves_leaves_no_row_out(rows: int) -> None:
    rng = torch.Generator().manual_seed(rows)
    x, state = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((3, rows), (2, 3, rows, 5)))
    torch.testing.assert_close(error_growth._product(x, state), (x[:, None, :] @ state).squeeze(-2))


@pytest.mark.parametrize("regime", ["mixed", "keep", "beta1", "similar"])
def test_where_the_delta_rule_forgets_the_error_stops_growing(regime: str) -> None:
    """Normalised keys and a learning rate of order 1 overwrite old roundings: per cent, no more after 256 tokens."""
    early, late = (growth().drift("bf16", regime, t) for t in (256, 1024))
    assert 5e-3 < late < 5e-2
    assert late < 2 * early


def test_where_the_decay_is_strong_nothing_is_left_to_grow() -> None:
    assert growth().drift("bf16", "forget", 1024) < 1e-5
    assert 1e-3 < growth().state("bf16", "forget", 1024) < 2e-3  # one rounding, of what is stored


@pytest.mark.parametrize("regime", ["idle", "beta0"])
def test_a_head_that_only_remembers_drifts_away_and_stochastic_rounding_holds_it(regime: str) -> None:
    """Steps below half a unit in the last place are lost each time: the error grows with the tokens, not their root."""
    nearest = [growth().drift("bf16", regime, t) for t in (256, 1024)]
    stochastic = [growth().drift("bf16 stochastic", regime, t) for t in (256, 1024)]
    assert nearest[1] > 3.5 * nearest[0] > 0.05
    assert stochastic[1] < 2.5 * stochastic[0] < 0.1
    assert nearest[1] > 4 * stochastic[1]


def test_stochastic_rounding_costs_more_where_nearest_was_harmless() -> None:
    """Its variance is about twice that of rounding to nearest: the remedy is for the heads that need it."""
    for regime in ("mixed", "keep", "beta1"):
        ratio = growth().drift("bf16 stochastic", regime, 1024) / growth().drift("bf16", regime, 1024)
        assert 1.2 < ratio < 1.7, regime


def gate(growth: error_growth.Growth, storage: str, regime: str, last: int) -> bool:
    """The recorded gate's form: outputs at `last` tokens drift no more than 1.5 times what they do at 256."""
    return growth.drift(storage, regime, last) <= 1.5 * growth.drift(storage, regime, min(256, last))


def test_a_gate_that_never_reads_the_state_back_sees_nothing() -> None:
    """The trap: 256 tokens in one micro-batch of 512 give float32's very outputs, whatever the state is stored in."""
    stored = "bf16, micro-batches of 512"
    f32, unread = growth().at("f32"), growth().at(stored)
    assert torch.equal(growth().squared_error[unread, :, :512], growth().squared_error[f32, :, :512])
    assert all(gate(growth(), stored, r, 256) for r in growth().regimes)
    # The first token that reads the state differs, and the same gate at 1,024 tokens fails by orders of magnitude.
    seen = [r for r in growth().regimes if r != "forget"]
    for regime in seen:
        row = growth().regimes.index(regime)
        assert growth().squared_error[unread, row, 512] > 100 * growth().squared_error[f32, row, 512], regime
        assert not gate(growth(), stored, regime, 1024), regime
        assert growth().drift(stored, regime, 1024) > 30 * growth().drift(stored, regime, 256), regime


def test_reading_back_every_token_shows_in_the_first_ones() -> None:
    """What the gate should have run: a state read back at every token is off by 0.1 % after a few tokens."""
    for regime in set(growth().regimes) - {"forget"}:
        assert growth().drift("bf16", regime, 16) > 1000 * growth().drift("f32", regime, 16)


@needs_triton
@pytest.mark.slow
def test_the_kernel_with_a_bf16_state_errs_as_the_study_says() -> None:
    """Sixty tokens through recurrent_decode with a bf16 pool, against the study's bf16 at the same tokens."""
    tokens, heads, dim = 60, 2, 64
    drawn = error_growth.draw("keep", tokens, heads, dim, 0)
    only = error_growth.study(tokens, heads, dim, 0, EVERY_TOKEN[:2], ("keep",))
    pool = drawn["initial_state"][None].to(torch.bfloat16).to(DEVICE)
    exact = pool[0].double().cpu()  # from the same start: only what happens on the way is compared
    candidate = GDN.candidates["recurrent_decode"]
    error = norm = 0.0
    for t in range(tokens):
        token = {n: drawn[n][t : t + 1].to(DEVICE) for n in ("q", "k", "v", "g", "beta")}
        token |= {"state": pool, "state_rows": torch.zeros(1, dtype=torch.int32, device=DEVICE)}
        out = {"o": torch.empty_like(token["v"]), "state": pool}
        candidate.run(candidate.prepare(token), out)
        wanted, exact = step(exact, *(drawn[n][t].double() for n in ("q", "k", "v", "g", "beta")))
        error += float((out["o"][0].double().cpu() - wanted).square().sum())
        norm += float(wanted.square().sum())
    assert math.sqrt(error / norm) == pytest.approx(only.drift("bf16", "keep", tokens), rel=0.25)


@given(st.floats(-1e6, 1e6, width=32).filter(lambda x: abs(x) > 1e-30), st.integers(0, 2**31))
def test_stochastic_rounding_takes_a_neighbour(value: float, seed: int) -> None:
    """One of the two bf16 numbers around a value; a value that bf16 has stays what it is."""
    x = torch.full((64,), value, dtype=torch.float32)
    got = error_growth.to_bf16(x, "stochastic", torch.Generator().manual_seed(seed))
    below = (x.view(torch.int32) & -65536).view(torch.float32)
    above = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32)
    assert bool(((got == below) | (got == above)).all())
    assert torch.equal(error_growth.to_bf16(below, "stochastic", torch.Generator().manual_seed(seed)), below)


def test_stochastic_rounding_is_right_on_average() -> None:
    x = torch.full((1 << 18,), 1.0 + 2.0**-7 * 0.3)  # 0.3 of the way between two bf16 numbers
    got = error_growth.to_bf16(x, "stochastic", torch.Generator().manual_seed(0))
    share = float((got > 1.0).float().mean())
    assert share == pytest.approx(0.3, abs=0.005)  # five standard deviations of 2^18 draws
    assert bool((error_growth.to_bf16(x, "nearest", torch.Generator()) == 1.0).all())


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ValueError, match="rounding 'up'"):
        error_growth.to_bf16(torch.ones(1), "up", torch.Generator())
    with pytest.raises(ValueError, match="regime 'x'"):
        error_growth.draw("x", 1, 1, 64, 0)
    with pytest.raises(ValueError, match="f64"):
        growth().at("f64")


# Three ways to move the state ----------------------------------------------------------------------------------------

DECODES = [w for w in cases.WORKLOADS if w.role == "check" and w["op"] == "decode"]


@needs_triton
@pytest.mark.parametrize("workload", [w for w in DECODES if not w["pad"]], ids=lambda w: w.id)
@pytest.mark.slow
def test_the_three_forms_agree_to_the_bit(workload: Workload) -> None:
    inputs = cases.inputs(workload, 0, DEVICE)
    wanted = run(FORMS[0], workload, inputs)
    for name in FORMS[1:]:
        assert accuracy.check(GDN, GDN.candidates[name], workload, device=DEVICE).status == "ok"
        got = run(name, workload, inputs)
        assert all(torch.equal(got[n], wanted[n]) for n in wanted), name


@pytest.mark.parametrize("name", FORMS[1:])
def test_forms_that_gather_refuse_empty_slots(name: str) -> None:
    padded = next(w for w in DECODES if w["pad"])
    assert "empty slot has no state" in GDN.candidates[name].refuses(padded)
    assert "op = prefill" in GDN.candidates[name].refuses(cases.WORKLOADS[0])


def test_identity_ids_are_the_pool_in_order() -> None:
    names = [w.id for w in cases.WORKLOADS if w.axes.get("ids") == "identity"]
    assert {"decode_b128_hk16_hv48_d128_identity", "decode_b3_hk1_hv2_d64_f32_identity"} <= set(names)
    assert cases.inputs(decode("decode_b3_hk1_hv2_d64_f32_identity"), 0, "cpu")["state_rows"].tolist() == [0, 1, 2]


# The context (LP12) ---------------------------------------------------------------------------------------------------


class Noting(dict[str, int | str]):
    """Axes that remember which of them were asked for."""

    def __init__(self, axes: Mapping[str, int | str]) -> None:
        super().__init__(axes)
        self.read: set[str] = set()

    def __getitem__(self, axis: str) -> int | str:
        self.read.add(axis)
        return super().__getitem__(axis)

    def get(self, axis: str, default: object = None) -> object:  # type: ignore[override]
        self.read.add(axis)
        return super().get(axis, default)


@needs_triton
def test_a_decode_step_has_no_context_to_grow_with() -> None:
    """No argument of the kernels, in Triton or CUDA, and no axis of the cost says how many tokens came before."""
    words = {"ctx", "context", "seq_lens", "cu_seqlens", "bounds", "block_table", "tokens", "T"}
    for module in ("triton_decode", "controls.triton_decode_gather"):
        found = vars(importlib.import_module(f"kernels.gdn.{module}"))
        kernels = [value for name, value in found.items() if name.endswith("_decode_kernel")]
        assert kernels
        assert not any(words & set(kernel.arg_names) for kernel in kernels)
    for source in (cuda_decode.SOURCE, cuda_decode_conv.SOURCE):
        (given,) = re.findall(r"#define ARGUMENTS((?:.*\\\n)+.*)", source.path.read_text())
        names = set(re.findall(r"(\w+)\s*(?=[,\\\n]|$)", given))
        assert {"state", "state_rows", "o", "scale", "batch"} <= names
        assert not words & names
    axes = Noting(decode("decode_b128_hk16_hv48_d128").axes)
    GDN.cost(Workload("noted", axes), "f32")
    assert "batch" in axes.read
    assert (words | {"lengths"}) & axes.read <= {"T", "lengths"}
    assert all(w["T"] == 1 and not w["lengths"] for w in cases.WORKLOADS if w["op"] != "prefill"), "tokens of the step"
    kv = families.load("kv")
    short, long = (next(w for w in kv.cases.WORKLOADS if w.id.startswith(f"ctx{n}_b128_hq24")) for n in (1024, 8192))
    assert kv.cost(long, "bf16").bytes > 7.9 * kv.cost(short, "bf16").bytes


# What else is in the batch -------------------------------------------------------------------------------------------

WIDE = dataclasses.replace(
    decode("decode_b3_hk1_hv3_d128_f32"), axes={**decode("decode_b3_hk1_hv3_d128_f32").axes, "batch": 5}
)


def part(inputs: Tensors, which: list[int]) -> Tensors:
    """The inputs of some sequences of a decode batch, in another order, with the whole pool."""
    own = ("q", "k", "v", "g", "beta", "state_rows")
    return {n: t[which].contiguous() if n in own else t for n, t in inputs.items()}


@needs_triton
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("which", [[3], [4, 3], [3, 0, 1], [0, 2, 1, 4, 3]], ids=str)
@pytest.mark.slow
def test_a_sequence_decodes_to_the_same_bits_in_any_company(name: str, which: list[int]) -> None:
    """Alone, at another place of the batch, and beside others; on a GPU this holds per launch choice (NOTES.md)."""
    inputs = cases.inputs(WIDE, 1, DEVICE)
    whole, some = run(name, WIDE, inputs), run(name, WIDE, part(inputs, which))
    place, row = which.index(3), int(inputs["state_rows"][3])
    assert torch.equal(some["o"][place], whole["o"][3])
    assert torch.equal(some["state"][row], whole["state"][row])


PREFILLS = ("fused_chunk", "fused_chunk_fp16", "split_pipeline", "split_pipeline_tf32")


@needs_triton
@pytest.mark.parametrize("name", [n for n in PREFILLS if n in GDN.candidates])
@pytest.mark.slow
def test_a_sequence_prefills_to_the_same_bits_in_any_company(name: str) -> None:
    """Ragged neighbours of other lengths, and others' numbers: nothing of them reaches this sequence."""
    ragged = next(w for w in cases.WORKLOADS if w["lengths"] == "7-64-1-65")
    candidate: Candidate = GDN.candidates[name]
    inputs = cases.inputs(ragged, 2, DEVICE)
    whole = run(name, ragged, inputs)
    bounds = inputs["cu_seqlens"].tolist()
    for n in (0, 1, 3):
        span = slice(bounds[n], bounds[n + 1])
        alone = {k: inputs[k][:, span].contiguous() for k in ("q", "k", "v", "g", "beta")}
        alone["initial_state"] = inputs["initial_state"][n : n + 1]
        out = cases.outputs(ragged, alone)
        candidate.run(candidate.prepare(alone), out)
        assert torch.equal(out["o"][0], whole["o"][0, span])
        assert torch.equal(out["final_state"][0], whole["final_state"][n])
    others = {k: t.clone() for k, t in inputs.items()}
    others["v"][:, : bounds[3]] = torch.nan  # the worst neighbour
    beside = run(name, ragged, others)
    assert torch.equal(beside["o"][0, bounds[3] :], whole["o"][0, bounds[3] :])
