"""kernels/nvfp4/repack.py in Triton's interpreter against the host's repacks, bit for bit; the same on a GPU."""

import pytest
import torch

from kernels.nvfp4 import checkpoints, gemm_tiles, repack, row_tiles, tiles
from kernels.nvfp4 import format as fmt

MODULES = {
    "tiles": tiles,
    "gemm_tiles": gemm_tiles,
    "row_tiles": row_tiles,
}


def weight(n: int, k: int, device: str = "cpu") -> fmt.Nvfp4:
    """Every code, and every scale from zero and the subnormals up."""
    generator = torch.Generator().manual_seed(n + k)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, fmt.E4M3_NAN, (n, k // 16), dtype=torch.uint8, generator=generator)
    scale.view(-1)[::3] %= 9
    return fmt.Nvfp4(packed.to(device), scale.to(device), torch.ones(1, device=device))


def same(n: int, k: int, dtype: torch.dtype, layout: str, device: str = "cpu") -> None:
    q = weight(n, k, device)
    wanted = MODULES[layout].tile_weights(q.packed.cpu(), q.scale.cpu(), dtype)
    assert torch.equal(repack.from_modelopt(q.packed, q.scale, dtype, layout).cpu(), wanted)
    if k % 64 == 0:
        blocks = checkpoints.to_ggml(q)
        assert torch.equal(checkpoints.pack_ggml(blocks, dtype, layout).cpu(), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("layout", repack.LAYOUTS)
def test_bits_are_those_of_the_hosts_repack(layout, dtype):
    same(20, 128, dtype, layout)
    same(131, 336, dtype, layout)  # no whole tile either way, and a quarter of one along k


def test_refuses_what_does_not_belong_together():
    q = weight(16, 64)
    with pytest.raises(ValueError, match=r"\(16, 3\)"):
        repack.from_modelopt(q.packed, q.scale[:, :3], torch.bfloat16, "tiles")
    with pytest.raises(ValueError, match="row_tiles"):
        repack.from_modelopt(q.packed, q.scale, torch.bfloat16, "columns")
    with pytest.raises(ValueError, match=r"\(16, 35\)"):
        repack.from_ggml(checkpoints.to_ggml(q)[:, :35], torch.bfloat16, "tiles")
    blocks = checkpoints.to_ggml(q)
    blocks[3, 2] = fmt.E4M3_NAN
    with pytest.raises(ValueError, match="1 of 64 block scales"):
        checkpoints.pack_ggml(blocks, torch.bfloat16, "tiles")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("layout", repack.LAYOUTS)
def test_bits_on_a_gpu(layout, dtype):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    for n, k in ((131, 336), (1000, 4112), (5120, 6144)):
        same(n, k, dtype, layout, "cuda")
