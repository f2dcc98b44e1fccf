"""The reference: a float64 product with weights decoded from tables written out by hand.

It shares no code with `format.py` or with any candidate: the sixteen e2m1 values are a literal table, the 256 e4m3
bytes are decoded by torch's own float8 conversion, and nibbles are taken apart with divmod. A wrong formula in
`format.py`, a swapped nibble in a packer or a bias slip in a kernel therefore shows as a disagreement here.
float64 holds e2m1 * e4m3 * float32 exactly (2 + 4 + 24 significand bits), so only the products with x and their sum
round, at about 1e-16.
"""

from __future__ import annotations

import torch

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def weights(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """float64 [N, K] from w_packed, w_scale and w_tensor_scale."""
    table = torch.tensor(E2M1_VALUES, dtype=torch.float64, device=inputs["w_packed"].device)
    byte = inputs["w_packed"].to(torch.int64)
    n, half_k = byte.shape
    codes = torch.empty(n, 2 * half_k, dtype=torch.int64, device=byte.device)
    codes[:, 0::2] = byte % 16
    codes[:, 1::2] = byte // 16
    if 2 * half_k == 32 * inputs["w_scale"].shape[1]:  # MXFP4: an e8m0 byte per 32, 2^(byte - 127), no tensor scale
        return table[codes] * torch.exp2(inputs["w_scale"].to(torch.float64) - 127).repeat_interleave(32, dim=1)
    scale = inputs["w_scale"].view(torch.float8_e4m3fn).to(torch.float64)
    return table[codes] * scale.repeat_interleave(16, dim=1) * inputs["w_tensor_scale"].to(torch.float64)


def reference(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """{"y": float64 [M, N]} of x [M, K] and the NVFP4 weights."""
    return {"y": inputs["x"].to(torch.float64) @ weights(inputs).T}
