"""`llama-bench -o jsonl` and `-o json`: prompt processing as prefill_tps, text generation as decode_tps.

Field names as in llama.cpp's tools/llama-bench (JSON printers): n_prompt, n_gen, n_depth, avg_ts, stddev_ts, avg_ns,
samples_ts, samples_ns, and the build, hardware, model and settings of each test. One sequence, so npl is 1. The keys
carry no unit: `ts` is tokens per second because tokens / samples_ns gives the same number, which is checked for every
repetition. A combined test (-pg) is one time for both kinds of work; it is neither metric and is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lab.base.errors import BadInput, shown
from lab.study.own.sample import Imported, Sample, base_name, count, disagrees, number, plain

TOOL = "llama-bench"
UNIT = "tok/s"
MADE: tuple[str, ...] = (
    "build_commit",
    "build_number",
    "gpu_info",
    "cpu_info",
    "backends",
    "model_filename",
    "model_type",
)
MADE += ("model_size", "model_n_params")
MEASURED = ("test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns", "samples_ts")
AXES = ("n_prompt", "n_gen", "n_depth")
# samples_ts is printed with six significant digits, avg_ts is the mean of quotients and not their quotient.
SAMPLE_TOLERANCE, MEAN_TOLERANCE = 1e-3, 0.05


def is_one(entry: dict[str, Any]) -> bool:
    """Whether a JSON object is a test of llama-bench."""
    return "avg_ts" in entry or "samples_ts" in entry


def read(path: Path, entries: list[tuple[int, dict[str, Any]]]) -> Imported:
    """The tests of one file; raises BadInput for a test without its numbers."""
    samples, combined = [], 0
    for line, entry in entries:
        sample = _sample(path, line, entry)
        if sample is None:
            combined += 1
        else:
            samples.append(sample)
    left_out = f"{path.name}: {combined} combined tests (-pg) are neither prefill nor decode and were left out"
    return Imported(path, TOOL, tuple(samples), (left_out,) if combined else ())


def _sample(path: Path, line: int, entry: dict[str, Any]) -> Sample | None:
    where = f"{shown(path)} line {line}"
    for key in ("n_prompt", "n_gen"):
        if key not in entry:
            raise BadInput(where, f'has no "{key}"', "give the output of `llama-bench -o jsonl` as it was printed")
    prompt, generated, depth = (count(entry.get(key, 0), where, key) for key in AXES)
    if prompt and generated:
        return None
    if not prompt and not generated:
        raise BadInput(where, "n_prompt and n_gen are both 0", "remove the line: nothing ran")
    values, unit, wrong = _speeds(entry, prompt + generated, where)
    test = (f"pp{prompt}" if prompt else f"tg{generated}") + (f"@d{depth}" if depth else "")
    made = {key: plain(entry[key]) for key in MADE if key in entry}
    if "model_filename" in made:
        made["model_filename"] = base_name(str(made["model_filename"]))
    return Sample(
        tool=TOOL,
        file=path,
        line=line,
        metric="prefill_tps" if prompt else "decode_tps",
        unit=unit,
        values=values,
        axes={"test": test, "npp": prompt, "ntg": generated, "npl": 1, "depth": depth},
        settings={k: plain(v) for k, v in entry.items() if k not in (*MADE, *MEASURED, *AXES)},
        made=made,
        wrong=wrong,
        when=str(entry.get("test_time", "")),
    )


def _speeds(entry: dict[str, Any], tokens: int, where: str) -> tuple[tuple[float, ...], str, str]:
    """(speed of each repetition, the unit where the times confirm it, what contradicts them)."""
    listed = {}
    for key in ("samples_ts", "samples_ns"):
        words = entry.get(key) or []
        if not isinstance(words, list):
            raise BadInput(where, f"{key} = {words!r:.40} is no list", "give the tool's output as it was printed")
        listed[key] = tuple(number(word, where, key) for word in words)
    speeds, times_ns = listed["samples_ts"], listed["samples_ns"]
    mean = number(entry["avg_ts"], where, "avg_ts") if "avg_ts" in entry else None
    if not speeds:
        mean = number(mean, where, "avg_ts")
        if "avg_ns" not in entry:
            return (mean,), "", ""
        implied = tokens / number(entry["avg_ns"], where, "avg_ns") * 1e9
        return (mean,), UNIT, _contradiction(where, "avg_ts", mean, implied, MEAN_TOLERANCE)
    if not times_ns:
        return speeds, "", ""
    if len(times_ns) != len(speeds):
        return speeds, UNIT, f"{where}: {len(speeds)} samples_ts but {len(times_ns)} samples_ns"
    found = [
        _contradiction(where, "samples_ts", speed, tokens / ns * 1e9, SAMPLE_TOLERANCE)
        for speed, ns in zip(speeds, times_ns, strict=True)
    ]
    if mean is not None:
        found.append(_contradiction(where, "avg_ts", mean, sum(speeds) / len(speeds), SAMPLE_TOLERANCE))
    return speeds, UNIT, next(filter(None, found), "")


def _contradiction(where: str, key: str, stated: float, implied: float, tolerance: float) -> str:
    if not disagrees(stated, implied, tolerance):
        return ""
    return f"{where}: {key} {stated:.6g} is not the {implied:.6g} tok/s that its own samples imply"
