"""The harness's side of arms in processes of their own (lab/bench/arm.py).

`Hands` stands for the candidates of one comparison in a process that imports none of them: each is a `Candidate` whose
`run` asks the arm's process, and `RemoteTimer` is a timer whose visits are asked for. Every request has a nonce, which
the reply repeats, so a line that was written ahead is no reply. Beside each visit of the graph timer runs the harness's
own clock: what it reads beyond the arm's own times, and beyond what an empty visit costs, is `clock_pct`. An empty
visit takes as long as the GPU takes to go from one process to the other. It costs every arm the same, so the cheapest
arm's counts: one that dawdles over an empty visit gains nothing. An arm that was not asked stands still, with every
process that it started: it can neither slow the others nor write behind a visit. During a visit what it started stands
still too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lab.base.errors import REPOSITORY
from lab.bench import arm as far
from lab.bench import sampling
from lab.bench.shared import Shelf
from lab.check.accuracy import Elsewhere
from lab.check.child import children, signal_tree

REPLY = msgspec.json.Decoder(far.Reply)
SILENT_S = 1.0  # without a reply, an arm is let go on once more


class Thrown(Elsewhere):
    """What a candidate threw in its process, as type and message in one line."""


class Died(Elsewhere):
    """An arm's process is gone, or answered something else than what it was asked."""


class Nursery:
    """The process that arms are forked from, one for the life of a harness."""

    def __init__(self) -> None:
        self.arms: set[int] = set()
        self.link, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lab.bench.arm", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(theirs.fileno(),),
                cwd=REPOSITORY,
            )

    def arm(self) -> tuple[socket.socket, int]:
        """A new arm: (the socket to it, its pid). Raises Died when there is none to be had."""
        ours, theirs = socket.socketpair()
        with theirs:
            os.kill(self.process.pid, signal.SIGCONT)  # an arm may have stopped it
            try:
                socket.send_fds(self.link, [b"fork"], [theirs.fileno()])
                said = self.link.recv(32)
            except OSError as error:
                raise Died("the process that arms are forked from is gone") from error
        if not said:
            raise Died("the process that arms are forked from is gone")
        self.arms.add(int(said))
        return ours, int(said)

    def end_orphans(self) -> None:
        """End what an arm started and let go of: the nursery takes it in."""
        for pid in children(self.process.pid):
            if pid not in self.arms:
                signal_tree(pid, signal.SIGKILL)

    def death(self, pid: int) -> str:
        """What an arm that closed its socket died of."""
        for each, number in ((pid, signal.SIGKILL), (self.process.pid, signal.SIGCONT)):  # closed it and live on?
            with contextlib.suppress(OSError):
                os.kill(each, number)
        try:
            self.link.sendall(str(pid).encode())
            code = int(self.link.recv(32) or 1)
        except OSError:
            return "the end of the process that arms are forked from"
        return "closing its socket" if code == -signal.SIGKILL else _ended(code)

    def stop(self) -> None:
        """End it, and with it every arm."""
        self.link.close()
        signal_tree(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _ended(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


class Hand:
    """One arm. visits_us: of each visit, what the harness's clock read and what the arm's own times add up to, us.

    failed: whether its candidate threw anything, so that the process is good for nothing else.
    empty_us, pass_us: what the harness's clock read of each empty visit and of one call on each set, us.
    """

    def __init__(self, nursery: Nursery, greeting: dict[str, Any]) -> None:
        self.nursery = nursery
        self.link, self.pid = nursery.arm()
        self.link.settimeout(SILENT_S)
        self.buffer = b""
        self.died, self.failed = "", False
        self.greet(greeting)

    def greet(self, greeting: dict[str, Any]) -> None:
        """Have it load a candidate for a comparison; what earlier comparisons read of it is forgotten."""
        self._go(far.Hello)
        self.greeted: far.Reply | None = None
        self.greeting = self._send(far.Hello, **greeting)
        self.visits_us: list[tuple[float, float]] = []
        self.empty_us: list[float] = []
        self.pass_us: list[float] = []

    @property
    def hello(self) -> far.Reply:
        """What it said of itself; all arms are greeted before the first answer is waited for."""
        if self.greeted is None:
            self.greeted = self._reply(self.greeting)
            self.failed |= bool(self.greeted.error)
            self._freeze()
        return self.greeted

    def ask(self, kind: type[far.Request], **parts: Any) -> far.Reply:
        """Ask and wait; raises Thrown for what the candidate threw and Died when the process is gone.

        A process that says nothing is waited for: whoever watches the harness knows which arm it is at.
        """
        return self.asked(kind, **parts)()

    def asked(self, kind: type[far.Request], **parts: Any) -> Callable[[], far.Reply]:
        """Ask, and return what waits as `ask` does."""
        self._go(kind)
        nonce = self._send(kind, **parts)

        return lambda: self._heard(self._reply(nonce, kind))

    def timed(self, kind: type[far.Request], clock: Callable[[int], float], **parts: Any) -> tuple[far.Reply, float]:
        """As `ask` does, and by this clock how long the reply took, s.

        What stops the arm behind its reply is not in it: that takes the longer, the more threads a library has started.
        """
        began = clock(self.pid)
        self._go(kind)
        reply = self._reply(self._send(kind, **parts), kind)
        took_s = clock(self.pid) - began
        return self._heard(reply), took_s

    def _heard(self, reply: far.Reply) -> far.Reply:
        self._freeze()
        if reply.error:
            self.failed = True
            raise Thrown(reply.error)
        return reply

    def _go(self, kind: type[far.Request]) -> None:
        """Let it run: for a timed visit it alone, since what it started could work on behind its back."""
        if kind in (far.Visit, far.Pass):
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGCONT)
        else:
            signal_tree(self.pid, signal.SIGCONT)

    def _freeze(self) -> None:
        signal_tree(self.pid, signal.SIGSTOP)
        self.nursery.end_orphans()

    def _send(self, kind: type[far.Request], **parts: Any) -> str:
        nonce = secrets.token_hex(8)
        try:
            self.link.sendall(msgspec.json.encode(kind(nonce=nonce, **parts)) + b"\n")
        except OSError as error:
            raise Died(self.gone()) from error
        return nonce

    def _reply(self, nonce: str, kind: type[far.Request] = far.Hello) -> far.Reply:
        while b"\n" not in self.buffer:
            try:
                chunk = self.link.recv(1 << 16)
            except TimeoutError:  # another arm may have stopped it, on its own way to a standstill
                self._go(kind)
                continue
            except OSError:
                chunk = b""
            if not chunk:
                raise Died(self.gone())
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        try:
            reply = REPLY.decode(line)
        except msgspec.DecodeError:
            reply = far.Reply("")
        if reply.nonce != nonce or self.buffer:
            raise Died("the candidate's process wrote an answer to a question that was not asked")
        return reply

    def gone(self) -> str:
        """What it died of, in a sentence."""
        self.died = self.died or f"the candidate's process died of {self.nursery.death(self.pid)}"
        return self.died

    def stop(self) -> None:
        """End it."""
        self.link.close()
        signal_tree(self.pid, signal.SIGKILL)
        self.nursery.end_orphans()


class Hands:
    """The arms of one comparison, by name, the control first; its second self has a process of its own.

    backwards: start the processes in the other order, as the second half of a comparison does: what a GPU gives to
    those that come first is then nobody's advantage.
    lent: whose tensors the processes hold, kept until they have let go of them: torch warns of memory freed before.
    spare: processes of earlier comparisons by (family, candidate), of which these take theirs and leave them again.
    """

    def __init__(
        self, nursery: Nursery, names: Sequence[str], greeting: dict[str, Any],
        spare: dict[tuple[str, str], list[Hand]] | None = None, backwards: bool = False,
    ) -> None:  # fmt: skip
        self.shelf = Shelf()
        self.lent: list[sampling.Arm] = []
        self.nursery, self.greeting, self.spare = nursery, greeting, spare
        order = [*names, sampling.AGAIN][:: -1 if backwards else 1]
        self.hands = {name: self._hand(names[0] if name == sampling.AGAIN else name) for name in order}
        self.again = self.hands.pop(sampling.AGAIN), names[0]

    def _hand(self, name: str) -> Hand:
        greeting = self.greeting | {"candidate": name}
        own = (self.spare or {}).get((self.greeting["family"], name), [])
        while own:
            with contextlib.suppress(Died):
                if (hand := own.pop()).nursery is self.nursery:  # else it is gone, and its arms with it
                    hand.greet(greeting)
                    return hand
        return Hand(self.nursery, greeting)

    def second(self, name: str) -> None:
        """Make ready the second self of the arm that is the control after all."""
        if self.again[1] != name:
            self.again[0].stop()
            self.again = self._hand(name), name
        self.hands[sampling.AGAIN] = self.again[0]
        if self.again[0].hello.error:
            raise Thrown(self.again[0].hello.error)

    def __enter__(self) -> Hands:
        return self

    def __exit__(self, *_: object) -> None:
        every = {**self.hands, sampling.AGAIN: self.again[0]}
        for hand in every.values():
            with contextlib.suppress(Elsewhere):
                if not hand.died:
                    hand.ask(far.Release)  # memory that a process holds at its death stays lent for good
        for name, hand in every.items():
            if self.spare is not None and not (hand.died or hand.failed):
                of = self.again[1] if name == sampling.AGAIN else name
                self.spare.setdefault((self.greeting["family"], of), []).append(hand)
            elif not hand.died:
                hand.stop()
        for arm in self.lent:
            arm.sets, arm.inputs, arm.outputs = [], [], []
        self.shelf.clear()

    def candidate(self, name: str) -> Any:
        """The candidate as the harness sees it; raises Thrown or Died."""
        from kernels.common import Candidate, Layout

        hand = self.hands[name]
        if hand.hello.error:
            raise Thrown(hand.hello.error)

        def run(args: dict[str, Any], out: dict[str, Any]) -> None:
            self.called(name, args, out)()

        layouts = {output: Layout(*given) for output, given in hand.hello.layouts.items()}
        return Candidate(name, hand.hello.precision, run, refuses=lambda _: hand.hello.reason, layouts=layouts)

    def called(self, name: str, args: dict[str, Any], out: dict[str, Any]) -> Callable[[], None]:
        """Begin one call in an arm's process, on copies, and return what waits and takes back what was written."""
        near = [{key: self.shelf.tensor(value) for key, value in given.items()} for given in (args, out)]
        handles = [{key: self.shelf.handle(value) for key, value in given.items()} for given in near]
        _synchronize(near[1])
        answer = self.hands[name].asked(far.Once, inputs=handles[0], out=handles[1])

        def back() -> None:
            answer()
            for given, seen in ((args, near[0]), (out, near[1])):
                for key, value in given.items():
                    if value is not seen[key]:
                        value.copy_(seen[key])

        return back


def _synchronize(tensors: dict[str, Any]) -> None:
    """Wait until what the harness wrote is there for another process to read."""
    if any(tensor.is_cuda for tensor in tensors.values()):
        import torch

        torch.cuda.synchronize()


class RemoteTimer:
    """A timer of this name in the arms' processes.

    alone: whether a call is a sample by itself; None until the first arm has found out, for all are sampled alike.
    """

    broken = False

    def __init__(
        self, name: str, hands: Hands, clock: Callable[[int], float] | None, alone: bool | None = None
    ) -> None:
        self.name, self.hands, self.clock, self.alone = name, hands, clock if name == "graph" else None, alone

    def one_pass(self, arm: sampling.Arm, stir: Callable[[], None]) -> None:
        """An empty visit and one call on each set, by the harness's clock alone; raises Thrown or Died.

        Each of two passes is on new inputs. The first fetches code and weights, which what was asked in between took
        from the caches.
        """

        def took_us(kind: type[far.Request], **parts: Any) -> float:
            stir()
            _synchronize(arm.sets[0][1])
            return self._took(hand, kind, **parts)[1]

        hand = self.hands.hands[arm.name]
        hand.empty_us.append(took_us(far.Visit, samples=0))
        took_us(far.Pass)
        hand.pass_us.append(took_us(far.Pass))

    def pass_us(self, arm: sampling.Arm) -> float | None:
        """What a pass takes, us: a quarter took less, for a busy host adds. None where the two clocks are no pair."""
        taken = sorted(self.hands.hands[arm.name].pass_us)
        return taken[len(taken) // 4] - self._empty_us() if self.clock and taken else None

    def _empty_us(self) -> float:
        """What a visit costs by itself, us: the median of the arm where that is least."""
        return min(statistics.median(hand.empty_us) for hand in self.hands.hands.values() if hand.empty_us)

    def prepare(self, arm: sampling.Arm) -> None:
        """Hand the sets over; raises Thrown or Died."""
        reply = self.begun(arm)()
        arm.prepare_us, arm.prepared_bytes = reply.prepare_us, reply.prepared_bytes

    def begun(self, arm: sampling.Arm) -> Callable[[], far.Reply]:
        """Begin to hand the sets over, and return what waits as `prepare` does; what it took is then nobody's."""
        hand, shelf = self.hands.hands[arm.name], self.hands.shelf
        sets = tuple(
            tuple({key: shelf.handle(value) for key, value in given.items()} for given in pair) for pair in arm.sets
        )
        _synchronize(arm.sets[0][1])
        answer = hand.asked(far.Attach, sets=sets, alone=self.alone)

        def ready() -> far.Reply:
            reply = answer()
            arm.calls, self.alone = reply.calls, reply.alone if self.alone is None else self.alone
            return reply

        return ready

    def visit(self, arm: sampling.Arm, samples: int) -> list[float]:
        """So many samples, us per call; raises Thrown or Died."""
        hand = self.hands.hands[arm.name]
        _synchronize(arm.sets[0][1])
        reply, wall_us = self._took(hand, far.Visit, samples=samples)
        taken = reply.samples_us
        arm.turn += samples
        if len(taken) != samples or not all(isinstance(s, float) and 0 < s < 1e12 for s in taken):
            raise Died(f"the candidate's process says {str(taken)[:80]} for {samples} samples")
        hand.visits_us.append((wall_us, arm.calls * sum(taken)))
        return list(taken)

    def _took(self, hand: Hand, kind: type[far.Request], **parts: Any) -> tuple[far.Reply, float]:
        """The reply, and by the harness's clock how long it took, us."""
        try:
            reply, took_s = hand.timed(kind, self.clock or (lambda _: time.perf_counter()), **parts)
            return reply, 1e6 * took_s
        except OSError as error:
            raise Died(hand.gone()) from error

    def clock_pct(self, arm: sampling.Arm) -> float | None:
        """What our clock read beyond the arm's own times, %, the mean over its visits; None where the two are no pair.

        A tenth of the visits on either side is left out: a host stalls now and then, and a lie that pays is told often.
        """
        hand = self.hands.hands[arm.name]
        if not self.clock or not hand.visits_us or not hand.empty_us:
            return None
        empty_us = self._empty_us()
        apart = sorted(100.0 * ((wall_us - empty_us) / own_us - 1.0) for wall_us, own_us in hand.visits_us)
        cut = len(apart) // 10
        return statistics.fmean(apart[cut : len(apart) - cut])

    def release(self, arm: sampling.Arm) -> None:
        """Have the sets given back; raises Thrown or Died."""
        self.hands.hands[arm.name].ask(far.Release)
