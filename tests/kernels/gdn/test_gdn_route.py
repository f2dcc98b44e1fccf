"""The prefill route of kernels/gdn: by scan length, from a table, else predicted and said so."""

import pytest

from kernels import routing
from kernels.common import Candidate, Workload
from kernels.gdn import cases, cost, route
from lab.base import devices
from lab.check import families
from lab.study import choices

PEAKS = {"bf16": 759.0, "tf32": 380.0, "f32": 60.0}
LONG = next(w for w in cases.WORKLOADS if w.id == "t2048_hk16_hv48_d128")
SHORT = next(w for w in cases.WORKLOADS if w.id == "t512_hk16_hv48_d128")
SHAPE = (("D", 128), ("Hk", 16), ("Hv", 48), ("batch", 1))


def nothing(args: object, out: object) -> None:
    raise AssertionError("a route launches nothing")


CANDIDATES = tuple(
    Candidate(name, "bf16", nothing, refuses=lambda w: "" if w["op"] == "prefill" else "prefill only")
    for name in ("split", "scan")
)
TABLE = routing.Table(
    "h200",
    "gdn",
    "T",
    (
        routing.Point("split", SHAPE, 512, 20.0),
        routing.Point("scan", SHAPE, 512, 40.0),
        routing.Point("split", SHAPE, 2048, 400.0),
        routing.Point("scan", SHAPE, 2048, 100.0),
    ),
    "r",
)


def chosen(workload: Workload, known: routing.Table | None = TABLE) -> routing.Choice:
    return routing.route(route.ROUTER, workload, "no-table-here", CANDIDATES, 4440.0, PEAKS, known)


def test_the_scan_length_decides() -> None:
    assert chosen(SHORT).candidate == "split"
    assert chosen(LONG).candidate == "scan"
    assert "T=2048" in chosen(LONG).reason


def test_without_a_table_the_first_is_taken_and_said_so() -> None:
    choice = chosen(LONG, None)
    assert (choice.candidate, choice.how) == ("split", "predicted")
    assert "nothing measured on no-table-here" in choice.reason


def test_decode_is_not_routed() -> None:
    decode = next(w for w in cases.WORKLOADS if w["op"] == "decode")
    with pytest.raises(ValueError, match=r"no candidate takes .*prefill only"):
        chosen(decode)
    takes_it = Candidate("step", "bf16", nothing)
    for known in (TABLE, None):
        with pytest.raises(ValueError, match=r"op = decode\b.*prefill"):
            routing.route(route.ROUTER, decode, "no-table-here", (takes_it,), 4440.0, PEAKS, known)


def test_the_roofline_knows_what_each_algorithm_passes_through_memory() -> None:
    """Twenty launches of plain torch are no rival of one fused kernel, whatever the floor of the problem is."""
    ours = families.load("gdn").candidates
    every = tuple(ours[name] for name in ("torch_chunk", "fused_chunk", "split_pipeline"))
    choice = routing.route(route.ROUTER, LONG, "no-table-here", every, 273.0, {"bf16": 213.0, "f32": 31.0})
    assert list(choice.times_us) == ["fused_chunk", "split_pipeline", "torch_chunk"]
    assert set(route.ALGORITHMS) <= set(ours)


def test_tokens_sequences_and_heads_make_the_question() -> None:
    workload, _ = route.ROUTER.asked({"T": "2048", "batch": "8", "Hk": "16", "Hv": "48"})
    assert (workload["op"], workload["T"], workload["batch"], workload["D"]) == ("prefill", 2048, 8, 128)
    with pytest.raises(ValueError, match=r"Hv=40\b.*Hk=16\b"):
        route.ROUTER.asked({"T": "2048", "Hk": "16", "Hv": "40"})


def taken(device: str, **axes: int | str) -> str:
    workload, _ = route.ROUTER.asked({axis: str(value) for axis, value in axes.items()})
    return choices.choose(route.ROUTER, workload, devices.get(device)).candidate


@pytest.mark.parametrize("device", ["h100", "h200"])
def test_long_sequences_on_few_heads_are_split(device: str) -> None:
    """Between and beyond the measured lengths; an H200, which timed the control alone, goes by an H100's times."""
    for heads in ({"Hk": 2, "Hv": 8}, {"Hk": 4, "Hv": 12}):
        for tokens in (8192, 16384, 32768, 65536, 131072):
            assert taken(device, T=tokens, **heads) == "cuda_segments_in_scan", (heads, tokens)
        assert taken(device, T=32768, dtype="fp16", **heads) == "cuda_segments"
        for tokens in (2048, 8191):
            assert taken(device, T=tokens, **heads) == "cuda_scan", (heads, tokens)
    for heads in ({"Hk": 16, "Hv": 48}, {"Hk": 8, "Hv": 24}, {"Hk": 2, "Hv": 8, "batch": 2}):
        assert taken(device, T=32768, **heads) == "cuda_scan", heads


def test_unequal_sequences_are_split_by_their_own_lengths() -> None:
    heads: dict[str, int] = {"Hk": 2, "Hv": 6, "batch": 2}
    assert taken("h100", T=8192, lengths="16377-7", **heads) == "cuda_segments_in_scan"
    assert taken("h100", T=8191, lengths="8191-8191", **heads) == "cuda_scan"
    for lengths in ("16384", "16384-0x7", "16384-"):
        with pytest.raises(ValueError, match="a whole number for each of batch=2"):
            taken("h100", T=8192, lengths=lengths, **heads)


def test_states_of_many_short_sequences_are_read_ahead_of_the_first_step() -> None:
    """256 heads of 16 tokens are four programs of 64 columns a multiprocessor; 48 heads of 8,192 tokens are one."""

    def states(batch: int, heads: int, tokens: int) -> float:
        axes: dict[str, int | str] = {
            "op": "prefill",
            "batch": batch,
            "T": tokens,
            "lengths": "",
            "Hk": heads // 4,
            "Hv": heads,
            "D": 128,
        }
        asked = Workload("w", axes | {"dtype": "bf16", "state_dtype": "f32"})
        return cost.chain_work(asked, 64, 64, 132).in_turn["states"]

    one = 128 * 64 * 4 * 2 / 16  # D x columns, four bytes, read and written, 16 bytes a clock
    assert states(1, 48, 8192) == one
    assert states(64, 4, 16) == 4 * one
