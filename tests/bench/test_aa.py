"""The run of A/A comparisons, on a bench without a GPU."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from lab.base import devices
from lab.bench import machine, measure
from lab.row.records import Provenance
from lab.write import inserts
from tests.bench import bench_aa, fake_bench
from tests.refused import refused


def test_a_kernel_beside_itself_is_judged_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_aa.families, "names", lambda: ["toy"])
    fake_bench.use(monkeypatch)
    monkeypatch.setattr(fake_bench, "WORKLOADS", tuple(replace(w, role="measure") for w in fake_bench.WORKLOADS))
    monkeypatch.setattr(measure, "require_gpu", lambda: devices.get("h200"))
    monkeypatch.setattr(machine, "provenance", lambda: Provenance(commit="0"))
    monkeypatch.setattr(
        measure, "Settings", functools.partial(measure.Settings, backend="tests.bench.fake_bench:quick")
    )
    assert len({(i.card.control, i.workload.id) for i in bench_aa.items(6)}) == 6
    chosen = [*bench_aa.items(1000)]
    monkeypatch.setattr(bench_aa, "items", lambda count: iter([i for i in chosen if i.card.control == "plain"][:1]))
    out = tmp_path / "aa.jsonl"
    assert bench_aa.main(["--out", str(out), "--count", "1", "--part", "2/2"]) == 0
    assert not out.exists()
    assert bench_aa.main(["--out", str(out), "--count", "1", "--part", "1/2"]) == 0
    (line,) = map(json.loads, out.read_text().splitlines())
    assert (line["candidate"], line["word"]) == ("plain", "NEUTRAL")
    assert line["low_pct"] <= line["change_pct"] <= line["high_pct"]
    monkeypatch.setattr(inserts, "BESIDE", out)
    assert [(row.candidate, row.word) for row in inserts.comparisons()] == [("plain", "NEUTRAL")]
    assert "| 1 | 0 | 1 of 1 |" in inserts.beside()
    assert bench_aa.main(["--out", str(out), "--count", "1"]) == 0  # what is there is not measured again
    assert len(out.read_text().splitlines()) == 1


def test_what_speaks_against_the_promise() -> None:
    line = {"candidate": "c", "workload": "w", "word": "NEUTRAL", "low_pct": -1.0, "high_pct": 1.0}
    off = line | {"low_pct": 0.5}
    assert bench_aa.wrong([line] * 92 + [off] * 8) == []
    assert bench_aa.wrong([line] * 91 + [off] * 9) == ["91 of 100 intervals hold zero"]
    assert bench_aa.wrong([line, line | {"word": "GO"}]) == ["GO for c w"]


def test_the_page_counts_by_what_a_call_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inserts, "BESIDE", tmp_path / "none")
    assert "Not run" in inserts.beside()
    one = {"family": "f", "workload": "w", "candidate": "c", "us": 4.0, "change_pct": 0.1, "low_pct": -0.5}
    one |= {"high_pct": 0.5, "word": "NEUTRAL", "gpu": "G", "driver": "1", "torch": "2", "commit": "0"}
    lines = [one, one | {"us": 10.0, "low_pct": 0.05}, one | {"us": 2000.0, "word": "GO", "low_pct": 0.1}]
    rows = tmp_path / "aa.jsonl"
    rows.write_text("".join(json.dumps(x) + "\n" for x in lines))
    monkeypatch.setattr(inserts, "BESIDE", rows)
    text = inserts.beside()
    assert "| 0 to 10 us | 1 | 0 | 1 of 1 | 0.50 % | 0.50 % |" in text
    assert "| 10 to 50 us | 1 | 0 | 0 of 1 |" in text
    assert "| 250 us and more | 1 | 1 | 0 of 1 |" in text
    rows.write_text('{"us": 1}\n')
    with refused(str(rows)):
        inserts.beside()
