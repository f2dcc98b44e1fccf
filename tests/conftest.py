"""What must be true before any test module is imported, and nothing else.

Triton reads TRITON_INTERPRET when a kernel is decorated, and its own library is decorated at import: the variable has
to stand before the first `import triton`. pytest configures this file before it collects, so this is the place. A test
that compiles ahead of time needs the variable unset and therefore runs in a subprocess.

The process that hands tests out to others runs none, and they wait for it: it imports neither torch nor hypothesis.
"""

import atexit
import functools
import gc
import importlib
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

# jsonschema, which nbformat brings, builds its grammar of internationalised addresses at import: a second in every
# process, for a format that no notebook has. It does without where there is none.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

# Tests start hundreds of processes, which would compile the same modules each: here Python may keep what it compiled,
# whatever the environment says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What is written stays in the page cache though its writer be killed: no test pulls a plug, and none waits for a disk.
os.fsync = lambda fd: None

# One thread, here and in the processes that tests start: with two, threads that wait for each other on a busy machine
# spin, and 1,024 steps of small products took 15 s of processor time instead of 0.6 s. More threads would also make a
# float32 sum depend on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a test builds, another one needs too, in this run or the next; `make clean` removes it.
os.environ.setdefault("KILLGATE_CACHE", str(Path(__file__).resolve().parent.parent / "build" / "cache"))


def _prepare() -> None:
    """For the processes that import tests."""
    import hypothesis
    import torch

    if not torch.cuda.is_available():
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError(
                "triton was imported before tests/conftest.py could set TRITON_INTERPRET=1; set it yourself"
            )
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)
    # A first call compiles or interprets a kernel: hypothesis's 200 ms deadline would judge the machine, not the code.
    hypothesis.settings.register_profile("killgate", deadline=None)
    hypothesis.settings.load_profile("killgate")
    gc.disable()  # until everything is collected: while modules are imported there is nothing to find


@functools.cache
def _runs_on_cpu(module: Any) -> bool:
    """Whether a test module took anything from tests/kernels/on_cpu."""
    return any(str(getattr(x, "__module__", "")).startswith("tests.kernels.on_cpu") for x in vars(module).values())


def pytest_collection_finish() -> None:
    """Interpret as `lab` does; every module that imports Triton is imported by now.

    Modules and tests are hundreds of thousands of objects that stay: no collection of garbage visits them again. Others
    are visited after 50,000 of them, not 700: an interpreted kernel makes that many in a moment.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        from lab.check import interpreter

        interpreter.quicken()
    if WORKER:
        # Imported so that tests/changed.py does not see it: every test would reach every kernel.
        importlib.import_module(f"{__package__}.described").here()


@pytest.hookimpl(tryfirst=True)  # before the marks are asked for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs a kernel compiled for the CPU, or a notebook's numbers, `slow`; skip `gpu` without a GPU.

    The site's tests come first: a worker steals from the end of another's, and who has one of them makes the site.
    """
    items.sort(key=lambda item: item.path.name != "test_site.py")
    for item in items:
        # The claims compute a notebook's numbers once more.
        if isinstance(item, pytest.Function) and (_runs_on_cpu(item.module) or item.path.parent.name == "claims"):
            item.add_marker(pytest.mark.slow)
    import torch

    if torch.cuda.is_available():
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
    if WORKER:
        # The first to be registered is the last to run: what a worker found was sent, and to free a million objects one
        # by one takes it two seconds, for which the run would wait.
        atexit.register(os._exit, 0)
    if not controls:
        _prepare()
    if controls or "KILLGATE_RUNNING_TEST" not in os.environ:
        RUNNING = ""


def pytest_runtest_logstart(nodeid: str) -> None:
    if RUNNING:
        os.makedirs(os.path.dirname(RUNNING), exist_ok=True)
        with open(RUNNING, "w") as file:
            file.write(nodeid)


# The mark `slow` is what `make quick` leaves out, so it has to be where the time is: processor time, which a busy
# machine does not change, of the test and the processes that it started, its fixtures' included.
LIMIT_S = 3.0
SLOW: list[tuple[float, str]] = []


def _cpu_s() -> float:
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    began = _cpu_s()
    done = yield
    spent = _cpu_s() - began
    if spent > LIMIT_S and not item.get_closest_marker("slow"):
        SLOW.append((spent, item.nodeid))
    return done


def pytest_sessionfinish(session: pytest.Session) -> None:
    if RUNNING and os.path.exists(RUNNING):
        os.remove(RUNNING)
    if WORKER:
        session.config.workeroutput["unmarked"] = SLOW  # type: ignore[attr-defined]
        gc.freeze()  # pytest collects garbage twice more, half a second each, and nobody would hear of what is in it


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker of xdist is done: what it found slow."""
    SLOW.extend(map(tuple, getattr(node, "workeroutput", {}).get("unmarked", ())))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that ought to be marked slow, or made quicker."""
    for spent, name in sorted(SLOW, reverse=True):
        terminalreporter.write_line(f"{name} took {spent:.1f} s of processor time: mark it slow, or make it quicker")
