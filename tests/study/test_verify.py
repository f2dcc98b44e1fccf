"""`lab verify`: pass, regression and bad input; wrong units, setups that differ, atomic writing."""

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
TG = {"metric": "decode_tps", "shape": "tg128", "unit": "tok/s", "value": 286.4, "limit_pct": 3}
MS = {"metric": "kernel_us", "shape": "op", "unit": "us", "value": 100, "limit_pct": 10}
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


# Units and directions -------------------------------------------------------------------------------------------------


BAD_BASELINE_CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({"unit": ""}, ['unit = ""', "tok/s"]),  # the unit dropped
    ({"unit": "ms"}, ['unit = "ms"', "tok/s"]),
    ({"metric": "decode_tpm"}, ['"decode_tpm"', '"decode_tps"']),
    ({"value": 0}, ["value = 0"]),
    ({"value": True}, ["value = True"]),
    ({"value": "286.4"}, ["value = '286.4'"]),
    ({"limit_pct": 100}, ["limit_pct = 100"]),
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
    ('{"schema": 1, "metric": []}', ['"metrics"']),
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


def test_what_a_baseline_says_of_its_runs(tmp_path: Path, capsys: Capture) -> None:
    assert lab(capsys, tmp_path / "b.json", CONTROL, "--write")[0] == 0
    raw = json.loads((tmp_path / "b.json").read_text())
    assert raw["made"]["gpu_info"] == "Example GPU 24GB"
    assert str(SAMPLES) not in (tmp_path / "b.json").read_text()  # where somebody keeps files says nothing


def test_several_runs_are_pinned_by_their_median(tmp_path: Path, capsys: Capture) -> None:
    runs = [bench(tmp_path, f"{i}.jsonl", s) for i, s in enumerate((266.0, 286.4, 287.0))]
    assert lab(capsys, tmp_path / "b.json", *runs, "--write", "--limit", "decode_tps=8")[0] == 0
    (pin,) = [p for p in verify.load(tmp_path / "b.json").metrics if p.metric == "decode_tps"]
    assert (pin.value, pin.limit_pct) == (286.4, 8.0)


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
    assert not any(p.falls for p in verify.load(tmp_path / "b.json").metrics)


def test_bad_flags(tmp_path: Path, capsys: Capture) -> None:
    for word in ("decode_tps", "decode_tps=x"):
        refuses(capsys, f"--limit {word}", ["METRIC=PCT"], tmp_path / "b.json", CONTROL, "--write", "--limit", word)
    refuses(capsys, "lab verify", ["--write"], baseline(tmp_path, TG), CONTROL, "--limit", "decode_tps=3")


def test_milliseconds_rule_leaves_a_real_change_alone() -> None:
    """A figure that is near the baseline in its own unit is in that unit, whatever it would be in milliseconds."""
    # 128 tokens in 357.8 ms: the same
    pin = verify.Pin(metric="decode_tps", shape="tg128", unit="tok/s", value=357.8, limit_pct=3)
    verify.plausible(pin, verify.Figure("tok/s", 350.0, 128), "run")
    with refused("run", "decode_tps tg128", "ms", remedy="tok/s"):
        verify.plausible(pin, verify.Figure("ms", 350.0, 128), "run")
