"""Device-side helpers shared by the chunked kernels: products in a chosen precision, and the triangular inverse.

Products. `matmul` rounds its operands to a named format and accumulates in float32:
    "bf16"    8 mantissa bits; twice the rate of tf32, half its shared memory; the fast mode
    "fp16"    11 mantissa bits at the same rate as bf16; enough range because keys and gates are bounded
    "tf32"    11 mantissa bits over float32's range, at half the rate
    "tf32x3"  three tf32 products, about float32
In Triton's interpreter operands are rounded to the same format and then widened to float32, because `tl.dot` on
bfloat16 returns garbage there; and `as_format` rounds, because the interpreter truncates float32 to bfloat16 where the
GPU rounds to nearest even. tf32 operands are rounded here, on both. So the errors seen on a CPU are those to expect of
the GPU.

The inverse of I + A, A strictly lower triangular [C, C]. Diagonal blocks of 16 x 16 are inverted by forward
substitution in float32, all blocks at once; pairs of blocks are then merged, 16 -> 32 -> 64, by
    (D + L)^-1 = D^-1 - D^-1 L D^-1,
exact because L, the block below the diagonal of each pair, satisfies (D^-1 L)^2 = 0. The merges are full C x C
products with masked operands: a tile that lives in registers cannot be cut into blocks, and on matrix units a masked
product costs less than leaving the registers. Given up: the repeated-squaring (Neumann) inverse, (I - A)(I + A^2)...:
its powers grow binomially and cancel when keys are similar, which float32 does not survive at C = 64.
"""

from __future__ import annotations

import triton
import triton.language as tl

L2_EPS = tl.constexpr(1e-6)  # under the root of the key and query norms, as transformers' l2norm


@triton.jit
def as_format(x, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """x converted to TYPE, to nearest even also where Triton's interpreter would truncate."""
    if INTERPRETED and TYPE == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(TYPE)


@triton.jit
def as_tf32(x):
    """x as float32 rounded to tf32's 10 stored mantissa bits, to nearest. 16-bit floats are exact already.

    Matrix units drop the low 13 bits of an operand: a bias that made errors clearly larger in this recurrence.
    """
    if x.dtype == tl.float32:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def as_operand(x, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """x rounded to the format in which `matmul` takes it; doing so early halves the registers of a 16-bit operand."""
    if PRECISION == "bf16":
        return as_format(x, tl.bfloat16, INTERPRETED)
    elif PRECISION == "fp16":
        return x.to(tl.float16)
    elif PRECISION == "tf32":
        return as_tf32(x)
    else:
        return x.to(tl.float32)


@triton.jit
def matmul_add(a, b, acc, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """acc + a @ b in float32, a [M, K] and b [K, N] of any float type rounded to PRECISION first."""
    a = as_operand(a, PRECISION, INTERPRETED)
    b = as_operand(b, PRECISION, INTERPRETED)
    if PRECISION == "bf16" or PRECISION == "fp16":
        if INTERPRETED:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        return tl.dot(a, b, acc=acc)
    else:
        return tl.dot(a, b, acc=acc, input_precision=PRECISION)


@triton.jit
def matmul(a, b, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """a @ b in float32, operands rounded to PRECISION."""
    return matmul_add(a, b, tl.zeros((a.shape[0], b.shape[1]), tl.float32), PRECISION, INTERPRETED)


@triton.jit
def inverse_norm(x, APPLY: tl.constexpr):
    """1 / sqrt(sum(x^2) + eps) per row of x [C, D] when APPLY, else ones: kept apart so that x stays exact."""
    if APPLY:
        x32 = x.to(tl.float32)
        return 1.0 / tl.sqrt(tl.sum(x32 * x32, axis=1) + L2_EPS)
    else:
        return tl.full((x.shape[0],), 1.0, tl.float32)


@triton.jit
def pair_decay(log_decay, C: tl.constexpr):
    """exp(G_i - G_j) for i >= j and 0 above, G [C] the running sum of log decays within the chunk.

    The difference is masked before exp: above the diagonal it is positive and may overflow, and inf * 0 is NaN.
    """
    row = tl.arange(0, C)
    causal = row[:, None] >= row[None, :]
    return tl.exp(tl.where(causal, log_decay[:, None] - log_decay[None, :], float("-inf")))


@triton.jit
def substitute_16(a):
    """(I + a)^-1 for a batch of strictly lower triangular 16 x 16 blocks, a [blocks, 16, 16] float32.

    Row i of the inverse is e_i - sum_{j < i} a_ij row_j: fifteen steps, each reading the rows already final.
    """
    index = tl.arange(0, 16)
    row = index[None, :, None]
    x = tl.where(row == index[None, None, :], 1.0, 0.0) + tl.zeros_like(a)
    for i in range(1, 16):
        coefficients = tl.sum(tl.where(row == i, a, 0.0), axis=1)  # a_i., [blocks, 16]
        known = tl.sum(coefficients[:, :, None] * x, axis=1)
        x = tl.where(row == i, x - known[:, None, :], x)
    return x


@triton.jit
def unit_lower_inverse(a, C: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """(I + a)^-1 for a strictly lower triangular a [C, C] float32, C in 16, 32, 64; merges run in PRECISION."""
    BLOCKS: tl.constexpr = C // 16
    block = tl.arange(0, BLOCKS)
    same = block[:, None, None, None] == block[None, None, :, None]  # [BLOCKS, 1, BLOCKS, 1]
    diagonal = tl.sum(tl.where(same, tl.reshape(a, (BLOCKS, 16, BLOCKS, 16)), 0.0), axis=2)
    x = tl.reshape(tl.where(same, substitute_16(diagonal)[:, :, None, :], 0.0), (C, C))
    row = tl.arange(0, C)[:, None]
    col = tl.arange(0, C)[None, :]
    if C >= 32:
        below = tl.where((row // 32 == col // 32) & (row // 16 != col // 16), a, 0.0)
        x -= matmul(x, matmul(below, x, PRECISION, INTERPRETED), PRECISION, INTERPRETED)
    if C >= 64:
        below = tl.where(row // 32 != col // 32, a, 0.0)
        x -= matmul(x, matmul(below, x, PRECISION, INTERPRETED), PRECISION, INTERPRETED)
    return x
