"""Triton's interpreter, patched to prepare `triton.language` once a launch and not once a call.

The interpreter runs a kernel as Python: before the body it replaces every builtin of `triton.language` by one on NumPy,
and puts the old ones back behind it. It does the same around each @triton.jit function that the body calls, where it
finds everything replaced already, and finding that out is two fifths of a check's time. What is given up: this reaches
into a private function, so a release without it is left as it is.
"""

from __future__ import annotations

from typing import Any


def share_patches() -> None:
    """Let a call inside a launch use the launch's replacements; the numbers are the same ones."""
    from triton import language
    from triton.runtime import interpreter

    scope = getattr(interpreter, "_LangPatchScope", None)
    prepare = getattr(interpreter, "_patch_lang", None)
    if scope is None or prepare is None or hasattr(prepare, "shares"):
        return
    prepared: set[int] = set()  # what the launch at hand has replaced; empty outside of one

    def shared(fn: Any) -> Any:
        seen = {id(value) for value in fn.__globals__.values() if value is language or value is language.core}
        if prepared and seen <= prepared:
            return scope()  # nothing to put back
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

    shared.shares, shared.prepares = True, prepare  # type: ignore[attr-defined]
    interpreter._patch_lang = shared
