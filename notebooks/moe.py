# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Mixture of experts: which tile for so few tokens an expert
#
# A mixture's products are many small ones: at 128 tokens each of 256 experts has about four. A tile of 64 or 128 tokens
# is then nearly empty, and a selector that looks at the sum of all rows does not see it. LP5 capped the tile and chose
# by density; here the same rules are an instrument: what a tile holds, what it pads, what a wrong choice costs.
#
# **For a mixture of your own:** change `SHAPE`; a rule of your own is a function in `RULES`.

# %%
import pandas as pd

from kernels.common import Workload
from kernels.moe.cost import FP4_BYTES, block_sizes, cost
from lab import device, draw, family, judgements, picture, rows, show
from lab.base import devices
from lab.card import phases as cards
from lab.write import notebook

DEVICE = device().id  # the one with most measured rows
moe = family("moe")
SHAPE = moe.parts.workload("t128_e256_k8_h2048_f512_s512")
NPL = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
TILES, ROUTINGS = (8, 16, 32, 64, 128), ("uniform", "zipf", "one")
CARDS = [c for c in cards.cards().values() if (c.family, c.system) == ("moe", "killgate")]
ASKED = [c for c in CARDS if c.row == "LP5"]
notebook.questions(ASKED)

# %% [markdown]
# ## The mechanism
#
# ```text
# logits -> top k, softmax -> rows sorted by expert -> blocks -> x Wg, x Wu -> SiLU, product -> x Wd -> weighted sum
#                             e0: 3 rows               [3 of 16]
#                             e1: 0                    its weights are not read
#                             e2: 18                   [16 of 16] [2 of 16], its weights are read for both
# ```

# %%
moe.check(workload="t17_e8_k2_h128_f64_one_s64_bf16")

# %% [markdown]
# ## What a tile holds
#
# Rows over the places of all tiles, the shared expert left out, from draws of the cases' own routing. Skew fills tiles
# and makes more of them: the busiest expert needs several, and each reads its weights again.


# %%
def at(tokens: int, routing: str = "uniform"):
    """SHAPE with so many tokens, without a shared expert."""
    return Workload("", {**SHAPE.axes, "T": tokens, "routing": routing, "shared": 0})


def occupancy(tokens: int, tile: int, routing: str = "uniform") -> float:
    """Rows over the places of all tiles, in %."""
    sizes = block_sizes(at(tokens, routing), tile)
    return 100 * sum(rows * n for rows, n in sizes) / sum(tile * n for _, n in sizes)


lines = [(r, t, t * SHAPE["top_k"] / SHAPE["experts"], *(occupancy(t, tile, r) for tile in TILES))
         for r in ROUTINGS for t in (1, 8, 32, 128, 512, 2048)]  # fmt: skip
show(pd.DataFrame(lines, columns=["routing", "tokens", "rows an expert", *(f"tile {tile}: full %" for tile in TILES)]))

# %%
picture(
    draw.lines({"uniform": {f"tile of {tile}": [(t, occupancy(t, tile)) for t in NPL] for tile in TILES}},
               "How full tiles are", "tokens (npl)", "rows over places, %"),
    "Occupancy against tokens, a line for each tile: tiles of 64 and more stay under 10 % up to 128 tokens.",
)  # fmt: skip

# %% [markdown]
# ## What a choice costs
#
# The work of a tile beside the read: weights once for each expert that is hit (from memory) and once more for each
# further tile (from L2), products by the tile's whole width. The larger of reading and products, at the device's
# figures: modelled, a lower bound for every tile alike, not a time of any kernel.


# %%
def bound_us(tokens: int, tile: int, routing: str = "uniform") -> float:
    """The larger of reading each expert's weights once and multiplying whole tiles, us; modelled."""
    workload, place = at(tokens, routing), devices.get(DEVICE)
    count = sum(n for _, n in block_sizes(workload, tile))
    flops = 6.0 * workload["H"] * workload["F"] * tile * count
    read = cost(workload, "nvfp4-w4a16").bytes
    return max(1e6 * read / place.bandwidth.base, 1e6 * flops / place.peaks["bf16"].base)


RULES = {  # as kernels/moe/controls/triton_levers.py has them: of tokens, rows in all and rows an expert
    "stock: by the sum": lambda total, mean: min(128, max(16, 1 << (total - 1).bit_length())),
    "capped at 64": lambda total, mean: min(64, max(16, 1 << (total - 1).bit_length())),
    "by density": lambda total, mean: 16 if mean <= 8 else min(128, max(16, 1 << (total - 1).bit_length())),
    "always 16": lambda total, mean: 16,
}
lines = []
for tokens in NPL:
    total = tokens * SHAPE["top_k"]
    costs = {tile: bound_us(tokens, tile) for tile in TILES[1:]}
    least = min(costs.values())
    chosen = {name: rule(total, total / SHAPE["experts"]) for name, rule in RULES.items()}
    regret = {f"{name}: over the best %": 100 * (costs[tile] / least - 1) for name, tile in chosen.items()}
    lines.append({"tokens": tokens, **chosen, **regret})
show(pd.DataFrame(lines))

# %% [markdown]
# Products hide behind the read up to a width that is the device's own: 58 rows on an H200, where 64 costs a tenth and
# 128 more than twice the best; 219 on GB10, where even 128 would be free. What LP5 gained there was not in the
# products: a wide tile's shared memory, registers and epilogue are what is left.

# %%
places = {place: devices.get(place) for place in ("gb10", DEVICE)}
ratio = {name: place.peaks["bf16"].base / place.bandwidth.base for name, place in places.items()}
COLUMNS = ["device", "bf16 flops a byte", "rows whose products take as long as the read"]
show(pd.DataFrame([(name, r, r * FP4_BYTES / 2) for name, r in ratio.items()], columns=COLUMNS))

# %% [markdown]
# ## As recorded, and asked of the kernels here
#
# LP5's cards as their source judged them on GB10; then ours, and what the rows say. A card without rows has no line:
# nothing above is a measurement.

# %%
judgements("lp5-cap", "lp5-density", "lp5-scope")

# %%
show(pd.DataFrame([(c.id, c.title, c.candidate, c.expected.recovery) for c in CARDS],
                  columns=["card", "asks", "of", "expected"]), code=["card", "of"])  # fmt: skip

# %%
judgements(*(c.id for c in CARDS), device=DEVICE)

# %% [markdown]
# ## The same cards on another GPU
#
# A verdict belongs to a device: an H100 has the H200's multiprocessors and two thirds of its bandwidth, so what only
# hides reading is worth less there, and bytes in flight beyond what the memory takes are in the way.

# %%
measured = sorted({row.device for row in rows(family="moe")})
words = {d: {j.phase: j.verdict.word for j in judgements(*(c.id for c in CARDS), device=d)} for d in measured}
show(pd.DataFrame(words).fillna("not measured").rename_axis("card").reset_index(), code=["card"])

# %% [markdown]
# ## What would change it

# %%
notebook.would_change(ASKED)
