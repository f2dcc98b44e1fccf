"""`lab rows`: what profiles/ holds, under keys that never go missing.

Rows are written by `records.append` into an empty profiles folder, so that no measurement of the repository changes
what is asserted; one test reads the committed ones.
"""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from lab.base import files
from lab.cli import main
from lab.row import store
from lab.row.records import Status
from lab.write import listing
from tests.row.made import ROW, measurement

Capture = pytest.CaptureFixture[str]
PROMISED = {"device", "phase", "family", "arm", "name", "precision", "workload", "status", "timer", "l2", "median_us"}
PROMISED |= {"iqr_us", "n", "converged", "relative_error", "run", "commit"}
OK: dict[str, Any] = {
    "device": "h200",
    "phase": "p5",
    "family": "gdn",
    "arm": "control",
    "name": "fused",
    "precision": "bf16",
    "workload_id": "t63_hk2_hv4_d64",
    "workload": {"T": 63, "batch": 1, "Hk": 2, "Hv": 4, "D": 64, "state_dtype": "f32"},
    "status": "ok",
    "run": "2026-11-20T000000Z",
    "started": "2026-11-20T00:00:00+00:00",
    "timer": "graph",
    "l2": "cold",
    "median_us": 12.25,
    "iqr_us": 0.5,
    "n": 130,
    "converged": False,
    "relative_error": 1.5e-3,
    "commit": "a1b2c3d4e5f6",
    "samples_us": [12.0, 12.25, 12.5],
}
BARE = {k: OK[k] for k in ROW} | {"arm": "candidate", "status": "oom", "message": "too big"}
BARE |= {"device": "gb10", "commit": "unknown", "started": "2026-11-19T00:00:00+00:00"}
PEER = OK | {"phase": "lp9-kernel", "arm": "peer", "run": "2026-11-21T000000Z", "started": "2026-11-21T00:00:00+00:00"}


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    for row in (OK, BARE, PEER):
        store.append(tmp_path / row["device"] / row["phase"] / row["run"], measurement(**row))
    return tmp_path


def listed(capsys: Capture, *flags: str) -> list[dict[str, Any]]:
    assert main.main(["rows", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, list)
    return found


@pytest.mark.usefixtures("profiles")
def test_keys(capsys: Capture) -> None:
    bare, ok, peer = listed(capsys)
    for row in (bare, ok, peer):
        assert set(row) == set(listing.KEYS)
    assert set(listing.KEYS) >= PROMISED
    assert {k: ok[k] for k in PROMISED} == {k: OK[k] for k in PROMISED}
    assert "samples_us" not in ok
    assert (bare["status"], bare["message"], bare["median_us"], bare["timer"]) == ("oom", "too big", None, None)
    assert (bare["relative_error"], bare["n"], bare["converged"], bare["commit"]) == (None, None, None, None)
    assert (peer["arm"], peer["workload"]["state_dtype"]) == ("peer", "f32")


@pytest.mark.usefixtures("profiles")
@pytest.mark.parametrize(
    ("flags", "phases"),
    [
        ([], ["p5", "p5", "lp9-kernel"]),
        (["--device", "h200"], ["p5", "lp9-kernel"]),
        (["--device", "NVIDIA H200"], ["p5", "lp9-kernel"]),
        (["--device", "gb10"], ["p5"]),
        (["--phase", "p5"], ["p5", "p5"]),
        (["--family", "gdn", "--phase", "p5", "--device", "h200"], ["p5"]),
        (["--family", "kv"], []),
        (["--phase", "p6"], []),
        (["--device", "rtx-5090"], []),
    ],
    ids=" ".join,
)
def test_filters(flags: list[str], phases: list[str], capsys: Capture) -> None:
    assert [row["phase"] for row in listed(capsys, *flags)] == phases


@pytest.mark.usefixtures("profiles")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--family", "gnd"], '--family: no family is named "gnd"; did you mean "gdn"?'),
        (["--phase", "lp9kernel"], '--phase: no phase is named "lp9kernel"; did you mean "lp9-kernel"?'),
        (["--device", "h20"], '--device: no device has the id "h20"; did you mean "h200"?'),
    ],
)
def test_unknown_filter(flags: list[str], said: str, capsys: Capture) -> None:
    assert main.main(["rows", *flags, "--json"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"lab: {said}\n")


def test_phase_whose_card_is_gone_keeps_its_rows(profiles: Path, capsys: Capture) -> None:
    store.append(profiles / "h200" / "retired" / OK["run"], measurement(**OK | {"phase": "retired"}))
    assert [row["phase"] for row in listed(capsys, "--phase", "retired")] == ["retired"]


@pytest.mark.usefixtures("profiles")
def test_table(capsys: Capture) -> None:
    assert main.main(["rows"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "device, phase workload arm median us (IQR) rel. error timer, L2 run"
    assert lines[2].split()[:6] == ["gb10", "p5", "t63_hk2_hv4_d64", "candidate", "fused", "oom"]
    assert " ".join(lines[3].split()).startswith(
        "h200 p5 t63_hk2_hv4_d64 control fused 12.25 (0.50) 1.5e-03 graph, cold"
    )
    assert "not" in lines[3] + lines[4]
    assert main.main(["rows", "--family", "kv"]) == 0
    assert capsys.readouterr().out == "no measured rows\n"


def test_broken_file_is_one_line(profiles: Path, capsys: Capture) -> None:
    (profiles / "h200" / "p5" / OK["run"] / "rows.jsonl").write_text('{"schema": 1, "dev')
    assert main.main(["rows"]) == 2
    assert "rows.jsonl line 1: not JSON" in capsys.readouterr().err


def test_committed_rows(capsys: Capture) -> None:
    found = listed(capsys)
    assert len(found) == sum(len(files.read_packed(path).splitlines()) for path in store.measured())
    for row in found:
        assert row["status"] in get_args(Status)
        assert (row["median_us"] is None) == (row["status"] not in ("ok", "suspect"))
