"""A recorded figure that a file of data/ binds by its id."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from lab.base.errors import BadInput
from lab.card import recorded


def number(where: str | Path, figure_id: str, kinds: Collection[str] = (), *, stands: bool = False) -> recorded.Figure:
    """The figure with this id, whose value is a number.

    Raises BadInput naming `where` for one that is none, that is not of one of these kinds, or that its source withdrew
    although it must stand.
    """
    figure = recorded.figure(figure_id, where)
    if kinds and figure.kind not in kinds:
        raise BadInput(where, f"{figure.id} is {figure.kind}", f"bind a figure that is {' or '.join(kinds)} here")
    if stands and figure.withdrawn:
        raise BadInput(where, f"{figure.id} was withdrawn ({figure.withdrawn})", "bind a figure that stands")
    if not isinstance(figure.value, float):
        raise BadInput(where, f'{figure.id} = "{figure.value}" is not a number', "bind another figure")
    return figure
