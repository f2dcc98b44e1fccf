"""Small files as the field's tools write them, for the tests of imported evidence. The figures are invented."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.trace.nsys_synthetic import Export

NCU = '"ID","Kernel Name","Device","CC","Metric Name","Metric Unit","Metric Value"\n'
Kernels = Sequence[tuple[str, float]]  # name, us


def sqlite(path: Path, kernels: Kernels) -> Path:
    """An nsys export of these kernels, one after the other."""
    export, now = Export(), 0
    for name, us in kernels:
        export.kernel(name, now, now + round(1e3 * us))
        now += round(1e3 * us)
    return export.write(path)


def kineto(kernels: Kernels) -> str:
    """PyTorch's profiler JSON of these kernels, one after the other."""
    events, now = list[dict[str, Any]](), 0.0
    for name, us in kernels:
        where = {"device": 0, "stream": 7, "correlation": len(events)}
        events.append({"ph": "X", "cat": "kernel", "name": name, "ts": now, "dur": us, "args": where})
        now += us
    return json.dumps({"schemaVersion": 1, "deviceProperties": [], "traceEvents": events})


def ncu(kernels: Kernels, capability: str = "12.0") -> str:
    """The details page of `ncu --csv`."""
    about = f'"0","{capability}","gpu__time_duration.sum","us"'
    rows = (f'"{i}","{name}",{about},"{us}"\n' for i, (name, us) in enumerate(kernels))
    return NCU + "".join(rows)


def kl(kl: float = 0.13, top: float = 83.7, error: float = 0.1, ppl: float = 6.4) -> str:
    """What `llama-perplexity --kl-divergence` prints."""
    return f"""build: 7001 (a1b2c3d4) with cc for x86_64-linux-gnu
kl_divergence: computing over 560 chunks, n_ctx=512, batch_size=2048, n_seq=4
====== Perplexity statistics ======
Mean PPL(Q)                   :   {ppl:.6f} ±   0.040000
Mean PPL(base)                :   6.300000 ±   0.040000

====== KL divergence statistics ======
Mean    KLD:   {kl:.6f} ±   {error / 100:.6f}
Maximum KLD:   6.852483

====== Token probability statistics ======
Mean    Δp: -1.501 ± 0.017 %
Same top p: {top:.3f} ± {error:.3f} %
"""


def perplexity(ppl: float = 6.4) -> str:
    """What `llama-perplexity` prints without a base."""
    text = "perplexity: calculating perplexity over 560 chunks, n_ctx=512, batch_size=2048, n_seq=4\n"
    return f"{text}[1]4.1,[2]4.7,\nFinal estimate: PPL = {ppl:.4f} +/- 0.03456\n"


def vllm(ttft_ms: float = 100.0, tps: float = 400.0, rate: float | str = 4.0, **more: Any) -> str:
    """What `vllm bench serve --save-result` writes."""
    head = {"date": "20261120-101010", "endpoint_type": "vllm", "model_id": "example-7b", "num_prompts": 64}
    run = {"request_rate": rate, "burstiness": 1.0, "max_concurrency": None, "duration": 32.0, "completed": 64}
    tokens = {"failed": 0, "total_input_tokens": 8192, "total_output_tokens": round(32 * tps), "output_throughput": tps}
    times = {"mean_ttft_ms": 1.1 * ttft_ms, "median_ttft_ms": ttft_ms, "std_ttft_ms": 9.0, "p99_ttft_ms": 3 * ttft_ms}
    gaps = {"mean_itl_ms": 9.0, "median_itl_ms": 8.0, "p95_itl_ms": 15.0, "p99_itl_ms": 21.0, "mean_tpot_ms": 9.5}
    return json.dumps(head | run | tokens | times | gaps | more) + "\n"


def sglang(**more: Any) -> str:
    """What SGLang's bench_serving appends to its output file; without a rate it writes Infinity."""
    entry = json.loads(vllm(rate=float("inf")))
    for key in ("date", "endpoint_type", "model_id", "num_prompts", "failed", "burstiness"):
        del entry[key]
    return json.dumps(entry | {"backend": "sglang", "total_output_tokens_retokenized": 12800, **more}) + "\n"


def server(rate: float = 50.0) -> str:
    """Two responses of llama-server."""
    timings = {"prompt_n": 128, "prompt_ms": 64.0, "prompt_per_second": 2000.0}
    timings |= {"predicted_n": 100, "predicted_ms": 1e5 / rate, "predicted_per_second": rate}
    return 2 * (json.dumps({"model": "example-7b.gguf", "content": "...", "timings": timings}) + "\n")


def nvbench(us: float = 50.0, noise: float = 0.01, **more: Any) -> str:
    """What an nvbench program writes with --json."""

    def summary(tag: str, value: float) -> dict[str, Any]:
        return {"tag": tag, "name": "x", "data": [{"name": "value", "type": "float64", "value": f"{value:.17g}"}]}

    summaries = [summary("nv/cold/time/gpu/mean", us / 1e6), summary("nv/cold/time/gpu/stdev/relative", noise)]
    axes = [{"name": "Elements", "type": "int64", "value": "1048576"}]
    state = {"name": "Device=0 Elements=2^20", "device": 0, "type_config_index": 0, "axis_values": axes}
    state |= {"summaries": summaries, "is_skipped": False}
    version = {"major": 1, "minor": 0, "patch": 0, "string": "1.0.0"}
    return json.dumps(
        {"meta": {"argv": [], "version": {"json": version}}, "devices": [{"id": 0, "name": "Example GPU 24GB"}]}
        | {"benchmarks": [{"name": "copy", "index": 0, "devices": [0], "axes": None, "states": [state]}]}
        | more,
        indent=2,
    )  # fmt: skip


def flashinfer(ms: float = 0.05, status: str = "PASSED", solution: str = "mine") -> str:
    """A line of flashinfer-trace."""
    found: dict[str, Any] = {"status": status, "log": "", "timestamp": "2026-11-20T10:00:00+00:00"}
    found["environment"] = {"hardware": "Example GPU 24GB", "libs": {}}
    if status == "PASSED":
        found["correctness"] = {"max_relative_error": 1e-3, "max_absolute_error": 1e-2}
        found["performance"] = {"latency_ms": ms, "reference_latency_ms": 1.0, "speedup_factor": 1.0 / ms}
    workload = {"axes": {"M": 8, "N": 5120}, "inputs": {"x": {"type": "random"}}, "uuid": "0b1c"}
    return json.dumps({"definition": "gemm", "workload": workload, "solution": solution, "evaluation": found}) + "\n"


def pytest_benchmark(us: float = 50.0, **more: Any) -> str:
    """What `pytest --benchmark-json` writes."""
    stats = {"min": us / 1e6, "mean": us / 1e6, "stddev": us / 1e8, "rounds": 3, **more}
    bench = {"name": "test_copy[1024]", "fullname": "b.py::test_copy[1024]", "params": {"n": 1024}, "stats": stats}
    machine = {"cpu": {"brand_raw": "Example CPU 16-Core"}}
    head = {"machine_info": machine, "commit_info": {"id": "a1b2c3d4"}, "datetime": "2026-11-20T10:00:00+00:00"}
    return json.dumps({**head, "benchmarks": [bench], "version": "5.1.0"}, indent=2)


def jsonl(*rows: Mapping[str, Any]) -> str:
    """A table with declared columns."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def row(metric: str, value: float, unit: str, **more: Any) -> dict[str, Any]:
    """A row of such a table."""
    return {"metric": metric, "value": value, "unit": unit, **more}
