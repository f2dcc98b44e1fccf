"""NVFP4 linear for few tokens in CUDA C++: one of two kernels, compiled for the shape's configuration at first use.

Both keep x in registers and stream weights, so their configurations follow K and M: how many 64-wide tiles of K each
warp keeps (`chunks`), in how many phases K is walked when they are too many, whether a cluster of two halves K. These
are macros, one compiled kernel per combination.

mma_decode.cu (here) gives every warp a stream of its own; ring_decode.cu (ring_config.py) feeds all warps of a CTA from
one. The second was faster where a CTA goes through many strips and can keep x at once, the first elsewhere.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kernels import cuda
from kernels.common import Candidate, CudaSource, Needs, Tensors, Workload
from kernels.nvfp4 import ring_config, tiles
from kernels.nvfp4.ring_config import SHARED_BYTES, RingConfig

SOURCE = Path(__file__).with_name("mma_decode.cu")
M_MAX = 32
SMS = 132  # of an H100 or H200, for choosing without a device
FLIGHT_BYTES = 128 * 1024  # of weights on their way to an SM: more only makes the first of them come later
SLOT_BUDGET_BYTES = 48 * 1024
STRIPS_PER_TEAM = 64  # at most; more weight rows mean more CTAs than SMs
# Tiles of x fragments (8 registers each and per 8 tokens) that a warp can keep without spilling, by warps of the CTA.
OPERAND_TILES = {8: 20, 16: 10}
RING_K_MAX = 12_288  # longer strips are coarse pieces for a CTA, and their own streams were faster


@dataclass(frozen=True)
class DecodeConfig:
    """A compiled kernel (dtype .. once) and its launch (the rest).

    tokens: M rounded up to 8, 16 or 32. chunks: tiles of K per warp and phase. warps: of a team, they share K. teams:
    they share the strips of a CTA. split: CTAs that share K. depth: stages of a warp. slots: strips whose partial sums
    are kept. missing: tiles that some warp's share may lack of `chunks`. once: weights are first to leave L2.
    phases, phase_chunks (tiles of K per phase), grid, places (strips whose two halves a team of a CTA collects): of the
    launch.
    """

    dtype: str
    tokens: int
    chunks: int
    warps: int
    teams: int
    split: int
    depth: int
    slots: int
    missing: int
    once: bool
    phases: int
    phase_chunks: int
    grid: int
    places: int

    @property
    def kernel(self) -> str:
        """The kernel's name, which tells its macros."""
        sizes = {"t": self.tokens, "c": self.chunks, "w": self.warps, "x": self.teams, "k": self.split}
        sizes |= {"d": self.depth, "s": self.slots, "m": self.missing}
        flags = {"phased": self.phases > 1, "once": self.once}
        parts = (self.dtype, *(f"{name}{size}" for name, size in sizes.items()))
        return "_".join(("nvfp4_decode", *parts, *(name for name, is_set in flags.items() if is_set)))

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.teams

    @property
    def flight_bytes(self) -> int:
        """Stages of a CTA."""
        return self.teams * self.warps * self.depth * self.chunks * tiles.TILE_BYTES

    @property
    def shared_bytes(self) -> int:
        """Barriers, slots of partial sums, stages, places: as mma_decode.cu lays them out."""
        return _fixed_bytes(self) + self.flight_bytes

    def __str__(self) -> str:
        return f"{self.kernel} grid={self.grid} phases={self.phases} shared={self.shared_bytes}"


def _fixed_bytes(c: DecodeConfig) -> int:
    strip = c.tokens // 8 * 512
    barriers = c.teams * (8 * c.warps * c.depth + 12 * c.slots)
    places = -(-8 * c.places * c.teams // 128) * 128 + c.teams * c.places * 2 * strip
    return -(-barriers // 128) * 128 + c.teams * c.slots * c.warps * strip + places


def choose_config(m: int, n: int, k: int, dtype: str, sms: int = SMS) -> DecodeConfig | RingConfig:
    """The kernel and configuration for m <= 32 tokens, n weight rows, k values, dtype "bf16" or "fp16".

    Raises ValueError when m is too large or k no multiple of 16.
    """
    if k % 16 == 0 and 4096 <= k <= RING_K_MAX and ring_config.fits(m, k, 2):
        return ring_config.choose_ring(m, n, k, dtype, sms, once=True)
    if k % 16 == 0 and m > 8 and k < 4096 and ring_config.fits(m, k, 1):
        return ring_config.choose_ring(m, n, k, dtype, sms, split=1, stages=2)
    return choose_streams(m, n, k, dtype, sms)


def choose_streams(
    m: int,
    n: int,
    k: int,
    dtype: str,
    sms: int = SMS,
    *,
    warps: int = 0,
    teams: int = 0,
    split: int = 0,
    once: bool = True,
    depth: int = 0,
    flight_bytes: int = FLIGHT_BYTES,
) -> DecodeConfig:
    """mma_decode.cu's configuration for m <= 32 tokens, n weight rows, k values, dtype "bf16" or "fp16".

    0 chooses: two CTAs share K from 4096 on; two teams of 8 warps where 16 can keep x of 8 tokens, else one; as many
    stages as make flight_bytes, two at least, but one for 32 tokens.
    Raises ValueError when m is too large or k no multiple of 16.
    """
    if not 1 <= m <= M_MAX or k % 16:
        raise ValueError(f"m={m}, k={k}: takes 1 to {M_MAX} tokens and k a multiple of 16; use a GEMM or pad k")
    total = -(-k // tiles.COLS)
    split = min(split or (2 if k >= 4096 else 1), total)
    tokens = next(size for size in (8, 16, 32) if size >= m)
    share = -(-total // split)
    if not warps:
        both = tokens == 8 and -(-share // 8) <= OPERAND_TILES[16]
        warps, teams = (8, teams or 2) if both else (8, 1)
    teams = teams or 1
    room = max(1, OPERAND_TILES[warps * teams] // (tokens // 8))
    phases = -(-share // (warps * room))
    phase_chunks = -(-share // phases)
    phases = -(-share // phase_chunks)
    chunks = -(-phase_chunks // warps)
    fewest = min(share - (phases - 1) * phase_chunks, (total - (split - 1) * share - 1) % phase_chunks + 1)

    strips = -(-n // tiles.ROWS)
    workers = max(min(sms // split, strips), -(-strips // (STRIPS_PER_TEAM * teams)))
    most = -(-strips // (workers * teams))  # strips of the busiest team
    slot_bytes = teams * warps * tokens // 8 * 512
    slots = min(4, most) if phases == 1 else max(1, min(most, SLOT_BUDGET_BYTES // slot_bytes, 12))
    stage_bytes = teams * warps * chunks * tiles.TILE_BYTES
    config = DecodeConfig(
        dtype=dtype,
        tokens=tokens,
        chunks=chunks,
        warps=warps,
        teams=teams,
        split=split,
        depth=1,
        slots=slots,
        missing=chunks - fewest // warps,
        once=once,
        phases=phases,
        phase_chunks=phase_chunks,
        grid=workers * split,
        places=(most + 1) // 2 if split == 2 else 0,
    )
    depth = depth or (1 if tokens == 32 else max(2, flight_bytes // stage_bytes))
    fits = (SHARED_BYTES - _fixed_bytes(replace(config, depth=depth))) // stage_bytes
    return replace(config, depth=max(1, min(depth, most * phases, fits)))


@functools.cache
def source(config: DecodeConfig | RingConfig) -> CudaSource:
    """The translation unit of a configuration: its kernel's file with its macros."""
    if isinstance(config, RingConfig):
        return ring_config.source(config)
    macros = {
        "KERNEL": config.kernel,
        "X_BF16": int(config.dtype == "bf16"),
        "TOKENS": config.tokens,
        "CHUNKS": config.chunks,
        "WARPS": config.warps,
        "TEAMS": config.teams,
        "SPLIT": config.split,
        "DEPTH": config.depth,
        "SLOTS": config.slots,
        "PHASED": int(config.phases > 1),
        "MISSING": config.missing,
        "ONCE": int(config.once),
    }
    return CudaSource(
        path=SOURCE,
        kernels=(config.kernel,),
        options=("--std=c++17", *(f"-D{name}={value}" for name, value in macros.items())),
        capability=(9, 0),
        architecture="sm_90a",
        shared_bytes=config.shared_bytes,
    )


def prepare(inputs: Tensors) -> Tensors:
    """x as it is, the weights as tiles (tiles.py), the tensor scale."""
    return {
        "x": inputs["x"],
        "w": tiles.tile_weights(inputs["w_packed"], inputs["w_scale"], inputs["x"].dtype),
        "w_tensor_scale": inputs["w_tensor_scale"],
    }


@functools.cache
def _sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(args: Tensors, y: torch.Tensor, config: DecodeConfig | RingConfig) -> None:
    """y[M, N] = x[M, K] @ w^T with `config`, one launch on torch's current stream. ValueError on a mismatch."""
    x, w = args["x"], args["w"]
    (m, k), n = x.shape, y.shape[1]
    chunks = -(-k // tiles.COLS)
    if x.dtype not in (torch.bfloat16, torch.float16) or not x.is_contiguous() or x.data_ptr() % 16:
        raise ValueError(
            f"x is {x.dtype} with strides {x.stride()}; pass contiguous bf16 or fp16 x that starts on 16 bytes"
        )
    if w.shape != (-(-n // tiles.ROWS), chunks, tiles.TILE_BYTES) or y.shape[0] != m:
        raise ValueError(
            f"x {tuple(x.shape)} and y {tuple(y.shape)} do not fit tiles {tuple(w.shape)}; prepare this pair"
        )
    device = x.device.index or 0
    # The limit of shared memory belongs to the kernel, which other shapes use too: always the most.
    kernel = cuda.load(source(config), config.kernel, device, SHARED_BYTES)
    numbers: tuple[int, ...] = (m, n, k, chunks)
    early = False
    if isinstance(config, RingConfig):
        early = config.early
    else:
        numbers += (config.phase_chunks, config.places)
    arguments = (x, w, args["w_tensor_scale"], y, *(cuda.i32(value) for value in numbers))
    cuda.launch(kernel, (config.grid,), config.threads, arguments, config.shared_bytes, programmatic=early)


def run(args: Tensors, out: Tensors) -> None:
    """y[M, N] = x[M, K] @ w^T in one launch."""
    x, y = args["x"], out["y"]
    dtype = "bf16" if x.dtype == torch.bfloat16 else "fp16"
    launch(args, y, choose_config(x.shape[0], y.shape[1], x.shape[1], dtype, _sms(x.device.index or 0)))


def _refuses(workload: Workload) -> str:
    m = workload["M"]
    return "" if m <= M_MAX else f"M={m} > {M_MAX}: the fragments of x of more tokens do not fit in registers"


def _config(workload: Workload) -> str:
    return str(choose_config(workload["M"], workload["N"], workload["K"], workload["dtype"]))


CUDA_SOURCES = tuple(
    source(choose_config(m, n, k, dtype))
    for m, n, k, dtype in (
        (8, 17408, 5120, "bf16"),
        (8, 5120, 6144, "bf16"),
        (8, 4096, 2048, "bf16"),
        (8, 5120, 17408, "bf16"),
        (16, 17408, 5120, "bf16"),
        (16, 5120, 17408, "bf16"),
        (16, 4096, 2048, "bf16"),
        (32, 17408, 5120, "bf16"),
        (32, 5120, 17408, "bf16"),
        (8, 17408, 5120, "fp16"),
    )
)

CANDIDATES = (
    Candidate(
        name="cuda_decode",
        precision="nvfp4-w4a16",
        run=run,
        needs=Needs(capability=(9, 0), packages=("cupy",)),
        prepare=prepare,
        refuses=_refuses,
        config=_config,
    ),
)
