"""One sequence, twice: the kernel on its state alone, and the same through the API for batches of sequences.

    cuda_decode_alone        the kernel is handed the one state; there are no ids. What a program for one sequence does
    cuda_decode_alone_again  the same under another name, so that it can stand where the served form does in a card
    cuda_decode_served       batches.decompose and batches.run_launch, as for any number of sequences

A server for several sequences must cost nothing when there is one. Both launch the same kernel on the same addresses
(a test compares them), so a difference in their rows is the API's, or that of where an arm's copies of the inputs lie,
which the second name shows. `cuda_decode` beside them reads the id first.
"""

from __future__ import annotations

from typing import Any

from kernels.common import Candidate, Needs, Tensors, Workload
from kernels.gdn import batches, cuda_decode
from kernels.gdn.launch import checked

NAMES = ("q", "k", "v", "g", "beta", "state", "state_rows")


def _prepare_alone(inputs: Tensors) -> dict[str, Any]:
    """The slot is known as the launch is built: it is read from the ids once, here."""
    checked(inputs, NAMES)
    return inputs | {"slot": int(inputs["state_rows"][0]), "in_order": inputs["state_rows"]}


def _run_alone(args: dict[str, Any], out: Tensors) -> None:
    cuda_decode.launch(args, out["state"][args["slot"] : args["slot"] + 1], out["o"])


def _prepare_served(inputs: Tensors) -> dict[str, Any]:
    checked(inputs, NAMES)
    (launch,) = batches.decompose([0], {0: int(inputs["state_rows"][0])})
    return inputs | {"launch": launch, "ids": batches.slot_ids(launch, inputs["state"].device)}


def _run_served(args: dict[str, Any], out: Tensors) -> None:
    own = cuda_decode.CANDIDATES[0]
    batches.run_launch(args["launch"], args, out["state"], out["o"], own, own, args["ids"])


def refuses(workload: Workload) -> str:
    """As cuda_decode, and one live sequence only."""
    if why := cuda_decode.refuses(workload):
        return why
    if workload["batch"] != 1 or workload["pad"]:
        return f"batch = {workload['batch']}, pad = {workload['pad']}: this is about one sequence"
    return ""


CANDIDATES = tuple(
    Candidate(
        name=name,
        precision="f32",
        run=run,
        needs=Needs((9, 0), packages=("cupy",)),
        prepare=prepare,
        refuses=refuses,
        config=lambda workload: cuda_decode.describe(workload) + ", no ids",
    )
    for name, prepare, run in (
        ("cuda_decode_alone", _prepare_alone, _run_alone),
        ("cuda_decode_alone_again", _prepare_alone, _run_alone),
        ("cuda_decode_served", _prepare_served, _run_served),
    )
)
