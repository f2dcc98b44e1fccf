"""Every candidate prepares from weights and caches alone; the CUDA ones too, since to prepare needs no GPU."""

import functools
from dataclasses import replace

import pytest
import torch

from kernels.common import Tensors
from lab.check import accuracy, families

CANDIDATES = [
    pytest.param(name, candidate, id=f"{name}-{candidate}")
    for name in families.names()
    for candidate, made in families.load(name).candidates.items()
    if not families.unmet(replace(made, needs=replace(made.needs, capability=(0, 0))), None)
    or made.needs.packages == ("cupy",)
]


@pytest.mark.parametrize("name", families.names())
def test_activations_are_inputs(name: str) -> None:
    """Each declared name is an input of some workload, and no workload is without one."""
    cases = families.load(name).cases
    small = [set(inputs_of(name, w.id)) for w in cases.WORKLOADS if w.role == "check"]
    assert set(cases.ACTIVATIONS) <= set().union(*small)
    assert all(given.intersection(cases.ACTIVATIONS) for given in small)


@functools.cache  # their values are not looked at, so a family's candidates share them
def inputs_of(name: str, workload: str) -> Tensors:
    family = families.load(name)
    return family.cases.inputs(family.workload(workload), 0, "cpu")


@pytest.mark.parametrize(("name", "candidate"), CANDIDATES)
def test_prepares_without_activations(name: str, candidate: str) -> None:
    """Nothing is read of them, nothing is allocated where they seem to be, and workspace lies where the weights do."""
    family = families.load(name)
    made = family.candidate(candidate)
    small = [w for w in family.cases.WORKLOADS if w.role == "check" and not made.refuses(w)]
    for workload in small[:3]:
        inputs = inputs_of(name, workload.id)
        args = accuracy.prepared(family, made, inputs)
        assert all(args[key].data_ptr() == inputs[key].data_ptr() for key in family.cases.ACTIVATIONS if key in inputs)
        assert {v.device.type for v in args.values() if isinstance(v, torch.Tensor)} == {"cpu"}
