"""`lab verdicts`: what it prints, what makes it fail, and its processes; the whole job is in test_site."""

import os
import re
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.base.errors import BadInput
from lab.card import phases
from lab.check import families
from lab.cli import main
from lab.judge import verdicts as judging
from lab.row import store
from lab.write import jobs, pages, replay, site

JUDGEMENTS = judging.judge_recorded(phases.cards().values())
Capture = pytest.CaptureFixture[str]


# The job, without its dear steps --------------------------------------------------------------------------------------


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """`lab verdicts` with canned checks and notebooks, and without measured rows; the dict says what they return."""
    told: dict[str, Any] = {"checks": [], "titles": {}, "broken": {}}
    monkeypatch.setattr(jobs, "context", lambda: None)
    monkeypatch.setattr(replay, "_side_by_side", lambda *_: (told["checks"], told["titles"], told["broken"]))
    monkeypatch.setattr(store, "measured_devices", lambda card_id: [])
    return told


def test_verdicts_ends_with_the_counts(light: dict[str, Any], tmp_path: Path, capsys: Capture) -> None:
    light["checks"] = [{"family": "f", "candidate": "c", "workload": "w", "status": "ok", "message": ""}]
    assert main.main(["verdicts", "--out", str(tmp_path / "deep" / "site")]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 30
    ds4 = [j for j in JUDGEMENTS if j.system == "ds4"]
    row = next(line.split() for line in text.splitlines() if line.startswith("ds4"))
    assert row[1:3] == [str(len(ds4)), str(sum(bool(j.agrees) for j in ds4))]
    assert sum(map(int, row[3:])) == len(ds4)
    agree = sum(bool(j.agrees) for j in JUDGEMENTS)
    worded = [j for j in JUDGEMENTS if j.source_word]
    own = sum(bool(j.agrees_with_word) for j in worded)
    assert f"{agree} of {len(JUDGEMENTS)} recorded outcomes agree with our reading of the source, {own} of" in text
    assert f"{own} of {len(worded)} with a word of its own" in text
    assert "checks: 1 ok; " in text
    assert (tmp_path / "deep" / "site" / "index.html").exists()
    assert re.search(r"index.html written after \d+ s", text.splitlines()[-1])


def test_what_changed_since_the_last_run(
    light: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def told() -> str:
        assert main.main(["verdicts", "--out", str(tmp_path)]) in (0, 1)
        return capsys.readouterr().out

    assert "no earlier run to compare with" in told()
    assert "since the last run: nothing changed" in told()
    stale = tmp_path / "cards" / "gone.html"
    stale.parent.mkdir()
    stale.write_text("of a card that was there once")
    os.utime(stale, (0, 0))
    fewer = [j for j in JUDGEMENTS if j.recorded_id != "lp.v.p5"]
    monkeypatch.setattr(pages, "judge_recorded", lambda cards: fewer)
    text = told()
    assert "since the last run: 2 changed\n  p5 lp.v.p5: NO-GO -> gone\n  p5 unmeasured-gb10: new -> BLOCKED" in text
    assert not stale.exists()
    (tmp_path / "verdicts.json").write_text("[1")
    assert "no earlier run to compare with" in told()


def test_only_the_first_failures_are_named(light: dict[str, Any], tmp_path: Path, capsys: Capture) -> None:
    light["broken"] = {f"notebooks/{n}.ipynb": "AssertionError" for n in range(9)}
    assert main.main(["verdicts", "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert len((captured.out + captured.err).splitlines()) <= 30
    assert "and 4 more failures, on the site" in captured.err


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "checks",
            [{"family": "f", "candidate": "c", "workload": "w", "status": "incorrect", "message": "y: off"}],
            "lab: check of f/c w: y: off; `lab check f` repeats it",
        ),
        (
            "checks",
            [{"family": "f", "candidate": "c", "workload": "w", "status": "error", "message": "boom"}],
            "lab: check of f/c w: boom; `lab check f` repeats it",
        ),
        ("broken", {"notebooks/nb.ipynb": "AssertionError"}, "lab: notebooks/nb.ipynb: AssertionError"),
    ],
)
def test_verdicts_fails(
    key: str, value: Any, said: str, light: dict[str, Any], tmp_path: Path, capsys: Capture
) -> None:
    light[key] = value
    assert main.main(["verdicts", "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.err.strip() == said
    assert (tmp_path / "index.html").exists()  # what is right is shown all the same


def test_verdicts_fails_on_an_unexplained_verdict(
    light: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    silent = [replace(j, differs="") for j in JUDGEMENTS if j.recorded_id == "lp.v.p4"]
    monkeypatch.setattr(pages, "judge_recorded", lambda cards: silent)
    assert main.main(["verdicts", "--out", str(tmp_path)]) == 1
    assert "lab: p4: lp.v.p4 needs a sentence on why it differs" in capsys.readouterr().err


def test_out_that_cannot_be_written(light: dict[str, Any], tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "site"):
        assert main.main(["verdicts", "--out", str(out)]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith(f"lab: {out}: cannot be written (")
        assert captured.err.count("\n") == 1


def test_read_only_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    for write in (lambda out: site.write_pages(out, []), lambda out: site.write_index(out, [], [], {}, {})):
        with pytest.raises(BadInput, match=r"cannot be written \(Read-only file system\); .*--out"):
            write(tmp_path)


# A child process each -------------------------------------------------------------------------------------------------


def notebook(path: Path, *cells: str) -> Path:
    import nbformat

    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    made.cells.insert(0, nbformat.v4.new_markdown_cell("# A title & more\n\nText."))
    nbformat.write(made, path)
    return path


@pytest.mark.slow
def test_notebooks_are_executed_and_left_alone(tmp_path: Path) -> None:
    """In a process each, as the job does it; a cell that raises, a process that dies: a line, and the rest goes on."""
    cells = ["import lab, sys", "print('result', 6 * 7)", "import pandas\npandas.DataFrame({'b': [1]})"]
    paths = [
        notebook(tmp_path / "good.ipynb", *cells),
        notebook(tmp_path / "bad.ipynb", "assert 1 == 2, 'one is not two'"),
        notebook(
            tmp_path / "dies.ipynb", "import os, sys\nprint('boom', file=sys.__stderr__, flush=True)\nos._exit(3)"
        ),
    ]
    before = paths[0].read_bytes()
    todo = [jobs.Job(p.stem, replay.execute, (p, tmp_path / "out")) for p in paths]
    done = {d.job.name: d for d in jobs.run(todo, 2, jobs.context())}
    assert done["good"].value == ("A title & more", "")
    title, failure = done["bad"].value
    assert (title, failure.endswith("AssertionError: one is not two")) == ("", True)
    assert (done["dies"].value, done["dies"].failure) == (None, "boom")
    page = (tmp_path / "out" / "notebooks" / "good.html").read_text()
    assert "result 42" in page
    assert "<table" in page
    assert not (tmp_path / "out" / "notebooks" / "bad.html").exists()
    assert paths[0].read_bytes() == before


def test_a_family_that_cannot_be_loaded_is_an_error_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def told(name: str, *_: Any, **__: Any) -> Any:
        raise BadInput("kernels/toy", "its cases are missing")

    def outcomes(todo: list[jobs.Job], *_: Any) -> Iterator[jobs.Done]:
        for job in todo:
            yield jobs.Done(job, None, f"BadInput: {job.name}")

    monkeypatch.setattr(families, "names", lambda: ["toy"])
    monkeypatch.setattr(families, "load", told)
    monkeypatch.setattr(pages, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(jobs, "run", outcomes)
    checks, titles, broken = replay._side_by_side(tmp_path, None, (), True, "")
    assert [(c["family"], c["status"], c["message"]) for c in checks] == [("toy", "error", "BadInput: toy")]
    assert (titles, broken) == (
        {},
        {n: f"BadInput: {n}" for n in ("the other pages", *(f"cards, part {i}" for i in (1, 2, 3)))},
    )


def test_every_check_is_in_exactly_one_slice() -> None:
    """What the job splits up is what `lab check` does, nothing twice."""
    for name in families.names():
        family = families.load(name)
        parts = [job.arguments for job in replay._slices(name)]
        alone = [candidate for _, candidate, *_ in parts if candidate]
        ((_, _, apart, _),) = [p for p in parts if p[1] is None]
        assert sorted(alone) == sorted(apart)
        assert set(alone) <= set(family.candidates)
        assert len(set(alone)) == len(alone)


def stuck(seconds: float) -> str:
    time.sleep(seconds)
    return "late"


@pytest.mark.slow
def test_a_job_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "LIMIT_S", 1)
    (done,) = jobs.run([jobs.Job("hangs", stuck, (60.0,))], 1, jobs.context())
    assert done.failure == "stopped after 1 s"


def test_missing_package_is_one_line_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "NEEDED", ("json", "no_such_package"))
    monkeypatch.setattr(replay, "_side_by_side", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(BadInput, match="the package no_such_package is not installed; make verdicts"):
        replay.run(Namespace(out=None, json=False))
