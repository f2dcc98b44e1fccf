"""The arena's table, what counts as a false number, and the arena itself on the simulated device."""

import importlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lab.base.errors import REPOSITORY
from lab.bench.comparison import Done, Outcome
from lab.bench.sampling import Comparison, Timing
from lab.bench.worker import Death
from lab.row.records import Clocks
from lab.write import arena, site
from tests.bench.arena import family, run
from tests.refused import refused


def test_each_adversary_has_a_function_a_source_and_a_defence() -> None:
    table = msgspec.toml.decode(arena.TABLE.read_bytes())
    modules = [importlib.import_module(f"tests.bench.arena.{name}") for name in family.MODULES]
    names = [a["name"] for a in table["adversary"]]
    assert len(set(names)) == len(names)
    for a in table["adversary"]:
        assert [m for m in modules if callable(vars(m).get(a["name"]))], a["name"]
        assert a["caught_by"] in table["defences"]
        assert a["known_from"]
        assert set(a.get("device", [])) <= {"cpu", "cuda"}
        assert "|" not in a["does"]
    assert sum("cpu" in a.get("device", ["cpu"]) for a in table["adversary"]) >= 40
    assert sum("cuda" in a.get("device", ["cuda"]) for a in table["adversary"]) >= 40


def timing(us: float) -> Timing:
    numbers = dict.fromkeys(("median_us", "iqr_us", "min_us", "stdev_us", "sd_pct", "drift_pct"), us)
    return Timing(**numbers, n=5, calls=1, sets=5, converged=True, samples_us=(us,) * 5, blocks_us=(us,) * 5)


def done(us: float, status: Any = "ok", control: Any = "ok", source: str = "simulated") -> Done:
    arms = [Outcome("control", "plain", control), Outcome("candidate", "x", status)]
    for outcome, of in zip(arms, (10.0, us), strict=True):
        outcome.timing = timing(of) if outcome.status == "ok" else None
    return Done(arms, Comparison({}, (), 0, 1.0, "graph", (Clocks(source, 1, 1, ""),)))


@pytest.mark.parametrize(
    ("whole", "answer", "gets"),
    [
        (True, done(10.0), "its honest time"),
        (True, done(8.0), "its honest time"),
        (True, done(7.9), "a false number"),
        (True, done(10.0, source="forged"), "a false number"),
        (False, done(10.0), "a false number"),
        (False, done(10.0, status="incorrect"), "no number"),
        (False, done(1.0, control="error"), "no number"),
        (False, Death("time", "x", "timeout", "it hung"), "no number"),
    ],
)
def test_what_counts_as_a_false_number(whole: bool, answer: Any, gets: str) -> None:
    assert run.verdict({"whole": whole}, answer, "x")["gets"] == gets


def test_rows_of_another_device_stay(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    row = {"name": "a", "status": "ok", "message": "", "ratio": 1.0, "gets": "its honest time", "seconds": 1.0}
    run._write(out, [row | {"device": "cpu"}])
    run._write(out, [row | {"device": "cuda"}, row | {"device": "cpu", "seconds": 2.0}])
    assert [(r["device"], r["seconds"]) for r in map(json.loads, out.read_text().splitlines())] == [
        ("cpu", 2.0),
        ("cuda", 1.0),
    ]
    assert len(msgspec.json.Decoder(arena.Row).decode_lines(out.read_bytes())) == 2


def test_page_holds_every_adversary_and_what_became_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "arena.jsonl"
    monkeypatch.setattr(arena, "ROWS", rows)
    assert "(error)" not in arena.markdown()
    run._write(rows, [{"name": "in_a_thread", "device": "cpu", "status": "error", "message": "", "ratio": None,
                       "gets": "no number", "seconds": 1.0}])  # fmt: skip
    text = arena.markdown()
    assert "1 adversaries" in text
    assert [line for line in text.splitlines() if "`in_a_thread`" in line and line.endswith("| no number (error) |  |")]
    site._write_doc(tmp_path, REPOSITORY / "lab/write/docs/arena.md")
    page = (tmp_path / "docs/arena.html").read_text()
    assert all(f"<code>{name}</code>" in page for name in family.adversaries())
    rows.write_text('{"name": "x"}\n')
    with refused(str(rows)):
        arena.markdown()


@pytest.mark.slow
def test_the_harness_outlives_its_adversaries() -> None:
    """An honest candidate gets a number beside them, through processes that are killed, left and lied about."""
    names = ["plain_again", "stored_by_pointer", "exits_with_success", "kills_its_parent", "wrong_shape"]
    gets = {r["name"]: r["gets"] for r in run.rows(names, "cpu", 2)}
    assert gets == dict.fromkeys(names[1:], "no number") | {"plain_again": "its honest time"}
