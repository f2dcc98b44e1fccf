"""Humming: mixed-precision linear layers whose kernel is generated and compiled for each shape; here NVFP4 W4A16.

    pip install humming-kernels

The layer takes a checkpoint's tensors as they are stored (its schema "modelopt", algorithm "nvfp4": packed e2m1 with
the even k in the low nibble, e4m3 scales [N, K / 16], one float32 scale), which is this family's own layout, and does
its repacking itself; nothing is converted here. One launch configuration is asked from its heuristics for M and passed
to every call. It has an output argument and is safe in a CUDA graph once the kernel is compiled: the check before any
timing compiles it, by nvcc or NVRTC, which takes seconds; HUMMING_CACHE_DIR says where the result is kept.

Left out: Humming's W4A8 mode, which is MXFP4 (e8m0 scales per 32 values): e4m3 scales per 16 values have no exact form
there, so it cannot take these weights.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from kernels.common import Candidate, Needs, Tensors, Workload, library_version


def prepare(inputs: Tensors) -> dict[str, Any]:
    """x as it is, and Humming's layer holding the weights in its own layout with the launch choice for M rows."""
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config

    x, device = inputs["x"], inputs["w_packed"].device
    (n, half_k), m = inputs["w_packed"].shape, x.shape[0]
    layer = HummingLayer(
        shape_n=n,
        shape_k=2 * half_k,
        weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
        torch_dtype=x.dtype,
    ).to(device)
    layer.load_from_tensors(
        {
            "weight": inputs["w_packed"],
            "weight_scale": inputs["w_scale"].view(torch.float8_e4m3fn),
            "weight_scale_2": inputs["w_tensor_scale"],
        }
    )
    layer.transform()
    tuning = get_heuristics_config(layer.humming_config, shape_m=m, gemm_type="dense", device=device.index or 0)
    return {"x": x, "layer": layer, "compute": json.dumps({"gemm_type": "dense"}), "tuning": json.dumps(tuning)}


def run(args: dict[str, Any], out: Tensors) -> None:
    with torch.no_grad():
        args["layer"](args["x"], outputs=out["y"], compute_config=args["compute"], tuning_config=args["tuning"])


def _refuses(workload: Workload) -> str:
    if workload["dtype"] != "bf16":
        return f"dtype={workload['dtype']}: this adapter is for bf16, the dtype of every measured shape"
    n, k = workload["N"], workload["K"]
    return "" if n % 64 == 0 and k % 128 == 0 else f"N={n}, K={k}: Humming packs N in 64s and K in 128s"


CANDIDATES = (
    Candidate(
        name="humming_w4a16",
        precision="nvfp4-w4a16-rounded",
        run=run,
        needs=Needs(capability=(8, 0), packages=("humming",)),
        prepare=prepare,
        refuses=_refuses,
        config=lambda workload: f"humming-kernels {library_version('humming-kernels')}, its heuristics for M",
    ),
)
