"""A subprocess for work that can crash or hang: an illegal access, an endless kernel, an assertion in a compiler.

It runs `python -m MODULE DESCRIPTOR PARENT ...` from the repository and answers in lines on a pipe of its own, so that
whatever a candidate or a compiler prints cannot be mistaken for an answer. It is asked by lines on its standard input.
`serve` is the child's side.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from lab.base.errors import REPOSITORY

GRACE_S = 5.0  # between a child's closed pipe and its death
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # Linux: prctl(2)


def signal_tree(pid: int, number: int) -> None:
    """Send a signal to a process and to all that is under it (Linux); stopped first, so that nobody loses a parent."""
    pids = [pid]
    for each in pids:
        with contextlib.suppress(OSError):
            os.kill(each, signal.SIGSTOP if number == signal.SIGKILL else number)
        pids += children(each)
    if number == signal.SIGKILL:
        for each in pids:
            with contextlib.suppress(OSError):
                os.kill(each, number)


def children(pid: int) -> list[int]:
    """The processes that this one started or took in; none where it is gone, or the system does not say."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found


class Child:
    """A running child. errors: where its error stream goes, default ours; its standard output goes to ours."""

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str] = os.environ, errors: IO[bytes] | None = None
    ) -> None:
        self.messages, theirs = os.pipe()
        self.buffer = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs), str(os.getpid()), *arguments],
            stdin=subprocess.PIPE,
            stdout=2,  # standard output is for results, and sys.stderr is no file in a notebook
            stderr=errors,
            pass_fds=(theirs,),
            env=environment,
            cwd=REPOSITORY,
            start_new_session=True,
        )
        os.close(theirs)

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self.process.poll() is None

    def ask(self, line: bytes) -> None:
        """Send one line; raises BrokenPipeError when the child is gone."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def answer(self, limit_s: float) -> bytes:
        """The next line; raises TimeoutError after `limit_s` of silence, EOFError when the child closed its end."""
        until = time.monotonic() + limit_s
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.messages], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError
            chunk = os.read(self.messages, 1 << 16)
            if not chunk:
                raise EOFError
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def death(self) -> str:
        """What a child that closed its pipe died of: a signal, an exit code, or nothing yet."""
        try:
            code = self.process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            return "closing its pipe"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        """End the child and whatever it started, what left its session too."""
        if self.alive:
            signal_tree(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        os.close(self.messages)


def end_with(parent: str) -> None:
    """Have this process end when its parent does, also while it hangs. parent: its pid.

    Linux only; elsewhere a child ends when it next reads its input or sends a line.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what loses its parent stays where `stop` finds it
        if os.getppid() != int(parent):  # it died before the line above
            sys.exit(0)


def serve(descriptor: str, parent: str) -> tuple[Callable[[bytes], None], Iterator[str]]:
    """The child's side: (what sends a line, the lines that it is asked). Ends with its parent; see `end_with`."""
    end_with(parent)
    out: Any = os.fdopen(int(descriptor), "wb", buffering=0)

    def send(line: bytes) -> None:
        left = memoryview(line + b"\n")
        while left:  # a pipe may take less than a whole line
            left = left[out.write(left) or 0 :]

    return send, iter(sys.stdin)
