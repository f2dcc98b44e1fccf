"""What holds of the rows behind every measured verdict of a notebook."""

from lab.base import devices
from lab.card import phases
from lab.judge import evidence
from lab.judge.verdicts import Judgement, judge_measured
from lab.place import roofline
from lab.row import store


def judged_here(card: str, device: str) -> Judgement | None:
    """The verdict on a device's committed rows, None without any."""
    return judge_measured(phases.card(card), device) if device in store.measured_devices(card) else None


def timed_as_judged(phase: str, judgement: Judgement) -> None:
    """Assert that every ok row is slower than its floor, and that GO or NO-GO follows from the changes of the pairs."""
    pairs = evidence.pairs(store.rows(device="h200", phase=phase))
    assert pairs
    for row in (row for pair in pairs.values() for row in pair if row and row.time_us is not None):
        assert roofline.of_row(devices.get("h200"), row).floor_us < row.time_us, row.workload_id
    if judgement.verdict.word in ("GO", "NO-GO"):
        changes = [change for pair in pairs.values() if (change := evidence.change_pct(*pair))]
        assert len(changes) == len(pairs)
        limit = phases.card(phase).gate.require[0].threshold
        assert (judgement.verdict.word == "GO") == all(change <= limit for change, _, _ in changes)
