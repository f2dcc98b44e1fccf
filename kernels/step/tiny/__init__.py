"""A small hybrid model that has learnt something, so that what a lever does to logits can be measured on a CPU.

The architecture is kernels/step's and its weights have the same names. `corpus.py` is what it was taught, `train.py`
teaches it, `stored.py` keeps its weights, `engine.py` runs it with one lever changed, `measure.py` turns that into the
metrics that cards are held to, and `say.py` lets programs that compare programs ask it.
"""
