"""Finds kernel families by looking into kernels/ and reads what each says about itself (kernels/common.py).

Nothing here names a family. A folder under kernels/ is a family when it has an `__init__.py`. Its candidates are in the
modules of its own folder and of controls/ whose names begin with triton_, cuda_ or torch_, and in every module of
peers/. Importing a family needs no GPU; a candidate whose library is absent stays in the list with the reason why it
cannot run.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from lab.base import devices, errors
from lab.base.errors import REPOSITORY, BadInput, anonymous, nearest, plain
from lab.card.phases import Card
from lab.check import interpreter
from lab.row.records import Measurement

if TYPE_CHECKING:  # kernels/ is imported late, so that a package that shadows it is told in one line
    from kernels.common import Candidate, Cases, Cost, CudaSource, Tensors, Workload

FOLDER = REPOSITORY / "kernels"
CONTROLS, PEERS = "controls", "peers"
FRAMEWORK = "torch_"
CANDIDATE_PREFIXES = ("triton_", "cuda_", FRAMEWORK)
NEEDED = {
    "__init__.py": ("TITLE",),
    "reference.py": ("reference",),
    "cost.py": ("cost",),
    "cases.py": ("WORKLOADS", "inputs", "outputs", "tolerance", "ACTIVATIONS", "IN_PLACE"),
}
NEEDED_FILES = ("reference.py", "cost.py", "cases.py")
SOURCE_KINDS = (".py", ".cu", ".cuh")
ROLES = ("check", "measure")
OPTIONAL = ("triton", "cuda")  # packages that a module of ours may want without saying so: not on every system


@dataclass(frozen=True)
class Family:
    """A family's parts.

    candidates:  by name.
    modules:     candidate -> the module it is from, as a path in the family's folder: "peers/vllm_marlin".
    unavailable: module that failed to import -> the reason.
    broken:      those of `unavailable` that lack no optional library: a mistake in them, which fails a check.
    repeated:    the reference of many calls on what is updated in place; see kernels/common.py.
    """

    name: str
    title: str
    reference: Callable[[Tensors], Tensors]
    cost: Callable[[Workload, str], Cost]
    cases: Cases
    candidates: Mapping[str, Candidate]
    cuda_sources: tuple[CudaSource, ...]
    unavailable: Mapping[str, str]
    modules: Mapping[str, str] = field(default_factory=dict)
    repeated: Callable[[Tensors, int], Tensors] | None = None
    broken: Collection[str] = ()

    @property
    def peers(self) -> tuple[str, ...]:
        """The candidates that call a library: those of peers/, and a framework's own operators."""
        return tuple(name for name, module in self.modules.items() if is_peer(module))

    def workload(self, workload_id: str) -> Workload:
        """The workload with this id, or of axes ("M=8 N=5120 K=6144"); raises BadInput naming the nearest."""
        by_id = {w.id: w for w in self.cases.WORKLOADS}
        if "=" in workload_id:
            return self._shaped(workload_id)
        if workload_id not in by_id:
            where = f"kernels/{self.name}/cases.py"
            raise BadInput(where, f'no workload has the id "{workload_id}"', nearest(workload_id, by_id))
        return by_id[workload_id]

    def _shaped(self, text: str) -> Workload:
        """The workload of axes in words; those that are left out are as in the listed workloads with the same axes.

        That is so for a word (dtype), for a flag (0 or 1) and for a number that the real models' share; every other
        number has to be given.
        """
        where = f"{self.name}: {text}"
        given = dict(word.partition("=")[::2] for word in text.split())
        every = [w for role in ("measure", "check") for w in self.cases.WORKLOADS if w.role == role]
        known = {axis: [w.axes[axis] for w in every if axis in w.axes] for w in every for axis in w.axes}
        for axis, word in given.items():
            errors.refuse_unknown(where, "axis", axis, known)
            number = isinstance(known[axis][0], int)
            if number and not (word.isascii() and word.isdigit() and (int(word) > 0 or 0 in known[axis])):
                raise BadInput(where, f'"{axis}={word}" is no size', "write a whole number above zero")
            if not number and word not in known[axis]:
                raise BadInput(where, f'{axis} = "{word}" is unknown', nearest(word, map(str, known[axis])))
        near = [w for w in every if given.keys() <= w.axes.keys()]
        fewest = min((len(w.axes) for w in near), default=0)
        alike = [w for w in near if len(w.axes) == fewest]
        if len(given) != len(text.split()) or not alike:
            raise BadInput(where, "no listed workload has these axes, each once", f"valid: {', '.join(known)}")
        usual = [w for w in alike if w.role == "measure"] or alike
        axes: dict[str, int | str] = {}
        for axis, value in usual[0].axes.items():
            seen = {w.axes[axis] for w in usual}
            if axis not in given and isinstance(value, int) and len(seen) > 1 and not seen <= {0, 1}:
                raise BadInput(where, f"the axis {axis} is missing", f"give {axis}=SIZE")
            axes[axis] = type(value)(given.get(axis, value))
        return replace(usual[0], id=text, axes=axes, source="")

    def candidate(self, name: str) -> Candidate:
        """The candidate with this name; raises BadInput naming the nearest, or why its module did not import."""
        refuse_unknown(self.name, name, self.candidates, self.unavailable)
        return self.candidates[name]


def refuse_unknown(family: str, name: str, candidates: Collection[str], unavailable: Mapping[str, str]) -> None:
    """BadInput naming the nearest candidate of a family, or why the module of this one did not import."""
    if name in candidates:
        return
    for module, reason in unavailable.items():
        if name in module or module.rpartition("/")[2] in name:
            raise BadInput(f"kernels/{family}/{module}.py", f"cannot be imported ({reason})", "see `lab doctor`")
    hidden = f"; {', '.join(unavailable)} cannot be imported" if unavailable else ""
    raise BadInput(f"kernels/{family}", f'no candidate is named "{name}"', nearest(name, candidates) + hidden)


def is_peer(module: str) -> bool:
    """True for a module, a path in the family's folder, whose candidates call a library."""
    folder, _, stem = module.rpartition("/")
    return folder == PEERS or stem.startswith(FRAMEWORK)


def candidate_files(name: str) -> list[Path]:
    """The modules of a family that hold candidates: ours by name, of either folder, then its peers."""
    folder = FOLDER / name
    own = [p for place in (folder, folder / CONTROLS) for p in place.glob("*.py")]
    ours = sorted((p for p in own if p.stem.startswith(CANDIDATE_PREFIXES)), key=lambda p: p.stem)
    return ours + sorted(p for p in (folder / PEERS).glob("*.py") if p.stem != "__init__")


def names() -> list[str]:
    """The families, in alphabetical order."""
    return sorted(p.parent.name for p in FOLDER.glob("*/__init__.py"))


@cache
def bare(name: str) -> Family:
    """Import one family without its candidates: its reference, cost and cases.

    Raises BadInput when there is none of that name, when it lacks its reference, cost or cases, or when Hugging Face's
    package named `kernels` shadows ours.
    """
    errors.refuse_unknown(FOLDER, "family", name, names())
    folder = FOLDER / name
    for file in NEEDED_FILES:
        if not (folder / file).exists():
            remedy = "a family cannot be judged without its reference, cost and cases"
            raise BadInput(folder, f"{file} is missing", remedy)
    _refuse_shadow()
    title, reference, cost, cases = (_whole(name, file) for file in NEEDED)
    for workload in cases.WORKLOADS:
        if workload.role not in ROLES:
            raise BadInput(
                folder / "cases.py", f'{workload.id}: role = "{workload.role}"', nearest(workload.role, ROLES)
            )
    return Family(
        name=name,
        title=title.TITLE,
        reference=reference.reference,
        repeated=getattr(reference, "repeated", None),
        cost=cost.cost,
        cases=cast("Cases", cases),
        candidates={},
        cuda_sources=(),
        unavailable={},
    )


def _whole(name: str, file: str) -> Any:
    """A module of a family that has everything in NEEDED; raises BadInput, or what the import throws."""
    module = importlib.import_module(f"kernels.{name}.{Path(file).stem}".removesuffix(".__init__"))
    for needed in NEEDED[file]:
        if not hasattr(module, needed):
            remedy = f"define it as kernels/common.py says; {nearest(needed, (n for n in vars(module) if n[0] != '_'))}"
            raise BadInput(FOLDER / name / file, f'it has no "{needed}"', remedy)
    return module


def mistake(error: BaseException) -> BadInput | None:
    """What was thrown in a family's reference, cost or cases as a refusal that says where; None for everything else."""
    frames = [(Path(f.filename), f.name, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((Path(error.filename), "<module>", error.lineno))
    own = [frame for frame in frames if frame[0].is_relative_to(FOLDER) and frame[0].parent != FOLDER]
    if not own or own[0][0].name not in NEEDED:
        return None
    path, function, line = own[-1]
    where = "at import" if function == "<module>" else f"in {function}()"
    return BadInput(path, f"{where}, line {line}: {errors.reason(error)}", "correct it there")


@cache
def load(name: str) -> Family:
    """Import one family with its candidates; raises BadInput as `bare` does."""
    family = bare(name)
    folder = FOLDER / name
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
        interpreter.quicken()
    candidates: dict[str, Candidate] = {}
    modules: dict[str, str] = {}
    sources: list[CudaSource] = []
    unavailable: dict[str, str] = {}
    broken: list[str] = []
    for path in candidate_files(name):
        place = path.relative_to(folder).with_suffix("").as_posix()
        try:
            module = importlib.import_module(f"kernels.{name}.{place.replace('/', '.')}")
            declared, own = tuple(getattr(module, "CANDIDATES", ())), tuple(getattr(module, "CUDA_SOURCES", ()))
            if not declared and (path.parent.name != PEERS or hasattr(module, "Candidate")):
                raise AttributeError("it has no CANDIDATES")
        except Exception as error:  # one module's mistake takes no other along
            absent = isinstance(error, ImportError) and _is_optional(path, error.name or "")
            unavailable[place] = anonymous(plain(str(error))) if absent else errors.reason(error)
            broken += [] if absent else [place]
            continue
        sources += own
        for candidate in declared:
            if candidate.name in candidates:
                raise BadInput(path, f'a second candidate is named "{candidate.name}"', "rename one of them")
            only = {source.architecture for source in own} - {""}
            if len(only) == 1 and not candidate.needs.architecture:
                candidate = replace(candidate, needs=replace(candidate.needs, architecture=only.pop()))
            candidates[candidate.name] = _refusing(candidate, getattr(family.cases, "refuses", None))
            modules[candidate.name] = place
    return replace(
        family, candidates=candidates, cuda_sources=tuple(sources), unavailable=unavailable, modules=modules,
        broken=broken,
    )  # fmt: skip


def _is_optional(path: Path, module: str) -> bool:
    """Whether a candidates' file may lack this module: any library but ours of a peer, else what its `needs` names."""
    package = module.partition(".")[0]
    if path.parent.name == PEERS:
        return package != "kernels"
    return package in OPTIONAL or (bool(package) and f'"{package}"' in path.read_text(encoding="utf-8"))


def _refusing(candidate: Candidate, shared: Callable[[Workload, str], str] | None) -> Candidate:
    """The candidate, refusing also what its family says that no candidate of its precision takes."""
    if shared is None:
        return candidate
    own = candidate.refuses
    return replace(candidate, refuses=lambda workload: shared(workload, candidate.precision) or own(workload))


def sources_hash(name: str) -> str:
    """First 12 hex digits of SHA-256 over a family's code and what it shares: which sources a row is of.

    Of every .py, .cu and .cuh under kernels/ that is not another family's, by name and content, sorted; the same on
    every machine.
    """
    found = hashlib.sha256()
    for path in sorted(_sources(name)):
        found.update(path.relative_to(FOLDER).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def _sources(name: str) -> Iterator[Path]:
    others = {FOLDER / other for other in names()} - {FOLDER / name}
    for place in FOLDER.iterdir():
        if place not in others:
            yield from (p for p in (place.rglob("*") if place.is_dir() else [place]) if p.suffix in SOURCE_KINDS)


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


def _refuse_shadow() -> None:
    if own := importable():
        raise BadInput("kernels", own, "run from the repository, or uninstall that package in this environment")


def version_tuple(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "3.6.0+cu130" -> (3, 6, 0)."""
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3])


def unfit(candidate: Candidate, capability: tuple[int, int]) -> str:
    """ "" when the candidate is for GPUs of this compute capability, else one sentence saying for which it is."""
    needs, here = candidate.needs, "sm_{}{}".format(*capability)
    if capability < needs.capability:
        return f"needs sm_{needs.capability[0]}{needs.capability[1]} or newer, this GPU is {here}"
    if needs.architecture not in ("", f"{here}a"):
        return f"is for {needs.architecture} alone, this GPU is {here}"
    return ""


def unmet(candidate: Candidate, capability: tuple[int, int] | None) -> str:
    """ "" when the candidate can run here, else one sentence saying what is missing.

    capability: of the GPU that would run it, None on a machine without one (Triton then runs in its interpreter).
    """
    needs = candidate.needs
    if needs.capability > (0, 0) or needs.architecture:
        if capability is None:
            wanted = needs.architecture or "sm_{}{} or newer".format(*needs.capability)
            return f"needs a GPU ({wanted}), none is here"
        if said := unfit(candidate, capability):
            return said
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


class Launches(msgspec.Struct, frozen=True):
    """What the code of a family would launch on GPUs of one compute capability: all that a process has to know of it.

    peers: the candidates that call a library. unavailable: module that cannot be imported -> the reason.
    precisions: of every candidate. configs: candidate -> workload -> `config`, None: refused. never: those that no
    router takes.
    """

    peers: tuple[str, ...]
    unavailable: dict[str, str]
    workloads: tuple[str, ...]
    precisions: dict[str, str]
    configs: dict[str, dict[str, str | None]]
    never: tuple[str, ...] = ()


LAUNCHES = msgspec.json.Decoder(dict[str, Launches])


def described(family: Family, capability: tuple[int, int], *shapes: str) -> Launches:
    """Every candidate asked for the `config` of every listed workload it takes, or of those of `shapes`."""
    from kernels.common import described_for  # here, so that `doctor` can name a package that shadows ours

    named = [family.workload(shape) for shape in shapes if shape]
    workloads, candidates = named or family.cases.WORKLOADS, family.candidates
    with described_for(capability):
        configs = {
            name: {w.id: None if candidate.refuses(w) else candidate.config(w) for w in workloads}
            for name, candidate in candidates.items()
        }
    precisions = {name: candidate.precision for name, candidate in candidates.items()}
    never = tuple(name for name, candidate in candidates.items() if candidate.no_route)
    return Launches(family.peers, dict(family.unavailable), tuple(w.id for w in workloads), precisions, configs, never)


def describe(path: str, major: str, minor: str, *shaped: str) -> None:
    """In a process of its own: `described` of every family, or of one and shapes, into a file."""
    capability = int(major), int(minor)
    told = {name: described(load(name), capability, *shaped[1:]) for name in shaped[:1] or names()}
    Path(path).write_bytes(msgspec.json.encode(told))


def launches(name: str, capability: tuple[int, int], workload: str = "") -> Launches:
    """`described` of a family, for a process that judges: it imports no candidate. Raises BadInput as `bare` does.

    workload: where it is of axes, they are the one that is described.
    """
    if found := _together.get((name, capability, workload)):
        return found
    known = every(capability, *((name, workload) if "=" in workload else ()))
    errors.refuse_unknown(FOLDER, "family", name, known)
    return known[name]


_together: dict[tuple[str, tuple[int, int], str], Launches] = {}


def together(name: str, capability: tuple[int, int], workloads: Iterable[str]) -> None:
    """Describe many workloads of axes in one process, so that `launches` has them; one at a time takes seconds each."""
    asked = sorted({w for w in workloads if "=" in w and (name, capability, w) not in _together})
    if asked:
        _together.update({(name, capability, w): every(capability, name, *asked)[name] for w in asked})


@cache
def every(capability: tuple[int, int], *shaped: str) -> dict[str, Launches]:
    """`described` of every family, or of one and shapes, asked in a process of its own.

    It is kept for these sources and packages.
    """
    _refuse_shadow()
    from kernels import build_cache

    def make(folder: Path) -> None:
        program = "import sys; from lab.check import families; families.describe(*sys.argv[1:])"
        asked = [sys.executable, "-c", program, str(folder / "launches.json"), *map(str, capability), *shaped]
        done = subprocess.run(asked, cwd=REPOSITORY, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            said = anonymous(plain((done.stderr.strip().splitlines() or ["no word"])[-1]))
            raise BadInput(FOLDER, f"its families cannot be described: {said}", "see `lab doctor`")

    # An installed or removed package changes its folder's time. The checkout is told by its sources: each file written
    # at its root, a cache's folder say, would change its time, and a notebook has it twice.
    places = {os.path.realpath(place) for place in sys.path if os.path.exists(place)} - {str(REPOSITORY)}
    packages = [f"{place} {os.stat(place).st_mtime_ns}" for place in sorted(places)]
    sources = [f"{name} {sources_hash(name)}" for name in names()]
    parts = [*sources, str(capability), *shaped, sys.version, os.environ.get("TRITON_INTERPRET", ""), *packages]
    parts += Launches.__struct_fields__
    try:
        return LAUNCHES.decode((build_cache.kept("launches", parts, make) / "launches.json").read_bytes())
    except OSError:  # no place to keep it
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder))
            return LAUNCHES.decode((Path(folder) / "launches.json").read_bytes())


def refuse_card(card: Card) -> None:
    """Raise BadInput for a card whose family, arms or workloads are not here, naming it and the nearest valid word.

    An arm of a library that is not installed passes: its rows can be judged anywhere.
    """
    if not card.family:
        return
    try:
        family, told = bare(card.family), launches(card.family, gpu_capability() or (9, 0))
        absent = [module.rpartition("/")[2] for module in told.unavailable]
        for name in (card.control, card.candidate, *card.beside):
            if not any(name in module or module in name for module in absent):
                refuse_unknown(card.family, name, told.configs, {})
        for workload in card.workloads:
            family.workload(workload)
    except BadInput as refused:
        raise BadInput(card.path, f"{refused.where}: {refused.what}", refused.remedy) from None


def former(row: Measurement, name: str = "") -> str:
    """Empty where the present code would launch what a row of ours timed, else "former kernel", refused now or gone.

    name: the candidate that is asked, the row's own unless given.

    Compares the row's `config` with the candidate's own: a commit says nothing about whose kernel changed, and may be
    absent. A difference proves a change; the same words do not prove the same kernel. Libraries' rows are never former.
    The candidate is asked for the row's device, whichever is here.
    """
    try:
        present = launches(row.family, devices.get(row.device).capability, row.workload_id)
    except BadInput:
        if "=" not in row.workload_id:
            raise
        return "former workload, gone"  # an axis that the family no longer has
    name = name or row.name
    if name in present.peers:
        return ""
    if name not in present.configs:
        return "cannot be compared" if present.unavailable else "former kernel, gone"
    if row.workload_id not in present.workloads:
        return "former workload, gone"
    config = present.configs[name][row.workload_id]
    if config is None:
        return "former kernel, refused now"
    return "" if config == row.config else "former kernel"


def composes(name: str) -> bool:
    """Whether a family's arms launch other families' kernels (kernels/<family>/calls.py says which)."""
    return (FOLDER / name / "calls.py").is_file()


def former_kernels(rows: Iterable[Measurement]) -> list[str]:
    """One phrase for each kernel that the present code would not launch again, with the workloads."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if (why := former(row)).startswith("former"):  # without the family's library nothing can be said
            found.setdefault((row.name, why), []).append(row.workload_id)
    return [f"{name} is a {why} at {', '.join(where)}" for (name, why), where in found.items()]
