"""Flops and compulsory bytes of a sequence of products: the sum of each one's, as kernels/nvfp4/cost.py counts them."""

from __future__ import annotations

import itertools

from kernels.common import Cost, Workload
from kernels.nvfp4 import cost as of_product


def products(workload: Workload) -> tuple[Workload, ...]:
    """The sequence as workloads of the product's family."""
    dims = [workload[axis] for axis in sorted(axis for axis in workload.axes if axis.startswith("D"))]
    axes = {"M": workload["M"], "dtype": workload["dtype"]}
    return tuple(Workload("", {**axes, "N": n, "K": k}) for k, n in itertools.pairwise(dims))


def cost(workload: Workload, precision: str) -> Cost:
    """Cost of `workload` at `precision`; raises ValueError naming the known precisions otherwise."""
    each = [of_product.cost(product, precision) for product in products(workload)]
    return Cost(sum(c.flops for c in each), sum(c.bytes for c in each), each[0].pipe)
