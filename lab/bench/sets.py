"""What arms run on: the argument sets of one workload, made and drawn anew by the harness.

A set is the inputs and outputs of one call. An arm has as many as the L2 state asks for; what all sets of all arms
share is made once, and nobody may write it.
"""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lab.bench import sampling
from lab.bench.apart import Hands
from lab.bench.backend import Backend, added_bytes
from lab.check import accuracy, families

if TYPE_CHECKING:
    from lab.bench.comparison import Job


@dataclass(frozen=True)
class Bench:
    """One workload of a family on a backend, as a job asks for it.

    held: what all sets of all arms share, where the family's cases have it (`kernels.common.Cases.held`), made at its
    first use; marks: what `fingerprint` said of it then. made: of a brief comparison, each set's inputs by their seed.
    """

    job: Job
    backend: Backend
    family: families.Family
    workload: Any
    hands: Hands | None = None
    held: dict[str, Any] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    secret: int = field(default_factory=lambda: secrets.randbits(48))
    made: dict[int, dict[str, Any]] = field(default_factory=dict)

    def inputs(self, seed: int) -> dict[str, Any]:
        """The workload's inputs of a seed, the shared ones the same tensors each time."""
        cases: Any = self.family.cases
        device = self.backend.device
        if not hasattr(cases, "held"):
            made: dict[str, Any] = cases.inputs(self.workload, seed, device)
            return made
        if not self.held:
            for name, tensor in cases.held(self.workload, device).items():
                self.held[name] = self.hands.shelf.tensor(tensor) if self.hands else tensor
                self.marks[name] = accuracy.fingerprint(self.held[name], self.secret)
        return self.held | cases.own(self.workload, seed, device)

    def of_set(self, seed: int) -> dict[str, Any]:
        """`inputs`, of a brief comparison drawn once for all arms; who writes to them takes copies."""
        if not self.job.brief:
            return self.inputs(seed)
        if seed not in self.made:
            self.made[seed] = self.inputs(seed)
        return self.made[seed]

    def changed(self) -> str:
        """ "" or what a candidate did to the shared inputs, which nobody may write."""
        found = [n for n, tensor in self.held.items() if accuracy.fingerprint(tensor, self.secret) != self.marks[n]]
        return f'the candidate changed its input "{found[0]}"' if found else ""


# A call that moves so many times the cache finds at most a hundredth of its bytes there, left by the call before.
ALONE_FACTOR = 100


def armed(bench: Bench, candidate: Any, arm: sampling.Arm, room_bytes: float, first_seed: int) -> bool:
    """Give an arm its sets, as many as the L2 state asks for and `room_bytes` holds; returns whether fewer would do.

    prepare_us is the wall clock's, the device idle before and done after, the fastest over the sets: what packing at
    load costs once memory is at hand. Compiling is over by then, since the check has prepared before. An arm in a
    process of its own prepares there.
    """
    job, backend = bench.job, bench.backend
    moved = bench.family.cost(bench.workload, candidate.precision).bytes
    count = sampling.sets_for(moved, backend.l2_bytes, job.l2)
    fewest = 2 if job.l2 == "cold" and moved < ALONE_FACTOR * backend.l2_bytes else 1
    count = min(count, max(fewest, int(min(room_bytes / max(moved, 1.0), count))))
    fastest_s = math.inf
    arm.turn, arm.made = 0, first_seed
    for number in range(count):
        inputs = bench.of_set(first_seed + number)
        if job.brief:
            inputs = {key: value if key in bench.held else value.clone() for key, value in inputs.items()}
        own = accuracy.outputs(bench.family, candidate, bench.workload, inputs, first_seed + number)
        if bench.hands:
            inputs, own = (
                {key: value if key in bench.held else bench.hands.shelf.tensor(value) for key, value in t.items()}
                for t in (inputs, own)
            )
            args, out = inputs, own
        else:
            backend.wait()
            began = time.perf_counter()
            args, out = accuracy.prepared(bench.family, candidate, inputs), accuracy.handed(own)
            backend.wait()
            fastest_s = min(fastest_s, time.perf_counter() - began)
            arm.prepare_us, arm.prepared_bytes = 1e6 * fastest_s, added_bytes(args, inputs)
        arm.sets.append((args, out))
        arm.inputs.append(inputs)
        arm.outputs.append(own)
    return count > fewest


def stir(bench: Bench, arm: sampling.Arm) -> None:
    """Draw every activation anew and set states back, so that no answer of an earlier visit is one of the next.

    Values that are the old ones times a number would not do: of a product an arm could scale its old answer.
    """
    arm.stirred = secrets.randbits(48)
    for number, (inputs, own) in enumerate(zip(arm.inputs, arm.outputs, strict=True)):
        for name, fresh in drawn(bench, arm.stirred + number).items():
            inputs[name].copy_(fresh)
        accuracy.fill(bench.family, inputs, own, 0, "left")


def drawn(bench: Bench, seed: int) -> dict[str, Any]:
    """The floating-point activations of a seed: by the family's `activations` where it has one, which is quicker."""
    cases = bench.family.cases
    made = getattr(cases, "activations", cases.inputs)(bench.workload, seed, bench.backend.device)
    return {name: t for name, t in made.items() if name in cases.ACTIVATIONS and t.is_floating_point()}
