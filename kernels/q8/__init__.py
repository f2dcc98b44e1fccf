"""Q8_0 linear: y[M, N] = x[M, K] @ dequant(w)[N, K]^T, along the three paths that engines choose between.

Weights are Q8_0 as ggml defines it: blocks of 32 values along K, int8 codes and one fp16 scale a block, here in two
planes (34-byte blocks break 16-byte alignment). 8.5 bits a weight. The paths, which have the same structure in ds4,
whose choice between them is the question (rows DS1 and DS2):

    triton_warp_row    reads int8 and multiplies in float32, a few warps per weight row, no tensor core
    triton_expand      turns the weights into bf16 and calls the library's product; torch_cached keeps them expanded
    triton_mmq         quantises the activations to int8 as well and multiplies on the integer tensor cores

Axes: M rows of x, N output features, K input features (a multiple of 32), dtype "bf16" or "fp16" of x and y.
Tensors: x [M, K], w_q int8 [N, K], w_d float16 [N, K / 32], and y [M, N].
"""

TITLE = "Q8_0 linear"
