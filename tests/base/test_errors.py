"""What a message may hold: nothing that drives a terminal, no place of somebody's machine, and an end."""

import io
import sys
from pathlib import Path

import pytest

from lab.base import console, files, progress
from lab.base.errors import LONGEST, REPOSITORY, BadInput, anonymous, nearest, plain, reason
from lab.card import phases
from lab.cli import main
from lab.study import own
from tests.refused import held, refused

DRIVES = "a\x1b[31m\x9b\x07\r\x7f\u202e\u2028\ud800"
SHOWN = r"a\x1b[31m\x9b\x07\r\x7f\u202e\u2028\ud800"


def test_control_characters_show_as_their_escapes() -> None:
    assert plain(DRIVES) == SHOWN
    assert plain("\u00b5s \u2192 \u4e2d\n\t") == "\u00b5s \u2192 \u4e2d\n\t"
    assert "\x1b" not in str(BadInput(f"{DRIVES}", DRIVES, DRIVES))
    assert len(str(BadInput("a", "b" * 10**6, "mend it"))) < LONGEST + 50


def test_the_nearest_word_is_named_or_else_what_there_is() -> None:
    assert nearest("metrc", ["metric", "meter", "unit"]) == 'did you mean "metric"?'
    assert nearest("x", ["unit", "metric"]) == "valid: metric, unit"
    assert nearest("x", map(str, range(20))).endswith(", ...")


def test_commands_print_text_only(capsys: pytest.CaptureFixture[str]) -> None:
    with console.only_text():
        print(DRIVES)
        print(DRIVES, file=sys.stderr)
    print(plain("after"))
    assert capsys.readouterr() == (f"{SHOWN}\nafter\n", f"{SHOWN}\n")


def test_a_bar_draws_and_its_words_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with console.only_text(), progress.shown(1) as bar:
        bar.tell("step \x1b]0;title\x07 [bold]")
        bar.result("row \x1b]0;title\x07 [bold]")
        bar.advance()
    said = screen.getvalue()
    assert "\x1b[" in said, "the bar itself is drawn"
    assert "\x1b]0;" not in said
    assert r"row \x1b]0;title\x07 [bold]" in said


def test_an_exception_as_a_row_may_keep_it() -> None:
    home = "/home" + "/ada"
    error = ValueError(f"no {home}/.cache/k.so in {REPOSITORY}/lab/x.py or {home}\nat {home}/secret")
    assert reason(error) == "ValueError: no (path)/k.so in lab/x.py or (path)"
    assert reason(KeyError()) == "KeyError"
    assert anonymous("1/2 of https://a.b/c/d at 3 us/launch") == "1/2 of https://a.b/c/d at 3 us/launch"


DEEP = {
    "arrays": "x = " + "[" * 5000,
    "tables": "x = " + "{a=" * 5000,
    "digits": "x = " + "9" * 5000,
    "a control character": '"\\u001b[31m" = 1',
    "a key of two lines": '"a\\n\\u001b[31mb" = 1',
}


@pytest.mark.parametrize("name", DEEP)
def test_a_card_that_was_made_to_hurt(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "card.toml"
    path.write_text(f"{DEEP[name]}\n")
    assert main.main(["write", str(path)]) == 2
    held(capsys.readouterr().err, "card.toml", *([r"\x1b[31m"] if "\\u" in DEEP[name] else []))


@pytest.mark.parametrize("name", ["..", "a/b", "", "-", ".a", "a\nb"])
def test_an_id_is_no_way_elsewhere(name: str, tmp_path: Path) -> None:
    text = next(phases.FOLDER.rglob("p1.toml")).read_text()
    path = tmp_path / ("p1.toml" if "/" in name or not name else f"{name}.toml")
    path.write_text(text.replace('id = "p1"', f'id = "{name}"'.replace("\n", "\\n"), 1))
    with refused("toml", "id = "):
        phases.load(path)


def test_a_file_too_large_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.toml"
    path.write_bytes(b"#" * (files.LARGEST + 1))
    with refused("large.toml", f"{files.LARGEST} bytes"):
        files.read_toml(path)
    monkeypatch.setattr(own, "LARGEST", 1000)
    with refused("large.toml", "1000 bytes"):
        own.read(path)
    with pytest.raises(BadInput, match="1000 bytes"):
        files.read_bytes(Path("/dev/zero"), 1000)


@pytest.mark.parametrize("text", ['{"a":' * 100_000, '{"n_gen": ' + "9" * 5000 + "}", '{"a": ' + "[" * 100_000])
def test_rows_of_another_tool_that_were_made_to_hurt(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{text}\n")
    with pytest.raises(BadInput, match=r"a\.jsonl"):
        own.read(path)
