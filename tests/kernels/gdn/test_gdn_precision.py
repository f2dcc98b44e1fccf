"""No precision of Gated DeltaNet admits the next cheaper format of an operand; what cannot be told is listed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels.common import Tensors, Workload
from kernels.gdn import cases
from kernels.gdn.reference import reference, step
from lab.check import accuracy, families
from tests.kernels.cheaper import EIGHT_BITS, Rounding, admitted, refused, stored

CHECKS = [w for w in cases.WORKLOADS if w.role == "check"]
CHUNK = 64  # tokens after which a kernel that stores the state in a cheaper format would read it again
PRECISIONS = {"prefill": ("f32", "fp16", "tf32", "bf16"), "decode": ("f32",), "conv_decode": ("f32", "bf16")}


def chunked(inputs: Tensors, rounding: Rounding) -> Tensors:
    """Prefill of one or more sequences of equal length with the state rounded at the start of every chunk."""
    state, reads = inputs["initial_state"], []
    for start in range(0, inputs["v"].shape[1], CHUNK):
        span = {n: inputs[n][:, start : start + CHUNK] for n in ("q", "k", "v", "g", "beta")}
        kept = {n: inputs[n] for n in ("raw_qk",) if n in inputs}
        out = reference(span | kept | {"initial_state": rounding(state)})
        state = out["final_state"]
        reads.append(out["o"])
    return {"o": torch.cat(reads, dim=1), "final_state": state}


def cheaper(workload: Workload, precision: str) -> dict[str, tuple[str, ...]]:
    """The formats below the declared one, by operand: it arrives in one and is computed in another, the coarser counts.

    Below 16 bits come those of 8 bits; below float32 comes bf16, and below fp16 and tf32 too, where the operand arrives
    in more bits than bf16 has.
    """
    state, inputs = workload["state_dtype"], workload["dtype"]

    def below(arrives: str) -> tuple[str, ...]:
        return EIGHT_BITS if "bf16" in (arrives, precision) else ("bf16", *EIGHT_BITS)

    if workload["op"] == "conv_decode":
        return {"mixed_qkv": below(inputs), "state": below(state)}
    held = {"prefill": "initial_state", "decode": "state"}[workload["op"]]
    found = {"q": below(inputs), "k": below(inputs), "v": below(inputs), held: below(state)}
    return found | ({"g": ("bf16",), "beta": ("bf16",)} if precision == "f32" else {})


# Workloads where bf16 log decays cannot be told. A decay exp(g) moves by |g| 2^-9 at most: by 2e-6 where |g| < 1e-3, as
# it is in the regimes of slow decay and in the first head of "mixed", below the limit of 5e-6; where everything decays
# the state has no share left; and beside a state stored in bf16 (1.7e-3) the 1e-3 that a decay of e^-2.7 moves by.
UNSEEN_DECAYS = {
    "t1_hk1_hv1_d64_f32", "t200_hk1_hv1_d64_f32_keep", "t130_hk1_hv1_d64_f32_similar", "decode_b1_hk1_hv1_d64_f32",
    "decode_b2_hk1_hv2_d64_f32_forget", "decode_b2_hk1_hv2_d64_f32_keep", "decode_b3_hk1_hv2_d64_state-bf16",
}  # fmt: skip


def exceptions(workload: Workload) -> set[tuple[str, str, str]]:
    """What no limit can tell, because the operand hardly enters an output."""
    found = {("f32", "g", "bf16")} if workload.id in UNSEEN_DECAYS else set()
    if workload["op"] == "prefill" and workload["regime"] == "forget":
        # The initial state is multiplied by exp(g) <= exp(-5) before anything reads it, once, beside 75 tokens.
        every = {p: cheaper(workload, p)["initial_state"] for p in PRECISIONS["prefill"]}
        found |= {(p, "initial_state", f) for p, formats in every.items() for f in formats}
    if workload.id == "t1_hk1_hv1_d64_f32":
        # One token of one head: that token's keys and values happen to have no large element in any block.
        found |= {("bf16", operand, f) for operand in ("k", "v") for f in ("int8", "int8/32")}
    if workload["regime"] == "similar":
        # Keys of one direction overwrite each other: int8's 9e-3 of v is 2.6e-3 of o, and the
        # limit holds for keys of any direction.
        found |= {("bf16", "v", "int8"), ("bf16", "v", "int8/32"), ("fp16", "v", "bf16"), ("tf32", "v", "bf16")}
    return found


def of(inputs: Tensors, operand: str, rounding: Rounding) -> Tensors:
    if operand == "initial_state" and "cu_seqlens" not in inputs:
        return chunked(inputs, rounding)
    return reference(inputs | {operand: rounding(inputs[operand])})


@pytest.mark.parametrize("workload", CHECKS, ids=lambda w: w.id)
def test_cheaper_formats_are_refused(workload: Workload) -> None:
    inputs = cases.inputs(workload, 0, "cpu")
    wanted = reference(inputs)
    rounded = functools.cache(lambda operand, rounding: stored(cases, workload, inputs, of(inputs, operand, rounding)))
    found: set[tuple[str, str, str]] = set()
    for precision in PRECISIONS[workload["op"]]:
        found |= set(admitted(cases, workload, precision, wanted, rounded, cheaper(workload, precision)))
        assert not refused(cases, workload, precision, stored(cases, workload, inputs, wanted), wanted)
    assert found == exceptions(workload)


def measured(problem: Workload) -> Workload:
    """Drawn as a measurement of that shape is: normal operands, and no spare rows in the pool."""
    return replace(problem, role="measure", inputs="mixed gates")


@pytest.mark.parametrize("tokens", [16, 64, 256])
def test_measured_lengths_refuse_int8(tokens: int) -> None:
    """Six of a layer's heads: the decays are spread as over all of them. Of few tokens v is not told, see cases.py."""
    workload = measured(cases._prefill(tokens, (2, 6), D=128, dtype="bf16"))
    inputs = cases.inputs(workload, 0, "cpu")
    wanted = reference(inputs)
    formats = dict.fromkeys(("q", "k", "v", "initial_state"), ("int8/32",))
    found = admitted(
        cases, workload, "bf16", wanted, lambda *a: stored(cases, workload, inputs, of(inputs, *a)), formats
    )
    assert set(found) == ({("bf16", "v", "int8/32")} if tokens <= 64 else set())


@pytest.mark.parametrize("state", ["f32", "bf16"])
@pytest.mark.parametrize("op", ["decode", "conv_decode"])
def test_measured_decodes_refuse_cheaper_formats(op: str, state: str) -> None:
    """Also where both outputs are bf16: v in int8 moves the state by 2.8e-4, a sixth of its rounding."""
    workload = measured(cases._decode(4, (4, 12), D=128, dtype="bf16", state_dtype=state))
    workload = cases._from_conv(workload) if op == "conv_decode" else workload
    inputs = cases.inputs(workload, 0, "cpu")
    wanted = reference(inputs)
    rounded = functools.cache(lambda operand, rounding: stored(cases, workload, inputs, of(inputs, operand, rounding)))
    found: set[tuple[str, str, str]] = set()
    for precision in PRECISIONS[op]:
        found |= set(admitted(cases, workload, precision, wanted, rounded, cheaper(workload, precision)))
    # Gates rounded to bf16 move a bf16 state by 1.2e-4 (a rate: 1.7e-3 * 0.07) and 3e-4 (a log decay): 0.3 and 1.6 % of
    # its rounding in quadrature, where the margin is 1 %.
    gates = {("f32", "beta", "bf16"), ("f32", "g", "bf16")}
    assert found == (gates if (op, state) == ("decode", "bf16") else set())


def repeated(
    inputs: Tensors, calls: int, dtype: torch.dtype, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> Tensors:
    """o and state after so many equal steps in `dtype`, the state `rounded` ahead of each but the first."""
    wide = {name: inputs[name].repeat_interleave(3, dim=1).to(dtype) for name in "qk"}
    others = [inputs[name].to(dtype) for name in ("v", "g", "beta")]
    o, state = step(inputs["state"].to(dtype), wide["q"], wide["k"], *others)
    for _ in range(calls - 1):
        o, state = step(rounded(state).to(dtype), wide["q"], wide["k"], *others)
    return {"o": o, "state": state}


@pytest.mark.slow
@pytest.mark.parametrize("calls", [2, 12, 120])
def test_equal_steps_on_a_16_bit_state_come_apart_and_a_coarser_one_is_still_refused(calls: int) -> None:
    """As in a timed graph. After 120 calls two right ones differ in o by more than one rounding of it allows."""
    family = families.load("gdn")
    workload = family.workload("op=decode batch=2 T=1 Hk=16 Hv=48 D=128 state_dtype=bf16")
    inputs = cases.inputs(workload, 1, "cpu")
    wanted = repeated(inputs, calls, torch.float64, lambda s: s.to(torch.bfloat16))

    def wrong(rounded: Callable[[torch.Tensor], torch.Tensor], made: int = calls) -> str:
        seen = repeated(inputs, made, torch.float32, rounded)
        seen = {"o": seen["o"].to(torch.bfloat16), "state": rounded(seen["state"])}
        return accuracy.judged(family, workload, "f32", {}, inputs, seen, wanted, calls)[1]

    assert wrong(lambda s: s.to(torch.bfloat16)) == ""
    assert "relative error" in wrong(lambda s: s.to(torch.float8_e4m3fn).to(torch.bfloat16))
    amax = inputs["state"].abs().amax().float()
    assert "relative error" in wrong(lambda s: ((s / amax * 127).round() / 127 * amax).to(torch.bfloat16))
    if calls == 2:
        assert "relative error" in wrong(lambda s: s.to(torch.bfloat16), calls - 1)


@pytest.mark.parametrize("output", ["state", "o"])
@pytest.mark.parametrize("stored", ["bf16", "f32"])
def test_an_element_of_a_drifting_16_bit_state_may_part_and_no_further_than_any_is_large(
    stored: str, output: str
) -> None:
    family, kind = families.load("gdn"), {"bf16": torch.bfloat16, "f32": torch.float32}[stored]
    workload = family.workload(f"op=decode batch=2 T=1 Hk=16 Hv=48 D=128 state_dtype={stored}")
    inputs = cases.inputs(workload, 1, "cpu")
    wanted = repeated(inputs, 2, torch.float64, lambda s: s.to(kind))
    peak, rms = wanted[output].abs().max(), wanted[output].square().mean().sqrt()

    def said(by: torch.Tensor, calls: int) -> str:
        seen = {"o": wanted["o"].to(torch.bfloat16), "state": wanted["state"].to(kind)}
        seen[output].flatten()[0] = wanted[output].flatten()[0] + by
        return accuracy.judged(family, workload, "f32", {}, inputs, seen, wanted, calls)[1]

    for size in (0.1, 2):  # the norm does not see a tenth; in float32 no element stays where it is
        assert (said(size * rms, 400) == "") == (stored == "bf16")
    assert "largest" in said(1.1 * peak, 400)
    assert "largest" in said(2 * rms, 1)  # one call has nothing to drift by
