"""The command line: `lab COMMAND`, also `python -m lab COMMAND`.

COMMANDS is the whole of it: a command's function, its sentence, its arguments. The function is named and not imported,
and only the command that was asked for gets its arguments, so `lab --help` costs nothing that a room imports.

Exit codes: 0 fine; 1 a check or a gate failed (gates only with --fail-on); 2 bad input, with one line that names the
file, the key, the value and the remedy.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import __version__
from lab.base import console, own
from lab.base.errors import BadInput
from lab.cli import MSGSPEC

Arg = tuple[tuple[str, ...], dict[str, Any]]


def arg(*names: str, **options: Any) -> Arg:
    """One argument as argparse takes it; `one_of` names a group of which a user may give one."""
    return names, options


def flag(name: str, text: str, **options: Any) -> Arg:
    """An argument that is there or not."""
    return arg(name, action="store_true", help=text, **options)


def several(name: str, text: str, **options: Any) -> Arg:
    """An option that may be repeated, [] without it."""
    return arg(name, action="append", default=[], help=text, **options)


JSON = flag("--json", "print JSON for programs")
CARDS = arg("--cards", metavar="DIR", help="a card directory of your own, with its profiles/; default $KILLGATE_CARDS")
ON = arg("--on", metavar="ADDRESS", help="on the workers of this Dask scheduler (tcp://HOST:PORT; see `lab cluster`)")
WINDOW = (
    arg("--rules", metavar="TOML", help="category rules, a file or a folder, that come before the built-in ones"),
    flag("--rules-only", "with --rules: not the built-in ones"),
    arg("--unpack", type=int, default=0, metavar="MB", help="read files that have or unpack to so much (default 100x)"),
    arg("--nvtx", metavar="GLOB", help="only what was launched inside these NVTX ranges", one_of="window"),
    arg("--time", metavar="START:END", help="only between these times after the first activity (us, 2ms)",
        one_of="window"),
    arg("--replay", type=int, metavar="N", help="only the n-th CUDA graph launch (-1 the last)", one_of="window"),
    flag("--steady", "only the repeating decode steps", one_of="window"),
    arg("--step", metavar="MARK", help="only the steps that begin at graph[:ID], nvtx:GLOB or kernel:REGEX",
        one_of="window"),
)  # fmt: skip
COUNTS = (
    arg(
        "--per",
        choices=("step", "token", "launch", "total"),
        help="normalise by this work; for recorded tables that print both, the unit",
    ),
    arg("--steps", metavar="A[,B]", help="steps in each side's window"),
    arg("--tokens", metavar="A[,B]", help="tokens made in each side's window"),
)
FILES = (
    several("--arm", "with --rows FILE: tells the arms apart", metavar="ARM:FIELD=VALUE"),
    several("--map", "with --rows: which figures a workload takes", metavar="WORKLOAD:FIELD=VALUE"),
    several("--metric", "with --rows: how a metric is read of a profile (category=, kernel=) or a table (column=)",
        metavar="METRIC:KEY=VALUE"),
)  # fmt: skip
ROWS = (
    arg("--rows", action="append", metavar="[ARM[@WORKLOAD]=]FILE",
        help="somebody's own A/B: control=FILE and candidate=FILE"),
    *FILES,
    arg("--device", help="measured evidence of this device only; with --rows the GPU the files are from"),
)  # fmt: skip
PASSING = arg("--pass", dest="passing", default="GO,CONDITIONAL-GO", metavar="WORDS",
    help="verdicts that pass, comma-separated (default GO,CONDITIONAL-GO)")  # fmt: skip
PROMPT = "The code word is {word}. Repeat the code word and nothing else."


@dataclass(frozen=True)
class Command:
    """run: "module:function", which takes the parsed arguments and returns the exit code."""

    run: str
    text: str
    arguments: tuple[Arg, ...] = ()
    json: bool = True
    epilog: str = ""


COMMANDS = {
    "doctor": Command("lab.cli.doctor:run", "what is installed, what is missing and how to get it"),
    "phases": Command("lab.cli.cards:phases", "the phase cards, by system and row", (CARDS,)),
    "judge": Command("lab.cli.cards:judge", "hold gates against evidence", (
        CARDS,
        arg("phase", nargs="*", help="card ids, or paths of your own; none with --all"),
        flag("--all", "every card"),
        arg("--evidence", default="recorded", choices=("recorded", "measured")),
        *ROWS,
        flag("--keep", "with --rows: keep what was read in profiles/, so that the board has the verdict"),
        arg("--fail-on", default="", metavar="WORDS", help="exit 1 on any of these verdicts (comma-separated)"),
    )),
    "gate": Command("lab.study.own.gate:run",
        "a verdict as an exit status, and as a comment for a pull request: 0 passes, 1 does not, 2 bad input", (
        arg("phase", help="a card's id, or the path of one of your own"),
        CARDS,
        *ROWS,
        PASSING,
        arg("--baseline", type=Path, metavar="DIR", help="the control is what `lab baseline` kept there"),
        arg("--comment", type=Path, metavar="FILE", help="write the comment here too, 25 lines of Markdown at most"),
    ), json=False),
    "baseline": Command("lab.study.own.gate:baseline",
        "keep the candidate's files of a run that passes, as the next one's control; 1 where it does not pass", (
        arg("phase", help="a card's id, or the path of one of your own"),
        CARDS,
        *ROWS,
        PASSING,
        arg("--dir", type=Path, required=True, help="where they are kept: commit it, or cache it between runs"),
    ), json=False),
    "audit": Command("lab.cli.cards:audit",
        "check what verdicts rest on: engagement, noise, launches, labels, possible speeds", (
        arg("check", nargs="*", help="checks by name; none means all"),
        arg("--evidence", choices=("recorded", "measured"), help="default: both"),
    )),
    "check": Command("lab.cli.kernels:check", "hold every candidate of a family against its reference", (
        arg("family", nargs="*", help="families; none means all"),
        arg("--candidate", help="only this candidate"),
        arg("--workload", help="only this workload (a measure workload too)"),
        arg("--seed", type=int, default=0),
        arg("--device", default="", choices=("", "cpu", "cuda"), help="default: cuda where there is one"),
        ON,
    )),
    "compile": Command("lab.cli.kernels:compile", "ahead-of-time table: resources and instructions, no GPU", (
        arg("family", nargs="?", help="a folder of kernels/"),
        arg("--targets", help="compute capabilities, e.g. 90,121"),
        flag("--probe", "what this Triton makes of e2m1 x e2m1 dot_scaled"),
        flag("--write", "with --probe: keep the rows under profiles/aot/"),
        ON,
    )),
    "export": Command("lab.check.export:run", "a folder that runs a kernel without Python, with a test of its own", (
        arg("family"),
        arg("candidate"),
        arg("--shape", required=True, metavar="AXIS=VALUE,...", help="e.g. M=8,N=5120,K=6144; or a workload's id"),
        arg("--device", default="h200", help="the GPU it is for (default h200)"),
        arg("out", type=Path, metavar="OUT", help="a new folder"),
    ), json=False),
    "cluster": Command("lab.bench.local:run",
        "a Dask scheduler and workers on this host, one a GPU, until Ctrl-C; prints the address for --on", (
        arg("--local", type=int, required=True, metavar="N", help="workers; at most one a GPU where there are GPUs"),
        arg("--port", type=int, default=8786, help="of the scheduler (default 8786); 0 takes a free one"),
    ), json=False),
    "measure": Command("lab.cli.kernels:measure",
        "check and time a phase's arms together on this GPU, and append rows", (
        CARDS,
        arg("phase", nargs="*"),
        flag("--all", "every card that can be measured, each as it pins its protocol"),
        ON,
        arg("--device", help="with --on: the device to measure on, default each card's own"),
        several("--workload", "only this workload; may be repeated"),
        flag("--missing", "only workloads without rows of the present kernels and gate, timed this way"),
        arg("--seconds", type=float, default=2.0, help="most sampling time a comparison (default 2)"),
        arg("--placements", type=int, default=8, metavar="N", help="how often all sets are allocated anew (default 8)"),
        arg("--processes", type=int, default=2, metavar="N", help="processes they are spread over (default 2)"),
        arg("--rest", type=float, help="idle after each visit, times its length (default the card's, else 0)"),
        arg("--timer", choices=("graph", "events", "cupti", "host"), help="default the card's, else graph"),
        arg("--l2", choices=("cold", "warm"), help="default the card's, else cold"),
        flag("--peers", "time the installed rival libraries in the same run"),
        flag("--pair", "time the control and the candidate alone, where memory is too small for the arms beside them"),
        several("--beside", "of the arms beside a card's two and of the rivals only this one; may be repeated",
            metavar="ARM"),
        arg("--budget", metavar="TIME", help="stop before this is spent, e.g. 8m: most decisive first"),
        arg("--resume", nargs="?", const="", metavar="RUN", help="continue the newest run, or this one"),
        flag("--ceilings", "measure what this device can do, before the phases"),
        flag("--cross-check", "compare our clock with Kineto's and ncu's instead"),
        arg("--out", type=Path, help="folder for the rows; default profiles/<device>/<phase>/<run>"),
    )),
    "bench": Command("lab.study.bench:run", "a candidate beside its rivals over shapes on this GPU, without a card", (
        arg("family"),
        arg("candidate"),
        arg("--shape", nargs="+", required=True, metavar="AXIS=VALUES", help="e.g. M=1..64 N=5120 K=6144, or M=1,8,33"),
        several("--against", "a rival; default every installed library of the family, else its other candidates",
            metavar="CANDIDATE"),
        arg("--seconds", type=float, default=1.0, help="most sampling time a shape (default 1)"),
        arg("--placements", type=int, default=2, metavar="N", help="allocations a shape (default 2: a quick look)"),
        arg("--l2", default="cold", choices=("cold", "warm"), help="default cold"),
        arg("--svg", type=Path, metavar="FILE", help="write the plot over the axis that has a range (.png too)"),
        arg("--out", type=Path, metavar="DIR", help="keep the rows there"),
    )),
    "new": Command("lab.cli.new:run", "a card, a family or a device of your own, that works at once", (
        CARDS,
        arg("what", choices=("card", "family", "device"), metavar="what", help="card, family or device"),
        arg("name", nargs="?", help="of the card or family; a device is the GPU here"),
        arg("--family", help="with card: ask about this family's kernels"),
    ), json=False),
    "predict": Command("lab.study.composed:run",
        "what a step's cards are expected to show, from rows of the kernels that it launches, and what they showed", (
        CARDS,
        arg("phase", nargs="*", help="card ids; default every card that can be predicted"),
        arg("--device", help="another than each card's own: times are carried over from where they were measured"),
        arg("--out", type=Path, metavar="FILE", help="draw them too, into an SVG or PNG file"),
    )),
    "plan": Command("lab.study.plan:run",
        "what measuring a card costs, and the smallest effect that its intervals would show", (
        CARDS,
        arg("phase", nargs="*", help="card ids"),
        flag("--all", "what measuring every card costs, a line each"),
        flag("--missing", "a line a card, with what `lab measure --missing` would measure"),
        arg("--device", help="with --all or --missing: the device to measure on, default each card's own"),
        arg("--placements", type=int, default=8, help="allocations of each comparison (default 8, the fewest)"),
        flag("--peers", "with the installed rival libraries"),
        arg("--rows", action="append", metavar="FILE", help="repeated runs of one's own control: how many are needed"),
        *FILES[1:],
    )),
    "rows": Command("lab.cli.cards:rows", "the measured rows that profiles/ holds", (
        CARDS,
        *(arg(f"--{name}", help=f"only rows of this {name}") for name in ("family", "phase", "device")),
        flag("--verify", "whether every record under profiles/ is as it was written, and could have been measured"),
        flag("--pack", "gzip the rows of every run, a fifth of the bytes; all that reads or appends takes both forms"),
        arg("--export", choices=("flashinfer-trace", "nvbench", "github-action-benchmark"),
            help="the newest row of every arm and workload, for another tool"),
        arg("--out", type=Path, help="with --export: a file; default standard output"),
    )),
    "roofline": Command("lab.cli.kernels:roofline",
        "floor times of a family's workloads on a device, or the recorded analysis", (
        arg("family", nargs="?"),
        arg("--device", default="h200"),
        flag("--recorded", "reproduce the recorded roofline figures"),
    )),
    "trace": Command("lab.cli.traces:trace", "where a profile's time went, every microsecond, or a refusal", (
        arg("file", type=Path, nargs="+",
            help="nsys sqlite or stats, PyTorch profiler JSON, rocprof, xplane.pb, ncu --csv; several or a zip: ranks"),
        *WINDOW,
        arg("--nth", type=int, metavar="N", help="with --nvtx: only the n-th instance"),
        arg("--graph", type=int, metavar="ID", help="with --replay: of this graph, default the largest"),
        arg("--steps", type=float, help="steps in the window, for us per step"),
        arg("--tokens", type=float, help="tokens made in the window, for us per token"),
        arg("--top", type=int, default=20, help="how many kernels and ranges to list (default 20)"),
        *(several(f"--{what}", f"only this {what}; may be repeated", type=int, metavar="N")
          for what in ("device", "stream", "process")),
        arg("--html", type=Path, metavar="FILE", help="write one page: timeline with zoom, tables that sort"),
        arg("--svg", type=Path, metavar="FILE", help="write the picture of the timeline"),
        arg("--csv", type=Path, metavar="FILE", help="write categories and kernels"),
        arg("--perfetto", type=Path, metavar="FILE", help="write a Chrome trace, which ui.perfetto.dev opens"),
    )),
    "diff": Command("lab.cli.traces:diff", "whose microseconds the gap between two profiles is", (
        arg("side", nargs="*", help="A and B, or A alone: a profile, or the id of a recorded breakdown"),
        *WINDOW, *COUNTS,
        arg("--nvtx-b", metavar="GLOB", help="the NVTX ranges of B, when they are called differently"),
        arg("--total", metavar="A[,B]", help="totals in us for recorded shares (a step or a token)"),
        arg("--svg", type=Path, help="write the picture of the gap to this file"),
        flag("--recorded", "the sources' own attributions, computed again"),
        flag("--list", "the recorded breakdowns and their units"),
    )),
    "amdahl": Command("lab.cli.traces:amdahl",
        "what a faster kernel gives end to end, and whether a phase needs more", (
        arg("side", help="a profile, or the id of a recorded breakdown"),
        arg("--category", action="append", help="what gets faster; several count together"),
        arg("--kernel", metavar="REGEX", help="of a profile: the kernels whose names it finds get faster"),
        arg("--speedup", type=float, help="time before over time after; inf removes it"),
        arg("--us", type=float, help="of a profile: us a launch takes afterwards"),
        arg("--wall", type=float, metavar="US", help="wall time of the same work, where the file has totals only"),
        arg("--measured", metavar="PHASE", help="take the speed-up from this phase's measured rows"),
        arg("--device", default="h200", help="with --measured: whose rows (default h200)"),
        arg("--workload", help="with --measured: which workload"),
        arg("--base", type=float, help="throughput before, tok/s"),
        arg("--of-wall", type=float, default=1.0, help="what the breakdown's whole is of the wall time, 0 to 1"),
        arg("--needs", metavar="PHASE|PCT", help="a card whose gate asks for throughput, or a rise in %%"),
        *WINDOW, *COUNTS,
    )),
    "profile": Command("lab.trace.capture:run", "a phase's arms under nsys or torch.profiler", (
        CARDS,
        arg("phase", nargs="*", help="card ids"),
        arg("--workload", help="only this workload"),
        arg("--steps", type=int, default=20, help="steps recorded for each arm (default 20)"),
        arg("--tool", choices=("nsys", "torch.profiler"), help="default: nsys with its importer, else torch"),
        arg("--device", default="cuda", choices=("cuda", "cpu"), help="cpu records host ranges only"),
        arg("--out", type=Path, help="folder; <phase>/trace.parquet goes below it"),
        flag("--inside", argparse.SUPPRESS),
    ), json=False),
    "counters": Command("lab.bench.counters:run",
        "a card's arms under Nsight Compute: what binds each kernel", (
        CARDS,
        arg("phase", nargs="*", help="card ids"),
        arg("--workload", help="only this one; any of the family's, such as one of fewer layers"),
        arg("--arm", help="only this candidate, or the arms of this role: control, candidate, peer"),
        flag("--peers", "the installed rival libraries too"),
    )),
    "identity": Command("lab.study.identity:command", "do two builds give the same token ids, prompt by prompt", (
        arg("plan", type=Path, help="TOML: reference, budgets, [[profile]] command, [[suite]] prompts"),
    )),
    "crossbleed": Command("lab.study.crossbleed:command",
        "does a sequence of a batch ever say another one's code word", (
        arg("--np", default="1,2,3,4,6,7", help="batch sizes (default 1,2,3,4,6,7)"),
        arg("--seed", type=int, default=0, help="of the code words"),
        arg("--prompt", default=PROMPT, help="a sequence's prompt; {word} is its code word"),
        arg("--timeout", type=float, default=600.0, metavar="S", help="seconds a batch may take (600)"),
        arg("command", nargs="+", help="behind --: the program; {prompts_file} in it is the batch"),
    )),
    "routes": Command("lab.study.routes:run",
        "which candidate is fastest where, from measured rows, and what a wrong one costs; or the choice for a shape", (
        arg("family"),
        arg("--shape", nargs="+", metavar="AXIS=VALUE",
            help="a shape to choose for, e.g. ne=5120,1,128 N=6144: leading dimensions are collapsed first"),
        arg("--device", default="h200", help="its id; one without rows gets the roofline's prediction"),
        several("--precision",
            "let candidates of this precision compete too, which takes asking for by name; may be repeated"),
        flag("--write", "store the table that the family's route.py reads"),
        flag("--calibrate", "on a GPU: measure at shapes of public models, fit the times, store the table"),
        arg("--minutes", type=float, default=2.0, help="of --calibrate (2)"),
        flag("--survey", "by the model, at shapes of public models: where time is lost, what other rules cost"),
    ), epilog=(
        "KILLGATE_ROUTE_<FAMILY>=<candidate> in the environment overrides a family's router. "
        "Without --shape the table is printed, and under it the axes that the family asks for."
    )),
    "ledger": Command("lab.study.ledger:run", "what was expected of each recorded phase against what it delivered"),
    "verify": Command("lab.study.verify:run",
        "a stored baseline against a new run: 0 pass, 1 regression, 2 bad input", (
        arg("baseline", type=Path),
        arg("runs", type=Path, metavar="RUN", nargs="+",
            help="llama-bench, llama-batched-bench or ds4-bench output"),
        flag("--write", "write the baseline from the runs, the median of several"),
        several("--limit", "with --write: default decode 3, prefill 5", metavar="METRIC=PCT"),
    )),
    "write": Command("lab.cli.cards:write",
        "one card's writeup as Markdown, HTML or PDF, or the tables of README.md and NOTES.md", (
        CARDS,
        arg("phase", nargs="?", help="a card's id, or the path of one of your own"),
        arg("--rows", action="append", metavar="[ARM=]FILE", help="of somebody's own A/B, as `lab judge` takes them"),
        *FILES,
        arg("--device", help="with --rows: the GPU the files are from"),
        arg("--format", choices=("md", "html", "pdf"), help="default: by the suffix of --out, else md"),
        flag("--readme", "make the README's table again from cards and rows"),
        flag("--notes", "make the table of every family's NOTES.md again from rows"),
        arg("--out", type=Path, help="a file; default standard output"),
    )),
    "verdicts": Command("lab.write.replay:run",
        "judge, check, execute the notebooks, write build/site, print the board", (
        arg("--out", type=Path, help="folder for the site; default build/site"),
    )),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; bad input is one line on standard error and 2."""
    with console.only_text():
        return _run(sys.argv[1:] if argv is None else argv)


def _run(argv: Sequence[str]) -> int:
    arguments = _parser(argv).parse_args(argv)
    module, _, name = COMMANDS[arguments.COMMAND].run.partition(":")
    named = getattr(arguments, "phase", None) or ()
    try:
        with own.used(getattr(arguments, "cards", None), [named] if isinstance(named, str) else named):
            code = int(getattr(importlib.import_module(module), name)(arguments))
        sys.stdout.flush()  # here, where a reader that went away is caught, and not at exit
        return code
    except BadInput as error:
        refusal = str(error)
    except BrokenPipeError:
        # The reader (head, less) went away: not an error of ours. Keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        kept = "; what was measured is kept, --missing takes the rest" if arguments.COMMAND == "measure" else ""
        print(f"lab: interrupted{kept}", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "msgspec":
            refusal = f"msgspec is not installed; {MSGSPEC}"  # nothing works without it, `lab doctor` neither
        else:
            from lab.check import families  # not before: it needs msgspec, and `lab --help` nothing of it

            if (told := families.mistake(error)) is None:
                raise
            refusal = str(told)
    print(f"lab: {refusal}", file=sys.stderr)
    return 2


def _parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The command that `argv` begins with, else every command by name; those that `argv` names with their arguments."""
    parser = argparse.ArgumentParser(prog="lab", description="Killgate: kernel candidates, gates and verdicts.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="COMMAND")
    asked = argv[:1] if argv[:1] and argv[0] in COMMANDS else COMMANDS  # the others' parsers take three milliseconds
    for name, command in ((name, COMMANDS[name]) for name in asked):
        own = commands.add_parser(name, help=command.text, description=command.text, epilog=command.epilog or None)
        if name not in argv:
            continue
        groups: dict[str, Any] = {}
        for names, options in (*((JSON,) if command.json else ()), *command.arguments):
            options = dict(options)
            group = options.pop("one_of", "")
            if group and group not in groups:
                groups[group] = own.add_mutually_exclusive_group()
            groups.get(group, own).add_argument(*names, **options)
    return parser
