"""Rows as notebooks show them: arms of one run and reproductions. The other helpers stand with test_notebooks.py."""

import base64
import dataclasses
import re
from typing import Any

import pandas as pd
import pytest
from msgspec import structs

from lab import draw
from lab.base.errors import BadInput
from lab.card import gate, phases
from lab.check import families
from lab.row import store
from lab.row.records import Measurement
from lab.write import figures, notebook
from tests.row.made import changed, measurement

RUN = "2026-11-20T120000Z"
BASE: dict[str, Any] = {
    "device": "h200", "phase": "p-test", "family": "any", "precision": "bf16", "workload_id": "t64_hk1_hv2",
    "workload": {}, "run": RUN, "flops": 2e9, "bytes": 48_000_000, "pipe": "bf16",
}  # fmt: skip
OK: dict[str, Any] = {"status": "ok", "iqr_us": 0.5, "relative_error": 1e-3}


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Appends rows of the test phase to an otherwise empty profiles folder."""
    monkeypatch.setattr(store, "FOLDER", tmp_path)

    def add(**fields):
        store.append(tmp_path / "h200" / "p-test" / RUN, measurement(**BASE | fields))

    return add


def test_arms_are_of_one_run(rows):
    """Of the newest run in which the candidate is right: a later one without it is no comparison."""
    card = structs.replace(phases.card("p5-kernel"), id="p-test", candidate="new", workloads=(BASE["workload_id"],))
    assert figures.judged_rows(card, "h200") == {}
    rows(arm="control", name="old", median_us=40.0, **OK)
    rows(arm="candidate", name="new", median_us=30.0, **OK)
    rows(arm="candidate", name="broken", status="error", message="out of registers")
    later = "2026-11-20T130000Z"
    alone = measurement(**BASE | OK | {"name": "old", "median_us": 10.0, "run": later})
    store.append(store.FOLDER / "h200" / "p-test" / later, alone)
    (found,) = figures.judged_rows(card, "h200").values()
    assert {name: row.median_us for name, row in found.items()} == {"old": 40.0, "new": 30.0}


def test_arms_of_workloads_that_a_gate_compares_are_of_one_run(rows):
    """A later run of one of the two is not put beside the other's, as the judge does not."""
    card = structs.replace(phases.card("kv-page64"), id="p-test")
    small, large = card.compared[0]
    later = "2026-11-20T130000Z"
    for run, us, ids in ((RUN, 30.0, (small, large)), (later, 10.0, (small,))):
        for workload_id in ids:
            for arm, name in (("control", card.control), ("candidate", card.candidate)):
                row = BASE | OK | {"arm": arm, "name": name, "median_us": us, "run": run, "workload_id": workload_id}
                store.append(store.FOLDER / "h200" / "p-test" / run, measurement(**row))
    found = figures.judged_rows(card, "h200")
    assert {w: found[w][card.candidate].run for w in (small, large)} == {small: RUN, large: RUN}
    apart = structs.replace(card, gate=gate.Gate(), claims=())
    assert figures.judged_rows(apart, "h200")[small][card.candidate].run == later


def kernel_row(name: str, workload: str, config: str, **more: Any) -> Measurement:
    own = {"family": "nvfp4", "name": name, "workload_id": workload, "config": config, "run": RUN}
    return measurement(**own | {"commit": "abcdef0123", "dirty": True} | more)


def present(name: str, workload: str) -> str:
    family = families.load("nvfp4")
    return family.candidate(name).config(family.workload(workload))


FEW, MANY = "m8_n5120_k6144", "m32_n17408_k5120"


@pytest.mark.parametrize(
    ("name", "workload", "config", "said"),
    [
        ("cuda_decode", FEW, None, ""),
        ("cuda_decode", FEW, "nvfp4_ring_of_before grid=132", "former kernel"),
        ("cuda_decode", MANY, "nvfp4_ring_of_before grid=132", "former kernel, refused now"),
        ("cuda_gemm", MANY, None, ""),
        ("no_such_kernel", FEW, "", "former kernel, gone"),
        ("cuda_decode", "m8_n1_k1_gone", "", "former workload, gone"),
        ("torch_bf16", FEW, "another version of the library", ""),
    ],
)
def test_a_row_of_a_kernel_that_changed_is_marked(name: str, workload: str, config: str | None, said: str) -> None:
    assert not families.load("nvfp4").unavailable
    row = kernel_row(name, workload, present(name, workload) if config is None else config)
    assert families.former(row) == said


def test_what_could_not_be_imported_is_not_called_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = families.load("nvfp4")
    lacking = dataclasses.replace(whole, candidates={}, unavailable={"cuda_decode": "No module named x"})
    monkeypatch.setattr(families, "launches", lambda name, *asked: families.described(lacking, *asked))
    assert families.former(kernel_row("cuda_decode", FEW, "")) == "cannot be compared"


@pytest.mark.parametrize("device", ["h200", "gb10"])
def test_a_kernel_chosen_by_capability_is_described_for_the_device_of_the_row(device: str) -> None:
    """Here there is no GPU, and the chunks of this kernel are 64 tokens on the one device and 32 on the other."""
    rows = store.rows(device="h200", phase="gdn-prefill-limit")
    row = next(r for r in rows[::-1] if r.name == "fused_chunk")
    assert families.former(changed(row, device=device)) == ("" if device == "h200" else "former kernel")


def test_the_line_below_a_table_names_runs_commits_and_former_kernels() -> None:
    same = kernel_row("cuda_decode", FEW, present("cuda_decode", FEW))
    old = kernel_row("cuda_decode", MANY, "before", run="2026-11-21T120000Z", commit="1234567890", dirty=None)
    assert notebook.origin([]) == ""
    assert notebook.origin([same]) == f"Rows of run {RUN} (commit abcdef0 and changes on top of it)."
    stated = changed(same, stated_commit="fedcba9876")
    assert notebook.origin([stated]) == f"Rows of run {RUN} (commit fedcba9, as stated)."
    both = notebook.origin([same, old, changed(old, status="incorrect", workload_id="x")])
    assert "run 2026-11-21T120000Z (commit 1234567)." in both
    assert "**Former kernel:** `cuda_decode` on 1 of 2 workloads" in both


def test_a_newer_row_of_the_present_kernel_clears_the_mark() -> None:
    old = kernel_row("cuda_decode", FEW, "before")
    new = kernel_row("cuda_decode", FEW, present("cuda_decode", FEW), run="2026-11-22T120000Z")
    assert "Former" not in notebook.origin([new, old])


def test_a_frame_wider_than_a_terminal_is_not_padded() -> None:
    narrow, wide = (pd.DataFrame({"x": [1, 2], "said": ["a", "b" * n]}) for n in (1, notebook.PLAIN_WIDTH))
    assert notebook.show(narrow).bundle["text/plain"] == narrow.to_string(index=False)
    assert notebook.show(wide).bundle["text/plain"] == notebook.show(wide).bundle["text/markdown"]


# Figures of a card ----------------------------------------------------------------------------------------------------


def texts(figure: Any) -> str:
    return " ".join(re.findall(r"<text[^>]*>(.*?)</text>", draw.svg(figure), re.S))


def test_arms_say_what_is_not_measured():
    card = structs.replace(phases.card("p5-kernel"), workloads=(*phases.card("p5-kernel").workloads, "t1_nobody"))
    picture = figures.arms(card, "h200")
    said = texts(picture.figure)
    assert "t1_nobody" in said
    assert said.count("not measured") == 1
    assert "control: fused_chunk" in said
    with pytest.raises(BadInput, match="no measured rows"):
        figures.arms(card, "gb10")


def test_a_roofline_has_a_roof_for_each_pipe_that_a_point_uses():
    """Fp8 points over a bf16 roof alone would say INVALID."""
    said = texts(figures.roofline(phases.card("w4a8-prefill-limit"), "h200").figure)
    assert "fp8 1979" in said
    assert "bf16 989.5" in said
    assert said.count("cuda_w4a8_promoted") == 1, "many points are told apart by a legend, not by labels"


def test_kernels_of_both_arms_come_from_the_committed_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, workload = figures.sides(phases.card("p5-kernel"), "h200")
    assert workload in phases.card("p5-kernel").workloads
    assert ours.whole < theirs.whole
    assert {p.category for p in ours.parts} != {p.category for p in theirs.parts}
    found = store.found
    monkeypatch.setattr(store, "found", lambda pattern: [p for p in found(pattern) if "moe-skew" not in p.parts])
    with pytest.raises(BadInput, match="no trace from h200 is committed"):
        figures.breakdown(phases.card("moe-skew"), "h200")


def test_a_traced_step_of_another_length_than_the_timed_one_says_why() -> None:
    """Its kernels take what the rows say, to 3 %: the rest is idle, for the host launches them under a profiler."""
    card, own = phases.card("moe-lp5-small-m"), figures.breakdown(phases.card("moe-lp5-small-m"), "h100").alt
    rows = figures.judged_rows(card, "h100")["t128_e256_k8_h2048_f512_s512"]
    control, candidate = (f"{rows[name].own_us:,.4g} us of {name}" for name in (card.control, card.candidate))
    assert f"By the rows a step takes {control} and {candidate} (graph timing, cold L2), where the kernels here" in own
    assert own.endswith("under torch.profiler the host launched each kernel and waited for each step.")
    busy = re.search(r"add up to ([\d,.]+) and ([\d,.]+) us and the rest is idle", own)
    assert busy is not None
    for us, name in zip(busy.groups(), (card.control, card.candidate), strict=True):
        assert float(us.replace(",", "")) == pytest.approx(rows[name].own_us, rel=0.03)
    one = figures.breakdown(phases.card("p5-cuda"), "h200").alt  # cuda_scan's step is as long as its row's
    assert "us of split_pipeline (graph" in one
    assert "us of cuda_scan (" not in one
    assert "By the rows" not in figures.breakdown(phases.card("step-lp10"), "h200").alt  # a graph's replay


def test_a_picture_is_svg_and_a_small_png_with_its_description():
    shown = notebook.picture(figures.arms(phases.card("p5-kernel"), "h200").figure, "arms of p5-kernel")
    data, metadata = shown._repr_mimebundle_()
    png = base64.b64decode(data["image/png"])
    assert png.startswith(b"\x89PNG")
    assert len(png) < 40_000
    assert {k: v["alt"] for k, v in metadata.items()} == dict.fromkeys(
        ("image/svg+xml", "image/png"), "arms of p5-kernel"
    )
