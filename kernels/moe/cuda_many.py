"""A mixture's experts for many tokens in CUDA C++: router, two grouped products on wgmma, weighted sum; four launches.

router.cu (MANY) chooses and lays rows out by expert; experts_many.cu multiplies them, first with gate and up (it
gathers the tokens' rows itself, and ends in SiLU), then with down; weighted_sum.cu adds a token's rows in the order of
its choice. What an expert gives lies in between as fp16, 11 bits where bf16 has 8: beyond 65504 it would be infinite.
Nothing is asked of the host. Weights are gemm_tiles.py's tiles; the shared expert is one expert more.
"""

from __future__ import annotations

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
from kernels.nvfp4 import gemm_tiles, hopper
from kernels.nvfp4.hopper import SHARED_BYTES, SMS

SOURCE, SUM_SOURCE = (Path(__file__).with_name(name) for name in ("experts_many.cu", "weighted_sum.cu"))
TOKENS_MAX = 16384  # the router's blocks wait for each other: all of them must run at once
ROUTER_TOKENS, HALF_ROWS, SLICE, THREADS, SUM_THREADS = 32, 128, 32, 384, 256
STAGES_MAX = 10


@dataclass(frozen=True)
class ManyConfig:
    """A compiled experts_many.cu: dtype of x and h; `gated` the first product; weight rows by k; rows of a block."""

    dtype: str
    gated: bool
    rows: int
    k: int
    block_tokens: int

    @property
    def kernel(self) -> str:
        which = "up" if self.gated else "down"
        return f"moe_many_{which}_{self.dtype}_n{self.rows}_k{self.k}_b{self.block_tokens}"

    @property
    def out_bytes(self) -> int:
        return 2 * SLICE * (2 * (HALF_ROWS // 2 if self.gated else HALF_ROWS) + 16)

    @property
    def stages(self) -> int:
        each = 128 * self.block_tokens + 2 * gemm_tiles.K_BLOCK_BYTES + 16
        return min(STAGES_MAX, (SHARED_BYTES - self.out_bytes) // each)

    @property
    def shared_bytes(self) -> int:
        each = 128 * self.block_tokens + 2 * gemm_tiles.K_BLOCK_BYTES + 16
        return self.out_bytes + self.stages * each

    @property
    def part_floats(self) -> int:
        """Of a CTA that leaves sums of a tile to another."""
        return 2 * HALF_ROWS * -(-self.block_tokens // 64) * min(64, self.block_tokens)

    @property
    def tiles(self) -> int:
        """Of 256 weight rows, for a block."""
        return -(-self.rows // (2 * HALF_ROWS))


def block_tokens(tokens: int, top_k: int, experts: int) -> int:
    """Rows of a block: an expert's mean and two and a half standard deviations, where routing is even."""
    mean = tokens * top_k / experts
    return next((block for block in (32, 64) if mean + 2.5 * mean**0.5 <= block), 96)


def configs(block: int, width: int, inner: int, dtype: str) -> tuple[ManyConfig, ManyConfig]:
    """Of both products."""
    return ManyConfig(dtype, True, 2 * inner, width, block), ManyConfig(dtype, False, width, inner, block)


@functools.cache
def source(config: ManyConfig) -> CudaSource:
    """The translation unit of a product."""
    macros = {
        "X_BF16": int(config.dtype == "bf16"), "GATED": int(config.gated), "ROWS": config.rows, "K": config.k,
        "BLOCK_M": config.block_tokens, "STAGES": config.stages,
    }  # fmt: skip
    return hopper.source(SOURCE, config.kernel, config.shared_bytes, macros)


@functools.cache
def router_source(experts: int, dtype: str, block: int) -> CudaSource:
    """router.cu for many tokens."""
    macros = {"X_BF16": int(dtype == "bf16"), "EXPERTS": experts, "BLOCK_TOKENS": block, "MANY": 1}
    name = f"moe_router_many_{dtype}_e{experts}_b{block}"
    return hopper.source(cuda_experts.ROUTER_SOURCE, name, cuda_experts.router_shared_bytes(experts), macros)


@functools.cache
def sum_source(width: int, dtype: str) -> CudaSource:
    """weighted_sum.cu."""
    return hopper.source(SUM_SOURCE, f"moe_sum_{dtype}_h{width}", 0, {"X_BF16": int(dtype == "bf16"), "WIDTH": width})


def most_blocks(tokens: int, top_k: int, experts: int, shared: bool, block: int) -> int:
    """As many blocks as any choice may need."""
    pairs = tokens * top_k
    return pairs // block + min(experts, pairs) + shared * -(-tokens // block)


def prepare(inputs: Tensors) -> dict[str, Any]:
    """The weights of every expert in gemm_tiles.py's layout, the shared one behind the others, and scratch for x."""
    x, experts = inputs["x"], inputs["down_packed"].shape[0]
    (tokens, width), inner, device = x.shape, 2 * inputs["down_packed"].shape[2], inputs["down_packed"].device
    made: dict[str, list[torch.Tensor]] = {"up": [], "down": [], "up_scale": [], "down_scale": []}
    for prefix in ("", "shared_")[: 1 + ("shared_gate" in inputs)]:
        for name, stored, parts in cuda_experts.padded(inputs, prefix, inner):
            made[name] += [gemm_tiles.tile_weights(p, s, x.dtype) for p, s in zip(*parts, strict=True)]
            made[f"{name}_scale"].append(inputs[f"{prefix}{stored}_tensor_scale"])
    kept: dict[str, Any] = {name: torch.stack(made[name]) for name in ("up", "down")}
    kept |= {f"{name}_scale": torch.cat(made[f"{name}_scale"]) for name in ("up", "down")}
    kept |= {key: inputs[key] for key in ("shared_gate",) if key in inputs}
    shared, top_k = "shared_gate" in inputs, int(inputs["top_k"])
    pairs = tokens * (top_k + shared)
    block = block_tokens(tokens, top_k, experts)
    up, down = configs(block, width, inner, hopper.ELEMENTS.get(x.dtype, ""))
    workers = hopper.multiprocessors(device.index or 0) if device.type == "cuda" else SMS

    def zeros(*size: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(*size, dtype=kind, device=device)

    return kept | {
        "k": zeros(top_k, kind=torch.uint8), "pairs": zeros(pairs, 2), "rows": zeros(pairs, 2), "back": zeros(pairs),
        "masks": zeros((2 * -(-tokens // ROUTER_TOKENS) + 1) * experts), "state": zeros(4),
        "blocks": zeros(most_blocks(tokens, top_k, experts, shared, block), 2), "flags": zeros(2 * workers),
        "h": zeros(pairs, inner, kind=x.dtype), "given": zeros(pairs, width, kind=torch.float16),
        "parts": zeros(workers * max(up.part_floats, down.part_floats), kind=torch.float32),
    }  # fmt: skip


def run(args: dict[str, Any], out: Tensors) -> None:
    """y in four launches. ValueError on a mismatch."""
    x, logits, y, h = args["x"], args["logits"], out["y"], args["h"]
    element, (tokens, width) = hopper.ELEMENTS.get(x.dtype, ""), x.shape
    if not element or not x.is_contiguous() or x.data_ptr() % 16 or not logits.is_contiguous():
        raise ValueError(f"x is {x.dtype} with strides {x.stride()}; pass contiguous bf16 or fp16 x on 16 bytes")
    top_k, experts, shared = len(args["k"]), logits.shape[1], "shared_gate" in args
    chosen = top_k + shared
    if len(h) != tokens * chosen or logits.shape[0] != tokens or y.shape != x.shape:
        raise ValueError(f"x {tuple(x.shape)} and scratch for {len(h)} rows: prepare for {tokens} tokens")
    device, block, inner = x.device.index or 0, block_tokens(tokens, top_k, experts), h.shape[1]
    router, warps = router_source(experts, element, block), cuda_experts.router_warps(experts)
    gate = args["shared_gate"] if shared else cuda.i64(0)
    lists = [args[name] for name in ("rows", "blocks", "state")]
    cuda.launch(
        cuda.load(router, router.kernels[0], device), (-(-tokens // ROUTER_TOKENS),), 32 * warps,
        (logits, x, gate, args["pairs"], args["masks"], *lists, *map(cuda.i32, (tokens, width, top_k, 0)),
         args["back"]), cuda_experts.router_shared_bytes(experts),
    )  # fmt: skip
    between = (args["parts"], args["flags"])
    for config, given, name, made in zip(
        configs(block, width, inner, element), (x, h), ("up", "down"), (h, args["given"]), strict=True
    ):
        cuda.launch(
            cuda.load(source(config), config.kernel, device, SHARED_BYTES), (len(args["flags"]) // 2,), THREADS,
            (given, args[name], args[f"{name}_scale"], *lists, made, *between), config.shared_bytes, programmatic=True,
        )  # fmt: skip
    adder = sum_source(width, element)
    cuda.launch(
        cuda.load(adder, adder.kernels[0], device), (tokens,), SUM_THREADS,
        (args["given"], args["pairs"], args["back"], y, cuda.i32(chosen)), 0, programmatic=True,
    )  # fmt: skip


def _refuses(workload: Workload) -> str:
    tokens, experts, top_k, width, inner, shared = (
        workload[axis] for axis in ("T", "experts", "top_k", "H", "F", "shared")
    )
    if tokens > TOKENS_MAX:
        return f"T={tokens} > {TOKENS_MAX}: the router's blocks would not all run at once; call it by parts"
    if experts > EXPERTS_MAX or top_k > TOP_K_MAX:
        return f"experts={experts}, top_k={top_k}: the router holds {EXPERTS_MAX} and {TOP_K_MAX}; use triton_experts"
    if width % 16 or inner % 16:
        return f"H={width}, F={inner}: both must be multiples of 16, a scale group"
    return f"shared={shared} > F={inner}: run the shared expert as a linear of kernels/nvfp4" * (shared > inner)


def work(workload: Workload, sms: int) -> Work:
    """Stages a multiprocessor, by what decoding and products of as many columns as a block needs take."""
    up, down = _of(workload)
    sizes = block_sizes(workload, up.block_tokens)
    per_block = sum(config.tiles * gemm_tiles.k_blocks_of(config.k) for config in (up, down))
    stages = sum(count for _, count in sizes) * per_block / sms
    columns = sum(count * -(-rows // SLICE) * SLICE for rows, count in sizes) * per_block / sms
    rows = workload["T"] * (workload["top_k"] + (workload["shared"] > 0))
    between = rows * (4.0 * workload["F"] + 4.0 * workload["H"])  # h and what experts give, written and read
    at_once = {
        "bytes": cost(workload, PRECISION).bytes + between, "decode": 300.0 * stages, "products": 8.0 * columns,
        "sm_bytes": 2.0 * gemm_tiles.K_BLOCK_BYTES * stages + 128.0 * columns,
    }  # fmt: skip
    return Work(at_once, {"launches": 4.0, "ends": 4000.0})


def _of(workload: Workload) -> tuple[ManyConfig, ManyConfig]:
    tokens, top_k, experts, width, inner = (workload[axis] for axis in ("T", "top_k", "experts", "H", "F"))
    return configs(block_tokens(tokens, top_k, experts), width, inner, workload["dtype"])


CUDA_SOURCES = (
    *(source(c) for block in (32, 64, 96) for c in configs(block, 2048, 512, "bf16")),
    *(source(c) for c in configs(96, 2816, 704, "bf16")),
    *(source(c) for c in configs(64, 2048, 512, "fp16")),
    *(router_source(256, "bf16", block) for block in (32, 96)),
    sum_source(2048, "bf16"),
)

CANDIDATES = (
    Candidate(
        "cuda_experts_many", PRECISION, run, Needs(capability=(9, 0), packages=("cupy",)), prepare=prepare,
        refuses=_refuses, config=lambda w: " ".join(f"{c.kernel}_s{c.stages}" for c in _of(w)),
        work=work, no_route="not measured on a device yet",
    ),
)  # fmt: skip
