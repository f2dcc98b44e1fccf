"""ds4-bench's CSV, whose columns differ from build to build: what is read, which rate, and what is refused."""

from pathlib import Path

from lab.card import phases
from lab.study import own
from lab.study.own import verdict
from tests.loops import numbered, over
from tests.refused import refused
from tests.study.interop_samples import SAMPLES, card, condition

CONTROL, CANDIDATE, TOTAL = (SAMPLES / f"ds4_bench_{name}.csv" for name in ("control", "candidate", "total"))


def changed(tmp_path: Path, old: str, new: str, source: Path = CONTROL) -> Path:
    text, path = source.read_text(), tmp_path / "changed.csv"
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return path


def decode(path: Path) -> list[float]:
    return [s.values[0] for s in own.read(path).samples if s.metric == "decode_tps"]


def test_steady_rate_is_preferred_and_named() -> None:
    for path, column, rates in (
        (CONTROL, "gen_tps_ss", [14.00, 13.70]),
        (CANDIDATE, "gen_steady_tps", [14.75, 14.40]),
        (TOTAL, "gen_tps, the total rate", [14.60, 14.20]),
    ):
        imported = own.read(path)
        assert imported.tool == "ds4-bench"
        assert decode(path) == rates
        assert imported.notes[0].startswith(f"{path.name}: generation read from {column}")
        assert [(s.unit, s.wrong) for s in imported.samples] == [("tok/s", "")] * 4
    prefill, generation = own.read(CONTROL).samples[:2]
    assert prefill.axes == {"ctx": 2048, "npl": 1, "npp": 2048}
    assert generation.axes == {"ctx": 2048, "npl": 1, "ntg": 128, "rate": "steady"}
    assert prefill.at.number == 2


def test_unknown_column_is_said_and_a_byte_order_mark_is_none(tmp_path: Path) -> None:
    path = tmp_path / "more.csv"
    lines = CONTROL.read_text().splitlines()
    more = [lines[0] + ",watts", *(line + ",31" for line in lines[1:])]
    path.write_text("\ufeff" + "\n".join(more) + "\n")
    assert decode(path) == [14.00, 13.70]
    assert "more.csv: columns not read: watts" in own.read(path).notes


REFUSED_CASES: list[tuple[str, str, str, str]] = [
    ("410.00", "nan", "line 2", "prefill_tps = 'nan'"),
    ("14.00", "0", "line 2", "gen_tps_ss = '0'"),
    (",80373148", "", "line 3", "7 of 8 columns"),
    ("gen_tokens,", "", "line 1", '"gen_tokens"'),
    ("2048,2048,410", "2048,half,410", "line 2", "prefill_tokens = 'half'"),
]


def test_refused(tmp_path: Path) -> None:
    @over(numbered(REFUSED_CASES))
    def each(old: str, new: str, line: str, named: str) -> None:
        with refused(f"changed.csv {line}", named):
            own.read(changed(tmp_path, old, new))

    each()


def test_a_rate_in_milliseconds_contradicts_its_own_time(tmp_path: Path) -> None:
    """71.4 ms/token written where 14.00 tok/s belongs: the first token's time gives it away."""
    samples = own.read(changed(tmp_path, "13.90,14.00", "13.90,71.40")).samples
    assert "gen_tps 13.9 is not the" in samples[1].wrong
    assert [s.wrong for s in (samples[0], *samples[2:])] == ["", "", ""]


def own_card(tmp_path: Path) -> phases.Card:
    workloads = ["ctx2048", "ctx4096"]
    return phases.load(card(tmp_path, workloads, *(condition("decode_tps", ">", 0, w) for w in workloads)))


def test_judged_like_any_other_tool(tmp_path: Path) -> None:
    outcome = verdict.judge(own_card(tmp_path), [f"control={CONTROL}", f"candidate={CANDIDATE}"], device="gb10")
    assert outcome.judgement.verdict.word == "GO"
    assert "decode_tps +5.36 % (14 -> 14.75 tok/s)" in outcome.judgement.verdict.reason
    assert any("gen_steady_tps" in note for note in outcome.notes)


def test_a_total_rate_is_not_compared_with_a_steady_one(tmp_path: Path) -> None:
    outcome = verdict.judge(own_card(tmp_path), [f"control={CONTROL}", f"candidate={TOTAL}"], device="gb10")
    assert outcome.judgement.verdict.word == "BLOCKED"
    assert "rate (steady against total)" in str(outcome.judgement)
