"""How a step's parts follow each other; what a part is, a candidate says.

The residual stream is added and normed in one part, since every engine fuses the two. Where a part leaves something
for the next one it is a tensor; what is the same for all layers of a step (positions, places in the cache) `plan` makes
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from kernels.common import Tensors, Workload
from kernels.nvfp4 import format as nvfp4
from kernels.step.cases import BLOCKS, PACKS, SCALES
from kernels.step.config import GEMV, USUAL, WIDE, Config

Args = dict[str, Any]
LONGEST_PROMPT = 64


@dataclass(frozen=True)
class Parts:
    """What a candidate computes with. Activations [tokens, features] are bf16, x is too or float32, gains float32.

    linear:     (args, name, x) -> x @ weight(name)^T.
    alpha_beta: (weight [2 Hv, H], x) -> alpha and beta [tokens, Hv], contiguous.
    add_norm:   (x, delta or None, gain) -> (x + delta, its RMS norm times gain).
    delta_rule: (args, at, mixed, a, b, state, conv) -> o [tokens, Hv, D]: convolution, gates and recurrence; both
                states of the layer are updated.
    gated_norm: (o [tokens, Hv, D], gain, z) -> RMS norm of o times gain times SiLU(z), [tokens, Hv D]. z may be
                columns of a wider tensor, as mixed above.
    rotate:     (args, at, q [tokens, Hq, 2, D] with its gate, k, v, k_cache, v_cache) -> q normed and turned; k, normed
                and turned, and v are in the caches. q, k and v may be columns of one tensor. args["cos"], args["sin"]
                [tokens, 1, R] float32.
    attend:     (args, at, q, k_cache, v_cache) -> o [tokens, Hq, D]. args[f"{at}k_scale"] and v_scale [Hkv] float32
                where the caches are fp8; k_block and v_block [pages, Hkv, page, D / 32] half where they are Q8_0,
                which `rotate` writes with them.
    gate:       (o, q with its gate) -> o * sigmoid(gate), [tokens, Hq D].
    activate:   (gate, up) -> SiLU(gate) * up; both may be columns of one tensor.
    mixture:    (args, at, x, logits float32 [tokens, E]) -> what the picked experts and the shared one give.
    router:     (weight [E, H], x) -> a mixture's logits [tokens, E], float32.
    norm_gemv:  (x, delta or None, gain, weight [parts heads, H], heads, dtype) -> as add_norm, and its second times
                weight^T [parts, tokens, heads] in that dtype.
    gated:      (args, at, x) -> SiLU(gate) * up of both products, in one launch.
    begin:      (args, dtype of the stream) -> "x", the tokens' embedding rows, and "cos" and "sin".
    head:       (weight [V, H], x [tokens, H], out) -> logits, next_token and next_logit are in out.
    """

    linear: Callable[[Args, str, torch.Tensor], torch.Tensor]
    alpha_beta: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    delta_rule: Callable[..., torch.Tensor]
    gated_norm: Callable[..., torch.Tensor]
    rotate: Callable[..., torch.Tensor]
    attend: Callable[..., torch.Tensor]
    gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    activate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    mixture: Callable[[Args, str, torch.Tensor, torch.Tensor], torch.Tensor]
    router: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    gated: Callable[[Args, str, torch.Tensor], torch.Tensor] | None = None
    norm_gemv: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None
    begin: Callable[[Args, torch.dtype], Args] | None = None
    head: Callable[[torch.Tensor, torch.Tensor, Tensors], None] | None = None


def plan(inputs: Tensors) -> Args:
    """The inputs but for packed weights, gains ready to multiply with, and what all layers of the step share.

    positions [tokens] int32; slots [tokens] int64, page * page size + place in it; spans, the tokens of each sequence.
    """
    args: Args = {k: v for k, v in inputs.items() if ".weight_" not in k and ".experts." not in k}
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
    for number, name in enumerate(k for k in inputs if k.endswith("q_norm.weight")):
        args |= {name.replace("q_norm.weight", s): inputs[s][number] for s in SCALES if s in inputs}
    return args


def packed(inputs: Tensors, config: Config) -> tuple[Tensors, set[str]]:
    """(weights side by side as the configuration has them, under names of their own; the products that they replace).

    ValueError where NVFP4 weights that are to be one have two tensor scales.
    """
    found: Tensors = {}
    replaced: set[str] = set()
    packs: dict[str, tuple[str, ...]] = {}
    packs |= {"in_proj_ab": ("in_proj_a", "in_proj_b")} if config.packing != "none" else {}
    packs |= {"in_proj_qkvz": PACKS[0]} if config.packing in WIDE else {}
    packs |= {"gate_up_proj": PACKS[1]} if config.gate_up else {}
    packs |= {"qkv_proj": PACKS[2]} if config.qkv else {}
    for key in inputs:
        at, _, own = key.removesuffix(".weight_packed").removesuffix(".weight").rpartition(".")
        for name, members in packs.items():
            if own != members[0] or not key.endswith((".weight_packed", ".weight")):
                continue
            replaced |= {f"{at}.{member}" for member in members}
            for part in ("_packed", "_scale") if key.endswith("_packed") else ("",):
                found[f"{at}.{name}.weight{part}"] = torch.cat([inputs[f"{at}.{m}.weight{part}"] for m in members])
            if key.endswith("_packed"):
                scales = [inputs[f"{at}.{m}.weight_tensor_scale"] for m in members]
                if any(not torch.equal(scales[0], other) for other in scales):
                    raise ValueError(f"{at}: {', '.join(members)} have tensor scales of their own: do not pack them")
                found[f"{at}.{name}.weight_tensor_scale"] = scales[0]
    return found, replaced


def mixtures(inputs: Tensors) -> dict[str, Tensors]:
    """By name such as "model.layers.0.mlp.": a mixture's NVFP4 weights under the names of kernels/moe, and top_k."""
    found = {}
    for at in (key.removesuffix("gate.weight") for key in inputs if key.endswith(".mlp.gate.weight")):
        made = {"top_k": inputs["top_k"], "shared_gate": inputs[f"{at}shared_expert_gate.weight"][0]}
        for part in ("packed", "scale", "tensor_scale"):
            gate, up, down = (inputs[f"{at}shared_expert.{name}_proj.weight_{part}"] for name in ("gate", "up", "down"))
            made |= {f"{name}_{part}": inputs[f"{at}experts.{name}_proj_{part}"] for name in ("gate_up", "down")}
            if part == "tensor_scale":  # of gate and up one and the same, see cases.PACKS
                made |= {f"shared_gate_up_{part}": gate, f"shared_down_{part}": down}
            else:
                made |= {f"shared_gate_up_{part}": torch.cat((gate, up))[None], f"shared_down_{part}": down[None]}
        found[at] = made
    return found


def in_bf16(inputs: Tensors) -> Tensors:
    """Every NVFP4 weight dequantised, under its name with ".weight"."""
    parts = ("packed", "scale", "tensor_scale")
    return {
        name: nvfp4.dequantise(nvfp4.Nvfp4(*(inputs[f"{name}_{part}"] for part in parts))).bfloat16()
        for name in (k.removesuffix("_packed") for k in inputs if k.endswith(".weight_packed"))
        if ".shared_expert." not in name
    }


def halves(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both halves of the columns, each contiguous."""
    a, b = (t.contiguous() for t in y.chunk(2, dim=-1))
    return a, b


def into_gdn(
    parts: Parts, config: Config, args: Args, at: str, h: torch.Tensor, ab: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """(mixed, z, a, b), mixed and z as columns of one product or of two. ab: alpha and beta, if known."""
    linear = parts.linear
    if config.packing == "none":
        return tuple(linear(args, f"{at}in_proj_{name}", h) for name in ("qkv", "z", "a", "b"))
    if ab is not None:
        a, b = ab
    elif config.packing in GEMV:
        a, b = parts.alpha_beta(args[f"{at}in_proj_ab.weight"], h)
    else:
        a, b = halves(linear(args, f"{at}in_proj_ab", h))
    if config.packing not in WIDE:
        return linear(args, f"{at}in_proj_qkv", h), linear(args, f"{at}in_proj_z", h), a, b
    both = linear(args, f"{at}in_proj_qkvz", h)
    channels = args[f"{at}conv1d.weight"].shape[0]
    return *both.split((channels, both.shape[1] - channels), dim=-1), a, b


def into_attention(
    parts: Parts, config: Config, args: Args, at: str, h: torch.Tensor, width: int
) -> Sequence[torch.Tensor]:
    """(q with its gate, k, v), as columns of one product or of three. width: of k and of v."""
    if not config.qkv:
        return tuple(parts.linear(args, f"{at}{name}_proj", h) for name in ("q", "k", "v"))
    both = parts.linear(args, f"{at}qkv_proj", h)
    return both.split((both.shape[1] - 2 * width, width, width), dim=-1)


def feed_forward(
    parts: Parts, config: Config, args: Args, at: str, h: torch.Tensor, logits: torch.Tensor | None
) -> torch.Tensor:
    """What a layer's feed-forward adds: a mixture's where it has a router. logits: its, if known."""
    if logits is not None:
        return parts.mixture(args, at, h, logits[0])
    if f"{at}gate.weight" in args:
        own = config.router == "gemv"
        logits = parts.router(args[f"{at}gate.weight"], h) if own else parts.linear(args, f"{at}gate", h).float()
        return parts.mixture(args, at, h, logits)
    if config.gated:
        assert parts.gated, "a configuration of this lever is made with it"
        return parts.linear(args, f"{at}down_proj", parts.gated(args, at, h))
    if config.gate_up:
        halves = parts.linear(args, f"{at}gate_up_proj", h).chunk(2, dim=-1)
    else:
        halves = tuple(parts.linear(args, f"{at}{name}_proj", h) for name in ("gate", "up"))
    return parts.linear(args, f"{at}down_proj", parts.activate(*halves))


def normed(
    parts: Parts, config: Config, x: torch.Tensor, delta: torch.Tensor | None, gain: torch.Tensor,
    weight: torch.Tensor | None, heads: int, kind: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """As Parts.norm_gemv where the configuration norms so and there is a weight for it, else without a product."""
    if config.norms == "alone" or weight is None:
        return *parts.add_norm(x, delta, gain), None
    assert parts.norm_gemv, "a configuration of this lever is made with it"
    return parts.norm_gemv(x, delta, gain, weight, heads, kind)


def run(parts: Parts, args: Args, out: Tensors, config: Config = USUAL) -> None:
    """One step."""
    delta, stream = None, torch.float32 if config.stream == "f32" else torch.bfloat16
    if config.ends == "fused":
        assert parts.begin, "a configuration of this lever is made with it"
        args = args | parts.begin(args, stream)
    else:
        angle = args["positions"][:, None, None] * args["inv_freq"]
        x = args["model.embed_tokens.weight"][args["tokens"]]
        args = args | {"x": x.to(stream), "cos": angle.cos(), "sin": angle.sin()}
    x = args["x"]
    linear, gdn, attention, layer = parts.linear, 0, 0, 0
    while f"model.layers.{layer}.input_layernorm.weight" in args:
        at = f"model.layers.{layer}."
        weight = args.get(f"{at}linear_attn.in_proj_ab.weight")
        heads = 0 if weight is None else weight.shape[0] // 2
        gain = args[f"{at}input_layernorm.weight"]
        x, h, ab = normed(parts, config, x, delta, gain, weight, heads, torch.bfloat16)
        if f"{at}linear_attn.A_log" in args:
            at += "linear_attn."
            mixed, z, a, b = into_gdn(parts, config, args, at, h, ab)
            o = parts.delta_rule(args, at, mixed, a, b, out["state"][gdn], out["conv_state"][gdn])
            o = parts.gated_norm(o, args[f"{at}norm.weight"], z)
            one_by_one = o.split(1) if config.per_sequence else (o,)
            deltas = [linear(args, f"{at}out_proj", rows) for rows in one_by_one]
            delta = torch.cat(deltas) if config.per_sequence else deltas[0]
            gdn += 1
        else:
            at += "self_attn."
            caches = out["k_cache"][attention], out["v_cache"][attention]
            args |= {f"{at}{name}": out[name][attention] for name in BLOCKS if name in out}
            heads, dim = caches[0].shape[1], caches[0].shape[3]
            q, k, v = (y.unflatten(1, (-1, dim)) for y in into_attention(parts, config, args, at, h, heads * dim))
            gated = q.unflatten(1, (-1, 2))
            turned = parts.rotate(args, at, gated, k, v, *caches)
            delta = linear(args, f"{at}o_proj", parts.gate(parts.attend(args, at, turned, *caches), gated))
            attention += 1
        at = f"model.layers.{layer}."
        weight = args.get(f"{at}mlp.gate.weight")
        heads = 0 if weight is None else weight.shape[0]
        gain = args[f"{at}post_attention_layernorm.weight"]
        x, h, logits = normed(parts, config, x, delta, gain, weight, heads, torch.float32)
        delta = feed_forward(parts, config, args, f"{at}mlp.", h, logits)
        layer += 1
    assert delta is not None
    if config.ends == "fused":
        assert parts.head, "a configuration of this lever is made with it"
        _, h = parts.add_norm(x, delta, args["model.norm.weight"])  # each sequence has one token
        parts.head(args["lm_head.weight"], h, out)
        return
    if config.all_logits:
        _, h = parts.add_norm(x, delta, args["model.norm.weight"])
        out["logits"].copy_(linear(args, "lm_head", h)[args["last"]])
    else:
        _, h = parts.add_norm(x[args["last"]], delta[args["last"]], args["model.norm.weight"])
        out["logits"].copy_(linear(args, "lm_head", h))
    torch.max(out["logits"], dim=-1, out=(out["next_logit"], out["next_token"]))


def refuses(workload: Workload) -> str:
    """Prompts that a loop over tokens would take thousands of launches a layer for."""
    longest = max(map(int, str(workload["lengths"] or workload["T"]).split("-")))
    return "" if longest <= LONGEST_PROMPT else f"T={longest}: a loop over tokens; {LONGEST_PROMPT} are the most"
