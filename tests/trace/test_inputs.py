"""What other profilers write: nsys's tables in columns, rocprof's CSV, XSpace, and archives of several profiles."""

import gzip
import io
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest

from lab.cli import main
from lab.trace.files import read, read_all
from lab.trace.model import COPY_KINDS, totals_by_name
from tests.refused import held, refused

REAL = Path(__file__).parent / "profiles"
SUMMARY = """\
[6/8] Executing 'cuda_gpu_kern_sum' stats report

 Time (%)  Total Time (ns)  Instances  Avg (ns)                Name
 --------  ---------------  ---------  --------  --------------------------
     60.0        1,423,200          2  711,600.0  inc(int *, unsigned long)
     40.0          948,800          1  948,800.0  void f<(int)4, at::Fil\u2026

[7/8] Executing 'cuda_gpu_mem_time_sum' stats report

 Time (%)  Total Time (ns)  Count       Operation
 --------  ---------------  -----  ------------------
     50.9       13,866,983      1  [CUDA memcpy HtoD]
"""
TIMELINE = """\
 ** CUDA GPU Trace (cuda_gpu_trace):

 Start (ns)  Duration (ns)  CorrId  Bytes (MB)        Device         Ctx  Strm         Name
 ----------  -------------  ------  ----------  -------------------  ---  ----  ------------------
  1,000,000          2,500     117       0.500  NVIDIA H200 (0)        1     7  [CUDA memcpy HtoD]
  1,010,000          4,000     118              NVIDIA H200 (0)        1     7  f<int>(int *, int)
"""
ROCPROFV3 = """\
"Kind","Agent_Id","Queue_Id","Stream_Id","Thread_Id","Kernel_Name","Correlation_Id","Start_Timestamp","End_Timestamp"
"KERNEL_DISPATCH","Agent 4",1,1,85,"void add<float>(float*, int)",1,1751874061244694123,1751874061244695123
"KERNEL_DISPATCH","Agent 4",2,2,85,"Cijk_Ailk_Bljk_HHS",8,1751874061244695123,1751874061244699124
"""
ROCPROF = """\
"Index","KernelName","gpu-id","queue-id","pid","tid","grd","wgp","DispatchNs","BeginNs","EndNs","CompleteNs"
0,"add(float*) [clone .kd]",1,0,77,77,1024,64,90,100,130,140
"""


def written(tmp_path: Path, name: str, text: str | bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_totals_in_columns(tmp_path: Path) -> None:
    t = read(written(tmp_path, "a.txt", SUMMARY))
    assert (t.tool, t.timeline) == ("nsys stats", False)
    found = [(n.name, n.count, n.sum_ns) for n in totals_by_name(t)]
    assert found == [("inc(int *, unsigned long)", 2, 1_423_200), ("void f<(int)4, at::Fil\u2026", 1, 948_800)]
    assert [w for w in t.warnings if "1 names are cut" in w], "a name in columns may be cut, and says so"


def test_a_timeline_in_columns(tmp_path: Path) -> None:
    t = read(written(tmp_path, "a.txt", TIMELINE))
    assert (t.timeline, t.gpus) == (True, {0: "NVIDIA H200"})
    assert t.kernels.start_ns.tolist() == [1_010_000]
    assert t.kernels.duration_ns.tolist() == [4_000]
    assert t.kernels.stream.tolist() == [7]
    assert (t.memcpy.bytes.tolist(), COPY_KINDS[t.memcpy.kind[0]]) == ([500_000], "HtoD")
    with refused("b.txt", "line 6"):
        read(written(tmp_path, "b.txt", TIMELINE.replace("4,000", "4.0k0")))


def test_rocprof_tables(tmp_path: Path) -> None:
    t = read(written(tmp_path, "a_kernel_trace.csv", ROCPROFV3))
    assert (t.tool, t.gpus, t.kernels.stream.tolist()) == ("rocprof", {4: ""}, [1, 2])
    assert t.kernels.start_ns.tolist() == [1751874061244694123, 1751874061244695123], "to the nanosecond"
    assert t.kernels.duration_ns.tolist() == [1000, 4001]
    t = read(written(tmp_path, "results.csv", ROCPROF))
    assert (t.kernels.duration_ns.tolist(), t.kernels.device.tolist()) == ([30], [1])
    stats = '"Name","Calls","TotalDurationNs","AverageNs","Percentage"\n"add",10,5000,500,100.0\n'
    t = read(written(tmp_path, "stats.csv", stats))
    assert (t.tool, t.timeline, t.kernels.count, int(t.kernels.duration_ns.sum())) == ("rocprof", False, 10, 5000)
    copies = (
        '"Kind","Direction","Source_Agent_Id","Destination_Agent_Id","Correlation_Id","Start_Timestamp",'
        '"End_Timestamp"\n"MEMORY_COPY","MEMORY_COPY_HOST_TO_DEVICE","Agent 0","Agent 4",1,10,30\n'
        '"MEMORY_COPY","MEMORY_COPY_DEVICE_TO_HOST","Agent 4","Agent 0",2,40,50\n'
    )
    t = read(written(tmp_path, "memory_copy_trace.csv", copies))
    assert [COPY_KINDS[k] for k in t.memcpy.kind] == ["HtoD", "DtoH"]
    assert t.memcpy.device.tolist() == [4, 4], "the GPU's end of the copy"


# XSpace ---------------------------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    found = b""
    while value > 127:
        found, value = found + bytes([value & 127 | 128]), value >> 7
    return found + bytes([value])


def message(*fields: tuple[int, int | bytes | str]) -> bytes:
    """A protocol buffer: numbers as varints, all else with its length."""
    found = b""
    for number, value in fields:
        if isinstance(value, int):
            found += varint(number << 3) + varint(value)
        else:
            content = value.encode() if isinstance(value, str) else value
            found += varint(number << 3 | 2) + varint(len(content)) + content
    return found


def plane(name: str, lines: dict[str, list[tuple[str, int, int, int]]], **about: str) -> bytes:
    """A plane of lines, each with (event, offset ps, duration ps, correlation); about: statistics of the plane."""
    names = dict.fromkeys(event for events in lines.values() for event, *_ in events)
    numbers = {event: i + 1 for i, event in enumerate(names)}
    stats = {key: i + 2 for i, key in enumerate(about)} | {"correlation_id": 1, "memcpy_details": 90}
    parts: list[tuple[int, int | bytes | str]] = [(2, name)]
    for i, (line, events) in enumerate(lines.items()):
        rows = [
            message((1, numbers[event]), (2, at), (3, ps), (4, message((1, 1), (4, correlation))),
                    (4, message((1, 90), (5, "kind:HtoD size:64 async:1"))))
            for event, at, ps, correlation in events
        ]  # fmt: skip
        parts.append((3, message((1, i + 7), (2, line), (3, 5_000), *((4, row) for row in rows))))
    parts += [(4, message((1, n), (2, message((1, n), (2, event))))) for event, n in numbers.items()]
    parts += [(5, message((1, n), (2, message((1, n), (2, key))))) for key, n in stats.items()]
    parts += [(6, message((1, stats[key]), (5, value))) for key, value in about.items()]
    return message(*parts)


SPACE = message(
    (1, plane("/host:CPU", {"python": [("train_step", 0, 90_000_000, 0), ("$file.py:1 f", 0, 9_000, 0),
                                      ("hipModuleLaunchKernel", 0, 5_000_000, 9)]})),
    (1, plane("/host:CUPTI", {"thread": [("cuLaunchKernel", 1_000_000, 500_000, 5)]})),
    (1, plane(
        "/device:GPU:1",
        {
            "Stream #13(Compute)": [("gemm_fusion_dot", 2_000_000, 3_500_500, 5), ("Memset", 6_000_000, 1_000, 7)],
            "Stream #14(MemcpyH2D)": [("MemcpyH2D", 2_500_000, 2_000_000, 6)],
            "Stream #15": [("CopyDeviceToDevice", 9_000_000, 1_000, 8)],
            "XLA Ops": [("gemm_fusion_dot", 2_000_000, 3_500_500, 5)],
        },
        device_type_string="NVIDIA H100",
    )),
    (2, "an error of the profiler"),
)  # fmt: skip


def test_an_xspace(tmp_path: Path) -> None:
    for content in (SPACE, gzip.compress(SPACE)):
        t = read(written(tmp_path, "vm.xplane.pb", content))
        assert (t.tool, t.gpus, t.names, t.labels) == (
            "xplane",
            {1: "NVIDIA H100"},
            ["gemm_fusion_dot"],
            ["train_step"],
        )
        assert t.kernels.start_ns.tolist() == [7_000], "the line's begin and the offset; the viewer's lines are no rows"
        assert t.kernels.end_ns.tolist() == [10_500]
        assert t.kernels.correlation.tolist() == [5]
        assert t.calls.correlation.tolist() == [9, 5], "some releases put the calls among the host's events"
        assert [COPY_KINDS[k] for k in t.memcpy.kind] == ["HtoD", "DtoD"]
        assert (t.memcpy.bytes.tolist(), len(t.memset)) == ([64, 64], 1)


def test_an_xspace_cut_off_anywhere_is_refused_or_read(tmp_path: Path) -> None:
    """Never a traceback; and with a double in it, which is eight bytes."""
    path = written(tmp_path, "a.xplane.pb", b"")
    odd = message((1, message((2, "/host:CPU\0")) + varint(6 << 3 | 2) + b"\x0a" + b"\x11" + struct.pack("<d", 1.5)))
    for content in (odd, *(SPACE[:n] for n in range(40, len(SPACE), 7))):
        path.write_bytes(content)
        with refused(path.name, ""):
            read(path)
            read(tmp_path / "absent" / path.name)  # a cut between planes leaves a whole file


# Archives -------------------------------------------------------------------------------------------------------------


def test_an_archive_is_the_ranks_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = tmp_path / "ranks.zip"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("run/rank1.txt", TIMELINE)
        archive.writestr("run/rank0.csv", ROCPROFV3)
        archive.writestr("run/README.md", "what this is\n")
        archive.write(REAL / "two_gpus_2026.2.1.sqlite.gz", "run/rank2.sqlite.gz")
    tarred = tmp_path / "ranks.tar.gz"
    with tarfile.open(tarred, "w:gz") as archive, zipfile.ZipFile(packed) as same:
        for name in same.namelist():
            member = tarfile.TarInfo(f"../{name}")
            member.size = len(content := same.read(name))
            archive.addfile(member, io.BytesIO(content))
    for path in (packed, tarred):
        found = read_all(path)
        assert [(t.source, len(t.kernels)) for t in found] == [
            ("rank0.csv", 2), ("rank1.txt", 1), ("rank2.sqlite.gz", 4010)
        ]  # fmt: skip
        assert [w for w in found[0].warnings if "README.md" in w]
        assert main.main(["trace", str(path)]) == 0
        assert capsys.readouterr().out.count("rank") >= 3
        with refused(path.name, "archive"):
            read(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ranks.tar.gz", "ranks.zip"], "nothing is unpacked beside it"


def test_an_archive_that_hurts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, member, content, words in (
        ("none.zip", "a.md", b"text", "without a profile"),
        ("bomb.zip", "a.csv", bytes(30_000_000), "times its size"),
    ):
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, content)
        assert main.main(["trace", str(tmp_path / name)]) == 2
        held(capsys.readouterr().err, name, words)
    assert main.main(["trace", str(tmp_path / "bomb.zip"), "--unpack", "31"]) == 2
    held(capsys.readouterr().err, "bomb.zip", "without a profile")
    packed = written(tmp_path, "long.json.gz", gzip.compress((ROCPROF + " " * 4_000_000 + "\n").encode()))
    assert main.main(["trace", str(packed)]) == 2
    held(capsys.readouterr().err, packed.name, "--unpack")
    with zipfile.ZipFile(tmp_path / "torn.zip", "w") as archive:
        archive.writestr("a.md", "text")
    torn = written(tmp_path, "torn.zip", (tmp_path / "torn.zip").read_bytes().replace(b"text", b"test"))
    with refused(torn.name, "whole archive"):
        read_all(torn)
