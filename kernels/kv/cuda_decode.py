"""Paged decode attention in CUDA C++ (decode.cu): tokens in the rows of the product, tensor copies, one launch.

Why beside the Triton kernel: there the query rows are padded to 16 and the converted values pass through shared memory;
here a cached byte goes from shared memory to a register, is converted, and is multiplied. The source says how.

One launch on as many blocks as there are SMs, whatever the lengths: the blocks find their shares from seq_lens on the
device, so a captured graph may replay with other lengths. The workspace holds partial results and counters per
(sequence, kv head), which the kernel leaves at zero. Two launches must not share a workspace at the same time.

Forms: "fp8" and "q8_0" multiply in half as the Triton kernel does; "16bit" multiplies in the cache's own dtype.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kernels import cuda, cuda_driver
from kernels.common import Candidate, CudaSource, Needs, Tensors, Work, Workload
from kernels.kv import format as kv_format
from kernels.kv.cost import cost
from kernels.kv.format import KV_OF_PRECISION
from kernels.kv.plan import LOG2_E

MAX_GROUP = 8  # query heads per kv head: the columns of the product
MAX_BATCH = 512  # MAX_BATCH in decode.cu
MAX_HEADS = 128  # MAX_HEADS in decode.cu
MAX_BLOCKS = 160  # MAX_PARTS in decode.cu: an item's parts, one a team at most
# What a second item costs a block, in units of 16 KB. kv-batch-sawtooth's rows of the form before show 6 to 7, which
# loses where 8 to 40 are level (trials on an H200, 8192 tokens x 32): an even cut has costs of its own.
SECOND_ITEM = 12
CAPPED_BELOW = (
    400  # units: where a block's range is shorter, 96 KB of bulk copies are in flight and not all of the ring
)
PRODUCERS = 4  # PRODUCERS in decode.cu: warps that bring tiles
LEAST_BUSY = 0.95  # of the blocks: a team may be as wide as this allows
SHARED_BYTES = 232_448  # all that an sm_90 block can have; one block per SM

# Which instantiation of decode.cu serves (form, D); d<D>, w<warps>, t<tiles per unit>, p<buffers per warp>.
KERNELS = {
    ("fp8", 256): "kv_fp8_d256_w8_t2_p3",
    ("fp8", 128): "kv_fp8_d128_w8_t4_p3",
    ("q8_0", 256): "kv_q8_0_d256_w8_t2_p2",
    ("q8_0", 128): "kv_q8_0_d128_w8_t2_p5",
    ("bf16", 256): "kv_bf16_d256_w8_t2_p3",
    ("bf16", 128): "kv_bf16_d128_w8_t2_p3",
    ("fp16", 256): "kv_fp16_d256_w8_t2_p3",
    ("fp16", 128): "kv_fp16_d128_w8_t2_p3",
}

CUDA_SOURCES = (
    CudaSource(
        path=Path(__file__).with_name("decode.cu"),
        kernels=tuple(KERNELS.values()),
        capability=(9, 0),
        architecture="sm_90a",
        shared_bytes=SHARED_BYTES,
        options=("--std=c++17",),
    ),
)
CHAINED = replace(CUDA_SOURCES[0], options=(*CUDA_SOURCES[0].options, "-DPDL=1"))


@dataclass(frozen=True)
class DecodeConfig:
    """A launch: the kernel's name, its blocks (one per SM) and threads per block, and how the work is cut.

    width: kv heads that neighbouring blocks walk side by side, a divisor of Hkv; second: units that a second item in a
    block's range is taken to cost when the device chooses between an even cut and one at the items' ends; capped_below:
    units of a block's range below which the bulk copies in flight are capped.
    """

    kernel: str
    blocks: int
    threads: int
    width: int
    second: int = SECOND_ITEM
    capped_below: int = CAPPED_BELOW

    def __str__(self) -> str:
        cut = f"width={self.width} second_item={self.second} capped_below={self.capped_below}"
        return f"{self.kernel} blocks={self.blocks} threads={self.threads} {cut} tiles=swizzled"


def choose_config(form: str, dim: int, kv_heads: int, sms: int = 132) -> DecodeConfig:
    """The launch for a form of KERNELS ("fp8", "q8_0", "bf16", "fp16") and head dimension; 132 SMs are an H200's."""
    name = KERNELS.get((form, dim))
    if name is None:
        raise ValueError(f"{form=}, D={dim}: compiled for {sorted(KERNELS)}; use the Triton kernel for other shapes")
    return config_of(name, kv_heads, sms)


def config_of(kernel: str, kv_heads: int, sms: int) -> DecodeConfig:
    """The launch of an instantiation, its warps read off its name; the widest team that leaves few blocks idle."""
    warps = next(int(part[1:]) for part in kernel.split("_") if part[0] == "w" and part[1:].isdigit())
    divisors = [w for w in range(1, min(kv_heads, sms) + 1) if kv_heads % w == 0]
    width = max(w for w in divisors if w == 1 or sms // w * w >= LEAST_BUSY * sms)
    return DecodeConfig(kernel, sms, 32 * (warps + PRODUCERS), width)


def refusal(batch: int, q_heads: int, kv_heads: int, dim: int, page: int) -> str:
    """ "" or why the kernel does not take these shapes."""
    if kv_heads < 1 or q_heads % kv_heads:
        return f"Hq={q_heads} must be a multiple of Hkv={kv_heads}; repeat kv heads or regroup the queries"
    if q_heads // kv_heads > MAX_GROUP:
        return f"Hq/Hkv={q_heads // kv_heads} exceeds the product's {MAX_GROUP} columns; use the Triton kernel"
    if dim not in (128, 256):
        return f"D={dim} must be 128 or 256; use the Triton kernel"
    if kv_heads > MAX_HEADS:
        return f"Hkv={kv_heads} exceeds {MAX_HEADS}, whose scales stay in shared memory; use the Triton kernel"
    if page < 16 or page & (page - 1):
        return f"page={page} must be a power of two of at least 16: a copy brings 16 tokens"
    if not 1 <= batch <= MAX_BATCH:
        return f"batch={batch} must be 1 to {MAX_BATCH}: the lengths' prefix sums stay in shared memory"
    return ""


def workspace(batch: int, q_heads: int, kv_heads: int, dim: int, blocks: int, device: torch.device) -> Tensors:
    """Room for two partial results per block, and zeroed counters per (sequence, kv head)."""
    return {
        "part": torch.empty(2 * blocks, q_heads // kv_heads, dim, dtype=torch.float16, device=device),
        "part_ml": torch.empty(2 * blocks, MAX_GROUP, 4, dtype=torch.float32, device=device),
        "arrived": torch.zeros(batch * kv_heads, dtype=torch.int32, device=device),
    }


@functools.cache
def _sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def prepare(inputs: Tensors, kv: str) -> Tensors:
    """Convert the 16-bit master cache to the form `kv` and allocate the workspace; q is not copied.

    inputs: as in `cases.inputs`, with k_scale and v_scale where the workload brings fp8 scales along. ValueError for
    shapes that `refusal` names, or tensors that are not contiguous.
    """
    q, master = inputs["q"], inputs["k_cache"]
    batch, q_heads, dim = q.shape
    _, kv_heads, page, _ = master.shape
    if reason := refusal(batch, q_heads, kv_heads, dim, page):
        raise ValueError(reason)
    args = {name: inputs[name] for name in ("q", "page_table", "seq_lens")}
    if not all(t.is_contiguous() for t in (*args.values(), master, inputs["v_cache"])):
        raise ValueError("q, caches, page_table and seq_lens must be contiguous; call .contiguous() once at load")
    for name in ("k", "v"):
        cache = inputs[f"{name}_cache"]
        if kv == "fp8":
            args[name], args[f"{name}_scale"] = kv_format.quantise_fp8(cache, scale=inputs.get(f"{name}_scale"))
        elif kv == "q8_0":
            args[name], args[f"{name}_scale"] = kv_format.quantise_q8_0(cache)
        else:
            args[name], args[f"{name}_scale"] = cache, inputs["seq_lens"]  # the scale is not read
    blocks = _sms(master.device.index or 0) if master.is_cuda else 132
    return args | workspace(batch, q_heads, kv_heads, dim, blocks, master.device)


def run(args: Tensors, out: Tensors, kv: str, config: DecodeConfig | None = None, chained: bool = False) -> None:
    """out["o"] [batch, Hq, D] from prepared args, in one launch; `config`: another than `choose_config`'s.

    chained: a programmatic launch, behind a kernel that writes of all this the queries and the newest tokens at most.
    """
    q, k, o = args["q"], args["k"], out["o"]
    batch, q_heads, dim = q.shape
    _, kv_heads, page, _ = k.shape
    device = q.device.index or 0
    form = kv if kv != "16bit" else "bf16" if k.dtype == torch.bfloat16 else "fp16"
    config = config or choose_config(form, dim, kv_heads, _sms(device))
    blocks = args["part"].shape[0] // 2
    if blocks < config.blocks or args["arrived"].numel() < batch * kv_heads:
        raise ValueError(f"the workspace is for {blocks} blocks, not for {config.blocks}; prepare again")
    pointers = [q, args["k_scale"], args["v_scale"], args["page_table"], args["seq_lens"], o]
    pointers += [args["part"], args["part_ml"], args["arrived"]]
    scales = [args["k_scale"], args["v_scale"]] if kv == "q8_0" else []
    if any(t.data_ptr() % 16 for t in (q, k, args["v"], o, *scales)):
        raise ValueError("q, k, v, their scales and o must start on 16 bytes for the copies; clone() the view")
    row_bytes = dim * k.element_size()
    maps = [
        cuda_driver.line_map(x.data_ptr(), x.numel() // dim, row_bytes, tile_tokens(row_bytes)) for x in (k, args["v"])
    ]
    numbers: list[Any] = [
        *cut_numbers(config, batch, kv_heads),
        batch,
        kv_heads,
        q_heads // kv_heads,
        (page // 16).bit_length() - 1,
        args["page_table"].shape[1],
    ]
    scale = cuda.f32(dim**-0.5 * LOG2_E)
    zero = cuda.i32(0)
    arguments = [*maps, *pointers, *map(cuda.i32, numbers), scale, cuda.i32(q.dtype == torch.bfloat16), zero]
    loaded = cuda.load(CHAINED if chained else CUDA_SOURCES[0], config.kernel, device, SHARED_BYTES)
    cuda.launch(loaded, (config.blocks,), config.threads, arguments, SHARED_BYTES, programmatic=chained)


def tiles(kernel: str) -> int:
    """Tiles of a unit, off the name of an instantiation."""
    return next(int(part[1:]) for part in kernel.split("_") if part[0] == "t" and part[1:].isdigit())


def tile_tokens(row_bytes: int) -> int:
    """Tokens that one copy brings: `TOKENS` in decode.cu."""
    return 8 if row_bytes > 256 else 16


def cut_numbers(config: DecodeConfig, batch: int, kv_heads: int) -> tuple[int, int, int, int, int, int]:
    """width, rows, teams, per_item, second and capped_below of decode.cu's Problem.

    ValueError when width does not divide Hkv, or there are more blocks than a merge takes parts.
    """
    if kv_heads % config.width or config.blocks < config.width:
        raise ValueError(f"width={config.width} must divide Hkv={kv_heads} and fit into {config.blocks} blocks")
    if config.blocks > MAX_BLOCKS:
        raise ValueError(f"blocks={config.blocks} exceeds {MAX_BLOCKS}, the parts that a merge takes; launch fewer")
    rows, teams = kv_heads // config.width, config.blocks // config.width
    return config.width, rows, teams, teams // (batch * rows), config.second, config.capped_below


def refuses(workload: Workload) -> str:
    """ "" or why the kernel does not take the workload."""
    return refusal(*(workload[axis] for axis in ("batch", "Hq", "Hkv", "D", "page")))


def config_text(workload: Workload, kv: str) -> str:
    """The launch of a workload on an H200, as rows store it; "" where the kernel refuses it."""
    if refuses(workload):
        return ""
    return str(choose_config(workload["dtype"] if kv == "16bit" else kv, workload["D"], workload["Hkv"]))


@dataclass(frozen=True)
class Cut:
    """What `partition` of decode_scheduler.cuh makes of sequences of one length.

    units: of the longest range; items: (sequence, kv head) that a range touches at most; parts: of an item at most.
    """

    units: int
    items: int
    parts: int


@functools.cache
def cut(config: DecodeConfig, batch: int, kv_heads: int, units: int) -> Cut:
    """The ranges of a launch; units: of a sequence."""
    warps = config.threads // 32 - PRODUCERS
    _, rows, teams, per_item, second, _ = cut_numbers(config, batch, kv_heads)
    total = rows * batch * units
    even = total // teams
    own = units // per_item if per_item else 0
    if own >= warps and own + (own * per_item < units) <= even + (even * teams < total) + second:
        return Cut(-(-units // per_item), 1, per_item)
    if even < warps:
        teams = min(teams, -(-total // warps))
    share, longer = divmod(total, teams)
    starts = [i * share + min(i, longer) for i in range(teams + 1)]
    touched = [(first // units, -(-last // units)) for first, last in pairwise(starts)]
    ends = Counter(item for first, last in touched for item in {first, last - 1})
    return Cut(share + (longer > 0), max(last - first for first, last in touched), max(ends.values()))


def work(workload: Workload, sms: int, precision: str) -> Work:
    """The busiest block's range: its bytes, its busiest warp's units, its ends of items, and the merge of what was cut.

    Behind an item the warps' states are summed up, in rounds over D, and the next one's queries are waited for: nobody
    multiplies, and in a short range nobody copies either. Where an item was cut, its last block waits for the others'
    parts and reads them all.
    """
    batch, heads, group, dim = workload["batch"], workload["Hkv"], workload["Hq"] // workload["Hkv"], workload["D"]
    kv = KV_OF_PRECISION[precision]
    config = choose_config(workload["dtype"] if kv == "16bit" else kv, dim, heads, sms)
    need, row_bytes = cost(workload, precision).bytes, dim * (2 if kv == "16bit" else 1)
    unit, warps = tile_tokens(row_bytes) * tiles(config.kernel), config.threads // 32 - PRODUCERS
    made = cut(config, batch, heads, -(-workload["ctx"] // unit))
    products = -(-made.units // warps) * unit * dim / 4
    at_once = {"bytes": need, "sm_bytes": 2.0 * made.units * unit * row_bytes, "products": products}
    merge = 3000.0 + made.parts * group * dim / 32 if made.parts > 1 else 0.0
    return Work(at_once, {"launches": 1.0, "merge": merge, "ends": made.items * (1500.0 + 8 * dim)})


def _candidate(name: str, precision: str, chained: bool = False) -> Candidate:
    kv = KV_OF_PRECISION[precision]
    return Candidate(
        name=name + "_chained" * chained,
        precision=precision,
        run=partial(run, kv=kv, chained=True) if chained else partial(run, kv=kv),
        needs=Needs(capability=(9, 0), packages=("cupy",)),
        prepare=partial(prepare, kv=kv),
        refuses=refuses,
        config=partial(config_text, kv=kv),
        work=partial(work, precision=precision),
        no_route="for the place in a step behind a kernel that appends the tokens" if chained else "",
    )


CANDIDATES = tuple(
    _candidate(name, precision, chained)
    for chained in (False, True)
    for name, precision in (("cuda_bf16", "bf16"), ("cuda_fp8", "fp8-kv"), ("cuda_q8_0", "q8_0-kv"))
)
