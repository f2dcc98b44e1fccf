"""Files of data: read as types, refused in one line with what is wrong, and written whole or not at all.

A type is a msgspec.Struct; its fields say what a file may hold, and its `__post_init__` raises ValueError("what is
wrong; the remedy") for what a type cannot say. An unknown or missing key, a wrong word and a value of another type are
refused with the file, the entry, the key and the nearest valid word.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import os
import re
import tempfile
import tomllib
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from lab.base.errors import REPOSITORY, BadInput, nearest

T = TypeVar("T")
Row = TypeVar("Row", bound=msgspec.Struct)
LARGEST = 16 << 20  # bytes; the largest file of data is a hundredth of it
HUGE = 1e300  # beyond every quantity: a bound that infinity and NaN do not keep
# What names a file or a folder: "..", a slash or a control character in it would lead elsewhere.
Id = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z")]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Finite = Annotated[float, msgspec.Meta(ge=-HUGE, le=HUGE)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=HUGE)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=HUGE)]
LABELS = ("id", "name", "title")  # keys that name an entry of a list


def read(path: Path, kind: type[T]) -> T:
    """A TOML file as its type; raises BadInput."""
    return convert(read_toml(path), kind, path)


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as plain data; raises BadInput when it is missing or malformed."""
    return parse_toml(read_bytes(path), path)


def parse_toml(text: bytes, path: Path) -> dict[str, Any]:
    """The text of a TOML file as plain data; raises BadInput naming the file."""
    try:
        return tomllib.loads(text.decode("utf-8"))
    except RecursionError:
        raise BadInput(path, "not valid TOML (nested too deeply)", "write it without so many brackets") from None
    except ValueError as error:  # TOML, UTF-8, or a number of thousands of digits
        raise BadInput(path, f"not valid TOML ({error})", "mend that line") from None


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """The content of a file; raises BadInput when it cannot be read or has more than `largest` bytes."""
    try:
        with path.open("rb") as file:
            return up_to(path, file, largest, at_once=min(path.stat().st_size, largest) + 1)
    except FileNotFoundError:
        raise BadInput(path, "no such file", _restored(path, "check the name and the folder")) from None
    except OSError as error:
        remedy = _restored(path, "give a file that can be read")
        raise BadInput(path, f"cannot be read ({error.strerror})", remedy) from None


def read_packed(path: Path, largest: int = LARGEST) -> bytes:
    """The content of a file, unpacked where its name ends in .gz; raises BadInput as `read_bytes`, and for no gzip."""
    packed = read_bytes(path, largest)
    if path.suffix != ".gz":
        return packed
    try:
        with gzip.open(io.BytesIO(packed)) as file:
            return up_to(path, file, largest, " unpacked")
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(path, f"is not complete gzip ({error})", _restored(path, "copy it again")) from None


def _restored(path: Path, otherwise: str) -> str:
    """The remedy for a file of the repository, whose path is built here, `otherwise` for one that the user names."""
    own = path.is_absolute() and Path(os.path.realpath(path)).is_relative_to(REPOSITORY)
    return "restore it from version control" if own else otherwise


def up_to(path: Path, file: io.BufferedIOBase, largest: int, of: str = "", at_once: int = 1 << 20) -> bytes:
    """What a file has left; raises BadInput for more than `largest` bytes, which it does not hold. of: what it is.

    at_once: bytes to ask for; all of a large file, which then is in memory once.
    """
    parts, size = [], 0
    while size <= largest and (part := file.read(at_once)):
        parts.append(part)
        size += len(part)
    if size > largest:
        raise BadInput(path, f"has more than {largest} bytes{of}", "give a shorter one, or a part of it")
    return b"".join(parts)


def read_lines(path: Path, kind: type[Row], remedy: str) -> list[Row]:
    """The records of a file of JSON lines, none where it is not there; raises BadInput for a line that is no record."""
    try:
        return msgspec.json.Decoder(kind).decode_lines(read_bytes(path)) if path.exists() else []
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(path, str(error), remedy) from error


def read_csv(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """The rows of a CSV with these columns; BadInput for a missing file or column, or a row of another length."""
    try:
        lines = csv.reader(io.StringIO(read_bytes(path).decode("utf-8"), newline=""))
        header, rows = next(lines, []), [row for row in lines if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInput(path, f"not a readable CSV ({error})", "restore it from version control") from None
    for column in columns:
        if column not in header:
            raise BadInput(path, f'column "{column}" is missing', f"it needs {', '.join(columns)}")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise BadInput(path, f"line {number} has a different number of fields than the header", "mend that line")
    return [dict(zip(header, row, strict=True)) for row in rows]


def table(
    path: Path, kind: type[Row], typed: Callable[[dict[str, Any]], Any] = dict, columns: tuple[str, ...] = ()
) -> dict[str, Row]:
    """The rows of a CSV as their type, by id; `params`, where it is a column, holds JSON.

    typed: a row's plain data from its texts. columns: those it must have, where they are not the fields of `kind`.
    Raises BadInput naming the file and the id.
    """
    found: dict[str, Row] = {}
    for line, row in enumerate(read_csv(path, columns or kind.__struct_fields__), start=2):
        plain: dict[str, Any] = dict(row)
        if not row["id"] or row["id"] in found:
            raise BadInput(path, f'line {line}: id "{row["id"]}" is empty or appears twice', "give each row its own id")
        if "params" in row:
            try:
                plain["params"] = msgspec.json.decode(row["params"] or "{}")
            except (msgspec.DecodeError, RecursionError) as error:
                raise BadInput(path, f"{row['id']}: params is not JSON ({error})", "mend that field") from None
        found[row["id"]] = convert(typed(plain), kind, path, row["id"])
    return found


def number(text: str) -> float | str:
    """A field of a CSV as a float where it parses as one, else unchanged."""
    try:
        return float(text)
    except ValueError:
        return text


def called(name: str, known: Mapping[str, T], what: str, where: str | Path) -> T:
    """The entry with this id; raises BadInput naming `where`, `what` it is and the nearest id."""
    if name not in known:
        raise BadInput(where, f'no {what} has the id "{name}"', nearest(name, known))
    return known[name]


def convert(raw: Any, kind: type[T], where: str | Path, entry: str = "", *, words: bool = False) -> T:
    """Plain data as a type; raises BadInput naming `where` (the file) and `entry` (what of it this is).

    words: every value is text, as in CSV and SQL, and numbers are read from it.
    """
    try:
        return msgspec.convert(raw, kind, strict=not words)
    except msgspec.ValidationError as error:
        raise _refused(str(error), raw, kind, where, entry) from None


def once(path: Path, what: str, names: Iterable[str]) -> None:
    """Raise BadInput for a name that stands twice in a file."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise BadInput(path, f'{what} "{name}" appears twice', "give the second one its own")
        seen.add(name)


def write(path: Path, text: str | bytes) -> Path:
    """The whole text or the former file, whenever the process dies; raises BadInput when it cannot be written."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
        binary = isinstance(text, bytes)
        with os.fdopen(handle, "wb" if binary else "w", encoding=None if binary else "utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private to its owner
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise BadInput(path, f"not written ({error.strerror})", "free space or fix permissions") from None
    return path


def _refused(text: str, raw: Any, kind: Any, where: str | Path, entry: str) -> BadInput:
    what, _, at = text.partition(" - at `$")
    keys: list[str] = []
    for step in re.findall(r"\[[^\]]*\]|[^.\[\]`]+", at):
        if not step.startswith("["):
            keys.append(step)
            raw, kind = raw[step], _fields(kind).get(step, Any)
            continue
        kind = _inner(kind)
        for label, element in _elements(raw):  # msgspec does not say which element: the first that cannot be converted
            try:
                msgspec.convert(element, kind)
            except msgspec.ValidationError as error:
                inside = " ".join(filter(None, (".".join(keys), label)))
                return _refused(str(error), element, kind, where, ", ".join(filter(None, (entry, inside))))
    path = ": ".join(filter(None, (entry, ".".join(keys))))
    prefix = f"{path}: " if path else ""
    if found := re.search(r"unknown field `(.+)`$", what, re.DOTALL):
        return BadInput(where, f'{prefix}unknown key "{found[1]}"', nearest(found[1], _fields(kind)))
    if found := re.search(r"missing required field `(.+)`$", what):
        return BadInput(where, f'{prefix}key "{found[1]}" is missing', f"give {found[1]}")
    if words := _words(kind):
        return BadInput(where, f'{path} = "{raw}" is unknown', nearest(str(raw), words))
    if re.match(r"Expected|Invalid|Object|Array", what):
        return BadInput(where, f"{path or 'the file'} = {raw!r:.60} cannot stand there", f"{what[0].lower()}{what[1:]}")
    wrong, _, remedy = what.partition("; ")
    return BadInput(where, f"{prefix}{wrong}", remedy)


def _elements(raw: Any) -> list[tuple[str, Any]]:
    """(what each element is called, the element) of a list or a table."""
    if isinstance(raw, Mapping):
        return [(str(key), value) for key, value in raw.items()]
    named = [next((e[k] for k in LABELS if isinstance(e, Mapping) and isinstance(e.get(k), str)), "") for e in raw]
    return [(name or str(number), e) for number, (name, e) in enumerate(zip(named, raw, strict=True), start=1)]


def _bare(kind: Any) -> list[Any]:
    """The members of a union, else the type itself; without Annotated and None."""
    if get_origin(kind) is Annotated:
        return _bare(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [bare for member in get_args(kind) if member is not type(None) for bare in _bare(member)]
    return [kind]


def _fields(kind: Any) -> dict[str, Any]:
    structs = [member for member in _bare(kind) if hasattr(member, "__struct_fields__")]
    return {f.encode_name: f.type for member in structs for f in msgspec.structs.fields(member)}


def _inner(kind: Any) -> Any:
    held = [get_args(member) for member in _bare(kind) if get_origin(member) in (list, tuple, dict)]
    return next((args[1 if args[1:] and args[1] is not Ellipsis else 0] for args in held), Any)


def _words(kind: Any) -> list[str]:
    return [str(word) for member in _bare(kind) if get_origin(member) is Literal for word in get_args(member)]
