"""Paged decode attention in float64, one sequence at a time, the way one would write it on a board.

It takes the cache in whichever form the precision under test sees it, recognised by dtype, and decodes it from the
definition of the format, not with `format.dequantise_*` and not with torch's float8 dtype: e4m3 through a table of 256
values built from sign, exponent and mantissa, Q8_0 by repeating each half scale over its 32 values. A decoding mistake
in the family's own format code or in a kernel therefore shows as a difference.

Sequences are gathered one by one, so memory stays at one sequence in float64 (about 0.27 GB for 32768 tokens of four
256-wide kv heads, K and V each) and the model shapes can be checked on the device that holds the cache.
"""

from __future__ import annotations

import functools
import math

import torch

from kernels.common import Tensors


@functools.cache  # on the host alone: what stays on a GPU may lie in an allocation that a candidate maps
def e4m3_values() -> torch.Tensor:
    """The 256 values of e4m3 ("fn": no infinities, S.1111.111 is NaN), float64, indexed by byte.

    Formula: (-1)^s 2^(e-7) (1 + m/8), and (-1)^s 2^-6 m/8 where e = 0 (Micikevicius et al., FP8 Formats for Deep
    Learning, 2022).
    """
    values = []
    for byte in range(256):
        sign, exponent, mantissa = -1.0 if byte >> 7 else 1.0, (byte >> 3) & 15, byte & 7
        if exponent == 15 and mantissa == 7:
            values.append(math.nan)
        elif exponent == 0:
            values.append(sign * 2.0**-6 * mantissa / 8)
        else:
            values.append(sign * 2.0 ** (exponent - 7) * (1 + mantissa / 8))
    return torch.tensor(values, dtype=torch.float64)


def gather(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """One sequence's tokens in order, [Hkv, length, X], from a cache [pages, Hkv, page, X] and its page ids."""
    tiles = cache[pages.long()]  # [n, Hkv, page, X]
    return tiles.transpose(0, 1).flatten(1, 2)[:, :length]


def decode(tokens: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """float64 values of gathered tokens [Hkv, T, D]: 16-bit floats as they are, uint8 as e4m3, int8 as Q8_0.

    scale: none for floats, [Hkv] for e4m3, gathered [Hkv, T, D / 32] for Q8_0. TypeError on another dtype.
    """
    if tokens.dtype.is_floating_point:
        return tokens.double()
    if scale is None:
        raise TypeError(f"a {tokens.dtype} cache needs k_scale and v_scale; take them from format.quantise_*")
    if tokens.dtype == torch.uint8:
        return e4m3_values().to(tokens.device)[tokens.long()] * scale.double()[:, None, None]
    if tokens.dtype == torch.int8:
        return tokens.double() * scale.double().repeat_interleave(32, dim=-1)
    raise TypeError(f"cache dtype {tokens.dtype} is not known; expected a float dtype, uint8 (e4m3) or int8 (Q8_0)")


def reference(inputs: Tensors) -> Tensors:
    """Decode attention of every sequence.

    inputs: q [batch, Hq, D]; k_cache, v_cache [pages, Hkv, page, D]; page_table [batch, max_pages] int32; seq_lens
            [batch] int32; for a quantised cache also k_scale, v_scale: [Hkv] float32 (e4m3) or
            [pages, Hkv, page, D / 32] half (Q8_0).
    Returns {"o": [batch, Hq, D] float64}. A sequence of length 0 (a padding row of a captured graph) gives zeros.
    """
    q, table = inputs["q"], inputs["page_table"]
    batch, q_heads, dim = q.shape
    _, kv_heads, page, _ = inputs["k_cache"].shape
    o = torch.zeros(batch, q_heads, dim, dtype=torch.float64, device=q.device)
    for b, length in enumerate(inputs["seq_lens"].tolist()):
        if length == 0:
            continue
        pages = table[b, : math.ceil(length / page)]
        values = {}
        for name in ("k", "v"):
            tokens = gather(inputs[f"{name}_cache"], pages, length)
            scale = inputs.get(f"{name}_scale")
            if scale is not None and scale.dim() == 4:
                scale = gather(scale, pages, length)
            values[name] = decode(tokens, scale)
        heads = q[b].double().unflatten(0, (kv_heads, -1))  # those of a group share a KV head
        shares = torch.softmax(heads @ values["k"].mT * dim**-0.5, dim=-1)  # [Hkv, Hq / Hkv, length]
        o[b] = (shares @ values["v"]).flatten(0, 1)
    return {"o": o}
