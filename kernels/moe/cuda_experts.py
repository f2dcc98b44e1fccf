"""A mixture's experts for few tokens in CUDA C++: router_once.cu chooses and sorts, experts.cu multiplies.

Up to 16 tokens experts.cu chooses and sorts too, in one launch. Of more there are two, the second a programmatic one,
so its blocks set up while the first one's sort, and prefetch weights where nearly all experts have tokens. Nothing is
asked of the host. experts.cu says how the work is shared and where sums are added.

Weights are tiles of nvfp4's row_tiles.py (4.5 bits a weight), rows of gate and up alternating in eights: one copy for
this kernel and for cuda_many.py's. The shared expert is one expert more, which has every token. Where it is narrower
than the others it is padded with zeros, and so are all to whole tiles of 64 (`padded_inner`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernels import cuda
from kernels.common import Candidate, CudaSource, Needs, Tensors, Work, Workload
from kernels.moe.cost import block_sizes, cost
from kernels.nvfp4 import hopper, tiles
from kernels.nvfp4.hopper import SHARED_BYTES, SMS
from kernels.nvfp4.row_tiles import tile_weights

SOURCE, ONCE_SOURCE = (Path(__file__).with_name(name) for name in ("experts.cu", "router_once.cu"))
TOKENS_MAX, EXPERTS_MAX, TOP_K_MAX = 128, 1024, 31
WARPS, SLOTS, SUM_STAGES, BARRIER_BYTES = 8, 4, 4, 1024  # as in experts.cu
H_STAGES_MAX = 4  # an h takes a microsecond to come, two items
PRECISION = "nvfp4-w4a16"
ROUTED_MAX, ROUTED_EXPERTS_MAX = 16, 512  # where experts.cu routes for itself
BLOCK_TOKENS = 8  # of its blocks; where a call has no more, each has a warp
FEW_ROWS = 4  # of h in a stage, where a call that routes has as many tokens: so x fits beside
STAGES, PREFETCH = 4, 8
PREFETCH_ROWS = 2  # of an expert in the mean, from which on prefetches pay (cards moe-prefetch and moe-prefetch-64)
WEIGHTS = "up", "down", "up_scale", "down_scale", "shared_gate", "k"  # of what is prepared: cuda_many.py has the same
SCRATCH = ("pairs", "masks", "rows", "blocks", "state", "turns", "banks", "h", "parts", "dealt")
KEPT = ("state", "turns", "banks")  # of it, what a call has of the one before


@dataclass(frozen=True)
class ExpertsConfig:
    """A compiled experts.cu (dtype .. x_rows) and its launch (grid). The macros are explained there.

    width, inner: of the model and of an expert. row_tiles: tiles of 16 rows of y that a CTA adds up; parts: CTAs that
    share them. stages: of weights; h_stages: of h. teams: of math warps. routed: it makes the router's lists itself.
    h_rows: rows of a block that a stage of h has room for, where they are fewer than the block's. prefetch: items that
    each CTA prefetches into L2 while the router runs. most_tokens, x_rows: of a call that it has room for the choice
    and for x of, where it routes itself.
    """

    dtype: str
    width: int
    inner: int
    row_tiles: int
    parts: int
    stages: int
    h_stages: int
    round_items: int
    grid: int
    teams: int = 1
    routed: bool = False
    h_rows: int = 0
    prefetch: int = 0
    most_tokens: int = BLOCK_TOKENS
    x_rows: int = 0

    @property
    def threads(self) -> int:
        return 32 * (WARPS * self.teams + 6)

    @property
    def kernel(self) -> str:
        """The kernel's name, which tells its macros."""
        sizes = {"h": self.width, "f": self.inner, "r": self.row_tiles, "p": self.parts, "teams": self.teams}
        sizes |= {"st": self.stages, "hs": self.h_stages, "i": self.round_items}
        sizes |= {"hr": self.h_rows} if self.h_rows else {}
        sizes |= {"pf": self.prefetch} if self.prefetch else {}
        sizes |= {"t": self.most_tokens, "xs": self.x_rows} if self.routed else {}
        form = "moe_experts" + "_routed" * self.routed
        return "_".join((form, self.dtype, *(f"{name}{size}" for name, size in sizes.items())))

    @property
    def groups(self) -> int:
        """Groups of row tiles of y, which `parts` CTAs each share."""
        return -(-self.width // 16 // self.row_tiles)

    @property
    def stage_bytes(self) -> int:
        up, slot = -(-self.width // tiles.COLS) * tiles.TILE_BYTES, -(-self.inner // tiles.COLS) * tiles.TILE_BYTES
        return _round_up(max(up, SLOTS * slot), 128)

    @property
    def h_stage_bytes(self) -> int:
        return _round_up(SLOTS // self.row_tiles * (self.h_rows or BLOCK_TOKENS) * (2 * self.inner + 16), 128)

    def shared_bytes(self, tokens: int, rows: int, blocks: int) -> int:
        """Barriers, stages, sums, h, sums of y, and both lists: as experts.cu lays them out."""
        sums = SUM_STAGES * WARPS * 512
        fixed = BARRIER_BYTES + self.stages * self.stage_bytes + sums + self.h_stages * self.h_stage_bytes
        fixed += self.x_rows * (2 * self.width + 16)
        return fixed + self.row_tiles * tokens * 64 + 8 * (rows + blocks)

    def blocks(self, tokens: int, top_k: int, experts: int, shared: bool) -> int:
        """As many blocks as any choice may need."""
        pairs = tokens * top_k
        return pairs // BLOCK_TOKENS + min(experts, pairs) + shared * -(-tokens // BLOCK_TOKENS)

    def __str__(self) -> str:
        return f"{self.kernel} grid={self.grid}"


def _round_up(x: int, unit: int) -> int:
    return -(-x // unit) * unit


def choose_config(tokens: int, width: int, inner: int, dtype: str, sms: int = SMS) -> ExpertsConfig:
    """Two teams, or one where a warp has more than four tiles of x: 80 registers would not hold them.

    Without a router's launch where two teams have at most ROUTED_MAX tokens. As many stages of weights, up to STAGES,
    as leave room for two of h. `for_experts` has the last word on the router's launch and on prefetches.
    """
    teams = 2 if width <= 4 * WARPS * tiles.COLS else 1
    row_tiles, parts = row_tiles_of(tokens, width, sms)
    round_items = 24 if tokens <= 4 else 12 if tokens <= 8 else 48
    config = ExpertsConfig(dtype, width, inner, row_tiles, parts, STAGES, 2, round_items, sms, teams)
    if teams == 2 and tokens <= ROUTED_MAX:
        most, few = BLOCK_TOKENS if tokens <= BLOCK_TOKENS else ROUTED_MAX, tokens <= FEW_ROWS
        config = replace(config, routed=True, most_tokens=most)
        config = replace(config, x_rows=FEW_ROWS if few else most, h_rows=FEW_ROWS * few)
    else:
        config = replace(config, prefetch=PREFETCH)
    while config.stages > 2 * teams and _shared_bytes_of(config, tokens) > SHARED_BYTES:
        config = replace(config, stages=config.stages - teams)
    return with_h_stages(config, tokens)


def for_experts(config: ExpertsConfig, experts: int, pairs: int) -> ExpertsConfig:
    """`config`, with a router's launch where it would have less than a thread an expert, and no prefetch of few pairs.

    pairs: of a token and a routed expert.
    """
    if config.routed and experts > ROUTED_EXPERTS_MAX:
        config = replace(config, routed=False, most_tokens=BLOCK_TOKENS, x_rows=0, h_rows=0)
    return config if pairs >= PREFETCH_ROWS * experts else replace(config, prefetch=0)


def row_tiles_of(tokens: int, width: int, sms: int) -> tuple[int, int]:
    """(tiles of rows of y that a CTA adds up, CTAs that share them): more rows a CTA, fewer times h is read.

    From the least that tokens ask for on, the first that keeps nine tenths of `sms` at work, else the one that keeps
    most.
    """
    least = 1 if tokens <= 4 else 2 if tokens <= 32 else 4
    best: tuple[float, int, int] = (0.0, 4, 1)
    for row_tiles in (1, 2, 4):
        groups = -(-width // 16 // row_tiles)
        parts = sms // groups
        busy = min(groups * parts / sms, 0.9)
        if row_tiles >= least and busy > best[0]:
            best = (busy, row_tiles, parts)
    return best[1:]


def with_h_stages(config: ExpertsConfig, tokens: int) -> ExpertsConfig:
    """As many stages of h as there is room for, up to H_STAGES_MAX; a multiple of the teams."""
    room, each = SHARED_BYTES - _shared_bytes_of(replace(config, h_stages=1), tokens), config.teams
    return replace(config, h_stages=max(each, min(H_STAGES_MAX, 1 + room // config.h_stage_bytes) // each * each))


def _shared_bytes_of(config: ExpertsConfig, tokens: int = TOKENS_MAX) -> int:
    """Of the most tokens that a configuration is chosen for, top 8 of 256 and a shared expert."""
    tokens = 8 if tokens <= 8 else config.most_tokens if config.x_rows else TOKENS_MAX
    return config.shared_bytes(tokens, 9 * tokens, config.blocks(tokens, 8, 256, True))


def _pairs(tokens: int, top_k: int, shared: bool) -> int:
    return tokens * (top_k + shared)


def odd_sizes(width: int, inner: int) -> str:
    """Why the weights' layout does not take a layer, "" where it does."""
    if width % tiles.COLS or inner % 16:
        words = f"H must be a multiple of {tiles.COLS}, the k of a tile, F of 16, a scale group; use triton_experts"
        return f"H={width}, F={inner}: {words}"
    return ""


def padded_inner(inner: int) -> int:
    """F rounded up to whole tiles of 64, the k of the second product; what lies past F is zeros."""
    return _round_up(inner, tiles.COLS)


def refuses(tokens: int, experts: int, top_k: int, width: int, inner: int, shared: int, sms: int = SMS) -> str:
    """Why the pair of kernels does not take a layer, "" where it does."""
    if tokens > TOKENS_MAX:
        return f"T={tokens} > {TOKENS_MAX}: a block's sums of y would not fit in shared memory; use triton_experts"
    if experts > EXPERTS_MAX or top_k > TOP_K_MAX:
        return f"experts={experts}, top_k={top_k}: the router holds {EXPERTS_MAX} and {TOP_K_MAX}; use triton_experts"
    if said := odd_sizes(width, inner):
        return said
    if shared > inner:
        return f"shared={shared} > F={inner}: run the shared expert as a linear of kernels/nvfp4"
    config = choose_config(tokens, width, padded_inner(inner), "bf16", sms)
    blocks = config.blocks(tokens, top_k, experts, bool(shared))
    need = config.shared_bytes(tokens, _pairs(tokens, top_k, bool(shared)), blocks)
    if need > SHARED_BYTES or config.groups > sms:
        return f"H={width}, F={inner}: needs {need} bytes of shared memory, {config.groups} CTAs; use triton_experts"
    return ""


def router_warps(experts: int) -> int:
    """Warps of the router's blocks; a warp a token, and in the last block a thread an expert."""
    return max(8, -(-experts // 32))


@functools.cache
def router_source(experts: int, dtype: str) -> CudaSource:
    """router_once.cu for few tokens of so many experts, x of `dtype`."""
    macros = {"X_BF16": int(dtype == "bf16"), "EXPERTS": experts, "BLOCK_TOKENS": BLOCK_TOKENS, "FEW": 1}
    return hopper.source(ONCE_SOURCE, f"moe_router_few_{dtype}_e{experts}", router_shared_bytes(experts), macros)


def router_shared_bytes(experts: int) -> int:
    """Of it: a thread's counts, two words an expert, a block's masks, two sums a warp."""
    warps, words = router_warps(experts), -(-experts // 32)
    return 4 * (warps // words * words * 32 + 2 * experts + warps * words + 2 * words)


@functools.cache
def source(config: ExpertsConfig, experts: int = 0) -> CudaSource:
    """The translation unit of a configuration, with its macros. experts: for one that routes itself or prefetches."""
    macros = {
        "X_BF16": int(config.dtype == "bf16"), "WIDTH": config.width, "INNER": config.inner, "TEAMS": config.teams,
        "ROW_TILES": config.row_tiles, "PARTS": config.parts, "STAGES": config.stages, "H_STAGES": config.h_stages,
        "ROUND_ITEMS": config.round_items,
    }  # fmt: skip
    if config.routed:
        macros |= {"ROUTED": 1, "EXPERTS": experts, "MOST_TOKENS": config.most_tokens, "X_ROWS": config.x_rows}
    if config.h_rows:
        macros["H_ROWS"] = config.h_rows
    if config.prefetch:
        macros |= {"PREFETCH": config.prefetch, "EXPERTS": experts}
    return hopper.source(SOURCE, config.kernel, min(SHARED_BYTES, _shared_bytes_of(config)), macros)


def _tiled(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Tiles [E, row tiles, k tiles, 576] of E matrices, whose rows are multiples of a tile's 16: as one matrix."""
    made = tile_weights(packed.flatten(0, 1), scale.flatten(0, 1), dtype)
    return made.unflatten(0, (len(packed), -1))


def _alternating(x: torch.Tensor, inner: int) -> torch.Tensor:
    """[E, 2 inner, ...] with eight rows of gate, eight of up, from [E, 2 f, ...], f <= inner: rows past f are zero."""
    halves = x.unflatten(1, (2, -1))
    halves = torch.nn.functional.pad(halves, (0, 0, 0, inner - halves.shape[2]))
    return halves.unflatten(2, (-1, 8)).transpose(1, 2).flatten(1, 3).contiguous()


def padded(inputs: Tensors, prefix: str, inner: int) -> tuple[tuple[str, str, tuple[torch.Tensor, torch.Tensor]], ...]:
    """("up", its name in `inputs`, (packed, scale)), "down"'s; rows of gate and up alternate, f is padded to inner."""
    up = tuple(_alternating(inputs[f"{prefix}gate_up_{part}"], inner) for part in ("packed", "scale"))
    packed, scale = (inputs[f"{prefix}down_{part}"] for part in ("packed", "scale"))
    more = inner - 2 * packed.shape[2]
    down = tuple(torch.nn.functional.pad(t, (0, n)) for t, n in ((packed, more // 2), (scale, more // 16)))
    return ("up", "gate_up", (up[0], up[1])), ("down", "down", (down[0], down[1]))


def weights(inputs: Tensors, dtype: torch.dtype) -> Tensors:
    """The weights of every expert as tiles, the shared one behind the others, by WEIGHTS' names, for x of `dtype`."""
    inner = padded_inner(2 * inputs["down_packed"].shape[2])
    made: dict[str, list[torch.Tensor]] = {"up": [], "down": [], "up_scale": [], "down_scale": []}
    for prefix in ("", "shared_")[: 1 + ("shared_gate" in inputs)]:
        for name, stored, parts in padded(inputs, prefix, inner):
            made[name].append(_tiled(*parts, dtype))
            made[f"{name}_scale"].append(inputs[f"{prefix}{stored}_tensor_scale"])
    kept = {name: torch.cat(each) for name, each in made.items()}
    kept |= {key: inputs[key] for key in ("shared_gate",) if key in inputs}
    # Its length: operators pass tensors only.
    return kept | {"k": torch.zeros(int(inputs["top_k"]), dtype=torch.uint8, device=inputs["down_packed"].device)}


def prepare(inputs: Tensors) -> Tensors:
    """The weights as tiles, and scratch for as many tokens as x."""
    return weights(inputs, inputs["x"].dtype) | scratch(*sizes(inputs))


def sizes(inputs: Tensors, whole: bool = True) -> tuple[torch.Size, torch.dtype, int, int, int, bool, torch.device]:
    """What `scratch` is asked for, of inputs with x. whole: an expert's width in whole tiles."""
    experts, _, half = inputs["down_packed"].shape
    x, device = inputs["x"], inputs["down_packed"].device
    inner = padded_inner(2 * half) if whole else 2 * half
    return x.shape, x.dtype, experts, int(inputs["top_k"]), inner, "shared_gate" in inputs, device


def scratch(
    shape: torch.Size, dtype: torch.dtype, experts: int, top_k: int, inner: int, shared: bool, device: torch.device
) -> Tensors:
    """What the two kernels leave each other, by SCRATCH's names, for x of `shape` or of fewer rows; all zero.

    KEPT must be zero before the first call.
    """
    tokens, width = shape
    pairs, blocks, sums, groups = _pairs(tokens, top_k, shared), 0, 1, 0
    for fewer in {min(tokens, each) for each in (4, 8, 32, tokens)}:  # where the configuration changes
        config = configured(fewer, width, inner, hopper.ELEMENTS.get(dtype, ""), device)
        blocks = max(blocks, config.blocks(fewer, top_k, experts, shared))
        groups = max(groups, config.groups)
        sums = max(sums, (config.parts > 1) * config.groups * config.parts * config.row_tiles * fewer * 16)

    def zeros(*size: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(*size, dtype=kind, device=device)

    return {
        "pairs": zeros(pairs, 2), "rows": zeros(pairs, 2),
        "masks": zeros(-(-tokens // router_warps(experts)) * experts),
        "blocks": zeros(blocks, 2), "state": zeros(2 + blocks + groups), "turns": zeros(3),
        "banks": zeros(2 + 2 * (blocks + groups)),
        "h": zeros(pairs, inner, kind=dtype), "parts": zeros(sums, kind=torch.float32),
        "dealt": zeros(tokens, width, kind=dtype),
    }  # fmt: skip


@functools.lru_cache(maxsize=1024)
def configured(tokens: int, width: int, inner: int, dtype: str, device: torch.device) -> ExpertsConfig:
    """`choose_config`'s for the multiprocessors of a device; those of an H200 where it is no GPU."""
    sms = hopper.multiprocessors(device.index or 0) if device.type == "cuda" else SMS
    return choose_config(tokens, width, inner, dtype, sms)


def _route(args: dict[str, Any], gate: Any, dtype: str, counters: int) -> None:
    """The router's launch, which leaves rows, blocks, x dealt, and so many counters at zero."""
    logits, (tokens, width) = args["logits"], args["x"].shape
    experts = logits.shape[1]
    warps, chooser = router_warps(experts), router_source(experts, dtype)
    routers = -(-tokens // warps)
    lists = [args[name] for name in ("pairs", "masks", "rows", "blocks", "state")]
    cuda.launch(
        cuda.load(chooser, chooser.kernels[0], args["x"].device.index or 0),
        (routers + -(-tokens * width // 8 // (32 * warps)),), 32 * warps,
        (logits, args["x"], gate, *lists, *map(cuda.i32, (tokens, width, len(args["k"]), counters)), args["turns"],
         args["dealt"], cuda.i32(routers)), router_shared_bytes(experts),
    )  # fmt: skip


def run(args: dict[str, Any], out: Tensors) -> None:
    """y in one launch up to ROUTED_MAX tokens; else in two: choose and sort, then both products and the weighted sum.

    ValueError on a mismatch.
    """
    x, logits, y, h = args["x"], args["logits"], out["y"], args["h"]
    element, (tokens, width) = hopper.ELEMENTS.get(x.dtype, ""), x.shape
    if not element or not x.is_contiguous() or x.data_ptr() % 16 or not logits.is_contiguous():
        raise ValueError(f"x is {x.dtype} with strides {x.stride()}; pass contiguous bf16 or fp16 x on 16 bytes")
    shared, top_k, experts = "shared_gate" in args, len(args["k"]), logits.shape[1]
    pairs = _pairs(tokens, top_k, shared)
    if len(h) < pairs or logits.shape[0] != tokens or y.shape != x.shape:
        raise ValueError(f"x {tuple(x.shape)} and scratch for {len(h)} rows: prepare for at least {tokens} tokens")
    device = x.device.index or 0
    config = for_experts(configured(tokens, width, h.shape[1], element, x.device), experts, tokens * top_k)
    blocks = config.blocks(tokens, top_k, experts, shared)
    gate = args["shared_gate"] if shared else cuda.i64(0)
    tiled = [args[name] for name in WEIGHTS[:4]]
    if config.routed:
        banks = args["banks"]
        counts = map(cuda.i32, (tokens, pairs, blocks, top_k, (len(banks) - 2) // 2))
        cuda.launch(
            cuda.load(source(config, experts), config.kernel, device, SHARED_BYTES), (config.grid,), config.threads,
            (x, *tiled, logits, gate, banks, h, args["parts"], y, *counts),
            config.shared_bytes(tokens, pairs, blocks),
        )  # fmt: skip
        return
    _route(args, gate, element, blocks + config.groups)
    between = [args[name] for name in ("rows", "blocks", "state")]
    unit = source(config, experts if config.prefetch else 0)
    cuda.launch(
        cuda.load(unit, config.kernel, device, SHARED_BYTES), (config.grid,), config.threads,
        (args["dealt"], *tiled, *between, h, args["parts"], y, *map(cuda.i32, (tokens, pairs, blocks))),
        config.shared_bytes(tokens, pairs, blocks), programmatic=True,
    )  # fmt: skip


def _refuses(workload: Workload) -> str:
    return refuses(*(workload[axis] for axis in ("T", "experts", "top_k", "H", "F", "shared")))


def chosen(workload: Workload, sms: int = SMS) -> ExpertsConfig:
    """What `run` launches for a workload."""
    tokens, width, inner, dtype, experts = (workload[axis] for axis in ("T", "H", "F", "dtype", "experts"))
    config = choose_config(tokens, width, padded_inner(inner), dtype, sms)
    return for_experts(config, experts, tokens * workload["top_k"])


def described(workload: Workload) -> str:
    """What `run` launches for a workload, and whether a router's launch is ahead of it."""
    config = chosen(workload)
    return str(config) if config.routed else f"{config} router_once"


def work(workload: Workload, sms: int) -> Work:
    """Stages of the busiest worker, by what a math warp and the reducer do for each (clocks: NOTES.md)."""
    config = chosen(workload, sms)
    blocks = sum(count for _, count in block_sizes(workload, BLOCK_TOKENS))
    items = math.ceil(blocks * config.inner / 8 / sms)
    turns = math.ceil(math.ceil(blocks / config.parts) / (SLOTS // config.row_tiles))
    of_tile = 4 * (50.0 + 95)
    clocks = {"math": of_tile * (items + turns) / config.teams, "reduce": 200.0 * items + 400.0 * turns}
    moved = cost(workload, PRECISION).bytes
    return Work(
        {"bytes": moved, "sm_bytes": float((items + turns) * config.stage_bytes), **clocks},
        {"launches": 2.0 - config.routed, "handover": 2500.0},
    )


def source_of(tokens: int, experts: int, width: int, inner: int, dtype: str) -> CudaSource:
    """The source of the configuration of so many tokens, with top 8 of so many experts."""
    config = for_experts(choose_config(tokens, width, inner, dtype, SMS), experts, 8 * tokens)
    return source(config, experts if config.routed or config.prefetch else 0)


CUDA_SOURCES = (
    *(source_of(tokens, 256, 2048, 512, "bf16") for tokens in (4, 8, 16, 32, 128)),
    *(source_of(tokens, 128, 2816, 704, "bf16") for tokens in (8, 128)),
    source_of(128, 256, 2048, 512, "fp16"),
    router_source(256, "bf16"),
)

CANDIDATES = (
    Candidate(
        "cuda_experts", PRECISION, run, Needs(capability=(9, 0), packages=("cupy",)), prepare=prepare,
        refuses=_refuses, config=described, work=work,
    ),
)  # fmt: skip
