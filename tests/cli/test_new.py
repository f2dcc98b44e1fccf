"""`lab new`: what it writes works at once, and nothing that is there is touched."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lab.base.errors import REPOSITORY
from lab.card import phases
from lab.cli import main, new
from tests.refused import held

Capture = pytest.CaptureFixture[str]
FAMILY = """
import sys
from lab.cli.main import main
codes = [main(words.split()) for words in ("new family scale_rows", "check scale_rows", "new family scale_rows",
                                           "new card mine --family scale_rows", "judge mine.toml")]
print(codes, file=sys.stderr)
"""


@pytest.mark.slow
def test_a_new_family_is_green_at_once(tmp_path: Path) -> None:
    """In a copy of what it needs; its own test too."""
    for name in ("lab", "kernels", "data"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").mkdir()
    shutil.copy(REPOSITORY / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow']\n")

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        own = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "KILLGATE_RUNNING"))}
        own["PYTHONPATH"] = str(tmp_path)
        command = (sys.executable, *command)
        return subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=240)

    done = run("-c", FAMILY)
    assert done.stderr.strip().endswith("[0, 0, 2, 0, 0]"), done
    assert done.stdout.count("ok        scale_rows/triton_rows") == 3
    assert "torch_mul and triton_rows at m4096_n4096_bf16" in done.stdout
    left = [path for path in tmp_path.rglob("*") if "newfamily" in path.name or path.name.startswith(".new")]
    assert [path for path in left if "data" not in path.parts] == []
    tested = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/scale_rows")
    assert "9 passed" in tested.stdout, tested


def test_a_new_card_loads_and_asks(tmp_path: Path, capsys: Capture) -> None:
    assert main.main(["new", "card", "mine", "--cards", str(tmp_path)]) == 0
    before = (tmp_path / "mine.toml").read_text()
    card = phases.load(tmp_path / "mine.toml")
    assert (card.id, card.own, card.family, card.gate.require[0].metric) == ("mine", True, "", "decode_tps")
    capsys.readouterr()
    for arguments, where, word in (
        (["mine"], "mine.toml", "there already"),
        (["../mine"], "lab new card", "../mine"),
        (["mine.toml"], "lab new card", "mine.toml"),
        (["p5"], "lab new card", '"p5"'),
        ([], "lab new card", "name"),
    ):
        assert main.main(["new", "card", *arguments, "--cards", str(tmp_path)]) == 2
        held(capsys.readouterr().err, where, word)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]
    assert (tmp_path / "mine.toml").read_text() == before


@pytest.mark.parametrize("name", ["common", "Scale", "9rows", "class", "a-b", "../x"])
def test_a_family_that_cannot_be_named_so(name: str, capsys: Capture) -> None:
    before = sorted((REPOSITORY / "kernels").iterdir())
    assert main.main(["new", "family", name]) == 2
    assert name in capsys.readouterr().err
    assert sorted((REPOSITORY / "kernels").iterdir()) == before


def test_a_family_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    from lab.check import families

    (tmp_path / "kernels").mkdir()
    monkeypatch.setattr(families, "FOLDER", tmp_path / "kernels")
    monkeypatch.setattr(new, "REPOSITORY", tmp_path)

    def full(source: Path, place: Path) -> None:
        if place.parts[-1] == "scale" and "tests" not in place.parts[-3:]:
            place.mkdir()  # the first of two gets through
        else:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(new.shutil, "move", full)
    assert main.main(["new", "family", "scale"]) == 2
    held(capsys.readouterr().err, "scale", "No space")
    assert list((tmp_path / "kernels").iterdir()) == []
