"""Clocks and throttle reasons: what the driver's numbers mean, and which of the two sources is asked."""

import itertools
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from lab.bench import machine
from lab.bench.machine import parse_smi, reasons
from lab.row.records import Clocks


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (0x0, ""),
        (0x1, ""),  # idle
        (0x2, ""),  # applications clock setting: the clock that was asked for
        (0x4, "software power cap"),
        (0x8, "hardware slowdown"),
        (0x10, ""),  # sync boost
        (0x20, "software thermal slowdown"),
        (0x40, "hardware thermal slowdown"),
        (0x80, "hardware power brake"),
        (0x100, ""),  # display clock setting
        (0x45, "software power cap, hardware thermal slowdown"),
    ],
)
def test_reasons(mask: int, said: str) -> None:
    assert reasons(mask) == said


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("1980, 3201, 0x0000000000000000", Clocks("nvidia-smi", 1980, 3201, "")),
        ("345,405,0x0000000000000004", Clocks("nvidia-smi", 345, 405, "software power cap")),
        ("1980, 3201, Not Active", None),
        ("[N/A], 3201, 0x0", None),
        ("1980, 3201", None),
        ("", None),
    ],
)
def test_parse_smi(line: str, found: Clocks | None) -> None:
    assert parse_smi(line) == found


class Nvml(ModuleType):
    """nvidia-ml-py with a card that runs hot; every call fails when `broken`."""

    class NVMLError(Exception):
        """As in the library."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    def __init__(self, broken: bool) -> None:
        super().__init__("pynvml")
        self.__spec__ = ModuleSpec("pynvml", None)
        self.broken = broken

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"gpu{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid in ("GPU-1", "GPU-2")
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=7)] if handle == "GPU-1" else []

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=9 << 30)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x20

    def nvmlDeviceGetClockInfo(self, handle: str, which: int) -> int:
        return {self.NVML_CLOCK_SM: 1410, self.NVML_CLOCK_MEM: 3201}[which]


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What nvidia-smi answers, and then the fields that it was asked for."""
    told: list[Any] = ["1980, 3201, 0x0"]

    def ask(*fields: str) -> Any:
        told.append(fields)
        return told[0]

    monkeypatch.setattr(machine, "smi", ask)
    return told


def test_nvml_first(smi: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(broken=False))
    found = machine.clocks()
    assert found == Clocks("nvml", 1410, 3201, "software thermal slowdown")
    assert msgspec.to_builtins(found) == {
        "source": "nvml",
        "sm_mhz": 1410,
        "memory_mhz": 3201,
        "throttled": "software thermal slowdown",
    }
    assert len(smi) == 1


def test_a_clock_that_comes_late_too_often_is_asked_for_no_more(
    smi: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(broken=False))
    monkeypatch.setattr(machine, "_LATE_S", [])
    now = itertools.count()
    monkeypatch.setattr(machine.time, "perf_counter", lambda: 0.001 * next(now))
    assert all(machine.clocks_at_once() for _ in range(2 * machine.MOST_LATE))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: 0.01 * next(now))
    found = [machine.clocks_at_once() is not None for _ in range(machine.MOST_LATE + 1)]
    assert found == [True] * machine.MOST_LATE + [False]
    assert machine.clocks()  # is asked twice a placement, and may take its time
    assert len(smi) == 1


@pytest.mark.parametrize("installed", [True, False])
def test_nvidia_smi_where_nvml_does_not_answer(
    installed: bool, smi: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed:
        monkeypatch.setitem(sys.modules, "pynvml", Nvml(broken=True))
    else:
        monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    assert machine.clocks() == Clocks("nvidia-smi", 1980, 3201, "")
    assert smi[1:] == [("clocks.sm", "clocks.mem", "clocks_event_reasons.active")]
    smi[0] = None
    assert machine.clocks() is None


def test_who_else_uses_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(broken=False))
    assert "1 other process" in str(machine.users("GPU-1"))
    assert machine.users("GPU-1", ours=7) == ""
    assert "9216 MiB" in str(machine.users("GPU-2"))  # of a process that is not seen from here
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(broken=True))
    answers: dict[str, str | None] = {"compute-apps": "12\n[Not Found]\n", "gpu": "600"}
    monkeypatch.setattr(machine, "smi", lambda *fields, which, query="gpu": answers[query])
    assert "2 other processes" in str(machine.users("GPU-1"))
    answers["compute-apps"] = ""
    assert machine.users("GPU-1") == ""
    answers["compute-apps"] = None
    assert machine.users("GPU-1") is None


def test_a_gpu_among_several_is_asked_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(stdout="GPU-a\nGPU-b\nGPU-c\n")

    monkeypatch.setattr(machine.subprocess, "run", run)
    monkeypatch.setattr(machine, "uuid", lambda: "GPU-b")
    for visible, card, seen in (
        (None, "0", ["GPU-a", "GPU-b", "GPU-c"]),
        ("GPU-c,GPU-a", "GPU-c", ["GPU-c", "GPU-a"]),
        ("1", "GPU-b", ["GPU-b"]),
        ("", "0", []),
    ):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert machine.gpus() == seen
        machine.smi("uuid")
        assert commands[-1][1:3] == ["-i", card]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-c")
    assert machine.provenance().environment["CUDA_VISIBLE_DEVICES"] == f"GPU-{machine.same_card('GPU-c')}"


@pytest.mark.gpu
def test_a_gpu_has_clocks() -> None:
    found = machine.clocks()
    assert found is not None
    assert found.sm_mhz > 100
    assert found.memory_mhz > 100
