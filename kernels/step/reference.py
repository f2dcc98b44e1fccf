"""A hybrid model's step in float64, one layer after the other and one token after the other.

What is rounded nowhere: activations, what is appended to the caches, states. NVFP4 weights are decoded by the code of
kernels/nvfp4/reference.py. Held against transformers' models of the same weights in tests/kernels/step.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F

from kernels.common import Tensors
from kernels.gdn.reference import L2_EPS
from kernels.gdn.reference import step as delta_step
from kernels.moe.reference import TOGETHER, matrices, swiglu
from kernels.nvfp4.reference import weights as nvfp4_weights
from kernels.step.model import CONV_WIDTH, EPS

SCORED = 512  # tokens whose scores are computed at once
TOKENS = 4096  # that go through a dense part at once: between its products they are 34,816 wide
HEAD_ROWS = 16384  # rows of the head that are float64 at once: all 248,320 of 5,120 would be 10.2 GB


def weight(inputs: Tensors, name: str) -> torch.Tensor:
    """A product's weights [N, K] in float64, whichever form they are in. `name` is without ".weight"."""
    if f"{name}.weight" in inputs:
        return inputs[f"{name}.weight"].double()
    parts = {f"w_{part}": inputs[f"{name}.weight_{part}"] for part in ("packed", "scale", "tensor_scale")}
    return nvfp4_weights(parts).double()


def rms_norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """x / rms(x) * gain over the last dimension."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * gain


def in_e4m3(x: torch.Tensor) -> torch.Tensor:
    """x rounded to the nearest e4m3 value, even at a tie, saturating at 448: three bits behind the first."""
    exponent = torch.frexp(x).exponent.clamp(min=-5).double() - 4  # 2^-9 apart below 2^-6
    return ((x / exponent.exp2()).round() * exponent.exp2()).clamp(-448, 448)


def in_q8_0(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales of 32 values each): ggml's Q8_0 of x [..., D], halves away from zero, scales rounded to half."""
    blocks = x.unflatten(-1, (-1, 32))
    d = blocks.abs().amax(-1) / 127
    codes = blocks / d.clamp_min(1e-300)[..., None]
    return (codes.sign() * (codes.abs() + 0.5).floor()).flatten(-2), d.half().double()


def rotated(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] with its first 2 R elements turned: i and i + R by the angle positions [T] * inv_freq[i]."""
    half = inv_freq.numel()
    angle = positions.double()[:, None, None] * inv_freq.double()
    low, high, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


def gdn_layer(
    inputs: Tensors, at: str, x: torch.Tensor, spans: list[tuple[int, int]], state: torch.Tensor, conv: torch.Tensor
) -> torch.Tensor:
    """x [total, hidden] through one Gated DeltaNet layer; state [rows, Hv, D, D] and conv [rows, 3, C] are updated."""
    heads_v, dim = state.shape[1], state.shape[2]
    mixed, z = (x @ weight(inputs, f"{at}in_proj_{name}").T for name in ("qkv", "z"))
    a, b = (x @ weight(inputs, f"{at}in_proj_{name}").T for name in ("a", "b"))
    g = -inputs[f"{at}A_log"].double().exp() * F.softplus(a + inputs[f"{at}dt_bias"].double())
    filters = inputs[f"{at}conv1d.weight"].double()[:, 0].T  # [4, C]
    heads_k = (mixed.shape[1] // dim - heads_v) // 2
    y = torch.empty_like(mixed)
    for (first, last), row in zip(spans, inputs["state_rows"].tolist(), strict=True):
        window = torch.cat((conv[row], mixed[first:last]))
        conv[row] = window[-(CONV_WIDTH - 1) :]
        y[first:last] = sum(window[i : i + last - first] * filters[i] for i in range(CONV_WIDTH))
    q, k, v = F.silu(y).unflatten(1, (-1, dim)).split((heads_k, heads_k, heads_v), dim=1)
    q, k = (
        (s / torch.sqrt((s * s).sum(-1, keepdim=True) + L2_EPS)).repeat_interleave(heads_v // heads_k, dim=1)
        for s in (q, k)
    )
    # [longest, sequences, ...]: where a sequence has no token any more, g and beta of 0 leave its state as it is.
    token = torch.cat([torch.arange(last - first, device=x.device) for first, last in spans])
    of = torch.repeat_interleave(inputs["cu_seqlens"].long().diff())
    step = [
        s.new_zeros(int(token.max()) + 1, len(spans), *s.shape[1:]).index_put((token, of), s)
        for s in (q, k, v, g, torch.sigmoid(b))
    ]
    rows, o = inputs["state_rows"].long(), torch.empty_like(step[2])
    running = state[rows]
    for t in range(len(o)):
        o[t], running = delta_step(running, *(s[t] for s in step))
    state[rows], o = running, o[token, of]
    o = rms_norm(o, inputs[f"{at}norm.weight"].double()) * F.silu(z.unflatten(1, (heads_v, dim)))
    return o.flatten(1) @ weight(inputs, f"{at}out_proj").T


def attention_layer(
    inputs: Tensors,
    at: str,
    x: torch.Tensor,
    spans: list[tuple[int, int]],
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: tuple[torch.Tensor, ...] = (),
    blocks: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor:
    """x [total, hidden] through one attention layer; the caches [pages, Hkv, page, D] get the new tokens.

    scales: [Hkv] of k and v where the caches hold e4m3 values; what is stored then loses what the format does.
    blocks: [pages, Hkv, page, D / 32] of k and v where they hold Q8_0 codes; the new tokens' are written too.
    """
    _, heads_kv, page, dim = k_cache.shape
    q, gate = (x @ weight(inputs, f"{at}q_proj").T).unflatten(1, (-1, 2, dim)).unbind(2)
    k, v = ((x @ weight(inputs, f"{at}{name}_proj").T).unflatten(1, (heads_kv, dim)) for name in ("k", "v"))
    q, k = (rms_norm(s, 1 + inputs[f"{at}{name}_norm.weight"].double()) for s, name in ((q, "q"), (k, "k")))
    group, o = q.shape[1] // heads_kv, torch.empty_like(q)
    for n, (first, last) in enumerate(spans):
        start = int(inputs["seq_lens"][n])
        positions = torch.arange(start, start + last - first, device=x.device)
        pages, slots = inputs["page_table"][n].long()[positions // page], positions % page
        turned_q, turned_k = (rotated(s[first:last], positions, inputs["inv_freq"]) for s in (q, k))
        for cache, new, by in zip((k_cache, v_cache), (turned_k, v[first:last]), scales or (None, None), strict=True):
            cache[pages, :, slots] = new if by is None else in_e4m3(new / by.double()[:, None])
        for cache, new, block in zip((k_cache, v_cache), (turned_k, v[first:last]), blocks, strict=False):
            cache[pages, :, slots], block[pages, :, slots] = in_q8_0(new)
        used = inputs["page_table"][n].long()[: math.ceil((start + last - first) / page)]
        keys, values = (
            c[used].transpose(1, 2).flatten(0, 1)[: start + last - first].repeat_interleave(group, dim=1)
            for c in (k_cache, v_cache)
        )
        if blocks:
            every = (b[used].transpose(1, 2).flatten(0, 1)[: start + last - first] for b in blocks)
            wide = (b.repeat_interleave(32, dim=-1).repeat_interleave(group, dim=1) for b in every)
            keys, values = (codes * by for codes, by in zip((keys, values), wide, strict=True))
        if scales:
            wide = (by.double().repeat_interleave(group)[:, None] for by in scales)
            keys, values = (codes * by for codes, by in zip((keys, values), wide, strict=True))
        for some in torch.arange(last - first, device=x.device).split(SCORED):  # of a long prompt they are gigabytes
            scores = torch.einsum("thd,shd->hts", turned_q[some], keys) * dim**-0.5
            seen = torch.arange(keys.shape[0], device=x.device) <= positions[some, None]
            scores = scores.masked_fill(~seen, -math.inf)
            o[first + some] = torch.einsum("hts,shd->thd", scores.softmax(-1), values)
    return (o * torch.sigmoid(gate)).flatten(1) @ weight(inputs, f"{at}o_proj").T


def mixture(inputs: Tensors, at: str, x: torch.Tensor) -> torch.Tensor:
    """x [total, hidden] through one mixture: the experts that each token's logits pick, and the shared one."""

    def of_experts(name: str, some: torch.Tensor) -> torch.Tensor:
        name = f"{at}experts.{name}_proj"
        return inputs[name][some].double() if name in inputs else matrices(inputs, name, some)

    picked = (x @ weight(inputs, f"{at}gate").T).topk(int(inputs["top_k"]), dim=-1)
    share = picked.values.softmax(-1)
    gate, up, down = (weight(inputs, f"{at}shared_expert.{name}_proj") for name in ("gate", "up", "down"))
    y = torch.sigmoid(x @ weight(inputs, f"{at}shared_expert_gate").T) * swiglu(x, torch.cat((gate, up)), down)
    for some in picked.indices.unique().split(TOGETHER):
        for e, *of_e in zip(some.tolist(), *(of_experts(name, some) for name in ("gate_up", "down")), strict=True):
            token, place = torch.nonzero(picked.indices == e, as_tuple=True)
            y.index_add_(0, token, share[token, place, None] * swiglu(x[token], *of_e))
    return y


def dense(inputs: Tensors, at: str, x: torch.Tensor) -> torch.Tensor:
    """x [total, hidden] through one dense feed-forward part."""
    gate, up, down = (weight(inputs, f"{at}{name}_proj") for name in ("gate", "up", "down"))
    return torch.cat([swiglu(some, torch.cat((gate, up)), down) for some in x.split(TOKENS)])


def decoded(inputs: Tensors, at: str) -> Tensors:
    """`inputs` with the NVFP4 weights of the products below `at` in float64 beside them."""
    names = [n.removesuffix(".weight_packed") for n in inputs if n.startswith(at) and n.endswith(".weight_packed")]
    return inputs | {f"{name}.weight": weight(inputs, name) for name in names}


def reference(inputs: Tensors) -> Tensors:
    """What a step gives; `inputs` as the package's docstring describes them.

    Returns logits, next_logit and the updated caches and states in float64, and next_token.
    """
    return repeated(inputs, 1)


def repeated(inputs: Tensors, calls: int) -> Tensors:
    """What the last of so many steps gives, each on the caches and states that the one before stored in their types.

    The same as `reference` so often. Layer by layer, so that the weights of one are decoded once and not for each call.
    """
    spans = list(pairwise(inputs["cu_seqlens"].tolist()))
    names = "k_cache", "v_cache", "state", "conv_state", "k_block", "v_block"
    kept = {name: inputs[name].to(torch.float64, copy=True) for name in names if name in inputs}
    streams = [inputs["model.embed_tokens.weight"][inputs["tokens"]].double() for _ in range(calls)]
    gdn = attention = layer = 0
    while f"model.layers.{layer}.input_layernorm.weight" in inputs:
        at = f"model.layers.{layer}."
        recurrent = f"{at}linear_attn.A_log" in inputs
        mixer = f"{at}{'linear_attn' if recurrent else 'self_attn'}."
        given = decoded(inputs, mixer) if calls > 1 else inputs
        for call, x in enumerate(streams):
            of_layer = {n: t[gdn if recurrent else attention] for n, t in kept.items() if ("state" in n) == recurrent}
            for name, tensor in of_layer.items() if call else ():
                tensor.copy_(tensor.to(inputs[name].dtype))
            h = rms_norm(x, 1 + inputs[f"{at}input_layernorm.weight"].double())
            if recurrent:
                x = x + gdn_layer(given, mixer, h, spans, of_layer["state"], of_layer["conv_state"])
            else:
                scales = tuple(inputs[name][attention] for name in ("k_scale", "v_scale") if name in inputs)
                blocks = tuple(of_layer[name] for name in ("k_block", "v_block") if name in of_layer)
                caches = of_layer["k_cache"], of_layer["v_cache"]
                x = x + attention_layer(given, mixer, h, spans, *caches, scales, blocks)
            streams[call] = x
        x = torch.cat(streams)  # a token's own from here on, of whichever call
        h = rms_norm(x, 1 + inputs[f"{at}post_attention_layernorm.weight"].double())
        x = x + (mixture if f"{at}mlp.gate.weight" in inputs else dense)(inputs, f"{at}mlp.", h)
        streams = list(x.split(len(streams[0])))
        gdn, attention, layer = gdn + recurrent, attention + (not recurrent), layer + 1
    last = inputs["cu_seqlens"][1:].long() - 1
    y = rms_norm(streams[-1][last], 1 + inputs["model.norm.weight"].double())
    logits = torch.cat([y @ part.double().T for part in inputs["lm_head.weight"].split(HEAD_ROWS)], dim=1)
    highest = logits.max(-1)
    return {"logits": logits, "next_token": highest.indices, "next_logit": highest.values, **kept}
