"""`lab profile` without a GPU: the choice of the profiler, the ranges, what is stored and what is not."""

import contextlib
import json
import os
import stat
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from msgspec import structs

from kernels.common import Candidate, Tensors
from lab.base.errors import BadInput
from lab.bench import profile
from lab.bench.profile import Job, Tool
from lab.card import phases
from lab.check import families
from lab.cli import main
from lab.judge import verdicts
from lab.row import store
from lab.trace import breakdowns, files, stored
from lab.trace.model import Calls, Copies, Fills, GraphLaunches, Kernels, Ranges, Trace
from tests.loops import over
from tests.refused import held, refused
from tests.trace.nsys_synthetic import Export

SECRET = "s3cret-value-of-the-environment"
CARD = phases.card("p5-kernel")  # its arms run in the interpreter too


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# Which profiler -------------------------------------------------------------------------------------------------------


def test_no_nsys_means_torch() -> None:
    assert profile.choose(lambda _: None) == Tool("torch.profiler", "nsys is not on the PATH")


def test_nsys_without_its_importer_means_torch(tmp_path: Path) -> None:
    nsys = program(tmp_path / "target-linux-x64" / "nsys", "")
    found = profile.choose(lambda _: str(nsys))
    assert (found.name, found.path) == ("torch.profiler", None)
    assert "without its importer" in found.why


def test_nsys_with_its_importer_is_used(tmp_path: Path) -> None:
    for place in ("target-linux-x64/nsys", "bin/nsys"):
        folder = tmp_path / place.replace("/", "-")
        nsys = program(folder / place, "")
        program(folder / "host-linux-x64" / "QdstrmImporter", "")
        link = folder / "nsys-on-the-path"
        link.symlink_to(nsys)
        found = profile.choose({"nsys": str(link)}.get)
        assert (found.name, found.path) == ("nsys", nsys), place


def test_nsys_flags() -> None:
    command = profile.nsys_command(Tool("nsys", "", Path("nsys")), "card", "w", 7, Path("out"))
    for flag in ("--trace=cuda,nvtx", "--cuda-graph-trace=node", "--capture-range=nvtx", "--export=sqlite"):
        assert flag in command
    assert command[-8:] == ["lab", "profile", "card", "--steps", "7", "--inside", "--workload", "w"]
    assert f"--nvtx-capture={profile.CAPTURE}@*" in command


def test_nsys_failure_is_one_line_with_its_last_message(tmp_path: Path) -> None:
    nsys = program(tmp_path / "nsys", "echo one >&2; echo the last word >&2; exit 3")
    with refused("nsys", "3", "the last word", remedy="--tool torch.profiler"):
        profile.with_nsys(Tool("nsys", "", nsys), CARD, None, 1, tmp_path)


def test_nsys_runs_with_unregistered_ranges(tmp_path: Path) -> None:
    """The child's ranges are seen only with this variable; the fake nsys writes what it got where the export goes."""
    script = 'while [ "$1" != -o ]; do shift; done; echo "$NSYS_NVTX_PROFILER_REGISTER_ONLY" > "$2.sqlite"'
    path = profile.with_nsys(Tool("nsys", "", program(tmp_path / "nsys", script)), CARD, None, 1, tmp_path)
    assert path.read_text() == "0\n"


# What is run ----------------------------------------------------------------------------------------------------------


def test_ranges_name_phase_arm_workload_and_step() -> None:
    order: list[str] = []

    @contextlib.contextmanager
    def named(label: str) -> Iterator[None]:
        order.append(f"+{label}")
        yield
        order.append(f"-{label}")

    profile.work([Job("p/control/w", lambda step: order.append(f"run {step}"))], 2, named, lambda: order.append("sync"))
    assert order == [
        *("+p/control/w", "+p/control/w/step 0", "run 0", "sync", "-p/control/w/step 0"),
        *("+p/control/w/step 1", "run 1", "sync", "-p/control/w/step 1", "-p/control/w"),
    ]


def test_steps_take_turns_on_two_sets_of_inputs() -> None:
    family = families.load(CARD.family)
    workload = next(w for w in family.cases.WORKLOADS if w.role == "check")
    seen = []

    class Fake:
        layouts: ClassVar[dict[str, object]] = {}

        def prepare(self, inputs: dict[str, object]) -> dict[str, object]:
            return dict(inputs)

        def run(self, args: dict[str, object], out: object) -> None:
            seen.append(id(args))

    run = profile._stepper(family, Fake(), workload, "cpu", {}, False)
    for step in range(4):
        run(step)
    assert seen[:2] == seen[2:]
    assert seen[0] != seen[1]


def test_a_wrong_arm_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    family = families.load(CARD.family)
    check = Namespace(status="incorrect", message="off by one")
    monkeypatch.setattr(profile.accuracy, "check", lambda *_: check)
    found, left_out = profile.jobs(CARD, next(w.id for w in family.cases.WORKLOADS), "cpu")
    assert found == []
    assert len(left_out) == 2
    assert left_out[0].endswith("incorrect: off by one")


def test_a_card_of_the_hosts_time_is_profiled_by_its_eager_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    family, called = families.load(CARD.family), list[str]()

    def run(args: Tensors, out: Tensors) -> None:
        called.append("run")

    def eager(args: Tensors, out: Tensors) -> Tensors:
        called.append("eager")
        return {}

    both = Candidate("both", "bf16", run, eager=eager)
    monkeypatch.setattr(families.Family, "candidate", lambda self, name: both)
    monkeypatch.setattr(profile.accuracy, "check", lambda *_: Namespace(status="ok", message=""))
    for protocol, wanted in ((phases.Protocol(timer="host"), "eager"), (phases.Protocol(), "run")):
        card = structs.replace(CARD, measure=protocol)
        found, _ = profile.jobs(card, next(w.id for w in family.cases.WORKLOADS), "cpu")
        found[0].run(0)
        assert called.pop() == wanted


def test_cards_without_code_are_refused() -> None:
    replay_only = next(c for c in phases.cards().values() if not c.family)
    with refused(replay_only.path.name, "family"):
        profile.jobs(replay_only, None, "cpu")


# A real capture, CPU only ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Kineto file of two arms with two steps each, taken while a secret stood in the environment."""
    import torch

    a = torch.randn(63, 75)

    def run(step: int) -> None:
        torch.mm(a, a.T)

    todo = [Job(f"card/{arm}/w", run) for arm in ("control", "candidate")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KILLGATE_TEST_TOKEN", SECRET)
        return profile.with_torch(todo, 2, "cpu", tmp_path_factory.mktemp("raw"))


@pytest.mark.slow
def test_capture_is_read_and_stored_without_what_it_says_about_the_machine(raw: Path, tmp_path: Path) -> None:
    trace = files.read(raw)
    labels = {f"card/{arm}/w{end}" for arm in ("control", "candidate") for end in ("", "/step 0", "/step 1")}
    assert labels <= set(trace.labels)
    assert len(trace.kernels) == 0
    path = stored.save(trace, tmp_path / "trace.parquet", {"phase": "card"})
    again = stored.load(path)
    assert labels <= set(again.labels)
    assert again.domains == trace.domains == {1: "operator", 2: "module"}, "operators stay apart from ranges"
    assert list(again.ranges.duration_ns) == list(trace.ranges.duration_ns)
    content = path.read_bytes()
    for word in (SECRET, str(raw.parent), os.getcwd(), str(os.getpid())):
        assert word.encode() not in content
    assert stored.about(path) == {"phase": "card"}


def test_how_kernels_were_launched_is_stored(tmp_path: Path) -> None:
    export = Export()
    for name, start, registers in (("b", 10, 40), ("a", 20, 255)):
        sizes = {"staticSharedMemory": 1024, "dynamicSharedMemory": 100, "blockX": 128, "gridX": 7, "gridY": 3}
        export.kernel(name, start, start + 5, registersPerThread=registers, **sizes)
    trace = export.trace()
    again = stored.load(stored.save(trace, tmp_path / "trace.parquet"))
    assert {name: (how.registers, how.shared_bytes, how.block[0], how.grid[:2]) for name, how in
            again.launched.items()} == {"b": (40, 1124, 128, (7, 3)), "a": (255, 1124, 128, (7, 3))}  # fmt: skip
    assert again.launched == trace.launched


@pytest.mark.slow
def test_lab_profile_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["profile", CARD.id, "--device", "cpu", "--steps", "1", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"{CARD.id}: torch.profiler (a CPU run has host ranges only); 0 kernels" in out
    trace = stored.load(tmp_path / CARD.id / "trace.parquet")
    arms = {label.split("/")[1] for label in trace.labels if label.startswith(f"{CARD.id}/")}
    assert arms == {"control", "candidate"}
    assert sum(label.endswith("/step 0") for label in trace.labels) == 2


def test_lab_profile_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, where, words in (
        (["profile"], "lab profile", "card ids"),
        (["profile", CARD.id, "--steps", "0"], "lab profile", "step"),
        (["profile", "nosuch", "--device", "cpu"], "data/phases", '"nosuch"'),
        (["profile", CARD.id, "--workload", "nosuch", "--device", "cpu"], "cases.py", '"nosuch"'),
    ):
        assert main.main(arguments) == 2, arguments
        held(capsys.readouterr().err, where, words)


# The stored form ------------------------------------------------------------------------------------------------------


def full() -> Trace:
    base = 1_700_000_000_000_000_000
    rows = {"device": [0, 1], "stream": [7, 7], "process": [4242, 4243], "correlation": [5, 5]}
    times = {"start_ns": [base, base + 10], "end_ns": [base + 5, base + 30]}
    return Trace(
        tool="nsys",
        source="x.sqlite",
        graph_mode="graph",
        names=("a<b>", "c"),
        labels=("phase/arm",),
        call_names=("cudaLaunchKernel",),
        gpus={0: "H200", 1: "H200"},
        kernels=Kernels.of(**times, **rows, name=[1, 0]),
        memcpy=Copies.of(**times, **rows, bytes=[1, 2], kind=[8, 1]),
        memset=Fills.of(start_ns=[base + 40], end_ns=[base + 41], device=[0], bytes=[64]),
        graphs=GraphLaunches.of(start_ns=[base + 50], end_ns=[base + 90], device=[0], graph_exec=[3]),
        ranges=Ranges.of(start_ns=[base - 10], end_ns=[base + 99], label=[0], process=[4242], thread=[77]),
        calls=Calls.of(start_ns=[base - 5], end_ns=[base - 4], name=[0], process=[4242], thread=[77], correlation=[5]),
        warnings=("careful",),
        windows_ns=((base, base + 100),),
        window_label="a window",
    )


def test_every_kind_of_row_comes_back(tmp_path: Path) -> None:
    trace = full()
    again = stored.load(stored.save(trace, tmp_path / "t.parquet"))
    assert breakdowns.from_trace(again).parts == breakdowns.from_trace(trace).parts
    assert [again.names[i] for i in again.kernels.name] == ["c", "a<b>"]
    assert again.memcpy.kind.tolist() == [8, 1]
    assert again.graphs.graph_exec.tolist() == [3]
    assert (again.labels, again.call_names, again.warnings) == (["phase/arm"], ["cudaLaunchKernel"], ("careful",))
    assert again.windows_ns == ((10, 110),), "times count from the first row"
    assert int(again.ranges.start_ns[0]) == 0


def test_processes_are_numbered_and_still_join(tmp_path: Path) -> None:
    again = stored.load(stored.save(full(), tmp_path / "t.parquet"))
    assert again.kernels.process.tolist() == [0, 1]
    assert again.calls.process.tolist() == again.ranges.process.tolist() == [0]
    assert np.all(again.memset.process == -1), "unknown stays unknown"


def test_totals_keep_their_instances(tmp_path: Path) -> None:
    rows = Kernels.of(start_ns=[0], end_ns=[30_000], name=[0], instances=[3])
    trace = Trace(tool="t", source="s", names=("k",), kernels=rows, timeline=False)
    again = stored.load(stored.save(trace, tmp_path / "t.parquet"))
    assert (again.kernels.count, again.timeline) == (3, False)


def test_an_empty_trace_is_stored(tmp_path: Path) -> None:
    assert len(stored.load(stored.save(Trace(tool="t", source="s"), tmp_path / "t.parquet")).kernels) == 0


def test_damaged_files_are_refused_in_one_line(tmp_path: Path) -> None:
    path = stored.save(full(), tmp_path / "t.parquet")
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"PAR1", b"", whole[:-40] + b"x" * 32 + whole[-8:]):
        path.write_bytes(content)
        with pytest.raises(BadInput) as refusal:
            stored.load(path)
        assert "\n" not in str(refusal.value)


def test_parquet_of_something_else_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"kind": ["x"]}), tmp_path / "o.parquet")
    with refused("o.parquet", "lab profile"):
        stored.load(tmp_path / "o.parquet")


def test_lab_diff_of_two_arms_of_one_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps of 40 and 25 us: the window by range finds the arms, and the steps in it are counted."""
    path = stored.save(arms(), tmp_path / "trace.parquet")
    sides = [str(path), str(path), "--nvtx", "card/control/w/step *", "--nvtx-b", "card/candidate/w/step *"]
    assert main.main(["diff", *sides, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["unit"], found["gap"]) == ("us/step", 15.0)
    assert (found["lines"][0]["name"], found["lines"][0]["delta"]) == ("attention", 15.0)
    assert main.main(["diff", *sides, "--tokens", "8"]) == 0
    assert "unit: us/token" in capsys.readouterr().out


def arms() -> Trace:
    """Two arms with two steps each, as `lab profile` stores them: ranges, launches inside, kernels later."""
    labels, ranges, calls, kernels = [], [], [], []
    at = 0
    for arm, us in (("control", 40), ("candidate", 25)):
        for step in range(2):
            labels.append(f"card/{arm}/w/step {step}")
            ranges.append((at, at + 90))
            calls.append(at + 2)
            kernels.append((at + 10, at + 10 + us))
            at += 100
    n = len(labels)
    both = {"process": [9] * n, "thread": [9] * n}
    begin, end = (np.array(t) * 1000 for t in zip(*kernels, strict=True))
    host = np.array(calls) * 1000
    low, high = (np.array(t) * 1000 for t in zip(*ranges, strict=True))
    number = list(range(n))
    return Trace(
        tool="kineto",
        source="x",
        names=("splitkv_kernel",),
        labels=labels,
        call_names=("cudaLaunchKernel",),
        gpus={0: "x"},
        kernels=Kernels.of(
            start_ns=begin,
            end_ns=end,
            name=[0] * n,
            device=[0] * n,
            stream=[7] * n,
            process=[9] * n,
            correlation=number,
        ),
        ranges=Ranges.of(start_ns=low, end_ns=high, label=number, scope=[0] * n, **both),
        calls=Calls.of(start_ns=host, end_ns=host + 500, name=[0] * n, correlation=number, **both),
    )


AWAITED = ("step-35b-many-chained",)


def test_every_measured_card_has_a_trace_of_what_it_compares() -> None:
    """Of its present arms, a library that was not installed apart, and on an H200 where both of them were measured.

    Not where an arm's code went, with the verdict that it was slower, before it had one; and none is awaited in vain.
    """
    arms: dict[str, dict[str, set[str]]] = {}  # of a card, by device
    for row in store.rows():
        if row.phase in phases.cards():
            arms.setdefault(row.phase, {}).setdefault(row.device, set()).add(row.name)

    @over({name: (phases.card(name), by_device) for name, by_device in sorted(arms.items())})
    def each(card, by_device) -> None:
        both = (card.control, card.candidate)
        there = "h200" if set(both) <= by_device.get("h200", set()) else "*"
        files = store.found(f"{there}/{card.id}/*/trace.parquet")
        if card.id in AWAITED:
            assert not files, "its trace is there: await it no more"
            return
        if card.adopted and not files and verdicts.judge_measured(card, "h200").verdict.word == "NO-GO":
            return
        assert files, f"no trace: lab profile {card.id}"
        newest = max(files, key=lambda path: path.parent.name)
        told, trace = stored.about(newest), stored.load(newest)
        assert (told["control"], told["candidate"]) == both, newest
        for arm, name in (("control", card.control), ("candidate", card.candidate)):
            ran = any(label.startswith(f"{card.id}/{arm}/") for label in trace.labels)
            assert ran or name in families.load(card.family).peers, f"{newest}: no {arm}"
        assert len(trace.kernels), newest

    each()
