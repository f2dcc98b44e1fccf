"""Recurrent decode in CUDA C++ (decode.cu): the same single pass as triton_decode, with the loads written down.

A block keeps a [D, V_TILE] slice of a state in registers, every load issued before the first multiply. NOTES.md says
why each form is what it is, and which others lost.
The state is float32 or bf16 in memory and float32 in the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernels import cuda
from kernels.common import Candidate, CudaSource, Needs, Tensors, Workload
from kernels.gdn.launch import checked

FORMATS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # codes in decode.cu
STATES = {torch.float32: "f32", torch.bfloat16: "bf16"}
SMS = 132
FEW_STATES = 1024
# Blocks take sequences in the order of their slots from ORDER_FROM sequences on, where decode.cu's tables hold the ids.
ORDER_FROM, ORDERED_IDS, ORDERED_ROWS = 64, 256, 1024
# An SM holds four blocks, a bf16 head each: WAVE heads are on their way at once, and fetch their own. Those behind them
# are fetched AHEAD_BY heads before their turn, 1.5 blocks an SM, in calls of AHEAD_FROM heads (1.45 waves, the fewest
# tried) to AHEAD_BATCH sequences.
WAVE, AHEAD_BY, AHEAD_FROM, AHEAD_BATCH = 4 * SMS, 3 * SMS // 2, 768, 128


@dataclass(frozen=True)
class DecodeVariant:
    """An instantiation in decode.cu: v_tile columns and warps per block.

    hint: 0 plain, 1 L2 evict-first. form: "r" a thread's rows are consecutive, "t" the threads' rows take turns, "b" so
    they do, for bf16 activations alone, "s" so they do, with k, q, v and the gates in shared memory. prefetch: 1 where
    a block first starts the fetch of its share of the head into L2; above 1 where only the first WAVE heads do, and the
    others are fetched by the block so many heads before. ordered: 1 where blocks take the sequences in the order of
    their slots.
    """

    form: str
    state: str
    dim: int
    v_tile: int
    warps: int
    hint: int
    prefetch: int = 0
    ordered: int = 0

    @property
    def only_bf16(self) -> bool:
        """Whether q, k, v and o must be bf16."""
        return self.form == "b"

    @property
    def kernel(self) -> str:
        """The extern "C" name."""
        tile = f"d{self.dim}_v{self.v_tile}_w{self.warps}"
        return f"gdn_decode_{self.form}_{tile}_{self.state}_h{self.hint}_p{self.prefetch}_o{self.ordered}"


FEW = {"f32": DecodeVariant("r", "f32", 128, 16, 2, 1), "bf16": DecodeVariant("r", "bf16", 128, 32, 2, 1)}
SOME = {"f32": DecodeVariant("s", "f32", 128, 64, 4, 1), "bf16": DecodeVariant("t", "bf16", 128, 128, 4, 1)}
MANY = {"f32": DecodeVariant("s", "f32", 128, 64, 4, 0, 1), "bf16": DecodeVariant("t", "bf16", 128, 128, 4, 0, 1)}
ORDERED = {state: replace(variant, ordered=1) for state, variant in MANY.items()}
AHEAD = {"bf16": replace(MANY["bf16"], form="b", prefetch=AHEAD_BY)}
SMALL = {"f32": DecodeVariant("r", "f32", 64, 64, 4, 0), "bf16": DecodeVariant("r", "bf16", 64, 64, 2, 0)}
VARIANTS = tuple(v for choice in (FEW, SOME, MANY, ORDERED, AHEAD, SMALL) for v in choice.values())
SOURCE = CudaSource(
    path=Path(__file__).with_name("decode.cu"),
    kernels=tuple(v.kernel for v in VARIANTS),
    capability=(9, 0),
    architecture="sm_90a",
)
CUDA_SOURCES = (SOURCE,)


def choose_config(
    batch: int, heads_v: int, dim: int, state: str, rows: int | None = None, bf16: bool = False
) -> DecodeVariant:
    """By the number of states, as trials on an H200 left them: narrow tiles for few, whole rows and no hint for many.

    Evict-first helps while the states of a call fit the L2, and hurts beyond. bf16: the activations are; states in bf16
    are then fetched ahead of their blocks, from AHEAD_FROM heads to AHEAD_BATCH sequences. rows: of the pool; without
    it, or where the ids do not fit the kernel's tables, sequences are taken as they come.
    """
    states = batch * heads_v
    choice = SMALL if dim == 64 else FEW if states < SMS else SOME if states < FEW_STATES else MANY
    if dim == 128 and state in AHEAD and bf16 and states >= AHEAD_FROM and batch <= AHEAD_BATCH:
        choice = AHEAD
    elif choice is MANY and rows is not None and ORDER_FROM <= batch <= ORDERED_IDS and rows <= ORDERED_ROWS:
        choice = ORDERED
    return choice[state]


def _prepare(inputs: Tensors) -> Tensors:
    checked(inputs, ("q", "k", "v", "g", "beta", "state", "state_rows"))
    return inputs


def launch(args: Tensors, state: torch.Tensor, o: torch.Tensor, variant: DecodeVariant | None = None) -> None:
    """One token for each sequence of `args`; `state` [rows, Hv, D, D] is updated at args["state_rows"], `o` written.

    `in_order` (its presence is the message) says that state_rows is 0, 1, 2, ...: the forms for few states then leave
    the ids unread, and no state waits for one; the others need not look for the order.
    Raises ValueError for an ordered `variant` with more ids or rows than its tables hold, and for form "b" without bf16
    activations; the own choice is neither.
    """
    q, v = args["q"], args["v"]
    (batch, heads_v, dim), heads_k = v.shape, q.shape[-2]
    rows = None if "in_order" in args else state.shape[0]
    chosen = variant or choose_config(batch, heads_v, dim, STATES[state.dtype], rows, v.dtype == torch.bfloat16)
    if chosen.ordered and (batch > ORDERED_IDS or state.shape[0] > ORDERED_ROWS):
        limits = f"{ORDERED_IDS} ids in a pool of {ORDERED_ROWS} rows"
        raise ValueError(f"{chosen.kernel} orders up to {limits}, not {batch} in {state.shape[0]}: pass no variant")
    if chosen.only_bf16 and v.dtype != torch.bfloat16:
        raise ValueError(f"{chosen.kernel} takes bf16 activations, not {v.dtype}: pass no variant")
    kernel = cuda.load(SOURCE, chosen.kernel, v.device.index or 0)
    ids = cuda.i64(0) if "in_order" in args and chosen.form == "r" else args["state_rows"]
    tensors = (q, args["k"], v, args["g"], args["beta"], state, ids, o)
    numbers = (batch, heads_k, heads_v, int("raw_qk" in args), FORMATS[v.dtype])
    arguments: list[Any] = [*tensors, cuda.f32(dim**-0.5), *map(cuda.i32, numbers)]
    cuda.launch(kernel, (dim // chosen.v_tile, heads_v, batch), 32 * chosen.warps, arguments)


def _run(args: Tensors, out: Tensors) -> None:
    launch(args, out["state"], out["o"])


def refuses(workload: Workload) -> str:
    """Decode only, with the two head sizes and the two state formats that decode.cu instantiates."""
    if workload["op"] != "decode":
        return f"op = {workload['op']}: cuda_decode does decode; prefill is cuda_scan's or split_pipeline's"
    if workload["D"] not in (64, 128):
        return f"D = {workload['D']}: decode.cu is instantiated for D = 64 and 128"
    return ""


def describe(workload: Workload) -> str:
    """The launch choice in one line."""
    rows = workload["batch"] + int(workload.axes.get("spare", 0))
    axes = (workload["batch"], workload["Hv"], workload["D"], str(workload["state_dtype"]))
    chosen = choose_config(*axes, rows, workload["dtype"] == "bf16")
    return f"float32 arithmetic, {chosen.kernel}"


CANDIDATES = (
    Candidate(
        name="cuda_decode",
        precision="f32",
        run=_run,
        needs=Needs((9, 0), packages=("cupy",)),
        prepare=_prepare,
        refuses=refuses,
        config=describe,
    ),
)
