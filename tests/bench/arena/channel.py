"""Messages that the harness did not send for, ends that look like success, and signals to who watches."""

from __future__ import annotations

import atexit
import os
import signal
import stat
from collections.abc import Callable, Iterator

import msgspec

from kernels.common import Candidate, Tensors
from tests.bench.arena.family import above, honest, launch, made, multiply
from tests.bench.arena.honest import zeros


def _pipes() -> Iterator[int]:
    """Every pipe and socket that this process has open, but the standard streams."""
    for fd in range(3, 256):
        try:
            mode = os.fstat(fd).st_mode
        except OSError:
            continue
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            yield fd


def _tell(line: bytes) -> None:
    for fd in _pipes():
        try:
            os.set_blocking(fd, False)
            os.write(fd, line)
        except OSError:
            continue


def _done(name: str) -> bytes:
    """The last message of a comparison that this candidate won."""
    from lab.bench.comparison import Done, Outcome

    def timing(us: float) -> dict[str, object]:
        numbers = dict.fromkeys(("median_us", "iqr_us", "min_us", "stdev_us", "sd_pct", "drift_pct"), us)
        samples = {"samples_us": [us] * 50, "blocks_us": [us] * 10}
        return {**numbers, **samples, "n": 50, "calls": 10, "sets": 5, "converged": True}

    arms = [Outcome("control", "plain", relative_error=1e-7), Outcome("candidate", name, relative_error=1e-7)]
    told = msgspec.to_builtins(Done(arms))
    for arm, us in zip(told["arms"], (100.0, 1.0), strict=True):
        arm["timing"] = timing(us)
    return msgspec.json.encode(told) + b"\n"


def _at_work(act: Callable[[], object], after: int = 0) -> Candidate:
    """Acts in one of its replays, and is honest in all."""
    calls = iter(range(1 << 62))

    def work(args: Tensors, out: Tensors) -> None:
        if next(calls) == after:
            act()
        multiply(args, out)

    return made(lambda args, out: launch(args, lambda: work(args, out)))


def forges_done() -> Candidate:
    """Writes the last message of a comparison to every pipe."""
    return _at_work(lambda: _tell(_done("forges_done")), 30)


def forges_done_at_import() -> Candidate:
    _tell(_done("forges_done_at_import"))
    return zeros()


def forges_done_and_exits() -> Candidate:
    """Exit status 0 behind a forged message."""

    def act() -> None:
        _tell(_done("forges_done_and_exits"))
        os._exit(0)

    return _at_work(act)


def forges_done_at_exit() -> Candidate:
    atexit.register(lambda: _tell(_done("forges_done_at_exit")))
    return zeros()


def forges_every_answer() -> Candidate:
    """Each answer of its own process with a tenth of its times, on its way through the socket."""
    import json
    import socket

    send = socket.socket.sendall

    def forged(link: socket.socket, data: bytes, *rest: int) -> None:
        told = json.loads(bytes(data))
        told["samples_us"] = [0.1 * us for us in told.get("samples_us", ())]
        send(link, json.dumps(told).encode() + b"\n", *rest)

    setattr(socket.socket, "sendall", forged)  # noqa: B010
    return made(honest)


def floods_the_pipes() -> Candidate:
    def act() -> None:
        for _ in range(100):
            _tell(b'{"type": "Stage"}\n' * 1000)

    return _at_work(act)


def closes_the_pipes() -> Candidate:
    return _at_work(lambda: os.closerange(3, 256))


def exits_with_success() -> Candidate:
    return _at_work(lambda: os._exit(0), 40)


def raises_system_exit() -> Candidate:
    def leave() -> None:
        raise SystemExit(0)

    return _at_work(leave, 40)


def kills_its_parent() -> Candidate:
    return _at_work(lambda: os.kill(above(1), signal.SIGKILL), 40)


def stops_its_parent() -> Candidate:
    return _at_work(lambda: os.kill(above(1), signal.SIGSTOP), 40)


def kills_the_harness() -> Candidate:
    return _at_work(lambda: os.kill(above(2), signal.SIGKILL), 40)


def stops_the_harness() -> Candidate:
    return _at_work(lambda: os.kill(above(2), signal.SIGSTOP), 40)


def stops_itself() -> Candidate:
    return _at_work(lambda: os.kill(os.getpid(), signal.SIGSTOP), 40)


def kills_its_siblings() -> Candidate:
    """The other processes of its parent, which are the other arms."""
    from tests.bench.arena.neighbours import siblings

    def act() -> None:
        for pid in siblings():
            os.kill(pid, signal.SIGKILL)

    return _at_work(act, 40)
