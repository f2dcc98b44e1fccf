"""The tiny model as a program under test, for `lab identity` and `lab crossbleed`.

    python -m kernels.step.tiny.say state_dtype=bf16 --prompt "<XJKQBT>" --budget 6         token ids, a JSON list
    python -m kernels.step.tiny.say pool=shared --prompts FILE --budget 6             a JSON line a sequence, one batch

FILE has JSON lines {"sequence": 0, "prompt": "..."}; printed are lines {"sequence": 0, "reply": "..."}.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kernels.common import positive, usable_device
from kernels.step.tiny import corpus
from kernels.step.tiny.engine import Engine, arm_of
from kernels.step.tiny.stored import WEIGHTS, load


def main() -> None:
    """Reply to one prompt, or to a batch of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("lever", nargs="*", help="such as state_dtype=bf16; none: the default arm")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt")
    given.add_argument("--prompts", type=Path)
    parser.add_argument("--budget", type=positive, default=corpus.CODE)
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    try:
        engine = Engine(arm_of(asked.lever), load(asked.weights), usable_device(asked.device))
        if asked.prompt is not None:
            print(json.dumps(engine.greedy([corpus.encode("\n" + asked.prompt)], asked.budget)[0]))
            return
        lines = [json.loads(line) for line in asked.prompts.read_text(encoding="utf-8").splitlines()]
        replies = engine.greedy([corpus.encode("\n" + line["prompt"]) for line in lines], asked.budget)
    except (ValueError, KeyError, TypeError, OSError) as problem:
        print(f"tiny: {problem}", file=sys.stderr)
        raise SystemExit(2) from None
    for line, reply in zip(lines, replies, strict=True):
        print(json.dumps({"sequence": line["sequence"], "reply": corpus.decode(reply)}))


if __name__ == "__main__":
    main()
