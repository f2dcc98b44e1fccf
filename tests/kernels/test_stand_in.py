"""The stand-in on_cpu/sm90.cuh itself: what must not go on ends as a failed test that says why and where.

An abort would end the whole test run, and with pytest's capture of standard error its words would be lost.
"""

import contextlib
import re
from typing import Any

import pytest

from kernels import cuda
from tests.kernels.on_cpu.stand_in import HEADER, MACHINE, StandIn, Stopped, built, needs_compiler

pytestmark = [needs_compiler, pytest.mark.slow]
# Two blocks of 32 threads, counted. wrong: 1, thread 5 of block 1 reads past the end; 2, lane 0 stays away from what
# the others wait at; 3 to 7, what the names in WRONG say.
COUNT = """
#include "sm90/pipeline.cuh"
static int wrong, counted;
static void kernel() {
    DYNAMIC_SHARED(memory);
    const u32 base = shared_address(memory);
    const Pipeline<1, 2048, 2056> pipeline{base};
    if (wrong == 1 && threadIdx.x == 5 && blockIdx.x == 1) lds128(4096);
    if (wrong != 2 || threadIdx.x) __syncwarp();
    if (threadIdx.x == 0) pipeline.init(wrong == 5 ? 31 : 32, 1);
    if (wrong != 3) mbarrier_init_fence();
    __syncwarp();
    sts32(base + 4 * threadIdx.x, threadIdx.x);
    if (wrong != 4 || threadIdx.x % 8) fence_proxy_async_shared();
    mbarrier_arrive(pipeline.full(0));
    if (wrong == 6 && threadIdx.x == 0) mbarrier_arrive(pipeline.empty(0) + 8);
    mbarrier_wait(pipeline.full(0), wrong == 7);
    __syncwarp();
    if (threadIdx.x == 0) {
        static unsigned char out[128];
        tma_store_1d(out + (-(uintptr_t)out & 15), base, 112);
        tma_store_wait_all();
    }
    counted++;
}
extern "C" int run(int how) {
    wrong = how, counted = 0;
    launch_on_cpu({.grid = {2, 1, 1}, .threads = 32, .shared_bytes = 4096, .seed = 0}, kernel);
    return counted;
}
extern "C" int left() { return cpu.fibers.capacity() + cpu.ctas.capacity(); }
"""
WRONG = {
    1: r"outside shared memory .*: block 1 thread 5$",
    2: "no thread can go on",
    3: "a barrier not published",
    4: "no proxy fence since thread",
    6: "a barrier nobody set up",
    7: "no thread can go on",
}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Any:
    source = tmp_path_factory.mktemp("count") / "count.cu"
    source.write_text(COUNT)
    return built(source, "")


@pytest.mark.parametrize("wrong", WRONG)
def test_a_stop_is_an_error_and_the_next_launch_starts_clean(stand_in: StandIn, wrong: int) -> None:
    assert stand_in.run(0) == 64
    with pytest.raises(Stopped, match=WRONG[wrong]):
        stand_in.run(wrong)
    assert stand_in.run(0) == 64


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_launch_leaves_no_memory_behind(stand_in: StandIn, wrong: int) -> None:
    """Not one that was stopped either: a test run loads hundreds of libraries."""
    with contextlib.suppress(Stopped):
        stand_in.run(wrong)
    assert stand_in.left() == 0


def test_a_phase_that_ends_an_arrival_early_lets_another_begin(stand_in: StandIn) -> None:
    """31 of 32 arrivals end the phase, the last one belongs to the next: only a kernel's numbers show it."""
    assert stand_in.run(5) == 64


def test_every_instruction_of_the_layer_has_its_stand_in() -> None:
    """A function of the layer's PTX sections that the stand-in lacks would be missing only where a kernel calls it."""
    stand_in = HEADER.read_text() + MACHINE.read_text()
    missing = []
    for name in ("ptx.cuh", "mma.cuh"):
        text = (cuda.HEADERS / "sm90" / name).read_text()
        section = text.partition("#ifndef SM90_ON_CPU")[2].partition("#endif  // SM90_ON_CPU")[0]
        for line in section.splitlines():
            if line.startswith("DEVICE "):
                function = line.partition("(")[0].split()[-1].lstrip("*&")
                missing += [] if re.search(rf" {function}\([^;]*?\) {{", stand_in) else [function]  # it has a body
    assert not missing
