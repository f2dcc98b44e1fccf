"""Host time of an eager call, ours against vLLM's Marlin operator: `python -m tests.kernels.bench_operators [--stub]`.

Microseconds of the calling thread, the GPU's time left out: rounds of CALLS calls, the GPU idle before each, ours and
the peer's in turn; the median round. The status is 1 where ours takes longer than the peer. --stub: on any machine, our
operators with a driver that launches nothing (stub_driver.py), which leaves what Python and torch's dispatcher take.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from kernels.nvfp4 import cases, ops
from kernels.nvfp4 import format as fmt

CALLS, ROUNDS = 200, 31
SHAPES = ((1, 4096, 2048), (8, 4096, 2048), (16, 5120, 6144), (128, 5120, 6144))


def host_us(calls: dict[str, Callable[[], object]], settle: Callable[[], None]) -> dict[str, float]:
    """Median host time of each call in us; `settle` empties the GPU's queue."""
    seen: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            call()
            settle()
            began = time.perf_counter_ns()
            for _ in range(CALLS):
                call()
            seen[name].append((time.perf_counter_ns() - began) / CALLS / 1e3)
            settle()
    return {name: statistics.median(values) for name, values in seen.items()}


def stub() -> int:
    """Ours alone, without a GPU."""
    from kernels.nvfp4 import cuda_decode
    from tests.kernels import stub_driver

    m, n, k = SHAPES[0]
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
            },
            lambda: None,
        )
    for name, us in found.items():
        print(f"{name:24} {us:6.1f} us")
    return 0


def main() -> int:
    """Print the table; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stub", action="store_true", help="without a GPU: a driver that launches nothing")
    if parser.parse_args().stub:
        return stub()
    from kernels.nvfp4.peers import vllm_marlin

    slower = 0
    for m, n, k in SHAPES:
        workload = cases._measure(m, n, k, "")
        inputs = cases.inputs(workload, 0, "cuda")
        linear = ops.Linear(inputs["w_packed"], inputs["w_scale"], inputs["w_tensor_scale"], tokens=(m, m))
        _, route, operands, scratch = linear.parts[0]
        call, x = torch.ops.killgate.nvfp4_linear.default, inputs["x"]
        marlin, out = vllm_marlin.prepare(inputs), cases.outputs(workload, inputs)

        def peer(marlin: dict[str, torch.Tensor] = marlin, m: int = m, n: int = n) -> None:
            vllm_marlin.run(marlin, {"y": marlin["x"].new_empty(m, n)})

        with torch.no_grad():
            calls: dict[str, Callable[[], object]] = {
                "operator": lambda: call(x, operands, scratch, route, n),  # noqa: B023 (called before the next shape)
                "module": lambda: linear(x),  # noqa: B023
                "marlin": peer,
                "marlin, y given": lambda: vllm_marlin.run(marlin, out),  # noqa: B023
            }
            found = host_us(calls, torch.cuda.synchronize)
        slower += found["operator"] > found["marlin"]
        print(f"M={m} N={n} K={k} {route.split()[0]}: " + ", ".join(f"{a} {us:.1f} us" for a, us in found.items()))
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main())
