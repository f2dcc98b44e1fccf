"""Workloads of paged decode attention, their inputs, and how exact an answer must be.

One problem, several forms of cache. `inputs` makes the 16-bit master cache; each candidate's `prepare` converts it to
its own form outside the timing. What a quantised candidate must then reproduce is attention over the cache *as it was
quantised*, so the checker asks `reference_inputs(workload, inputs, precision)` for what that precision sees and gives
that to `reference`. For "bf16" it is the master itself. For "fp8-kv" and "q8_0-kv" it is the quantised planes, which
the reference decodes by its own code in float64; nothing is rounded on the way, as a dequantised copy in float32 would
be, and it takes 2 GB at the largest workload where that copy would take 8.6. What quantisation itself costs, against
the unquantised cache, is another question: `format_error`.

Memory at the largest workload (8192 x 128, Hkv * D = 1024): master 4.3 GB (K and V at 2 bytes x 1.07e9 values), fp8
planes 2.1, Q8_0 planes 2.3, SDPA's contiguous copy 4.3, the reference's planes 2.3, float64 temporaries about 1: 16 GB
if everything is alive at once. 32768 x 32 is as large; 32768 x 128 is left out: its master has 17 GB, and two arms, the
control's twin and two sets of inputs each, copies in a library's own order among them, do not fit beside each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels.common import Tensors, Tolerance, Workload, poisoned
from kernels.kv import cost
from kernels.kv import format as kv_format
from kernels.kv.reference import decode, reference

ACTIVATIONS = ("q",)
IN_PLACE: tuple[str, ...] = ()
NORMAL = "standard normal"
OUTLIERS = "outlier channels and a sink"
SPARE_PAGES = 5  # pages of the pool that no sequence owns, so that page ids are not simply 0 .. n-1
OUTLIER_GAIN = 12.0
# The last two are what peers compute in: one e4m3 scale of 1 for everything; q and probabilities in e4m3 as well.
PRECISIONS = ("bf16", "fp8-kv", "q8_0-kv", "fp8-kv-unit", "fp8-qkv")
E4M3_ROUNDING = 0.43 * 2.0**-4  # relative rms of rounding to four significant bits, see `tolerance`
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _workload(
    ctx: int, batch: int, q_heads: int, kv_heads: int, dim: int, page: int = 16, role: str = "check",
    dtype: str = "bf16", inputs: str = NORMAL, lengths: str = "", scales: str = "head",
) -> Workload:  # fmt: skip
    """lengths: "" is "ragged" for a check and "full" for a measurement. An axis at its default is not in the id."""
    name = f"ctx{ctx}_b{batch}_hq{q_heads}_hkv{kv_heads}_d{dim}"
    if role == "check":
        name += f"_p{page}_{dtype}" + ("_outliers" if inputs == OUTLIERS else "")
    elif page != 16:
        name += f"_p{page}"
    name += "_spread" * (lengths == "spread") + "_tensor" * (scales == "tensor")
    axes: dict[str, int | str] = {
        "batch": batch, "ctx": ctx, "Hq": q_heads, "Hkv": kv_heads, "D": dim, "page": page,
        "lengths": lengths or ("ragged" if role == "check" else "full"), "dtype": dtype,
    }  # fmt: skip
    axes |= {"scales": scales} if scales != "head" else {}
    source = "q36-27b.attention" if role == "measure" and dim == 256 else ""
    return Workload(id=name, axes=axes, role=role, inputs=inputs, source=source)


# (ctx, batch) of the measured shapes, for Qwen3.6-27B's heads (24 / 4 / 256) and the common 32 / 8 / 128, which move
# the same bytes. 256 and 1024 are there for the fixed cost of a launch and a merge, 32768 x 1 for the split.
MEASURED = ((256, 1), (256, 128), (1024, 128), (8192, 1), (8192, 8), (8192, 32), (8192, 128), (32768, 1))
BETWEEN = ((256, 8), (256, 32), (1024, 1), (1024, 8), (1024, 32), (32768, 8), (32768, 32))  # the cells left out there
# Batches at 8192 tokens around the sizes at which a kernel that gives each SM whole items needs one more wave, by the
# kv heads that share a sequence: 33 sequences of 4 fill 132 SMs, 16 of 8 nearly.
BATCHES = (2, 4, 16, 24, 31, 33, 34, 40, 48, 64, 65, 66, 67, 96)
BATCHES_8 = (16, 17, 33, 34)
LARGE_PAGES = ((8192, 8), (8192, 32), (8192, 128), (32768, 1))  # once more, in pages of 64 tokens
MODELS = ((24, 4, 256), (32, 8, 128))

CHECKED = (
    # length 1; less than a page; less than a tile; several tiles; many
    _workload(1, 1, 4, 1, 64),
    _workload(1, 3, 6, 1, 128, page=64),
    _workload(17, 2, 6, 1, 64),
    _workload(17, 1, 4, 4, 128, dtype="fp16"),
    _workload(63, 2, 8, 2, 64, page=64),
    _workload(75, 3, 6, 1, 128, inputs=OUTLIERS),
    _workload(75, 1, 1, 1, 64, page=64, dtype="fp16"),
    _workload(130, 2, 4, 4, 64),
    _workload(130, 1, 24, 4, 256),
    _workload(130, 2, 12, 2, 128, page=64, dtype="fp16"),
    _workload(500, 2, 6, 1, 128),
    _workload(500, 1, 8, 2, 128, page=64, inputs=OUTLIERS),
    _workload(500, 2, 6, 1, 256, page=64),
    _workload(150, 3, 8, 4, 128, lengths="spread"),
    _workload(130, 2, 12, 3, 128, scales="tensor"),  # several heads: one alone would have the tensor's scale anyway
)

WORKLOADS = (
    *CHECKED,
    *(_workload(*at, *heads, role="measure") for heads in MODELS for at in (*MEASURED, *BETWEEN)),
    *(_workload(8192, batch, 24, 4, 256, role="measure") for batch in BATCHES),
    *(_workload(8192, batch, 32, 8, 128, role="measure") for batch in BATCHES_8),
    *(_workload(*at, 24, 4, 256, page=64, role="measure") for at in LARGE_PAGES),
    *(_workload(8192, 32, *heads, role="measure", lengths="spread") for heads in MODELS),
    *(_workload(8192, 32, *heads, role="measure", scales="tensor") for heads in MODELS),
    _workload(32768, 1, 24, 4, 256, role="measure", scales="tensor"),
)


def _add_outliers(q: torch.Tensor, caches: dict[str, torch.Tensor], table: torch.Tensor, gen: torch.Generator) -> None:
    """In place: three channels of K and one of V grow by OUTLIER_GAIN, and each sequence's first token becomes a sink.

    Trained caches look like this: a few key channels carry large, constant-sign values, and the first token draws much
    of the attention with a small value vector. The gain is applied to K against a q shrunk in the same channels, so
    the logits keep their spread while the quantisation steps see the outliers.
    """
    heads, dim = caches["k"].shape[1], caches["k"].shape[3]
    group = q.shape[1] // heads
    for h in range(heads):
        big = torch.randperm(dim, generator=gen, device=q.device)[:4]
        caches["k"][:, h, :, big[:3]] = caches["k"][:, h, :, big[:3]].abs() * OUTLIER_GAIN
        q[:, h * group : (h + 1) * group, big[:3]] /= OUTLIER_GAIN
        caches["v"][:, h, :, big[3]] *= OUTLIER_GAIN
        first = table[:, 0].long()
        mean = q[:, h * group : (h + 1) * group].float().mean(dim=1)
        # q . sink / sqrt(D) is about 4 on average over the group: exp(4) times a plain token's weight.
        sink = mean * (4.0 * dim**0.5 / mean.square().sum(dim=-1, keepdim=True))
        caches["k"][first, h, 0] = sink.to(q.dtype)
        caches["v"][first, h, 0] *= 0.1


def inputs(workload: Workload, seed: int, device: torch.device | str) -> Tensors:
    """The problem with its master cache, made on `device`.

    Returns q [batch, Hq, D]; k_cache, v_cache [pages, Hkv, page, D] in the workload's dtype, in a pool with spare
    pages; page_table [batch, max_pages] int32, permuted, -1 past a sequence's last page; seq_lens [batch] int32. Where
    scales = "tensor" also k_scale, v_scale [Hkv] float32, one number for all heads, which fp8 caches are to be made by.
    """
    batch, ctx, q_heads, kv_heads, dim, page = (workload[a] for a in ("batch", "ctx", "Hq", "Hkv", "D", "page"))
    dtype = _DTYPES[workload["dtype"]]
    gen = torch.Generator(device).manual_seed(seed)
    max_pages = -(-ctx // page)
    pool = batch * max_pages + SPARE_PAGES
    q = torch.randn(batch, q_heads, dim, dtype=dtype, device=device, generator=gen)
    shape = (pool, kv_heads, page, dim)
    caches = {name: torch.randn(shape, dtype=dtype, device=device, generator=gen) for name in ("k", "v")}

    seq_lens = torch.full((batch,), ctx, dtype=torch.int32, device=device)
    if workload["lengths"] == "ragged" and batch > 1:
        seq_lens[1:] = torch.randint(1, ctx + 1, (batch - 1,), dtype=torch.int32, device=device, generator=gen)
    if workload["lengths"] == "spread":
        order = torch.randperm(batch, generator=gen, device=device)
        seq_lens = torch.tensor(cost.lengths(workload), dtype=torch.int32, device=device)[order].contiguous()
    ids = torch.randperm(pool, generator=gen, device=device)[: batch * max_pages].to(torch.int32)
    table = ids.reshape(batch, max_pages)
    if workload.inputs == OUTLIERS:
        _add_outliers(q, caches, table, gen)
    owned = torch.arange(max_pages, device=device)[None, :] * page < seq_lens[:, None]
    table = torch.where(owned, table, -1).to(torch.int32).contiguous()
    given = {"q": q, "k_cache": caches["k"], "v_cache": caches["v"], "page_table": table, "seq_lens": seq_lens}
    if workload.axes.get("scales") == "tensor":
        given |= {f"{name}_scale": kv_format.scale_fp8(cache, per="tensor") for name, cache in caches.items()}
    return given


def activations(workload: Workload, seed: int, device: torch.device | str) -> Tensors:
    """q alone, of the same distribution."""
    if workload.inputs == OUTLIERS:
        return {"q": inputs(workload, seed, device)["q"]}
    gen = torch.Generator(device).manual_seed(seed)
    shape = (workload["batch"], workload["Hq"], workload["D"])
    return {"q": torch.randn(shape, dtype=_DTYPES[workload["dtype"]], device=device, generator=gen)}


def outputs(workload: Workload, inputs: Tensors) -> Tensors:
    """{"o": [batch, Hq, D]} in the workload's dtype, every element NaN."""
    shape = (workload["batch"], workload["Hq"], workload["D"])
    return {"o": poisoned(shape, _DTYPES[workload["dtype"]], inputs["q"].device)}


def reference_inputs(workload: Workload, inputs: Tensors, precision: str) -> Tensors:
    """What a precision sees of the problem: pass it to `reference.reference` to judge candidates of that precision.

    "bf16": `inputs` itself. "fp8-kv": k_cache, v_cache as e4m3 bytes (uint8) with k_scale, v_scale [Hkv] float32, the
    workload's where it brings them.
    "fp8-qkv": the same, q as it is (rounding it is the kernel's doing). "fp8-kv-unit": e4m3 bytes with every scale 1.
    "q8_0-kv": int8 planes with k_scale, v_scale [pages, Hkv, page, D / 32] half. ValueError on another precision.
    """
    if precision == "bf16":
        return inputs
    ones = torch.ones(workload["Hkv"], dtype=torch.float32, device=inputs["q"].device)
    if precision not in PRECISIONS:
        raise ValueError(f"{workload.id}: {precision=} is not known to kv; expected one of {', '.join(PRECISIONS)}")
    seen = dict(inputs)
    for name in ("k", "v"):
        if precision == "q8_0-kv":
            found = kv_format.quantise_q8_0(inputs[f"{name}_cache"])
        else:
            scale = ones if precision == "fp8-kv-unit" else inputs.get(f"{name}_scale")
            found = kv_format.quantise_fp8(inputs[f"{name}_cache"], scale=scale)
        seen[f"{name}_cache"], seen[f"{name}_scale"] = found
    return seen


def _variances(workload: Workload) -> list[float]:
    """Of each sequence's outputs, in units of V's variance: e / n over many tokens of unit normal logits, at most 1."""
    return [min(1.0, math.e / n) for n in cost.lengths(workload)]


def _short_sequence(workload: Workload) -> float:
    """How far one short sequence's rms can stand above the batch's: 1 where all lengths are the same.

    Over n tokens o has variance sum(p^2) of V's: 1 at n = 1, and exp(1) / n at many, where logits are unit normal. A
    ragged batch draws lengths from 1 to ctx; the ratio is largest with one sequence of length 1 and the rest of ctx.
    The lengths of a spread one are known.
    """
    if workload["lengths"] == "spread":
        variances = _variances(workload)
        return (max(variances) * len(variances) / sum(variances)) ** 0.5
    if workload["lengths"] != "ragged":
        return 1.0
    share, longest = 1 / workload["batch"], min(1.0, math.e / workload["ctx"])
    return (share + (1 - share) * longest) ** -0.5


def _heaviest_token(workload: Workload) -> float:
    """What the heaviest token of all adds to an output, in units of rms(o), for unit normal logits and values.

    Of ctx * batch * Hq logits the largest is about L = sqrt(2 ln n) (extreme values of the normal distribution). Its
    probability is e^L / (ctx e^0.5), as e^0.5 is the mean of e^logit; the largest of D values is taken as 3.5; and
    rms(o) is sqrt(sum p^2) = sqrt(e / ctx). Of a spread batch each sequence is asked by itself.
    """
    heads, alike, variances = int(workload["Hq"]), int(workload["batch"]), _variances(workload)
    tokens = {int(workload["ctx"]): alike}
    if workload["lengths"] == "spread":
        tokens = dict.fromkeys(cost.lengths(workload), 1)
    probabilities = [
        min(1.0, math.exp(math.sqrt(2 * math.log(max(2, n * count * heads))) - 0.5) / n) for n, count in tokens.items()
    ]
    return max(probabilities) * 3.5 / math.sqrt(sum(variances) / len(variances))


def tolerance(workload: Workload, precision: str) -> dict[str, Tolerance]:
    """Limits of "o" for one candidate against the reference on `reference_inputs`; ValueError on another precision.

    Rounding to n significant bits leaves a relative rms error of about 0.43 * 2^-n: 1.65e-3 for bf16 (n = 8) and
    2.1e-4 for fp16 (n = 11), averaged over mantissas. It happens to the probabilities, where the errors of the tokens
    are independent and so pass to o undiminished, and in some libraries to the partial results of a split sequence. A
    16-bit cache multiplies in its own dtype, a quantised one in fp16, whose partial results are merged once more, and
    Q8_0 also rounds each dequantised K (a logit error, hence relative in p) and V to fp16. "fp8-kv-unit" (a peer)
    dequantises exactly and multiplies in the dtype of q. "fp8-qkv" (a peer) rounds q to e4m3, a logit error of that
    relative size where logits are about unit normal, and the probabilities: 2.7e-2 each (n = 4).
    Limits are 1.3 times the root sum of squares. Outlier workloads get a factor of 2: there one V channel and one token
    carry most of the norm, so a handful of roundings, each up to 2^-8 and not the average over many, make the error.

    What that rejects, with the rounding of o: 3.4e-3 for bf16 and 1.8e-3 for fp8 and Q8_0 caches of normal values. int8
    by blocks of 32 of q, or of a bf16 cache's K or V, is 5.2e-3; a bf16 probability beside a quantised cache 2.3e-3; a
    cache of 4 bits 9e-2, and so it is beside "fp8-qkv", 5e-2. A sequence of one token does not depend on q and K.
    """
    unit = {"bf16": 1.65e-3, "fp16": 2.1e-4}
    own = unit[workload["dtype"]]
    inside = {
        "bf16": [own] * 2,
        "fp8-kv": [unit["fp16"]] * 3,
        "fp8-kv-unit": [own] * 2,
        "fp8-qkv": [E4M3_ROUNDING] * 2,
        "q8_0-kv": [unit["fp16"]] * 5,
    }.get(precision)
    if inside is None:
        raise ValueError(f"{workload.id}: {precision=} is not known to kv; expected one of {', '.join(PRECISIONS)}")
    also = {"q8_0-kv": ", partial results, dequantised K and V", "fp8-qkv": ", q"}.get(precision, ", partial results")
    rss = sum(e**2 for e in inside) ** 0.5
    # The largest element: six sigma of one of usual size. Normal outputs peak at 5.5 rms over 1e6 elements; a V channel
    # grown by OUTLIER_GAIN at 16. Logits are about unit normal, so among many the heaviest token can make a larger one.
    factor, peak = (1.3, 5.5) if workload.inputs == NORMAL else (2.0, 16.0)
    peak = max(peak * _short_sequence(workload), 2 + _heaviest_token(workload) if workload.inputs == NORMAL else 0.0)
    limit = Tolerance(
        relative_error=factor * rss,
        max_error=factor * peak / 5.5 * 6 * rss,
        reason=(
            f"rms rounding of the probabilities{also} ({rss:.2g}, root sum of squares) x {factor:g}; "
            f"largest element: six sigma at {peak:g} rms, x {factor:g}"
        ),
    )
    return {"o": limit}


@dataclass(frozen=True)
class FormatError:
    """What storing the cache in a precision costs, each ||quantised - master|| / ||master||: of K, of V, and of o."""

    k: float
    v: float
    o: float


def format_error(workload: Workload, inputs: Tensors, precision: str) -> FormatError:
    """Quantisation error alone, all in float64: no kernel is involved. 0 for "bf16".

    K and V are compared where the reference decodes them (every slot of the pool), o over all sequences and heads.
    """
    seen = reference_inputs(workload, inputs, precision)

    def relative(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).norm() / b.norm())

    caches = {}
    for name in ("k", "v"):
        # One "sequence" that is the whole pool: [Hkv, pages * page, D], as `decode` takes it.
        flat, planes = (t[f"{name}_cache"].transpose(0, 1).flatten(1, 2) for t in (inputs, seen))
        scale = seen.get(f"{name}_scale")
        if scale is not None and scale.dim() == 4:
            scale = scale.transpose(0, 1).flatten(1, 2)
        caches[name] = relative(decode(planes, scale), flat.double())
    return FormatError(caches["k"], caches["v"], relative(reference(seen)["o"], reference(inputs)["o"]))
