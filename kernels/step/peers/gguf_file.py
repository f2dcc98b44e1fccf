"""A step's weights as a GGUF file that stock llama.cpp runs: `python -m kernels.step.peers.gguf_file --out F.gguf`.

The architecture is llama.cpp's qwen35. What differs from transformers' names and shapes, as its converter has it:
A_log is stored as -exp(A_log); gains that are applied as 1 + weight are stored with the 1; filters lose their middle
dimension; and value heads, which share a key head in groups of neighbours, are laid out key head by key head (all
first ones of each group, then all second ones), in the rows of what makes them and the columns of what reads them.
Weights in NVFP4 go over bit for bit as block_nvfp4, with their tensor scale as NAME.scale; "q8_0" quantises what they
dequantise to once more. There is no vocabulary: token ids are all that a bench needs. Needs the package gguf.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kernels.common import Tensors, usable_device
from kernels.nvfp4 import checkpoints
from kernels.nvfp4 import format as nvfp4
from kernels.step import cases
from kernels.step.model import CONV_WIDTH, EPS, MODELS, Model

FORMS = {"nvfp4": 64, "q8_0": 32}  # elements of a block, along K
CONTEXT = 262144
NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    **{f"self_attn.{name}_proj.weight": f"attn_{name}.weight" for name in "qkv"},
    "self_attn.o_proj.weight": "attn_output.weight",
    **{f"self_attn.{name}_norm.weight": f"attn_{name}_norm.weight" for name in "qk"},
    **{f"mlp.{name}_proj.weight": f"ffn_{name}.weight" for name in ("gate", "up", "down")},
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def name_of(name: str) -> str:
    """llama.cpp's name for transformers'."""
    if name in WHOLE:
        return WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}"


def _order(model: Model, name: str) -> tuple[int, torch.Tensor] | None:
    """(dimension, the order of its value heads' elements) of a tensor that has them, None of one that has not."""
    part = name.rpartition("linear_attn.")[2].removesuffix(".weight")
    group, dim = model.gdn_v_heads // model.gdn_k_heads, model.gdn_dim
    heads = torch.arange(model.gdn_v_heads).view(model.gdn_k_heads, group).T.flatten()
    elements = (heads[:, None] * dim + torch.arange(dim)).flatten()
    if part in ("in_proj_qkv", "conv1d"):
        keys = 2 * model.gdn_k_heads * dim
        return 0, torch.cat((torch.arange(keys), keys + elements))
    orders = {"in_proj_z": (0, elements), "out_proj": (1, elements)}
    orders |= {key: (0, heads) for key in ("in_proj_a", "in_proj_b", "A_log", "dt_bias")}
    return orders.get(part)


def ordered(model: Model, name: str, value: torch.Tensor | nvfp4.Nvfp4) -> Any:
    """A tensor, or packed matrix, with its value heads in llama.cpp's order."""
    if (found := _order(model, name)) is None:
        return value
    axis, order = found
    if isinstance(value, torch.Tensor):
        return value.index_select(axis, order.to(value.device))
    order = order.to(value.packed.device)
    if axis == 0:
        return replace(value, packed=value.packed[order], scale=value.scale[order])
    blocks = order.view(-1, nvfp4.BLOCK)[:, 0] // nvfp4.BLOCK  # a head is whole blocks
    packed = value.packed.unflatten(1, (-1, nvfp4.BLOCK // 2))[:, blocks].flatten(1)
    return replace(value, packed=packed, scale=value.scale[:, blocks])


def tensors(model: Model, weights: Tensors, form: str) -> Iterator[tuple[str, Any, str]]:
    """(llama.cpp's name, torch tensor or bytes [rows, blocks' bytes], ggml's type) of every tensor.

    form: of the quantised products.
    """
    import gguf

    for name in model.linears():
        packed = (weights[f"{name}.weight_{part}"] for part in ("packed", "scale", "tensor_scale"))
        q = ordered(model, name, nvfp4.Nvfp4(*packed))
        out = name_of(f"{name}.weight")
        if form == "nvfp4":
            yield out, checkpoints.to_ggml(q).cpu().numpy(), "NVFP4"
            yield out.replace(".weight", ".scale"), q.tensor_scale.cpu().numpy(), "F32"
        else:
            wide = nvfp4.dequantise(q).cpu().numpy()
            yield out, gguf.quants.quantize(wide, gguf.GGMLQuantizationType.Q8_0), "Q8_0"
    for name in model.others():
        value = ordered(model, name, weights[name]).cpu()
        if name.endswith("A_log"):
            value = -value.float().exp()
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            value = 1 + value.float()
        elif name.endswith("conv1d.weight"):
            value = value[:, 0].float()
        if value.dtype == torch.bfloat16:
            yield name_of(name), value.contiguous().view(torch.uint8).numpy(), "BF16"
        else:
            yield name_of(name), value.float().numpy(), "F32"


def size(model: Model, form: str) -> int:
    """Bytes of the tensors of a file."""
    products = sum(n * k for n, k in model.linears().values())
    others = sum(math.prod(shape) * (4 if len(shape) == 1 else 2) for shape in model.others().values())
    return others + products * (9 if form == "nvfp4" else 17) // 16


def refuses(path: Path, model: Model, form: str) -> str:
    """ "" or why no file can be written there, without weights. The writer holds the whole file in memory."""
    if model.experts:
        return "a mixture's experts have no layout here; pass a dense model"
    if not (block := FORMS.get(form)):
        return f"{form=} must be one of {', '.join(FORMS)}"
    if odd := next((f"{name}: K {k}" for name, (_, k) in model.linears().items() if k % block), ""):
        return f"{odd} is no multiple of {block}, a block of ggml's {form}; pass another --model"
    if "attention" not in model.kinds:
        return f"{model.layers} layers have no attention, without which llama.cpp does not run; pass --layers 4 or more"
    if not path.parent.is_dir():
        return f"{path.parent} is not there; make that folder"
    needed, room = size(model, form), shutil.disk_usage(path.parent).free
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        (line,) = (line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
        room = min(room, 1024 * int(line.split()[1]))
    if needed > room:
        return f"takes {needed / 1e9:.1f} GB of disk and of memory, {room / 1e9:.1f} are there; pass fewer --layers"
    return ""


def write(path: Path, model: Model, weights: Tensors, form: str) -> None:
    """The file, whole or not at all. weights: in NVFP4, as cases.weights gives them."""
    if reason := refuses(path, model, form):
        raise ValueError(reason)
    part = path.with_name(f".{path.name}.part")
    try:
        _write(part, model, weights, form)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write(path: Path, model: Model, weights: Tensors, form: str) -> None:
    import gguf

    out = gguf.GGUFWriter(path, "qwen35")
    out.add_type("model")
    out.add_name(f"step-{model.layers}x{model.hidden}-{form}")
    out.add_file_type(gguf.LlamaFileType.MOSTLY_NVFP4 if form == "nvfp4" else gguf.LlamaFileType.MOSTLY_Q8_0)
    out.add_block_count(model.layers)
    out.add_context_length(CONTEXT)
    out.add_embedding_length(model.hidden)
    out.add_feed_forward_length(model.ffn)
    out.add_head_count(model.heads)
    out.add_head_count_kv(model.kv_heads)
    out.add_key_length(model.head_dim)
    out.add_value_length(model.head_dim)
    out.add_layer_norm_rms_eps(EPS)
    out.add_rope_freq_base(model.theta)
    out.add_rope_dimension_count(model.rotary)
    third, pairs = -(-model.rotary // 6), model.rotary // 2  # text turns all of a head's pairs by one position
    out.add_rope_dimension_sections([third, third, pairs - 2 * third, 0])
    out.add_ssm_conv_kernel(CONV_WIDTH)
    out.add_ssm_state_size(model.gdn_dim)
    out.add_ssm_group_count(model.gdn_k_heads)
    out.add_ssm_time_step_rank(model.gdn_v_heads)
    out.add_ssm_inner_size(model.gdn_v_heads * model.gdn_dim)
    out.add_full_attention_interval(4)
    out.add_vocab_size(model.vocab)
    out.add_tokenizer_model("none")
    for name, value, kind in tensors(model, weights, form):
        out.add_tensor(name, value, raw_dtype=gguf.GGMLQuantizationType[kind])
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def main() -> None:
    """Write the seeded weights of a model of kernels/step, those that its workloads are measured with."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="q36-27b")
    parser.add_argument("--form", choices=FORMS, default="nvfp4")
    parser.add_argument("--layers", type=int, default=0, help="only the first so many; 0: all")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    try:
        import gguf  # noqa: F401

        model = MODELS[asked.model].cut(asked.layers)
        if reason := refuses(asked.out, model, asked.form):
            raise ValueError(reason)
        write(asked.out, model, cases.weights(model, 0, usable_device(asked.device)), asked.form)
    except ImportError as problem:
        print(f"gguf_file: {asked.out.name}: {problem}; pip install 'killgate[gguf]' brings gguf", file=sys.stderr)
        raise SystemExit(2) from None
    except (ValueError, OSError, torch.OutOfMemoryError) as problem:
        print(f"gguf_file: {asked.out.name}: {str(problem).splitlines()[0]}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
