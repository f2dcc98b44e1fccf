"""`lab verify`: pass, regression and bad input; baselines that cry wolf, wrong units and directions, atomic writing."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.cli import main
from lab.study import verify
from tests.loops import numbered, over
from tests.refused import held, refused
from tests.study.interop_samples import SAMPLES

CONTROL, CANDIDATE = (SAMPLES / f"llama_bench_{arm}.jsonl" for arm in ("control", "candidate"))
DS4_OLD = """ctx_tokens,prefill_tokens,prefill_tps,gen_tokens,gen_tps,kvcache_bytes
2048,2048,400.0,128,14.0,52184460
4096,2048,390.0,128,13.9,80373132
"""
DS4_STEADY = """ctx_tokens,prefill_tokens,prefill_tps,gen_tokens,gen_tps,gen_tps_ss,first_token_sec,kvcache_bytes
2048,2048,400.0,128,14.10,14.12,0.0739,52184460
"""
TG = {"metric": "decode_tps", "shape": "tg128", "unit": "tok/s", "better": "higher", "value": 286.4, "limit_pct": 3}
GRAPHS = {"metric": "graphs_ratio", "shape": "tg128", "unit": "x", "better": "higher", "value": 1.55, "gate": 1.3}
MS = {"metric": "kernel_us", "shape": "op", "unit": "us", "better": "lower", "value": 100, "limit_pct": 10}
Capture = pytest.CaptureFixture[str]


def baseline(folder: Path, *metrics: dict[str, Any], **more: Any) -> Path:
    path = folder / "baseline.json"
    path.write_text(json.dumps({"schema": 1, "tool": "llama-bench", "made": {}, "metrics": metrics, **more}))
    return path


def bench(folder: Path, name: str, tg: float, pp: float = 4000.0, **more: Any) -> Path:
    """A llama-bench file of one repetition each, whose times agree with its speeds."""
    lines = []
    for n_prompt, n_gen, speed in ((512, 0, pp), (0, 128, tg)):
        ns = (n_prompt + n_gen) / speed * 1e9
        entry = {"gpu_info": "Example GPU 24GB", "model_type": "example 7B Q4_0", "n_prompt": n_prompt, "n_gen": n_gen}
        lines.append(json.dumps({**entry, "avg_ts": speed, "samples_ns": [ns], "samples_ts": [speed], **more}))
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def lab(capsys: Capture, *words: str | Path) -> tuple[int, str]:
    """(exit code, everything printed) of `lab verify`."""
    code = main.main(["verify", *map(str, words)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def refuses(capsys: Capture, where: str, said: Sequence[str], *words: str | Path) -> None:
    """`lab verify` exits with 2 and one line about `where` that holds each of `said`, with a remedy."""
    assert main.main(["verify", *map(str, words)]) == 2
    held(capsys.readouterr().err, where, *said)


# Verdict and exit status ----------------------------------------------------------------------------------------------


LINE_CASES: list[tuple[float, float, int, str]] = [
    (100.0, 4000.0, 0, "pass"),
    (97.0, 3800.0, 0, "pass"),  # on the lines, 3 % and 5 % down
    (96.9, 4000.0, 1, "regression"),
    (100.0, 3799.0, 1, "regression"),
    (130.0, 6000.0, 0, "pass"),  # faster is no regression
]


def test_line(tmp_path: Path, capsys: Capture) -> None:
    @over(numbered(LINE_CASES))
    def each(tg: float, pp: float, code: int, word: str) -> None:
        stored = tmp_path / "b.json"
        assert lab(capsys, stored, bench(tmp_path, "old.jsonl", 100.0), "--write")[0] == 0
        found = lab(capsys, stored, bench(tmp_path, "new.jsonl", tg, pp))
        assert found[0] == code
        assert found[1].rstrip().endswith(f"{word}: b.json")
        assert main.main(["verify", str(stored), str(tmp_path / "new.jsonl"), "--json"]) == code
        assert json.loads(capsys.readouterr().out)["verdict"] == word

    each()


def test_the_tools_own_files(tmp_path: Path, capsys: Capture) -> None:
    stored = tmp_path / "b.json"
    assert lab(capsys, stored, CONTROL, "--write")[0] == 0
    code, text = lab(capsys, stored, CANDIDATE)
    assert code == 0
    assert "decode_tps tg128: 110.704 tok/s against 100.127 (+10.56 %), line 97.1232" in text
    assert "build_number: 7001 -> 7002" in text
    assert lab(capsys, stored, CONTROL)[0] == 0
    assert lab(capsys, tmp_path / "c.json", CANDIDATE, "--write")[0] == 0
    assert lab(capsys, tmp_path / "c.json", CONTROL)[0] == 1  # the arms swapped


def test_lower_is_better(tmp_path: Path) -> None:
    (pin,) = verify.load(baseline(tmp_path, MS)).metrics
    assert (pin.line, pin.passes(110.0), pin.passes(110.1), pin.passes(50.0)) == (pytest.approx(110), True, False, True)


def test_graphs_ratio(tmp_path: Path, capsys: Capture) -> None:
    on, healthy, fallback = (
        bench(tmp_path, f"{n}.jsonl", s) for n, s in (("on", 155.0), ("off", 100.0), ("back", 150.0))
    )
    stored = tmp_path / "b.json"
    assert lab(capsys, stored, on, "--graphs-off", healthy, "--write")[0] == 0
    assert [p.line for p in verify.load(stored).metrics if p.metric == "graphs_ratio"] == [1.3]
    assert lab(capsys, stored, on, "--graphs-off", healthy)[0] == 0
    code, text = lab(capsys, stored, on, "--graphs-off", fallback)
    assert code == 1
    assert "graphs_ratio tg128: 1.03333 x against 1.55" in text
    refuses(capsys, "on.jsonl", ["graphs_ratio tg128", "--graphs-off FILE"], stored, on)


# Baselines that cry wolf ----------------------------------------------------------------------------------------------


def test_line_inside_the_healthy_range_is_refused(tmp_path: Path, capsys: Capture) -> None:
    """The pin of a peak day: 286.4 less 3 % is 277.8, and healthy days run at 266 to 278."""
    stored = baseline(tmp_path, {**TG, "healthy": [266, 278]})
    said = ["decode_tps tg128", "277.8 tok/s (286.4 - 3 %)", "266 to 278", "at most 274.2"]
    refuses(capsys, "baseline.json", said, stored, bench(tmp_path, "r.jsonl", 269.5))
    good = {**TG, "value": 274.2, "healthy": [266, 278]}
    assert lab(capsys, baseline(tmp_path, good), bench(tmp_path, "r.jsonl", 269.5))[0] == 0


def test_without_the_range_the_same_baseline_flags_a_healthy_run(tmp_path: Path, capsys: Capture) -> None:
    assert lab(capsys, baseline(tmp_path, TG), bench(tmp_path, "r.jsonl", 269.5))[0] == 1


def test_gate_above_a_healthy_model_is_refused(tmp_path: Path, capsys: Capture) -> None:
    stored = baseline(tmp_path, {**GRAPHS, "healthy": [1.2, 2.38]})
    said = ["graphs_ratio tg128", "gate 1.3 x", "1.2 to 2.38"]
    refuses(capsys, "baseline.json", said, stored, bench(tmp_path, "r.jsonl", 100.0))


def test_repeated_runs_are_a_range(tmp_path: Path, capsys: Capture) -> None:
    runs = [bench(tmp_path, f"{i}.jsonl", s) for i, s in enumerate((266.0, 286.4, 287.0))]
    refuses(capsys, "b.json", ["(286.4 - 3 %)", "266 to 287"], tmp_path / "b.json", *runs, "--write")
    assert not (tmp_path / "b.json").exists()
    assert lab(capsys, tmp_path / "b.json", *runs, "--write", "--limit", "decode_tps=8")[0] == 0
    (pin,) = [p for p in verify.load(tmp_path / "b.json").metrics if p.metric == "decode_tps"]
    assert (pin.value, pin.runs, pin.range) == (286.4, (266.0, 286.4, 287.0), (266.0, 287.0))


def test_a_stated_range_is_checked_before_writing(tmp_path: Path, capsys: Capture) -> None:
    words: list[str | Path] = [tmp_path / "b.json", bench(tmp_path, "r.jsonl", 286.4), "--write", "--healthy"]
    refuses(capsys, "b.json", ["266 to 278"], *words, "decode_tps tg128=266:278")
    assert lab(capsys, *words, "decode_tps tg128=278:290")[0] == 0
    refuses(capsys, "--healthy", ['"decode_tps tg12"', '"decode_tps tg128"'], *words, "decode_tps tg12=278:290")


# Units and directions -------------------------------------------------------------------------------------------------


BAD_BASELINE_CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({"better": "lower"}, ["decode_tps", '"lower"', "higher"]),  # the direction swapped
    ({"better": None}, ["better"]),
    ({"unit": ""}, ['unit = ""', "tok/s"]),  # the unit dropped
    ({"unit": "ms"}, ['unit = "ms"', "tok/s"]),
    ({"metric": "decode_tpm"}, ['"decode_tpm"', '"decode_tps"']),
    ({"value": 0}, ["value = 0"]),
    ({"value": True}, ["value = True"]),
    ({"value": "286.4"}, ["value = '286.4'"]),
    ({"limit_pct": 100}, ["limit_pct = 100"]),
    ({"gate": 270}, ["limit_pct", "gate"]),
    ({"healthy": [278]}, ["healthy = [278]"]),
    ({"healthy": [278, 266]}, ["[278, 266]"]),
    ({"runs": 3}, ["runs = 3"]),
    ({"limit": 3}, ['"limit"', '"limit_pct"']),
]


def test_bad_baseline(tmp_path: Path, capsys: Capture) -> None:
    run = bench(tmp_path, "r.jsonl", 286.4)

    @over(numbered(BAD_BASELINE_CASES))
    def each(change: dict[str, Any], said: list[str]) -> None:
        refuses(capsys, "baseline.json", said, baseline(tmp_path, {**TG, **change}), run)

    each()


NO_BASELINE_CASES: list[tuple[str, list[str]]] = [
    ("{", ["lab verify --write"]),
    ("[]", ["`object`"]),
    ('{"schema": 2, "metrics": []}', ['schema = "2"', "1"]),
    ('{"schema": 1, "metrics": []}', ["no metric", "lab verify --write"]),
    ('{"schema": 1, "metrics": [3]}', ["metrics 1 = 3"]),
    ('{"schema": 1, "metrics": [{"value": NaN}]}', ["lab verify --write"]),
    ('{"schema": 1, "metric": [], "metrics": []}', ['"metric"', '"metrics"']),
]


def test_no_baseline(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "b.json"

    @over(numbered(NO_BASELINE_CASES))
    def each(text: str, said: list[str]) -> None:
        path.write_text(text)
        refuses(capsys, "b.json", said, path, CONTROL)

    each()
    refuses(capsys, "absent.json", ["lab verify --write"], tmp_path / "absent.json", CONTROL)
    refuses(capsys, "baseline.json", ["decode_tps tg128", "twice"], baseline(tmp_path, TG, TG), CONTROL)


def test_milliseconds_in_the_baseline(tmp_path: Path, capsys: Capture) -> None:
    """The parser that read 33.95 ms where the line said 15083.10 tok/s."""
    pin = {**TG, "metric": "prefill_tps", "shape": "pp512", "value": 33.95, "limit_pct": 5}
    said = ["prefill_tps pp512", "512 tokens in 33.95 ms are 15081 tok/s", "33.95 and 15083.1"]
    refuses(capsys, "r.jsonl", said, baseline(tmp_path, pin), bench(tmp_path, "r.jsonl", 280.0, 15083.10))


def test_milliseconds_in_the_run(tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "r.csv"
    run.write_text(DS4_OLD)
    stored = tmp_path / "b.json"
    assert lab(capsys, stored, run, "--write")[0] == 0
    ms = 1000 * 128 / 14.0
    run.write_text(DS4_OLD.replace(",14.0,", f",{ms:.1f},"))
    refuses(capsys, "r.csv", ["14 and 9142.9"], stored, run)
    # A file of llama-bench carries its times, so there the figure contradicts itself before anything is compared.
    broken = bench(tmp_path, "x.jsonl", 280.0, samples_ts=[457.1])
    refuses(capsys, "x.jsonl", ["samples_ts 457.1"], baseline(tmp_path, TG), broken)


def test_another_quantity_altogether(tmp_path: Path, capsys: Capture) -> None:
    refuses(capsys, "r.jsonl", ["2.83564", "286.4"], baseline(tmp_path, TG), bench(tmp_path, "r.jsonl", 286.4 / 101))
    assert lab(capsys, baseline(tmp_path, TG), bench(tmp_path, "r.jsonl", 286.4 / 20))[0] == 1  # a regression


def test_a_run_without_its_times_has_no_unit(tmp_path: Path, capsys: Capture) -> None:
    run = bench(tmp_path, "r.jsonl", 286.4, samples_ns=[])
    refuses(capsys, "r.jsonl line 1", ["unit of prefill_tps"], baseline(tmp_path, TG), run)


# What may be compared -------------------------------------------------------------------------------------------------


def test_another_setup_is_refused(tmp_path: Path, capsys: Capture) -> None:
    stored = tmp_path / "b.json"
    assert lab(capsys, stored, bench(tmp_path, "old.jsonl", 100.0), "--write")[0] == 0
    for key, other in (("gpu_info", "Another GPU"), ("model_type", "other 7B")):
        changed: dict[str, Any] = {key: other}
        refuses(capsys, "new.jsonl", [key, other], stored, bench(tmp_path, "new.jsonl", 100.0, **changed))


def test_runs_of_two_setups_are_no_runs_of_one(tmp_path: Path, capsys: Capture) -> None:
    runs = [bench(tmp_path, f"{i}.jsonl", 286.0) for i in range(2)]
    runs[1].write_text(runs[1].read_text().replace("Example GPU", "Another GPU"))
    said = ["gpu_info", "Another GPU 24GB", "Example GPU 24GB"]
    refuses(capsys, "1.jsonl", said, baseline(tmp_path, TG), *runs)
    prefill = tmp_path / "prefill.jsonl"
    prefill.write_text(runs[0].read_text().splitlines()[0] + "\n")
    refuses(capsys, "--graphs-off", ["decode"], baseline(tmp_path, GRAPHS), runs[0], "--graphs-off", prefill)


def test_two_configurations_in_one_run(tmp_path: Path, capsys: Capture) -> None:
    plain, flash = (bench(tmp_path, f"{n}.jsonl", 100.0, flash_attn=n) for n in (0, 1))
    both = tmp_path / "both.jsonl"
    both.write_text(plain.read_text() + flash.read_text())
    refuses(capsys, "both.jsonl", ["prefill_tps pp512", "flash_attn"], tmp_path / "b.json", both, "--write")


def test_missing_metric_is_no_pass(tmp_path: Path, capsys: Capture) -> None:
    said = ["no decode_tps tg256", "prefill_tps pp512, decode_tps tg128"]
    refuses(capsys, CONTROL.name, said, baseline(tmp_path, {**TG, "shape": "tg256"}), CONTROL)


def test_ds4_reads_the_steady_rate_and_does_not_mix(tmp_path: Path, capsys: Capture) -> None:
    old, steady, stored = tmp_path / "old.csv", tmp_path / "steady.csv", tmp_path / "b.json"
    old.write_text(DS4_OLD)
    steady.write_text(DS4_STEADY)
    assert lab(capsys, stored, steady, "--write")[0] == 0
    code, text = lab(capsys, stored, steady)
    assert (code, "generation read from gen_tps_ss" in text) == (0, True)
    refuses(capsys, "old.csv", ["rate=steady"], stored, old)
    refuses(capsys, CONTROL.name, ["llama-bench", "ds4-bench"], stored, CONTROL)
    refuses(capsys, CONTROL.name, ["llama-bench", "ds4-bench"], stored, steady, CONTROL)


# Writing --------------------------------------------------------------------------------------------------------------


def test_provenance(tmp_path: Path, capsys: Capture) -> None:
    assert lab(capsys, tmp_path / "b.json", CONTROL, "--write")[0] == 0
    raw = json.loads((tmp_path / "b.json").read_text())
    assert raw["made"]["gpu_info"] == "Example GPU 24GB"
    assert raw["provenance"]["files"][0]["file"] == CONTROL.name
    assert len(raw["provenance"]["files"][0]["sha256"]) == 64
    assert raw["provenance"]["measured"][0].startswith("2026-11-20")
    assert raw["provenance"]["written"] > "2026"
    assert str(SAMPLES) not in (tmp_path / "b.json").read_text()  # where somebody keeps files says nothing


def test_written_as_a_whole_or_not_at_all(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = tmp_path / "b.json"
    assert lab(capsys, stored, CONTROL, "--write")[0] == 0
    before = stored.read_bytes()

    def fails(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    refuses(capsys, "b.json", ["No space left on device"], stored, CANDIDATE, "--write")
    assert stored.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["b.json"]


def test_a_metric_without_a_limit_is_not_pinned(tmp_path: Path, capsys: Capture) -> None:
    ops = SAMPLES / "backend_ops_control.txt"
    refuses(capsys, "--limit", ["kernel_us", "--limit kernel_us=PERCENT"], tmp_path / "b.json", ops, "--write")
    assert lab(capsys, tmp_path / "b.json", ops, "--write", "--limit", "kernel_us=5")[0] == 0
    assert {p.better for p in verify.load(tmp_path / "b.json").metrics} == {"lower"}


def test_bad_flags(tmp_path: Path, capsys: Capture) -> None:
    for flag, word in (
        ("--limit", "decode_tps"),
        ("--limit", "=3"),
        ("--healthy", "tg128=266"),
        ("--healthy", "x=a:b"),
    ):
        refuses(capsys, f"{flag} {word}", ["NAME=NUMBER"], tmp_path / "b.json", CONTROL, "--write", flag, word)
    refuses(capsys, "lab verify", ["--write"], baseline(tmp_path, TG), CONTROL, "--limit", "decode_tps=3")


def test_milliseconds_rule_leaves_a_real_change_alone() -> None:
    """A figure that is near the baseline in its own unit is in that unit, whatever it would be in milliseconds."""
    # 128 tokens in 357.8 ms: the same
    pin = verify.Pin(metric="decode_tps", shape="tg128", unit="tok/s", better="higher", value=357.8, limit_pct=3)
    verify.plausible(pin, verify.Figures("tok/s", (350.0,), 128), "run")
    with refused("run", "decode_tps tg128", "ms", remedy="tok/s"):
        verify.plausible(pin, verify.Figures("ms", (350.0,), 128), "run")
