"""How every figure is measured: medians of CUDA events, inputs rotated so that the L2 cache holds none of them."""

import platform
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch


def graph_ms(calls: Sequence[Callable[[], Any]], repeats: int = 20) -> float:
    """Median milliseconds of one call, replayed as a CUDA graph of all ``calls`` (one for each rotated input)."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = [call() for call in calls]
        for _ in range(3):
            graph.replay()
        times = [_elapsed_ms(graph.replay, stream) / len(calls) for _ in range(repeats)]
    del kept
    return statistics.median(times)


def eager_ms(call: Callable[[], Any], warmup: int = 3, repeats: int = 10) -> float:
    """Median milliseconds of one call as the host issues it, launch gaps included."""
    for _ in range(warmup):
        call()
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream()
    return statistics.median(_elapsed_ms(call, stream) for _ in range(repeats))


def machine() -> dict[str, str]:
    """Card (or the word that there is none), versions and interpreter behind the figures."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "cpu": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def _elapsed_ms(call: Callable[[], Any], stream: torch.cuda.Stream) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(stream)
    call()
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end)
