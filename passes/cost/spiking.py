"""Whether a rewrite pays: measured times, else a roofline estimate, of the dense operator and each sparse one.

Pure functions of a site, the card and what was measured, so that a decision can be tested and explained without a GPU.
"""

from collections.abc import Mapping
from math import gcd

import sympy

from sparsecomp.lowering.cache.signature import Size
from sparsecomp.lowering.spiking.implementations import EVENT_CAPACITY, SiteInfo, able
from sparsecomp.lowering.tuning import host
from sparsecomp.lowering.tuning.cards import H100, ByPrecision, Card
from sparsecomp.lowering.tuning.cost import Cost, break_even, sizes
from sparsecomp.lowering.tuning.host import Time
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.reference.digits import padded_channels
from sparsecomp.reference.geometry import IMAGE_DIMS

_SLOWER = 3.0
"""Than the estimate are transposed convolutions of float32 signals and volumes (2.2 and 3.1 on an H200,
`bench/results/spike_layers.json`); those of images, and in half precision, are not."""
_TRANSPOSING = 0.5
"""Share of the bandwidth that a copy of bytes into channels-last reaches, which such maps need first; not measured."""
_VECTOR = 16
"""Bytes that the fastest loads and copies take at a time; channels that are no multiple of it allow fewer."""

_DIRECT = {True: 0.29, False: 0.14}
"""Share of the float32 ceiling that the direct kernel reaches with one channel a group and with more: what an H100 can
load and turn into numbers (CUDA C++ Programming Guide), 32 and 16 bytes a cycle of each processor; not measured."""
# Seconds, alike on all cards.
_FINDING = 35e-6
"""To find events, beyond the traffic."""
_LISTING = 15e-6
"""To list active pixels, beyond the traffic."""
_STEP = 0.6e-6
"""One step of the reduction in a tile that nothing overlaps: what a layer with few active pixels waits for."""

# Sites' numbers by name, then what :func:`_numbers` adds, then the card's.
_FIELDS = "itemsize n c in_pixels k taps out_pixels groups digits density active fused depth width walked crossed"
(
    _itemsize, _n, _c, _in_pixels, _k, _taps, _out_pixels, _groups, _digits, _density, _active, _fused, _depth, _width,
    _walked, _crossed,
) = sizes(_FIELDS)  # fmt: skip
_dense_share, _int8_share, _direct_share, _event_share = sizes("dense_share int8_share direct_share event_share")
_bandwidth, _int8, _single_rows, _splitting, _launch = sizes("bandwidth int8 single_rows splitting launch")

_inputs = _n * _c * _in_pixels
_weights = _k * _c / _groups * _taps
_operations = 2 * _n * _walked * _weights
# tensor cores multiply whole tiles, whatever part of them channels fill
_products = 2 * _n * _walked * _taps * _groups * _depth * _width * _digits / _int8_share
# every call splits the weight anew, in a launch of its own: it is read twice, written in bytes
_packing = sympy.Max(_weights * (2 * _itemsize + _digits) / _bandwidth, _splitting)


def _bytes(input_itemsize: Size, weight_itemsize: Size) -> sympy.Expr:
    return _inputs * input_itemsize + _weights * weight_itemsize + _n * _k * _out_pixels * _itemsize


# bytes that neurons wrote in another order than channels-last are copied; a prescan writes them so
_crossing = _crossed * (2 * _inputs / _bandwidth / _TRANSPOSING + _launch)

_NONE = sympy.Integer(0)  # the rates were measured with the launches in them

_DENSE = {
    rate: Cost(
        _bytes(_itemsize, _itemsize), _operations / _dense_share, rate, _NONE,
        # whoever makes the spikes writes them at full width, where a fused site has them written as bytes
        _fused * _inputs * (_itemsize - 1) / _bandwidth,
    )
    for rate in ByPrecision._fields
}  # fmt: skip

_SPARSE = {
    "binary": Cost(
        _bytes(1, _digits), _products, "int8", _NONE,
        # unfused, a prescan reads the input at full width and writes it as bytes
        _packing + (1 - _fused) * _inputs * (_itemsize + 1) / _bandwidth + _crossing,
    ),
    "direct": Cost(
        _bytes(1, _itemsize), _operations / _direct_share, "fp32", _NONE,
        (1 - _fused) * _inputs * (_itemsize + 1) / _bandwidth + _crossing,
    ),
    "event": Cost(
        _NONE, _operations * _density / _event_share, "bandwidth", _NONE,
        # the fallback's form of the weight is made too; single rows reach less of the bandwidth
        2 * _packing + _bytes(_itemsize, _itemsize) / _single_rows / _bandwidth + _FINDING,
    ),
    "skip": Cost(
        _NONE, _NONE, "int8", _NONE,
        # the prescan reads the input and lists pixels; then only listed rows are multiplied, but all are written
        _packing + _bytes(_itemsize + 2, _digits) / _bandwidth + _LISTING
        + sympy.Max(_products / _int8 * _active, _taps * _c / _groups / 64 * _STEP),
    ),
}  # fmt: skip


def decide(site: SiteInfo, card: Card = H100, measured: Mapping[str, float] | None = None) -> Decision:
    """The fastest implementation of `site`; dense unless another wins by a margin.

    Args:
        measured: milliseconds by implementation, of sites with this one's signature. They decide if `dense` and another
            that can serve the site are among them; estimates do otherwise.
    """
    if site.device != "cuda":
        return Decision("dense", "no CUDA device: dense is faster on the CPU")
    names = able(site)
    known = {name: measured[name] for name in names if measured and name in measured}
    if "dense" in known and len(known) > 1:
        return fastest({name: as_called(site, name, ms * 1e-3, card) for name, ms in known.items()}, "measured")
    decision = fastest({name: as_called(site, name, seconds_of(site, name, card), card) for name in names})
    below = event_pays_below(site, card)
    return decision if below is None else decision._replace(reason=f"{decision.reason}; {_described(below)}")


def as_called(site: SiteInfo, strategy: str, device: float, card: Card = H100) -> float:
    """Seconds that a site adds to a step, where its own product takes `device` seconds of the card's.

    The gradients are the dense operator's whatever the product is, of spikes that the bytes are widened to first.
    """
    dense = host.MATMUL if _is_matmul(site) else host.CONV
    time = Time(device, dense if strategy == "dense" else host.SPIKE_LAYER[strategy])
    if site.trained:
        gradient = Time(seconds_of(site._replace(fused=False), "dense", card), dense)
        time = time.plus(gradient, gradient)
        if strategy != "dense":
            widened = site.n * site.c * site.in_pixels * (site.itemsize + 1) / card.bandwidth
            time = time.plus(Time(widened, host.LAUNCH))
    return time.waited(replayed=not site.hosted)


def forced(site: SiteInfo, strategy: str, card: Card = H100) -> Decision:
    """An implementation that was asked for, with its estimate; on the CPU, where references run, there is none."""
    reason = f"implementation={strategy!r} was asked for"
    if site.device != "cuda":
        return Decision(strategy, f"{reason}; on a CPU it is a reference, for checking only")
    needed = {"event": site.density, "skip": site.active}
    known = strategy if needed.get(strategy, 1.0) is not None else "binary"
    times = {"dense": seconds_of(site, "dense", card), strategy: seconds_of(site, known, card)}
    times = {name: as_called(site, name, device, card) for name, device in times.items()}
    return Decision(strategy, reason, times)


def seconds_of(site: SiteInfo, strategy: str, card: Card = H100) -> float:
    """The estimate for one implementation; `event` needs the site's density and `skip` its active share."""
    return _cost(site, strategy).estimate(_numbers(site, card), card)


def expression(site: SiteInfo, strategy: str, card: Card = H100, **symbols: sympy.Expr) -> sympy.Expr:
    """As :func:`seconds_of`, with expressions for the site's fields of those names, such as a symbolic batch."""
    return _cost(site, strategy).expression(card, **{**_numbers(site, card), **symbols})


def event_pays_below(site: SiteInfo, card: Card = H100) -> float | None:
    """Density below which events are the fastest by estimate, 0 if nowhere; None where they cannot serve the site.

    None too where the host is what takes the time, at any density.
    """
    if "event" not in able(site) or (site.hosted and seconds_of(site, "dense", card) < host.SPIKE_LAYER["event"]):
        return None
    rival = min(seconds_of(site, name, card) for name in able(site) if name != "event")
    event = expression(site, "event", card, density=_density)
    return max(0.0, min(EVENT_CAPACITY, float(break_even(event, sympy.Float(rival), _density))))


def _described(below: float) -> str:
    return f"event pays below {below:.2%} density" if below >= 5e-5 else "event pays at no density"


def _cost(site: SiteInfo, strategy: str) -> Cost:
    return _DENSE[_precision(site)] if strategy == "dense" else _SPARSE[strategy]


def _is_matmul(site: SiteInfo) -> bool:
    return site.in_pixels == 1 and not site.transposed


def _precision(site: SiteInfo) -> str:
    return "half" if site.itemsize == 2 else "tf32" if site.tf32 else "fp32"


def _numbers(site: SiteInfo, card: Card) -> dict[str, float]:
    """What the costs depend on: the site's numbers, and which share of the card's ceilings its kernels reach."""
    precision, narrow = _precision(site), site.k // site.groups <= 64
    if _is_matmul(site):
        dense = getattr(card.matmul, precision)
    else:
        conv = card.conv_channels_last if site.channels_last else card.conv
        dense = getattr(conv, precision) * (getattr(card.narrow, precision) if narrow else 1.0)
    int8 = (card.int8_two_digits if site.digits == 2 else 1.0) * (card.int8_narrow if narrow else 1.0)
    channels, outputs = site.c // site.groups, site.k // site.groups
    portable = site.transposed or len(site.size) > IMAGE_DIMS or padded_channels(channels) != channels
    # not measured: at worst the loads are what takes the time, and there are more of them
    int8 *= (card.int8_portable if portable else 1.0) * gcd(channels, _VECTOR) / _VECTOR
    if site.transposed and site.itemsize == 4 and len(site.size) != 2:
        int8 /= _SLOWER
    # the rates were measured with their launches, of whole vectors of channels; layers of others are mostly small
    splitting = card.launch if channels % _VECTOR or outputs % _VECTOR else 0.0
    shares = {
        "dense_share": dense, "int8_share": int8, "splitting": splitting,
        "crossed": float(site.fused and not (site.channels_last or _is_matmul(site))),
        "depth": padded_channels(channels), "width": _whole_tiles(outputs),
        "direct_share": _DIRECT[channels == outputs == 1],
        "event_share": card.events_half if site.itemsize == 2 else card.events_float32,
    }
    fields = {name: getattr(site, name) for name in _FIELDS.split() if name not in shares}
    return shares | {name: float(value) for name, value in fields.items() if value is not None}


def _whole_tiles(outputs: int) -> int:
    """Output channels of a group, rounded up to the narrowest tiles that the kernels have for so many."""
    tile = 32 if outputs <= 32 else 64
    return -(-outputs // tile) * tile
