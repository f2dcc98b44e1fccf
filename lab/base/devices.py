"""Devices and their peaks, read from data/devices.toml.

A roofline is only as honest as the bandwidth under it, so nothing here is a bare number: each fact names its source
and keeps what contradicts it (see lab/base/facts.py). A pipe without a figure is refused rather than derived from
another pipe, because the usual ratios do not hold across parts: on GB10 one source has int8 equal to bf16, elsewhere it
is twice that. Measured ceilings stand beside the peaks as `ceilings`; they are a fallback for devices that nobody has
measured in the run at hand, never a substitute for ceilings measured beside the candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lab.base import vocabulary
from lab.base.errors import REPOSITORY, BadInput, nearest
from lab.base.facts import Fact, fact, only, text, texts

FILE = REPOSITORY / "data" / "devices.toml"
PIPES = ("bf16", "fp8", "int8", "fp4", "f32")
CEILINGS = ("read", "copy", "memset", *PIPES)
# fact -> (what its unit measures, required)
FACTS: Mapping[str, tuple[str, bool]] = {
    "compute_capability": ("capability", True),
    "sms": ("count", True),
    "memory_bandwidth": ("bandwidth", True),
    "l2_bytes": ("bytes", False),
    "smem_optin_bytes_per_block": ("bytes", False),
    "vram": ("bytes", False),
}


@dataclass(frozen=True)
class Device:
    """One GPU.

    id:       the word that cards, rows and folders use ("gb10"); aliases: other names, e.g. what the driver reports.
    facts:    compute_capability, sms, memory_bandwidth, and where known l2_bytes, smem_optin_bytes_per_block, vram.
    peaks:    pipe -> dense peak; ceilings: "read", "copy", "memset" or a pipe -> what the device was seen to reach.
    """

    id: str
    name: str
    aliases: tuple[str, ...]
    facts: Mapping[str, Fact]
    peaks: Mapping[str, Fact]
    ceilings: Mapping[str, Fact]

    def fact(self, name: str) -> Fact:
        """A fact by its name, "peak.<pipe>" and "ceiling.<name>" included; raises BadInput naming the nearest."""
        known = {
            **self.facts,
            **{f"peak.{pipe}": f for pipe, f in self.peaks.items()},
            **{f"ceiling.{key}": f for key, f in self.ceilings.items()},
        }
        if name not in known:
            raise BadInput(FILE, f'{self.id} has no "{name}" with a source', nearest(name, known))
        return known[name]

    def peak(self, pipe: str) -> Fact:
        """The dense peak of a pipe; raises BadInput when no source gives one for this device."""
        if pipe not in self.peaks:
            what = f'{self.id} has no peak for pipe "{pipe}" with a source'
            raise BadInput(FILE, what, f"it has {', '.join(self.peaks) or 'none'}; add [{self.id}.peak.{pipe}]")
        return self.peaks[pipe]

    @property
    def bandwidth(self) -> Fact:
        """The memory bandwidth."""
        return self.facts["memory_bandwidth"]

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability, e.g. (12, 1)."""
        major, minor = f"{self.facts['compute_capability'].value:.1f}".split(".")
        return int(major), int(minor)


def _device(device_id: str, table: object, path: Path) -> Device:
    if not isinstance(table, dict):
        raise BadInput(path, f"{device_id} = {table!r} is not a table", f"write [{device_id}] above its keys")
    only(table, ("name", "aliases", "peak", "ceiling", *FACTS), path, device_id)
    for name, (_, required) in FACTS.items():
        if required and name not in table:
            raise BadInput(path, f"{device_id}: {name} is missing", f"add [{device_id}.{name}] with unit and source")

    def rates(name: str, known: tuple[str, ...]) -> dict[str, Fact]:
        found = table.get(name, {})
        if not isinstance(found, dict):
            raise BadInput(path, f"{device_id}.{name} = {found!r} is not a table", f"write [{device_id}.{name}.bf16]")
        only(found, known, path, f"{device_id}.{name}")
        return {
            key: fact(entry, path, f"{device_id}.{name}.{key}", "rate" if key in PIPES else "bandwidth")
            for key, entry in found.items()
        }

    return Device(
        id=device_id,
        name=text(table, "name", path, device_id),
        aliases=texts(table, "aliases", path, device_id),
        facts={k: fact(table[k], path, f"{device_id}.{k}", FACTS[k][0]) for k in FACTS if k in table},
        peaks=rates("peak", PIPES),
        ceilings=rates("ceiling", CEILINGS),
    )


def load(path: Path = FILE) -> dict[str, Device]:
    """Every device of a file by id.

    Raises BadInput, naming the file and the key, for malformed TOML, an unknown key, a missing required fact, unit or
    source, a unit of the wrong kind, and a name that two devices claim.
    """
    devices = {key: _device(key, table, path) for key, table in vocabulary.read_toml(path).items()}
    claimed: dict[str, str] = {}
    for device in devices.values():
        for word in {device.id, *device.aliases}:
            if word in claimed:
                raise BadInput(path, f'"{word}" names {claimed[word]} and {device.id}', "give it to one of them")
            claimed[word] = device.id
    return devices


@cache
def _devices() -> Mapping[str, Device]:
    return load()


def ids() -> list[str]:
    """The ids of the known devices, in the order of the file."""
    return list(_devices())


def get(device_id: str, where: str | Path = "device") -> Device:
    """The device with this id or alias; raises BadInput naming `where` and the nearest id."""
    devices = _devices()
    if device_id in devices:
        return devices[device_id]
    for device in devices.values():
        if device_id in device.aliases:
            return device
    known = [*devices, *(a for d in devices.values() for a in d.aliases)]
    raise BadInput(where, f'device "{device_id}" is unknown', nearest(device_id, known))
