"""Measured rows as evidence: which rows pair up, which are believed, and whether the gate stood before the samples."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lab.base import devices
from lab.card import history, phases
from lab.card.gate import Condition, Gate, Reading
from lab.check import families
from lab.judge import evidence, verdicts
from lab.judge.rules import judge
from lab.place import roofline
from lab.row import store
from lab.row.records import Measurement
from tests.loops import numbered, over
from tests.refused import refused
from tests.row.made import changed, measurement

H200 = devices.get("h200")


def row(arm: str, median_us: float | None, **more: Any) -> Measurement:
    base = {
        "arm": arm,
        "name": f"{arm}_kernel",
        "workload_id": "a",
        "started": "2026-11-20T10:00:00+00:00",
        "relative_error": 1e-3,
        "flops": 1e6,
        "bytes": 2**30,
        "pipe": "bf16",
        "l2": "cold",
        "calls": 3,
        "sd_pct": 0.1,
        "aa_pct": 0.2,
    }
    timed = {} if median_us is None else {"median_us": median_us, "n": 20}
    return measurement(**base | timed | more)


GATE = Gate(
    correctness=(Condition("relative_error", "<=", "ratio", 1e-2, workload="a"),),
    engaged=(Condition("engagements", ">", "launches", 0, workload="a"),),
    require=(Condition("kernel_us", "<", "%", 0, "change", "a"),),
)


def word(*rows: Measurement, gate: Gate = GATE) -> str:
    return judge(gate, evidence.readings(rows, H200)).word


def test_reading_of_two_good_rows() -> None:
    found = evidence.readings([row("control", 1000.0), row("candidate", 800.0)], H200)
    time = found["kernel_us", "a"]
    assert (time.control, time.candidate, time.unit, time.control_sd_pct, time.noise_pct) == (1000, 800, "us", 0.1, 0.2)
    assert time.ids == ("profiles/h200/toy/r1#control@a", "profiles/h200/toy/r1#candidate@a")
    assert found["engagements", "a"].candidate == 60
    assert found["relative_error", "a"].candidate == 1e-3
    share = found["roofline_fraction", "a"]
    assert share.control is not None
    assert share.candidate == pytest.approx(share.control * 1000 / 800)
    assert share.candidate == pytest.approx(2**30 / 4.8e12 / 800e-6, rel=0.02)  # the datasheet's 4.8 TB/s
    assert judge(GATE, found).word == "GO"


def test_errors_are_read_by_output_and_squared() -> None:
    """Rows from before outputs were told apart hold the largest error alone."""
    ours = row("candidate", 800.0, relative_error=3e-3, errors={"o": 3e-3, "state": 1e-3})
    theirs = row("control", 1000.0, relative_error=4e-3, errors={"o": 2e-3, "state": 4e-3})
    found = evidence.readings([theirs, ours], H200)
    assert (found["nmse of o", "a"].control, found["nmse of o", "a"].candidate) == pytest.approx((4e-6, 9e-6))
    assert found["relative_error of state", "a"].candidate == 1e-3
    assert found["nmse", "a"].candidate == pytest.approx(9e-6)
    assert ("nmse of o", "a") not in evidence.readings([row("control", 1000.0), row("candidate", 800.0)], H200)


def test_time_over_the_sequences_of_a_batch() -> None:
    of_eight = {"workload": {"batch": 8}}
    found = evidence.readings([row("control", 1000.0, **of_eight), row("candidate", 800.0, **of_eight)], H200)
    assert (found["sequence_us", "a"].control, found["sequence_us", "a"].candidate) == (125, 100)
    assert ("sequence_us", "a") not in evidence.readings([row("control", 1000.0), row("candidate", 800.0)], H200)


@over(
    numbered(
        [
            # the newest run that has both arms, whatever came before or after it
            ([("r1", 1000, 500), ("r2", 1000, 900)], (1000, 900)),
            ([("r1", 1000, 500), ("r2", None, 900)], (1000, 500)),
            ([("r2", None, 900), ("r1", 1000, 500)], (1000, 500)),
            # never one arm from each
            ([("r1", 1000, None), ("r2", None, 900)], (None, 900)),
            ([("r2", 1000, None), ("r1", None, 900)], (1000, None)),
        ]
    )
)
def test_arms_of_one_run(rows: list[tuple[str, Any, Any]], expected: tuple[Any, Any]) -> None:
    flat = [
        row(arm, float(us), run=run)
        for run, control, candidate in rows
        for arm, us in (("control", control), ("candidate", candidate))
        if us is not None
    ]
    reading = evidence.readings(flat, H200)["kernel_us", "a"]
    assert (reading.control, reading.candidate) == expected
    assert len({i.split("#")[0] for i in reading.ids}) == 1
    if None in expected:
        assert word(*flat) == "BLOCKED"


def test_a_run_with_both_arms_comes_before_a_newer_one_with_one() -> None:
    """Even where neither was judged: what is missing of it is then said of one run."""
    tried = [row("control", None, run="r1", status="oom"), row("candidate", 500.0, run="r1")]
    reading = evidence.readings([*tried, row("candidate", 900.0, run="r2")], H200)["kernel_us", "a"]
    assert (reading.control, reading.candidate) == (None, 500)


def test_workloads_pair_by_themselves_and_peers_are_no_arm() -> None:
    flat = [
        row("control", 1000.0),
        row("candidate", 900.0),
        row("control", 100.0, workload_id="b", run="r2", bytes=1e6),
        row("candidate", 90.0, workload_id="b", run="r2", bytes=1e6),
        row("peer", 1.0, run="r3"),
    ]
    found = evidence.readings(flat, H200)
    assert {k[1] for k in found} == {"a", "b"}
    assert found["kernel_us", "a"].candidate == 900
    assert found["kernel_us", "b"].candidate == 90


ACROSS = Gate(require=(Condition("kernel_us", "<=", "%", 3, "change", "b", against="a"),))


def over_runs(*found: tuple[str, str, float, str]) -> list[Measurement]:
    """Both arms for each (run, workload, candidate's us, config)."""
    return [
        row(arm, us, run=run, workload_id=workload, config=config)
        for run, workload, us, config in found
        for arm in ("control", "candidate")
    ]


def test_what_a_gate_compares_across_workloads_is_read_from_one_run() -> None:
    """The newest rows of "a" and "b" are of two runs, in one of which the device was slow; r1 held both."""
    rows = over_runs(("r1", "a", 1000.0, "x"), ("r1", "b", 1010.0, "x"), ("r2", "b", 1200.0, "x"))
    assert judge(ACROSS, evidence.readings(rows, H200)).word == "NO-GO"
    found = evidence.readings(rows, H200, [["a", "b"]])
    assert (found["kernel_us", "a"].candidate, found["kernel_us", "b"].candidate) == (1000.0, 1010.0)
    assert judge(ACROSS, found).word == "GO"


@over(
    numbered(
        [
            (rows,)
            for rows in [
                over_runs(("r1", "a", 1000.0, "x"), ("r1", "b", 1010.0, "old"), ("r2", "b", 1200.0, "x")),  # a former b
                over_runs(("r1", "a", 1000.0, "x"), ("r2", "b", 1200.0, "x")),  # no run holds both
                [
                    *over_runs(("r1", "a", 1000.0, "x"), ("r1", "b", 1010.0, "x"), ("r2", "b", 1200.0, "x")),
                    row("candidate", None, run="r1", workload_id="b", status="oom", config="x"),  # not judged there
                ],
            ]
        ]
    )
)
def test_a_run_that_does_not_answer_all_of_today_is_not_preferred(rows: list[Measurement]) -> None:
    found = evidence.readings(rows, H200, [["a", "b"]])
    assert (found["kernel_us", "a"].candidate, found["kernel_us", "b"].candidate) == (1000.0, 1200.0)


@pytest.mark.parametrize("arm", ["control", "candidate"])
def test_no_older_run_takes_back_that_an_arm_was_wrong(arm: str) -> None:
    """r1 held both workloads with this very launch and was right; r2 is not passed over for it."""
    rows = over_runs(("r1", "a", 1000.0, "x"), ("r1", "b", 1010.0, "x"))
    rows += [
        row(name, 1010.0, run="r2", workload_id="b", config="x") if name != arm
        else row(arm, None, run="r2", workload_id="b", config="x", status="incorrect", message="y: wrong")
        for name in ("control", "candidate")
    ]  # fmt: skip
    found = evidence.pairs(rows, [["a", "b"]])
    assert [one.status for one in found["b"] if one and one.arm == arm] == ["incorrect"]
    assert [one.run for one in found["a"] if one] == ["r1", "r1"]


def test_groups_are_of_workloads_that_a_condition_ties_together() -> None:
    assert phases.card("kv-fp8-limit").compared == []
    pages = phases.card("kv-page64").compared
    assert ["ctx8192_b8_hq24_hkv4_d256", "ctx8192_b8_hq24_hkv4_d256_p64"] in pages
    assert len(pages) == 4
    sawtooth = phases.card("kv-batch-sawtooth").compared
    assert sorted(w for group in sawtooth for w in group) == sorted(set(w for group in sawtooth for w in group))


@over(
    numbered(
        [
            (arm, status)
            for arm in ["control", "candidate"]
            for status in ["error", "oom", "timeout", "skipped", "suspect"]
        ]
    )
)
def test_row_that_is_not_ok_blocks(arm: str, status: str) -> None:
    other = "candidate" if arm == "control" else "control"
    broken = row(arm, 500.0 if status == "suspect" else None, status=status)
    assert word(broken, row(other, 1000.0)) == "BLOCKED"


def test_a_figure_that_is_not_there_says_the_cause() -> None:
    """The row's own status and message, or that nobody measured the workload, with the run; the word is the same."""
    lost = row("control", None, status="oom", message=f"in the timing: OutOfMemoryError {'x ' * 100}")
    pairs = evidence.pairs([lost, row("candidate", 800.0)])
    absent = evidence.absent(pairs, ("a", "b"))
    gate = Gate(require=(*GATE.require, Condition("kernel_us", "<", "%", 0, "change", "b", against="a")))
    found = evidence.readings([lost, row("candidate", 800.0)], H200)
    plain, said = judge(gate, found), judge(gate, found, absent=absent)
    assert plain.word == said.word == "BLOCKED"
    assert "kernel_us has no control arm" in plain.reason
    assert "kernel_us has no control: control_kernel is oom in run r1 (in the timing: OutOfMemoryError x" in said.reason
    assert said.observed.endswith("; kernel_us was not measured (newest run r1) at b")
    assert max(map(len, absent.values())) < 220
    ok = evidence.pairs([row("control", 1000.0), row("candidate", 800.0)])
    assert evidence.absent(ok, ("a",)) == {}
    assert evidence.absent(evidence.pairs([row("candidate", 800.0)]), ("a",)) == {"a": "has no row of the control"}
    assert evidence.absent({}, ("a",)) == {"a": "was not measured"}


def test_a_measured_verdict_says_why_a_figure_is_not_there() -> None:
    verdict = verdicts.judge_measured(phases.card("p5-cuda"), "h100").verdict
    assert verdict.word == "BLOCKED"
    assert "split_pipeline is oom in run 2026-11-27T084743Z (in the timing: OutOfMemoryError" in verdict.reason


def test_incorrect_row_is_invalid_where_correctness_is_asked() -> None:
    wrong = row("candidate", None, status="incorrect", relative_error=0.7, message="y: relative error 7.0e-01")
    rows = [row("control", 1000.0), wrong]
    assert evidence.readings(rows, H200)["kernel_us", "a"].candidate is None
    verdict = judge(GATE, evidence.readings(rows, H200))
    assert verdict.word == "INVALID"
    assert "candidate_kernel is incorrect: y: relative error 7.0e-01" in verdict.reason
    # NaN in the output leaves no error that a row could hold; an output near enough to pass this gate is still wrong.
    for error in (None, 1e-4):
        assert word(row("control", 1000.0), changed(wrong, relative_error=error)) == "INVALID"
    assert word(*rows, gate=Gate(require=GATE.require)) == "BLOCKED"


def test_correct_row_beyond_the_gate_is_invalid() -> None:
    assert word(row("control", 1000.0), row("candidate", 800.0, relative_error=2e-2)) == "INVALID"


# Blocks and runs ------------------------------------------------------------------------------------------------------

LUCK = [1.0, 1.3, 0.8, 1.1, 2.0, 1.0, 0.9]


def blocks(arm: str, us: float, luck: list[float] | None = None, **more: Any) -> Measurement:
    return row(arm, us, blocks_us=[us * one for one in luck or LUCK], **more)


def test_ratio_is_formed_within_a_block() -> None:
    """Blocks from a clock that wanders: the ratio of each is 0.9, the ratio of the medians is anything."""
    found = evidence.readings([blocks("control", 1000.0), changed(blocks("candidate", 900.0), median_us=1200.0)], H200)
    time = found["kernel_us", "a"]
    assert (time.control, time.candidate) == (1000, 1200)
    assert time.change_pct == pytest.approx(-10)
    assert time.interval_pct == pytest.approx((100 * (0.9 / 1.02 - 1), 100 * (0.9 * 1.02 - 1)))  # of one placement
    verdict = judge(GATE, found)
    assert verdict.word == "GO"
    assert "kernel_us -10.00 %" in verdict.reason
    assert "-11.76 to -8.20 % for one placement" in verdict.reason


@over(numbered([(missing,) for missing in ["control", "candidate", "both", "length"]]))
def test_no_interval_without_pairs_of_blocks(missing: str) -> None:
    """Blocks of two comparisons are no pairs, and the medians stand."""
    rows = [blocks("control", 1000.0), blocks("candidate", 800.0, LUCK[1:] if missing == "length" else None)]
    rows = [changed(one, blocks_us=None) if missing in (one.arm, "both") else one for one in rows]
    time = evidence.readings(rows, H200)["kernel_us", "a"]
    assert (time.change_pct, time.interval_pct) == (None, None)
    assert word(*rows) == "GO"


@over(numbered([(key,) for key in evidence.ALIKE]))
def test_arms_of_two_comparisons_decide_nothing(key: str) -> None:
    rows = [blocks("control", 1000.0), blocks("candidate", 800.0)]
    assert word(*rows) == "GO"
    verdict = judge(
        GATE, evidence.readings([rows[0], changed(rows[1], **{key: 4.0 if key == "rest" else "other"})], H200)
    )
    assert verdict.word == "BLOCKED"
    assert f"differ in {key} (" in verdict.reason


def test_a_run_of_another_protocol_supersedes_nothing_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest run is judged, as ever, where the card pins nothing; a card that does keeps to its own."""
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    card = phases.card("p3-kernel")
    for run, rest, us in (("r1", 4.0, 800.0), ("r2", 4.0, 700.0), ("r3", None, 600.0)):
        for arm, name, time in (("control", card.control, 1000.0), ("candidate", card.candidate, us)):
            one = row(
                arm, time, name=name, run=run, rest=rest, timer="graph", phase=card.id, workload_id=card.workloads[0]
            )
            store.append(tmp_path / "h200" / card.id / run, one)
    rows = store.rows("h200", card.id)
    free, pinned = replace(card, measure=phases.Protocol()), card
    for asks, us in ((free, 600.0), (pinned, 700.0)):
        judged = evidence.pairs(evidence.asked(rows, asks))[card.workloads[0]]
        assert [row.time_us for row in judged if row] == [1000.0, us]
    said = [verdicts.judge_measured(one, "h200").note for one in (free, pinned)]
    assert "not judged: runs by graph, cold L2, rest 4, of 1 workload" in said[0]
    assert "1 runs by another protocol than the card's are not judged" in said[1]
    assert evidence.asked([changed(row, brief=True) for row in rows], free) == []
    for pin in (phases.Protocol(timer="events"), phases.Protocol(l2="warm"), phases.Protocol(rest=1.0)):
        assert evidence.asked(rows, replace(card, measure=pin)) == []


def test_no_interval_for_an_arm_that_is_not_ok() -> None:
    rows = [blocks("control", 1000.0), blocks("candidate", 800.0, status="suspect")]
    assert evidence.readings(rows, H200)["kernel_us", "a"].interval_pct is None
    assert word(*rows) == "BLOCKED"


@over(numbered([(arm,) for arm in ["control", "candidate"]]))
def test_row_taken_under_a_profiler_says_so(arm: str) -> None:
    rows = [row("control", 1000.0), row("candidate", 800.0)]
    assert not evidence.readings(rows, H200)["kernel_us", "a"].profiled
    rows = [changed(one, profiled=one.arm == arm) for one in rows]
    assert evidence.readings(rows, H200)["kernel_us", "a"].profiled


def test_spread_over_runs_is_of_ratios_formed_within_each() -> None:
    """Three days: the machine was twice as slow on one of them, the ratio hardly moved; a run with one arm is none."""
    days = [("r1", 1000.0, 800.0), ("r2", 2000.0, 1620.0), ("r3", 1000.0, 790.0)]
    rows = [row(arm, us, run=run) for run, a, b in days for arm, us in (("control", a), ("candidate", b))]
    rows += [row("candidate", 1.0, run="r4"), row("control", None, run="r5", status="error")]
    rows += [row("control", 1000.0, workload_id="b"), row("candidate", 900.0, workload_id="b")]
    found = evidence.between_runs(rows)
    assert set(found) == {"a"}  # one run has no spread
    runs, sd_pct = found["a"]
    assert runs == 3
    assert sd_pct == pytest.approx(100 * 0.01 / 0.8, rel=0.01)
    former = [row("control", 1000.0, run="r0"), row("candidate", 400.0, run="r0", config="another launch")]
    assert evidence.between_runs(former + rows) == found


def test_a_composition_of_another_commit_launches_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config has the levers, and the kernels are other families'."""
    assert [families.composes(name) for name in families.names()].count(True) == 1
    both = [[row(arm, 1000.0, commit=c * 12) for arm in ("control", "candidate")] for c in "ab"]
    for composes in (False, True):
        monkeypatch.setattr(families, "composes", lambda name, found=composes: found)
        one, other = (evidence.launches((a, b)) for a, b in both)
        assert (one == other) != composes


# Faster than the device -----------------------------------------------------------------------------------------------

MEMORY_US = 2**30 / 4.8e12 * 1e6  # 223.7 us for 1 GiB
COMPUTE = {"flops": 1e12, "bytes": 1e3}  # about 1,000 us of bf16, no traffic


@over(
    numbered(
        [
            (MEMORY_US * 0.98, {}, True),
            (MEMORY_US * 0.98, {"status": "suspect"}, True),
            (MEMORY_US * 1.02, {}, False),
            (MEMORY_US * 1.02, {"status": "suspect"}, False),
            (MEMORY_US * 0.5, {"l2": "warm"}, False),  # the bytes may have come out of the cache
            (500.0, COMPUTE, True),
            (500.0, {**COMPUTE, "l2": "warm"}, True),  # arithmetic is not cached
            (2000.0, COMPUTE, False),
            (None, {"status": "error"}, False),
        ]
    )
)
def test_beyond_the_datasheet(median_us: float | None, more: dict[str, Any], caught: bool) -> None:
    fast = row("candidate", median_us, **more)
    said = roofline.beyond(H200, fast)
    assert bool(said) == caught, said
    if caught:
        assert all(part in said for part in ("candidate_kernel took", "us, under the", H200.name, "datasheet"))
        assert word(row("control", 5000.0), fast) == "INVALID"
        assert word(row("control", median_us, **more), row("candidate", 5000.0)) == "INVALID"


def test_rows_without_cost_are_not_called_impossible() -> None:
    assert roofline.beyond(H200, row("candidate", 1.0, bytes=None)) == ""


# Did the gate stand before the samples? -------------------------------------------------------------------------------

CARD = """id = "toy"
row = "LP17"
system = "killgate"
device = "h200"
title = "t"
question = "q"
hypothesis = "h"
null = "n"
control = "control_kernel"
candidate = "candidate_kernel"
workloads = ["a"]
limits = "l"
[gate]
source = "declared in this card"
[[gate.require]]
metric = "kernel_us"
compare = "change"
op = "<"
threshold = -5
unit = "%"
workload = "a"
[expected]
recovery = "r"
arithmetic = "a"
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A git repository with the card committed at 09:00, and records and evidence looking there; its kernels count."""
    monkeypatch.setattr(families, "former", lambda row: "")
    monkeypatch.setattr(history, "REPOSITORY", tmp_path)
    monkeypatch.setattr(store, "FOLDER", tmp_path / "profiles")
    git(tmp_path, "init", "--quiet")
    (tmp_path / "toy.toml").write_text(CARD)
    commit(tmp_path, "09:00")
    history._versions.cache_clear()
    yield tmp_path
    history._versions.cache_clear()


def test_rows_of_another_gpu_are_not_held_to_a_line_in_us() -> None:
    card = phases.card("w4a16-decode")
    us = Gate(require=(Condition("kernel_us", "<=", "us", 1e9),))
    given = {("kernel_us", ""): Reading("us", candidate=5.0)}
    for device, word in (("h200", "GO"), ("h100", "BLOCKED")):
        one = replace(card, gate=us)
        assert verdicts.judgement(one, given, "measured", device, None).verdict.word == word


def git(folder: Path, *arguments: str, time: str = "09:00") -> None:
    date = f"2026-11-20T{time}:00+00:00"
    names = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date, "GIT_CONFIG_GLOBAL": os.devnull}
    command = ["git", "-C", str(folder), *arguments]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **names, **dates})


def commit(folder: Path, time: str) -> None:
    git(folder, "add", "-A", time=time)
    git(folder, "commit", "--quiet", "--message", "x", time=time)


def measured_at(folder: Path, time: str, gate_hash: str | None = None) -> str:
    """Append both arms as measured at that time and return what the judge notes about the gate."""
    card = phases.load(folder / "toy.toml")
    for arm, us in (("control", 1000.0), ("candidate", 800.0)):
        started = f"2026-11-20T{time}:00+00:00"
        made = row(arm, us, run=f"r{time}", started=started, gate_hash=gate_hash or card.gate_hash)
        store.append(folder / "profiles" / "h200" / "toy" / f"r{time}", made)
    judged = verdicts.judge_measured(card, "h200")
    assert judged.verdict.word == "GO"
    assert (judged.evidence, judged.device, judged.agrees) == ("measured", "h200", None)
    return judged.note


def test_gate_committed_before_measuring(checkout: Path) -> None:
    assert measured_at(checkout, "10:00") == ""


def test_gate_committed_after_measuring(checkout: Path) -> None:
    text = CARD.replace("threshold = -5", "threshold = -4")
    (checkout / "toy.toml").write_text(text)
    commit(checkout, "11:00")
    note = measured_at(checkout, "10:00")
    assert note.startswith("gate changed after measuring: commit ")
    assert note.endswith("is younger than the samples")
    # A run after the commit is sound, and prose committed later changes nothing.
    (checkout / "toy.toml").write_text(text.replace('limits = "l"', 'limits = "more"'))
    commit(checkout, "13:00")
    history._versions.cache_clear()
    assert measured_at(checkout, "12:00") == "a: the ratio varies by 0.00 % over 2 runs"


def test_prose_committed_after_measuring(checkout: Path) -> None:
    (checkout / "toy.toml").write_text("# said better\n" + CARD.replace('question = "q"', 'question = "what?"'))
    commit(checkout, "11:00")
    assert measured_at(checkout, "10:00") == ""


def test_card_moved_after_measuring(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The history of a gate follows the file: `git log` of the new path alone would call a moved gate a changed one."""
    monkeypatch.setattr(phases, "FOLDER", checkout)
    (checkout / "moved").mkdir()
    (checkout / "toy.toml").rename(checkout / "moved" / "toy.toml")
    commit(checkout, "11:00")
    history._versions.cache_clear()
    card = phases.load(checkout / "moved" / "toy.toml")
    found = history.gate_commit(card)
    assert found is not None
    assert found[1].strftime("%H:%M") == "09:00"


def test_gate_edited_and_taken_back(checkout: Path) -> None:
    """The gate that the samples saw is the one before the edit; what stands now was committed after them."""
    (checkout / "toy.toml").write_text(CARD.replace("threshold = -5", "threshold = -50"))
    commit(checkout, "09:30")
    (checkout / "toy.toml").write_text(CARD)
    commit(checkout, "11:00")
    assert "is younger than the samples" in measured_at(checkout, "10:00")


def test_rows_of_a_workload_that_the_card_no_longer_asks_about_answer_to_an_older_gate(checkout: Path) -> None:
    older = {"started": "2026-11-20T10:00:00+00:00", "gate_hash": "0" * 12}
    for arm in ("control", "candidate"):
        made = row(arm, 1000.0, workload_id="moved_away", **older)
        store.append(checkout / "profiles" / "h200" / "toy" / "r09:00", made)
    assert measured_at(checkout, "10:00") == ""


def test_rows_with_another_gate_hash(checkout: Path) -> None:
    assert measured_at(checkout, "10:00", "0" * 12) == "gate changed after measuring: the rows carry another gate hash"


def test_outside_git_nothing_is_claimed(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "REPOSITORY", tmp_path_factory.mktemp("elsewhere"))
    path = tmp_path / "toy.toml"
    path.write_text(CARD)
    assert history.gate_commit(phases.load(path)) is None


def test_devices_with_rows(checkout: Path) -> None:
    measured_at(checkout, "10:00")
    assert store.measured_devices("toy") == ["h200"]
    assert store.measured_devices("p5") == []
    store.refuse_unmeasured("toy", "h200")
    with refused("profiles/gb10/toy", remedy="lab measure toy"):
        store.refuse_unmeasured("toy", "gb10")


def test_control_of_a_block_is_the_mean_of_its_two_selves() -> None:
    """The control's buffers lie well, its second self's lie badly; the ratio is to neither alone."""
    control = row("control", 95.0, blocks_us=[95.0] * 5, again_blocks_us=[105.0] * 5)
    candidate = row("candidate", 80.0, blocks_us=[80.0] * 5)
    found = evidence.change_pct(control, candidate)
    assert found == pytest.approx((-20, -20, -20))
    assert evidence.change_pct(changed(control, again_blocks_us=[105.0] * 4), candidate) is None


def test_what_was_never_timed_says_nothing_of_its_launches() -> None:
    """An arm without room in memory is no arm that engaged zero times."""
    for us, status in ((9.0, "ok"), (None, "oom")):
        found = evidence.readings([row("control", 10.0), row("candidate", us, status=status)], devices.get("h200"))
        assert (("engagements", "a") in found) == (status == "ok")
