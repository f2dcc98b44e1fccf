"""One figure of somebody else's tool, with its unit, where it stands and how it was made; and what the readers share.

A unit is never assumed: a table's is read from its header, and where a format has none (JSON keys) the figure is
computed again from the time beside it, which only the right unit survives. A figure whose unit nothing confirms has
unit "" and is missing evidence to the judge; one that contradicts its own time carries the sentence in `wrong` and
makes the verdict INVALID. What is stated in another unit of the same quantity (ms) is brought to the metric's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lab.base import files, vocabulary
from lab.base.errors import BadInput, shown
from lab.base.files import NotNegative, Positive

ANSI = re.compile(r"\x1b\[[0-9;]*m")
# A string, to be passed over ("request_rate": "inf" is a sound value), or what is no number.
NOT_A_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*"?|(?<![\w."])[-+]?(?:nan|inf(?:inity)?)(?![\w."])', re.IGNORECASE)
CUT_OFF = "the file is cut off: finish or repeat that run, or remove the line"
AS_PRINTED = "give the tool's output as it was printed"
FAILED = "that test failed: repeat it or remove the line"

Word = int | float | str  # a setting or an axis, as the tool prints it
Count = Annotated[int, Meta(ge=0, lt=2**53)]


class Made(msgspec.Struct, frozen=True, omit_defaults=True):
    """Build, model and hardware of a figure, "" for what its file does not say."""

    build_commit: Word = ""
    build_number: Word = ""
    gpu_info: str = ""
    compute_capability: str = ""
    cpu_info: str = ""
    backends: str = ""
    backend_name: str = ""
    backend_reg_name: str = ""
    model_filename: str = ""
    model_type: str = ""
    model_size: Word = ""
    model_n_params: Word = ""

    def stated(self) -> dict[str, Word]:
        """What the file does say, by name."""
        found: dict[str, Word] = msgspec.to_builtins(self)
        return found


@dataclass(frozen=True)
class Line:
    """Where something stands in a file; its text begins every refusal."""

    path: Path
    number: int

    def __str__(self) -> str:
        return f"{shown(self.path)} line {self.number}"

    def figure(self, word: Any, what: str, *, zero: bool = False) -> float:
        """A finite number above zero (zero itself with `zero`); raises BadInput naming the line and the key."""
        try:
            plain = files.number(word) if isinstance(word, str) else word
            return msgspec.convert(plain, NotNegative if zero else Positive)
        except msgspec.ValidationError:
            kind = "figure" if zero else "figure above 0"
            raise BadInput(str(self), f"{what} = {word!r:.40} is no {kind}", FAILED) from None

    def count(self, word: Any, what: str) -> int:
        """A whole number from zero up; raises BadInput naming the line and the key."""
        try:
            return msgspec.convert(word, Count, strict=False)
        except msgspec.ValidationError:
            raise BadInput(str(self), f"{what} = {word!r:.40} is no whole number", FAILED) from None

    def columns(self, names: Sequence[str], cells: Sequence[str], *, whole: bool = True) -> dict[str, str]:
        """The cells by column; raises BadInput for a line that was cut off (too few of them, or not `whole`)."""
        if len(cells) != len(names) or not whole:
            raise BadInput(str(self), f"has {len(cells)} of {len(names)} columns", CUT_OFF)
        return dict(zip(names, cells, strict=True))

    def contradiction(self, what: str, stated: float, implied: float, tolerance: float, by: str) -> str:
        """One sentence where a figure is further from what its own time implies than rounding explains, else ""."""
        if abs(stated - implied) <= tolerance * implied:
            return ""
        return f"{self}: {what} {stated:.6g} is not the {implied:.6g} that {by} implies"


@dataclass(frozen=True)
class Sample:
    """One figure, or one operator test without a time.

    metric:   as a card names it.
    unit:     as the file states it, "" when nothing confirms it.
    values:   one number per repetition, in `unit`; empty when `status` is not "ok".
    axes:     the shape (test, npp, ntg, npl, depth; or op and its parameters).
    settings: how the tool was configured.
    status:   "ok" (timed), "passed" (correct, not timed), "incorrect" or "unsupported".
    flop_s:   floating-point operations per second that the tool computed, 0 where it computed none.
    wrong:    why the figure cannot be what it says, "" when it can.
    when:     ISO time of the test, "" when the file has none.
    error:    standard deviation of one value in `unit`, as the tool prints it beside it; 0 where it prints none.
    kind:     "measured", or "ceiling" for what a faster part of the control's run can give at most.
    load:     what it was measured on and may vary a little from run to run (tokens per request), by its name.
    """

    tool: str
    at: Line
    metric: str
    unit: str = ""
    values: tuple[float, ...] = ()
    axes: Mapping[str, Word] = field(default_factory=dict)
    settings: Mapping[str, Word] = field(default_factory=dict)
    made: Made = field(default_factory=Made)
    status: Literal["ok", "passed", "incorrect", "unsupported"] = "ok"
    flop_s: float = 0.0
    wrong: str = ""
    when: str = ""
    error: float = 0.0
    kind: str = "measured"
    load: Mapping[str, float] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Where the figure stands: file name and line."""
        return f"{self.at.path.name}:{self.at.number}"

    @property
    def fields(self) -> dict[str, str]:
        """Everything that `--arm` and `--map` can select by, as text."""
        own = {"tool": self.tool, "file": self.at.path.name}
        return {k: str(v) for k, v in {**self.made.stated(), **self.settings, **self.axes, **own}.items()}


class Asked(msgspec.Struct, frozen=True):
    """What the user says of a file that does not say it: how a metric is read. units: of every metric by name."""

    units: Mapping[str, str]
    how: Mapping[str, Mapping[str, str]] = {}

    def of(self, key: str) -> dict[str, Mapping[str, str]]:
        """The metrics whose reading has this key."""
        return {metric: how for metric, how in self.how.items() if key in how}

    def brought(self, at: Line, metric: str, value: float, unit: str) -> tuple[float, str]:
        """A figure in its metric's unit; raises BadInput for a unit of another quantity. "" stays: missing evidence."""
        want, have = vocabulary.unit(self.units.get(metric, unit)), vocabulary.unit(unit)
        if have == want or not have:
            return value, have
        one, other = vocabulary.measures(have), vocabulary.measures(want)
        alike = one.quantity == other.quantity and have.partition("/")[2] == want.partition("/")[2]
        if not (alike and one.factor and other.factor):
            raise BadInput(str(at), f'{metric} = {value:g} {unit} is in "{unit}"', f"it is in {want}: mend the unit")
        return value * one.factor / other.factor, want


NOTHING_ASKED = Asked({name: metric.unit for name, metric in vocabulary.words().metric.items()})


@dataclass(frozen=True)
class Imported:
    """One file: its figures, and in words what was left out or could not be confirmed."""

    path: Path
    tool: str
    samples: tuple[Sample, ...]
    notes: tuple[str, ...] = ()


def lines(path: Path, text: str, first: int = 1) -> Iterator[tuple[Line, str]]:
    """Every line of a file from number `first` on, with its place."""
    for number, line in enumerate(text.splitlines()[first - 1 :], start=first):
        yield Line(path, number), line


def plain(value: Any) -> Any:
    """A JSON value as it is compared: booleans are 0 and 1, as other versions of the same tool print them."""
    return int(value) if isinstance(value, bool) else value


def base_name(path: str) -> str:
    """The last part of a path of either kind; the rest says where somebody keeps files and nothing about the figure."""
    return re.split(r"[/\\]", path)[-1]


LOG_BUILD = re.compile(r"^(?:\S+: )?build\s*[:=]\s*(\d+) \(([0-9a-f]{6,})\)")
LOG_GPU = re.compile(r"^\s*Device (\d+): (.+?), compute capability")
LOG_MODEL = re.compile(r"loaded meta data .* from (\S+\.gguf)")


def from_log(line: str, made: Made) -> Made:
    """`made` with build, GPU or model from a line of llama.cpp's log, where the user kept it beside the figures."""
    if found := LOG_BUILD.search(line):
        return msgspec.structs.replace(made, build_number=int(found[1]), build_commit=found[2])
    if found := LOG_GPU.search(line):
        known = made.gpu_info if found[1] != "0" else ""
        return msgspec.structs.replace(made, gpu_info=f"{known}, {found[2]}" if known else found[2])
    if found := LOG_MODEL.search(line):
        return msgspec.structs.replace(made, model_filename=base_name(found[1]))
    return made


# Objects from JSON or JSON lines that a program printed, possibly among log lines. The C++ tools write numbers with
# their own formatter, so a failed test appears as a bare `nan` or `inf`, which is no JSON; and a run that was stopped
# leaves half a line. Both are said as what they are instead of as a parser's complaint.
NEXT, ANYWHERE = re.compile(r"[\s,]*(?=\{)"), re.compile(r"^[\[\s]*(?=\{)", re.MULTILINE)
Objects = list[tuple[Line, dict[str, Any]]]


def objects(path: Path, text: str) -> tuple[Objects, list[str]]:
    """(each object with its line, the other lines); raises BadInput for NaN and for what is cut off."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    read: Objects = []
    others: list[str] = []
    end, in_array = 0, False
    while found := NEXT.match(text, end) or ANYWHERE.search(text, end):
        others += text[end : found.start()].splitlines()
        in_array |= "[" in found[0]
        at, start = Line(path, text.count("\n", 0, found.end()) + 1), found.end()
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            position = max(getattr(error, "pos", start), start)
            entry = text[start:position] + text[position:].partition("\n")[0]
            if isinstance(error, NotANumber):
                entry = text[start:]  # it has no position
            raise _bad(at, entry, text[position:]) from None
        read.append((at, value))
    if in_array and "]" not in text[end:]:
        raise _bad(read[-1][0], "", "")
    return read, others + text[end:].splitlines()


class NotANumber(ValueError):
    """NaN or Infinity, which json reads as numbers."""


def _refuse(word: str) -> Any:
    raise NotANumber(word)


def _bad(at: Line, entry: str, rest: str) -> BadInput:
    key = ""
    for found in NOT_A_NUMBER.finditer(entry):
        if not found[0].startswith('"'):
            return BadInput(str(at), f"holds {found[0]}" + (f" at {key:.40}" if key else ""), FAILED)
        key = found[0]
    if not rest.partition("\n")[2].strip():
        return BadInput(str(at), "ends in the middle of an object", CUT_OFF)
    return BadInput(str(at), f"is not JSON ({entry.strip():.40})", AS_PRINTED)
