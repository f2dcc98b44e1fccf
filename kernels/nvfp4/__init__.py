"""NVFP4 linear: y[M, N] = x[M, K] @ dequant(w)[N, K]^T.

Weights are stored in NVFP4: e2m1 values, two per byte with the even k in the low nibble; one unsigned e4m3 scale
(ue4m3, kept as e4m3fn bytes that are never negative) per 16 values along K; one float32 scale for the whole tensor.
That is 4.5 bits per weight, so at few rows the kernel is a memory read and at many rows a tensor-core product whose
second job is to turn nibbles into operands fast enough. The family holds both regimes, the choice between them
(`route.py`, with the dispatch defect it guards against) and a bf16 control.

Axes: M rows of x (tokens, or sequences at decode), N output features, K input features (a multiple of 16),
dtype "bf16" or "fp16" of x and y, and n_seqs (optional) when the M rows are that many sequences of one token, which
is the 3-D operand [K, 1, n_seqs] of the routing question.

Tensors: x [M, K], w_packed uint8 [N, K / 2], w_scale uint8 [N, K / 16], w_tensor_scale float32 [1], and y [M, N].
"""

TITLE = "NVFP4 linear"
