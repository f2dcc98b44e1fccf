"""Samples of one arm: how a row keeps them, and every figure that is computed from them.

Nothing is rounded and no summary is stored beside them, so a summary cannot say something else than its samples.
"""

from __future__ import annotations

import base64
import binascii
import math
import statistics
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

Shape = tuple[int, int, int]
"""(placements, blocks a placement, samples a block); the samples of a block are those of its two visits, in order."""
MOST_BYTES = 1 << 26  # of one arm's samples, unpacked: 64 MiB, a hundred times what an hour of sampling yields


class Summary(NamedTuple):
    """What an arm's samples say, us and %. sd_pct: standard deviation of the blocks in % of the median.

    drift_pct: the median of the second half of the samples against that of the first.
    """

    median_us: float
    iqr_us: float
    min_us: float
    stdev_us: float
    n: int
    sd_pct: float
    drift_pct: float


def encode(samples: Sequence[float]) -> str:
    """Base64 of zlib of little-endian float64, us a call, in the order placement, block, sample; exact."""
    return base64.b64encode(zlib.compress(struct.pack(f"<{len(samples)}d", *samples), 9)).decode()


def decode(text: str) -> tuple[float, ...]:
    """What `encode` was given. Raises ValueError("what is wrong") for another text, or one of more than MOST_BYTES."""
    try:
        unpack = zlib.decompressobj()
        packed = unpack.decompress(base64.b64decode(text, validate=True), MOST_BYTES)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"is no base64 of zlib ({error})") from None
    if not unpack.eof or unpack.unused_data or len(packed) % 8:
        raise ValueError("is not whole")
    return struct.unpack(f"<{len(packed) // 8}d", packed)


def blocks(samples: Sequence[float], shape: Shape) -> tuple[tuple[float, ...], ...]:
    """Block times in us by placement; a block's is the mean of the medians of its two visits.

    Raises ValueError when `shape` does not hold the samples or a block is not two visits of equal length.
    """
    placements, count, each = shape
    if len(samples) != placements * count * each or each < 2 or each % 2:
        raise ValueError(f"{len(samples)} samples are not {placements} x {count} blocks of two visits ({each} samples)")
    visit = each // 2
    medians = [statistics.median(samples[at : at + visit]) for at in range(0, len(samples), visit)]
    times = [(first + second) / 2 for first, second in zip(medians[::2], medians[1::2], strict=True)]
    return tuple(tuple(times[at : at + count]) for at in range(0, len(times), count))


def summary(samples: Sequence[float], blocks_us: Sequence[float]) -> Summary:
    """The figures of an arm from its samples, at least one, and the times of all its blocks."""
    quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else [samples[0]] * 3
    half = len(samples) // 2 or 1
    first, second = statistics.median(samples[:half]), statistics.median(samples[half:] or samples)
    middle = statistics.median(samples)
    return Summary(
        median_us=middle,
        iqr_us=quartiles[2] - quartiles[0],
        min_us=min(samples),
        stdev_us=_deviation(samples),
        n=len(samples),
        sd_pct=100.0 * _deviation(blocks_us) / middle,
        drift_pct=100.0 * (second / first - 1.0),
    )


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation; ten times as fast as the module's, and as exact for times."""
    if len(values) < 2:
        return 0.0
    mean = statistics.fmean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def aa_floor_pct(control: Sequence[float], again: Sequence[float]) -> float:
    """The A/A noise floor in %: 3 sigma of the control's block ratios to itself, or its bias if that is larger.

    Without noise the ratio again / control of each block is 1. A bias (say, one set of buffers on slower memory) is
    noise of the same kind and is not averaged away. Infinite with fewer than two blocks; raises ValueError when the
    two are of different length.
    """
    ratios = [b / a for a, b in zip(control, again, strict=True)]
    if len(ratios) < 2:
        return math.inf
    return 100.0 * max(3.0 * statistics.stdev(ratios), abs(statistics.fmean(ratios) - 1.0))
