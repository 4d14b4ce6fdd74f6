"""On a CPU: a network with nothing sparse must cost what it costs with Inductor, a sparse layer no more than dense.

Calls take turns, so that all see the same machine, and the best of many rounds counts: others only ever add to it.
"""

import math
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from sparsecomp.demo import DigitsNet
from sparsecomp.nn import SparseLinear

ROUNDS = 200
BATCH = 64
SIZES, SPARSITIES, ROWS = (64, 256, 1024, 2048), (0.8, 0.9, 0.95), (1, 4, 64, 512)


def run() -> dict[str, Any]:
    """Milliseconds of the demo's network, and of each sparse layer beside its dense one."""
    result = {**network(), "layers": [layer(*case) for case in product(SIZES, SPARSITIES, ROWS)]}
    print(worst(result["layers"]), flush=True)
    return result


def network() -> dict[str, Any]:
    """One batch of the demo's network, inference."""
    torch.manual_seed(0)
    net, x = DigitsNet().eval(), torch.rand(BATCH, 1, 8, 8)
    calls = {backend: torch.compile(net, backend=backend) for backend in ("inductor", "sparsecomp")}
    with torch.no_grad():
        times = in_turns_ms([lambda call=call: call(x) for call in calls.values()], ROUNDS)
    best = dict(zip(calls, times, strict=True))
    result = {"case": f"demo network, batch {BATCH}, {torch.get_num_threads()} threads", "ms": best}
    print(result, flush=True)
    return result


def layer(size: int, sparsity: float, rows: int) -> dict[str, Any]:
    """A square layer, dense under Inductor and sparse under sparsecomp: inference, the same frozen, a training step."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    linear, x = nn.Linear(size, size), torch.randn(rows, size)
    sparse = SparseLinear.from_linear(linear, sparsity=sparsity)
    case: dict[str, Any] = {"size": size, "sparsity": sparsity, "rows": rows}
    dense = torch.compile(linear)
    ours = torch.compile(sparse, backend="sparsecomp")
    frozen = torch.compile(sparse, backend="sparsecomp", options={"frozen": True})
    with torch.no_grad():
        stock, plain, kept = in_turns_ms([lambda model=model: model(x) for model in (dense, ours, frozen)])
    steps = [_step(linear, dense, x), _step(sparse, ours, x)]
    stock_step, step = in_turns_ms(steps)
    case["inference ms"] = {"dense": stock, "sparse": plain, "frozen": kept}
    case["training ms"] = {"dense": stock_step, "sparse": step}
    print(case, flush=True)
    return case


def _step(model: nn.Module, compiled: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    optimizer, x = torch.optim.SGD(model.parameters(), 1e-6, fused=True), x.clone().requires_grad_()

    def step() -> None:
        compiled(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None

    return step


def in_turns_ms(calls: Sequence[Callable[[], Any]], rounds: int = 30, seconds: float = 0.6) -> list[float]:
    """Best milliseconds of one call of each; short ones are called several times a round."""
    for _ in range(3):
        for call in calls:
            call()
    start = time.perf_counter()
    for call in calls:
        call()
    each = max(1, int(seconds / rounds / (time.perf_counter() - start)))
    best = [math.inf] * len(calls)
    for _ in range(rounds):
        for place, call in enumerate(calls):
            start = time.perf_counter()
            for _ in range(each):
                call()
            best[place] = min(best[place], (time.perf_counter() - start) / each * 1e3)
    return [round(one, 4) for one in best]


def worst(layers: Sequence[dict[str, Any]], count: int = 5) -> str:
    """The cases in which a sparse layer does worst, as dense's time over its own."""
    found: list[tuple[float, str]] = []
    for row in layers:
        case = f"{row['size']}², {row['sparsity']:.0%} sparse, {row['rows']} rows"
        for kind in ("inference", "training"):
            times = dict(row[f"{kind} ms"])
            dense = times.pop("dense")
            found += [(dense / own, f"{case}, {kind}, {way}") for way, own in times.items()]
    return "\n".join(f"{ratio:.2f} {what}" for ratio, what in sorted(found)[:count])
