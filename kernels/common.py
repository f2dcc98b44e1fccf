"""What a kernel family says about itself, as plain data that `lab` can read.

A family is a folder `kernels/<family>/` with fixed file names:

    __init__.py   TITLE; light (importing it must need no GPU and no Triton)
    reference.py  reference(inputs) -> outputs        float64 or float32, the simplest right thing, CPU-capable
                  repeated(inputs, calls) -> outputs  of the last of so many calls on what is updated in place, only
                  where that is quicker than one call after the other
    cost.py       cost(workload, precision) -> Cost   flops and compulsory bytes
    cases.py      WORKLOADS, a tuple of Workload
                  inputs(workload, seed, device) -> Tensors
                  outputs(workload, inputs) -> Tensors                  poisoned; what is updated in place is a clone of
                  the input of that name
                  tolerance(workload, precision) -> dict[str, Tolerance]  by output name, one for each
                  ACTIVATIONS, the names of inputs that come anew with every call: `prepare` sees no values of them
                  IN_PLACE, the names of outputs that are updated in place
                  RECURRENT, only where the next call computes with one of these: their names
                  PICKS, only where an output holds indices into the last dimension of another (a token of the logits):
                  that one's name by its own. What the reference has there is compared, so either of two equals is right
                  reference_inputs(workload, inputs, precision) -> Tensors, only where a format loses bits by design:
                  what the reference sees for that precision
                  refuses(workload, precision) -> str, only where a workload is for some precisions: "" or the reason
    triton_*.py   candidates in Triton                each exposes CANDIDATES, a tuple of Candidate
    cuda_*.py     candidates in CUDA C++, the source in a .cu file beside them (CUDA_SOURCES); see kernels/cuda.py
    torch_*.py    candidates that are a framework's own operator
    route.py      where the shape chooses the candidate: one of the modules above
    controls/     modules named the same way, for cards: controls, and levers that change one thing; never routed to
    peers/        a module per library that a user may have, named after it; never routed to
    NOTES.md      floor, design, dead ends, what bounds it now; the results in it are written by `lab write --notes`

The folder listing is the registry: there is no decorator, no base class and no list of families anywhere. A candidate's
name is its own, whichever folder its module lies in, so a module may move and rows and cards still find it.
Inputs and outputs are dictionaries of named tensors, so the reference, every candidate, the checker and the
timer share one calling convention, `run(args, out)`: it only launches, allocates as little as it can and is safe
to capture in a CUDA graph. `out` arrives full of NaN and finite junk, so a partial write fails its check.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]

# The compute capability that a `config` is asked for, where it is not that of the GPU at hand.
asked_capability: ContextVar[tuple[int, int] | None] = ContextVar("asked_capability", default=None)


@contextmanager
def described_for(capability: tuple[int, int]) -> Iterator[None]:
    """Inside, a candidate's `config` says what it would launch on a device of this compute capability."""
    token = asked_capability.set(capability)
    try:
        yield
    finally:
        asked_capability.reset(token)


@dataclass(frozen=True)
class Needs:
    """What a candidate cannot do without; `lab` turns an unmet need into a skip with its reason.

    capability: lowest CUDA compute capability, e.g. (9, 0); (0, 0) also runs on CPU (Triton's interpreter or torch).
    architecture: the only one it runs on, e.g. "sm_90a"; where a module's CUDA_SOURCES are for one, `lab` knows.
    triton:     lowest Triton version, e.g. "3.6"; "" when Triton is not used.
    packages:   import names that must be present, e.g. ("cupy",).
    """

    capability: tuple[int, int] = (0, 0)
    triton: str = ""
    packages: tuple[str, ...] = ()
    architecture: str = ""


@dataclass(frozen=True)
class Workload:
    """Concrete axes of one problem.

    id:     unique within the family and readable, e.g. "m128_n17408_k5120"; it is the repro in a test id or a row.
    axes:   names as in the family's docstring (M, N, K; T, batch, Hk, Hv, D; ctx, Hq, Hkv, page, ...).
    role:   "check" is small enough for Triton's interpreter on two CPU cores (a few seconds at most);
            "measure" is a real model's shape.
    inputs: the distribution of the inputs, in words.
    source: where a real shape comes from, a key of data/models.toml such as "q36-27b.ffn_up".
    """

    id: str
    axes: Mapping[str, int | str]
    role: str = "check"
    inputs: str = "standard normal"
    source: str = ""

    def __getitem__(self, axis: str) -> Any:
        return self.axes[axis]


@dataclass(frozen=True)
class Cost:
    """Arithmetic and compulsory traffic of a workload: every input read once, every output written once.

    flops: floating-point operations, a multiply-add counted as two.
    bytes: compulsory DRAM traffic.
    pipe:  which peak of data/devices.toml the flops run on: "bf16", "fp8", "int8", "fp4", "f32".
    """

    flops: float
    bytes: float
    pipe: str = "bf16"


@dataclass(frozen=True)
class Work:
    """What a candidate's launch makes the device do, as counts, for the model of its time (kernels/timing.py).

    at_once: what runs side by side, so that the slowest binds. in_turn: what follows one another. By name, with these
    units: "launches"; "bytes" through memory, padding and every pass included; "sm_bytes" of the busiest
    multiprocessor; every other name is an estimate in clocks of the busiest multiprocessor.
    """

    at_once: Mapping[str, float]
    in_turn: Mapping[str, float] = field(default_factory=lambda: {"launches": 1.0})


@dataclass(frozen=True)
class Tolerance:
    """How far computing an output may lie from the reference, and why that far.

    What storing it in its own type costs is not in these numbers: the checker rounds the reference itself and adds that
    (`lab.check.accuracy.compare`), so the limit of a 16-bit output is its own rounding and hardly more.

    relative_error: limit on ||out - ref|| / ||ref|| (Frobenius), below 1, which zeros have; its square is the NMSE.
    max_error:      limit on max|out - ref| / rms(ref), so that one wrong element fails too.
    reason:         where the two numbers come from (the format's unit roundoff, the length of the sum).
    """

    relative_error: float
    max_error: float
    reason: str


@dataclass(frozen=True)
class Build:
    """One Triton kernel as a real launch would specialise it, for ahead-of-time compilation without a GPU.

    label:        what the reader sees, e.g. "gemm 128x128x64".
    kernel:       the @triton.jit function (valid only where TRITON_INTERPRET is not set).
    signature:    argument name -> Triton type ("*bf16", "*u8", "i32", "fp32", "constexpr"), in order.
    constexprs:   argument name -> value for every "constexpr" argument.
    aligned:      argument names known to be multiples of 16 (pointers and sizes).
    needs_triton: lowest Triton version that compiles it; older ones show a reason and no row.
    max_registers: most registers a thread may use, 0 for what the compiler takes.
    """

    label: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()
    needs_triton: str = "3.6"
    max_registers: int = 0


@dataclass(frozen=True)
class CudaSource:
    """A CUDA C++ translation unit that candidates compile at first use, and tests compile where nvcc or NVRTC is.

    path:       the .cu file beside the candidate.
    kernels:    extern "C" names in it.
    options:    compiler options beyond the architecture, e.g. ("--std=c++17",).
    capability: lowest compute capability it compiles for.
    architecture: the only one it is for, e.g. "sm_90a" for wgmma; "" compiles for the device it runs on.
    shared_bytes: dynamic shared memory of a launch, the largest of its kernels, or one figure for each of them in
                  their order; the compiler does not see it.
    """

    path: Path
    kernels: tuple[str, ...]
    options: tuple[str, ...] = ("--std=c++17",)
    capability: tuple[int, int] = (8, 0)
    architecture: str = ""
    shared_bytes: int | tuple[int, ...] = 0

    def shared_of(self, kernel: str) -> int:
        """Dynamic shared memory of a launch of one kernel, in bytes."""
        if isinstance(self.shared_bytes, int):
            return self.shared_bytes
        return dict(zip(self.kernels, self.shared_bytes, strict=True))[kernel]


def _same(inputs: Tensors) -> Tensors:
    return inputs


def _accepts(workload: Workload) -> str:
    return ""


def _no_builds(capability: int) -> tuple[Build, ...]:
    return ()


def _no_config(workload: Workload) -> str:
    return ""


@dataclass(frozen=True)
class Layout:
    """How an output lies in memory.

    order: its dimensions, that of the largest stride first. ahead: so many more slices of that one lie before the first
    of the output, zeros when handed out, as a library has them whose row 0 is nobody's.
    """

    order: tuple[int, ...]
    ahead: int = 0


@dataclass(frozen=True)
class Candidate:
    """An implementation under test.

    name:      unique within the family; the word that cards, rows and tests use.
    precision: what is computed in, e.g. "nvfp4-w4a16", "bf16", "fp8-kv", "q8_0-kv".
    run:       run(args, out) -> None. `args` is what `prepare` returned and the activations; every tensor of `out` is
               written in full where it stands, except the names in the family's IN_PLACE, which are updated there.
               No tensor may be put in the place of one of `out`: a library that allocates its own is copied from.
    prepare:   inputs -> args: what is done once at load, or between steps, outside the timing: repacking weights and
               caches, room for workspace. Of activations it sees shape, strides and type: they are
               on the device "meta" there, and no copy or answer can be made of them.
    refuses:   workload -> "" or the reason why this candidate does not take it.
    builds:    compute capability (90, 121, ...) -> the Triton kernels to compile ahead of time for it.
    config:    workload -> the launch choice in one line, stored in the row.
    work:      (workload, multiprocessors) -> the counts that its `config` implies; None for what no router takes.
    layouts:   output name -> how its memory lies, where a library's order is not ours.
    eager:     (args, out) -> outputs by name, as a server calls it without a graph: it allocates what it returns, and
               takes of `out` only what is updated in place. The timer "host" calls it; None where that is `run`.
    no_route:  "" or why no router takes it: an arm that shows a defect or one change to another arm, or whose times do
               not compare with others'.
    """

    name: str
    precision: str
    run: Callable[[Tensors, Tensors], None]
    needs: Needs = Needs()
    prepare: Callable[[Tensors], Tensors] = _same
    refuses: Callable[[Workload], str] = _accepts
    builds: Callable[[int], tuple[Build, ...]] = _no_builds
    config: Callable[[Workload], str] = _no_config
    work: Callable[[Workload, int], Work] | None = None
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    no_route: str = ""
    eager: Callable[[Tensors, Tensors], Tensors] | None = None


class Cases(Protocol):
    """What a family's cases.py holds, for what reads it.

    `reference_inputs`, `refuses`, `activations`, `held` and `own` may be absent. `activations` is `inputs` with
    activations alone, drawn again before every visit of a bench; they need not be those of `inputs` for a seed.
    held(workload, device) is what all calls have in common whatever their seed, too large for each arm of a comparison
    to have its own (a model's weights); own(workload, seed, device) is the rest of `inputs`.
    """

    @property
    def WORKLOADS(self) -> Sequence[Workload]:
        """The problems, small ones to check and real models' shapes to measure."""

    @property
    def ACTIVATIONS(self) -> Sequence[str]:
        """The inputs that a server has only when the call is due, of every workload together.

        The others are what it has at load (weights), between steps (caches, states), or once a step for all layers
        (page tables, lengths).
        """

    @property
    def IN_PLACE(self) -> Sequence[str]:
        """The outputs that are updated where they stand; each has the name of the input that it begins as."""

    def inputs(self, workload: Workload, seed: int, device: str) -> Tensors:
        """Random inputs of a workload, the same for the same seed."""

    def outputs(self, workload: Workload, inputs: Tensors) -> Tensors:
        """What a candidate writes: poisoned, or a clone of what it updates in place."""

    def tolerance(self, workload: Workload, precision: str) -> dict[str, Tolerance]:
        """The limits by output name."""


def interpreted() -> bool:
    """True when Triton kernels run in Triton's interpreter (TRITON_INTERPRET=1), that is on the CPU.

    Kernels take it as a constexpr where the two differ: `tl.dot` on bfloat16 returns garbage in the interpreter
    (seen in Triton 3.6.0, 3.7.1 and 3.9.0), so operands are widened to float32 there, which is exact.
    """
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "True", "on")


def has_triton() -> bool:
    """True when a module named triton can be imported (it is absent on macOS and Windows)."""
    return importlib.util.find_spec("triton") is not None


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """An output tensor in which every element is NaN (the largest value for integer dtypes), to show partial writes."""
    import torch

    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=torch.float32, device=device).to(dtype)
    return torch.full(shape, torch.iinfo(dtype).max, dtype=dtype, device=device)


def positive(text: str) -> int:
    """A whole number from 1 on, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 on")
    return int(text)


def usable_device(device: str) -> str:
    """The device of a command line; raises ValueError for a GPU that is not there."""
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch {torch.__version__} sees no GPU; pass cpu")
    return device


def device_of(inputs: Tensors) -> torch.device:
    """Where workspace belongs: the device of the first input that has values, torch's default where none has any."""
    import torch

    return next((t.device for t in inputs.values() if not t.is_meta), torch.get_default_device())


def library_version(distribution: str) -> str:
    """The version of an installed distribution (its name on the package index), or "(version unknown)"."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "(version unknown)"


def operator_library(package: str, stem: str) -> Path | None:
    """Where a package keeps the compiled operators `stem`*.so, None when it has none; nothing is imported.

    Looks in the package's own folder (a wheel) and in a folder libs/ two levels up (root/shim/package beside
    root/libs: a package cut down to the operators that one comparison needs, whose Python does not start).
    """
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        root = Path(place)
        found = sorted(root.glob(f"**/{stem}*.so")) or sorted((root.parent.parent / "libs").glob(f"{stem}*.so"))
        if found:
            return found[0]
    return None


def load_operators(package: str, stem: str) -> None:
    """Register a package's compiled operators under torch.ops; a second call does nothing. ImportError without them."""
    import torch

    path = operator_library(package, stem)
    if path is None:
        raise ImportError(f"{package} has no compiled library {stem}*.so; install a CUDA build of {package}")
    torch.ops.load_library(str(path))
