"""The limits against every committed row: what passed on a GPU still passes.

A row keeps errors and not outputs, so the rounding of a 16-bit output, which the checker takes from the reference, is
bounded here: 0.45 * 2^-p, where the mean over mantissas is 0.43 and the rest is for outputs of one size. That it is
rounding and nothing else shows in the second test: kernels that share only their exact operands agree in their errors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest

from kernels.common import Tolerance, Workload
from kernels.moe.cuda_experts import TOKENS_MAX
from lab.check import accuracy, families
from lab.row import store
from lab.row.records import Measurement

ROUNDING = {"bf16": 0.45 * 2.0**-8, "fp16": 0.45 * 2.0**-11, "f32": 2.0**-25}
EXACT = {"nvfp4-w4a16", "mxfp4-w4a16", "q8_0-w8a16", "f32"}  # precisions that round nothing but the output
SEVERAL_PRODUCTS = {"moe", "chained"}
# What an expert gives lies between the kernels for many tokens as fp16, a normal value's rms error an eighth of bf16's.
ALSO_ROUNDED = 1.66e-3 / 8
OK = [row for row in store.rows("h200") if row.ok and row.relative_error is not None]


def dtype_of(workload: Workload, output: str) -> str:
    """Of an output as it is stored; float32, which allows the least, where a family has no axis for it."""
    axes, states = workload.axes, {"state", "final_state"}
    return str(axes.get("state_dtype", "f32") if output in states else axes.get("out_dtype", axes.get("dtype", "f32")))


def for_many(row: Measurement) -> bool:
    """Whether a mixture's kernel for many tokens made y, by itself or as what experts_one launches."""
    if row.name == "experts_one":
        return int(row.workload["T"]) > TOKENS_MAX
    return row.name.startswith(("cuda_experts_many", "experts_many_"))


def few(workload: Workload) -> float:
    """By how much the rms of a product's M N roundings may lie over the mean: three of its standard deviations."""
    elements = float(workload.axes.get("M", 0) or 0) * float(workload.axes.get("N", 0) or 0)
    return 1 + 3 / (2 * elements) ** 0.5 if elements else 1.0


def errors(row: Measurement, limits: dict[str, Tolerance]) -> Iterator[tuple[str, float]]:
    """(output, error) of the check and of the one after the timing, which kept the largest alone."""
    yield from ((name, error) for name, error in row.errors.items() if error is not None)
    if not row.errors and len(limits) == 1:
        yield from ((name, float(row.relative_error or 0.0)) for name in limits)
    if row.relative_error_after is not None and len(limits) == 1:
        yield from ((name, row.relative_error_after) for name in limits)


@pytest.mark.parametrize("family", sorted({row.family for row in OK}))
def test_rows_are_within_the_limits(family: str) -> None:
    loaded, nearest, seen = families.load(family), (0.0, ""), 0
    for row in OK:
        if row.family != family:
            continue
        workload = loaded.workload(row.workload_id)
        limits = loaded.cases.tolerance(workload, row.precision)
        for name, error in errors(row, limits):
            computed = limits[name].relative_error
            rounding = ROUNDING[dtype_of(workload, name)] * few(workload)
            limit = accuracy.STORED * (computed**2 + rounding**2) ** 0.5 if computed else 0.0
            assert error <= limit, f"{row.run} {row.name} {row.workload_id} {name}: {error:.3e} > {limit:.3e}"
            nearest = max(nearest, (error / limit if limit else 0.0, f"{row.name} {row.workload_id} {name}"))
            seen += 1
    assert seen > 10
    print(f"{family}: {seen} errors, the nearest at {nearest[0]:.3f} of its limit, {nearest[1]}")


def test_exact_kernels_agree_in_their_errors() -> None:
    """By 1e-4 of the error where the outputs are bf16, drawn from the same seed: what is left is y's own rounding.

    By 1e-3 where a product's output is rounded and goes into another: sums in another order turn some of those over.
    """
    found: dict[tuple[str, ...], set[tuple[str, float]]] = defaultdict(set)
    for row in OK:
        if row.precision in EXACT and row.workload.get("dtype") == "bf16":
            for name, error in row.errors.items():
                if error is not None and name in ("o", "y"):
                    error = (error**2 - (ALSO_ROUNDED if for_many(row) else 0.0) ** 2) ** 0.5
                    found[row.family, row.workload_id, row.run].add((row.name, error))
    several = {key: [e for _, e in pairs] for key, pairs in found.items() if len({n for n, _ in pairs}) > 1}
    assert len(several) > 50
    apart = {key: 1e-3 if key[0] in SEVERAL_PRODUCTS else 1e-4 for key in several}
    assert [key for key, e in several.items() if max(e) > min(e) * (1 + apart[key])] == []
