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

from lab.base.errors import BadInput
from lab.study.own.sample import AS_PRINTED, Imported, Line, Made, Objects, Sample, Word, from_log, lines, plain

TOOL = "llama-batched-bench"
CELL = re.compile(r"^(PP|TG|B|N_KV|T_PP|S_PP|T_TG|S_TG|T|S)(?:\s+(\S+))?$")
SETTINGS = re.compile(r"n_kv_max\s*=\s*\d+.*")
PAIR = re.compile(r"(\w+)\s*=\s*(-?\d+)")
# JSON key -> column and unit; a speed is in tok/s only where its time, in seconds by the tool's printer, bears it out.
KEYS = {"pp": "PP", "tg": "TG", "pl": "B", "t_pp": "T_PP", "speed_pp": "S_PP", "t_tg": "T_TG", "speed_tg": "S_TG"}
TOTALS = ("n_kv", "t", "speed")


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
    made, settings, units = Made(), dict[str, Word](), dict[str, str]()
    for at, line in lines(path, text):
        made = from_log(line, made)
        if found := SETTINGS.search(line):
            settings = {key: int(value) for key, value in PAIR.findall(found[0])}
        if is_header(line):
            units = {m[1]: m[2] or "" for cell in _cells(line) if (m := CELL.match(cell))}
        elif line.lstrip().startswith("|") and units and not re.fullmatch(r"[|:\-\s]+", line):
            cells = at.columns(list(units), _cells(line), whole=line.rstrip().endswith("|"))
            samples += _row(at, cells, units, settings, made)
    return Imported(path, TOOL, tuple(samples))


def read_objects(path: Path, entries: Objects, log: list[str]) -> Imported:
    """The JSON lines of one file, with what the log lines among them say about build, GPU and model."""
    made = Made()
    for line in log:
        made = from_log(line, made)
    samples: list[Sample] = []
    for at, entry in entries:
        for key in ("pp", "tg", "pl"):
            if key not in entry:
                raise BadInput(str(at), f'has no "{key}"', AS_PRINTED)
        settings = {k: plain(v) for k, v in entry.items() if k not in (*KEYS, *TOTALS)}
        units = {"T_PP": "s", "T_TG": "s"} | {f"S_{p}": "t/s" for p in ("PP", "TG") if f"t_{p.lower()}" in entry}
        row = {name: entry[key] for key, name in KEYS.items() if key in entry}
        samples += _row(at, row, units, settings, made)
    return Imported(path, TOOL, tuple(samples))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _row(
    at: Line, row: Mapping[str, Any], units: Mapping[str, str], settings: Mapping[str, Word], made: Made
) -> list[Sample]:
    """Prefill and decode of one row, by column; a row without prompt or without generation has only the other."""
    prompt, generated, sequences = (at.count(row[name], name) for name in ("PP", "TG", "B"))
    shared = settings.get("is_pp_shared")  # not stated: either total may have been meant
    prefilled = [prompt * sequences, prompt] if shared is None else [prompt if shared else prompt * sequences]
    axes = {"npp": prompt, "ntg": generated, "npl": sequences}
    samples = []
    for part, metric, totals in (("PP", "prefill_tps", prefilled), ("TG", "decode_tps", [generated * sequences])):
        if f"S_{part}" not in row or not totals[0]:
            continue
        speed, wrong = at.figure(row[f"S_{part}"], f"S_{part}"), ""
        timed = f"T_{part}" in row and units.get(f"T_{part}") == "s"
        if timed and (seconds := at.figure(row[f"T_{part}"], f"T_{part}", zero=True)) >= 0.02:
            # Both are rounded, the time to a millisecond in the table: below 20 ms it confirms nothing.
            limit = 0.01 + 0.0005 / seconds
            said = [at.contradiction(f"S_{part}", speed, n / seconds, limit, f"T_{part}") for n in totals]
            wrong = said[0] if all(said) else ""
        unit = units.get(f"S_{part}", "")
        samples.append(Sample(TOOL, at, metric, unit, (speed,), axes, settings, made, wrong=wrong))
    return samples
