"""The text readers (nsys stats, Nsight Compute, Kineto) and what every reader refuses, always in one line."""

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from lab.base.errors import BadInput
from lab.bench import ncu
from lab.trace.files import read
from lab.trace.model import COPY_KINDS, NONE, totals_by_name
from tests.trace.nsys_synthetic import Export, decode


def refusal(path: Path) -> str:
    """The one line with which a file is refused."""
    with pytest.raises(BadInput) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert str(path.name) in str(caught.value)
    return str(caught.value)


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


@pytest.mark.parametrize(("unit", "factor"), [("ns", 1), ("us", 1000), ("ms", 1_000_000)])
def test_kern_sum_units_and_other_reports(unit: str, factor: int, tmp_path: Path) -> None:
    """The unit in the header is read, and another report before it is not taken for it."""
    path = tmp_path / "stats.csv"
    path.write_text(
        "Time (%),Total Time (ns),Num Calls,Avg (ns),Name\n90.0,900,3,300,cudaLaunchKernel\n\n"
        f"Processing [x] with [y]...\nTime (%),Total Time ({unit}),Instances,Avg ({unit}),Name\n"
        '60.0,6,2,3,"a<1, 2>"\n40.0,4,1,4,b\n'
    )
    t = read(path)
    assert [(x.name, x.count, x.sum_ns) for x in totals_by_name(t)] == [
        ("a<1, 2>", 2, 6 * factor),
        ("b", 1, 4 * factor),
    ]
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


def test_kineto_graph_kernels_are_those_of_a_graph_launch(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    events = [
        event("cuda_runtime", "cudaGraphLaunch", 1, 2, correlation=9),
        event("cuda_runtime", "cudaLaunchKernel", 4, 2, correlation=10),
        event("kernel", "in", 10, 2, device=0, stream=7, correlation=9),
        event("kernel", "out", 20, 2, device=0, stream=7, correlation=10),
        event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 30, 2, device=0, stream=7, correlation=9, bytes=8),
        event("cuda_sync", "Stream Sync", 0, 1000, device=0, stream=7),
    ]
    path.write_text(f"[{','.join(events)}]")
    t = read(path)
    assert (t.graph_mode, t.kernels.graph.tolist(), t.memcpy.graph.tolist()) == ("node", [0, NONE], [0])
    assert COPY_KINDS[t.memcpy.kind[0]] == "PtoP"
    assert t.host["synchronization"] == (1, 1_000_000)


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [50, 3000, 0.5, 0.99])
def test_truncated_sqlite(keep: float, tmp_path: Path) -> None:
    whole = decode(tmp_path / "whole.sqlite", 2000, per_step=500).read_bytes()
    path = tmp_path / "cut.sqlite"
    path.write_bytes(whole[: int(keep if keep > 1 else keep * len(whole))])
    # With less than the header nothing says how long the file should be.
    assert (": truncated: " if keep != 50 else "cannot be read as SQLite") in refusal(path)


def test_corrupt_sqlite(tmp_path: Path) -> None:
    """Every page but the first overwritten: the header says nothing is missing."""
    path = decode(tmp_path / "a.sqlite", 2000, per_step=500)
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xa5" * (len(whole) - 4096))
    assert "cannot be read as SQLite" in refusal(path)


def test_text_where_a_number_belongs(tmp_path: Path) -> None:
    export = Export()
    export.kernel("a", 1, 2)
    path = export.write(tmp_path / "a.sqlite")
    with sqlite3.connect(path) as base:
        base.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon'")
    base.close()
    assert "number" in refusal(path) or "cannot be read" in refusal(path)


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("empty", b"", "is empty"),
        ("a.json", b'{"traceEvents": [{"ph": "X", "ca', "not complete JSON"),
        ("b.json", b'{"a": 1}', "traceEvents"),
        ("c.json", b'[{"frame": {"name": "ROOT"}}]', "PyTorch"),
        ("d.json.gz", gzip.compress(b'{"traceEvents": []}' * 99, mtime=0)[:40], "gzip"),
        ("e.bin", bytes(range(256)), "neither SQLite nor text"),
        ("f.txt", b"hello\n", "no profile"),
        ("g.nsys-rep", b"\x01\x02", "nsys export"),
        ("h.csv", b"Time (%),Total Time (ns),Instances,Name\n", "no rows"),
        ("i.csv", b"Time (%),Total Time (ns),Instances,Name\n50.0,12\n", "line 2 has 2 of 4 cells"),
        ("j.csv", b"Time (%),Total Time (ns),Instances,Name\n50.0,many,3,a\n", "'many' is no number"),
        ("k.csv", b"Time (%),Total Time (fortnights),Instances,Name\n50.0,2,3,a\n", "fortnights"),
    ],
)
def test_refused_in_one_line(name: str, content: bytes, word: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert word in refusal(path)


def test_other_things_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE friends (name)")
    base.close()
    assert "not an nsys export" in refusal(path)
    assert "folder" in refusal(tmp_path)
    assert "No such file" in refusal(tmp_path / "absent")
    packed = tmp_path / "a.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert "gunzip" in refusal(packed)
