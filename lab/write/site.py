"""`lab verdicts`, the main job: judge every recorded verdict, check every family, run the notebooks, write the site.

The order is from cheap to dear, each step says how far it is, and the board comes last so that it is what stays on the
screen. A family is checked and a notebook executed in a process of its own: a crash there is a line here. The site is
one folder of static pages that needs no server: the board, a page for each phase, the executed notebooks.
"""

from __future__ import annotations

import concurrent.futures
import html
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.base.console import print_json
from lab.base.errors import REPOSITORY, BadInput
from lab.card import phases
from lab.check import families
from lab.judge import evidence
from lab.judge.verdicts import Judgement, judge_recorded
from lab.study.audit import page as audit_page
from lab.study.audit.run import audit
from lab.write import writeup

NOTEBOOKS = REPOSITORY / "notebooks"
DEFAULT = REPOSITORY / "build" / "site"
NOTEBOOK_LIMIT_S = 300
NEEDED = ("nbformat", "nbclient", "nbconvert", "mistune")

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
    say = _quiet if as_json else _say
    start = time.perf_counter()
    say("[1/4] judging the recorded verdicts")
    cards = list(phases.cards().values())
    judgements = judge_recorded(cards)
    measured = [evidence.judge_measured(c, d) for c in cards for d in evidence.measured_devices(c.id)]
    say(f"      {len(judgements)} recorded and {len(measured)} measured verdicts")
    say("[2/4] checking every family's candidates against its reference on this machine")
    checks = _check_families(say)
    say("[3/4] executing the notebooks")
    pages, broken = _execute_notebooks(out, say)
    say("[4/4] writing the site")
    _write_site(out, judgements, measured, checks, pages)
    failed = [c for c in checks if c["status"] in ("incorrect", "error")]
    odd = writeup.unexplained(judgements)
    if as_json:
        print_json({"judgements": [j.to_json() for j in judgements + measured], "checks": checks})
    else:
        if measured:
            print("\n" + writeup.board(measured))
        print("\n" + writeup.board(judgements) + "\n")
        print(_summary(judgements, checks, broken))
        replayed = sorted({c.id for c in cards if not c.family})
        print(f"Replay only, no kernel family yet: {', '.join(replayed)}.")
        place = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
        print(f"{place / 'index.html'} written after {time.perf_counter() - start:.0f} s.")
    for c in failed:
        print(f"lab: check failed: {c['family']}/{c['candidate']} {c['workload']}: {c['message']}", file=sys.stderr)
    for name, message in broken.items():
        print(f"lab: notebooks/{name}.ipynb failed: {message}", file=sys.stderr)
    for j in odd:
        print(
            f"lab: {j.phase}: {j.recorded_id} needs a sentence on why it differs (or none, if it agrees)",
            file=sys.stderr,
        )
    return 1 if failed or broken or odd else 0


def _say(line: str) -> None:
    print(line, flush=True)


def _quiet(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _summary(judgements: Sequence[Judgement], checks: Sequence[dict[str, Any]], broken: dict[str, str]) -> str:
    agree = sum(bool(j.agrees) for j in judgements)
    count = {s: sum(c["status"] == s for c in checks) for s in ("ok", "skipped", "incorrect", "error")}
    tally = ", ".join(f"{n} {s}" for s, n in count.items() if n)
    notebooks = "all notebooks executed" if not broken else f"{len(broken)} notebooks failed"
    return f"{agree} of {len(judgements)} verdicts agree with their source; checks: {tally}; {notebooks}."


def _check_families(say: Any) -> list[dict[str, Any]]:
    """`lab check --json` for each family, two at a time."""
    found: list[dict[str, Any]] = []
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        jobs = {pool.submit(_check_family, name): name for name in families.names()}
        for job in concurrent.futures.as_completed(jobs):
            checks, seconds = job.result()
            found += checks
            ok = sum(c["status"] == "ok" for c in checks)
            skipped = [c for c in checks if c["status"] == "skipped"]
            tally = f"{ok} of {len(checks) - len(skipped)} checks ok, {len(skipped)} skipped"
            say(f"      {jobs[job]}: {tally}, {seconds:.0f} s")
            for candidate, reason in dict.fromkeys((c["candidate"], c["message"]) for c in skipped):
                say(f"        {candidate} skipped: {reason}")
    return sorted(found, key=lambda c: (c["family"], c["candidate"], c["workload"]))


def _check_family(name: str) -> tuple[list[dict[str, Any]], float]:
    start = time.perf_counter()
    command = [sys.executable, "-m", "lab", "check", name, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    try:
        checks = json.loads(done.stdout)
    except json.JSONDecodeError:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        checks = [{"family": name, "candidate": "", "workload": "", "status": "error", "message": reason}]
    return checks, time.perf_counter() - start


def _execute_notebooks(out: Path, say: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Execute every notebook into `out`/notebooks as HTML; returns name -> title and name -> error."""
    folder = out / "notebooks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(out, f"cannot be written ({error.strerror})", "choose another folder with --out") from None
    pages: dict[str, str] = {}
    broken: dict[str, str] = {}
    paths = sorted(NOTEBOOKS.glob("*.ipynb"))
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        jobs = {pool.submit(_execute, path, folder): path for path in paths}
        for job in concurrent.futures.as_completed(jobs):
            path = jobs[job]
            title, failure, seconds = job.result()
            if failure:
                broken[path.stem] = failure
            else:
                pages[path.stem] = title
            done = f"{len(pages) + len(broken)} of {len(paths)}"
            say(f"      {path.name} {'failed' if failure else 'ok'} {seconds:.0f} s, {done}")
    return dict(sorted(pages.items())), broken


def _execute(path: Path, folder: Path) -> tuple[str, str, float]:
    """Execute a copy of one notebook in a kernel of this interpreter; (title, error, seconds)."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    from nbconvert import HTMLExporter

    start = time.perf_counter()
    notebook = nbformat.read(path, as_version=4)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    client = NotebookClient(notebook, timeout=NOTEBOOK_LIMIT_S, resources={"metadata": {"path": str(NOTEBOOKS)}})
    try:
        client.execute(env=environment)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return "", lines[-1][:300], time.perf_counter() - start
    body, _ = HTMLExporter(template_name="lab", theme="light").from_notebook_node(notebook)
    (folder / f"{path.stem}.html").write_text(body, encoding="utf-8")
    return _title(notebook), "", time.perf_counter() - start


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


def _write_site(
    out: Path,
    judgements: Sequence[Judgement],
    measured: Sequence[Judgement],
    checks: Sequence[dict[str, Any]],
    pages: dict[str, str],
) -> None:
    import mistune

    markdown = mistune.create_markdown(plugins=["table"])
    try:
        (out / "phases").mkdir(parents=True, exist_ok=True)
        for card in phases.cards().values():
            text = str(markdown(writeup.write(card)))
            page = _page(card.title, f'<p><a href="../index.html">Killgate</a></p><div class=wide>{text}</div>')
            (out / "phases" / f"{card.id}.html").write_text(page, encoding="utf-8")
        listed = "".join(f'<li><a href="notebooks/{n}.html">{html.escape(t)}</a></li>' for n, t in pages.items())
        counts = [
            f"<tr><td>{html.escape(name)}</td>"
            + "".join(f"<td>{sum(c['status'] == s for c in own)}</td>" for s in ("ok", "skipped", "incorrect", "error"))
            + "</tr>"
            for name in families.names()
            if (own := [c for c in checks if c["family"] == name])
        ]
        back = '<p><a href="index.html">Killgate</a></p>'
        (out / "audit.html").write_text(_page("Audit", back + audit_page.body(audit())), encoding="utf-8")
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
        (out / "index.html").write_text(_page("Killgate", body), encoding="utf-8")
    except OSError as error:
        raise BadInput(
            out, f"cannot be written ({error.strerror})", "free space or choose another folder with --out"
        ) from None
