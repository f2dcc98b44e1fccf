"""`lab gate` and `lab baseline`: exit status by verdict, a comment for reviewers, the rows kept; action.yml."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lab.base.errors import REPOSITORY
from lab.cli import main
from lab.judge.rules import Seen
from lab.study.own import gate
from tests.loops import over
from tests.refused import held
from tests.study.interop_samples import CARD, LLAMA, SAMPLES, Capture, condition, files, old_new
from tests.study.interop_samples import card as made
from tests.study.own_files import jsonl, row

CONTROL, CANDIDATE = (str(SAMPLES / f"llama_bench_{arm}.jsonl") for arm in ("control", "candidate"))
ROWS = ["--rows", f"control={CONTROL}", "--rows", f"candidate={CANDIDATE}"]
TURNED = ["--rows", f"control={CANDIDATE}", "--rows", f"candidate={CONTROL}"]
ACTION = REPOSITORY / "action.yml"


def test_exit_status_and_comment(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "new" / "out.md"
    assert main.main(["gate", str(CARD), *ROWS, "--comment", str(out)]) == 0
    text = out.read_text()
    assert capsys.readouterr().out == text
    lines = text.splitlines()
    assert len(lines) <= 25
    assert lines[0].startswith("### GO: ")
    (decode,) = [line for line in lines if line.startswith("| decode_tps")]
    cells = [cell.strip() for cell in decode.strip("|").split("|")]
    assert cells[1:] == ["10.541 %", "10.15 to 10.94", "2 %", "2 %", "holds"]
    for said in ("A/A: not run", "Ceiling: expected was 10 %", "differ in: build", "Mind: ", "card `", "gate `"):
        assert said in text
    assert f"llama\\_bench\\_control.jsonl {gate._sha(Path(CONTROL).read_bytes())[:12]}".replace("\\_", "_") in text
    assert main.main(["gate", str(CARD), *TURNED]) == 1
    assert main.main(["gate", str(CARD), *TURNED, "--pass", "GO,NO-GO"]) == 0


def test_control_with_itself_and_one_run_each(tmp_path: Path, capsys: Capture) -> None:
    """Two files of the control are an A/A; single runs could not have seen anything, and the comment says so."""
    question = made(tmp_path, ["w"], condition("kernel_us", "<", -5, "w"))
    rows = []
    for name, us in (("control", 100.0), ("control", 103.0), ("candidate", 80.0)):
        path = tmp_path / f"{us}.jsonl"
        path.write_text(jsonl(row("kernel_us", us, "us", workload="w")))
        rows += ["--rows", f"{name}={path}"]
    assert main.main(["gate", str(question), *rows]) == 0
    text = capsys.readouterr().out
    assert "differ by at most 3 %" in text
    assert "| 6.3 % | unknown, one run | holds |" in text  # 3 sigma of 100 and 103


def test_a_comment_holds_no_markup_of_a_file(tmp_path: Path, capsys: Capture) -> None:
    evil = old_new("Example GPU 24GB", "<b>@everyone</b> | [x](y) `z`\\u202e")
    assert main.main(["gate", str(CARD), *files(tmp_path, LLAMA, evil, evil)]) == 0
    text = capsys.readouterr().out
    assert "@everyone" not in text
    assert "<b>" not in text
    assert "\u202e" not in text
    assert "\\[x\\](y) \\`z\\`" in text


def test_measured_rows(capsys: Capture) -> None:
    code = main.main(["gate", "p5-cuda", "--device", "h200"])
    text = capsys.readouterr().out
    assert code == (0 if text.startswith(("### GO", "### CONDITIONAL-GO")) else 1)
    for said in ("its second self differ by at most", "of its roofline", "Rows (sha256): 2026-11-27T"):
        assert said in text
    assert len(text.splitlines()) <= 25


def test_smallest_effect() -> None:
    """The interval's reach and, beyond it, what nine in ten stay within; the floor where that is larger."""
    narrow, wide = (Seen(0.0, 5.0, "%", (-reach, reach)) for reach in (0.1, 4.0))
    assert gate.smallest(narrow, 2.0) == 2.0
    assert gate.smallest(wide, 2.0) == pytest.approx(4.0 * (1.96 + 1.2816) / 1.96, rel=0.05)
    assert gate.smallest(Seen(3.0, 5.0, "ms", (2.0, 4.0)), 0.0) == pytest.approx(1.654, rel=0.01)
    placed = Seen(0.0, 5.0, "%", (-4.0, 4.0), placements=8)
    assert gate.smallest(placed, 2.0) == pytest.approx(4.0 * (2.517 + 1.415) / 2.517, rel=0.05)


REFUSED: dict[str, tuple[list[str], str]] = {
    "no candidate": (["gate", str(CARD), *ROWS[:2]], "lab judge --rows"),
    "no such word": (["gate", str(CARD), *ROWS, "--pass", "GOOD"], "--pass"),
    "nowhere to write": (["gate", str(CARD), *ROWS, "--comment", f"{CARD}/out.md"], "out.md"),
    "no workload": (["gate", str(CARD), "--rows", f"control@tg12={CONTROL}"], "--rows control@tg12"),
    "no baseline": (["gate", str(CARD), *ROWS[2:], "--baseline", "nowhere"], "baseline.json"),
    "nothing to keep": (["baseline", str(CARD), *ROWS[:2], "--dir", "nowhere"], "lab baseline"),
}


def test_refused(capsys: Capture) -> None:
    @over({name: case for name, case in REFUSED.items()})
    def each(words: list[str], where: str) -> None:
        assert main.main(words) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert where in said.err
        assert said.err.count("\n") == 1

    each()


def test_a_card_without_rows_and_device(tmp_path: Path, capsys: Capture) -> None:
    assert main.main(["new", "card", "mine", "--family", "q8", "--cards", str(tmp_path)]) == 0
    path = tmp_path / "mine.toml"
    path.write_text("".join(x for x in path.read_text().splitlines(True) if not x.startswith("device")))
    capsys.readouterr()
    assert main.main(["gate", str(path)]) == 2
    held(capsys.readouterr().err, "mine.toml", "no rows", "lab measure")


def test_baseline_keeps_what_passed(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "kept"
    keep = ["baseline", str(CARD), "--dir", str(folder), "--rows"]
    assert main.main([*keep, f"candidate={CONTROL}"]) == 0
    assert main.main(["gate", str(CARD), *ROWS[2:], "--baseline", str(folder)]) == 0
    assert main.main([*keep, f"candidate={CANDIDATE}"]) == 0
    first = json.loads((folder / "own_ab" / gate.MANIFEST).read_text())
    assert (first["verdict"], [f["file"].partition("-")[2] for f in first["files"]]) == ("GO", [Path(CANDIDATE).name])
    assert len([*(folder / "own_ab").iterdir()]) == 2
    slower = tmp_path / "slower file.jsonl"
    slower.write_text(Path(CONTROL).read_text() + "\n")
    assert main.main([*keep, f"candidate={slower}"]) == 1
    assert json.loads((folder / "own_ab" / gate.MANIFEST).read_text()) == first
    capsys.readouterr()
    (kept,) = (folder / "own_ab").glob("*.jsonl")
    kept.write_text(kept.read_text().replace("110", "99"))
    assert main.main(["gate", str(CARD), *ROWS[2:], "--baseline", str(folder)]) == 2
    held(capsys.readouterr().err, kept.name, "not the file that was kept")


def test_a_baseline_that_cannot_be_read_is_not_kept(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_text(Path(CONTROL).read_text()[:-40])
    assert main.main(["baseline", str(CARD), "--dir", str(tmp_path / "kept"), "--rows", f"candidate={path}"]) == 2
    held(capsys.readouterr().err, "cut.jsonl line 2")
    assert not (tmp_path / "kept").exists()


def test_repetitions_that_a_change_needs(capsys: Capture) -> None:
    assert main.main(["plan", str(CARD), "--rows", CONTROL]) == 0
    assert "tg128: decode_tps change > 5 % at tg128: 2 repetitions an arm" in capsys.readouterr().out
    assert main.main(["plan", str(CARD), "--rows", str(SAMPLES / "batched_bench_control.txt")]) == 2
    held(capsys.readouterr().err, "lab plan --rows", "own_ab")


def test_the_action_runs_the_gate(tmp_path: Path) -> None:
    """The step of action.yml, as a runner gives it its inputs; a value is never part of the script."""
    action = yaml.safe_load(ACTION.read_text())
    (step,) = [step for step in action["runs"]["steps"] if step.get("id") == "gate"]
    assert "${{" not in step["run"]
    inputs = {name: given.get("default", "") for name, given in action["inputs"].items()}
    inputs |= {"card": str(CARD), "rows": f"control={CONTROL}\ncandidate={CANDIDATE}\n", "options": "--pass\nGO\n"}
    given = {key: inputs[text.removeprefix("${{ inputs.").removesuffix(" }}")] for key, text in step["env"].items()}
    out, summary = tmp_path / "output", tmp_path / "summary"
    runner = {"GITHUB_ACTION_PATH": str(REPOSITORY), "GITHUB_OUTPUT": str(out), "GITHUB_STEP_SUMMARY": str(summary)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    for rows, status in ((inputs["rows"], 0), (f"control={CANDIDATE}\ncandidate={CONTROL}", 1), ("nowhere", 2)):
        env = {**os.environ, **given, **runner, "PATH": path, "ROWS": rows}
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert out.read_text().splitlines()[-1] == f"status={status}"
    assert summary.read_text().count("### ") == 2
