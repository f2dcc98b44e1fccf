"""Cards that are not as a card must be: one line that names the file, the key, the value and the remedy.

Each case takes a real card, makes one mistake in its text and loads it from a temporary folder, so a refusal is tested
on what a person would write. No mistake may load, and none may end in anything but BadInput.
"""

import re
from pathlib import Path

import pytest
from msgspec import structs

from lab.base import files
from lab.base.errors import BadInput
from lab.card import phases
from tests.loops import over
from tests.refused import refused

CARD = "p4"
UNWRITTEN = ("gate", "expected", "path", "card_hash", "gate_hash")  # tables, and what a card does not say of itself
TEXT = phases.card(CARD).path.read_text()
REQUIRED = [f.name for f in structs.fields(phases.Card) if f.required and f.name not in UNWRITTEN]
TTFT = 'metric = "ttft_p50"\ncompare = "change"\nop = "<"\nthreshold = -20'

# name -> (old text, new text, what the line must hold: the key, the value, the remedy or nearest word)
MISTAKES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "unknown key": ("question =", "querstion =", ("querstion", '"question"')),
    "unknown gate key": ("[gate]", "[gate]\nrequires = []", ("requires", '"require"')),
    "unknown condition key": (TTFT, TTFT.replace("threshold", "treshold"), ("gate.require", "treshold", '"threshold"')),
    "unknown figure key": ("noise = ", "noises = ", ("noises", '"noise"')),
    "missing key": ("question =", "# question =", ("question", "missing")),
    "missing threshold": ("threshold = 60\n", "", ("runs_complete", "threshold or than")),
    "threshold and than": ("threshold = 60", 'threshold = 60\nthan = "repetitions"', ("threshold or than",)),
    "metric": ('"ttft_p50"', '"ttft_p51"', ("metric", "ttft_p51", '"ttft_p50"')),
    "metric of than": ("threshold = 60", 'than = "runs_completed"', ("runs_completed", '"runs_complete"')),
    "metric of a figure": (
        'metric = "runs_complete"\nvalue',
        'metric = "runs_complet"\nvalue',
        ("metric", '"runs_complet"', "did you mean"),
    ),
    "control is candidate": (
        'candidate = "fair-share prefill cursors"',
        'candidate = "dynamic decode-first budget (patch 0016)"',
        ("control and candidate are both", "name two arms"),
    ),
    "unit": ('unit = "runs"', 'unit = "rnus"', ("unit", "rnus", '"runs"')),
    "unit of another metric": ('unit = "runs"', 'unit = "reps"', ("reps", "runs_complete", 'write unit = "runs"')),
    "unit of a change": ('unit = "%"', 'unit = "ms"', ("ms", "change", 'write unit = "%"')),
    "workload": ('workload = "n32"', 'workload = "n33"', ("workload", "n33", '"n32"')),
    "workload of a figure": (
        'workload = "n32"\ncontrol',
        'workload = "n23"\ncontrol',
        ("recorded.figure", "workload", "n23", '"n32"'),
    ),
    "workload of against": (TTFT, f'{TTFT}\nagainst = "n23"', ("gate.require", "against", "n23", '"n32"')),
    "against itself": (TTFT, f'{TTFT}\nagainst = "n32"', ("against", '"n32"', "another workload")),
    "against without a change": ("threshold = 60", 'threshold = 60\nagainst = "n32"', ("against", "with a change")),
    "output of no error": (TTFT, f'{TTFT}\noutput = "o"', ('output = "o"', "ttft_p50", "relative_error")),
    "op": ('op = ">="', 'op = "=>"', ("gate.complete", "op", "=>", '">"')),
    "op of a change": (TTFT, TTFT.replace('"<"', '"=="'), ("==", "ttft_p50", "direction")),
    "compare": ('"change"', '"chnage"', ("compare", "chnage", '"change"')),
    "arrival": ('arrival = "staggered"', 'arrival = "stagered"', ("gate.", "arrival", "stagered", '"staggered"')),
    "arrival of a condition": (
        TTFT,
        f'{TTFT}\narrival = "bursts"',
        ("gate.require", "arrival", "bursts", '"burst"'),
    ),
    "figure id": ("ttft-p50-n32.candidate", "ttft-p50-n23.candidate", ("ttft-p50-n23", "did you mean", "ttft-p50-n")),
    "verdict id": ('"lp.v.p4-measured"', '"lp.v.p4-measurd"', ("lp.v.p4-measurd", '"lp.v.p4-measured"')),
    "gate source": (
        "[gate]\nsource = ",
        "[gate]\nsource = 'x' # ",
        ('gate.source = "x"', "recorded verdict", "declared in"),
    ),
    "stated figure": ("gate.p4.threshold.runs", "gate.p4.treshold.runs", ("treshold", "lp.gate.p4.threshold.runs")),
    "threshold as stated": ("threshold = 60", "threshold = 59", ("59", "lp.gate.p4.threshold.runs", "60")),
    "NaN threshold": ("threshold = 60", "threshold = nan", ("threshold", "nan", "finite")),
    "infinite threshold": ("threshold = 60", "threshold = inf", ("threshold", "inf", "finite")),
    "true as a threshold": ("threshold = 60", "threshold = true", ("threshold", "True", "float")),
    "text as a threshold": ("threshold = 60", 'threshold = "60"', ("threshold", "'60'", "float")),
    "duplicate figure": (
        'metric = "aggregate_tps"\nworkload = "n128"\nchange',
        'metric = "aggregate_tps"\nworkload = "n32"\nchange',
        ("aggregate_tps", "twice", "keep one"),
    ),
    "no figure": (
        'value = "lp.p4.gb10.raws-complete.control"',
        "",
        ("runs_complete", "names no figure", "give control"),
    ),
    "wrong arm": (
        'candidate = "lp.gate.p4.ttft-p50-n32.candidate"',
        'candidate = "lp.gate.p4.ttft-p50-n32.control"',
        ("lp.gate.p4.ttft-p50-n32.control", "control arm", '"candidate"'),
    ),
    "wrong metric": (
        "lp.gate.p4.ttft-p50-n128.delta",
        "lp.gate.p4.ttft-mean-n128.delta",
        ("lp.gate.p4.ttft-mean-n128.delta", "ttft_mean_delta", "ttft_p50", "vocabulary.toml"),
    ),
    "noise not in %": (
        "lp.gate.p4.noise-aggregate-n32",
        "lp.gate.p4.ttft-p50-n32.control",
        ("lp.gate.p4.ttft-p50-n32.control", "ms", "noise needs a figure in %"),
    ),
    "id": ('id = "p4"', 'id = "p5"', ("id", '"p5"', 'write id = "p4"')),
    "no requirement": ("gate.require", "gate.kill", ("require", "missing")),
    "empty requirement": ("[gate]", "[gate]\nrequire = []", ("require",)),
    "workload twice": ('["n32", "n128"]', '["n32", "n32"]', ("workloads", "twice")),
    "workload that is no text": ('["n32", "n128"]', "[32, 128]", ("workloads", "32", "str")),
    "workloads no list": ('["n32", "n128"]', '"n32"', ("workloads", "'n32'", "array")),
    "title no text": ("title = ", "title = 4 # ", ("title", "4", "str")),
    "metric no text": ('metric = "runs_complete"', 'metric = ["runs_complete"]', ("metric", "runs_complete", "str")),
    "op no text": ('op = ">="', "op = [1]", ("op", "[1]", ">=")),
    "figure id no text": ('value = "lp.p4.gb10.raws-complete.control"', "value = 30", ("figure", "value", "30", "str")),
    "gate no table": ("[gate]\nsource", "[[gate]]\nsource", ("gate", "object")),
    "condition no table": ("[[gate.complete]]", "[gate.complete]", ("gate.complete", "array")),
    "noise rule": ("[gate]", "[gate]\nnoise = { floor = 3 }", ("floor", '"floor_pct"')),
    "negative floor": ("[gate]", "[gate]\nnoise = { floor_pct = -3 }", ("gate.noise.floor_pct", "-3", ">= 0")),
    "NaN sigmas": ("[gate]", "[gate]\nnoise = { sigmas = nan }", ("gate.noise.sigmas", "nan", ">= 0")),
    "modelled": ("[gate]", '[gate]\nmodelled = "no"', ("gate.modelled", "'no'", "bool")),
    "expected": ("arithmetic =", "arithmetics =", ("expected", "arithmetics", '"arithmetic"')),
    "malformed": ("[gate]", "[gate", ("not valid TOML", "line")),
    "protocol": ("[gate]", '[measure]\nl2 = "cool"\n\n[gate]', ("measure.l2", "cool", '"cold"')),
    "negative rest": ("[gate]", "[measure]\nrest = -1.0\n\n[gate]", ("measure.rest", "-1", ">= 0")),
    "key twice": ("title =", 'title = "again"\ntitle =', ("not valid TOML", "line")),
}


def refusal(tmp_path: Path, text: str, name: str = CARD) -> str:
    path = tmp_path / f"{name}.toml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        phases.load(path)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"{path}: ")
    assert ";" in line, f"no remedy in {line}"
    return line.removeprefix(f"{path}: ")


def test_the_card_itself_loads(tmp_path: Path) -> None:
    path = tmp_path / f"{CARD}.toml"
    path.write_text(TEXT)
    assert phases.load(path).gate == phases.card(CARD).gate


def test_refused(tmp_path: Path) -> None:
    @over(MISTAKES)
    def each(old: str, new: str, named: tuple[str, ...]) -> None:
        assert old in TEXT, "the card changed: choose other text for this mistake"
        line = refusal(tmp_path, TEXT.replace(old, new, -1 if old == "gate.require" else 1))
        assert [word for word in named if word not in line] == [], line

    each()


# What is free in a card of one's own: the words of a card of data/phases are checked.
HOUSE = {
    "row": ('row = "LP4"', 'row = "LP44"', ("row", "LP44", '"LP4"')),
    "no row": ('row = "LP4"', "", ('"row" is missing',)),
    "no device": ('device = "', '# device = "', ('"device" is missing',)),
    "system": ('"localai-paged"', '"localai"', ("system", "localai", '"localai-paged"')),
}


def test_words_of_the_house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "FOLDER", tmp_path)

    @over(HOUSE)
    def each(old: str, new: str, named: tuple[str, ...]) -> None:
        line = refusal(tmp_path, TEXT.replace(old, new, 1))
        assert [word for word in named if word not in line] == [], line

    each()


def test_every_required_key(tmp_path: Path) -> None:
    for key in REQUIRED:
        line = refusal(tmp_path, re.sub(rf"^{key} = .*\n", "", TEXT, flags=re.MULTILINE))
        assert f'"{key}" is missing' in line


@pytest.mark.parametrize("role", ["gate", "claim"])
def test_claims_are_checked_as_gates_are(role: str, tmp_path: Path) -> None:
    text = phases.card("p1").path.read_text()
    start = text.index(f"[[{role}.require]]")
    line = refusal(tmp_path, text[:start] + text[start:].replace('op = "', 'op = "~', 1), "p1")
    assert 'op = "~' in line
    assert role in line


def test_a_claim_names_no_source(tmp_path: Path) -> None:
    text = phases.card("p1").path.read_text().replace("[[claim]]\n", '[[claim]]\nsource = "x"\n', 1)
    line = refusal(tmp_path, text, "p1")
    assert "claim" in line
    assert 'unknown key "source"' in line


def test_withdrawn_figure_is_no_threshold(tmp_path: Path) -> None:
    stated = 'threshold = 471\nfrom = "lp.batch8-anomaly.gb10.decode-step.control.npl8"'
    text = TEXT.replace('threshold = 60\nfrom = "lp.gate.p4.threshold.runs"', stated)
    line = refusal(tmp_path, text)
    assert [
        w for w in ("lp.batch8-anomaly.gb10.decode-step.control.npl8", "withdrawn", "artifact") if w not in line
    ] == []


def test_unknown_card_names_the_nearest() -> None:
    with refused("data/phases", '"p5-chunk46"', remedy='"p5-chunk64"'):
        phases.card("p5-chunk46")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"id = 'p4'"])
def test_other_files(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"{CARD}.toml"
    path.write_bytes(content)
    with refused("p4.toml"):
        phases.load(path)
    with refused("absent.toml"):
        files.read_toml(tmp_path / "absent.toml")
