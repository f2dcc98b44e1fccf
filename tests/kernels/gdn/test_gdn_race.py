"""compute-sanitizer over small launches of every CUDA C++ form in kernels/gdn: shared-memory hazards, wild addresses.

racecheck watches shared memory and nothing else. That the in-place writes to the pool cannot race is another argument
(a 16-byte piece of a state belongs to one block) and another test (test_gdn_decode_cpu.py, with permuted ids).
Run as a program, this file does the launches, checks their answers and prints what it launched; the tests run it under
the tool. A kernel that races on purpose shows that the tool sees what it is asked for.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from kernels import cuda
from kernels.common import CudaSource, Tensors, Workload
from kernels.gdn import cases, cuda_decode, cuda_decode_conv, cuda_scan, cuda_segments, cuda_segments_in_scan, segments
from kernels.gdn.controls import cuda_decode_single
from kernels.gdn.reference import reference
from lab.check.accuracy import compare
from tests.kernels import sass

LIMIT_S = 60
RACING = """extern "C" __global__ void racing(int* to) {
    __shared__ int words[64];
    words[threadIdx.x] = threadIdx.x;
    to[threadIdx.x] = words[63 - threadIdx.x];
}
"""
KERNELS = {
    "decode": {*cuda_decode.SOURCE.kernels, *cuda_decode_conv.SOURCE.kernels},
    "scan": {*cuda_scan.SOURCE.kernels, *cuda_scan.FUSED.kernels, *cuda_segments.SOURCE.kernels}
    | {*cuda_segments_in_scan.SOURCE.kernels},
    "racing": {"racing"},
}


# --- the program -----------------------------------------------------------------------------------------------------


def check(problem: Workload, precision: str, run: Callable[[Tensors, Tensors], None]) -> None:
    """Run on the GPU with inputs drawn on the CPU (torch's own kernels would be watched too); compare on the CPU."""
    inputs = cases.inputs(problem, 3, "cpu")
    out = {name: tensor.cuda() for name, tensor in cases.outputs(problem, inputs).items()}
    run({name: tensor.cuda() for name, tensor in inputs.items()}, out)
    torch.cuda.synchronize()
    wanted = reference(inputs)
    for name, limit in cases.tolerance(problem, precision).items():
        error = compare(name, out[name].cpu(), wanted[name], limit)
        assert error.ok, (problem.id, error)


def decode() -> None:
    """Every instantiation with permuted ids and an empty slot, alone and from the convolution on; one sequence."""
    for variant in cuda_decode.VARIANTS:
        batch = 3 + (cuda_decode.WAVE // 3 if variant.prefetch > 1 else 0)  # some of the heads are fetched ahead
        shape = {"D": variant.dim, "state_dtype": variant.state}
        problem = cases._decode(batch, (1, 3), dtype="bf16", qk_l2norm=1, pad=1, **shape)  # type: ignore[arg-type]

        def step(inputs: Tensors, out: Tensors, variant: cuda_decode.DecodeVariant = variant) -> None:
            cuda_decode.launch(inputs, out["state"], out["o"], variant)

        def conv(inputs: Tensors, out: Tensors, variant: cuda_decode.DecodeVariant = variant) -> None:
            cuda_decode_conv.launch(cuda_decode_conv._prepare(inputs), out, variant)

        check(problem, "f32", step)
        check(cases._from_conv(problem), "f32", conv)
    for candidate in cuda_decode_single.CANDIDATES:
        problem = cases._in_pool(cases._decode(1, (1, 3), D=128, dtype="bf16"), 4)
        check(problem, "f32", lambda inputs, out, own=candidate: own.run(own.prepare(inputs), out))  # type: ignore[misc]


def scan() -> None:
    """Preparation and scan of a ragged batch, every instantiation; a programmatic launch, as in use. Then in one."""
    for variant in cuda_scan.VARIANTS:
        wide = variant.dtype == cuda_scan.WIDE
        own = {"dtype": "bf16", "out_dtype": "f32"} if wide else {"dtype": variant.dtype}
        shape = {"D": variant.dim, "qk_l2norm": int(not variant.recompute)}
        problem = cases._prefill(140, (1, 3), lengths="64-1-75", **shape, **own)  # type: ignore[arg-type]

        def both(inputs: Tensors, out: Tensors, variant: cuda_scan.ScanVariant = variant, wide: bool = wide) -> None:
            args = (cuda_scan._prepare_wide if wide else cuda_scan._prepare)(inputs)
            args["workspace"] = cuda_scan.workspace(args, variant)
            cuda_scan.prepare_chunks(args, variant)
            cuda_scan.scan_chunks(args, out, variant, programmatic=True)

        check(problem, "fp16" if wide else variant.dtype, both)
    for dtype in ("bf16", "fp16"):
        problem = cases._prefill(1100, (1, 1), D=128, dtype=dtype, qk_l2norm=1)

        def one(inputs: Tensors, out: Tensors) -> None:
            args = cuda_scan._prepare(inputs)  # as on three multiprocessors: teams go on from unit to unit
            cuda_scan.prefill_at_once(args | cuda_scan.in_order(args, 3), out)

        check(problem, dtype, one)
        for groups, raw in product((1, 2), (0, 1)):

            def split(inputs: Tensors, out: Tensors, groups: int = groups) -> None:
                cuda_segments.run(cuda_segments.prepare(inputs, segments.Plan(4, groups, 0.0, 0)), out)

            problem = cases._prefill(1100, (1, 1), D=128, dtype=dtype, qk_l2norm=raw)
            check(problem, dtype, split)

            def in_scan(inputs: Tensors, out: Tensors, groups: int = groups) -> None:
                plan = segments.Plan(4, groups, 0.0, 0)
                cuda_segments_in_scan.run(cuda_segments_in_scan.prepare(inputs, plan), out)

            if dtype == "bf16":
                check(problem, dtype, in_scan)


def racing() -> None:
    """Two warps exchange words without a barrier."""
    source = CudaSource(Path(sys.argv[2]), ("racing",))
    to = torch.zeros(64, dtype=torch.int32).cuda()
    cuda.launch(cuda.load(source, "racing", 0), (1,), 64, [to])
    torch.cuda.synchronize()


def main() -> None:
    """Launch the group named on the command line; print the kernels that ran."""
    ran: list[str] = []
    launch = cuda.launch

    def noted(kernel: cuda.Kernel, *arguments: object, **more: object) -> None:
        launch(kernel, *arguments, **more)  # type: ignore[arg-type]
        ran.append(kernel.name)

    cuda.launch = noted
    {"decode": decode, "scan": scan, "racing": racing}[sys.argv[1]]()
    print("ran:", *sorted(set(ran)))


# --- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program() -> Callable[..., str]:
    """(tool or "", what, more words) -> what the program printed under that tool."""
    pytest.importorskip("cupy", reason="the CUDA C++ candidates are loaded through CuPy")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("sm_90a code runs on compute capability 9.0 only")
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if not sanitizer:
        pytest.skip("compute-sanitizer is not installed (it comes with the CUDA toolkit)")

    def run(tool: str, what: str, *more: str) -> str:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        root = str(Path(__file__).resolve().parents[3])
        # An allocation of its own for every tensor: memcheck sees no stray access inside a pool.
        paths = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
        environment |= {"PYTHONPATH": paths, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        under = [sanitizer, "--tool", tool] if tool else []
        command = [*under, sys.executable, str(Path(__file__).resolve()), what, *more]
        limit = LIMIT_S if tool else 300  # without a tool it also compiles
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=limit)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said[-3000:]
        words = re.search(r"^ran: (.*)$", said, re.M)
        assert words, said[-3000:]
        assert set(words.group(1).split()) == KERNELS[what]
        return said

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["decode", "scan"])
def test_no_hazards_in_shared_memory_and_no_wild_address(what: str, program: Callable[..., str]) -> None:
    program("", what)
    said = program("racecheck", what)
    assert "RACECHECK SUMMARY:" in said, said[-3000:]
    found = hazards(said)
    assert bool(found) == ("SUMMARY: 0 hazards" not in said)
    if what == "scan":
        sources = (*cuda_scan.CUDA_SOURCES, cuda_segments.SOURCE, cuda_segments_in_scan.SOURCE)
        code = {name: at for source in sources for name, at in addressed(source).items()}
        for name in code:
            makes = "_lean" in name and "prepare" not in name
            assert makes == any(text.startswith(MAKER) for text in code[name].values())
        found = [pair for pair in found if not ordered_by_barrier(*(code[name][at] for name, at in pair))]
        left = {(kernel, code[kernel][at], code[other][to]) for (kernel, at), (other, to) in found}
        assert not left, "\n".join(" | ".join(words) for words in sorted(left))
    assert found == [], said[-3000:]
    assert "ERROR SUMMARY: 0 errors" in program("memcheck", what)


def hazards(said: str) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """The pairs of accesses, (kernel, address) each, that racecheck reports."""
    pairs, first = [], ("", 0)
    for start, kernel, at in re.findall(r"(between|and) (?:Read|Write) access at (\w+)\+0x([0-9a-f]+)", said):
        access = kernel, int(at, 16)
        if start == "between":
            first = access
        else:
            pairs.append((first, access))
    return pairs


MAKER = "maker: "  # ahead of an instruction of the warps that make scores, or in a map vectors beside the copies


def addressed(source: CudaSource) -> dict[str, dict[int, str]]:
    """Kernel -> address -> instruction, as compiled here; those of the warps with 64 registers behind MAKER."""
    found: dict[str, dict[int, str]] = {}
    for name, code in sass.kernels(sass.compiled(source)).items():
        registers, found[name] = "", {}
        for i in code:
            registers = i.text.rstrip(" ;").split()[-1] if i.text.startswith("USETMAXREG") else registers
            found[name][i.address] = MAKER * (registers == "0x40") + i.text
    return found


def ordered_by_barrier(a: str, b: str) -> bool:
    """Whether a pair of instructions is a load of the scan's and a copy by the warp that loads ahead, or a store by
    those that make scores; or a load of theirs and such a copy: they arrive for the scan, and the scan for the copy.

    Both sides go by an mbarrier at which lane 0 arrives for its warp, behind a __syncwarp; racecheck knows what the
    arriving thread did, not what its warp did. test_gdn_scan_cpu.py and test_releases.py look at those.
    """
    ahead = ("LDGSTS", "UBLKCP", f"{MAKER}STS", f"{MAKER}UBLKCP")
    load, other = sorted((a, b), key=lambda text: text.startswith(ahead))
    if not other.startswith(MAKER):
        load = load.removeprefix(MAKER)
    return load.startswith(("LDS.", "LDSM.", "LDS ")) and other.startswith(ahead)


SAID = """========= Error: Race reported between Write access at some+0x6f90
=========     and Read access at some+0x1850 [960 hazards]
=========     and Read access at some+0x10 [8 hazards]
========= Error: Race reported between Read access at other+0x20
=========     and Write access at other+0x30 [16 hazards]
"""


def test_only_what_goes_ahead_is_left_to_the_barriers() -> None:
    found = hazards(SAID)
    assert found == [
        (("some", 0x6F90), ("some", 0x1850)),
        (("some", 0x6F90), ("some", 0x10)),
        (("other", 0x20), ("other", 0x30)),
    ]
    load, store = "LDSM.16.MT88.4 R8, [R1]", "STS [R1], R2"
    copy, bulk = "LDGSTS.E.BYPASS.128 [R4], desc", "UBLKCP.S.G [UR16]"
    assert ordered_by_barrier(load, copy)
    assert ordered_by_barrier(bulk, "LDS.64 R2, [R0+0xe000]")
    assert ordered_by_barrier(MAKER + store, load)
    assert ordered_by_barrier(MAKER + bulk, load)
    assert ordered_by_barrier(bulk, MAKER + "LDS R16, [R58+0xe400]")
    for pair in (
        (MAKER + store, MAKER + "LDS R2, [R3]"),
        (MAKER + store, store),
        (store, MAKER + "LDS R2, [R3]"),
        (load, store),
        (store, "LDS R2, [R3]"),
        (copy, bulk),
        (copy, copy),
        (store, copy),
        (store, store),
    ):
        assert not ordered_by_barrier(*pair)


@pytest.mark.gpu
def test_the_tool_sees_a_race(tmp_path: Path, program: Callable[..., str]) -> None:
    source = tmp_path / "racing.cu"
    source.write_text(RACING)
    program("", "racing", str(source))
    said = program("racecheck", "racing", str(source))
    assert re.search(r"RACECHECK SUMMARY: [1-9]\d* hazard", said), said[-3000:]


if __name__ == "__main__":
    main()
