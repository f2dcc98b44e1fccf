"""`llama-batched-bench`: its table and `--output-format jsonl`, decode and prefill of npl sequences at once.

Columns as in llama.cpp's tools/batched-bench: PP, TG, B, N_KV, then "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s",
"T s", "S t/s". The unit is read from the header cell and nothing else; a header without one gives a figure without one,
which is missing evidence. Where the time column is in seconds, each speed is computed again from it
(S_PP = B PP / T_PP, or PP / T_PP with a shared prompt; S_TG = B TG / T_TG). The JSON keys carry no unit, so there the
recomputation is what confirms tok/s. The totals (T, S) mix both kinds of work and are left out.

Given up: one run has one repetition and no spread. Several runs in one file, or several files of one arm, are pooled
as repetitions. The output names no GPU, model or build unless the log was kept with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.base.errors import BadInput, shown
from lab.study.own.sample import CUT_OFF, Imported, Sample, count, disagrees, from_log, number, plain

TOOL = "llama-batched-bench"
CELL = re.compile(r"^(PP|TG|B|N_KV|T_PP|S_PP|T_TG|S_TG|T|S)(?:\s+(\S+))?$")
SETTINGS = re.compile(r"n_kv_max\s*=\s*\d+.*")
PAIR = re.compile(r"(\w+)\s*=\s*(-?\d+)")
JSON_MEASURED = ("pp", "tg", "pl", "n_kv", "t_pp", "speed_pp", "t_tg", "speed_tg", "t", "speed")


def is_one(entry: Mapping[str, Any]) -> bool:
    """Whether a JSON object is a line of llama-batched-bench."""
    return "speed_tg" in entry or "speed_pp" in entry


def is_header(line: str) -> bool:
    """Whether a line is the header of its table: every cell is a known column, PP, TG and B among them."""
    names = [found[1] for cell in _cells(line) if (found := CELL.match(cell))]
    return line.lstrip().startswith("|") and {"PP", "TG", "B"} <= set(names)


def read_table(path: Path, text: str) -> Imported:
    """The tables of one file; raises BadInput for a row that is cut off or holds no number."""
    samples: list[Sample] = []
    made: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    columns: list[tuple[str, str]] = []
    for n, line in enumerate(text.splitlines(), start=1):
        from_log(line, made)
        if found := SETTINGS.search(line):
            settings = {key: int(value) for key, value in PAIR.findall(found[0])}
        if is_header(line):
            columns = [(m[1], m[2] or "") for cell in _cells(line) if (m := CELL.match(cell))]
        elif line.lstrip().startswith("|") and columns and not re.fullmatch(r"[|:\-\s]+", line):
            where = f"{shown(path)} line {n}"
            cells = _cells(line)
            if len(cells) != len(columns) or not line.rstrip().endswith("|"):
                raise BadInput(where, f"has {len(cells)} of {len(columns)} columns", CUT_OFF)
            row = {name: (unit, cell) for (name, unit), cell in zip(columns, cells, strict=True)}
            samples += _row(path, n, where, row, settings, made)
    return Imported(path, TOOL, tuple(samples))


def read_json(path: Path, entries: list[tuple[int, dict[str, Any]]], log: list[str]) -> Imported:
    """The JSON lines of one file, with what the log lines among them say about build, GPU and model."""
    made: dict[str, Any] = {}
    for line in log:
        from_log(line, made)
    samples: list[Sample] = []
    for n, entry in entries:
        where = f"{shown(path)} line {n}"
        for key in ("pp", "tg", "pl"):
            if key not in entry:
                raise BadInput(where, f'has no "{key}"', "give the tool's output as it was printed")
        settings = {k: plain(v) for k, v in entry.items() if k not in JSON_MEASURED}
        # A speed is in tok/s only where its time, in seconds by the tool's own printer, bears it out.
        units = {"S_PP": "t/s" if "t_pp" in entry else "", "S_TG": "t/s" if "t_tg" in entry else ""}
        names = {"PP": "pp", "TG": "tg", "B": "pl", "T_PP": "t_pp", "S_PP": "speed_pp", "T_TG": "t_tg"}
        names |= {"S_TG": "speed_tg"}
        row = {
            name: (units.get(name, "s" if name.startswith("T_") else ""), entry[key])
            for name, key in names.items()
            if key in entry
        }
        samples += _row(path, n, where, row, settings, made)
    return Imported(path, TOOL, tuple(samples))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _row(
    path: Path,
    n: int,
    where: str,
    row: Mapping[str, tuple[str, Any]],
    settings: Mapping[str, Any],
    made: dict[str, Any],
) -> list[Sample]:
    """Prefill and decode of one row; a row without prompt or without generation has only the other."""
    prompt, generated, sequences = (count(row[name][1], where, name) for name in ("PP", "TG", "B"))
    shared = settings.get("is_pp_shared")
    totals = {
        "TG": [generated * sequences],
        "PP": [prompt if shared else prompt * sequences] if shared is not None else [prompt * sequences, prompt],
    }
    axes = {"npp": prompt, "ntg": generated, "npl": sequences}
    samples = []
    for part, metric in (("PP", "prefill_tps"), ("TG", "decode_tps")):
        if f"S_{part}" not in row or not totals[part][0]:
            continue
        unit, word = row[f"S_{part}"]
        speed = number(word, where, f"S_{part}")
        wrong = ""
        time_unit, seconds = row.get(f"T_{part}", ("", None))
        if time_unit == "s":
            wrong = _contradiction(where, part, speed, totals[part], number(seconds, where, f"T_{part}", zero=True))
        samples.append(Sample(TOOL, path, n, metric, unit, (speed,), axes, dict(settings), dict(made), wrong=wrong))
    return samples


def _contradiction(where: str, part: str, speed: float, tokens: list[int], seconds: float) -> str:
    """Both are rounded, the time to a millisecond in the table: below 20 ms it confirms nothing."""
    if seconds < 0.02:
        return ""
    tolerance = 0.01 + 0.0005 / seconds
    if any(not disagrees(speed, total / seconds, tolerance) for total in tokens):
        return ""
    return f"{where}: S_{part} {speed:.6g} is not the {tokens[0] / seconds:.6g} tok/s that T_{part} implies"
