"""The process that measures, and the one that watches it.

Everything that can take a GPU process down (an illegal access, a hang, a kill by the system) happens in a worker; the
parent sees which arm was being worked on, records that, replaces the worker and goes on without the arm. Messages are
JSON lines of typed records on a pipe of their own, so that whatever a candidate prints cannot be mistaken for one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from lab.base.errors import REPOSITORY
from lab.bench.comparison import Done, Job, Stage, execute
from lab.row.records import Status

# Seconds a stage may take before it counts as hung. A check compiles kernels, which is slow the first time.
LIMITS_S = {"start": 120.0, "check": 300.0, "prepare": 180.0, "time": 60.0, "recheck": 120.0}
GRACE_S = 5.0  # between a worker's closed pipe and its death
PR_SET_PDEATHSIG = 1  # Linux: prctl(2)
MESSAGES = msgspec.json.Decoder(Stage | Done)


@dataclass(frozen=True)
class Death:
    """The worker is gone: at which stage, on which arm ("" when it cannot be told), why, and the row status for it."""

    stage: str
    arm: str
    status: Status
    message: str


class Worker:
    """A measuring process, started when first needed and again after it died."""

    def __init__(self, limits_s: dict[str, float] | None = None) -> None:
        self.limits_s = LIMITS_S | (limits_s or {})
        self.process: subprocess.Popen[bytes] | None = None
        self.messages = -1
        self.buffer = b""

    def patience_s(self, job: Job, stage: str) -> float:
        """How long a stage may say nothing: its limit, and twice the sampling and its rest while arms are timed."""
        return self.limits_s[stage] + (job.seconds * 2 * (1 + job.rest) if stage == "time" else 0.0)

    def run(self, job: Job, tell: Callable[[str, str], None] = lambda stage, arm: None) -> Done | Death:
        """Do a job and return its last message, or how the worker died over it. `tell` hears each stage."""
        if self.process is None or self.process.poll() is not None:
            self.stop()
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        stage, arm = "start", ""
        try:
            self.process.stdin.write(msgspec.json.encode(job) + b"\n")
            self.process.stdin.flush()
            while True:
                patience_s = self.patience_s(job, stage)
                line = self._line(patience_s)
                if line is None:
                    self.stop()
                    return Death(stage, arm, "timeout", f"no answer for {patience_s:.0f} s in {stage}")
                message = MESSAGES.decode(line)
                if isinstance(message, Done):
                    if message.fatal:
                        self.stop()
                    return message
                if message.stage != stage or stage != "time":  # turns within the timing are for a death only
                    tell(message.stage, message.arm)
                stage, arm = message.stage, message.arm
        except (EOFError, BrokenPipeError):
            try:
                code = self.process.wait(timeout=GRACE_S)
                name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            except subprocess.TimeoutExpired:
                name = "closing its pipe"
            self.stop()
            return Death(stage, arm, "error", f"the measuring process died of {name} in {stage}")
        except msgspec.DecodeError:
            self.stop()
            return Death(stage, arm, "error", f"the measuring process wrote something else than messages in {stage}")

    def _start(self) -> None:
        self.messages, theirs = os.pipe()
        self.buffer = b""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lab.bench.worker", str(theirs), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=2,  # standard output is for results, and sys.stderr is no file in a notebook
            pass_fds=(theirs,),
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)

    def _line(self, limit_s: float) -> bytes | None:
        """One message, None after `limit_s` of silence; raises EOFError when the worker has closed its end."""
        until = time.monotonic() + limit_s
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.messages], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None
            chunk = os.read(self.messages, 1 << 16)
            if not chunk:
                raise EOFError
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def stop(self) -> None:
        """End the worker and whatever it started; safe to call twice."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            if self.process.stdin is not None:
                with contextlib.suppress(OSError):
                    self.process.stdin.close()
            self.process = None
        if self.messages >= 0:
            os.close(self.messages)
            self.messages = -1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent, process `parent`, is gone: a hung one would hold the GPU.

    Linux only; elsewhere a worker ends when it next reads its input or writes a message.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            sys.exit(0)


def main(descriptor: int, parent: int) -> None:
    """The worker's loop: a job a line on standard input, messages on `descriptor`."""
    die_with_parent(parent)
    with os.fdopen(descriptor, "wb", buffering=0) as out:

        def tell(message: Stage | Done) -> None:
            line = memoryview(msgspec.json.encode(message) + b"\n")
            while line:  # a pipe may take less than a whole message
                line = line[out.write(line) or 0 :]

        for asked in sys.stdin:
            for message in execute(msgspec.json.decode(asked, type=Job), tell):
                tell(message)
            gc.collect()
            if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
                sys.modules["torch"].cuda.empty_cache()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
