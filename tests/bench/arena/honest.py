"""What the adversaries stand beside: an honest control, and an arm that is only wrong."""

from __future__ import annotations

from kernels.common import Candidate
from tests.bench.arena.family import honest, launch, made


def plain() -> Candidate:
    """x @ w."""
    return made(honest)


def plain_again() -> Candidate:
    """x @ w."""
    return made(honest)


def zeros() -> Candidate:
    """Zeros, in no time."""
    return made(lambda args, out: launch(args, lambda: out["y"].zero_()))
