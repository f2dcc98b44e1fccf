"""`llama-bench -o jsonl` and `-o json`: prompt processing as prefill_tps, text generation as decode_tps.

Field names as in llama.cpp's tools/llama-bench (JSON printers). One sequence, so npl is 1. The keys carry no unit: `ts`
is tokens per second because tokens / samples_ns gives the same number, which is checked for every repetition. A
combined test (-pg) is one time for both kinds of work; it is neither metric and is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from lab.base import files
from lab.base.errors import BadInput
from lab.base.files import Positive
from lab.study.own.sample import Count, Imported, Line, Made, Objects, Sample, base_name, plain

TOOL = "llama-bench"
UNIT = "tok/s"
# samples_ts is printed with six significant digits, avg_ts is the mean of quotients and not their quotient.
SAMPLE_TOLERANCE, MEAN_TOLERANCE = 1e-3, 0.05


class Test(msgspec.Struct):
    """What was run and measured of one printed test; every other key is a setting or says how it was made."""

    n_prompt: Count
    n_gen: Count
    n_depth: Count = 0
    samples_ts: tuple[Positive, ...] = ()
    samples_ns: tuple[Positive, ...] = ()
    avg_ts: Positive | None = None
    avg_ns: Positive | None = None
    stddev_ts: Any = None
    stddev_ns: Any = None
    test_time: str = ""

    def speeds(self, at: Line) -> tuple[tuple[float, ...], str, str]:
        """(speed of each repetition, the unit where the times confirm it, what contradicts them)."""
        tokens = self.n_prompt + self.n_gen
        if not self.samples_ts:
            mean = at.figure(self.avg_ts, "avg_ts")
            if self.avg_ns is None:
                return (mean,), "", ""
            implied = tokens / self.avg_ns * 1e9
            return (mean,), UNIT, at.contradiction("avg_ts", mean, implied, MEAN_TOLERANCE, "its own time")
        if not self.samples_ns:
            return self.samples_ts, "", ""
        if len(self.samples_ns) != len(self.samples_ts):
            what = f"{at}: {len(self.samples_ts)} samples_ts but {len(self.samples_ns)} samples_ns"
            return self.samples_ts, UNIT, what
        pairs = [("samples_ts", ts, tokens / ns * 1e9) for ts, ns in zip(self.samples_ts, self.samples_ns, strict=True)]
        if self.avg_ts is not None:
            pairs.append(("avg_ts", self.avg_ts, sum(self.samples_ts) / len(self.samples_ts)))
        found = [at.contradiction(key, ts, now, SAMPLE_TOLERANCE, "its own samples") for key, ts, now in pairs]
        return self.samples_ts, UNIT, next(filter(None, found), "")


def is_one(entry: dict[str, Any]) -> bool:
    """Whether a JSON object is a test of llama-bench."""
    return "avg_ts" in entry or "samples_ts" in entry


def read_objects(path: Path, entries: Objects, log: list[str]) -> Imported:
    """The tests of one file, each of which states its build, GPU and model itself; raises BadInput for one without
    its numbers."""
    found = [_sample(at, entry) for at, entry in entries]
    samples = tuple(s for s in found if s is not None)
    combined = len(found) - len(samples)
    left_out = f"{path.name}: {combined} combined tests (-pg) are neither prefill nor decode and were left out"
    return Imported(path, TOOL, samples, (left_out,) if combined else ())


def _sample(at: Line, entry: dict[str, Any]) -> Sample | None:
    test = files.convert(entry, Test, str(at))
    prompt, generated, depth = test.n_prompt, test.n_gen, test.n_depth
    if prompt and generated:
        return None
    if not prompt and not generated:
        raise BadInput(str(at), "n_prompt and n_gen are both 0", "remove the line: nothing ran")
    values, unit, wrong = test.speeds(at)
    name = (f"pp{prompt}" if prompt else f"tg{generated}") + (f"@d{depth}" if depth else "")
    made = files.convert(entry, Made, str(at))
    return Sample(
        TOOL,
        at,
        "prefill_tps" if prompt else "decode_tps",
        unit,
        values,
        axes={"test": name, "npp": prompt, "ntg": generated, "npl": 1, "depth": depth},
        settings={k: plain(v) for k, v in entry.items() if k not in (*Made.__struct_fields__, *Test.__struct_fields__)},
        made=msgspec.structs.replace(made, model_filename=base_name(made.model_filename)),
        wrong=wrong,
        when=test.test_time,
    )
