"""Segments side by side (kernels/gdn/segments.py): what makes a segment, and how exactly maps must be kept and joined.

The Triton form itself is held to the reference with all others in test_gdn.py, where every chunk is a segment.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from kernels.common import Tensors, has_triton
from kernels.gdn import cases, segments
from kernels.gdn.reference import reference
from lab.check.accuracy import compare

Rounding = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize("bounds", [[0, 1], [0, 64], [0, 1000], [0, 7, 71, 72, 800, 2000]])
@pytest.mark.parametrize("chunks", [1, 2, 5, 100])
def test_segments_are_whole_chunks_of_one_sequence(bounds: list[int], chunks: int) -> None:
    rows = segments.rows(bounds, chunks)
    assert [row[4] for row in rows] == list(range(len(rows)))
    assert [row[0] for row in rows] == [0, *(row[0] + row[1] for row in rows[:-1])]  # one behind the other
    assert sum(row[1] for row in rows) == bounds[-1]
    chunk = 0
    for first, tokens, chunk0, sequence, _, leads, ends, _ in rows:
        assert chunk0 == chunk
        assert bounds[sequence] <= first < first + tokens <= bounds[sequence + 1]
        assert 0 < tokens <= 64 * chunks
        assert (leads, ends) == (first == bounds[sequence], first + tokens == bounds[sequence + 1])
        assert (first - bounds[sequence]) % 64 == 0
        chunk += -(-tokens // 64)
    for n in range(len(bounds) - 1):
        counts = [-(-row[1] // 64) for row in rows if row[3] == n]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("lengths", "heads_v", "split"),
    [
        ((8192,), 8, True),
        ((65536,), 8, True),
        ((32768,), 12, True),
        ((32768,), 48, False),  # half of the multiprocessors' time is the chain's already
        ((64,), 8, False),
        ((2048,) * 8, 48, False),
        ((32768, 500), 8, True),
    ],
)
def test_long_sequences_on_few_heads_are_split(lengths: tuple[int, ...], heads_v: int, split: bool) -> None:
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    plan = segments.make(bounds, heads_v, 132)
    assert bool(plan) is split
    if plan:
        blocks = heads_v * sum(not row[5] for row in segments.rows(bounds, plan.chunks))
        assert 2 // plan.groups * blocks <= 132  # one wave with outputs
        assert plan.us < max(lengths) / 64 * segments.HALF_CHUNK


def test_composing_in_the_scan_is_the_chains_or_l2_s() -> None:
    """Six segments of eight behind the second; of 64 KB a block and step, 5.2 TB/s give 80 blocks a step in 1 us."""
    bounds = [0, 8192]
    plan = segments.make(bounds, 8, 132)
    assert plan
    assert (plan.segments, plan.groups) == (8, 1)
    composing = segments.in_scan_us(plan, bounds, 8) - (plan.us - segments.LAUNCH_US - 6 * segments.COMPOSE_US)
    assert composing == pytest.approx(sum(max(0.5, 16 * n * 65536 / 5.2e6) for n in range(1, 7)))
    twice = segments.in_scan_us(plan, [0, 8192, 16384], 4) - segments.in_scan_us(plan, bounds, 8)
    assert twice == pytest.approx(0)  # as many blocks


@pytest.mark.slow
@pytest.mark.skipif(not has_triton(), reason="the portable form needs triton: pip install triton")
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_portable_form_agrees_with_the_reference(chunks: int) -> None:
    """On a GPU it splits no problem as small as the checks are; several sequences, one of them a single segment."""
    from kernels.gdn import triton_segments, triton_split

    problem = cases._prefill(460, (1, 2), lengths="330-64-66", dtype="bf16", qk_l2norm=1)
    inputs = cases.inputs(problem, 1, "cuda" if torch.cuda.is_available() else "cpu")
    args, out = triton_segments.prepare(inputs, "bf16", chunks), cases.outputs(problem, inputs)
    triton_split.run(args, out, "bf16", triton_segments.scan)
    wanted = reference(inputs)
    for name, limit in cases.tolerance(problem, "bf16").items():
        error = compare(name, out[name], wanted[name], limit)
        assert error.ok, error


# --- how exactly: the kernels' roundings in torch --------------------------------------------------------------------

DIM, TOKENS, CHUNKS = 64, 4096, 8  # a segment; error_growth.py has "idle" too: decay and rate both slow
REGIMES = ("mixed", "keep", "similar", "beta1", "beta0", "idle")


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().to(x.dtype)


def fp16(x: torch.Tensor) -> torch.Tensor:
    return x.half().to(x.dtype)


def exactly(x: torch.Tensor) -> torch.Tensor:
    return x


def drawn() -> Tensors:
    """Regimes as heads, [regime, token, ...]."""
    found: list[Tensors] = []
    for regime in REGIMES:
        axes = {"D": DIM, "dtype": "bf16", "regime": "keep" if regime == "idle" else regime, "role": "measure"}
        inputs = cases.inputs(cases._prefill(TOKENS, (1, 1), **axes), 0, "cpu")  # type: ignore[arg-type]
        one = {name: inputs[name][0, :, 0] for name in ("q", "k", "v", "g", "beta")}
        one["state"] = inputs["initial_state"][0, 0]
        found.append(one | {n: 1e-2 * one[n] for n in ("g", "beta") if regime == "idle"})
    return {name: torch.stack([one[name] for one in found]).double() for name in found[0]}


class Scan:
    """Chunks of the drawn tokens, prepared in float64; `outputs`, `state` and `maps` with the kernels' roundings."""

    def __init__(self, x: Tensors) -> None:
        self.x, self.chunks, causal = x, [], torch.ones(64, 64, dtype=torch.bool).tril()
        for at in range(0, TOKENS, 64):
            q, k, v, g, beta = (x[name][:, at : at + 64] for name in ("q", "k", "v", "g", "beta"))
            g = g.cumsum(-1)
            decay = torch.where(causal, g[..., :, None] - g[..., None, :], -math.inf).exp()
            system = (beta[..., None] * (k @ k.mT) * decay).tril(-1) + torch.eye(64, dtype=torch.float64)
            solved = torch.linalg.inv(system) * beta[..., None, :]
            self.chunks.append((q, k, v, solved, (q @ k.mT) * decay, g.exp(), (g[..., -1:] - g).exp()))

    def walk(
        self, state: torch.Tensor, first: int, last: int, values: bool = True, exact: bool = False
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The state behind chunks [first, last) and what they read. values: else zeros, and exact: in float64."""
        operand, corrected = (exactly, exactly) if exact else (bf16, fp16)
        reads = []
        for chunk in self.chunks[first:last]:
            q, k, v, solved, scores, c, e = (y.to(state.dtype) for y in chunk)
            held = operand(state)
            update = corrected(solved) @ corrected(v * values - c[..., None] * (k @ held))
            reads.append(c[..., None] * (q @ held) + corrected(scores) @ corrected(update))
            state = state * c[..., -1, None, None] + k.mT @ operand(e[..., None] * update)
        return state, reads

    def split(self, compose: Rounding) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """In segments of CHUNKS."""
        state, reads = self.walk(self.x["state"].float(), 0, CHUNKS)
        for first, last in pairwise(range(CHUNKS, len(self.chunks) + 1, CHUNKS)):
            final, more = self.walk(state, first, last)
            reads += more
            a, _ = self.walk(torch.eye(DIM).expand(len(REGIMES), -1, -1), first, last, values=False)
            b, _ = self.walk(torch.zeros_like(state), first, last)
            state = compose(a) @ compose(state) + b
        return final, reads


def test_maps_in_16_bits_joined_in_float32_err_as_the_scan_does() -> None:
    """At 65,536 tokens in 9 and in 33 segments (D = 128) the errors of o and of the state were the scan's within 3 %.

    Joined in bf16 the last outputs of "idle", whose states outlive segments, had 9.7e-3 in the place of 2.6e-3.
    """
    scan = Scan(drawn())
    state, reads = scan.walk(scan.x["state"], 0, len(scan.chunks), exact=True)

    def errors(found: tuple[torch.Tensor, list[torch.Tensor]]) -> torch.Tensor:
        """[2, regimes]: of the last 1,024 tokens' outputs and of the state, relative."""
        pairs = ((torch.cat(found[1][-16:], -2), torch.cat(reads[-16:], -2)), (found[0], state))
        return torch.stack([(x.double() - y).norm(dim=(-1, -2)) / y.norm(dim=(-1, -2)) for x, y in pairs])

    sequential = errors(scan.walk(scan.x["state"].float(), 0, len(scan.chunks)))
    assert (sequential < 4e-3).all()
    assert (errors(scan.split(exactly)) < 1.1 * sequential).all()
    coarse = errors(scan.split(bf16)) / sequential
    assert (coarse[:, REGIMES.index("idle")] > 1.5).all(), coarse
