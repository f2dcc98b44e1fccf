"""The site: static pages from templates/, a folder that needs no server, asks no other host and lies where one likes.

The board has one line for each verdict; each card, family, device, notebook and source file has a page, and each of
them is reached by a link. What a page shows is gathered in lab/write/pages.py.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab import draw
from lab.base import devices, vocabulary
from lab.base.errors import REPOSITORY, BadInput
from lab.card import phases, recorded
from lab.check import families
from lab.draw import inline
from lab.judge.verdicts import Judgement
from lab.place import ceilings
from lab.study import choices, flips, limits, places, routes
from lab.study.audit import run as auditing
from lab.write import figures, inserts, pages, render
from lab.write.pages import View

GROUPS = (
    ("measured", "Measured here", "Rows of this repository, judged by their card's gate."),
    (
        "recorded",
        "Recorded",
        "Outcomes that five projects wrote down, judged again from the figures that they printed.",
    ),
    ("imported", "Imported files", "Files of any tool, judged as `lab judge --rows --keep` read them."),
    ("unmeasured", "Not measured yet", "Cards without a recorded figure or a committed row: their gates wait."),
)

OWN_PICTURES = ("data:image/png;base64,", "data:image/svg+xml;base64,")


def write_notebook(out: Path, stem: str, title: str, cells: Sequence[Any], failure: str = "") -> None:
    """The page of a notebook: prose, code folded, outputs; pictures keep their description and ask no other host."""

    def alt(output: Any) -> str:
        told = [m.get("alt", "") for m in output.get("metadata", {}).values() if isinstance(m, dict)]
        return next(filter(None, told), "") or str(output["data"].get("text/plain", "figure"))

    values = {"alt": alt, "uri": inline.uri, "clean": clean, "failure": failure}
    page(out, "notebook.html", f"notebooks/{stem}.html", title=title, cells=cells, **values)


def clean(html: str) -> str:
    """An output's HTML without what could run or ask another host; pictures that it holds itself stay."""
    import nh3

    def kept(_tag: str, attribute: str, value: str) -> str | None:
        if attribute == "src":
            return value if value.startswith(OWN_PICTURES) else None
        return None if attribute == "href" and value.lower().startswith("data:") else value

    schemes = {"http", "https", "mailto", "data"}
    return render.wide(nh3.clean(html, url_schemes=schemes, attribute_filter=kept))


def page(out: Path, template: str, path: str, **values: Any) -> None:
    """Render a template to a page below `out`."""
    written(out, path, render.render(template, path, **values))


def write_cards(out: Path, judgements: Sequence[Judgement], part: int = 0, parts: int = 1) -> None:
    """The pages of the cards, or every `parts`-th of them: figures take their time and are drawn side by side."""

    def keep(name: str, svg: str) -> str:
        written(out, f"cards/{name}", svg)
        return name

    by_card = pages.cards_of(pages.views(judgements))
    order = list(by_card)
    for place, (name, shown) in list(enumerate(by_card.items()))[part::parts]:
        near = {"before": order[place - 1] if place else "", "after": order[place + 1] if order[place + 1 :] else ""}
        values = pages.values(shown, keep)
        page(out, "card.html", f"cards/{name}.html", title=shown.card.title, links=True, **near, **values)


def write_pages(out: Path, judgements: Sequence[Judgement]) -> None:
    """Every page but the board, the cards' and the notebooks': families, devices, sources, the audit."""
    families.interpret_on_cpu()
    found = pages.views(judgements)
    written(out, "site.css", (render.TEMPLATES / "site.css").read_text(encoding="utf-8"))
    for name in families.names():
        _write_family(out, name, [v for v in found if v.card.family == name])
        for file in pages.family_files(name):
            text = (REPOSITORY / file).read_text(encoding="utf-8")
            page(out, "source.html", render.page_of(file), title=file.as_posix(), text=text, family=name)
    for path in docs():
        _write_doc(out, path)
    for device in devices.ids():
        _write_device(out, device, [v for v in found if v.device == device])
    write_audit(out)


def docs() -> list[Path]:
    """The reference, a page each."""
    return sorted((Path(__file__).parent / "docs").glob("*.md"))


def _write_doc(out: Path, path: Path) -> None:
    """A page of the reference, with links to its neighbours; other files of the repository are shown as sources."""

    def shown(match: re.Match[str]) -> str:
        file = Path(match[1])
        if not (REPOSITORY / file).is_file():
            return f"]({file.stem}.html)" if (path.parent / file).is_file() else match[0]
        text = (REPOSITORY / file).read_text(encoding="utf-8")
        page(out, "source.html", render.page_of(file), title=file.as_posix(), text=text, family="")
        return f"](../{render.page_of(file)})"

    text = path.read_text(encoding="utf-8")
    for place, table in inserts.PLACES.items():
        if place in text:
            text = text.replace(place, table())
    text = re.sub(r"\]\(([\w./-]+)\)", shown, text)
    page(out, "source.html", f"docs/{path.stem}.html", title=path.name, text=text, family="")


def _write_family(out: Path, name: str, lines: Sequence[View]) -> None:
    shown, routed = [], []
    for device in sorted({v.device for v in lines if v.kind == "measured"}):
        own = [limits.limits(v.card, device) for v in lines if v.kind == "measured" and v.device == device]
        if own := [found for found in own if any(x.rival for x in found)]:
            title, names = f"{name} on {device}", [sorted({p.rival.name for p in x if p.rival}) for x in own]
            times = [[p.times_as_fast for p in x if p.times_as_fast] for x in own]
            bars = [(x[0].card, ", ".join(rivals), of) for x, rivals, of in zip(own, names, times, strict=True)]
            written(out, f"families/{name}-{device}.svg", draw.svg(draw.rivals(bars, title)))
            alt = f"{title}: ours and the fastest rival, each pair of one run, by card"
            shown.append((device, own, f"{name}-{device}.svg", alt))
        with contextlib.suppress(BadInput):  # nothing was timed together there
            known = routes.worth(routes.table(name, device))
            asks, place = choices.router(name), devices.get(device)
            worth: tuple[Any, ...] = (), (), ()
            with contextlib.suppress(BadInput):  # of axes that no public model has
                worth = *places.survey(asks, place), places.charged(asks, place) if asks.policies else ()
            routed.append((device, routes.crossovers(routes.competing(known)), known, *worth))
            if known.validation:
                written(out, f"families/{name}-{device}-model.svg", draw.svg(figures.model(known).figure))
    stems = sorted({stem for v in lines for stem in pages.notebooks(v.card)})
    values = {"limits": shown, "routes": routed, "files": pages.family_files(name), "books": stems}
    title = families.load(name).title
    page(out, "family.html", f"families/{name}.html", name=name, title=title, lines=lines, **values)


def _write_device(out: Path, device_id: str, lines: Sequence[View]) -> None:
    d = devices.get(device_id)
    facts = [*d.facts.items(), *((f"peak, {k}", f) for k, f in d.peaks.items())]
    facts += [(f"seen, {k}", f) for k, f in d.ceilings.items()]
    measured = any(v.kind == "measured" for v in lines)
    own = [f for f in flips.flips() if device_id in (f.there, f.here)] if lines else []
    best = list(ceilings.latest(device_id).values()) if measured else []
    values = {"facts": facts, "ceilings": best, "flips": own, "lines": lines, "words": pages.counted(lines)}
    page(out, "device.html", f"devices/{device_id}.html", title=d.name, d=d, **values)


def write_audit(out: Path) -> None:
    """The audit's page: every finding with links to its cards and to its figures, which are listed below."""
    result = auditing.audit()
    cards = {case.verdict.id: c.id for c in phases.cards().values() for case in c.recorded}
    asked = Counter(name for name, _ in result.asked)
    checks = [(auditing.CHECKS[n], k, [f for f in result.findings if f.check == n]) for n, k in asked.items()]
    fired = {(f.check, f.subject) for f in result.findings}
    known = {q.id: q for n, s in result.asked if (n, s.title) in fired for own in s.roles.values() for q in own if q.id}
    figures = []
    for figure_id in dict.fromkeys(i for f in result.findings for i in f.figures):
        figure, fact = recorded.figures().get(figure_id), figure_id.startswith("device:")
        about = f"{figure.arm}, {figure.metric}" if figure else "device fact" if fact else ""
        source = recorded.citation(figure.source) if figure else "data/devices.toml" if fact else "measured row"
        status = f" ({figure.withdrawn})" if figure and figure.withdrawn else ""
        figures.append((figure_id, about, str(known.get(figure_id, "")) + status, source))

    def named(finding: Any) -> list[tuple[str, str]]:
        return [(cards.get(v, ""), v) for v in finding.verdicts] or [(c, c) for c in finding.cards]

    values = {"checks": checks, "figures": figures, "anchors": {f[0]: f"f-{n}" for n, f in enumerate(figures)}}
    said = {"said": lambda f: auditing.written(f) if f.word else "", "cards": named}
    page(out, "audit.html", "audit.html", title="Audit", summary=auditing.summary(result), **said, **values)


def write_index(
    out: Path,
    found: Sequence[View],
    checks: Sequence[dict[str, Any]],
    titles: dict[str, str],
    broken: dict[str, str],
) -> None:
    """The board: every verdict on one line, the measured first, and the ways to every other page.

    What another device than the card's own is still to be measured for is on the card's page and the device's alone;
    the count of the measured says how many these are.
    """
    held = Counter(v.device for v in found)
    measured = [v for v in found if v.kind == "measured"]
    home = {v.card.id for v in measured if v.device == v.card.device}
    waiting = [v for v in measured if v.word == "BLOCKED" and v.card.id in home and v.device != v.card.device]
    found = [v for v in found if v not in waiting]
    groups = [(*group, [v for v in found if v.kind == group[0]]) for group in GROUPS]
    counts = {name: _tally([c for c in checks if c["family"] == name]) for name in families.names()}
    systems = vocabulary.words().system
    options = [
        ("verdict", "Verdict", [(w, w) for w, _ in pages.counted(found)]),
        ("device", "Device", sorted({(v.device, v.device_name) for v in found})),
        ("family", "Family", [(name, name) for name in sorted({v.card.family for v in found} - {""})]),
        ("source", "Source", [(s, s) for s in systems if any(v.card.system == s for v in found)]),
    ]
    stems = sorted({*titles, *(Path(name).stem for name in broken if name.startswith("notebooks/"))})
    page(
        out,
        "index.html",
        "index.html",
        title="The board",
        groups=groups,
        words=pages.counted(found),
        filters=options,
        total=len(found),
        waiting=len(waiting),
        docs=[(p.stem, p.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")) for p in docs()],
        differs=[v for v in found if v.judgement.agrees is False],
        families=[{"name": n, "title": _title(n), "checks": counts[n]} for n in families.names()],
        devices=[{"id": d, "name": devices.get(d).name, "count": f"{held[d]} verdicts"} for d in devices.ids()],
        notebooks=[
            {"stem": s, "title": titles.get(s, s), "failure": broken.get(f"notebooks/{s}.ipynb", "")} for s in stems
        ],
    )


def _title(family: str) -> str:
    """What a family says that it computes, read without importing it."""
    text = (families.FOLDER / family / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^TITLE = "(.*)"$', text, re.MULTILINE)
    return found[1] if found else family


def _tally(checks: Sequence[dict[str, Any]]) -> str:
    ran = [c for c in checks if c["status"] != "skipped"]
    skipped = dict.fromkeys((c["candidate"], c["message"]) for c in checks if c["status"] == "skipped")
    said = f"{sum(c['status'] == 'ok' for c in ran)} of {len(ran)} checks ok" if checks else ""
    if not skipped:
        return said
    reasons = Counter(reason for _, reason in skipped)
    return said + "; not run here: " + "; ".join(f"{n} candidates ({why})" for why, n in reasons.most_common())


def written(out: Path, name: str, text: str | None) -> None:
    """Write a page below `out`, or without a text only make its folder."""
    try:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(out, f"cannot be written ({error.strerror})", "choose another folder with --out") from None
