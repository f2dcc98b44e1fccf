"""Files that were made to hurt: refused in one line with what stands there, or read as no more than text.

What is held is the exit status, the line, what reaches the terminal, and the memory that a bomb may take.
"""

import gzip
import json
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from lab.base.errors import REPOSITORY, BadInput
from lab.bench import ncu
from lab.cli import main
from lab.trace import files, model
from lab.trace.files import read
from tests.refused import held, refused
from tests.trace.nsys_synthetic import Export

ESC = "k\x1b[31m\x1b]0;title\x07\r\x9b1m\u202e\ud800\nGPU_9:forged\x1b[31m"
TOTALS = "Time (%),Total Time (ns),Instances,Name\n"
STARTS = "Start (ns),Duration (ns),CorrId,Bytes (MB),Device,Ctx,Strm,Name\n"
METRICS = '"ID","Kernel Name","Device","Metric Name","Metric Unit","Metric Value"\n'


def kineto(ts: str = "1", dur: str = "2", name: str = "k", **arguments: Any) -> str:
    held = json.dumps({"device": 0, "stream": 7, "correlation": 1, **arguments})
    event = f'{{"ph": "X", "cat": "kernel", "name": {json.dumps(name)}, "ts": {ts}, "dur": {dur}, "args": {held}}}'
    return f'{{"schemaVersion": 1, "deviceProperties": [], "traceEvents": [{event}]}}'


def launch(value: str, number: int = 0, kernel: str = "k", device: str = "0") -> str:
    return f'"{number}","{kernel}","{device}","gpu__time_duration.sum","us","{value}"\n'


NUMBERS = ("1e999", "1e30", "1e999999999", "NaN", "Infinity", "-Infinity", "9" * 400, "18446744073709551616")
REFUSED: dict[str, tuple[str, str]] = {
    **{f"dur = {n:.22}": (kineto(dur=n), "dur = ") for n in NUMBERS},
    **{f"ts = {n:.22}": (kineto(ts=n), "ts = ") for n in NUMBERS},
    **{
        key: (kineto("1", "2", "k", **{key: 2**70}), f"{2**70}")
        for key in ("device", "stream", "correlation", "graph id")
    },
    "an int of 5000 digits": (kineto(dur="9" * 5000), "dur = "),
    "nested, read by json": ('{"a": NaN, "traceEvents": ' + "[" * 100_000, "recursion"),
    "total 1e999": (TOTALS + "100.0,1e999,1,k\n", "'1e999'"),
    "total nan": (TOTALS + "100.0,nan,1,k\n", "'nan'"),
    "total -5": (TOTALS + "100.0,-5,1,k\n", "'-5'"),
    "instances 1e30": (TOTALS + "100.0,5,1e30,k\n", "'1e30'"),
    "within a quote": (TOTALS + '100.0,5,1,"k', "whole CSV"),
    "within a line": (TOTALS + "100.0,5,1,k\n100.0,5,1,vectori", "last line"),
    "start inf": (STARTS + "inf,2,1,,H (0),1,7,k\n", "'inf'"),
    "bytes 1e300": (STARTS + "1,2,1,1e300,H (0),1,7,k\n", "'1e300'"),
    "duration -3": (METRICS + launch("-3"), "-3 us"),
    "duration 1e30": (METRICS + launch("1e30"), "1e+30 us"),
    "duration 1e300": (METRICS + launch("1e300"), "1e+300 us"),
    "decimal comma": (METRICS + launch("6,75"), "line 2: 6,75"),
    "grouped by points": (METRICS + launch("1.234,5"), "line 2: 1.234,5"),
    "one id of two kernels": (METRICS + launch("1") + launch("2", kernel="other"), "ID 0"),
    "nothing recorded": (json.dumps({"schemaVersion": 1, "traceEvents": []}), "activity"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_line_and_2(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, words = REFUSED[name]
    path = tmp_path / "a.profile"
    path.write_text(text)
    assert main.main(["trace", str(path)]) == 2
    held(capsys.readouterr().err, "a.profile", words)


@pytest.mark.parametrize(
    "args",
    [
        {"grid": ["\x1b[31m", 1e30, None], "block": [2**80, 1, 1]},
        {"grid": 3, "block": {}, "registers per thread": "x" * 10_000, "shared memory": {"a": 1}},
        {"External id": [1], "Input Dims": [[1e400, 2], [2, 3]], "Input type": [["a"], {}]},
        {"External id": 5, "Input Dims": [[10**30, 2], [2, 10**30]], "Input type": ["c10::BFloat16"] * 2},
    ],
)
def test_odd_arguments_say_nothing(args: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an operator, a call and a kernel; their places are odd too."""
    path = tmp_path / "a.json"
    at = {"ph": "X", "ts": 0, "dur": 1, "pid": [1], "tid": {}, "args": args}
    events = [{**at, "cat": cat, "name": "aten::mm"} for cat in ("cpu_op", "cuda_runtime", "kernel")]
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    assert main.main(["trace", str(path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) < 200
    assert read(path).launched == {}


def test_what_is_no_number_of_a_stream_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.profile"
    for stream in ("9" * 30, "9" * 5000, "\u00b2", "-", "x"):
        path.write_text(kineto(stream=stream))
        assert read(path).kernels.stream.tolist() == [model.NONE]
        path.write_text(STARTS + f"1,2,{stream},,H ({stream}),1,7,k\n")
        assert read(path).kernels.correlation.tolist() == [model.NONE]
        path.write_text(METRICS + launch("1", device=stream))
        assert read(path).kernels.device.tolist() == [model.NONE]


def test_a_loop_of_links(tmp_path: Path) -> None:
    path = tmp_path / "loop"
    path.symlink_to(path)
    with refused("loop", "cannot be read", remedy="path"):
        read(path)


def database(tmp_path: Path, *statements: str) -> Path:
    import sqlite3

    export = Export()
    export.kernel("k", 1, 2)
    export.nvtx("r", 1, 5)
    path = export.write(tmp_path / "a.sqlite")
    with sqlite3.connect(path) as base:
        for statement in statements:
            base.execute(statement)
    base.close()
    return path


def test_blobs_where_text_belongs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel, texts = "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET", "UPDATE StringIds SET value = x'ff1b5b'"
    for statement in (texts, "UPDATE NVTX_EVENTS SET text = x'ff1b5b'"):
        path = database(tmp_path, statement)
        assert main.main(["trace", str(path)]) == 0
        assert "\\x1b[" in capsys.readouterr().out
        path.unlink()
    again = "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL SELECT * FROM CUPTI_ACTIVITY_KIND_KERNEL"
    for change, words in ((f'{kernel} "end" = {2**63 - 1}', "ns"), (f'{kernel} "end" = {2**61};{again};{again}', "ns"),
                               (f"{kernel} deviceId = {2**40}", f"{2**40}"),
                               (f"{kernel} start = 1.5", "1.5"), (f"{kernel} start = x'ff'", "start"),
                               ("UPDATE NVTX_EVENTS SET start = 'soon'", "soon")):  # fmt: skip
        path = database(tmp_path, *change.split(";"))
        with refused("a.sqlite", words, remedy="export"):
            read(path)
        path.unlink()


def test_names_reach_a_terminal_as_text(tmp_path: Path) -> None:
    """Through every reader, to standard output and, as a window that is not there, to standard error."""
    path = tmp_path / "a.profile"
    event = kineto(name=ESC).replace(
        '"deviceProperties": []', f'"deviceProperties": {json.dumps([{"id": 0, "name": ESC}])}'
    )
    quoted = ESC.replace("\ud800", "").replace("\r", "")
    for text in (event, TOTALS + f'100.0,100,1,"{quoted}"\n', STARTS + f'1,2,1,,"{quoted} (0)",1,7,"{quoted}"\n',
                      METRICS + launch("1", kernel=quoted)):  # fmt: skip
        path.write_text(text)
        command = [sys.executable, "-m", "lab", "trace", str(path)]
        for more, code in (([], 0), (["--nvtx", "\x1b[31m"], 2)) if text is event else (([], 0),):
            done = subprocess.run([*command, *more], cwd=REPOSITORY, capture_output=True, timeout=60, check=False)
            assert (done.returncode, done.stderr.count(b"\n")) == (code, int(code == 2))
            said = (done.stdout + done.stderr).decode()
            assert re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]|^GPU_9", said, re.MULTILINE) == []
            assert "\\x1b[31m" in said or more


def test_a_long_name_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.profile"
    path.write_text(kineto(name="f<" * 60_000 + ">" * 60_000))
    (name,) = read(path).names
    assert len(name) < model.LONGEST + 50
    assert name.endswith("(180000 characters)")
    assert main.main(["trace", str(path)]) == 0, "and its patterns take no minute"


def test_two_reports_one_below_the_other_are_not_merged(tmp_path: Path) -> None:
    text = METRICS + launch("6.75") + METRICS + launch("1,234.5", kernel="other")
    assert [found.metrics["gpu__time_duration.sum"] for found in ncu.launches(tmp_path, text)] == [
        (6.75, "us"),
        (1234.5, "us"),
    ]


def test_a_bomb_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [') + 256 * gzip.compress(b" " * (1 << 20), 9))
    tracemalloc.start()
    with refused("bomb.json.gz", "bytes", remedy="shorter"):
        read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 80 << 20, f"{peak} bytes for a file of {path.stat().st_size}"
    monkeypatch.setattr(files, "LARGEST", 1000)
    path.write_text(kineto() + " " * 1000)
    with refused("bomb.json.gz", "1000 bytes"):
        read(path)


def test_a_trace_of_endless_rows_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lab.trace import stored

    export = Export()
    export.kernel("a", 1, 2)
    path = stored.save(export.trace(), tmp_path / "a.parquet")
    assert len(read(path).kernels) == 1
    monkeypatch.setattr(stored, "MOST_ROWS", 0)
    with refused("a.parquet", "1 rows"):
        read(path)


def test_no_path_of_a_machine_in_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert BadInput(Path(os.path.abspath("data/x.toml")), "a", "b").where == "data/x.toml"
