"""`lab routes`: tables from rows, and the refusal to make a policy of an artefact."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels import routing
from lab.base import files
from lab.check import families
from lab.cli import main
from lab.row import store
from lab.row.records import Measurement
from lab.study import choices, routes
from tests.loops import numbered, over
from tests.refused import held, refused
from tests.row.made import changed, measurement

CANDIDATES = ("triton_gemv", "triton_gemm", "torch_bf16")


def row(name: str, m: int, us: float, run: str = "r1", **more: Any) -> Measurement:
    base = {
        "family": "nvfp4",
        "name": name,
        "workload_id": f"m{m}_n17408_k5120",
        "workload": {"M": m, "N": 17408, "K": 5120, "dtype": "bf16"},
        "config": "c",
        "l2": "cold",
        "median_us": us,
        "run": run,
        "commit": "abc",
    }
    return measurement(**base | more)


def made(*rows: Measurement) -> dict[tuple[str, int], float]:
    return {(p.candidate, p.at): p.median_us for p in routes.table("nvfp4", "h200", rows).points}


PAIR = (row("triton_gemv", 8, 20.0), row("triton_gemm", 8, 40.0))


def test_times_of_one_run() -> None:
    assert made(*PAIR) == {("triton_gemv", 8): 20.0, ("triton_gemm", 8): 40.0}


def test_the_newest_run_that_compared_decides() -> None:
    later = (row("triton_gemv", 8, 30.0, "r2", commit="b"), row("triton_gemm", 8, 25.0, "r2", commit="b"))
    alone = row("triton_gemv", 8, 1.0, "r3", commit="c")
    assert made(*PAIR, *later, alone) == {("triton_gemv", 8): 30.0, ("triton_gemm", 8): 25.0}


def test_a_newer_calibration_takes_no_place_of_a_card() -> None:
    phase = {"phase": "calibration-nvfp4", "commit": "b", "brief": True}
    calibrated = [row(name, 8, us, "r2", **phase) for name, us in (("triton_gemv", 10.0), ("triton_gemm", 40.0))]
    elsewhere = [row(name, 16, us, "r2", **phase) for name, us in (("triton_gemv", 30.0), ("triton_gemm", 45.0))]
    assert made(*PAIR, *calibrated) == {("triton_gemv", 8): 20.0, ("triton_gemm", 8): 40.0}
    assert made(*PAIR, *elsewhere)["triton_gemv", 16] == 30.0


AN_OLDER_RUN_ADDS_WHAT_THE_NEWEST_DID_NOT_TIME_WHERE_THEY_COMPARE_CASES: list[tuple[float, bool]] = [
    (40.0, True),
    (41.9, True),
    (42.1, False),
    (38.0, False),
]


def test_an_older_run_adds_what_the_newest_did_not_time_where_they_compare() -> None:
    @over(numbered(AN_OLDER_RUN_ADDS_WHAT_THE_NEWEST_DID_NOT_TIME_WHERE_THEY_COMPARE_CASES))
    def each(gemm_us: float, joins: bool) -> None:
        newest = (row("triton_gemm", 8, gemm_us, "r2", commit="b"), row("torch_bf16", 8, 50.0, "r2", commit="b"))
        near = (changed(PAIR[0], median_us=36.0), PAIR[1])
        found = made(*near, *newest)
        assert found.get(("triton_gemv", 8)) == (36.0 if joins else None)
        assert found["triton_gemm", 8] == gemm_us
        sources = routes.table("nvfp4", "h200", (*near, *newest)).source
        assert sources == ("runs r1, r2" if joins else "runs r2")

    each()


def test_runs_that_share_no_arm_are_one_place_where_they_are_further_apart_than_runs_differ() -> None:
    gemm, torch = row("triton_gemm", 8, 40.0, "r2", commit="b"), row("torch_bf16", 8, 50.0, "r2", commit="b")
    assert made(PAIR[0], gemm) == {("triton_gemv", 8): 20.0, ("triton_gemm", 8): 40.0}
    assert ("triton_gemv", 8) not in made(changed(PAIR[0], median_us=36.0), gemm, torch)  # who is faster, nobody knows
    # An arm of both took 2.5 times as long: so may the one that is added.
    assert ("triton_gemv", 8) not in made(PAIR[0], changed(PAIR[1], median_us=100.0), gemm, torch)
    assert made(changed(PAIR[0], median_us=5.0), changed(PAIR[1], median_us=100.0), gemm, torch)["triton_gemv", 8] == 5


def test_a_former_kernel_has_its_successors_time_where_one_run_timed_both() -> None:
    present = families.launches("nvfp4", (9, 0), "m8_n17408_k5120").configs["triton_gemv"]["m8_n17408_k5120"]
    assert present

    def renewed(again_us: float, **more: Any) -> float:
        """A card's newer run: the former launch under a name of its own, and what the candidate launches now."""
        former = row("cuda_decode", 8, again_us, "r2", commit="b", config="former")
        successor = row("triton_gemv", 8, 15.0, "r2", **({"commit": "b", "config": present} | more))
        arms = {"r1": {r.name: r for r in older}, "r2": {r.name: r for r in (former, successor)}}
        joined, sources = routes._renewed(arms["r1"], arms)
        assert sources == ({"r2"} if joined["triton_gemv"].run == "r2" else set())
        return joined["triton_gemv"].median_us or 0.0

    older = (changed(PAIR[0], config="former"), PAIR[1])
    assert renewed(20.5) == 15.0
    assert renewed(25.0) == 20.0  # the two runs do not compare
    assert renewed(20.5, config="another former") == 15.0  # its own newest, where none is the present one
    assert renewed(25.0, config="another former") == 20.0
    older = (changed(PAIR[0], config=present), PAIR[1])
    assert renewed(20.5) == 20.0  # what it launches now was timed beside the others


@pytest.mark.parametrize("arm", ["cuda_one", "an arm that is gone"])
def test_a_launch_that_was_timed_under_another_name_is_a_successor_too(arm: str) -> None:
    """A card's arm became what the router's candidate launches: its rows are that candidate's."""
    present = families.launches("nvfp4", (9, 0), "m33_n17408_k5120").configs["cuda_gemm"]["m33_n17408_k5120"]
    assert present
    older = (row("cuda_gemm", 33, 26.0, config="former"), row("triton_gemm", 33, 60.0))

    def renewed(again_us: float = 26.5, **more: Any) -> float:
        former = row("cuda_gemm", 33, again_us, "r2", commit="b", config="former")
        tried = row(arm, 33, 21.0, "r2", **({"commit": "b", "config": present} | more))
        found = made(*older, former, tried)
        assert set(found) == {("cuda_gemm", 33), ("triton_gemm", 33)}
        return found["cuda_gemm", 33]

    assert renewed() == 21.0
    assert renewed(29.0) == 26.0  # the two runs do not compare
    assert renewed(config="another") == 26.0
    assert renewed(precision="nvfp4-w4a8") == 26.0  # the same words, another question


def test_a_launch_that_its_kernel_refuses_by_now_is_no_route() -> None:
    workload: dict[str, Any] = {
        "workload_id": "m32_n17408_k5120",
        "workload": {"M": 32, "N": 17408, "K": 5120, "dtype": "bf16"},
    }
    refused = row("cuda_decode", 32, 10.0, **workload)
    assert families.load("nvfp4").candidate("cuda_decode").refuses(families.load("nvfp4").workload("m32_n17408_k5120"))
    taken = [row(name, 32, 20.0, **workload) for name in CANDIDATES[1:]]
    assert set(made(refused, *taken)) == {("triton_gemm", 32), ("torch_bf16", 32)}


@pytest.mark.parametrize(
    "other",
    [
        {"inputs": "one sign", "workload_id": "m8_n17408_k5120_positive"},
        {"workload": {"M": 8, "N": 17408, "K": 5120, "dtype": "f32"}, "workload_id": "m8_n17408_k5120_f32"},
    ],
)
def test_rows_that_ask_something_else_are_passed_over(other: dict[str, Any]) -> None:
    """In the same run and in a later one. Sums of one sign take less power; a cast takes longer."""
    same_run = [changed(r, **other, median_us=1.0) for r in PAIR]
    later = [changed(r, **other, median_us=1.0, run="r2") for r in PAIR]
    usual = (*PAIR, row("torch_bf16", 8, 50.0))
    former = [row(name, 8, 60.0, "r0", commit="older") for name in CANDIDATES]
    assert made(*same_run, *usual, *later, *former) == made(*usual)


def test_rows_that_are_no_basis() -> None:
    assert "vllm_marlin" in families.load("nvfp4").peers
    no: list[dict[str, Any]] = [{"status": "incorrect", "median_us": None}, {"l2": "warm"}, {"profiled": True}]
    for change in (*no, {"name": "vllm_marlin"}):
        with refused("profiles/h200", "nvfp4"):
            made(PAIR[0], changed(PAIR[1], **change))


def test_the_accident_of_114_against_458_is_refused() -> None:
    """The same path, launch and commit, four times faster once a library had been initialised."""
    slow = row("triton_gemm", 8, 4.018 * 40.0, "r2")
    with refused("profiles/h200", "triton_gemm on m8", "40.0 us in r1", "160.7 us in r2", "4.02x"):
        made(*PAIR, slow, row("triton_gemv", 8, 20.0, "r2"))


def test_what_is_no_contradiction() -> None:
    for change in ({"commit": "other"}, {"stated_commit": "other"}, {"config": "other"}, {"median_us": 40.0 * 1.1}):
        made(*PAIR, changed(row("triton_gemm", 8, 160.0, "r2"), **change), row("triton_gemv", 8, 20.0, "r2"))


def test_what_is_written_is_what_the_router_reads(tmp_path: Path) -> None:
    known = routes.table("nvfp4", "h200", PAIR)
    path = files.write(tmp_path / "nvfp4.json", routes.text(known))
    assert routing.read(path) == known
    more = [row(name, m, 20.0 + m) for name in CANDIDATES for m in (1, 2, 4, 8, 16)]
    fitted = routes.validated(routes.table("nvfp4", "h200", more))
    assert set(fitted.fits) == set(CANDIDATES)
    back = routing.read(files.write(path, routes.text(fitted)))
    assert back == fitted
    assert routes.same(back, fitted)
    slower = replace(fitted.fits["triton_gemm"], us=dict.fromkeys(fitted.fits["triton_gemm"].us, 1.0))
    assert not routes.same(replace(fitted, fits={**fitted.fits, "triton_gemm": slower}), fitted)
    assert not routes.same(known, fitted)


def test_a_wrong_choice_has_its_price() -> None:
    (line,) = routes.crossovers(routes.table("nvfp4", "h200", PAIR))
    assert (line.best, line.worst, line.cost_of_worst) == ("triton_gemv", "triton_gemm", 2.0)
    assert list(routes.lines([line])) == ["K=5120 N=17408", "  M=8  triton_gemv      20.0 us  triton_gemm 2.00x"]


def test_arms_of_a_question_make_no_route_and_are_marked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lever, a chained launch and a kernel that rounds x: the two that it never takes are in no stored table."""
    workload: dict[str, Any] = {
        "workload_id": "m128_n17408_k5120",
        "workload": {"M": 128, "N": 17408, "K": 5120, "dtype": "bf16"},
    }
    names = {"triton_gemm": 140.0, "torch_bf16": 50.0, "gemm_two_blocks": 1.0, "cuda_decode_chained": 2.0}
    names |= {"cuda_w4a8_promoted": 30.0, "cuda_w4a8": 300.0}
    rows = [row(name, 128, us, **workload) for name, us in names.items()]
    rows = [r for r in rows if r.name != "cuda_decode_chained"] + [row("cuda_decode_chained", 8, 2.0), *PAIR]
    assert {name for name, _ in made(*rows)} == {*CANDIDATES, "cuda_w4a8_promoted", "cuda_w4a8"}
    monkeypatch.setattr(store, "rows", lambda device=None, phase=None, family=None: rows)
    assert main.main(["routes", "nvfp4"]) == 0
    out = capsys.readouterr().out
    assert "M=128  torch_bf16       50.0 us  triton_gemm 2.80x  [gemm_two_blocks 1.0, cuda_w4a8_promoted" in out
    assert "M=8    triton_gemv      20.0 us  triton_gemm 2.00x  [cuda_decode_chained 2.0]" in out
    assert "[gemm_two_blocks] not taken: shows what one change does to triton_gemm" in out
    assert max(map(len, out.splitlines())) <= 100
    assert "the stored table, which the router reads, is not this one" in out
    assert main.main(["routes", "nvfp4", "--precision", "nvfp4-w4a8"]) == 0
    out = capsys.readouterr().out
    assert "M=128  cuda_w4a8_promoted      30.0 us  torch_bf16 1.67x, triton_gemm 4.67x" in out
    assert "1 more are not taken" in out  # cuda_w4a8, which is slower


@pytest.mark.slow
def test_an_arm_that_launches_what_the_router_takes_is_not_faster() -> None:
    asks, present = choices.router("nvfp4"), families.launches("nvfp4", (9, 0), "m33_n17408_k5120").configs
    same: dict[str, Any] = {"config": present["cuda_gemm"]["m33_n17408_k5120"], "precision": "nvfp4-w4a16"}
    rows = [row("cuda_gemm", 33, 22.0, **same), row("cuda_one", 33, 21.0, **same)]

    def aside(*arms: Measurement) -> dict[str, float]:
        (found,) = routes._aside(asks, routes._groups(asks, "h200", arms), routes.barred("nvfp4", ())).values()
        return found

    assert aside(*rows) == {}
    assert aside(rows[0], changed(rows[1], config="another")) == {"cuda_one": 21.0}
    assert aside(rows[0], changed(rows[1], precision="nvfp4-w4a8")) == {"cuda_one": 21.0}


def test_a_candidate_without_a_point_has_the_model_s_time_in_the_table() -> None:
    times = {1: 15.0, 2: 15.5, 4: 16.0, 16: 17.0, 32: 19.0}
    other = [row("torch_bf16", m, us) for m, us in times.items()]
    known = routes.table("nvfp4", "h200", [*PAIR, *other, *(row("triton_gemm", m, 90.0) for m in times)])
    (place,) = (p for p in routes.crossovers(known) if p.at == 8)
    assert place.fitted == ("torch_bf16",)  # triton_gemm was timed there, and triton_gemv once only
    assert 15.0 < place.times_us["torch_bf16"] < 19.0
    assert f"torch_bf16     ~{place.times_us['torch_bf16']:.1f} us" in "".join(routes.lines([place]))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(store, "rows", lambda device=None, phase=None, family=None: list(PAIR))
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    assert main.main(["routes", "nvfp4", "--write"]) == 0
    assert "M=8  triton_gemv      20.0 us" in capsys.readouterr().out
    assert json.loads((tmp_path / "h200/routes/nvfp4.json").read_text())["axis"] == "M"
    assert main.main(["routes", "nvpf4"]) == 2
    held(capsys.readouterr().err, "lab routes", '"nvpf4"', '"nvfp4"')


APART = {  # kernels of ours that no router takes though they are far faster somewhere, and why that is right
    "cuda_decode_chained": "its times hold the start of the next launch of its kind",
}


@pytest.mark.slow
def test_no_kernel_that_is_faster_than_what_is_served_is_kept_from_serving() -> None:
    """A mixture of 2,048 tokens went to a kernel of 2,458 us, beside one of 355 that was "not measured"."""

    @over({f"{path.parts[-3]} {path.stem}": (path,) for path in sorted(store.FOLDER.glob("*/routes/*.json"))})
    def each(path: Path) -> None:
        asks, known = choices.router(path.stem), routing.read(path)
        every = families.load(path.stem).candidates
        for place, by_run in routes._groups(asks, known.device, None).items():
            served = [us for name, us in known.at.get(place, {}).items() if not asks.bars(every[name])]
            for row in (row for arms in by_run.values() for row in arms.values() if row.name in every):
                assert "not measured" not in every[row.name].no_route, row.name
                if served and every[row.name].no_route and row.name not in APART:
                    assert min(served) < routes.AGREE * (row.time_us or 0.0), (row.name, place)

    each()
