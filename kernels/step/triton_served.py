"""A step as this project would serve it: the other families' operators, and the small kernels of triton_fused between.

Products are killgate::nvfp4_linear, so weights stay in 4.5 bits. A decode step's recurrence starts from the
convolution in one launch (kernels/gdn/cuda_decode_conv.py), a prompt's is killgate::gdn_prefill behind a convolution in
plain torch. A mixture is killgate::moe. Attention is killgate::kv_decode on the paged cache, and the library's for
prompts. Every choice is made in `prepare`, so a step launches and does nothing else. On the CPU the operators are their
references, which is how the wiring is tested.

`made` builds a candidate of any configuration (config.py). In `served` no lever is pulled; `served_fastest` has those
that gained at its number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
import torch.nn.functional as F

from kernels import operators
from kernels.common import Build, Candidate, Needs, Tensors, Workload, asked_capability
from kernels.gdn import ops as gdn_ops
from kernels.gdn import triton_decode, triton_decode_conv
from kernels.gdn.controls import triton_decode_copied, triton_decode_gather
from kernels.kv import ops as kv_ops
from kernels.moe import ops as moe_ops
from kernels.nvfp4 import format as nvfp4
from kernels.nvfp4 import gated as nvfp4_gated
from kernels.nvfp4 import ops as nvfp4_ops
from kernels.step import fused_ends, fused_prompt, torch_eager, triton_fused, wiring
from kernels.step.cases import BLOCKS, SCALES, model_of
from kernels.step.config import RING_TOKENS, SCANS, USUAL, W4A8_FROM, Config, fastest, of
from kernels.step.model import CONV_WIDTH
from kernels.step.wiring import Args


def linear(args: Args, name: str, x: torch.Tensor) -> torch.Tensor:
    """The packed weight's operator; a product of the library where the weight is not quantised."""
    packed = args["linears"].get(name)
    return packed(x) if packed is not None else F.linear(x, args[f"{name}.weight"])


def anew(packed: nvfp4_ops.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product with scratch of its own in every call, filled as it stands between launches.

    Zeros for flags; words of all ones for sums of up to 96 tokens, where a zero would be a sum that has come.
    """
    idle = [[t.flatten()[0].item() if t.numel() else 0 for t in part[3]] for part in packed.parts]

    def call(x: torch.Tensor) -> torch.Tensor:
        kept = packed.parts, packed.plans
        packed.parts = [
            (*part[:3], [torch.full_like(t, value) for t, value in zip(part[3], values, strict=True)])
            for part, values in zip(packed.parts, idle, strict=True)
        ]
        packed.plans = operators.Plans()  # they hold the scratch that they were made for
        try:
            y: torch.Tensor = packed(x)
        finally:
            packed.parts, packed.plans = kept
        return y

    return call


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
        config = args["config"]
        form = "" if config.launch == "waiting" else "chained" if config.ahead == "none" else "early"
        cuda_decode_conv.launch(given, {"o": o, "state": state, "conv_state": conv}, form=form)
        return o
    heads_k = (mixed.shape[1] // dim - heads_v) // 2
    rows = following(args["rows"]) or args["state_rows"].long()
    if args["config"].convolution == "fused":
        heads = fused_prompt.convolved(
            mixed, args[f"{at}conv_weight"], conv, args["row_of"], args["place_of"], args["state_rows"],
            args["cu_seqlens"], heads_k, heads_v, dim,
        )  # fmt: skip
        gates = fused_prompt.gates(a, b, args[f"{at}A_log"], args[f"{at}dt_bias"])
    else:
        heads = _convolved(args, at, mixed, conv).unflatten(1, (-1, dim)).split((heads_k, heads_k, heads_v), dim=1)
        g = -args[f"{at}A_log"].exp() * F.softplus(a.float() + args[f"{at}dt_bias"])
        gates = g, b.float().sigmoid()
    # Equal lengths are a batch, others one packed row.
    count = len(args["spans"]) if args["equal"] else 1
    o, final_state = args["prompt"](*(t.unflatten(0, (count, -1)) for t in (*heads, *gates)), state[rows].float())
    state[rows] = final_state.to(state.dtype)
    flat: torch.Tensor = o.flatten(0, 1)
    return flat


def following(rows: Sequence[int]) -> slice | None:
    """A pool's rows as a slice, which is a view, where they follow each other; None: to be gathered and scattered."""
    first, count = rows[0], len(rows)
    return slice(first, first + count) if list(rows) == list(range(first, first + count)) else None


def _convolved(args: Args, at: str, mixed: torch.Tensor, conv: torch.Tensor) -> torch.Tensor:
    """SiLU of the library's convolution of each sequence, whose last columns are kept."""
    filters, made = args[f"{at}conv1d.weight"], torch.empty_like(mixed)
    for (first, last), row in zip(args["spans"], args["rows"], strict=True):
        window = torch.cat((conv[row], mixed[first:last]))
        conv[row] = window[-(CONV_WIDTH - 1) :]
        made[first:last] = F.conv1d(window.T[None], filters, groups=filters.shape[0])[0].T
    return F.silu(made)


STATES = {
    "by_id": triton_decode.CANDIDATES[0].run,
    "gathered": triton_decode_gather.CANDIDATES[0].run,
    "copied": triton_decode_copied.CANDIDATES[0].run,
}


def delta_rule_apart(
    args: Args, at: str, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, state: torch.Tensor, conv: torch.Tensor
) -> torch.Tensor:
    """A decode step in three launches, the third of which finds the states as the configuration says."""
    o = torch.empty(mixed.shape[0], *state.shape[1:3], dtype=mixed.dtype, device=mixed.device)
    given = args["room"] | {"mixed_qkv": mixed, "a": a, "b": b, "conv_weight": args[f"{at}conv_weight"]}
    given |= {name: args[f"{at}{name}"] for name in ("A_log", "dt_bias")} | {"state_rows": args["state_rows"]}
    step = STATES[args["config"].state]

    def stepped(given: Tensors, state: torch.Tensor, o: torch.Tensor) -> None:
        step(given | args["moved"], {"state": state, "o": o})

    triton_decode_conv.run(stepped, given, {"state": state, "conv_state": conv, "o": o})
    return o


def attend(args: Args, at: str, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
    """Paged decode attention, or the library's where a sequence has several new tokens."""
    if not args["decode"]:
        return torch_eager.attend(args, at, q, k_cache, v_cache)
    scales = [args[f"{at}{name}"] for name in (*SCALES, *BLOCKS) if f"{at}{name}" in args]
    caches = (c.view(torch.uint8) if f"{at}k_scale" in args else c for c in (k_cache, v_cache))
    o: torch.Tensor = args["batch"](q, *caches, args["page_table"], args["seen"], *scales)
    return o


def mixture(args: Args, at: str, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The operator of the layer's experts, the shared one among them."""
    y: torch.Tensor = args["mixtures"][at](x, logits)
    return y


def gated(args: Args, at: str, x: torch.Tensor) -> torch.Tensor:
    """Gate, up and what joins them in the kernel of both products."""
    y: torch.Tensor = args["gated"][at](x)
    return y


SERVED = replace(
    triton_fused.FUSED, linear=linear, delta_rule=delta_rule, attend=attend, mixture=mixture, gated=gated,
    begin=fused_ends.begin, head=fused_ends.head,
)  # fmt: skip
SMALL = ("alpha_beta", "router", "norm_gemv", "add_norm", "gated_norm", "rotate", "gate", "activate", "begin", "head")
PARTS = {
    "waiting": SERVED,
    "chained": replace(SERVED, **{name: partial(getattr(SERVED, name), pdl=True) for name in SMALL}),
}
# What levers name of the NVFP4 family; on the CPU a product that rounds is rounded here, since the operator is exact.
W4A8 = "cuda_w4a8"
GDN_DIMS = (64, 128)


def prepare(inputs: Tensors, config: Config | None = USUAL) -> Args:
    """Weights packed for this number of tokens, and the tables of this batch. config: None for the fastest."""
    config = config or fastest(inputs["cu_seqlens"].diff().tolist(), "top_k" in inputs)
    packed, replaced = wiring.packed(inputs, config)
    inputs = inputs | packed
    args, device = wiring.plan(inputs), inputs["k_cache"].device
    args |= {"config": config, "graphs": {}}
    tokens = int(inputs["cu_seqlens"][-1])
    top_k = int(inputs.get("top_k", 0))
    args["mixtures"] = {
        at: moe_ops.Layer(own, top_k=top_k, tokens=(tokens, tokens)) for at, own in wiring.mixtures(inputs).items()
    }
    args["gated"] = {}
    for key in [key for key in inputs if config.gated and key.endswith("gate_proj.weight_packed")]:
        at = key.removesuffix("gate_proj.weight_packed")
        gate, up = ({p: inputs[f"{at}{n}_proj.weight_{p}"] for p in ("packed", "scale", "tensor_scale")}
                    for n in ("gate", "up"))  # fmt: skip
        args["gated"][at] = nvfp4_gated.Gated(gate, up, form=config.form(tokens), tokens=tokens)
        replaced |= {f"{at}gate_proj", f"{at}up_proj"}
    args["linears"] = {}
    for name in (key.removesuffix(".weight_packed") for key in inputs if key.endswith(".weight_packed")):
        weight = [inputs[f"{name}.weight_{part}"] for part in ("packed", "scale", "tensor_scale")]
        rows = 1 if config.per_sequence and name.endswith("out_proj") else tokens
        if name in replaced or ".shared_expert." in name:
            continue
        if config.products == "w4a8" and device.type != "cuda":
            args["linears"][name] = partial(in_e4m3, weight)
            continue
        few = config.form(rows) if rows <= RING_TOKENS else ""
        only = W4A8 if config.products == "w4a8" and rows >= W4A8_FROM else few
        one = nvfp4_ops.Linear(*weight, tokens=(rows, rows), only=only, chained=config.launch == "chained")
        args["linears"][name] = anew(one) if config.scratch else one
    lengths = [last - first for first, last in args["spans"]]
    args["decode"], args["equal"] = max(lengths) == 1, len(set(lengths)) == 1
    _, heads_v, dim = inputs["state"].shape[1:4]
    heads_k = (inputs["conv_state"].shape[3] // dim - heads_v) // 2
    if config.recurrence == "apart":
        args |= _apart(inputs, args["rows"], heads_k, config)
    args["prompt"] = gdn_ops.batch(lengths, heads_k, heads_v, dim, torch.bfloat16, device, True, SCANS[config.scan])
    _, _, heads_kv, page, head_dim = inputs["k_cache"].shape
    gate_rows = next(v.shape[0] for k, v in inputs.items() if "q_proj.weight" in k and v.dim() == 2)
    table = inputs["page_table"]
    args["batch"] = kv_ops.batch(
        len(lengths), table.shape[1] * page, gate_rows // (2 * head_dim), heads_kv, head_dim, page,
        torch.uint8 if "k_scale" in inputs else inputs["k_cache"].dtype, torch.bfloat16, device,
        config.chained_attention,
    )  # fmt: skip
    args["seen"] = inputs["seq_lens"] + 1
    if config.convolution == "fused":
        of = [(row, place) for row, (first, last) in zip(args["rows"], args["spans"], strict=True)
              for place in range(last - first)]  # fmt: skip
        args["row_of"], args["place_of"] = torch.tensor(of, dtype=torch.int32, device=device).T.contiguous()
    args["arrived"] = torch.zeros(len(lengths), heads_k, dtype=torch.int32, device=device)
    for name in [key for key in inputs if key.endswith("conv1d.weight")]:
        args[name.replace("conv1d.weight", "conv_weight")] = inputs[name][:, 0].contiguous()
    return args


def in_e4m3(weight: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The product as cuda_w4a8 rounds it, in plain torch: x by rows of one scale, the weight by rows of a power of two.

    weight: w_packed, w_scale and w_tensor_scale.
    """
    w = nvfp4.dequantise(nvfp4.Nvfp4(weight[0], weight[1], torch.ones_like(weight[2])))
    powers = (w.abs().amax(1, keepdim=True) / 448).log2().ceil().exp2()
    by = (x.float().abs().amax(1, keepdim=True) / 448).clamp_min(1e-30)
    rounded = [(t / s).to(torch.float8_e4m3fn).float() * s for t, s in ((x.float(), by), (w, powers))]
    return (rounded[0] @ rounded[1].T * weight[2]).to(x.dtype)


def _apart(inputs: Tensors, rows: Sequence[int], heads_k: int, config: Config) -> Args:
    """Room between the launches of a recurrence in three, and what `state` needs beside the pool."""
    _, _, heads_v, dim, _ = inputs["state"].shape
    device, ids = inputs["state"].device, inputs["state_rows"]
    moved: Tensors = {"raw_qk": ids}
    if config.state != "by_id":
        moved |= {"pool_rows": ids.long(), "scratch": torch.empty_like(inputs["state"][0, : len(rows)])}
    if config.state == "copied":
        moved["state_rows"] = torch.arange(len(rows), dtype=torch.int32, device=device)
    room = triton_decode_conv.between(len(rows), heads_k, heads_v, dim, torch.bfloat16, device)
    return {"room": room, "moved": moved}


def run(args: Args, out: Tensors) -> None:
    """One step."""
    config = args["config"]
    wiring.run(replace(PARTS[config.launch], delta_rule=RULES[config.recurrence]), args, out, config)


def launched(graph: torch.cuda.CUDAGraph) -> None:
    """On the caller's stream, which is all the order that a step needs."""
    graph.replay()


def waiting(graph: torch.cuda.CUDAGraph) -> None:
    """On another stream: it waits for what the caller launched, and the caller's waits for the step."""
    caller = torch.cuda.current_stream()
    own = _stream(caller.device)
    own.wait_stream(caller)
    with torch.cuda.stream(own):
        graph.replay()
    caller.wait_stream(own)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def replay(args: Args, out: Tensors) -> None:
    """One step: launched one by one at the first call on these outputs and captured behind it; a replay from there."""
    if not out["logits"].is_cuda:
        return run(args, out)
    graphs, at = args["graphs"], (args["tokens"].data_ptr(), *(t.data_ptr() for t in out.values()))
    if at in graphs:
        (waiting if args["config"].waits else launched)(graphs[at])
        return None
    run(args, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # nothing runs meanwhile, so the states are left as they are
        run(args, out)
    graphs[at] = graph
    return None


RULES = {"fused": delta_rule, "apart": delta_rule_apart}


BUILDS = {
    "served": triton_fused.builds, "served_few_ends": fused_ends.builds, "served_prompt_conv": fused_prompt.builds,
}  # fmt: skip


def made(name: str, config: Config | None) -> Candidate:
    """The candidate of a configuration; None: of the fastest at a workload."""
    usual = config or USUAL
    return Candidate(
        name, usual.precision, replay if usual.replayed else run, Needs(triton="3.6"),
        prepare=partial(prepare, config=config), refuses=partial(_refuses, name),
        builds=BUILDS.get(name, _no_builds),
        config=lambda workload: str(of(name, workload)),
    )  # fmt: skip


def _no_builds(capability: int) -> tuple[Build, ...]:
    return ()


def _refuses(name: str, workload: Workload) -> str:
    """As `Config.refuses`; where a GPU is here and none was asked for, its memory counts, and what its kernels take."""
    config = of(name, workload)
    if not torch.cuda.is_available() or asked_capability.get() is not None:
        return config.refuses(workload)
    dim = model_of(workload).gdn_dim
    if dim not in GDN_DIMS:
        return f"GDN heads of {dim}: the kernels take {' and '.join(map(str, GDN_DIMS))}"
    return config.refuses(workload, torch.cuda.get_device_properties(0).total_memory)


CANDIDATES = (made("served", USUAL), made("served_fastest", None))
