"""Other tools' outputs as figures: every format read, every unit confirmed or missing, every broken file one line.

A test breaks one thing in one file of tests/interop/ and expects that thing to be said.
"""

import re
from pathlib import Path

import pytest

from lab.base.errors import BadInput
from lab.study import own
from tests.loops import numbered, over
from tests.refused import refused
from tests.study.interop_samples import SAMPLES, Break, old_new, pattern

CUT, FAILED = "cut off", "that test failed"
LINES, FLASH, PRINTED = "llama_bench_control.jsonl", "llama_bench_flash_attn.json", "batched_bench_control.jsonl"
TABLE, TEXT, SQL = "batched_bench_control.txt", "backend_ops_control.txt", "backend_ops_control.sql"


def text_of(name: str) -> str:
    return (SAMPLES / name).read_text()


def broken(name: str, change: Break, tmp_path: Path) -> Path:
    text, path = text_of(name), tmp_path / name
    assert change(text) != text
    path.write_text(change(text))
    return path


# What is read ---------------------------------------------------------------------------------------------------------


READS_CASES: list[tuple[str, str, list[str]]] = [
    (LINES, "llama-bench", ["prefill_tps", "decode_tps"]),
    (FLASH, "llama-bench", ["prefill_tps"] * 2 + ["decode_tps"] * 2),
    (TABLE, "llama-batched-bench", ["prefill_tps", "decode_tps"] * 3),
    (PRINTED, "llama-batched-bench", ["prefill_tps", "decode_tps"] * 9),
    (TEXT, "test-backend-ops", ["kernel_us"] * 7),
    (SQL, "test-backend-ops", ["kernel_us"] * 3),
    ("backend_ops_tests.csv", "test-backend-ops", ["kernel_us"] * 3),
]


def test_reads() -> None:
    @over(numbered(READS_CASES))
    def each(name: str, tool: str, metrics: list[str]) -> None:
        imported = own.read(SAMPLES / name)
        assert imported.tool == tool
        assert [s.metric for s in imported.samples] == metrics
        assert [s.wrong for s in imported.samples] == [""] * len(metrics)

    each()


def test_llama_bench_fields() -> None:
    prefill, decode = own.read(SAMPLES / LINES).samples
    assert (decode.unit, len(decode.values), decode.when) == ("tok/s", 5, "2026-11-20T10:00:20Z")
    assert decode.axes == {"test": "tg128", "npp": 0, "ntg": 128, "npl": 1, "depth": 0}
    assert prefill.axes == {"test": "pp512", "npp": 512, "ntg": 0, "npl": 1, "depth": 0}
    assert decode.made.model_filename == "example-7b-q4_0.gguf"  # where it lay on somebody's disk is nobody's matter
    assert (decode.made.build_commit, decode.made.gpu_info) == ("a1b2c3d4", "Example GPU 24GB")
    assert (decode.settings["n_ubatch"], decode.settings["no_kv_offload"]) == (512, 0)
    assert decode.fields["no_kv_offload"] == "0"  # printed as false here and as 0 by other versions
    assert not set(decode.settings) & {"avg_ts", "n_gen", "samples_ts", "test_time", "gpu_info"}
    assert 99 < sum(decode.values) / 5 < 101
    assert decode.id == "llama_bench_control.jsonl:2"


def test_llama_bench_depth_and_combined_tests(tmp_path: Path) -> None:
    def deeper(text: str) -> str:
        return text.replace('"n_depth": 0', '"n_depth": 4096', 1).replace('"n_prompt": 0', '"n_prompt": 64')

    imported = own.read(broken(LINES, deeper, tmp_path))
    assert [s.axes["test"] for s in imported.samples] == ["pp512@d4096"]
    assert "1 combined tests (-pg) are neither prefill nor decode" in imported.notes[0]


def test_batched_bench_fields() -> None:
    prefill, decode = own.read(SAMPLES / TABLE).samples[2:4]
    assert (prefill.unit, prefill.values, decode.unit, decode.values) == ("t/s", (5000.0,), "t/s", (900.0,))
    assert decode.axes == {"npp": 128, "ntg": 128, "npl": 32}
    assert decode.settings["n_ubatch"] == 512
    assert decode.made.stated() == {
        "build_number": 7001,
        "build_commit": "a1b2c3d4",
        "gpu_info": "Example GPU 24GB",
        "model_filename": "example-7b-q4_0.gguf",
    }


def test_batched_bench_formats_agree() -> None:
    table = own.read(SAMPLES / TABLE).samples
    lines = own.read(SAMPLES / PRINTED).samples[:6]
    assert [(s.metric, s.axes, s.settings) for s in table] == [(s.metric, s.axes, s.settings) for s in lines]
    assert [s.values[0] for s in table] == pytest.approx([s.values[0] for s in lines], rel=1e-4)


def test_batched_bench_without_generation(tmp_path: Path) -> None:
    row = "|   512 |      0 |   32 |  16384 |    3.151 |  5200.00 |    0.000 |     -nan |    3.151 |  5200.00 |\n"
    path = tmp_path / "prefill.txt"
    path.write_text("".join(text_of(TABLE).splitlines(keepends=True)[6:9]) + row)
    assert [(s.metric, s.values) for s in own.read(path).samples] == [("prefill_tps", (5200.0,))]


def test_backend_ops_fields() -> None:
    timed = own.read(SAMPLES / TEXT).samples
    assert [s.status for s in timed] == ["ok"] * 3 + ["unsupported"] + ["passed"] * 3
    assert (timed[0].unit, timed[0].values, timed[0].flop_s) == ("us", (50.0,), 2.35e12)
    assert (timed[0].axes["op"], timed[0].axes["n"], timed[0].axes["bs"]) == ("MUL_MAT", "1", "[1,1]")
    assert timed[0].made.stated() == {"backend_name": "CUDA0", "gpu_info": "Example GPU 24GB"}
    assert [s.status for s in own.read(SAMPLES / "backend_ops_tests.csv").samples] == [
        "passed",
        "incorrect",
        "passed",
    ]


def test_backend_ops_formats_agree() -> None:
    console = own.read(SAMPLES / TEXT).samples[:3]
    sql = own.read(SAMPLES / SQL).samples
    assert [(s.values, s.unit, s.axes) for s in console] == [(s.values, s.unit, s.axes) for s in sql]
    assert sql[0].flop_s == pytest.approx(console[0].flop_s, rel=0.01)


def test_backend_ops_without_its_end(tmp_path: Path) -> None:
    path = broken(TEXT, lambda t: t.replace("backends passed", ""), tmp_path)
    assert 'no "backends passed" line' in own.read(path).notes[0]
    assert own.read(SAMPLES / TEXT).notes == ()


def test_json_among_log_lines(tmp_path: Path) -> None:
    """Standard error went into the same file."""
    log = "ggml_cuda_init: found 1 CUDA devices:\n  Device 0: Example GPU 24GB, compute capability 9.0, VMM: yes\n"
    for name in (LINES, FLASH, PRINTED):
        imported = own.read(broken(name, lambda t: "\ufeff" + log + t + "\ntotal time: 3 s\n", tmp_path))
        assert [s.values for s in imported.samples] == [s.values for s in own.read(SAMPLES / name).samples], name
        assert all(s.made.gpu_info == "Example GPU 24GB" for s in imported.samples), name


# Units ----------------------------------------------------------------------------------------------------------------


UNIT_IS_WHAT_THE_FILE_STATES_CASES: list[tuple[str, Break, str]] = [
    (TABLE, old_new("S_TG t/s", "S_TG ms "), "ms"),
    (TABLE, old_new("S_TG t/s", "S_TG    "), ""),
    (TABLE, old_new("T_TG s", "T_TG ms", "   1.280", "1280.000"), "t/s"),  # a time in ms confirms nothing
    (PRINTED, old_new('"t_tg"', '"other"'), ""),
    (TEXT, old_new("us/run", "ms/run"), "ms"),
    (TEXT, old_new(" us/run", " /run"), ""),
    (LINES, old_new('"samples_ns"', '"other"'), ""),
    (LINES, lambda t: t.replace('"samples_', '"x_').replace('"avg_ns"', '"x"'), ""),
]


def test_unit_is_what_the_file_states(tmp_path: Path) -> None:
    @over(numbered(UNIT_IS_WHAT_THE_FILE_STATES_CASES))
    def each(name: str, change: Break, unit: str) -> None:
        timed = [s for s in own.read(broken(name, change, tmp_path)).samples if s.status == "ok"]
        assert {s.unit for s in timed if s.metric != "prefill_tps"} == {unit}
        assert not any(s.wrong for s in timed)

    each()


FIGURE_THAT_CONTRADICTS_ITS_TIME_CASES: list[tuple[str, Break, tuple[str, ...]]] = [
    (LINES, pattern(r'(samples_ts": \[ )\d+', r"\g<1>5000"), ("line 1", "samples_ts 5000")),
    (LINES, old_new('"avg_ts": 100', '"avg_ts": 1'), ("line 2", "avg_ts 1.")),
    (LINES, lambda t: t.replace('"samples_', '"x_').replace('"avg_ts": 100', '"avg_ts": 8'), ("avg_ts 8",)),
    (LINES, old_new('"samples_ns": [ ', '"samples_ns": [ 1000, '), ("5 samples_ts", "6 samples_ns")),
    (TABLE, old_new("  900.00", "    4.55"), ("line 11", "S_TG 4.55", "900")),
    (TABLE, old_new(" 5200.00", "10400.00"), ("line 12", "S_PP 10400")),
    (PRINTED, old_new('"speed_tg": 900.0', '"speed_tg": 28.1'), ("line 2", "S_TG 28.1")),
    (TEXT, old_new("  50.00 us", "   0.05 us"), ("line 9", "us/run 0.05", "49.97")),
    (TEXT, old_new("  60.00 us", "   0.06 us"), ("line 11", "390.62 GB/s", "24576 kB", "0.06 us")),
    (TEXT, old_new("TFLOPS", "TOPS"), ("line 9", "MFLOP/run", "TOPS")),
    (SQL, old_new("'60.0", "'0.0600"), ("GB/s", "24576 kB")),
]


def test_figure_that_contradicts_its_time(tmp_path: Path) -> None:
    @over(numbered(FIGURE_THAT_CONTRADICTS_ITS_TIME_CASES))
    def each(name: str, change: Break, said: tuple[str, ...]) -> None:
        wrong = [s.wrong for s in own.read(broken(name, change, tmp_path)).samples if s.wrong]
        assert any(all(word in text for word in said) for text in wrong), wrong

    each()


# Files that are refused -----------------------------------------------------------------------------------------------


REFUSED_IN_ONE_LINE_CASES: list[tuple[str, Break, tuple[str, ...], str]] = [
    (LINES, lambda t: t[:-60], ("line 2", "ends in the middle"), CUT),
    (FLASH, lambda t: t[:-200], ("ends in the middle",), CUT),
    (FLASH, lambda t: t[: t.rindex("}") + 2], ("ends in the middle",), CUT),
    (LINES, lambda t: t[:-60] + "\n" + t, ("line 2", "is not JSON"), ""),
    (LINES, old_new('"samples_ts": [ ', '"samples_ts": [ -nan, '), ("line 1", "-nan"), FAILED),
    (FLASH, old_new('"avg_ts": ', '"avg_ts": inf, "x": ', times=1), ("holds inf",), FAILED),
    (LINES, old_new('"avg_ts": ', '"avg_ts": NaN, "x": '), ("line 1", "holds NaN"), FAILED),
    (LINES, old_new('"avg_ts": 100', '"avg_ts": 0, "x": 1'), ("line 2", "avg_ts = 0"), "> 0"),
    (LINES, old_new('"avg_ts": 100', '"avg_ts": 1e999, "x": 1'), ("line 2", "avg_ts = inf"), ""),
    (LINES, old_new('"n_gen": 128', f'"n_gen": {"9" * 400}'), ("line 2", "n_gen = 9999"), ""),
    (LINES, old_new('"n_gen": 128', '"n_gen": 0'), ("line 2", "n_prompt and n_gen"), ""),
    (LINES, old_new('"n_gen"', '"gen"'), ("line 1", '"n_gen"'), ""),
    (LINES, lambda t: t.replace('"avg_ts"', '"a"').replace('"samples_ts"', '"b"'), ("line 1", "no result"), "known: "),
    (LINES, lambda t: t + text_of(PRINTED), ("two tools",), ""),
    (TABLE, lambda t: t[: t.index("  900.00")], ("7 of 10 columns",), CUT),
    (TABLE, lambda t: t[: t.index("  2569.77") + 6], ("line 12", "10 of 10 columns"), CUT),
    (TABLE, old_new("  900.00", "    -nan"), ("line 11", "S_TG = '-nan'"), FAILED),
    (TABLE, pattern(r"\|   128 \|", "|  12.5 |"), ("line 10", "PP = '12.5'"), FAILED),
    (PRINTED, old_new('"pl"', '"p"'), ("line 1", '"pl"'), ""),
    (TEXT, lambda t: t[: t.index("60.13 GFLOP")], ("is no whole result",), CUT),
    (TEXT, lambda t: t[: t.index("2400.00 us")], ("is no whole result",), CUT),
    (TEXT, old_new("  50.00 us", "    inf us"), ("line 9", "us/run = 'inf'"), FAILED),
    (SQL, lambda t: t[:-40], ("INSERT into test_backend_ops",), CUT),
    (SQL, old_new("'CUDA0', ", "", times=1), ("15 of 16 columns",), CUT),
    (SQL, old_new("'50.000000'", "'0.000000'"), ("time_us = '0.000000'",), "> 0"),
    (SQL, old_new("'50.000000'", "'inf'"), ("time_us = 'inf'",), ""),
    ("backend_ops_tests.csv", lambda t: t[:-20], ("line 4", "3 of 7 columns"), CUT),
]


def test_refused_in_one_line(tmp_path: Path) -> None:
    @over(numbered(REFUSED_IN_ONE_LINE_CASES))
    def each(name: str, change: Break, said: tuple[str, ...], remedy: str) -> None:
        path = broken(name, change, tmp_path)
        with pytest.raises(BadInput) as caught:
            own.read(path)
        error = caught.value
        assert path.name in error.where
        assert [word for word in said if word not in str(error)] == [], str(error)
        assert error.remedy, str(error)
        assert remedy in error.remedy, str(error)
        assert "\n" not in str(error)

    each()


WHAT_IS_NO_OUTPUT_OF_A_KNOWN_TOOL_CASES: list[tuple[str, str, str]] = [
    ("", "file", "llama-bench -o jsonl"),
    ("hello\n| a | b |\n", "file", "llama-bench -o jsonl"),
    ("| model | backend | ngl | test |    t/s |\n| x | CUDA | 99 | pp512 | 1.00 ± 0.01 |\n", "file", "-o jsonl"),
    ("build_commit,build_number,n_prompt\n", "file", "run it with -o jsonl"),
    ("INSERT INTO llama_bench (a) VALUES ('1');\n", "file", "run it with -o jsonl"),
    ("  MUL_MAT(m=1): ", "file", "known: "),
    ("Backend 1/1: CUDA0\n  ADD(m=1): OK\n  MUL_MAT(m=1): ", "line 3", CUT),
    ('{"a": 1}\n', "line 1", "known: "),
    ("[\n]\n", "file", "known: "),
]


def test_what_is_no_output_of_a_known_tool(tmp_path: Path) -> None:
    path = tmp_path / "file"

    @over(numbered(WHAT_IS_NO_OUTPUT_OF_A_KNOWN_TOOL_CASES))
    def each(text: str, where: str, remedy: str) -> None:
        path.write_text(text)
        with refused(where, remedy=remedy):
            own.read(path)

    each()


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with refused("nowhere.jsonl", "no such file", remedy="check the name"):
        own.read(tmp_path / "nowhere.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with refused("binary", "cannot be read", remedy="UTF-8"):
        own.read(tmp_path / "binary")


def test_cut_anywhere_is_shorter_or_one_line(tmp_path: Path) -> None:
    """Whatever byte a run stopped at: what is read begins the whole file's figures, or the file is refused."""

    # One arm of each pair: the other's file has the same lines.
    @over({p.name: (p.name,) for p in SAMPLES.iterdir() if p.suffix != ".toml" and "candidate" not in p.name})
    def each(name: str) -> None:
        text, path = text_of(name), tmp_path / name
        whole = [(s.at.number, s.values, s.status) for s in own.read(SAMPLES / name).samples]
        outcomes = set()
        for end in sorted({*range(0, len(text), 131), *(found.end() for found in re.finditer("\n", text))}):
            path.write_text(text[:end])
            try:
                read = [(s.at.number, s.values, s.status) for s in own.read(path).samples]
            except BadInput:
                outcomes.add("refused")
                continue
            assert read == whole[: len(read)], end
            outcomes.add("read")
        assert outcomes == {"refused", "read"}

    each()
