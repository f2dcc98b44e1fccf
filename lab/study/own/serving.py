"""Serving benchmarks: `vllm bench serve --save-result`, SGLang's `bench_serving --output-file`, llama-server's timings.

Keys as in vLLM's page on its benchmark CLI, SGLang's Bench Serving Guide and llama.cpp's tools/server/README.md.
`mean_`, `median_` and `pNN_` of ttft, itl and tpot become ttft_mean, ttft_p50, itl_p95, in ms as their keys say; where
the times of the requests were saved too, the median is computed again from them, itl_p95 where it is not printed,
and worst_decode_gap and stalls_over_1s. output_throughput is aggregate_tps, confirmed by its tokens and duration; the
times by Little's law, which seconds under a key of milliseconds do not keep. A run with failed requests is no result.
Arrivals: a finite request rate is "staggered", an infinite one without a limit of concurrency is "burst"; a limit alone
is neither, and such a figure does not say. vLLM writes no length of prompt or answer: the tokens per request are the
load of a figure, which the arms must share (verdict.LOADS).

llama-server puts `timings` into every response: the rates of that request, which are no aggregate of several at once.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from lab.base import files
from lab.base.files import NotNegative, Positive
from lab.study.own.sample import Count, Imported, Line, Made, Objects, Sample, Word

STATISTIC = re.compile(r"(mean|median|p\d+)_(ttft|itl|tpot)_ms")
SHAPE = ("dataset_name", "num_prompts", "burstiness", "random_input_len", "random_output_len", "sharegpt_output_len")
SERVER = "llama-server"
FAR = 3.0  # how far the requests in flight may lie from the limit of concurrency: means, over unlike requests
LONGEST = 10.0  # a run's longest request, in mean ones: what is alone at its end


class Served(msgspec.Struct):
    """A run of either benchmark; times of requests in seconds."""

    duration: Positive
    completed: Count
    total_output_tokens: Count
    output_throughput: Positive
    request_rate: Positive | str
    num_prompts: Count | None = None
    failed: Count = 0
    total_input_tokens: Count | None = None
    max_concurrency: Count | None = None
    ttfts: tuple[NotNegative, ...] = ()
    itls: tuple[tuple[NotNegative, ...], ...] = ()
    model_id: str = ""
    backend: str = ""
    endpoint_type: str = ""

    @property
    def arrival(self) -> str:
        """As a card names it, "" where the file does not say."""
        if not math.isinf(float(self.request_rate)):
            return "staggered"
        sent = self.num_prompts or self.completed  # those that failed arrived too
        return "burst" if self.max_concurrency is None or self.max_concurrency >= sent else ""


class Timings(msgspec.Struct):
    """A response's timings."""

    prompt_n: Count
    prompt_ms: NotNegative
    predicted_n: Count
    predicted_ms: NotNegative
    prompt_per_second: NotNegative | None = None
    predicted_per_second: NotNegative | None = None
    cache_n: Count = 0


def is_one(entry: dict[str, Any]) -> bool:
    """Whether a JSON object is a run of a serving benchmark, or a response of llama-server."""
    return {"request_rate", "output_throughput"} <= entry.keys() or isinstance(entry.get("timings"), dict)


def read_objects(path: Path, entries: Objects, log: list[str]) -> Imported:
    """The runs of one file; raises BadInput for one without its numbers."""
    found = [_response(at, entry) if "timings" in entry else _run(at, entry) for at, entry in entries]
    samples = tuple(itertools.chain(*found))
    tool = samples[0].tool if samples else SERVER
    said = f"{path.name}: the rates of single requests, whatever ran beside them"
    return Imported(path, tool, samples, (said,) if tool == SERVER else ())


def _run(at: Line, entry: dict[str, Any]) -> list[Sample]:
    run = files.convert(entry, Served, str(at))
    if isinstance(run.request_rate, str) and run.request_rate != "inf":
        at.figure(run.request_rate, "request_rate")
    tool = "SGLang bench_serving" if "total_output_tokens_retokenized" in entry else "vllm bench serve"
    axes: dict[str, Word] = {key: value for key in SHAPE if (value := entry.get(key)) is not None}
    axes |= {"request_rate": run.request_rate, "npl": run.max_concurrency or "unlimited", "arrival": run.arrival}
    axes.setdefault("num_prompts", run.completed)
    settings: dict[str, Word] = {"backend": run.endpoint_type or run.backend}
    failed = run.failed or int(axes["num_prompts"]) - run.completed
    wrong = f"{at}: {failed} of {axes['num_prompts']} requests failed" if failed else ""
    rate = run.total_output_tokens / run.duration
    wrong = wrong or at.contradiction("output_throughput", run.output_throughput, rate, 0.01, "its own duration")
    found = {"aggregate_tps": ("tok/s", run.output_throughput)}
    for key, value in entry.items():
        if (said := STATISTIC.fullmatch(key)) and value is not None:
            none = value == 0 and said[2] != "ttft" and run.total_output_tokens <= run.completed  # one token has no gap
            if not none:
                found[f"{said[2]}_{said[1].replace('median', 'p50')}"] = ("ms", at.figure(value, key))
    if run.ttfts and "ttft_p50" in found:
        median = 1e3 * statistics.median(run.ttfts)
        wrong = wrong or at.contradiction("median_ttft_ms", found["ttft_p50"][1], median, 0.01, "its own ttfts")
    if len(gaps := list(itertools.chain(*run.itls))) > 1:
        found.setdefault("itl_p95", ("ms", 1e3 * statistics.quantiles(gaps, n=20, method="inclusive")[-1]))
        found["worst_decode_gap"] = ("s", max(gaps))
        found["stalls_over_1s"] = ("gaps", float(sum(gap > 1 for gap in gaps)))
    wrong = wrong or _in_flight(at, run, {metric: value for metric, (_, value) in found.items()})
    made = Made(model_filename=run.model_id)
    tokens = {"input tokens": run.total_input_tokens, "output tokens": run.total_output_tokens}
    load = {f"{kind} per request": n / run.completed for kind, n in tokens.items() if n is not None and run.completed}
    return [Sample(tool, at, m, u, (v,), axes, settings, made, wrong=wrong, load=load) for m, (u, v) in found.items()]


def _in_flight(at: Line, run: Served, found: Mapping[str, float]) -> str:
    """One sentence where the times of a request are not those of the throughput, else "".

    By Little's law requests per second times seconds of each are those in flight. There are never more than the limit;
    where they wait to be sent there are as many, until the longest are left alone.
    """
    limit = min(run.max_concurrency or run.completed, run.completed)
    if not limit or "ttft_mean" not in found:
        return ""
    steps = max(run.total_output_tokens / run.completed - 1, 0.0)
    least = limit / (1 + LONGEST * limit / run.completed) / FAR if math.isinf(float(run.request_rate)) else 0.0
    # A gap between two chunks of several tokens each (speculative decoding) is longer than that between two tokens.
    for key, most in (("tpot", FAR * limit), ("itl", math.inf)):
        ms = found["ttft_mean"] + steps * found.get(f"{key}_mean", math.nan if steps else 0.0)
        flying = run.completed / run.duration * ms / 1e3
        if flying < least or flying > most:
            times = f"mean_ttft_ms {found['ttft_mean']:.6g} and mean_{key}_ms {found.get(f'{key}_mean', 0.0):.6g}"
            kept = f"at output_throughput {run.output_throughput:.6g} keep {flying:.3g} requests in flight"
            return f"{at}: {times} {kept} where up to {limit} were (are the times in ms?)"
    return ""


def _response(at: Line, entry: dict[str, Any]) -> list[Sample]:
    t = files.convert(entry["timings"], Timings, str(at), "timings")
    made, found = Made(model_filename=str(entry.get("model", ""))), []
    axes: dict[str, Word] = {"npp": t.prompt_n, "ntg": t.predicted_n, "cache_n": t.cache_n}
    parts = (("prefill_tps", "prompt", t.prompt_n, t.prompt_ms, t.prompt_per_second),
             ("decode_tps", "predicted", t.predicted_n, t.predicted_ms, t.predicted_per_second))  # fmt: skip
    for metric, key, count, ms, rate in parts:
        if count and ms and rate:
            wrong = at.contradiction(f"{key}_per_second", rate, 1e3 * count / ms, 0.01, f"{key}_ms")
            found.append(Sample(SERVER, at, metric, "tok/s", (rate,), axes, made=made, wrong=wrong))
    return found
