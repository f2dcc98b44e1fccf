"""One arm in a process of its own: the only place where a candidate's module is imported while it is measured.

The process is forked from a nursery that has imported torch and nothing of any candidate, and talks to the harness
(lab/bench/apart.py) over one socket. It is handed tensors that the harness owns, prepares the candidate on them,
captures, and replays when asked. It is asked for a visit in the same words whether the visit is timed or checked. What
it says about itself (its times above all) the harness holds against its own clock and against the outputs.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import time
from typing import Any

import msgspec

from lab.base.errors import reason
from lab.bench import sampling, shared
from lab.bench.backend import Backend, added_bytes
from lab.bench.shared import Handle
from lab.check import accuracy, families
from lab.check.child import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG

Handles = dict[str, Handle]
GPU = "/dev/nvidiactl"  # there where NVIDIA's driver is; to ask CUDA would make a context, which no fork survives


class Request(msgspec.Struct, frozen=True, tag=True):
    """What the harness asks; the reply repeats its nonce."""

    nonce: str


class Hello(Request, frozen=True, tag=True):
    """Load a candidate."""

    backend: str
    family: str
    workload: str
    candidate: str
    timer: str
    l2: str
    l2_bytes: int


class Once(Request, frozen=True, tag=True):
    """Prepare and run one call, and wait for all of the device."""

    inputs: Handles
    out: Handles


class Attach(Request, frozen=True, tag=True):
    """Prepare the candidate on sets of (inputs, outputs) and capture it.

    alone: whether a call is a sample by itself, as it is for the arms before it; None for the first.
    """

    sets: tuple[tuple[Handles, Handles], ...]
    alone: bool | None = None


class Visit(Request, frozen=True, tag=True):
    """Take so many samples, one behind the other; none of them is what a visit costs by itself."""

    samples: int


class Pass(Request, frozen=True, tag=True):
    """Do one call on each set."""


class Release(Request, frozen=True, tag=True):
    """Give the sets back."""


class Reply(msgspec.Struct, frozen=True):
    """An answer. error: what the candidate threw, its type and message in one line; reason: why it cannot run here.

    layouts: (order, ahead) of each output that a library lays out in its own way; see Layout.
    """

    nonce: str
    error: str = ""
    reason: str = ""
    precision: str = ""
    layouts: dict[str, tuple[tuple[int, ...], int]] = {}
    samples_us: tuple[float, ...] = ()
    calls: int = 1
    alone: bool | None = None
    prepare_us: float | None = None
    prepared_bytes: int | None = None


class Arm:
    """The candidate with what it was given last."""

    def __init__(self) -> None:
        self.at: Hello | None = None
        self.backend: Backend | None = None
        self.family: families.Family | None = None
        self.arm: sampling.Arm | None = None
        self.timer: sampling.Timer | None = None

    def answer(self, asked: Request) -> Reply:
        """Do what is asked; raises what the candidate raises."""
        if isinstance(asked, Hello):
            return self._hello(asked)
        assert self.at, "asked before the greeting"
        assert self.backend
        assert self.family
        candidate = self.family.candidate(self.at.candidate)
        if isinstance(asked, Once):
            given = _opened(asked.inputs)
            candidate.run(accuracy.prepared(self.family, candidate, given), _opened(asked.out))
            self.backend.wait()
            return Reply(asked.nonce)
        if isinstance(asked, Attach):
            return self._attach(asked, candidate)
        if isinstance(asked, Visit):
            assert self.timer, "asked before there are sets"
            assert self.arm
            return Reply(asked.nonce, samples_us=tuple(self.timer.visit(self.arm, asked.samples)))
        if isinstance(asked, Pass):
            timer: Any = self.timer
            assert timer, "asked before there are sets"
            timer.one_pass(self.arm)
            return Reply(asked.nonce)
        self.arm = self.timer = None
        gc.collect()
        self.backend.free()
        return Reply(asked.nonce)

    def _hello(self, asked: Hello) -> Reply:
        module, _, function = asked.backend.partition(":")
        self.arm = self.timer = None
        self.at, self.backend = asked, getattr(importlib.import_module(module), function)()
        self.family = family = self.backend.load(asked.family)
        if asked.candidate in family.unavailable:
            why = f"cannot be imported: {family.unavailable[asked.candidate]}"
            return Reply(asked.nonce, reason=why)
        candidate = family.candidate(asked.candidate)
        capability = families.gpu_capability() if self.backend.device != "cpu" else None
        unmet = families.unmet(candidate, capability) if self.backend.device != "cpu" else ""
        unmet = unmet or candidate.refuses(family.workload(asked.workload))
        layouts = {name: (layout.order, layout.ahead) for name, layout in candidate.layouts.items()}
        return Reply(asked.nonce, reason=unmet, precision=candidate.precision, layouts=layouts)

    def _attach(self, asked: Attach, candidate: Any) -> Reply:
        """prepare_us: the wall clock's, the device idle before and done after, the fastest over the sets."""
        assert self.at
        assert self.backend
        assert self.family
        self.timer = self.backend.timer(self.at.timer, self.at.l2, self.at.l2_bytes)
        self.arm = arm = sampling.Arm(self.at.candidate, candidate.run, [], alone=asked.alone, eager=candidate.eager)
        fastest_s, held = float("inf"), None
        for inputs, out in asked.sets:
            given = _opened(inputs)
            self.backend.wait()
            began = time.perf_counter()
            args = accuracy.prepared(self.family, candidate, given)
            self.backend.wait()
            fastest_s = min(fastest_s, time.perf_counter() - began)
            held = added_bytes(args, given)
            arm.sets.append((args, _opened(out)))
        self.timer.prepare(arm)
        return Reply(asked.nonce, calls=arm.calls, alone=arm.alone, prepare_us=1e6 * fastest_s, prepared_bytes=held)


def _opened(handles: Handles) -> dict[str, Any]:
    return {name: shared.opened(handle) for name, handle in handles.items()}


REQUESTS = msgspec.json.Decoder(Hello | Once | Attach | Visit | Pass | Release)


def serve(descriptor: int) -> None:
    """The arm's loop; ends when the harness closes its end."""
    arm = Arm()
    with socket.socket(fileno=descriptor) as link, link.makefile("rb") as lines:
        for line in lines:
            asked = REQUESTS.decode(line)
            try:
                reply = arm.answer(asked)
            except Exception as error:  # whatever a candidate throws is its own row's status
                reply = Reply(asked.nonce, error=reason(error))
            link.sendall(msgspec.json.encode(reply) + b"\n")


def nursery(descriptor: str, parent: str) -> None:
    """Fork an arm for each descriptor that is sent, and say its pid; asked about a pid, say how it ended.

    A fork costs 10 ms where importing torch costs seconds. Nothing here touches the GPU: no context survives a fork.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != int(parent):  # it died before the line above
        sys.exit(0)
    import torch

    import kernels.common  # noqa: F401  what every family stands on

    if os.path.exists(GPU):  # what most candidates import first; neither makes a context
        for name in ("cupy", "triton"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    torch.set_num_threads(1)  # a pool of threads would not survive a fork
    gc.freeze()  # what is here an arm need not collect, which takes a tenth of a second and copies every page
    with socket.socket(fileno=int(descriptor)) as link:
        while True:
            word, sent, _, _ = socket.recv_fds(link, 32, 1)
            if not word:
                return
            if not sent:
                _, status = os.waitpid(int(word), 0)
                link.sendall(str(os.waitstatus_to_exitcode(status)).encode())
                continue
            pid = os.fork()
            if not pid:
                link.close()
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                code = 0
                try:
                    serve(sent[0])
                except BaseException as error:
                    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
                os._exit(code)
            os.close(sent[0])
            link.sendall(str(pid).encode())


if __name__ == "__main__":
    nursery(*sys.argv[1:])
