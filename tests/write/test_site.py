"""`lab verdicts`: the site that it writes, what makes it fail, and (slow) the whole job on this checkout."""

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from lab.base.errors import REPOSITORY, BadInput
from lab.card import phases
from lab.check import families
from lab.cli import main
from lab.judge import rules, verdicts
from lab.row import store
from lab.write import jobs, site

JUDGEMENTS = verdicts.judge_recorded(phases.cards().values())
EVIL = '<script>alert("x")</script> & <b>bold</b>'
Capture = pytest.CaptureFixture[str]


class Page(HTMLParser):
    """The tags, links and text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name == "href"]

    def handle_data(self, data: str) -> None:
        self.text += data


def write_site(out: Path, *board: Any) -> None:
    site.write_phases(out)
    site.write_audit(out)
    site.write_index(out, *board)


@pytest.mark.slow
def test_page_for_each_phase(tmp_path: Path) -> None:
    write_site(tmp_path, JUDGEMENTS, [], [], {})
    assert sorted(p.stem for p in (tmp_path / "phases").iterdir()) == sorted(phases.cards())
    for card in phases.cards().values():
        page = Page(tmp_path / "phases" / f"{card.id}.html")
        assert card.question in page.text
        assert page.links == ["../index.html"]
        for case in card.recorded:
            assert all(figure_id in page.text for figure_id in case.figures)
            assert not case.figures or "td" in page.tags  # the Markdown table became one
    index = Page(tmp_path / "index.html")
    assert index.links == ["audit.html", *(f"phases/{j.phase}.html" for j in JUDGEMENTS)]
    audit = Page(tmp_path / "audit.html")
    assert all((tmp_path / link).exists() for link in audit.links if not link.startswith("#"))
    assert "960 of 960 launches" in audit.text
    assert all((tmp_path / link).exists() for link in index.links)
    assert all(j.differs in index.text for j in JUDGEMENTS)
    assert "Measured here" not in index.text


def test_site_escapes_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = phases.card("p1")
    evil = structs.replace(card, title=EVIL, question=EVIL, gate=structs.replace(card.gate, source=EVIL))
    monkeypatch.setattr(phases, "cards", lambda: {"p1": evil})
    first = verdicts.judge_recorded([card])[0]
    finding = replace(first.verdict.decisive[0], observed=EVIL)
    judged = replace(
        first,
        device=EVIL,
        differs=EVIL,
        recorded_verdict=EVIL,
        claims=((EVIL, first.verdict),),
        verdict=rules.Verdict("NO-GO", EVIL, (finding,), (finding,)),
    )
    name = families.names()[0]
    checks = [{"family": name, "candidate": EVIL, "workload": "", "status": "ok", "message": EVIL}]
    write_site(tmp_path, [judged], [judged], checks, {"nb": EVIL})
    for path in (tmp_path / "index.html", tmp_path / "phases" / "p1.html"):
        page = Page(path)
        assert not {"script", "b"} & set(page.tags), path.name
        assert EVIL in page.text
    index = Page(tmp_path / "index.html")
    assert index.text.count(EVIL) >= 11  # five in each board, one notebook
    assert index.links[-1] == "notebooks/nb.html"
    assert "Measured here" in index.text


@pytest.mark.slow
def test_checks_are_counted(tmp_path: Path) -> None:
    name = families.names()[0]
    checks = [{"family": name, "status": s} for s in ("ok", "ok", "skipped", "error")]
    site.write_index(tmp_path, JUDGEMENTS, [], checks, {})
    row = f"<tr><td>{name}</td><td>2</td><td>1</td><td>0</td><td>1</td></tr>"
    assert row in (tmp_path / "index.html").read_text()


# The job, without its dear steps --------------------------------------------------------------------------------------


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """`lab verdicts` with canned checks and notebooks, and without measured rows; the dict says what they return."""
    told: dict[str, Any] = {"checks": [], "pages": {}, "broken": {}}
    monkeypatch.setattr(site.jobs, "context", lambda: None)
    monkeypatch.setattr(site, "_side_by_side", lambda *_: (told["checks"], told["pages"], told["broken"]))
    monkeypatch.setattr(store, "measured_devices", lambda card_id: [])
    return told


def test_verdicts_ends_with_the_counts(light: dict[str, Any], tmp_path: Path, capsys: Capture) -> None:
    light["checks"] = [{"family": "f", "candidate": "c", "workload": "w", "status": "ok", "message": ""}]
    assert main.main(["verdicts", "--out", str(tmp_path / "deep" / "site")]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 20
    ds4 = [j for j in JUDGEMENTS if j.system == "ds4"]
    row = next(line.split() for line in text.splitlines() if line.startswith("ds4"))
    assert row[1:3] == [str(len(ds4)), str(sum(bool(j.agrees) for j in ds4))]
    assert sum(map(int, row[3:])) == len(ds4)
    agree = sum(bool(j.agrees) for j in JUDGEMENTS)
    assert f"{agree} of {len(JUDGEMENTS)} verdicts agree with their source; checks: 1 ok; " in text
    assert (tmp_path / "deep" / "site" / "index.html").exists()
    assert re.search(r"index.html written after \d+ s", text.splitlines()[-1])


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "checks",
            [{"family": "f", "candidate": "c", "workload": "w", "status": "incorrect", "message": "y: off"}],
            "lab: check failed: f/c w: y: off",
        ),
        (
            "checks",
            [{"family": "f", "candidate": "c", "workload": "w", "status": "error", "message": "boom"}],
            "lab: check failed: f/c w: boom",
        ),
        ("broken", {"notebooks/nb.ipynb": "AssertionError"}, "lab: notebooks/nb.ipynb failed: AssertionError"),
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
    monkeypatch.setattr(site, "judge_recorded", lambda cards: silent)
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
    for write in (site.write_phases, site.write_audit, lambda out: site.write_index(out, [], [], [], {})):
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
    todo = [site.jobs.Job(p.stem, site.execute, (p, tmp_path / "out")) for p in paths]
    done = {d.job.name: d for d in site.jobs.run(todo, 2, site.jobs.context())}
    assert done["good"].value == ("A title & more", "")
    assert done["bad"].value == ("", "AssertionError: one is not two")
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
            failure = "" if job.run is site.write_audit else f"BadInput: {job.name}"
            yield jobs.Done(job, None, failure, 1.0)

    monkeypatch.setattr(families, "names", lambda: ["toy"])
    monkeypatch.setattr(families, "load", told)
    monkeypatch.setattr(site, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(jobs, "run", outcomes)
    checks, pages, broken = site._side_by_side(tmp_path, None, True, "")
    assert [(c["family"], c["status"], c["message"]) for c in checks] == [("toy", "error", "BadInput: toy")]
    assert (pages, broken) == ({}, {"the pages of the phases": "BadInput: the pages of the phases"})


def test_every_check_is_in_exactly_one_slice() -> None:
    """What the job splits up is what `lab check` does, nothing twice."""
    for name in families.names():
        family = families.load(name)
        parts = [job.arguments for job in site._slices(name)]
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


@pytest.mark.slow
def test_the_whole_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """On one family and two notebooks; tests/kernels checks every candidate, tests/test_notebooks executes the rest."""
    (tmp_path / "books").mkdir()
    for name in ("audit", "measuring"):
        shutil.copy(REPOSITORY / "notebooks" / f"{name}.ipynb", tmp_path / "books")
    monkeypatch.setattr(site, "NOTEBOOKS", tmp_path / "books")
    slices = site._slices
    monkeypatch.setattr(site, "_slices", lambda name, kept: slices(name, kept) if name == "q8" else [])
    assert main.main(["verdicts", "--out", str(tmp_path / "site")]) == 0
    text = capsys.readouterr().out
    assert "2 of 2 notebooks executed" in text
    assert re.search(r"^q8: (\d+) of \1 checks ok", text, re.MULTILINE)
    index = Page(tmp_path / "site" / "index.html")
    assert all((tmp_path / "site" / link).exists() for link in index.links)
    assert sorted(p.stem for p in (tmp_path / "site" / "notebooks").glob("*.html")) == ["audit", "measuring"]


def test_missing_package_is_one_line_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "NEEDED", ("json", "no_such_package"))
    monkeypatch.setattr(site, "_side_by_side", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(BadInput, match="the package no_such_package is not installed; make verdicts"):
        site.verdicts()
