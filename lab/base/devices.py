"""Devices and their peaks, read from data/devices.toml, and from what one's own rows and card directory hold.

A GPU that nobody listed has a file beside its rows, profiles/<device>/device.toml, with what its driver reports
(`lab measure` writes it): its peaks are unknown there, and its shares are of ceilings that were measured.

A roofline is only as honest as the bandwidth under it, so nothing here is a bare number: each fact names its source
and keeps what contradicts it (see lab/base/facts.py). A pipe without a figure is refused rather than derived from
another pipe, because the usual ratios do not hold across parts: on GB10 one source has int8 equal to bf16, elsewhere it
is twice that. Measured ceilings stand beside the peaks as `ceilings`; they are a fallback for devices that nobody has
measured in the run at hand, never a substitute for ceilings measured beside the candidates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import force_setattr

from lab.base import facts, files, own
from lab.base.errors import REPOSITORY, BadInput, nearest, shown
from lab.base.facts import Fact

FILE = REPOSITORY / "data" / "devices.toml"
DRIVER = "device.toml"  # beside the rows of a GPU that no list has
PIPES = ("bf16", "fp8", "int8", "fp4", "f32")
CEILINGS = ("read", "copy", "memset", *PIPES)
OTHER_MAKERS = ("AMD", "Intel", "Apple")  # of GPUs without CUDA, as their names begin
# Base units that no GPU is outside of: what lies there is a slip of the unit.
BOUNDS: Mapping[str, tuple[float, float, str]] = {
    "bandwidth": (50e9, 100e12, "50 GB/s to 100 TB/s"),
    "rate": (1e12, 100e15, "1 TFLOP/s to 100 PFLOP/s"),
    "capability": (5.0, 20.9, "5.0 to 20.9"),
}
# fact -> what its unit measures
FACTS: Mapping[str, str] = {
    "compute_capability": "capability",
    "sms": "count",
    "sm_clock": "clock",
    "memory_bandwidth": "bandwidth",
    "l2_bytes": "bytes",
    "smem_optin_bytes_per_block": "bytes",
    "vram": "bytes",
}


class Device(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One GPU.

    id:       the word that cards, rows and folders use ("gb10"); aliases: other names, e.g. what the driver reports.
    file:     where it stands.
    sm_clock: the highest that the multiprocessors run at, which no power cap holds down.
    peaks:    pipe -> dense peak; ceilings: "read", "copy", "memset" or a pipe -> what the device was seen to reach.
    """

    id: str = ""
    file: str = ""
    name: files.Text
    aliases: tuple[str, ...] = ()
    compute_capability: Fact | None = None
    sms: Fact | None = None
    sm_clock: Fact | None = None
    memory_bandwidth: Fact | None = None
    l2_bytes: Fact | None = None
    smem_optin_bytes_per_block: Fact | None = None
    vram: Fact | None = None
    peaks: dict[str, Fact] = field(default_factory=dict, name="peak")
    ceilings: dict[str, Fact] = field(default_factory=dict, name="ceiling")

    def __post_init__(self) -> None:
        if self.id:
            raise ValueError('unknown key "id"; leave it out, it is the name of the table')
        if self.file:
            raise ValueError('unknown key "file"; leave it out, it is the file that holds the table')
        for name, fact in self.facts.items():
            fact.measured_in(FACTS[name], name)
            if name in ("memory_bandwidth", "compute_capability"):
                _within(fact, FACTS[name], name)
        if self.sms and any(v.value % 1 for v in self.sms.values):
            raise ValueError(f"sms: {self.sms.value:g} is no whole number; count multiprocessors")
        if self.compute_capability and any(v.value != round(v.value, 1) for v in self.compute_capability.values):
            raise ValueError(f"compute_capability: {self.compute_capability.value:g} is no MAJOR.MINOR; give e.g. 9.0")
        if self.compute_capability and not self.cuda:
            raise ValueError(f"compute_capability: {self.name} is no CUDA GPU; leave it out")
        for table, rates, known in (("peak", self.peaks, PIPES), ("ceiling", self.ceilings, CEILINGS)):
            for name, rate in rates.items():
                if name not in known:
                    raise ValueError(f'{table}: unknown key "{name}"; {nearest(name, known)}')
                rate.measured_in(quantity := "rate" if name in PIPES else "bandwidth", f"{table}.{name}")
                if table == "peak":
                    _within(rate, quantity, f"{table}.{name}")

    @property
    def facts(self) -> Mapping[str, Fact]:
        """Those of FACTS that a source gives."""
        return {name: fact for name in FACTS if (fact := getattr(self, name)) is not None}

    @property
    def named(self) -> Mapping[str, Fact]:
        """Every fact that a source gives, those of the tables as "peak.<pipe>" and "ceiling.<name>"."""
        tables = (("", self.facts), ("peak.", self.peaks), ("ceiling.", self.ceilings))
        return {table + name: fact for table, of in tables for name, fact in of.items()}

    def fact(self, name: str) -> Fact:
        """A fact by its name in `named`; raises BadInput naming the nearest."""
        return files.called(name, self.named, f"sourced fact of {self.id}", self.where)

    def peak(self, pipe: str) -> Fact:
        """The dense peak of a pipe; raises BadInput when no source gives one for this device."""
        if pipe not in self.peaks:
            what = f'{self.id} has no peak for pipe "{pipe}" with a source'
            raise BadInput(self.where, what, f"it has {', '.join(self.peaks) or 'none'}; add [{self.id}.peak.{pipe}]")
        return self.peaks[pipe]

    def knows(self, pipe: str | None) -> bool:
        """Whether a source gives both the peak of a pipe and the bandwidth."""
        return pipe in self.peaks and self.memory_bandwidth is not None

    @property
    def where(self) -> Path:
        """The file that it stands in."""
        return Path(self.file) if self.file else FILE

    @property
    def cuda(self) -> bool:
        """Whether it is a CUDA GPU, by its maker's name."""
        return self.name.partition(" ")[0] not in OTHER_MAKERS

    @property
    def bandwidth(self) -> Fact:
        """DRAM bandwidth; raises BadInput when no source gives one."""
        return self._sourced("memory_bandwidth")

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability, e.g. (12, 1); raises BadInput for a GPU that has none."""
        if not self.cuda:
            what = f"{self.id} is no CUDA GPU, and no kernel here runs on it"
            offered = f"recorded verdicts (`lab judge`) and floors (`lab roofline FAMILY --device {self.id}`)"
            raise BadInput(self.where, what, f"take what there is for it: {offered}")
        major, minor = f"{self._sourced('compute_capability').value:.1f}".split(".")
        return int(major), int(minor)

    def _sourced(self, name: str) -> Fact:
        if name not in self.facts:
            raise BadInput(self.where, f"{self.id} has no {name} with a source", f"add [{self.id}.{name}]")
        return self.facts[name]


def _within(fact: Fact, quantity: str, name: str) -> None:
    """Raise ValueError for a value that no GPU has."""
    least, most, words = BOUNDS[quantity]
    for one in fact.values:
        if not least <= facts.to_base(one.value, fact.unit) <= most:
            raise ValueError(f"{name}: {one.value:g} {fact.unit} is no GPU's; give {words}, and mind the unit")


def load(path: Path = FILE) -> dict[str, Device]:
    """Every device of a file by id.

    Raises BadInput as `facts.read` does, and for a unit of the wrong quantity and a value that no GPU has.
    """
    found = facts.read(path, Device)
    for device in found.values():
        force_setattr(device, "file", str(path))
    return found


def every() -> Mapping[str, Device]:
    """The known devices by id, in the order of the files."""
    places = [path for top in own.profiles() for path in sorted(top.glob(f"*/{DRIVER}"))]
    places += [path for top in [own.folder()] if top and (path := top / own.DEVICES).exists()]
    return _read((FILE, *places), tuple(path.stat().st_mtime_ns for path in places))


@cache
def _read(places: tuple[Path, ...], _: tuple[int, ...]) -> Mapping[str, Device]:
    found: dict[str, Device] = {}
    for path in places:
        new = load(path)
        if path.name == own.DEVICES and path != FILE:
            _refuse_taken(path, new, found)
        found |= new
    return found


def _refuse_taken(path: Path, new: Mapping[str, Device], before: Mapping[str, Device]) -> None:
    """Raise BadInput for a name that a device of another file has.

    One's own list may hold a GPU that the driver's words describe so far, under its id: that is how its peaks come in.
    """
    names = {word: other for other in before.values() for word in (other.id, other.name, *other.aliases)}
    for device in new.values():
        for word in (device.id, device.name, *device.aliases):
            other = names.get(word)
            if other and not (other.id == device.id and other.where.name == DRIVER):
                remedy = f"call it [{other.id}]" if other.where.name == DRIVER else "give it another, or leave it out"
                what = f'{device.id}: "{word}" names {other.id} of {shown(other.where)} already'
                raise BadInput(path, what, remedy)


def ids() -> list[str]:
    """The ids of the known devices, in the order of the files."""
    return list(every())


def reported(name: str, facts_: Mapping[str, tuple[float, str]]) -> str:
    """The text of a device.toml: what a driver reports of a GPU, fact -> (value, unit), and no peaks."""
    word = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    lines = ["# As the driver reports it. Peaks are unknown: add them from a datasheet, as in data/devices.toml.", ""]
    lines += [f"[{word}]", f"name = {json.dumps(name)}"]
    source = 'source = "reported by the driver", kind = "measured"'
    lines += [f'{key} = {{ unit = "{unit}", value = {value!r}, {source} }}' for key, (value, unit) in facts_.items()]
    return "\n".join(lines) + "\n"


def get(device_id: str, where: str | Path = "device") -> Device:
    """The device with this id or alias; raises BadInput naming `where` and the nearest id."""
    return facts.by_name("device", device_id, every(), where)
