"""`killgate::gdn_decode` as an arm: what an eager server calls for a token, by ops.decode."""

from __future__ import annotations

from kernels.common import Candidate, Needs, Tensors, Workload
from kernels.gdn import ops


def run(args: Tensors, out: Tensors) -> None:
    out["o"].copy_(eager(args, out)["o"])


def eager(args: Tensors, out: Tensors) -> Tensors:
    q, k, v, g, beta, rows = (args[name] for name in ("q", "k", "v", "g", "beta", "state_rows"))
    return {"o": ops.decode(q, k, v, g, beta, out["state"], rows, "raw_qk" in args)}


def _refuses(workload: Workload) -> str:
    return "" if workload["op"] == "decode" else f"op = {workload['op']}: this arm does decode"


CANDIDATES = (
    Candidate(
        name="operator",
        precision="f32",
        run=run,
        needs=Needs((9, 0), packages=("cupy",)),
        refuses=_refuses,
        config=lambda workload: "ops.decode, eager",
        no_route="calls another candidate",
        eager=eager,
    ),
)
