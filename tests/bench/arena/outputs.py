"""Wrong outputs: cheaper numbers, other tensors, parts of the answer, and inputs made easy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels.common import Candidate, Tensors
from tests.bench.arena.family import honest, launch, made, multiply


def _computing(product: Callable[[Any, Any], Any], precision: str = "f32") -> Candidate:
    return made(lambda args, out: launch(args, lambda: out["y"].copy_(product(args["x"], args["w"]))), precision)


def _giving(replace: Callable[[Tensors, Any], Any]) -> Candidate:
    """Puts `replace(args, y)` in the place of out["y"], y being the honest answer."""

    def run(args: Tensors, out: Tensors) -> None:
        honest(args, out)
        out["y"] = replace(args, out["y"])

    return made(run)


def computes_in_half() -> Candidate:
    """On the CPU, where a product in float16 takes far longer, the rounding of its operands alone."""
    return _computing(lambda x, w: x.half() @ w.half() if x.is_cuda else x.half().float() @ w.half().float())


def computes_in_bf16() -> Candidate:
    return _computing(lambda x, w: x.bfloat16() @ w.bfloat16())


def accumulates_in_bf16() -> Candidate:
    """Partial sums are rounded to bf16, which a bf16 kernel must not do."""
    import torch

    def product(x: Any, w: Any) -> Any:
        total = torch.zeros(x.shape[0], w.shape[1], dtype=torch.bfloat16, device=x.device)
        for xs, ws in zip(x.split(x.shape[1] // 16, 1), w.split(x.shape[1] // 16, 0), strict=True):
            total += (xs.bfloat16().float() @ ws.bfloat16().float()).bfloat16()
        return total

    return _computing(product, "bf16")


def int8_for_bf16() -> Candidate:
    """Both operands rounded to int8 with a scale for each row, where bf16 is declared."""

    def rounded(t: Any) -> Any:
        scale = t.abs().amax(1, keepdim=True) / 127
        return (t / scale).round() * scale

    return _computing(lambda x, w: rounded(x) @ rounded(w.T).T, "bf16")


def e4m3_for_bf16() -> Candidate:
    import torch

    e4m3 = torch.float8_e4m3fn
    return _computing(lambda x, w: x.to(e4m3).float() @ w.to(e4m3).float(), "bf16")


def e4m3_weights_for_bf16() -> Candidate:
    """One operand alone, and packed at load."""
    import torch

    def prepare(inputs: Tensors) -> Tensors:
        return {**inputs, "w8": inputs["w"].to(torch.float8_e4m3fn)}

    def run(args: Tensors, out: Tensors) -> None:
        launch(args, lambda: out["y"].copy_(args["x"] @ args["w8"].float()))

    return made(run, "bf16", prepare)


def half_of_the_sum() -> Candidate:
    """Leaves out the last eighth of K and scales what it has."""

    def product(x: Any, w: Any) -> Any:
        k = x.shape[1] * 7 // 8
        return x[:, :k] @ w[:k] * (8 / 7) ** 0.5

    return _computing(product)


def two_precisions() -> Candidate:
    """Its precision is a word that is "f32" in a row and looks up the limits of "bf16"."""

    class Word(str):
        def __hash__(self) -> int:
            return hash("bf16")

        def __eq__(self, other: object) -> bool:
            return other == "bf16"

    candidate = _computing(lambda x, w: x.bfloat16().float() @ w.bfloat16().float())
    object.__setattr__(candidate, "precision", Word("f32"))
    return candidate


def wrong_dtype() -> Candidate:
    return _giving(lambda args, y: y.double())


def half_output() -> Candidate:
    return _giving(lambda args, y: y.half())


def wrong_shape() -> Candidate:
    return _giving(lambda args, y: y[:-1])


def flat_output() -> Candidate:
    return _giving(lambda args, y: y.reshape(-1))


def wrong_strides() -> Candidate:
    return _giving(lambda args, y: y.T.contiguous().T)


def expanded_row() -> Candidate:
    """One row, expanded with a stride of zero."""
    return _giving(lambda args, y: y[:1].expand(y.shape))


def replaces_output() -> Candidate:
    """A right answer in a tensor that nobody gave it."""

    def run(args: Tensors, out: Tensors) -> None:
        out["y"] = args["x"] @ args["w"]

    return made(run)


def output_is_the_input() -> Candidate:
    return made(lambda args, out: out.update(y=args["x"]))


def output_in_the_input() -> Candidate:
    """The right answer, written over the activation."""

    def run(args: Tensors, out: Tensors) -> None:
        launch(args, lambda: args["x"].copy_(args["x"] @ args["w"]))
        out["y"] = args["x"]

    return made(run)


def no_output() -> Candidate:
    return made(lambda args, out: out.clear())


def _part(rows: Callable[[int], Any]) -> Candidate:
    """Everything in the first two calls on a set, `rows` after that: what is left out stands there from before."""
    import torch

    calls: dict[int, int] = {}

    def work(args: Tensors, out: Tensors) -> None:
        key = out["y"].data_ptr()
        calls[key] = calls.get(key, 0) + 1
        if calls[key] <= 2:
            return multiply(args, out)
        some = rows(len(args["x"]))
        out["y"][some] = torch.mm(args["x"][some], args["w"])

    return made(lambda args, out: launch(args, lambda: work(args, out)))


def all_but_the_last_row() -> Candidate:
    return _part(lambda m: slice(0, m - 1))


def sampled_rows() -> Candidate:
    """The rows that a spot check would look at: the first, the middle, the last."""
    return _part(lambda m: [0, m // 2, m - 1])


def never_all() -> Candidate:
    """Leaves the last row alone from the start."""

    def run(args: Tensors, out: Tensors) -> None:
        import torch

        launch(args, lambda: torch.mm(args["x"][:-1], args["w"], out=out["y"][:-1]))

    return made(run)


def _constant(value: float) -> Candidate:
    return made(lambda args, out: launch(args, lambda: out["y"].fill_(value)))


def nan_output() -> Candidate:
    return _constant(float("nan"))


def inf_output() -> Candidate:
    return _constant(float("inf"))


def constant_output() -> Candidate:
    return _constant(1.0)


def untouched_output() -> Candidate:
    """Writes nothing and hopes for what the allocator left there."""

    def run(args: Tensors, out: Tensors) -> None:
        import torch

        out["y"] = torch.empty_like(out["y"])

    return made(run)


def _easy(change: Callable[[Tensors], Any]) -> Candidate:
    """From the second call on a set, changes its inputs first and takes the cheap way that is then right."""
    calls: dict[int, int] = {}

    def work(args: Tensors, out: Tensors) -> None:
        key = out["y"].data_ptr()
        calls[key] = calls.get(key, 0) + 1
        if calls[key] == 1:
            return multiply(args, out)
        change(args)
        out["y"].copy_((args["x"][:1] @ args["w"]).expand(out["y"].shape))

    return made(lambda args, out: launch(args, lambda: work(args, out)))


def zeroes_the_input() -> Candidate:
    return _easy(lambda args: args["x"].zero_())


def makes_rows_the_same() -> Candidate:
    return _easy(lambda args: args["x"][1:].copy_(args["x"][:1].clone().expand_as(args["x"][1:])))


def changes_the_weight() -> Candidate:
    return _easy(lambda args: args["w"].zero_())


def special_case_of_zeros() -> Candidate:
    """Fills zeros where the activation is zero, and is honest otherwise."""

    def work(args: Tensors, out: Tensors) -> None:
        multiply(args, out) if bool(args["x"][::8].any()) else out["y"].zero_()

    return made(lambda args, out: launch(args, lambda: work(args, out)))
