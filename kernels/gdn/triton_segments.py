"""The pipeline of triton_split with its scan split along time: segments give their maps, which are joined.

The portable form of segments.py, and what tells the CUDA form's mathematics in forty lines:

    map      a program carries columns of B (from zero, or the first segment's from the initial state) or of A (from the
             identity, no values) through a segment: the scan without what its outputs need
    compose  S_{i+1} = A_i S_i + B_i in three tf32 products, about float32: a tile of columns through all segments
    scan     triton_split's, every segment from its own state, as if it were a sequence

A is kept transposed, [in, out], so that what `compose` reads is contiguous. Given up: the first segment is walked
twice, and final states are copied from the scan's, one a segment.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.common import Build, Candidate, Needs, Tensors, Workload
from kernels.gdn import segments, triton_split
from kernels.gdn.launch import INTERPRETER, capability, current_capability
from kernels.gdn.tiles import as_format, inverse_norm, matmul, matmul_add

ROW = tl.constexpr(segments.ROW)
SMS = 132
COMPOSE_WARPS = 8  # with four the products spill


@triton.jit
def map_kernel(
    k, w, u, running, starts, transitions, mapped,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, C: tl.constexpr, V_TILE: tl.constexpr,
    L2_NORM: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Grid (2 D / V_TILE, HV, segments that are not their sequence's last). mapped: their rows (segments.rows).

    Writes B [D, D] of segment i to starts [segments, HV, D, D] at i + 1 (the state itself where i is the first, read at
    i) and A^T to transitions of that shape at i.
    """
    head = tl.program_id(1)
    mapped += tl.program_id(2) * ROW
    first = tl.load(mapped).to(tl.int64)
    tokens = tl.load(mapped + 1)
    number = tl.load(mapped + 4).to(tl.int64)
    leads = tl.load(mapped + 5)
    row = tl.arange(0, C)
    dk = tl.arange(0, D)
    if leads != 0 and tl.program_id(0) * V_TILE >= D:
        return
    column = tl.program_id(0) * V_TILE + tl.arange(0, V_TILE)  # of B, then of A
    of_values, dv = column < D, column % D
    k += first * HK * D + (head // (HV // HK)) * D
    running += first * HV + head
    base = (first * HV + head) * D
    at_state = dk[None, :] * D + dv[:, None]  # of S^T [V_TILE, D]
    starts += (number * HV + head) * D * D
    if leads != 0:
        state = tl.load(starts + at_state)
    else:
        state = tl.where(column[:, None] == D + dk[None, :], 1.0, 0.0)
    for start in range(0, tokens, C):
        t = start + row
        live = t < tokens
        w_tile = tl.load(w + base + t[:, None] * (HV * D) + dk[None, :], mask=live[:, None], other=0.0)
        at_v = t[None, :] * (HV * D) + dv[:, None]
        u_tile = tl.load(u + base + at_v, mask=live[None, :] & of_values[:, None], other=0.0).to(tl.float32)
        k_tile = tl.load(k + t[:, None] * (HK * D) + dk[None, :], mask=live[:, None], other=0.0)
        g = tl.load(running + tl.minimum(t, tokens - 1) * HV)
        total = tl.load(running + (tl.minimum(start + C, tokens) - 1) * HV)
        update = u_tile - matmul(state, tl.trans(w_tile), PRECISION, INTERPRETED)
        # The scan reads what it wrote in the operands' type: so does this, to the bit.
        update = as_format(update, w.dtype.element_ty, INTERPRETED).to(tl.float32)
        fading = tl.exp(total - g) * inverse_norm(k_tile, L2_NORM)
        state = matmul_add(update * fading[None, :], k_tile, state * tl.exp(total), PRECISION, INTERPRETED)
    if tl.program_id(0) * V_TILE < D:
        tl.store(starts + HV * D * D + at_state, state)
    else:
        tl.store(transitions + (number * HV + head) * D * D + dv[:, None] * D + dk[None, :], state)


@triton.jit
def compose_kernel(starts, transitions, firsts, HV: tl.constexpr, D: tl.constexpr, V_TILE: tl.constexpr):
    """Grid (D / V_TILE, HV, sequences). firsts [sequences + 1]: each one's first segment. B in starts becomes S."""
    dk = tl.arange(0, D)
    dv = tl.program_id(0) * V_TILE + tl.arange(0, V_TILE)
    at_state = dk[None, :] * D + dv[:, None]
    last = tl.load(firsts + tl.program_id(2) + 1) - 1
    i = tl.minimum(tl.load(firsts + tl.program_id(2)) + 1, last)
    at = (i.to(tl.int64) * HV + tl.program_id(1)) * D * D
    state = tl.load(starts + at + at_state)
    while i < last:
        transition = tl.load(transitions + at + dk[:, None] * D + dk[None, :])
        at += HV * D * D
        state = tl.dot(state, transition, acc=tl.load(starts + at + at_state), input_precision="tf32x3")
        tl.store(starts + at + at_state, state)
        i += 1


def prepare(inputs: Tensors, precision: str, chunks: int = 0) -> dict[str, Any]:
    """The args of triton_split.run with `scan`. chunks: of a segment, 0 for what segments.make takes.

    In the interpreter that is 1: its problems have a few chunks.
    """
    args: dict[str, Any] = triton_split.prepare(inputs, precision)
    bounds, device, heads_v = args["cu_seqlens"].tolist(), args["cu_seqlens"].device, inputs["v"].shape[-2]
    plan = segments.make(bounds, heads_v, SMS)
    chosen = 1 if capability(device) == INTERPRETER else plan.chunks if plan else max(segments.chunks_of(bounds))
    rows = segments.rows(bounds, chunks or chosen)
    firsts = [row[4] for row in rows if row[5]]
    state = (len(rows), heads_v, *inputs["initial_state"].shape[-2:])

    def table(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return args | {
        "cu_seqlens": table([*(row[0] for row in rows), bounds[-1]]),
        "chunk_offsets": table([row[2] for row in rows]),
        "mapped": table([row for row in rows if not row[6]]).view(-1, segments.ROW),
        "firsts": table([*firsts, len(rows)]),
        "first_rows": table(firsts).long(),
        "last_rows": table([row[4] for row in rows if row[6]]).long(),
        "starts": torch.empty(state, dtype=torch.float32, device=device),
        "transitions": torch.empty(state, dtype=torch.float32, device=device),
    }


def scan(args: Tensors, out: Tensors, config: triton_split.SplitConfig, keywords: dict[str, Any]) -> None:
    """h, v_new and final states, as triton_split.run takes them from its fourth launch."""
    starts, transitions, mapped, dim = args["starts"], args["transitions"], args["mapped"], keywords["D"]
    starts.index_copy_(0, args["first_rows"], args["initial_state"].float())
    if mapped.numel():
        map_kernel[(2 * dim // config.scan_tile, keywords["HV"], mapped.shape[0])](
            args["k"], args["w"], args["u"], args["running"], starts, transitions, mapped,
            **keywords, V_TILE=config.scan_tile, num_warps=config.warps, num_stages=config.scan_stages,
        )  # fmt: skip
        compose_kernel[(dim // 16, keywords["HV"], args["firsts"].numel() - 1)](
            starts, transitions, args["firsts"], HV=keywords["HV"], D=dim, V_TILE=16, num_warps=COMPOSE_WARPS
        )
    triton_split.launch_scan(args, config, starts, transitions, keywords)  # the maps are used up: finals go there
    out["final_state"].copy_(transitions.index_select(0, args["last_rows"]))


def describe(workload: Workload) -> str:
    """The split of a dense batch, after that of the pipeline."""
    config = triton_split.config_for(current_capability(), workload["D"], "bf16")
    bounds = [i * workload["T"] for i in range(workload["batch"] + 1)]
    return f"bf16 operands, {config}, {segments.make(bounds, workload['Hv'], SMS) or 'one segment'}"


def _builds(cc: int) -> tuple[Build, ...]:
    """The two kernels at Hk = 2, Hv = 8, D = 128 with bf16 activations."""
    config = triton_split.config_for(divmod(cc, 10), 128, "bf16")
    types = dict.fromkeys(("k", "w", "u"), "*bf16") | dict.fromkeys(("mapped", "firsts"), "*i32")
    types |= dict.fromkeys(("running", "starts", "transitions"), "*fp32")
    values: dict[str, Any] = {
        "HK": 2, "HV": 8, "D": 128, "C": config.chunk, "L2_NORM": True, "PRECISION": "bf16", "INTERPRETED": False,
    }  # fmt: skip

    def build(kernel: Any, v_tile: int, warps: int, load_stages: int) -> Build:
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        return Build(
            label=f"segments {kernel.__name__} bf16 C{config.chunk} D128",
            kernel=kernel,
            signature=signature,
            constexprs={n: (values | {"V_TILE": v_tile})[n] for n in signature if signature[n] == "constexpr"},
            num_warps=warps,
            num_stages=load_stages,
            aligned=tuple(n for n, kind in signature.items() if kind.startswith("*")),
        )

    scan = build(map_kernel, config.scan_tile, config.warps, config.scan_stages)
    return scan, build(compose_kernel, 16, COMPOSE_WARPS, 3)


CANDIDATES = (
    Candidate(
        name="split_segments",
        precision="bf16",
        run=lambda args, out: triton_split.run(args, out, "bf16", scan),
        needs=Needs(triton="3.6"),
        prepare=lambda inputs: prepare(inputs, "bf16"),
        refuses=triton_split.refuses,
        builds=_builds,
        config=describe,
        no_route="not measured on any device yet",
    ),
)
