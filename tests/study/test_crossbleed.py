"""The code word harness: its own words on toy systems, and our gated delta net decode with a right and a wrong pool.

The recurrence keeps a code word as it keeps anything else: letter t is stored under key e_t with learning rate 1 and no
decay, and read back with query e_t. The wrong system is the known mistake: a loop over sequences on a pool of two rows
in which sequence i uses row i mod 2, so one and two sequences are fine and three are not.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lab.base.errors import BadInput
from lab.check import families
from lab.cli import main
from lab.study import crossbleed
from tests.loops import numbered, over

SIZES = (1, 2, 3, 4, 6, 7)
DIM = 64


def decode_step(state: torch.Tensor, rows: Sequence[int], k: int, letters: list[int] | None, q: int) -> torch.Tensor:
    """One token for each row of `rows`, in place: stores `letters` under key k, or nothing, and reads query q."""
    count = len(rows)
    eye = torch.eye(DIM, device=state.device)
    v = torch.zeros(count, 1, DIM, device=state.device) if letters is None else eye[letters][:, None, :].contiguous()
    inputs = {
        "q": eye[q].expand(count, 1, DIM).contiguous(),
        "k": eye[k].expand(count, 1, DIM).contiguous(),
        "v": v,
        "g": torch.zeros(count, 1, device=state.device),
        "beta": torch.full((count, 1), float(letters is not None), device=state.device),
        "state": state,
        "state_rows": torch.tensor(rows, dtype=torch.int32, device=state.device),
    }
    candidate = families.load("gdn").candidates["recurrent_decode"]
    out = {"o": torch.full((count, 1, DIM), float("nan"), device=state.device), "state": state}
    candidate.run(candidate.prepare(inputs), out)
    return out["o"][:, 0]


def gdn_recall(rows_of: list[list[list[int]]], pool: int) -> crossbleed.Recall:
    """A system that runs each group of sequences with the rows given: [[rows of one launch], ...] per step."""

    def recall(words: Sequence[str]) -> list[str]:
        state = torch.zeros(pool, 1, DIM, DIM, device="cuda" if torch.cuda.is_available() else "cpu")
        launches = rows_of[len(words)]
        replies = [""] * len(words)
        for t in range(crossbleed.LENGTH):
            first = 0
            for rows in launches:
                letters = [crossbleed.ALPHABET.index(w[t]) for w in words[first : first + len(rows)]]
                decode_step(state, rows, t, letters, t)
                first += len(rows)
        for t in range(crossbleed.LENGTH):
            first = 0
            for rows in launches:
                for o in decode_step(state, rows, DIM - 1, None, t):
                    replies[first] += crossbleed.ALPHABET[int(o.argmax())]
                    first += 1
        return replies

    return recall


# One launch for all sequences, each with a row of its own, in no particular order.
BATCHED = [[[(5 * i + 3) % 8 for i in range(n)]] for n in range(8)]
ALIASED = [[[i % 2] for i in range(n)] for n in range(8)]


@pytest.mark.slow
def test_batched_decode_is_clean_at_every_size() -> None:
    batches = crossbleed.run(gdn_recall(BATCHED, 8), SIZES)
    assert [(b.np, b.status) for b in batches] == [(n, "clean") for n in SIZES]
    assert all(b.replies == b.words for b in batches)


@pytest.mark.slow
def test_the_aliased_pool_is_dirty_from_three_sequences_on() -> None:
    batches = crossbleed.run(gdn_recall(ALIASED, 2), SIZES)
    assert [(b.np, b.status) for b in batches] == [(n, "clean" if n <= 2 else "dirty") for n in SIZES]
    three = batches[2]
    assert three.bled == ((0, 2),)
    assert three.replies[0] == three.words[2]


# The harness itself ---------------------------------------------------------------------------------------------------


CODE_WORDS_SHARE_NO_PLACE_CASES = {str(case): (case,) for case in range(5)}


def test_code_words_share_no_place() -> None:
    @over(CODE_WORDS_SHARE_NO_PLACE_CASES)
    def each(seed: int) -> None:
        words = crossbleed.code_words(20, seed)
        assert all(len({w[place] for w in words}) == 20 for place in range(crossbleed.LENGTH))
        assert words != crossbleed.code_words(20, seed + 1)

    each()


@pytest.mark.parametrize("count", [0, 21])
def test_too_many_sequences_are_refused(count: int) -> None:
    with pytest.raises(BadInput, match=f"np = {count}; choose 1 to 20"):
        crossbleed.code_words(count, 0)


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
    with pytest.raises(BadInput, match="1 replies to 2 sequences"):
        crossbleed.examine(["AAA", "BBB"], ["AAA"])


ECHO = """import json, sys
prompts = [json.loads(line) for line in open(sys.argv[1])]
for p in reversed(prompts):
    word = prompts[p["sequence"] % ROWS]["prompt"].split()[4].rstrip(".")
    print(json.dumps({"sequence": p["sequence"], "reply": "It is " + word}))
"""


def command(folder: Path, rows: int, program: str = ECHO) -> list[str]:
    path = folder / "system.py"
    path.write_text(program.replace("ROWS", str(rows)))
    return ["crossbleed", "--np", "1,2,3", "--", sys.executable, str(path), "{prompts_file}"]


def test_a_command_that_keeps_words_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(command(tmp_path, 20)) == 0
    assert capsys.readouterr().out.split("\n")[:3] == ["np=1: clean", "np=2: clean", "np=3: clean"]


def test_a_command_that_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(tmp_path, 2)
    assert main.main(arguments) == 1
    assert "np=3: dirty (2 said 0's" in capsys.readouterr().out
    assert main.main(["crossbleed", "--json", *arguments[1:]]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["passed"], [b["status"] for b in said["batches"]]) == (False, ["clean", "clean", "dirty"])


A_COMMAND_THAT_FAILS_IS_ONE_LINE_CASES: list[tuple[str, str]] = [
    ("import sys; sys.exit('no memory')", "exited with 1: no memory (np = 1)"),
    ("print('hi')", "printed 'hi'"),
    ("print('')", "0 replies to 1 sequences"),
    ("""print('{"sequence": 4, "reply": "x"}')""", "sequence 4 of 1 is answered twice or unknown"),
]


def test_a_command_that_fails_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @over(numbered(A_COMMAND_THAT_FAILS_IS_ONE_LINE_CASES))
    def each(program: str, said: str) -> None:
        assert main.main(command(tmp_path, 1, program)) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1

    each()


def test_a_prompt_without_its_word_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["crossbleed", "--prompt", "hello", *command(tmp_path, 1)[1:]]) == 2
    assert "no {word}" in capsys.readouterr().err
