"""On a CPU nothing is rewritten, so a compiled network must cost what it costs with Inductor: at most 3 % more."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from sparsecomp.demo import DigitsNet

ROUNDS = 200
BATCH = 64


def run() -> dict[str, Any]:
    """Milliseconds of one batch of the demo's network, inference; the two take turns, so both see the same machine."""
    torch.manual_seed(0)
    net, x = DigitsNet().eval(), torch.rand(BATCH, 1, 8, 8)
    calls: dict[str, Callable[..., Any]] = {}
    for backend in ("inductor", "sparsecomp"):
        calls[backend] = torch.compile(net, backend=backend)
        with torch.no_grad():
            calls[backend](x)
    times: dict[str, list[float]] = {backend: [] for backend in calls}
    with torch.no_grad():
        for _ in range(ROUNDS):
            for backend, call in calls.items():
                start = time.perf_counter()
                call(x)
                times[backend].append((time.perf_counter() - start) * 1e3)
    medians = {backend: round(statistics.median(found), 4) for backend, found in times.items()}
    result = {"case": f"demo network, batch {BATCH}, {torch.get_num_threads()} threads", "ms": medians}
    print(result, flush=True)
    return result
