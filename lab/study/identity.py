"""Do two builds say the same, token for token: profile x suite x prompt x budget under one contract.

A profile is a way to produce tokens (a command line, or a callable in a test or a notebook). One profile is the
reference. Every cell runs the reference, the reference again, and the candidate, in this order:

    identical   both runs of the reference and the candidate agree exactly
    diverged    the reference agrees with itself and the candidate does not: the first differing index is told
    unstable    the reference differs from itself, so nothing can be said about the candidate
    degenerate  they agree, but every token is the same one: what NaN logits give (argmax of NaN is token 0)
    empty       they agree on no tokens at all
    short       they agree, but on fewer tokens than the budget, and the last one is no stop token
    failed      a command exited with an error, timed out or printed no token ids

Only "identical" passes. Agreement on nothing and agreement of two broken builds are the two ways in which such a
harness has called a wrong build right, so they are words of their own. Token ids are compared, never text: two
consoles may print the same ids differently, and the reverse. What this gives up: tolerance. A build that may differ in
rounding belongs under a KL gate, not here.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from lab.base import files
from lab.base.console import show
from lab.base.errors import BadInput, refuse_unknown
from lab.base.files import Positive, Text

Contract = Literal["tokens", "bytes"]
Status = Literal["identical", "diverged", "unstable", "degenerate", "empty", "short", "failed"]

# (prompt, budget in tokens) -> token ids, or bytes as ids 0 to 255 under the contract "bytes".
Produce = Callable[[str, int], Sequence[int]]


@dataclass(frozen=True)
class Cell:
    """One comparison.

    status:   a word of the file's docstring.
    first:    index of the first differing token, -1 when there is none.
    expected: the reference's token there (None behind its end); got: the candidate's.
    length:   tokens of the reference.
    message:  why a cell failed, "" otherwise.
    """

    profile: str
    suite: str
    prompt: int
    budget: int
    contract: str
    status: Status = "identical"
    first: int = -1
    expected: int | None = None
    got: int | None = None
    length: int = 0
    message: str = ""

    def __str__(self) -> str:
        where = f"{self.profile} | {self.suite}[{self.prompt}] | budget {self.budget}: {self.status}"
        if self.first >= 0:
            ends = ["the end" if value is None else f"{value}" for value in (self.expected, self.got)]
            where += f" at {self.contract[:-1]} {self.first} of {self.length}: expected {ends[0]}, got {ends[1]}"
        return where + (f" ({self.message})" if self.message else "")


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """The first index at which two sequences differ (the shorter one's end counts), -1 when they are equal."""
    return next((index for index, (left, right) in enumerate(zip_longest(a, b)) if left != right), -1)


def compare(cell: Cell, reference: Produce, candidate: Produce, prompt: str, stop: Iterable[int] = ()) -> Cell:
    """The cell with its status and first divergence."""
    budget = cell.budget
    try:
        expected, again, got = reference(prompt, budget), reference(prompt, budget), candidate(prompt, budget)
    except Failed as problem:
        return replace(cell, status="failed", message=str(problem))
    cell = replace(cell, length=len(expected))
    for other in (again, got):
        if (at := first_difference(expected, other)) >= 0:
            left, right = (x[at] if at < len(x) else None for x in (expected, other))
            status: Status = "unstable" if other is again else "diverged"
            return replace(cell, status=status, first=at, expected=left, got=right)
    if not expected:
        return replace(cell, status="empty")
    if len(expected) > 1 and len(set(expected)) == 1:
        return replace(cell, status="degenerate")
    ended_early = len(expected) < budget and expected[-1] not in set(stop)
    return replace(cell, status="short") if ended_early else cell


def run(
    profiles: Mapping[str, Produce],
    reference: str,
    suites: Mapping[str, Sequence[str]],
    budgets: Sequence[int],
    contract: str = "tokens",
    stop: Iterable[int] = (),
) -> list[Cell]:
    """Every cell of every profile but the reference, in the order given.

    profiles: name -> how it produces tokens. suites: name -> prompts. budgets: tokens to produce, each at least 1.
    stop:     token ids that may end a reply before its budget.
    Raises BadInput for an unknown reference or contract, and for a run that would compare nothing.
    """
    for what, word, known in (("profile", reference, list(profiles)), ("contract", contract, get_args(Contract))):
        refuse_unknown("identity", what, word, known)
    if len(profiles) < 2 or not any(suites.values()) or not budgets or min(budgets) < 1:
        shape = f"{len(profiles)} profiles, {sum(map(len, suites.values()))} prompts, budgets {list(budgets)}"
        raise BadInput("identity", f"{shape} compare nothing", "give two profiles, a prompt and a budget of 1 or more")
    stop = tuple(stop)
    return [
        compare(Cell(name, suite, index, budget, contract), profiles[reference], produce, prompt, stop)
        for name, produce in profiles.items()
        if name != reference
        for suite, prompts in suites.items()
        for index, prompt in enumerate(prompts)
        for budget in budgets
    ]


TIMEOUT_S = 600.0


class Failed(Exception):
    """A program gave no answer; its text says why."""


def output(command: Sequence[str], text: str, file: str, values: Mapping[str, str], timeout_s: float) -> bytes:
    """What a program printed, asked with `text` in a file.

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


def token_ids(text: str) -> list[int]:
    """Token ids in what a program printed: a JSON list, a JSON object with `tokens` or `token_ids` (JSON lines too), or
    integers between blanks and commas. Raises Failed when it is none of these."""
    found: list[int] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if re.fullmatch(r"[\d\s,]+", line):
            found += [int(word) for word in re.findall(r"\d+", line)]
            continue
        try:
            value = json.loads(line)
            value = value.get("tokens", value.get("token_ids")) if isinstance(value, dict) else value
            found += msgspec.convert(value, list[int])
        except (json.JSONDecodeError, msgspec.ValidationError):
            raise Failed(f"not token ids: {line[:60]}") from None
    return found


def by_command(command: Sequence[str], contract: str, timeout_s: float = TIMEOUT_S) -> Produce:
    """A profile that runs a program: {prompt}, {prompt_file} and {budget} in its arguments are filled in.

    Under "tokens" the program prints ids as `token_ids` reads them; under "bytes" its output is compared as it is.
    """

    def produce(prompt: str, budget: int) -> Sequence[int]:
        values = {"{prompt}": prompt, "{budget}": str(budget)}
        try:
            printed = output(command, prompt, "{prompt_file}", values, timeout_s)
        except Failed as problem:
            raise Failed(f"{command[0]}: {problem}") from None
        return list(printed) if contract == "bytes" else token_ids(printed.decode(errors="replace"))

    return produce


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A build under its name, by the command that produces tokens."""

    name: Text
    command: Annotated[tuple[str, ...], Meta(min_length=1)]


class Suite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts under a name."""

    name: Text
    prompts: Annotated[tuple[str, ...], Meta(min_length=1)]


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A TOML plan; see `run` for what each key means."""

    reference: str
    budgets: tuple[int, ...]
    profile: tuple[Profile, ...] = ()
    suite: tuple[Suite, ...] = ()
    contract: Contract = "tokens"
    stop: tuple[int, ...] = ()
    timeout_s: Positive = TIMEOUT_S


def from_plan(path: Path) -> list[Cell]:
    """Run a TOML plan; raises BadInput with the file and the key for a plan that cannot be run."""
    plan = files.read(path, Plan)
    files.once(path, "profile", (p.name for p in plan.profile))
    files.once(path, "suite", (s.name for s in plan.suite))
    profiles = {p.name: by_command(p.command, plan.contract, plan.timeout_s) for p in plan.profile}
    suites = {s.name: s.prompts for s in plan.suite}
    return run(profiles, plan.reference, suites, plan.budgets, plan.contract, plan.stop)


def passed(cells: Sequence[Cell]) -> bool:
    """True when there is a cell and every one is identical."""
    return bool(cells) and all(cell.status == "identical" for cell in cells)


def to_json(cells: Sequence[Cell]) -> dict[str, Any]:
    """{"passed": bool, "failures": int, "cells": [...]} for programs."""
    failures = sum(cell.status != "identical" for cell in cells)
    return {"passed": passed(cells), "failures": failures, "cells": [asdict(cell) for cell in cells]}


def render(cells: Sequence[Cell]) -> str:
    """A line per cell that does not pass and a count per status."""
    counts = ", ".join(f"{n} {status}" for status, n in sorted(Counter(cell.status for cell in cells).items()))
    return "\n".join([*(str(c) for c in cells if c.status != "identical"), f"{len(cells)} cells: {counts}"])


def command(arguments: Namespace) -> int:
    """`lab identity`: 0 when every cell is identical, 1 otherwise."""
    cells = from_plan(arguments.plan)
    show(arguments.json, lambda: to_json(cells), lambda: render(cells))
    return int(not passed(cells))
