"""kernels/nvfp4: the number format, the reference, the weight layout and the cost.

The format is held against its own definition written out here, the reference against Python loops and against the
format, with which it shares no code.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.nvfp4 import cases, gemm_tiles, layout, row_tiles, tiles, w4a8_tiles
from kernels.nvfp4 import format as fmt
from kernels.nvfp4.cost import cost
from kernels.nvfp4.reference import reference, weights

CHECKS = [w for w in cases.WORKLOADS if w.role == "check"]

# The definition, by hand: e2m1 magnitudes, and the non-negative finite e4m3 values 2^(e-7) (1 + m/8).
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
UE4M3 = [(m / 8) * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127]


def quantised(n: int, k: int, seed: int = 0) -> fmt.Nvfp4:
    return fmt.quantise(torch.randn(n, k, generator=torch.Generator().manual_seed(seed)))


# --- format ---------------------------------------------------------------------------------------------------------


def test_every_e2m1_code_decodes_and_encodes():
    codes = torch.arange(16, dtype=torch.uint8)
    values = fmt.decode_e2m1(codes)
    assert values.tolist() == [*GRID, *(-v for v in GRID)]
    assert torch.signbit(values).tolist() == [False] * 8 + [True] * 8  # -0 stays -0
    assert fmt.round_e2m1(values).tolist() == codes.tolist()


def test_every_finite_ue4m3_scale_decodes_and_encodes():
    scales = torch.arange(127, dtype=torch.uint8)
    assert fmt.decode_ue4m3(scales).tolist() == UE4M3
    assert fmt.encode_ue4m3(torch.tensor(UE4M3)).tolist() == scales.tolist()
    assert math.isnan(fmt.decode_ue4m3(torch.tensor([fmt.E4M3_NAN], dtype=torch.uint8)).item())


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (0.25, 0),
        (0.75, 1),
        (1.25, 1),
        (1.75, 2),
        (2.5, 2),
        (3.5, 4),
        (5.0, 4),
        (5.01, 6),
        (7.0, 6),
        (1e30, 6),
        (0.26, 0.5),
    ],
)
def test_ties_go_to_the_even_code_and_large_values_saturate(value: float, rounded: float):
    pair = torch.tensor([value, -value])
    assert fmt.decode_e2m1(fmt.round_e2m1(pair)).tolist() == [rounded, -rounded]


def test_rounding_is_to_a_nearest_grid_value():
    """Every 64th from -8 to 8; drawn at random, few values lie between a midpoint and its neighbour."""
    value = torch.arange(-512, 513) / 64
    got = fmt.decode_e2m1(fmt.round_e2m1(value)).abs()
    away = (value.abs()[:, None] - torch.tensor(sorted(GRID)).abs()).abs().amin(1)
    assert torch.equal((value.abs() - got).abs(), away)


@given(st.floats(0, 1000, width=32))
def test_scales_round_to_a_nearest_ue4m3_value_and_saturate_at_448(value: float):
    got = fmt.decode_ue4m3(fmt.encode_ue4m3(torch.tensor([value]))).item()
    assert abs(min(value, 448.0) - got) == min(abs(min(value, 448.0) - v) for v in UE4M3)


def test_pack_puts_the_even_column_in_the_low_nibble_and_unpack_undoes_it():
    codes = torch.arange(32, dtype=torch.uint8).remainder(16).reshape(2, 16)
    packed = fmt.pack(codes)
    assert packed[0, :2].tolist() == [0x10, 0x32]
    assert torch.equal(fmt.unpack(packed), codes)
    every_byte = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    assert torch.equal(fmt.pack(fmt.unpack(every_byte)), every_byte)


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.sampled_from([1e-20, 1e-3, 1.0, 1e4, 1e30]), st.sampled_from([16, 48, 1040]))
def test_error_is_at_most_half_a_step_of_the_grid_after_scaling(seed: int, magnitude: float, k: int):
    value = torch.randn(3, k, generator=torch.Generator().manual_seed(seed)) * magnitude
    q = fmt.quantise(value)
    step = (fmt.decode_ue4m3(q.scale).double() * q.tensor_scale.double()).repeat_interleave(16, 1)
    scaled = value.double() / step
    error = (fmt.dequantise(q, torch.float64) / step - scaled).abs()
    # Spacing is 0.5 below 2, 1 below 4 and 2 up to 6; the block scale rounded by 1/16 at most, so 6.4 is the largest.
    spacing = torch.where(scaled.abs() < 2, 0.5, torch.where(scaled.abs() < 4, 1.0, 2.0))
    assert (error <= spacing / 2 + 1e-5).all()
    assert scaled.abs().max() <= 6.4 + 1e-5


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.sampled_from([1e-10, 1.0, 1e10]))
def test_quantising_what_was_quantised_changes_nothing(seed: int, magnitude: float):
    first = fmt.quantise(torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) * magnitude)
    again = fmt.quantise(fmt.dequantise(first), first.tensor_scale)
    assert torch.equal(again.packed, first.packed)
    assert torch.equal(again.scale, first.scale)


def test_zero_tensors_and_zero_blocks_stay_zero_and_finite():
    zero = fmt.quantise(torch.zeros(2, 32))
    assert zero.tensor_scale.item() == 1.0
    assert torch.equal(fmt.dequantise(zero), torch.zeros(2, 32))
    mixed = torch.zeros(1, 48)
    mixed[0, 16:32] = torch.randn(16, generator=torch.Generator().manual_seed(1))
    back = fmt.dequantise(fmt.quantise(mixed))
    assert torch.equal(back[0, :16], torch.zeros(16))
    assert torch.equal(back[0, 32:], torch.zeros(16))
    assert back[0, 16:32].abs().max() > 0
    # A block 2^-20 of the largest: its scale underflows to 0, so its elements are zeros of their sign, not NaN.
    tiny = torch.cat((torch.ones(1, 16), torch.full((1, 16), -(2.0**-20))), 1)
    assert fmt.dequantise(fmt.quantise(tiny))[0, 16:].tolist() == [0.0] * 16


@pytest.mark.parametrize(
    ("value", "tensor_scale", "words"),
    [
        (torch.zeros(2, 24), None, r"\(2, 24\).*multiple of 16"),
        (torch.zeros(16), None, r"\(16,\).*\[rows, cols\]"),
        (torch.full((2, 16), math.nan), None, "32 of 32 values are NaN"),
        (torch.tensor([[math.inf] + [0.0] * 15]), None, "1 of 16 values"),
        (torch.zeros(2, 16), torch.tensor([0.0]), r"tensor_scale=\[0.0\]"),
    ],
)
def test_quantise_refuses_with_the_values_and_the_remedy(value, tensor_scale, words):
    with pytest.raises(ValueError, match=words):
        fmt.quantise(value, tensor_scale)


def test_pack_refuses_an_odd_number_of_columns():
    with pytest.raises(ValueError, match="cols=3"):
        fmt.pack(torch.zeros(1, 3, dtype=torch.uint8))


# --- reference, layout, cost ----------------------------------------------------------------------------------------


def test_reference_equals_python_loops():
    problem = replace(CHECKS[0], axes={"M": 2, "N": 3, "K": 32, "dtype": "bf16"})
    inputs = cases.inputs(problem, seed=3)
    y = reference(inputs)["y"]
    for m, n in itertools.product(range(2), range(3)):
        total = 0.0
        for k in range(32):
            byte = int(inputs["w_packed"][n, k // 2])
            code = byte & 15 if k % 2 == 0 else byte >> 4
            value = GRID[code & 7] * (-1 if code & 8 else 1) * UE4M3[int(inputs["w_scale"][n, k // 16])]
            total += inputs["x"][m, k].item() * value * inputs["w_tensor_scale"].item()
        assert y[m, n].item() == pytest.approx(total, rel=1e-12)


def test_reference_decodes_every_code_and_scale_as_format_does():
    packed = torch.arange(256, dtype=torch.uint8).repeat(127, 1)
    scale = torch.arange(127, dtype=torch.uint8)[:, None].repeat(1, 32)
    q = fmt.Nvfp4(packed, scale, torch.tensor([0.37]))
    inputs = {"w_packed": packed, "w_scale": scale, "w_tensor_scale": q.tensor_scale}
    assert torch.equal(weights(inputs), fmt.dequantise(q, torch.float64))


@pytest.mark.parametrize("k", [16, 64, 128, 1040])
def test_paired_layout_is_a_permutation_with_zero_padding(k: int):
    q = quantised(5, k)
    padded = -(-k // 128) * 128
    paired = layout.pair_nibbles(q.packed).unflatten(1, (-1, 64))
    codes = torch.cat((paired & 15, paired >> 4), dim=2).flatten(1)
    assert torch.equal(codes[:, :k], fmt.unpack(q.packed))
    scales = layout.interleave_scales(q.scale).unflatten(1, (-1, 4, 2)).transpose(2, 3).flatten(1)
    assert torch.equal(scales[:, : k // 16], q.scale)
    assert codes.shape[1] == padded
    assert not codes[:, k:].any()
    assert not scales[:, k // 16 :].any()


def test_cost_of_the_ffn_projection():
    one = next(w for w in cases.WORKLOADS if w.id == "m1_n17408_k5120")
    assert cost(one, "nvfp4-w4a16").flops == 2 * 17408 * 5120
    assert cost(one, "nvfp4-w4a16").bytes == 17408 * 5120 * 9 / 16 + 2 * (5120 + 17408) + 4
    assert cost(one, "bf16").bytes == 2 * (17408 * 5120 + 5120 + 17408)
    assert cost(one, "nvfp4-w4a4").pipe == "fp4"
    with pytest.raises(ValueError, match="int8"):
        cost(one, "int8")
    with pytest.raises(ValueError, match="int8"):
        cases.tolerance(one, "int8")


def test_every_layout_keeps_four_and_a_half_bits_a_weight():
    """What NOTES.md counts: a repack is a copy of the same size where N is a multiple of 256 and K of 256."""
    n, k = 256, 512
    q = quantised(n, k)
    bf16 = torch.bfloat16
    stored = {"w_packed": q.packed, "w_scale": q.scale, "w_tensor_scale": q.tensor_scale}
    paired = layout.prepare(stored | {"x": torch.empty(1, k)})
    assert paired["w"].nbytes + paired["w_scale"].nbytes == n * k * 9 // 16
    for made in (tiles, row_tiles, gemm_tiles):
        assert made.tile_weights(q.packed, q.scale, bf16).nbytes == n * k * 9 // 16
    packed, row_scale = w4a8_tiles.tile_weights(q.packed, q.scale)
    assert (packed.nbytes, row_scale.nbytes) == (n * k * 9 // 16, 4 * n)
