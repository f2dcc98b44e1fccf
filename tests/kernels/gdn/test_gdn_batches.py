"""Batches of several sequences: any interleaving, any slots, against the same tokens one sequence after the other.

The code word harness of lab/study/crossbleed.py runs through the decomposition too, on the sizes of the record (1, 4, 6
and 7 clean; a pool of two shared rows dirty from three sequences on).
"""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.common import Candidate, Tensors, has_triton
from kernels.gdn import batches
from kernels.gdn.reference import step
from lab.check import families
from lab.study import crossbleed

DIM, HEADS = 64, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(not has_triton(), reason="recurrent_decode needs triton: pip install triton")


def candidate(name: str) -> Candidate:
    return families.load("gdn").candidates[name]


def draw(tokens: int, rows: int, seed: int, heads_k: int = 1) -> tuple[Tensors, torch.Tensor]:
    """Tokens of a flat batch and a pool, float32; every row of the pool is full, so a wrong one shows."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(DEVICE)

    keys = torch.nn.functional.normalize(normal(tokens, heads_k, DIM), dim=-1)
    found = {"q": normal(tokens, heads_k, DIM), "k": keys, "v": normal(tokens, HEADS, DIM)}
    found |= {"g": -normal(tokens, HEADS).abs(), "beta": torch.sigmoid(normal(tokens, HEADS))}
    return found, normal(rows, HEADS, DIM, DIM)


def one_by_one(
    order: Sequence[int], slot_of: dict[int, int], fresh: Sequence[int], tokens: Tensors, pool: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token by the reference's own step, in the batch's order: float64 (o, pool)."""
    tokens, pool = {n: t.double() for n, t in tokens.items()}, pool.double()
    ratio = HEADS // tokens["k"].shape[1]
    o = torch.zeros_like(tokens["v"])
    for sequence in set(fresh) & set(order):
        pool[slot_of[sequence]] = 0
    for place, sequence in enumerate(order):
        q, k = (tokens[n][place].repeat_interleave(ratio, dim=0) for n in ("q", "k"))
        own = tokens["v"][place], tokens["g"][place], tokens["beta"][place]
        o[place], pool[slot_of[sequence]] = step(pool[slot_of[sequence]], q, k, *own)
    return o, pool


def check(order: Sequence[int], slots: Sequence[int], fresh: Sequence[int], prefill: str, seed: int = 0) -> None:
    slot_of = dict(enumerate(slots))
    tokens, pool = draw(len(order), len(slots), seed)
    before = pool.clone()
    want, want_pool = one_by_one(order, slot_of, fresh, tokens, pool)
    launches = batches.decompose(order, slot_of, fresh)
    o = batches.run(launches, tokens, pool, candidate("recurrent_decode"), candidate(prefill))
    limit = 5e-6 if prefill == "torch_chunk" else 8e-3  # float32 sums, or tf32 and bf16 operands
    torch.testing.assert_close(o.double(), want, rtol=0, atol=limit * float(want.abs().max()))
    torch.testing.assert_close(pool.double(), want_pool, rtol=0, atol=limit * float(want_pool.abs().max()))
    touched = {slot_of[s] for s in order}
    for row in range(len(slots)):
        assert row in touched or torch.equal(pool[row], before[row]), f"row {row} belongs to nobody here"


@settings(max_examples=25)
@given(st.data())
@pytest.mark.slow
def test_any_interleaving_is_one_sequence_after_the_other(data: st.DataObject) -> None:
    order = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=9))
    slots = data.draw(st.permutations(range(6)))
    fresh = data.draw(st.lists(st.sampled_from(order), max_size=2))
    check(order, slots, fresh, "torch_chunk")


@settings(max_examples=25)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.permutations(range(5)), st.sets(st.integers(0, 3)))
def test_sequences_one_behind_the_other(lengths: list[int], slots: list[int], fresh: set[int]) -> None:
    """The shapes that interleavings drawn at random hardly ever hit: equal and ragged lengths, side by side."""
    order = [s for s, length in enumerate(lengths) for _ in range(length)]
    check(order, slots, sorted(fresh & set(order)), "torch_chunk")


@pytest.mark.parametrize("prefill", ["fused_chunk", "split_pipeline"])
@pytest.mark.parametrize("order", [[0] * 7, [0, 0, 0, 1, 1, 1], [1, 0, 0, 0], [0, 1, 0]], ids=str)
@pytest.mark.slow
def test_the_kernels_take_every_kind(prefill: str, order: list[int]) -> None:
    """In place for one sequence: the chunked kernels may be given one row as their initial and their final state."""
    check(order, [2, 0, 1], [order[0]], prefill)


@pytest.mark.parametrize(
    ("order", "kinds"),
    [
        ([5], ["single"]),
        ([5, 5, 5], ["single"]),
        ([3, 5, 4], ["batched"]),
        ([3, 3, 5, 5], ["batched"]),
        ([3, 3, 5], ["ragged"]),
        ([3, 5, 3, 5], ["stepwise", "stepwise"]),
        ([3, 5, 3, 3], ["stepwise", "stepwise", "stepwise"]),
    ],
    ids=str,
)
def test_kinds(order: list[int], kinds: list[str]) -> None:
    launches = batches.decompose(order, {3: 1, 4: 0, 5: 2})
    assert [x.kind for x in launches] == kinds
    assert sorted(p for x in launches for own in x.positions for p in own) == list(range(len(order)))
    assert all(len(set(x.slots)) == len(x.slots) for x in launches), "a launch never names a row twice"


def test_four_sequences_by_hand() -> None:
    (found,) = batches.decompose([7, 7, 2, 2, 9, 9, 4, 4], {7: 3, 2: 0, 9: 5, 4: 1}, fresh=[9])
    assert (found.sequences, found.slots, found.lengths) == ((7, 2, 9, 4), (3, 0, 5, 1), (2, 2, 2, 2))
    assert found.fresh == (False, False, True, False)


@pytest.mark.parametrize(
    ("order", "slots", "said"),
    [
        ([], {}, "no tokens"),
        ([0, 1], {0: 0}, "sequence 1 has no slot"),
        ([0, 1], {0: 0, 1: -1}, "sequence 1 has slot -1"),
        ([0, 1, 2], {0: 0, 1: 1, 2: 0}, "sequences 0 and 2 share slot 0"),
    ],
)
def test_refused(order: list[int], slots: dict[int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        batches.decompose(order, slots)


# One sequence pays nothing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5])
def test_a_single_sequence_is_not_copied(count: int) -> None:
    """Static slot, zero copy: the kernel gets addresses inside the caller's own tensors."""
    tokens, pool = draw(count, 4, 1)
    seen: list[dict[str, int]] = []

    def note(args: Tensors, out: Tensors) -> None:
        seen.append({n: t.data_ptr() for n, t in (args | {f"out {k}": v for k, v in out.items()}).items()})

    spy = Candidate("spy", "f32", note)
    (launch,) = batches.decompose([6] * count, {6: 2})
    o = torch.empty_like(tokens["v"])
    batches.run_launch(launch, tokens, pool, o, spy, spy)
    (got,) = seen
    row = pool[2].data_ptr()
    assert all(got[n] == tokens[n].data_ptr() for n in batches.TOKEN_TENSORS)
    assert got["out o"] == o.data_ptr()
    states = {"state", "out state"} if count == 1 else {"initial_state", "out final_state"}
    assert {got[n] for n in states} == {row}
    assert ("in_order" in got) == (count == 1), "its own row is row 0: no id has to be read"


@pytest.mark.parametrize("name", ["cuda_decode_alone", "cuda_decode_alone_again", "cuda_decode_served"])
def test_one_sequence_launches_the_same_kernel_either_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is launched for one sequence of a pool: same kernel, same addresses, no ids, and nothing else (IK4)."""
    from kernels.gdn import cases, cuda_decode
    from kernels.gdn.controls import cuda_decode_single

    problem = cases._in_pool(cases._decode(1, (1, 2), D=128, dtype="bf16"), 4)
    inputs = cases.inputs(problem, 1, DEVICE)
    out = cases.outputs(problem, inputs)
    launched: list[list[object]] = []
    monkeypatch.setattr(cuda_decode.cuda, "load", lambda source, kernel, device: kernel)
    monkeypatch.setattr(
        cuda_decode.cuda, "launch", lambda kernel, grid, threads, given: launched.append([kernel, *given])
    )
    chosen = next(c for c in cuda_decode_single.CANDIDATES if c.name == name)
    args = chosen.prepare(inputs)
    with monkeypatch.context() as running:
        for maker in ("zeros", "tensor", "empty"):  # a tensor made here would be a second launch, or a copy
            running.setattr(torch, maker, None)
        chosen.run(args, out)
    ((kernel, *given),) = launched
    assert kernel == cuda_decode.FEW["f32"].kernel
    row = int(inputs["state_rows"][0])
    want = [inputs[n] for n in ("q", "k", "v", "g", "beta")] + [out["state"][row], None, out["o"]]
    for got, wanted in zip(given, want, strict=False):
        address = got.data_ptr() if isinstance(got, torch.Tensor) else int(got)  # type: ignore[call-overload]
        assert address == (wanted.data_ptr() if wanted is not None else 0)


def test_only_one_live_sequence_is_single() -> None:
    from kernels.gdn import cases
    from kernels.gdn.controls import cuda_decode_single

    two, empty = cases._decode(2, (1, 2), D=128), cases._decode(1, (1, 2), D=128, pad=1)
    assert "batch = 2" in cuda_decode_single.refuses(two)
    assert "pad = 1" in cuda_decode_single.refuses(empty)
    assert "op = conv_decode" in cuda_decode_single.refuses(cases._from_conv(two))


# Graphs (IK6) --------------------------------------------------------------------------------------------------------


def without_slot(launch: batches.Launch) -> tuple[object, ...]:
    return batches.signature(launch)[:-1]


def decode_with_graphs(key: object, order: Sequence[int]) -> torch.Tensor:
    """Decode one sequence per step, reusing "graphs": a launch that keeps the address of the state it was made with."""
    tokens, pool = draw(len(order), 3, 2)
    graphs: dict[object, torch.Tensor] = {}
    run = candidate("recurrent_decode")
    for place, sequence in enumerate(order):
        (launch,) = batches.decompose([sequence], {0: 2, 1: 0})
        state = graphs.setdefault(key(launch), pool[launch.slots[0] : launch.slots[0] + 1])  # type: ignore[operator]
        own = {n: tokens[n][place : place + 1] for n in batches.TOKEN_TENSORS}
        own |= {"state": state, "state_rows": torch.zeros(1, dtype=torch.int32, device=DEVICE)}
        run.run(run.prepare(own), {"o": torch.empty_like(own["v"]), "state": state})
    return pool


def test_a_key_with_the_slot_never_meets_a_stale_state() -> None:
    order = [0, 0, 1, 0, 1]
    tokens, pool = draw(len(order), 3, 2)
    _, want = one_by_one(order, {0: 2, 1: 0}, [], tokens, pool)
    torch.testing.assert_close(decode_with_graphs(batches.signature, order).double(), want, rtol=0, atol=1e-4)
    wrong = decode_with_graphs(without_slot, order).double()
    assert float((wrong - want).abs().max()) > 0.1, "without the slot a graph is used at the other sequence's state"
    launches = [x for s in order for x in batches.decompose([s], {0: 2, 1: 0})]
    assert batches.stale_reuses(launches) == 0
    assert batches.stale_reuses(launches, without_slot) == 2


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.permutations(range(4)))
def test_no_order_of_sequences_reuses_a_stale_graph(order: list[int], slots: list[int]) -> None:
    launches = [x for s in order for x in batches.decompose([s], dict(enumerate(slots)))]
    assert batches.stale_reuses(launches) == 0
    assert batches.stale_reuses(launches, without_slot) == sum(s != order[0] for s in order)


def test_a_key_tells_lengths_and_kinds_apart_and_lets_slots_of_a_batch_move() -> None:
    def key(order: list[int], slots: dict[int, int]) -> object:
        return batches.signature(batches.decompose(order, slots)[0])

    assert key([0, 1], {0: 0, 1: 1}) == key([0, 1], {0: 1, 1: 0})  # read from a tensor at each replay
    assert len({key(o, {0: 0, 1: 1}) for o in ([0], [0, 0], [0, 1], [0, 0, 1], [0, 1, 0])}) == 5


# The code words ------------------------------------------------------------------------------------------------------


def recall_with(
    slots: Sequence[int],
    together: bool,
    kernels: tuple[str, str] = ("recurrent_decode", "torch_chunk"),
    dtype: torch.dtype = torch.float32,
) -> crossbleed.Recall:
    """A system: every sequence's word is stored letter by letter (key e_t, learning rate 1, no decay), then read.

    together: one batch for all sequences; else a loop over them, each a single launch, as the known mistake had it.
    kernels: for decode and for prefill; dtype: of q, k and v.
    """

    def recall(words: Sequence[str]) -> list[str]:
        pool = torch.ones(max(slots) + 1, 1, DIM, DIM, device=DEVICE)  # somebody's old state, to be cleared
        eye = torch.eye(DIM, device=DEVICE)
        replies = ["" for _ in words]

        def launch(order: list[int], k: list[int], values: torch.Tensor, beta: float, q: list[int], fresh: list[int]):
            groups = [order] if together else [[s] * order.count(s) for s in dict.fromkeys(order)]
            found = torch.empty(len(order), 1, DIM, device=DEVICE)
            for group in groups:
                at = [i for i, s in enumerate(order) if s in group]
                tokens = {"q": eye[[q[i] for i in at]], "k": eye[[k[i] for i in at]], "v": values[at]}
                tokens = {name: x[:, None].to(dtype) for name, x in tokens.items()}
                tokens["g"] = torch.zeros(len(at), 1, device=DEVICE)
                tokens["beta"] = torch.full((len(at), 1), beta, device=DEVICE)
                plan = batches.decompose(group, {s: slots[s] for s in group}, [s for s in fresh if s in group])
                run = (candidate(name) for name in kernels)
                found[at] = batches.run(plan, {n: t.contiguous() for n, t in tokens.items()}, pool, *run).to(found)
            return found[:, 0]

        everyone = list(range(len(words)))
        letters = [[crossbleed.ALPHABET.index(c) for c in w] for w in words]
        half = crossbleed.LENGTH // 2
        for first in (0, half):  # two micro-batches of a prefill, then decode
            order = [s for s in everyone for _ in range(half)]
            at = [first + t for _ in everyone for t in range(half)]
            values = eye[[letters[s][t] for s, t in zip(order, at, strict=True)]]
            launch(order, at, values, 1.0, at, everyone if first == 0 else [])
        for t in range(crossbleed.LENGTH):
            count = len(words)
            read = launch(everyone, [DIM - 1] * count, torch.zeros(count, DIM, device=DEVICE), 0.0, [t] * count, [])
            replies = [r + crossbleed.ALPHABET[int(o[:20].argmax())] for r, o in zip(replies, read, strict=True)]
        return replies

    return recall


SIZES = (1, 4, 6, 7)


@pytest.mark.parametrize("together", [True, False], ids=["batched", "looped"])
@pytest.mark.slow
def test_code_words_are_clean_with_a_row_each(together: bool) -> None:
    found = crossbleed.run(recall_with([(5 * i + 3) % 8 for i in range(8)], together), SIZES)
    assert [(b.np, b.status) for b in found] == [(n, "clean") for n in SIZES]


@pytest.mark.slow
def test_code_words_bleed_over_the_aliased_pool_from_three_on() -> None:
    aliased = [i % 2 for i in range(8)]
    found = crossbleed.run(recall_with(aliased, False), (1, 2, 3, 4, 6, 7))
    assert [(b.np, b.status) for b in found] == [(n, "clean" if n <= 2 else "dirty") for n in (1, 2, 3, 4, 6, 7)]
    with pytest.raises(ValueError, match="share slot 0"):
        crossbleed.run(recall_with(aliased, True), (3,))


@pytest.mark.gpu
@pytest.mark.parametrize("together", [True, False], ids=["batched", "looped"])
def test_code_words_through_the_cuda_kernels(together: bool) -> None:
    """cuda_decode and cuda_scan, clean with a row each and dirty over two shared rows; bf16 activations."""
    pytest.importorskip("cupy", reason="the CUDA C++ candidates are loaded through CuPy")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("sm_90a code runs on compute capability 9.0 only")
    kernels, sizes = ("cuda_decode", "cuda_scan"), (1, 3, 4, 6, 7)
    own = [(5 * i + 3) % 8 for i in range(8)]
    found = crossbleed.run(recall_with(own, together, kernels, torch.bfloat16), sizes)
    assert [(b.np, b.status) for b in found] == [(n, "clean") for n in sizes]
    if not together:
        aliased = recall_with([i % 2 for i in range(8)], False, kernels, torch.bfloat16)
        assert [b.status for b in crossbleed.run(aliased, sizes)] == ["clean", *["dirty"] * 4]
