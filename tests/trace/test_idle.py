"""Why a device idled: one made case for each cause, and the identity on random ones."""

import random
from pathlib import Path

import pytest

from lab.cli import main
from lab.trace import idle
from lab.trace.model import short_name
from lab.trace.summary import summarise
from lab.trace.windows import by_time
from tests.refused import refused
from tests.trace.nsys_synthetic import Export
from tests.trace.test_exposed import Simulated

LAUNCH, SYNC, COPY = "cudaLaunchKernel_v7000", "cudaStreamSynchronize_v3020", "cudaMemcpy_v3020"


def caused() -> Export:
    """Kernels of 1 us with a gap of 1 us before each: (what the host did, where the next one ran) -> one cause."""
    export = Export()
    at = 10_000
    export.call(LAUNCH, 0, 10, 1)
    export.kernel("first", at, at + 1000, correlationId=1)
    cases = ("late", "sync", "copying", "delay", "other_stream", "queued", "unknown")
    for i, case in enumerate(cases, start=2):
        gap, at = at + 1000, at + 2000
        begin, end = {
            "late": (gap + 100, at - 100),
            "sync": (at - 200, at - 100),
            "copying": (at - 200, at - 100),
            "delay": (gap - 50, gap + 100),
        }.get(case, (100 * i, 100 * i + 50))
        if case != "unknown":
            export.call(LAUNCH, begin, end, i)
        if case == "sync":
            export.call(SYNC, gap - 500, at - 200, 0)
        if case == "copying":
            export.call(COPY, gap - 500, at - 200, 0)
        export.kernel(case, at, at + 1000, correlationId=i, streamId=9 if case == "other_stream" else 7)
    return export


def test_a_gap_of_a_window_is_told_as_time_takes_it() -> None:
    """A window around a gap, by the times that the report of another window gives, holds that gap and no other."""
    trace = caused().trace()
    window = by_time(trace, 2.5, 8.5)
    for gap in summarise(window).gaps:
        begin, end = gap.start_us, gap.start_us + gap.us
        with refused("--time", "nothing ran"):
            by_time(trace, begin, end)
        around = summarise(by_time(trace, begin - 0.1, end + 0.1))
        assert around.idle_us == pytest.approx(gap.us)


def test_each_gap_has_its_cause() -> None:
    found = summarise(caused().trace())
    assert all(i.holds for i in found.identities)
    assert {g.before: g.cause for g in found.gaps} == {
        "late": idle.HOST,
        "sync": idle.SYNCHRONISE,
        "copying": idle.COPY,
        "delay": idle.DELAY,
        "other_stream": idle.OTHER_STREAM,
        "queued": idle.OTHER_STREAM,
        "unknown": idle.UNKNOWN,
    }
    # late 0.9 launch-bound (the others 0.1 each) and 0.1 until it started; sync and copying 0.8, then the launch.
    assert found.per_device[0].idle_by == pytest.approx(
        {idle.HOST: 1.2, idle.SYNCHRONISE: 0.8, idle.COPY: 0.8, idle.DELAY: 1.2}
        | {idle.OTHER_STREAM: 2.0, idle.UNKNOWN: 1.0}
    )  # fmt: skip
    assert found.launch_delay_us is not None
    assert {c.name: c.count for c in found.api} == {"cudaLaunchKernel": 7, "cudaStreamSynchronize": 1, "cudaMemcpy": 1}


def test_copies_waits_and_edges() -> None:
    export = Export()
    for i, name in enumerate(("a", "b")):
        export.call(LAUNCH, i, i + 1, i + 1)
        export.kernel(name, 1000 + i * 2000, 2000 + i * 2000, correlationId=i + 1)
    export.call("cudaMemcpyAsync_v3020", 3, 4, 3)
    export.memory("MEMCPY", 4500, 5000, bytes=1, copyKind=1, correlationId=3)
    export.kernel("at::cuda::spin_kernel(long)", 2000, 2400, streamId=30)
    found = summarise(export.trace()).per_device[0].idle_by
    assert found == pytest.approx({idle.QUEUED: 0.6, idle.WAIT: 0.4, idle.COPY: 0.5})


def test_random_programs_account_for_all_idle_time() -> None:
    """Parts are never negative and sum to the idle time, with hosts that launch, compute and synchronise."""
    rng = random.Random("idle")
    for _ in range(100):
        found = summarise(Simulated(rng, calls=True).trace())
        assert [i.identity for i in found.identities if not i.holds] == []
        assert all(us > 0 for d in found.per_device for us in d.idle_by.values())


def test_the_report_is_a_hundred_columns_wide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = caused()
    export.kernel("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int> >" + "x" * 200, 0, 50)
    assert main.main(["trace", str(export.write(tmp_path / "a.sqlite"))]) == 0
    lines = capsys.readouterr().out.splitlines()
    tables = [line for line in lines if not line.startswith(("holds", "warning", "span", "refused"))]
    assert max(map(len, tables)) <= 100
    assert any("launch-bound" in line for line in lines)


NAMES = {
    "std::enable_if<(((8)>(0)))&&vllm::_typeConvert<c10::BFloat16>::exists, void>::type vllm::fused_add_rms_norm_kernel"
    "<c10::BFloat16, 8>(c10::BFloat16*, long)": "fused_add_rms_norm_kernel",
    "std::enable_if<!T7, void>::type internal::gemvx::kernel<int, int, float, (bool)0>(T13)": "gemvx::kernel",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char *, 1>>(int)":
        "vectorized_elementwise_kernel<FillFunctor>",
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<float, "
    "float, float, at::native::binary_internal::MulFunctor<float>>>(at::TensorIteratorBase &)>(int, T3)":
        "elementwise_kernel<MulFunctor>",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>(T3)":
        "reduce_kernel<MeanOps>",
    "void unary_op_kernel<&op_sqr, float>(float const*, float*, int)": "unary_op_kernel<op_sqr>",
}  # fmt: skip


def test_short_names_keep_what_tells_kernels_apart() -> None:
    assert {name: short_name(name) for name in NAMES} == NAMES
