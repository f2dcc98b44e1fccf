"""cuda_gemm for a few dozen tokens from the decode kernel's own copy of the weights.

wgmma_stream.cu and wgmma_resident.cu read tiles.py's tiles, as ring_decode.cu does, only in blocks of their own. Here a
stage is a box of a tensor map over the decode kernel's row tiles, and nothing else differs, so up to 32 tokens one copy
does for all kernels and a server has two: this one, and row_tiles.py's for more tokens. The card two-layouts asks what
boxes cost.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.common import Candidate, Needs, Tensors, Workload
from kernels.nvfp4 import cuda_gemm, resident, stream, tiles
from kernels.nvfp4.cuda_gemm import M_MIN
from kernels.nvfp4.resident import ResidentConfig
from kernels.nvfp4.stream import StreamConfig

Config = ResidentConfig | StreamConfig


def _boxes(config: object) -> Config | None:
    return replace(config, boxes=True) if isinstance(config, ResidentConfig | StreamConfig) else None


def _config_of(x: torch.Tensor, n: int, device: torch.device) -> Config:
    config = _boxes(cuda_gemm.config_of(x, n, device))
    if config is None:
        raise ValueError(f"x {tuple(x.shape)}, N={n}: cuda_gemm has neither stream nor resident there; use that")
    return config


def prepare(inputs: Tensors) -> Tensors:
    """x as it is, the weights as the decode kernel's tiles, the tensor scale, and the workspace of stream."""
    x, packed, scale = inputs["x"], inputs["w_packed"], inputs["w_scale"]
    config = _config_of(x, packed.shape[0], packed.device)
    space = stream.workspace(config, packed.device) if isinstance(config, StreamConfig) else {}
    w = tiles.tile_weights(packed, scale, x.dtype)
    return {"x": x, "w": w, "w_tensor_scale": inputs["w_tensor_scale"]} | space


def run(args: Tensors, out: Tensors) -> None:
    """y[M, N] = x[M, K] @ w^T in one launch."""
    x, y = args["x"], out["y"]
    cuda_gemm.perform(args, y, _config_of(x, y.shape[1], x.device))


def _chosen(workload: Workload) -> Config | None:
    return _boxes(cuda_gemm.choose(workload["M"], workload["N"], workload["K"], workload["dtype"]))


def _refuses(workload: Workload) -> str:
    m, k = workload["M"], workload["K"]
    if M_MIN <= m <= resident.TOKENS and k % 16 == 0 and _chosen(workload):
        return ""
    return f"M={m}, K={k}: neither stream nor resident there; use cuda_gemm"


CUDA_SOURCES = tuple(
    cuda_gemm.source(config)
    for m, n, k, dtype in (
        (16, 17408, 5120, "bf16"),
        (24, 17408, 5120, "bf16"),
        (32, 17408, 5120, "bf16"),
        (32, 5120, 6144, "bf16"),
        (32, 5120, 6144, "fp16"),
    )
    if (config := _boxes(cuda_gemm.choose(m, n, k, dtype)))
)

CANDIDATES = (
    Candidate(
        name="cuda_gemm_boxes",
        precision="nvfp4-w4a16",
        run=run,
        needs=Needs(capability=(9, 0), packages=("cupy",)),
        prepare=prepare,
        refuses=_refuses,
        config=lambda workload: str(_chosen(workload)),
        no_route="cuda_gemm from the decode kernel's copy of the weights: two-layouts asks if it is to be that",
    ),
)
