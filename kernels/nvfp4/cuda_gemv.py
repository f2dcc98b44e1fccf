"""The GEMV in CUDA C++ (gemv.cu), compiled by NVRTC through CuPy at first use.

A second implementation earns its place twice: it is the check on the Triton one (other language, other weight layout,
other decoding), and it is where the ladder continues, because the loads, the registers and the order of the unpacking
are written down here and not chosen by a compiler pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kernels import cuda
from kernels.common import Candidate, CudaSource, Needs, Tensors, Work, Workload

WARPS = 4
M_MAX = 8
# Weight rows per warp by rows of x held, as GEMV_ALL in gemv.cu instantiates them.
ROWS_PER_WARP = {1: 4, 2: 4, 4: 2, 8: 2}

SOURCE = Path(__file__).with_name("gemv.cu")
CUDA_SOURCES = (
    CudaSource(
        path=SOURCE,
        kernels=tuple(f"nvfp4_gemv_{d}_m{m}_g{g}" for d in ("bf16", "fp16") for m in ROWS_PER_WARP for g in (1, 2)),
    ),
)


@dataclass(frozen=True)
class GemvConfig:
    """A launch: the kernel's name, its grid and its block size in threads."""

    kernel: str
    grid: int
    threads: int

    def __str__(self) -> str:
        return f"{self.kernel} grid={self.grid} threads={self.threads}"


def choose_config(m: int, n: int, k: int, dtype: str) -> GemvConfig:
    """The instantiation for m <= 8 rows, n weight rows, k values, dtype "bf16" or "fp16".

    16-byte loads of a row need k / 2 to be a multiple of 16 bytes; an odd multiple of 16 values takes the 8-byte path.
    """
    if not 1 <= m <= M_MAX or k % 16:
        raise ValueError(f"m={m}, k={k}: this GEMV takes 1 to {M_MAX} rows and k a multiple of 16; use a GEMM or pad k")
    held = next(size for size in ROWS_PER_WARP if size >= m)
    grid = -(-n // (WARPS * ROWS_PER_WARP[held]))
    return GemvConfig(f"nvfp4_gemv_{dtype}_m{held}_g{1 if k % 32 else 2}", grid, 32 * WARPS)


def run(args: Tensors, out: Tensors) -> None:
    """y[M, N] = x[M, K] @ w^T in one launch on torch's current stream."""
    x, w, y = args["x"], args["w_packed"], out["y"]
    (m, k), n = x.shape, w.shape[0]
    if x.dtype not in (torch.bfloat16, torch.float16) or not (x.is_contiguous() and w.is_contiguous()):
        raise ValueError(
            f"x is {x.dtype} with strides {x.stride()}, w has {w.stride()}; pass contiguous bf16 or fp16 x"
        )
    if w.shape[1] * 2 != k:
        raise ValueError(f"x has K={k} but the weights hold K={2 * w.shape[1]}; pass a matching pair")
    if x.data_ptr() % 16 or w.data_ptr() % 16:
        raise ValueError("x and w_packed must start on 16 bytes for the wide loads; clone() the view")
    config = choose_config(m, n, k, "bf16" if x.dtype == torch.bfloat16 else "fp16")
    kernel = cuda.load(CUDA_SOURCES[0], config.kernel, x.device.index or 0)
    arguments = (x, w, args["w_scale"], args["w_tensor_scale"], y, *map(cuda.i32, (m, n, k)))
    cuda.launch(kernel, (config.grid,), config.threads, arguments)


def _refuses(workload: Workload) -> str:
    m = workload["M"]
    return "" if m <= M_MAX else f"M={m} > {M_MAX}: the accumulators of more rows do not fit in registers"


def _config(workload: Workload) -> str:
    return str(choose_config(workload["M"], workload["N"], workload["K"], workload["dtype"]))


def work(workload: Workload, sms: int) -> Work:
    """Products on CUDA cores: the weights of a multiprocessor are unpacked once, and multiplied for every row of x."""
    m, n, k = (int(workload[axis]) for axis in "MNK")
    held = next(size for size in ROWS_PER_WARP if size >= m)
    rows = WARPS * ROWS_PER_WARP[held]
    weights = -(-n // (rows * sms)) * rows * k
    at_once = {"bytes": n * k * 9 / 16 + 2.0 * m * (k + n), "unpack": weights / 32, "multiply": weights * held / 128}
    return Work(at_once, {"launches": 1.0, "row": k / 4})


CANDIDATES = (
    Candidate(
        name="cuda_gemv",
        precision="nvfp4-w4a16",
        run=run,
        needs=Needs(capability=(8, 0), packages=("cupy",)),
        refuses=_refuses,
        config=_config,
        work=work,
    ),
)
