"""Whether a layer of fixed fan-in is faster as one operator or as it is written, which Inductor compiles to one loop.

Inductor's loop reads an input, a place and a weight for each product; its gradients read them again, and scatter. The
operator costs more to call, and where nobody promised that the index stays, reads it anew and sorts it in each
backward.
"""

from typing import Any, NamedTuple

import torch

from sparsecomp.lowering.cache.signature import NO_TRITON, Device, has_triton
from sparsecomp.lowering.launch.epilogue import described_output
from sparsecomp.lowering.launch.strided import name_of
from sparsecomp.lowering.tuning import host
from sparsecomp.lowering.tuning.cards import Card
from sparsecomp.lowering.tuning.ceilings import Target, target_of
from sparsecomp.lowering.tuning.host import Time
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.sparse import fastest_candidate
from sparsecomp.reference.local.spread import SPREADS
from sparsecomp.reference.precision import KERNEL_DTYPES


class FixedFanIn(NamedTuple):
    """A layer of fixed fan-in.

    Attributes:
        device: where it runs.
        rows, inputs, outputs, fan_in: sizes; `inputs` and `outputs` of one row.
        dtype: of all operands.
        bias, residual, activation: what is fused behind it.
        spread: as of `sparsecomp.reference.local.spread`; None if unknown, which is the worst for the operator.
        kept: the index is read and transposed once: it is promised to stay, or the lists of its transpose are kept.
        trained, replayed, products: as of `sparsecomp.passes.cost.sparse.Product`.
        target: the card to estimate for, None for that of the device.
        followed: kept lists are compared with the index in each backward, since it may be written to.
    """

    device: torch.device
    rows: int
    inputs: int
    outputs: int
    fan_in: int
    dtype: torch.dtype
    bias: bool
    residual: bool
    activation: str
    spread: str | None
    kept: bool
    trained: bool
    replayed: bool
    products: int
    target: Target | None = None
    followed: bool = False

    @property
    def weights(self) -> int:
        """Numbers of the weight."""
        return self.outputs * self.fan_in

    def waited(self, time: Time) -> float:
        """Seconds that a caller waits for the layer, if it takes this time."""
        return time.waited(self.replayed, host.besides(self.trained, self.products))

    @property
    def multiplied(self) -> int:
        """Products of an input and a weight."""
        return self.rows * self.weights


class _Rates(NamedTuple):
    """On one core: seconds of a call, and nanoseconds for each weight, more for an index that is not kept, for each
    number of the result, and for each product."""

    call: float
    weight: float
    read: float
    result: float
    product: float


_OURS = {False: _Rates(50e-6, 0.3, 2.0, 5.0, 0.05), True: _Rates(480e-6, 15.0, 30.0, 16.0, 0.3)}
_WRITTEN = {False: _Rates(10e-6, 0.0, 0.0, 20.0, 1.1), True: _Rates(100e-6, 0.0, 0.0, 54.0, 2.8)}
"""Without and with gradients, on a core with AVX-512 (torch 2.13), of n_out 256 and 4096, k 8 and 32 and 1 to 16 rows:
medians of a core's time, which for more rows are above the operator's."""


def decide(layer: FixedFanIn) -> Decision:
    """The faster way by estimate: `gather_dot`, or as it is written, which is `dense`."""
    if layer.device.type == "cuda" and layer.dtype in KERNEL_DTYPES:
        if not has_triton():
            return Decision("dense", f"no estimate. {NO_TRITON}")
        return compare(layer, *(layer.target or target_of(layer.device)))
    if layer.device.type != "cpu":
        return Decision("dense", f"no estimate of {layer.dtype} on {layer.device.type}")
    ours, written = (_on_cpu(layer, rates[layer.trained]) for rates in (_OURS, _WRITTEN))
    return fastest({"gather_dot": ours, "dense": written})


def _on_cpu(layer: FixedFanIn, rates: _Rates) -> float:
    each = rates.weight + (0.0 if layer.kept else rates.read)
    nanoseconds = each * layer.weights + layer.rows * layer.outputs * (rates.result + rates.product * layer.fan_in)
    return rates.call + nanoseconds * 1e-9 / torch.get_num_threads()


def compare(layer: FixedFanIn, device: Device, card: Card) -> Decision:
    """`decide` for a CUDA device that is such a card; loads Triton."""
    ours, written = _ours(layer, device, card), _written(layer, card)
    return fastest({"gather_dot": layer.waited(ours), "dense": layer.waited(written)})


def decide_block(first: FixedFanIn, second: FixedFanIn) -> Decision:
    """The fastest way for a residual block of two layers by estimate: as one operator, `residual_block`; each layer as
    one, `gather_dot`; or all as it is written, `dense`."""
    decisions = [decide(layer) for layer in (first, second)]
    if not all(one.seconds for one in decisions):
        return decisions[0]._replace(implementation="dense")
    seconds = {name: sum(one.seconds[name] for one in decisions) for name in ("gather_dot", "dense")}
    if first.device.type == "cuda":
        device, card = first.target or target_of(first.device)
        # Inductor computes the norm, the activation and the sum behind products, and the latter two within its loops
        for name, kernels in (("gather_dot", 3), ("dense", 1)):
            traffic = kernels * 2 * first.rows * first.outputs * first.dtype.itemsize
            seconds[name] += _small(traffic, kernels, card).waited(first.replayed)
        besides = 2 * host.besides(first.trained, first.products)
        seconds["residual_block"] = _block(first, second, device, card).waited(first.replayed, besides)
    return fastest(seconds)


def _block(first: FixedFanIn, second: FixedFanIn, device: Device, card: Card) -> Time:
    from sparsecomp.lowering.local.residual_block import RESIDUAL_BLOCK, ResidualBlock

    rows, dtype = max(first.rows, 1), name_of(first.dtype)
    problem = ResidualBlock(
        rows, first.inputs, first.fan_in, second.fan_in, first.inputs, rows, "rms", "relu", (1, 2, 0, 2), first.trained,
        dtype, dtype, 0.0,
    )  # fmt: skip
    forward = _fastest_of(RESIDUAL_BLOCK, problem, first, device, card)
    gradients = [time for layer in (first, second) for time in _gradients(layer, device, card)]
    return forward.plus(*gradients)


def _fastest_of(operation: Operation[Any], problem: Any, layer: FixedFanIn, device: Device, card: Card) -> Time:
    return fastest_candidate(operation.candidates(problem, device), problem, layer, card)[0]


def _ours(layer: FixedFanIn, device: Device, card: Card) -> Time:
    from sparsecomp.lowering.local.gather_dot import GATHER_DOT, GatherDot

    p = layer
    out = torch.empty(1, p.rows, p.outputs, dtype=p.dtype, device="meta")
    dtypes = (p.dtype if p.bias else None, p.dtype if p.residual else None)
    described = described_output(out, "column", *dtypes, p.activation)
    lines = SPREADS[p.spread or "far"]
    problem = GatherDot(p.rows, p.inputs, p.outputs, p.fan_in, p.inputs, lines, described.dtype, described)
    reading = [] if p.kept else [_small(p.weights * 12, 1, card)]
    return _fastest_of(GATHER_DOT, problem, p, device, card).plus(*reading, *_gradients(p, device, card))


def _gradients(layer: FixedFanIn, device: Device, card: Card) -> list[Time]:
    from sparsecomp.lowering.local.gather_dot_input import GATHER_DOT_INPUT, GatherDotInput
    from sparsecomp.lowering.local.gather_dot_weight import GATHER_DOT_WEIGHT, GatherDotWeight

    p = layer
    if not p.trained:
        return []
    sizes, dtype = (p.rows, p.inputs, p.outputs, p.fan_in), name_of(p.dtype)
    by_input = _fastest_of(GATHER_DOT_INPUT, GatherDotInput(*sizes, p.outputs, dtype), p, device, card)
    weights = GatherDotWeight(*sizes, p.inputs, p.outputs, dtype)
    by_weight = _fastest_of(GATHER_DOT_WEIGHT, weights, p, device, card)
    listing = [] if p.kept else [_small(p.weights * 120, _SORTING, card)]
    comparing = [_small(p.weights * 8, 1, card)] if p.followed else []
    return [by_input, by_weight, *listing, *comparing]


_SORTING = 18
"""Launches by which torch sorts an index and counts it."""


def _small(traffic: float, launches: int, card: Card) -> Time:
    return Time(traffic / card.bandwidth + launches * card.launch, launches * host.LAUNCH)


def _written(layer: FixedFanIn, card: Card) -> Time:
    """Inductor's loop. A gather touches as many lines as neighbouring outputs read, at one a cycle; places and weights
    come from L2 for each row."""
    lines = SPREADS[layer.spread or "near"] / 32 + 1 / 16
    each = max(lines / 1.7e9, (8 + layer.dtype.itemsize) / 3.5e10)
    seconds = layer.multiplied * each / card.processors + card.launch
    # gradients gather once more by the weight and scatter by the input, which takes at least as long
    return Time(3 * seconds, 3 * host.LAUNCH) if layer.trained else Time(seconds, host.LAUNCH)
