"""Files of data: what a type refuses is one line with the entry, the key and the nearest word; writing is atomic."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from lab.base import files
from lab.base.errors import REPOSITORY, BadInput
from tests.refused import refused


class Step(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    share: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    kind: Literal["small", "large"] = "small"
    words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.share > 9:
            raise ValueError(f"share = {self.share:g} is large; write it as a fraction")


class Stairs(msgspec.Struct, forbid_unknown_fields=True):
    step: list[Step] = []
    one: Step | None = None
    by_name: dict[str, Step] = {}


REFUSED: list[tuple[Any, str]] = [
    ({"stpe": []}, 'stairs.toml: unknown key "stpe"; did you mean "step"?'),
    ({"step": [{"name": "a"}, {"nam": "b"}]}, 'stairs.toml: step 2: unknown key "nam"; did you mean "name"?'),
    ({"step": [{"share": 2}]}, 'stairs.toml: step 1: key "name" is missing; give name'),
    ({"step": [{"name": "a", "share": 0}]}, "stairs.toml: step a: share = 0 cannot stand there; expected `float` > 0"),
    ({"step": [{"name": "a", "share": True}]}, "step a: share = True cannot stand there; expected `float`, got `bool`"),
    ({"step": [{"name": "a", "kind": "lrge"}]}, 'step a: kind = "lrge" is unknown; did you mean "large"?'),
    ({"step": [{"name": "a", "words": ["b", 3]}]}, "step a, words 2 = 3 cannot stand there; expected `str`"),
    ({"step": [{"name": "a", "share": 10}]}, "step a: share = 10 is large; write it as a fraction"),
    ({"step": ["a"]}, "step 1 = 'a' cannot stand there; expected `object`"),
    ({"step": "a"}, "stairs.toml: step = 'a' cannot stand there; expected `array`"),
    ({"one": {"name": "a", "shar": 1}}, 'one: unknown key "shar"; did you mean "share"?'),
    ({"one": {"name": "a", "share": float("nan")}}, "one.share = nan cannot stand there"),
    ({"by_name": {"b": {"name": 3}}}, "by_name b: name = 3 cannot stand there; expected `str`"),
    ([], "stairs.toml: the file = [] cannot stand there; expected `object`"),
]


def test_what_a_type_refuses() -> None:
    for raw, said in REFUSED:
        with pytest.raises(BadInput) as caught:
            files.convert(raw, Stairs, "stairs.toml")
        assert said in str(caught.value), raw
    assert files.convert({"step": [{"name": "a", "share": 2}]}, Stairs, "stairs.toml").step == [Step("a", 2.0)]


def test_reads_toml(tmp_path: Path) -> None:
    path = tmp_path / "stairs.toml"
    path.write_text('[[step]]\nname = "a"\n')
    assert files.read(path, Stairs).step[0].name == "a"
    path.write_text("[[step]]\nname = 3\n")
    with refused("stairs.toml", "step 1", "name = 3"):
        files.read(path, Stairs)


def test_a_missing_file_of_the_repository_and_of_the_user(tmp_path: Path) -> None:
    with refused("data/nowhere.toml", "no such file", remedy="version control"):
        files.read_toml(REPOSITORY / "data" / "nowhere.toml")
    for path in (tmp_path / "nowhere.toml", Path("nowhere.toml")):
        with refused("nowhere.toml", "no such file", remedy="check the name"):
            files.read_toml(path)


def test_written_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = files.write(tmp_path / "folder" / "a.txt", "first\n")

    def fails(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with refused("a.txt", "No space left on device"):
        files.write(path, "second\n")
    assert (path.read_text(), [p.name for p in path.parent.iterdir()]) == ("first\n", ["a.txt"])
