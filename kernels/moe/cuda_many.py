"""A mixture's experts for many tokens in CUDA C++: router, two grouped products on wgmma, weighted sum; four launches.

router_once.cu (router.cu beyond ONCE_TOKENS) chooses and lays rows out by expert; experts_many.cu multiplies them,
first with gate and up (it gathers the tokens' rows itself, and ends in SiLU), then with down; weighted_sum.cu adds a
token's rows in the order of its choice. What an expert gives lies in between as fp16, 11 bits where bf16 has 8: beyond
65504 it would be infinite. Nothing is asked of the host. The weights are cuda_experts' copy, and a stage of them is a
box of a tensor map; the shared expert is one expert more.

W4A8: x, and h behind the first product, are rounded to e4m3 with a scale a row by nvfp4's quantiser (two launches
more), weights become e4m3 in registers (w4a8_tiles.py): twice the matrix rate for 3.4 % rms in each product.
"""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels import cuda
from kernels.common import Candidate, CudaSource, Needs, Tensors, Work, Workload
from kernels.moe import cuda_experts
from kernels.moe.cost import block_sizes, cost
from kernels.moe.cuda_experts import EXPERTS_MAX, PRECISION, TOP_K_MAX
from kernels.nvfp4 import cuda_w4a8, gemm_tiles, hopper, tiles, w4a8_tiles
from kernels.nvfp4.hopper import SHARED_BYTES, SMS

SOURCE, SUM_SOURCE, ROUTER_SOURCE = (
    Path(__file__).with_name(name) for name in ("experts_many.cu", "weighted_sum.cu", "router.cu")
)
TOKENS_MAX = 16384  # the router's blocks wait for each other: all of them must run at once
FEWEST_SMS = 100  # of an H100 or H200, with some to spare
BLOCK_ROWS = 256  # of weights, of a CTA
ROUTER_TOKENS, HALF_ROWS, SLICE, THREADS, SUM_THREADS = 32, 128, 32, 384, 256
STAGES_MAX = 10
BLOCKS = (32, 64, 96)  # rows
ONCE_TOKENS = 2048  # router_once.cu: every block reads the masks of all
STATE_WORDS = 9  # four of router.cu, five more of router_once.cu
PREFETCH_ROWS = 3  # of an expert in the mean, from which on nearly all have some; a guess, measured at 8 and 16
SCRATCH = (
    "pairs", "masks", "rows", "back", "blocks", "state", "flags", "h", "given", "parts", "x_e4m3", "x_rows", "h_e4m3",
    "h_rows",
)  # fmt: skip
F32 = torch.float32
W4A8 = "nvfp4-w4a8"


@dataclass(frozen=True)
class ManyConfig:
    """A compiled experts_many.cu: dtype of x and h; `gated` the first product; weight rows by k; rows of a block.

    even: its blocks stand by their width, and CTAs share what they cost.
    """

    dtype: str
    gated: bool
    rows: int
    k: int
    block_tokens: int
    fp8: bool = False
    even: bool = False

    @property
    def kernel(self) -> str:
        which = "up" if self.gated else "down"
        sizes = f"n{self.rows}_k{self.k}_b{self.block_tokens}" + "_even" * self.even
        return f"moe_many_{which}_{'w4a8_' * self.fp8}{self.dtype}_{sizes}"

    @property
    def prefetches(self) -> bool:
        """Whether it does while the router runs."""
        return self.gated and not self.fp8 and self.block_tokens == BLOCKS[0]

    @property
    def out_bytes(self) -> int:
        return 2 * SLICE * (2 * (HALF_ROWS // 2 if self.gated else HALF_ROWS) + 16)

    @property
    def stage_bytes(self) -> int:
        """Of 64 k, or 128 where fp8, of 256 weight rows and a block; and of its barriers."""
        return 128 * self.block_tokens + 2 * (w4a8_tiles if self.fp8 else gemm_tiles).K_BLOCK_BYTES + 16

    @property
    def stages(self) -> int:
        return min(STAGES_MAX, (SHARED_BYTES - self.out_bytes) // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        return self.out_bytes + self.stages * self.stage_bytes

    @property
    def part_floats(self) -> int:
        """Of a CTA that leaves sums of a tile to another."""
        return 2 * HALF_ROWS * -(-self.block_tokens // 64) * min(64, self.block_tokens)

    @property
    def k_blocks(self) -> int:
        """Stages of a tile."""
        return w4a8_tiles.k_blocks_of(self.k) if self.fp8 else self.k // tiles.COLS

    @property
    def tiles(self) -> int:
        """Of 256 weight rows, for a block."""
        return -(-self.rows // (2 * HALF_ROWS))


def block_tokens(tokens: int, top_k: int, experts: int) -> int:
    """Rows of a block: an expert's mean and two and a half standard deviations, where routing is even."""
    mean = tokens * top_k / experts
    return next((block for block in BLOCKS if mean + 2.5 * mean**0.5 <= block), BLOCKS[-1])


def once(tokens: int, fp8: bool) -> bool:
    """Whether router_once.cu is ahead of so many tokens, not router.cu."""
    return not fp8 and tokens <= ONCE_TOKENS


def configs(
    block: int, width: int, inner: int, dtype: str, fp8: bool = False, even: bool = False
) -> tuple[ManyConfig, ManyConfig]:
    """Of both products, in blocks of so many rows. even: as far as blocks differ in width."""
    even = even and block > BLOCKS[0]
    return (
        ManyConfig(dtype, True, 2 * inner, width, block, fp8, even),
        ManyConfig(dtype, False, width, inner, block, fp8, even),
    )


def products_of(
    tokens: int, experts: int, top_k: int, width: int, inner: int, dtype: str, fp8: bool
) -> tuple[ManyConfig, ManyConfig]:
    """Of so many tokens; what is not by width has no shares by cost."""
    even = once(tokens, fp8)
    return configs(block_tokens(tokens, top_k, experts), width, inner, dtype, fp8, even)


@functools.cache
def source(config: ManyConfig) -> CudaSource:
    """The translation unit of a product."""
    macros = {
        "X_BF16": int(config.dtype == "bf16"), "GATED": int(config.gated), "FP8": int(config.fp8),
        "ROWS": config.rows, "K": config.k, "BLOCK_M": config.block_tokens, "STAGES": config.stages,
    }  # fmt: skip
    macros |= {"EVEN": 1} if config.even else {}
    return hopper.source(SOURCE, config.kernel, config.shared_bytes, macros)


def router_warps(tokens: int, experts: int) -> int:
    """Of a block of 32 tokens: one each as long as so many blocks run at once on the smallest of this architecture."""
    return 32 if tokens <= ROUTER_TOKENS * FEWEST_SMS else cuda_experts.router_warps(experts)


@functools.cache
def router_source(experts: int, dtype: str, block: int, warps: int) -> CudaSource:
    """router.cu for many tokens."""
    macros = {"X_BF16": int(dtype == "bf16"), "EXPERTS": experts, "BLOCK_TOKENS": block, "WARPS": warps}
    name = f"moe_router_many_{dtype}_e{experts}_b{block}_w{warps}"
    return hopper.source(ROUTER_SOURCE, name, router_shared_bytes(experts, warps), macros)


def router_shared_bytes(experts: int, warps: int) -> int:
    """Of router.cu: a word a warp and a flag, one an expert, and 32 tokens' masks, behind which members fit."""
    return 4 * (warps + 1 + experts + 32 * -(-experts // 32))


def once_shared_bytes(experts: int) -> int:
    """Of router_once.cu: counts of so many threads an expert, two words an expert, and a block's masks."""
    columns = -(-experts // 32) * 32
    return 4 * (1024 // columns * columns + 2 * experts + columns + columns // 8)


def box_rows(rows: int) -> int:
    """Rows of an expert in a box of weights: half a tile's where a whole last box would have too many."""
    return BLOCK_ROWS // (1 + -(-rows // (BLOCK_ROWS // 2)) % 2)


@functools.cache
def once_source(experts: int, dtype: str, block: int, by_width: bool = False) -> CudaSource:
    """router_once.cu."""
    macros = {"X_BF16": int(dtype == "bf16"), "EXPERTS": experts, "BLOCK_TOKENS": block}
    macros |= {"BY_WIDTH": 1} if by_width else {}
    name = f"moe_router_once_{'widths_' * by_width}{dtype}_e{experts}_b{block}"
    return hopper.source(cuda_experts.ONCE_SOURCE, name, once_shared_bytes(experts), macros)


@functools.cache
def sum_source(width: int, dtype: str) -> CudaSource:
    """weighted_sum.cu."""
    return hopper.source(SUM_SOURCE, f"moe_sum_{dtype}_h{width}", 0, {"X_BF16": int(dtype == "bf16"), "WIDTH": width})


def most_blocks(tokens: int, top_k: int, experts: int, shared: bool, block: int) -> int:
    """As many blocks as any choice may need."""
    pairs = tokens * top_k
    return pairs // block + min(experts, pairs) + shared * -(-tokens // block)


def _w4a8_weights(inputs: Tensors) -> Tensors:
    """cuda_experts.weights of w4a8_tiles.py, with what sums are multiplied by for each weight row up to 128."""
    inner = 2 * inputs["down_packed"].shape[2]
    made: dict[str, list[torch.Tensor]] = {"up": [], "down": [], "up_scale": [], "down_scale": []}
    for prefix in ("", "shared_")[: 1 + ("shared_gate" in inputs)]:
        for name, stored, parts in cuda_experts.padded(inputs, prefix, inner):
            for packed, scale, of_tensor in zip(*parts, inputs[f"{prefix}{stored}_tensor_scale"], strict=True):
                tiled, powers = w4a8_tiles.tile_weights(packed, scale)
                made[name].append(tiled)
                by_row = torch.nn.functional.pad(powers * of_tensor, (0, -len(powers) % HALF_ROWS))
                made[f"{name}_scale"].append(by_row)
    kept = {name: torch.stack(each) for name, each in made.items()}
    kept |= {key: inputs[key] for key in ("shared_gate",) if key in inputs}
    return kept | {"k": torch.zeros(int(inputs["top_k"]), dtype=torch.uint8, device=inputs["down_packed"].device)}


def prepare(inputs: Tensors, fp8: bool = False) -> Tensors:
    """cuda_experts' weights, or those of W4A8, and scratch for x."""
    tiled = _w4a8_weights(inputs) if fp8 else cuda_experts.weights(inputs, inputs["x"].dtype)
    return tiled | scratch(*cuda_experts.sizes(inputs, whole=not fp8), fp8)


def scratch(
    shape: torch.Size, dtype: torch.dtype, experts: int, top_k: int, inner: int, shared: bool, device: torch.device,
    fp8: bool = False,
) -> Tensors:  # fmt: skip
    """What the launches leave each other, by SCRATCH's names, for x of `shape` or of fewer rows; all zero."""
    tokens, width = shape
    pairs = tokens * (top_k + shared)
    workers = hopper.multiprocessors(device.index or 0) if device.type == "cuda" else SMS
    blocks, sums = 0, 0
    for block in BLOCKS:
        # The most tokens that get blocks of so many rows: fewer rows of narrower blocks may be more of them.
        most = bisect.bisect_right(range(1, tokens + 1), block, key=lambda t: block_tokens(t, top_k, experts))
        blocks = max(blocks, most_blocks(most, top_k, experts, shared, block))
        sums = max(sums, *(c.part_floats for c in configs(block, width, inner, "")))

    def zeros(*size: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(*size, dtype=kind, device=device)

    made: Tensors = {}
    if fp8:
        for name, rows, k in (("x", tokens, width), ("h", pairs, inner)):
            padded_k = w4a8_tiles.k_blocks_of(k) * w4a8_tiles.COLS
            made |= {f"{name}_e4m3": zeros(rows, padded_k, kind=torch.uint8), f"{name}_rows": zeros(rows, kind=F32)}
    return made | {
        "pairs": zeros(pairs, 2), "rows": zeros(pairs, 2), "back": zeros(pairs),
        "masks": zeros((2 * -(-tokens // ROUTER_TOKENS) + 1) * experts), "state": zeros(STATE_WORDS),
        "blocks": zeros(blocks, 2), "flags": zeros(2 * workers),
        "h": zeros(pairs, inner, kind=dtype), "given": zeros(pairs, width, kind=torch.float16),
        "parts": zeros(workers * sums, kind=F32),
    }  # fmt: skip


def run(args: dict[str, Any], out: Tensors, fp8: bool = False) -> None:
    """y in four launches, six where fp8. ValueError on a mismatch."""
    x, logits, y, h = args["x"], args["logits"], out["y"], args["h"]
    element, (tokens, width) = hopper.ELEMENTS.get(x.dtype, ""), x.shape
    if not element or not x.is_contiguous() or x.data_ptr() % 16 or not logits.is_contiguous():
        raise ValueError(f"x is {x.dtype} with strides {x.stride()}; pass contiguous bf16 or fp16 x on 16 bytes")
    top_k, experts, shared = len(args["k"]), logits.shape[1], "shared_gate" in args
    chosen = top_k + shared
    pairs = tokens * chosen
    if len(h) < pairs or logits.shape[0] != tokens or y.shape != x.shape:
        raise ValueError(f"x {tuple(x.shape)} and scratch for {len(h)} rows: prepare for at least {tokens} tokens")
    device, warps = x.device.index or 0, router_warps(tokens, experts)
    products = products_of(tokens, experts, top_k, width, h.shape[1], element, fp8)
    block = products[0].block_tokens
    if once(tokens, fp8):
        router, router_bytes = once_source(experts, element, block, products[0].even), once_shared_bytes(experts)
    else:
        router = router_source(experts, element, block, warps)
        router_bytes = router_shared_bytes(experts, warps)
    gate = args["shared_gate"] if shared else cuda.i64(0)
    lists = [args[name] for name in ("rows", "blocks", "state")]
    cuda.launch(
        cuda.load(router, router.kernels[0], device), (-(-tokens // ROUTER_TOKENS),), 32 * warps,
        (logits, x, gate, args["pairs"], args["masks"], *lists, *map(cuda.i32, (tokens, width, top_k, 0)),
         args["back"]), router_bytes,
    )  # fmt: skip
    for config, given, of, name, made in zip(
        products, (x, h[:pairs]), "xh", ("up", "down"), (h, args["given"]), strict=True
    ):  # fmt: skip
        by_row: Any = cuda.i64(0)
        if fp8:
            by_row = args[f"{of}_rows"]
            cuda_w4a8.quantise({"x": given, "x_e4m3": args[f"{of}_e4m3"][: len(given)], "x_scale": by_row})
        more: tuple[Any, ...] = ()
        if config.prefetches:
            even = tokens * top_k >= PREFETCH_ROWS * experts
            more = cuda.i32(experts), cuda.i32(even * (experts + shared * -(-tokens // block)))
        if not fp8:
            more = *more, tiles.boxes(args[name].flatten(0, 1), box_rows(config.rows) // 16, 1)
        cuda.launch(
            cuda.load(source(config), config.kernel, device, SHARED_BYTES), (len(args["flags"]) // 2,), THREADS,
            (args[f"{of}_e4m3"] if fp8 else given, args[name], args[f"{name}_scale"], *lists, made, args["parts"],
             args["flags"], by_row, *more), config.shared_bytes, programmatic=True,
        )  # fmt: skip
    adder = sum_source(width, element)
    cuda.launch(
        cuda.load(adder, adder.kernels[0], device), (tokens,), SUM_THREADS,
        (args["given"], args["pairs"], args["back"], y, cuda.i32(chosen)), 0, programmatic=True,
    )  # fmt: skip


def refuses(workload: Workload, fp8: bool = False) -> str:
    """Why the launches do not take a workload, "" where they do."""
    tokens, experts, top_k, width, inner, shared = (
        workload[axis] for axis in ("T", "experts", "top_k", "H", "F", "shared")
    )
    if tokens > TOKENS_MAX:
        return f"T={tokens} > {TOKENS_MAX}: the router's blocks would not all run at once; call it by parts"
    if experts > EXPERTS_MAX or top_k > TOP_K_MAX:
        return f"experts={experts}, top_k={top_k}: the router holds {EXPERTS_MAX} and {TOP_K_MAX}; use triton_experts"
    if not fp8 and (said := cuda_experts.odd_sizes(width, inner)):
        return said
    if width % 16 or inner % 16:
        return f"H={width}, F={inner}: both must be multiples of 16, a scale group"
    return f"shared={shared} > F={inner}: run the shared expert as a linear of kernels/nvfp4" * (shared > inner)


def work(workload: Workload, sms: int, fp8: bool = False) -> Work:
    """Stages a multiprocessor, by what decoding and products of as many columns as a block needs take."""
    up, down = _of(workload, fp8)
    sizes = block_sizes(workload, up.block_tokens)
    per_block = sum(config.tiles * config.k_blocks for config in (up, down))
    stages = sum(count for _, count in sizes) * per_block / sms
    columns = sum(count * -(-rows // SLICE) * SLICE for rows, count in sizes) * per_block / sms
    rows = workload["T"] * (workload["top_k"] + (workload["shared"] > 0))
    between = rows * (4.0 * workload["F"] + 4.0 * workload["H"])  # h and what experts give, written and read
    at_once = {
        "bytes": cost(workload, W4A8 if fp8 else PRECISION).bytes + between,
        "decode": 300.0 * stages, "products": 8.0 * columns,
        "sm_bytes": (up.stage_bytes - 128.0 * up.block_tokens) * stages + 128.0 * columns,
    }  # fmt: skip
    return Work(at_once, {"launches": 6.0 if fp8 else 4.0, "ends": 4000.0})


def _of(workload: Workload, fp8: bool = False) -> tuple[ManyConfig, ManyConfig]:
    tokens, experts, top_k, width, inner = (workload[axis] for axis in ("T", "experts", "top_k", "H", "F"))
    inner = inner if fp8 else cuda_experts.padded_inner(inner)
    return products_of(tokens, experts, top_k, width, inner, workload["dtype"], fp8)


def described(workload: Workload, fp8: bool = False) -> str:
    """The products that `run` launches for a workload, boxes of their weights, and whether its router waits once."""
    products = _of(workload, fp8)
    words = [f"{c.kernel}_s{c.stages}" for c in products] + ["router_once"] * once(workload["T"], fp8)
    return " ".join(words + ["boxes of {} and {} rows".format(*(box_rows(c.rows) for c in products))] * (not fp8))


def sources_of(block: int, width: int, inner: int, dtype: str) -> tuple[CudaSource, ...]:
    """Of both W4A16 products in blocks of so many rows, behind router_once.cu."""
    return tuple(source(each) for each in configs(block, width, inner, dtype, even=True))


CUDA_SOURCES = (
    *(each for block in BLOCKS for each in sources_of(block, 2048, 512, "bf16")),
    *sources_of(96, 2816, 704, "bf16"),
    *sources_of(64, 2048, 512, "fp16"),
    *(source(c) for c in configs(96, 2048, 512, "bf16")),  # behind router.cu
    *(source(c) for block in BLOCKS for c in configs(block, 2048, 512, "bf16", fp8=True)),
    *(once_source(256, "bf16", block, block > BLOCKS[0]) for block in BLOCKS),
    *(router_source(256, "bf16", block, 32) for block in (32, 96)),
    sum_source(2048, "bf16"),
)

CANDIDATES = tuple(
    Candidate(
        name, precision, functools.partial(run, fp8=fp8), Needs(capability=(9, 0), packages=("cupy",)),
        prepare=functools.partial(prepare, fp8=fp8), refuses=functools.partial(refuses, fp8=fp8),
        config=functools.partial(described, fp8=fp8), work=functools.partial(work, fp8=fp8),
    )
    for name, precision, fp8 in (
        ("cuda_experts_many", PRECISION, False), ("cuda_experts_many_w4a8", W4A8, True),
    )
)  # fmt: skip
