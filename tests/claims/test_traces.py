"""The claims of notebooks/traces.py: what its text says of committed figures and rows, held here."""

import numpy as np
import pandas as pd

from lab.card import phases, recorded
from lab.judge import projection
from lab.row import store
from lab.study import attributions
from lab.trace import amdahl, breakdowns, diff, stored, windows
from lab.trace.amdahl import Interval
from lab.trace.model import Copies, Kernels, Trace


def test_claims():
    # What counts as busy
    NAMES = ("gemm_kernel", "splitkv_kernel", "at::cuda::spin_kernel(long)")
    ROWS = [(0, 30, 0, 1), (25, 50, 1, 2), (70, 80, 2, 1), (92, 100, 0, 1)]  # start us, end us, name, stream
    start, end, name, stream = (np.array(column) for column in zip(*ROWS, strict=True))
    toy = Trace(
        tool="invented",
        source="one step",
        names=NAMES,
        gpus={0: "GPU"},
        kernels=Kernels.of(start_ns=start * 1000, end_ns=end * 1000, name=name, stream=stream, device=start * 0),
        memcpy=Copies.of(start_ns=[45_000, 60_000], end_ns=[55_000, 65_000], device=[0, 0], bytes=[1, 1], kind=[8, 1]),
    )
    whole = breakdowns.from_trace(toy)
    assert abs(whole.not_attributed) < 1e-9
    # The decode step that was 99.4 % busy
    decode = breakdowns.from_recorded("a2_dense_npl128_eager")
    claims = {c.id: c for c in attributions.reproduce()}
    assert all(c.agrees == (c.expected == "agrees") for c in claims.values())
    # Whose the gap is
    step = diff.difference(
        breakdowns.from_recorded("explore_postssm_llama-paged_dense_npl128", "ms/step"),
        breakdowns.from_recorded("explore_postssm_vllm_dense_npl128", "ms/step"),
    )
    path, said = step.lines[0], claims["fp4-path-share-of-gap"]
    assert path.share_low <= said.recorded.mid / 100 <= path.share_high
    gap, deltas, _left = (claims[f"prefill-{n}"].ours.mid for n in ("gap", "deltas", "left-over"))
    assert (round(gap, 1), round(deltas, 1)) == (198.9, 195.4)
    # What a faster kernel can give
    base = Interval.of(146.0, 0.5)
    gone = Interval(*[float("inf")] * 3)
    LEVERS = [
        ("state copy removed", ["memcpy"], "lp.patch-0018.gb10.decode-agg.candidate.npl128.npp128"),
        ("copy and gather removed", ["memcpy", "get_rows"], "lp.patch-0019.gb10.decode-agg.candidate.npl128.npp128"),
        ("attention removed", ["attention"], ""),
    ]
    rows = []
    for what, names, figure in LEVERS:
        found = amdahl.project(projection.share(decode, names), gone, base)
        after = recorded.figure(figure).value if figure else None
        rate = found.ceiling_rate
        rows.append(
            {
                "lever": what,
                "share of the step": f"{found.share.mid:.1%}",
                "ceiling tok/s": rate.mid,
                "digits leave": f"{rate.low:.1f} to {rate.high:.1f}",
                "reached tok/s": after,
            }
        )
    ceilings = pd.DataFrame(rows)
    assert [round(v) for v in ceilings["ceiling tok/s"][:2]] == [180, 247]
    copy, both = (recorded.figure(figure).value for _, _, figure in LEVERS[:2])
    assert abs(copy / ceilings["ceiling tok/s"][0] - 1) < 0.01
    assert both > ceilings["ceiling tok/s"][1] * 1.02
    p6 = projection.answer(
        "attention", projection.share(decode, ["attention"]), gone, None, 1.0, projection.needs(phases.card("p6"))
    )
    assert {word for _, word, _ in p6.against} == {"cannot"}
    # Our own profiles
    files = sorted(store.FOLDER.glob("*/*/*/trace.parquet"))
    newest = {(f.parts[-4], f.parts[-3]): f for f in files}

    def arms(file: object) -> dict[str, tuple[str, Trace]]:
        """(workload, the window of its steps) of each arm, at the first workload that both arms have."""
        trace = stored.load(file)
        found = {}
        for label in trace.labels:
            words = label.split("/")
            if len(words) == 3 and words[1] in ("control", "candidate"):
                found.setdefault(words[2], {})[words[1]] = f"{label}/step *"
        both = next((w for w, names in found.items() if len(names) == 2), None)
        return {arm: (both, windows.by_nvtx(trace, glob)) for arm, glob in found.get(both, {}).items()}

    summary, own = [], {}
    for (device, phase), file in newest.items():
        about = stored.about(file)
        own[device, phase] = arms(file)
        for arm, (workload, window) in own[device, phase].items():
            b = breakdowns.from_trace(window, count=window.steps, per="step")
            assert abs(b.not_attributed) < 1e-6 * b.whole
            shown = {
                "phase": phase,
                "device": device,
                "arm": arm,
                "workload": workload,
                "tool": about["tool"],
                "steps": window.steps,
            }
            largest = max((p for p in b.parts if p.category not in ("idle", "overlap")), key=lambda p: p.value)
            summary.append(
                {
                    **shown,
                    "kernels us/step": sum(b.kernels.values()),
                    "span us/step": b.whole,
                    "largest": largest.category,
                }
            )
