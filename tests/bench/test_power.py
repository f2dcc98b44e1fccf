"""How often a verdict is wrong: the committed table holds what was promised, and so does the judge of today."""

from pathlib import Path

import pytest
from msgspec import structs

from lab.write import site
from tests.bench import bench_power as power
from tests.refused import refused

LINES = {line.id: line for line in power.committed()}
PROMISED = [name for name, noise in power.NOISES.items() if noise.promised]


def test_the_table_has_every_noise_and_is_the_one_on_its_page() -> None:
    assert list(LINES) == list(power.NOISES)
    assert {line.comparisons for line in LINES.values()} == {power.COMPARISONS}
    assert "\n".join(power.markdown(list(LINES.values()))) in power.PAGE.read_text(encoding="utf-8")
    assert power.PAGE in site.docs()


@pytest.mark.parametrize("name", PROMISED)
def test_what_was_promised(name: str) -> None:
    line = LINES[name]
    assert line.false_go_pct <= 1
    assert line.false_go_at_line_pct <= 2.5
    assert 93 <= line.coverage_pct <= (100 if power.NOISES[name].bound else 97)
    assert line.bootstrap_pct < 93 or name == "last"
    assert line.power_pct >= 90 or not power.NOISES[name].powered


def test_what_stays_uncovered_is_in_the_table() -> None:
    assert [name for name in LINES if LINES[name].coverage_pct < 93] == [n for n in LINES if n not in PROMISED]


SLOW = pytest.mark.slow  # a third of a second each


SOME = ("drift", "placement-1", "candidate", "heavy", "cap", "cap-blocks")


@pytest.mark.parametrize("name", ["iid", *(pytest.param(name, marks=SLOW) for name in SOME)])
def test_the_judge_of_today(name: str) -> None:
    """400 comparisons: room for three standard errors about what was promised."""
    line = power.simulate(name, 400, seed=1)
    assert line.false_go_pct <= 2
    assert line.false_go_at_line_pct <= 4.5
    assert 92 <= line.coverage_pct <= 99
    assert line.power_pct >= (90 if power.NOISES[name].powered else 0 if power.NOISES[name].held else 60)


def test_the_same_seed_is_the_same_table_and_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [power.simulate(name, 3) for name in ("iid", "rare-mode")]
    assert lines == [power.simulate(name, 3) for name in ("iid", "rare-mode")]
    assert lines[0] != power.simulate("iid", 3, seed=2)
    file, page = tmp_path / "table.csv", tmp_path / "page.md"
    page.write_text(f"before\n{power.MARKS[0]}\nformer\n{power.MARKS[1]}\nafter\n")
    power.write(lines, file, page)
    monkeypatch.setattr(power, "FILE", file)
    assert [structs.astuple(line)[:2] for line in power.committed()] == [("iid", 3), ("rare-mode", 3)]
    assert power.committed()[0].coverage_pct == pytest.approx(lines[0].coverage_pct, rel=1e-4)
    text = page.read_text()
    assert "former" not in text
    assert "(not covered)" in text
    page.write_text("no marks")
    with refused(page.name, remedy="around the table"):
        power.write(lines, file, page)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "NOISES", {"iid": power.NOISES["iid"]})
    assert power.main(["--comparisons", "2"]) == 0
    assert power.NOISES["iid"].says in capsys.readouterr().out
    with pytest.raises(SystemExit):
        power.main(["--comparisons", "0"])
    assert "--comparisons" in capsys.readouterr().err
