"""The process that measures, and the one that watches it.

Everything that can take a GPU process down happens in a worker (lab/check/child.py); the parent sees which arm was
being worked on, records that, replaces the worker and goes on without the arm.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from lab.bench.comparison import GPU_BACKEND, Done, Job, Stage, execute, nursery
from lab.check.child import Child, serve
from lab.row.records import Status

# Seconds a stage may take before it counts as hung. A check compiles kernels, which is slow the first time.
LIMITS_S = {"start": 120.0, "check": 300.0, "prepare": 180.0, "time": 60.0, "recheck": 120.0}
MOST_KEPT_BYTES = 1 << 30  # of the GPU's memory, between two jobs
DIED = "the measuring process died of {} in {}"
ENDED = DIED.format("exit code 0", "start")  # it ends by itself between two jobs, see `main`
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
        self.child: Child | None = None

    def patience_s(self, job: Job, stage: str) -> float:
        """How long a stage may say nothing: its limit, and twice the sampling and its rest while arms are timed."""
        return self.limits_s[stage] + (job.seconds * 2 * (1 + job.rest) if stage == "time" else 0.0)

    def start(self, backend: str) -> None:
        """Start the process where there is none, so that it imports what it needs while others are at work."""
        if self.child is None or not self.child.alive:
            self.stop()
            self.child = Child("lab.bench.worker", backend)

    def run(self, job: Job, tell: Callable[[str, str], None] = lambda stage, arm: None) -> Done | Death:
        """Do a job and return its last message, or how the worker died over it. `tell` is called with each stage."""
        done = self._run(job, tell)
        if isinstance(done, Death) and (done.stage, done.message) == ("start", ENDED):
            done = self._run(job, tell)  # it was on its way out, to give back what the job before had kept
        return done

    def _run(self, job: Job, tell: Callable[[str, str], None]) -> Done | Death:
        self.start(job.backend)
        assert self.child is not None
        stage, arm = "start", ""
        status: Status = "error"
        try:
            self.child.ask(msgspec.json.encode(job))
            while True:
                message = MESSAGES.decode(self.child.answer(self.patience_s(job, stage)))
                if isinstance(message, Done):
                    if message.fatal:
                        self.stop()
                    return message
                if message.stage != stage or stage != "time":  # turns within the timing are for a death only
                    tell(message.stage, message.arm)
                stage, arm = message.stage, message.arm
        except TimeoutError:
            status, why = "timeout", f"no answer for {self.patience_s(job, stage):.0f} s in {stage}"
        except (EOFError, BrokenPipeError):
            why = DIED.format(self.child.death(), stage)
        except msgspec.DecodeError:
            why = f"the measuring process wrote something else than messages in {stage}"
        self.stop()
        return Death(stage, arm, status, why)

    def stop(self) -> None:
        """End the worker and whatever it started; safe to call twice."""
        if self.child is not None:
            self.child.stop()
            self.child = None


def main(descriptor: str, parent: str, backend: str = "") -> None:
    """The worker's loop: a job a line, answered by its messages. backend: of the jobs that are to be expected."""
    send, asked = serve(descriptor, parent)
    if backend == GPU_BACKEND:  # seconds of imports, here and where arms are forked from
        nursery()
        importlib.import_module("torch")

    def tell(message: Stage | Done) -> None:
        send(msgspec.json.encode(message))

    for line in asked:
        for message in execute(msgspec.json.decode(line, type=Job), tell):
            tell(message)
        gc.collect()
        if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
            cuda = sys.modules["torch"].cuda
            cuda.ipc_collect()
            cuda.empty_cache()
            if cuda.memory_reserved() > MOST_KEPT_BYTES:  # lent to an arm that never gave it back
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
