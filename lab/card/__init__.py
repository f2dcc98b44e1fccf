"""Phase cards and what they name: one falsifiable question each, its gate as data, the recorded figures it reads.

In: data/phases/<system>/*.toml, data/recorded/*.csv. Out: `Card`, `Gate`, `Figure` as types, checked on loading.
Door: `phases.cards`, `phases.card`, `phases.load`, `gate.Gate`, `recorded.figure`, `recorded.verdict`, `sweeps.table`,
`history.gate_commit`.
"""
