"""Neurons whose spikes a graph does not show: those of other libraries, none of which is imported here, and one's own.

    from sparsecomp.snn import binary, register_neuron

    @register_neuron(domain=binary())
    class MyLIF(nn.Module): ...

What a neuron gives is `binary()`, `integers(lo, hi)`, `interval(lo, hi)` (None means no bound: `interval(0, None)` is
any number that is not negative) or `NotASource(reason)`.
"""

from sparsecomp.reference.facts import SparsityFact, binary, integers, interval
from sparsecomp.snn.registry import register_neuron
from sparsecomp.snn.spec import NotASource

__all__ = ["NotASource", "SparsityFact", "binary", "integers", "interval", "register_neuron"]
