"""Neurons of spikingjelly: 2.x and 0.0.0.0.14 (`activation_based`), 0.0.0.0.12 (`clock_driven`).

Domains were read in the sources and are run in the tests. A neuron's values depend on its surrogate function: only
those whose forward is a step function give {0, 1}, and only with `spiking=True`.
"""

from dataclasses import replace
from typing import Any

from sparsecomp.reference.facts import SparsityFact, binary, integers
from sparsecomp.snn.spec import NeuronSpec, NotASource

_PACKAGE = "spikingjelly.activation_based.neuron"
_CLOCK_DRIVEN = "spikingjelly.clock_driven.neuron"

_STEP_SURROGATES = frozenset({
    "PiecewiseQuadratic", "PiecewiseExp", "Sigmoid", "SoftSign", "SuperSpike", "ATan", "NonzeroSignLogAbs", "Erf",
    "PiecewiseLeakyReLU", "SquarewaveFourierSeries", "S2NN", "QPseudoSpike", "LeakyKReLU", "FakeNumericalGradient",
    "LogTailedReLU", "Rect",
})  # fmt: skip
_BINARY = [
    "IFNode",
    "LIFNode",
    "ParametricLIFNode",
    "SimpleIFNode",
    "SimpleLIFNode",
    "QIFNode",
    "EIFNode",
    "IzhikevichNode",
    "KLIFNode",
    "CUBALIFNode",
    "ComplementaryLIFNode",
    "GatedLIFNode",
    "PSN",
    "MaskedPSN",
    "SlidingPSN",
    "RAFNode",
    "HalfThresholdIFNode",
    "ActivationAwareIFNode",
    "SLTTLIFNode",
    "MPBNLIFNode",
]
_ILC = ["ILCIFNode", "ILCLIFNode", "ILCCUBALIFNode"]
_NOISY = ["NoisyCUBALIFNode", "NoisyILCCUBALIFNode"]
_FEW_SPIKE = ["FewSpikeNode", "OutlierAwareThresholdNode", "HGNode"]
_NON_SPIKING = ["NonSpikingIFNode", "NonSpikingLIFNode", "NoisyNonSpikingIFNode"]


def is_step(surrogate: Any) -> bool:
    """Whether a surrogate function's forward is exactly 0 or 1."""
    cls = type(surrogate)
    known = cls.__module__.startswith("spikingjelly.") and cls.__name__ in _STEP_SURROGATES
    return known and bool(getattr(surrogate, "spiking", False))


def _step_domain(module: Any) -> SparsityFact | NotASource:
    surrogate = getattr(module, "surrogate_function", None)
    if is_step(surrogate):
        return binary()
    return NotASource(f"the surrogate function {type(surrogate).__name__} is not known to give only 0 and 1")


def _ternary(module: Any) -> SparsityFact | NotASource:
    domain = _step_domain(module)
    return domain if isinstance(domain, NotASource) else integers(-1, 1)


def _counts(module: Any) -> SparsityFact | NotASource:
    """Clipped and rounded; NaN and infinity in the membrane come out as NaN."""
    surrogate = getattr(module, "surrogate_function", None)
    count = getattr(surrogate, "max_spike_count", None)
    if type(surrogate).__name__ != "MultiLevelSpikeCount" or not isinstance(count, int):
        return NotASource("ILIFNode without a MultiLevelSpikeCount surrogate")
    return replace(integers(0, count), finite=False)


def _online(module: Any) -> SparsityFact | NotASource:
    """In evaluation `surrogate.heaviside` fires, whatever the surrogate."""
    return _step_domain(module) if module.training else binary()


def _noisy(module: Any) -> SparsityFact | NotASource:
    return NotASource("adds noise to its spikes in training") if module.is_training else _step_domain(module)


def _scaled(scale: str) -> SparsityFact:
    return replace(binary(), scale=scale)


def _few_spike(module: Any) -> NotASource:
    return NotASource("its spikes are weighted by table entries")


_SPECIAL: dict[str, NeuronSpec] = {
    "TernaryIFNode": NeuronSpec(_ternary),
    "TernaryLIFNode": NeuronSpec(_ternary),
    "ILIFNode": NeuronSpec(_counts),
    "STBIFNode": NeuronSpec(replace(integers(-1, 1), scale="q_threshold")),
    # Spikes carry the clamped threshold (IF) or the threshold over delta_t (LIF): computed at run time.
    "DSRIFNode": NeuronSpec(_scaled("v_threshold.clamp(min=v_threshold_lower_bound)")),
    "DSRLIFNode": NeuronSpec(_scaled("v_threshold.clamp(min=v_threshold_lower_bound) / delta_t")),
    "OTTTLIFNode": NeuronSpec(_online, returns_tuple=lambda module: module.training),
    "LIAFNode": NeuronSpec(NotASource("analog: the activation of the membrane, not a spike")),
    "FlexSN": NeuronSpec(NotASource("computes whatever its core function does")),
}

NEURONS: dict[str, NeuronSpec] = {
    **{f"{_PACKAGE}.{name}": NeuronSpec(_step_domain) for name in _BINARY},
    # Inter-layer connections add to the input sequence in place.
    **{f"{_PACKAGE}.{name}": NeuronSpec(_step_domain, writes_input=True) for name in _ILC},
    **{f"{_PACKAGE}.{name}": NeuronSpec(_noisy) for name in _NOISY},
    **{f"{_PACKAGE}.{name}": NeuronSpec(_few_spike) for name in _FEW_SPIKE},
    **{f"{_PACKAGE}.{name}": NeuronSpec(NotASource("non-spiking: gives the membrane")) for name in _NON_SPIKING},
    **{f"{_PACKAGE}.{name}": spec for name, spec in _SPECIAL.items()},
    **{
        f"{_CLOCK_DRIVEN}.{prefix}{kind}Node": NeuronSpec(_step_domain)
        for prefix in ("", "MultiStep")
        for kind in ("IF", "LIF", "ParametricLIF", "EIF", "QIF", "GeneralNode")
    },
}
