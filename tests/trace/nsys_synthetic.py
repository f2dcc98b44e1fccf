"""Synthetic nsys SQLite exports, true to the exporter's schema: small ones for tests, large ones for the benchmark.

Real exports that may be committed are few, and none of them was captured in node mode, so tests build the case they
need. The tables have every column that the named exporter version writes, in its order and with its NOT NULLs, so a
reader that selects by position, or that misses a NULL, fails here as it would on a real file. `Export` collects rows by
column name; a column not given is NULL where the schema allows it and 0 where it does not.
"""

import sqlite3
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lab.trace.files import read
from lab.trace.model import Trace

HEAD = "start! end! deviceId! contextId! greenContextId streamId! correlationId globalPid"
KERNEL = (
    "demangledName! shortName! mangledName launchType cacheConfig registersPerThread! gridX! gridY! gridZ! blockX! "
    "blockY! blockZ! staticSharedMemory! dynamicSharedMemory! localMemoryPerThread! localMemoryTotal! gridId! "
    "sharedMemoryExecuted graphNodeId sharedMemoryLimitConfig"
)
KERNEL_2025 = (
    " qmdBulkReleaseDone qmdPreexitDone qmdLastCtaDone graphId clusterX clusterY clusterZ clusterSchedulingPolicy "
    "maxPotentialClusterSize maxActiveClusters"
)
PLACES = "srcKind dstKind srcDeviceId srcContextId dstDeviceId dstContextId migrationCause graphNodeId virtualAddress"
TABLES = {
    "StringIds": "id! value!",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{HEAD} {KERNEL}",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{HEAD} bytes! copyKind! deprecatedSrcId {PLACES}",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{HEAD} value! bytes! graphNodeId memKind",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{HEAD} graphId! graphExecId!",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start! end! eventClass! globalTid correlationId nameId! returnValue! callchainId",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": f"{HEAD} deprecatedSyncType syncType! eventId! eventSyncId",
    "NVTX_EVENTS": "start! end eventType! rangeId category color text globalTid endGlobalTid textId domainId "
    "uint64Value int64Value doubleValue uint32Value int32Value floatValue jsonTextId jsonText binaryData",
    "CUDA_GRAPH_NODE_EVENTS": "start! end! eventClass! globalTid nameId! graphNodeId originalGraphNodeId",
    "DIAGNOSTIC_EVENT": "timestamp! timestampType! source! severity! text! globalPid",
    "META_DATA_EXPORT": "name! value",
    "META_DATA_CAPTURE": "name! value",
    "ENUM_NSYS_EVENT_TYPE": "id! name label",
    "TARGET_INFO_GPU": "vmId! id! name busLocation memoryBandwidth smCount uuid chipName cuDevice",
    "TARGET_INFO_CUDA_DEVICE": "gpuId cudaId! pid!",
    "TARGET_INFO_SYSTEM_ENV": "globalVid devStateName name! value",
}
TEXTS = {"value", "name", "text", "label", "jsonText", "binaryData", "uuid", "chipName", "busLocation", "devStateName"}
VERSIONS = {  # product version -> schema version
    "2023.2.3.1004": "3.1.7",
    "2024.6.2.225": "3.16.1",
    "2025.5.2.266": "3.24.0",
    "2025.6.1.190": "3.24.7",
    "2026.2.1.210": "3.25.0",
}
LATEST = "2026.2.1.210"


def columns(table: str, version: str) -> list[str]:
    """A table's columns in the exporter's order, with ! where NULL is not allowed."""
    text = TABLES.get("META_DATA_EXPORT" if table == "EXPORT_META_DATA" else table, "")
    if version.startswith("2023"):
        text = text.replace(" greenContextId", "")
    elif version >= "2025" and table.endswith("_KERNEL"):
        text += KERNEL_2025
        text += " sharedMemoryRequestedPercentage" if version >= "2025.6" else ""
        text += " tensorSizeMinusOneElements!" if version >= "2026" else ""
    elif version >= "2025" and table.endswith("_MEMCPY"):
        text += " copyCount"
    return text.split()


def global_pid(process: int) -> int:
    """nsys's serialised process id; the upper bits hold a host number that a reader must ignore."""
    return (1 << 48) | process << 24


class Export:
    """Rows by table, then one file. Tables without rows are not created, as the exporter does."""

    def __init__(self, version: str = LATEST, mode: str | None = "Node", **extra_columns: str) -> None:
        self.version, self.rows = version, dict[str, list[dict[str, Any]]]()
        self.strings: dict[str, int] = {}
        self.extra = extra_columns
        meta = "EXPORT_META_DATA" if version.startswith("2023") else "META_DATA_EXPORT"
        self.add(meta, name="EXPORT_PRODUCT_VERSION", value=version)
        self.add(meta, name="EXPORT_SCHEMA_VERSION", value=VERSIONS[version])
        if mode and not version.startswith("2023"):
            self.add("META_DATA_CAPTURE", name="PROCESS_0:CUDA_GRAPH_TRACE_OPTIONS:MODE", value=mode)

    def add(self, table: str, **values: Any) -> None:
        self.rows.setdefault(table, []).append(values)

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, 1000 + len(self.strings))

    def kernel(self, name: str, start: int, end: int, **values: Any) -> None:
        head = {"deviceId": 0, "contextId": 1, "streamId": 7, "globalPid": global_pid(4242)}
        ids = {"demangledName": self.string(name), "shortName": self.string(name.split("<")[0])}
        self.add("CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=end, **(head | ids | values))

    def memory(self, table: str, start: int, end: int, **values: Any) -> None:
        """A MEMCPY, MEMSET, GRAPH_TRACE or SYNCHRONIZATION row."""
        head = {"deviceId": 0, "contextId": 1, "streamId": 7, "globalPid": global_pid(4242)}
        self.add(f"CUPTI_ACTIVITY_KIND_{table}", start=start, end=end, **(head | values))

    def call(self, name: str, start: int, end: int, correlation: int, process: int = 4242, thread: int = 1) -> None:
        tid = global_pid(process) | thread
        ids = {"globalTid": tid, "correlationId": correlation, "nameId": self.string(name)}
        self.add("CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=end, **ids)

    def nvtx(self, label: str | None, start: int, end: int | None, **values: Any) -> None:
        base = {"eventType": 59, "text": label, "globalTid": global_pid(4242) | 1, "domainId": 0}
        self.add("NVTX_EVENTS", start=start, end=end, **(base | values))

    def write(self, path: Path) -> Path:
        with sqlite3.connect(path) as base:
            base.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF")
            strings = [{"id": number, "value": text} for text, number in self.strings.items()]
            for table, rows in (self.rows | ({"StringIds": strings} if strings else {})).items():
                names = create(base, table, self.version, self.extra)
                marks = ",".join("?" * len(names))
                blank = blanks(names)
                values = [[row.get(n.rstrip("!"), b) for n, b in zip(names, blank, strict=True)] for row in rows]
                base.executemany(f"INSERT INTO {table} VALUES ({marks})", values)
        base.close()
        return path

    def trace(self) -> Trace:
        """What is read of the file."""
        with tempfile.TemporaryDirectory() as folder:
            return read(self.write(Path(folder) / "a.sqlite"))


def create(base: sqlite3.Connection, table: str, version: str, extra: dict[str, str] | None = None) -> list[str]:
    """CREATE TABLE as the exporter would; returns its columns."""
    names = columns(table, version) + (extra or {}).get(table, "").split()
    parts = []
    for name in names:
        plain = name.rstrip("!")
        kind = "TEXT" if plain in TEXTS or plain == "tensorSizeMinusOneElements" else "INTEGER"
        key = " PRIMARY KEY" if plain == "id" and table == "StringIds" else ""
        parts.append(f'"{plain}" {kind}{" NOT NULL" if name.endswith("!") else ""}{key}')
    base.execute(f"CREATE TABLE {table} ({', '.join(parts)})")
    return names


def blanks(names: Iterable[str]) -> list[Any]:
    """What a column holds that nobody set."""
    return [None if not n.endswith("!") else "[]" if n == "tensorSizeMinusOneElements!" else 0 for n in names]


# Large files ---------------------------------------------------------------------------------------------------------


def decode(path: Path, kernels: int, per_step: int = 800, version: str = LATEST, seed: int = 0) -> Path:
    """A decode-like node-mode capture: `kernels` rows in replays of one graph, a tenth as many copies, 40 % API calls.

    Two streams of one device; each step replays `per_step` kernels of 60 names with real-looking lengths, 1 to 40 us,
    then copies. SQLite makes the rows itself, from one row for each kernel of a step.
    """
    plain = Export(version)
    names = [f"void engine::layer_{i}<__nv_bfloat16, {i}>(Params)" for i in range(60)]
    for text in (*names, "cudaGraphLaunch_v10000", "cudaMemcpyAsync_v3020", "cudaLaunchKernel_v7000"):
        plain.string(text)
    length = np.random.default_rng(seed).integers(1_000, 40_000, per_step)
    at = np.concatenate([[0], np.cumsum(length + 300)])
    common = {"globalPid": str(global_pid(4242)), "contextId": "1", "correlationId": "step + 1"}
    begin = f"step * {int(at[-1]) + 20_000} + at"
    kernel = common | {"start": begin, "end": f"{begin} + length", "streamId": "IIF(k % 8, 7, 13)", "graphId": "3"}
    kernel |= {"demangledName": "1000 + k % 60", "shortName": "1000 + k % 60", "graphNodeId": "(3 << 32) + k"}
    copy = common | {"start": f"{begin} + 100", "end": f"{begin} + 1000", "streamId": "7", "bytes": "4096"}
    copy |= {"copyKind": "8", "graphNodeId": "(3 << 32) + 10000 + k / 10"}
    call = {"start": "n * 1000", "end": "n * 1000 + 700", "correlationId": "n + 1", "nameId": "1060 + n % 3"}
    call["globalTid"] = str(global_pid(4242) | 1)
    steps = "counted(step) AS (SELECT 0 UNION ALL SELECT step + 1 FROM counted LIMIT ?), "
    ordered = steps + "row AS (SELECT * FROM counted, place ORDER BY step, k LIMIT ?)"
    with sqlite3.connect(plain.write(path)) as base:
        base.execute("CREATE TEMP TABLE place (k, at, length)")
        places = zip(range(per_step), at[:-1].tolist(), length.tolist(), strict=True)
        base.executemany("INSERT INTO place VALUES (?, ?, ?)", places)
        for table, values, where in (
            ("KERNEL", kernel, "row"),
            ("MEMCPY", copy, "row WHERE k % 10 = 0"),
            ("RUNTIME", call, "(SELECT step * ? + k AS n FROM row) WHERE n < ?"),
        ):
            cells = create(base, f"CUPTI_ACTIVITY_KIND_{table}", version)
            blank = ["NULL" if b is None else repr(b) for b in blanks(cells)]
            chosen = ", ".join(values.get(c.rstrip("!"), b) for c, b in zip(cells, blank, strict=True))
            extra = (per_step, kernels * 2 // 5) if table == "RUNTIME" else ()
            query = f"INSERT INTO CUPTI_ACTIVITY_KIND_{table} WITH {ordered} SELECT {chosen} FROM {where}"
            base.execute(query, (-(-kernels // per_step), kernels, *extra))
    base.close()
    return path


@cache
def decoded(kernels: int, per_step: int = 800) -> Trace:
    """What is read of such a file; built once for all tests."""
    with tempfile.TemporaryDirectory() as folder:
        return read(decode(Path(folder) / "a.sqlite", kernels, per_step))
