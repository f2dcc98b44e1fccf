"""Which prefill kernel a scan gets, by its length: from the device's table of measured times (kernels/routing.py).

The routed axis is T, the tokens of a sequence; the shape is (batch, Hk, Hv, D). Without a table the roofline of each
algorithm decides: what its chunks cost and what it passes through memory. It knows nothing of launches and waits, so
candidates with equal floors are taken in order, and the reason says so. KILLGATE_ROUTE_GDN=<candidate> overrides.
"""

from __future__ import annotations

from collections.abc import Mapping

from kernels import routing
from kernels.common import Candidate, Cost, Workload
from kernels.gdn.cost import CHUNK, algorithm_cost

FAMILY = "gdn"


# Candidates that do not keep everything on chip, or whose chunks are not CHUNK tokens: (chunk, through memory).
ALGORITHMS = {
    "torch_chunk": (64, True),
    "split_pipeline": (64, True),
    "split_pipeline_fp16": (64, True),
    "split_pipeline_tf32": (64, True),
    "fused_chunk_c16": (16, False),
    "fused_chunk_c32": (32, False),
}
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "f32": 4}


def _cost(workload: Workload, candidate: Candidate) -> Cost:
    if workload["op"] != "prefill":
        raise ValueError(f"op = {workload['op']}: only prefill has kernels to choose between by length")
    chunk, through_memory = ALGORITHMS.get(candidate.name, (CHUNK, False))
    pipe = "bf16" if candidate.precision == "fp16" else candidate.precision
    return algorithm_cost(workload, chunk, ELEMENT_BYTES[candidate.precision], through_memory, pipe)


def _asked(words: Mapping[str, str]) -> tuple[Workload, str]:
    """Of unequal sequences T is their mean; what takes only some lengths is told them by lengths=N-N-..."""
    words = dict(words)
    lengths = words.pop("lengths", "")
    axes = routing.axes(words, T=None, batch=1, Hk=None, Hv=None, D=128, dtype=("bf16", "fp16", "f32"))
    if int(axes["Hv"]) % int(axes["Hk"]):
        raise ValueError(f"Hv={axes['Hv']}: not a multiple of Hk={axes['Hk']}")
    if lengths and (not all(map(str.isdecimal, found := lengths.split("-"))) or len(found) != axes["batch"]):
        raise ValueError(f"{lengths=}: not a whole number for each of batch={axes['batch']} sequences")
    fixed: dict[str, int | str] = {
        "op": "prefill", "lengths": lengths, "state_dtype": "f32", "qk_l2norm": 0, "regime": "mixed", "pad": 0,
    }  # fmt: skip
    return Workload("asked", {**fixed, **axes}), ""


ROUTER = routing.Router(
    family=FAMILY,
    axis="T",
    shape=("batch", "Hk", "Hv", "D"),
    fixed={"op": "prefill", "dtype": "bf16"},
    cost=_cost,
    asked=_asked,
    usage="T=TOKENS [batch=SEQUENCES] Hk=HEADS Hv=HEADS [D=128] [dtype=bf16]",
)
