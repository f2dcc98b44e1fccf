"""Where the kernels of a trace stand under the roofline, as far as the file says what they move and compute.

Nsight Compute counts the bytes that a kernel moved in DRAM. A PyTorch profile with shapes (record_shapes) says what a
matrix product or an attention was given: of a product of M x K by K x N the operations are 2 M N K, of an attention
4 B H Sq Sk D (half of it under a causal mask), and the bytes those of inputs and output, each once. Both stand for the
longest kernel that the operator launched. What has no such statement (fused and indexed operators, lengths in tensors,
32-bit products, which may run on tensor cores or not) is left out, and how much time that is, is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from lab.base import devices
from lab.base.errors import BadInput
from lab.place import roofline
from lab.trace.model import Trace, Work, short_name

# An operator -> which of its arguments are the factors of its product.
PRODUCTS = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::_scaled_mm", "aten::_int_mm"), (0, 1)),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm"), (1, 2)),
}
HEADS_FIRST = ("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
               "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_attention_math")  # fmt: skip
HEADS_LAST = ("aten::_flash_attention_forward", "aten::_efficient_attention_forward")
OPERATORS = (*PRODUCTS, *HEADS_FIRST, *HEADS_LAST)
LARGEST = 1 << 40  # dimension
TYPES = {"c10::BFloat16": ("bf16", 2), "c10::Half": ("bf16", 2), "signed char": ("int8", 1)}
TYPES |= dict.fromkeys(("c10::Float8_e4m3fn", "c10::Float8_e5m2"), ("fp8", 1))


class Placed(Struct, frozen=True):
    """A kernel on one shape. us: of a launch, the mean. of_roof: floor / us, None where the GPU's peaks are unknown."""

    name: str
    short_name: str
    shape: str
    launches: int
    us: float
    tflop_s: float | None
    gb_s: float
    flop_per_byte: float | None
    floor_us: float | None
    of_roof: float | None
    bound: str


def placed(trace: Trace) -> tuple[list[Placed], str]:
    """Every kernel whose work the file states, the most time first, and in one sentence what is left out."""
    if not trace.work:
        return [], ""
    try:
        device = devices.get(next(iter(trace.gpus.values()), ""))
    except BadInput:
        device = None
    found = []
    for w in sorted(trace.work, key=lambda w: -w.ns):
        us, floor = w.ns / w.launches / 1e3, None
        if device and us:
            flops, pipe = (w.flops, w.pipe) if w.pipe in device.peaks else (0.0, next(iter(device.peaks)))
            floor = roofline.place(device, flops or 0.0, w.bytes, pipe) if (flops or w.bytes) else None
        found.append(
            Placed(
                name=w.name,
                short_name=short_name(w.name),
                shape=w.shape,
                launches=w.launches,
                us=us,
                tflop_s=w.flops / us / 1e6 if w.flops and us else None,
                gb_s=w.bytes / us / 1e3 if us else 0.0,
                flop_per_byte=w.flops / w.bytes if w.flops and w.bytes else None,
                floor_us=floor.floor_us if floor else None,
                of_roof=floor.floor_us / us if floor else None,
                bound=floor.bound if floor else "",
            )
        )
    total, known = int(trace.kernels.duration_ns.sum()), sum(w.ns for w in trace.work)
    peaks = f"peaks of {device.id}" if device else "the GPU's peaks are not known here (data/devices.toml)"
    counted = "; operations are not counted" if all(w.flops is None for w in trace.work) else ""
    rest = f"kernels of {(total - known) / 1e3:,.1f} us ({1 - known / total:.1%}) state no work and are left out"
    return found, f"{peaks}{counted}; {rest}" if total else peaks


def operator_work(name: str, dims: Any, types: Any, given: Any) -> tuple[str, float, float, str] | None:
    """(shape, operations, bytes, pipe) of an operator of OPERATORS, None where its arguments do not say it."""
    at = PRODUCTS.get(name, (0, 1))
    try:
        a, b = (_sizes(dims[i]) for i in at)
        (pipe, size), (_, other) = (TYPES[types[i]] for i in at)
        if name in PRODUCTS:
            (*batch, m, k), (*_, k2, n) = a, b
            if k != k2:
                return None
            times = math.prod(batch)
            moved = times * (m * k * size + k * n * other + m * n * max(2, size))
            return " x ".join(map(str, [*batch, m, n, k])), 2.0 * times * m * n * k, float(moved), pipe
        v = _sizes(dims[2])
        heads, length = (1, 2) if name in HEADS_FIRST else (2, 1)
        (batch_, h, sq, d), sk, dv = (a[0], a[heads], a[length], a[3]), b[length], v[3]
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    causal = "True" in [str(word) for word in given or ()]
    flops = 2.0 * batch_ * h * sq * sk * (d + dv) * (0.5 if causal and sq == sk else 1.0)
    moved = size * (math.prod(a) + math.prod(b) + math.prod(v) + batch_ * h * sq * dv)
    return f"{batch_} x {h} x {sq} x {sk} x {d}{' causal' if causal else ''}", flops, float(moved), pipe


def _sizes(dims: Any) -> list[int]:
    """Dimensions; raises ValueError for what can be none."""
    if not all(isinstance(n, int) and 0 < n < LARGEST for n in dims):
        raise ValueError(dims)
    return list(dims)


def of_operators(
    kernels: Iterable[tuple[Any, str, int]], operators: Mapping[Any, tuple[str, Any, Any, Any]]
) -> tuple[Work, ...]:
    """The work of each kernel and shape. kernels: (operator's id, name, ns). operators: id -> its arguments."""
    longest: dict[Any, tuple[str, int]] = {}
    for key, name, ns in kernels:
        if key in operators and ns > longest.get(key, ("", -1))[1]:
            longest[key] = (name, ns)
    found: dict[tuple[str, str], Work] = {}
    for key, (name, ns) in longest.items():
        if (stated := operator_work(*operators[key])) is not None:
            shape, flops, moved, pipe = stated
            before = found.get((name, shape))
            count, time = (before.launches, before.ns) if before else (0, 0)
            found[name, shape] = Work(name, shape, count + 1, time + ns, flops, moved, pipe)
    return tuple(found.values())
