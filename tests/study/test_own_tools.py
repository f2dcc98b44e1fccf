"""What is read of each tool's file, and how each reader refuses one that is broken: in one line, with a remedy."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lab.base.errors import BadInput
from lab.study import own
from lab.study.own.sample import NOTHING_ASKED, Asked
from tests.loops import over
from tests.refused import refused
from tests.study import own_files as made
from tests.study.own_files import jsonl, row

Figures = Mapping[str, tuple[float, str]]
KERNELS = [("gated_delta_net", 30.0), ("mul_mat_q", 60.0), ("mul_mat_q", 10.0)]
DECLARED = Asked(NOTHING_ASKED.units, {"kernel_us": {"column": "time*", "unit": "ms"}})
PROFILED = Asked(NOTHING_ASKED.units, {"gdn_share": {"category": "gdn_recurrence"},
    "engagements": {"kernel": "^mul_mat"}, "gdn_us_per_token": {"kernel": "gated", "tokens": "10"},
    "decode_step": {"category": "gdn_recurrence+quantised_gemm", "steps": "2"}})  # fmt: skip
OF_PROFILE = {"gdn_share": (30.0, "%"), "engagements": (2.0, "launches"), "gdn_us_per_token": (3.0, "us/tok"),
              "decode_step": (0.05, "ms/step")}  # fmt: skip
SERVED = {
    "ttft_p50": (100.0, "ms"),
    "ttft_p99": (300.0, "ms"),
    "itl_p95": (15.0, "ms"),
    "aggregate_tps": (400.0, "tok/s"),
}
DETAILS: dict[str, Any] = {"ttfts": [0.09, 0.1, 0.2], "itls": [[0.01, 1.5], [0.02]]}

ONE_TOKEN = {"max_concurrency": 8} | dict.fromkeys(("mean_itl_ms", "median_itl_ms", "mean_tpot_ms"), 0.0)

READ: dict[str, tuple[str, Asked, Figures]] = {
    "kl": (made.kl(), NOTHING_ASKED, {"ppl": (6.4, "ppl"), "kl": (0.13, "kld"), "same_top_p": (83.7, "%")}),
    "perplexity": (made.perplexity(), NOTHING_ASKED, {"ppl": (6.4, "ppl")}),
    "vllm": (made.vllm(), NOTHING_ASKED, SERVED),
    "vllm with details": (made.vllm(**DETAILS), NOTHING_ASKED, {"worst_decode_gap": (1.5, "s")}),
    "vllm of one token": (made.vllm(4000.0, 2.0, "inf", **ONE_TOKEN), NOTHING_ASKED, {"ttft_p50": (4000.0, "ms")}),
    "vllm of chunks": (made.vllm(rate="inf", max_concurrency=8, mean_itl_ms=100.0), NOTHING_ASKED, SERVED),
    "vllm of one long request": (made.vllm(rate="inf"), NOTHING_ASKED, SERVED),
    "sglang": (made.sglang(), NOTHING_ASKED, SERVED),
    "server": (made.server(), NOTHING_ASKED, {"prefill_tps": (2000.0, "tok/s"), "decode_tps": (50.0, "tok/s")}),
    "nvbench": (made.nvbench(), NOTHING_ASKED, {"kernel_us": (50.0, "us")}),
    "flashinfer": (made.flashinfer(), NOTHING_ASKED, {"kernel_us": (50.0, "us")}),
    "pytest": (made.pytest_benchmark(), NOTHING_ASKED, {"kernel_us": (50.0, "us")}),
    "perf_report": ("N,mine (ms),theirs (ms)\n1024,0.05,\n", NOTHING_ASKED, {"kernel_us": (50.0, "us")}),
    "tritonbench": (
        "x_val;a-latency;a-speedup\n(8, 4);0.05 (±1.5%);2.0\naverage;0.07;2.0\n", NOTHING_ASKED,
        {"kernel_us": (50.0, "us")},
    ),
    "wide": ("n,time_gpu,note\n8,0.05,x\n", DECLARED, {"kernel_us": (50.0, "us")}),
    "wide lines": (jsonl({"n": 8, "time": 0.05}), DECLARED, {"kernel_us": (50.0, "us")}),
    "tidy": ("metric,value,unit,n\nkernel_us,0.05,ms,8\n", NOTHING_ASKED, {"kernel_us": (50.0, "us")}),
    "tidy lines": (jsonl(row("smem_max", 96.5, "KiB")), NOTHING_ASKED, {"smem_max": (96.5, "KB")}),
    "kineto": (made.kineto(KERNELS), PROFILED, OF_PROFILE),
    "ncu": (made.ncu(KERNELS), PROFILED, OF_PROFILE),
}  # fmt: skip


def test_figures_of_every_tool(tmp_path: Path) -> None:
    @over({name: (name, *case) for name, case in READ.items()})
    def each(name: str, text: str, asked: Asked, expected: Figures) -> None:
        (tmp_path / name).write_text(text)
        samples = [s for s in own.read(tmp_path / name, asked).samples if s.status == "ok"]
        for metric, (value, unit) in expected.items():
            found = [(s.values[0], s.unit) for s in samples if s.metric == metric]
            assert found, f"no {metric}"
            assert found == [(pytest.approx(value), unit)] * len(found)
            assert not any(s.wrong for s in samples)

    each()


def test_sqlite(tmp_path: Path) -> None:
    found = own.read(made.sqlite(tmp_path / "a", KERNELS), PROFILED).samples
    assert {s.metric: (pytest.approx(s.values[0]), s.unit) for s in found} == OF_PROFILE


def test_uncertainty_arrivals_and_shape(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def read(text: str) -> list[own.sample.Sample]:
        path.write_text(text)
        return list(own.read(path).samples)

    assert [s.error for s in read(made.kl())] == [0.04, 0.001, 0.1]
    assert [s.error for s in read(made.nvbench(noise=0.02))] == [pytest.approx(1.0)]
    assert [s.error for s in read(READ["tritonbench"][0])] == [pytest.approx(0.75)]
    assert {s.axes["arrival"] for s in read(made.vllm()) + read(made.sglang(request_rate=2.5))} == {"staggered"}
    assert {s.axes["arrival"] for s in read(made.vllm(rate="inf")) + read(made.sglang())} == {"burst"}
    assert {s.axes["arrival"] for s in read(made.vllm(rate="inf", max_concurrency=8))} == {""}
    assert {s.axes["arrival"] for s in read(made.vllm(rate="inf", max_concurrency=8, completed=6, failed=58))} == {""}
    (perf, failed) = read(READ["perf_report"][0])
    assert (perf.axes, perf.settings, failed.status) == ({"N": "1024"}, {"column": "mine"}, "unsupported")
    assert read(made.kl())[0].axes == {"chunks": 560, "n_ctx": 512}
    assert len(read(made.pytest_benchmark(data=[4e-5, 5e-5, 6e-5]))[0].values) == 3


def test_what_cannot_be_true_is_said(tmp_path: Path) -> None:
    texts = {
        "a failed request": made.vllm(completed=63),
        "another duration": made.vllm(duration=20.0),
        "another median": made.vllm(ttfts=[0.2, 0.2, 0.3]),
        "seconds as ms": made.vllm(0.1, rate="inf", max_concurrency=8, mean_tpot_ms=0.0095, mean_itl_ms=0.009),
        "seconds as ms, of gaps": made.vllm(rate="inf", max_concurrency=8, mean_itl_ms=0.009),
        "seconds as ms, all at once": made.sglang(mean_ttft_ms=0.11, mean_tpot_ms=0.0095, mean_itl_ms=0.009),
        "seconds as ms, of one token": made.vllm(0.1, 2.0, "inf", **ONE_TOKEN),
        "us as ms": made.vllm(1e5, mean_tpot_ms=9500.0),
        "incorrect": made.flashinfer(status="INCORRECT_NUMERICAL"),
        "another rate": made.server().replace('"predicted_per_second": 50.0', '"predicted_per_second": 80.0'),
    }

    @over({name: (text,) for name, text in texts.items()})
    def each(text: str) -> None:
        (tmp_path / "file").write_text(text)
        assert any(s.wrong.startswith(str(s.at)) for s in own.read(tmp_path / "file").samples)

    each()


# Bad input ------------------------------------------------------------------------------------------------------------


def without(key: str) -> Callable[[str], str]:
    """A JSON file in which a key has another name, as in another version of its tool."""
    return lambda text: text.replace(f'"{key}"', f'"new_{key}"')


OTHER_VERSION: dict[str, Callable[[str], str]] = {
    "vllm": without("total_output_tokens"),
    "sglang": without("duration"),
    "server": without("predicted_n"),
    "nvbench": lambda text: text.replace('"major": 1', '"major": 3'),
    "flashinfer": without("timestamp"),
    "pytest": without("stddev"),
    "kl": lambda text: text.replace("KLD", "divergence"),
}
ZERO = {
    "vllm": (made.vllm(mean_ttft_ms=0.0), NOTHING_ASKED),
    "vllm, a gap": (made.vllm(p99_itl_ms=0), NOTHING_ASKED),
    "tidy": ("metric,value,unit\nkernel_us,0,us\n", NOTHING_ASKED),
    "no unit": ("metric,value\nkernel_us,0\n", NOTHING_ASKED),
    "declared": ("n,time\n8,0.0\n", DECLARED),
}
WRONG_UNIT = {
    "tidy": ("metric,value,unit\nkernel_us,50,tok/s\n", NOTHING_ASKED),
    "tidy lines": (jsonl(row("decode_step", 5, "us")), NOTHING_ASKED),
    "declared": ("n,time\n8,50\n", Asked(NOTHING_ASKED.units, {"kernel_us": {"column": "time", "unit": "GB/s"}})),
    "profile": (made.kineto(KERNELS), Asked(NOTHING_ASKED.units, {"ppl": {"kernel": "mul_mat"}})),
}
OTHER_TOOL = {
    "google benchmark": json.dumps({"context": {}, "benchmarks": [{"name": "a", "real_time": 1.0}]}),
    "hyperfine": json.dumps({"results": [{"command": "a", "times": [1.0]}]}),
    "a table of nothing declared": "n,a,b\n1,2,3\n",
    "prose": "It was faster.\n",
    "bytes": "\x00\x01",
}
ASKED_WRONG: dict[str, dict[str, dict[str, str]]] = {
    "unknown category": {"gdn_share": {"category": "gdn_recurence"}},
    "unknown key": {"gdn_share": {"category": "gdn_recurrence", "tokns": "1"}},
    "no expression": {"engagements": {"kernel": "("}},
    "no count": {"gdn_us_per_token": {"kernel": "gated"}},
    "a count of zero": {"gdn_us_per_token": {"kernel": "gated", "tokens": "0"}},
    "a time of nothing": {"gdn_us_per_token": {"kernel": "renamed", "tokens": "8"}},
    "no time": {"gdn_share": {"kernel": "gated", "of": "wall"}},
    "nothing asked": {},
}


def test_a_card_s_own_time_may_be_none(tmp_path: Path) -> None:
    """A time that is lost (a stall) is best at 0; what the vocabulary calls a time is one that something took."""
    path = tmp_path / "own.csv"
    path.write_text("metric,value,unit\nstall_us,0,us\n")
    (found,) = own.read(path, Asked({**NOTHING_ASKED.units, "stall_us": "us"})).samples
    assert found.values == (0.0,)


def broken() -> dict[str, tuple[str, Asked]]:
    found: dict[str, tuple[str, Asked]] = {}
    for name, (text, asked, _) in READ.items():
        found[f"{name}: cut off"] = (text[: len(text) * 4 // 5], asked)
        found[f"{name}: its last character"] = (text.rstrip()[:-1], asked)
        found[f"{name}: empty"] = ("", asked)
        json_number, any_number = r'(?<=: )"?\d[\d.e-]*"?(?=[,\s}])', r"(?<![\d.\w])\d+\.\d+"
        number, nan = (json_number, "NaN") if "{" in text else (any_number, "nan")
        found[f"{name}: NaN"] = (re.sub(number, nan, text), asked)
    found |= {
        f"{name}: another version": (change(READ[name][0]), READ[name][1]) for name, change in OTHER_VERSION.items()
    }
    found |= {f"{name}: wrong unit": case for name, case in WRONG_UNIT.items()}
    found |= {f"zero: {name}": case for name, case in ZERO.items()}
    found |= {f"another tool: {name}": (text, NOTHING_ASKED) for name, text in OTHER_TOOL.items()}
    asks = {name: Asked(NOTHING_ASKED.units, how) for name, how in ASKED_WRONG.items()}
    return found | {f"asked: {name}": (made.kineto(KERNELS), how) for name, how in asks.items()}


def test_infinite_rate_is_no_fault(tmp_path: Path) -> None:
    """ "request_rate": "inf" is vLLM's default: what is wrong stands elsewhere in the file, and is named."""
    path = tmp_path / "the_file"
    path.write_text(made.vllm(rate="inf", mean_ttft_ms=float("nan")))
    with refused("line 1", 'holds NaN at "mean_ttft_ms"', remedy="that test failed"):
        own.read(path)
    path.write_text(json.dumps(json.loads(made.vllm(rate="inf")), indent=2).replace("9.5", "-Infinity"))
    with refused("line 1", 'holds -Infinity at "mean_tpot_ms"', remedy="that test failed"):
        own.read(path)
    path.write_text(made.vllm(rate="inf")[:-40])
    with refused("line 1", "ends in the middle", remedy="cut off"):
        own.read(path)


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    """Cut off, NaN, a time of 0, another version, a wrong unit, another tool: file or flag, what is wrong, a remedy."""

    @over({name: (name, *case) for name, case in broken().items()})
    def each(name: str, text: str, asked: Asked) -> None:
        path = tmp_path / "the_file"
        path.write_text(text)
        with pytest.raises(BadInput) as caught:
            own.read(path, asked)
        assert "the_file" in caught.value.where or caught.value.where.startswith("--metric"), str(caught.value)
        assert caught.value.remedy
        assert "\n" not in str(caught.value)

    each()
