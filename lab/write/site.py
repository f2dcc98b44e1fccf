"""`lab verdicts`, the main job: judge every verdict, check every family, run the notebooks, write the site.

The verdicts are judged first, here; then checks, notebooks and pages run side by side over the cores, the longest
first (lab/write/jobs.py), and what is written to the terminal is short: the site has every line. A Triton candidate's
checks and a notebook are a process each: a crash there is a line here. The site is one folder of static pages that
needs no server: the board, a page for each phase, the executed notebooks.
"""

from __future__ import annotations

import html
import importlib.util
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.base import progress
from lab.base.console import print_json
from lab.base.errors import REPOSITORY, BadInput
from lab.card import phases
from lab.check import accuracy, families
from lab.judge.verdicts import Judgement, judge_measured, judge_recorded
from lab.row import store
from lab.study.audit.run import audit
from lab.write import audit_page, jobs, pairing, writeup

NOTEBOOKS = REPOSITORY / "notebooks"
DEFAULT = REPOSITORY / "build" / "site"
NEEDED = ("nbformat", "IPython", "nbconvert", "mistune")
EXPECTED = "checks and notebooks follow, one to two minutes on two idle cores"
BACK = '<p><a href="index.html">Killgate</a></p>'

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; } td, th { text-align: left; vertical-align: top;
padding: .35rem .6rem; border-bottom: 1px solid var(--line); } th { background: var(--soft); }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; } .word { font-weight: 600; white-space: nowrap; }
.wide { overflow-x: auto; } a { color: inherit; } small { opacity: .75; }
"""


def verdicts(out: Path | None = None, as_json: bool = False) -> int:
    """Run the whole job and return its exit code: 1 when a check, a notebook or an unexplained verdict fails."""
    out = out or DEFAULT
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        remedy = "make verdicts creates an environment with it, or install the notebooks extra"
        raise BadInput("lab verdicts", f"the package {absent[0]} is not installed", remedy)
    _written(out, "notebooks/index.html", None)  # what cannot be written is told before any work
    start = time.perf_counter()
    server = jobs.context()  # imports what the jobs need while the verdicts are judged here
    cards = list(phases.cards().values())
    judgements = judge_recorded(cards)
    measured = [judge_measured(c, d) for c in cards for d in store.measured_devices(c.id)]
    told = f"{len(judgements)} recorded and {len(measured)} measured verdicts judged; {EXPECTED}"
    print(told, file=sys.stderr if as_json else sys.stdout, flush=True)
    with tempfile.TemporaryDirectory() as kept:
        checks, pages, broken = _side_by_side(out, server, as_json, kept)
    write_index(out, judgements, measured, checks, pages)
    failed = [c for c in checks if c["status"] in ("incorrect", "error")]
    odd = writeup.unexplained(judgements)
    if as_json:
        print_json({"judgements": [j.to_json() for j in judgements + measured], "checks": checks})
    else:
        print("\n" + writeup.counts(judgements, measured) + "\n")
        print(_summary(judgements, checks, broken))
        place = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
        print(f"{place / 'index.html'} written after {time.perf_counter() - start:.0f} s; `lab judge --all` prints it.")
    for c in failed:
        print(f"lab: check failed: {c['family']}/{c['candidate']} {c['workload']}: {c['message']}", file=sys.stderr)
    for name, message in broken.items():
        print(f"lab: {name} failed: {message}", file=sys.stderr)
    for j in odd:
        said = "needs a sentence on why it differs (or none, if it agrees)"
        print(f"lab: {j.phase}: {j.recorded_id} {said}", file=sys.stderr)
    return 1 if failed or broken or odd else 0


def _summary(judgements: Sequence[Judgement], checks: Sequence[dict[str, Any]], broken: dict[str, str]) -> str:
    agree = sum(bool(j.agrees) for j in judgements)
    count = {s: sum(c["status"] == s for c in checks) for s in ("ok", "skipped", "incorrect", "error")}
    tally = ", ".join(f"{n} {s}" for s, n in count.items() if n)
    notebooks = "all notebooks executed" if not broken else f"{len(broken)} of the jobs failed"
    return f"{agree} of {len(judgements)} verdicts agree with their source; checks: {tally}; {notebooks}."


def _side_by_side(
    out: Path, server: Any, quiet: bool, kept: str
) -> tuple[list[dict[str, Any]], dict[str, str], dict[str, str]]:
    """Every check, notebook and page, over the cores: the checks, name -> title of each notebook, name -> failure.

    kept: a folder through which a notebook that asks for a check is given the one that was done.
    """
    todo = [jobs.Job("the pages of the phases", write_phases, (out,), 10)]
    todo += [jobs.Job("audit.html", write_audit, (out,), 9)]
    todo += [jobs.Job(f"notebooks/{p.name}", execute, (p, out, kept), 8) for p in sorted(NOTEBOOKS.glob("*.ipynb"))]
    todo += [job for name in families.names() for job in _slices(name, kept)]
    checks: list[dict[str, Any]] = []
    pages: dict[str, str] = {}
    broken: dict[str, str] = {}
    with progress.shown(len(todo), quiet) as shown:
        for done in jobs.run(todo, os.cpu_count() or 1, server):
            name = done.job.name
            shown.tell(name)
            shown.advance()
            if done.job.run is check_slice:
                error = {"family": name.split("/")[0], "candidate": name.partition("/")[2], "workload": ""}
                checks += [{**error, "status": "error", "message": done.failure}] if done.failure else done.value
            elif done.failure:
                broken[name] = done.failure
            elif done.job.run is execute:
                title, failure = done.value
                (broken if failure else pages)[name if failure else Path(name).stem] = failure or title
        for family in families.names():
            shown.result(f"{family}: {_tally([c for c in checks if c['family'] == family])}")
        shown.result(f"{len(pages)} of {sum(j.run is execute for j in todo)} notebooks executed")
    ordered = sorted(checks, key=lambda c: (c["family"], c["candidate"], c["workload"]))
    return ordered, dict(sorted(pages.items())), broken


def _slices(name: str, kept: str = "") -> list[jobs.Job]:
    """A family's checks: each Triton candidate by itself, as its interpreter takes the time, and the rest together."""
    families.interpret_on_cpu()
    try:
        known = [*families.load(name).candidates.values()]
    except (BadInput, ImportError):
        known = []  # the job meets the same error and reports it
    alone = [c.name for c in known if c.needs.triton] if families.gpu_capability() is None else []
    return [
        jobs.Job(name, check_slice, (name, None, alone, kept), 5),
        *(jobs.Job(f"{name}/{c}", check_slice, (name, c, (), kept), 20) for c in alone),
    ]


def check_slice(name: str, candidate: str | None, apart: Sequence[str], kept: str = "") -> list[dict[str, Any]]:
    """The checks of one candidate, or of all but those `apart`, as `lab check --json` prints them."""
    os.environ[accuracy.KEEP] = kept
    families.interpret_on_cpu()
    device = "cuda" if families.gpu_capability() else "cpu"
    return [c.to_json() for c in accuracy.check_family(name, candidate, device=device, apart=apart)]


def _tally(checks: Sequence[dict[str, Any]]) -> str:
    ran = [c for c in checks if c["status"] != "skipped"]
    skipped = dict.fromkeys((c["candidate"], c["message"]) for c in checks if c["status"] == "skipped")
    said = f"{sum(c['status'] == 'ok' for c in ran)} of {len(ran)} checks ok"
    if not skipped:
        return said
    reasons = Counter(reason for _, reason in skipped)
    return said + "; not run here: " + "; ".join(f"{n} candidates ({why})" for why, n in reasons.most_common())


def execute(path: Path, out: Path, kept: str = "") -> tuple[str, str]:
    """Execute a copy of a notebook in this process and write its page; (title, failure)."""
    import nbformat
    from nbconvert import HTMLExporter

    os.environ[accuracy.KEEP] = kept
    notebook = nbformat.read(path, as_version=4)
    if failure := pairing.execute(notebook):
        return "", failure
    body, _ = HTMLExporter(template_name="lab", theme="light").from_notebook_node(notebook)
    _written(out, f"notebooks/{path.stem}.html", body)
    return _title(notebook), ""


def _title(notebook: Any) -> str:
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("# "):
            return str(cell.source.splitlines()[0][2:])
    return "notebook"


def _page(title: str, body: str) -> str:
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    )
    return f"<!doctype html><html lang=en><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>\n"


def _board(judgements: Sequence[Judgement]) -> str:
    head = "".join(f"<th>{c}</th>" for c in writeup.COLUMNS)
    lines = []
    for j, cells in zip(judgements, writeup.board_rows(judgements), strict=True):
        phase, gate, observed, word, recorded_word, agrees = (html.escape(c) for c in cells)
        phase = f'<a href="phases/{phase}.html">{phase}</a><br><small>{j.row}, {html.escape(j.device)}</small>'
        agrees += f"<br><small>{html.escape(j.differs)}</small>" if j.agrees is False else ""
        cells_html = f"<td>{phase}</td><td><code>{gate}</code></td><td>{observed}</td><td class=word>{word}</td>"
        lines.append(f"<tr>{cells_html}<td>{recorded_word}</td><td>{agrees}</td></tr>")
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def write_phases(out: Path) -> None:
    """A page for each card: its writeup."""
    import mistune

    markdown = mistune.create_markdown(plugins=["table"])
    for card in phases.cards().values():
        text = str(markdown(writeup.write(card)))
        page = _page(card.title, f'<p><a href="../index.html">Killgate</a></p><div class=wide>{text}</div>')
        _written(out, f"phases/{card.id}.html", page)


def write_audit(out: Path) -> None:
    """The page of the audit."""
    _written(out, "audit.html", _page("Audit", BACK + audit_page.body(audit())))


def write_index(
    out: Path,
    judgements: Sequence[Judgement],
    measured: Sequence[Judgement],
    checks: Sequence[dict[str, Any]],
    pages: dict[str, str],
) -> None:
    """The board: recorded and measured verdicts, the notebooks, the checks of this run."""
    listed = "".join(f'<li><a href="notebooks/{n}.html">{html.escape(t)}</a></li>' for n, t in pages.items())
    counts = [
        f"<tr><td>{html.escape(name)}</td>"
        + "".join(f"<td>{sum(c['status'] == s for c in own)}</td>" for s in ("ok", "skipped", "incorrect", "error"))
        + "</tr>"
        for name in families.names()
        if (own := [c for c in checks if c["family"] == name])
    ]
    replayed = ", ".join(sorted({c.id for c in phases.cards().values() if not c.family}))
    body = (
        "<h1>Killgate: the board of verdicts</h1><p>Every verdict is replayed from recorded figures or measured "
        "rows by one judge; each phase's page lists the figures by id. What the figures can carry is another "
        'question: <a href="audit.html">the audit of all verdicts</a>.</p>'
        f"<h2>Recorded</h2>{_board(judgements)}"
        + (f"<h2>Measured here</h2>{_board(measured)}" if measured else "")
        + f"<h2>Notebooks</h2><ul>{listed}</ul><h2>Checks of this run</h2><table><tr><th>family</th><th>ok</th>"
        f"<th>skipped</th><th>incorrect</th><th>error</th></tr>{''.join(counts)}</table>"
        f"<p>Replay only, no kernel family yet: {html.escape(replayed)}.</p>"
    )
    _written(out, "index.html", _page("Killgate", body))


def _written(out: Path, name: str, text: str | None) -> None:
    """Write a page below `out`, or without a text only make its folder."""
    try:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(out, f"cannot be written ({error.strerror})", "choose another folder with --out") from None
