"""Fits the time model (kernels/timing.py) to measured times, and shows what it is worth where nothing was measured.

A candidate's parameters on a device are the maximum a posteriori of the logarithm of its times: residuals weighed
robustly (soft L1, SciPy), and priors of the logarithm of each parameter, so that a count that the rows hardly show
stays near what the device's facts say. Its interval comes from its errors at shapes that a fit had not seen. `validate`
leaves out one group of places at a time, fits the rest, and holds the prediction, its interval and the choice against
what was measured.
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

LAUNCH_US, CLOCK_GHZ, BYTES_S, SMS = 2.5, 1.7, 1e12, 132  # where no source gives a device's; the first for all
# Of the logarithm of a parameter, about what the device's facts give: launches, bytes, and estimates in clocks.
# Beside a launch, of which every row has one, few rows lack "cold": it hardly departs from what it is taken for.
PRIOR_SD = {"launches": 0.4, "bytes": 0.15, "sm_bytes": 0.5, "cold": 0.3}
CLOCKS_SD = 1.0
LEAST_ROWS = 4
COVERS = 0.9
CLOSE, MOST_STEPS = 1e-6, 40  # of the cost, and until then, in a fit that leaves rows out
PRIOR_SHAPES = 4  # that a candidate's own shapes are weighed against, see `_spread`


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


def sms(device: devices.Device) -> int:
    """Multiprocessors of a device, an H200's where no source gives them."""
    return int(device.sms.base) if device.sms else SMS


def priors(names: Sequence[str], device: devices.Device) -> tuple[np.ndarray, np.ndarray]:
    """(log us per count, its standard deviation), by the names of counts."""
    bandwidth = device.bandwidth.base if device.memory_bandwidth else BYTES_S
    usual = {"launches": LAUNCH_US, "bytes": 1e6 / bandwidth, "sm_bytes": 0.7e6 * sms(device) / bandwidth}
    means = [math.log(usual.get(name, 1e-3 / CLOCK_GHZ)) for name in names]
    return np.array(means), np.array([PRIOR_SD.get(name, CLOCKS_SD) for name in names])


def fit(rows: Sequence[Timed], device: devices.Device, intervals: bool = True) -> Fit | None:
    """The parameters of one candidate's rows; None where they are fewer than LEAST_ROWS.

    intervals: False leaves out what says how wide they are, which takes a fit for each shape.
    """
    if len(rows) < LEAST_ROWS:
        return None
    from kernels.timing import Fit

    counts = _Counts.of(rows, device)
    found, covariance = counts.solved()
    us = {name: float(f"{value:.4g}") for name, value in zip(counts.names, np.exp(found), strict=True)}
    rounded = tuple(tuple(float(f"{x:.2g}") for x in row) for row in covariance)
    return Fit(us, rounded, round(_spread(rows, counts, found), 3) if intervals else 0.0, len(rows))


def _spread(rows: Sequence[Timed], counts: _Counts, found: np.ndarray) -> float:
    """Half width of the interval that COVERS log time, before the covariance is counted.

    Each shape in turn is predicted by a fit of the others, its error over the factor by which that is less certain than
    where all parameters are known. A shape counts once, however many rows it has, and beside the candidate's own there
    are PRIOR_SHAPES whose error is NOISE: few shapes say little of an error. Student's factor is for so many in all.
    """
    from scipy.stats import t

    from kernels.timing import NOISE

    of = [row.shape for row in rows]
    groups = of if len(set(of)) > 1 else list(range(len(rows)))
    own = np.array([[group == left_out for group in groups] for left_out in dict.fromkeys(groups)])
    there, covariance = counts.solved_without(own, found)
    log_us, slopes = counts.model(there)
    wider = 1 + np.einsum("kij,kjl,kil->ki", slopes, covariance, slopes) / NOISE**2
    squares = np.average((log_us - counts.told) ** 2 / wider, axis=1, weights=own).tolist()
    held = len(squares) + PRIOR_SHAPES
    variance = (sum(squares) + PRIOR_SHAPES * NOISE**2) / held
    return float(t.ppf((1 + COVERS) / 2, held)) * math.sqrt(variance)


@dataclass(frozen=True)
class _Counts:
    """Rows of one candidate as arrays [rows, names] of counts, the logarithms of their times, and the priors."""

    names: tuple[str, ...]
    turn: np.ndarray
    once: np.ndarray
    told: np.ndarray
    mean: np.ndarray
    sd: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Timed], device: devices.Device) -> _Counts:
        names = tuple(dict.fromkeys(name for r in rows for name in (*r.work.in_turn, *r.work.at_once)))
        turn = np.array([[r.work.in_turn.get(n, 0.0) for n in names] for r in rows])
        once = np.array([[r.work.at_once.get(n, 0.0) for n in names] for r in rows])
        return cls(names, turn, once, np.log([r.us for r in rows]), *priors(names, device))

    def model(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(log us of each row, its derivatives) by the logarithms of the parameters: `kernels.timing.shares`.

        theta: [names], or [fits, names] for as many answers.
        """
        from kernels.timing import POWER

        us = np.exp(theta)[..., None, :]
        added, powered = self.turn * us, (self.once * us) ** POWER
        total = powered.sum(axis=-1, keepdims=True)
        overlapped = total ** (1 / POWER)
        time = added.sum(axis=-1, keepdims=True) + overlapped
        return np.log(time[..., 0]), (added + powered / total * overlapped) / time

    def solved(self) -> tuple[np.ndarray, np.ndarray]:
        """(logarithms of the parameters, their covariance), the maximum a posteriori."""
        from scipy.optimize import least_squares  # half a second, which a table without a fit need not pay

        from kernels.timing import NOISE

        def residuals(theta: np.ndarray) -> np.ndarray:
            return np.concatenate([(self.model(theta)[0] - self.told) / NOISE, (theta - self.mean) / self.sd])

        def jacobian(theta: np.ndarray) -> np.ndarray:
            return np.concatenate([self.model(theta)[1] / NOISE, np.diag(1 / self.sd)])

        found = least_squares(residuals, self.mean, jacobian, loss="soft_l1").x
        slopes = jacobian(found)
        return found, np.linalg.inv(slopes.T @ slopes)

    def solved_without(self, out: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`solved` of the other rows for each line of `out` [fits, rows], from a start that is near all the answers.

        All of them at once, each by Levenberg and Marquardt's steps: SciPy takes half a millisecond to begin one, and a
        validation asks for fifty thousand.
        """
        from kernels.timing import NOISE

        kept, prior = 1.0 * ~out, np.eye(len(self.names)) / self.sd
        held = np.concatenate([kept, np.ones((len(out), len(self.names)))], axis=1)

        def at(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            """Residuals, their slopes, and the cost of each fit."""
            log_us, slopes = self.model(theta)
            off = np.concatenate([(log_us - self.told) / NOISE, (theta - self.mean) / self.sd], axis=1) * held
            slopes = np.concatenate(
                [slopes / NOISE * kept[..., None], np.broadcast_to(prior, (len(out), *prior.shape))], 1
            )
            return off, slopes, np.sum(np.sqrt(1 + off**2) - 1, axis=1)

        theta = np.tile(start, (len(out), 1))
        off, slopes, cost = at(theta)
        damped = np.full(len(out), 1e-3)
        for _ in range(MOST_STEPS):
            weight = 1 / np.sqrt(1 + off**2)
            turned = np.swapaxes(slopes * weight[..., None], 1, 2)
            curved, slope = turned @ slopes, turned @ off[..., None]
            diagonal = np.einsum("kii->ki", curved)
            diagonal *= 1 + damped[:, None]
            tried = theta - np.linalg.solve(curved, slope)[..., 0]
            then = at(tried)
            better = then[2] < cost
            ended = np.abs(cost - then[2]) <= CLOSE * cost
            damped = np.where(better, damped / 10, damped * 10)
            theta = np.where(better[:, None], tried, theta)
            off, slopes = (
                np.where(better.reshape(-1, *[1] * (x.ndim - 1)), y, x)
                for x, y in zip((off, slopes), then, strict=False)
            )
            cost = np.where(better, then[2], cost)
            if ended.all():
                break
        return theta, np.linalg.inv(np.swapaxes(slopes, 1, 2) @ slopes)


def fits(rows: Iterable[Timed], device: devices.Device, intervals: bool = True) -> dict[str, Fit]:
    """The parameters of every candidate that has rows enough."""
    by_name: dict[str, list[Timed]] = {}
    for row in rows:
        by_name.setdefault(row.candidate, []).append(row)
    made = {name: fit(own, device, intervals) for name, own in by_name.items()}
    return {name: one for name, one in made.items() if one is not None}


def held_out(
    rows: Sequence[Timed], device: devices.Device, group: Callable[[Timed], Any], intervals: bool = True
) -> Iterator[list[tuple[Timed, Time]]]:
    """One group of places after another: each of its rows with what the fit of all the other groups says of it."""
    from kernels.timing import predict

    for left_out in dict.fromkeys(map(group, rows)):
        told = [r for r in rows if group(r) == left_out]
        asked = {r.candidate for r in told}
        known = fits([r for r in rows if group(r) != left_out and r.candidate in asked], device, intervals)
        own = [r for r in told if r.candidate in known]
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
