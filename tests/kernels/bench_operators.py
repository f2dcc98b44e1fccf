"""Host time of an eager call without a GPU: `python -m tests.kernels.bench_operators`.

Microseconds of the calling thread, the least of many rounds: our operator and module with a driver that launches
nothing (stub_driver.py), which leaves what Python, torch's dispatcher and its allocation on a CPU take. On a GPU: the
cards host-time-*.
"""

import math
import sys
import time
from collections.abc import Callable

import torch

from kernels.nvfp4 import cuda_decode, ops
from kernels.nvfp4 import format as fmt
from tests.kernels import stub_driver

CALLS, ROUNDS = 20, 400
SHAPE = (1, 4096, 2048)


def host_us(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The least host time of each call in us over rounds in turn: other work on the machine only adds to it."""
    seen = dict.fromkeys(calls, math.inf)
    for _ in range(ROUNDS):
        for name, call in calls.items():
            began = time.perf_counter_ns()
            for _ in range(CALLS):
                call()
            seen[name] = min(seen[name], (time.perf_counter_ns() - began) / CALLS / 1e3)
    return seen


def main() -> int:
    """Print the table; see the module."""
    m, n, k = SHAPE
    candidate = next(c for c in cuda_decode.CANDIDATES if c.name == "cuda_decode")
    weight = fmt.quantise(torch.randn(n, k))
    x = torch.randn(m, k, dtype=torch.bfloat16)
    given = {"x": x, "w_packed": weight.packed, "w_scale": weight.scale, "w_tensor_scale": weight.tensor_scale}
    args = candidate.prepare(given)
    y, operands = torch.empty(m, n, dtype=x.dtype), [args["w"], args["w_tensor_scale"]]
    config = cuda_decode.choose_ring(m, n, k, "bf16")
    call, route = torch.ops.killgate.nvfp4_linear.default, "cuda_decode w w_tensor_scale"
    module = ops.Linear(weight.packed, weight.scale, weight.tensor_scale)
    module.parts = [(last, route, operands, []) for last, *_ in module.parts]
    with torch.no_grad(), stub_driver.stubbed(stub_driver.compiled(), {"cuda_decode": candidate}):
        cuda_decode.configured = lambda *_: config  # type: ignore[assignment]
        found = host_us(
            {
                "operator, planned": lambda: call(x, operands, [], route, n),
                "module, planned": lambda: module(x),
                "candidate's run": lambda: candidate.run(args, {"y": y}),
                "an empty torch operator": lambda: torch.ops.aten.alias.default(x),
            }
        )
    for name, us in found.items():
        print(f"{name:24} {us:6.1f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
