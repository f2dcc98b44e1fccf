"""How a step's parts follow each other; what a part is, a candidate says.

The residual stream is added and normed in one part, since every engine fuses the two. Where a part leaves something
for the next one it is a tensor; what is the same for all layers of a step (positions, places in the cache) `plan` makes
once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from kernels.common import Tensors, Workload
from kernels.nvfp4 import format as nvfp4

Args = dict[str, Any]
LONGEST_PROMPT = 64


@dataclass(frozen=True)
class Parts:
    """What a candidate computes with. x and all activations [tokens, features] are bf16, gains float32.

    linear:     (args, name, x) -> x @ weight(name)^T.
    add_norm:   (x, delta or None, gain) -> (x + delta, its RMS norm times gain).
    delta_rule: (args, at, mixed, a, b, state, conv) -> o [tokens, Hv, D]: convolution, gates and recurrence; both
                states of the layer are updated.
    gated_norm: (o [tokens, Hv, D], gain, z) -> RMS norm of o times gain times SiLU(z), [tokens, Hv D].
    rotate:     (args, at, q [tokens, Hq, 2, D] with its gate, k, v, k_cache, v_cache) -> q normed and turned; k, normed
                and turned, and v are in the caches. args["cos"], args["sin"] [tokens, 1, R] float32.
    attend:     (args, q, k_cache, v_cache) -> o [tokens, Hq, D].
    gate:       (o, q with its gate) -> o * sigmoid(gate), [tokens, Hq D].
    activate:   (gate, up) -> SiLU(gate) * up.
    """

    linear: Callable[[Args, str, torch.Tensor], torch.Tensor]
    add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    delta_rule: Callable[..., torch.Tensor]
    gated_norm: Callable[..., torch.Tensor]
    rotate: Callable[..., torch.Tensor]
    attend: Callable[..., torch.Tensor]
    gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    activate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def plan(inputs: Tensors) -> Args:
    """The inputs but for packed weights, gains ready to multiply with, and what all layers of the step share.

    positions [tokens] int32; slots [tokens] int64, page * page size + place in it; spans, the tokens of each sequence.
    """
    args: Args = {k: v for k, v in inputs.items() if ".weight_" not in k}
    args |= {
        k: v.float() if "linear_attn" in k else 1 + v.float() for k, v in args.items() if k.endswith("norm.weight")
    }
    page, table = inputs["k_cache"].shape[3], inputs["page_table"].long()
    args["spans"] = list(pairwise(inputs["cu_seqlens"].tolist()))
    args["starts"] = inputs["seq_lens"].tolist()
    args["rows"] = inputs["state_rows"].tolist()
    positions, slots = [], []
    for n, (first, last) in enumerate(args["spans"]):
        here = torch.arange(args["starts"][n], args["starts"][n] + last - first, device=table.device)
        positions.append(here)
        slots.append(table[n][here // page] * page + here % page)
    args["positions"], args["slots"] = torch.cat(positions).int(), torch.cat(slots)
    args["last"] = inputs["cu_seqlens"][1:].long() - 1
    return args


def in_bf16(inputs: Tensors) -> Tensors:
    """Every NVFP4 weight dequantised, under its name with ".weight"."""
    parts = ("packed", "scale", "tensor_scale")
    return {
        name: nvfp4.dequantise(nvfp4.Nvfp4(*(inputs[f"{name}_{part}"] for part in parts))).bfloat16()
        for name in (k.removesuffix("_packed") for k in inputs if k.endswith(".weight_packed"))
    }


def run(parts: Parts, args: Args, out: Tensors) -> None:
    """One step."""
    x, delta = args["model.embed_tokens.weight"][args["tokens"]], None
    angle = args["positions"][:, None, None] * args["inv_freq"]
    args = args | {"cos": angle.cos(), "sin": angle.sin()}
    linear, gdn, attention, layer = parts.linear, 0, 0, 0
    while f"model.layers.{layer}.input_layernorm.weight" in args:
        at = f"model.layers.{layer}."
        x, h = parts.add_norm(x, delta, args[f"{at}input_layernorm.weight"])
        if f"{at}linear_attn.A_log" in args:
            at += "linear_attn."
            mixed, z, a, b = (linear(args, f"{at}in_proj_{name}", h) for name in ("qkv", "z", "a", "b"))
            o = parts.delta_rule(args, at, mixed, a, b, out["state"][gdn], out["conv_state"][gdn])
            delta = linear(args, f"{at}out_proj", parts.gated_norm(o, args[f"{at}norm.weight"], z))
            gdn += 1
        else:
            at += "self_attn."
            caches = out["k_cache"][attention], out["v_cache"][attention]
            dim = caches[0].shape[3]
            q, k, v = (linear(args, f"{at}{name}_proj", h).unflatten(1, (-1, dim)) for name in ("q", "k", "v"))
            gated = q.unflatten(1, (-1, 2))
            turned = parts.rotate(args, at, gated, k, v, *caches)
            delta = linear(args, f"{at}o_proj", parts.gate(parts.attend(args, turned, *caches), gated))
            attention += 1
        at = f"model.layers.{layer}."
        x, h = parts.add_norm(x, delta, args[f"{at}post_attention_layernorm.weight"])
        hidden = parts.activate(*(linear(args, f"{at}mlp.{name}_proj", h) for name in ("gate", "up")))
        delta = linear(args, f"{at}mlp.down_proj", hidden)
        layer += 1
    assert delta is not None
    _, h = parts.add_norm(x[args["last"]], delta[args["last"]], args["model.norm.weight"])
    out["logits"].copy_(linear(args, "lm_head", h))
    torch.max(out["logits"], dim=-1, out=(out["next_logit"], out["next_token"]))


def refuses(workload: Workload) -> str:
    """Prompts that a loop over tokens would take thousands of launches a layer for."""
    longest = max(map(int, str(workload["lengths"] or workload["T"]).split("-")))
    return "" if longest <= LONGEST_PROMPT else f"T={longest}: a loop over tokens; {LONGEST_PROMPT} are the most"
