"""`lab check`, `compile`, `measure` and `roofline`: what is asked of a family's kernels."""

from __future__ import annotations

import contextlib
import datetime
import math
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import structs

from lab.base.console import print_json, show
from lab.base.errors import BadInput, nearest, refuse_unknown, shown

UNPRINTED = ("samples_us", "blocks_us", "order")  # of a row as `lab measure --json` prints it


def check(arguments: Namespace) -> int:
    """Each candidate against its reference; 1 when one is incorrect or fails, or there is none to check."""
    checks = []
    for c in _far_checks(arguments) if arguments.on else _checks(arguments):
        checks.append(c)
        if not arguments.json:
            error = "" if c["relative_error"] is None else f"relative error {c['relative_error']:.1e}"
            what = f"{c['family']}/{c['candidate']} {c['workload']}"
            print(f"{c['status']:9} {what} {error} {c['message']}".rstrip(), flush=True)
    if arguments.json:
        print_json(checks)
    elif all(c["status"] == "skipped" for c in checks):
        print("nothing was checked")
    return 1 if not checks or any(c["status"] in ("incorrect", "error") for c in checks) else 0


def _checks(arguments: Namespace) -> Iterator[dict[str, Any]]:
    from lab.check import accuracy, families

    families.interpret_on_cpu()
    device = arguments.device or ("cuda" if families.gpu_capability() else "cpu")
    if device == "cuda" and families.gpu_capability() is None:
        raise BadInput("--device", "cuda, but no CUDA GPU is usable here", "leave it out to check on the CPU")
    for name in arguments.family or families.names():
        for c in accuracy.check_family(name, arguments.candidate, arguments.workload, arguments.seed, device):
            yield c.to_json()


def _far_checks(arguments: Namespace) -> Iterator[dict[str, Any]]:
    """Each family a cell, on a GPU unless "cpu" is asked for or no worker has one."""
    from lab.bench import cluster
    from lab.check import accuracy, families

    with _joined(arguments) as joined:
        gpu = arguments.device == "cuda" or (not arguments.device and any(s.facts.gpu for s in joined.spots.values()))
        options = [f"--seed={arguments.seed}", *["--device=cpu"] * (not gpu), "--json"]
        options += [f"--{k}={v}" for k in ("candidate", "workload") if (v := getattr(arguments, k)) is not None]
        names = arguments.family or families.names()
        cells = [cluster.Cell(name, ["check", name, *options], "cuda" if gpu else "") for name in names]
        for cell, told in cluster.sweep(joined, cells):
            failed = accuracy.Check(cell.name, "(family)", "", "", "error", told.get("died", "")).to_json()
            yield from told.get("out", [failed])


def _joined(arguments: Namespace) -> contextlib.closing[Any]:
    """The cluster of --on, within a `with`; what it says goes to standard error."""
    from lab.bench import cluster

    return contextlib.closing(cluster.Cluster(arguments.on, lambda line: print(line, file=sys.stderr, flush=True)))


def compile(arguments: Namespace) -> int:
    """The ahead-of-time table; 1 when a row is an error."""
    from msgspec.structs import replace

    from lab.check import aot, compile
    from lab.row import store

    if not arguments.probe and not arguments.family:
        raise BadInput("lab compile", "no family named", "name a folder of kernels/, or pass --probe")
    targets = [compile.parse_target(word) for word in (arguments.targets or "").split(",") if word.strip()]
    if arguments.probe:
        rows = compile.probe_rows()
        if arguments.write:
            today = datetime.date.today().isoformat()
            store.append_all(aot.PROBED.parent, [replace(row, date=today) for row in rows])
    elif arguments.on:
        rows = _far_rows(arguments, targets or compile.TARGETS)
    else:
        rows = compile.compile_family(arguments.family, targets or compile.TARGETS)
    show(arguments.json, lambda: [row.to_json() for row in rows], lambda: compile.render(rows))
    return int(any(row.status == "error" for row in rows))


def _far_rows(arguments: Namespace, targets: Sequence[int]) -> list[Any]:
    from lab.bench import cluster
    from lab.check.aot import AotRow

    name, found = arguments.family, dict[str, list[AotRow]]()
    words = {f"{name} sm_{t}": ["compile", name, "--targets", str(t), "--json"] for t in targets}
    with _joined(arguments) as joined:
        for cell, told in cluster.sweep(joined, [cluster.Cell(*both) for both in words.items()]):
            failed = AotRow(name, "(family)", "", int(cell.arguments[3]), "", "error", told.get("died", ""))
            found[cell.name] = msgspec.convert(told["out"], list[AotRow]) if "out" in told else [failed]
    return [row for cell in words for row in found[cell]]


def measure(arguments: Namespace) -> int:
    """Rows of this GPU, or of a cluster's; 1 when an arm is neither ok nor skipped."""
    from lab.bench import machine, measure

    given = {way: value for way in ("timer", "l2", "rest") if (value := getattr(arguments, way)) is not None}
    settings = measure.Settings(
        seconds=arguments.seconds,
        placements=arguments.placements,
        processes=arguments.processes,
        budget_s=measure.parse_budget(arguments.budget) if arguments.budget else math.inf,
        **given,
    )
    if not (arguments.phase or arguments.all or arguments.ceilings):
        raise BadInput("lab measure", "needs card ids, --all or --ceilings", "see `lab phases`")
    if arguments.on and (arguments.ceilings or arguments.cross_check):
        raise BadInput("--on", "stands beside --ceilings or --cross-check", "run these on the GPU that they are about")
    if arguments.device and not arguments.on:
        raise BadInput("--device", "stands without --on", "leave it out: what is measured is the GPU that is here")
    with contextlib.ExitStack() as held:
        workers: Sequence[Any] = ()
        if machine.gpus() and not (arguments.on or arguments.ceilings or arguments.cross_check):
            workers = held.enter_context(measure.started(settings))
        device = None if arguments.on else measure.require_gpu()
        if arguments.ceilings:
            _ceilings(device, arguments.json)
        cards, named = _asked(arguments, given)
        joined = held.enter_context(_joined(arguments)) if arguments.on else None
        return _measured(arguments, settings, cards, named, device, joined, workers)


def _asked(arguments: Namespace, given: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """The cards to measure, and the single candidates to cross-check. given: what of the protocol was asked for."""
    from lab.card import phases

    named = [p for p in arguments.phase if "/" in p and not p.endswith(".toml")]
    if named and not arguments.cross_check:
        raise BadInput("lab measure", f'"{named[0]}" is no card', "only --cross-check takes FAMILY/CANDIDATE@WORKLOAD")
    cards = [phases.card(p) for p in arguments.phase if p not in named]
    for card in cards:
        if pinned := card.measure.other(**structs.asdict(card.measure) | given):
            option = f"--{pinned.partition(' ')[0]}"
            raise BadInput(card.path, f"its rows are taken with {pinned}", f"leave {option} out")
    if arguments.all:
        only = set(arguments.workload)
        cards = [c for c in phases.cards().values() if c.family and (only & {*c.workloads} or not only)]
    known = {w for card in cards for w in card.workloads}
    for name in arguments.workload if cards or arguments.all else ():
        refuse_unknown("--workload", "workload of a card here", name, known)
    return cards, named


def _measured(
    arguments: Namespace, settings: Any, cards: Any, named: Sequence[str], device: Any, joined: Any, workers: Any
) -> int:
    """Measure cards on the device that is here, or on a cluster; those of --all that cannot be are left out aloud."""
    from lab.base import progress
    from lab.bench import cluster, measure

    items = []
    for card in cards:
        try:
            place = joined.device(card, arguments.device) if joined else device.id
            planned = measure.plan(card, arguments.workload, arguments.peers, arguments.pair, arguments.beside)
        except BadInput as unfit:
            if not arguments.all:
                raise
            print(f"{card.id}: left out: {unfit}", file=sys.stderr)
        else:
            planned = measure.missing(planned, place, settings) if arguments.missing else planned
            items += [(item, place) for item in planned]
    if arguments.cross_check:
        from lab.bench import crosscheck

        targets = [*crosscheck.targets(item for item, _ in items), *map(crosscheck.parse, named)]
        checked = list(crosscheck.measure(device, targets))
        show(arguments.json, lambda: [row.to_json() for row in checked], lambda: crosscheck.render(checked))
        return 0 if all(row.status in ("ok", "skipped") and row.within for row in checked) else 1
    folder = arguments.out
    if arguments.resume is not None:
        if arguments.out is not None:
            raise BadInput("--resume", "stands beside --out", "give one; an --out that holds rows is continued anyway")
        if len(cards) != 1:
            raise BadInput("--resume", "continues one phase's run", "name one phase")
        place = joined.device(cards[0], arguments.device) if joined else device.id
        folder = measure.run_to_resume(place, cards[0].id, arguments.resume)
    failed = False
    printed = []
    with progress.shown(len(items), quiet=arguments.json) as shown:
        if joined:
            joined.tell = shown.tell
            found = cluster.measure(joined, items, settings, arguments.peers, folder)
        else:
            found = measure.measure([item for item, _ in items], settings, folder, device, shown.tell, workers)
        for rows in found:
            shown.advance()
            for row in rows:
                failed |= row.status not in ("ok", "skipped")
                printed.append({k: v for k, v in row.to_json().items() if not k.endswith(UNPRINTED)})
                result = f"{row.status}: {row.message}" if row.own_us is None else f"{row.own_us:.2f} us"
                shown.result(f"{row.phase} {row.workload_id} {row.arm} {row.name}: {result}")
    if arguments.json:
        print_json(printed)
    return 1 if failed else 0


def _ceilings(device: Any, as_json: bool) -> None:
    from lab.bench import ceiling_runs, measure

    rows = []
    measure.remember(device)
    for row in ceiling_runs.measure(device):
        rows.append(row)
        if not as_json:
            print(f"{row.name:12} {row.value:10.2f} {row.unit:8} {row.method}", flush=True)
    if as_json:
        print_json([row.to_json() for row in rows])


def roofline(arguments: Namespace) -> int:
    """A family's floors, or the recorded analysis computed again."""
    from lab.base import console, devices
    from lab.check import families
    from lab.study import limits, reproduction

    if arguments.recorded:
        table = reproduction.reproduce()
        show(arguments.json, lambda: [structs.asdict(r) for r in table], lambda: reproduction.render(table))
        return 0
    if not arguments.family:
        raise BadInput("lab roofline", "needs a family or --recorded", nearest("", families.names()))
    device, family = devices.get(arguments.device, "--device"), families.load(arguments.family)
    floors = limits.floors(family, device)

    def text() -> str:
        header = ("workload", "precision", "MB", "GFLOP", "floor us", "bound")
        cells = [
            [f["workload"], f["precision"], f"{f['bytes'] / 1e6:.2f}", f"{f['flops'] / 1e9:.2f}",
             f"{f['floor_us']:.2f}", f["bound"]]
            for f in floors
        ]  # fmt: skip
        head = f"{device.name}: floors from the datasheet's bandwidth and peaks ({shown(device.where)})\n"
        return head + console.table(header, cells, (36, 12, 10, 10, 10, 8))

    show(arguments.json, lambda: floors, text)
    return 0
