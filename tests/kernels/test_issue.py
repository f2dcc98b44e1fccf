"""The microbenchmarks of issue.cu: the machine code has the products and the decode that each name says."""

from collections import Counter

import pytest

from kernels import issue
from lab.row.records import CEILINGS, ISSUE_TOKENS
from tests.kernels import sass


@pytest.fixture(scope="module")
def loops() -> dict[str, Counter[str]]:
    """Opcodes of the innermost loop of every kernel: two tiles a turn."""
    pytest.importorskip("triton")
    found = {}
    for name, own in sass.kernels(sass.compiled(issue.SOURCE)).items():
        jumps = [(int(i.text.split()[-1], 16), i.address) for i in own if i.text.startswith("BRA 0x")]
        start, end = max((j for j in jumps if j[0] < j[1]), key=lambda j: j[1] - j[0])
        found[name] = Counter(i.text.split()[0].split(".")[0] for i in own if start <= i.address <= end)
    return found


def test_every_kernel_is_a_ceiling() -> None:
    assert issue.TOKENS == ISSUE_TOKENS
    assert [f"issue_{name}" for name in ("decode", *issue.PRODUCTS)] == [n for n in CEILINGS if n.startswith("issue_")]


@pytest.mark.parametrize("name", [*issue.PRODUCTS, "decode"])
def test_a_loop_has_the_products_and_the_decode_of_two_tiles(name: str, loops: dict[str, Counter[str]]) -> None:
    found, (way, _, rest) = loops[name], name.partition("_")
    tokens, _, form = rest.partition("_")
    products = {"mma": ("HMMA", 8 * int(tokens or 0) // 8), "wgmma": ("HGMMA", 8), "decode": ("HMMA", 0)}[way]
    assert found[products[0]] == products[1]
    assert found["HMMA"] + found["HGMMA"] == products[1]
    scaled = found["HMUL2"] + found["HFMA2"]
    if form == "alone":
        assert (scaled, found["LOP3"], found["PRMT"]) == (0, 0, 0)
    else:
        # 16 codes are 16 operations, of which 9 are LOP3; two scales a tile, one multiplication for two weights.
        assert (scaled, found["PRMT"], found["LOP3"]) == (2 * 16, 2 * 2, 2 * (18 + 8 * (way == "decode")))


def test_work_is_of_a_tile_of_weights() -> None:
    assert issue.work("wgmma_64_beside") == (2 * 16 * 64 * 64, 16 * 64 * 4.5 / 8)
    assert issue.work("mma_8_alone") == (2 * 16 * 64 * 8, 0)
    assert issue.work("decode") == (0, 576)


@pytest.mark.gpu
def test_products_beside_decode_are_no_faster_than_alone() -> None:
    from lab.bench import timers

    for way, counts in issue.TOKENS.items():
        for n in counts:
            taken = {}
            for form in issue.FORMS:
                call, operations, _ = issue.ready(f"{way}_{n}_{form}")
                call()
                taken[form] = min(timers.elapsed_us(call) for _ in range(5)) / operations
            assert taken["alone"] < 1.05 * taken["beside"] < 1.15 * taken["turn"], (way, n, taken)
