"""`cuda_experts_many` with a few things changed (card moe-many-forms; NOTES.md, "Forms of the many-token launches").

experts_many_router_once: router_once.cu, which waits for the whole grid once. experts_many_shares: that, and where
blocks differ in width, from 64 rows on, 96 columns are one wgmma, where they are one of 64 and one of 32, and CTAs
share what blocks cost by their columns, not their number. experts_many_shares_fine: that, and where blocks have up to
32 rows a product has 16, 24 or 32 columns. experts_many_h_map: that, and h comes by a tensor map, of which one thread
asks for a stage (card moe-many-h-map).

Card moe-many-early, of shares_fine: experts_many_early asks for the second product's first stages of weights while the
first product ends, experts_many_early_prefetch besides prefetches weights into L2 while the router runs, where blocks
have up to 32 rows.
"""

from __future__ import annotations

import functools

from kernels.common import Candidate, Needs
from kernels.moe import cuda_many
from kernels.moe.cuda_experts import PRECISION
from kernels.moe.cuda_many import EARLY, EVEN, FINE, H_MAP, PREFETCH, WIDE, Form

WHY = "shows what one change does to cuda_experts_many"
FORMS = {
    "experts_many_router_once": Form(router_once=True),
    "experts_many_shares": Form((WIDE, EVEN), router_once=True),
    "experts_many_shares_fine": Form((WIDE, EVEN, FINE), router_once=True),
    "experts_many_h_map": Form((WIDE, EVEN, FINE, H_MAP), router_once=True),
    "experts_many_early": Form((WIDE, EVEN, FINE, EARLY), router_once=True),
    "experts_many_early_prefetch": Form((WIDE, EVEN, FINE, EARLY, PREFETCH), router_once=True),
}
PRODUCTS, MAPPED, AHEAD = (
    {block: cuda_many.form_for(FORMS[name], cuda_many.ONCE_TOKENS, block) for block in cuda_many.BLOCKS}
    for name in ("experts_many_shares_fine", "experts_many_h_map", "experts_many_early_prefetch")
)

CUDA_SOURCES = (
    *(
        cuda_many.source(each)
        for products in (PRODUCTS, AHEAD)
        for block, form in products.items()
        for each in cuda_many.configs(block, 2048, 512, "bf16", form=form)
    ),
    *(cuda_many.source(cuda_many.configs(block, 2048, 512, "bf16", form=form)[1]) for block, form in MAPPED.items()),
    *(cuda_many.source(each) for each in cuda_many.configs(96, 2816, 704, "bf16", form=PRODUCTS[96])),
    *(cuda_many.source(each) for each in cuda_many.configs(64, 2048, 512, "fp16", form=PRODUCTS[64])),
    *(cuda_many.source(each) for each in cuda_many.configs(96, 2048, 512, "bf16", form=Form((WIDE,)))),
    *(cuda_many.once_source(256, "bf16", block, block > 32) for block in cuda_many.BLOCKS),
)

CANDIDATES = tuple(
    Candidate(
        name, PRECISION, functools.partial(cuda_many.run, form=form), Needs(capability=(9, 0), packages=("cupy",)),
        prepare=cuda_many.prepare, refuses=cuda_many.refuses, config=functools.partial(cuda_many.config, form=form),
        no_route=WHY,
    )
    for name, form in FORMS.items()
)  # fmt: skip
