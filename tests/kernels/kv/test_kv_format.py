"""kernels/kv: the reference and the two quantised forms of the cache, without any kernel.

The reference is held against PyTorch's attention, a result worked out by hand and torch's own e4m3; the formats against
the error bounds that follow from their definitions, as properties over random caches. Kernels are in test_kv.py.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.common import Workload
from kernels.kv import cases
from kernels.kv import format as kv_format
from kernels.kv.reference import decode, e4m3_values, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BY_ID = {w.id: w for w in cases.WORKLOADS}
PRECISIONS = ("bf16", "fp8-kv", "q8_0-kv")


# The reference -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", cases.CHECKED, ids=lambda w: w.id)
def test_reference_is_pytorch_attention(workload: Workload) -> None:
    """Float64, one sequence at a time, on a cache that was contiguous before it was cut into pages."""
    given_ = cases.inputs(workload, 3, DEVICE)
    out = reference(given_)["o"]
    page = workload["page"]
    for b, length in enumerate(given_["seq_lens"].tolist()):
        tokens: dict[str, list[torch.Tensor]] = {"k": [], "v": []}
        for t in range(length):  # token by token, so that no gather is shared with the reference
            page_id = int(given_["page_table"][b, t // page])
            for name in tokens:
                tokens[name].append(given_[f"{name}_cache"][page_id, :, t % page])
        k, v = (torch.stack(tokens[name], dim=1).double() for name in ("k", "v"))
        wanted = torch.nn.functional.scaled_dot_product_attention(
            given_["q"][b, :, None].double(), k, v, enable_gqa=True
        )
        torch.testing.assert_close(out[b], wanted[:, 0], rtol=1e-12, atol=1e-12)


def test_reference_by_hand() -> None:
    """Two tokens, one head, D = 32, with scores that differ by exactly log 3: weights 1/4 and 3/4."""
    k = torch.zeros(1, 1, 2, 32)
    k[0, 0, 1, 0] = math.log(3.0) * 32**0.5
    v = torch.stack([torch.full((32,), 4.0), torch.full((32,), 8.0)])[None, None]
    q = torch.zeros(1, 1, 32)
    q[0, 0, 0] = 1.0
    given_ = {"q": q, "k_cache": k, "v_cache": v, "page_table": torch.zeros(1, 1, dtype=torch.int32)}
    out = reference(given_ | {"seq_lens": torch.tensor([2], dtype=torch.int32)})["o"]
    torch.testing.assert_close(out, torch.full((1, 1, 32), 7.0, dtype=torch.float64), rtol=1e-6, atol=0)
    empty = reference(given_ | {"seq_lens": torch.tensor([0], dtype=torch.int32)})["o"]
    assert torch.equal(empty, torch.zeros(1, 1, 32, dtype=torch.float64))


def test_e4m3_table_is_torchs_e4m3() -> None:
    own = e4m3_values()
    torchs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    assert torch.equal(own.isnan(), torchs.isnan())
    assert torch.equal(own.nan_to_num(0.0), torchs.nan_to_num(0.0))
    assert int(own.isnan().sum()) == 2


@pytest.mark.parametrize("form", ["fp8", "q8_0"])
def test_reference_decodes_as_the_format_does(form: str) -> None:
    x = torch.randn(3, 2, 16, 64, generator=torch.Generator().manual_seed(1))
    if form == "fp8":
        data, scale = kv_format.quantise_fp8(x)
        values = kv_format.dequantise_fp8(data, scale)
    else:
        data, scale = kv_format.quantise_q8_0(x)
        values = kv_format.dequantise_q8_0(data, scale)
    for page in range(3):
        mine = decode(data[page], scale if form == "fp8" else scale[page])
        torch.testing.assert_close(mine.float(), values[page], rtol=1e-6, atol=0)


def test_reference_refuses_bytes_without_scales() -> None:
    given_ = cases.inputs(BY_ID["ctx17_b2_hq6_hkv1_d64_p16_bf16"], 0, DEVICE)
    seen = given_ | {"k_cache": given_["k_cache"].to(torch.int8)}
    with pytest.raises(TypeError, match="k_scale"):
        reference(seen)


# The formats ---------------------------------------------------------------------------------------------------------

magnitudes = st.floats(min_value=1e-3, max_value=6e4, allow_nan=False)


@given(seed=st.integers(0, 2**31), amplitude=magnitudes, per=st.sampled_from(["head", "tensor"]))
@settings(max_examples=30)
def test_fp8_round_trip(seed: int, amplitude: float, per: str) -> None:
    """Half a step of e4m3: 2^-4 relative for normal values, 2^-10 of the unit step below 2^-6; the largest is exact."""
    x = torch.randn(2, 3, 5, 32, generator=torch.Generator().manual_seed(seed)) * amplitude
    x[:, 1] *= 100.0
    data, scale = kv_format.quantise_fp8(x, per=per)
    error = (kv_format.dequantise_fp8(data, scale) - x).abs()
    bound = torch.maximum(x.abs() * 2.0**-4, scale[None, :, None, None] * 2.0**-10) * (1 + 1e-5)
    assert bool((error <= bound).all())
    assert (scale.unique().numel() == 1) == (per == "tensor")
    amax = x.abs().amax(dim=(0, 2, 3)) if per == "head" else x.abs().max().expand(3)
    torch.testing.assert_close(scale * 448, amax)


def test_fp8_saturates_at_448() -> None:
    x = torch.tensor([1.0, 447.0, 448.0, 449.0, 464.0, 480.0, 1e6, -1e6]).repeat(4).reshape(1, 1, 1, 32)
    data, scale = kv_format.quantise_fp8(x, scale=torch.ones(1))
    values = kv_format.dequantise_fp8(data, scale).flatten()[:8]
    assert values.tolist() == [1.0, 448.0, 448.0, 448.0, 448.0, 448.0, 448.0, -448.0]


def test_fp8_zero_head() -> None:
    x = torch.zeros(1, 2, 4, 32)
    x[:, 1] = 1.0
    data, scale = kv_format.quantise_fp8(x)
    assert scale[0] == 1.0
    assert torch.equal(kv_format.dequantise_fp8(data, scale), x)


@given(seed=st.integers(0, 2**31), amplitude=magnitudes)
@settings(max_examples=30)
def test_q8_0_round_trip(seed: int, amplitude: float) -> None:
    """amax / 254 per block from rounding to int8, plus 127 roundings of the scale to fp16 (2^-11 of it, or 2^-25)."""
    x = torch.rand(2, 2, 3, 64, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    x *= amplitude
    data, scale = kv_format.quantise_q8_0(x)
    error = (kv_format.dequantise_q8_0(data, scale) - x).abs().unflatten(-1, (-1, 32)).amax(-1)
    amax = x.abs().unflatten(-1, (-1, 32)).amax(-1)
    bound = amax / 254 + 127 * torch.maximum(amax / 127 * 2.0**-11, torch.full_like(amax, 2.0**-25))
    assert bool((error <= bound * (1 + 1e-5)).all())
    assert int(data.abs().max()) == 127
    torch.testing.assert_close(scale.float(), amax / 127, rtol=2.0**-11, atol=2.0**-25)


def test_q8_0_rounds_as_ggml_does() -> None:
    """Halves away from zero, by the unrounded scale: 127 makes d exactly 1, so x.5 tells C's roundf from torch's."""
    x = torch.zeros(1, 1, 1, 32)
    x[..., :6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -2.5])
    data, scale = kv_format.quantise_q8_0(x)
    assert data.flatten()[:6].tolist() == [127, 1, 2, 3, -1, -3]
    assert scale.item() == 1.0


def test_quantise_in_slices_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(7, 2, 4, 32, generator=torch.Generator().manual_seed(2))
    whole = (*kv_format.quantise_fp8(x), *kv_format.quantise_q8_0(x))
    monkeypatch.setattr(kv_format, "_SLICE_VALUES", 3 * x[0].numel())
    sliced = (*kv_format.quantise_fp8(x), *kv_format.quantise_q8_0(x))
    assert all(torch.equal(a, b) for a, b in zip(whole, sliced, strict=True))


@pytest.mark.parametrize("quantise", [kv_format.quantise_fp8, kv_format.quantise_q8_0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_formats_refuse_what_is_not_finite(quantise, bad: float) -> None:
    x = torch.zeros(2, 3, 4, 32)
    x[1, 2, 0, 5] = bad
    with pytest.raises(ValueError, match=r"kv heads \[2\]"):
        quantise(x)


def test_formats_refuse_shapes_and_scales() -> None:
    x = torch.ones(1, 2, 4, 48)
    with pytest.raises(ValueError, match=r"D=48\b.*\b32\b"):
        kv_format.quantise_q8_0(x)
    with pytest.raises(ValueError, match="65504"):
        kv_format.quantise_q8_0(torch.full((1, 1, 1, 32), 7e4))
    with pytest.raises(ValueError, match=r"needs \(2,\)"):
        kv_format.quantise_fp8(x, scale=torch.ones(3))
    with pytest.raises(ValueError, match="positive"):
        kv_format.quantise_fp8(x, scale=torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match="per='page'"):
        kv_format.quantise_fp8(x, per="page")
    for quantise in (kv_format.quantise_fp8, kv_format.quantise_q8_0):
        with pytest.raises(ValueError, match="pages, Hkv, page, D"):
            quantise(x[0])


def test_format_error_on_plain_and_outlier_caches() -> None:
    """e4m3 rounds to 4 bits: 0.43 x 2^-3 x 1/2 = 2.6 % rms. Q8_0's step is amax / 127, uniform error step / sqrt(12):
    about 0.5 % of a normal block (amax 2.1 sigma), and several times that where one outlier sets the block's step."""
    outlier = BY_ID["ctx75_b3_hq6_hkv1_d128_p16_bf16_outliers"]
    plain = replace(outlier, inputs=cases.NORMAL)
    errors = {
        (w.inputs, p): cases.format_error(w, cases.inputs(w, 0, DEVICE), p)
        for w in (plain, outlier)
        for p in PRECISIONS
    }
    for workload in (plain, outlier):
        master = errors[workload.inputs, "bf16"]
        assert (master.k, master.v, master.o) == (0.0, 0.0, 0.0)
        assert 0.02 < errors[workload.inputs, "fp8-kv"].k < 0.035
    normal = errors[cases.NORMAL, "q8_0-kv"]
    assert 0.004 < normal.k < 0.007
    assert 0.004 < normal.v < 0.007
    assert normal.o < errors[cases.NORMAL, "fp8-kv"].o < 0.06
    # Against the master's norm an outlier hides the error of its block; against a plain channel's it does not.
    assert errors[cases.OUTLIERS, "q8_0-kv"].o > 1.5 * normal.o
