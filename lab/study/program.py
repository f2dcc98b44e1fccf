"""A program under test: run once, its output as bytes, and one sentence where it gave none."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

TIMEOUT_S = 600.0


class Failed(Exception):
    """The program gave no answer; its text says why."""


def output(words: Sequence[str], timeout_s: float = TIMEOUT_S) -> bytes:
    """What the program printed; raises Failed when it cannot be run, takes too long or exits with an error."""
    try:
        done = subprocess.run(words, capture_output=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise Failed(f"no answer within {timeout_s:g} s") from None
    except OSError as problem:
        raise Failed(f"cannot be run ({problem.strerror})") from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise Failed(f"exited with {done.returncode}" + (f": {last[0]}" if last else ""))
    return done.stdout
