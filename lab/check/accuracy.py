"""Is a candidate right? Every candidate is held against its family's reference on fresh inputs before anyone times it.

Two numbers per output, against the family's tolerance and the rounding of the output's own type: the relative error
||out - ref|| / ||ref|| in the Frobenius norm (its square is the NMSE), and the largest single error over the root mean
square of the reference, which is what catches one wrong element among millions. Outputs arrive full of NaN and finite
junk, so a partial write fails; NaN never passes; an output of zeros has a relative error of exactly 1. In-place outputs
are cloned from the inputs instead. On the CPU bytes behind each output are watched, so that a store past its end fails.

A candidate gets tensors of its own over the memory of inputs and outputs. What it puts in their places or does to them
as objects reaches nobody, and is an error of its own (`misused`): values are read from the harness's own tensors.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lab.base.errors import BadInput, nearest, reason
from lab.check import families
from lab.row.records import Status

if TYPE_CHECKING:  # kernels/ is imported late, so that a package that shadows it is told in one line
    from kernels.common import Candidate, Layout, Tensors, Tolerance, Workload


class Elsewhere(Exception):
    """What a candidate threw in a process of its own: its type and message, or how the process ended, in one line."""


STORED = 1.01  # the two errors are independent in the mean only
KEEP = "KILLGATE_CHECKS"  # a folder for the checks of one `lab verdicts`, which its processes share


@dataclass(frozen=True)
class Error:
    """How far one output lies from the reference; limits as in the family's Tolerance."""

    output: str
    relative_error: float
    relative_limit: float
    max_error: float
    max_limit: float

    @property
    def nmse(self) -> float:
        """||out - ref||^2 / ||ref||^2."""
        return self.relative_error**2

    @property
    def ok(self) -> bool:
        """True when both errors are within their limits; NaN is never within."""
        return self.relative_error <= self.relative_limit and self.max_error <= self.max_limit


@dataclass(frozen=True)
class Check:
    """One candidate on one workload. status: ok, incorrect, error or skipped (message says why)."""

    family: str
    candidate: str
    workload: str
    precision: str
    status: Status
    message: str = ""
    errors: tuple[Error, ...] = ()
    seconds: float = field(default=0.0, repr=False)  # a notebook that runs again stays as it was

    def to_json(self) -> dict[str, Any]:
        """The object that `lab check --json` prints."""
        return {**asdict(self), "relative_error": self.relative_error}

    @property
    def relative_error(self) -> float | None:
        """The largest relative error over the outputs, NaN when one is, None when nothing was computed."""
        found = [e.relative_error for e in self.errors]
        return next((e for e in found if math.isnan(e)), max(found, default=None))


def compare(
    name: str, out: Any, reference: Any, tolerance: Tolerance, moved: float = 0.0, apart: float = 0.0,
    parted: bool = False,
) -> Error:  # fmt: skip
    """Errors of one output tensor against the reference tensor (any dtypes and devices; compared in float64).

    The limits are the tolerance's, which is for computing, and what storing the reference itself in `out`'s type costs:
    its relative error in quadrature, as the two are independent, and half a unit in the last place of its largest
    element. So nothing in between can hide behind the rounding of a 16-bit output. A limit of 0 asks for equal values.
    moved: how often, in the mean, an element of a state was stored a unit in the last place away (see `judged`). A unit
    is sqrt(12) times the rms of a rounding; of all elements less than one in a thousand states moved by more of them.
    apart: the relative error by which two states that the next call reads may have drifted apart (see `judged`).
    parted: this is such a state of 16 bits, or an output computed from one: a single element is refused where its error
    is more than the largest element of the reference.
    Raises BadInput when the shapes differ. A reference that is all zero is compared in absolute terms.
    """
    import torch

    if tuple(out.shape) != tuple(reference.shape):
        what = f"shape {tuple(out.shape)} differs from the reference's {tuple(reference.shape)}"
        raise BadInput(name, what, "give the family's `outputs` and its reference one shape")

    kinds = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    coarse = tolerance.relative_error and out.dtype in kinds
    # (norm, largest) by part: of a state of gigabytes float64 would not fit, and the reference comes from the host.
    of_wanted, of_error, of_stored = [(0.0, 0.0)], [(0.0, 0.0)], [(0.0, 0.0)]
    for got, part in zip(*(t.flatten().split(COMPARED_ELEMENTS) for t in (out, reference)), strict=True):
        if part.numel():
            wanted = part.to(out.device).double()
            of_wanted.append(_norms(wanted))
            of_error.append(_norms(got.double() - wanted))
            of_stored += [_norms(wanted.to(out.dtype).double() - wanted)] if coarse else []
    norm, peak = _joined(of_wanted)
    rms = norm / math.sqrt(max(reference.numel(), 1)) or 1.0
    # NaN in `out` makes max() and vector_norm NaN: both comparisons in Error.ok are then false.
    error, largest = _joined(of_error)
    limit, highest = tolerance.relative_error, tolerance.max_error
    if coarse:
        stored, kind = _joined(of_stored)[0] / (norm or 1.0), torch.finfo(out.dtype)
        # Else the reference is too large for the type, where some saturate, or so small that zeros would pass.
        if peak <= kind.max * (1 + kind.eps / 4) and STORED * stored < 1:
            highest += apart * highest / limit  # the tolerance's own ratio of largest to rms error
            limit = STORED * math.hypot(limit, stored * math.sqrt(1 + 12 * moved), apart)
            units, expected = 0, float(out.numel()) if moved else 0.0
            while expected > 1e-3:  # Poisson's tail, its first term
                units += 1
                expected *= moved / units
            highest += (0.5 + units) * kind.eps * max(peak, kind.smallest_normal) / rms
            highest = max(highest, peak / rms) if parted else highest
    return Error(name, error / (norm or 1.0), limit, largest / rms, highest)


def _norms(part: Any) -> tuple[float, float]:
    import torch

    return torch.linalg.vector_norm(part).item(), part.abs().max().item()


def _joined(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(norm, largest) of all parts; NaN where one of them is."""
    largest = math.nan if any(math.isnan(most) for _, most in parts) else max(most for _, most in parts)
    return math.hypot(*(norm for norm, _ in parts)), largest


def prepared(family: families.Family, candidate: Candidate, inputs: Tensors) -> Tensors:
    """What a candidate's `run` is given: what its `prepare` returned, and the activations under their own names.

    `prepare` is given weights and caches as they are, and of each activation a tensor on the device "meta": shape,
    strides and type can be read, values do not exist. So no answer and no copy of an activation is made outside the
    timing. Raises ValueError where a tensor without values is left in what `prepare` returned.
    """
    inputs = handed(inputs)
    given = {name: inputs[name] for name in family.cases.ACTIVATIONS if name in inputs}
    args = candidate.prepare(inputs | {name: tensor.to("meta") for name, tensor in given.items()}) | given
    for name, value in args.items():
        if getattr(value, "is_meta", False):
            remedy = "allocate on `device_of(inputs)`, and take activations from `args` in `run`"
            raise ValueError(f'`prepare` returned "{name}" on the device "meta", without values: {remedy}')
    return args


def handed(tensors: Tensors) -> Tensors:
    """The same memory under tensors of a candidate's own: an attribute set on one of them does not reach ours."""
    return {name: tensor.detach() for name, tensor in tensors.items()}


# What stands in the outputs before a run, and which candidate would pass without it:
#   mixed   half of the elements NaN, the others finite junk, which of them drawn from the seed. One that writes a part
#           leaves NaN there; one that writes only where NaN stands leaves the junk.
#   finite  junk alone, on inputs just seen. One that works when it sees a NaN or other inputs leaves everything.
#   left    what the run before left. One that works only while its last answer is not there, as it is in every timed
#           run but the first, leaves the answer to other inputs.
# The check before the timing fills once, "mixed": who does nothing there without a NaN gains nothing by it. The check
# after the timing goes through all three.
FILLS = ("left", "finite", "mixed")
FINGERPRINT_WORDS = 1 << 24  # of four bytes, that are looked at together
COMPARED_ELEMENTS = 1 << 26  # in float64 at once
GUARD_BYTES = 1 << 16  # behind each output on the CPU: more than a tile, so that a store without a mask stays inside
PINNED_BYTES = 1 << 33  # of a tensor: 128 states of six layers in float64 are 4.8 GB
SPARE_SHARE = 0.4  # of the GPU's memory, for the sets of all arms and for what the reference works in


def outputs(
    family: families.Family, candidate: Candidate, workload: Workload, inputs: Tensors, seed: int = 0
) -> Tensors:
    """What a candidate is to write, laid out as it asks and filled "mixed"; it is given them by `handed`."""
    made = family.cases.outputs(workload, inputs)
    made = {n: _laid_out(t, candidate.layouts[n]) if n in candidate.layouts else t for n, t in made.items()}
    fill(family, inputs, made, seed)
    return made


def _laid_out(tensor: Any, layout: Layout) -> Any:
    first, *others = (tensor.shape[d] for d in layout.order)
    room = tensor.new_zeros(layout.ahead + first, *others)
    return room[layout.ahead :].permute([layout.order.index(d) for d in range(tensor.dim())]).copy_(tensor)


def fill(family: families.Family, inputs: Tensors, own: Tensors, seed: int, how: str = "mixed") -> None:
    """Write over outputs as one of FILLS says; what is updated in place becomes the input again."""
    for number, (name, tensor) in enumerate(own.items()):
        if name in family.cases.IN_PLACE:
            tensor.copy_(inputs[name])
        elif how != "left":
            _junk(tensor, seed + number, nan=how == "mixed")


def _junk(tensor: Any, seed: int, nan: bool) -> None:
    import torch

    random = torch.Generator(tensor.device).manual_seed(seed)
    if not tensor.is_floating_point():
        tensor.random_(generator=random)
        return
    values = torch.randn(tensor.shape, generator=random, device=tensor.device)
    if nan:
        values[torch.rand(tensor.shape, generator=random, device=tensor.device) < 0.5] = math.nan
    tensor.copy_(values)


def guarded(own: Tensors, seed: int) -> tuple[Tensors, Tensors]:
    """(the same outputs, each the front of a larger storage; by name the bytes behind it), the latter random."""
    import torch

    random = torch.Generator().manual_seed(seed)
    made, guards = {}, {}
    for name, tensor in own.items():
        size = tensor.untyped_storage().nbytes()
        room = torch.randint(256, (size + GUARD_BYTES,), dtype=torch.uint8, generator=random)
        room[:size] = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        place = room.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        made[name] = torch.empty(0, dtype=tensor.dtype).set_(*place)
        guards[name] = room[size:]
    return made, guards


def overrun(guards: Tensors, before: Tensors) -> str:
    """ "" or behind the end of which output a candidate wrote; `before`: copies of the guards."""
    for name, guard in guards.items():
        if not same_bits(guard, before[name]):
            at = int((guard != before[name]).nonzero()[0])
            return f"{name}: written past its end, {at} bytes behind the last element"
    return ""


def misused(own: Tensors, given: Tensors, inputs: Tensors) -> str:
    """ "" or what a candidate did to the outputs that it was given; `own`: ours over the same memory.

    Each must still be an exact torch.Tensor, of the type, shape and strides and on the memory that was handed out, and
    share none with an input or another output.
    """
    import torch

    for name, ours in own.items():
        if name not in given:
            return f'the output "{name}" is gone'
        tensor = given[name]
        if type(tensor) is not torch.Tensor:  # a subclass may compute when it is read
            return f"{name}: a {type(tensor).__name__}, not a torch.Tensor"
        for what in ("dtype", "shape", "device"):
            if getattr(tensor, what) != getattr(ours, what):
                return f"{name}: {what} {_told(getattr(tensor, what))}, not {_told(getattr(ours, what))}"
        if tensor.stride() != ours.stride():
            return f"{name}: strides {tensor.stride()}, not {ours.stride()}"
        others = [("input", n, t) for n, t in inputs.items()] + [("output", n, t) for n, t in own.items() if n != name]
        for kind, other, theirs in others:
            if _overlap(tensor, theirs):
                return f'{name}: shares its memory with the {kind} "{other}"'
        if tensor.data_ptr() != ours.data_ptr():
            return f"{name}: another tensor stands in the place of the one handed out"
    return ""


def _told(value: Any) -> str:
    return str(tuple(value) if isinstance(value, tuple) else value)


def _overlap(left: Any, right: Any) -> bool:
    a, b = left.untyped_storage(), right.untyped_storage()
    first = left.device == right.device and a.nbytes() and b.nbytes()
    return bool(first) and a.data_ptr() < b.data_ptr() + b.nbytes() and b.data_ptr() < a.data_ptr() + a.nbytes()


def expected(
    family: families.Family, workload: Workload, inputs: Tensors, precision: str, held: Collection[str] = (),
    apart: bool = False,
) -> Tensors:  # fmt: skip
    """The reference's outputs, out of reach, for what `precision` sees of the inputs (its rounding of a cache, say).

    The arms of a comparison are checked on the same bits, and a float64 reference can take longer than all of them: the
    newest results are kept and given out again for a reference and inputs that are the same bit for bit. Those named in
    `held` are the workload's only ones, which the caller watches: they are not read to find that out.
    """
    of = getattr(family.cases, "reference_inputs", lambda _, given, __: given)(workload, inputs, precision)
    own = sorted((name, t) for name, t in of.items() if name not in held)
    key = (family.reference, workload.id, *((name, str(t.dtype), tuple(t.shape), _digest(t)) for name, t in own))
    if key not in _known:
        while len(_known) >= KNOWN:
            del _known[next(iter(_known))]
        _known[key] = {name: out_of_reach(tensor, apart) for name, tensor in family.reference(of).items()}
    return _known[key]


KNOWN = 2  # a comparison asks for two: of the inputs of its check, and of those changed behind its timing
_known: dict[Any, Tensors] = {}
_SECRETS = tuple(secrets.randbits(48) for _ in range(2))  # of this process, like what is known


def forget() -> None:
    """Drop the results kept by `expected`, which may lie on the GPU where sets are about to."""
    _known.clear()


def out_of_reach(tensor: Any, apart: bool = False) -> Any:
    """A tensor's copy where no candidate can reach it.

    On the GPU where each arm has a process of its own (`apart`) and SPARE_SHARE of the memory is free behind it: there
    in a pool of its own, since a process that maps one tensor can read whatever else its allocation holds.
    On the host else; page-locked where it comes from a GPU, since each check fetches it again, but not above
    PINNED_BYTES: the allocator rounds up to a power of two and keeps what it has.
    """
    import torch

    if apart and tensor.is_cuda:
        free, total = torch.cuda.mem_get_info()
        free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # cached, given back when it is asked for
        if free - tensor.nbytes > SPARE_SHARE * total:
            with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
                return tensor.clone()
    if not tensor.is_cuda or tensor.nbytes > PINNED_BYTES:
        return tensor.to("cpu", copy=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _digest(tensor: Any) -> bytes:
    if tensor.is_cuda:  # to copy half a gigabyte of weights to the host, for each arm, took longer than all else
        return b"".join(fingerprint(tensor, secret).to_bytes(8) for secret in _SECRETS)
    return hashlib.blake2b(_bytes(tensor).cpu().numpy(), digest_size=16).digest()


def _bytes(tensor: Any) -> Any:
    """The bytes of a tensor; reshaped first, because one without dimensions cannot be viewed as another type."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(left: Any, right: Any) -> bool:
    """Bitwise equality, so that NaN equals itself."""
    import torch

    same_kind = left.shape == right.shape and left.dtype == right.dtype
    return same_kind and bool(torch.equal(_bytes(left), _bytes(right)))


def fingerprint(tensor: Any, secret: int) -> int:
    """64 bits of a tensor's bytes that somebody without `secret` cannot keep while he changes them.

    The sum modulo 2^64 of each four bytes times an odd number drawn from the secret, for tensors too large to copy.
    """
    import torch

    rng = torch.Generator(device=tensor.device).manual_seed(secret)
    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 4)).view(torch.int32)
    total = 0
    for words in raw.split(FINGERPRINT_WORDS):
        drawn = torch.randint(-(1 << 62), 1 << 62, words.shape, generator=rng, device=words.device) * 2 + 1
        total += int((words.long() * drawn).sum())
    return total % (1 << 64)


def copied(tensors: Tensors) -> Tensors:
    """Tensors as they are now: to see later whether a candidate changed its inputs, say."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def judged(
    family: families.Family, workload: Workload, precision: str,
    kept: Tensors, inputs: Tensors, out: Tensors, wanted: Tensors, calls: int = 1,
) -> tuple[tuple[Error, ...], str]:  # fmt: skip
    """(errors by output, "" or what is wrong) of a candidate's outputs; `kept`: its inputs before it ran.

    calls: so many ran one behind the other on a state that they update; roundings of each, independent, add as squares.
    Where a state's type is coarse, two that differ by `limit` in one call round apart limit / eps of the time, and what
    lies a unit apart stays so. Where the next call computes with the state (the family's RECURRENT), what has rounded
    apart makes more do so, and two right ones drift apart without a bound of that kind. They differ by no more, though,
    than where each rounds for itself, once a call: sqrt(2 calls) eps / 4, in the state and in what comes of it.
    That is so of their norms. An element that fades by half a unit a call stays in one and goes on in the other; it has
    no bound but its own size: 1.2 rms of 25 million on an H200, where the states were 0.26 % apart. A whole head fades
    at one rate, so what is read from it has no other bound either: 0.96 rms of 49 thousand on an H100, 0.8 % apart.
    """
    import torch

    for name, tensor in kept.items():
        if not same_bits(tensor, inputs[name]):
            return (), f'the candidate changed its input "{name}"'
    grown, recurrent = math.sqrt(calls), [n for n in getattr(family.cases, "RECURRENT", ()) if n in out and calls > 1]
    apart = max((math.sqrt(2 * calls) * torch.finfo(out[name].dtype).eps / 4 for name in recurrent), default=0.0)
    parted = any(torch.finfo(out[name].dtype).bits < 32 for name in recurrent)
    errors: tuple[Error, ...] = ()
    for name, one in family.cases.tolerance(workload, precision).items():
        limit = replace(one, relative_error=one.relative_error * grown, max_error=one.max_error * grown)
        moved = 0.0
        if calls > 1 and name in family.cases.IN_PLACE and name not in recurrent:
            kind = out[name].dtype
            eps = torch.finfo(kind).eps if kind.is_floating_point else 1 / torch.iinfo(kind).max
            moved = calls * one.relative_error / eps
        got, right = out[name], wanted[name]
        if of := getattr(family.cases, "PICKS", {}).get(name):
            got, right = (_picked(wanted[of], index) for index in (got, right))
        errors += (compare(name, got, right, limit, moved if moved < 1 else 0.0, apart, parted),)
    for e in errors:
        if not e.ok:
            said = f"relative error {e.relative_error:.2e} (limit {e.relative_limit:.1e})"
            return errors, f"{e.output}: {said}, largest {e.max_error:.2e} rms (limit {e.max_limit:.1e})"
    return errors, ""


def _picked(values: Any, index: Any) -> Any:
    """The values at indices into their last dimension, NaN where there is none of that index."""
    index = index.to(values.device)
    inside = (index >= 0) & (index < values.shape[-1])
    found = values.double().gather(-1, index.where(inside, 0).unsqueeze(-1)).squeeze(-1)
    return found.where(inside, math.nan)


def refuse_unlimited(
    family: families.Family, workload: Workload, precision: str, own: Collection[str], wanted: Collection[str]
) -> None:
    """BadInput where an output has no tolerance, no reference, or a limit that zeros keep: it would not be checked."""
    where, limits = f"kernels/{family.name}/cases.py", family.cases.tolerance(workload, precision)
    for name in own:
        if name not in limits:
            raise BadInput(
                where, f'`tolerance` has no limits for the output "{name}"', f"return a Tolerance for {name}"
            )
        if not limits[name].relative_error < 1:
            what = f"relative_error={limits[name].relative_error} of {name} lets an output of zeros pass"
            raise BadInput(where, what, "derive a limit below 1")
        if name not in wanted:
            told = f'`reference` returns no output named "{name}"'
            raise BadInput(f"kernels/{family.name}/reference.py", told, "return one for each of the family's `outputs`")
    for name in limits:
        if name not in own:
            raise BadInput(where, f'`outputs` makes no output named "{name}"', "make it, or return no limits for it")


def check(
    family: families.Family, candidate: Candidate, workload: Workload, seed: int = 0, device: str = "cpu",
    made: Tensors | None = None, held: Collection[str] = (), apart: bool = False,
) -> Check:  # fmt: skip
    """Hold one candidate against the reference on fresh random inputs; never raises for what the candidate does.

    made: the inputs of that seed, where the caller has them; held: those of them that he watches himself, because they
    are what all arms share and too large to copy. apart: the candidate runs in another process.
    """
    kept = _kept(family, candidate, workload, seed, device)
    if kept is not None and kept.exists():
        return msgspec.json.decode(kept.read_bytes(), type=Check)
    done = _check(family, candidate, workload, seed, device, made, held, apart)
    if kept is not None and done.status == "ok":
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_bytes(msgspec.json.encode(done))
        os.replace(partial, kept)
    return done


def _kept(family: families.Family, candidate: Candidate, workload: Workload, seed: int, device: str) -> Path | None:
    """Where processes of one `lab verdicts` leave each other a check that was ok; None outside of one.

    Of the family's own candidates and workloads only: a spoilt copy of one, as notebooks show it, is another's.
    """
    folder = os.environ.get(KEEP)
    if not folder or candidate is not family.candidates.get(candidate.name) or workload not in family.cases.WORKLOADS:
        return None
    return Path(folder) / f"{family.name}-{candidate.name}-{workload.id}-{seed}-{device}.json"


def _check(
    family: families.Family, candidate: Candidate, workload: Workload, seed: int, device: str, made: Tensors | None,
    held: Collection[str], apart: bool,
) -> Check:  # fmt: skip
    start = time.perf_counter()

    def result(status: Status, message: str = "", errors: tuple[Error, ...] = ()) -> Check:
        seconds = time.perf_counter() - start
        return Check(family.name, candidate.name, workload.id, candidate.precision, status, message, errors, seconds)

    capability = families.gpu_capability() if device != "cpu" else None
    if device == "cpu" and candidate.needs.triton:  # in Triton's interpreter, to which no capability matters
        candidate = replace(candidate, needs=replace(candidate.needs, capability=(0, 0)))
    if unmet := families.unmet(candidate, capability) or candidate.refuses(workload):
        return result("skipped", unmet)
    inputs = family.cases.inputs(workload, seed, device) if made is None else made
    kept = copied({name: tensor for name, tensor in inputs.items() if name not in held})
    own = outputs(family, candidate, workload, inputs, seed)
    own, guards = guarded(own, seed) if device == "cpu" else (own, {})
    before = copied(guards)
    try:
        candidate.run(prepared(family, candidate, inputs), given := handed(own))
    except Exception as error:  # whatever a candidate throws is its own row's status, not ours
        return result("error", str(error) if isinstance(error, Elsewhere) else reason(error))
    wanted = expected(family, workload, inputs | kept, candidate.precision, held, apart)
    refuse_unlimited(family, workload, candidate.precision, own, wanted)
    if wrong := misused(own, given, inputs) or overrun(guards, before):
        return result("incorrect", wrong)
    errors, wrong = judged(family, workload, candidate.precision, kept, inputs, own, wanted)
    return result("incorrect" if wrong else "ok", wrong, errors)


def check_family(
    name: str,
    candidate: str | None = None,
    workload: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    apart: Collection[str] = (),
) -> Iterator[Check]:
    """Every candidate of a family on every small workload it takes, in the family's order.

    candidate: only this one. workload: only this one, a real model's shape too, and then a refusal is shown as a skip.
    apart: candidates that are checked elsewhere.
    """
    family = families.load(name)
    chosen = [family.candidate(candidate)] if candidate else family.candidates.values()
    _refuse_unnamed(family, seed, device)
    for module, why in family.unavailable.items() if candidate is None else ():
        status: Status = "error" if module in family.broken else "skipped"
        yield Check(name, module, "", "", status, f"cannot be imported: {why}")
    for c in chosen:
        small = [w for w in family.cases.WORKLOADS if w.role == "check" and not c.refuses(w)]
        for w in [family.workload(workload)] if workload else small:
            if c.name not in apart:
                yield check(family, c, w, seed, device)


def _refuse_unnamed(family: families.Family, seed: int, device: str) -> None:
    """BadInput where nothing is to be checked, or ACTIVATIONS or IN_PLACE name what no small workload has."""
    where, cases = f"kernels/{family.name}/cases.py", family.cases
    small = [w for w in cases.WORKLOADS if w.role == "check"]
    if not small:
        raise BadInput(where, 'no workload has the role "check"', "add a small one")
    seen: set[str] = set()
    for workload in small:
        if seen >= {*cases.ACTIVATIONS, *cases.IN_PLACE}:
            return
        seen |= cases.inputs(workload, seed, device).keys()
    for what in ("ACTIVATIONS", "IN_PLACE"):
        for name in getattr(cases, what):
            if name not in seen:
                raise BadInput(where, f'{what} names "{name}", which no small workload has', nearest(name, seen))
