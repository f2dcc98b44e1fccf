"""QuACK's weight-only GEMM in the CuTe DSL: NVFP4 decoded in registers, products on bf16 WGMMA; Hopper and SM120.

    pip install quack-kernels

`prepare_w4_weight` takes this family's layout as it is (packed [N, K / 2] with the even k in the low nibble, e4m3
scales [N, K / 16]) and permutes it into fragment order; the tensor scale is a float32 factor of the epilogue. It has an
output argument (where N needs no padding) and is safe in a CUDA graph after the first call, which compiles.

With an unpacked copy instead of an installed package, PYTHONPATH must hold both its site folder and
site/nvidia_cutlass_dsl/dsl_packages (an installed DSL adds the second by its own .pth file), and CUTE_DSL_ARCH=sm_90a
says the architecture where the DSL cannot find it.
"""

from __future__ import annotations

from typing import Any

from kernels.common import Candidate, Needs, Tensors, Workload, library_version

FORMAT = "nvfp4"


def prepare(inputs: Tensors) -> dict[str, Any]:
    """x as it is, weights and scales in QuACK's fragment order, the tensor scale as a number of the host."""
    import torch
    from quack.gemm_w4 import prepare_w4_weight

    weights, scales = prepare_w4_weight(inputs["w_packed"], inputs["w_scale"].view(torch.float8_e4m3fn), FORMAT)
    return {"x": inputs["x"], "w": weights, "w_scale": scales, "tensor_scale": float(inputs["w_tensor_scale"])}


def run(args: dict[str, Any], out: Tensors) -> None:
    from quack.gemm_w4 import gemm_w4a16

    gemm_w4a16(
        args["x"], args["w"], args["w_scale"], tensor_scale=args["tensor_scale"], out=out["y"], wformat=FORMAT
    )  # fmt: skip


def _refuses(workload: Workload) -> str:
    if workload["dtype"] != "bf16":
        return f"dtype={workload['dtype']}: QuACK's W4A16 takes bf16 activations"
    n, k = workload["N"], workload["K"]
    if n % 128 or k % 64:
        return f"N={n}, K={k}: QuACK writes into a given output only for N in multiples of 128, and takes K in 64s"
    return ""


CANDIDATES = (
    Candidate(
        name="quack_w4a16",
        precision="nvfp4-w4a16",
        run=run,
        needs=Needs(capability=(9, 0), packages=("quack", "cutlass")),
        prepare=prepare,
        refuses=_refuses,
        config=lambda workload: f"quack-kernels {library_version('quack-kernels')} gemm_w4a16, its own tile choice",
    ),
)
