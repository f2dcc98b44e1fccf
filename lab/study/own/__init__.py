"""Somebody's own A/B as evidence: files of the field's tools, held against a card.

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
from lab.study.own import backend_ops, batched_bench, ds4_bench, kernel_benches, llama_bench, perplexity, plain, serving
from lab.study.own.sample import ANSI, NOTHING_ASKED, Asked, Imported, objects

LARGEST = 64 << 20  # bytes; a tool prints kilobytes
KNOWN = "known: llama-bench -o jsonl or json, llama-batched-bench (table or jsonl), test-backend-ops (text, sql or csv)"
KNOWN += ", ds4-bench (csv), llama-perplexity, llama-server, vLLM and SGLang serving JSON, nvbench, flashinfer-trace, "
KNOWN += "pytest-benchmark, a table with metric, value and unit, or --metric METRIC:column=NAME,unit=U, or a profile"
SUMMARY = re.compile(r"\|\s*t/s\s*\||^INSERT INTO llama_bench|^build_commit,")
OBJECTS = (llama_bench, batched_bench, serving, kernel_benches)
REPORTS = (".nsys-rep", ".ncu-rep")
HEADS = (b"SQLite format 3\0", b"\x1f\x8b", b"PAR1")  # of profiles that are no text
TRACE = re.compile(r'"(?:traceEvents|rocprofiler-sdk-tool)"|^"?ID"?,.*Kernel Name|^(?:Time|Total Time|Start) ?\(', re.M)
ENDLESS = re.compile(r'("request_rate":\s*)Infinity')  # SGLang's "inf", which is no JSON


def _read_json(path: Path, text: str, asked: Asked) -> Imported:
    entries, log = objects(path, ENDLESS.sub(r'\1"inf"', text))
    if entries and all(plain.is_one(entry, asked) for _, entry in entries):
        return plain.read_rows(path, entries, asked)
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
    (perplexity.is_line, perplexity.read),
)


def read(path: Path, asked: Asked = NOTHING_ASKED) -> Imported:
    """The figures of one file; raises BadInput in one line for a file that is cut off, holds NaN or nothing usable."""
    imported = _read(path, asked)
    if not imported.samples:
        why = f" ({'; '.join(imported.notes)})" if imported.notes else ""
        raise BadInput(path, f"holds no figure of {imported.tool} that can be used{why}", "repeat the run")
    return imported


def _read(path: Path, asked: Asked) -> Imported:
    from lab.study.own import profiles  # lab/trace costs what only a profile needs

    try:
        with path.open("rb") as file:
            head = file.read(1 << 16)
    except OSError:
        head = b""  # which the reading of the whole says better
    if head.startswith(HEADS) or path.suffix in REPORTS or TRACE.search(head.decode("utf-8", "ignore")):
        return profiles.read(path, asked)
    try:
        text = ANSI.sub("", files.read_bytes(path, LARGEST).decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadInput(path, f"cannot be read ({error})", "give the tool's output as UTF-8 text") from None
    if not text.strip():
        raise BadInput(path, "is empty", f"give the output of a tool; {KNOWN}")
    lines = text.splitlines()
    reader = next((reader for is_one, reader in READERS if any(map(is_one, lines))), None)
    if reader:
        return reader(path, text)
    if any(line.lstrip().startswith("{") for line in lines):
        return _read_json(path, text, asked)
    if any(map(SUMMARY.search, lines)):
        raise BadInput(path, "is llama-bench's summary, without its repetitions", "run it with -o jsonl")
    found = plain.read(path, text, asked)
    if found is None:
        raise BadInput(path, "is not the output of a tool that is known here", KNOWN)
    return found
