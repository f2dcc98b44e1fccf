"""Any profile by its content, whatever its name: the first bytes and, for text, the first structure decide."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import tempfile
import zlib
from pathlib import Path

from lab.base import files
from lab.base.errors import BadInput
from lab.trace.model import Trace

REPORTS = {".nsys-rep": "nsys export --type sqlite", ".qdrep": "nsys export --type sqlite", ".ncu-rep": "ncu --csv -i"}
SQLITE, GZIP = b"SQLite format 3\0", b"\x1f\x8b"
LARGEST = 1 << 30  # bytes of text, which take some five times as much memory
PACKED = 100  # times its size that a compressed profile may have: real ones have 5 to 30, a bomb 1000
KINDS = "an nsys SQLite export, nsys stats CSV, a PyTorch profiler JSON, rocprofv3 JSON or ncu --csv"


def read(path: Path | str) -> Trace:
    """The trace of any file that this package reads.

    Raises BadInput, always one line, for a file that is missing, empty, cut off, corrupt, or of another kind.
    """
    path = Path(path)
    try:
        found = _read(path)
    except BadInput as refused:
        if refused.where != "trace":
            raise
        raise BadInput(path, refused.what, refused.remedy) from None  # of a column, which does not know its file
    if not any(map(len, (*found.activities, found.ranges))):
        raise BadInput(path, "holds neither GPU activity nor a range", "record it again with the CUDA activity")
    return found


def _read(path: Path) -> Trace:
    try:
        if path.is_dir():
            raise BadInput(path, "is a folder", "give a file")
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise BadInput(path, f"cannot be read ({error.strerror})", "check the path") from None
    if not head:
        raise BadInput(path, "is empty", "export it again")
    if head == SQLITE:
        from lab.trace import nsys

        return nsys.read(path)
    if head.startswith(b"PAR1"):
        from lab.trace import stored

        return stored.load(path)
    if path.suffix in REPORTS:
        raise BadInput(path, f"is a {path.suffix} report, which only its tool reads", f"run: {REPORTS[path.suffix]}")
    if head.startswith(GZIP) and _begin(path) == SQLITE:
        return _from_packed(path)
    from lab.trace import kineto, rocm, tables

    content = unpacked(path)
    if content[:1000].lstrip()[:1] in (b"{", b"["):
        return (rocm if b'"rocprofiler-sdk-tool"' in content[:1000] else kineto).read(path, content)
    found = tables.read(path, text(path, content))
    if found is None:
        raise BadInput(path, "is no profile that is known here", f"give {KINDS}")
    return found


def _begin(path: Path) -> bytes:
    """The first bytes in a compressed file; none where it is broken, which `text` says better."""
    with contextlib.suppress(OSError, EOFError, zlib.error), gzip.open(path) as unpacking:
        return unpacking.read(16)
    return b""


def _from_packed(path: Path) -> Trace:
    """The trace of a compressed SQLite export, unpacked beside the system's temporary files while it is read."""
    from lab.trace import nsys

    most, size = PACKED * path.stat().st_size, 0
    with tempfile.TemporaryDirectory(prefix="killgate-") as folder, gzip.open(path) as unpacking:
        target = Path(folder) / path.stem
        try:
            with target.open("wb") as file:
                while part := unpacking.read(1 << 20):
                    size += file.write(part)
                    if size > most:
                        what = f"unpacks to more than {PACKED} times its size"
                        raise BadInput(path, what, "unpack it yourself if it is yours: gunzip")
        except (OSError, EOFError, zlib.error) as error:
            raise BadInput(path, f"is not complete gzip ({error})", "copy it again") from None
        try:
            return nsys.read(target).but(source=path.name)
        except BadInput as refused:
            raise BadInput(path, refused.what, refused.remedy) from None


def text(path: Path, content: bytes | None = None) -> str:
    """A text file's content, also compressed; raises BadInput."""
    try:
        return (unpacked(path) if content is None else content).decode("utf-8")
    except UnicodeDecodeError:
        raise BadInput(path, "is neither SQLite nor text", f"give {KINDS}") from None


def unpacked(path: Path) -> bytes:
    """A file's content without compression and byte order mark; raises BadInput."""
    try:
        raw = files.read_bytes(path, LARGEST)
        if raw.startswith(GZIP):
            most, of = max(min(LARGEST, PACKED * len(raw)), 1 << 20), f", unpacked from {len(raw)}"
            with gzip.open(io.BytesIO(raw)) as unpacking:
                raw = files.up_to(path, unpacking, most, of)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(path, f"is not complete gzip ({error})", "copy it again") from None
    return raw.removeprefix(codecs.BOM_UTF8)
