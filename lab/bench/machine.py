"""The machine that a row was made on: GPU, driver, versions, commit and an allow-list of the environment, and clocks.

Clocks and throttle reasons of GPU 0 are sampled around a measurement, by NVML where nvidia-ml-py is, else by
nvidia-smi; a sample names its source, because the two differ in how long they take. They are read, never set: a bench
that locks clocks measures another machine than its users have.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import subprocess
from datetime import UTC, datetime

from msgspec import structs

from lab.base.errors import REPOSITORY
from lab.row.records import Clocks, Provenance

ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING", "TRITON_INTERPRET", "PYTORCH_CUDA_ALLOC_CONF")
# Bits of NVML's clocks event (throttle) reasons that mean "slower than asked for"; idle and the applications clock
# setting are not among them. Source: NVML API reference, nvmlClocksEventReasons.
THROTTLE_BITS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


def now() -> str:
    """The time in UTC to the second, ISO 8601: when a measurement started."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit() -> tuple[str, bool | None]:
    """The checked-out commit's short hash and whether tracked files differ from it; ("unknown", None) without git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head, bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("KILLGATE_COMMIT", "unknown"), None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def provenance() -> Provenance:
    """How a row is made here: GPU (name, and an id of the card), driver, versions, commit, some of the environment."""
    import torch

    head, dirty = commit()
    there = importlib.util.find_spec("triton") is not None
    facts = Provenance(
        commit=head,
        dirty=dirty,
        stated_commit=os.environ.get("KILLGATE_COMMIT", ""),  # of a copy whose own git is behind or absent
        python=platform.python_version(),
        torch=str(torch.__version__),  # a subclass of str, which is no JSON to msgspec
        cuda=torch.version.cuda,
        triton=importlib.import_module("triton").__version__ if there else None,
        environment={key: os.environ[key] for key in ENVIRONMENT if key in os.environ},
    )
    if not torch.cuda.is_available():
        return facts
    card = torch.cuda.get_device_properties(0)
    return structs.replace(
        facts,
        gpu=card.name,
        gpu_id=same_card(smi("uuid")),
        sms=card.multi_processor_count,
        l2_bytes=card.L2_cache_size,
        driver=smi("driver_version"),
    )


def same_card(uuid: str | None) -> str | None:
    """Eight digits that are equal for rows of one physical GPU and say nothing else about it; None without a uuid."""
    return hashlib.sha256(uuid.encode()).hexdigest()[:8] if uuid else None


def smi(*fields: str) -> str | None:
    """Fields of nvidia-smi's query for GPU 0 as one comma-separated line, None where it is absent."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def reasons(mask: int) -> str:
    """The throttle reasons in a bit mask, joined by commas."""
    return ", ".join(name for bit, name in THROTTLE_BITS.items() if mask & bit)


def clocks() -> Clocks | None:
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
