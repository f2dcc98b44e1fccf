"""The byte-identity harness: every word it can say, on callables and on commands, and plans that it must refuse."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lab.cli import main
from lab.study import identity
from tests.loops import numbered, over
from tests.refused import held, refused

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


def test_first_divergence_is_told() -> None:
    for at in (0, 3, 7):

        def broken(prompt: str, budget: int, at: int = at) -> list[int]:
            return [*counting(prompt, at), 999, *counting(prompt, budget)[at + 1 :]]

        cells = identity.run({"ref": counting, "new": broken}, "ref", SUITES, [8])
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


def test_agreement_that_proves_nothing_does_not_pass() -> None:
    """Zeros are what argmax of NaN gives: two broken builds agree perfectly."""
    for tokens, word in (([], "empty"), ([0] * 8, "degenerate"), ([1, 2, 3], "short")):

        def same(prompt: str, budget: int, tokens: Sequence[int] = tokens) -> Sequence[int]:
            return tokens

        assert statuses(same, same) == {word}


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


def test_what_is_no_token_id_fails() -> None:
    for text in ("hello", "[1, 2.5]", '{"text": "a"}', "[1, true]", "[1, 2", '"7"'):
        with pytest.raises(identity.Failed):
            identity.token_ids(text)


# Plans ----------------------------------------------------------------------------------------------------------------

PROGRAM = "import sys; p, n = open(sys.argv[1]).read(), int(sys.argv[2]); print([len(p) + i for i in range(n)])"


HEAD = 'reference = "old"\nbudgets = [4]\n'


def plan(folder: Path, program: str = PROGRAM, head: str = HEAD, prompts: str = '["abc"]') -> Path:
    path = folder / "plan.toml"
    text = head
    for name, code in (("old", PROGRAM), ("new", program)):
        command = json.dumps([sys.executable, "-I", "-S", "-c", code, "{prompt_file}", "{budget}"])
        text += f'[[profile]]\nname = "{name}"\ncommand = {command}\n'
    path.write_text(text + f'[[suite]]\nname = "s"\nprompts = {prompts}\n')
    return path


def test_a_plan_of_commands_that_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["identity", str(plan(tmp_path, prompts='["abc", "defgh"]')), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["passed"], said["failures"], len(said["cells"])) == (True, 0, 2)


def test_a_plan_whose_candidate_differs_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = PROGRAM.replace("len(p) + i for", "len(p) + i + (i == 9) for")
    assert main.main(["identity", str(plan(tmp_path, late, HEAD.replace("[4]", "[4, 16]")))]) == 1
    out = capsys.readouterr().out
    assert "new | s[0] | budget 16: diverged at token 9 of 16: expected 12, got 13" in out
    assert "2 cells: 1 diverged, 1 identical" in out


def test_bytes_are_compared_as_they_are(tmp_path: Path) -> None:
    head = 'contract = "bytes"\n' + HEAD
    for program, status in ((PROGRAM + "; print()", "diverged"), (PROGRAM, "identical")):
        assert {c.status for c in identity.from_plan(plan(tmp_path, program, head))} == {status}


A_COMMAND_THAT_FAILS_IS_A_CELL_CASES: list[tuple[str, str, str]] = [
    ("import sys; sys.exit('out of memory')", HEAD, "exited with 1: out of memory"),
    ("print('hello')", HEAD, "not token ids: hello"),
    ("import time; time.sleep(60)", "timeout_s = 0.2\n" + HEAD, "within 0.2 s"),
]


def test_a_command_that_fails_is_a_cell(tmp_path: Path) -> None:
    nothing = identity.by_command(["/nonexistent/program", "{prompt}"], "tokens")
    (cell,) = identity.run({"ref": nothing, "new": nothing}, "ref", {"s": ["a"]}, [1])
    assert (cell.status, cell.message.startswith("/nonexistent/program: cannot be run")) == ("failed", True)

    @over(numbered(A_COMMAND_THAT_FAILS_IS_A_CELL_CASES))
    def each(program: str, head: str, said: str) -> None:
        (cell,) = identity.from_plan(plan(tmp_path, program, head))
        assert (cell.status, said in cell.message) == ("failed", True), cell.message

    each()


A_PLAN_THAT_CANNOT_BE_RUN_IS_ONE_LINE_CASES: list[tuple[str, str, tuple[str, ...]]] = [
    (HEAD.replace("old", "odl"), "identity", ('"odl"', '"old"')),
    (HEAD.replace("[4]", "[]"), "identity", ("budgets []",)),
    (HEAD.replace("[4]", "[0]"), "identity", ("budgets [0]",)),
    (HEAD.replace("[4]", '"4"'), "plan.toml", ("budgets = '4'",)),
    (HEAD.replace("budgets", "budget"), "plan.toml", ('"budget"', '"budgets"')),
    ('contract = "token"\n' + HEAD, "plan.toml", ('"token"', '"tokens"')),
    ("timeout_s = 0\n" + HEAD, "plan.toml", ("timeout_s = 0",)),
]


def test_a_plan_that_cannot_be_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @over(numbered(A_PLAN_THAT_CANNOT_BE_RUN_IS_ONE_LINE_CASES))
    def each(head: str, where: str, words: tuple[str, ...]) -> None:
        assert main.main(["identity", str(plan(tmp_path, head=head))]) == 2
        held(capsys.readouterr().err, where, *words)

    each()


def test_profiles_named_twice_are_refused(tmp_path: Path) -> None:
    path = plan(tmp_path)
    path.write_text(path.read_text().replace('name = "new"', 'name = "old"'))
    with refused("plan.toml", 'profile "old"'):
        identity.from_plan(path)
