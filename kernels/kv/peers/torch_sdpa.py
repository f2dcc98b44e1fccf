"""PyTorch's own scaled_dot_product_attention on a contiguous cache: the control that every user already has.

`prepare` gathers the pages into [batch, Hkv, longest, D] once, outside the timing, so this control pays nothing for
paging; a page-aware kernel that beats it does so in spite of that. Sequences of unequal length need a boolean mask,
with which PyTorch cannot take its flash path on a GPU: the ragged check workloads test correctness, and the model
shapes are all of full length, so no mask is passed there.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.common import Candidate, Tensors


def _contiguous(cache: torch.Tensor, table: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """[batch, Hkv, longest, D] from a paged cache; tokens past a sequence's end become zero (0 * NaN would be NaN)."""
    batch, longest = keep.shape
    _, kv_heads, page, dim = cache.shape
    out = torch.empty(batch, kv_heads, longest, dim, dtype=cache.dtype, device=cache.device)
    for b in range(batch):  # one sequence at a time, so that the copies in between stay small
        pages = table[b, : -(-longest // page)].clamp_min(0).long()
        out[b] = cache[pages].transpose(0, 1).flatten(1, 2)[:, :longest]
    return out.masked_fill_(~keep[:, None, :, None], 0)


def prepare(inputs: Tensors) -> Tensors:
    """inputs as in `cases.inputs`; returns q, contiguous k, v and, if lengths differ, mask [batch, 1, 1, longest]."""
    lengths = inputs["seq_lens"]
    keep = torch.arange(int(lengths.max()), device=lengths.device)[None, :] < lengths[:, None]
    args = {"q": inputs["q"]}
    for name in ("k", "v"):
        args[name] = _contiguous(inputs[f"{name}_cache"], inputs["page_table"], keep)
    if not bool(keep.all()):
        args["mask"] = keep[:, None, None, :]
    return args


def run(args: Tensors, out: Tensors) -> None:
    """out["o"] [batch, Hq, D]. The operator has no output argument, so a copy of batch * Hq * D values follows it."""
    o = scaled_dot_product_attention(
        args["q"].unsqueeze(2), args["k"], args["v"], attn_mask=args.get("mask"), enable_gqa=True
    )
    out["o"].copy_(o.squeeze(2))


CANDIDATES = (
    Candidate(
        name="torch_sdpa",
        precision="bf16",
        run=run,
        prepare=prepare,
        no_route="reads a contiguous copy of the cache, made outside the timing",
    ),
)
