"""kernels/kv/distributions.py and accuracy_study.py: each head has its feature, each storage does what it says.

The study's attention is held against the family's reference, its storages against the formats, and its findings
against themselves: what is said to fail must fail, and what is said to mend it must mend it.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.kv import accuracy_study as study
from kernels.kv import distributions
from kernels.kv import format as kv_format
from kernels.kv.distributions import HEADS, Head, Problem
from kernels.kv.reference import reference
from lab.card import phases

BY_NAME = {h.name: h for h in HEADS}
SMALL: dict[str, Any] = {"tokens": 512, "queries": 32, "dim": 128}
OFFSETS = ("constant-offset", "turning-offset")


def drawn(name: str, seed: int = 0, **options: int) -> Problem:
    return distributions.draw_all(seed, heads=(BY_NAME[name],), **{**SMALL, **options})


def nmse(problem: Problem, storage: str, part: str = "K and V") -> dict[str, float]:
    return {e.head: e.nmse for e in study.study(problem, [storage], [part])}


# The heads -----------------------------------------------------------------------------------------------------------


def test_a_draw_repeats_and_a_seed_changes_it() -> None:
    first, again, other = (distributions.draw_all(seed, **SMALL) for seed in (3, 3, 4))
    for name in ("q", "k", "v"):
        assert getattr(first, name).dtype == torch.float32
        assert torch.equal(getattr(first, name), getattr(again, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))
    assert first.q.shape == (8, 32, 128)
    assert first.k.shape == first.v.shape == (8, 512, 128)
    assert first.heads == tuple(BY_NAME)
    assert all(torch.isfinite(getattr(first, name)).all() for name in ("q", "k", "v"))


def test_the_card_asks_about_every_head() -> None:
    assert phases.card("p6-accuracy").workloads == tuple(BY_NAME)
    assert all(h.why for h in HEADS)


def test_rope_keeps_lengths_and_depends_on_distance_alone() -> None:
    gen = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 1, 128, generator=gen)
    at = [distributions.rope(x, torch.tensor([float(p)]), 64) for x, p in ((a, 5), (b, 9), (a, 105), (b, 109))]
    assert at[0].norm() == pytest.approx(a.norm().item(), rel=1e-5)
    assert (at[0] * at[1]).sum().item() == pytest.approx((at[2] * at[3]).sum().item(), abs=1e-3)
    assert torch.equal(at[0][:, 64:], a[:, 64:])
    assert not torch.allclose(at[0][:, :64], a[:, :64])


def test_each_head_has_its_feature() -> None:
    problem = distributions.draw_all(**{**SMALL, "tokens": 2048})
    k, v = (dict(zip(problem.heads, x, strict=True)) for x in (problem.k, problem.v))
    logits = {n: q @ k[n].T * 128**-0.5 for n, q in zip(problem.heads, problem.q, strict=True)}
    size = k["outlier-channels"].square().mean(dim=0).sqrt().sort().values
    assert size[-4] > 7 * size[-5]
    sink = torch.softmax(logits["sink"], dim=1)[:, 0].mean().item()
    assert sink == pytest.approx(0.7, abs=0.07)
    assert v["sink"][0].norm() < 0.1 * v["sink"][1:].norm(dim=1).mean()
    assert v["heavy-values"].abs().max() > 20 * v["heavy-values"].std()
    for name in OFFSETS:
        assert logits[name].max(dim=1).values.mean() > 25
    early, late = (logits["turning-offset"][:, s].mean() for s in (slice(0, 64), slice(-64, None)))
    assert late - early > 20
    early, late = (logits["constant-offset"][:, s].mean() for s in (slice(0, 64), slice(-64, None)))
    assert abs(late - early) < 3
    assert v["quiet-values"].std() == pytest.approx(0.002, rel=0.05)
    for name in ("plain", "outlier-channels", "quiet-values"):
        assert logits[name].std(dim=1).mean() == pytest.approx(2.0, rel=0.05)


# The storages --------------------------------------------------------------------------------------------------------


def paged(problem: Problem) -> dict[str, torch.Tensor]:
    """The problem as the family's tensors: every query a sequence, all of them on the same pages."""
    pages = problem.k.shape[1] // study.PAGE
    queries = problem.q.shape[1]
    return {
        "q": problem.q.transpose(0, 1).contiguous(),
        "k_cache": study._paged(problem.k),
        "v_cache": study._paged(problem.v),
        "page_table": torch.arange(pages, dtype=torch.int32).repeat(queries, 1),
        "seq_lens": torch.full((queries,), problem.k.shape[1], dtype=torch.int32),
    }


@pytest.mark.parametrize("storage", ["exact", "fp8 head", "q8_0"])
def test_attention_over_what_is_read_back_is_the_reference_on_the_planes(storage: str) -> None:
    problem = distributions.draw_all(1, tokens=48, queries=3, dim=64, heads=HEADS[:3])
    given = paged(problem)
    k, v = problem.k, problem.v
    if storage != "exact":
        k, v = study.BY_NAME[storage].keys(k), study.BY_NAME[storage].values(v)
        quantise = kv_format.quantise_fp8 if storage == "fp8 head" else kv_format.quantise_q8_0
        for name in ("k", "v"):
            given[f"{name}_cache"], given[f"{name}_scale"] = quantise(given[f"{name}_cache"])
    ours = study.attend(problem.q, k, v).transpose(0, 1)
    assert ours.dtype == torch.float64
    assert torch.allclose(ours, reference(given)["o"], rtol=1e-5, atol=1e-5)


def test_granularities_share_a_scale_where_they_say() -> None:
    """Constants that differ by group and that e4m3 holds exactly under a scale per group, and under no coarser one."""

    def kept(name: str, x: torch.Tensor) -> bool:
        storage = study.BY_NAME[name]
        assert torch.equal(storage.keys(x), storage.values(x))
        return torch.allclose(storage.keys(x), x, rtol=1e-5)

    def stepped(axis: int, every: int = 1) -> torch.Tensor:
        shape = (2, 64, 128)
        view = [-1 if a == axis else 1 for a in range(3)]
        return (1.1 ** (torch.arange(shape[axis]) // every).float()).view(view).expand(shape).contiguous()

    for by, fitting in (
        (stepped(0), ("fp8 head", "fp8 channel", "fp8 page", "fp8 token")),
        (stepped(2), ("fp8 channel",)),
        (stepped(1, study.PAGE), ("fp8 page", "fp8 token")),
        (stepped(1), ("fp8 token",)),
        (torch.full((2, 64, 128), 0.3), ("fp8 tensor", "fp8 head", "fp8 channel", "fp8 page", "fp8 token")),
    ):
        names = [s.name for s in study.STORAGES if s.name.startswith("fp8") and "centred" not in s.name]
        assert {name for name in names if kept(name, by)} == set(fitting)


def test_centring_gives_back_what_is_constant() -> None:
    k = 100 + torch.randn(1, 64, 128, generator=torch.Generator().manual_seed(0))
    plain = (study.fp8(k, study.PER_HEAD) - k).square().mean().sqrt()
    for over in ((0, 2), (2,)):
        assert (study.keys_centred(k, over) - k).square().mean().sqrt() < plain / 10
    assert torch.equal(study.BY_NAME["fp8 K centred"].values(k), study.BY_NAME["fp8 head"].values(k))


def test_bits_count_scales_and_means() -> None:
    bits = {s.name: s.bits for s in study.STORAGES}
    assert bits["fp8 head"] == 8
    assert bits["q8_0"] == 8.5
    assert bits["fp8 token"] == 8 + 16 / 128
    assert bits["fp8 K page-centred"] == 8.5  # half of the values are keys: 16 bits for 16 of them
    assert len(bits) == len(study.STORAGES)


def test_pages_must_fit() -> None:
    with pytest.raises(ValueError, match=r"T=17\b.*\b16\b"):
        study.fp8(torch.ones(1, 17, 32), study.PER_HEAD)


# The three numbers ---------------------------------------------------------------------------------------------------


def test_an_exact_storage_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    same = replace(study.BY_NAME["bf16"], name="same", keys=lambda k: k, values=lambda v: v)
    monkeypatch.setattr(study, "BY_NAME", {"same": same})
    (effect,) = study.study(drawn("plain"), ["same"])
    assert (effect.nmse, effect.kl, effect.top1) == (0.0, 0.0, 1.0)


def test_a_wrong_storage_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of the wrong sign: the NMSE of -o against o is 4, and hardly a word stays."""
    wrong = replace(study.BY_NAME["bf16"], keys=lambda k: k, values=lambda v: -v)
    monkeypatch.setattr(study, "BY_NAME", {"wrong": wrong})
    (effect,) = study.study(drawn("plain"), ["wrong"])
    assert effect.nmse == pytest.approx(4)
    assert effect.kl > 1
    assert effect.top1 < 0.1


def test_parts_name_what_was_stored() -> None:
    found = {e.part: e for e in study.study(drawn("quiet-values"), ["fp8 unit"], ("K and V", "K", "V"))}
    assert found["V"].nmse > 10 * found["K"].nmse
    assert found["K and V"].nmse == pytest.approx(found["V"].nmse, rel=0.2)


# What is found -------------------------------------------------------------------------------------------------------


def test_rounding_predicts_plain_data() -> None:
    predicted = (1 + 2.0**2) * (0.43 / 16) ** 2
    found = [nmse(drawn("plain", seed), "fp8 head")["plain"] for seed in range(4)]
    assert sum(found) / 4 == pytest.approx(predicted, rel=0.3)


@pytest.mark.parametrize("name", OFFSETS)
def test_no_scale_mends_an_offset_and_centring_by_page_does(name: str) -> None:
    problem = drawn(name, tokens=2048)
    line = phases.card("p6-accuracy").gate.require[0].threshold
    for storage in ("fp8 unit", "fp8 tensor", "fp8 head", "fp8 channel", "fp8 page", "fp8 token"):
        assert nmse(problem, storage)[name] > 3 * line, storage
    assert nmse(problem, "fp8 K page-centred")[name] < line
    assert (nmse(problem, "fp8 K centred")[name] < line) == (name == "constant-offset")
    # The cause is the offset: without it in the query, the same keys do no harm.
    calm: Head = replace(BY_NAME[name], offset=0.0)
    assert nmse(distributions.draw_all(heads=(calm,), **{**SMALL, "tokens": 2048}), "fp8 head")[name] < line


def test_a_scale_per_head_mends_sizes() -> None:
    pair = (BY_NAME["quiet-values"], BY_NAME["loud-values"])
    problem = distributions.draw_all(heads=pair, **SMALL)
    per_head, per_tensor = (nmse(problem, s, "V")["quiet-values"] for s in ("fp8 head", "fp8 tensor"))
    assert per_tensor > 10 * per_head
    assert math.sqrt(per_head) < 0.04


def test_sinks_and_tails_cost_what_plain_data_costs() -> None:
    plain = nmse(drawn("plain"), "fp8 head")["plain"]
    for name in ("sink", "heavy-values"):
        assert nmse(drawn(name), "fp8 head")[name] < 2 * plain
