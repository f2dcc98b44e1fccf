"""The weight layout of the Triton kernels: nibbles paired at a distance of 64 instead of 1.

With the file's layout one byte holds k and k + 1, so unpacking a tile interleaves two halves, and a Triton interleave
(`tl.join` and reshape) is a trip through shared memory. Here each run of 128 values along K is stored so that byte j of
its 64 bytes holds k = j in the low nibble and k = 64 + j in the high one. The low nibbles of a tile are then 64
contiguous k and the high ones the next 64: each multiplies its own contiguous tile of x. The scales of the two halves
are interleaved instead, so that one load brings both. The repack is a permutation done once at load; the bytes per
weight do not change. K is padded to a multiple of 128 with zero codes and zero scales, which costs memory only for
a K that no workload at a model's shape has.
"""

from __future__ import annotations

import torch

from kernels.nvfp4 import format as fmt
from kernels.nvfp4 import mxfp4

SPAN = 128  # k values per run
HALF = SPAN // 2


def pair_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [N, ceil(K / 128) * 64] paired at distance 64, from uint8 [N, K / 2] in file order."""
    codes = fmt.unpack(packed)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % SPAN))
    runs = codes.unflatten(1, (-1, 2, HALF))
    return (runs[:, :, 0] | (runs[:, :, 1] << 4)).flatten(1).contiguous()


def interleave_scales(scale: torch.Tensor, group: int = fmt.BLOCK) -> torch.Tensor:
    """uint8 [N, ceil(K / 128) * 128 / group] from uint8 [N, K / group]: a run: low 0, high 0, low 1, ...; zeros pad."""
    padded = torch.nn.functional.pad(scale, (0, -scale.shape[1] % (SPAN // group)))
    return padded.unflatten(1, (-1, 2, HALF // group)).transpose(2, 3).flatten(1).contiguous()


def group_of(args: dict[str, torch.Tensor]) -> int:
    """Weights that share a scale in what `prepare` returned: 16 (NVFP4) or 32 (MXFP4)."""
    return 2 * args["w"].shape[1] // args["w_scale"].shape[1]


def prepare(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Arguments of the Triton W4A16 kernels: x as it is, weights and scales in this layout, the tensor scale.

    MXFP4 weights (w_scale e8m0 [N, K / 32]) get scales relative to their largest, which becomes the tensor scale.
    """
    if 2 * inputs["w_packed"].shape[1] == mxfp4.BLOCK * inputs["w_scale"].shape[1]:
        scale, largest = mxfp4.relative(inputs["w_scale"])
        paired = {"w": pair_nibbles(inputs["w_packed"]), "w_scale": interleave_scales(scale, mxfp4.BLOCK)}
        return {"x": inputs["x"], **paired, "w_tensor_scale": largest}
    return {
        "x": inputs["x"],
        "w": pair_nibbles(inputs["w_packed"]),
        "w_scale": interleave_scales(inputs["w_scale"]),
        "w_tensor_scale": inputs["w_tensor_scale"],
    }
