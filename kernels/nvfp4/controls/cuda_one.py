"""NVFP4 linear from one copy of the weights, 1 to thousands of tokens: the kernels of the one layout (row_tiles.py).

Above 32 tokens it is cuda_gemm, which serves that layout there. Below, where cuda_decode and cuda_gemm read tiles.py's,
ring_decode.cu for few tokens (its x is dealt to lanes in wgmma's order of k), else line.py.
The cards one-layout-decode and one-layout-gemm asked what that costs on an H200: 3 to 32 % in decode, 21 where
cuda_gemm keeps x resident at 32 tokens. So up to 32 tokens no router takes it.
"""

from __future__ import annotations

import torch

from kernels.common import Candidate, CudaSource, Needs, Tensors, Workload
from kernels.nvfp4 import cuda_decode, cuda_gemm, hopper, line, resident, ring_config, row_tiles, stream
from kernels.nvfp4.hopper import SMS
from kernels.nvfp4.line import LineConfig
from kernels.nvfp4.ring_config import RingConfig

RING_TOKENS = 8  # up to here always where x fits, up to ring_config.M_MAX where a line has few iterations
Config = RingConfig | cuda_gemm.Config


def choose(m: int, n: int, k: int, dtype: str, sms: int = SMS) -> Config:
    """The kernel for a shape. Raises ValueError when k is no multiple of 16."""
    if m > resident.TOKENS:
        return cuda_gemm.choose(m, n, k, dtype, sms)
    short = not stream.pays(n, k, sms)
    few = m <= RING_TOKENS or (m <= ring_config.M_MAX and short)
    if few and ring_config.choose_warps(m, k, ring_config.choose_cluster(m, k)):
        return ring_config.choose_ring(m, n, k, dtype, sms, natural=True)
    return line.choose_config(m, n, k, dtype, sms)


def source(config: Config) -> CudaSource:
    """What `config` compiles to."""
    return ring_config.source(config) if isinstance(config, RingConfig) else cuda_gemm.source(config)


def _config_of(x: torch.Tensor, n: int, device: torch.device) -> Config:
    (m, k), dtype = x.shape, hopper.ELEMENTS.get(x.dtype, "")
    if device.type != "cuda":
        return choose(m, n, k, dtype)
    return choose(m, n, k, dtype, hopper.multiprocessors(device.index or 0))


def prepare(inputs: Tensors) -> Tensors:
    """x as it is, the weights in the one layout, the tensor scale, the workspace of the kernel that x's shape gets."""
    x, packed, scale = inputs["x"], inputs["w_packed"], inputs["w_scale"]
    if len(x) > resident.TOKENS:
        return cuda_gemm.prepare(inputs)
    config = _config_of(x, packed.shape[0], packed.device)
    space = line.workspace(config, packed.device) if isinstance(config, LineConfig) else {}
    w = row_tiles.tile_weights(packed, scale, x.dtype)
    return {"x": x, "w": w, "w_tensor_scale": inputs["w_tensor_scale"]} | space


def run(args: Tensors, out: Tensors) -> None:
    """y[M, N] = x[M, K] @ w^T in one launch."""
    x, y = args["x"], out["y"]
    config = _config_of(x, y.shape[1], x.device)
    if isinstance(config, RingConfig):
        cuda_decode.launch(args, y, config)
    else:
        cuda_gemm.perform(args, y, config)


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
            (16, 17408, 5120, "bf16"),
            (32, 17408, 5120, "bf16"),
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
        no_route="would be one more copy of the weights up to 32 tokens, and is cuda_gemm above",
    ),
)
