# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Ask a kernel
#
# A family, one of its candidates and any shape, typed as axes; those left out are taken from the nearest shape that is
# listed. What would it launch, what is its floor, what do its measured rows let one expect, and what took as long
# beside it? The sweep varies one axis: the floor, the rows on that line of shapes, and with "time" this machine's GPU,
# rivals too where they are installed. "check" holds it against the reference, "compile" says what a compiler makes of
# it for the device, ahead of time.
#
# **For a kernel of your own:** add it to its family's folder (`kernels/common.py` says how); it is then in the list.

# %%
import pandas as pd

from lab import device, family, instruments

FAMILY, CANDIDATE = "nvfp4", "cuda_gemm"
SHAPE = "M=48 N=17408 K=5120"
DEVICE = device().id  # the one with most measured rows

# %%
instruments.kernel(
    FAMILY, CANDIDATE, SHAPE, DEVICE, "M", "16,32,48,64,128,256,512,1024,2048", "torch_bf16 vllm_marlin cuda_decode"
)

# %% [markdown]
# ## The same without widgets

# %%
kernel = family(FAMILY)[CANDIDATE].at(M=48, N=17408, K=5120)
kernel

# %%
family(FAMILY)["triton_gemm"].at(M=5, N=64, K=128, dtype="bf16").check()

# %% [markdown]
# ## What it takes where nobody measured
#
# A model of each kernel's time is fitted to the rows and answers for other shapes (`lab routes FAMILY --shape ...`).
# What it is worth: each shape left out in turn, and each model's shapes together, it predicts from the others.

# %%
pd.concat({name: family(name).validation(DEVICE).frame() for name in ("nvfp4", "q8", "kv", "gdn")})

# %%
family("nvfp4").model(DEVICE)

# %%
family("q8").model(DEVICE)

# %%
family("kv").model(DEVICE)

# %%
family("gdn").model(DEVICE)

# %% [markdown]
# By the same model, where the models of data/public_models.csv lose most, because no kernel there is near its floor:

# %%
family(FAMILY).lost(DEVICE)

# %%
family(FAMILY)
