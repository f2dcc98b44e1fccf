"""The supervised process: what a candidate can do to it, and what its parent makes of that.

The processes are real and die of real causes. They use the backend without torch, so that each starts in a fifth of a
second; what torch itself raises is tested in test_measure.py, in a process that has it.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.base.errors import REPOSITORY
from lab.bench.comparison import Job
from lab.bench.worker import Death, Worker
from lab.check.child import Child
from tests.check import fake_candidates

LIMITS = {"start": 30.0, "check": 0.5, "prepare": 0.5, "time": 0.5, "recheck": 0.5}


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(LIMITS)
    yield made
    made.stop()


def job(*names: str, backend: str = "quick", workload: str = "n63") -> Job:
    arms: Any = (("control", "plain"), *(("candidate", name) for name in names))
    return Job("toy", workload, arms, 0.0, backend=f"tests.bench.fake_bench:{backend}")


def statuses(answer: Any) -> list[str]:
    assert not isinstance(answer, Death), answer
    return [a.status for a in answer.arms]


def test_one_process_for_many_jobs(worker: Worker) -> None:
    told: list[tuple[str, str]] = []
    assert statuses(worker.run(job("faster"), lambda stage, arm: told.append((stage, arm)))) == ["ok", "ok"]
    first = worker.child
    assert first is not None
    assert statuses(worker.run(job("faster", workload="n75"))) == ["ok", "ok"]
    assert worker.child is first
    # The stages, and not the hundreds of turns within the timing.
    prepared = [("prepare", "faster"), ("prepare", "plain"), ("prepare", "plain")]  # the control's second self
    assert sorted(told[2:5]) == prepared  # in drawn order
    checked = [("recheck", "plain"), ("recheck", "faster")]
    assert [*told[:2], *(s for s in told[5:] if s[0] != "time")] == [("check", "plain"), ("check", "faster"), *checked]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "status", "said"),
    [
        ("killed", "check", "error", "died of SIGKILL in check"),
        ("exits", "check", "error", "died of exit code 3 in check"),
        ("hangs", "check", "timeout", "no answer for 0 s in check"),
        ("closes_all", "check", "error", "died of closing its pipe in check"),
        ("killed_late", "time", "error", "died of SIGKILL in time"),
        ("hangs_late", "time", "timeout", "no answer for 0 s in time"),
    ],
)
def test_death(name: str, stage: str, status: str, said: str, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.check.child.GRACE_S", 0.3)
    found = worker.run(job("faster", name))
    assert isinstance(found, Death)
    assert (found.stage, found.arm, found.status) == (stage, name, status)
    assert said in found.message
    assert worker.child is None
    assert statuses(worker.run(job("faster"))) == ["ok", "ok"]  # a new one takes the next job


def test_control_that_dies_while_timed_is_named_by_its_own_name(worker: Worker) -> None:
    arms: Any = (("control", "plain_killed_late"), ("candidate", "faster"))
    found = worker.run(Job("toy", "n63", arms, 0.0, backend="tests.bench.fake_bench:quick"))
    assert isinstance(found, Death)
    assert found.arm == "plain_killed_late"


@pytest.mark.parametrize("name", ["cuda_error", "raises_late", "cuda_error_late"])
def test_process_is_replaced_after_an_error_that_it_does_not_survive(name: str, worker: Worker) -> None:
    found = worker.run(job(name))
    assert not isinstance(found, Death)
    assert found.fatal == name
    assert worker.child is None
    assert statuses(worker.run(job("faster"))) == ["ok", "ok"]


def test_process_survives_an_ordinary_error(worker: Worker) -> None:
    assert statuses(worker.run(job("raises"))) == ["ok", "error"]
    assert worker.child is not None
    before = worker.child.process.pid
    assert statuses(worker.run(job("no_host_memory"))) == ["ok", "oom"]
    assert worker.child.process.pid == before


def test_process_that_died_between_jobs_is_replaced(worker: Worker) -> None:
    assert statuses(worker.run(job("faster"))) == ["ok", "ok"]
    assert worker.child is not None
    os.kill(worker.child.process.pid, signal.SIGKILL)
    worker.child.process.wait()
    assert statuses(worker.run(job("faster"))) == ["ok", "ok"]


def test_process_that_is_about_to_end_by_itself_costs_no_job(worker: Worker) -> None:
    """One that gives memory back takes seconds to end, and is there to be asked for so long."""
    worker.child = Child("tests.bench.ends_soon")
    assert statuses(worker.run(job("faster"))) == ["ok", "ok"]


def test_process_that_ends_before_every_job_is_a_death(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Child] = []

    def start(backend: str) -> None:
        begun.append(Child("tests.bench.ends_soon"))
        worker.child = begun[-1]

    monkeypatch.setattr(worker, "start", start)
    found = worker.run(job("faster"))
    assert isinstance(found, Death)
    assert "exit code 0 in start" in found.message
    assert len(begun) == 2


def test_print_is_no_message(capfd: pytest.CaptureFixture[str]) -> None:
    made = Worker(LIMITS)
    try:
        assert statuses(made.run(job("chatters"))) == ["ok", "ok"]
    finally:
        made.stop()
    captured = capfd.readouterr()
    assert captured.out == ""  # standard output is for results
    assert "not a message" in captured.err
    assert "garbage" in captured.err


def test_something_else_on_the_message_pipe_is_a_death(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.check.child.Child.answer", lambda child, limit_s: b"\x00 no JSON")
    found = worker.run(job("faster"))
    assert isinstance(found, Death)
    assert "wrote something else than messages in start" in found.message


def test_family_that_is_not_there_is_a_death_of_nobody(worker: Worker) -> None:
    """Nothing can be blamed, so every arm is; and it does not hang."""
    found = worker.run(Job("toy", "n63", (("control", "plain"),), 0.0, backend="tests.bench.fake_bench:nosuch"))
    assert isinstance(found, Death)
    assert (found.stage, found.arm, found.status) == ("start", "", "error")


def test_nothing_is_left_open(worker: Worker) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert isinstance(worker.run(job("exits")), Death)
    worker.stop()
    worker.stop()
    assert len(os.listdir("/proc/self/fd")) == before


PARENT = """
import sys
from lab.bench.worker import Worker
from tests.bench.test_worker import LIMITS, job
worker = Worker({**LIMITS, "check": 600.0})
worker.run(job("hangs"), lambda stage, arm: print(worker.child.process.pid, arm, flush=True))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked through prctl, which is Linux's")
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_worker_does_not_outlive_its_parent(death: signal.Signals) -> None:
    """A hung candidate, deaf to every signal that can be ignored, whose parent is killed."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    lines = [parent.stdout.readline().split() for _ in range(2)]
    assert [arm for _, arm in lines] == ["plain", "hangs"]
    pid = int(lines[1][0])
    assert running(pid)
    parent.send_signal(death)
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + 5.0
    while running(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not running(pid)


def running(pid: int) -> bool:
    """Whether a process is there and no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_fake_candidates_are_the_ones_tested_here() -> None:
    """A death added to the bench without a test would be a promise that nobody keeps."""
    tested = {"killed", "exits", "hangs", "closes_all", "killed_late", "hangs_late", "cuda_error", "cuda_error_late"}
    assert set(fake_candidates.DEATHS) == tested | {"raises", "raises_late", "no_gpu_memory", "no_host_memory"}


def test_a_rested_timing_is_given_the_time_it_rests(worker: Worker) -> None:
    arms: Any = (("control", "plain"),)
    plain, rested = (Job("toy", "n63", arms, seconds=3.0, rest=rest) for rest in (0.0, 4.0))
    limit_s = worker.limits_s["time"]
    assert (worker.patience_s(plain, "time"), worker.patience_s(rested, "time")) == (limit_s + 6, limit_s + 30)
    assert worker.patience_s(rested, "check") == worker.limits_s["check"]
