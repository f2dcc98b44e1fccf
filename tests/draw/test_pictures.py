"""Pictures of traces, read back from their SVG: what they say, that their bars add up, and what they refuse."""

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lab import draw
from lab.base import devices
from lab.base.errors import BadInput
from lab.draw.style import look
from lab.trace import breakdowns, diff
from lab.trace.breakdowns import Breakdown, Part
from lab.trace.model import Copies, GraphLaunches, Kernels, Trace
from tests.refused import refused

NAMES = ("splitkv_kernel", "nvjet_tst_64x64", "at::cuda::spin_kernel(long)")


def sample() -> Trace:
    """Two streams with 5 us of overlap, one copy beside a kernel and one alone, a wait, and idle time; 100 us."""
    rows = [(0, 30, 0, 1), (25, 50, 1, 2), (70, 80, 2, 1), (95, 100, 0, 1)]
    start, end, name, stream = zip(*rows, strict=True)
    kernels = Kernels.of(
        start_ns=np.array(start) * 1000, end_ns=np.array(end) * 1000, name=name, stream=stream, device=[0] * 4
    )
    copies = Copies.of(start_ns=[45_000, 60_000], end_ns=[55_000, 65_000], device=[0, 0], bytes=[1, 1], kind=[8, 1])
    return Trace(tool="t", source="sample", names=NAMES, gpus={0: "x"}, kernels=kernels, memcpy=copies)


def words(figure: Figure) -> list[str]:
    return re.findall(r"<text[^>]*>(.*?)</text>", draw.svg(figure), re.S)


def bars(figure: Figure, axes: int, row: float) -> list[Rectangle]:
    """The bars of one row, left to right."""
    found = [p for p in figure.axes[axes].patches if isinstance(p, Rectangle) and p.get_x() >= 0]
    mine = [p for p in found if abs(p.get_y() + p.get_height() / 2 - row) < 0.1]
    return sorted(mine, key=lambda p: p.get_x())


LLAMA, VLLM = "explore_postssm_llama-paged_dense_npl128", "explore_postssm_vllm_dense_npl128"


def recorded_gap() -> diff.Difference:
    return diff.difference(breakdowns.from_recorded(LLAMA, "ms/step"), breakdowns.from_recorded(VLLM, "ms/step"))


def test_gap_says_its_totals_parts_and_rest() -> None:
    text = words(draw.gap(recorded_gap(), ("llama", "vLLM"), "a title"))
    for word in (
        "a title",
        "510 ms/step",
        "326 ms/step",
        "FP4 matmul + act-quant",
        "+119 (65%)",
        "not attributed",
        "2 smaller ones",
    ):
        assert word in text, text


def test_stacked_bars_end_at_their_totals() -> None:
    figure = draw.gap(recorded_gap(), ("llama", "vLLM"))
    for row, total in ((0, 510.0), (1, 326.0)):
        assert bars(figure, 0, row)[-1].get_x() + bars(figure, 0, row)[-1].get_width() == pytest.approx(total)


def test_waterfall_walks_from_b_to_a() -> None:
    figure = draw.gap(recorded_gap(), ("llama", "vLLM"))
    steps = [bars(figure, 1, row)[0] for row in range(1, 6)]
    at = 326.0
    for bar in steps:
        # matplotlib keeps a negative width as given: x is where the step starts
        assert bar.get_x() == pytest.approx(at)
        at += bar.get_width()
    assert at == pytest.approx(510.0)
    assert len(bars(figure, 1, 6)) == 1


def side(name: str, **parts: float) -> Breakdown:
    return Breakdown(name, name, "us", tuple(Part(k, v) for k, v in parts.items()), None, "made up")


def test_a_long_name_leaves_room_for_the_bars() -> None:
    """A template's instance is named in hundreds of letters; the layout gave up and cut every name."""
    long = "void cutlass::device_kernel<" + 300 * "x" + ">(Params)"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = draw.gap(diff.difference(side("a", **{long: 100.0, "y": 51.0}), side("b", y=100.0)))
    shown = next(label.get_text() for label in figure.axes[1].get_yticklabels() if "cutlass" in label.get_text())
    assert len(shown) == 41
    assert (shown.startswith("void cutlass"), shown.endswith(">(Params)")) == (True, True)
    assert min(text.get_window_extent().x0 for text in figure.axes[1].get_yticklabels()) >= 0
    named = "moe_teams2_bf16_h2048_f512_s512_n1_r4_p4_st6_hs4_i48".upper()  # wide letters
    sides = (side("a", **{named: 2_847.0, "y": 200.0}), side("b", y=240.9))
    many = diff.difference(*(replace(one, unit="us/step") for one in sides))
    figure = draw.gap(many)
    assert max(text.get_window_extent().x1 for axes in figure.axes for text in axes.texts) <= figure.bbox.x1
    assert "3,047 us/step" in words(figure)


def test_shares_are_left_out_where_the_parts_cancel() -> None:
    text = words(draw.gap(diff.difference(side("a", x=100.0, y=51.0), side("b", x=50.0, y=100.0))))
    assert "+50" in text
    assert not any("%)" in word for word in text)
    assert any("largely cancel" in word for word in text)


def test_colours_come_back_with_a_hatch() -> None:
    looks = [look(i) for i in range(21)]
    assert len(set(looks)) == 21
    assert {hatch for _, hatch in looks[:7]} == {""}


def test_gap_refuses_an_empty_side() -> None:
    d = recorded_gap()
    with refused("gap picture", "and 0 ms/step"):
        draw.gap(replace(d, b=replace(d.b, total=0.0)))


def test_timeline_has_lanes_and_the_busy_share() -> None:
    text = words(draw.timeline(sample(), title="one step"))
    for word in ("one step", "stream 1", "stream 2", "memcpy", "idle", "attention", "dense_gemm"):
        assert word in text, text
    assert any(word.startswith("us; busy 65 of 100 us (65.0%)") for word in text), text


def test_timeline_shows_an_opaque_graph_as_one() -> None:
    graphs = GraphLaunches.of(start_ns=[50_000], end_ns=[59_000], device=[0], stream=[1])
    text = words(draw.timeline(replace(sample(), graphs=graphs)))
    assert "graph" in text
    assert "CUDA graph (not decomposed)" in text


def test_timeline_of_many_kernels_stays_small() -> None:
    n = 20_000
    start = np.arange(n) * 1000
    kernels = Kernels.of(
        start_ns=start, end_ns=start + 900, name=np.arange(n) % 2, stream=np.ones(n), device=np.zeros(n)
    )
    figure = draw.timeline(Trace(tool="t", source="s", names=NAMES, gpus={0: "x"}, kernels=kernels))
    assert len(draw.svg(figure)) < 250_000


def test_no_timeline_no_picture() -> None:
    totals = Trace(
        tool="t",
        source="s",
        names=NAMES,
        kernels=Kernels.of(start_ns=[0], end_ns=[9], name=[0], instances=[3]),
        timeline=False,
    )
    with refused("s", "timeline"):
        draw.timeline(totals)
    with refused("s", "device activity"):
        draw.timeline(Trace(tool="t", source="s"))


def test_breakdown_bars_state_the_denominator() -> None:
    text = words(draw.breakdown(breakdowns.from_trace(sample()), "busy"))
    assert any("100 % = time added up, without idle" in word for word in text)
    text = words(draw.breakdown(breakdowns.from_recorded("a2_dense_npl128_eager")))
    assert any("100 % = the source's 100 %" in word for word in text)
    assert any(word.startswith("not attributed") for word in text)


def test_svg_is_the_same_each_time_and_on_a_light_card(tmp_path: Path) -> None:
    first, second = (draw.svg(draw.gap(recorded_gap(), ("a", "b"))) for _ in range(2))
    assert first == second
    assert f"fill: {draw.CARD}" in first
    assert draw.save(draw.timeline(sample()), tmp_path / "o.svg").stat().st_size < 60_000


def test_rivals_counts_wins_and_misses_and_shows_each_point_once() -> None:
    figure = draw.rivals([("a", "x, y", [2.0, 1.01, 0.9, 1.5]), ("b", "z", [0.97])], "a title")
    text = " ".join(words(figure))
    for word in ("a title", "faster (2)", "within 2 % (1)", "slower (2)", "x, y"):
        assert word in text
    points = [line for line in figure.axes[0].lines if str(line.get_label()).startswith(("faster", "within", "slower"))]
    assert sorted(np.concatenate([np.asarray(line.get_xdata()) for line in points])) == [0.9, 0.97, 1.01, 1.5, 2.0]
    with refused("rivals", remedy="--peers"):
        draw.rivals([("a", "", [])], "")


def test_where_every_rival_is_faster_the_axis_still_has_its_ratios() -> None:
    (axes,) = draw.rivals([("a", "x", [0.29, 0.35])], "a title").axes
    low, high = axes.get_xlim()
    assert low < 0.29 < 1 < high
    assert list(axes.get_xticks()) == [0.3, 0.5, 0.75, 1]


def test_the_title_of_rivals_is_not_under_the_legend() -> None:
    figure = draw.rivals([("a", "x, y", [2.0, 1.01, 0.9])], "NVIDIA H200 SXM: our kernels beside the fastest rival")
    figure.draw_without_rendering()
    (legend,), title = figure.legends, next(text for text in figure.texts if "beside" in text.get_text())
    assert not title.get_window_extent().overlaps(legend.get_window_extent())


def test_plots_say_what_they_were_given() -> None:
    lines = draw.lines({"left": {"a": [(1, 2.0), (8, 4.0)]}, "right": {"b": [(1, 3.0)]}}, "a title", "tokens", "us")
    assert {"a title", "left", "right", "a", "b", "tokens", "us"} <= set(words(lines))
    points = draw.scatter({"one": [(5.0, -1.0)], "none": []}, "t", "x", "y", [[(1, 3), (9, 3)]])
    assert "one (1)" in words(points)
    assert "none (0)" not in words(points)
    levels = draw.levels([("read", 94.0, "4,512 GB/s")], "t", "%", 100)
    assert {"read", "4,512 GB/s"} <= set(words(levels))


def test_arms_tell_what_is_missing() -> None:
    sides = [draw.Side("old", "control", 10.0), draw.Side("new", "candidate", 5.0, 0.2), draw.Side("lib", "peer", 8.0)]
    figure = draw.arms([draw.Group("w1", sides, 2.0), draw.Group("w2")], "t")
    said = words(figure)
    assert {"10 us to 5 us", "control: old", "candidate: new", "lib", "floor"} <= set(said)
    assert said.count("not measured") == 1
    long = [draw.Side("old", "control", 19791.73), draw.Side("new", "candidate", 19432.53)]
    assert "19,792 us to 19,433 us" in words(draw.arms([draw.Group("w1", long)], "t"))


def test_a_legend_of_long_names_stays_in_the_figure_and_tells_each_arm_apart() -> None:
    names = [f"a_form_of_the_many_token_products_{i}" for i in range(9)]
    sides = [draw.Side("control", "control", 10.0), *(draw.Side(n, "peer", 9.0 + i) for i, n in enumerate(names))]
    figure = draw.arms([draw.Group("w", sides)], "t")
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    drawn: list[Any] = [c for c in figure.axes[0].containers if c.get_label() in names]
    handles = [container.lines[0] for container in drawn]
    assert len({(h.get_marker(), h.get_color()) for h in handles}) == len(names)


@pytest.mark.parametrize(
    ("draws", "said"),
    [
        (lambda: draw.lines({}, "t", "x", "y"), "0 panels"),
        (lambda: draw.lines({"p": {"a": [(1, 0.0)]}}, "t", "x", "y"), "above zero"),
        (lambda: draw.scatter({"a": []}, "t", "x", "y"), "no point"),
        (lambda: draw.levels([], "t", "x"), "nothing to draw"),
        (lambda: draw.arms([], "t"), "no workload"),
    ],
)
def test_nothing_to_draw_is_refused(draws: Callable[[], Figure], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        draws()


def test_many_points_are_named_once_by_series() -> None:
    points = [draw.point(f"k{i} w{i}", 1e9 * (i + 1), 1e6, 50.0, series=f"k{i % 2}", pipe="fp8") for i in range(9)]
    said = words(draw.roofline(devices.get("h200"), points))
    assert said.count("k0") == said.count("k1") == 1
    assert any("fp8" in word for word in said), "the roof of the pipe that they use"
    assert not any("bf16" in word for word in said)
