"""Ceilings and the cross-check without a GPU: which rows they make suspect, and when two clocks disagree."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs

from lab.base.errors import BadInput
from lab.bench import counters, crosscheck
from lab.check import families
from lab.place import ceilings
from lab.row import store
from lab.row.records import CEILINGS, REST, UPDATE_MIB, Ceiling, Measurement
from tests.loops import over
from tests.refused import refused
from tests.row.made import measurement

CEILING: dict[str, Any] = {"device": "h200", "method": "m", "run": "r1", "started": "2026-11-20", "samples": (1.0,)}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """read 4,000 then 4,400 GB/s, write 3,000, bf16 700 TFLOP/s, a launch of 12 then 10 us."""
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    for run, values in (
        ("r1", {"read": 4000, "write": 3000, "bf16": 700, "launch": 12}),
        ("r2", {"read": 4400, "launch": 10}),
    ):
        store.append_all(tmp_path / "h200" / "ceilings" / run, [ceiling(n, v, run) for n, v in values.items()])
    return tmp_path


def ceiling(name: str, value: float, run: str) -> Ceiling:
    """A ceiling of the device in its unit."""
    return Ceiling(**CEILING | {"name": name, "value": value, "unit": CEILINGS[name][0], "run": run})


def row(median_us: float, **more: Any) -> Measurement:
    """A row that reads 440 MB: 100 us at the highest measured read."""
    return measurement(**{"median_us": median_us, "bytes": 440e6, "flops": 1e6, "pipe": "bf16", "l2": "cold", **more})


def test_the_best_of_all_runs_counts(measured: Path) -> None:
    best = ceilings.latest("h200")
    assert (best["read"].value, best["read"].run) == (4400, "r2")
    assert (best["launch"].value, best["bf16"].run) == (10, "r1")
    assert ceilings.floor_us("h200", 1e6, 440e6, "bf16") == pytest.approx(100)
    assert ceilings.floor_us("h200", 140e9, 1, "bf16") == pytest.approx(200)


def runs() -> Any:
    """lab.bench.ceiling_runs, which needs Triton."""
    pytest.importorskip("triton")
    from lab.bench import ceiling_runs

    return ceiling_runs


def test_every_ceiling_has_its_measure() -> None:
    ceiling_runs = runs()
    assert list(ceiling_runs.MEASURES) == list(CEILINGS)
    assert [n for n in CEILINGS if n.startswith("update_")] == [f"update_{m}_mib" for m in UPDATE_MIB]


def test_an_update_is_counted_twice_over_distinct_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read plus write, the best of the launch shapes, and neighbouring calls on different stretches."""
    ceiling_runs = runs()
    seen: list[tuple[int, int]] = []

    class Spy:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda x, BLOCK, num_warps: seen.append((x.data_ptr(), grid[0] * BLOCK))

    def graphed(call: Any, nodes: int) -> list[float]:
        for _ in range(nodes):
            call()
        return [1e-3 * (4 if len(seen) > nodes else 2)] * 3  # the first launch shape is the fastest

    empty = torch.empty  # never touched, so 2 GiB of it cost nothing
    monkeypatch.setattr(torch, "randn", lambda count, device: empty(count))
    monkeypatch.setattr(ceiling_runs, "update_kernel", Spy())
    monkeypatch.setattr(ceiling_runs, "_graphed", graphed)
    assert ceiling_runs._update(768) == pytest.approx([2 * 768 * 2**20 / 2e-3 * 1e-9] * 3)
    assert {count for _, count in seen} == {768 * 2**18}
    assert len({address for address, _ in seen[:2]}) == 2


@pytest.mark.parametrize(("median_us", "suspect"), [(96.0, True), (97.2, False), (150.0, False)])
def test_more_than_three_per_cent_over_the_ceiling_is_suspect(measured: Path, median_us: float, suspect: bool) -> None:
    assert bool(ceilings.suspect(row(median_us))) == suspect
    assert not ceilings.suspect(row(median_us, timer="host"))  # the host's time says nothing of memory


def add(folder: Path, name: str, value: float) -> None:
    """One more run with one more ceiling."""
    run = f"r_{name}"
    store.append(folder / "h200" / "ceilings" / run, ceiling(name, value, run))


def test_the_issue_roof_is_of_products_beside_decode_by_the_tokens_that_were_measured(measured: Path) -> None:
    assert ceilings.issue_roof("h200") == ()
    for name, value in (("mma_8_beside", 90), ("wgmma_64_beside", 400), ("wgmma_64_alone", 600), ("mma_8_turn", 70)):
        add(measured, f"issue_{name}", value)
    assert ceilings.issue_roof("h200") == ((pytest.approx(16 * 16 / 9), 90), (pytest.approx(128 * 16 / 9), 400))


@pytest.mark.parametrize("rest", [0.0, 4.0])
def test_what_is_possible_is_what_the_fastest_products_reach(measured: Path, rest: float) -> None:
    """140 GFLOP: 200 us at the 700 TFLOP/s of products back to back, 175 at 800 of rested ones, 160 at 875 of quiet."""
    products = {"flops": 140e9, "bytes": 1.0, "rest": rest}
    assert "200.00 us" in ceilings.suspect(row(180.0, **products))  # no other ceiling yet: this one stands
    add(measured, "bf16_rested", 800)
    assert ceilings.suspect(row(180.0, **products)) == ""
    assert "175.00 us" in ceilings.suspect(row(165.0, **products))
    add(measured, "bf16_quiet", 875)
    assert ceilings.suspect(row(165.0, **products)) == ""
    assert "160.00 us" in ceilings.suspect(row(150.0, **products))  # above the quiet one too: nothing excuses it
    add(measured, "fp8_quiet", 2000)  # another pipe's
    assert "160.00 us" in ceilings.suspect(row(150.0, **products))


def test_a_share_is_of_products_on_random_data(measured: Path) -> None:
    """What a row's share is shown of does not move with a ceiling that no program with real operands reaches."""
    products = {"flops": 140e9, "bytes": 1.0}
    add(measured, "bf16_quiet", 875)
    assert ceilings.floor_of(row(300.0, **products)) == pytest.approx(200)
    add(measured, "bf16_rested", 800)
    assert ceilings.floor_of(row(300.0, **products)) == pytest.approx(200)
    assert ceilings.floor_of(row(300.0, rest=4.0, **products)) == pytest.approx(175)


@over({pipe: (pipe,) for pipe in ("bf16", "fp8", "int8")})
def test_quiet_products_are_the_rested_ones_on_zeros(pipe: str) -> None:
    """The same shapes and the same rest; operands without a set bit, the sign's included."""
    ceiling_runs = runs()
    dtype, _, shapes = ceiling_runs.PRODUCTS[pipe]
    operands: list[torch.Tensor] = []
    rests: list[float] = []

    def ready(a: torch.Tensor, b: torch.Tensor) -> Any:
        operands.extend((a, b.t()))
        return None

    def eager(call: Any, rest: float) -> list[float]:
        rests.append(rest)
        return [1.0]

    class OnCpu(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named = dict(kwargs or {})
            return function(*args, **(named | {"device": "cpu"} if "device" in named else named))

    with pytest.MonkeyPatch.context() as patch, OnCpu():
        patch.setattr(ceiling_runs, "_eager", eager)
        patch.setitem(ceiling_runs.PRODUCTS, pipe, (dtype, ready, ((4, 8, 64),)))
        for way in ("", "_rested", "_quiet"):
            operands.clear()
            ceiling_runs.MEASURES[pipe + way]()
            assert [(tuple(t.shape), t.dtype) for t in operands] == [((4, 64), dtype), ((8, 64), dtype)]
            assert (not any(t.view(torch.uint8).any() for t in operands)) == (way == "_quiet")
    assert rests == [0, REST, REST]
    assert len(set(shapes)) == len(shapes) >= 3
    unit, method = CEILINGS[f"{pipe}_quiet"]
    assert unit == CEILINGS[pipe][0]
    assert "zeros" in method
    assert "idleness" in method
    assert "random data" in CEILINGS[f"{pipe}_rested"][1]


def test_without_the_ceiling_nothing_is_suspect(measured: Path) -> None:
    assert ceilings.suspect(row(1.0, l2="warm")) == ""  # no L2 read was measured
    assert ceilings.suspect(row(1.0, pipe="fp8")) == ""
    assert ceilings.latest("gb10") == {}


def test_a_ceiling_that_is_none_is_refused(tmp_path: Path) -> None:
    for change, word in (
        ({"name": "reed"}, '"reed"'),
        ({"unit": "TB/s"}, "TB/s"),
        ({"value": 0.0}, "value = 0.0"),
        ({"value": float("nan")}, "value"),
    ):
        with refused(tmp_path.name, word):
            store.append(tmp_path, msgspec.structs.replace(ceiling("read", 1.0, "r"), **change))
        assert not (tmp_path / "ceilings.jsonl").exists()


@pytest.mark.parametrize(
    ("graph_us", "kineto_us", "within"),
    [(103.0, 100.0, True), (104.0, 100.0, False), (96.0, 100.0, False), (11.25, 10.0, True), (11.6, 10.0, False)],
)
def test_clocks_agree_within_the_limits(graph_us: float, kineto_us: float, within: bool) -> None:
    """One kernel a call and a gap of 0.5 us: 3 % from 20 us on, 8 % below."""
    found = crosscheck.verdict(graph_us, 0.5, 1, kineto_us)
    assert found["kernel_us"] == graph_us - 0.5
    assert found["within"] == within


def test_gap_is_taken_off_once_per_kernel() -> None:
    assert crosscheck.verdict(103.0, 0.5, 6, 100.0)["difference_pct"] == pytest.approx(0)


def test_the_kernels_of_a_call_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = []
    target = crosscheck.Target("gdn", "fused_chunk", families.load("gdn").cases.WORKLOADS[0].id)
    monkeypatch.setattr(counters, "collect", lambda asked: [structs.replace(asked[0], **row) for row in rows])
    rows[:] = [{"duration_us": 1.5}, {"duration_us": 2.5}]
    assert crosscheck.ncu_us(target) == pytest.approx(4.0)
    rows[:] = [{}]
    assert crosscheck.ncu_us(target) is None

    def absent(jobs: Any) -> Any:
        raise BadInput("lab counters", "ncu is not on the PATH")

    monkeypatch.setattr(counters, "collect", absent)
    assert crosscheck.ncu_us(target) is None


def test_a_target_that_is_none_is_refused() -> None:
    for text, where in (("p5-kernel", "--cross-check"), ("nosuch/a@b", "kernels"), ("gdn/nosuch@b", "kernels/gdn")):
        with refused(where, '"p5-kernel"' if "@" not in text else '"nosuch"'):
            crosscheck.parse(text)
