"""Somebody's own A/B as evidence: files of llama.cpp's tools and of ds4-bench, held against a card.

    sample.py     what a figure is, whichever tool printed it, and what the readers share
    llama_bench.py, batched_bench.py, backend_ops.py, ds4_bench.py   one reader a tool: names, units, contradictions
    arms.py       which figures are the control, which the candidate, and which of the card's workloads they are
    verdict.py    the readings, what must be said beside them, and the verdict

A file is recognised by what stands in it, never by its name. Nothing is guessed for the user: a workload is matched by
axes that its name declares or that the command line gives, and the match is part of the output.

A reader of a further tool is a module with two functions: one says whether a line (or a JSON object) can only be that
tool's, the other makes a file's text (or objects) `sample.Imported`. It joins READERS, or OBJECTS where the tool prints
JSON; `lab judge --rows` and `lab verify` then read its files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from lab.base import files
from lab.base.errors import BadInput
from lab.study.own import backend_ops, batched_bench, ds4_bench, llama_bench
from lab.study.own.sample import ANSI, Imported, objects

LARGEST = 64 << 20  # bytes; a tool prints kilobytes
KNOWN = "known: llama-bench -o jsonl or json, llama-batched-bench (table or jsonl), test-backend-ops (text, sql or csv)"
KNOWN += ", ds4-bench (csv)"
SUMMARY = re.compile(r"\|\s*t/s\s*\||^INSERT INTO llama_bench|^build_commit,")
OBJECTS = (llama_bench, batched_bench)


def _read_json(path: Path, text: str) -> Imported:
    entries, log = objects(path, text)
    by_tool = [next((tool for tool in OBJECTS if tool.is_one(entry)), None) for _, entry in entries]
    tool = by_tool[0]
    if None in by_tool or tool is None:
        strange, _ = entries[by_tool.index(None)]
        raise BadInput(str(strange), "is no result of a known tool", KNOWN)
    if len(set(by_tool)) > 1:
        raise BadInput(path, "mixes the outputs of two tools", "give one file per tool")
    return tool.read_objects(path, entries, log)


# A line that only one tool prints, and the reader of the file that holds it; the first that fits reads the file.
READERS: tuple[tuple[Callable[[str], bool], Callable[[Path, str], Imported]], ...] = (
    (ds4_bench.is_header, ds4_bench.read),
    (backend_ops.is_sql, backend_ops.read_sql),
    (backend_ops.is_csv, backend_ops.read_csv),
    (batched_bench.is_header, batched_bench.read_table),
    (backend_ops.is_text, backend_ops.read_text),
    (lambda line: line.lstrip().startswith("{"), _read_json),
)


def read(path: Path) -> Imported:
    """The figures of one file; raises BadInput in one line for a file that is cut off, holds NaN or nothing usable."""
    try:
        text = ANSI.sub("", files.read_bytes(path, LARGEST).decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadInput(path, f"cannot be read ({error})", "give the tool's output as UTF-8 text") from None
    lines = text.splitlines()
    reader = next((reader for is_one, reader in READERS if any(map(is_one, lines))), None)
    if reader is None:
        if any(map(SUMMARY.search, lines)):
            raise BadInput(path, "is llama-bench's summary, without its repetitions", "run it with -o jsonl")
        raise BadInput(path, "is not the output of a tool that is known here", KNOWN)
    imported = reader(path, text)
    if not imported.samples:
        why = f" ({'; '.join(imported.notes)})" if imported.notes else ""
        raise BadInput(path, f"holds no figure of {imported.tool} that can be used{why}", "repeat the run")
    return imported
