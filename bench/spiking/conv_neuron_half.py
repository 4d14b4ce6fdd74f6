"""A convolution on spikes in float16 with its neurons in one launch, beside stock's kernels for both.

The neurons are spikingjelly's LIF, which in half precision is a loop of torch's operators. The first configuration by
estimate of each of a few tiles is timed as well. Times are of CUDA graph replays, on bytes (on float16 for stock),
batch-norm and packing of the weight included. Worker processes compile side by side.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.spiking.conv_neuron import CASES, COPIES, Case, Row, site_of, time_configurations
from bench.table import markdown_grid
from bench.timing import graph_ms, guarded
from sparsecomp import ops
from sparsecomp.lowering.cache.signature import device_of
from sparsecomp.lowering.spiking.conv_neuron import CONV_NEURON, Described, conv_neuron_problem
from sparsecomp.lowering.spiking.convolution import Convolution
from sparsecomp.lowering.spiking.fused_layer import FusedLayer
from sparsecomp.lowering.tuning.cards import Card
from sparsecomp.lowering.tuning.ceilings import card_of
from sparsecomp.lowering.tuning.cost import rank
from sparsecomp.lowering.tuning.template import Candidate
from sparsecomp.lowering.tuning.trial import first_line
from sparsecomp.passes.cost import conv_neuron as gate
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.cost.spiking import decide
from sparsecomp.reference.digits import SPREAD
from sparsecomp.reference.neuron import NUMBERS, PARAMETERS, ROUNDINGS, STATES, neuron_of

TRIED = 4
"""Tiles timed, the first by estimate."""
DIGITS = 2
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
        jobs = [(place, share) for share in range(TRIED + 2) for place in range(len(CASES))]
        pool.starmap(_compile, jobs, chunksize=1)
    for case in CASES:
        row: Row = {"case": case.name, "shape": list(case[1:]), "ms": {}, "configurations": {}}
        guarded(row, "ways", partial(_ways, row, case))
        guarded(row, "configurations", partial(_configurations, row, case))
        print(row, flush=True)
        yield row


def problem_of(case: Case) -> FusedLayer:
    """A case as the kernels see it."""
    shape = (case.batch * case.steps, case.c, case.size, case.size)
    conv = Convolution.of(shape, (case.k,), case.window, dtype="float16")
    neurons = Described(
        case.steps, neuron_of(STEP), "float16", EPS, (False,) * PARAMETERS, (0.0,) * STATES,
        _NUMBERS + (0.0,) * (NUMBERS - len(_NUMBERS)), (False,) * STATES, (False,) * PARAMETERS, True, True, True,
    )  # fmt: skip
    return conv_neuron_problem(conv, DIGITS, neurons)


def decision_of(case: Case, card: Card) -> Decision:
    """What the gate says of a case on a card, in replayed graphs."""
    site = site_of(case, itemsize=2, digits=DIGITS)
    instructions = sum(1 + (one.operation in ROUNDINGS) for one in neuron_of(STEP).code)
    return gate.beside_written(decide(site, card), site, gate.Behind(case.steps, False, instructions), card)


def _first(case: Case) -> list[Candidate[FusedLayer]]:
    """The first configuration by estimate of each of the first tiles."""
    device, problem = torch.device("cuda", 0), problem_of(case)
    tiles: dict[tuple[int, ...], Candidate[FusedLayer]] = {}
    for one in rank(CONV_NEURON.candidates(problem, device_of(device)), problem, card_of(device)):
        tiles.setdefault(tuple(one.config[name] for name in ("BM", "BN", "warps")), one)
    return [*tiles.values()][:TRIED]


def _compile(place: int, share: int) -> None:
    """One of the things that a case launches: stock's kernels, those around our neurons, or a configuration."""
    case, device = CASES[place], torch.device("cuda", 0)
    try:
        if share < 2:
            _stock(case, ours=share == 1)[0]()
            return
        for candidate in _first(case)[share - 2 : share - 1]:
            problem = problem_of(case)
            assert CONV_NEURON.operands is not None
            candidate.template.prepare(problem, candidate.config)(*CONV_NEURON.operands(problem, device, 0))
    except Exception as error:
        print(case.name, first_line(error), flush=True)


def _ways(row: Row, case: Case) -> None:
    stock, fused = _stock(case), _fused(case)
    expected = stock[0]()[0]
    row["rate"] = round(expected.float().mean().item(), 3)
    # stock rounds once where ours, and eager, round after each operation
    row["differ"] = round((fused[0]()[0] != expected).float().mean().item(), 6)
    row["ms"] = {"stock": graph_ms(stock), "convolution": graph_ms(_dense(case)), "fused": graph_ms(fused)}
    row["ms"]["neurons"] = graph_ms(_stock(case, ours=True))
    seconds = decision_of(case, card_of(torch.device("cuda", 0))).seconds
    row["estimated"] = {name: ms * 1e3 for name, ms in seconds.items()}


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


def _fused(case: Case) -> _Calls:
    inputs, weight, norm = _operands(case)
    window = case.window
    how = (list(window.stride), list(window.padding), list(window.dilation), 1, DIGITS, 1.0, SPREAD, True)
    neuron = ([None], [0.0], [], list(_NUMBERS), STEP)
    return [
        partial(ops.conv_neuron, x.to(torch.int8), weight, None, *how, case.steps, *norm, EPS, *neuron) for x in inputs
    ]


def _dense(case: Case) -> _Calls:
    inputs, weight, _ = _operands(case)
    window = case.window
    return [partial(F.conv2d, x.half(), weight, None, window.stride, window.padding) for x in inputs]


def _stock(case: Case, ours: bool = False) -> _Calls:
    """Convolution, batch-norm and the loop, by Inductor; `ours`: our operator in place of the loop."""
    inputs, weight, (mean, var, gamma, beta) = _operands(case)
    window = case.window

    def layer(x: Tensor) -> tuple[Tensor, ...]:
        currents = F.conv2d(x, weight, None, window.stride, window.padding)
        currents = F.batch_norm(currents, mean, var, gamma, beta, False, 0.1, EPS).unflatten(0, (case.steps, -1))
        if ours:
            return ops.neuron(currents, [None], [0.0], [], list(_NUMBERS), STEP)
        v, spikes = torch.zeros_like(currents[0]), []
        for current in currents:
            h = v + (current - (v - 0.0)) / 2.0
            spikes.append((h - 1.0 >= 0).to(h))
            v = spikes[-1] * 0.0 + (1.0 - spikes[-1]) * h
        return torch.stack(spikes), v

    torch._dynamo.reset()
    compiled = torch.compile(layer)
    return [partial(compiled, x.half()) for x in inputs]


def _configurations(row: Row, case: Case) -> None:
    time_configurations(row, CONV_NEURON, problem_of(case), _first(case))


def table(rows: list[Row]) -> str:
    """Milliseconds of stock, of that with our operator for its neurons where it was measured, of one launch, and of the
    fastest configuration without the packing of the weight."""
    ways = ["stock", "its convolution", "with our neurons", "fused"]
    grid = [["layer", *ways, "gain", "estimated", "fastest, ms", "configuration"]]
    for row in rows:
        ms, tried = row["ms"], {name: one for name, one in row["configurations"].items() if isinstance(one, float)}
        if not ms or not tried:
            grid.append([row["case"], *["–"] * 7, str(row.get("left out"))])
            continue
        best = min(tried, key=lambda name: tried[name])
        names = ("stock", "convolution", "neurons", "fused")
        figures = (f"{ms[name]:.4f}" if name in ms else "–" for name in names)
        seconds = row["estimated"]
        estimated = seconds["dense"] / seconds["fused"]
        gain = f"{ms['stock'] / ms['fused']:.2f}"
        grid.append([row["case"], *figures, gain, f"{estimated:.2f}", f"{tried[best]:.4f}", best])
    return markdown_grid(grid)
