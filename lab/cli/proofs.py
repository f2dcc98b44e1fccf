"""`lab identity` and `lab crossbleed`: is what two builds, or one batch, say the same."""

from __future__ import annotations

from argparse import Namespace

from lab.base.errors import BadInput
from lab.cli import show


def identity(arguments: Namespace) -> int:
    """0 when every cell is identical, 1 otherwise."""
    from lab.study import identity

    cells = identity.from_plan(arguments.plan)
    show(arguments.json, lambda: identity.to_json(cells), lambda: identity.render(cells))
    return int(not identity.passed(cells))


def crossbleed(arguments: Namespace) -> int:
    """0 when every batch is clean, 1 otherwise."""
    from lab.study import crossbleed

    try:
        sizes = [int(word) for word in arguments.np.split(",") if word.strip()]
    except ValueError:
        raise BadInput("--np", f'"{arguments.np}" is not a list of numbers', "write 1,2,3,4") from None
    recall = crossbleed.by_command(arguments.command, arguments.prompt, arguments.timeout)
    batches = crossbleed.run(recall, sizes, arguments.seed)
    show(arguments.json, lambda: crossbleed.to_json(batches), lambda: crossbleed.render(batches))
    return int(any(batch.status != "clean" for batch in batches))
