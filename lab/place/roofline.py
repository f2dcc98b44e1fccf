"""Floors, crossovers and ceilings: the arithmetic that says what a measurement may be at best.

A kernel cannot finish before its bytes have moved nor before its operations have run, so its floor is the larger of the
two times (Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009). Everything here is that statement, or
Amdahl's, applied to decode: plain functions of plain numbers in base units (bytes, seconds, operations per second), one
formula each, with its source.

lab/study/reproduction.py applies these functions to what the sources recorded; no number of a source stands in this
file.

Given up: cache levels, latency and occupancy. A floor is a bound, not a prediction, and a model that explained more
would also be able to explain anything away.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.base.devices import Device
from lab.base.errors import BadInput
from lab.row.records import Measurement


@dataclass(frozen=True)
class Floor:
    """The least time a problem takes on a device.

    memory_us, compute_us: time to move its bytes and to run its operations; floor_us: the larger one.
    bound:                 "memory" or "compute", whichever that is.
    intensity, ridge:      operations per byte of the problem, and where the two times are equal on the device.
    """

    memory_us: float
    compute_us: float
    floor_us: float
    bound: str
    intensity: float
    ridge: float


def floor(flops: float, bytes_moved: float, peak_flop_s: float, bandwidth_bytes_s: float) -> Floor:
    """The floor of a problem: max(bytes / bandwidth, operations / peak).

    Source: Williams et al. 2009. Raises BadInput when a count is negative, both are zero, or a rate is not positive.
    """
    if flops < 0 or bytes_moved < 0 or flops + bytes_moved == 0:
        raise BadInput("roofline", f"{flops=:g}, {bytes_moved=:g} is no work", "give the operations and bytes")
    if peak_flop_s <= 0 or bandwidth_bytes_s <= 0:
        raise BadInput("roofline", f"{peak_flop_s=:g}, {bandwidth_bytes_s=:g} is no device", "give rates above zero")
    memory_us, compute_us = bytes_moved / bandwidth_bytes_s * 1e6, flops / peak_flop_s * 1e6
    intensity = flops / bytes_moved if bytes_moved else float("inf")
    bound = "memory" if memory_us >= compute_us else "compute"
    return Floor(memory_us, compute_us, max(memory_us, compute_us), bound, intensity, peak_flop_s / bandwidth_bytes_s)


def place(device: Device, flops: float, bytes_moved: float, pipe: str) -> Floor:
    """The floor of a cost by a device's dense peak and memory bandwidth; raises BadInput for a pipe that it lacks."""
    return floor(flops, bytes_moved, device.peak(pipe).base, device.bandwidth.base)


def of_row(device: Device, row: Measurement) -> Floor:
    """`place` for the work of a measured row; raises BadInput for one that states none, as a library that is absent."""
    if row.flops is None or row.bytes is None or row.pipe is None:
        raise BadInput(row.id, "states no work", "leave it out")
    return place(device, row.flops, row.bytes, row.pipe)


def beyond(device: Device, row: Measurement) -> str:
    """ "" or one sentence: the row is faster than the datasheet's bandwidth (cold rows) or peak allows."""
    # Not time_us: a suspect row may beat this ceiling too.
    if row.metric != "kernel_us" or row.median_us is None or row.bytes is None or not device.knows(row.pipe):
        return ""
    floor = of_row(device, row)
    limit_us = floor.floor_us if row.l2 == "cold" else floor.compute_us
    if row.median_us >= limit_us:
        return ""
    return f"{row.name} took {row.median_us:.2f} us, under the {limit_us:.2f} us that {device.name}'s datasheet allows"


def fraction_of(device: Device, row: Measurement) -> float | None:
    """Share of its datasheet roofline that a row reached; None without a time, stated work or a known peak."""
    if row.time_us is None or row.bytes is None or not device.knows(row.pipe):
        return None
    return roofline_fraction(of_row(device, row).floor_us, row.time_us)


def roofline_fraction(floor_us: float, measured_us: float) -> float:
    """Share of the bound that was reached: floor / measured. Above 1 the figure beats its own bound and is suspect."""
    if floor_us <= 0 or measured_us <= 0:
        raise BadInput("roofline", f"{floor_us=:g}, {measured_us=:g}: both must be above zero", "give times in us")
    return floor_us / measured_us


def weight_read_floor(weight_bytes: float, bandwidth: float) -> float:
    """Seconds to read the weights once: bytes / bandwidth. Source: LocalAI FP4_GEMM_SCOPE_B section 2a."""
    return weight_bytes / bandwidth


def decode_floor(sequences: float, weight_bytes: float, bandwidth: float) -> float:
    """Tokens/s of a decode step that reads the weights once for all sequences. Source: as above, section 2a."""
    return sequences / weight_read_floor(weight_bytes, bandwidth)


def floor_over_peer(sequences: float, weight_bytes: float, bandwidth: float, peer: float) -> float:
    """How many times a peer's tokens/s the decode floor is. Source: LocalAI FP4_GEMM_SCOPE_B section 2b."""
    return decode_floor(sequences, weight_bytes, bandwidth) / peer


def crossover_m(peak: float, weight_bytes: float, params: float, bandwidth: float) -> float:
    """Tokens M at which multiplying by a weight matrix takes as long as reading it.

    2 * params * M / peak = bytes / bandwidth, so M* = peak * bytes / (2 * params * bandwidth); below it the product is
    bound by memory. Activations are left out, as in the source: LocalAI FP4_GEMM_SCOPE_B section 0.
    """
    return peak * weight_bytes / (2 * params * bandwidth)


def efficiency(params: float, tokens: float, seconds: float, peak: float) -> float:
    """Share of the peak that 2 * params * tokens operations reach in `seconds`. Source: as above, section 2a."""
    return 2 * params * tokens / seconds / peak


def ratio(numerator: float, denominator: float) -> float:
    """One quantity as a multiple of another."""
    return numerator / denominator


def part_of(fraction: float, whole: float) -> float:
    """A stated share of a stated whole: fraction * whole."""
    return fraction * whole


def saving_ceiling(share: float, saved: float) -> float:
    """Most that throughput gains when `saved` of a part with `share` of the step disappears: 1 / (1 - saved*share) - 1.

    Source: Amdahl 1967; LocalAI EXECUTION_REARCH_SCOPE P6 uses it with saved = 0.5 (half the KV bytes). share and saved
    lie in [0, 1] and their product below 1, else BadInput.
    """
    if not (0 <= share <= 1 and 0 <= saved <= 1) or share * saved >= 1:
        raise BadInput("roofline", f"{share=:g}, {saved=:g}: not two shares of a step", "give fractions from 0 to 1")
    return 1 / (1 - saved * share) - 1


def part_saving_ceiling(part: float, step: float, saved: float) -> float:
    """`saving_ceiling` from the times of the part and of the whole step."""
    return saving_ceiling(part / step, saved)


def ceiling_rate(base: float, share: float, saved: float) -> float:
    """Tokens/s at the ceiling: base * (1 + saving_ceiling). Source: LocalAI A2 phase 2, ceilings without the copies."""
    return base * (1 + saving_ceiling(share, saved))


def attention_share(ctx: float, attention: float, at_ctx: float, rest: float) -> float:
    """Share of a decode step in attention when its time grows with the context and the rest does not.

    attention: its time at context `at_ctx`; rest: the time of everything else.
    Source: LocalAI EXECUTION_REARCH_SCOPE P6.
    """
    part = attention * ctx / at_ctx
    return part / (part + rest)


def kv_saving_ceiling(ctx: float, attention: float, at_ctx: float, rest: float, saved: float) -> float:
    """`saving_ceiling` of `attention_share` at a context. With saved = 0.5 it is h / (rest + h), h half its time."""
    return saving_ceiling(attention_share(ctx, attention, at_ctx, rest), saved)


def kv_bytes_per_token(layers: float, kv_heads: float, head_dim: float, element_bytes: float) -> float:
    """Bytes of K and V per token of context: 2 * layers * heads * head_dim * element. Source: the shapes alone."""
    return 2 * layers * kv_heads * head_dim * element_bytes


def kv_read_share(
    ctx: float, sequences: float, layers: float, kv_heads: float, head_dim: float, element_bytes: float,
    seconds: float, bandwidth: float,
) -> float:  # fmt: skip
    """Share of the bandwidth that reading the whole cache once takes in `seconds`; above 1 the time is not possible."""
    read = kv_bytes_per_token(layers, kv_heads, head_dim, element_bytes) * ctx * sequences
    return bandwidth_share(read, seconds, bandwidth)


def bandwidth_share(moved: float, seconds: float, bandwidth: float) -> float:
    """Share of the bandwidth that moving `moved` bytes in `seconds` takes: bytes / seconds / bandwidth."""
    return moved / seconds / bandwidth


def decode_bandwidth_share(moved: float, sequences: float, rate: float, bandwidth: float) -> float:
    """Share of the bandwidth of a step that moves `moved` bytes. Source: LocalAI DECODE_PARITY_EXPLORE, 55.5 GB."""
    return bandwidth_share(moved, sequences / rate, bandwidth)


def gdn_state_bytes(
    layers: float, v_heads: float, head_dim: float, element_bytes: float, sequences: float, passes: float
) -> float:
    """Bytes of recurrent state, S [head_dim, head_dim] a value head; passes: 2 where it is read and written."""
    return layers * sequences * v_heads * head_dim**2 * element_bytes * passes
