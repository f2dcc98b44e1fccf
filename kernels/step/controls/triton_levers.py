"""Each lever of a step as a candidate: the configurations of config.NAMED, one change each, and the staircase."""

from __future__ import annotations

from dataclasses import replace

from kernels.step.config import NAMED
from kernels.step.triton_served import made

CANDIDATES = tuple(replace(made(name, config), no_route="one change to another arm") for name, config in NAMED.items())
