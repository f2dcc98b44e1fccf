# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Ask a card
#
# Choose a card, a device and the kind of evidence. Below stand the question, the judge's word with the figures that
# decided it, each condition at its line, the arms with their rivals, the roofline and, where a trace is committed, the
# kernels of both arms. Move the line and the word follows; the card itself is not changed. "measure" runs the
# comparison on this machine's GPU and appends rows; without one it says so.
#
# **For a kernel of your own:** write a card (`data/phases/killgate/` has those to start from), put the candidate into
# its family's folder, and name the card here.

# %%
from lab import device, instruments, judgements, phase, show

CARD = "p5-kernel"
DEVICE = device().id  # the one with most measured rows; any id of data/devices.toml will do

# %%
instruments.phase(CARD, DEVICE)

# %% [markdown]
# ## The same without widgets
#
# Every part is an object with typed fields; what is shown above is these calls.

# %%
judgements(CARD, device=DEVICE)

# %%
asked = phase(CARD)
asked.breakdown(DEVICE)

# %%
show(asked.rows(DEVICE).frame()[["arm", "name", "workload id", "status", "median us", "iqr us", "run"]])

# %%
asked.measure()
