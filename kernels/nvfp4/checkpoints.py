"""NVFP4 weights from and to other programs' layouts: ggml's blocks, modelopt's and compressed-tensors' safetensors.

All three store the same e2m1 codes and e4m3 scales of 16 values; they differ in order and in the tensor's own scale.

    ours, modelopt        byte j of a row holds columns 2 j (low nibble) and 2 j + 1; value = code * scale * scale_2
    compressed-tensors    the same bytes; value = code * scale / global_scale, so the tensor scale is its reciprocal
    ggml (block_nvfp4)    blocks of 64 columns in 36 bytes: four scales, then for each 16 columns 8 bytes, of which
                          byte j holds columns j (low nibble) and j + 8; the tensor scale is a tensor beside them

    modelopt              X.weight U8 [N, K / 2], X.weight_scale F8_E4M3 [N, K / 16], X.weight_scale_2 F32, one value
    compressed-tensors    X.weight_packed, X.weight_scale as above, X.weight_global_scale F32, one value
                          (format "nvfp4-pack-quantized")

Codes and scales are carried over bit for bit. The reciprocal of compressed-tensors is rounded once each way, so a
tensor scale that goes there and back may move by its last bit. A checkpoint is a .safetensors file, or a folder with
model.safetensors or model.safetensors.index.json. The scale of activations (input_scale) is not read: x is not
quantised by a scale of the file here.
"""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.nvfp4 import format as fmt

GGML_COLUMNS, GGML_BYTES = 64, 36  # of a block
MODELOPT, COMPRESSED = "modelopt", "compressed-tensors"
NAMES = {
    MODELOPT: ("weight", "weight_scale", "weight_scale_2"),
    COMPRESSED: ("weight_packed", "weight_scale", "weight_global_scale"),
}
TYPES = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}
WORDS = {dtype: word for word, dtype in TYPES.items()}
LONGEST_HEADER = 100_000_000  # the format's own limit


def to_ggml(q: fmt.Nvfp4) -> torch.Tensor:
    """uint8 [rows, cols / 64 * 36]: rows of block_nvfp4; q.tensor_scale is stored apart.

    Raises ValueError when cols is not a multiple of 64, or a scale is NaN, which ggml would read as 0.
    """
    rows, cols = q.packed.shape[0], 2 * q.packed.shape[1]
    if cols % GGML_COLUMNS:
        raise ValueError(f"cols={cols} must be a multiple of {GGML_COLUMNS}, a block of ggml; pad with zeros")
    _check_scales(q.scale, "scale")
    halves = fmt.unpack(q.packed).view(rows, -1, 4, 2, 8)  # block, 16 columns, which half of them
    codes = (halves[..., 0, :] | (halves[..., 1, :] << 4)).flatten(2)
    return torch.cat((q.scale.view(rows, -1, 4), codes), dim=2).flatten(1)


def from_ggml(blocks: torch.Tensor, tensor_scale: torch.Tensor | None = None) -> fmt.Nvfp4:
    """The matrix of rows of block_nvfp4, uint8 [rows, cols / 64 * 36].

    tensor_scale: the tensor that the file has beside it, float32 of one value; 1 where it has none. Raises ValueError
    for rows that are no whole blocks, and scales that are NaN or negative.
    """
    if blocks.dtype != torch.uint8 or blocks.ndim != 2 or not blocks.shape[1] or blocks.shape[1] % GGML_BYTES:
        raise ValueError(f"{blocks.dtype} {tuple(blocks.shape)}: pass uint8 [rows, blocks * {GGML_BYTES}]")
    block = blocks.unflatten(1, (-1, GGML_BYTES))
    scale, bytes_ = block[..., :4].flatten(1).contiguous(), block[..., 4:].unflatten(2, (4, 8))
    codes = torch.stack((bytes_ & 15, bytes_ >> 4), dim=3).flatten(1)
    one = torch.ones(1, dtype=torch.float32, device=blocks.device)
    own = one if tensor_scale is None else _tensor_scale(tensor_scale, "tensor_scale")
    return fmt.Nvfp4(fmt.pack(codes), _check_scales(scale, "blocks"), own)


def pack_ggml(blocks: torch.Tensor, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """Rows of block_nvfp4 on a GPU as the tiles of a kernels' layout (repack.LAYOUTS) in one launch, for x of `dtype`.

    The tensor scale is left to the caller. Raises ValueError as from_ggml and repack.from_ggml do.
    """
    from kernels.nvfp4 import repack  # Triton, which a reader of files need not have

    made = repack.from_ggml(blocks, dtype, layout)
    _check_scales(blocks.unflatten(1, (-1, GGML_BYTES))[..., :4], "blocks")
    return made


def _check_scales(scale: torch.Tensor, where: str) -> torch.Tensor:
    wrong = int(((scale & 0x7F) == fmt.E4M3_NAN).sum() + ((scale > 0x80) & (scale != 0xFF)).sum())
    if wrong:
        raise ValueError(
            f"{where}: {wrong} of {scale.numel()} block scales are NaN or negative; quantise the weight again"
        )
    return scale & 0x7F  # a zero with a sign is a zero


def _tensor_scale(value: torch.Tensor, where: str) -> torch.Tensor:
    if value.numel() != 1 or not 0 < float(value) < math.inf:
        raise ValueError(
            f"{where}: {value.flatten()[:4].tolist()} must be one positive finite number for the whole tensor"
        )
    return value.detach().to(torch.float32).reshape(1)


# safetensors: eight bytes of length, a JSON header, then the tensors' bytes ------------------------------------------


@dataclass(frozen=True)
class File:
    """A safetensors file's header. entries: tensor -> its dtype, shape and place after `start`."""

    path: Path
    entries: Mapping[str, Mapping[str, Any]]
    start: int

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, copied from the file. Raises ValueError naming file and tensor."""
        entry, where = self.entries[name], f"{self.path.name}: {name}"
        kind, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if kind not in TYPES:
            raise ValueError(f"{where} is {kind}; an NVFP4 weight is stored as {', '.join(TYPES)}")
        if not 0 <= first <= last or last - first != math.prod(shape) * TYPES[kind].itemsize:
            raise ValueError(f"{where} says {shape} in {last - first} bytes; the file is damaged, fetch it again")
        with open(self.path, "rb") as file:
            file.seek(self.start + first)
            data = bytearray(file.read(last - first))
        if len(data) != last - first:
            raise ValueError(f"{where} is cut off; fetch the file again")
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return flat.view(TYPES[kind]).reshape(shape)


def _header(path: Path) -> File:
    """Raises ValueError naming the file where it is no safetensors file."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > LONGEST_HEADER:
                raise ValueError("its header is longer than the format allows")
            entries = json.loads(file.read(length).decode("utf-8"))
        for name, entry in entries.items():
            if name != "__metadata__":
                _ = entry["dtype"], [int(n) for n in entry["shape"]], [int(n) for n in entry["data_offsets"]]
    except OSError as problem:
        raise ValueError(f"{path.name}: cannot be read ({problem.strerror}); pass a .safetensors file") from None
    except (struct.error, ValueError, TypeError, KeyError, AttributeError) as problem:
        raise ValueError(f"{path.name}: no safetensors file ({problem}); pass one, or fetch it again") from None
    return File(path, {n: e for n, e in entries.items() if n != "__metadata__"}, 8 + length)


def _files(path: Path) -> list[File]:
    if not path.is_dir():
        return [_header(path)]
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return [_header(path / "model.safetensors")]
    try:
        names = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"{index.name}: no weight_map can be read ({problem!r}); fetch the checkpoint again") from None
    return [_header(path / Path(name).name) for name in names]


def layers(path: Path) -> dict[str, str]:
    """Layer -> "modelopt" or "compressed-tensors", of every NVFP4 weight in a checkpoint, in the file's order.

    Raises ValueError naming the file where it is none, or there is no such weight in it.
    """
    every = {name: entry for file in _files(path) for name, entry in file.entries.items()}
    found: dict[str, str] = {}
    for layout, (_, _, last) in NAMES.items():
        found |= {name.removesuffix(f".{last}"): layout for name in every if name.endswith(f".{last}")}
    if not found:
        ends = " or ".join(f"X.{names[-1]}" for names in NAMES.values())
        raise ValueError(
            f"{path.name}: no NVFP4 weight in it (no {ends}); pass a checkpoint of modelopt or llm-compressor"
        )
    return found


def load(path: Path, layer: str) -> fmt.Nvfp4:
    """The weight of a layer, such as "model.layers.0.mlp.up_proj", from a checkpoint of either layout, on the CPU.

    Raises ValueError naming the file, the tensor and what is wrong with it.
    """
    files = _files(path)
    every = {name: file for file in files for name in file.entries}
    layout = next((word for word, names in NAMES.items() if f"{layer}.{names[-1]}" in every), None)
    if layout is None:
        raise ValueError(f"{path.name}: no NVFP4 weight is named {layer}; it has {', '.join([*layers(path)][:3])}, ...")
    parts = []
    for name in (f"{layer}.{word}" for word in NAMES[layout]):
        if name not in every:
            raise ValueError(f"{path.name}: {name} is missing beside its scales; fetch the checkpoint again")
        parts.append(every[name].tensor(name))
    packed, scale, own = parts
    where = f"{path.name}: {layer}"
    good = packed.ndim == 2 and scale.ndim == 2 and packed.shape == (scale.shape[0], 8 * scale.shape[1])
    if not good or packed.dtype != torch.uint8 or scale.dtype == torch.float32 or own.dtype != torch.float32:
        told = ", ".join(f"{WORDS[t.dtype]} {list(t.shape)}" for t in parts)
        raise ValueError(f"{where}: {told}; an NVFP4 weight is U8 [N, K / 2] with scales F8_E4M3 [N, K / 16] and F32")
    own = _tensor_scale(own, f"{where}.{NAMES[layout][-1]}")
    return fmt.Nvfp4(packed, _check_scales(scale.view(torch.uint8), where), own if layout == MODELOPT else 1 / own)


def save(path: Path, weights: Mapping[str, fmt.Nvfp4], layout: str) -> None:
    """Write the weights of layers as one .safetensors file of a layout, whole or not at all.

    Raises ValueError for another layout, and for a tensor scale that is not one positive number.
    """
    if layout not in NAMES:
        raise ValueError(f"{layout=} must be one of {', '.join(NAMES)}")
    tensors: dict[str, torch.Tensor] = {}
    for layer, q in weights.items():
        own = _tensor_scale(q.tensor_scale, layer)
        scale = _check_scales(q.scale, layer).view(torch.float8_e4m3fn)
        parts = (q.packed, scale, own.reshape(()) if layout == MODELOPT else 1 / own)
        tensors |= {f"{layer}.{word}": part for word, part in zip(NAMES[layout], parts, strict=True)}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data, at = [], 0
    for name in sorted(tensors, key=lambda name: -tensors[name].itemsize):  # so each begins where its type may
        tensor = tensors[name]
        raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": WORDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(raw)],
        }
        data.append(raw)
        at += len(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "wb") as file:
            file.writelines((struct.pack("<Q", len(text)), text, *data))
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
