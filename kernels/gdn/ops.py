"""`killgate::gdn_decode` and `killgate::gdn_prefill`: the gated delta rule as torch operators.

    o = ops.decode(q, k, v, g, beta, state, state_rows, raw_qk)                           # state is updated in place

    batch = ops.batch((512, 7), heads_k, heads_v, dim, torch.bfloat16, device)            # once for these lengths
    o, final_state = batch(q, k, v, g, beta, initial_state)

A decode step needs nothing prepared: a CUDA graph takes it after one call as warm-up. Prefill does: the tables of a
batch's lengths and the scratch are made on the host, so a captured call uses those of its `Batch`. A batch may serve
every layer of a model in turn; two streams at once need two. Shapes and types are in kernels/gdn/cases.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from kernels import cuda, operators
from kernels.common import Tensors
from kernels.gdn.route import ROUTER

FAMILY = "gdn"
DECODERS = ("cuda_decode", "recurrent_decode")  # the first that runs here; NOTES.md has their times
# Of what `prepare` makes; the rest is scratch.
TABLES = ("cu_seqlens", "chunks", "chunk_offsets", "blocks", "units", "mapped", "scanned", "firsts", "groups")
PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "bf16", torch.float32: "tf32"}


@functools.cache
def _decoder(device: int) -> str:
    if device < 0:
        return operators.REFERENCE
    able = operators.candidates(FAMILY, torch.cuda.get_device_capability(device))
    name = next((name for name in DECODERS if name in able), "")
    if not name:
        raise ValueError(f"gdn_decode: none of {', '.join(DECODERS)} runs here; see `lab doctor`")
    return name


def _decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    state_rows: torch.Tensor,
    raw_qk: bool = False,
    plans: operators.Plans | None = None,
    key: Any = None,
) -> torch.Tensor:
    if not state.is_contiguous():
        raise ValueError(f"state has strides {state.stride()}: pass the whole contiguous pool [rows, Hv, D, D]")
    moving = [t.contiguous() for t in (q, k, v, g, beta, state_rows)]
    o = torch.empty_like(moving[2])
    route = _decoder(v.get_device()) + (" state !raw_qk" if raw_qk else " state")
    names = ("q", "k", "v", "g", "beta", "state_rows")
    operators.perform(FAMILY, route, names, moving, (state,), {"o": o}, {"state": state}, plans, key)
    return o


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    state_rows: torch.Tensor,
    raw_qk: bool = False,
) -> torch.Tensor:
    """`killgate::gdn_decode`; an eager call that nothing watches leaves torch's dispatcher out."""
    moving = (q, k, v, g, beta, state_rows)
    if not operators.direct(*moving, state):
        o: torch.Tensor = torch.ops.killgate.gdn_decode.default(q, k, v, g, beta, state, state_rows, raw_qk)
        return o
    key, plan, addresses = operators.known(operators.PLANS, moving, "gdn_decode", raw_qk, operators.facts(state))
    if plan is None:
        return _decode(q, k, v, g, beta, state, state_rows, raw_qk, operators.PLANS, key)
    o = torch.empty_like(v)
    plan((*addresses, o.data_ptr()), cuda.stream_of(v.get_device()))
    return o


def _decode_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


operators.define(
    "gdn_decode(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor state_rows, "
    "bool raw_qk=False) -> Tensor",
    _decode,
    _decode_fake,
)


def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    tables: Sequence[torch.Tensor],
    scratch: Sequence[torch.Tensor],
    route: str,
    plans: operators.Plans | None = None,
    key: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    moving = [t.contiguous() for t in (q, k, v, g, beta, initial_state)]
    out = {"o": torch.empty_like(moving[2]), "final_state": torch.empty_like(moving[5])}
    names = ("q", "k", "v", "g", "beta", "initial_state")
    operators.perform(FAMILY, route, names, moving, (*tables, *scratch), out, None, plans, key)
    return out["o"], out["final_state"]


def _prefill_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    like = torch.contiguous_format
    return torch.empty_like(v, memory_format=like), torch.empty_like(initial_state, memory_format=like)


operators.define(
    "gdn_prefill(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor initial_state, Tensor[] tables, "
    "Tensor(a!)[] scratch, str route) -> (Tensor, Tensor)",
    _prefill,
    _prefill_fake,
)


@dataclass(frozen=True)
class Batch:
    """What `gdn_prefill` takes for sequences of these lengths, beside the activations."""

    lengths: tuple[int, ...]
    route: str
    tables: list[torch.Tensor]
    scratch: list[torch.Tensor]
    plans: operators.Plans = field(default_factory=operators.Plans, repr=False, compare=False)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(o, final_state). Raises ValueError where the tensors are not of these lengths."""
        moving, key = (q, k, v, g, beta, initial_state), None
        if eager := operators.direct(*moving):
            key, plan, addresses = operators.known(self.plans, moving)
            if plan is not None:  # a call with tensors like these has been checked
                o, final_state = torch.empty_like(v), torch.empty_like(initial_state)
                plan((*addresses, o.data_ptr(), final_state.data_ptr()), cuda.stream_of(v.get_device()))
                return o, final_state
        if v.shape[0] * v.shape[1] != sum(self.lengths) or initial_state.shape[0] != len(self.lengths):
            raise ValueError(
                f"v {tuple(v.shape)}, initial_state {tuple(initial_state.shape)} and lengths {self.lengths}"
            )
        if eager:
            return _prefill(*moving, self.tables, self.scratch, self.route, self.plans, key)
        call = torch.ops.killgate.gdn_prefill.default
        o, final_state = call(q, k, v, g, beta, initial_state, self.tables, self.scratch, self.route)
        return o, final_state


def batch(
    lengths: Sequence[int],
    heads_k: int,
    heads_v: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    raw_qk: bool = False,
    only: str = "",
) -> Batch:
    """The `Batch` of sequences with these lengths: packed, v [1, sum, Hv, D], or equal ones as v [B, T, Hv, D].

    raw_qk: q and k arrive without their norms taken out. only: this candidate, instead of the router's choice. Raises
    ValueError where no candidate takes the shape.
    """
    device, mark = torch.device(device), " !raw_qk" if raw_qk else ""
    lengths = tuple(map(int, lengths))
    if not lengths or min(lengths) < 1:
        raise ValueError(f"{lengths=} must be one positive length for every sequence; leave empty ones out")
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    if device.type != "cuda":
        equal = len(set(lengths)) == 1
        tables, scratch = {} if equal else {"cu_seqlens": bounds}, operators.scratch_of({}, device)
        route = " ".join((operators.REFERENCE, *tables, *scratch)) + mark
        return Batch(lengths, route, list(tables.values()), list(scratch.values()))
    count, total = len(lengths), sum(lengths)
    axes = {"T": -(-total // count), "batch": count, "Hk": heads_k, "Hv": heads_v, "D": dim}
    word = operators.dtype_word(dtype)
    if only:
        chosen = operators.candidates(FAMILY, torch.cuda.get_device_capability(device))[only]
    else:
        ragged = {"lengths": "-".join(map(str, lengths))} if len(set(lengths)) > 1 else {}
        chosen = operators.choose(ROUTER, device, PRECISIONS[dtype], dtype=word, **axes, **ragged)
    heads = {"q": (heads_k, dim), "k": (heads_k, dim), "v": (heads_v, dim), "g": (heads_v,), "beta": (heads_v,)}
    inputs = {
        name: torch.empty(1, total, *shape, dtype=torch.float32 if name in ("g", "beta") else dtype, device="meta")
        for name, shape in heads.items()
    }
    inputs |= {"initial_state": torch.empty(count, heads_v, dim, dim, device=device), "cu_seqlens": bounds}
    if raw_qk:
        inputs["raw_qk"] = bounds
    return Batch(lengths, *routed(chosen.name, inputs, chosen.prepare(inputs), mark))


def routed(
    name: str, inputs: Tensors, made: Tensors, mark: str = ""
) -> tuple[str, list[torch.Tensor], list[torch.Tensor]]:
    """(route, tables, scratch) of what a candidate's `prepare` made of the inputs; mark: what the route ends with."""
    own = {n: t for n, t in made.items() if n not in inputs or n == "cu_seqlens"}
    tables = {n: t for n, t in own.items() if n in TABLES}
    scratch = operators.scratch_of({n: t for n, t in own.items() if n not in TABLES}, inputs["initial_state"].device)
    return " ".join((name, *tables, *scratch)) + mark, list(tables.values()), list(scratch.values())
