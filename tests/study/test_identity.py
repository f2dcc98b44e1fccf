"""The byte-identity harness: every word it can say, on callables and on commands, and plans that it must refuse."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lab.base.errors import BadInput
from lab.cli import main
from lab.study import identity
from tests.loops import numbered, over

SUITES = {"short": ["one", "a longer prompt"]}


def counting(prompt: str, budget: int) -> list[int]:
    return [len(prompt) + i for i in range(budget)]


def statuses(candidate: identity.Produce, reference: identity.Produce = counting, budget: int = 8) -> set[str]:
    cells = identity.run({"ref": reference, "new": candidate}, "ref", SUITES, [budget])
    assert len(cells) == 2
    assert identity.passed(cells) == all(c.status == "identical" for c in cells)
    return {c.status for c in cells}


def test_identical_builds_pass() -> None:
    assert statuses(counting) == {"identical"}


@pytest.mark.parametrize("at", [0, 3, 7])
def test_first_divergence_is_told(at: int) -> None:
    def other(prompt: str, budget: int) -> list[int]:
        return [*counting(prompt, at), 999, *counting(prompt, budget)[at + 1 :]]

    cells = identity.run({"ref": counting, "new": other}, "ref", SUITES, [8])
    assert [(c.status, c.first, c.expected, c.got) for c in cells] == [
        ("diverged", at, 3 + at, 999),
        ("diverged", at, 15 + at, 999),
    ]
    assert f"diverged at token {at} of 8: expected {3 + at}, got 999" in identity.render(cells)
    assert not identity.passed(cells)


def test_a_candidate_that_stops_early_diverges_at_its_end() -> None:
    cells = identity.run({"ref": counting, "new": lambda p, b: counting(p, b - 2)}, "ref", SUITES, [8])
    assert {(c.status, c.first, c.got) for c in cells} == {("diverged", 6, None)}
    assert "got the end" in identity.render(cells)


def test_an_unstable_reference_accuses_nobody() -> None:
    calls = iter(range(1000))

    def noisy(prompt: str, budget: int) -> list[int]:
        return [next(calls), *counting(prompt, budget - 1)]

    assert statuses(counting, noisy) == {"unstable"}


@pytest.mark.parametrize(
    ("produce", "word"),
    [
        (lambda p, b: [], "empty"),
        (lambda p, b: [0] * b, "degenerate"),  # what argmax of NaN gives: two broken builds agree perfectly
        (lambda p, b: [1, 2, 3], "short"),
    ],
)
def test_agreement_that_proves_nothing_does_not_pass(produce: identity.Produce, word: str) -> None:
    assert statuses(produce, produce) == {word}


def test_a_stop_token_may_end_a_reply() -> None:
    cells = identity.run({"a": lambda p, b: [5, 6, 2], "b": lambda p, b: [5, 6, 2]}, "a", SUITES, [8], stop=[2])
    assert {c.status for c in cells} == {"identical"}


TOKEN_IDS_CASES: list[tuple[str, Sequence[int]]] = [
    ("[1, 2, 3]", [1, 2, 3]),
    ('{"tokens": [4, 5]}\n{"token_ids": [6]}\n', [4, 5, 6]),
    ("7 8,9\n10\n", [7, 8, 9, 10]),
    ("", []),
]


def test_token_ids() -> None:
    @over(numbered(TOKEN_IDS_CASES))
    def each(text: str, ids: Sequence[int]) -> None:
        assert identity.token_ids(text) == ids

    each()


WHAT_IS_NO_TOKEN_ID_FAILS_CASES = {
    str(case): (case,) for case in ["hello", "[1, 2.5]", '{"text": "a"}', "[1, true]", "[1, 2", '"7"']
}


def test_what_is_no_token_id_fails() -> None:
    @over(WHAT_IS_NO_TOKEN_ID_FAILS_CASES)
    def each(text: str) -> None:
        with pytest.raises(identity.Failed):
            identity.token_ids(text)

    each()


# Plans ----------------------------------------------------------------------------------------------------------------

PROGRAM = "import sys; p, n = open(sys.argv[1]).read(), int(sys.argv[2]); print([len(p) + i for i in range(n)])"


def plan(folder: Path, program: str = PROGRAM, head: str = 'reference = "old"\nbudgets = [4, 16]\n') -> Path:
    path = folder / "plan.toml"
    text = head
    for name, code in (("old", PROGRAM), ("new", program)):
        command = json.dumps([sys.executable, "-c", code, "{prompt_file}", "{budget}"])
        text += f'[[profile]]\nname = "{name}"\ncommand = {command}\n'
    path.write_text(text + '[[suite]]\nname = "s"\nprompts = ["abc", "defgh"]\n')
    return path


def test_a_plan_of_commands_that_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["identity", str(plan(tmp_path)), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["passed"], said["failures"], len(said["cells"])) == (True, 0, 4)


def test_a_plan_whose_candidate_differs_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = PROGRAM.replace("len(p) + i for", "len(p) + i + (i == 9) for")
    assert main.main(["identity", str(plan(tmp_path, late))]) == 1
    out = capsys.readouterr().out
    assert "new | s[0] | budget 16: diverged at token 9 of 16: expected 12, got 13" in out
    assert "4 cells: 2 diverged, 2 identical" in out


def test_bytes_are_compared_as_they_are(tmp_path: Path) -> None:
    head = 'contract = "bytes"\nreference = "old"\nbudgets = [4]\n'
    spaced = PROGRAM + "; print()"
    assert {c.status for c in identity.from_plan(plan(tmp_path, spaced, head))} == {"diverged"}
    assert {c.status for c in identity.from_plan(plan(tmp_path, PROGRAM, head))} == {"identical"}


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; sys.exit('out of memory')", "exited with 1: out of memory"),
        ("print('hello')", "not token ids: hello"),
    ],
)
def test_a_command_that_fails_is_a_cell(tmp_path: Path, program: str, said: str) -> None:
    cells = identity.from_plan(plan(tmp_path, program))
    assert {c.status for c in cells} == {"failed"}
    assert said in cells[0].message


@pytest.mark.slow
def test_a_command_that_hangs_is_a_cell(tmp_path: Path) -> None:
    head = 'timeout_s = 0.5\nreference = "old"\nbudgets = [1]\n'
    cells = identity.from_plan(plan(tmp_path, "import time; time.sleep(60)", head))
    assert all(c.status == "failed" and "no answer within 0.5 s" in c.message for c in cells)


A_PLAN_THAT_CANNOT_BE_RUN_IS_ONE_LINE_CASES: list[tuple[str, str]] = [
    ('reference = "odl"\nbudgets = [4]\n', 'no profile is named "odl"; did you mean "old"'),
    ('reference = "old"\nbudgets = []\n', "compare nothing"),
    ('reference = "old"\nbudgets = [0]\n', "compare nothing"),
    ('reference = "old"\nbudgets = "4"\n', "budgets = '4'"),
    ('reference = "old"\nbudget = [4]\n', 'unknown key "budget"; did you mean "budgets"'),
    ('contract = "token"\nreference = "old"\nbudgets = [4]\n', 'did you mean "tokens"'),
    ('timeout_s = 0\nreference = "old"\nbudgets = [4]\n', "timeout_s = 0"),
]


def test_a_plan_that_cannot_be_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @over(numbered(A_PLAN_THAT_CANNOT_BE_RUN_IS_ONE_LINE_CASES))
    def each(head: str, said: str) -> None:
        assert main.main(["identity", str(plan(tmp_path, head=head))]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1

    each()


def test_profiles_named_twice_are_refused(tmp_path: Path) -> None:
    path = plan(tmp_path)
    path.write_text(path.read_text().replace('name = "new"', 'name = "old"'))
    with pytest.raises(BadInput, match='profile "old" appears twice'):
        identity.from_plan(path)
