"""The audit: what a judge that reads only its gate cannot see.

A verdict follows from a gate and its figures. Whether the figures can carry it is another question: the candidate may
never have run, the effect may be smaller than the same code run twice, the counter behind a share may have changed its
meaning. Each check is a plain function on quantities, recorded or measured, and answers with one sentence whose every
number is computed from them.
"""
