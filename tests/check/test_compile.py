"""`lab compile`: the table, its arithmetic, the reading of PTX, and the dot_scaled finding per Triton version.

Compilation is tried end to end in the child process that users get, on a toy family with one candidate for each thing
that can happen. conftest.py has set TRITON_INTERPRET=1 here: that the child compiles all the same is part of the test.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import dot_scaled
from lab.base import devices
from lab.check import aot, compile
from lab.check.aot import AotRow, matrix_instruction, occupancy, one_line
from lab.cli import main
from lab.row import store
from tests.refused import refused

needs_triton = pytest.mark.skipif(util.find_spec("triton") is None, reason="Triton is not installed")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")

TOY = Path(__file__).parent / "aot_toy"
Find = Callable[[int, str, str], AotRow]


@pytest.fixture(scope="module")
def toy() -> list[AotRow]:
    """The toy family's rows for sm_90 and sm_121, compiled once for the whole file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TOY), prepend=os.pathsep)
        return compile.compile_family("toy", (90, 121), "toy_family:load")


@pytest.fixture
def find(toy: list[AotRow]) -> Find:
    """One row of the toy family by target, candidate and build."""

    def one(target: int, candidate: str, build: str) -> AotRow:
        (row,) = [r for r in toy if (r.target, r.candidate, r.build) == (target, candidate, build)]
        return row

    return one


@pytest.mark.slow
@needs_triton
class TestToyFamily:
    @pytest.mark.parametrize(("target", "instruction"), [(90, "wgmma m64n64k16 bf16"), (121, "mma.sync m16n8k16 bf16")])
    def test_a_build_gives_its_resources(self, find: Find, target: int, instruction: str) -> None:
        row = find(target, "plain", "small")
        assert (row.status, row.instruction, row.threads, row.spill_bytes) == ("ok", instruction, 128, 0)
        assert row.compiler == f"triton {metadata.version('triton')}"
        # 64 x 64 float32 sums over 128 threads are 32 registers at least; operands of one stage are 16 KB at least.
        assert row.registers is not None
        assert 32 < row.registers <= 255
        assert row.shared_bytes is not None
        assert row.shared_bytes >= 2 * 64 * 64 * 2
        assert row.fits is True

    def test_what_fits_hopper_does_not_fit_gb10(self, find: Find) -> None:
        hopper, gb10 = find(90, "large", "deep"), find(121, "large", "deep")
        assert hopper.fits is True
        assert gb10.fits is False
        assert gb10.shared_bytes is not None
        assert gb10.shared_bytes > 101_376
        assert (gb10.blocks_per_sm, gb10.limited_by) == (0, "smem")
        table = compile.render([gb10])
        assert f"does not fit: {gb10.shared_bytes} bytes of shared memory, a block may have 101376" in table

    @pytest.mark.parametrize("target", [90, 121])
    def test_an_abort_costs_one_row(self, find: Find, target: int) -> None:
        died, after = find(target, "aborts", "first"), find(target, "aborts", "second")
        assert (died.status, died.registers, died.fits) == ("error", None, None)
        assert died.message == "compiler died of SIGABRT: Assertion `false' failed"
        assert after.status == "ok"

    def test_a_kernel_that_does_not_compile_is_an_error_in_one_line(self, find: Find) -> None:
        row = find(90, "broken", "bad shapes")
        assert row.status == "error"
        assert row.message.startswith("at 2:40: ")
        assert row.message.count("incompatible dimensions at index 0: 16 and 32") == 1
        assert len(row.message.splitlines()) == 1

    def test_a_newer_triton_is_a_need_with_both_versions(self, find: Find) -> None:
        row = find(121, "newer", "tomorrow")
        assert row.status == "needs"
        assert row.message == f"triton 99.1, found {metadata.version('triton')}"

    def test_a_capability_is_a_need_below_it_only(self, find: Find) -> None:
        assert find(90, "blackwell", "only").status == "needs"
        assert find(90, "blackwell", "only").message == "compute capability 10.0"
        assert find(121, "blackwell", "only").status == "ok"

    def test_a_candidate_that_cannot_list_its_builds_is_an_error(self, find: Find) -> None:
        row = find(90, "refusing", "builds()")
        assert (row.status, row.message) == ("error", "ValueError: tile 7 is not a power of two")

    def test_a_module_that_did_not_import_says_why(self, find: Find) -> None:
        assert find(90, "peers/toy", "").status == "skipped"
        assert find(90, "peers/toy", "").message == "No module named toylib"
        assert find(90, "triton_mine", "").status == "error"

    @needs_nvcc
    def test_cuda_source(self, toy: list[AotRow], find: Find) -> None:
        (row,) = [r for r in toy if (r.target, r.build, r.status) == (90, "crowded", "ok")]
        assert row.compiler.startswith("nvcc ")
        assert (row.registers, row.threads, row.shared_bytes, row.instruction) == (32, 1024, 1024, "none")
        assert row.spill_bytes is not None
        assert row.spill_bytes > 0
        assert (row.blocks_per_sm, row.fits) == (2, True)
        assert find(90, "toy.cu", "absent").message == 'no kernel extern "C" absent in toy.cu'
        wrong = find(90, "wrong.cu", "")
        assert (wrong.status, wrong.compiler) == ("error", "nvcc")
        assert "undefined_name" in wrong.message
        assert "/" not in wrong.message
        assert [r.message for r in toy if r.candidate == "toy.cu" and r.status == "needs"] == [
            "compute capability 10.0"
        ]

    def test_table_and_json_hold_every_row(self, toy: list[AotRow]) -> None:
        table = compile.render(toy)
        assert max(len(line) for line in table.splitlines()) <= 120
        assert sum(line.lstrip().startswith("sm_") for line in table.splitlines()) == len(toy)
        assert [store.decode(json.dumps(row.to_json()).encode(), AotRow, "here") for row in toy] == toy


def test_table_says_a_need_once_a_target() -> None:
    """A source compiled for several shapes has a row each, which say the same where none of them can be compiled."""
    rows = [AotRow("f", "a.cu", "", t, "", "needs", "sm_90a") for t in (80, 80, 120, 120)]
    assert compile.render(rows).splitlines() == ["f a.cu", "    sm_80   needs: sm_90a", "    sm_120  needs: sm_90a"]


@needs_triton
@pytest.mark.slow
def test_without_nvcc_and_cupy_a_cuda_source_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if util.find_spec("cupy") is not None:
        pytest.skip("CuPy is installed, so NVRTC takes over from nvcc here")
    (tmp_path / "bare.py").write_text(
        "from pathlib import Path\nfrom types import SimpleNamespace\nfrom kernels.common import CudaSource\n"
        "def load(name):\n    source = CudaSource(Path('bare.cu'), ('k',))\n"
        "    return SimpleNamespace(candidates={}, cuda_sources=(source,), unavailable={})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PATH", str(tmp_path))
    (row,) = compile.compile_family("bare", (90,), "bare:load")
    assert (row.status, row.candidate) == ("skipped", "bare.cu")
    assert row.message.startswith("no nvcc on the PATH")


@pytest.mark.slow
def test_a_family_that_cannot_be_imported_is_an_error_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sick.py").write_text("def load(name):\n    return 1 / 0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (row,) = compile.compile_family("sick", (90,), "sick:load")
    assert (row.status, row.message) == ("error", "loading sick: ZeroDivisionError: division by zero")


@pytest.mark.slow
def test_an_unknown_family_is_refused_by_the_child() -> None:
    with refused("kernels", '"nosuchfamily"'):
        compile.compile_family("nosuchfamily", (90,))


@pytest.mark.parametrize("target", [37, 75, 999])
def test_an_unlisted_capability_is_refused(target: int) -> None:
    with refused("target", str(target), "data/aot_limits.toml", remedy="80, "):
        compile.compile_family("toy", (90, target))


@pytest.mark.parametrize(("text", "target"), [("121", 121), ("sm_90", 90), ("12.0", 120), (" SM_100 ", 100)])
def test_target_is_written_three_ways(text: str, target: int) -> None:
    assert compile.parse_target(text) == target


def test_command_line_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["compile", "toy", "--targets", "hopper"]) == 2
    assert main.main(["compile"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


BLOCK_SCALED = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale"
INSTRUCTIONS = [
    ("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r1}, %rd1, %rd2;", "wgmma m64n128k16 bf16"),
    ("wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {%r1}, %rd1, %rd2;", "wgmma m64n64k32 s8"),
    ("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 {%r1}, %rd1, %rd2;", "wgmma m64n64k32 e4m3 x e5m2"),
    ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1};", "mma.sync m16n8k16 f16"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1};", "mma.sync m16n8k8 tf32"),
    ("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.u8.s8.s32 {%r1};", "mma.sync m16n8k32 u8 x s8"),
    ("mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%r1};", "mma.sp m16n8k32 f16"),
    (f"{BLOCK_SCALED}.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 {{%r1}};", "mma.sync m16n8k64 kind::mxf4nvf4 4X"),
    (f"{BLOCK_SCALED}.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0 {{%r1}};", "mma.sync m16n8k64 kind::mxf4nvf4 2X"),
    ("@%p7 tcgen05.mma.cta_group::1.kind::f16 [ %r350 + 0 ], %rd107;", "tcgen05.mma kind::f16"),
    ("@%p7 tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X [%r1];", "tcgen05.mma kind::mxf4nvf4 4X"),
    ("@%p9 tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block32 [%r1];", "tcgen05.mma kind::mxf4 block32"),
    ("wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {%f1};", "wmma m16n16k16 f16"),
    ("dp4a.s32.s32 %r1, %r2, %r3, %r4;", "none (dp4a)"),
    ("fma.rn.f32 %f1, %f2, %f3, %f4;", "none"),
    ("// mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 in a comment", "none"),
    ("tcgen05.wait::ld.sync.aligned; wgmma.fence.sync.aligned;", "none"),
]


@pytest.mark.parametrize(("ptx", "words"), INSTRUCTIONS, ids=[words for _, words in INSTRUCTIONS])
def test_matrix_instruction(ptx: str, words: str) -> None:
    assert matrix_instruction(f"\t{ptx}\n") == words


def test_matrix_instructions_come_most_frequent_first() -> None:
    half, tf32, integer = (INSTRUCTIONS[i][0] for i in (3, 4, 5))
    text = "\n".join([tf32, half, half])
    assert matrix_instruction(text) == "mma.sync m16n8k16 f16 + mma.sync m16n8k8 tf32"
    assert matrix_instruction(f"{text}\n{integer}").endswith(" + 1 more")


@pytest.mark.parametrize("target", [80, 86, 89, 90, 100, 120, 121])
def test_the_largest_block_leaves_room_for_one(target: int) -> None:
    """Shared memory per block plus the reserved 1 KB is the SM's: the table's two figures have to agree on that."""
    lim = aot.limits(target)
    most = lim.shared_per_block_bytes
    assert most + lim.shared_reserved_per_block_bytes == lim.shared_per_sm_bytes
    assert occupancy(target, 32, most, 128) == (1, "smem", True)
    assert occupancy(target, 32, most + 1, 128) == (0, "smem", False)


@pytest.mark.parametrize(
    "device", [d for d in devices.load().values() if "smem_optin_bytes_per_block" in d.facts], ids=lambda d: d.id
)
def test_the_cap_is_the_one_of_the_device_table(device: devices.Device) -> None:
    """data/devices.toml says per device, from its own source, what data/aot_limits.toml says per capability."""
    major, minor = device.capability
    assert aot.limits(10 * major + minor).shared_per_block_bytes == device.fact("smem_optin_bytes_per_block").value


@pytest.mark.parametrize(
    ("target", "registers", "shared", "threads", "columns", "expected"),
    [
        # 255 x 32 rounds up to 8,192 registers a warp; 16,384 in a sub-partition hold 2, an SM 8 warps.
        (90, 255, 0, 128, 0, (2, "registers", True)),
        # 168 x 32 = 5,376: 3 warps a sub-partition, 12 an SM.
        (90, 168, 0, 128, 0, (3, "registers", True)),
        # 100 x 32 = 3,200 rounds up to 3,328: 4 warps a sub-partition where 3,200 would allow 5.
        (90, 100, 0, 128, 0, (4, "registers", True)),
        # 16 warps x 8,192 registers are twice an SM's 65,536.
        (90, 255, 0, 512, 0, (0, "registers", False)),
        # (38,912 + 1,024) goes twice into 102,400.
        (121, 32, 38_912, 128, 0, (2, "smem", True)),
        # 1,536 threads an SM against 2,048; one warp a block runs into the number of blocks.
        (121, 32, 0, 256, 0, (6, "threads", True)),
        (90, 32, 0, 256, 0, (8, "threads", True)),
        (121, 32, 0, 32, 0, (24, "blocks", True)),
        # 500 threads are 16 warps; 1,025 are no block at all.
        (90, 32, 0, 500, 0, (4, "threads", True)),
        (90, 32, 0, 1025, 0, (0, "threads", False)),
        # 512 columns of tensor memory, and 0 of them where there is no tcgen05.
        (100, 32, 0, 128, 512, (1, "tmem", True)),
        (90, 32, 0, 128, 512, (16, "threads", True)),
        # A CUDA kernel without launch bounds has no block size to count with.
        (90, 32, 1024, None, 0, (None, "", True)),
        # Without registers only what is known to be too large is refused.
        (90, None, 1024, 128, 0, (None, "", True)),
        (90, None, 1024, 1025, 0, (0, "threads", False)),
    ],
)
def test_occupancy(
    target: int,
    registers: int | None,
    shared: int,
    threads: int | None,
    columns: int,
    expected: tuple[int | None, str, bool],
) -> None:
    assert occupancy(target, registers, shared, threads, columns) == expected


@given(st.sampled_from([80, 90, 100, 121]), st.integers(1, 254), st.integers(0, 100_000), st.integers(1, 1024))
def test_more_resources_never_mean_more_blocks(target: int, registers: int, shared: int, threads: int) -> None:
    blocks = occupancy(target, registers, shared, threads)[0]
    assert blocks is not None
    assert blocks * threads <= aot.limits(target).threads_per_sm
    assert blocks * registers * threads <= aot.limits(target).registers_per_sm
    assert blocks * shared <= aot.limits(target).shared_per_sm_bytes
    for larger in (
        (registers + 1, shared, threads),
        (registers, shared + 1, threads),
        (registers, shared, threads + 1),
    ):
        more = occupancy(target, *larger)[0]
        assert more is not None
        assert more <= blocks


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("python: /a/b/Attr.cpp:10: static X: Assertion `isInt()' failed.\nmodule {\n", "Assertion `isInt()' failed"),
        ("k.py:3:0: note: Pipeline failed while executing [`SomePass` on 'm']\nk: error: no", "SomePass: k: error: no"),
        ("/tmp/x/k.cu(4): error: identifier is undefined\n1 error detected", "k.cu(4): error: identifier is undefined"),
        ("", "no message"),
        ("error: " + "x" * 500, "x" * 157 + "..."),
    ],
)
def test_one_line(log: str, line: str) -> None:
    assert one_line(log) == line


def _kept(version: str, target: int, label: str) -> AotRow:
    rows = [r for r in aot.kept() if (r.compiler, r.target, r.candidate) == (f"triton {version}", target, label)]
    (row,) = rows
    return row


class TestDotScaledByTriton:
    """The finding, from the rows kept under profiles/aot/, and those rows against the installed Triton."""

    group32, group16 = tuple(dot_scaled.FORMATS)

    @pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
    def test_before_3_8_gb10_has_no_native_e2m1(self, version: str) -> None:
        assert _kept(version, 121, self.group32).instruction == "mma.sync m16n8k16 bf16"
        crash = _kept(version, 121, self.group16)
        assert crash.status == "error"
        assert crash.message.startswith("TritonGPUAccelerateMatmul: Assertion")

    @pytest.mark.parametrize("version", ["3.8.0", "3.9.0"])
    def test_from_3_8_gb10_is_native(self, version: str) -> None:
        assert _kept(version, 121, self.group32).instruction == "mma.sync m16n8k64 kind::mxf4nvf4 2X"
        assert _kept(version, 121, self.group16).instruction == "mma.sync m16n8k64 kind::mxf4nvf4 4X"

    @pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.0"])
    def test_the_other_targets(self, version: str) -> None:
        assert _kept(version, 120, self.group16).instruction == "mma.sync m16n8k64 kind::mxf4nvf4 4X"
        assert _kept(version, 100, self.group16).instruction.startswith("tcgen05.mma kind::mxf4nvf4")
        assert _kept(version, 90, self.group32).instruction == "wgmma m64n128k16 bf16"
        assert _kept(version, 90, self.group16).status == ("error" if version < "3.8" else "ok")

    @pytest.mark.slow
    @needs_triton
    def test_the_installed_triton_still_answers_so(self) -> None:
        compiler = f"triton {metadata.version('triton')}"
        kept = [r for r in aot.kept() if (r.compiler, r.target) == (compiler, 121)]
        if not kept:
            pytest.skip(f"{compiler} has no rows under profiles/aot/; add them with lab compile --probe --write")

        # Registers and spills are the assembler's, which a build of the same Triton from elsewhere may carry in
        # another release; what Triton itself decides has to agree.
        def decided(rows: list[AotRow]) -> list[tuple[object, ...]]:
            return sorted(
                (r.target, r.candidate, r.status, r.instruction, r.shared_bytes or 0, r.message) for r in rows
            )

        assert decided(compile.probe_rows((121,))) == decided(kept)

    def test_the_newest_row_of_a_version_stands(self, tmp_path: Path) -> None:
        old, other = AotRow("f", "c", "b", 90, "triton 1", "ok"), AotRow("f", "c", "b", 90, "triton 2", "ok")
        store.append_all(tmp_path, [old, other])
        path = store.append(tmp_path, AotRow("f", "c", "b", 90, "triton 1", "error", "no", date="2026-01-02"))
        assert [(r.compiler, r.status, r.date) for r in aot.kept(path)] == [
            ("triton 1", "error", "2026-01-02"),
            ("triton 2", "ok", ""),
        ]
        path.write_text("{}\n")
        with refused("jsonl line 1", '"family"'):
            aot.kept(path)
