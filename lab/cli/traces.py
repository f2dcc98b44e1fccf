"""`lab trace`, `lab diff` and `lab amdahl`: where the time went, whose the difference is, what a speed-up gives.

A side of a difference is a file that `lab trace` reads or the id of a recorded breakdown. Window options hold for both
sides; `--nvtx-b` lets one capture be compared with itself, arm against arm.
"""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import to_builtins

from lab.base.console import show
from lab.base.errors import BadInput, nearest

if TYPE_CHECKING:
    from lab.trace.breakdowns import Breakdown
    from lab.trace.categories import Rules
    from lab.trace.diff import Difference
    from lab.trace.model import Trace
    from lab.trace.summary import Summary


WRITES = {"html": (".html", ".htm"), "svg": (".svg",), "csv": (".csv",), "perfetto": (".json", ".perfetto")}


def trace(arguments: Namespace) -> int:
    """A profile's summary, or several as the ranks of one run; 1 when one of its identities does not hold."""
    from lab.trace import report

    asked = [name for name in WRITES if getattr(arguments, name)]
    for name in asked:
        path = getattr(arguments, name)
        if path.suffix.lower() not in WRITES[name]:
            what = f'"{path}" does not end in {WRITES[name][0]}'
            raise BadInput(f"--{name}", what, "name another file: a profile of that name would be overwritten")
        if path.exists() and any(file.exists() and path.samefile(file) for file in arguments.file):
            raise BadInput(f"--{name}", f'"{path}" is the profile itself', "write to another file")
    found = [one for path in arguments.file for one in report.summaries_of(arguments, path)]
    if len(found) > 1 and asked:
        raise BadInput(f"--{asked[0]}", f"is of one trace, and here are {len(found)}", "give one file at a time")
    if len(found) > 1:
        many = [s for _, s in found]
        show(arguments.json, lambda: [s.plain() for s in many], lambda: report.render_ranks(many))
        return 0 if all(s.holds for s in many) else 1
    ((one, summary),) = found
    show(arguments.json, summary.plain, lambda: report.render(summary))
    _write(one, summary, arguments)
    return 0 if summary.holds else 1


def _write(one: Trace, summary: Summary, arguments: Namespace) -> None:
    from lab.base import files

    if arguments.html:
        from lab.write import trace_page

        files.write(arguments.html, trace_page.page(one, summary))
    if arguments.svg:
        from lab import draw

        files.write(arguments.svg, draw.svg(draw.timeline(one)))
    if arguments.csv or arguments.perfetto:
        from lab.trace import outputs

        if arguments.csv:
            files.write(arguments.csv, outputs.table(summary))
        if arguments.perfetto:
            files.write(arguments.perfetto, outputs.perfetto(one).decode())


def diff(arguments: Namespace) -> int:
    """One breakdown, the difference of two, the recorded list, or the sources' attributions."""
    from lab.trace import breakdowns
    from lab.trace import diff as differences

    if arguments.recorded:
        from lab.study import attributions

        claims = attributions.reproduce()
        show(arguments.json, lambda: {"attributions": to_builtins(claims)}, lambda: attributions.render(claims))
        return 1 if any(c.agrees != (c.expected == "agrees") for c in claims) else 0
    if arguments.list:
        for name in breakdowns.recorded_ids():
            print(f"{name:48} {', '.join(breakdowns.units(name)) or 'no unit for all of its parts'}")
        return 0
    if not 1 <= len(arguments.side) <= 2:
        raise BadInput("lab diff", f"{len(arguments.side)} sides", "give A and B, A alone, --recorded or --list")
    sides = _sides(arguments)
    if len(sides) == 1:
        show(arguments.json, lambda: asdict(sides[0]), lambda: differences.render_one(sides[0]))
        return 0
    if arguments.per == "launch":
        sides[1] = differences.at_launches_of(*sides)
    found = differences.difference(*sides)
    show(arguments.json, lambda: asdict(found), lambda: differences.render(found))
    if arguments.svg:
        _picture(found, arguments.svg)
    return 0


def _picture(found: Difference, path: Path) -> None:
    from lab import draw

    names = (found.a.title.split(",")[0], found.b.title.split(",")[0])
    if names[0] == names[1]:
        names = (f"A: {found.a.id}", f"B: {found.b.id}")
    try:
        draw.save(draw.gap(found, names), path)
    except OSError as error:
        raise BadInput(path, f"cannot be written ({error.strerror})", "choose another --svg") from None


def _sides(arguments: Namespace) -> list[Breakdown]:
    from lab.trace import breakdowns, diff

    names = arguments.side if isinstance(arguments.side, list) else [arguments.side]
    known = [n for n in names if n in breakdowns.recorded_ids()]
    unit = {"step": "ms/step", "token": "us/token"}.get(arguments.per)
    if unit is None and len(known) == len(names) > 1:
        unit = next((u for u in breakdowns.UNITS if all(u in breakdowns.units(name) for name in known)), None)
    found = []
    for i, (name, total) in enumerate(zip(names, _pair("--total", getattr(arguments, "total", None)), strict=False)):
        if name not in known:
            found.append(_measured(name, arguments, i))
        elif total is None:
            found.append(breakdowns.from_recorded(name, unit))
        else:
            timed = f"us/{arguments.per}" if arguments.per else "us"
            found.append(diff.in_time(breakdowns.from_recorded(name, "%"), total, timed))
    return found


def _windowed(name: str, arguments: Namespace, i: int = 0) -> tuple[Trace, Rules]:
    """A profile's window and the rules that the arguments give; i: 1 for side B."""
    from lab.trace import breakdowns, categories, files, report

    if not Path(name).exists():
        close = nearest(name, breakdowns.recorded_ids())
        raise BadInput(f"lab {arguments.COMMAND}", f'"{name}" is neither a file nor a recorded breakdown', close)
    nvtx = (getattr(arguments, "nvtx_b", None) if i else None) or arguments.nvtx
    # `lab amdahl --device` says whose measured rows to take, not which GPU of the profile.
    window = Namespace(**{**vars(arguments), "nvtx": nvtx, "nth": None, "graph": None, "device": None})
    return report.windowed(files.read(name, arguments.unpack * 1_000_000), window), categories.load(
        arguments.rules, arguments.rules_only
    )


def _measured(name: str, arguments: Namespace, i: int) -> Breakdown:
    """A profile's breakdown in the window and per the count that the arguments give."""
    from lab.trace import breakdowns

    trace, rules = _windowed(name, arguments, i)
    steps, tokens = _pair("--steps", arguments.steps)[i], _pair("--tokens", arguments.tokens)[i]
    if steps and tokens:
        raise BadInput("--steps", "given together with --tokens", "choose one unit")
    per = "token" if tokens else "step" if steps else trace.unit if trace.steps else ""
    count = tokens or steps or trace.steps or 1
    if arguments.per == "total":
        count, per = 1, ""
    elif arguments.per in ("step", "token") and per != arguments.per:
        remedy = f"give --{arguments.per}s" + (", or --steady or --step" if arguments.per == "step" else "")
        raise BadInput(name, f"holds no known number of {arguments.per}s", remedy)
    return breakdowns.from_trace(trace, rules, float(count), per)


def _pair(flag: str, text: str | None) -> tuple[float | None, float | None]:
    """ "32" or "32,16" as one number for each side."""
    if text is None:
        return None, None
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (1, 2) or not all(0 < v < math.inf for v in values):
        raise BadInput(flag, f'"{text}"', "give one number above 0, or two for A and B: 32,16")
    return values[0], values[-1]


def amdahl(arguments: Namespace) -> int:
    """A projection, and how it stands against a need: of a profile from its exposed to its union time, of a recorded
    breakdown by its share."""
    from lab.card import phases
    from lab.judge import projection
    from lab.trace import breakdowns
    from lab.trace.amdahl import ASSUMED, Interval

    if sum(v is not None for v in (arguments.speedup, arguments.measured, arguments.us)) != 1:
        raise BadInput("lab amdahl", "needs one of --speedup, --us and --measured", "--speedup inf gives the ceiling")
    if not (arguments.category or arguments.kernel):
        raise BadInput("lab amdahl", "nothing gets faster", "give --category, or --kernel with an expression")
    asked = []
    if arguments.needs:
        try:
            asked = [projection.Need("asked", float(arguments.needs), f"{float(arguments.needs):+g} %")]
        except ValueError:
            card = phases.card(arguments.needs)
            asked = projection.needs(card)
            if not asked:
                raise BadInput(card.path, "its gate asks for no rise of throughput", "give --needs in %") from None
    if arguments.side in breakdowns.recorded_ids():
        if arguments.kernel or arguments.us is not None or arguments.wall is not None:
            raise BadInput("lab amdahl", f"{arguments.side} has categories only", "give --category and --speedup")
        side = _sides(arguments)[0]
        what, share = f"{' + '.join(arguments.category)} in {side.id}", projection.share(side, arguments.category)
        said, warnings = f"{side.denominator}, {side.whole:,.5g} {side.unit}", side.warnings
        assumed, mean_us = ASSUMED, 0.0
    else:
        from lab.trace import exposed

        trace, rules = _windowed(arguments.side, arguments)
        found = exposed.what_if(trace, rules, arguments.category or (), arguments.kernel or "", arguments.wall)
        what, share, said, warnings = f"{found.what} in {trace.source}", found.share, found.denominator, found.warnings
        assumed, mean_us = exposed.ASSUMED, found.us / max(found.count, 1)
    if arguments.measured:
        workload, by = projection.measured(arguments.measured, arguments.device, arguments.workload)
        what += f", sped up as {arguments.measured} at {workload} on {arguments.device}"
    elif arguments.us is not None:
        if not arguments.us > 0:
            raise BadInput("--us", f"{arguments.us:g}", "give what a launch takes afterwards, above 0")
        by = Interval(*[mean_us / arguments.us] * 3)
        what += f", {mean_us:,.3f} us a launch made {arguments.us:,.3f}"
    else:
        by = Interval(*[arguments.speedup] * 3)
    base = None if arguments.base is None else Interval.of(arguments.base)
    answer = projection.answer(what, share, by, base, arguments.of_wall, asked, said, warnings, assumed)
    show(arguments.json, lambda: asdict(answer), lambda: projection.render(answer))
    return 0
