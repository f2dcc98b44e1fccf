"""The claims of notebooks/00_start_here.py: what its text says of committed figures and rows, held here."""

from lab.base import vocabulary
from lab.card import gate, phases
from lab.card import recorded as recorded_facts
from lab.check import families
from lab.judge import rules, verdicts
from lab.study import flips, reproduction
from lab.write import writeup


def test_claims():
    # Start here: from a question to a verdict
    DEVICE = "h200"
    cards = phases.cards()
    # The board
    recorded = verdicts.judge_recorded(cards.values())
    assert len({j.recorded_id for j in recorded}) == len(recorded_facts.verdicts()) == 130
    assert not writeup.unexplained(recorded)
    differing = [j for j in recorded if j.agrees is False]
    assert all(j.differs for j in differing)
    # The flip map
    families.interpret_on_cpu()  # a family's candidates are imported for their precision
    pairs = flips.flips(DEVICE)
    # A flip is claimed only where both devices have a word, and only on one question.
    assert all(f.word_there and f.word_here and not f.asks_otherwise for f in pairs if f.flips)
    # How to read a verdict
    ask = gate.Condition("decode_tps", ">", "%", 5.0, "change", "a")
    toy = gate.Gate(
        correctness=(gate.Condition("relative_error", "<=", "ratio", 0.004, workload="a"),),
        engaged=(gate.Condition("engagements", ">", "launches", 0.0, workload="a"),),
        require=(ask,),
    )

    def invented(tps: float | None, error: float = 0.001, launched: float = 48, kind: str = "measured") -> dict:
        found = {
            ("relative_error", "a"): gate.Reading("ratio", candidate=error),
            ("engagements", "a"): gate.Reading("launches", candidate=launched),
        }
        if tps is not None:
            found["decode_tps", "a"] = gate.Reading("tok/s", control=100.0, candidate=tps, kind=kind)
        return found

    EXAMPLES = [
        ("correct, engaged, 12 % faster", "GO", invented(112.0)),
        ("the same, but predicted", "CONDITIONAL-GO", invented(112.0, kind="predicted")),
        ("3 % faster: the line at 5 % is missed", "NO-GO", invented(103.0)),
        ("twice as fast and wrong", "INVALID", invented(200.0, error=0.3)),
        ("the run never finished", "BLOCKED", invented(None)),
        ("no change, and never engaged", "VACUOUS", invented(100.0, launched=0)),
    ]
    rows = []
    for what, word, found in EXAMPLES:
        verdict = rules.judge(toy, found)
        assert verdict.word == word, verdict
        rows.append({"evidence (invented)": what, "verdict": verdict.word, "the judge's sentence": verdict.reason})
    any_gain = gate.Gate(require=(gate.Condition("decode_tps", ">", "%", 0.0, "change", "a"),))
    verdict = rules.judge(any_gain, invented(101.0))
    assert verdict.word == "NEUTRAL", verdict
    # The recorded roofline analysis, computed again
    again = reproduction.reproduce()
    assert all(r.agrees == (r.expected == "agrees") for r in again)
    # What comes next
    known = vocabulary.words().row
    without = [row for row in known if row not in {c.row for c in cards.values()}]
    assert not without, without
