"""Does a sequence in a batch ever say what another one was told: distinct code words, one per sequence.

Every sequence of a batch is told its own code word and later asked for it. A recurrent state that two sequences share
by mistake shows at once: the reply holds somebody else's word. Perplexity does not show it, nor does a single sequence.

    clean  every reply holds its own word and nobody else's
    dirty  some reply holds another sequence's word
    lost   no reply holds another's, but some do not hold their own: the system forgets, which proves nothing here

Only "clean" passes; "lost" is kept apart because a system that recalls nothing can never be caught bleeding.
The batch is run at several sizes, since an aliased pool of two rows is clean at one and two sequences.
"""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec

from lab.base.console import show
from lab.base.errors import BadInput
from lab.study.identity import TIMEOUT_S, Failed, output

ALPHABET = "BCDFGHJKLMNPQRSTVWXZ"  # no vowels: no code word is an English word
LENGTH = 6

Status = Literal["clean", "dirty", "lost"]

# words, one per sequence -> what each sequence replied, in the same order
Recall = Callable[[Sequence[str]], Sequence[str]]


@dataclass(frozen=True)
class Batch:
    """One batch size: its status, and for every sequence that is not clean (sequence, whose word it said or -1)."""

    np: int
    status: Status
    words: tuple[str, ...]
    replies: tuple[str, ...]
    bled: tuple[tuple[int, int], ...]


def code_words(count: int, seed: int) -> list[str]:
    """`count` words of LENGTH letters, any two different in every place; BadInput for more than there are letters."""
    if not 1 <= count <= len(ALPHABET):
        raise BadInput("crossbleed", f"np = {count}", f"choose 1 to {len(ALPHABET)} sequences")
    rng = random.Random(seed)
    columns = [rng.sample(ALPHABET, count) for _ in range(LENGTH)]
    return ["".join(letters) for letters in zip(*columns, strict=True)]


def examine(words: Sequence[str], replies: Sequence[str]) -> Batch:
    """The status of one batch; raises BadInput when replies are missing."""
    if len(words) != len(replies):
        raise BadInput("crossbleed", f"{len(replies)} replies to {len(words)} sequences", "answer every sequence once")
    said = [[other for other, word in enumerate(words) if word in reply] for reply in replies]
    bled = [(index, other) for index, others in enumerate(said) for other in others if other != index]
    lost = [(index, -1) for index, others in enumerate(said) if not others]
    status: Status = "dirty" if bled else "lost" if lost else "clean"
    return Batch(len(words), status, tuple(words), tuple(replies), tuple(bled + lost))


def run(recall: Recall, sizes: Sequence[int], seed: int = 0) -> list[Batch]:
    """A batch of every size, each with fresh words."""
    if not sizes:
        raise BadInput("crossbleed", "no batch size", "give at least one, e.g. 1,2,3,4")
    told = [code_words(size, seed * 1000 + size) for size in sizes]
    return [examine(words, recall(words)) for words in told]


def by_command(command: Sequence[str], prompt: str, timeout_s: float = TIMEOUT_S) -> Recall:
    """A program under test: {prompts_file} in its arguments is a file of JSON lines {"sequence": i, "prompt": text}.

    It runs the prompts in one batch and prints one JSON line {"sequence": i, "reply": text} for each, in any order.
    prompt: the text of a sequence; {word} in it is its code word.
    """
    if "{word}" not in prompt or not any("{prompts_file}" in word for word in command):
        raise BadInput("crossbleed", "the prompt has no {word}, or the command no {prompts_file}", "put it in")

    def recall(words: Sequence[str]) -> Sequence[str]:
        prompts = [{"sequence": i, "prompt": prompt.replace("{word}", word)} for i, word in enumerate(words)]
        try:
            printed = output(command, "\n".join(map(json.dumps, prompts)) + "\n", "{prompts_file}", {}, timeout_s)
        except Failed as problem:
            remedy = "mend the command, or ask for less"
            raise BadInput(command[0], f"{problem} (np = {len(words)})", remedy) from None
        return _replies(command[0], printed.decode(errors="replace"), len(words))

    return recall


class Reply(msgspec.Struct):
    """One line that the program under test prints."""

    sequence: int
    reply: str


def _replies(where: str, text: str, count: int) -> list[str]:
    found: dict[int, str] = {}
    for line in filter(str.strip, text.splitlines()):
        try:
            said = msgspec.json.decode(line, type=Reply)
        except msgspec.DecodeError:
            raise BadInput(where, f"printed {line[:60]!r}", 'print lines {"sequence": 0, "reply": "..."}') from None
        if said.sequence in found or said.sequence not in range(count):
            what = f"sequence {said.sequence} of {count} is answered twice or unknown"
            raise BadInput(where, what, "answer each once")
        found[said.sequence] = said.reply
    if len(found) != count:
        raise BadInput(where, f"{len(found)} replies to {count} sequences", "answer every sequence once")
    return [found[index] for index in range(count)]


def to_json(batches: Sequence[Batch]) -> dict[str, Any]:
    """{"passed": bool, "batches": [...]} for programs."""
    return {"passed": all(b.status == "clean" for b in batches), "batches": [asdict(b) for b in batches]}


def render(batches: Sequence[Batch]) -> str:
    """A line per batch size; a batch that is not clean says who said whose word."""
    lines = []
    for batch in batches:
        told = [
            f"{index} said {other}'s {batch.words[other]}" if other >= 0 else f"{index} lost {batch.words[index]}"
            for index, other in batch.bled
        ]
        lines.append(f"np={batch.np}: {batch.status}" + (f" ({'; '.join(told)})" if told else ""))
    return "\n".join(lines)


def command(arguments: Namespace) -> int:
    """`lab crossbleed`: 0 when every batch is clean, 1 otherwise."""
    try:
        sizes = [int(word) for word in arguments.np.split(",") if word.strip()]
    except ValueError:
        raise BadInput("--np", f'"{arguments.np}" is not a list of numbers', "write 1,2,3,4") from None
    found = run(by_command(arguments.command, arguments.prompt, arguments.timeout), sizes, arguments.seed)
    show(arguments.json, lambda: to_json(found), lambda: render(found))
    return int(any(batch.status != "clean" for batch in found))
