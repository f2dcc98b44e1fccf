"""Workloads of a step, their inputs and outputs, and how far a candidate may lie from the reference.

Weights are normal with standard deviation K^-1/2, those of out_proj, o_proj and down_proj SPREAD times as large, so
that every layer adds its share to the residual stream; gains of norms scatter by a tenth around what a fresh model has.
Decays spread over heads from 0.01 to 16 as a fresh model's do. States and caches before the step are normal. NVFP4
weights are quantised where the tensors lie.

Which experts a token has, the token says: an eighth and ninth logit of 256 lie so near to each other that roundings of
the layers ahead would often swap two experts, and an output off by one expert of eight is no error of rounding. So
the first E elements of an embedding are a code of top_k random experts, positive there and negative elsewhere; each
layer's router reads them in an order of its own; and no layer adds to them more than ASIDE of what it adds elsewhere.
Routing is then uniform over experts, with shares that differ, and the step is a mixture's in bytes and in time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from kernels.common import Tensors, Tolerance, Workload, poisoned
from kernels.kv import format as kv_format
from kernels.nvfp4 import format as nvfp4
from kernels.step.model import CONV_WIDTH, MODELS, Model

ACTIVATIONS = ("tokens",)
SCALES = "k_scale", "v_scale"
BLOCKS = "k_block", "v_block"
IN_PLACE = ("k_cache", "v_cache", "state", "conv_state", *BLOCKS)  # the last two of a Q8_0 cache alone
PICKS = {"next_token": "logits"}
PAGE = 16
SPREAD = 0.5
ENDS = ("out_proj", "o_proj", "down_proj")  # of products that add to the residual stream
ASIDE = 1 / 256  # not zero: a format's scale of a row of zeros is none
CODE = 2.0  # the least size of a code's elements, where an embedding's others are normal
E4M3 = 0.034  # relative rms of a product of e4m3 weights and activations, see kernels/nvfp4/cases.py
BY_BLOCK = 0.29 * 2**0.5 / 50
CACHE_BYTES = {"bf16": 2.0, "fp8": 1.0, "q8_0": 1 + 2 / 32}  # of a value, with its block's scale
ROUNDING = 1.66e-3  # relative rms of a normal value rounded to bf16, see kernels/nvfp4/cases.py


def _workload(
    op: str, model: str, npl: int, ctx: int, T: int = 1, lengths: str = "", layers: int = 0, role: str = "check",
    state: str = "f32", cache: str = "bf16",
) -> Workload:  # fmt: skip
    """An axis at its default is not in the id."""
    layers = layers or MODELS[model].layers
    depth = f"_l{layers}" if layers != MODELS[model].layers else ""
    axes: dict[str, int | str] = {
        "op": op, "model": model, "layers": layers, "npl": npl, "T": T, "lengths": lengths, "ctx": ctx,
    }  # fmt: skip
    forms = {k: v for k, v, usual in (("state_dtype", state, "f32"), ("cache", cache, "bf16")) if v != usual}
    new = f"_n{lengths}" if lengths else f"_t{T}" if op == "prefill" else ""
    name = f"{op}_{model}{depth}_npl{npl}{new}_ctx{ctx}" + "".join(f"_{k[:5]}-{v}" for k, v in forms.items())
    source = f"{model}.step" if role == "measure" and not depth else ""
    return Workload(name, axes | forms, role, "normal weights and states", source)


WORKLOADS = (
    _workload("decode", "odd", 1, 0),
    _workload("decode", "odd", 3, 17),
    _workload("decode", "small", 5, 33),
    _workload("prefill", "odd", 1, 0, 21),
    _workload("prefill", "small", 1, 0, 9),  # layers behind attention, which see a token that looked ahead
    _workload("prefill", "small", 2, 15, 9),
    _workload("prefill", "small", 2, 0, 49, layers=4),  # as many tokens as kernels of many take
    _workload("mixed", "odd", 3, 6, lengths="1-12-1"),
    _workload("decode", "odd", 3, 17, state="bf16"),
    _workload("decode", "odd", 3, 17, cache="fp8"),
    _workload("mixed", "small", 3, 6, lengths="1-5-1", state="bf16", cache="fp8"),
    _workload("decode", "odd", 3, 17, cache="q8_0"),
    _workload("mixed", "small", 3, 6, lengths="1-5-1", cache="q8_0"),
    _workload("decode", "odd-moe", 3, 17),
    _workload("mixed", "odd-moe", 3, 6, lengths="1-12-1"),
    _workload("decode", "small-moe", 5, 33),
    _workload("prefill", "small-moe", 2, 15, 9),
    *(_workload("decode", "q36-27b", npl, 1024, role="measure") for npl in (1, 8, 32, 128)),
    *(_workload("decode", "q36-27b", 1, ctx, role="measure") for ctx in (256, 8192, 32768)),
    *(_workload("prefill", "q36-27b", 1, 0, T, role="measure") for T in (512, 2048, 8192)),
    _workload("prefill", "q36-27b", 8, 0, 2048, role="measure"),
    # What cards compare, of fewer layers: of each arm two sets lie beside each other, states and caches in and out, and
    # the reference goes through prompts token by token.
    *(
        _workload("decode", "q36-27b", npl, 1024, layers=layers, role="measure", state=state)
        for npl, layers in ((1, 16), (8, 16), (32, 16), (128, 8))
        for state in ("f32", "bf16")
    ),
    *(
        _workload("decode", "q36-27b", npl, ctx, layers=layers, role="measure", cache=cache)
        for npl, ctx, layers in (
            (1, 1024, 16),
            (32, 256, 16),
            (32, 1024, 16),
            (1, 8192, 16),
            (8, 8192, 16),
            (32, 8192, 8),
            (1, 32768, 16),
        )
        for cache in ("bf16", "fp8", "q8_0")
        if (ctx, cache) != (1024, "bf16")
    ),
    *(_workload("prefill", "q36-27b", 1, 0, T, layers=8, role="measure") for T in (512, 2048)),
    *(_workload("prefill", "q36-27b", npl, 0, T, layers=4, role="measure") for npl, T in ((1, 8192), (8, 2048))),
    _workload("decode", "q36-27b", 128, 1024, layers=4, role="measure"),
    # Each kernel of a step once: for counters, whose time grows with the number of launches.
    *(_workload("decode", "q36-27b", npl, 1024, layers=4, role="measure") for npl in (1, 8, 32)),
    *(_workload("prefill", "q36-27b", 1, 0, T, layers=4, role="measure") for T in (512, 2048)),
    _workload("decode", "q36-27b", 32, 1024, layers=32, role="measure"),  # 64 layers of two arms need 145 GB
    *(_workload("decode", "q36-35b-a3b", npl, 1024, role="measure") for npl in (1, 8, 32, 128)),
    *(_workload("decode", "q36-35b-a3b", npl, 1024, layers=20, role="measure") for npl in (1, 8, 32, 128)),
    _workload("prefill", "q36-35b-a3b", 1, 0, 2048, role="measure"),
)
# Products of one input that a lever may compute as one; a checkpoint that is served so has one tensor scale there.
PACKS = (("in_proj_qkv", "in_proj_z"), ("gate_proj", "up_proj"), ("q_proj", "k_proj", "v_proj"))
E4M3_AT_8 = 8 / 448  # a scale by which values of an rms of one do not saturate


def model_of(workload: Workload) -> Model:
    """The model, with as many layers as the workload has."""
    return MODELS[workload["model"]].cut(workload["layers"])


def new_tokens(workload: Workload) -> tuple[int, ...]:
    """Of each sequence."""
    lengths = str(workload["lengths"])
    return tuple(map(int, lengths.split("-"))) if lengths else (workload["T"],) * workload["npl"]


def weights(model: Model, seed: int, device: torch.device | str, quantised: bool = True) -> Tensors:
    """Under transformers' names: the products in NVFP4, or in bf16 where not `quantised`; the rest bf16 or float32."""
    rng = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device=device)

    made: Tensors = {}
    for names in _packs(model):
        drawn = {}
        for name in names:
            n, k = model.linears()[name]
            spread = SPREAD if name.endswith(ENDS) else 1.0
            drawn[name] = _aside(model, name, normal(n, k) * (spread * k**-0.5))
        if not quantised:
            made |= {f"{name}.weight": w.bfloat16() for name, w in drawn.items()}
            continue
        largest = torch.stack([w.abs().max() for w in drawn.values()]).max()
        shared = (largest / (nvfp4.E2M1_MAX * nvfp4.E4M3_MAX)).reshape(1)
        for name, w in drawn.items():
            parts = nvfp4.quantise(w, shared)
            made |= {f"{name}.weight_{part}": getattr(parts, part) for part in ("packed", "scale", "tensor_scale")}
    for name, (experts, n, k) in model.stacks().items():
        w = normal(experts, n, k) * ((SPREAD if name.endswith(ENDS) else 1.0) * k**-0.5)
        w = _aside(model, name, w)
        if quantised:
            one = nvfp4.quantise(w.flatten(0, 1))
            made |= {f"{name}_{part}": getattr(one, part).view(experts, n, -1) for part in ("packed", "scale")}
            made[f"{name}_tensor_scale"] = one.tensor_scale.repeat(experts)
        else:
            made[name] = w.bfloat16()
    for name, shape in model.others().items():
        if name.endswith("A_log"):
            made[name] = torch.empty(shape, device=device).uniform_(0.01, 16, generator=rng).log()
        elif name.endswith("dt_bias"):
            # softplus(dt_bias) from 0.001 to 0.1, as the layer is initialised before it is trained: a state outlives
            # many tokens. One forgotten at once leaves (q k) v, of which the norm behind it keeps the rounding alone.
            dt = torch.empty(shape, device=device).uniform_(math.log(1e-3), math.log(0.1), generator=rng).exp()
            made[name] = dt.expm1().log()
        elif name.endswith("linear_attn.norm.weight"):
            made[name] = 1 + 0.1 * normal(*shape)
        elif name.endswith("norm.weight"):  # applied as 1 + weight
            made[name] = 0.1 * normal(*shape)
        else:
            scale = 1.0 if name == "model.embed_tokens.weight" else shape[-1] ** -0.5
            w = normal(*shape) * scale
            if model.experts and name == "model.embed_tokens.weight":
                w[:, : model.experts] = -CODE
                picked = torch.rand(model.vocab, model.experts, generator=rng, device=device).topk(model.top_k).indices
                w.scatter_(1, picked, CODE * (1 + torch.rand(picked.shape, generator=rng, device=device)))
            elif name.endswith("mlp.gate.weight"):
                w *= 0.1
                order = torch.randperm(model.experts, generator=rng, device=device)
                w[torch.arange(model.experts, device=device), order] = 1.0
            made[name] = w.bfloat16()
    if model.experts:
        made["top_k"] = torch.tensor(model.top_k, device=device)
    powers = torch.arange(0, model.rotary, 2, device=device, dtype=torch.float32) / model.rotary
    return made | {"inv_freq": model.theta**-powers}


def _aside(model: Model, name: str, w: torch.Tensor) -> torch.Tensor:
    """The weights [..., N, K] with the rows that would add to a mixture's codes made small."""
    if model.experts and name.endswith(ENDS):
        w[..., : model.experts, :] *= ASIDE
    return w


def _packs(model: Model) -> Iterator[tuple[str, ...]]:
    """The products whose weights share a tensor scale, alone where they share it with none."""
    linears, done = model.linears(), set[str]()
    for name in linears:
        at, _, own = name.rpartition(".")
        pack = next((tuple(f"{at}.{one}" for one in pack) for pack in PACKS if own in pack), (name,))
        if name not in done:
            done |= {*pack}
            yield pack


def bytes_of(workload: Workload) -> dict[str, float]:
    """Of a step's inputs: "products" in NVFP4, "other weights", "states", "caches"."""
    model, new = model_of(workload), new_tokens(workload)
    attention, cache = model.kinds.count("attention"), CACHE_BYTES[str(workload.axes.get("cache", "bf16"))]
    tokens = len(new) * -(-(workload["ctx"] + max(new)) // PAGE) * PAGE
    state = model.gdn_v_heads * model.gdn_dim**2 * (2.0 if workload.axes.get("state_dtype") == "bf16" else 4.0)
    state += (CONV_WIDTH - 1) * model.channels * 2.0
    return {
        "products": 0.5625 * sum(map(math.prod, (*model.linears().values(), *model.stacks().values()))),
        "other weights": 2.0 * sum(math.prod(shape) for shape in model.others().values()),
        "states": (model.layers - attention) * len(new) * state,
        "caches": attention * tokens * 2 * model.kv_heads * model.head_dim * cache,
    }


def empty(model: Model, npl: int, tokens: int, device: torch.device | str, dtype: torch.dtype) -> Tensors:
    """Caches with room for so many tokens a sequence, states of zeros, and tables in order."""
    pages, attention = -(-tokens // PAGE), model.kinds.count("attention")
    gdn = model.layers - attention
    cache = (attention, npl * pages, model.kv_heads, PAGE, model.head_dim)
    state = (gdn, npl, model.gdn_v_heads, model.gdn_dim, model.gdn_dim)
    return {
        "k_cache": torch.zeros(cache, dtype=dtype, device=device),
        "v_cache": torch.zeros(cache, dtype=dtype, device=device),
        "state": torch.zeros(state, dtype=torch.promote_types(dtype, torch.float32), device=device),
        "conv_state": torch.zeros(gdn, npl, CONV_WIDTH - 1, model.channels, dtype=dtype, device=device),
        "page_table": torch.arange(npl * pages, device=device, dtype=torch.int32).view(npl, pages),
        "state_rows": torch.arange(npl, device=device, dtype=torch.int32),
    }


def held(workload: Workload, device: torch.device | str) -> Tensors:
    """The weights, of one seed: 16 GB of Qwen3.6-27B, which all arms of a comparison read."""
    return weights(model_of(workload), 0, device)


def own(workload: Workload, seed: int, device: torch.device | str) -> Tensors:
    """States, caches, tables and tokens; pages and rows of the pools are permuted.

    A cache of fp8 is float8_e4m3fn, a value its code times k_scale or v_scale [attention layers, Hkv] float32; one of
    Q8_0 is int8, a value its code times that in k_block or v_block [attention layers, pages, Hkv, page, D / 32] half,
    which are updated with it.
    """
    model, new, ctx = model_of(workload), new_tokens(workload), workload["ctx"]
    made = empty(model, len(new), ctx + max(new), device, torch.bfloat16)
    rng = torch.Generator(device=device).manual_seed(seed + 1)
    for name in (name for name in IN_PLACE if name in made):
        made[name].normal_(generator=rng).mul_(0.2 if name == "state" else 1.0)
    if workload.axes.get("state_dtype") == "bf16":
        made["state"] = made["state"].bfloat16()
    if workload.axes.get("cache") == "fp8":
        heads = model.kinds.count("attention"), model.kv_heads
        for name, scale in zip(("k_cache", "v_cache"), SCALES, strict=True):
            made[scale] = E4M3_AT_8 * (1 + torch.rand(heads, generator=rng, device=device))
            for layer, by in zip(made[name], made[scale], strict=True):  # one at a time: they are gigabytes
                layer.div_(by[:, None, None])
            made[name] = made[name].to(torch.float8_e4m3fn)
    if workload.axes.get("cache") == "q8_0":
        for name, block in zip(("k_cache", "v_cache"), BLOCKS, strict=True):
            layers = [kv_format.quantise_q8_0(layer) for layer in made[name]]
            made[name], made[block] = (torch.stack(parts) for parts in zip(*layers, strict=True))
    for name in ("page_table", "state_rows"):
        table = made[name]
        order = torch.randperm(table.numel(), generator=rng, device=device, dtype=torch.int64)
        made[name] = table.flatten()[order].view(table.shape)
    bounds = torch.tensor((0, *new), device=device).cumsum(0, dtype=torch.int32)
    lengths = torch.full((len(new),), ctx, dtype=torch.int32, device=device)
    return made | {"cu_seqlens": bounds, "seq_lens": lengths} | activations(workload, seed, device)


def inputs(workload: Workload, seed: int = 0, device: torch.device | str = "cpu") -> Tensors:
    """Weights of this seed, and what is a step's own."""
    return weights(model_of(workload), seed, device) | own(workload, seed, device)


def activations(workload: Workload, seed: int, device: torch.device | str) -> Tensors:
    """The new tokens alone."""
    rng = torch.Generator(device=device).manual_seed(seed)
    vocab = MODELS[workload["model"]].vocab
    return {"tokens": torch.randint(vocab, (sum(new_tokens(workload)),), generator=rng, device=device)}


def outputs(workload: Workload, inputs: Tensors) -> Tensors:
    """logits, next_token, next_logit, poisoned; caches and states as they are before the step."""
    n, vocab, device = len(new_tokens(workload)), MODELS[workload["model"]].vocab, inputs["tokens"].device
    return {
        "logits": poisoned((n, vocab), torch.float32, device),
        "next_token": poisoned((n,), torch.int64, device),
        "next_logit": poisoned((n,), torch.float32, device),
        **{name: inputs[name].clone() for name in IN_PLACE if name in inputs},
    }


def tolerance(workload: Workload, precision: str) -> dict[str, Tolerance]:
    """Limits by output name for activations and residual stream in `precision`; raises ValueError on an unknown one.

    A sublayer rounds about six times on its way (norm, products, gate, what it adds), the residual stream once: of its
    energy e against the stream's that is 1 + 6 e roundings of the stream, and what was off before stays off, because
    every layer norms what it reads. With e of a half, and three roundings for the head, L layers of two sublayers err
    by sqrt(8 L + 4) roundings; half more is allowed, and the tests hold that logits take a quarter of it at least. Of
    the caches only the new tokens can be off. Heavy tails: one element of a state is the product of a key and a value.

    This is for wiring, order and updates: a layer left out, a position off by one, a state not written. What formats a
    product may use is the products' own check (kernels/nvfp4, gdn, kv), which 64 layers of rounding would hide.

    In nvfp4-w4a8 the two products in turn of a sublayer round by E4M3 instead: of its six roundings two. A cache of
    fp8 stores a new token's key a whole code away where the two computations lie on two sides of a midpoint,
    which an error of `limit` makes as likely as limit over the code's width, 2^-3 of a value at most and half that in
    the mean: sqrt(limit / 16) of the new tokens' energy, and one code of the largest value. A code of Q8_0
    is of about 50, rms: two roundings of it are BY_BLOCK.

    Another next token than the reference's is right where the reference's own two logits lie within both their errors.
    """
    sublayer = {"bf16": 4 * ROUNDING**2, "nvfp4-w4a16": 4 * ROUNDING**2, "nvfp4-w4a8": 3 * ROUNDING**2 + E4M3**2}
    if precision not in sublayer:
        raise ValueError(f"precision {precision!r} is unknown: use one of {', '.join(sublayer)}")
    limit = 1.5 * (2 * workload["layers"] * sublayer[precision] + 4 * ROUNDING**2) ** 0.5
    new = new_tokens(workload)
    fresh = sum(new) / (len(new) * (workload["ctx"] + max(new)))
    why = f"{workload['layers']} layers of {'e4m3' if precision == 'nvfp4-w4a8' else 'bf16'} roundings"
    by_code = workload.axes.get("cache") == "fp8"
    cached, largest = ((limit / 16) ** 0.5 + limit, 16 * limit + 0.7) if by_code else (limit, 16 * limit)
    blocks = {}
    if workload.axes.get("cache") == "q8_0":
        cached, largest = limit + BY_BLOCK, 16 * limit + 0.1
        blocks = {name: Tolerance(limit * fresh**0.5, 16 * limit, f"{why}, a block's largest value") for name in BLOCKS}
    return {
        "logits": Tolerance(limit, 8 * limit, why),
        "next_token": Tolerance(2**0.5 * limit, 16 * limit, f"{why}, of two logits that nearly agree"),
        "next_logit": Tolerance(limit, 8 * limit, why),
        "k_cache": Tolerance(cached * fresh**0.5, largest, f"{why}, in {fresh:.1%} of the cache"),
        "v_cache": Tolerance(cached * fresh**0.5, largest, f"{why}, in {fresh:.1%} of the cache"),
        **blocks,
        "state": Tolerance(limit, 45 * limit, why),
        "conv_state": Tolerance(limit, 16 * limit, why),
    }
