"""A card directory of one's own, outside the repository: cards (*.toml), devices (devices.toml) and rows (profiles/).

It is named by `--cards DIR`, else by KILLGATE_CARDS; a card that is given by its path brings the folder that it is in:
to a command while it runs (`used`), to a notebook until another one is given (`bring`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from lab.base.errors import REPOSITORY, BadInput

VARIABLE = "KILLGATE_CARDS"
DEVICES = "devices.toml"


def folder() -> Path | None:
    """The card directory in use, None without one; raises BadInput for one that is not there."""
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    if not Path(named).is_dir():
        raise BadInput("--cards", f"{named} is no folder", f"make it, or mend {VARIABLE}")
    return Path(named)


def profiles(house: Path = REPOSITORY / "profiles") -> list[Path]:
    """The folders that rows are read from, each once; the last one is where they are written."""
    mine = [place / "profiles" for place in [folder()] if place]
    return [house, *(path for path in mine if path.resolve() != house.resolve())]


def _folder_of(cards: Iterable[str]) -> str:
    """That of the first card given by a path outside data/, "" without one."""
    paths = [Path(card).absolute().parent for card in cards if card.endswith(".toml")]
    return next((str(path) for path in paths if not path.is_relative_to(REPOSITORY / "data")), "")


_brought = [""]


def bring(card: str) -> None:
    """From now on the card directory is that of a card given by its path, unless the environment names another."""
    if (place := _folder_of([card])) and os.environ.get(VARIABLE, "") in ("", _brought[0]):
        os.environ[VARIABLE] = _brought[0] = place


@contextlib.contextmanager
def used(named: str | None, cards: Iterable[str] = ()) -> Iterator[None]:
    """Inside, the card directory is `named`, else as the environment says, else that of a card given by its path."""
    before = os.environ.get(VARIABLE)
    if chosen := named or before or _folder_of(cards):
        os.environ[VARIABLE] = chosen
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        os.environ.update({VARIABLE: before} if before is not None else {})
