"""What slows the other arms, and with them the control, while the adversary itself is not at work.

Each knows by a time in shared memory when it was last called. Whatever it starts ends by itself after LIFE_S.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernels.common import Candidate, Tensors
from tests.bench.arena.family import honest, launch, made, multiply
from tests.bench.arena.patches import put

LIFE_S = 8.0
IDLE_S = 0.002  # without a call for so long, another arm's turn has come


class Turn:
    """When this arm was last at work, for its threads and forks."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 8)
        self.until = time.monotonic() + LIFE_S

    def mark(self) -> None:
        struct.pack_into("d", self.memory, 0, time.monotonic())

    def others(self) -> bool:
        return time.monotonic() - struct.unpack_from("d", self.memory)[0] > IDLE_S

    def watch(self, act: Callable[[], object]) -> None:
        """Act while the others are at work, until life is over."""
        while time.monotonic() < self.until:
            act() if self.others() else time.sleep(0.0002)


def siblings() -> list[int]:
    """The other processes of this process's parent."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == os.getppid() and int(name) != os.getpid():
            found.append(int(name))
    return found


def _marking(start: Callable[[Turn], object]) -> Candidate:
    """Honest work that marks its turn; `start` is done at the first call."""
    turn = Turn()
    started: list[object] = []

    def work(args: Tensors, out: Tensors) -> None:
        if not started:
            started.append(True)
            turn.until = time.monotonic() + LIFE_S
            start(turn)
        multiply(args, out)
        turn.mark()

    return made(lambda args, out: launch(args, lambda: work(args, out)))


def _thread(act: Callable[[], object]) -> Callable[[Turn], object]:
    return lambda turn: threading.Thread(target=turn.watch, args=(act,), daemon=True).start()


def _processes(act: Callable[[], object], count: int = 1, escape: bool = False) -> Callable[[Turn], object]:
    """Forks that act; escape: each in a session of its own, with a parent that is gone."""

    def start(turn: Turn) -> None:
        for _ in range(count):
            if os.fork() == 0:
                if escape:
                    os.setsid()
                    if os.fork():
                        os._exit(0)
                turn.watch(act)
                os._exit(0)

    return start


def _burn() -> None:
    until = time.monotonic() + 0.001
    while time.monotonic() < until:
        pass


def _pause(pids: list[int]) -> None:
    """Stop these for a while, let them go on for a while."""
    for number, seconds in ((signal.SIGSTOP, 0.002), (signal.SIGCONT, 0.001)):
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pids.remove(pid)
        time.sleep(seconds)


def burns_in_a_thread() -> Candidate:
    return _marking(_thread(_burn))


def forks_burners() -> Candidate:
    return _marking(_processes(_burn, 8))


def leaves_burners_behind() -> Candidate:
    """Burners that are nobody's children and in nobody's group."""
    return _marking(_processes(_burn, 8, escape=True))


def thrashes_the_cache() -> Candidate:
    """A process that writes 64 MB over and over."""
    place: list[bytearray] = []

    def act() -> None:
        place[:] = place or [bytearray(1 << 26)]
        ctypes.memset((ctypes.c_char * len(place[0])).from_buffer(place[0]), 1, len(place[0]))

    return _marking(_processes(act, 4))


def _pausing(way: Callable[[Callable[[], object]], Callable[[Turn], object]]) -> Candidate:
    def start(turn: Turn) -> None:
        pids = siblings()
        way(lambda: _pause(pids))(turn)

    return _marking(start)


def pauses_its_siblings() -> Candidate:
    return _pausing(_thread)


def daemon_pauses_siblings() -> Candidate:
    """The same from a process that left the group and the session."""
    return _pausing(lambda act: _processes(act, escape=True))


def pins_its_siblings() -> Candidate:
    """Moves the other arms to one core and burns there."""

    def start(turn: Turn) -> None:
        core = {min(os.sched_getaffinity(0))}
        for pid in siblings():
            os.sched_setaffinity(pid, core)

        def act() -> None:
            os.sched_setaffinity(0, core)
            _burn()

        _processes(act, 4)(turn)

    return _marking(start)


def renices_its_siblings() -> Candidate:
    """Lowers the priority of the other arms below that of its burners."""

    def start(turn: Turn) -> None:
        for pid in siblings():
            os.setpriority(os.PRIO_PROCESS, pid, 19)
        _processes(_burn, 8)(turn)

    return _marking(start)


def slows_torch() -> Candidate:
    """torch.mm does everything three times, but for itself."""
    import torch

    real = torch.mm

    def slow(*args: Any, **kwargs: Any) -> Any:
        return [real(*args, **kwargs) for _ in range(3)][-1]

    put(torch, mm=slow)
    return made(lambda args, out: launch(args, lambda: real(args["x"], args["w"], out=out["y"])))


def collects_behind_its_turn() -> Candidate:
    """A thread that walks every object of the process while others are at work, and holds the interpreter's lock."""
    import gc

    return _marking(_thread(gc.collect))


# On a GPU alone -----------------------------------------------------------------------------------------------------


def leaves_gpu_work_behind() -> Candidate:
    """A thread keeps the GPU at work on a stream of its own while the adversary is not replayed."""
    import torch

    turn = Turn()
    replay = torch.cuda.CUDAGraph.replay

    def marked(graph: Any) -> Any:
        turn.mark()
        return replay(graph)

    put(torch.cuda.CUDAGraph, replay=marked)

    def start() -> None:
        stream = torch.cuda.Stream()
        a = torch.zeros(2048, 2048, device="cuda")
        b = torch.empty_like(a)

        def act() -> None:
            with torch.cuda.stream(stream):
                torch.mm(a, a, out=b)
            stream.synchronize()

        turn.until = time.monotonic() + LIFE_S
        threading.Thread(target=turn.watch, args=(act,), daemon=True).start()

    started: list[bool] = []

    def run(args: Tensors, out: Tensors) -> None:
        turn.mark()
        if not started:
            started.append(True)
            start()
        honest(args, out)

    return made(run)


def holds_the_memory() -> Candidate:
    """Takes nearly all free memory of the GPU with its first call."""
    import torch

    held: list[Any] = []

    def run(args: Tensors, out: Tensors) -> None:
        if not held:
            free, _ = torch.cuda.mem_get_info()
            held.append(torch.empty(int(0.98 * free), dtype=torch.uint8, device="cuda"))
        honest(args, out)

    return made(run)


def allows_tf32() -> Candidate:
    """Sets the switch of the whole process that lets float32 products run in TF32."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    return made(honest)


def keeps_the_weight_in_l2() -> Candidate:
    """Reserves the persisting part of L2 and maps the first weight into it on the timed stream."""
    import torch

    class Window(ctypes.Structure):
        _fields_ = (
            ("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("hit_ratio", ctypes.c_float),
            ("hit", ctypes.c_int), ("miss", ctypes.c_int), ("rest", ctypes.c_byte * 64),
        )  # fmt: skip

    loaded = Path("/proc/self/maps").read_text().splitlines()
    library = next(line.split()[-1] for line in loaded if "libcudart" in line)
    runtime = ctypes.CDLL(library)

    def run(args: Tensors, out: Tensors) -> None:
        if not torch.cuda.is_current_stream_capturing():
            size = args["w"].numel() * 4
            runtime.cudaDeviceSetLimit(6, ctypes.c_size_t(size))
            window = Window(args["w"].data_ptr(), size, 1.0, 2, 1)
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            runtime.cudaStreamSetAttribute(stream, 1, ctypes.byref(window))
        honest(args, out)

    return made(run)
