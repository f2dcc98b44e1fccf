"""`lab judge CARD --rows`: what is no comparison, or not clear enough to be one, is refused in one line.

Also the parts that decide it: the axes that a workload's name declares, the selectors of the command line.
"""

import re
from pathlib import Path
from typing import Any

from lab.study.own import arms
from lab.study.own.sample import Line, Sample
from tests.loops import numbered, over
from tests.refused import held
from tests.refused import refused as refused_by
from tests.study import own_files as made
from tests.study.interop_samples import (
    BATCHED,
    CARD,
    LLAMA,
    SAMPLES,
    Capture,
    card,
    condition,
    files,
    judged,
    old_new,
    refused,
)

# Refused --------------------------------------------------------------------------------------------------------------


NO_COMPARISON_CASES: list[tuple[Any, str, tuple[str, ...]]] = [
    (
        old_new("Example GPU 24GB", "Another GPU"),
        "--rows",
        ("Example GPU 24GB", "Another GPU", "gpu_info", "one machine"),
    ),
    (
        old_new("Example CPU", "Another CPU"),
        "--rows",
        ("Example CPU 16-Core", "Another CPU 16-Core", "cpu_info", "one machine"),
    ),
    (old_new('"backends": "CUDA"', '"backends": "CPU"'), "--rows", ("backends", "CUDA", "CPU", "one machine", "--arm")),
    (old_new('"n_gpu_layers": -1', '"n_gpu_layers": 0'), "--rows", ("n_gpu_layers", "is all", "0", "one machine")),
    (old_new("7000000000", "8000000000"), "--rows", ("7000000000", "8000000000", "model_n_params", "one model")),
    (lambda t: t[:-30], "llama_bench_candidate.jsonl line 2", ("cut off",)),
    (lambda t: re.sub(r'"avg_ts": 110[\d.]+', '"avg_ts": nan', t), "llama_bench_candidate.jsonl line 2", ("nan",)),
]


def test_no_comparison(tmp_path: Path, capsys: Capture) -> None:
    @over(numbered(NO_COMPARISON_CASES))
    def each(candidate: Any, where: str, words: tuple[str, ...]) -> None:
        held(refused(capsys, str(CARD), *files(tmp_path, LLAMA, candidate=candidate)), where, *words)

    each()


def profiles(folder: Path, candidate: str, how: str) -> list[str]:
    """A card about a kernel's time, a profile of each arm, and how it is read."""
    flags = [str(card(folder, [], condition("kernel_us", "<", -5, ""))), "--metric", f"kernel_us:kernel=gemv,{how}"]
    for arm, text in (("control", made.ncu([("gemv", 30.0)] * 4)), ("candidate", candidate)):
        (folder / f"{arm}.csv").write_text(text)
        flags += ["--rows", f"{arm}={folder / arm}.csv"]
    return flags


def test_profiles_of_other_launches(tmp_path: Path, capsys: Capture) -> None:
    """Half of the launches are half of the time; fewer may be what was changed, and are said."""
    half = made.ncu([("gemv", 30.0)] * 2)
    held(refused(capsys, *profiles(tmp_path, half, "calls=4")), "candidate.csv", "2 launches", "calls = 4", "calls=N")
    fused = judged(capsys, *profiles(tmp_path, half, "calls=2"))
    assert "the times are of 4 of the control and 2 of the candidate launches" in fused["note"]
    same = judged(capsys, *profiles(tmp_path, made.ncu([("gemv", 20.0)] * 4), "calls=4"))
    assert same["verdict"] == "GO"
    assert "launches" not in same["note"]


def test_profiles_of_two_gpus(tmp_path: Path, capsys: Capture) -> None:
    other = made.ncu([("gemv", 20.0)] * 4, capability="9.0")
    said = refused(capsys, *profiles(tmp_path, other, "calls=4"))
    held(said, "--rows", "compute_capability", "12.0", "9.0", "one machine")


def test_layers_on_the_gpu(tmp_path: Path, capsys: Capture) -> None:
    """99 and -1 are both all of them; another number is another machine, unless it is the question."""
    question = str(card(tmp_path, ["npl1"], condition("decode_tps", ">", -50, "npl1")))

    def flags(layers: int) -> list[str]:
        return files(tmp_path, BATCHED, candidate=old_new("n_gpu_layers = 99", f"n_gpu_layers = {layers}"))

    assert judged(capsys, question, *flags(-1))["verdict"] == judged(capsys, question, *flags(999))["verdict"] == "GO"
    held(refused(capsys, question, *flags(0)), "--rows", "n_gpu_layers", "all", "candidate 0")
    asked = ["--arm", "control:n_gpu_layers=99", "--arm", "candidate:n_gpu_layers=0"]
    assert judged(capsys, question, *flags(0), *asked)["verdict"] == "GO"


def test_two_tools_are_no_comparison(tmp_path: Path, capsys: Capture) -> None:
    question = card(tmp_path, ["npl1"], condition("decode_tps", ">", 0, "npl1"))
    flags = ["--rows", f"control={SAMPLES / 'llama_bench_control.jsonl'}"]
    flags += ["--rows", f"candidate={SAMPLES / 'batched_bench_candidate.txt'}"]
    held(refused(capsys, str(question), *flags), "--rows", "npl1", "llama-bench", "llama-batched-bench", "one tool")


def serving(folder: Path, **candidate: Any) -> list[str]:
    """A card about a serving benchmark, and a run of each arm."""
    flags = [str(card(folder, [], condition("aggregate_tps", ">", -5, "")))]
    for arm, more in (("control", {}), ("candidate", candidate)):
        (folder / f"{arm}.json").write_text(made.vllm(**more))
        flags += ["--rows", f"{arm}={folder / arm}.json"]
    return flags


ANOTHER_LOAD: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"total_input_tokens": 2048}, ("32 input tokens per request", "control.json:1 128;", "--seed")),
    ({"tps": 50.0}, ("25 output tokens per request", "control.json:1 200;", "--ignore-eos")),
    ({"model_id": "other-7b"}, ("model_filename", "example-7b", "other-7b", "one model", "--arm")),
]
SAME_LOAD: list[tuple[dict[str, Any]]] = [
    ({"total_input_tokens": 8500, "tps": 430.0},),
    ({"completed": 32, "num_prompts": 64, "failed": 32, "total_input_tokens": 4096, "total_output_tokens": 6400},),
    ({"total_input_tokens": None, "model_id": "somewhere/else/example-7b"},),
]


def test_another_load_is_no_comparison(tmp_path: Path, capsys: Capture) -> None:
    @over(numbered(ANOTHER_LOAD))
    def each(candidate: dict[str, Any], words: tuple[str, ...]) -> None:
        held(refused(capsys, *serving(tmp_path, **candidate)), "--rows", *words)

    each()


def test_load_that_varies_is_one_load(tmp_path: Path, capsys: Capture) -> None:
    """Sampled lengths, a run of which a part failed (which is said elsewhere), and what one file does not state."""

    @over(numbered(SAME_LOAD))
    def each(candidate: dict[str, Any]) -> None:
        assert judged(capsys, *serving(tmp_path, **candidate))["verdict"] in ("GO", "INVALID")

    each()
    models = ["--arm", "control:model_filename=example-7b", "--arm", "candidate:model_filename=other-7b"]
    assert judged(capsys, *serving(tmp_path, model_id="other-7b"), *models)["verdict"] == "GO"


def test_arrivals_and_failed_requests_in_words(tmp_path: Path, capsys: Capture) -> None:
    limited: dict[str, Any] = {"rate": "inf", "max_concurrency": 8}
    reason = judged(capsys, *serving(tmp_path, **limited))["reason"]
    assert "arrival (staggered against not stated)" in reason
    flags = serving(tmp_path, **limited, completed=6, failed=58)
    (tmp_path / "control.json").write_text(made.vllm(**limited))
    found = judged(capsys, *flags)
    assert found["verdict"] == "INVALID"
    assert "58 of 64 requests failed" in found["reason"]


BOTH = str(SAMPLES / "llama_bench_flash_attn.json")
ONE = str(SAMPLES / "llama_bench_control.jsonl")
PAIR = ["--rows", f"control={ONE}", "--rows", f"candidate={BOTH}"]
FLAGS_REFUSED_CASES: list[tuple[list[str], str, tuple[str, ...]]] = [
    (["--rows", BOTH], "--rows llama_bench_flash_attn.json", ("flash_attn (0, 1)", "--rows control=FILE")),
    (["--rows", BOTH, "--arm", "control:flash_attn=0"], "--rows", ("the candidate (no file)", "candidate=FILE")),
    (
        ["--rows", BOTH, "--arm", "control:flash_attn=0", "--arm", "candidate:flash_attn=2"],
        "--rows",
        ("the candidate (flash_attn=2)", "flash_attn 0, 1"),
    ),
    (
        ["--rows", BOTH, "--arm", "control:flash_attn=0", "--arm", "candidate:n_batch=2048"],
        "--arm",
        ("both control and candidate",),
    ),
    (["--rows", BOTH, "--arm", "control:flash_atn=0"], "--arm", ('"flash_atn"', '"flash_attn"')),
    (["--rows", BOTH, "--arm", "contrl:flash_attn=0"], "--arm", ('"contrl"', '"control"')),
    (["--rows", BOTH, "--arm", "control"], "--arm control", ("NAME:FIELD=VALUE", "--arm control:flash_attn=0")),
    (["--rows", BOTH, "--arm", "control:n_batch=1", "--arm", "control:poll=1"], "--arm control:poll=1", ("twice",)),
    (["--rows", f"contrl={BOTH}"], f"--rows contrl={BOTH}", ('"contrl"', '"control"')),
    (["--rows", f"control={ONE}"], "--rows", ("the candidate (no file)", "candidate=FILE")),
    (["--rows", f"control={ONE}", "--rows", f"candidate={ONE}"], f"--rows {ONE}", ("twice",)),
    (["--rows", f"control={ONE}", "--rows", "candidate=nowhere.jsonl"], "nowhere.jsonl", ("no such file",)),
    ([*PAIR, "--map", "tg12:npl=1"], "--map tg12", ("own_ab", '"tg128"')),
    ([*PAIR, "--map", "tg128:n_ubach=1"], "--map", ('"n_ubach"', '"n_ubatch"')),
    ([*PAIR, "--device", "h20"], "--device", ('"h20"', '"h200"')),
    ([*PAIR, "--device", "h200"], "--device h200", ("Example GPU 24GB",)),
    (["--rows", ONE, "--all"], "lab judge --rows", ("one card", "lab phases")),
    (["p6", "--rows", ONE], "lab judge --rows", ("one card", "lab phases")),
    (["--arm", "control:n_batch=1"], "lab judge", ("--rows control=FILE",)),
]


def test_flags_refused(capsys: Capture) -> None:
    @over(numbered(FLAGS_REFUSED_CASES))
    def each(flags: list[str], where: str, words: tuple[str, ...]) -> None:
        held(refused(capsys, str(CARD), *flags), where, *words)

    each()


def test_device_where_the_files_name_none(tmp_path: Path, capsys: Capture) -> None:
    nameless = files(tmp_path, LLAMA, *[lambda t: t.replace("gpu_info", "g")] * 2)
    unnamed = judged(capsys, CARD, *nameless)
    assert unnamed["device"] == "device not stated"
    assert "about h200, the files name no GPU: if it was that one, say so with --device h200" in unnamed["note"]
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
        with refused_by(f"--map {word}", "NAME:FIELD=VALUE", remedy="--map "):
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
