"""The commands: arguments in, one call of a room, lines out. No arithmetic lives here.

In: sys.argv. Out: text or JSON, exit status 0 / 1 / 2 (done, a check failed, bad input).
Door: `main.main`; `main.COMMANDS` lists them all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lab.base.console import print_json

MSGSPEC = "pip install 'msgspec>=0.20,<0.23', or its wheel"  # what a machine needs that does no more than measure


def show(as_json: bool, value: Callable[[], Any], text: Callable[[], str]) -> None:
    """Print the JSON for programs or the text for people; only what is printed is computed."""
    if as_json:
        print_json(value())
    else:
        print(text())
