"""What a file says of its kernels' work and of how they were launched: shapes, bytes, registers, grids."""

import json
from pathlib import Path
from typing import Any

import pytest

from lab.base import devices
from lab.cli import main
from lab.trace import roofline
from lab.trace.files import read
from lab.trace.model import Launch
from lab.trace.summary import summarise
from tests.trace.nsys_synthetic import Export

REAL = Path(__file__).parent / "profiles"
BF16, FP8 = "c10::BFloat16", "c10::Float8_e4m3fn"


@pytest.mark.parametrize(
    ("name", "dims", "types", "given", "expected"),
    [
        ("aten::mm", [[4, 8], [8, 16]], [BF16] * 2, (), ("4 x 16 x 8", 1024.0, 2.0 * (32 + 128 + 64), "bf16")),
        ("aten::addmm", [[16], [4, 8], [8, 16]], [BF16] * 3, (), ("4 x 16 x 8", 1024.0, 448.0, "bf16")),
        ("aten::bmm", [[3, 4, 8], [3, 8, 16]], [BF16] * 2, (), ("3 x 4 x 16 x 8", 3072.0, 1344.0, "bf16")),
        ("aten::_scaled_mm", [[4, 8], [8, 16]], [FP8] * 2, (), ("4 x 16 x 8", 1024.0, 32.0 + 128 + 2 * 64, "fp8")),
        ("aten::mm", [[4, 8], [8, 16]], ["float"] * 2, (), None),  # on tensor cores or not: not said
        ("aten::mm", [[4, 8], [9, 16]], [BF16] * 2, (), None),
        ("aten::mm", [[], []], [BF16] * 2, (), None),
        ("aten::mm", "x", None, (), None),
        ("aten::mm", [["a", 8], [8, 16]], [BF16] * 2, (), None),
        ("aten::_scaled_dot_product_flash_attention", [[2, 3, 5, 8], [2, 1, 7, 8], [2, 1, 7, 4]], [BF16] * 3, (),
         ("2 x 3 x 5 x 7 x 8", 2.0 * 2 * 3 * 5 * 7 * 12, 2.0 * (240 + 112 + 56 + 120), "bf16")),
        ("aten::_flash_attention_forward", [[2, 5, 3, 8]] * 3, [BF16] * 3, ["", "True"],
         ("2 x 3 x 5 x 5 x 8 causal", 2.0 * 2 * 3 * 25 * 16 / 2, 2.0 * 4 * 240, "bf16")),
    ],
)  # fmt: skip
def test_the_work_of_an_operator(name: str, dims: Any, types: Any, given: Any, expected: Any) -> None:
    assert roofline.operator_work(name, dims, types, given) == expected


def event(category: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args}


def kineto(path: Path, gpu: str = "NVIDIA H200") -> Path:
    """Two products of one shape, each with a reduction beside the product, and a kernel of an unknown operator."""
    shape = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": [BF16, BF16]}
    events = [event("cuda_runtime", "cudaLaunchKernel", 0, 1, correlation=1)]
    for i in range(2):
        at: dict[str, Any] = {"device": 0, "stream": 7, "correlation": i + 2, "External id": i + 1}
        how = {"registers per thread": 168, "shared memory": 2048, "block": [384, 1, 1], "grid": [132 + i, 1, 1]}
        events.append(event("cpu_op", "aten::mm", i * 10, 5, **{"External id": i + 1}, **shape))
        events.append(event("kernel", "nvjet_tst", 1000 + i * 1000, 200 + i * 200, **at, **how))
        events.append(event("kernel", "splitKreduce", 1500 + i * 1000, 20, **at))
    events.append(event("cpu_op", "aten::mm", 90, 5, **shape))
    events.append(event("kernel", "mystery", 5000, 380, device=0, stream=7, correlation=9))
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": gpu}],
                                "traceEvents": events}))  # fmt: skip
    return path


def test_a_product_stands_under_the_roof_of_its_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = kineto(tmp_path / "a.json")
    s = summarise(read(path))
    (found,) = s.roofline
    flops, peak = 2 * 4096**3, devices.get("h200").peak("bf16").base
    assert (found.name, found.shape, found.launches, found.us) == ("nvjet_tst", "4096 x 4096 x 4096", 2, 300.0)
    assert found.tflop_s == pytest.approx(flops / 300e-6 / 1e12)
    assert found.gb_s == pytest.approx(3 * 2 * 4096**2 / 300e-6 / 1e9)
    assert (found.bound, found.of_roof) == ("compute", pytest.approx(flops / peak / 300e-6))
    assert "420.0 us (41.2%)" in s.roofline_of, "the reductions and the unknown kernel are left out, and said to be"
    kernel = next(k for k in s.top_kernels if k.name == "nvjet_tst")
    assert (kernel.registers, kernel.shared_bytes, kernel.block, kernel.grid) == (168, 2048, "384x1x1", "132x1x1")
    assert main.main(["trace", str(path)]) == 0
    out = capsys.readouterr().out
    assert "4096 x 4096 x 4096" in out
    assert "384x1x1" in out
    (unknown,) = summarise(read(kineto(tmp_path / "b.json", "A GPU of tomorrow"))).roofline
    assert (unknown.of_roof, unknown.tflop_s) == (None, found.tflop_s), "rates need no GPU, a roof does"


def test_bytes_that_nsight_compute_counted() -> None:
    s = summarise(read(REAL / "ncu_raw.csv"))
    scan = next(p for p in s.roofline if p.name.startswith("gdn_scan"))
    assert scan.gb_s == pytest.approx((62_428_416 + 15_025_408) / 44.768 / 1e3)
    assert (scan.tflop_s, scan.flop_per_byte) == (None, None), "operations are not among the metrics"
    assert "not counted" in s.roofline_of
    kernel = next(k for k in s.top_kernels if k.name.startswith("gdn_scan"))
    assert (kernel.registers, kernel.shared_bytes, kernel.block, kernel.grid) == (232, 184_448, "256", "96")


def test_how_kernels_are_launched_in_an_export(tmp_path: Path) -> None:
    export = Export()
    shape = {"registersPerThread": 40, "staticSharedMemory": 1000, "dynamicSharedMemory": 24, "blockX": 64}
    sizes = {"blockY": 1, "blockZ": 1, "gridX": 5, "gridY": 2, "gridZ": 1}
    for i in range(3):
        export.kernel("a<int>()", i * 10, i * 10 + 5, **shape, **(sizes | {"gridX": 5 + i}))
    export.kernel("b()", 40, 50, registersPerThread="\x1b[31m")
    t = read(export.write(tmp_path / "a.sqlite"))
    assert t.launched == {t.names[0]: Launch(40, 1024, (64, 1, 1), (5, 2, 1))}, "the first launch; a text is no number"
    first, other = summarise(t).top_kernels
    assert (first.registers, first.grid, other.registers, other.grid) == (40, "5x2x1", None, "")
