"""Somebody's own A/B as evidence: files of llama.cpp's tools and of ds4-bench, held against a card.

    sample.py     what a figure is, whichever tool printed it, and what the readers share
    llama_bench.py, batched_bench.py, backend_ops.py, ds4_bench.py   one reader a tool: names, units, contradictions
    arms.py       which figures are the control, which the candidate, and which of the card's workloads they are
    verdict.py    the readings, what must be said beside them, and the verdict

A file is recognised by what stands in it, never by its name. Nothing is guessed for the user: a workload is matched by
axes that its name declares or that the command line gives, and the match is part of the output.
"""

from __future__ import annotations

import re
from pathlib import Path

from lab.base.errors import BadInput
from lab.study.own import backend_ops, batched_bench, ds4_bench, llama_bench
from lab.study.own.sample import ANSI, Imported, Line, objects

SUMMARY = re.compile(r"\|\s*t/s\s*\||^INSERT INTO llama_bench|^build_commit,")
KNOWN = "llama-bench -o jsonl or json, llama-batched-bench (table or jsonl), test-backend-ops (text, sql or csv)"
KNOWN += ", ds4-bench (csv)"


def read(path: Path) -> Imported:
    """The figures of one file; raises BadInput in one line for a file that is cut off, holds NaN or nothing usable."""
    try:
        text = ANSI.sub("", path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise BadInput(path, "no such file", "give the file that the tool's output was written to") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(path, f"cannot be read ({error})", "give the tool's output as UTF-8 text") from None
    imported = _read(path, text)
    if not imported.samples:
        why = f" ({'; '.join(imported.notes)})" if imported.notes else ""
        raise BadInput(path, f"holds no figure of {imported.tool} that can be used{why}", "repeat the run")
    return imported


def _read(path: Path, text: str) -> Imported:
    lines = text.splitlines()
    if any(ds4_bench.is_header(line) for line in lines):
        return ds4_bench.read(path, text)
    if any(line.startswith(f"INSERT INTO {backend_ops.TABLE}") for line in lines):
        return backend_ops.read_sql(path, text)
    if any("op_name" in line and "op_params" in line and "," in line and "(" not in line for line in lines):
        return backend_ops.read_csv(path, text)
    if any(batched_bench.is_header(line) for line in lines):
        return batched_bench.read_table(path, text)
    if any(backend_ops.is_text(line) for line in lines):
        return backend_ops.read_text(path, text)
    if any(line.lstrip().startswith("{") for line in lines):
        return _read_json(path, text)
    if any(SUMMARY.search(line) for line in lines):
        raise BadInput(path, "is llama-bench's summary, without its repetitions", "run it with -o jsonl")
    raise BadInput(path, "is not the output of a tool that is known here", f"known: {KNOWN}")


def _read_json(path: Path, text: str) -> Imported:
    entries, log = objects(path, text)
    tools = dict.fromkeys(0 if llama_bench.is_one(e) else 1 if batched_bench.is_one(e) else at for at, e in entries)
    strange = next((at for at in tools if isinstance(at, Line)), None)
    if strange is not None:
        raise BadInput(str(strange), "is no result of a known tool", f"known: {KNOWN}")
    if len(tools) > 1:
        raise BadInput(path, "mixes the outputs of two tools", "give one file per tool")
    return batched_bench.read_json(path, entries, log) if 1 in tools else llama_bench.read(path, entries)
