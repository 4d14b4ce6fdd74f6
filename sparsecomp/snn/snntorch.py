"""Neurons of snnTorch: spikes are 0 or `graded_spikes_factor`."""

from dataclasses import replace
from typing import Any

from sparsecomp.reference.facts import SparsityFact, binary, is_dyadic, zeros_kept
from sparsecomp.snn.spec import NeuronSpec, NotASource

_RECURRENT_OR_PLAIN = ["Leaky", "RLeaky", "Synaptic", "RSynaptic", "Alpha", "Lapicque", "SLSTM", "SConv2dLSTM"]
_SEQUENCE = ["StateLeaky", "LinearLeaky"]
_STEP_GRADIENTS = frozenset({
    "straight_through_estimator", "triangular", "fast_sigmoid", "atan", "heaviside", "sigmoid", "spike_rate_escape",
    "custom_surrogate", "SFS",
})  # fmt: skip


def _step_gradient(module: Any) -> bool:
    """Whether the firing function is one of snnTorch's, all of which compare with zero in the forward."""
    function = module.spike_grad
    if getattr(module, "surrogate_disable", False):
        return True
    name = getattr(function, "__qualname__", "")
    if getattr(function, "__module__", None) == "snntorch.surrogate":
        return name.split(".")[0] in _STEP_GRADIENTS
    owner = getattr(function, "__self__", None)  # LeakyParallel fires with its own ATan.apply
    return isinstance(owner, type) and owner.__module__.startswith("snntorch.")


def _not_step(module: Any) -> NotASource:
    return NotASource("its spike_grad is not known to give only 0 and 1")


def _factor(module: Any) -> float | str:
    """A constant factor of one is no factor; any other is read from the module at run time."""
    factor = module.graded_spikes_factor
    if not factor.requires_grad and factor.numel() == 1 and float(factor) == 1.0:
        return 1.0
    return "graded_spikes_factor"


def _graded(module: Any) -> SparsityFact | NotASource:
    if not _step_gradient(module):
        return _not_step(module)
    if getattr(module, "inhibition", False):
        return binary()  # winner takes all, without the factor
    factor = _factor(module)
    if isinstance(factor, str) and module.graded_spikes_factor.numel() != 1:
        return zeros_kept(binary(), finite=False)
    return replace(binary(), scale=factor)


def _sequence(module: Any) -> SparsityFact | NotASource:
    """`fire` applies the factor and `forward` applies it again."""
    if not module.output:
        return NotASource("output=False gives the membrane")
    domain = _graded(module)
    if isinstance(domain, NotASource) or is_dyadic(domain.scale):
        return domain
    return zeros_kept(domain, finite=False)


def _delta(module: Any) -> SparsityFact | NotASource:
    return binary() if _step_gradient(module) else _not_step(module)


def _gives_states(module: Any) -> bool:
    return bool(module.output or not module.init_hidden)


NEURONS: dict[str, NeuronSpec] = {
    **{f"snntorch.{name}": NeuronSpec(_graded, _gives_states) for name in _RECURRENT_OR_PLAIN},
    **{f"snntorch.{name}": NeuronSpec(_sequence, returns_tuple=lambda module: module.output) for name in _SEQUENCE},
    "snntorch.LeakyParallel": NeuronSpec(_graded),
    "snntorch.DeltaLeaky": NeuronSpec(_delta, returns_tuple=True),
    "snntorch.AssociativeLeaky": NeuronSpec(NotASource("gives a product of spikes and queries")),
}
