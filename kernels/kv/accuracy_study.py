"""What storing a cache in eight bits does to attention's output, and to a next-token distribution behind it.

No kernel is involved: K and V are stored and read back, attention is computed in float64 on what came back, and the
result is compared with float64 attention on the float32 original. So a difference is the format's alone.

Three numbers per head and storage:
    nmse   ||o' - o||^2 / ||o||^2 over all queries of the head
    kl     KL(p || p'), mean over queries, in nats, p being a softmax over words
    top1   share of queries whose most likely word stays

The words are a proxy: o goes through one fixed random matrix, scaled so that its logits have deviation WORD_LOGITS. A
trained output matrix is not random, a model adds o to a residual stream (which dilutes the error), and has many layers
(which add errors up). The numbers rank storages on one head; they are no model's KL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch

from kernels.kv import format as kv_format
from kernels.kv.distributions import Problem

PAGE = 16
PER_HEAD = (0, 2, 3)  # axes of a cache [pages, Hkv, page, D] that share a scale
WORDS = 4096
WORD_LOGITS = 4.0  # near where one word of 4,096 begins to stand out: sqrt(2 ln 4096)


@dataclass(frozen=True)
class Storage:
    """A way to keep K and V [Hkv, T, D].

    keys, values: float32 -> the float32 values that a kernel would see.
    bits:         per value at D = 128 and 16 tokens a page, scales and means included, K and V together.
    cost:         what decoding pays for it.
    """

    name: str
    keys: Callable[[torch.Tensor], torch.Tensor]
    values: Callable[[torch.Tensor], torch.Tensor]
    bits: float
    cost: str


@dataclass(frozen=True)
class Effect:
    """Errors of one head under one storage; part says what was stored so: "K and V", "K" or "V", the other exact."""

    head: str
    storage: str
    part: str
    nmse: float
    kl: float
    top1: float


def _paged(x: torch.Tensor) -> torch.Tensor:
    """[Hkv, T, D] as a cache [pages, Hkv, page, D]; ValueError when T is no multiple of the page."""
    if x.shape[1] % PAGE:
        raise ValueError(f"T={x.shape[1]} must be a multiple of {PAGE} tokens a page; drop or add tokens")
    return x.unflatten(1, (-1, PAGE)).transpose(0, 1).contiguous()


def _flat(cache: torch.Tensor) -> torch.Tensor:
    return cache.transpose(0, 1).flatten(1, 2)


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def fp8(x: torch.Tensor, over: tuple[int, ...] | None) -> torch.Tensor:
    """Through e4m3 with one scale per group: `over` are the axes of the cache [pages, Hkv, page, D] that share a scale.

    () is a scale per value and tells nothing; None is scale 1, as engines run that were given no scales.
    """
    cache = _paged(x)
    ones = torch.ones(cache.shape[1])
    if over is None:
        return _flat(kv_format.dequantise_fp8(*kv_format.quantise_fp8(cache, scale=ones)))
    scale = cache.abs().amax(dim=over, keepdim=True) / kv_format.E4M3_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    data, unit = kv_format.quantise_fp8(cache / scale, scale=ones)
    return _flat(kv_format.dequantise_fp8(data, unit) * scale)


def keys_centred(k: torch.Tensor, over: tuple[int, ...]) -> torch.Tensor:
    """K through e4m3 per head after its mean over `over` was taken off; the mean is kept in bf16 and added again.

    A mean over all tokens shifts every logit of a query alike and drops out of the softmax: decoding need not know it
    (Zhang et al., SageAttention, arXiv 2410.02367, take it off before rounding). A mean per page has to be added back.
    """
    cache = _paged(k)
    mean = _bf16(cache.mean(dim=over, keepdim=True))
    return _flat(_paged(fp8(_flat(cache - mean), PER_HEAD)) + mean)


def q8_0(x: torch.Tensor) -> torch.Tensor:
    """Through Q8_0."""
    return _flat(kv_format.dequantise_q8_0(*kv_format.quantise_q8_0(_paged(x))))


def _both(name: str, how: Callable[[torch.Tensor], torch.Tensor], bits: float, cost: str) -> Storage:
    return Storage(name, how, how, bits, cost)


def _scaled(name: str, over: tuple[int, ...] | None, extra_bits: float, cost: str) -> Storage:
    return _both(name, partial(fp8, over=over), 8.0 + extra_bits, cost)


def _centred(name: str, over: tuple[int, ...], extra_bits: float, cost: str) -> Storage:
    return Storage(name, partial(keys_centred, over=over), partial(fp8, over=PER_HEAD), 8.0 + extra_bits, cost)


STORAGES = (
    _both("bf16", _bf16, 16.0, "nothing"),
    _scaled("fp8 unit", None, 0.0, "nothing"),
    _scaled("fp8 tensor", (0, 1, 2, 3), 0.0, "nothing: two numbers"),
    _scaled("fp8 head", PER_HEAD, 0.0, "nothing: a factor on the logits and on o"),
    _scaled("fp8 channel", (0, 2), 0.0, "a multiply per channel of q and of o"),
    _scaled("fp8 page", (2, 3), 16 / (PAGE * 128), "a factor per page on logits and weights"),
    _scaled("fp8 token", (3,), 16 / 128, "a multiply per token on logits and weights"),
    _centred("fp8 K centred", (0, 2), 0.0, "nothing"),
    _centred("fp8 K page-centred", (2,), 8 / PAGE, "q times a mean per page, added to the logits"),
    _both("q8_0", q8_0, 8.0 + 16 / 32, "a scale per 32 values"),
)
BY_NAME: Mapping[str, Storage] = {s.name: s for s in STORAGES}


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v in float64: q [Hkv, N, D], k and v [Hkv, T, D] -> [Hkv, N, D]."""
    q, k, v = q.double(), k.double(), v.double()
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ v


def words(o: torch.Tensor, size: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """Log probabilities [Hkv, N, WORDS] behind outputs [Hkv, N, D]; size [Hkv, 1, 1] is the rms of the exact ones."""
    return torch.log_softmax(o / size * WORD_LOGITS @ _embedding(o.shape[-1], seed), dim=-1)


@cache  # drawing it takes as long as the product with it, and a study asks for one, a hundred times
def _embedding(width: int, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(width, WORDS, generator=gen, dtype=torch.float64) * width**-0.5


def study(problem: Problem, storages: Iterable[str], parts: Iterable[str] = ("K and V",)) -> list[Effect]:
    """The three numbers of every head, storage and part. KeyError for a storage that STORAGES does not name."""
    exact = attend(problem.q, problem.k, problem.v)
    size = exact.square().mean(dim=(1, 2), keepdim=True).sqrt()
    p = words(exact, size)
    chance, likeliest = p.exp(), p.argmax(dim=-1)
    found = []
    for name in storages:
        k, v = BY_NAME[name].keys(problem.k), BY_NAME[name].values(problem.v)
        for part in parts:
            o = attend(problem.q, k if "K" in part else problem.k, v if "V" in part else problem.v)
            nmse = (o - exact).square().sum(dim=(1, 2)) / exact.square().sum(dim=(1, 2))
            seen = words(o, size)
            kl = (chance * (p - seen)).sum(dim=-1).mean(dim=1)
            top1 = (seen.argmax(dim=-1) == likeliest).double().mean(dim=1)
            found += [
                Effect(head, name, part, *(float(x[i]) for x in (nmse, kl, top1)))
                for i, head in enumerate(problem.heads)
            ]
    return found
