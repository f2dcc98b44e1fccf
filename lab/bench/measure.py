"""`lab measure`: a phase's arms on one GPU, checked, timed together, checked again, then appended as rows.

This is the parent: it plans, watches the worker (lab/bench/worker.py) and writes; it imports no candidate. The rows of
one comparison are appended in one piece, so a run that is killed never holds half a comparison, and `resume` skips what
is complete. When the worker dies, the arm it was working on gets a row saying so and the comparison is done again
without it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from lab.base import devices, files
from lab.base.errors import BadInput, nearest, refuse_unknown
from lab.base.interval import PLACEMENTS
from lab.bench import machine, sampling
from lab.bench.comparison import GPU_BACKEND, Done, Job, Outcome
from lab.bench.sampling import Comparison
from lab.bench.worker import Death, Worker
from lab.card import phases
from lab.check import families
from lab.place import ceilings
from lab.row import samples, store
from lab.row.records import CEILINGS, Measurement, Provenance, Role

SEED = 20261120
HOPPER = 9, 0  # planned for where there is no GPU
LEAST_ROOM = 0.25  # of what sets may take by themselves; behind it an arm's own scratch is what does not fit
FIRST_GUESS_S = 20.0  # what a comparison costs beside its sampling, until one has been seen


@dataclass(frozen=True)
class Settings:
    """How to measure. seconds: most sampling a comparison; budget_s: most for everything; limits_s: as Worker has them.

    rest: how long the GPU idles after each visit of an arm, as a multiple of the visit (see lab/bench/sampling.py).
    placements: how often the sets of all arms are allocated anew, spread over so many `processes`.
    brief: as a calibration does it, with so many blocks; see Job.
    """

    seconds: float = 2.0
    timer: str = "graph"
    l2: str = "cold"
    budget_s: float = math.inf
    seed: int = SEED
    backend: str = GPU_BACKEND
    limits_s: tuple[tuple[str, float], ...] = ()
    rest: float = 0.0
    placements: int = 8
    processes: int = 2
    brief: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rest <= 20:
            what = f"{self.rest:g} is not between 0 and 20"
            raise BadInput("--rest", what, "4 lets a GPU at its power cap cool down")
        if not 1 <= self.processes <= self.placements <= 200:
            what = f"{self.placements} placements over {self.processes} processes"
            raise BadInput("--placements", what, f"{PLACEMENTS} or more, at most 200, let an interval decide")

    def of(self, card: phases.Card) -> Settings:
        """These, but for what the card pins."""
        return replace(self, **{k: v for k, v in structs.asdict(card.measure).items() if v is not None})


@dataclass(frozen=True)
class Item:
    """One comparison to do. decisive: a required condition of the gate asks for this workload."""

    card: phases.Card
    workload: Any
    arms: tuple[tuple[Role, str], ...]
    decisive: bool
    bytes: float

    @property
    def where(self) -> str:
        """As messages name it."""
        return f"{self.card.id} {self.workload.id}"

    @property
    def together(self) -> list[str]:
        """The workloads that the card compares with each other, of which this is one; this alone where it is none."""
        return next((ids for ids in self.card.compared if self.workload.id in ids), [self.workload.id])


def require_gpu(command: str = "lab measure") -> devices.Device:
    """The device record of the GPU here, made of what its driver reports where no list has it; BadInput without one.

    command: who needs it, for the message.
    """
    import torch

    if not torch.cuda.is_available():
        remedy = "run it where there is one; `lab judge` replays the stored rows"
        raise BadInput(command, "no CUDA GPU is usable here", remedy)
    name = torch.cuda.get_device_name(0)
    try:
        return devices.get(name, "GPU")
    except BadInput:  # no list has it
        with tempfile.TemporaryDirectory() as folder:
            path = files.write(Path(folder) / devices.DRIVER, devices.reported(name, _reported()))
            (device,) = devices.load(path).values()
        structs.force_setattr(device, "file", str(store.folder() / device.id / devices.DRIVER))  # see `remember`
        return device


def _reported() -> dict[str, tuple[float, str]]:
    """What the driver says of the GPU here: fact -> (value, unit)."""
    import torch

    card, (major, minor) = torch.cuda.get_device_properties(0), torch.cuda.get_device_capability()
    found = {
        "compute_capability": (major + minor / 10, "capability"),
        "sms": (card.multi_processor_count, "SMs"),
        "l2_bytes": (card.L2_cache_size, "bytes"),
        "smem_optin_bytes_per_block": (getattr(card, "shared_memory_per_block_optin", 0), "bytes"),
        "vram": (card.total_memory, "bytes"),
    }
    return {name: (value, unit) for name, (value, unit) in found.items() if value > 0}


def remember(device: devices.Device) -> Path:
    """Write an unlisted GPU's facts beside the rows it is about to have, so that any machine can judge them."""
    path = store.folder() / device.id / devices.DRIVER
    if device.id not in devices.ids():
        said = {name: (fact.value, fact.unit) for name, fact in device.facts.items()}
        files.write(path, devices.reported(device.name, said))
    return path


def parse_budget(text: str) -> float:
    """Seconds of "90s", "8m" or "1h"; raises BadInput for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if not found:
        raise BadInput("--budget", f'"{text}" is no duration', "write 90s, 8m or 1h")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def described(family: str, workload: str = "") -> families.Launches:
    """What a family's candidates would launch on the GPU here, on a Hopper where there is none."""
    return families.launches(family, families.gpu_capability() or HOPPER, workload)


def plan(
    card: phases.Card, only: Sequence[str] = (), peers: bool = False, pair: bool = False, beside: Sequence[str] = ()
) -> list[Item]:
    """The comparisons of a card; raises BadInput for a card that can only be replayed.

    only: ids of workloads; default all of the card's.
    peers: the rivals of the family too, each of them once: one that the card names is an arm already.
    pair: the control and the candidate alone; the card's others do not fit beside them on every GPU.
    beside: of the card's others and of the rivals these alone.
    """
    if (peers or beside) and pair:
        raise BadInput("--pair", "leaves out every arm but two", "leave out --peers and --beside, or --pair")
    if peers and beside:
        raise BadInput("--beside", "leaves out every rival that it does not name", "leave out --peers or --beside")
    if not card.family:
        raise BadInput(card.path, "has no family, so there is nothing to run", "replay it with `lab judge`")
    if said := card.adopted.rstrip("."):
        raise BadInput(card.path, f"an arm's code is gone: {said}", "judge its rows with `lab judge`")
    family = families.bare(card.family)
    told = described(card.family)
    for name in (card.control, card.candidate, *card.beside):
        families.refuse_unknown(card.family, name, told.configs, told.unavailable)
    for name in beside:
        refuse_unknown("--beside", f"arm of {card.id} or rival", name, (*card.beside, *told.peers))
    known = {w.id: w for w in family.cases.WORKLOADS}
    chosen = [w for w in card.workloads if not only or w in only]
    wanted = [family.workload(w) for w in chosen if card.own or "=" in w or w in known]
    if not wanted:
        named = ", ".join(only or card.workloads) or "none"
        what = f"none of its workloads ({named}) is a workload of {family.name}"
        raise BadInput(card.path, what, "replay it instead")
    asked = {c.workload for c in card.gate.require}
    items = []
    for workload in wanted:
        configs = described(card.family, workload.id).configs
        arms: list[tuple[Role, str]] = [("control", card.control), ("candidate", card.candidate)]
        others = [name for name in card.beside if not pair and (not beside or name in beside)]
        arms += [("candidate", name) for name in others if configs[name][workload.id] is not None]
        own = {name for _, name in arms}
        rivals = told.peers if peers else [name for name in beside if name not in card.beside]
        arms += [("peer", name) for name in rivals if name not in own]
        if peers:
            arms += [("peer", module) for module in told.unavailable if families.is_peer(module)]
        cost = family.cost(workload, told.precisions[card.control])
        items.append(Item(card, workload, tuple(arms), workload.id in asked, cost.bytes))
    return items


def made_for(settings: Settings) -> list[Worker]:
    """The measuring processes of these settings, not started yet."""
    return [Worker(dict(settings.limits_s)) for _ in range(settings.processes)]


@contextlib.contextmanager
def started(settings: Settings) -> Iterator[list[Worker]]:
    """The measuring processes, started: they import torch while this process does. They end with the block."""
    workers = made_for(settings)
    try:
        for worker in workers:
            worker.start(settings.backend)
        yield workers
    finally:
        for worker in workers:
            worker.stop()


def measure(
    items: Sequence[Item],
    settings: Settings = Settings(),
    folder: Path | None = None,
    device: devices.Device | None = None,
    tell: Callable[[str], None] = lambda line: None,
    workers: Sequence[Worker] = (),
) -> Iterator[list[Measurement]]:
    """Do the comparisons and yield the rows of each once they are on the disk.

    Decisive and cheap ones go first, so that a budget that runs out has bought what matters most; what is left out is
    reported, not written. A row that beats the measured ceilings is kept as suspect; its ceilings are measured again
    and then the comparison, and the later rows count.
    folder: an earlier run's folder resumes it; default profiles/<device>/<phase>/<new run>.
    device: default the GPU of this machine. tell: called with one line a step. workers: of `started`, default new ones.
    """
    device = device or require_gpu()
    made = machine.provenance()
    if folder is None:
        remember(device)
    run, _ = store.new_run(device.id, "")
    workers = workers or made_for(settings)
    start = time.monotonic()
    spent: list[float] = []
    left_out = []

    def once(item: Item, into: Path) -> list[Measurement]:
        way, begun = settings.of(item.card), time.monotonic()
        outcomes, comparison, started = compare(item, way, workers, tell)
        rows = [row(item, o, comparison, device, way, into, started, made) for o in outcomes]
        rows = [structs.replace(each, took_s=round(time.monotonic() - begun, 1)) for each in rows]
        store.append_all(into, rows)
        return rows

    try:
        for group in groups(items):
            into = folder or store.folder() / device.id / group[0].card.id / run
            done = [item for item in group if key(item, settings.of(item.card)) in completed(into)]
            for item in done:
                tell(f"{item.where}: already measured in this run")
            left = [item for item in group if item not in done]
            guess = sum(spent) / len(spent) if spent else FIRST_GUESS_S + settings.seconds
            if time.monotonic() - start + guess * len(left) > settings.budget_s:
                left_out += [item.where for item in left]
                continue
            for item in left:
                store.refuse_unwritable(into)  # before GPU time is spent on rows that could not be kept
                began = time.monotonic()
                rows = once(item, into)
                spent.append(time.monotonic() - began)
                yield rows
                if any(r.status == "suspect" for r in rows):
                    tell(f"{item.where}: suspect, so its ceilings and itself are measured again")
                    for worker in workers:
                        worker.stop()
                    measure_ceilings(device, rows, rows[0].wanted_l2)
                    yield once(item, into)
    finally:
        for worker in workers:
            worker.stop()
        for where in left_out:
            tell(f"{where}: left out, the budget of {settings.budget_s:.0f} s is spent")


def groups(items: Sequence[Item]) -> list[list[Item]]:
    """Those that decide first, and of them the cheap ones; what a card compares with each other stands together."""
    found: dict[tuple[str, ...], list[Item]] = {}
    for item in sorted(items, key=lambda item: (not item.decisive, item.bytes)):
        found.setdefault((item.card.id, *item.together), []).append(item)
    return list(found.values())


def longest_first(items: Sequence[Item], settings: Settings) -> list[Item]:
    """Those that are likely to take longest first, so that no worker begins a long one when the others are done."""
    return sorted(items, key=lambda item: (-len(item.arms) * (1 + settings.of(item.card).rest), -item.bytes))


def measure_ceilings(device: devices.Device, rows: Sequence[Measurement], l2: str) -> None:
    """Append the ceilings that can make these rows suspect, measured again; the worker must have let the GPU go."""
    from lab.bench import ceiling_runs  # needs Triton

    pipes = sorted({r.pipe for r in rows if r.pipe})
    names = (*ceilings.FOR_L2[l2], *(pipe + way for pipe in pipes for way in ceilings.POSSIBLE))
    for _ in ceiling_runs.measure(device, tuple(name for name in names if name in CEILINGS)):
        pass


def missing(items: Sequence[Item], device: str, settings: Settings) -> list[Item]:
    """Those that no run on the device answers: both arms judged, by today's launches, for this gate, timed this way.

    A row of fewer placements than asked for is no answer. Nor are those of workloads that the card compares with each
    other where no run has all of them and they are of several GPUs: then all of them are missing.
    """
    found: list[Item] = []
    for group in groups(items):
        answers = [answered(item, device, settings.of(item.card)) for item in group]
        gpus = {of_run[max(of_run)] for of_run in answers if of_run}  # of the newest runs
        if not all(answers) or (len(gpus) > 1 and not set.intersection(*map(set, answers))):
            found += group
    return [item for item in items if item in found]


def answered(item: Item, device: str, settings: Settings) -> dict[str, str | None]:
    """Run -> the GPU that it was on, for each run on the device that answers this comparison."""
    rows = [
        row
        for row in store.rows(device=device, phase=item.card.id)
        if row.workload_id == item.workload.id
        and (row.name, row.arm) in ((item.card.control, "control"), (item.card.candidate, "candidate"))
        and row.status in ("ok", "incorrect")
        and (row.placements >= settings.placements or row.status != "ok")
        and row.gate_hash == item.card.gate_hash
        and row.protocol == (settings.timer, settings.l2, settings.rest)
        and not families.former(row)
    ]
    arms = {(row.run, row.arm) for row in rows}
    return {row.run: row.gpu_id for row in rows if {(row.run, "control"), (row.run, "candidate")} <= arms}


def compare(
    item: Item, settings: Settings, workers: Sequence[Worker], tell: Callable[[str], None]
) -> tuple[list[Outcome], Comparison | None, str]:
    """One comparison: (how each arm did, facts about the comparison or None, when it started).

    Its placements are spread over the workers. Done again without an arm whose process died. At most once per arm, so
    it ends. Done again with half the room for sets where memory ran out that they could spare: twice at most.
    """
    room = 1.0
    gone: dict[str, Outcome] = {}
    roles = {name: role for role, name in item.arms}
    where = item.where
    while True:
        started = machine.now()
        arms = tuple((role, name) for role, name in item.arms if name not in gone)
        if not arms:
            return list(gone.values()), None, started
        done: Done | Death | None = None
        crowded, first = False, 0
        for worker in workers:
            worker.start(settings.backend)
        for number, worker in enumerate(workers):
            placements = (settings.placements + number) // len(workers)  # of eight over three: 2, 3, 3
            blocks = sampling.PLACED_BLOCKS if settings.brief else 0
            blocks = done.comparison.shape[1] if isinstance(done, Done) and done.comparison else blocks
            job = Job(
                item.card.family, item.workload.id, arms, settings.seconds * placements / settings.placements,
                settings.timer, settings.l2, settings.seed, settings.backend, settings.rest, placements,
                first, blocks, settings.brief, room,
            )  # fmt: skip
            answer = worker.run(job, lambda stage, arm: tell(f"{where}: {stage} {arm}".rstrip()))
            done = together(done, answer) if isinstance(done, Done) and isinstance(answer, Done) else answer
            first += placements
            crowded = isinstance(done, Done) and done.crowded and room > LEAST_ROOM
            if isinstance(done, Death) or done.fatal or crowded:
                break
        if crowded:
            room /= 2
            tell(f"{where}: out of memory, again with half as much for its sets")
            continue
        if isinstance(done, Death):
            blamed = [done.arm] if done.arm else [name for _, name in arms]
            for name in blamed:
                gone[name] = Outcome(roles[name], name, done.status, done.message)
            tell(f"{where}: {', '.join(blamed)}: {done.message}")
            continue
        assert done is not None, "no worker"
        spent = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in done.seconds.items())
        tell(f"{where}: took {sum(done.seconds.values()):.1f} s: {spent}")
        by_name = {a.name: a for a in done.arms} | gone
        if done.fatal:
            gone[done.fatal] = by_name[done.fatal]
            continue
        return [by_name[name] for _, name in item.arms], done.comparison, started


def together(first: Done, second: Done) -> Done:
    """One comparison of two processes: an arm is as it was where it did worse, and has its samples of both."""
    arms = []
    for one, other in zip(first.arms, second.arms, strict=True):
        worse = one if one.status != "ok" else other
        joined = structs.replace(
            worse,
            relative_error=largest(one.relative_error, other.relative_error),
            errors={name: largest(error, other.errors.get(name)) for name, error in one.errors.items()},
            relative_error_after=largest(one.relative_error_after, other.relative_error_after),
            prepare_us=min((x.prepare_us for x in (one, other) if x.prepare_us is not None), default=None),
            clock_pct=largest(one.clock_pct, other.clock_pct),
            timing=sampling.joined(one.timing, other.timing) if one.timing and other.timing else None,
        )
        if joined.status == "ok" and joined.timing is None:
            joined.fail("error", "was timed in one of two processes only")
        arms.append(joined)
    stages = dict.fromkeys((*first.seconds, *second.seconds))
    seconds = {stage: first.seconds.get(stage, 0.0) + second.seconds.get(stage, 0.0) for stage in stages}
    compared, one_c, other_c = None, first.comparison, second.comparison
    if one_c and other_c and one_c.control != other_c.control:
        for arm in arms:
            arm.fail("error", f"timed against {one_c.control} in one process and {other_c.control} in another")
    elif one_c and other_c:
        read = one_c.block_mhz and other_c.block_mhz
        compared = structs.replace(
            one_c,
            order=one_c.order + other_c.order,
            clocks=one_c.clocks + other_c.clocks,
            again=sampling.joined(one_c.again, other_c.again) if one_c.again and other_c.again else None,
            shape=(one_c.shape[0] + other_c.shape[0], *one_c.shape[1:]),
            processes=one_c.processes + other_c.processes,
            block_mhz=one_c.block_mhz + other_c.block_mhz if read else (),
            block_top_mhz=one_c.block_top_mhz + other_c.block_top_mhz if read else (),
        )
    return Done(arms, compared, second.fatal, seconds, first.spare or second.spare)


def largest(*numbers: float | None) -> float | None:
    """The largest of those that are there."""
    return max((x for x in numbers if x is not None), default=None)


def run_to_resume(device_id: str, phase: str, run: str = "") -> Path:
    """The folder of a named run of a phase, or of its newest; raises BadInput when there is none."""
    folder = store.folder() / device_id / phase
    runs = sorted(path.parent.name for path in folder.glob(f"*/{Measurement.FILE}*"))
    if not runs or (run and run not in runs):
        what = f"no run {run or 'at all'} of {phase} on {device_id}"
        raise BadInput("--resume", what, nearest(run, runs or ["none"]))
    return folder / (run or runs[-1])


def key(item: Item, settings: Settings) -> tuple[Any, ...]:
    """What makes a comparison the same one when a run is resumed."""
    return (item.card.id, item.workload.id, settings.timer, settings.l2, item.card.gate_hash, settings.rest)


def completed(folder: Path) -> set[tuple[Any, ...]]:
    """The comparisons that a run's folder holds."""
    paths = sorted(folder.glob(f"{Measurement.FILE}*"))  # early rows lack a rest, and are measured again
    rows = (row for path in paths for row in store.read(path, Measurement))
    return {(r.phase, r.workload_id, r.wanted_timer, r.wanted_l2, r.gate_hash, r.rest) for r in rows}


def row(
    item: Item,
    outcome: Outcome,
    comparison: Comparison | None,
    device: devices.Device,
    settings: Settings,
    into: Path,
    started: str,
    made: Provenance,
) -> Measurement:
    """The row of one arm. Only an arm that passed both checks has a performance field."""
    family = families.bare(item.card.family)
    told = families.launches(item.card.family, device.capability, item.workload.id)
    full = Measurement(
        **structs.asdict(made),
        **work_of(family, told, outcome.name, item.workload),
        device=device.id,
        phase=item.card.id,
        family=family.name,
        sources=families.sources_hash(family.name),
        arm=outcome.role,
        name=outcome.name,
        beside=outcome.name in item.card.beside,
        precision=told.precisions.get(outcome.name, ""),
        workload_id=item.workload.id,
        inputs=item.workload.inputs,
        status=outcome.status,
        message=outcome.message,
        relative_error=_finite(outcome.relative_error),
        errors={name: _finite(error) for name, error in outcome.errors.items()},
        relative_error_after=_finite(outcome.relative_error_after),
        seed=settings.seed,
        run=into.name,
        started=started,
        wanted_timer=settings.timer,
        wanted_l2=settings.l2,
        rest=settings.rest,
        brief=settings.brief,
        card_hash=item.card.card_hash,
        gate_hash=item.card.gate_hash,
    )
    timing = outcome.timing
    if comparison is None or timing is None:
        return full
    clocks = tuple(c for c, _ in itertools.groupby(filter(None, comparison.clocks)))  # a change is kept, not how long
    again = comparison.again if outcome.name == comparison.control else None
    timed = structs.replace(
        full,
        calls=timing.calls,
        sets=timing.sets,
        converged=timing.converged,
        placements=comparison.shape[0],
        processes=comparison.processes,
        shape=comparison.shape,
        clock_pct=_finite(outcome.clock_pct),
        samples=samples.encode(timing.samples_us),
        again_samples=samples.encode(again.samples_us) if again else None,
        prepare_us=outcome.prepare_us,
        prepared_bytes=outcome.prepared_bytes,
        timer=comparison.timer,
        l2=comparison.l2,
        order=comparison.order,
        timed_against=comparison.control,
        clocks=clocks,
        throttled=", ".join(sorted({c.throttled for c in clocks if c.throttled})),
        block_mhz=comparison.block_mhz,
        block_top_mhz=comparison.block_top_mhz,
    )
    doubt = ceilings.suspect(timed)
    return structs.replace(timed, status="suspect", message=doubt) if doubt else timed


def work_of(family: families.Family, told: families.Launches, name: str, workload: Any) -> dict[str, Any]:
    """What a record says of a candidate's work: axes, flops, bytes, pipe, config; None of one that is not there."""
    if name not in told.configs:
        return {"workload": dict(workload.axes), "flops": None, "bytes": None, "pipe": None, "config": ""}
    cost = family.cost(workload, told.precisions[name])
    return {"workload": dict(workload.axes), **asdict(cost), "config": told.configs[name][workload.id] or ""}


def _finite(number: float | None) -> float | None:
    """A row holds no NaN: where the output had one, the status and the message say so."""
    return number if number is not None and math.isfinite(number) else None
