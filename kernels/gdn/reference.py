"""The gated delta rule, one token after the other, in float64.

What: the four lines of the recurrence (see the package docstring), with nothing chunked, fused or reordered, so that
the text can be compared with the formula by eye. Why float64: every candidate rounds somewhere between 2^-9 and 2^-24;
the reference must be silent beside all of them. Given up: speed. A 27B layer at T = 8192 takes minutes on a CPU, so
checks use small shapes and the measured shapes are checked on the GPU, where the same code runs.

Heads are looped over as a tensor dimension only; sequences and tokens are Python loops.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.common import Tensors

TOGETHER, MANY = 64, 8192  # tokens of a CUDA graph, and of a sequence from which on it is replayed
L2_EPS = 1e-6  # x * rsqrt(sum(x^2) + eps), as transformers' l2norm; candidates hold their own copy of the constant


def _l2_normalised(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: q, k, v [..., Hv, D] (heads already repeated), g, beta [..., Hv], state [..., Hv, D, D], all float64.

    Returns (o [..., Hv, D], the new state). arXiv 2412.06464 equation 10, with the read scaled by D^-0.5.
    """
    state = state * torch.exp(g)[..., None, None]
    guess = (k[..., None, :] @ state)[..., 0, :]
    update = beta[..., None] * (v - guess)
    state = state + k[..., :, None] * update[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :] * q.shape[-1] ** -0.5, state


def before_the_step(inputs: Tensors) -> tuple[Tensors, torch.Tensor]:
    """What a layer does between its input projections and the step, for conv_decode, in float64.

    Returns (q, k [B, Hk, D], v [B, Hv, D], g and beta [B, Hv]; the convolution's whole state after it). The
    convolution is causal and per channel, its last weight is the newest token's; g = -exp(A_log) softplus(a + dt_bias)
    and beta = sigmoid(b), as transformers' Qwen3Next forms them. Empty slots give zeros.
    """
    mixed, weight, conv_state = (inputs[name].double() for name in ("mixed_qkv", "conv_weight", "conv_state"))
    conv_state, rows = conv_state.clone(), inputs["state_rows"].long()
    window = torch.zeros(*mixed.shape, weight.shape[1], dtype=torch.float64, device=mixed.device)
    live = rows >= 0
    window[live] = torch.cat((conv_state[rows[live]].transpose(1, 2), mixed[live][..., None]), dim=2)
    conv_state[rows[live]] = window[live][..., 1:].transpose(1, 2)
    dim, heads_v = inputs["state"].shape[-1], inputs["state"].shape[1]
    heads = F.silu((window * weight).sum(-1)).unflatten(1, (-1, dim))  # q heads, k heads, v heads
    heads_k = (heads.shape[1] - heads_v) // 2
    q, k, v = heads.split((heads_k, heads_k, heads_v), dim=1)
    g = -inputs["A_log"].double().exp() * F.softplus(inputs["a"].double() + inputs["dt_bias"].double())
    return {"q": q, "k": k, "v": v, "g": g, "beta": torch.sigmoid(inputs["b"].double())}, conv_state


def reference(inputs: Tensors) -> Tensors:
    """Outputs of a workload in float64; `inputs` as cases.inputs describes them.

    Prefill returns o [B, T, Hv, D] and final_state [N, Hv, D, D]; decode returns o [B, Hv, D] and the whole state
    pool [rows, Hv, D, D] after the step; conv_decode besides them conv_state [rows, 3, channels], moved by one column.
    Raises ValueError when Hv is not a multiple of Hk.
    """
    if "mixed_qkv" in inputs:
        step_inputs, conv_state = before_the_step(inputs)
        kept = {name: inputs[name] for name in ("state", "state_rows", "raw_qk") if name in inputs}
        return reference(kept | step_inputs) | {"conv_state": conv_state}
    heads_k, heads_v = inputs["k"].shape[-2], inputs["v"].shape[-2]
    if heads_v % heads_k:
        raise ValueError(f"Hv = {heads_v} is not a multiple of Hk = {heads_k}: pass v with Hv = r * Hk heads")
    q, k, v, g, beta = (inputs[name].double() for name in ("q", "k", "v", "g", "beta"))
    if "raw_qk" in inputs:
        q, k = _l2_normalised(q), _l2_normalised(k)
    q, k = (x.repeat_interleave(heads_v // heads_k, dim=-2) for x in (q, k))
    if "state_rows" in inputs:
        return _decode(q, k, v, g, beta, inputs)
    return _prefill(q, k, v, g, beta, inputs)


def _prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, inputs: Tensors
) -> Tensors:
    state = inputs["initial_state"].double()
    if "cu_seqlens" in inputs:
        lengths = inputs["cu_seqlens"].diff().tolist()
        sequences = zip(*(x.split(lengths, dim=1) for x in (q, k, v, g, beta)), strict=True)
        found = [_sequence(state[n : n + 1], *of) for n, of in enumerate(sequences)]
        return {"o": torch.cat([o for o, _ in found], 1), "final_state": torch.cat([last for _, last in found])}
    o, state = _sequence(state, q, k, v, g, beta)
    return {"o": o, "final_state": state}


def _sequence(state: torch.Tensor, *of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Equally long sequences [B, T, ...] from their states on."""
    return (_replayed if of[2].is_cuda and of[2].shape[1] >= MANY else _walked)(state, *of)


def _replayed(state: torch.Tensor, *of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As _walked, whose launches are replayed: one by one, 65,536 tokens are half a million of the host's."""
    parts = list(zip(*(x.split(TOGETHER, 1) for x in of), strict=True))
    given, kept, found = [x.clone() for x in parts[0]], state.clone(), []
    _walked(kept, *given)  # what libraries do at their first call may not be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made, after = _walked(kept, *given)
        kept.copy_(after)
    for part in parts:
        if part[0].shape[1] < TOGETHER:
            rest, kept = _walked(kept, *part)
            found.append(rest)
            break
        for to, x in zip(given, part, strict=True):
            to.copy_(x)
        graph.replay()
        found.append(made.clone())
    return torch.cat(found, 1), kept


def _walked(state: torch.Tensor, *of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    o = [torch.zeros_like(of[2][:, :0])]
    for token in zip(*(x.unbind(1) for x in of), strict=True):
        next_o, state = step(state, *token)
        o.append(next_o[:, None])
    return torch.cat(o, 1), state


def _decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, inputs: Tensors
) -> Tensors:
    o, pool = torch.zeros_like(v), inputs["state"].double().clone()
    rows = inputs["state_rows"].long()
    live = rows >= 0  # -1 marks an empty slot: o stays zero and no state is touched
    rows = rows[live]
    o[live], pool[rows] = step(pool[rows], q[live], k[live], v[live], g[live], beta[live])
    return {"o": o, "state": pool}
