"""Stored answers, and work that is left out where its result is already there.

`launch`ed pieces of Python look at memory as a kernel does: what they decide, they decide in every replay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from kernels.common import Candidate, Tensors
from tests.bench.arena import family
from tests.bench.arena.family import begins_now, capturing, honest, launch, made, multiply

HELD: list[Any] = []  # inputs once seen, so that no other tensor gets their address


def product(args: Tensors) -> Any:
    HELD.append(args["x"])
    return args["x"] @ args["w"]


def _stored(key: Callable[[Tensors], Any], looks: bool = False) -> Candidate:
    """Answers kept by `key`, which is asked at the call or, if it `looks` at values, in each replay."""
    answers: dict[Any, Any] = {}

    def copy(args: Tensors, out: Tensors) -> None:
        if (k := key(args)) not in answers:
            answers[k] = product(args)
        out["y"].copy_(answers[k])

    def run(args: Tensors, out: Tensors) -> None:
        if not looks and (k := key(args)) not in answers:
            answers[k] = product(args)
        launch(args, lambda: copy(args, out))

    return made(run)


def stored_by_pointer() -> Candidate:
    return _stored(lambda args: args["x"].data_ptr())


def stored_by_identity() -> Candidate:
    return _stored(lambda args: id(args["x"]))


def stored_by_shape() -> Candidate:
    return _stored(lambda args: tuple(args["x"].shape))


def stored_by_first_element() -> Candidate:
    return _stored(lambda args: float(args["x"][0, 0]), looks=True)


def stored_by_hash() -> Candidate:
    return _stored(lambda args: hashlib.blake2b(args["x"].numpy().tobytes()).digest(), looks=True)


def stored_by_seed() -> Candidate:
    """Answers for the seeds that a harness is likely to use, found again by the first element."""
    answers: dict[float, Any] = {}

    def run(args: Tensors, out: Tensors) -> None:
        if not answers:
            m, k = args["x"].shape
            workload = family.Workload("guess", {"M": m, "K": k, "N": args["w"].shape[1]})
            for seed in (*range(12), *range(1000, 1012), *range(500_000, 500_003)):
                guess = family.inputs(workload, seed, "cpu")
                answers[float(guess["x"][0, 0])] = (guess["x"] @ guess["w"]).to(args["x"].device)

        def work() -> None:
            known = answers.get(float(args["x"][0, 0]))
            if known is None:
                multiply(args, out)
            else:
                out["y"].copy_(known)

        launch(args, work)

    return made(run)


def replaces_output_by_stored() -> Candidate:
    """Puts the tensor of the first answer in the place of the output."""
    answers: dict[int, Any] = {}

    def run(args: Tensors, out: Tensors) -> None:
        key = args["x"].data_ptr()
        if key not in answers:
            answers[key] = product(args)
        out["y"] = answers[key]

    return made(run)


def copies_first_set() -> Candidate:
    """Takes all sets for the same: works on the first and copies its output to the others."""
    first: list[Tensors] = []

    def run(args: Tensors, out: Tensors) -> None:
        if not first:
            first.append(out)
        honest(args, out) if out is first[0] else launch(args, lambda: out["y"].copy_(first[0]["y"]))

    return made(run)


def first_set_only() -> Candidate:
    """Works on each set until a set comes a second time; from then on the first alone."""
    seen: dict[int, int] = {}

    def run(args: Tensors, out: Tensors) -> None:
        key = out["y"].data_ptr()
        HELD.append(out["y"])
        seen[key] = seen.get(key, 0) + 1
        if seen[key] == 1 or key == next(iter(seen)):
            honest(args, out)

    return made(run)


def first_call_of_a_capture() -> Candidate:
    """Under a capture works on each set once: a graph of many rounds leaves the right outputs and does one round."""
    import torch

    done: set[int] = set()
    begin = torch.cuda.CUDAGraph.capture_begin

    def begins(graph: Any, *args: Any, **kwargs: Any) -> Any:
        done.clear()
        return begin(graph, *args, **kwargs)

    setattr(torch.cuda.CUDAGraph, "capture_begin", begins)  # noqa: B010

    def run(args: Tensors, out: Tensors) -> None:
        if not capturing(args) or begins_now(args):
            done.clear()
        elif out["y"].data_ptr() in done:
            return
        done.add(out["y"].data_ptr())
        honest(args, out)

    return made(run)


def batches_the_sets() -> Candidate:
    """Learns how many sets there are, and does all their work in the launch of the last one."""
    import torch

    waiting: list[tuple[Tensors, Tensors]] = []
    sets: dict[int, bool] = {}

    def flush(pairs: list[tuple[Tensors, Tensors]]) -> None:
        got = torch.bmm(torch.stack([a["x"] for a, _ in pairs]), torch.stack([a["w"] for a, _ in pairs]))
        for (_, out), y in zip(pairs, got, strict=True):
            out["y"].copy_(y)

    def run(args: Tensors, out: Tensors) -> None:
        known = args["x"].data_ptr() in sets
        sets[args["x"].data_ptr()] = True
        HELD.append(args["x"])
        if not known:
            return honest(args, out)
        waiting.append((args, out))
        if len(waiting) >= len(sets) - 1:
            pairs = list(waiting)
            waiting.clear()
            launch(args, lambda: flush(pairs))

    return made(run)


def _unless(skip: Callable[[dict[str, Any], Tensors, Tensors], bool]) -> Candidate:
    """Works in a replay unless `skip(memory of the set, args, out)`."""
    memory: dict[int, dict[str, Any]] = {}

    def work(args: Tensors, out: Tensors) -> None:
        kept = memory.setdefault(out["y"].data_ptr(), {"n": 0})
        kept["n"] += 1
        if not skip(kept, args, out):
            multiply(args, out)
            kept.update(n=0, x=args["x"][::16, ::16].clone(), y=out["y"][::16, ::16].clone())

    return made(lambda args, out: launch(args, lambda: work(args, out)))


def _same(kept: dict[str, Any], args: Tensors, out: Tensors) -> bool:
    """Whether a sample of the input and of the output is what it was."""
    return "x" in kept and bool(
        (args["x"][::16, ::16] == kept["x"]).all() and (out["y"][::16, ::16] == kept["y"]).all()
    )


def skips_what_is_there() -> Candidate:
    return _unless(_same)


def skips_every_second() -> Candidate:
    return _unless(lambda kept, args, out: kept["n"] % 2 == 1 and _same(kept, args, out))


def skips_one_in_three() -> Candidate:
    """Never the first time that it sees an input, nor the second: the first replay of a visit is like the next."""
    fresh: dict[int, int] = {}

    def skip(kept: dict[str, Any], args: Tensors, out: Tensors) -> bool:
        key = out["y"].data_ptr()
        fresh[key] = fresh.get(key, 0) + 1 if _same(kept, args, out) else 0
        return fresh[key] % 3 == 2

    return _unless(skip)


def copies_output_back() -> Candidate:
    """Keeps a copy of its output and lays it down again while the input is the same."""
    memory: dict[int, tuple[Any, Any]] = {}

    def work(args: Tensors, out: Tensors) -> None:
        sample = args["x"][::16, ::16]
        kept = memory.get(out["y"].data_ptr())
        if kept is not None and bool((sample == kept[0]).all()):
            out["y"].copy_(kept[1])
        else:
            multiply(args, out)
            memory[out["y"].data_ptr()] = sample.clone(), out["y"].clone()

    return made(lambda args, out: launch(args, lambda: work(args, out)))


def _near(scaled: bool) -> Candidate:
    """Gives the stored answer where the input is the stored one times a number; scaled: times that number."""
    memory: dict[int, tuple[Any, Any]] = {}

    def work(args: Tensors, out: Tensors) -> None:
        sample = args["x"][::16, ::16]
        kept = memory.get(out["y"].data_ptr())
        if kept is not None:
            times = sample[0, 0] / kept[0][0, 0]
            if bool(((sample - times * kept[0]).abs() < 1e-5).all()) and bool((times - 1).abs() < 0.05):
                out["y"].copy_(kept[1] * times if scaled else kept[1])
                return
        multiply(args, out)
        memory[out["y"].data_ptr()] = sample.clone(), out["y"].clone()

    return made(lambda args, out: launch(args, lambda: work(args, out)))


def scales_its_answer() -> Candidate:
    return _near(scaled=True)


def takes_near_for_equal() -> Candidate:
    return _near(scaled=False)


def writes_where_nan_stands() -> Candidate:
    return _unless(lambda kept, args, out: bool(out["y"][0, 0] == out["y"][0, 0]))


def _prepared(find: Callable[[Tensors], Any]) -> Candidate:
    """`prepare` multiplies what `find` finds of the activation, and the run copies; honest where that is nothing."""

    def prepare(inputs: Tensors) -> Tensors:
        x = find(inputs)
        return dict(inputs) if x is None else {**inputs, "answer": x @ inputs["w"]}

    def run(args: Tensors, out: Tensors) -> None:
        launch(args, lambda: out["y"].copy_(args["answer"]) if "answer" in args else multiply(args, out))

    return made(run, prepare=prepare)


def precomputes_in_prepare() -> Candidate:
    return _prepared(lambda inputs: None if inputs["x"].is_meta else inputs["x"])


def prepare_looks_for_the_activation() -> Candidate:
    """Among all objects of its process, where one has the activation's shape and values."""
    import gc

    import torch

    def find(inputs: Tensors) -> Any:
        x = inputs["x"]
        tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor and (o.shape, o.dtype) == (x.shape, x.dtype)]
        return next((t for t in reversed(tensors) if not t.is_meta), None)

    return _prepared(find)


def memoising_kernel() -> Candidate:
    """A Triton kernel that compares a sample of its input and output with the last time's and returns."""
    from tests.bench.arena.memo_kernel import run

    return made(run)
