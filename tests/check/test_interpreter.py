"""`lab.check.interpreter`: a launch that shares its replacements computes the same bits, and puts everything back."""

from importlib import util
from typing import Any

import pytest
import torch

from lab.check import interpreter

pytestmark = pytest.mark.skipif(util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def kernel():
    """A kernel whose body calls a function that calls another one, some of it through tl.sum's own module."""
    import triton
    import triton.language as tl

    @triton.jit
    def shifted(x):
        return tl.sum(x, axis=0) + x

    @triton.jit
    def doubled(x):
        return shifted(x) * 2

    @triton.jit
    def body(at, out, fail: tl.constexpr):
        x = tl.load(at + tl.arange(0, 8))
        tl.static_assert(not fail)
        tl.store(out + tl.arange(0, 8), doubled(x) + shifted(x))

    body.fn.__globals__.update(tl=tl, doubled=doubled, shifted=shifted)
    return body


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often the interpreter's own preparation runs; `share_patches` is applied on top of that."""
    from triton.runtime import interpreter as triton_interpreter

    real = triton_interpreter._patch_lang
    while hasattr(real, "shares"):
        real = real.prepares
    seen: list[str] = []

    def counted(fn: Any) -> Any:
        seen.append(fn.__name__)
        return real(fn)

    monkeypatch.setattr(triton_interpreter, "_patch_lang", counted)
    return seen


def run(kernel, fail: bool = False) -> torch.Tensor:
    out = torch.full((8,), float("nan"))
    kernel[(1,)](torch.arange(8.0), out, fail)
    return out


def test_a_call_shares_what_its_launch_replaced(kernel, calls: list[str]) -> None:
    import triton.language as tl

    before = tl.load
    expected = run(kernel)
    assert calls.count("shifted") == 2
    asked = len(calls)
    interpreter.share_patches()
    assert torch.equal(run(kernel), expected)
    assert len(calls) - asked < asked
    assert "shifted" not in calls[asked:]
    assert tl.load is before


def test_a_launch_that_fails_puts_back_what_it_replaced(kernel, calls: list[str]) -> None:
    import triton.language as tl

    expected, before = run(kernel), tl.load
    interpreter.share_patches()
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the interpreter wraps it in
        run(kernel, fail=True)
    assert tl.load is before
    asked = len(calls)
    assert torch.equal(run(kernel), expected)
    assert "body" in calls[asked:], "the next launch prepares again"


def test_another_release_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter as triton_interpreter

    monkeypatch.delattr(triton_interpreter, "_LangPatchScope")
    before = triton_interpreter._patch_lang
    interpreter.share_patches()
    assert triton_interpreter._patch_lang is before
