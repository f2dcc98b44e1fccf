"""Arrivals: a burst says nothing about a scheduler whose benefit needs requests that come while others are decoding.

A figure carries how its load arrived, and a gate may ask for one way. What was taken under another way, or does not
say, is no evidence for that gate: BLOCKED, never GO and never NO-GO. Checked on the recorded figures, on measured rows
and on files of other people's tools.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lab.base import devices
from lab.card import phases, recorded
from lab.card.gate import WEIGHED, Condition, Gate, Reading, arrival_of
from lab.judge import evidence
from lab.judge.rules import judge
from lab.row.records import Measurement
from tests.loops import numbered, over
from tests.row.made import measurement
from tests.study.interop_samples import BATCHED, LLAMA, Capture, card, condition, files, judged, old_new

Key = tuple[str, str]
ASKING = [
    (card, case)
    for card in phases.cards().values()
    for case in card.recorded
    if case.evidence and any(c.arrival for _, c in card.gate.conditions())
]


def with_arrival(arrival: str, card: phases.Card, evidence: Mapping[Key, Reading]) -> dict[Key, Reading]:
    """The evidence with the arrivals of everything that the gate asks them of replaced."""
    asked = {(c.metric, c.workload) for _, c in card.gate.conditions() if c.arrival}
    return {key: replace(r, arrival=arrival) if key in asked else r for key, r in evidence.items()}


def indifferent(gate: Gate) -> Gate:
    """The same gate without a word about arrivals: what the check keeps from happening."""
    return replace(
        gate,
        kill=tuple(replace(c, arrival="") for c in gate.kill),
        require=tuple(replace(c, arrival="") for c in gate.require),
    )


# Recorded -------------------------------------------------------------------------------------------------------------


def test_there_are_cards_that_ask() -> None:
    assert {"lp.v.p4-measured", "lp.v.patch-0016", "lp.v.patch-0013-rerun-dense"} <= {
        case.verdict.id for _, case in ASKING
    }
    asked = {c.arrival for role, c in phases.card("lp3").gate.conditions() if role in WEIGHED}
    assert asked == {"staggered"}
    assert {c.arrival for _, c in phases.card("lp3-burst").gate.conditions()} == {"burst"}


def burst(pair: str, unit: str) -> Reading:
    """A pair of the head-to-head's figures, whose requests all came at once, as the card's loader would make it."""
    control, candidate = (recorded.figure(f"lp.h2h.{pair}.{arm}") for arm in ("control", "candidate"))
    assert {control.unit, candidate.unit} == {unit}
    return Reading(
        unit,
        control=float(control.value),
        candidate=float(candidate.value),
        ids=(control.id, candidate.id),
        arrival=arrival_of(f.arrival for f in (control, candidate)),
    )


def test_burst_figures_do_not_decide_the_staggered_gate() -> None:
    """Patch 0016's gate offered the waits of a burst: they would have killed it."""
    lp3 = phases.card("lp3")
    (case,) = (case for case in lp3.recorded if case.verdict.id == "lp.v.patch-0016")
    offered = {
        **case.evidence,
        ("ttft_mean", "dense-n64"): burst("dense.npl64.ttft", "ms"),
        ("ttft_mean", "dense-n32"): burst("dense.npl32.ttft", "ms"),
        ("ttft_mean", "moe-n64"): burst("moe.npl64.ttft", "ms"),
    }
    assert judge(lp3.gate, case.evidence).word == "GO"
    assert judge(indifferent(lp3.gate), offered).word == "NO-GO"
    verdict = judge(lp3.gate, offered)
    assert verdict.word == "BLOCKED"
    assert "ttft_mean was taken under burst arrivals; the gate asks staggered" in verdict.reason


def test_p4s_own_burst_rows_do_not_decide_it(tmp_path: Path) -> None:
    """P4 measured its loads both ways; a card that binds the burst rows by mistake gets no verdict from them."""
    text = phases.card("p4").path.read_text()
    for staggered, at_once in (
        ("p4.ttft-p50-n128.delta", "p4.burst-ttft-p50-n128.delta"),
        ("p4.aggregate-n128.delta", "p4.burst-aggregate-n128.delta"),
    ):
        assert text.count(staggered) == 1
        text = text.replace(staggered, at_once)
    path = tmp_path / "p4.toml"
    path.write_text(text)
    loaded = phases.load(path)
    (case,) = (case for case in loaded.recorded if case.verdict.id == "lp.v.p4-measured")
    assert judge(loaded.gate, case.evidence).word == "BLOCKED"
    assert judge(indifferent(loaded.gate), case.evidence).word == "NO-GO"


@over(numbered([(*case0, other) for case0 in ASKING for other in ["", "another", "burst and staggered"]]))
def test_other_arrivals_block(asking: phases.Card, case: phases.RecordedCase, other: str) -> None:
    missing = {(c.metric, c.workload) for _, c in asking.gate.conditions()} - case.evidence.keys()
    runs = [f for f in judge(asking.gate, case.evidence).findings if f.role == "complete" and f.state == "fails"]
    verdict = judge(asking.gate, with_arrival(other, asking, case.evidence))
    assert verdict.word == "BLOCKED"
    assert missing or runs or any(f.state == "arrival" for f in verdict.decisive)


def test_traffic_is_read_as_arrival() -> None:
    """P4's rows use the source's word."""
    assert recorded.figure("lp.gate.p4.ttft-p50-n32.control").arrival == "staggered"
    assert recorded.figure("lp.gate.p4.burst-ttft-p50-n128.delta").arrival == "burst"
    assert recorded.figure("lp.h2h.moe.npl8.ttft.control").arrival == "burst"
    assert recorded.figure("lp.patch-0018.gb10.decode-agg.peer-vllm.npl128").arrival == ""


# The judge ------------------------------------------------------------------------------------------------------------


def gate(arrival: str, **more: Any) -> Gate:
    return Gate(require=(Condition("decode_tps", ">", "%", 0, "change", arrival=arrival),), **more)


def tps(arrival: str, candidate: float = 110, **more: Any) -> dict[Key, Reading]:
    return {("decode_tps", ""): Reading("tok/s", control=100, candidate=candidate, arrival=arrival, **more)}


@over(
    numbered(
        [
            (*case0, candidate)
            for case0 in [
                ("", "", "GO"),
                ("", "burst", "GO"),
                ("staggered", "staggered", "GO"),
                ("burst", "burst", "GO"),
                ("staggered", "burst", "BLOCKED"),
                ("burst", "staggered", "BLOCKED"),
                ("staggered", "", "BLOCKED"),
                ("", "burst and staggered", "BLOCKED"),
                ("staggered", "burst and staggered", "BLOCKED"),
            ]
            for candidate in [110, 90]
        ]
    )
)
def test_asked_and_taken(asked: str, taken: str, word: str, candidate: float) -> None:
    decided = "GO" if candidate > 100 else "NO-GO"
    assert judge(gate(asked), tps(taken, candidate)).word == (decided if word == "GO" else word)


def test_sentences() -> None:
    assert judge(gate("staggered"), tps("burst")).reason == (
        "evidence incomplete: decode_tps was taken under burst arrivals; the gate asks staggered, "
        "gate decode_tps change > 0 % under staggered arrivals: another load"
    )
    assert "does not say under which arrivals it was taken" in judge(gate("staggered"), tps("")).reason
    assert "which is no comparison" in judge(gate(""), tps("burst and staggered")).reason


def test_what_is_wrong_comes_before_what_does_not_apply() -> None:
    assert judge(gate("staggered"), tps("burst", withdrawn="stale")).word == "INVALID"
    assert judge(gate("staggered"), {("decode_tps", ""): Reading("ms", 100, 110, arrival="burst")}).word == "INVALID"
    wrong = gate("staggered", correctness=(Condition("nmse", "<=", "nmse", 1e-3),))
    assert judge(wrong, {**tps("burst"), ("nmse", ""): Reading("nmse", candidate=1)}).word == "INVALID"


def test_both_figures_of_a_comparison_between_metrics() -> None:
    against = Gate(require=(Condition("decode_tps", ">", "tok/s", than="decode_tps_stock", arrival="burst"),))
    base = Reading("tok/s", candidate=90, arrival="staggered")
    assert judge(against, {**tps("burst"), ("decode_tps_stock", ""): base}).word == "BLOCKED"
    same = replace(base, arrival="burst")
    assert judge(against, {**tps("burst"), ("decode_tps_stock", ""): same}).word == "GO"


@over(
    numbered(
        [
            ([], ""),
            (["burst"], "burst"),
            (["burst", "burst"], "burst"),
            (["burst", ""], ""),
            (["", ""], ""),
            (["staggered", "burst"], "burst and staggered"),
            (["staggered", "", "burst"], "burst and staggered"),
        ]
    )
)
def test_arrivals_of_several_figures(words: list[str], together: str) -> None:
    assert arrival_of(words) == together


def test_a_gate_asks_of_what_it_weighs_and_a_claim_for_itself() -> None:
    p4, lp3 = phases.card("p4"), phases.card("lp3")
    assert {role for role, c in p4.gate.conditions() if c.arrival == "staggered"} == {"require", "kill"}
    assert {c.arrival for role, c in p4.gate.conditions() if role == "complete"} == {""}
    assert all(c.arrival == "staggered" for claim in lp3.claims for c in claim.require)


# Measured rows --------------------------------------------------------------------------------------------------------

H200 = devices.get("h200")


def row(arm: str, median_us: float, **workload: Any) -> Measurement:
    return measurement(**{
        "device": "h200", "phase": "toy", "family": "any", "arm": arm, "name": arm, "precision": "bf16",
        "workload_id": "a", "workload": workload, "status": "ok", "run": "r1", "median_us": median_us, "n": 20,
        "relative_error": 1e-3, "flops": 1e6, "bytes": 2**20, "pipe": "bf16", "l2": "cold",
    })  # fmt: skip


@over(
    numbered(
        [
            ("staggered", "staggered", "GO"),
            ("burst", "burst", "BLOCKED"),
            ("burst", "staggered", "BLOCKED"),
            (None, None, "BLOCKED"),
            ("staggered", None, "BLOCKED"),
        ]
    )
)
def test_measured_rows(control: str | None, candidate: str | None, word: str) -> None:
    arms = (("control", 1000.0, control), ("candidate", 800.0, candidate))
    rows = [row(arm, us, **({"arrival": a} if a else {})) for arm, us, a in arms]
    asks = Gate(require=(Condition("kernel_us", "<", "%", 0, "change", "a", arrival="staggered"),))
    assert judge(asks, evidence.readings(rows, H200)).word == word
    share = Gate(require=(Condition("roofline_fraction", ">", "ratio", 0, workload="a", arrival="staggered"),))
    assert judge(share, evidence.readings(rows, H200)).word == word


# Other people's files -------------------------------------------------------------------------------------------------


def asking(tmp_path: Path, arrival: str, workload: str) -> Path:
    path = card(tmp_path, [workload], condition("decode_tps", ">", 5, workload))
    path.write_text(path.read_text().replace("[gate]\n", f'[gate]\narrival = "{arrival}"\n'))
    return path


def test_llama_batched_bench_is_a_burst(tmp_path: Path, capsys: Capture) -> None:
    flags = files(tmp_path, BATCHED)
    workload = "npl32_npp128"
    plain = judged(capsys, card(tmp_path, [workload], condition("decode_tps", ">", 5, workload)), *flags)
    assert plain["verdict"] in ("GO", "NO-GO")
    assert judged(capsys, asking(tmp_path, "burst", workload), *flags)["verdict"] == plain["verdict"]
    found = judged(capsys, asking(tmp_path, "staggered", workload), *flags)
    assert found["verdict"] == "BLOCKED"
    assert "decode_tps was taken under burst arrivals; the gate asks staggered" in found["reason"]


def test_a_file_may_state_its_arrivals(tmp_path: Path, capsys: Capture) -> None:
    staggered = asking(tmp_path, "staggered", "tg128")
    assert judged(capsys, staggered, *files(tmp_path, LLAMA))["verdict"] == "BLOCKED"
    said = {
        word: old_new('{"build_commit"', f'{{"arrival": "{word}", "build_commit"') for word in ("staggered", "burst")
    }
    same = files(tmp_path, LLAMA, said["staggered"], said["staggered"])
    assert judged(capsys, staggered, *same)["verdict"] == "GO"
    found = judged(capsys, staggered, *files(tmp_path, LLAMA, said["staggered"], said["burst"]))
    assert found["verdict"] == "BLOCKED"
    assert "burst and staggered arrivals" in found["reason"]
