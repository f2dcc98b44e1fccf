"""`cuda_experts` with one thing changed.

Scratch (row IM4): experts_fresh_scratch allocates what its two kernels leave each other in every call, where the
candidate keeps it. In a captured graph the allocator has no part in a replay, so only the ticket's memset is left.

Shape of the launch (NOTES.md, "Why 128 tokens took twice their reads"): experts_one_team is experts.cu, one team
of math warps, one reducer and blocks of 16 tokens, experts_one_team_eights the same with blocks of eight; those named
experts_teams change one number of cuda_experts. What has one team has router.cu ahead of it, at few tokens too.

The router of more than eight tokens (cards moe-router-once and moe-prefetch): experts_teams_router_once has
router_once.cu, which waits for the whole grid once and whose blocks all place their own rows, in the place of
router.cu. experts_teams_prefetch4 and _prefetch8 prefetch into L2 four and eight items of each CTA's first experts, as
if all had tokens, while router.cu runs; experts_teams_once_prefetch8 does while router_once.cu runs.

One launch (card moe-routed): experts_router_launch is cuda_experts with router.cu's launch ahead at up to eight tokens
too, where cuda_experts does its work in every CTA. Of more tokens the two are one.

What is ahead of that launch's first copy (cards moe-early and moe-ahead): experts_late is the one launch as it was,
where the counters are looked for first. experts_counters_beside looks for them while other warps pick,
experts_pick_tree takes a lane's largest logit by a tree, experts_short_line does not divide the line of items by one,
experts_few_rows has stages of h for the call's tokens alone and eight of weights, experts_early all four, and
experts_early_rows2 two tiles of rows of y a CTA besides, in runs of about twelve items. cuda_experts is what gained.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernels import cuda
from kernels.common import Candidate, CudaSource, Needs, Tensors, Workload
from kernels.moe import cuda_experts, cuda_many
from kernels.moe.cuda_experts import PRECISION, SCRATCH, Choice, ExpertsConfig, choose_config
from kernels.nvfp4 import hopper
from kernels.nvfp4.hopper import SMS

NEEDS = Needs(capability=(9, 0), packages=("cupy",))
WHY = "shows what one change does to cuda_experts"


def run_fresh(args: dict[str, Any], out: Tensors) -> None:
    """cuda_experts.run on scratch of this call."""
    made = {name: torch.empty_like(args[name]) for name in SCRATCH if name not in ("state", "banks")}
    cuda_experts.run(args | made, out)


def few_shared_bytes(experts: int) -> int:
    """Of router_once.cu for few tokens: a thread's counts, two words an expert, a block's masks, two sums a warp."""
    warps, words = cuda_experts.router_warps(experts), -(-experts // 32)
    return 4 * (warps // words * words * 32 + 2 * experts + warps * words + 2 * words)


@functools.cache
def few_source(experts: int, dtype: str, block_tokens: int) -> CudaSource:
    """router_once.cu for few tokens."""
    macros = {"X_BF16": int(dtype == "bf16"), "EXPERTS": experts, "BLOCK_TOKENS": block_tokens, "FEW": 1}
    name = f"moe_router_once_few_{dtype}_e{experts}_b{block_tokens}"
    return hopper.source(cuda_many.ONCE_SOURCE, name, few_shared_bytes(experts), macros)


def prepare_once(inputs: Tensors) -> dict[str, Any]:
    """cuda_experts.prepare, with masks of a word an expert and block, and the router's counters."""
    kept, (tokens, experts) = cuda_experts.prepare(inputs), inputs["logits"].shape
    words = -(-tokens // cuda_experts.router_warps(experts)) * experts
    return kept | {"masks": kept["state"].new_zeros(words), "turns": kept["state"].new_zeros(3)}


def route_once(args: dict[str, Any], gate: Any, dtype: str, block_tokens: int, counters: int) -> None:
    """cuda_experts.route by router_once.cu."""
    logits, (tokens, width) = args["logits"], args["x"].shape
    experts = logits.shape[1]
    chooser, warps = few_source(experts, dtype, block_tokens), cuda_experts.router_warps(experts)
    lists = [args[name] for name in ("pairs", "masks", "rows", "blocks", "state")]
    cuda.launch(
        cuda.load(chooser, chooser.kernels[0], args["x"].device.index or 0), (-(-tokens // warps),), 32 * warps,
        (logits, args["x"], gate, *lists, *map(cuda.i32, (tokens, width, len(args["k"]), counters)), args["turns"]),
        few_shared_bytes(experts),
    )  # fmt: skip


def one_team(
    tokens: int, width: int, inner: int, dtype: str, sms: int, n_tiles: int = 0
) -> ExpertsConfig:  # fmt: skip
    """experts.cu: blocks of 8 tokens up to 8 tokens, else of 16; one reducer warp."""
    row_tiles, parts = cuda_experts.row_tiles_of(tokens, width, sms, 1 if tokens <= 8 else 0)
    n_tiles = n_tiles or (1 if tokens <= 8 else 2)
    config = ExpertsConfig(dtype, width, inner, n_tiles, row_tiles, parts, 4, 1, 24, sms)
    return cuda_experts.with_h_stages(config, tokens)


def late(
    tokens: int, width: int, inner: int, dtype: str, sms: int, *,
    switches: tuple[str, ...] = (), few_rows: bool = False, row_tiles: int = 1, round_items: int = 24,
) -> ExpertsConfig:  # fmt: skip
    """cuda_experts as it was up to eight tokens; of more it is cuda_experts."""
    if tokens > cuda_experts.ROUTED_MAX:
        return choose_config(tokens, width, inner, dtype, sms)
    return choose_config(
        tokens, width, inner, dtype, sms, round_items=round_items, row_tiles=row_tiles, switches=switches,
        few_rows=few_rows,
    )  # fmt: skip


EARLY = functools.partial(late, few_rows=True, switches=("COUNTERS_BESIDE", "PICK_TREE", "SHORT_LINE"))
LEVERS: dict[str, Choice] = {
    "experts_one_team": one_team,
    "experts_one_team_eights": functools.partial(one_team, n_tiles=1),
    "experts_teams_one": functools.partial(choose_config, teams=1),
    "experts_teams_stages4": functools.partial(choose_config, stages=4),
    "experts_teams_round12": functools.partial(choose_config, round_items=12),
    "experts_teams_rows1": functools.partial(choose_config, row_tiles=1),
    "experts_teams_rows2": functools.partial(choose_config, row_tiles=2),
    "experts_teams_prefetch4": functools.partial(choose_config, prefetch=4),
    "experts_teams_prefetch8": functools.partial(choose_config, prefetch=8),
    "experts_teams_routed32": functools.partial(choose_config, routed_max=cuda_experts.ROUTED_MOST),
    "experts_router_launch": functools.partial(choose_config, routed=False),
    "experts_late": late,
    "experts_counters_beside": functools.partial(late, switches=("COUNTERS_BESIDE",)),
    "experts_pick_tree": functools.partial(late, switches=("PICK_TREE",)),
    "experts_short_line": functools.partial(late, switches=("SHORT_LINE",)),
    "experts_few_rows": functools.partial(late, few_rows=True),
    "experts_early": EARLY,
    "experts_early_rows2": functools.partial(EARLY, row_tiles=2, round_items=12),
}


def _refuses(workload: Workload) -> str:
    return cuda_experts.CANDIDATES[0].refuses(workload)


def _config(workload: Workload, choose: Choice) -> str:
    return str(cuda_experts.chosen(workload, choose=choose))


def _config_once(workload: Workload, choose: Choice = choose_config) -> str:
    config = cuda_experts.chosen(workload, choose=choose)
    return str(config) if config.routed else f"{config} router_once"


CUDA_SOURCES = (
    *dict.fromkeys(
        cuda_experts.source(choose(tokens, *shape, "bf16", SMS), 256)
        for choose in LEVERS.values()
        for tokens, shape in (
            (1, (2048, 512)),
            (8, (2048, 512)),
            (32, (2048, 512)),
            (128, (2048, 512)),
            (128, (2816, 704)),
        )
    ),
    few_source(256, "bf16", 8),
)

CANDIDATES = (
    Candidate(
        "experts_fresh_scratch", PRECISION, run_fresh, NEEDS, prepare=cuda_experts.prepare, refuses=_refuses,
        config=lambda w: cuda_experts.CANDIDATES[0].config(w), no_route=WHY,
    ),
    *(
        Candidate(
            name, PRECISION, functools.partial(cuda_experts.run, choose=choose, router=route_once), NEEDS,
            prepare=prepare_once, refuses=_refuses, config=functools.partial(_config_once, choose=choose),
            no_route=WHY,
        )
        for name, choose in (
            ("experts_teams_router_once", choose_config),
            ("experts_teams_once_prefetch8", LEVERS["experts_teams_prefetch8"]),
        )
    ),
    *(
        Candidate(
            name, PRECISION, functools.partial(cuda_experts.run, choose=choose), NEEDS,
            prepare=functools.partial(cuda_experts.prepare, choose=choose), refuses=_refuses,
            config=functools.partial(_config, choose=choose), no_route=WHY,
        )
        for name, choose in LEVERS.items()
    ),
)  # fmt: skip
