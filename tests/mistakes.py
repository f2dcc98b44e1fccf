"""Deliberate mistakes, one by one, and whether a test sees each: `make mistakes`.

tests/mistakes.toml lists them: the file, the text that is there, what a careless hand would have made of it, the test
that must fail, and why it matters. Each is applied to a copy of the checkout, its test is run there, and the text is
put back. A mistake that leaves its test green is named, and the exit status is 1: either the test is too weak, or what
the line does is needed by nobody.

A test that sees its mistake must also pass without it, so all named tests are run on the unchanged copy first. A text
that no longer occurs exactly once is an error that names it: the mistake has to follow the code
(`tests/test_mistakes.py` says so in every `make test`). A mistake that stops the module from being imported proves
nothing and is an error too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from lab.base.errors import BadInput
from lab.base.files import read_toml

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mistakes.toml"
KEYS = {"file", "old", "new", "test", "why"}
LIMIT_S = 300
Found = tuple[str, str]
OPTIONS = ("-x", "-q", "--no-header", "--tb=no", "-rN", "-p", "no:cacheprovider", "-p", "no:xdist")


@dataclass(frozen=True)
class Mistake:
    """One mistake; `test` is one or more ids of pytest, of which one has to fail."""

    file: str
    old: str
    new: str
    test: tuple[str, ...]
    why: str

    def refused(self, root: Path = ROOT) -> str:
        """ "" or why this entry cannot be tried on a checkout."""
        path = root / self.file
        if not path.is_file():
            return f"{self.file} is not there"
        if (count := path.read_text(encoding="utf-8").count(self.old)) != 1:
            return f"{self.file} holds {count} times, not once: {self.old.strip().splitlines()[0]}"
        if self.old == self.new:
            return f"{self.file}: old and new are the same"
        for name in self.test:
            where, *parts = name.split("[")[0].split("::")
            text = (root / where).read_text(encoding="utf-8") if (root / where).is_file() else ""
            if not text or not all(re.search(rf"^\s*(?:def|class) {part}\b", text, re.M) for part in parts):
                return f"no test {name}"
        return ""


def load(path: Path = LIST) -> list[Mistake]:
    """The mistakes of a list; raises BadInput for an entry with other keys."""
    found = []
    for entry in read_toml(path)["mistake"]:
        if entry.keys() != KEYS:
            raise BadInput(path, f"an entry has the keys {', '.join(sorted(entry))}", f"give {', '.join(sorted(KEYS))}")
        tests = entry["test"] if isinstance(entry["test"], list) else [entry["test"]]
        found.append(Mistake(**{**entry, "test": tuple(tests)}))
    return found


def copied(to: Path, root: Path = ROOT) -> Path:
    """A copy of the checkout's files; `profiles`, which is large and which no mistake touches, is a link to ours."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    )
    to.mkdir(parents=True, exist_ok=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if not name.startswith("profiles/") and (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
    (to / "profiles").symlink_to(root / "profiles")
    return to


# A process that has imported what takes longest, and nothing of ours, forks for each run; pytest goes on in the copy.
RUNNER = """
import json, os, signal, sys
import hypothesis, numpy, pandas, pytest, torch
torch.set_num_threads(1)
for line in sys.stdin:
    folder, said, limit_s, arguments = json.loads(line)
    child = os.fork()
    if not child:
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        os.chdir(folder)
        os.setpgid(0, 0)
        sys.path[0], sys.argv = folder, ["pytest", *arguments]
        signal.alarm(limit_s)
        status = 99
        try:
            status = int(pytest.main(arguments))
        finally:
            sys.stdout.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    try:
        os.killpg(child, signal.SIGKILL)  # what a test left behind
    except ProcessLookupError:
        pass
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class Copy:
    """A copy of the checkout and the process that runs tests in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = copied(folder)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "KILLGATE_CACHE": str(ROOT / "build" / "cache")}
        environment.pop("KILLGATE_RUNNING_TEST", None)
        command = [sys.executable, "-c", RUNNER]
        self.runner = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, tests: tuple[str, ...]) -> tuple[str, str]:
        """("passed", "failed" or "error", pytest's last line) of some tests."""
        said = self.folder / "said.txt"
        assert self.runner.stdin
        assert self.runner.stdout
        print(
            json.dumps([str(self.folder), str(said), LIMIT_S, [*OPTIONS, *tests]]), file=self.runner.stdin, flush=True
        )
        status = int(self.runner.stdout.readline() or "99")
        last = (said.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        if status == -signal.SIGALRM:
            return "error", f"no end within {LIMIT_S} s"
        if status == 0 and "passed" in last:  # and not all of them skipped
            return "passed", last
        return ("failed" if status == 1 and "failed" in last else "error"), last

    def close(self) -> None:
        """End the process."""
        assert self.runner.stdin
        self.runner.stdin.close()
        self.runner.wait()


def tried(mistake: Mistake, copy: Copy, number: int) -> tuple[str, str]:
    """("seen", "UNSEEN" or "ERROR", a detail) of one mistake in a copy, which is left as it was."""
    path = copy.folder / mistake.file
    text, times = path.read_text(encoding="utf-8"), path.stat()
    path.write_text(text.replace(mistake.old, mistake.new), encoding="utf-8")
    # Python keeps compiled modules by whole seconds and sizes: each change gets a second of its own.
    os.utime(path, (times.st_atime, int(times.st_mtime) + 10 * (number + 1)))
    try:
        word, last = copy.run(mistake.test)
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return {"failed": "seen", "passed": "UNSEEN"}.get(word, "ERROR"), last


def main(arguments: list[str]) -> int:
    """Try every mistake whose file, test or reason holds all of `arguments`; 0 when each is seen."""
    mistakes = [m for m in load() if all(word in f"{m.file} {' '.join(m.test)} {m.why}" for word in arguments)]
    if refused := [why for m in mistakes if (why := m.refused())]:
        print("\n".join(refused), file=sys.stderr)
        return 2
    if not mistakes:
        print(f"killgate: no mistake of {LIST.relative_to(ROOT)} holds {' '.join(arguments)}", file=sys.stderr)
        return 2
    began = time.monotonic()
    workers = min(os.cpu_count() or 1, len(mistakes))
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(workers) as pool:
        copies = [Copy(Path(temporary) / str(number)) for number in range(workers)]
        free: SimpleQueue[Copy] = SimpleQueue()
        for copy in copies:
            free.put(copy)

        def with_copy(work: Callable[[Copy], Found]) -> tuple[Found, float]:
            copy, start = free.get(), time.monotonic()
            try:
                return work(copy), time.monotonic() - start
            finally:
                free.put(copy)

        tests = sorted({name for m in mistakes for name in m.test})
        shares = [tuple(tests[i :: 2 * workers]) for i in range(min(2 * workers, len(tests)))]
        alone = pool.map(lambda share: with_copy(lambda copy: copy.run(share)), shares)
        if broken := [last for (word, last), _ in alone if word != "passed"]:
            print(f"killgate: without any mistake the tests say: {'; '.join(broken)}", file=sys.stderr)
            return 2
        found = []
        tries = pool.map(lambda one: with_copy(lambda copy: tried(one[1], copy, one[0])), enumerate(mistakes))
        for mistake, ((word, detail), seconds) in zip(mistakes, tries, strict=True):
            found.append(word)
            more = "" if word == "seen" else f"  {detail}\n  - {mistake.old.strip()}\n  + {mistake.new.strip()}"
            print(f"{word:6} {seconds:5.1f} s  {mistake.file:30} {mistake.why}{more}", flush=True)
        for copy in copies:
            copy.close()
    missed = len(found) - found.count("seen")
    print(f"{len(found)} mistakes, {found.count('seen')} seen, {missed} not, {time.monotonic() - began:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BadInput as error:
        sys.exit(f"killgate: {error}")
