"""`lab phases`, `judge`, `audit`, `rows` and `write`: what is asked of cards and rows."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lab.base import own
from lab.base.console import show
from lab.base.errors import BadInput, refuse_unknown, shown

if TYPE_CHECKING:
    from lab.card.phases import Card
    from lab.judge.verdicts import Judgement


def phases(arguments: Namespace) -> int:
    """The cards, by system and row; those of a card directory alone where one is in use."""
    from lab.card import phases
    from lab.row import store

    keys = ("id", "row", "system", "device", "title", "question", "family", "control", "candidate")

    def value(c: Card) -> dict[str, Any]:
        held = {k: getattr(c, k) for k in (*keys, "card_hash", "gate_hash", "workloads")}
        return held | {"recorded": [r.verdict.id for r in c.recorded], "measured": store.measured_devices(c.id)}

    cards = list((phases.own_cards() if own.folder() else phases.cards()).values())
    show(arguments.json, lambda: [value(c) for c in cards], lambda: _by_system(cards))
    return 0


def _by_system(cards: list[Card]) -> str:
    from lab.base import vocabulary
    from lab.row import store
    from lab.write import listing

    lines = []
    known = vocabulary.words().system
    for system, what in {**known, **{c.system: "cards of your own" for c in cards if c.system not in known}}.items():
        of_it = [c for c in cards if c.system == system]
        lines += [f"{system}: {what}".removeprefix(": ")] if of_it else []
        for c in of_it:
            places = ["replay" if c.recorded else "", *store.measured_devices(c.id)]
            places += [f"kernels/{c.family}" if c.family else "", *(f"notebooks/{n}" for n in listing.elsewhere(c))]
            where = ", ".join(filter(None, places)) or "not measured yet"
            lines.append(f"  {c.row:5} {c.id:19} {c.title} [{where}]")
    return "\n".join(lines)


def judge(arguments: Namespace) -> int:
    """The board and a sentence each; 1 when --fail-on names a word that was given."""
    from lab.card import phases
    from lab.judge import rules

    if not arguments.rows and (arguments.arm or arguments.map or arguments.metric):
        what, remedy = "--arm, --map and --metric need --rows", "give --rows control=FILE --rows candidate=FILE"
        raise BadInput("lab judge", what, remedy)
    if arguments.keep and not arguments.rows:
        raise BadInput("--keep", "stands without --rows", "give --rows control=FILE --rows candidate=FILE")
    if not arguments.rows and bool(arguments.phase) == arguments.all:
        raise BadInput("lab judge", "needs card ids or --all", "see `lab phases`")
    fail_on = [word for word in arguments.fail_on.split(",") if word]
    for word in fail_on:
        refuse_unknown("--fail-on", "verdict", word, rules.WORDS)
    if arguments.rows:
        from lab.study.own import verdict

        outcome = verdict.run(arguments)
        if arguments.keep:
            print(f"lab: kept in {shown(verdict.keep(outcome))}", file=sys.stderr)
        show(arguments.json, lambda: [outcome.to_json()], lambda: verdict.render(outcome))
        return 1 if outcome.judgement.verdict.word in fail_on else 0
    every = phases.own_cards if own.folder() else phases.cards
    chosen = list(every().values()) if arguments.all else [phases.card(p) for p in arguments.phase]
    judgements = _judged(chosen, arguments)
    show(arguments.json, lambda: [j.to_json() for j in judgements], lambda: _board(chosen, judgements, arguments))
    return 1 if any(j.verdict.word in fail_on for j in judgements) else 0


def _judged(chosen: list[Card], arguments: Namespace) -> list[Judgement]:
    from lab.base import devices
    from lab.check import families
    from lab.judge import verdicts
    from lab.row import store
    from lab.write import listing

    judgements = verdicts.judge_recorded(chosen) if arguments.evidence == "recorded" else []
    asked = arguments.device
    if asked and not any(asked in store.measured_devices(c.id) for c in chosen):
        asked = devices.get(asked, "--device").id

    def on_rows(c: Card) -> bool:
        """A named card without recorded figures has no other evidence than its rows, or than what was kept of files."""
        named = c.own or (not arguments.all and bool(c.family or store.measured_devices(c.id)))
        return arguments.evidence == "measured" or (named and not c.recorded)

    for c in filter(on_rows, chosen):
        if c.own:
            families.refuse_card(c)
        places = store.measured_devices(c.id)
        ours = (c.family or not c.recorded) and (c.own or c.device in devices.ids())
        named = c.own or not arguments.all
        if named and asked and not ours:
            store.refuse_unmeasured(c.id, asked)
        if named and ours and (asked not in places if asked else not places):
            # BLOCKED, and the reason names what is missing
            waiting = verdicts.waiting(c, asked)
            judgements.append(replace(waiting, note="Not measured yet") if listing.elsewhere(c) else waiting)
        judgements += [verdicts.judge_measured(c, d) for d in places if asked in (None, d)]
    return judgements


def _board(chosen: list[Card], judgements: list[Judgement], arguments: Namespace) -> str:
    """The board, a sentence a verdict where cards were named or it has a note, and the notebooks of cards named."""
    from lab.write import listing, writeup

    named = [] if arguments.all else chosen
    elsewhere = {c.id: names for c in named if (names := listing.elsewhere(c))}
    lines = [(writeup.board if named else writeup.overview)(judgements)] if judgements else []
    if not judgements and not elsewhere:
        lines.append(f"no {arguments.evidence} evidence for these cards")
    for j in judgements:
        if named:
            where = f"{j.phase} on {j.evidence} evidence, {j.device}"
            lines.append(f"\n{where}: {j.verdict.word}. {j.verdict.reason}. {j.note}".rstrip())
    for card_id, names in elsewhere.items():
        where = " and ".join(f"notebooks/{name}.ipynb" for name in names)
        lines.append(f"{card_id}: its figures are formed and judged in {where}")
    return "\n".join(lines)


def audit(arguments: Namespace) -> int:
    """What the verdicts rest on; a finding is a result, so 0."""
    from lab.study.audit import run

    result = run.audit(arguments.evidence, arguments.check)
    show(arguments.json, lambda: run.to_json(result), lambda: run.render(result))
    return 0


def rows(arguments: Namespace) -> int:
    """The measured rows that profiles/ holds; with --verify 1 when a record there is not as it was written."""
    if arguments.pack:
        from lab.row import store

        own = store.folder()  # of the card directory in use, not the repository's beside it
        plain = [p for p in store.measured() if p.suffix != store.PACKED and p.is_relative_to(own)]
        before = sum(path.stat().st_size for path in plain)
        after = sum(path.stat().st_size for path in map(store.pack, plain))
        said = {"files": len(plain), "bytes": before, "packed_bytes": after}
        show(arguments.json, lambda: said, lambda: f"{len(plain)} files packed: {before:,} bytes now {after:,}")
        return 0
    if arguments.verify:
        from dataclasses import asdict

        from lab.row import verify

        report = verify.verify()
        show(arguments.json, lambda: asdict(report), lambda: str(report))
        return int(bool(report.wrong))
    from lab.write import listing

    if arguments.out and not arguments.export:
        raise BadInput("lab rows", "--out needs --export", "say in which format")
    listed = listing.measured(arguments.family, arguments.phase, arguments.device)
    if arguments.export:
        from lab.base import files
        from lab.write import exports

        text = exports.text(listed, arguments.export)
        files.write(arguments.out, text) if arguments.out else print(text, end="")
        return 0
    show(arguments.json, lambda: [listing.value(row) for row in listed], lambda: listing.render(listed))
    return 0


def write(arguments: Namespace) -> int:
    """One card's writeup, or the README's table."""
    if [bool(arguments.phase), arguments.readme, arguments.notes].count(True) != 1:
        raise BadInput("lab write", "needs one card id, or --readme or --notes alone", "see `lab phases`")
    if arguments.phase:
        return _writeup(arguments)
    from lab.check import families
    from lab.study import flips
    from lab.write import notes, readme

    families.interpret_on_cpu()
    if arguments.notes:
        for name in families.names():
            notes.path(name).write_text(notes.written(name, notes.path(name).read_text(encoding="utf-8")), "utf-8")
        return 0
    out = arguments.out or readme.FILE
    text = readme.written(readme.FILE.read_text(encoding="utf-8"), flips.flips(), flips.flips("h100"))
    try:
        readme.draw_figure(readme.FIGURE if out == readme.FILE else out.with_name(readme.FIGURE.name))
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(out, f"cannot be written ({error.strerror})", "choose another --out") from None
    return 0


def _writeup(arguments: Namespace) -> int:
    """A card's page as a file; 1 when a number of the author's prose is no figure of the card."""
    from lab.card import phases
    from lab.study.own import verdict
    from lab.write import pages, writeup

    kind = writeup.format_of(arguments.format, arguments.out)
    if kind == "pdf" and arguments.out is None:
        raise BadInput("--format pdf", "a PDF is no text", "give --out FILE.pdf")
    card = phases.card(arguments.phase)
    judged = pages.judged([card])
    if arguments.rows:
        how = arguments.arm, arguments.map, arguments.device, arguments.metric
        judged.insert(0, verdict.judge(card, arguments.rows, *how).judgement)
    try:
        text, flagged = writeup.made(pages.page_of(card, judged), kind, arguments.out)
        if isinstance(text, bytes):
            arguments.out.write_bytes(text)
        elif arguments.out:
            arguments.out.write_text(text, encoding="utf-8")
        else:
            print(text, end="")
    except OSError as error:
        raise BadInput(arguments.out, f"cannot be written ({error.strerror})", "choose another --out") from None
    for line in flagged:
        print(f"lab: {card.path.with_suffix('.md').name} {line}", file=sys.stderr)
    return 1 if flagged else 0
