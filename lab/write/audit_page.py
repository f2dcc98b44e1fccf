"""The audit as one page of the site: every finding with links to its verdict's phase and to its figures, listed below.

A figure's entry says what it is, its value and where its source prints it, so that each sentence can be followed to
the rows it was computed from without leaving the page.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable

from lab.card import phases, recorded
from lab.study.audit.run import CHECKS, Audit, summary, written
from lab.study.audit.subject import Finding, Quantity


def body(result: Audit) -> str:
    """The page without its frame; links to phases are relative to the site's root."""
    asked = Counter(name for name, _ in result.asked)
    parts = ["<h1>The audit of all verdicts</h1>", f"<p>{html.escape(summary(result))}</p>"]
    parts.append(
        "<p>Each check is asked of the figures bound in <code>data/audit.toml</code>, of every recorded case of every "
        "card and of every measured comparison. <code>lab audit CHECK</code> computes a section again.</p>"
    )
    for name, count in asked.items():
        own = [f for f in result.findings if f.check == name]
        parts.append(
            f"<h2 id={name}>{name}</h2><p>{html.escape(CHECKS[name].meaning)} Fired on {len(own)} of {count}.</p>"
        )
        parts += [_table(own)] if own else []
    parts.append(_figures(result))
    return "\n".join(parts)


def _table(findings: Iterable[Finding]) -> str:
    rows = "".join(
        f"<tr><td class=word>{f.severity}</td><td>{html.escape(f.subject)}<br><small>{_verdicts(f)}</small></td>"
        f"<td>{html.escape(f.sentence)}.<br><small>{' '.join(_link(i) for i in f.figures)}</small></td></tr>"
        for f in findings
    )
    head = "<tr><th>severity</th><th>subject</th><th>what the figures say, and which figures</th></tr>"
    return f"<div class=wide><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>"


def _verdicts(finding: Finding) -> str:
    cards = {case.verdict.id: c.id for c in phases.cards().values() for case in c.recorded}
    words = [html.escape(written(finding))] if finding.word else []
    for verdict in finding.verdicts:
        shown = html.escape(verdict)
        words.append(f'<a href="phases/{cards[verdict]}.html">{shown}</a>' if verdict in cards else shown)
    if not finding.verdicts:
        words += [f'<a href="phases/{c}.html">{c}</a>' for c in finding.cards]
    return ", ".join(words)


def _anchor(figure_id: str) -> str:
    return html.escape("f-" + figure_id, quote=True)


def _link(figure_id: str) -> str:
    return f'<a href="#{_anchor(figure_id)}"><code>{html.escape(figure_id)}</code></a>'


def _figures(result: Audit) -> str:
    """Every figure that a finding stands on, once, with its value and its source."""
    fired = {(f.check, f.subject) for f in result.findings}
    known: dict[str, Quantity] = {}
    for name, subject in result.asked:
        if (name, subject.title) in fired:
            known |= {q.id: q for quantities in subject.roles.values() for q in quantities if q.id}
    rows = []
    for figure_id in dict.fromkeys(i for f in result.findings for i in f.figures):
        figure = recorded.figures().get(figure_id)
        shown = str(known.get(figure_id, ""))
        about = f"{figure.arm}, {figure.metric}" if figure else "device fact" if figure_id.startswith("device:") else ""
        source = figure.source if figure else "data/devices.toml" if figure_id.startswith("device:") else "measured row"
        status = f" ({figure.withdrawn})" if figure and figure.withdrawn else ""
        cells = "".join(f"<td>{html.escape(text)}</td>" for text in (about, shown + status, source))
        rows.append(f'<tr id="{_anchor(figure_id)}"><td><code>{html.escape(figure_id)}</code></td>{cells}</tr>')
    head = "<tr><th>figure</th><th>what</th><th>value</th><th>source</th></tr>"
    table = f"<div class=wide><table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table></div>"
    return f"<h2 id=figures>The figures behind these lines</h2>{table}"
