"""kernels/kv/decode.cu: launch choices, refusals, registers as compiled, and the numbers, on a CPU and on a GPU.

Without a GPU the source itself runs: on_cpu/sm90.cuh stands in for the PTX, a host compiler does the rest.
That holds every index, fragment layout, barrier and the merge of partial results to the reference; what it cannot show
is the timing of real asynchronous copies, rounding inside the tensor core, and speed.
"""

import ctypes
import functools
import math
import re
import shutil
import struct
from dataclasses import replace

import pytest
import torch

from kernels.common import CudaSource, Tensors, Tolerance, Workload
from kernels.kv import cases, cuda_decode
from kernels.kv.controls import cuda_layouts
from kernels.kv.reference import reference
from lab.check import accuracy, aot_worker
from tests.kernels.on_cpu.stand_in import Change, Stopped, built, needs_compiler

SOURCE = cuda_decode.CUDA_SOURCES[0].path
PRECISION = {"fp8": "fp8-kv", "q8_0": "q8_0-kv", "bf16": "bf16", "fp16": "bf16"}
FORMS = {name: form for (form, _), name in cuda_decode.KERNELS.items()}
NO_PAGE = 2**31 - 1
DIMS = {name: dim for (_, dim), name in cuda_decode.KERNELS.items()}

ENTRY = """
static struct { ARGUMENTS; } given;
struct Extent { const char* begin; u64 bytes; };
static std::vector<Extent> readable;  // what bulk copies may read
extern "C" void allow_copies(const char* begin, u64 bytes) {
    if (!bytes) readable.clear();
    else readable.push_back({begin, bytes});
}
static std::vector<Extent> ahead;  // what the kernel ahead of a programmatic launch may write
static int early;                  // copies before the wait, since they were last asked for
extern "C" void written_ahead(const char* begin, u64 bytes) {
    if (!bytes) ahead.clear();
    else ahead.push_back({begin, bytes});
}
extern "C" int early_copies() { return std::exchange(early, 0); }
extern "C" void on_cpu(int mode, int grid, int threads, int order, PARAMETERS) {
    ASSIGN
    on_async_read = [](const void* from, u32 bytes) {
        const char* at = (const char*)from;
        if (PDL && !cpu.now->waited) {
            early++;
            for (const Extent& x : ahead)
                if (at < x.begin + x.bytes && x.begin < at + bytes) stop("a read of what the kernel ahead may write");
        }
        for (const Extent& x : readable) if (at >= x.begin && at + bytes <= x.begin + x.bytes) return;
        stop("bulk copy from outside the cache");
    };
    launch_on_cpu({.grid = {grid, 1, 1}, .threads = threads, .at_once = order == 2 ? grid : 1,
                   .copies = mode ? AT_WAIT : AT_ISSUE, .backwards = order == 1, .uneven = mode == 1},
                  [] { NAME(PASS); });
}
"""


@pytest.fixture(scope="module")
def on_cpu():
    """name -> a library with the kernel as a function of the host, compiled once each. Maps go in by address."""
    declared = re.search(r'extern "C" __global__ .*? name\((.*?)\) \{', SOURCE.read_text(), re.S)
    assert declared
    parameters = declared.group(1)
    parameters = " ".join(parameters.replace("\\", " ").replace("const __grid_constant__ ", "").split())
    names = [re.findall(r"\w+", p)[-1] for p in parameters.split(",")]

    def build(name: str, *changes: Change):
        given = [f"given.{n}" for n in names]
        entry = ENTRY.replace("ARGUMENTS", parameters.replace(",", ";"))
        entry = entry.replace("PARAMETERS", parameters.replace("TensorMap ", "const TensorMap* "))
        entry = entry.replace("ASSIGN", " ".join(f"given.{n} = {'*' if n.endswith('_map') else ''}{n};" for n in names))
        entry = entry.replace("NAME", name).replace("PASS", ", ".join(given))
        keep = lambda line: not line.startswith("KV_DECODE(") or f"({name}," in line  # noqa: E731
        return built(SOURCE, entry, *changes, keep=keep)

    return functools.cache(build)


def problem(workload: Workload, kernel: str, gain: float = 1.0) -> tuple[Tensors, Tensors]:
    """The problem with every sequence of full length and pages anywhere, and the kernel's arguments for it.

    A row of no such page lies behind the table's last. `hold` says which sequences there are.
    """
    given = cases.inputs(workload, 0, "cpu")
    given["q"] *= gain
    rows, columns = given["page_table"].shape
    order = torch.randperm(given["k_cache"].shape[0], generator=torch.Generator().manual_seed(7))
    given["page_table"] = order[: rows * columns].int().reshape(rows, columns)
    given["seq_lens"] = torch.full((rows,), workload["ctx"], dtype=torch.int32)
    form = FORMS[kernel]
    args = cuda_decode.prepare(given, form if form in ("fp8", "q8_0") else "16bit")
    args["page_table"] = torch.full((rows + 1, columns), NO_PAGE, dtype=torch.int32)[:rows]
    args["seq_lens"] = given["seq_lens"].clone()
    for name in ("k", "v", "k_scale", "v_scale"):
        args[name] = args[name].clone()
    return given, args


def hold(workload: Workload, given: Tensors, args: Tensors, clean: Tensors, lengths: list[int], precision: str):
    """Give the sequences these lengths, in the memory that the kernel was given; the answer.

    Junk wherever no sequence owns a slot then: no such page in the table, NaN (or the form's largest value) in planes.
    clean: the planes of `args` before any of it was junk.
    """
    given["seq_lens"].copy_(torch.tensor(lengths))
    table, page = given["page_table"], given["k_cache"].shape[2]
    args["seq_lens"].copy_(given["seq_lens"])
    args["page_table"].fill_(NO_PAGE)
    unowned = torch.ones(given["k_cache"].shape[0], page, dtype=torch.bool)
    for b, length in enumerate(lengths):
        pages = table[b, : -(-length // page)]
        args["page_table"][b, : len(pages)] = pages
        for t in range(length):
            unowned[int(pages[t // page]), t % page] = False
    for name, plane in clean.items():
        args[name].copy_(plane)
        junk = {torch.uint8: 0x7F, torch.int8: 127}.get(plane.dtype, math.nan)
        args[name].transpose(1, 2)[unowned] = junk
    return reference(cases.reference_inputs(workload, given, precision))["o"]


def newest(args: Tensors, lengths: list[int]) -> list[torch.Tensor]:
    """The queries, and of each cache the rows of the sequences' last tokens."""
    page = args["k"].shape[2]
    last = [(int(args["page_table"][b, (n - 1) // page]), (n - 1) % page) for b, n in enumerate(lengths) if n]
    planes = [args[name] for name in ("k", "v", "k_scale", "v_scale") if args[name].dim() == 4]
    return [args["q"], *(plane[at, h, slot] for plane in planes for at, slot in last for h in range(plane.shape[1]))]


def other_lengths(lengths: list[int], ctx: int) -> list[int]:
    """Longer where they were short, shorter where they were long, none where they were full."""
    return [ctx - n for n in lengths] if len(lengths) > 1 else [2 * n // 5 for n in lengths]


def each(out: torch.Tensor, wanted: torch.Tensor, limit: Tolerance) -> None:
    """Within the tolerance together, and each sequence within its relative error: a short one's outputs are large."""
    together = accuracy.compare("o", out, wanted, limit)
    assert together.ok, together
    for b in range(len(out)):
        error = accuracy.compare("o", out[b], wanted[b], limit)
        assert error.relative_error <= error.relative_limit, (b, error)


def cache_map(cache: torch.Tensor) -> torch.Tensor:
    """`line_map` (kernels/cuda_driver.py) of a cache [pages, Hkv, page, D], as on_cpu/sm90.cuh's TensorMap."""
    row_bytes = cache.shape[-1] * cache.element_size()
    rows = cache.numel() // cache.shape[-1]
    room = torch.zeros(192, dtype=torch.uint8)
    aligned = room[-room.data_ptr() % 64 :][:128]
    numbers = (cache.data_ptr(), rows, row_bytes // 2, cuda_decode.tile_tokens(row_bytes))
    aligned.copy_(torch.frombuffer(bytearray(struct.pack("<4q", *numbers).ljust(128, b"\0")), dtype=torch.uint8))
    return aligned


CASES = {  # ctx, heads, page, lengths, blocks, width, mode, order of the blocks, gain
    "shared": (130, (24, 4), 16, [130], 3, 1, 0, 0, 1.0),
    "many_blocks": (4000, (6, 1), 64, [4000, 0], 16, 1, 1, 2, 1.0),
    "teams": (3000, (6, 3), 16, [2900, 17, 3000], 9, 3, 1, 2, 1.0),
    "half_teams": (700, (12, 4), 16, [700, 1, 690], 7, 2, 1, 1, 1.0),  # a block left over, two rows of heads
    "alike": (1100, (12, 2), 16, [1100, 1090], 9, 2, 1, 2, 1.0),  # cut at the items' ends, two blocks for nothing
    "ragged_and_empty": (700, (8, 2), 64, [0, 700, 1, 640], 3, 1, 1, 1, 1.0),
    "long_part": (1040, (8, 1), 16, [1040, 0, 20], 2, 1, 0, 0, 1.0),  # the last item has no unit of the last producer's
    "many_sequences": (70, (4, 2), 16, [70 - i % 7 for i in range(70)], 5, 1, 1, 2, 1.0),  # several a lane
    "more_parts_than_room": (13312, (8, 1), 64, [13312], 52, 1, 1, 0, 1.0),  # 48 fit into the ring at once
    "batches": (4700, (2, 1), 64, [4700], 1, 1, 1, 0, 1.0),  # of page ids: a producer loads more than one
    "sharp": (900, (12, 2), 16, [900, 411], 2, 1, 1, 0, 24.0),  # the running maximum grows, sums are rescaled
}


# Every instantiation takes ragged lengths, shared between blocks; what all have in common is tried on one.
COMMON = cuda_decode.KERNELS["fp8", 256]
RUNS = [(COMMON, case, 40) for case in CASES]  # units of a range below which copies are capped
RUNS += [(name, case, 40) for name in FORMS if name != COMMON for case in ("long_part", "ragged_and_empty")]
RUNS += [(name, "many_blocks", capped) for name in FORMS for capped in (0, 1 << 20)]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "case", "capped_below"), RUNS)
def test_on_cpu(on_cpu, kernel: str, case: str, capped_below: int) -> None:
    ctx, heads, page, lengths, blocks, width, mode, order_of_blocks, gain = CASES[case]
    dtype = "fp16" if FORMS[kernel] == "fp16" else "bf16"
    workload = cases._workload(ctx, len(lengths), *heads, DIMS[kernel], page=page, dtype=dtype)
    given, args = problem(workload, kernel, gain)
    clean = {n: args[n].clone() for n in ("k", "v", "k_scale", "v_scale") if args[n].dim() == 4}
    library = on_cpu(kernel)
    library.allow_copies(None, ctypes.c_uint64(0))
    for name in ("q", "k", "v", "k_scale", "v_scale", "part"):
        library.allow_copies(ctypes.c_void_p(args[name].data_ptr()), ctypes.c_uint64(args[name].nbytes))
    out = torch.full_like(args["q"], math.nan)
    order = ("q", "k_scale", "v_scale", "page_table", "seq_lens")
    config = replace(cuda_decode.config_of(kernel, heads[1], blocks), width=width, capped_below=capped_below)
    maps = [cache_map(args[n]) for n in ("k", "v")]
    pointers = [ctypes.c_void_p(args[n].data_ptr()) for n in order] + [ctypes.c_void_p(out.data_ptr())]
    pointers += [ctypes.c_void_p(args[n].data_ptr()) for n in ("part", "part_ml", "arrived")]
    page_shift = (page // 16).bit_length() - 1
    shapes = [*cuda_decode.cut_numbers(config, len(lengths), heads[1]), len(lengths), heads[1], heads[0] // heads[1]]
    shapes += [page_shift, args["page_table"].shape[1]]
    is_bf16 = int(dtype == "bf16")
    scale = ctypes.c_float(workload["D"] ** -0.5 * cuda_decode.LOG2_E)
    limit = cases.tolerance(workload, PRECISION[FORMS[kernel]])["o"]
    # As a captured graph replays: the second launch finds other lengths, other pages, and what the first has left.
    for now in (lengths, other_lengths(lengths, ctx)):
        given["page_table"] = given["page_table"].flip(0, 1)
        wanted = hold(workload, given, args, clean, now, PRECISION[FORMS[kernel]])
        out.fill_(math.nan)
        library.written_ahead(None, ctypes.c_uint64(0))
        for row in newest(args, now):
            library.written_ahead(ctypes.c_void_p(row.data_ptr()), ctypes.c_uint64(row.nbytes))
        places = [ctypes.c_void_p(x.data_ptr()) for x in maps]
        library.on_cpu(mode, blocks, config.threads, order_of_blocks, *places, *pointers, *shapes, scale, is_bf16, 0)
        assert not args["arrived"].any()
        each(out, wanted, limit)


@needs_compiler
@pytest.mark.slow
def test_short_ranges_cap_the_copies_in_flight(on_cpu) -> None:
    """A producer has at most three pairs of tiles in flight (CAP), beside the two rows of queries of each head."""
    most = {}
    for capped_below in (0, 1 << 20):
        on_cpu(COMMON).copies_in_flight()  # of tests before
        test_on_cpu(on_cpu, COMMON, "sharp", capped_below)
        most[capped_below] = on_cpu(COMMON).copies_in_flight()
    assert most[1 << 20] <= 2 * cuda_decode.PRODUCERS * 3 + 2 * 6 < most[0]


FENCES = {  # what is changed, in which case it is seen
    "junk past the end cleared without a fence": (
        "    fence_proxy_async_shared();\n    __syncwarp();",
        "    __syncwarp();",
        "ragged_and_empty",
    ),
    "parts merged where states were without a fence": (
        "fence_proxy_async_shared();  // the parts go where the warps' states were",
        "",
        "shared",
    ),
}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", FENCES)
def test_a_missing_proxy_fence_stops_the_launch(on_cpu, name: str) -> None:
    *change, case = FENCES[name]
    with pytest.raises(Stopped, match="no proxy fence"):
        test_on_cpu(lambda kernel: on_cpu(kernel, tuple(change)), COMMON, case, 40)


PROGRAMMATIC = "#define PDL 0", "#define PDL 1"


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("case", ["many_blocks", "teams", "ragged_and_empty", "long_part"])
@pytest.mark.parametrize("kernel", [COMMON, cuda_decode.KERNELS["bf16", 256], cuda_decode.KERNELS["q8_0", 128]])
def test_a_programmatic_launch_reads_old_tokens_alone_before_it_waits(on_cpu, kernel: str, case: str) -> None:
    made = on_cpu(kernel, PROGRAMMATIC)
    made.early_copies()  # of tests before
    test_on_cpu(lambda kernel: made, kernel, case, 40)
    assert made.early_copies() > 0


WAITS = (
    ("if (PDL && !waited && warp_any(newest && lane / TILES == j)) wait_once();", ""),
    ("if (loads_queries) wait_once(), load_queries", "if (loads_queries) load_queries"),
    ("f.c.unit == f.c.begin + f.c.count - 1", "f.c.unit == f.c.begin + f.c.count"),
)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("change", WAITS)
def test_a_missing_wait_stops_the_launch(on_cpu, change: Change) -> None:
    with pytest.raises(Stopped, match="the kernel ahead may write"):
        test_on_cpu(lambda kernel: on_cpu(kernel, PROGRAMMATIC, change), COMMON, "many_blocks", 40)


def phases_of(addresses: list[int], size: int) -> int:
    """Turns in which shared memory serves a warp's load of `size` bytes a lane: lanes 128 / size at a time."""
    turns = 0
    for first in range(0, 32, 128 // size):
        banks: dict[int, set[int]] = {}
        for address in addresses[first : first + 128 // size]:
            for word in range(address // 4, (address + size) // 4):
                banks.setdefault(word % 32, set()).add(word)
        turns += max(map(len, banks.values()))
    return turns


@pytest.mark.parametrize("row_bytes", [128, 256, 512])
@pytest.mark.parametrize("piece", [8, 16])
def test_loads_meet_no_bank_conflict(row_bytes: int, piece: int) -> None:
    """The addresses of decode_mainloop.cuh's loads, by its own formulas, with decode.cuh's token_row and placed."""
    source = SOURCE.with_name("decode.cuh").read_text()
    assert "return (p & 3) | ((p ^ p >> 2) & 1) << 2;" in source
    assert "return token * LINE + (at ^ (token & 7) * 16);" in source
    rows = [(p & 3) | ((p ^ p >> 2) & 1) << 2 for p in range(8)]
    assert sorted(rows) == list(range(8))
    aside = cuda_decode.tile_tokens(row_bytes) * 128

    def placed(token: int, at: int) -> int:
        return token * 128 + (at ^ (token & 7) * 16)

    loads = row_bytes // (4 * piece)
    per_line = 128 // (4 * piece)
    for j in range(loads):  # keys: lane (g, t), token_row(g), pieces of t
        keys = [placed(rows[x // 4], piece * (x % 4)) for x in range(32)]
        keys = [(at ^ j % per_line * 4 * piece) + j // per_line * aside for at in keys]
        assert phases_of(keys, piece) == piece // 4
    for h in range(row_bytes // 128):
        for e in range(2):
            values = [placed(rows[2 * (x % 4) + e], 16 * (x // 4)) + h * aside for x in range(32)]
            assert phases_of(values, 16) == 4


def test_the_cut_that_a_time_is_predicted_by_is_the_scheduler_s() -> None:
    """Sequences of one length: whole items to few blocks, ranges that end inside items, teams of an item's own."""
    short, wide = cuda_decode.choose_config("fp8", 128, 1), cuda_decode.choose_config("bf16", 256, 4)
    assert cuda_decode.cut(short, 4, 1, 4) == cuda_decode.Cut(units=8, items=2, parts=1)  # 16 units for eight warps
    assert cuda_decode.cut(wide, 128, 4, 16) == cuda_decode.Cut(units=63, items=5, parts=2)  # 33 teams, 2,048 units
    assert cuda_decode.cut(wide, 1, 4, 512) == cuda_decode.Cut(units=16, items=1, parts=33)
    assert cuda_decode.cut(wide, 32, 4, 256) == cuda_decode.Cut(units=256, items=1, parts=1)  # one of 33 teams idle
    for batch, units in ((1, 1), (3, 7), (17, 256), (67, 512), (128, 16)):
        made = cuda_decode.cut(wide, batch, 4, units)
        assert batch * units <= made.units * 33
        assert (made.items - 2) * units < made.units <= made.items * units


def test_choice_and_refusals() -> None:
    config = cuda_decode.choose_config("fp8", 256, 4, 78)
    assert str(config).startswith(f"{COMMON} blocks=78 threads={32 * (8 + cuda_decode.PRODUCERS)} width=4")
    widths = {heads: cuda_decode.choose_config("fp8", 256, heads).width for heads in (1, 4, 5, 8, 40, 128)}
    assert widths == {1: 1, 4: 4, 5: 5, 8: 8, 40: 10, 128: 128}
    assert cuda_decode.cut_numbers(cuda_decode.choose_config("fp8", 256, 4), 8, 4) == (
        4,
        1,
        33,
        4,
        config.second,
        config.capped_below,
    )
    assert cuda_decode.cut_numbers(replace(config, width=2), 128, 4) == (
        2,
        2,
        39,
        0,
        config.second,
        config.capped_below,
    )
    with pytest.raises(ValueError, match=r"blocks=161\b.*\b160\b"):
        cuda_decode.cut_numbers(replace(config, blocks=161), 1, 4)
    with pytest.raises(ValueError, match=r"width=4\b.*Hkv=6\b"):
        cuda_decode.cut_numbers(replace(config, width=4), 1, 6)
    assert {DIMS[n] for n in FORMS} == {128, 256}
    with pytest.raises(ValueError, match="D=64"):
        cuda_decode.choose_config("fp8", 64, 4)
    assert not cuda_decode.refusal(128, 24, 4, 256, 16)
    for shape, reason in {
        (1, 9, 1, 256, 16): "Hq/Hkv=9", (1, 7, 2, 256, 16): "Hq=7", (1, 8, 1, 64, 16): "D=64",
        (1, 8, 1, 128, 48): "page=48", (1, 8, 1, 128, 8): "page=8", (513, 8, 1, 128, 16): "batch=513",
    }.items():  # fmt: skip
        assert reason in cuda_decode.refusal(*shape)
    names = re.findall(r"^KV_DECODE\((\w+),", SOURCE.read_text(), re.M)
    assert set(FORMS) <= set(names)
    limits = dict(re.findall(r"constexpr int (\w+) = (\d+);", SOURCE.with_name("decode.cuh").read_text()))
    assert int(limits["MAX_BATCH"]) == cuda_decode.MAX_BATCH
    assert int(limits["MAX_HEADS"]) == cuda_decode.MAX_HEADS
    assert int(limits["MAX_PARTS"]) == cuda_decode.MAX_BLOCKS
    assert int(limits["QUERIES"]) == cuda_decode.MAX_GROUP
    assert int(limits["PRODUCERS"]) == cuda_decode.PRODUCERS


def test_prepare_refuses_and_makes_room() -> None:
    given = cases.inputs(cases._workload(40, 2, 6, 1, 128), 0, "cpu")
    args = cuda_decode.prepare(given, "q8_0")
    assert args["part"].shape == (132 * 2, 6, 128)
    assert args["arrived"].tolist() == [0] * 2
    with pytest.raises(ValueError, match="contiguous"):
        cuda_decode.prepare(given | {"q": given["q"].transpose(0, 1).contiguous().transpose(0, 1)}, "fp8")
    with pytest.raises(ValueError, match="D=64"):
        cuda_decode.prepare(cases.inputs(cases._workload(17, 2, 6, 1, 64), 0, "cpu"), "fp8")


@pytest.mark.slow
@pytest.mark.parametrize("source", [cuda_decode.CUDA_SOURCES[0], cuda_decode.CHAINED], ids=["waits", "programmatic"])
def test_compiles_without_spills(source: CudaSource) -> None:
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc to compile for sm_90a")
    for row in aot_worker.compile_cuda(source, 90):
        assert row["status"] == "ok", row
        assert row["spill_bytes"] == 0, row


@pytest.mark.gpu
@pytest.mark.parametrize("workload", cases.CHECKED, ids=lambda w: w.id)
@pytest.mark.parametrize("candidate", [*cuda_decode.CANDIDATES, *cuda_layouts.CANDIDATES], ids=lambda c: c.name)
def test_candidate_on_gpu(candidate, workload: Workload) -> None:
    from lab.check import families

    result = accuracy.check(families.load("kv"), candidate, workload, seed=0, device="cuda")
    assert result.status == ("skipped" if candidate.refuses(workload) else "ok"), result.message


GPU_FORMS = {"fp8": "fp8-kv", "q8_0": "q8_0-kv", "16bit": "bf16"}


@pytest.mark.gpu
@pytest.mark.parametrize("kv", GPU_FORMS)
def test_repeats_to_the_bit_on_gpu(kv: str) -> None:
    """Which block merges is a matter of time, what it adds up is not; nothing is read that another launch has left."""
    workload = cases._workload(9000, 3, 24, 4, 256)
    given = cases.inputs(workload, 0, "cuda")
    args = cuda_decode.prepare(given, kv)
    out = {"o": torch.empty_like(given["q"])}
    first = None
    for _ in range(200):
        for tensor in (args["part"], args["part_ml"], out["o"]):
            tensor.fill_(math.nan)
        cuda_decode.run(args, out, kv)
        seen = out["o"].view(torch.int16).clone()
        first = seen if first is None else first
        assert torch.equal(seen, first)
    assert not args["arrived"].any()
    wanted = reference(cases.reference_inputs(workload, given, GPU_FORMS[kv]))["o"]
    each(out["o"], wanted, cases.tolerance(workload, GPU_FORMS[kv])["o"])


@pytest.mark.gpu
@pytest.mark.parametrize("kv", GPU_FORMS)
@pytest.mark.parametrize("heads", [(24, 4, 256), (32, 8, 128)], ids=lambda h: f"d{h[2]}")
def test_a_captured_graph_follows_lengths_and_pages_on_gpu(kv: str, heads: tuple[int, int, int]) -> None:
    """Captured at full lengths, replayed with others and other pages in the same memory, padding rows among them."""
    workload = cases._workload(5000, 5, *heads)
    given = cases.inputs(workload, 0, "cuda")
    table, lengths = given["page_table"], given["seq_lens"]
    table.copy_(torch.randperm(given["k_cache"].shape[0], device="cuda")[: table.numel()].reshape(table.shape))
    lengths.fill_(workload["ctx"])
    args = cuda_decode.prepare(given, kv)
    assert (args["page_table"].data_ptr(), args["seq_lens"].data_ptr()) == (table.data_ptr(), lengths.data_ptr())
    out = {"o": torch.empty_like(given["q"])}
    cuda_decode.run(args, out, kv)  # compiles and loads, which is not allowed while capturing
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda_decode.run(args, out, kv)
    limit = cases.tolerance(workload, GPU_FORMS[kv])["o"]
    for now in ([5000] * 5, [1, 4999, 0, 2500, 16], [0, 0, 5000, 0, 0], [0] * 5, [4096, 0, 17, 5000, 333]):
        lengths.copy_(torch.tensor(now))
        table.copy_(table.flip(0, 1))
        out["o"].fill_(math.nan)
        graph.replay()
        wanted = reference(cases.reference_inputs(workload, given, GPU_FORMS[kv]))["o"]
        each(out["o"], wanted, limit)
        assert not args["arrived"].any()
