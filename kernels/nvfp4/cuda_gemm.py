"""NVFP4 linear from 9 tokens on in CUDA C++: wgmma_gemm.cu, for fewer tokens wgmma_stream.cu and wgmma_resident.cu.

Compiled for the chosen tile at first use; one launch on no more CTAs than the device has multiprocessors. The tile and
its pipeline are macros; the shape is not, so one compiled kernel serves every N and K. wgmma_gemm.cu reads x and the
weights and, where rows of y start on 16 bytes, writes y through tensor maps (CUtensorMap), made on the host from
address and shape and passed by value in the launch.

stream.py (to 24 tokens) and resident.py (to 32) read the decode kernel's copy of the weights (tiles.py); wgmma_gemm.cu
and line.py (25 to 96 tokens of long K) another (row_tiles.py).

`cuda_gemm_chained` is the same, launched programmatically as cuda_decode_chained is (cuda_decode.py says what that is).

Partial sums of stream-K tiles, and the flags that say they are there, belong to the prepared operands (up to 26 MB on
132 multiprocessors): one pair of prepared operands must not run twice at once, two pairs may.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels import cuda, cuda_driver
from kernels.common import Candidate, CudaSource, Needs, Tensors, Work, Workload
from kernels.nvfp4 import gemm_tiles, hopper, line, resident, row_tiles, stream, tiles
from kernels.nvfp4.hopper import SHARED_BYTES, SMS
from kernels.nvfp4.line import LineConfig
from kernels.nvfp4.resident import ResidentConfig
from kernels.nvfp4.stream import StreamConfig

SOURCE = Path(__file__).with_name("wgmma_gemm.cu")
M_MIN = 9
CHAINED = "cuda_gemm_chained"
TOKEN_TILES = (64, 128, 176, 256)
ITERATION_K_BLOCKS = 2  # k blocks of 64 in a stream-K iteration
# Clocks of one CTA for 64 k of 128 rows by so many tokens; of a stream-K fix-up, and of adding one worker's sums there
# (a fixed part and one per token). Stream-K tiles cost more: its workers are at different k, so L2 holds less of what
# they read. Guesses: fitted by eye to one trial at 128 and 256 tokens, 64 and 176 reckoned from instruction counts.
K_BLOCK_CLOCKS = {64: 400, 128: 640, 176: 830, 256: 1200}
FIXUP_CLOCKS, PEER_CLOCKS, PEER_TOKEN_CLOCKS = 2500, 300, 12
STREAM_K_FACTOR = 1.07
SPLIT_K_CLOCKS = 1500  # of a tile in two halves of k: until the other CTA's sums are here
IN_FLIGHT_BYTES = 152 * 1024  # of a CTA; more may make the first copies come later (NOTES.md: not settled)
LONG_K = 4096
LINE_TOKENS = 96  # at 128 line.py's tiles of 64 rows a warpgroup cost more (card one-layout-gemm on an H200)
SHARED_X_K = 2048  # from here on tiles of 256 tokens share x


@dataclass(frozen=True)
class GemmConfig:
    """A compiled kernel (dtype .. gated) and its launch (grid, waves).

    tokens: of a tile, by 128 weight rows. cluster: CTAs that share x. stages: of 64 k. split_k: two CTAs halve the k of
    a tile. gated: SiLU(gate) * up of rows that alternate in eights (gated.py). grid: CTAs. waves: of data-parallel
    tiles, before the stream-K partition of the tiles left.
    """

    dtype: str
    tokens: int
    cluster: int
    stages: int
    split_k: bool = False
    gated: bool = False
    grid: int = SMS
    waves: int = 0

    @property
    def kernel(self) -> str:
        """The kernel's name, which tells its macros."""
        halves, gated = "_split" * self.split_k, "_gated" * self.gated
        return f"nvfp4_gemm_{self.dtype}_t{self.tokens}_x{self.cluster}_s{self.stages}{halves}_rows{gated}"

    @property
    def threads(self) -> int:
        return 384

    @property
    def rows(self) -> int:
        """Weight rows of a worker's tile."""
        return gemm_tiles.ROWS * self.cluster

    @property
    def stage_bytes(self) -> int:
        return 128 * self.tokens + gemm_tiles.K_BLOCK_BYTES

    @property
    def result_bytes(self) -> int:
        """A tile of a CTA, 16-bit."""
        return 2 * gemm_tiles.ROWS * self.tokens

    @property
    def part_floats(self) -> int:
        """Partial sums of one CTA in global memory."""
        return 0 if self.split_k else gemm_tiles.ROWS * self.tokens

    @property
    def shared_bytes(self) -> int:
        """Stages, results and barriers, as wgmma_gemm.cu lays them out."""
        return self.result_bytes + self.stages * (self.stage_bytes + 16) + 8 * self.split_k

    def __str__(self) -> str:
        return f"{self.kernel} grid={self.grid} waves={self.waves}"


def _clocks(tokens: int, k_blocks: int, tiles: int, workers: int, waves: int) -> float:
    """Estimate for `tiles` tiles of `k_blocks` k blocks: `waves` whole ones per worker, the rest by stream-K."""
    left = max(0, tiles - waves * workers)
    multiply = (waves + STREAM_K_FACTOR * left / workers) * k_blocks * K_BLOCK_CLOCKS[tokens]
    others = -(-workers // left) if left else 0
    return multiply + (FIXUP_CLOCKS + others * (PEER_CLOCKS + PEER_TOKEN_CLOCKS * tokens) if left else 0)


def _cluster(tokens: int, tiles: int, k: int, sms: int) -> int:
    """CTAs that share x. A cluster costs at its start and end: it pays for long K and a tile or more for every CTA.

    tiles: of 128 weight rows. Tiles of 256 tokens keep the cluster where they are few too (not tried without one), and
    at shorter K.
    """
    return 2 if (tokens == 256 and k >= SHARED_X_K) or (tiles >= sms and k >= LONG_K) else 1


def choose_config(m: int, n: int, k: int, dtype: str, sms: int = SMS, **fixed: Any) -> GemmConfig:
    """The configuration for m tokens, n weight rows, k values, dtype "bf16" or "fp16"; `fixed` overrides fields.

    Tokens, waves and split_k are those of the least estimated time. A tile is split-K, unless fixed, only where it is
    of 64 tokens, K is short and every tile has two CTAs of its own. `stages` hold IN_FLIGHT_BYTES unless fixed, and no
    more than fits. Raises ValueError when k is no multiple of 16, or where `split_k` is fixed and not possible.
    """
    if k % 16 or m < 1:
        raise ValueError(f"m={m}, k={k}: takes at least one token and k a multiple of 16; pad k with zeros")
    k_blocks = gemm_tiles.k_blocks_of(k)
    choices = []
    for tokens in (fixed["tokens"],) if "tokens" in fixed else TOKEN_TILES:
        unfit = (tokens >= 2 * m and tokens > min(TOKEN_TILES)) or (tokens == 64 < m and k >= LONG_K)
        if unfit and "tokens" not in fixed:
            continue
        cluster = _cluster(tokens, -(-n // gemm_tiles.ROWS) * -(-m // tokens), k, sms)
        config = replace(GemmConfig(dtype, tokens, cluster, 3), **fixed)
        tiles = -(-n // config.rows) * -(-m // tokens)
        workers = sms // config.cluster
        whole = tiles // workers
        some = {0, max(0, whole - 1), whole, -(-tiles // workers)}
        small = tokens == min(TOKEN_TILES) and k < LONG_K and "waves" not in fixed
        if config.cluster == 1 and 2 * tiles <= sms and fixed.get("split_k", small):
            clocks = k_blocks / 2 * K_BLOCK_CLOCKS[tokens] + SPLIT_K_CLOCKS
            choices.append((clocks, -tokens, 0, replace(config, split_k=True, grid=2 * tiles, waves=0)))
        if fixed.get("split_k"):
            continue
        for waves in {fixed["waves"]} if "waves" in fixed else some:
            iterations = tiles if waves * workers >= tiles else tiles * (k_blocks // ITERATION_K_BLOCKS)
            grid = min(workers, iterations) * config.cluster
            clocks = _clocks(tokens, k_blocks, tiles, workers, waves)
            choices.append((clocks, -tokens, waves, replace(config, grid=grid, waves=waves)))
    if not choices:
        raise ValueError(f"m={m}, n={n}, k={k}: a tile cannot be split between two CTAs; leave split_k out")
    config = min(choices, key=lambda choice: choice[:3])[-1]
    room = (SHARED_BYTES - config.result_bytes - 8 * config.split_k) // (config.stage_bytes + 16)
    return replace(config, stages=min(room, fixed.get("stages", max(3, IN_FLIGHT_BYTES // config.stage_bytes))))


Config = GemmConfig | LineConfig | ResidentConfig | StreamConfig


def streamed(m: int, n: int, k: int, dtype: str, sms: int, gated: bool = False) -> StreamConfig | LineConfig:
    """The kernel that streams both operands: stream.py's for its tokens, of more line.py's."""
    if m <= max(stream.TOKENS):
        return stream.choose_config(m, n, k, dtype, sms, gated=gated)
    return line.choose_config(m, n, k, dtype, sms, gated=gated)


def choose(m: int, n: int, k: int, dtype: str, sms: int = SMS) -> Config:
    """The kernel for a shape. Raises ValueError when k is no multiple of 16.

    Up to LINE_TOKENS of long K both operands are streamed, from 25 on by line.py; up to 32, x stays resident where that
    is short for a multiprocessor and x fits. Else CTAs make tiles of x.
    """
    if m <= resident.TOKENS and k >= resident.K_MIN:
        if stream.pays(n, k, sms):
            return streamed(m, n, k, dtype, sms)
        if resident.fits(k):
            return resident.choose_config(m, n, k, dtype)
    if resident.TOKENS < m <= LINE_TOKENS and k >= LONG_K:
        return line.choose_config(m, n, k, dtype, sms)
    return choose_config(m, n, k, dtype, sms)


def layout_of(config: Config) -> str:
    """The word of the weights' layout (repack.py) that a configuration reads."""
    return "tiles" if isinstance(config, ResidentConfig | StreamConfig) else "row_tiles"


def source(config: Config) -> CudaSource:
    """What `config` compiles to; the launch's part of it does not count."""
    if isinstance(config, ResidentConfig):
        return resident.source(config)
    if isinstance(config, StreamConfig):
        return stream.source(config)
    if isinstance(config, LineConfig):
        return line.source(config)
    macros = {
        "X_BF16": int(config.dtype == "bf16"),
        "BLOCK_M": config.tokens,
        "CLUSTER": config.cluster,
        "SPLIT_K": int(config.split_k),
        "STAGES": config.stages,
    } | ({"GATED": 1} if config.gated else {})
    return hopper.source(SOURCE, config.kernel, config.shared_bytes, macros)


def workspace(config: GemmConfig, device: torch.device) -> Tensors:
    """What the CTAs of one launch leave to each other: sums, and flags that every launch puts back to zero."""
    return {
        "parts": torch.empty(config.grid * config.part_floats, device=device),
        "flags": torch.zeros(2 * config.grid, dtype=torch.int32, device=device),
    }


def prepare(inputs: Tensors) -> Tensors:
    """x as it is, the weights as the tiles of the kernel that x's shape gets, the tensor scale, the workspace."""
    x, packed, scale = inputs["x"], inputs["w_packed"], inputs["w_scale"]
    config, device = config_of(x, packed.shape[0], packed.device), packed.device
    layout = tiles if layout_of(config) == "tiles" else row_tiles
    made = {"x": x, "w": layout.tile_weights(packed, scale, x.dtype), "w_tensor_scale": inputs["w_tensor_scale"]}
    if isinstance(config, ResidentConfig):
        return made
    if isinstance(config, StreamConfig):
        return made | stream.workspace(config, device)
    return made | (line.workspace(config, device) if isinstance(config, LineConfig) else workspace(config, device))


def launch(args: Tensors, y: torch.Tensor, config: GemmConfig, programmatic: bool = False) -> None:
    """y[M, N] = x[M, K] @ w^T with `config`, one launch on torch's current stream. ValueError on a mismatch.

    y is [M, N / 2] where `config` is gated. programmatic: it may start, and fetch weights, while the kernel ahead of
    it ends.
    """
    x, w = args["x"], args["w"]
    (m, k), n, halved = x.shape, y.shape[1], 1 + config.gated
    dtype = hopper.check(x, w, y, tiles.ROWS // halved, -(-k // tiles.COLS))
    if dtype != config.dtype:
        raise ValueError(f"x is {x.dtype}; {config} takes {config.dtype}")
    parts, flags = args["parts"], args["flags"]
    if parts.numel() < config.grid * config.part_floats or flags.numel() < 2 * config.grid:
        raise ValueError(f"{parts.numel()} partial sums are too few for {config}; pass its workspace()")
    device = x.device.index or 0
    kernel = cuda.load(source(config), config.kernel, device, config.shared_bytes)
    row_blocks, token_tiles = -(-n * halved // config.rows), -(-m // config.tokens)
    x_map = cuda_driver.tensor_map(x.data_ptr(), dtype, m, k, config.tokens // config.cluster)
    iterations = gemm_tiles.k_blocks_of(k) // ITERATION_K_BLOCKS
    numbers = (m, n, iterations, row_blocks, token_tiles, config.waves)
    mapped = n % 8 == 0 and y.data_ptr() % 16 == 0
    box = {"box_bytes": cuda_driver.ROW_BYTES // 2} if config.gated else {}
    y_map = cuda_driver.tensor_map(y.data_ptr(), dtype, m, n, config.tokens, **box) if mapped else x_map
    arguments = (
        x_map,
        y_map,
        tiles.boxes(w, gemm_tiles.ROW_TILES, 1),
        args["w_tensor_scale"],
        y,
        parts,
        flags,
        *(cuda.i32(number) for number in numbers),
    )
    cuda.launch(kernel, (config.grid,), config.threads, arguments, config.shared_bytes, programmatic)


def most_workspace(layout: str, device: torch.device) -> Tensors:
    """Scratch for every launch on a device that reads weights in `layout` (`layout_of`), none where it takes none."""
    sms = hopper.multiprocessors(device.index or 0) if device.type == "cuda" else SMS
    if layout == "tiles":
        return stream.workspace(StreamConfig("bf16", max(stream.TOKENS), stream.STAGES, sms), device)
    if layout == "row_tiles":
        few = line.workspace(LineConfig("bf16", LINE_TOKENS, workers=sms), device)
        return few | workspace(GemmConfig("bf16", max(TOKEN_TILES), 1, 3, grid=sms), device)
    return {}


def config_of(x: torch.Tensor, n: int, place: torch.device) -> Config:
    """The configuration for x [M, K] (its values are not looked at) and n weight rows on a device."""
    (m, k), dtype = x.shape, "bf16" if x.dtype == torch.bfloat16 else "fp16"
    if place.type != "cuda":
        return choose(m, n, k, dtype)
    device = place.index or 0
    config = choose(m, n, k, dtype, hopper.multiprocessors(device))
    if isinstance(config, ResidentConfig):
        clusters = hopper.most_clusters(resident.source(config), config, device)
        return resident.choose_config(m, n, k, dtype, clusters)
    return config


def run(args: Tensors, out: Tensors, programmatic: bool = False) -> None:
    """y[M, N] = x[M, K] @ w^T in one launch."""
    x, y = args["x"], out["y"]
    perform(args, y, config_of(x, y.shape[1], x.device), programmatic)


def perform(args: Tensors, y: torch.Tensor, config: Config, programmatic: bool = False) -> None:
    """y[M, N] = x[M, K] @ w^T with `config`, of whichever kernel it is. ValueError on a mismatch.

    programmatic: see `launch`.
    """
    if isinstance(config, ResidentConfig):
        resident.launch(args, y, config, programmatic)
    elif isinstance(config, StreamConfig):
        stream.launch(args, y, config, programmatic)
    elif isinstance(config, LineConfig):
        line.launch(args, y, config, programmatic)
    else:
        launch(args, y, config, programmatic)


def _refuses(workload: Workload) -> str:
    m = workload["M"]
    return "" if m >= M_MIN else f"M={m} < {M_MIN}: cuda_decode's products of 8 tokens waste less; use cuda_decode"


def _config(workload: Workload) -> str:
    return str(choose(workload["M"], workload["N"], workload["K"], workload["dtype"]))


def work(workload: Workload, sms: int) -> Work:
    """Of the kernel that the shape gets: stages of a k slice, iterations and their sums, or tiles and their fix-up."""
    m, n, k = (int(workload[axis]) for axis in "MNK")
    config = choose(m, n, k, workload["dtype"], sms)
    moved = n * k * tiles.TILE_BYTES / (tiles.ROWS * tiles.COLS) + 2.0 * m * (k + n)
    if isinstance(config, ResidentConfig):
        row_blocks = -(-n // resident.ROWS)
        of_cluster = -(-row_blocks // config.clusters) * config.depth
        at_once = {"bytes": moved, "sm_bytes": float(of_cluster * resident.STAGE_BYTES)}
        return Work(at_once, {"launches": 1.0, "resident": config.depth * 2 * 128 * resident.TOKENS / 32 + 2000.0})
    if isinstance(config, StreamConfig):
        iterations = -(-stream.iterations_of(n, k) // config.workers)
        clocks = {"stream": 250.0 * iterations, "stream_tokens": 15.0 * iterations * config.tokens}
        return Work({"bytes": moved, "sm_bytes": float(iterations * stream.ITERATION_BYTES), **clocks})
    if isinstance(config, LineConfig):
        walk, sums = line.clocks(config, n, k)
        sums += PEER_CLOCKS * -(-config.workers // -(-n // config.rows))  # each worker of a block waits for the others
        return Work({"bytes": moved, "line": walk}, {"launches": 1.0, "sums": sums})
    k_blocks, workers = gemm_tiles.k_blocks_of(k), config.grid // config.cluster
    tiles_ = -(-n // config.rows) * -(-m // config.tokens)
    left = 0 if config.split_k else max(0, tiles_ - config.waves * workers)
    blocks = k_blocks / 2 if config.split_k else (config.waves + STREAM_K_FACTOR * left / workers) * k_blocks
    at_once = {"bytes": moved, "tiles": blocks * K_BLOCK_CLOCKS[config.tokens]}
    fixup = FIXUP_CLOCKS + -(-workers // left) * (PEER_CLOCKS + PEER_TOKEN_CLOCKS * config.tokens) if left else 0.0
    return Work(at_once, {"launches": 1.0, "fixup": fixup + SPLIT_K_CLOCKS * config.split_k})


CUDA_SOURCES = tuple(
    dict.fromkeys(
        source(config)
        for config in (
            choose(m, n, k, dtype)
            for m, n, k, dtype in (
                (16, 17408, 5120, "bf16"),
                (24, 17408, 5120, "bf16"),
                (32, 17408, 5120, "bf16"),
                (32, 17408, 5120, "fp16"),
                (32, 5120, 6144, "bf16"),
                (32, 5120, 6144, "fp16"),
                (33, 1000, 4112, "bf16"),
                (33, 17408, 5120, "bf16"),
                (64, 17408, 5120, "bf16"),
                (64, 17408, 5120, "fp16"),
                (64, 4096, 2048, "bf16"),
                (96, 17408, 5120, "bf16"),
                (128, 4096, 2048, "bf16"),
                (128, 5120, 6144, "bf16"),
                (128, 17408, 5120, "bf16"),
                (128, 17408, 5120, "fp16"),
                (512, 4096, 2048, "bf16"),
                (512, 5120, 6144, "bf16"),
                (512, 17408, 5120, "bf16"),
                (512, 17408, 5120, "fp16"),
                (2048, 4096, 2048, "bf16"),
            )
        )
    )
)

CANDIDATES = tuple(
    Candidate(
        name=name,
        precision="nvfp4-w4a16",
        run=partial(run, programmatic=name == CHAINED),
        needs=Needs(capability=(9, 0), packages=("cupy",)),
        prepare=prepare,
        refuses=_refuses,
        config=_config,
        work=work,
        no_route="timed in a chain of its own kind only; kernels/step compares" if name == CHAINED else "",
    )
    for name in ("cuda_gemm", CHAINED)
)
