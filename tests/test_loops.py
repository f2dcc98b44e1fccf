"""A loop over many things must fail as often, and tell as much, as a test of each."""

import pytest

from tests.loops import over


def test_every_failure_is_named_and_none_hides_the_next() -> None:
    asked = []

    @over({"one": (1, 1), "two": (2, 3), "three": (3, 0), "four": (4, 4)})
    def test_equal(a: int, b: int) -> None:
        asked.append(a)
        assert b, "nothing there"
        assert a == b

    with pytest.raises(AssertionError) as failure:
        test_equal()
    assert asked == [1, 2, 3, 4]
    said = str(failure.value)
    assert said.startswith("2 of 4 fail:\n")
    assert [name in said for name in ("one: ", "two: ", "three: ", "four: ")] == [False, True, True, False]


def test_what_is_raised_is_a_failure_too() -> None:
    @over({"zero": (0,)})
    def test_inverse(a: int) -> None:
        assert 1 / a

    with pytest.raises(AssertionError, match="zero: ZeroDivisionError"):
        test_inverse()


def test_what_was_to_be_raised_and_was_not_is_a_failure_too() -> None:
    @over({"zero": (0,), "one": (1,)})
    def test_no_inverse(a: int) -> None:
        with pytest.raises(ZeroDivisionError):
            assert 1 / a

    with pytest.raises(AssertionError, match=r"1 of 2 fail:\none: Failed DID NOT RAISE"):
        test_no_inverse()


def test_nothing_to_ask_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="nothing to ask"):
        over({})(lambda: None)()
