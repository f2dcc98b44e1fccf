"""The list of deliberate mistakes fits the code; whether the tests see them is what `make mistakes` asks."""

from pathlib import Path

import pytest

from lab.base.errors import BadInput
from tests import mistakes
from tests.changed import here
from tests.mistakes import LIST, Mistake, load


def test_each_mistake_can_be_made_and_names_its_test() -> None:
    assert [why for one in load() if (why := one.refused())] == []


def test_there_are_enough_and_no_two_are_the_same() -> None:
    listed = load()
    assert len(listed) >= 60
    assert len({(m.file, m.old, m.new) for m in listed}) == len(listed)
    assert len({m.why for m in listed}) == len(listed)


@pytest.mark.slow
def test_what_a_change_runs_includes_the_test_that_sees_a_mistake_there() -> None:
    """`make changed` on the file of each mistake: a list of 60 edges that its graph must not miss."""
    graph, listed = here(), load()
    for file in sorted({m.file for m in listed}):
        reached = graph.of(file)
        wanted = {name.split("::")[0] for m in listed if m.file == file for name in m.test}
        assert reached is None or wanted <= reached, f"{file} does not reach {wanted - (reached or set())}"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"old": "no such text"}, "0 times"),
        ({"old": "e"}, "times, not once"),
        ({"file": "lab/none.py"}, "not there"),
        ({"new": "def load("}, "the same"),
        ({"test": ("tests/test_mistakes.py::test_nothing_of_this_name",)}, "no test"),
        ({"test": ("tests/none.py::test_x",)}, "no test"),
    ],
)
def test_an_entry_that_no_longer_fits_says_so(changes: dict[str, str], words: str) -> None:
    sound = {"file": "tests/mistakes.py", "old": "def load(", "new": "def read(", "why": "w"}
    test = ("tests/test_mistakes.py::test_an_entry_that_no_longer_fits_says_so[x]",)
    assert Mistake(**{"test": test, **sound}).refused() == ""  # type: ignore[arg-type]
    assert words in Mistake(**{"test": test, **sound, **changes}).refused()  # type: ignore[arg-type]


def test_an_entry_with_other_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / LIST.name
    path.write_text('[[mistake]]\nfile = "a"\nolder = "b"\n')
    with pytest.raises(BadInput):
        mistakes.load(path)
