"""`lab doctor`: what is here, what is missing, what that costs and how to get it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re
import shutil
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.base.console import show
from lab.base.errors import REPOSITORY, shown
from lab.check import families
from lab.cli import MSGSPEC
from lab.row import store


@dataclass(frozen=True)
class Finding:
    """A line. status: ok, absent (something optional), drift (a release not the lock's), broken (nothing works)."""

    what: str
    status: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f" -> {self.remedy}" if self.status != "ok" else ""
        return f"{self.status:7} {self.what:11} {self.detail}{remedy}"


CUDA = "pip install 'killgate[cuda]' on a machine with an NVIDIA GPU"
PACKAGES = (
    # import name, distribution, needed for, remedy
    ("torch", "torch", "references, checks and measuring", "make verdicts creates an environment with it"),
    ("triton", "triton", "Triton candidates and ahead-of-time compilation", "pip install triton (Linux only)"),
    ("numpy", "numpy", "everything", "make verdicts"),
    ("msgspec", "msgspec", "reading and writing rows: everything", MSGSPEC),
    ("pandas", "pandas", "tables in the notebooks", "make verdicts"),
    ("matplotlib", "matplotlib", "figures", "make verdicts"),
    ("jupytext", "jupytext", "notebooks", "make verdicts"),
    ("nbclient", "nbclient", "executing notebooks", "make verdicts"),
    ("cupy", "cupy-cuda13x", "CUDA C++ candidates", CUDA),
    ("nvtx", "nvtx", "named ranges in profiles", CUDA),
    ("distributed", "distributed", "many machines (--on, lab cluster)", "pip install 'killgate[cluster]'"),
)
TOOLS = (
    ("nvcc", "compiling CUDA C++ without a GPU", "install the CUDA toolkit, or rely on NVRTC through CuPy"),
    ("ncu", "hardware counters", "install Nsight Compute"),
    ("git", "saying which commit last changed a gate", "install git"),
)


def run(arguments: Namespace) -> int:
    """What is here and what is missing; 1 when something is broken."""
    findings = examine()
    show(arguments.json, lambda: [asdict(f) for f in findings], lambda: "\n".join(map(str, findings)))
    return 1 if any(f.status == "broken" for f in findings) else 0


def examine() -> list[Finding]:
    """Every finding, most basic first. Imports nothing heavier than it reports on, except torch and triton."""
    python = "ok" if sys.version_info >= (3, 11) else "broken"
    findings = [Finding("Python", python, sys.version.split()[0], "use 3.11 or newer")]
    for module, distribution, purpose, remedy in PACKAGES:
        findings.append(_optional(module, _version(module, distribution), purpose, remedy))
    findings.append(_gpu())
    for tool, purpose, remedy in TOOLS:
        findings.append(_optional(tool, "on the PATH" if shutil.which(tool) else "", purpose, remedy))
    shadow = families.importable()
    detail = shadow or f"families: {', '.join(families.names())}"
    remedy = "run from the repository, or uninstall Hugging Face's package `kernels` in this environment"
    findings.append(Finding("kernels", "broken" if shadow else "ok", detail, remedy))
    findings += [] if shadow else _skipped()
    devices = sorted({path.parts[-4] for path in store.measured()})
    detail = f"rows of {', '.join(devices)}" if devices else "no measured rows"
    findings.append(Finding("profiles", "ok" if devices else "absent", detail, "lab measure, on a GPU"))
    return findings + drift(REPOSITORY / ".ci" / f"{_build()}.lock")


def drift(lock: Path) -> list[Finding]:
    """A finding for each installed package of another release than the lock names, or that there is none.

    A local version (2.13.0+cpu) is a build of its release. Packages of the lock that are not installed are of extras.
    """
    if not lock.exists():  # not a checkout
        return []
    named = dict(line.split("==") for line in lock.read_text(encoding="utf-8").splitlines() if "==" in line)
    here = {re.sub("[-_.]+", "-", d.name).lower(): d.version for d in importlib.metadata.distributions()}
    both = {name: (here[name], version) for name, version in named.items() if name in here}
    remedy = "make clean install, or make lock where these releases are meant"
    found = [
        Finding(name, "drift", f"{has} is installed, {shown(lock)} names {wanted}", remedy)
        for name, (has, wanted) in both.items()
        if has.partition("+")[0] != wanted
    ]
    return found or [Finding("lock", "ok", f"{len(both)} packages as {shown(lock)} names them")]


def _skipped() -> list[Finding]:
    """What of our kernels cannot run on the GPU here, a line for each reason; nothing without a GPU."""
    here, why = families.gpu_capability() if importlib.util.find_spec("torch") else None, dict[str, list[str]]()
    for name in families.names() if here else ():
        for candidate in families.load(name).candidates.values():
            if said := families.unmet(candidate, here):
                why.setdefault(said, []).append(f"{name}/{candidate.name}")
    remedy = "check and measure skip them here"
    return [Finding("candidates", "absent", f"{', '.join(of)}: {said}", remedy) for said, of in why.items()]


def _build() -> str:
    """Which lock an environment answers to: that of its torch."""
    if importlib.util.find_spec("torch") is None:
        return "cpu"
    import torch

    return "cpu" if torch.version.cuda is None else "cuda"


def _optional(what: str, found: str, purpose: str, remedy: str) -> Finding:
    return Finding(what, "ok" if found else "absent", found or f"needed for {purpose}", remedy)


def _version(module: str, distribution: str) -> str:
    if importlib.util.find_spec(module) is None:
        return ""
    for name in (distribution, module):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "installed"


def _gpu() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("GPU", "absent", "cannot be looked for without torch", "make verdicts")
    import torch

    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return Finding("GPU", "ok", f"{torch.cuda.get_device_name(0)}, sm_{major}{minor}, CUDA {torch.version.cuda}")
    what = "torch is a CPU build" if torch.version.cuda is None else "no usable NVIDIA GPU or driver"
    return Finding("GPU", "absent", f"{what}: replay works, `lab measure` does not", "use a machine with an NVIDIA GPU")
