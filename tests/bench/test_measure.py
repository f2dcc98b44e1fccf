"""`lab measure` without a GPU: plans, budgets, resuming, and which rows a sweep writes.

The worker processes are real (tests/bench/fake_bench.py is their backend, by name), the disk is real, the clock is made
up.
"""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from lab.base import devices, own
from lab.bench import machine, measure, sampling
from lab.bench.comparison import Done, Outcome
from lab.bench.measure import Settings
from lab.bench.sampling import Arm, Comparison, summarise
from lab.card import phases
from lab.check import families
from lab.judge import evidence, rules, verdicts
from lab.place import ceilings, roofline
from lab.row import store
from lab.row.records import CEILINGS, PERFORMANCE, Clocks, Measurement, Provenance
from lab.write import pages, writeup
from tests.bench import fake_bench
from tests.loops import numbered, over
from tests.refused import refused
from tests.row.made import measurement

H200 = devices.get("h200")
QUICK = Settings(seconds=0.0, placements=1, processes=1, backend="tests.bench.fake_bench:quick")
SMALL = ("w00", "w01", "w02", "w03")


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy family, rows under a temporary folder, and a row's provenance that costs no import of torch."""
    fake_bench.use(monkeypatch)
    monkeypatch.setattr(store, "FOLDER", tmp_path / "profiles")
    monkeypatch.setattr(machine, "provenance", lambda: Provenance(commit="0"))


@pytest.fixture
def told() -> list[str]:
    return []


def rows_in(folder: Path) -> list[Measurement]:
    return store.read(folder / "rows.jsonl", Measurement)


def sweep(
    card: phases.Card, folder: Path, settings: Settings = QUICK, told: list[str] | None = None, peers: bool = False
) -> list[Measurement]:
    """Measure a card into a folder; what is yielded is what is on the disk at that moment."""
    found: list[Measurement] = []
    before = len(rows_in(folder)) if (folder / "rows.jsonl").exists() else 0
    tell = told.append if told is not None else lambda line: None
    for rows in measure.measure(measure.plan(card, peers=peers), settings, folder, H200, tell):
        found += rows
        assert len(rows_in(folder)) == before + len(found)
    return found


# Plans ---------------------------------------------------------------------------------------------------------------


def test_plan(tmp_path: Path) -> None:
    card = fake_bench.card(tmp_path, ("n500", "n63", "not in cases"), decisive="n63")
    with refused("toy/cases.py", '"not in cases"'):  # a card of one's own: most likely a slip
        measure.plan(card)
    card = structs.replace(card, path=phases.card("p4").path)
    items = measure.plan(card)
    # what a card of data/phases names and the family does not have is for another kind of evidence
    assert [(i.workload.id, i.decisive, i.bytes) for i in items] == [("n500", False, 6000.0), ("n63", True, 756.0)]
    assert {i.arms for i in items} == {(("control", "plain"), ("candidate", "faster"))}
    assert [i.workload.id for i in measure.plan(card, ["n500"])] == ["n500"]
    with refused("p4.toml", "(nosuch)", remedy="replay"):
        measure.plan(card, ["nosuch"])
    with refused("kernels/toy", '"fster"', remedy='"faster"'):
        measure.plan(fake_bench.card(tmp_path, ("n63",), candidate="fster"))
    with refused("p4.toml", "no family", remedy="`lab judge`"):
        measure.plan(phases.card("p4"))


def test_peers_are_arms(tmp_path: Path) -> None:
    card = fake_bench.card(tmp_path, ("n63",), candidate="packs")
    assert [name for _, name in measure.plan(card, peers=True)[0].arms] == [
        *["plain", "packs"],
        *["absent", "peers/odd"],  # not twice the one that is the candidate
    ]


def test_a_peer_that_the_card_names_is_timed_once(tmp_path: Path) -> None:
    """As the card's arm and not again as a peer."""
    plain = fake_bench.card(tmp_path, ("n63",))
    for beside, role in ((("packs",), "candidate"), ((), "peer")):
        (item,) = measure.plan(structs.replace(plain, beside=beside), peers=True)
        assert [r for r, name in item.arms if name == "packs"] == [role]
        assert [name for _, name in measure.plan(structs.replace(plain, beside=beside), pair=True)[0].arms] == [
            *["plain", "faster"]
        ]
    for more in ({"peers": True}, {"beside": ["packs"]}):
        with refused("--pair", "but two", remedy="--beside"):
            measure.plan(plain, pair=True, **more)
    refused_there = structs.replace(plain, beside=("choosy",))
    assert [name for _, name in measure.plan(refused_there)[0].arms] == ["plain", "faster"]


def test_arms_beside_are_those_that_are_named(tmp_path: Path) -> None:
    """Of the card, and a rival that it does not name; a rival that it names is its arm."""
    both = structs.replace(fake_bench.card(tmp_path, ("n63",)), beside=("wrong", "packs"))
    for card, named, wanted in (
        (both, ["wrong"], [("candidate", "wrong")]),
        (both, ["packs"], [("candidate", "packs")]),
        (structs.replace(both, beside=("wrong",)), ["packs"], [("peer", "packs")]),
        (structs.replace(both, beside=("wrong",)), ["packs", "wrong"], [("candidate", "wrong"), ("peer", "packs")]),
    ):
        assert [*measure.plan(card, beside=named)[0].arms[2:]] == wanted
    with refused("--beside", "pakcs", remedy='"packs"'):
        measure.plan(both, beside=["pakcs"])
    with refused("--beside", "does not name", remedy="--peers"):
        measure.plan(both, beside=["packs"], peers=True)


@over(numbered([("90s", 90), ("8m", 480), ("1h", 3600), ("1.5m", 90), (" 0s ", 0)]))
def test_budget(text: str, seconds: float) -> None:
    assert measure.parse_budget(text) == seconds


@over(numbered([(text,) for text in ("", "8", "8 m", "m", "-8m", "8min", "8m30s", "1e3s", "inf", "8M", "8d")]))
def test_budget_refused(text: str) -> None:
    with refused("--budget", f'"{text}"', remedy="8m"):
        measure.parse_budget(text)


def test_no_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with refused("lab measure", "CUDA GPU", remedy="`lab judge`"):
        measure.require_gpu()


# A sound sweep -------------------------------------------------------------------------------------------------------


def test_rows_of_a_sound_comparison(tmp_path: Path) -> None:
    card = fake_bench.card(tmp_path, ("n63",))
    rows = sweep(card, tmp_path / "run1")
    assert [(r.arm, r.name, r.status) for r in rows] == [
        ("control", "plain", "ok"),
        ("candidate", "faster", "ok"),
    ]
    control, candidate = rows
    assert control.median_us == pytest.approx(100, rel=0.01)
    assert candidate.median_us == pytest.approx(80, rel=0.01)
    assert (control.n, len(control.samples_us or ())) == (len(control.again_samples_us or ()), control.n)
    assert candidate.again_samples_us is None
    assert candidate.order == control.order
    assert len(candidate.order or ()) == len(candidate.blocks_us or ()) == len(control.again_blocks_us or ())
    for row in rows:
        assert (row.timer, row.l2, row.seed, row.timed_against) == ("graph", "cold", measure.SEED, "plain")
        assert (row.gate_hash, row.card_hash, row.run) == (card.gate_hash, card.card_hash, "run1")
        assert (row.workload, row.profiled, row.throttled) == ({"N": 63}, False, "")
        assert (row.placements, row.shape) == (1, (1, len(row.order or ()), 2 * sampling.VISIT))
        assert [clock.sm_mhz for clock in row.clocks] == [1980]  # a change is kept, not how long
        assert row.block_mhz == (1980,) * len(row.order or ())
        assert 0 < (row.took_s or 0.0) == control.took_s
    assert (control.aa_pct or 0) > 0
    assert candidate.aa_pct is None  # one arm has a second self
    verdict = rules.judge(card.gate, evidence.readings(rows, H200))
    assert verdict.word == "BLOCKED"
    assert "placements 1 of 8" in verdict.reason


def of_the_host(folder: Path) -> phases.Card:
    path = folder / "toy.toml"
    made = fake_bench.card(folder, ("n63",))
    text = made.path.read_text().replace('metric = "kernel_us"', 'metric = "host_us"')
    path.write_text(text.replace("[gate]", '[measure]\ntimer = "host"\n[gate]', 1))
    return phases.load(path)


def test_rows_of_the_hosts_time_are_judged_as_such_and_as_nothing_else(tmp_path: Path) -> None:
    card = of_the_host(tmp_path)
    way = replace(QUICK, placements=8, processes=2)
    control, candidate = rows = sweep(card, tmp_path / "run1", way)
    assert [(r.timer, r.metric, r.time_us) for r in rows] == [("host", "host_us", None)] * 2
    assert candidate.own_us == pytest.approx(80, rel=0.01)
    assert (control.aa_pct or 0) > 0
    found = evidence.readings(rows, H200)
    assert {metric for metric, _ in found} == {"host_us", "engagements"}
    assert {row.block_mhz for row in rows} == {(1980,) * len(candidate.blocks_us or ())}  # of both processes
    read = found["host_us", "n63"]
    assert (read.control, read.candidate, read.placements) == (control.own_us, candidate.own_us, 8)
    assert rules.judge(card.gate, found).word == "GO"
    quick = structs.replace(candidate, flops=1e18, bytes=1e18, pipe="bf16")
    assert not roofline.beyond(H200, quick)
    assert roofline.fraction_of(H200, quick) is None
    assert roofline.beyond(H200, structs.replace(quick, timer="graph"))


def test_a_card_asks_for_the_hosts_time_of_the_hosts_timer(tmp_path: Path) -> None:
    path = of_the_host(tmp_path).path
    text = path.read_text()
    for changed in (text.replace('timer = "host"', 'timer = "graph"'), text.replace('"host_us"', '"kernel_us"')):
        path.write_text(changed)
        with refused("toy.toml", "measure.timer", remedy='timer = "host"'):
            phases.load(path)


def test_rest_reaches_the_worker_the_rows_and_the_key_of_a_resumed_run(tmp_path: Path, told: list[str]) -> None:
    card = fake_bench.card(tmp_path, ("n63",))
    jobs = []

    class Spy:
        def start(self, backend: str) -> None:
            pass

        def run(self, job: Any, tell: Any) -> Done:
            jobs.append(job)
            return Done([Outcome(role, name, "skipped") for role, name in job.arms])

    rested = replace(QUICK, rest=0.5)
    measure.compare(measure.plan(card)[0], rested, [Spy()], told.append)  # type: ignore[list-item]
    assert [job.rest for job in jobs] == [0.5]
    eight = replace(QUICK, placements=8)
    measure.compare(measure.plan(card)[0], eight, [Spy()] * 3, told.append)  # type: ignore[list-item]
    assert [(job.first, job.placements) for job in jobs[1:]] == [(0, 2), (2, 3), (5, 3)]
    assert len({job.seed for job in jobs}) == 1
    assert len({job.own_seed for job in jobs[1:]}) == 3
    rows = sweep(card, tmp_path / "run1", rested)
    assert {r.rest for r in rows} == {0.5}
    assert {r.sources for r in rows} == {families.sources_hash("toy")}
    assert sweep(card, tmp_path / "run1", rested, told) == []
    assert "already measured" in told[-1]
    assert {r.rest for r in sweep(card, tmp_path / "run1")} == {0.0}


def test_a_comparison_that_ran_out_of_memory_is_done_again_with_fewer_sets(tmp_path: Path, told: list[str]) -> None:
    card = fake_bench.card(tmp_path, ("n63",))
    jobs: list[Any] = []

    class Spy:
        needs = 0.5

        def start(self, backend: str) -> None:
            pass

        def run(self, job: Any, tell: Any) -> Done:
            jobs.append(job)
            arms = [Outcome(role, name, relative_error=0.0) for role, name in job.arms]
            if job.room > self.needs:
                arms[1].fail("oom", "out of memory")
            return Done(arms, spare=True)

    for needs, rooms, status in ((0.5, [1.0, 0.5], "ok"), (0.1, [1.0, 0.5, 0.25], "oom")):
        Spy.needs = needs
        jobs.clear()
        outcomes, _, _ = measure.compare(measure.plan(card)[0], QUICK, [Spy()], told.append)  # type: ignore[list-item]
        assert [job.room for job in jobs] == rooms
        assert [outcome.status for outcome in outcomes] == ["ok", status]
    assert "out of memory, again" in told[0]


def test_suspect_rows_have_every_way_to_take_their_products_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from lab.bench import ceiling_runs

    taken: list[tuple[str, ...]] = []
    ways = ["f32", "f32_rested", "f32_quiet"]
    names = dict.fromkeys([*CEILINGS, *ways], ("", ""))  # the toy's pipe has no ceiling
    monkeypatch.setattr(measure, "CEILINGS", names)
    monkeypatch.setattr(ceiling_runs, "measure", lambda device, names: [taken.append(names)])  # type: ignore[func-returns-value]
    measure.measure_ceilings(H200, [measurement(pipe="f32"), measurement()], "cold")
    assert taken == [("read", "write", "copy_kernel", *ways)]


def test_suspect_rows_have_their_ceilings_and_themselves_measured_again(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ceiling that was taken too low: the first rows stay as suspect, the ones taken after the new ceiling are ok."""
    card = fake_bench.card(tmp_path, ("n63",))
    doubts = ["beats the measured ceilings"]
    taken: list[set[str | None]] = []

    def ceilings_again(device: Any, rows: list[Measurement], l2: str) -> None:
        taken.append({row.pipe for row in rows})
        doubts[0] = ""

    monkeypatch.setattr(ceilings, "suspect", lambda row: doubts[0])
    monkeypatch.setattr(measure, "measure_ceilings", ceilings_again)
    rows = sweep(card, tmp_path / "run1", told=told)
    assert [r.status for r in rows] == ["suspect", "suspect", "ok", "ok"]
    assert taken == [{"f32"}]
    assert any("measured again" in line for line in told)
    words = [rules.judge(card.gate, evidence.readings(own, H200)).reason for own in (rows, rows[:2])]
    assert ["placements 1 of 8" in word for word in words] == [True, False]


def test_throttled_window_is_flagged_and_kept(tmp_path: Path) -> None:
    item = measure.plan(fake_bench.card(tmp_path, ("n63",)))[0]
    free, capped = (Clocks("nvml", 1, 1, why) for why in ("", "software power cap"))
    facts = Comparison(
        {}, (), 0, math.inf, "graph", (None, free, capped, capped), control="plain", l2="cold", shape=(1, 1, 2)
    )
    timing = summarise(Arm("plain", lambda args, out: None, [], samples_us=[1.000001] * 2, blocks_us=[1.000001]))
    outcome = Outcome("control", "plain", timing=timing)
    row = measure.row(item, outcome, facts, H200, QUICK, Path("r"), "2026-11-20", Provenance())
    assert (row.throttled, row.clocks) == ("software power cap", (free, capped))
    assert (row.samples_us, row.blocks) == ((1.000001,) * 2, ((1.000001,),))  # nothing is rounded
    assert row.aa_pct is None  # infinity is no JSON


@pytest.mark.slow
def test_rows_of_a_comparison_are_appended_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[list[str]] = []
    append = store.append_all

    def spy(folder: Path, rows: Any, *more: Any) -> Path:
        rows = list(rows)
        pieces.append([f"{r.workload_id} {r.name}" for r in rows])
        return append(folder, rows, *more)

    monkeypatch.setattr(store, "append_all", spy)
    sweep(fake_bench.card(tmp_path, SMALL), tmp_path / "run", peers=True)
    names = ["plain", "faster", "absent", "packs", "peers/odd"]
    assert pieces == [[f"{workload} {name}" for name in names] for workload in SMALL]


def test_candidates_beside_are_timed_and_judged_by_nobody(tmp_path: Path) -> None:
    card = structs.replace(fake_bench.card(tmp_path, ("n63",)), beside=("packs",))
    rows = sweep(card, tmp_path / "run")
    arms = {r.name: (r.arm, r.beside, r.status) for r in rows}
    assert arms["faster"] == ("candidate", False, "ok")
    assert arms["packs"][:2] == ("candidate", True)
    for order in (rows, rows[::-1]):
        pair = evidence.pairs(order)["n63"]
        assert pair[1] is not None
        assert pair[1].name == "faster"
    with refused("kernels/toy", '"fastre"'):
        measure.plan(structs.replace(card, beside=("fastre",)))


# Arms that fail ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sweep_goes_on_whatever_its_arms_do(tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Real checks; as peers, one of each: a cheat, a kill, no memory, an odd shape, an absent library."""
    bad = {
        "memoises": ("incorrect", "on inputs changed in place: set "),
        "killed": ("error", "SIGKILL in check"),
        "no_gpu_memory": ("oom", "OutOfMemoryError: CUDA out of memory"),
        "choosy": ("skipped", "takes no odd N"),
        "absent": ("skipped", "no_such_library"),
        "peers/odd": ("skipped", "No module named 'odd'"),
        "packs": ("ok", ""),
    }
    modules = {name: f"peers/{name}" for name in bad if name != "peers/odd"}
    family = replace(fake_bench.load("toy"), modules=modules)
    fake_bench.use(monkeypatch, lambda name: family)
    card = fake_bench.card(tmp_path, ("n63",))
    settings = Settings(seconds=0.0, placements=1, processes=1, backend=fake_bench.BACKEND, limits_s=(("check", 20.0),))
    rows = sweep(card, tmp_path / "run", settings, told, peers=True)
    by_name = {r.name: r for r in rows}
    assert by_name.keys() == {"plain", "faster", *bad}
    assert [by_name[n].status for n in ("plain", "faster")] == ["ok", "ok"]
    for name, (status, said) in bad.items():
        assert by_name[name].status == status, name
        assert said in by_name[name].message
        assert status == "ok" or not any(getattr(by_name[name], key) for key in PERFORMANCE)
    assert {by_name[name].arm for name in bad} == {"peer"}
    assert by_name["packs"].timed_against == "plain"
    assert sum("killed: the measuring process died" in line for line in told) == 1
    assert "placements 1 of 8" in rules.judge(card.gate, evidence.readings(rows, H200)).reason


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cuda_error", "RuntimeError: CUDA error: an illegal memory access"),
        ("cuda_error_late", "in the timing: RuntimeError: CUDA error"),
        ("raises_late", "in the timing: ValueError: M = 63 must be divisible by 16"),
    ],
)
def test_comparison_is_done_again_without_an_arm_that_spoilt_it(name: str, said: str, tmp_path: Path) -> None:
    rows = sweep(fake_bench.card(tmp_path, ("n63", "n75"), candidate=name), tmp_path / "run")
    assert [(r.workload_id, r.status) for r in rows] == [
        *[("n63", "ok"), ("n63", "error"), ("n75", "ok"), ("n75", "error")],
    ]
    assert said in rows[1].message
    assert rows[0].median_us == pytest.approx(100, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("control", "status"),
    [("killed", "error"), ("plain_killed_late", "error"), ("hangs", "timeout"), ("raises", "error")],
)
def test_control_that_dies_leaves_the_candidate_timed_and_the_judge_blocked(
    control: str, status: str, tmp_path: Path
) -> None:
    card = fake_bench.card(tmp_path, ("n63",), control=control)
    settings = Settings(
        seconds=0.0, placements=1, processes=1, backend=QUICK.backend, limits_s=(("check", 0.5), ("time", 0.5))
    )
    first, second = sweep(card, tmp_path / "run", settings)
    assert (first.arm, first.status) == ("control", status)
    assert (second.arm, second.status, second.timed_against) == ("candidate", "ok", "faster")
    assert second.median_us == pytest.approx(80, rel=0.01)
    assert rules.judge(card.gate, evidence.readings([first, second], H200)).word == "BLOCKED"


def test_nobody_left_is_rows_all_the_same(tmp_path: Path) -> None:
    card = fake_bench.card(tmp_path, ("n63",), control="killed", candidate="exits")
    rows = sweep(card, tmp_path / "run")
    assert [(r.name, r.status) for r in rows] == [("killed", "error"), ("exits", "error")]
    assert not any(getattr(row, key) for row in rows for key in PERFORMANCE)


def test_unknown_backend_blames_every_arm_and_ends(tmp_path: Path) -> None:
    settings = Settings(backend="tests.bench.fake_bench:nosuch", placements=1, processes=1)
    rows = sweep(fake_bench.card(tmp_path, SMALL[:2]), tmp_path / "run", settings)
    assert {(r.status, r.message) for r in rows} == {("error", "the measuring process died of exit code 1 in start")}
    assert len(rows) == 4


# Resuming ------------------------------------------------------------------------------------------------------------


def test_resume_skips_what_is_complete(tmp_path: Path, told: list[str]) -> None:
    card = fake_bench.card(tmp_path, SMALL)
    folder = tmp_path / "run"
    half = measure.measure(measure.plan(card), QUICK, folder, H200)
    done = [next(half)[0].workload_id for _ in range(2)]
    half.close()  # type: ignore[attr-defined]
    before = (folder / "rows.jsonl").read_bytes()
    rest = sweep(card, folder, told=told)
    assert [r.workload_id for r in rest[::2]] == [w for w in SMALL if w not in done]
    assert (folder / "rows.jsonl").read_bytes().startswith(before)
    assert [line for line in told if "already" in line] == [f"toy {w}: already measured in this run" for w in done]
    assert sweep(card, folder) == []
    keys = [(r.workload_id, r.arm) for r in rows_in(folder)]
    assert len(keys) == len(set(keys)) == 8


@pytest.mark.parametrize("what", ["timer", "l2", "gate"])
def test_another_question_is_not_complete(what: str, tmp_path: Path) -> None:
    card = fake_bench.card(tmp_path, SMALL[:1])
    folder = tmp_path / "run"
    sweep(card, folder)
    settings = QUICK
    if what == "gate":
        card.path.write_text(card.path.read_text().replace("threshold = 0", "threshold = -1"))
        card = phases.load(card.path)
    else:
        changed = {"timer": "events"} if what == "timer" else {"l2": "warm"}
        settings = Settings(**{**vars(QUICK), **changed})
    assert len(sweep(card, folder, settings)) == 2


def test_rows_of_an_early_release_do_not_stop_a_resume(tmp_path: Path) -> None:
    card = fake_bench.card(tmp_path, SMALL[:1])
    old: dict[str, Any] = {
        "device": "h200",
        "phase": "toy",
        "family": "toy",
        "arm": "control",
        "name": "plain",
        "precision": "f32",
    }
    old |= {"workload_id": "w00", "workload": {"N": 64}, "status": "ok", "run": "run"}
    store.append(tmp_path / "run", measurement(**old))
    assert len(sweep(card, tmp_path / "run")) == 2


def test_run_to_resume(tmp_path: Path) -> None:
    with refused("--resume", "toy", "h200"):
        measure.run_to_resume("h200", "toy")
    card = fake_bench.card(tmp_path, SMALL[:1])
    for run in ("2026-11-20T000000Z", "2026-11-21T000000Z"):
        sweep(card, store.FOLDER / "h200" / "toy" / run)
    (store.FOLDER / "h200" / "toy" / "2026-11-22T000000Z").mkdir()  # one that was killed before its first row
    assert measure.run_to_resume("h200", "toy").name == "2026-11-21T000000Z"
    assert measure.run_to_resume("h200", "toy", "2026-11-20T000000Z").name == "2026-11-20T000000Z"
    with refused("--resume", "2026-11-20T000001Z", remedy='"2026-11-20T000000Z"'):
        measure.run_to_resume("h200", "toy", "2026-11-20T000001Z")


# Budgets -------------------------------------------------------------------------------------------------------------


def fake_compare(monkeypatch: pytest.MonkeyPatch, costs_s: float) -> list[str]:
    """Comparisons that take this long of a made-up clock and fail; returns the workloads, in order."""
    done: list[str] = []
    now = [0.0]

    def compare(item: measure.Item, *_: Any) -> tuple[list[Outcome], None, str]:
        done.append(item.workload.id)
        now[0] += costs_s
        outcomes = [Outcome(r, n, "error", "m") for r, n in item.arms]
        return outcomes, None, "2026-11-20"

    monkeypatch.setattr(measure, "compare", compare)
    monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return done


@pytest.mark.parametrize(
    ("budget_s", "count"),
    # a comparison costs 10 s, but nobody knows before the first one, which is guessed at 20 s
    [(0, 0), (19, 0), (20, 2), (29, 2), (30, 3), (39, 3), (45, 4), (1e9, 6)],
)
def test_budget_takes_decisive_and_cheap_first(
    budget_s: float, count: int, tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = fake_compare(monkeypatch, 10.0)
    card = fake_bench.card(tmp_path, ("n500", "n75", "n1", "w39", "n63", "w00"), decisive="n500")
    settings = Settings(**{**vars(QUICK), "budget_s": budget_s})
    sweep(card, tmp_path / "run", settings, told)
    wanted = ["n500", "n1", "n63", "w00", "n75", "w39"]  # the gate's own, then by bytes
    assert order == wanted[:count]
    assert told == [f"toy {w}: left out, the budget of {budget_s:.0f} s is spent" for w in wanted[count:]]


@pytest.mark.parametrize(("budget_s", "wanted"), [(39, []), (40, ["n63", "n500", "n1"]), (1e9, ["n63", "n500", "n1"])])
def test_a_budget_takes_all_of_what_is_compared_or_nothing(
    budget_s: float, wanted: list[str], tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change from one workload to another needs both from one GPU; guessed at 20 s each."""
    order = fake_compare(monkeypatch, 10.0)
    card = fake_bench.card(tmp_path, ("n1", "n500", "n63"), decisive="n63", against="n500")
    sweep(card, tmp_path / "run", Settings(**{**vars(QUICK), "budget_s": budget_s}), told)
    assert order == (wanted or ["n1"])
    assert len(told) == 3 - len(order)


def test_workloads_compared_with_each_other_are_missing_together(tmp_path: Path) -> None:
    """Unless one run has them all, or their newest runs were on one GPU; workloads that stand alone do not mind."""

    def left(against: str, **gpus: str) -> set[str]:
        """What is missing of two workloads where each of their runs, named by both, was on this GPU."""
        card = fake_bench.card(tmp_path, ("n63", "n500"), decisive="n63", against=against)
        for n, (name, gpu) in enumerate(gpus.items()):
            workload, _, run = name.partition("_")
            folder = store.folder() / "h200" / "toy" / f"{against or 'alone'}{len(gpus)}{gpu}{run or n}"
            for arm, candidate in (("control", "plain"), ("candidate", "faster")):
                asked = {"gate_hash": card.gate_hash, "wanted_timer": "graph", "wanted_l2": "cold"}
                of = {"family": "toy", "arm": arm, "name": candidate, "workload_id": workload, "run": folder.name}
                store.append_all(folder, [measurement(**of, **asked, status="incorrect", gpu_id=gpu)])
        found = {item.workload.id for item in measure.missing(measure.plan(card), "h200", QUICK)}
        shutil.rmtree(store.folder(), ignore_errors=True)
        return found

    both = {"n63", "n500"}
    assert left("", n63="a", n500="b") == set()
    assert left("", n63="a") == {"n500"}
    assert left("n500", n63="a") == both
    assert left("n500", n63="a", n500="b") == both
    assert left("n500", n63="a", n500="a") == set()
    assert left("n500", n63_1="a", n500_1="a", n500_2="b") == set()


def test_many_workers_take_the_longest_first(tmp_path: Path) -> None:
    """By arms and how long the card lets the GPU rest, then by bytes; what decides comes in no order of its own."""
    card = fake_bench.card(tmp_path, ("n500", "n63"), decisive="n63")
    rests = structs.replace(card, measure=structs.replace(card.measure, rest=4.0))
    large, small = measure.plan(card)
    resting = replace(small, card=rests)
    assert measure.longest_first([small, large, resting], QUICK) == [resting, large, small]


def test_what_is_complete_costs_no_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = fake_compare(monkeypatch, 10.0)
    card = fake_bench.card(tmp_path, SMALL)
    sweep(card, tmp_path / "run", Settings(**{**vars(QUICK), "budget_s": 25.0}))
    assert order == ["w00", "w01"]
    sweep(card, tmp_path / "run", Settings(**{**vars(QUICK), "budget_s": 1e9}))
    assert order == list(SMALL)


# A GPU that no list has ------------------------------------------------------------------------------------------


def test_an_unlisted_gpu_is_measured_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its facts are written beside its rows, so that a machine without it can judge them; its peaks are unknown."""
    import torch

    card = SimpleNamespace(
        multi_processor_count=92, L2_cache_size=96 << 20, total_memory=48 << 30, shared_memory_per_block_optin=101376
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L20")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(own, "profiles", lambda *_: [tmp_path / "profiles"])
    monkeypatch.setenv(own.VARIABLE, str(tmp_path))
    device = measure.require_gpu()
    assert (device.id, device.capability, device.peaks) == ("nvidia-l20", (8, 9), {})
    assert device.l2_bytes
    assert device.l2_bytes.base == 96 << 20
    asked = fake_bench.card(tmp_path, ("n63",))
    settings = Settings(seconds=0.0, placements=1, processes=1, backend="tests.bench.fake_bench:quick")
    (rows,) = list(measure.measure(measure.plan(asked), settings, device=device))
    assert [(row.device, row.status) for row in rows] == [("nvidia-l20", "ok")] * 2
    assert devices.get("nvidia-l20").facts == device.facts
    assert measure.require_gpu() == devices.get("nvidia-l20")  # the second time it is listed
    judged = verdicts.judge_measured(asked, "nvidia-l20")
    assert "peaks unknown" in judged.note
    assert "kernel_us" in judged.verdict.reason
    assert judged.verdict.word != "INVALID"
    assert "roofline_fraction" not in {m for m, _ in evidence.readings(rows, device)}
    assert pages.judged([asked])[0].device == "nvidia-l20"
    assert "peaks unknown" in writeup.write(asked)
