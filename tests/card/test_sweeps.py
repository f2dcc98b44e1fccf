"""Sweeps: files that cannot be used, filters and curves, the pictures, and the committed table itself."""

import csv
from pathlib import Path

import pytest
from msgspec import structs

from lab import draw
from lab.base import devices
from lab.base.errors import BadInput
from lab.card import recorded, sweeps
from tests.loops import numbered, over
from tests.refused import refused

COLUMNS = [*sweeps.TEXT[:6], *sweeps.METRICS, *sweeps.TEXT[6:]]
ROW = dict.fromkeys(COLUMNS, "") | {
    "id": "a.0",
    "system": "ds4",
    "device": "gb10",
    "model": "m",
    "arm": "one",
    "params": '{"context": 2048}',
    "decode_tps": "14.2",
    "tool": "t",
    "source": "here",
}


def written(path: Path, *rows: dict[str, str], columns: list[str] | None = None) -> Path:
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, columns or COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def row(name: str, x: float | None, y: float, arm: str = "one", status: str = "") -> sweeps.Row:
    params = {} if x is None else {"context": x}
    return sweeps.Row(name, "ds4", "gb10", "m", arm, params, {"decode_tps": y}, status, "t", "here")


# Reading --------------------------------------------------------------------------------------------------------------


def test_row(tmp_path: Path) -> None:
    (found,) = sweeps.read(written(tmp_path / "s.csv", ROW))
    assert (found.id, found.params, found.values, found.status) == ("a.0", {"context": 2048}, {"decode_tps": 14.2}, "")
    assert found["decode_tps"] == 14.2
    with refused("a.0", '"prefill_tps"', remedy="decode_tps"):
        found["prefill_tps"]


REFUSED: list[tuple[dict[str, str], tuple[str, ...]]] = [
    ({"decode_tps": "nan"}, ("a.1", "decode_tps", "nan", ">= 0")),
    ({"decode_tps": "1e999"}, ("a.1", "decode_tps", "inf", "float")),
    ({"decode_tps": "-1"}, ("a.1", "decode_tps", "-1", ">= 0")),
    ({"decode_tps": "fast"}, ("a.1", "decode_tps", "'fast'", "float")),
    ({"accept_rate": "2.13"}, ("a.1", "accept_rate", "2.13", "no ratio", "accept_len")),
    ({"params": "{context: 1}"}, ("a.1", "params", "not JSON", "mend")),
    ({"params": "[1]"}, ("a.1", "params", "[1]", "object")),
    ({"decode_tps": ""}, ("a.1", "no metric", "leave the row out")),
    ({"id": "a.0"}, ("line 3", 'id "a.0"', "twice", "its own id")),
    ({"id": ""}, ("line 3", 'id ""', "empty", "its own id")),
]


def test_refused_with_file_and_row(tmp_path: Path) -> None:
    @over(numbered(REFUSED))
    def each(change: dict[str, str], named: tuple[str, ...]) -> None:
        path = written(tmp_path / "s.csv", ROW, {**ROW, "id": "a.1", **change})
        with pytest.raises(BadInput) as caught:
            sweeps.read(path)
        line = str(caught.value)
        assert line.startswith(f"{path}: ")
        assert [word for word in named if word not in line] == [], line

    each()


def test_missing_column(tmp_path: Path) -> None:
    for column in COLUMNS:
        path = written(tmp_path / "s.csv", ROW, columns=[c for c in COLUMNS if c != column])
        with refused("s.csv", f'column "{column}"'):
            sweeps.read(path)


def test_metric_in_another_unit_is_refused(tmp_path: Path) -> None:
    """The unit is in the column's name: seconds in a column of their own are no `ttft_ms`."""
    path = written(tmp_path / "s.csv", {**ROW, "ttft_s": "1"}, columns=[*COLUMNS, "ttft_s"])
    with refused("s.csv", "ttft_s", remedy="ttft_ms"):
        sweeps.read(path)


# Filters and curves ---------------------------------------------------------------------------------------------------


def test_select() -> None:
    pool = [row("a", 1, 5.0), row("b", 2, 4.0, status="profiled"), row("c", 1, 3.0, arm="two"), row("d", None, 2.0)]
    assert [r.id for r in sweeps.select(pool, arm="one")] == ["a", "b", "d"]
    assert [r.id for r in sweeps.select(pool, context=1)] == ["a", "c"]
    assert [r.id for r in sweeps.select(pool, context=None)] == ["d"]
    assert [r.id for r in sweeps.select(pool, where=lambda r: r["decode_tps"] < 4)] == ["c", "d"]
    with refused("sweeps", 'arm = "onee"', remedy='"one"'):
        sweeps.select(pool, arm="onee")
    with refused("sweeps", "context = 7"):
        sweeps.select(pool, context=7)
    with refused("sweeps", "no row is left"):
        sweeps.select(pool, metric="prefill_tps")


def test_series_and_ratio() -> None:
    pool = [row("b", 2, 4.0), row("a", 1, 5.0), row("d", None, 2.0)]
    curve = sweeps.series(pool, "context", "decode_tps")
    assert (curve.label, curve.xs, curve.ys) == ("one", (1, 2), (5, 4))
    other = sweeps.series([row("c", 1, 10.0), row("e", 3, 1.0)], "context", "decode_tps", label="other")
    over = sweeps.ratio(other, curve)
    assert (over.label, over.xs, over.ys) == ("other / one", (1,), (2.0,))
    with refused("one", "context = 3", remedy="2"):
        curve.at(3)
    with refused("sweeps", "context = 1", "a and c"):
        sweeps.series([*pool, row("c", 1, 9.0)], "context", "decode_tps")
    with refused("sweeps", "share no context"):
        sweeps.ratio(sweeps.series([row("z", 9, 1.0)], "context", "decode_tps"), curve)
    with refused("sweeps", '"depth"', "decode_tps"):
        sweeps.series(pool, "depth", "decode_tps")
    with refused("sweeps", '"decode"', remedy="decode_"):
        sweeps.series(pool, "context", "decode")


def test_ratio_of_two_units_is_refused() -> None:
    slow = sweeps.Row("m", "ds4", "gb10", "m", "one", {"context": 1}, {"itl_ms": 3.0}, "", "t", "here")
    with refused("sweeps", "itl_ms", "decode_tps", remedy="one unit"):
        sweeps.ratio(
            sweeps.series([slow], "context", "itl_ms"), sweeps.series([row("a", 1, 5.0)], "context", "decode_tps")
        )


def test_curve_of_recorded_figures() -> None:
    table = [
        f for i, f in recorded.figures().items() if i.startswith("ik.sweep-main-vs-pr.2x-rtx-3090.decode.control.")
    ]
    curve = sweeps.from_figures(table, "n_kv", "decode_tps", "main")
    assert curve.xs == tuple(range(0, 30721, 2048))
    assert (curve.ys[0], curve.ys[-1]) == (49.47, 45.9)
    with refused("sweeps", table[0].id):
        sweeps.from_figures([*table, table[0]], "n_kv", "decode_tps", "main")
    with refused(table[0].id, "not ms", remedy="one metric"):
        sweeps.from_figures(table, "n_kv", "itl_ms", "main")
    with refused(table[0].id, '"context"'):
        sweeps.from_figures(table, "context", "decode_tps", "main")
    gone = structs.replace(table[0], params={**table[0].params, "status": "artifact"})
    with refused(gone.id, "withdrawn", "artifact"):
        sweeps.from_figures([gone], "n_kv", "decode_tps", "main")
    with refused("sweeps", '"n_kv"', "decode_tps"):
        sweeps.from_figures([], "n_kv", "decode_tps", "main")


# Pictures -------------------------------------------------------------------------------------------------------------


def test_curves_draw_their_labels_and_refuse_mixtures() -> None:
    one = sweeps.series([row("a", 1, 5.0), row("b", 2, 4.0)], "context", "decode_tps", label="one arm")
    two = sweeps.series([row("a", 1, 4.0), row("b", 2, 4.0)], "context", "decode_tps", label="two arms")
    text = draw.svg(draw.curves([[one, two]], "a title", [sweeps.ratio(two, one)], line=0.97))
    for words in ("one arm", "two arms / one arm", "a title", "gate 0.97", "generation, tok/s", "tokens in the cache"):
        assert words in text
    assert text == draw.svg(draw.curves([[one, two]], "a title", [sweeps.ratio(two, one)], line=0.97))
    slow = sweeps.Row("m", "ds4", "gb10", "m", "one", {"context": 1}, {"itl_ms": 3.0}, "", "t", "here")
    with refused("", "decode_tps, itl_ms"):
        draw.curves([[one, sweeps.series([slow], "context", "itl_ms")]], "x")
    with refused("", remedy="panel"):
        draw.curves([[one], []], "x")
    deep = sweeps.Row("m", "ds4", "gb10", "m", "one", {"depth": 1}, {"decode_tps": 3.0}, "", "t", "here")
    with refused("", "axes"):
        draw.curves([[one], [sweeps.series([deep], "depth", "decode_tps")]], "x")
    with refused("", "six"):
        draw.curves([[one] * 7], "x")


# The committed table --------------------------------------------------------------------------------------------------


def test_time_per_sequence_over_the_batch() -> None:
    saw = {"ours": [(34, 4.5), (1, 22.0), (33, 4.6), (32, 4.5)], "theirs": [(32, 8.0), (33, 12.0)]}
    text = draw.svg(draw.times(saw, "a title", marks=(32,)))
    assert all(word in text for word in ("a title", "ours", "theirs", "us a sequence"))
    assert text == draw.svg(draw.times(saw, "a title", marks=(32,)))
    eight = {str(i): [(1, 1.0)] for i in range(8)}
    mistaken: list[dict[str, list[tuple[int, float]]]]
    mistaken = [{}, {"ours": []}, eight, {"ours": [(1, 0.0)]}, {"ours": [(0, 1.0)]}]
    for wrong in mistaken:
        with refused("times plot"):
            draw.times(wrong, "x")


def test_every_row_was_carried_over() -> None:
    by_system: dict[str, int] = {}
    for r in sweeps.table():
        by_system[r.system] = by_system.get(r.system, 0) + 1
    assert by_system == {
        "lucebox": 676,
        "ds4": 559,
        "llama-paged": 534,
        "imp": 207,
        "vllm": 121,
        "llama.cpp": 56,
        "llama-stock": 25,
        "ik_llama.cpp": 16,
        "llama-patched": 8,
        "lucebox-megakernel": 7,
        "pytorch": 3,
    }
    assert sweeps.FILE.stat().st_size < 600_000


def test_frontiers_as_the_files_print_them() -> None:
    """First, middle and last lines, typed here from ds4's own CSV files."""
    for arm, device, first, last in (
        ("pro6000_blackwell", "rtx-pro-6000", (2192.90, 43.11), (1508.80, 35.34)),
        ("gb10_spark", "gb10", (465.07, 14.16), (308.42, 11.71)),
    ):
        found = sweeps.select(system="ds4", arm=arm)
        prefill, steady = (sweeps.series(found, "context", m) for m in ("prefill_tps", "decode_steady_tps"))
        assert {r.device for r in found} == {device}
        assert prefill.xs == steady.xs == tuple(range(2048, 65537, 2048))
        assert (prefill.ys[0], steady.ys[0]) == first
        assert (prefill.ys[-1], steady.ys[-1]) == last
        assert all(r.params["prefill_step"] == 2048 and r.params["n_gen"] == 128 for r in found)


def test_devices_are_those_of_the_device_table() -> None:
    named = {r.device for r in sweeps.table()}
    assert {"gb10", "rtx-pro-6000", "rtx-5090", "rtx-3090"} <= named & set(devices.ids())
    for name in named - set(devices.ids()):  # none is another spelling of a device we know
        with pytest.raises(BadInput):
            devices.get(name)


def test_rows_that_do_not_stand_say_so() -> None:
    (impossible,) = [r for r in sweeps.table() if "impossible" in r.status]
    assert (impossible.system, impossible["decode_tps"]) == ("imp", 1588.14)
    assert len([r for r in sweeps.table() if "contaminated" in r.status]) == 11
    assert all("profiled" in r.status for r in sweeps.table() if "nsys" in r.tool)
    assert len([r for r in sweeps.table() if "profiled" in r.status]) == 34
    full = [r for r in sweeps.table() if "memory full" in r.status]
    assert all(r["vram_gb"] == 24.0 and r.device == "rtx-3090" for r in full)
    assert len(full) == 14


def test_allocation_is_not_context() -> None:
    """lucebox's million-token cells all hold the same prompt."""
    cells = [r for r in sweeps.table() if r.params.get("allocated") == 1048576 and "context_used" in r.params]
    assert len(cells) > 10
    assert max(r.params["context_used"] for r in cells) < 51_000
    assert not any("context" in r.params for r in cells)


def test_a_length_is_no_rate() -> None:
    """Some of lucebox's tables print accepted lengths in a column of rates; they were carried over as lengths."""
    moved = sweeps.row("lb.sweep.rtx-3090.ovat-moe-64k-code-05-tq3-pf")
    assert "accept_rate" not in moved.values
    assert moved["accept_len"] == 2.78
