"""Which kernel a mixture's layer gets, by its tokens: from the device's table of measured times (kernels/routing.py).

The routed axis is T, the tokens of the call; the shape is (experts, top_k, H, F, shared). Rows of uniform routing
answer it: how skewed a call's own routing is, nobody knows before it runs. Kernels that round activations or weights
compete only where their precision is asked for. KILLGATE_ROUTE_MOE=<candidate> overrides.
"""

from __future__ import annotations

from collections.abc import Mapping

from kernels import routing
from kernels.common import Candidate, Cost, Workload
from kernels.moe.cost import cost

FAMILY = "moe"


def _cost(workload: Workload, candidate: Candidate) -> Cost:
    return cost(workload, candidate.precision)


def _asked(words: Mapping[str, str]) -> tuple[Workload, str]:
    words = dict(words)
    shared = words.pop("shared", "0")
    if not shared.isdecimal():
        raise ValueError(f"shared={shared}: not a whole number; give the shared expert's width, 0 without one")
    axes = routing.axes(words, T=None, experts=None, top_k=None, H=None, F=None, dtype=("bf16", "fp16"))
    if int(axes["top_k"]) > int(axes["experts"]):
        raise ValueError(f"top_k={axes['top_k']}: more than experts={axes['experts']}")
    if int(axes["H"]) % 16 or int(axes["F"]) % 16:
        raise ValueError(f"H={axes['H']}, F={axes['F']}: not multiples of 16, the values that share a scale")
    return Workload("asked", {"routing": "uniform", **axes, "shared": int(shared)}), ""


ROUTER = routing.Router(
    family=FAMILY,
    axis="T",
    shape=("experts", "top_k", "H", "F", "shared"),
    fixed={"routing": "uniform", "dtype": "bf16"},
    cost=_cost,
    asked=_asked,
    usage="T=TOKENS experts=EXPERTS top_k=EXPERTS_A_TOKEN H=WIDTH F=EXPERT_WIDTH [shared=WIDTH] [dtype=bf16]",
    opt_in={
        "nvfp4-w4a8": "rounds the activations to e4m3",
        "bf16": "rounds the weights to bf16, 3.6 times the bytes",
    },
)
