"""What `lab trace` writes beside its text: the page, the picture, CSV, Perfetto; its filters, and files as ranks."""

import csv
import json
import re
from pathlib import Path

import pytest

from lab.cli import main
from lab.trace.files import read
from lab.trace.summary import summarise
from tests.refused import held
from tests.trace.nsys_synthetic import Export, global_pid

EVIL = '</script><script>alert("x")</script><b>'


def two_devices(path: Path, extra: int = 0) -> Path:
    export = Export()
    export.kernel("nvjet_tst_64x64", 0, 10_000)
    export.kernel(EVIL, 20_000, 30_000 + extra, streamId=9)
    export.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL()", 5_000, 25_000, deviceId=1, globalPid=global_pid(7))
    export.nvtx("step", 0, 1000)
    return export.write(path)


def copying(path: Path) -> Path:
    export = Export()
    export.kernel("k", 0, 10_000)
    export.memory("MEMCPY", 10_000, 12_000, bytes=8, copyKind=1)
    export.nvtx("step", 0, 1000)
    return export.write(path)


def test_page_holds_everything_and_no_name_is_markup(tmp_path: Path) -> None:
    source, target = two_devices(tmp_path / "a.sqlite"), tmp_path / "t.html"
    assert main.main(["trace", str(source), "--html", str(target)]) == 0
    text = target.read_text()
    assert "<script>alert" not in text
    data = json.loads(re.search(r"<script id=d type=application/json>(.*?)</script>", text, re.S)[1])  # type: ignore[index]
    assert data["span"] == 30.0
    assert sorted(row[:2] for row in data["rows"]) == [[0.0, 10.0], [5.0, 20.0], [20.0, 10.0]]
    assert len(data["lanes"]) == 3
    assert not re.search(r'(src|href)="?https?:', text), "one file that needs nothing else"
    for head in ("By category", "By kernel", "By device", "Idle because", "The longest gaps", "Ranges"):
        assert head in text


def test_svg_csv_and_perfetto(tmp_path: Path) -> None:
    source = two_devices(tmp_path / "a.sqlite")
    out = {name: tmp_path / f"t.{name}" for name in ("svg", "csv", "perfetto")}
    assert main.main(["trace", str(source), *(x for n, p in out.items() for x in (f"--{n}", str(p)))]) == 0
    assert out["svg"].read_text().lstrip().startswith("<")
    rows = list(csv.DictReader(out["csv"].open()))
    known = {row["name"]: (row["level"], float(row["sum_us"])) for row in rows}
    assert known["dense_gemm"] == ("category", 10.0)
    assert known["nvjet_tst_64x64"] == ("kernel", 10.0)
    again = json.loads(out["perfetto"].read_text())["traceEvents"]
    assert [(e["ts"], e["dur"], e["pid"]) for e in again if e["cat"] == "kernel"] == [
        (0, 10, 0),
        (5, 20, 1),
        (20, 10, 0),
    ]


@pytest.mark.parametrize(
    ("option", "kernels"), [("--device 1", 1), ("--stream 9", 1), ("--process 7", 1), ("--device 0 --stream 7", 1)]
)
def test_filters(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, kernels: int) -> None:
    source = two_devices(tmp_path / "a.sqlite")
    assert main.main(["trace", str(source), "--json", *option.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kernel_count"] == kernels
    assert option.split()[0][2:] in found["window"]
    assert main.main(["trace", str(source), option.split()[0], "77"]) == 2
    held(capsys.readouterr().err, option.split()[0], "77")


def test_several_files_are_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(two_devices(tmp_path / f"{i}.sqlite", i * 15_000)) for i in range(2)]
    assert main.main(["trace", *paths]) == 0
    out = capsys.readouterr().out
    assert "spans differ by 50.0%" in out
    assert main.main(["trace", *paths, "--json"]) == 0
    assert [s["span_us"] for s in json.loads(capsys.readouterr().out)] == [30.0, 45.0]


def test_no_profile_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A forgotten FILE behind --html, and the profile's own name; one picture of several traces there is none."""
    paths = [two_devices(tmp_path / f"{name}.sqlite") for name in "ab"]
    kept = [path.read_bytes() for path in paths]
    chrome = tmp_path / "c.json"
    assert main.main(["trace", str(paths[0]), "--perfetto", str(chrome)]) == 0
    written = chrome.read_bytes()
    for words in (
        *([f"--{option}", str(paths[0]), str(paths[1])] for option in ("html", "svg", "csv", "perfetto")),
        [str(chrome), "--perfetto", str(chrome)],
        [*map(str, paths), "--csv", str(tmp_path / "t.csv")],
    ):
        assert main.main(["trace", *words]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert [path.read_bytes() for path in paths] == kept
    assert chrome.read_bytes() == written
    assert not (tmp_path / "t.csv").exists()


def test_a_rank_is_what_the_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = {"ph": "X", "cat": "kernel", "name": "k", "ts": 0, "dur": 1, "pid": 0, "tid": 7, "args": {"device": 0}}
    paths = []
    for rank in (1, 0, None):
        paths.append(tmp_path / f"r{rank}.json")
        said = {} if rank is None else {"distributedInfo": {"rank": rank}}
        paths[-1].write_text(json.dumps({"schemaVersion": 1, **said, "traceEvents": [event]}))
    assert main.main(["trace", *map(str, paths)]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:4]]
    assert rows == [["rNone.json", "-"], ["r0.json", "0"], ["r1.json", "1"]]


def test_what_is_written_is_what_was_read(tmp_path: Path) -> None:
    """The Chrome trace read again has the same kernels, to the nanosecond."""
    source, target = copying(tmp_path / "a.sqlite"), tmp_path / "t.json"
    assert main.main(["trace", str(source), "--perfetto", str(target)]) == 0
    once, again = summarise(read(source)), json.loads(target.read_text())["traceEvents"]
    assert {e["cat"] for e in again} == {"kernel", "gpu_memcpy", "range"}
    assert once.kernel_sum_us == pytest.approx(sum(e["dur"] for e in again if e["cat"] == "kernel"))
