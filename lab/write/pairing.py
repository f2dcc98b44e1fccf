"""`python -m lab.write.pairing notebooks/NAME.py ...`: execute a source, write its .ipynb.

The py:percent file is what people edit; the .ipynb is made from it, so the two cannot drift, and executing unchanged
sources on unchanged rows changes nothing. An exception in a cell leaves the old .ipynb as it was.

JupyterLab keeps the pair too. `make lab` starts it with notebooks/.jupyter/, by which each saved
notebook goes through `plain` as well: what only that session knows (the interpreter's version, ids of live widgets,
timings) is not written, so that opening, running and saving without an edit leaves every file as it was.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat

from lab.base.errors import REPOSITORY, BadInput
from lab.card import phases
from lab.write import jobs

METADATA = {
    "jupytext": {"formats": "ipynb,py:percent"},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
}
LIVE = "application/vnd.jupyter.widget-view+json"  # names a widget of a running kernel, by a random id


def plain(notebook: Any) -> None:
    """Take out of a notebook, in place, what only the session that saved it knows."""
    notebook["metadata"] = nbformat.from_dict(METADATA)
    for cell in notebook["cells"]:
        for key in ("execution", "trusted"):
            cell["metadata"].pop(key, None)
        for output in cell.get("outputs", ()):
            for bundle in ("data", "metadata"):
                output.get(bundle, {}).pop(LIVE, None)


def saved(model: dict[str, Any], **_: Any) -> None:
    """Hook of a Jupyter server, before each save: `plain` for the notebooks that are paired here."""
    content = model.get("content") if model.get("type") == "notebook" else None
    if content and content["metadata"].get("jupytext", {}).get("formats") == METADATA["jupytext"]["formats"]:
        plain(content)


def execute(notebook: Any) -> str:
    """Run every cell in this process, once in its life, in notebooks/; "" or in one line what a cell raised, and where.

    Outputs are those of a Jupyter kernel, whose start this spares; a cell's printed lines stand before what it shows.
    """
    import pandas as pd
    from IPython.core.displayhook import CapturingDisplayHook
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    os.chdir(REPOSITORY / "notebooks")
    sys.path[:0] = [str(REPOSITORY), ""]
    shell = InteractiveShell.instance(history_manager=None)
    # A kernel's; pandas takes this shell for a terminal, to whose width it cuts tables.
    pd.set_option("display.max_columns", 20)
    for number, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), 1):
        results: list[dict[str, Any]] = []
        with capture_output() as printed:
            shell.display_trap.hook = CapturingDisplayHook(shell=shell, outputs=results)
            done = shell.run_cell(cell.source)
        if not done.success:
            error = done.error_before_exec or done.error_in_exec
            return f"{_place(number, cell.source)}: " + " ".join(f"{type(error).__name__}: {error}".split())[:300]
        output, cell.execution_count = nbformat.v4.new_output, number
        streams = (("stdout", printed.stdout), ("stderr", printed.stderr))
        cell.outputs = [output("stream", name=name, text=text) for name, text in streams if text]
        cell.outputs += [output("display_data", data=s.data, metadata=s.metadata or {}) for s in printed.outputs]
        cell.outputs += [
            output("execute_result", data=r["data"], metadata=r["metadata"] or {}, execution_count=number)
            for r in results
        ]
    plain(notebook)
    return ""


def _place(number: int, source: str) -> str:
    """Which code cell it is, by number and first line of code, and the cards that it names."""
    lines = [line for line in source.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    named = [word for word in dict.fromkeys(re.findall(r"""["']([\w-]+)["']""", source)) if word in phases.cards()]
    first = lines[0].strip()[:60] if lines else "empty"
    return f"code cell {number} (`{first}`)" + (f", card {', '.join(named)}" if named else "")


def from_source(source: Path) -> Any:
    """The notebook of a py:percent file, not executed, with ids made of each cell's place and text."""
    import jupytext

    if source.suffix != ".py" or not source.exists():
        raise BadInput(source, "is no py:percent file", "name one, such as notebooks/00_start_here.py")
    notebook = jupytext.read(source, fmt="py:percent")
    plain(notebook)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"{number:02d}-{hashlib.sha256(cell.source.encode()).hexdigest()[:8]}"
    return notebook


def write(source: Path) -> Path:
    """Execute `source` in this process and write its .ipynb; returns the path. Raises BadInput when a cell fails."""
    source = source.resolve()
    notebook = from_source(source)
    if failure := execute(notebook):
        raise BadInput(source, failure, "mend the cell; its .ipynb is as it was")
    target = source.with_suffix(".ipynb")
    partial = target.with_suffix(".partial")
    nbformat.write(notebook, partial)
    os.replace(partial, target)
    return target


def main(argv: Sequence[str] | None = None) -> int:
    """Write each named pair side by side, all of notebooks/ without names; 1 when a cell failed."""
    named = sys.argv[1:] if argv is None else argv
    sources = [Path(name) for name in named] or sorted((REPOSITORY / "notebooks").glob("*.py"))
    failed = 0
    todo = [jobs.Job(str(source), write, (source,)) for source in sources]
    for done in jobs.run(todo, os.cpu_count() or 1, jobs.context()):
        if done.failure:
            failed = 1
            print(f"{done.job.name}: {done.failure}", file=sys.stderr)
        else:
            print(f"{done.value}: {done.value.stat().st_size / 1000:.0f} KB", flush=True)
    return failed


if __name__ == "__main__":
    from lab.write import pairing  # under its own name, which is how a process finds `write`

    globals()["__spec__"] = None  # else each process runs this file a second time as a module, and says so

    sys.exit(pairing.main())
