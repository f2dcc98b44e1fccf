"""The shapes of a hybrid model's weights, by the names that transformers' state dict gives them."""

from __future__ import annotations

from dataclasses import dataclass, replace

CONV_WIDTH = 4
EPS = 1e-6


@dataclass(frozen=True)
class Model:
    """A hybrid: Gated DeltaNet but for every fourth layer, which is attention; its feed-forward dense, or a mixture.

    ffn: width of a dense feed-forward, of a mixture's shared expert. experts: of a mixture, 0 where it is dense; top_k
    of them for a token, each of width expert_ffn.
    rotary: how many elements of a head turn with the position; theta: the base of their frequencies.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    gdn_k_heads: int
    gdn_v_heads: int
    gdn_dim: int
    vocab: int
    rotary: int
    theta: float = 1e7
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """ "gdn" or "attention" for each layer."""
        return tuple("attention" if i % 4 == 3 else "gdn" for i in range(self.layers))

    @property
    def channels(self) -> int:
        """Of the short convolution: q, k and v side by side."""
        return (2 * self.gdn_k_heads + self.gdn_v_heads) * self.gdn_dim

    def cut(self, layers: int) -> Model:
        """The same with its first layers only, 0: all. Raises ValueError for more than there are."""
        if not 0 <= layers <= self.layers:
            raise ValueError(f"{layers} layers: the model has {self.layers}; ask for so many or fewer")
        layers = layers or self.layers
        return replace(self, layers=layers)

    def linears(self) -> dict[str, tuple[int, int]]:
        """Products whose weights are quantised where the model is: name without ".weight" -> (N, K)."""
        found: dict[str, tuple[int, int]] = {}
        for i, kind in enumerate(self.kinds):
            at = f"model.layers.{i}."
            value = self.gdn_v_heads * self.gdn_dim
            if kind == "gdn":
                found |= {
                    f"{at}linear_attn.in_proj_qkv": (self.channels, self.hidden),
                    f"{at}linear_attn.in_proj_z": (value, self.hidden),
                    f"{at}linear_attn.out_proj": (self.hidden, value),
                }
            else:
                found |= {
                    f"{at}self_attn.q_proj": (2 * self.heads * self.head_dim, self.hidden),
                    f"{at}self_attn.k_proj": (self.kv_heads * self.head_dim, self.hidden),
                    f"{at}self_attn.v_proj": (self.kv_heads * self.head_dim, self.hidden),
                    f"{at}self_attn.o_proj": (self.hidden, self.heads * self.head_dim),
                }
            mlp = f"{at}mlp.shared_expert." if self.experts else f"{at}mlp."
            found |= {
                f"{mlp}gate_proj": (self.ffn, self.hidden),
                f"{mlp}up_proj": (self.ffn, self.hidden),
                f"{mlp}down_proj": (self.hidden, self.ffn),
            }
        return found

    def stacks(self) -> dict[str, tuple[int, int, int]]:
        """The experts' products, quantised with the others: name -> (experts, N, K). A dense model has none."""
        found: dict[str, tuple[int, int, int]] = {}
        for i in range(self.layers if self.experts else 0):
            at = f"model.layers.{i}.mlp.experts."
            found[f"{at}gate_up_proj"] = (self.experts, 2 * self.expert_ffn, self.hidden)
            found[f"{at}down_proj"] = (self.experts, self.hidden, self.expert_ffn)
        return found

    def others(self) -> dict[str, tuple[int, ...]]:
        """What is never quantised: name -> shape."""
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (self.vocab, self.hidden),
        }
        for i, kind in enumerate(self.kinds):
            at = f"model.layers.{i}."
            found |= {f"{at}{name}_layernorm.weight": (self.hidden,) for name in ("input", "post_attention")}
            if self.experts:
                found |= {f"{at}mlp.gate.weight": (self.experts, self.hidden)}
                found |= {f"{at}mlp.shared_expert_gate.weight": (1, self.hidden)}
            if kind == "gdn":
                found |= {
                    f"{at}linear_attn.in_proj_a.weight": (self.gdn_v_heads, self.hidden),
                    f"{at}linear_attn.in_proj_b.weight": (self.gdn_v_heads, self.hidden),
                    f"{at}linear_attn.conv1d.weight": (self.channels, 1, CONV_WIDTH),
                    f"{at}linear_attn.A_log": (self.gdn_v_heads,),
                    f"{at}linear_attn.dt_bias": (self.gdn_v_heads,),
                    f"{at}linear_attn.norm.weight": (self.gdn_dim,),
                }
            else:
                found |= {f"{at}self_attn.{name}_norm.weight": (self.head_dim,) for name in ("q", "k")}
        return found


# q36-27b and q36-35b-a3b: data/models.toml. A quarter of a head turns, as in transformers' configuration of Qwen3.5.
# The others are for checks: three v heads a k head as in the 27B, and sizes that are no multiple of any tile.
MODELS = {
    "q36-27b": Model(64, 5120, 17408, 24, 4, 256, 16, 48, 128, 248320, rotary=64),
    "q36-35b-a3b": Model(
        40, 2048, 512, 16, 2, 256, 16, 32, 128, 248320, rotary=64, experts=256, top_k=8, expert_ffn=512
    ),
    "small": Model(8, 128, 208, 6, 1, 64, 1, 3, 64, 251, rotary=16),
    "odd": Model(4, 80, 112, 4, 2, 32, 2, 4, 16, 97, rotary=8),
    "small-moe": Model(4, 128, 64, 6, 1, 64, 1, 3, 64, 251, rotary=16, experts=16, top_k=4, expert_ffn=64),
    "odd-moe": Model(4, 80, 32, 4, 2, 32, 2, 4, 16, 97, rotary=8, experts=9, top_k=2, expert_ffn=48),
}
