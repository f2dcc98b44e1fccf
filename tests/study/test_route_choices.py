"""`lab routes FAMILY --shape AXIS=VALUE ...`: what a user is told, and that it is what the table says."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from kernels import operators, routing
from lab.base import devices, own
from lab.check import families
from lab.cli import main
from lab.row import store
from lab.study import choices, routes
from tests.loops import numbered, over
from tests.refused import held, refused

H200 = devices.get("h200")
ROUTED = sorted(
    name
    for name in (path.parent.name for path in families.FOLDER.glob("*/route.py"))
    if store.rows("h200", family=name)
)
TABLES = sorted(store.FOLDER.glob("*/routes/*.json"))


def test_the_stored_table_is_the_one_of_the_rows() -> None:
    @over({str(x): (x,) for x in TABLES})
    def each(path) -> None:
        assert routes.same(routing.read(path), routes.table(path.stem, path.parts[-3]))

    each()


def test_every_family_that_routes_and_has_rows_has_a_stored_table() -> None:
    assert [path.stem for path in TABLES if path.parts[-3] == "h200"] == ROUTED


def test_the_table_prints_what_the_router_takes() -> None:
    """At every measured place, with and without the precisions that take asking for.

    What only another device timed is no part of a table; the router carries it over.
    """

    @over({str(x): (x,) for x in ROUTED})
    def each(family: str) -> None:
        asks, known = choices.router(family), routing.table("h200", family)
        assert known is not None
        for precisions in ((), *((name,) for name in asks.opt_in)):
            for place in routes.crossovers(routes.competing(known, precisions)):  # times of the whole table
                words = {axis: str(value) for axis, value in {**place.shape, asks.axis: place.at}.items()}
                workload, _ = asks.asked(words)
                choice = choices.choose(asks, workload, H200, precisions)
                own = {name: us for name, us in choice.times_us.items() if name in place.times_us}
                assert own == pytest.approx(place.times_us), words
                if own.keys() == choice.times_us.keys():
                    assert (choice.candidate, choice.how) == (place.best, "fitted" if place.fitted else "measured")
                else:
                    assert choice.how == "carried", words

    each()


def test_no_router_takes_a_control_or_a_peer() -> None:
    """What a router may take lies at the family's root: others say why not, need a library, or refuse its question."""

    @over({str(x): (x,) for x in ROUTED})
    def each(family: str) -> None:
        asks, found = choices.router(family), families.load(family)
        asked = [w for w in found.cases.WORKLOADS if all(w.axes.get(axis) == v for axis, v in asks.fixed.items())]
        assert asked
        apart = {name: found.candidates[name] for name, module in found.modules.items() if "/" in module}
        assert apart
        taken = {
            name: [w.id for w in asked if not c.refuses(w)]
            for name, c in apart.items()
            if not c.no_route and set(c.needs.packages) <= choices.OWN
        }
        assert {name: ids for name, ids in taken.items() if ids} == {}

    each()


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main.main(["routes", *words]) == 0
    return capsys.readouterr().out


def test_leading_dimensions_are_collapsed_and_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    sequences = json.loads(told(capsys, "nvfp4", "--shape", "ne=6144,1,128", "N=5120", "--json"))
    columns = json.loads(told(capsys, "nvfp4", "--shape", "K=6144", "M=128", "N=5120", "--json"))
    assert sequences["collapsed"] == "ne=(6144, 1, 128) collapsed to M=128 columns of K=6144"
    assert sequences | {"collapsed": ""} == columns
    assert (columns["how"], columns["us"]) == ("measured", columns["times_us"][columns["candidate"]])
    best, second = list(columns["times_us"])[:2]
    assert (columns["candidate"], columns["runner_up"]) == (best, second)
    assert columns["cost_of_runner_up"] == columns["times_us"][second] / columns["us"] > 1
    assert columns["cost_of_worst"] == max(columns["times_us"].values()) / columns["us"]


def test_both_errors_of_a_rounding_kernel_stand_beside_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    """On normal inputs the two W4A8 arms err alike; on sums of one sign the fast one ten times as much and more."""
    out = json.loads(
        told(capsys, "nvfp4", "--shape", "K=5120", "M=512", "N=17408", "--precision", "nvfp4-w4a8", "--json")
    )
    assert out["candidate"] == "cuda_w4a8_promoted"
    assert "cuda_w4a8" in out["left_out"]
    normal = {name: by["standard normal"][1] for name, by in out["errors"].items()}
    one_sign = {name: next(v for k, v in by.items() if "one sign" in k)[1] for name, by in out["errors"].items() if
                any("one sign" in k for k in by)}  # fmt: skip
    assert normal["cuda_w4a8"] == pytest.approx(normal["cuda_w4a8_promoted"], rel=0.01)
    assert one_sign["cuda_w4a8"] > 10 * one_sign["cuda_w4a8_promoted"]
    text = told(capsys, "nvfp4", "--shape", "K=5120", "M=512", "N=17408")
    for name in ("cuda_w4a8", "cuda_w4a8_promoted"):
        assert f"error       {name}: " in text


@pytest.mark.slow
def test_a_shape_that_nobody_measured_has_the_model_s_time(capsys: pytest.CaptureFixture[str]) -> None:
    """The arms that show the defect are the only ones of Q8_0 that were timed at this shape, and they never compete."""
    for m in (1, 16, 128, 2048):
        out = json.loads(told(capsys, "q8", "--shape", f"ne=6144,1,{m}", "N=5120", "--json"))
        assert not any(name in out["times_us"] for name in ("q8_collapsed", "q8_sequence_grid"))
        assert {"q8_collapsed", "q8_sequence_grid"} <= set(out["never"])
    assert out["how"] == "fitted"
    low, high = out["interval_us"]
    assert low < out["us"] < high


def test_a_device_without_rows_gets_predictions_that_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    for family in ROUTED:
        assert told(capsys, family, "--device", "gb10").startswith(f"{family} on gb10: nothing measured there")
    out = json.loads(told(capsys, "nvfp4", "--device", "gb10", "--shape", "ne=5120,1,128", "N=6144", "--json"))
    assert (out["device"], out["how"]) == ("gb10", "predicted")
    assert "cuda_gemm" not in out["times_us"]  # nor any kernel that exists for sm_90a only
    rivals = {name for name, c in families.load("nvfp4").candidates.items() if "vllm" in c.needs.packages}
    assert rivals  # libraries that a user may not have are never routed to
    assert not rivals & {*out["times_us"], *out["left_out"]}
    assert json.loads(told(capsys, "nvfp4", "--device", "gb10", "--json")) == []
    assert main.main(["routes", "nvfp4", "--device", "gb10", "--write"]) == 2


def test_the_environment_overrides_and_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("gdn", "--shape", "T=2048", "Hk=16", "Hv=48")
    assert "KILLGATE_ROUTE_GDN is not set" in told(capsys, *words)
    monkeypatch.setenv("KILLGATE_ROUTE_GDN", "fused_chunk")
    out = told(capsys, *words)
    assert "fused_chunk (bf16)" in out
    assert "(override)" in out
    assert "KILLGATE_ROUTE_GDN is set; without it cuda_scan (" in out
    monkeypatch.setenv("KILLGATE_ROUTE_GDN", "nonesuch")
    assert main.main(["routes", *words]) == 2
    assert "KILLGATE_ROUTE_GDN=nonesuch: not one of cuda_scan" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main.main(["routes", "--help"])
    assert "KILLGATE_ROUTE_<FAMILY>" in capsys.readouterr().out


BAD_INPUT_IS_ONE_LINE_CASES: list[tuple[list[str], str, list[str]]] = [
    (["nvfp4", "--shape", "ne=5120,1"], "lab routes", ["N=NUMBER", "lab routes nvfp4 --shape"]),
    (["nvfp4", "--shape", "N"], "--shape", ['"N"', "AXIS=VALUE"]),
    (["nvfp4", "--shape", "M=1", "M=2"], "--shape", ['"M=2"', "twice"]),
    (["nvfp4", "--shape", "M=1", "N=1", "K=16", "--write"], "--write", ["shape"]),
    (["nvfp4", "--precision", "w4a8"], "--precision", ['"w4a8"', '"nvfp4-w4a8"']),
    (["gdn", "--precision", "bf16"], "--precision", ['"bf16"', "gdn", "leave it out"]),
    (["nvfp4", "--device", "gb11"], "--device", ['"gb11"', '"gb10"']),
    (["nvfp5", "--shape", "M=1"], "lab routes", ['"nvfp5"', '"nvfp4"']),
    (["kv", "--shape", "ctx=1", "batch=1", "Hq=4", "Hkv=4", "D=99"], "lab routes", ["D=99"]),
]


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    @over(numbered(BAD_INPUT_IS_ONE_LINE_CASES))
    def each(words: list[str], where: str, said: list[str]) -> None:
        assert main.main(["routes", *words]) == 2
        held(capsys.readouterr().err, where, *said)

    each()


def test_a_family_without_a_router_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "names", lambda: ["toy"])
    monkeypatch.setattr(families, "load", lambda name: None)
    with refused("lab routes", "toy", remedy="kernels/toy/route.py"):
        choices.router("toy")


def test_times_of_another_dtype_are_not_called_measured(capsys: pytest.CaptureFixture[str]) -> None:
    out = json.loads(told(capsys, "nvfp4", "--shape", "K=6144", "M=128", "N=5120", "dtype=fp16", "--json"))
    assert out["how"] == "fitted"
    assert out["reason"].endswith("; the table is of dtype=bf16")


def test_what_is_for_another_architecture_is_left_out_with_the_reason() -> None:
    """By the rule of `lab check`: kernels for sm_90a alone on the newer sm_121."""
    told_ = choices.answer("gdn", devices.get("gb10"), {"T": "2048", "Hk": "16", "Hv": "48", "D": "128"})
    assert told_["left_out"]["cuda_scan"] == families.unfit(families.load("gdn").candidates["cuda_scan"], (12, 1))
    assert "sm_90a" in told_["left_out"]["cuda_scan"]
    assert "cuda_scan" not in told_["times_us"]


def test_what_is_carried_over_from_an_h200_is_what_an_h100_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every place that an H100's own rows have: the times without them, and what the choice costs there."""
    h100, off, regret = devices.get("h100"), list[float](), list[float]()
    otherwise: dict[Any, float] = {  # where an H100 prefers another kernel than an H200
        ("nvfp4", (("K", 5120), ("N", 17408)), 24): 0.12,
    }
    stored = routing.table
    monkeypatch.setattr(routing, "table", lambda place, family: None if place == "h100" else stored(place, family))

    @over({str(x): (x,) for x in ROUTED})
    def each(family: str) -> None:
        asks = choices.router(family)
        for (shape, at), times in routes.table(family, "h100").at.items():
            workload, _ = asks.asked({axis: str(value) for axis, value in (*shape, (asks.axis, at))})
            for precisions in ((), *((name,) for name in asks.opt_in)):
                choice = choices.choose(asks, workload, h100, precisions)
                assert choice.how == "carried"
                both = [name for name in choice.times_us if name in times]
                off.extend(abs(choice.times_us[name] / times[name] - 1) for name in both)
                if len(both) > 1:
                    cost = times[both[0]] / min(times[name] for name in both) - 1
                    if known := otherwise.get((family, shape, at)):
                        assert 0.05 < cost < known
                    else:
                        regret.append(cost)

    each()
    assert len(off) > 70
    assert len(regret) > 20
    assert statistics.median(off) < 0.045
    assert sum(x <= routing.CARRIED for x in off) >= 0.9 * len(off)
    assert max(regret) < 0.05


def source(device: str) -> routing.Source | None:
    """What is carried over to a device, by the same facts as `lab routes` has."""
    every = {name: choices.facts(other) for name, other in devices.every().items()}
    found: routing.Source | None = routing.source(device, every[device].capability, "nvfp4", every)
    return found


def test_a_router_carries_over_within_a_compute_capability_alone() -> None:
    for device in ("h100", "h100-pcie", "gh200"):
        found = source(device)
        assert found
        assert (found.table.device, found.read_gb_s, found.sms) == ("h200", 4800.0, 132)
    for device in ("rtx-5090", "b200", "mi300x"):
        assert source(device) is None


def test_the_operators_and_the_lab_know_the_same_of_a_device() -> None:
    for device, known in operators._known().items():
        here = choices.facts(devices.get(device))
        assert (here.capability, here.sms) == (known.capability, known.sms)
        assert here.read_gb_s == pytest.approx(known.read_gb_s)
        assert here.peak_tflop_s == pytest.approx(known.peak_tflop_s)


OWN = """
[mine]
name = "A GPU of mine"
compute_capability = { unit = "capability", value = 9.0, source = "words", kind = "estimate" }
sms = { unit = "SMs", value = 114, source = "words", kind = "estimate" }
memory_bandwidth = { unit = "TB/s", value = 2, source = "words", kind = "estimate" }
peak.bf16 = { unit = "TFLOP/s", value = 756.5, source = "words", kind = "estimate" }
peak.f32 = { unit = "TFLOP/s", value = 51, source = "words", kind = "estimate" }
"""


def test_a_device_of_one_s_own_gets_the_answer_of_a_listed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times of the same facts, carried over; and no 90 % for other multiprocessors than those it was shown for."""
    (tmp_path / own.DEVICES).write_text(OWN)
    monkeypatch.setenv(own.VARIABLE, str(tmp_path))
    shape = ("nvfp4", "--shape", "K=5120", "M=8", "N=17408", "--json", "--device")
    mine, listed = (json.loads(told(capsys, *shape, device)) for device in ("mine", "h100-pcie"))
    assert mine["how"] == "carried"
    assert mine["times_us"] == listed["times_us"]
    for found in (mine, listed):
        assert found["interval_us"] is None
        assert "of multiprocessors, and here are 114, there 132)" in found["reason"]
        assert "90 %" not in found["reason"]
    assert " (carried)" in told(capsys, *shape[:-2], "--device", "mine")
    assert json.loads(told(capsys, *shape, "gh200"))["interval_us"]  # 132 as well
    assert "multiprocessors, and this one's is unknown" in json.loads(told(capsys, *shape, "h100-nvl"))["reason"]


def test_without_a_bandwidth_no_time_is_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither by the roofline (12.0) nor carried over (9.0); and what was measured there needs none."""
    for capability in ("9.0", "12.0"):
        lines = OWN.replace("= 9.0", f"= {capability}").splitlines(keepends=True)
        (tmp_path / own.DEVICES).write_text("".join(line for line in lines if "memory_bandwidth" not in line))
        monkeypatch.setenv(own.VARIABLE, str(tmp_path))
        devices._read.cache_clear()
        assert main.main(["routes", "nvfp4", "--shape", "K=5120", "M=8", "N=17408", "--device", "mine"]) == 2
        held(capsys.readouterr().err, "devices.toml", "mine has no memory_bandwidth", "add [mine.memory_bandwidth]")
    asks, known = choices.router("nvfp4"), routing.table("h200", "nvfp4")
    workload, _ = asks.asked({"M": "8", "N": "17408", "K": "5120"})
    assert known
    choice = choices.choose(asks, workload, devices.get("mine"), known=known)
    there = choices.choose(asks, workload, devices.get("h200"), known=known).times_us
    assert choice.times_us  # those that run at 12.0
    assert choice.times_us.items() <= there.items()


def test_what_an_h100_timed_itself_is_not_carried_over() -> None:
    """A place of its own rows, and one between them, where its own fit is held against an H200's time."""
    h100 = devices.get("h100")
    shape = {"ctx": "8192", "batch": "8", "Hq": "24", "Hkv": "4", "D": "256"}
    measured = routing.table("h100", "kv")
    assert measured
    of = {"batch": 8, "Hkv": 4, "page": 16}.items()
    (own,) = (p.median_us for p in measured.points if of <= dict(p.shape).items()
              and (p.candidate, p.at) == ("cuda_bf16", 8192))  # fmt: skip
    there = choices.answer("kv", h100, shape, ("bf16",))
    assert (there["candidate"], there["how"], there["us"]) == ("cuda_bf16", "carried", own)
    assert there["reason"].endswith("; carried over from h200: splitkv_bf16")
    between = choices.answer("kv", h100, shape | {"ctx": "12288"}, ("bf16",))
    assert between["candidate"] == "cuda_bf16"
    assert own < between["interval_us"][0] < between["us"] < between["interval_us"][1] < 2 * own
