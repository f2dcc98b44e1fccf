"""Many machines: cells on the workers of a Dask cluster, whose rows come home to one store.

A cell is one comparison (or one family's check, one target's compilation): a `lab` command in a fresh process on one
GPU, with a store of its own that is thrown away once its records went home. The client here keeps the list, a worker
has one cell at a time, and what it answers is written once, by the comparison's key. So what is lost costs a cell's
time and no row: a worker that dies (the cell is done again elsewhere, TRIES times at most), a scheduler that is started
again, a GPU that somebody else uses (NVML; the cell is tried again later). Dask connects, starts and shows: a worker
announces its GPU's UUID, name and capability as resources, and a cell asks for the UUID, so two clients share no GPU.

Any deployment of Dask will do; `lab cluster --local N` (lab/bench/local.py) is that of one host. Workers have this
checkout at the client's commit and trust whoever reaches the scheduler, as Dask does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lab.base import devices, own
from lab.base.errors import REPOSITORY, BadInput, reason
from lab.bench import machine
from lab.bench.comparison import Outcome
from lab.bench.measure import FIRST_GUESS_S, Item, Settings, completed, groups, key, longest_first, row
from lab.card import phases
from lab.place import ceilings
from lab.row import store
from lab.row.records import Ceiling, Measurement, Provenance

MODULE = "lab.cli.cell"
PROFILES = "{profiles}"  # in a cell's arguments: its store
TRIES = 3  # of a cell whose worker is lost or whose process dies
LIMIT_S = 7200.0  # of a cell
CLEAR_S = 10.0  # until a cell's processes are off its GPU
BUSY_S = 30.0  # before a GPU that somebody uses is asked again
CONNECT_S = HEAR_S = 10.0  # for a scheduler to answer, and to hand over a result, before it is taken to be gone
PATIENCE_S = 600.0  # without a scheduler, or without a worker that fits
POLL_S, LOOK_S, TELL_S = 0.05, 0.5, 30.0
EXTRA = "pip install 'killgate[cluster]'"
AGAIN = "start it, then this command again with --missing; what is done is kept"
Told = dict[str, Any]  # of a cell: out, files (path: text), took, or why there are none: busy, refused, died


class Facts(msgspec.Struct, frozen=True):
    """What a worker has. gpu: UUID of its first GPU, "" without one; watched: whether it is seen who else uses it."""

    made: Provenance
    distributed: str
    gpu: str = ""
    capability: str = ""
    watched: bool = True


# On a worker ---------------------------------------------------------------------------------------------------------

_turn = threading.Lock()


def do(module: str, arguments: Sequence[str], gpu: str = "", files: Mapping[str, str] | None = None) -> Told:
    """Run `lab ARGUMENTS` on this host, alone on its GPU before and after; files: what its store holds already."""
    with _turn, tempfile.TemporaryDirectory() as folder:
        if gpu and (who := machine.users(gpu, os.getpid())):
            return {"busy": who}
        for name, text in (files or {}).items():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / name).write_text(text)
        environment = (
            os.environ
            | {"KILLGATE_PROFILES": folder, own.VARIABLE: ""}
            | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
        )
        command = [sys.executable, "-m", module, str(os.getpid()), *(w.replace(PROFILES, folder) for w in arguments)]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=REPOSITORY, env=environment, start_new_session=True, **pipes) as process:
            try:
                out, said = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return {"died": f"it did not end in {LIMIT_S:.0f} s"}
        until = time.monotonic() + CLEAR_S
        while gpu and (who := machine.users(gpu, os.getpid())):
            if time.monotonic() > until:
                return {"busy": f"{who} while it measured"}
            time.sleep(POLL_S)
        last = (said.strip().splitlines() or ["nothing said"])[-1]
        if process.returncode == 2:
            return {"refused": last.removeprefix("lab: ")}
        try:
            told: Told = {"out": json.loads(out)}
        except ValueError:
            return {"died": f"its process ended with {process.returncode}: {last}"}
        if took := next((line for line in reversed(said.splitlines()) if ": took " in line), ""):
            told["took"] = took
        paths = {str(path.relative_to(folder)): path for path in Path(folder).rglob("*.jsonl")}
        return told | {"files": {name: path.read_text() for name, path in paths.items() if name not in (files or {})}}


def meet(module: str) -> Told:
    """What this worker has, which it announces as Dask's resources too."""
    from distributed import get_worker

    told = do(module, ["host"])
    if "out" in told:
        facts = msgspec.convert(told["out"], Facts)
        names = [name for name in (facts.gpu, facts.made.gpu, facts.capability) if name] or ["cell"]
        worker: Any = get_worker()
        worker.loop.add_callback(functools.partial(worker.set_resources, **dict.fromkeys(names, 1)))
    return told


# The client ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A command to run. device: the id that its GPU must have, "cuda" for any GPU, "" for none; files: as in `do`.

    group: cells of one name here share a GPU, for a gate compares what they measure.
    """

    name: str
    arguments: Sequence[str]
    device: str = ""
    files: Mapping[str, str] | None = None
    group: str = ""


@dataclass
class Spot:
    """A worker that takes cells. device: the id of its GPU, if any; until: when a GPU in use is asked again."""

    name: str
    facts: Facts
    device: str
    until: float = 0.0

    def fits(self, cell: Cell) -> bool:
        """Whether it can do a cell."""
        return cell.device in ("", self.device) or (cell.device == "cuda" and bool(self.facts.gpu))


class Cluster:
    """A scheduler's workers, as far as they are this checkout; raises BadInput where there is none.

    A worker of another commit or with other releases is refused at the start, and left out when it joins later.
    """

    def __init__(self, address: str, tell: Callable[[str], None] = lambda line: None, module: str = MODULE) -> None:
        try:
            import distributed
        except ImportError as error:
            raise BadInput("--on", f"needs Dask distributed ({error})", EXTRA) from None
        if not re.fullmatch(r"\w+://\S+:\d+", address):
            raise BadInput("--on", f'"{address}" is no address', "write tcp://HOST:PORT, as `lab cluster` prints it")
        logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what it says of a lost connection, we say
        warnings.filterwarnings("ignore", module="distributed")
        self.dask, self.address, self.tell, self.module = distributed, address, tell, module
        if machine.commit()[1]:
            remedy = "commit them, and check that commit out on every worker"
            raise BadInput("--on", "this checkout has uncommitted changes, which no worker has", remedy)
        self.scheduler, self.known, self.meeting = "", dict[str, Spot | None](), dict[str, Any]()
        self.looked, self.answered = 0.0, time.monotonic()
        self._connect()
        try:
            self.look()  # the workers say who they are while this process learns it of itself, seconds of imports
            self.here = machine.provenance()
            self._meet_all()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        try:
            self.client = self.dask.Client(self.address, timeout=CONNECT_S, set_as_default=False, name="killgate")
            # What a lost connection leaves pending prints a traceback when it is collected. Python parses source for
            # that, and inside another parse it breaks that one ("AST constructor recursion depth mismatch").
            loop: Any = self.client.loop
            loop.asyncio_loop.set_exception_handler(lambda *_: None)
            self._there()
        except Exception as error:  # whatever it is that answers there
            what = f"no Dask scheduler answers at {self.address} ({reason(error)})"
            remedy = "start one: `lab cluster --local N`, or `dask scheduler` and workers"
            raise BadInput("--on", what, remedy) from None

    def _there(self) -> dict[str, Any]:
        """The scheduler's id and workers; its client's `scheduler_info` is at times without the workers."""
        return self.client.sync(self.client.scheduler.identity, n_workers=-1, callback_timeout=CONNECT_S)

    def _meet_all(self) -> None:
        there, until = set(self._there()["workers"]), time.monotonic() + 120.0
        if not there:
            raise BadInput("--on", f"{self.address} has no workers", f"start some: `dask worker {self.address}`")
        while not there <= set(self.known) and time.monotonic() < until:
            self.look(strict=True)
            time.sleep(POLL_S)
        if not self.spots:
            raise BadInput("--on", f"no worker of {self.address} answered in 120 s", "see what the workers print")

    def close(self) -> None:
        """Leave; what the workers are at is dropped."""
        with contextlib.suppress(Exception):  # it may be gone already
            self.client.close(timeout=2)

    @property
    def spots(self) -> dict[str, Spot]:
        """The workers that take cells, by address: one a GPU, the others that see it stand by."""
        by_gpu = {spot.facts.gpu or address: address for address, spot in reversed(self.known.items()) if spot}
        return {address: spot for address, spot in self.known.items() if spot and address in by_gpu.values()}

    def look(self, strict: bool = False) -> None:
        """See who came and went; raises BadInput once no scheduler has answered for PATIENCE_S."""
        now = time.monotonic()
        if now < self.looked + LOOK_S:
            return
        self.looked = now
        if now > self.answered + PATIENCE_S:
            raise BadInput("--on", f"no scheduler has answered at {self.address} for {PATIENCE_S:.0f} s", AGAIN)
        if self.client.status == "closed":
            with contextlib.suppress(BadInput):
                self._connect()
        workers, scheduler = dict[str, Any](), ""
        if self.client.status == "running":
            try:
                info = self._there()
            except OSError:  # it is slow, or about to be gone
                return
            self.answered, workers, scheduler = now, info["workers"], info["id"]
        if scheduler != self.scheduler:
            if self.scheduler:
                self.tell("cluster: the scheduler is gone; waiting for the next, Ctrl-C ends the wait")
            self.scheduler, self.known, self.meeting = scheduler, {}, {}
        for address in [a for a in (*self.known, *self.meeting) if a not in workers]:
            self.meeting.pop(address, None)
            if spot := self.known.pop(address, None):
                self.tell(f"cluster: {spot.name} is lost")
        for address in set(workers) - set(self.known) - set(self.meeting):
            self.meeting[address] = self.submit(meet, address)
        for address, future in list(self.meeting.items()):
            if future.status != "pending":
                del self.meeting[address]
                if told := heard(future):
                    try:
                        self.known[address] = self._spot(f"worker {workers[address]['name']}", told)
                    except BadInput as refused:
                        if strict:
                            raise
                        self.known[address] = None
                        self.tell(f"cluster: left out: {refused}")

    def _spot(self, name: str, told: Told) -> Spot:
        """A worker by what it said, if it is this checkout with our releases; raises BadInput."""
        if "out" not in told:
            why = told.get("refused") or told.get("died")
            raise BadInput(name, f"cannot be asked ({why})", f"in this commit's checkout there: {EXTRA}, by its lock")
        facts = msgspec.convert(told["out"], Facts)
        ours, theirs = (made.code for made in (self.here, facts.made))
        if ours != theirs or facts.made.dirty:
            what = f"is at commit {theirs}, this at {ours}" if ours != theirs else "has uncommitted changes"
            raise BadInput(name, what, f"git checkout {ours} there, without changes, and start the worker again")
        first = next((spot for spot in self.spots.values() if spot.facts.gpu and facts.gpu), None)
        pairs: list[tuple[str, ...]] = [("distributed", self.dask.__version__, facts.distributed)]
        pairs.append(("Python", *(made.python.rpartition(".")[0] for made in (self.here, facts.made))))
        for package in ("torch", "triton", "cuda") if first else ():
            pairs.append((package, getattr(first and first.facts.made, package), getattr(facts.made, package)))
        for package, wanted, found in pairs:
            if wanted != found:
                what = f"has {package} {found}, where others have {wanted}"
                raise BadInput(name, what, "install the same lock on every machine")
        if not facts.gpu:
            return Spot(name, facts, "")
        if twin := next((spot for spot in self.spots.values() if spot.facts.gpu == facts.gpu), None):
            self.tell(
                f"cluster: {name} has the GPU of {twin.name} and stands by; CUDA_VISIBLE_DEVICES gives it another"
            )
        if not facts.watched:
            self.tell(f"cluster: {name}: without NVML and nvidia-smi nobody sees who else uses its GPU")
        return Spot(name, facts, devices.get(facts.made.gpu, name).id)

    def submit(self, function: Callable[..., Told], address: str, *arguments: Any, **how: Any) -> Any:
        """The future of a function on a worker."""
        return self.client.submit(function, self.module, *arguments, workers=[address], pure=False, retries=0, **how)

    def device(self, card: phases.Card, asked: str | None) -> str:
        """The id of the device that a card is measured on: what was asked for, else the card's; raises BadInput."""
        wanted = devices.get(asked, "--device").id if asked else card.device
        there = sorted({spot.device for spot in self.spots.values() if spot.device})
        if wanted not in there:
            what = f"asks for {wanted}, and the cluster has {', '.join(there) or 'no GPU'}"
            raise BadInput("--device" if asked else card.path, what, "pass --device with one that is there")
        return wanted


def heard(future: Any) -> Told | None:
    """What came of a future that is not pending; None where nobody can say, for its scheduler or worker is gone."""
    try:
        return future.result(timeout=HEAR_S)
    except Exception as error:
        gone = future.status in ("cancelled", "lost", "pending") or isinstance(error, OSError)
        return None if gone else {"died": reason(error)}


def sweep(cluster: Cluster, cells: Sequence[Cell], budget_s: float = math.inf) -> Iterator[tuple[Cell, Told]]:
    """Run the cells and yield each once with what came of it; `died` says why one could not be done.

    Raises BadInput where a worker refuses a cell, and where none that fits has been there for PATIENCE_S.
    """
    waiting, flying = list(cells), dict[str, tuple[Cell, Spot, Any, float, str]]()
    tried: dict[str, list[str]] = {cell.name: [] for cell in cells}  # the GPUs, or workers, that failed
    took: list[float] = []
    homes: dict[str, str] = {}  # of a group: the GPU, or worker, that has its first cell
    began = fed = said = time.monotonic()
    while waiting or flying:
        cluster.look()
        now, spots = time.monotonic(), cluster.spots
        for address, (cell, spot, future, since, scheduler) in list(flying.items()):
            told: Told | None = {"died": f"{spot.name} was lost"}
            if scheduler != cluster.scheduler:  # which is no fault of the cell
                told = None
            elif future.status != "pending":
                told = heard(future)
            elif address in spots:
                continue
            del flying[address]
            told = told or {}
            if "busy" in told and not spot.until:
                cluster.tell(f"cluster: {spot.name}: {told['busy']}; {cell.name} is tried again later")
            spot.until = now + BUSY_S if "busy" in told else 0.0
            if "refused" in told:
                raise BadInput(spot.name, f"refuses {cell.name}: {told['refused']}")
            if "out" in told:
                took.append(now - since)
                if spent := told.get("took"):
                    cluster.tell(f"{spent}; {took[-1]:.0f} s in all, on {spot.name}")
                yield cell, told
                continue
            if "died" in told:
                future.cancel()
                tried[cell.name].append(spot.facts.gpu or spot.name)
                if len(tried[cell.name]) == TRIES:
                    yield cell, {"died": f"{told['died']}, at the last of {TRIES} tries"}
                    continue
                cluster.tell(f"cluster: {cell.name}: {told['died']}; it is done again")
            waiting.insert(0, cell)
        guess = sum(took) / len(took) if took else FIRST_GUESS_S
        if waiting and now - began + guess > budget_s:
            for cell in waiting:
                cluster.tell(f"{cell.name}: left out, the budget of {budget_s:.0f} s is spent")
            waiting.clear()
        for address, spot in spots.items():
            if address in flying or now < spot.until:
                continue
            if chosen := next((cell for cell in waiting if _suits(cell, spot, spots, tried[cell.name], homes)), None):
                waiting.remove(chosen)
                gpu = spot.facts.gpu
                if chosen.group:
                    homes[chosen.group] = gpu or spot.name
                need = {gpu or "cell": 1}
                future = cluster.submit(do, address, chosen.arguments, gpu, chosen.files, resources=need)
                flying[address] = chosen, spot, future, now, cluster.scheduler
        if flying or any(now < spot.until for spot in spots.values()):
            fed = now
        elif waiting and now > fed + PATIENCE_S:
            raise BadInput("--on", f"no worker for {waiting[0].name} was there for {PATIENCE_S:.0f} s", AGAIN)
        if took and now > said + TELL_S:
            said, left = now, len(waiting) + len(flying)
            minutes = guess * left / max(1, len(spots)) / 60
            done = f"{len(cells) - left} of {len(cells)} cells done, {len(flying)} under way"
            cluster.tell(f"cluster: {done}, {len(spots)} workers, about {minutes:.0f} min left")
        time.sleep(POLL_S)


def _suits(cell: Cell, spot: Spot, spots: Mapping[str, Spot], failed: Sequence[str], homes: Mapping[str, str]) -> bool:
    """Whether a worker shall do a cell: one where it failed, or that its group is not on, only if no other could."""
    fit = [other for other in spots.values() if other.fits(cell)]
    fit = [other for other in fit if (other.facts.gpu or other.name) not in failed] or fit
    home = homes.get(cell.group)
    return spot in ([other for other in fit if (other.facts.gpu or other.name) == home] or fit)


def measure(
    cluster: Cluster,
    items: Sequence[tuple[Item, str]],
    settings: Settings,
    peers: bool = False,
    folder: Path | None = None,
) -> Iterator[list[Measurement]]:
    """`lab.bench.measure.measure` on many machines: the rows of each comparison once they are on this disk.

    items: each with the id of its device. A comparison that could not be done has an error row for each arm.
    """
    cells: list[Cell] = []
    homes: dict[str, tuple[Item, str, Path]] = {}
    on = {item.card.id: device for item, device in items}
    runs = {device: store.new_run(device, "")[0] for device in on.values()}
    asked = [item for item, _ in items]
    in_order = itertools.chain.from_iterable(groups(asked))
    for item in in_order if math.isfinite(settings.budget_s) else longest_first(asked, settings):
        device, name, way = on[item.card.id], item.where, settings.of(item.card)
        into = folder or store.folder() / device / item.card.id / runs[device]
        if key(item, way) in completed(into):
            cluster.tell(f"{name}: already measured in this run")
            continue
        store.refuse_unwritable(into)
        arguments = ["measure", item.card.id, "--workload", item.workload.id, "--json", *["--peers"] * peers]
        for option in ("seconds", "timer", "l2", "rest", "placements", "processes"):
            arguments += [f"--{option}", str(getattr(way, option))]
        arguments += ["--out", f"{PROFILES}/{device}/{item.card.id}/{into.name}"]
        known = "".join(store.line(best, into).decode() + "\n" for best in ceilings.latest(device).values())
        files = {f"{device}/ceilings/known/{Ceiling.FILE}": known} if known else {}
        if not item.card.path.absolute().is_relative_to(REPOSITORY):  # a card of one's own, which no worker has
            sent = [path for path in (item.card.path, item.card.path.parent / own.DEVICES) if path.exists()]
            files |= {f"cards/{path.name}": path.read_text(encoding="utf-8") for path in sent}
            arguments += ["--cards", f"{PROFILES}/cards"]
        cells.append(
            Cell(name, arguments, device, files, f"{item.card.id} {item.together[0]}" * (len(item.together) > 1))
        )
        homes[name] = item, device, into
    for cell, told in sweep(cluster, cells, settings.budget_s):
        item, device, into = homes[cell.name]
        if key(item, settings.of(item.card)) in completed(into):
            cluster.tell(f"{cell.name}: already measured in this run")  # by another client that continues it
            continue
        rows: list[Measurement] = []
        for name, text in told.get("files", {}).items():
            lines = [line.encode() for line in text.splitlines()]
            if Path(name).name == Measurement.FILE:
                rows += [store.decode(line, Measurement, cell.name) for line in lines]
            else:
                found = [store.decode(line, Ceiling, cell.name) for line in lines]
                store.append_all(store.folder() / device / "ceilings" / Path(found[0].run).name, found)
        if any((made.card_hash, made.run) != (item.card.card_hash, into.name) for made in rows):
            raise BadInput(cell.name, "was measured by another card than this one", "check this commit out everywhere")
        if "died" in told:
            failed = [Outcome(role, name, "error", told["died"]) for role, name in item.arms]
            where, way, now = devices.get(device), settings.of(item.card), machine.now()
            rows = [row(item, outcome, None, where, way, into, now, cluster.here) for outcome in failed]
        store.append_all(into, rows)
        yield rows
