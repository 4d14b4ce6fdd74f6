"""How every figure is measured: medians of CUDA events, inputs rotated so that the L2 cache holds none of them."""

import importlib.metadata
import importlib.util
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from sparsecomp.lowering.tuning.trial import first_line

MODES = ("default", "reduce-overhead")
"""Of torch.compile, in which models are timed as called."""


def graph_ms(calls: Sequence[Callable[[], Any]], repeats: int = 20) -> float:
    """Median milliseconds of one call, replayed as a CUDA graph of all `calls` (one for each rotated input)."""
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


@cache
def bandwidth() -> float:
    """Bytes a second of a large copy, both ways counted."""
    one = torch.empty(2**28, device="cuda", dtype=torch.uint8)
    two = torch.empty_like(one)
    return 2 * one.numel() / (graph_ms([lambda: two.copy_(one)] * 3) * 1e-3)


def eager_ms(call: Callable[[], Any], warmup: int = 3, repeats: int = 10) -> float:
    """Median milliseconds of one call as the host issues it, launch gaps included."""
    for _ in range(warmup):
        call()
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream()
    return statistics.median(_elapsed_ms(call, stream) for _ in range(repeats))


def loop_ms(call: Callable[[], Any], calls: int = 20, repeats: int = 9) -> float:
    """Milliseconds of one call of many in a row, as the host issues them; the best mean, for the host's sake."""
    return _best_mean_s(call, calls, repeats, waited=True) * 1e3


def in_turns_ms(calls: Sequence[Callable[[], Any]], each: int = 20, rounds: int = 15) -> list[float]:
    """As `loop_ms` for each of several, which take turns so that a busy machine is busy for all of them.

    A loop takes about 4 ms: calls that are long by themselves are not repeated.
    """
    repeated = [max(1, min(each, int(4.0 / loop_ms(call, 2, repeats=1)))) for call in calls]
    best = [math.inf] * len(calls)
    for _ in range(rounds):
        for place, call in enumerate(calls):
            call()  # behind a long one, which leaves the host's caches cold
            best[place] = min(best[place], loop_ms(call, repeated[place], repeats=1))
    return [round(one, 5) for one in best]


def time_rivals(
    row: dict[str, Any], mode: str, calls: Mapping[str, Callable[[], Any]], gradients: bool
) -> None:  # fmt: skip
    """Add to a row's `ms` what each of the rivals takes in a mode, by `in_turns_ms`."""
    with torch.set_grad_enabled(gradients):
        times = in_turns_ms(list(calls.values()))
    row["ms"] |= {f"{which}, {mode}": ms for which, ms in zip(calls, times, strict=True)}


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Of norms, to two digits."""
    return float(f"{((found - exact).norm() / exact.norm()).item():.2g}")


def modes_of(row: Mapping[str, Any]) -> list[str]:
    """Modes in which the rivals of a row were timed, in the order of `MODES`."""
    return [mode for mode in MODES if any(key.endswith(f", {mode}") for key in row["ms"])]


def host_us(call: Callable[[], Any], calls: int = 200, repeats: int = 5) -> float:
    """Host microseconds of one eager call without gradients, the best of `repeats` means.

    `call` must be so short on the device that the host never waits for it.
    """
    with torch.no_grad():
        for _ in range(10):
            call()
        found = _best_mean_s(call, calls, repeats, waited=False)
    return round(found * 1e6, 1)


def _best_mean_s(call: Callable[[], Any], calls: int, repeats: int, waited: bool) -> float:
    """Seconds of one call, with or without the device's work that is left when the last one returns."""
    means = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if waited:
            wait()
        means.append((time.perf_counter() - start) / calls)
    wait()
    return min(means)


def wait() -> None:
    """For what the device has to do, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def guarded(row: dict[str, Any], name: str, measure: Callable[[], Any]) -> None:
    """Take a figure of a row; one that cannot be taken is left out with its reason, and the rest goes on."""
    try:
        measure()
    except Exception as error:
        row.setdefault("left out", {})[name] = first_line(error)


def machine() -> dict[str, str]:
    """Card (or the word that there is none), versions and interpreter behind the figures."""
    has_triton = importlib.util.find_spec("triton") is not None
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "cpu": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if has_triton else "none",
        "python": platform.python_version(),
    }


def place(found: dict[str, str]) -> str:
    """The card of a machine, or its processor if there is none."""
    return found["cpu"] if found["gpu"] == "none" else found["gpu"].removeprefix("NVIDIA ")


def _elapsed_ms(call: Callable[[], Any], stream: torch.cuda.Stream) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(stream)
    call()
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end)
