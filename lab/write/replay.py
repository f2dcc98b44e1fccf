"""`lab verdicts`, the main job: judge every verdict, check every family, run the notebooks, write the site.

The verdicts are judged first, here; then checks, notebooks and pages run side by side over the cores, the longest
first (lab/write/jobs.py). The terminal gets one screen, the site (lab/write/site.py) every line. A Triton candidate's
checks and a notebook are a process each: a crash there is a line here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.base import progress
from lab.base.console import print_json
from lab.base.errors import REPOSITORY, BadInput
from lab.check import accuracy, families
from lab.judge.verdicts import Judgement
from lab.write import jobs, pages, pairing, site, writeup
from lab.write.pages import View

DEFAULT = REPOSITORY / "build" / "site"
NEEDED = ("nbformat", "IPython", "mistune", "nh3")
EXPECTED = "checks, notebooks and pages follow: about 90 s on two idle cores"
WORDS = "verdicts.json"  # in the site: the words of the last run
PARTS = 3  # into which the cards' pages are split: their figures take most of the time
SHOWN = 5  # changes and failures that the terminal names; the site has all


def run(arguments: Namespace) -> int:
    """Run the whole job and return its exit code: 1 when a check, a notebook or an unexplained verdict fails."""
    out, as_json = arguments.out or DEFAULT, arguments.json
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        remedy = "make verdicts creates an environment with it, or install the notebooks extra"
        raise BadInput("lab verdicts", f"the package {absent[0]} is not installed", remedy)
    site.written(out, "notebooks/index.html", None)  # what cannot be written is told before any work
    start, begun = time.perf_counter(), time.time()
    server = jobs.context()  # imports what the jobs need while the verdicts are judged here
    judgements = pages.judged()
    told = f"{len(judgements)} verdicts judged; {EXPECTED}"
    print(told, file=sys.stderr if as_json else sys.stdout, flush=True)
    with tempfile.TemporaryDirectory() as kept:
        checks, titles, broken = _side_by_side(out, server, judgements, as_json, kept)
    found = pages.views(judgements)
    site.write_index(out, found, checks, titles, broken)
    if (out / WORDS).exists():  # the folder is ours: pages of what is gone by now go too
        for old in (p for p in out.glob("*/**/*.html") if p.stat().st_mtime < begun - 1):
            old.unlink()
    failures = [
        f"check of {c['family']}/{c['candidate']} {c['workload']}: {c['message']}; `lab check {c['family']}` repeats it"
        for c in checks
        if c["status"] in ("incorrect", "error")
    ]
    failures += [f"{name}: {message}" for name, message in broken.items()]
    said = "needs a sentence on why it differs (or none, if it agrees)"
    failures += [
        f"{j.phase}: {j.recorded_id} {said}: `differs` in data/phases" for j in writeup.unexplained(judgements)
    ]
    if as_json:
        print_json({"judgements": [j.to_json() for j in judgements], "checks": checks})
    else:
        count = Counter(c["status"] for c in checks)
        tally = ", ".join(f"{count[s]} {s}" for s in ("ok", "skipped", "incorrect", "error") if count[s]) or "none"
        own = [j for j in judgements if j.agrees is not None]
        worded = [j for j in own if j.agrees_with_word is not None]
        print(f"\n{writeup.counts(judgements)}\n")
        agree, by_word = sum(bool(j.agrees) for j in own), sum(bool(j.agrees_with_word) for j in worded)
        said = f"{agree} of {len(own)} recorded outcomes agree with our reading of the source"
        print(f"{said}, {by_word} of {len(worded)} with a word of its own")
        print(f"checks: {tally}; {len(titles)} notebooks executed\n")
        print("\n".join([*_changes(found, out / WORDS), ""]))
        place = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
        print(f"{place / 'index.html'} written after {time.perf_counter() - start:.0f} s")
    for failure in failures[:SHOWN]:
        print(f"lab: {failure}", file=sys.stderr)
    if failures[SHOWN:]:
        print(f"lab: and {len(failures) - SHOWN} more failures, on the site", file=sys.stderr)
    return 1 if failures else 0


def _changes(found: Sequence[View], path: Path) -> list[str]:
    """How the words differ from those that the last run left in `path`, where this run's are then left."""
    now = {f"{v.card.id} {v.anchor}": v.word for v in found}
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        before = before if isinstance(before, dict) else {}
    except (OSError, ValueError):
        before = {}
    path.write_text(json.dumps(now, indent=0), encoding="utf-8")
    if not before:
        return ["no earlier run to compare with"]
    other = [k for k in {**before, **now} if before.get(k) != now.get(k)]
    changed = [f"  {k}: {before.get(k, 'new')} -> {now.get(k, 'gone')}" for k in other[:SHOWN]]
    more = [f"  and {len(other) - SHOWN} more"] if len(other) > SHOWN else []
    return [f"since the last run: {len(other) or 'nothing'} changed", *changed, *more]


def _side_by_side(
    out: Path, server: Any, judgements: Sequence[Judgement], quiet: bool, kept: str
) -> tuple[list[dict[str, Any]], dict[str, str], dict[str, str]]:
    """Every check, notebook and page, over the cores: the checks, name -> title of each notebook, name -> failure.

    kept: a folder through which a notebook that asks for a check is given the one that was done.
    """
    books = sorted(pages.NOTEBOOKS.glob("*.ipynb"))
    todo = [jobs.Job("the other pages", site.write_pages, (out, tuple(judgements)), 12)]
    todo += [
        jobs.Job(f"cards, part {i + 1}", site.write_cards, (out, tuple(judgements), i, PARTS), 14) for i in range(PARTS)
    ]
    todo += [jobs.Job(f"notebooks/{p.name}", execute, (p, out, kept), 8) for p in books]
    todo += [job for name in families.names() for job in _slices(name, kept)]
    checks: list[dict[str, Any]] = []
    titles: dict[str, str] = {}
    broken: dict[str, str] = {}
    with progress.shown(len(todo), quiet) as shown:
        for done in jobs.run(todo, os.cpu_count() or 1, server):
            name = done.job.name
            shown.tell(name)
            shown.advance()
            if done.job.run is check_slice:
                error = {"family": name.split("/")[0], "candidate": name.partition("/")[2], "workload": ""}
                checks += [{**error, "status": "error", "message": done.failure}] if done.failure else done.value
                continue
            title, failure = done.value if done.job.run is execute and done.value else ("", done.failure)
            if failure:
                broken[name] = failure
            elif done.job.run is execute:
                titles[Path(name).stem] = title
    for path in books:
        if failure := broken.get(f"notebooks/{path.name}"):
            site.write_notebook(out, path.stem, path.stem, [], failure)
    return sorted(checks, key=lambda c: (c["family"], c["candidate"], c["workload"])), titles, broken


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


def execute(path: Path, out: Path, kept: str = "") -> tuple[str, str]:
    """Execute a copy of a notebook in this process and write its page; (title, failure)."""
    import nbformat

    os.environ[accuracy.KEEP] = kept
    notebook = nbformat.read(path, as_version=4)
    if failure := pairing.execute(notebook):
        return "", failure
    heads = (line for c in notebook.cells if c.cell_type == "markdown" for line in c.source.splitlines())
    title = next((line[2:] for line in heads if line.startswith("# ")), path.stem)
    site.write_notebook(out, path.stem, title, notebook.cells)
    return title, ""
