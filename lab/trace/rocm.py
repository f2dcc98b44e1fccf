"""rocprofv3's JSON (`--output-format json`) as a trace: dispatches, copies and HIP calls of AMD GPUs, in nanoseconds.

A dispatch names its kernel by number and its GPU by the agent's handle; queues stand for streams. The process is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from lab.base.errors import BadInput
from lab.trace.model import Trace, build, direction

GPU = 2  # an agent's type; 1 is a CPU


def read(path: Path, text: bytes) -> Trace:
    """The trace in a rocprofv3 file's text; raises BadInput, one line, for anything else."""
    try:
        (process,) = msgspec.json.decode(text)["rocprofiler-sdk-tool"]
        return _trace(path, process)
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"no rocprofv3 JSON of one process ({error})"
        raise BadInput(path, what, "export it again, one process a file") from None


def _trace(path: Path, process: dict[str, Any]) -> Trace:
    records = process.get("buffer_records", {})
    ran, copies, calls = (records.get(kind, []) for kind in ("kernel_dispatch", "memory_copy", "hip_api"))
    ran = [r | r["dispatch_info"] for r in ran if r.get("dispatch_info")]
    gpus = {a["id"]["handle"]: a for a in process.get("agents", ()) if a.get("type") == GPU}
    device = {handle: agent.get("logical_node_type_id", 0) for handle, agent in gpus.items()}
    used = {gpu: gpus[gpu] for gpu in gpus if any(r["agent_id"]["handle"] == gpu for r in ran)}
    names = {s["kernel_id"]: s.get("formatted_kernel_name", "") for s in process.get("kernel_symbols", ())}
    kinds = [kind.get("operations", []) for kind in process.get("strings", {}).get("buffer_records", ())]
    operations = {(i, j): name for i, known in enumerate(kinds) for j, name in enumerate(known)}
    ends = [[r.get(f"{end}_agent_id", {}).get("handle", 0) for end in ("src", "dst")] for r in copies]

    def columns(records: list[dict[str, Any]]) -> dict[str, list[int]]:
        return {
            "start_ns": [r["start_timestamp"] for r in records],
            "end_ns": [r["end_timestamp"] for r in records],
            "correlation": [r.get("correlation_id", {}).get("internal", 0) for r in records],
            "process": [0] * len(records),
        }

    rows: dict[str, dict[str, Any]] = {
        "kernels": columns(ran)
        | {
            "name": [names.get(r["kernel_id"], f"kernel {r['kernel_id']}") for r in ran],
            "device": [device.get(r["agent_id"]["handle"], 0) for r in ran],
            "stream": [r["queue_id"]["handle"] for r in ran],
        },
        "memcpy": columns(copies)
        | {
            "device": [device.get(source if source in device else target, 0) for source, target in ends],
            "kind": [direction("to".join("D" if end in device else "H" for end in both)) for both in ends],
            "bytes": [r.get("bytes", 0) for r in copies],
        },
        "calls": columns(calls)
        | {
            "thread": [r.get("thread_id", 0) for r in calls],
            "name": [
                operations.get((r.get("kind", 0), at), f"operation {at}")
                for r in calls
                for at in [r.get("operation", 0)]
            ],
        },
    }
    named = {a.get("logical_node_type_id", 0): a.get("product_name") or a.get("name", "") for a in used.values()}
    return build("rocprofv3", path, rows, "HIP", gpus=named)
