"""The audit itself: every check over what is bound in data/audit.toml and what cards and rows offer, and its pages.

A finding is a result, not an error: `lab audit` exits with 0 whatever it finds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.base.errors import refuse_unknown
from lab.card import recorded
from lab.study.audit import bindings, checks, find
from lab.study.audit.subject import SEVERITIES, Answer, Check, Finding, Subject

CHECKS = {c.name: c for c in vars(checks).values() if isinstance(c, Check)}
KINDS = ("recorded", "measured")
NUMBERED = re.compile(r"(.+)\.\d+$")


@dataclass(frozen=True)
class Audit:
    """What was asked and what was found: subjects by check, findings in the order of the checks."""

    asked: tuple[tuple[str, Subject], ...]
    findings: tuple[Finding, ...]

    def quiet(self, check: str) -> list[Subject]:
        """The subjects on which a check had nothing to say."""
        return [s for name, s in self.asked if name == check and ask(CHECKS[check], s) is None]


def audit(kind: str | None = None, names: Iterable[str] = (), path: Path | None = None) -> Audit:
    """Run the checks (all, or those named) on one kind of evidence or both.

    path: another file of bindings. Raises BadInput for an unknown check or kind, and for a binding that names a figure
    that does not exist.
    """
    chosen = list(names) or list(CHECKS)
    for name in chosen:
        refuse_unknown("lab audit", "check", name, CHECKS)
    refuse_unknown("lab audit", "evidence", kind or KINDS[0], KINDS)
    asked = [(check.name, subject) for check, subject in bindings.read(CHECKS, path)]
    for one in KINDS if kind is None else (kind,):
        for body in find.bodies(one):
            asked += [(name, subject) for name, finder in find.FINDERS.items() for subject in finder(body)]
    order = {name: i for i, name in enumerate(CHECKS)}
    kept = [(name, s) for name, s in asked if name in chosen and kind in (None, s.evidence)]
    kept.sort(key=lambda pair: order[pair[0]])  # stable: bindings first, then the cards in the order of the rows
    findings: list[Finding] = []
    for name, subject in kept:
        found = ask(CHECKS[name], subject)
        if found is not None and not any(_said(found, earlier) for earlier in findings):
            findings.append(found)
    return Audit(tuple(kept), tuple(findings))


def _said(found: Finding, earlier: Finding) -> bool:
    same = found.check == earlier.check and set(found.figures) <= set(earlier.figures)
    return same and bool(found.figures) and found.verdicts == earlier.verdicts


def ask(check: Check, subject: Subject) -> Finding | None:
    """One check on one subject: a finding, or None when it has nothing to say."""
    s = subject
    answer = Answer(s.note) if s.note else check.run(s) if check.has(s.roles) else None
    if answer is None:
        return None
    severity = answer.severity or check.severity
    return Finding(
        check.name, severity, s.title, s.evidence, answer.sentence, s.word, s.verdicts, s.cards, s.ids, s.device
    )


def to_json(result: Audit) -> dict[str, Any]:
    """What `lab audit --json` prints: the checks with how often each was asked and fired, and the findings."""
    asked = Counter(name for name, _ in result.asked)
    fired = Counter(f.check for f in result.findings)
    checks = [
        {"name": c.name, "meaning": c.meaning, "asked": asked[c.name], "fired": fired[c.name]}
        for c in CHECKS.values()
        if asked[c.name]
    ]
    return {"checks": checks, "findings": [asdict(f) for f in result.findings]}


def render(result: Audit) -> str:
    """The findings by check as plain text, each with the ids it stands on."""
    asked = Counter(name for name, _ in result.asked)
    lines: list[str] = []
    for name in asked:
        own = [f for f in result.findings if f.check == name]
        lines += [f"{name}: fired on {len(own)} of {asked[name]}. {CHECKS[name].meaning}"]
        for f in own:
            word = f" ({written(f)})" if f.word else ""
            lines += [f"  {f.severity}: {f.subject}: {f.sentence}{word}."]
            lines += [f"    {' '.join([*f.verdicts, *folded(f.figures)])}"]
        lines.append("")
    lines.append(summary(result))
    return "\n".join(lines)


def written(finding: Finding) -> str:
    """Whose word stands on these figures: a source's own, our reading of it, or our judge's."""
    if finding.evidence != "recorded" or not finding.verdicts:
        return f"our judge wrote {finding.word}" if finding.evidence != "recorded" else f"read as {finding.word}"
    source = recorded.verdict(finding.verdicts[0])
    return f'the source wrote "{source.word}"' if source.word else f"we read the source as {source.reading}"


def folded(ids: Sequence[str]) -> list[str]:
    """Ids in order, with a numbered series (`x.01`, `x.02`, ...) written once as `x.*`."""
    series = Counter(match[1] for i in ids if (match := NUMBERED.match(i)))
    shown = [f"{m[1]}.*" if (m := NUMBERED.match(i)) and series[m[1]] > 2 else i for i in ids]
    return list(dict.fromkeys(shown))


def summary(result: Audit) -> str:
    """One line: findings by severity, and on how many verdicts."""
    count = Counter(f.severity for f in result.findings)
    words = [f"{count[s]} {s} ({meaning_})" for s, meaning_ in SEVERITIES.items() if count[s]]
    recorded = {v for f in result.findings for v in f.verdicts}
    measured = {(card, f.device) for f in result.findings if f.evidence == "measured" for card in f.cards}
    kinds = ((recorded, "recorded"), (measured, "measured"))
    touched = [f"{len(of)} {kind} verdict{'s' * (len(of) > 1)}" for of, kind in kinds if of]
    verdicts = f" on {' and '.join(touched)}" if touched else ""
    return (
        f"{len(result.findings)} findings from {len(result.asked)} questions{verdicts}: {'; '.join(words) or 'none'}."
    )


def rows(findings: Sequence[Finding]) -> list[dict[str, str]]:
    """The findings as table rows for a notebook: severity, subject, sentence, the word written on it, ids."""
    return [
        {
            "check": f.check,
            "severity": f.severity,
            "subject": f.subject,
            "what the figures say": f.sentence,
            "written": f.word,
            "verdicts": ", ".join(f.verdicts),
            "figures": ", ".join(folded(f.figures)),
        }
        for f in findings
    ]
