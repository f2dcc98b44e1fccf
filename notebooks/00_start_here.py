# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Start here: from a question to a verdict
#
# Killgate decides whether a GPU kernel idea is kept or killed. The idea is written down as a card with its gate before
# anyone measures, and then goes through one chain. This page shows the chain, the board of verdicts, the H200's
# verdicts beside GB10's, and the recorded roofline analysis computed again.
#
# Every number on this page comes from a row: `data/recorded/` holds what the sources published, `profiles/` what was
# measured here. The cells assert what the text says, so executing the notebook is a test. No GPU is needed.

# %%
import pandas as pd

from lab.base import devices, vocabulary
from lab.card import gate, phases
from lab.card import recorded as recorded_facts
from lab.check import families
from lab.judge import evidence, rules, verdicts
from lab.place import roofline
from lab.row import store
from lab.study import flips, reproduction
from lab.write import diagrams, notebook, writeup

DEVICE = "h200"
cards = phases.cards()

# %% [markdown]
# ## The chain

# %%
notebook.picture(
    diagrams.chain(), "Seven links: card, check, measure, place, trace, judge, write; where a chain may end early."
)

# %% [markdown]
# ## The board
#
# The five sources wrote down 130 verdicts. Each is replayed: the gate is the card's, taken from the source's own
# criterion, the observed figures are the source's, the word is the judge's. LANDED, a fact about a source's branch,
# counts as GO. Every line is on the site that `lab verdicts` writes, and `lab judge --all` prints it; here are counts.

# %%
recorded = verdicts.judge_recorded(cards.values())
assert len({j.recorded_id for j in recorded}) == len(recorded_facts.verdicts()) == 130
counts = pd.DataFrame(
    [{"source": j.system, "judge": j.verdict.word, "agrees": "yes" if j.agrees else "explained"} for j in recorded]
)
table = counts.groupby(["source", "judge"]).size().unstack(fill_value=0)
table.insert(0, "agrees", (counts.agrees == "yes").groupby(counts.source).sum())
notebook.show(table.reset_index(), code=["source"])

# %% [markdown]
# Where the judge and the source differ, the card must say why in a sentence; where they agree it must not. The most
# frequent reasons: the source prints a word and no figure (BLOCKED here), it calls PARTIAL what its own gate decides,
# or nothing was ever engaged (VACUOUS).

# %%
assert not writeup.unexplained(recorded)
differing = [j for j in recorded if j.agrees is False]
assert all(j.differs for j in differing)
notebook.show(
    pd.DataFrame(
        [
            {"phase": j.phase, "here": j.verdict.word, "source": j.recorded_verdict, "why they differ": j.differs}
            for j in differing
        ]
    )
)

# %% [markdown]
# ## The H200 beside GB10
#
# The sources ran on a GB10: LPDDR5x, tensor cores with FP4. The cards below ask the same of an H200: HBM, no FP4. They
# are questions about the kernel alone, with gates of their own, while the recorded ones are mostly about a whole decode
# or prefill; a different word on the two devices therefore says where an idea stops holding, and does not correct the
# source.

# %%
own = [c for c in cards.values() if c.system == "killgate"]
measured = {c.id: notebook.measured(c.id, DEVICE) for c in own}
judged = [j for j in measured.values() if j]
notebook.show(notebook.board(judged).drop(columns=["recorded", "agrees"]), code=["gate"]) if judged else notebook.text(
    "No measured rows are committed yet."
)


# %% [markdown]
# ### The flip map
#
# Beside each recorded word stands ours on the same question, and what bounds the two arms on the two devices: bytes
# over bandwidth, operations over the peak of their pipe, or launches. `expected` is the ratio of those bounds, before
# anything was measured. `data/flips.toml` pairs the cards and says what the cost model cannot know; the words, the
# bounds and the changes are computed. Where the two gates ask different things their words are not compared.

# %%
families.interpret_on_cpu()  # a family's candidates are imported for their precision
pairs = flips.flips(DEVICE)
# A flip is claimed only where both devices have a word, and only on one question.
assert all(f.word_there and f.word_here and not f.asks_otherwise for f in pairs if f.flips)


def change(pct: float | None) -> str:
    return "" if pct is None else f"{pct:+.0f} %"


notebook.show(
    pd.DataFrame(
        [
            {
                "row": f.row,
                "question": f.question,
                "recorded": f"{f.word_there} ({f.there})",
                "H200": f.word_here or "not measured yet",
                "flips": f.flips or ("not comparable" if f.asks_otherwise else ""),
                "bound there": " to ".join(dict.fromkeys(str(f.bounds[f.there, arm]) for arm in flips.ARMS)),
                "bound here": " to ".join(dict.fromkeys(str(f.bounds[f.here, arm]) for arm in flips.ARMS)),
                "expected there, here": f"{change(f.expected_pct[f.there])}, {change(f.expected_pct[f.here])}",
                "measured here": change(f.measured_pct),
                "card": f.card,
            }
            for f in pairs
        ]
    ),
    code=["card"],
)


# %%
def outdated(card_id: str) -> str:
    """A sentence where newest rows of the candidate are of a kernel that the present code does not launch there."""
    if cards[card_id].family == "gdn":
        return ""  # its Triton launches ask for the GPU at hand
    every = store.rows(device=DEVICE, phase=card_id)
    rows = {r.workload_id: r for r in every if r.name == cards[card_id].candidate and r.status == "ok"}
    old = [w for w, r in rows.items() if notebook.former(r)]
    return (
        f" Rows of a former kernel at {len(old)} of {len(rows)} workloads: the present one is unmeasured."
        if old
        else ""
    )


turned = [f for f in pairs if f.flips in ("yes", "partly")]
sentences = [f"{sum(bool(f.flips) for f in pairs)} of {len(pairs)} pairs have two words that can be compared."]
sentences += [
    f"- {f.row}, {f.question}: {f.word_there} on {f.there}, {f.word_here} here. {f.explained_by}.{outdated(f.card)}"
    for f in turned
]
sentences += [f"- {f.row}, {f.question}: not compared; {f.asks_otherwise}." for f in pairs if f.asks_otherwise]
sentences += [f"- `{c.id}` has no rows yet: nothing is said about it." for c in own if not measured[c.id]]
sentences += [f"- `{j.phase}`: {j.note}." for j in judged if j.note]
notebook.text(sentences[0] + "\n\n" + "\n".join(sentences[1:]))

# %%
device = devices.get(DEVICE)
placed = []
for c in own:
    for workload, pair in evidence.pairs(store.rows(device=DEVICE, phase=c.id)).items():
        line = {"card": c.id, "workload": workload}
        for arm, row in zip(("control", "candidate"), pair, strict=True):
            if row and row.status == "ok":
                floor = roofline.place(device, row.flops, row.bytes, row.pipe)
                share = roofline.roofline_fraction(floor.floor_us, row.median_us)
                line |= {f"{arm} us": row.median_us, f"its floor, {arm}": f"{floor.bound}, {share:.0%}"}
        placed += [line] if len(line) > 2 else []
notebook.show(pd.DataFrame(placed), code=["card", "workload"]) if placed else notebook.text("No rows to place yet.")

# %% [markdown]
# ## How to read a verdict
#
# One invented gate, seven invented bodies of evidence: the judge is a pure function, so it can be shown without a GPU.
# The gate asks for more than 5 % more decode, with a KL that stays in band and at least one engagement.

# %%
ask = gate.Condition("decode_tps", ">", "%", 5.0, "change", "a")
toy = gate.Gate(
    correctness=(gate.Condition("relative_error", "<=", "ratio", 0.004, workload="a"),),
    engaged=(gate.Condition("engagements", ">", "launches", 0.0, workload="a"),),
    require=(ask,),
)


def invented(tps: float | None, error: float = 0.001, launched: float = 48, kind: str = "measured") -> dict:
    found = {
        ("relative_error", "a"): gate.Reading("ratio", candidate=error),
        ("engagements", "a"): gate.Reading("launches", candidate=launched),
    }
    if tps is not None:
        found["decode_tps", "a"] = gate.Reading("tok/s", control=100.0, candidate=tps, kind=kind)
    return found


EXAMPLES = [
    ("correct, engaged, 12 % faster", "GO", invented(112.0)),
    ("the same, but predicted", "CONDITIONAL-GO", invented(112.0, kind="predicted")),
    ("3 % faster: the line at 5 % is missed", "NO-GO", invented(103.0)),
    ("twice as fast and wrong", "INVALID", invented(200.0, error=0.3)),
    ("the run never finished", "BLOCKED", invented(None)),
    ("no change, and never engaged", "VACUOUS", invented(100.0, launched=0)),
]
rows = []
for what, word, found in EXAMPLES:
    verdict = rules.judge(toy, found)
    assert verdict.word == word, verdict
    rows.append({"evidence (invented)": what, "verdict": verdict.word, "the judge's sentence": verdict.reason})
any_gain = gate.Gate(require=(gate.Condition("decode_tps", ">", "%", 0.0, "change", "a"),))
verdict = rules.judge(any_gain, invented(101.0))
assert verdict.word == "NEUTRAL", verdict
what = "1 % faster where any gain would do"
rows.append({"evidence (invented)": what, "verdict": verdict.word, "the judge's sentence": verdict.reason})
notebook.show(pd.DataFrame(rows))

# %%
noise = gate.Noise()
notebook.text(
    "INVALID, BLOCKED and VACUOUS come first, then kill conditions, then requirements. PARTIAL means that the required "
    f"workloads disagree. The noise floor is max({noise.floor_pct:g} %, {noise.sigmas:g} sigma of the control) unless "
    "the card says otherwise. A verdict belongs to a device and to a kind of evidence, and names its figures."
)

# %% [markdown]
# ## The recorded roofline analysis, computed again
#
# Before measuring, the sources computed floors, crossovers and ceilings. `lab.study.reproduction` computes them again
# from the inputs they name. `follows` means equal at the digits the source prints; beside it stands the assumption that
# makes it so, or why it does not follow. Where sources contradict each other on a fact, the last column has the figure
# that the other value gives.

# %%
again = reproduction.reproduce()
assert all(r.agrees == (r.expected == "agrees") for r in again)
notebook.show(
    pd.DataFrame(
        [
            {
                "figure": r.name,
                "recorded": f"{r.recorded:g}" + (f" to {r.recorded_high:g}" if r.recorded_high != r.recorded else ""),
                "ours": f"{r.ours:.5g}",
                "unit": r.unit,
                "difference": f"{r.difference_pct:+.2f} %",
                "follows": "yes" if r.agrees else "NO",
                "assumption, or why not": r.assumption,
                "with the other value": "; ".join(f"{a.label}: {a.value:.4g}" for a in r.alternatives),
            }
            for r in again
        ]
    )
)

# %%
unfollowed = [r for r in again if not r.agrees]
notebook.text(
    f"{len(again) - len(unfollowed)} of {len(again)} figures follow from their source's own inputs. These do not:\n\n"
    + "\n".join(
        f"- {r.name}: {r.recorded:g} {r.unit} recorded, {r.ours:.4g} computed. {r.assumption}" for r in unfollowed
    )
)

# %% [markdown]
# A recorded time can also be asked whether it is possible: moving its bytes may not need more bandwidth than there is.

# %%
possible = reproduction.checks()
assert all(c.above == (c.expected == "above") for c in possible)
notebook.show(
    pd.DataFrame(
        [
            {
                "time": c.name,
                "of the bandwidth": f"{c.share_pct:.1f} %",
                "possible": "NO" if c.above else "yes",
                "because": c.assumption,
                "with the other value": "; ".join(f"{a.label}: {a.value:.1f} %" for a in c.alternatives),
            }
            for c in possible
        ]
    )
)

# %% [markdown]
# ## How to run it
#
# ```sh
# make verdicts                          # judge every card, check every family, execute the notebooks, write build/site
# make test                              # lint, types and every test that needs neither a GPU nor a browser
# .venv/bin/lab judge lp11               # one card: its gate, each condition with its number
# .venv/bin/lab check nvfp4              # candidates against the reference; Triton's interpreter where no GPU is
# .venv/bin/lab compile nvfp4            # registers, shared memory, spills, matrix instruction, by target
# .venv/bin/lab measure lp11-kernel      # on a GPU: check, time, append rows to profiles/
# .venv/bin/python -m lab.write.pairing        # execute every notebook's .py and write its .ipynb
# ```
#
# `make lab` opens the notebooks. Each is a pair: edit the `.py` or the `.ipynb`, jupytext keeps the other.

# %% [markdown]
# ## What comes next

# %%
known = vocabulary.row_ids()
without = [row for row in known if row not in {c.row for c in cards.values()}]
waiting = [c.id for c in own if not measured[c.id]]
replayed = [c.id for c in cards.values() if not c.family]
assert not without, without
notebook.text(
    f"- {len(known) - len(without)} of {len(known)} rows of the workbench have a card.\n"
    f"- {len(replayed)} of {len(cards)} cards have no kernel family here and can only be replayed.\n"
    f"- Own cards waiting for rows on the {device.name}: {', '.join(waiting) or 'none'}.\n"
    "- The family notebooks, `nvfp4`, `gdn` and `kv`, take one question each through the chain; `audit` asks how\n"
    "  the recorded verdicts were formed, `staircase` and the notebooks named after the sources tell their stories."
)
