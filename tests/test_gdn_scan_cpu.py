"""kernels/gdn/scan.cu on a CPU: tests/gdn_on_cpu.cuh stands in for the PTX words, a host compiler does the rest.

That holds every index, fragment layout, descriptor, ring and barrier to the reference; what it cannot show is rounding
inside the tensor core, the asynchronous proxy and speed.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.common import Tensors, Workload
from kernels.gdn import cases, cuda_scan
from kernels.gdn.reference import reference

HERE = Path(__file__).resolve().parent
FOLDER = cuda_scan.SOURCE.path.parent

ENTRY = """
extern "C" void prepare_on_cpu(int chunks, int hk, const u16* q, const u16* k, const float* g, const float* beta,
                               const int* table, char* workspace, float scale, int hv, int normalise, u16* q_fp16,
                               u16* k_fp16) {
    of_earlier_grid = {};
    launch_on_cpu({chunks, hk, 1}, 128, [=] {
        PREPARE_NAME(q, k, g, beta, table, workspace, scale, hk, hv, normalise, q_fp16, k_fp16);
    });
}
extern "C" void scan_on_cpu(int x, int hv, int sequences, int threads, const TensorMap* maps, const u16* q,
                            const u16* k, const u16* v, const char* workspace, const void* initial, void* final_state,
                            u16* o, const int* bounds, const int* offsets, int hk, int state_type,
                            long workspace_bytes, long converted_bytes) {
    of_earlier_grid = {{workspace, workspace_bytes}, {q, converted_bytes}, {k, converted_bytes}};
    launch_on_cpu({x, hv, sequences}, threads, [=] {
        SCAN_NAME(maps[0], maps[1], maps[2], maps[3], q, k, v, workspace, initial, final_state, o, bounds, offsets, hk,
                  hv, state_type);
    });
}
"""


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A scan -> a library with it and its preparation as functions of the host."""
    compiler = shutil.which("g++")
    if not compiler:
        pytest.skip("needs g++ to run the kernels on the CPU")
    folder = tmp_path_factory.mktemp("scan")
    made: dict[Any, Any] = {}
    prepare = (FOLDER / "prepare.cuh").read_text().replace("hopper.cuh", f"{HERE}/gdn_on_cpu.cuh")
    (folder / "prepare.cuh").write_text(prepare.replace("extern __shared__", "extern"))
    source = cuda_scan.SOURCE.path.read_text().replace("extern __shared__", "extern")

    def build(variant: cuda_scan.ScanVariant) -> Any:
        if variant not in made:
            dim, dtype, groups = variant.dim, variant.dtype, variant.groups
            kept = (f"PREPARE({dim}, {dtype},", f"SCAN({dim}, {dtype}, {groups},")
            keep = [x for x in source.splitlines() if x.startswith(kept) or not x.startswith(("PREPARE(", "SCAN("))]
            entry = ENTRY.replace("PREPARE_NAME", f"gdn_prepare_d{dim}_{dtype}").replace("SCAN_NAME", variant.kernel)
            path = folder / f"{variant.kernel}.cpp"
            path.write_text("\n".join(keep) + entry)
            command = [compiler, "-O2", "-std=c++20", "-w", "-shared", "-fPIC", str(path), "-o", f"{path}.so"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr[-3000:]
            made[variant] = ctypes.CDLL(f"{path}.so")
        return made[variant]

    return build


def pointer(x: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def tensor_map(x: torch.Tensor) -> bytes:
    columns = x.shape[-2] * x.shape[-1]
    return struct.pack("<qqq", x.data_ptr(), x.numel() // columns, columns).ljust(128, b"\0")


def run(library: Any, variant: cuda_scan.ScanVariant, inputs: Tensors, out: Tensors) -> Tensors:
    wide = variant.dtype == cuda_scan.WIDE
    args = (cuda_scan._prepare_wide if wide else cuda_scan._prepare)(inputs)
    args["workspace"].fill_(0x7F)
    q, k, v = args.get("q_fp16", args["q"]), args.get("k_fp16", args["k"]), args["v"]
    heads_k, (heads_v, dim) = k.shape[-2], v.shape[-2:]
    maps = ctypes.create_string_buffer(b"".join(map(tensor_map, (k, q, v, out["o"]))) + bytes(64), 4 * 128 + 64)
    aligned = (ctypes.addressof(maps) + 63) // 64 * 64
    ctypes.memmove(aligned, bytes(maps)[: 4 * 128], 4 * 128)
    maps_at = ctypes.c_void_p(aligned)
    named = [args[n] for n in ("q", "k", "g", "beta", "chunks", "workspace")]
    converted = [pointer(args.get(n)) for n in ("q_fp16", "k_fp16")]
    library.prepare_on_cpu(
        args["chunks"].shape[0], heads_k, *map(pointer, named), ctypes.c_float(dim**-0.5), heads_v,
        int("raw_qk" in args), *converted,
    )  # fmt: skip
    named = [q, k, v, args["workspace"], args["initial_state"], out["final_state"], out["o"]]
    named += [args["cu_seqlens"], args["chunk_offsets"]]
    library.scan_on_cpu(
        dim // (64 * variant.groups), heads_v, args["chunk_offsets"].numel(), 128 * (variant.groups + 1),
        maps_at, *map(pointer, named), heads_k,
        0 if args["initial_state"].dtype == torch.bfloat16 else 2,
        ctypes.c_long(args["workspace"].numel()), ctypes.c_long(2 * k.numel() if wide else 0),
    )  # fmt: skip
    return args


def problems(variant: cuda_scan.ScanVariant) -> tuple[Workload, ...]:
    """A ragged batch of raw keys, and for the halves of heads also similar keys over six chunks."""
    wide = variant.dtype == cuda_scan.WIDE
    shape: dict[str, Any] = {"D": variant.dim, "dtype": "bf16" if wide else variant.dtype}
    shape["out_dtype"] = "f32" if wide else ""
    ragged = cases._prefill(140, (1, 3), lengths="64-1-75", qk_l2norm=1, **shape)
    return (ragged, cases._prefill(330, (1, 1), regime="similar", **shape)) if variant.groups == 1 else (ragged,)


PROBLEMS = tuple((variant, problem) for variant in cuda_scan.VARIANTS for problem in problems(variant))


def assert_within(problem: Workload, inputs: Tensors, out: Tensors, precision: str) -> None:
    wanted = reference(inputs)
    for name, limit in cases.tolerance(problem, precision).items():
        error, norm = out[name].double() - wanted[name], wanted[name].norm()
        relative = (error.norm() / norm).item()
        print(f"{problem.id} {name} {relative:.2e}")
        assert not math.isnan(relative)
        assert relative <= limit.relative_error, name
        assert (error.abs().max() / (norm / wanted[name].numel() ** 0.5)).item() <= limit.max_error, name


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "problem"), PROBLEMS, ids=lambda x: getattr(x, "kernel", None) or x.id)
def test_on_cpu(on_cpu: Any, variant: cuda_scan.ScanVariant, problem: Workload) -> None:
    inputs = cases.inputs(problem, 1, "cpu")
    out = cases.outputs(problem, inputs)
    run(on_cpu(variant), variant, inputs, out)
    assert_within(problem, inputs, out, "fp16" if variant.dtype == cuda_scan.WIDE else variant.dtype)


@pytest.mark.slow
def test_raw_rows_of_any_size_become_fp16(on_cpu: Any) -> None:
    """Rows from 2^-40 to 2^40, and one of zeros: far outside fp16, exact once scaled by a power of two."""
    variant = next(v for v in cuda_scan.VARIANTS if v.dtype == cuda_scan.WIDE)
    problem = cases._prefill(70, (1, 1), D=128, dtype="bf16", out_dtype="f32", qk_l2norm=1)
    inputs = cases.inputs(problem, 1, "cpu")
    for name in ("q", "k"):
        power = torch.randint(-40, 41, (1, 70, 1, 1), generator=torch.Generator().manual_seed(3))
        inputs[name] = torch.ldexp(inputs[name].float(), power).to(torch.bfloat16)
        inputs[name][:, 7] = 0
    out = cases.outputs(problem, inputs)
    run(on_cpu(variant), variant, inputs, out)
    assert_within(problem, inputs, out, "fp16")
