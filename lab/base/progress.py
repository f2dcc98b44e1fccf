"""Progress of a measurement: a bar with elapsed and remaining time on a terminal, quiet lines in a log.

Everything goes to standard error, so that standard output stays for results.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lab.base.errors import plain

# In a log, steps are dropped; what a comparison took is kept, and an arm that died, what is left out, and a cluster.
KEPT = (": took ", "left out", "already measured", "measuring process", "no answer for", "cluster: ")


@dataclass(frozen=True)
class Shown:
    """What the measuring loop calls: `tell` for a step begun, `advance` for one done, `result` for what it gave."""

    tell: Callable[[str], None]
    advance: Callable[[], None]
    result: Callable[[str], None]


@contextlib.contextmanager
def shown(total: int, quiet: bool = False) -> Iterator[Shown]:
    """How to show `total` steps here: a bar when standard error is a terminal; `quiet`: no bar and no results."""
    if quiet or not sys.stderr.isatty():
        yield Shown(
            tell=lambda line: print(line, file=sys.stderr, flush=True) if any(k in line for k in KEPT) else None,
            advance=lambda: None,
            result=lambda line: None if quiet else print(line, flush=True),
        )
        return
    from rich import console, markup, progress

    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn())
    times = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
    screen = console.Console(file=getattr(sys.stderr, "raw", sys.stderr))  # a bar is drawn by control characters
    with progress.Progress(*columns, *times, console=screen) as bar:
        task = bar.add_task("starting", total=total)
        yield Shown(
            tell=lambda line: bar.update(task, description=markup.escape(plain(line[-60:]))),
            advance=lambda: bar.advance(task),
            result=lambda line: bar.console.print(plain(line), highlight=False, markup=False),
        )
