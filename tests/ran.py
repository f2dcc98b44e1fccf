"""One run of a candidate, as tests look at what it leaves."""

from kernels.common import Candidate, Tensors, Workload
from lab.check import accuracy, families


def run_once(family: families.Family, candidate: Candidate, workload: Workload, inputs: Tensors) -> Tensors:
    """Run a candidate once on `inputs` into fresh outputs and return them."""
    own = accuracy.outputs(family, candidate, workload, inputs)
    candidate.run(accuracy.prepared(family, candidate, inputs), accuracy.handed(own))
    return own
