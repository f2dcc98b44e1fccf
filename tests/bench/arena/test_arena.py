"""The arena's table, what counts as a false number, and the arena itself on the simulated device."""

import importlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lab.base.errors import REPOSITORY
from lab.bench.comparison import Done, Outcome
from lab.bench.sampling import Comparison, Timing
from lab.bench.worker import Death
from lab.row.records import Clocks
from lab.write import inserts, site
from tests.bench.arena import family, run
from tests.refused import refused


def test_each_adversary_has_a_function_a_source_and_a_defence() -> None:
    table = msgspec.toml.decode(inserts.ADVERSARIES.read_bytes())
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


ROW = {"name": "in_a_thread", "status": "error", "message": "", "ratio": None, "gets": "no number", "seconds": 1.0}
MADE = {"gpu": "", "driver": None, "torch": "2", "commit": "0"}


def test_rows_of_another_device_stay(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    for more in ({"device": "cpu"}, {"device": "cuda"}, {"device": "cpu", "seconds": 2.0}):
        run._write(out, ROW | MADE | more)
    assert [(r["device"], r["seconds"]) for r in map(json.loads, out.read_text().splitlines())] == [
        ("cpu", 2.0),
        ("cuda", 1.0),
    ]
    assert len(msgspec.json.Decoder(inserts.Trial).decode_lines(out.read_bytes())) == 2


def test_page_holds_every_adversary_and_what_became_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "arena.jsonl"
    monkeypatch.setattr(inserts, "ARENA", rows)
    assert "(error)" not in inserts.arena()
    run._write(rows, ROW | MADE | {"device": "cpu"})
    text = inserts.arena()
    assert re.search(r": 1 of \d+ adversaries", text)
    assert inserts.NOT_RUN in text
    assert [line for line in text.splitlines() if "`in_a_thread`" in line and line.endswith("| no number (error) |  |")]
    run._write(rows, ROW | MADE | {"device": "cuda", "gpu": "A GPU"})
    assert inserts.NOT_RUN not in inserts.arena()
    site._write_doc(tmp_path, REPOSITORY / "lab/write/docs/arena.md")
    page = (tmp_path / "docs/arena.html").read_text()
    assert all(f"<code>{name}</code>" in page for name in family.adversaries())
    rows.write_text('{"name": "x"}\n')
    with refused(str(rows)):
        inserts.arena()


def test_committed_rows_are_of_known_adversaries_and_none_has_a_false_number() -> None:
    rows = inserts.trials()
    assert {r.name for r in rows} <= {*family.adversaries(), run.HONEST["name"]}
    assert sum(r.device == "cpu" for r in rows) >= 40
    assert [r.name for r in rows if r.gets == "a false number"] == []
    assert all(r.gets == "its honest time" for r in rows if r.name == run.HONEST["name"])


PARTS = 2  # each starts a harness, and compares the honest candidate


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_adversary_gets_a_false_number_and_the_honest_candidate_gets_one(part: int) -> None:
    """All that a CPU can run, a share of them by one harness that has to outlive them; none leaves a process."""
    names = [a["name"] for a in family.adversaries().values() if "cpu" in a.get("device", ["cpu"])][part::PARTS]
    honest = str(run.HONEST["name"])
    found = {r["name"]: r for r in run.rows([honest, *names], "cpu", 1)}
    assert set(found) == {honest, *names}
    assert {name: r for name, r in found.items() if r["gets"] == "a false number"} == {}
    assert found[honest]["gets"] == "its honest time", found[honest]


def test_a_process_that_outlives_its_run_is_named(tmp_path: Path) -> None:
    place = str(tmp_path)
    with subprocess.Popen(["sleep", "60"], env={"PYTHONPATH": place}) as process:
        while not Path(f"/proc/{process.pid}/environ").read_bytes():
            pass  # its exec is under way
        assert run.survivors(place) == [process.pid]
        process.kill()
    assert run.survivors(place) == []
