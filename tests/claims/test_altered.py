"""The claims can fail: asked once more with one recorded figure altered, an assert of their own must see it."""

import os
import runpy
import traceback
from pathlib import Path

import pytest
from msgspec import structs

from lab.base.errors import REPOSITORY
from lab.card import recorded
from lab.write import jobs

FOLDER = REPOSITORY / "tests" / "claims"
# A recorded figure that a notebook stands on, and another value for it.
ALTERED = {
    "00_start_here": ("lp.track-b-roofline.gb10.roofline-crossover-m.candidate", 700.0),
    "nvfp4": ("lp.lever1-ssm-out-2d.gb10.decode-agg.candidate.npl128.npp128", 300.0),
    "gdn": ("lp.p5.gb10.gdn-us-per-tok.candidate.npp2048.itemfla", 40.0),
    "gdn_state": ("lp.gdn-context-flat.gb10.gdn-us-per-launch.control.npl4.ctx4x", 11.0),
    "traces": ("lp.decode-parity-explore.gb10.fp4-matmul-share-of-gap.control.npl128", 40.0),
    "audit": ("lp.gate.phase-93.gdn-core-time.launches.candidate", 598.0),
    "kv": ("lp.gate.p6.ceiling-dense-ctx512-npl128", 9.0),
    "kv_ceiling": ("lp.gate.p6.ceiling-moe-ctx8192-npl8", 10.0),
    "imp": ("imp.graphs-gate.rtx-5090.graphs-on-off-ratio.candidate--4", 1.6),
    "lucebox": ("lb.draft-max.rtx-3090.decode.candidate.tokens4k.kvtq3-0.dm8--2", 22.5),
    "ds4": ("ds4.vmm-arena.rtx-pro-6000.prefill.candidate.ctx2048", 1300.0),
    "ik_llama": ("ik.sweep-main-vs-pr.2x-rtx-3090.decode.candidate.n-kv14336", 47.0),
    "staircase": ("lp.patch-0018.gb10.decode-agg.candidate.npl128.npp128", 170.0),
    "p5_p6_h200": ("lp.p5.gb10.gdn-us-per-tok.candidate.npp2048.itemfla", 40.0),
    "localai_p1_p6": ("lp.gate.p5.gdn-npp2048.candidate", 40.0),
}
# Notebooks that stand on measured rows, or on what they compute, alone: there is no recorded figure to alter.
MEASURED_ONLY = {"measuring", "kv_accuracy", "limits", "moe"}
# Instruments say nothing of rows; tests/write/test_instruments.py holds them.
INSTRUMENTS = {"phase", "profile", "kernel"}


def altered(name: str) -> list[str]:
    """The files that an assert was raised through when the claims ran with a figure altered, [] where none was.

    For a process of its own, as the figure stays altered.
    """
    figure, value = ALTERED[name]
    figures = dict(recorded.figures())
    figures[figure] = structs.replace(figures[figure], value=value)
    recorded.figures = lambda: figures  # type: ignore[assignment]
    try:
        runpy.run_path(str(FOLDER / f"test_{name}.py"))["test_claims"]()
    except AssertionError as error:
        return [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]
    return []


def test_every_notebook_says_what_it_stands_on():
    notebooks = {p.stem for p in (REPOSITORY / "notebooks").glob("*.py")}
    assert notebooks == set(ALTERED) | MEASURED_ONLY | INSTRUMENTS
    assert {p.stem for p in FOLDER.glob("test_*.py")} >= {f"test_{n}" for n in notebooks - INSTRUMENTS}


@pytest.mark.slow
def test_an_altered_figure_stops_each():
    """By an assert that is the claims' own."""
    todo = [jobs.Job(name, altered, (name,)) for name in sorted(ALTERED)]
    ended = {done.job.name: (done.value, done.failure) for done in jobs.run(todo, os.cpu_count() or 1, jobs.context())}
    assert ended.keys() == ALTERED.keys()
    assert {name: end for name, end in ended.items() if f"test_{name}.py" not in (end[0] or ())} == {}
