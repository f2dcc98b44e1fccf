"""The tests that a change can reach: `make changed`, or `python -m tests.changed [BASE]` for the list alone.

A test reaches what it imports, what that imports, and so on; a string that names a module ("lab.check.aot_worker",
"tests.bench.fake_bench:cpu", -m lab) counts as an import of it, and one that is formed around a name
(f"kernels.{name}.cases") as an import of all that it may name. Who reads a file that is no module is found by name:
whoever holds the file's name, or that of a folder it lies in, in a string. A file that nobody names, and what every
test stands on (EVERYTHING), run all tests; so the list may be too long and never too short without a word.

Given up: a name put together from parts that hold no module's name and no folder's. `tests/test_changed.py` holds the
list of deliberate mistakes against this: the test that sees a mistake must be among those that its file reaches.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("lab", "kernels", "tests")
EVERYTHING = ("conftest.py", "pyproject.toml", "environment.yml", "install.py")
# Rules about the files themselves.
ALWAYS = ("tests/test_repository.py", "tests/test_changed.py", "tests/test_mistakes.py")
NAME = re.compile(r"\b(?:lab|kernels|tests)(?:\.\w+)+")
SOURCES = (".cu", ".cuh")


@dataclass
class Module:
    """What one Python file says about others: dotted names, by whether its import alone reaches them.

    strings: its constants; around: the beginnings of names that it completes at run time.
    """

    path: str
    at_import: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)
    around: set[str] = field(default_factory=set)
    strings: list[str] = field(default_factory=list)


def read(path: Path, root: Path) -> Module:
    """A file's module; relative imports made absolute."""
    found = Module(path.relative_to(root).as_posix())
    package = path.relative_to(root).parent.parts

    def visit(node: ast.AST, inside: bool) -> None:
        names = found.later if inside else found.at_import
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            names |= {f"{base}.{alias.name}" for alias in node.names}  # of a module, or a module itself
        elif isinstance(node, ast.JoinedStr):
            start = node.values[0]
            if isinstance(start, ast.Constant) and re.match(r"(?:lab|kernels|tests)\.", str(start.value)):
                found.around.add(str(start.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.strings.append(node.value)
            found.later.update(NAME.findall(node.value))
            if node.value == "lab":  # python -m lab
                found.later.add("lab.__main__")
        inner = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            if not (isinstance(node, ast.Expr) and isinstance(child, ast.Constant)):  # a docstring runs nothing
                visit(child, inner)

    visit(ast.parse(path.read_text(encoding="utf-8"), str(path)), False)
    return found


class Graph:
    """Which test files of a checkout reach which of its files."""

    def __init__(self, root: Path = ROOT) -> None:
        paths = sorted(p for f in FOLDERS for p in (root / f).rglob("*.py") if "__pycache__" not in p.parts)
        self.root = root
        self.modules = {self.name(p.relative_to(root).as_posix()): read(p, root) for p in paths}
        self.tests = sorted(m.path for m in self.modules.values() if Path(m.path).name.startswith("test_"))
        self.families = {p.parent.name for p in (root / "kernels").glob("*/__init__.py")}

    @staticmethod
    def name(path: str) -> str:
        """The dotted name of a Python file."""
        return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def _known(self, dotted: str) -> str | None:
        """The module that a dotted name is or lies in: lab.check.aot.limits is lab.check.aot."""
        while dotted and dotted not in self.modules:
            dotted = dotted.rpartition(".")[0]
        return dotted or None

    def _parents(self, name: str) -> Iterator[str]:
        while "." in name:
            name = name.rpartition(".")[0]
            if name in self.modules:
                yield name

    @functools.cache  # noqa: B019  a graph lives as long as the process
    def reached(self, test: str) -> frozenset[str]:
        """The names of all modules that a test file may run.

        Importing a module runs the packages that it lies in, and of these only what stands outside their functions.
        A test in the folder of one family runs, of the modules named at run time, that family's and those that it or a
        helper beside it names.
        """
        parts = Path(test).parts
        own = parts[2] if parts[:2] == ("tests", "kernels") and len(parts) > 3 and parts[2] in self.families else ""
        helpers = [m for m in self.modules.values() if m.path.startswith(f"tests/kernels/{own}/")] if own else []
        telling = [m for m in helpers if m.path == test or m.path not in self.tests]
        said = {part for m in telling for text in m.strings for part in re.split(r"[/.]", text)}
        named = self.families & {own, *said} if own else self.families
        seen: set[tuple[str, bool]] = set()
        todo = [(self.name(test), True)]
        if (conftest := "tests.conftest") in self.modules:
            todo.append((conftest, True))
        while todo:
            one = todo.pop()
            if one in seen:
                continue
            seen.add(one)
            name, whole = one
            todo += [(parent, False) for parent in self._parents(name)]
            module = self.modules[name]
            for dotted in module.at_import | (module.later if whole else set()):
                if known := self._known(dotted):
                    todo.append((known, True))
            for start in module.around if whole else ():
                for other in self.modules:
                    family = other.split(".")[1] if other.startswith("kernels.") else ""
                    if other.startswith(start) and (family not in self.families or family in named):
                        todo.append((other, True))
        return frozenset(name for name, _ in seen)

    def _tests_of(self, names: Iterable[str]) -> set[str]:
        wanted = set(names)
        return {test for test in self.tests if self.reached(test) & wanted}

    def readers(self, path: str) -> set[str]:
        """Modules that name a file, or a folder that it lies in, in a string; of the topmost folder only at a pinch."""
        parts = Path(path).parts
        if parts[0] == "tests":  # named by their folder from where they lie, of which `of` knows already
            return self._saying({parts[-1], Path(path).stem, parts[-2]} - {"tests", "kernels", *self.families})
        return self._saying({parts[-1], Path(path).stem, *parts[1:-1]}) or self._saying({parts[0]})

    def _saying(self, words: set[str]) -> set[str]:
        """Modules with a string that is one of the words, holds it between slashes, or has a file's name in a text."""

        def says(text: str) -> bool:
            found = set(re.split(r"[^\w.+-]+", text))
            return bool(words & ({one for one in found if "." in one} if " " in text else found))

        return {name for name, module in self.modules.items() if any(map(says, module.strings))}

    def of(self, path: str) -> set[str] | None:
        """The test files that a change of this file can reach; None where nobody can say, which means all of them."""
        file = Path(path)
        if file.name in EVERYTHING or path == "Makefile":
            return None
        if path in self.tests:
            return {path}
        if (name := self.name(path)) in self.modules and path.endswith(".py"):
            return self._tests_of({name}) or None
        if file.parts[0] in FOLDERS and file.suffix == ".py":  # deleted
            return set() if file.name.startswith("test_") else None
        found: set[str] = set()
        if file.parts[0] == "kernels":
            # An include may lead anywhere in its folder; what lies in no family's folder is for all of them.
            family = file.parts[1] if len(file.parts) > 2 and file.parts[1] in self.families else ""
            start = f"kernels.{family}." if family else "kernels."
            users = {n for n in self.modules if n.startswith(start)} if file.suffix in SOURCES else set()
            return self._tests_of(users | self._saying({file.name})) or None
        if file.parts[0] == "tests":
            beside = [test for test in self.tests if Path(test).is_relative_to(file.parent)]
            helpers = {n for n, m in self.modules.items() if Path(m.path).parent == file.parent}
            found |= {*beside, *self._tests_of(helpers - {"tests.conftest"})}
        found |= self._tests_of(self.readers(path))
        return found or None


@functools.cache
def here() -> Graph:
    """The graph of this checkout."""
    return Graph()


def of_all(paths: Iterable[str], graph: Graph) -> tuple[set[str], str]:
    """(tests that changed files reach, "" or the first file for which all tests have to run)."""
    found = {test for test in ALWAYS if test in graph.tests}
    for path in paths:
        reached = graph.of(path)
        if reached is None:
            return set(graph.tests), path
        found |= reached
    return found, ""


def git(*arguments: str, root: Path = ROOT) -> list[str]:
    """The lines that git prints."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.split("\n") if line]


def since(base: str, root: Path = ROOT) -> list[str]:
    """Files that differ from where this branch left `base`, committed or not; both names of a renamed one."""
    fork = git("merge-base", base, "HEAD", root=root)[0]
    changed = git("diff", "--name-only", "--no-renames", fork, root=root)
    return sorted({*changed, *git("ls-files", "--others", "--exclude-standard", root=root)})


def main(arguments: list[str]) -> int:
    """Print the test files for pytest, one a line, and on stderr what they were chosen for."""
    base = arguments[0] if arguments else "main"
    try:
        paths = since(base)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().splitlines()[:1]
        print(
            f"killgate: git knows no {base} ({' '.join(reason)}); name another: make changed BASE=HEAD~1",
            file=sys.stderr,
        )
        return 2
    tests, why = of_all(paths, here())
    all_of = f", all of them for {why}" if why else ""
    print(f"{len(paths)} files changed since {base}: {len(tests)} test files{all_of}", file=sys.stderr)
    print("\n".join(sorted(tests)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
