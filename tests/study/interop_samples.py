"""What the tests of imported evidence share: cards, files of both arms with one thing changed, the command line.

The files in tests/interop/ follow the tools' formats; the figures in them are invented, of an "Example GPU", and no
measurement of anything.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.cli import main

SAMPLES = Path(__file__).resolve().parents[1] / "interop"
CARD = SAMPLES / "own_ab.toml"
LLAMA, BATCHED, OPS = "llama_bench_{arm}.jsonl", "batched_bench_{arm}.txt", "backend_ops_{arm}.txt"
Break = Callable[[str], str]
Capture = pytest.CaptureFixture[str]


def old_new(*pairs: str, times: int = -1) -> Break:
    """Replace the first of each pair by the second."""

    def change(text: str) -> str:
        for old, new in zip(pairs[::2], pairs[1::2], strict=True):
            text = text.replace(old, new, times)
        return text

    return change


def pattern(expression: str, new: str) -> Break:
    """Replace the first match of a regular expression."""
    return lambda text: re.sub(expression, new, text, count=1)


def condition(metric: str, op: str, threshold: float, workload: str, role: str = "require") -> str:
    """One condition on a change in %, as a card has it."""
    place = f'\nworkload = "{workload}"' if workload else ""
    change = f'compare = "change"\nop = "{op}"\nthreshold = {threshold}\nunit = "%"'
    return f'[[gate.{role}]]\nmetric = "{metric}"\n{change}{place}\n'


def card(folder: Path, workloads: list[str], *conditions: str) -> Path:
    """A card of these workloads and conditions; the prose is own_ab's."""
    head, _, rest = CARD.read_text().partition("[[gate.kill]]")
    head = re.sub(r"workloads = .*", f"workloads = {json.dumps(workloads)}", head).replace('"own_ab"', '"mine"')
    path = folder / "mine.toml"
    path.write_text(head + "\n".join(conditions) + rest[rest.index("[expected]") :])
    return path


def files(folder: Path, name: str, control: Break | None = None, candidate: Break | None = None) -> list[str]:
    """--rows for the two arms of one sample, each with its own change, which must change something."""
    flags = []
    for arm, change in (("control", control), ("candidate", candidate)):
        text = (SAMPLES / name.format(arm=arm)).read_text()
        new = change(text) if change else text
        assert new != text or change is None
        path = folder / f"{arm}_{name.format(arm=arm)}"
        path.write_text(new)
        flags += ["--rows", f"{arm}={path}"]
    return flags


def judged(capsys: Capture, card_path: Path | str, *flags: str) -> dict[str, Any]:
    """The object that `lab judge CARD ... --json` prints."""
    assert main.main(["judge", str(card_path), *flags, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    return dict(found)


def refused(capsys: Capture, *flags: str) -> str:
    """The one line in which `lab judge` refuses."""
    assert main.main(["judge", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err
