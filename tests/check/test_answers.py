"""Which answers of a reference are given out again, and which error of several is the one that a row states.

Each test is one that a mistake once got past; the mistakes themselves are in tests/mistakes.toml.
"""

import dataclasses
import math

import pytest
import torch

from kernels.common import Candidate, Tensors, Tolerance
from lab.check import accuracy
from lab.check.accuracy import Check, Error, compare
from tests.check.test_accuracy import WORKLOADS, inputs, right, toy


def check_of(*errors: float) -> Check:
    found = tuple(Error(f"o{i}", e, 1.0, e, 1.0) for i, e in enumerate(errors))
    return Check("toy", "c", "w", "f32", "incorrect", "", found)


@pytest.mark.parametrize("errors", [(0.1, math.nan), (math.nan, 0.1), (0.1, math.nan, 0.2)])
def test_nan_is_the_largest_error_wherever_it_stands(errors: tuple[float, ...]) -> None:
    """max() keeps the first of what it cannot compare."""
    found = check_of(*errors).relative_error
    assert found is not None
    assert math.isnan(found)
    assert check_of(0.1, 0.3, 0.2).relative_error == 0.3
    assert check_of().relative_error is None


def test_an_answer_is_known_by_the_shape_of_its_inputs_too() -> None:
    """The same bytes as a row and as a column are two questions."""

    def reference(given: Tensors) -> Tensors:
        return {"y": given["x"].double().sum(0)}

    family = dataclasses.replace(toy(Candidate("c", "f32", right)), reference=reference)
    x = torch.arange(6.0)
    shapes = [(2, 3), (3, 2), (6, 1)]
    found = [accuracy.expected(family, WORKLOADS[0], {"x": x.reshape(s)}, "f32")["y"].tolist() for s in shapes]
    assert found == [x.reshape(s).sum(0).tolist() for s in shapes]


def test_an_answer_is_known_by_the_type_and_the_name_of_its_inputs_too() -> None:
    def reference(given: Tensors) -> Tensors:
        return {"y": sum(t.double() * (1 + len(name)) for name, t in given.items())}  # type: ignore[dict-item]

    family = dataclasses.replace(toy(Candidate("c", "f32", right)), reference=reference)
    words = torch.tensor([1 << 30, 1 << 29], dtype=torch.int32)
    asked = [{"x": words}, {"x": words.view(torch.float32)}, {"xx": words}]
    answers = [accuracy.expected(family, WORKLOADS[0], given, "f32")["y"] for given in asked]
    assert all(torch.equal(a, reference(given)["y"]) for a, given in zip(answers, asked, strict=True))


def test_the_largest_error_is_measured_in_the_references_own_size() -> None:
    """An error of 1 in outputs of about 100 is one of 1 %; in outputs of about 0.01 it is hundredfold."""
    for size, fits in ((100.0, True), (0.01, False)):
        wanted = torch.full((64,), size, dtype=torch.float64)
        out = wanted.clone()
        out[3] += 1.0
        error = compare("y", out, wanted, Tolerance(1e9, 0.02, ""))
        assert error.max_error == pytest.approx(1.0 / size)
        assert error.ok == fits


def test_outputs_hold_nan_and_junk_until_they_are_written() -> None:
    """What a candidate is given holds no number that could pass for an answer, and another seed another pattern."""
    seen: list[torch.Tensor] = []

    def run(args: Tensors, out: Tensors) -> None:
        seen.append(out["y"].clone())
        assert out["s"] == args["s"]  # updated in place
        right(args, out)

    candidate = Candidate("c", "f32", run)
    for seed in (0, 1):
        assert accuracy.check(toy(candidate), candidate, WORKLOADS[0], seed).status == "ok"
    first, second = (y.isnan() for y in seen)
    assert 0.35 < first.float().mean() < 0.65
    assert not torch.equal(first, second)
    assert len(seen[0][~first].unique()) == int((~first).sum())
    assert inputs(WORKLOADS[0], 0, "cpu")["x"].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bfloat16, torch.float8_e4m3fn])
def test_outputs_of_every_type_are_filled(dtype: torch.dtype) -> None:
    out = {"y": torch.zeros(500, dtype=dtype)}
    for how, nan in (("mixed", dtype.is_floating_point), ("finite", False)):
        accuracy.fill(toy(), {}, out, 3, how)
        assert len(out["y"].double().unique()) > 20
        assert bool(out["y"].double().isnan().any()) == nan


def test_on_a_gpu_an_answer_is_known_by_every_byte_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the tensor is summed where it lies; here the sums stand in for the digest of the host."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    x = torch.arange(999, dtype=torch.int16)
    digests = {accuracy._digest(x.as_subclass(OnGpu))}
    for place in range(0, 999, 37):
        y = x.clone()
        y[place] ^= 1 << place % 15
        digests.add(accuracy._digest(y.as_subclass(OnGpu)))
    assert len(digests) == 1 + len(range(0, 999, 37))
    monkeypatch.setattr(accuracy, "_SECRETS", (1, 2))
    assert accuracy._digest(x.as_subclass(OnGpu)) not in digests  # the sums are weighed by what nobody knows
