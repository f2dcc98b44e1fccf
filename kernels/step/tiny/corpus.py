"""Text that a small model can learn and be asked about: key-value recall, copying, and a code word told before filler.

A token is a character. Lines end with a newline and are of three kinds; what stands after the mark is the answer, which
only what came before gives away.

    recall  "aK cF zB ?c" then "F", several questions a line: single letters under single keys
    copy    "<XJKQBT>" then "XJKQBT"
    code    "!BCDFGH some filler of a fixed language #" then "BCDFGH"

Filler is a Markov chain over WORDS words of a fixed seed, each followed by one of FOLLOWERS others, so that perplexity
has something to learn besides recall. Code words are of the letters and length that lab/study/crossbleed.py uses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

LETTERS = "BCDFGHJKLMNPQRSTVWXZ"
KEYS = "abcdefghijklmnopqrstuvwxyz"
VOCAB = "\n <>!#?." + LETTERS + KEYS
INDEX = {c: i for i, c in enumerate(VOCAB)}
CODE = 6  # letters of a code word
WORDS, FOLLOWERS = 48, 3
SEED = 11
KINDS = ("recall", "copy", "code")

_draw = random.Random(SEED)
_WORDS = ["".join(_draw.choices(KEYS, k=_draw.randint(2, 5))) for _ in range(WORDS)]
_NEXT = [_draw.sample(range(WORDS), FOLLOWERS) for _ in range(WORDS)]


def encode(text: str) -> list[int]:
    """Token ids; raises ValueError for a character that is not in VOCAB."""
    strange = sorted(set(text) - INDEX.keys())
    if strange:
        raise ValueError(f"{strange[0]!r} is no character of the model's; write with {VOCAB[1:]!r} and line ends")
    return [INDEX[c] for c in text]


def decode(tokens: Sequence[int]) -> str:
    """The text of token ids."""
    return "".join(VOCAB[t] for t in tokens)


def filler(length: int, rng: random.Random) -> str:
    """Exactly `length` characters of the fixed language."""
    at, text = rng.randrange(WORDS), ""
    while len(text) < length:
        text += _WORDS[at] + " "
        at = rng.choice(_NEXT[at])
    return text[:length]


def told(word: str, gap: int, rng: random.Random) -> str:
    """A code word, `gap` characters of filler, and the mark that asks for the word."""
    return f"!{word} {filler(gap, rng)} #"


def line(kind: str, rng: random.Random, size: int) -> list[tuple[str, bool]]:
    """Pieces of a line and whether each is an answer. size: pairs, letters to copy, or characters of filler."""
    if kind == "recall":
        pairs = list(zip(rng.sample(KEYS, size), rng.choices(LETTERS, k=size), strict=True))
        pieces = [("".join(f"{k}{v} " for k, v in pairs), False)]
        for key, value in rng.sample(pairs, min(size, 4)):
            pieces += [(f"?{key}", False), (value, True)]
        return [*pieces, ("\n", False)]
    if kind == "copy":
        word = "".join(rng.choices(LETTERS, k=size))
        return [(f"<{word}>", False), (word, True), ("\n", False)]
    word = "".join(rng.choices(LETTERS, k=CODE))
    return [(told(word, size, rng), False), (word, True), ("\n", False)]


def draw(kind: str, rng: random.Random, longest: int) -> list[tuple[str, bool]]:
    """A line of a size drawn for a context of `longest` tokens."""
    sizes = {"recall": (2, 8), "copy": (2, 16), "code": (0, max(0, longest - 2 * CODE - 6))}
    return line(kind, rng, rng.randint(*sizes[kind]))


def batch(count: int, length: int, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens [count, length + 1] int64 of lines side by side, cut at the end, and which are answers, bool."""
    tokens, answers = [], []
    for _ in range(count):
        text, marks = "\n", [False]
        while len(text) <= length:
            for piece, answer in draw(rng.choice(KINDS), rng, length):
                text += piece
                marks += [answer] * len(piece)
        tokens.append(encode(text[: length + 1]))
        answers.append(marks[: length + 1])
    return torch.tensor(tokens), torch.tensor(answers)


def questions(kind: str, count: int, rng: random.Random, size: int) -> list[tuple[str, str]]:
    """Prompts and the answers that should follow; of a line of recall the first question."""
    found = []
    for _ in range(count):
        pieces = line(kind, rng, size)
        at = next(i for i, (_, answer) in enumerate(pieces) if answer)
        found.append(("\n" + "".join(text for text, _ in pieces[:at]), pieces[at][0]))
    return found
