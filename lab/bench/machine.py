"""The machine that a row was made on: GPU, driver, versions, commit and an allow-list of the environment, and clocks.

Clocks and throttle reasons of CUDA's first GPU are sampled around a measurement, by NVML where nvidia-ml-py is, else by
nvidia-smi; a sample names its source, because the two differ in how long they take. They are read, never set: a bench
that locks clocks measures another machine than its users have. Who else uses a GPU is asked in the same way.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

from msgspec import structs

from lab.base.errors import REPOSITORY
from lab.row.records import Clocks, Provenance

T = TypeVar("T")
ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING", "TRITON_INTERPRET", "PYTORCH_CUDA_ALLOC_CONF")
AT_ONCE_S, MOST_LATE = 0.005, 10  # the first answers of a process load the library and find the GPU
_LATE_S: list[float] = []
# Bits of NVML's clocks event (throttle) reasons that mean "slower than asked for"; idle and the applications clock
# setting are not among them. Source: NVML API reference, nvmlClocksEventReasons.
THROTTLE_BITS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
IDLE_MIB = 4096  # of a GPU's memory, which a driver may hold; more is somebody's whose process another namespace hides


def now() -> str:
    """The time in UTC to the second, ISO 8601: when a measurement started."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit() -> tuple[str, bool | None]:
    """The checked-out commit's short hash and whether tracked files differ from it; ("unknown", None) without git.

    Those of profiles/ do not count: a run that is continued adds to them.
    """
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head, bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!profiles"))
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
        environment={key: _masked(os.environ[key]) for key in ENVIRONMENT if key in os.environ},
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


def _masked(devices: str) -> str:
    """A list of GPUs in which a UUID is no more than its `same_card`."""
    return ",".join(f"GPU-{same_card(x)}" if x.startswith(("GPU-", "MIG-")) else x for x in devices.split(","))


def uuid() -> str:
    """The UUID of the GPU that is CUDA's first here, as NVML and nvidia-smi write it."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def card() -> str:
    """What NVML and nvidia-smi know CUDA's first GPU by: its UUID where others are hidden, else its number."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    return visible if visible.startswith(("GPU-", "MIG-")) else uuid() if visible.isdecimal() else "0"


def gpus() -> list[str]:
    """The UUIDs of this host's GPUs that CUDA_VISIBLE_DEVICES leaves visible; [] without nvidia-smi."""
    every = (smi("uuid", which="") or "").split()
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return every
    by_name = {str(number): name for number, name in enumerate(every)} | {name: name for name in every}
    return [by_name[word] for word in asked.split(",") if word in by_name]


def smi(*fields: str, which: str | None = None, query: str = "gpu") -> str | None:
    """Fields of nvidia-smi's query as comma-separated lines, None where it is absent or fails.

    which: a GPU, "" all of them, default CUDA's first here.
    """
    which = card() if which is None else which
    command = ["nvidia-smi", *(["-i", which] if which else []), f"--query-{query}={','.join(fields)}"]
    command.append("--format=csv,noheader,nounits")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _nvml(which: str, ask: Callable[[Any, Any], T]) -> T | None:
    """What `ask` makes of NVML and a GPU's handle; None without nvidia-ml-py, or where NVML does not answer."""
    if importlib.util.find_spec("pynvml") is None:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        by_number = which.isdecimal()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(int(which)) if by_number else pynvml.nvmlDeviceGetHandleByUUID(which)
        return ask(pynvml, gpu)
    except pynvml.NVMLError:
        return None


def users(which: str, ours: int = 0) -> str | None:
    """Who uses a GPU: "" nobody, else a phrase; None where neither NVML nor nvidia-smi says. ours: a pid left out."""
    pids = _nvml(which, lambda nvml, gpu: {p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)})
    used = _nvml(which, lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used >> 20)
    if pids is None:
        listed, used = smi("pid", which=which, query="compute-apps"), smi("memory.used", which=which)
        if listed is None:
            return None
        pids = {int(word) if word.isdecimal() else -1 for word in listed.split()}
    if others := pids - {ours}:
        return f"{len(others)} other process{'es' * (len(others) > 1)} on it"
    used = int(str(used)) if str(used).isdecimal() else 0  # a GPU that shares the host's memory has none of its own
    return f"{used} MiB of its memory in use" if used > IDLE_MIB and not pids else ""


def reasons(mask: int) -> str:
    """The throttle reasons in a bit mask, joined by commas."""
    return ", ".join(name for bit, name in THROTTLE_BITS.items() if mask & bit)


def _sample(nvml: Any, gpu: Any) -> Clocks:
    mask = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
    sm, memory = (int(nvml.nvmlDeviceGetClockInfo(gpu, x)) for x in (nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM))
    return Clocks("nvml", sm, memory, reasons(mask))


def clocks() -> Clocks | None:
    """One sample of CUDA's first GPU, None where neither source answers."""
    if found := _nvml(card(), _sample):
        return found
    line = smi("clocks.sm", "clocks.mem", "clocks_event_reasons.active")
    return parse_smi(line) if line else None


def clocks_at_once() -> Clocks | None:
    """As `clocks`, by NVML alone: nvidia-smi is a process of its own, which takes longer than a visit.

    None from then on where NVML was late too often: a comparison asks a thousand times.
    """
    if len(_LATE_S) >= MOST_LATE:
        return None
    began = time.perf_counter()
    found = _nvml(card(), _sample)
    if (took := time.perf_counter() - began) > AT_ONCE_S:
        _LATE_S.append(took)
    return found


def parse_smi(line: str) -> Clocks | None:
    """Clocks from nvidia-smi's line "1980, 3201, 0x0000000000000000"; None when it holds no numbers."""
    parts = [part.strip() for part in line.split(",")]
    try:
        return Clocks("nvidia-smi", int(parts[0]), int(parts[1]), reasons(int(parts[2], 16)))
    except (IndexError, ValueError):
        return None
