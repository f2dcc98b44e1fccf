"""The one launch of kernels/gdn/fused.cu on a CPU, against the two launches there: the same bits, replay after replay.

Blocks run in the order of their indices, so a scan that needs what a later block prepares is noticed; so are a flag
raised before its copies have arrived, a part of the workspace read before its flag, and missing fences. What is broken
on purpose below is each found. Not shown: blocks at the same time, and what a flag orders between them on a device.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import pytest
import torch

from kernels.common import Tensors, Workload
from kernels.gdn import cases, cuda_scan, order
from tests.kernels.gdn import test_gdn_scan_cpu as two
from tests.kernels.on_cpu.stand_in import UNCHANGED, Change, StandIn, Stopped, built, needs_compiler

ENTRY = """
// What blocks of this launch write for others: no thread reads a part of it before its flag was seen and fenced.
static struct {
    const char* workspace;
    long bytes, block_bytes;
    int hv, ratio, chunks;
    const u32* flags;
    u32 raised;
} flagged;
static std::vector<const u32*> acquired;  // and found raised, by any thread of the block
struct Seen { bool stored; std::vector<const u32*> flags; };  // stored: and not fenced since
static std::map<int, Seen> seen;
static int block_of_these;
static Seen& own() {
    if (block_of_these != blockIdx.x) block_of_these = blockIdx.x, acquired.clear(), seen.clear();
    return seen[threadIdx.x];
}
static void look_at_reads(const void* from, u32) {
    const long at = (const char*)from - flagged.workspace;
    if (at < 0 || at >= flagged.bytes) return;
    const long block = at / flagged.block_bytes;
    const u32* flag = flagged.flags + block % flagged.hv / flagged.ratio * flagged.chunks + block / flagged.hv;
    const auto& flags = own().flags;
    if (std::find(flags.begin(), flags.end(), flag) == flags.end()) stop("a chunk read before its flag");
}
extern "C" void fused_on_cpu(int count, const TensorMap* maps, const u16* q, const u16* k, const u16* v,
                             const float* g, const float* beta, char* workspace, const void* initial,
                             void* final_state, u16* o, const int4* blocks, const int4* units, u32* sync, float scale,
                             int hk, int hv, int chunks, int scans, int state_type, int normalise, long bytes) {
    flagged = {workspace, bytes, BLOCK, hv, hv / hk, chunks, sync + FLAGS, sync[0] + 1}, block_of_these = -1;
    on_async_read = look_at_reads;
    on_acquire = [](const u32* p) {
        own();
        if (*p == flagged.raised) acquired.push_back(p);
    };
    on_release = [](u32*, u32) {
        if (!cpu.now->stores.empty()) stop("a flag ahead of its copies");
        if (own().stored) stop("a flag without a fence");
    };
    on_store_done = [] { own().stored = true; };
    on_global_fence = [] { own().stored = false, own().flags = acquired; };
    launch_on_cpu({.grid = {count, 1, 1}, .threads = 128 * TEAMS, .copies = AT_WAIT}, [=] {
        FUSED_NAME(maps[0], maps[1], maps[2], maps[3], q, k, v, g, beta, workspace, initial, final_state, o, blocks,
                   units, sync, scale, hk, hv, chunks, scans, state_type, normalise);
    });
}
extern "C" void sizes_on_cpu(int* to) {
    const int found[] = {TEAMS, FLAGS, TEAMS * TEAM_BYTES<128>};
    for (int n : found) *to++ = n;
}
"""


def one_launch(dtype: str, change: Change = UNCHANGED) -> StandIn:
    entry = ENTRY.replace("FUSED_NAME", f"gdn_fused_d128_{dtype}")
    keep = lambda line: line.startswith(f"FUSED(128, {dtype},") or not line.startswith("FUSED(")  # noqa: E731
    return built(cuda_scan.FUSED.path, entry, change, keep=keep)


pytestmark = needs_compiler


@pytest.fixture(scope="module")
def libraries() -> Any:
    """dtype -> one launch, and two."""
    return functools.cache(lambda dtype: (one_launch(dtype), two.two_launches(cuda_scan.ScanVariant(128, dtype, 1))))


def run(library: Any, args: Tensors, out: Tensors) -> None:
    q, k, v, initial = args["q"], args["k"], args["v"], args["initial_state"]
    (heads_v, dim), sequences = v.shape[-2:], args["chunk_offsets"].numel()
    maps = two.tensor_maps(k, q, v, out["o"])
    named = [maps, q, k, v, args["g"], args["beta"], args["workspace"], initial, out["final_state"], out["o"]]
    named += [args[name] for name in ("blocks", "units", "sync")]
    state = 0 if initial.dtype == torch.bfloat16 else 2
    library.fused_on_cpu(
        args["blocks"].shape[0], *map(two.pointer, named), ctypes.c_float(dim**-0.5), k.shape[-2], heads_v,
        args["chunks"].shape[0], 2 * sequences * heads_v, state, int("raw_qk" in args),
        ctypes.c_long(args["workspace"].numel()),
    )  # fmt: skip


def written(args: Tensors) -> torch.Tensor:
    """The workspace but for what nobody writes behind the vectors."""
    return args["workspace"].view(-1, cuda_scan.BLOCK_BYTES)[:, : cuda_scan.BLOCK_BYTES - 1024 + 3 * 256 + 4]


def tables(made: order.Order) -> Tensors:
    rows = {"blocks": made.blocks, "units": made.units}
    return {name: torch.tensor(x, dtype=torch.int32) for name, x in rows.items()}


# Problem and blocks that only prepare: 0 is what `_prepare` makes for a whole device. Few make teams go on and on.
PROBLEMS: tuple[tuple[Workload, int], ...] = (
    *((cases._prefill(T, heads, D=128, dtype="bf16"), 0) for T, heads in ((1, (1, 1)), (64, (2, 4)), (65, (1, 8)))),
    (cases._prefill(137, (1, 3), D=128, dtype="fp16", qk_l2norm=1), 0),
    (cases._prefill(330, (1, 2), D=128, dtype="bf16", regime="similar"), 1),
    (cases._prefill(494, (2, 4), D=128, dtype="bf16", lengths="330-1-163", qk_l2norm=1), 0),
    (cases._prefill(494, (1, 5), D=128, dtype="bf16", lengths="100-1-393", qk_l2norm=1), 1),
    (cases._prefill(2180, (1, 1), D=128, dtype="bf16"), 1),  # 35 chunks: a loader looks at 32 flags at once
    (cases._prefill(130, (2, 2), D=128, dtype="fp16", batch=2), 2),
)


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "preparing"), PROBLEMS, ids=lambda x: getattr(x, "id", str(x)))
def test_same_bits_as_two_launches_replay_after_replay(libraries: Any, problem: Workload, preparing: int) -> None:
    """Inputs change from launch to launch; tables and flags stay, as in a graph."""
    one, pair = libraries(problem["dtype"])
    args = cuda_scan._prepare(cases.inputs(problem, 1, "cpu"))
    if preparing:
        args |= cuda_scan.in_order(args, 2 * args["chunk_offsets"].numel() * args["v"].shape[-2] + preparing)
    for turn in (1, 2, 3):
        inputs = cases.inputs(problem, turn, "cpu")
        for name in inputs:
            args[name].copy_(inputs[name])
        out, wanted = cases.outputs(problem, inputs), cases.outputs(problem, inputs)
        args["workspace"].fill_(0x7F)
        run(one, args, out)
        other = two.run(pair, cuda_scan.ScanVariant(128, str(problem["dtype"]), 1), inputs, wanted)
        assert torch.equal(written(args), written(other))
        assert all(torch.equal(out[name], wanted[name]) for name in wanted)
        two.assert_within(problem, inputs, out, str(problem["dtype"]))
        assert args["sync"][: cuda_scan.FLAGS].tolist() == [turn] + [0] * (cuda_scan.FLAGS - 1)
        assert (args["sync"][cuda_scan.FLAGS :] == turn).all()


@pytest.mark.slow
def test_the_sizes_of_host_and_kernels_agree(libraries: Any) -> None:
    found = (ctypes.c_int * 3)()
    libraries("bf16")[0].sizes_on_cpu(found)
    assert list(found) == [order.TEAMS, cuda_scan.FLAGS, cuda_scan.fused_shared_bytes()]
    assert cuda_scan.ScanVariant(128, "bf16", 1).shared_bytes <= found[2]


BROKEN = {
    "a flag ahead of its copies": (
        "    tma_store_wait_all();\n    fence_proxy_async_global();\n",
        "    fence_proxy_async_global();\n",
    ),
    "a flag without a fence": (
        "    tma_store_wait_all();\n    fence_proxy_async_global();\n",
        "    tma_store_wait_all();\n",
    ),
    "a chunk read before its flag": ("leading_lanes(lane * C < live && ", "32 + 0 * leading_lanes(lane == 0 && "),
    "a flag raised twice": ("ahead.at += TEAMS;", "ahead.at += 1;"),
    "waits for a block of higher index": ("st_release(flag, epoch);", "st_release(flag, epoch + 1);"),
}


def ragged() -> tuple[Tensors, Tensors]:
    problem = cases._prefill(200, (1, 2), D=128, dtype="bf16", lengths="130-70")
    inputs = cases.inputs(problem, 1, "cpu")
    return cuda_scan._prepare(inputs), cases.outputs(problem, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("noticed", BROKEN)
def test_what_is_broken_on_purpose_is_noticed(noticed: str) -> None:
    problem = cases._prefill(660, (1, 1), D=128, dtype="bf16")
    inputs = cases.inputs(problem, 1, "cpu")
    args, out = cuda_scan._prepare(inputs), cases.outputs(problem, inputs)
    args |= cuda_scan.in_order(args, 3)  # one block prepares to the end, two until the scans start
    with pytest.raises(Stopped, match=noticed):
        run(one_launch("bf16", BROKEN[noticed]), args, out)


@pytest.mark.slow
def test_flags_of_the_launch_before_are_not_believed() -> None:
    """A loader that takes any flag but zero passes once, and is found out in the second launch."""
    args, out = ragged()
    library = one_launch("bf16", ("ld_acquire(flag) == s.epoch", "ld_acquire(flag) != 0"))
    run(library, args, out)
    rows = args["blocks"].tolist()
    args["blocks"] = torch.tensor(sorted(rows, key=lambda row: -row[0]), dtype=torch.int32)  # scans first
    with pytest.raises(Stopped, match="a chunk read before its flag"):
        run(library, args, out)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["scans first", "a unit is missing"])
def test_a_wrong_order_is_noticed(libraries: Any, fault: str) -> None:
    """By the check of the tables, and by the launch."""
    args, out = ragged()
    made = order.make([0, 130, 200], 1, 2, cuda_scan.SMS)
    if fault == "scans first":
        wrong = dataclasses.replace(made, blocks=made.blocks[-1:] + made.blocks[:-1])
    else:
        first = made.blocks[0][1]
        lost = tuple((0, 0, 0, 0) if i == first else unit for i, unit in enumerate(made.units))
        wrong = dataclasses.replace(made, units=lost)
    with pytest.raises(ValueError, match="stands before the preparation"):
        wrong.checked([0, 130, 200], 1, 2)
    with pytest.raises(Stopped, match="waits for a block of higher index"):
        run(libraries("bf16")[0], args | tables(wrong), out)
