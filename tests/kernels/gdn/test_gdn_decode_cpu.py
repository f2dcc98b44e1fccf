"""kernels/gdn/decode.cu and decode_conv.cu on a CPU: the sources run, thread by thread, through their launchers.

on_cpu/sm90.cuh stands in for the PTX; a host compiler does the rest. It shows wrong indices, sums,
barriers and tickets, and leaves timing and the order of memory between blocks that run at once to the GPU.
"""

from __future__ import annotations

import ctypes
import math
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernels import cuda
from kernels.common import CudaSource, Tensors, Workload
from kernels.gdn import cases, cuda_decode, cuda_decode_conv
from kernels.gdn.cuda_decode import DecodeVariant
from kernels.gdn.reference import reference
from lab.check.accuracy import compare
from tests.kernels import sass
from tests.kernels.on_cpu.stand_in import UNCHANGED, Change, StandIn, Stopped, built, needs_compiler

pytestmark = needs_compiler


ENTRY = """
#ifndef PDL
#define PDL 0
#endif
static std::map<const char*, int> owners;  // block by 16 bytes of a state, since the last launch
static u64 contested;                      // accesses to what another block has touched
static int own_block() { return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z); }
static const int *ids, *ids_end;  // which no kernel writes
static void check_waited(const void* p, u32) {
    if (PDL && !cpu.now->waited && (p < ids || p >= ids_end)) stop("a read of what the kernel ahead may write");
}
static void note_owner(const void* piece, u32) {
    check_waited(piece, 16);
    const auto [entry, first] = owners.insert({(const char*)piece, own_block()});
    contested += !first && entry->second != own_block();
}
extern "C" u64 owned_bytes() { return 16 * owners.size(); }
extern "C" u64 contested_accesses() { return contested; }
struct Fetch { u32 bytes; int block; };
static std::map<const char*, Fetch> prefetched;  // by address, since the last launch
static void note_prefetch(const void* from, u32 bytes) {
    const char* begin = (const char*)from;
    bool inside = false;
    for (const auto& range : written) inside |= begin >= range.first && begin + bytes <= range.second;
    if (!inside) stop("bulk prefetch of what the launch does not own");
    for (const auto& [other, fetch] : prefetched)
        if (other < begin + bytes && begin < other + fetch.bytes) stop("bulk prefetch of the same twice");
    prefetched[begin] = {bytes, own_block()};
}
extern "C" u64 prefetched_bytes() {  // 0 where any of them are of a state that no block touched
    u64 sum = 0;
    for (const auto& [begin, fetch] : prefetched) {
        if (!owners.count(begin)) return 0;
        sum += fetch.bytes;
    }
    return sum;
}
extern "C" u64 bytes_prefetched_ahead(int blocks) {  // so many blocks before the one that touches their beginning
    u64 sum = 0;
    for (const auto& [begin, fetch] : prefetched)
        if (owners.count(begin) && owners[begin] - fetch.block == blocks) sum += fetch.bytes;
    return sum;
}
template <class Kernel, class... Arguments>
static void start(Kernel kernel, int x, int y, int z, int threads, int order, Arguments... arguments) {
    prefetched.clear(), owners.clear(), contested = 0;
    on_state = note_owner, on_prefetch = note_prefetch, on_read = check_waited;
    launch_on_cpu({.grid = {x, y, z}, .threads = threads, .copies = AT_ISSUE, .backwards = order == 1},
                  [=] { kernel(arguments...); });
}
"""
LOOK = """
static void look(const int* rows, int batch, int* found) {
    int* mine = found + 2 * blockIdx.z;
    in_order(rows, batch, blockIdx.z, mine[0], mine[1]);
}
extern "C" void cpu_in_order(const int* rows, int batch, int* found) {
    start(look, 1, 1, batch, 32, 0, rows, batch, found);
}
"""


NAMES = {  # an instantiation's arguments in the name of its kernel
    "DECODE": "gdn_decode_{1}_d{2}_v{3}_w{4}_{5}_h{7}_p{9}_o{10}",
    "DECODE_CONV": "gdn_decode_conv_d{1}_v{2}_w{3}_{4}_h{6}",
}


def instantiated(line: str) -> str:
    """The kernel that a line of a source instantiates, "" for none."""
    words = re.findall(r"\w+", line)
    return NAMES[words[0]].format(*words) if re.match(r"DECODE(_CONV)?\(", line) else ""


@cache
def library(source: CudaSource, change: Change = UNCHANGED, only: str = "") -> StandIn:
    """The source as a shared object, one cpu_<kernel> per kernel; `change` replaces a piece of it.

    only: the one kernel to build, "" for all.
    """
    entry = ENTRY
    for name in [only] if only else source.kernels:
        entry += f'\nextern "C" void cpu_{name}(ARGUMENTS, int x, int y, int z, int threads, int order) {{'
        entry += "ids = state_rows, ids_end = ids + batch;" if "conv" in name else ""
        entry += f"start({name}, x, y, z, threads, order, PASSED); }}"
    entry += LOOK if source is cuda_decode.SOURCE else ""
    kept = lambda line: not only or instantiated(line) in ("", only)  # noqa: E731
    return built(source.path, entry, change, options=source.options, keep=kept)


def c_value(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return ctypes.c_void_p(x.data_ptr())
    kinds = {np.int32: ctypes.c_int, np.float32: ctypes.c_float, np.int64: ctypes.c_void_p}
    return kinds[type(x)](x.item())


class Cpu:
    """Stands in for kernels/cuda.py: what would be loaded and launched runs here. order: of the blocks, 0 or 1."""

    i32, i64, f32 = map(staticmethod, (cuda.i32, cuda.i64, cuda.f32))

    def __init__(self, order: int = 0, change: Change = UNCHANGED) -> None:
        self.order, self.change = order, change
        self.launched: list[tuple[str, list[Any]]] = []

    def load(self, source: CudaSource, name: str, device: int) -> Any:
        made = library(source, self.change, name if self.change != UNCHANGED else "")
        return name, getattr(made, f"cpu_{name}"), made

    def launch(
        self, kernel: Any, grid: tuple[int, ...], threads: int, arguments: list[Any], programmatic: bool = False
    ) -> None:
        name, function, made = kernel
        self.launched.append((name, list(arguments)))
        made.writes(None, ctypes.c_uint64(0))
        for at in ((5, 7), (6, 7, 9, 10))["conv" in name]:  # states, tickets, o
            x = arguments[at]
            made.writes(ctypes.c_void_p(x.data_ptr()), ctypes.c_uint64(x.nbytes))
        numbers = (*grid, *(1,) * (3 - len(grid)), threads, self.order)
        function(*map(c_value, arguments), *map(ctypes.c_int, numbers))


def problems(variant: DecodeVariant) -> tuple[Workload, ...]:
    shape: dict[str, Any] = {"D": variant.dim, "state_dtype": variant.state}
    bf16 = "bf16" if variant.only_bf16 else ""
    return (
        cases._decode(3, (2, 6), dtype="bf16", qk_l2norm=1, pad=1, **shape),
        cases._decode(2, (1, 2), dtype=bf16 or "fp16", **shape),
        cases._decode(2, (1, 1), dtype=bf16 or "f32", qk_l2norm=1, **shape),
    )


def found(
    variant: DecodeVariant, problem: Workload, cpu: Cpu, monkeypatch: pytest.MonkeyPatch, form: str = "", wide: int = 0
) -> tuple[Tensors, Tensors]:
    """(args, outputs) of one launch of this variant on a CPU. form: of a step's programmatic launch.

    wide: by how many columns the rows are longer that mixed_qkv is columns of.
    """
    inputs = cases.inputs(problem, 2, "cpu")
    if wide:
        inputs["mixed_qkv"] = F.pad(inputs["mixed_qkv"], (0, wide), value=math.nan)[:, :-wide]
    out = cases.outputs(problem, inputs)
    monkeypatch.setattr(cuda_decode, "cuda", cpu)
    monkeypatch.setattr(cuda_decode_conv, "cuda", cpu)
    if problem["op"] == "conv_decode":
        inputs = cuda_decode_conv._prepare(inputs)
        cuda_decode_conv.launch(inputs, out, variant, form)
    else:
        cuda_decode.launch(inputs, out["state"], out["o"], variant)
    return inputs, out


def wrong(problem: Workload, inputs: Tensors, out: Tensors) -> list[str]:
    """The outputs that are not within their limits."""
    want, limits = reference(inputs), cases.tolerance(problem, "f32")
    return [name for name, limit in limits.items() if not compare(name, out[name], want[name], limit).ok]


@pytest.mark.parametrize("variant", cuda_decode.VARIANTS, ids=lambda v: v.kernel)
@pytest.mark.parametrize("form", ["step", "conv"])
def test_every_kernel_agrees_with_the_reference(
    variant: DecodeVariant, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, problem in enumerate(problems(variant)):
        wanted = cases._from_conv(problem) if form == "conv" else problem
        args, out = found(variant, wanted, Cpu(number % 2), monkeypatch, wide=48 * (form == "conv" and number == 0))
        assert wrong(wanted, args, out) == [], wanted.id
        assert form == "step" or not args["arrived"].any(), "the tickets are not cleared for the next launch"


@pytest.mark.parametrize("variant", cuda_decode.VARIANTS, ids=lambda v: v.kernel)
@pytest.mark.parametrize("form", ["chained", "early"])
def test_a_programmatic_launch_reads_nothing_before_it_waits(
    variant: DecodeVariant, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the ids. The early one asks L2 for every live state, once, ahead of that."""
    problem = cases._from_conv(cases._decode(4, (1, 3), dtype="bf16", pad=1, D=variant.dim, state_dtype=variant.state))
    args, out = found(variant, problem, Cpu(), monkeypatch, form)
    assert wrong(problem, args, out) == []
    live = args["state"][[row for row in args["state_rows"].tolist() if row >= 0]]
    assert form == "chained" or fetched(library(cuda_decode_conv.FORMS[form])) == live.nbytes


@pytest.mark.parametrize(
    "change",
    [
        ("ask_for(v_channel);\n        wait_on_dependent_grids();", "ask_for(v_channel);"),
        ("(LATE || PDL == 2) && me", "(LATE || PDL == 2) && b == 0 && me"),
    ],
)
def test_a_mistake_before_the_wait_is_seen(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, cpu = cases._from_conv(cases._decode(4, (1, 3))), Cpu(0, change)
    if "wait" in change[0]:
        with pytest.raises(Stopped, match="the kernel ahead may write"):
            found(SMALL, problem, cpu, monkeypatch, "early")
        return
    args, _ = found(SMALL, problem, cpu, monkeypatch, "early")
    made = library(cuda_decode_conv.FORMS["early"], change, cpu.launched[0][0])
    assert fetched(made) < args["state"][args["state_rows"].long()].nbytes


def touched(made: StandIn) -> tuple[int, int]:
    """(bytes of states that the last launch read or wrote, accesses to what another block had touched)."""
    made.owned_bytes.restype = made.contested_accesses.restype = ctypes.c_uint64
    return made.owned_bytes(), made.contested_accesses()


def fetched(made: StandIn) -> int:
    """Bytes of states whose fetch the last launch started; 0 where a block touched not all of them."""
    read = made.prefetched_bytes
    read.restype = ctypes.c_uint64
    return int(read())


SMALL = cuda_decode.SMALL["f32"]
CHANGES = {
    # what is changed: (workload, the outputs that must show it)
    ("exp(g)", "t.decay = expf(raw.g)", "t.decay = 1.0f + raw.g"): ("step", {"o", "state"}),
    ("a warp's sums", "w < WARPS; w++", "w < WARPS - 1; w++"): ("step", {"o", "state"}),
    ("an early move", "last = ticket == gridDim.x * (hv / hk) - 1", "last = ticket == 0"): ("conv", {"o", "state"}),
    ("no move", "if (!last) return;", "return;"): ("conv", {"conv_state"}),
    ("v's columns", "        move_window(v_window", "        if (0) move_window(v_window"): ("conv", {"conv_state"}),
    ("SiLU", "return sum * sigmoid(sum);", "return sum;"): ("conv", {"o", "state"}),
    ("the oldest weight", "for (int j = 0; j < WIDTH; j++) sum", "for (int j = 1; j < WIDTH; j++) sum"): (
        "conv",
        {"o", "state"},
    ),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c[0])
def test_a_mistake_is_seen(change: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    form, shown = CHANGES[change]
    problem = cases._decode(2, (1, 3), qk_l2norm=1)
    problem = cases._from_conv(problem) if form == "conv" else problem
    inputs, out = found(SMALL, problem, Cpu(0, change[1:]), monkeypatch)
    assert shown <= set(wrong(problem, inputs, out))


def test_spare_rows_of_both_pools_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cases._from_conv(cases._decode(4, (1, 2), pad=1))
    inputs, out = found(SMALL, problem, Cpu(), monkeypatch)
    used = {row for row in inputs["state_rows"].tolist() if row >= 0}
    for name in cases.IN_PLACE:
        for row in range(inputs[name].shape[0]):
            assert torch.equal(out[name][row], inputs[name][row]) == (row not in used), (name, row)


def test_two_steps_in_a_row_shift_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second launch finds what the first left: columns moved once, tickets at zero."""
    problem = cases._from_conv(cases._decode(3, (1, 2)))
    inputs, out = found(SMALL, problem, Cpu(), monkeypatch)
    again = inputs | {"mixed_qkv": -inputs["mixed_qkv"], "state": out["state"], "conv_state": out["conv_state"]}
    second = cases.outputs(problem, again)
    cuda_decode_conv.launch(cuda_decode_conv._prepare(again), second, SMALL)
    assert wrong(problem, again, second) == []
    rows = inputs["state_rows"].long()
    assert torch.equal(second["conv_state"][rows, 1:], torch.stack((inputs["mixed_qkv"], again["mixed_qkv"]), dim=1))


@pytest.mark.parametrize("state", ["f32", "bf16"])
def test_in_order_states_need_no_ids(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `in_order` the kernels for few states get no address of ids, and the answer is the same to the bit."""
    variant = cuda_decode.FEW[state]
    problem = cases._identity(cases._decode(2, (1, 2), D=128, state_dtype=state))
    inputs = cases.inputs(problem, 1, "cpu")
    outs = []
    for extra in ({}, {"in_order": inputs["state_rows"]}):
        cpu = Cpu()
        monkeypatch.setattr(cuda_decode, "cuda", cpu)
        outs.append(cases.outputs(problem, inputs))
        cuda_decode.launch(inputs | extra, outs[-1]["state"], outs[-1]["o"], variant)
        assert isinstance(cpu.launched[0][1][6], torch.Tensor) == (not extra)
    assert all(torch.equal(outs[0][n], outs[1][n]) for n in outs[0])
    assert wrong(problem, inputs, outs[0]) == []


@pytest.mark.parametrize("variant", cuda_decode.VARIANTS, ids=lambda v: v.kernel)
def test_what_is_fetched_into_l2(variant: DecodeVariant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every head of a live sequence once, of an empty slot nothing; nothing at all where the variant says so."""
    problem = cases._decode(4, (1, 3), dtype="bf16", pad=1, D=variant.dim, state_dtype=variant.state)
    inputs, _ = found(variant, problem, Cpu(), monkeypatch)
    live = inputs["state"][[row for row in inputs["state_rows"].tolist() if row >= 0]]
    assert fetched(library(cuda_decode.SOURCE)) == (live.nbytes if variant.prefetch else 0)


@pytest.mark.parametrize("variant", cuda_decode.VARIANTS, ids=lambda v: v.kernel)
@pytest.mark.parametrize("form", ["step", "conv"])
def test_a_piece_of_a_state_belongs_to_one_block(
    variant: DecodeVariant, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With permuted ids: every 16 bytes of a live state are read and written by one block, all others by none.

    Blocks that share nothing cannot race over the pool, whatever runs at once. The second half is the same with all
    sequences sent to one row.
    """
    problem = cases._decode(4, (1, 3), dtype="bf16", pad=1, D=variant.dim, state_dtype=variant.state)
    problem = cases._from_conv(problem) if form == "conv" else problem
    source = cuda_decode_conv.SOURCE if form == "conv" else cuda_decode.SOURCE
    inputs, _ = found(variant, problem, Cpu(), monkeypatch)
    rows = [row for row in inputs["state_rows"].tolist() if row >= 0]
    assert rows != sorted(rows), "the ids are not permuted"
    assert touched(library(source, UNCHANGED)) == (inputs["state"][rows].nbytes, 0)
    if variant == SMALL:
        change = ("(long)slot * hv + head) * D", "(long)0 * hv + head) * D")
        cpu = Cpu(0, change)
        found(variant, problem, cpu, monkeypatch)
        owned, contested = touched(library(source, change, cpu.launched[0][0]))
        assert owned == inputs["state"][:1].nbytes
        assert contested > 0


def ids_of(batch: int, rows: int, empty: int) -> torch.Tensor:
    """[batch] ids of a pool of `rows`, permuted, its first and its last among them; `empty` of them, spread, are -1."""
    rng = torch.Generator().manual_seed(batch)
    others = torch.randperm(rows, generator=rng)
    ids = torch.cat((torch.tensor([rows - 1, 0]), others[(others > 0) & (others < rows - 1)]))[:batch]
    ids = ids[torch.randperm(batch, generator=rng)]
    ids[torch.randperm(batch, generator=rng)[:empty]] = -1
    return ids.to(torch.int32)


def order_found(ids: torch.Tensor, change: Change = UNCHANGED) -> list[list[int]]:
    """(sequence, slot) as block 0, 1, 2, ... of each head finds them."""
    found = torch.full((len(ids), 2), -7, dtype=torch.int32)
    arguments = (c_value(ids), ctypes.c_int(len(ids)), c_value(found))
    made = library(cuda_decode.SOURCE, change, SMALL.kernel if change != UNCHANGED else "")
    made.writes(None, ctypes.c_uint64(0))  # the last launch's outputs are freed: the ids may lie where they were
    made.cpu_in_order(*arguments)
    return found.tolist()


def order_wanted(ids: torch.Tensor) -> list[list[int]]:
    numbered = list(enumerate(ids.tolist()))
    return [[n, slot] for n, slot in sorted(numbered, key=lambda x: (x[1] < 0, x[1])) if slot >= 0] + [
        [n, -1] for n, slot in numbered if slot < 0
    ]


@pytest.mark.parametrize(
    ("batch", "rows", "empty"),
    [
        (1, 1024, 0),
        (2, 1024, 0),
        (33, 40, 33),
        (64, 64, 0),
        (100, 1024, 7),
        (256, 256, 0),
        (255, 300, 1),
        (256, 1024, 70),
    ],
)
def test_blocks_take_the_sequences_in_the_order_of_their_slots(batch: int, rows: int, empty: int) -> None:
    ids = ids_of(batch, rows, empty)
    assert order_found(ids) == order_wanted(ids)


ORDER_CHANGES = {
    "rows of 32 all taken": ("bit < 6", "bit < 5"),
    "a lane counts itself": ("(1u << lane) - 1", "(2u << lane) - 1"),
    "what the last block left": ("taken_16[lane + 32 * i] = make", "if (i) taken_16[lane + 32 * i] = make"),
    "empty slots": ("left -= __popc(all);", "left -= 1;"),
}


@pytest.mark.parametrize("name", ORDER_CHANGES)
def test_a_wrong_order_is_seen(name: str) -> None:
    ids = [ids_of(256, 256, 0), ids_of(256, 1024, 70)]
    assert [order_found(x, ORDER_CHANGES[name]) for x in ids] != [order_wanted(x) for x in ids]


@pytest.mark.parametrize("state", ["f32", "bf16"])
def test_order_and_company_change_no_bit(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences as they come, in the order of slots, shuffled, and some of them alone: the same bits each."""
    problem = cases._decode(37, (1, 2), D=128, dtype="bf16", state_dtype=state, qk_l2norm=1)
    inputs = cases.inputs(problem, 1, "cpu")
    inputs["state_rows"][[3, 30]] = -1
    per_sequence = ("q", "k", "v", "g", "beta", "state_rows")

    def results(variant: DecodeVariant, which: torch.Tensor, change: Change = UNCHANGED) -> Tensors:
        monkeypatch.setattr(cuda_decode, "cuda", Cpu(1, change))
        own = inputs | {name: inputs[name][which].contiguous() for name in per_sequence}
        out = {"o": torch.full_like(own["v"], float("nan")), "state": inputs["state"].clone()}
        cuda_decode.launch(own, out["state"], out["o"], variant)
        own_rows = own["state_rows"][own["state_rows"] >= 0].long()
        return {"o": out["o"], "state": out["state"][own_rows]}

    def same(a: Tensors, b: Tensors) -> bool:
        return all(torch.equal(a[name], b[name]) for name in a)

    everyone, shuffled = torch.arange(37), torch.randperm(37, generator=torch.Generator().manual_seed(3))
    ordered, live = cuda_decode.ORDERED[state], inputs["state_rows"] >= 0
    want = results(cuda_decode.MANY[state], everyone)
    assert same(results(ordered, everyone), want)
    place = torch.cumsum(live, 0) - 1
    for which in (shuffled, shuffled[:5]):
        rows = place[which[live[which]]]
        assert same(results(ordered, which), {"o": want["o"][which], "state": want["state"][rows]})
    assert not same(results(ordered, everyone, ("found[0] = b", "found[0] = blockIdx.z")), want)


def test_fetching_ahead_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a wave of heads, permuted ids: MANY's bits; every live head fetched once, by the block that should.

    Of the three sequences without a slot one has the fetch of a later head to start, and one would have been fetched.
    """
    ahead, wave = cuda_decode.AHEAD["bf16"], cuda_decode.WAVE
    problem = cases._decode(87, (1, 7), D=128, dtype="bf16", state_dtype="bf16", qk_l2norm=1, pad=1)
    inputs = cases.inputs(problem, 1, "cpu")
    inputs["state_rows"][[1, 50, 80]] = -1
    assert 1 * 7 + ahead.prefetch < wave - 7 <= 50 * 7 + ahead.prefetch < 80 * 7 < 87 * 7
    live = inputs["state_rows"] >= 0
    rows = inputs["state_rows"][live].long()
    assert rows.tolist() != rows.sort().values.tolist()
    own = int(live.repeat_interleave(7)[:wave].sum()) * inputs["state"][0, 0].nbytes
    made, outs = library(cuda_decode.SOURCE, UNCHANGED), []
    made.bytes_prefetched_ahead.restype = ctypes.c_uint64
    for order, variant in ((0, cuda_decode.MANY["bf16"]), (0, ahead), (1, ahead)):
        monkeypatch.setattr(cuda_decode, "cuda", Cpu(order))
        outs.append(cases.outputs(problem, inputs))
        cuda_decode.launch(inputs, outs[-1]["state"], outs[-1]["o"], variant)
        total = inputs["state"][rows].nbytes
        assert (fetched(made), touched(made)) == (total, (total, 0))
        later = total - own if variant is ahead else 0
        assert made.bytes_prefetched_ahead(0) == total - later
        assert made.bytes_prefetched_ahead(ahead.prefetch) == later
        assert all(torch.equal(outs[-1][name], outs[0][name]) for name in outs[0])
    assert wrong(problem, inputs, outs[0]) == []


def test_heads_are_fetched_ahead_from_1_45_waves_to_128_sequences() -> None:
    for batch, heads, ahead in ((15, 48, False), (16, 48, True), (31, 24, False), (128, 48, True), (129, 48, False)):
        assert (
            cuda_decode.choose_config(batch, heads, 128, "bf16", batch, True) in cuda_decode.AHEAD.values()
        ) == ahead
        for dim, state, bf16 in ((128, "bf16", False), (128, "f32", True), (64, "bf16", True)):
            assert cuda_decode.choose_config(batch, heads, dim, state, batch, bf16).prefetch <= 1


class Recorder(Cpu):
    """Loads and runs nothing."""

    def load(self, source: CudaSource, name: str, device: int) -> Any:
        return name

    def launch(
        self, kernel: Any, grid: tuple[int, ...], threads: int, arguments: list[Any], programmatic: bool = False
    ) -> None:
        self.launched.append((kernel, arguments))


@pytest.mark.parametrize("state", ["f32", "bf16"])
def test_the_order_is_looked_for_where_its_tables_hold_the_ids(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Recorder()
    monkeypatch.setattr(cuda_decode, "cuda", cpu)
    kind = next(dtype for dtype, name in cuda_decode.STATES.items() if name == state)

    def launched(batch: int, rows: int, dtype: torch.dtype = torch.float16, **more: Any) -> str:
        shapes = {"q": (16, 128), "k": (16, 128), "v": (48, 128), "g": (48,), "beta": (48,)}
        args = {name: torch.empty(batch, *shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        args["state_rows"] = torch.empty(batch, dtype=torch.int32, device="meta")
        pool = torch.empty(rows, 48, 128, 128, dtype=kind, device="meta")
        cuda_decode.launch(args | more, pool, args["v"], more.pop("variant", None))
        return cpu.launched[-1][0]

    many, ordered = cuda_decode.MANY[state].kernel, cuda_decode.ORDERED[state].kernel
    for batch, rows in ((64, 64), (67, 67), (256, 256), (100, 1024)):
        assert launched(batch, rows) == ordered, (batch, rows)
    for batch, rows in ((24, 24), (257, 1024), (256, 1025), (128, 4096)):
        assert launched(batch, rows) == many, (batch, rows)
    assert launched(67, 67, in_order=torch.empty(67, device="meta")) == many
    for batch, rows in ((64, 1025), (257, 300)):
        with pytest.raises(ValueError, match="pass no variant"):
            launched(batch, rows, variant=cuda_decode.ORDERED[state])
    ahead = cuda_decode.AHEAD.get(state)
    if ahead:
        for batch, rows in ((32, 32), (64, 64), (128, 4096)):
            assert launched(batch, rows, torch.bfloat16) == ahead.kernel, (batch, rows)
        assert launched(129, 129, torch.bfloat16) == ordered
        with pytest.raises(ValueError, match="bf16"):
            launched(64, 64, variant=ahead)


@pytest.mark.slow
def test_the_fetch_stands_before_the_loads_of_the_state() -> None:
    """In the machine code: behind them it would be useless, and nothing but the time would tell."""
    compiled = sass.kernels(sass.compiled(cuda_decode.SOURCE))
    for variant in cuda_decode.VARIANTS:
        code = " ".join(instruction.text for instruction in compiled[variant.kernel])
        order = re.findall(r"UBLKPF|LDG\.E\.(?:NA\.)?128(?= )", code)
        # Ahead: its own head, that further on, and that where its slot is empty.
        wanted = {0: "L+", 1: "UL+"}.get(variant.prefetch, "UL+UU")
        assert re.fullmatch(wanted, "".join(word[0] for word in order)), (variant.kernel, order)


def test_mixed_rows_may_be_columns_of_wider_ones_and_not_every_other_column() -> None:
    inputs = cases.inputs(cases._from_conv(cases._decode(2, (1, 2), dtype="bf16", D=64, state_dtype="f32")), 2, "cpu")
    cuda_decode_conv.checked(inputs | {"mixed_qkv": F.pad(inputs["mixed_qkv"], (0, 48))[:, :-48]})
    apart = inputs["mixed_qkv"].repeat_interleave(2, dim=1)[:, ::2]
    with pytest.raises(ValueError, match="columns are adjacent"):
        cuda_decode_conv.checked(inputs | {"mixed_qkv": apart})
