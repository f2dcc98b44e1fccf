"""When a card's gate last changed, by git: two calls for all cards of a folder, once a process."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from lab.base.errors import REPOSITORY
from lab.card import phases
from lab.card.phases import Card


def changed_since(card: Card, started: Iterable[str]) -> str:
    """ "" or "gate changed after measuring": the commit that last changed it is younger than the first of these."""
    starts = [datetime.fromisoformat(stamp) for stamp in started if stamp]
    when = gate_commit(card, min(starts)) if starts else None
    if when and when[1] > min(starts):
        return f"gate changed after measuring: commit {when[0]} is younger than the samples"
    return ""


def gate_commit(card: Card, since: datetime | None = None) -> tuple[str, datetime] | None:
    """The commit that last changed the card's gate and its date; None outside git or while the card is uncommitted.

    since: a date from which on alone it matters: the first older version with this gate ends the search.
    """
    path = card.path.resolve()
    if not path.is_relative_to(REPOSITORY):
        return None
    folder = phases.FOLDER if path.is_relative_to(phases.FOLDER) else path.parent
    last: tuple[str, datetime] | None = None
    for commit, date, text in _versions(REPOSITORY, folder).get(path.relative_to(REPOSITORY).as_posix(), ()):
        if _gate_hash(text) != card.gate_hash:
            break
        last = commit, date
        if since is not None and date <= since:
            break
    return last


@cache
def _versions(repository: Path, folder: Path) -> dict[str, list[tuple[str, datetime, str]]]:
    """path -> every committed version of it (commit, date, text), newest first and across renames.

    Two calls of git for all cards of a folder: one walks the history, one prints the files.
    """
    try:
        top = folder.relative_to(repository).as_posix()
        log = _git(repository, "log", "--raw", "-M", "--no-abbrev", "--format=%H %cI", "--", top).decode()
        history: dict[str, list[tuple[str, datetime, str]]] = {}
        now: dict[str, str] = {}  # the name that a path had at the commit being read -> its name today
        commit, date = "", datetime.min
        for line in filter(None, log.split("\n")):
            if not line.startswith(":"):
                commit, stamp = line.split(" ", 1)
                date = datetime.fromisoformat(stamp).astimezone(UTC)
                continue
            fields, *names = line.split("\t")
            blob, change = fields.split(" ")[3:5]
            name = now.get(names[-1], names[-1])
            if change[0] == "R":
                now[names[0]] = name
            if change[0] != "D":
                history.setdefault(name, []).append((commit[:7], date, blob))
        texts = _blobs(repository, sorted({blob for versions in history.values() for _, _, blob in versions}))
    except (OSError, ValueError, subprocess.CalledProcessError):
        return {}
    return {name: [(c, d, texts[blob]) for c, d, blob in versions] for name, versions in history.items()}


def _blobs(repository: Path, blobs: list[str]) -> dict[str, str]:
    raw = _git(repository, "cat-file", "--batch", given="".join(f"{blob}\n" for blob in blobs))
    texts, at = {}, 0
    for blob in blobs:
        end = raw.index(b"\n", at)
        size = int(raw[at:end].split()[2])
        texts[blob] = raw[end + 1 : end + 1 + size].decode()
        at = end + 1 + size + 1
    return texts


def _git(repository: Path, *arguments: str, given: str = "") -> bytes:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, capture_output=True, check=True, input=given.encode()).stdout


@cache
def _gate_hash(text: str) -> str | None:
    try:
        return phases.gate_hash(tomllib.loads(text))
    except tomllib.TOMLDecodeError:
        return None
