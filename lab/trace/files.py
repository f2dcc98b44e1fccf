"""Any profile by its content, whatever its name: the first bytes and, for text, the first structure decide."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import re
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lab.base import files
from lab.base.errors import BadInput
from lab.trace.model import Trace

REPORTS = {".nsys-rep": "nsys export --type sqlite", ".qdrep": "nsys export --type sqlite", ".ncu-rep": "ncu --csv -i"}
SQLITE, GZIP = b"SQLite format 3\0", b"\x1f\x8b"
COMPRESSED = {GZIP: "gz", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"]\0\0": "xz"}  # what a packed tar begins with
LARGEST = 1 << 30  # bytes of text, which take some five times as much memory
JSON = re.compile(rb"\s*(?:\{|\[\s*(?:[{\]]|$))")
UNPACK = "gunzip, unzip, tar"
PACKED = 100  # times its size that a compressed profile may have: real ones have 5 to 30, a bomb 1000
KINDS = "an nsys SQLite export, nsys stats, a PyTorch profiler JSON, rocprof JSON or CSV, xplane.pb or ncu --csv"


def read(path: Path | str, most: int = 0) -> Trace:
    """The trace of any file that this package reads. most: bytes that it may unpack to, if not as PACKED and LARGEST.

    Raises BadInput, always one line, for a file that is missing, empty, cut off, corrupt, or of another kind.
    """
    path = Path(path)
    try:
        found = _read(path, most)
    except BadInput as refused:
        if refused.where != "trace":
            raise
        raise BadInput(path, refused.what, refused.remedy) from None  # of a column, which does not know its file
    if not any(map(len, (*found.activities, found.ranges))):
        raise BadInput(path, "holds neither GPU activity nor a range", "record it again with the CUDA activity")
    return found


def read_all(path: Path | str, most: int = 0) -> list[Trace]:
    """The traces of a file: one, or those in an archive (zip, tar, compressed or not), which are the ranks of a run.

    What else an archive holds is named in a warning. Raises BadInput as `read` does, and for an archive without any.
    """
    path = Path(path)
    archive = _archive(path) if path.is_file() else None
    if archive is None:
        return [read(path, most)]
    found, others = list[Trace](), list[str]()
    with tempfile.TemporaryDirectory(prefix="killgate-") as folder:
        try:
            for i, (name, member) in enumerate(_members(archive)):
                target = Path(folder) / f"{i}{''.join(Path(name).suffixes[-2:])}"
                _unpack(path, member, target, most)
                try:
                    found.append(read(target, most).but(source=Path(name).name))
                except BadInput:
                    others.append(Path(name).name)
                target.unlink()
        except (OSError, EOFError, ValueError, RuntimeError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
            raise BadInput(path, f"is no whole archive ({error})", "copy it again") from None
    if not found:
        raise BadInput(path, "is an archive without a profile that is known here", f"give {KINDS}")
    if others:
        found[0] = found[0].but(warn=[f"{len(others)} files of {path.name} are no profiles: {', '.join(others[:5])}"])
    return found


def _archive(path: Path) -> zipfile.ZipFile | tarfile.TarFile | None:
    """A zip or tar archive, None for another file.

    A tar's compression is told by its first bytes: trying every one, tarfile takes zeros for endless empty streams.
    """
    with contextlib.suppress(OSError, EOFError, zlib.error, tarfile.TarError):
        if zipfile.is_zipfile(path):
            return zipfile.ZipFile(path)
        with path.open("rb") as file:
            head = file.read(16)
        way = next((way for begin, way in COMPRESSED.items() if head.startswith(begin)), "")
        return tarfile.open(path, f"r:{way}")  # type: ignore[call-overload]
    return None


def _members(archive: zipfile.ZipFile | tarfile.TarFile) -> Iterator[tuple[str, IO[bytes]]]:
    with archive:
        if isinstance(archive, zipfile.ZipFile):
            for name in sorted(m.filename for m in archive.infolist() if not m.is_dir()):
                with archive.open(name) as member:
                    yield name, member
        else:
            for one in sorted((m for m in archive.getmembers() if m.isfile()), key=lambda m: m.name):
                if (content := archive.extractfile(one)) is not None:
                    yield one.name, content


def _unpack(path: Path, packed: IO[bytes] | gzip.GzipFile, target: Path, most: int) -> None:
    """Write what is packed to a file; raises BadInput for more than it may unpack to."""
    size, most = 0, most or PACKED * path.stat().st_size
    with target.open("wb") as file:
        while part := packed.read(1 << 20):
            size += file.write(part)
            if size > most:
                what = f"unpacks to more than {most} bytes, {most // path.stat().st_size} times its size"
                raise BadInput(path, what, f"give --unpack MB if it is yours, or unpack it: {UNPACK}")


def _read(path: Path, most: int) -> Trace:
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
        return _from_packed(path, most)
    from lab.trace import kineto, rocm, tables, xplane

    if archive := _archive(path):
        archive.close()
        raise BadInput(path, "is an archive", "give it to `lab trace`, or unpack it and give one file")
    content = unpacked(path, most)
    if xplane.is_space(content):
        return xplane.read(path, content)
    if JSON.match(content):
        reader = rocm if b'"rocprofiler-sdk-tool"' in content[:1000] else kineto
        only = [content]
        del content  # so that the reader can let go of it
        return reader.read(path, only.pop())
    found = tables.read(path, text(path, content))
    if found is None:
        raise BadInput(path, "is no profile that is known here", f"give {KINDS}")
    return found


def _begin(path: Path) -> bytes:
    """The first bytes in a compressed file; none where it is broken, which `text` says better."""
    with contextlib.suppress(OSError, EOFError, zlib.error), gzip.open(path) as unpacking:
        return unpacking.read(16)
    return b""


def _from_packed(path: Path, most: int) -> Trace:
    """The trace of a compressed SQLite export, unpacked beside the system's temporary files while it is read."""
    from lab.trace import nsys

    with tempfile.TemporaryDirectory(prefix="killgate-") as folder, gzip.open(path) as unpacking:
        target = Path(folder) / path.stem
        try:
            _unpack(path, unpacking, target, most)
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


def unpacked(path: Path, most: int = 0) -> bytes:
    """A file's content without compression and byte order mark; raises BadInput."""
    try:
        raw = files.read_bytes(path, most or LARGEST)
        if raw.startswith(GZIP):
            most = most or max(min(LARGEST, PACKED * len(raw)), 1 << 20)
            of = f", unpacked from {len(raw)} (--unpack MB)"
            with gzip.open(io.BytesIO(raw)) as unpacking:
                raw = files.up_to(path, unpacking, most, of)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(path, f"is not complete gzip ({error})", "copy it again") from None
    return raw.removeprefix(codecs.BOM_UTF8)
