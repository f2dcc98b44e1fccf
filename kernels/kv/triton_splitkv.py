"""Split-KV paged decode attention (flash-decoding, Dao et al. 2023) in Triton, one kernel for all three cache forms.

Grid (batch, Hkv, splits). A program owns one kv head of one sequence and a range of its tokens. It puts all
G = Hq / Hkv query heads of that kv head in the rows of one matrix product (padded to 16), so a cached byte is read
once for all of them. It walks its tokens through the page table with an online softmax in float32 and leaves
(m, l, acc) in a workspace; `merge_kernel` weighs the splits together. With one split the output is written directly.

Numerics. e4m3 and int8 are exact in fp16, so the quantised forms multiply in fp16: q is scaled to [1, 2) by a power of
two per row (exact for bf16, except that elements 2^-14 below the row's largest lose bits), the probabilities keep 11
bits instead of bf16's 8, and every scale that is constant over a row (softmax, fp8, the power of two) is applied to the
float32 logits or to the final sum, never to an element. Q8_0's scales vary along D, so they are applied to the
elements, in half. The 16-bit form multiplies in the cache's own dtype.

e4m3 to fp16 has two routes: `cvt` where the hardware has it (8.9 and later), and everywhere three bit operations: sign
and magnitude moved into a half's fields give the value times 2^-8, subnormals included, and 2^8 joins the scale.

In Triton's interpreter bf16 operands are widened to float32 (`tl.dot` on bf16 is garbage there) and a bf16 store is
rounded by hand (it truncates there), so a CPU check sees the rounding a GPU would do, except that of P to bf16.

Given up here, and where the next step lies (NOTES.md): query rows are padded to 16; Q8_0's scales cost a multiply per
element; equal splits leave ragged batches unbalanced.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.common import Build, Candidate, Needs, Tensors, Work, Workload, interpreted
from kernels.kv import format as kv_format
from kernels.kv.cost import cost
from kernels.kv.format import KV_OF_PRECISION
from kernels.kv.plan import LOG2_E, SplitPlan, split_plan, tile

MERGE_CHUNK = 8  # splits per step of the merge: 8 x 256 float32 stay in registers


@triton.jit
def _round_to_bf16(x):
    """float32 rounded to nearest-even at bf16's 8 bits, still float32: the interpreter's own cast truncates."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _store(pointer, x, mask, INTERPRETED: tl.constexpr):
    if INTERPRETED and pointer.dtype.element_ty == tl.bfloat16:
        x = _round_to_bf16(x)
    tl.store(pointer, x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _tiles_per_split(seq_len, SPLITS: tl.constexpr, BLOCK_T: tl.constexpr):
    return tl.cdiv(tl.cdiv(seq_len, BLOCK_T), SPLITS)


@triton.jit
def _load_tile(
    plane, scale, row, live, KV: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, NATIVE_FP8: tl.constexpr
):  # fmt: skip
    """[BLOCK_T, D] operand of the tokens at `row`; rows that are not live are zero, so a stale page cannot leak."""
    d = tl.arange(0, D)
    x = tl.load(plane + row[:, None] * D + d[None, :], mask=live[:, None], other=0)
    if KV == "fp8":
        if NATIVE_FP8:
            x = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            bits = x.to(tl.uint16)
            x = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    if KV == "q8_0":
        GROUPS: tl.constexpr = D // 32
        group = tl.arange(0, GROUPS)
        s = tl.load(scale + row[:, None] * GROUPS + group[None, :], mask=live[:, None], other=0)
        x = tl.reshape(x.to(tl.float16), (BLOCK_T, GROUPS, 32)) * s[:, :, None]
        x = tl.reshape(x, (BLOCK_T, D))
    return x


@triton.jit
def splitkv_kernel(
    q,  # [batch, HKV * G, D]
    k,  # [pages, HKV, PAGE, D] 16-bit, uint8 (e4m3) or int8 (Q8_0); v alike
    v,
    k_scale,  # [HKV] float32 (fp8), [pages, HKV, PAGE, D / 32] half (Q8_0), not read for 16-bit; v_scale alike
    v_scale,
    page_table,  # [batch, max_pages] int32
    seq_lens,  # [batch] int32
    part_acc,  # [batch, HKV * G, SPLITS, D] float32, not read or written when SPLITS == 1
    part_m,  # [batch, HKV * G, SPLITS] float32, logits in base 2
    part_l,  # [batch, HKV * G, SPLITS] float32
    o,  # [batch, HKV * G, D], written when SPLITS == 1
    max_pages,
    logit_scale,  # D^-1/2 log2(e)
    HKV: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,  # G padded to a power of two of at least 16
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,
    KV: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    b = tl.program_id(0)
    h = tl.program_id(1)
    part = tl.program_id(2)
    seq_len = tl.load(seq_lens + b)
    span = _tiles_per_split(seq_len, SPLITS, BLOCK_T) * BLOCK_T
    begin = part * span
    end = tl.minimum(begin + span, seq_len)
    if SPLITS > 1:
        if begin >= end:
            return  # the merge derives the number of live parts from seq_lens and does not look at this one

    row = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    head = (b * HKV + h) * G + row
    is_head = row < G
    x = tl.load(q + head[:, None].to(tl.int64) * D + d[None, :], mask=is_head[:, None], other=0.0)
    row_scale = tl.zeros((ROWS,), tl.float32) + logit_scale
    out_scale = 1.0
    if KV == "16bit":
        query = x.to(tl.float32) if INTERPRETED else x
    else:
        # Divide each row by 2^e, e the exponent of its largest element: the exponent field alone, so no rounding.
        x = x.to(tl.float32)
        exponent = (tl.max(tl.abs(x), axis=1).to(tl.int32, bitcast=True) >> 23) & 0xFF
        query = (x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]).to(tl.float16)
        row_scale *= (exponent << 23).to(tl.float32, bitcast=True)
    if KV == "fp8":
        bias = 1.0 if NATIVE_FP8 else 256.0
        row_scale *= tl.load(k_scale + h) * bias
        out_scale = tl.load(v_scale + h) * bias

    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)  # noqa: E741 (the online softmax's usual name)
    acc = tl.zeros((ROWS, D), tl.float32)
    table = page_table + b.to(tl.int64) * max_pages
    # Page ids are loaded one step ahead and carried: were they loaded where they are used, every K and V load would
    # hang on a load of its own iteration, and Triton's pipeliner would keep one buffer whatever num_stages says.
    token = begin + tl.arange(0, BLOCK_T)
    page = tl.load(table + token // PAGE, mask=token < end, other=0).to(tl.int64)
    for _ in range(begin, end, BLOCK_T):
        live = token < end
        slot = (page * HKV + h) * PAGE + token % PAGE
        tile = _load_tile(k, k_scale, slot, live, KV, D, BLOCK_T, NATIVE_FP8).to(query.dtype)
        logits = tl.dot(query, tl.trans(tile), out_dtype=tl.float32) * row_scale[:, None]
        logits = tl.where(live[None, :], logits, float("-inf"))
        m_new = tl.maximum(m, tl.max(logits, axis=1))
        decay = tl.exp2(m - m_new)
        p = tl.exp2(logits - m_new[:, None])
        l = l * decay + tl.sum(p, axis=1)  # noqa: E741
        tile = _load_tile(v, v_scale, slot, live, KV, D, BLOCK_T, NATIVE_FP8).to(query.dtype)
        acc = tl.dot(p.to(query.dtype), tile, acc * decay[:, None], out_dtype=tl.float32)
        m = m_new
        token += BLOCK_T
        page = tl.load(table + token // PAGE, mask=token < end, other=0).to(tl.int64)

    if SPLITS == 1:
        norm = out_scale / tl.where(l > 0.0, l, 1.0)  # an empty sequence gives zeros
        _store(o + head[:, None].to(tl.int64) * D + d[None, :], acc * norm[:, None], is_head[:, None], INTERPRETED)
    else:
        slot = head.to(tl.int64) * SPLITS + part
        tl.store(part_acc + slot[:, None] * D + d[None, :], acc * out_scale, mask=is_head[:, None])
        tl.store(part_m + slot, m, mask=is_head)
        tl.store(part_l + slot, l, mask=is_head)


@triton.jit
def merge_kernel(
    part_acc,  # [batch, HQ, SPLITS, D] float32; part_m, part_l [batch, HQ, SPLITS]
    part_m,
    part_l,
    seq_lens,  # [batch] int32
    o,  # [batch, HQ, D]
    HQ: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """o = sum_s 2^(m_s - m) acc_s / sum_s 2^(m_s - m) l_s over the parts that hold tokens. Grid (batch, HQ)."""
    b = tl.program_id(0)
    base = (b * HQ + tl.program_id(1)).to(tl.int64)
    seq_len = tl.load(seq_lens + b)
    per_part = tl.maximum(_tiles_per_split(seq_len, SPLITS, BLOCK_T), 1)
    parts = tl.cdiv(tl.cdiv(seq_len, BLOCK_T), per_part)

    s = tl.arange(0, SPLITS_PADDED)
    m_all = tl.load(part_m + base * SPLITS + s, mask=s < parts, other=float("-inf"))
    l_all = tl.load(part_l + base * SPLITS + s, mask=s < parts, other=0.0)
    m = tl.max(m_all, axis=0)
    m = tl.where(parts > 0, m, 0.0)
    total = tl.sum(l_all * tl.exp2(m_all - m), axis=0)

    d = tl.arange(0, D)
    acc = tl.zeros((D,), tl.float32)
    for first in range(0, parts, CHUNK):
        c = first + tl.arange(0, CHUNK)
        weight = tl.exp2(tl.load(part_m + base * SPLITS + c, mask=c < parts, other=float("-inf")) - m)
        rows = tl.load(part_acc + (base * SPLITS + c)[:, None] * D + d[None, :], mask=(c < parts)[:, None], other=0.0)
        acc += tl.sum(rows * weight[:, None], axis=0)
    _store(o + base * D + d, acc / tl.where(total > 0.0, total, 1.0), d < D, INTERPRETED)


@cache
def _device_capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def plan_for(args: Tensors, kv: str) -> SplitPlan:
    """The launch choice for these tensors, from shapes and the device alone. On the CPU it is an H200's."""
    q, table = args["q"], args["page_table"]
    _, kv_heads, page, dim = args["k"].shape
    capability = _device_capability(table.device.index or 0) if table.is_cuda else 90
    return split_plan(q.shape[0], kv_heads, table.shape[1] * page, dim, kv, capability)


def with_workspace(args: Tensors, plan: SplitPlan) -> Tensors:
    """args plus the workspace that `plan` needs: 4 (D + 2) bytes per (sequence, query head, part)."""
    batch, heads, dim = args["q"].shape
    parts, device = plan.splits, args["page_table"].device
    return args | {
        "part_acc": torch.empty(batch, heads, parts, dim, dtype=torch.float32, device=device),
        "part_m": torch.empty(batch, heads, parts, dtype=torch.float32, device=device),
        "part_l": torch.empty(batch, heads, parts, dtype=torch.float32, device=device),
    }


def prepare(inputs: Tensors, kv: str) -> Tensors:
    """Convert the 16-bit master cache to the candidate's form and allocate the workspace. q is not copied.

    inputs: as in `cases.inputs`, with k_scale and v_scale where the workload brings fp8 scales along. ValueError from
    `check_axes` or `format`.
    """
    _, kv_heads, page, dim = inputs["k_cache"].shape
    check_axes(inputs["q"].shape[1], kv_heads, dim, page)
    args = {name: inputs[name] for name in ("q", "page_table", "seq_lens")}
    if not all(t.is_contiguous() for t in (*args.values(), inputs["k_cache"], inputs["v_cache"])):
        raise ValueError("q, caches, page_table and seq_lens must be contiguous; call .contiguous() once at load")
    for name in ("k", "v"):
        master = inputs[f"{name}_cache"]
        if kv == "fp8":
            args[name], args[f"{name}_scale"] = kv_format.quantise_fp8(master, scale=inputs.get(f"{name}_scale"))
        elif kv == "q8_0":
            args[name], args[f"{name}_scale"] = kv_format.quantise_q8_0(master)
        else:
            args[name], args[f"{name}_scale"] = master, inputs["seq_lens"]  # the scale is not read
    return with_workspace(args, plan_for(args, kv))


def check_axes(q_heads: int, kv_heads: int, dim: int, page: int) -> None:
    """ValueError, with the values and the remedy, for shapes the kernel does not take."""
    reason = refusal(q_heads, kv_heads, dim, page)
    if reason:
        raise ValueError(reason)


def refusal(q_heads: int, kv_heads: int, dim: int, page: int) -> str:
    """ "" or why the kernel does not take these shapes."""
    if kv_heads < 1 or q_heads % kv_heads:
        return f"Hq={q_heads} must be a multiple of Hkv={kv_heads}; repeat kv heads or regroup the queries"
    if dim not in (32, 64, 128, 256):
        return f"D={dim} must be 32, 64, 128 or 256 (a power of two for tl.arange); pad the head dimension with zeros"
    if q_heads // kv_heads > 64:
        return f"Hq/Hkv={q_heads // kv_heads} exceeds 64 query rows per program; split the queries into groups"
    if page < 1:
        return f"page={page} must be at least 1 token"
    return ""


def launch(args: Tensors, out: Tensors, kv: str, plan: SplitPlan) -> None:
    """Launch the two kernels (one when plan.splits is 1). args must hold the workspace of the same plan."""
    q, k = args["q"], args["k"]
    batch, heads, dim = q.shape
    _, kv_heads, page, _ = k.shape
    if args["part_m"].shape[-1] != plan.splits:
        raise ValueError(
            f"workspace holds {args['part_m'].shape[-1]} parts, the plan has {plan.splits}; call with_workspace again"
        )
    group = heads // kv_heads
    splitkv_kernel[(batch, kv_heads, plan.splits)](
        q, k, args["v"], args["k_scale"], args["v_scale"], args["page_table"], args["seq_lens"],
        args["part_acc"], args["part_m"], args["part_l"], out["o"],
        args["page_table"].shape[1], dim**-0.5 * LOG2_E,
        HKV=kv_heads, G=group, ROWS=max(16, triton.next_power_of_2(group)), D=dim, PAGE=page,
        BLOCK_T=plan.block_t, SPLITS=plan.splits, KV=kv, NATIVE_FP8=plan.native_fp8, INTERPRETED=interpreted(),
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
    if plan.splits > 1:
        merge_kernel[(batch, heads)](
            args["part_acc"], args["part_m"], args["part_l"], args["seq_lens"], out["o"],
            HQ=heads, D=dim, BLOCK_T=plan.block_t, SPLITS=plan.splits,
            SPLITS_PADDED=triton.next_power_of_2(plan.splits), CHUNK=MERGE_CHUNK, INTERPRETED=interpreted(),
            num_warps=4,
        )  # fmt: skip


def run(args: Tensors, out: Tensors, kv: str) -> None:
    """out["o"] [batch, Hq, D] from prepared args. Allocates nothing and does not synchronise."""
    launch(args, out, kv, plan_for(args, kv))


def _refuses(workload: Workload) -> str:
    return refusal(workload["Hq"], workload["Hkv"], workload["D"], workload["page"])


def _config(workload: Workload, kv: str) -> str:
    pages = -(-workload["ctx"] // workload["page"])
    return str(split_plan(workload["batch"], workload["Hkv"], pages * workload["page"], workload["D"], kv))


def resident(kv: str, dim: int, kv_heads: int) -> int:
    """Programs that share a multiprocessor, as compiled by Triton 3.6 for sm_90: three up to 168 registers a thread.

    fp8 at D = 256 takes 186, and 145 where there is one kv head and addresses need less.
    """
    return 2 if kv == "fp8" and dim > 128 and kv_heads > 1 else tile(dim, kv).blocks_per_sm


def work(workload: Workload, sms: int, precision: str) -> Work:
    """Waves of programs by the tiles that each walks, of which those side by side delay each other, and the merge.

    The merge's programs go over the parts MERGE_CHUNK at a time: each time a trip to L2, and rows to add up over warps.
    """
    pages, dim, kv = -(-workload["ctx"] // workload["page"]), workload["D"], KV_OF_PRECISION[precision]
    batch, heads, queries = workload["batch"], workload["Hkv"], workload["Hq"]
    plan = split_plan(batch, heads, pages * workload["page"], dim, kv, sms=sms)
    walked = triton.cdiv(triton.cdiv(workload["ctx"], plan.block_t), plan.splits)
    parts = triton.cdiv(triton.cdiv(workload["ctx"], plan.block_t), walked)
    beside = resident(kv, dim, heads)
    waves, rest = divmod(batch * heads * parts, sms * beside)
    steps = walked * (waves * (1500 + 1000 * beside) + (1500 + 1000 * -(-rest // sms) if rest else 0))
    merge, passed = 0.0, 0.0
    if parts > 1:
        trips, each = triton.cdiv(parts, MERGE_CHUNK), batch * queries / sms
        merge, passed = trips * (200.0 + 4 * dim) + each * (200 + parts * dim / 16), 8.0 * batch * queries * parts * dim
    at_once = {"bytes": cost(workload, precision).bytes + passed, "tiles": float(steps)}
    start = 1500.0 * (waves + (rest > 0))
    return Work(at_once, {"launches": 1.0 + (plan.splits > 1), "merge": merge, "start": start})


def _builds(capability: int, kv: str) -> tuple[Build, ...]:
    """The kernels as the two model shapes launch them at ctx 8192: batch 8 (several parts) and 128 (one, direct)."""
    data, scale = {"16bit": ("*bf16", "*i32"), "fp8": ("*u8", "*fp32"), "q8_0": ("*i8", "*fp16")}[kv]
    builds = []
    for group, kv_heads, dim, page in ((6, 4, 256, 16), (4, 8, 128, 16)):
        several = split_plan(8, kv_heads, 8192, dim, kv, capability)
        for plan in (several, replace(several, splits=1)):
            pointers = {
                "q": "*bf16", "k": data, "v": data, "k_scale": scale, "v_scale": scale, "page_table": "*i32",
                "seq_lens": "*i32", "part_acc": "*fp32", "part_m": "*fp32", "part_l": "*fp32", "o": "*bf16",
            }  # fmt: skip
            constants: dict[str, Any] = {
                "HKV": kv_heads, "G": group, "ROWS": 16, "D": dim, "PAGE": page, "BLOCK_T": plan.block_t,
                "SPLITS": plan.splits, "KV": kv, "NATIVE_FP8": plan.native_fp8, "INTERPRETED": False,
            }  # fmt: skip
            builds.append(
                Build(
                    label=f"splitkv {kv} d{dim} g{group} {plan}",
                    kernel=splitkv_kernel,
                    signature=pointers
                    | {"max_pages": "i32", "logit_scale": "fp32"}
                    | dict.fromkeys(constants, "constexpr"),
                    constexprs=constants,
                    num_warps=plan.num_warps,
                    num_stages=plan.num_stages,
                    aligned=(*pointers, "max_pages"),
                )
            )
    merge = {
        "HQ": 24, "D": 256, "BLOCK_T": 64, "SPLITS": 64, "SPLITS_PADDED": 64, "CHUNK": MERGE_CHUNK, "INTERPRETED": False
    }  # fmt: skip
    pointers = {"part_acc": "*fp32", "part_m": "*fp32", "part_l": "*fp32", "seq_lens": "*i32", "o": "*bf16"}
    builds.append(
        Build(
            label="merge d256 splits=64",
            kernel=merge_kernel,
            signature=pointers | dict.fromkeys(merge, "constexpr"),
            constexprs=merge,
            aligned=tuple(pointers),
        )
    )
    return tuple(builds)


def _candidate(name: str, precision: str) -> Candidate:
    kv = KV_OF_PRECISION[precision]
    return Candidate(
        name=name,
        precision=precision,
        run=partial(run, kv=kv),
        needs=Needs(triton="3.6"),
        prepare=partial(prepare, kv=kv),
        refuses=_refuses,
        builds=partial(_builds, kv=kv),
        config=partial(_config, kv=kv),
        work=partial(work, precision=precision),
    )


CANDIDATES = (
    _candidate("splitkv_bf16", "bf16"),
    _candidate("splitkv_fp8", "fp8-kv"),
    _candidate("splitkv_q8_0", "q8_0-kv"),
)
