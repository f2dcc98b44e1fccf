"""rocprofv3's JSON (`--output-format json`) as a trace: dispatches, copies and HIP calls of AMD GPUs, in nanoseconds.

A dispatch names its kernel by number and its GPU by the agent's handle; queues stand for streams. The process is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from lab.base.errors import BadInput
from lab.trace.model import COPY_KINDS, GRAPH_LAUNCH, Calls, Copies, Kernels, Trace, interned

GPU = 2  # an agent's type; 1 is a CPU


class Id(Struct, frozen=True):
    """A handle, or a correlation."""

    handle: int = 0
    internal: int = 0


class Dispatch(Struct, frozen=True):
    """Where and what a dispatch ran."""

    agent_id: Id
    queue_id: Id
    kernel_id: int


class Record(Struct, frozen=True):
    """A row of any kind."""

    start_timestamp: int
    end_timestamp: int
    kind: int = 0
    operation: int = 0
    thread_id: int = 0
    correlation_id: Id = Id()
    dispatch_info: Dispatch | None = None
    src_agent_id: Id = Id()
    dst_agent_id: Id = Id()
    bytes: int = 0


class Agent(Struct, frozen=True):
    """A CPU or a GPU."""

    id: Id
    type: int = 0
    name: str = ""
    product_name: str = ""
    logical_node_type_id: int = 0


class Symbol(Struct, frozen=True):
    """A kernel's names by its number."""

    kernel_id: int
    formatted_kernel_name: str = ""


class Kind(Struct, frozen=True):
    """What the operations of a kind of record are called."""

    operations: list[str] = []


class Strings(Struct, frozen=True):
    """Names by kind."""

    buffer_records: list[Kind] = []


class Process(Struct, frozen=True):
    """One process's records."""

    agents: list[Agent] = []
    kernel_symbols: list[Symbol] = []
    strings: Strings = Strings()
    buffer_records: dict[str, list[Any]] = {}


class File(Struct, frozen=True):
    """The file."""

    processes: list[Process] = msgspec.field(name="rocprofiler-sdk-tool")


def read(path: Path, text: bytes) -> Trace:
    """The trace in a rocprofv3 file's text; raises BadInput, one line, for anything else."""
    try:
        file = msgspec.json.decode(text, type=File)
        (one,) = file.processes
        dispatches, copies, calls = (
            msgspec.convert(one.buffer_records.get(kind, []), list[Record])
            for kind in ("kernel_dispatch", "memory_copy", "hip_api")
        )
    except (msgspec.DecodeError, ValueError) as error:
        what = f"no rocprofv3 JSON of one process ({error})"
        raise BadInput(path, what, "export it again, one process a file") from None
    gpus = {a.id.handle: a for a in one.agents if a.type == GPU}
    symbols = {s.kernel_id: s.formatted_kernel_name for s in one.kernel_symbols}
    ran = [(r, r.dispatch_info) for r in dispatches if r.dispatch_info is not None]
    names, known = interned(symbols.get(d.kernel_id, f"kernel {d.kernel_id}") for _, d in ran)
    operations = [kind.operations for kind in one.strings.buffer_records]
    called, call_names = interned(_operation(r, operations) for r in calls)
    launched = sum(bool(GRAPH_LAUNCH.match(call_names[i])) for i in called)
    device = {handle: agent.logical_node_type_id for handle, agent in gpus.items()}

    def moved(r: Record) -> tuple[int, int]:
        """The GPU of a copy, and its direction."""
        ends = ["D" if h in device else "H" for h in (r.src_agent_id.handle, r.dst_agent_id.handle)]
        on = r.dst_agent_id.handle if ends[0] == "H" else r.src_agent_id.handle
        return device.get(on, 0), COPY_KINDS.index("to".join(ends))

    def times(records: list[Record]) -> dict[str, Any]:
        ids = [r.correlation_id.internal for r in records]
        start, end = ([getattr(r, f"{edge}_timestamp") for r in records] for edge in ("start", "end"))
        return {"start_ns": start, "end_ns": end, "correlation": ids, "process": [0] * len(ids)}

    places = [moved(r) for r in copies]
    return Trace(
        tool="rocprofv3",
        source=path.name,
        graph_mode="unknown" if launched or not calls else "none",
        gpus={a.logical_node_type_id: a.product_name or a.name for a in gpus.values()
              if any(d.agent_id.handle == a.id.handle for _, d in ran)},
        names=known,
        call_names=call_names,
        kernels=Kernels.of(
            **times([r for r, _ in ran]),
            name=names,
            device=[device.get(d.agent_id.handle, 0) for _, d in ran],
            stream=[d.queue_id.handle for _, d in ran],
        ),
        memcpy=Copies.of(
            **times(copies), device=[d for d, _ in places], kind=[k for _, k in places], bytes=[r.bytes for r in copies]
        ),
        calls=Calls.of(**times(calls), thread=[r.thread_id for r in calls], name=called),
        warnings=() if calls else ("no HIP calls in the file: kernels cannot be joined to their launches",),
    )  # fmt: skip


def _operation(r: Record, operations: list[list[str]]) -> str:
    known = operations[r.kind] if r.kind < len(operations) else []
    return known[r.operation] if r.operation < len(known) else f"operation {r.operation}"
