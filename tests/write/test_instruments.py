"""The instruments without a browser: a control changes and so does what is shown; what is missing is said in words."""

import html
import re
import shutil
from pathlib import Path

import pytest

from lab.base.errors import BadInput
from lab.bench import backend, measure, sampling
from lab.card import phases
from lab.check import families
from lab.row import store
from lab.trace.model import Kernels, Trace
from lab.write import instruments, objects, shapes
from lab.write.instruments import Panel
from lab.write.pairing import LIVE
from tests.draw.test_pictures import sample

pytestmark = pytest.mark.slow  # each draws its figures anew

families.interpret_on_cpu()


def words(panel: Panel) -> str:
    """What a reader sees, without pictures and markup."""
    return html.unescape(re.sub(r"<[^>]*>", " ", panel.html))


def word(panel: Panel) -> str:
    found = re.search(r"<b style[^>]*>(.*?)</b>", panel.html)
    return found[1] if found else ""


def pictures(panel: Panel) -> list[str]:
    return re.findall(r'<img style[^>]*alt="([^"]*)"', panel.html)


# phase ----------------------------------------------------------------------------------------------------------------


def test_the_word_flips_when_the_line_crosses_the_figure() -> None:
    panel = instruments.phase("p5-kernel", "h200")
    line = panel.controls["line"]
    own = phases.card("p5-kernel").gate.require[0].threshold
    assert (line.value, word(panel)) == (own, "GO")
    seen = instruments.judged(phases.card("p5-kernel"), "h200", "measured").verdict.findings[-1].seen
    assert seen is not None
    assert seen.interval is not None
    low, high = seen.interval
    assert line.min < low < high < own < line.max, "the figure can be crossed"
    line.value = low - 0.5
    assert word(panel) == "NO-GO"
    assert "With the card's own line: GO." in words(panel)
    line.value = seen.value
    assert word(panel) == "BLOCKED"
    line.value = high + 0.5
    assert word(panel) == "GO"


def test_another_card_brings_its_own_device_evidence_and_line() -> None:
    panel = instruments.phase("p5-kernel", "h200")
    panel.controls["card"].value = "p6"
    card = phases.card("p6")
    assert card.question in words(panel)
    assert (panel.controls["device"].value, panel.controls["evidence"].value) == ("gb10", "recorded")
    assert word(panel) == objects.phase("p6").verdict("gb10").word
    assert [text for text, _ in panel.controls["condition"].options] == [str(c) for c in card.gate.require]


def test_without_rows_it_says_not_measured() -> None:
    panel = instruments.phase("p5-kernel", "h200")
    assert len(pictures(panel)) == 3
    panel.controls["device"].value = "gb10"
    assert "not measured" in words(panel)
    assert word(panel) == ""
    assert pictures(panel) == []


def test_a_card_that_is_none_is_refused_in_its_place() -> None:
    panel = instruments.phase("p5-kernel", "h200")
    panel.controls["card"].value = "p55"
    assert 'no card has the id "p55"; did you mean "p5"?' in words(panel)
    panel.controls["card"].value = "p5"
    assert word(panel) == "NO-GO"


def test_measuring_without_a_gpu_says_why_not() -> None:
    if families.gpu_capability():
        pytest.skip("a GPU is here: the button would measure")
    panel = instruments.phase("p5-kernel", "h200")
    before = panel.html
    panel.controls["measure"].click()
    assert "no CUDA GPU is usable here" in panel.controls["said"].value
    assert panel.html == before


def test_a_cell_shows_the_widgets_and_the_page_beside_them() -> None:
    panel = instruments.phase("p5-kernel", "h200")
    bundle = panel._repr_mimebundle_()
    assert panel.html.endswith(bundle["text/html"])
    assert "card: p5-kernel" in bundle["text/plain"]
    assert LIVE in bundle


# profile --------------------------------------------------------------------------------------------------------------


def test_a_profile_opens_by_path_and_a_window_narrows_it() -> None:
    panel = instruments.profile()
    assert pictures(panel) != []
    whole = words(panel)
    panel.controls["window"].value = "*/candidate/*"
    assert words(panel) != whole
    panel.controls["window"].value = "nobody/*"
    assert "nobody/*" in words(panel)
    panel.controls["path"].value = "absent.sqlite"
    assert "absent.sqlite: cannot be read" in words(panel)


def test_what_if_follows_the_slider() -> None:
    panel = instruments.profile()
    assert panel.controls["part"].value in panel.controls["part"].options

    def gain() -> float:
        found = re.search(r"Exposed [\d.]+% of the span: \+([\d.]+) % throughput", words(panel))
        assert found
        return float(found[1])

    twice = gain()
    panel.controls["faster"].value = 10.0
    assert gain() > twice


def test_exposed_time_and_gaps_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(instruments.files, "read", lambda path: sample())
    panel = instruments.profile(tmp_path / "any.sqlite")
    panel.controls["part"].value = "dense_gemm"
    assert "Exposed 15.0% of the span" in words(panel)
    assert re.search(r"65\s+30\s+memcpy HtoD\s+splitkv_kernel", words(panel))
    same = objects.Trace(sample(), tmp_path / "any.sqlite")
    assert [row[1] for row in same.exposed()] == [30.0, 15.0, 5.0, 5.0]
    assert [gap.us for gap in same.gaps()] == [30.0, 5.0]
    assert same.what_if("dense_gemm", 3.0).gain_pct.mid == pytest.approx(100 * (1 / 0.9 - 1))
    with pytest.raises(BadInput, match='"memcopy"'):
        same.what_if("memcopy", 2.0)


def test_totals_without_a_timeline_are_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file of totals alone has no span: nothing is drawn and nothing is divided by it."""
    file = tmp_path / "kern_sum.csv"
    file.write_text(
        "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name\n"
        "100.0,5000,5,1000,1000,1000,1000,0,gemm_kernel\n"
    )
    panel = instruments.profile(file)
    assert "gemm_kernel" in words(panel)
    assert "not measured" in words(panel)
    assert pictures(panel) == []


def test_hostile_names_show_as_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    evil = '<script>alert("x")</script>'
    made = sample()
    renamed = made.but(names=(evil, *made.names[1:]))
    assert isinstance(renamed, Trace)
    assert isinstance(renamed.kernels, Kernels)
    monkeypatch.setattr(instruments.files, "read", lambda path: renamed)
    panel = instruments.profile(tmp_path / "any.sqlite")
    assert "<script" not in panel.html
    assert "alert" in words(panel), "a short name has no template arguments"


def test_without_a_committed_trace_a_path_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    with pytest.raises(BadInput, match="no trace of p6-kernel is committed; give the path"):
        instruments.profile()


# kernel ---------------------------------------------------------------------------------------------------------------


def test_a_typed_shape_changes_floor_and_prediction() -> None:
    panel = instruments.kernel("nvfp4", "cuda_gemm", "M=48 N=17408 K=5120", "h200")
    small = words(panel)
    assert "not measured" in small, "no row is of that shape"
    panel.controls["shape"].value = "M=128 N=17408 K=5120"
    assert "median us" in words(panel)
    assert words(panel) != small
    panel.controls["shape"].value = "M=48 Q=2"
    assert 'no workload has the axis "Q"' in words(panel)


def test_a_sweep_shows_rows_rivals_floor_and_what_is_missing() -> None:
    panel = instruments.kernel("nvfp4", "cuda_gemm", "N=17408 K=5120", "h200", "M", "8,128,300", "torch_bf16")
    assert "M=8: refuses" in words(panel)
    assert "cuda_gemm" in pictures(panel)[0]
    assert re.search(r"300\s+not measured\s+not measured", words(panel))
    panel.controls["sweep"].value = "dtype"
    assert '"dtype" is no axis with numbers' in words(panel)


def test_check_runs_here_and_timing_is_refused_without_a_gpu() -> None:
    panel = instruments.kernel("nvfp4", "triton_gemm", "M=5 N=64 K=128", "h200")
    panel.controls["check"].click()
    assert ">ok<" in panel.controls["said"].value
    if families.gpu_capability() is None:
        panel.controls["time"].click()
        assert "no CUDA GPU is usable here" in panel.controls["said"].value


def test_another_family_lists_its_candidates() -> None:
    panel = instruments.kernel("nvfp4", "cuda_gemm", "M=48", "h200")
    panel.controls["family"].value = "gdn"
    assert list(panel.controls["candidate"].options) == [*families.load("gdn").candidates]
    assert "gdn/" in words(panel)


@pytest.mark.slow
def test_compiling_names_the_kernel_that_the_shape_launches() -> None:
    if not shutil.which("nvcc") and not Path("/usr/local/cuda/bin/nvcc").exists():
        pytest.skip("no nvcc here")
    panel = instruments.kernel("nvfp4", "cuda_decode", "M=1 N=17408 K=5120", "h200")
    panel.controls["compile"].click()
    assert panel.controls["said"].value.count("<td>yes</td>") == 1


# shapes ---------------------------------------------------------------------------------------------------------------


def test_axes_left_out_come_from_the_nearest_shape() -> None:
    family = families.load("nvfp4")
    candidate = family.candidate("cuda_gemm")
    made = shapes.shaped(family, candidate, {"M": 130, "N": 17400})
    assert {a: made[a] for a in ("M", "N", "K", "dtype")} == {"M": 130, "N": 17400, "K": 5120, "dtype": "bf16"}
    assert shapes.shaped(family, candidate, {"M": 128, "N": 17408, "K": 5120}).id == "m128_n17408_k5120"


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"Q": 1}, 'no workload has the axis "Q"'),
        ({"M": -3}, "M = -3 is no positive whole number"),
        ({"M": "many"}, "M = many is no positive whole number"),
        ({"dtype": "f64"}, 'dtype = "f64" is in no workload'),
        ({"M": 1}, "refuses"),
    ],
)
def test_shapes_that_are_none_are_refused(axes: dict[str, int | str], said: str) -> None:
    family = families.load("nvfp4")
    with pytest.raises(BadInput, match=re.escape(said)):
        shapes.shaped(family, family.candidate("cuda_gemm"), axes)


def test_what_to_expect_is_the_routers_word() -> None:
    at = objects.family("nvfp4")["cuda_gemm"].at(M=128, N=17408, K=5120)
    expected = at.expected("h200")
    assert expected is not None
    assert expected[1] == "measured"
    assert at.floor("h200").floor_us < expected[0]
    assert at.expected("gb10") is None, "no GPU of that kind takes it"


def test_the_device_without_a_name_is_that_with_most_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert objects.device().id == "h200"
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    with pytest.raises(BadInput, match="no device has rows"):
        objects.device()


class Clock:
    """A timer that runs what it is given and says 5 us for everything; half a second of samples is over in a moment."""

    name = "graph"

    def prepare(self, arm: sampling.Arm) -> None:
        for args, out in arm.sets:
            arm.run(args, out)
        arm.calls = 100_000

    def visit(self, arm: sampling.Arm, samples: int) -> list[float]:
        for args, out in arm.sets:
            arm.run(args, out)
        return [5.0] * samples

    def release(self, arm: sampling.Arm) -> None: ...


def test_a_sweep_is_timed_at_typed_shapes_with_rivals_and_appends_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for the GPU: the comparison of `lab measure`, at shapes that no list has."""
    made = backend.Backend("cpu", 0, lambda name, l2, size: Clock(), lambda: None)
    monkeypatch.setattr(backend, "gpu", lambda: made)
    monkeypatch.setattr(measure, "require_gpu", lambda command: None)
    before = len(store.rows("h200"))
    panel = instruments.kernel(
        "nvfp4", "triton_gemm", "N=64 K=128 dtype=bf16", "h200", "M", "5,9", "torch_bf16 vllm_marlin"
    )
    panel.controls["time"].click()
    said = html.unescape(re.sub(r"<[^>]*>", " ", panel.controls["said"].value))
    assert re.search(r"triton_gemm, now\s+torch_bf16, now\s+floor", said)
    assert re.search(r"5\s+5\s+5\s+[\d.]+\s+9\s+5\s+5", said)
    assert "M=5: vllm_marlin: needs" in said, "a rival that is not installed says so"
    assert len(store.rows("h200")) == before
