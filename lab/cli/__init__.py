"""The commands: arguments in, one call of a room, lines out. No arithmetic lives here.

In: sys.argv. Out: text or JSON, exit status 0 / 1 / 2 (done, a check failed, bad input).
Door: `main.main`.
"""
