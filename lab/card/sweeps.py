"""Sweeps that the sources printed (data/recorded/sweeps.csv): throughput, latency and memory over an axis, by arm.

A sweep row is one line of somebody's table: a device, a model, an arm, the axes it was taken at (`params`) and what
was read there, each metric in its own column with its unit in the column's name. Rows are facts about a source; a
figure that a verdict stands on is in measurements.csv, with its own id.

Axes of `params`, where the source gives them: npl (sequences), n_prompt, n_gen, rep, and one of
    context    tokens in the cache when the row was taken (ds4's frontiers; `prefill_step` is the increment prefilled)
    depth      tokens in the cache before the row's own prompt (llama-sweep-bench's N_KV)
    allocated  the size of the cache, whatever was in it (`context_used` says how much was, where the log has it)
    ctx        as printed, where the source does not say which of the three it is
`status` is empty for a row that stands; else words why not to read it as a result (profiled, impossible, superseded,
contaminated, wrong flag, memory full, ...), joined by "; ". Nothing is filtered unless asked for.

Sources: "LocalAI:docs/" is backend/cpp/llama-cpp-localai-paged/docs and "LocalAI:patches/" is
backend/cpp/llama-cpp/patches/paged of mudler/LocalAI; "files/" are the raw files of ds4, imp and lucebox.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct

from lab.base import files
from lab.base.errors import BadInput, nearest
from lab.base.vocabulary import unit
from lab.card import recorded
from lab.card.recorded import Figure

FILE = recorded.FOLDER / "sweeps.csv"
TEXT = ("id", "system", "device", "model", "arm", "params", "status", "tool", "source")
# column -> unit
METRICS: Mapping[str, str] = {
    "prefill_tps": "tok/s", "decode_tps": "tok/s", "decode_steady_tps": "tok/s", "decode_per_sequence_tps": "tok/s",
    "aggregate_tps": "tok/s", "ttft_ms": "ms", "ttft_max_ms": "ms", "itl_ms": "ms", "first_token_ms": "ms",
    "vram_gb": "GB", "wall_s": "s", "prefill_s": "s", "decode_s": "s", "accept_len": "tokens", "accept_rate": "ratio",
}  # fmt: skip


class Row(Struct, frozen=True):
    """One line of a sweep.

    device: an id of data/devices.toml where it has that device, else the source's word in lower case.
    params: the axes and further settings; values: metric -> number, in the unit of METRICS.
    status: "" when the row stands.
    """

    id: str
    system: str
    device: str
    model: str
    arm: str
    params: dict[str, Any]
    values: dict[str, files.NotNegative]
    status: str
    tool: str
    source: str

    def __post_init__(self) -> None:
        for metric, value in self.values.items():
            if METRICS[metric] == "ratio" and value > 1:
                raise ValueError(f"{metric} = {value} is no ratio; a length in tokens belongs into accept_len")
        if not self.values:
            raise ValueError("holds no metric; leave the row out")

    def __getitem__(self, metric: str) -> float:
        return files.called(metric, self.values, "metric", self.id)


def read(path: Path = FILE) -> tuple[Row, ...]:
    """Every row of a file, in its order.

    Raises BadInput naming the file and the row for a missing or unknown column (a metric in another unit is one), a
    value that is no finite number or is negative, a rate above 1, params that are no JSON object, and an id used twice.
    """

    def typed(line: dict[str, Any]) -> dict[str, Any]:
        for column in line.keys() - {*TEXT, *METRICS}:
            raise BadInput(path, f'column "{column}" is unknown', nearest(column, (*TEXT, *METRICS)))
        return line | {"values": {m: files.number(line[m]) for m in METRICS if line[m]}}

    return tuple(files.table(path, Row, typed, (*TEXT, *METRICS)).values())


@cache
def table() -> tuple[Row, ...]:
    """Every committed row, in the order of the file."""
    return read()


def row(row_id: str) -> Row:
    """The committed row with this id; raises BadInput naming the nearest."""
    return files.called(row_id, {row.id: row for row in table()}, "row", FILE)


def select(
    among: Iterable[Row] | None = None,
    *,
    metric: str = "",
    where: Callable[[Row], bool] = lambda row: True,
    **wanted: Any,
) -> tuple[Row, ...]:
    """The rows with these words and params, this metric; of the committed ones unless `among` is given.

    wanted: system, device, model, arm, tool, source, or an axis of params; an axis given as None must be absent.
    where:  any further condition.
    Raises BadInput when nothing is left: an empty sweep is a misspelt filter more often than a result.
    """
    pool = found = table() if among is None else tuple(among)
    for key, value in wanted.items():
        of = [getattr(r, key) if key in TEXT else r.params.get(key) for r in found]
        found = tuple(r for r, its in zip(found, of, strict=True) if its == value)
        if not found:
            shown = f'"{value}"' if isinstance(value, str) else value
            raise BadInput("sweeps", f"{key} = {shown} is in no row", nearest(str(value), map(str, of)))
    found = tuple(r for r in found if (not metric or metric in r.values) and where(r))
    if not found:
        raise BadInput("sweeps", f"no row is left of {len(pool)}", "loosen the filters")
    return found


class Series(Struct, frozen=True):
    """One curve: values of a metric over an axis, ascending."""

    label: str
    axis: str
    metric: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def at(self, x: float) -> float:
        """The value at x; raises BadInput when the curve has no point there."""
        if x not in self.xs:
            near = min(self.xs, key=lambda known: abs(known - x))
            raise BadInput(self.label, f"has no point at {self.axis} = {x:g}", f"the nearest is {near:g}")
        return self.ys[self.xs.index(x)]


def series(among: Iterable[Row], axis: str, metric: str, label: str = "") -> Series:
    """The rows as a curve over params[axis]; rows without the axis or the metric are left out.

    Raises BadInput for an unknown metric, two rows at one x, and where no row is left.
    """
    files.called(metric, METRICS, "metric", "sweeps")
    points: dict[float, Row] = {}
    for r in among:
        x = r.params.get(axis)
        if metric not in r.values or not isinstance(x, int | float):
            continue
        if (other := points.setdefault(float(x), r)) is not r:
            raise BadInput("sweeps", f"two rows at {axis} = {x:g}: {other.id} and {r.id}", "select one arm")
    if not points:
        raise BadInput("sweeps", f'no row has both "{axis}" and {metric}', "choose another axis or metric")
    xs = sorted(points)
    return Series(label or points[xs[0]].arm, axis, metric, tuple(xs), tuple(points[x].values[metric] for x in xs))


def from_figures(figures: Iterable[Figure], axis: str, metric: str, label: str) -> Series:
    """Recorded figures as a curve over params[axis]; `metric` is the column they stand for, whose unit they must have.

    Raises BadInput for a figure in another unit, without a number for the axis, or that its source withdrew, and two
    at one x.
    """
    rows = []
    for f in figures:
        if unit(f.unit) != METRICS[metric] or not isinstance(f.value, float):
            raise BadInput(f.id, f"is {f.value} {f.unit}, not {METRICS[metric]}", "choose figures of one metric")
        if f.withdrawn or not isinstance(f.params.get(axis), int | float):
            taken = f'withdrawn by its source ("{f.withdrawn}")' if f.withdrawn else ""
            raise BadInput(f.id, taken or f'has no number on the axis "{axis}"', "leave it out of the curve")
        rows.append(Row(f.id, f.system, f.device, f.model, f.arm, f.params, {metric: f.value}, "", "", f.source))
    return series(rows, axis, metric, label)


def ratio(over: Series, under: Series, label: str = "") -> Series:
    """`over` divided by `under` where both have a point; raises BadInput where they share none or differ in kind."""
    if (over.axis, METRICS[over.metric]) != (under.axis, METRICS[under.metric]):
        what = f"{over.metric} over {over.axis} against {under.metric} over {under.axis}"
        raise BadInput("sweeps", what, "compare one unit over one axis")
    shared = [x for x in over.xs if x in under.xs and under.at(x) > 0]
    if not shared:
        raise BadInput("sweeps", f"{over.label} and {under.label} share no {over.axis}", "choose arms of one sweep")
    ys = tuple(over.at(x) / under.at(x) for x in shared)
    return Series(label or f"{over.label} / {under.label}", over.axis, over.metric, tuple(shared), ys)
