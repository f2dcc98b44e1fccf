"""Builds that are made once and shared by processes: a folder for each, named by the hash of all that went into it.

They lie under $KILLGATE_CACHE, else in the user's cache folder, and may be deleted at any time. A build is made in a
folder beside its place and renamed, so that no process sees half of one; a second process that wants the same build at
the same time waits for the first.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path


def folder() -> Path:
    """Where builds are kept."""
    chosen = os.environ.get("KILLGATE_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "killgate"


def kept(name: str, parts: Iterable[str], make: Callable[[Path], None]) -> Path:
    """The folder that `make(folder)` filled for these parts, from the cache or made now; what `make` raises passes on.

    name:  for people, e.g. "wgmma_gemm-sm_90a".
    parts: every text that the build depends on: sources, headers, options, the compiler's version.
    """
    place = folder() / f"{name}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}"
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{place}.lock", "w") as lock:
        _wait(lock.fileno())
        if not place.exists():
            partial = Path(tempfile.mkdtemp(dir=place.parent, prefix=f"{place.name}."))
            try:
                make(partial)
                partial.rename(place)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    return place


def _wait(descriptor: int) -> None:
    """For the lock of this file, which its owner's death frees; where there is none, two may build side by side."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX)
