"""`triton_experts` with one thing changed: what recorded phases asked of mixtures elsewhere.

Token tile (row LP5, patches 0014 and 0015). A stock selector looks at the sum over experts, so a tile is mostly empty:

    experts_stock_tile    up to 128 tokens a block by the sum of all rows
    experts_capped_tile   the same, 64 at most (their cap)
    experts_by_density    16 where an expert has 8 tokens or fewer in the mean, else the stock tile (their rule)
    experts_narrow_tile   always 16 (their small-M policy)

Occupancy (row LP6): experts_narrow_rows has half the weight rows a block with half the warps, so more blocks reside.

Expert-major region (row LP15, P2). experts_apart is three grouped products that know nothing of each other: each sorts
the choice and gathers for itself and hands its result back in the tokens' order, SiLU between them.

Gather (row LP16): experts_gathered copies x into the sorted order first; `triton_experts` reads it by its tokens.

Quantised activations (row LP16, P3). experts_w4a8 rounds x and h to e4m3, a scale for each row, in a kernel of its own
before each product, and the weights' codes times their block scales in the product, which is in fp8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.common import Build, Candidate, Needs, Tensors, Workload, interpreted
from kernels.moe import torch_grouped, triton_experts
from kernels.moe.triton_experts import Choice, ExpertConfig, Layer

STOCK, CAP, NARROW, DENSE = 128, 64, 16, 8  # tokens: the widest tile, the cap, the narrow one, and its limit
WHY = "shows what one change does to triton_experts"


def _tile(block_m: int) -> ExpertConfig:
    return ExpertConfig(block_m, 64, 8 if block_m >= CAP else 4, 4 if block_m < CAP else 3)


def stock_tile(tokens: int, top_k: int, experts: int, capability: int) -> ExpertConfig:
    """By the rows of all experts together."""
    return _tile(min(STOCK, max(NARROW, triton.next_power_of_2(tokens * top_k))))


def capped_tile(tokens: int, top_k: int, experts: int, capability: int) -> ExpertConfig:
    """The stock tile, CAP at most."""
    return _tile(min(CAP, stock_tile(tokens, top_k, experts, capability).block_m))


def by_density(tokens: int, top_k: int, experts: int, capability: int) -> ExpertConfig:
    """NARROW up to DENSE rows an expert, else the stock tile."""
    sparse = tokens * top_k <= DENSE * experts
    return _tile(NARROW) if sparse else stock_tile(tokens, top_k, experts, capability)


def narrow_tile(tokens: int, top_k: int, experts: int, capability: int) -> ExpertConfig:
    """NARROW, whatever the tokens."""
    return _tile(NARROW)


def narrow_rows(tokens: int, top_k: int, experts: int, capability: int) -> ExpertConfig:
    """Half the weight rows a block, with half the warps."""
    config = triton_experts.choose_config(tokens, top_k, experts, capability)
    return replace(config, block_n=config.block_n // 2, num_warps=config.num_warps // 2)


LEVERS: dict[str, Choice] = {
    "experts_stock_tile": stock_tile,
    "experts_capped_tile": capped_tile,
    "experts_by_density": by_density,
    "experts_narrow_tile": narrow_tile,
    "experts_narrow_rows": narrow_rows,
}


def gathered(
    args: dict[str, Any], prefix: str, x: torch.Tensor, token: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor,
    config: ExpertConfig,
) -> torch.Tensor:  # fmt: skip
    """triton_experts.layer on x in the sorted order, copied."""
    rows = torch.arange(len(token), device=x.device)
    return triton_experts.layer(args, prefix, x[token], rows, weight, ends, config)


@triton.jit
def quantise_rows_kernel(
    x_ptr,  # [rows, K]
    y_ptr,  # the same, e4m3; float32 in the interpreter
    scale_ptr,  # f32 [rows]
    K,
    BLOCK: tl.constexpr,  # K or more
    WIDEN: tl.constexpr,
):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * K + at, mask=at < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=0)
    scale = tl.where(largest > 0, largest / 448.0, 1.0)
    tl.store(scale_ptr + row, scale)
    tl.store(y_ptr + row * K + at, triton_experts.round_e4m3(x / scale, WIDEN), mask=at < K)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x [rows, K] in e4m3, the rows' scales float32)."""
    kind = torch.float32 if interpreted() else torch.float8_e4m3fn
    y, scale = torch.empty(x.shape, dtype=kind, device=x.device), x.new_empty(len(x), dtype=torch.float32)
    block = triton.next_power_of_2(x.shape[1])
    quantise_rows_kernel[(len(x),)](x, y, scale, x.shape[1], BLOCK=block, WIDEN=interpreted(), num_warps=4)
    return y, scale


def w4a8(
    args: dict[str, Any], prefix: str, x: torch.Tensor, token: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor,
    config: ExpertConfig,
) -> torch.Tensor:  # fmt: skip
    """triton_experts.layer with both operands of both products in e4m3."""
    rounded, scale = quantised(x)
    h = triton_experts.grouped(args, f"{prefix}gate_up", rounded, token, weight, ends, config, x.dtype, scale)
    rounded, scale = quantised(h)
    return triton_experts.grouped(args, f"{prefix}down", rounded, token, weight, ends, config, None, scale)


def prepare_apart(inputs: Tensors) -> dict[str, Any]:
    """As triton_experts.prepare, gate and up as weights of their own."""
    kept = triton_experts.prepare(inputs)
    for prefix in ("", "shared_")[: 1 + ("shared_gate" in inputs)]:
        for part in ("w", "s"):
            halves = kept.pop(f"{prefix}gate_up_{part}").chunk(2, dim=1)
            kept |= {
                f"{prefix}{name}_{part}": half.contiguous() for name, half in zip(("gate", "up"), halves, strict=True)
            }
        scale = kept.pop(f"{prefix}gate_up_ts")
        kept |= {f"{prefix}{name}_ts": scale for name in ("gate", "up")}
    return kept


def run_apart(args: dict[str, Any], out: Tensors) -> None:
    """Each product sorts, gathers, multiplies and puts its rows back; SiLU and the sum in the tokens' order."""
    x, k, experts = args["x"], len(args["k"]), len(args["down_w"])
    config = triton_experts.choose_config(len(x), k, experts, triton_experts.capability_of(x))

    def product(name: str, source: torch.Tensor, by_row: bool) -> torch.Tensor:
        """float32 [T k, N] in the tokens' order; source: [T, K], or [T k, K] where by_row."""
        _, token, weight, ends, back = torch_grouped.sorted_by_expert(args["logits"], k, experts)
        order = torch.empty_like(back).scatter_(0, back, torch.arange(len(back), device=x.device))
        rows = source[order] if by_row else source[token]
        return triton_experts.grouped(args, name, rows, token, torch.ones_like(weight), ends, config)[back]

    h = (torch.nn.functional.silu(product("gate", x, False)) * product("up", x, False)).to(x.dtype)
    odds = args["logits"].topk(k, dim=-1).values.softmax(-1)
    total = (product("down", h, True).view(len(x), k, -1) * odds[..., None]).sum(1)
    if "shared_gate" in args:
        every = torch.arange(len(x), device=x.device)
        whole = torch.full((1,), len(x), dtype=torch.int32, device=x.device)
        one = triton_experts.choose_config(len(x), 1, 1, triton_experts.capability_of(x))
        share = torch.sigmoid(x.float() @ args["shared_gate"].float())
        shared = functools.partial(triton_experts.grouped, token=every, ends=whole, config=one)
        ones = torch.ones_like(share)
        gate, up = (shared(args, f"shared_{name}", x, weight=ones) for name in ("gate", "up"))
        total += shared(args, "shared_down", (torch.nn.functional.silu(gate) * up).to(x.dtype), weight=share)
    out["y"].copy_(total)


def _pulls(choose: Choice | None = None, experts_of: Layer = triton_experts.layer) -> Callable[[Any, Tensors], None]:
    return functools.partial(triton_experts.run, choose=choose, experts_of=experts_of)


def _config(workload: Workload, choose: Choice) -> str:
    return str(choose(workload["T"], workload["top_k"], workload["experts"], 90))


def _builds(choose: Choice, tokens: int = 128, fp8: bool = False) -> Callable[[int], tuple[Build, ...]]:
    """At so many tokens of Qwen3.6-35B-A3B, on the capability where the questions are asked."""
    return lambda capability: triton_experts.builds(capability, choose, (tokens,), fp8) if capability == 90 else ()


CANDIDATES = (
    *(
        Candidate(
            name, "nvfp4-w4a16", _pulls(choose), Needs(triton="3.6"), prepare=triton_experts.prepare,
            config=functools.partial(_config, choose=choose), builds=_builds(choose), no_route=WHY,
        )
        for name, choose in LEVERS.items()
    ),
    Candidate(
        "experts_gathered", "nvfp4-w4a16", _pulls(experts_of=gathered), Needs(triton="3.6"),
        prepare=triton_experts.prepare, config=functools.partial(_config, choose=triton_experts.choose_config),
        no_route=WHY,
    ),
    Candidate(
        "experts_w4a8", "nvfp4-w4a8", _pulls(experts_of=w4a8), Needs(capability=(8, 9), triton="3.6"),
        prepare=triton_experts.prepare, config=functools.partial(_config, choose=triton_experts.choose_config),
        builds=_builds(triton_experts.choose_config, 2048, True), no_route=WHY,
    ),
    Candidate(
        "experts_apart", "nvfp4-w4a16", run_apart, Needs(triton="3.6"), prepare=prepare_apart,
        config=functools.partial(_config, choose=triton_experts.choose_config), no_route=WHY,
    ),
)  # fmt: skip
