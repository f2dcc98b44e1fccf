"""cuda_gemm above 32 tokens with the sums of a shared tile in slices: every worker that ends in a tile adds up a part.

What else is launched is cuda_gemm's choice, so the card gemm-slices sees one change. An owner that adds up all others'
sums reads a whole tile once for each of them: about 6 of 15 us for 100 tokens of 2048 x 7168, by eight others.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.common import Candidate, Needs, Tensors, Workload
from kernels.nvfp4 import cuda_gemm, row_tiles
from kernels.nvfp4.cuda_gemm import GemmConfig


def _sliced(config: cuda_gemm.Config, m: int, n: int) -> GemmConfig | None:
    """The configuration in slices; None where another kernel is chosen, or no tile is shared."""
    if not isinstance(config, GemmConfig) or config.split_k:
        return None
    tiles, workers = -(-n // config.rows) * -(-m // config.tokens), config.grid // config.cluster
    return replace(config, slices=True) if tiles > config.waves * workers else None


def _config_of(x: torch.Tensor, n: int, device: torch.device) -> GemmConfig:
    config = _sliced(cuda_gemm.config_of(x, n, device), x.shape[0], n)
    if config is None:
        raise ValueError(f"x {tuple(x.shape)}, N={n}: cuda_gemm shares no tile there; use that")
    return config


def prepare(inputs: Tensors) -> Tensors:
    """x as it is, the weights as row tiles, the tensor scale, the workspace."""
    x, packed, scale = inputs["x"], inputs["w_packed"], inputs["w_scale"]
    space = cuda_gemm.workspace(_config_of(x, packed.shape[0], packed.device), packed.device)
    w = row_tiles.tile_weights(packed, scale, x.dtype)
    return {"x": x, "w": w, "w_tensor_scale": inputs["w_tensor_scale"]} | space


def run(args: Tensors, out: Tensors) -> None:
    """y[M, N] = x[M, K] @ w^T in one launch."""
    x, y = args["x"], out["y"]
    cuda_gemm.launch(args, y, _config_of(x, y.shape[1], x.device))


def _chosen(workload: Workload) -> GemmConfig | None:
    m, n, k = workload["M"], workload["N"], workload["K"]
    return _sliced(cuda_gemm.choose(m, n, k, workload["dtype"]), m, n)


def _refuses(workload: Workload) -> str:
    m, n, k = workload["M"], workload["N"], workload["K"]
    if m >= cuda_gemm.M_MIN and k % 16 == 0 and _chosen(workload):
        return ""
    return f"M={m}, N={n}, K={k}: cuda_gemm shares no tile there; use that"


CUDA_SOURCES = tuple(
    cuda_gemm.source(config)
    for m, n, k, dtype in (
        (100, 2048, 7168, "bf16"),
        (128, 17408, 5120, "bf16"),
        (128, 5120, 6144, "fp16"),
        (2048, 5120, 6144, "bf16"),
    )
    if (config := _sliced(cuda_gemm.choose(m, n, k, dtype), m, n))
)

CANDIDATES = (
    Candidate(
        name="cuda_gemm_slices",
        precision="nvfp4-w4a16",
        run=run,
        needs=Needs(capability=(9, 0), packages=("cupy",)),
        prepare=prepare,
        refuses=_refuses,
        config=lambda workload: str(_chosen(workload)),
        no_route="cuda_gemm with other sums: gemm-slices asks if it is to be that",
    ),
)
