"""Paged decode attention with grouped queries (GQA), over a 16-bit, fp8 or Q8_0 cache.

One query token per sequence attends to everything that sequence has cached:

    o[b, h] = sum_t softmax_t(q[b, h] . k[b, t, h // G] / sqrt(D)) v[b, t, h // G],    G = Hq / Hkv

Axes of a workload:

    batch    sequences decoded together
    ctx      longest sequence, in tokens (also the capacity of a row of the page table)
    Hq, Hkv  query heads and key/value heads; Hq is a multiple of Hkv
    D        head dimension
    page     tokens per page
    lengths  "full": every sequence is ctx long; "ragged": the first is, the others are anything from 1 up; "spread":
             from ctx down in even steps, in random order (see `cost.lengths`)
    dtype    "bf16" or "fp16": q, o and the master cache
    scales   "tensor": fp8 caches take one scale for all heads, which the problem brings along; left out where every
             candidate finds a scale per head

The format of the cache is not an axis but the candidate's precision: "bf16" (the master as it is, whichever 16-bit
dtype that is), "fp8-kv", "q8_0-kv"; peers add "fp8-kv-unit" and "fp8-qkv" (see `cases.tolerance`). So one workload
carries a 16-bit control and a quantised candidate, which is the comparison a user asks for; each candidate converts
the same master cache in its `prepare`, outside the timing.

Tensors of a problem (see `cases.inputs`):

    q            [batch, Hq, D]
    k_cache      [pages, Hkv, page, D]   also v_cache
    page_table   [batch, max_pages] int32, page ids in order; entries past the sequence's last page are -1
    seq_lens     [batch] int32
    k_scale      [Hkv] float32, also v_scale: only where scales = "tensor"
    o            [batch, Hq, D]

Why [pages, Hkv, page, D] and not [pages, page, Hkv, D]: decoding reads one kv head's tokens at a time, and in this
order a (page, head) tile is one contiguous run (4 KB of fp8 at page 16, D 256) that a single bulk copy can fetch; the
other order leaves a row of D values per token. Given up: appending a token writes Hkv separate rows, not one. That is
2 Hkv D values per step against 2 Hkv D ctx read.

Room is left for: a block allocator with prefix sharing, a sliding-window ring, 3-bit rotated KV, block-sparse prefill.
"""

from __future__ import annotations

TITLE = "Paged decode attention with 16-bit, fp8 and Q8_0 KV cache"
