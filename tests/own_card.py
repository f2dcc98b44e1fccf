"""The text of a card of one's own, for tests of what is said of one."""


def text(family: str, control: str, candidate: str, workload: str, more: str = "", name: str = "mine") -> str:
    """It asks for -5 % of kernel_us at one workload. more: further lines of its head."""
    return f"""id = "{name}"
title = "t"
question = "q"
hypothesis = "h"
null = "n"
control = "{control}"
candidate = "{candidate}"
workloads = ["{workload}"]
limits = "l"
family = "{family}"
expected = {{ recovery = "10 %", arithmetic = "a guess" }}
{more}
[[gate.require]]
metric = "kernel_us"
compare = "change"
op = "<"
threshold = -5
unit = "%"
workload = "{workload}"
"""
