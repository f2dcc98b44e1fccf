"""SiLU(x gate^T) * (x up^T) of NVFP4 weights for few tokens, in one launch: ring_decode.cu with GATED.

Rows of gate and up alternate in eights, so a thread that adds up a row tile has both and y needs no pass of its own.
Gate and up are rounded nowhere between. On the CPU it is plain torch on the dequantised weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.common import Tensors
from kernels.nvfp4 import format as nvfp4
from kernels.nvfp4 import hopper, tiles

EIGHT = 8


def alternating(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[2 F, ...] with eight rows of gate, eight of up, from two of [F, ...]; ValueError where F is no multiple of 8."""
    if gate.shape != up.shape or len(gate) % EIGHT:
        raise ValueError(f"gate {tuple(gate.shape)}, up {tuple(up.shape)}: pass two of one shape, rows in eights")
    return torch.stack((gate.unflatten(0, (-1, EIGHT)), up.unflatten(0, (-1, EIGHT))), 1).flatten(0, 2)


class Gated(torch.nn.Module):
    """Both weights packed once. gate, up: "packed", "scale" and "tensor_scale" as in format.py, the last of both alike.

    dtype: of x and y; form: of ring_config.FORMS. A call takes x [M, K] and returns [M, F]; ValueError as
    `cuda_decode.launch`, and for two tensor scales.
    """

    def __init__(
        self, gate: Tensors, up: Tensors, dtype: torch.dtype = torch.bfloat16, form: str = ""
    ) -> None:  # fmt: skip
        super().__init__()
        if not torch.equal(gate["tensor_scale"], up["tensor_scale"]):
            raise ValueError("gate and up have tensor scales of their own: do not take them for one product")
        packed, scale = (alternating(gate[name], up[name]) for name in ("packed", "scale"))
        tensor_scale = gate["tensor_scale"]
        self.features, self.form, self.tensor_scale = len(gate["packed"]), form, tensor_scale
        self.w: torch.Tensor = (
            tiles.tile_weights(packed, scale, dtype)
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
        config = cuda_decode.configured(len(x), 2 * self.features, x.shape[1], element, device, self.form, gated=True)
        cuda_decode.launch({"x": x, "w": self.w, "w_tensor_scale": self.tensor_scale}, y, config)
        return y
