"""Chunked prefill in plain torch, float32: the middle step between the recurrence and the kernels.

The same mathematics as `triton_fused`, with names and order of the formulas, whole batches at once and
`torch.linalg.solve_triangular` in place of an explicit inverse. It is for reading, for notebooks and for checking the
kernels where the float64 recurrence is too slow. Given up: everything a GPU cares about.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from kernels.common import Candidate, Tensors, Work, Workload
from kernels.gdn.cost import sequences

CHUNK = 64
L2_EPS = 1e-6  # as transformers' l2norm


def chunk_step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk: q (scaled), k, v [N, Hv, C, D], g, beta [N, Hv, C], state [N, Hv, D, D]; returns (o, new state).

    arXiv 2412.06464 section 3.3, with the values corrected by the state before the triangular solve.
    """
    running = g.cumsum(-1)
    above = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)
    # Masked before exp: above the diagonal the difference is positive and its exp may overflow.
    decay = (running[..., :, None] - running[..., None, :]).masked_fill(above, float("-inf")).exp()
    system = (beta[..., None] * (k @ k.mT) * decay).tril(-1)  # its unit diagonal is implied below
    error = beta[..., None] * (v - running.exp()[..., None] * (k @ state))
    update = torch.linalg.solve_triangular(system, error, upper=False, unitriangular=True)
    o = running.exp()[..., None] * (q @ state) + ((q @ k.mT) * decay) @ update
    fading = (running[..., -1:] - running).exp()[..., None]
    return o, state * running[..., -1].exp()[..., None, None] + (k * fading).mT @ update


def _sequence(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """All chunks of sequences of equal length: token-major tensors [N, T, H, ...] in, o [N, T, Hv, D] and state out."""
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    parts = []
    for start in range(0, v.shape[2], CHUNK):
        o, state = chunk_step(state, *(x[:, :, start : start + CHUNK] for x in (q, k, v, g, beta)))
        parts.append(o)
    return torch.cat(parts, dim=2).transpose(1, 2), state


def _run(args: Tensors, out: Tensors) -> None:
    ratio = args["v"].shape[-2] // args["k"].shape[-2]
    q, k, v, g, beta = (args[name].float() for name in ("q", "k", "v", "g", "beta"))
    if "raw_qk" in args:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    q, k = ((x.repeat_interleave(ratio, dim=-2)) for x in (q * q.shape[-1] ** -0.5, k))
    state = args["initial_state"].float()
    if "cu_seqlens" not in args:
        o, final_state = _sequence(state, q, k, v, g, beta)
        out["o"].copy_(o)
        out["final_state"].copy_(final_state)
        return
    bounds = args["cu_seqlens"].tolist()
    for n, (first, last) in enumerate(pairwise(bounds)):
        o, final_state = _sequence(state[n : n + 1], *(x[:, first:last] for x in (q, k, v, g, beta)))
        out["o"][:, first:last].copy_(o)
        out["final_state"][n : n + 1].copy_(final_state)


def _refuses(workload: Workload) -> str:
    return "" if workload["op"] == "prefill" else f"op = {workload['op']}: torch_chunk does prefill only"


def work(workload: Workload, sms: int) -> Work:
    """Some thirty launches a chunk of all sequences, whose tensors go through memory; the steps are in turn."""
    steps, heads, dim = -(-workload["T"] // CHUNK), sequences(workload) * workload["Hv"], workload["D"]
    chunk = min(CHUNK, workload["T"])
    # Of float32 tensors read and written, a chunk has some 30 of chunk x D, 20 of chunk x chunk and 2 of D x D: the
    # state in and out, whose other six touches find it in L2.
    moved = 4.0 * steps * heads * (30 * chunk * dim + 20 * chunk**2 + 2 * dim**2)
    return Work({"bytes": moved}, {"launches": 10.0, "steps": 100_000.0 * steps})


CANDIDATES = (
    Candidate(
        name="torch_chunk",
        precision="f32",
        run=_run,
        refuses=_refuses,
        config=lambda workload: f"plain torch, chunks of {CHUNK}",
        work=work,
    ),
)
