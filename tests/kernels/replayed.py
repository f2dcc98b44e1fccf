"""One replay of a captured graph by events, for the quick looks (bench_*.py)."""

import torch


def require_gpu() -> None:
    """End with one line where no CUDA GPU is usable."""
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU is usable here; run it where there is one")


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """us of one replay on torch's current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)
