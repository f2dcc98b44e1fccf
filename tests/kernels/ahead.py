"""A family's Triton builds, compiled ahead of time for several targets in one process, Triton's interpreter off.

One process, since a new one spends 2 s on the import of torch and Triton. sm_121 is compiled as far as it can
differ from sm_120: Triton is one backend to both, so each @triton.jit function is built once for sm_121 and must give
sm_120's PTX, all but its .target line, and its registers. Where that holds and a candidate declares the same builds for
both, the others are taken from sm_120; where it does not, that is an error, and everything has to be compiled twice.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TARGETS = (80, 90, 100, 120, 121)
TWINS = {121: 120}


def rows(family: str) -> list[dict[str, Any]]:
    """candidate, build, target and what `lab.check.aot_worker.compile_triton` says, for every build and target."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.ahead", family]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main(name: str) -> None:
    """Print a JSON line for each build and target."""
    import triton

    from lab.check import families
    from lab.check.aot_worker import compile_triton

    ptx: list[str] = []
    compile_one = triton.compile

    def watched(*given: Any, **named: Any) -> Any:
        made = compile_one(*given, **named)
        # Debug sections follow the code and name the checkout that Triton's cache has it from.
        code = made.asm["ptx"].partition("\n\t.file\t")[0]
        ptx.append(re.sub(r"^\.target .*$", "", code, flags=re.M))
        return made

    triton.compile = watched
    made: dict[tuple[str, str, int], tuple[dict[str, Any], str]] = {}
    for target in TARGETS:
        twin, compared = TWINS.get(target, 0), set()
        for candidate in families.load(name).candidates.values():
            if candidate.needs.capability > divmod(target, 10):
                continue
            builds = candidate.builds(target)
            alike = bool(twin) and builds == candidate.builds(twin)
            for build in builds:
                if families.version_tuple(triton.__version__) < families.version_tuple(build.needs_triton):
                    continue
                key = candidate.name, build.label, target
                of_twin = made.get((*key[:2], twin))
                if alike and of_twin and build.kernel in compared:
                    made[key] = of_twin
                else:
                    made[key] = compile_triton(build, target), ptx[-1]
                    if alike and of_twin:
                        compared.add(build.kernel)
                        assert made[key] == of_twin, f"{key}: not as for sm_{twin}; compile both in full"
                print(json.dumps({"candidate": key[0], "build": key[1], "target": target, **made[key][0]}))


if __name__ == "__main__":
    main(sys.argv[1])
