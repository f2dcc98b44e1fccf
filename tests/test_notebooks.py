"""The notebooks: pairs in sync, outputs small and clean, every one executed, and their asserts able to fail.

A notebook is a claim about committed rows. So it is executed here from its source, and once more with one recorded
figure altered, where an assert in a cell must stop it: a notebook that passes with a wrong figure checks nothing.
"""

import ast
import dataclasses
import json
import os
import re
import runpy
import traceback
from pathlib import Path

import jupytext
import nbformat
import pandas as pd
import pytest
from jupytext.config import load_jupytext_config
from matplotlib.figure import Figure
from msgspec import structs

from lab.base.errors import REPOSITORY, BadInput
from lab.card import phases, recorded
from lab.judge import verdicts
from lab.row import store
from lab.write import jobs, notebook, pairing, site, writeup

FOLDER = REPOSITORY / "notebooks"
NAMES = sorted({p.stem for p in FOLDER.glob("*.ipynb")} | {p.stem for p in FOLDER.glob("*.py")})
LARGEST_BYTES = 250_000
IMAGES = {"image/svg+xml"}
# What only the machine that executed a notebook could have put into its outputs.
MACHINE = re.compile(r"(?<![\w.])/(?:home|root|Users|tmp|work|var|usr|opt|mnt)/|[A-Z]:\\|site-packages|0x[0-9a-f]{9}")
# A recorded figure that a notebook stands on, and another value for it.
ALTERED = {
    "00_start_here": ("lp.track-b-roofline.gb10.roofline-crossover-m.candidate", 700.0),
    "nvfp4": ("lp.lever1-ssm-out-2d.gb10.decode-agg.candidate.npl128.npp128", 300.0),
    "gdn": ("lp.p5.gb10.gdn-us-per-tok.candidate.npp2048.itemfla", 40.0),
    "gdn_state": ("lp.gdn-context-flat.gb10.gdn-us-per-launch.control.npl4.ctx4x", 11.0),
    "traces": ("lp.decode-parity-explore.gb10.fp4-matmul-share-of-gap.control.npl128", 40.0),
    "audit": ("lp.gate.phase-93.gdn-core-time.launches.candidate", 598.0),
    "kv": ("lp.gate.p6.ceiling-dense-ctx512-npl128", 9.0),
    "kv_ceiling": ("lp.gate.p6.ceiling-moe-ctx8192-npl8", 10.0),
    "imp": ("imp.graphs-gate.rtx-5090.graphs-on-off-ratio.candidate--4", 1.6),
    "lucebox": ("lb.draft-max.rtx-3090.decode.candidate.tokens4k.kvtq3-0.dm8--2", 22.5),
    "ds4": ("ds4.vmm-arena.rtx-pro-6000.prefill.candidate.ctx2048", 1300.0),
    "ik_llama": ("ik.sweep-main-vs-pr.2x-rtx-3090.decode.candidate.n-kv14336", 47.0),
    "staircase": ("lp.patch-0018.gb10.decode-agg.candidate.npl128.npp128", 170.0),
    "p5_p6_h200": ("lp.p5.gb10.gdn-us-per-tok.candidate.npp2048.itemfla", 40.0),
    "localai_p1_p6": ("lp.gate.p5.gdn-npp2048.candidate", 40.0),
}
# Notebooks that stand on measured rows, or on what they compute, alone: there is no recorded figure to alter.
MEASURED_ONLY = {"measuring", "kv_accuracy", "limits"}


def altered(name: str) -> list[str]:
    """The files that an assert was raised through when a notebook ran with its figure altered, [] where none was.

    For a process of its own, as the figure stays altered.
    """
    figure, value = ALTERED[name]
    figures = dict(recorded.figures())
    figures[figure] = structs.replace(figures[figure], value=value)
    recorded.figures = lambda: figures  # type: ignore[assignment]
    os.chdir(FOLDER)
    try:
        runpy.run_path(f"{name}.py")
    except AssertionError as error:
        return [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]
    return []


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def outputs(book: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]


def texts(book: nbformat.NotebookNode) -> list[str]:
    """Every text of every output, whatever its MIME type."""
    found = []
    for output in outputs(book):
        found += [output.text] if output.output_type == "stream" else list(output.get("data", {}).values())
    return ["".join(t) for t in found]


# Committed pairs -----------------------------------------------------------------------------------------------------


def test_there_are_notebooks():
    assert {"00_start_here", "nvfp4"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_pair_is_in_sync(name):
    book, source = read(name), pairing.from_source(FOLDER / f"{name}.py")
    assert [(c.cell_type, c.source) for c in book.cells] == [(c.cell_type, c.source) for c in source.cells]
    assert book.metadata == source.metadata
    assert [c.id for c in book.cells] == [c.id for c in source.cells]


@pytest.mark.parametrize("name", NAMES)
def test_saving_in_jupyterlab_leaves_the_source_as_it_was(name):
    source = FOLDER / f"{name}.py"
    saved = jupytext.writes(read(name), fmt="py:percent", config=load_jupytext_config(str(source)))
    assert saved == source.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_executed_outputs_are_small_and_clean(name):
    book = read(name)
    code = [c for c in book.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1)), "execute it with lab.pairing"
    # A cell that ends in an expression shows something, unless the expression is a bare None.
    for cell in code:
        last = ast.parse(cell.source).body[-1]
        assert cell.outputs or not isinstance(last, ast.Expr) or "else None" in cell.source, cell.source
    assert not any(o.output_type == "error" or o.get("name") == "stderr" for o in outputs(book))
    assert all("execution" not in c.metadata for c in book.cells), "timings change with every execution"
    kinds = {kind for o in outputs(book) for kind in o.get("data", {}) if kind.startswith("image/")}
    assert kinds <= IMAGES
    found = [m.group() for t in texts(book) for m in [MACHINE.search(t)] if m]
    assert not found, f"an output names a machine: {found}"
    assert "Traceback" not in "".join(texts(book))
    assert (FOLDER / f"{name}.ipynb").stat().st_size < LARGEST_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_pictures_have_a_description(name):
    for output in outputs(read(name)):
        if picture := output.get("data", {}).get("image/svg+xml"):
            assert re.search(r'aria-label="[^"]{20,}"', "".join(picture)), "show a figure with notebook.picture"


@pytest.mark.slow
def test_committed_board_is_current():
    """The page that readers see first shows the verdicts that the committed figures and rows give now."""
    cards = phases.cards().values()
    judged = [verdicts.judge_measured(c, "h200") for c in cards if "h200" in store.measured_devices(c.id)]
    seen = "\n".join(texts(read("00_start_here")))
    recorded = verdicts.judge_recorded(cards)
    counts = pd.DataFrame([{"source": j.system, "judge": j.verdict.word, "agrees": j.agrees} for j in recorded])
    table = counts.groupby(["source", "judge"]).size().unstack(fill_value=0)
    table.insert(0, "agrees", counts.agrees.groupby(counts.source).sum())
    for line in notebook.show(table.reset_index(), code=["source"]).bundle["text/markdown"].splitlines()[2:]:
        assert line in seen, f"{line}: execute notebooks/00_start_here.py again"
    for j in recorded:
        assert not j.differs or j.differs.replace("|", "\\|") in seen, f"{j.phase}: execute 00_start_here.py again"
    for j in judged:
        phase, _, observed, word, *_ = writeup.board_rows([j])[0]
        line = (
            notebook.show(pd.DataFrame([{"observed": observed, "word": word}])).bundle["text/markdown"].splitlines()[2]
        )
        assert line.strip("| ") in seen, f"{phase}: execute notebooks/00_start_here.py again"


# Executing -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_executes(name, tmp_path):
    """As `lab verdicts` does it, to a page; its source is what the .ipynb holds (test_pair_is_in_sync)."""
    job = jobs.Job(name, site.execute, (FOLDER / f"{name}.ipynb", tmp_path))
    (done,) = jobs.run([job], 1, jobs.context())
    assert done.failure == ""
    assert done.value[1] == ""
    assert (tmp_path / "notebooks" / f"{name}.html").stat().st_size > 10_000


@pytest.mark.slow
def test_a_jupyter_kernel_gives_the_outputs_that_are_committed():
    """Cells are executed without a kernel's process; with one, one notebook shows the same."""
    from nbclient import NotebookClient

    name = "staircase"
    book = pairing.from_source(FOLDER / f"{name}.py")
    client = NotebookClient(book, timeout=300, record_timing=False, resources={"metadata": {"path": str(FOLDER)}})
    client.execute(env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    shown = [(o.output_type, o.get("data"), o.get("text")) for o in outputs(book)]
    assert shown == [(o.output_type, o.get("data"), o.get("text")) for o in outputs(read(name))]


def test_every_notebook_says_what_it_stands_on():
    assert set(NAMES) == set(ALTERED) | MEASURED_ONLY


@pytest.mark.slow
def test_an_altered_figure_stops_each():
    """By an assert that is the notebook's own."""
    todo = [jobs.Job(name, altered, (name,)) for name in sorted(ALTERED)]
    ended = {done.job.name: (done.value, done.failure) for done in jobs.run(todo, os.cpu_count() or 1, jobs.context())}
    assert ended.keys() == ALTERED.keys()
    assert {name: end for name, end in ended.items() if f"{name}.py" not in (end[0] or ())} == {}


# The pair writer -----------------------------------------------------------------------------------------------------

HEADER = "# ---\n# jupyter:\n#   jupytext:\n#     formats: ipynb,py:percent\n# ---\n\n"


@pytest.mark.slow
def test_pairing_writes_the_same_bytes_twice(tmp_path):
    source = tmp_path / "story.py"
    source.write_text(HEADER + "# %% [markdown]\n# # Story\n\n# %%\n1 + 1\n")
    assert pairing.main([str(source)]) == 0
    first = (tmp_path / "story.ipynb").read_bytes()
    assert pairing.main([str(source)]) == 0
    assert (tmp_path / "story.ipynb").read_bytes() == first
    cells = json.loads(first)["cells"]
    assert cells[1]["outputs"][0]["data"]["text/plain"] == ["2"]


@pytest.mark.slow
def test_pairing_leaves_the_old_notebook_when_a_cell_fails(tmp_path, capsys):
    source = tmp_path / "story.py"
    source.write_text(HEADER + '# %%\nassert False, "the claim does not hold"\n')
    source.with_suffix(".ipynb").write_text("what was there")
    assert pairing.main([str(source)]) == 1
    assert "the claim does not hold" in capsys.readouterr().err
    assert source.with_suffix(".ipynb").read_text() == "what was there"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["story.ipynb", "story.py"]


def test_pairing_refuses_what_is_no_source(tmp_path, capsys):
    assert pairing.main([str(tmp_path / "absent.py")]) == 1
    assert "no py:percent file" in capsys.readouterr().err


# What cells show -----------------------------------------------------------------------------------------------------


def markdown(shown: notebook.Shown) -> list[str]:
    return shown.bundle["text/markdown"].splitlines()


def test_show_aligns_numbers_and_keeps_text_from_being_markup():
    frame = pd.DataFrame({"what": ["a|b *c* <= 5 $", None], "us": [1234.5678, float("nan")], "n": [1234567, 2]})
    lines = markdown(notebook.show(frame))
    assert lines[1] == "|:--|--:|--:|"
    assert lines[2] == "| a\\|b \\*c\\* &lt;= 5 \\$ | 1,235 | 1234567 |"
    assert lines[3] == "|  |  | 2 |"


def test_show_code_columns():
    frame = pd.DataFrame({"gate": ["x < 5", "a `b` c", ""]})
    assert markdown(notebook.show(frame, code=["gate"]))[2:] == ["| `x < 5` |", "| ``a `b` c`` |", "|  |"]
    with pytest.raises(BadInput, match='no column "gates"'):
        notebook.show(frame, code=["gates"])


def test_picture_needs_a_description():
    figure, axes = notebook.canvas(1.0)
    notebook.box(axes, 10, 10, 20, 20, "box")
    notebook.arrow(axes, (30, 20), (60, 20))
    svg = notebook.picture(figure, 'a box & an "arrow"').bundle["image/svg+xml"]
    assert 'aria-label="a box &amp; an &quot;arrow&quot;"' in svg
    assert svg.startswith("<svg")
    assert ">box<" in svg
    with pytest.raises(BadInput, match="alt is empty"):
        notebook.picture(Figure(), " ")


def test_gate_and_question_come_from_the_card():
    card = phases.card("p1")
    frame = notebook.gate(card)
    assert len(frame) == sum(len(g.conditions()) for g in [gate for _, gate in card.gates])
    assert set(frame.part) == {"gate", *(f"claim: {c.name}" for c in card.claims)}
    shown = notebook.question(card).bundle["text/markdown"]
    assert all(words in shown for words in (card.question, card.hypothesis, card.null, card.control, card.candidate))


def test_verdicts_list_claims_beside_their_phase():
    (judged,) = verdicts.judge_recorded([phases.card("p1")])
    frame = notebook.verdicts([judged])
    assert list(frame.verdict) == [judged.verdict.word, *(v.word for _, v in judged.claims)]
    assert "note" not in frame.columns, "an empty column is left out"
    noted = notebook.verdicts([dataclasses.replace(judged, note="gate changed after measuring")])
    assert noted.note[0] == "gate changed after measuring"


def test_measured_says_nothing_without_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    assert notebook.measured("lp11-kernel", "h200") is None
    assert "nothing is said" in repr(notebook.unmeasured("lp11-kernel", "h200"))


def test_notebooks_set_no_font_or_backend():
    """Figures go through lab.draw and lab.write.notebook, so that they look alike and are SVG."""
    for name in NAMES:
        source = Path(FOLDER / f"{name}.py").read_text()
        assert "pyplot" not in source, name
        assert "%matplotlib" not in source, name
