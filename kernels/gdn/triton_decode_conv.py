"""A decode step from the mixed row on, in three launches: convolution with SiLU, gates, then a step kernel.

    conv_then_recurrent_decode   the step is recurrent_decode (Triton)
    conv_then_cuda_decode        the step is cuda_decode

The second is what cuda_decode_conv is measured against: the same step, with q, k, v, g and beta written to memory and
read again. q, k and v are rounded to the activations' format on the way, as a framework rounds them between its layers.
The convolution's columns are moved by the program that owns the channels, so there is nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

from kernels.common import Candidate, Needs, Tensors, Workload, interpreted
from kernels.gdn import cuda_decode, cuda_decode_conv, triton_decode
from kernels.gdn.tiles import as_format

BLOCK = 1024  # channels per program


@triton.jit
def conv_kernel(
    mixed, weight, conv_state, state_rows, q, k, v, pitch,
    KEYS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(CHANNELS / BLOCK), B). mixed [B, CHANNELS], rows pitch elements apart; weight [CHANNELS, 4];
    conv_state [rows, 3, CHANNELS]; q, k [B, KEYS] and v [B, CHANNELS - 2 KEYS] are written. An empty slot is left
    alone."""
    b = tl.program_id(1)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < CHANNELS
    row = tl.load(state_rows + b)
    if row < 0:
        return
    at = conv_state + row.to(tl.int64) * 3 * CHANNELS + c
    old0 = tl.load(at, mask=inside)
    old1 = tl.load(at + CHANNELS, mask=inside)
    old2 = tl.load(at + 2 * CHANNELS, mask=inside)
    new = tl.load(mixed + b * pitch + c, mask=inside)
    total = old0.to(tl.float32) * tl.load(weight + 4 * c, mask=inside).to(tl.float32)
    total += old1.to(tl.float32) * tl.load(weight + 4 * c + 1, mask=inside).to(tl.float32)
    total += old2.to(tl.float32) * tl.load(weight + 4 * c + 2, mask=inside).to(tl.float32)
    total += new.to(tl.float32) * tl.load(weight + 4 * c + 3, mask=inside).to(tl.float32)
    tl.store(at, old1, mask=inside)
    tl.store(at + CHANNELS, old2, mask=inside)
    tl.store(at + 2 * CHANNELS, new, mask=inside)
    y = as_format(total * tl.sigmoid(total), q.dtype.element_ty, INTERPRETED)
    tl.store(q + b * KEYS + c, y, mask=c < KEYS)
    tl.store(k + b * KEYS + c - KEYS, y, mask=(c >= KEYS) & (c < 2 * KEYS))
    tl.store(v + b * (CHANNELS - 2 * KEYS) + c - 2 * KEYS, y, mask=(c >= 2 * KEYS) & inside)


@triton.jit
def gate_kernel(a, b, a_log, dt_bias, g, beta, count, HV: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (ceil(count / BLOCK),). a, b, g, beta [B, HV], count = B * HV; a_log, dt_bias [HV]."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    x = tl.load(a + i, mask=inside).to(tl.float32) + tl.load(dt_bias + i % HV, mask=inside)
    soft = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    tl.store(g + i, -tl.exp(tl.load(a_log + i % HV, mask=inside)) * soft, mask=inside)
    tl.store(beta + i, tl.sigmoid(tl.load(b + i, mask=inside).to(tl.float32)), mask=inside)


def between(
    batch: int, heads_k: int, heads_v: int, dim: int, dtype: torch.dtype, device: torch.device | str
) -> Tensors:
    """Room for what lies between the launches."""

    def room(*shape: int) -> torch.Tensor:
        # Zeros: the channels of an empty slot are never written, and the step may read them.
        return torch.zeros(batch, *shape, dtype=dtype if len(shape) == 2 else torch.float32, device=device)

    made = {"q": room(heads_k, dim), "k": room(heads_k, dim), "v": room(heads_v, dim)}
    return made | {"g": room(heads_v), "beta": room(heads_v)}


def _prepare(inputs: Tensors) -> Tensors:
    cuda_decode_conv.checked(inputs)
    (batch, channels), (_, heads_v, dim, _) = inputs["mixed_qkv"].shape, inputs["state"].shape
    heads_k = (channels // dim - heads_v) // 2
    return inputs | between(batch, heads_k, heads_v, dim, inputs["mixed_qkv"].dtype, inputs["state"].device)


def run(step: Callable[[Tensors, torch.Tensor, torch.Tensor], None], args: Tensors, out: Tensors) -> None:
    """Convolution, gates, then `step` on what they left in args["q"], "k", "v", "g" and "beta"."""
    (batch, channels), heads_v = args["mixed_qkv"].shape, args["v"].shape[1]
    conv_kernel[(triton.cdiv(channels, BLOCK), batch)](
        args["mixed_qkv"], args["conv_weight"], out["conv_state"], args["state_rows"], args["q"], args["k"], args["v"],
        args["mixed_qkv"].stride(0), KEYS=args["q"][0].numel(), CHANNELS=channels, BLOCK=BLOCK,
        INTERPRETED=interpreted(), num_warps=4,
    )  # fmt: skip
    count = batch * heads_v
    gate_kernel[(triton.cdiv(count, 256),)](
        args["a"], args["b"], args["A_log"], args["dt_bias"], args["g"], args["beta"], count,
        HV=heads_v, BLOCK=256, num_warps=2,
    )  # fmt: skip
    step(args, out["state"], out["o"])


def _describe(step: Callable[[Workload], str], workload: Workload) -> str:
    return f"convolution, gates, then {step(workload)}"


CANDIDATES = (
    Candidate(
        name="conv_then_recurrent_decode",
        precision="bf16",
        run=partial(run, triton_decode.launch),
        needs=Needs(triton="3.6"),
        prepare=_prepare,
        refuses=cuda_decode_conv.refuses,
        config=partial(_describe, triton_decode.describe),
    ),
    Candidate(
        name="conv_then_cuda_decode",
        precision="bf16",
        run=partial(run, cuda_decode.launch),
        needs=Needs((9, 0), triton="3.6", packages=("cupy",)),
        prepare=_prepare,
        refuses=cuda_decode_conv.refuses,
        config=partial(_describe, cuda_decode.describe),
    ),
)
