"""One test over many things, which names every one that fails.

pytest makes an item of each value of a parametrised test, and an item costs a few milliseconds in every process that
collects, runs or reports it: more than the question itself where 130 recorded cases are asked nine questions. Such a
test is a loop here. It does not stop at the first failure, and its message begins with the name of what failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest


def over(things: Mapping[str, tuple[Any, ...]]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Decorates a test of some arguments: it is called with each of `things`, by name, and all that fail are told."""

    def made(test: Callable[..., None]) -> Callable[[], None]:
        def loop() -> None:
            failed = []
            for name, arguments in things.items():
                try:
                    test(*arguments)
                # As in a test of its own, whatever is raised is that one's failure; what pytest.raises misses, too.
                except (Exception, pytest.fail.Exception) as error:
                    failed.append(
                        f"{name}: {'' if isinstance(error, AssertionError) else type(error).__name__} {error}"
                    )
            assert things, "there is nothing to ask"
            assert not failed, f"{len(failed)} of {len(things)} fail:\n" + "\n".join(failed)

        # Not functools.wraps: pytest would look behind it for the arguments and take them for fixtures.
        loop.__name__, loop.__doc__, loop.__module__ = test.__name__, test.__doc__, test.__module__
        return loop

    return made


def numbered(cases: Sequence[tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Cases without a name of their own, for `over`: their number, and what they hold that has words."""
    return {
        f"{number} {' | '.join(str(part) for part in case if not callable(part))}": case
        for number, case in enumerate(cases, start=1)
    }
