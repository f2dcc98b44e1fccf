"""`killgate::moe`: a mixture's feed-forward as a torch operator, and the module that packs its experts for it.

    layer = ops.Layer(weights, top_k=8, tokens=(1, 4096))      # weights: by the names in this package's docstring
    y = torch.compile(layer)(x, logits)                        # logits [T, E] float32: the router's product is yours

Which candidate a number of tokens gets, the family's router says when the experts are packed. cuda_experts and
cuda_experts_many read one copy of the weights; others keep a copy of their own: narrow `tokens` where that is too much.
Scratch is as large as the most tokens of a candidate need and is shared by all modules of one shape on a device:
launches on one stream follow each other. A module that runs on a second stream at the same time is given
`workspace=nvfp4.ops.Workspace()` of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from kernels import cuda, operators
from kernels.common import Tensors
from kernels.moe.route import ROUTER
from kernels.nvfp4.ops import SHARED, Workspace

FAMILY = "moe"
EXACT = "nvfp4-w4a16"
LADDER = tuple(1 << power for power in range(17))  # numbers of tokens that are asked for
MOVING = ("x", "logits")
ROW_TILES = "row tiles"  # the layout that both kernels in CUDA C++ read


def _call(
    x: torch.Tensor,
    logits: torch.Tensor,
    operands: Sequence[torch.Tensor],
    scratch: Sequence[torch.Tensor],
    route: str,
    plans: operators.Plans | None = None,
    key: Any = None,
) -> torch.Tensor:
    moving = [x.contiguous(), logits.contiguous()]
    y = torch.empty_like(moving[0])
    if len(y):
        operators.perform(FAMILY, route, MOVING, moving, (*operands, *scratch), {"y": y}, None, plans, key)
    return y


def _fake(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


operators.define(
    "moe(Tensor x, Tensor logits, Tensor[] operands, Tensor(a!)[] scratch, str route) -> Tensor", _call, _fake
)


@functools.lru_cache(maxsize=1024)
def segments(
    experts: int, top_k: int, H: int, F: int, shared: int, dtype: torch.dtype, device: torch.device,
    tokens: tuple[int, int],
) -> tuple[tuple[int, str], ...]:  # fmt: skip
    """(largest number of tokens, candidate) in ascending order. A choice holds from its place on the ladder upwards.

    And as long as it is near the fastest: each other candidate is one more copy of the weights.
    """
    if device.type != "cuda":
        return ((tokens[1], operators.REFERENCE),)
    shape = {"experts": experts, "top_k": top_k, "H": H, "F": F, "shared": shared}
    found: list[tuple[int, str]] = []
    # A place of the ladder and the one behind it: kernels' own limits (128 tokens) are places.
    asked = sorted({m + more for m in LADDER for more in (0, 1) if tokens[0] <= m + more <= tokens[1]} | set(tokens))
    for T, following in zip(asked, [*(m - 1 for m in asked[1:]), tokens[1]], strict=True):
        kept = found[-1][1] if found else ""
        chosen = operators.choose(ROUTER, device, EXACT, kept, T=T, dtype=operators.dtype_word(dtype), **shape)
        if found and found[-1][1] == chosen.name:
            found.pop()
        found.append((following, chosen.name))
    return tuple(found)


class Layer(torch.nn.Module):
    """A mixture's experts in NVFP4, packed once for the kernels that its numbers of tokens get.

    weights: gate_up_packed, gate_up_scale, gate_up_tensor_scale, down_..., and with a shared expert shared_... and
    shared_gate, as in the package's docstring; top_k: experts of a token; dtype: of x and y, bf16 or fp16; tokens: the
    least and the most rows of x. Raises ValueError for weights that do not belong together and where no kernel takes
    the shape; a call raises it for more tokens, and for x or logits of another type or width.
    """

    def __init__(
        self,
        weights: Tensors,
        *,
        top_k: int,
        dtype: torch.dtype = torch.bfloat16,
        tokens: tuple[int, int] = (1, 8192),
        workspace: Workspace = SHARED,
    ) -> None:
        super().__init__()
        up, down = weights["gate_up_packed"], weights["down_packed"]
        (self.experts, self.width, half), self.dtype, self.tokens = down.shape, dtype, tokens
        inner, shared = 2 * half, 2 * weights["shared_down_packed"].shape[2] if "shared_down_packed" in weights else 0
        if up.shape != (self.experts, 2 * inner, self.width // 2) or not 1 <= top_k <= self.experts:
            raise ValueError(
                f"gate_up {tuple(up.shape)}, down {tuple(down.shape)}, {top_k=}: pass [E, 2 F, H / 2] and [E, H, F / 2]"
            )
        if not 1 <= tokens[0] <= tokens[1]:
            raise ValueError(f"{tokens=}: pass the least and the most rows of x")
        given = {**weights, "top_k": torch.tensor(top_k, device=up.device)}
        self.parts: list[tuple[int, str, list[torch.Tensor], list[torch.Tensor]]] = []
        self.plans = operators.Plans()
        shape = (self.experts, top_k, self.width, inner, shared)
        chosen = segments(*shape, dtype, up.device, tokens)
        packed, copies = {}, dict[str, Tensors]()
        for name, last in {name: last for last, name in chosen}.items():  # once, for the most tokens of each
            x = torch.empty(last, self.width, dtype=dtype, device="meta")
            packed[name] = _packed(given, name, x, shape, workspace, copies)
        self.parts += [(last, *packed[name]) for last, name in chosen]

    def forward(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """y [T, H] in x's dtype from x [T, H] and logits float32 [T, E]."""
        key = None
        if eager := operators.direct(x, logits):
            key, plan, addresses = operators.known(self.plans, (x, logits))
            if plan is not None:  # a call with tensors like these has been checked
                y = torch.empty_like(x)
                plan((*addresses, y.data_ptr()), cuda.stream_of(x.get_device()))
                return y
        if x.dtype != self.dtype or x.dim() != 2 or x.shape[1] != self.width:
            raise ValueError(f"x is {x.dtype} {tuple(x.shape)}; the layer was packed for {self.dtype}, H={self.width}")
        if logits.dtype != torch.float32 or logits.shape != (len(x), self.experts):
            raise ValueError(f"logits are {logits.dtype} {tuple(logits.shape)}; pass float32 [T, {self.experts}]")
        for last, route, operands, scratch in self.parts:
            if len(x) <= last:
                if eager:
                    return _call(x, logits, operands, scratch, route, self.plans, key)
                return torch.ops.killgate.moe.default(x, logits, operands, scratch, route)
        raise ValueError(f"{len(x)} tokens, the layer was packed for at most {self.tokens[1]}; pass tokens=")

    def extra_repr(self) -> str:
        """What runs for which numbers of tokens."""
        return ", ".join([f"E={self.experts}", *(f"T<={m}: {route.split()[0]}" for m, route, *_ in self.parts)])


def _packed(
    weights: Tensors,
    name: str,
    x: torch.Tensor,
    shape: tuple[int, ...],
    workspace: Workspace,
    copies: dict[str, Tensors],
) -> tuple[str, list[torch.Tensor], list[torch.Tensor]]:
    """The route, and its operands and scratch, for up to len(x) tokens; `copies` has weights made before."""
    place = weights["down_packed"].device
    if name == operators.REFERENCE:
        made, scratch = dict(weights), operators.scratch_of({}, place)
    else:
        from kernels.moe import cuda_experts, cuda_many

        of_one_layout = {"cuda_experts": cuda_experts, "cuda_experts_many": cuda_many}.get(name)
        if of_one_layout:
            if ROW_TILES not in copies:
                copies[ROW_TILES] = cuda_experts.weights(weights, x.dtype)
            made = copies[ROW_TILES] | of_one_layout.scratch(*cuda_experts.sizes(weights | {"x": x}))
        else:
            candidate = operators.candidates(FAMILY, torch.cuda.get_device_capability(place))[name]
            made = dict(candidate.prepare(weights | {"x": x}))
        names = {*cuda_experts.SCRATCH, *cuda_many.SCRATCH}
        scratch = {key: made.pop(key) for key in sorted(names) if key in made}
        scratch = operators.scratch_of(workspace.at_least(f"{name} {shape} {x.dtype}", scratch), place)
    operands: dict[str, Any] = {key: t for key, t in made.items() if key not in MOVING}
    return " ".join((name, *operands, *scratch)), list(operands.values()), list(scratch.values())
