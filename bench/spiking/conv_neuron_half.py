"""A convolution on spikes in float16 with its neurons in one launch, beside stock's kernels for both.

The neurons are spikingjelly's LIF, which in half precision is a loop of torch's operators. Products are of bytes and of
halves; of either the first configuration by estimate of each tile is timed as well. Times are of CUDA graph replays, on
bytes (on float16 for stock), batch-norm and packing of the weight included. Worker processes compile side by side.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.spiking.conv_neuron import CASES, COPIES, Case, Row
from bench.table import markdown_grid
from bench.timing import graph_ms, guarded
from sparsecomp import ops
from sparsecomp.lowering.cache.signature import device_of
from sparsecomp.lowering.spiking.conv_neuron import CONV_NEURON, Described, conv_neuron_problem
from sparsecomp.lowering.spiking.convolution import Convolution
from sparsecomp.lowering.spiking.fused_layer import FusedLayer
from sparsecomp.lowering.tuning.ceilings import card_of
from sparsecomp.lowering.tuning.cost import rank
from sparsecomp.lowering.tuning.template import Candidate
from sparsecomp.lowering.tuning.trial import first_line
from sparsecomp.reference.digits import HALVES, SPREAD
from sparsecomp.reference.neuron import NUMBERS, PARAMETERS, STATES, neuron_of

DIGITS = {"bytes": 2, "halves": HALVES}
EPS = 1e-5
STEP = (
    "t0 = sub x v0; t1 = float16 t0; t2 = mul t1 n1; t3 = float16 t2; t4 = add v0 t3; t5 = float16 t4; t6 = sub t5 n2; "
    "t7 = ge t6 n0; t8 = float t7; t9 = sub n2 t8; t10 = mul t9 t5; t11 = add n0 t10; spike t7; v0 t11"
)
"""What `unrolled_neurons` makes of that loop."""
_NUMBERS = (0.0, 0.5, 1.0)
_Calls = list[Callable[[], Any]]


def run(workers: int) -> Iterator[Row]:
    """A row a case: milliseconds of stock's kernels, of its convolution alone and of one launch, and by configuration.

    Args:
        workers: processes that compile side by side.
    """
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        jobs = [(place, share, workers) for place in range(len(CASES)) for share in range(workers)]
        pool.starmap(_compile, jobs, chunksize=1)
    for case in CASES:
        row: Row = {"case": case.name, "shape": list(case[1:]), "ms": {}, "configurations": {}}
        guarded(row, "ways", partial(_ways, row, case))
        for kind in DIGITS:
            guarded(row, kind, partial(_configurations, row, case, kind))
        print(row, flush=True)
        yield row


def problem_of(case: Case, kind: str) -> FusedLayer:
    """A case as the kernels see it."""
    shape = (case.batch * case.steps, case.c, case.size, case.size)
    conv = Convolution.of(shape, (case.k,), case.window, dtype="float16")
    neurons = Described(
        case.steps, neuron_of(STEP), "float16", EPS, (False,) * PARAMETERS, (0.0,) * STATES,
        _NUMBERS + (0.0,) * (NUMBERS - len(_NUMBERS)), (False,) * STATES, (False,) * PARAMETERS, True, True, True,
    )  # fmt: skip
    return conv_neuron_problem(conv, DIGITS[kind], neurons)


def _first(case: Case, kind: str) -> list[Candidate[FusedLayer]]:
    """The first configuration by estimate of each tile, the first of all in front."""
    device, problem = torch.device("cuda", 0), problem_of(case, kind)
    ranked = rank(CONV_NEURON.candidates(problem, device_of(device)), problem, card_of(device))
    tiles: dict[tuple[int, ...], Candidate[FusedLayer]] = {}
    for one in ranked:
        tiles.setdefault(tuple(one.config[name] for name in ("BM", "BN", "warps")), one)
    return [*tiles.values()]


def _compile(place: int, share: int, workers: int) -> None:
    """One share of what a case launches."""
    case, device = CASES[place], torch.device("cuda", 0)
    jobs: list[Callable[[], Any]] = [
        partial(_prepared, case, kind, one, device) for kind in DIGITS for one in _first(case, kind)
    ]
    for job in [lambda: _stock(case)[0](), *jobs][share::workers]:
        try:
            job()
        except Exception as error:
            print(case.name, first_line(error), flush=True)


def _prepared(case: Case, kind: str, candidate: Candidate[FusedLayer], device: torch.device) -> None:
    problem = problem_of(case, kind)
    assert CONV_NEURON.operands is not None
    candidate.template.prepare(problem, candidate.config)(*CONV_NEURON.operands(problem, device, 0))


def _ways(row: Row, case: Case) -> None:
    stock, dense = _stock(case), _dense(case)
    fused = {kind: _fused(case, kind) for kind in DIGITS}
    expected = stock[0]()[0]
    row["rate"] = round(expected.float().mean().item(), 3)
    row["differ"] = {  # of stock, which rounds once where these round after each operation
        kind: round((calls[0]()[0] != expected).float().mean().item(), 6) for kind, calls in fused.items()
    }
    row["ms"] = {"stock": graph_ms(stock), "dense": graph_ms(dense)}
    row["ms"] |= {kind: graph_ms(calls) for kind, calls in fused.items()}


def _operands(case: Case) -> tuple[list[Tensor], Tensor, tuple[Tensor, ...]]:
    """Spikes, a weight that lies channels-last and a batch-norm."""
    random = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device="cuda")

    shape = (case.batch * case.steps, case.size, case.size, case.c)
    inputs = [(normal(*shape) > 1.175).movedim(-1, 1) for _ in range(COPIES)]
    weight = normal(case.k, case.c, case.kernel, case.kernel) / (case.c * case.kernel**2) ** 0.5
    norm = (normal(case.k) / 8, normal(case.k).abs() / 8 + 0.02, normal(case.k) / 8 + 1, normal(case.k) / 8)
    weight = weight.half().contiguous(memory_format=torch.channels_last)
    return inputs, weight, tuple(one.half() for one in norm)


def _fused(case: Case, kind: str) -> _Calls:
    inputs, weight, norm = _operands(case)
    window = case.window
    how = (list(window.stride), list(window.padding), list(window.dilation), 1, DIGITS[kind], 1.0, SPREAD, True)
    neuron = ([None], [0.0], [], list(_NUMBERS), STEP)
    return [
        partial(ops.conv_neuron, x.to(torch.int8), weight, None, *how, case.steps, *norm, EPS, *neuron) for x in inputs
    ]


def _dense(case: Case) -> _Calls:
    inputs, weight, _ = _operands(case)
    window = case.window
    return [partial(F.conv2d, x.half(), weight, None, window.stride, window.padding) for x in inputs]


def _stock(case: Case) -> _Calls:
    """Convolution, batch-norm and the loop, by Inductor."""
    inputs, weight, (mean, var, gamma, beta) = _operands(case)
    window = case.window

    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        currents = F.conv2d(x, weight, None, window.stride, window.padding)
        currents = F.batch_norm(currents, mean, var, gamma, beta, False, 0.1, EPS).unflatten(0, (case.steps, -1))
        v, spikes = torch.zeros_like(currents[0]), []
        for current in currents:
            h = v + (current - (v - 0.0)) / 2.0
            spikes.append((h - 1.0 >= 0).to(h))
            v = spikes[-1] * 0.0 + (1.0 - spikes[-1]) * h
        return torch.stack(spikes), v

    torch._dynamo.reset()
    compiled = torch.compile(layer)
    return [partial(compiled, x.half()) for x in inputs]


def _configurations(row: Row, case: Case, kind: str) -> None:
    problem, device = problem_of(case, kind), torch.device("cuda", 0)
    assert CONV_NEURON.operands is not None
    operands = [CONV_NEURON.operands(problem, device, seed) for seed in range(COPIES)]
    times = row["configurations"].setdefault(kind, {})
    for candidate in _first(case, kind):
        launch = candidate.template.prepare(problem, candidate.config)
        calls: _Calls = [partial(launch, *tensors) for tensors in operands]
        guarded(times, str(candidate.config), partial(_timed, times, candidate, calls))


def _timed(times: dict[str, Any], candidate: Candidate[FusedLayer], calls: _Calls) -> None:
    times[str(candidate.config)] = graph_ms(calls, 8)


def table(rows: list[Row]) -> str:
    """Milliseconds of stock and of one launch with either kind of products, and the fastest configuration of each."""
    grid = [["layer", "stock", "its convolution", *DIGITS, "gain", *(f"fastest of {kind}" for kind in DIGITS)]]
    for row in rows:
        ms = row["ms"]
        if not ms:
            grid.append([row["case"], *["–"] * 4, str(row.get("left out")), *["–"] * 2])
            continue
        best = []
        for kind in DIGITS:
            tried = {name: one for name, one in row["configurations"].get(kind, {}).items() if isinstance(one, float)}
            name = min(tried, key=lambda name: tried[name], default=None)
            best.append("–" if name is None else f"{tried[name]:.4f}: {name}")
        gain = ms["stock"] / min(ms[kind] for kind in DIGITS)
        figures = (f"{ms[name]:.4f}" for name in ("stock", "dense", *DIGITS))
        grid.append([row["case"], *figures, f"{gain:.2f}", *best])
    return markdown_grid(grid)
