"""`killgate::kv_decode`: paged decode attention as a torch operator.

    batch = ops.batch(128, 8192, q_heads, kv_heads, dim, page, cache.dtype, q.dtype, device)   # once, for all layers
    o = batch(q, k, v, page_table, seq_lens)                # an fp8 or Q8_0 cache brings k_scale and v_scale

The cache's type says its format: bf16 or fp16, uint8 for fp8-e4m3, int8 for Q8_0 (format.py). The batch holds the
choice of the kernel, by the longest sequence that the page table has room for, and its scratch; layers use it in turn,
two streams at once need two. Nothing is read on the host, so a CUDA graph may be replayed with other lengths and pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernels import cuda, operators
from kernels.kv.route import ROUTER

FAMILY = "kv"
PRECISIONS = {torch.uint8: "fp8-kv", torch.int8: "q8_0-kv", torch.bfloat16: "bf16", torch.float16: "bf16"}
OPERANDS = ("k", "v", "k_scale", "v_scale")
MOVING = ("q", "page_table", "seq_lens")


def _call(
    q: torch.Tensor,
    cache: Sequence[torch.Tensor],
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scratch: Sequence[torch.Tensor],
    route: str,
    plans: operators.Plans | None = None,
    key: Any = None,
) -> torch.Tensor:
    if not all(t.is_contiguous() for t in cache):
        raise ValueError("k, v and their scales must be contiguous: keep the cache as [pages, Hkv, page, D]")
    moving = [t.contiguous() for t in (q, page_table, seq_lens)]
    o = torch.empty_like(moving[0])
    operators.perform(FAMILY, route, MOVING, moving, (*cache, *scratch), {"o": o}, None, plans, key)
    return o


def _fake(q: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


operators.define(
    "kv_decode(Tensor q, Tensor[] cache, Tensor page_table, Tensor seq_lens, Tensor(a!)[] scratch, str route) "
    "-> Tensor",
    _call,
    _fake,
)


@dataclass(frozen=True)
class Batch:
    """What `kv_decode` takes for batches of this size, beside the query, the cache, its pages and the lengths."""

    cache_dtype: torch.dtype
    route: str
    scratch: list[torch.Tensor]
    plans: operators.Plans = field(default_factory=operators.Plans, repr=False, compare=False)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """o [batch, Hq, D]. Raises ValueError where the cache is of another type, or its scales are missing."""
        cache, key = [t for t in (k, v, k_scale, v_scale) if t is not None], None
        if eager := operators.direct(q, *cache, page_table, seq_lens):
            moving = (q, page_table, seq_lens)
            key, plan, addresses = operators.known(self.plans, moving, operators.facts(*cache))
            if plan is not None:  # a call with tensors like these has been checked
                o = torch.empty_like(q)
                plan((*addresses, o.data_ptr()), cuda.stream_of(q.get_device()))
                return o
        scales = cache[2:]
        if k.dtype != self.cache_dtype or len(scales) != (0 if k.dtype.is_floating_point else 2):
            raise ValueError(
                f"a cache of {k.dtype} with {len(scales)} scales; the batch is for {self.cache_dtype}, and a cache of "
                "bytes takes k_scale and v_scale"
            )
        if eager:
            return _call(q, cache, page_table, seq_lens, self.scratch, self.route, self.plans, key)
        o = torch.ops.killgate.kv_decode.default(q, cache, page_table, seq_lens, self.scratch, self.route)
        return o


def batch(
    size: int,
    tokens: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    page: int,
    cache_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device | str,
    chained: bool = False,
) -> Batch:
    """The `Batch` of `size` sequences of at most `tokens`, whose page table has room for just so many.

    cache_dtype: of k and v; dtype: of q. chained: the routed kernel's programmatic form, if it has one. Raises
    ValueError for other types, and where no kernel takes the shape.
    """
    device = torch.device(device)
    if cache_dtype not in PRECISIONS or (cache_dtype.is_floating_point and cache_dtype != dtype):
        raise ValueError(f"{cache_dtype=} is not taken with q in {dtype}; pass q's type, uint8 (fp8) or int8 (Q8_0)")
    floating = cache_dtype.is_floating_point
    if device.type != "cuda":
        names = ("k_cache", "v_cache") if floating else ("k_cache", "v_cache", "k_scale", "v_scale")
        scratch = operators.scratch_of({}, device)
        return Batch(cache_dtype, " ".join((operators.REFERENCE, *names, *scratch)), list(scratch.values()))
    axes = {"ctx": tokens, "batch": size, "Hq": q_heads, "Hkv": kv_heads, "D": dim, "page": page}
    word = operators.dtype_word(dtype)
    chosen = operators.choose(ROUTER, device, PRECISIONS[cache_dtype], dtype=word, **axes)
    if chained:
        able = operators.candidates(FAMILY, torch.cuda.get_device_capability(device))
        chosen = able.get(f"{chosen.name}_chained", chosen)
    one_page = torch.zeros(1, kv_heads, page, dim, dtype=dtype, device=device)
    made = chosen.prepare(
        {
            "q": torch.empty(size, q_heads, dim, dtype=dtype, device=device),
            "k_cache": one_page,
            "v_cache": one_page,
            "page_table": torch.zeros(size, -(-tokens // page), dtype=torch.int32, device=device),
            "seq_lens": torch.ones(size, dtype=torch.int32, device=device),
        }
    )
    used = (*OPERANDS, *MOVING)
    scratch = operators.scratch_of({name: tensor for name, tensor in made.items() if name not in used}, device)
    scales = ("!k_scale", "!v_scale") if floating else ("k_scale", "v_scale")  # of 16 bits: passed, never read
    return Batch(cache_dtype, " ".join((chosen.name, "k", "v", *scales, *scratch)), list(scratch.values()))
