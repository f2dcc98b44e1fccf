"""Workloads of Gated DeltaNet, their inputs and outputs, and how far a candidate may lie from the reference.

Inputs, prefill: q, k [B, T, Hk, D], v [B, T, Hv, D] in `dtype`; g (log decay, <= 0) and beta in (0, 1), both
[B, T, Hv] float32; initial_state [N, Hv, D, D] in `state_dtype` (k dimension before v dimension), N = B; with ragged
lengths B = 1, the sequences are packed along T, cu_seqlens [N + 1] int32 holds their bounds and N is their count.
Inputs, decode: q, k [B, Hk, D], v [B, Hv, D], g and beta [B, Hv], state [rows, Hv, D, D] (the pool), state_rows [B]
int32: each sequence's row, distinct, permuted (0, 1, 2, ... with ids "identity"); -1 marks an empty slot, for which o
is zero.
Inputs, conv_decode (a step from what stands before it in the layer): mixed_qkv [B, channels] in `dtype`, the channels
being q [Hk, D], k [Hk, D], v [Hv, D]; conv_weight [channels, 4] in `dtype`, the newest token's last; conv_state
[rows, 3, channels] in `dtype`, oldest first; a, b [B, Hv] in `dtype`; A_log, dt_bias [Hv] float32; state and state_rows
as for decode, the rows being those of both states.
Besides them what other libraries take in the place of those: for prefill `decay`, exp(g); for decode `joined_qkv`
[B, 2 Hk D + Hv D], q, k and v of a token side by side, and raw gates `raw_a`, `raw_b` [B, Hv] float32, see `raw_gates`.
In a model the kernel ahead writes that form and no other, so neither `prepare` nor `run` of a peer has to make it.
`raw_qk` (a one-element tensor; its presence is the message, nobody reads it) says that q and k are not normalised.

Outputs: o in `dtype`, or in `out_dtype` where a workload has that axis. Prefill writes o and final_state; decode writes
o and updates `state`, which `outputs` clones from the pool; conv_decode also updates `conv_state`. IN_PLACE is empty
talk for prefill, whose outputs have no such names.

Checks draw q, k, v and the state with heavy tails: 4 % of the elements, anywhere, are 6 times as large. That tells a
format with one scale for many values from a floating one, see `tolerance`. And their initial state is as large as what
their tokens write, so that every operand has a good share in every output. Measurements draw all of them normal.

Regimes ("mixed" unless said): "mixed" draws g = -exp(A) softplus(x) with A spread over heads so that g spans about
-5 to -1e-4, as trained layers do; "forget": g in [-20, -5], the decay is near 0; "keep": g near -1e-4, decay near 1;
"beta0" and "beta1": the learning rate within 1e-3 of 0 or 1; "similar": keys within a chunk share a direction (cosine
about 0.9), gates near 1, which makes the triangular system's inverse alternate and defeats power-series inverses.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from kernels.common import Tensors, Tolerance, Workload, poisoned

DTYPES = {"f32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ACTIVATIONS = (
    *("q", "k", "v", "g", "beta", "decay", "joined_qkv", "raw_a", "raw_b"),
    *("mixed_qkv", "a", "b"),  # of conv_decode
)
IN_PLACE = ("state", "conv_state")
RECURRENT = ("state",)
CONV_WIDTH = 4
TAILS = ", heavy-tailed operands"
TAIL_SHARE, TAIL_GAIN = 0.04, 6.0
SPARE_ROWS = 3  # pool rows of a check workload that belong to nobody, to show stray writes


def _drawn_as(regime: str, role: str) -> str:
    return f"{regime} gates" + (TAILS if role == "check" else "")


def _prefill(
    T: int, heads: tuple[int, int], *, D: int = 64, batch: int = 1, dtype: str = "f32", lengths: str = "",
    qk_l2norm: int = 0, regime: str = "mixed", role: str = "check", source: str = "", out_dtype: str = "",
) -> Workload:  # fmt: skip
    tag = f"n{lengths.count('-') + 1}_t{T}" if lengths else (f"b{batch}_" if batch > 1 else "") + f"t{T}"
    suffix = "".join(
        f"_{word}"
        for word, shown in (
            (dtype, dtype != "bf16"),
            (f"out-{out_dtype}", out_dtype),
            (regime, regime != "mixed"),
            ("l2norm", qk_l2norm),
        )
        if shown
    )
    axes: dict[str, int | str] = {
        "op": "prefill", "batch": batch, "T": T, "lengths": lengths, "Hk": heads[0], "Hv": heads[1], "D": D,
        "dtype": dtype, "state_dtype": "f32", "qk_l2norm": qk_l2norm, "regime": regime, "pad": 0,
    }  # fmt: skip
    if out_dtype:
        axes["out_dtype"] = out_dtype
    return Workload(f"{tag}_hk{heads[0]}_hv{heads[1]}_d{D}{suffix}", axes, role, _drawn_as(regime, role), source)


def _decode(
    batch: int, heads: tuple[int, int], *, D: int = 64, dtype: str = "f32", state_dtype: str = "f32",
    qk_l2norm: int = 0, regime: str = "mixed", pad: int = 0, role: str = "check", source: str = "",
) -> Workload:  # fmt: skip
    suffix = "".join(
        f"_{word}"
        for word, shown in (
            (dtype, dtype != "bf16"),
            (f"state-{state_dtype}", state_dtype != "f32"),
            (regime, regime != "mixed"),
            ("l2norm", qk_l2norm),
            (f"pad{pad}", pad),
        )
        if shown
    )
    axes: dict[str, int | str] = {
        "op": "decode", "batch": batch, "T": 1, "lengths": "", "Hk": heads[0], "Hv": heads[1], "D": D,
        "dtype": dtype, "state_dtype": state_dtype, "qk_l2norm": qk_l2norm, "regime": regime, "pad": pad,
    }  # fmt: skip
    name = f"decode_b{batch}_hk{heads[0]}_hv{heads[1]}_d{D}{suffix}"
    return Workload(name, axes, role, _drawn_as(regime, role), source)


def _identity(workload: Workload) -> Workload:
    """The same decode with row i of the pool for sequence i, where others are permuted."""
    return replace(workload, id=f"{workload.id}_identity", axes={**workload.axes, "ids": "identity"})


def _from_conv(workload: Workload) -> Workload:
    """The same decode with the short convolution and the gates before it; keys come out of it unnormalised."""
    return replace(workload, id=f"conv_{workload.id}", axes={**workload.axes, "op": "conv_decode", "qk_l2norm": 1})


def _in_pool(workload: Workload, rows: int) -> Workload:
    """The same decode in a pool with room for more sequences than there are."""
    spare = rows - workload["batch"]
    return replace(workload, id=f"{workload.id}_pool{rows}", axes={**workload.axes, "spare": spare})


_27B, _35B = "q36-27b.gdn", "q36-35b-a3b.gdn"

WORKLOADS: tuple[Workload, ...] = (
    # check: around the chunk edges (63, 64, 65), one token, several chunks, and every regime once
    _prefill(1, (1, 1)),
    _prefill(5, (1, 2)),
    _prefill(63, (1, 3)),
    _prefill(64, (2, 2)),
    _prefill(65, (1, 1), batch=2),
    _prefill(130, (1, 1), qk_l2norm=1),
    _prefill(200, (1, 1), regime="keep"),
    _prefill(75, (1, 1), regime="forget"),
    _prefill(75, (1, 1), regime="beta0"),
    _prefill(75, (1, 1), regime="beta1"),
    _prefill(130, (1, 1), regime="similar"),
    _prefill(75, (1, 2), D=128, dtype="bf16"),
    _prefill(75, (1, 2), dtype="bf16", qk_l2norm=1),
    _prefill(137, (1, 1), lengths="7-64-1-65"),
    _prefill(66, (2, 4), lengths="1-65", dtype="bf16"),
    _prefill(75, (1, 2), D=128, dtype="bf16", out_dtype="f32", qk_l2norm=1),
    _decode(1, (1, 1)),
    _decode(3, (1, 3), D=128),
    _decode(5, (2, 4), qk_l2norm=1),
    _decode(5, (1, 2), pad=2),
    _decode(2, (1, 2), regime="forget"),
    _decode(2, (1, 2), regime="keep"),
    _decode(3, (2, 2), dtype="bf16"),
    _decode(3, (1, 2), dtype="bf16", state_dtype="bf16"),
    # measure: one layer of the models
    *(_prefill(T, (16, 48), D=128, dtype="bf16", role="measure", source=_27B) for T in (512, 2048, 8192)),
    _prefill(2048, (16, 48), D=128, batch=8, dtype="bf16", role="measure", source=_27B),
    # scans of a chunk or a few, for the router by length
    *(_prefill(T, (16, 48), D=128, dtype="bf16", role="measure", source=_27B) for T in (16, 32, 64, 128, 256)),
    # what one of several GPUs has of a layer: heads of a share, a long prompt. No model's own shape
    *(_prefill(T, (2, 8), D=128, dtype="bf16", role="measure") for T in (8192, 32768, 65536)),
    _prefill(32768, (4, 12), D=128, dtype="bf16", role="measure"),
    # the same without rounding what comes out, which alone is NMSE 2.8e-6
    *(
        _prefill(2048, (16, 48), D=128, batch=b, dtype="bf16", out_dtype="f32", role="measure", source=_27B)
        for b in (1, 8)
    ),
    *(_prefill(T, (16, 32), D=128, batch=32, dtype="bf16", role="measure", source=_35B) for T in (512, 2048)),
    *(
        _decode(b, (16, 48), D=128, dtype="bf16", state_dtype=state, role="measure", source=_27B)
        for state in ("f32", "bf16")
        for b in (1, 8, 32, 128, 256)
    ),
    # one sequence at its slot among eight
    _in_pool(_decode(1, (16, 48), D=128, dtype="bf16", role="measure", source=_27B), 8),
    # from the convolution on
    _from_conv(_decode(1, (1, 1))),
    _from_conv(_decode(3, (2, 6), D=128, dtype="bf16")),
    _from_conv(_decode(5, (1, 2), dtype="fp16", pad=2)),
    _from_conv(_decode(3, (1, 2), dtype="bf16", state_dtype="bf16")),
    *(
        _from_conv(_decode(b, (16, 48), D=128, dtype="bf16", state_dtype=state, role="measure", source=_27B))
        for state in ("f32", "bf16")
        for b in (1, 8, 32, 128, 256)
    ),
    # the same states in the pool's own order, which a gather reads as one stretch
    _identity(_decode(3, (1, 2))),
    *(_identity(_decode(b, (16, 48), D=128, dtype="bf16", role="measure", source=_27B)) for b in (1, 8, 32, 128, 256)),
)


def _gates(workload: Workload, shape: tuple[int, ...], rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """g (log decay) and beta of `shape` [..., Hv], float32, by regime."""
    device = rng.device
    noise = torch.randn(shape, generator=rng, device=device)
    uniform = torch.rand(shape, generator=rng, device=device)
    log_rate = torch.linspace(math.log(1e-3), math.log(2.0), shape[-1], device=device)  # exp(A_log), spread over heads
    g = (-F.softplus(noise) * log_rate.exp()).clamp(-5.0, -1e-4)
    beta = torch.sigmoid(torch.randn(shape, generator=rng, device=device))
    regime = workload["regime"]
    if regime == "forget":
        g = -5.0 - 15.0 * uniform
    elif regime in ("keep", "similar"):
        g = -1e-4 * (0.5 + uniform)
    elif regime == "beta0":
        beta = 1e-3 * uniform.clamp_min(1e-3)
    elif regime == "beta1":
        beta = 1.0 - 1e-3 * uniform.clamp_min(1e-3)
    elif regime != "mixed":
        raise ValueError(f"regime {regime!r} is unknown: use mixed, forget, keep, beta0, beta1 or similar")
    return g, beta


def _normal(workload: Workload, shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    """float32 of variance 1: standard normal, or with heavy tails where the workload has them."""
    x = torch.randn(shape, generator=rng, device=rng.device)
    if workload.inputs.endswith(TAILS):
        far = torch.rand(shape, generator=rng, device=rng.device) < TAIL_SHARE
        x = torch.where(far, TAIL_GAIN * x, x) / (1 + TAIL_SHARE * (TAIL_GAIN**2 - 1)) ** 0.5
    return x


def _written(workload: Workload) -> float:
    """Mean square of beta times tokens over D: what a sequence's values of variance 1 add to an element of the state.

    A token adds k (beta v)^T with |k| = 1; sigmoid(normal) has a mean square of 0.29.
    """
    tokens = int(workload["T"]) / (str(workload["lengths"]).count("-") + 1)
    return {"beta0": 1e-6 / 3, "beta1": 1.0}.get(str(workload["regime"]), 0.29) * tokens / int(workload["D"])


def state_variance(workload: Workload) -> float:
    """Of the initial state's elements: 1, or in checks what the tokens will write, at most 1."""
    return min(1.0, _written(workload)) if workload.inputs.endswith(TAILS) else 1.0


def _at_the_step(workload: Workload, lead: tuple[int, ...], rng: torch.Generator) -> Tensors:
    """q, k, v, g and beta, with `lead` dimensions ahead of heads and columns."""
    dtype = DTYPES[workload["dtype"]]
    heads_k, heads_v, dim = (workload[a] for a in ("Hk", "Hv", "D"))

    def normal(*shape: int) -> torch.Tensor:
        return _normal(workload, shape, rng)

    q, k = normal(*lead, heads_k, dim), normal(*lead, heads_k, dim)
    if workload["regime"] == "similar":
        k = normal(heads_k, dim) + 0.33 * k
    if not workload["qk_l2norm"]:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    g, beta = _gates(workload, (*lead, heads_v), rng)
    return {"q": q.to(dtype), "k": k.to(dtype), "v": normal(*lead, heads_v, dim).to(dtype), "g": g, "beta": beta}


def raw_gates(g: torch.Tensor, beta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 (a, b) with -softplus(a) = g and sigmoid(b) = beta; g < 0 and 0 < beta < 1, any shape.

    Found in float64 and rounded, they give g and beta back within about 2^-24 of the decay and of the rate.
    """
    g, beta = g.double(), beta.double()
    # log(exp(-g) - 1) = -g + log(1 - exp(g)), which does not overflow for a strong decay.
    return (-g + torch.log(-torch.expm1(g))).float(), (torch.log(beta) - torch.log1p(-beta)).float()


def _in_other_forms(step: Tensors, decode: bool) -> Tensors:
    """The activations of a step as other libraries take them."""
    if not decode:
        return {"decay": step["g"].exp()}
    a, b = raw_gates(step["g"], step["beta"])
    return {"joined_qkv": torch.cat([step[name].flatten(1) for name in "qkv"], dim=1), "raw_a": a, "raw_b": b}


def _before_the_step(workload: Workload, rng: torch.Generator) -> Tensors:
    """What conv_decode has in the place of q, k, v, g and beta; decays as the regime "mixed" spreads them."""
    device, dtype = rng.device, DTYPES[workload["dtype"]]
    batch, heads_k, heads_v, dim = (workload[a] for a in ("batch", "Hk", "Hv", "D"))
    channels = (2 * heads_k + heads_v) * dim

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, device=device)

    return {
        "mixed_qkv": normal(batch, channels).to(dtype),
        "conv_weight": normal(channels, CONV_WIDTH).to(dtype),
        "a": normal(batch, heads_v).to(dtype),
        "b": normal(batch, heads_v).to(dtype),
        "A_log": torch.linspace(math.log(1e-3), math.log(2.0), heads_v, device=device),
        "dt_bias": 0.1 * normal(heads_v),
    }


def _drawn_first(workload: Workload, rng: torch.Generator) -> Tensors:
    """The activations of a workload, and the weights of conv_decode."""
    if workload["op"] == "conv_decode":
        return _before_the_step(workload, rng)
    decode = workload["op"] != "prefill"
    step = _at_the_step(workload, (workload["batch"],) if decode else (workload["batch"], workload["T"]), rng)
    return step | _in_other_forms(step, decode)


def activations(workload: Workload, seed: int, device: torch.device | str) -> Tensors:
    """Those of `inputs` for this seed."""
    drawn = _drawn_first(workload, torch.Generator(device).manual_seed(seed))
    return {name: tensor for name, tensor in drawn.items() if name in ACTIVATIONS}


def inputs(workload: Workload, seed: int, device: torch.device | str) -> Tensors:
    """The tensors of a workload (see the file's docstring), drawn on `device` from `seed`; v and states are normal."""
    rng = torch.Generator(device).manual_seed(seed)
    dtype, state_dtype = DTYPES[workload["dtype"]], DTYPES[workload["state_dtype"]]
    batch, tokens, heads_k, heads_v, dim = (workload[a] for a in ("batch", "T", "Hk", "Hv", "D"))
    decode = workload["op"] != "prefill"

    spread = state_variance(workload) ** 0.5

    def normal(*shape: int) -> torch.Tensor:
        return _normal(workload, shape, rng)

    tensors = _drawn_first(workload, rng)
    if workload["qk_l2norm"]:
        tensors["raw_qk"] = torch.ones(1, device=device)
    if decode:
        rows = batch + int(workload.axes.get("spare", SPARE_ROWS if workload.role == "check" else 0))
        order = torch.randperm(rows, generator=rng, device=device)[:batch].to(torch.int32)
        if workload.axes.get("ids") == "identity":
            order = torch.arange(batch, dtype=torch.int32, device=device)
        order[batch - workload["pad"] :] = -1
        # Drawn row by row: the pool of the largest workload is 0.8 GB in float32 and bf16 would need both at once.
        state = torch.empty(rows, heads_v, dim, dim, dtype=state_dtype, device=device)
        for row in state:
            row.copy_(spread * normal(heads_v, dim, dim))
        if workload["op"] == "conv_decode":
            shape = (rows, CONV_WIDTH - 1, (2 * heads_k + heads_v) * dim)
            tensors["conv_state"] = torch.randn(shape, generator=rng, device=device).to(dtype)
        return tensors | {"state": state, "state_rows": order}
    lengths = [int(n) for n in str(workload["lengths"]).split("-")] if workload["lengths"] else []
    if lengths:
        if batch != 1 or sum(lengths) != tokens:
            raise ValueError(f"lengths {lengths} need batch = 1 and T = {sum(lengths)}, got {batch=} and T = {tokens}")
        bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        tensors["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=device)
    states = len(lengths) or batch
    return tensors | {"initial_state": (spread * normal(states, heads_v, dim, dim)).to(state_dtype)}


def outputs(workload: Workload, inputs: Tensors) -> Tensors:
    """Fresh outputs: o, poisoned; and final_state, poisoned (prefill), or state, a clone of the pool."""
    like = inputs["mixed_qkv" if workload["op"] == "conv_decode" else "v"]
    shape = (workload["batch"], workload["Hv"], workload["D"]) if workload["op"] == "conv_decode" else tuple(like.shape)
    o = poisoned(shape, DTYPES[str(workload.axes.get("out_dtype", workload["dtype"]))], like.device)
    if workload["op"] != "prefill":
        return {"o": o} | {name: inputs[name].clone() for name in IN_PLACE if name in inputs}
    initial = inputs["initial_state"]
    return {"o": o, "final_state": poisoned(tuple(initial.shape), initial.dtype, initial.device)}


# Relative rms error of rounding a normal number once to nearest, about 0.86 * 2^-(m+2) for m stored mantissa bits:
# bf16 1.68e-3 and fp16 2.1e-4 when tried with torch (the squares are NMSE 2.8e-6 and 4.3e-8).
ROUNDING = {"bf16": 1.68e-3, "fp16": 2.1e-4, "tf32": 2.1e-4}
FINER = {"bf16": ("fp16", "f32"), "fp16": ("f32",), "tf32": ("f32",)}  # inputs that a precision has to round


def _update_share(workload: Workload) -> float:
    """How much of the state's energy its own tokens wrote, 0 to 1; the rest is what is left of the initial state.

    A token's update is k (beta (v - S k))^T, of mean square beta^2 (1 + var S) / D an element where |k| = 1. Of the
    initial state half is taken to be left, and nothing where the regime forgets.
    """
    initial = state_variance(workload)
    wrote = _written(workload) * (1 + initial)
    return wrote / (wrote + (0.0 if workload["regime"] == "forget" else 0.5 * initial))


def tolerance(workload: Workload, precision: str) -> dict[str, Tolerance]:
    """Limits by output name for operands rounded to `precision` ("bf16", "fp16", "tf32", "f32").

    Prefill on matrix units rounds six operands on the way to an output (S, the corrected values, the inverse, V', P and
    the faded keys), independently, and where q, k and v arrive in a finer format these too: k on both sides of its
    products with itself, in the guess and in the update, v, and what the inverse is merged from. Of a state they touch
    what the tokens wrote, a part u of its energy (_update_share): the state errs by sqrt(6 u) roundings. An output
    reads a rounded S besides: sqrt(1 + 5 u). A tenth is added for what the mean over few elements scatters; the worst
    library on an H200 takes 2.39 of the sqrt(6) = 2.45 in a state and 2.45 in o, at T = 8192. A decode step from the
    convolution on rounds q, k and v alone, between its launches: sqrt(1 + 3 u) and sqrt(3 u). "f32" means float32
    throughout: sums of D terms, sqrt(D) 2^-24, with ten such sums in a chain.

    What that rejects: int8 with a scale for 32 values errs by amax / 127 / sqrt(12) a value, 5.2e-3 of normal values
    and 9e-3 of the heavy-tailed ones of the checks, where amax is 4 rms; e4m3 by 2.65e-2 and 8e-3 or more; bf16 in the
    place of f32 by 1.7e-3; against 4.5e-3 for bf16, 5.7e-4 for fp16 and tf32 and 5e-6 for f32. An operand's error
    reaches an output by its share in it, which is why the checks keep the shares alike. Measured shapes have normal
    operands and initial states: there q, k and the state are seen at every length, and v from 128 tokens on. Below, its
    share is w = 0.29 T / D of the state's energy, and int8's 5.2e-3 sqrt(w) = 1e-3 at T = 16 lies under the limit of
    1.6e-3 for what the guess, as large as v, is rounded to.

    One element may be off by 24 times the limit, in units of the rms, because errors follow an element's own size and
    the largest of the 12.6 million of a real prefill is 12 rms; by 40 times with heavy tails; and by 250 times after a
    convolution, where what a token writes is one product of a key and a value, each up to 8 rms, and every rounding of
    one element up to two and a half times the mean one.
    Raises ValueError on an unknown precision.
    """
    dtype, state = str(workload["dtype"]), "final_state" if workload["op"] == "prefill" else "state"
    if precision == "f32":
        limit = 10 * math.sqrt(workload["D"]) * 2.0**-24
        relative = {"o": limit, state: limit}
        reason = f"ten chained float32 sums of D = {workload['D']} terms"
    elif precision in ROUNDING:
        share, finer = _update_share(workload), dtype in FINER[precision]
        if workload["op"] == "prefill":
            rounded = {"o": 1 + 5 * share + finer * (1 + 5 * share), state: 6 * (1 + finer) * share}
        else:
            rounded = {"o": 1 + 3 * share, state: 3 * share}
        relative = {name: 1.1 * ROUNDING[precision] * n**0.5 for name, n in rounded.items()}
        counts = ", ".join(f"{n:.1f} of {name}" for name, n in rounded.items())
        reason = f"independent roundings to {precision} ({counts}; the tokens wrote {share:.0%} of the state)"
    else:
        raise ValueError(f"precision {precision!r} is unknown: use bf16, fp16, tf32 or f32")
    worst = 250 if workload["op"] == "conv_decode" else 40 if workload.inputs.endswith(TAILS) else 24
    limits = {name: Tolerance(limit, worst * limit, reason) for name, limit in relative.items()}
    if workload["op"] == "conv_decode":
        limits["conv_state"] = Tolerance(0.0, 0.0, "columns are moved, nothing is computed")
    return limits
