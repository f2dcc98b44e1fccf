"""What must be true before any test module is imported, and nothing else.

Triton reads TRITON_INTERPRET when a kernel is decorated, and its own library is decorated at import: the variable has
to stand before the first `import triton`. pytest imports this file before it collects, so this is the place. A test
that compiles ahead of time needs the variable unset and therefore runs in a subprocess.
"""

import os
import sys

import hypothesis
import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before tests/conftest.py could set TRITON_INTERPRET=1; set it yourself")
    os.environ.setdefault("TRITON_INTERPRET", "1")

# CI machines have two cores; more threads would also make a float32 sum depend on the machine.
torch.set_num_threads(2)

# A first call compiles or interprets a kernel: hypothesis's 200 ms deadline would judge the machine, not the code.
hypothesis.settings.register_profile("killgate", deadline=None)
hypothesis.settings.load_profile("killgate")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu`, with the reason, where torch sees no CUDA device."""
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason=f"no CUDA GPU: torch {torch.__version__} reports none available")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


# A file (see the Makefile): the report of a crash does not end with the test's name.
RUNNING = os.environ.get("KILLGATE_RUNNING_TEST")


def pytest_runtest_logstart(nodeid: str) -> None:
    if RUNNING:
        os.makedirs(os.path.dirname(RUNNING), exist_ok=True)
        with open(RUNNING, "w") as file:
            file.write(nodeid)


def pytest_sessionfinish() -> None:
    if RUNNING and os.path.exists(RUNNING):
        os.remove(RUNNING)
