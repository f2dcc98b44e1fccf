"""`lab counters` without a GPU: ncu's table, how it is cut by arm, what is refused, and what names the bound.

The table is one that ncu printed on an H200 (tests/trace/profiles/ncu_raw.csv). The fake ncu is a script: it does the
child's part (writes how each arm went) and prints launches of that table.
"""

import csv
import io
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from lab.base import devices
from lab.base.errors import BadInput
from lab.bench import counters, measure
from lab.bench.counters import METRICS
from lab.card import phases
from lab.check import accuracy, families
from lab.cli import main
from lab.row import store
from lab.row.records import FIGURES, Counter
from tests.refused import held, refused
from tests.row.made import counter

RAW = Path(__file__).resolve().parents[1] / "trace" / "profiles" / "ncu_raw.csv"
LINES = RAW.read_text(encoding="utf-8").splitlines()
NOTES = [line for line in LINES if line.startswith("==")]
HEAD, UNITS, *LAUNCHES = csv.reader(line for line in LINES if not line.startswith("=="))
KERNEL = HEAD.index("Kernel Name")
SPIN, PREPARE, SCAN, _, FUSED = (launch[KERNEL] for launch in LAUNCHES)


def table(kernels: Sequence[str], unit: Mapping[str, str] | None = None, **figures: str) -> str:
    """The real page with these launches of it, by kernel name; `unit` and `figures` change columns, by our key."""
    out = io.StringIO()
    out.write("\n".join(NOTES) + "\n")
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    changed = {HEAD.index(METRICS[key].ncu): text for key, text in (unit or {}).items()}
    writer.writerows([HEAD, [changed.get(at, text) for at, text in enumerate(UNITS)]])
    changed = {HEAD.index(METRICS[key].ncu): text for key, text in figures.items()}
    for number, kernel in enumerate(kernels):
        launch = next(launch for launch in LAUNCHES if launch[KERNEL] == kernel)
        writer.writerow([str(number), *[changed.get(at, text) for at, text in enumerate(launch)][1:]])
    return out.getvalue()


TWO = table([SPIN, FUSED, SPIN, PREPARE, SCAN])
# A memory-bound kernel, a latency-bound one, and figures of a row.
READS = {
    "duration_us": 15.71,
    "sm_clock_hz": 1.8e9,
    "dram_read_bytes": 50_200_000.0,
    "dram_write_bytes": 1024.0,
    "dram_pct": 66.38,
    "l2_hit_pct": 1.51,
    "l2_pct": 61.0,
    "l2_to_sm_bytes": 51_000_000.0,
    "shared_pct": 22.0,
    "tensor_pct": 9.0,
    "issue_pct": 41.0,
    "sm_active_pct": 85.0,
    "occupancy_pct": 14.5,
    "registers": 168.0,
    "shared_bytes": 181_000.0,
    "grid": 132.0,
    "block": 320.0,
    "waves": 1.0,
}
WAITS = READS | {"dram_pct": 20.0, "l2_pct": 30.0, "sm_active_pct": 99.0}


def test_a_real_page_by_hand() -> None:
    """Two arms of gdn-prefill-limit on an H200, as ncu printed them; the figures are read off the file by eye."""
    cuda, triton = counters.cut(counters.parse(RAW))
    assert [launch.kernel for launch in cuda] == ["gdn_prepare_d128_bf16", "gdn_scan_d128_bf16_g1"]
    assert [launch.kernel for launch in triton] == ["fused_chunk_kernel"]
    scan, fused = cuda[1], triton[0]
    seen = scan.figures
    assert (seen["duration_us"], seen["dram_read_bytes"], seen["dram_write_bytes"]) == (
        44.768,
        62_428_416,
        15_025_408,
    )
    assert (seen["registers"], seen["shared_bytes"], seen["grid"], seen["block"]) == (
        232,
        184_448,
        96,
        256,
    )
    assert (seen["sm_clock_hz"], seen["tensor_pct"], seen["waves"]) == (
        1_793_326_148.14,
        29.68,
        0.73,
    )
    assert list(scan.stalls.items())[:2] == [("long_scoreboard", 2.48), ("wait", 1.33)]  # the largest first
    assert len(scan.stalls) == counters.STALLS_KEPT
    assert counters.bound(a_row(**scan.figures, stalls=scan.stalls)) == (
        "latency: long scoreboard (2.5 warps an issue), L2 at 51 % of its peak, multiprocessors idle 31 %"
    )
    assert counters.bound(a_row(**fused.figures, stalls=fused.stalls)).startswith(
        "latency: short scoreboard (1.5 warps an issue), shared memory at 28 %"
    )


def test_a_separator_is_its_name_and_small_stalls_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "ncu.csv").write_text(TWO)
    launches = counters.parse(tmp_path / "ncu.csv")
    assert [launch.kernel for launch in launches] == [SPIN, FUSED, SPIN, PREPARE, SCAN]
    assert launches[0] == counters.Launch(SPIN)
    assert list(launches[1].stalls) == [  # gmma's 0.01 and the noughts are not there
        "short_scoreboard", "wait", "barrier", "long_scoreboard", "branch_resolving", "no_instruction",
    ]  # fmt: skip
    assert min(min(launch.stalls.values()) for launch in launches if launch.stalls) >= counters.STALL_LEAST


def test_a_table_that_lacks_something_is_refused(tmp_path: Path) -> None:
    for text, word in (
        (TWO.replace("dram__bytes_read.sum", "dram__bytes_other.sum"), "dram__bytes_read.sum"),
        (table([SCAN], {"duration_us": "usecond"}), '"usecond"'),  # scaled, although base units were asked for
        (table([SCAN], dram_pct="n/a"), "dram__throughput"),
        (table([]).splitlines()[len(NOTES)] + "\n", "no rows"),
    ):
        (tmp_path / "ncu.csv").write_text(text)
        with refused("ncu.csv", word):
            counters.parse(tmp_path / "ncu.csv")


def test_what_precedes_the_first_separator_belongs_to_no_arm() -> None:
    groups = counters.cut([counters.Launch(k) for k in ("early", SPIN, "a", "b", SPIN, SPIN, "c")])
    assert [[launch.kernel for launch in group] for group in groups] == [["a", "b"], [], ["c"]]


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (READS, "DRAM at 66 % of its peak, multiprocessors idle 15 %"),
        (READS | {"tensor_pct": 91.0, "sm_active_pct": 99.0}, "tensor pipe at 91 % of its peak"),
        (WAITS, "latency: long scoreboard (3.2 warps an issue), issue at 41 % of its peak"),
    ],
)
def test_bound(figures: dict[str, float], words: str) -> None:
    assert counters.bound(a_row(**figures, stalls={"long_scoreboard": 3.25, "barrier": 0.9})) == words


# The child and its parent ---------------------------------------------------------------------------------------------

CARD = phases.card("lp11-kernel")


def fake_ncu(folder: Path, statuses: list[str], printed: str, code: int = 0) -> Path:
    """An ncu whose child gave each job the next of `statuses`, and which printed `printed` into its log."""
    (folder / "table.csv").write_text(printed)
    script = folder / "ncu"
    script.write_text(f"""#!{sys.executable}
import json, sys
arguments = sys.argv[1:]
path = arguments[-1]
jobs = json.load(open(path))
for job, status in zip(jobs, {statuses!r}):
    job |= {{"status": status, "message": "" if status == "ok" else "why", "relative_error": 1e-3}}
json.dump(jobs, open(path, "w"))
open(arguments[arguments.index("--log-file") + 1], "w").write(open({str(folder / "table.csv")!r}).read())
sys.exit({code})
""")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def jobs(count: int) -> list[Counter]:
    return counters.plan([CARD], CARD.workloads[0], None, False)[:count]


def test_each_arm_gets_the_launches_of_its_own_call(tmp_path: Path) -> None:
    ncu = fake_ncu(tmp_path, ["ok", "ok"], TWO)
    rows = counters.collect(jobs(2), lambda _: str(ncu))
    assert [(row.arm, row.kernel, row.launch, row.launches) for row in rows] == [
        *[("control", FUSED, 0, 1), ("candidate", PREPARE, 0, 2), ("candidate", SCAN, 1, 2)],
    ]
    assert rows[2].duration_us == pytest.approx(44.768)


def test_an_arm_that_failed_its_check_takes_no_launches_of_the_next(tmp_path: Path) -> None:
    ncu = fake_ncu(tmp_path, ["incorrect", "ok"], table([SPIN, SCAN]))
    wrong, right = counters.collect(jobs(2), lambda _: str(ncu))
    assert (wrong.status, wrong.launches, wrong.duration_us) == ("incorrect", 0, None)
    assert (right.status, right.kernel) == ("ok", SCAN)


def test_an_arm_that_launched_nothing_is_an_error(tmp_path: Path) -> None:
    ncu = fake_ncu(tmp_path, ["ok", "ok"], table([SPIN, SCAN, SPIN]), code=1)
    assert [job.status for job in counters.collect(jobs(2), lambda _: str(ncu))] == ["ok", "error"]


def test_no_right_to_read_counters_is_one_line(tmp_path: Path) -> None:
    ncu = fake_ncu(tmp_path, ["ok"], "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n")
    with refused("lab counters", "ERR_NVGPUCTRPERM", remedy="NVreg_RestrictProfilingToAdminUsers"):
        counters.collect(jobs(1), lambda _: str(ncu))


def test_a_refused_metric_is_one_line(tmp_path: Path) -> None:
    ncu = fake_ncu(tmp_path, ["ok"], "==PROF== Connected\n==ERROR== Failed to find metric x__y.sum\n", code=1)
    with refused("ncu", "x__y.sum"):
        counters.collect(jobs(1), lambda _: str(ncu))


def test_no_ncu_is_one_line() -> None:
    with refused("lab counters", "ncu", "PATH"):
        counters.collect(jobs(1), lambda _: None)


def test_the_child_is_this_module_and_the_caches_are_flushed(tmp_path: Path) -> None:
    made = counters.command("ncu", tmp_path / "jobs.json", tmp_path / "log")
    assert made[made.index("--cache-control") + 1] == "all"  # a pass would else find the last pass's bytes in L2
    assert made[made.index("--clock-control") + 1] == "none"
    assert made[-3:] == ["-m", "lab.bench.counters", str(tmp_path / "jobs.json")]
    asked = made[made.index("--metrics") + 1].split(",")
    assert {m.ncu for m in METRICS.values()} < set(asked)


def test_plan_takes_an_arm_by_name_or_role() -> None:
    workload = CARD.workloads[0]
    every = counters.plan([CARD], workload, None, False)
    assert [job.arm for job in every[:2]] == ["control", "candidate"]
    assert counters.plan([CARD], workload, CARD.candidate, False) == [every[1]]
    assert counters.plan([CARD], workload, "control", False) == [every[0]]
    with refused("--arm", '"nosuch"'):
        counters.plan([CARD], workload, "nosuch", False)


def test_a_workload_need_not_be_the_cards_own() -> None:
    family = families.bare(CARD.family)
    other = next(w.id for w in family.cases.WORKLOADS if w.role == "measure" and w.id not in CARD.workloads)
    assert {job.workload_id for job in counters.plan([CARD], other, None, False)} == {other}
    with refused("--workload", "nosuch", "nvfp4"):
        counters.plan([CARD], "nosuch", None, False)


def test_memory_that_torch_alone_holds_is_given_back_before_ncu_saves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("synchronize", "empty_cache", "_sleep"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, said=name: done.append(said))
    started = SimpleNamespace(cudaProfilerStart=lambda: done.append("start"), cudaProfilerStop=lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: started)
    called = SimpleNamespace(run=lambda args, out: done.append("run"))
    cases = SimpleNamespace(inputs=lambda *_: {})
    family = SimpleNamespace(candidate=lambda _: called, workload=lambda _: None, cases=cases)
    monkeypatch.setattr(families, "load", lambda _: family)
    right = SimpleNamespace(status="ok", message="", relative_error=0.0)
    for name, given in (("check", right), ("prepared", {}), ("outputs", {})):
        monkeypatch.setattr(accuracy, name, lambda *_, given=given: given)
    counters._watched(jobs(1)[0])
    freed = done.index("empty_cache")
    assert max(n for n, word in enumerate(done[:freed]) if word == "run") < freed < done.index("start")


# Rows -----------------------------------------------------------------------------------------------------------------


def a_row(**more: Any) -> Counter:
    job = msgspec.structs.asdict(jobs(1)[0]) | {"status": "ok", "message": "", "device": "h200"}
    job |= {"run": "r", "started": "s"}
    return counter(**job | {"kernel": "k", "launch": 0, "launches": 1, "stalls": {}, **READS, **more})


def test_rows_are_read_back_and_the_newest_call_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    folder = tmp_path / "h200" / "counters"
    old = [a_row(kernel="prepare"), a_row(kernel="scan", launch=1)]
    store.append_all(folder / "1", old)
    store.append(folder / "2", a_row(kernel="fused"))
    key = (CARD.control, CARD.workloads[0])
    assert [row.kernel for row in counters.newest("h200")[key]] == ["fused"]
    assert store.rows("h200") == []  # no reader of measured rows sees them


def test_an_interruption_loses_the_arm_that_it_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    monkeypatch.setattr(measure, "require_gpu", lambda command: devices.get("h200"))

    def collect(rows: Sequence[Counter]) -> list[Counter]:
        if rows[0].arm == "candidate":
            raise KeyboardInterrupt
        return [a_row(name=row.name, arm=row.arm, run=row.run) for row in rows]

    monkeypatch.setattr(counters, "collect", collect)
    with pytest.raises(KeyboardInterrupt):
        list(counters.measured([CARD], CARD.workloads[0], None, False))
    assert [(row.name, row.launches) for row in counters.newest("h200")[CARD.control, CARD.workloads[0]]] == [
        (CARD.control, 1)
    ]


@pytest.mark.parametrize(
    "made",
    [  # made in the test: what a card's arms would launch is asked in a process of its own
        lambda: a_row(profiled=False),
        lambda: a_row(status="incorrect"),
        lambda: a_row(dram_pct=None),
        lambda: msgspec.structs.replace(a_row(), workload_id=None),
        lambda: msgspec.structs.replace(a_row(), status="fine"),
    ],
)
def test_a_row_that_could_mislead_is_refused(made: Callable[[], Counter], tmp_path: Path) -> None:
    row = made()
    with pytest.raises(BadInput):
        store.append(tmp_path, row)
    assert not (tmp_path / "counters.jsonl").exists()


def test_a_row_prints_its_bound_and_its_failure() -> None:
    assert "DRAM at 66 % of its peak" in counters.render([a_row()])
    failed = dict.fromkeys(READS) | {"status": "skipped", "message": "no such GPU"}
    assert counters.render([a_row(**failed)]).endswith("skipped: no such GPU")


def test_a_call_of_many_launches_prints_a_line_for_each_kernel() -> None:
    rows = [a_row(kernel=kernel, launch=n, duration_us=us) for n, (kernel, us) in
            enumerate((("scan", 4.0), ("product", 30.0), ("scan", 6.0), ("fill", 0.1), ("scan", 5.0)))]  # fmt: skip
    told, _, _, *lines = counters.render(rows).splitlines()
    assert "5 launches, 45.1 us profiled" in told
    assert [line.split()[:3] for line in lines if not line.startswith(" ")] == [
        ["product", "1", "30.00"], ["scan", "3", "5.00"],
    ]  # fmt: skip
    assert max(map(len, lines)) <= 100


def test_bad_input_and_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, where, word in (
        ([], "lab counters", "card ids"),
        (["p5-kernl"], "", '"p5-kernel"'),
        (["lp11-kernel", "--arm", "nosuch"], "--arm", '"nosuch"'),
        (["lp11-kernel"], "lab counters", "CUDA GPU"),
    ):
        assert main.main(["counters", *arguments]) == 2
        held(capsys.readouterr().err, where, word)


def test_rows_survive_json(tmp_path: Path) -> None:
    rows = [a_row(), a_row(launch=1, stalls={"wait": 0.5})]
    assert store.read(store.append_all(tmp_path, rows), Counter) == rows
    assert tuple(METRICS) == FIGURES
