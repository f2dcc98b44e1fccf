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

# One thread, here and in the processes that tests start: with two, threads that wait for each other on a busy machine
# spin, and 1,024 steps of small products took 15 s of processor time instead of 0.6 s. More threads would also make a
# float32 sum depend on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

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


# A file (see the Makefile), one for each of xdist's workers: the report of a crash does not end with the test's name.
# Their controller hears of every test too, and would name one that is over.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
RUNNING = os.environ.get("KILLGATE_RUNNING_TEST", "") + (WORKER and f".{WORKER}")


def pytest_configure(config: pytest.Config) -> None:
    global RUNNING
    controls = config.getoption("numprocesses", None) and not WORKER
    if controls or "KILLGATE_RUNNING_TEST" not in os.environ:
        RUNNING = ""


def pytest_runtest_logstart(nodeid: str) -> None:
    if RUNNING:
        os.makedirs(os.path.dirname(RUNNING), exist_ok=True)
        with open(RUNNING, "w") as file:
            file.write(nodeid)


def pytest_sessionfinish() -> None:
    if RUNNING and os.path.exists(RUNNING):
        os.remove(RUNNING)
