# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Start here: from a question to a verdict
#
# Killgate decides whether a GPU kernel idea is kept or killed. The idea is written down as a card with its gate before
# anyone measures, and goes through one chain. Every number below comes from a row: `data/recorded/` holds what the
# sources published, `profiles/` what was measured here. No GPU is needed.
#
# | notebook | for |
# |:--|:--|
# | `phase` | asking a card: question, verdict, arms, roofline, kernels; moving its line; measuring on this GPU |
# | `profile` | opening a profile of your own: where the time went, and what a faster part would give |
# | `kernel` | a kernel at any shape: check, config, floor, sweep beside rivals |
# | `limits` | our kernels between their floor and the fastest rival, misses named |
# | `measuring`, `audit` | whether the clock and the verdicts can be trusted |
# | `nvfp4`, `gdn`, `gdn_state`, `kv`, `kv_accuracy`, `kv_ceiling`, `moe`, `p5_p6_h200`, `traces` | families' stories |
# | `localai_p1_p6`, `staircase`, `ds4`, `ik_llama`, `imp`, `lucebox` | the sources' stories |

# %%
import pandas as pd

from lab import device, judgements, phase, phases, show
from lab.card import gate
from lab.judge import rules, verdicts
from lab.study import flips

CARD = "p5-kernel"
DEVICE, NEARBY = device().id, "h100"  # the one with most measured rows, and one with the same processors

# %% [markdown]
# ## One card through the chain
#
# | link | room | does | may end it as |
# |:--|:--|:--|:--|
# | card | `lab.card` | question, null and gate, before anyone measures | |
# | check | `lab.check` | every output against the reference | INVALID: wrong |
# | measure | `lab.bench` | arms in turn, blocks in pairs | BLOCKED: an arm is missing |
# | place | `lab.place` | on the device's roofline | INVALID: faster than the device can |
# | trace | `lab.trace` | time by kernel and category | VACUOUS: the candidate never ran |
# | judge | `lab.judge` | the gate's conditions | GO, NO-GO, NEUTRAL, PARTIAL, CONDITIONAL-GO |
# | write | `lab.write` | writeup, page, notebook | |
#
# **For a card of your own:** set `CARD`, or open the notebook `phase`.

# %%
phase(CARD)

# %%
judgements(CARD, device=DEVICE)

# %%
phase(CARD).arms(DEVICE)

# %%
phase(CARD).kernels(DEVICE)

# %% [markdown]
# ## The board, counted
#
# The sources' verdicts, replayed: the gate is the card's, the observed figures are the source's, the word is the
# judge's. LANDED counts as GO. Every line is on the site that `make verdicts` writes.

# %%
recorded = verdicts.judge_recorded([p.card for p in phases()])
counts = pd.DataFrame([{"source": j.system, "judge": j.verdict.word, "agrees": j.agrees} for j in recorded])
board = counts.groupby(["source", "judge"]).size().unstack(fill_value=0)
board.insert(0, "agrees", counts.agrees.groupby(counts.source).sum())
show(board.reset_index(), code=["source"])

# %% [markdown]
# Measured here, the kernels alone:

# %%
own = judgements(*(p.id for p in phases("killgate")), device=DEVICE)
said = [(j.phase, j.verdict.word, j.verdict.observed) for j in own]
show(pd.DataFrame(said, columns=["card", "verdict", "observed"]), code=["card"])

# %% [markdown]
# ## Where a verdict flips between devices
#
# Ours on the same question beside each recorded word, and what bounds the two arms on either device. Where the gates
# ask different things their words are not compared. An H100 has an H200's multiprocessors and 3.35
# instead of 4.8 TB/s.

# %%
nearby = {(f.phase, f.card, f.workload): f.word_here for f in flips.flips(NEARBY)}
lines = [(f.row, f.question, f"{f.word_there} ({f.there})", f.word_here or "not measured",
          nearby[f.phase, f.card, f.workload],
          f.flips or ("not comparable" if f.asks_otherwise else ""),
          " to ".join(dict.fromkeys(str(f.bounds[f.there, arm]) for arm in flips.ARMS)),
          " to ".join(dict.fromkeys(str(f.bounds[f.here, arm]) for arm in flips.ARMS)), f.card)
         for f in flips.flips(DEVICE)]  # fmt: skip
names = ["row", "question", "recorded", DEVICE, NEARBY, "flips", "bound there", f"bound on {DEVICE}", "card"]
show(pd.DataFrame(lines, columns=names), code=["card"])

# %% [markdown]
# ## How to read a verdict
#
# One invented gate (more than 5 % more decode, an error in band, at least one engagement), invented bodies of evidence:
# the judge is a pure function. INVALID, BLOCKED and VACUOUS come first, then kill conditions, then requirements;
# PARTIAL means that the required workloads disagree, NEUTRAL that the effect lies inside the noise.

# %%
toy = gate.Gate(
    correctness=(gate.Condition("relative_error", "<=", "ratio", 0.004, workload="a"),),
    engaged=(gate.Condition("engagements", ">", "launches", 0.0, workload="a"),),
    require=(gate.Condition("decode_tps", ">", "%", 5.0, "change", "a"),),
)


def invented(tps: float | None, error: float = 0.001, launched: float = 48, kind: str = "measured") -> rules.Verdict:
    """The verdict on invented evidence; tps None: the run never finished."""
    found = {("relative_error", "a"): gate.Reading("ratio", candidate=error),
             ("engagements", "a"): gate.Reading("launches", candidate=launched)}  # fmt: skip
    if tps is not None:
        found["decode_tps", "a"] = gate.Reading("tok/s", control=100.0, candidate=tps, kind=kind)
    return rules.judge(toy, found)


EXAMPLES = {
    "correct, engaged, 12 % faster": invented(112.0),
    "the same, but predicted": invented(112.0, kind="predicted"),
    "3 % faster: the line at 5 % is missed": invented(103.0),
    "twice as fast and wrong": invented(200.0, error=0.3),
    "the run never finished": invented(None),
    "no change, and never engaged": invented(100.0, launched=0),
}
show(pd.DataFrame([(what, v.word, v.reason) for what, v in EXAMPLES.items()],
                  columns=["evidence (invented)", "verdict", "the judge's sentence"]))  # fmt: skip
