"""The flip map: the three terms by hand, what counts as a flip, what the file may hold, and the committed pairs."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kernels.common import Cost
from lab.base import devices
from lab.base.errors import BadInput
from lab.card import phases
from lab.check import families
from lab.cli import main
from lab.judge import evidence
from lab.row import store
from lab.study import flips
from lab.study.flips import Bound, Flip
from tests.loops import numbered, over
from tests.refused import refused
from tests.row.made import measurement

GB10, H200 = devices.get("gb10"), devices.get("h200")
families.interpret_on_cpu()
ROWS = {"IM4", "LP5", "LP15", "LP1", "LP6", "LP9", "LP10", "LP11", "LP12", "LP13", "LP16", "LP17", "LP18", "DS1", "DS2"}


def test_terms_by_hand() -> None:
    """4.8 GB and 989 GFLOP on an H200 (4.8 TB/s, 989 TFLOP/s in bf16) take a millisecond each."""
    cost = Cost(flops=0.5 * 989e9, bytes=4.8e9, pipe="bf16")
    found = flips.bound(H200, cost, walks=1, launches=1, gap_us=0.3)
    assert (found.bytes_us, found.flops_us, found.launch_us) == pytest.approx((1000.0, 500.0, 0.3), rel=0.01)
    assert (found.term, str(found)) == ("bytes", "bytes 1e+03 us")
    assert flips.bound(H200, cost, walks=0.25, launches=1, gap_us=0.3).term == "flops"
    assert flips.bound(H200, cost, walks=1, launches=4000, gap_us=0.3).term == "launch"


def test_a_pipe_without_a_peak_counts_as_bf16() -> None:
    fp4 = Cost(flops=1e12, bytes=1.0, pipe="fp4")
    assert flips.bound(H200, fp4, 1, 1, 0).pipe == "bf16"
    assert flips.bound(GB10, fp4, 1, 1, 0).pipe == "fp4"


def a_flip(there: str, here: str, bounds: tuple[str, str, str, str] = ("bytes",) * 4, **more: object) -> Flip:
    def bounding(term: str, us: float) -> Bound:
        bytes_us, flops_us, launch_us = (us if name == term else 0.1 for name in ("bytes", "flops", "launch"))
        return Bound(bytes_us, flops_us, launch_us, "bf16")

    keys = [("gb10", "control"), ("gb10", "candidate"), ("h200", "control"), ("h200", "candidate")]
    placed = {key: bounding(term, us) for key, term, us in zip(keys, bounds, (20, 10, 4, 4), strict=True)}
    asked: dict[str, Any] = {"recorded": "v", "card": "c", "workload": "w", "question": "q", "row": "LP1", "phase": "p"}
    words: dict[str, Any] = {"there": "gb10", "here": "h200", "word_there": there, "word_here": here}
    flip = Flip(**asked, **words, bounds=placed, expected_pct={"gb10": -50.0, "h200": 0.0}, measured_pct=None)
    return replace(flip, **more)


WHAT_COUNTS_AS_A_FLIP_CASES: list[tuple[str, str, str]] = [
    ("GO", "NO-GO", "yes"),
    ("NO-GO", "GO", "yes"),
    ("GO", "GO", "no"),
    ("CONDITIONAL-GO", "GO", "no"),
    ("NEUTRAL", "NO-GO", "no"),
    ("NEUTRAL", "GO", "yes"),
    ("GO", "PARTIAL", "partly"),
    ("PARTIAL", "PARTIAL", "no"),
    ("GO", "", ""),
    ("BLOCKED", "GO", ""),
    ("GO", "INVALID", ""),
    ("VACUOUS", "GO", ""),
]


def test_what_counts_as_a_flip() -> None:
    @over(numbered(WHAT_COUNTS_AS_A_FLIP_CASES))
    def each(there: str, here: str, flips: str) -> None:
        assert a_flip(there, here).flips == flips

    each()


def test_words_on_two_questions_are_not_compared() -> None:
    assert a_flip("GO", "NO-GO", asks_otherwise="there end to end").flips == ""


def test_the_sentence_names_the_terms_and_what_they_would_make() -> None:
    assert a_flip("GO", "GO").explained_by == "bytes on both; the bounds alone would make -50 % on gb10, +0 % on h200"
    mixed = a_flip("GO", "GO", ("bytes", "bytes", "bytes", "flops"), why="read once")
    assert mixed.explained_by.startswith("bytes on gb10, bytes then flops on h200; ")
    assert mixed.explained_by.endswith("(read once)")
    level = a_flip("GO", "GO", expected_pct={"gb10": 0.0, "h200": 0.0})
    assert "the arms have the same bound" in level.explained_by


# The committed pairs --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def committed() -> list[Flip]:
    return flips.flips()


def test_every_question_is_there(committed: list[Flip]) -> None:
    assert {flip.row for flip in committed} == ROWS
    assert {flip.here for flip in committed} == {"h200"}
    assert all(flip.word_there for flip in committed)


def by_card(committed: list[Flip], card: str) -> Flip:
    return next(flip for flip in committed if flip.card == card)


def test_a_pair_of_the_readme_names_the_row_of_both_its_cards(committed: list[Flip]) -> None:
    for flip in (f for f in committed if f.front):
        assert phases.card(flip.card).row == phases.card(flip.phase).row == flip.row, flip.card


def test_half_the_state_is_half_the_bound_on_both(committed: list[Flip]) -> None:
    flip = by_card(committed, "lp13-kernel")
    assert flip.expected_pct == pytest.approx({"gb10": -50, "h200": -50}, abs=1)


def test_a_change_from_one_workload_to_another_is_of_the_candidates_own_rows() -> None:
    base, now = (measurement(arm="candidate", workload_id=w, median_us=us) for w, us in (("a", 50.0), ("b", 27.0)))
    assert evidence.change_alone(base, now) == pytest.approx(-46)
    assert evidence.change_alone(None, now) is None


def test_direct_activations_lose_on_both_because_the_narrow_pipe_is_faster(committed: list[Flip]) -> None:
    flip = by_card(committed, "p3-kernel")
    assert {flip.bounds[d, a].term for d in ("gb10", "h200") for a in flips.ARMS} == {"flops"}
    pipes = [flip.bounds[d, a].pipe for d in ("gb10", "h200") for a in flips.ARMS]
    assert pipes == ["fp4", "bf16", "fp8", "bf16"]
    assert min(flip.expected_pct.values()) >= 100 - 1e-6


def test_the_vector_passes_walk_the_weights_once_a_sequence(committed: list[Flip]) -> None:
    flip = by_card(committed, "lp11-kernel")
    control, once = flip.bounds["h200", "control"], flip.bounds["h200", "candidate"]
    assert control.bytes_us == pytest.approx(128 * once.bytes_us)
    assert (flip.flips, flip.word_here) == ("no", "GO")


def test_the_other_way_round_is_no_flip(committed: list[Flip]) -> None:
    assert by_card(committed, "p5-cuda").flips == ""
    assert by_card(committed, "p5-cuda").asks_otherwise


def test_without_rows_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    assert {(flip.word_here, flip.flips, flip.measured_pct) for flip in flips.flips()} == {("", "", None)}


# What the file may hold -----------------------------------------------------------------------------------------------

ENTRY = 'recorded = "lp.v.p3"\ncard = "lp11-kernel"\nworkload = "m128_n5120_k6144"\nquestion = "q"\n'


WHAT_THE_FILE_MAY_NOT_HOLD_CASES: list[tuple[str, str, str]] = [
    (ENTRY + "control_walk = 2\n", '"control_walk"', '"control_walks"'),
    (ENTRY.replace('question = "q"\n', ""), '"question" is missing', ""),
    (ENTRY + 'control_walks = "2"\n', "control_walks = '2'", ""),
    (ENTRY + "control_launches = 0\n", "control_launches = 0", ""),
    (ENTRY + "why = 3\n", "why = 3", ""),
    (ENTRY + "front = 1\n", "front = 1", ""),
    (ENTRY + "control_walks = true\n", "control_walks = True", ""),
    (ENTRY.replace("lp.v.p3", "lp.v.p33"), '"lp.v.p33"', "lp.v.p3"),
]


def test_what_the_file_may_not_hold(tmp_path: Path) -> None:
    path = tmp_path / "flips.toml"

    @over(numbered(WHAT_THE_FILE_MAY_NOT_HOLD_CASES))
    def each(text: str, held: str, remedy: str) -> None:
        path.write_text("[[flip]]\n" + text)
        with refused("flips.toml", held, remedy=remedy):
            flips.flips(path=path)

    each()
    for old, new in (("lp11-kernel", "lp11-kernle"), ("m128_n5120", "m128_n5121")):  # each told by its own room
        path.write_text("[[flip]]\n" + ENTRY.replace(old, new))
        with pytest.raises(BadInput, match=new):
            flips.flips(path=path)
    path.write_text("[[flip]]\n" + ENTRY + 'candidate = "w4a17"\n')
    with pytest.raises(ValueError, match="w4a17"):
        flips.flips(path=path)


# ggml's own figures, imported -----------------------------------------------------------------------------------------


def test_ggml_shows_the_defect_in_all_three_formats(capsys: pytest.CaptureFixture[str]) -> None:
    """The command of the card lp11-ggml, on the committed transcription of the tool's output."""
    arms = ["--arm", "control:n=1,nr=[128,1]", "--arm", "candidate:n=128,nr=[1,1]"]
    maps = [w for f in ("nvfp4", "mxfp4", "q8_0") for w in ("--map", f"{f}:type_a={f},m=5120,k=6144")]
    assert main.main(["judge", "lp11-ggml", "--rows", "data/imported/ggml-d99724f2-h200.sql", *arms, *maps]) == 0
    text = capsys.readouterr().out
    assert text.startswith("lp11-ggml on imported evidence, h200: GO.")
    for change in ("974.39 -> 92.82", "1112.42 -> 65.46", "1215.34 -> 66.92"):
        assert change in text
