"""Every persisted record as a type: what stands on one line of profiles/<device>/<phase>/<run>/<file>.jsonl.

A type says for each key what it holds and what its absence means, so the files of every day since the first read as
they are: a key that came later has the default that the code assumed before it. A key that no type knows is refused
with the nearest one. What the types cannot say (no performance before the check is green) `wrong` does. The schema
version is the first key of a line; a type whose version grows says in `UPGRADES` how an older line becomes a newer one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

Status = Literal["ok", "incorrect", "suspect", "error", "oom", "timeout", "skipped"]
Role = Literal["control", "candidate", "peer"]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Magnitude = Annotated[float, msgspec.Meta(ge=0)]
PERFORMANCE = ("median_us", "iqr_us", "min_us", "samples_us", "blocks_us", "n")
JUDGED = ("ok", "incorrect", "suspect")  # an arm that ran out of memory, say, was not judged
REST = 4.0  # a rested GEMM is followed by so many times its own duration of idle time


class Clocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sample. sm_mhz, memory_mhz: current clocks; throttled: why the SM clock is held down, "" when it is not."""

    source: str
    sm_mhz: int
    memory_mhz: int
    throttled: str


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="schema", tag=1):
    """One line of a file. FILE: its name; WORD: what such a line is called.

    UPGRADES: older schema version -> what makes its line, as plain data, one of the next version.
    """

    FILE: ClassVar[str] = ""
    WORD: ClassVar[str] = "record"
    UPGRADES: ClassVar[Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]]] = {}

    def to_json(self) -> dict[str, Any]:
        """The record as a program prints it: every key, null where there is nothing."""
        every = {key: msgspec.to_builtins(getattr(self, key)) for key in self.__struct_fields__}
        return {"schema": self.__struct_config__.tag, **every}

    def wrong(self) -> tuple[str, str] | None:
        """(what is wrong, remedy) of a record whose keys each are as they must be; None when nothing is."""
        return None


class Provenance(Record, frozen=True, kw_only=True):
    """How a record was made: versions, commit, and the GPU by its name and by eight digits that say nothing else.

    commit, dirty: of the checkout, "unknown" and None without git; stated_commit: of a copy whose own git is behind.
    environment: an allow-list.
    """

    commit: str = "unknown"
    dirty: bool | None = None
    stated_commit: str = ""
    python: str = ""
    torch: str = ""
    cuda: str | None = None
    triton: str | None = None
    environment: dict[str, str] = {}
    gpu: str = ""
    gpu_id: str | None = None
    sms: int | None = None
    l2_bytes: int | None = None
    driver: str | None = None


class Measurement(Provenance, frozen=True, kw_only=True, tag=1):
    """One arm at one workload in one run. Only an arm that passed both checks has a performance field.

    beside:          an arm that the card names beside its two, and the gate does not ask about.
    config:          what the candidate launches for this workload, in words.
    errors:          relative error by output; relative_error is the largest, None when nothing was computed.
    flops, bytes:    compulsory work of the workload; pipe: the peak that it runs on.
    rest:            idle time after each visit, as a multiple of the visit; None in rows from before it was a choice.
    n, calls, sets:  samples, calls a sample, distinct argument sets.
    prepare_us:      wall time of the one-off repacking; prepared_bytes: memory it added, None where it is not seen.
    again_*:         of the control's second self (A/A); aa_pct: the noise floor that the two of them showed.
    """

    FILE: ClassVar[str] = "rows.jsonl"
    WORD: ClassVar[str] = "row"

    device: str
    phase: str
    family: str
    arm: Role
    name: str
    precision: str
    workload_id: str
    workload: dict[str, int | str]
    status: Status
    run: str
    sources: str = ""
    beside: bool = False
    inputs: str = ""
    config: str = ""
    message: str = ""
    relative_error: Magnitude | None = None
    errors: dict[str, float | None] = {}
    relative_error_after: float | None = None
    flops: float | None = None
    bytes: float | None = None
    pipe: str | None = None
    seed: int | None = None
    started: str = ""
    wanted_timer: str = ""
    wanted_l2: str = ""
    rest: float | None = None
    card_hash: str = ""
    gate_hash: str | None = None
    profiled: bool = False
    median_us: Positive | None = None
    iqr_us: Magnitude | None = None
    min_us: Positive | None = None
    stdev_us: float | None = None
    n: int | None = None
    calls: int | None = None
    sets: int | None = None
    converged: bool | None = None
    sd_pct: float | None = None
    drift_pct: float | None = None
    samples_us: tuple[float, ...] | None = None
    blocks_us: tuple[float, ...] | None = None
    again_samples_us: tuple[float, ...] | None = None
    again_blocks_us: tuple[float, ...] | None = None
    prepare_us: float | None = None
    prepared_bytes: int | None = None
    timer: str | None = None
    l2: str | None = None
    order: tuple[str, ...] | None = None
    aa_pct: float | None = None
    timed_against: str = ""
    clocks: tuple[Clocks, ...] = ()
    throttled: str = ""

    @property
    def id(self) -> str:
        """Its folder under profiles/, arm and workload."""
        return f"profiles/{self.device}/{self.phase}/{self.run}#{self.arm}@{self.workload_id}"

    @property
    def ok(self) -> bool:
        """Whether its time may be used: both checks passed and no ceiling doubts it."""
        return self.status == "ok"

    @property
    def time_us(self) -> float | None:
        """Its median, None unless the row is ok."""
        return self.median_us if self.ok else None

    def wrong(self) -> tuple[str, str] | None:
        """No number before the check is green."""
        has = [key for key in PERFORMANCE if getattr(self, key) is not None]
        if has and self.status not in ("ok", "suspect"):
            return f'a row with status {self.status} carries "{has[0]}"', "no number before the check is green"
        return None


# Sizes of a buffer that a kernel updates in place; the bandwidth depends on the size.
UPDATE_MIB = (3, 12, 24, 48, 96, 192, 384, 768)
_UPDATE = "{} MiB of float32 negated where they lie, read plus write, in a CUDA graph over distinct stretches of 2 GiB"
PRODUCTS: Mapping[str, tuple[str, str]] = {
    "bf16": ("TFLOP/s", "bf16 products on {}, best of four shapes"),
    "fp8": ("TFLOP/s", "e4m3 products with float32 scales and fast accumulation on {}, best of three shapes"),
    "int8": ("TOP/s", "int8 products on {}, best of three shapes"),
}
_RESTED = f"each followed by {REST:g} times its duration of idleness, as rows with rest are taken"
_PLAIN, _QUIET = "random data", "zeros, operands that toggle no bit and so draw least"
CEILINGS: Mapping[str, tuple[str, str]] = {
    # name -> (unit, method)
    "copy_kernel": ("GB/s", "device copy of 4 GiB by the framework's copy kernel, read plus write"),
    "copy_graph": ("GB/s", "the same copy captured in a CUDA graph, a memcpy node, read plus write"),
    "read": ("GB/s", "4 GiB of float32 read and summed, best of four launch shapes"),
    "write": ("GB/s", "4 GiB filled"),
    **{f"update_{mib}_mib": ("GB/s", _UPDATE.format(mib) + ", best of four launch shapes") for mib in UPDATE_MIB},
    "l2_read": ("GB/s", "a 16 MiB buffer read over and over past the L1"),
    **{pipe: (unit, method.format(_PLAIN)) for pipe, (unit, method) in PRODUCTS.items()},
    **{f"{p}_rested": (unit, f"{method.format(_PLAIN)}, {_RESTED}") for p, (unit, method) in PRODUCTS.items()},
    **{f"{p}_quiet": (unit, f"{method.format(_QUIET)}, {_RESTED}") for p, (unit, method) in PRODUCTS.items()},
    "launch": ("us", "an empty kernel launched eagerly, back to back"),
    "graph_gap": ("us", "an empty kernel as one of hundreds of nodes of a graph, less its own duration by Kineto"),
}


class Ceiling(Provenance, frozen=True, kw_only=True, tag=1):
    """What a microbenchmark reached: the best of its samples, for times the least."""

    FILE: ClassVar[str] = "ceilings.jsonl"
    WORD: ClassVar[str] = "ceiling"

    device: str
    name: str
    value: Positive
    unit: str
    method: str
    run: str
    started: str
    samples: tuple[float, ...]
    clocks: tuple[Clocks, ...] = ()

    def wrong(self) -> tuple[str, str] | None:
        """A name that we measure, in its unit."""
        if self.name in CEILINGS and self.unit == CEILINGS[self.name][0]:
            return None
        return f'ceiling "{self.name}" in {self.unit}', "valid: " + ", ".join(CEILINGS)


class Counter(Provenance, frozen=True, kw_only=True, tag=1):
    """One kernel launch of one call under ncu, `launch` of `launches`; bench/counters.py says what each figure is.

    Durations are perturbed: a row says `profiled` and none is ever judged.
    """

    FILE: ClassVar[str] = "counters.jsonl"
    WORD: ClassVar[str] = "counter row"

    device: str
    phase: str
    family: str
    arm: Role
    name: str
    workload_id: str
    status: Status
    run: str
    started: str
    profiled: bool
    message: str = ""
    l2: str = ""
    relative_error: float | None = None
    workload: dict[str, int | str] = {}
    flops: float | None = None
    bytes: float | None = None
    pipe: str | None = None
    config: str = ""
    launch: int = 0
    launches: int = 0
    kernel: str = ""
    duration_us: float | None = None
    sm_clock_hz: float | None = None
    dram_read_bytes: float | None = None
    dram_write_bytes: float | None = None
    dram_pct: float | None = None
    l2_hit_pct: float | None = None
    l2_pct: float | None = None
    l2_to_sm_bytes: float | None = None
    shared_pct: float | None = None
    tensor_pct: float | None = None
    issue_pct: float | None = None
    sm_active_pct: float | None = None
    occupancy_pct: float | None = None
    registers: float | None = None
    shared_bytes: float | None = None
    grid: float | None = None
    block: float | None = None
    waves: float | None = None
    stalls: dict[str, float] = {}

    def wrong(self) -> tuple[str, str] | None:
        """Never a measurement, and either every figure or none."""
        if not self.profiled:
            return "profiled is not true", "a counter row is never a measurement"
        held = sum(getattr(self, key) is not None for key in FIGURES)
        if (self.status == "ok") != (held == len(FIGURES)):
            return f"status {self.status} with {held} figures", f"an ok row has {len(FIGURES)}"
        return None


FIGURES = Counter.__struct_fields__[Counter.__struct_fields__.index("duration_us") : -1]  # all but the stalls


class CrossCheck(Provenance, frozen=True, kw_only=True, tag=1):
    """Our time against Kineto's, and ncu's where it is installed; see bench/crosscheck.py."""

    FILE: ClassVar[str] = "crosscheck.jsonl"
    WORD: ClassVar[str] = "cross-check row"

    device: str
    family: str
    name: str
    workload_id: str
    status: Status
    run: str
    started: str
    message: str = ""
    gap_us: float | None = None
    precision: str = ""
    workload: dict[str, int | str] = {}
    graph_us: float | None = None
    iqr_us: float | None = None
    n: int | None = None
    converged: bool | None = None
    kineto_us: float | None = None
    kernels_per_call: float | None = None
    kernel_us: float | None = None
    difference_pct: float | None = None
    within: bool = True
    ncu_us: float | None = None
    clocks: tuple[Clocks, ...] = ()
