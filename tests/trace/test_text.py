"""The text readers (nsys stats, Nsight Compute, Kineto) and what every reader refuses, always in one line."""

import gzip
import json
import random
import sqlite3
from pathlib import Path
from typing import Any

from lab.bench import ncu
from lab.trace.files import read
from lab.trace.model import COPY_KINDS, NONE, totals_by_name
from lab.trace.summary import summarise
from lab.trace.windows import by_nvtx
from tests.refused import refused
from tests.trace.nsys_synthetic import Export, decode

# CSV and JSON --------------------------------------------------------------------------------------------------------

TRACE_HEAD = (
    "Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),Bytes (MB),"
    "Throughput (MB/s),SrcMemKd,DstMemKd,Device,Ctx,GreenCtx,Strm,Name"
)


def test_gpu_trace(tmp_path: Path) -> None:
    path = tmp_path / "any.txt"
    path.write_text(
        "Generating SQLite file a.sqlite from a.nsys-rep\nProcessing [a.sqlite] with [cuda_gpu_trace.py]... \n\n"
        f"{TRACE_HEAD}\n"
        '1000,500,12,1,1,1,32,1,1,16,0.000,0.000,,,,,NVIDIA H200 (1),1,,7,"void k<1, 2>(int, float)"\n'
        "1400,100,13,,,,,,,,,,4.000,10.0,Device,Host,NVIDIA H200 (1),1,,13,[CUDA memcpy Device-to-Host]\n"
        "1600,50,14,,,,,,,,,,0.001,,Device,,NVIDIA H200 (1),1,,13,[CUDA memset]\n"
    )
    t = read(path)
    assert (t.gpus, t.names) == ({1: "NVIDIA H200"}, ["void k<1, 2>(int, float)"])
    assert (t.kernels.start_ns.tolist(), t.kernels.stream.tolist()) == ([1000], [7])
    assert (t.memcpy.bytes.tolist(), COPY_KINDS[t.memcpy.kind[0]], len(t.memset)) == ([4_000_000], "DtoH", 1)
    assert t.timeline


def test_kern_sum_units_and_other_reports(tmp_path: Path) -> None:
    """The unit in the header is read, and another report before it is not taken for it."""
    path = tmp_path / "stats.csv"
    for unit, factor in (("ns", 1), ("us", 1000), ("ms", 1_000_000)):
        path.write_text(
            "Time (%),Total Time (ns),Num Calls,Avg (ns),Name\n90.0,900,3,300,cudaLaunchKernel\n\n"
            f"Processing [x] with [y]...\nTime (%),Total Time ({unit}),Instances,Avg ({unit}),Name\n"
            '60.0,6,2,3,"a<1, 2>"\n40.0,4,1,4,b\n'
        )
        found = [(x.name, x.count, x.sum_ns) for x in totals_by_name(read(path))]
        assert found == [("a<1, 2>", 2, 6 * factor), ("b", 1, 4 * factor)], unit
    path.write_text(path.read_text().replace("40.0,4,1,4,b\n", ""))
    assert any("rows are missing" in w for w in read(path).warnings)


def test_ncu_raw_page(tmp_path: Path) -> None:
    path = tmp_path / "ncu.csv"
    path.write_text(
        "==PROF== Connected to process 1\n"
        '"ID","Kernel Name","Device","gpu__time_duration.sum","dram__bytes_read.sum"\n'
        '"","","","us","Mbyte"\n"0","a<1, 2>","0","1,234.5","2"\n"1","b","0","2","n/a"\n'
    )
    t = read(path)
    assert t.kernels.duration_ns.tolist() == [1_234_500, 2_000]
    first, second = ncu.launches(path, path.read_text())
    assert first.metrics["dram__bytes_read.sum"] == (2.0, "Mbyte")
    assert second.metrics["dram__bytes_read.sum"] == ("n/a", "Mbyte")


def event(category: str, name: str, ts: float | str, dur: float, **args: Any) -> str:
    return (
        f'{{"ph": "X", "cat": "{category}", "name": "{name}", "pid": 0, "tid": 7, "ts": {ts}, "dur": {dur}, '
        f'"args": {json.dumps(args)}}}'
    )


def test_kineto_keeps_nanoseconds_of_absolute_times(tmp_path: Path) -> None:
    """16 digits before the point: a double would round these to 250 ns."""
    path = tmp_path / "t.json"
    events = [event("Kernel", "a", "1767189312000123.456", 1.001, device=0, stream=7, correlation=5)]
    path.write_text(f'{{"schemaVersion": 1, "traceEvents": [{",".join(events)}]}}')
    t = read(path)
    assert t.kernels.start_ns.tolist() == [1767189312000123456]
    assert t.kernels.duration_ns.tolist() == [1001]


def test_kineto_rounds_what_is_finer_than_a_nanosecond_once(tmp_path: Path) -> None:
    """Where the nearest double would round the other way; half a nanosecond goes to the even one."""
    path = tmp_path / "t.json"
    starts = {"0.0005": 0, "0.0015": 2, "2.0": 2000, "4100000000000.0006": 4100000000000001}
    events = [event("kernel", "a", ts, 1, device=0, stream=7, correlation=5) for ts in starts]
    path.write_text(f'{{"schemaVersion": 1, "traceEvents": [{",".join(events)}]}}')
    assert read(path).kernels.start_ns.tolist() == [*starts.values()]


def test_kineto_graph_kernels_are_those_of_a_graph_launch(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    events = [
        event("cuda_runtime", "cudaGraphLaunch", 1, 2, correlation=9),
        event("cuda_runtime", "cudaLaunchKernel", 4, 2, correlation=10),
        event("kernel", "in", 10, 2, device=0, stream=7, correlation=9),
        event("kernel", "out", 20, 2, device=0, stream=7, correlation=10),
        event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 30, 2, device=0, stream=7, correlation=9, bytes=8),
        event("cuda_sync", "Stream Sync", 0, 1000, device=0, stream=7, occupancy=float("nan")),
    ]
    path.write_text(f"[{','.join(events)}]")
    t = read(path)
    assert (t.graph_mode, t.kernels.graph.tolist(), t.memcpy.graph.tolist()) == ("node", [0, NONE], [0])
    assert COPY_KINDS[t.memcpy.kind[0]] == "PtoP"
    assert t.host["synchronization"] == (1, 1_000_000)


def test_kineto_graphs_without_ids_are_told_apart(tmp_path: Path) -> None:
    """HIP and CUDA; two graphs by what they launch, and a launch that the capture's end cut belongs to its graph."""
    for api in ("cudaGraphLaunch", "hipGraphLaunch"):
        events = []
        for i, names in enumerate((["a", "b", "b"], ["c", "a"], ["b", "a", "b"], ["c", "a"], ["a", "b"])):
            events.append(event("cuda_runtime", api, i * 10, 2, correlation=i + 1))
            for j, name in enumerate(names):
                events.append(event("kernel", name, 100 + i * 10 + j, 1, device=0, stream=7, correlation=i + 1))
        (tmp_path / "t.json").write_text(f"[{','.join(events)}]")
        found = summarise(read(tmp_path / "t.json"))
        assert found.graph_mode == "node"
        assert isinstance(found.graphs, list)
        assert sorted((g.launches, g.nodes, g.truncated) for g in found.graphs) == [(2, 2, 0), (3, 3, 1)]


def test_kineto_operators_and_modules_have_gpu_time(tmp_path: Path) -> None:
    events = [
        event("python_function", "nn.Module: Layer_0", 0, 100),
        event("python_function", "forward", 0, 100),
        event("cpu_op", "aten::linear", 10, 50),
        event("cpu_op", "aten::addmm", 20, 20),
        event("cuda_runtime", "cudaLaunchKernel", 25, 2, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 70, 2, correlation=2),
        event("kernel", "a", 200, 5, device=0, stream=7, correlation=1),
        event("kernel", "b", 210, 3, device=0, stream=7, correlation=2),
    ]
    (tmp_path / "t.json").write_text(f"[{','.join(events)}]")
    s = summarise(read(tmp_path / "t.json"))
    assert s.nvtx == []
    assert {(n.name, n.domain): (n.gpu_us, n.self_us) for n in s.operators} == {
        ("nn.Module: Layer_0", "module"): (8.0, 8.0),
        ("aten::linear", "operator"): (5.0, 0.0),
        ("aten::addmm", "operator"): (5.0, 5.0),
    }
    assert len(by_nvtx(read(tmp_path / "t.json"), "nn.Module: *").kernels) == 2


def test_compressed_sqlite(tmp_path: Path) -> None:
    plain = decode(tmp_path / "a.sqlite", 400, per_step=100)
    packed = tmp_path / "a.sqlite.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read(packed).kernels.start_ns.tolist() == read(plain).kernels.start_ns.tolist()
    assert read(packed).source == "a.sqlite.gz"


def test_rocprof_json(tmp_path: Path) -> None:
    """Dispatches on two GPUs, a copy to one, HIP calls that launched them."""
    agents = [{"id": {"handle": h}, "type": kind, "name": name, "product_name": name, "logical_node_type_id": n}
              for h, kind, name, n in ((9, 1, "cpu", 0), (10, 2, "gfx942", 0), (11, 2, "gfx942", 1))]  # fmt: skip

    def dispatch(i: int, agent: int, kernel: int, start: int) -> dict[str, Any]:
        info = {"agent_id": {"handle": agent}, "queue_id": {"handle": 3}, "kernel_id": kernel}
        at = {"start_timestamp": start, "end_timestamp": start + 100, "correlation_id": {"internal": i}}
        return at | {"dispatch_info": info}

    process = {
        "agents": agents,
        "kernel_symbols": [{"kernel_id": 7, "formatted_kernel_name": "attn_fwd"}],
        "strings": {"buffer_records": [{"operations": ["hipLaunchKernel"]}]},
        "buffer_records": {
            "kernel_dispatch": [dispatch(1, 10, 7, 1000), dispatch(2, 11, 8, 1050)],
            "memory_copy": [{"start_timestamp": 10, "end_timestamp": 20, "src_agent_id": {"handle": 9},
                             "dst_agent_id": {"handle": 11}}],
            "hip_api": [{"start_timestamp": 1, "end_timestamp": 2, "thread_id": 5, "correlation_id": {"internal": 1}}],
        },
    }  # fmt: skip
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"rocprofiler-sdk-tool": [process]}))
    t = read(path)
    assert (t.names, t.kernels.device.tolist(), t.memcpy.device.tolist()) == (["attn_fwd", "kernel 8"], [0, 1], [1])
    assert COPY_KINDS[t.memcpy.kind[0]] == "HtoD"
    s = summarise(t)
    assert (s.holds, s.kernels_without_api, [c.name for c in s.api]) == (True, 1, ["hipLaunchKernel"])
    path.write_text(json.dumps({"rocprofiler-sdk-tool": [process, process]}))
    with refused("results.json", "one process"):
        read(path)


# Refusals ------------------------------------------------------------------------------------------------------------


def test_truncated_sqlite(tmp_path: Path) -> None:
    whole = decode(tmp_path / "whole.sqlite", 2000, per_step=500).read_bytes()
    path = tmp_path / "cut.sqlite"
    # With less than the header nothing says how long the file should be.
    for size, words in ((50, "SQLite"), (3000, f"of {len(whole)} bytes"), (len(whole) * 99 // 100, "truncated")):
        path.write_bytes(whole[:size])
        with refused(path.name, words, remedy="export"):
            read(path)


def test_corrupt_sqlite(tmp_path: Path) -> None:
    """Every page but the first overwritten: the header says nothing is missing."""
    path = decode(tmp_path / "a.sqlite", 2000, per_step=500)
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xa5" * (len(whole) - 4096))
    with refused("a.sqlite", "SQLite", remedy="export"):
        read(path)


def test_text_where_a_number_belongs(tmp_path: Path) -> None:
    export = Export()
    export.kernel("a", 1, 2)
    path = export.write(tmp_path / "a.sqlite")
    with sqlite3.connect(path) as base:
        base.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon'")
    base.close()
    with refused("a.sqlite", "number", remedy="export"):
        read(path)


REFUSED = {
    "empty": (b"", "empty", "export"),
    "a.json": (b'{"traceEvents": [{"ph": "X", "ca', "JSON", "export"),
    "b.json": (b'{"a": 1}', "traceEvents", "export_chrome_trace"),
    "c.json": (b'[{"frame": {"name": "ROOT"}}]', "PyTorch", "README.md"),
    "l.json": (b'{"traceEvents": [{"ph": "X", "ts": "soon"}]}', "ts", "export"),
    "d.json.gz": (gzip.compress(b'{"traceEvents": []}' * 99, mtime=0)[:40], "gzip", "copy"),
    "e.bin": (bytes(range(256)), "text", "nsys SQLite"),
    "f.txt": (b"hello\n", "no profile", "nsys SQLite"),
    "g.nsys-rep": (b"\x01\x02", ".nsys-rep", "nsys export"),
    "h.csv": (b"Time (%),Total Time (ns),Instances,Name\n", "no rows", ""),
    "i.csv": (b"Time (%),Total Time (ns),Instances,Name\n50.0,12\n", "line 2 has 2 of 4", "export"),
    "j.csv": (b"Time (%),Total Time (ns),Instances,Name\n50.0,many,3,a\n", "'many'", "export"),
    "k.csv": (b"Time (%),Total Time (fortnights),Instances,Name\n50.0,2,3,a\n", '"fortnights"', "known: ns"),
}


def test_refused_in_one_line(tmp_path: Path) -> None:
    for name, (content, words, remedy) in REFUSED.items():
        path = tmp_path / name
        path.write_bytes(content)
        with refused(name, words, remedy=remedy):
            read(path)


def test_other_things_are_refused(tmp_path: Path) -> None:
    path, packed = tmp_path / "other.sqlite", tmp_path / "a.gz"
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE friends (name)")
    base.close()
    packed.write_bytes(gzip.compress(path.read_bytes()))
    torn, bomb = tmp_path / "torn.gz", tmp_path / "bomb.gz"
    noise = b"SQLite format 3\0" + random.Random(0).randbytes(9_000)
    torn.write_bytes(gzip.compress(noise)[:2000])
    bomb.write_bytes(gzip.compress(b"SQLite format 3\0" + bytes(20_000_000)))
    for place, words, remedy in (
        (path, "not an nsys export", "nsys export"),
        (tmp_path, "folder", ""),
        (tmp_path / "absent", "No such file", "path"),
        (packed, "not an nsys export", "nsys export"),
        (torn, "not complete gzip", "copy"),
        (bomb, "times its size", "gunzip"),
    ):
        with refused(place.name, words, remedy=remedy):
            read(place)
