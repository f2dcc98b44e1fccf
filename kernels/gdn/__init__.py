"""Gated DeltaNet: the gated delta rule with one scalar decay per head and token.

Per v head a state S in R^{D x D} (k dimension x v dimension) is carried along the sequence. For token t

    S   <- exp(g_t) * S                     decay, g_t <= 0
    u_t  = beta_t * (v_t - S^T k_t)         the error of the memory's guess, times a learning rate
    S   <- S + k_t u_t^T                    write it back
    o_t  = scale * S^T q_t                  read, scale = D^-0.5

(Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464, equation 10; the chunked form is its section 3.3.)
It is the linear-attention layer of Qwen3-Next, Qwen3.5 and Qwen3.6: three of every four layers.

Axes of a workload
    op           "prefill" (T tokens per sequence), "decode" (one token per sequence, state pool updated in place) or
                 "conv_decode" (a decode step with the short convolution and the gates before it)
    batch        sequences; 1 when `lengths` packs several into one row
    T            tokens per sequence (prefill; the sum when `lengths` is set); 1 for decode
    lengths      "" or ragged sequence lengths such as "7-64-1-90", packed and described by cu_seqlens; there is no
                 padded prefill: a batch of unequal lengths is packed
    Hk, Hv       k heads (q has as many) and v heads; v head h reads k head h // (Hv / Hk), transformers' convention
    D            head dimension of k and of v
    dtype        of q, k, v and, without out_dtype, o: "bf16", "fp16" or "f32"
    out_dtype    prefill only: "f32" when o is not rounded to dtype; absent otherwise
    state_dtype  of the states in memory: "f32" or "bf16"
    qk_l2norm    1 when q and k arrive raw and the kernel normalises them, 0 when they arrive normalised
    regime       how gates and keys are drawn (see cases.py)
    pad          decode only: slots of the batch whose state_rows entry is -1 (a graph captured for a larger batch)
    ids          decode only: "identity" when sequence i has row i of the pool; absent when the rows are permuted
    spare        decode only: rows of the pool beyond one a sequence; absent for none (3 where role is "check")

Model shapes: Qwen3.6-27B has Hk = 16, Hv = 48, D = 128; Qwen3.6-35B-A3B has Hk = 16, Hv = 32, D = 128.
"""

TITLE = "Gated DeltaNet: chunked prefill and recurrent decode"
