"""A mixture's experts for few tokens in CUDA C++: router_once.cu chooses and sorts, experts_teams.cu multiplies.

Up to 16 tokens experts_teams.cu chooses and sorts too, in one launch. Of more there are two, the second a programmatic
one, so its blocks set up while the first one's sort, and prefetch weights where nearly all experts have tokens. Nothing
is asked of the host. experts.cu, the same with one team of math warps, which cards compare (controls/cuda_levers.py),
says how the work is shared and where sums are added. Weights are tiles of nvfp4's tiles.py
(4.5 bits a weight), rows of gate and up alternating in eights. The shared expert is one expert more, which has every
token; where it is narrower than the others it is padded with zeros.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernels import cuda
from kernels.common import Candidate, CudaSource, Needs, Tensors, Work, Workload
from kernels.moe.cost import block_sizes, cost
from kernels.nvfp4 import hopper, tiles
from kernels.nvfp4.hopper import SHARED_BYTES, SMS
from kernels.nvfp4.row_tiles import tile_weights as tile_in_one_layout

SOURCE, TEAMS_SOURCE, ROUTER_SOURCE, ONCE_SOURCE = (
    Path(__file__).with_name(name) for name in ("experts.cu", "experts_teams.cu", "router.cu", "router_once.cu")
)
TOKENS_MAX, EXPERTS_MAX, TOP_K_MAX = 128, 1024, 31
WARPS, SLOTS, SUM_STAGES, BARRIER_BYTES = 8, 4, 2, 1024  # as in experts.cu
THREADS = 32 * (WARPS + 3)
H_STAGES_MAX = 4  # an h takes a microsecond to come, two items
PRECISION = "nvfp4-w4a16"
ROUTED_MAX, ROUTED_EXPERTS_MAX = 16, 512  # where experts_teams.cu routes for itself
BLOCK_TOKENS = 8  # of its blocks; where a call has no more, each has a warp
FEW_ROWS = 4  # of h in a stage, where a call of the one layout has as many tokens: so x fits beside
STAGES, PREFETCH = 4, 8
PREFETCH_ROWS = 2  # of an expert in the mean, from which on prefetches pay (cards moe-prefetch and moe-prefetch-64)
AHEAD = "COUNTERS_BESIDE", "SHORT_LINE"  # what gained ahead of its first copy (card moe-ahead)
SCRATCH = ("pairs", "masks", "rows", "blocks", "state", "turns", "banks", "h", "parts")
KEPT = ("state", "turns", "banks")  # of it, what a call has of the one before


@dataclass(frozen=True)
class ExpertsConfig:
    """A compiled experts.cu (dtype .. round_items) and its launch (grid). The macros are explained there.

    teams: of math warps; 0 is experts.cu, more is experts_teams.cu, whose blocks have eight tokens. routed: it makes
    the router's lists itself. switches: macros that are 1 there; h_rows: rows of a block that a stage of h has room
    for, where they are fewer than the block's. prefetch: items that each CTA prefetches into L2 while the router runs.
    most_tokens: that it has room for the choice of, where it routes itself. one_layout: of row_tiles.py's weights;
    x_rows: there, where it routes itself, tokens whose x it has room for.

    width, inner: of the model and of an expert. n_tiles: eights of tokens of a block. row_tiles: tiles of 16 rows of y
    that a CTA adds up; parts: CTAs that share them. stages: of weights; h_stages: of h.
    """

    dtype: str
    width: int
    inner: int
    n_tiles: int
    row_tiles: int
    parts: int
    stages: int
    h_stages: int
    round_items: int
    grid: int
    teams: int = 0
    routed: bool = False
    switches: tuple[str, ...] = ()
    h_rows: int = 0
    prefetch: int = 0
    most_tokens: int = BLOCK_TOKENS
    one_layout: bool = False
    x_rows: int = 0

    @property
    def threads(self) -> int:
        return 32 * (WARPS * self.teams + 6) if self.teams else THREADS

    @property
    def dealt(self) -> bool:
        """Whether x comes in the order that lanes multiply, by the router's launch."""
        return self.one_layout and not self.routed

    @property
    def kernel(self) -> str:
        """The kernel's name, which tells its macros."""
        sizes = {"h": self.width, "f": self.inner, "n": self.n_tiles, "r": self.row_tiles, "p": self.parts}
        sizes |= {"st": self.stages, "hs": self.h_stages, "i": self.round_items}
        sizes |= {"hr": self.h_rows} if self.h_rows else {}
        sizes |= {"pf": self.prefetch} if self.prefetch else {}
        sizes |= {"x": 1} if self.dealt else {}
        sizes |= {"xs": self.x_rows} if self.x_rows else {}
        sizes |= {"t": self.most_tokens} if self.most_tokens != BLOCK_TOKENS else {}
        word = f"moe_teams{self.teams}" if self.teams else "moe_experts"
        words = word + "_routed" * self.routed + "_one" * self.one_layout, *map(str.lower, self.switches), self.dtype
        return "_".join((*words, *(f"{name}{size}" for name, size in sizes.items())))

    @property
    def block_tokens(self) -> int:
        return 8 * self.n_tiles

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
        return _round_up(SLOTS // self.row_tiles * (self.h_rows or self.block_tokens) * (2 * self.inner + 16), 128)

    def shared_bytes(self, tokens: int, rows: int, blocks: int) -> int:
        """Barriers, stages, sums, h, sums of y, and both lists: as experts.cu lays them out."""
        sums = (4 if self.teams else SUM_STAGES) * WARPS * self.n_tiles * 512
        fixed = BARRIER_BYTES + self.stages * self.stage_bytes + sums + self.h_stages * self.h_stage_bytes
        fixed += self.x_rows * (2 * self.width + 16)
        return fixed + self.row_tiles * tokens * 64 + 8 * (rows + blocks)

    def blocks(self, tokens: int, top_k: int, experts: int, shared: bool) -> int:
        """As many blocks as any choice may need."""
        pairs = tokens * top_k
        return pairs // self.block_tokens + min(experts, pairs) + shared * -(-tokens // self.block_tokens)

    def __str__(self) -> str:
        return f"{self.kernel} grid={self.grid}"


def _round_up(x: int, unit: int) -> int:
    return -(-x // unit) * unit


Choice = Callable[[int, int, int, str, int], ExpertsConfig]


def choose_config(
    tokens: int, width: int, inner: int, dtype: str, sms: int = SMS, *, teams: int = 2, stages: int = STAGES,
    round_items: int = 0, row_tiles: int = 0, routed: bool = True,
    switches: tuple[str, ...] = AHEAD, few_rows: bool = False, prefetch: int = PREFETCH, routed_max: int = ROUTED_MAX,
    one_layout: bool = False,
) -> ExpertsConfig:  # fmt: skip
    """experts_teams.cu with `teams` teams; of `stages` of weights as many as leave room for two of h.

    One team where a warp has more than four tiles of x: 80 registers would not hold them. round_items, row_tiles: 0
    chooses. routed: without a router's launch where two teams have at most routed_max tokens; with switches there.
    few_rows: there, of few tokens, stages of h for their rows alone, and from eight stages on. prefetch: of more
    tokens. `for_experts` has the last word on both. one_layout: its weights, and x dealt to a warp's quads: by
    ldmatrix where a CTA routes, else by the router's launch.
    """
    teams = teams if width <= 4 * WARPS * tiles.COLS else 1
    row_tiles, parts = row_tiles_of(tokens, width, sms, row_tiles)
    round_items = round_items or (24 if tokens <= 4 else 12 if tokens <= 8 else 48)
    routed = routed and teams == 2 and tokens <= routed_max
    config = ExpertsConfig(
        dtype, width, inner, 1, row_tiles, parts, stages, 2, round_items, sms, teams, routed, one_layout=one_layout
    )
    if routed:
        config = replace(config, switches=switches, most_tokens=BLOCK_TOKENS if tokens <= BLOCK_TOKENS else routed_max)
        if one_layout:
            few = tokens <= FEW_ROWS  # stages of h leave the room by being for as many rows
            config = replace(config, x_rows=FEW_ROWS if few else config.most_tokens, h_rows=FEW_ROWS * few)
        if few_rows and tokens <= 4:
            config = replace(config, h_rows=1 << (tokens - 1).bit_length(), stages=8)
    else:
        config = replace(config, prefetch=prefetch)
    while config.stages > 2 * teams and _shared_bytes_of(config, tokens) > SHARED_BYTES:
        config = replace(config, stages=config.stages - teams)
    return with_h_stages(config, tokens)


def for_experts(config: ExpertsConfig, experts: int, pairs: int) -> ExpertsConfig:
    """`config`, with a router's launch where it would have less than a thread an expert, and no prefetch of few pairs.

    pairs: of a token and a routed expert.
    """
    if config.routed and experts > ROUTED_EXPERTS_MAX:
        config = replace(config, routed=False, switches=(), most_tokens=BLOCK_TOKENS, x_rows=0, h_rows=0)
    return config if pairs >= PREFETCH_ROWS * experts else replace(config, prefetch=0)


def row_tiles_of(tokens: int, width: int, sms: int, wanted: int = 0) -> tuple[int, int]:
    """(tiles of rows of y that a CTA adds up, CTAs that share them): more rows a CTA, fewer times h is read.

    From the least that tokens ask for on, or `wanted`, the first that keeps nine tenths of `sms` at work, else the one
    that keeps most.
    """
    least = wanted or (1 if tokens <= 4 else 2 if tokens <= 32 else 4)
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
    room, each = SHARED_BYTES - _shared_bytes_of(replace(config, h_stages=1), tokens), max(1, config.teams)
    return replace(config, h_stages=max(each, min(H_STAGES_MAX, 1 + room // config.h_stage_bytes) // each * each))


def _shared_bytes_of(config: ExpertsConfig, tokens: int = TOKENS_MAX) -> int:
    """Of the most tokens that a configuration is chosen for, top 8 of 256 and a shared expert."""
    tokens = 8 if tokens <= 8 else config.most_tokens if config.x_rows else TOKENS_MAX
    return config.shared_bytes(tokens, 9 * tokens, config.blocks(tokens, 8, 256, True))


def _pairs(tokens: int, top_k: int, shared: bool) -> int:
    return tokens * (top_k + shared)


def refuses(tokens: int, experts: int, top_k: int, width: int, inner: int, shared: int, sms: int = SMS) -> str:
    """Why the pair of kernels does not take a layer, "" where it does."""
    if tokens > TOKENS_MAX:
        return f"T={tokens} > {TOKENS_MAX}: a block's sums of y would not fit in shared memory; use triton_experts"
    if experts > EXPERTS_MAX or top_k > TOP_K_MAX:
        return f"experts={experts}, top_k={top_k}: the router holds {EXPERTS_MAX} and {TOP_K_MAX}; use triton_experts"
    if width % 16 or inner % 16:
        return f"H={width}, F={inner}: both must be multiples of 16, a scale group"
    if shared > inner:
        return f"shared={shared} > F={inner}: run the shared expert as a linear of kernels/nvfp4"
    config = choose_config(tokens, width, inner, "bf16", sms)
    blocks = config.blocks(tokens, top_k, experts, bool(shared))
    need = config.shared_bytes(tokens, _pairs(tokens, top_k, bool(shared)), blocks)
    if need > SHARED_BYTES or config.groups > sms:
        return f"H={width}, F={inner}: needs {need} bytes of shared memory, {config.groups} CTAs; use triton_experts"
    return ""


@functools.cache
def router_source(experts: int, dtype: str, block_tokens: int) -> CudaSource:
    """router.cu for so many experts, x of `dtype`, and blocks of so many tokens."""
    macros = {"X_BF16": int(dtype == "bf16"), "EXPERTS": experts, "BLOCK_TOKENS": block_tokens}
    name = f"moe_router_{dtype}_e{experts}_b{block_tokens}"
    return hopper.source(ROUTER_SOURCE, name, router_shared_bytes(experts), macros)


def router_warps(experts: int) -> int:
    """Warps of the router's blocks; a warp a token, and in the last block a thread an expert."""
    return max(8, -(-experts // 32))


@functools.cache
def once_source(experts: int, dtype: str, block_tokens: int, deal: bool = False) -> CudaSource:
    """router_once.cu for few tokens, as router_source. deal: it copies x besides."""
    macros = {"X_BF16": int(dtype == "bf16"), "EXPERTS": experts, "BLOCK_TOKENS": block_tokens, "FEW": 1}
    macros |= {"DEAL": 1} if deal else {}
    name = f"moe_router_once_few_{'deal_' * deal}{dtype}_e{experts}_b{block_tokens}"
    return hopper.source(ONCE_SOURCE, name, once_shared_bytes(experts), macros)


def once_shared_bytes(experts: int) -> int:
    """Of router_once.cu for few tokens: a thread's counts, two words an expert, a block's masks, two sums a warp."""
    warps, words = router_warps(experts), -(-experts // 32)
    return 4 * (warps // words * words * 32 + 2 * experts + warps * words + 2 * words)


def router_shared_bytes(experts: int, warps: int = 0) -> int:
    """warps: of a block, where they are not `router_warps`. Of few experts a word a token takes more than the masks."""
    masks = max(TOKENS_MAX // 32 * experts, 32 * -(-experts // 32))
    return 4 * ((warps or router_warps(experts)) + 1 + experts + masks)


@functools.cache
def source(config: ExpertsConfig, experts: int = 0) -> CudaSource:
    """The translation unit of a configuration, with its macros. experts: for one that routes itself or prefetches."""
    macros = {
        "X_BF16": int(config.dtype == "bf16"), "WIDTH": config.width, "INNER": config.inner,
        "N_TILES": config.n_tiles, "ROW_TILES": config.row_tiles, "PARTS": config.parts, "STAGES": config.stages,
        "H_STAGES": config.h_stages, "ROUND_ITEMS": config.round_items,
    }  # fmt: skip
    if config.teams:
        macros = {"TEAMS": config.teams} | {name: value for name, value in macros.items() if name != "N_TILES"}
    if config.routed:
        macros |= {"ROUTED": 1, "EXPERTS": experts, **dict.fromkeys(config.switches, 1)}
        macros |= {"MOST_TOKENS": config.most_tokens} if config.most_tokens != BLOCK_TOKENS else {}
    if config.h_rows:
        macros["H_ROWS"] = config.h_rows
    if config.one_layout:
        macros["ONE_LAYOUT"] = 1
    if config.x_rows:
        macros["X_ROWS"] = config.x_rows
    if config.prefetch:
        macros |= {"PREFETCH": config.prefetch, "EXPERTS": experts}
    tokens = 8 if config.n_tiles == 1 and not config.teams else TOKENS_MAX
    path = TEAMS_SOURCE if config.teams else SOURCE
    return hopper.source(path, config.kernel, min(SHARED_BYTES, _shared_bytes_of(config, tokens)), macros)


def _tiled(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, one_layout: bool) -> torch.Tensor:
    """Tiles [E, row tiles, k tiles, 576] of E matrices, whose rows are multiples of a tile's 16: as one matrix."""
    tile_weights = tile_in_one_layout if one_layout else tiles.tile_weights
    return tile_weights(packed.flatten(0, 1), scale.flatten(0, 1), dtype).unflatten(0, (len(packed), -1))


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


def prepare(inputs: Tensors, choose: Choice = choose_config, one_layout: bool = False) -> dict[str, Any]:
    """The weights of every expert as tiles, the shared one behind the others, and scratch for as many tokens as x."""
    x, experts = inputs["x"], inputs["down_packed"].shape[0]
    inner = 2 * inputs["down_packed"].shape[2]
    made: dict[str, list[torch.Tensor]] = {"up": [], "down": [], "up_scale": [], "down_scale": []}
    for prefix in ("", "shared_")[: 1 + ("shared_gate" in inputs)]:
        for name, stored, parts in padded(inputs, prefix, inner):
            made[name].append(_tiled(*parts, x.dtype, one_layout))
            made[f"{name}_scale"].append(inputs[f"{prefix}{stored}_tensor_scale"])
    kept: dict[str, Any] = {name: torch.cat(each) for name, each in made.items()}
    kept |= {key: inputs[key] for key in ("shared_gate",) if key in inputs}
    top_k, device = int(inputs["top_k"]), inputs["down_packed"].device
    kept |= {"k": torch.zeros(top_k, dtype=torch.uint8, device=device)}  # its length: operators pass tensors only
    return kept | scratch(x.shape, x.dtype, experts, top_k, inner, "shared_gate" in inputs, device, choose)


def scratch(
    shape: torch.Size, dtype: torch.dtype, experts: int, top_k: int, inner: int, shared: bool, device: torch.device,
    choose: Choice = choose_config,
) -> Tensors:  # fmt: skip
    """What the two kernels leave each other, by SCRATCH's names, for x of `shape` or of fewer rows; all zero.

    Masks are as many as either router's. KEPT must be zero before the first call.
    """
    tokens, width = shape
    pairs, blocks, sums, groups = _pairs(tokens, top_k, shared), 0, 1, 0
    for fewer in {min(tokens, each) for each in (4, 8, 32, tokens)}:  # where the configuration changes
        config = configured(fewer, width, inner, hopper.ELEMENTS.get(dtype, ""), device, choose)
        blocks = max(blocks, config.blocks(fewer, top_k, experts, shared))
        groups = max(groups, config.groups)
        sums = max(sums, (config.parts > 1) * config.groups * config.parts * config.row_tiles * fewer * 16)

    def zeros(*size: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(*size, dtype=kind, device=device)

    return {
        "pairs": zeros(pairs, 2), "rows": zeros(pairs, 2),
        "masks": zeros(max(-(-tokens // router_warps(experts)) * experts, tokens * -(-experts // 32))),
        "blocks": zeros(blocks, 2), "state": zeros(2 + blocks + groups), "turns": zeros(3),
        "banks": zeros(2 + 2 * (blocks + groups)),
        "h": zeros(pairs, inner, kind=dtype), "parts": zeros(sums, kind=torch.float32),
        **({"dealt": zeros(tokens, width, kind=dtype)} if config.one_layout else {}),
    }  # fmt: skip


@functools.lru_cache(maxsize=1024)
def configured(
    tokens: int, width: int, inner: int, dtype: str, device: torch.device, choose: Choice = choose_config
) -> ExpertsConfig:
    """`choose`'s for the multiprocessors of a device; those of an H200 where it is no GPU."""
    sms = hopper.multiprocessors(device.index or 0) if device.type == "cuda" else SMS
    return choose(tokens, width, inner, dtype, sms)


def route(
    args: dict[str, Any], gate: Any, dtype: str, block_tokens: int, counters: int, once: bool = True, deal: bool = False
) -> None:  # fmt: skip
    """The router's launch, which leaves rows and blocks of so many tokens, and so many counters at zero.

    once: router_once.cu's, not router.cu's; with `deal` it copies x into args["dealt"] besides.
    """
    logits, (tokens, width) = args["logits"], args["x"].shape
    experts = logits.shape[1]
    warps = router_warps(experts)
    chooser = once_source(experts, dtype, block_tokens, deal) if once else router_source(experts, dtype, block_tokens)
    routers = -(-tokens // warps)
    grid = routers + deal * -(-tokens * width // 8 // (32 * warps))
    back = (args["turns"],) * once + ((args["dealt"], cuda.i32(routers)) if deal else ())
    lists = [args[name] for name in ("pairs", "masks", "rows", "blocks", "state")]
    cuda.launch(
        cuda.load(chooser, chooser.kernels[0], args["x"].device.index or 0), (grid,), 32 * warps,
        (logits, args["x"], gate, *lists, *map(cuda.i32, (tokens, width, len(args["k"]), counters)), *back),
        (once_shared_bytes if once else router_shared_bytes)(experts),
    )  # fmt: skip


def run(args: dict[str, Any], out: Tensors, choose: Choice = choose_config, once: bool = True) -> None:
    """y in one launch up to ROUTED_MAX tokens; else in two: choose and sort, then both products and the weighted sum.

    once: as `route`. ValueError on a mismatch.
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
    config = for_experts(configured(tokens, width, h.shape[1], element, x.device, choose), experts, tokens * top_k)
    blocks = config.blocks(tokens, top_k, experts, shared)
    gate = args["shared_gate"] if shared else cuda.i64(0)
    weights = [args[name] for name in ("up", "down", "up_scale", "down_scale")]
    if config.routed:
        banks = args["banks"]
        counts = map(cuda.i32, (tokens, pairs, blocks, top_k, (len(banks) - 2) // 2))
        cuda.launch(
            cuda.load(source(config, experts), config.kernel, device, SHARED_BYTES), (config.grid,), config.threads,
            (x, *weights, logits, gate, banks, h, args["parts"], y, *counts),
            config.shared_bytes(tokens, pairs, blocks),
        )  # fmt: skip
        return
    route(args, gate, element, config.block_tokens, blocks + config.groups, once, config.dealt)
    between, read = [args[name] for name in ("rows", "blocks", "state")], args["dealt"] if config.dealt else x
    unit = source(config, experts if config.prefetch else 0)
    cuda.launch(
        cuda.load(unit, config.kernel, device, SHARED_BYTES), (config.grid,), config.threads,
        (read, *weights, *between, h, args["parts"], y, *map(cuda.i32, (tokens, pairs, blocks))),
        config.shared_bytes(tokens, pairs, blocks), programmatic=True,
    )  # fmt: skip


def _refuses(workload: Workload) -> str:
    return refuses(*(workload[axis] for axis in ("T", "experts", "top_k", "H", "F", "shared")))


def chosen(workload: Workload, sms: int = SMS, choose: Choice = choose_config) -> ExpertsConfig:
    """What `run` launches for a workload."""
    tokens, width, inner, dtype, experts = (workload[axis] for axis in ("T", "H", "F", "dtype", "experts"))
    return for_experts(choose(tokens, width, inner, dtype, sms), experts, tokens * workload["top_k"])


def described(workload: Workload, choose: Choice = choose_config, once: bool = True) -> str:
    """What `run` launches for a workload, and whether router_once.cu is ahead of it."""
    config = chosen(workload, choose=choose)
    return f"{config} router_once" if once and not config.routed else str(config)


def work(workload: Workload, sms: int) -> Work:
    """Stages of the busiest worker, by what a math warp and the reducer do for each (clocks: NOTES.md)."""
    config = chosen(workload, sms)
    blocks = sum(count for _, count in block_sizes(workload, config.block_tokens))
    items = math.ceil(blocks * config.inner / 8 / sms)
    turns = math.ceil(math.ceil(blocks / config.parts) / (SLOTS // config.row_tiles))
    of_tile = 4 * (50.0 + 95 * config.n_tiles)
    clocks = {"math": of_tile * (items + turns) / max(1, config.teams), "reduce": 200.0 * items + 400.0 * turns}
    moved = cost(workload, PRECISION).bytes
    return Work(
        {"bytes": moved, "sm_bytes": float((items + turns) * config.stage_bytes), **clocks},
        {"launches": 2.0 - config.routed, "handover": 2500.0},
    )


def source_of(
    tokens: int, experts: int, width: int, inner: int, dtype: str, choose: Choice = choose_config
) -> CudaSource:  # fmt: skip
    """The source of `choose`'s configuration, with top 8 of so many experts."""
    config = for_experts(choose(tokens, width, inner, dtype, SMS), experts, 8 * tokens)
    return source(config, experts if config.routed or config.prefetch else 0)


CUDA_SOURCES = (
    *(source_of(tokens, 256, 2048, 512, "bf16") for tokens in (4, 8, 16, 32, 128)),
    *(source_of(tokens, 128, 2816, 704, "bf16") for tokens in (8, 128)),
    source_of(128, 256, 2048, 512, "fp16"),
    once_source(256, "bf16", 8),
)

CANDIDATES = (
    Candidate(
        "cuda_experts", PRECISION, run, Needs(capability=(9, 0), packages=("cupy",)), prepare=prepare,
        refuses=_refuses, config=described, work=work,
    ),
)  # fmt: skip
