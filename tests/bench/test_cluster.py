"""Many machines: what is lost, what is said, and that every row is on the disk once.

`Still` is a cluster whose futures are what a test says, for the sweep alone; the others are Dask's own, with a
simulated GPU (tests/bench/fake_cell.py), and nvidia-smi is a script that reads files.
"""

import asyncio
import contextlib
import gc
import itertools
import json
import os
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distributed
import msgspec
import pytest
from msgspec import structs

from lab.base import devices
from lab.base.errors import REPOSITORY, BadInput
from lab.bench import cluster, machine, measure
from lab.bench.cluster import Cell, Facts, Spot
from lab.bench.measure import Settings
from lab.card import phases
from lab.cli import main
from lab.judge import evidence, rules
from lab.row import store, verify
from lab.row.records import Ceiling, Measurement, Provenance
from tests.bench import bench_cluster, fake_bench, fake_cell
from tests.bench.fake_cell import CARDS, WORKLOADS
from tests.refused import held, refused

H200 = devices.get("h200")
QUICK = Settings(seconds=0.0, placements=1, processes=1, backend="tests.bench.fake_bench:quick")
MODULE = "tests.bench.fake_cell"
GPUS = tuple(f"GPU-{number}" for number in range(4))
SMI = """#!/bin/sh
case "$*" in
  *--query-gpu=uuid*) printf '%s\\n' {gpus} ;;
  *--query-compute-apps*) test ! -f "{folder}/used" || cat "{folder}/used" ;;
  *) echo 10 ;;
esac
"""


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cards of the toy family, a store of its own and an nvidia-smi; the folder of the cards."""
    folder = tmp_path / "cards"
    folder.mkdir()
    fake_bench.card(folder, WORKLOADS)
    for name in CARDS:
        (folder / f"{name}.toml").write_text((folder / "toy.toml").read_text().replace('"toy"\nrow', f'"{name}"\nrow'))
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI.format(gpus=" ".join(GPUS), folder=tmp_path))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("KILLGATE_TOY", str(folder))
    fake_bench.use(monkeypatch)
    monkeypatch.setattr(phases, "card", lambda name: phases.load(folder / f"{name}.toml"))
    monkeypatch.setattr(store, "FOLDER", tmp_path / "profiles")
    monkeypatch.setattr(machine, "provenance", lambda: Provenance(commit="0", python=platform.python_version()))
    monkeypatch.setattr(machine, "commit", lambda: ("0", False))
    monkeypatch.setattr(cluster, "LOOK_S", 0.1)
    monkeypatch.setattr(cluster, "POLL_S", 0.01)
    monkeypatch.setattr(cluster, "HEAR_S", 1.0)  # a result that is lost with its scheduler is waited for in vain
    return folder


@pytest.fixture
def told() -> list[str]:
    return []


def items(count: int = len(CARDS), only: tuple[str, ...] = ()) -> list[tuple[measure.Item, str]]:
    return [(item, "h200") for name in CARDS[:count] for item in measure.plan(phases.card(name), only)]


def alone(folder: Path, wanted: list[tuple[measure.Item, str]]) -> dict[str, list[Measurement]]:
    """The rows of each card as one machine measures them; each workload has a file for tests/bench/fake_cell.py."""
    found: dict[str, list[Measurement]] = {}
    (folder / "told").mkdir()
    home, store.FOLDER = store.FOLDER, folder / "alone"
    for rows in measure.measure([item for item, _ in wanted], QUICK, None, H200):
        (folder / "told" / f"{rows[0].phase} {rows[0].workload_id}").write_bytes(msgspec.json.encode(rows))
        lines = [store.line(row, folder) for row in rows]
        found.setdefault(rows[0].phase, []).extend(store.decode(line, Measurement, "alone") for line in lines)
    store.FOLDER = home
    return found


def seen(rows: Iterable[Measurement]) -> Counter[str]:
    """Rows without what differs from run to run."""
    return Counter(repr(structs.replace(row, run="", started="", took_s=None)) for row in rows)


# The sweep alone -----------------------------------------------------------------------------------------------------


class Still:
    """A cluster of two GPUs.

    answers: by cell, what its futures give in turn, the last for ever: an answer, a status, or None for the loss of the
    worker. A cell that is not named is done.
    """

    scheduler = "s"

    def __init__(self, told: list[str], answers: dict[str, list[Any]]) -> None:
        made = Provenance(gpu="NVIDIA H200")
        self.spots = {f"a{n}": Spot(f"worker {n}", Facts(made, "1", f"GPU-{n}"), "h200") for n in range(2)}
        self.tell, self.answers = told.append, answers
        self.asked: list[tuple[str, str]] = []
        self.gone: list[str] = []

    def look(self) -> None:
        for address in self.gone:  # and there is another in its place
            spot = self.spots.pop(address)
            self.spots[address + "'"] = Spot(spot.name, spot.facts, spot.device)
        self.gone = []

    @staticmethod
    def nothing(timeout: float) -> None:
        raise RuntimeError("nobody can say")

    def submit(self, function: Any, address: str, arguments: list[str], gpu: str, files: Any, resources: Any) -> Any:
        assert resources == {gpu: 1}
        self.asked.append((arguments[0], gpu))
        left = self.answers.get(arguments[0], [{"out": []}])
        answer = left.pop(0) if len(left) > 1 else left[0]
        if answer is None:
            self.gone.append(address)
        if isinstance(answer, str):
            return SimpleNamespace(status=answer, result=self.nothing, cancel=lambda: None)
        status = "pending" if answer is None else "finished"
        return SimpleNamespace(status=status, result=lambda timeout: answer, cancel=lambda: None)


def swept(still: Still, *cells: Cell, budget_s: float = 1e9) -> dict[str, dict[str, Any]]:
    given = list(cluster.sweep(still, cells, budget_s))  # type: ignore[arg-type]
    assert len({cell.name for cell, _ in given}) == len(given)
    return {cell.name: answer for cell, answer in given}


def cells(*names: str, device: str = "h200") -> list[Cell]:
    return [Cell(name, [name], device) for name in names]


def test_a_lost_worker_costs_its_cell_a_try_elsewhere(told: list[str]) -> None:
    still = Still(told, {"b": [None, {"out": [1]}]})
    assert swept(still, *cells("a", "b", "c")) == {"a": {"out": []}, "b": {"out": [1]}, "c": {"out": []}}
    first, second = [gpu for name, gpu in still.asked if name == "b"]
    assert first != second
    assert Counter(name for name, _ in still.asked) == {"a": 1, "b": 2, "c": 1}
    assert [line for line in told if "b: " in line and "lost" in line]


def test_a_cell_that_takes_its_workers_along_is_given_up(told: list[str]) -> None:
    still = Still(told, {"b": [None], "c": [{"died": "it fell"}]})
    found = swept(still, *cells("a", "b", "c"))
    assert found["a"] == {"out": []}
    assert "lost" in found["b"]["died"]
    assert "it fell" in found["c"]["died"]
    assert Counter(name for name, _ in still.asked) == {"a": 1, "b": cluster.TRIES, "c": cluster.TRIES}


def test_a_scheduler_that_is_gone_costs_no_try(told: list[str]) -> None:
    still = Still(told, {"a": ["cancelled"] * 5 + ["lost"] * 5 + [{"out": [2]}]})
    assert swept(still, *cells("a")) == {"a": {"out": [2]}}
    assert len(still.asked) == 11


def test_a_gpu_in_use_is_left_for_a_while(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "BUSY_S", 0.1)
    still = Still(told, {"a": [{"busy": "2 other processes on it"}] * 4 + [{"out": [3]}]})
    began = time.monotonic()
    assert swept(still, *cells("a")) == {"a": {"out": [3]}}
    assert time.monotonic() - began > 0.1  # after both GPUs were in use
    assert len([line for line in told if "2 other processes" in line and "again" in line]) == 2


def test_a_cell_goes_where_it_fits(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    still = Still(told, {})
    still.spots["a1"].device = "gb10"
    still.spots["a2"] = Spot("worker 2", Facts(Provenance(), "1", "GPU-none"), "")
    swept(still, *(Cell(f"c{n}", [f"c{n}"], ("h200", "gb10")[n % 2]) for n in range(6)))
    assert set(still.asked) == {(f"c{n}", f"GPU-{n % 2}") for n in range(6)}
    monkeypatch.setattr(cluster, "PATIENCE_S", 0.2)
    with refused("--on", "c9", remedy="--missing"):
        swept(still, *cells("c9", device="p100"))


def test_cells_that_a_gate_compares_share_a_gpu(told: list[str]) -> None:
    still = Still(told, {"a0": [None, {"out": []}]})  # its worker is lost, another of the same GPU takes its place
    groups = [Cell(f"{group}{n}", [f"{group}{n}"], "h200", group=group) for n in range(4) for group in "abc"]
    swept(still, *groups, *cells("d", "e"))
    last = dict(still.asked)
    assert {gpu for _, gpu in still.asked} == {"GPU-0", "GPU-1"}
    for group in "bc":
        assert len({last[f"{group}{n}"] for n in range(4)}) == 1
    assert len({last[f"a{n}"] for n in range(4)}) == 1  # where its first cell was done at last


def test_a_budget_leaves_out_what_it_cannot_pay(told: list[str]) -> None:
    assert swept(Still(told, {}), *cells("a", "b"), budget_s=1.0) == {}
    assert [line.split(":")[0] for line in told] == ["a", "b"]


def test_what_a_worker_refuses_ends_the_sweep(told: list[str]) -> None:
    with pytest.raises(BadInput, match="no such card"):
        swept(Still(told, {"b": [{"refused": "b.toml: no such card; remedy"}]}), *cells("a", "b"))


def test_an_estimate_is_told(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "TELL_S", 0.0)
    swept(Still(told, {}), *cells("a", "b", "c", "d"))
    assert [line for line in told if "2 of 4 cells done" in line and "min left" in line]


def test_a_comparison_is_written_once_and_one_that_nobody_did_says_so(
    toy: Path, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = items(1, ("w00", "w01"))
    there = [structs.replace(row, run="run") for row in alone(tmp_path, wanted)["toy0"]]
    lines = [store.line(row, tmp_path).decode() for row in there]
    twice = {"out": [], "files": {"h200/toy0/r/rows.jsonl": "\n".join(lines[:2])}}

    def sweep(joined: Any, given: list[Cell], budget_s: float) -> Iterator[tuple[Cell, dict[str, Any]]]:
        given = given[::-1]  # the larger one comes first
        assert given[0].arguments[:4] == ["measure", "toy0", "--workload", "w00"]
        assert given[0].arguments[-2:] == ["--cards", "{profiles}/cards"]  # a card of one's own goes along
        assert given[0].files == {"cards/toy0.toml": (toy / "toy0.toml").read_text()}
        yield from ((given[0], twice), (given[0], twice), (given[1], {"died": "a storm"}))

    monkeypatch.setattr(cluster, "sweep", sweep)
    joined: Any = SimpleNamespace(tell=told.append, here=machine.provenance())
    found = [row for rows in cluster.measure(joined, wanted, QUICK, folder=tmp_path / "run") for row in rows]
    assert store.read(tmp_path / "run" / "rows.jsonl", Measurement) == found
    assert [(row.workload_id, row.name, row.status) for row in found] == [
        ("w00", "plain", "ok"),
        ("w00", "faster", "ok"),
        ("w01", "plain", "error"),
        ("w01", "faster", "error"),
    ]
    assert {row.message for row in found[2:]} == {"a storm"}
    assert [line for line in told if "toy0 w00: already" in line]
    with refused("toy0 w00", "another card"):
        list(cluster.measure(joined, wanted, QUICK, folder=tmp_path / "other"))


# Who is let in -------------------------------------------------------------------------------------------------------


def test_a_worker_of_another_checkout_is_refused(told: list[str]) -> None:
    joined = cluster.Cluster.__new__(cluster.Cluster)
    joined.dask, joined.here, joined.tell, joined.known = distributed, machine.provenance(), told.append, {}

    def spot(**facts: Any) -> Spot:
        return joined._spot("worker 7", {"out": fake_cell.facts(**facts)})

    joined.known["a0"] = spot()
    assert joined.spots["a0"].device == "h200"
    made: Any = fake_cell.facts()["made"]
    for facts, words in (
        ({"commit": "f00"}, ["f00", "this at 0"]),
        ({"made": made | {"dirty": True}}, ["uncommitted"]),
        ({"made": made | {"python": "2.7.1"}}, ["Python 2.7"]),
        ({"made": made | {"torch": "1.0"}, "gpu": "GPU-1"}, ["torch 1.0"]),
        ({"distributed": "1.2.3"}, ["1.2.3", distributed.__version__]),
        ({"made": made | {"gpu": "Voodoo 2"}, "gpu": "GPU-1"}, ["Voodoo 2"]),
    ):
        with refused("worker 7", *words):
            spot(**facts)
    with refused("worker 7", "No module named 'lab'", remedy="cluster"):
        joined._spot("worker 7", {"died": "ModuleNotFoundError: No module named 'lab'"})
    assert told == []
    joined.known["a1"] = spot()
    assert "GPU of worker 7" in told.pop()
    assert list(joined.spots) == ["a0"]
    del joined.known["a0"]
    assert list(joined.spots) == ["a1"]
    assert spot(gpu="GPU-1", watched=False).facts.gpu == "GPU-1"
    assert "nobody sees" in told[0]
    assert spot(gpu="").device == ""
    assert joined.device(phases.card("toy"), None) == "h200"
    with refused("--device", "gb10", "h200"):
        joined.device(phases.card("toy"), "gb10")


def test_an_address_that_is_none_or_where_nobody_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "CONNECT_S", 0.2)
    for address in ("nowhere", "tcp://127.0.0.1", "tcp://127.0.0.1:1"):
        assert main.main(["measure", "toy", "--on", address]) == 2
        held(capsys.readouterr().err, "--on", address)
    for options, where in ((["--on", "tcp://a:1", "--ceilings"], "--on"), (["--device", "h200"], "--device")):
        assert main.main(["measure", "toy", *options]) == 2
        held(capsys.readouterr().err, where)
    monkeypatch.setattr(machine, "commit", lambda: ("0", True))
    assert main.main(["measure", "toy", "--on", "tcp://127.0.0.1:1"]) == 2
    held(capsys.readouterr().err, "--on", "uncommitted")
    monkeypatch.setitem(sys.modules, "distributed", None)
    for command in (["measure", "toy", "--on", "tcp://127.0.0.1:1"], ["cluster", "--local", "1"]):
        assert main.main(command) == 2
        assert "killgate[cluster]" in capsys.readouterr().err


# Dask's own ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def one() -> Iterator[str]:
    """The address of a scheduler and a worker, both in this process."""
    options: dict[str, Any] = {"processes": False, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(n_workers=1, memory_limit=0, protocol="tcp", **options) as made:
        yield made.scheduler_address


@pytest.mark.slow
def test_rows_come_home_once(one: str, tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = items(2, ("w00", "w01"))
    there = alone(tmp_path, wanted)
    known = Ceiling(
        device="h200", name="read", value=1.0, unit="GB/s", method="m", run="r", started="s", samples=(1.0,)
    )
    store.append(store.FOLDER / "h200" / "ceilings" / "r", known)
    monkeypatch.setenv("KILLGATE_TOLD", str(tmp_path / "told"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", GPUS[2])
    monkeypatch.setattr(cluster, "BUSY_S", 0.2)
    (tmp_path / "used").write_text("4711\n")

    def tell(line: str) -> None:
        told.append(line)
        (tmp_path / "used").unlink(missing_ok=True)

    joined = cluster.Cluster(one, tell, MODULE)
    try:
        (spot,) = joined.spots.values()
        assert joined.client.scheduler_info()["workers"].popitem()[1]["resources"] == {GPUS[2]: 1, "NVIDIA H200": 1}
        found = [row for rows in cluster.measure(joined, wanted, QUICK) for row in rows]
        assert [line for line in told if "1 other process" in line]
        assert seen(found) == seen(itertools.chain.from_iterable(there.values()))
        assert {row.run for row in found} == {path.parent.name for path in store.FOLDER.glob("*/toy*/*/rows.jsonl")}
        kept = [row for name in CARDS[:2] for row in store.rows(phase=name)]
        assert seen(kept) == seen(found)
        assert verify.verify(store.FOLDER).wrong == ()
        folder = store.FOLDER / "h200" / CARDS[0] / found[0].run
        assert list(cluster.measure(joined, wanted[:2], QUICK, folder=folder)) == []
        assert len([line for line in told if "already measured" in line]) == 2
    finally:
        joined.close()
    assert spot.facts.watched


@pytest.mark.slow
def test_nothing_is_said_by_what_a_lost_connection_leaves(one: str, told: list[str], capfd: Any) -> None:
    """The client's tasks that nobody asked for their result, as asyncio tells of them when they are collected."""

    async def lost() -> None:
        raise distributed.client.AllExit

    async def leave() -> None:
        asyncio.ensure_future(lost())  # noqa: RUF006 (nobody keeps it)
        await asyncio.sleep(0)

    joined = cluster.Cluster(one, told.append, MODULE)
    try:
        joined.client.sync(leave)
        gc.collect()
        joined.client.sync(asyncio.sleep, 0.0)
    finally:
        joined.close()
    assert "never retrieved" not in capfd.readouterr().err


@contextlib.contextmanager
def local_cluster(workers: int, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str, list[int]]]:
    """`lab cluster --local` in a process of its own: (it, the address that it printed, its workers' pids)."""
    command = [sys.executable, "-m", "lab", "cluster", "--local", str(workers), "--port", str(port)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=REPOSITORY, **pipes) as made:
        try:
            assert made.stdout is not None
            address = made.stdout.readline().strip()
            with distributed.Client(address, set_as_default=False) as client:
                pids = list(client.run(os.getpid).values())
            yield made, address, pids
        finally:
            made.kill()


@pytest.mark.slow
def test_a_whole_cell_and_the_command(one: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """`lab measure --on` with the engine itself in the cell, its ceilings and its error rows."""
    card = fake_bench.card(tmp_path / "cards", ("w00", "w01"), candidate="exits")
    monkeypatch.setattr(phases, "card", lambda name: card)
    monkeypatch.setattr(cluster, "MODULE", MODULE)
    monkeypatch.setattr(cluster.Cluster.__init__, "__defaults__", (print, MODULE))
    options = ["--seconds", "0", "--placements", "1", "--processes", "1", "--json"]
    assert main.main(["measure", "toy", "--on", one, *options]) == 1
    said = capfd.readouterr()
    printed = json.loads(said.out)
    assert [re.sub(r"[\d.]+ s(: start.*;)? ?", "", line) for line in said.err.splitlines() if "took" in line] == [
        f"toy {workload}: took in all, on worker 0" for workload in ("w01", "w00")
    ]
    assert [(row["workload_id"], row["arm"], row["status"]) for row in printed] == [
        (workload, arm, status)
        for workload in ("w01", "w00")  # the larger one first
        for arm, status in (("control", "ok"), ("candidate", "error"))
    ]
    assert "exit code 3" in printed[1]["message"]
    assert main.main(["measure", "toy", "--on", one, "--device", "gb10"]) == 2
    held(capfd.readouterr().err, "--device", "gb10", "h200")


@pytest.mark.slow
def test_300_cells_whoever_dies(toy: Path, tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers killed at random, one of them slow, the scheduler killed midway: the rows and verdicts of one machine."""
    wanted = items()
    assert len(wanted) == 300
    there = alone(tmp_path, wanted)
    monkeypatch.setenv("KILLGATE_TOLD", str(tmp_path / "told"))
    monkeypatch.setenv("KILLGATE_SLOW", GPUS[3])
    draw = random.Random(20261123)
    with local_cluster(4) as (made, address, _):
        port = int(address.rpartition(":")[2])
        joined = cluster.Cluster(address, told.append, MODULE)
        found: list[Measurement] = []
        again: Any = contextlib.nullcontext()
        fatal = (20, 55, 180, 230, 270)
        try:
            for number, rows in enumerate(cluster.measure(joined, wanted, QUICK)):
                found += rows
                if number in fatal:
                    os.kill(draw.choice(list(joined.client.run(os.getpid).values())), signal.SIGKILL)
                elif number == 120:
                    made.kill()
                    again = local_cluster(4, port)
                    again.__enter__()
            joined.close()
        finally:
            again.__exit__(*sys.exc_info())
    assert len([line for line in told if "scheduler is gone" in line]) == 1
    assert 1 <= len([line for line in told if "it is done again" in line]) <= 5, told  # one a worker that was killed
    assert seen(found) == seen(itertools.chain.from_iterable(there.values()))
    assert verify.verify(store.FOLDER).wrong == ()
    for name in CARDS:
        sides = store.rows(phase=name), there[name]
        assert seen(sides[0]) == seen(sides[1])
        gate = phases.card(name).gate
        verdicts = [rules.judge(gate, evidence.readings(side, H200)) for side in sides]
        said = [[v.word, *((f.state, f.observed) for f in v.findings)] for v in verdicts]  # all but the run in ids
        assert said[0] == said[1]


# `lab cluster` -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_local_cluster_ends_well(how: signal.Signals) -> None:
    with local_cluster(2) as (made, address, pids):
        with distributed.Client(address, set_as_default=False) as client:
            assert {worker["name"] for worker in client.scheduler_info()["workers"].values()} == set(GPUS[:2])
            assert set(client.run(os.getenv, "CUDA_VISIBLE_DEVICES").values()) == set(GPUS[:2])
        made.send_signal(how)
        out, said = made.communicate(timeout=120)  # two workers, beside all other tests
    assert (made.returncode, out, said) == (0, "", "")
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_a_local_cluster_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    for workers in ("0", str(len(GPUS) + 1)):
        assert main.main(["cluster", "--local", workers]) == 2
        held(capsys.readouterr().err, "--local", workers)
    for port in ("99999", "-5"):
        assert main.main(["cluster", "--local", "1", "--port", port]) == 2
        held(capsys.readouterr().err, "--port", port, "65535")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main.main(["cluster", "--local", "1", "--port", port]) == 2
        held(capsys.readouterr().err, "--port", port)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("two_s", "status"), [(10.0, 0), (11.0, 1)])
def test_what_a_second_gpu_gives_is_asked_of_gpus_that_share_none(
    monkeypatch: pytest.MonkeyPatch, at_once: bool, two_s: float, status: int
) -> None:
    """One behind the other on GPUs 0, and 0 and 1; at once on 0, and 1 and 2."""
    seen: list[tuple[int, list[str], list[str], str]] = []
    both = threading.Barrier(2, timeout=30)

    def sweep(workers: int, cards: list[str], options: list[str], _: Path, gpus: str) -> tuple[float, dict[Any, Any]]:
        if at_once:
            both.wait()
        seen.append((workers, cards, options, gpus))
        return {1: 20.0, 2: two_s}[workers], {}

    monkeypatch.setattr(bench_cluster, "sweep", sweep)
    assert bench_cluster.main("a", "--device=h100", "b", *["--at-once"] * at_once) == status
    of_two = "1,2" if at_once else "0,1"
    wanted = [(1, ["a", "b"], ["--device=h100"], "0"), (2, ["a", "b"], ["--device=h100"], of_two)]
    assert (sorted(seen) if at_once else seen) == wanted
