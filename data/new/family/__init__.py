"""Row scale: y[M, N] = x[M, N] * w[N]. A first family to put your own kernel in the place of: rename what is here.

Axes: M rows, N columns, dtype "bf16" or "f32" of x, w and y. Tensors: x [M, N], w [N], y [M, N].
"""

TITLE = "Row scale (newfamily)"
