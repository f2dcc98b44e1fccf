"""Synthetic nsys SQLite exports, true to the exporter's schema: small ones for tests, large ones for the benchmark.

Real exports that may be committed are few, and none of them was captured in node mode, so tests build the case they
need. The tables have every column that the named exporter version writes, in its order and with its NOT NULLs, so a
reader that selects by position, or that misses a NULL, fails here as it would on a real file. `Export` collects rows by
column name; a column not given is NULL where the schema allows it and 0 where it does not.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

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
            strings = [{"id": number, "value": text} for text, number in self.strings.items()]
            for table, rows in (self.rows | ({"StringIds": strings} if strings else {})).items():
                names = create(base, table, self.version, self.extra)
                marks = ",".join("?" * len(names))
                blank = blanks(names)
                values = [[row.get(n.rstrip("!"), b) for n, b in zip(names, blank, strict=True)] for row in rows]
                base.executemany(f"INSERT INTO {table} VALUES ({marks})", values)
        base.close()
        return path


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
    then copies. The database is built without a journal, so it takes about as long as SQLite needs to store the rows.
    """
    random = np.random.default_rng(seed)
    base = sqlite3.connect(path, isolation_level=None)
    base.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-65536; BEGIN;")
    names = [f"void engine::layer_{i}<__nv_bfloat16, {i}>(Params)" for i in range(60)]
    strings = [*names, "cudaGraphLaunch_v10000", "cudaMemcpyAsync_v3020", "cudaLaunchKernel_v7000"]
    plain = Export(version)
    plain.strings = {text: 1000 + i for i, text in enumerate(strings)}
    for text, number in plain.strings.items():
        plain.add("StringIds", id=number, value=text)
    for table, rows in plain.rows.items():
        cells = create(base, table, version)
        insert(base, table, cells, ([row.get(c.rstrip("!")) for c in cells] for row in rows))
    length = random.integers(1_000, 40_000, per_step)
    at = np.concatenate([[0], np.cumsum(length + 300)])
    step_ns = int(at[-1]) + 20_000
    pid = global_pid(4242)

    def kernel_rows(cells: list[str]) -> Iterator[list[Any]]:
        row = blanks(cells)
        where = {c.rstrip("!"): i for i, c in enumerate(cells)}
        fixed = {"contextId": 1, "globalPid": pid, "gridX": 132, "gridY": 1, "gridZ": 1, "blockX": 256, "blockY": 1}
        fixed |= {"blockZ": 1, "registersPerThread": 96, "mangledName": 999, "graphId": 3, "launchType": 1}
        for column, value in fixed.items():
            if column in where:
                row[where[column]] = value
        start, end, stream, correlation, name, short, node = (
            where[c] for c in ("start", "end", "streamId", "correlationId", "demangledName", "shortName", "graphNodeId")
        )
        for i in range(kernels):
            step, k = divmod(i, per_step)
            begin = step * step_ns + int(at[k])
            row[start], row[end] = begin, begin + int(length[k])
            row[stream] = 7 if k % 8 else 13
            row[correlation], row[name], row[short], row[node] = step + 1, 1000 + k % 60, 1000 + k % 60, (3 << 32) + k
            yield row.copy()

    def copy_rows(cells: list[str]) -> Iterator[list[Any]]:
        per = per_step // 10
        for i in range(kernels // 10):
            step, k = divmod(i, per)
            begin = step * step_ns + int(at[k * 10]) + 100
            row = dict(start=begin, end=begin + 900, contextId=1, streamId=7, globalPid=pid, bytes=4096, copyKind=8)
            row |= dict(correlationId=step + 1, graphNodeId=(3 << 32) + 10_000 + k, srcKind=2, dstKind=2)
            yield [row.get(c.rstrip("!"), b) for c, b in zip(cells, blanks(cells), strict=True)]

    def call_rows(cells: list[str]) -> Iterator[list[Any]]:
        for i in range(kernels * 2 // 5):
            row = dict(
                start=i * 1_000, end=i * 1_000 + 700, globalTid=pid | 1, correlationId=i + 1, nameId=1060 + i % 3
            )
            yield [row.get(c.rstrip("!"), b) for c, b in zip(cells, blanks(cells), strict=True)]

    for table, rows_of in (("KERNEL", kernel_rows), ("MEMCPY", copy_rows), ("RUNTIME", call_rows)):
        table = f"CUPTI_ACTIVITY_KIND_{table}"
        cells = create(base, table, version)
        insert(base, table, cells, rows_of(cells))
    base.execute("COMMIT")
    base.close()
    return path


def insert(base: sqlite3.Connection, table: str, cells: list[str], rows: Iterable[list[Any]]) -> None:
    base.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(cells))})", rows)
