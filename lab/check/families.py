"""Finds kernel families by looking into kernels/ and reads what each says about itself (kernels/common.py).

Nothing here names a family. A folder under kernels/ is a family when it has an `__init__.py`; its candidates are the
modules whose names begin with triton_, cuda_, torch_ or peer_. Importing a family needs no GPU; a candidate whose
library is absent stays in the list with the reason why it cannot run.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from lab.base import devices
from lab.base.errors import REPOSITORY, BadInput, nearest

FOLDER = REPOSITORY / "kernels"
PEER_PREFIXES = ("torch_", "peer_")
CANDIDATE_PREFIXES = ("triton_", "cuda_", *PEER_PREFIXES)
NEEDED_FILES = ("reference.py", "cost.py", "cases.py")


@dataclass(frozen=True)
class Family:
    """A family's parts. `candidates` by name; `unavailable` maps a module that failed to import to the reason.

    peers: the candidates that stand for a library a user may have, from modules named torch_ or peer_.
    """

    name: str
    title: str
    reference: Callable[[dict[str, Any]], dict[str, Any]]
    cost: Callable[[Any, str], Any]
    cases: ModuleType
    candidates: Mapping[str, Any]
    cuda_sources: tuple[Any, ...]
    unavailable: Mapping[str, str]
    peers: tuple[str, ...] = ()

    def workload(self, workload_id: str) -> Any:
        """The workload with this id; raises BadInput naming the nearest."""
        by_id = {w.id: w for w in self.cases.WORKLOADS}
        if workload_id not in by_id:
            where = f"kernels/{self.name}/cases.py"
            raise BadInput(where, f'no workload has the id "{workload_id}"', nearest(workload_id, by_id))
        return by_id[workload_id]

    def candidate(self, name: str) -> Any:
        """The candidate with this name; raises BadInput naming the nearest, or why its module did not import."""
        if name not in self.candidates:
            for module, reason in self.unavailable.items():
                if name in module or module in name:
                    raise BadInput(
                        f"kernels/{self.name}/{module}.py", f"cannot be imported ({reason})", "see `lab doctor`"
                    )
            raise BadInput(f"kernels/{self.name}", f'no candidate is named "{name}"', nearest(name, self.candidates))
        return self.candidates[name]


def names() -> list[str]:
    """The families, in alphabetical order."""
    return sorted(p.parent.name for p in FOLDER.glob("*/__init__.py"))


@cache
def load(name: str) -> Family:
    """Import one family.

    Raises BadInput when there is none of that name, when it lacks its reference, cost or cases, or when Hugging Face's
    package named `kernels` shadows ours.
    """
    if name not in names():
        raise BadInput(FOLDER, f'no family is named "{name}"', nearest(name, names()))
    folder = FOLDER / name
    for file in NEEDED_FILES:
        if not (folder / file).exists():
            raise BadInput(
                folder, f"{file} is missing", "a family cannot be judged without its reference, cost and cases"
            )
    own = importable()
    if own:
        raise BadInput("kernels", own, "run from the repository, or uninstall that package in this environment")
    package = importlib.import_module(f"kernels.{name}")
    cases = importlib.import_module(f"kernels.{name}.cases")
    candidates: dict[str, Any] = {}
    sources: list[Any] = []
    unavailable: dict[str, str] = {}
    peers: list[str] = []
    for path in sorted(folder.glob("*.py")):
        if not path.stem.startswith(CANDIDATE_PREFIXES):
            continue
        try:
            module = importlib.import_module(f"kernels.{name}.{path.stem}")
        except ImportError as error:
            unavailable[path.stem] = str(error)
            continue
        sources += getattr(module, "CUDA_SOURCES", ())
        for candidate in getattr(module, "CANDIDATES", ()):
            if candidate.name in candidates:
                raise BadInput(path, f'a second candidate is named "{candidate.name}"', "rename one of them")
            candidates[candidate.name] = _refusing(candidate, getattr(cases, "refuses", None))
            if path.stem.startswith(PEER_PREFIXES):
                peers.append(candidate.name)
    return Family(
        name=name,
        title=package.TITLE,
        reference=importlib.import_module(f"kernels.{name}.reference").reference,
        cost=importlib.import_module(f"kernels.{name}.cost").cost,
        cases=cases,
        candidates=candidates,
        cuda_sources=tuple(sources),
        unavailable=unavailable,
        peers=tuple(peers),
    )


def _refusing(candidate: Any, shared: Callable[[Any, str], str] | None) -> Any:
    """The candidate, refusing also what its family says that no candidate of its precision takes."""
    if shared is None:
        return candidate
    own = candidate.refuses
    return replace(candidate, refuses=lambda workload: shared(workload, candidate.precision) or own(workload))


def sources_hash(name: str) -> str:
    """First 12 hex digits of SHA-256 over a family's code and what it shares: which sources a row is of.

    Of kernels/*.{py,cuh} and kernels/<family>/*.{py,cu,cuh}, by name and content, sorted; the same on every machine.
    """
    own = [path for kind in ("*.py", "*.cu", "*.cuh") for path in (FOLDER / name).glob(kind)]
    found = hashlib.sha256()
    for path in sorted([*FOLDER.glob("*.py"), *FOLDER.glob("*.cuh"), *own]):
        found.update(path.relative_to(FOLDER).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def importable() -> str:
    """ "" when `import kernels` finds this repository's folder, else what it finds instead (Hugging Face's package)."""
    spec = importlib.util.find_spec("kernels")
    if spec is None:
        return "the folder is not importable"
    if spec.origin is not None and Path(spec.origin).parent != FOLDER:
        where = Path(spec.origin).parent.name
        return f"`import kernels` finds another package of that name (in {where}/, with an __init__.py)"
    if spec.submodule_search_locations is not None:
        places = [Path(p).resolve() for p in spec.submodule_search_locations]
        if FOLDER.resolve() not in places:
            return "`import kernels` finds a folder of that name elsewhere"
    return ""


def version_tuple(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "3.6.0+cu130" -> (3, 6, 0)."""
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3])


def unmet(candidate: Any, capability: tuple[int, int] | None) -> str:
    """ "" when the candidate can run here, else one sentence saying what is missing.

    capability: of the GPU that would run it, None on a machine without one (Triton then runs in its interpreter).
    """
    needs = candidate.needs
    if needs.capability > (0, 0):
        wanted = "sm_{}{}".format(*needs.capability)
        if capability is None:
            return f"needs a GPU ({wanted} or newer), none is here"
        if capability < needs.capability:
            return f"needs {wanted} or newer, this GPU is sm_{capability[0]}{capability[1]}"
    for package in needs.packages:
        if importlib.util.find_spec(package) is None:
            return f"needs the package {package}, which is not installed"
    if needs.triton:
        if importlib.util.find_spec("triton") is None:
            return "needs Triton, which is not installed"
        import triton

        if version_tuple(triton.__version__) < version_tuple(needs.triton):
            return f"needs Triton {needs.triton} or newer, {triton.__version__} is installed"
    return ""


def gpu_capability() -> tuple[int, int] | None:
    """Compute capability of the current CUDA GPU, None without one."""
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def interpret_on_cpu() -> None:
    """Set TRITON_INTERPRET=1 when there is no GPU. Must run before a family's Triton modules are imported."""
    if "TRITON_INTERPRET" not in os.environ and gpu_capability() is None:
        os.environ["TRITON_INTERPRET"] = "1"


def former(row: Mapping[str, Any]) -> str:
    """Empty where the present code would launch what a row of ours timed, else "former kernel", refused now or gone.

    Compares the row's `config` with the candidate's own: a commit says nothing about whose kernel changed, and may be
    absent. A difference proves a change; the same words do not prove the same kernel. Libraries' rows are never former.
    The candidate is asked for the row's device, whichever is here.
    """
    family = load(row["family"])
    if row["name"] in family.peers:
        return ""
    if row["name"] not in family.candidates:
        return "cannot be compared" if family.unavailable else "former kernel, gone"
    try:
        candidate, workload = family.candidate(row["name"]), family.workload(row["workload_id"])
    except BadInput:
        return "former workload, gone"
    if candidate.refuses(workload):
        return "former kernel, refused now"
    from kernels.common import described_for  # here, so that `doctor` can name a package that shadows ours

    with described_for(devices.get(row["device"]).capability):
        return "" if candidate.config(workload) == row["config"] else "former kernel"
