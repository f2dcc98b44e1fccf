"""`lab judge CARD --rows`: somebody's own A/B to a verdict, and what must be said beside it.

Cards are written here, so that no question of the repository is bent to fit a test; files come from tests/interop/,
whole or with one thing changed.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lab.cli import main
from tests.loops import numbered, over
from tests.study.interop_samples import (
    BATCHED,
    CARD,
    LLAMA,
    OPS,
    SAMPLES,
    Capture,
    card,
    condition,
    files,
    judged,
    old_new,
    pattern,
)

OP = "m4096_n1_k14336"
OP_MAP = f"{OP}:op=MUL_MAT,m=4096,n=1,k=14336,type_a=q4_0"


# Verdicts -------------------------------------------------------------------------------------------------------------


def test_go_with_everything_it_rests_on(tmp_path: Path, capsys: Capture) -> None:
    found = judged(capsys, CARD, *files(tmp_path, LLAMA))
    assert (found["verdict"], found["evidence"], found["device"]) == ("GO", "imported", "Example GPU 24GB")
    assert found["reason"].startswith("decode_tps +10.54 % (100.157 -> 110.714 tok/s), 95 % interval +10.15 to")
    prefill, decode = found["imported"]["mapping"]
    assert (prefill["workload"], prefill["where"], decode["where"]) == ("pp512", {"test": "pp512"}, {"test": "tg128"})
    assert decode["control"]["made"]["build_commit"] == "a1b2c3d4"
    assert decode["candidate"]["figures"] == ["candidate_llama_bench_candidate.jsonl:2"]
    assert (decode["control"]["repetitions"], decode["control"]["unit"]) == (5, "tok/s")
    assert [f["arm"] for f in found["imported"]["files"]] == ["control", "candidate"]
    said = found["note"]
    assert said == "; ".join(found["imported"]["warnings"])
    assert "different builds (a1b2c3d4 7001 against e5f60718 7002)" in said
    assert "the card asks about h200, these figures are from Example GPU 24GB" in said
    assert "the arms ran one after the other (1 min between them)" in said


def test_text_says_the_same(tmp_path: Path, capsys: Capture) -> None:
    flags = files(tmp_path, LLAMA)
    assert main.main(["judge", str(CARD), *flags]) == 0
    text = capsys.readouterr().out
    assert text.startswith("own_ab on imported evidence, Example GPU 24GB: GO. decode_tps +10.54 %")
    assert re.search(r"tg128 +decode_tps +test=tg128 +100\.157 tok/s", text)
    assert "kill: prefill_tps +0.37 %" in text
    assert "note: the arms are different builds" in text
    assert main.main(["judge", str(CARD), *flags, "--fail-on", "GO"]) == 1


def test_arms_are_not_interchangeable(tmp_path: Path, capsys: Capture) -> None:
    flags = files(tmp_path, LLAMA)
    turned = [f.replace("control=", "x=").replace("candidate=", "control=").replace("x=", "candidate=") for f in flags]
    assert judged(capsys, CARD, *turned)["verdict"] == "NO-GO"


def test_one_file_with_both_arms(capsys: Capture) -> None:
    both = ["--rows", str(SAMPLES / "llama_bench_flash_attn.json")]
    found = judged(capsys, CARD, *both, "--arm", "control:flash_attn=0", "--arm", "candidate:flash_attn=1")
    assert found["verdict"] == "NO-GO"
    assert found["reason"].startswith("decode_tps +0.44 %")
    assert "different builds" not in found["note"]


def test_noise_of_the_control_counts(tmp_path: Path, capsys: Capture) -> None:
    """+10.5 % is an effect beside repetitions within 0.2 % and none beside repetitions that lie 20 % apart."""
    question = card(tmp_path, ["tg128"], condition("decode_tps", ">", 0, "tg128"))

    def scatter(text: str) -> str:
        first, second = text.splitlines()
        entry = json.loads(second)
        entry["samples_ts"] = [80.0, 120.0, 100.0, 90.0, 110.0]
        entry |= {"samples_ns": [128e9 / ts for ts in entry["samples_ts"]], "avg_ts": 100.0}
        return first + "\n" + json.dumps(entry) + "\n"

    assert judged(capsys, question, *files(tmp_path, LLAMA))["verdict"] == "GO"
    assert judged(capsys, question, *files(tmp_path, LLAMA, control=scatter))["verdict"] == "NEUTRAL"


def test_batched_workloads_by_the_axes_in_their_names(tmp_path: Path, capsys: Capture) -> None:
    question = card(
        tmp_path,
        ["npl1", "npl32-npp128"],
        condition("decode_tps", ">", 10, "npl32-npp128"),
        condition("decode_tps", "<", -5, "npl1", role="kill"),
    )
    found = judged(capsys, question, *files(tmp_path, BATCHED))
    assert found["verdict"] == "GO"
    by_name = {m["workload"]: m for m in found["imported"]["mapping"]}
    assert by_name["npl32-npp128"]["where"] == {"npl": "32", "npp": "128"}
    assert by_name["npl32-npp128"]["shape"] == {"npp": 128, "ntg": 128, "npl": 32}
    assert "1 repetition of the control and 1 repetition of the candidate do not show" in found["note"]
    assert "held against the card's noise floor of 2 % alone" in found["note"]


def test_repeated_runs_are_repetitions(tmp_path: Path, capsys: Capture) -> None:
    question = card(tmp_path, ["npl1"], condition("decode_tps", "<", 10, "npl1"))
    thrice = files(tmp_path, "batched_bench_control.jsonl", candidate=lambda t: t + "\n")
    control = judged(capsys, question, *thrice)["imported"]["mapping"][0]["control"]
    assert (control["repetitions"], control["mean"]) == (3, pytest.approx(100.0333, rel=1e-4))


def test_several_files_of_one_arm(tmp_path: Path, capsys: Capture) -> None:
    question = card(tmp_path, ["npl1"], condition("decode_tps", ">=", -50, "npl1"))
    more = ["--rows", f"control={SAMPLES / 'batched_bench_control.txt'}"]
    found = judged(capsys, question, *files(tmp_path, BATCHED), *more)
    assert found["imported"]["mapping"][0]["control"]["repetitions"] == 2
    assert "npl1: 2 files of the control are pooled as repetitions" in found["note"]


def test_whole_phase_without_a_workload(tmp_path: Path, capsys: Capture) -> None:
    question = card(tmp_path, [], condition("decode_tps", ">", 5, ""))
    assert judged(capsys, question, *files(tmp_path, LLAMA))["verdict"] == "GO"
    assert "differ in npp (128, 512), npl (1, 32)" in judged(capsys, question, *files(tmp_path, BATCHED))["reason"]
    assert judged(capsys, question, *files(tmp_path, BATCHED), "--map", ":npl=32,npp=512")["verdict"] == "GO"


def test_operator(tmp_path: Path, capsys: Capture) -> None:
    question = card(tmp_path, [OP], condition("kernel_us", "<", -10, OP))
    found = judged(capsys, question, *files(tmp_path, OPS), "--map", OP_MAP)
    assert (found["verdict"], found["reason"][:33]) == ("GO", "kernel_us -24.00 % (50 -> 38 us),")
    assert f"{OP} is taken to be MUL_MAT(type_a=q4_0,type_b=f32,m=4096,n=1,k=14336," in found["note"]
    assert "warm L2, launch gaps included" in found["note"]
    assert "no correctness test" not in found["note"]
    other = files(tmp_path, OPS, candidate=pattern(r"(n=512,.*): \x1b\[1;32mOK", r"\1: FAIL"))
    assert judged(capsys, question, *other, "--map", OP_MAP)["verdict"] == "GO"
    untested = files(tmp_path, OPS, candidate=lambda t: t.replace("\x1b[1;32mOK", "see above"))
    assert "no correctness test of that operator" in judged(capsys, question, *untested, "--map", OP_MAP)["note"]


# INVALID and BLOCKED --------------------------------------------------------------------------------------------------


CANDIDATE_THAT_CANNOT_BE_JUDGED_CASES: list[tuple[str, Any, str, str]] = [
    (BATCHED, old_new("S_TG t/s", "S_TG ms"), "INVALID", "decode_tps is in tok/s and ms, not tok/s"),
    (BATCHED, old_new("S_TG t/s", "S_TG"), "BLOCKED", "decode_tps has no unit"),
    (BATCHED, old_new("1080.00", "   3.79"), "INVALID", "S_TG 3.79 is not the 1079.88"),
    (
        BATCHED,
        lambda t: re.sub(r"\|   128 \|    128 \|   32 .*\n", "", t),
        "BLOCKED",
        "candidate has no decode_tps for npl32-npp128 (npl=32, npp=128)",
    ),
    (
        BATCHED,
        old_new("128 |    128 |   32", "128 |     64 |   32", "3.793", "1.896"),
        "BLOCKED",
        "different shapes for npl32-npp128: ntg (128 against 64)",
    ),
    (OPS, old_new("us/run", "ms/run"), "INVALID", "kernel_us is in us and ms, not us"),
    (OPS, old_new(" us/run", " /run"), "BLOCKED", "kernel_us has no unit"),
    (
        OPS,
        lambda t: t.replace("o=1): \x1b[1;32mOK", "o=1): [MUL_MAT] ERR = 0.1 > 0.0005 \x1b[1;31mFAIL", 1),
        "INVALID",
        "MUL_MAT fails test-backend-ops",
    ),
    (
        OPS,
        lambda t: re.sub(r"(n=1,k=14336.*?): +\d+ runs.*", r"\1: not supported", t, count=1),
        "BLOCKED",
        ":9 says unsupported",
    ),
]


def test_candidate_that_cannot_be_judged(tmp_path: Path, capsys: Capture) -> None:
    @over(numbered(CANDIDATE_THAT_CANNOT_BE_JUDGED_CASES))
    def each(sample: str, change: Any, word: str, said: str) -> None:
        workload, metric = (OP, "kernel_us") if sample is OPS else ("npl32-npp128", "decode_tps")
        question = card(tmp_path, [workload], condition(metric, "<" if sample is OPS else ">", 0, workload))
        flags = ["--map", OP_MAP] if sample is OPS else []
        assert judged(capsys, question, *files(tmp_path, sample), *flags)["verdict"] in ("GO", "CONDITIONAL-GO")
        found = judged(capsys, question, *files(tmp_path, sample, candidate=change), *flags)
        assert (found["verdict"], said in found["reason"]) == (word, True), found["reason"]

    each()


def test_faster_than_the_device(tmp_path: Path, capsys: Capture) -> None:
    """On a device whose peaks are known, more FLOPS than its highest peak are no result."""
    question = card(tmp_path, [OP], condition("kernel_us", "<", -10, OP))

    def on_h200(text: str) -> str:
        return text.replace("Example GPU 24GB", "NVIDIA H200")

    def too_fast(text: str) -> str:
        return (
            on_h200(text)
            .replace("38.00 us/run - 117.44 MFLOP", "38.00 us/run - 117.44 GFLOP")
            .replace("3.09 T", "3090.00 T")
        )

    assert judged(capsys, question, *files(tmp_path, OPS, on_h200, on_h200), "--map", OP_MAP)["device"] == "h200"
    found = judged(capsys, question, *files(tmp_path, OPS, on_h200, too_fast), "--map", OP_MAP)
    assert found["verdict"] == "INVALID"
    assert "claims 3090 TFLOP/s, above the device's highest dense peak" in found["reason"]


def test_what_the_tools_never_print(tmp_path: Path, capsys: Capture) -> None:
    found = judged(capsys, "lp11", *files(tmp_path, BATCHED))
    assert found["verdict"] == "BLOCKED"
    assert "dense-npl32 and moe-npl32 ask for the same, npl=32: tell them apart with --map" in found["reason"]
    assert "these tools do not print decode_share_of_vllm" in found["reason"]
    found = judged(capsys, "lp11-kernel", *files(tmp_path, OPS))
    assert "m128_n5120_k6144 declares no axis" in found["reason"]


def test_one_figure_is_not_two_workloads(tmp_path: Path, capsys: Capture) -> None:
    question = card(
        tmp_path, ["a-npl1", "b-npl1"], *(condition("decode_tps", "<", 50, w) for w in ("a-npl1", "b-npl1"))
    )
    found = judged(capsys, question, *files(tmp_path, BATCHED), "--map", "a-npl1:npp=128")
    assert (found["verdict"], "a-npl1 and b-npl1 both match" in found["reason"]) == ("BLOCKED", True)
    by_file = ["--map", "a-npl1:file=control*", "--map", "b-npl1:file=other*"]
    assert judged(capsys, question, *files(tmp_path, BATCHED), *by_file)["verdict"] == "BLOCKED"


def test_configurations_are_never_averaged(tmp_path: Path, capsys: Capture) -> None:
    def second(text: str) -> str:
        return text + text.replace('"n_ubatch": 512', '"n_ubatch": 1024')

    found = judged(capsys, CARD, *files(tmp_path, LLAMA, control=second))
    assert found["verdict"] == "BLOCKED"
    assert "control has several figures for tg128 (test=tg128) that differ in n_ubatch (1024, 512)" in found["reason"]
    both = ["--map", "tg128:n_ubatch=512", "--map", "pp512:n_ubatch=512"]
    assert judged(capsys, CARD, *files(tmp_path, LLAMA, control=second), *both)["verdict"] == "GO"


def test_builds_mixed_within_an_arm(tmp_path: Path, capsys: Capture) -> None:
    found = judged(capsys, CARD, *files(tmp_path, LLAMA, candidate=lambda t: t + t.replace("e5f60718", "0000abcd")))
    assert (found["verdict"], "differ in build_commit (0000abcd, e5f60718)" in found["reason"]) == ("BLOCKED", True)


# Said beside the verdict ----------------------------------------------------------------------------------------------


WARNING_CASES: list[tuple[Any, Any, str]] = [
    (None, old_new("q4_0.gguf", "q8_0.gguf"), "ran different model files"),
    (
        None,
        old_new('"flash_attn": 0', '"flash_attn": 1', '"n_ubatch": 512', '"n_ubatch": 1024'),
        "the arms differ in 2 settings: n_ubatch (1024, 512), flash_attn (0, 1)",
    ),
    (None, old_new("e5f60718", "a1b2c3d4", "7002", "7001"), "the arms differ in nothing that the files record"),
    (old_new("build_", "b_"), None, "the files do not name the build of both arms"),
    (old_new("model_", "m_"), None, "the files do not name the model of both arms"),
    (None, old_new("11-20T10", "11-20T16"), "ran one after the other (6.0 h between them)"),
    (
        lambda t: re.sub(r"(samples_[tn]s\": \[ [\d.]+)[^\]]*", r"\1", re.sub(r'"avg_ts": [\d.]+, ', "", t)),
        None,
        "1 repetition of the control and 5 repetitions of the candidate",
    ),
]


def test_warning(tmp_path: Path, capsys: Capture) -> None:
    @over(numbered(WARNING_CASES))
    def each(control: Any, candidate: Any, said: str) -> None:
        assert said not in judged(capsys, CARD, *files(tmp_path, LLAMA))["note"]
        assert said in judged(capsys, CARD, *files(tmp_path, LLAMA, control, candidate))["note"]

    each()


def test_words_of_a_name_that_nothing_checks(tmp_path: Path, capsys: Capture) -> None:
    question = card(tmp_path, ["dense-npl1"], condition("decode_tps", ">=", -50, "dense-npl1"))
    said = 'nothing in the files was compared with "dense"'
    assert said in judged(capsys, question, *files(tmp_path, BATCHED))["note"]
    model = ["--map", "dense-npl1:model_filename=example-7b*"]
    assert said not in judged(capsys, question, *files(tmp_path, BATCHED), *model)["note"]
