"""The card directory in use: named, else of the environment, else that of a card given by its path."""

import os
from pathlib import Path

import pytest

from lab.base import own
from lab.base.errors import REPOSITORY
from tests.refused import refused


def test_which_folder_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(own.VARIABLE, raising=False)
    (tmp_path / "profiles").mkdir()
    with own.used(None, ["p1", str(REPOSITORY / "data/phases/localai/p1.toml")]):
        assert own.folder() is None
    with own.used(None, ["p1", str(tmp_path / "mine.toml")]):
        assert own.folder() == tmp_path
        assert own.profiles() == [REPOSITORY / "profiles", tmp_path / "profiles"]
        with own.used(str(REPOSITORY), [str(tmp_path / "mine.toml")]):
            assert own.folder() == REPOSITORY
        assert own.folder() == tmp_path
    with own.used(str(REPOSITORY)):
        assert own.profiles() == [REPOSITORY / "profiles"]  # else each row would count twice
    assert own.VARIABLE not in os.environ
    with own.used(str(tmp_path / "nowhere")), refused("--cards", "nowhere"):
        own.folder()
