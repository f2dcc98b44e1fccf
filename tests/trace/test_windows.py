"""Windows: by time, NVTX range, graph replay, and the steady decode; each with what must not leak into it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.cli import main
from lab.trace import breakdowns, steady
from lab.trace.files import read
from lab.trace.intervals import merged
from lab.trace.model import Kernels, Trace
from lab.trace.steady import find_steps, steady_decode
from lab.trace.summary import summarise
from lab.trace.windows import by_nvtx, by_replay, by_time, clip, only
from tests.loops import numbered, over
from tests.refused import refused
from tests.trace.nsys_synthetic import Export, decode, decoded, global_pid
from tests.trace.test_readers import REAL, unpacked
from tests.trace.test_summary import SPIN, held


def names_in(t: Trace) -> list[str]:
    return [t.names[i] for i in t.kernels.name]


def decoding(steps: int = 8, layers: int = 6, prefill_at: int | None = None) -> Export:
    """Start-up, a prefill, then decode steps of 1 ms: embed, layers of (norm, gemv, attention), sample; then a rest."""
    export = Export()
    export.kernel("void at::native::FillFunctor<float>", 0, 900_000)
    for i in range(40):
        export.kernel("gemm_prefill", 1_000_000 + i * 10_000, 1_009_000 + i * 10_000)
    at = 2_000_000
    for step in range(steps):
        if step == prefill_at:
            for i in range(30):
                export.kernel("gemm_prefill", at + i * 10_000, at + 9_000 + i * 10_000)
            at += 400_000
        sequence = ["embed", *["norm", "gemv", "attention"] * layers, "sample"]
        for i, name in enumerate(sequence):
            export.kernel(name, at + i * 10_000, at + i * 10_000 + 8_000 + step)
        export.memory("MEMCPY", at + 300_000, at + 310_000, bytes=4, copyKind=2, streamId=13)
        at += 1_000_000
    export.kernel("shutdown", at, at + 5)
    return export


# Time ----------------------------------------------------------------------------------------------------------------


def test_time_cuts_at_the_edges() -> None:
    export = Export()
    export.kernel("a", 5_000, 6_000)
    export.kernel("b", 7_000, 9_000)
    export.memory("MEMCPY", 9_500, 9_600, bytes=1, copyKind=1)
    t = by_time(export.trace(), 0.5, 3)
    s = held(summarise(t))
    assert (s["span_us"], s["kernel_sum_us"], s["idle_us"]) == (2.5, 1.5, 1.0)
    assert any("2 rows cross an edge" in w for w in s["warnings"])
    assert s["memcpy"]["HtoD"]["count"] == 0
    assert s["window"] == "0.5 to 3 us"


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 20)), max_size=10),
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 20)), min_size=1, max_size=4),
)
def test_clip_keeps_exactly_what_is_inside(rows: list[tuple[int, int]], windows: list[tuple[int, int]]) -> None:
    columns = {"start_ns": [a for a, _ in rows], "end_ns": [a + n for a, n in rows], "name": [0] * len(rows)}
    t = Trace("synthetic", "generated", kernels=Kernels.of(**columns if rows else {}), names=["a"])
    spans = merged(np.array([a for a, _ in windows]), np.array([a + n for a, n in windows]), is_sorted=False)
    part = clip(t, spans, "test")
    inside = np.zeros(200, bool)
    for a, b in zip(spans.start, spans.end, strict=True):
        inside[a:b] = True
    assert int(part.kernels.duration_ns.sum()) == sum(int(inside[a : a + n].sum()) for a, n in rows)
    assert (np.diff(part.kernels.start_ns) >= 0).all()
    held(summarise(part))


@over(numbered([(5, 5), (6, 5), (1000, 2000)]))
def test_time_refuses(start_us: float, end_us: float) -> None:
    export = Export()
    export.kernel("a", 0, 1000)
    with refused("--time", f"{start_us}:{end_us}"):
        by_time(export.trace(), start_us, end_us)


def test_a_window_does_not_truncate_launches() -> None:
    """A replay that the window's edge cuts is not one that the capture cut."""
    s = held(summarise(by_time(decoded(400, 100), 500, 4000)))
    assert s["graph_launches"] == 2
    assert s["graph_launches_truncated"] == 0


# NVTX ----------------------------------------------------------------------------------------------------------------


def ranged() -> Export:
    """Two decode ranges on one thread, one on another, with kernels that run long after their range ended."""
    export = Export()
    for i, (label, thread) in enumerate((("decode_0", 1), ("decode_1", 1), ("prefill", 1), ("decode_2", 2))):
        tid = global_pid(4242) | thread
        export.nvtx(label, i * 100, i * 100 + 50, globalTid=tid)
        export.call("cudaLaunchKernel_v7000", i * 100 + 10, i * 100 + 20, i + 1, thread=thread)
        export.kernel(f"k{i}", 10_000 + i * 100, 10_050 + i * 100, correlationId=i + 1)
    # On another thread, inside decode_0's time; and the same correlation number in another process.
    export.call("cudaLaunchKernel_v7000", 12, 15, 50, thread=9)
    export.kernel("other_thread", 10_020, 10_040, correlationId=50, streamId=8)
    export.kernel("other_process", 10_010, 10_020, correlationId=1, globalPid=global_pid(4243), streamId=8)
    return export


@over(
    numbered(
        [
            ("decode_1", None, ["k1"], 1),
            ("decode_*", None, ["k0", "k1", "k3"], 3),
            ("decode_*", 2, ["k1"], 1),
            ("decode_*", -1, ["k3"], 1),
            ("prefill", None, ["k2"], 1),
        ]
    )
)
def test_nvtx(pattern: str, nth: int | None, wanted: list[str], steps: int) -> None:
    """By the launching call's thread and process, never by comparing device times with the range."""
    t = by_nvtx(ranged().trace(), pattern, nth)
    assert (names_in(t), t.steps) == (wanted, steps)
    s = held(summarise(t))
    assert s["span_us"] == pytest.approx(0.05 * steps)
    assert not any("others launched" in w for w in s["warnings"]), "it ran beside k0, not while the window was idle"


def test_nvtx_says_for_how_long_others_used_its_idle_time() -> None:
    """Two kernels of the range with 60 ns between them, of which the kernel of another thread took 30."""
    export = Export()
    tid = global_pid(4242) | 1
    export.nvtx("step", 0, 50, globalTid=tid)
    for i, (start, thread) in enumerate(((1_000, 1), (1_070, 9), (1_110, 1))):
        export.call("cudaLaunchKernel_v7000", 10 + i, 11 + i, i + 1, thread=thread)
        export.kernel(f"k{i}", start, start + (50 if thread == 1 else 30), correlationId=i + 1, streamId=7 + thread)
    assert [w for w in by_nvtx(export.trace(), "step").warnings if "0.030 us" in w]


def test_nvtx_start_end_ranges_span_threads() -> None:
    export = Export()
    export.nvtx("request", 0, 100, eventType=60, endGlobalTid=global_pid(4242) | 5)
    export.call("cudaLaunchKernel_v7000", 10, 20, 1, thread=7)
    export.call("cudaLaunchKernel_v7000", 10, 20, 2, process=4243)
    export.kernel("mine", 500, 600, correlationId=1)
    export.kernel("other process", 500, 600, correlationId=2, globalPid=global_pid(4243))
    assert names_in(by_nvtx(export.trace(), "request")) == ["mine"]


def test_nvtx_nested_ranges_are_one_instance() -> None:
    export = Export()
    export.nvtx("step", 0, 100)
    export.nvtx("step", 10, 30)
    export.call("cudaLaunchKernel_v7000", 15, 20, 1)
    export.kernel("a", 500, 600, correlationId=1)
    t = by_nvtx(export.trace(), "step")
    assert (len(t.kernels), t.steps) == (1, 1)


def test_nvtx_graph_replays_belong_to_their_launch() -> None:
    export = Export()
    export.nvtx("decode", 0, 100)
    export.call("cudaGraphLaunch_v10000", 10, 20, 1)
    for i in range(5):
        export.kernel("node", 500 + i * 10, 505 + i * 10, correlationId=1, graphNodeId=i + 1)
    export.kernel("before", 20, 30, correlationId=99)
    assert len(by_nvtx(export.trace(), "decode").kernels) == 5


@over(
    numbered(
        [
            ("decod_1", None, "--nvtx", "decod_1", "decode_1"),
            ("zzz*", None, "--nvtx", "zzz*", ""),
            ("decode_*", 4, "--nth", "4 of 3", ""),
            ("decode_*", 0, "--nth", "0 of 3", ""),
        ]
    )
)
def test_nvtx_refuses(pattern: str, nth: int | None, where: str, words: str, remedy: str) -> None:
    with refused(where, words, remedy=remedy):
        by_nvtx(ranged().trace(), pattern, nth)


def test_nvtx_without_launches_or_calls() -> None:
    export = Export()
    export.nvtx("idle", 0, 100)
    export.kernel("a", 500, 600, correlationId=1)
    with refused("a.sqlite", "API calls", remedy="--trace=cuda,nvtx"):
        by_nvtx(export.trace(), "idle")
    export.call("cudaLaunchKernel_v7000", 200, 210, 1)
    with refused("--nvtx", '"idle"'):
        by_nvtx(export.trace(), "idle")


def test_nvtx_names_are_taken_as_printed() -> None:
    """PyTorch numbers its labels; the list shows them without, with where they began for --time."""
    export = Export()
    for i in range(2):
        export.nvtx(f"aten::mm, op_id = {i}", i * 100, i * 100 + 50)
        export.call("cudaLaunchKernel_v7000", i * 100 + 10, i * 100 + 20, i + 1)
        export.kernel("a", 1000 + i * 100, 1050 + i * 100, correlationId=i + 1)
    s = summarise(export.trace())
    assert [(n.name, n.count, n.first_us, n.gpu_us) for n in s.nvtx] == [("aten::mm", 2, -1.0, 0.1)]
    assert by_nvtx(export.trace(), s.nvtx[0].name).steps == 2


def test_nvtx_of_another_process_and_of_graphs_is_taken_by_time() -> None:
    export = Export(mode="Graph")
    export.nvtx("request", 1000, 2000, globalTid=global_pid(99) | 1)
    export.call("cudaGraphLaunch_v10000", 10, 20, 1)
    export.memory("GRAPH_TRACE", 1500, 2500, graphId=4, graphExecId=4, correlationId=7)
    t = by_nvtx(export.trace(), "request")
    assert (t.windows_ns, len(t.graphs)) == (((1000, 2000),), 1)
    assert any("while it was open" in w for w in t.warnings)


def test_gpu_time_by_range_total_and_self() -> None:
    """Nested ranges: total counts a launch once for a label, also where it nests in itself; self in the innermost."""
    export = Export()
    for label, start, end in (("outer", 0, 100), ("inner", 20, 60), ("inner", 30, 50), ("outer", 200, 260)):
        export.nvtx(label, start, end)
    for i, at in enumerate((10, 25, 40, 70, 210, 300)):
        export.call("cudaLaunchKernel_v7000", at, at + 2, i + 1)
        export.kernel("k", 1000 + i * 100, 1010 + i * 100, correlationId=i + 1)
    found = {n.name: (n.gpu_us, n.self_us) for n in summarise(export.trace()).nvtx}
    assert found == {"outer": (0.05, 0.03), "inner": (0.02, 0.02)}


# Replays -------------------------------------------------------------------------------------------------------------


@over(numbered([(1, 0), (2, 1000), (-1, 2000)]))
def test_replay(n: int, start: int) -> None:
    """The n-th launch of the graph with the most time; eager work inside its interval is not in it, and is said."""
    export = Export()
    for i in range(3):
        for node in range(4):
            at = i * 1000 + node * 100
            export.kernel(f"n{node}", at, at + 90, graphNodeId=node + 1, graphId=3, correlationId=i + 1)
        export.kernel("small", i * 1000 + 600, i * 1000 + 610, graphNodeId=9, graphId=4, correlationId=i + 10)
        export.kernel("eager", i * 1000 + 50, i * 1000 + 95, correlationId=i + 30, streamId=8)
    t = by_replay(export.trace(), n)
    assert names_in(t) == ["n0", "n1", "n2", "n3"]
    assert t.windows_ns == ((start, start + 390),)
    s = held(summarise(t))
    # Of the eager 45 ns, 40 lie beside a kernel of the replay and 5 where the replay itself left the device idle.
    assert any(w.startswith("for 0.005 us of the window's idle time") for w in s["warnings"])
    assert (s["graph_launches"], s["steps"]) == (1, 1)
    assert names_in(by_replay(export.trace(), n, graph=4)) == ["small"]


def test_replay_of_an_opaque_graph_stays_opaque(tmp_path: Path) -> None:
    t = by_replay(read(unpacked("graph_mode_2025.5.2.sqlite", tmp_path)), 2)
    s = held(summarise(t))
    assert (len(t.graphs), len(t.kernels), s["opaque_graph_us"]) == (1, 0, 1.376)
    assert s["refused"]


def test_truncated_replay_is_a_lower_bound() -> None:
    export = Export()
    for i in range(3):
        for node in range(4 if i < 2 else 1):
            export.kernel("n", i * 1000 + node * 10, i * 1000 + node * 10 + 5, graphNodeId=node + 1, correlationId=i)
    t = export.trace()
    assert any("1 of 4 nodes" in w for w in by_replay(t, -1).warnings)
    assert not any("nodes" in w for w in by_replay(t, 1).warnings)


@over(numbered([(0, None, "--replay", "0 of 4"), (5, None, "--replay", "5 of 4"), (1, 77, "--graph", "77")]))
def test_replay_refuses(n: int, graph: int | None, where: str, words: str) -> None:
    with refused(where, words):
        by_replay(decoded(400, 100), n, graph)


def test_no_graph_no_replay() -> None:
    with refused("vllm_eager_b200.json.gz", "graph"):
        by_replay(read(REAL / "vllm_eager_b200.json.gz"), 1)


# Steady decode -------------------------------------------------------------------------------------------------------


def test_steady_decode_finds_the_steps() -> None:
    """The step, not the layer that repeats within it; no start-up, prefill or shutdown."""
    t = steady_decode(decoding().trace())
    s = held(summarise(t))
    assert set(names_in(t)) == {"embed", "norm", "gemv", "attention", "sample"}
    assert names_in(t)[0] == "embed", "a step begins after the wait between steps"
    assert t.steps == 7, "eight steps; the last has no next one to end it"
    assert s["span_us"] == 7000
    assert s["kernel_count"] == 7 * 20
    assert s["memcpy"]["DtoH"]["count"] == 7


def test_prefill_between_steps_is_left_out() -> None:
    t = steady_decode(decoding(steps=12, prefill_at=5).trace())
    assert "gemm_prefill" not in names_in(t)
    assert t.windows_ns is not None
    assert [b - a for a, b in t.windows_ns] == [4_000_000, 6_000_000], "two stretches, each less its last step"
    assert t.steps == 10


def test_prefill_beside_a_step_is_left_out() -> None:
    """On another stream it does not break the sequence, so the step's device time has to give it away."""
    export = decoding(steps=10)
    export.kernel("gemm_prefill", 5_020_000, 5_600_000, streamId=21)
    t = steady_decode(export.trace())
    assert "gemm_prefill" not in names_in(t)
    assert t.steps == 8
    assert any("1 of 9 repeating steps" in w for w in t.warnings)


def test_a_pause_is_no_step() -> None:
    export = Export()
    for step in range(9):
        at = step * 1000 + (50_000 if step > 4 else 0)
        export.kernel("a", at, at + 300)
        export.kernel("b", at + 400, at + 600)
    t = steady_decode(export.trace())
    assert t.steps == 7
    assert summarise(t).span_us == 7.0


def test_steps_without_a_unique_kernel() -> None:
    """No name comes again after exactly one step; only pairs of launches do."""
    export = Export()
    for step in range(10):
        for i, name in enumerate("abcacb"):
            export.kernel(name, step * 1000 + i * 100, step * 1000 + i * 100 + 50)
    t = export.trace()
    steps = find_steps(t)
    assert (steps.end - steps.start).tolist() == [1000] * 9


def test_steps_of_a_long_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates from pieces of the capture, the steps from all of it."""
    monkeypatch.setattr(steady, "PIECE", 500)
    steps = find_steps(decoded(63 * 100, 100))
    assert len(steps.start) == 62
    assert len(set((steps.end - steps.start).tolist())) == 1


def test_opaque_graphs_have_steps() -> None:
    export = Export(mode="Graph")
    for i in range(6):
        export.memory("GRAPH_TRACE", i * 1000, i * 1000 + 800, graphId=4, graphExecId=4, correlationId=i)
        export.kernel("sample", i * 1000 + 850, i * 1000 + 900)
    t = steady_decode(export.trace())
    s = held(summarise(t))
    assert (t.steps, s["graph_launches"], s["kernel_count"]) == (5, 5, 5)
    assert s["refused"]


def eager(layers: int, **last: str) -> Export:
    """One forward pass of layers of four launches, eager, after an embedding; `last` ends it."""
    export = Export()
    for i, name in enumerate(["embed", *["norm", "gemm", "attention", "mlp"] * layers, *last]):
        export.kernel(name, i * 100, i * 100 + 80)
    return export


def test_layers_are_no_decode_steps() -> None:
    """An eager prefill repeats its layers and samples once; a captured step's layers lie in one replay."""
    t = steady_decode(eager(15, sample="").trace())
    assert (t.steps, t.unit) == (14, "unit")
    assert t.window_label.startswith("repeating unit, 14 units of 4 launches")
    assert any("--step" in w for w in t.warnings)
    export = Export()
    for i in range(60):
        export.kernel("abcd"[i % 4], i * 100, i * 100 + 80, graphId=3, graphNodeId=i + 1, correlationId=1)
    with refused("a.sqlite", "3 times"):
        steady_decode(export.trace())


def test_piecewise_graphs_are_no_steps_until_something_samples() -> None:
    """Each layer one replay and one eager kernel: the unit is a layer, unless a step is told by what ends it."""
    found = []
    for last, graphs in (("", 8), ("", 1), ("sampling_kernel", 8)):  # each layer's own, or one that all replay
        export = Export()
        for i in range(48):
            node = i % graphs + 1
            at, ids = i * 1000, {"graphId": node, "graphNodeId": node, "correlationId": i + 1}
            export.kernel("piece", at, at + 900, **ids)
            export.kernel(last if last and i % 8 == 7 else "attention", at + 900, at + 950)
        found.append(steady_decode(export.trace()))
    *before, t = found
    assert [one.unit for one in before] == ["unit", "unit"]
    assert (t.steps, t.unit) == (5, "step")
    assert "sampling_kernel" in t.window_label


def test_steps_by_ranges_and_by_the_users_word() -> None:
    """Steps whose launches differ repeat nothing: NVTX ranges named after them say where they begin."""
    export = Export()
    for step in range(6):
        for i in range(3 + step % 2):
            number = step * 10 + i + 1
            export.call("cudaLaunchKernel_v7000", number * 10, number * 10 + 5, number)
            export.kernel(f"k{step}_{i}", 10_000 + step * 1000 + i * 100, 10_050 + step * 1000 + i * 100,
                          correlationId=number)  # fmt: skip
        export.nvtx(f"decode step {step}", step * 100, step * 100 + 99)
        export.nvtx("other", step * 100, step * 100 + 99)
    t = steady_decode(export.trace())
    assert (t.steps, t.unit) == (5, "step")
    assert "NVTX" in t.window_label
    asked = steady_decode(export.trace(), "nvtx:other")
    assert asked.windows_ns == t.windows_ns
    assert steady_decode(eager(12).trace(), "kernel:^gemm$").steps == 11
    for word, where in (
        ("kernel:zzz", "a.sqlite"),
        ("layer", "--step"),
        ("kernel:[", "--step"),
        ("graph:9", "a.sqlite"),
    ):
        with refused(where):
            steady_decode(eager(12).trace(), word)


def test_graphs_by_the_users_word() -> None:
    t = steady_decode(decoded(63 * 100, 100), "graph")
    assert (t.steps, t.unit) == (62, "step")
    assert steady_decode(decoded(63 * 100, 100), "graph:3").windows_ns == t.windows_ns


# Graphs ---------------------------------------------------------------------------------------------------------------


def test_the_only_launch_that_ends_with_the_capture_may_be_cut() -> None:
    """Nothing ran or was called after it; a host that synchronised afterwards saw its end."""
    for synced in (False, True):
        export = Export()
        export.kernel("eager", 0, 100, correlationId=1)
        export.call("cudaLaunchKernel_v7000", 0, 10, 1)
        export.call("cudaGraphLaunch_v10000", 20, 30, 2)
        for i in range(5):
            export.kernel("node", 500 + i * 100, 590 + i * 100, graphId=3, graphNodeId=i + 1, correlationId=2)
        if synced:
            export.call("cudaStreamSynchronize_v3020", 40, 1200, 3)
        s = summarise(export.trace())
        assert s.graph_launches_truncated == (not synced)
        assert any("graph 3" in w for w in s.warnings) == (not synced)
        assert any("edge" in w for w in by_replay(export.trace(), 1).warnings) == (not synced)


def test_startup_spin_and_sync_do_not_make_the_window_busy() -> None:
    export = decoding()
    export.kernel(SPIN, 4_500_000, 4_900_000, streamId=30)
    export.memory("SYNCHRONIZATION", 2_000_000, 9_000_000, syncType=3, eventId=0)
    s = held(summarise(steady_decode(export.trace())))
    # 20 kernels of 8 us and a copy of 10 us a step; steps grow by 1 ns a kernel. One step held the spin and is out.
    assert s["busy_union_us"] / s["steps"] == pytest.approx(170.0, rel=1e-3)
    assert s["startup"] is None


def test_nothing_repeats() -> None:
    for kernels in (1, 75):
        export = Export()
        for i in range(kernels):
            export.kernel(f"k{i}", i, i + 1)
        with refused("a.sqlite", "3 times", remedy="window"):
            steady_decode(export.trace())


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = decode(tmp_path / "a.sqlite", 63 * 400, per_step=400)
    for arguments, line in (
        (["--steady"], "steady decode, 62 steps of 440 launches (each one replay of graph 3)"),
        (["--replay", "-1"], "replay -1 of graph 3"),
        (["--time", "1ms:2.5ms"], "1000 to 2500 us"),
    ):
        assert main.main(["trace", str(path), *arguments]) == 0
        assert line in capsys.readouterr().out, f"lab trace {' '.join(arguments)}"


# Several devices -----------------------------------------------------------------------------------------------------


def stepping(path: Path, devices: int, late_us: int = 0) -> Path:
    """Ten ranges `step` a device, each with an attention of 100 us and an all-reduce that may reach into the next."""
    events: list[dict[str, Any]] = []
    for device in range(devices):
        for i in range(10):
            at, host = 200 * i + 10 * device, {"ph": "X", "pid": 7, "tid": device, "ts": 200 * i}
            events.append({**host, "cat": "user_annotation", "name": "step", "dur": 5})
            for number, (name, stream, begin, us) in enumerate(
                (("flash_fwd_kernel", 1, at, 100), ("ncclDevKernel_AllReduce", 2, at + 100, 60 + late_us * (i % 2)))
            ):
                launch = 1 + number + 2 * (i + 10 * device)
                args = {"device": device, "stream": stream, "correlation": launch}
                events.append(
                    {
                        **host,
                        "cat": "cuda_runtime",
                        "name": "cudaLaunchKernel",
                        "dur": 1,
                        "args": {"correlation": launch},
                    }
                )
                events.append(
                    {
                        "ph": "X",
                        "cat": "kernel",
                        "name": name,
                        "pid": device,
                        "tid": stream,
                        "ts": begin,
                        "dur": us,
                        "args": args,
                    }
                )
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


@pytest.mark.parametrize("step", ["nvtx:step", "kernel:^flash"])
@pytest.mark.parametrize(("devices", "late_us"), [(1, 0), (1, 60), (2, 0), (2, 60)])
def test_a_step_is_of_all_devices_and_begins_once(step: str, devices: int, late_us: int, tmp_path: Path) -> None:
    """Marks of one device alone, and instances that overlap on it are as many steps as they are."""
    found = summarise(steady_decode(read(stepping(tmp_path / "a.json", devices, late_us)), step))
    assert found.steps == 9  # the last has no end
    attention = next(c for c in found.categories if c.name == "attention")
    assert attention.us_per_step == pytest.approx(100.0 * devices, rel=0.02)


def test_what_one_device_does_is_no_idle_time_of_another(tmp_path: Path) -> None:
    """Device 1 begins 10 us later: its windows are its own, and nothing in them is idle."""
    found = summarise(window := by_nvtx(read(stepping(tmp_path / "a.json", 2)), "step"))
    assert [(d.span_us, d.idle_us) for d in found.per_device] == [(10 * 160.0, 0.0)] * 2
    assert found.span_us == 10 * 170.0
    assert not [line for line in found.warnings if "what others launched" in line]
    parts = {part.category: part.value for part in breakdowns.from_trace(window, count=10.0, per="step").parts}
    assert parts[breakdowns.IDLE] == 0.0
    assert sum(parts.values()) == 2 * 160.0


def test_host_time_is_of_the_window(tmp_path: Path) -> None:
    """A tenth of the steps has a tenth of their calls and ranges; work across an edge counts with the part inside."""
    trace = read(stepping(tmp_path / "a.json", 1))
    whole, tenth, cut = summarise(trace), summarise(by_time(trace, 200, 400)), summarise(by_time(trace, 203, 400))
    assert [(c.count, c.sum_us) for c in (*whole.api, *tenth.api, *cut.api)] == [(20, 20.0), (2, 2.0)]
    assert [(r.count, r.host_us) for r in (*whole.nvtx, *tenth.nvtx, *cut.nvtx)] == [(10, 50.0), (1, 5.0), (1, 2.0)]
    ranges = summarise(by_nvtx(trace, "step", 3))
    assert [(r.name, r.count, r.host_us) for r in ranges.nvtx] == [("step", 1, 5.0)]
    assert [(c.count, c.sum_us) for c in ranges.api] == [(2, 2.0)]


def test_host_time_is_of_the_process() -> None:
    export = Export()
    for process in (7, 8):
        for i in range(process):
            export.call("cudaLaunchKernel_v7000", 100 * i, 100 * i + 10, 1 + i, process=process)
            export.kernel("k", 100 * i + 20, 100 * i + 40, correlationId=1 + i, globalPid=global_pid(process))
    for process in (7, 8):
        found = summarise(only(export.trace(), process=[process]))
        assert [(c.name, c.count) for c in found.api] == [("cudaLaunchKernel", process)]
