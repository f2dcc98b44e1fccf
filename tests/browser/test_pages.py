"""The site as a reader meets it: wide and narrow, dark and light, by keyboard, and without JavaScript."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PAGES = (
    "index.html",
    "cards/p5-35b.html",
    "cards/w4a16-prefill-limit.html",
    "cards/p1.html",
    "cards/p6-room.html",
    "families/nvfp4.html",
    "devices/h200.html",
    "devices/gb10.html",
    "audit.html",
    "docs/commands.html",
    "notebooks/kv.html",
    "source/kernels/gdn/NOTES.md.html",
    "source/kernels/nvfp4/wgmma_gemm.cu.html",
)
WIDTHS = (360, 768, 1440, 2560)
# Pairs of texts that cover each other, at most ten; what is scrolled out of its own region is not seen.
OVERLAPS = """() => {
  const boxes = [], range = document.createRange();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const clipped = (node) => {
    for (let e = node; e; e = e.parentElement)
      if (getComputedStyle(e).overflowX !== "visible") return e.getBoundingClientRect();
    return null;
  };
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (!node.data.trim() || node.parentElement.closest("svg title")) continue;
    if (node.parentElement.closest("details:not([open])") && !node.parentElement.closest("summary")) continue;
    range.selectNodeContents(node);
    const clip = clipped(node.parentElement);
    for (const r of range.getClientRects()) {
      const right = clip ? Math.min(r.right, clip.right) : r.right;
      const words = node.data.trim().slice(0, 40);
      if (right > 0 && right - r.left > 1 && r.height > 1) boxes.push([r.left, r.top, right, r.bottom, words]);
    }
  }
  boxes.sort((a, b) => a[1] - b[1]);
  const found = [];
  for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length && boxes[j][1] < boxes[i][3] - 4; j++) {
    const wide = Math.min(boxes[i][2], boxes[j][2]) - Math.max(boxes[i][0], boxes[j][0]);
    const high = Math.min(boxes[i][3], boxes[j][3]) - boxes[j][1];
    if (wide > 3 && high > 4) found.push(boxes[i][4] + " | " + boxes[j][4]);
  }
  return found.slice(0, 10);
}"""


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """A page that fails its test on an error of a script, and on any request beyond this machine's files."""
    wrong: list[str] = []
    context = chromium.new_context(viewport={"width": 1440, "height": 1000})
    made = context.new_page()
    made.on("pageerror", lambda error: wrong.append(f"script: {error}"))
    made.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else wrong.append(f"asked {r.url}"))
    yield made
    context.close()
    assert wrong == []


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wider_than_the_window_and_no_text_covers_another(name: str, page: Any, built: Path) -> None:
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 1000})
        page.goto((built / name).as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} at {width} px"
        assert page.evaluate(OVERLAPS) == [], f"{name} at {width} px"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_serious_fault(name: str, scheme: str, page: Any, built: Path) -> None:
    from axe_playwright_python.sync_playwright import Axe

    for width in (360, 1440):
        page.set_viewport_size({"width": width, "height": 1000})
        page.emulate_media(color_scheme=scheme)
        page.goto((built / name).as_uri())
        found = Axe().run(page).response["violations"]
        grave = [(v["id"], v["nodes"][0]["html"][:160]) for v in found if v["impact"] in ("serious", "critical")]
        assert grave == [], f"{name}, {scheme}, {width} px"


def shown(page: Any) -> list[str]:
    """The cards of the lines that are seen, in their order."""
    seen = "all.filter(e => !e.hidden && !e.closest('section').hidden)"
    read = f"all => {seen}.map(e => e.querySelector('code').textContent)"
    found = page.eval_on_selector_all("ul.board > li", read)
    assert isinstance(found, list)
    return found


def test_board_filters_by_keyboard_and_keeps_it_in_the_address(page: Any, built: Path) -> None:
    board = (built / "index.html").as_uri()
    page.goto(board)
    every = shown(page)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    while page.evaluate("document.activeElement.name") != "q":
        page.keyboard.press("Tab")
    page.keyboard.type("gdn fla")
    few = shown(page)
    assert 0 < len(few) < len(every)
    assert page.evaluate("location.hash") == "#q=gdn+fla"
    assert page.inner_text("#told") == f"{len(few)} of {len(every)} lines"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.name") == "verdict"
    page.keyboard.type("NO")
    words = page.eval_on_selector_all(
        "ul.board > li:not([hidden]) .chip", "all => [...new Set(all.map(e => e.textContent))]"
    )
    assert words == ["NO-GO"]
    page.goto("about:blank")
    page.goto(f"{board}#family=kv&device=h200&sort=closest")
    kept = shown(page)
    assert kept
    assert page.eval_on_selector("select[name=family]", "e => e.value") == "kv"
    margins = page.eval_on_selector_all(
        "#measured ~ ul > li:not([hidden])", "all => all.map(e => +(e.dataset.margin || 1e9))"
    )
    assert margins == sorted(margins)
    page.click("button[type=reset]")
    assert shown(page) == every
    assert page.evaluate("location.hash") == ""


def test_counts_filter_and_say_so(page: Any, built: Path) -> None:
    page.goto((built / "index.html").as_uri())
    button = page.locator(".counts button[data-value=NO-GO]")
    count = int(button.locator("b").inner_text())
    button.focus()
    page.keyboard.press("Enter")
    assert len(shown(page)) == count
    assert button.get_attribute("aria-pressed") == "true"
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"


def test_no_script_of_data_runs(chromium: Any, built: Path, tmp_path: Path) -> None:
    """Markup that got past the escaping, from a file: the page's policy stops it, and the board goes on working."""
    attacks = (
        "<script>window.hit = 1</script><img src=x onerror='window.hit = 2'><svg onload='window.hit = 3'></svg>"
        "<iframe srcdoc='<script>parent.hit = 4</script>'></iframe><a id='evil' href='javascript:window.hit = 5'>a</a>"
        "<script src='evil.js'></script><base href='https://example.com/'>"
    )
    (tmp_path / "evil.js").write_text("window.hit = 6")
    text = (built / "index.html").read_text(encoding="utf-8")
    page = tmp_path / "index.html"
    for policy, hit in ((text, False), (text.replace("Content-Security-Policy", "x-none"), True)):
        page.write_text(policy.replace("</main>", f"{attacks}</main>"), encoding="utf-8")
        context = chromium.new_context()
        made = context.new_page()
        made.goto(page.as_uri())
        made.evaluate("document.getElementById('evil').click()")
        made.wait_for_timeout(200)
        assert (made.evaluate("window.hit") is not None) == hit
        assert made.locator("form.filter").is_visible()
        context.close()


def test_board_reads_without_javascript(chromium: Any, built: Path) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((built / "index.html").as_uri())
    assert page.locator("form.filter").is_hidden()
    assert page.locator("ul.board > li").first.is_visible()
    assert page.locator("ul.board > li .strip").count() > 150
    context.close()


def test_works_under_a_sub_path(page: Any, built: Path, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "site").symlink_to(built)
    page.goto((tmp_path / "deep" / "site" / "index.html").as_uri())
    page.click("ul.board > li .q a")
    assert "/deep/site/cards/" in page.url
    assert page.locator("img.plot").first.evaluate("e => e.naturalWidth") > 0
    page.click("header .home")
    assert page.url.endswith("/deep/site/index.html")
