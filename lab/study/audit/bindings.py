"""data/audit.toml: which figures a check is asked of, where no card says so.

A binding names a check, a title, and for each role of the check the ids of its figures: a recorded figure, `x.*` for
all figures whose id begins with `x.`, a measured row (`profiles/...#arm@workload`), or `device:ID.FACT` for a fact of
data/devices.toml. It states no number and no outcome: the check computes both. Anything unknown is refused in one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.base import devices, vocabulary
from lab.base.errors import REPOSITORY, BadInput, nearest
from lab.card import recorded
from lab.row import store
from lab.row.records import Measurement
from lab.study.audit.subject import Check, Quantity, Subject, from_figure

FILE = REPOSITORY / "data" / "audit.toml"
TIMED = ("ok", "suspect")  # statuses of a row with a time
OWN_KEYS = {"check", "title", "verdicts", "cards"}


def read(checks: Mapping[str, Check], path: Path | None = None) -> list[tuple[Check, Subject]]:
    """Every binding of the file as (check, subject); raises BadInput for anything unknown, naming file and title."""
    path = path or FILE
    table = vocabulary.read_toml(path)
    for key in table.keys() - {"case"}:
        raise BadInput(path, f'unknown table "{key}"', "write [[case]]")
    return [_case(path, entry, checks) for entry in table.get("case", ())]


def _case(path: Path, entry: Mapping[str, Any], checks: Mapping[str, Check]) -> tuple[Check, Subject]:
    title = entry.get("title")
    if not isinstance(title, str) or not title:
        raise BadInput(path, f"a case has no title ({', '.join(entry)})", "say in a few words what it is about")
    where = f"{path}: {title}"
    if entry.get("check") not in checks:
        raise BadInput(where, f'check = "{entry.get("check")}" is unknown', nearest(str(entry.get("check")), checks))
    check = checks[entry["check"]]
    known = {role for group in check.needs for role in group} | set(check.may)
    roles: dict[str, tuple[Quantity, ...]] = {}
    for key, value in entry.items():
        if key in OWN_KEYS:
            continue
        if key not in known:
            raise BadInput(where, f'unknown key "{key}"', nearest(key, known | OWN_KEYS))
        ids = value if isinstance(value, list) else [value]
        roles[key] = tuple(q for i in ids for q in quantities(i, where))
    if not any(set(group) <= roles.keys() for group in check.needs):
        wanted = " or ".join(" + ".join(group) for group in check.needs)
        raise BadInput(where, f"{check.name} needs {wanted}", "name a figure for each")
    verdicts = tuple(entry.get("verdicts", ()))
    words = [recorded.verdict(v, where).verdict for v in verdicts]
    words += [str(q.facts["source_word"]) for qs in roles.values() for q in qs if q.facts.get("source_word")]
    kinds = {
        "measured" if q.id.startswith("profiles/") else "recorded"
        for qs in roles.values()
        for q in qs
        if q.id and not q.id.startswith("device:")
    }
    kind = "measured" if kinds == {"measured"} else "recorded"
    return check, Subject(title, kind, roles, words[0] if words else "", verdicts, tuple(entry.get("cards", ())))


def quantities(name: Any, where: str) -> list[Quantity]:
    """The quantities that one id of a binding stands for; raises BadInput when there is none."""
    if not isinstance(name, str):
        raise BadInput(where, f"{name!r:.40} is no id", "write an id in quotes: the audit takes no number by hand")
    if name.startswith("device:"):
        device_id, _, fact = name.removeprefix("device:").partition(".")
        found = devices.get(device_id, where).fact(fact)
        return [Quantity(found.value, found.unit, name)]
    if name.startswith("profiles/"):
        return [_row(name, where)]
    if name.endswith(".*"):
        chosen = [f for i, f in sorted(recorded.figures().items()) if i.startswith(name[:-1])]
        if not chosen:
            raise BadInput(where, f'no recorded figure has an id that begins with "{name[:-1]}"', "mend the id")
    else:
        chosen = [recorded.figure(name, where)]
    for figure in chosen:
        if not isinstance(figure.value, float):
            raise BadInput(where, f'{figure.id} = "{figure.value}" is not a number', "bind another figure")
    return [from_figure(f) for f in chosen]


def _row(name: str, where: str) -> Quantity:
    parts = name.split("#")[0].split("/")
    rows = store.rows(device=parts[1], phase=parts[2]) if len(parts) == 4 else ()
    for row in rows:
        if row.id == name and row.status in TIMED:
            return from_row(row)
    raise BadInput(
        where, f'no measured row with a time has the id "{name}"', "see `lab judge ID --evidence measured --json`"
    )


def from_row(row: Measurement) -> Quantity:
    """A measured row's median time as a quantity; its timer is its clock. One that is suspect counts as withdrawn."""
    facts: dict[str, Any] = {"device": row.device, "model": row.workload_id, "metric": "kernel_us", "arm": row.name}
    facts |= {"clock": row.timer or "", "profiled": row.profiled}
    withdrawn = "" if row.status == "ok" else f"status {row.status}"
    return Quantity(row.median_us or 0.0, "us", row.id, withdrawn, facts)
