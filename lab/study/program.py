"""A program under test: run once, its output as bytes, and one sentence where it gave none."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

TIMEOUT_S = 600.0


class Failed(Exception):
    """The program gave no answer; its text says why."""


def output(command: Sequence[str], text: str, file: str, values: Mapping[str, str], timeout_s: float) -> bytes:
    """What the program printed, asked with `text` in a file.

    file: what stands for the file's path in the command's words; values: what stands there for other words.
    Raises Failed when it cannot be run, takes too long or exits with an error.
    """
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as asked:
        asked.write(text)
        asked.flush()
        values = {**values, file: asked.name}
        # All at once, so that a prompt which holds {budget} stays as it is.
        names = re.compile("|".join(map(re.escape, values)))
        words = [names.sub(lambda found: values[found[0]], word) for word in command]
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
