"""What measuring a card would cost and show."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lab.base import interval
from lab.bench import measure
from lab.card import phases
from lab.card.gate import Condition
from lab.cli import main
from lab.row import store
from lab.row.records import Measurement
from lab.study import plan
from tests import own_card
from tests.judge.test_placements import SPREAD, STILL, placed
from tests.refused import refused
from tests.row.made import measurement

CARD = phases.card("p5-cuda")


def test_what_a_card_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "rows", lambda **given: [])
    found = plan.plan(CARD)
    assert (found.comparisons, found.placements) == (len(CARD.workloads), interval.PLACEMENTS)
    assert found.sets == 2 + 1 + len(CARD.beside)
    assert found.processes == 2 * (found.sets - 1)
    each = 8 * found.sets * 0.35 + found.processes * 4.0 + 2.0
    assert found.seconds == pytest.approx(found.comparisons * each)
    assert plan.plan(CARD, 16).seconds > found.seconds


def test_what_a_comparison_took_before_is_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest on this device; of a workload that no row has, another card's by arm, else the mean of the others."""
    first, second, third = CARD.workloads

    def took(workload: str, seconds: float, device: str, started: str, placements: int = 8) -> Measurement:
        more: dict[str, Any] = {"workload_id": workload, "took_s": seconds, "started": started}
        return measurement(phase=CARD.id, device=device, placements=placements, **more)

    rows = [
        took(first, 50.0, "h200", "2026-01-02"), took(first, 40.0, "h200", "2026-01-01"),
        took(first, 20.0, "h100", "2026-01-03"), took(second, 30.0, "h100", "2026-01-01"),
        took(third, 900.0, "h200", "2026-01-01", placements=64),
    ]  # fmt: skip
    monkeypatch.setattr(store, "rows", lambda **given: rows)
    items = measure.plan(CARD)
    assert plan.seconds_of(CARD, items, 8, "h200") == {first: 50.0, second: 30.0, third: 40.0}
    assert plan.seconds_of(CARD, items, 8, "h100") == {first: 20.0, second: 30.0, third: 25.0}
    assert plan.plan(CARD).seconds == 120.0
    arms = next(len(item.arms) for item in items if item.workload.id == third)
    more: dict[str, Any] = {"workload_id": third, "took_s": 12.0, "started": "2026-01-01", "run": "one"}
    rows += [measurement(phase="another", device="h200", placements=8, name=name, **more) for name in "abc"]
    assert plan.seconds_of(CARD, items, 8, "h200") == {first: 50.0, second: 30.0, third: 4.0 * arms}


def test_a_line_is_decided_beyond_what_the_interval_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "spread", lambda family: (2.0, 3))
    found = plan.plan(CARD)
    # Student's t with 7 degrees: 2.517 for 96 % and, for nine in ten, 1.415.
    reach = (2.517 + 1.415) * math.log(1.02) / math.sqrt(8)
    assert found.effect_pct == pytest.approx(100 * math.expm1(reach), rel=1e-3)
    (line,) = {one.go_from for one in found.lines}
    assert line == pytest.approx(100 * (0.9 * math.exp(-reach) - 1), rel=1e-3)
    finer = plan.plan(CARD, 32)
    assert finer.effect_pct < found.effect_pct / 2
    assert "-10 %" in plan.render(found)
    assert "3 comparisons" in plan.render(found)


def seen(condition: Condition) -> float | None:
    steps = [interval.quantile(level, 7) for level in (0.96, 0.8)]
    found = plan._seen(condition, 0.001, steps, math.log(1.02))
    return found.go_from if found else None


def test_lines_of_every_kind() -> None:
    reach = sum(interval.quantile(level, 7) for level in (0.96, 0.8)) * 0.001
    for op, line, go_from in (("<", -10, 0.9 * math.exp(-reach)), (">=", 10, 1.1 * math.exp(reach))):
        assert seen(Condition("kernel_us", op, "%", line, "change")) == pytest.approx(100 * go_from - 100)  # type: ignore[arg-type]
    zero = seen(Condition("kernel_us", "<", "%", 0, "change"))
    beyond_floor = math.log(1.02) + interval.quantile(0.8, 7) * 0.001
    assert zero == pytest.approx(100 * math.expm1(-beyond_floor))
    assert seen(Condition("kernel_us", "<=", "%", 3, "change")) == pytest.approx(103 * math.exp(-reach) - 100)
    assert seen(Condition("kernel_us", "<=", "us", 16)) == pytest.approx(16 * math.exp(-reach))
    assert seen(Condition("roofline_fraction", ">=", "ratio", 0.8)) == pytest.approx(0.8 * math.exp(reach))
    assert seen(Condition("relative_error", "<=", "ratio", 0.01)) is None
    assert seen(Condition("kernel_us", "<=", "us", than="sequence_us")) is None


def test_the_spread_is_what_the_familys_rows_have(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan.spread("no such family") == (plan.ASSUMED_PCT, 0)
    pair = [placed("control", 1000.0, STILL), placed("candidate", 900.0)]
    monkeypatch.setattr(store, "measured_devices", lambda card: ["h200"] if card == CARD.id else [])
    monkeypatch.setattr(store, "rows", lambda **given: pair)
    found, compared = plan.spread(CARD.family)
    mean = sum(SPREAD) / 8
    assert compared == 1
    assert found == pytest.approx(100 * math.sqrt(sum((x - mean) ** 2 for x in SPREAD) / 7), rel=1e-3)
    monkeypatch.setattr(store, "rows", lambda **given: [placed(r.arm, 1000.0, STILL[:4]) for r in pair])
    assert plan.spread(CARD.family) == (plan.ASSUMED_PCT, 0)


def test_lab_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", CARD.id, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["card"], len(found["lines"])) == (CARD.id, 3)
    with refused("--placements", "1", remedy="8"):
        plan.plan(CARD, 1)
    assert main.main(["plan", "lp1"]) == 2
    assert "lab judge" in capsys.readouterr().err


def test_what_a_sweep_costs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a card on a device without rows; on one with rows what `lab measure --missing` would measure."""
    assert main.main(["plan", CARD.id, "--missing", "--device", "gh200", "--json"]) == 0
    (whole,) = json.loads(capsys.readouterr().out)
    assert (whole["card"], whole["device"], whole["of"]) == (CARD.id, "gh200", len(CARD.workloads))
    assert sorted(whole["workloads"]) == sorted(CARD.workloads)
    assert whole["seconds"] == pytest.approx(plan.plan(CARD).seconds)
    monkeypatch.setattr(measure, "missing", lambda items, device, settings: items[:1] if device == "h200" else [])
    assert main.main(["plan", CARD.id, "lp9-kernel", "--missing"]) == 0
    out = capsys.readouterr().out
    assert f"1 of {len(CARD.workloads)}" in out
    assert "2 comparisons, about 0." in out
    assert max(map(len, out.splitlines())) <= 100
    assert main.main(["plan", CARD.id, "--missing", "--device", "gh200"]) == 0
    assert capsys.readouterr().out == "nothing is missing\n"
    both = {name: phases.card(name) for name in (CARD.id, "lp1")}
    monkeypatch.setattr(phases, "cards", lambda: both)
    assert main.main(["plan", "--all"]) == 0  # lp1 can only be replayed
    assert f"{len(CARD.workloads)} of {len(CARD.workloads)}" in capsys.readouterr().out
    for words in ([], [CARD.id, "--all"], ["lp1", "--missing"], [CARD.id, "--device", "gh200"]):
        assert main.main(["plan", *words]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


UNABLE = own_card.text("nvfp4", "triton_gemm", "cuda_gemm", "M=512 N=17408 K=5120", 'device = "h200"\n')


@pytest.mark.slow
def test_what_cannot_run_there_has_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An arm for another architecture, one that refuses the workload, and operands that the memory does not hold."""
    path, shape = tmp_path / "mine.toml", "M=512 N=17408 K=5120"
    path.write_text(UNABLE)
    assert main.main(["plan", str(path)]) == 0
    capsys.readouterr()
    for old, new, words in (
        ('"h200"', '"rtx-5090"', ("candidate cuda_gemm cannot run", "rtx-5090", "is for sm_90a alone")),
        (shape, "M=8 N=17408 K=5120", ("candidate cuda_gemm cannot run M=8", "h200", "M=8 < 9")),
        (shape, "M=16 N=1048576 K=1048576", ("M=16 N=1048576 K=1048576 on h200 moves 619 GB", "its memory has 141 GB")),
        ('"h200"', '"mi300x"', ("mi300x is no CUDA GPU",)),
    ):
        path.write_text(UNABLE.replace(old, new))
        assert main.main(["plan", str(path)]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert [word for word in words if word not in said] == [], said
    path.write_text(UNABLE)
    assert main.main(["plan", str(path), "--missing", "--device", "rtx-5090"]) == 2
    assert "cannot run" in capsys.readouterr().err
    monkeypatch.setattr(phases, "cards", lambda: {"mine": phases.load(path), CARD.id: CARD})
    assert main.main(["plan", "--all", "--device", "gh200"]) == 0
    assert main.main(["plan", "--all", "--device", "rtx-5090"]) == 0
    assert capsys.readouterr().out.endswith("nothing is missing\n")
