"""norm(x) w^T, or residual + x w^T, of NVFP4 weights for few tokens in one launch: ring_decode.cu, NORMED and RESIDUAL.

An RMS norm is a gain for each k, then one number for each token. The product multiplies x by the gain as it loads it
and scales by that number where it scales anyway, so a norm needs no launch and no pass of its own. x gain is rounded to
the type of x; a residual and its product are added in float32 and rounded once. On the CPU it is plain torch on the
dequantised weights, with the same roundings.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from kernels.common import Tensors
from kernels.nvfp4 import format as nvfp4
from kernels.nvfp4 import hopper, tiles


def in_two(gain: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A gain [K], float32, as the kernel takes it: [2, K] of `dtype`, rounded and what that leaves of it."""
    rounded = gain.to(dtype)
    return torch.stack((rounded, (gain.float() - rounded.float()).to(dtype)))


def roots(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """[M, 1] float32: one over the root mean square of each row."""
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)


class Product(torch.nn.Module):
    """A weight packed once. weight: "packed", "scale" and "tensor_scale" as in format.py.

    gain: float32 [K] where x is normed, None where it is taken as it is; dtype: of x and y; chained: launched
    programmatically. A call takes x [M, K] and, to be added to, a residual [M, N] of the same type, and returns [M, N];
    ValueError as `cuda_decode.launch`.
    """

    def __init__(
        self, weight: Tensors, gain: torch.Tensor | None = None, epsilon: float = 0.0,
        dtype: torch.dtype = torch.bfloat16, chained: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        packed, scale, self.tensor_scale = (weight[name] for name in ("packed", "scale", "tensor_scale"))
        self.features, self.chained, self.epsilon = len(packed), chained, epsilon
        self.gain = None if gain is None else in_two(gain, dtype)
        self.w: torch.Tensor = (
            tiles.tile_weights(packed, scale, dtype)
            if packed.is_cuda
            else nvfp4.dequantise(nvfp4.Nvfp4(packed, scale, self.tensor_scale))
        )

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See the class."""
        if not x.is_cuda:
            y = product(x, self.w, self.gain, self.epsilon)
            return (y if residual is None else residual.float() + y).to(x.dtype)
        y = x.new_empty(len(x), self.features)
        launch(self, x, y, residual, gated=False)
        return y


def product(x: torch.Tensor, w: torch.Tensor, gain: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """x w^T in float32 on the CPU, x normed where there is a gain (`in_two`)."""
    if gain is None:
        return F.linear(x.float(), w)
    return F.linear((x.float() * gain.float().sum(0)).to(x.dtype).float(), w) * roots(x, epsilon)


def launch(packed: Any, x: torch.Tensor, y: torch.Tensor, residual: torch.Tensor | None, gated: bool) -> None:
    """Of a module with w, tensor_scale, gain, epsilon and chained: one launch on a GPU."""
    from kernels.nvfp4 import cuda_decode

    element, device = hopper.ELEMENTS.get(x.dtype, ""), x.device.index or 0
    forms = {"gated": gated, "normed": packed.gain is not None, "residual": residual is not None}
    config = cuda_decode.configured(
        len(x), y.shape[1] * (1 + gated), x.shape[1], element, device, packed.chained, **forms
    )
    args = {"x": x, "w": packed.w, "w_tensor_scale": packed.tensor_scale}
    args |= {} if packed.gain is None else {"gain": packed.gain}
    args |= {} if residual is None else {"residual": residual}
    cuda_decode.launch(args, y, config, epsilon=packed.epsilon)
