"""The same cache laid out two other ways, to ask what paging costs: `contiguous` and `in_order`.

Paging could cost in two places: the table has to be read before a tile can be asked for, and neighbouring tiles of a
sequence lie apart. Both layouts are inputs that any paged kernel takes, so the comparison is one kernel against itself:

    permuted     pages anywhere in the pool, as `cases.inputs` makes them: both costs
    in_order     a sequence's pages one after another, the table still read for each: the first cost
    contiguous   one page as large as a sequence's capacity, [batch, Hkv, capacity, D]: neither; the table has one entry

What this cannot show: a kernel written for contiguous caches may save the table's instructions altogether, and an
engine pays for paging on the host as well. For the first, torch's own attention stands beside it (`torch_sdpa`).
"""

from __future__ import annotations

import torch

from kernels.common import Tensors


def in_order(inputs: Tensors) -> Tensors:
    """inputs as in `cases.inputs` with the pages of each sequence moved next to each other, in order.

    The pool becomes [batch * max_pages, Hkv, page, D]; table entries past a sequence's end stay -1, and what lies
    behind them is what lay in page 0.
    """
    table = inputs["page_table"]
    ids = torch.arange(table.numel(), dtype=torch.int32, device=table.device).reshape(table.shape)
    moved = {name: inputs[name][table.clamp_min(0).flatten().long()] for name in ("k_cache", "v_cache")}
    return inputs | moved | {"page_table": torch.where(table >= 0, ids, -1).to(torch.int32)}


def contiguous(inputs: Tensors, power_of_two: bool = False) -> Tensors:
    """inputs as in `cases.inputs` with one page per sequence: caches [batch, Hkv, capacity, D], table [batch, 1].

    capacity: max_pages * page, with `power_of_two` the next power of two, for kernels that take no other page size;
    the slots added are zero. Slots past a sequence's end hold whatever the pool's did.
    """
    table = inputs["page_table"]
    batch, max_pages = table.shape
    _, kv_heads, page, dim = inputs["k_cache"].shape
    capacity = max_pages * page
    padded = 1 << (capacity - 1).bit_length() if power_of_two else capacity
    moved = dict(inputs)
    for name in ("k_cache", "v_cache"):
        cache = inputs[name]
        out = torch.zeros(batch, kv_heads, padded, dim, dtype=cache.dtype, device=cache.device)
        for b in range(batch):  # one sequence at a time, so that the copies in between stay small
            out[b, :, :capacity] = cache[table[b].clamp_min(0).long()].transpose(0, 1).flatten(1, 2)
        moved[name] = out
    moved["page_table"] = torch.arange(batch, dtype=torch.int32, device=table.device)[:, None].contiguous()
    return moved
