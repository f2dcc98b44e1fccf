"""The reference on numbers small enough to work out by hand: no candidate is held against another one here."""

import math

import pytest
import torch

from kernels.gdn import reference
from kernels.gdn.reference import step


@pytest.mark.parametrize("size", [1e-4, 1e-3, 1.0])
def test_the_normalisation_keeps_its_constant_under_the_root(size: float) -> None:
    """x / sqrt(sum(x^2) + 1e-6). Outside the root the constant is a thousandth of what it should be at 1e-3."""
    x = torch.tensor([3.0 * size, 4.0 * size], dtype=torch.float64)
    root = math.sqrt(25 * size**2 + 1e-6)
    assert reference._l2_normalised(x).tolist() == pytest.approx([3 * size / root, 4 * size / root], rel=1e-12)


def test_one_token_by_hand() -> None:
    """Two by two: decay, read with the key, correct towards the value by the learning rate, read with the query."""
    state = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]], dtype=torch.float64)
    q, k, v = (torch.tensor([x], dtype=torch.float64) for x in ([1.0, 1.0], [1.0, 0.0], [5.0, 7.0]))
    g, beta = torch.tensor([math.log(0.5)], dtype=torch.float64), torch.tensor([0.25], dtype=torch.float64)
    o, after = step(state, q, k, v, g, beta)
    # decayed [[0.5, 1], [1.5, 2]]; read [0.5, 1]; update 0.25 * ([5, 7] - [0.5, 1]) on the key's row
    wanted = [[0.5 + 0.25 * 4.5, 1 + 0.25 * 6.0], [1.5, 2.0]]
    assert after[0].flatten().tolist() == pytest.approx([x for row in wanted for x in row], rel=1e-12)
    read = [(wanted[0][i] + wanted[1][i]) / math.sqrt(2) for i in (0, 1)]
    assert o[0].tolist() == pytest.approx(read, rel=1e-12)


def test_a_sequence_ends_where_the_next_begins() -> None:
    """Two sequences packed behind each other are the two alone, each from its own initial state."""
    rng = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    lengths, heads, dim = (2, 3), 2, 4
    total = sum(lengths)
    packed = {"q": drawn(1, total, 1, dim), "k": drawn(1, total, 1, dim), "v": drawn(1, total, heads, dim)}
    packed |= {"g": -drawn(1, total, heads).abs(), "beta": drawn(1, total, heads).sigmoid()}
    start = drawn(2, heads, dim, dim)
    bounds = torch.tensor([0, 2, 5])
    both = reference.reference({**packed, "initial_state": start, "cu_seqlens": bounds})
    for n, (first, last) in enumerate(((0, 2), (2, 5))):
        alone = {name: x[:, first:last] for name, x in packed.items()} | {"initial_state": start[n : n + 1]}
        found = reference.reference(alone)
        assert torch.equal(both["o"][0, first:last], found["o"][0])
        assert torch.equal(both["final_state"][n], found["final_state"][0])


@pytest.mark.gpu
def test_a_replayed_walk_has_the_bits_of_one_launch_by_launch() -> None:
    """Two sequences, and tokens behind the last whole graph."""
    torch.manual_seed(0)
    tokens, heads, size = 3 * reference.TOGETHER + 5, 3, 16
    drawn = [torch.randn(2, tokens, heads, size, dtype=torch.float64, device="cuda") / 4 for _ in range(3)]
    g, beta = (torch.rand(2, tokens, heads, dtype=torch.float64, device="cuda") for _ in range(2))
    given = torch.randn(2, heads, size, size, dtype=torch.float64, device="cuda"), *drawn, -g, beta
    kept = given[0].clone()
    for got, wanted in zip(reference._replayed(*given), reference._walked(*given), strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(given[0], kept)
