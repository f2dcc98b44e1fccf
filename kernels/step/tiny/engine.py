"""Runs the tiny model with one lever changed: kernels/step's wiring, in plain torch, on CPU or GPU.

An arm is a frozen Arm: what differs from what an engine would serve by default (NVFP4 weights, bf16 activations and
residual stream, float32 state, bf16 cache, logits of the last token, a row of the pool for each sequence). EXACT is the
reference that divergences are formed against: the weights as they were trained, and float32 everywhere.

Formats are applied by rounding through them, so an arm's logits are what the format costs; how fast a kernel for it is,
families nvfp4, gdn and kv say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, get_args, get_type_hints

import torch
import torch.nn.functional as F

from kernels.common import Tensors
from kernels.kv import format as kv_format
from kernels.nvfp4 import format as nvfp4
from kernels.nvfp4 import w4a8_tiles
from kernels.step import cases, wiring
from kernels.step.config import Config
from kernels.step.model import CONV_WIDTH
from kernels.step.tiny.stored import model_of
from kernels.step.torch_eager import L2_EPS, PLAIN, norm
from kernels.step.wiring import Args, Parts

Kind = Literal["bf16", "f32"]


@dataclass(frozen=True)
class Arm:
    """What runs, and how what it keeps is stored.

    weights:     of the products: "nvfp4", or as trained in bf16 or float32 (which takes everything else along).
    products:    of the quantised weights: "w4a16", "w4a8" (activations in e4m3 per token, weights as the kernel forms
                 them) or "w4a4" (activations in e2m1 by blocks of 16, a scale per token).
    stream:      the residual stream between layers.
    state_dtype: the recurrent state from step to step.
    cache:       keys and values: "bf16", "fp8" (e4m3 of scale 1, as engines run that were given no scales), "q8_0".
    logits:      "last" of each sequence's new tokens, or "all" of them, of which the last are taken.
    pool:        "own", a row of the state pool for each sequence, or "shared", two rows for all: sequence i has row
                 i mod 2, the mistake behind the recorded cross-bleed.
    batch:       sequences "together" in a step, or each "alone" in steps of its own, over one pool all the same: first
                 every prompt but for its last token, then sequence by sequence the reply.
    """

    weights: Literal["nvfp4", "bf16", "f32"] = "nvfp4"
    products: Literal["w4a16", "w4a8", "w4a4"] = "w4a16"
    stream: Kind = "bf16"
    state_dtype: Kind = "f32"
    cache: Literal["bf16", "fp8", "q8_0"] = "bf16"
    logits: Literal["last", "all"] = "last"
    pool: Literal["own", "shared"] = "own"
    batch: Literal["together", "alone"] = "together"

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Arm).items():
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name}={getattr(self, name)!r} is no form; use one of {', '.join(get_args(kind))}")
        if self.weights != "nvfp4" and self.products != "w4a16":
            raise ValueError(f"products={self.products!r} goes with weights='nvfp4', not {self.weights!r}; take one")


DEFAULT = Arm()
EXACT = Arm(weights="f32", stream="f32")
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def arm_of(words: Sequence[str]) -> Arm:
    """An arm from words such as "stream=f32"; raises ValueError for what is none."""
    pairs = dict(word.partition("=")[::2] for word in words)
    if strange := pairs.keys() - get_type_hints(Arm).keys():
        raise ValueError(f"{min(strange)!r} is no lever; use one of {', '.join(get_type_hints(Arm))}")
    return Arm(**pairs)  # type: ignore[arg-type]


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """x [.., K] rounded to e4m3 with amax / 448 of each row, as quantise_e4m3.cu does."""
    scale = (x.float().abs().amax(-1, keepdim=True) / kv_format.E4M3_MAX).clamp_min(1e-30)
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, K] rounded to NVFP4, each token with a tensor scale of its own."""
    return torch.cat([nvfp4.dequantise(nvfp4.quantise(row[None])) for row in x.float()]).to(x.dtype)


def _w4a8(q: nvfp4.Nvfp4) -> torch.Tensor:
    """The weight [N, K] that W4A8's tensor cores multiply with, float32."""
    codes, byte, exponent = w4a8_tiles.operands(q.packed, q.scale)
    scale = byte.view(torch.float8_e4m3fn).float().repeat_interleave(nvfp4.BLOCK, dim=1)
    formed = (nvfp4.decode_e2m1(codes) * scale).to(torch.float8_e4m3fn).float()
    return torch.ldexp(formed, exponent[:, None]) * q.tensor_scale


def through_cache(arm: Arm, x: torch.Tensor) -> torch.Tensor:
    """x [tokens, Hkv, D] as it is read back from the cache."""
    if arm.cache == "bf16":
        return x
    paged = x[:, :, None]
    if arm.cache == "q8_0":
        return kv_format.dequantise_q8_0(*kv_format.quantise_q8_0(paged))[:, :, 0].to(x.dtype)
    ones = torch.ones(x.shape[1], device=x.device)
    return kv_format.dequantise_fp8(*kv_format.quantise_fp8(paged, scale=ones))[:, :, 0].to(x.dtype)


def delta_rule(
    args: Args, at: str, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, state: torch.Tensor, conv: torch.Tensor
) -> torch.Tensor:
    """kernels/step's plain part to the bit on a CPU, sequences of as many new tokens side by side: a few times faster.

    Two that share a row see each other's state, so they go one after the other.
    """
    rows, spans = args["rows"], args["spans"]
    if len(set(rows)) < len(rows):
        return PLAIN.delta_rule(args, at, mixed, a, b, state, conv)
    heads_v, dim = state.shape[1], state.shape[2]
    decay = torch.exp(-args[f"{at}A_log"].exp() * F.softplus(a.float() + args[f"{at}dt_bias"]))[..., None, None]
    beta, filters = b.float().sigmoid()[..., None], args[f"{at}conv1d.weight"].float()
    heads_k = (mixed.shape[1] // dim - heads_v) // 2
    o = torch.empty(mixed.shape[0], heads_v, dim, dtype=mixed.dtype, device=mixed.device)
    for length in {last - first for first, last in spans}:
        firsts, own = zip(
            *((f, row) for (f, last), row in zip(spans, rows, strict=True) if last - f == length), strict=True
        )
        tokens = torch.tensor(firsts, device=mixed.device) + torch.arange(length, device=mixed.device)[:, None]
        held = list(own)
        window = torch.cat((conv[held], mixed[tokens.T]), dim=1)  # [sequences, 3 + length, C]
        conv[held] = window[:, 1 - CONV_WIDTH :]
        y = F.silu(F.conv1d(window.transpose(1, 2).float(), filters, groups=filters.shape[0])).to(mixed.dtype)
        q, k, v = y.permute(2, 0, 1).unflatten(2, (-1, dim)).float().split((heads_k, heads_k, heads_v), dim=2)
        q, k = (
            (s * torch.rsqrt(s.square().sum(-1, keepdim=True) + L2_EPS)).repeat_interleave(heads_v // heads_k, dim=2)
            for s in (q, k)
        )
        # Heads of all sequences as one axis: the plain part's products but more of them, so each one's sums are in its
        # order on every processor. With an axis more, of one sequence, einsum orders its product's operands otherwise.
        now = state[held].flatten(0, 1).float()
        q, k, v = (x.flatten(1, 2) for x in (q, k, v))
        for t, at_t in enumerate(tokens):
            now = now * decay[at_t].flatten(0, 1)
            update = beta[at_t].flatten(0, 1) * (v[t] - torch.einsum("hkv,hk->hv", now, k[t]))
            now = now + torch.einsum("hk,hv->hkv", k[t], update)
            o[at_t] = (torch.einsum("hkv,hk->hv", now, q[t]) * dim**-0.5).to(o.dtype).unflatten(0, (-1, heads_v))
        state[held] = now.to(state.dtype).unflatten(0, (-1, heads_v))
    return o


def parts_of(arm: Arm, quantised: frozenset[str]) -> Parts:
    """kernels/step's plain parts with the arm's formats. quantised: names of the products that have such weights."""
    rounded: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"w4a16": lambda x: x, "w4a8": e4m3, "w4a4": e2m1}

    def linear(args: Args, name: str, x: torch.Tensor) -> torch.Tensor:
        return PLAIN.linear(args, name, rounded[arm.products](x) if name in quantised else x)

    def add_norm(x: torch.Tensor, delta: torch.Tensor | None, gain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.to(DTYPES[arm.stream])
        x = x if delta is None else x + delta
        return x, norm(x, gain).to(DTYPES["f32" if arm.weights == "f32" else "bf16"])

    def rotate(args: Args, at: str, gated: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        q = PLAIN.rotate(args, at, gated, *rest)
        for cache in rest[2:]:
            places = args["slots"] // cache.shape[2], slice(None), args["slots"] % cache.shape[2]
            cache[places] = through_cache(arm, cache[places])
        return q

    return replace(PLAIN, linear=linear, add_norm=add_norm, delta_rule=delta_rule, rotate=rotate)


@dataclass
class Batch:
    """Sequences on their way: caches, states and tables as kernels/step has them, and tokens so far."""

    kept: Tensors
    done: list[int]


class Engine:
    """The model with the weights of one arm."""

    def __init__(self, arm: Arm, weights: Tensors, device: torch.device | str = "cpu") -> None:
        self.arm, self.model, self.device = arm, model_of(weights), device
        products = frozenset(self.model.linears()) if arm.weights == "nvfp4" else frozenset()
        self.parts = parts_of(arm, products)
        self.weights = {n: v.to(device) for n, v in weights.items()}
        self.dtype = DTYPES["f32" if arm.weights == "f32" else "bf16"]
        for name, value in self.weights.items():
            if name.removesuffix(".weight") in products:
                q = nvfp4.quantise(value.float())
                value = _w4a8(q) if arm.products == "w4a8" else nvfp4.dequantise(q)
            if value.ndim > 1:
                self.weights[name] = value.to(self.dtype)

    def begin(self, count: int, tokens: int) -> Batch:
        """Room for `count` sequences of so many tokens."""
        kept = cases.empty(self.model, count, tokens, self.device, self.dtype)
        kept["state"] = kept["state"].to(DTYPES[self.arm.state_dtype])
        if self.arm.pool == "shared":
            kept["state_rows"] = kept["state_rows"] % 2
        return Batch(kept, [0] * count)

    def feed(
        self, batch: Batch, new: Sequence[Sequence[int]], every: bool = False, members: Sequence[int] = ()
    ) -> torch.Tensor:
        """One step: new tokens of each sequence, at least one. Float32 logits, of its last token [count, vocab].

        every: of all new tokens, [tokens, vocab], sequence after sequence. members: the sequences whose step it is, all
        where none is named.
        """
        mine = list(members or range(len(batch.done)))
        bounds = [0, *accumulate(map(len, new))]
        made: Tensors = {
            "tokens": torch.tensor([t for own in new for t in own], device=self.device),
            "cu_seqlens": torch.tensor(bounds, dtype=torch.int32, device=self.device),
            "seq_lens": torch.tensor([batch.done[i] for i in mine], dtype=torch.int32, device=self.device),
            **{name: batch.kept[name][mine] for name in ("page_table", "state_rows")},
        }
        args: dict[str, Any] = wiring.plan(self.weights | batch.kept | made)
        if every:
            args["last"] = torch.arange(bounds[-1], device=self.device)
        rows = len(args["last"])
        out = {
            **{name: batch.kept[name] for name in cases.IN_PLACE if name in batch.kept},
            "logits": torch.empty(rows, self.model.vocab, dtype=torch.float32, device=self.device),
            "next_logit": torch.empty(rows, dtype=torch.float32, device=self.device),
            "next_token": torch.empty(rows, dtype=torch.int64, device=self.device),
        }
        wiring.run(self.parts, args, out, Config(all_logits=self.arm.logits == "all"))
        for i, own in zip(mine, new, strict=True):
            batch.done[i] += len(own)
        return out["logits"]

    def score(self, tokens: torch.Tensor, pattern: Sequence[int] = (1,)) -> torch.Tensor:
        """Logits [n, T, vocab] of sequences [n, T].

        pattern: new tokens in a step; in step s sequence i gets pattern[(s + i) % len(pattern)] of them, so (1,) is
        decode, where every state and key is stored and read back before the next token, (T,) a prompt at once, and
        (1, 12, 3) steps that mix both. Raises ValueError where T is no multiple of the pattern's sum.
        """
        count, length = tokens.shape
        if length % sum(pattern):
            raise ValueError(f"T={length} must be a multiple of {sum(pattern)}, the sum of {pattern}; cut the text")
        found = tokens.new_empty(count, length, self.model.vocab, dtype=torch.float32)
        batch = self.begin(count, length)
        for members in self.groups(count):
            for step in range(length // sum(pattern) * len(pattern)):
                sizes = [pattern[(step + i) % len(pattern)] for i in members]
                spans = [slice(batch.done[i], batch.done[i] + size) for i, size in zip(members, sizes, strict=True)]
                new = [tokens[i, span].tolist() for i, span in zip(members, spans, strict=True)]
                parts = self.feed(batch, new, True, members).split(sizes)
                for i, span, part in zip(members, spans, parts, strict=True):
                    found[i, span] = part
        return found

    def groups(self, count: int) -> list[list[int]]:
        """Which of `count` sequences share their steps."""
        return [list(range(count))] if self.arm.batch == "together" else [[i] for i in range(count)]

    def greedy(self, prompts: Sequence[Sequence[int]], budget: int) -> list[list[int]]:
        """The `budget` most likely tokens after each prompt, one after the other."""
        batch = self.begin(len(prompts), max(map(len, prompts)) + budget)
        replies: list[list[int]] = [[] for _ in prompts]
        groups = self.groups(len(prompts))
        if self.arm.batch == "alone":
            for (i,) in groups:
                self.feed(batch, [prompts[i][:-1]], members=[i])
        for members in groups:
            new = [list(prompts[i][batch.done[i] :]) for i in members]
            for _ in range(budget):
                new = [[token] for token in self.feed(batch, new, members=members).argmax(-1).tolist()]
                for i, (token,) in zip(members, new, strict=True):
                    replies[i].append(token)
        return replies


def kl(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(reference || logits) in nats over the last dimension, float64."""
    p, q = (torch.log_softmax(x.double(), dim=-1) for x in (reference, logits))
    return (p.exp() * (p - q)).sum(-1)
