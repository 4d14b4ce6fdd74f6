"""Whether a rewrite pays: measured times, else a roofline estimate, of the dense operator and each sparse one.

Pure functions of a site, the card's ceilings and what was measured, so that a decision can be tested and explained
without a GPU. What kernels reach of a ceiling was measured on one H100; other cards are taken to reach the same share.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import sympy

from sparsecomp.lowering.cache.signature import Size
from sparsecomp.lowering.spiking.implementations import EVENT_CAPACITY, SiteInfo, able
from sparsecomp.lowering.tuning.ceilings import H100, Ceilings
from sparsecomp.lowering.tuning.cost import Cost, break_even, sizes

MIN_CHANNELS_PER_GROUP = 16
CHANNEL_MULTIPLE = 16
MIN_GAIN = 1.03
"""Least speed-up for which a site is rewritten."""

# Operations a second on an H100 (`bench/results`); another card is taken to reach the same share of its ceilings.
_CONV_RATES = {"fp32": (80e12, 80e12), "tf32": (200e12, 330e12), "half": (350e12, 620e12)}
"""cuDNN's, at the 3×3 stages of a ResNet at batch 128, for channels-first and channels-last input."""
_MATMUL_RATES = {"fp32": 50e12, "tf32": 430e12, "half": 800e12}
_BINARY_RATES = {2: 850e12, 3: 1100e12, 4: 1100e12}
"""By digits, at the same stages as cuDNN's; the products of every digit count."""
_NARROW = {"fp32": 1.0, "tf32": 0.45, "half": 0.65, "int8": 0.65}
"""Share of these rates that 64 output channels and fewer reach."""
_EVENT_RATES = {4: 5.3e12, 2: 8e12}
"""By item size; only the products of events count. They wait for weights from memory."""

# Seconds, alike on all cards.
_FINDING = 35e-6
"""To find events, beyond the traffic."""
_LISTING = 15e-6
"""To list active pixels, beyond the traffic."""
_STEP = 0.6e-6
"""One step of the reduction in a tile that nothing overlaps: what a layer with few active pixels waits for."""

# Seconds of the host, by implementation: what one call costs from Python to the last launch.
_HOST = {"dense": 24e-6, "binary": 47e-6, "event": 215e-6, "skip": 115e-6}
_HOST_MATMUL = 12e-6
_HOST_KERNEL = 8e-6
"""One kernel of Inductor's."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The implementation to use (`dense` leaves the site alone), the speed-up it promises, and why."""

    strategy: str
    expected_gain: float
    reason: str


# Sites' numbers by name, then what :func:`_numbers` adds, then the card's.
_FIELDS = "itemsize n c in_pixels k taps out_pixels groups digits density active fused"
_itemsize, _n, _c, _in_pixels, _k, _taps, _out_pixels, _groups, _digits, _density, _active, _fused = sizes(_FIELDS)
_dense_share, _int8_share, _event_share = sizes("dense_share int8_share event_share")
_bandwidth, _int8 = sizes("bandwidth int8")

_inputs = _n * _c * _in_pixels
_weights = _k * _c / _groups * _taps
_operations = 2 * _n * _out_pixels * _weights
_products = _operations * _digits / _int8_share
_packing = _weights * (2 * _itemsize + _digits)  # every call splits the weight anew: it is read twice, written in bytes


def _bytes(input_itemsize: Size, weight_itemsize: Size) -> sympy.Expr:
    return _inputs * input_itemsize + _weights * weight_itemsize + _n * _k * _out_pixels * _itemsize


_NONE = sympy.Integer(0)  # the rates were measured with the launches in them

_DENSE = {
    rate: Cost(
        _bytes(_itemsize, _itemsize), _operations / _dense_share, rate, _NONE,
        # whoever makes the spikes writes them at full width, where a fused site has them written as bytes
        _fused * _inputs * (_itemsize - 1) / _bandwidth,
    )
    for rate in _MATMUL_RATES
}  # fmt: skip

_SPARSE = {
    "binary": Cost(
        _bytes(1, _digits), _products, "int8", _NONE,
        # unfused, a prescan reads the input at full width and writes it as bytes
        (_packing + (1 - _fused) * _inputs * (_itemsize + 1)) / _bandwidth,
    ),
    "event": Cost(
        _NONE, _operations * _density / _event_share, "bandwidth", _NONE,
        # the fallback's form of the weight is made too; single-row stores and loads reach 3/4 of the bandwidth
        (2 * _packing + _bytes(_itemsize, _itemsize) / 0.75) / _bandwidth + _FINDING,
    ),
    "skip": Cost(
        _NONE, _NONE, "int8", _NONE,
        # the prescan reads the input and lists pixels; then only listed rows are multiplied, but all are written
        (_packing + _bytes(_itemsize + 2, _digits)) / _bandwidth + _LISTING
        + sympy.Max(_products / _int8 * _active, _taps * _c / _groups / 64 * _STEP),
    ),
}  # fmt: skip


def decide(site: SiteInfo, ceilings: Ceilings = H100, measured: Mapping[str, float] | None = None) -> Decision:
    """The fastest implementation of `site`; dense unless another wins by a margin.

    Args:
        measured: milliseconds by implementation, of sites with this one's signature. They decide if `dense` and another
            that can serve the site are among them; estimates do otherwise.
    """
    refusal = _unsuitable(site)
    if refusal is not None:
        return Decision("dense", 1.0, refusal)
    names = able(site)
    known = {name: measured[name] for name in names if measured and name in measured}
    if "dense" in known and len(known) > 1:
        called = {name: as_called(site, name, ms * 1e-3, ceilings) * 1e3 for name, ms in known.items()}
        return _fastest(called, lambda ms: f"{ms:.3f} ms", "measured")
    times = {name: as_called(site, name, seconds(site, name, ceilings), ceilings) * 1e6 for name in names}
    decision = _fastest(times, lambda us: f"{us:.1f} us", "estimated")
    below = event_pays_below(site, ceilings)
    return decision if below is None else replace(decision, reason=f"{decision.reason}; {_described(below)}")


def as_called(site: SiteInfo, strategy: str, device: float, ceilings: Ceilings = H100) -> float:
    """Seconds that a site adds to a step, where its own product takes ``device`` seconds of the card's.

    The gradients are the dense operator's whatever the product is, of spikes that the bytes are widened to first. And
    the card waits for its host where that has more to do.
    """
    host = _HOST_MATMUL if strategy == "dense" and _is_matmul(site) else _HOST[strategy]
    if site.trained:
        widened = site.n * site.c * site.in_pixels * (site.itemsize + 1) / ceilings.bandwidth
        device += 2 * seconds(site._replace(fused=False), "dense", ceilings) + (widened if strategy != "dense" else 0.0)
        host += 2 * (_HOST_MATMUL if _is_matmul(site) else _HOST["dense"]) + _HOST_KERNEL * (strategy != "dense")
    return max(device, host) if site.hosted else device


def estimate(site: SiteInfo, strategy: str, ceilings: Ceilings = H100) -> float:
    """The expected speed-up of a forced implementation (1.0 on the CPU, where operators run their references)."""
    if site.device != "cuda":
        return 1.0
    needed = {"event": site.density, "skip": site.active}
    known = needed.get(strategy, 1.0) is not None
    return seconds(site, "dense", ceilings) / seconds(site, strategy if known else "binary", ceilings)


def seconds(site: SiteInfo, strategy: str, ceilings: Ceilings = H100) -> float:
    """The estimate for one implementation; `event` needs the site's density and `skip` its active share."""
    return _cost(site, strategy).estimate(_numbers(site), ceilings)


def expression(site: SiteInfo, strategy: str, ceilings: Ceilings = H100, **symbols: sympy.Expr) -> sympy.Expr:
    """As :func:`seconds`, with expressions in place of the site's fields of those names, such as a symbolic batch."""
    return _cost(site, strategy).expression(ceilings, **{**_numbers(site), **symbols})


def event_pays_below(site: SiteInfo, ceilings: Ceilings = H100) -> float | None:
    """Density below which events are the fastest by estimate, 0 if nowhere; None where they cannot serve the site.

    None too where the host is what takes the time, at any density.
    """
    if "event" not in able(site) or (site.hosted and seconds(site, "dense", ceilings) < _HOST["event"]):
        return None
    rival = min(seconds(site, name, ceilings) for name in able(site) if name != "event")
    event = expression(site, "event", ceilings, density=_density)
    return max(0.0, min(EVENT_CAPACITY, float(break_even(event, sympy.Float(rival), _density))))


def _described(below: float) -> str:
    return f"event pays below {below:.2%} density" if below >= 5e-5 else "event pays at no density"


def _fastest(times: Mapping[str, float], text: Callable[[float], str], source: str) -> Decision:
    strategy = min((name for name in times if name != "dense"), key=lambda name: times[name])
    gain = times["dense"] / times[strategy]
    reason = f"{source} {text(times[strategy])} against {text(times['dense'])} dense"
    if gain < MIN_GAIN:
        return Decision("dense", gain, f"{strategy} would not pay: {reason}")
    return Decision(strategy, gain, reason)


def _unsuitable(site: SiteInfo) -> str | None:
    if site.device != "cuda":
        return "no CUDA device: dense is faster on the CPU"
    per_group = site.c // site.groups
    if site.groups > 1 and per_group < MIN_CHANNELS_PER_GROUP:
        return f"{per_group} channels a group: too few to fill a tensor core (at least {MIN_CHANNELS_PER_GROUP})"
    if per_group % CHANNEL_MULTIPLE or site.k // site.groups % CHANNEL_MULTIPLE:
        return f"{site.c} -> {site.k} channels in {site.groups} groups: not multiples of {CHANNEL_MULTIPLE}"
    return None


def _cost(site: SiteInfo, strategy: str) -> Cost:
    return _DENSE[_precision(site)] if strategy == "dense" else _SPARSE[strategy]


def _is_matmul(site: SiteInfo) -> bool:
    return site.in_pixels == 1


def _precision(site: SiteInfo) -> str:
    return "half" if site.itemsize == 2 else "tf32" if site.tf32 else "fp32"


def _numbers(site: SiteInfo) -> dict[str, float]:
    """What the costs depend on: the site's numbers, and which share of the ceilings its kernels reach."""
    precision = _precision(site)
    narrow = _NARROW if site.k // site.groups <= 64 else dict.fromkeys(_NARROW, 1.0)
    if _is_matmul(site):
        dense = _MATMUL_RATES[precision]
    else:
        dense = _CONV_RATES[precision][site.channels_last] * narrow[precision]
    shares = {
        "dense_share": dense / getattr(H100, precision),
        "int8_share": _BINARY_RATES[site.digits] * narrow["int8"] / H100.int8,
        "event_share": _EVENT_RATES[site.itemsize] / H100.bandwidth,
    }
    fields = {name: getattr(site, name) for name in _FIELDS.split()}
    return shares | {name: float(value) for name, value in fields.items() if value is not None}
