"""`llama-perplexity`: ppl, and with `--kl-divergence` also kl and same_top_p, each with the uncertainty printed.

Names and layout as in llama.cpp's tools/perplexity/README.md: "Final estimate: PPL = X +/- E", or the three tables of
statistics, in which "PPL(Q)" is the model that ran and "KLD" is against the logits of the base. What stands behind +/-
is the standard error of the mean over tokens. Runs over another number of chunks or another context are other shapes.
"""

from __future__ import annotations

import re
from pathlib import Path

from lab.base.errors import BadInput
from lab.study.own.sample import CUT_OFF, Imported, Made, Sample, from_log, lines

TOOL = "llama-perplexity"
OVER = re.compile(r"(?:calculating perplexity|computing|calculating) over (\d+) chunks, n_ctx=(\d+)")
NUMBER = r"\s*[:=]\s*(\S+)\s*(?:±|\+/-)\s*(\S+)"
FIGURES = {
    "ppl": (re.compile(rf"^(?:Final estimate: PPL|Mean PPL\(Q\)){NUMBER}"), "ppl"),
    "kl": (re.compile(rf"^Mean\s+KLD{NUMBER}"), "kld"),
    "same_top_p": (re.compile(rf"^Same top p{NUMBER}\s*%"), "%"),
}
TABLES = "Perplexity statistics"


def is_line(line: str) -> bool:
    """Whether a line can only be this tool's."""
    return line.startswith(("Final estimate: PPL", f"====== {TABLES}")) or OVER.search(line) is not None


def read(path: Path, text: str) -> Imported:
    """The figures of one run; raises BadInput for a log without its end and for what is no number."""
    made, axes, found = Made(), dict[str, int | str](), list[Sample]()
    for at, line in lines(path, text):
        made = from_log(line, made)
        if over := OVER.search(line):
            axes = {"chunks": int(over[1]), "n_ctx": int(over[2])}
        for metric, (pattern, unit) in FIGURES.items():
            if match := pattern.match(line.strip()):
                value, error = (at.figure(match[i], metric, zero=True) for i in (1, 2))
                found.append(Sample(TOOL, at, metric, unit, (value,), axes, made=made, error=error))
    missing = [metric for metric in (FIGURES if TABLES in text else ["ppl"]) if metric not in {s.metric for s in found}]
    if missing or not text.endswith("\n"):
        raise BadInput(path, f"has no {missing[0] if missing else 'end of its last line'}", CUT_OFF)
    return Imported(path, TOOL, tuple(found))
