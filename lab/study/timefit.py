"""Fits the time model (kernels/timing.py) to measured times, and shows what it is worth where nothing was measured.

A candidate's parameters on a device are the maximum a posteriori of the logarithm of its times: residuals weighed
robustly (soft L1, SciPy), and priors of the logarithm of each parameter, so that a count that the rows hardly show
stays near what the device's facts say. `validate` leaves out one group of places at a time, fits the rest, and holds
the prediction, its interval and the choice against what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lab.base import devices

if TYPE_CHECKING:
    from kernels.common import Work
    from kernels.timing import Fit, Time

LAUNCH_US, CLOCK_GHZ, BYTES_S = 2.5, 1.7, 1e12  # where no source gives a device's; the first for all
# Of the logarithm of a parameter, about what the device's facts give: launches, bytes, and estimates in clocks.
PRIOR_SD = {"launches": 0.4, "bytes": 0.15, "sm_bytes": 0.5}
CLOCKS_SD = 1.0
LEAST_ROWS = 4
COVERS = 0.9


@dataclass(frozen=True)
class Timed:
    """A measured place of a candidate: which (shape and value of the axis), its counts, its time."""

    candidate: str
    shape: tuple[tuple[str, int], ...]
    at: int
    work: Work
    us: float


@dataclass(frozen=True)
class Score:
    """What a validation gave: of predictions, median and 95th percentile of |error|, and of intervals the coverage.

    mean_regret, worst_regret: of the choice, its measured time over the best measured one less 1, over `choices`.
    """

    predictions: int
    median: float
    p95: float
    coverage: float
    choices: int
    mean_regret: float
    worst_regret: float
    worst: str = ""

    def to_json(self) -> dict[str, Any]:
        """As the router's file holds it: shares to four digits."""
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}


def priors(names: Sequence[str], device: devices.Device) -> tuple[np.ndarray, np.ndarray]:
    """(log us per count, its standard deviation), by the names of counts."""
    bandwidth = device.bandwidth.base if device.memory_bandwidth else BYTES_S
    sms = device.sms.base if device.sms else 132
    usual = {"launches": LAUNCH_US, "bytes": 1e6 / bandwidth, "sm_bytes": 0.7e6 * sms / bandwidth}
    means = [math.log(usual.get(name, 1e-3 / CLOCK_GHZ)) for name in names]
    return np.array(means), np.array([PRIOR_SD.get(name, CLOCKS_SD) for name in names])


def fit(rows: Sequence[Timed], device: devices.Device) -> Fit | None:
    """The parameters of one candidate's rows; None where they are fewer than LEAST_ROWS."""
    if len(rows) < LEAST_ROWS:
        return None
    from scipy.optimize import least_squares  # half a second, which a table without a fit need not pay

    from kernels.timing import NOISE, POWER, Fit

    names = list(dict.fromkeys(name for r in rows for name in (*r.work.in_turn, *r.work.at_once)))
    turn = np.array([[r.work.in_turn.get(n, 0.0) for n in names] for r in rows])
    once = np.array([[r.work.at_once.get(n, 0.0) for n in names] for r in rows])
    told, (mean, sd) = np.log([r.us for r in rows]), priors(names, device)

    def model(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        us = np.exp(theta)
        added, powered = turn * us, (once * us) ** POWER
        total = powered.sum(axis=1, keepdims=True)
        overlapped = total ** (1 / POWER)
        time = added.sum(axis=1, keepdims=True) + overlapped
        return np.log(time[:, 0]), (added + powered / total * overlapped) / time

    def residuals(theta: np.ndarray) -> np.ndarray:
        return np.concatenate([(model(theta)[0] - told) / NOISE, (theta - mean) / sd])

    def jacobian(theta: np.ndarray) -> np.ndarray:
        return np.concatenate([model(theta)[1] / NOISE, np.diag(1 / sd)])

    found = least_squares(residuals, mean, jacobian, loss="soft_l1").x
    slopes = jacobian(found)
    covariance = np.linalg.inv(slopes.T @ slopes)
    seen, of = model(found)
    hat = of @ covariance @ of.T / NOISE**2
    # What the residuals of a shape would be had none of its rows been fitted, over the factor by which a prediction
    # there would be wider, both to first order.
    left_out = np.zeros(len(rows))
    for own in _apart(rows):
        block = np.linalg.inv(np.eye(len(own)) - hat[np.ix_(own, own)])
        wider = np.sqrt(1 + np.diag(block @ hat[np.ix_(own, own)]))
        left_out[own] = np.abs(block @ (told - seen)[own]) / wider
    place = min(len(rows) - 1, math.ceil(COVERS * (len(rows) + 1)) - 1)
    spread = float(np.sort(left_out)[place])
    us = {name: float(f"{value:.4g}") for name, value in zip(names, np.exp(found), strict=True)}
    rounded = tuple(tuple(float(f"{x:.2g}") for x in row) for row in covariance)
    return Fit(us, rounded, round(max(spread, NOISE), 3), len(rows))


def _apart(rows: Sequence[Timed]) -> list[list[int]]:
    """The rows by shape, as their numbers; those of a shape that has most of them one by one."""
    by_shape: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        by_shape.setdefault(row.shape, []).append(i)
    return [part for own in by_shape.values() for part in ([[i] for i in own] if 2 * len(own) > len(rows) else [own])]


def fits(rows: Iterable[Timed], device: devices.Device) -> dict[str, Fit]:
    """The parameters of every candidate that has rows enough."""
    by_name: dict[str, list[Timed]] = {}
    for row in rows:
        by_name.setdefault(row.candidate, []).append(row)
    made = {name: fit(own, device) for name, own in by_name.items()}
    return {name: one for name, one in made.items() if one is not None}


def held_out(
    rows: Sequence[Timed], device: devices.Device, group: Callable[[Timed], Any]
) -> Iterator[list[tuple[Timed, Time]]]:
    """One group of places after another: each of its rows with what the fit of all the other groups says of it."""
    from kernels.timing import predict

    for left_out in dict.fromkeys(map(group, rows)):
        known = fits([r for r in rows if group(r) != left_out], device)
        own = [r for r in rows if group(r) == left_out and r.candidate in known]
        times = [(r, predict(r.work, known[r.candidate])) for r in own]
        yield [(r, time) for r, time in times if time is not None]


def validate(
    rows: Sequence[Timed],
    device: devices.Device,
    group: Callable[[Timed], Any],
    compete: Callable[[str], Any] = lambda name: 0,
) -> Score:
    """What `held_out` is worth, as a Score.

    compete: candidate -> the question that it answers; a choice is among those of one question at one place, and only
    where two or more are predicted.
    """
    errors, inside, regrets = [], [], []
    for told in held_out(rows, device, group):
        places: dict[tuple[Any, ...], list[tuple[float, float, str]]] = {}
        for r, time in told:
            errors.append(abs(math.log(time.us / r.us)))
            inside.append(time.low <= r.us <= time.high)
            places.setdefault((r.shape, r.at, compete(r.candidate)), []).append((time.us, r.us, r.candidate))
        for (shape, at, _), times in places.items():
            if len(times) > 1:
                chosen, best = min(times), min(us for _, us, _ in times)
                where = " ".join(f"{axis}={value}" for axis, value in shape)
                regrets.append((chosen[1] / best - 1, f"{where} at {at}: {chosen[2]}"))
    if not errors:
        return Score(0, math.nan, math.nan, math.nan, 0, math.nan, math.nan)
    median, p95 = np.expm1(np.quantile(errors, [0.5, 0.95]))
    worst = max(regrets, default=(math.nan, ""))
    mean = sum(regret for regret, _ in regrets) / len(regrets) if regrets else math.nan
    return Score(len(errors), float(median), float(p95), sum(inside) / len(inside), len(regrets), mean, *worst)
