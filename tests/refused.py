"""What a refusal must say, whatever its wording: one line that names where, the key with its value, and a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lab.base.errors import BadInput


@contextmanager
def refused(where: str, *held: str, remedy: str = "") -> Iterator[None]:
    """Expects BadInput about `where` (the end of a path, or a flag) whose text has each of `held`, with a remedy."""
    with pytest.raises(BadInput) as caught:
        yield
    error = caught.value
    assert error.where.endswith(where), str(error)
    assert [word for word in held if word not in error.what] == [], str(error)
    assert error.remedy, str(error)
    assert remedy in error.remedy, str(error)
    assert "\n" not in str(error)


def held(said: str, where: str, *words: str) -> None:
    """What a command printed to standard error: one such line."""
    assert said.count("\n") == 1, said
    assert f"{where}: " in said, said
    assert [word for word in words if word not in said] == [], said
    assert "; " in said, f"no remedy: {said}"
