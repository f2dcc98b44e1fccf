# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Open a profile
#
# Any file that `lab trace` reads: an nsys SQLite export or report, a PyTorch (Kineto) trace, ncu's CSV, a stored trace.
# Where did the time go, how much of it was exposed, when did the GPU idle, and what would a faster part give? Type a
# path; the window may be the whole capture, the steady decode steps, or a glob of NVTX ranges.
#
# **For a profile of your own:** set `FILE`, or type its path into the field.

# %%
from lab import instruments, trace

FILE = instruments.default_profile()  # the newest trace of p6-kernel that is committed

# %%
instruments.profile(FILE)

# %% [markdown]
# ## The same without widgets

# %%
profile = trace(FILE)
profile.breakdown()

# %%
profile.exposed()

# %%
profile.gaps()

# %%
profile.what_if("attention", speedup=2).gain_pct.mid
