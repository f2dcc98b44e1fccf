"""The audit: every check where it fires and where it must not, on the record and on measured rows.

The numbers here were taken from the sources' tables by hand; the audit computes its own from figures by id.
"""

import csv
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from lab.base.errors import BadInput
from lab.card import phases, recorded
from lab.cli import main
from lab.study.audit import bindings, checks, run
from lab.study.audit.subject import SEVERITIES, Finding
from tests.loops import numbered, over
from tests.refused import held, refused


@pytest.fixture(scope="module")
def whole() -> run.Audit:
    return run.audit()


def finding(result: run.Audit, check: str, title: str) -> Finding:
    (found,) = [f for f in result.findings if f.check == check and f.subject == title]
    return found


# The record: check, subject, severity, what the sentence must contain -------------------------------------------------

HIP_SPREAD = ["5.39", "9.08", "7.07"]
FIRES: list[tuple[str, str, str, list[str]]] = [
    ("zero-engagement", "P2's KL delta", "void", ["engaged 0 times", "kl_delta of 0 kld"]),
    ("zero-engagement", "p1-dense: engagements", "void", ["engaged 0 times"]),
    ("zero-engagement", "p2-structural: engagements", "void", ["engaged 0 times"]),
    ("incomplete-arms", "p4: runs_complete", "void", ["30 of 60"]),
    (
        "claim-inside-noise",
        "p1: prefill gain, prefill_tps at built",
        "inconclusive",
        ["+1.99 %", "2315.52 -> 2361.67", "the floor is 2 %"],
    ),
    ("launch-drift", "GDN decode phase 79: BV32", "unsound", ["+1.04 %", "600 and 570", "+6.36 %", "becomes higher"]),
    ("launch-drift", "GDN decode phase 81: BF16 S-cache", "unsound", ["-38.29 %", "599 and 720", "-48.66 %"]),
    ("launch-drift", "GDN decode phase 87: geometry 4x8", "unsound", ["+1.91 %", "598 and 569", "+7.10 %"]),
    (
        "launch-drift",
        "GDN decode phase 93: grouped Q/K broadcast",
        "overturned",
        ["-4.10 %", "598 and 570", "+0.61 %", "lower becomes within noise"],
    ),
    ("launch-drift", "GDN decode phase 94: 8x8 on phase 93", "unsound", ["+8.05 %", "570 and 600", "+2.64 %"]),
    ("launch-drift", "GDN decode phase 95: warp scalar gate", "overturned", ["+5.17 %", "570 and 599", "+0.08 %"]),
    ("launch-drift", "GDN decode phase 96: conv-state identity", "overturned", ["+5.48 %", "570 and 600", "+0.21 %"]),
    (
        "between-session-noise",
        "phase 104: decode of the combined layout clean-up against the run of phase 97",
        "inconclusive",
        ["+0.90 %", "14 sessions", "mean 668.7", "645.3 to 714", "CV 3.57 %", "10.7 %"],
    ),
    ("identical-path-spread", "HIP cycle 9: tile override", "inconclusive", ["+2.08 %", *HIP_SPREAD]),
    ("identical-path-spread", "HIP cycle 10: HIP graphs", "inconclusive", ["-0.73 %", *HIP_SPREAD]),
    ("identical-path-spread", "HIP cycle 13: MMF lift", "inconclusive", ["-2.78 %", *HIP_SPREAD]),
    (
        "profiled-throughput",
        "phase 138: down-MMQ finalize",
        "unsound",
        ["332.7 and 333.5 tok/s", "668.7", "2.01 times"],
    ),
    ("profiled-throughput", "phase 139: the serving noise floor", "unsound", ["330.1 tok/s", "2.03 times"]),
    (
        "blind-sentinel",
        "P2's sentinel, which repeats the down product",
        "void",
        ["about 0.1 % of the timed region", "the 5 % asked", "0.005 %", "2 %"],
    ),
    (
        "denominator-changed",
        "P1's share of convert and concat",
        "overturned",
        ["-50 %", "4.83 to 4.4 %", "-8.9 %", "960 of 960"],
    ),
    (
        "gate-fails-control",
        "P1's same-top-p of 84 %",
        "inconclusive",
        [">= 84 %", "83.725", "0.48 standard errors", "0.578"],
    ),
    ("gate-fails-control", "L4: KL for NVFP4 projections", "inconclusive", ["< 0.06 kld", "0.137"]),
    (
        "threshold-inside-band",
        "the pin of a peak day and its line",
        "inconclusive",
        ["277.8 tok/s", "286.4 less 3 %", "266 to 278"],
    ),
    (
        "threshold-inside-band",
        "the graphs gate against its own table",
        "inconclusive",
        ["1.3 x", "1.2 to 2.38", "of 4 values it fails 1"],
    ),
    (
        "kernel-from-wall",
        "the program's prefill after P1",
        "unsound",
        ["8.44 us/tok of wall time", "431.87 -> 423.43", "395.9 us/tok of kernel", "387.5"],
    ),
    (
        "label-drift",
        "the GDN bucket that P5 was scoped on",
        "unsound",
        ["95.7", "68.09", "gdn_core", "GDN total, 95.81", "36.5 is 2.62", "1.87"],
    ),
    (
        "impossible-speed",
        "the scoreboard row of Gemma-3-12B of 2026-05-28",
        "void",
        ["1588.14 tok/s", "about 7 GB", "11.1 TB/s", "1.79 TB/s", "6.2 times"],
    ),
    (
        "withdrawn-reused",
        "the batch-8 step time, were it offered as evidence again",
        "void",
        ["471 ms/step", "artifact"],
    ),
    ("stated-not-shown", "lp9: its evidence", "inconclusive", ["token_mismatches", "said and not shown (line 86)"]),
    ("later-defect", "lb2-chunked: its evidence", "void", ["mask fault", "lucebox Gemma 4 notes, lines 25 and 115"]),
    ("later-defect", "lp12: its evidence", "overturned", ["67 %", "28 %", "line 78"]),
    ("later-defect", "lb8-draft-q8: its evidence", "inconclusive", ["before the mask and ring repairs"]),
    (
        "gate-cannot-decide",
        "a line that is the result: ds3's gap to the weight server",
        "unsound",
        ["0.5 %", "is the figure"],
    ),
    (
        "policy-on-artefact",
        "ds4's bandwidth tiers, from the first GB10 table",
        "void",
        ["800 GB/s and 200 GB/s", "mmq 114 later read 458 (4.0 times)", "warp8 40 later read 56"],
    ),
]
QUIET = [
    ("zero-engagement", "P1's build-out"),
    ("incomplete-arms", "P4's completed run"),
    ("claim-inside-noise", "lp11: decode_tps at dense-npl128"),
    ("launch-drift", "GDN decode phase 80: identity ids"),  # 600 -> 600
    ("launch-drift", "GDN decode phase 91: PACK=2"),  # 598 -> 598
    ("launch-drift", "GDN decode phase 92: store-fused"),  # 598 -> 600: 10.01 % raw, 9.64 % per launch
    ("between-session-noise", "phase 62: decode with MTP drafts"),  # -78.7 %
    ("identical-path-spread", "HIP cycle 14: Q8_0 drafter"),  # +6.62 % against 5.39 %
    ("profiled-throughput", "phase 104: combined layout clean-up"),
    ("blind-sentinel", "P5's gate, seen in the kernel time of a prefill"),  # 24.2 % of it, 10 % asked
    ("denominator-changed", "phase 102: concat layout time, counted as a whole"),  # -98.95 %
    ("gate-fails-control", "p3: kl"),
    ("threshold-inside-band", "the fallback's ratio against the same table"),  # 1.0 under 1.2
    ("kernel-from-wall", "P1's saving within its own clock"),
    ("label-drift", "P5's control in two tables"),
    ("impossible-speed", "the scoreboard row of Gemma-3-12B of 2026-07-12"),  # 74.33 tok/s
    ("withdrawn-reused", "the same number where it is track B's control"),
    ("stated-not-shown", "ds3-arena: its evidence"),
    ("later-defect", "p4: its evidence"),  # the placeholders are bound nowhere
    ("gate-cannot-decide", "lp1: decode_step"),
    ("policy-on-artefact", "ds4's mmq default, from the later GB10 table"),
    ("policy-on-artefact", "ds4's bandwidth tiers, from the PRO 6000 table"),  # 1078 -> 1092: 1.3 %
]


def test_fires_on_the_record(whole: run.Audit) -> None:
    for check, title, severity, words in FIRES:
        found = finding(whole, check, title)
        assert [w for w in words if w not in found.sentence] == [], (check, title, found.sentence)
        assert (found.severity, found.evidence) == (severity, "recorded"), (check, title)
        assert found.figures, (check, title)


def test_keeps_quiet_on_the_record(whole: run.Audit) -> None:
    quiet = {check: {s.title for s in whole.quiet(check)} for check, _ in QUIET}
    assert [(check, title) for check, title in QUIET if title not in quiet[check]] == []


def test_every_check_has_both_cases() -> None:
    assert {c for c, *_ in FIRES} == {c for c, _ in QUIET} == set(run.CHECKS)
    in_cards = {"incomplete-arms", "claim-inside-noise", "stated-not-shown", "later-defect"}
    assert {c for c, _ in BOUND} == set(run.CHECKS) - in_cards


def test_launch_drift_is_the_seven_phases_of_the_record(whole: run.Audit) -> None:
    fired = {int(n) for f in whole.findings if (n := "".join(re.findall(r"^GDN decode phase (\d+)", f.subject)))}
    assert fired == {79, 81, 87, 93, 94, 95, 96}


def test_launches_are_those_of_the_breakdowns() -> None:
    """The counts behind the re-scoring stand in two tables of the source."""
    with (recorded.FOLDER / "breakdowns.csv").open(newline="") as handle:
        rows = [r for r in csv.DictReader(handle) if r["kernel_name"] == "gdn_core" and r["instances"]]
    counted = {(r["trace_id"].split("_")[1], float(r["window_ms"])): float(r["instances"]) for r in rows}
    seen = 0
    for n in (81, 83, 84, 85, 87, 91, 92, 93, 94, 95, 96):
        for arm in ("control", "candidate"):
            base = f"lp.gate.phase-{n}.gdn-core-time"
            time = recorded.figure(f"{base}.{arm}").value
            assert recorded.figure(f"{base}.launches.{arm}").value == counted[f"ph{n}", float(time)]
            seen += 1
    assert seen == 22


def test_launch_rule_of_phase_141_follows_from_its_runs() -> None:
    """Five runs of one binary: raw time varies by 2.146 %, time per launch by 0.229 %."""
    with (recorded.FOLDER / "breakdowns.csv").open(newline="") as handle:
        rows = [
            r
            for r in csv.DictReader(handle)
            if r["trace_id"].startswith("bench_ph141_run") and r["kernel_name"] == "gdn_core"
        ]
    raw = [float(r["window_ms"]) for r in rows]
    each = [float(r["window_ms"]) / float(r["instances"]) for r in rows]
    assert len(rows) == 5
    for values, name in ((raw, "cv"), (each, "per-launch.cv")):
        stated = float(recorded.figure(f"lp.gate.phase-141.gdn-core-time.{name}").value)
        assert 100 * statistics.stdev(values) / statistics.fmean(values) == pytest.approx(stated, abs=2e-3)  # fmt: skip


def test_sessions_are_fourteen_runs_of_one_setting() -> None:
    sessions = [f for i, f in recorded.figures().items() if i.startswith("lp.sessions.default-npl128.")]
    assert len(sessions) == 14
    assert {(f.params["npl"], f.params["npp"], f.params["ntg"]) for f in sessions} == {(128, 128, 64)}
    assert not any(f.params.get("profiled") for f in sessions)


BOUND = sorted({(c.name, s.title) for c, s in bindings.read(run.CHECKS)} & {(c, t) for c, t, *_ in FIRES})


def test_numbers_come_from_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Altering a figure alters the sentence, or takes the finding away: none of its numbers is typed."""
    asked = {(c.name, s.title): s for c, s in bindings.read(run.CHECKS)}
    unmoved: list[tuple[str, str, str]] = []
    for check, title in BOUND:
        subject = asked[check, title]
        said = run.ask(run.CHECKS[check], subject)
        assert said is not None, title
        for figure in (
            q.id for role in subject.roles.values() for q in role if q.value and recorded.figures().get(q.id)
        ):
            roles = {
                role: tuple(structs.replace(q, value=1.5 * q.value) if q.id == figure else q for q in quantities)
                for role, quantities in subject.roles.items()
            }
            after = run.ask(run.CHECKS[check], replace(subject, roles=roles))
            unmoved += [(check, title, figure)] if after and after.sentence == said.sentence else []
    assert unmoved == []
    more = {
        i: structs.replace(f, value=1.5 * f.value) if isinstance(f.value, float) else f
        for i, f in recorded.figures().items()
    }
    monkeypatch.setattr(recorded, "figures", lambda: more)
    for bound, again in bindings.read(run.CHECKS):
        was = asked[bound.name, again.title].roles
        for role, quantities in again.roles.items():
            for q, before in zip(quantities, was[role], strict=True):
                assert q.value == (1.5 * before.value if q.id in more else before.value), (again.title, role)


# Bindings, the command and the page -----------------------------------------------------------------------------

CASE = '[[case]]\ncheck = "zero-engagement"\ntitle = "t"\n'
ENGAGED = 'engaged = "lp.p2.gb10.engagement.candidate"\n'


BAD_BINDINGS_CASES: list[tuple[str, list[str], str]] = [
    ('[[case]]\ncheck = "zero-engagement"\n', ['"title"'], ""),
    ('[[case]]\ncheck = "zero-engagment"\ntitle = "t"\n', ["zero-engagment"], "zero-engagement"),
    (CASE, ["needs engaged"], ""),
    (CASE + 'engagd = "lp.p2.gb10.engagement.candidate"\n', ["engagd"], "engaged"),
    (CASE + 'engaged = "lp.p2.gb10.engagement.candidat"\n', ["engagement.candidat"], "candidate"),
    (CASE + "engaged = 0\n", ["engaged = 0"], "str"),
    (CASE + 'engaged = "lp.nothing.*"\n', ["lp.nothing."], ""),
    (CASE + 'engaged = "profiles/h200/nothing/r#control@a"\n', ["profiles/h200/nothing/r#control@a"], "lab judge"),
    (CASE + ENGAGED + 'verdicts = ["lp.v.p22"]\n', ["lp.v.p22"], "lp.v.p2"),
    ("[[cases]]\n", ["cases"], "case"),
]


def test_bad_bindings(tmp_path: Path) -> None:
    path = tmp_path / "audit.toml"

    @over(numbered(BAD_BINDINGS_CASES))
    def each(text: str, words: list[str], remedy: str) -> None:
        path.write_text(text)
        with pytest.raises(BadInput) as caught:
            bindings.read(run.CHECKS, path)
        assert "audit.toml" in caught.value.where
        assert [w for w in words if w not in caught.value.what] == [], str(caught.value)
        assert caught.value.remedy, str(caught.value)
        assert remedy in caught.value.remedy, str(caught.value)
        assert "\n" not in str(caught.value)

    each()
    path.write_text(CASE + 'engaged = "device:h200.colour"\n')  # told by the room of devices
    with pytest.raises(BadInput, match="colour"):
        run.audit(path=path)


def test_command(whole: run.Audit, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main.main(["audit", "impossible-speed", "--evidence", "recorded"]) == 0
    told = capsys.readouterr().out
    assert "11.1 TB/s" in told
    assert "imp.scoreboard.2026-05-28.gemma-3-12b.tg128" in told
    assert "launch-drift" not in told
    assert main.main(["audit", "imposible-speed"]) == 2
    held(capsys.readouterr().err, "lab audit", '"imposible-speed"', '"impossible-speed"')
    monkeypatch.setattr(run, "audit", lambda kind, names: whole)
    assert main.main(["audit", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {c["name"] for c in answer["checks"]} == set(run.CHECKS)
    assert {f["severity"] for f in answer["findings"]} <= set(SEVERITIES)


def test_evidence_keeps_apart() -> None:
    assert {s.evidence for _, s in run.audit("measured").asked} == {"measured"}  # the record: test_audit_rows.py
    with refused("lab audit", 'evidence is named "imported"'):
        run.audit("imported")


def test_ids_of_every_finding_exist(whole: run.Audit) -> None:
    for f in whole.findings:
        assert f.verdicts or f.figures or f.cards
        for verdict in f.verdicts:
            recorded.verdict(verdict)
        for figure in f.figures:
            assert bindings.quantities(figure, "test"), figure


def test_the_summary_counts_the_measured_verdicts_beside_the_recorded(whole: run.Audit) -> None:
    measured = {(card, f.device) for f in whole.findings if f.evidence == "measured" for card in f.cards}
    recorded = {v for f in whole.findings for v in f.verdicts}
    said = f" on {len(recorded)} recorded verdicts and {len(measured)} measured verdicts: "
    assert said in run.summary(whole)
    own = replace(whole, findings=tuple(f for f in whole.findings if f.evidence == "measured"))
    assert f"questions on {len(measured)} measured verdicts: " in run.summary(own)


def test_a_finding_is_told_once(whole: run.Audit) -> None:
    keys = [(f.check, f.verdicts, f.figures, "" if f.verdicts or f.figures else f.subject) for f in whole.findings]
    assert len(set(keys)) == len(keys)
    assert "lp13: gdn_core_time" not in {f.subject for f in whole.findings}, "phase 81 is bound, and said there"


# Gates that cannot decide ----------------------------------------------------------------------------------------


def test_a_line_without_a_source_or_a_reason_is_named() -> None:
    """Four of our own cards declared lines and wrote down no arithmetic for them; a reason made up later is none."""
    without = {c.id for c in phases.cards().values() if checks.unreasoned(c)}
    assert without == {"gdn-prefill-limit", "kv-fp8-limit", "w4a16-decode", "w4a16-prefill-limit"}
    card = phases.card("kv-bf16-limit")
    assert checks.unreasoned(card) == []
    bare = structs.replace(card, gate=structs.replace(card.gate, reason=""))
    assert len(checks.unreasoned(bare)) == len(card.gate.require)
    assert checks.unreasoned(phases.card("q8-paths")) == []  # its line is zero


def test_a_requirement_that_is_asked_before_is_named() -> None:
    card = phases.card("lb1-tq3")
    assert checks.asked_twice(card) == []
    twice = structs.replace(card, gate=structs.replace(card.gate, require=card.gate.engaged))
    assert checks.asked_twice(twice) == ["engagements > 0 launches"]


def test_only_figures_that_a_finding_touches_are_tainted() -> None:
    ids = ("lp.a2-cudagraph.gb10.gpu-busy.candidate", "lp.cells.stock.npl32.decode-agg.control")
    assert list(checks.touched("lp.v.a2-cudagraph", ids)) == [ids[0]]
    assert list(checks.touched("lp.v.p5", ids)) == []
