"""Cost in rows, small enough for CI (at most 100,000 kernels); the large runs are `make bench`."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.trace.files import read
from lab.trace.summary import Moved, summarise
from tests.trace.bench_traces import ROWS
from tests.trace.nsys_synthetic import decode

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decode(tmp_path_factory.mktemp("speed") / "l.sqlite", 100_000)


def cpu_s(path: Path) -> float:
    """Processor time of reading and summing up, the least of three."""
    runs = []
    for _ in range(3):
        begin = time.process_time()
        summarise(read(path))
        runs.append(time.process_time() - begin)
    return min(runs)


@pytest.mark.slow
def test_cost_is_linear_in_rows(large: Path, tmp_path: Path) -> None:
    """Five times the rows may cost five times the time, not 25; half again as much is the machine's share."""
    small = decode(tmp_path / "s.sqlite", 20_000)
    cpu_s(small)  # imports and first calls
    assert cpu_s(large) < 7.5 * cpu_s(small) + 0.1


def test_summary_of_100k_rows_is_right(large: Path) -> None:
    """The synthetic file's own arithmetic: 125 replays of the same 800 kernels and 80 copies, and every join."""
    s = summarise(read(large))
    assert s.holds
    assert (s.kernel_count, s.graph_launches, s.graph_launches_truncated) == (100_000, 125, 0)
    assert s.memcpy["DtoD"] == Moved(count=10_000, bytes=10_000 * 4096, sum_us=10_000 * 0.9)
    assert s.kernels_without_api == 0
    assert [len(s.per_device), len(s.per_stream)] == [1, 2]


def test_committed_rows_keep_the_limits() -> None:
    """bench.jsonl: the newest row of each case, beside pandas reading the same file for its union alone. The wall clock
    of a machine that others use says little; memory and processor time do."""
    newest = {(row["case"], row["what"]): row for row in map(json.loads, ROWS.read_text().splitlines())}
    for case, limit_s, peak_mb in (("nsys:5000000", 6, 1200), ("kineto:300", 10, 1500)):
        ours, plain = newest[case, "lab trace"], newest[case, "pandas"]
        assert ours["peak_mb"] <= min(peak_mb, plain["peak_mb"])
        assert ours["cpu_s"] <= min(limit_s, plain["cpu_s"])
        assert not ours["dirty"]


def test_import_of_the_command_line_is_light() -> None:
    """`lab --help` and every other command must not wait for Arrow or NumPy."""
    heavy = "[m for m in ('numpy', 'pyarrow', 'pandas', 'torch') if m in sys.modules]"
    code = f"import sys, lab.cli.main; lab.cli.main._parser(); print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
