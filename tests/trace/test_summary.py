"""`lab trace`: the numbers of real files, the identities, and each rule of honesty with a trace that would break it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.cli import main
from lab.trace import breakdowns
from lab.trace.categories import OTHER
from lab.trace.files import read
from lab.trace.model import COPY_KINDS, OPAQUE, Copies, Fills, GraphLaunches, Kernels, Trace
from lab.trace.summary import Summary, summarise
from tests.loops import numbered, over
from tests.refused import held as refusal_held
from tests.refused import refused
from tests.trace.nsys_synthetic import Export, global_pid
from tests.trace.test_readers import REAL, unpacked

NEEDED = (
    *("tool", "tool_version", "schema_version", "graph_mode", "gpus", "span_us", "kernel_count", "kernel_sum_us"),
    *("kernel_union_us", "memcpy", "memset", "graph_launches", "opaque_graph_us", "busy_union_us", "idle_us"),
    *("per_device", "per_stream", "categories", "top_kernels", "nvtx", "warnings", "identities"),
)
KINETO = REAL / "vllm_eager_b200.json.gz"
SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"


def summary(export: Export, **options: Any) -> dict[str, Any]:
    """The summary of an export, with every identity holding."""
    return held(summarise(export.trace(), **options))


def held(found: Summary) -> dict[str, Any]:
    """The summary as `--json` prints it, with every identity holding."""
    assert [i for i in found.identities if not i.holds] == []
    assert found.identities
    return found.plain()


def category(s: dict[str, Any], name: str) -> dict[str, Any]:
    return next(c for c in s["categories"] if c["name"] == name)


def warned(s: dict[str, Any], words: str) -> bool:
    return any(words in w for w in s["warnings"])


# Real files: what others counted -------------------------------------------------------------------------------------


def test_two_gpus(tmp_path: Path) -> None:
    s = held(summarise(read(unpacked("two_gpus_2026.2.1.sqlite", tmp_path))))
    assert set(NEEDED) <= set(s)
    assert s["kernel_count"] == 4010
    # Milliseconds in nsys-ai's own notes: span 299.877, sum 535.201, union 285.206.
    assert [round(s[k] / 1e3, 3) for k in ("kernel_span_us", "kernel_sum_us", "kernel_union_us")] == [
        299.877,
        535.201,
        285.206,
    ]
    assert s["kernels_without_api"] == 24, "counted with a LEFT JOIN on process and correlation in SQL"
    assert [(d["device"], d["kernel_count"]) for d in s["per_device"]] == [(0, 1993), (1, 2017)]
    assert s["busy_union_us"] == 287341.472
    assert warned(s, "exceeds the span")
    assert warned(s, "between 2 devices")
    assert s["memcpy"]["DtoD"] == {"count": 986, "bytes": 8046134272, "sum_us": 5665.431}


def test_graph_mode(tmp_path: Path) -> None:
    s = held(summarise(read(unpacked("graph_mode_2025.5.2.sqlite", tmp_path))))
    assert (s["graph_mode"], s["graph_launches"], s["opaque_graph_us"]) == ("graph", 2, 3.104)
    assert s["busy_union_us"] == pytest.approx(3.84 + 3.104 + 0.864)


def test_kineto() -> None:
    s = held(summarise(read(KINETO)))
    # TraceLens's own trace: span, sum and union of kernels in ms.
    assert [round(s[k] / 1e3, 3) for k in ("kernel_span_us", "kernel_sum_us", "kernel_union_us")] == [
        83.366,
        10.863,
        10.794,
    ]
    assert s["kernels_without_api"] == 0
    assert s["busy_union_us"] < 12_000, "the annotation over the device lasts 84 ms and is not busy time"


@over(numbered([("decode_kern_sum.csv",), ("ncu_details.csv",)]))
def test_totals_have_no_timeline(name: str) -> None:
    s = held(summarise(read(REAL / name)))
    assert {s[k] for k in ("span_us", "busy_union_us", "idle_us", "kernel_union_us", "graph_launches")} == {None}
    assert sum(c["share_of_kernel_sum"] for c in s["categories"]) == pytest.approx(1)
    assert {c["share_of_busy"] for c in s["categories"]} == {None}


# Honesty -------------------------------------------------------------------------------------------------------------


def test_opaque_graph_is_not_decomposed() -> None:
    """Decode in graph mode: the kernel table alone would say 3 % busy, and one eager kernel 100 % of the kernels."""
    export = Export(mode="Graph")
    for i in range(10):
        export.memory("GRAPH_TRACE", i * 1000, i * 1000 + 900, graphId=4, graphExecId=4, correlationId=i)
        export.kernel("ncclDevKernel_AllReduce", i * 1000 + 870, i * 1000 + 900, streamId=9)
    s = summary(export)
    assert s["busy_union_us"] == 9.0
    assert (s["graph_launches"], s["opaque_graph_us"], s["kernel_union_us"]) == (10, 9.0, 0.3)
    assert category(s, OPAQUE)["sum_us"] == 9.0
    assert s["refused"]
    assert {k["share_of_kernel_sum"] for k in s["top_kernels"]} == {None}
    assert {c["share_of_kernel_sum"] for c in s["categories"]} == {None}
    assert warned(s, "captured as a whole (100% of busy time)")


def test_graph_mode_without_graphs_refuses_nothing() -> None:
    export = Export(mode="Graph")
    export.kernel("a", 0, 10)
    s = summary(export)
    assert s["refused"] == []
    assert s["top_kernels"][0]["share_of_kernel_sum"] == 1.0


@over(numbered([("2024.6.2.225",), ("2025.6.1.190",)]))
def test_truncated_launches(version: str) -> None:
    """Four launches of a graph of three nodes (a copy among them), one cut short; another graph has two nodes."""
    export = Export(version)
    for launch in range(4):
        for node in range(3 if launch < 3 else 2):
            graph = {"graphNodeId": (6 << 32) + node, "correlationId": launch + 1}
            if version >= "2025" and node < 2:
                graph["graphId"] = 6
            at = launch * 100 + node * 10
            if node == 2:
                export.memory("MEMCPY", at, at + 5, bytes=1, copyKind=8, **{**graph, "graphId": None})
            else:
                export.kernel("a", at, at + 5, **graph)
    for node in range(2):
        export.kernel("b", 900 + node * 10, 905 + node * 10, graphNodeId=(7 << 32) + node, correlationId=50)
    s = summary(export)
    assert (s["graph_launches"], s["graph_launches_truncated"]) == (5, 1)
    assert warned(s, "1 of 5 graph launches are truncated (1 of graph 6)")
    assert [(g["graph"], g["launches"], g["nodes"], g["truncated"]) for g in s["graphs"]] == [
        (6, 4, 3, 1),
        (7, 1, 2, 0),
    ]


def test_sum_above_span_is_explained() -> None:
    export = Export()
    export.kernel("a", 0, 100)
    export.kernel("b", 10, 110, streamId=8)
    export.kernel("b", 100, 120, streamId=8)
    export.kernel("c", 0, 120, deviceId=1)
    s = summary(export)
    assert (s["span_us"], s["kernel_sum_us"], s["kernel_union_us"]) == (0.12, 0.34, 0.12)
    streams = {(t["device"], t["stream"]): (t["overlap_us"], t["concurrent_us"]) for t in s["per_stream"]}
    # Stream 8 overlaps itself from 100 to 110, and stream 7 from 10 to 100.
    assert streams == {(0, 7): (0.0, 0.09), (0, 8): (0.01, 0.09), (1, 7): (0.0, 0.0)}
    assert warned(s, "0.3 us exceeds the span of 0.1 us because work overlaps: 0.1 us within devices, 0.1 us between 2")


def test_three_streams_share_in_parts() -> None:
    """Two of three overlap: the third shares nothing."""
    export = Export()
    for stream, start, end in ((7, 0, 100), (8, 50, 150), (9, 200, 300)):
        export.kernel("a", start, end, streamId=stream)
    s = summary(export)
    assert [(t["stream"], t["concurrent_us"]) for t in s["per_stream"]] == [(7, 0.05), (8, 0.05), (9, 0)]


def test_a_stream_is_one_of_its_process_and_context() -> None:
    """Number 7 in two processes, and in two contexts of one: three streams side by side, none overlapping itself."""
    export = Export()
    export.kernel("a", 0, 100)
    export.kernel("a", 0, 100, globalPid=global_pid(4243))
    export.kernel("a", 0, 100, contextId=2)
    s = summary(export)
    assert [(t["process"], t["context"], t["overlap_us"], t["concurrent_us"]) for t in s["per_stream"]] == [
        (4242, 1, 0, 0.1),
        (4242, 2, 0, 0.1),
        (4243, 1, 0, 0.1),
    ]


def test_no_overlap_no_explanation() -> None:
    export = Export()
    export.kernel("a", 0, 100)
    export.kernel("a", 100, 150)
    s = summary(export)
    assert (s["overlap_us"], s["idle_us"]) == (0, 0)
    assert not warned(s, "exceeds")


def test_a_device_that_ran_nothing_moves_no_window() -> None:
    rows = Kernels.of(start_ns=[5000], end_ns=[6000], name=[0], device=[1])
    s = held(summarise(Trace("t", "s", gpus={0: "idle", 1: "busy"}, kernels=rows, names=["a"])))
    assert (s["span_us"], [(d["device"], d["span_us"]) for d in s["per_device"]]) == (1.0, [(0, 0.0), (1, 1.0)])


def test_memcpy_is_not_compute() -> None:
    """80 % kernels and 19 % state copies are not 99 % compute."""
    export = Export()
    export.kernel("a", 0, 800)
    export.memory("MEMCPY", 800, 990, bytes=1 << 20, copyKind=8)
    export.memory("MEMSET", 990, 1000, bytes=64, value=0)
    s = summary(export)
    assert (s["kernel_union_us"], s["busy_union_us"]) == (0.8, 1.0)
    assert category(s, "memcpy DtoD")["share_of_busy"] == pytest.approx(0.19)
    assert category(s, "memcpy DtoD")["share_of_kernel_sum"] is None
    assert category(s, "memset")["kind"] == "memset"
    assert sum(c["sum_us"] for c in s["categories"] if c["kind"] == "kernel") == 0.8


def test_every_copy_is_counted() -> None:
    for kind in range(-1, len(COPY_KINDS) + 1):
        t = Trace("t", "s", memcpy=Copies.of(start_ns=[20], end_ns=[30], bytes=[5], kind=[kind], device=[0]))
        s = held(summarise(t))
        assert sum(c["sum_us"] for c in s["memcpy"].values()) == 0.01, f"copies of kind {kind}"
        parts = {p.category: p.value for p in breakdowns.from_trace(t).parts if p.value}
        assert list(parts.values()) == [0.01], f"copies of kind {kind}"
        assert {"HtoD", "DtoH", "DtoD", "PtoP"} <= set(s["memcpy"]), f"copies of kind {kind}"


def test_spin_waits_and_host_waits_are_not_busy() -> None:
    export = Export()
    export.kernel(SPIN, 0, 500)
    export.kernel("work", 400, 600, streamId=8)
    export.memory("SYNCHRONIZATION", 0, 10_000, syncType=3, eventId=0)
    export.call("cudaDeviceSynchronize_v3020", 0, 10_000, 3)
    s = summary(export)
    assert (s["busy_union_us"], s["idle_us"], s["span_us"]) == (0.2, 0.4, 0.6)
    assert s["waiting_us"] == 0.5
    assert s["host"]["synchronization"] == {"count": 1, "sum_us": 10.0}
    wait = next(c for c in s["categories"] if c["kind"] == "wait")
    assert (wait["sum_us"], wait["share_of_busy"]) == (0.5, None)
    assert warned(s, "only wait")


def test_startup_is_told_apart() -> None:
    """Fills before the first replay are two thirds of the busy time and no part of the work."""
    export = Export()
    export.kernel("void at::native::FillFunctor<float>", 0, 2000)
    export.kernel("used later too", 2000, 2100)
    for i in range(3):
        export.kernel("used later too", 5000 + i * 1000, 5300 + i * 1000, graphNodeId=9, graphId=2, correlationId=i)
    s = summary(export)
    assert s["startup"] == {
        "until_us": 5.0,
        "kernel_count": 1,
        "sum_us": 2.0,
        "union_us": 2.0,
        "names": ["FillFunctor"],
    }
    assert warned(s, "startup kernels (FillFunctor) are 66.7% of busy time")


def test_correlation_joins_use_the_process() -> None:
    """Numbers 78 and 82 occur in both processes; only one process has the calls."""
    export = Export()
    for process in (4242, 4243):
        for number in (78, 82):
            export.kernel("a", number, number + 1, globalPid=global_pid(process), correlationId=number)
    for number in (78, 82):
        export.call("cudaLaunchKernel_v7000", number, number + 1, number, process=4242)
    s = summary(export)
    assert s["kernels_without_api"] == 2
    assert warned(s, "2 of 4 kernels have no API row")


def test_without_calls_the_join_is_unknown() -> None:
    export = Export()
    export.kernel("a", 0, 1)
    assert summary(export)["kernels_without_api"] is None


def test_other_is_shown_and_warned_about() -> None:
    export = Export()
    export.kernel("ncclDevKernel_AllReduce", 0, 900)
    export.kernel("nobody_knows_this", 900, 1000)
    s = summary(export)
    assert category(s, OTHER)["share_of_kernel_sum"] == pytest.approx(0.1)
    assert warned(s, "nobody_knows_this")
    export = Export()
    export.kernel("ncclDevKernel_AllReduce", 0, 900)
    s = summary(export)
    assert category(s, OTHER)["sum_us"] == 0
    assert not warned(s, '"other"')


def test_per_step_per_token_per_launch() -> None:
    export = Export()
    for i in range(6):
        export.kernel("ncclDevKernel_AllReduce", i * 10, i * 10 + 4)
    s = summary(export, steps=3, tokens=12)
    one = category(s, "collective")
    assert (one["us_per_launch"], one["us_per_step"], one["us_per_token"]) == pytest.approx((0.004, 0.008, 0.002))
    assert category(held(summarise(export.trace())), "collective")["us_per_token"] is None


def test_nvtx_labels_without_counters_and_with_domain() -> None:
    export = Export()
    export.kernel("a", 0, 1)
    export.nvtx("NCCL", 0, None, eventType=75, domainId=3)
    export.nvtx("ncclSend", 0, 500, domainId=3)
    for i in range(3):
        export.nvtx(f"aten::mul, seq = {i}, op_id = {i}", i * 100, i * 100 + 10)
    s = summary(export)
    unjoined = {"first_us": 0.0, "gpu_us": None, "self_us": None}  # no API calls
    assert s["nvtx"] == [
        {"name": "ncclSend", "domain": "NCCL", "count": 1, "host_us": 0.5} | unjoined,
        {"name": "aten::mul", "domain": None, "count": 3, "host_us": 0.03} | unjoined,
    ]


def test_nothing_on_the_device() -> None:
    export = Export()
    export.call("cudaMalloc_v3020", 0, 10, 1)
    with refused("", "activity", remedy="record"):
        export.trace()
    export.nvtx("step", 0, 10)
    s = summary(export)
    assert (s["span_us"], s["busy_union_us"], s["kernel_count"], s["per_device"]) == (0, 0, 0, [])


# Identities ----------------------------------------------------------------------------------------------------------

ROW = st.tuples(st.integers(0, 300), st.integers(0, 60), st.integers(0, 2), st.integers(0, 2), st.integers(0, 2))


@settings(max_examples=40)
@given(*[st.lists(ROW, max_size=8) for _ in range(4)])
def test_identities_hold(kernels: list[Any], copies: list[Any], fills: list[Any], graphs: list[Any]) -> None:
    """Whatever overlaps whatever: identities hold, and union, span and sum are in their order."""

    def columns(rows: list[Any]) -> dict[str, Any]:
        keys = ("start_ns", "end_ns", "device", "stream", "process")
        table = [(a, a + n, d, s, p) for a, n, d, s, p in rows]
        return dict(zip(keys, map(list, zip(*table, strict=True)), strict=True)) if rows else {}

    names = ["a", SPIN, "ncclDevKernel_AllReduce"]
    t = Trace(
        "synthetic",
        "generated",
        kernels=Kernels.of(**columns(kernels), **({"name": [r[2] for r in kernels]} if kernels else {})),
        memcpy=Copies.of(**columns(copies), **({"kind": [r[3] for r in copies]} if copies else {})),
        memset=Fills.of(**columns(fills)),
        graphs=GraphLaunches.of(**columns(graphs)),
        names=names,
    )
    s = held(summarise(t))
    assert s["kernel_union_us"] <= s["kernel_sum_us"] + 1e-9
    assert s["busy_union_us"] <= s["span_us"] + 1e-9
    for d in s["per_device"]:
        assert d["busy_union_us"] <= d["span_us"] + 1e-9
        of_device = [x for x in s["per_stream"] if x["device"] == d["device"]]
        assert sum(x["union_us"] for x in of_device) + 1e-9 >= d["busy_union_us"]


def test_a_broken_identity_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from lab.trace import intervals as module

    export = Export()
    export.kernel("a", 0, 10)
    path = export.write(tmp_path / "a.sqlite")
    assert main.main(["trace", str(path)]) == 0
    monkeypatch.setattr(module, "idle", lambda busy, over: busy)
    assert main.main(["trace", str(path)]) == 1
    assert "DOES NOT HOLD: busy + idle = span" in capsys.readouterr().out


# The command ---------------------------------------------------------------------------------------------------------


def test_command_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["trace", str(KINETO), "--json", "--top", "3"]) == 0
    s = json.loads(capsys.readouterr().out)
    assert set(NEEDED) <= set(s)
    assert len(s["top_kernels"]) == 3


def test_command_text(capsys: pytest.CaptureFixture[str]) -> None:
    for name in (KINETO.name, "decode_kern_sum.csv", "ncu_details.csv"):
        assert main.main(["trace", str(REAL / name)]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"{name}: ")
        assert "holds: categories = kernels" in out, name
        lines = [line for line in out.splitlines() if not line.startswith(("warning", "holds"))]
        assert max(map(len, lines)) <= 130, name


REFUSED: tuple[tuple[list[str], str, str], ...] = (
    (["absent.sqlite"], "absent.sqlite", "No such file"),
    ([str(REAL / "decode_kern_sum.csv"), "--steady"], "decode_kern_sum.csv", "timeline"),
    ([str(KINETO), "--nth", "2"], "--nth", "--nvtx"),
    ([str(KINETO), "--graph", "2"], "--graph", "--replay"),
    ([str(KINETO), "--time", "5"], "--time", '"5"'),
    ([str(KINETO), "--time", "5:6years"], "--time", '"5:6years"'),
    ([str(KINETO), "--steps", "0"], "--steps", "0"),
    ([str(KINETO), "--tokens", "nan"], "--tokens", "nan"),
    ([str(KINETO), "--top", "-1"], "--top", "-1"),
    ([str(KINETO), "--rules", "absent.toml"], "absent.toml", "no such file"),
)


def test_command_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, where, words in REFUSED:
        assert main.main(["trace", *arguments]) == 2, arguments
        refusal_held(capsys.readouterr().err, where, words)


def test_a_file_without_kernels_says_so() -> None:
    export = Export()
    export.memory("MEMCPY", 0, 1000, bytes=8, copyKind=1)
    export.call("cudaLaunchKernel_v7000", 0, 10, 1)
    assert [line for line in summarise(export.trace()).warnings if "no kernel" in line and "1 calls" in line]
    export.kernel("k", 2000, 3000)
    assert not [line for line in summarise(export.trace()).warnings if "no kernel" in line]
