"""A step in plain torch: library products on bf16 weights, everything else as a line of torch each.

The control that any engine starts from, and the arm that shows how many launches a step has where nothing is fused.
Activations and the residual stream are bf16, norms, gates, softmax and the recurrence float32. Captured, it replays
what `prepare` saw of tables and lengths. A prompt goes through the recurrence token by token.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from kernels.common import Candidate, Tensors, Workload
from kernels.nvfp4 import format as nvfp4
from kernels.step.model import CONV_WIDTH, EPS

L2_EPS = 1e-6
LONGEST_PROMPT = 64


def prepare(inputs: Tensors) -> dict[str, Any]:
    """Weights in bf16, and what a step needs to know of tables and lengths."""
    args: dict[str, Any] = {k: v for k, v in inputs.items() if not k.endswith(("_packed", "_scale", "_tensor_scale"))}
    for name in [k.removesuffix("_packed") for k in inputs if k.endswith(".weight_packed")]:
        parts = nvfp4.Nvfp4(*(inputs[f"{name}_{part}"] for part in ("packed", "scale", "tensor_scale")))
        args[name] = nvfp4.dequantise(parts).bfloat16()
    page, table, device = inputs["k_cache"].shape[3], inputs["page_table"].long(), inputs["page_table"].device
    args["spans"] = list(pairwise(inputs["cu_seqlens"].tolist()))
    args["angle"], args["angles"], args["at"], args["seen"] = [], [], [], []
    for n, (first, last) in enumerate(args["spans"]):
        start = int(inputs["seq_lens"][n])
        positions = torch.arange(start, start + last - first, device=device)
        angle = positions.float()[:, None, None] * inputs["inv_freq"]
        args["angle"].append(angle)
        args["angles"].append((angle.cos(), angle.sin()))
        args["at"].append((table[n][positions // page], positions % page, table[n]))
        args["seen"].append(torch.arange(table.shape[1] * page, device=device) <= positions[:, None])
    args["last"] = inputs["cu_seqlens"][1:].long() - 1
    args["rows"] = inputs["state_rows"].tolist()
    return args


def _norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * gain).to(x.dtype)


def _gdn(args: Any, at: str, x: torch.Tensor, state: torch.Tensor, conv: torch.Tensor) -> torch.Tensor:
    heads_v, dim = state.shape[1], state.shape[2]
    mixed, z, a, b = (F.linear(x, args[f"{at}in_proj_{name}.weight"]) for name in ("qkv", "z", "a", "b"))
    g = -args[f"{at}A_log"].exp() * F.softplus(a.float() + args[f"{at}dt_bias"])
    decay, beta = g.exp(), b.float().sigmoid()
    filters = args[f"{at}conv1d.weight"]
    heads_k = (mixed.shape[1] // dim - heads_v) // 2
    o = torch.empty(x.shape[0], heads_v, dim, dtype=x.dtype, device=x.device)
    for (first, last), row in zip(args["spans"], args["rows"], strict=True):
        window = torch.cat((conv[row], mixed[first:last]))
        conv[row] = window[-(CONV_WIDTH - 1) :]
        y = F.silu(F.conv1d(window.T[None].float(), filters.float(), groups=filters.shape[0])[0].T).to(x.dtype)
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
    gated = _norm(o, args[f"{at}norm.weight"]).float() * F.silu(z.unflatten(1, (heads_v, dim)).float())
    return F.linear(gated.to(x.dtype).flatten(1), args[f"{at}out_proj.weight"])


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    low, high, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1).to(x.dtype)


def _attention(args: Any, at: str, x: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
    _, heads_kv, _, dim = k_cache.shape
    q, k, v = (F.linear(x, args[f"{at}{name}_proj.weight"]) for name in ("q", "k", "v"))
    q, gate = q.unflatten(1, (-1, 2, dim)).unbind(2)
    k, v = (s.unflatten(1, (heads_kv, dim)) for s in (k, v))
    q, k = (_norm(s, 1 + args[f"{at}{name}_norm.weight"]) for s, name in ((q, "q"), (k, "k")))
    o = torch.empty_like(q)
    for n, (first, last) in enumerate(args["spans"]):
        pages, slots, table = args["at"][n]
        turned_q, turned_k = (_turned(s[first:last], *args["angles"][n]) for s in (q, k))
        k_cache[pages, :, slots], v_cache[pages, :, slots] = turned_k, v[first:last]
        keys, values = (c[table].transpose(0, 1).flatten(1, 2)[None] for c in (k_cache, v_cache))  # [1, Hkv, S, D]
        y = F.scaled_dot_product_attention(
            turned_q.transpose(0, 1)[None], keys, values, attn_mask=args["seen"][n], enable_gqa=True
        )
        o[first:last] = y[0].transpose(0, 1)
    return F.linear((o.float() * gate.float().sigmoid()).to(x.dtype).flatten(1), args[f"{at}o_proj.weight"])


def run(args: Any, out: Tensors) -> None:
    """One step; what a layer of either kind does is above."""
    x = args["model.embed_tokens.weight"][args["tokens"]]
    gdn = attention = layer = 0
    while f"model.layers.{layer}.input_layernorm.weight" in args:
        at = f"model.layers.{layer}."
        h = _norm(x, 1 + args[f"{at}input_layernorm.weight"])
        if f"{at}linear_attn.A_log" in args:
            x = x + _gdn(args, f"{at}linear_attn.", h, out["state"][gdn], out["conv_state"][gdn])
            gdn += 1
        else:
            x = x + _attention(args, f"{at}self_attn.", h, out["k_cache"][attention], out["v_cache"][attention])
            attention += 1
        h = _norm(x, 1 + args[f"{at}post_attention_layernorm.weight"])
        gate, up = (F.linear(h, args[f"{at}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, args[f"{at}mlp.down_proj.weight"])
        layer += 1
    out["logits"].copy_(F.linear(_norm(x[args["last"]], 1 + args["model.norm.weight"]), args["lm_head.weight"]))
    torch.max(out["logits"], dim=-1, out=(out["next_logit"], out["next_token"]))


def refuses(workload: Workload) -> str:
    """Prompts that would be a loop of thousands of launches a layer."""
    longest = max(map(int, str(workload["lengths"] or workload["T"]).split("-")))
    return "" if longest <= LONGEST_PROMPT else f"T={longest}: a loop over tokens; {LONGEST_PROMPT} are the most"


CANDIDATES = (Candidate("torch_eager", "bf16", run, prepare=prepare, refuses=refuses),)
