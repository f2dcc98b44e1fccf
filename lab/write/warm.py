"""What a warm server imports before its first fork (lab/write/jobs.py). Without a GPU: kernels are interpreted here.

Whatever fails stays for the job that needs it, which then says so.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable

from lab.card import phases, recorded
from lab.check import families

MODULES: tuple[str, ...] = ("lab.write.notebook", "lab.write.pairing", "lab.write.pages", "lab.write.render")
MODULES += ("IPython.core.interactiveshell", "nbformat")


def _try(run: Callable[..., object], *arguments: str) -> None:
    with contextlib.suppress(Exception):
        run(*arguments)


_try(families.interpret_on_cpu)
for _module in MODULES:
    _try(importlib.import_module, _module)
for _family in families.names():
    _try(families.load, _family)
_try(phases.cards)
_try(recorded.figures)
