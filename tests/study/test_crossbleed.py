"""The code word harness: its own words on a toy pool of rows, right and wrong, on replies, and on commands.

The wrong pool is the known mistake: a loop over sequences on two rows in which sequence i uses row i mod 2, so one and
two sequences are fine and three are not. Kernels of the gated delta net go through the harness in
tests/kernels/gdn/test_gdn_batches.py.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lab.cli import main
from lab.study import crossbleed
from tests.loops import numbered, over
from tests.refused import held, refused

SIZES = (1, 2, 3, 4, 6, 7)


def pooled(rows: int) -> crossbleed.Recall:
    """A system that keeps sequence i in row i mod `rows`."""

    def recall(words: Sequence[str]) -> list[str]:
        pool = {i % rows: word for i, word in enumerate(words)}
        return [pool[i % rows] for i in range(len(words))]

    return recall


def test_a_row_each_is_clean_and_two_shared_rows_are_dirty_from_three_on() -> None:
    own = crossbleed.run(pooled(8), SIZES)
    assert [(b.np, b.status) for b in own] == [(n, "clean") for n in SIZES]
    assert all(b.replies == b.words for b in own)
    shared = crossbleed.run(pooled(2), SIZES)
    assert [(b.np, b.status) for b in shared] == [(n, "clean" if n <= 2 else "dirty") for n in SIZES]
    assert (shared[2].bled, shared[2].replies[0]) == (((0, 2),), shared[2].words[2])


# The harness itself ---------------------------------------------------------------------------------------------------


def test_code_words_share_no_place() -> None:
    for seed in range(5):
        words = crossbleed.code_words(20, seed)
        assert all(len({w[place] for w in words}) == 20 for place in range(crossbleed.LENGTH)), seed
        assert words != crossbleed.code_words(20, seed + 1), seed


def test_sizes_that_are_refused() -> None:
    for count in (0, 21):
        with refused("crossbleed", f"np = {count}", remedy="1 to 20"):
            crossbleed.code_words(count, 0)
    with refused("crossbleed", "batch size"):
        crossbleed.run(pooled(1), [])


STATUSES_CASES: list[tuple[list[str], str, tuple[tuple[int, int], ...]]] = [
    (["the word is AAA.", "BBB", "CCC"], "clean", ()),
    (["AAA and BBB", "BBB", "CCC"], "dirty", ((0, 1),)),
    (["BBB", "BBB", "CCC"], "dirty", ((0, 1),)),
    (["AAA", "", "CCC"], "lost", ((1, -1),)),
    (["AAA", "", "AAA"], "dirty", ((2, 0), (1, -1))),
]


def test_statuses() -> None:
    @over(numbered(STATUSES_CASES))
    def each(replies: list[str], status: str, bled: tuple[tuple[int, int], ...]) -> None:
        batch = crossbleed.examine(["AAA", "BBB", "CCC"], replies)
        assert (batch.status, batch.bled) == (status, bled)

    each()


def test_missing_replies_are_refused() -> None:
    with refused("crossbleed", "1 replies to 2"):
        crossbleed.examine(["AAA", "BBB"], ["AAA"])


ECHO = """import json, sys
prompts = [json.loads(line) for line in open(sys.argv[1])]
for p in reversed(prompts):
    word = prompts[p["sequence"] % ROWS]["prompt"].split()[4].rstrip(".")
    print(json.dumps({"sequence": p["sequence"], "reply": "It is " + word}))
"""


def command(folder: Path, rows: int, program: str = ECHO, sizes: str = "1,2,3") -> list[str]:
    path = folder / "system.py"
    path.write_text(program.replace("ROWS", str(rows)))
    return ["crossbleed", "--np", sizes, "--", sys.executable, "-I", "-S", str(path), "{prompts_file}"]


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(command(tmp_path, 20)) == 0
    assert capsys.readouterr().out.split("\n")[:3] == ["np=1: clean", "np=2: clean", "np=3: clean"]
    arguments = command(tmp_path, 2, sizes="2,3")
    assert main.main(arguments) == 1
    assert "np=3: dirty (2 said 0's" in capsys.readouterr().out
    assert main.main(["crossbleed", "--json", *arguments[1:]]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["passed"], [b["status"] for b in said["batches"]]) == (False, ["clean", "dirty"])


A_COMMAND_THAT_FAILS_IS_ONE_LINE_CASES: list[tuple[str, tuple[str, ...]]] = [
    ("import sys; sys.exit('no memory')", ("exited with 1", "no memory", "np = 1")),
    ("print('hi')", ("'hi'",)),
    ("print('')", ("0 replies to 1",)),
    ("""print('{"sequence": 4, "reply": "x"}')""", ("sequence 4 of 1",)),
]


def test_a_command_that_fails_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @over(numbered(A_COMMAND_THAT_FAILS_IS_ONE_LINE_CASES))
    def each(program: str, words: tuple[str, ...]) -> None:
        assert main.main(command(tmp_path, 1, program)) == 2
        held(capsys.readouterr().err, sys.executable, *words)

    each()


def test_a_prompt_without_its_word_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["crossbleed", "--prompt", "hello", *command(tmp_path, 1)[1:]]) == 2
    held(capsys.readouterr().err, "crossbleed", "{word}", "{prompts_file}")
