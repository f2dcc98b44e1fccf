"""A browser for the tests marked `browser`: Debian's Chromium, driven by Playwright; without them a test fails."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
# No sandbox: CI runs as root in a container. The others keep it from asking hosts of its own.
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
ARGUMENTS += ["--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A started browser."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("Playwright is not installed: pip install -e .[browser]", pytrace=False)
    if not Path(CHROMIUM).exists():
        what = f"no browser at {CHROMIUM}: apt-get install chromium, or CHROMIUM=/path/to/it"
        pytest.fail(what, pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of this checkout, its notebooks as they are committed."""
    import nbformat

    from lab.write import pages, site

    out = tmp_path_factory.mktemp("built")
    judgements = pages.judged()
    site.write_pages(out, judgements)
    site.write_cards(out, judgements)
    titles = {}
    for path in sorted(pages.NOTEBOOKS.glob("*.ipynb")):
        titles[path.stem] = path.stem
        site.write_notebook(out, path.stem, path.stem, nbformat.read(path, as_version=4).cells)
    site.write_index(out, pages.views(judgements), [], titles, {})
    return out
