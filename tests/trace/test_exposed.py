"""Exposed time and gaps of the sample of tests/draw: 100 us, counted by hand."""

import pytest

from lab.base.errors import BadInput
from lab.trace import exposed
from lab.trace.model import Trace
from tests.draw.test_pictures import sample


def test_exposed_is_what_no_other_category_covers() -> None:
    """Attention 0-30 and 95-100, a GEMM 25-50, copies 45-55 and 60-65, a wait 70-80."""
    assert exposed.exposed_us(sample()) == {
        "attention": 30.0,
        "dense_gemm": 15.0,
        "memcpy DtoD": 5.0,
        "memcpy HtoD": 5.0,
    }


def test_gaps_are_longest_first_and_name_their_neighbours() -> None:
    found = [(g.start_us, g.us) for g in exposed.gaps(sample())]
    assert found == [(65.0, 30.0), (55.0, 5.0)], "a kernel that waits is idle time"
    assert exposed.gaps(sample(), most=1)[0].before == "splitkv_kernel"
    assert sum(us for _, us in found) == 35.0


def test_without_a_timeline_both_are_refused() -> None:
    totals = Trace(tool="t", source="totals", timeline=False)
    for ask in (exposed.exposed_us, exposed.gaps):
        with pytest.raises(BadInput, match="timeline"):
            ask(totals)
