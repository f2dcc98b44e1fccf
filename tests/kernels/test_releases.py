"""No kernel frees shared memory, for a copy or another block to overwrite, with a load from it in flight.

On the device such a load met data of the next stage now and then, under heavy bank conflicts; no simulation shows it,
since it is the compiler that chooses what an arrival waits for.
"""

import contextlib
import re
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import cuda
from kernels.gdn import cuda_scan, cuda_segments, cuda_segments_in_scan
from kernels.kv import cuda_decode as kv_decode
from kernels.moe import cuda_experts, cuda_many
from kernels.nvfp4 import cuda_decode, cuda_gemm, cuda_w4a8, ring_config
from tests.kernels import sass
from tests.kernels.sass import Instruction, unfinished_at_releases

MORE_RINGS: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (8, "bf16", {"pdl": True}),
    (8, "bf16", {"cluster": 1}),
    (12, "fp16", {}),
)
SOURCES = {
    "ring": [
        *cuda_decode.CUDA_SOURCES,
        *(ring_config.source(ring_config.choose_ring(m, 17408, 5120, dtype, **more)) for m, dtype, more in MORE_RINGS),
    ],
    "gemm": cuda_gemm.CUDA_SOURCES,
    "w4a8": cuda_w4a8.CUDA_SOURCES,
    "scan": cuda_scan.CUDA_SOURCES,
    "segments": (*cuda_segments.CUDA_SOURCES, *cuda_segments_in_scan.CUDA_SOURCES),
    "kv": kv_decode.CUDA_SOURCES,
    "experts": cuda_experts.CUDA_SOURCES,
    "experts_many": cuda_many.CUDA_SOURCES,
}
FREE = "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R2+URZ], RZ"


def program(*lines: tuple[str, int, int]) -> list[Instruction]:
    return [Instruction(16 * i, "", text, sets, waits) for i, (text, sets, waits) in enumerate(lines)]


# The second one's threads meet behind it, not where the first one's do under the same name.
TWO_ROLES = program(
    *(("BRA.U UP0, 0x50", 7, 0), ("BSSY B0, 0x30", 7, 0), ("BSYNC B0", 7, 0), (FREE, 7, 0), ("EXIT", 7, 0)),
    *(("LDS R4, [R3]", 0, 0), ("BSSY B0, 0x80", 7, 0), ("BSYNC B0", 7, 0), ("EXIT", 7, 0)),
)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (program(("LDS R4, [R3]", 0, 0), (FREE, 7, 0)), 1),
        (program(("LDS R4, [R3]", 0, 0), (FREE, 7, 0b1)), 0),
        (program(("LDSM.16.M88.4 R4, [R3]", 2, 0), ("FADD R5, R4, R4", 7, 0b100), (FREE, 7, 0)), 0),
        (program(("LDS R4, [R3]", 0, 0), ("LDS R6, [R3]", 1, 0), ("FADD R5, R4, R4", 7, 0b1), (FREE, 7, 0)), 1),
        (program(("STS [R3], R4", 7, 0), (FREE, 7, 0)), 0),
        # a load at the end of a loop whose arrival stands at its start; a way around the one that waits
        (program((FREE, 7, 0), ("LDS R4, [R3]", 0, 0), ("BRA 0x0", 7, 0)), 1),
        (program(("LDS R4, [R3]", 0, 0), ("BRA.U UP0, 0x30", 7, 0), ("MOV R5, R4", 7, 1), (FREE, 7, 0)), 1),
        (program(("BRA 0x20", 7, 0), ("LDS R4, [R3]", 0, 0), (FREE, 7, 0)), 0),
        (TWO_ROLES, 0),
    ],
)
def test_loads_in_flight_are_found(code: list[Instruction], found: int) -> None:
    assert len(unfinished_at_releases(code)) == found


@pytest.mark.slow
@pytest.mark.parametrize("group", SOURCES)
def test_every_release_waits_for_the_loads_ahead_of_it(group: str) -> None:
    sources = SOURCES[group]
    compiled = sass.kernels(*map(sass.compiled, sources))
    assert sorted(compiled) == sorted(name for source in sources for name in source.kernels)
    for name, code in compiled.items():
        assert len(code) > 100, name
        found = unfinished_at_releases(code)
        if group == "kv":  # single words are lengths and sums of them, which nobody overwrites
            found = [x for x in found if not re.search(r"while 0x\w+ LDS R\d", x)]
        if name.startswith("nvfp4_line"):
            # It frees the stage before. In flight may be the second tile of the one at hand, which is decoded, and so
            # waited for, ahead of the next release.
            found = [x for x in found if not re.search(r"LDS\.(64|128) R\d+, \[R\d+\+0x240\]", x)]
        if group.startswith("experts"):  # pairs of words are the lists, which nobody overwrites
            found = [x for x in found if not re.search(r"while 0x\w+ LDS.64 R\d", x)]
        assert found == [], name
        if not any(word in name for word in ("prepare", "quantise", "router", "compose", "sum")):
            assert any(instruction.releases for instruction in code), name


def test_a_cubin_without_its_last_byte_is_made_whole() -> None:
    """As CuPy hands it over: program headers, the last in the file, end with a zero."""
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF", 2, 190, 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0)
    code = header + bytes(range(1, 112)) + b"\0"
    assert len(code) == 64 + 2 * 56
    assert cuda._whole(code[:-1]) == cuda._whole(code) == code


def test_no_configuration_lowers_the_shared_memory_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations that differ in their launch share a function; the driver refuses a launch above its limit."""
    limits = {7: 48 * 1024}
    driver = SimpleNamespace(
        funcGetAttribute=lambda attribute, function: limits[function],
        funcSetAttribute=lambda function, attribute, value: limits.update({function: value}),
    )
    gpu = SimpleNamespace(driver=driver, Device=lambda index: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=gpu))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda, "cubin", lambda source, capability: Path("one.cubin"))
    module = SimpleNamespace(get_function=lambda name: SimpleNamespace(ptr=7))
    monkeypatch.setattr(cuda, "_module", lambda path, device: module)
    source = cuda_gemm.CUDA_SOURCES[0]
    seen = []
    for shared_bytes in (0, 100_000, 220_000, 130_000):
        cuda.load.__wrapped__(source, source.kernels[0], 0, shared_bytes)
        seen.append(limits[7])
    assert seen == [48 * 1024, 100_000, 220_000, 220_000]
