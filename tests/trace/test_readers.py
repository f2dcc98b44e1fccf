"""The readers on real files cut down to what is read (profiles/), and on synthetic exports of every schema."""

import gzip
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from lab.bench import ncu
from lab.trace.files import read
from lab.trace.model import COPY_KINDS, NONE, Kernels, short_name, totals_by_name
from tests.loops import numbered, over
from tests.refused import refused
from tests.trace.nsys_synthetic import VERSIONS, Export, decode, global_pid

REAL = Path(__file__).parent / "profiles"


def unpacked(name: str, folder: Path) -> Path:
    path = folder / name
    path.write_bytes(gzip.decompress((REAL / f"{name}.gz").read_bytes()))
    return path


# Real files ----------------------------------------------------------------------------------------------------------


def test_two_gpus(tmp_path: Path) -> None:
    t = read(unpacked("two_gpus_2026.2.1.sqlite", tmp_path))
    assert (t.tool, t.tool_version, t.schema_version) == ("nsys", "2026.2.1.210", "3.25.0")
    assert (t.graph_mode, t.graph_setting) == ("none", "graph"), "graph mode without a graph is an eager trace"
    assert (len(t.kernels), len(t.memcpy), len(t.memset), len(t.graphs), len(t.calls)) == (4010, 1020, 269, 0, 7466)
    assert set(t.gpus) == {0, 1}
    assert set(np.unique(t.kernels.process).tolist()) == {144, 145}
    assert int(t.kernels.duration_ns.sum()) == 535_200_650
    assert t.host["synchronization"] == (366, 325_145_417)


def test_graph_mode(tmp_path: Path) -> None:
    t = read(unpacked("graph_mode_2025.5.2.sqlite", tmp_path))
    assert (t.graph_mode, len(t.graphs), len(t.kernels)) == ("graph", 2, 3)
    assert t.graphs.duration_ns.tolist() == [1728, 1376]
    assert t.graphs.correlation.tolist() == [141, 142]
    assert COPY_KINDS[t.memcpy.kind[0]] == "HtoD"


def test_kineto() -> None:
    t = read(REAL / "vllm_eager_b200.json.gz")
    assert (t.tool, t.schema_version, t.graph_mode, t.gpus) == ("kineto", "1", "none", {0: "NVIDIA B200"})
    assert (len(t.kernels), len(t.memcpy), len(t.calls)) == (768, 161, 1372)
    assert int(t.kernels.duration_ns.sum()) == 10_862_916
    assert t.labels == ["execute_context_1(888_788544)_generation_0(0)", *t.labels[1:]]
    assert len(t.ranges) == 3, "gpu_user_annotation is a copy of the host ranges, not more of them"
    assert t.host["profiler overhead"][0] == 9


def test_kern_sum() -> None:
    t = read(REAL / "decode_kern_sum.csv")
    assert (t.tool, t.timeline, len(t.kernels), t.kernels.count) == ("nsys stats", False, 46, 78016)
    assert sum(x.sum_ns for x in totals_by_name(t)) == 179_072_697
    assert totals_by_name(t)[0].count == 16448
    with refused("decode_kern_sum.csv", "span", remedy="sqlite"):
        t.require_timeline("span")


def test_ncu() -> None:
    t = read(REAL / "ncu_details.csv")
    assert (t.tool, t.timeline, len(t.kernels)) == ("ncu", False, 1)
    assert t.kernels.duration_ns.tolist() == [6750]
    (launch,) = ncu.launches(REAL, (REAL / "ncu_details.csv").read_text())
    assert launch.metrics["dram__throughput.avg.pct_of_peak_sustained_elapsed"] == (19.66, "%")


# nsys SQLite ---------------------------------------------------------------------------------------------------------


@over({version: (version,) for version in VERSIONS})
def test_every_schema(version: str) -> None:
    export = Export(version)
    export.kernel("void k<1>(int)", 100, 200, correlationId=1, graphNodeId=(5 << 32) + 2)
    export.kernel("void k<2>(int)", 250, 300, correlationId=2)
    export.memory("MEMCPY", 300, 340, bytes=64, copyKind=2, correlationId=3)
    export.memory("MEMSET", 350, 360, bytes=32, value=0, correlationId=4)
    export.call("cudaLaunchKernel_v7000", 50, 60, 2)
    export.nvtx("step", 40, 70)
    t = export.trace()
    assert (t.tool_version, t.schema_version, t.warnings) == (version, VERSIONS[version], ())
    assert [t.names[i] for i in t.kernels.name] == ["void k<1>(int)", "void k<2>(int)"]
    assert (t.memcpy.bytes.tolist(), t.memset.bytes.tolist()) == ([64], [32])
    assert t.kernels.process.tolist() == [4242, 4242]
    assert t.kernels.graph_node.tolist() == [(5 << 32) + 2, NONE]
    if VERSIONS[version] < "3.24":
        assert t.kernels.graph.tolist() == [5, NONE], "before 3.24 the graph is in the node's upper half"
    assert t.graph_mode == "node"
    assert (len(t.calls), t.labels) == (1, ["step"])


def test_columns_by_name_and_missing_tables() -> None:
    """A column that nobody knows yet, in front of the others' values, and nothing but kernels."""
    export = Export(CUPTI_ACTIVITY_KIND_KERNEL="newColumn anotherText!")
    export.kernel("a", 0, 10, newColumn=7, anotherText="x")
    t = export.trace()
    assert t.kernels.duration_ns.tolist() == [10]
    assert (len(t.memcpy), len(t.ranges), len(t.calls), t.gpus) == (0, 0, 0, {0: ""})


def test_without_process_or_strings(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, shortName)")
        base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (5, 9, 0, 7, 33)")
    base.close()
    t = read(path)
    assert t.names == ["(unnamed 33)"]
    assert t.kernels.process.tolist() == [NONE]
    assert any("cannot be joined" in w for w in t.warnings)
    assert t.graph_mode == "unknown", "neither a setting nor API calls say anything about graphs"


def test_label_is_text_or_text_id() -> None:
    export = Export()
    export.nvtx("by text", 0, 10)
    export.nvtx(None, 1, 5, textId=export.string("by id"))
    export.nvtx("text wins", 2, 3, textId=export.string("not this"))
    export.nvtx(None, 3, 4)
    export.nvtx("never ended", 4, None)
    export.nvtx("a mark", 5, None, eventType=34)
    export.nvtx("NCCL", 0, None, eventType=75, domainId=9)
    t = export.trace()
    assert [t.labels[i] for i in t.ranges.label] == ["by text", "by id", "text wins", ""]
    assert t.domains == {9: "NCCL"}
    assert [w for w in t.warnings if "never ended" in w] == ["1 NVTX ranges never ended and are left out"]


def test_event_types_are_looked_up() -> None:
    """Numbers of the enumeration may change; the file's own names decide."""
    export = Export()
    export.add("ENUM_NSYS_EVENT_TYPE", id=159, name="NvtxPushPopRange", label="")
    export.add("ENUM_NSYS_EVENT_TYPE", id=160, name="NvtxStartEndRange", label="")
    export.nvtx("old number", 0, 10)
    export.nvtx("pushed", 0, 10, eventType=159)
    export.nvtx("started", 0, 10, eventType=160)
    t = export.trace()
    assert [(t.labels[i], s) for i, s in zip(t.ranges.label, t.ranges.scope.tolist(), strict=True)] == [
        ("pushed", 0),
        ("started", 1),
    ]


def test_rows_without_times_are_dropped() -> None:
    export = Export()
    export.kernel("a", 10, 20)
    export.memory("GRAPH_TRACE", 0, 0, graphId=1, graphExecId=1)
    export.memory("GRAPH_TRACE", 30, 40, graphId=1, graphExecId=1)
    t = export.trace()
    assert t.graphs.start_ns.tolist() == [30]
    assert any("1 rows of CUPTI_ACTIVITY_KIND_GRAPH_TRACE" in w for w in t.warnings)


def test_rows_are_sorted() -> None:
    export = Export()
    for start in (500, 63, 75, 1):
        export.kernel(f"k{start}", start, start + 1)
    t = export.trace()
    assert t.kernels.start_ns.tolist() == [1, 63, 75, 500]
    assert [t.names[i] for i in t.kernels.name] == ["k1", "k63", "k75", "k500"]


@over(numbered([(6, 6), (8, NONE)]))
def test_graph_of_a_node_is_verified(stored: int, copied: int) -> None:
    """A copy's graph comes from its node's upper half, unless this file's kernels show that it is something else."""
    export = Export()
    export.kernel("a", 0, 1, graphNodeId=(6 << 32) + 1, graphId=stored)
    export.memory("MEMCPY", 2, 3, bytes=1, copyKind=8, graphNodeId=(6 << 32) + 2)
    t = export.trace()
    assert (t.kernels.graph.tolist(), t.memcpy.graph.tolist()) == ([stored], [copied])


@over(
    numbered(
        [
            ("Node", 1, 0, 1, "node"),
            ("Graph", 0, 1, 1, "graph"),
            ("Graph", 0, 0, 0, "none"),
            ("Node", 0, 0, 0, "none"),
            ("Graph", 0, 0, 3, "unknown"),
            (None, 0, 0, 0, "unknown"),
        ]
    )
)
def test_graph_mode_is_what_the_file_shows(
    mode: str | None, nodes: int, opaque: int, launches: int, wanted: str
) -> None:
    export = Export(mode=mode)
    export.kernel("eager", 1, 2)
    for i in range(nodes):
        export.kernel("node", 10 + i, 11 + i, graphNodeId=i + 1)
    for i in range(opaque):
        export.memory("GRAPH_TRACE", 20 + i, 21 + i, graphId=1, graphExecId=1)
    for i in range(launches):
        export.call("cudaGraphLaunch_v10000", i, i + 1, i + 1)
    t = export.trace()
    assert t.graph_mode == wanted
    assert t.graph_setting == (mode or "").lower()
    assert any("busy time is too low" in w for w in t.warnings) == (wanted == "unknown" and launches > 0)


def test_devices_of_two_processes() -> None:
    """Two processes that each call their GPU number 0, as under CUDA_VISIBLE_DEVICES."""
    export = Export()
    for i, process in enumerate((4242, 4243)):
        export.add("TARGET_INFO_GPU", id=i, name=f"GPU {i}", cuDevice=i)
        export.add("TARGET_INFO_CUDA_DEVICE", gpuId=i, cudaId=0, pid=process)
        export.kernel("a", 10 + i, 20 + i, globalPid=global_pid(process))
    t = export.trace()
    assert t.kernels.device.tolist() == [0, 1]
    assert t.gpus == {0: "GPU 0", 1: "GPU 1"}
    assert any("number their GPUs differently" in w for w in t.warnings)


def test_environment_is_not_read() -> None:
    export = Export()
    export.kernel("a", 1, 2)
    export.string("SECRET=hunter2")
    export.add("TARGET_INFO_SYSTEM_ENV", name="SECRET", value="hunter2")
    export.add("DIAGNOSTIC_EVENT", severity=2, text="see /home" + "/ada/run/stdout.log for output")
    t = export.trace()
    assert "hunter2" not in repr(t)
    assert t.warnings == ("nsys: see (path)/stdout.log for output",)


def test_every_row_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of pages meet without a gap, also where rows were deleted."""
    from lab.trace import btree

    monkeypatch.setattr(btree, "BLOCK", 3 * 4096)
    path = decode(tmp_path / "a.sqlite", 1500, per_step=500)
    one = read(path)
    assert len(np.unique(one.kernels.start_ns)) == len(one.kernels) == 1500
    with sqlite3.connect(path) as base:
        base.execute("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE rowid % 3 = 0 OR rowid BETWEEN 700 AND 800")
        left = base.execute("SELECT start FROM CUPTI_ACTIVITY_KIND_KERNEL ORDER BY start").fetchall()
    base.close()
    assert read(path).kernels.start_ns.tolist() == [row[0] for row in left]


# The model -----------------------------------------------------------------------------------------------------------


@over(
    numbered(
        [
            (
                "void at::native::vectorized_elementwise_kernel<4, a::b<c>>(int, foo<a>)",
                "vectorized_elementwise_kernel",
            ),
            ("void at::native::(anonymous namespace)::bar<int>(float*)", "bar"),
            ("nvjet_tst_128x8", "nvjet_tst_128x8"),
            ("ncclDevKernel_AllReduce(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_AllReduce"),
            ("", ""),
        ]
    )
)
def test_short_name(name: str, short: str) -> None:
    assert short_name(name) == short


def test_columns_must_agree() -> None:
    with refused("trace", "Kernels", "[1, 2]"):
        Kernels.of(start_ns=[1, 2], end_ns=[3])


def test_rows_with_holes_between_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows as there are numbers are made room for; what is missing leaves no row behind.

    The room holds what a row could, whatever the memory held before.
    """
    monkeypatch.setattr(np, "empty", lambda size, dtype=float, **_: np.ones(size, dtype))
    export = Export()
    for i in range(20):
        export.kernel(f"k{i}", i * 10, i * 10 + 5)
    path = export.write(tmp_path / "a.sqlite")
    for change, left in (
        ("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE rowid IN (2, 3, 9, 20)", [*range(0, 20)]),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET rowid = 1000000000000 WHERE rowid = 19", [*range(0, 20)]),
    ):
        with sqlite3.connect(path) as base:
            base.execute(change)
        base.close()
        left = [i for i in left if i not in (1, 2, 8, 19)]
        t = read(path)
        assert t.kernels.start_ns.tolist() == [i * 10 for i in left]
        assert [t.names[i] for i in t.kernels.name] == [f"k{i}" for i in left]
