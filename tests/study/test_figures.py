"""A figure that a file of data/ binds: what it must be to stand there."""

import pytest
from msgspec.structs import replace

from lab.card import recorded
from lab.study.figures import number
from tests.refused import refused

MEASURED = "lp.patch-0018.gb10.decode-agg.control.npl128.npp128"
WITHDRAWN = "lp.a2-cudagraph.gb10.gpu-busy.candidate"


def test_a_bound_figure_is_a_number_of_its_kind_that_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    assert number("data", MEASURED, ("measured",), stands=True).value == 146.23
    assert number("data", WITHDRAWN).withdrawn
    for figure, kinds, held, remedy in (
        (MEASURED, ("predicted", "ceiling"), f"{MEASURED} is measured", "predicted or ceiling"),
        (WITHDRAWN, (), f"{WITHDRAWN} was withdrawn (artifact", ""),
        (MEASURED + "x", (), f'"{MEASURED}x"', MEASURED),
    ):
        with refused("data", held, remedy=remedy):
            number("data", figure, kinds, stands=True)
    text = {MEASURED: replace(recorded.figure(MEASURED), value="about 150")}
    monkeypatch.setattr(recorded, "figures", lambda: text)
    with refused("data", f'{MEASURED} = "about 150"'):
        number("data", MEASURED)
