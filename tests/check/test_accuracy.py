"""The check rejects what it must. A family is built here out of plain objects, so every way of being wrong is ours.

The toy doubles a matrix into `y` and adds one to a running sum `s` in place: one output that arrives poisoned, and one
that arrives as a clone of its input.
"""

import ctypes
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kernels.common import Candidate, Cost, Layout, Needs, Tensors, Tolerance, Workload, device_of, has_triton, poisoned
from lab.base.errors import BadInput
from lab.check import accuracy, families
from lab.check.accuracy import check, compare
from tests.refused import refused

WORKLOADS = (Workload("m63_n5", {"M": 63, "N": 5}), Workload("m1_n1", {"M": 1, "N": 1}, role="measure"))


def inputs(workload: Workload, seed: int, device: str) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(workload["M"], workload["N"], generator=generator)
    return {"x": x, "s": torch.tensor([3.0]), "scale": torch.tensor(2.0)}


def outputs(workload: Workload, given: Tensors) -> Tensors:
    return {"y": poisoned((workload["M"], workload["N"]), torch.float32, "cpu"), "s": given["s"].clone()}


def tolerance(workload: Workload, precision: str) -> dict[str, Tolerance]:
    return {name: Tolerance(1e-6, 1e-5, "one rounding") for name in ("y", "s")}


def reference(given: Tensors) -> Tensors:
    return {"y": 2 * given["x"].double(), "s": given["s"].double() + 1}


def toy(*candidates: Candidate, **cases: Any) -> families.Family:
    parts = {"WORKLOADS": WORKLOADS, "inputs": inputs, "outputs": outputs, "tolerance": tolerance}
    parts |= {"ACTIVATIONS": ("x",), "IN_PLACE": ("s",)}
    return families.Family(
        name="toy",
        title="Toy",
        reference=reference,
        cost=lambda workload, precision: Cost(1, 1),
        cases=cast(Any, SimpleNamespace(**{**parts, **cases})),
        candidates={c.name: c for c in candidates},
        cuda_sources=(),
        unavailable={"peers/absent": "No module named 'absent'"},
    )


def right(args: Tensors, out: Tensors) -> None:
    torch.mul(args["x"], args["scale"], out=out["y"])
    out["s"] += 1


def checked(run: Callable[[Tensors, Tensors], None], **more: Any) -> accuracy.Check:
    candidate = Candidate("c", "f32", run, **more)
    return check(toy(candidate), candidate, WORKLOADS[0])


def test_right_candidate() -> None:
    result = checked(right)
    assert (result.status, result.message) == ("ok", "")
    assert [e.output for e in result.errors] == ["y", "s"]
    assert result.relative_error == 0


# name -> (what is done to right outputs, what the message says)
Spoil = Callable[[Tensors, Tensors], Any]
WRONG: dict[str, tuple[Spoil, str]] = {
    "zeros": (lambda args, out: out["y"].zero_(), "y: relative error 1.00e+00 (limit 1.0e-06)"),
    "sign": (lambda args, out: out["y"].neg_(), "y: relative error 2.00e+00"),
    "twice": (lambda args, out: out["y"].mul_(2), "y: relative error 1.00e+00"),
    "one element": (lambda args, out: out["y"][62, 4].add_(2e-5), "y: "),
    "NaN": (lambda args, out: out["y"][0, 0].fill_(math.nan), "y: relative error nan"),
    "infinity": (lambda args, out: out["y"][0, 0].fill_(math.inf), "y: relative error inf"),
    "in-place output left alone": (lambda args, out: out["s"].sub_(1), "s: relative error 2.50e-01"),
    "changed input": (lambda args, out: args["x"][3, 3].add_(1), 'the candidate changed its input "x"'),
    "changed scalar input": (lambda args, out: args["scale"].add_(1), 'the candidate changed its input "scale"'),
    "input changed to NaN": (lambda args, out: args["x"].fill_(math.nan), 'the candidate changed its input "x"'),
    "in-place on the input": (lambda args, out: args["s"].add_(1), 'the candidate changed its input "s"'),
    # What is done to the output itself, whose values are right or seem so:
    "wrong shape": (lambda args, out: out.update(y=out["y"].T), "y: shape (5, 63), not (63, 5)"),
    "broadcast shape": (lambda args, out: out.update(y=out["y"][:1]), "y: shape (1, 5), not (63, 5)"),
    "wrong type": (lambda args, out: out.update(y=out["y"].double()), "y: dtype torch.float64, not torch.float32"),
    "wrong strides": (lambda args, out: out.update(y=out["y"].T.contiguous().T), "y: strides (1, 63), not (5, 1)"),
    "wrong device": (lambda args, out: out.update(y=out["y"].to("meta")), "y: device meta, not cpu"),
    "lazy subclass": (lambda args, out: out.update(y=lazily(args, out["y"])), "y: a Lazy, not a torch.Tensor"),
    "parameter": (
        lambda args, out: out.update(y=torch.nn.Parameter(out["y"])),
        "y: a Parameter, not a torch.Tensor",
    ),
    "no tensor": (lambda args, out: out.update(y=cast(Any, out["y"].numpy())), "y: a ndarray, not a torch.Tensor"),
    "alias of an input": (
        lambda args, out: out.update(s=args["s"].copy_(out["s"]).sub_(1)),
        's: shares its memory with the input "s"',
    ),
    "alias of the other output": (
        lambda args, out: out.update(s=out["y"].view(-1)[:1].copy_(out["s"])),
        's: shares its memory with the output "y"',
    ),
    "another tensor": (lambda args, out: out.update(y=out["y"].clone()), "y: another tensor stands in the place"),
    "output gone": (lambda args, out: out.pop("s"), 'the output "s" is gone'),
    "method of the tensor replaced": (lambda args, out: deceives(args, out["y"]), "y: relative error nan"),
}


class Lazy(torch.Tensor):
    """Computes its values when somebody converts them, that is after the timing."""

    def to(self, *kind: Any, **more: Any) -> torch.Tensor:
        return self.answer().to(*kind, **more)

    answer: Callable[[], torch.Tensor]


def lazily(args: Tensors, y: torch.Tensor) -> Lazy:
    lazy = y.fill_(math.nan).as_subclass(Lazy)
    lazy.answer = lambda: 2 * args["x"]
    return lazy


def deceives(args: Tensors, y: torch.Tensor) -> None:
    """Leaves NaN, and has the very tensor say something else when it is converted or taken apart."""
    y.fill_(math.nan)
    y.to = lambda *kind, **more: (2 * args["x"]).to(*kind, **more)  # type: ignore[method-assign]
    y.flatten = lambda *of: (2 * args["x"]).flatten(*of)  # type: ignore[method-assign]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_candidate(name: str) -> None:
    spoil, message = WRONG[name]

    def run(args: Tensors, out: Tensors) -> None:
        right(args, out)
        spoil(args, out)

    result = checked(run)
    assert result.status == "incorrect"
    assert result.message.startswith(message), result.message
    assert "\n" not in result.message


@pytest.mark.parametrize("rows", [0, 62])
def test_partial_write_fails(rows: int) -> None:
    def run(args: Tensors, out: Tensors) -> None:
        out["y"][:rows] = 2 * args["x"][:rows]
        out["s"] += 1

    result = checked(run)
    assert result.status == "incorrect"
    assert result.relative_error is not None
    assert math.isnan(result.relative_error)


def test_compare_refuses_other_shapes() -> None:
    """A family's own outputs and reference may disagree; broadcast, they would be compared all the same."""
    with refused("y", "(1, 5)"):
        compare("y", torch.ones(1, 5), torch.ones(63, 5), Tolerance(1.0, 1.0, ""))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"y": Tolerance(1e-6, 1e-5, "")}, 'no limits for the output "s"'),
        ({"y": Tolerance(1.0, 9.0, ""), "s": Tolerance(0, 0, "")}, "relative_error=1.0 of y"),
        ({"y": Tolerance(math.nan, 9.0, ""), "s": Tolerance(0, 0, "")}, "relative_error=nan of y"),
        ({name: Tolerance(1e-6, 1e-5, "") for name in ("y", "s", "z")}, 'no output named "z"'),
    ],
)
def test_a_family_that_leaves_an_output_without_a_limit_is_refused(limits: dict[str, Tolerance], words: str) -> None:
    """It is the family's error, whatever the candidate did."""
    candidate = Candidate("c", "f32", right)
    with refused("kernels/toy/cases.py", words):
        check(toy(candidate, tolerance=lambda *_: limits), candidate, WORKLOADS[0])


def test_a_reference_that_lacks_an_output_is_refused() -> None:
    family = dataclasses.replace(
        toy(candidate := Candidate("c", "f32", right)), reference=lambda given: {"y": given["x"]}
    )
    with refused("kernels/toy/reference.py", '"s"'):
        check(family, candidate, WORKLOADS[0])


@pytest.mark.parametrize(
    ("tokens", "ok"), [([1, 0], True), ([1, 2], True), ([1, 1], False), ([1, 3], False), ([-1, 0], False)]
)
def test_an_index_is_as_right_as_what_the_reference_has_there(tokens: list[int], ok: bool) -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0], [4.0, 1.0, 4.0 - 1e-7]], dtype=torch.float64)
    wanted = {"logits": logits, "token": torch.tensor([1, 0])}
    limits = {name: Tolerance(1e-6, 1e-5, "") for name in wanted}
    family = toy(tolerance=lambda *_: limits, PICKS={"token": "logits"})
    out = {"logits": logits.float(), "token": torch.tensor(tokens)}
    errors, wrong = accuracy.judged(family, WORKLOADS[0], "", {}, {}, out, wanted)
    assert [e.output for e in errors] == ["logits", "token"]
    assert wrong.startswith("" if ok else "token: ")
    assert (wrong == "") == ok


def test_one_wrong_element_among_many_needs_the_second_limit() -> None:
    """The Frobenius norm alone lets it pass: that is what max_error is for."""
    out = torch.ones(10**6)
    out[123] += 1e-3
    error = compare("y", out, torch.ones(10**6), Tolerance(1e-5, 1e-4, ""))
    assert error.relative_error < error.relative_limit
    assert not error.ok
    assert error.nmse == pytest.approx(error.relative_error**2)


def test_small_error_everywhere_needs_the_first_limit() -> None:
    reference = torch.tensor([1.0, -1.0] * 250, dtype=torch.float64)
    error = compare("y", reference * (1 + 3e-4), reference, Tolerance(1e-4, 1e-3, ""))
    assert error.max_error < error.max_limit
    assert not error.ok


@pytest.mark.parametrize("wrong", [math.nan, 100.0], ids=["nan", "one"])
@pytest.mark.parametrize("at", [0, 6, 10], ids=["first part", "middle part", "last part, which is shorter"])
def test_a_large_output_is_compared_in_parts_and_each_of_them_counts(
    at: int, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, tolerance = torch.randn(11, dtype=torch.float64), Tolerance(1e-3, 1e-2, "here")
    whole = compare("y", (wanted + 1e-5).float(), wanted, tolerance)
    monkeypatch.setattr(accuracy, "COMPARED_ELEMENTS", 4)
    parts = compare("y", (wanted + 1e-5).float(), wanted, tolerance)
    assert parts.ok
    assert dataclasses.astuple(parts)[1:] == pytest.approx(dataclasses.astuple(whole)[1:], rel=1e-12)
    out = wanted.float()
    out[at] = wrong
    assert not compare("y", out, wanted, tolerance).ok


def test_work_only_where_nan_stands_is_incorrect() -> None:
    def run(args: Tensors, out: Tensors) -> None:
        unwritten = out["y"].isnan()
        out["y"][unwritten] = 2 * args["x"][unwritten]
        out["s"] += 1

    result = checked(run)
    assert result.status == "incorrect"
    assert result.message.startswith("y: relative error")
    assert result.relative_error is not None
    assert math.isfinite(result.relative_error)


def test_output_lies_as_the_candidate_asks() -> None:
    """Transposed in memory, a slice of zeros ahead of it; the same values for whoever reads it."""
    seen: list[Any] = []

    def run(args: Tensors, out: Tensors) -> None:
        y = out["y"]
        seen.append((y.shape, y.stride(), y.storage_offset(), y.as_strided((63,), (1,), 0).any().item()))
        right(args, out)

    assert checked(run, layouts={"y": Layout((1, 0), ahead=1), "absent": Layout((0,))}).status == "ok"
    assert seen == [((63, 5), (1, 63), 63, False)]


@pytest.mark.parametrize("layout", [None, Layout((1, 0)), Layout((0, 1), ahead=2)])
@pytest.mark.parametrize(("name", "at"), [("y", 0), ("y", 1000), ("s", 0)])
def test_a_store_past_the_end_is_incorrect(name: str, at: int, layout: Layout | None) -> None:
    def run(args: Tensors, out: Tensors) -> None:
        right(args, out)
        ctypes.c_float.from_address(out[name].data_ptr() + out[name].nbytes + 4 * at).value = 1.0

    found = checked(run, layouts={"y": layout} if layout else {})
    assert (found.status, found.message.split(",")[0]) == ("incorrect", f"{name}: written past its end")


def test_an_output_with_a_guard_is_as_the_family_makes_it() -> None:
    made = {"y": poisoned((3, 5), torch.bfloat16, "cpu"), "n": torch.tensor(7), "e": torch.empty(0, 2)}
    made["v"] = torch.arange(12.0).view(3, 4)[1:, :2]
    own, guards = accuracy.guarded(made, 0)
    assert accuracy.misused(own, accuracy.handed(own), made) == accuracy.overrun(guards, accuracy.copied(guards)) == ""
    for name, tensor in made.items():
        assert type(own[name]) is torch.Tensor
        assert accuracy.same_bits(own[name], tensor)
        assert (own[name].stride(), own[name].storage_offset()) == (tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("name", ["x", "scale"])
def test_what_is_done_to_an_input_as_an_object_reaches_nobody(name: str) -> None:
    """A method replaced on a tensor that the harness uses would decide what is written into it, or read from it."""
    mine = toy(candidate := Candidate("c", "f32", right))
    given = inputs(WORKLOADS[0], 0, "cpu")
    args = accuracy.prepared(mine, candidate, given)
    args[name].copy_ = lambda *source: None  # type: ignore[method-assign,assignment]
    assert args[name].data_ptr() == given[name].data_ptr()
    assert not vars(given[name])


def test_exception_is_the_rows_status() -> None:
    def run(args: Tensors, out: Tensors) -> None:
        raise RuntimeError("first line\nsecond line")

    result = checked(run)
    assert (result.status, result.message) == ("error", "RuntimeError: first line")
    assert result.relative_error is None
    assert checked(right, prepare=lambda given: given["absent"]).message == "KeyError: 'absent'"


def test_prepare_may_repack_but_not_change() -> None:
    def repack(given: Tensors) -> Tensors:
        return {"scale": given["scale"] + 0}

    assert checked(right, prepare=repack).status == "ok"

    def change(given: Tensors) -> Tensors:
        given["scale"] *= 2
        return given

    assert checked(right, prepare=change).message == 'the candidate changed its input "scale"'


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"refuses": lambda workload: "M must be even"}, "M must be even"),
        ({"needs": Needs(packages=("no_such_package",))}, "needs the package no_such_package, which is not installed"),
        ({"needs": Needs(capability=(9, 0))}, "needs a GPU (sm_90 or newer), none is here"),
    ],
)
def test_unmet_need_is_a_skip_with_its_reason(more: dict[str, Any], reason: str) -> None:
    result = checked(right, **more)
    assert (result.status, result.message, result.errors) == ("skipped", reason, ())


@pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
def test_triton_candidate_for_a_newer_gpu_is_checked_in_the_interpreter() -> None:
    assert checked(right, needs=Needs(capability=(10, 0), triton="3.6")).status == "ok"


def test_seed_makes_fresh_inputs() -> None:
    seen = []

    def run(args: Tensors, out: Tensors) -> None:
        seen.append(args["x"].clone())
        right(args, out)

    candidate = Candidate("c", "f32", run)
    for seed in (0, 1, 0):
        assert check(toy(candidate), candidate, WORKLOADS[0], seed).status == "ok"
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])


def test_reference_sees_what_the_precision_sees() -> None:
    def rounded(workload: Workload, given: Tensors, precision: str) -> Tensors:
        return {**given, "x": given["x"].to(torch.bfloat16).float()} if precision == "bf16" else given

    def run(args: Tensors, out: Tensors) -> None:
        right({**args, "x": args["x"].to(torch.bfloat16).float()}, out)

    for precision, status in (("bf16", "ok"), ("f32", "incorrect")):
        candidate = Candidate("c", precision, run)
        assert check(toy(candidate, reference_inputs=rounded), candidate, WORKLOADS[0]).status == status


def test_reference_runs_once_for_arms_that_are_given_the_same_bits() -> None:
    asked: list[float] = []

    def counted(given: Tensors) -> Tensors:
        asked.append(given["x"].sum().item())
        return reference(given)

    candidate = Candidate("c", "f32", right)
    family = dataclasses.replace(toy(candidate), reference=counted)
    for seed, times in ((0, 1), (0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (0, 5)):  # two are kept
        assert check(family, candidate, WORKLOADS[0], seed).status == "ok"
        assert len(asked) == times, seed
    given = inputs(WORKLOADS[0], 0, "cpu")
    given["x"][-1, -1] = torch.nextafter(given["x"][-1, -1], torch.tensor(9.0))
    accuracy.expected(family, WORKLOADS[0], given, "f32")
    assert len(asked) == 6
    wrong = dataclasses.replace(family, reference=lambda given: {**reference(given), "y": given["x"].double()})
    assert check(wrong, candidate, WORKLOADS[0], 0).status == "incorrect"  # another reference, the same inputs


def test_an_answer_is_known_by_every_byte_of_its_inputs_and_where_it_stands() -> None:
    x = torch.randint(256, (1 << 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    seen = {accuracy._digest(x)}
    assert seen == {accuracy._digest(x.clone())} == {accuracy._digest(torch.cat([x[:3], x])[3:])}
    for at in (0, 7, x.numel() - 1):
        changed = x.clone()
        changed[at] ^= 1
        seen.add(accuracy._digest(changed))
    for step in (1, 8):  # bytes and words change places
        seen.add(accuracy._digest(torch.cat([x[step : 2 * step], x[:step], x[2 * step :]])))
    assert len(seen) == 6
    assert accuracy._digest(torch.zeros(0)) != accuracy._digest(torch.ones(()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_compare_takes_any_type(dtype: torch.dtype) -> None:
    out = torch.tensor([1, 2, 4], dtype=dtype)
    assert compare("y", out, torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), Tolerance(0, 0, "")).ok
    assert not compare("y", out, torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64), Tolerance(1e-2, 1e-2, "")).ok


def test_compare_where_the_reference_is_zero_or_nothing() -> None:
    zero = torch.zeros(4)
    assert compare("y", zero, zero, Tolerance(0, 0, "")).ok
    assert not compare("y", zero + 0.1, zero, Tolerance(1e-2, 1e-2, "")).ok
    assert compare("y", torch.zeros(0, 3), torch.zeros(0, 3), Tolerance(0, 0, "")).ok
    assert not compare("y", zero, zero * math.nan, Tolerance(1, 1, "")).ok
    with pytest.raises(BadInput, match=r"^y: .*\(4,\).*\(2, 2\)"):
        compare("y", zero, zero.reshape(2, 2), Tolerance(1, 1, ""))


def test_family_is_walked_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Candidate("a", "f32", right), Candidate("b", "f32", lambda args, out: None)
    third = Candidate("c", "f32", right, refuses=lambda workload: "never")
    monkeypatch.setattr(families, "load", lambda name: toy(first, second, third))
    found = [(c.candidate, c.workload, c.status) for c in accuracy.check_family("toy")]
    assert found == [("peers/absent", "", "skipped"), ("a", "m63_n5", "ok"), ("b", "m63_n5", "incorrect")]
    assert [(c.candidate, c.status) for c in accuracy.check_family("toy", "b")] == [("b", "incorrect")]
    # A workload named outright: a real model's shape too, and a refusal shows.
    found = [(c.candidate, c.workload, c.status) for c in accuracy.check_family("toy", workload="m1_n1")]
    assert found[1:] == [("a", "m1_n1", "ok"), ("b", "m1_n1", "incorrect"), ("c", "m1_n1", "skipped")]
    with refused("toy", '"d"', remedy="valid"):
        list(accuracy.check_family("toy", "d"))


def test_a_mistake_in_a_candidates_file_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    family = dataclasses.replace(toy(Candidate("a", "f32", right)), broken=("peers/absent",))
    monkeypatch.setattr(families, "load", lambda name: family)
    assert [c.status for c in accuracy.check_family("toy")] == ["error", "ok"]


@pytest.mark.parametrize(
    ("cases", "words"),
    [
        ({"ACTIVATIONS": ("X",)}, 'ACTIVATIONS names "X"'),
        ({"IN_PLACE": ("s", "t")}, 'IN_PLACE names "t"'),
        ({"WORKLOADS": WORKLOADS[1:]}, "no workload has the role"),
    ],
)
def test_a_family_that_names_no_input_or_nothing_to_check(
    cases: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "load", lambda name: toy(Candidate("a", "f32", right), **cases))
    with refused("kernels/toy/cases.py", words):
        list(accuracy.check_family("toy"))


def test_processes_of_one_job_share_a_check_of_the_familys_own_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what was ok, and never for a spoilt copy: that one is run, whatever lies in the folder."""
    monkeypatch.setenv(accuracy.KEEP, str(tmp_path))
    family = families.load("nvfp4")
    candidate, workload = family.candidate("torch_bf16"), family.workload("m63_n75_k1040_bf16")
    first = accuracy.check(family, candidate, workload)
    assert first.status == "ok"
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(accuracy, "_check", lambda *_: pytest.fail("checked twice"))
    assert accuracy.check(family, candidate, workload) == first
    monkeypatch.undo()
    monkeypatch.setenv(accuracy.KEEP, str(tmp_path))
    spoilt = dataclasses.replace(candidate, run=lambda args, out: None)
    assert accuracy.check(family, spoilt, workload).status == "incorrect"
    assert accuracy.check(family, candidate, workload, seed=1) != first
    assert len(list(tmp_path.iterdir())) == 2


# What `prepare` sees ------------------------------------------------------------------------------------------------


# name -> (its `prepare`, what its `run` writes y with, what the message says)
PREPARED: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Tensors], Any], str]] = {
    "the answer": (
        lambda inputs: inputs | {"answer": 2 * inputs["x"]},
        lambda args, out: out["y"].copy_(args["answer"]),
        '"answer" on the device "meta"',
    ),
    "a copy": (
        lambda inputs: inputs | {"kept": inputs["x"].clone()},
        lambda args, out: torch.mul(args["kept"], 2, out=out["y"]),
        '"kept" on the device "meta"',
    ),
    "a copy on the host": (
        lambda inputs: inputs | {"kept": inputs["x"].cpu()},
        lambda args, out: torch.mul(args["kept"], 2, out=out["y"]),
        "NotImplementedError",
    ),
    "its numbers": (
        lambda inputs: inputs | {"kept": inputs["x"].tolist()},
        lambda args, out: out["y"].copy_(2 * torch.tensor(args["kept"])),
        "",
    ),
    "its storage": (
        lambda inputs: inputs | {"kept": bytearray(inputs["x"].untyped_storage())},
        lambda args, out: out["y"].copy_(2 * torch.frombuffer(args["kept"], dtype=torch.float32).view(63, 5)),
        "",
    ),
}


@pytest.mark.parametrize("name", PREPARED)
def test_prepare_has_no_values_of_activations(name: str) -> None:
    prepare, write, message = PREPARED[name]

    def run(args: Tensors, out: Tensors) -> None:
        write(args, out)
        out["s"] += 1

    found = checked(run, prepare=prepare)
    assert found.status == "error"
    assert message in found.message
    cheating = Candidate("c", "f32", run, prepare=prepare)
    seeing = toy(cheating, ACTIVATIONS=())
    assert check(seeing, cheating, WORKLOADS[0]).status == "ok"  # it would be right, had it seen them


def test_prepare_sees_the_shape_of_activations_and_no_address() -> None:
    seen: list[Any] = []

    def prepare(given: Tensors) -> Tensors:
        x = given["x"]
        seen.append((tuple(x.shape), x.stride(), x.dtype, x.data_ptr(), x.untyped_storage().data_ptr(), x._base))
        return {"scale": given["scale"], "room": torch.empty(x.shape, device=device_of(given))}

    assert checked(right, prepare=prepare).status == "ok"
    assert seen == [((63, 5), (5, 1), torch.float32, 0, 0, None)]


FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *FP8])
def test_the_limit_of_a_coarse_output_is_its_own_rounding(dtype: torch.dtype) -> None:
    """Stored once it passes; rounded twice on the way, or stored after an error of half its rounding, it does not."""
    wanted = torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tight, half = Tolerance(1e-6, 1e-5, ""), torch.finfo(dtype).eps / 8
    noise = torch.randn(4096, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert compare("y", wanted.to(dtype), wanted, tight).ok
    assert not compare("y", (wanted * (1 + half * noise)).to(dtype), wanted, tight).ok
    summed = (wanted + noise).to(dtype).double() - noise.to(dtype).double()
    assert not compare("y", summed.to(dtype), wanted, tight).ok
    assert not compare("y", torch.zeros(4096, dtype=dtype), wanted, tight).ok


def test_a_reference_too_large_for_the_type_adds_nothing_to_the_limit() -> None:
    wanted = torch.full((8,), 1e6, dtype=torch.float64)
    for dtype in (torch.float16, *FP8):
        error = compare("y", wanted.to(dtype), wanted, Tolerance(1e-3, 1e-2, ""))
        assert not error.ok
        assert error.relative_limit == 1e-3


@pytest.mark.parametrize("dtype", FP8)
def test_subnormals_are_stored_and_what_rounds_to_zero_is_no_output(dtype: torch.dtype) -> None:
    least = torch.finfo(dtype).smallest_normal
    wanted = torch.rand(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * least
    tight = Tolerance(1e-6, 1e-5, "")
    assert compare("y", wanted.to(dtype), wanted, tight).ok
    wanted *= torch.finfo(dtype).eps / 4
    assert not wanted.to(dtype).float().any()
    assert not compare("y", wanted.to(dtype), wanted, tight).ok


def test_a_coarse_state_may_move_by_units_in_many_calls_and_no_element_by_its_own_size() -> None:
    """Arithmetic of 7e-6 rounds a bf16 state the other way in one of a thousand calls, and what moved stays moved."""
    wanted = torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cases = SimpleNamespace(IN_PLACE=("s",), tolerance=lambda *_: {"s": Tolerance(7e-6, 1.7e-4, "")})
    largest, middling = int(wanted.abs().argmax()), int((wanted.abs() - 1).abs().argmin())

    def wrong(calls: int, at: int, value: float, noise: float = 0.0) -> str:
        out = wanted * (1 + noise * torch.randn(4096, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
        out[at] = value
        family: Any = SimpleNamespace(cases=cases)
        return accuracy.judged(family, WORKLOADS[0], "", {}, {}, {"s": out.bfloat16()}, {"s": wanted}, calls)[1]

    away = float(wanted[largest]) * (1 + 2 * torch.finfo(torch.bfloat16).eps)
    assert not wrong(1, largest, float(wanted[largest]))
    assert "largest" in wrong(1, largest, away)
    assert not wrong(30, largest, away)
    for calls in (1, 30):
        assert "largest" in wrong(calls, middling, 0.0)
        assert "relative error" in wrong(calls, largest, float(wanted[largest]), torch.finfo(torch.bfloat16).eps / 4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("count", [1, 3, 4097])
def test_a_fingerprint_tells_one_element(dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "FINGERPRINT_WORDS", 1000)
    tensor = torch.arange(1, count + 1).to(dtype)
    mark = accuracy.fingerprint(tensor, 5)
    assert accuracy.fingerprint(tensor.clone(), 5) == mark
    assert accuracy.fingerprint(tensor, 6) != mark
    for at in {0, count // 2, count - 1}:
        other = tensor.clone()
        other[at] += 1
        assert (accuracy.fingerprint(other, 5) == mark) == torch.equal(other, tensor)  # bf16 does not count to 4097
    if count > 3:
        assert accuracy.fingerprint(tensor.flip(0), 5) != mark


def test_a_result_on_the_host_is_a_copy_of_its_own() -> None:
    there = torch.arange(8.0)
    kept = accuracy.out_of_reach(there, apart=True)
    there.zero_()
    assert kept.tolist() == list(range(8))


@pytest.mark.gpu
def test_a_result_that_stays_on_the_gpu_shares_no_allocation_and_goes_when_it_is_dropped() -> None:
    handed = [torch.zeros(n, device="cuda") for n in (1 << 8, 1 << 19, 1 << 22)]  # a gap is left behind each
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    kept = [accuracy.out_of_reach(one + 1, apart=True) for one in handed]
    places = [
        next(s["address"] for s in torch.cuda.memory_snapshot() if 0 <= t.data_ptr() - s["address"] < s["total_size"])
        for t in (*handed, *kept)
    ]
    assert set(places[:3]).isdisjoint(places[3:])
    assert all(one.is_cuda and bool((one == 1).all()) for one in kept)
    assert not accuracy.out_of_reach(handed[0]).is_cuda
    del kept
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


@pytest.mark.gpu
def test_a_result_goes_to_the_host_where_the_gpu_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "SPARE_SHARE", 1.0)
    assert not accuracy.out_of_reach(torch.ones(8, device="cuda"), apart=True).is_cuda
