"""Time honestly: arms of a card interleaved in a watched process, checked before and after, appended as rows.

In: a card and a CUDA GPU. Out: rows of measurements, ceilings, counters and cross-checks.
Door: `measure.plan`, `measure.measure`, `ceiling_runs.measure`, `counters.collect`, `crosscheck.measure`, `profile`;
on many machines `cluster.Cluster` with `cluster.measure` or `cluster.sweep`.
"""
