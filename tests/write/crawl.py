"""Reads the pages of a site: their tags, links, anchors, pictures and what they would load from elsewhere."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}


class Page(HTMLParser):
    """One page. links: of its anchors; loads: of what a browser fetches by itself; silent: pictures without words."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.tags: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.silent: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        held = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        if "id" in held:
            self.ids.append(held["id"])
        if tag == "a" and "href" in held:
            self.links.append(held["href"])
        if LOADS.get(tag) in held:
            self.loads.append(held[LOADS[tag]])
        self.loads += re.findall(r"url\(([^)]+)\)", held.get("style", ""))
        if (tag == "img" and not held.get("alt", "").strip()) or (
            tag == "svg" and not (held.get("role") == "img" and held.get("aria-label", "").strip())
        ):
            self.silent.append(str(held)[:80])

    def handle_data(self, data: str) -> None:
        self.text += data


def read(site: Path) -> dict[Path, Page]:
    """Every page of a site by its path."""
    return {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}


def check_links(site: Path, pages: dict[Path, Page]) -> list[str]:
    """Links to a page, file or anchor that is not there, and pages that no other page links to; the board is home."""
    wrong, reached = [], {(site / "index.html").resolve()}
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            file, _, anchor = link.partition("#")
            target = (path.parent / unquote(file)).resolve() if file else path
            if not target.exists():
                wrong.append(f"{path.relative_to(site.resolve())}: {link} is not there")
            elif anchor and "=" not in anchor and target in pages and unquote(anchor) not in pages[target].ids:
                wrong.append(f"{path.relative_to(site.resolve())}: {link} has no such anchor")
            if target != path:
                reached.add(target)
    return wrong + [f"{path.relative_to(site.resolve())}: nothing links to it" for path in pages.keys() - reached]
