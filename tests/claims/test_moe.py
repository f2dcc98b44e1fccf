"""The claims of notebooks/moe.py: what its text says of tiles, held here."""

from kernels.common import Workload
from kernels.moe.cost import FP4_BYTES, block_sizes, cost
from lab.base import devices
from lab.check import families

SHAPE = families.load("moe").workload("t128_e256_k8_h2048_f512_s512").axes


def occupancy(tokens: int, tile: int) -> float:
    sizes = block_sizes(Workload("", {**SHAPE, "T": tokens, "shared": 0}), tile)
    return sum(rows * n for rows, n in sizes) / sum(tile * n for _, n in sizes)


def test_wide_tiles_are_nearly_empty_up_to_128_tokens() -> None:
    assert SHAPE["experts"] == 256
    assert all(occupancy(tokens, tile) < 0.1 for tokens in (1, 8, 32, 128) for tile in (64, 128))
    assert occupancy(256, 64) > 0.1  # 128 is the last


def test_how_wide_a_tile_hides_behind_the_read() -> None:
    """58 rows on an H200, where 64 costs a tenth and 128 more than twice the best; 219 on GB10."""

    def rows(name: str) -> float:
        place = devices.get(name)
        return place.peaks["bf16"].base / place.bandwidth.base * FP4_BYTES / 2

    assert (round(rows("h200")), round(rows("gb10"))) == (58, 219)
    place, workload = devices.get("h200"), Workload("", {**SHAPE, "T": 128, "shared": 0})
    read = cost(workload, "nvfp4-w4a16").bytes / place.bandwidth.base

    def bound(tile: int) -> float:
        count = sum(n for _, n in block_sizes(workload, tile))
        return max(read, 6.0 * workload["H"] * workload["F"] * tile * count / place.peaks["bf16"].base)

    assert bound(16) == bound(32) == read
    assert 1.05 < bound(64) / read < 1.15
    assert bound(128) / read > 2
