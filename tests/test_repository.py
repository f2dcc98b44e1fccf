"""The repository's own rules: what a family may import, what lies where, and what no committed file may hold.

A rule that nobody checks is a wish, so each rule of the layout is a test here. A rule is a plain function from a folder
to the list of its violations: the same function runs on this checkout, where it must find none, and on a small tree
with the mistake in it, where it must find that one. Imports are read from the syntax tree and never executed, so a
module that needs a GPU or an absent library is judged as well. What this gives up: an import by a computed name, which
is how `lab` finds the families, is invisible here.
"""

import ast
import csv
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"notebooks", "lab", "kernels", "profiles", "data", "tests", ".ci"}

# What a family may build on; a module of peers/ may also import the library that it adapts.
FAMILY_MAY_IMPORT = {"torch", "triton", "cupy", "numpy", "kernels"}
CANDIDATES = ("triton_", "cuda_", "torch_", "peers.")
WHOLE = {"step", "chained"}  # families that are made of others
FORMAT_OF = {"moe": {"nvfp4"}}  # families whose weights are in another's format
ORDINARY = {"step", "chained"}  # families whose word lab/ needs for something else: steps of a trace, chained files


# Reading -------------------------------------------------------------------------------------------------------------


def python_files(root: Path, folder: str) -> list[Path]:
    return sorted(p for p in (root / folder).rglob("*.py") if "__pycache__" not in p.parts)


@functools.cache  # several rules ask for the same files, and parsing takes longer than most of what they ask
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@functools.cache  # two rules ask for the same files
def imports(path: Path, root: Path) -> frozenset[str]:
    """Every module that a file may import, dotted: `from a import b` gives both a and a.b, as b may be a module."""
    package = path.relative_to(root).parent.parts
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            # The last word first: to write every call's name out takes longer than to parse the file.
            if called == "import_module" and ast.unparse(node.func) in ("importlib.import_module", "import_module"):
                found |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return frozenset(found)


def at_or_under(modules: Set[str], name: str) -> bool:
    """True when `name`, or something inside it, is among the modules."""
    return any(m == name or m.startswith(name + ".") for m in modules)


def families(root: Path) -> set[str]:
    return {p.parent.name for p in (root / "kernels").glob("*/__init__.py")}


def own_files(root: Path) -> list[Path]:
    """The files that are, or would be, committed."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip(f"not a git checkout, so there is no list of its files: {listed.stderr.decode().strip()}")
    return sorted(p for name in listed.stdout.decode().split("\0") if name and (p := root / name).is_file())


# Rules: folder -> violations -----------------------------------------------------------------------------------------


def family_arrows(root: Path) -> list[str]:
    """A family imports its own modules, what kernels/ itself holds and FAMILY_MAY_IMPORT; __init__.py is light."""
    wrong = []
    for path in python_files(root, "kernels"):
        shown, modules = path.relative_to(root), imports(path, root)
        shared = {"common", "cuda", "routing", "timing"}
        own = shared | {shown.parts[1]} if len(shown.parts) > 2 else shared
        tops = {m.split(".")[0] for m in modules}
        others = tops - FAMILY_MAY_IMPORT - set(sys.stdlib_module_names)
        if path.parent.name == "peers":
            others &= FOLDERS
        wrong += [f"{shown} imports {m}" for m in sorted(others)]
        whole = len(shown.parts) > 2 and shown.parts[1] in WHOLE
        others = set() if whole else families(root) - own - FORMAT_OF.get(shown.parts[1], set())
        wrong += [f"{shown} imports kernels.{f}" for f in others if at_or_under(modules, f"kernels.{f}")]
        if path.name == "__init__.py":
            wrong += [f"{shown} imports {m}" for m in sorted(tops & {"torch", "triton", "cupy"})]
    return wrong


def candidates_see_reference(root: Path) -> list[str]:
    """A candidate that reaches its reference, directly or through other modules of its family, checks itself."""
    wrong = []
    for family in sorted(families(root)):
        folder = root / "kernels" / family
        files = [p for place in (folder, folder / "controls", folder / "peers") for p in place.glob("*.py")]
        within = {".".join(p.relative_to(folder).with_suffix("").parts): imports(p, root) for p in files}
        reach = {
            name: {other for other in within if at_or_under(modules, f"kernels.{family}.{other}")}
            for name, modules in within.items()
        }
        for name in sorted(n for n in within if n.removeprefix("controls.").startswith(CANDIDATES)):
            seen, todo = set(), {name}
            while todo:
                seen |= todo
                todo = set().union(*(reach[n] for n in todo)) - seen
            if "reference" in seen:
                wrong.append(f"kernels.{family}.{name} reaches {family}/reference.py through {sorted(seen)}")
    return wrong


def notebook_arrows(root: Path) -> list[str]:
    """Nothing imports a notebook, and a notebook imports no test."""
    return [
        f"{p.relative_to(root)} imports tests"
        for p in python_files(root, "notebooks")
        if at_or_under(imports(p, root), "tests")
    ]


NAMING = {"id", "attr", "arg", "name", "asname", "value"}  # fields of a syntax tree's nodes that may hold a text


@functools.cache
def naming(fields: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(field for field in fields if field in NAMING)


def lab_names_family(root: Path) -> list[str]:
    """A name or a string in lab/ that is a family's word; docstrings may give one as an example, code may not."""
    word = re.compile(rf"\b(?:{'|'.join(sorted(families(root) - ORDINARY)) or '(?!)'})\b")
    wrong = []
    for path in python_files(root, "lab"):
        nodes = [node for node in ast.walk(tree(path)) if naming(node._fields)]
        prose = {id(n.value) for n in nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
        for node in nodes:
            if id(node) in prose:
                continue
            texts = [getattr(node, field) for field in naming(node._fields)]
            wrong += [
                f"{path.relative_to(root)}:{getattr(node, 'lineno', '?')} names {text!r}"
                for text in texts
                if isinstance(text, str) and word.search(text)
            ]
    return wrong


def undocumented(root: Path) -> list[str]:
    """Modules, public classes and public functions of lab/ without a docstring."""

    def public(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith(
                "_"
            ):
                if not ast.get_docstring(node):
                    yield f"{prefix}{node.name}"
                if isinstance(node, ast.ClassDef):
                    yield from public(node.body, f"{prefix}{node.name}.")

    wrong = []
    for path in python_files(root, "lab"):
        module, shown = tree(path), path.relative_to(root)
        wrong += [str(shown)] if not ast.get_docstring(module) else []
        wrong += [f"{shown}: {name}" for name in public(module.body, "")]
    return wrong


def quoted_columns(root: Path) -> list[str]:
    """The recorded figures carry their source's name, not its sentences."""
    wrong = []
    for path in sorted((root / "data").rglob("*.csv")):
        with path.open(newline="") as file:
            if "quote" in next(csv.reader(file), []):
                wrong.append(str(path.relative_to(root)))
    return wrong


def kernels_packages(root: Path) -> list[str]:
    """kernels/ must stay a namespace folder: a package of that name breaks transformers, which imports another one."""
    return [str(p.relative_to(root)) for p in [root / "kernels" / "__init__.py"] if p.exists()]


RULES: tuple[Callable[[Path], list[str]], ...] = (
    family_arrows,
    candidates_see_reference,
    notebook_arrows,
    lab_names_family,
    undocumented,
    quoted_columns,
    kernels_packages,
)

# One mistake each: rule, file, its text, and a word of the violation that must be found.
FAMILY = {"kernels/toy/__init__.py": '"""Toy."""\n', "kernels/other/__init__.py": '"""Other."""\n'}
MISTAKES = (
    (family_arrows, {"kernels/toy/reference.py": "import lab.accuracy\n"}, "lab"),
    (family_arrows, {"kernels/toy/peers/x.py": "import x\nimport lab.accuracy\n"}, "lab"),
    (family_arrows, {"kernels/toy/controls/triton_a.py": "import x\n"}, "imports x"),
    (family_arrows, {"kernels/toy/controls/triton_a.py": "from kernels.other import cases\n"}, "kernels.other"),
    (family_arrows, {"kernels/toy/cases.py": "from kernels.other import cases\n"}, "kernels.other"),
    (family_arrows, {"kernels/toy/cases.py": "import pandas\n"}, "pandas"),
    (family_arrows, {"kernels/toy/__init__.py": "import torch\n"}, "torch"),
    (family_arrows, {"kernels/common.py": "from kernels.toy import cases\n"}, "kernels.toy"),
    (
        candidates_see_reference,
        {"kernels/toy/triton_a.py": "from .reference import f\n", "kernels/toy/reference.py": ""},
        "triton_a",
    ),
    (
        candidates_see_reference,
        {
            "kernels/toy/torch_a.py": "from kernels.toy import pack\n",
            "kernels/toy/pack.py": "from kernels.toy.reference import f\n",
            "kernels/toy/reference.py": "",
        },
        "torch_a",
    ),
    (
        candidates_see_reference,
        {
            "kernels/toy/controls/cuda_a.py": "from kernels.toy.controls import pack\n",
            "kernels/toy/controls/pack.py": "from ..reference import f\n",
            "kernels/toy/reference.py": "",
        },
        "controls.cuda_a",
    ),
    (
        candidates_see_reference,
        {"kernels/toy/peers/x.py": "from kernels.toy import reference\n", "kernels/toy/reference.py": ""},
        "peers.x",
    ),
    (notebook_arrows, {"notebooks/story.py": "from tests import helpers\n"}, "story"),
    (lab_names_family, {"lab/card/gate.py": "f = 'toy'\n"}, "toy"),
    (lab_names_family, {"lab/card/gate.py": "print(f'kernels/toy/{1}')\n"}, "toy"),
    (lab_names_family, {"lab/card/gate.py": "toy = 1\n"}, "toy"),
    (lab_names_family, {"lab/card/gate.py": "def toy(): ...\n"}, "toy"),
    (undocumented, {"lab/card/gate.py": '"""Gates."""\ndef judge(): ...\n'}, "judge"),
    (undocumented, {"lab/card/gate.py": '"""Gates."""\nclass A:\n    """A."""\n    def b(self): ...\n'}, "A.b"),
    (undocumented, {"lab/card/gate.py": "x = 1\n"}, "gate"),
    (quoted_columns, {"data/recorded/figures.csv": "id,quote\n"}, "figures"),
    (kernels_packages, {"kernels/__init__.py": ""}, "__init__"),
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Callable[[Path], list[str]]) -> None:
    assert "\n".join(rule(ROOT)) == ""


@pytest.mark.parametrize(
    ("rule", "files", "word"), MISTAKES, ids=[f"{m[0].__name__}-{i}" for i, m in enumerate(MISTAKES)]
)
def test_rule_finds_mistake(
    rule: Callable[[Path], list[str]], files: dict[str, str], word: str, tmp_path: Path
) -> None:
    for name, text in {**FAMILY, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = rule(tmp_path)
    assert len(found) == 1
    assert word in found[0]


def test_rules_see_this_checkout() -> None:
    """A rule over an empty list of files would hold for ever."""
    assert {"kernels/common.py", "lab/base/errors.py"} <= {
        str(p.relative_to(ROOT)) for folder in ("kernels", "lab") for p in python_files(ROOT, folder)
    }
    assert families(ROOT)


# What is, or would be, committed -------------------------------------------------------------------------------------

# Absolute paths of somebody's machine, and the addresses of package registries. Each pattern is written so that it
# does not match its own text here. The slash first: to a letter that it begins with a search jumps.
MACHINE_PATH = re.compile(r"/(?:(?<=^/)|(?<=[^A-Za-z0-9_./-]/))(?:root|work|farm|mnt|home/[A-Za-z]+|Users/[A-Za-z]+)/")
REGISTRY = re.compile(
    r"\b(?:pypi\.org|pythonhosted\.org|download\.pytorch\.org|conda\.anaconda\.org|registry\.npmjs\.org|ghcr\.io"
    r"|docker\.io|nvcr\.io|quay\.io)\b|https?://[^\s\"']+/(?:simple|whl)\b"
)


def lines_with(pattern: re.Pattern[str], files: list[Path], root: Path) -> list[str]:
    """file:line of every match in the text files among `files`; a file that is not UTF-8 is taken for binary."""
    wrong = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        lines = text.splitlines() if pattern.search(text) else []
        wrong += [
            f"{path.relative_to(root)}:{n}: {line[:100]}" for n, line in enumerate(lines, 1) if pattern.search(line)
        ]
    return wrong


def test_folders() -> None:
    """The top level holds exactly the folders of the design; an empty one counts while it is being filled."""
    files = [p.relative_to(ROOT).parts for p in own_files(ROOT)]
    assert {parts[0] for parts in files if len(parts) > 1} - FOLDERS == set()
    assert {name for name in FOLDERS if not (ROOT / name).is_dir()} == set()


@pytest.mark.parametrize("pattern", [MACHINE_PATH, REGISTRY], ids=["machine_path", "registry"])
def test_no_committed_file_holds(pattern: re.Pattern[str]) -> None:
    files = own_files(ROOT)
    assert ROOT / "pyproject.toml" in files
    assert "\n".join(lines_with(pattern, files, ROOT)) == ""


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        (MACHINE_PATH, ("see ", "/ho", "me/ada/model")),
        (MACHINE_PATH, ("/ro", "ot/x")),
        (MACHINE_PATH, ('"/wo', 'rk/x"')),
        (REGISTRY, ("index-url = https://", "py", "pi.org/")),
        (REGISTRY, ("--index-url https://example.com/", "simple")),
        (REGISTRY, ("https://download.", "pytorch.org/x")),
    ],
)
def test_pattern_finds(pattern: re.Pattern[str], parts: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("fine\n" + "".join(parts) + "\n")
    (tmp_path / "b.md").write_text("/usr/lib/x, a/work/b, kernels/home/x, https://example.com/paper.pdf\n")
    found = lines_with(pattern, [tmp_path / "a.md", tmp_path / "b.md"], tmp_path)
    assert len(found) == 1
    assert found[0].startswith("a.md:2:")
