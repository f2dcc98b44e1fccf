"""`lab bench`: a candidate beside its rivals over shapes, on a bench without a GPU."""

import functools
import json
from pathlib import Path

import pytest
import torch

from lab.base import devices
from lab.bench import machine, measure
from lab.bench.measure import Settings
from lab.cli import main
from lab.row import store
from lab.row.records import Measurement, Provenance
from lab.study import bench
from tests.bench import fake_bench
from tests.refused import held, refused

Capture = pytest.CaptureFixture[str]
ASKED = ("bench", "toy", "faster", "--shape", "N=5..16")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_bench.use(monkeypatch)
    monkeypatch.setattr(machine, "provenance", lambda: Provenance(commit="0"))
    monkeypatch.setattr(measure, "Settings", functools.partial(Settings, backend="tests.bench.fake_bench:quick"))


def test_shapes_of_ranges_and_lists() -> None:
    assert bench.shapes(["M=1..6", "N=64"]) == ["M=1 N=64", "M=2 N=64", "M=4 N=64", "M=6 N=64"]
    assert bench.shapes(["M=3,5", "N=7,8"]) == ["M=3 N=7", "M=3 N=8", "M=5 N=7", "M=5 N=8"]
    for word in ("M=64..1", "M=0..4", "M=1..x", "M", "M=", "=4", "M=1,1", "M=1,", "M=1..4..8"):
        with refused("--shape", f'"{word}"'):
            bench.shapes([word])
    with refused("--shape", "100 shapes"):
        bench.shapes(["M=" + ",".join(map(str, range(1, 11))), "N=" + ",".join(map(str, range(1, 11)))])


def test_a_table_a_plot_and_no_row_in_profiles(
    toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(measure, "require_gpu", lambda command: devices.get("h200"))
    monkeypatch.setattr(store, "FOLDER", tmp_path / "profiles")
    plot, out = tmp_path / "p.svg", tmp_path / "rows"
    more = ("--seconds", "0", "--against", "plain", "--svg", str(plot), "--out", str(out))
    assert main.main([*ASKED, *more]) == 0
    said = capsys.readouterr().out
    lines = {line.split("  ")[0]: line for line in said.splitlines()}
    assert {"N=5", "N=10", "N=16"} <= lines.keys()
    assert "faster" in lines["shape"]
    assert "plain" in lines["shape"]
    assert float(lines["N=10"].split()[1]) == pytest.approx(80, rel=0.01)  # of the made-up clock
    assert float(lines["N=10"].split()[2]) == pytest.approx(100, rel=0.01)
    assert "(-20." in lines["N=10"] or "(-19." in lines["N=10"]
    assert plot.read_text().startswith("<?xml")
    assert len(store.read(out / "rows.jsonl", Measurement)) == 6
    assert not (tmp_path / "profiles").exists()
    assert main.main([*ASKED, "--seconds", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in found} == {"faster", "absent", "packs"}  # the libraries, where none is named
    assert {row["workload_id"] for row in found} == {"N=5", "N=10", "N=16"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the last case is a machine without a GPU")
def test_bad_input_comes_before_the_gpu_is_asked_for(toy: None, capsys: Capture) -> None:
    for arguments, where, word in (
        (("bench", "toy", "fster", "--shape", "N=4"), "kernels/toy", '"faster"'),
        (("bench", "toy", "faster", "--shape", "n=4"), "toy: n=4", "valid: N"),
        ((*ASKED, "--against", "faster"), "--against", "faster"),
        (("bench", "toy", "faster", "--shape", "N=4", "--svg", "p.svg"), "--svg", "M=1..64"),
        (ASKED, "lab bench", "no CUDA GPU"),
    ):
        assert main.main(list(arguments)) == 2
        held(capsys.readouterr().err, where, word)
