"""Whether a convolution and the neurons behind it pay as one launch, beside the two that they are otherwise.

One launch saves what lies between: a float32 number for each neuron and step, written and read. It costs the neurons'
arithmetic where the tensor cores wait for it, and rows of blocks that steps other than powers of two leave empty.

The constants are fitted to how far both ways are apart in 12 layers on an H200 (`bench/results/conv_neuron.json`), of
one launch in the configuration that it chooses now. Each layer gets the way that was the faster there, or is within 2 %
of it; of six layers in float16 beside stock's kernels (`bench/results/conv_neuron_half.json`), within 5 %.
"""

from typing import NamedTuple

from sparsecomp.lowering.spiking.implementations import SiteInfo
from sparsecomp.lowering.tuning import host
from sparsecomp.lowering.tuning.cards import H100, Card
from sparsecomp.lowering.tuning.host import Time
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.spiking import seconds_of

_OPERATIONS, _DIVISION = 14, 49
"""Float operations' worth of time that a neuron's step adds to a product, one in float32 that no product hides; and a
division by a number that is no power of two: what the same layers took longer when all their neurons divided."""
_INSTRUCTIONS = 10
"""Instructions of such a step. What described ones take was not measured: as many operations each."""
_BLOCK, _TAIL = 128 * 64, 3e-6
"""Neurons' steps of a block, and seconds of the last blocks' neurons, which nothing hides. Where blocks are too few for
all processors, they are half as large."""
_SHARE = 0.83
"""Of the bandwidth, what neurons in a launch of their own reach."""
_WRITTEN = 15
"""Bytes for each neuron and step in half precision that Inductor's kernels for a loop of spikingjelly's LIF, with the
batch-norm before, would have to move for their time in six layers (`bench/results/conv_neuron_half.json`)."""
_NORM = 1
"""Numbers for each neuron and step that could be moved in the time that a batch-norm's instructions add to a step. Not
measured: half of the pass that it was, with which layers get what was the fastest in the same file."""
_LEAST = 11e-6
"""Seconds of the smallest product measured, its packing of the weight included: estimates of small ones say less."""


class Behind(NamedTuple):
    """Neurons behind a layer.

    Attributes:
        steps: time steps.
        divides: a step takes a division.
        instructions: of a step of described neurons; 0 of the library's.
        written: what they are given is written for others, too.
        joined: something is added to what the layer gives on the way to them.
    """

    steps: int
    divides: bool = False
    instructions: int = 0
    written: bool = False
    joined: bool = False

    @property
    def operations(self) -> float:
        """Float operations' worth of a step."""
        share = self.instructions / _INSTRUCTIONS if self.instructions else 1.0
        return _OPERATIONS * share + _DIVISION * self.divides


def decide(site: SiteInfo, behind: Behind, card: Card = H100) -> Decision:
    """`fused`, or `dense`, which stands here for the two launches.

    Args:
        site: the convolution, of all steps' images.
        behind: the neurons.
    """
    product, layer = max(seconds_of(site, "binary", card), _LEAST), host.SPIKE_LAYER["binary"]
    steps = behind.steps
    slots = 1 << (steps - 1).bit_length()
    rows = _neurons(site) * slots / steps
    work = behind.operations * rows / card.fp32 + (_TAIL if rows >= _BLOCK * card.processors else _TAIL / 2)
    # spikes, last membranes and what others read, in place of the numbers that a product of so many rows writes
    bytes_each = 1 + _state_bytes(site.itemsize, behind) / steps + site.itemsize * behind.written
    written = (bytes_each * _neurons(site) - site.itemsize * rows) / (_SHARE * card.bandwidth)
    times = {
        "dense": Time(product, layer).plus(_alone(_neurons(site), site.itemsize, behind, card)),
        "fused": Time(product * slots / steps + work + written, layer),
    }
    return fastest({name: time.waited(replayed=not site.hosted) for name, time in times.items()}, rival="apart")


def with_neurons(layer: Decision, site: SiteInfo, behind: Behind, card: Card = H100) -> Decision:
    """The decision about a layer, where neurons behind it can run in one launch with `binary`."""
    if "dense" not in layer.seconds or "binary" not in layer.seconds:
        return layer
    alone = _alone(_neurons(site), site.itemsize, behind, card).waited(replayed=not site.hosted)
    seconds = {name: time + alone for name, time in layer.seconds.items()}
    seconds["binary"] = min(seconds["binary"], _together(site, behind, card))
    together = fastest(seconds, layer.source)
    return together._replace(reason=f"{together.reason}, with the neurons behind it")


def beside_written(layer: Decision, site: SiteInfo, behind: Behind, card: Card = H100) -> Decision:
    """As of :func:`decide`; `dense` is a dense layer and Inductor's kernels for neurons that are written by hand, and
    `neurons` such a layer and our operator."""
    seconds = alone_beside_written(_neurons(site), site.itemsize, behind, card, site.hosted).seconds
    seconds = {name: layer.seconds["dense"] + time for name, time in seconds.items()}
    return fastest({**seconds, "fused": _together(site, behind, card)}, layer.source, rival="as it was written")


def alone_beside_written(neurons: int, itemsize: int, behind: Behind, card: Card, hosted: bool) -> Decision:
    """The decision about neurons that are written by hand, so many times all steps, as an operator or as they are.

    In float32 they stay as they are, since what Inductor makes of them was not measured.
    """
    ways = {"dense": _written(neurons, itemsize, behind, card)}
    if itemsize == 2:
        ways["neurons"] = _alone(neurons, itemsize, behind, card)
    seconds = {name: time.waited(replayed=not hosted) for name, time in ways.items()}
    return fastest(seconds, rival="as it was written") if len(ways) > 1 else Decision("dense", "not measured", seconds)


def _together(site: SiteInfo, behind: Behind, card: Card) -> float:
    """Seconds of one launch. Whoever makes the spikes writes them as bytes, beside what others read of
    them if it is not a neuron of ours."""
    besides = 0.0 if site.fused else site.n * site.c * site.in_pixels / card.bandwidth
    return decide(site._replace(fused=True), behind, card).seconds["fused"] + besides


def _neurons(site: SiteInfo) -> int:
    return site.n * site.k * site.out_pixels


def _state_bytes(itemsize: int, behind: Behind) -> int:
    """Of a last membrane: described ones are of half precision where that is what they are rounded to."""
    return itemsize if behind.instructions else 4


def _alone(neurons: int, itemsize: int, behind: Behind, card: Card) -> Time:
    """Of the neurons in a launch of their own: numbers are read, spikes written, and last membranes.

    A batch-norm before described neurons is part of their step; a sum is a pass of Inductor's.
    """
    between = 2 * itemsize if behind.joined else 0
    between += _NORM * itemsize if behind.instructions else 0
    each = itemsize + 1 + _state_bytes(itemsize, behind) / behind.steps + between
    traffic = each * neurons / (_SHARE * card.bandwidth)
    launches = 1 + behind.joined
    return Time(traffic + launches * card.launch, host.OPERATOR + launches * host.LAUNCH)


def _written(neurons: int, itemsize: int, behind: Behind, card: Card) -> Time:
    """Of Inductor's kernels for all steps. In float32 they were not measured: at best one reads numbers and writes
    spikes and last membranes."""
    moved, launches = (_WRITTEN, 2) if itemsize == 2 else ((2 + 1 / behind.steps) * itemsize, 1)
    traffic = moved * neurons / (_SHARE * card.bandwidth)
    return Time(traffic + launches * card.launch, launches * host.LAUNCH)
