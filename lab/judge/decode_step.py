"""One decode step of a hybrid model (attention and GDN layers) as a sum of parts, and what a smaller KV cache saves.

Parts: the KV-cache read of the attention layers, the recurrent state's read and write in the GDN layers, and the read
of the weights that the step's tokens are routed to. Each is timed in one of two ways:

    floors     from the roofline: what no kernel can beat. Attention's share then does not depend on anybody's kernels,
               and on a device where all three are memory-bound not on its bandwidth either.
    from_rows  from measured kernels: the row nearest in batch and context, scaled by the two problems' floors, that is
               with the fraction of the roofline that the kernel reached there.

Left out: norms, convolution, router, sampling, the attention's own projections beyond their bytes, and the gaps between
kernels. What is left out lowers attention's share, so a ceiling from here is an upper bound, and modelled evidence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lab.base.devices import Device
from lab.base.errors import BadInput
from lab.base.models import Model
from lab.place import roofline
from lab.row.records import Measurement

ATTENTION, STATE, WEIGHTS = "attention", "state", "weights"
NVFP4_BYTES = 4.5 / 8  # a weight: four bits, and one e4m3 block scale for sixteen
STATE_BYTES = 4.0  # float32, as all recorded models keep it
MOE_SEQUENCES = 128  # at which an MoE's `weight_bytes` in data/models.toml were stated


@dataclass(frozen=True)
class Part:
    """Equal calls of one step: `calls` times flops and compulsory bytes on `pipe`; batch, context: of the step."""

    name: str
    calls: int
    flops: float
    bytes: float
    pipe: str
    batch: int
    context: int


@dataclass(frozen=True)
class Time:
    """A part's time in one step. basis: "roofline", or the kernel and workload that it is scaled from."""

    part: str
    us: float
    basis: str


def cached_bytes(model: Model, value_bytes: float = 2.0) -> float:
    """Bytes of KV cache per token of one sequence, over all layers that keep one."""
    layers, heads, dim = (model.fact(name).base for name in ("attention_layers", "kv_heads", "head_dim"))
    return roofline.kv_bytes_per_token(layers, heads, dim, value_bytes)


def state_bytes(model: Model) -> float:
    """Bytes of recurrent state per sequence: every layer's matrices, and the columns that its convolution keeps."""
    layers, v_heads, dim = (model.fact(n).base for n in ("gdn_layers", "gdn_v_heads", "gdn_head_dim"))
    channels = (2 * model.fact("gdn_k_heads").base + v_heads) * dim
    columns = model.fact("gdn_conv_kernel").base - 1
    return layers * (v_heads * dim**2 + channels * columns) * STATE_BYTES


def experts_read(model: Model, sequences: int) -> float:
    """Share of an MoE's experts that a step of `sequences` tokens activates when tokens are routed independently.

    1 - (1 - chosen / experts)^sequences; at 128 sequences 98 %, which is what the source of the weights' bytes says.
    """
    chosen = model.fact("experts_per_token").base / model.fact("experts").base
    return 1 - (1 - chosen) ** sequences


def read_weight_bytes(model: Model, sequences: int) -> float:
    """Bytes of weights that one step reads: all of a dense model; of an MoE the activated experts and all the rest."""
    stated = model.fact("weight_bytes").base
    if "experts" not in model.facts:
        return stated
    sizes = ("layers", "experts", "expert_ffn", "hidden")
    experts = 3 * math.prod(model.fact(n).base for n in sizes) * NVFP4_BYTES
    return stated - experts * (experts_read(model, MOE_SEQUENCES) - experts_read(model, sequences))


def parts(model: Model, sequences: int, context: int, value_bytes: float = 2.0, pipe: str = "bf16") -> tuple[Part, ...]:
    """The parts of a step of `sequences` sequences, each `context` tokens long.

    value_bytes: of a cached value with its scale (2, 1, or 34/32 for blocks of 32 bytes with a half).
    pipe: the peak that products with weights run on; attention and state run on "bf16" and "f32".
    Raises BadInput for sizes below one and for a model that lacks a fact.
    """
    if min(sequences, context) < 1:
        raise BadInput("decode step", f"{sequences=}, {context=}", "give at least one of each")
    q_heads, kv_heads, dim = (model.fact(n).base for n in ("attention_heads", "kv_heads", "head_dim"))
    v_heads, state_dim = model.fact("gdn_v_heads").base, model.fact("gdn_head_dim").base
    tokens = sequences * context
    read = 2 * tokens * kv_heads * dim * value_bytes + 4 * sequences * q_heads * dim
    matrices = sequences * v_heads * state_dim**2
    active = model.facts.get("active_params", model.fact("params")).base
    return (
        Part(ATTENTION, int(model.fact("attention_layers").base), 4.0 * tokens * q_heads * dim, read, "bf16",
             sequences, context),
        Part(STATE, int(model.fact("gdn_layers").base), 8.0 * matrices, 2 * matrices * STATE_BYTES, "f32",
             sequences, context),
        Part(WEIGHTS, 1, 2 * active * sequences, read_weight_bytes(model, sequences), pipe, sequences, context),
    )  # fmt: skip


def floors(device: Device, of: Iterable[Part]) -> tuple[Time, ...]:
    """Each part at its roofline."""
    return tuple(Time(p.name, p.calls * _floor_us(device, p), "roofline") for p in of)


def _floor_us(device: Device, p: Part) -> float:
    return roofline.place(device, p.flops, p.bytes, p.pipe).floor_us


def from_rows(device: Device, of: Iterable[Part], rows: Mapping[str, Iterable[Measurement]]) -> tuple[Time, ...]:
    """Each part from measured rows (part name -> rows), scaled from the nearest by the ratio of floors.

    Nearest: fewest doublings of batch (a product's M) and context away; among equals, the row closest to its roofline.
    A row's figures decide, not its name: pass rows of the kernels and formats that are meant.
    Raises BadInput when a part has no row that is ok.
    """
    found = []
    for p in of:
        usable = [r for r in rows.get(p.name, ()) if r.time_us]
        if not usable:
            raise BadInput(f"step of {device.id}", f'no measured row for "{p.name}"', "measure it, or take floors")
        _, share, row = max(
            ((-_doublings(p, r), roofline.fraction_of(device, r) or 0.0, r) for r in usable),
            key=lambda found: (*found[:2], found[2].run),
        )
        found.append(Time(p.name, p.calls * _floor_us(device, p) / share, f"{row.name} {row.workload_id}"))
    return tuple(found)


def _doublings(p: Part, row: Measurement) -> float:
    axes = row.workload
    apart = abs(math.log2(p.batch / float(axes.get("batch", axes.get("M", p.batch)))))
    return apart + abs(math.log2(p.context / float(axes.get("ctx", p.context))))


def total_us(times: Iterable[Time]) -> float:
    """The step: the sum of its parts."""
    return sum(t.us for t in times)


def share(times: Iterable[Time], part: str = ATTENTION) -> float:
    """A part's share of the step, 0 to 1."""
    times = tuple(times)
    return sum(t.us for t in times if t.part == part) / total_us(times)


def ceiling_pct(times: Iterable[Time], saved: float) -> float:
    """Most that decode throughput gains, in %, when `saved` of attention's time disappears (0.5: half the bytes)."""
    return 100 * roofline.saving_ceiling(share(times), saved)


@dataclass(frozen=True)
class Room:
    """KV-cache capacity beside the weights. tokens: cached in all; sequences: of one context, state included."""

    tokens: int
    sequences: int


def room(model: Model, memory_bytes: float, sequences: int, context: int, value_bytes: float = 2.0) -> Room:
    """Tokens of cache that fit beside weights and the state of `sequences`, and the sequences of `context` that fit.

    The weights count as the model's file, since all experts are kept. Raises BadInput when weights and state alone do
    not fit.
    """
    free = memory_bytes - model.fact("file_bytes").base
    left = free - sequences * state_bytes(model)
    if left < 0:
        what = f"{memory_bytes / 1e9:g} GB hold the weights and the state of fewer than {sequences} sequences"
        raise BadInput(f"room for {model.id}", what, "give more memory or fewer sequences")
    per_token = cached_bytes(model, value_bytes)
    return Room(int(left / per_token), int(free / (state_bytes(model) + context * per_token)))
