"""How families are found: by looking into a folder. Small families are written to a temporary folder and loaded there.

Hugging Face's package of the same name is played by an empty one that comes first on the path of a child process, as
it would come from site-packages: a regular package anywhere on the path wins over our namespace folder.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from kernels.common import Candidate, Needs
from lab.base.errors import REPOSITORY
from lab.check import families
from lab.cli import doctor, main
from tests.refused import held, refused

CANDIDATE = """from kernels.common import Candidate
CANDIDATES = (Candidate("{name}", "f32", lambda args, out: None),)
"""
CASES = """
import torch
from kernels.common import Tolerance, Workload
{workloads}
ACTIVATIONS, IN_PLACE = ("y",), ()
def inputs(workload, seed, device):
    return {{"y": torch.ones(workload["M"])}}
def outputs(workload, inputs):
    return {{"y": torch.zeros(workload["M"])}}
def tolerance(workload, precision):
    return {{"y": Tolerance(1e-6, 1e-5, "")}}
"""
FILES = {
    "__init__.py": 'TITLE = "Toy"\n',
    "reference.py": "def reference(inputs):\n    return inputs\n",
    "cost.py": "def cost(workload, precision):\n    return None\n",
    "cases.py": CASES.format(workloads='WORKLOADS = [Workload(f"m{m}", {"M": m}) for m in (63, 75)]'),
    "torch_plain.py": CANDIDATE.format(name="plain"),
    "triton_fast.py": CANDIDATE.format(name="fast"),
    "peers/absent.py": "import no_such_library\n",
    "helpers.py": "raise RuntimeError('no candidate module, never imported')\n",
}


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A kernels/ folder with the family `toy`, in the place of ours; `kernels.common` stays the real one."""
    folder = tmp_path / "kernels"
    for name, text in FILES.items():
        write(folder / "toy" / name, text)
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "kernels"}
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(families, "FOLDER", folder)
    for known in (families.load, families.bare, families.every):
        known.cache_clear()
    importlib.invalidate_caches()
    yield folder
    for name in [n for n in sys.modules if n.split(".")[0] == "kernels" and n not in before]:
        del sys.modules[name]
    for known in (families.load, families.bare, families.every):
        known.cache_clear()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_folder_is_a_family(kernels: Path) -> None:
    write(kernels / "notes" / "README.md", "no family: it has no __init__.py")
    assert families.names() == ["toy"]
    family = families.load("toy")
    assert (family.title, list(family.candidates)) == ("Toy", ["plain", "fast"])
    assert family.unavailable == {"peers/absent": "No module named 'no_such_library'"}
    assert family.peers == ("plain",)  # from torch_plain.py
    assert family.reference({}) == {}
    assert family.workload("m75")["M"] == 75


def test_peers_are_the_libraries_that_can_be_imported(kernels: Path) -> None:
    write(kernels / "toy" / "peers" / "rival.py", CANDIDATE.format(name="rival"))
    family = families.load("toy")
    assert family.peers == ("plain", "rival")
    assert family.modules == {"plain": "torch_plain", "fast": "triton_fast", "rival": "peers/rival"}
    assert set(family.candidates) == {"rival", "plain", "fast"}
    assert list(family.unavailable) == ["peers/absent"]


def test_controls_are_found_by_name_among_the_others(kernels: Path) -> None:
    write(kernels / "toy" / "controls" / "triton_control.py", CANDIDATE.format(name="control"))
    write(kernels / "toy" / "controls" / "__init__.py", "")
    write(kernels / "toy" / "controls" / "helpers.py", "raise RuntimeError('no candidate module, never imported')\n")
    write(kernels / "toy" / "peers" / "__init__.py", "")
    family = families.load("toy")
    assert list(family.candidates) == ["plain", "control", "fast"]
    assert family.modules["control"] == "controls/triton_control"
    assert family.peers == ("plain",)


@pytest.mark.parametrize("file", families.NEEDED_FILES)
def test_folder_without_a_needed_file(file: str, kernels: Path) -> None:
    (kernels / "toy" / file).unlink()
    with refused("kernels/toy", file, remedy="reference, cost and cases"):
        families.load("toy")


def test_two_candidates_of_one_name(kernels: Path) -> None:
    write(kernels / "toy" / "triton_other.py", CANDIDATE.format(name="plain"))
    with refused("triton_other.py", '"plain"', remedy="rename"):
        families.load("toy")


def test_unknown_words_name_the_nearest(kernels: Path) -> None:
    with refused("kernels", '"tyo"', remedy='"toy"'):
        families.load("tyo")
    family = families.load("toy")
    with refused("kernels/toy", '"fats"', remedy='"fast"'):
        family.candidate("fats")
    with refused("toy/peers/absent.py", "No module named 'no_such", remedy="lab doctor"):
        family.candidate("absent")
    with refused("kernels/toy/cases.py", '"m36"', remedy='"m63"'):
        family.workload("m36")


BROKEN = {
    "no such package": ("import tritn\n", "ModuleNotFoundError: No module named 'tritn'"),
    "no such name": ("from kernels.common import Candidat\n", "ImportError: cannot import name 'Candidat'"),
    "no such file of ours": (
        "from kernels.toy.ops import f\n",
        "ModuleNotFoundError: No module named 'kernels.toy.ops'",
    ),
    "misspelt": (CANDIDATE.format(name="x").replace("CANDIDATES", "CANDIDATS"), "no CANDIDATES"),
    "no tuple": (CANDIDATE.format(name="x").replace(",)\n", ")\n"), "TypeError: 'Candidate' object is not iterable"),
    "syntax": ("def run(:\n", "SyntaxError: invalid syntax (triton_mine.py, line 1)"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_mistake_in_a_candidates_file_is_no_missing_library(name: str, kernels: Path) -> None:
    text, why = BROKEN[name]
    write(kernels / "toy" / "triton_mine.py", text)
    family = families.load("toy")
    assert family.broken == ["triton_mine"]
    assert why in family.unavailable["triton_mine"]
    assert list(family.candidates) == ["plain", "fast"]
    with refused("kernels/toy", '"mien"', remedy="triton_mine, peers/absent cannot be imported"):
        family.candidate("mien")


@pytest.mark.parametrize("text", ["import triton.no_such_module\n", 'import cupie\nNEEDS = ("cupie",)\n'])
def test_an_optional_library_of_our_own_file_may_be_absent(text: str, kernels: Path) -> None:
    write(kernels / "toy" / "triton_mine.py", text)
    family = families.load("toy")
    assert "triton_mine" in family.unavailable
    assert family.broken == []


def test_a_peer_that_wants_another_file_of_ours_is_broken(kernels: Path) -> None:
    write(kernels / "toy" / "peers" / "helper.py", "FORMS = ()\n")  # no candidates, and none meant
    write(kernels / "toy" / "peers" / "rival.py", "import kernels.toy.no_such_file\n")
    write(kernels / "toy" / "peers" / "silent.py", "from kernels.common import Candidate\nCANDIDATE = ()\n")
    assert families.load("toy").broken == ["peers/rival", "peers/silent"]


def test_a_role_that_is_none(kernels: Path) -> None:
    write(kernels / "toy" / "cases.py", FILES["cases.py"].replace('{"M": m})', '{"M": m}, "chek")'))
    with refused("kernels/toy/cases.py", 'm63: role = "chek"', remedy='"check"'):
        families.load("toy")


# name -> (file, old, new, command, what is said of it)
MISTAKES = {
    "inputs": ("cases.py", "    return {", "    1 / 0\n    return {", "check", "in inputs(), line 7: ZeroDiv"),
    "outputs": ("cases.py", '    return {"y": torch.z', '    no["y"] = (torch.z', "check", "SyntaxError"),
    "tolerance": ("cases.py", "Tolerance(1e-6, ", "Tolerance(", "check", "in tolerance(), line 11: TypeError"),
    "reference": ("reference.py", "return inputs", "return inputs['z']", "check", "in reference(), line 2: KeyError"),
    "cost": ("cost.py", "return None", "return workload['K'] / 2", "roofline", "in cost(), line 2: KeyError: 'K'"),
    "a package": ("cost.py", "def", "import tritn\ndef", "check", "at import, line 1: ModuleNotFoundError"),
    "syntax": ("reference.py", "def reference(", "def reference(:", "check", "line 1: SyntaxError: invalid syntax"),
    "a name": ("cases.py", "def tolerance(", "def tolerence(", "check", 'it has no "tolerance"'),
    "a title": ("__init__.py", "TITLE", "TITEL", "check", 'it has no "TITLE"'),
    "a pipe": ("cost.py", "None", "__import__('kernels.common').common.Cost(1, 1, 'fp9')", "roofline", 'pipe = "fp9"'),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_familys_own_file_is_one_line(
    name: str, kernels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, old, new, command, said = MISTAKES[name]
    write(kernels / "toy" / file, FILES[file].replace(old, new, 1))
    assert main.main([command, "toy"]) == 2
    held(capsys.readouterr().err, f"kernels/toy/{file}", said)


def test_what_a_family_did_not_throw_keeps_its_traceback(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def thrown() -> None:
        raise KeyError("ours")

    monkeypatch.setattr(families, "interpret_on_cpu", thrown)
    with pytest.raises(KeyError, match="ours"):
        main.main(["check", "toy"])


SHAPES = """
from kernels.common import Workload
def w(m, dtype, role, **more):
    return Workload(f"m{m}{dtype}", {"M": m, "K": 64, "dtype": dtype, "norm": m % 2, **more}, role)
WORKLOADS = [w(63, "f32", "check"), w(8, "bf16", "measure"), w(9, "bf16", "measure"), w(5, "bf16", "check", page=16)]
"""


def test_a_workload_may_be_axes(kernels: Path) -> None:
    write(kernels / "toy" / "cases.py", CASES.format(workloads=SHAPES))
    family = families.load("toy")
    found = family.workload("M=70 norm=1")  # the rest as the real models' shapes have it
    assert (found.id, found.axes) == ("M=70 norm=1", {"M": 70, "K": 64, "dtype": "bf16", "norm": 1})
    assert family.workload("M=70 dtype=f32 K=128").axes == {"M": 70, "K": 128, "dtype": "f32", "norm": 0}
    assert family.workload("page=32 M=5").axes["page"] == 32
    for text, what, remedy in (
        ("m=70", 'named "m"', "valid: K, M"),
        ("M=70 dtyp=f32", '"dtyp"', '"dtype"'),
        ("M=70 dtype=f23", "f23", '"f32"'),
        ("K=64", "axis M", "M=SIZE"),
        ("M=0", "M=0", "above zero"),
        ("M=1.5", "M=1.5", "above zero"),
        ("M=1 M=2", "each once", "valid: M, K"),
    ):
        with refused(f"toy: {text}", what, remedy=remedy):
            family.workload(text)


def test_our_own_families_load() -> None:
    assert families.importable() == ""
    for name in families.names():
        family = families.load(name)
        assert family.candidates
        assert len({w.id for w in family.cases.WORKLOADS}) == len(family.cases.WORKLOADS)


# Hugging Face's package of our name -----------------------------------------------------------------------------------


BOTH = """
import sys
from lab.base.errors import REPOSITORY
from lab.check import families
from lab.cli.main import main
for arguments in (["doctor", "--json"], ["check", families.names()[0]]):
    print("", main(arguments), sep="\\x00", end="\\x00", flush=True)
"""


@pytest.mark.slow
def test_the_shadow_is_reported_by_doctor_and_refused_by_check(tmp_path: Path) -> None:
    write(tmp_path / "kernels" / "__init__.py", "")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", BOTH]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)
    printed, status, checked, refused_with, _ = done.stdout.split("\0")
    assert (status, checked, refused_with) == ("1", "", "2")
    found = {f["what"]: f for f in json.loads(printed)}
    assert found["kernels"]["status"] == "broken"
    assert "another package of that name" in found["kernels"]["detail"]
    assert "uninstall Hugging Face's package `kernels`" in found["kernels"]["remedy"]
    assert [f["what"] for f in found.values() if f["status"] == "broken"] == ["kernels"]
    line = str(doctor.Finding(**found["kernels"]))
    assert line.startswith("broken  kernels ")
    assert "-> run from the repository, or uninstall" in line
    held(done.stderr, "lab: kernels", "another package of that name", "uninstall that package")


def test_doctor_without_the_shadow(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor"]) == 0
    assert f"families: {', '.join(families.names())}" in capsys.readouterr().out


# What a candidate needs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needs", "capability", "said"),
    [
        (Needs(), None, ""),
        (Needs(), (9, 0), ""),
        (Needs(capability=(9, 0)), (9, 0), ""),
        (Needs(capability=(9, 0)), (12, 1), ""),
        (Needs(capability=(9, 0)), None, "needs a GPU (sm_90 or newer), none is here"),
        (Needs(capability=(9, 0), architecture="sm_90a"), (9, 0), ""),
        (Needs(capability=(9, 0), architecture="sm_90a"), (12, 1), "is for sm_90a alone, this GPU is sm_121"),
        (Needs(capability=(9, 0), architecture="sm_90a"), (8, 0), "needs sm_90 or newer, this GPU is sm_80"),
        (Needs(architecture="sm_90a"), None, "needs a GPU (sm_90a), none is here"),
        (Needs(capability=(12, 1)), (9, 0), "needs sm_121 or newer, this GPU is sm_90"),
        (Needs(packages=("json",)), None, ""),
        (
            Needs(packages=("json", "no_such_package")),
            None,
            "needs the package no_such_package, which is not installed",
        ),
        (Needs(triton="3.6"), None, ""),
        (Needs(triton="3.7.1"), None, "needs Triton 3.7.1 or newer, 3.7.0 is installed"),
        (Needs(triton="3.10"), None, "needs Triton 3.10 or newer, 3.7.0 is installed"),
        (Needs(triton="99"), (9, 0), "needs Triton 99 or newer, 3.7.0 is installed"),
    ],
)
def test_unmet(needs: Needs, capability: tuple[int, int] | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.7.0+git1234")
    said = said.replace("3.7.0 is", "3.7.0+git1234 is")
    assert families.unmet(Candidate("c", "f32", lambda args, out: None, needs), capability) == said


def test_sources_for_one_architecture_skip_their_candidates_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """In check and measure by `unmet`, in `lab doctor` a line for each reason."""
    only = {
        f"{name}/{c.name}": families.unfit(c, (12, 1))
        for name in families.names()
        for c in families.load(name).candidates.values()
        if c.needs.architecture
    }
    assert len(only) > 5
    assert {said.split(",")[0] for said in only.values()} == {"is for sm_90a alone"}
    monkeypatch.setattr(families, "gpu_capability", lambda: (12, 1))
    monkeypatch.setattr(doctor, "_gpu", lambda: doctor.Finding("GPU", "ok", ""))
    lines = {f.detail.partition(": ")[2]: f for f in doctor.examine() if f.what == "candidates"}
    named = lines["is for sm_90a alone, this GPU is sm_121"].detail
    assert [name for name in only if name not in named] == []


def test_unmet_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # what an absent module looks like to import
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    candidate = Candidate("c", "f32", lambda args, out: None, Needs(triton="3.6"))
    assert families.unmet(candidate, None) == "needs Triton, which is not installed"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("3.6.0", (3, 6, 0)),
        ("3.6.0+cu130", (3, 6, 0)),
        ("3.10", (3, 10)),
        ("2.11.0a0+git1f2e3d", (2, 11, 0)),
        ("3.6.0.post1", (3, 6, 0)),
    ],
)
def test_version_tuple(version: str, expected: tuple[int, ...]) -> None:
    assert families.version_tuple(version) == expected


def test_versions_compare_as_numbers() -> None:
    ordered = ["3.6.0", "3.7.1", "3.9.0", "3.10.0", "10.0"]
    assert sorted(ordered, key=families.version_tuple) == ordered


def test_interpreter_is_asked_for_only_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, before, after in ((None, None, "1"), ((9, 0), None, None), (None, "0", "0")):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        if before is not None:
            monkeypatch.setenv("TRITON_INTERPRET", before)
        monkeypatch.setattr(families, "gpu_capability", lambda capability=capability: capability)
        families.interpret_on_cpu()
        assert os.environ.get("TRITON_INTERPRET") == after


def test_a_change_of_a_source_changes_the_hash_of_its_family_alone(kernels: Path) -> None:
    toy = next(path for path in kernels.iterdir() if path.is_dir())
    other = kernels / "other"
    for name, text in FILES.items():
        write(other / name, text)
    write(kernels / "shared.py", "")
    before = families.sources_hash(toy.name), families.sources_hash("other")
    assert len(before[0]) == 12
    write(toy / "NOTES.md", "notes are no source")
    assert (families.sources_hash(toy.name), families.sources_hash("other")) == before
    for own in ("fast.cu", "controls/triton_slow.py", "peers/rival.py"):
        before = families.sources_hash(toy.name), families.sources_hash("other")
        write(toy / own, "CHANGED\n")
        after = families.sources_hash(toy.name), families.sources_hash("other")
        assert (after[0] != before[0], after[1] == before[1]) == (True, True)
    for shared in ("shared.py", "shared.cuh", "layer/shared.cuh"):
        last = families.sources_hash("other")
        write(kernels / shared, "CHANGED\n")
        assert families.sources_hash("other") != last


def test_launches_are_kept_until_a_source_changes(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the families would launch is asked once, elsewhere; another source, capability or package asks again."""
    importlib.import_module("kernels.build_cache")
    monkeypatch.setenv("KILLGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(families, "_refuse_shadow", lambda: None)
    write(tmp_path / "packages" / "one" / "__init__.py", "")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages")])
    asked: list[tuple[str, ...]] = []

    def process(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(tuple(command[-2:]))
        told = families.Launches((), {}, ("w",), {"c": "f32"}, {"c": {"w": f"launch {len(asked)}"}})
        Path(next(word for word in command if word.endswith(".json"))).write_bytes(msgspec.json.encode({"toy": told}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(families.subprocess, "run", process)

    def launches(capability: tuple[int, int] = (9, 0), shape: str = "") -> str | None:
        families.every.cache_clear()  # another process
        return families.launches("toy", capability, shape).configs["c"]["w"]

    assert [launches(), launches()] == ["launch 1", "launch 1"]
    assert launches((12, 1)) == "launch 2"
    assert asked == [("9", "0"), ("12", "1")]
    write(kernels / "toy" / "triton_fast.py", "CANDIDATES = ()\n")
    assert [launches(), launches()] == ["launch 3", "launch 3"]
    write(tmp_path / "packages" / "two" / "__init__.py", "")
    assert launches() == "launch 4"
    # A notebook, a job of it and a command have the checkout and the packages on their paths in other orders.
    monkeypatch.setattr(sys, "path", [str(families.REPOSITORY), *sys.path, *sys.path])
    assert launches() == "launch 4"
    assert launches(shape="M=8 N=1") == "launch 5"
    assert asked[-1] == ("toy", "M=8 N=1")
    with refused("kernels", '"tyo"', remedy="toy"):
        families.launches("tyo", (9, 0))


def test_families_that_cannot_be_described_say_so_in_one_line(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And who judges has imported none of their candidates."""
    monkeypatch.setenv("KILLGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(families, "_refuse_shadow", lambda: None)
    monkeypatch.setattr(families, "REPOSITORY", tmp_path)
    write(tmp_path / "lab" / "__init__.py", "")
    write(tmp_path / "lab" / "check" / "__init__.py", "")
    write(tmp_path / "lab" / "check" / "families.py", "def describe(*_): raise ValueError('candidate of mine')\n")
    with refused("kernels", "ValueError: candidate of mine", remedy="lab doctor"):
        families.launches("toy", (9, 0))


@pytest.mark.slow
def test_judging_and_planning_import_no_candidate(tmp_path: Path) -> None:
    """Also the first time, when what the families would launch is asked anew."""
    program = """
import sys
from lab.bench import measure
from lab.card import phases
from lab.cli import main
main.main(["judge", "q8-paths", "--evidence", "measured"])
measure.plan(phases.card("q8-paths"), peers=True)
from lab.check import families
modules = {f"kernels.{name}.{p.relative_to(families.FOLDER / name).with_suffix('').as_posix().replace('/', '.')}"
           for name in families.names() for p in families.candidate_files(name)}
print(sorted(modules & set(sys.modules)), len(modules) > 20)
"""
    environment = os.environ | {"KILLGATE_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1:] == ["[] True"], done.stdout + done.stderr


@pytest.mark.parametrize("name", families.names())
def test_every_module_of_a_kernel_folder_is_imported(name: str) -> None:
    """`lab check` and `lab verdicts` end with 1 where one is not, as for a helper that is named like a candidate."""
    assert families.load(name).broken == []
