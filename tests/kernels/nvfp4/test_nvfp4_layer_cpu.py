"""What the layer kernels/sm90 asks of a kernel, and that the stand-in on_cpu/sm90.cuh sees each mistake against it.

A missing proxy fence shows in no number on a CPU by itself, since the memory is one: the stand-in notes who stored to
shared memory and has not fenced, and stops the bulk copy or wgmma that meets it. Phases, arrivals and expected bytes
are changed in the layer itself, so every kernel that walks a pipeline would make that mistake.
"""

import functools
from collections.abc import Callable

import pytest
import torch

from kernels.nvfp4 import cases, cuda_gemm, cuda_w4a8, resident, ring_config, stream
from tests.kernels.nvfp4 import (
    test_nvfp4_decode_cpu,
    test_nvfp4_gemm_cuda,
    test_nvfp4_resident_cuda,
    test_nvfp4_stream_cuda,
    test_nvfp4_w4a8,
)
from tests.kernels.on_cpu.nvfp4_on_cpu import within_tolerance
from tests.kernels.on_cpu.stand_in import UNCHANGED, Change, Stopped, needs_compiler, unless_stopped

pytestmark = [needs_compiler, pytest.mark.slow]


def gemm(change: Change) -> bool:
    """Several tiles and k slices, four CTAs."""
    module, problem = test_nvfp4_gemm_cuda, cases._check(60, 304, 512, "bf16")
    config = cuda_gemm.choose_config(60, 304, 512, "bf16", 4, tokens=64, cluster=1, stages=3, waves=0)
    inputs = cases.inputs(problem, seed=1)
    y, flags = module.simulate(module.on_cpu(config, change), config, inputs, 0)
    return not flags and within_tolerance(y, problem, inputs, "nvfp4-w4a16")


def gemm_cluster(change: Change) -> bool:
    """Clusters of two, which share x."""
    module, problem = test_nvfp4_gemm_cuda, cases._check(63, 300, 512, "bf16")
    config = cuda_gemm.choose_config(63, 300, 512, "bf16", 4, tokens=64, cluster=2, stages=3, waves=1)
    inputs = cases.inputs(problem, seed=1)
    y, _ = module.simulate(module.on_cpu(config, change), config, inputs, 0)
    return within_tolerance(y, problem, inputs, "nvfp4-w4a16")


def streamed(change: Change) -> bool:
    module, problem = test_nvfp4_stream_cuda, cases._check(16, 300, 2064, "bf16")
    config = stream.choose_config(16, 300, 2064, "bf16", 3)
    inputs = cases.inputs(problem, seed=1)
    y = module.simulate(module.on_cpu(config, change), config, inputs, 0)
    return within_tolerance(y, problem, inputs, "nvfp4-w4a16")


def resident_x(change: Change) -> bool:
    module, problem = test_nvfp4_resident_cuda, cases._check(32, 400, 800, "bf16")
    config = resident.choose_config(32, 400, 800, "bf16", 1, cluster=2, groups=2, stages=2)
    inputs = cases.inputs(problem, seed=1)
    return within_tolerance(
        module.simulate(module.on_cpu(config, change), config, inputs, 0), problem, inputs, "nvfp4-w4a16"
    )


def w4a8(change: Change) -> bool:
    module, problem = test_nvfp4_w4a8, cases._check(60, 300, 512, "bf16")
    config = cuda_w4a8.choose_config(60, 300, 512, "bf16", 4, tokens=64, promote=0, stages=2, waves=0)
    inputs = cases.inputs(problem, seed=1)
    kernel = module.on_cpu(cuda_w4a8.source(config), module.GEMM_ENTRY, change)
    y, _ = module.simulate(kernel, config, inputs, 0)
    return module.relative(y, module.product_of_rounded(inputs)) < 2.0**-9


def ring(change: Change) -> bool:
    module = test_nvfp4_decode_cpu
    config = ring_config.choose_ring(8, 300, 1040, "bf16", 4, cluster=2, warps=2, stages=2, sum_stages=2)
    return module.right(module.on_cpu(config, change), config, module.given(cases._check(8, 300, 1040, "bf16")), 2)


KERNELS: tuple[Callable[[Change], bool], ...] = (gemm, gemm_cluster, streamed, resident_x, w4a8, ring)
FENCE = "fence_proxy_async_shared();\n"
# The kernel, the mistake, and what the stand-in says of it.
FENCES = {
    "results without a fence": (gemm, (f"                {FENCE}                named", "                named")),
    "x of the first iterations without a fence": (
        streamed,
        (f"        {FENCE}        __syncwarp();\n        named", "        __syncwarp();\n        named"),
    ),
    "x of later iterations without a fence": (
        streamed,
        (f"                {FENCE}                __syncwarp();", "                __syncwarp();"),
    ),
    "a fence ahead of the stores": (
        streamed,
        (
            f"                mine.store(parts_of_x[i], base + stage * STAGE_BYTES);\n                {FENCE}",
            f"                {FENCE}                mine.store(parts_of_x[i], base + stage * STAGE_BYTES);\n",
        ),
    ),
    "resident x without a fence": (resident_x, (f"        {FENCE}        named", "        named")),
}
PIPELINE: dict[str, Change] = {
    "a producer's phase": (
        "mbarrier_wait(empty(state.stage), state.phase ^ 1)",
        "mbarrier_wait(empty(state.stage), state.phase)",
    ),
    "a consumer's phase": (
        "mbarrier_wait(full(state.stage), state.phase)",
        "mbarrier_wait(full(state.stage), state.phase ^ 1)",
    ),
    "a phase that never turns": ("stage = 0, phase ^= 1", "stage = 0"),
    "a phase that turns each stage": (
        "if (++stage == kStages) stage = 0, phase ^= 1;",
        "if (phase ^= 1, ++stage == kStages) stage = 0;",
    ),
    "one arrival too many to fill": ("mbarrier_init(full(i), producers)", "mbarrier_init(full(i), producers + 1)"),
    "one arrival too many to empty": ("mbarrier_init(empty(i), consumers)", "mbarrier_init(empty(i), consumers + 1)"),
    "one arrival empties": ("mbarrier_init(empty(i), consumers)", "mbarrier_init(empty(i), 1)"),
    "bytes that nobody expects": (
        "mbarrier_arrive_expect_tx(full(state.stage), bytes)",
        "mbarrier_arrive_expect_tx(full(state.stage), bytes - 16)",
    ),
}
WALKERS = {
    "a producer's phase": (gemm, w4a8),
    "bytes that nobody expects": (gemm,),
    "a consumer's phase": (gemm, streamed, w4a8, ring),
}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)
def test_unchanged_kernels_pass(kernel: Callable[[Change], bool]) -> None:
    assert kernel(UNCHANGED)


@pytest.mark.parametrize("name", FENCES)
def test_a_missing_proxy_fence_stops_the_launch(name: str) -> None:
    kernel, change = FENCES[name]
    with pytest.raises(Stopped, match="no proxy fence"):
        kernel(change)


@pytest.mark.parametrize("name", PIPELINE)
def test_a_wrong_phase_or_arrival_count_is_seen(name: str) -> None:
    """A wrong number, a deadlock, or an arrival too many, in a kernel whose stages all turn more than once."""
    for kernel in WALKERS.get(name, (gemm, ring)):
        assert not unless_stopped(functools.partial(kernel, PIPELINE[name])), kernel.__name__


@pytest.mark.parametrize("kernel", [gemm, w4a8, ring], ids=lambda k: k.__name__)
def test_barriers_that_no_fence_publishes_stop_the_launch(kernel: Callable[[Change], bool]) -> None:
    with pytest.raises(Stopped, match="a barrier not published"):
        kernel(("mbarrier_init_fence();", ""))


def test_descriptors_are_read_and_not_restated() -> None:
    """The layer's own words: a wrong stride or swizzle mode in mma.cuh reaches the products."""
    assert not torch.tensor([gemm(("1024 >> 4 | 1u << 30", "512 >> 4 | 1u << 30"))]).any()
    with pytest.raises(Stopped, match="swizzle"):
        gemm(("1024 >> 4 | 1u << 30", "1024 >> 4 | 2u << 30"))
