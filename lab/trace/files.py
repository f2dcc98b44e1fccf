"""Any profile by its content, whatever its name: the first bytes and, for text, the first structure decide.

What cannot be read is refused with what it is and how to turn it into something that can.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from lab.base.errors import BadInput
from lab.trace.model import Trace

REPORTS = {".nsys-rep": "nsys export --type sqlite", ".qdrep": "nsys export --type sqlite", ".ncu-rep": "ncu --csv -i"}
KINDS = "an nsys SQLite export, nsys stats CSV, a PyTorch profiler JSON or ncu --csv"


def read(path: Path | str) -> Trace:
    """The trace of any file that this package reads.

    Raises BadInput, always one line, for a file that is missing, empty, cut off, corrupt, or of another kind.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise BadInput(path, "is a folder", "give a file")
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise BadInput(path, f"cannot be read ({error.strerror})", "check the path") from None
    if not head:
        raise BadInput(path, "is empty", "export it again")
    if head == b"SQLite format 3\0":
        from lab.trace import nsys

        return nsys.read(path)
    if head.startswith(b"PAR1"):
        from lab.trace import stored

        return stored.load(path)
    if path.suffix in REPORTS:
        raise BadInput(path, f"is a {path.suffix} report, which only its tool reads", f"run: {REPORTS[path.suffix]}")
    return read_text(path, _text(path, head))


def read_text(path: Path, text: str) -> Trace:
    """The trace in a text file's content: JSON or CSV."""
    from lab.trace import kineto, tables

    first = text.lstrip("\ufeff \t\r\n")[:1]
    if first in ("{", "["):
        return kineto.read(path, text.lstrip("\ufeff"))
    found = tables.read(path, text.lstrip("\ufeff"))
    if found is None:
        raise BadInput(path, "is no profile that is known here", f"give {KINDS}")
    return found


def _text(path: Path, head: bytes) -> str:
    try:
        raw = path.read_bytes()
        if head.startswith(b"\x1f\x8b"):
            raw = gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(path, f"is not complete gzip ({error})", "copy it again") from None
    if raw[:16].startswith(b"SQLite format 3"):
        raise BadInput(path, "is a compressed SQLite file", "unpack it first: gunzip")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise BadInput(path, "is neither SQLite nor text", f"give {KINDS}") from None
