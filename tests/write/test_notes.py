"""The tables of kernels/<family>/NOTES.md are what the rows give, and `lab write --notes` changes nothing else."""

from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.text import Text
from msgspec.structs import replace

from kernels.step import cost
from lab.base import devices
from lab.base.console import between
from lab.bench import counters
from lab.card import phases
from lab.check import families
from lab.cli import main, new
from lab.judge import evidence, verdicts
from lab.row import store
from lab.row.records import Measurement
from lab.study import composed
from lab.trace import stored
from lab.write import notes, pages
from tests.study import test_composed

H200 = devices.get("h200")


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.slow) if name == "step" else name for name in families.names()],  # its traces
)
def test_the_notes_say_what_the_rows_say(family: str) -> None:
    """Each word and figure; `lab write --notes` makes them again after a measurement."""
    text = notes.path(family).read_text(encoding="utf-8")
    assert notes.written(family, text) == text
    for heading in ("## Floor and prediction", "## Results", "## Design", "## Dead ends", "## What bounds it now"):
        assert heading in text
    assert "| ok |" not in text, "an arm that is right has its time, the host's too"


def test_a_new_familys_notes_have_the_table_of_no_rows() -> None:
    text = (new.TEMPLATES / "family" / "NOTES.md").read_text(encoding="utf-8")
    assert between(text, notes.MARKS, notes.HEAD, Path("NOTES.md")) == text


def line(text: list[str], card: str, workload: str) -> list[str]:
    """The cells of one workload of one card."""
    start = next(i for i, line in enumerate(text) if f"**{card}:" in line)
    found = next(line for line in text[start:] if f"`{workload}`" in line)
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_a_line_is_one_run_as_the_judge_reads_it() -> None:
    card = phases.card("w4a16-decode")
    text = notes.table(card.family)
    rows = [r for r in store.rows("h200", card.id) if r.workload_id == "m1_n17408_k5120"]
    judged = [r for r in rows if r.name in (card.control, card.candidate)]
    control, candidate = evidence.pairs(judged, card.compared)["m1_n17408_k5120"]
    assert control is not None
    assert candidate is not None
    cells = line(text, card.id, "m1_n17408_k5120")
    assert cells[1:3] == [f"{control.median_us:.1f}", f"{candidate.median_us:.1f}"]
    reading = evidence.readings(judged, H200)
    kernel, share = (reading[name, "m1_n17408_k5120"] for name in ("kernel_us", "roofline_fraction"))
    assert kernel.change_pct is not None
    assert share.candidate is not None
    assert cells[3:5] == [f"{kernel.change_pct:+.1f} %", f"{100 * share.candidate:.0f} %"]
    run = {r.name: r.median_us or 0.0 for r in rows if r.run == candidate.run and r.status == "ok"}
    rivals = {n: us for n, us in run.items() if n in families.load(card.family).peers and n != card.control}
    best = min(rivals, key=rivals.__getitem__)
    assert cells[5].split(", ")[-1] == f"{best} {rivals[best]:.1f}"
    assert {word.split()[0] for word in cells[5].split(", ")} - {best} == set(card.beside) & set(run)
    word = verdicts.judge_measured(card, "h200").verdict.word
    assert any(f"**{card.id}: {word}** on h200, cuda_decode against torch_bf16, runs 2026-" in x for x in text)


def test_llama_cpp_stands_beside_the_fastest_arm_of_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = '{"pp": %d, "tg": %d, "pl": %d, "t_pp": 0.5, "speed_pp": %r, "t_tg": 0.4, "speed_tg": %r}'
    rows = [line % (1024, 64, n, n * 1024 / 0.5, n * 64 / 0.4) for n in (1, 7)]
    rows.append(line % (2048, 4, 1, 2048 / 0.5, 4 / 0.4))
    (tmp_path / "llama-batched-bench-q36-27b-h200.jsonl").write_text("\n".join(rows))
    monkeypatch.setattr(notes, "IMPORTED", tmp_path)
    _, _, *found = notes.llama_cpp("step")
    ours = [r for r in store.rows("h200", family="step") if r.workload_id == "decode_q36-27b_npl1_ctx1024"]
    assert any(r.metric == "host_us" and r.ok for r in ours)  # a host's time is no step's
    ours_ms = min(r.time_us for r in ours if r.time_us) / 1e3
    assert [line.split(" | ")[:4] for line in found] == [
        ["| `decode_q36-27b_npl1_ctx1024`", "6.25", f"{ours_ms:.4g}", f"{6.25 / ours_ms:.2f}"],
        ["| `decode_q36-27b_npl7_ctx1024`", "6.25", "", ""],
        ["| `prefill_q36-27b_npl1_t2048_ctx0`", "500", "", ""],
    ]


def test_a_step_by_its_parts_is_the_fastest_traced_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of a made-up trace over the floors of the cost model; an arm that is gone, or was eager, is left out."""
    where, both = "decode_odd_npl3_ctx17", ("control", "candidate")
    rows = store.found
    monkeypatch.setattr(
        store, "found", lambda name: sorted(tmp_path.glob(name)) if name.endswith("trace.parquet") else rows(name)
    )
    made = test_composed.steps(test_composed.STEP, [2_000, 4_000])
    faster = test_composed.steps(test_composed.STEP, [1_000, 1_000])
    made = replace_fields(made, labels=[f"step-lp9/{arm}/{where}/step 0" for arm in both])
    for run, about, graph in (
        ("r1", {"control": "served", "candidate": "served_gathered"}, 7),
        ("r2", {"control": "served", "candidate": "gone"}, 7),
        ("r3", {"control": "served", "candidate": "served"}, -1),
    ):
        made = made if graph > 0 else replace_fields(faster, labels=made.labels)
        of = replace_fields(made, kernels=replace_fields(made.kernels, graph=np.full(len(made.kernels.name), graph)))
        stored.save(of, tmp_path / "h200/step-lp9" / run / "trace.parquet", about=about)
    lines = notes.in_parts("step")
    assert len(lines) == 3
    cells = [cell.strip() for cell in lines[-1].strip("|").split("|")]
    n = len(test_composed.STEP)
    assert cells[:3] == [f"`{where}`", "served", f"{(n * 2 + (n - 1) * 0.5 + 1):.0f}"]
    workload = families.load("step").workload(where)
    costs = cost.parts(workload, "nvfp4-w4a16")
    floor = sum(composed.floor_us(H200, costs[part]) for part in ("gdn", "gdn products"))
    assert cells[5:7] == ["18", f"{18 / floor:.2f}"]
    us = [float(cells[i].replace(",", "")) for i in (3, 5, 7, 9, 11)]
    assert sum(us) == pytest.approx(float(cells[2]), abs=2)
    assert cells[-1] == "r1"


def test_counters_of_a_step_are_told_by_kernel_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(rows for (name, _), rows in counters.newest("h200").items() if name == "cuda_experts")[0]
    rows = [
        replace(first, kernel=kernel, dram_read_bytes=mb * 1e6, duration_us=us, dram_pct=pct)
        for kernel, mb, us, pct in (("a", 50, 20, 71), ("a", 100, 40, 81), ("b", 50, 30, 61), ("a", 51, 22, 72),
                                    ("a", 52, 24, 73), ("c", 1, 1.2, 5))
    ]  # fmt: skip
    monkeypatch.setattr(counters, "newest", lambda device: {("one", "w"): rows, ("alone", "w"): rows[:1]})
    _, _, *found = notes.counted(first.family)
    cells = [line.split(" | ")[2:6] for line in found]
    # Three of 20 to 24 us are most of the call; c is less than a hundredth of it.
    assert cells == [["`a`", "3", "22.0", "72 %"], ["`a`", "1", "40.0", "81 %"], ["`b`", "1", "30.0", "61 %"]]
    assert notes.counted("kv")[2:] == []


def test_an_arm_without_a_time_shows_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    card, every = phases.card("w4a16-gemv"), store.rows

    def spoiled(device: str | None = None, phase: str | None = None, **more: Any) -> list[Measurement]:
        found = every(device, phase, **more)
        return [replace(r, status="oom") if r.name == card.candidate and phase == card.id else r for r in found]

    monkeypatch.setattr(store, "rows", spoiled)
    assert line(notes.table(card.family), card.id, card.workloads[0])[2:5] == ["oom", "", ""]


def test_lab_write_notes_changes_the_tables_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = {name: tmp_path / f"{name}.md" for name in families.names()}
    for path in stale.values():
        path.write_text("before\n" + notes.MARKS[0] + "\nold\n" + notes.MARKS[1] + "\nafter\n")
    monkeypatch.setattr(notes, "path", stale.__getitem__)
    assert main.main(["write", "--notes"]) == 0
    for name, path in stale.items():
        text = path.read_text()
        assert text.startswith("before\n")
        assert text.endswith("after\n")
        assert text.splitlines()[2:-2] == notes.table(name)
    next(iter(stale.values())).write_text("no marks")
    assert main.main(["write", "--notes"]) == 2
    assert "put them around the table" in capsys.readouterr().err
    assert main.main(["write", "p5", "--notes"]) == main.main(["write", "--readme", "--notes"]) == 2
    assert "needs one card id, or --readme or --notes alone" in capsys.readouterr().err


def test_a_card_of_the_hosts_time_shows_its_rows_and_no_picture_of_the_gpu() -> None:
    card = phases.card("host-time-w4a16")
    found = pages.arms(card, "h200")
    assert all(row.metric == "host_us" and row.own_us for own in found.values() for row in own)
    assert all(pages.changes(card, own).keys() == {card.candidate, *card.beside} for own in found.values())
    ((name, picture),) = pages.pictures(card, "h200")
    assert name == "arms"
    drawn = [text.get_text() for text in picture.figure.findobj(Text)]
    assert sum(" us to " in text for text in drawn) == len(card.workloads)
    head = next(text for text in notes.table(card.family) if f"**{card.id}:" in text)
    assert "us of the host" in head
