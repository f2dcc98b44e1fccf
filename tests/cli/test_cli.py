"""The command line as its users see it: exit codes, one line for bad input, JSON that any strict reader takes.

`main` is called in this process where that is enough; what only a process shows (a closed pipe, `python -m lab`, the
time to start) runs in one.
"""

import importlib
import json
import math
import os
import re
import subprocess
import sys
import time
from argparse import SUPPRESS
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lab import __version__
from lab.base import files
from lab.base.errors import REPOSITORY, nearest
from lab.card import phases
from lab.check import accuracy, families
from lab.cli import main
from lab.row import store
from tests import own_card
from tests.loops import over

Capture = pytest.CaptureFixture[str]


def strict(text: str) -> Any:
    """JSON as the standard has it: Python's own reader takes NaN and Infinity unless told not to."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def refused(capsys: Capture, *arguments: str) -> str:
    assert main.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("lab: ")
    assert captured.err.count("\n") == 1
    return captured.err.strip()


def process(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lab", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, **more)


def test_a_file_name_reaches_the_terminal_as_text(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31m.csv"
    path.write_text("Time (%),Total Time (ns),Instances,Name\n100.0,5,1,k\n")
    assert main.main(["trace", str(path)]) == 0
    assert capsys.readouterr().out.startswith(r"a\x1b[31m.csv: nsys")


def test_the_docs_list_every_command() -> None:
    page = REPOSITORY / "lab" / "write" / "docs" / "commands.md"
    listed = re.findall(r"^\| `([a-z]+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(main.COMMANDS)


def test_every_command_has_its_function_and_its_help(capsys: Capture) -> None:
    for name, command in main.COMMANDS.items():
        module, _, function = command.run.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), name
        with pytest.raises(SystemExit) as stopped:
            main.main([name, "--help"])
        assert stopped.value.code == 0, name
        shown = capsys.readouterr().out
        for names, options in command.arguments:
            if options.get("help") != SUPPRESS:
                assert any(word in shown for word in (*names, options.get("metavar", names[0]))), (name, names)
        assert ("--json" in shown) == command.json, name


def test_window_options_exclude_each_other(capsys: Capture) -> None:
    for command in (["trace", "f"], ["diff", "a", "b"], ["amdahl", "a", "--category", "x"]):
        with pytest.raises(SystemExit) as stopped:
            main.main([*command, "--steady", "--replay", "1"])
        assert stopped.value.code == 2
        assert "not allowed with" in capsys.readouterr().err


# judge ----------------------------------------------------------------------------------------------------------------

KEYS = {
    "phase",
    "row",
    "system",
    "evidence",
    "device",
    "verdict",
    "reason",
    "recorded_id",
    "recorded_verdict",
    "source_word",
    "reading",
    "source",
    "source_lines",
    "agrees_with_word",
    "agrees",
}


def test_judge_all_json(capsys: Capture) -> None:
    start = time.perf_counter()
    assert main.main(["judge", "--all", "--evidence", "recorded", "--json"]) == 0
    assert time.perf_counter() - start < 5
    found = strict(capsys.readouterr().out)
    ids = [j["recorded_id"] for j in found]
    assert len(set(ids)) == len(ids)
    assert sorted(ids) == sorted(case.verdict.id for card in phases.cards().values() for case in card.recorded)
    for j in found:
        assert set(j) >= KEYS
        assert isinstance(j["agrees"], bool)
        assert isinstance(j["agrees_with_word"], bool) == bool(j["source_word"])
        assert all(isinstance(j[key], str) and j[key] for key in KEYS - {"agrees", "agrees_with_word", "source_word"})
        assert j["evidence"] == "recorded"
        assert j["figures"] or j["verdict"] == "BLOCKED"  # a source may state nothing to judge by


def test_judge_one_phase_as_text(capsys: Capture) -> None:
    assert main.main(["judge", "p5"]) == 0
    text = capsys.readouterr().out
    assert "p5 on recorded evidence, gb10: NO-GO. gdn_us_per_token +112.15 % (56.31 -> 119.46 us/tok)" in text
    assert "p4" not in text


@pytest.mark.parametrize(
    ("words", "code"),
    [("NO-GO", 1), ("GO,NO-GO", 1), ("GO", 0), ("INVALID,BLOCKED,VACUOUS", 0), ("", 0)],
)
def test_fail_on(words: str, code: int, capsys: Capture) -> None:
    assert main.main(["judge", "p5", "--fail-on", words]) == code


def test_fail_on_unknown_word(capsys: Capture) -> None:
    assert 'did you mean "NO-GO"?' in refused(capsys, "judge", "p5", "--fail-on", "NOGO")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["judge", "p55"], 'data/phases: no card has the id "p55"; did you mean "p5"?'),
        (["judge", "nosuch"], f'no card has the id "nosuch"; {nearest("nosuch", phases.cards())}'),
        (["judge"], "lab judge: needs card ids or --all"),
        (["judge", "p5", "--all"], "lab judge: needs card ids or --all"),
        (["judge", "p4", "--evidence", "measured", "--device", "gb10"], "profiles/gb10/p4: no measured rows"),
        (["write", "p55"], 'did you mean "p5"?'),
        (["check", "gnd"], 'kernels: no family is named "gnd"; did you mean "gdn"?'),
        (["check", "gdn", "--candidate", "nosuch"], 'no candidate is named "nosuch"'),
        (["check", "gdn", "--workload", "nosuch"], 'no workload has the id "nosuch"'),
        (["roofline"], "lab roofline: needs a family or --recorded"),
        (["roofline", "gdn", "--device", "h20"], '"h20"; did you mean "h200"?'),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(arguments: list[str], said: str, capsys: Capture) -> None:
    assert said in refused(capsys, *arguments)


@pytest.mark.parametrize("arguments", [[], ["nosuch"], ["judge", "--evidence", "guessed"], ["check", "--seed", "one"]])
def test_usage_error(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main.main(arguments)
    assert stopped.value.code == 2
    assert "usage: lab" in capsys.readouterr().err


def test_malformed_card_ends_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    (tmp_path / "p5.toml").write_text("id = ")
    monkeypatch.setattr(phases, "FOLDER", tmp_path)
    for command in (["judge", "--all"], ["phases"], ["write", "p5"]):
        assert re.search(r"p5\.toml: not valid TOML .*; mend that line$", refused(capsys, *command))


# check ----------------------------------------------------------------------------------------------------------------


def fake_checks(monkeypatch: pytest.MonkeyPatch, *statuses: Any) -> list[tuple[Any, ...]]:
    """One check for each status, `incorrect` with the NaN error of an unwritten output; returns the calls."""
    limits = {"relative_limit": 1e-2, "max_error": 0.0, "max_limit": 1e-1}
    errors = {
        "ok": (accuracy.Error("y", 1e-3, **limits),),
        "incorrect": (accuracy.Error("x", 1e-3, **limits), accuracy.Error("y", math.nan, **limits)),
    }
    made = [accuracy.Check("toy", f"c_{s}", "m63", "f32", s, f"m {s}", errors.get(s, ())) for s in statuses]
    calls: list[tuple[Any, ...]] = []

    def check_family(*arguments: Any) -> Iterator[accuracy.Check]:
        calls.append(arguments)
        yield from made

    monkeypatch.setattr(families, "interpret_on_cpu", lambda: None)
    monkeypatch.setattr(accuracy, "check_family", check_family)
    return calls


@pytest.mark.parametrize(
    ("statuses", "code"),
    [(("ok", "skipped"), 0), (("ok", "incorrect"), 1), (("error",), 1), (("skipped",), 0), ((), 1)],
)
def test_check_exit_code(
    statuses: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    fake_checks(monkeypatch, *statuses)
    assert main.main(["check", "toy"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "nothing" not in line] == list(statuses)
    assert ("nothing was checked" in lines) == (set(statuses) <= {"skipped"})


def test_check_json_is_strict_though_an_error_is_nan(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    fake_checks(monkeypatch, "ok", "incorrect")
    assert main.main(["check", "toy", "--json"]) == 1
    good, bad = strict(capsys.readouterr().out)
    assert (good["status"], good["relative_error"]) == ("ok", 1e-3)
    assert (bad["status"], bad["relative_error"], bad["errors"][1]["relative_error"]) == ("incorrect", None, None)


def test_check_passes_on_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_checks(monkeypatch, "ok")
    asked = ["--candidate", "c", "--workload", "m63", "--seed", "7", "--device", "cpu"]
    assert main.main(["check", "toy", "other", *asked]) == 0
    assert calls == [("toy", "c", "m63", 7, "cpu"), ("other", "c", "m63", 7, "cpu")]
    assert main.main(["check", "--device", "cpu"]) == 0
    assert [name for name, *_ in calls[2:]] == families.names()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("arguments", [["measure", "p5"], ["measure", "nosuch"], ["check", "gdn", "--device", "cuda"]])
def test_without_a_gpu(arguments: list[str], capsys: Capture) -> None:
    assert "no CUDA GPU is usable here; " in refused(capsys, *arguments)


# The others -----------------------------------------------------------------------------------------------------------


def test_phases(capsys: Capture) -> None:
    assert main.main(["phases"]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf" {card.row} +{card.id} +{re.escape(card.title)}", text) for card in phases.cards().values())
    assert main.main(["phases", "--json"]) == 0
    listed = strict(capsys.readouterr().out)
    assert [c["id"] for c in listed] == list(phases.cards())
    assert {"id", "row", "system", "question", "family", "gate_hash", "recorded", "measured"} <= set(listed[0])


def test_write(tmp_path: Path, capsys: Capture) -> None:
    assert main.main(["write", "p5"]) == 0
    text = capsys.readouterr().out
    for figure_id in phases.card("p5").recorded[0].figures:
        assert f"| {figure_id} |" in text
    assert main.main(["write", "p5", "--out", str(tmp_path / "p5.md")]) == 0
    assert (tmp_path / "p5.md").read_text(encoding="utf-8") == text
    line = refused(capsys, "write", "p5", "--out", str(tmp_path))
    assert line == f"lab: {tmp_path}: cannot be written (Is a directory); choose another --out"


@pytest.mark.parametrize("arguments", [["roofline", "gdn"], ["roofline", "--recorded"]], ids=" ".join)
def test_roofline(arguments: list[str], capsys: Capture) -> None:
    assert main.main(arguments) == 0
    assert len(capsys.readouterr().out.splitlines()) > 3
    assert main.main([*arguments, "--json"]) == 0
    assert strict(capsys.readouterr().out)


def test_a_card_without_rows_is_blocked_and_says_what_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    measured = ["--evidence", "measured"]
    for more in ([], measured, [*measured, "--device", "h200"], ["--device", "h200"]):  # no figure of it is recorded
        assert main.main(["judge", "gdn-prefill-limit", *more]) == 0
        said = capsys.readouterr().out
        assert "gdn-prefill-limit on measured evidence, h200: BLOCKED." in said
        assert "Not measured yet" in said
    assert main.main(["judge", "p1", "--evidence", "measured"]) == 0  # a replay: nothing here measures it
    assert capsys.readouterr().out == "no measured evidence for these cards\n"


OWN = own_card.text("q8", "torch_bf16", "triton_gemm", "M=8 N=64 K=64")


@pytest.mark.slow
def test_a_card_of_ones_own(tmp_path: Path, capsys: Capture) -> None:
    ours, theirs = candidates_of("q8")
    text = OWN.replace("torch_bf16", theirs).replace("triton_gemm", ours)
    path = tmp_path / "mine.toml"
    path.write_text(text)
    for arguments in (["mine", "--cards", str(tmp_path)], ["--all", "--cards", str(tmp_path)], [str(path)]):
        assert main.main(["judge", *arguments, "--json"]) == 0
        (judged,) = strict(capsys.readouterr().out)
        assert (judged["phase"], judged["verdict"], judged["device"]) == ("mine", "BLOCKED", "any device")
        assert [w for w in ("lab measure", ours, theirs, "M=8 N=64 K=64") if w not in judged["note"]] == []
    assert main.main(["judge", str(path), "--device", "h20x"]) == 2
    assert 'no device has the id "h20x"; did you mean "h200"?' in capsys.readouterr().err
    path.write_text(text.replace('"kernel_us"', '"prefill_tps"'))
    assert main.main(["judge", str(path)]) == 0
    never = capsys.readouterr().out
    assert "no row of a kernel has prefill_tps; ask for kernel_us, " in never
    assert "lab measure" not in never
    path.write_text(text)
    assert main.main(["phases", "--cards", str(tmp_path), "--json"]) == 0
    assert [card["id"] for card in strict(capsys.readouterr().out)] == ["mine"]
    assert main.main(["write", str(path)]) == 0
    assert "BLOCKED" in capsys.readouterr().out
    for old, new, words in (
        ('"q8"', '"q9"', ('"q9"', '"q8"')),
        (f'"{ours}"', f'"{ours}z"', (f'"{ours}z"', f'"{ours}"')),
        ("K=64", "k=64", ('"k"', "K")),
    ):
        path.write_text(text.replace(old, new))
        line = refused(capsys, "judge", str(path))
        assert [word for word in ("mine.toml", *words) if word not in line] == [], line
    assert "nowhere" in refused(capsys, "judge", "--all", "--cards", str(tmp_path / "nowhere"))


def candidates_of(family: str) -> tuple[str, str]:
    """One of ours, and one of torch's."""
    found = families.load(family)
    return next(n for n in found.candidates if n not in found.peers), next(n for n in found.peers)


def test_judge_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    assert main.main(["judge", "--all", "--evidence", "measured"]) == 0
    assert capsys.readouterr().out == "no measured evidence for these cards\n"
    assert main.main(["judge", "--all", "--evidence", "measured", "--json"]) == 0
    assert strict(capsys.readouterr().out) == []


def test_a_row_that_the_present_code_would_not_launch_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    path = store.measured("h200", "kv-bf16-limit")[-1]
    run, text = path.parent, files.read_packed(path).decode()
    folder = tmp_path / "h200" / "kv-bf16-limit" / run.name
    folder.mkdir(parents=True)
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    for old, expected in (("", False), ("blocks=132", True)):
        (folder / "rows.jsonl").write_text(text.replace(old, "blocks=1") if old else text)
        assert main.main(["judge", "kv-bf16-limit", "--evidence", "measured"]) == 0
        assert ("cuda_bf16 is a former kernel at " in capsys.readouterr().out) == expected


def test_a_card_that_a_notebook_judges_names_it(capsys: Capture) -> None:
    assert main.main(["judge", "p6-step"]) == 0
    assert capsys.readouterr().out == "p6-step: its figures are formed and judged in notebooks/kv_ceiling.ipynb\n"
    assert main.main(["phases"]) == 0
    assert "not measured yet" not in next(x for x in capsys.readouterr().out.splitlines() if " p6-step " in x)


def test_truncated_rows_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    (tmp_path / "h200" / "p5" / "r1").mkdir(parents=True)
    (tmp_path / "h200" / "p5" / "r1" / "rows.jsonl").write_text('{"schema": 1, "dev')
    assert "rows.jsonl line 1: not JSON" in refused(capsys, "judge", "p5", "--evidence", "measured")
    assert "rows.jsonl line 1: not JSON" in refused(capsys, "write", "p5")


# As a process ---------------------------------------------------------------------------------------------------------


def test_module_starts_quickly_and_without_torch() -> None:
    code = "import sys; from lab.cli.main import main; code = main(['judge', '--all']); "
    code += "sys.exit(code or bool({'torch', 'triton'} & set(sys.modules)))"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert time.perf_counter() - start < 5
    assert (done.returncode, done.stderr) == (0, "")
    assert "! our word is another than what we read the source as" in done.stdout


def test_import_is_light() -> None:
    """The bound is generous (bench_harness.py has the figure); what must not be imported is exact."""
    code = "import time; t = time.perf_counter(); import lab, lab.cli; print(time.perf_counter() - t); "
    code += "import sys; print(*{name.split('.')[0] for name in sys.modules})"
    runs = [
        subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    assert min(float(done.stdout.splitlines()[0]) for done in runs) < 0.4
    loaded = set(runs[0].stdout.splitlines()[1].split())
    assert loaded & {"torch", "triton", "pandas", "matplotlib", "numpy", "cupy", "rich"} == set()
    assert "lab" in loaded


def test_version_and_exit_code_of_a_process() -> None:
    assert process("--version").stdout == f"{__version__}\n"
    done = process("judge", "p55")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@over({"short": ("", "judge", "p5"), "long": ("", "judge", "--all", "--json"), "unbuffered": ("1", "judge", "p5")})
def test_closed_pipe(unbuffered: str, *arguments: str) -> None:
    """The reader is gone before the first byte: shorter and longer than what Python buffers, and unbuffered."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as stdout:
        command = [sys.executable, "-m", "lab", *arguments]
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, stdout=stdout, stderr=subprocess.PIPE, timeout=60
        )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("command", "said"),
    [("phases", ""), ("measure", "; what was measured is kept, --missing takes the rest")],
)
def test_an_interrupt_is_one_line(command: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    module, _, name = main.COMMANDS[command].run.partition(":")
    monkeypatch.setattr(importlib.import_module(module), name, interrupted)
    assert main.main([command, *["q8-paths"] * (command == "measure")]) == 130
    assert capsys.readouterr() == ("", f"lab: interrupted{said}\n")
