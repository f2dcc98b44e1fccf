"""The commands: arguments in, one call of a room, lines out. No arithmetic lives here.

In: sys.argv. Out: text or JSON, exit status 0 / 1 / 2 (done, a check failed, bad input).
Door: `main.main`; `main.COMMANDS` lists them all.
"""

MSGSPEC = "pip install 'msgspec>=0.20,<0.23', or its wheel"  # what a machine needs that does no more than measure
