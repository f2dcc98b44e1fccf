"""From evidence to one verdict word: readings from rows or recorded figures, the pure judge, projections to a step.

In: a card and its rows or figures. Out: `Judgement`, the word with the sentence and the numbers that decided it.
Door: `verdicts.judge_recorded`, `verdicts.judge_measured`, `rules.judge`, `projection.measured`, `decode_step`.
"""
