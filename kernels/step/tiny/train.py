"""Trains the tiny model: `python -m kernels.step.tiny.train --out FILE.npz`, on CPU and GPU from one seed.

The forward pass is written for autograd and for whole sequences: the recurrence in chunks (within a chunk a triangular
system, between chunks the state), attention as the library's. It computes what kernels/step/reference.py computes token
by token, which tests/kernels/step/test_tiny.py holds it to. Weights are float32 while they train; from QUANTISED of the
steps on products see them rounded to NVFP4 (the gradient passes the rounding), so that what is stored loses little when
it is quantised. AdamW, warm-up and cosine; answers weigh ANSWER times as much as the rest of the text. In a share
`alone` of the sequences attention adds nothing, so that the recurrent layers learn to recall by themselves: with none,
the attention layer does all of it.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from kernels.common import Tensors, positive, usable_device
from kernels.gdn.reference import L2_EPS
from kernels.nvfp4 import format as nvfp4
from kernels.step.model import CONV_WIDTH, EPS, Model
from kernels.step.tiny import corpus
from kernels.step.tiny.stored import MODELS, load, model_of, place_of, save

CHUNK = 32
ANSWER = 4.0
QUANTISED = 0.6


def delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """o [B, T, H, D] of q, k, v [B, T, H, D], g, beta [B, T, H] from a state of zeros (arXiv 2412.06464, section 3.3).

    With the state S of before the chunk and c the sum of g up to a token, the updates u of a chunk solve
    (I + A) u = beta (v - e^c k S), A_ij = beta_i e^(c_i - c_j) k_i . k_j for j < i. Only S goes from
    chunk to chunk; the rest is computed for all chunks at once, since training on a GPU is launch-bound.
    """
    length, dim = q.shape[1], v.shape[-1]
    q, k, v, g, beta = (  # [B, H, chunk, token, ...]; a token of zeros changes no state
        F.pad(x.movedim(1, -1), (0, -length % CHUNK)).movedim(-1, 2).unflatten(2, (-1, CHUNK))
        for x in (q * q.shape[-1] ** -0.5, k, v, g, beta)
    )
    c, beta = g.cumsum(-1), beta[..., None]
    keep = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (c[..., :, None] - c[..., None, :]).masked_fill(~keep, -math.inf).exp()
    since, left = c.exp()[..., None], (c[..., -1:] - c).exp()[..., None]
    a = (beta * (k @ k.mT) * decay).tril(-1)
    solved = torch.linalg.solve_triangular(a, beta * torch.cat((v, since * k), -1), upper=False, unitriangular=True)
    whole, of_state = (x.unbind(2) for x in solved.split((dim, k.shape[-1]), -1))
    grown, last = (k * left).mT.unbind(2), since[..., -1:, :].unbind(2)
    states, updates = [q.new_zeros(*q.shape[:2], k.shape[-1], dim)], []
    for n in range(len(whole)):
        updates.append(whole[n] - of_state[n] @ states[n])
        states.append(states[n] * last[n] + grown[n] @ updates[n])
    o = (since * q) @ torch.stack(states[:-1], 2) + ((q @ k.mT) * decay) @ torch.stack(updates, 2)
    return o.flatten(2, 3)[:, :, :length].transpose(1, 2)


def rms_norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """x / rms(x) * gain over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * gain


def turned(x: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """x [B, T, heads, D] with its first elements turned by their positions."""
    angle = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None, None] * inv_freq.to(x.dtype)
    half = inv_freq.numel()
    low, high, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin(), rest), dim=-1)


def forward(model: Model, w: Tensors, tokens: torch.Tensor, attended: torch.Tensor | None = None) -> torch.Tensor:
    """logits [B, T, vocab] of tokens [B, T], in the precision of the weights.

    attended: [B], 0 for the sequences to which attention adds nothing and 1 for the others; None: 1 for all.
    """
    x = w["model.embed_tokens.weight"][tokens]
    dim, heads_k, heads_v = model.gdn_dim, model.gdn_k_heads, model.gdn_v_heads
    for layer, kind in enumerate(model.kinds):
        at = f"model.layers.{layer}."
        h = rms_norm(x, 1 + w[f"{at}input_layernorm.weight"])
        if kind == "gdn":
            p = f"{at}linear_attn."
            mixed, z, a, b = (h @ w[f"{p}in_proj_{name}.weight"].T for name in ("qkv", "z", "a", "b"))
            padded = F.pad(mixed.mT, (CONV_WIDTH - 1, 0))
            y = F.silu(F.conv1d(padded, w[f"{p}conv1d.weight"], groups=model.channels)).mT
            q, k, v = y.unflatten(2, (-1, dim)).split((heads_k, heads_k, heads_v), dim=2)
            q, k = (
                (s * torch.rsqrt(s.square().sum(-1, keepdim=True) + L2_EPS)).repeat_interleave(heads_v // heads_k, 2)
                for s in (q, k)
            )
            g = -w[f"{p}A_log"].exp() * F.softplus(a + w[f"{p}dt_bias"])
            o = rms_norm(delta_rule(q, k, v, g, b.sigmoid()), w[f"{p}norm.weight"])
            o = (o * F.silu(z.unflatten(2, (heads_v, dim)))).flatten(2)
            x = x + o @ w[f"{p}out_proj.weight"].T
        else:
            p, dim_a = f"{at}self_attn.", model.head_dim
            q, k, v = (h @ w[f"{p}{name}_proj.weight"].T for name in ("q", "k", "v"))
            q, gate = q.unflatten(2, (-1, 2, dim_a)).unbind(3)
            k, v = k.unflatten(2, (-1, dim_a)), v.unflatten(2, (-1, dim_a))
            q, k = (
                turned(rms_norm(s, 1 + w[f"{p}{name}_norm.weight"]), w["inv_freq"]) for s, name in ((q, "q"), (k, "k"))
            )
            q, k, v = (s.transpose(1, 2) for s in (q, k, v))
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
            added = (o * gate.sigmoid()).flatten(2) @ w[f"{p}o_proj.weight"].T
            x = x + (added if attended is None else added * attended[:, None, None])
        h = rms_norm(x, 1 + w[f"{at}post_attention_layernorm.weight"])
        gates, up = (h @ w[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gates) * up) @ w[f"{at}mlp.down_proj.weight"].T
    return rms_norm(x, 1 + w["model.norm.weight"]) @ w["lm_head.weight"].T


def fresh(model: Model, seed: int, device: torch.device | str) -> Tensors:
    """Weights before training, float32, the same on every device."""
    rng = torch.Generator().manual_seed(seed)
    depth = (2 * model.layers) ** -0.5
    made: Tensors = {}
    shapes: dict[str, tuple[int, ...]] = {f"{n}.weight": s for n, s in model.linears().items()}
    for name, shape in (shapes | model.others()).items():
        if name.endswith("A_log"):
            w = torch.empty(shape).uniform_(0.05, 2, generator=rng).log()
        elif name.endswith("dt_bias"):
            w = torch.empty(shape).uniform_(-4, -1, generator=rng)
        elif name.endswith("norm.weight"):
            w = torch.full(shape, float("linear_attn" in name))
        else:
            w = torch.randn(shape, generator=rng) * shape[-1] ** -0.5
            w *= depth if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")) else 1.0
        made[name] = w.to(device)
    return made


def rounded(w: Tensors) -> Tensors:
    """NVFP4's values of matrices with their gradients; they share a tensor scale, so that all are rounded in one go."""
    whole = torch.cat([x.detach().reshape(-1, nvfp4.BLOCK) for x in w.values()])
    values = nvfp4.dequantise(nvfp4.quantise(whole)).split([x.numel() // nvfp4.BLOCK for x in w.values()])
    return {n: x + (value.view_as(x) - x.detach()) for (n, x), value in zip(w.items(), values, strict=True)}


def train(
    model: Model,
    steps: int,
    size: int,
    length: int,
    rate: float,
    seed: int,
    device: str,
    every: int = 0,
    start: Tensors | None = None,
    alone: float = 0.0,
) -> tuple[Tensors, list[float]]:
    """Weights after `steps` batches of `size` sequences of `length` tokens, and the loss of every step.

    every: print a line after so many steps; 0 prints none. start: weights to go on from. alone: share of the sequences
    to which attention adds nothing. Raises ValueError where the loss is no number any more.
    """
    given = {n: v.to(device).float() for n, v in (start or {}).items() if n != "inv_freq"}
    w = {name: value.requires_grad_() for name, value in (given or fresh(model, seed, device)).items()}
    powers = torch.arange(0, model.rotary, 2, device=device, dtype=torch.float32) / model.rotary
    inv_freq = model.theta**-powers
    products = [f"{name}.weight" for name in model.linears()]
    decayed = [v for n, v in w.items() if v.ndim == 2]
    others = [v for v in w.values() if v.ndim != 2]
    groups = [{"params": decayed, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))
    warm = min(100, max(1, steps // 10))
    rng, losses, began = random.Random(seed), [], time.perf_counter()
    for step in range(steps):
        share = step / steps
        for group in adam.param_groups:
            group["lr"] = rate * min(1, (step + 1) / warm) * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * share)))
        tokens, answers = (x.to(device) for x in corpus.batch(size, length, rng))
        seen = w | rounded({n: w[n] for n in products}) if share >= QUANTISED else w
        drawn = [float(rng.random() >= alone) for _ in range(size)] if alone else None
        attended = None if drawn is None else torch.tensor(drawn, device=device)
        logits = forward(model, seen | {"inv_freq": inv_freq}, tokens[:, :-1], attended)
        each = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        weight = 1 + (ANSWER - 1) * answers[:, 1:].flatten().float()
        loss = (each * weight).sum() / weight.sum()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
        adam.step()
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            raise ValueError(f"the loss of step {step + 1} is {losses[-1]}; a smaller --rate than {rate}")
        if every and (step + 1) % every == 0:
            of_answers = float(each.detach()[answers[:, 1:].flatten()].mean())
            taken = time.perf_counter() - began
            print(f"{step + 1} loss {losses[-1]:.3f} answers {of_answers:.3f} {taken:.0f} s", flush=True)
    return {n: v.detach() for n, v in w.items()} | {"inv_freq": inv_freq}, losses


def main() -> None:
    """Train and store."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="weights to go on from")
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--steps", type=positive, default=3000)
    parser.add_argument("--batch", type=positive, default=16)
    parser.add_argument("--length", type=positive, default=128)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--alone", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    model = MODELS[asked.model]
    sizes = asked.steps, asked.batch, asked.length
    try:
        out, device = place_of(asked.out), usable_device(asked.device)
        start = load(asked.start) if asked.start else None
        if start and model_of(start) != model:
            raise ValueError(f"{asked.start.name}: weights of another model than {asked.model}; pass its --model")
        w, _ = train(model, *sizes, asked.rate, asked.seed, device, 50, start, asked.alone)
        save(out, w)
    except (ValueError, OSError) as problem:
        print(f"tiny: {problem}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
