"""`python -m lab`: the same as the command `lab`."""

import sys

from lab.cli.main import main

if __name__ == "__main__":  # a process that `lab verdicts` starts imports this under another name
    sys.exit(main())
