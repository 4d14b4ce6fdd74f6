"""Whether a rewrite pays: a roofline estimate of the dense operator against each sparse implementation.

Pure functions of plain numbers, so that a decision can be tested and explained without a GPU. The constants are
measured on one H100 and stand in one place; on other GPUs only their ratios matter.
"""

from dataclasses import dataclass

MIN_CHANNELS_PER_GROUP = 16
CHANNEL_MULTIPLE = 16
EVENT_CAPACITY = 0.05
"""Densest input for the event path: its list holds a sixteenth of the elements; beyond, the work is done twice."""


@dataclass(frozen=True, slots=True)
class Constants:
    """Rates in operations or bytes a second; a multiply-accumulate is two operations.

    Convolutions: the 3x3 stages of a ResNet at batch 128 (`bench/results`). `narrow_*` is the share of a rate that 64
    output channels and fewer reach. `event_*` count only the products of events. The last three are seconds: `finding`
    events and `listing` active pixels beyond the traffic, and one `step` of the reduction in a tile that nothing
    overlaps, which is what a layer with few active pixels waits for.
    """

    bandwidth: float = 3.0e12
    dense_fp32: float = 80e12
    dense_tf32_nchw: float = 200e12
    dense_tf32_nhwc: float = 330e12
    dense_half_nchw: float = 350e12
    dense_half_nhwc: float = 620e12
    int8: float = 1100e12
    int8_two_digits: float = 850e12
    narrow_int8: float = 0.65
    narrow_tf32: float = 0.45
    narrow_half: float = 0.65
    event_fp32: float = 5.3e12
    event_half: float = 8e12
    matmul_fp32: float = 50e12
    matmul_tf32: float = 430e12
    matmul_half: float = 800e12
    min_gain: float = 1.03
    finding: float = 35e-6
    listing: float = 15e-6
    step: float = 0.6e-6


H100 = Constants()


@dataclass(frozen=True, slots=True)
class SiteInfo:
    """One convolution (or linear layer, as a 1x1 convolution of a 1x1 map).

    Attributes:
        device: "cuda" or "cpu".
        itemsize: bytes of an input element, 4 or 2.
        n, c, h, w: input shape.
        k, r, s: output channels and kernel.
        out_h, out_w: output map.
        groups: convolution groups.
        digits: int8 digits the weights are split into.
        density: share of non-zero inputs, None if unknown.
        active: share of output pixels whose window holds a non-zero input, None if unknown.
        tf32: the dense operator would run in TF32.
        channels_last: the input lies in channels_last (or is a linear layer's).
        fused: the cast to bytes costs no pass of its own, since Inductor or the neuron makes it.
    """

    device: str
    itemsize: int
    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    out_h: int
    out_w: int
    groups: int
    digits: int
    density: float | None
    active: float | None
    tf32: bool
    channels_last: bool
    fused: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """The implementation to use (`dense` leaves the site alone), the speed-up it promises, and why."""

    strategy: str
    expected_gain: float
    reason: str


def decide(site: SiteInfo, constants: Constants = H100) -> Decision:
    """The fastest implementation of `site` by estimate; dense unless another wins by a margin."""
    refusal = _unsuitable(site)
    if refusal is not None:
        return Decision("dense", 1.0, refusal)
    dense = _dense_seconds(site, constants)
    times = {"binary": _binary_seconds(site, constants)}
    if site.density is not None and site.density < EVENT_CAPACITY and site.groups == 1:
        times["event"] = _event_seconds(site, constants)
    if site.active is not None:
        times["skip"] = _skip_seconds(site, constants)
    strategy = min(times, key=lambda name: times[name])
    gain = dense / times[strategy]
    estimate = f"estimated {times[strategy] * 1e6:.1f} us against {dense * 1e6:.1f} us dense"
    if gain < constants.min_gain:
        return Decision("dense", gain, f"{strategy} would not pay: {estimate}")
    return Decision(strategy, gain, estimate)


def estimate(site: SiteInfo, strategy: str, constants: Constants = H100) -> float:
    """The expected speed-up of a forced implementation (1.0 on the CPU, where operators run their references)."""
    if site.device != "cuda":
        return 1.0
    if strategy == "event" and site.density is not None:
        seconds = _event_seconds(site, constants)
    elif strategy == "skip" and site.active is not None:
        seconds = _skip_seconds(site, constants)
    else:
        seconds = _binary_seconds(site, constants)
    return _dense_seconds(site, constants) / seconds


def _unsuitable(site: SiteInfo) -> str | None:
    if site.device != "cuda":
        return "no CUDA device: dense is faster on the CPU"
    per_group = site.c // site.groups
    if site.groups > 1 and per_group < MIN_CHANNELS_PER_GROUP:
        return f"{per_group} channels a group: too few to fill a tensor core (at least {MIN_CHANNELS_PER_GROUP})"
    if per_group % CHANNEL_MULTIPLE or site.k // site.groups % CHANNEL_MULTIPLE:
        return f"{site.c} -> {site.k} channels in {site.groups} groups: not multiples of {CHANNEL_MULTIPLE}"
    return None


def _operations(site: SiteInfo) -> float:
    rows = site.n * site.out_h * site.out_w
    return 2.0 * rows * site.k * (site.c // site.groups) * site.r * site.s


def _bytes(site: SiteInfo, input_itemsize: int, weight_itemsize: int) -> float:
    inputs = _inputs(site) * input_itemsize
    return inputs + _weights(site) * weight_itemsize + site.n * site.k * site.out_h * site.out_w * site.itemsize


def _weights(site: SiteInfo) -> int:
    return site.k * (site.c // site.groups) * site.r * site.s


def _inputs(site: SiteInfo) -> int:
    return site.n * site.c * site.h * site.w


def _dense_rate(site: SiteInfo, constants: Constants) -> float:
    if site.h == site.w == 1:
        tensor_core = constants.matmul_half if site.itemsize == 2 else constants.matmul_tf32
        return tensor_core if site.itemsize == 2 or site.tf32 else constants.matmul_fp32
    if site.itemsize == 2:
        rate = constants.dense_half_nhwc if site.channels_last else constants.dense_half_nchw
        return rate * _narrow(site, constants.narrow_half)
    if site.tf32:
        rate = constants.dense_tf32_nhwc if site.channels_last else constants.dense_tf32_nchw
        return rate * _narrow(site, constants.narrow_tf32)
    return constants.dense_fp32


def _int8_seconds(site: SiteInfo, constants: Constants) -> float:
    rate = constants.int8_two_digits if site.digits == 2 else constants.int8
    return _operations(site) * site.digits / (rate * _narrow(site, constants.narrow_int8))


def _narrow(site: SiteInfo, share: float) -> float:
    return share if site.k // site.groups <= 64 else 1.0


def _dense_seconds(site: SiteInfo, constants: Constants) -> float:
    traffic = _bytes(site, site.itemsize, site.itemsize) / constants.bandwidth
    seconds = max(traffic, _operations(site) / _dense_rate(site, constants))
    # whoever makes the spikes writes them at full width, where a fused site has them written as bytes
    return seconds + (_inputs(site) * (site.itemsize - 1) / constants.bandwidth if site.fused else 0.0)


def _binary_seconds(site: SiteInfo, constants: Constants) -> float:
    traffic = _bytes(site, 1, site.digits) / constants.bandwidth
    seconds = _packing_seconds(site, constants) + max(traffic, _int8_seconds(site, constants))
    # unfused, a prescan reads the input at full width and writes it as bytes
    return seconds + (0.0 if site.fused else _inputs(site) * (site.itemsize + 1) / constants.bandwidth)


def _packing_seconds(site: SiteInfo, constants: Constants) -> float:
    """Every call splits the weight anew: it is read twice and written in bytes."""
    return _weights(site) * (2 * site.itemsize + site.digits) / constants.bandwidth


def _skip_seconds(site: SiteInfo, constants: Constants) -> float:
    assert site.active is not None
    # the prescan reads the input and lists pixels; then only listed rows are multiplied, but all are written
    traffic = _bytes(site, site.itemsize + 2, site.digits) / constants.bandwidth
    wait = site.r * site.s * (site.c // site.groups) / 64 * constants.step
    work = max(_int8_seconds(site, constants) * site.active, wait)
    return _packing_seconds(site, constants) + traffic + work + constants.listing


def _event_seconds(site: SiteInfo, constants: Constants) -> float:
    assert site.density is not None
    rate = constants.event_half if site.itemsize == 2 else constants.event_fp32
    # single-row stores and loads reach three quarters of the bandwidth
    traffic = _bytes(site, site.itemsize, site.itemsize) / (0.75 * constants.bandwidth)
    packing = 2 * _packing_seconds(site, constants)  # the fallback's form of the weight is made too
    return packing + constants.finding + traffic + _operations(site) * site.density / rate
