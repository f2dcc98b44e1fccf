"""`killgate::nvfp4_linear`: y[..., N] = x[..., K] @ w^T as a torch operator, and the module that packs a weight for it.

    linear = ops.Linear(w_packed, w_scale, w_tensor_scale, tokens=(1, 4096))
    y = torch.compile(linear)(x)                # also inside a CUDA graph, after one call as warm-up

Which candidate a number of tokens gets, the family's router says when the weight is packed. A module has one copy, of
4.5 bits a weight, for every layout that its range of tokens needs: of cuda_decode and cuda_gemm one up to 24 tokens of
long K (tiles.py) and one above (row_tiles.py). Narrow `tokens` where two are too much. Leading dimensions are collapsed
before the choice (route.py says why). Only candidates whose operands are exact compete (precision nvfp4-w4a16).

The workspace of a layout is shared by all modules on a device: launches on one stream follow each other. A module that
runs on a second stream at the same time is given `workspace=ops.Workspace()` of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from kernels import cuda, operators
from kernels.common import Tensors
from kernels.nvfp4.route import ROUTER

FAMILY = "nvfp4"
EXACT = "nvfp4-w4a16"
LADDER = (*range(1, 65), *(1 << power for power in range(7, 21)))  # numbers of tokens that are asked for
SCRATCH = (
    "parts",
    "sums",
    "flags",
    "x_e4m3",
    "x_scale",
)  # what kernels leave each other; the rest of what they prepare is read only


class Workspace:
    """Scratch memory by device and layout, as large as the largest that was asked for."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, str, str], torch.Tensor] = {}

    def at_least(self, layout: str, wanted: Tensors) -> Tensors:
        """`wanted` by name, or what is kept for this layout where that is as large."""
        found = {}
        for name, tensor in wanted.items():
            key = (tensor.device, layout, name)
            if key not in self._kept or self._kept[key].numel() < tensor.numel():
                self._kept[key] = tensor
            found[name] = self._kept[key]
        return found


SHARED = Workspace()


def _call(
    x: torch.Tensor,
    operands: Sequence[torch.Tensor],
    scratch: Sequence[torch.Tensor],
    route: str,
    n: int,
    plans: operators.Plans | None = None,
    key: Any = None,
) -> torch.Tensor:
    rows = x.contiguous()
    if x.dim() == 2:
        y = out = rows.new_empty(len(rows), n)
    else:
        rows, y = rows.view(-1, x.shape[-1]), x.new_empty((*x.shape[:-1], n))
        out = y.view(-1, n)
    if len(rows):
        operators.perform(FAMILY, route, ("x",), (rows,), (*operands, *scratch), {"y": out}, None, plans, key)
    return y


def _fake(
    x: torch.Tensor, operands: Sequence[torch.Tensor], scratch: Sequence[torch.Tensor], route: str, n: int
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], n))


operators.define(
    "nvfp4_linear(Tensor x, Tensor[] operands, Tensor(a!)[] scratch, str route, SymInt n) -> Tensor", _call, _fake
)


@functools.lru_cache(maxsize=4096)
def segments(
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    tokens: tuple[int, int],
    only: str = "",
    chained: bool = False,
) -> tuple[tuple[int, str, str], ...]:
    """(largest number of tokens, candidate, layout of its weights) in ascending order, for y[M, n] = x[M, k] w^T.

    tokens: the least and the most M. A choice holds from its place on the ladder up to the next. only: the candidate.
    chained: the chosen ones' programmatic forms, where they have one.
    """
    if device.type != "cuda":
        return ((tokens[1], operators.REFERENCE, ""),)
    if only:
        return ((tokens[1], only, _layout(only, tokens[1], n, k, dtype, device)),)
    found: list[tuple[int, str, str]] = []
    asked = sorted({m for m in LADDER if tokens[0] <= m <= tokens[1]} | set(tokens))
    for m, following in zip(asked, [*(m - 1 for m in asked[1:]), tokens[1]], strict=True):
        chosen = operators.choose(ROUTER, device, EXACT, M=m, N=n, K=k, dtype=operators.dtype_word(dtype))
        name = in_chain(chosen.name, device) if chained else chosen.name
        layout = _layout(name, m, n, k, dtype, device)
        if found and found[-1][1:] == (name, layout):
            found.pop()
        found.append((following, name, layout))
    return tuple(found)


def in_chain(name: str, device: torch.device) -> str:
    """A candidate's form that is launched programmatically; itself where it has none."""
    form = f"{name}_chained"
    return form if form in operators.candidates(FAMILY, torch.cuda.get_device_capability(device)) else name


def _layout(name: str, m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> str:
    """The layout that candidates share copies of; empty where it is the candidate's own."""
    if name.startswith("cuda_decode"):
        return "tiles"
    if not name.startswith("cuda_gemm"):
        return ""
    from kernels.nvfp4 import cuda_gemm

    return cuda_gemm.layout_of(cuda_gemm.config_of(torch.empty(m, k, dtype=dtype, device="meta"), n, device))


class Linear(torch.nn.Module):
    """An NVFP4 weight, packed once for the kernels that its numbers of tokens get on the device where it lies.

    w_packed uint8 [N, K / 2], w_scale uint8 [N, K / 16], w_tensor_scale float32 [1], as in format.py; dtype: of x and
    y, bf16 or fp16; tokens: the least and the most rows of x. Raises ValueError for shapes that do not belong together
    and where no kernel takes the shape; a call raises it for more tokens, and for x of another type or K. only: the
    candidate for all of them, which need not compete (one that rounds x, one that is launched programmatically).
    chained: as in `segments`.
    """

    def __init__(
        self,
        w_packed: torch.Tensor,
        w_scale: torch.Tensor,
        w_tensor_scale: torch.Tensor,
        *,
        dtype: torch.dtype = torch.bfloat16,
        tokens: tuple[int, int] = (1, 8192),
        workspace: Workspace = SHARED,
        only: str = "",
        chained: bool = False,
    ) -> None:
        super().__init__()
        (self.n, half), self.dtype, self.tokens = w_packed.shape, dtype, tokens
        self.k = 2 * half
        if w_scale.shape != (self.n, self.k // 16) or self.k % 16 or not 1 <= tokens[0] <= tokens[1]:
            raise ValueError(
                f"w_packed {tuple(w_packed.shape)}, w_scale {tuple(w_scale.shape)}, {tokens=}: pass [N, K / 2] and "
                "[N, K / 16], and the least and most tokens"
            )
        weight = {"w_packed": w_packed, "w_scale": w_scale, "w_tensor_scale": w_tensor_scale}
        packed: dict[tuple[str, str], tuple[str, list[torch.Tensor], list[torch.Tensor]]] = {}
        copies: dict[str, torch.Tensor] = {}
        self.parts: list[tuple[int, str, list[torch.Tensor], list[torch.Tensor]]] = []
        for last, name, layout in segments(self.n, self.k, dtype, w_packed.device, tokens, only, chained):
            if (name, layout) not in packed:
                packed[name, layout] = _packed(weight, name, layout, dtype, last, workspace, copies)
            self.parts.append((last, *packed[name, layout]))
        self.plans = operators.Plans()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y [..., N] in x's dtype from x [..., K]."""
        key = None
        if eager := operators.direct(x):
            key, plan, addresses = operators.known(self.plans, (x,))
            if plan is not None:  # a call with x like this one has been checked
                y = x.new_empty(len(x), self.n) if x.dim() == 2 else x.new_empty(*x.shape[:-1], self.n)
                plan((*addresses, y.data_ptr()), cuda.stream_of(x.get_device()))
                return y
        if x.dtype != self.dtype or x.shape[-1] != self.k:
            raise ValueError(f"x is {x.dtype} with K={x.shape[-1]}; the weight was packed for {self.dtype}, K={self.k}")
        rows = x.numel() // self.k
        for last, route, operands, scratch in self.parts:
            if rows <= last:
                if eager:
                    return _call(x, operands, scratch, route, self.n, self.plans, key)
                return torch.ops.killgate.nvfp4_linear.default(x, operands, scratch, route, self.n)
        raise ValueError(f"{rows} tokens, the weight was packed for at most {self.tokens[1]}; pass tokens=")

    def extra_repr(self) -> str:
        """What runs for which numbers of tokens."""
        return ", ".join([f"N={self.n}, K={self.k}", *(f"M<={m}: {route.split()[0]}" for m, route, *_ in self.parts)])


def _packed(
    weight: Tensors,
    name: str,
    layout: str,
    dtype: torch.dtype,
    m: int,
    workspace: Workspace,
    copies: dict[str, torch.Tensor],
) -> tuple[str, list[torch.Tensor], list[torch.Tensor]]:
    """The route, and its operands and scratch, for the weights in one layout; `copies` has those made before."""
    place = weight["w_packed"].device
    if name == operators.REFERENCE:
        none = operators.scratch_of({}, place)
        return " ".join((name, *weight, *none)), list(weight.values()), list(none.values())
    candidate = operators.candidates(FAMILY, torch.cuda.get_device_capability(place))[name]
    x = torch.empty(m, 2 * weight["w_packed"].shape[1], dtype=dtype, device="meta")
    made = candidate.prepare({"x": x, **weight})
    if layout:
        made["w"] = copies.setdefault(layout, made["w"])
    scratch = {key: tensor for key, tensor in made.items() if key in SCRATCH}
    if scratch and layout:
        from kernels.nvfp4 import cuda_gemm

        scratch = workspace.at_least(layout, cuda_gemm.most_workspace(layout, place))
    elif "x_e4m3" in scratch:  # of this shape of x
        scratch = workspace.at_least(f"{name} {tuple(x.shape)}", scratch)
    scratch = operators.scratch_of(scratch, place)
    operands = {key: tensor for key, tensor in made.items() if key not in (*SCRATCH, "x")}
    return " ".join((name, *operands, *scratch)), list(operands.values()), list(scratch.values())
