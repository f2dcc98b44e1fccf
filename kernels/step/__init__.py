"""One step of a hybrid model: embedding, all layers, the head and greedy sampling, for new tokens of several sequences.

Three of four layers are Gated DeltaNet, every fourth is attention with a gate on its output and rotary positions on a
share of each head; both are followed by a SwiGLU, or by a mixture of experts with one that all tokens share. A kernel's
gain is felt here or nowhere: what stands between the large kernels (norms, gates, residuals, appending to the
caches) is in the time.

Axes of a workload
    op      "decode" (one new token a sequence) or "prefill" (T of them); lengths: "mixed" steps have both
    model   which of model.MODELS; layers: how many of its layers, in its order
    npl     sequences
    T       new tokens of each sequence, or "" and `lengths` such as "1-17-1"
    ctx     tokens that each sequence has in its cache before the step

Tensors: tokens [total] int64, those of one sequence side by side, cu_seqlens [npl + 1] int32 their bounds; seq_lens
[npl] int32, tokens before the step; page_table [npl, pages] int32; state_rows [npl] int32; k_cache, v_cache [attention
layers, pages, Hkv, page, D]; state [GDN layers, rows, Hv, D, D] and conv_state [GDN layers, rows, 3, channels], oldest
first; inv_freq [rotary / 2]; and the weights under the names of transformers' state dict. A weight in NVFP4 is three
tensors, NAME_packed, NAME_scale and NAME_tensor_scale in the form of kernels/nvfp4; experts lie behind each other, with
a tensor scale each, and top_k int64 [] says how many of them a token has.
Outputs: logits [npl, vocab] float32 of each sequence's last token, next_token [npl] int64 and its logit next_logit
[npl] float32; the caches and states, in place.
"""

TITLE = "A model's step: decode and prefill"
