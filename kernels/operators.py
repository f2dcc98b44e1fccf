"""What the families' torch operators (kernels/<family>/ops.py) share: the choice of a candidate, and launch plans.

An operator takes tensors, numbers and one string, the route: the candidate's name and the names of the prepared tensors
in the order in which they are passed, such as "cuda_gemm w w_tensor_scale parts flags". A word "!raw_qk" passes no
tensor, only that the name is there. Whoever loads the weights makes both once; so torch.compile sees an operator with a
schema and a fake, a CUDA graph its launches and nothing else. The operators are for inference: none has a derivative.

The first call of a shape goes through the candidate's Python and notes what it launches. Where that was everything it
did (no torch operator, every pointer known), later calls set the addresses and the stream in the finished launches: a
plan. It holds for the shapes, types and addresses it was made for; activations and outputs may move. Tensor maps are
made once for an address. What keeps its operands (a module, a batch) keeps its plans too: it asks of a call only how
the call's own tensors look, and leaves torch's dispatcher out where nothing watches (`direct`). On the CPU an operator
is the family's reference, so that a model can be traced and tested without a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import math
import re
import struct
import threading
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import cuda, cuda_driver, routing
from kernels.common import Candidate, Tensors

LIBRARY = torch.library.Library("killgate", "FRAGMENT")
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
REFERENCE = "reference"  # the route of tensors on the CPU
FOLDER = Path(__file__).resolve().parent
DEVICES = FOLDER.parent / "data" / "devices.toml"
NEAR = 1.05  # times the fastest: as far as two runs of one kernel may lie apart to be compared (lab/study/routes.py)
MOST_PLANS = 8192  # about 2 KB each; beyond it they are made again
NUMBERS = {"GB/s": 1.0, "TB/s": 1e3, "TFLOP/s": 1.0, "TOP/s": 1.0}


def define(schema: str, call: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register `killgate::<schema>` for CPU and CUDA tensors, with what it returns for fake ones."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=TAGS)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, call, key)
    torch.library.register_fake(f"killgate::{name}", fake, lib=LIBRARY)


# The choice of a candidate --------------------------------------------------------------------------------------------


@functools.cache
def candidates(family: str, capability: tuple[int, int]) -> Mapping[str, Candidate]:
    """The candidates in a family's own folder that run on a GPU of this compute capability with what is installed."""
    found = {}
    for path in sorted((FOLDER / family).glob("*.py")):
        if not path.stem.startswith(("cuda_", "triton_", "torch_")):
            continue
        try:
            module = importlib.import_module(f"kernels.{family}.{path.stem}")
        except ImportError:  # Triton is absent, or older than the module needs
            continue
        only = {f"sm_{capability[0]}{capability[1]}a", ""}
        if not {source.architecture for source in getattr(module, "CUDA_SOURCES", ())} <= only:
            continue
        for candidate in getattr(module, "CANDIDATES", ()):
            needs, absent = candidate.needs, [p for p in candidate.needs.packages if not importlib.util.find_spec(p)]
            if needs.architecture in only and needs.capability <= capability and not absent and _triton(needs.triton):
                found[candidate.name] = candidate
    return found


def _triton(lowest: str) -> bool:
    if not lowest:
        return True
    if importlib.util.find_spec("triton") is None:
        return False
    here = importlib.import_module("triton").__version__
    return [int(n) for n in here.split(".")[:2]] >= [int(n) for n in lowest.split(".")[:2]]


@functools.cache
def device_facts(name: str) -> tuple[str, float, Mapping[str, float]]:
    """(id, read bandwidth in GB/s, peaks in TFLOP/s by pipe) of a GPU by the name that its driver reports.

    One that data/devices.toml does not list has the id under which `lab routes --calibrate` stores its table, 0 for a
    bandwidth that is unknown, and no peaks.
    """
    for device, facts in _listed().items():
        if name in (facts.get("name"), *facts.get("aliases", ())):
            known = _known()[device]
            return device, known.read_gb_s, known.peak_tflop_s
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"), 0.0, {}


@functools.cache
def _known() -> Mapping[str, routing.Facts]:
    """What data/devices.toml says of each device, by id."""

    def facts(one: Mapping[str, Any]) -> routing.Facts:
        value = {name: _fact(fact) for name, fact in one.items() if isinstance(fact, dict) and "unit" in fact}
        major, minor = f"{value.get('compute_capability', 0.0):.1f}".split(".")
        peaks = {pipe: _fact(fact) for pipe, fact in one.get("peak", {}).items()}
        capability = int(major), int(minor)
        return routing.Facts(capability, value.get("memory_bandwidth", 0.0), peaks, int(value.get("sms", 0)))

    return {device: facts(one) for device, one in _listed().items()}


@functools.cache
def _listed() -> Mapping[str, Any]:
    return tomllib.loads(DEVICES.read_text(encoding="utf-8")) if DEVICES.exists() else {}


def _fact(fact: Mapping[str, Any]) -> float:
    value = fact["values"][fact.get("use", 0)]["value"] if "values" in fact else fact["value"]
    return float(value) * NUMBERS.get(fact["unit"], 1.0)


def kept_beside(choice: routing.Choice, kept: str) -> bool:
    """Whether `kept` stays where the router chose another: it is expected to take at most NEAR times as long."""
    best = choice.times_us.get(choice.candidate, 0.0)
    return choice.how != "override" and choice.times_us.get(kept, math.inf) <= NEAR * best


def choose(
    router: routing.Router, device: torch.device, precision: str, kept: str = "", /, **axes: int | str
) -> Candidate:
    """The candidate of a precision that a family's router takes for these axes on a CUDA device.

    kept: one that is kept where it is near the fastest, since the weights are packed for it already.
    ValueError where none takes them.
    """
    capability = torch.cuda.get_device_capability(device)
    known, read_gb_s, peaks = device_facts(torch.cuda.get_device_name(device))
    able = {n: c for n, c in candidates(router.family, capability).items() if c.precision == precision}
    workload, _ = router.asked({axis: str(value) for axis, value in axes.items()})
    by_name = (precision,) if precision in router.opt_in or router.stored else ()
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    other = routing.source(known, capability, router.family, _known())
    chosen = routing.route(router, workload, known, tuple(able.values()), read_gb_s, peaks, None, by_name, sms, other)
    return able[kept if kept_beside(chosen, kept) else chosen.candidate]


# Plans ----------------------------------------------------------------------------------------------------------------


Plan = Callable[[Sequence[int], int], None]
Place = tuple[int, Callable[[int], bytes] | None]


def plan_of(
    device: int, launches: Sequence[cuda_driver.Launch], places: Sequence[Sequence[Place | None]], count: int
) -> Plan:
    """The launches of one call, to be repeated with other addresses and on another stream by any thread.

    places: for each argument of each launch (place, None) where it is the address there, (place, make) where it is what
    `make` makes of that address, None where it never changes. count: how many addresses there are.
    """
    # All addresses stand in one block that the launches' arguments point into, so that one call sets them.
    block = (ctypes.c_uint64 * max(count, 1))()
    pack, lock, here = struct.Struct(f"={count}Q").pack_into, threading.Lock(), cuda_driver.Current(device)
    maps: list[list[Any]] = []  # the value, its place, what makes it, the address it is of
    for launch, of_launch in zip(launches, places, strict=True):
        for number, found in enumerate(of_launch):
            if found is None:
                continue
            place, make = found
            if make is None:
                launch.point(number, ctypes.addressof(block) + 8 * place)
            else:
                maps.append([launch.values[number], place, make, 0])

    def repeat(addresses: Sequence[int], stream: int) -> None:
        with lock:
            pack(block, 0, *addresses)
            for entry in maps:
                if (address := addresses[entry[1]]) != entry[3]:
                    entry[0].raw, entry[3] = entry[2](address), address
            if here.now():
                for launch in launches:
                    launch(stream)
            else:
                with cuda_driver.in_context(device):
                    for launch in launches:
                        launch(stream)

    return repeat


class _Watch(TorchDispatchMode):
    """Whether any torch operator was called."""

    called = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called = True
        return func(*args, **(kwargs or {}))


def planned(run: Callable[[], None], moving: Sequence[torch.Tensor], fixed: Sequence[torch.Tensor]) -> Plan | None:
    """Call `run` and return its plan, None where a repetition of its launches alone might not be the same.

    moving: tensors whose addresses may change between calls; fixed: the other tensors that `run` was given.
    """
    notes: list[tuple[cuda_driver.Launch, int, tuple[Any, ...]]] = []
    token = cuda.RECORDED.set(notes)
    try:
        with _Watch() as watch:
            run()
    finally:
        cuda.RECORDED.reset(token)
    places = {t.data_ptr(): i for i, t in enumerate(moving)}
    known = {t.data_ptr() for t in fixed}
    if watch.called or not notes or len(places) < len(moving) or places.keys() & known or 0 in places:
        return None
    given: list[list[Place | None]] = []
    for _, device, arguments in notes:
        given.append([])
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                address, make = argument.data_ptr(), None
            elif isinstance(argument, cuda_driver.TensorMap):
                address, make = argument.address, argument.at
            elif isinstance(argument, bytes) or (argument.nbytes == 8 and int(argument)):
                return None  # what it points to is not known
            else:
                given[-1].append(None)
                continue
            if address in places:
                given[-1].append((places[address], make))
            elif address in known and device == notes[0][1]:
                given[-1].append(None)
            else:
                return None
    return plan_of(notes[0][1], [launch for launch, _, _ in notes], given, len(moving))


class Plans(dict[Any, Plan | None]):
    """Plans by what they were made for. A copy is empty: they hold addresses of this process and of these tensors."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Plans, ()


PLANS = Plans()

# Asked for each eager call: torch keeps no public names for most of them.
_PLAIN = frozenset({torch.Tensor})
_GRADIENTS, _PROFILED = torch.is_grad_enabled, torch.autograd._profiler_enabled
_DISPATCH_MODES, _FUNCTION_MODES = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_TRANSFORMS, _TRACING = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state


def scratch_of(made: Tensors, device: torch.device) -> Tensors:
    """`made`, or one empty tensor where there is none: torch 2.11 cannot compile a change to a list of no tensors."""
    return made or {"none": torch.empty(0, device=device)}


@functools.lru_cache(maxsize=4096)
def _parsed(family: str, route: str) -> tuple[str, tuple[str, ...]]:
    name, *names = route.split()
    return name, tuple(names)


@functools.cache
def _reference(family: str) -> Callable[[Tensors], Tensors]:
    found: Callable[[Tensors], Tensors] = importlib.import_module(f"kernels.{family}.reference").reference
    return found


def index_of(tensor: torch.Tensor) -> int:
    """The index of a tensor's CUDA device, -1 on the CPU."""
    return tensor.get_device()


def direct(*moving: torch.Tensor) -> bool:
    """Whether a call may leave torch's dispatcher out: plain tensors, and nothing compiles, traces, differentiates,
    transforms or profiles what is called.
    """
    if torch.compiler.is_compiling():
        return False
    if _GRADIENTS() or _DISPATCH_MODES() or _FUNCTION_MODES() or _PROFILED() or _TRACING() or _TRANSFORMS() is not None:
        return False
    return _PLAIN.issuperset(map(type, moving))


def facts(*fixed: torch.Tensor) -> tuple[Any, ...]:
    """What a plan holds of tensors that it takes at their addresses."""
    found: list[Any] = []
    for t in fixed:
        found += t.data_ptr(), t.shape, t.dtype, t.is_contiguous()
    return tuple(found)


def known(plans: Plans, moving: Sequence[torch.Tensor], *more: object) -> tuple[Any, Plan | None, list[int]]:
    """(key, plan, addresses) of a call whose other tensors, but for what `more` says, are always those of `plans`.

    The key is None where a tensor is not contiguous. The caller allocates outputs and appends their addresses.
    """
    if len(moving) == 1:  # as below, in two thirds of the time
        (t,) = moving
        if not t.is_contiguous():
            return None, None, []
        address = t.data_ptr()
        key: Any = (address & 15, t.shape, t.dtype, t.get_device(), more)
        return key, plans.get(key), [address]
    addresses: list[int] = []
    aligned, parts = 0, [moving[0].get_device(), *more]
    for t in moving:
        if not t.is_contiguous():
            return None, None, addresses
        addresses.append(address := t.data_ptr())
        aligned |= address
        parts += t.shape, t.dtype
    key = (aligned & 15, *parts)
    return key, plans.get(key), addresses


def perform(
    family: str,
    route: str,
    names: Sequence[str],
    moving: Sequence[torch.Tensor],
    fixed: Sequence[torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    in_place: Mapping[str, torch.Tensor] | None = None,
    plans: Plans | None = None,
    key: Any = None,
) -> None:
    """Run a route: `names` are those of the moving tensors, the route's own words those of `fixed`.

    outputs are new, and written in full. in_place: outputs that are updated where they stand, tensors that `fixed` has
    too. Moving tensors and outputs are contiguous. plans, key: where the plan is kept by a caller who found none under
    a key of `known`; else it is kept by the facts of all tensors.
    Raises ValueError where the route's words and the tensors do not match, and as the candidate does.
    """
    first = moving[0]
    index = index_of(first)
    if plans is None or key is None:
        plans, key = PLANS, None
    if index >= 0 and key is None:
        addresses, aligned = [], 0
        parts: list[Any] = [family, route, index]
        for t in moving:
            addresses.append(address := t.data_ptr())
            aligned |= address
            parts += t.shape, t.dtype
        for t in outputs.values():
            addresses.append(t.data_ptr())
            parts += t.shape, t.dtype
        key = (aligned & 15, *parts, *facts(*fixed))
        if (plan := plans.get(key)) is not None:
            plan(addresses, cuda.stream_of(index))
            return
    name, words = _parsed(family, route)
    named = [word for word in words if word[0] != "!"]
    if len(named) != len(fixed):
        raise ValueError(f'{family}: the route "{route}" names {len(named)} tensors, {len(fixed)} came; pass them all')
    args = {**dict(zip(names, moving, strict=True)), **dict(zip(named, fixed, strict=True))}
    args |= {word[1:]: first for word in words if word[0] == "!"}
    out = {**outputs, **(in_place or {})}
    if name == REFERENCE:
        for key_, value in _reference(family)(args).items():
            out[key_].copy_(value)
        return
    candidate = candidates(family, torch.cuda.get_device_capability(index)).get(name)
    if candidate is None:
        raise ValueError(f"{family}: no candidate {name} runs on this GPU; prepare the operands here once more")
    if key in plans or candidate.needs.triton or torch.compiler.is_compiling():
        candidate.run(args, out)
        return
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = planned(lambda: candidate.run(args, out), (*moving, *outputs.values()), fixed)


def dtype_word(dtype: torch.dtype) -> str:
    """ "bf16", "fp16" or "f32", as workloads write it; ValueError for another type."""
    words = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "f32"}
    if dtype not in words:
        raise ValueError(f"{dtype} is not taken; pass {', '.join(map(str, words))}")
    return words[dtype]
