"""Whether a convolution and the neurons behind it pay as one launch, beside the two that they are otherwise.

One launch saves what lies between: a float32 number for each neuron and step, written and read. It costs the neurons'
arithmetic where the tensor cores wait for it, and rows of blocks that steps other than powers of two leave empty.

The constants are fitted to how far both ways are apart in 12 layers on an H200 (`bench/results/conv_neuron.json`), of
one launch in the configuration that it chooses now. Each layer gets the way that was the faster there, or is within 2 %
of it.
"""

from sparsecomp.lowering.spiking.implementations import SiteInfo
from sparsecomp.lowering.tuning import host
from sparsecomp.lowering.tuning.cards import H100, Card
from sparsecomp.lowering.tuning.host import Time
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.spiking import seconds_of

_OPERATIONS, _DIVISION = 14, 49
"""Float operations' worth of time that a neuron's step adds to a product, one in float32 that no product hides; and a
division by a number that is no power of two: what the same layers took longer when all their neurons divided."""
_BLOCK, _TAIL = 128 * 64, 3e-6
"""Neurons' steps of a block, and seconds of the last blocks' neurons, which nothing hides. Where blocks are too few for
all processors, they are half as large."""
_SHARE = 0.83
"""Of the bandwidth, what neurons in a launch of their own reach."""
_LEAST = 11e-6
"""Seconds of the smallest product measured, its packing of the weight included: estimates of small ones say less."""


def decide(site: SiteInfo, steps: int, card: Card = H100, divides: bool = False) -> Decision:
    """`fused`, or `dense`, which stands here for the two launches.

    Args:
        site: the convolution, of all steps' images.
        steps: time steps.
        divides: a step of a neuron takes a division.
    """
    product, layer = max(seconds_of(site, "binary", card), _LEAST), host.SPIKE_LAYER["binary"]
    slots = 1 << (steps - 1).bit_length()
    rows = _neurons(site) * slots / steps
    operations = _OPERATIONS + _DIVISION * divides
    work = operations * rows / card.fp32 + (_TAIL if rows >= _BLOCK * card.processors else _TAIL / 2)
    # spikes and last membranes, in place of the numbers that a product of so many rows writes
    written = ((1 + 4 / steps) * _neurons(site) - 4 * rows) / (_SHARE * card.bandwidth)
    times = {
        "dense": Time(product, layer).plus(_alone(site, steps, card)),
        "fused": Time(product * slots / steps + work + written, layer),
    }
    return fastest({name: time.waited(replayed=not site.hosted) for name, time in times.items()}, rival="apart")


def with_neurons(
    layer: Decision, site: SiteInfo, steps: int, card: Card = H100, divides: bool = False
) -> Decision:  # fmt: skip
    """The decision about a layer, where neurons of so many steps behind it can run in one launch with `binary`."""
    behind = _alone(site, steps, card).waited(replayed=not site.hosted)
    seconds = {name: time + behind for name, time in layer.seconds.items()}
    if "dense" not in seconds or "binary" not in seconds:
        return layer
    seconds["binary"] = min(seconds["binary"], decide(site, steps, card, divides).seconds["fused"])
    together = fastest(seconds, layer.source)
    return together._replace(reason=f"{together.reason}, with the neurons behind it")


def _neurons(site: SiteInfo) -> int:
    return site.n * site.k * site.out_pixels


def _alone(site: SiteInfo, steps: int, card: Card) -> Time:
    """Of the neurons in a launch of their own: numbers are read, spikes written, and last membranes."""
    traffic = (4 + 1 + 4 / steps) * _neurons(site) / (_SHARE * card.bandwidth)
    return Time(traffic + card.launch, host.OPERATOR + host.LAUNCH)
