"""What an arm of the tiny model says, as a table: `python -m kernels.step.tiny.measure stream=f32 > a.csv`.

A line is metric, value, unit and workload, which `lab judge CARD --rows control=A.csv --rows candidate=B.csv` reads.

    text              kl and same_top_p against EXACT, over a text that was not trained on, token by token
    recall, copy, code   answers_right, % of questions answered in full by greedy decoding; failed_runs: questions whose
                         greedy tokens are not those of --against
    gapN              answers_right of code words told N characters of filler ago; lengths that were not trained on too
    np1 .. np7        clean_slots: sequences of a batch that return their own code word
    weights, recurrent   hashes_unchanged: 1 where all greedy output has the hash of --against's
    (none)            ppl of the same text; token_mismatches: greedy tokens that differ from those of --against;
                      output_saved: logits that a prompt does not compute beside the last token's; fallback_runs: 1
                      where sequences were taken one at a time

The text and the questions have fixed seeds, so a figure repeats; what another text would give is not in it.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.common import Tensors, positive, usable_device
from kernels.step.tiny import corpus
from kernels.step.tiny.engine import DEFAULT, EXACT, Arm, Engine, arm_of, kl
from kernels.step.tiny.stored import WEIGHTS, load

SEED = 1000  # no seed of training's
SIZES = {"recall": 6, "copy": 8, "code": 32}
BUDGET = 16


class Row(NamedTuple):
    """A line of the table."""

    metric: str
    value: float
    unit: str
    workload: str = ""


@dataclass(frozen=True)
class Size:
    """`sequences` of `length` tokens of text and as many questions of each kind; code words by gap and by slots."""

    sequences: int = 16
    length: int = 128
    gaps: tuple[int, ...] = (32, 64, 128, 256, 512)
    slots: tuple[int, ...] = (1, 4, 6, 7)


USUAL = Size()


def replies(engine: Engine, asked: list[tuple[str, str]], budget: int) -> list[str]:
    """To questions in one batch, by greedy decoding."""
    return [corpus.decode(r) for r in engine.greedy([corpus.encode(prompt) for prompt, _ in asked], budget)]


def right(said: list[str], asked: list[tuple[str, str]]) -> int:
    """Questions that are answered in full."""
    return sum(reply.startswith(answer) for reply, (_, answer) in zip(said, asked, strict=True))


def text(engine: Engine, exact: Engine, tokens: torch.Tensor) -> list[Row]:
    """Divergence from `exact` and perplexity over tokens [n, T + 1], decoded token by token."""
    logits, reference = engine.score(tokens[:, :-1]), exact.score(tokens[:, :-1])
    same = (logits.argmax(-1) == reference.argmax(-1)).double().mean()
    loss = F.cross_entropy(logits.double().flatten(0, 1), tokens[:, 1:].flatten())
    return [
        Row("kl", float(kl(reference, logits).mean()), "kld", "text"),
        Row("same_top_p", 100 * float(same), "%", "text"),
        Row("ppl", float(loss.exp()), "ppl"),
    ]


def measure(
    arm: Arm, weights: Tensors, against: Arm = DEFAULT, size: Size = USUAL, device: str = "cpu", name: str = "weights"
) -> list[Row]:
    """Every row of the table. name: of the weights' file."""
    engine, other, exact = (Engine(a, weights, device) for a in (arm, against, EXACT))
    rng, count = random.Random(SEED), size.sequences
    rows = text(engine, exact, corpus.batch(count, size.length, rng)[0].to(device))
    mismatches, output = 0, [hashlib.sha256(), hashlib.sha256()]
    for kind, length in SIZES.items():
        asked = corpus.questions(kind, count, rng, length)
        said, wanted = (replies(e, asked, BUDGET) for e in (engine, other))
        rows.append(Row("answers_right", 100 * right(said, asked) / count, "%", kind))
        failed = [one != two for one, two in zip(said, wanted, strict=True)]
        rows.append(Row("failed_runs", sum(failed), "runs", kind))
        for digest, replied in zip(output, (said, wanted), strict=True):
            digest.update("\0".join(replied).encode())
        mismatches += sum(a != b for one, two in zip(said, wanted, strict=True) for a, b in zip(one, two, strict=True))
    for gap in size.gaps:
        asked = corpus.questions("code", count, rng, gap)
        found = right(replies(engine, asked, corpus.CODE), asked)
        rows.append(Row("answers_right", 100 * found / count, "%", f"gap{gap}"))
    for slots in size.slots:
        asked = corpus.questions("code", slots, rng, SIZES["code"])
        rows.append(Row("clean_slots", right(replies(engine, asked, corpus.CODE), asked), "slots", f"np{slots}"))
    saved = 0.0 if arm.logits == "all" else 4e-9 * engine.model.vocab * (size.length - 1)
    return [
        *rows,
        Row("hashes_unchanged", float(len({digest.digest() for digest in output}) == 1), "cases", name),
        Row("token_mismatches", mismatches, "tokens"),
        Row("output_saved", saved, "GB"),
        Row("fallback_runs", float(arm.batch == "alone"), "runs"),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("lever", nargs="*", help="such as state_dtype=bf16; none: the default arm")
    parser.add_argument("--against", nargs="*", default=[], metavar="LEVER", help="whose greedy tokens are compared")
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--sequences", type=positive, default=16)
    parser.add_argument("--length", type=positive, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    try:
        size = replace(USUAL, sequences=asked.sequences, length=asked.length)
        device = usable_device(asked.device)
        arms = arm_of(asked.lever), arm_of(asked.against)
        rows = measure(arms[0], load(asked.weights), arms[1], size, device, asked.weights.stem)
    except ValueError as problem:
        print(f"tiny: {problem}", file=sys.stderr)
        raise SystemExit(2) from None
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
    out = csv.writer(sys.stdout, lineterminator="\n")
    what = " ".join(asked.lever) or "default"
    out.writerow([*Row._fields, "lever", "model", "gpu", "build"])
    out.writerows([*row, what, asked.weights.name, gpu, f"torch {torch.__version__}"] for row in rows)


if __name__ == "__main__":
    main()
