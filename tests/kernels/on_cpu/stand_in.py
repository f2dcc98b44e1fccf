"""Kernels of kernels/ as they are, run on a CPU: on_cpu/sm90.cuh stands in for the instructions of kernels/sm90."""

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kernels import build_cache, cuda

Change = tuple[str, str]
UNCHANGED: Change = ("", "")
HEADER = Path(__file__).with_name("sm90.cuh")
MACHINE = HEADER.with_name("machine.cuh")
# No FMA where the kernel has two roundings; no fortified longjmp, which refuses to switch stacks; nothing that two
# libraries in one process would share.
FLAGS = (
    "-std=c++20",
    "-O1",
    "-march=native",
    "-ffp-contract=off",
    "-U_FORTIFY_SOURCE",
    "-fno-gnu-unique",
    "-w",
    "-fPIC",
)
LINKER = ("-fuse-ld=gold",) * bool(shutil.which("ld.gold"))  # where it is here, in a third of the other's time
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++ to run the kernel on a CPU")


class Stopped(AssertionError):
    """A stand-in found what a device would not survive or not end: why, in which block and thread."""


class StandIn(ctypes.CDLL):
    """A compiled stand-in. A call of any of its functions raises Stopped if the launch was stopped."""

    def __getitem__(self, name: str) -> Any:
        function = super().__getitem__(name)
        why = super().__getitem__("why_it_stopped")
        why.restype = ctypes.c_char_p

        def check(result: Any, *_: Any) -> Any:
            reason = why().decode()
            if reason:
                raise Stopped(reason)
            return result

        function.errcheck = check
        return function


@functools.cache
def _compiler() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, timeout=60).stdout


@functools.cache
def _stand_in() -> Path:
    """The folder of the header, its precompiled form, and the machine that every kernel is linked with."""
    texts = HEADER.read_text(), MACHINE.read_text()

    def make(folder: Path) -> None:
        for path, text in zip((HEADER, MACHINE), texts, strict=True):
            (folder / path.name).write_text(text)
        for what in (["-x", "c++-header", HEADER.name], ["-O2", "-c", "-x", "c++", MACHINE.name]):
            subprocess.run(["g++", *FLAGS, *what], check=True, timeout=300, cwd=folder)
        (folder / HEADER.name).write_text("#error g++ refused the precompiled header\n")

    return build_cache.kept("sm90_on_cpu", (_compiler(), *FLAGS, *texts), make)


def built(source: Path, entry: str, *changes: Change, options: Sequence[str] = (), keep: Any = None) -> StandIn:
    """A .cu with `entry`, C++ that launches its kernels, as a library.

    changes: texts of the .cu, of its family's headers or of the layer, and what stands there instead; AssertionError
    where one is nowhere. keep: of the .cu's lines, those that it is true of.
    """
    text = "\n".join(line for line in source.read_text().splitlines() if keep is None or keep(line))
    # As lines, not as -D: g++ refuses the precompiled header where -D names a word that stands in it.
    defines = (option[2:].partition("=") for option in options if option.startswith("-D"))
    head = "".join(f"#define {name} {value or 1}\n" for name, _, value in defines)
    texts = {"kernel.cpp": f"{head}#line 1\n{text}{entry}"}
    texts |= {header.name: header.read_text() for header in source.parent.glob("*.cuh")}
    folders = ("sm90", "nvfp4") if any('#include "nvfp4/' in text for text in texts.values()) else ("sm90",)
    texts |= {f"{name}/{h.name}": h.read_text() for name in folders for h in (cuda.HEADERS / name).glob("*.cuh")}
    for old, new in changes:
        assert any(old in text for text in texts.values()), f"{old!r} is in no source of {source.name} any more"
        texts = {path: text.replace(old, new) if old else text for path, text in texts.items()}

    def make(folder: Path) -> None:
        for name in folders:
            (folder / name).mkdir()
        for path, text in texts.items():
            (folder / path).write_text(text)
        command = ["g++", *FLAGS, *LINKER, "-shared", "-include", str(_stand_in() / HEADER.name), "-I."]
        command += ["kernel.cpp", str(_stand_in() / "machine.o"), "-o", "kernel.so"]
        done = subprocess.run(command, timeout=300, capture_output=True, text=True, cwd=folder)
        assert not done.returncode, done.stderr[-3000:]

    parts = (_stand_in().name, *FLAGS, *LINKER, *(x for item in sorted(texts.items()) for x in item))
    return StandIn(str(build_cache.kept(f"{source.stem}_on_cpu", parts, make) / "kernel.so"))


def unless_stopped(sound: Callable[[], bool]) -> bool:
    """Whether a changed kernel's answer is `sound`; where the stand-in stops it, it is not."""
    try:
        return sound()
    except Stopped:
        return False
