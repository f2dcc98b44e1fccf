"""JupyterLab as a user meets it: an instrument is run, a control is moved, the figure changes, and nothing is dirty.

It serves a copy of notebooks/ the way `make lab` does, so a saved file can be held against the committed one byte by
byte and no checkout is touched.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.base.errors import REPOSITORY

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SECONDS = 120
PICTURE = ".widget-html img[src^='data:image/svg']"
# notebook -> (its control's description, what is typed into it)
MOVED = {
    "profile": ("window", "*/candidate/*"),
    "kernel": ("values", "16,32,128"),
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """(address, folder) of a JupyterLab over a copy of notebooks/."""
    home = tmp_path_factory.mktemp("jupyter")
    folder = home / "notebooks"
    shutil.copytree(REPOSITORY / "notebooks", folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    port = free_port()
    config = os.pathsep.join([str(REPOSITORY / "notebooks" / ".jupyter"), os.environ.get("JUPYTER_CONFIG_PATH", "")])
    places = {"JUPYTER_CONFIG_PATH": config, "PYTHONPATH": str(REPOSITORY), "HOME": str(home)}
    command = [sys.executable, "-m", "jupyterlab", str(folder), "--no-browser", "--allow-root", f"--port={port}",
               "--IdentityProvider.token=", "--LabApp.expose_app_in_browser=True", "--ServerApp.port_retries=0",
               "--LabApp.news_url=None"]  # fmt: skip
    log = home / "log"
    with log.open("w") as said:
        server = subprocess.Popen(command, env={**os.environ, **places}, stdout=said, stderr=said, cwd=folder)
        address = f"http://127.0.0.1:{port}"
        for _ in range(SECONDS):
            try:
                urllib.request.urlopen(f"{address}/api", timeout=2).read()
                break
            except OSError:
                time.sleep(1)
            assert server.poll() is None, log.read_text()[-2000:]
        yield address, folder
        server.terminate()
        server.wait(30)


@pytest.fixture
def opened(chromium: Any, served: tuple[str, Path]) -> Iterator[Any]:
    """A function that opens a notebook, runs all its cells and waits for its figures."""
    context = chromium.new_context(viewport={"width": 1440, "height": 1600})
    page = context.new_page()
    page.set_default_timeout(1000 * SECONDS)

    def go(name: str) -> Any:
        page.goto(f"{served[0]}/lab/workspaces/{name}/tree/{name}.ipynb?reset")
        page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        page.wait_for_function("window.jupyterapp && window.jupyterapp.shell.currentWidget?.sessionContext?.isReady")
        page.evaluate("window.jupyterapp.commands.execute('runmenu:run-all')")
        page.wait_for_selector(PICTURE)
        page.wait_for_function(
            "(() => { const all = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')];"
            "return all.length && all.every(p => /\\[\\d+\\]/.test(p.textContent)) })()"
        )
        return page

    yield go
    context.close()


def saved_as_committed(page: Any, folder: Path, name: str) -> None:
    """Save, and hold both files against the checkout's."""
    until = time.monotonic() + SECONDS
    dirty = True
    while dirty and time.monotonic() < until:  # a kernel that answers late writes its language into the notebook
        page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
        time.sleep(1)  # the pair's second file
        dirty = page.evaluate("window.jupyterapp.shell.currentWidget.context.model.dirty")
    assert not dirty, f"{name} is not saved"
    for suffix in (".ipynb", ".py"):
        mine, theirs = ((place / f"{name}{suffix}").read_text() for place in (folder, REPOSITORY / "notebooks"))
        assert mine == theirs, f"{name}{suffix} differs after running and saving it"


def test_phase_answers_its_slider(opened: Any, served: tuple[str, Path]) -> None:
    page = opened("phase")
    drawn = "s => [...document.querySelectorAll(s)].map(x => x.src).join()"
    before, word = page.evaluate(drawn, PICTURE), page.locator(".widget-html p > b").nth(1).inner_text()
    handle = page.locator(".widget-slider .noUi-handle").first
    handle.focus()
    handle.press("Home")  # the line at its least, beyond the figure
    page.wait_for_function(f"([s, old]) => ({drawn})(s) !== old", arg=[PICTURE, before])
    page.get_by_text("With the card's own line").wait_for()
    assert page.locator(".widget-html p > b").nth(1).inner_text() != word
    saved_as_committed(page, served[1], "phase")


@pytest.mark.parametrize("name", MOVED)
def test_what_is_typed_changes_the_figure(name: str, opened: Any, served: tuple[str, Path]) -> None:
    page = opened(name)
    before = page.locator(PICTURE).first.get_attribute("src")
    label, words = MOVED[name]
    field = page.locator(f".jupyter-widgets:has(> label:text-is('{label}')) input").first
    field.fill(words)
    field.press("Enter")
    page.wait_for_function("([s, old]) => document.querySelector(s)?.src !== old", arg=[PICTURE, before])
    saved_as_committed(page, served[1], name)


def test_figures_show_without_trust(chromium: Any, served: tuple[str, Path]) -> None:
    """A committed notebook that nobody ran and nobody trusts shows its pictures, as PNG."""
    page = chromium.new_context(viewport={"width": 1200, "height": 1600}).new_page()
    page.goto(f"{served[0]}/lab/workspaces/untrusted/tree/staircase.ipynb?reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=1000 * SECONDS)
    page.wait_for_selector(".jp-RenderedImage img[src^='data:image/png']", timeout=1000 * SECONDS)
    page.context.close()


def test_saving_without_an_edit_changes_nothing(chromium: Any, served: tuple[str, Path]) -> None:
    page = chromium.new_context().new_page()
    page.goto(f"{served[0]}/lab/workspaces/plain/tree/measuring.ipynb?reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=1000 * SECONDS)
    page.wait_for_function("window.jupyterapp.shell.currentWidget?.context?.isReady", timeout=1000 * SECONDS)
    page.wait_for_function("window.jupyterapp.shell.currentWidget?.sessionContext?.isReady", timeout=1000 * SECONDS)
    saved_as_committed(page, served[1], "measuring")
    page.context.close()
