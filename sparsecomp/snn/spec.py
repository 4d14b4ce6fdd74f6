"""The form of a registry entry."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparsecomp.reference.facts import SparsityFact


@dataclass(frozen=True)
class NotASource:
    """A neuron whose output is no small set of values, and why."""

    reason: str


@dataclass(frozen=True)
class NeuronSpec:
    """The domain of a neuron class and the form of its result; see `sparsecomp.snn.registry.register_neuron`."""

    domain: SparsityFact | NotASource | Callable[[Any], SparsityFact | NotASource]
    returns_tuple: bool | Callable[[Any], bool] = False
    writes_input: bool = False
