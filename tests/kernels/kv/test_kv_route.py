"""The route of kernels/kv: by the length of the cache, among the kernels of the format in which it lies."""

import pytest

from kernels import routing
from kernels.kv import route
from lab.check import families

OURS = families.load("kv").candidates
SHAPE = (("D", 256), ("Hkv", 4), ("Hq", 24), ("batch", 1), ("page", 16))
TIMES = {
    "cuda_bf16": {256: 9.0, 8192: 18.0},
    "splitkv_bf16": {256: 8.0, 8192: 25.0},
    "cuda_fp8": {256: 7.0, 8192: 14.0},
    "torch_sdpa": {256: 1.0, 8192: 1.0},
}
TABLE = routing.Table(
    "h200",
    "kv",
    "ctx",
    tuple(routing.Point(name, SHAPE, at, us) for name, times in TIMES.items() for at, us in times.items()),
    "r",
)
CANDIDATES = tuple(OURS.values())


def chosen(ctx: int, *precisions: str, device: str = "h200", known: routing.Table | None = TABLE) -> routing.Choice:
    words = {"ctx": str(ctx), "batch": "1", "Hq": "24", "Hkv": "4", "D": "256"}
    workload, _ = route.ROUTER.asked(words)
    return routing.route(route.ROUTER, workload, device, CANDIDATES, 4440.0, {"bf16": 759.0}, known, precisions)


def test_the_length_decides_among_kernels_of_one_format() -> None:
    assert (chosen(256).candidate, chosen(8192).candidate) == ("splitkv_bf16", "cuda_bf16")
    assert set(chosen(8192).times_us) == {"cuda_bf16", "splitkv_bf16"}
    assert chosen(256, "fp8-kv").candidate == "cuda_fp8"
    assert chosen(256, "fp8-kv").left_out["cuda_bf16"] == "of the format bf16, not fp8-kv"


def test_no_kernel_competes_that_reads_another_cache() -> None:
    """SDPA and the layouts of LP1 read copies that are made outside the timing."""
    own = {name for name, c in OURS.items() if not set(c.needs.packages) - {"cupy", "triton"}}
    assert {name for name in own if not route.ROUTER.bars(OURS[name])} == {"cuda_bf16", "splitkv_bf16"}
    assert "contiguous copy" in OURS["torch_sdpa"].no_route


def test_without_a_table_the_first_is_taken_and_said_so() -> None:
    choice = chosen(256, device="no-table-here", known=None)
    assert (choice.candidate, choice.how) == ("cuda_bf16", "predicted")
    assert "nothing measured on no-table-here" in choice.reason


def test_heads_that_do_not_share_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Hq=25\b.*Hkv=4\b"):
        route.ROUTER.asked({"ctx": "1", "batch": "1", "Hq": "25", "Hkv": "4", "D": "256"})
