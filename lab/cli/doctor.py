"""`lab doctor`: what is here, what is missing, what that costs and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass

from lab.check import families
from lab.cli import show
from lab.row import store


@dataclass(frozen=True)
class Finding:
    """One line of the examination. status: ok, absent (something optional is missing) or broken (nothing works)."""

    what: str
    status: str
    detail: str
    remedy: str = ""


PACKAGES = (
    # import name, distribution, needed for, remedy
    ("torch", "torch", "references, checks and measuring", "make verdicts creates an environment with it"),
    ("triton", "triton", "Triton candidates and ahead-of-time compilation", "pip install triton (Linux only)"),
    ("numpy", "numpy", "everything", "make verdicts"),
    ("msgspec", "msgspec", "reading and writing rows: everything", "pip install 'msgspec>=0.19,<0.23', or its wheel"),
    ("pandas", "pandas", "tables in the notebooks", "make verdicts"),
    ("matplotlib", "matplotlib", "figures", "make verdicts"),
    ("jupytext", "jupytext", "notebooks", "make verdicts"),
    ("nbclient", "nbclient", "executing notebooks", "make verdicts"),
    ("cupy", "cupy-cuda13x", "CUDA C++ candidates", "pip install 'killgate[cuda]' on a machine with an NVIDIA GPU"),
    ("nvtx", "nvtx", "named ranges in profiles", "pip install 'killgate[cuda]' on a machine with an NVIDIA GPU"),
)


def run(arguments: Namespace) -> int:
    """What is here and what is missing; 1 when something is broken."""
    findings = examine()
    show(arguments.json, lambda: [asdict(f) for f in findings], lambda: render(findings))
    return 1 if any(f.status == "broken" for f in findings) else 0


def examine() -> list[Finding]:
    """Every finding, most basic first. Imports nothing heavier than it reports on, except torch and triton."""
    findings = [
        Finding(
            "Python", "ok" if sys.version_info >= (3, 11) else "broken", sys.version.split()[0], "use 3.11 or newer"
        )
    ]
    for module, distribution, purpose, remedy in PACKAGES:
        if importlib.util.find_spec(module) is None:
            findings.append(Finding(module, "absent", f"needed for {purpose}", remedy))
        else:
            findings.append(Finding(module, "ok", _version(module, distribution)))
    findings.append(_gpu())
    for tool, purpose, remedy in (
        (
            "nvcc",
            "compiling CUDA C++ candidates without a GPU",
            "install the CUDA toolkit, or rely on NVRTC through CuPy",
        ),
        ("ncu", "hardware counters", "install Nsight Compute"),
        ("git", "saying which commit last changed a gate", "install git"),
    ):
        place = shutil.which(tool)
        findings.append(
            Finding(tool, "ok" if place else "absent", "on the PATH" if place else f"needed for {purpose}", remedy)
        )
    shadow = families.importable()
    findings.append(
        Finding(
            "kernels",
            "broken" if shadow else "ok",
            shadow or f"families: {', '.join(families.names())}",
            "run from the repository, or uninstall Hugging Face's package `kernels` in this environment",
        )
    )
    devices = sorted({path.parts[-4] for path in store.FOLDER.glob("*/*/*/rows.jsonl")})
    detail = f"rows of {', '.join(devices)}" if devices else "no measured rows"
    findings.append(Finding("profiles", "ok" if devices else "absent", detail, "lab measure, on a GPU"))
    return findings


def _version(module: str, distribution: str) -> str:
    for name in (distribution, module):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "installed"


def _gpu() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("GPU", "absent", "cannot be looked for without torch", "make verdicts")
    import torch

    if not torch.cuda.is_available():
        what = "torch is a CPU build" if torch.version.cuda is None else "no usable NVIDIA GPU or driver"
        return Finding(
            "GPU", "absent", f"{what}: replay works, `lab measure` does not", "use a machine with an NVIDIA GPU"
        )
    major, minor = torch.cuda.get_device_capability()
    return Finding("GPU", "ok", f"{torch.cuda.get_device_name(0)}, sm_{major}{minor}, CUDA {torch.version.cuda}")


def render(findings: list[Finding]) -> str:
    """One line a finding, remedies after what is missing."""
    lines = []
    for f in findings:
        remedy = f" -> {f.remedy}" if f.status != "ok" and f.remedy else ""
        lines.append(f"{f.status:7} {f.what:11} {f.detail}{remedy}")
    return "\n".join(lines)
