"""Where arms run and what times them: a GPU, or what a test gives in its place."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lab.bench import sampling
from lab.check import families


@dataclass(frozen=True)
class Backend:
    """Where arms run and what times them; tests give one that needs no GPU.

    load:  imports a family with its candidates; bare: the same without importing any of them.
    apart: whether each arm has a process of its own, and this one then never imports a candidate.
    clock: the harness's own beside an arm, s, given the arm's process.
    clock_pct: how far it and the arm's own times may be apart, %; None where they are no pair.
    clocks, clocks_at_once: one sample of the GPU's; the second takes no time to speak of, or says nothing.
    """

    device: str
    l2_bytes: int
    timer: Callable[[str, str, int], sampling.Timer]
    clocks: Callable[[], Any]
    load: Callable[[str], families.Family] = families.load
    memory_bytes: float = math.inf
    apart: bool = False
    bare: Callable[[str], families.Family] = families.bare
    clock: Callable[[int], float] = lambda pid: time.perf_counter()
    clock_pct: float | None = None
    clocks_at_once: Callable[[], Any] = lambda: None

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def free(self) -> None:
        """Give the device's memory that nothing holds back to it, so that the next allocation is a new one."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


def gpu() -> Backend:
    """The current CUDA GPU, each arm in a process of its own."""
    import torch

    from lab.bench import machine, timers

    card = torch.cuda.get_device_properties(0)
    return Backend(
        "cuda", card.L2_cache_size, timers.named, machine.clocks, memory_bytes=card.total_memory, apart=True,
        clock_pct=5.0, clocks_at_once=machine.clocks_at_once,
    )  # fmt: skip


def added_bytes(args: dict[str, Any], inputs: dict[str, Any]) -> int | None:
    """Memory that `prepare` added to the inputs': packed copies and workspace, each storage once.

    None where `args` holds a library's object, whose memory is not seen.
    """
    tensors = [value for value in args.values() if hasattr(value, "untyped_storage")]
    others = [value for value in args.values() if not hasattr(value, "untyped_storage")]
    if not all(isinstance(value, (int, float, str)) for value in others):
        return None
    theirs = {tensor.untyped_storage().data_ptr() for tensor in inputs.values()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for place, size in storages.items() if place not in theirs)
