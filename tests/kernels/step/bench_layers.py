"""Where a step's layers spend their time: `python -m tests.kernels.step.bench_layers TRACE [KERNEL]`.

TRACE: a trace.parquet of one sequence's steps. A layer is from the end of one launch whose name ends in KERNEL (default
"_gated", a product of gate and up) to the end of the next. Printed are, by kind of layer, how often it was seen, and of
each launch its start and end behind the layer's start and how much later it ended than everything ahead of it, medians
in us. Where programmatic launches overlap, only the last of these add up to the layer.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from lab.trace import stored

MOST_NS = 200_000  # a layer of one sequence; what is longer has the head and the next step's start in it


def main(file: str, last: str = "_gated") -> None:
    """Print the table."""
    kernels, names = stored.load(Path(file)).kernels, stored.load(Path(file)).names
    order = np.argsort(kernels.start_ns, kind="stable")
    told = [names[n] for n in kernels.name[order]]
    starts, ends = kernels.start_ns[order], kernels.end_ns[order]
    marks = [i for i, name in enumerate(told) if name.endswith(last)]
    found = defaultdict(list)
    for first, end in itertools.pairwise(marks):
        if ends[end] - ends[first] < MOST_NS:
            found[tuple(told[first + 1 : end + 1])].append((first, end))
    for launches, layers in Counter({key: len(value) for key, value in found.items()}).most_common():
        if layers < len(marks) / 10:  # the first of a step, and what the profiler cut
            continue
        print(f"{layers} layers of {len(launches)} launches\n{'start':>8}{'end':>8}{'later':>8}")
        for place, name in enumerate(launches):
            began, ended, later = [], [], []
            for first, _ in found[launches]:
                at = first + 1 + place
                began.append((starts[at] - ends[first]) / 1e3)
                ended.append((ends[at] - ends[first]) / 1e3)
                later.append((ends[at] - max(ends[first:at])) / 1e3)
            print("".join(f"{statistics.median(each):8.1f}" for each in (began, ended, later)), name[:70])


if __name__ == "__main__":
    main(*sys.argv[1:])
