"""FlashInfer's paged decode: bf16 and fp8 caches, through its wrapper with the tensor-core kernel (backend fa2).

    pip install flashinfer-python        (flashinfer-jit-cache adds the kernels built ahead)

Its "HND" layout is this family's own, [pages, Hkv, page, D]: the bf16 cache is used where it stands. The page table
becomes its compressed form, the ids of all sequences one after the other with row pointers. `plan` runs in `prepare`,
as an engine plans once a step for all layers; `run` writes into a given output, allocates nothing and is safe in a
CUDA graph. The plan belongs to one problem, so each set of inputs has its wrapper and its workspace of 128 MiB.

fp8: FlashInfer takes one scale for K and one for V, applies K's to the logits and multiplies o by V's in a kernel of
its own after the attention. So the adapter stores e4m3 with scale 1, an engine's default when nothing was calibrated,
and no such kernel runs. That is another quantisation than this family's scale per head, hence the precision
"fp8-kv-unit", with its own reference inputs. A workload's scale for the whole tensor is not used for the same reason.

With an unpacked copy instead of an installed package: its folder on PYTHONPATH, FLASHINFER_DISABLE_VERSION_CHECK=1,
and FLASHINFER_WORKSPACE_BASE where it may write. Kernels not built ahead are compiled at first use, for which it needs
nvcc and ninja; FLASHINFER_CUDA_ARCH_LIST=9.0a names the architecture there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kernels.common import Candidate, Needs, Tensors, Workload, library_version
from kernels.kv import format as kv_format
from kernels.kv.peers import measured_only

WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends


def compressed_pages(table: torch.Tensor, seq_lens: torch.Tensor, page: int) -> tuple[torch.Tensor, ...]:
    """(indptr [batch + 1], page ids in order [indptr[-1]], tokens in the last page [batch]), all int32.

    table [batch, max_pages] int32, entries past a sequence's last page ignored; seq_lens [batch], each at least 1.
    """
    pages = (seq_lens + page - 1) // page
    owned = torch.arange(table.shape[1], device=table.device)[None, :] < pages[:, None]
    indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0))
    last = seq_lens - (pages - 1) * page
    return indptr.to(torch.int32), table[owned].contiguous(), last.to(torch.int32)


def unit_scale(cache: torch.Tensor) -> torch.Tensor:
    """The cache as float8_e4m3fn with scale 1; magnitudes above 448 saturate."""
    ones = torch.ones(cache.shape[1], dtype=torch.float32, device=cache.device)
    return kv_format.quantise_fp8(cache, scale=ones)[0].view(torch.float8_e4m3fn)


def prepare(inputs: Tensors, fp8: bool) -> dict[str, Any]:
    """q and the cache in FlashInfer's form, and a wrapper planned for this problem."""
    import flashinfer

    q = inputs["q"]
    _, heads, dim = q.shape
    _, kv_heads, page, _ = inputs["k_cache"].shape
    k, v = (unit_scale(inputs[name]) if fp8 else inputs[name] for name in ("k_cache", "v_cache"))
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=k.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True, backend="fa2")
    wrapper.plan(
        *compressed_pages(inputs["page_table"], inputs["seq_lens"], page), heads, kv_heads, dim, page,
        pos_encoding_mode="NONE", q_data_type=q.dtype, kv_data_type=k.dtype, o_data_type=q.dtype,
    )  # fmt: skip
    return {"q": q, "k": k, "v": v, "wrapper": wrapper}


def run(args: dict[str, Any], out: Tensors) -> None:
    args["wrapper"].run(args["q"], (args["k"], args["v"]), out=out["o"])


def _config(workload: Workload, text: str) -> str:
    return f"flashinfer-python {library_version('flashinfer-python')} decode, fa2 on tensor cores, {text}"


_NEEDS = Needs(capability=(8, 0), packages=("flashinfer",))

CANDIDATES = (
    Candidate(
        name="flashinfer_bf16",
        precision="bf16",
        run=run,
        needs=_NEEDS,
        prepare=partial(prepare, fp8=False),
        refuses=measured_only,
        config=partial(_config, text="bf16 cache"),
    ),
    Candidate(
        name="flashinfer_fp8",
        precision="fp8-kv-unit",
        run=run,
        needs=_NEEDS,
        prepare=partial(prepare, fp8=True),
        refuses=measured_only,
        config=partial(_config, text="e4m3 cache with scale 1"),
    ),
)
