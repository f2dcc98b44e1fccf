"""`lab diff`, `lab amdahl`, `lab profile` and `lab counters`: their arguments, and what they print.

A side of a difference is a file that `lab trace` reads or the id of a recorded breakdown. Window options hold for both
sides; `--nvtx-b` lets one capture be compared with itself, arm against arm.
"""

from __future__ import annotations

import math
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.base.console import print_json
from lab.base.errors import BadInput, nearest

if TYPE_CHECKING:
    from lab.trace.breakdowns import Breakdown
    from lab.trace.diff import Difference

Command = Callable[..., ArgumentParser]


def add(command: Command) -> None:
    """Add the four commands; `command(name, run, text)` makes a parser."""
    diff = command("diff", run_diff, "whose microseconds the gap between two profiles is")
    diff.add_argument("side", nargs="*", help="A and B, or A alone: a profile, or the id of a recorded breakdown")
    _windows(diff)
    diff.add_argument("--nvtx-b", metavar="GLOB", help="the NVTX ranges of B, when they are called differently")
    diff.add_argument("--total", metavar="A[,B]", help="totals in us for recorded shares (a step or a token)")
    diff.add_argument("--svg", type=Path, help="write the picture of the gap to this file")
    diff.add_argument("--recorded", action="store_true", help="the sources' own attributions, computed again")
    diff.add_argument("--list", action="store_true", help="the recorded breakdowns and their units")

    law = command("amdahl", run_amdahl, "what a faster kernel gives end to end, and whether a phase needs more")
    law.add_argument("side", help="a profile, or the id of a recorded breakdown")
    law.add_argument("--category", action="append", required=True, help="what gets faster; several count together")
    law.add_argument("--speedup", type=float, help="time before over time after; inf removes it")
    law.add_argument("--measured", metavar="PHASE", help="take the speed-up from this phase's measured rows")
    law.add_argument("--device", default="h200", help="with --measured: whose rows (default h200)")
    law.add_argument("--workload", help="with --measured: which workload")
    law.add_argument("--base", type=float, help="throughput before, tok/s")
    law.add_argument(
        "--of-wall", type=float, default=1.0, help="what the breakdown's whole is of the wall time, 0 to 1"
    )
    law.add_argument("--needs", metavar="PHASE|PCT", help="a card whose gate asks for throughput, or a rise in %%")
    _windows(law)

    profile = command("profile", run_profile, "a phase's arms under nsys or torch.profiler", own_json=True)
    profile.add_argument("phase", nargs="*", help="card ids")
    profile.add_argument("--workload", help="only this workload")
    profile.add_argument("--steps", type=int, default=20, help="steps recorded for each arm (default 20)")
    profile.add_argument(
        "--tool", choices=("nsys", "torch.profiler"), help="default: nsys with its importer, else torch"
    )
    profile.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu records host ranges only")
    profile.add_argument("--out", type=Path, help="folder; <phase>/trace.parquet goes below it")
    profile.add_argument(
        "--store", type=Path, metavar="FILE", help="make the Parquet of a trace.json.gz from elsewhere"
    )
    profile.add_argument("--inside", action="store_true", help=SUPPRESS)

    counters = command("counters", run_counters, "a card's arms under Nsight Compute: what binds each kernel")
    counters.add_argument("phase", nargs="*", help="card ids")
    counters.add_argument("--workload", help="only this workload")
    counters.add_argument("--arm", help="only this candidate, or the arms of this role: control, candidate, peer")
    counters.add_argument("--peers", action="store_true", help="the installed rival libraries too")


def _windows(parser: ArgumentParser) -> None:
    parser.add_argument("--rules", help="category rules: .toml, a folder, or a gputrc2graph JSON[#engine/model]")
    window = parser.add_mutually_exclusive_group()
    window.add_argument("--nvtx", metavar="GLOB", help="only what was launched inside these NVTX ranges")
    window.add_argument("--time", metavar="START:END", help="only between these times (us, 2ms)")
    window.add_argument("--replay", type=int, metavar="N", help="only the n-th CUDA graph launch")
    window.add_argument("--steady", action="store_true", help="only the repeating decode steps")
    parser.add_argument("--per", choices=("step", "token"), help="unit of recorded tables that print both")
    parser.add_argument("--steps", metavar="A[,B]", help="steps in each side's window")
    parser.add_argument("--tokens", metavar="A[,B]", help="tokens made in each side's window")


def run_diff(arguments: Namespace) -> int:
    """`lab diff`: one breakdown, the difference of two, the recorded list, or the sources' attributions."""
    from lab.trace import breakdowns, diff

    if arguments.recorded:
        return _recorded(arguments)
    if arguments.list:
        for name in breakdowns.recorded_ids():
            print(f"{name:48} {', '.join(breakdowns.units(name)) or 'no unit for all of its parts'}")
        return 0
    if not 1 <= len(arguments.side) <= 2:
        raise BadInput("lab diff", f"{len(arguments.side)} sides", "give A and B, A alone, --recorded or --list")
    sides = _sides(arguments)
    if len(sides) == 1:
        _show(arguments, asdict(sides[0]), diff.render_one(sides[0]))
        return 0
    found = diff.difference(*sides)
    _show(arguments, asdict(found), diff.render(found))
    if arguments.svg:
        _picture(found, arguments.svg)
    return 0


def _show(arguments: Namespace, value: dict[str, Any], text: str) -> None:
    if arguments.json:
        print_json(value)
    else:
        print(text)


def _picture(found: Difference, path: Path) -> None:
    from lab import draw

    names = (found.a.title.split(",")[0], found.b.title.split(",")[0])
    if names[0] == names[1]:
        names = (f"A: {found.a.id}", f"B: {found.b.id}")
    try:
        draw.save(draw.gap(found, names), path)
    except OSError as error:
        raise BadInput(path, f"cannot be written ({error.strerror})", "choose another --svg") from None


def _recorded(arguments: Namespace) -> int:
    from lab.study import attributions

    claims, groups = attributions.reproduce(), attributions.drifts()
    value = {"attributions": [asdict(c) for c in claims], "drifts": [asdict(g) for g in groups]}
    _show(arguments, value, attributions.render(claims, groups))
    return 1 if any(c.agrees != (c.expected == "agrees") for c in claims) else 0


def _sides(arguments: Namespace) -> list[Breakdown]:
    from lab.trace import breakdowns, diff

    names = arguments.side if isinstance(arguments.side, list) else [arguments.side]
    known = [n for n in names if n in breakdowns.recorded_ids()]
    unit = {"step": "ms/step", "token": "us/token"}.get(arguments.per) if arguments.per else None
    if unit is None and len(known) == len(names) > 1:
        unit = diff.common_unit(known)
    totals = _pair("--total", getattr(arguments, "total", None))
    found = []
    for i, name in enumerate(names):
        timed = f"us/{arguments.per}" if arguments.per else "us"
        recorded = diff.side(name, unit if totals[i] is None else timed, totals[i])
        found.append(recorded or _measured(name, arguments, i))
    return found


def _measured(name: str, arguments: Namespace, i: int) -> Breakdown:
    """A profile's breakdown in the window and per the count that the arguments give."""
    from lab.trace import breakdowns, categories, files, report

    if not Path(name).exists():
        close = nearest(name, breakdowns.recorded_ids())
        raise BadInput("lab diff", f'"{name}" is neither a file nor a recorded breakdown', close)
    nvtx = getattr(arguments, "nvtx_b", None) if i else None
    window = {"nvtx": nvtx or arguments.nvtx, "time": arguments.time, "replay": arguments.replay}
    trace = files.read(name)
    trace = report.windowed(trace, Namespace(**window, steady=arguments.steady, nth=None, graph=None))
    steps, tokens = _pair("--steps", arguments.steps)[i], _pair("--tokens", arguments.tokens)[i]
    if steps and tokens:
        raise BadInput("--steps", "given together with --tokens", "choose one unit")
    rules = categories.load(arguments.rules)
    if tokens:
        return breakdowns.from_trace(trace, rules, tokens, "token")
    steps = steps or (float(trace.steps) if trace.steps else None)
    return breakdowns.from_trace(trace, rules, steps, "step") if steps else breakdowns.from_trace(trace, rules)


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


def run_amdahl(arguments: Namespace) -> int:
    """`lab amdahl`: a projection, and how it stands against a need."""
    from lab.card import phases
    from lab.judge import projection
    from lab.trace.amdahl import Interval

    if (arguments.speedup is None) == (arguments.measured is None):
        raise BadInput("lab amdahl", "needs --speedup or --measured, not both", "--speedup inf gives the ceiling")
    side = _sides(arguments)[0]
    what = f"{' + '.join(arguments.category)} in {side.id}"
    if arguments.measured:
        workload, by = projection.measured(arguments.measured, arguments.device, arguments.workload)
        what += f", sped up as {arguments.measured} at {workload} on {arguments.device}"
    else:
        by = Interval.of(arguments.speedup)
        by = Interval(*[arguments.speedup] * 3) if math.isinf(arguments.speedup) else by
    asked = []
    if arguments.needs:
        try:
            asked = [projection.Need("asked", float(arguments.needs), f"{float(arguments.needs):+g} %")]
        except ValueError:
            card = phases.card(arguments.needs)
            asked = projection.needs(card)
            if not asked:
                raise BadInput(card.path, "its gate asks for no rise of throughput", "give --needs in %") from None
    base = None if arguments.base is None else Interval.of(arguments.base)
    found = projection.answer(what, projection.share(side, arguments.category), by, base, arguments.of_wall, asked)
    _show(arguments, asdict(found), projection.render(found))
    return 0


def run_profile(arguments: Namespace) -> int:
    """`lab profile`."""
    from lab.trace import capture

    for line in capture.run(arguments):
        print(line, flush=True)
    return 0


def run_counters(arguments: Namespace) -> int:
    """`lab counters`."""
    from lab.bench import counters

    for line in counters.run(arguments):
        print(line, flush=True)
    return 0
