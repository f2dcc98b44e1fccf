"""From a batch of tokens of several sequences to launches that cannot read or overwrite another sequence's state.

A server hands over one flat batch: for every token the sequence it belongs to, and for every sequence the row (slot)
of the state pool where it lives. The recurrence is sequential within a sequence and independent between them, so a
batch is safe to run in one launch exactly when each sequence appears once in it, with a slot of its own. `decompose`
brings a batch into that form, (sequences, tokens each, slots), and takes the cheapest of four launches:

    single    one sequence: the pool's row and the tokens are used where they stand, no gather and no copy; the row's
              address is fixed in the launch (a captured graph holds it), so the slot is part of `signature`
    batched   several sequences of equal length, one after the other: one dense launch
    ragged    several sequences of different lengths, one after the other: one launch with cu_seqlens
    stepwise  interleaved sequences: one decode launch for the first token of each, one for the second, and so on

Two sequences on one slot are refused. That is the mistake behind the recorded cross-bleed: a loop over sequences whose
states shared memory, clean up to two sequences and dirty from three.

Given up: stepwise launches are as many as the longest sequence has tokens. Sorting the tokens by sequence would make it
one ragged launch, for a copy of every activation; interleaved batches are rare enough to take the slow path.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from kernels.common import Candidate, Tensors

TOKEN_TENSORS = ("q", "k", "v", "g", "beta")


@dataclass(frozen=True)
class Launch:
    """One launch. positions[i]: where the tokens of sequences[i] stand in the batch, in their order.

    slots: the pool row of each sequence. fresh: whether it starts here, from a state of zeros.
    """

    kind: str
    sequences: tuple[int, ...]
    slots: tuple[int, ...]
    positions: tuple[tuple[int, ...], ...]
    fresh: tuple[bool, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence in this launch."""
        return tuple(map(len, self.positions))

    @property
    def contiguous(self) -> bool:
        """True when the launch's tokens are one stretch of the batch, sequence after sequence."""
        flat = [p for own in self.positions for p in own]
        return flat == list(range(flat[0], flat[0] + len(flat)))


def decompose(
    sequence_of_token: Sequence[int], slot_of: Mapping[int, int], fresh: Sequence[int] = ()
) -> tuple[Launch, ...]:
    """The launches of a batch, in the order in which they must run.

    sequence_of_token: for every token of the batch, in order, its sequence. slot_of: sequence -> row of the pool.
    fresh: the sequences that start with this batch. Raises ValueError for an empty batch, a sequence without a slot,
    and two sequences on one slot.
    """
    if not sequence_of_token:
        raise ValueError("the batch has no tokens: skip the launch")
    positions: dict[int, list[int]] = {}
    for place, sequence in enumerate(sequence_of_token):
        positions.setdefault(sequence, []).append(place)
    if missing := [s for s in positions if s not in slot_of]:
        raise ValueError(f"sequence {missing[0]} has no slot: give slot_of[{missing[0]}]")
    owner: dict[int, int] = {}
    for sequence in positions:
        slot = slot_of[sequence]
        if slot < 0:
            raise ValueError(f"sequence {sequence} has slot {slot}: rows of the pool count from 0")
        if slot in owner:
            raise ValueError(f"sequences {owner[slot]} and {sequence} share slot {slot}: give each its own row")
        owner[slot] = sequence

    def launch(kind: str, chosen: Mapping[int, Sequence[int]], starting: Sequence[int]) -> Launch:
        return Launch(
            kind,
            tuple(chosen),
            tuple(slot_of[s] for s in chosen),
            tuple(tuple(places) for places in chosen.values()),
            tuple(s in starting for s in chosen),
        )

    whole = launch("single" if len(positions) == 1 else "batched", positions, fresh)
    if whole.contiguous:
        ragged = len(set(whole.lengths)) > 1
        return (launch("ragged", positions, fresh) if ragged else whole,)
    rounds = [{s: [places[n]] for s, places in positions.items() if n < len(places)} for n in range(max(whole.lengths))]
    return tuple(launch("stepwise", chosen, fresh if n == 0 else ()) for n, chosen in enumerate(rounds))


def signature(launch: Launch) -> tuple[Hashable, ...]:
    """The key under which a captured graph of this launch may be used again.

    Everything that capturing fixes: the kind, the lengths and, where the state is used by its address, the slot. Other
    launches read their slots from a tensor, which is filled before each replay. Clearing fresh states is no part of a
    graph: it comes before.
    """
    return launch.kind, launch.lengths, launch.slots[0] if launch.kind == "single" else -1


def stale_reuses(launches: Sequence[Launch], key: Callable[[Launch], Hashable] = signature) -> int:
    """How many of these launches, in order, would replay a graph that holds the address of another slot."""
    captured: dict[Hashable, int] = {}
    stale = 0
    for launch in launches:
        if launch.kind == "single":
            stale += captured.setdefault(key(launch), launch.slots[0]) != launch.slots[0]
    return stale


def _tokens_of(launch: Launch, tokens: Tensors) -> Tensors:
    """The launch's tokens [n, ...]: a view of the batch where they are one stretch of it, else gathered."""
    flat = [p for own in launch.positions for p in own]
    if launch.contiguous:
        return {name: tokens[name][flat[0] : flat[-1] + 1] for name in TOKEN_TENSORS}
    index = torch.tensor(flat, device=tokens["v"].device)
    return {name: tokens[name].index_select(0, index) for name in TOKEN_TENSORS}


def slot_ids(launch: Launch, device: torch.device | str) -> torch.Tensor:
    """[sequences] int32: the ids that a launch reads. What a captured graph reads is filled with these before a replay.

    A single sequence is handed over as its own row, so its id is 0 whatever its slot.
    """
    slots = (0,) if launch.kind == "single" else launch.slots
    return torch.tensor(slots, dtype=torch.int32, device=device)


def clear_fresh(launch: Launch, pool: torch.Tensor) -> None:
    """Zero the states of the sequences that start with this launch."""
    if starting := [slot for slot, new in zip(launch.slots, launch.fresh, strict=True) if new]:
        pool[starting] = 0


def run_launch(
    launch: Launch, tokens: Tensors, pool: torch.Tensor, o: torch.Tensor, decode: Candidate, prefill: Candidate,
    ids: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Run one launch: o [tokens, Hv, D] is written at its positions, pool [rows, Hv, D, D] updated at its slots.

    tokens: q, k [tokens, Hk, D], v [tokens, Hv, D], g, beta [tokens, Hv], and raw_qk where keys are not normalised.
    ids: what slot_ids gave, where it lies already; without it a decode launch is preceded by a copy of it.
    prefill must have read a state before it writes it ("single" hands it the same row as initial and final state), and
    both must write the tensors that they are given. Fresh states are cleared before, by clear_fresh.
    """
    device, count = pool.device, len(launch.sequences)
    own = _tokens_of(launch, tokens)
    extra = {"raw_qk": tokens["raw_qk"]} if "raw_qk" in tokens else {}
    flat = [p for places in launch.positions for p in places]
    out = o[flat[0] : flat[-1] + 1] if launch.contiguous else torch.empty_like(own["v"])

    if max(launch.lengths) == 1:
        rows = slot_ids(launch, device) if ids is None else ids
        states = {"state": pool, "state_rows": rows}
        if launch.kind == "single":
            states |= {"state": pool[launch.slots[0] : launch.slots[0] + 1], "in_order": rows}
        decode.run(decode.prepare(own | extra | states), {"o": out, "state": states["state"]})
    else:
        if launch.kind == "single":
            initial = final = pool[launch.slots[0] : launch.slots[0] + 1]
        else:
            initial = pool[list(launch.slots)]  # [sequences, Hv, D, D]: a prefill moves it once for many tokens
            final = torch.empty_like(initial)
        if launch.kind == "ragged":
            shape, bounds = (1, len(flat)), [0, *accumulate(launch.lengths)]
            extra = extra | {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32, device=device)}
        else:
            shape = (count, launch.lengths[0])
        args = {name: tensor.view(*shape, *tensor.shape[1:]) for name, tensor in own.items()}
        found = {"o": out.view(*shape, *out.shape[1:]), "final_state": final}
        prefill.run(prefill.prepare(args | extra | {"initial_state": initial}), found)
        if launch.kind != "single":
            pool[list(launch.slots)] = final
    if not launch.contiguous:
        o[flat] = out


def run(
    launches: Sequence[Launch], tokens: Tensors, pool: torch.Tensor, decode: Candidate, prefill: Candidate
) -> torch.Tensor:
    """Run launches in order; returns o [tokens, Hv, D]. Arguments as for run_launch."""
    o = torch.full_like(tokens["v"], float("nan"))
    for launch in launches:
        clear_fresh(launch, pool)
        run_launch(launch, tokens, pool, o, decode, prefill)
    return o
