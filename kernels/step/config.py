"""What a step may do in two ways, as one frozen configuration, and the memory that it takes.

A card compares two configurations, each a candidate of the family under a name of its own (NAMED). What lies in memory
between steps, in which format the states and the caches are, is the workload's (`state_dtype`, `cache`), since the
reference must see the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from kernels.common import Workload
from kernels.step.cases import bytes_of, model_of, new_tokens

VALUES = {
    "products": ("w4a16", "w4a8"),
    "launch": ("waiting", "chained"),
    "ahead": ("none", "state"),
    "recurrence": ("fused", "apart"),
    "state": ("by_id", "gathered", "copied"),
    "scan": ("routed", "fused", "split"),
    "convolution": ("library", "fused"),
    "stream": ("bf16", "f32"),
    "router": ("library", "gemv"),
    "norms": ("alone", "in_gemv"),
    "ends": ("library", "fused"),
    "packing": ("none", "alpha_beta", "alpha_beta_gemv", "all", "all_gemv"),
}
# Of the words for packing: qkv and z in one product; alpha and beta in kernels of ours.
WIDE, GEMV = ("all", "all_gemv"), ("alpha_beta_gemv", "all_gemv")
W4A8_FROM = 17  # tokens, the fewest that the kernel of e4m3 products takes; with fewer they are as with w4a16
SKINNY_TOKENS = 128  # the most of our kernels for alpha and beta, routers and the LM head
NORMED_TOKENS = 8  # the most of the vector kernel, which may norm too
RING_TOKENS = 8  # in a chain so many take cuda_decode, whatever the shape; more take the routed kernel's form
CHAINED_TOKENS = 96  # the most that take the chain: it gains at 32 and not at 128, and between it is not measured


@dataclass(frozen=True)
class Config:
    """The levers. Raises ValueError, in one line, for a word that is none and for two that exclude each other.

    products:   activations of the NVFP4 products in 16 bits, or rounded to e4m3 from W4A8_FROM tokens on (LP16).
    launch:     a kernel waits for the one ahead, or is launched programmatically: it takes its place meanwhile, and a
                product fetches weights (products, small kernels and the recurrence).
    ahead:      what a chained recurrence asks L2 for before it waits: nothing, or its states.
    chained_attention: attention is launched programmatically too, and loads old tokens before it waits.
    recurrence: convolution, gates and delta rule of a decode step in one launch, or in three.
    state:      the recurrent state read and written at its row; gathered first and written there (LP10); gathered,
                updated in scratch and copied back (LP9).
    scan:       of a prompt: the routed kernel, one that keeps its state on chip, or six through memory (LP17).
    convolution: of a prompt, the library's with what goes in and out copied and the gates a launch a line, or three
                launches of ours (fused_prompt.py).
    per_sequence: the GDN output projection is a product for each sequence (LP11).
    stream:     what the residual stream is stored in (LP14).
    packing:    the four products into a GDN layer: one each; alpha and beta in one; these in one or two launches of
                ours, for up to SKINNY_TOKENS tokens; beside alpha and beta qkv and z in one, which is as far as two
                formats of weights can be packed (IM5); that with ours.
    router:     of a mixture, the library's product and a conversion, or ours, as of alpha and beta, in float32.
    norms:      the residual stream's alone; or, where a vector product is behind one, for up to NORMED_TOKENS tokens,
                in its launch.
    ends:       of a decode step, embedding and rotary angles at its start, LM head, conversion to float32 and greedy
                token (argmax) at its end: the library's launches, or three of ours, for up to SKINNY_TOKENS tokens
                (fused_ends.py).
    qkv:        q, its gate, k and v of attention in one product.
    gate_up:    gate and up in one product. gated: SiLU and their product in that launch too.
    all_logits: the head is computed for every new token, and the last ones are kept (LB10).
    scratch:    what products add up in is allocated and filled with every call (IM4).
    replayed:   the step captures itself behind its first call and is one launch from then on (LP7, IM3); for a timer
                that does not capture.
    waits:      a replayed step runs on a stream of its own, which waits for the caller's and is waited for (DS8).
    """

    products: str = "w4a16"
    launch: str = "waiting"
    ahead: str = "none"
    chained_attention: bool = False
    recurrence: str = "fused"
    state: str = "by_id"
    scan: str = "routed"
    convolution: str = "library"
    per_sequence: bool = False
    stream: str = "bf16"
    packing: str = "none"
    router: str = "library"
    norms: str = "alone"
    ends: str = "library"
    qkv: bool = False
    gate_up: bool = False
    gated: bool = False
    all_logits: bool = False
    scratch: bool = False
    replayed: bool = False
    waits: bool = False

    def __post_init__(self) -> None:
        for name, known in VALUES.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(map(str, known))}; use one of them")
        if self.state != "by_id" and self.recurrence == "fused":
            raise ValueError(
                f'state="{self.state}" with recurrence="fused": one launch reads states by id; use "apart"'
            )
        if (self.ahead != "none" or self.chained_attention) and self.launch != "chained":
            raise ValueError('ahead or chained_attention without launch="chained": chain the others, too')
        if self.launch == "chained" and self.products != "w4a16":
            raise ValueError('launch="chained" with products="w4a8": only the w4a16 kernel has that form; take one')
        if self.gated and (self.gate_up or self.scratch or self.products != "w4a16"):
            raise ValueError("gated=True beside gate_up, scratch or w4a8: one w4a16 launch has both products; take one")
        if self.norms == "in_gemv" and self.packing not in GEMV:
            raise ValueError(f'norms="in_gemv" with packing="{self.packing}": of products in the vector kernel alone')
        if self.ends == "fused" and self.all_logits:
            raise ValueError('ends="fused" with all_logits: its head takes the last token of a sequence; take one')
        if self.waits and not self.replayed:
            raise ValueError("waits=True with replayed=False: they are around a replay; capture it too")
        if self.scratch and self.launch == "chained":
            raise ValueError('scratch=True with launch="chained": what fills it stands in the chain; take one')

    def form(self, tokens: int) -> str:
        """The form of a gated product of so many tokens, and of every one of few: "" where a launch waits."""
        return (
            ("cuda_decode" if tokens <= RING_TOKENS else "cuda_gemm") + "_chained" if self.launch == "chained" else ""
        )

    @property
    def precision(self) -> str:
        """Of the candidate."""
        return "nvfp4-w4a8" if self.products == "w4a8" else "nvfp4-w4a16"

    def __str__(self) -> str:
        """The levers that are not as in `served`."""
        own = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ", ".join(own) or "served"

    def refuses(self, workload: Workload, room: float | None = None) -> str:
        """ "" or why a step of this configuration does not take a workload. room: bytes of the GPU, None: any."""
        new, needed = new_tokens(workload), sum(memory(workload, self).values())
        if model_of(workload).experts and (self.gate_up or self.gated or self.products == "w4a8"):
            return f"{self}: a lever of dense layers, {workload['model']} has experts"
        if self.norms == "in_gemv" and model_of(workload).experts and self.router != "gemv":
            return f"{self}: of a mixture, together with router=gemv alone"
        if self.router == "gemv" and not model_of(workload).experts:
            return f"{self}: a lever of mixtures, {workload['model']} is dense"
        if room is not None and needed > room:
            where = f"{len(new)} sequences of {workload['ctx'] + max(new)} tokens, {workload['layers']} layers"
            return f"{where} take {needed / 1e9:.1f} GB, {room / 1e9:.1f} are there: fewer of either, or of layers"
        if (self.packing in GEMV or self.router == "gemv" or self.ends == "fused") and sum(new) > SKINNY_TOKENS:
            return f"{self}: {sum(new)} tokens, {SKINNY_TOKENS} are the most of our skinny GEMMs and LM head"
        if self.norms == "in_gemv" and sum(new) > NORMED_TOKENS:
            return f"{self}: {sum(new)} tokens, {NORMED_TOKENS} are the most of a vector product that norms"
        if max(new) == 1 and (self.scan != "routed" or self.convolution == "fused"):
            return f"{self}: a lever of prompts, this step decodes"
        if max(new) > 1 and (self.recurrence == "apart" or self.per_sequence or self.ends == "fused"):
            return f"{self}: a lever of decode steps, this one has {max(new)} new tokens of a sequence"
        return ""


USUAL = Config()
PACKED = Config(launch="chained", packing="all_gemv", gated=True)
ENDS = replace(PACKED, ahead="state", chained_attention=True, ends="fused")
MANY = Config(packing="alpha_beta_gemv", gate_up=True, ends="fused")
ROUTER = replace(ENDS, gated=False, router="gemv")  # of a mixture, which has no dense gate and up
MANY_PACKED = replace(MANY, packing="all_gemv", qkv=True)
MANY_GATED = replace(MANY_PACKED, gate_up=False, gated=True)
MANY_CHAINED = replace(MANY_PACKED, launch="chained", chained_attention=True)
MANY_GATED_CHAINED = replace(MANY_CHAINED, gate_up=False, gated=True)
MANY_ROUTER = replace(MANY_PACKED, gate_up=False, router="gemv")
PROMPT = Config(convolution="fused")
PROMPT_GATED = replace(PROMPT, gated=True)
PROMPT_PACKED = replace(PROMPT_GATED, packing="all", qkv=True)
# What measured fastest, of `served_fastest`: by whether the model is a mixture, up to how many tokens of a decode step.
# A mixture's prompts have the dense model's convolution unmeasured.
DECODES = {
    False: (
        (1, replace(ENDS, qkv=True, norms="in_gemv")), (8, replace(ENDS, qkv=True)),
        (CHAINED_TOKENS, MANY_GATED_CHAINED), (SKINNY_TOKENS, MANY_GATED),
    ),
    True: ((8, replace(ROUTER, norms="in_gemv")), (SKINNY_TOKENS, MANY_ROUTER)),
}  # fmt: skip

# One lever against `served`, or against the name that the card's control has.
NAMED = {
    "served_apart": Config(recurrence="apart"),
    "served_gathered": Config(recurrence="apart", state="gathered"),
    "served_copied": Config(recurrence="apart", state="copied"),
    "served_per_sequence": Config(per_sequence=True),
    "served_stream_f32": Config(stream="f32"),
    "served_w4a8": Config(products="w4a8"),
    "served_alpha_beta": Config(packing="alpha_beta"),
    "served_alpha_beta_gemv": Config(packing="alpha_beta_gemv"),
    "served_packed": Config(packing="all"),
    "served_gate_up": Config(gate_up=True),
    "served_all_logits": Config(all_logits=True),
    "served_scratch": Config(scratch=True),
    "served_chained": Config(launch="chained"),
    "served_few": Config(launch="chained", packing="alpha_beta_gemv", gate_up=True),  # what gains at few tokens
    "served_few_gated": Config(launch="chained", packing="alpha_beta_gemv", gated=True),
    "served_few_packed": PACKED,
    "served_few_state": replace(PACKED, ahead="state"),
    "served_few_attention": replace(PACKED, ahead="state", chained_attention=True),
    "served_few_ends": ENDS,
    "served_few_norms": replace(ENDS, norms="in_gemv"),
    "served_few_qkv": replace(ENDS, qkv=True),
    "served_few_replayed": replace(ENDS, replayed=True),
    "served_few_router": ROUTER,
    "served_few_router_norms": replace(ROUTER, norms="in_gemv"),
    "served_replayed": Config(replayed=True),
    "served_replayed_waits": Config(replayed=True, waits=True),
    "served_many": MANY,  # what gains at many sequences
    "served_many_packed": MANY_PACKED,
    "served_many_gated": MANY_GATED,
    "served_many_chained": MANY_CHAINED,
    "served_many_gated_chained": MANY_GATED_CHAINED,
    "served_many_router": MANY_ROUTER,
    "served_many_router_chained": replace(MANY_ROUTER, launch="chained", chained_attention=True),
    "served_fused_scan": Config(scan="fused"),
    "served_split_scan": Config(scan="split"),
    "served_prompt_conv": PROMPT,
    "served_prompt_gated": PROMPT_GATED,
    "served_prompt_packed": PROMPT_PACKED,
    "served_w4a8_conv": Config(products="w4a8", convolution="fused"),
    # The staircase: each has the levers of those before it; the last is `served`.
    "stock": Config(recurrence="apart", state="copied", per_sequence=True),
    "stock_in_place": Config(recurrence="apart", state="gathered", per_sequence=True),
    "stock_by_id": Config(recurrence="apart", per_sequence=True),
    "stock_2d": Config(recurrence="apart"),
}
SCANS = {"routed": "", "fused": "fused_chunk", "split": "split_pipeline"}
STAIRCASE = ("stock", "stock_in_place", "stock_by_id", "stock_2d", "served")


def fastest(lengths: Sequence[int], mixture: bool) -> Config:
    """Of `served_fastest`, for sequences of so many new tokens."""
    if max(lengths) > 1:
        return PROMPT if mixture else PROMPT_PACKED
    return next((config for most, config in DECODES[mixture] if sum(lengths) <= most), USUAL)


def of(name: str, workload: Workload) -> Config:
    """The configuration of a candidate of this family at a workload; KeyError for one that has none."""
    if name == "served_fastest":
        return fastest(new_tokens(workload), model_of(workload).experts > 0)
    return USUAL if name == "served" else NAMED[name]


def memory(workload: Workload, config: Config = USUAL) -> dict[str, float]:
    """Bytes that one arm of a step takes, by what they are for.

    weights, states and caches as inputs; packed, the same weights in the layouts of the kernels, and what is packed
    side by side once more; outputs, states and caches among them, as a bench hands them out; activations.
    """
    model, tokens = model_of(workload), sum(new_tokens(workload))
    sizes = bytes_of(workload)
    rows = tokens if config.all_logits else 0
    kept = sizes["states"] + sizes["caches"]
    scratch = sizes["states"] / max(1, model.kinds.count("gdn")) * (config.state != "by_id")
    wide = 4.0 * max(model.ffn + model.top_k * model.expert_ffn, model.channels, 2 * model.heads * model.head_dim)
    again, most = 0.0, max(new_tokens(workload))
    # On a full cache the library masks, and computes every score of a sequence, twice.
    scores = 4.0 * model.heads * most * (workload["ctx"] + most) * (most > 1 and workload["ctx"] > 0)
    if config.gate_up:
        again += sum(n * k for name, (n, k) in model.linears().items() if name.endswith(("gate_proj", "up_proj")))
    if config.qkv:
        again += sum(n * k for name, (n, k) in model.linears().items() if name.endswith(("q_proj", "k_proj", "v_proj")))
    if config.packing in WIDE:
        again += sum(n * k for name, (n, k) in model.linears().items() if name.endswith(("in_proj_qkv", "in_proj_z")))
    return {
        **sizes,
        "packed": sizes["products"] + again * 0.5625,
        "outputs": kept + 4.0 * model.vocab * len(new_tokens(workload)),
        "activations": tokens * (4 * wide + 8.0 * model.hidden) + 2.0 * model.vocab * rows + scratch + scores,
    }
