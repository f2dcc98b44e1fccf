"""Triton's interpreter, without what it does again and again to no end: a check takes a third of the time.

The interpreter runs a kernel as Python, an operation at a time, and most of its time is not the operation:

    shared patches      Before the body it replaces every builtin of `triton.language` by one on NumPy, and puts the old
                        ones back behind it. It does the same around each @triton.jit function that the body calls,
                        where it finds everything replaced already. To know what to replace it asks every name of the
                        language, at each launch.
    discarded checks    Around each sum, difference and product of integers it computes whether it overflowed, in ten
                        operations, for an assertion that it makes with `debug` alone, which it does not set.
    equal types         Each operation makes its result's type anew: a shape as a tuple of constexpr, a name, the size,
                        a table of NumPy's types; and asks in a loop whether operands of one shape need a broadcast.
    equal operands      For operands of one type it works out the result's type, casts both to it and compares types;
                        so it does for a value beside a number, which takes the value's type.
    bfloat16            Taken apart into sign, exponent and significand and put together again, where the upper half of
                        a float32 is meant.

The numbers are the same ones. What is given up: this reaches into private names; a release that lacks one of them is
left as it is there.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any


def quicken() -> None:
    """Leave out what changes no number; a second call changes nothing more."""
    share_patches()
    remember_builtins()
    drop_discarded_checks()
    share_types()
    pass_equal_operands()
    cut_bfloat16()


def _replace(owner: Any, name: str, by: Callable[[Any], Any]) -> None:
    """owner.name by by(owner.name), which keeps it as `__wrapped__`; once, and where there is one."""
    old = getattr(owner, name, None)
    if old is not None and not hasattr(old, "__wrapped__"):
        setattr(owner, name, functools.wraps(old)(by(old)))


def share_patches() -> None:
    """Let a call inside a launch use the launch's replacements."""
    from triton import language
    from triton.runtime import interpreter

    scope = getattr(interpreter, "_LangPatchScope", None)
    prepared: set[int] = set()  # what the launch at hand has replaced; empty outside of one

    def sharing(prepare: Any) -> Any:
        def shared(fn: Any) -> Any:
            seen = {id(value) for value in fn.__globals__.values() if value is language or value is language.core}
            if prepared and seen <= prepared:
                return scope()  # type: ignore[misc]  # nothing to put back
            launch = not prepared
            made = prepare(fn)
            prepared.update(seen)
            if launch:  # the interpreter puts back what a launch replaced, and leaves a call's
                restore = made.restore

                def put_back() -> None:
                    prepared.clear()
                    restore()

                made.restore = put_back
            return made

        return shared

    if scope is not None:
        _replace(interpreter, "_patch_lang", sharing)


def remember_builtins() -> None:
    """Find the builtins of a module or class once, and call what they wrap."""
    from triton.language import core
    from triton.runtime import interpreter

    found: dict[Any, list[tuple[str, Any, Any]]] = {}  # name, the builtin, what stands for it
    plain = core.builtin(lambda: None).__code__  # of the wrapper that only asks whether `_semantic` was given

    def replacement(member: Any) -> Any:
        inner, semantic = member, interpreter.interpreter_semantic
        if getattr(member, "__code__", None) is plain:
            inner = member.__wrapped__

        def interpreted(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        return interpreted

    def remembering(_: Any) -> Any:
        def patch(owner: Any, builder: Any, scope: Any) -> None:
            if owner not in found:
                members = inspect.getmembers(owner)
                found[owner] = [(name, m, replacement(m)) for name, m in members if core.is_builtin(m)]
            for name, member, by in found[owner]:
                present = getattr(owner, name, None)
                if present is member:
                    scope.set_attr(owner, name, by)
                elif core.is_builtin(present):  # another one by now; what was replaced already is none
                    scope.set_attr(owner, name, replacement(present))

        return patch

    if hasattr(interpreter, "interpreter_semantic"):
        _replace(interpreter, "_patch_builtin", remembering)


def drop_discarded_checks() -> None:
    """Compute no overflow for an assertion that is not made."""
    from triton.runtime import interpreter

    builder = getattr(interpreter, "interpreter_builder", None)
    options: Any = getattr(builder, "options", None)
    if builder is not None and getattr(options, "sanitize_overflow", False) and not getattr(options, "debug", True):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def share_types() -> None:
    """Make what a shape brings along once for each shape, and ask for no broadcast between equal ones."""
    from triton.language import core
    from triton.runtime import interpreter

    blocks: dict[
        Any, dict[str, Any]
    ] = {}  # what a block_type of this element and shape has, but for the element's type
    tensors: dict[Any, dict[str, Any]] = {}  # the shape and the size of a tensor
    numpy_types: dict[str, Any] = {}
    fitting: set[tuple[int, str]] = set()  # bytes of an element and a type that they fit

    def of_block(make: Any) -> Any:
        def block(self: Any, element_ty: Any, shape: Any) -> None:
            key = (element_ty.name, *shape)
            if set(map(type, key[1:])) != {int}:  # constexprs, or what is refused
                make(self, element_ty, shape)
                return
            if key not in blocks:
                make(self, element_ty, shape)
                blocks[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
            vars(self).update(blocks[key], element_ty=element_ty)

        return block

    def of_tensor(make: Any) -> Any:
        def tensor(self: Any, handle: Any, type: Any) -> None:
            key = (*type.shape,) if type.is_block() else ()
            if key not in tensors:
                make(self, handle, type)
                tensors[key] = {"shape": self.shape, "numel": self.numel}
            vars(self).update(tensors[key], handle=handle, type=type, dtype=type.scalar)

        return tensor

    def of_handle(make: Any) -> Any:
        def handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
            key = data.itemsize, dtype.name
            if key in fitting:
                self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
                return
            make(self, data, dtype, {} if attr is None else attr)
            fitting.add(key)

        return handle

    def of_numpy(find: Any) -> Any:
        def numpy_type(type: Any) -> Any:
            if type.name not in numpy_types:
                numpy_types[type.name] = find(type)
            return numpy_types[type.name]

        return numpy_type

    def unless_equal(broadcast: Any) -> Any:
        def broadcast_impl_value(lhs: Any, rhs: Any) -> Any:
            one, other = lhs.type, rhs.type
            if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
                return lhs, rhs
            return broadcast(lhs, rhs)

        return broadcast_impl_value

    _replace(getattr(core, "block_type", None), "__init__", of_block)
    _replace(getattr(core, "tensor", None), "__init__", of_tensor)
    _replace(getattr(interpreter, "TensorHandle", None), "__init__", of_handle)
    _replace(interpreter, "_get_np_dtype", of_numpy)
    _replace(getattr(interpreter, "interpreter_semantic", None), "broadcast_impl_value", unless_equal)


def pass_equal_operands() -> None:
    """Leave two tensors of one type as they are, and a pointer and its offset, where nothing is cast."""
    from triton.language import core
    from triton.runtime import interpreter

    semantic: Any = getattr(interpreter, "interpreter_semantic", None)
    tensor = core.tensor
    known: dict[Any, Any] = {}

    def of_operands(check: Any) -> Any:
        def operands(
            lhs: Any,
            rhs: Any,
            allow_lhs_ptr: bool = False,
            allow_rhs_ptr: bool = False,
            arithmetic_check: bool = True,
            div_or_mod: bool = False,
        ) -> Any:
            if type(lhs) is tensor and type(rhs) is tensor:
                one, other = lhs.dtype, rhs.dtype
                if one.is_ptr():
                    alike = allow_lhs_ptr and other.is_int()  # an offset
                else:
                    alike = (one is other or one.name == other.name) and not (div_or_mod and one.is_floating())
                if alike:
                    return semantic.broadcast_impl_value(lhs, rhs)
            return check(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

        return operands

    def of_types(find: Any) -> Any:
        def computed(a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
            key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
            if key not in known:
                known[key] = find(a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
            return known[key]

        return computed

    def of_value(change: Any) -> Any:
        def cast(input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
            one, other = input.dtype, dst_ty.scalar
            if one is other or (one.name == other.name and not one.is_ptr()):
                return input
            return change(input, dst_ty, fp_downcast_rounding)

        return cast

    _replace(semantic, "cast", of_value)
    _replace(semantic, "binary_op_type_checking_impl", of_operands)
    _replace(semantic, "computation_type_impl", of_types)


def cut_bfloat16() -> None:
    """Between float32 and bfloat16: half of the bits, or zeros behind them. Subnormals are left to the interpreter."""
    from triton.runtime import interpreter

    def cutting(convert: Any) -> Any:
        def cut(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
            kinds = input_dtype.name, output_dtype.name
            if rounding_mode is None and kinds in (("fp32", "bf16"), ("bf16", "fp32")):
                narrow = kinds[1] == "bf16"
                bits = input.view("uint32" if narrow else "uint16")
                sign, normal = (1 << 31, 1 << 23) if narrow else (1 << 15, 1 << 7)
                size = bits & (sign - 1)
                if not ((size > 0) & (size < normal)).any():
                    return (bits >> 16).astype("uint16") if narrow else bits.astype("uint32") << 16
            return convert(input, input_dtype, output_dtype, rounding_mode)

        return cut

    _replace(interpreter, "_convert_float", cutting)
