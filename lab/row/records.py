"""Every persisted record as a type: what stands on one line of profiles/<device>/<phase>/<run>/<file>.jsonl.

A type says for each key what it holds and what its absence means, so the files of every day since the first read as
they are: a key that came later has the default that the code assumed before it. A key that no type knows is refused
with the nearest one. What the types cannot say (no performance before the check is green) `wrong` does. The schema
version is the first key of a line; an older version of a type is a subclass of it, read where the type is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import msgspec

from lab.card.gate import Reading
from lab.row import samples
from lab.row.samples import Summary

T = TypeVar("T")
Status = Literal["ok", "incorrect", "suspect", "error", "oom", "timeout", "skipped"]
Role = Literal["control", "candidate", "peer"]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Magnitude = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Times = Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1)]
PERFORMANCE = ("median_us", "iqr_us", "min_us", "samples_us", "blocks_us", "n")
DERIVED = (*Summary._fields, "samples_us", "blocks_us", "again_samples_us", "again_blocks_us", "aa_pct")
JUDGED = ("ok", "incorrect", "suspect")  # an arm that ran out of memory, say, was not judged
REST = 4.0  # a rested GEMM is followed by so many times its own duration of idle time


class Clocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sample, of equal ones in a row the first.

    sm_mhz, memory_mhz: current clocks; throttled: why the SM clock is held down, "" when it is not.
    """

    source: str
    sm_mhz: int
    memory_mhz: int
    throttled: str


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="schema", tag=1):
    """One line of a file. FILE: its name; WORD: what such a line is called."""

    FILE: ClassVar[str] = ""
    WORD: ClassVar[str] = "record"

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

    @property
    def code(self) -> str:
        """The commit that the code was, as stated where it ran, else the one that it lay on top of."""
        return self.stated_commit or self.commit


class _Figure(Generic[T]):
    """A figure of a row's summary, None where it has no samples."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, row: Measurement, kind: type[Measurement]) -> T | None:
        return getattr(row.summary, self.name, None)


CALIBRATION = "calibration-"  # how the phases of calibrations begin, which no card has


class Measurement(Provenance, frozen=True, kw_only=True, dict=True, tag=2):
    """One arm at one workload in one run. Only an arm that passed both checks has a performance field.

    beside:          an arm that the card names beside its two, and the gate does not ask about.
    config:          what the candidate launches for this workload, in words.
    errors:          relative error by output; relative_error is the largest, None when nothing was computed.
    flops, bytes:    compulsory work of the workload; pipe: the peak that it runs on.
    brief:           timed and checked as a calibration does; no card is judged by it.
    rest:            idle time after each visit, as a multiple of the visit; None in rows from before it was a choice.
    calls, sets:     calls a sample, distinct argument sets.
    placements:      how often all arms' sets were allocated anew; processes: over how many processes these were spread.
    shape:           (placements, blocks a placement, samples a block); a block's samples are those of its two visits.
    samples:         every sample, us a call, as lab/row/samples.py encodes them, by placement, block and visit.
    again_samples:   the same of the control's second self (A/A), in the control's row.
    block_mhz:       the lowest SM clock behind the visits of each block, of whichever arm, by placement and block; in
                     rows that have block_top_mhz, the highest, both are of the clocks ahead of the visits too. No
                     verdict stands on the highest yet: it says how far two arms' clocks can have been apart.
    clock_pct:       largest disagreement of the harness's clock with the arm's own times, %.
    prepare_us:      wall time of the one-off repacking; prepared_bytes: memory it added, None where it is not seen.
    took_s:          wall time of the whole comparison, checks and all, of which every arm's row has the same.

    Computed from the samples when read, never stored: `blocks` and `again_blocks`, block times in us by placement,
    `blocks_us` and `again_blocks_us`, the same in one row, the fields of samples.Summary, and `aa_pct`, the noise floor
    that the control and its second self showed, in the control's row.
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
    flops: Positive | None = None
    bytes: Positive | None = None
    pipe: str | None = None
    seed: int | None = None
    started: str = ""
    took_s: Magnitude | None = None
    wanted_timer: str = ""
    wanted_l2: str = ""
    rest: float | None = None
    brief: bool = False
    card_hash: str = ""
    gate_hash: str | None = None
    profiled: bool = False
    calls: Count | None = None
    sets: Count | None = None
    converged: bool | None = None
    placements: Count = 1
    processes: Count = 1
    shape: tuple[Count, Count, Count] | None = None
    samples: str | None = None
    again_samples: str | None = None
    clock_pct: Magnitude | None = None
    prepare_us: float | None = None
    prepared_bytes: int | None = None
    timer: str | None = None
    l2: str | None = None
    order: tuple[str, ...] | None = None
    timed_against: str = ""
    clocks: tuple[Clocks, ...] = ()
    throttled: str = ""
    block_mhz: tuple[Count, ...] = ()
    block_top_mhz: tuple[Count, ...] = ()

    median_us = _Figure[float]("median_us")
    iqr_us = _Figure[float]("iqr_us")
    min_us = _Figure[float]("min_us")
    stdev_us = _Figure[float]("stdev_us")
    n = _Figure[int]("n")
    sd_pct = _Figure[float]("sd_pct")
    drift_pct = _Figure[float]("drift_pct")

    @cached_property
    def samples_us(self) -> tuple[float, ...] | None:
        """Every sample, us a call; raises ValueError when they cannot be decoded."""
        return None if self.samples is None else samples.decode(self.samples)

    @cached_property
    def again_samples_us(self) -> tuple[float, ...] | None:
        """Every sample of the control's second self, us a call."""
        return None if self.again_samples is None else samples.decode(self.again_samples)

    @cached_property
    def blocks(self) -> tuple[tuple[float, ...], ...]:
        """Block times in us by placement; empty without samples."""
        return self._blocks(self.samples_us)

    @cached_property
    def again_blocks(self) -> tuple[tuple[float, ...], ...]:
        """Block times in us of the control's second self, by placement; empty without it."""
        return self._blocks(self.again_samples_us)

    def _blocks(self, held: tuple[float, ...] | None) -> tuple[tuple[float, ...], ...]:
        return () if held is None or self.shape is None else samples.blocks(held, self.shape)

    @property
    def blocks_us(self) -> tuple[float, ...] | None:
        """The times of all blocks, us."""
        return sum(self.blocks, ()) or None

    @property
    def again_blocks_us(self) -> tuple[float, ...] | None:
        """The times of all blocks of the control's second self, us."""
        return sum(self.again_blocks, ()) or None

    @cached_property
    def summary(self) -> Summary | None:
        """What the samples say."""
        return samples.summary(self.samples_us, self.blocks_us) if self.samples_us and self.blocks_us else None

    @cached_property
    def aa_pct(self) -> float | None:
        """The noise floor of the comparison in %, in the control's row; None elsewhere and with a single block."""
        if not self.blocks_us or not self.again_blocks_us:
            return None
        floor = samples.aa_floor_pct(self.blocks_us, self.again_blocks_us)
        return floor if math.isfinite(floor) else None

    @property
    def id(self) -> str:
        """Its folder under profiles/, arm and workload."""
        return f"profiles/{self.device}/{self.phase}/{self.run}#{self.arm}@{self.workload_id}"

    @property
    def ok(self) -> bool:
        """Whether its time may be used: both checks passed and no ceiling doubts it."""
        return self.status == "ok"

    @property
    def calibration(self) -> bool:
        """Whether it is of `lab routes FAMILY --calibrate`: a card's row at the same place comes before it."""
        return self.phase.startswith(CALIBRATION)

    @property
    def protocol(self) -> tuple[str, str, float]:
        """(timer, L2 state, rest), as it was asked for where it was not timed."""
        return self.timer or self.wanted_timer, self.l2 or self.wanted_l2, self.rest or 0.0

    @property
    def metric(self) -> str:
        """What its samples are of: "host_us" or "kernel_us"."""
        return "host_us" if (self.timer or self.wanted_timer) == "host" else "kernel_us"

    @property
    def own_us(self) -> float | None:
        """Its median, whichever `metric` that is; None unless the row is ok."""
        return self.median_us if self.ok else None

    @property
    def time_us(self) -> float | None:
        """Its median time on the GPU; None unless the row is ok, and of one that is of the host."""
        return self.own_us if self.metric == "kernel_us" else None

    def to_json(self) -> dict[str, Any]:
        """Every key and every figure that is computed from the samples, which stand there as numbers."""
        stored = {k: v for k, v in super().to_json().items() if k not in ("samples", "again_samples")}
        return stored | {key: getattr(self, key) for key in DERIVED}

    def wrong(self) -> tuple[str, str] | None:
        """No number before the check is green, and samples that can be: positive, finite, as many as the shape says."""
        return self._early() or self._impossible()

    def _early(self) -> tuple[str, str] | None:
        """A performance field on a row that is neither ok nor suspect."""
        if self.status in ("ok", "suspect"):
            return None
        has = [key for key in (*PERFORMANCE, "again_samples_us") if getattr(self, key) is not None]
        return (f'status {self.status} carries "{has[0]}"', "no number before the check is green") if has else None

    def _impossible(self) -> tuple[str, str] | None:
        if (self.samples is None) != (self.shape is None) or (self.again_samples and not self.samples):
            return "samples without their shape, or a shape without samples", "give both"
        if self.shape and self.placements != self.shape[0]:
            return f"{self.placements} placements and the shape {self.shape}", "the shape begins with the placements"
        if self.block_mhz and (self.shape is None or len(self.block_mhz) != self.shape[0] * self.shape[1]):
            return f"{len(self.block_mhz)} clocks and the shape {self.shape}", "give one for each block, or none"
        if self.block_top_mhz and len(self.block_top_mhz) != len(self.block_mhz):
            many = f"{len(self.block_top_mhz)} highest clocks of {len(self.block_mhz)} blocks"
            return many, "give one for each block, or none"
        if any(top < low for low, top in zip(self.block_mhz, self.block_top_mhz, strict=False)):
            return "a block whose highest clock is below its lowest", "give the other way round"
        for key in ("samples", "again_samples"):
            try:
                held = getattr(self, f"{key}_us")
                self._blocks(held)
            except ValueError as error:
                return f"{key} {error}", "remove the row and measure again"
            if held is not None and not all(0 < sample < math.inf for sample in held):
                return f"{key} hold a time that is not positive and finite", "remove the row and measure again"
        return None


class Earlier(Measurement, frozen=True, kw_only=True, tag=1):
    """A row of schema 1: one placement, its summary stored, and samples rounded to ten picoseconds."""

    median_us: Positive | None = None
    iqr_us: Magnitude | None = None
    min_us: Positive | None = None
    stdev_us: Magnitude | None = None
    n: Annotated[int, msgspec.Meta(ge=0)] | None = None
    sd_pct: Magnitude | None = None
    drift_pct: float | None = None
    samples_us: Times | None = None
    blocks_us: Times | None = None
    again_samples_us: Times | None = None
    again_blocks_us: Times | None = None
    aa_pct: Magnitude | None = None

    @property
    def blocks(self) -> tuple[tuple[float, ...], ...]:
        """Block times in us, of the one placement; empty without."""
        return (self.blocks_us,) if self.blocks_us else ()

    @property
    def again_blocks(self) -> tuple[tuple[float, ...], ...]:
        """Block times in us of the control's second self; empty without it."""
        return (self.again_blocks_us,) if self.again_blocks_us else ()

    def _impossible(self) -> tuple[str, str] | None:
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
# Tokens that a decoded tile of weights is multiplied by, and how decode and products share a warp (kernels/issue.cu).
ISSUE_TOKENS: Mapping[str, tuple[int, ...]] = {"mma": (8, 32), "wgmma": (64, 128, 256)}
_FORMS = {"alone": "nothing decoded", "turn": "each tile decoded first", "beside": "the next tile decoded meanwhile"}
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
    "issue_decode": ("GB/s", "NVFP4 codes and scales decoded to bf16 operands in registers, by kernels/issue.cu"),
    **{
        f"issue_{way}_{n}_{form}": ("TFLOP/s", f"{way} of 16 x 64 weights by {n} bf16 tokens a tile, {_FORMS[form]}")
        for way, counts in ISSUE_TOKENS.items()
        for n in counts
        for form in _FORMS
    },
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
    samples: Times
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


class Kept(Provenance, frozen=True, kw_only=True, tag=1):
    """A figure of two arms from somebody's own files, as the judge read it (`lab judge --rows --keep`).

    The provenance is of where it was kept. files: the names of the arms' files; made: hardware, model and build that
    these state, "" for none; note: what was said of them.
    """

    FILE: ClassVar[str] = "readings.jsonl"
    WORD: ClassVar[str] = "reading"

    device: str
    phase: str
    metric: str
    workload_id: str
    run: str
    started: str
    reading: Reading
    gate_hash: str
    files: tuple[str, ...]
    made: str = ""
    note: str = ""

    def wrong(self) -> tuple[str, str] | None:
        """A figure in a unit."""
        if self.reading.unit and (self.reading.control, self.reading.candidate) != (None, None):
            return None
        return f"{self.metric} has no figure in a unit", "keep what `lab judge --rows` read"


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
