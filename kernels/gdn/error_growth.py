"""What a bf16 state costs over thousands of tokens: the recurrence carried in several ways at once, in torch.

A reference in float64 and several ways to store the state, each with float32 arithmetic, walk the same tokens. A way
of storing says how the state is rounded and after how many tokens what was stored is read again. That second number is
the point: a server that decodes reads its state back at every token, one that evaluates a text in micro-batches only
between them, and a test no longer than a micro-batch never reads it at all. Such a test gives the float32 state's
outputs to the bit, whatever the state is stored in, and so passes any limit (recorded for the bf16 state of patch
0018's successors: a gate at 256 tokens passed, the same gate at 1,024 and more failed by 50 to 170 times).

Two things happen to a state rounded to the nearest bf16 at every token. Roundings add up like a random walk until the
delta rule and the decay shrink them as fast as they come. And a change smaller than half a unit in the last place
(2^-9 of an element) is lost altogether, every time: a decay of 1e-4 a token never takes place. Stochastic rounding
(up with the probability of the remainder, so that the mean is right) mends the second and makes the first larger.

All regimes run at once, as heads of one batch, so that 4,096 tokens are seconds on a CPU. Given up: the rounding of
q, k, v and o, which are float32 here, because it is the same for every way of storing the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.common import Tensors, Workload
from kernels.gdn import cases

REGIMES = ("mixed", "forget", "keep", "beta0", "beta1", "similar", "idle")
CHECKPOINTS = (1, 16, 64, 256, 1024, 4096)
WINDOW = 64  # tokens that an output error is taken over
DROPPED_BITS = 16  # of float32, in bf16


@dataclass(frozen=True)
class Storage:
    """A way to keep the state.

    state: "f32" or "bf16". rounding: "nearest" (ties to even) or "stochastic".
    every: tokens after which the state is stored and read again; in between it stays in float32 registers.
    """

    name: str
    state: str = "bf16"
    rounding: str = "nearest"
    every: int = 1


STORAGES = (
    Storage("f32", "f32"),
    Storage("bf16"),
    Storage("bf16 stochastic", rounding="stochastic"),
    Storage("bf16, micro-batches of 512", every=512),
)


@dataclass(frozen=True)
class Growth:
    """Errors against float64 by storage (P), regime (R) and token.

    squared_error, squared_norm: of the outputs, [P, R, T] and [R, T], summed over heads and D.
    state_error: relative Frobenius error of the state after each checkpoint, [P, R, checkpoints].
    """

    storages: tuple[Storage, ...]
    regimes: tuple[str, ...]
    checkpoints: tuple[int, ...]
    squared_error: torch.Tensor
    squared_norm: torch.Tensor
    state_error: torch.Tensor

    def at(self, storage: str) -> int:
        """The index of a storage by name; raises ValueError for an unknown one."""
        return [s.name for s in self.storages].index(storage)

    def drift(self, storage: str, regime: str, token: int) -> float:
        """Relative error of the outputs over the WINDOW tokens that end at `token` (1-based)."""
        span = slice(max(0, token - WINDOW), token)
        row = self.regimes.index(regime)
        error = self.squared_error[self.at(storage), row, span].sum()
        return float((error / self.squared_norm[row, span].sum()).sqrt())

    def state(self, storage: str, regime: str, token: int) -> float:
        """Relative error of the state after `token` tokens, which must be a checkpoint."""
        found = self.state_error[self.at(storage), self.regimes.index(regime), self.checkpoints.index(token)]
        return float(found)


def draw(regime: str, tokens: int, heads: int, dim: int, seed: int) -> Tensors:
    """Inputs of one sequence as cases.inputs draws them, in float32 with normalised keys: [T, heads, ...].

    "idle" is the one regime that cases does not have: decay near 1 and learning rate near 0 together, a head that
    only remembers. Raises ValueError for an unknown regime.
    """
    axes: dict[str, int | str] = {
        "op": "prefill", "batch": 1, "T": tokens, "lengths": "", "Hk": heads, "Hv": heads, "D": dim, "dtype": "f32",
        "state_dtype": "f32", "qk_l2norm": 0, "regime": "keep" if regime == "idle" else regime, "pad": 0,
    }  # fmt: skip
    found = cases.inputs(Workload(f"growth_{regime}", axes), seed, "cpu")
    if regime == "idle":
        found["beta"] = found["beta"] * 2e-3
    return {name: found[name][0] for name in ("q", "k", "v", "g", "beta", "initial_state")}


def to_bf16(state: torch.Tensor, rounding: str, generator: torch.Generator) -> torch.Tensor:
    """float32 rounded to bf16 and widened again. Raises ValueError for an unknown rounding."""
    if rounding == "nearest":
        return state.to(torch.bfloat16).float()
    if rounding != "stochastic":
        raise ValueError(f"rounding {rounding!r} is unknown: use nearest or stochastic")
    # The dropped bits are a fraction of the last place: adding a uniform number carries over with that probability.
    noise = torch.empty(state.shape, dtype=torch.int32, device=state.device)
    noise.random_(0, 1 << DROPPED_BITS, generator=generator)
    kept = (state.contiguous().view(torch.int32) + noise) & -(1 << DROPPED_BITS)
    return kept.view(torch.float32)


def _step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """One token, in place: state [..., H, D, D], q, k, v [H, D], decay, beta [H]; returns o [..., H, D], scaled."""
    state *= decay[:, None, None]
    guess = _product(k, state)
    state += k[:, :, None] * (beta[:, None] * (v - guess))[..., None, :]
    return _product(q, state) * q.shape[-1] ** -0.5


def _product(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """x [H, D] times state [..., H, D, D], summed by halves: the order in a GEMM depends on the CPU."""
    terms = x[:, :, None] * state
    while (rows := terms.shape[-2]) > 1:
        half = -(-rows // 2)
        terms[..., : rows - half, :] += terms[..., half:, :]
        terms = terms[..., :half, :]
    return terms.squeeze(-2)


def study(
    tokens: int = 4096, heads: int = 2, dim: int = 64, seed: int = 0, storages: Sequence[Storage] = STORAGES,
    regimes: Sequence[str] = REGIMES,
) -> Growth:  # fmt: skip
    """Walk `tokens` tokens of every regime with every storage and with float64; see Growth for what comes back."""
    drawn = [draw(regime, tokens, heads, dim, seed + i) for i, regime in enumerate(regimes)]
    q, k, v, g, beta = (torch.cat([d[name] for d in drawn], dim=1) for name in ("q", "k", "v", "g", "beta"))
    exact = torch.cat([d["initial_state"] for d in drawn]).double()  # [R * heads, D, D]
    states = exact.float().repeat(len(storages), 1, 1, 1)
    generator = torch.Generator().manual_seed(seed)
    marks = tuple(c for c in CHECKPOINTS if c <= tokens)
    squared_error = torch.zeros(len(storages), len(regimes), tokens, dtype=torch.float64)
    squared_norm = torch.zeros(len(regimes), tokens, dtype=torch.float64)
    state_error = torch.zeros(len(storages), len(regimes), len(marks), dtype=torch.float64)

    decay64 = g.double().exp()
    decay = decay64.float()  # a CPU's own float32 exp may round otherwise
    for t in range(tokens):
        wanted = _step(exact, q[t].double(), k[t].double(), v[t].double(), decay64[t], beta[t].double())
        got = _step(states, q[t], k[t], v[t], decay[t], beta[t])
        for p, storage in enumerate(storages):
            if storage.state == "bf16" and (t + 1) % storage.every == 0:
                states[p] = to_bf16(states[p], storage.rounding, generator)
        squared_error[:, :, t] = _by_regime(got.double() - wanted, len(regimes), 1)
        squared_norm[:, t] = _by_regime(wanted, len(regimes), 0)
        if t + 1 in marks:
            error = _by_regime(states.double() - exact, len(regimes), 1)
            state_error[:, :, marks.index(t + 1)] = (error / _by_regime(exact, len(regimes), 0)).sqrt()
    return Growth(tuple(storages), tuple(regimes), marks, squared_error, squared_norm, state_error)


def _by_regime(x: torch.Tensor, regimes: int, lead: int) -> torch.Tensor:
    """Sum of squares of everything behind the head axis (at place `lead`), heads grouped by regime."""
    return x.square().unflatten(lead, (regimes, -1)).flatten(lead + 1).sum(-1)
