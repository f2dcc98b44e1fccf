"""A gate for a pull request: the verdict as an exit status, what a reviewer asks as a comment, and the rows kept.

`lab gate CARD --rows ...` exits with 0 where the word is one of --pass, with 1 where it is not, with 2 on bad input;
without --rows the measured rows of the card are held. The comment says what decided it, each condition with its
interval, the noise floor and the smallest effect that this run could have seen, the A/A difference of the control
with itself, the ceiling, what the arms differ in, and the hashes of card and rows. `lab baseline` keeps the
candidate's files of a run that passes; `lab gate --baseline` takes them for the control, if they are still the same.

Smallest effect: the change that nine in ten such runs tell from none, by the interval's own reach, as `lab plan` says
it before measuring; never less than the floor.
"""

from __future__ import annotations

import hashlib
import html
import math
import re
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lab.base import devices, files, interval
from lab.base.errors import BadInput, plain, refuse_unknown
from lab.card import phases
from lab.judge import evidence, rules, verdicts
from lab.place import roofline
from lab.row import store
from lab.study import own
from lab.study.own import arms as which
from lab.study.own import verdict

LARGEST = 1 << 30  # bytes of a profile
MOST, LONGEST = 8, 400  # conditions in a comment; characters of a sentence
MANIFEST = "baseline.json"
NO_NAME = re.compile(r"[^A-Za-z0-9._-]")


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the last accepted run. file: its name beside the manifest; workload: "" where it is of several."""

    file: files.Id
    workload: str
    sha256: str


class Baseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was accepted last for a card, and by which verdict; "" for the first, which nothing was held against."""

    schema: int
    card: str
    card_hash: str
    verdict: str
    files: tuple[Kept, ...]


@dataclass(frozen=True)
class Held:
    """A verdict with what a comment says beside it, in sentences. sd_pct: the control's, by metric and workload."""

    judgement: verdicts.Judgement
    sd_pct: dict[tuple[str, str], float]
    same: str
    ceiling: str
    differ: str
    rows: tuple[str, ...]


def run(arguments: Namespace) -> int:
    """`lab gate`: 0 or 1 by the verdict's word; the comment is written whole or not at all."""
    card, passing = phases.card(arguments.phase), _words(arguments.passing)
    rows = [*(arguments.rows or ()), *_control(arguments.baseline, card)]
    held = _imported(card, rows, arguments) if rows else _measured(card, arguments.device)
    text = comment(card, held)
    if arguments.comment:
        files.write(arguments.comment, text)
    print(text, end="")
    return 0 if held.judgement.verdict.word in passing else 1


def baseline(arguments: Namespace) -> int:
    """`lab baseline`: keeps the candidate's files where the verdict passes, or where nothing was kept before."""
    card, folder = phases.card(arguments.phase), arguments.dir
    given = [(word, which.rows_flag(word, card.workloads)) for word in arguments.rows or ()]
    mine = [(workload, path) for _, (arm, workload, path) in given if arm == "candidate"]
    if not mine:
        raise BadInput("lab baseline", "no file is the candidate", "give --rows candidate=FILE")
    control = [word for word, (arm, *_) in given if arm == "control"] or _control(folder, card, first=True)
    word = ""
    if control:
        rows = [word for word, (arm, *_) in given if arm == "candidate"] + control
        word = _imported(card, rows, arguments).judgement.verdict.word
        if word not in _words(arguments.passing):
            print(f"{card.id}: {word}, so the baseline stays as it is")
            return 1
    read = [(workload, path, files.read_bytes(path, own.LARGEST)) for workload, path in mine]
    for _, path, _ in read if not control else ():
        own.read(path, verdict.asked(card, arguments.metric))
    names = [f"{_sha(data)[:12]}-{NO_NAME.sub('_', path.name)}" for _, path, data in read]
    kept = [(Kept(name, workload, _sha(data)), data) for name, (workload, _, data) in zip(names, read, strict=True)]
    for one, data in kept:
        files.write(folder / card.id / one.file, data)
    made = Baseline(1, card.id, card.card_hash, word, tuple(one for one, _ in kept))
    files.write(folder / card.id / MANIFEST, msgspec.json.format(msgspec.json.encode(made), indent=1).decode() + "\n")
    for old in {*(folder / card.id).iterdir()} - {folder / card.id / n for n in (MANIFEST, *(k.file for k, _ in kept))}:
        old.unlink(missing_ok=True)
    print(f"{card.id}: {len(kept)} files kept{f', {word}' if word else ', the first'}")
    return 0


def _control(folder: Path | None, card: phases.Card, first: bool = False) -> list[str]:
    """The kept files as --rows of the control; raises BadInput where they are not what was kept."""
    path = folder / card.id / MANIFEST if folder else None
    if path is None or (first and not path.exists()):
        return []
    if not path.exists():
        remedy = f"lab baseline {card.id} --rows candidate=FILE --dir {folder}"
        raise BadInput(path, "no baseline was kept there", remedy)
    try:
        made = msgspec.json.decode(files.read_bytes(path), type=Baseline)
    except msgspec.DecodeError as error:
        raise BadInput(path, f"is no baseline ({error})", "keep one with lab baseline") from None
    for one in made.files:
        if _sha(files.read_bytes(path.parent / one.file, own.LARGEST)) != one.sha256:
            raise BadInput(path.parent / one.file, "is not the file that was kept", "keep one again with lab baseline")
    return [f"control{'@' * bool(k.workload)}{k.workload}={path.parent / k.file}" for k in made.files]


def _words(text: str) -> list[str]:
    words = text.split(",")
    for word in words:
        refuse_unknown("--pass", "verdict", word, rules.WORDS)
    return words


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _imported(card: phases.Card, rows: Sequence[str], arguments: Namespace) -> Held:
    how = arguments.arm, arguments.map, arguments.device, arguments.metric
    outcome = verdict.judge(card, rows, *how)
    used = [m for m in outcome.matches if not m.reason and m.paired]
    apart = [_apart(m) for m in used]
    said = f"files of the control differ by at most {max(apart):.2g} %" if any(apart) else "not run, one control file"
    both = [which.differing([m.control[0], m.candidate[0]], ("file", "test_time")) for m in used]
    ceiling = [f.observed for f in outcome.judgement.verdict.findings if f.kind == "ceiling"]
    named = [f"{one.path.name} {_sha(files.read_bytes(one.path, LARGEST))[:12]}" for _, one in outcome.files]
    sd = {key: r.control_sd_pct or 0.0 for key, r in outcome.readings.items()}
    differ = "; ".join(dict.fromkeys(filter(None, both))) or "nothing that the files record"
    return Held(outcome.judgement, sd, said, "; ".join(ceiling), differ, tuple(named))


def _apart(m: which.Match) -> float:
    """The largest difference in % between the means of the control's files, 0 with a single one."""
    by: dict[Path, list[float]] = {}
    for s in m.control:
        by.setdefault(s.at.path, []).extend(s.values)
    means = [statistics.fmean(values) for values in by.values()]
    return 100.0 * (max(means) / min(means) - 1.0) if len(means) > 1 and min(means) > 0 else 0.0


def _measured(card: phases.Card, name: str | None) -> Held:
    places = store.measured_devices(card.id)
    asked = name or (places[0] if places else card.device)
    if not asked:
        raise BadInput(card.path, "has no rows and names no device", f"lab measure {card.word}, or give --rows")
    place = devices.get(asked, "--device")
    store.refuse_unmeasured(card.id, place.id)
    pairs = evidence.pairs(evidence.asked(store.rows(place.id, card.id), card), card.compared).values()
    both = [(control, candidate) for control, candidate in pairs if control and candidate]
    same = [aa for pair in both if (aa := evidence.aa_pct(*pair)) is not None]
    share = [s for _, candidate in both if (s := roofline.fraction_of(place, candidate)) is not None]
    runs = sorted({row.run for pair in both for row in pair})
    held = [path for run in runs for path in store.measured(place.id, card.id, run)]
    named = [f"{path.parent.name}/{path.name} {_sha(files.read_bytes(path))[:12]}" for path in held]
    said = f"the control and its second self differ by at most {max(same):.2g} %" if same else "not run"
    top = f"the candidate reaches {min(share):.0%} to {max(share):.0%} of its roofline" if share else ""
    arms = f"{card.control} against {card.candidate}"
    return Held(verdicts.judge_measured(card, place.id), {}, said, top, arms, tuple(named))


def comment(card: phases.Card, held: Held) -> str:
    """At most 25 lines of Markdown; what files say stands in it as text, never as markup or a mention."""
    j = held.judgement
    weighed = [f for f in j.verdict.findings if f.role in ("require", "kill") or f in j.verdict.decisive]
    lines = [f"### {j.verdict.word}: {_text(card.title)}", "", f"{_text(j.verdict.reason)}.", ""]
    lines += ["| condition | figure | interval | noise floor | smallest effect seen | |", "|---|--:|---|--:|--:|---|"]
    lines += [_line(card, f, held.sd_pct.get((f.condition.of, f.condition.workload), 0.0)) for f in weighed[:MOST]]
    lines += [f"| and {len(weighed) - MOST} more | | | | | |"] if len(weighed) > MOST else []
    ceiling = held.ceiling or f"expected was {card.expected.recovery} ({card.expected.arithmetic})"
    said = {"A/A": held.same, "Ceiling": ceiling, "The arms differ in": held.differ}
    lines += ["", *(f"- {name}: {_text(text)}." for name, text in said.items())]
    lines += [f"- Mind: {_text(j.note)}."] if j.note else []
    lines += [f"- On {j.evidence} evidence, {_text(j.device)}; card `{j.card_hash}`, gate `{j.gate_hash}`."]
    return "\n".join([*lines, f"- Rows (sha256): {_text(', '.join(held.rows))}."]) + "\n"


def _line(card: phases.Card, f: rules.Finding, sd_pct: float) -> str:
    said = (rules.SAID | rules.SAID_OF_A_KILL if f.role == "kill" else rules.SAID).get(f.state, f.state)
    cells = [str(f.condition), "", "", "", "", said]
    if f.seen:
        cells[1] = f"{f.seen.value:.5g} {f.seen.unit}"
        floor = 0.0
        if f.condition.compare == "change":
            noise = card.gate.noise
            floor = noise.floor_pct if f.seen.placements > 1 else max(noise.floor_pct, noise.sigmas * sd_pct)
            cells[3] = f"{floor:.2g} %"
        if f.seen.interval:
            cells[2] = " to ".join(f"{end:.4g}" for end in f.seen.interval)
            cells[4] = f"{smallest(f.seen, floor):.2g} {f.seen.unit}"
        else:
            cells[4] = "unknown, one run"
    return f"| {' | '.join(map(_text, cells))} |"


def smallest(seen: rules.Seen, floor: float) -> float:
    """The change, in its unit, that nine in ten runs with this interval tell from none; at least the floor."""
    low, high = seen.interval or (math.nan, math.nan)
    placed = seen.placements > 1
    degrees = seen.placements - 1 if placed else 1000
    level = interval.PLACEMENT_LEVEL if placed else interval.LEVEL
    further = 1.0 + interval.quantile(0.8, degrees) / interval.quantile(level, degrees)
    if seen.unit == "%" and low > -100:
        reach = (math.log1p(high / 100) - math.log1p(low / 100)) / 2
        return max(floor, 100 * math.expm1(reach * further))
    return (high - low) / 2 * further


def _text(words: str) -> str:
    """Text of a file in a comment: one line, no markup, nobody mentioned."""
    short = " ".join(plain(words).split())
    short = short if len(short) <= LONGEST else f"{short[:LONGEST]}..."
    escaped = html.escape(short, quote=False).replace("@", "&#64;")
    return "".join(f"\\{c}" if c in "|`*[]" else c for c in escaped)
