"""Clocks and throttle reasons of GPU 0, sampled around a measurement: NVML where nvidia-ml-py is, else nvidia-smi.

Clocks are read, never set: a bench that locks clocks measures another machine than its users have. A sample names its
source, because the two differ in how long they take: nvidia-smi is a process to start.
"""

from __future__ import annotations

import importlib.util

from lab.bench.provenance import smi
from lab.row.records import Clocks

# Bits of NVML's clocks event (throttle) reasons that mean "slower than asked for"; idle and the applications clock
# setting are not among them. Source: NVML API reference, nvmlClocksEventReasons.
THROTTLE_BITS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


def reasons(mask: int) -> str:
    """The throttle reasons in a bit mask, joined by commas."""
    return ", ".join(name for bit, name in THROTTLE_BITS.items() if mask & bit)


def sample() -> Clocks | None:
    """One sample of GPU 0, None where neither source answers."""
    if importlib.util.find_spec("pynvml") is not None:
        import pynvml

        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            mask = int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
            sm = int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
            memory = int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM))
            return Clocks("nvml", sm, memory, reasons(mask))
        except pynvml.NVMLError:
            pass
    line = smi("clocks.sm", "clocks.mem", "clocks_event_reasons.active")
    return parse_smi(line) if line else None


def parse_smi(line: str) -> Clocks | None:
    """Clocks from nvidia-smi's line "1980, 3201, 0x0000000000000000"; None when it holds no numbers."""
    parts = [part.strip() for part in line.split(",")]
    try:
        return Clocks("nvidia-smi", int(parts[0]), int(parts[1]), reasons(int(parts[2], 16)))
    except (IndexError, ValueError):
        return None
