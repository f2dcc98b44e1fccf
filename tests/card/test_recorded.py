"""Recorded figures: files that cannot be used, figures that were withdrawn, and the committed tables themselves."""

import csv
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from lab.base.errors import BadInput
from lab.card import recorded, sweeps
from tests.loops import numbered, over
from tests.refused import refused

ROW = {
    "id": "x.kernel.control",
    "system": "ds4",
    "phase": "X",
    "device": "gb10",
    "model": "m",
    "arm": "control",
    "metric": "kernel_us",
    "unit": "us",
    "params": '{"M": 128}',
    "value": "12.5",
    "delta_pct": "",
    "kind": "measured",
    "source": "here",
}
MEASURED = "lp.patch-0018.gb10.decode-agg.control.npl128.npp128"
TAKEN_BACK = "lp.a2-cudagraph.gb10.gpu-busy.candidate"
CSVS = sorted(recorded.FOLDER.glob("*.csv"))


def written(path: Path, *rows: dict[str, str], columns: list[str] | None = None) -> Path:
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, columns or list(ROW), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_figure(tmp_path: Path) -> None:
    second = {**ROW, "id": "x.kernel.candidate", "arm": "candidate", "value": "fast", "delta_pct": "-3.5", "params": ""}
    found = recorded.read_figures(written(tmp_path / "f.csv", ROW, second))
    first, other = found.values()
    assert (first.value, first.delta_pct, first.params, first.withdrawn) == (12.5, None, {"M": 128}, "")
    assert (other.value, other.delta_pct, other.params) == ("fast", -3.5, {})


BAD: list[tuple[dict[str, str], tuple[str, ...]]] = [
    ({"value": "nan"}, ("x.kernel.control", "value", "nan", "float")),
    ({"value": "-inf"}, ("x.kernel.control", "value", "-inf", "float")),
    ({"value": "1e999"}, ("x.kernel.control", "value", "inf", "float")),
    ({"delta_pct": "NaN"}, ("x.kernel.control", "delta_pct", "nan")),
    ({"value": "-0.5"}, ("x.kernel.control", "-0.5 us", "negative time", "sign")),
    ({"params": "{M: 128}"}, ("x.kernel.control", "params is not JSON")),
    ({"params": "[128]"}, ("x.kernel.control", "params", "[128]", "object")),
    ({"params": "3"}, ("x.kernel.control", "params", "3", "object")),
    ({"params": '{"arrival": "bursts"}'}, ("x.kernel.control", "arrival", "bursts", '"burst"')),
    ({"params": '{"traffic": "steady"}'}, ("x.kernel.control", "traffic", "steady")),
]


def test_bad_figure(tmp_path: Path) -> None:
    @over(numbered(BAD))
    def each(change: dict[str, str], named: tuple[str, ...]) -> None:
        assert_refused(written(tmp_path / "f.csv", {**ROW, **change}), named)

    each()


def assert_refused(path: Path, named: tuple[str, ...]) -> None:
    with pytest.raises(BadInput) as caught:
        recorded.read_figures(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
    assert [word for word in named if word not in line] == [], line


def test_negative_is_fine_where_it_means_something(tmp_path: Path) -> None:
    figures = recorded.read_figures(written(tmp_path / "f.csv", {**ROW, "unit": "%", "value": "-0.5"}))
    assert figures["x.kernel.control"].value == -0.5


def test_duplicate_id(tmp_path: Path) -> None:
    assert_refused(written(tmp_path / "f.csv", ROW, {**ROW, "value": "13"}), ("x.kernel.control", "twice", "own id"))


def test_missing_column(tmp_path: Path) -> None:
    for column in recorded.Figure.__struct_fields__:
        columns = [c for c in ROW if c != column]
        assert_refused(written(tmp_path / "f.csv", ROW, columns=columns), (f'column "{column}" is missing',))


@pytest.mark.parametrize("fields", [len(ROW) - 1, len(ROW) + 1])
def test_row_of_another_length(fields: int, tmp_path: Path) -> None:
    path = written(tmp_path / "f.csv", ROW)
    with path.open("a", newline="") as handle:
        csv.writer(handle).writerow(["y"] * fields)
    assert_refused(path, ("line 3", "fields", "mend"))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"", None])
def test_unreadable_file(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    if content is not None:
        path.write_bytes(content)
    assert_refused(path, ())
    assert_refused(tmp_path, ())  # a folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tables in the place of data/recorded; the real one is back after the test."""
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    monkeypatch.setattr(recorded, "FIGURE_FILES", ("measurements.csv", "gates.csv"))
    monkeypatch.setattr(recorded, "figures", recorded.figures.__wrapped__)
    monkeypatch.setattr(recorded, "verdicts", recorded.verdicts.__wrapped__)
    return tmp_path


def test_id_in_two_files(folder: Path) -> None:
    written(folder / "measurements.csv", ROW)
    written(folder / "gates.csv", {**ROW, "id": "other"})
    assert sorted(recorded.figures()) == ["other", "x.kernel.control"]
    written(folder / "gates.csv", ROW)
    with refused("gates.csv", '"x.kernel.control"', "another file"):
        recorded.figures()


def test_verdict_twice(folder: Path) -> None:
    row = {**dict.fromkeys(recorded.RecordedVerdict.__struct_fields__, "x"), "reading": "GO", "word_kind": "label"}
    written(folder / "verdicts.csv", row, columns=list(recorded.RecordedVerdict.__struct_fields__))
    assert recorded.verdict("x").why == "x"
    written(folder / "verdicts.csv", row, row, columns=list(recorded.RecordedVerdict.__struct_fields__))
    with refused("verdicts.csv", "line 3", '"x"', "twice"):
        recorded.verdict("x")


# The committed tables -------------------------------------------------------------------------------------------------

WITHDRAWN = sorted(i for i, f in recorded.figures().items() if f.withdrawn)


@over({figure_id: (figure_id,) for figure_id in WITHDRAWN})
def test_withdrawn_figure_is_no_target(figure_id: str) -> None:
    with refused("recorded", figure_id, "withdrawn"):
        recorded.target(figure_id)
    assert recorded.figure(figure_id).withdrawn  # it can be shown, as what it is


def test_withdrawn_by_id_and_not_by_value() -> None:
    artefact, sound = (
        "lp.batch8-anomaly.gb10.decode-step.control.npl8",
        "lp.track-b-roofline.gb10.decode-step.control.m128",
    )
    assert recorded.figure(artefact).value == recorded.figure(sound).value == 471
    assert artefact in WITHDRAWN
    assert recorded.target(sound).value == 471
    # One for each way of taking a figure back that the sources know; a word dropped from the vocabulary shows here.
    words = {recorded.figure(i).withdrawn.split(":")[0] for i in WITHDRAWN}
    assert {
        "artifact",
        "stale-superseded",
        "guess refuted",
        "refuted",
        "projection refuted",
        "claim withdrawn",
    } <= words
    assert {"INVALIDATED by later commit", "invalid", "wrong, unused", "dropped stale figure"} <= words


def test_every_status_is_known_as_sound_or_withdrawn() -> None:
    """A new status word is read by a person once, and then stands here or in data/vocabulary.toml."""
    kept = {str(f.params["status"]) for f in recorded.figures().values() if "status" in f.params and not f.withdrawn}
    suspicious = [
        s for s in kept if any(w in s.lower() for w in ("withdraw", "refut", "invalid", "artefact", "retract"))
    ]
    assert suspicious == []


def test_unknown_ids_name_the_nearest() -> None:
    with refused("recorded", '"lp.gate.p1.kl.contrl"', remedy="lp.gate"):
        recorded.figure("lp.gate.p1.kl.contrl")
    with refused("recorded", '"lp.v.p55"', remedy="lp.v.p5"):
        recorded.verdict("lp.v.p55")


def digits(text: str) -> float:
    """Half a unit in the last printed place."""
    mantissa, _, exponent = text.lower().partition("e")
    return 0.5 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def delta_gaps(path: Path) -> tuple[int, list[str]]:
    """Candidates whose stated delta is not what their arms give, within what the printed digits leave open."""
    with path.open(newline="") as handle:
        rows = {row["id"]: row for row in csv.DictReader(handle)}
    compared, gaps = 0, []
    for name, row in rows.items():
        control = rows.get(name.removesuffix("candidate") + "control")
        if not name.endswith(".candidate") or control is None or not row["delta_pct"]:
            continue
        compared += 1
        a, b, stated = float(control["value"]), float(row["value"]), float(row["delta_pct"])
        reach = abs(b / a) * (digits(control["value"]) / abs(a)) + digits(row["value"]) / abs(a)
        if abs(100 * (b - a) / a - stated) > 100 * reach + digits(row["delta_pct"]):
            gaps.append(f"{name}: {a} -> {b} is {100 * (b - a) / a:+.3f} %, stated {stated}")
    return compared, gaps


def test_stated_deltas_are_those_of_the_arms(tmp_path: Path) -> None:
    for name, least in (("gates.csv", 15), ("phases.csv", 250)):
        compared, gaps = delta_gaps(recorded.FOLDER / name)
        assert compared >= least
        assert gaps == []
    text = (recorded.FOLDER / "gates.csv").read_text()
    assert ",119.46,112.147," in text
    (tmp_path / "gates.csv").write_text(text.replace(",119.46,112.147,", ",119.46,112.3,"))
    assert len(delta_gaps(tmp_path / "gates.csv")[1]) == 1


def test_patch_figures_are_those_of_the_sweeps() -> None:
    """What cards bind from a sweep's table by an id of its own says what the table says."""
    table = sweeps.table()
    arms = {
        "lp.h2h": {"control": "stock (no budget)", "candidate": "budget 256"},
        "lp.stagger": {"reference": "stock", "control": "0013 (pb256)", "candidate": "0016 (mbt512)"},
        "lp.cells": {"control": "{}_graphoff", "candidate": "{}_graphon"},
    }
    compared = 0
    for figure_id, figure in recorded.figures().items():
        kind = ".".join(figure_id.split(".")[:2])
        if kind not in arms:
            continue
        arm = arms[kind][figure.arm].format(figure.params.get("build"))
        columns = {"decode_agg": "decode_tps", "ttft_served": "ttft_ms", "ttft_mean": "ttft_ms"}
        place = figure_id.split(".")[2]  # dense and moe are the two models of these tables
        model = {"moe": "Qwen3.6-35B-A3B-NVFP4"}.get(place, "Qwen3.6-27B-NVFP4")
        (row,) = (
            r
            for r in table
            if (r.arm, r.model, r.params.get("npl")) == (arm, model, figure.params["npl"]) and r.device == "gb10"
        )
        assert row.params.get("arrival", "") == figure.arrival
        if figure.metric in columns:
            assert row.values[columns[figure.metric]] == figure.value, figure_id
            compared += 1
        elif figure.metric == "itl_p95":
            assert row.params["itl_p95_ms"] == figure.value, figure_id
            compared += 1
    assert compared == 32 + 27 + 8


@over({path.name: (path,) for path in CSVS})
def test_table_holds_facts_and_no_quotation(path: Path) -> None:
    with path.open(newline="") as handle:
        reader = csv.DictReader(handle)
        rows = list(reader)
    assert not {"quote", "quotes", "quotation", "excerpt"} & set(reader.fieldnames or ())
    assert len({row["id"] for row in rows}) == len(rows)
    assert path.name == "sources.csv" or all(row["source"] for row in rows)


def test_withdrawn_words_are_at_the_start(tmp_path: Path) -> None:
    params = json.dumps({"status": "not stale at all"})
    figures = recorded.read_figures(written(tmp_path / "f.csv", {**ROW, "params": params}))
    assert figures["x.kernel.control"].withdrawn == ""


def test_every_declared_gate_has_its_figures() -> None:
    """366 rows of declared gates were read; those without a number (an md5, a build that failed) have no figure."""
    rows = {int(f.params["raw_gates_row"]) for f in recorded.figures().values() if "raw_gates_row" in f.params}
    without_number = {49, 146, 217, 218, 219, 270, 349, 364}
    assert set(range(1, 367)) - rows == without_number


def test_a_bound_figure_is_a_number_of_its_kind_that_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorded.number("data", MEASURED, ("measured",), stands=True).value == 146.23
    assert recorded.number("data", TAKEN_BACK).withdrawn
    for figure, kinds, held, remedy in (
        (MEASURED, ("predicted", "ceiling"), f"{MEASURED} is measured", "predicted or ceiling"),
        (TAKEN_BACK, (), f"{TAKEN_BACK} was withdrawn (artifact", ""),
        (MEASURED + "x", (), f'"{MEASURED}x"', MEASURED),
    ):
        with refused("data", held, remedy=remedy):
            recorded.number("data", figure, kinds, stands=True)
    text = {MEASURED: replace(recorded.figure(MEASURED), value="about 150")}
    monkeypatch.setattr(recorded, "figures", lambda: text)
    with refused("data", f'{MEASURED} = "about 150"'):
        recorded.number("data", MEASURED)
