"""`cuda_experts_many` with one thing changed (card moe-many-forms; NOTES.md, "Forms of the many-token launches").

experts_many_tell: a stage's copies tell of it themselves; the producers of cuda_experts_many wait for them, fence, and
tell. experts_many_k128: 128 k a stage. experts_many_tell_k128: both. Of it: experts_many_both_halves, a warp loads the
codes of both its halves of a span side by side; experts_many_wide, 96 columns are one wgmma, where they are one of 64
and one of 32; experts_many_fine, wide and with columns in finer steps. experts_many_router_once: router_once.cu, which
waits for the whole grid once. experts_many_lists_first: the sum reads where a token's rows lie ahead of the first of
them. experts_many_forms: all of it. experts_many_even: that, with CTAs that share what blocks cost by their columns,
not their number.
"""

from __future__ import annotations

import functools

from kernels.common import Candidate, Needs
from kernels.moe import cuda_many
from kernels.moe.cuda_experts import PRECISION
from kernels.moe.cuda_many import Form

WHY = "shows what one change does to cuda_experts_many"
TELL, HALVES, WIDE, FINE, EVEN = "COPIES_TELL", "BOTH_HALVES", "WIDE", "FINE", cuda_many.EVEN
FORMS = {
    "experts_many_tell": Form(1, (TELL,)),
    "experts_many_k128": Form(2),
    "experts_many_tell_k128": Form(2, (TELL,)),
    "experts_many_both_halves": Form(2, (TELL, HALVES)),
    "experts_many_wide": Form(2, (TELL, WIDE)),
    "experts_many_fine": Form(2, (TELL, WIDE, FINE)),
    "experts_many_router_once": Form(router_once=True),
    "experts_many_lists_first": Form(lists_first=True),
    "experts_many_forms": Form(2, (TELL, HALVES, WIDE, FINE), router_once=True, lists_first=True),
    "experts_many_even": Form(2, (TELL, HALVES, WIDE, FINE, EVEN), router_once=True, lists_first=True),
}
ALL = FORMS["experts_many_forms"]
PRODUCTS = [form for form in FORMS.values() if form.spans > 1 or form.switches]

CUDA_SOURCES = (
    *(
        cuda_many.source(each)
        for form in PRODUCTS
        for block in cuda_many.BLOCKS
        for each in cuda_many.configs(block, 2048, 512, "bf16", form=form)
    ),
    *(cuda_many.source(each) for each in cuda_many.configs(96, 2816, 704, "bf16", form=ALL)),
    *(cuda_many.source(each) for each in cuda_many.configs(64, 2048, 512, "fp16", form=ALL)),
    *(cuda_many.once_source(256, "bf16", block, by_width) for block in (32, 96) for by_width in (False, True)),
    cuda_many.sum_source(2048, "bf16", True),
)

CANDIDATES = tuple(
    Candidate(
        name, PRECISION, functools.partial(cuda_many.run, form=form), Needs(capability=(9, 0), packages=("cupy",)),
        prepare=cuda_many.prepare, refuses=cuda_many.refuses, config=functools.partial(cuda_many.config, form=form),
        no_route=WHY,
    )
    for name, form in FORMS.items()
)  # fmt: skip
