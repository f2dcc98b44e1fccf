"""vLLM's mixture of experts on Marlin kernels, NVFP4 W4A16, from its compiled operators alone.

    pip install vllm

As vLLM strings them together: topk_softmax, moe_align_block_size, moe_wna16_marlin_gemm (x's rows are read by token),
silu_and_mul, moe_wna16_marlin_gemm (rows times their weights), moe_sum; the shared expert is two dense Marlin products
beside it. Nothing is asked of the host, so it can be captured. Arguments go by the names of the operators' schemas, so
that versions which have more or fewer of them are served. Weights are repacked as for kernels/nvfp4's vllm_marlin, bit
for bit, expert by expert; that file says what is refused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from kernels.common import Candidate, Needs, Tensors, Workload, library_version, load_operators
from kernels.nvfp4.peers import vllm_marlin
from kernels.nvfp4.peers.vllm_marlin import E2M1_TO_BF16_BIAS, FLOAT4_E2M1, S0E5M3_SHIFT

BLOCK_SIZES = (8, 16, 32, 48, 64)


def block_size(tokens: int, top_k: int, experts: int) -> int:
    """Rows of an expert's block: vLLM's choice, the least that nine tenths of an even routing would not fill."""
    return next((b for b in BLOCK_SIZES if tokens * top_k / experts / b < 0.9), BLOCK_SIZES[-1])


def _matrices(inputs: Tensors, name: str) -> Tensors:
    packed, scale, tensor_scale = (inputs[f"{name}_{part}"] for part in ("packed", "scale", "tensor_scale"))
    each = [vllm_marlin.repack_scales(s) for s in scale]
    powers = torch.tensor([power for _, power in each], device=scale.device)
    return {
        f"{name}_w": torch.stack([vllm_marlin.repack_weights(p) for p in packed]),
        f"{name}_s": torch.stack([s.view(torch.uint8) for s, _ in each]).view(torch.float8_e4m3fn),
        f"{name}_ts": tensor_scale.float() * torch.exp2((E2M1_TO_BF16_BIAS - S0E5M3_SHIFT - powers).float()),
    }


def prepare(inputs: Tensors) -> dict[str, Any]:
    """Both weights of every expert in Marlin's form, the locks' workspace, and room for what lies between products."""
    for package in ("_C", "_moe_C"):
        try:
            load_operators("vllm", f"{package}_stable_libtorch")
        except ImportError:  # before vLLM 0.33
            load_operators("vllm", package)
    x, experts, top_k = inputs["x"], len(inputs["down_packed"]), int(inputs["top_k"])
    (tokens, width), inner, device = x.shape, 2 * inputs["down_packed"].shape[2], inputs["down_packed"].device
    rows, block = tokens * top_k, block_size(tokens, top_k, experts)
    most = min(rows + experts * (block - 1), rows * block)
    kept: dict[str, Any] = _matrices(inputs, "gate_up") | _matrices(inputs, "down")
    kept |= {"k": top_k, "block": block, "dense": []}
    if "shared_gate" in inputs:
        for name, activations in (
            ("gate_up", (tokens, width)),
            ("down", (tokens, inputs["shared_down_packed"].shape[2] * 2)),
        ):
            parts = {f"w_{part}": inputs[f"shared_{name}_{part}"][0] for part in ("packed", "scale")}
            empty = torch.empty(activations, dtype=x.dtype, device=device)
            given = {"x": empty, **parts, "w_tensor_scale": inputs[f"shared_{name}_tensor_scale"]}
            kept["dense"].append(vllm_marlin.prepare(given))
        kept["shared_gate"] = inputs["shared_gate"]
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    sizes = {"ids": (tokens, top_k), "order": (tokens, top_k), "sorted": (most,), "of_block": (-(-most // block),)}
    kept |= {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
    kept |= {"padded": torch.zeros(1, dtype=torch.int32, device=device)}
    kept |= {"workspace": torch.zeros(4 * sms, dtype=torch.int32, device=device)}
    kept |= {"odds": torch.zeros(tokens, top_k, dtype=torch.float32, device=device)}
    between = {"wide": 2 * inner, "h": inner, "each": width}
    return kept | {n: torch.empty(rows, columns, dtype=x.dtype, device=device) for n, columns in between.items()}


def _product(args: dict[str, Any], name: str, a: torch.Tensor, c: torch.Tensor, top_k: int, weighted: bool) -> None:
    operator = torch.ops._moe_C.moe_wna16_marlin_gemm
    given = {
        "a": a, "c_or_none": c, "b_q_weight": args[f"{name}_w"], "b_bias_or_none": None, "b_scales": args[f"{name}_s"],
        "a_scales": None, "a_scales_or_none": None, "global_scale": args[f"{name}_ts"],
        "global_scale_or_none": args[f"{name}_ts"], "b_zeros_or_none": None, "g_idx_or_none": None,
        "perm_or_none": None, "workspace": args["workspace"], "sorted_token_ids": args["sorted"],
        "expert_ids": args["of_block"], "num_tokens_past_padded": args["padded"], "topk_weights": args["odds"],
        "moe_block_size": args["block"], "top_k": top_k, "mul_topk_weights": weighted, "b_type_id": FLOAT4_E2M1,
        "b_q_type": FLOAT4_E2M1, "size_m": a.shape[0], "size_n": c.shape[1], "size_k": a.shape[1], "is_full_k": True,
        "is_k_full": True, "use_atomic_add": False, "use_fp32_reduce": True, "is_zp_float": False, "thread_k": -1,
        "thread_n": -1, "blocks_per_sm": -1,
    }  # fmt: skip
    operator(**{a.name: given[a.name] for a in operator.default._schema.arguments if a.name in given})


def run(args: dict[str, Any], out: Tensors) -> None:
    """Six operators, and the shared expert beside them."""
    x, logits, y, h = args["x"], args["logits"], out["y"], args["h"]
    ops, experts = torch.ops._moe_C, logits.shape[1]
    softmax = {
        "topk_weights": args["odds"], "topk_indices": args["ids"], "token_expert_indices": args["order"],
        "gating_output": logits, "renormalize": True, "bias": None, "is_padding": None,
    }  # fmt: skip
    names = [argument.name for argument in ops.topk_softmax.default._schema.arguments]
    ops.topk_softmax(**{name: softmax[name] for name in names})
    ops.moe_align_block_size(
        args["ids"], experts, args["block"], args["sorted"], args["of_block"], args["padded"], None
    )  # fmt: skip
    _product(args, "gate_up", x, args["wide"], args["k"], False)
    torch.ops._C.silu_and_mul(h, args["wide"])
    _product(args, "down", h, args["each"], 1, True)
    ops.moe_sum(args["each"].view(len(x), args["k"], -1), y)
    if args["dense"]:
        up, down = args["dense"]
        wide = x.new_empty(len(x), 2 * down["x"].shape[1])
        vllm_marlin.run(up | {"x": x}, {"y": wide})
        torch.ops._C.silu_and_mul(down["x"], wide)
        shared = torch.empty_like(x)
        vllm_marlin.run(down, {"y": shared})
        y.addcmul_(torch.sigmoid(F.linear(x, args["shared_gate"][None])), shared)


def _refuses(workload: Workload) -> str:
    if workload["dtype"] != "bf16":
        return f"dtype={workload['dtype']}: this adapter is for bf16, the dtype of every measured shape"
    width, inner, shared = workload["H"], workload["F"], workload["shared"]
    if width % 128 or inner % 64 or shared % 128:
        return f"H={width}, F={inner}, shared={shared}: Marlin's blocks take K in 128s, and experts in 64s"
    return ""


CANDIDATES = (
    Candidate(
        "vllm_marlin_moe", "nvfp4-w4a16-rounded", run, Needs(capability=(8, 0), packages=("vllm",)), prepare=prepare,
        refuses=_refuses, config=lambda w: f"vllm {library_version('vllm')} moe_wna16_marlin_gemm, blocks of "
        f"{block_size(w['T'], w['top_k'], w['experts'])}",
    ),
)  # fmt: skip
