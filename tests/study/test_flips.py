"""The flip map: the three terms by hand, what counts as a flip, what the file may hold, and the committed pairs."""

from dataclasses import replace
from pathlib import Path

import pytest

from kernels.common import Cost
from lab.base import devices
from lab.base.errors import BadInput
from lab.card import phases
from lab.check import families
from lab.cli import main
from lab.judge import verdicts
from lab.row import store
from lab.study import flips
from lab.study.flips import Bound, Flip
from tests.loops import numbered, over

GB10, H200 = devices.get("gb10"), devices.get("h200")
families.interpret_on_cpu()
ROWS = {"LP1", "LP6", "LP9", "LP10", "LP11", "LP12", "LP13", "LP16", "LP17", "LP18", "DS1", "DS2"}


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
    flip = Flip(
        "LP1", "q", "p", "c", "w", "gb10", "h200", there, here, placed, {"gb10": -50.0, "h200": 0.0}, None, "", ""
    )
    return replace(flip, **more)  # type: ignore[arg-type]


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


def test_half_the_state_is_half_the_bound_on_both(committed: list[Flip]) -> None:
    flip = by_card(committed, "lp13-kernel")
    assert flip.expected_pct == pytest.approx({"gb10": -50, "h200": -50}, abs=1)
    assert flip.measured_pct is not None
    assert -55 < flip.measured_pct < -40  # the candidate's own rows at two workloads


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


@pytest.mark.parametrize(
    ("errors", "said"),
    [((0.034, 0.0017), ", error 0.17 % instead of 3.4 % |"), ((0.0019, 0.0017), ""), ((), "")],
)
@pytest.mark.slow
def test_a_price_in_accuracy_stands_beside_the_time(errors: tuple[float, ...], said: str) -> None:
    flip = next(f for f in flips.flips() if f.front and f.card == "p3-kernel")
    assert flip.errors[0] > 2 * flip.errors[1]
    table = flips.readme("\n".join(flips.MARKS), [replace(flip, errors=errors)])
    assert ("error" in table) == bool(said)
    assert said in table


def test_without_rows_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    bare = flips.flips()
    assert {(flip.word_here, flip.flips, flip.measured_pct) for flip in bare} == {("", "", None)}
    table = flips.readme("\n".join(flips.MARKS), bare)
    assert table.count("| not measured yet |  |") == sum(flip.front for flip in bare) > 0
    assert " %" not in table


# The README's table ---------------------------------------------------------------------------------------------------


def test_the_readme_says_what_the_judge_says(committed: list[Flip]) -> None:
    """Each word and each figure of its table; `lab write --readme` makes it again after a measurement."""
    text = flips.README.read_text(encoding="utf-8")
    assert flips.readme(text, committed) == text
    shown = text[text.index(flips.MARKS[0]) : text.index(flips.MARKS[1])]
    for flip in (flip for flip in committed if flip.front and flip.word_here):
        measured = verdicts.judge_measured(phases.card(flip.card), "h200").verdict.word
        assert f"| {measured} (h200) |" in next(line for line in shown.splitlines() if f"`{flip.card}` |" in line)


def test_a_word_of_another_question_and_a_change_of_no_standing_are_left_out() -> None:
    marks = "\n".join(flips.MARKS)
    line = flips.readme(marks, [a_flip("GO", "NO-GO", front=True, measured_pct=12.4)]).splitlines()[3]
    assert line == "| LP1 | q | GO (gb10) | NO-GO (h200) | +12 % at `w` | `c` |"
    other = a_flip("GO", "INVALID", front=True, measured_pct=12.4, asks_otherwise="there end to end")
    assert flips.readme(marks, [other]).splitlines()[3] == (
        "| LP1 | q (there end to end) |  | INVALID (h200) |  | `c` |"
    )
    assert flips.readme(marks, [a_flip("GO", "GO")]).count("\n") == 3  # not marked for the front
    with pytest.raises(BadInput, match="are not there in this order"):
        flips.readme("no marks", [])


@pytest.mark.slow
def test_lab_write_readme_changes_the_table_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / "README.md"
    stale.write_text("before\n" + flips.MARKS[0] + "\nold\n" + flips.MARKS[1] + "\nafter\n")
    monkeypatch.setattr(flips, "README", stale)
    assert main.main(["write", "--readme"]) == 0
    text = stale.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "`lp11-kernel`" in text
    assert "old" not in text
    assert main.main(["write"]) == main.main(["write", "p5", "--readme"]) == 2
    assert "needs one card id, or --readme or --notes alone" in capsys.readouterr().err


# What the file may hold -----------------------------------------------------------------------------------------------

ENTRY = 'recorded = "lp.v.p3"\ncard = "lp11-kernel"\nworkload = "m128_n5120_k6144"\nquestion = "q"\n'


WHAT_THE_FILE_MAY_NOT_HOLD_CASES: list[tuple[str, str]] = [
    (ENTRY + "control_walk = 2\n", 'unknown key "control_walk"; did you mean "control_walks"?'),
    (ENTRY.replace('question = "q"\n', ""), 'key "question" is missing'),
    (ENTRY + 'control_walks = "2"\n', "control_walks = '2'"),
    (ENTRY + "control_launches = 0\n", "control_launches = 0"),
    (ENTRY + "why = 3\n", "why = 3"),
    (ENTRY + "front = 1\n", "front = 1"),
    (ENTRY + "control_walks = true\n", "control_walks = True"),
    (ENTRY.replace("lp.v.p3", "lp.v.p33"), 'no verdict has the id "lp.v.p33"; did you mean'),
    (ENTRY.replace("lp11-kernel", "lp11-kernle"), 'did you mean "lp11-kernel"?'),
    (ENTRY.replace("m128_n5120", "m128_n5121"), "no workload has the id"),
    (ENTRY + 'candidate = "w4a17"\n', "w4a17"),
]


def test_what_the_file_may_not_hold(tmp_path: Path) -> None:
    @over(numbered(WHAT_THE_FILE_MAY_NOT_HOLD_CASES))
    def each(text: str, said: str) -> None:
        path = tmp_path / "flips.toml"
        path.write_text("[[flip]]\n" + text)
        with pytest.raises((BadInput, ValueError)) as refused:
            flips.flips(path=path)
        assert said in str(refused.value)

    each()


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
