"""The claims of notebooks/measuring.py: what its text says of committed figures and rows, held here."""

from lab.base import devices
from lab.bench import crosscheck
from lab.place import ceilings
from lab.study import repeats


def test_claims():
    # Can the clock be trusted?
    DEVICE = devices.get("h200")
    # Ceilings
    known = ceilings.latest(DEVICE.id)
    sheet = {"copy_kernel": "memory_bandwidth", "read": "memory_bandwidth", "write": "memory_bandwidth"}
    sheet |= {pipe: f"peak.{pipe}" for pipe in ("bf16", "fp8", "int8")}
    UNIT = {"GB/s": 1e9, "TFLOP/s": 1e12, "TOP/s": 1e12}
    for name, found in known.items():
        if name in sheet:
            assert found.value * UNIT[found.unit] <= DEVICE.fact(sheet[name]).base, f"{name} beats the datasheet"
    if {"copy_kernel", "copy_graph", "read", "write"} <= known.keys():
        assert known["copy_graph"].value < known["copy_kernel"].value < known["read"].value
    # The clock against two others
    checked = crosscheck.latest(DEVICE.id)
    timed = [row for row in checked if row.status == "ok"]
    for row in timed:
        again = crosscheck.verdict(row.graph_us, row.gap_us, row.kernels_per_call, row.kineto_us)
        assert again["within"] == row.within
    # The same comparison again. Under the power cap two arms of different appetite are slowed differently from run to
    # run: shown, not asserted.
    again = repeats.repeated(DEVICE.id)
    assert again
    assert [r for r in again if r.us > 20 and not r.throttled and r.difference_pct >= 1] == []
    assert all(f.us > 0 for f in repeats.floors(DEVICE.id))
