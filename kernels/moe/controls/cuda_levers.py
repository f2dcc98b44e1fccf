"""`cuda_experts` with one thing changed, and as it was.

Scratch (row IM4): experts_fresh_scratch allocates what its two kernels leave each other in every call, where the
candidate keeps it. In a captured graph the allocator has no part in a replay, so only the ticket's memset is left.

Card moe-few-served: experts_former is cuda_experts as it was before: six stages of weights, router.cu's launch from
nine tokens on, nothing prefetched. experts_six_stages, experts_unprefetched and experts_routed8 (a router's launch from
nine tokens on) are today's with one of these. The other arms are experts_former with one change.

Shape of the launch (NOTES.md, "Why 128 tokens took twice their reads"): experts_one_team is experts.cu, one team
of math warps, one reducer and blocks of 16 tokens, experts_one_team_eights the same with blocks of eight; those named
experts_teams change one number. What has one team has router.cu ahead of it, at few tokens too.

The router (cards moe-router-once, moe-prefetch, moe-prefetch-64 and moe-routed-more): experts_teams_router_once has
router_once.cu, which waits for the whole grid once and whose blocks all place their own rows, in the place of
router.cu. experts_teams_prefetch4 and _prefetch8 prefetch into L2 four and eight items of each CTA's first experts, as
if all had tokens, while router.cu runs; experts_teams_once_prefetch8 does while router_once.cu runs.
experts_teams_routed32 has no router's launch up to 32 tokens, experts_router_launch (card moe-routed) at none.

What is ahead of the first copy (cards moe-early and moe-ahead): experts_late is the one launch where the counters are
looked for first. experts_counters_beside looks for them while other warps pick, experts_pick_tree takes a lane's
largest logit by a tree, experts_short_line does not divide the line of items by one, experts_few_rows has stages of h
for the call's tokens alone and eight of weights, experts_early all four, and experts_early_rows2 two tiles of rows of y
a CTA besides, in runs of about twelve items.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernels.common import Candidate, Needs, Tensors, Workload
from kernels.moe import cuda_experts
from kernels.moe.cuda_experts import BLOCK_TOKENS, KEPT, PRECISION, SCRATCH, Choice, ExpertsConfig, choose_config

NEEDS = Needs(capability=(9, 0), packages=("cupy",))
WHY = "shows what one change does to cuda_experts"


def run_fresh(args: dict[str, Any], out: Tensors) -> None:
    """cuda_experts.run on scratch of this call."""
    made = {name: torch.empty_like(args[name]) for name in SCRATCH if name not in KEPT}
    cuda_experts.run(args | made, out)


def one_team(
    tokens: int, width: int, inner: int, dtype: str, sms: int, n_tiles: int = 0
) -> ExpertsConfig:  # fmt: skip
    """experts.cu: blocks of 8 tokens up to 8 tokens, else of 16; one reducer warp."""
    row_tiles, parts = cuda_experts.row_tiles_of(tokens, width, sms, 1 if tokens <= 8 else 0)
    n_tiles = n_tiles or (1 if tokens <= 8 else 2)
    config = ExpertsConfig(dtype, width, inner, n_tiles, row_tiles, parts, 4, 1, 24, sms)
    return cuda_experts.with_h_stages(config, tokens)


# cuda_experts as it was until card moe-few-served.
FORMER = functools.partial(choose_config, stages=6, routed_max=BLOCK_TOKENS, prefetch=0)


def late(
    tokens: int, width: int, inner: int, dtype: str, sms: int, *,
    switches: tuple[str, ...] = (), few_rows: bool = False, row_tiles: int = 1, round_items: int = 24,
) -> ExpertsConfig:  # fmt: skip
    """As it was before that, up to eight tokens."""
    if tokens > BLOCK_TOKENS:
        return FORMER(tokens, width, inner, dtype, sms)
    return FORMER(
        tokens, width, inner, dtype, sms, round_items=round_items, row_tiles=row_tiles, switches=switches,
        few_rows=few_rows,
    )  # fmt: skip


EARLY = functools.partial(late, few_rows=True, switches=("COUNTERS_BESIDE", "PICK_TREE", "SHORT_LINE"))
LEVERS: dict[str, Choice] = {
    "experts_one_team": one_team,
    "experts_one_team_eights": functools.partial(one_team, n_tiles=1),
    "experts_former": FORMER,
    "experts_teams_one": functools.partial(FORMER, teams=1),
    "experts_teams_stages4": functools.partial(FORMER, stages=4),
    "experts_teams_round12": functools.partial(FORMER, round_items=12),
    "experts_teams_rows1": functools.partial(FORMER, row_tiles=1),
    "experts_teams_rows2": functools.partial(FORMER, row_tiles=2),
    "experts_teams_prefetch4": functools.partial(FORMER, prefetch=4),
    "experts_teams_prefetch8": functools.partial(FORMER, prefetch=8),
    "experts_teams_routed32": functools.partial(FORMER, routed_max=32),
    "experts_router_launch": functools.partial(FORMER, routed=False),
    "experts_late": late,
    "experts_counters_beside": functools.partial(late, switches=("COUNTERS_BESIDE",)),
    "experts_pick_tree": functools.partial(late, switches=("PICK_TREE",)),
    "experts_short_line": functools.partial(late, switches=("SHORT_LINE",)),
    "experts_few_rows": functools.partial(late, few_rows=True),
    "experts_early": EARLY,
    "experts_early_rows2": functools.partial(EARLY, row_tiles=2, round_items=12),
}
ONCE: dict[str, Choice] = {
    "experts_teams_router_once": FORMER,
    "experts_teams_once_prefetch8": LEVERS["experts_teams_prefetch8"],
    "experts_six_stages": functools.partial(choose_config, stages=6),
    "experts_unprefetched": functools.partial(choose_config, prefetch=0),
    "experts_routed8": functools.partial(choose_config, routed_max=BLOCK_TOKENS),
}


def _refuses(workload: Workload) -> str:
    return cuda_experts.CANDIDATES[0].refuses(workload)


SHAPES = (*((tokens, 256, 2048, 512) for tokens in (1, BLOCK_TOKENS, 32, 128)), (128, 128, 2816, 704))
CUDA_SOURCES = (
    *dict.fromkeys(
        cuda_experts.source_of(*shape, "bf16", choose) for choose in (LEVERS | ONCE).values() for shape in SHAPES
    ),
    cuda_experts.router_source(256, "bf16", 8),
)

CANDIDATES = (
    Candidate(
        "experts_fresh_scratch", PRECISION, run_fresh, NEEDS, prepare=cuda_experts.prepare, refuses=_refuses,
        config=cuda_experts.described, no_route=WHY,
    ),
    *(
        Candidate(
            name, PRECISION, functools.partial(cuda_experts.run, choose=choose, once=once), NEEDS,
            prepare=functools.partial(cuda_experts.prepare, choose=choose), refuses=_refuses,
            config=functools.partial(cuda_experts.described, choose=choose, once=once), no_route=WHY,
        )
        for levers, once in ((LEVERS, False), (ONCE, True))
        for name, choose in levers.items()
    ),
)  # fmt: skip
