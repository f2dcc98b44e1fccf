"""The kernels that a step launches, by configuration: what its time is predicted from (lab/study/composed.py).

A call names a family's workload by its axes and, where the configuration says which, the candidate; else the router's
choice is meant. What no family measures (norms, gates, library products) has a cost and a number of launches instead.
Only what stands here can change a prediction, so a lever that is forgotten here is predicted to change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kernels.common import Cost, Workload
from kernels.step.cases import model_of, new_tokens
from kernels.step.config import GEMV, NORMED_TOKENS, RING_TOKENS, SCANS, W4A8_FROM, WIDE, Config, of
from kernels.step.cost import mixture_of, parts

PARTIAL_SUMS = 4.0 * 132 * 128 * 128  # bytes in which a product of many tokens adds up: a tile for each multiprocessor
SUMS_FROM = 17  # tokens, the fewest at which products add up in memory
NOTHING = Cost(0.0, 0.0)
SMALL = re.compile(
    r"^(begin|add_norm|norm_gemv|gated_norm|rotate|gate|activate)_kernel|elementwise|gather_kernel|CatArray"
)


@dataclass(frozen=True)
class Call:
    """`times` equal calls of a step. part: which it is of.

    family, axes: a workload of that family; name: its candidate, "" the router's for `precision` ("" the usual one).
    Without a family: cost and launches of one call; with one, its cost counts where no row and no model does.
    """

    part: str
    times: float
    family: str = ""
    axes: Mapping[str, int | str] = field(default_factory=dict)
    name: str = ""
    precision: str = ""
    cost: Cost = NOTHING
    launches: int = 1


def calls(workload: Workload, name: str) -> tuple[Call, ...]:
    """Of the candidate with this name; KeyError for one that is no configuration."""
    config, model, new = of(name, workload), model_of(workload), new_tokens(workload)
    attention, tokens = model.kinds.count("attention"), sum(new)
    gdn = model.layers - attention
    found = [*_products(workload, config), *_recurrence(workload, config, gdn), *_attention(workload, attention)]
    found += [*_small(workload, config, gdn, attention), *_ahead(workload, config, gdn)]
    head = parts(workload, config.precision)["head"]
    rows = tokens if config.all_logits else len(new)
    logits, launches = (4.0, 2) if config.ends == "fused" else (2.0 + 4.0, 4)
    need = Cost(2.0 * rows * model.vocab * model.hidden, head.bytes + logits * rows * model.vocab)
    found.append(Call("head", 1, cost=need, launches=launches))
    return tuple(found)


def launched(workload: Workload, names: Sequence[str]) -> list[str]:
    """What each launch of a served step is of, by the kernels' names in their order.

    "gdn", "attention", "ffn", "head", or "small" for what stands between products, recurrence and attention. A norm of
    the residual stream is ahead of every sublayer and of the head. Raises ValueError where a step has another number.
    """
    model = model_of(workload)
    found, sublayer, last = [], -1, 2 * model.layers
    for name in names:
        sublayer += name.startswith(("add_norm_kernel", "norm_gemv_kernel"))
        if sublayer < 0 or sublayer > last or SMALL.search(name):
            found.append("small")
        else:
            kinds = model.kinds[sublayer // 2] if sublayer < last else "head"
            found.append("ffn" if sublayer % 2 else kinds)
    if sublayer != last:
        raise ValueError(f"{sublayer + 1} norms of the residual stream: a step of {model.layers} layers has {last + 1}")
    return found


def host_launches(workload: Workload, name: str) -> float:
    """How often a step that is not captured asks the driver for something."""
    if of(name, workload).replayed:
        return 1
    return sum(call.times * (call.launches if not call.family else 1) for call in calls(workload, name))


def _products(workload: Workload, config: Config) -> list[Call]:
    model, new = model_of(workload), new_tokens(workload)
    tokens, found = sum(new), dict[tuple[str, int, int, int], float]()
    sizes = model.linears()
    for name, (n, k) in sizes.items():
        at, _, own = name.rpartition(".")
        if model.experts and ".mlp." in name:
            continue
        part = "ffn" if ".mlp." in name else "gdn products" if ".linear_attn." in name else "attention products"
        one = config.gate_up or config.gated
        if config.qkv and own in ("k_proj", "v_proj"):
            continue
        if config.qkv and own == "q_proj":
            n += sizes[f"{at}.k_proj"][0] + sizes[f"{at}.v_proj"][0]
        if own in ("gate_proj", "in_proj_qkv") and (one if own == "gate_proj" else config.packing in WIDE):
            n += sizes[f"{at}.{'up_proj' if own == 'gate_proj' else 'in_proj_z'}"][0]
        elif own in ("up_proj", "in_proj_z") and (one if own == "up_proj" else config.packing in WIDE):
            continue
        alone = config.per_sequence and own == "out_proj"
        key = (part, 1 if alone else tokens, n, k)
        found[key] = found.get(key, 0) + (len(new) if alone else 1)
    made = []
    if model.experts:
        logits, whole = 2.0 * model.experts * model.hidden, parts(workload, config.precision)["ffn"]
        asked = {axis: value for axis, value in mixture_of(workload).axes.items() if axis != "routing"}
        each = Cost(whole.flops / model.layers, whole.bytes / model.layers)
        made.append(Call("ffn", model.layers, "moe", asked, cost=each))
        launches = 0 if config.norms == "in_gemv" else 2
        launches = 1 if config.router == "gemv" and launches and tokens <= NORMED_TOKENS else launches
        made.append(Call("router", model.layers, cost=Cost(tokens * logits, logits), launches=launches))
    for (part, m, n, k), times in found.items():
        narrow = config.products == "w4a8" and m >= W4A8_FROM
        form = config.form(m)
        few = m <= RING_TOKENS  # more have no row of their own: the launch is taken away
        name = "cuda_w4a8" if narrow else form if few else ""
        axes: dict[str, int | str] = {"M": m, "N": n, "K": k}
        made.append(Call(part, times, "nvfp4", axes, name, "nvfp4-w4a8-fast" if narrow else ""))
        if form and not few:
            made.append(Call("ahead", -times, cost=Cost(0.0, 0.0)))
        if config.scratch and m >= SUMS_FROM:
            made.append(Call("scratch", times, cost=Cost(0.0, PARTIAL_SUMS), launches=2))
    return made


def _ahead(workload: Workload, config: Config, gdn: int) -> list[Call]:
    """What comes before a kernel's turn, taken away: its launch, and states or old tokens from memory."""
    whole, attention = parts(workload, config.precision), model_of(workload).kinds.count("attention")
    found = []
    if config.chained_attention:
        old = whole["attention"].bytes / attention if sum(new_tokens(workload)) <= RING_TOKENS else 0.0
        found.append(Call("ahead", -attention, cost=Cost(0.0, old)))  # more sequences' do not fit on chip
    if config.ahead == "state":
        found.append(Call("ahead", -gdn, cost=Cost(0.0, whole["gdn"].bytes / gdn / 2)))
    return found


def _recurrence(workload: Workload, config: Config, gdn: int) -> list[Call]:
    model, new = model_of(workload), new_tokens(workload)
    state = str(workload.axes.get("state_dtype", "f32"))
    heads: dict[str, int | str] = {"Hk": model.gdn_k_heads, "Hv": model.gdn_v_heads, "D": model.gdn_dim}
    mixed = 2.0 * sum(new) * model.channels
    if max(new) > 1:  # convolution and gates of a prompt in plain torch: a dozen passes over the mixed rows
        fused = config.convolution == "fused"
        around = Cost(0.0, (2 if fused else 12) * mixed)
        scan: dict[str, int | str] = {"T": max(new), "batch": len(new), **heads}
        return [
            Call("gdn", gdn, cost=around, launches=5 if fused else 10 + 3 * len(new)),
            Call("gdn", gdn, "gdn", scan, SCANS[config.scan]),
        ]
    axes = {"batch": len(new), **heads, "state_dtype": state, "dtype": "bf16", "pad": 0}
    whole, passes = parts(workload, config.precision)["gdn"], {"by_id": 1, "gathered": 2, "copied": 3}[config.state]
    each = Cost(whole.flops / gdn, passes * whole.bytes / gdn, "f32")
    if config.recurrence == "fused":
        return [Call("gdn", gdn, "gdn", {"op": "conv_decode", **axes}, "cuda_decode_conv", cost=each)]
    forms = {"by_id": "recurrent_decode", "gathered": "recurrent_decode_gathered", "copied": "recurrent_decode_copied"}
    step = Call("gdn", gdn, "gdn", {"op": "decode", **axes}, forms[config.state], cost=each)
    return [step, Call("gdn", gdn, cost=Cost(0.0, 5 * mixed), launches=2)]


def _attention(workload: Workload, attention: int) -> list[Call]:
    model, new, ctx = model_of(workload), new_tokens(workload), workload["ctx"]
    if max(new) > 1:
        need = parts(workload, "nvfp4-w4a16")["attention"]
        each = Cost(need.flops / attention, 3 * need.bytes / attention)  # pages gathered, read again
        return [Call("attention", attention, cost=each, launches=8 * len(new))]
    axes = {"ctx": max(ctx, 1), "batch": len(new), "Hq": model.heads, "Hkv": model.kv_heads, "D": model.head_dim}
    form = {"fp8": "fp8-kv", "q8_0": "q8_0-kv"}.get(str(workload.axes.get("cache")), "bf16")
    return [Call("attention", attention, "kv", {**axes, "page": 16}, precision=form)]


def _small(workload: Workload, config: Config, gdn: int, attention: int) -> list[Call]:
    """Between the large kernels: bytes in and out, a launch each."""
    model, new = model_of(workload), new_tokens(workload)
    tokens = float(sum(new))
    stream = 4.0 if config.stream == "f32" else 2.0
    value, query = 2.0 * model.gdn_v_heads * model.gdn_dim, 2.0 * model.heads * model.head_dim
    alphas = 2.0 * 2 * model.gdn_v_heads * model.hidden

    alone = 4 if config.packing == "none" else 2
    if config.packing in GEMV:
        alone = 0 if config.norms == "in_gemv" else 1 if tokens <= NORMED_TOKENS else 2

    def moved(part: str, times: float, each: float, launches: int = 1) -> Call:
        return Call(part, times, cost=Cost(0.0, each), launches=launches)

    found = [
        moved("residual", 2 * model.layers, tokens * model.hidden * (2 * stream + 2 * 2.0)),
        moved("small", gdn, tokens * 3 * value),
        moved("small", attention, tokens * (3 * query + 8.0 * model.kv_heads * model.head_dim)),
        moved("small", attention, tokens * 4 * query),
        moved("small", 1, tokens * model.hidden * 8, 1 if config.ends == "fused" else 8),
        # The library's products of 48 rows sum parts of K in a second launch each.
        moved("alpha and beta", gdn, alphas, alone),
    ]
    if not model.experts and not config.gated:
        found.append(moved("activation", model.layers, tokens * 3 * 2.0 * model.ffn))
    if config.packing in ("alpha_beta", "all") and tokens > 1:
        found.append(moved("copies", gdn, tokens * 8.0 * model.gdn_v_heads, 2))
    if config.waits:
        found.append(moved("waits", 2, 0.0))
    if config.per_sequence:
        found.append(moved("copies", gdn, tokens * 4.0 * model.hidden))
    return found
