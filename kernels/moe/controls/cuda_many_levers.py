"""`cuda_experts_many` with a few things less (card moe-many-served; NOTES.md, "Forms of the many-token launches").

experts_many_former: none of them, as it was. experts_many_router_once: router_once.cu, which waits for the whole grid
once. experts_many_shares: that, and where blocks differ in width, from 64 rows on, 96 columns are one wgmma, where they
are one of 64 and one of 32, and CTAs share what blocks cost by their columns, not their number.
experts_many_shares_fine: that, and where blocks have up to 32 rows a product has 16, 24 or 32 columns.
experts_many_early: that, and the second product's first stages of weights are asked for while the first product ends.
experts_many_early_prefetch: that, and weights are prefetched into L2 while the router runs, where blocks have up to 32
rows; cuda_experts_many is that now (card moe-many-early).
"""

from __future__ import annotations

import functools

from kernels.common import Candidate, Needs
from kernels.moe import cuda_many
from kernels.moe.cuda_experts import PRECISION
from kernels.moe.cuda_many import EARLY, EVEN, FINE, PLAIN, WIDE, Form

WHY = "shows what one change does to cuda_experts_many"
FORMS = {
    "experts_many_former": PLAIN,
    "experts_many_router_once": Form(router_once=True),
    "experts_many_shares": Form((WIDE, EVEN), router_once=True),
    "experts_many_shares_fine": Form((WIDE, EVEN, FINE), router_once=True),
    "experts_many_early": Form((WIDE, EVEN, FINE, EARLY), router_once=True),
    "experts_many_early_prefetch": cuda_many.FORM,
}

CUDA_SOURCES = tuple(
    dict.fromkeys(
        each
        for form in FORMS.values()
        for shape in ((32, 2048, 512), (64, 2048, 512), (96, 2048, 512), (96, 2816, 704))
        for each in cuda_many.sources_of(*shape, "bf16", form)
    )
)

CANDIDATES = tuple(
    Candidate(
        name, PRECISION, functools.partial(cuda_many.run, form=form), Needs(capability=(9, 0), packages=("cupy",)),
        prepare=cuda_many.prepare, refuses=cuda_many.refuses, config=functools.partial(cuda_many.config, form=form),
        no_route=WHY,
    )
    for name, form in FORMS.items()
)  # fmt: skip
