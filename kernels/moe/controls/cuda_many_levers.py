"""`cuda_experts_many` with one thing changed (card moe-many-forms; NOTES.md, "Forms of the many-token launches").

experts_many_tell: a stage's copies tell of it themselves; the producers of cuda_experts_many wait for them, fence, and
tell. experts_many_k128: 128 k a stage. experts_many_tell_k128: both. experts_many_router_once: router_once.cu, which
waits for the whole grid once. experts_many_lists_first: the sum reads where a token's rows lie ahead of the first of
them. experts_many_forms: all of it.
"""

from __future__ import annotations

import functools

from kernels.common import Candidate, Needs
from kernels.moe import cuda_many
from kernels.moe.cuda_experts import PRECISION
from kernels.moe.cuda_many import Form

WHY = "shows what one change does to cuda_experts_many"
FORMS = {
    "experts_many_tell": Form(copies_tell=True),
    "experts_many_k128": Form(spans=2),
    "experts_many_tell_k128": Form(spans=2, copies_tell=True),
    "experts_many_router_once": Form(router_once=True),
    "experts_many_lists_first": Form(lists_first=True),
    "experts_many_forms": Form(spans=2, copies_tell=True, router_once=True, lists_first=True),
}
BUILT = {  # products, and the blocks, width and inner width that each is compiled for
    Form(copies_tell=True): ((32, 2048, 512), (64, 2048, 512), (96, 2048, 512), (96, 2816, 704)),
    # Not Gemma 4's: three words spill there, which a consumer reads once a tile.
    Form(spans=2): ((32, 2048, 512), (64, 2048, 512), (96, 2048, 512)),
    Form(spans=2, copies_tell=True): ((32, 2048, 512), (64, 2048, 512), (96, 2048, 512), (96, 2816, 704)),
}

CUDA_SOURCES = (
    *(
        cuda_many.source(each)
        for form, sizes in BUILT.items()
        for size in sizes
        for each in cuda_many.configs(*size, "bf16", form=form)
    ),
    *(cuda_many.source(each) for each in cuda_many.configs(64, 2048, 512, "fp16", form=Form(2, True))),
    *(cuda_many.once_source(256, "bf16", block) for block in (32, 96)),
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
