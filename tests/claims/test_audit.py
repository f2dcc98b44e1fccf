"""The claims of notebooks/audit.py: what its text says of committed figures and rows, held here."""

import statistics

from lab import value
from lab.card import recorded
from lab.study.audit import checks, run


def test_claims():
    # The audit of all verdicts
    result = run.audit()
    fired = {name: [f for f in result.findings if f.check == name] for name in run.CHECKS}
    # The checks
    assert all(fired.values()), "every check has a case in the record"
    assert all(any(s.evidence == "recorded" for s in result.quiet(name)) for name in run.CHECKS), "and one it passes"
    # P1: the gate on one quantity, the verdict on another
    p1 = [f for f in result.findings if "lp.v.p1" in f.verdicts]
    assert {f.check for f in p1} == {"denominator-changed", "gate-fails-control", "claim-inside-noise"}
    share = value("lp.gate.p1.convert-share.candidate") / value("lp.gate.p1.convert-share.control") - 1
    removed = value("lp.gate.p1.convert-instances.control") - value("lp.gate.p1.convert-instances.candidate")
    owned = value("lp.gate.p1.engagement-p0.candidate")
    assert removed == owned
    assert share > -0.5
    # GDN decode, phases 79 to 96: how long was captured, or how fast?
    overturned = [f for f in fired["launch-drift"] if f.severity == "overturned"]
    captures = [s for name, s in result.asked if name == "launch-drift" and s.title.startswith("GDN decode phase")]
    changes = checks.launch_changes(captures)
    left_out = [title for title, raw, _ in changes if abs(raw) >= 20]
    assert [title.split(":")[0] for title in left_out] == ["GDN decode phase 81"], "its effect would flatten the others"
    assert [f.subject.split(":")[0].removeprefix("GDN decode phase ") for f in overturned] == ["93", "95", "96"]
    assert all(abs(each) <= 2.0 for title, _, each in changes if title in {f.subject for f in overturned})
    runs = [f"lp.gate.phase-141.gdn-core-time.{name}" for name in ("cv", "per-launch.cv")]
    raw, each = (value(i) for i in runs)
    assert raw > 9 * each
    # Noise: within a run, between sessions, between identical arms
    sessions = [f for i, f in recorded.figures().items() if i.startswith("lp.sessions.default-npl128.")]
    rates = [float(f.value) for f in sessions]
    cv = 100 * statistics.stdev(rates) / statistics.fmean(rates)
    assert len(rates) == 14
    assert round(cv, 2) == 3.57
    # Figures that cannot stand
    artefact, sound = (
        "lp.batch8-anomaly.gb10.decode-step.control.npl8",
        "lp.track-b-roofline.gb10.decode-step.control.m128",
    )
    assert value(artefact) == value(sound)
    assert recorded.figure(artefact).withdrawn
    assert not recorded.figure(sound).withdrawn
