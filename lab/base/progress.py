"""Progress of a measurement: a bar with elapsed and remaining time on a terminal, quiet lines in a log.

Everything goes to standard error, so that standard output stays for results.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Protocol


class Shown(Protocol):
    """What the measuring loop tells: a step begun, a comparison done, a result."""

    def tell(self, line: str) -> None:
        """A step has begun, or something is worth knowing."""

    def advance(self) -> None:
        """A comparison is done."""

    def result(self, line: str) -> None:
        """What an arm took, or why it has no time."""


class Lines:
    """For a log: results and what is worth a line, no steps."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet

    def tell(self, line: str) -> None:
        """Steps are dropped; lines about an arm that died or a comparison left out are kept."""
        if any(word in line for word in ("left out", "already measured", "measuring process", "no answer for")):
            print(line, file=sys.stderr, flush=True)

    def advance(self) -> None:
        """Nothing to move in a log."""

    def result(self, line: str) -> None:
        """One line on standard output, unless the output is JSON."""
        if not self.quiet:
            print(line, flush=True)


class Bar:
    """For a terminal: rich's bar with the current step, elapsed and remaining time."""

    def __init__(self, progress: Any, task: Any) -> None:
        self.progress, self.task = progress, task

    def tell(self, line: str) -> None:
        """The step at hand."""
        self.progress.update(self.task, description=line[-60:])

    def advance(self) -> None:
        """One comparison done."""
        self.progress.advance(self.task)

    def result(self, line: str) -> None:
        """A line above the bar."""
        self.progress.console.print(line, highlight=False)


@contextlib.contextmanager
def shown(total: int, quiet: bool = False) -> Iterator[Shown]:
    """How to show `total` comparisons here: a bar when standard error is a terminal and `quiet` is off."""
    if quiet or not sys.stderr.isatty():
        yield Lines(quiet)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        yield Bar(progress, progress.add_task("starting", total=total))
