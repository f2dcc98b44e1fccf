"""The decode staircase: its levels as the sources print them, its arithmetic, what it refuses, and what it draws."""

import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from msgspec.structs import replace

from lab import draw
from lab.card import phases, recorded
from lab.draw import staircase as drawn
from lab.judge import verdicts
from lab.row import store
from lab.study import staircase
from tests.loops import over
from tests.refused import refused

# Written down here, independently of data/: tok/s before and after each step, and of the peer.
LEVELS = {
    "dense": (391.0, [(146.23, 180.53), (186.25, 256.57), (254.92, 335.80)]),
    "moe": (811.0, [(313.36, 372.62), (409.30, 553.63), (560.66, 691.24)]),
}
SHARES = {"dense": [(37.4, 46.2), (47.6, 65.6), (65.2, 85.9)], "moe": [(38.6, 45.9), (50.5, 68.3), (69.1, 85.2)]}


def test_levels_and_shares() -> None:
    @over({name: (name,) for name in LEVELS})
    def each(name: str) -> None:
        stairs = staircase.staircase(name)
        peer, levels = LEVELS[name]
        assert (stairs.peer_tps, stairs.npl, [s.patch for s in stairs.steps]) == (peer, 128, ["0018", "0019", "0020"])
        assert [(s.before, s.after) for s in stairs.steps] == levels
        shares = [(stairs.share_pct(s.before), stairs.share_pct(s.after)) for s in stairs.steps]
        assert [(round(a, 1), round(b, 1)) for a, b in shares] == SHARES[name]

    each()


def test_shares_are_those_that_the_source_prints() -> None:
    compared = 0
    for stairs in staircase.staircases().values():
        for step in stairs.steps:
            for stated, tps in zip(step.stated or (), (step.before, step.after), strict=bool(step.stated)):
                digits = 0 if float(stated.value).is_integer() else 1
                assert round(stairs.share_pct(tps), digits) == stated.value, stated.id
                compared += 1
    assert compared == 6


def test_total_is_the_steps_and_what_lies_between() -> None:
    dense, moe = staircase.staircase("dense"), staircase.staircase("moe")
    assert (dense.total, moe.total) == pytest.approx((335.80 / 146.23, 691.24 / 313.36))
    assert dense.explained == pytest.approx(180.53 / 146.23 * 256.57 / 186.25 * 335.80 / 254.92)
    assert dense.between_pct == pytest.approx((100 * (186.25 / 180.53 - 1), 100 * (254.92 / 256.57 - 1)))
    assert moe.between_pct[0] == pytest.approx(9.84, abs=0.01)
    for stairs in (dense, moe):
        left = (1 + stairs.between_pct[0] / 100) * (1 + stairs.between_pct[1] / 100)
        assert stairs.total == pytest.approx(stairs.explained * left)


def test_every_step_has_its_card_and_the_cards_figures() -> None:
    """A level is what the verdict of that patch stands on, not another figure of the same value."""
    for name, workload in (("dense", "dense-npl128"), ("moe", "moe-npl128")):
        for step in staircase.staircase(name).steps:
            (case,) = phases.card(step.card).recorded
            assert set(case.evidence["decode_tps", workload].ids) == {step.control, step.candidate}


def test_rows() -> None:
    rows = staircase.staircase("moe").rows()
    assert [row["card"] for row in rows] == ["lp9", "lp10", "lp11"]
    assert rows[0]["control above the step before %"] is None
    assert rows[2]["gain %"] == pytest.approx(23.29, abs=0.005)
    assert all("\n" not in row["mechanism"] for row in rows)


# Measured -------------------------------------------------------------------------------------------------------------


def test_a_measured_step_is_two_arms_of_the_judged_run() -> None:
    """Against the rows as the store gives them, and the change that the judge reads."""
    dense = staircase.measured()[0]
    run = {row.run for row in store.rows("h200", "step-staircase") if row.workload_id == dense.steps[0].workload}
    for step in dense.steps[:4]:
        rows = [r for r in store.rows("h200", step.card) if r.run == max(run) and r.workload_id == step.workload]
        times = {r.name: r.time_us for r in rows}
        assert step.times_us("h200") == (times[step.control], times[step.candidate])
    assert [(a.candidate, b.control) for a, b in pairwise(dense.steps[:4])] == [
        (s, s) for s in ("stock_in_place", "stock_by_id", "stock_2d")
    ]
    whole = math.prod(dense.gain(step.patch) or math.nan for step in dense.steps[:4])
    (judged,) = verdicts.judge_measured(phases.card("step-staircase"), "h200").verdict.reason.split("kernel_us ")[1:2]
    assert 100 * (1 / whole - 1) == pytest.approx(float(judged.split(" %")[0]), abs=0.1)


def test_our_steps_stand_beside_the_recorded_ones() -> None:
    lines = staircase.beside()
    assert [line["step"].split(",")[0] for line in lines[:3]] == ["patch 0018", "patch 0019", "patch 0020"]
    for name, patch in (("dense", 2), ("moe", 0)):
        step = staircase.staircase(name).steps[patch]
        assert lines[patch][f"GB10 {name} %"] == pytest.approx(100 * (step.after / step.before - 1))
    mixture = staircase.measured()[2]
    before, after = mixture.steps[0].times_us("h200")
    assert lines[0]["H200 moe-npl128 %"] == pytest.approx(100 * (before / after - 1))
    assert lines[3]["GB10 dense %"] is lines[3]["H200 moe-npl128 %"] is None


def test_what_is_no_arm_of_a_card_is_refused(tmp_path: Path) -> None:
    @over(
        {
            "card": ('card = "step-lp7"', 'card = "step-lp77"', ("step-lp77",)),
            "arm": ('candidate = "stock_2d"', 'candidate = "stock_3d"', ("arm of step-staircase", "stock_3d")),
            "workload": ("_l4_npl128_", "_l3_npl128_", ("workload of step-staircase", "_l3_npl128_")),
        }
    )
    def each(old: str, new: str, held: tuple[str, ...]) -> None:
        assert old in TEXT
        path = tmp_path / new.replace('"', "") / "staircase.toml"
        path.parent.mkdir()
        path.write_text(TEXT.replace(old, new, 1))
        with refused("staircase.toml", *held):
            staircase.measured(path)

    each()


def test_an_arm_without_rows_says_what_to_measure() -> None:
    with refused("profiles/gb10/step-staircase", "stock", remedy="lab measure step-staircase"):
        staircase.measured()[0].steps[0].times_us("gb10")


# Refused --------------------------------------------------------------------------------------------------------------

TEXT = staircase.FILE.read_text()
DENSE = "lp.patch-0018.gb10.decode-agg.{}.npl128.npp128"
CONTROL = DENSE.format("control")
MISTAKES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "key": ("npl = 128", "npls = 128", ("npls",)),
    "missing key": ('title = "Qwen3.6-27B NVFP4, dense"\n', "", ("title", "missing")),
    "card": ('card = "lp9"', 'card = "lp99"', ("lp99",)),
    "figure": (CONTROL, DENSE.format("contrl"), (DENSE.format("contrl"),)),
    "arm": (CONTROL, DENSE.format("candidate"), (DENSE.format("candidate"), "arm")),
    "load": (CONTROL, (load := "lp.patch-0018.gb10.decode-agg.control.npl32.npp128"), (load, "npl 32")),
    "model": (CONTROL, CONTROL + "--2", ("dense", "models")),
    "unit": (CONTROL, (share := "lp.patch-0018.gb10.share.control.bucketd2d-memcpy"), (share, "18.9 %")),
    "peer": ("decode-agg.peer-vllm.npl128--2", "decode-agg.candidate.m128.boundlo", ("candidate arm",)),
    "withdrawn": (CONTROL, (gone := "lp.batch8-anomaly.gb10.decode-step.control.npl8"), (gone, "withdrawn")),
    "one share": (', "lp.patch-0018.gb10.decode-share-of-vllm.candidate.npl128"', "", ("share = ['lp.patch",)),
}


def test_refused(tmp_path: Path) -> None:
    @over(MISTAKES)
    def each(old: str, new: str, held: tuple[str, ...]) -> None:
        assert old in TEXT
        path = tmp_path / "staircase.toml"
        path.write_text(TEXT.replace(old, new, 1))
        with refused("staircase.toml", *held):
            staircase.load(path)

    each()


def test_unknown_names_the_nearest() -> None:
    with refused("staircase.toml", "dens", remedy='"dense"'):
        staircase.staircase("dens")


# The picture ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both() -> Figure:
    return staircase.picture(list(staircase.staircases().values()))


def test_picture_says_each_level_its_share_and_the_mechanism(both: Figure) -> None:
    text = re.findall(r"<text[^>]*>(.*?)</text>", draw.svg(both), re.S)
    for name, (peer, levels) in LEVELS.items():
        assert f"vLLM {peer:g} tok/s, 100 %" in text
        for (before, after), (low, high) in zip(levels, SHARES[name], strict=True):
            assert {f"{before:.2f}, {low:.1f} %", f"{after:.2f}, {high:.1f} %"} <= set(text)
            assert f"+{100 * (after / before - 1):.1f} %" in text
    for step in staircase.staircase("dense").steps:
        for line in (f"patch {step.patch}", *step.mechanism.splitlines()):
            assert text.count(line) == 2, line  # under the step, in both panels


def lines(axes: object, style: str) -> list[tuple[list[float], list[float]]]:
    drawn = [line for line in axes.get_lines() if line.get_linestyle() == style]  # type: ignore[attr-defined]
    return [(list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for line in drawn]


def test_picture_draws_the_levels_to_scale(both: Figure) -> None:
    axes = both.axes[1]
    assert [ys for _, ys in lines(axes, "-")] == [[a, a, b, b] for a, b in LEVELS["moe"][1]]
    assert [ys for _, ys in lines(axes, ":")] == [[372.62, 409.30], [553.63, 560.66]]
    assert lines(axes, "--")[0][1] == [811.0, 811.0]
    assert axes.get_ylim()[0] == 0, "heights compare only from zero"


def test_altered_figure_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture reads the record: no level is typed into the module."""
    figures = dict(recorded.figures())
    altered = DENSE.format("candidate")
    figures[altered] = replace(figures[altered], value=170.0)
    monkeypatch.setattr(recorded, "figures", lambda: figures)
    shown: list[drawn.Stairs] = []
    monkeypatch.setattr(drawn, "staircase", shown.extend)
    staircase.picture([s for s in staircase.load(staircase.FILE) if s.name == "dense"])
    assert shown[0].steps[0][1:] == (146.23, 170.0)
