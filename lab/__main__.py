"""`python -m lab`: the same as the command `lab`."""

import sys

from lab.cli.main import main

sys.exit(main())
