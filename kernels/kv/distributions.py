"""Keys, values and queries that look like a trained model's, head by head, to ask what an 8-bit cache does to them.

Gaussian caches flatter every format: no channel is larger than another, no token draws attention, nothing is constant.
Each head below has one feature that was seen in trained models, and says who saw it, so that a failure can be laid at
one cause. All eight live in one problem: a scale over the whole tensor then sees all of them, as it does in a model.

What stands behind the features:
- Keys have a few channels about ten times larger than the rest, the same for every token; values have none
  (Lin et al., QServe, arXiv 2405.04532; Hooper et al., KVQuant, arXiv 2401.18079; Liu et al., KIVI, arXiv 2402.02750).
- They sit in the slowly turning rotary pairs, and queries are large there too (Jin et al., arXiv 2502.01563).
- Qwen3-Next, and Qwen3.5 after it, norm keys (RMSNorm, then a weight per channel: the weight makes the outliers) and
  turn a quarter of the head only (partial_rotary_factor 0.25 in the published configuration).
- Projections with a bias (Qwen2, Qwen2.5) give keys a large constant in a few channels. Their fp8 cache was reported
  broken (QwenLM/Qwen3 issue 840, NVIDIA/TensorRT-LLM issue 4218); that the constant is the cause is our hypothesis.
- The first token draws most of the attention, with a small value (Xiao et al., arXiv 2309.17453; Sun et al., arXiv
  2402.17762; Gu et al., arXiv 2410.10781).
- Values are heavy-tailed over tokens (KVQuant keeps a share of them apart for that).

Sizes (a gain of 10, an offset of 30 in the logits, 70 % of the weight on the sink) are round numbers in the range that
those papers show, not fits to one model. Not modelled: correlation of neighbouring tokens, low rank of K, and several
features in one head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ROPE_BASE = 1e6
SINK_VALUE = 0.05  # size of the sink's value beside another token's
PHASE = 0.6  # angle of a bias within its rotary pair, so that neither channel alone holds it


@dataclass(frozen=True)
class Head:
    """What one kv head's cache looks like.

    name:     the word that tables and cards use.
    why:      the feature in words.
    rotary:   share of the channels that the rotary embedding turns.
    normed:   keys pass RMSNorm before their channel weights, so that no token is larger than another.
    outliers, gain: channels of K (in the slowest pairs, or behind the rotary part) that are `gain` times the rest.
    bias:     constant added to one rotary pair of K before the rotation (at PHASE: to both its channels), in units
              of the other channels' deviation.
    offset:   what that constant contributes to a logit; the softmax cancels it as far as it is the same for all tokens.
    turn:     angle in radians by which the biased pair turns over the context: 0 is constant, above 1 is not.
    sink:     share of the attention that the first token draws; 0 for none.
    tail:     degrees of freedom of Student's t for V, 0 for normal; spread: log deviation of a token's size of V.
    value_gain: size of V.
    """

    name: str
    why: str
    rotary: float = 0.25
    normed: bool = True
    outliers: int = 0
    gain: float = 1.0
    bias: float = 0.0
    offset: float = 0.0
    turn: float = 0.0
    sink: float = 0.0
    tail: int = 0
    spread: float = 0.0
    value_gain: float = 1.0


HEADS = (
    Head("plain", "normal keys and values, the usual test"),
    Head("outlier-channels", "four key channels ten times larger, in the norm's weight", outliers=4, gain=10.0),
    Head("sink", "the first token draws 70 % of the attention and has a small value", sink=0.7),
    Head("heavy-values", "values of Student's t with 3 degrees, tokens of different size", tail=3, spread=0.5),
    Head("constant-offset", "a key bias in the slowest rotary pair: the same for every token",
         rotary=1.0, normed=False, bias=60.0, offset=30.0),
    Head("turning-offset", "a key bias in a rotary pair that turns by 1.5 rad over the context",
         rotary=1.0, normed=False, bias=60.0, offset=30.0, turn=1.5),
    Head("quiet-values", "values of size 0.002, as behind a small output weight", value_gain=0.002),
    Head("loud-values", "values of size 64: what a scale over all heads must also hold", value_gain=64.0),
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """q [Hkv, N, D], k and v [Hkv, T, D], all float32; N decode queries per kv head, at position T; heads: names."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    heads: tuple[str, ...]


def rope(x: torch.Tensor, positions: torch.Tensor, rotary: int) -> torch.Tensor:
    """Rotary embedding of the first `rotary` channels of x [T, D], channel i paired with i + rotary / 2.

    Pair i turns by position * ROPE_BASE^(-2 i / rotary). Source: Su et al., RoFormer, arXiv 2104.09864, in the pairing
    that Llama's and Qwen's code uses.
    """
    half = rotary // 2
    angle = positions[:, None] * ROPE_BASE ** (-2.0 * torch.arange(half) / rotary)
    first, second = x[:, :half], x[:, half:rotary]
    turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
    return torch.cat((*turned, x[:, rotary:]), dim=1)


def _biased_pair(head: Head, rotary: int, tokens: int) -> int:
    """The rotary pair whose turn over the context is nearest to head.turn; the slowest for 0."""
    turns = [tokens * ROPE_BASE ** (-2.0 * i / rotary) for i in range(rotary // 2)]
    return min(range(len(turns)), key=lambda i: abs(turns[i] - head.turn))


def draw(head: Head, tokens: int, queries: int, dim: int, spread: float, gen: torch.Generator) -> Problem:
    """One head. spread: deviation over tokens of the logits that do not come from the offset or the sink."""
    rotary = int(dim * head.rotary)
    half = rotary // 2
    weight = torch.ones(dim)
    slow = [i for j in range(half - 1, -1, -1) for i in (j, j + half)]  # both channels of a pair, slowest first
    weight[slow[: head.outliers]] = head.gain
    k = torch.randn(tokens, dim, generator=gen)
    if head.normed:
        k /= k.square().mean(dim=1, keepdim=True).sqrt()
    k *= weight
    pair = _biased_pair(head, rotary, tokens)
    k[:, pair] += head.bias * math.cos(PHASE)
    k[:, pair + half] += head.bias * math.sin(PHASE)
    k = rope(k, torch.arange(tokens).float(), rotary)

    # Queries share a direction, which a sink uses, and are large where keys are, by the root of their gain. The biased
    # channels are left out here and set below, so that `spread` does not count them.
    biased = [pair, pair + half] if head.bias else []
    common = torch.nn.functional.normalize(torch.randn(dim, generator=gen), dim=0)
    q = (torch.randn(queries, dim, generator=gen) + common * dim**0.5) * weight.sqrt()
    q = rope(q, torch.full((queries,), float(tokens)), rotary)
    q[:, biased] = 0
    q *= spread / (q @ k.T * dim**-0.5).std(dim=1).mean()
    if biased:  # along the biased key of the newest token, so that its logit is `offset` and older ones follow the turn
        towards = torch.nn.functional.normalize(k[-1, biased], dim=0)
        size = head.offset * dim**0.5 / head.bias
        q[:, biased] = towards * size * (1 + 0.1 * torch.randn(queries, 1, generator=gen))

    v = torch.randn(tokens, dim, generator=gen)
    if head.tail:
        chi = torch.randn(head.tail, tokens, dim, generator=gen).square().sum(dim=0)
        v /= (chi / head.tail).sqrt()
    v *= torch.exp(head.spread * torch.randn(tokens, 1, generator=gen)) * head.value_gain
    if head.sink:
        logits = q @ k[1:].T * dim**-0.5
        wanted = torch.logsumexp(logits, dim=1) + math.log(head.sink / (1 - head.sink))
        mean = q.mean(dim=0)
        k[0] = mean * (wanted.mean() * dim**0.5 / mean.square().sum())
        v[0] *= SINK_VALUE
    return Problem(q[None], k[None], v[None], (head.name,))


def draw_all(
    seed: int = 0, tokens: int = 2048, queries: int = 64, dim: int = 128, heads: tuple[Head, ...] = HEADS,
    spread: float = 2.0,
) -> Problem:  # fmt: skip
    """Every head in one problem. A logit deviation of 2 puts half of the weight on about a twentieth of the tokens."""
    gen = torch.Generator().manual_seed(seed)
    drawn = [draw(head, tokens, queries, dim, spread, gen) for head in heads]
    q, k, v = (torch.cat([getattr(p, name) for p in drawn]) for name in ("q", "k", "v"))
    return Problem(q, k, v, tuple(h.name for h in heads))
