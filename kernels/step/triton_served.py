"""A step as this project would serve it: the other families' operators, and the small kernels of triton_fused between.

Products are killgate::nvfp4_linear, so weights stay in 4.5 bits. A decode step's recurrence starts from the
convolution in one launch (kernels/gdn/cuda_decode_conv.py), a prompt's is killgate::gdn_prefill behind a convolution in
plain torch. Attention is killgate::kv_decode on the paged cache, and the library's for prompts. Every choice is made in
`prepare`, so a step launches and does nothing else. On the CPU the operators are their references, which is how the
wiring is tested.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from kernels.common import Candidate, Needs, Tensors
from kernels.gdn import ops as gdn_ops
from kernels.kv import ops as kv_ops
from kernels.nvfp4 import ops as nvfp4_ops
from kernels.step import torch_eager, triton_fused, wiring
from kernels.step.model import CONV_WIDTH
from kernels.step.wiring import Args


def linear(args: Args, name: str, x: torch.Tensor) -> torch.Tensor:
    """The packed weight's operator; a product of the library where the weight is not quantised."""
    packed = args["linears"].get(name)
    return packed(x) if packed is not None else F.linear(x, args[f"{name}.weight"])


def delta_rule(
    args: Args, at: str, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, state: torch.Tensor, conv: torch.Tensor
) -> torch.Tensor:
    """A decode step in one launch on a GPU; else convolution, gates and recurrence one after the other."""
    heads_v, dim = state.shape[1], state.shape[2]
    if args["decode"] and mixed.is_cuda:
        from kernels.gdn import cuda_decode_conv

        o = torch.empty(mixed.shape[0], heads_v, dim, dtype=mixed.dtype, device=mixed.device)
        given = {"mixed_qkv": mixed, "a": a, "b": b, "conv_weight": args[f"{at}conv_weight"], "raw_qk": args["last"]}
        given |= {name: args[f"{at}{name}"] for name in ("A_log", "dt_bias")}
        given |= {"state_rows": args["state_rows"], "arrived": args["arrived"]}
        cuda_decode_conv.launch(given, {"o": o, "state": state, "conv_state": conv})
        return o
    heads_k = (mixed.shape[1] // dim - heads_v) // 2
    filters = args[f"{at}conv1d.weight"]
    rows = args["state_rows"].long()
    convolved = torch.empty_like(mixed)
    for (first, last), row in zip(args["spans"], args["rows"], strict=True):
        window = torch.cat((conv[row], mixed[first:last]))
        conv[row] = window[-(CONV_WIDTH - 1) :]
        convolved[first:last] = F.conv1d(window.T[None], filters, groups=filters.shape[0])[0].T
    # Equal lengths are a batch, others one packed row.
    count = len(args["spans"]) if args["equal"] else 1
    by_sequence = (count, mixed.shape[0] // count)
    q, k, v = F.silu(convolved).view(*by_sequence, -1, dim).split((heads_k, heads_k, heads_v), dim=2)
    g = -args[f"{at}A_log"].exp() * F.softplus(a.float() + args[f"{at}dt_bias"])
    gates = (gate.view(*by_sequence, heads_v) for gate in (g, b.float().sigmoid()))
    o, final_state = args["prompt"](q, k, v, *gates, state[rows])
    state[rows] = final_state
    flat: torch.Tensor = o.flatten(0, 1)
    return flat


def attend(args: Args, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
    """Paged decode attention, or the library's where a sequence has several new tokens."""
    if args["decode"]:
        o: torch.Tensor = args["batch"](q, k_cache, v_cache, args["page_table"], args["seen"])
        return o
    return torch_eager.attend(args, q, k_cache, v_cache)


SERVED = replace(triton_fused.FUSED, linear=linear, delta_rule=delta_rule, attend=attend)


def prepare(inputs: Tensors) -> Args:
    """Weights packed for this number of tokens, and the tables of this batch."""
    args, device = wiring.plan(inputs), inputs["k_cache"].device
    tokens = int(inputs["cu_seqlens"][-1])
    names = [key.removesuffix(".weight_packed") for key in inputs if key.endswith(".weight_packed")]
    args["linears"] = {
        name: nvfp4_ops.Linear(
            *(inputs[f"{name}.weight_{part}"] for part in ("packed", "scale", "tensor_scale")), tokens=(tokens, tokens)
        )
        for name in names
    }
    lengths = [last - first for first, last in args["spans"]]
    args["decode"], args["equal"] = max(lengths) == 1, len(set(lengths)) == 1
    _, heads_v, dim = inputs["state"].shape[1:4]
    heads_k = (inputs["conv_state"].shape[3] // dim - heads_v) // 2
    args["prompt"] = gdn_ops.batch(lengths, heads_k, heads_v, dim, torch.bfloat16, device, raw_qk=True)
    _, _, heads_kv, page, head_dim = inputs["k_cache"].shape
    gate_rows = next(v.shape[0] for k, v in inputs.items() if "q_proj.weight" in k and v.dim() == 2)
    table = inputs["page_table"]
    args["batch"] = kv_ops.batch(
        len(lengths), table.shape[1] * page, gate_rows // (2 * head_dim), heads_kv, head_dim, page,
        inputs["k_cache"].dtype, torch.bfloat16, device,
    )  # fmt: skip
    args["seen"] = inputs["seq_lens"] + 1
    args["arrived"] = torch.zeros(len(lengths), heads_k, dtype=torch.int32, device=device)
    for name in [key for key in inputs if key.endswith("conv1d.weight")]:
        args[name.replace("conv1d.weight", "conv_weight")] = inputs[name][:, 0].contiguous()
    return args


def run(args: Args, out: Tensors) -> None:
    """One step."""
    wiring.run(SERVED, args, out)


CANDIDATES = (
    Candidate("served", "nvfp4-w4a16", run, Needs(triton="3.6"), prepare=prepare, builds=triton_fused.builds),
)
