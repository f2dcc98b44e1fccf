"""NVFP4 linear for many tokens in CUDA C++: wgmma_gemm.cu, compiled for the chosen tile at first use.

One launch on as many CTAs as the device has multiprocessors. The tile and its pipeline are macros; the shape is not,
so one compiled kernel serves every N and K. x is read through a tensor map (CUtensorMap), made on the host from the
address and shape of x and passed by value in the launch; CuPy has no sure word for that, so the launch is the driver's
own, by ctypes.

Partial sums of tiles that workers share live in one buffer per device (17 MB on 132 multiprocessors), made at the first
launch: run once before capturing a CUDA graph, and do not run two of these kernels at once on one device.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernels import cuda
from kernels.common import Candidate, CudaSource, Needs, Tensors, Workload
from kernels.nvfp4 import gemm_tiles

SOURCE = Path(__file__).with_name("wgmma_gemm.cu")
M_MIN = 17
SMS = 132  # of an H100 or H200, for choosing without a device
SHARED_BYTES = 227 * 1024  # what a block may use on compute capability 9.0
ALIGN_BYTES = 1024
TOKEN_TILES = (32, 64, 128, 256)
# Clocks of one CTA for 64 k of 128 rows by so many tokens; for leaving or awaiting sums, and for adding one worker's (a
# fixed part and one per token). Shared work costs more: its workers are at different k, so L2 holds less of what they
# read. Guesses: fitted by eye to one trial at 128 and 256 tokens, 32 and 64 reckoned from instruction counts.
CHUNK_CLOCKS = {32: 300, 64: 400, 128: 640, 256: 1200}
MEETING_CLOCKS, OTHERS_CLOCKS, OTHERS_TOKEN_CLOCKS = 2500, 300, 12
SHARED_FACTOR = 1.05
IN_FLIGHT_BYTES = 152 * 1024  # of a CTA; more may make the first copies come later (NOTES.md: not settled)
LONG_K = 4096  # below it a cluster costs more at its start and end than the shared x saves


@dataclass(frozen=True)
class GemmConfig:
    """A compiled kernel (dtype .. k_groups) and its launch (grid, waves, rows_first).

    tokens: of a tile, by 128 weight rows. cluster: CTAs that share x. chunks: of 64 k per stage. k_groups: pairs of
    warpgroups that take turns in K. grid: CTAs. waves: whole tiles that every worker makes before the tiles left are
    shared out. rows_first: tiles next to each other in the line of work have the same tokens, else the same rows.
    """

    dtype: str
    tokens: int
    cluster: int
    chunks: int
    stages: int
    k_groups: int
    grid: int = SMS
    waves: int = 0
    rows_first: bool = False

    @property
    def kernel(self) -> str:
        """The kernel's name, which tells its macros."""
        tile = f"t{self.tokens}_x{self.cluster}"
        return f"nvfp4_gemm_{self.dtype}_{tile}_c{self.chunks}_s{self.stages}_g{self.k_groups}"

    @property
    def threads(self) -> int:
        return 128 * (2 * self.k_groups + 1)

    @property
    def unit(self) -> int:
        """Chunks of 64 k in a unit of work."""
        return max(2, self.chunks * self.k_groups)

    @property
    def rows(self) -> int:
        """Weight rows of a worker's tile."""
        return gemm_tiles.ROWS * self.cluster

    @property
    def stage_bytes(self) -> int:
        return self.chunks * (128 * self.tokens + gemm_tiles.CHUNK_BYTES)

    @property
    def part_floats(self) -> int:
        """Partial sums of one CTA."""
        return gemm_tiles.ROWS * self.tokens

    @property
    def shared_bytes(self) -> int:
        """Stages, two warpgroups' results, barriers and room to align: as wgmma_gemm.cu lays them out."""
        return _fixed_bytes(self) + self.stages * (self.stage_bytes + 16)

    def __str__(self) -> str:
        return f"{self.kernel} grid={self.grid} waves={self.waves}" + (" rows first" if self.rows_first else "")


def _fixed_bytes(config: GemmConfig) -> int:
    result = min(64, config.tokens) * (128 + 16)
    exchange = 256 * config.tokens if config.k_groups == 2 else 0
    return 2 * max(result, exchange) + ALIGN_BYTES


def _clocks(tokens: int, chunks: int, tiles: int, workers: int, waves: int) -> float:
    """Estimate for `tiles` tiles of `chunks` chunks: `waves` whole ones per worker, the rest shared out."""
    left = max(0, tiles - waves * workers)
    multiply = (waves + SHARED_FACTOR * left / workers) * chunks * CHUNK_CLOCKS[tokens]
    others = -(-workers // left) if left else 0
    return multiply + (MEETING_CLOCKS + others * (OTHERS_CLOCKS + OTHERS_TOKEN_CLOCKS * tokens) if left else 0)


def choose_config(m: int, n: int, k: int, dtype: str, sms: int = SMS, **fixed: Any) -> GemmConfig:
    """The configuration for m tokens, n weight rows, k values, dtype "bf16" or "fp16"; `fixed` overrides fields.

    Tokens and waves are those of the least estimated time. `stages` hold IN_FLIGHT_BYTES unless fixed, and no more than
    fits. Raises ValueError when k is no multiple of 16 or the tile does not fit.
    """
    if k % 16 or m < 1:
        raise ValueError(f"m={m}, k={k}: takes at least one token and k a multiple of 16; pad k with zeros")
    chunks = gemm_tiles.chunks_of(k)
    choices = []
    for tokens in (fixed["tokens"],) if "tokens" in fixed else TOKEN_TILES:
        unfit = (tokens >= 2 * m and tokens > min(TOKEN_TILES)) or (tokens == 64 < m)  # 128 was faster than 2 x 64
        if unfit and "tokens" not in fixed:
            continue
        cluster, chunks_per_stage = 2 if k >= LONG_K else 1, 2 if tokens < 128 else 1
        config = GemmConfig(dtype, tokens, cluster, chunks_per_stage, 1, 2 if tokens == 32 else 1)
        config = replace(config, **fixed)
        tiles = -(-n // config.rows) * -(-m // tokens)
        workers = sms // config.cluster
        whole = tiles // workers
        some = {0, max(0, whole - 1), whole, -(-tiles // workers)}
        for waves in {fixed["waves"]} if "waves" in fixed else some:
            units = tiles if waves * workers >= tiles else tiles * (chunks // config.unit)
            grid = min(workers, units) * config.cluster
            clocks = _clocks(tokens, chunks, tiles, workers, waves)
            choices.append((clocks, -tokens, waves, replace(config, grid=grid, waves=waves)))
    config = min(choices, key=lambda choice: choice[:3])[-1]
    room = (SHARED_BYTES - _fixed_bytes(config)) // (config.stage_bytes + 16)
    config = replace(config, stages=min(room, fixed.get("stages", IN_FLIGHT_BYTES // config.stage_bytes)))
    if config.stages < 2:
        raise ValueError(
            f"{config}: shared memory holds one stage of {config.stage_bytes} bytes; choose a smaller tile"
        )
    return config


@functools.cache
def _source(kernel: GemmConfig) -> CudaSource:
    macros = {
        "KERNEL": kernel.kernel,
        "X_BF16": int(kernel.dtype == "bf16"),
        "TOKENS": kernel.tokens,
        "CLUSTER": kernel.cluster,
        "CHUNKS": kernel.chunks,
        "STAGES": kernel.stages,
        "K_GROUPS": kernel.k_groups,
    }
    return CudaSource(
        path=SOURCE,
        kernels=(kernel.kernel,),
        options=("--std=c++17", *(f"-D{name}={value}" for name, value in macros.items())),
        capability=(9, 0),
        architecture="sm_90a",
        shared_bytes=kernel.shared_bytes,
    )


def source(config: GemmConfig) -> CudaSource:
    """What `config` compiles to; the launch's part of it does not count."""
    return _source(replace(config, grid=0, waves=0, rows_first=False))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.lru_cache(maxsize=1024)
def tensor_map(address: int, rows: int, columns: int, dtype: str, box_rows: int) -> Any:
    """The 128 bytes of a CUtensorMap, for boxes of 64 columns by `box_rows` of a row-major 16-bit matrix.

    128-byte swizzle; zeros outside the matrix. RuntimeError with the driver's code when it refuses.
    """
    room = (ctypes.c_uint8 * 192)()
    aligned = (ctypes.c_uint8 * 128).from_buffer(room, -ctypes.addressof(room) % 64)
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.byref(aligned),
        ctypes.c_int(9 if dtype == "bf16" else 6),  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, _FLOAT16
        ctypes.c_uint32(2),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(2 * columns),
        (ctypes.c_uint32 * 2)(gemm_tiles.COLS, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        ctypes.c_int(0),  # no interleave
        ctypes.c_int(3),  # CU_TENSOR_MAP_SWIZZLE_128B
        ctypes.c_int(2),  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
        ctypes.c_int(0),  # zeros outside
    )
    if code:
        raise RuntimeError(f"cuTensorMapEncodeTiled returned {code} for {rows} x {columns} {dtype} at {address:#x}")
    return aligned


@functools.cache
def _parts(device: int, floats: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(partial sums, flags that every launch leaves at zero) of a device."""
    place = torch.device("cuda", device)
    return torch.empty(floats, device=place), torch.zeros(2 * 1024, dtype=torch.int32, device=place)


@functools.cache
def _sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def prepare(inputs: Tensors) -> Tensors:
    """x as it is, the weights as tiles (gemm_tiles.py), the tensor scale."""
    return {
        "x": inputs["x"],
        "w": gemm_tiles.tile_weights(inputs["w_packed"], inputs["w_scale"], inputs["x"].dtype),
        "w_tensor_scale": inputs["w_tensor_scale"],
    }


def launch(args: Tensors, y: torch.Tensor, config: GemmConfig) -> None:
    """y[M, N] = x[M, K] @ w^T with `config`, one launch on torch's current stream. ValueError on a mismatch."""
    x, w = args["x"], args["w"]
    (m, k), n = x.shape, y.shape[1]
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(x.dtype, "")
    if dtype != config.dtype or not x.is_contiguous() or x.data_ptr() % 16:
        raise ValueError(
            f"x is {x.dtype} with strides {x.stride()}; pass contiguous {config.dtype} x that starts on 16 bytes"
        )
    chunks = gemm_tiles.chunks_of(k)
    if w.shape[:2] != (-(-n // gemm_tiles.ROWS), chunks) or y.shape[0] != m or not y.is_contiguous():
        raise ValueError(
            f"x {tuple(x.shape)} and y {tuple(y.shape)} do not fit tiles {tuple(w.shape)}; prepare this pair"
        )
    device = x.device.index or 0
    kernel = cuda.load(source(config), config.kernel, device, config.shared_bytes)
    parts, flags = _parts(device, _sms(device) * 128 * 256)
    row_tiles, token_tiles = -(-n // config.rows), -(-m // config.tokens)
    pointers = (w, args["w_tensor_scale"], y, parts, flags)
    numbers = (m, n, chunks // config.unit, row_tiles, token_tiles, int(config.rows_first), config.waves)
    values = (
        tensor_map(x.data_ptr(), m, k, dtype, config.tokens // config.cluster),
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in pointers),
        *(ctypes.c_int(number) for number in numbers),
    )
    addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    shape = (config.grid, 1, 1, config.threads, 1, 1, config.shared_bytes)
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    function = ctypes.c_void_p(kernel.function.ptr)
    code = _driver().cuLaunchKernel(function, *(ctypes.c_uint(size) for size in shape), stream, addresses, None)
    if code:
        raise RuntimeError(f"cuLaunchKernel returned {code} for {config}")


def run(args: Tensors, out: Tensors) -> None:
    """y[M, N] = x[M, K] @ w^T in one launch."""
    x, y = args["x"], out["y"]
    dtype = "bf16" if x.dtype == torch.bfloat16 else "fp16"
    launch(args, y, choose_config(x.shape[0], y.shape[1], x.shape[1], dtype, _sms(x.device.index or 0)))


def _refuses(workload: Workload) -> str:
    m = workload["M"]
    return "" if m >= M_MIN else f"M={m} < {M_MIN}: half of the smallest tile would be padding; use cuda_decode"


def _config(workload: Workload) -> str:
    return str(choose_config(workload["M"], workload["N"], workload["K"], workload["dtype"]))


CUDA_SOURCES = tuple(
    dict.fromkeys(
        source(choose_config(m, 17408, 5120, dtype))
        for m, dtype in ((32, "bf16"), (64, "bf16"), (128, "bf16"), (512, "bf16"), (64, "fp16"), (512, "fp16"))
    )
)

CANDIDATES = (
    Candidate(
        name="cuda_gemm",
        precision="nvfp4-w4a16",
        run=run,
        needs=Needs(capability=(9, 0), packages=("cupy",)),
        prepare=prepare,
        refuses=_refuses,
        config=_config,
    ),
)
