"""Devices and models: the files hold what the recorded figures say, and a broken file is refused in one line."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from lab.base import devices, files, models, own
from lab.base.errors import BadInput
from lab.base.facts import KINDS, Fact, from_base, to_base
from lab.card import recorded
from lab.check import families
from lab.cli import main
from tests.loops import numbered, over
from tests.refused import refused

RECORDED_ID = re.compile(r"^(lp|ds4|ik|imp|lb)\.\S+$")


def _recorded_facts() -> dict[str, tuple[str, str]]:
    """Every id of the recorded device and model tables: id -> (value, unit)."""
    rows = []
    for name in ("devices.csv", "models.csv"):
        rows += files.read_csv(recorded.FOLDER / name, ("id", "value", "unit"))
    return {row["id"]: (row["value"], row["unit"]) for row in rows}


def _all_facts() -> list[Fact]:
    entries: list[devices.Device | models.Model] = [*map(devices.get, devices.ids()), *map(models.get, models.load())]
    return [fact for entry in entries for fact in entry.named.values()]


RECORDED = _recorded_facts()


@over({fact.key: (fact,) for fact in _all_facts()})
def test_fact_says_what_its_source_says(fact: Fact) -> None:
    for value in fact.values:
        assert value.kind in KINDS
        if RECORDED_ID.match(value.source):
            assert value.kind == "recorded"
            assert value.source in RECORDED, f"{value.source} is no recorded figure"
            stated, unit = RECORDED[value.source]
            number = float(stated.removeprefix("sm_")) / (10 if stated.startswith("sm_") else 1)
            assert value.value == number
            assert unit == "" or unit == fact.unit or (unit, fact.unit) == ("B", "B params")


def test_the_source_check_sees_ids() -> None:
    """The test above must not pass because nothing looks like an id."""
    assert sum(bool(RECORDED_ID.match(v.source)) for fact in _all_facts() for v in fact.values) >= 15


def test_contradictions_are_kept() -> None:
    gb10, pro = devices.get("gb10"), devices.get("rtx-pro-6000")
    assert [v.value for v in gb10.bandwidth.values] == [273, 546]
    assert {1.6, 1.8} <= {v.value for v in pro.bandwidth.values}
    assert [v.value for v in gb10.peak("fp4").values] == [427, 500]
    assert [v.value for v in models.get("q36-35b-a3b").fact("gdn_layers").values] == [30, 60]
    assert all(fact.note for fact in _all_facts() if len(fact.values) > 1)


def test_base_units() -> None:
    gb10 = devices.get("gb10")
    assert gb10.bandwidth.base == 273e9
    assert gb10.peak("fp4").base == 500e12
    assert gb10.fact("smem_optin_bytes_per_block").base == 99 * 1024
    assert gb10.capability == (12, 1)
    assert devices.get("h200").capability == (9, 0)
    assert to_base(2, "MiB") == 2 * 1024 * 1024
    assert from_base(0.066, "ms/step") == pytest.approx(66)
    with refused("unit", "GBs", remedy="GB/s"):
        to_base(1, "GBs")
    with refused("row.json", "kld"):  # a unit of figures, which nobody converts
        from_base(1, "kld", "row.json")


def test_names_resolve() -> None:
    assert devices.get("RTX 5090 (sm_120a)").id == "rtx-5090"
    assert models.get("q36-27b-nvfp4").id == "q36-27b"
    with refused("row.json", "device", "h20", remedy="h200"):
        devices.get("h20", "row.json")
    with refused("model", "q36-27", remedy="q36-27b"):
        models.get("q36-27")
    with refused("devices.toml", "h200", "fp4", remedy="[h200.peak.fp4]"):
        devices.get("h200").peak("fp4")
    with refused("devices.toml", "gb10", "peak.fp5", remedy="peak.fp"):
        devices.get("gb10").fact("peak.fp5")


def test_every_device_of_the_recorded_figures_with_a_bandwidth_is_known() -> None:
    rows = files.read_csv(recorded.FOLDER / "devices.csv", ("device", "fact"))
    stated = {row["device"] for row in rows if row["fact"] == "memory_bandwidth"}
    assert stated >= {"gb10", "rtx-pro-6000"}
    assert stated <= set(devices.ids())


def test_shapes_are_the_models_shapes() -> None:
    assert models.shape("q36-27b.ffn_up").axes == {"N": 17408, "K": 5120}
    assert models.shape("q36-27b.ffn_down").axes == {"N": 5120, "K": 17408}
    assert models.shape("q36-27b.ssm_out").axes == {"N": 5120, "K": 6144}
    assert models.shape("q36-27b.gdn").axes == {"Hk": 16, "Hv": 48, "D": 128}
    assert models.shape("q36-27b.attention").axes == {"Hq": 24, "Hkv": 4, "D": 256}
    assert models.shape("q36-35b-a3b.gdn").axes == {"Hk": 16, "Hv": 32, "D": 128}
    with refused("model shape", "q36-27b", "ffn_ip", remedy="ffn_up"):
        models.shape("q36-27b.ffn_ip")
    with refused("model shape", '"ffn_up"', remedy="<model>.<shape>"):
        models.shape("ffn_up")


@over({model_id: (model_id,) for model_id in models.load()})
def test_model_facts_hold_together(model_id: str) -> None:
    """Facts that follow from each other, so that a slip of the pen in one shows."""
    facts = {name: f.value for name, f in models.get(model_id).facts.items()}
    if "layers" in facts:
        others = facts["gdn_layers"] if "gdn_layers" in facts else facts["sliding_layers"]
        assert others + facts["attention_layers"] == facts["layers"]
        assert facts["attention_heads"] % facts["kv_heads"] == 0
    if "gdn_layers" in facts:
        assert facts["gdn_v_heads"] * facts["gdn_head_dim"] == facts["gdn_value_dim"]
    if "kv_bytes_per_token" in facts:
        assert facts["kv_bytes_per_token"] == 2 * facts["attention_layers"] * facts["kv_heads"] * facts["head_dim"] * 2
    if "gdn_state_bytes" in facts:
        assert facts["gdn_state_bytes"] == facts["gdn_v_heads"] * facts["gdn_head_dim"] ** 2 * 4


@over(numbered([(family,) for family in families.names()]))
def test_measure_workloads_have_the_shape_they_name(family: str) -> None:
    workloads = importlib.import_module(f"kernels.{family}.cases").WORKLOADS
    named = [w for w in workloads if w.source]
    assert named, f"kernels/{family}/cases.py names no model shape"
    for workload in named:
        shape = models.shape(workload.source, f"kernels/{family}/cases.py: {workload.id}")
        assert {axis: workload.axes.get(axis) for axis in shape.axes} == dict(shape.axes), workload.id
    assert all(w.role == "measure" for w in named)


GOOD = """
[one]
name = "One"
[one.compute_capability]
unit = "capability"
values = [{ value = 9.0, source = "words", kind = "datasheet" }]
[one.sms]
unit = "SMs"
values = [{ value = 4, source = "words", kind = "datasheet" }]
[one.memory_bandwidth]
unit = "GB/s"
values = [{ value = 100, source = "words", kind = "datasheet" }]
[one.peak.bf16]
unit = "TFLOP/s"
values = [{ value = 1, source = "words", kind = "datasheet" }]
"""


def assert_names(error: BadInput, path: Path, named: tuple[str, ...]) -> None:
    line = str(error)
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
    assert [word for word in named if word not in line] == [], line


def test_the_good_file_is_good(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    path.write_text(GOOD)
    assert devices.load(path)["one"].bandwidth.base == 100e9


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('name = "One"', "", ("one", "name", "missing")),
        ('unit = "GB/s"', "", ("one", "memory_bandwidth", "unit", "missing")),
        ('unit = "GB/s"', 'unit = "Gb/s"', ("one", "memory_bandwidth", 'unit = "Gb/s"', 'did you mean "GB/s"')),
        (
            'unit = "GB/s"',
            'unit = "us"',
            ("one", "memory_bandwidth", "unit = us", "time", "bandwidth", "B/s, GB/s, TB/s"),
        ),
        ("value = 100,", "", ("one", "memory_bandwidth", "value", "missing")),
        ("value = 100,", "value = -10,", ("one", "memory_bandwidth", "value = -10", "> 0")),
        ("value = 100,", "value = nan,", ("one", "memory_bandwidth", "value = nan", "> 0")),
        ("value = 100,", 'value = "10",', ("one", "memory_bandwidth", "value = '10'", "float")),
        ('value = 100, source = "words"', "value = 10", ("one", "memory_bandwidth", "source", "missing")),
        (
            'value = 100, source = "words", kind = "datasheet"',
            'value = 100, source = "w", kind = "seen"',
            ('kind = "seen"', "datasheet"),
        ),
        ('unit = "GB/s"', 'unit = "GB/s"\nuse = 1', ("one", "memory_bandwidth", "use = 1")),
        (
            'value = 100, source = "words", kind = "datasheet" }',
            'value = 100, source = "words", kind = "datasheet" }, { value = 20, source = "words", kind = "datasheet" }',
            ("one", "memory_bandwidth", "note is missing"),
        ),
        ("value = 100,", "value = inf,", ("one", "memory_bandwidth", "value = inf")),
        ('value = 100, source = "words"', 'value = 100, source = " "', ("one", "memory_bandwidth", "source = ' '")),
        ("[one.sms]", "[one.smss]", ("one", 'unknown key "smss"', 'did you mean "sms"')),
        ("[one.peak.bf16]", "[one.peak.bf61]", ("one", "peak", 'unknown key "bf61"', 'did you mean "bf16"')),
        ('unit = "TFLOP/s"', 'unit = "GB/s"', ("one", "peak.bf16", "unit = GB/s", "bandwidth", "rate")),
        ('name = "One"', 'name = "One"\nid = "two"', ("one", 'key "id"', "leave it out")),
        ('name = "One"', 'name = "One"\nfile = "two"', ("one", 'key "file"', "leave it out")),
        ("value = 100,", "value = 1.792,", ("one", "memory_bandwidth: 1.792 GB/s", "50 GB/s to 100 TB/s", "unit")),
        ("value = 100,", "value = 2e5,", ("one", "memory_bandwidth: 200000 GB/s", "50 GB/s to 100 TB/s")),
        ("value = 1,", "value = 500000,", ("one", "peak.bf16: 500000 TFLOP/s", "1 TFLOP/s to 100 PFLOP/s")),
        ("value = 1,", "value = 0.5,", ("one", "peak.bf16: 0.5 TFLOP/s", "1 TFLOP/s to 100 PFLOP/s")),
        ("value = 9.0,", "value = 120,", ("one", "compute_capability: 120", "5.0 to 20.9")),
        ("value = 9.0,", "value = 12.05,", ("one", "compute_capability: 12.05", "MAJOR.MINOR")),
        ("value = 4,", "value = 188.5,", ("one", "sms: 188.5", "whole number")),
        ('name = "One"', 'name = "AMD One"', ("one", "compute_capability: AMD One is no CUDA GPU", "leave it out")),
        ('unit = "GB/s"', 'unit = "GB/s"\nkey = "x"', ("one", "memory_bandwidth", 'key "key"', "leave it out")),
        ("[one]", "[one", ("not valid TOML",)),
        (
            'name = "One"',
            'name = "One"\naliases = ["one", "two"]\n[two]\nname = "Two"',
            ("two", "names one and two"),
        ),
    ],
)
def test_bad_device_file_is_refused_in_one_line(tmp_path: Path, old: str, new: str, named: tuple[str, ...]) -> None:
    path = tmp_path / "devices.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(BadInput) as caught:
        devices.load(path)
    assert_names(caught.value, path, named)


def test_a_name_two_devices_claim_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    path.write_text(GOOD + GOOD.replace("[one", "[two").replace('name = "One"', 'name = "Two"\naliases = ["one"]'))
    with refused("devices.toml", '"one"', "two"):
        devices.load(path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[m]\nname = "M"', ("m", "facts", "missing")),
        ('[m]\nname = "M"\nfacts = {}', ("m", "no facts", "unit and source")),
        ('[m]\nname = "M"\nsize = 3', ("m", 'unknown key "size"')),
        ('[m]\nname = "M"\n[m.facts]\nffn = 17408', ("m", "ffn = 17408", "object")),
        (
            '[m]\nname = "M"\n[m.facts]\nffn = { unit = "elements", value = 8 }',
            ("m", "ffn", "value, source and kind"),
        ),
        (
            '[m]\nname = "M"\n[m.facts]\nffn = { unit = "elements", value = 8, source = "w", kind = "recorded" }\n'
            '[m.shapes]\nup = { N = "fnn" }',
            ("m", "shapes.up", 'N = "fnn"', 'did you mean "ffn"'),
        ),
        (
            '[m]\nname = "M"\n[m.facts]\nffn = { unit = "GB", value = 8, source = "w", kind = "recorded" }\n'
            '[m.shapes]\nup = { N = "ffn" }',
            ("m", "shapes.up", "N = 8 GB"),
        ),
    ],
)
def test_bad_model_file_is_refused_in_one_line(tmp_path: Path, text: str, named: tuple[str, ...]) -> None:
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        models.load(path)
    assert_names(caught.value, path, named)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with refused("nowhere.toml"):
        devices.load(tmp_path / "nowhere.toml")


NAMES = {  # as nvidia-smi and torch report them
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie",
    "NVIDIA A10": "a10",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA B200": "b200",
    "NVIDIA B300 SXM6 AC": "b300",
    "NVIDIA GB200": "gb200",
    "NVIDIA GB10": "gb10",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 5080": "rtx-5080",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx-pro-6000",
    "NVIDIA RTX A6000": "rtx-a6000",
    "AMD Instinct MI300X": "mi300x",
}


def test_gpus_are_known_by_the_names_they_report() -> None:
    assert {name: devices.get(name).id for name in NAMES} == NAMES
    for name in NAMES:
        device = devices.get(name)
        assert device.memory_bandwidth
        assert {"bf16", "f32"} <= device.peaks.keys()
        assert device.peaks["bf16"].base <= device.peaks.get("fp8", device.peaks["bf16"]).base
    with refused("data/devices.toml", "mi300x is no CUDA GPU", remedy="lab roofline FAMILY --device mi300x"):
        _ = devices.get("mi300x").capability


def test_a_gpu_of_no_list_is_read_from_what_its_driver_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = 'NVIDIA "Odd" L20'
    text = devices.reported(name, {"sms": (92, "SMs"), "compute_capability": (8.9, "capability")})
    (tmp_path / "profiles" / "nvidia-odd-l20").mkdir(parents=True)
    (tmp_path / "profiles" / "nvidia-odd-l20" / devices.DRIVER).write_text(text)
    with refused("GPU", "Odd"):
        devices.get(name, "GPU")
    monkeypatch.setenv(own.VARIABLE, str(tmp_path))
    odd = devices.get(name)
    assert (odd.id, odd.capability, odd.knows("bf16")) == ("nvidia-odd-l20", (8, 9), False)
    assert odd.facts["sms"].value == 92
    with refused(
        "profiles/nvidia-odd-l20/device.toml", "no memory_bandwidth", remedy="nvidia-odd-l20.memory_bandwidth"
    ):
        _ = odd.bandwidth
    (tmp_path / own.DEVICES).write_text(text.replace("92", "93"))  # one's own list comes last
    assert devices.get("nvidia-odd-l20").sms != odd.sms
    (tmp_path / own.DEVICES).write_text(text.replace("[nvidia-odd-l20]", "[mine]"))
    with refused("devices.toml", 'mine: "NVIDIA', "names nvidia-odd-l20 of", remedy="call it [nvidia-odd-l20]"):
        devices.ids()


def test_a_device_of_one_s_own_takes_no_listed_name_and_is_told_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(own.VARIABLE, str(tmp_path))
    mine = GOOD.replace("[one", "[h200")
    for text, word in ((mine, "h200"), (GOOD.replace('"One"', '"One"\naliases = ["H100"]'), "H100")):
        (tmp_path / own.DEVICES).write_text(text)
        devices._read.cache_clear()
        with refused("devices.toml", f'"{word}" names {word.lower()} of data/devices.toml already', remedy="another"):
            devices.ids()
    (tmp_path / own.DEVICES).write_text(GOOD.replace("[one.peak.bf16]", "[one.peak.f32]"))
    devices._read.cache_clear()
    assert main.main(["roofline", "gdn", "--device", "one"]) == 0
    assert capsys.readouterr().out.startswith(f"One: floors from the datasheet's bandwidth and peaks ({tmp_path}/dev")
    for ask in (lambda one: one.peak("bf16"), lambda one: one.fact("vram")):
        with refused(str(tmp_path / own.DEVICES), "one"):
            ask(devices.get("one"))


def test_a_gpu_without_cuda_is_told_what_there_is_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["nvfp4", "--shape", "K=5120", "M=8", "N=17408"]
    for command in (["routes", *words], ["predict", "step-lp9"]):
        assert main.main([*command, "--device", "mi300x"]) == 2
        said = capsys.readouterr().err
        assert "mi300x is no CUDA GPU" in said
        assert "`lab judge`" in said
        assert "compute_capability" not in said
    assert main.main(["roofline", "nvfp4", "--device", "mi300x"]) == 0
