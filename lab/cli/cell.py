"""What a worker of a cluster runs: `python -m lab.cli.cell PARENT ARGUMENT...`, a `lab` that ends with its parent.

`host` in place of arguments prints what the worker has (lab/bench/cluster.py).
"""

from __future__ import annotations

import importlib.metadata
import sys

import msgspec

from lab.bench import machine
from lab.bench.cluster import Facts
from lab.check import families
from lab.check.child import end_with
from lab.cli.main import main


def host() -> Facts:
    """This machine, its releases and CUDA's first GPU."""
    made = machine.provenance()
    facts = Facts(made, importlib.metadata.version("distributed"))
    if capability := families.gpu_capability():
        gpu = machine.uuid()
        facts = Facts(made, facts.distributed, gpu, "sm_{}{}".format(*capability), machine.users(gpu) is not None)
    return facts


def run(parent: str, *arguments: str) -> int:
    """The command, or `host`."""
    end_with(parent)
    if arguments == ("host",):
        print(msgspec.json.encode(host()).decode())
        return 0
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
