"""Mixture of experts in FP4: the feed-forward of a token is that of the few experts which its router picks.

    p        = softmax(logits) over the top_k largest of the token's E router logits
    h_e      = SiLU(x Wg_e^T) * (x Wu_e^T)            for each of them, Wg_e and Wu_e [F, H]
    y        = sum_e p_e h_e Wd_e^T  (+ sigmoid(x . s) * the shared expert's)                  Wd_e [H, F]

Weights are NVFP4 as in kernels/nvfp4. At few tokens the weights of the experts that are hit bind, at many the products:
256 experts, 8 a token, are all hit from about a hundred tokens on, with a handful of tokens each, so no tile is full.

Axes of a workload
    T        tokens
    experts  E; top_k of them for a token
    H, F     width of the model and of an expert
    shared   width of the shared expert, 0 without one
    routing  how logits are drawn: "uniform"; "zipf", expert e as likely as 1 / (e + 1); "one", every token has expert 0
    dtype    of x and y: "bf16" or "fp16"
    weights  "mxfp4", or not there: values of MXFP4, whose scales NVFP4 has too, so that libraries of either format
             multiply the same numbers

Tensors: x [T, H]; logits [T, E] float32; gate_up_packed uint8 [E, 2 F, H / 2] (rows of Wg, then of Wu), gate_up_scale
uint8 [E, 2 F, H / 16], gate_up_tensor_scale float32 [E]; down_packed [E, H, F / 2], down_scale, down_tensor_scale; with
a shared expert the same six with "shared_" before the name and E = 1, and shared_gate [H], the s above; top_k int64 [].
Output: y [T, H].
"""

TITLE = "Mixture of experts in FP4"
