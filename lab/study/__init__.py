"""What stands on many verdicts: the audit, ledger, staircase, flips, limits, routes, one's own A/B, verify, identity.

In: judgements, rows, recorded figures, files of other tools. Out: findings, tables and routes, each with its sources.
Door: `audit.run.audit`, `ledger.entries`, `staircase.staircase`, `flips.flips`, `limits.limits`, `routes.table`,
`choices.answer`, `own.verdict.judge`, `verify.hold`, `reproduction.reproduce`, `attributions.reproduce`,
`identity.run`, `crossbleed.run`.
"""
