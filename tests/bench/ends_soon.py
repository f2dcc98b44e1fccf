"""A measuring process that is asked a job while it is on its way out."""

import sys
import time

if __name__ == "__main__":
    sys.stdin.readline()
    time.sleep(0.1)
