"""The installation: pyproject.toml, environment.yml and .ci/install.py say the same, and the script refuses in time.

The script runs before there is an environment, so it is loaded here from its path. pip is replaced by canned answers:
what is tested is the decision. The downloads themselves are exercised by every `make test` on a fresh machine.
"""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from lab.cli import doctor
from lab.row import store

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PYPROJECT["optional-dependencies"]


def conda_requirements(text: str) -> tuple[list[str], list[str]]:
    """The pip requirements of environment.yml: those in force, and those in comments (the other variant)."""
    pip = next(entry["pip"] for entry in yaml.safe_load(text)["dependencies"] if isinstance(entry, dict))
    return pip, re.findall(r"^ *# - (.+)$", text, flags=re.MULTILINE)


def unexplained(text: str) -> list[str]:
    """Requirements in pyproject.toml without a comment on the line above."""
    lines = [line.strip() for line in text.splitlines()]
    wanted = re.compile(r'(?:requires = \[)?"[A-Za-z0-9_.-]+ *[=<>~!]=?|requires-python')
    return [line for above, line in zip(["", *lines], lines, strict=False) if wanted.match(line) and above[:1] != "#"]


def test_conda_environment_in_step() -> None:
    active, commented = conda_requirements((ROOT / "environment.yml").read_text())
    everywhere = [r for r in PYPROJECT["dependencies"] if not r.startswith(("torch", "triton"))]
    gpu_build = [r for r in PYPROJECT["dependencies"] if r.startswith(("torch", "triton"))]
    assert active == EXTRAS["cpu"] + everywhere + EXTRAS["notebooks"] + EXTRAS["test"] + ["-e ."]
    assert commented == gpu_build + EXTRAS["cuda"]
    # What only `make browser` and a PDF need is installed for them.
    assert set(EXTRAS) == {"cpu", "cuda", "notebooks", "test", "browser", "pdf", "cluster", "gguf"}


def test_conda_python_in_step() -> None:
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert f"python{PYPROJECT['requires-python']}" in conda
    assert install_script().PIP in conda


def test_every_requirement_has_its_reason() -> None:
    assert unexplained((ROOT / "pyproject.toml").read_text()) == []


@pytest.mark.parametrize("line", ['    "numpy>=2,<3",', 'requires = ["setuptools>=77"]', 'requires-python = ">=3.11"'])
def test_requirement_without_reason_is_found(line: str) -> None:
    assert unexplained(f"dependencies = [\n{line}\n]") == [line.strip()]
    assert unexplained(f"dependencies = [\n# reason\n{line}\n]") == []


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Every statement, without what is in expressions: no import stands there."""
    todo: list[ast.AST] = [tree]
    while todo:
        yield (node := todo.pop())
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, field, ())
            todo += inner if isinstance(inner, list) else ()


def undeclared(root: Path, requirements: list[str]) -> set[str]:
    """Packages that lab/, tests/ or notebooks/ import and no requirement names."""
    declared = {re.split(r"[^A-Za-z0-9_.-]", r)[0].lower().replace("-", "_") for r in requirements}
    # Import name unlike the distribution's; and what is optional by design, imported behind a check.
    declared |= {"yaml"} if "pyyaml" in declared else set()
    declared |= {"pil"} if "pillow" in declared else set()
    declared |= {"markupsafe"} if "jinja2" in declared else set()  # whose escaping it is
    declared |= {"packaging"} if "pytest" in declared else set()  # which brings it
    declared |= {"ipython"} if "ipykernel" in declared else set()  # which is its kernel, and brings it
    declared |= {"cupy", "pynvml", "playwright"} | {"lab", "kernels", "tests"} | set(sys.stdlib_module_names)
    found: set[str] = set()
    for path in (p for folder in ("lab", "tests", "notebooks") for p in (root / folder).rglob("*.py")):
        for node in statements(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return {name for name in found if name.lower() not in declared}


def test_every_import_is_declared(tmp_path: Path) -> None:
    requirements = PYPROJECT["dependencies"] + [r for extra in EXTRAS.values() for r in extra]
    assert undeclared(ROOT, requirements) == set()
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "a.py").write_text("import torch, yaml, json\nfrom seaborn.axes import norm\n")
    assert undeclared(tmp_path, requirements) == {"seaborn"}
    assert undeclared(tmp_path, ["numpy>=2"]) == {"seaborn", "torch", "yaml"}


# .ci/install.py ------------------------------------------------------------------------------------------------------


def install_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / ".ci" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, standing in a small checkout of its own."""
    module = install_script()
    (tmp_path / ".ci").mkdir()
    for name in ("pyproject.toml", ".ci/install.py", ".ci/cpu.lock", ".ci/cuda.lock"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.setattr(module, "ROOT", str(tmp_path))
    monkeypatch.setattr(module, "VENV", str(tmp_path / ".venv"))
    monkeypatch.setattr(module, "VENV_PYTHON", str(tmp_path / ".venv/bin/python"))
    monkeypatch.setattr(module, "STAMP", str(tmp_path / ".venv/killgate-stamp"))
    for name in module.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return module


def pip_would_install(monkeypatch: pytest.MonkeyPatch, script: ModuleType, *packages: str) -> list[list[str]]:
    """Let pip answer with a report of these packages; returns the list in which its commands will be found."""
    commands: list[list[str]] = []
    report = {"install": [{"metadata": {"name": p, "version": "2.13.0"}} for p in packages]}

    def run(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=0, stdout=json.dumps(report))

    monkeypatch.setattr(script, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
    return commands


def test_key_follows_contents_not_times(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    key, pyproject = script.key(False), Path(script.ROOT, "pyproject.toml")
    os.utime(pyproject, (0, 0))
    assert script.key(False) == key
    assert script.key(True) != key
    monkeypatch.setenv("TORCH_INDEX", "somewhere")
    assert script.key(False) != key
    monkeypatch.delenv("TORCH_INDEX")
    pyproject.write_text(pyproject.read_text() + "\n")
    assert script.key(False) != key


def test_second_run_installs_nothing(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(script, "has_gpu", lambda: False)
    monkeypatch.setattr(script, "refuse_cuda_build", lambda *_: None)
    monkeypatch.setattr(script, "pip", lambda *arguments: calls.append(" ".join(arguments)))

    def make_venv() -> None:
        Path(script.VENV, "bin").mkdir(parents=True, exist_ok=True)
        python = Path(script.VENV_PYTHON)
        python.touch()
        python.chmod(0o755)

    monkeypatch.setattr(script, "make_venv", lambda _: make_venv())
    script.main()
    by_lock = f"install -qq --constraint {script.ROOT}/.ci/cpu.lock --editable"
    assert calls == [f"{by_lock} .[cpu,notebooks,test]"]
    script.main()
    assert len(calls) == 1
    Path(script.VENV_PYTHON).unlink()
    script.main()
    assert len(calls) == 2
    script.main(["browser", "pdf"])
    assert calls[2:] == [f"{by_lock} .[browser,pdf]"], "an extra of one target, by the same lock"
    Path(script.ROOT, ".ci", "cpu.lock").write_text("torch==2.13.1\n")
    script.main()
    assert len(calls) == 4, "another lock is another environment"


@pytest.mark.parametrize(
    ("gpu", "variables", "expected"),
    [
        (False, {}, ["asked", "--editable .[cpu,notebooks,test]"]),
        (False, {"TORCH_INDEX": "i"}, ["asked", "cpu.lock --index-url i torch==", "--editable .[cpu,notebooks,test]"]),
        (False, {"LOCK": ""}, ["asked", "install -qq --editable .[cpu,notebooks,test]"]),
        (False, {"LOCK": ".ci/cuda.lock"}, ["asked", "/.ci/cuda.lock --editable .[cpu,notebooks,test]"]),
        (False, {"ALLOW_CUDA_TORCH": "1"}, ["install -qq --editable .[notebooks,test]"]),
        (True, {}, ["/.ci/cuda.lock --editable .[cuda,notebooks,test]"]),
        (True, {"LOCK": ""}, ["install -qq --editable .[cuda,notebooks,test]"]),
        (True, {"TORCH_INDEX": "i"}, ["--index-url i torch>=", "--editable .[cuda,notebooks,test]"]),
    ],
)
def test_choice(
    gpu: bool, variables: dict[str, str], expected: list[str], script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    Path(script.VENV).mkdir()
    monkeypatch.setattr(script, "has_gpu", lambda: gpu)
    monkeypatch.setattr(script, "make_venv", lambda _: None)
    monkeypatch.setattr(script, "refuse_cuda_build", lambda *_: calls.append("asked"))
    monkeypatch.setattr(script, "pip", lambda *arguments: calls.append(" ".join(arguments)))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    script.main()
    assert len(calls) == len(expected)
    for call, words in zip(calls, expected, strict=True):
        assert words in call


def test_cuda_build_is_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = pip_would_install(monkeypatch, script, "torch", "sympy", "triton", "nvidia-cublas", "cuda-bindings")
    with pytest.raises(SystemExit) as ended:
        script.refuse_cuda_build("torch==2.13.0", ["--index-url", "i"])
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    for part in ("2.13.0", "3 more: cuda-bindings, nvidia-cublas, triton", "TORCH_INDEX=", "ALLOW_CUDA_TORCH=1"):
        assert part in line
    assert {"--dry-run", "--use-feature=fast-deps"} <= set(commands[0])
    assert commands[0][-3:] == ["--index-url", "i", "torch==2.13.0"]


@pytest.mark.parametrize("packages", [("torch", "sympy"), ("torch", "triton"), ()], ids=["cpu", "triton", "installed"])
def test_cpu_build_is_accepted(
    packages: tuple[str, ...], script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pip_would_install(monkeypatch, script, *packages) == []
    script.refuse_cuda_build("torch==2.13.0", [])
    assert capsys.readouterr().err == ""


# The locks -----------------------------------------------------------------------------------------------------------

LOCKS = {name: (ROOT / ".ci" / f"{name}.lock").read_text().splitlines() for name in ("cpu", "cuda")}


def released(name: str) -> dict[str, Version]:
    return {package: Version(version) for package, version in (line.split("==") for line in LOCKS[name][1:])}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_names_one_release_of_everything_that_is_asked_for(name: str) -> None:
    """Inside the ranges, in order, and without a word of where it was found."""
    wanted = [r for extra in (name, "notebooks", "test", "browser", "pdf", "cluster") for r in EXTRAS[extra]]
    found = released(name)
    for requirement in map(Requirement, [*PYPROJECT["dependencies"], *wanted, install_script().PIP]):
        held = found[canonicalize_name(requirement.name)]
        assert held in requirement.specifier, f"{requirement} and {held}: make lock"
    assert LOCKS[name][1:] == sorted(set(LOCKS[name][1:]))
    assert [line for line in LOCKS[name] if re.search(r"[:/@]|\+", line)] == []


def test_the_cuda_lock_is_of_the_machine_that_rows_were_measured_on() -> None:
    rows = store.rows(device="h200")
    made = {(r.torch.partition("+")[0], r.triton, r.python.rpartition(".")[0]) for r in rows}
    held = released("cuda")
    assert made == {(str(held["torch"]), str(held["triton"]), install_script().MEASURED_PYTHON)}


def test_locks_are_what_pip_answers(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"install": [{"metadata": {"name": n, "version": v}} for n, v in (("Torch", "2.13.0+cpu"), ("a_b", "1"))]}
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=0, stdout=json.dumps(report))

    monkeypatch.setattr(script, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
    monkeypatch.setattr(script, "make_venv", lambda _: None)
    script.main(["lock"])
    for name, python in (("cpu", f"3.{sys.version_info[1]}"), ("cuda", script.MEASURED_PYTHON)):
        head, *lines = (Path(script.ROOT) / ".ci" / f"{name}.lock").read_text().splitlines()
        assert lines == ["a-b==1", "torch==2.13.0"]
        assert f"Python {python} " in head
    assert set(EXTRAS["cpu"]) <= set(commands[0])
    assert {*script.MEASURED, *EXTRAS["cuda"]} <= set(commands[1])


def test_an_index_without_a_release_of_the_lock_is_named_with_the_way_out(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script.subprocess, "call", lambda *_, **__: 1)
    with pytest.raises(SystemExit) as ended:
        script.pip("install", "--constraint", f"{script.ROOT}/.ci/cpu.lock", "--editable", ".")
    line = capsys.readouterr().err
    assert (ended.value.code, line.count("\n")) == (2, 1)
    assert ".ci/cpu.lock" in line
    assert "LOCK=" in line
    monkeypatch.setenv("LOCK", "nowhere.lock")
    with pytest.raises(SystemExit):
        script.main()
    assert "nowhere.lock" in capsys.readouterr().err


def test_doctor_names_each_package_that_drifts(tmp_path: Path) -> None:
    lock = tmp_path / "cpu.lock"
    ours = f"torch=={torch.__version__.partition('+')[0]}\n"
    lock.write_text(f"# head\nmsgspec==0.1\nnumpy==0.2\nno-such-package==1\n{ours}")
    found = doctor.drift(lock)
    assert [(f.what, f.status) for f in found] == [("msgspec", "drift"), ("numpy", "drift")]
    assert "0.1" in found[0].detail
    assert msgspec.__version__ in found[0].detail
    lock.write_text(ours)
    assert [(f.what, f.status) for f in doctor.drift(lock)] == [("lock", "ok")]
    assert doctor.drift(tmp_path / "none.lock") == []


def test_old_python_gets_a_sentence(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 12))
    with pytest.raises(SystemExit) as ended:
        script.check_interpreter()
    assert ended.value.code == 2
    assert "Python 3.10" in capsys.readouterr().err


def test_missing_venv_names_the_package(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(SystemExit) as ended:
        script.check_interpreter()
    assert ended.value.code == 2
    assert f"apt install python{sys.version_info[0]}.{sys.version_info[1]}-venv" in capsys.readouterr().err
