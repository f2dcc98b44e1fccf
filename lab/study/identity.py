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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.base.errors import BadInput, nearest

CONTRACTS = ("tokens", "bytes")
TIMEOUT_S = 600.0

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
    status: str
    first: int = -1
    expected: int | None = None
    got: int | None = None
    length: int = 0
    message: str = ""


class Failed(Exception):
    """A profile produced no tokens; its text becomes the cell's message."""


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """The first index at which two sequences differ (the shorter one's end counts), -1 when they are equal."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return -1 if len(a) == len(b) else min(len(a), len(b))


def compare(
    reference: Produce, candidate: Produce, prompt: str, budget: int, stop: Iterable[int] = ()
) -> dict[str, Any]:
    """Status and first divergence of one prompt and budget, as fields of a `Cell`."""
    try:
        expected, again, got = reference(prompt, budget), reference(prompt, budget), candidate(prompt, budget)
    except Failed as problem:
        return {"status": "failed", "message": str(problem)}
    for status, other in (("unstable", again), ("diverged", got)):
        at = first_difference(expected, other)
        if at >= 0:
            left, right = (x[at] if at < len(x) else None for x in (expected, other))
            return {"status": status, "first": at, "expected": left, "got": right, "length": len(expected)}
    status = "identical"
    if not expected:
        status = "empty"
    elif len(expected) > 1 and len(set(expected)) == 1:
        status = "degenerate"
    elif len(expected) < budget and expected[-1] not in set(stop):
        status = "short"
    return {"status": status, "length": len(expected)}


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
    if reference not in profiles:
        raise BadInput("identity", f'no profile is named "{reference}"', nearest(reference, profiles))
    if contract not in CONTRACTS:
        raise BadInput("identity", f'contract = "{contract}"', nearest(contract, CONTRACTS))
    if len(profiles) < 2 or not any(suites.values()) or not budgets or min(budgets) < 1:
        shape = f"{len(profiles)} profiles, {sum(map(len, suites.values()))} prompts, budgets {list(budgets)}"
        raise BadInput("identity", f"{shape} compare nothing", "give two profiles, a prompt and a budget of 1 or more")
    return [
        Cell(
            profile=name,
            suite=suite,
            prompt=index,
            budget=budget,
            contract=contract,
            **compare(profiles[reference], produce, prompt, budget, stop),
        )
        for name, produce in profiles.items()
        if name != reference
        for suite, prompts in suites.items()
        for index, prompt in enumerate(prompts)
        for budget in budgets
    ]


# Commands -------------------------------------------------------------------------------------------------------------


def token_ids(text: str) -> list[int]:
    """Token ids in what a program printed: a JSON list, a JSON object with `tokens` or `token_ids` (JSON lines too), or
    integers between blanks and commas. Raises Failed when it is none of these."""
    found: list[int] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if line[0] in "[{":
            try:
                value = json.loads(line)
            except json.JSONDecodeError as problem:
                raise Failed(f"not JSON: {line[:60]} ({problem.msg})") from None
            if isinstance(value, dict):
                keys = [key for key in ("tokens", "token_ids") if key in value]
                if not keys:
                    raise Failed(f'a JSON object without "tokens" or "token_ids": {line[:60]}')
                value = value[keys[0]]
            if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
                raise Failed(f"token ids must be integers: {line[:60]}")
            found += value
        elif re.fullmatch(r"[\d\s,]+", line):
            found += [int(word) for word in re.findall(r"\d+", line)]
        else:
            raise Failed(f"not token ids: {line[:60]}")
    return found


def by_command(command: Sequence[str], contract: str, timeout_s: float = TIMEOUT_S) -> Produce:
    """A profile that runs a program: {prompt}, {prompt_file} and {budget} in its arguments are filled in.

    Under "tokens" the program prints ids as `token_ids` reads them; under "bytes" its output is compared as it is.
    """

    def produce(prompt: str, budget: int) -> Sequence[int]:
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
            file.write(prompt)
            file.flush()
            values = {"{prompt}": prompt, "{prompt_file}": file.name, "{budget}": str(budget)}
            words = []
            for word in command:
                for key, value in values.items():
                    word = word.replace(key, value)
                words.append(word)
            try:
                done = subprocess.run(words, capture_output=True, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                raise Failed(f"{words[0]}: no answer within {timeout_s:g} s") from None
            except OSError as problem:
                raise Failed(f"{words[0]}: cannot be run ({problem.strerror})") from None
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise Failed(f"{words[0]}: exited with {done.returncode}" + (f": {last[0]}" if last else ""))
        return list(done.stdout) if contract == "bytes" else token_ids(done.stdout.decode(errors="replace"))

    return produce


PLAN_KEYS = {"contract", "reference", "budgets", "stop", "profile", "suite", "timeout_s"}


def from_plan(path: Path) -> list[Cell]:
    """Run a TOML plan: contract, reference, budgets, stop; [[profile]] name, command; [[suite]] name, prompts.

    Raises BadInput with the file and the key for a plan that cannot be run.
    """
    from lab.base.vocabulary import read_toml

    plan = read_toml(path)
    for key in plan.keys() - PLAN_KEYS:
        raise BadInput(path, f'unknown key "{key}"', nearest(key, PLAN_KEYS))

    def named(table: str, field: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for entry in plan.get(table, []):
            value = entry.get(field)
            if set(entry) != {"name", field} or not isinstance(value, list) or not all(type(v) is str for v in value):
                raise BadInput(path, f"[[{table}]] {entry}", f"it takes a name and {field}, a list of strings")
            if not value or entry["name"] in found:
                raise BadInput(path, f'[[{table}]] "{entry["name"]}" is empty or named twice', "mend that entry")
            found[entry["name"]] = value
        return found

    contract, budgets, stop = plan.get("contract", "tokens"), plan.get("budgets"), plan.get("stop", [])
    if contract not in CONTRACTS:
        raise BadInput(path, f'contract = "{contract}"', nearest(str(contract), CONTRACTS))
    for key, value in (("budgets", budgets), ("stop", stop)):
        if not isinstance(value, list) or any(type(v) is not int for v in value):
            raise BadInput(path, f"{key} = {value}", "give a list of integers")
    timeout_s = plan.get("timeout_s", TIMEOUT_S)
    if type(timeout_s) not in (int, float) or not timeout_s > 0:
        raise BadInput(path, f"timeout_s = {timeout_s}", "give seconds, more than 0")
    commands = named("profile", "command")
    profiles = {name: by_command(words, contract, timeout_s) for name, words in commands.items()}
    return run(profiles, str(plan.get("reference", "")), named("suite", "prompts"), budgets or [], contract, stop)


# Output ---------------------------------------------------------------------------------------------------------------


def passed(cells: Sequence[Cell]) -> bool:
    """True when there is a cell and every one is identical."""
    return bool(cells) and all(cell.status == "identical" for cell in cells)


def to_json(cells: Sequence[Cell]) -> dict[str, Any]:
    """{"passed": bool, "failures": int, "cells": [...]} for programs."""
    failures = sum(cell.status != "identical" for cell in cells)
    return {"passed": passed(cells), "failures": failures, "cells": [asdict(cell) for cell in cells]}


def render(cells: Sequence[Cell]) -> str:
    """A line per cell that does not pass and a count per status."""
    lines = []
    for c in cells:
        if c.status == "identical":
            continue
        where = f"{c.profile} | {c.suite}[{c.prompt}] | budget {c.budget}: {c.status}"
        if c.first >= 0:
            ends = ["the end" if value is None else f"{value}" for value in (c.expected, c.got)]
            where += f" at {c.contract[:-1]} {c.first} of {c.length}: expected {ends[0]}, got {ends[1]}"
        lines.append(where + (f" ({c.message})" if c.message else ""))
    counts: dict[str, int] = {}
    for c in cells:
        counts[c.status] = counts.get(c.status, 0) + 1
    total = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
    return "\n".join([*lines, f"{len(cells)} cells: {total}"])
