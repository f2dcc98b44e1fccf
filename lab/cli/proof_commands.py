"""`lab identity` and `lab crossbleed`: their arguments, and what they print."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

from lab.base.console import print_json
from lab.base.errors import BadInput

PROMPT = "The code word is {word}. Repeat the code word and nothing else."


def add(command: Callable[..., ArgumentParser]) -> None:
    """Add the two commands; `command(name, run, text)` makes a parser."""
    identity = command("identity", run_identity, "do two builds give the same token ids, prompt by prompt")
    identity.add_argument("plan", type=Path, help="TOML: reference, budgets, [[profile]] command, [[suite]] prompts")

    bleed = command("crossbleed", run_crossbleed, "does a sequence of a batch ever say another one's code word")
    bleed.add_argument("--np", default="1,2,3,4,6,7", help="batch sizes (default 1,2,3,4,6,7)")
    bleed.add_argument("--seed", type=int, default=0, help="of the code words")
    bleed.add_argument("--prompt", default=PROMPT, help="a sequence's prompt; {word} is its code word")
    bleed.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds a batch may take (600)")
    bleed.add_argument("command", nargs="+", help="behind --: the program; {prompts_file} in it is the batch")


def run_identity(arguments: Namespace) -> int:
    """0 when every cell is identical, 1 otherwise."""
    from lab.study import identity

    cells = identity.from_plan(arguments.plan)
    if arguments.json:
        print_json(identity.to_json(cells))
    else:
        print(identity.render(cells))
    return int(not identity.passed(cells))


def run_crossbleed(arguments: Namespace) -> int:
    """0 when every batch is clean, 1 otherwise."""
    from lab.study import crossbleed

    try:
        sizes = [int(word) for word in arguments.np.split(",") if word.strip()]
    except ValueError:
        raise BadInput("--np", f'"{arguments.np}" is not a list of numbers', "write 1,2,3,4") from None
    recall = crossbleed.by_command(arguments.command, arguments.prompt, arguments.timeout)
    batches = crossbleed.run(recall, sizes, arguments.seed)
    if arguments.json:
        print_json(crossbleed.to_json(batches))
    else:
        print(crossbleed.render(batches))
    return int(any(batch.status != "clean" for batch in batches))
