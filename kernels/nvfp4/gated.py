"""SiLU(x gate^T) * (x up^T) of NVFP4 weights in one launch: cuda_decode's kernel up to 8 tokens, cuda_gemm's of more.

Rows of gate and up alternate in eights, so a thread that adds up a row tile has both and y needs no pass of its own.
Gate and up are rounded nowhere between. On the CPU it is plain torch on the dequantised weights.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from kernels.common import Tensors
from kernels.nvfp4 import cuda_gemm, hopper, line, ops, resident, ring_config, row_tiles, tiles
from kernels.nvfp4 import format as nvfp4

EIGHT = 8  # rows in turn; and the most tokens of cuda_decode here


def alternating(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[2 F, ...] with eight rows of gate, eight of up, from two of [F, ...]; ValueError where F is no multiple of 8."""
    if gate.shape != up.shape or len(gate) % EIGHT:
        raise ValueError(f"gate {tuple(gate.shape)}, up {tuple(up.shape)}: pass two of one shape, rows in eights")
    return torch.stack((gate.unflatten(0, (-1, EIGHT)), up.unflatten(0, (-1, EIGHT))), 1).flatten(0, 2)


class Gated(torch.nn.Module):
    """Both weights packed once. gate, up: "packed", "scale" and "tensor_scale" as in format.py, the last of both alike.

    dtype: of x and y; form: of ring_config.FORMS, of more than EIGHT tokens "" or cuda_gemm.CHAINED; tokens: the most
    of x, which choose the kernel. A call takes x [M, K] and returns [M, F]; ValueError as the kernels' `launch`, for
    two tensor scales, and for another number of tokens' form.
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
        self.tokens, self.many, self.k = tokens, tokens > EIGHT, 2 * packed.shape[1]
        forms = ("", cuda_gemm.CHAINED) if self.many else ring_config.FORMS
        if form not in forms:
            raise ValueError(f"form={form!r} with {tokens} tokens: pass one of {forms}")
        self.scratch: Tensors = {}  # one for all modules, as of ops.Linear
        element = hopper.ELEMENTS[dtype]
        self.layout = cuda_gemm.layout_of(self._many(packed.device, element)) if self.many else "tiles"
        if self.many and packed.is_cuda:
            self.scratch = ops.SHARED.at_least(self.layout, cuda_gemm.most_workspace(self.layout, packed.device))
        self.w: torch.Tensor = (
            (row_tiles if self.layout == "row_tiles" else tiles).tile_weights(packed, scale, dtype)
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
            config = self._many(x.device, element)
            cuda_gemm.perform(args | self.scratch, y, config, programmatic=self.form == cuda_gemm.CHAINED)
        else:
            cuda_decode.launch(args, y, cuda_decode.configured(*shape, element, device, self.form, gated=True))
        return y

    def _many(self, device: torch.device, element: str) -> cuda_gemm.Config:
        sms = hopper.multiprocessors(device.index or 0) if device.type == "cuda" else hopper.SMS
        return many(self.tokens, 2 * self.features, self.k, element, sms)


@lru_cache(maxsize=1024)
def many(m: int, n: int, k: int, dtype: str, sms: int) -> cuda_gemm.Config:
    """The kernel of more than EIGHT tokens, as cuda_gemm chooses; x is streamed where it would stay resident."""
    if m <= resident.TOKENS and k >= resident.K_MIN:
        return cuda_gemm.streamed(m, n, k, dtype, sms, gated=True)
    if m <= cuda_gemm.LINE_TOKENS and k >= cuda_gemm.LONG_K:
        return line.choose_config(m, n, k, dtype, sms, gated=True)
    return cuda_gemm.choose_config(m, n, k, dtype, sms, gated=True)
