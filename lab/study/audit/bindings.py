"""data/audit.toml: which figures a check is asked of, where no card says so.

A binding names a check, a title, and for each role of the check the ids of its figures: a recorded figure, `x.*` for
all figures whose id begins with `x.`, a measured row (`profiles/...#arm@workload`), or `device:ID.FACT` for a fact of
data/devices.toml. It states no number and no outcome: the check computes both. Anything unknown is refused in one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from lab.base import devices, files
from lab.base.errors import REPOSITORY, BadInput, refuse_unknown, shown
from lab.base.files import Text
from lab.card import recorded
from lab.row import store
from lab.row.records import Measurement
from lab.study.audit.subject import Check, Quantity, Subject, from_figure

FILE = REPOSITORY / "data" / "audit.toml"
TIMED = ("ok", "suspect")  # statuses of a row with a time


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A binding: the check, what it is about, ids that a reader can follow, and the ids of figures by role."""

    check: Text
    title: Text
    roles: dict[str, Text | list[Text]]
    verdicts: tuple[str, ...] = ()
    cards: tuple[str, ...] = ()


OWN_KEYS = tuple(key for key in Case.__struct_fields__ if key != "roles")


def read(checks: Mapping[str, Check], path: Path | None = None) -> list[tuple[Check, Subject]]:
    """Every binding of the file as (check, subject); raises BadInput for anything unknown, naming file and title."""
    path = path or FILE
    file = files.convert(files.read_toml(path), dict[str, list[dict[str, Any]]], path)
    for key in file.keys() - {"case"}:
        raise BadInput(path, f'unknown table "{key}"', "write [[case]]")
    found = []
    for place, entry in enumerate(file.get("case", ()), start=1):
        own = {key: value for key, value in entry.items() if key in OWN_KEYS}
        roles = {key: value for key, value in entry.items() if key not in OWN_KEYS}
        case = files.convert({**own, "roles": roles}, Case, path, str(entry.get("title", f"case {place}")))
        found.append(_subject(f"{shown(path)}: {case.title}", case, checks))
    return found


def _subject(where: str, case: Case, checks: Mapping[str, Check]) -> tuple[Check, Subject]:
    refuse_unknown(where, "check", case.check, checks)
    check = checks[case.check]
    known = {role for group in (*check.needs, check.may) for role in group}
    for role in case.roles:
        refuse_unknown(where, "key", role, known | set(OWN_KEYS))
    roles = {
        role: tuple(q for i in ([ids] if isinstance(ids, str) else ids) for q in quantities(i, where))
        for role, ids in case.roles.items()
    }
    if not check.has(roles):
        wanted = " or ".join(" + ".join(group) for group in check.needs)
        raise BadInput(where, f"{check.name} needs {wanted}", "name a figure for each")
    words: list[str] = [recorded.verdict(v, where).reading for v in case.verdicts]
    words += [q.source_word for qs in roles.values() for q in qs if q.source_word]
    ids = [q.id for qs in roles.values() for q in qs if q.id and not q.id.startswith("device:")]
    kind = "measured" if ids and all(i.startswith("profiles/") for i in ids) else "recorded"
    return check, Subject(case.title, kind, roles, words[0] if words else "", case.verdicts, case.cards)


def quantities(name: str, where: str) -> list[Quantity]:
    """The quantities that one id of a binding stands for; raises BadInput when there is none."""
    if name.startswith("device:"):
        device_id, _, fact = name.removeprefix("device:").partition(".")
        found = devices.get(device_id, where).fact(fact)
        return [Quantity(found.value, found.unit, name)]
    if name.startswith("profiles/"):
        return [_row(name, where)]
    ids = [name]
    if name.endswith(".*"):
        ids = sorted(i for i in recorded.figures() if i.startswith(name[:-1]))
        if not ids:
            raise BadInput(where, f'no recorded figure has an id that begins with "{name[:-1]}"', "mend the id")
    return [from_figure(recorded.number(where, i)) for i in ids]


def _row(name: str, where: str) -> Quantity:
    parts = name.split("#")[0].split("/")
    for row in store.rows(device=parts[1], phase=parts[2]) if len(parts) == 4 else ():
        if row.id == name and row.status in TIMED:
            return from_row(row)
    what = f'no measured row with a time has the id "{name}"'
    raise BadInput(where, what, "see `lab judge ID --evidence measured --json`")


def from_row(row: Measurement) -> Quantity:
    """A measured row's median time as a quantity; its timer is its clock. One that is suspect counts as withdrawn."""
    withdrawn, clock = "" if row.status == "ok" else f"status {row.status}", row.timer or ""
    where = (row.device, row.workload_id, row.metric)
    return Quantity(row.median_us or 0.0, "us", row.id, withdrawn, *where, clock=clock, profiled=row.profiled)
