"""The site without a browser: every page is reached, nothing is fetched from elsewhere, hostile text stays text."""

import base64
import contextlib
import hashlib
import html
import io
import re
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from msgspec import structs

from lab.base import devices
from lab.card import phases
from lab.card.gate import Condition
from lab.check import families
from lab.cli import main
from lab.draw import inline
from lab.judge import rules, verdicts
from lab.row import store
from lab.study.audit.run import audit
from lab.study.audit.subject import Finding
from lab.write import figures, instruments, notebook, pages, render, replay, site
from tests.refused import refused
from tests.row.made import measurement
from tests.write.crawl import Page, check_links, read

EVIL = '<script>alert("x")</script> & <b>bold</b> {{ 7 * 7 }}'
CHECKS = [{"family": "q8", "candidate": "c", "workload": "", "status": s, "message": EVIL} for s in ("ok", "error")]
FIGURE = "data:image/svg+xml;base64,PHN2Zy8+"
EXECUTED = ("audit", "measuring")
INSTRUMENT = f'<img alt="arms" src="{FIGURE}"><a href="data:text/html,x">y</a><img src="data:text/html,x">'


def plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ").replace("\N{MINUS SIGN}", "-")


@dataclass(frozen=True)
class Job:
    """What `lab verdicts` came to: its exit status and text, the board that it wrote, the links that lead nowhere."""

    out: Path
    code: int
    text: str
    board: str
    dead: list[str]
    executed: list[str]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The whole job, on one family and two notebooks: its site takes half a minute, so that every test here reads it.

    tests/kernels checks every candidate, tests/test_notebooks executes the rest.
    """
    out, books = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("books")
    for name in EXECUTED:
        shutil.copy(pages.NOTEBOOKS / f"{name}.ipynb", books)
    slices = replay._slices
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(pages, "NOTEBOOKS", books)
        patch.setattr(replay, "_slices", lambda name, kept: slices(name, kept) if name == "q8" else [])
        code = main.main(["verdicts", "--out", str(out)])
    executed = sorted(p.stem for p in (out / "notebooks").glob("*.html"))
    board = (out / "index.html").read_text(encoding="utf-8")
    return Job(out, code, said.getvalue(), board, check_links(out, read(out)), executed)


@pytest.fixture(scope="module")
def whole(job: Job) -> Path:
    """The site with a page for each notebook that the job did not execute, as of one that failed, and failed checks."""
    out, judgements = job.out, pages.judged()
    broken = {f"notebooks/{p.stem}.ipynb": EVIL for p in pages.NOTEBOOKS.glob("*.py") if p.stem not in EXECUTED}
    for name, message in broken.items():
        site.write_notebook(out, Path(name).stem, Path(name).stem, [], message)
    site.write_index(out, pages.views(judgements), CHECKS, dict.fromkeys(EXECUTED, "a title"), broken)
    return out


@pytest.fixture(scope="module")
def parsed(whole: Path) -> dict[Path, Page]:
    return read(whole)


@pytest.mark.slow
def test_the_whole_job(job: Job) -> None:
    assert job.code == 0
    assert "2 notebooks executed" in job.text
    assert re.search(r"Q8_0 linear; (\d+) of \1 checks ok", job.board)
    # The cards' pages were written beside, where every notebook of the repository is known.
    assert [w for w in job.dead if "notebooks/" not in w] == []
    assert job.executed == list(EXECUTED)


def test_the_board_leaves_out_what_another_device_than_the_cards_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(site, "page", lambda *_, **values: told.update(values))
    (view, *_) = pages.views(pages.judged([phases.card("p5-35b")]))
    assert (view.kind, view.device) == ("measured", "h200")

    def shown(*words: tuple[str, str]) -> list[tuple[str, str]]:
        lines = [replace(view, judgement=judged_as(view.judgement, *word)) for word in words]
        site.write_index(Path("out"), lines, CHECKS, {}, {})
        assert told["total"] == sum(len(group[-1]) for group in told["groups"])
        return [(v.device, v.word) for group in told["groups"] for v in group[-1]]

    home, away, waits = ("h200", "GO"), ("h100", "NO-GO"), ("h100", "BLOCKED")
    assert shown(home, away) == [home, away]
    assert shown(home, waits) == [home]
    assert shown(waits) == [waits]
    assert shown(("h200", "BLOCKED"), waits) == [("h200", "BLOCKED")]


def judged_as(judgement: Any, device: str, word: str) -> Any:
    return replace(judgement, device=device, verdict=replace(judgement.verdict, word=word))


@pytest.mark.slow
def test_every_page_is_reached_and_every_link_leads_somewhere(whole: Path, parsed: dict[Path, Page]) -> None:
    assert check_links(whole, parsed) == []
    found = {p.relative_to(whole.resolve()).as_posix() for p in parsed}
    assert {f"cards/{c}.html" for c in phases.cards()} <= found
    assert {f"families/{f}.html" for f in families.names()} | {f"devices/{d}.html" for d in devices.ids()} <= found


@pytest.mark.slow
def test_nothing_is_fetched_from_elsewhere(whole: Path, parsed: dict[Path, Page]) -> None:
    style = (whole / "site.css").read_text()
    assert "url(" not in style
    assert "@import" not in style
    assert not re.search(r"fetch\(|XMLHttp|https?:", (render.TEMPLATES / "board.js").read_text())
    for path, page in parsed.items():
        for load in page.loads:
            assert load.startswith("data:") or (path.parent / load).exists(), f"{path}: {load}"
        assert page.tags.count("script") == (path.name == "index.html"), path
        assert page.silent == [], path


@pytest.mark.slow
def test_ids_are_unique_and_pages_have_one_title(parsed: dict[Path, Page]) -> None:
    for path, page in parsed.items():
        assert len(set(page.ids)) == len(page.ids), path
        assert page.tags.count("h1") == 1, path
        assert page.tags.count("main") == 1, path


@pytest.mark.slow
def test_counts_are_the_judges(whole: Path) -> None:
    every = list(phases.cards().values())
    own = [verdicts.judge_measured(c, c.device) for c in every if c.device in store.measured_devices(c.id)]
    home = {j.phase for j in own}
    away = [verdicts.judge_measured(c, d) for c in every for d in store.measured_devices(c.id) if d != c.device]
    judged = [*own, *away, *verdicts.judge_recorded(every)]
    own += [j for j in away if not (j.phase in home and j.verdict.word == "BLOCKED")]
    order = list(phases.cards())
    own = sorted(own, key=lambda j: order.index(j.phase)) + verdicts.judge_recorded(every)
    bare = [c for c in every if c.id not in {j.phase for j in own}]
    text = (whole / "index.html").read_text()
    for word in rules.WORDS:
        count = sum(j.verdict.word == word for j in own) + (len(bare) if word == "BLOCKED" else 0)
        assert len(re.findall(rf'<li data-verdict="{word}"', text)) == count
        assert not count or f'data-value="{word}" aria-pressed="false" disabled><b>{count}</b>' in text
    first = re.findall(r'href="cards/([^"#]+)\.html#measured-', text)
    assert first == [j.phase for j in own if j.evidence == "measured"]
    waiting = sum(j.phase in home and j.verdict.word == "BLOCKED" for j in away)
    assert waiting
    assert f"<li><b>{len(first)}</b>measured here (and {waiting} unfinished on a second device: BLOCKED, " in text
    everywhere = Counter([*(j.device for j in judged), *(c.device for c in bare)])
    for device in devices.ids():
        assert f"{devices.get(device).name}</a>, {everywhere[device]} verdicts</li>" in text
    places = [text.index(f'id="{kind}"') for kind in ("measured", "recorded", "imported", "unmeasured")]
    assert places == sorted(places)


@pytest.mark.slow
def test_a_card_says_everything(whole: Path, parsed: dict[Path, Page]) -> None:
    for card in phases.cards().values():
        page = parsed[(whole / "cards" / f"{card.id}.html").resolve()]
        text = " ".join(page.text.split())
        for part in (card.question, card.null, card.expected.recovery, card.limits, card.card_hash, "Run it again"):
            assert " ".join(part.replace("`", "").split()) in text, (card.id, part)
        for _, gate in card.gates:
            assert all(str(c) in text for _, c in gate.conditions()), card.id
        for case in card.recorded:
            assert all(i in text for i in case.figures), card.id
            assert case.verdict.id in page.ids
        if not card.recorded and not store.measured_devices(card.id):
            assert "BLOCKED" in text
    for f in audit().findings:
        for card_id in f.cards if f.evidence == "measured" else ():
            assert f.check in parsed[(whole / "cards" / f"{card_id}.html").resolve()].text


@pytest.mark.slow
def test_measured_card_has_its_figures_and_sources(whole: Path) -> None:
    page = Page(whole / "cards" / "p5-kernel.html")
    own = {"arms", "roofline", "breakdown"}
    assert {f"p5-kernel-h200-{name}.svg" for name in own} == set(page.loads) - {"../site.css"}
    assert {"../source/kernels/gdn/triton_split.py.html", "../notebooks/gdn.html"} <= set(page.links)
    assert all(word in page.text for word in ("driver", "580.159.04", "triton", "lab measure p5-kernel", "recorded on"))


def test_hostile_text_stays_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = phases.card("p1")
    evil = structs.replace(card, title=EVIL, question=EVIL, limits=EVIL, gate=structs.replace(card.gate, source=EVIL))
    monkeypatch.setattr(phases, "cards", lambda: {"p1": evil})
    monkeypatch.setattr(families, "names", lambda: [])
    first = verdicts.judge_recorded([card])[0]
    finding = replace(first.verdict.decisive[0], observed=EVIL)
    judged = replace(
        first,
        device=EVIL,
        differs=EVIL,
        recorded=first.recorded and structs.replace(first.recorded, word=EVIL),
        claims=((EVIL, first.verdict),),
        note=EVIL,
        verdict=rules.Verdict("NO-GO", EVIL, (finding,), (finding,)),
    )
    views = pages.views([judged])
    site.write_pages(tmp_path, [judged])
    site.write_cards(tmp_path, [judged])
    site.write_index(tmp_path, views, CHECKS, {"nb": EVIL}, {})
    drawn = {"image/svg+xml": f"<svg>{EVIL}</svg>", "text/plain": EVIL}
    cells = [{"cell_type": "code", "source": EVIL, "outputs": [
        {"output_type": "stream", "name": "stdout", "text": EVIL},
        {"output_type": "display_data", "metadata": {}, "data": {"text/html": f"<p onclick='x()'>{EVIL}</p>"}},
        {"output_type": "display_data", "metadata": {}, "data": {"text/html": INSTRUMENT}},
        {"output_type": "display_data", "metadata": {}, "data": {"text/markdown": EVIL}},
        {"output_type": "display_data", "metadata": {}, "data": drawn},
    ]}]  # fmt: skip
    link = f"[link](javascript:alert(1)) <a href='javascript:alert(2)'>`{EVIL}`</a> ![x](javascript:alert(3))"
    column = notebook.show(pd.DataFrame({EVIL: [f"``{EVIL}", EVIL]}), code=[EVIL]).bundle
    for markdown in (link, column["text/markdown"]):
        cells += [{"cell_type": "code", "source": "", "outputs": [
            {"output_type": "display_data", "metadata": {}, "data": {"text/markdown": markdown}}]}]  # fmt: skip
    site.write_notebook(tmp_path, "nb", EVIL, [*cells, {"cell_type": "markdown", "source": link}])
    for name in ("index.html", "cards/p1.html", "notebooks/nb.html"):
        page, text = Page(tmp_path / name), (tmp_path / name).read_text()
        assert not re.search(r"""<[^<>]*(href|src)=["']?\s*javascript:""", text), name
        assert page.tags.count("script") == (name == "index.html"), name
        assert "alert" in page.text, name
        assert not re.search(r"<script>alert|onclick|data:text/html|\b49\b.*bold", text), name
    assert FIGURE in (tmp_path / "notebooks/nb.html").read_text(), "an instrument's figure is shown"


def test_marks_around_what_is_written_are_not_shown() -> None:
    """A comment is HTML too, and all other HTML shows as text."""
    shown = render.markdown("<!-- written by x -->\n\n| a |\n|---|\n| 1 |\n<!-- end -->\n\nb <!-- c --> <b>d</b>\n")
    assert "written" not in shown
    assert "end" not in shown
    assert "<td>1</td>" in shown
    assert "&lt;!-- c --&gt; &lt;b&gt;d" in shown


def policy(text: str) -> dict[str, str]:
    (held,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text.partition("<title>")[0])
    return dict(rule.split(" ", 1) for rule in html.unescape(held).split("; "))


def test_the_policy_lets_only_the_board_run(tmp_path: Path) -> None:
    """By its hash and without 'unsafe-inline': what gets past the escaping does nothing."""
    site.write_index(tmp_path, [], [], {}, {})
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy(text)["default-src"] == "'none'"
    assert policy(text)["script-src"] == f"'sha256-{digest}'"
    assert "http" not in " ".join(policy(text).values())


@pytest.mark.slow
def test_every_page_has_the_policy(whole: Path) -> None:
    rules = policy((whole / "index.html").read_text(encoding="utf-8"))
    assert [p for p in whole.rglob("*.html") if policy(p.read_text(encoding="utf-8")) != rules] == []


def test_figures_escape_and_keep_their_scale() -> None:
    strip = inline.interval(-12.1, -10, "%", "<", (-12.6, -9.9), True)
    assert 'aria-label="-12.1 %, gate &lt; -10 %, interval -12.6 to -9.9"' in plain(strip)
    strip = inline.interval(-12.1, -10, "%", "<", (-12.6, -9.9), True, "one placement")
    assert 'interval -12.6 to -9.9, one placement"' in plain(strip)
    assert "var(--" not in inline.plain(strip)
    assert "currentColor" not in inline.plain(strip)
    assert "<script" not in inline.interval(1.0, 2.0, EVIL, "<")
    assert [plain(inline.number(x)) for x in (1237.4, -66.08, 0.003543, 0.61, 2.0, 0.0)] == [
        "1,237", "-66.1", "0.00354", "0.61", "2", "0"
    ]  # fmt: skip


def test_the_deciding_figure() -> None:
    """Of what holds the nearest to its line; an interval across the line leaves it undecided."""
    card = phases.card("moe-routed")
    view = pages.View(card, verdicts.judge_measured(card, "h200"))
    assert view.deciding is not None
    assert view.deciding.seen is not None
    assert view.deciding.condition.workload == "t8_e256_k8_h2048_f512_s512"
    assert view.flags == []
    crossing = instruments.judged(card, "h200", "measured", line=view.deciding.seen.value, which=2)
    assert pages.View(card, crossing).flags == ["interval across the line"]
    assert plain(render.value(view.deciding.seen)).startswith(f"{view.deciding.seen.value:.1f}")
    held = pages.View(phases.card("w4a16-decode"), verdicts.judge_measured(phases.card("w4a16-decode"), "h200"))
    assert (held.word, held.deciding and held.deciding.condition.workload) == ("GO", "m8_n5120_k17408")
    lost = verdicts.judge_measured(phases.card("q8-paths"), "h200")
    failed = pages.View(phases.card("q8-paths"), lost).deciding
    assert failed is not None
    assert failed.state == "fails"
    assert pages.unmeasured(phases.card("p6-room")).word == "BLOCKED"


def test_a_page_keeps_its_devices_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the audit says of an H200's rows is no flag of an H100's, and a trace of former arms is not drawn."""
    card = phases.card("moe-routed")
    void = Finding("incomplete-arms", "void", "x", "measured", "", "", (), (card.id,), ("y",), "h200")
    monkeypatch.setattr(pages, "_findings", lambda: (void,))
    found = {v.judgement.device: v.audited for v in pages.page_of(card, pages.judged([card])).views if v.judgement}
    assert found == {"h100": (), "h200": (void,)}
    with refused("trace.parquet", "other arms", remedy="lab profile moe-routed"):
        figures.sides(structs.replace(card, candidate="experts_early"), "h200")


def test_a_page_says_what_its_rows_stand_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = phases.card("moe-lp5-small-m")
    monkeypatch.setattr(phases, "cards", lambda: {card.id: card})
    site.write_cards(tmp_path, [verdicts.judge_measured(card, "h100")])
    text = Page(tmp_path / "cards" / f"{card.id}.html").text
    assert f"Why, and what the rows stand for: {card.gate.reason}" in text
    assert f"which the gate is about ({card.gate.reason.rstrip('.')}): kernel_us" in text
    assert all(words in text for words in ("consequence", "INVALID if missed", "a GO requires it"))


def test_a_page_says_which_noise_floor_its_verdict_used() -> None:
    def floor(card: str, device: str) -> str:
        view = pages.View(phases.card(card), verdicts.judge_measured(phases.card(card), device))
        return plain(view.noise_floor)

    placed = "2 % over placements, whose interval holds the noise of both arms"
    one = "max(2 %, 3 sigma of the control)"
    assert floor("moe-lp5-small-m", "h100") == placed
    assert floor("kv-ragged", "h200") == f"{one} for rows of one placement"
    assert floor("gdn-decode-limit", "h200") == f"{placed}; {one} for rows of one placement"
    recorded = verdicts.judge_recorded([phases.card("p5")])[0]
    assert plain(pages.View(phases.card("p5"), recorded).noise_floor) == one
    assert plain(pages.unmeasured(phases.card("p6-room")).noise_floor) == f"{placed}; {one} for rows of one placement"


def test_an_entity_in_markdown_is_escaped_once() -> None:
    shown = str(render.markdown("a &lt;= 16 us &amp; `b <= 3` &lt;script&gt;\n\n| &lt; 2 |\n|---|\n"))
    assert "<p>a &lt;= 16 us &amp; <code>b &lt;= 3</code> &lt;script&gt;</p>" in shown
    assert "<th>&lt; 2</th>" in shown


def test_verdicts_beside_each_other_name_their_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """+193 % of tokens a second is a GO, and +223 % of a kernel's time is none."""
    cards = {name: phases.card(name) for name in ("ds1-mmq", "q8-paths")}
    monkeypatch.setattr(phases, "cards", lambda: cards)
    told = [*verdicts.judge_recorded([cards["ds1-mmq"]]), verdicts.judge_measured(cards["q8-paths"], "h200")]
    site.write_cards(tmp_path, told)
    text = (tmp_path / "cards" / "ds1-mmq.html").read_text(encoding="utf-8")
    table = plain(text[text.index("The same question on other evidence") :].partition("</table>")[0])
    assert "+193 %<br><small>prefill_tps</small>" in table
    assert "+223 %<br><small>kernel_us</small>" in table


def test_a_narrow_page_wraps_its_conditions() -> None:
    """The rule for wide pages names `.wide td code`, and would win over one for `td code`."""
    narrow = (render.TEMPLATES / "site.css").read_text(encoding="utf-8").partition("@media (max-width: 560px) {")[2]
    assert re.search(r"td, \.wide td code { overflow-wrap: anywhere; white-space: normal; }", narrow)


def test_the_tinted_side_is_where_the_gate_is_met() -> None:
    def sides(strip: str) -> tuple[float, float, float]:
        start, wide = re.findall(r'<rect x="([\d.]+)" y="4" width="([\d.]+)"', strip)[0]
        line = re.findall(r'<path d="M([\d.]+) 3V27"', strip)[0]
        return float(start), float(start) + float(wide), float(line)

    for op in ("<", "<="):
        start, end, line = sides(inline.interval(-12.0, -10.0, "%", op, None, True))
        assert (start, end) == (6.0, line)
    start, end, line = sides(inline.interval(3.0, 2.0, "us", ">"))
    assert (start, end) == (line, 234.0)
    condition = Condition("kernel_us", ">", "us", 2.0)
    killed = rules.Finding("kill", condition, "holds", "", seen=rules.Seen(3.0, 2.0, "us"))
    start, end, line = sides(str(render.interval(killed)))
    assert (start, end) == (6.0, line)


def test_an_output_keeps_its_own_pictures_and_asks_no_host() -> None:
    own = '<img src="data:image/png;base64,AAAA" alt="a plot">'
    foreign = (
        '<img src="https://example.com/x.png"><a href="data:text/html,x">a</a><img src="data:text/html;base64,AA">'
    )
    found = site.clean(f"{own}{foreign}<p onclick='x()'>p</p><script>alert(1)</script><a href='javascript:x()'>b</a>")
    assert own in found
    assert not re.search("example|text/html|onclick|script", found)


def test_hostile_rows_stay_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's name, a message, a library's own words: from a row that anybody may hand in."""
    evil = f"{EVIL} $x_{{$ ]]>"
    card = phases.card("p5")
    monkeypatch.setattr(store, "FOLDER", tmp_path / "rows")
    timed = {"median_us": 4.0, "iqr_us": 0.5, "timer": "graph", "l2": "cold", "n": 20, "calls": 3}
    work = {"workload_id": "npp2048", "flops": 1e6, "bytes": 2**20, "pipe": "bf16", "relative_error": 1e-3}
    for arm, name in (("control", "fused_chunk"), ("candidate", "split_pipeline"), ("peer", evil)):
        row = measurement(phase="p5", arm=arm, name=name, config=evil, driver=evil, **work, **timed)
        store.append(tmp_path / "rows" / "h200" / "p5" / "r1", row)
    failed = measurement(phase="p5", arm="peer", name="other", status="error", message=evil, **work)
    store.append(tmp_path / "rows" / "h200" / "p5" / "r1", failed)
    monkeypatch.setattr(phases, "cards", lambda: {"p5": card})
    site.write_cards(tmp_path, [verdicts.judge_measured(card, "h200")])
    page = Page(tmp_path / "cards" / "p5.html")
    assert page.text.count(evil) >= 4  # the arm, its error, the driver, the library's words
    assert "script" not in page.tags
    drawn = [tmp_path / "cards" / name for name in page.loads if name.endswith(".svg")]
    assert len(drawn) == 2
    assert all("<script" not in path.read_text(encoding="utf-8") for path in drawn)
