"""Flops and compulsory bytes of the gated delta rule.

Decode is traffic: each sequence's state, Hv * D * D elements, is read once and written once, and everything else is
three orders smaller. Prefill has two floors. Traffic: q, k, v, g, beta read once, o written once, the state read and
written once per sequence. Arithmetic: it depends on the algorithm. The recurrence itself needs 6 D^2 flops per token
and head but runs on the vector units; chunks of C tokens turn it into matrix products that tensor cores can run and
add work that grows with C. The convention here is C = 64 and the least work known at that size; `chunk_flops` states
each product, so that another C or algorithm can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from kernels.common import Cost, Work, Workload

ELEMENT_BYTES = {"f32": 4, "fp16": 2, "bf16": 2}
CHUNK = 64
CONV_WIDTH = 4


def sequences(workload: Workload) -> int:
    """Number of states carried: the ragged lengths' count, or the batch."""
    lengths = str(workload.axes.get("lengths", ""))
    return len(lengths.split("-")) if lengths else int(workload["batch"])


def state_bytes(workload: Workload) -> int:
    """Bytes of the states that the workload touches, counted once: sequences * Hv * D * D * element size."""
    live = sequences(workload) - int(workload.axes.get("pad", 0))
    return live * workload["Hv"] * workload["D"] ** 2 * ELEMENT_BYTES[workload["state_dtype"]]


def chunk_flops(chunk: int, dim: int, ratio: int = 1) -> Mapping[str, float]:
    """Matrix flops per token and v head of the chunked form, product by product (a multiply-add is two).

    K K^T and Q K^T do not depend on the v head when decay and beta are applied afterwards, so the `ratio` v heads of a
    k head can share them; `solve` applies the C x C inverse to the D columns of the corrected values. Triangles are
    counted as full squares, because matrix units do not skip half a tile. Forming W = inverse * (beta exp(g) K)
    instead of correcting the values by S^T K first costs another 2 C D ("w").
    """
    return {
        "kkt": 2 * chunk * dim / ratio,
        "qkt": 2 * chunk * dim / ratio,
        "state_k": 2 * dim * dim,
        "state_q": 2 * dim * dim,
        "solve": 2 * chunk * dim,
        "attend": 2 * chunk * dim,
        "update": 2 * dim * dim,
    }


def w_flops(chunk: int, dim: int) -> float:
    """Extra flops per token and v head of the pipeline that materialises W (kernels/gdn/triton_split.py)."""
    return 2 * chunk * dim


def cost(workload: Workload, precision: str) -> Cost:
    """Cost of a workload. Prefill runs on the matrix units ("bf16" pipe), decode on the vector units ("f32")."""
    dim, heads_k, heads_v = workload["D"], workload["Hk"], workload["Hv"]
    tokens = workload["batch"] * workload["T"]
    element = ELEMENT_BYTES[workload["dtype"]]
    out = ELEMENT_BYTES[str(workload.axes.get("out_dtype", workload["dtype"]))]
    activation_bytes = tokens * dim * ((2 * heads_k + heads_v) * element + heads_v * out) + tokens * heads_v * 2 * 4
    traffic_bytes = activation_bytes + 2 * state_bytes(workload)
    live = tokens - int(workload.axes.get("pad", 0))
    step_flops = live * heads_v * 7 * dim * dim  # 6 D^2 and the decay
    if workload["op"] == "decode":
        return Cost(flops=step_flops, bytes=traffic_bytes, pipe="f32")
    if workload["op"] == "conv_decode":
        channels = (2 * heads_k + heads_v) * dim
        # The mixed row in and o out, both gates' inputs; CONV_WIDTH weights a channel once for the batch, A_log and
        # dt_bias; the convolution's state in and out. A multiply-add a weight; SiLU is not counted.
        activation_bytes = tokens * (channels + heads_v * dim + 2 * heads_v) * element + 2 * heads_v * 4
        conv_bytes = channels * (CONV_WIDTH + live * 2 * (CONV_WIDTH - 1)) * element
        conv_flops = live * channels * 2 * CONV_WIDTH
        return Cost(step_flops + conv_flops, activation_bytes + conv_bytes + 2 * state_bytes(workload), "f32")
    per_token = sum(chunk_flops(CHUNK, dim, heads_v // heads_k).values())
    return Cost(flops=tokens * heads_v * per_token, bytes=traffic_bytes, pipe="bf16")


def intermediate_bytes(chunk: int, dim: int, element_bytes: int) -> float:
    """Bytes per token and v head that six kernels hand to each other, each tensor written once and read once.

    Running decays and the system A in float32; its inverse X, W, U, V' and a state per chunk in `element_bytes` each.
    """
    return 2 * (4 + 4 * chunk + element_bytes * (chunk + 3 * dim + dim * dim / chunk))


def algorithm_cost(
    workload: Workload, chunk: int, element_bytes: int, through_memory: bool = False, pipe: str = "bf16"
) -> Cost:
    """Cost of a prefill by a given algorithm, where `cost` takes the least of all.

    chunk: tokens a chunk; element_bytes: of q, k, v, o and of what passes between kernels; through_memory: six kernels
    with tensors between them instead of one kernel that keeps them; pipe: the peak that its products run on.
    """
    dim, heads_k, heads_v = workload["D"], workload["Hk"], workload["Hv"]
    tokens = workload["batch"] * workload["T"]
    moved = tokens * ((2 * heads_k + 2 * heads_v) * dim * element_bytes + 2 * heads_v * 4) + 2 * state_bytes(workload)
    flops = sum(chunk_flops(chunk, dim, heads_v // heads_k).values())
    if through_memory:
        moved += tokens * heads_v * intermediate_bytes(chunk, dim, element_bytes)
        flops += w_flops(chunk, dim)
    return Cost(flops=tokens * heads_v * flops, bytes=moved, pipe=pipe)


def chain_work(workload: Workload, chunk: int, tile: int, places: int) -> Work:
    """The counts of a kernel that keeps all on chip: its chain of chunk steps, and what it reads and writes.

    tile: as in `chain_steps`; places: multiprocessors, of which each runs two programs side by side: in the time of the
    longer chain, or in that of both programs' products. The states of a multiprocessor's programs come and go ahead of
    the first step and behind the last, so that many short sequences cost more than their bytes.
    """
    steps, step = chain_steps(workload, chunk, tile, 2 * places), 7000.0 + chunk * workload["D"] * tile / 36
    programs = sequences(workload) * workload["Hv"] * math.ceil(workload["D"] / tile)
    beside = math.ceil(programs / places) * math.ceil(workload["T"] / chunk)
    states = 2.0 * state_bytes(workload)
    at_once = {
        "bytes": cost(workload, "bf16").bytes - states,
        "steps": steps * step,
        "steps_beside": beside * step / 2,
    }
    return Work(at_once, {"launches": 1.0, "bytes": states, "states": state_clocks(workload, tile, places)})


def state_clocks(workload: Workload, tile: int, places: int) -> float:
    """Clocks in which the busiest multiprocessor reads and writes the float32 states of its programs, 16 bytes each."""
    programs = sequences(workload) * workload["Hv"] * math.ceil(workload["D"] / tile)
    return math.ceil(programs / places) * workload["D"] * min(tile, workload["D"]) * 8 / 16


def chain_steps(workload: Workload, chunk: int, tile: int, places: int) -> int:
    """Chunk steps that follow one another in a prefill's scan: those of one program, times the waves of programs.

    A program carries `tile` columns of one v head's state through one sequence, chunk by chunk; places: programs that
    run at once, the multiprocessors times what one holds. The time is this number times the time of a step, however
    wide the device is. Arithmetic; sequences of equal length.
    """
    programs = sequences(workload) * workload["Hv"] * math.ceil(workload["D"] / tile)
    return math.ceil(workload["T"] / chunk) * math.ceil(programs / places)
