"""The roofline's arithmetic against sums done by hand, the recorded analysis computed again, and the pictures."""

from __future__ import annotations

import copy
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab import draw
from lab.base import devices, files, models
from lab.base.errors import REPOSITORY, BadInput
from lab.card import recorded
from lab.place import roofline
from lab.study import reproduction
from tests.loops import numbered, over
from tests.refused import refused

positive = st.floats(1e-3, 1e18, allow_nan=False, allow_infinity=False)
fraction = st.floats(0, 1, allow_nan=False)
below_one = st.floats(0, 0.99, allow_nan=False)


def test_floor_by_hand() -> None:
    """1 GFLOP and 1 GB on 1 TFLOP/s and 100 GB/s: 1,000 us of operations, 10,000 us of bytes."""
    found = roofline.floor(1e9, 1e9, 1e12, 100e9)
    assert found.compute_us == pytest.approx(1_000)
    assert found.memory_us == pytest.approx(10_000)
    assert (found.floor_us, found.bound) == (found.memory_us, "memory")
    assert (found.intensity, found.ridge) == (1.0, 10.0)
    assert roofline.floor(1e11, 1e9, 1e12, 100e9).bound == "compute"
    assert roofline.floor(1e9, 0, 1e12, 100e9).intensity == float("inf")


def test_place_uses_the_devices_figures() -> None:
    """The 27B FFN at M = 1 in bf16 on the H200: 178.3 MB / 4.8 TB/s = 37.1 us."""
    axes = models.shape("q36-27b.ffn_up").axes
    flops, moved = 2 * axes["N"] * axes["K"], 2 * axes["N"] * axes["K"]
    found = roofline.place(devices.get("h200"), flops, moved, "bf16")
    assert found.memory_us == pytest.approx(37.137, abs=0.001)
    assert found.ridge == pytest.approx(989.5 / 4.8)
    gb10 = devices.get("gb10")
    assert roofline.place(gb10, flops, moved, "bf16").memory_us == pytest.approx(1e6 * moved / gb10.bandwidth.base)
    with refused("", "h200", '"fp4"'):
        roofline.place(devices.get("h200"), 1, 1, "fp4")


@over(numbered([(0, 0, 1, 1), (-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)]))
def test_floor_refuses_what_is_no_work_or_no_device(*arguments: float) -> None:
    with refused("roofline", "=-1" if -1 in arguments else "=0"):
        roofline.floor(*arguments)


@given(flops=positive, moved=positive, more=st.floats(1, 1e3), peak=positive, bandwidth=positive)
def test_floor_grows_with_work_and_is_a_bound(
    flops: float, moved: float, more: float, peak: float, bandwidth: float
) -> None:
    base = roofline.floor(flops, moved, peak, bandwidth)
    assert base.floor_us >= base.memory_us
    assert base.floor_us >= base.compute_us
    assert roofline.floor(flops * more, moved, peak, bandwidth).floor_us >= base.floor_us
    assert roofline.floor(flops, moved * more, peak, bandwidth).floor_us >= base.floor_us
    assert roofline.floor(flops, moved, peak * more, bandwidth).floor_us <= base.floor_us
    # bound and intensity say the same: memory exactly when the intensity lies at or left of the ridge
    if abs(base.intensity / base.ridge - 1) > 1e-9:
        assert (base.bound == "memory") == (base.intensity < base.ridge)


@given(share=fraction, saved=below_one)
def test_saving_ceiling_is_bounded(share: float, saved: float) -> None:
    gain = roofline.saving_ceiling(share, saved)
    assert 0 <= gain <= saved / (1 - saved) * (1 + 1e-12) + 1e-15  # 1 / (1 - saved) is rounded at one
    assert roofline.saving_ceiling(share / 2, saved) <= gain


@given(ctx=st.floats(1, 1e6), attention=st.floats(1e-6, 1e3), rest=st.floats(1e-6, 1e3), saved=below_one)
def test_kv_ceiling_grows_with_context(ctx: float, attention: float, rest: float, saved: float) -> None:
    gain = roofline.kv_saving_ceiling(ctx, attention, 256, rest, saved)
    assert gain <= roofline.kv_saving_ceiling(2 * ctx, attention, 256, rest, saved) + 1e-12
    # the closed form: what is saved, over what is left
    part = attention * ctx / 256
    assert gain == pytest.approx(saved * part / (rest + (1 - saved) * part), rel=1e-9, abs=1e-12)


@given(peak=positive, moved=positive, params=positive, bandwidth=positive)
def test_crossover_is_where_the_two_times_meet(peak: float, moved: float, params: float, bandwidth: float) -> None:
    m = roofline.crossover_m(peak, moved, params, bandwidth)
    found = roofline.floor(2 * params * m, moved, peak, bandwidth)
    assert found.compute_us == pytest.approx(found.memory_us, rel=1e-9)


def test_formulas_by_hand() -> None:
    assert roofline.weight_read_floor(18e9, 273e9) == pytest.approx(0.065934, abs=1e-6)
    assert roofline.decode_floor(128, 18e9, 273e9) == pytest.approx(1941.33, abs=0.01)
    assert roofline.crossover_m(500e12, 18e9, 27e9, 273e9) == pytest.approx(610.5, abs=0.01)
    assert roofline.efficiency(27e9, 128, 0.471, 500e12) == pytest.approx(0.02935, abs=1e-5)
    assert roofline.saving_ceiling(0.2, 0.5) == pytest.approx(1 / 0.9 - 1)
    assert roofline.attention_share(512, 14, 256, 1068) == pytest.approx(28 / 1096)
    assert roofline.kv_bytes_per_token(10, 2, 256, 2) == 20480
    assert roofline.kv_bytes_per_token(16, 4, 256, 2) == 65536
    assert roofline.gdn_state_bytes(1, 48, 128, 4, 1, 1) == 3145728
    assert roofline.kv_read_share(1000, 2, 10, 2, 256, 2, 1e-3, 1e12) == pytest.approx(20480 * 2000 / 1e9)
    assert roofline.decode_bandwidth_share(55.5e9, 128, 254, 273e9) == pytest.approx(0.4034, abs=1e-4)
    assert roofline.roofline_fraction(50, 100) == 0.5


@over(numbered([(-0.1, 0.5), (1.1, 0.5), (0.5, 1.5), (1, 1)]))
def test_saving_ceiling_refuses_what_is_no_share(share: float, saved: float) -> None:
    with refused("roofline", f"{share=:g}", f"{saved=:g}"):
        roofline.saving_ceiling(share, saved)


def test_fraction_refuses_zero() -> None:
    with refused("roofline", "=0"):
        roofline.roofline_fraction(0, 100)


# ---- the recorded analysis ----


@over({row.id: (row,) for row in reproduction.reproduce()})
def test_recorded_figure_comes_out_as_declared(row: reproduction.Reproduction) -> None:
    assert row.agrees == (row.expected == "agrees"), (
        f"{row.ours:g} {row.unit} against {row.recorded:g}: {row.assumption}"
    )
    if row.recorded_id:
        assert row.recorded == recorded.figure(row.recorded_id).value
    if row.agrees:
        assert abs(row.difference_pct) < 2.5


def test_the_analysis_is_all_there() -> None:
    """The figures that the analysis stands on, by value, so that a case that vanishes is missed."""
    rows = {r.recorded_id: r for r in reproduction.reproduce() if r.expected == "agrees"}
    values = {r.recorded for r in rows.values()}
    assert {1940, 1590, 611, 66, 471, 3, 180, 247, 40, 62} <= values
    assert {0.65, 2.55, 4.98, 9.49, 17.34} <= values
    assert {2.16, 3.44, 3.9, 4.8, 7.15, 8.81} <= values
    assert sum(r.expected == "differs" for r in reproduction.reproduce()) >= 4


def test_the_text_table_says_what_does_not_follow() -> None:
    rows = reproduction.reproduce()
    shown = reproduction.render(rows).splitlines()
    assert any("leaves the memory bound" in line and "610.5 tokens" in line for line in shown)
    assert sum("does not follow" in line for line in shown) == sum(bool(r.recorded_id) > r.agrees for r in rows) >= 4
    assert (
        sum("more than there is" in line for line in shown) == sum(not (r.recorded_id or r.agrees) for r in rows) == 2
    )


def test_contradicting_inputs_are_carried_through() -> None:
    row = next(r for r in reproduction.reproduce() if r.id == "crossover")
    others = {label: round(value) for label, value in row.alternatives}
    assert others["gb10.memory_bandwidth = 546 GB/s"] == 305
    assert others["gb10.peak.fp4 = 427 TFLOP/s"] == 521


def test_the_prior_needs_more_bandwidth_than_there_is() -> None:
    """14 us for 256 tokens of 20,480 bytes is 374 GB/s; the f16 cache was read at no more than 85 % when measured."""
    found = {r.id: r.ours for r in reproduction.reproduce()}
    assert found["prior-read"] == pytest.approx(20480 * 256 / 14e-6 / 273e9 * 100)
    measured = [share for name, share in found.items() if name.startswith("kv-read-")]
    assert len(measured) == 6
    assert all(60 < share < 90 for share in measured)


def test_the_prior_is_pinned_down_by_its_five_figures() -> None:
    """gain = h / (W + h), h = ctx * h1: the printed digits leave W / h1 11 tokens of room; the inputs hit it."""
    rows = [r for r in reproduction.reproduce() if r.id.startswith("kv-prior-")]
    contexts = {r.id: recorded.figure(r.recorded_id).params["ctx"] for r in rows}
    ends = [
        (contexts[r.id] * (100 / (r.recorded + 0.005) - 1), contexts[r.id] * (100 / (r.recorded - 0.005) - 1))
        for r in rows
    ]
    low, high = max(a for a, _ in ends), min(b for _, b in ends)
    assert len(rows) == 5
    assert low < 1068 / (0.5 * 14 / 256) < high
    assert high - low < 11


CASE = """
[[case]]
id = "one"
name = "one"
recorded = "lp.track-b.roofline.dense-weight-read-floor"
formula = "decode_floor"
expected = "agrees"
assumption = "none"
decimals = -1
[case.arguments]
sequences = { value = 128, unit = "ratio", source = "words" }
weight_bytes = { model = "q36-27b", fact = "weight_bytes" }
bandwidth = { device = "gb10", fact = "memory_bandwidth" }
"""


def test_a_case_that_does_not_follow_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "cases.toml"
    path.write_text(CASE)
    assert reproduction.reproduce(path)[0].agrees
    path.write_text(CASE.replace("value = 128", "value = 127"))
    assert not reproduction.reproduce(path)[0].agrees


def test_bad_case_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "cases.toml"
    for old, new, word, remedy in (
        ('"decode_floor"', '"decode_flor"', '"decode_flor"', '"decode_floor"'),
        ("sequences =", "sequence =", '"sequence"', '"sequences"'),
        ('bandwidth = { device = "gb10", fact = "memory_bandwidth" }', "", "one: decode_floor needs bandwidth", ""),
        ('device = "gb10"', 'device = "gb11"', '"gb11"', ""),
        ('fact = "memory_bandwidth"', 'fact = "memory_bandwith"', '"memory_bandwith"', '"memory_bandwidth"'),
        ('fact = "weight_bytes"', 'fact = "weights_bytes"', '"weights_bytes"', '"weight_bytes"'),
        ("dense-weight-read-floor", "dense-weight-read-flor", "dense-weight-read-flor", "dense-weight-read-floor"),
        ('unit = "ratio", source = "words"', 'unit = "ratio"', "no number", ""),
        ('unit = "ratio"', 'unit = "rations"', '"rations"', ""),
        (
            'value = 128, unit = "ratio", source = "words"',
            'figure = "lp.track-b-roofline.gb10.iter-k.control", param = "M"',
            "no number",
            "",
        ),
        ('expected = "agrees"', 'expected = "yes"', 'expected = "yes"', "agrees"),
        ('assumption = "none"', "", '"assumption"', ""),
        ("decimals", "digits", '"digits"', ""),
        ("decimals = -1", "limit_pct = 100", "recorded or limit_pct", ""),
        ("[[case]]", "[[cases]]", '"cases"', '"case"'),
    ):
        assert old in CASE
        path.write_text(CASE.replace("case", "cases") if new == "[[cases]]" else CASE.replace(old, new))
        with pytest.raises(BadInput) as caught:
            reproduction.reproduce(path)
        said = str(caught.value)
        assert word in said, said
        assert remedy in caught.value.remedy, said
        assert "\n" not in said


def _nodes(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The place of every key and item in a parsed TOML file."""
    below = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in below for place in ((*path, key), *_nodes(value, (*path, key)))]


def _broken(tree: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The tree with another value at a place, or None for nothing there; what is beside the way is shared."""
    key, *below = place
    made = copy.copy(tree)
    if below:
        made[key] = _broken(tree[key], tuple(below), value)
    elif value is None:
        del made[key]
    else:
        made[key] = value
    return made


FILES: dict[str, tuple[Path, Callable[[Path], object]]] = {
    "devices": (devices.FILE, devices.load),
    "models": (models.FILE, models.load),
    "cases": (reproduction.FILE, reproduction.reproduce),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.slow
def test_a_file_broken_anywhere_is_refused_or_still_good(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key or item in turn becomes something else: BadInput in one line or a sound file, never another error."""
    file, load = FILES[name]
    parsed, read = files.read_toml(file), files.read_toml
    places, broken, lines = _nodes(parsed), Path("broken.toml"), []
    values: tuple[Any, ...] = (None, 0, -1, 1.5, True, "", "x", [], {}, [1], float("nan"))
    for place, value in zip(places, itertools.cycle(values), strict=False):
        tree = _broken(parsed, place, value)
        monkeypatch.setattr(files, "read_toml", lambda path, tree=tree: tree if path == broken else read(path))
        try:
            load(broken)
        except BadInput as error:
            lines.append(str(error))
    assert len(lines) > len(places) / 2
    assert not [line for line in lines if "\n" in line]
    assert parsed == read(file), "what each broken file shares with the sound one was changed"


def test_arithmetic_needs_no_torch_and_no_matplotlib() -> None:
    code = (
        "import sys; from lab.base import devices, models; from lab.place import roofline; "
        "from lab.study import reproduction; reproduction.reproduce();"
        "print([m for m in ('torch', 'triton', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- pictures ----


def _texts(svg: str) -> list[str]:
    """The words of an SVG, one entry per text element."""
    return ["".join(e.itertext()) for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}text")]


def _points() -> list[draw.Point]:
    """Crowded on purpose: two pairs lie on top of each other."""
    return [
        draw.point("GDN call, llama.cpp", 7e8, 805e6, 4030, "recorded"),
        draw.point("GDN call, vLLM", 7e8, 805e6, 3620, "peer"),
        draw.point("M = 1", 2 * 27e9, 18e9, 90e3, "measured"),
        draw.point("M = 1, again", 2 * 27e9, 18e9, 91e3, "measured"),
    ]


@pytest.mark.slow
@over({device_id: (device_id,) for device_id in devices.ids()})
def test_roofline_picture_names_every_roof_and_series(device_id: str) -> None:
    device = devices.get(device_id)
    pipes = tuple(device.peaks)[:3]
    svg = draw.svg(draw.roofline(device, _points(), pipes=pipes))
    assert len(svg.encode()) < 60_000
    words = _texts(svg)
    assert {"GDN call, llama.cpp (recorded)", "GDN call, vLLM (peer)", "M = 1", "M = 1, again"} <= set(words)
    shown = " ".join(words)
    for fact in (device.bandwidth, *(device.peak(p) for p in pipes)):
        assert all(f"{v.value:g} {fact.unit}" in shown for v in fact.values)


def test_the_issue_roof_is_drawn_where_it_was_measured() -> None:
    device, points = devices.get("h200"), _points()
    plain = draw.roofline(device, points, pipes=("bf16",))
    both = draw.roofline(device, points, pipes=("bf16",), issue=((28.0, 90.0), (228.0, 400.0)))
    (line,) = [own for own in both.axes[0].lines if str(own.get_label()).startswith("issue")]
    assert not [own for own in plain.axes[0].lines if str(own.get_label()).startswith("issue")]
    data: Any = line.get_data()
    found = list(zip(*data, strict=True))
    for at, rate in ((14.0, 45.0), (28.0, 90.0), (114.0, 200.0), (500.0, 400.0)):
        assert min(found, key=lambda p: abs(p[0] - at))[1] == pytest.approx(rate, rel=0.04)


def test_picture_is_the_same_each_time() -> None:
    first, second = (draw.svg(draw.roofline(devices.get("gb10"), _points(), pipes=("fp4",))) for _ in range(2))
    assert first == second
    assert not re.search(r"\d{4}-\d\d-\d\dT", first)


def test_point_by_hand() -> None:
    """2 GFLOP over 1 GB in 1,000 us: 2 operations a byte, 2 TFLOP/s."""
    found = draw.point("p", 2e9, 1e9, 1000)
    assert (found.intensity, found.rate_tflop_s) == (pytest.approx(2), pytest.approx(2))


def test_roofline_picture_refuses_nonsense() -> None:
    gb10 = devices.get("gb10")
    with refused("", "gb10", '"fp8"'):
        draw.roofline(gb10, pipes=("fp8",))
    with refused("", '"measurd"', remedy='"measured"'):
        draw.roofline(gb10, [draw.Point("p", 1, 1, "measurd")])
    with refused("", "p: ", "0 TFLOP/s"):
        draw.roofline(gb10, [draw.Point("p", 1, 0)])
    with refused("roofline plot", "us=0"):
        draw.point("p", 1, 1, 0)
    with refused("roofline plot", "5 pipes"):
        draw.roofline(gb10, pipes=("bf16",) * 5)


def test_bars_state_denominator_shares_and_rest() -> None:
    parts = {"scan": 553.0, "GEMM": 254.0, "projections": 73.0, "elementwise": 57.0, "conv": 31.0}
    words = _texts(draw.svg(draw.bars(parts, "GPU time of a token", "us", total=1082)))
    assert "us; 100 % = GPU time of a token, 1,082 us" in words
    assert "553 us (51.1%)" in words
    assert "114 us (10.5%)" in words
    assert "not attributed" in words
    assert "not attributed" not in _texts(draw.svg(draw.bars(parts, "kernels", "us")))


def test_bars_refuse_nonsense() -> None:
    for parts, denominator, total, word in (
        ({}, "time", None, "'time'"),
        ({"a": 1.0}, " ", None, "' '"),
        ({"a": -1.0}, "time", None, "a = -1 us"),
        ({"a": float("nan")}, "time", None, "a = nan us"),
        ({"a": 60.0, "b": 60.0}, "time", 100.0, "120 of 100 us"),
    ):
        with refused("", word):
            draw.bars(parts, denominator, "us", total)


def test_save_writes_what_the_name_says(tmp_path: Path) -> None:
    figure = draw.bars({"a": 1.0}, "time", "us")
    assert draw.save(figure, tmp_path / "a.svg").read_text().startswith("<?xml")
    assert draw.save(figure, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with refused("", '".gif"'):
        draw.save(figure, tmp_path / "a.gif")
