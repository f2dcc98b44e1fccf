"""The command line: `lab COMMAND`, also `python -m lab COMMAND`.

Exit codes: 0 fine; 1 a check or a gate failed (gates only with --fail-on); 2 bad input, with one line that names the
file, the key, the value and the remedy.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab import __version__
from lab.base.console import print_json
from lab.base.errors import BadInput, nearest


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; bad input is one line on standard error and 2."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()  # here, where a reader that went away is caught, and not at exit
        return code
    except BadInput as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (head, less) went away: not an error of ours. Keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lab", description="Killgate: kernel candidates, gates and verdicts.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str, own_json: bool = False) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        if not own_json:
            sub.add_argument("--json", action="store_true", help="print JSON for programs")
        return sub

    command("doctor", _doctor, "what is installed, what is missing and how to get it")
    command("phases", _phases, "the phase cards, by system and row")

    judge = command("judge", _judge, "hold gates against evidence")
    judge.add_argument("phase", nargs="*", help="card ids; none with --all")
    judge.add_argument("--all", action="store_true", help="every card")
    judge.add_argument("--evidence", default="recorded", choices=("recorded", "measured"))
    judge.add_argument("--device", help="measured evidence of this device only; with --rows the GPU the files are from")
    judge.add_argument(
        "--rows", action="append", metavar="[ARM=]FILE", help="somebody's own A/B: control=FILE and candidate=FILE"
    )
    judge.add_argument(
        "--arm", action="append", default=[], metavar="ARM:FIELD=VALUE", help="with --rows FILE: tells the arms apart"
    )
    judge.add_argument(
        "--map", action="append", default=[], metavar="WORKLOAD:FIELD=VALUE", help="which figures a workload takes"
    )
    judge.add_argument(
        "--fail-on", default="", metavar="WORDS", help="exit 1 on any of these verdicts (comma-separated)"
    )

    audit = command(
        "audit", _audit, "check what verdicts rest on: engagement, noise, launches, labels, possible speeds"
    )
    audit.add_argument("check", nargs="*", help="checks by name; none means all")
    audit.add_argument("--evidence", choices=("recorded", "measured"), help="default: both")

    check = command("check", _check, "hold every candidate of a family against its reference")
    check.add_argument("family", nargs="*", help="families; none means all")
    check.add_argument("--candidate", help="only this candidate")
    check.add_argument("--workload", help="only this workload (a measure workload too)")
    check.add_argument("--seed", type=int, default=0)
    check.add_argument("--device", default="", choices=("", "cpu", "cuda"), help="default: cuda where there is one")

    from lab.check import compile as ahead_of_time

    compile_text = "ahead-of-time table: resources and instructions, no GPU"
    ahead_of_time.add_arguments(command("compile", _compile, compile_text, own_json=True))

    measure = command("measure", _measure, "check and time a phase's arms together on this GPU, and append rows")
    measure.add_argument("phase", nargs="*")
    measure.add_argument("--workload", action="append", default=[], help="only this workload; may be repeated")
    measure.add_argument("--missing", action="store_true", help="only workloads without rows of the present kernels")
    measure.add_argument("--seconds", type=float, default=2.0, help="most sampling time a comparison (default 2)")
    measure.add_argument("--rest", type=float, default=0.0, help="idle after each visit, times its length (default 0)")
    measure.add_argument("--timer", default="graph", choices=("graph", "events", "cupti"), help="default graph")
    measure.add_argument("--l2", default="cold", choices=("cold", "warm"), help="default cold")
    measure.add_argument("--peers", action="store_true", help="time the installed rival libraries in the same run")
    measure.add_argument("--budget", metavar="TIME", help="stop before this is spent, e.g. 8m: most decisive first")
    measure.add_argument("--resume", nargs="?", const="", metavar="RUN", help="continue the newest run, or this one")
    measure.add_argument("--ceilings", action="store_true", help="measure what this device can do, before the phases")
    measure.add_argument("--cross-check", action="store_true", help="compare our clock with Kineto's and ncu's instead")
    measure.add_argument("--out", type=Path, help="folder for the rows; default profiles/<device>/<phase>/<run>")

    rows = command("rows", _rows, "the measured rows that profiles/ holds")
    for name in ("family", "phase", "device"):
        rows.add_argument(f"--{name}", help=f"only rows of this {name}")

    roofline = command(
        "roofline", _roofline, "floor times of a family's workloads on a device, or the recorded analysis"
    )
    roofline.add_argument("family", nargs="?")
    roofline.add_argument("--device", default="h200")
    roofline.add_argument("--recorded", action="store_true", help="reproduce the recorded roofline figures")

    from lab.trace import report

    report.add_arguments(command("trace", _trace, "where a profile's time went, every microsecond, or a refusal"))
    from lab.cli import proof_commands, trace_commands
    from lab.study import ledger, routes, verify

    trace_commands.add(command)
    proof_commands.add(command)
    routes.add(command)
    ledger.add(command)
    verify.add(command)

    write = command("write", _write, "one phase's writeup in Markdown, or the tables of README.md and NOTES.md")
    write.add_argument("phase", nargs="?")
    write.add_argument("--readme", action="store_true", help="make the README's table again from cards and rows")
    write.add_argument("--notes", action="store_true", help="make the table of every family's NOTES.md again from rows")
    write.add_argument("--out", type=Path, help="a file; default standard output")

    verdicts = command("verdicts", _verdicts, "judge, check, execute the notebooks, write build/site, print the board")
    verdicts.add_argument("--out", type=Path, help="folder for the site; default build/site")
    return parser


def _doctor(arguments: argparse.Namespace) -> int:
    from lab.cli import doctor

    findings = doctor.examine()
    if arguments.json:
        print_json([asdict(f) for f in findings])
    else:
        print(doctor.render(findings))
    return 1 if any(f.status == "broken" for f in findings) else 0


def _phases(arguments: argparse.Namespace) -> int:
    from lab.base import vocabulary
    from lab.card import phases
    from lab.judge import evidence

    cards = phases.cards().values()
    if arguments.json:
        keys = ("id", "row", "system", "device", "title", "question", "family", "control", "candidate", "card_hash")
        print_json(
            [
                {k: getattr(c, k) for k in (*keys, "gate_hash", "workloads")}
                | {"recorded": [r.verdict.id for r in c.recorded], "measured": evidence.measured_devices(c.id)}
                for c in cards
            ]
        )
        return 0
    for system, what in vocabulary.systems().items():
        own = [c for c in cards if c.system == system]
        if own:
            print(f"{system}: {what}")
        for c in own:
            places = [
                "replay" if c.recorded else "",
                *evidence.measured_devices(c.id),
                f"kernels/{c.family}" if c.family else "",
                *(f"notebooks/{name}" for name in evidence.elsewhere(c)),
            ]
            print(f"  {c.row:5} {c.id:19} {c.title} [{', '.join(filter(None, places)) or 'not measured yet'}]")
    return 0


def _judge(arguments: argparse.Namespace) -> int:
    from lab.card import phases
    from lab.judge import evidence, rules, verdicts
    from lab.write import writeup

    if not arguments.rows and (arguments.arm or arguments.map):
        raise BadInput("lab judge", "--arm and --map need --rows", "give --rows control=FILE --rows candidate=FILE")
    if not arguments.rows and bool(arguments.phase) == arguments.all:
        raise BadInput("lab judge", "needs card ids or --all", "see `lab phases`")
    fail_on = [word for word in arguments.fail_on.split(",") if word]
    for word in fail_on:
        if word not in rules.WORDS:
            raise BadInput("--fail-on", f'"{word}" is no verdict word', nearest(word, rules.WORDS))
    if arguments.rows:
        from lab.study.own import verdict

        outcome = verdict.run(arguments)
        if arguments.json:
            print_json([outcome.to_json()])
        else:
            print(verdict.render(outcome))
        return 1 if outcome.judgement.verdict.word in fail_on else 0
    chosen = list(phases.cards().values()) if arguments.all else [phases.card(p) for p in arguments.phase]
    if arguments.evidence == "recorded":
        judgements = verdicts.judge_recorded(chosen)
    else:
        judgements = []
        for c in chosen:
            if arguments.device and not arguments.all:
                evidence.refuse_unmeasured(c.id, arguments.device)
            places = evidence.measured_devices(c.id)
            judgements += [evidence.judge_measured(c, d) for d in places if arguments.device in (None, d)]
    if arguments.json:
        print_json([j.to_json() for j in judgements])
    elif judgements:
        print(writeup.board(judgements))
        for j in judgements:
            if not arguments.all or j.note:
                where = f"{j.phase} on {j.evidence} evidence, {j.device}"
                print(f"\n{where}: {j.verdict.word}. {j.verdict.reason}. {j.note}".rstrip())
    elif arguments.all or not any(evidence.elsewhere(c) for c in chosen):
        print(f"no {arguments.evidence} evidence for these cards")
    if not arguments.json and not arguments.all:
        for c in chosen:
            if names := evidence.elsewhere(c):
                where = " and ".join(f"notebooks/{name}.ipynb" for name in names)
                print(f"{c.id}: its figures are formed and judged in {where}")
    return 1 if any(j.verdict.word in fail_on for j in judgements) else 0


def _audit(arguments: argparse.Namespace) -> int:
    from lab.study.audit import run

    result = run.audit(arguments.evidence, arguments.check)
    if arguments.json:
        print_json(run.to_json(result))
    else:
        print(run.render(result))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from lab.check import accuracy, families

    families.interpret_on_cpu()
    device = arguments.device or ("cuda" if families.gpu_capability() else "cpu")
    if device == "cuda" and families.gpu_capability() is None:
        raise BadInput("--device", "cuda, but no CUDA GPU is usable here", "leave it out to check on the CPU")
    checks = []
    for name in arguments.family or families.names():
        for c in accuracy.check_family(name, arguments.candidate, arguments.workload, arguments.seed, device):
            checks.append(c)
            if not arguments.json:
                error = "" if c.relative_error is None else f"relative error {c.relative_error:.1e}"
                what = f"{c.family}/{c.candidate} {c.workload}"
                print(f"{c.status:9} {what} {error} {c.message}".rstrip(), flush=True)
    if arguments.json:
        print_json([c.to_json() for c in checks])
    elif not any(c.status == "ok" for c in checks):
        print("nothing was checked")
    return 1 if any(c.status in ("incorrect", "error") for c in checks) else 0


def _compile(arguments: argparse.Namespace) -> int:
    from lab.check import compile as ahead_of_time

    return ahead_of_time.run(arguments)


def _measure(arguments: argparse.Namespace) -> int:
    from lab.base import progress
    from lab.bench import measure
    from lab.card import phases

    settings = measure.Settings(
        seconds=arguments.seconds,
        timer=arguments.timer,
        l2=arguments.l2,
        peers=arguments.peers,
        budget_s=measure.parse_budget(arguments.budget) if arguments.budget else math.inf,
        rest=measure.parse_rest(arguments.rest),
    )
    if not arguments.phase and not arguments.ceilings:
        raise BadInput("lab measure", "needs card ids or --ceilings", "see `lab phases`")
    device = measure.require_gpu()
    if arguments.ceilings:
        _ceilings(device, arguments.json)
    named = [p for p in arguments.phase if "/" in p]
    if named and not arguments.cross_check:
        raise BadInput("lab measure", f'"{named[0]}" is no card', "only --cross-check takes FAMILY/CANDIDATE@WORKLOAD")
    cards = [phases.card(p) for p in arguments.phase if p not in named]
    known = {w for card in cards for w in card.workloads}
    for name in arguments.workload if cards else ():
        if name not in known:
            raise BadInput("--workload", f'no card named here has "{name}"', nearest(name, known))
    items = [i for c in cards for i in measure.plan(c, arguments.workload, arguments.peers)]
    if arguments.missing:
        items = measure.missing(items, device.id)
    if arguments.cross_check:
        return _cross_check(device, items, named, arguments.json)
    folder = arguments.out
    if arguments.resume is not None:
        if arguments.out is not None:
            raise BadInput("--resume", "stands beside --out", "give one; an --out that holds rows is continued anyway")
        if len(arguments.phase) > 1:
            raise BadInput("--resume", "continues one phase's run", "name one phase")
        folder = measure.run_to_resume(device.id, arguments.phase[0], arguments.resume)
    failed = False
    printed = []
    with progress.shown(len(items), quiet=arguments.json) as shown:
        for rows in measure.measure(items, settings, folder, device, shown.tell):
            shown.advance()
            for row in rows:
                failed |= row["status"] not in ("ok", "skipped")
                printed.append({k: v for k, v in row.items() if not k.endswith(("samples_us", "blocks_us", "order"))})
                result = f"{row['median_us']:.2f} us" if row["status"] == "ok" else f"{row['status']}: {row['message']}"
                shown.result(f"{row['phase']} {row['workload_id']} {row['arm']} {row['name']}: {result}")
    if arguments.json:
        print_json(printed)
    return 1 if failed else 0


def _rows(arguments: argparse.Namespace) -> int:
    from lab.write import listing

    listed = listing.listing(arguments.family, arguments.phase, arguments.device)
    if arguments.json:
        print_json(listed)
    else:
        print(listing.render(listed))
    return 0


def _ceilings(device: Any, as_json: bool) -> None:
    from lab.bench import ceiling_runs

    rows = []
    for row in ceiling_runs.measure(device):
        rows.append(row)
        if not as_json:
            print(f"{row['name']:12} {row['value']:10.2f} {row['unit']:8} {row['method']}", flush=True)
    if as_json:
        print_json(rows)


def _cross_check(device: Any, items: Any, named: Sequence[str], as_json: bool) -> int:
    from lab.bench import crosscheck

    rows = list(crosscheck.measure(device, [*crosscheck.targets(items), *map(crosscheck.parse, named)]))
    if as_json:
        print_json(rows)
    else:
        print(crosscheck.render(rows))
    return 0 if all(row["status"] in ("ok", "skipped") and row.get("within", True) for row in rows) else 1


def _roofline(arguments: argparse.Namespace) -> int:
    from lab.base import console, devices
    from lab.check import families
    from lab.place import roofline
    from lab.study import reproduction

    if arguments.recorded:
        table = reproduction.reproduce()
        if arguments.json:
            print_json([asdict(r) for r in table])
        else:
            print(reproduction.render(table, reproduction.checks()))
        return 0
    if not arguments.family:
        raise BadInput("lab roofline", "needs a family or --recorded", nearest("", families.names()))
    device, family = devices.get(arguments.device, "--device"), families.load(arguments.family)
    floors = []
    for w in family.cases.WORKLOADS:
        for precision in sorted({c.precision for c in family.candidates.values() if not c.refuses(w)}):
            cost = family.cost(w, precision)
            if w.role == "measure" and cost.pipe in device.peaks:
                floor = roofline.place(device, cost.flops, cost.bytes, cost.pipe)
                floors.append({"workload": w.id, "precision": precision, **asdict(cost), **asdict(floor)})
    if arguments.json:
        print_json(floors)
        return 0
    cells = [
        [
            f["workload"],
            f["precision"],
            f"{f['bytes'] / 1e6:.2f}",
            f"{f['flops'] / 1e9:.2f}",
            f"{f['floor_us']:.2f}",
            f["bound"],
        ]
        for f in floors
    ]
    print(f"{device.name}: floors from the datasheet's bandwidth and peaks (data/devices.toml)")
    print(console.table(("workload", "precision", "MB", "GFLOP", "floor us", "bound"), cells, (36, 12, 10, 10, 10, 8)))
    return 0


def _trace(arguments: argparse.Namespace) -> int:
    from lab.trace import report

    summary = report.summary_of(arguments)
    if arguments.json:
        print_json(summary.plain())
    else:
        print(report.render(summary))
    return 0 if summary.holds else 1


def _write(arguments: argparse.Namespace) -> int:
    from lab.card import phases
    from lab.check import families
    from lab.study import flips
    from lab.write import notes, writeup

    if [bool(arguments.phase), arguments.readme, arguments.notes].count(True) != 1:
        raise BadInput("lab write", "needs one card id, or --readme or --notes alone", "see `lab phases`")
    if arguments.notes:
        families.interpret_on_cpu()
        for name in families.names():
            notes.path(name).write_text(notes.written(name, notes.path(name).read_text(encoding="utf-8")), "utf-8")
        return 0
    if arguments.readme:
        families.interpret_on_cpu()
        arguments.out = arguments.out or flips.README
        text = flips.readme(flips.README.read_text(encoding="utf-8"), flips.flips())
    else:
        text = writeup.write(phases.card(arguments.phase))
    if arguments.out is None:
        print(text, end="")
        return 0
    try:
        arguments.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(arguments.out, f"cannot be written ({error.strerror})", "choose another --out") from None
    return 0


def _verdicts(arguments: argparse.Namespace) -> int:
    from lab.write import site

    return site.verdicts(arguments.out, as_json=arguments.json)
