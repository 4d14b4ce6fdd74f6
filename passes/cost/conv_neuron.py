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
_START = 3e-6
"""Seconds to start and end the neurons' own launch, as its template has it."""


def decide(site: SiteInfo, steps: int, card: Card = H100) -> Decision:
    """`fused`, or `dense`, which stands here for the two launches.

    Args:
        site: the convolution, of all steps' images.
        steps: time steps.
    """
    neurons = site.n * site.k * site.out_pixels
    product = seconds_of(site, "binary", card)
    # spikes and membranes are written either way
    alone = 4 * neurons / card.bandwidth + _START + card.launch
    slots = 1 << (steps - 1).bit_length()
    work = _OPERATIONS * neurons * slots / steps / card.fp32
    layer = host.SPIKE_LAYER["binary"]
    times = {
        "dense": Time(product + alone, layer + host.OPERATOR + host.LAUNCH),
        "fused": Time(product * slots / steps + work, layer),
    }
    return fastest({name: time.waited(replayed=not site.hosted) for name, time in times.items()}, rival="apart")
