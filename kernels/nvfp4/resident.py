"""cuda_gemm's kernel for a few dozen tokens where stream.py's has little to do: wgmma_resident.cu's configuration and
launch.

The weights are the decode kernel's (tiles.py), of which a stage, 64 rows x 128 k, is a box of a tensor map. x stays in
shared memory for the whole launch, a slice of K in each CTA of a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernels import cuda
from kernels.common import CudaSource, Tensors
from kernels.nvfp4 import hopper, tiles
from kernels.nvfp4.hopper import SHARED_BYTES, SMS_HELD

SOURCE = Path(__file__).with_name("wgmma_resident.cu")
TOKENS = 32
K_MIN = 5120  # below it, cuda_decode was faster in a trial
ROWS, ROW_TILES = 64, 4
STAGE_BYTES = 2 * ROW_TILES * tiles.TILE_BYTES
SLOT_BYTES = ROWS * TOKENS * 4
CLUSTER, GROUPS = 8, 3
CLUSTERS = SMS_HELD[CLUSTER] // CLUSTER
MOST_STAGES = 4  # of a pipeline; more would only queue


@dataclass(frozen=True)
class ResidentConfig:
    """A compiled kernel (dtype .. stages) and its launch (depth, clusters).

    cluster: CTAs of a cluster, which share K. groups: warpgroups; stages: of the pipeline (128 k) of each. depth: the
    most stages in a k slice. clusters: of the grid.
    """

    dtype: str
    cluster: int
    groups: int
    stages: int
    depth: int = 1
    clusters: int = 1

    @property
    def kernel(self) -> str:
        """The kernel's name, which tells its macros."""
        return f"nvfp4_resident_{self.dtype}_x{self.cluster}_g{self.groups}_s{self.stages}_boxes"

    @property
    def threads(self) -> int:
        return 128 * self.groups + 32 * (self.groups + 2)

    @property
    def shared_bytes(self) -> int:
        """Pipelines, slots, barriers and x, as wgmma_resident.cu lays them out."""
        before_x = self.groups * (self.stages * (STAGE_BYTES + 16) + SLOT_BYTES + 16)
        return -(-before_x // 1024) * 1024 + self.depth * 2 * 128 * TOKENS

    def __str__(self) -> str:
        return f"{self.kernel} clusters={self.clusters}"


def depth_of(k: int) -> int:
    """Stages (of 128 k) along K."""
    return -(-k // (2 * tiles.COLS))


def choose_config(m: int, n: int, k: int, dtype: str, clusters: int = CLUSTERS, **fixed: Any) -> ResidentConfig:
    """The configuration for m tokens, n weight rows, k values, dtype "bf16" or "fp16"; `fixed` overrides fields.

    clusters: as many as the device runs at once, CLUSTERS on an H200.
    Raises ValueError when k is no multiple of 16, or x does not fit.
    """
    if k % 16 or not 1 <= m <= TOKENS:
        raise ValueError(f"m={m}, k={k}: takes 1 to {TOKENS} tokens and k a multiple of 16; pad k with zeros")
    config = ResidentConfig(dtype, CLUSTER, GROUPS, 2)
    config = replace(config, **{name: value for name, value in fixed.items() if name != "stages"})
    depth, tiles_of_64 = -(-depth_of(k) // config.cluster), -(-n // ROWS)
    config = replace(config, depth=depth, clusters=min(clusters, tiles_of_64))
    most = _most_stages(config)
    if not most:
        raise ValueError(f"{config}: x of {128 * depth} k leaves no room for weights")
    return replace(config, stages=min(most, fixed.get("stages", most)))


def fits(k: int) -> bool:
    """Whether x of k values leaves room for weights."""
    return bool(_most_stages(ResidentConfig("bf16", CLUSTER, GROUPS, 2, -(-depth_of(k) // CLUSTER))))


def _most_stages(config: ResidentConfig) -> int:
    """Stages that fit beside x, up to MOST_STAGES; 0 where two do not."""
    fitting = (s for s in range(2, MOST_STAGES + 1) if replace(config, stages=s).shared_bytes <= SHARED_BYTES)
    return max(fitting, default=0)


def source(config: ResidentConfig) -> CudaSource:
    """What `config` compiles to; the launch's part of it counts only in shared memory."""
    macros = {
        "X_BF16": int(config.dtype == "bf16"),
        "CLUSTER": config.cluster,
        "CONSUMERS": config.groups,
        "STAGES": config.stages,
    }
    return hopper.source(SOURCE, config.kernel, config.shared_bytes, macros)


def launch(args: Tensors, y: torch.Tensor, config: ResidentConfig, programmatic: bool = False) -> None:
    """y[M, N] = x[M, K] @ w^T with `config`, one launch on torch's current stream. ValueError on a mismatch.

    programmatic: it may start, and fetch weights, while the kernel ahead of it ends.
    """
    x, w = args["x"], args["w"]
    (m, k), n = x.shape, y.shape[1]
    if hopper.check(x, w, y, tiles.ROWS, -(-k // tiles.COLS)) != config.dtype or m > TOKENS:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}; {config} takes {config.dtype} of at most {TOKENS} tokens")
    device = x.device.index or 0
    kernel = cuda.load(source(config), config.kernel, device, config.shared_bytes)
    w_map = tiles.boxes(w, ROW_TILES, 2)
    arguments = (x, w_map, args["w_tensor_scale"], y, *(cuda.i32(number) for number in (m, n, k, depth_of(k))))
    blocks = config.clusters * config.cluster
    cuda.launch(kernel, (blocks,), config.threads, arguments, config.shared_bytes, programmatic)
