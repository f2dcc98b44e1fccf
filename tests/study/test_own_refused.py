"""`lab judge CARD --rows`: what is no comparison, or not clear enough to be one, is refused in one line.

Also the parts that decide it: the axes that a workload's name declares, the selectors of the command line.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from lab.base.errors import BadInput
from lab.study.own import arms, verdict
from lab.study.own.sample import Line, Sample
from tests.loops import numbered, over
from tests.study.interop_samples import CARD, LLAMA, SAMPLES, Capture, card, condition, files, judged, old_new, refused

# Refused --------------------------------------------------------------------------------------------------------------


NO_COMPARISON_CASES: list[tuple[Any, str]] = [
    (
        old_new("Example GPU 24GB", "Another GPU"),
        "the control ran on Example GPU 24GB, the candidate on Another GPU; measure both arms on one machine",
    ),
    (
        old_new("Example CPU", "Another CPU"),
        "the control ran on Example CPU 16-Core, the candidate on Another CPU 16-Core",
    ),
    (
        old_new("7000000000", "8000000000"),
        "example 7B Q4_0 8000000000 parameters; measure both arms with one model",
    ),
    (lambda t: t[:-30], "line 2: ends in the middle of an object"),
    (lambda t: re.sub(r'"avg_ts": 110[\d.]+', '"avg_ts": nan', t), "line 2: holds nan"),
]


def test_no_comparison(tmp_path: Path, capsys: Capture) -> None:
    @over(numbered(NO_COMPARISON_CASES))
    def each(candidate: Any, said: str) -> None:
        assert said in refused(capsys, str(CARD), *files(tmp_path, LLAMA, candidate=candidate))

    each()


def test_two_tools_are_no_comparison(tmp_path: Path, capsys: Capture) -> None:
    question = card(tmp_path, ["npl1"], condition("decode_tps", ">", 0, "npl1"))
    flags = ["--rows", f"control={SAMPLES / 'llama_bench_control.jsonl'}"]
    flags += ["--rows", f"candidate={SAMPLES / 'batched_bench_candidate.txt'}"]
    said = refused(capsys, str(question), *flags)
    assert "npl1: the control is from llama-bench, the candidate from llama-batched-bench" in said


BOTH = str(SAMPLES / "llama_bench_flash_attn.json")
ONE = str(SAMPLES / "llama_bench_control.jsonl")


FLAGS_REFUSED_CASES: list[tuple[list[str], str]] = [
    (
        ["--rows", BOTH],
        "is of no arm; llama_bench_flash_attn.json varies in flash_attn (0, 1); give --rows control=FILE",
    ),
    (["--rows", BOTH, "--arm", "control:flash_attn=0"], "nothing is the candidate (no file)"),
    (
        ["--rows", BOTH, "--arm", "control:flash_attn=0", "--arm", "candidate:flash_attn=2"],
        "nothing is the candidate (flash_attn=2); the files have flash_attn 0, 1",
    ),
    (
        ["--rows", BOTH, "--arm", "control:flash_attn=0", "--arm", "candidate:n_batch=2048"],
        "is both control and candidate",
    ),
    (
        ["--rows", BOTH, "--arm", "control:flash_atn=0"],
        'no figure has a field "flash_atn"; did you mean "flash_attn"?',
    ),
    (["--rows", BOTH, "--arm", "contrl:flash_attn=0"], '"contrl" is no arm; did you mean "control"?'),
    (["--rows", BOTH, "--arm", "control"], "is not NAME:FIELD=VALUE; write it like --arm control:flash_attn=0"),
    (["--rows", BOTH, "--arm", "control:n_batch=1", "--arm", "control:poll=1"], '"control" is given twice'),
    (["--rows", f"contrl={BOTH}"], '"contrl" is no arm; did you mean "control"?'),
    (["--rows", f"control={ONE}"], "nothing is the candidate (no file); give --rows candidate=FILE"),
    (["--rows", f"control={ONE}", "--rows", f"candidate={ONE}"], "is given twice; a file compared with itself"),
    (["--rows", f"control={ONE}", "--rows", "candidate=nowhere.jsonl"], "nowhere.jsonl: no such file"),
    (
        ["--rows", f"control={ONE}", "--rows", f"candidate={BOTH}", "--map", "tg12:npl=1"],
        'is no workload of own_ab; did you mean "tg128"?',
    ),
    (
        ["--rows", f"control={ONE}", "--rows", f"candidate={BOTH}", "--map", "tg128:n_ubach=1"],
        'no figure has a field "n_ubach"; did you mean "n_ubatch"?',
    ),
    (["--rows", f"control={ONE}", "--rows", f"candidate={BOTH}", "--device", "h20"], 'device "h20" is unknown'),
    (
        ["--rows", f"control={ONE}", "--rows", f"candidate={BOTH}", "--device", "h200"],
        "--device h200: but the files say Example GPU 24GB",
    ),
    (["--rows", ONE, "--all"], "needs exactly one card"),
    (["p6", "--rows", ONE], "needs exactly one card"),
    (["--arm", "control:n_batch=1"], "--arm and --map need --rows"),
]


def test_flags_refused(capsys: Capture) -> None:
    @over(numbered(FLAGS_REFUSED_CASES))
    def each(flags: list[str], said: str) -> None:
        assert said in refused(capsys, str(CARD), *flags)

    each()


def test_device_where_the_files_name_none(tmp_path: Path, capsys: Capture) -> None:
    nameless = files(tmp_path, LLAMA, *[lambda t: t.replace("gpu_info", "g")] * 2)
    assert judged(capsys, CARD, *nameless)["device"] == "device not stated"
    found = judged(capsys, CARD, *nameless, "--device", "NVIDIA H200")
    assert found["device"] == "h200"
    assert "the card asks about" not in found["note"]


# Parts ----------------------------------------------------------------------------------------------------------------


DECLARED_CASES: list[tuple[str, dict[str, str], str]] = [
    ("npp512", {"npp": "512"}, ""),
    ("dense-npl128", {"npl": "128"}, "dense"),
    ("npl8_npp63_ntg75", {"npl": "8", "npp": "63", "ntg": "75"}, ""),
    ("tg128", {"test": "tg128"}, ""),
    ("pp512@d4096", {"test": "pp512@d4096"}, ""),
    ("n32", {}, "n32"),
    ("m128_n5120_k6144", {}, "m128 n5120 k6144"),
    ("", {}, ""),
]


def test_declared() -> None:
    @over(numbered(DECLARED_CASES))
    def each(workload: str, axes: dict[str, str], words: str) -> None:
        assert arms.declared(workload) == (axes, words)

    each()


def test_selector_keeps_commas_of_a_value() -> None:
    assert arms.selector("--map", "w:bs=[1,1],m=63") == ("w", {"bs": "[1,1]", "m": "63"})
    for word in ("w", "w:", "w:m", "w:1=2"):
        with pytest.raises(BadInput, match="is not NAME:FIELD=VALUE"):
            arms.selector("--map", word)


AGREES_CASES: list[tuple[dict[str, str], list[int]]] = [
    ({"n": "1"}, [1]),
    ({"n": "1.0", "type_a": "q4_*"}, [1]),
    ({"bs": "[1,1]"}, [1, 512]),
    ({"bs": "[1,?]", "n": "512"}, [512]),
    ({"bs": "1"}, []),
    ({"op": "ADD"}, [63]),
    ({"op": "add"}, []),
    ({"nothing": "1"}, []),
]


def test_agrees() -> None:
    """Numbers as numbers, * and ? as wildcards, brackets as themselves."""

    @over(numbered(AGREES_CASES))
    def each(where: dict[str, str], found: list[int]) -> None:
        axes: list[dict[str, Any]] = [{"op": "MUL_MAT", "n": n, "type_a": "q4_0", "bs": "[1,1]"} for n in (1, 512)]
        axes.append({"op": "ADD", "n": 63})
        samples = [Sample("tool", Line(Path("file"), 1), "kernel_us", "us", (1.0,), a) for a in axes]
        assert [s.axes["n"] for s in samples if arms.agrees(s, where)] == found

    each()


def test_card_by_path_and_by_id() -> None:
    assert verdict.card_of(str(CARD)).id == "own_ab"
    assert verdict.card_of("lp11").id == "lp11"
