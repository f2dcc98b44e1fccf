"""The stand-ins tests/*_on_cpu.cuh themselves: what must not go on ends as a failed test that says why and where.

An abort would end the whole test run, and with pytest's capture of standard error its words would be lost.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.on_cpu.stand_in import StandIn, Stopped

HERE = Path(__file__).resolve().parent / "on_cpu"
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++ to run kernels on a CPU")
# Two blocks of 32 threads, counted. wrong: 1, thread 5 of block 1 reads past the end; 2, lane 0 stays away from what
# the others wait at.
COUNT = """
static int wrong, counted;
static void kernel() {
    if (wrong == 1 && threadIdx.x == 5 && blockIdx.x == 1) PAST_THE_END;
    if (wrong != 2 || threadIdx.x) __syncwarp();
    counted++;
}
extern "C" int run(int how) {
    wrong = how, counted = 0;
    LAUNCH;
    return counted;
}
"""
KINDS = {  # stand-in: (a read past the end, the launch)
    "gdn_decode_on_cpu.cuh": ("lds128(SHARED)", "own_grid = {2, 1, 1}, launch_on_cpu(kernel, 2, 32, 1, 0)"),
    "gdn_on_cpu.cuh": ("inside(shared + SHARED_BYTES, 16, 16)", "launch_on_cpu({2, 1, 1}, 32, kernel)"),
    "wgmma_on_cpu.cuh": ("lds128(4096)", "simulate(kernel, 32, 1, 2, 4096, 0)"),
}


@pytest.fixture(params=KINDS)
def stand_in(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    past_the_end, launch = KINDS[request.param]
    text = COUNT.replace("PAST_THE_END", past_the_end).replace("LAUNCH", launch)
    (tmp_path / "kernel.cpp").write_text(f'#include "{HERE}/{request.param}"\n{text}')
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "kernel.cpp", "-o", "kernel.so"]
    subprocess.run(command, check=True, timeout=120, cwd=tmp_path)
    return StandIn(str(tmp_path / "kernel.so"))


def test_a_stop_is_an_error_and_the_next_launch_starts_clean(stand_in: StandIn) -> None:
    assert stand_in.run(0) == 64
    with pytest.raises(Stopped, match=r"(?s)shared.*: block 1.* thread 5$"):
        stand_in.run(1)
    assert stand_in.run(0) == 64
    with pytest.raises(Stopped, match="no thread can go on"):
        stand_in.run(2)
    assert stand_in.run(0) == 64
