"""Machine code of a CUDA source for sm_90a: what no run on a CPU and no bit of the output tells."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kernels import cuda
from kernels.common import CudaSource


def compiled(source: CudaSource, folder: Path) -> Path:
    """The source's cubin; skips the test where nvcc, or the disassembler that comes with Triton, is not installed."""
    triton = pytest.importorskip("triton")
    if not shutil.which("nvcc"):
        pytest.skip("nvcc is not installed")
    made = folder / f"{source.path.stem}.cubin"
    includes = [f"-I{x}" for x in cuda.include_folders(source)]
    command = ["nvcc", "-cubin", *cuda.nvcc_architecture("sm_90a"), *includes, *source.options, str(source.path)]
    subprocess.run([*command, "-o", str(made)], check=True, capture_output=True, timeout=300)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    (folder / "cuobjdump").symlink_to(tool)
    return made


def listing(cubin: Path, kernel: str) -> str:
    """The instructions of one kernel of `compiled`'s cubin."""
    asked = [str(cubin.with_name("cuobjdump")), "-sass", "-fun", kernel, str(cubin)]
    return subprocess.run(asked, check=True, capture_output=True, text=True, timeout=60).stdout
