"""kernels/kv/controls/layouts.py: the same cache contiguous and in order, by value, and the cards that ask about them.

The candidates built on it are checked with all others in tests/kernels/kv/test_kv.py.
"""

from functools import partial

import pytest
import torch

from kernels.common import Tensors
from kernels.kv import cases
from kernels.kv.controls import cuda_layouts, layouts
from kernels.kv.reference import gather, reference
from lab.card import phases
from lab.check import families

BY_ID = {w.id: w for w in cases.WORKLOADS}
RAGGED = (
    "ctx75_b3_hq6_hkv1_d128_p16_bf16_outliers",
    "ctx130_b2_hq4_hkv4_d64_p16_bf16",
    "ctx500_b2_hq6_hkv1_d256_p64_bf16",
)


def problem(workload_id: str) -> Tensors:
    return cases.inputs(BY_ID[workload_id], 0, "cpu")


def tokens(given: Tensors, b: int) -> torch.Tensor:
    length, page = int(given["seq_lens"][b]), given["k_cache"].shape[2]
    return gather(given["k_cache"], given["page_table"][b, : -(-length // page)], length)


@pytest.mark.parametrize("workload_id", RAGGED)
@pytest.mark.parametrize("layout", ["in_order", "contiguous", "contiguous, power of two"])
def test_every_sequence_keeps_its_tokens(workload_id: str, layout: str) -> None:
    given = problem(workload_id)
    before = {name: t.clone() for name, t in given.items()}
    if layout == "in_order":
        moved = layouts.in_order(given)
    else:
        moved = layouts.contiguous(given, power_of_two="power" in layout)
    for b in range(len(given["seq_lens"])):
        assert torch.equal(tokens(moved, b), tokens(given, b))
    assert torch.equal(reference(moved)["o"], reference(given)["o"])
    assert all(torch.equal(given[name], before[name]) for name in before)
    assert all(t.is_contiguous() for t in moved.values())


def test_shapes_are_what_the_layout_says() -> None:
    given = problem("ctx75_b3_hq6_hkv1_d128_p16_bf16_outliers")
    table = layouts.in_order(given)["page_table"]
    owned = given["page_table"] >= 0
    assert torch.equal(table >= 0, owned)
    assert table[0].tolist() == [0, 1, 2, 3, 4]
    assert layouts.contiguous(given)["k_cache"].shape == (3, 1, 80, 128)
    padded = layouts.contiguous(given, power_of_two=True)
    assert padded["k_cache"].shape == (3, 1, 128, 128)
    assert padded["page_table"].tolist() == [[0], [1], [2]]
    one = layouts.contiguous(problem("ctx1_b1_hq4_hkv1_d64_p16_bf16"), power_of_two=True)
    assert one["k_cache"].shape[2] == 16


def test_a_swapped_page_would_show() -> None:
    given = problem("ctx500_b2_hq6_hkv1_d256_p64_bf16")
    moved = layouts.in_order(given)
    moved["page_table"][0, :2] = moved["page_table"][0, [1, 0]]
    assert not torch.equal(tokens(moved, 0), tokens(given, 0))


@pytest.mark.parametrize("card_id", ["lp1-kernel", "lp1-cuda-kernel", "lp1-cuda-in-order"])
def test_cards_compare_one_kernel_with_itself(card_id: str) -> None:
    card, kv = phases.card(card_id), families.load("kv")
    arms = [kv.candidate(name) for name in (card.control, card.candidate, *card.beside)]
    assert {a.precision for a in arms} == {"bf16"}
    for workload in map(kv.workload, card.workloads):
        assert not any(a.refuses(workload) for a in arms)
        assert workload.role == "measure"
    control, candidate = (a.run for a in arms[:2])
    assert isinstance(control, partial)
    assert isinstance(candidate, partial)
    assert (control.func, control.keywords) == (candidate.func, candidate.keywords)


def test_the_cards_about_pages_separate_their_order_from_the_rest() -> None:
    whole, order = phases.card("lp1-cuda-kernel"), phases.card("lp1-cuda-in-order")
    assert (order.workloads, order.candidate) == (whole.workloads, whole.candidate)
    assert whole.control in order.beside


def test_cuda_candidates_move_pages_as_their_names_say() -> None:
    given = cases.inputs(cases._workload(75, 2, 8, 2, 128, role="measure"), 0, "cpu")
    in_order, whole = (cuda_layouts.CANDIDATES[i].prepare(given) for i in (1, 0))
    assert in_order["page_table"].tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert (whole["page_table"].tolist(), whole["k"].shape[2]) == ([[0], [1]], 128)
    page = given["page_table"][1, 2]
    assert torch.equal(in_order["k"][7], given["k_cache"][page])
    assert torch.equal(whole["v"][1, :, 32:48], given["v_cache"][page])
