"""kernels/gdn in CUDA C++: launch choices and sources without a GPU, each instantiation against the reference with one.

The numerics need a Hopper GPU; what runs anywhere is the host's side of the bargain (tables, sizes, names) and, where
nvcc is, that the sources compile for sm_90a within the registers and the shared memory of an SM.
"""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
from typing import Any

import pytest
import torch

from kernels import cuda, cuda_driver
from kernels.common import Candidate, CudaSource, Tensors, Workload
from kernels.gdn import (
    cases,
    cuda_decode,
    cuda_decode_conv,
    cuda_scan,
    cuda_segments,
    cuda_segments_in_scan,
    order,
    segments,
)
from kernels.gdn.controls import cuda_decode_single
from kernels.gdn.launch import sequence_bounds
from kernels.gdn.reference import reference
from lab.check.accuracy import compare

SHARED_LIMIT = 227 * 1024
RESERVED = 1024  # of shared memory, per block
SM_SHARED = 228 * 1024
CHECKS = [w for w in cases.WORKLOADS if w.role == "check"]
# Shapes of the models' head size that would be slow in Triton's interpreter; here only the GPU runs them.
WIDE = (
    *(cases._prefill(T, (1, 2), D=128, dtype="bf16") for T in (1, 63, 64, 65, 129, 500)),
    *(cases._prefill(300, (2, 6), D=128, dtype="bf16", regime=r) for r in ("keep", "forget", "beta0", "beta1")),
    cases._prefill(300, (2, 6), D=128, dtype="bf16", regime="similar"),
    cases._prefill(200, (2, 6), D=128, dtype="bf16", batch=3, qk_l2norm=1),
    cases._prefill(137, (1, 4), D=128, dtype="bf16", lengths="7-64-1-65", qk_l2norm=1),
    cases._prefill(300, (1, 3), D=128, dtype="fp16", qk_l2norm=1),
    *(
        cases._prefill(300, (2, 6), D=128, dtype="bf16", out_dtype="f32", regime=r)
        for r in ("keep", "forget", "beta0", "beta1", "similar")
    ),
    cases._prefill(137, (1, 4), D=128, dtype="bf16", out_dtype="f32", lengths="7-64-1-65", qk_l2norm=1),
    cases._prefill(64, (1, 1), D=128, dtype="bf16", out_dtype="f32"),
    # Normal operands: one token writes one product a head, and with heavy tails a few elements hold all its energy.
    cases._prefill(1, (4, 16), D=128, dtype="bf16", out_dtype="f32", role="measure"),
    *(cases._prefill(129, (1, 3), dtype="bf16", regime=r) for r in ("keep", "forget", "beta0", "beta1", "similar")),
    *(cases._prefill(8193, heads, D=128, dtype="bf16") for heads in ((1, 1), (2, 8))),
    cases._prefill(8193, (1, 1), D=128, dtype="bf16", out_dtype="f32"),
)  # fmt: skip


def needs_hopper() -> None:
    pytest.importorskip("cupy", reason="the CUDA C++ candidates are loaded through CuPy")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("sm_90a code runs on compute capability 9.0 only")


def assert_within(
    out: Tensors, inputs: Tensors, problem: Workload, precision: str, wanted: Tensors | None = None
) -> None:
    wanted = wanted or reference(inputs)
    for name, limit in cases.tolerance(problem, precision).items():
        error = compare(name, out[name], wanted[name], limit)
        assert error.ok, error


# --- without a GPU ---------------------------------------------------------------------------------------------------


def test_chunks_never_cross_a_sequence() -> None:
    spans, offsets = cuda_scan.chunk_tables([0, 7, 71, 72, 201])
    assert spans == [(0, 7), (7, 71), (71, 72), (72, 201), (136, 201), (200, 201)]
    assert offsets == [0, 1, 2, 3]


def test_workspace_and_tables_of_a_ragged_batch() -> None:
    problem = next(w for w in CHECKS if w["lengths"] == "1-65")
    args = cuda_scan._prepare(cases.inputs(problem, 0, "cpu"))
    assert args["chunks"].tolist() == [[0, 1], [1, 66], [65, 66]]
    assert args["workspace"].numel() == 3 * problem["Hv"] * cuda_scan.BLOCK_BYTES
    assert args["cu_seqlens"].tolist() == sequence_bounds(args).tolist() == [0, 1, 66]


@pytest.mark.parametrize(("raw", "block_bytes"), [(0, 5376), (1, 11264)])
def test_workspace_is_for_the_scan_that_is_chosen(raw: int, block_bytes: int) -> None:
    problem = cases._prefill(65, (1, 8), D=128, dtype="bf16", batch=12, qk_l2norm=raw)
    args = cuda_scan._prepare(cases.inputs(problem, 0, "cpu"))
    assert cuda_scan.chosen(args).block_bytes == block_bytes
    assert args["workspace"].numel() == 24 * 8 * block_bytes
    assert cuda_scan.describe(problem).endswith(cuda_scan.chosen(args).kernel)


@pytest.mark.parametrize(
    ("sequences", "heads_v", "groups", "recompute"),
    [
        (1, 48, 1, False),
        (1, 66, 1, False),
        (2, 48, 2, True),
        (3, 48, 1, True),
        (4, 48, 1, True),
        (5, 48, 2, True),
        (8, 48, 2, True),
    ],
)
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", cuda_scan.WIDE])
def test_scan_choice_is_instantiated(
    sequences: int, heads_v: int, groups: int, recompute: bool, dtype: str, raw: bool
) -> None:
    wide = dtype == cuda_scan.WIDE
    assert wide or cuda_scan.choose_config(sequences, heads_v, 64, dtype, raw) in cuda_scan.VARIANTS
    chosen = cuda_scan.choose_config(sequences, heads_v, 128, dtype, raw)
    assert chosen in cuda_scan.VARIANTS
    recompute = recompute and not raw and not wide
    assert (chosen.groups, chosen.recompute) == (2 if recompute else groups, recompute)


def test_recomputed_scores_refuse_raw_rows() -> None:
    problem = cases._prefill(70, (1, 1), D=128, dtype="bf16", qk_l2norm=1)
    args, variant = cuda_scan._prepare(cases.inputs(problem, 0, "cpu")), cuda_scan.ScanVariant(128, "bf16", 2, True)
    with pytest.raises(ValueError, match=r"_g2_lean\b.*gdn_scan_d128_bf16_g2$"):
        cuda_scan.prepare_chunks(args, variant)


@pytest.mark.parametrize(
    ("sequences", "heads_v", "dim", "dtype", "one"),
    [
        (1, 48, 128, "bf16", True),
        (1, 54, 128, "fp16", True),
        (3, 16, 128, "bf16", True),
        (1, 55, 128, "bf16", False),
        (2, 48, 128, "bf16", False),
        (1, 48, 64, "bf16", False),
        (1, 48, 128, cuda_scan.WIDE, False),
    ],
)
def test_one_launch_where_the_scans_leave_room(sequences: int, heads_v: int, dim: int, dtype: str, one: bool) -> None:
    assert cuda_scan.fuses(sequences, heads_v, dim, dtype) is one
    wide = dtype == cuda_scan.WIDE
    axes = {"dtype": "bf16", "out_dtype": "f32"} if wide else {"dtype": dtype}
    problem = cases._prefill(70, (1, heads_v), D=dim, batch=sequences, **axes)  # type: ignore[arg-type]
    assert ("gdn_fused_d128" in cuda_scan.describe(problem)) is one
    small = cases._prefill(70, (1, heads_v // 8), D=dim, batch=8 * sequences, **axes)  # type: ignore[arg-type]
    args = (cuda_scan._prepare_wide if wide else cuda_scan._prepare)(cases.inputs(small, 1, "cpu"))
    assert ("sync" in args) is cuda_scan.fuses(8 * sequences, heads_v // 8, dim, dtype)


@pytest.mark.parametrize(("tokens", "ahead"), [(8192, (36, 2, 3)), (2048, (36, 1, 2)), (512, (36, 1, 1))])
def test_long_sequences_are_prepared_further_ahead(tokens: int, ahead: tuple[int, int, int]) -> None:
    """16 k heads, 48 v heads: what 36 blocks cannot prepare while the scans run, the other 96 do before."""
    made = order.make([0, tokens], 16, 48, cuda_scan.SMS)
    assert (made.preparing, made.ahead, made.teams) == ahead
    assert made.scans == 96
    assert len(made.blocks) <= cuda_scan.SMS + 96
    assert f"{ahead[0]} blocks prepare, {ahead[1]} x {ahead[2]} units" in str(made)


def test_an_order_is_checked() -> None:
    bounds = [0, 330, 331, 494]
    made = order.make(bounds, 2, 4, cuda_scan.SMS)
    assert made.checked(bounds, 2, 4) is made
    twice = dataclasses.replace(made, blocks=(made.blocks[0], *made.blocks))
    with pytest.raises(ValueError, match="prepared twice"):
        twice.checked(bounds, 2, 4)
    late = dataclasses.replace(made, blocks=made.blocks[::-1])
    with pytest.raises(ValueError, match="before the preparation"):
        late.checked(bounds, 2, 4)
    with pytest.raises(ValueError, match="23 scans"):
        dataclasses.replace(made, blocks=made.blocks[:-1]).checked(bounds, 2, 4)
    with pytest.raises(ValueError, match="use the two launches"):
        order.make(bounds, 2, 4, 24)


def test_driver_structures_are_as_in_cuda_h() -> None:
    config, attribute = cuda_driver._Config, cuda_driver._Attribute
    assert (config.stream.offset, config.attributes.offset, config.count.offset) == (32, 40, 48)
    assert (attribute.value.offset, ctypes.sizeof(attribute)) == (8, 72)


def test_a_tensor_map_says_what_its_caller_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Driver:
        def cuTensorMapEncodeTiled(self, *arguments: Any) -> int:
            calls.append(arguments)
            return 0

    monkeypatch.setattr(cuda_driver, "_library", Driver)
    make = cuda_driver.tensor_map.__wrapped__
    given = (4096, "bf16", 7, 320, 64)
    for promotion in ({}, *({"promotion_bytes": size} for size in (0, 64, 128, 256))):
        assert len(make(*given, **promotion)) == cuda_driver.TENSOR_MAP_BYTES
    # element, rank, address, sizes, bytes of a row, box, steps, interleaving, swizzle, promotion, what lies outside
    assert [call[10].value for call in calls] == [3, 0, 1, 2, 3]
    assert (calls[0][1].value, list(calls[0][4]), list(calls[0][6]), calls[0][9].value) == (9, [320, 7], [64, 64], 3)
    with pytest.raises(ValueError, match=r"promotion_bytes=32\b.*0, 64, 128, 256"):
        make(*given, promotion_bytes=32)
    make(*given, box_bytes=64)
    assert (list(calls[-1][6]), calls[-1][9].value) == ([32, 64], 2)  # the swizzle as wide as the box
    with pytest.raises(ValueError, match=r"box_bytes=32\b.*64, 128"):
        make(*given, box_bytes=32)


@pytest.mark.parametrize("state", ["f32", "bf16"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("batch", [1, 2, 8, 32, 256])
def test_decode_choice_is_instantiated(batch: int, dim: int, state: str) -> None:
    for bf16 in (False, True):
        chosen = cuda_decode.choose_config(batch, 48, dim, state, bf16=bf16)
        assert chosen in cuda_decode.VARIANTS
        assert (chosen.state, chosen.dim) == (state, dim)
        assert bf16 or not chosen.only_bf16


def test_refusals_say_why() -> None:
    prefill, decode = (next(w for w in CHECKS if w["op"] == op) for op in ("prefill", "decode"))
    assert "op = decode" in cuda_scan.refuses(decode)
    assert "f32" in cuda_scan.refuses(prefill)
    assert "D = 256" in cuda_scan.refuses(cases._prefill(5, (1, 1), D=256, dtype="bf16"))
    assert "more than 8" in cuda_scan.refuses(cases._prefill(5, (1, 9), dtype="bf16"))
    assert "cuda_scan_fp16's" in cuda_scan.refuses(cases._prefill(5, (1, 1), dtype="bf16", out_dtype="f32"))
    assert "D = 64" in cuda_scan.refuses_wide(cases._prefill(5, (1, 1), dtype="bf16", out_dtype="f32"))
    long = cases._prefill(8192, (16, 48), D=128, dtype="bf16")
    assert "not worth splitting" in cuda_segments.refuses(long)
    short, several = (cases._prefill(8191 + n, (2, 8), D=128, batch=1 + n, dtype="bf16") for n in (0, 1))
    assert "8191 tokens, 8 v heads: measured from 8192" in cuda_segments.refuses(short)
    assert "8192 tokens, 16 v heads: measured" in cuda_segments_in_scan.refuses(several)
    assert "bf16 alone" in cuda_segments_in_scan.refuses(cases._prefill(8192, (2, 8), D=128, dtype="fp16"))
    with pytest.raises(ValueError, match="use cuda_scan"):
        cuda_segments.prepare(cases.inputs(cases._prefill(65, (1, 1), D=128, dtype="bf16"), 0, "cpu"))
    assert "op = prefill" in cuda_decode.refuses(prefill)
    assert not cuda_decode.refuses(decode)


def test_shared_memory_fits() -> None:
    sizes = {v.kernel: v.shared_bytes for v in cuda_scan.VARIANTS}
    assert {name: size for name, size in sizes.items() if size > SHARED_LIMIT} == {}
    assert cuda_scan.fused_shared_bytes() <= SHARED_LIMIT
    assert max(*cuda_segments.SHARED.values(), *cuda_segments_in_scan.SHARED.values()) <= SHARED_LIMIT
    for name, shared_bytes in cuda_scan.PREPARATIONS.items():  # blocks an SM, as the launch bounds ask
        assert (5 if name.endswith("_lean") else 4) * (shared_bytes + RESERVED) <= SM_SHARED, name


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed")
@pytest.mark.parametrize(
    "source",
    [
        *cuda_scan.CUDA_SOURCES,
        cuda_segments.SOURCE,
        cuda_segments_in_scan.SOURCE,
        cuda_decode.SOURCE,
        *cuda_decode_conv.FORMS.values(),
    ],
    ids=lambda s: s.path.stem,
)
def test_compiles_for_hopper_without_spills(source: CudaSource) -> None:
    from lab.check.aot_worker import compile_cuda

    rows = compile_cuda(source, 90)
    assert [r["build"] for r in rows] == list(source.kernels)
    for row in rows:
        assert row["status"] == "ok", row.get("message")
        assert not row["spill_bytes"], f"{row['build']}: {row['spill_bytes']} bytes spilled"
        assert row["shared_bytes"] >= source.shared_of(row["build"])
        if row["build"].startswith("gdn_prepare"):
            asked = 5 if row["build"].endswith("_lean") else 4  # *PREPARE_BLOCKS of prepare.cuh
            assert row["blocks_per_sm"] == asked, row["build"]
        if row["build"].startswith(
            ("gdn_scan", "gdn_prepare", "gdn_fused", "gdn_segment_maps", "gdn_segment_scan", "gdn_in_scan")
        ):
            assert "wgmma" in row["instruction"]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed")
@pytest.mark.parametrize(
    "source", [*cuda_scan.CUDA_SOURCES, cuda_segments.SOURCE, cuda_segments_in_scan.SOURCE], ids=lambda s: s.path.stem
)
def test_no_product_waits_for_registers(source: CudaSource) -> None:
    """The assembler says where products of wgmma wait for each other, for want of registers or since fragments move."""
    log = (cuda.compiled(source, (9, 0), prefer="nvcc")[1] / "log").read_text()
    assert "Used " in log  # the assembler's words are in it
    assert "serialized" not in log


# --- on a Hopper GPU -------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("candidate", "problem"),
    [(c, w) for c in cuda_scan.CANDIDATES for w in (*CHECKS, *WIDE) if not c.refuses(w)],
    ids=lambda x: getattr(x, "name", None) or x.id,
)
def test_scan_against_reference(candidate: Candidate, problem: Workload) -> None:
    needs_hopper()
    inputs = cases.inputs(problem, 1, "cuda")
    wanted = reference(inputs)
    dtype = cuda_scan.WIDE if candidate.precision == "fp16" else problem["dtype"]
    for variant in cuda_scan.VARIANTS:
        if (variant.dim, variant.dtype) != (problem["D"], dtype) or (variant.recompute and problem["qk_l2norm"]):
            continue
        for programmatic in (False, True):
            out, args = cases.outputs(problem, inputs), candidate.prepare(inputs)
            args["workspace"] = cuda_scan.workspace(args, variant).fill_(0xFF)
            cuda_scan.prepare_chunks(args, variant)
            cuda_scan.scan_chunks(args, out, variant, programmatic)
            assert_within(out, inputs, problem, "fp16" if dtype == cuda_scan.WIDE else str(dtype), wanted)
    out = cases.outputs(problem, inputs)
    candidate.run(candidate.prepare(inputs), out)  # in one launch where it fits
    assert_within(out, inputs, problem, "fp16" if dtype == cuda_scan.WIDE else str(dtype), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    [
        *(cases._prefill(T, (16, 48), D=128, dtype="bf16") for T in (1, 64, 65, 330, 2048, 8192)),
        cases._prefill(2113, (4, 16), D=128, dtype="fp16", lengths="700-713-700", qk_l2norm=1),
        cases._prefill(494, (1, 8), D=128, dtype="bf16", lengths="330-1-163", qk_l2norm=1),
    ],
    ids=lambda p: p.id,
)
def test_one_launch_gives_the_bits_of_two_under_a_graph(problem: Workload) -> None:
    """50 replays, each of other inputs on the flags of the one before, in workspaces and outputs full of NaN."""
    needs_hopper()
    inputs = cases.inputs(problem, 1, "cuda")
    args, out = cuda_scan._prepare(inputs), cases.outputs(problem, inputs)
    pair, wanted = cuda_scan._pack(inputs), cases.outputs(problem, inputs)
    pair["workspace"] = cuda_scan.workspace(pair, cuda_scan.chosen(pair))
    cuda_scan.prefill_at_once(args, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda_scan.prefill_at_once(args, out)
    for turn in range(50):
        for name, x in (("q", args["k"].clone()), ("k", args["q"].clone()), ("v", args["v"].roll(1, 1))):
            args[name].copy_(x)  # the pair reads the same tensors
        for x in (args["workspace"], pair["workspace"]):
            x.fill_(0xFF)
        for x in (*out.values(), *wanted.values()):
            x.fill_(float("nan"))
        graph.replay()
        cuda_scan._run(pair, wanted)
        assert all(torch.equal(out[name], wanted[name]) for name in wanted), f"replay {turn}"
        assert not any(x.isnan().any() for x in out.values())
    assert args["sync"][:2].tolist() == [51, 0]


SPLITTING = {"bf16": (cuda_segments, cuda_segments_in_scan), "fp16": (cuda_segments,)}
SPLIT = [w for w in WIDE if w["D"] == 128 and w["T"] > 128 and "out_dtype" not in w.axes]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("problem", "kernel"),
    [(problem, kernel) for problem in SPLIT for kernel in SPLITTING[str(problem["dtype"])]],
    ids=lambda x: getattr(x, "id", "") or x.__name__.rpartition(".")[2],
)
def test_segments_against_reference(problem: Workload, kernel: Any) -> None:
    """Of one chunk, of two and of sixteen; then replayed in a workspace full of NaN."""
    needs_hopper()
    inputs = cases.inputs(problem, 1, "cuda")
    wanted = reference(inputs)
    plans = [segments.Plan(chunks, groups, 0.0, 0) for chunks in (1, 2, 16) for groups in (1, 2)]
    for plan in plans:
        args, out = kernel.prepare(inputs, plan=plan), cases.outputs(problem, inputs)
        kernel.run(args, out)
        assert_within(out, inputs, problem, str(problem["dtype"]), wanted)
        again = cases.outputs(problem, inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel.run(args, again)
        for name in ("workspace", "starts", "transitions"):
            args[name].view(torch.uint8).fill_(0xFF)
        graph.replay()
        assert all(torch.equal(out[name], again[name]) for name in out), plan


@pytest.mark.gpu
@pytest.mark.parametrize("variant", cuda_decode.VARIANTS, ids=lambda v: v.kernel)
def test_decode_against_reference(variant: cuda_decode.DecodeVariant) -> None:
    needs_hopper()
    shape = {"D": variant.dim, "state_dtype": variant.state}
    for problem in (
        cases._decode(5, (2, 4), dtype="bf16", pad=2, **shape),  # type: ignore[arg-type]
        cases._decode(7, (2, 4), dtype="fp16", qk_l2norm=1, pad=1, **shape),  # type: ignore[arg-type]
        cases._decode(37, (4, 12), dtype="f32", **shape),  # type: ignore[arg-type]
        cases._decode(67, (4, 12), dtype="bf16", qk_l2norm=1, pad=3, **shape),  # type: ignore[arg-type]
    ):
        if variant.only_bf16 and problem["dtype"] != "bf16":
            continue
        inputs = cases.inputs(problem, 1, "cuda")
        out = cases.outputs(problem, inputs)
        cuda_decode.launch(inputs, out["state"], out["o"], variant)
        assert_within(out, inputs, problem, "f32")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", cuda_decode.VARIANTS, ids=lambda v: v.kernel)
def test_decode_from_the_convolution_against_reference(variant: cuda_decode.DecodeVariant) -> None:
    """Two launches, the second on what the first left of both states and of the tickets."""
    needs_hopper()
    shape = {"D": variant.dim, "state_dtype": variant.state}
    for problem in (
        cases._decode(5, (2, 4), dtype="bf16", pad=2, **shape),  # type: ignore[arg-type]
        cases._decode(37, (4, 12), dtype="fp16", **shape),  # type: ignore[arg-type]
        cases._decode(37, (16, 48), dtype="bf16", **shape),  # type: ignore[arg-type]
    ):
        problem = cases._from_conv(problem)
        inputs = cases.inputs(problem, 1, "cuda")
        args, out = cuda_decode_conv._prepare(inputs), cases.outputs(problem, inputs)
        for _ in range(2):
            before = inputs | {name: out[name].clone() for name in cases.IN_PLACE}
            cuda_decode_conv.launch(args, out, variant)
            assert_within(out, before, problem, "f32")


@pytest.mark.gpu
def test_one_sequence_is_the_same_bits_alone_served_and_by_id() -> None:
    needs_hopper()
    problem = cases._in_pool(cases._decode(1, (2, 6), D=128, dtype="bf16"), 5)
    inputs = cases.inputs(problem, 1, "cuda")
    outs = []
    for candidate in (*cuda_decode.CANDIDATES, *cuda_decode_single.CANDIDATES):
        outs.append(cases.outputs(problem, inputs))
        candidate.run(candidate.prepare(inputs), outs[-1])
    assert_within(outs[0], inputs, problem, "f32")
    assert all(torch.equal(other[n], outs[0][n]) for other in outs[1:] for n in other)


@pytest.mark.gpu
def test_a_sequence_does_not_depend_on_its_batch() -> None:
    """The same bits for a sequence packed with others, and alone with half a head and one head per CTA."""
    needs_hopper()
    problem = cases._prefill(300, (2, 6), D=128, dtype="bf16", lengths="70-129-101")
    inputs = cases.inputs(problem, 1, "cuda")
    out = cases.outputs(problem, inputs)
    cuda_scan.CANDIDATES[0].run(cuda_scan._prepare(inputs), out)
    alone = {n: inputs[n][:, 70:199].contiguous() for n in ("q", "k", "v", "g", "beta")}
    alone["initial_state"] = inputs["initial_state"][1:2].contiguous()
    for variant in [v for v in cuda_scan.VARIANTS if (v.dim, v.dtype) == (128, "bf16")]:
        other = {"o": torch.empty_like(alone["v"]), "final_state": torch.empty_like(alone["initial_state"])}
        args = cuda_scan._prepare(alone)
        args["workspace"] = cuda_scan.workspace(args, variant)
        cuda_scan.prepare_chunks(args, variant)
        cuda_scan.scan_chunks(args, other, variant)
        assert torch.equal(other["o"][0], out["o"][0, 70:199])
        assert torch.equal(other["final_state"][0], out["final_state"][1])
