"""A convolution on spikes with its neurons in one launch, beside the two launches, over the layers of spiking networks.

Times are of CUDA graph replays, on bytes, batch-norm and packing of the weight included. Spikes and membranes of both
ways are compared bit for bit. So is the launch that adds a residual to its spikes, beside the launch and an addition.
The first configurations by estimate are timed as well, to hold the estimates against.
Worker processes compile them side by side into Triton's cache; then one process times them.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.table import markdown_grid
from bench.timing import graph_ms, guarded
from sparsecomp import ops
from sparsecomp.lowering.cache.signature import device_of
from sparsecomp.lowering.spiking.binary_conv import BINARY_CONV, binary_conv_problem
from sparsecomp.lowering.spiking.conv_lif import CONV_LIF, conv_lif_problem
from sparsecomp.lowering.spiking.convolution import Convolution
from sparsecomp.lowering.spiking.fused_layer import FusedLayer
from sparsecomp.lowering.spiking.implementations import SiteInfo
from sparsecomp.lowering.tuning.autotune import tuner
from sparsecomp.lowering.tuning.cards import Card
from sparsecomp.lowering.tuning.ceilings import card_of
from sparsecomp.lowering.tuning.cost import rank
from sparsecomp.lowering.tuning.template import Candidate, Operation
from sparsecomp.lowering.tuning.trial import first_line
from sparsecomp.passes.cost import conv_neuron as gate
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.reference.digits import SPREAD
from sparsecomp.reference.geometry import Window

Row = dict[str, Any]
COPIES = 3
"""Inputs rotated through."""
TRIED = 8
"""Configurations timed, the first by estimate."""
_LIF = (1e-5, "lif", 2.0, None, True, 1.0, 0.0)


class Case(NamedTuple):
    """A layer in float32, exact, with hard reset and batch-norm; a linear one has maps of one pixel."""

    name: str
    batch: int
    c: int
    k: int
    size: int
    kernel: int = 3
    stride: int = 1
    steps: int = 4

    @property
    def window(self) -> Window:
        return Window.centred((self.kernel,) * 2, (self.stride,) * 2)


CASES = (
    Case("SEW-ResNet-34, 64 at 56", 32, 64, 64, 56), Case("64 to 128, stride 2", 32, 64, 128, 56, 3, 2),
    Case("128 at 28", 32, 128, 128, 28), Case("256 at 14", 32, 256, 256, 14), Case("512 at 7", 32, 512, 512, 7),
    Case("1x1, 256 to 512, stride 2", 32, 256, 512, 14, 1, 2), Case("VGG-16, 128 at 16", 64, 128, 128, 16),
    Case("512 at 2", 64, 512, 512, 2), Case("linear, 384 to 1536", 4096, 384, 1536, 1, 1),
    Case("one step", 32, 128, 128, 28, steps=1), Case("six steps", 32, 128, 128, 28, steps=6),
    Case("batch 1", 1, 128, 128, 28),
)  # fmt: skip


def run(workers: int) -> Iterator[Row]:
    """A row a case: milliseconds of both ways and of each, whether bits are equal, and times by configuration.

    Args:
        workers: processes that compile side by side.
    """
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        jobs = [(place, share, workers) for place in range(len(CASES)) for share in range(workers)]
        pool.starmap(_compile, jobs, chunksize=1)
    for case in CASES:
        row: Row = {"case": case.name, "shape": list(case[1:]), "ms": {}, "configurations": {}}
        guarded(row, "ways", partial(_ways, row, case))
        guarded(row, "residual", partial(_residuals, row, case))
        guarded(row, "configurations", partial(_configurations, row, case))
        print(row, flush=True)
        yield row


def _compile(place: int, share: int, workers: int) -> None:
    """One share of what a case launches: the product alone, and the first configurations of both in one."""
    case, device = CASES[place], torch.device("cuda", 0)
    joined = problem_of(case, "add")
    with_residual = tuner().choose(CONV_LIF, joined, device).candidate
    product = binary_conv_problem(_convolution(case), 3)
    alone = tuner().choose(BINARY_CONV, product, device).candidate
    jobs = [(BINARY_CONV, product, alone), (CONV_LIF, joined, with_residual)]
    jobs += [(CONV_LIF, problem_of(case), one) for one in _first(case)]
    for operation, problem, candidate in jobs[share::workers]:
        assert operation.operands is not None
        try:
            candidate.template.prepare(problem, candidate.config)(*operation.operands(problem, device, 0))
        except Exception as error:
            print(case.name, candidate.name, first_line(error), flush=True)


def _ways(row: Row, case: Case) -> None:
    together, alone, neurons = _calls(case)
    for ours, theirs in zip(together[0](), neurons[0](alone[0]()), strict=True):
        row["equal"] = row.get("equal", True) and torch.equal(ours, theirs)
    row["rate"] = round(together[0]()[0].float().mean().item(), 3)
    apart = [lambda a=a, b=b: b(a()) for a, b in zip(alone, neurons, strict=True)]
    current = alone[0]()
    row["ms"] = {
        "apart": graph_ms(apart), "fused": graph_ms(together), "product": graph_ms(alone),
        "neurons": graph_ms([partial(one, current) for one in neurons]),
    }  # fmt: skip
    seconds = decision_of(case, card_of(torch.device("cuda", 0))).seconds
    row["estimated"] = {name: ms * 1e3 for name, ms in seconds.items()}


def _residuals(row: Row, case: Case) -> None:
    """The launch that adds a residual of bytes, and the launch and an addition behind it."""
    together, *_ = _calls(case)
    residuals = [torch.randint_like(call()[0], 4) for call in together]
    joined = [partial(call, residual) for call, residual in zip(together, residuals, strict=True)]
    apart = [lambda a=a, b=b: b + a()[0] for a, b in zip(together, residuals, strict=True)]
    row["equal"] = row["equal"] and torch.equal(joined[0]()[0], apart[0]())
    row["ms"] |= {"joined": graph_ms(joined), "added": graph_ms(apart)}


def decision_of(case: Case, card: Card) -> Decision:
    """What the gate says of a case on a card, in replayed graphs."""
    return gate.decide(site_of(case, itemsize=4, digits=3), gate.Behind(case.steps), card)


def site_of(case: Case, itemsize: int, digits: int) -> SiteInfo:
    """A case as the gate sees it, of a weight's bytes a number and digits in int8."""
    return SiteInfo(
        device="cuda", itemsize=itemsize, n=case.batch * case.steps, c=case.c, size=(case.size,) * 2, k=case.k,
        window=case.window, groups=1, digits=digits, density=None, active=None, tf32=False, channels_last=True,
        fused=True,
    )  # fmt: skip


def _calls(
    case: Case,
) -> tuple[list[Callable[..., Any]], list[Callable[[], Tensor]], list[Callable[[Tensor], Any]]]:
    """Both in one launch, with a residual if it is given one, the product alone, and the neurons alone, each on several
    inputs."""
    random = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device="cuda")

    shape = (case.batch * case.steps, case.size, case.size, case.c)
    inputs = [(normal(*shape) > 1.175).to(torch.int8).movedim(-1, 1) for _ in range(COPIES)]
    weight = normal(case.k, case.c, case.kernel, case.kernel) / (case.c * case.kernel**2) ** 0.5
    norm = (normal(case.k) / 8, normal(case.k).abs() / 8 + 0.02, normal(case.k) / 8 + 1, normal(case.k) / 8)
    window = case.window
    how = (list(window.stride), list(window.padding), list(window.dilation), 1, 3)

    def fused(x: Tensor, residual: Tensor | None = None) -> Any:
        layer = (x, weight, None, *how, 1.0, SPREAD, True, case.steps)
        return ops.conv_lif(*layer, None, 0.0, *norm, *_LIF, True, residual)

    def product(x: Tensor) -> Tensor:
        return torch.ops.sparsecomp.spike_conv_counts(x, weight, None, *how, "binary", 1.0, None, SPREAD, True)

    def neurons(current: Tensor) -> Any:
        return ops.lif(current.unflatten(0, (case.steps, -1)), None, 0.0, *norm, *_LIF)

    return [partial(fused, x) for x in inputs], [partial(product, x) for x in inputs], [neurons] * COPIES


def _configurations(row: Row, case: Case) -> None:
    time_configurations(row, CONV_LIF, problem_of(case), _first(case))


def time_configurations(
    row: Row, operation: Operation[FusedLayer], problem: FusedLayer, candidates: Sequence[Candidate[FusedLayer]]
) -> None:
    """The row's milliseconds by configuration, of launches on several operands."""
    assert operation.operands is not None
    operands = [operation.operands(problem, torch.device("cuda", 0), seed) for seed in range(COPIES)]
    for candidate in candidates:
        launch = candidate.template.prepare(problem, candidate.config)
        calls = [partial(launch, *tensors) for tensors in operands]
        guarded(row["configurations"], str(candidate.config), partial(_timed, row, candidate, calls))


def _timed(row: Row, candidate: Candidate[FusedLayer], calls: list[Callable[[], None]]) -> None:
    row["configurations"][str(candidate.config)] = graph_ms(calls, 8)


def _first(case: Case) -> list[Candidate[FusedLayer]]:
    device, problem = torch.device("cuda", 0), problem_of(case)
    return rank(CONV_LIF.candidates(problem, device_of(device)), problem, card_of(device))[:TRIED]


def _convolution(case: Case) -> Convolution:
    return Convolution.of((case.batch * case.steps, case.c, case.size, case.size), (case.k,), case.window)


def problem_of(case: Case, connect: str = "") -> FusedLayer:
    """A case as the kernels see it, with a residual that is joined in a way or without."""
    neuron = (0.0, 1e-5, 2.0, 1.0, 0.0, case.steps, "lif", True, False, False, True, True, True)
    return conv_lif_problem(_convolution(case), 3, neuron, connect=connect)


def table(rows: list[Row]) -> str:
    """Milliseconds apart and fused, what the estimate said, and the fastest configuration beside the chosen one.

    With a residual too, where that was measured.
    """
    ways = ["product", "neurons", "apart", "fused"]
    grid = [["layer", *ways, "gain", "estimated", "fastest, ms", "configuration", "equal"]]
    for row in rows:
        ms, tried = row["ms"], {name: one for name, one in row["configurations"].items() if isinstance(one, float)}
        if not ms or not tried:
            grid.append([row["case"], *["–"] * 7, str(row.get("left out")), "–"])
            continue
        best = min(tried, key=lambda name: tried[name])
        gain, expected = ms["apart"] / ms["fused"], row["estimated"]["dense"] / row["estimated"]["fused"]
        grid.append([
            row["case"], *(f"{ms[name]:.4f}" for name in ways), f"{gain:.2f}",
            f"{expected:.2f}", f"{tried[best]:.4f}", best, str(row["equal"]),
        ])  # fmt: skip
    joined = [(row["case"], row["ms"]["added"], row["ms"]["joined"]) for row in rows if "joined" in row["ms"]]
    sums = [[case, f"{apart:.4f}", f"{one:.4f}", f"{apart / one:.2f}"] for case, apart, one in joined]
    ways = ["fused, then the residual added", "residual in the launch"]
    return "\n\n".join([markdown_grid(grid), *([markdown_grid([["layer", *ways, "gain"], *sums])] if sums else [])])
