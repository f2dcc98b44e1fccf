"""`make changed` may run too much and must not run too little without saying so."""

import subprocess
from pathlib import Path

import pytest

from tests import changed
from tests.changed import Graph, here, of_all

FILES = {
    "lab/__init__.py": "def phase():\n    from lab.card import gate\n    return gate\n",
    "lab/__main__.py": "from lab.cli import main\n",
    "lab/base.py": "FOLDER = 'facts'\n",
    "lab/card/__init__.py": "",
    "lab/card/gate.py": "from lab import base\n",
    "lab/check.py": "import importlib\ndef load(name):\n    return importlib.import_module(f'kernels.{name}.cases')\n",
    "lab/cli.py": "def main():\n    from lab import rows\n",
    "lab/rows.py": "from .base import FOLDER\n",
    "lab/lone.py": "",
    "kernels/common.py": "",
    "kernels/a/__init__.py": "",
    "kernels/a/cases.py": "from kernels import common\nSOURCE = 'k.cu'\n",
    "kernels/b/__init__.py": "",
    "kernels/b/cases.py": "",
    "tests/conftest.py": "",
    "tests/fake.py": "",
    "tests/test_base.py": "import lab.base\n",
    "tests/test_gate.py": "from lab.card.gate import Gate\nfrom tests import fake\n",
    "tests/test_door.py": "from lab import phase\n",
    "tests/test_command.py": "RUN = ['-m', 'lab', 'rows']\n",
    "tests/test_worker.py": "BACKEND = 'tests.fake:cpu'\n",
    "tests/test_repository.py": "",
    "tests/kernels/a/test_a.py": "from lab import check\n",
    "tests/kernels/a/sample.txt": "",
    "tests/kernels/b/test_b.py": "from lab.check import load\nBOTH = 'a'\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


# What the change of a file must run, in words of the test files' own names; None is all of them.
REACHED: dict[str, set[str] | None] = {
    "lab/base.py": {"base", "gate", "door", "command"},
    "lab/card/gate.py": {"gate", "door"},  # a function of the door imports it, and so only who opens the door
    "lab/rows.py": {"command"},  # by -m lab
    "tests/fake.py": {"gate", "worker"},  # by a string that names it
    "kernels/a/cases.py": {"a", "b"},  # loaded by a name formed at run time; b says that it loads a
    "kernels/b/cases.py": {"b"},
    "kernels/common.py": {"a", "b"},
    "kernels/a/k.cu": {"a", "b"},
    "kernels/layer.cuh": {"a", "b"},
    "tests/test_base.py": {"base"},
    "tests/kernels/a/sample.txt": {"a"},
    "data/facts/gone/x.toml": {"base", "gate", "door", "command"},  # who reads the folder, whether the file is there
    "data/other/x.toml": None,
    "lab/lone.py": None,  # nobody imports it as far as can be seen
    "lab/gone.py": None,  # deleted: nobody can say who imported it
    "LICENSE": None,
    "pyproject.toml": None,
    "Makefile": None,
    ".ci/install.py": None,
    "tests/conftest.py": None,
}


def test_files_reach_their_tests(tree: Path) -> None:
    graph = Graph(tree)
    found = {}
    for path in REACHED:
        tests = graph.of(path)
        found[path] = None if tests is None else {Path(t).stem.removeprefix("test_") for t in tests}
    assert found == REACHED


def test_one_unknown_file_runs_everything_and_is_named(tree: Path) -> None:
    graph = Graph(tree)
    assert of_all(["tests/test_base.py", "LICENSE"], graph) == (set(graph.tests), "LICENSE")
    assert of_all(["tests/test_base.py"], graph) == ({"tests/test_base.py", "tests/test_repository.py"}, "")


def test_what_changed_is_committed_or_not_and_has_both_names(tree: Path) -> None:
    def git(*arguments: str) -> None:
        names = ("-c", "user.name=x", "-c", "user.email=x@y")
        subprocess.run(["git", "-C", str(tree), *names, *arguments], check=True, capture_output=True)

    git("init", "--quiet", "--initial-branch", "main")
    git("add", "-A")
    git("commit", "--quiet", "--message", "x")
    git("checkout", "--quiet", "-b", "work")
    git("mv", "lab/lone.py", "lab/alone.py")
    git("commit", "--quiet", "--message", "x")
    (tree / "lab/rows.py").write_text("")
    (tree / "new.py").write_text("")
    assert changed.since("main", tree) == ["lab/alone.py", "lab/lone.py", "lab/rows.py", "new.py"]
    with pytest.raises(subprocess.CalledProcessError):
        changed.since("nosuch", tree)


def test_an_unknown_base_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert changed.main(["no-such-branch"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_most_of_a_room_does_not_run_the_kernels() -> None:
    """A list that is always the whole suite would miss nothing either."""
    graph = here()
    for path in ("lab/judge/rules.py", "lab/draw/style.py", "lab/trace/amdahl.py", "kernels/kv/cases.py"):
        tests = graph.of(path)
        assert tests is not None, path
        assert not [t for t in tests if "nvfp4" in t and t.startswith("tests/kernels/")], path
        assert len(tests) < len(graph.tests) * 0.7, path
