"""`lab routes FAMILY --survey`: where the best kernel is far from its floor, and what other rules cost."""

import json

import pytest

from kernels import routing
from lab.base import devices
from lab.cli import main
from lab.study import calibrate, choices, places
from tests.refused import held

H200 = devices.get("h200")
ASKS = choices.router("nvfp4")
FEW = (1, 8, 128)


@pytest.fixture
def qwen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The linear layers of one model at three numbers of tokens."""
    models = tuple(m for m in calibrate.public_models() if m.id == "Qwen3-14B")
    monkeypatch.setattr(calibrate, "public_models", lambda: models)
    monkeypatch.setattr(calibrate, "ROWS", FEW)


def test_lost_is_time_over_the_floor_and_only_where_it_is_far(qwen: None) -> None:
    lost, _ = places.survey(ASKS, H200)
    assert lost
    assert [one.lost_us for one in lost] == sorted((one.lost_us for one in lost), reverse=True)
    for one in lost:
        assert one.us > places.FAR * one.floor_us > 0
        assert one.models == ("Qwen3-14B",)
        choice = choices.choose(ASKS, ASKS.asked({a: str(v) for a, v in one.axes.items()})[0], H200)
        assert (choice.candidate, choice.times_us[choice.candidate]) == (one.candidate, one.us)
    assert {"M": 1, "N": 17408, "K": 5120} not in [one.axes for one in lost]  # 14.8 us where the floor is 10.5


def test_the_operand_that_is_not_collapsed_costs_a_vector_call_a_sequence(qwen: None) -> None:
    _, rules = places.survey(ASKS, H200)
    trap, limit = rules
    assert (trap.places, trap.refused) == (4 * len(FEW), 0)
    known = routing.table("h200", "nvfp4")
    assert known is not None
    here = known.at[(("K", 5120), ("N", 17408)), 128], known.at[(("K", 5120), ("N", 17408)), 1]
    at_128 = 128 * here[1]["triton_gemv"] / min(t for n, t in here[0].items() if "w4a8" not in n)
    assert trap.worst >= at_128 > 100  # 128 reads of the weights where one product does
    assert "M=128" in trap.where
    assert trap.mean > limit.mean > 1


def test_at_measured_places_each_rule_is_charged_what_its_own_choice_takes() -> None:
    known = routing.table("h200", "nvfp4")
    assert known is not None
    found = places.charged(ASKS, H200)
    assert [({**dict(shape), "M": at}) for shape, at in sorted(known.at)] == [one.axes for one in found]
    (one,) = (one for one in found if one.axes == {"K": 5120, "N": 17408, "M": 128})
    here, alone = (known.at[(("K", 5120), ("N", 17408)), at] for at in (128, 1))
    assert one.us == here[one.candidate]
    trap, limit = one.rules.values()
    assert trap == ("triton_gemv", 128, pytest.approx(128 * alone["triton_gemv"]))
    assert limit == ("triton_gemm", 1, here["triton_gemm"])


def test_tiers_by_bandwidth_pick_the_path_that_loses_most_here() -> None:
    policy = choices.router("q8").policies["tiers by memory bandwidth"]
    workload, _ = choices.router("q8").asked({"M": "1", "N": "32", "K": "32"})
    assert [policy(workload, gb_s)[0] for gb_s in (1600, 546, 273, 100)] == [
        "triton_mmq", "torch_cached", "torch_cached", "triton_warp_row"
    ]  # fmt: skip


def test_the_command(qwen: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["routes", "nvfp4", "--survey", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["lost"][0].keys() >= {"axes", "candidate", "us", "floor_us", "lost_us", "models", "how"}
    assert [rule["places"] for rule in told["policies"]] == [12, 12]
    assert main.main(["routes", "nvfp4", "--survey"]) == 0
    out = capsys.readouterr().out
    assert "Qwen3-14B" in out
    assert "rule: the 3-D operand" in out
    assert main.main(["routes", "nvfp4", "--survey", "--device", "gb10"]) == 2
    held(capsys.readouterr().err, "--survey", "gb10", "--calibrate")
