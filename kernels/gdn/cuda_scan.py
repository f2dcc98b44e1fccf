"""Chunked prefill in CUDA C++ for Hopper: a parallel preparation, and a scan whose state stays in registers.

`prepare_chunks` does, for every chunk of 64 tokens and k head, what needs no state: K K^T, Q K^T, decays, the inverse.
The v heads of a k head share the two products. `scan_chunks` carries the transposed state in float32 accumulators, one
warpgroup to 64 columns of v; other warps load ahead of it and store behind it. What passes between the two is 11 KB per
chunk and v head, or 5 KB where the scan recomputes the scores: a head per CTA, rows of q and k without norms, 16-bit
outputs. It makes them itself, once per v head, because memory is what binds many sequences (scores.cuh). The scan is a
programmatic launch: its blocks start behind the last blocks of the preparation (scan.cu).

Where half a head per CTA leaves multiprocessors free, one launch does both (fused.cu): blocks there go on preparing
while the scans run, and raise a flag for each chunk and k head, which the scans look at. The same bits. order.py says
which block does what; `_prepare` makes its tables and the flags. They belong to the args: no two streams may run one
args at once (they share the workspace too).

Operands: q, k, the state and the faded values in the activations' type; the inverse, the scores and the corrected
values in fp16, three bits finer than bf16. So the range of v must be fp16's for bf16 activations too: beyond 65,504 it
overflows and the sequence ends in infinities or NaN. Sums are float32.

`cuda_scan_fp16` is for bf16 activations and float32 outputs (out_dtype = f32): every operand in fp16, which has tf32's
ten mantissa bits at twice its rate. bf16 is exact in fp16 within its range, so the preparation also writes q and k in
fp16, each row times a power of two, and its norms take the inverse powers. The state's range must be fp16's too. Each
thread stores its own outputs: their tiles would not fit beside three stages.
Sequences of unequal lengths come packed, with cu_seqlens; there is no padded form. A sequence gets the same bits in
half a head per CTA and in one, scores recomputed or not, alone and in any batch.
Given up: float32 activations, more than 8 v heads per k head, devices other than sm_90.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from kernels import cuda, cuda_driver
from kernels.common import Candidate, CudaSource, Needs, Tensors, Work, Workload, device_of
from kernels.gdn import order
from kernels.gdn.cost import chain_steps, cost, sequences, state_bytes, state_clocks
from kernels.gdn.launch import checked, sequence_bounds

CHUNK = 64
TILE_BYTES = 64 * 128
TRIANGLE_BYTES = 10 * 512  # of ten 16 x 16 blocks
BLOCK_BYTES = 2 * TRIANGLE_BYTES + 1024  # X, P and the vectors
RECOMPUTE_BLOCK_BYTES = TRIANGLE_BYTES + CHUNK * 4  # X and the running sums of the gates
STAGES = 3  # chunks in the scan's shared memory
HEADS = 8  # most v heads per k head
SMS = 132
# Fewest multiprocessors beside the scans for one launch. Of the usual 16 units a chunk, the TEAMS = 3 on each of 24
# prepare half while the scans run (3 * 24 units in order.CHUNKS_A_UNIT = 9 chunks). With fewer most of the preparation
# lies ahead of the scans anyway, and a launch of its own has room for four of its blocks a multiprocessor.
LEAST_PREPARING = 24
# The time of a wave with half a head per CTA, in waves with one head per CTA, and in those that recompute scores.
HALF, RECOMPUTE_HALF = 0.6, 0.7
FLAGS = 32  # words of the sync buffer ahead of its flags: FLAGS in scan.cuh
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
WIDE = "bf16_f32"  # bf16 in, operands in fp16, float32 out


@dataclass(frozen=True)
class ScanVariant:
    """An instantiation of the scan: warpgroups of 64 v columns per block. dtype: "bf16", "fp16" or WIDE.

    recompute: one more warpgroup makes the scores P and the vectors, for rows of q and k that need no norm.
    """

    dim: int
    dtype: str
    groups: int
    recompute: bool = False

    @property
    def preparation(self) -> str:
        """The extern "C" name of the kernel that goes before."""
        return f"gdn_prepare_d{self.dim}_{self.dtype}" + "_lean" * self.recompute

    @property
    def kernel(self) -> str:
        """The extern "C" name."""
        return f"gdn_scan_d{self.dim}_{self.dtype}_g{self.groups}" + "_lean" * self.recompute

    @property
    def threads(self) -> int:
        """Warpgroups of the chain, one that loads and stores, and one that makes P where the scan recomputes it."""
        return 128 * (self.groups + 1 + self.recompute)

    @property
    def block_bytes(self) -> int:
        """What the preparation leaves for a chunk and v head."""
        return RECOMPUTE_BLOCK_BYTES if self.recompute else BLOCK_BYTES

    @property
    def shared_bytes(self) -> int:
        """Stages of k, q, v, X, P, vectors and (recompute) sums of gates, outputs of each warpgroup, the barriers."""
        stage = (2 * (self.dim // 64) + self.groups + 2) * TILE_BYTES + 1024 * (1 + self.recompute)
        return STAGES * stage + self.groups * TILE_BYTES + 128


VARIANTS = (
    *(ScanVariant(128, dtype, groups) for dtype in ("bf16", "fp16", WIDE) for groups in (1, 2)),
    *(ScanVariant(64, dtype, 1) for dtype in ("bf16", "fp16")),
    *(ScanVariant(128, dtype, 2, recompute=True) for dtype in ("bf16", "fp16")),
)


def prepare_shared_bytes(variant: ScanVariant) -> int:
    """Dynamic shared memory of a scan's preparation: `Preparation::BYTES` in prepare.cuh."""
    rows = (1 if variant.recompute else 2) * (variant.dim // 64) * TILE_BYTES  # of k, and of q
    return max(3 * variant.block_bytes, rows) + CHUNK * 144 + 4 * 16 * 20 * 4 + (2 + 2 * HEADS) * CHUNK * 4


PREPARATIONS = {v.preparation: prepare_shared_bytes(v) for v in VARIANTS}
SOURCE = CudaSource(
    path=Path(__file__).with_name("scan.cu"),
    kernels=(*PREPARATIONS, *(v.kernel for v in VARIANTS)),
    capability=(9, 0),
    architecture="sm_90a",
    shared_bytes=(*PREPARATIONS.values(), *(v.shared_bytes for v in VARIANTS)),
)


def fused_shared_bytes() -> int:
    """Dynamic shared memory of the one launch: three teams' (`TEAM_BYTES` in prepare.cuh), or a scan's if larger."""
    team = 2 * 2 * TILE_BYTES + 2 * BLOCK_BYTES + CHUNK * 144 + 4 * 16 * 20 * 4 + (2 + 2 * HEADS) * CHUNK * 4
    return max(order.TEAMS * (-(-team // 1024) * 1024), ScanVariant(128, "bf16", 1).shared_bytes)


FUSED = CudaSource(
    path=Path(__file__).with_name("fused.cu"),
    kernels=("gdn_fused_d128_bf16", "gdn_fused_d128_fp16"),
    capability=(9, 0),
    architecture="sm_90a",
    shared_bytes=fused_shared_bytes(),
)
CUDA_SOURCES = (SOURCE, FUSED)


def choose_config(sequences: int, heads_v: int, dim: int, dtype: str, raw_qk: bool) -> ScanVariant:
    """Half a head or one head per CTA, by which takes less time in waves of SMS CTAs.

    Two warpgroups share k, q, X and P: a head takes less time than two halves in turn, but a wave of halves takes less
    than one of heads (HALF, from trials on an H200), and may waste less of the last wave. Heads whose rows need no norm
    recompute the scores.
    """
    heads, recompute = sequences * heads_v, dtype != WIDE and not raw_qk
    whole, halves = -(-heads // SMS), -(-2 * heads // SMS)
    if dim != 128 or whole > (RECOMPUTE_HALF if recompute else HALF) * halves:
        return ScanVariant(dim, dtype, 1)
    return ScanVariant(dim, dtype, 2, recompute)


def fuses(sequences: int, heads_v: int, dim: int, dtype: str) -> bool:
    """Whether one launch does it all: 16-bit outputs, D = 128, enough multiprocessors beside the scans."""
    return dim == 128 and dtype in TYPES.values() and 2 * sequences * heads_v <= SMS - LEAST_PREPARING


def chunk_tables(bounds: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Each chunk's first token and its sequence's end, and each sequence's first chunk."""
    spans: list[tuple[int, int]] = []
    offsets = []
    for first, last in pairwise(bounds):
        offsets.append(len(spans))
        spans += [(start, last) for start in range(first, last, CHUNK)]
    return spans, offsets


def chosen(args: Tensors) -> ScanVariant:
    """The scan of these args in two launches."""
    name = WIDE if "q_fp16" in args else TYPES[args["v"].dtype]
    heads_v, dim = args["v"].shape[-2:]
    return choose_config(args["chunk_offsets"].numel(), heads_v, dim, name, "raw_qk" in args)


def workspace(args: Tensors, variant: ScanVariant) -> torch.Tensor:
    """Uninitialised room for what passes between the two launches of a scan."""
    blocks = args["chunks"].shape[0] * args["v"].shape[-2]
    return torch.empty(blocks * variant.block_bytes, dtype=torch.uint8, device=device_of(args))


def _pack(inputs: Tensors) -> Tensors:
    checked(inputs, ("q", "k", "v", "g", "beta", "initial_state"))
    device, bounds = device_of(inputs), sequence_bounds(inputs)
    spans, offsets = chunk_tables(bounds.tolist())
    return inputs | {
        "cu_seqlens": bounds,
        "chunks": torch.tensor(spans, dtype=torch.int32, device=device),
        "chunk_offsets": torch.tensor(offsets, dtype=torch.int32, device=device),
    }


def _prepare(inputs: Tensors) -> Tensors:
    args, (heads_v, dim) = _pack(inputs), inputs["v"].shape[-2:]
    args["workspace"] = workspace(args, chosen(args))
    fused = fuses(args["chunk_offsets"].numel(), heads_v, dim, TYPES[inputs["v"].dtype])
    return args | (in_order(args) if fused else {})


def in_order(args: Tensors, multiprocessors: int = SMS) -> Tensors:
    """What `prefill_at_once` needs beyond the args: tables of the order, and flags, zero now and never reset."""
    device, heads_k, heads_v = device_of(args), args["k"].shape[-2], args["v"].shape[-2]
    made = order.make(args["cu_seqlens"].tolist(), heads_k, heads_v, multiprocessors)
    return {
        "blocks": torch.tensor(made.blocks, dtype=torch.int32, device=device),
        "units": torch.tensor(made.units, dtype=torch.int32, device=device),
        "sync": torch.zeros(FLAGS + heads_k * args["chunks"].shape[0], dtype=torch.int32, device=device),
    }


def _prepare_wide(inputs: Tensors) -> Tensors:
    args = _pack(inputs)
    args |= {f"{x}_fp16": torch.empty(args[x].shape, dtype=torch.float16, device=device_of(args)) for x in ("q", "k")}
    return args | {"workspace": workspace(args, chosen(args))}


def prepare_chunks(args: Tensors, variant: ScanVariant | None = None) -> None:
    """What the scan needs of every chunk and v head into args["workspace"]; q and k also in fp16 where asked for.

    variant: another scan's than `chosen`'s, args["workspace"] being for it. Raises ValueError for raw rows where scores
    are recomputed.
    """
    q, k, v, scan = args["q"], args["k"], args["v"], variant or chosen(args)
    if scan.recompute and "raw_qk" in args:
        raise ValueError(f"{scan.kernel} takes normalised rows of q and k: use {replace(scan, recompute=False).kernel}")
    heads_k, dim = k.shape[-2:]
    shared = PREPARATIONS[scan.preparation]
    kernel = cuda.load(SOURCE, scan.preparation, v.device.index or 0, shared)
    tensors = (q, k, args["g"], args["beta"], args["chunks"], args["workspace"])
    numbers = (heads_k, v.shape[-2], int("raw_qk" in args))
    converted = [args.get(f"{x}_fp16", cuda.i64(0)) for x in ("q", "k")]
    arguments: list[Any] = [*tensors, cuda.f32(dim**-0.5), *map(cuda.i32, numbers), *converted]
    cuda.launch(kernel, (args["chunks"].shape[0], heads_k), 128, arguments, shared)


def _map(x: torch.Tensor) -> bytes:
    heads, dim = x.shape[-2:]
    rows = x.numel() // (heads * dim)
    # 256 would fetch what lies beside a box too: other halves of the heads, whose own boxes come when they come.
    return cuda_driver.tensor_map(x.data_ptr(), TYPES[x.dtype], rows, heads * dim, CHUNK, promotion_bytes=128)


def scan_chunks(args: Tensors, out: Tensors, variant: ScanVariant | None = None, programmatic: bool = True) -> None:
    """Outputs and final states from a prepared workspace."""
    q, k, v = args.get("q_fp16", args["q"]), args.get("k_fp16", args["k"]), args["v"]
    initial, o, scan = args["initial_state"], out["o"], variant or chosen(args)
    heads_k, (heads_v, dim), sequences = k.shape[-2], v.shape[-2:], args["chunk_offsets"].numel()
    kernel = cuda.load(SOURCE, scan.kernel, v.device.index or 0, scan.shared_bytes)
    tensors = (q, k, v, args["workspace"], initial, out["final_state"], o, args["cu_seqlens"], args["chunk_offsets"])
    numbers = (heads_k, heads_v, 0 if initial.dtype == torch.bfloat16 else 2)
    maps = map(_map, (k, q, v, v if scan.dtype == WIDE else o))
    arguments: list[Any] = [*maps, *tensors, *map(cuda.i32, numbers), cuda.f32(dim**-0.5)]
    grid = (dim // (64 * scan.groups), heads_v, sequences)
    cuda.launch(kernel, grid, scan.threads, arguments, scan.shared_bytes, programmatic)


def prefill_at_once(args: Tensors, out: Tensors) -> None:
    """Outputs and final states in one launch; args as `in_order` completes them. May be captured and replayed."""
    q, k, v, initial, o = args["q"], args["k"], args["v"], args["initial_state"], out["o"]
    heads_k, (heads_v, dim) = k.shape[-2], v.shape[-2:]
    kernel = cuda.load(FUSED, f"gdn_fused_d{dim}_{TYPES[v.dtype]}", v.device.index or 0, FUSED.shared_of(""))
    tensors = (q, k, v, args["g"], args["beta"], args["workspace"], initial, out["final_state"], o)
    tables = [args[name] for name in ("blocks", "units", "sync")]
    scans = 2 * args["chunk_offsets"].numel() * heads_v
    state = 0 if initial.dtype == torch.bfloat16 else 2
    numbers = (heads_k, heads_v, args["chunks"].shape[0], scans, state, int("raw_qk" in args))
    arguments: list[Any] = [*map(_map, (k, q, v, o)), *tensors, *tables, cuda.f32(dim**-0.5), *map(cuda.i32, numbers)]
    cuda.launch(kernel, (args["blocks"].shape[0],), 128 * order.TEAMS, arguments, FUSED.shared_of(""))


def _run(args: Tensors, out: Tensors) -> None:
    if "sync" in args:
        prefill_at_once(args, out)
        return
    prepare_chunks(args)
    scan_chunks(args, out)


def _refuses(workload: Workload) -> str:
    if workload["op"] != "prefill":
        return f"op = {workload['op']}: cuda_scan does prefill; decode is cuda_decode's or recurrent_decode's"
    if workload["D"] not in (64, 128):
        return f"D = {workload['D']}: scan.cu is instantiated for D = 64 and 128"
    if workload["dtype"] == "f32":
        return "dtype = f32: the scan is for 16-bit q, k and v"
    if workload["Hv"] > HEADS * workload["Hk"]:
        return f"Hv = {workload['Hv']} is more than {HEADS} times Hk = {workload['Hk']}"
    return ""


def refuses(workload: Workload) -> str:
    """Prefill of 16-bit activations with D = 64 or 128, outputs in their type."""
    if workload.axes.get("out_dtype", workload["dtype"]) != workload["dtype"]:
        return f"out_dtype = {workload['out_dtype']}: cuda_scan_fp16's"
    return _refuses(workload)


def refuses_wide(workload: Workload) -> str:
    """Prefill of bf16 activations with D = 128, outputs in float32."""
    kind = (workload["dtype"], workload.axes.get("out_dtype", workload["dtype"]), workload["D"])
    if workload["op"] == "prefill" and kind != ("bf16", "f32", 128):
        return "dtype = {}, out_dtype = {}, D = {}: cuda_scan_fp16 is for bf16, f32 and 128".format(*kind)
    return _refuses(workload)


def describe(workload: Workload) -> str:
    """The launch choice in one line."""
    name = WIDE if "out_dtype" in workload.axes else str(workload["dtype"])
    lengths = [int(n) for n in str(workload["lengths"]).split("-") if n] or [workload["T"]] * workload["batch"]
    if fuses(len(lengths), workload["Hv"], workload["D"], name):
        made = order.make([0, *accumulate(lengths)], workload["Hk"], workload["Hv"], SMS)
        return f"chunks of {CHUNK}, gdn_fused_d{workload['D']}_{name}, {made}"
    raw = bool(workload.axes.get("qk_l2norm"))
    return f"chunks of {CHUNK}, {choose_config(len(lengths), workload['Hv'], workload['D'], name, raw).kernel}"


def work(workload: Workload, sms: int) -> Work:
    """The scans' chain, chunk by chunk in waves of half a head or one per block, beside or behind the preparation.

    A team prepares a unit, the chunk of a k head and of its v heads, in the time of order.CHUNKS_A_UNIT chunks.
    """
    name = WIDE if "out_dtype" in workload.axes else str(workload["dtype"])
    count, dim, heads_k, heads_v = sequences(workload), workload["D"], workload["Hk"], workload["Hv"]
    longest, states = -(-workload["T"] // CHUNK), 2.0 * state_bytes(workload)
    units, unit = longest * count * heads_k, 3000.0 * (1 + heads_v / heads_k)
    moved, clocks = cost(workload, "bf16").bytes - states, state_clocks(workload, 64, sms)
    if fuses(count, heads_v, dim, name):
        _, ahead, preparing = order.shares(units, longest, 2 * count * heads_v, sms)
        beside = {"bytes": moved, "chunks": 1500.0 * longest, "units": unit * units / (order.TEAMS * preparing)}
        return Work(beside, {"launches": 1.0, "bytes": states, "states": clocks, "first": unit * ahead})
    variant = choose_config(count, heads_v, dim, name, bool(workload.axes.get("qk_l2norm")))
    steps = chain_steps(workload, CHUNK, 64 * variant.groups, sms) * (1.0 if variant.groups == 2 else HALF)
    at_once = {"bytes": moved + 2.0 * variant.block_bytes * longest * count * heads_v, "steps": 2000.0 * steps}
    prepared = {"first": unit, "preparation": unit * units / (order.TEAMS * sms)}
    return Work(at_once, {"launches": 2.0, "bytes": states, "states": clocks, **prepared})


CANDIDATES = (
    Candidate(
        name="cuda_scan",
        precision="bf16",
        run=_run,
        needs=Needs((9, 0), packages=("cupy",)),
        prepare=_prepare,
        refuses=refuses,
        config=describe,
        work=work,
    ),
    Candidate(
        name="cuda_scan_fp16",
        precision="fp16",
        run=_run,
        needs=Needs((9, 0), packages=("cupy",)),
        prepare=_prepare_wide,
        refuses=refuses_wide,
        config=describe,
        work=work,
    ),
)
