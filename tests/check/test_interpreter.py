"""`lab.check.interpreter`: a launch without what is left out computes the same bits, and puts everything back."""

import dataclasses
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
    real = getattr(real, "__wrapped__", real)
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


def replaced() -> list[tuple[Any, str]]:
    """What `quicken` replaces."""
    from triton.language import core
    from triton.runtime import interpreter as triton_interpreter

    return [
        *((triton_interpreter, name) for name in ("_patch_lang", "_patch_builtin", "_get_np_dtype", "_convert_float")),
        *(
            (triton_interpreter.interpreter_semantic, name)
            for name in ("broadcast_impl_value", "binary_op_type_checking_impl", "computation_type_impl")
        ),
        *((kind, "__init__") for kind in (core.block_type, core.tensor, triton_interpreter.TensorHandle)),
    ]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The interpreter as it was imported."""
    from triton.runtime import interpreter as triton_interpreter

    for owner, name in replaced():
        found = getattr(owner, name)
        monkeypatch.setattr(owner, name, getattr(found, "__wrapped__", found))
    builder = triton_interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=True))
    return triton_interpreter


def test_no_bit_changes(plain: Any) -> None:
    """Integers that wrap, shapes that need a broadcast and shapes that do not, bfloat16 with its subnormals."""
    import triton
    import triton.language as tl

    @triton.jit
    def body(at, narrow, out, wide, n):
        row, column = tl.arange(0, 16)[:, None], tl.arange(0, 32)[None, :]
        x = tl.load(at + row * 32 + column)
        y = tl.load(narrow + row * 32 + column, mask=row + column < n, other=1.0).to(tl.float32)
        z = tl.sum(x * y, axis=1)[:, None] + tl.where(row > column, x, y) - tl.max(y, axis=0)[None, :]
        z += (x.to(tl.bfloat16) / (y + 1).to(tl.bfloat16)).to(tl.float32)  # computed in float32
        tl.store(out + row * 32 + column, z)
        tl.store(narrow + row * 32 + column, (x * 0.75).to(tl.bfloat16))
        tl.store(wide + row * 32 + column, (row + column) * 2147483647 + (x.to(tl.uint32, bitcast=True) >> 3) // 7)

    body.fn.__globals__.update(tl=tl)

    def ran() -> tuple[torch.Tensor, ...]:
        bits = torch.randint(-(2**31), 2**31, (512,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
        x = bits.view(torch.float32).clone()
        x[::3] = torch.arange(171) * 1e-40  # subnormals
        x = x.nan_to_num()
        narrow, out = (x.flip(0) / 3).bfloat16(), torch.zeros(512)
        wide = torch.zeros(512, dtype=torch.int64)
        body[(1,)](x, narrow, out, wide, 30)
        return narrow.view(torch.int16), out.view(torch.int32), wide

    before = ran()
    assert plain.interpreter_builder.options.sanitize_overflow
    interpreter.quicken()
    assert all(hasattr(getattr(*place), "__wrapped__") for place in replaced())
    assert not plain.interpreter_builder.options.sanitize_overflow
    for one, other in zip(before, ran(), strict=True):
        assert torch.equal(one, other)
    assert len({tuple(t.tolist()) for t in before}) == 3


def test_bfloat16_is_cut_to_the_interpreters_bits(plain: Any) -> None:
    import numpy as np
    import triton.language as tl

    convert = plain._convert_float
    interpreter.cut_bfloat16()
    every = np.arange(1 << 16, dtype=np.uint32)
    normal = every[((every & 0x7FFF) == 0) | ((every & 0x7FFF) >= 128)]
    for some in (every, normal, normal.reshape(2, -1).T):
        wide = ((some << 16) + (some * 2654435761 >> 16) * (some % 2)).astype(np.uint32)
        wide[(wide & 0x7FFFFFFF) < (1 << 23)] &= 0x80000000 if some is not every else 0xFFFFFFFF
        for bits, types in ((some.astype(np.uint16), (tl.bfloat16, tl.float32)), (wide, (tl.float32, tl.bfloat16))):
            bits = bits.view(np.float32) if bits.dtype == np.uint32 else bits
            one, other = (f(bits, *types, None) for f in (convert, plain._convert_float))
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert (one == other).all()


def test_what_is_no_shape_is_refused_as_before(plain: Any) -> None:
    import triton.language as tl

    interpreter.quicken()
    for _ in range(2):
        tl.block_type(tl.float32, [16, 1])
        for shape, error in (([16.0, 1], TypeError), ([24], ValueError), ([], TypeError), ([1 << 30], ValueError)):
            with pytest.raises(error):
                tl.block_type(tl.float32, shape)


@pytest.mark.parametrize("name", ["_LangPatchScope", "interpreter_builder", "interpreter_semantic", "_convert_float"])
def test_another_release_is_left_alone(plain: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(plain, name)
    before = plain._patch_lang
    interpreter.quicken()
    assert (plain._patch_lang is before) == (name == "_LangPatchScope")
