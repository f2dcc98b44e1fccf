"""What the kernels that run on a CPU have in common on the Python side; on_cpu/fibers_on_cpu.cuh is the other side."""

import ctypes
from typing import Any


class Stopped(AssertionError):
    """A stand-in found what a device would not survive or not end: why, in which block and thread."""


class StandIn(ctypes.CDLL):
    """A compiled stand-in. A call of any of its functions raises Stopped if the launch was stopped."""

    def __getitem__(self, name: str) -> Any:
        function = super().__getitem__(name)
        why = super().__getitem__("why_it_stopped")
        why.restype = ctypes.c_char_p

        def check(result: Any, *_: Any) -> Any:
            reason = why().decode()
            if reason:
                raise Stopped(reason)
            return result

        function.errcheck = check
        return function
