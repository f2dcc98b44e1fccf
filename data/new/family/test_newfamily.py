"""newfamily: every candidate against the reference, and a check that sees a wrong one."""

from dataclasses import replace

import pytest

from lab.check import accuracy, families

FAMILY = families.load("newfamily")
SMALL = [w for w in FAMILY.cases.WORKLOADS if w.role == "check"]


@pytest.mark.parametrize("workload", SMALL, ids=lambda w: w.id)
@pytest.mark.parametrize("name", FAMILY.candidates)
def test_agrees_with_the_reference(name: str, workload) -> None:
    found = accuracy.check(FAMILY, FAMILY.candidates[name], workload)
    assert found.status in ("ok", "skipped"), found.message


@pytest.mark.parametrize("workload", SMALL, ids=lambda w: w.id)
def test_a_wrong_kernel_is_seen(workload) -> None:
    right = FAMILY.candidates["torch_mul"]

    def wrong(args, out) -> None:
        right.run(args, out)
        out["y"][-1, -1] = 0 if out["y"][-1, -1] else 1

    assert accuracy.check(FAMILY, replace(right, run=wrong), workload).status == "incorrect"
