"""The reference against transformers' Qwen3.5, dense and mixture, with the same weights: prefill, decode and mixed.

transformers computes its norms and rotations in float32, so the two agree to about 1e-6. Skipped where it is not
installed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.common import Tensors
from kernels.step import cases
from kernels.step.model import MODELS, Model
from kernels.step.reference import reference


def theirs(model: Model, weights: Tensors) -> Any:
    from transformers.models import qwen3_5, qwen3_5_moe

    widths = {"intermediate_size": model.ffn}
    if model.experts:
        widths = {
            "num_experts": model.experts, "num_experts_per_tok": model.top_k,
            "moe_intermediate_size": model.expert_ffn, "shared_expert_intermediate_size": model.ffn,
        }  # fmt: skip
    configured = qwen3_5_moe.Qwen3_5MoeTextConfig if model.experts else qwen3_5.Qwen3_5TextConfig
    config = configured(
        vocab_size=model.vocab, hidden_size=model.hidden, num_hidden_layers=model.layers, **widths,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, head_dim=model.head_dim,
        linear_conv_kernel_dim=4, linear_key_head_dim=model.gdn_dim, linear_value_head_dim=model.gdn_dim,
        linear_num_key_heads=model.gdn_k_heads, linear_num_value_heads=model.gdn_v_heads,
        rope_parameters={
            "rope_type": "default", "rope_theta": model.theta,
            "partial_rotary_factor": model.rotary / model.head_dim,
        },
    )  # fmt: skip
    causal = qwen3_5_moe.Qwen3_5MoeForCausalLM if model.experts else qwen3_5.Qwen3_5ForCausalLM
    made = causal(config).double().eval()
    made.config._experts_implementation = "eager"  # the grouped product takes no float64
    ours = "inv_freq", "top_k"
    made.load_state_dict({name: tensor.double() for name, tensor in weights.items() if name not in ours})
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small", "odd", "small-moe", "odd-moe"])
def test_prefill_decode_and_mixed_steps_are_transformers(name: str) -> None:
    pytest.importorskip("transformers")  # here: half a second, which every process that collects would spend
    model = MODELS[name]
    weights = cases.weights(model, 1, "cpu", quantised=False)
    made = theirs(model, weights)
    drawn = torch.Generator().manual_seed(2)
    lengths = (7, 1, 19)
    text = [torch.randint(model.vocab, (40,), generator=drawn) for _ in lengths]
    caches: list[Any] = [None] * len(lengths)
    state = cases.empty(model, len(lengths), 64, "cpu", torch.float64)
    done = [0] * len(lengths)
    for new in (lengths, (1, 1, 1), (5, 1, 2), (1, 1, 1)):
        wanted = []
        for i, count in enumerate(new):
            with torch.no_grad():
                out = made(
                    input_ids=text[i][None, done[i] : done[i] + count], past_key_values=caches[i], use_cache=True
                )
            caches[i] = out.past_key_values
            wanted.append(out.logits[0, -1].double())
        tokens = torch.cat([text[i][done[i] : done[i] + count] for i, count in enumerate(new)])
        bounds = torch.tensor([0, *new]).cumsum(0).int()
        got = reference(
            weights | state | {"tokens": tokens, "cu_seqlens": bounds, "seq_lens": torch.tensor(done).int()}
        )
        state |= {key: got[key] for key in ("k_cache", "v_cache", "state", "conv_state")}
        done = [a + b for a, b in zip(done, new, strict=True)]
        assert torch.allclose(got["logits"], torch.stack(wanted), rtol=0, atol=2e-5 * float(got["logits"].std()))
        assert torch.equal(got["next_token"], got["logits"].argmax(-1))
