"""`cuda_experts` with one thing changed.

Scratch (row IM4): experts_fresh_scratch allocates what its two kernels leave each other in every call, where the
candidate keeps it. In a captured graph the allocator has no part in a replay, so only the ticket's memset is left.

Shape of the launch (NOTES.md, "Why 128 tokens took twice their reads"): experts_eights has blocks of eight tokens from
nine tokens on; experts_teams is experts_teams.cu, two teams of math warps and four reducers, and the others of its name
change one number of it.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from kernels.common import Candidate, Needs, Tensors, Workload
from kernels.moe import cuda_experts
from kernels.moe.cuda_experts import PRECISION, SCRATCH, Choice, ExpertsConfig
from kernels.nvfp4 import tiles
from kernels.nvfp4.hopper import SHARED_BYTES, SMS

NEEDS = Needs(capability=(9, 0), packages=("cupy",))
WHY = "shows what one change does to cuda_experts"


def run_fresh(args: dict[str, Any], out: Tensors) -> None:
    """cuda_experts.run on scratch of this call."""
    made = {name: torch.empty_like(args[name]) for name in SCRATCH if name != "state"}
    cuda_experts.run(args | made, out)


def eights(tokens: int, width: int, inner: int, dtype: str, sms: int) -> ExpertsConfig:
    """cuda_experts' choice with blocks of eight tokens."""
    return replace(cuda_experts.choose_config(tokens, width, inner, dtype, sms), n_tiles=1)


def teams(
    tokens: int, width: int, inner: int, dtype: str, sms: int, count: int = 2, stages: int = 6, round_items: int = 24,
    row_tiles: int = 0,
) -> ExpertsConfig:  # fmt: skip
    """experts_teams.cu; of `stages` of weights as many as leave room for two of h. row_tiles: 0 is cuda_experts'.

    One team where a warp has more than four tiles of x: 80 registers would not hold them.
    """
    count = count if width <= 4 * cuda_experts.WARPS * tiles.COLS else 1
    config = cuda_experts.choose_config(tokens, width, inner, dtype, sms)
    if row_tiles and -(-config.groups * config.row_tiles // row_tiles) <= sms:
        config = replace(config, row_tiles=row_tiles)
        config = replace(config, parts=sms // config.groups)
    config = replace(config, n_tiles=1, teams=count, round_items=round_items, stages=stages, h_stages=2)
    while config.stages > 2 * count and cuda_experts._shared_bytes_of(config, tokens) > SHARED_BYTES:
        config = replace(config, stages=config.stages - count)
    return cuda_experts.with_h_stages(config, tokens)


LEVERS: dict[str, Choice] = {
    "experts_eights": eights,
    "experts_teams": teams,
    "experts_teams_one": functools.partial(teams, count=1),
    "experts_teams_stages4": functools.partial(teams, stages=4),
    "experts_teams_round12": functools.partial(teams, round_items=12),
    "experts_teams_round48": functools.partial(teams, round_items=48),
    "experts_teams_rows1": functools.partial(teams, row_tiles=1),
    "experts_teams_rows2": functools.partial(teams, row_tiles=2),
}


def _refuses(workload: Workload) -> str:
    return cuda_experts.CANDIDATES[0].refuses(workload)


def _config(workload: Workload, choose: Choice) -> str:
    return str(choose(workload["T"], workload["H"], workload["F"], workload["dtype"], SMS))


CUDA_SOURCES = tuple(
    dict.fromkeys(
        cuda_experts.source(choose(tokens, *shape, "bf16", SMS))
        for choose in LEVERS.values()
        for tokens, shape in ((8, (2048, 512)), (128, (2048, 512)), (128, (2816, 704)))
    )
)

CANDIDATES = (
    Candidate(
        "experts_fresh_scratch", PRECISION, run_fresh, NEEDS, prepare=cuda_experts.prepare, refuses=_refuses,
        config=lambda w: cuda_experts.CANDIDATES[0].config(w), no_route=WHY,
    ),
    *(
        Candidate(
            name, PRECISION, functools.partial(cuda_experts.run, choose=choose), NEEDS,
            prepare=functools.partial(cuda_experts.prepare, choose=choose), refuses=_refuses,
            config=functools.partial(_config, choose=choose), no_route="not measured on a device yet",
        )
        for name, choose in LEVERS.items()
    ),
)  # fmt: skip
