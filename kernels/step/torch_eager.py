"""A step in plain torch: library products on bf16 weights, everything else as a line of torch each.

The control that any engine starts from, and the arm that shows how many launches a step has where nothing is fused.
Activations and the residual stream are bf16, norms, gates, softmax and the recurrence float32. A prompt goes through
the recurrence token by token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.common import Candidate, Tensors
from kernels.kv import format as kv_format
from kernels.moe import torch_grouped
from kernels.step import wiring
from kernels.step.model import CONV_WIDTH, EPS
from kernels.step.wiring import Args, Parts

L2_EPS = 1e-6
E4M3_MAX = 448.0


def linear(args: Args, name: str, x: torch.Tensor) -> torch.Tensor:
    """x @ weight^T by the library, in bf16."""
    return F.linear(x, args[f"{name}.weight"])


def alpha_beta(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x times both weights in one product."""
    return wiring.halves(F.linear(x, weight))


def router(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The library's product, in bf16 and then wider."""
    return F.linear(x, weight).float()


def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """RMS norm over the last dimension, in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * gain).to(x.dtype)


def add_norm(x: torch.Tensor, delta: torch.Tensor | None, gain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream, bf16 or float32, with what a sublayer adds, and its norm in bf16."""
    x = x if delta is None else x + delta
    return x, norm(x, gain).to(torch.bfloat16)


def delta_rule(
    args: Args, at: str, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, state: torch.Tensor, conv: torch.Tensor
) -> torch.Tensor:
    """Convolution, gates and recurrence, sequence by sequence and token by token."""
    heads_v, dim = state.shape[1], state.shape[2]
    decay = torch.exp(-args[f"{at}A_log"].exp() * F.softplus(a.float() + args[f"{at}dt_bias"]))
    beta, filters = b.float().sigmoid(), args[f"{at}conv1d.weight"].float()
    heads_k = (mixed.shape[1] // dim - heads_v) // 2
    o = torch.empty(mixed.shape[0], heads_v, dim, dtype=mixed.dtype, device=mixed.device)
    for (first, last), row in zip(args["spans"], args["rows"], strict=True):
        window = torch.cat((conv[row], mixed[first:last]))
        conv[row] = window[-(CONV_WIDTH - 1) :]
        y = F.silu(F.conv1d(window.T[None].float(), filters, groups=filters.shape[0])[0].T).to(mixed.dtype)
        q, k, v = y.unflatten(1, (-1, dim)).float().split((heads_k, heads_k, heads_v), dim=1)
        q, k = (
            (s * torch.rsqrt(s.square().sum(-1, keepdim=True) + L2_EPS)).repeat_interleave(heads_v // heads_k, dim=1)
            for s in (q, k)
        )
        now = state[row].float()
        for t in range(last - first):
            now = now * decay[first + t, :, None, None]
            update = beta[first + t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", now, k[t]))
            now = now + torch.einsum("hk,hv->hkv", k[t], update)
            o[first + t] = torch.einsum("hkv,hk->hv", now, q[t]) * dim**-0.5
        state[row] = now
    return o


def gated_norm(o: torch.Tensor, gain: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """The norm of each head, times SiLU of the gate."""
    return (norm(o, gain).float() * F.silu(z.view(o.shape).float())).to(o.dtype).flatten(1)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, D] with its first 2 R elements turned; cos and sin are [tokens, 1, R]."""
    half = cos.shape[-1]
    low, high, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1).to(x.dtype)


def rotate(
    args: Args,
    at: str,
    gated: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """Norm, rotation, and a scatter into the pages."""
    q, k = norm(gated[:, :, 0], args[f"{at}q_norm.weight"]), norm(k, args[f"{at}k_norm.weight"])
    q, k = (turned(s, args["cos"], args["sin"]) for s in (q, k))
    page = k_cache.shape[2]
    places = args["slots"] // page, slice(None), args["slots"] % page
    if f"{at}k_block" in args:
        for cache, new, name in ((k_cache, k, "k_block"), (v_cache, v, "v_block")):
            codes, scales = kv_format.quantise_q8_0(new[:, :, None])
            cache[places], args[f"{at}{name}"][places] = codes[:, :, 0], scales[:, :, 0]
        return q
    for cache, new, scale in ((k_cache, k, f"{at}k_scale"), (v_cache, v, f"{at}v_scale")):
        if scale in args:
            new = (new.float() / args[scale][:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(cache.dtype)
        cache.view(torch.uint8 if scale in args else cache.dtype)[places] = (
            new.view(torch.uint8) if scale in args else new
        )
    return q


def widened(args: Args, name: str, cache: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """The pages `of` a cache [n, Hkv, page, D] in bf16. name: with the layer's, such as "...self_attn.k"."""
    pages, scale = cache[of], f"{name}_scale"
    if f"{name}_block" in args:
        return kv_format.dequantise_q8_0(pages, args[f"{name}_block"][of]).bfloat16()
    return (pages.float() * args[scale][:, None, None]).bfloat16() if scale in args else pages


def attend(args: Args, at: str, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
    """The library's attention over each sequence's gathered pages; a prompt's own mask is one that its kernels know."""
    made = []
    for n, (first, last) in enumerate(args["spans"]):
        pages = args["page_table"][n].long()
        keys, values = (
            widened(args, f"{at}{name}", cache, pages).transpose(0, 1).flatten(1, 2)[None]
            for name, cache in (("k", k_cache), ("v", v_cache))
        )
        fresh, length = args["starts"][n] == 0, args["starts"][n] + last - first
        keys, values = keys[:, :, :length], values[:, :, :length]
        seen = None if fresh else torch.arange(length, device=q.device) <= args["positions"][first:last, None]
        y = F.scaled_dot_product_attention(
            q[first:last].transpose(0, 1)[None], keys, values, attn_mask=seen, is_causal=fresh, enable_gqa=True
        )
        made.append(y[0].transpose(0, 1))
    return made[0].contiguous() if len(made) == 1 else torch.cat(made)  # libraries give it laid out as q: no copy


def gate(o: torch.Tensor, gated: torch.Tensor) -> torch.Tensor:
    """What attention gives, times the sigmoid of its gate."""
    return (o.float() * gated[:, :, 1].float().sigmoid()).to(o.dtype).flatten(1)


def activate(gates: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up, rounded in between as two calls do."""
    return F.silu(gates) * up


def mixture(args: Args, at: str, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The library's grouped products on bf16 weights."""
    y = torch.empty_like(x)
    torch_grouped.run({**args["mixtures"][at], "x": x, "logits": logits}, {"y": y})
    return y


PLAIN = Parts(linear, alpha_beta, add_norm, delta_rule, gated_norm, rotate, attend, gate, activate, mixture, router)


def prepare(inputs: Tensors) -> Args:
    """Weights in bf16, and the step's plan."""
    mixtures = {at: torch_grouped.prepare(own) for at, own in wiring.mixtures(inputs).items()}
    return wiring.plan(inputs) | wiring.in_bf16(inputs) | {"mixtures": mixtures}


def run(args: Args, out: Tensors) -> None:
    """One step."""
    wiring.run(PLAIN, args, out)


CANDIDATES = (Candidate("torch_eager", "bf16", run, prepare=prepare, refuses=wiring.refuses),)
