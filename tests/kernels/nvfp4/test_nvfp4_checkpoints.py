"""Weights in other programs' layouts: decoded by code written here from their definitions, and by their own package."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from kernels.nvfp4 import checkpoints
from kernels.nvfp4 import format as fmt
from kernels.nvfp4.reference import E2M1_VALUES, weights

LAYER = "model.layers.0.mlp.up_proj"


def weight(rows: int = 5, cols: int = 128, seed: int = 0) -> fmt.Nvfp4:
    return fmt.quantise(torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)))


def values(q: fmt.Nvfp4) -> torch.Tensor:
    return weights({"w_packed": q.packed, "w_scale": q.scale, "w_tensor_scale": q.tensor_scale})


def e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3, byte & 7
    return (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6


def test_ggml_blocks_hold_what_their_definition_says() -> None:
    """Decoded one value at a time: block_nvfp4 is d[4], then qs[32], halves of 16 columns in the two nibbles."""
    q = weight()
    blocks, wanted = checkpoints.to_ggml(q), values(q)
    assert blocks.shape == (5, 2 * 36)
    for row in range(5):
        for column in range(128):
            block = blocks[row, column // 64 * 36 :].tolist()
            part, j = column % 64 // 16, column % 16
            byte = block[4 + 8 * part + j % 8]
            value = E2M1_VALUES[byte >> 4 if j >= 8 else byte & 15] * e4m3(block[part]) * float(q.tensor_scale)
            assert value == float(wanted[row, column])


def test_ggml_and_back_is_the_same_bytes() -> None:
    q = weight()
    back = checkpoints.from_ggml(checkpoints.to_ggml(q), q.tensor_scale)
    for name in ("packed", "scale", "tensor_scale"):
        assert torch.equal(getattr(back, name), getattr(q, name))
    assert float(checkpoints.from_ggml(checkpoints.to_ggml(q)).tensor_scale) == 1


def stored(q: fmt.Nvfp4, layout: str) -> dict[str, torch.Tensor]:
    """What the library of a layout writes for one layer."""
    scale = q.scale.view(torch.float8_e4m3fn)
    if layout == "modelopt":
        own = {"weight": q.packed, "weight_scale": scale, "weight_scale_2": q.tensor_scale[0].clone()}
        own["input_scale"] = torch.tensor(0.01)
    else:
        own = {"weight_packed": q.packed, "weight_scale": scale, "weight_global_scale": 1 / q.tensor_scale}
    return {f"{LAYER}.{name}": tensor for name, tensor in own.items()}


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_checkpoint_is_read_as_its_library_means_it(tmp_path: Path, layout: str) -> None:
    q = weight()
    path = tmp_path / "model.safetensors"
    others = {"lm_head.weight": torch.zeros(2, 2, dtype=torch.bfloat16)}
    safetensors.torch.save_file({**stored(q, layout), **others}, path, {"format": "pt"})
    for place in (path, tmp_path):
        assert checkpoints.layers(place) == {LAYER: layout}
        found = checkpoints.load(place, LAYER)
        assert torch.equal(found.packed, q.packed)
        assert torch.equal(found.scale, q.scale)
        torch.testing.assert_close(values(found), values(q), rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_written_checkpoint_is_what_their_package_reads(tmp_path: Path, layout: str) -> None:
    path, made = tmp_path / "w.safetensors", {LAYER: weight(), "b": weight(3, 16, seed=1)}
    checkpoints.save(path, made, layout)
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]
    read, wanted = safetensors.torch.load_file(path), stored(made[LAYER], layout)
    for name in wanted.keys() - {f"{LAYER}.input_scale"}:
        assert read[name].dtype == wanted[name].dtype
        assert read[name].shape == wanted[name].shape
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (read[name], wanted[name])))
    assert [*checkpoints.layers(path)] == [LAYER, "b"]
    torch.testing.assert_close(values(checkpoints.load(path, "b")), values(made["b"]), rtol=2.0**-22, atol=0)


def test_a_checkpoint_of_several_files_is_found_by_its_index(tmp_path: Path) -> None:
    q = weight()
    parts = list(stored(q, "modelopt").items())
    files = {"model-1-of-2.safetensors": dict(parts[:1]), "model-2-of-2.safetensors": dict(parts[1:])}
    for name, tensors in files.items():
        safetensors.torch.save_file(tensors, tmp_path / name)
    index = {"weight_map": {tensor: name for name, tensors in files.items() for tensor in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(checkpoints.load(tmp_path, LAYER).packed, q.packed)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight": torch.zeros(5, 63, dtype=torch.uint8)}, "U8 \\[N, K / 2\\]"),
        ({"weight": torch.zeros(5, 64)}, "F32 \\[5, 64\\]"),
        ({"weight": torch.zeros(5, 64, dtype=torch.int8)}, "up_proj.weight is I8"),
        ({"weight": None}, "up_proj.weight is missing"),
        ({"weight_scale": torch.full((5, 8), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)}, "40 of 40 .* NaN"),
        ({"weight_scale": torch.full((5, 8), -1.0).to(torch.float8_e4m3fn)}, "negative"),
        ({"weight_scale_2": torch.tensor(float("nan"))}, "weight_scale_2: .* one positive finite"),
        ({"weight_scale_2": torch.tensor([1.0, 2.0])}, "one positive finite"),
    ],
)
def test_a_wrong_tensor_is_named(tmp_path: Path, change: dict[str, torch.Tensor | None], said: str) -> None:
    tensors = stored(weight(), "modelopt") | {f"{LAYER}.{name}": tensor for name, tensor in change.items()}
    safetensors.torch.save_file({n: t for n, t in tensors.items() if t is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"(?s)^[^\n]*{said}[^\n]*$"):
        checkpoints.load(tmp_path, LAYER)


def test_a_damaged_or_foreign_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    checkpoints.save(path, {LAYER: weight()}, "modelopt")
    whole = path.read_bytes()
    for data in (b"", b"\x05", whole[:40], whole[:-1], b"GGUF" + whole, whole[:8] + b"[]" + whole[10:]):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"w\.safetensors"):
            checkpoints.load(path, LAYER)
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=f"no NVFP4 weight is named up; it has {LAYER}"):
        checkpoints.load(path, "up")
    safetensors.torch.save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"w\.safetensors: no NVFP4 weight"):
        checkpoints.layers(path)
    with pytest.raises(ValueError, match="gone"):
        checkpoints.load(tmp_path / "gone.safetensors", LAYER)
    with pytest.raises(ValueError, match="must be one of modelopt"):
        checkpoints.save(path, {}, "gguf")
    with pytest.raises(ValueError, match="multiple of 64"):
        checkpoints.to_ggml(weight(2, 96))
    with pytest.raises(ValueError, match="blocks"):
        checkpoints.from_ggml(torch.zeros(2, 35, dtype=torch.uint8))


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    checkpoints.save(path, {LAYER: weight()}, "modelopt")
    before = path.read_bytes()
    wrong = fmt.Nvfp4(weight().packed, weight().scale, torch.zeros(1))
    with pytest.raises(ValueError, match="one positive"):
        checkpoints.save(path, {"a": weight(), "b": wrong}, "modelopt")
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1
