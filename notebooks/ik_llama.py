# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # ik_llama: recurrent state that bleeds between sequences
#
# A hybrid model keeps a recurrent state per sequence. In ik_llama.cpp the step of several sequences was a loop of
# subgraphs over one pool, and the graph allocator gave live scratch of one sequence to the next. The repair replaces
# the loop by one gather, one scan and one scatter over all tokens. Is it right, and what does it cost when only one
# sequence runs?
#
# **For a server of your own:** `lab crossbleed` asks the same of any endpoint; `lab judge --rows` judges two sweeps.

# %%
import pandas as pd

from lab import draw, judgements, phase, picture, show, value
from lab.card import phases, recorded, sweeps

# %% [markdown]
# ## Cross-bleed
#
# Each concurrent request is given a code word of its own and must return that word and no other. The unpatched build is
# dirty from three slots on; a model without recurrent layers is clean without the repair, which leaves the recurrent
# layers as the only faulty part. Empty cells were not reported.

# %%
dirty_from = value("ik.cross-bleed.p100.corrupt-min-np.control.itemcliff")
stock = {value(f"ik.cross-bleed.p100.clean-np.control.np{n}") for n in (1, 2)}
batched = {value(f"ik.cross-bleed.p100.clean-np.candidate.itemfollow-up.np{n}") for n in (1, 4, 6, 7)}
other = value("ik.cross-bleed-control.p100.clean-np.control.np4")
lines = [(n, "clean" if n in stock else "dirty" if n >= dirty_from else "", "clean" if n in batched else "",
          "clean" if n == other else "") for n in range(1, 8)]  # fmt: skip
show(pd.DataFrame(lines, columns=["slots", "hybrid, unpatched", "hybrid, batched", "attention only, unpatched"]))

# %%
judgements("ik1-cross-bleed", "ik1-control", "ik1-build")

# %% [markdown]
# ## Several tokens per sequence
#
# A perplexity run puts several tokens of several sequences into one micro-batch; perplexity must be that of one
# sequence at a time. It is, to the last digit or one off it.

# %%
PPL = {"p100": "ik.batched-multi-seq.p100.ppl.reference--2", "cpu": "ik.batched-multi-seq.cpu.ppl.reference"}
four = {d: value(f"ik.batched-multi-seq.{d}.ppl.candidate") for d in PPL}
show(pd.DataFrame([(d, f"{four[d]:.4f}", f"{value(i):.4f}", f"{four[d] - value(i):+.4f}") for d, i in PPL.items()],
                  columns=["device", "four sequences", "one", "difference"]))  # fmt: skip

# %%
judgements("ik2-first", "ik2-decomposition", "ik2-pool-order", "ik3-set-rows")

# %% [markdown]
# ## What one sequence pays
#
# The maintainer's sweep on two GPUs, over the depth. The source's "about so much slower" is the same table divided the
# other way.

# %%
METRICS, ARMS = {"prefill": "prefill_tps", "decode": "decode_tps"}, {"control": "main", "candidate": "batched path"}
SWEEP, known = "ik.sweep-main-vs-pr.2x-rtx-3090", recorded.figures()
curve = {
    (n, arm): sweeps.from_figures([f for i, f in known.items() if i.startswith(f"{SWEEP}.{n}.{arm}.n-kv")], "n_kv",
                                  METRICS[n], label)
    for n in METRICS for arm, label in ARMS.items()
}  # fmt: skip
over = [sweeps.ratio(curve[n, "candidate"], curve[n, "control"], label=f"{n}, batched / main") for n in METRICS]
line = 1 + phase("ik4-gather").card.gate.require[0].threshold / 100
picture(
    draw.curves([[curve[n, arm] for arm in ARMS] for n in METRICS], "One sequence, two RTX 3090", over, zero=False,
                line=line),
    "Prefill, decode and the ratio of the batched path to the unpatched build over sixteen depths; all below the gate.",
)  # fmt: skip

# %%
said = [value(f"{SWEEP}.{n}-delta.candidate") for n in METRICS]
lines = [(n, 100 * (min(o.ys) - 1), 100 * (max(o.ys) - 1), 100 * (sum(o.ys) / len(o.ys) - 1), s)
         for n, o, s in zip(METRICS, over, said, strict=True)]  # fmt: skip
show(pd.DataFrame(lines, columns=["change %", "lowest", "highest", "mean", "the source says"]))

# %% [markdown]
# With one sequence its slot is known when the graph is built, so the state can be a view that is written in place. On a
# CPU that recovers nearly all of decode, on the two GPUs about half remains lost and fewer drafts are accepted; the
# cause was not found.

# %%
FAST = "ik.single-seq-fast-path.cpu"
builds = (("main", "control"), ("pr-before", "candidate"), ("pr-fast-path", "candidate"))
lines = [(b, *(value(f"{FAST}.{n}.{arm}.ctx2048.build{b}") for n in METRICS)) for b, arm in builds]
show(pd.DataFrame(lines, columns=["build, CPU", "prefill tok/s", "decode tok/s"]))

# %%
judgements("ik4-gather", "ik4-fast-path", "ik4-review", "ik5-mtp", "ik5-mtp-slots")

# %% [markdown]
# ## Every verdict of ik_llama, and where it differs

# %%
board = judgements(*(c.id for c in phases.cards().values() if c.system == "ik_llama"))
board

# %%
show(pd.DataFrame([(j.phase, j.verdict.word, j.source_said, j.differs) for j in board if j.agrees is False],
                  columns=["card", "here", "the source", "why they differ"]), code=["card"])  # fmt: skip
