"""The notebooks: pairs in sync, outputs small and clean, short, and every one executed.

What their text says of committed figures and rows is held in tests/claims, each with one figure altered.
"""

import ast
import json
import os
import re
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from matplotlib.figure import Figure

from lab import draw
from lab.base.errors import REPOSITORY, BadInput
from lab.write import jobs, notebook, pairing, replay

FOLDER = REPOSITORY / "notebooks"
NAMES = sorted({p.stem for p in FOLDER.glob("*.ipynb")} | {p.stem for p in FOLDER.glob("*.py")})
LARGEST_BYTES = 320_000  # PNG beside SVG, for whoever opens it without trust
IMAGES = {"image/svg+xml", "image/png"}
# What only the machine that executed a notebook could have put into its outputs.
MACHINE = re.compile(r"(?<![\w.])/(?:home|root|Users|tmp|work|var|usr|opt|mnt)/|[A-Z]:\\|site-packages|0x[0-9a-f]{9}")
CODE_LINES = 120


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def outputs(book: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]


def texts(book: nbformat.NotebookNode) -> list[str]:
    """Every text of every output, whatever its MIME type, but for encoded pictures, whose letters are chance."""
    found = []
    for output in outputs(book):
        data = {kind: t for kind, t in output.get("data", {}).items() if kind != "image/png"}
        found += [output.text] if output.output_type == "stream" else list(data.values())
    return [re.sub(r"base64,[A-Za-z0-9+/=]+", "", "".join(t)) for t in found]


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
    import jupytext  # here, as it takes a second
    from jupytext.config import load_jupytext_config

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
    kinds = [{k for k in o.get("data", {}) if k.startswith("image/")} for o in outputs(book)]
    assert all(found in (set(), IMAGES) for found in kinds), "a figure is PNG beside SVG: show it with lab.picture"
    assert not any(pairing.LIVE in o.get("data", {}) for o in outputs(book))
    found = [m.group() for t in texts(book) for m in [MACHINE.search(t)] if m]
    assert not found, f"an output names a machine: {found}"
    assert "Traceback" not in "".join(texts(book))
    assert (FOLDER / f"{name}.ipynb").stat().st_size < LARGEST_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_pictures_have_a_description(name):
    for output in outputs(read(name)):
        if picture := output.get("data", {}).get("image/svg+xml"):
            assert re.search(r'aria-label="[^"]{20,}"', "".join(picture)), "show a figure with notebook.picture"


@pytest.mark.parametrize("name", NAMES)
def test_code_is_short_and_holds_no_data_to_account(name):
    """A story is read; what it says of rows is held in tests/claims, drawing is lab.draw's."""
    code = [c.source for c in read(name).cells if c.cell_type == "code"]
    lines = [line for source in code for line in source.splitlines() if line.strip()]
    assert len(lines) <= CODE_LINES
    names = {node.func.id for source in code for node in ast.walk(ast.parse(source))
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}  # fmt: skip
    assert not any(isinstance(node, ast.Assert) for source in code for node in ast.walk(ast.parse(source)))
    assert "h200" not in "".join(code), "ask lab.device() for the device with rows"
    assert names, "a notebook shows something"


@pytest.mark.parametrize("name", [n for n in NAMES if n != "00_start_here"])
def test_says_what_to_edit_for_ones_own(name):
    assert "**For " in "".join(c.source for c in read(name).cells if c.cell_type == "markdown")


# Executing -----------------------------------------------------------------------------------------------------------


def told(book: nbformat.NotebookNode) -> list[str]:
    """What a reader is told: texts, tables and what each picture's description says; not where a line is drawn."""
    found = []
    for output in outputs(book):
        data = output.get("data", {"text/plain": output.get("text", "")})
        # `alt` of a picture that a page holds; the description of one that is the output itself.
        for kind, text in sorted(data.items()):
            if not kind.startswith("image/"):
                found.append(re.sub(r'src="data:[^"]*"', "", "".join(text)))
        found += re.findall(r'aria-label="([^"]*)"', "".join(data.get("image/svg+xml", "")))
    return found


MAKE = "execute notebooks/{}.py again: make notebooks"
FIGURE = r"(?<=[\s>])(?:\d+\.\d+(?:e-\d+)?|\d{1,3}(?:,\d{3})+)(?=[\s<]|$)"
# What a cell says whose figures this CPU computed, and by how much another CPU's may differ: errors of a check, and
# float32's own rounding.
THIS_CPU = {"checked on cpu": 0.01, "computed on this CPU": 0.05}


def again(book: nbformat.NotebookNode) -> tuple[str, list[str]]:
    """("" or what failed, what a notebook tells when it is executed); for a process of its own."""
    return pairing.execute(book), told(book)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_executed_again_it_tells_what_is_committed(name):
    """The figures that readers see first are those of the present cards, rows and traces."""
    (done,) = jobs.run([jobs.Job(name, again, (pairing.from_source(FOLDER / f"{name}.py"),))], 1, jobs.context())
    assert done.failure == ""
    failed, now = done.value
    assert failed == ""
    then = told(read(name))
    assert [apart(text)[0] for text in now] == [apart(text)[0] for text in then], MAKE.format(name)
    for one, other in zip(now, then, strict=True):
        (_, here, rel), (_, there, _) = apart(one), apart(other)
        assert here == pytest.approx(there, rel=rel), MAKE.format(name)


def apart(text: str) -> tuple[str, list[float], float]:
    """A text without the figures that this CPU computed, those figures, and the tolerance of THIS_CPU."""
    rel = next((rel for words, rel in THIS_CPU.items() if words in text), None)
    if rel is None:
        return text, [], 0.0
    found = [float(figure.replace(",", "")) for figure in re.findall(FIGURE, text)]
    return " ".join(re.sub(FIGURE, "", text).split()), found, rel


def test_a_figure_of_another_cpu_is_told_apart_from_another_figure():
    cell = "<b>gdn: checked on cpu</b><td>t130</td><td>0.00{}</td><td>5</td>"
    assert apart(cell.format("2882"))[0] == apart(cell.format("2881"))[0]
    assert apart(cell.format("2882"))[1:] == ([0.002882], 0.01)
    table = "regime (computed on this CPU)  at 256\n  idle {} {}"
    words = "regime (computed on this CPU) at 256 idle"
    assert apart(table.format("6.6e-07", "  6,739")) == (words, [6.6e-07, 6739.0], 0.05)
    assert apart("<td>0.0021</td>") == ("<td>0.0021</td>", [], 0.0)


@pytest.mark.slow
def test_a_page_is_made_of_an_executed_notebook(tmp_path):
    """As `lab verdicts` does it; its source is what the .ipynb holds (test_pair_is_in_sync)."""
    name = "00_start_here"
    (done,) = jobs.run([jobs.Job(name, replay.execute, (FOLDER / f"{name}.ipynb", tmp_path))], 1, jobs.context())
    assert (done.failure, done.value[1]) == ("", "")
    assert (tmp_path / "notebooks" / f"{name}.html").stat().st_size > 10_000


@pytest.mark.slow
def test_a_device_without_rows_is_not_measured_and_no_failure():
    names = [name for name in NAMES if "device().id" in (FOLDER / f"{name}.py").read_text()]
    assert len(names) > 8
    todo = []
    for name in names:
        book = pairing.from_source(FOLDER / f"{name}.py")
        for cell in book.cells:
            cell.source = cell.source.replace("device().id", '"gb10"')
        todo.append(jobs.Job(name, pairing.execute, (book,)))
    ended = {d.job.name: d.failure or d.value for d in jobs.run(todo, os.cpu_count() or 1, jobs.context())}
    assert {name: end for name, end in ended.items() if end} == {}


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


@pytest.mark.slow
def test_a_wide_table_reads_as_in_a_kernel():
    """pandas cuts what is wider than a terminal and wraps it in a kernel: JupyterLab would save another text."""
    cell = nbformat.v4.new_code_cell("import pandas as pd; pd.DataFrame({f'a column {i}': [i] for i in range(12)})")
    book = nbformat.v4.new_notebook(cells=[cell], metadata=pairing.METADATA)
    (done,) = jobs.run([jobs.Job("wide", again, (book,))], 1, jobs.context())
    failed, shown = done.value
    assert failed == ""
    assert "a column 6" in shown[-1]


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
    said = capsys.readouterr().err
    assert "code cell 1 (`assert False" in said
    assert "the claim does not hold" in said
    assert source.with_suffix(".ipynb").read_text() == "what was there"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["story.ipynb", "story.py"]


def test_a_failing_cell_is_named_with_its_card():
    where = pairing._place(3, '# why\nphase("p5-kernel").arms("h200")')
    assert where == 'code cell 3 (`phase("p5-kernel").arms("h200")`), card p5-kernel'


def test_saving_keeps_nothing_of_the_session():
    """The hook that `make lab` gives JupyterLab: interpreter, timings and live widgets are not written."""
    name = NAMES[0]
    committed, open_one = read(name), read(name)
    open_one.metadata["language_info"] = {"name": "python", "version": "3.99.0"}
    open_one.metadata["kernelspec"]["display_name"] = "Python 3 (ipykernel)"
    for cell in open_one.cells:
        cell.metadata["execution"] = {"iopub.execute_input": "2026-11-23T00:00:00Z"}
    shown = next(o for o in outputs(open_one) if "data" in o)
    shown["data"][pairing.LIVE] = {"model_id": "0f"}
    pairing.saved({"type": "notebook", "content": open_one}, path=name)
    assert nbformat.writes(open_one) == nbformat.writes(committed)
    foreign = {"metadata": {"language_info": {}}, "cells": []}
    pairing.saved({"type": "notebook", "content": foreign})
    assert foreign["metadata"] == {"language_info": {}}, "a notebook that is not ours is left alone"


@pytest.mark.slow
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
    assert repr(notebook.show(frame.iloc[:0])) == "Nothing to show: not measured."
    with pytest.raises(BadInput, match='no column "gates"'):
        notebook.show(frame, code=["gates"])


def test_picture_needs_a_description():
    figure = draw.levels([("box", 1.0, "x")], "t", "x")
    svg = notebook.picture(figure, 'a box & an "arrow"').bundle["image/svg+xml"]
    assert 'aria-label="a box &amp; an &quot;arrow&quot;"' in svg
    assert svg.startswith("<svg")
    assert ">box<" in svg
    absent = notebook.picture(lambda: draw.levels([], "t", "x"), "ceilings")
    assert repr(absent) == "Not measured. levels plot: nothing to draw; pass at least one row"
    with pytest.raises(BadInput, match="alt is empty"):
        notebook.picture(Figure(), " ")


def test_notebooks_set_no_font_or_backend():
    """Figures go through lab.draw and lab.write.notebook, so that they look alike and are SVG."""
    for name in NAMES:
        source = Path(FOLDER / f"{name}.py").read_text()
        assert "pyplot" not in source, name
        assert "%matplotlib" not in source, name
