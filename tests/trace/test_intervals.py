"""lab/trace/intervals.py against counting every nanosecond one by one."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.trace.intervals import NOTHING, TABLE, Spans, compact, concurrent, group, merged, union
from tests.loops import over

END = 60
INTERVALS = st.lists(st.tuples(st.integers(0, END), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


def spans_of(pairs: list[tuple[int, int]], shuffle: bool = False) -> Spans:
    pairs = pairs if shuffle else sorted(pairs)
    starts, ends = np.array([p[0] for p in pairs], np.int64), np.array([p[1] for p in pairs], np.int64)
    return merged(starts, ends, is_sorted=not shuffle)


def depth(lists: list[list[tuple[int, int]]]) -> np.ndarray[Any, Any]:
    """How many of the lists cover each ns."""
    counts = np.zeros(END + 20, int)
    for pairs in lists:
        covered = np.zeros(END + 20, bool)
        for a, b in pairs:
            covered[a:b] = True
        counts += covered
    return counts


def covered(spans: Spans) -> np.ndarray[Any, Any]:
    return depth([list(zip(spans.start.tolist(), spans.end.tolist(), strict=True))]) > 0


@given(INTERVALS, st.booleans())
def test_merged_covers_the_same(pairs: list[tuple[int, int]], shuffle: bool) -> None:
    spans = spans_of(pairs, shuffle)
    assert (covered(spans) == (depth([pairs]) > 0)).all()
    assert spans.ns == int((depth([pairs]) > 0).sum())
    assert (spans.start[1:] > spans.end[:-1]).all(), "spans are disjoint and do not touch"


@settings(max_examples=50)
@given(INTERVALS, INTERVALS, INTERVALS)
def test_union_and_concurrent(a: list[Any], b: list[Any], c: list[Any]) -> None:
    parts = [spans_of(x) for x in (a, b, c)]
    assert (covered(union(parts)) == (depth([a, b, c]) >= 1)).all()
    assert (covered(concurrent(parts)) == (depth([a, b, c]) >= 2)).all()
    assert concurrent(parts).ns == int((depth([a, b, c]) >= 2).sum())


@settings(max_examples=50)
@given(INTERVALS, INTERVALS)
def test_overlap_gaps_and_measure(a: list[Any], b: list[Any]) -> None:
    one, two = spans_of(a), spans_of(b)
    assert one.overlap_ns(two) == two.overlap_ns(one) == int((depth([a, b]) == 2).sum())
    inside = ~covered(one)
    inside[:5] = inside[50:] = False
    assert (covered(one.gaps(5, 50)) == inside).all()
    times = np.arange(END + 20)
    assert one.measure_before(times).tolist() == [int(covered(one)[:t].sum()) for t in times]


@given(st.lists(st.tuples(st.integers(-3, 5), st.integers(0, 2), st.integers(-9, 9)), min_size=1, max_size=30))
def test_group_is_unique_rows(rows: list[tuple[int, int, int]]) -> None:
    table = np.array(rows)
    keys, codes = group(*table.T)
    assert keys == sorted(set(rows))
    assert [keys[c] for c in codes] == rows


@over(
    {
        "small": (np.array([5, 5, -1]),),
        "wider than the table": (np.array([0, TABLE + 10, 3]),),
        "one": (np.array([7], np.int32),),
        "one value stored once": (np.broadcast_to(np.int32(4), (6,)),),
    }
)
def test_compact_is_unique(values: np.ndarray[Any, Any]) -> None:
    unique, codes = compact(values)
    wanted, where = np.unique(values, return_inverse=True)
    assert unique.tolist() == wanted.tolist()
    assert codes.tolist() == where.tolist()


def test_nothing() -> None:
    assert [(s.ns, len(s)) for s in (union([]), concurrent([spans_of([(1, 2)])]), spans_of([(3, 3)]))] == [(0, 0)] * 3
    assert NOTHING.gaps(0, 10).ns == 10
    assert NOTHING.measure_before(np.array([3])).tolist() == [0]
