"""Figures in one style: roofline, breakdown, gap waterfall, sweep, timeline.

In: points, breakdowns, sweeps, traces. Out: matplotlib figures that save as SVG or PNG.
Door: `plots.roofline`, `plots.bars`, `pictures.gap`, `pictures.breakdown`, `sweep_plots.curves`, `timeline.timeline`.
"""
