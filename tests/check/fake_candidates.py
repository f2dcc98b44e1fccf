"""Candidates for a bench without a GPU: honest ones, cheats, and ones that die. For tests/bench/fake_bench.py.

`launch` stands for a kernel launch. Outside a capture it works at once; under a capture it is recorded and worked at
each replay, unless it goes to a stream of the candidate's own: that one is not captured and works at once, which is
what CUDA does. So a cheat here fools, or fails to fool, the checks the way it would on a GPU. All compute x * scale.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from kernels.common import Candidate, Needs, Tensors

# Launches ------------------------------------------------------------------------------------------------------------

CAPTURED: list[list[Callable[[], None]]] = []


def launch(work: Callable[[], None], own_stream: bool = False) -> None:
    """A kernel launch: captured when a capture is on and the stream is the captured one, else done at once."""
    if CAPTURED and not own_stream:
        CAPTURED[-1].append(work)
    else:
        work()


def capture(call: Callable[[], None]) -> list[Callable[[], None]]:
    """What `call` launched on the captured stream."""
    CAPTURED.append([])
    call()
    return CAPTURED.pop()


def honest(args: Tensors, out: Tensors) -> None:
    import torch

    launch(lambda: torch.mul(args["x"], args["scale"], out=out["y"]))  # type: ignore[arg-type]


# Cheats: each passes the first check, and each is caught by the second -----------------------------------------------

MEMORY: dict[Any, Any] = {}
SEEN: dict[tuple[str, int], int] = {}
HELD: list[Any] = []  # inputs once seen, so that no other tensor gets their address


def calls_before(name: str, args: Tensors) -> int:
    """How often this candidate was called on this input, not counting now."""
    key = (name, args["x"].data_ptr())
    HELD.append(args["x"])
    SEEN[key] = SEEN.get(key, -1) + 1
    return SEEN[key]


def memoises(args: Tensors, out: Tensors) -> None:
    """Computes once for a pointer and copies the remembered answer from then on."""
    key = args["x"].data_ptr()
    if key not in MEMORY:
        HELD.append(args["x"])
        MEMORY[key] = args["x"] * args["scale"]
    launch(lambda: out["y"].copy_(MEMORY[key]))  # type: ignore[arg-type]


def returns_old_buffer(args: Tensors, out: Tensors) -> None:
    """Puts the tensor of its first answer in the place of the output, from its second call on an input."""
    key = -args["x"].data_ptr()
    if calls_before("buffer", args) == 0:
        MEMORY[key] = args["x"] * args["scale"]
        honest(args, out)
    else:
        out["y"] = MEMORY[key]


def skips_known_inputs(args: Tensors, out: Tensors) -> None:
    """Works on inputs other than its last, and where it sees a NaN, which shows that somebody looks."""
    import torch

    def work() -> None:
        key = ("inputs", out["y"].data_ptr())
        if out["y"].isnan().any() or not torch.equal(MEMORY.get(key, out["y"]), args["x"]):
            out["y"].copy_(args["x"] * args["scale"])
            MEMORY[key] = args["x"].clone()

    launch(work)


def skips_while_its_answer_stands(args: Tensors, out: Tensors) -> None:
    """Works when somebody wrote over its last answer."""
    import torch

    def work() -> None:
        key = ("answer", out["y"].data_ptr())
        if key not in MEMORY or not torch.equal(MEMORY[key], out["y"]):
            MEMORY[key] = out["y"].copy_(args["x"] * args["scale"]).clone()

    launch(work)


def writes_part(args: Tensors, out: Tensors) -> None:
    """Writes everything at the first call on an input and all but the last element after it."""
    n = len(out["y"]) - (calls_before("part", args) > 0)
    launch(lambda: out["y"][:n].copy_((args["x"] * args["scale"])[:n]))  # type: ignore[arg-type]


def works_once(args: Tensors, out: Tensors) -> None:
    """Does nothing after its first call on an input."""
    if calls_before("once", args) == 0:
        honest(args, out)


def changes_inputs(args: Tensors, out: Tensors) -> None:
    """Right, but from its second call on an input it leaves zeros behind, which are faster to multiply."""
    honest(args, out)
    if calls_before("zeros", args) > 0:
        launch(lambda: args["x"].zero_())  # type: ignore[arg-type]


def zeroes_first(args: Tensors, out: Tensors) -> None:
    """From its second call on an input it zeroes the input first, so that zeros are the right answer to it."""
    if calls_before("zeroes", args) > 0:
        launch(lambda: args["x"].zero_())  # type: ignore[arg-type]
    honest(args, out)


def own_stream(args: Tensors, out: Tensors) -> None:
    """Launches on a stream of its own, which a capture does not see and the clock does not wait for."""
    launch(lambda: out["y"].copy_(args["x"] * args["scale"]), own_stream=True)  # type: ignore[arg-type]


def hides_its_input(args: Tensors, out: Tensors) -> None:
    """Puts a copy in the place of its input at the first call, so that it reads what nobody changes."""
    if "hidden" not in args:
        args["hidden"] = args["x"] = args["x"].clone()
    honest(args, out)


def clones(inputs: Tensors) -> Tensors:
    """A `prepare` that copies what it is given, so that the check after the timing changes activations alone."""
    return {name: tensor.clone() for name, tensor in inputs.items()}


# Deaths ----------------------------------------------------------------

REPLAYS: dict[str, int] = {}


def dying(name: str, how: Callable[[], None], when: int) -> Candidate:
    """Honest until `how` is done: at once when `when` is 0, else at that replay."""

    def run(args: Tensors, out: Tensors) -> None:
        def work() -> None:
            REPLAYS[name] = REPLAYS.get(name, 0) + 1
            if REPLAYS[name] > when:
                how()
            if "x" in args:
                out["y"].copy_(args["x"] * args["scale"])

        launch(work)

    return Candidate(name, "f32", run)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    while True:
        time.sleep(0.05)


def hang_holding_everything() -> None:
    """Deaf to signals other than SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hang()


def ran_out() -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 TiB. GPU 0 has ...")


def memory_error() -> None:
    raise MemoryError


def cuda_error() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")


def chatter() -> None:
    print('{"stage": "check", "arm": "nobody"}\nnot a message', flush=True)
    os.write(1, b"\x00\xffgarbage\n")


def raises() -> None:
    raise ValueError("M = 63 must be divisible by 16")


def close_everything() -> None:
    os.closerange(3, 256)
    hang()


LATE = 30  # a replay in the middle of the timing, after 10 of warm-up
DEATHS: dict[str, tuple[Callable[[], None], int]] = {
    "killed": (kill_self, 0),
    "exits": (lambda: os._exit(3), 0),
    "hangs": (hang_holding_everything, 0),
    "raises": (raises, 0),
    "no_gpu_memory": (ran_out, 0),
    "no_host_memory": (memory_error, 0),
    "cuda_error": (cuda_error, 0),
    "killed_late": (kill_self, LATE),
    "hangs_late": (hang, LATE),
    "raises_late": (raises, LATE),
    "cuda_error_late": (cuda_error, LATE),
    "closes_all": (close_everything, 0),
}
CHEATING = (
    *(memoises, returns_old_buffer, skips_known_inputs, skips_while_its_answer_stands, writes_part, works_once),
    *(changes_inputs, zeroes_first, hides_its_input, own_stream),
)
CHEATS: dict[str, Candidate] = {run.__name__: Candidate(run.__name__, "f32", run) for run in CHEATING} | {
    "memoises_a_clone": Candidate("memoises_a_clone", "f32", memoises, prepare=clones)
}


def chatters(args: Tensors, out: Tensors) -> None:
    """Honest, and prints what looks like a message and what does not at its first calls."""
    REPLAYS["chatters"] = REPLAYS.get("chatters", 0) + 1
    if REPLAYS["chatters"] < 4:
        chatter()
    if "x" in args:
        honest(args, out)


CANDIDATES: dict[str, Candidate] = {
    "plain": Candidate("plain", "f32", honest),
    "plain_killed_late": dying("plain_killed_late", kill_self, LATE),
    "faster": Candidate("faster", "f32", honest),
    "wrong": Candidate("wrong", "f32", lambda args, out: launch(lambda: out["y"].copy_(args["x"]))),  # type: ignore[arg-type]
    "packs": Candidate("packs", "f32", honest, prepare=clones),
    "absent": Candidate("absent", "f32", honest, needs=Needs(packages=("no_such_library",))),
    "choosy": Candidate("choosy", "f32", honest, refuses=lambda w: "takes no odd N" if w["N"] % 2 else ""),
    "chatters": Candidate("chatters", "f32", chatters),
    **CHEATS,
    **{name: dying(name, how, when) for name, (how, when) in DEATHS.items()},
}
