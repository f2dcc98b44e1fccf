# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # The audit of all verdicts
#
# A judge holds a gate against figures. It does not ask whether the figures can carry a verdict: whether the candidate
# ran, whether the effect is larger than the same code run twice, whether both sides of a difference come from one
# clock. The audit asks that, of every recorded verdict and of every comparison measured here, with one function for
# each kind of mistake. Nothing below is typed: each number is computed from the figures whose ids stand beside it.
#
# A finding is about figures. Most verdicts it touches may still be right; it says what they do not rest on.
#
# **For verdicts of your own:** `lab audit` asks every card and every measured row; nothing has to be named here.

# %%
from __future__ import annotations

import statistics

import pandas as pd

from lab import value
from lab.card import recorded
from lab.study.audit import checks, find, run
from lab.study.audit.subject import SEVERITIES
from lab.write import notebook

result = run.audit()
fired = {name: [f for f in result.findings if f.check == name] for name in run.CHECKS}


def section(*names: str) -> notebook.Shown:
    """What each check asks, and what it found."""
    rows = [r for name in names for r in run.rows(fired[name])]
    return notebook.show(pd.DataFrame(rows).drop(columns="check"), code=["figures"])


def quiet(name: str) -> notebook.Shown:
    """Where a check was asked and had nothing to say, of the recorded subjects."""
    titles = [s.title for s in result.quiet(name) if s.evidence == "recorded"]
    return notebook.text(f"{run.CHECKS[name].meaning}\n\nQuiet on: {'; '.join(titles) or 'nothing recorded'}.")


notebook.text(run.summary(result))

# %% [markdown]
# ## The checks
#
# Each was asked of the cases that `data/audit.toml` names, of every recorded case of every card, and of every measured
# comparison in `profiles/`.

# %%
notebook.show(
    pd.DataFrame(
        [
            {
                "check": c.name,
                "what is wrong when it fires": c.meaning,
                "asked": sum(name == c.name for name, _ in result.asked),
                "fired": len(fired[c.name]),
            }
            for c in run.CHECKS.values()
        ]
    )
)

# %%
notebook.show(pd.DataFrame([{"severity": s, "meaning": m} for s, m in SEVERITIES.items()]))

# %% [markdown]
# ## P1: the gate on one quantity, the verdict on another
#
# P1 asked that the share of convert and concat kernels fall by more than half, that KL stay within its band, and that
# the top choice agree often enough. It landed.

# %%
p1 = [f for f in result.findings if "lp.v.p1" in f.verdicts]
notebook.show(pd.DataFrame(run.rows(p1)).drop(columns="severity"), code=["figures"])

# %%
share = value("lp.gate.p1.convert-share.candidate") / value("lp.gate.p1.convert-share.control") - 1
removed = value("lp.gate.p1.convert-instances.control") - value("lp.gate.p1.convert-instances.candidate")
owned = value("lp.gate.p1.engagement-p0.candidate")
notebook.text(
    f"All {removed:.0f} launches of the segment it owns are gone, and the share that the gate is on fell by "
    f"{-100 * share:.1f} %. Both are true; the written gate asks the second."
)

# %% [markdown]
# ## GDN decode, phases 79 to 96: how long was captured, or how fast?
#
# These phases were kept or turned down on the milliseconds of one kernel in a capture of four seconds. A capture of
# fixed length holds more or fewer launches, so its sum moves without the kernel getting faster or slower.

# %%
captures = [s for name, s in result.asked if name == "launch-drift" and s.title.startswith("GDN decode phase")]
changes = checks.launch_changes(captures)
notebook.show(pd.DataFrame(changes, columns=["phase", "the capture's time %", "per launch %"]).round(2))

# %%
section("launch-drift")

# %%
runs = [f"lp.gate.phase-141.gdn-core-time.{name}" for name in ("cv", "per-launch.cv")]
raw, each = (value(i) for i in runs)
line = value("lp.gate.phase-141.gdn-core-time.threshold")
beyond = [title.removeprefix("GDN decode ").split(":")[0] for title, change, _ in changes if abs(change) > line]
notebook.text(
    f"The project found this itself: over five runs of one binary the sum varies by {raw} %, the time per launch by "
    f"{each} % (`{runs[0]}`, `{runs[1]}`). Its rule from then on: more than "
    f"{value('lp.gate.phase-141.gdn-core-time.threshold')} % raw or more than "
    f"{value('lp.gate.phase-141.gdn-core-time.per-launch.threshold'):g} % per launch. Of these phases only "
    f"{', '.join(beyond)} exceed the first."
)

# %%
quiet("launch-drift")

# %% [markdown]
# ## Noise: within a run, between sessions, between identical arms

# %%
section("claim-inside-noise", "between-session-noise", "identical-path-spread")

# %%
sessions = [f for i, f in recorded.figures().items() if i.startswith("lp.sessions.default-npl128.")]
rates = [float(f.value) for f in sessions]
cv = 100 * statistics.stdev(rates) / statistics.fmean(rates)
notebook.text(
    f"{len(rates)} unprofiled runs of the default arm in one setting, from phase to phase: {min(rates)} to "
    f"{max(rates)} tok/s, mean {statistics.fmean(rates):.1f}, CV {cv:.2f} %. A change between sessions has to exceed "
    f"{3 * cv:.1f} %."
)

# %%
quiet("identical-path-spread")

# %% [markdown]
# ## What was measured: a profiler, a sentinel, another clock, another label

# %%
section("profiled-throughput", "blind-sentinel", "kernel-from-wall", "label-drift")

# %% [markdown]
# ## Lines that cannot decide

# %%
section("gate-fails-control", "threshold-inside-band")

# %% [markdown]
# ## Figures that cannot stand

# %%
section("zero-engagement", "incomplete-arms", "impossible-speed", "withdrawn-reused", "policy-on-artefact")

# %%
artefact, sound = "lp.batch8-anomaly.gb10.decode-step.control.npl8", "lp.track-b-roofline.gb10.decode-step.control.m128"
notebook.text(
    f"Withdrawn goes by id, not by value: {value(artefact):.0f} ms/step is an artefact as `{artefact}` "
    f"({recorded.figure(artefact).withdrawn}) and a sound control as `{sound}`."
)

# %% [markdown]
# ## The same checks on our own rows
#
# Measured comparisons answer to the same functions: engagement, arms, timers, gate hashes, floors of the device, the
# control against itself, and the spread from run to run.

# %%
own = [f for f in result.findings if f.evidence == "measured"]
asked = sum(s.evidence == "measured" for _, s in result.asked)
judged = [(b.id, b.word) for b in find.bodies("measured")]
notebook.text(
    f"{len(own)} findings from {asked} questions on {len(judged)} measured verdicts: "
    + ", ".join(f"`{name}` {word}" for name, word in judged)
    + "."
    + "".join(f"\n- {f.check}: {f.subject}: {f.sentence}." for f in own)
)

# %% [markdown]
# ## Verdicts that carry a finding

# %%
touched: dict[str, list[str]] = {}
for f in result.findings:
    for verdict in f.verdicts:
        touched.setdefault(verdict, []).append(f.check)
notebook.show(
    pd.DataFrame(
        [
            {"verdict": v, "about": recorded.verdict(v).title, "the source": recorded.verdict(v).said,
             "checks that fire": ", ".join(dict.fromkeys(names))}
            for v, names in touched.items()
        ]
    )
)  # fmt: skip
