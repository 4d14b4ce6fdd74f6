"""Neurons of sinabs: the domain is that of the spike function, by default MultiSpike (0, 1, 2, …)."""

from dataclasses import replace
from typing import Any

from sparsecomp.reference.facts import SparsityFact, binary, integers
from sparsecomp.snn.spec import NeuronSpec, NotASource

_SPIKING = [
    "LIF",
    "LIFRecurrent",
    "LIFSqueeze",
    "IAF",
    "IAFRecurrent",
    "IAFSqueeze",
    "ALIF",
    "ALIFRecurrent",
    "ALIFSqueeze",
]
_ANALOG = ["ExpLeak", "ExpLeakSqueeze"]


def _spikes(module: Any) -> SparsityFact | NotASource:
    function = module.spike_fn
    if function is None:
        return NotASource("without a spike function it gives the membrane")
    cls = function if isinstance(function, type) else type(function)
    if not cls.__module__.startswith("sinabs."):
        return NotASource(f"the spike function {cls.__name__} is not one of sinabs's")
    if cls.__name__ == "SingleSpike":
        return binary()
    # MultiSpike divides by the threshold and truncates: not negative if the threshold is positive, and as many spikes
    # as fit. NaN and infinity pass.
    if cls.__name__ == "MultiSpike":
        return replace(integers(None, None), finite=False)
    if cls.__name__ == "MaxSpike":
        return replace(integers(None, function.max_num_spikes_per_bin), finite=False)
    return NotASource(f"the spike function {cls.__name__} is not known")


NEURONS: dict[str, NeuronSpec] = {
    **{f"sinabs.layers.{name}": NeuronSpec(_spikes) for name in _SPIKING},
    **{f"sinabs.layers.{name}": NeuronSpec(NotASource("analog: a leaky integrator")) for name in _ANALOG},
}
