"""`lab export`: the folder builds, its test sees right and wrong kernels, and nothing is half written."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.base import devices
from lab.base.errors import BadInput
from lab.check import export, families
from tests.refused import refused

NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None or not shutil.which("make"), reason="needs nvcc and make")
GEMV = ("nvfp4", "cuda_gemv", "M=2 N=48 K=64")
# A driver on the CPU whose only kernel is the GEMV; what the environment variable WRONG says goes wrong.
DRIVER = r"""
#include <cuda.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
static int wrong(const char *what) { const char *is = getenv("WRONG"); return is && !strcmp(is, what); }
CUresult cuInit(unsigned f) { return 0; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = 0; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)1; return 0; }
CUresult cuCtxSetCurrent(CUcontext c) { return 0; }
CUresult cuCtxSynchronize(void) { return 0; }
CUresult cuGetErrorString(CUresult r, const char **s) { *s = "told"; return 0; }
CUresult cuMemAlloc(CUdeviceptr *p, size_t n) {
    *p = (CUdeviceptr)aligned_alloc(256, (n + 255) / 256 * 256);
    return n ? 0 : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemcpyHtoD(CUdeviceptr d, const void *s, size_t n) { memcpy((void *)d, s, n); return 0; }
CUresult cuMemcpyDtoH(void *d, CUdeviceptr s, size_t n) { memcpy(d, (void *)s, n); return 0; }
CUresult cuMemsetD8(CUdeviceptr d, unsigned char v, size_t n) { memset((void *)d, v, n); return 0; }
CUresult cuMemsetD32(CUdeviceptr d, unsigned v, size_t n) { for (; n--; d += 4) memcpy((void *)d, &v, 4); return 0; }
CUresult cuModuleLoadData(CUmodule *m, const void *code) { *m = (CUmodule)code; return memcmp(code, "\x7f" "ELF", 4); }
CUresult cuModuleUnload(CUmodule m) { return 0; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) {
    *f = (CUfunction)1;
    return strcmp(name, "nvfp4_gemv_bf16_m2_g2") ? CUDA_ERROR_NOT_FOUND : 0;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return 0; }
static float bf16(uint16_t b) { uint32_t w = (uint32_t)b << 16; float f; memcpy(&f, &w, 4); return f; }
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **p, void **extra) {
    static const float E2M1[] = {0, .5, 1, 1.5, 2, 3, 4, 6};
    const uint16_t *x = *(void **)p[0];
    const uint8_t *w = *(void **)p[1], *s = *(void **)p[2];
    uint16_t *y = *(void **)p[4];
    int m = *(int *)p[5], n = *(int *)p[6], k = *(int *)p[7];
    if (wrong("fails")) return CUDA_ERROR_LAUNCH_FAILED;
    if (wrong("silent")) return 0;
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double sum = 0;
            for (int t = 0; t < k; t++) {
                int code = w[(j * k + t) / 2] >> 4 * (t % 2) & 15, b = s[(j * k + t) / 16];
                float scale = b >> 3 ? ldexpf(8 + (b & 7), (b >> 3) - 10) : ldexpf(b & 7, -9);
                sum += bf16(x[i * k + t]) * E2M1[code & 7] * (code & 8 ? -1 : 1) * scale;
            }
            float out = sum * *(float *)*(void **)p[3];
            if (wrong("element") && i == 1 && j == 17) out = -out;
            uint32_t bits;
            memcpy(&bits, &out, 4);
            y[i * n + j] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        }
    return 0;
}
"""


def exported(to: Path, family: str, name: str, shape: str) -> Path:
    export.export(families.load(family), name, shape, devices.get("h200"), to)
    return to


@needs_nvcc
@pytest.mark.slow
def test_the_folder_builds_and_its_test_tells_right_from_wrong(tmp_path: Path) -> None:
    folder = exported(tmp_path / "gemv", *GEMV)
    driver = tmp_path / "driver"
    driver.mkdir()
    (driver / "driver.c").write_text(DRIVER)
    build = ["nvcc", "-shared", "-Xcompiler", "-fPIC", str(driver / "driver.c"), "-o", str(driver / "libcuda.so")]
    subprocess.run(build, check=True)
    shutil.copy(driver / "libcuda.so", driver / "libcuda.so.1")
    subprocess.run(["make", "-s", "test", f"LDLIBS=-L{driver} -lcuda -lm"], cwd=folder, check=True)

    def ran(**how: str) -> tuple[int, str]:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), **how}
        done = subprocess.run(["./test"], cwd=folder, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    code, said = ran()
    assert (code, said.count("ok")) == (0, 1), said
    assert ran(WRONG="element")[0] == 1
    assert ran(WRONG="silent")[0] == 1  # y is still NaN
    assert ran(WRONG="fails")[0] == 2
    vector = folder / "vectors" / "x.bin"
    vector.write_bytes(vector.read_bytes()[:-1])
    assert ran()[0] == 2
    vector.write_bytes(bytes(2 * 64 * 2))  # another x
    assert ran()[0] == 1


def test_the_vectors_are_the_references(tmp_path: Path) -> None:
    folder = exported(tmp_path / "gemv", *GEMV)
    family = families.load("nvfp4")
    inputs = family.cases.inputs(family.workload(GEMV[2]), 0, "cpu")
    wanted = family.reference(inputs)["y"]
    stored = torch.frombuffer(bytearray((folder / "vectors/y.expected.bin").read_bytes()), dtype=torch.float64)
    torch.testing.assert_close(stored.view(2, 48), wanted, rtol=0, atol=0)
    assert (folder / "vectors/w_packed.bin").read_bytes() == inputs["w_packed"].numpy().tobytes()
    said = json.loads((folder / "export.json").read_text())
    assert (said["candidate"], said["device"], said["kernels"]) == ("cuda_gemv", "h200", ["nvfp4_gemv_bf16_m2_g2"])
    texts = [path.read_text() for path in folder.iterdir() if path.is_file()]
    assert not [text for text in texts if os.getcwd() in text or str(tmp_path) in text]  # it stands alone


OTHERS = [
    ("nvfp4", "cuda_gemm", "M=24 N=512 K=1024"),
    ("nvfp4", "cuda_gemm", "M=48 N=512 K=4096"),
    ("nvfp4", "cuda_decode", "M=8 N=512 K=1024"),
    ("nvfp4", "cuda_w4a8", "M=32 N=512 K=1024"),
    ("kv", "cuda_fp8", "batch=2 ctx=64 Hq=8 Hkv=2 D=128 page=16"),
    ("gdn", "cuda_scan", "t75_hk1_hv2_d128"),
    ("gdn", "cuda_decode", "decode_b3_hk1_hv3_d128_f32"),
]
TRITON = [
    ("nvfp4", "triton_gemv", "M=1 N=64 K=256"),
    ("gdn", "recurrent_decode", "decode_b3_hk1_hv3_d128_f32"),
    ("kv", "splitkv_fp8", "batch=2 ctx=64 Hq=8 Hkv=2 D=128 page=16"),
]


def compiles(folder: Path) -> None:
    for name in ("launcher.c", "test.c"):
        flags = "-fsyntax-only,-Wall,-Wextra,-Werror,-Wno-missing-field-initializers"
        subprocess.run(["nvcc", "-c", "-Xcompiler", flags, name, "-o", "/dev/null"], cwd=folder, check=True)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(("family", "name", "shape"), OTHERS, ids=lambda word: str(word).replace(" ", "_"))
def test_each_kind_of_launch_becomes_c_that_compiles(tmp_path: Path, family: str, name: str, shape: str) -> None:
    folder = exported(tmp_path / "out", family, name, shape)
    compiles(folder)
    launcher, case = (folder / "launcher.c").read_text(), (folder / "case.h").read_text()
    assert ("cuTensorMapEncodeTiled" in launcher) == (name in ("cuda_gemm", "cuda_w4a8", "cuda_fp8", "cuda_scan"))
    if name == "cuda_gemm":  # boxes of x, and of y where it has a map, are swizzled; those of weights lie as they are
        maps = ["(CUtensorMapSwizzle)0", "(CUtensorMapSwizzle)3"]
        assert sorted(set(re.findall(r"\(CUtensorMapSwizzle\)\d", launcher))) == maps
    if name == "cuda_decode" and family == "gdn":
        assert '"vectors/state.bin"' in case  # updated in place: it begins as the input
    for source in re.findall(r"#include \"([^\"]+)\"", "".join(p.read_text() for p in folder.rglob("src/**/*.cu"))):
        assert list(folder.glob(f"src/**/{source}")), source


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each of TRITON, in a folder of its family: one process, as it imports torch and Triton uninterpreted."""
    into = tmp_path_factory.mktemp("cubins")
    asked = [["export", family, name, "--shape", shape.replace(" ", ","), family] for family, name, shape in TRITON]
    program = "import sys; from lab.cli.main import main; sys.exit(max(main(one.split()) for one in sys.argv[1:]))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.getcwd()
    command = [sys.executable, "-c", program, *map(" ".join, asked)]
    subprocess.run(command, cwd=into, env=environment, check=True, stdout=subprocess.PIPE)
    return into


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family, _, _ in TRITON])
def test_triton_is_exported_as_a_cubin(cubins: Path, family: str) -> None:
    folder = cubins / family
    compiles(folder)
    assert (folder / "kernel_0.cubin").read_bytes()[:4] == b"\x7fELF"
    ptx, launcher = (folder / "kernel_0.ptx").read_text(), (folder / "launcher.c").read_text()
    entry = ptx[ptx.index(".entry") :]
    passed = re.search(r"void \*arguments\[\] = \{([^}]*)\}", launcher)
    assert passed
    assert passed.group(1).count("&") == entry[: entry.index("{")].count(".param")


@pytest.mark.parametrize(
    ("family", "name", "shape", "device", "said"),
    [
        ("nvfp4", "cuda_gemv", "M=64 N=48 K=64", "h200", "M=64 > 8"),
        ("nvfp4", "cuda_decode", "M=8 N=512 K=1024", "gb10", "sm_90a"),
        ("nvfp4", "torch_bf16", "M=8 N=512 K=1024", "h200", "library"),
        ("nvfp4", "cuda_gemvv", "M=8 N=512 K=1024", "h200", "cuda_gemv"),
        ("nvfp4", "cuda_gemv", "M=8 N=512", "h200", "K"),
        (
            "nvfp4",
            "cuda_gemv",
            "M=8 N=64 K=73",
            "h200",
            "M=8 N=64 K=73 has no inputs: .* a multiple of 16.*another shape",
        ),
    ],
)
def test_what_cannot_be_exported_is_refused(
    tmp_path: Path, family: str, name: str, shape: str, device: str, said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        export.export(families.load(family), name, shape, devices.get(device), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(BadInput, match="new folder"):
        exported(tmp_path, *GEMV)
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_an_output_that_the_test_cannot_read_is_refused(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exported test would leave it out, and pass."""
    family = families.load("nvfp4")
    monkeypatch.setattr(family.cases, "outputs", lambda workload, inputs: {"y": torch.zeros(2, 48).to(dtype)})
    with refused("nvfp4 cuda_gemv", f'"y" is {dtype}', remedy="torch.bfloat16"):
        exported(tmp_path / "out", *GEMV)
    assert not list(tmp_path.iterdir())


def test_memory_that_is_not_an_argument_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels import cuda
    from kernels.nvfp4 import cuda_gemv

    def strays(args: Any, out: Any) -> None:
        cuda.launch(cuda.load(cuda_gemv.CUDA_SOURCES[0], "stray", 0), (1,), 32, [torch.zeros(3)])

    family = families.load("nvfp4")
    own = family.candidate("cuda_gemv")
    monkeypatch.setitem(family.candidates, "cuda_gemv", dataclasses.replace(own, run=strays))
    with pytest.raises(BadInput, match="memory of the candidate's own"):
        exported(tmp_path / "out", *GEMV)
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@needs_nvcc
@pytest.mark.parametrize(("family", "name", "shape"), [GEMV, *OTHERS], ids=lambda word: str(word).replace(" ", "_"))
def test_the_folder_passes_on_the_gpu(tmp_path: Path, family: str, name: str, shape: str) -> None:
    folder = exported(tmp_path / "out", family, name, shape)
    done = subprocess.run(["make", "-s", "check"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
