"""Rival libraries, one file each: what a user may have installed instead, timed beside ours and never routed to."""

from kernels.common import Workload


def measured_only(workload: Workload) -> str:
    """ "" or why an adapter, which is kept to what is measured, does not take the workload."""
    if workload["dtype"] != "bf16":
        return f"dtype={workload['dtype']}: this adapter is for bf16, the dtype of every measured shape"
    if workload["D"] not in (128, 256):
        return f"D={workload['D']}: this adapter is kept to D = 128 and 256, the head sizes of the measured models"
    return ""
