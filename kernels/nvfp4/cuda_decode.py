"""NVFP4 linear for few tokens in CUDA C++: ring_decode.cu (ring_config.py), compiled for the shape at first use.

It takes the tiles of tiles.py and keeps x in registers, so it refuses more x than a cluster's CTAs can keep;
cuda_gemm.py takes that, or cuda_gemv.py up to 8 tokens.

`cuda_decode` launches as libraries do. `cuda_decode_chained` is the same kernel launched programmatically: its blocks
take the places of the kernel ahead of it in the stream as that one drains and fetch weights, which must not be what
that one writes; x is read and y written when it has ended. It gains only where the kernel ahead says
griddepcontrol.launch_dependents, as these do; in a CUDA graph the edge between two such kernels is a programmatic one.
A figure from such a chain is not comparable with one of launches that wait; that of a sequence of dependent products is
(kernels/chained).
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch

from kernels import cuda
from kernels.common import Candidate, Needs, Tensors, Work, Workload
from kernels.nvfp4 import hopper, tiles
from kernels.nvfp4.hopper import SHARED_BYTES
from kernels.nvfp4.ring_config import (
    FORMS,
    M_MAX,
    RingConfig,
    choose_cluster,
    choose_ring,
    choose_warps,
    in_form,
    instead,
    source,
)


def prepare(inputs: Tensors) -> Tensors:
    """x as it is, the weights as tiles (tiles.py), the tensor scale."""
    return {
        "x": inputs["x"],
        "w": tiles.tile_weights(inputs["w_packed"], inputs["w_scale"], inputs["x"].dtype),
        "w_tensor_scale": inputs["w_tensor_scale"],
    }


def launch(args: Tensors, y: torch.Tensor, config: RingConfig, waits: bool = False) -> None:
    """y[M, N] = x[M, K] @ w^T with `config`, one launch on torch's current stream. ValueError on a mismatch.

    y is [M, N / 2] where `config` is gated.

    waits: for the kernel ahead even where `config` is of the form that is launched programmatically.
    """
    x, w = args["x"], args["w"]
    (m, k), n = x.shape, y.shape[1] * (1 + config.gated)
    k_tiles = -(-k // tiles.COLS)
    hopper.check(x, w, y, tiles.ROWS // (1 + config.gated), k_tiles)
    device = x.device.index or 0
    # The limit of shared memory belongs to the kernel, which other shapes use too: always the most.
    kernel = cuda.load(source(config), config.kernel, device, SHARED_BYTES)
    arguments = (x, w, args["w_tensor_scale"], y, *(cuda.i32(value) for value in (m, n, k, k_tiles)))
    cuda.launch(
        kernel, (config.grid,), config.threads, arguments, config.shared_bytes, programmatic=config.pdl and not waits
    )


@lru_cache(maxsize=1024)
def configured(m: int, n: int, k: int, dtype: str, device: int, form: str = "", gated: bool = False) -> RingConfig:
    """The configuration of a form of FORMS for as many clusters as the device runs at once."""
    config = in_form(m, n, k, dtype, form, hopper.multiprocessors(device), gated)
    if config.cluster <= 2:  # the two multiprocessors of a TPC
        return config
    clusters = hopper.most_clusters(source(config), config, device)
    return in_form(m, n, k, dtype, form, clusters * config.cluster, gated)


def run(args: Tensors, out: Tensors, form: str = "") -> None:
    """y[M, N] = x[M, K] @ w^T in one launch, programmatic in all of FORMS but ""."""
    x, y = args["x"], out["y"]
    element = hopper.ELEMENTS.get(x.dtype, "")
    launch(args, y, configured(x.shape[0], y.shape[1], x.shape[1], element, x.device.index or 0, form))


def _refuses(workload: Workload) -> str:
    m, k = workload["M"], workload["K"]
    if m > M_MAX:
        return f"M={m} > {M_MAX}: the fragments of x of more tokens do not fit in registers; use cuda_gemm"
    if not choose_warps(m, k, choose_cluster(m, k)):
        return f"M={m}, K={k}: the CTAs of a cluster cannot keep that much x in registers; use {instead(m)}"
    return ""


def _config(workload: Workload, form: str = "") -> str:
    m, n, k = (workload[axis] for axis in "MNK")
    return str(in_form(m, n, k, workload["dtype"], form))


def work(workload: Workload, sms: int) -> Work:
    """Row tiles of the busiest cluster, by what a warp does for each: unpacking, and products of 8 tokens.

    A warp multiplies a tile right behind its unpacking. Products of the first eight tokens overlap with the loads of
    weights, those of every further eight add to the time, which grows by equal steps from 8 to 16 to 24 tokens.
    """
    m, n, k = (int(workload[axis]) for axis in "MNK")
    config = choose_ring(m, n, k, workload["dtype"], sms if choose_cluster(m, k) <= 2 else 0)
    row_tiles, columns = -(-n // tiles.ROWS), config.tokens // 8
    of_worker = -(-row_tiles // (config.grid // config.cluster))
    share = config.k_tiles * config.warps * tiles.TILE_BYTES
    of_warp = float(of_worker * config.k_tiles)
    moved = row_tiles * -(-k // tiles.COLS) * tiles.TILE_BYTES + 2.0 * m * (k + n)
    x_bytes = config.k_tiles * config.warps * tiles.COLS * config.tokens * 2
    at_once = {"bytes": moved, "sm_bytes": float(of_worker * share), "unpack": 40.0 * of_warp}
    in_turn = {"launches": 1.0, "x": x_bytes / 32, "products": 20.0 * of_warp * (columns - 1)}
    return Work(at_once, {**in_turn, "clusters": 1000.0 * (config.cluster - 1)})


CUDA_SOURCES = tuple(
    source(choose_ring(m, n, k, dtype))
    for m, n, k, dtype in (
        (8, 17408, 5120, "bf16"),
        (8, 5120, 6144, "bf16"),
        (8, 4096, 2048, "bf16"),
        (8, 5120, 17408, "bf16"),
        (16, 5120, 17408, "bf16"),
        (16, 17408, 5120, "bf16"),
        (16, 5120, 6144, "bf16"),
        (16, 4096, 2048, "bf16"),
        (24, 17408, 5120, "bf16"),
        (24, 5120, 6144, "bf16"),
        (32, 4096, 2048, "bf16"),
        (8, 17408, 5120, "fp16"),
    )
)

CANDIDATES = tuple(
    Candidate(
        name=name,
        precision="nvfp4-w4a16",
        run=partial(run, form=form),
        needs=Needs(capability=(9, 0), packages=("cupy",)),
        prepare=prepare,
        refuses=_refuses,
        config=partial(_config, form=form),
        work=work,
        no_route="timed in a chain of its own kind only; kernels/chained compares" if form else "",
    )
    for name, form in ((form or "cuda_decode", form) for form in FORMS)
)
