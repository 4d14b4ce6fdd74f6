"""Neurons of Norse: `(spikes, state)`, every threshold method is a Heaviside step in the forward."""

from typing import Any

from sparsecomp.reference.facts import SparsityFact, binary
from sparsecomp.snn.spec import NeuronSpec, NotASource

_BINARY = [
    "LIF",
    "LIFCell",
    "LIFRecurrent",
    "LIFRecurrentCell",
    "LIFBoxCell",
    "LIFRefracCell",
    "LIFRefracRecurrent",
    "LIFRefracRecurrentCell",
    "LIFAdEx",
    "LIFAdExCell",
    "LIFAdExRecurrent",
    "LIFAdExRecurrentCell",
    "LIFAdExRefracCell",
    "LIFAdExRefracRecurrent",
    "LIFAdExRefracRecurrentCell",
    "LIFEx",
    "LIFExCell",
    "LIFExRecurrent",
    "LIFExRecurrentCell",
    "LIFMCRecurrentCell",
    "LIFMCRefracRecurrentCell",
    "LSNN",
    "LSNNCell",
    "LSNNRecurrent",
    "LSNNRecurrentCell",
    "IAF",
    "IAFCell",
    "Izhikevich",
    "IzhikevichCell",
    "IzhikevichRecurrent",
    "IzhikevichRecurrentCell",
    "CobaLIFCell",
]
_ANALOG = ["LI", "LICell", "LILinearCell", "LIBoxCell"]


def _spikes(module: Any) -> SparsityFact | NotASource:
    """`activation` is an attribute, so another function could have been put there."""
    activation = getattr(module, "activation", None)
    if activation is not None and not getattr(activation, "__module__", "").startswith("norse."):
        return NotASource("its activation is not one of Norse's")
    return binary()


NEURONS: dict[str, NeuronSpec] = {
    **{f"norse.torch.{name}": NeuronSpec(_spikes, returns_tuple=True) for name in _BINARY},
    **{
        f"norse.torch.{name}": NeuronSpec(NotASource("analog: gives the membrane"), returns_tuple=True)
        for name in _ANALOG
    },
}
LEAF_MAKERS = ("norse.torch.module.",)
"""A neuron without a state makes one that requires a gradient, for which nobody can ask."""
