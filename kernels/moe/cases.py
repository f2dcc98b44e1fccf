"""Workloads of a mixture's layer, their inputs, and how far an output may lie from the reference.

Weights are normal with standard deviation K^-1/2, so that what an expert gives is of one size at every width. Logits
are float32 and no two of a token are equal, so every implementation picks the same experts.
"""

from __future__ import annotations

import math

import torch

from kernels.common import Tensors, Tolerance, Workload, poisoned
from kernels.nvfp4 import format as nvfp4
from kernels.nvfp4 import mxfp4
from kernels.nvfp4.cases import W4A8_NORMAL_WEIGHT, W4A8_NORMAL_X

ACTIVATIONS = ("x", "logits")
IN_PLACE: tuple[str, ...] = ()
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11}
ROUTINGS = ("uniform", "zipf", "one")
PARTS = ("packed", "scale", "tensor_scale")


def _workload(
    T: int, experts: int, top_k: int, H: int, F: int, routing: str = "uniform", shared: int = 0, dtype: str = "bf16",
    role: str = "check", source: str = "", weights: str = "",
) -> Workload:  # fmt: skip
    axes: dict[str, int | str] = {
        "T": T, "experts": experts, "top_k": top_k, "H": H, "F": F, "shared": shared, "routing": routing,
        "dtype": dtype,
    }  # fmt: skip
    if weights:
        axes["weights"] = weights
    name = f"t{T}_e{experts}_k{top_k}_h{H}_f{F}" + f"_{routing}" * (routing != "uniform") + f"_s{shared}" * bool(shared)
    name += f"_{dtype}" * (role == "check") + f"_{weights}" * bool(weights)
    return Workload(name, axes, role, f"normal, {routing} routing", source)


def _35b(T: int, routing: str = "uniform", weights: str = "") -> Workload:
    return _workload(T, 256, 8, 2048, 512, routing, 512, role="measure", source="q36-35b-a3b.moe", weights=weights)


def _26b(T: int) -> Workload:
    return _workload(T, 128, 8, 2816, 704, role="measure", source="gemma4-26b-a4b.moe")


WORKLOADS = (
    # one token, fewer tokens than experts, rows that are no multiple of a tile, experts without a token
    _workload(1, 8, 2, 64, 32),
    _workload(2, 8, 2, 80, 48, shared=32),
    _workload(8, 16, 4, 64, 48, "zipf", dtype="fp16"),
    _workload(17, 8, 2, 128, 64, "one", shared=64),
    _workload(9, 8, 2, 128, 128, shared=128),  # what rival libraries' tiles take
    _workload(9, 8, 2, 128, 128, shared=128, weights="mxfp4"),
    _workload(63, 5, 3, 64, 80),
    _workload(63, 5, 3, 192, 128, dtype="fp16"),
    _workload(75, 32, 8, 80, 32, "zipf"),
    *map(_35b, (1, 2, 8, 12, 17, 32, 64, 128, 257, 512, 1024, 2048)),
    *(_35b(T, "zipf") for T in (8, 32, 128, 512)),
    *(_35b(T, "one") for T in (32, 128, 512)),
    *map(_26b, (1, 8, 32, 128, 512)),
    *(_35b(T, weights="mxfp4") for T in (1, 8, 32, 128, 512, 2048)),
)


def _quantised(w: torch.Tensor, weights: str) -> nvfp4.Nvfp4:
    """w in NVFP4; with `weights` "mxfp4" in MXFP4, whose values NVFP4 has too."""
    if weights != "mxfp4":
        return nvfp4.quantise(w)
    packed, scale = mxfp4.quantise(w)
    return nvfp4.Nvfp4(packed, *mxfp4.as_nvfp4(scale))


def _stack(count: int, rows: int, columns: int, rng: torch.Generator, name: str, weights: str) -> Tensors:
    """`count` quantised matrices [rows, columns], each with a tensor scale of its own."""
    made = []
    for _ in range(count):
        w = torch.randn(rows, columns, generator=rng, device=rng.device) * columns**-0.5
        made.append(_quantised(w, weights))
    stacked = {f"{name}_{part}": torch.stack([getattr(q, part) for q in made]) for part in ("packed", "scale")}
    return stacked | {f"{name}_tensor_scale": torch.cat([q.tensor_scale for q in made])}


def inputs(workload: Workload, seed: int = 0, device: torch.device | str = "cpu") -> Tensors:
    """As in the package's docstring; top_k int64 [] besides."""
    return weights(workload, seed, device) | own(workload, seed, device)


def held(workload: Workload, device: torch.device | str) -> Tensors:
    """The weights, of one seed: half a gigabyte of 35B-A3B, which all arms of a comparison read.

    The sets of an arm then differ in their tokens and so in their experts, as the calls of a layer do.
    """
    return weights(workload, 0, device)


def own(workload: Workload, seed: int, device: torch.device | str) -> Tensors:
    """x and logits of a seed."""
    return activations(workload, seed + 1, device)


def weights(workload: Workload, seed: int, device: torch.device | str) -> Tensors:
    """The experts', the shared one's with its gate, and top_k."""
    rng = torch.Generator(device=device).manual_seed(seed)
    experts, width, inner, shared = (workload[axis] for axis in ("experts", "H", "F", "shared"))
    sizes = {"gate_up": (experts, 2 * inner, width), "down": (experts, width, inner)}
    if shared:
        sizes |= {"shared_gate_up": (1, 2 * shared, width), "shared_down": (1, width, shared)}
    made: Tensors = {}
    for name, size in sizes.items():
        made |= _stack(*size, rng, name, str(workload.axes.get("weights", "nvfp4")))
    if shared:
        made["shared_gate"] = (torch.randn(width, generator=rng, device=device) * width**-0.5).to(torch.bfloat16)
    made["top_k"] = torch.tensor(workload["top_k"], device=device)
    return made


def activations(workload: Workload, seed: int, device: torch.device | str) -> Tensors:
    """x and logits. The largest of log p_e plus Gumbel noise are draws with odds p_e that take no expert twice.

    A token with two equal logits is drawn again. With 24 bits of noise that is one token in 500, and where they are the
    eighth and the ninth largest, two implementations that are right take different experts.
    """
    rng = torch.Generator(device=device).manual_seed(seed)
    tokens, experts, routing = workload["T"], workload["experts"], workload["routing"]
    if routing not in ROUTINGS:
        raise ValueError(f"routing={routing!r} is not one of {ROUTINGS}; use one of them")
    x = torch.randn(tokens, workload["H"], generator=rng, device=device).to(DTYPES[workload["dtype"]])

    def drawn(count: int) -> torch.Tensor:
        uniform = torch.rand(count, experts, generator=rng, device=device).clamp(1e-12, 1 - 1e-7)
        logits = -torch.log(-torch.log(uniform))
        if routing == "zipf":
            logits -= torch.arange(1, experts + 1, device=device).log()
        elif routing == "one":
            logits[:, 0] += 30.0
        return logits

    logits = drawn(tokens)
    while len(again := (logits.sort().values.diff() == 0).any(-1).nonzero().flatten()):
        logits[again] = drawn(len(again))
    return {"x": x, "logits": logits}


def outputs(workload: Workload, inputs: Tensors) -> Tensors:
    """{"y": [T, H]} in x's dtype, every element NaN."""
    return {"y": poisoned((workload["T"], workload["H"]), DTYPES[workload["dtype"]], inputs["x"].device)}


def tolerance(workload: Workload, precision: str) -> dict[str, Tolerance]:
    """Limits for "y"; raises ValueError naming the known precisions otherwise.

    Between the products h is rounded to the type of x: 0.58 of a unit rms at most, which an average over F keeps. A
    library rounds more on the way ("bf16"): weights once (0.64 of 2^-8 at the worst tensor scale, see
    kernels/nvfp4/cases.py) in both products, gate and up and SiLU between, and what each expert gives before the sum.
    SiLU's slope is up to 1.1 and gate and up both carry the first product's error, so that one counts twice. Where both
    operands of both products are rounded to e4m3 ("nvfp4-w4a8"), each has the two rms errors of kernels/nvfp4/cases.py.

    An element errs in proportion to its token, and tokens differ: a few large weights, a large h. W4A8 at 2,048 tokens
    had an element 9.95 times the rms error (card moe-p3-kernel, run 2026-11-26T192944Z, the message of its control), so
    the largest may be 12 times and not 8, as in families whose rows are alike.

    What the rms itself may lie above its mean goes by how many errors are independent: those of h reach all of a
    token's y together, so a token has no more than F of each expert, and they weigh as h does, a product of two nearly
    normal values, whose fourth moment is nine squares of its second: F / 9, of the two or three experts that weigh
    most about F / 4 together.
    """
    alone = workload["T"] * min(workload["H"], workload["F"] / 4)
    sums = (max(workload["H"], workload["F"]) / 16 + 16) * 2.0**-23
    unit = UNIT[workload["dtype"]]
    e4m3 = 1.05 * math.hypot(W4A8_NORMAL_WEIGHT, W4A8_NORMAL_X)
    counts = {
        "nvfp4-w4a16": ((1, 0.58 * unit),),
        "bf16": ((3, 1.1 * 0.64 * 2.0**-8), (5, 0.58 * unit)),
        **dict.fromkeys(("nvfp4-w4a16-rounded", "mxfp4-w4a16-rounded"), ((3, 1.1 * 0.64 * 2.0**-8), (5, 0.58 * unit))),
        "nvfp4-w4a8": ((3, 1.1 * e4m3),),
    }
    if precision not in counts:
        raise ValueError(f"precision={precision!r} is not one of {sorted(counts)}; use one of them")
    rounded = sum(n * each**2 for n, each in counts[precision]) ** 0.5
    small = workload["experts"] * workload["H"] * workload["F"]  # a few mantissas scatter, as in kernels/nvfp4
    limit = rounded * (1 + 2.25 / alone**0.5) * (1 + 20 / small**0.5 * (precision != "nvfp4-w4a16")) + sums
    why = dict.fromkeys(counts, "weights, h and what lies between rounded")
    why |= {"nvfp4-w4a16": "h rounded once, float32 sums", "nvfp4-w4a8": "both operands of three products in e4m3"}
    return {"y": Tolerance(limit, 12 * limit, why[precision])}
