"""The trace: one form for what nsys, PyTorch's profiler and Nsight Compute record.

Columns (NumPy arrays, one frozen dataclass per kind of row), because a serving capture has millions of kernels. Times
are integer nanoseconds on the tool's own clock; rows are sorted by start, which every interval computation relies on.

Kernels compute. Copies and fills (memcpy, memset) keep the device busy and compute nothing. A graph row is a CUDA graph
captured as a whole: a duration without contents, never split. NVTX ranges and API calls are host time and never busy
time. Tools that give totals (nsys stats' kernel summary, Nsight Compute) use the same type with `timeline=False`: start
is 0, end is the total, `instances` the launches in it; span, union, idle time and overlap do not exist for them.

Given up: what only one tool knows (call stacks, payloads).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lab.base.errors import BadInput, plain

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]
NONE = -1  # no graph, no graph node, no correlation, unknown process
# CUPTI's copy kinds by number (ENUM_CUDA_MEMCPY_OPER in an nsys export); the unified-memory kinds migrate pages.
COPY_KINDS = (
    *("unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"),
    *("UVM HtoD", "UVM DtoH", "UVM DtoD"),
)
UNKNOWN_COPY = "of unknown kind"
MEMCPY, MEMSET, OPAQUE = "memcpy", "memset", "CUDA graph (not decomposed)"
# HtoD, Host-to-Device, HOST_TO_DEVICE, MemcpyH2D, CopyHostToDevice: what profilers call a direction.
PLACE = "([HDAP])(?:ost|evice|rray|eer)?"
DIRECTION = re.compile(rf"(UVM )?(?:(?<![a-z])|(?<=cpy)|(?<=copy)){PLACE}[-_]?(?:to|2)[-_]?{PLACE}", re.IGNORECASE)
GRAPH_LAUNCH = re.compile(r"(?:cu(?:da)?|hip)GraphLaunch")  # of an API call's name
# PyTorch's emit_nvtx appends numbers to every label, which would make each a label of its own.
NUMBERED = re.compile(r",? (seq|op_id|sizes|input_op_ids|stack) ?=.*$")
# Nanoseconds, bytes and 64-bit identifiers; every other column fits 32 bits.
WIDE = ("start_ns", "end_ns", "correlation", "graph_node", "bytes", "thread", "instances")
PLACES = ("device", "context", "stream", "process", "thread")  # often one for all rows, and then stored once
LIMIT_NS = 2**62  # of a time and of all durations together: beyond it, arithmetic on them would overflow
LONGEST = 8192  # characters of a name: more is no name, and patterns take their time over it
ZERO = ("start_ns", "end_ns", "bytes", "kind", "name", "label", "scope")  # where a column is not given; others NONE


@dataclass(frozen=True)
class Columns:
    """Equal-length columns; the base of every kind of row."""

    start_ns: Int64
    end_ns: Int64

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def duration_ns(self) -> Int64:
        """end - start of each row, ns."""
        return self.end_ns - self.start_ns

    def take(self, rows: NDArray[Any] | slice) -> Self:
        """The rows selected by a mask, by indices or by a slice, in that order."""
        start = self.start_ns[rows]
        values = {f.name: getattr(self, f.name) for f in fields(self)} | {"start_ns": start}
        for name, v in values.items():
            if isinstance(v, np.ndarray) and v is not start:
                values[name] = v[rows] if v.strides[0] or not len(v) else np.broadcast_to(v[0], start.shape)
        return type(self)(**values)

    @classmethod
    def of(cls, **columns: Any) -> Self:
        """Columns from sequences, sorted by start; a column not given is NONE or 0, stored once, not per row.

        Raises BadInput for a value that is no whole number of its column's size, for times that no profile can have,
        and when the columns differ in length, which only a defect of a reader can cause.
        """
        lengths = {len(v) for v in columns.values()} or {0}
        if len(lengths) != 1:
            raise BadInput("trace", f"columns of {cls.__name__} differ in length: {sorted(lengths)}", "report this")
        full: dict[str, Any] = {"instances": None} if cls is Kernels else {}
        for name in (f.name for f in fields(cls)):
            kind = np.int64 if name in WIDE else np.int32
            if name in columns:
                full[name] = one = whole_numbers(name, columns[name])
                if name in PLACES and len(one) and (one == one[0]).all():
                    full[name] = np.broadcast_to(one[0], one.shape)
            elif name != "instances":
                full[name] = np.broadcast_to(kind(0 if name in ZERO else NONE), tuple(lengths))
        built = cls(**full)
        if len(built):
            first, last = int(built.start_ns.min()), int(built.end_ns.max())
            total = float(built.end_ns.sum(dtype=float) - built.start_ns.sum(dtype=float))
            if (built.end_ns < built.start_ns).any() or total >= LIMIT_NS or max(-first, last) >= LIMIT_NS:
                shortest = (built.end_ns.astype(float) - built.start_ns).min()
                seen = f"from {first} to {last} ns, the shortest {shortest:g} ns"
                raise BadInput("trace", f"times of {cls.__name__} {seen}", "export the trace again")
        if (built.start_ns[1:] < built.start_ns[:-1]).any():
            return built.take(np.argsort(built.start_ns, kind="stable"))
        return built


def whole_numbers(name: str, values: Any) -> NDArray[Any]:
    """A column in its integer type; raises BadInput for a value that is none or that does not fit."""
    try:
        given = np.asarray(values)
        found = given.astype(np.int64 if name in WIDE else np.int32, copy=False)
        if given.dtype.kind in "iub" and found.dtype.itemsize >= given.dtype.itemsize and given.dtype.kind != "u":
            return found
        strange = given[~(found == given)] if len(given) else given
    except (ValueError, OverflowError, TypeError):
        bits = 63 if name in WIDE else 31
        strange = np.asarray([v for v in values if not isinstance(v, int) or v.bit_length() > bits], dtype=object)
    if len(strange):
        raise BadInput("trace", f"{name} = {strange[0]!s:.40} is no whole number that fits", "export the trace again")
    return found


def whole(text: str) -> int:
    """A whole number of up to 18 digits in a text, NONE for anything else."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) < 19 else NONE


def _named(text: object) -> str:
    """A text of a file as a name: on one line, only text, and no longer than a name can be."""
    said = plain(str(text)).replace("\n", "\\n").replace("\t", "\\t")
    return said if len(said) <= LONGEST else f"{said[:LONGEST]}... ({len(said)} characters)"


@dataclass(frozen=True)
class Activity(Columns):
    """Device activity.

    device, context, stream: the tool's numbers; a stream is one only together with device, process and context.
    process:     the launching process's id, NONE where the tool does not say.
    correlation: joins to the API call that launched it, together with the process (numbers repeat across processes).
    graph_node:  the CUDA graph node it ran as, NONE outside graphs.
    graph:       the CUDA graph it belongs to, NONE outside graphs.
    """

    device: Int32
    context: Int32
    stream: Int32
    process: Int32
    correlation: Int64
    graph_node: Int64
    graph: Int32


@dataclass(frozen=True)
class Kernels(Activity):
    """Kernel executions. name: index into Trace.names (full, with templates). instances: launches a row adds up."""

    name: Int32
    instances: Int64 | None

    @property
    def count(self) -> int:
        """Launches, whatever the number of rows."""
        return len(self) if self.instances is None else int(self.instances.sum())


@dataclass(frozen=True)
class Copies(Activity):
    """Memory copies. bytes; kind: index into COPY_KINDS."""

    bytes: Int64
    kind: Int32


@dataclass(frozen=True)
class Fills(Activity):
    """Memory sets, bytes."""

    bytes: Int64


@dataclass(frozen=True)
class GraphLaunches(Activity):
    """CUDA graphs recorded as a whole (nsys graph mode): opaque, never decomposed. graph_exec: its instance."""

    graph_exec: Int32


@dataclass(frozen=True)
class Ranges(Columns):
    """NVTX push/pop and start/end ranges, host time.

    label: index into Trace.labels. thread: the tool's thread id. scope: 0 for a range of its thread (push/pop), 1 for
    one of the whole process (start/end).
    """

    label: Int32
    process: Int32
    thread: Int64
    domain: Int32
    scope: Int32


@dataclass(frozen=True)
class Calls(Columns):
    """CUDA runtime and driver calls, host time. name: index into Trace.call_names."""

    process: Int32
    thread: Int64
    correlation: Int64
    name: Int32


def launches(rows: Activity | Calls) -> Int64:
    """What joins activity to the call that launched it, as one number: process and correlation (32 bits in CUPTI)."""
    process = rows.process if rows.process.strides[0] else rows.process[:1]
    return (process.astype(np.int64) << 32) + rows.correlation


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched: registers of a thread, bytes of shared memory of a block, threads, blocks (x, y, z)."""

    registers: int
    shared_bytes: int
    block: tuple[int, ...]
    grid: tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """What a file states of a kernel's work on one shape. name: the kernel's. launches, ns: of all of them.

    flops, bytes: of one launch; flops None where they are not counted. pipe: what computes, as in data/devices.toml.
    """

    name: str
    shape: str
    launches: int
    ns: int
    flops: float | None
    bytes: float
    pipe: str


@dataclass(frozen=True)
class Trace:
    """One capture, or one window of it.

    tool, tool_version, schema_version: what recorded and exported it; "" where the file does not say.
    graph_mode:   how CUDA graphs appear IN THIS FILE: "node" (their kernels are rows), "graph" (opaque rows),
                  "none" (no graph was launched), "unknown" (launched, but the file does not show the work).
    graph_setting: what the capture was asked for ("node", "graph"), "" where the file does not say.
    gpus:         names of the GPUs that the trace uses, by device number, where known.
    capability:   compute capabilities of the GPUs, "" where the file does not say (most name the GPUs instead).
    names, labels, call_names: texts that the columns `name` and `label` index.
    warnings:     what limits the trace, one sentence each.
    timeline:     False for tools that give totals only.
    windows_ns:   the intervals that a window selected, None for the whole capture; the span is their union.
    host_windows_ns: the host time that belongs to them: the same, or that of the ranges or calls that launched.
    device_windows_ns: those of each device, by number, where a window was selected by launch; {}: the same for all.
    whole:        the capture that this is a window of, None for a capture itself.
    steps:        how many equal units (decode steps, replays, instances of a range) the windows hold, None unknown.
    unit:         what such a unit is called: "step", or "unit" where nothing says that it is one.
    domains:      names of NVTX domains by number, where the file has them.
    host:         host-side waits and profiler overhead, kind -> (count, summed ns); never part of busy time.
    launched:     how the first launch of a kernel name was configured, where the file says so.
    work:         what kernels moved and computed in the whole capture, where the file says so.
    rank:         of the process in its run, None where the file does not say.
    """

    tool: str
    source: str
    tool_version: str = ""
    schema_version: str = ""
    graph_mode: str = "unknown"
    graph_setting: str = ""
    gpus: dict[int, str] = field(default_factory=dict)
    names: Sequence[str] = ()
    labels: Sequence[str] = ()
    call_names: Sequence[str] = ()
    kernels: Kernels = field(default_factory=Kernels.of)
    memcpy: Copies = field(default_factory=Copies.of)
    memset: Fills = field(default_factory=Fills.of)
    graphs: GraphLaunches = field(default_factory=GraphLaunches.of)
    ranges: Ranges = field(default_factory=Ranges.of)
    calls: Calls = field(default_factory=Calls.of)
    warnings: tuple[str, ...] = ()
    timeline: bool = True
    windows_ns: tuple[tuple[int, int], ...] | None = None
    host_windows_ns: tuple[tuple[int, int], ...] | None = None
    device_windows_ns: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    window_label: str = ""
    whole: Trace | None = field(default=None, repr=False)
    steps: int | None = None
    unit: str = "step"
    domains: dict[int, str] = field(default_factory=dict)
    host: dict[str, tuple[int, int]] = field(default_factory=dict)
    launched: dict[str, Launch] = field(default_factory=dict)
    work: tuple[Work, ...] = ()
    rank: int | None = None
    capability: str = ""

    def __post_init__(self) -> None:
        """Texts of a file are shown on terminals and pages; here they become names that can only be read."""
        for key in ("tool_version", "schema_version", "capability"):
            object.__setattr__(self, key, _named(getattr(self, key)))
        for key in ("names", "labels", "call_names", "warnings"):
            object.__setattr__(self, key, type(getattr(self, key))(map(_named, getattr(self, key))))
        for key in ("gpus", "domains"):
            object.__setattr__(self, key, {number: _named(text) for number, text in getattr(self, key).items()})
        object.__setattr__(self, "launched", {_named(name): launch for name, launch in self.launched.items()})
        object.__setattr__(self, "work", tuple(replace(w, name=_named(w.name)) for w in self.work))

    @property
    def activities(self) -> tuple[Activity, ...]:
        """Everything that occupies a device: kernels, copies, fills, opaque graphs."""
        return (self.kernels, self.memcpy, self.memset, self.graphs)

    @property
    def extent_ns(self) -> tuple[int, int]:
        """First start and last end of any device activity; zeros without any."""
        rows = [r for r in self.activities if len(r)]
        if not rows:
            return 0, 0
        return min(int(r.start_ns[0]) for r in rows), max(int(r.end_ns.max()) for r in rows)

    def column(self, name: str) -> Int64:
        """A column of all device activity: the kernels', the copies', the fills' and the opaque graphs'."""
        parts = [getattr(rows, name) for rows in self.activities]
        if len({int(part[0]) for part in parts if len(part)}) == 1 and not any(p.strides[0] for p in parts if len(p)):
            return np.broadcast_to(next(p[0] for p in parts if len(p)), sum(map(len, parts)))  # one value, stored once
        return np.concatenate(parts)

    def but(self, rows: Iterable[Activity] = (), label: str = "", warn: Iterable[str] = (), **changes: Any) -> Trace:
        """The same trace with some fields replaced; rows: the activities; label, warn: added to what is said of it."""
        changes |= dict(zip(("kernels", "memcpy", "memset", "graphs"), rows, strict=False))
        window = ", ".join(filter(None, (self.window_label, label)))
        return replace(self, window_label=window, warnings=(*self.warnings, *warn), **changes)

    def require_timeline(self, what: str) -> None:
        """Raises BadInput when the file holds totals only, so `what` does not exist for it."""
        if not self.timeline:
            remedy = "use the sqlite export of the same capture, or cuda_gpu_trace"
            raise BadInput(self.source, f"{self.tool} totals have no timeline, so no {what}", remedy)


# The columns' type of each kind of row; the column that indexes a table of texts, and that table.
KINDS: Mapping[str, type[Columns]] = {
    "kernels": Kernels,
    "memcpy": Copies,
    "memset": Fills,
    "graphs": GraphLaunches,
    "ranges": Ranges,
    "calls": Calls,
}
TEXTS = {"kernels": ("name", "names"), "ranges": ("label", "labels"), "calls": ("name", "call_names")}


def build(tool: str, path: Path, rows: Mapping[str, Mapping[str, Any]], api: str = "", **about: Any) -> Trace:
    """A trace from columns by kind of row, in which names and labels are texts.

    api: what the tool calls its API calls, which tell whether graphs were launched; "" where it has none.
    """
    built: dict[str, Any] = {}
    for kind, of in KINDS.items():
        columns, (index, texts) = dict(rows.get(kind, {})), TEXTS.get(kind, ("", ""))
        if index in columns:
            columns[index], built[texts] = interned(columns[index])
        built[kind] = of.of(**columns)
    if api:
        called = built.get("call_names")
        built["graph_mode"] = "unknown" if not called or any(map(GRAPH_LAUNCH.match, called)) else "none"
        warnings = [] if called else [f"no {api} calls in the file: kernels cannot be joined to their launches"]
        about["warnings"] = (*about.get("warnings", ()), *warnings)
    return Trace(tool, path.name, **built | about)


def named(matches: Callable[[str], object], names: Sequence[str], codes: Int32) -> NDArray[np.bool_]:
    """Which rows have a name that matches. codes: each row's index among the names."""
    return np.array([bool(matches(name)) for name in names] or [False])[codes]


def direction(text: str) -> int:
    """A copy's direction in what a profiler calls it, as an index of COPY_KINDS; 0 where it says none."""
    found = DIRECTION.search(text)
    short = f"{found[1] or ''}{found[2].upper()}to{found[3].upper()}" if found else ""
    return COPY_KINDS.index(short) if short in COPY_KINDS else 0


def callers(trace: Trace) -> Callable[[Int64], Int64]:
    """What gives, for launch keys, the index of the API call with each, -1 where the file has none."""
    keyed = np.flatnonzero(trace.calls.correlation != NONE)
    key = launches(trace.calls)[keyed]
    order = np.argsort(key, kind="stable")
    key, index = key[order], keyed[order]

    def found(launch: Int64) -> Int64:
        if not len(key):
            return np.full(len(launch), -1)
        new = np.ones(len(launch), bool)  # a graph's rows have one launch, and follow one another
        np.not_equal(launch[1:], launch[:-1], out=new[1:])
        first = np.flatnonzero(new)
        at = np.minimum(np.searchsorted(key, launch[first]), len(key) - 1)
        call = np.where(key[at] == launch[first], index[at], -1)
        return np.repeat(call, np.diff(first, append=len(launch)))

    return found


def labels(trace: Trace) -> tuple[list[str], list[NDArray[Any]]]:
    """What can be told apart, kernel names first and then copies, fills and graphs, and each activity row's index."""
    found = [*trace.names, *(f"{MEMCPY} {kind}" for kind in (*COPY_KINDS, UNKNOWN_COPY)), MEMSET, OPAQUE]
    first = len(trace.names)
    kind = trace.memcpy.kind.astype(np.int64)
    kind = np.where((kind >= 0) & (kind < len(COPY_KINDS)), kind, len(COPY_KINDS)) + first
    rest = [np.full(len(rows), first + len(COPY_KINDS) + n) for n, rows in ((1, trace.memset), (2, trace.graphs))]
    return found, [trace.kernels.name, kind, *rest]


@dataclass(frozen=True)
class Total:
    """Launches and summed time of a kernel name, of copies in one direction, of a category, ...

    kind: "kernel", "wait" (a category of kernels that only wait), "memcpy", "memset" or "graph".
    """

    name: str
    count: int
    sum_ns: int
    kind: str = "kernel"
    bytes: int = 0

    def plus(self, other: Total) -> Total:
        """Both together, under this name."""
        count, sum_ns, moved = self.count + other.count, self.sum_ns + other.sum_ns, self.bytes + other.bytes
        return Total(self.name, count, sum_ns, self.kind, moved)


def totals(trace: Trace) -> list[Total]:
    """Every label's launches and summed ns, largest sum first, ties by name."""
    (names, codes), found = labels(trace), dict[tuple[str, str], Total]()
    for kind, rows, code in zip(("kernel", MEMCPY, MEMSET, "graph"), trace.activities, codes, strict=True):
        weights = getattr(rows, "instances", None), rows.duration_ns, getattr(rows, "bytes", np.zeros(len(rows)))
        # bincount's weights are doubles, exact while a sum stays below 2^53 (104 days of ns).
        sums = [np.rint(np.bincount(code, each, len(names))).astype(np.int64) for each in weights]
        for i in np.flatnonzero(sums[0]).tolist():
            count, sum_ns, moved = (int(column[i]) for column in sums)
            own = Total(names[i], count, sum_ns, kind, moved)
            found[kind, names[i]] = found[kind, names[i]].plus(own) if (kind, names[i]) in found else own
    return sorted(found.values(), key=lambda t: (-t.sum_ns, t.name))


def totals_by_name(trace: Trace) -> list[Total]:
    """The totals of the kernels alone."""
    return [t for t in totals(trace) if t.kind == "kernel"]


def interned(texts: Iterable[str]) -> tuple[list[int], list[str]]:
    """Each text's index among the distinct ones, in order of first appearance, and these."""
    known: dict[str, int] = {}
    return [known.setdefault(text, len(known)) for text in texts], list(known)


# Functions that wrap what a generic kernel does; the functor that tells them apart is inside.
GENERIC = re.compile(r"^(?:gpu_\w+|\w*(?:Binary|Unary)Functor\w*|opmath_\w+|ReduceOp|.*elementwise_kernel\w*)$")
FUNCTOR = re.compile(r"(?<![\w:])(?:\w+::)*(\w*(?:Functor|Ops)\w*|\w+(?:_cuda|[kK]ernel_?[iI]mpl)|op_\w+)\b")
WRAPPERS = re.compile(
    r"elementwise_kernel|reduce_kernel|^(?:un|bin)ary\w*_op_kernel|multi_tensor_apply|^k_bin_bcast|^kernel$"
)


def short_name(name: str) -> str:
    """A kernel's base name for display: without return type, templates, arguments and namespaces, but with the functor
    where a generic kernel has one, and with its namespace where it is called `kernel`.

    `void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, ...>(int, ...)` gives
    `vectorized_elementwise_kernel<FillFunctor>`. Never categorise by it: CUTLASS and ATen keep what tells kernels apart
    in the template arguments.
    """
    plain = _untemplated(name.replace("(anonymous namespace)", "").replace("<unnamed>", ""))
    words = plain.split("(")[0].split()
    path = [part for part in (words[-1].split("::") if words else []) if part]
    base = path[-1] if path else name
    if base in ("kernel", "Kernel", "device_kernel") and len(path) > 1:
        base = "::".join(path[-2:])
    if WRAPPERS.search(base) and "<" in name:
        inside = [f for f in FUNCTOR.findall(name) if not GENERIC.match(f) and f != base]
        base += f"<{inside[-1]}>" if inside else ""
    return base


def _untemplated(name: str) -> str:
    """A name without template arguments; a > inside parentheses, as in enable_if<((8)>(0))>, ends none."""
    kept, depth, inside = [], 0, 0
    for at, c in enumerate(name):
        if depth and c in "()":
            inside += 1 if c == "(" else -1
        elif c == "<" and not inside and name[at - 8 : at] != "operator":
            depth += 1
        elif c == ">" and depth and not inside and name[at - 1] != "-":
            depth -= 1
        elif not depth:
            kept.append(c)
            if c == "(":
                break  # the arguments
    return "".join(kept)
