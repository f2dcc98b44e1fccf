"""Breakdowns and their differences: identities, attribution of the gap, what is refused, and the recorded claims."""

import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.base.errors import BadInput
from lab.cli import main
from lab.study import attributions
from lab.trace import breakdowns, diff
from lab.trace.breakdowns import IDLE, OVERLAP, Breakdown, Part, digit_error
from lab.trace.model import OPAQUE, Copies, Fills, GraphLaunches, Kernels, Trace
from tests.loops import numbered, over
from tests.refused import held, refused
from tests.trace.nsys_synthetic import Export

ATTENTION, PRODUCT, UNKNOWN, WAIT = "splitkv_kernel", "nvjet_tst_64x64", "add_one(int)", "at::cuda::spin_kernel(long)"
NAMES = (ATTENTION, PRODUCT, UNKNOWN, WAIT)


def kernels(*rows: tuple[int, int, int, int]) -> Kernels:
    """Rows (start us, end us, index into NAMES, stream) on device 0."""
    start, end, name, stream = zip(*rows, strict=True)
    ns = [[t * 1000 for t in times] for times in (start, end)]
    n = len(rows)
    return Kernels.of(start_ns=ns[0], end_ns=ns[1], name=name, stream=stream, device=[0] * n, process=[0] * n)


def trace(*rows: tuple[int, int, int, int], **changes: Any) -> Trace:
    plain = Trace(tool="test", source="made up", graph_mode="none", names=NAMES, gpus={0: "x"}, kernels=kernels(*rows))
    return replace(plain, **changes)


def copies(start: int, end: int, kind: int = 8) -> Copies:
    return Copies.of(start_ns=[start * 1000], end_ns=[end * 1000], device=[0], stream=[9], bytes=[1], kind=[kind])


# A trace as a breakdown ----------------------------------------------------------------------------------------------


def test_parts_idle_and_overlap_sum_to_the_span() -> None:
    b = breakdowns.from_trace(trace((0, 10, 0, 1), (5, 20, 1, 2), (30, 40, 0, 1), memcpy=copies(18, 25)))
    parts = {p.category: p.value for p in b.parts}
    assert parts == {"attention": 20.0, "dense_gemm": 15.0, "memcpy DtoD": 7.0, IDLE: 5.0, OVERLAP: -7.0}
    assert b.whole == 40.0
    assert b.not_attributed == pytest.approx(0.0)


def test_copies_are_no_compute() -> None:
    """The trap of the recorded 99.4 %: a device kept busy by copies computes nothing."""
    b = breakdowns.from_trace(
        trace((0, 80, 0, 1), memcpy=copies(80, 99), memset=Fills.of(start_ns=[99_000], end_ns=[100_000], device=[0]))
    )
    parts = {p.category: p.value for p in b.parts}
    assert parts["attention"] == 80.0
    assert (parts["memcpy DtoD"], parts["memset"], parts[IDLE]) == (19.0, 1.0, 0.0)


def test_waiting_kernels_are_idle_time() -> None:
    b = breakdowns.from_trace(trace((0, 10, 0, 1), (10, 50, 3, 1), (50, 60, 0, 1)))
    assert {p.category: p.value for p in b.parts} == {"attention": 20.0, IDLE: 40.0, OVERLAP: 0.0}
    assert [(p.category, p.value) for p in b.nested] == [("spin_wait", 40.0)]


def test_other_is_shown_and_warned_about() -> None:
    b = breakdowns.from_trace(trace((0, 10, 0, 1), (10, 20, 2, 1)))
    assert {p.category: p.value for p in b.parts}["other"] == 10.0
    assert any('"other" is 50.0%' in w and "add_one" in w for w in b.warnings)
    assert not breakdowns.from_trace(trace((0, 96, 0, 1), (96, 100, 2, 1))).warnings


def test_per_step() -> None:
    b = breakdowns.from_trace(trace((0, 10, 0, 1)), count=4, per="step")
    assert (b.unit, b.whole, b.kernels[ATTENTION]) == ("us/step", 2.5, 2.5)
    with refused("--steps/--tokens", "0"):
        breakdowns.from_trace(trace((0, 10, 0, 1)), count=0)


def test_opaque_graphs_are_a_category_and_hide_the_kernels() -> None:
    graphs = GraphLaunches.of(start_ns=[10_000], end_ns=[90_000], device=[0], stream=[1])
    b = breakdowns.from_trace(trace((0, 10, 0, 1), graphs=graphs))
    assert {p.category: p.value for p in b.parts}[OPAQUE] == 80.0
    assert b.kernels == {}
    assert any("opaque" in w for w in b.warnings)


def test_totals_only_have_no_idle_time() -> None:
    rows = Kernels.of(start_ns=[0, 0], end_ns=[30_000, 10_000], name=[0, 1], instances=[3, 1])
    b = breakdowns.from_trace(Trace(tool="t", source="s", names=NAMES, kernels=rows, timeline=False))
    assert {p.category: (p.value, p.count) for p in b.parts} == {"attention": (30.0, 3.0), "dense_gemm": (10.0, 1.0)}
    assert "no timeline" in b.denominator


INTERVAL = st.tuples(st.integers(0, 60), st.integers(0, 30), st.integers(0, 3), st.integers(0, 2))


@settings(max_examples=40)
@given(st.lists(INTERVAL, min_size=1, max_size=12))
def test_identity_holds_for_any_trace(rows: list[tuple[int, int, int, int]]) -> None:
    b = breakdowns.from_trace(trace(*((s, s + d, n, q) for s, d, n, q in rows)))
    assert b.not_attributed == pytest.approx(0.0, abs=1e-9)
    assert {p.category: p.value for p in b.parts}[IDLE] >= 0


# Differences ---------------------------------------------------------------------------------------------------------


def made(id_: str, total: float | None, unit: str = "us/step", /, **parts: float) -> Breakdown:
    return Breakdown(id_, id_, unit, tuple(Part(k, v) for k, v in parts.items()), total, "made up")


def test_gap_is_attributed_and_the_rest_is_named() -> None:
    d = diff.difference(made("a", 100.0, x=60.0, y=30.0), made("b", 70.0, x=40.0, z=25.0))
    assert (d.gap, d.explained, d.rest) == (30.0, 25.0, 5.0)
    assert [(line.name, line.delta) for line in d.lines] == [("y", 30.0), ("z", -25.0), ("x", 20.0)]
    assert sum(line.share or 0 for line in d.lines) + d.rest / d.gap == pytest.approx(1.0)
    assert "5 is not attributed" in diff.render(d)


@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3)), min_size=1, max_size=8),
    st.floats(0, 50),
    st.floats(0, 50),
)
def test_deltas_and_rest_are_the_gap(pairs: list[tuple[float, float]], rest_a: float, rest_b: float) -> None:
    a = made("a", sum(p for p, _ in pairs) + rest_a, "us", **{f"c{i}": p for i, (p, _) in enumerate(pairs)})
    b = made("b", sum(q for _, q in pairs) + rest_b, "us", **{f"c{i}": q for i, (_, q) in enumerate(pairs)})
    d = diff.difference(a, b)
    rounding = 2e-5  # a rest below a part in 1e9 is none
    assert sum(line.delta for line in d.lines) + d.rest == pytest.approx(d.gap, abs=rounding)
    assert d.rest == pytest.approx(rest_a - rest_b, abs=rounding)
    back = diff.difference(b, a)
    assert back.gap == pytest.approx(-d.gap)


def test_no_gap_gives_no_shares() -> None:
    d = diff.difference(made("a", 10.0, x=6.0, y=4.0), made("b", 10.0, x=4.0, y=6.0))
    assert [line.share for line in d.lines] == [None, None]
    assert "100.0 %" not in diff.render(d)


def test_printed_digits_bound_a_share() -> None:
    a = replace(made("a", 510.0), parts=(Part("x", 236.0, 0.5),), total_error=0.5)
    b = replace(made("b", 326.0), parts=(Part("x", 117.0, 0.5),), total_error=0.5)
    line = diff.difference(a, b).lines[0]
    assert line.share == pytest.approx(119 / 184)
    assert line.share_low == pytest.approx(118 / 185)
    assert line.share_high == pytest.approx(120 / 183)


def test_units_must_agree_and_shares_are_refused() -> None:
    with refused("lab diff", "us/step", "us/token", remedy="--per"):
        diff.difference(made("a", 1.0, x=1.0), made("b", 1.0, "us/token", x=1.0))
    with refused("a", "total", remedy="--total"):
        diff.difference(made("a", 100.0, "%", x=1.0), made("b", 100.0, "%", x=1.0))
    with refused("a2_trace_graph_COLLAPSED", "graph-collapsed"):
        diff.difference(breakdowns.from_recorded("a2_trace_graph_COLLAPSED"), made("b", 1.0, x=1.0))


def test_shares_become_time_with_a_total() -> None:
    shares = breakdowns.from_recorded("ssmfix_gather_step1")
    b = diff.in_time(shares, 700_000.0, "us/step")
    assert b.by_category()["get_rows"].value == pytest.approx(0.188 * 700_000)
    with refused("ssmfix_gather_step1", "us/step", "1", remedy="%"):
        diff.in_time(b, 1.0, "us")


def test_kernels_are_compared_by_full_name_and_lone_ones_are_listed() -> None:
    a = breakdowns.from_trace(trace((0, 10, 0, 1), (10, 14, 1, 1)), count=2, per="step")
    b = breakdowns.from_trace(trace((0, 6, 0, 1), (6, 9, 2, 1)), count=2, per="step")
    d = diff.difference(a, b)
    assert [(k.name, k.delta) for k in d.kernels] == [(ATTENTION, 2.0)]
    assert (d.only_a, d.only_b) == (((PRODUCT, 2.0),), ((UNKNOWN, 1.5),))


def test_opaque_side_is_not_compared_by_kernel() -> None:
    graphs = GraphLaunches.of(start_ns=[10_000], end_ns=[90_000], device=[0], stream=[1])
    a = breakdowns.from_trace(trace((0, 10, 0, 1), graphs=graphs), count=1, per="step")
    d = diff.difference(a, breakdowns.from_trace(trace((0, 60, 0, 1)), count=1, per="step"))
    assert d.kernels == d.only_a == d.only_b == ()
    assert any("has opaque graphs" in w for w in d.warnings)


def test_unequal_captures_are_warned_about() -> None:
    d = diff.difference(breakdowns.from_trace(trace((0, 10, 0, 1))), breakdowns.from_trace(trace((0, 20, 0, 1))))
    assert any("no steps or tokens were given" in w for w in d.warnings)


def test_recorded_against_measured_uses_our_names() -> None:
    recorded = breakdowns.from_recorded("explore_postssm_vllm_dense_npl128", "ms/step")
    table = replace(recorded, parts=(Part("fp4_gemv", 1.0),), total=1.0)
    measured = made("m", 2.0, "ms/step", quantised_gemv=2.0)
    assert [line.name for line in diff.difference(measured, table).lines] == ["quantised_gemv"]


# Recorded tables -----------------------------------------------------------------------------------------------------


@over(numbered([("18.9", 0.05), ("236", 0.5), ("236.0", 0.5), ("6.6", 0.05), ("0.36", 0.005), ("45.0", 0.05)]))
def test_digit_error(printed: str, error: float) -> None:
    assert digit_error(printed) == pytest.approx(error)


def test_time_from_a_share_carries_the_share_error() -> None:
    b = breakdowns.from_recorded("lmap_prefill_paged_moe_npp512", "us/token")
    assert b.by_category()["gdn_total"].error == pytest.approx(0.05 / 100 * 395.9)


def test_a_table_of_nested_rows_alone_has_no_shares() -> None:
    """Its parts sum to zero: the rows are shown and divided by nothing."""
    b = breakdowns.from_recorded("bench_ph100_serving_fine")
    assert (b.whole, len(b.nested) > 0) == (0.0, True)
    assert "%" not in diff.render_one(b).partition("\n    inside")[2]


def test_recorded_identities_state_what_is_missing() -> None:
    b = breakdowns.from_recorded("critpath_dense_npl128_step", "ms/step")
    assert b.whole == 380.4
    assert b.not_attributed == pytest.approx(380.4 - 378.44, abs=0.5)
    assert "gpu_idle" not in b.by_category(), "idle time is no part of a total of busy time"


def test_overlap_of_a_wall_total_is_negative() -> None:
    b = breakdowns.from_recorded("moegap_vllm_moe_npl128", "ms/step")
    assert b.by_category()["overlap"].value == -4.0
    assert b.not_attributed == pytest.approx(0.0, abs=0.5)


def test_recorded_refusals(tmp_path: Path) -> None:
    with refused("breakdowns.csv", '"explore_postsm"'):
        breakdowns.from_recorded("explore_postsm")
    with refused("breakdowns.csv", "a2_dense_npl128_eager", "ms/step", remedy="%"):
        breakdowns.from_recorded("a2_dense_npl128_eager", "ms/step")
    rows = breakdowns.FILE.read_text().splitlines()[:3]
    path = tmp_path / "b.csv"
    path.write_text("\n".join([rows[0], rows[1], rows[1]]))
    with refused("b.csv", rows[1].split(",")[0]):
        breakdowns.table(path)
    path.write_text("\n".join([rows[0], rows[1].replace(",macro,", ",mcro,")]))
    with refused("b.csv", '"mcro"', remedy='"macro"'):
        breakdowns.table(path)


# The sources' own attributions ---------------------------------------------------------------------------------------

CLAIMS = {c.id: c for c in attributions.reproduce()}


def test_attribution_as_declared() -> None:
    assert len(CLAIMS) >= 29
    assert [
        f"{c.id}: {c.recorded.mid:g} recorded, {c.ours.low:.4g} to {c.ours.high:.4g} {c.unit}"
        for c in CLAIMS.values()
        if c.agrees != (c.expected == "agrees")
    ] == []


def test_the_named_attributions_are_there() -> None:
    shares = [CLAIMS[f"decode-{n}"].ours.mid for n in ("recurrence", "gather", "copy", "gemv", "gemm", "attention")]
    assert shares == pytest.approx([23.4, 21.9, 18.9, 15.5, 10.4, 0.4])
    assert CLAIMS["decode-busy"].ours.mid == pytest.approx(99.4, abs=0.05)
    assert CLAIMS["fp4-path-share-of-gap"].ours.mid == pytest.approx(64.7, abs=0.05)
    assert CLAIMS["prefill-gap"].ours.mid == pytest.approx(198.9)
    assert CLAIMS["prefill-deltas"].ours.mid == pytest.approx(195.4)
    assert CLAIMS["ceiling-copy"].ours.mid == pytest.approx(180.0, abs=0.1)
    assert CLAIMS["ceiling-copy-and-gather"].ours.mid == pytest.approx(246.6, abs=0.1)


def test_a_changed_table_breaks_its_claim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "breakdowns.csv"
    shutil.copy(breakdowns.FILE, path)
    text = path.read_text()
    old = "act_quant,macro,FP4 matmul + act-quant,1843.75,236.0,46.0"
    assert old in text
    path.write_text(text.replace(old, old.replace("236.0", "226.0")))
    monkeypatch.setattr(breakdowns, "FILE", path)
    broken = {c.id for c in attributions.reproduce() if c.agrees != (c.expected == "agrees")}
    assert {"fp4-path-llama", "fp4-path-overage", "fp4-path-share-of-gap"} <= broken


BAD_CLAIMS = {
    'formula = "share"': ('formula = "shar"', '"shar"'),
    'categories = ["gdn_recurrence"]': ('categories = ["gdn"]', '"gdn"'),
    'trace = "a2_dense_npl128_eager"': ('trace = "a2_dense"', '"a2_dense"'),
    'expected = "agrees"': ('expected = "yes"', 'expected = "yes"'),
    'recorded = { figure = "lp.a2': ('recorded = { figur = "lp.a2', '"figur"'),
    "arguments = { trace": ('arguments = { x = "1", trace', '"x"'),
}


def test_bad_claims_are_refused(tmp_path: Path) -> None:
    text = attributions.FILE.read_text()
    first = text[: text.index("\n[[claim]]", text.index("\n[[claim]]") + 1)]
    path = tmp_path / "attributions.toml"
    path.write_text(first)
    assert len(attributions.reproduce(path)) == len(tomllib.loads(first)["claim"]) == 1
    for old, (new, words) in BAD_CLAIMS.items():
        assert old in first
        path.write_text(first.replace(old, new))
        with pytest.raises(BadInput) as refusal:
            attributions.reproduce(path)
        assert words in refusal.value.what, f"{new}: {refusal.value}"


# The command ---------------------------------------------------------------------------------------------------------

LLAMA, VLLM = "explore_postssm_llama-paged_dense_npl128", "explore_postssm_vllm_dense_npl128"


def test_lab_diff_prints_the_attribution(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.main(["diff", LLAMA, VLLM, "--svg", str(tmp_path / "gap.svg")]) == 0
    out = capsys.readouterr().out
    assert "gap 184 ms/step; categories explain 163.5, 20.46 is not attributed" in out
    assert "+119.00      64.7 %  FP4 matmul + act-quant" in out
    assert (tmp_path / "gap.svg").read_text().startswith("<?xml")


def test_lab_diff_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["diff", LLAMA, VLLM, "--per", "token", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["unit"] == "us/token"
    assert found["lines"][0]["name"] == "act_quant"


def test_lab_diff_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["diff", "--recorded"]) == 0
    assert "decode: FP4 product path, share of the gap" in capsys.readouterr().out


REFUSED = (
    (["diff"], "lab diff", "0"),
    (["diff", "nosuch.sqlite", VLLM], "lab diff", '"nosuch.sqlite"'),
    (["diff", LLAMA, VLLM, "--total", "x"], "--total", '"x"'),
    (["diff", LLAMA, "lmap_prefill_vllm_moe_npp512", "--per", "step"], "breakdowns.csv", "ms/step"),
    (["diff", "a2_dense_npl128_eager", "ssmfix_gather_step1"], "a2_dense_npl128_eager", "--total"),
)


def test_lab_diff_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, where, words in REFUSED:
        assert main.main(arguments) == 2, arguments
        held(capsys.readouterr().err, where, words)


def test_lab_diff_of_shares_with_totals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["diff", "ssmfix_gather_step1", "ssmfix_gather_step2", "--total", "690000,500000"]) == 0
    assert "get_rows" in capsys.readouterr().out


# Work -----------------------------------------------------------------------------------------------------------------


def test_a_difference_is_of_launches_and_of_the_time_of_each() -> None:
    """64 launches against 21: two thirds of a step are missing, and no kernel got faster."""
    a = breakdowns.from_trace(trace(*((i * 10, i * 10 + 8, 0, 1) for i in range(64))))
    b = breakdowns.from_trace(trace(*((i * 10, i * 10 + 8, 0, 1) for i in range(21))))
    d = diff.difference(a, b)
    assert d.line("attention").delta == pytest.approx(344.0)
    line = next(x for x in d.lines if x.name == "attention")
    assert (line.counts, line.split) == ((64, 21), pytest.approx((344.0, 0.0)))
    assert d.kernels[0].split == pytest.approx((344.0, 0.0))
    assert [w for w in d.warnings if "attention 64 against 21" in w]
    each = diff.difference(a, diff.at_launches_of(a, b))
    assert each.line("attention").delta == pytest.approx(0.0)
    assert not [w for w in each.warnings if "different work" in w]


@given(st.lists(INTERVAL, min_size=1, max_size=12), st.lists(INTERVAL, min_size=1, max_size=12))
def test_both_parts_sum_to_the_difference(
    a: list[tuple[int, int, int, int]], b: list[tuple[int, int, int, int]]
) -> None:
    sides = [breakdowns.from_trace(trace(*((s, s + d, n, q) for s, d, n, q in rows))) for rows in (a, b)]
    found = diff.difference(*sides)
    for line in (*found.lines, *found.kernels):
        assert line.split is None or sum(line.split) == pytest.approx(line.delta, abs=1e-9)
    assert found.rest == 0.0, "rounding is no time"


def test_per_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for n in (64, 21):
        export = Export()
        for i in range(n):
            export.kernel(ATTENTION, i * 10_000_000, i * 10_000_000 + 8_000_000)
        paths.append(str(export.write(tmp_path / f"{n}.sqlite")))
    gaps = {}
    for per in ("launch", "total"):
        assert main.main(["diff", *paths, "--per", per, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        gaps[per] = next(x["delta"] for x in found["lines"] if x["name"] == "attention")
    assert gaps == {"launch": pytest.approx(0.0), "total": pytest.approx(344_000.0)}
    assert main.main(["diff", *paths, "--per", "total"]) == 0
    out = capsys.readouterr().out
    assert "e-1" not in out
    assert any(line.split()[:3] == ["attention", "512,000.00", "168,000.00"] for line in out.splitlines())
    assert main.main(["diff", *paths, "--per", "step"]) == 2
    held(capsys.readouterr().err, "64.sqlite", "--steps")
    with refused("--per launch", "a2_dense_npl128_eager"):
        one = breakdowns.from_recorded("a2_dense_npl128_eager")
        diff.at_launches_of(replace(one, parts=(Part("x", 1.0),)), one)
