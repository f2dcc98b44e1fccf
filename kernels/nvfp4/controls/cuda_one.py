"""NVFP4 linear from one copy of the weights, 1 to thousands of tokens: the kernels of the one layout (row_tiles.py).

What cuda_decode and cuda_gemm read in three layouts, here from one: ring_decode.cu for few tokens (its x is dealt to
lanes in wgmma's order of k), line.py to 96, and wgmma_gemm.cu by a tensor map of row tiles above, where K is short from
33. The cards one-layout-decode and
one-layout-gemm ask what that costs; until an H200 has answered no router takes it.
"""

from __future__ import annotations

import torch

from kernels.common import Candidate, CudaSource, Needs, Tensors, Workload
from kernels.nvfp4 import cuda_decode, cuda_gemm, hopper, line, resident, ring_config, row_tiles, stream
from kernels.nvfp4.cuda_gemm import GemmConfig
from kernels.nvfp4.hopper import SMS
from kernels.nvfp4.line import LineConfig
from kernels.nvfp4.ring_config import RingConfig

RING_TOKENS = 8  # up to here always where x fits, up to ring_config.M_MAX where a line has few iterations
LINE_TOKENS = 96  # at 128 its tiles of 64 rows a warpgroup cost more than the GEMM's (one-layout-gemm on an H200)
Config = RingConfig | LineConfig | GemmConfig


def choose(m: int, n: int, k: int, dtype: str, sms: int = SMS) -> Config:
    """The kernel for a shape. Raises ValueError when k is no multiple of 16."""
    short = not stream.pays(n, k, sms)
    few = m <= RING_TOKENS or (m <= ring_config.M_MAX and short)
    if few and ring_config.choose_warps(m, k, ring_config.choose_cluster(m, k)):
        return ring_config.choose_ring(m, n, k, dtype, sms, natural=True)
    if m <= LINE_TOKENS and (k >= cuda_gemm.LONG_K or m <= resident.TOKENS):
        return line.choose_config(m, n, k, dtype, sms)
    return cuda_gemm.choose_config(m, n, k, dtype, sms, row_tiles=True)


def source(config: Config) -> CudaSource:
    """What `config` compiles to."""
    if isinstance(config, RingConfig):
        return ring_config.source(config)
    return line.source(config) if isinstance(config, LineConfig) else cuda_gemm.source(config)


def _config_of(x: torch.Tensor, n: int, device: torch.device) -> Config:
    (m, k), dtype = x.shape, hopper.ELEMENTS.get(x.dtype, "")
    if device.type != "cuda":
        return choose(m, n, k, dtype)
    return choose(m, n, k, dtype, hopper.multiprocessors(device.index or 0))


def prepare(inputs: Tensors) -> Tensors:
    """x as it is, the weights in the one layout, the tensor scale, the workspace of the kernel that x's shape gets."""
    x, packed, scale = inputs["x"], inputs["w_packed"], inputs["w_scale"]
    config, space = _config_of(x, packed.shape[0], packed.device), {}
    if isinstance(config, LineConfig):
        space = line.workspace(config, packed.device)
    elif isinstance(config, GemmConfig):
        space = cuda_gemm.workspace(config, packed.device)
    w = row_tiles.tile_weights(packed, scale, x.dtype)
    return {"x": x, "w": w, "w_tensor_scale": inputs["w_tensor_scale"]} | space


def run(args: Tensors, out: Tensors) -> None:
    """y[M, N] = x[M, K] @ w^T in one launch."""
    x, y = args["x"], out["y"]
    config = _config_of(x, y.shape[1], x.device)
    if isinstance(config, RingConfig):
        cuda_decode.launch(args, y, config)
    elif isinstance(config, LineConfig):
        line.launch(args, y, config)
    else:
        cuda_gemm.launch(args, y, config)


def _config(workload: Workload) -> str:
    return str(choose(workload["M"], workload["N"], workload["K"], workload["dtype"]))


CUDA_SOURCES = tuple(
    dict.fromkeys(
        source(choose(m, n, k, dtype))
        for m, n, k, dtype in (
            (8, 17408, 5120, "bf16"),
            (16, 5120, 6144, "fp16"),
            (32, 5120, 6144, "bf16"),
            (32, 5120, 6144, "fp16"),
            (33, 17408, 5120, "bf16"),
            (64, 17408, 5120, "bf16"),
            (96, 17408, 5120, "bf16"),
            (128, 17408, 5120, "fp16"),
            (128, 4096, 2048, "bf16"),
            (512, 17408, 5120, "bf16"),
        )
    )
)

CANDIDATES = (
    Candidate(
        name="cuda_one",
        precision="nvfp4-w4a16",
        run=run,
        needs=Needs(capability=(9, 0), packages=("cupy",)),
        prepare=prepare,
        config=_config,
        no_route="would be one more copy of the weights: one-layout-gemm and -decode ask if it can be the only one",
    ),
)
