"""Workloads of the NVFP4 family, their inputs, their outputs and how far an output may lie from the reference.

Weights are normal with standard deviation K^-1/2, so y is about unit normal at every K, quantised once per call. There
is one reference for every precision: float64 on the NVFP4 weights and the activations as given. So the tolerance of
W4A4 contains what quantising the activations costs by design (that is the accuracy the user gets), and the exactness
of its kernels is checked apart, against its own quantised operands, in tests/kernels/nvfp4/test_nvfp4.py.
"""

from __future__ import annotations

import math

import torch

from kernels.common import Tensors, Tolerance, Workload, poisoned
from kernels.nvfp4 import format as fmt
from kernels.nvfp4 import mxfp4

ACTIVATIONS = ("x",)
IN_PLACE: tuple[str, ...] = ()

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "f32": torch.float32}
NORMAL = "standard normal"
# rms error of NVFP4 on standard normal values with a tensor or row scale, seen on 4 M values (NMSE 0.009).
W4A4_NORMAL = 0.095
# The same of e4m3: NVFP4 weights rounded to it once more, and values with a row scale.
W4A8_NORMAL_WEIGHT, W4A8_NORMAL_X = 0.0212, 0.0265
# The largest relative error of one product of such a weight and such a value, both rounded to nearest.
E4M3_PRODUCT = 22 / 21 * 18 / 17 - 1
WRONG_ELEMENT = 0.95  # rms of y: an element that is off by one rms is wrong, whatever the format
OUTLIER = "normal, heavy-tailed: 2 % of the channels of x are 30 times as large, and so are 2 % of the weights' columns"
POSITIVE = "absolute values of standard normals: x and weights of one sign, so that sums only grow"


def _check(
    m: int, n: int, k: int, dtype: str, inputs: str = NORMAL, n_seqs: int = 0, weights: str = "nvfp4"
) -> Workload:
    axes: dict[str, int | str] = {"M": m, "N": n, "K": k, "dtype": dtype}
    if n_seqs:
        axes["n_seqs"] = n_seqs
    if weights != "nvfp4":
        axes["weights"] = weights
    suffix = ("_outlier" if inputs == OUTLIER else "") + (f"_seqs{n_seqs}" if n_seqs else "")
    suffix += f"_{weights}" if weights != "nvfp4" else ""
    return Workload(f"m{m}_n{n}_k{k}_{dtype}{suffix}", axes, inputs=inputs)


def _measure(
    m: int,
    n: int,
    k: int,
    source: str,
    n_seqs: int = 0,
    dtype: str = "bf16",
    weights: str = "nvfp4",
    inputs: str = NORMAL,
) -> Workload:
    axes: dict[str, int | str] = {"M": m, "N": n, "K": k, "dtype": dtype}
    if n_seqs:
        axes["n_seqs"] = n_seqs
    if weights != "nvfp4":
        axes["weights"] = weights
    unusual = [word for word, usual in ((dtype, "bf16"), (weights, "nvfp4")) if word != usual]
    unusual += ["positive"] if inputs == POSITIVE else []
    return Workload("_".join([f"m{m}_n{n}_k{k}", *unusual]), axes, inputs=inputs, role="measure", source=source)


WORKLOADS = (
    _check(1, 75, 64, "bf16"),
    _check(1, 500, 1040, "fp16"),
    _check(3, 75, 256, "fp16"),
    _check(3, 1, 16, "bf16"),
    _check(8, 128, 1040, "bf16"),
    _check(8, 75, 256, "fp16", OUTLIER),
    _check(16, 75, 256, "bf16", n_seqs=16),
    _check(16, 131, 64, "fp16"),
    _check(32, 131, 1040, "bf16"),
    _check(63, 75, 1040, "bf16"),
    _check(63, 500, 256, "fp16", OUTLIER),
    _check(130, 64, 256, "bf16", OUTLIER),
    _check(20, 75, 256, "f32"),
    _check(16, 75, 256, "bf16", n_seqs=16, weights="mxfp4"),
    _measure(1, 17408, 5120, "q36-27b.ffn_up"),
    _measure(8, 17408, 5120, "q36-27b.ffn_up"),
    _measure(32, 17408, 5120, "q36-27b.ffn_up"),
    _measure(128, 17408, 5120, "q36-27b.ffn_up"),
    _measure(512, 17408, 5120, "q36-27b.ffn_up"),
    _measure(2048, 17408, 5120, "q36-27b.ffn_up"),
    *(_measure(m, 5120, 17408, "q36-27b.ffn_down") for m in (1, 8, 32, 128, 512, 2048)),
    *(_measure(m, 5120, 6144, "q36-27b.ssm_out") for m in (1, 8, 32)),
    _measure(128, 5120, 6144, "q36-27b.ssm_out", n_seqs=128),
    *(_measure(m, 5120, 6144, "q36-27b.ssm_out") for m in (512, 2048)),
    # No layer of data/models.toml: the size of a small projection, 4.7 MB, where launch and reduction weigh most.
    *(_measure(m, 4096, 2048, "") for m in (1, 8, 32, 128, 512, 2048)),
    _measure(1024, 17408, 5120, "q36-27b.ffn_up"),
    # Where the decode kernels end and cuda_gemm begins: points for the router, between those at 8 and at 32 tokens.
    _measure(16, 17408, 5120, "q36-27b.ffn_up"),
    *(_measure(m, 5120, 17408, "q36-27b.ffn_down") for m in (9, 16)),
    _measure(16, 5120, 6144, "q36-27b.ssm_out"),
    _measure(16, 4096, 2048, ""),
    # Between those at 16, which cuda_decode wins at these two shapes, and those at 32, which it refuses there.
    _measure(24, 17408, 5120, "q36-27b.ffn_up"),
    _measure(24, 5120, 6144, "q36-27b.ssm_out"),
    # Past 32 tokens, where a kernel of tiles took over from one that decodes once; two shapes of few blocks.
    *(_measure(m, 17408, 5120, "q36-27b.ffn_up") for m in (33, 64, 96)),
    _measure(100, 2048, 7168, ""),
    _measure(33, 1000, 4112, ""),
    # Activations in float32, for the question where they are cast (controls/triton_levers.py).
    *(_measure(m, 17408, 5120, "q36-27b.ffn_up", dtype="f32") for m in (128, 512, 2048)),
    _measure(128, 5120, 6144, "q36-27b.ssm_out", n_seqs=128, weights="mxfp4"),
    # The worst inputs for sums of few bits (cuda_w4a8.py), which sums of either sign do not show.
    *(_measure(m, 17408, 5120, "q36-27b.ffn_up", inputs=POSITIVE) for m in (128, 512)),
    _measure(512, 5120, 17408, "q36-27b.ffn_down", inputs=POSITIVE),
)


def refuses(workload: Workload, precision: str) -> str:
    """ "" or why no candidate of this precision takes the workload: its weights' format, or the type of x."""
    weights = str(workload.axes.get("weights", "nvfp4"))
    if precision.startswith("mxfp4") != (weights == "mxfp4"):
        return f"weights={weights}: this candidate is {precision}"
    if precision.endswith("-cast") != (workload["dtype"] == "f32"):
        return f"dtype={workload['dtype']}: only {'f32 is' if precision.endswith('-cast') else '16-bit x is'} taken"
    return ""


def inputs(workload: Workload, seed: int = 0, device: torch.device | str = "cpu") -> Tensors:
    """x [M, K] in the workload's dtype, w_packed u8 [N, K / 2], w_scale u8 [N, K / 16], w_tensor_scale f32 [1].

    With the axis weights = "mxfp4": w_scale is e8m0, u8 [N, K / 32], and there is no tensor scale.
    """
    m, n, k = workload["M"], workload["N"], workload["K"]
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(m, k, generator=generator, device=device)
    w = torch.randn(n, k, generator=generator, device=device) * k**-0.5
    if workload.inputs == OUTLIER:
        x *= 1 + 29 * (torch.rand(k, generator=generator, device=device) < 0.02)
        w *= 1 + 29 * (torch.rand(k, generator=generator, device=device) < 0.02)
    if workload.inputs == POSITIVE:
        x, w = x.abs(), w.abs()
    if workload.axes.get("weights") == "mxfp4":
        packed, scale = mxfp4.quantise(w)
        return {"x": x.to(DTYPES[workload["dtype"]]), "w_packed": packed, "w_scale": scale}
    q = fmt.quantise(w)
    return {
        "x": x.to(DTYPES[workload["dtype"]]),
        "w_packed": q.packed,
        "w_scale": q.scale,
        "w_tensor_scale": q.tensor_scale,
    }


def activations(workload: Workload, seed: int, device: torch.device | str) -> Tensors:
    """x alone, of the same distribution."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(workload["M"], workload["K"], generator=generator, device=device)
    if workload.inputs == OUTLIER:
        x *= 1 + 29 * (torch.rand(workload["K"], generator=generator, device=device) < 0.02)
    return {"x": (x.abs() if workload.inputs == POSITIVE else x).to(DTYPES[workload["dtype"]])}


def outputs(workload: Workload, inputs: Tensors) -> Tensors:
    """{"y": [M, N]} in x's dtype, every element NaN."""
    return {"y": poisoned((workload["M"], workload["N"]), DTYPES[workload["dtype"]], inputs["x"].device)}


def tolerance(workload: Workload, precision: str) -> dict[str, Tolerance]:
    """Limits for "y" at `precision`; raises ValueError naming the known precisions otherwise.

    With exact operands only float32 sums are left: a unit of 2^-23 for each 16 products, should a tensor core cut all
    off one way. Rounding to p significand bits (8 for bf16) has an rms of ulp / sqrt(12), between 0.29 and 0.58 of 2^-p
    by where the mantissas lie; the limit is 0.58 plus five deviations of an rms over M * N uniform errors (0.45 /
    sqrt(M * N) each).

    What that rejects: with 16-bit activations x or weights in int8, by blocks of 32 (5.2e-3) or by rows (6e-3 and
    more), where the limits with the rounding of a bf16 y are 1.7e-3, 3.1e-3 with rounded weights and 4e-3 for
    libraries that round on the way; x in e4m3 (2.65e-2); a sum rounded to bf16 on the way (1.2e-3 of y, which its own
    rounding does not hide). With x in e4m3, against 3.6e-2, x of 4 bits (9e-2). With x in e2m1 by blocks of 16, against
    0.10, x in e2m1 by 32 and powers of two (0.117) and integers of 4 bits by rows (0.13 and more), where there are
    more than a few hundred outputs. Sums of one sign (POSITIVE) average the operands' errors away, sqrt(K) / 1.6 times,
    so they hold the sums alone, and the same shapes with normal values hold the operands.

    W4A8 with outlier channels: where one of x meets one of w (at K = 256 in one draw out of ten), or where either are
    few, y is a single product, y_mn = x_m w_n. Its errors do not average, and its largest values lie far out: over
    their rms, the largest of M normals times the largest of N, at most sqrt(2 ln 2M) and sqrt(2 ln 2N) in the mean
    (11.6 at 63 by 500). Several products only bring errors and values closer to those of a sum, so this is the bound at
    every K and number of outliers. A product errs by up to E4M3_PRODUCT: half a unit of e4m3 is at most 1 / 17 of x
    (1.0625 against 1), and of a code times its block scale 1 / 21 (1.5 times 1.75 is 21 / 8, the worst of the eight
    mantissas). Then y is rounded. That is 1.2 to 1.3 rms, but only with the largest x and the largest w both at their
    worst mantissas; draws on the CPU reach about half of it (tests/kernels/nvfp4/test_nvfp4_w4a8.py). So the limit
    stops short of one rms, as far as a wrong element is off.
    """
    m, n, k = workload["M"], workload["N"], workload["K"]
    rms = min(1.0, 0.58 * (1 + 2.25 / (m * n) ** 0.5))
    sums = (k / 16 + 16) * 2.0**-23
    if precision == "nvfp4-w4a16-cast":
        # x in float32 rounded to bf16 (independent errors of an element): an element's errors average over K as the
        # products do, so y has the relative error of x; six deviations for the worst of many.
        return {"y": Tolerance(rms * 2.0**-8, 6 * 0.58 * 2.0**-8, "activations rounded to bf16, exact weights")}
    if precision in ("nvfp4-w4a16", "mxfp4-w4a16"):
        return {"y": Tolerance(sums, 16 * sums, "exact operands, float32 sums")}
    if precision == "nvfp4-w4a16-rounded":
        # A library that rounds the dequantised weight, or partial sums, to 16 bits on the way; how often is its affair,
        # so this is the product's bar of 4e-3, y's own rounding included, and not a derivation.
        return {"y": Tolerance(3.6e-3, 6 * 3.6e-3, "the bar of 4e-3 for 16-bit activations; six rms for the worst")}
    if precision == "bf16":
        # Weights rounded to 8 bits put an independent relative error on each product, so the same on the sum; six
        # deviations of it for the worst element. A code times its scale has few mantissas, eighty values of them in a
        # tensor of millions, and the tensor's scale puts them all well or all badly: over a binade of scales their rms
        # is nothing to 0.64 of 2^-8, and small tensors scatter more. Among outliers a few columns' weights make y.
        weight = 2.0**-8 * (1.25 if workload.inputs == OUTLIER else 1.11) * (1 + 20 / (n * k) ** 0.5)
        return {"y": Tolerance(rms * weight + sums, 6 * 0.58 * weight, "weights rounded to bf16 (independent errors)")}
    if precision == "nvfp4-w4a4":
        # Errors of different k are independent, so y has the relative error of x: the quantiser's own, W4A4_NORMAL. In
        # the outlier inputs an outlier channel flushes the 15 beside it: 1 - 0.98^15 = 26 % of x is lost, and meets
        # weights of mean square 1 + 0.02 * 900 = 19 in a y of mean square 1 + 2 * 18: sqrt(0.26 * 19 / 37) = 0.37.
        # A handful of outputs scatters about the mean: three deviations of an rms over M * N values. Seven for the
        # worst.
        mean = 0.37 if workload.inputs == OUTLIER else W4A4_NORMAL
        limit = 1.06 * mean * (1 + 3 / (2 * m * n) ** 0.5)
        return {"y": Tolerance(limit, 7 * limit, "activations rounded to e2m1 in blocks of 16: their own rms error")}
    if precision in ("nvfp4-w4a8", "nvfp4-w4a8-fast") and workload.inputs == POSITIVE:
        # Errors of products average over K: of half normals, sqrt(E[p^2]) / E[p] = pi / 2. The sums' errors do not: a
        # step of the fp8 tensor cores adds 32 products, each cut off 13 bits below the largest number among them and
        # the sum so far. That is half a unit each, 32 * 2^-14 of the sum in the mean, and over s steps in which the sum
        # grows evenly s / 2 times that: s * 2^-10. s is 16 between additions to float32 sums; of the fast arm 32 in
        # tiles of 128 tokens, which M <= 128 gets at most, else all of K. A quarter more for the worst element: all
        # lose alike.
        longest = 32 if m <= 128 else k / 32
        steps = 16 if precision == "nvfp4-w4a8" else longest
        random = 1.05 * math.hypot(W4A8_NORMAL_WEIGHT, W4A8_NORMAL_X) * math.pi / 2 / k**0.5
        why = "sums of one sign: what the tensor cores' additions cut off"
        return {"y": Tolerance(random + steps * 2.0**-10, 8 * random + 1.25 * steps * 2.0**-10, why)}
    if precision in ("nvfp4-w4a8", "nvfp4-w4a8-fast"):
        # Independent errors of each product, so the same on y: code times block scale rounded to e4m3 (only 1.5, 3 and
        # 6 times a scale are inexact, by 2.67 % rms over its eight mantissas: 2.1 % of normal weights, while outliers
        # put nearly all energy into 6s), x rounded to e4m3 (2.45 % of log-uniform values, 2.65 % of normal ones). 5 %
        # for the mean mantissa of these weights, and three deviations of an rms over M * N values. Seven for the worst:
        # errors are largest where x and y are. With outliers: a single product, see above.
        weight = 0.028 if workload.inputs == OUTLIER else W4A8_NORMAL_WEIGHT
        mean = math.hypot(weight, W4A8_NORMAL_X)
        limit = 1.05 * mean * (1 + 3 / (2 * m * n) ** 0.5)
        worst = 7 * limit
        if workload.inputs == OUTLIER:
            largest = 2 * (math.log(2 * m) * math.log(2 * n)) ** 0.5
            worst = max(worst, min(E4M3_PRODUCT * largest, WRONG_ELEMENT))
        return {"y": Tolerance(limit, worst, "weights and activations rounded to e4m3: their own rms errors")}
    nvfp4 = ("w4a16", "w4a16-cast", "w4a16-rounded", "w4a4", "w4a8", "w4a8-fast")
    known = ["bf16", "mxfp4-w4a16", *(f"nvfp4-{x}" for x in nvfp4)]
    raise ValueError(f"precision={precision!r} is not one of {known}; use one of them")
