"""Products that feed each other as one figure: y = W_n .. W_2 W_1 x with NVFP4 weights, each result rounded to bf16.

A product that is launched programmatically starts while the one ahead of it ends, so its time alone compares with no
other. The time of a whole sequence does: its first product waits for what is ahead in every arm, and its end is the end
of its last, so that only overlap within it counts. What a layer has between its products (norms, convolution,
activation) is left out; the step's cards have that form.

Axes: M rows of x, D0, D1, .. (at most ten) the widths from x to y, dtype "bf16".
Tensors: x [M, D0]; of product i from 0: wi_packed u8 [N, K / 2], wi_scale u8 [N, K / 16] and wi_tensor_scale
float32 [1]. Output: y [M, last D].
"""

TITLE = "Dependent products in sequence"
