"""SiLU(x gate^T) * (x up^T) of NVFP4 weights in one launch: ring_decode.cu with GATED, wgmma_gemm.cu from FROM tokens.

Rows of gate and up alternate in eights, so a thread that adds up a row tile has both and y needs no pass of its own.
Gate and up are rounded nowhere between. On the CPU it is plain torch on the dequantised weights.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from kernels.common import Tensors
from kernels.nvfp4 import cuda_gemm, hopper, ops, ring_config, row_tiles, tiles
from kernels.nvfp4 import format as nvfp4

EIGHT = 8
FROM = cuda_gemm.LINE_TOKENS + 1  # tokens; between ring_decode.cu's and these no kernel has this form


def alternating(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[2 F, ...] with eight rows of gate, eight of up, from two of [F, ...]; ValueError where F is no multiple of 8."""
    if gate.shape != up.shape or len(gate) % EIGHT:
        raise ValueError(f"gate {tuple(gate.shape)}, up {tuple(up.shape)}: pass two of one shape, rows in eights")
    return torch.stack((gate.unflatten(0, (-1, EIGHT)), up.unflatten(0, (-1, EIGHT))), 1).flatten(0, 2)


class Gated(torch.nn.Module):
    """Both weights packed once. gate, up: "packed", "scale" and "tensor_scale" as in format.py, the last of both alike.

    dtype: of x and y; form: of ring_config.FORMS, from FROM tokens on "" or cuda_gemm.CHAINED; tokens: of x, which
    choose the kernel. A call takes x [M, K] and returns [M, F]; ValueError as the kernels' `launch`, for two tensor
    scales, and for another number of tokens' form.
    """

    def __init__(
        self, gate: Tensors, up: Tensors, dtype: torch.dtype = torch.bfloat16, form: str = "", tokens: int = EIGHT
    ) -> None:  # fmt: skip
        super().__init__()
        if not torch.equal(gate["tensor_scale"], up["tensor_scale"]):
            raise ValueError("gate and up have tensor scales of their own: do not take them for one product")
        packed, scale = (alternating(gate[name], up[name]) for name in ("packed", "scale"))
        tensor_scale = gate["tensor_scale"]
        self.features, self.form, self.tensor_scale = len(gate["packed"]), form, tensor_scale
        self.many, self.k = tokens >= FROM, 2 * packed.shape[1]
        forms = ("", cuda_gemm.CHAINED) if self.many else ring_config.FORMS
        if form not in forms:
            raise ValueError(f"form={form!r} with {tokens} tokens: pass one of {forms}")
        self.scratch: Tensors = {}  # one for all modules, as of ops.Linear
        if self.many and packed.is_cuda:
            self.scratch = ops.SHARED.at_least("row_tiles", cuda_gemm.most_workspace("row_tiles", packed.device))
        self.w: torch.Tensor = (
            (row_tiles if self.many else tiles).tile_weights(packed, scale, dtype)
            if packed.is_cuda
            else nvfp4.dequantise(nvfp4.Nvfp4(packed, scale, tensor_scale))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        if not x.is_cuda:
            rows = F.linear(x.float(), self.w).unflatten(1, (-1, 2, EIGHT))
            return (F.silu(rows[:, :, 0]) * rows[:, :, 1]).flatten(1).to(x.dtype)
        from kernels.nvfp4 import cuda_decode

        y = x.new_empty(len(x), self.features)
        element, device = hopper.ELEMENTS.get(x.dtype, ""), x.device.index or 0
        args, shape = {"x": x, "w": self.w, "w_tensor_scale": self.tensor_scale}, (len(x), 2 * self.features, self.k)
        if self.many:
            config = _many(*shape, element, hopper.multiprocessors(device))
            cuda_gemm.launch(args | self.scratch, y, config, programmatic=self.form == cuda_gemm.CHAINED)
        else:
            cuda_decode.launch(args, y, cuda_decode.configured(*shape, element, device, self.form, gated=True))
        return y


@lru_cache(maxsize=1024)
def _many(m: int, n: int, k: int, dtype: str, sms: int) -> cuda_gemm.GemmConfig:
    return cuda_gemm.choose_config(m, n, k, dtype, sms, gated=True)
