"""Cards of one's own: free words, declared metrics, a folder anywhere, and what stays an error."""

from pathlib import Path

import pytest

from lab.base import own
from lab.base.errors import BadInput
from lab.card import phases
from lab.card.gate import Reading
from lab.judge.rules import judge

TEXT = """
id = "mine"
row = "P7"
system = "my-server"
title = "Shorter prompts"
question = "Does quantising the prompt cost less?"
hypothesis = "It does."
null = "It does not."
control = "before"
candidate = "after"
workloads = ["M=8 N=64 K=64"]
limits = "One shape."

[metric.act_quant_us]
unit = "us/tok"
better = "lower"
meaning = "quantising activations, a token"

[[gate.require]]
metric = "act_quant_us"
compare = "change"
op = "<"
threshold = -5
unit = "%"
workload = "M=8 N=64 K=64"

[expected]
recovery = "10 %"
arithmetic = "one pass of ten"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A card directory in use, with one card, a list of devices and a file that is no card."""
    (tmp_path / "mine.toml").write_text(TEXT)
    (tmp_path / own.DEVICES).write_text("")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n')
    monkeypatch.setenv(own.VARIABLE, str(tmp_path))
    return tmp_path


def test_words_are_free_and_the_house_cards_stay(folder: Path) -> None:
    assert list(phases.own_cards()) == ["mine"]
    card = phases.card("mine")
    assert (card.row, card.system, card.device, card.own) == ("P7", "my-server", "", True)
    assert not phases.card("p4").own
    assert list(phases.cards())[-1] == "mine"
    assert phases.card(str(folder / "mine.toml")) == card


def test_a_declared_metric_is_judged_by_its_unit_and_direction(folder: Path) -> None:
    gate = phases.card("mine").gate

    def word(unit: str, candidate: float) -> str:
        reading = Reading(unit, control=10.0, candidate=candidate, control_sd_pct=0.1)
        return judge(gate, {("act_quant_us", "M=8 N=64 K=64"): reading}).word

    assert (word("us/tok", 8.0), word("us/tok", 9.9), word("us", 8.0)) == ("GO", "NO-GO", "INVALID")
    assert judge(gate, {}).word == "BLOCKED"
    (folder / "mine.toml").write_text(TEXT.replace('better = "lower"', 'better = "higher"'))
    other = phases.card("mine")
    judged = judge(other.gate, {("act_quant_us", other.workloads[0]): Reading("us/tok", 10.0, 8.0)})
    assert "better higher" in judged.reason
    assert other.gate_hash != gate_hash()


def gate_hash() -> str:
    import tomllib

    return phases.gate_hash(tomllib.loads(TEXT))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('row = "P7"', 'device = "h20"', ('device = "h20"', '"h200"')),
        ('metric = "act_quant_us"', 'metric = "act_qant_us"', ("act_qant_us", '"act_quant_us"')),
        ("[metric.act_quant_us]", "[metric.kernel_us]", ("metric.kernel_us", "rename")),
        ('better = "lower"', 'better = "less"', ("act_quant_us", "less", "lower")),
        ('unit = "us/tok"\n', "", ("act_quant_us", "unit", "missing")),
    ],
)
def test_what_stays_an_error(folder: Path, old: str, new: str, words: tuple[str, ...]) -> None:
    (folder / "mine.toml").write_text(TEXT.replace(old, new, 1))
    with pytest.raises(BadInput) as caught:
        phases.cards()
    assert [word for word in (*words, "mine.toml") if word not in str(caught.value)] == [], str(caught.value)


def test_a_copy_stands_in_the_place_of_the_houses_card(folder: Path) -> None:
    (folder / "p4.toml").write_text(TEXT.replace('"mine"', '"p4"'))
    assert phases.card("p4").own
