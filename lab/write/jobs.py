"""Work side by side: every job a process of its own, forked from one that has already imported what most of them need.

Importing torch, Triton, pandas and matplotlib takes five CPU seconds, a small check takes a tenth of one. So one server
process imports them once, and each job is a fork of it; a job that crashes is a line and takes nobody along. With a GPU
there is no warm server, because CUDA cannot be used in a fork of a process that touched it: each job then starts bare.
One torch thread each: two threads on a busy core spend their time waiting for each other.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 600


@dataclass(frozen=True)
class Job:
    """`run(*arguments)` in a process of its own. run: a module's function; seconds: expected, the longest go first."""

    name: str
    run: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    seconds: float = 1.0


@dataclass(frozen=True)
class Done:
    """A job's value, or in one line why it has none."""

    job: Job
    value: Any
    failure: str


def context() -> Any:
    """How processes start here: forks of a warm server without a GPU, bare ones with it. Starts the server at once."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if shutil.which("nvidia-smi") is not None or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["lab.write.warm"])
    from multiprocessing import forkserver

    forkserver.ensure_running()
    return made


def run(jobs: Sequence[Job], workers: int, made: Any) -> Iterator[Done]:
    """Each job's outcome as it ends, `workers` at a time."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        order = sorted(jobs, key=lambda job: -job.seconds)
        waiting = [pool.submit(_watched, job, made, Path(folder) / f"{i}.err") for i, job in enumerate(order)]
        try:
            for ended in as_completed(waiting):
                yield ended.result()
        except BaseException:  # interrupted, or nobody asks for more: what runs is not waited for
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()
            raise


def _watched(job: Job, made: Any, said: Path) -> Done:
    """Start a job's process and wait for its answer, for LIMIT_S at most."""
    here, there = made.Pipe(duplex=False)
    process = made.Process(target=_child, args=(there, said, job.run, job.arguments))
    process.start()
    there.close()
    value, failure, late = None, None, not here.poll(LIMIT_S)
    if late:
        process.kill()
    with contextlib.suppress(EOFError, OSError):  # it died without a word
        value, failure = here.recv()
    process.join()
    if failure is None:
        lines = said.read_text(errors="replace").strip().splitlines() if said.exists() else []
        how = f"stopped after {LIMIT_S} s" if late else f"exit code {process.exitcode}"
        failure = lines[-1][:300] if lines else how
    return Done(job, value, failure)


def _child(there: Any, said: Path, run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Run a job; what it prints goes to a file, of which the last line is read when it dies."""
    with open(said, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    try:
        there.send((run(*arguments), ""))
    except Exception as error:  # a job's own failure is its line
        with contextlib.suppress(OSError):
            there.send((None, " ".join(f"{type(error).__name__}: {error}".split())[:300]))
    there.close()
