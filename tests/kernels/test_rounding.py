"""float32 to an output's type of 8 bits in Triton: the bytes are torch's, whichever value it is."""

import pytest
import torch

from kernels.common import has_triton, interpreted

if not has_triton():
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton
import triton.language as tl

from kernels.rounding import round_output

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def rounded(x_ptr, y_ptr, N, DTYPE: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < N)
    tl.store(y_ptr + at, round_output(x, DTYPE, INTERPRETED), mask=at < N)


def edges(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a type of 8 bits and every middle of two, each with its neighbours in float32; all sizes besides.

    Largest and least subnormals, infinity and NaN of both signs are among them.
    """
    finite = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = finite[finite.isfinite()].sort().values
    exact = torch.cat([finite, (finite[1:] + finite[:-1]) / 2])
    beside = [exact.nextafter(torch.tensor(float(way))) for way in ("inf", "-inf")]
    sizes = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    return torch.cat([exact, *beside, sizes, torch.tensor([464.0, 480.0, 61440.0, 65536.0])])


@pytest.mark.parametrize("dtype", TYPES)
def test_a_byte_is_torchs(dtype: torch.dtype) -> None:
    if DEVICE == "cuda" and dtype is torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton has no e4m3 on this GPU")
    x = edges(dtype)
    y = torch.empty(x.shape, dtype=dtype, device=DEVICE)
    rounded[(triton.cdiv(x.numel(), 1 << 14),)](x.to(DEVICE), y, x.numel(), TYPES[dtype], 1 << 14, interpreted())
    # torch 2.11 to 2.14 do not agree on what is too large for e4m3; a NaN's sign is nobody's.
    wanted = (x.clamp(-448, 448) if dtype is torch.float8_e4m3fn else x).to(dtype)
    wrong = (y.cpu().view(torch.uint8) != wanted.view(torch.uint8)) & ~(y.cpu().float().isnan() & x.isnan())
    assert not wrong.any(), (x[wrong][:9], y.cpu()[wrong][:9], wanted[wrong][:9])
