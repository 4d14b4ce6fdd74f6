"""Whether a convolution and the neurons behind it pay as one launch, beside the two that they are otherwise.

One launch saves what lies between: a float32 number for each neuron and step, written and read. It costs the neurons'
arithmetic where the tensor cores wait for it, and rows of blocks that steps other than powers of two leave empty.
"""

from sparsecomp.lowering.spiking.implementations import SiteInfo
from sparsecomp.lowering.tuning import host
from sparsecomp.lowering.tuning.cards import H100, Card
from sparsecomp.lowering.tuning.host import Time
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.spiking import seconds_of

_OPERATIONS = 40
"""Float operations' worth of time that a neuron's step adds to a product, beyond what leaving out the product's result
saves: 13 to 43 in eight layers on an H200, most where the product is short (`bench/results/conv_neuron.json`)."""
_LEAST = 11e-6
"""Seconds of the smallest product measured, its packing of the weight included: estimates of small ones say less."""
_START = 3e-6
"""Seconds to start and end the neurons' own launch, as its template has it."""


def decide(site: SiteInfo, steps: int, card: Card = H100) -> Decision:
    """`fused`, or `dense`, which stands here for the two launches.

    Args:
        site: the convolution, of all steps' images.
        steps: time steps.
    """
    product, layer = max(seconds_of(site, "binary", card), _LEAST), host.SPIKE_LAYER["binary"]
    slots = 1 << (steps - 1).bit_length()
    work = _OPERATIONS * _neurons(site) * slots / steps / card.fp32
    times = {
        "dense": Time(product, layer).plus(_alone(site, card)),
        # that the product writes no float32 numbers is in the operations
        "fused": Time(product * slots / steps + work, layer),
    }
    return fastest({name: time.waited(replayed=not site.hosted) for name, time in times.items()}, rival="apart")


def with_neurons(layer: Decision, site: SiteInfo, steps: int, card: Card = H100) -> Decision:
    """The decision about a layer, where neurons of so many steps behind it can run in one launch with `binary`."""
    behind = _alone(site, card).waited(replayed=not site.hosted)
    seconds = {name: time + behind for name, time in layer.seconds.items()}
    if "dense" not in seconds or "binary" not in seconds:
        return layer
    seconds["binary"] = min(seconds["binary"], decide(site, steps, card).seconds["fused"])
    together = fastest(seconds, layer.source)
    return together._replace(reason=f"{together.reason}, with the neurons behind it")


def _neurons(site: SiteInfo) -> int:
    return site.n * site.k * site.out_pixels


def _alone(site: SiteInfo, card: Card) -> Time:
    """Of the neurons in a launch of their own, but for spikes and membranes, which are written either way."""
    return Time(4 * _neurons(site) / card.bandwidth + _START + card.launch, host.OPERATOR + host.LAUNCH)
