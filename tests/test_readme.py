"""The pages that a newcomer reads first: their examples run, their links lead somewhere, their commands exist."""

import doctest
import re
from pathlib import Path

import pytest

from lab.check import families
from lab.cli.main import COMMANDS
from lab.write import readme

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "lab" / "write" / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "lab" / "README.md", *DOCS]
TARGETS = re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
MOST_WORDS = 1_400


def dead_links(page: Path) -> list[str]:
    """Relative links and pictures of a page that lead to no file."""
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return [link for link in links if "://" not in link and not (page.parent / link).exists()
            and not (ROOT / link).exists()]  # fmt: skip


def unknown_commands(text: str) -> list[str]:
    """`make X` and `lab X` of code spans and blocks that no target and no command has."""
    code = "\n".join(re.findall(r"```sh\n(.*?)```|`([^`\n]+)`", text, re.DOTALL) and
                     [a or b for a, b in re.findall(r"```sh\n(.*?)```|`([^`\n]+)`", text, re.DOTALL)])  # fmt: skip
    lines = [line.split("#")[0].strip() for line in code.splitlines()]
    made = [word for line in lines for word in re.findall(r"^make ([a-z]+)", line) if word not in TARGETS]
    asked = [
        word for line in lines for word in re.findall(r"^(?:python -m )?lab ([a-z]+)", line) if word not in COMMANDS
    ]
    return made + asked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_commands(page: Path) -> None:
    assert dead_links(page) == []
    assert unknown_commands(page.read_text(encoding="utf-8")) == []


def test_a_dead_link_and_a_wrong_command_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "[a](nowhere.md) [b](https://example.com) `lab jugde` and `make quick`\n```sh\nmake qick  # x\n```\n"
    )
    assert dead_links(page) == ["nowhere.md"]
    assert unknown_commands(page.read_text()) == ["qick", "jugde"]


def test_the_readme_is_short_and_its_example_runs() -> None:
    page = ROOT / "README.md"
    assert len(page.read_text(encoding="utf-8").split()) <= MOST_WORDS
    families.interpret_on_cpu()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    done = doctest.testfile(str(page), module_relative=False, optionflags=flags, encoding="utf-8")
    assert done.attempted >= 5
    assert done.failed == 0


def test_the_figure_is_what_the_rows_say() -> None:
    """`lab write --readme` draws it again after a measurement; places of ink differ between releases of matplotlib."""
    families.interpret_on_cpu()
    assert f"({readme.FIGURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text(encoding="utf-8")
    now, then = (re.findall(r"<desc>.*?</desc>|<text[^>]*>.*?</text>", text, re.DOTALL)
                 for text in (readme.figure(), readme.FIGURE.read_text(encoding="utf-8")))  # fmt: skip
    assert [re.sub("<[^>]*>", "", text) for text in now] == [re.sub("<[^>]*>", "", text) for text in then]
    assert now[0].count("profiles/h200/") > 40
