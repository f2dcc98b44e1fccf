"""One program a row and block of columns. Runs in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.common import Build, Candidate, Needs, Tensors, Workload, interpreted
from kernels.rounding import round_output

BLOCK = 1024


@triton.jit
def row_scale(x_ptr, w_ptr, y_ptr, n, block: tl.constexpr, interpreted: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < n
    x = tl.load(x_ptr + row * n + at, mask=inside).to(tl.float32)
    w = tl.load(w_ptr + at, mask=inside).to(tl.float32)
    tl.store(y_ptr + row * n + at, round_output(x * w, y_ptr.dtype.element_ty, interpreted), mask=inside)


def run(args: Tensors, out: Tensors) -> None:
    m, n = args["x"].shape
    row_scale[(m, triton.cdiv(n, BLOCK))](args["x"], args["w"], out["y"], n, BLOCK, interpreted())


def config(workload: Workload) -> str:
    """The launch in one line; a row keeps it, and another one later makes that row a former kernel's."""
    return f"{workload['M']} x {triton.cdiv(workload['N'], BLOCK)} programs of {BLOCK} columns"


def builds(capability: int) -> tuple[Build, ...]:
    """What `lab compile` builds ahead of time, without a GPU."""
    signature = {"x_ptr": "*bf16", "w_ptr": "*bf16", "y_ptr": "*bf16", "n": "i32"}
    constant = {"block": BLOCK, "interpreted": False}
    signature |= dict.fromkeys(constant, "constexpr")
    return (Build(f"row_scale {BLOCK}", row_scale, signature, constant, aligned=("x_ptr", "w_ptr", "y_ptr")),)


CANDIDATES = (
    Candidate(name="triton_rows", precision="f32", run=run, needs=Needs(triton="3.6"), config=config, builds=builds),
)
