"""What the families would launch, asked in the process that runs tests."""

import functools

from lab.check import families


def here() -> None:
    """Ask the families in this process what they would launch: a worker has them all, a process for each takes seconds.

    That is ten seconds of processor time in the first run after a change of a kernel, whose answers nobody kept yet.
    """
    apart, own = families.every, (families.FOLDER, families.load, families.names)

    @functools.cache
    def every(capability: tuple[int, int], *shaped: str) -> dict[str, families.Launches]:
        if own != (families.FOLDER, families.load, families.names):  # a test's own
            return apart.__wrapped__(capability, *shaped)
        asked = shaped[:1] or own[2]()
        return {name: families.described(own[1](name), capability, *shaped[1:]) for name in asked}

    families.every = every
