"""The small lab: every name and method, on a machine without a GPU, and nothing that a card says becomes markup."""

import doctest
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from msgspec.structs import replace

import lab
from lab.base import own
from lab.base.errors import REPOSITORY, BadInput
from lab.card import phases as cards
from lab.check import accuracy, families
from lab.cli import main
from lab.row import store
from lab.row.records import Measurement
from lab.study import places
from lab.write import instruments, objects
from tests import own_card

EVIL = '<script>alert("x")</script>'


class Tags(HTMLParser):
    """The tags and the text of a piece of HTML, and which tags were left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def shows(thing: Any) -> Tags:
    """What Jupyter would show, which must be well formed text or HTML."""
    if hasattr(thing, "_repr_mimebundle_"):
        bundle, _ = thing._repr_mimebundle_()
        assert bundle["text/plain"]
        return Tags(bundle.get("text/markdown", ""))
    assert repr(thing)
    page = Tags(thing._repr_html_())
    assert "script" not in page.tags
    return page


# Names ----------------------------------------------------------------------------------------------------------------


def test_every_name_is_there_and_another_is_refused() -> None:
    for name in lab.__all__:
        assert getattr(lab, name) is not None, name
    with pytest.raises(AttributeError, match="no attribute 'phaze'"):
        _ = lab.phaze


def test_the_page_lists_every_name_and_its_examples_run() -> None:
    page = REPOSITORY / "lab" / "README.md"
    text = page.read_text(encoding="utf-8")
    assert [name for name in lab.__all__ if not name.startswith("_") and f"`{name}" not in text] == []
    families.interpret_on_cpu()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    done = doctest.testfile(str(page), module_relative=False, optionflags=flags, encoding="utf-8")
    assert done.attempted > 10
    assert done.failed == 0


def test_import_is_light() -> None:
    code = "import sys, lab; lab.__all__; heavy = {'torch', 'pandas', 'matplotlib', 'numpy', 'msgspec'}"
    done = subprocess.run([sys.executable, "-c", f"{code}; print(heavy & set(sys.modules))"], cwd=REPOSITORY,
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("first", ["import lab.trace.files", "from lab import trace", "pass"])
def test_trace_is_a_room_and_a_function(first: str) -> None:
    code = f"{first}\nfrom lab import trace\nfrom lab.trace import files\nassert trace.files is files\ntrace.__call__"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: lab.phase("p55"), 'did you mean "p5"?'),
        (lambda: lab.family("gnd"), 'did you mean "gdn"?'),
        (lambda: lab.device("h20"), 'did you mean "h200"?'),
        (lambda: lab.rows(phase="p5-kernal"), 'did you mean "p5-kernel"?'),
        (lambda: lab.phases("ds5"), 'did you mean "ds4"?'),
        (lambda: lab.judgements("p55"), 'did you mean "p5"?'),
        (lambda: lab.value("lp.p5.gb10.smem-kap.candidate"), "did you mean"),
        (lambda: lab.family("gdn")["fused_chunck"], 'did you mean "fused_chunk"?'),
        (lambda: lab.phase("p5").verdict("h200"), 'did you mean "gb10"?|valid: gb10'),
        (lambda: lab.phase("p6-step").check(), "has no kernels here"),
        (lambda: lab.open_trace("absent.sqlite"), "absent.sqlite"),
    ],
)  # fmt: skip
def test_what_is_unknown_is_refused_with_the_nearest(ask: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said) as refused:
        shows(ask())
    assert "\n" not in str(refused.value)


# Objects --------------------------------------------------------------------------------------------------------------


def test_phase_shows_its_card_and_its_verdicts() -> None:
    p = lab.phase("p5")
    page = shows(p)
    assert all(words in page.text for words in (p.card.question, p.card.hypothesis, p.card.null, p.title))
    verdict = p.verdict()
    assert (verdict.word, verdict.judgement.device) == ("NO-GO", "gb10")
    assert [f.state for f in verdict.conditions] == ["fails", "holds", "holds"]
    assert "gdn_us_per_token +112.15 %" in shows(verdict).text
    assert "Question" in shows(p.writeup()).text
    assert not p.rows()


def test_measured_phase_has_its_interval_and_its_roofline() -> None:
    p = lab.phase("moe-routed")
    verdict = p.verdict("h200")
    assert verdict.word == "GO"
    assert "96 % interval" in shows(verdict).text
    assert shows(verdict).tags.count("img") == sum(f.seen is not None for f in verdict.conditions) > 0
    assert shows(p.at_the_line("h200")).text == shows(verdict).text
    assert "not measured" in repr(p.at_the_line("gb10"))
    assert "8 placements" in shows(verdict).text
    assert all(isinstance(r, Measurement) for r in p.rows("h200"))
    svg = p.roofline("h200").bundle["image/svg+xml"]
    assert p.card.candidate in svg
    assert "not measured" in repr(p.roofline("gb10")), "a missing row is said, in its figure's place"
    with pytest.raises(BadInput, match="no device"):
        p.roofline("h300")


def test_breakdown_of_a_committed_trace() -> None:
    table = lab.phase("p5-kernel").breakdown("h200")
    frame = table.frame()
    assert set(frame.arm) == {"control", "candidate"}
    assert frame.groupby(["arm", "workload"]).share.sum().between(0.99, 1.01).all()
    assert "us a step" in shows(table).text


def test_phases_rows_and_judgements_are_tables() -> None:
    every = lab.phases()
    assert [p.id for p in every] == list(cards.cards())
    assert {p.system for p in lab.phases("ds4")} == {"ds4"}
    rows = lab.rows(family="gdn", device="h200")
    assert {r.family for r in rows} == {"gdn"}
    frame = rows.frame()
    assert isinstance(frame, pd.DataFrame)
    assert len(frame) == len(rows) == len(store.rows("h200", None, "gdn"))
    assert f"{len(rows) - objects.SHOWN_ROWS} more rows" in shows(rows).text
    judged = lab.judgements("p1", "p5")
    assert {j.phase for j in judged} == {"p1", "p5"}
    assert [j.device for j in lab.judgements("p5-35b", device="h200")] == ["h200"]
    shows(every)
    shows(judged)


def test_family_kernel_and_device() -> None:
    gdn = lab.family("gdn")
    assert "fused_chunk" in shows(gdn).text
    kernel = gdn["fused_chunk"]
    shows(kernel)
    assert {r.name for r in kernel.rows("h200")} == {"fused_chunk"}
    workload = next(w.id for w in gdn.workloads if w.role == "check")
    (check,) = kernel.check(workload)
    assert check.status == "ok"
    floors = gdn.roofline("h200")
    assert set(floors.frame()["bound"]) <= {"memory", "compute"}
    h200 = lab.device("NVIDIA H200")
    assert (h200.id, h200.capability) == ("h200", (9, 0))
    assert h200.bandwidth.source in shows(h200).text
    assert {d.id for d in lab.devices()} >= {"h200", "gb10"}
    assert {r.device for r in h200.rows()} == {"h200"}


@pytest.mark.slow
def test_a_family_shows_what_its_time_model_is_worth_and_where_time_is_lost() -> None:
    q8 = lab.family("q8")
    assert q8.model("h200").alt.startswith("Predicted over measured")
    ways = q8.validation("h200").frame()
    assert list(ways["left out"]) == ["shape", "model"]
    assert (ways["predictions"] >= ways["choices"]).all()
    lost = q8.lost("h200").frame()
    assert len(lost) == places.SHOWN
    assert (lost["us"] > places.FAR * lost["floor us"]).all()


def test_checks_that_ran_are_shown_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU most kernels are skipped, and filled the first screen."""
    made = [accuracy.Check("moe", "a", "w", "p", "skipped"), accuracy.Check("moe", "b", "w", "p", "error")]
    monkeypatch.setattr(accuracy, "check_family", lambda *_, **__: iter(made))
    assert [check.candidate for check in lab.family("moe").check()] == ["b", "a"]


def test_check_of_a_phase_compares_both_arms() -> None:
    p = lab.phase("lp13-kernel")
    workload = next(w.id for w in families.load(p.family).cases.WORKLOADS if w.role == "check" and w["op"] == "decode")
    assert [c.candidate for c in p.check(workload)] == list(dict.fromkeys((p.control, p.candidate)))


def test_measure_without_a_gpu_says_why_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = lab.phase("p5-kernel").measure()
    assert "no CUDA GPU is usable here" in repr(said)
    assert "\n" not in repr(said)
    assert "has no kernels here" in repr(lab.phase("p6-step").measure())


def test_trace_shows_a_file_and_its_windows() -> None:
    (file,) = sorted(store.FOLDER.glob("h200/p5-kernel/*/trace.parquet"))[-1:]
    t = lab.open_trace(file)
    summary = t.summary()
    assert summary.holds
    assert "kernel" in shows(t).text
    assert t.breakdown().frame()["sum us"].sum() > 0
    one = t.nvtx("p5-kernel/candidate/*")
    assert 0 < len(one.timeline.kernels) < len(t.timeline.kernels)


def test_recorded_figures() -> None:
    figure = lab.recorded("lp.p5.gb10.smem-cap.candidate")
    assert lab.value(figure.id) == float(figure.value)


# Hostile text ---------------------------------------------------------------------------------------------------------


def test_a_card_cannot_bring_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    evil = replace(cards.card("p5"), title=EVIL, question=EVIL, hypothesis=EVIL, null=EVIL, control=EVIL)
    monkeypatch.setattr(cards, "cards", lambda: {"p5": evil})
    monkeypatch.setattr(cards, "card", lambda _: evil)
    p = lab.phase("p5")
    assert shows(p).text.count(EVIL) >= 4
    assert EVIL in shows(lab.phases()).text


def test_a_verdict_and_a_row_cannot_bring_markup() -> None:
    judged = lab.phase("p5").verdict().judgement
    finding = judged.verdict.findings[0]
    bad = Path(EVIL)
    from dataclasses import replace as changed

    verdict = changed(judged.verdict, reason=EVIL, findings=(changed(finding, observed=EVIL),))
    shown = objects.PhaseVerdict(changed(judged, device=EVIL, note=EVIL, verdict=verdict))
    assert shows(shown).text.count(EVIL) >= 3
    row = replace(store.rows("h200", "p5-35b")[0], name=EVIL, message=EVIL)
    assert EVIL in shows(objects.Table((row,), {**objects.ROW, EVIL: lambda r: bad}, EVIL)).text


def test_without_a_trace_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = store.found
    monkeypatch.setattr(store, "found", lambda pattern: [p for p in found(pattern) if "moe-skew" not in p.parts])
    table = lab.phase("moe-skew").breakdown("h200")
    assert len(table) == 0
    assert "no trace from h200 is committed; traced are" in repr(table)
    assert "not measured" in table._repr_html_()


OWN = own_card.text("nvfp4", "torch_bf16", "triton_gemm", "m512_n17408_k5120", name="rmsq-mine")


@pytest.mark.slow
def test_a_card_of_ones_own_says_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a notebook as on the command line, on any device or on one; its folder is in use from then on."""
    monkeypatch.setenv(own.VARIABLE, "")  # which `phase` sets
    path = tmp_path / "rmsq-mine.toml"
    path.write_text(OWN)
    p = lab.phase(str(path))
    assert own.folder() == tmp_path
    assert p.devices == []
    assert not p.rows("h200")
    for device, place in ((None, "any device"), ("h200", "h200")):
        verdict = p.verdict(device)
        assert (verdict.word, verdict.judgement.device) == ("BLOCKED", place)
        assert f"Not measured yet: `lab measure {path}` makes rows of torch_bf16 and" in shows(verdict).text
        (line,) = lab.judgements(str(path), device=device)
        assert (line.verdict.word, line.device) == ("BLOCKED", place)
    assert "Not measured yet" in repr(p.at_the_line("h200"))
    for misspelt in (lambda: p.verdict("h20x"), lambda: p.rows("h20x")):
        with pytest.raises(BadInput, match=r'did you mean "h200"'):
            misspelt()
    other = tmp_path / "other"
    other.mkdir()
    (other / "rmsq-mine.toml").write_text(OWN)
    lab.phase(str(other / "rmsq-mine.toml"))
    assert own.folder() == other
    panel = instruments.phase(str(path))
    assert panel.controls["device"].value == ""
    assert "BLOCKED" in panel.shown.value
    assert f"lab measure {path}" in panel.shown.value
    panel.controls["device"].value = "h200"
    assert "BLOCKED" in panel.shown.value
    monkeypatch.setenv(own.VARIABLE, str(other))
    assert main.main(["write", str(path), "--format", "md"]) == 0
    page = capsys.readouterr().out
    assert f"lab measure {path} --peers" in page
    assert "lab measure rmsq-mine" not in page
    assert "lab write rmsq-mine" not in page
