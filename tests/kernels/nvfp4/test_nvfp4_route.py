"""The measured route of kernels/nvfp4: collapsed first, from a table, else predicted and said so."""

import timeit
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kernels import routing
from kernels.common import Candidate, Workload
from kernels.nvfp4 import route
from kernels.timing import predict
from lab.base import devices
from lab.check import families
from lab.study import routes, timefit

PEAKS = {"bf16": 759.0, "f32": 60.0}


def nothing(args: object, out: object) -> None:
    raise AssertionError("a route launches nothing")


def candidate(name: str, most: int = 1 << 30, precision: str = "nvfp4-w4a16") -> Candidate:
    return Candidate(name, precision, nothing, refuses=lambda w: "" if w["M"] <= most else f"M > {most}")


CANDIDATES = (candidate("triton_gemv", 16), candidate("triton_gemm"), candidate("torch_bf16", precision="bf16"))
SHAPE = (("K", 6144), ("N", 5120))
TABLE = routing.Table(
    "h200",
    "nvfp4",
    "M",
    tuple(
        routing.Point(name, SHAPE, at, us)
        for name, times in {
            "triton_gemv": {1: 9.0, 8: 40.0},
            "triton_gemm": {1: 30.0, 8: 31.0, 128: 66.0},
            "torch_bf16": {1: 20.0, 8: 20.0, 128: 20.0},
        }.items()
        for at, us in times.items()
    ),
    "r",
)


def measured(
    ne: tuple[int, ...],
    n: int,
    device: str,
    candidates: Sequence[Candidate],
    known: routing.Table | None = None,
    precisions: Sequence[str] = (),
) -> routing.Choice:
    workload, _ = route.ROUTER.asked({"ne": ",".join(map(str, ne)), "N": str(n)})
    return routing.route(route.ROUTER, workload, device, candidates, 4440.0, PEAKS, known, precisions)


def chosen(ne: tuple[int, ...], known: routing.Table | None = TABLE, n: int = 5120) -> routing.Choice:
    return measured(ne, n, "no-table-here", CANDIDATES, known)


@pytest.mark.parametrize("ne", [(6144, 128), (6144, 1, 128), (6144, 1, 64, 2), (6144, 2, 64)])
def test_leading_dimensions_are_collapsed_before_choosing(ne: tuple[int, ...]) -> None:
    choice = chosen(ne)
    assert (choice.candidate, choice.how) == ("torch_bf16", "measured")
    assert "M=128" in choice.reason
    assert "triton_gemv" not in choice.times_us  # it refuses 128 columns, whatever ne[1] says


def test_the_table_decides_by_columns() -> None:
    assert chosen((6144, 1)).candidate == "triton_gemv"
    assert chosen((6144, 8)).candidate == "torch_bf16"


def test_a_kernel_that_rounds_activations_competes_only_by_the_name_of_its_precision() -> None:
    """The fast arm, which errs most, is not let in by asking for the careful one. A chained arm never is."""
    more = (
        candidate("cuda_w4a8_promoted", precision="nvfp4-w4a8"),
        candidate("cuda_w4a8", precision="nvfp4-w4a8-fast"),
        replace(candidate("cuda_decode_chained"), no_route="timed in a chain"),
    )
    faster = tuple(routing.Point(c.name, SHAPE, 128, us) for c, us in zip(more, (12.0, 10.0, 5.0), strict=True))
    known = routing.Table("h200", "nvfp4", "M", TABLE.points + faster, "r")

    def asked(*precisions: str) -> routing.Choice:
        return measured((6144, 128), 5120, "no-table-here", CANDIDATES + more, known, precisions)

    assert asked().candidate == "torch_bf16"
    assert asked("nvfp4-w4a8").candidate == "cuda_w4a8_promoted"
    assert asked("nvfp4-w4a8-fast").candidate == "cuda_w4a8"
    assert asked("nvfp4-w4a8", "nvfp4-w4a8-fast").candidate == "cuda_w4a8"
    assert "passed over cuda_w4a8, 10.0 in the table: rounds the activations" in asked("nvfp4-w4a8").reason
    assert asked().left_out["cuda_decode_chained"] == "timed in a chain"
    with pytest.raises(ValueError, match=r"nvfp4-w4a16\b.*nvfp4-w4a8"):
        asked("nvfp4-w4a16")
    assert {c.precision for c in families.load("nvfp4").candidates.values()} >= set(route.ROUNDED)
    assert families.load("nvfp4").candidates["cuda_decode_chained"].no_route


def test_without_a_table_the_roofline_says_so() -> None:
    few, many = chosen((6144, 1), None), chosen((6144, 1, 512), None)
    assert (few.how, many.how) == ("predicted", "predicted")
    assert few.candidate == "triton_gemv"
    assert "nothing measured on no-table-here" in few.reason
    # 17.7 MB at 4.44 TB/s
    assert few.times_us["triton_gemv"] == pytest.approx(4.0, rel=0.02)


def test_a_prediction_counts_every_pass_over_the_weights() -> None:
    sixteen = chosen((6144, 16), None)
    # two reads of 17.7 MB are 8.0 us; 1 GFLOP on 60 TFLOP/s of CUDA cores is more
    assert sixteen.times_us["triton_gemv"] == pytest.approx(16.8, rel=0.01)
    assert sixteen.times_us["triton_gemm"] == pytest.approx(4.07, rel=0.02)
    assert sixteen.candidate == "triton_gemm"


def test_the_environment_overrides_within_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILLGATE_ROUTE_NVFP4", "triton_gemm")
    assert (chosen((6144, 1)).candidate, chosen((6144, 1)).how) == ("triton_gemm", "override")
    monkeypatch.setenv("KILLGATE_ROUTE_NVFP4", "triton_gemv")
    with pytest.raises(ValueError, match=r"\btriton_gemm\b.*\btorch_bf16"):
        chosen((6144, 512))


def test_a_stale_table_never_routes_to_a_kernel_that_refuses() -> None:
    """The committed table of the H200 may hold rows of a kernel that took more than the present one does."""
    every = families.load("nvfp4").candidates
    known = routing.table("h200", "nvfp4")
    assert known is not None
    ours = tuple(every[name] for name in dict.fromkeys(p.candidate for p in known.points))
    for m in (1, 8, 12, 16, 24, 32, 128):
        for n, k in ((4096, 2048), (17408, 5120), (5120, 6144), (5120, 17408)):
            choice = measured((k, m), n, "h200", ours)
            takes = Workload("w", {"M": m, "N": n, "K": k, "dtype": "bf16"})
            assert not every[choice.candidate].refuses(takes), (m, n, k, str(choice))


def test_why_the_table_was_not_followed_is_said() -> None:
    name, shape = "cuda_decode", (("K", 17408), ("N", 5120))
    decode = families.load("nvfp4").candidates[name]
    points = tuple(routing.Point(c, shape, 32, us) for c, us in ((name, 20.0), ("torch_bf16", 50.0)))
    stale = routing.Table("h200", "nvfp4", "M", points, "r")
    choice = measured((17408, 32), 5120, "h200", (decode, CANDIDATES[2]), stale)
    assert choice.candidate == "torch_bf16"
    assert "passed over cuda_decode, 20.0 in the table: M=32" in str(choice)


def test_no_number_of_tokens_between_the_kernels_falls_to_the_library() -> None:
    """At the shapes of the cards, between the decode kernels and the GEMM, by the committed table and its model."""
    every = families.load("nvfp4").candidates
    ours = tuple(every[name] for name in ("cuda_decode", "cuda_gemm", "triton_gemm", "torch_bf16"))
    for n, k in ((17408, 5120), (5120, 6144), (5120, 17408)):  # at 4096 x 2048 torch was the faster from 32 tokens on
        for m in range(1, 65):
            choice = measured((k, m), n, "h200", ours)
            assert choice.candidate.startswith("cuda_"), (m, n, k, str(choice))


def test_where_users_are_a_model_that_has_not_seen_a_shape_says_what_was_measured() -> None:
    """Shapes of five users' models, each predicted by the rows of all other shapes: the choice, and its time."""
    every = families.load("nvfp4").candidates
    ours = {name for name, c in every.items() if set(c.needs.packages) <= {"cupy"} and c.precision == "nvfp4-w4a16"}
    rows = [row for row in routes.timed(routes.table("nvfp4", "h200")) if row.candidate in {*ours, "torch_bf16"}]
    for m, n, k, taken in (
        (17, 14336, 4096, "cuda_decode"),
        (3, 2048, 7168, "cuda_decode"),
        (100, 2048, 7168, "torch_bf16"),
        (33, 1000, 4112, "torch_bf16"),
        (64, 17408, 5120, "cuda_gemm"),
    ):
        there = [row for row in rows if (dict(row.shape)["N"], dict(row.shape)["K"]) == (n, k)]
        known = timefit.fits([row for row in rows if row not in there], devices.get("h200"), intervals=False)
        asked = [(row, predict(row.work, known[row.candidate])) for row in there if row.at == m]
        times = {row.candidate: (time.us, row.us) for row, time in asked if time}
        assert min(times, key=lambda name: times[name][0]) == taken, times
        assert times[taken][0] == pytest.approx(times[taken][1], rel=0.15), times


def test_a_planned_choice_takes_under_20_us_and_refuses_nothing() -> None:
    every = families.load("nvfp4").candidates
    ours = tuple(every[name] for name in ("cuda_decode", "cuda_gemm", "torch_bf16"))
    plan = routing.plan(lambda m: measured((5120, m), 17408, "h200", ours))
    for m in range(1, 4097):
        takes = Workload("w", {"M": m, "N": 17408, "K": 5120, "dtype": "bf16"})
        assert not every[plan[m].candidate].refuses(takes), m
    rounds = 10_000
    assert min(timeit.repeat(lambda: plan[1000].candidate, number=rounds, repeat=5)) / rounds < 20e-6
