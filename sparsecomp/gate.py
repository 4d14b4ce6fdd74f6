"""Whether a rewrite pays: a roofline estimate of the dense operator against each sparse implementation.

Pure functions of plain numbers, so that a decision can be tested and explained without a GPU. The constants are
measured on one H100 and stand in one place; on other GPUs only their ratios matter.
"""

from dataclasses import dataclass

MIN_CHANNELS_PER_GROUP = 16
CHANNEL_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class Constants:
    """Rates in operations or bytes a second; a multiply-accumulate is two operations.

    Convolutions: the 3x3 stages of a ResNet at batch 128 (`bench/results`). `narrow` is the share of a rate that 64
    output channels and fewer reach. `event` counts only the products of events, with float32 weights; `listing` is the
    time, in seconds, to list a convolution's active pixels.
    """

    bandwidth: float = 3.0e12
    dense_fp32: float = 80e12
    dense_tf32_nchw: float = 200e12
    dense_tf32_nhwc: float = 350e12
    dense_half_nchw: float = 350e12
    dense_half_nhwc: float = 620e12
    int8: float = 1100e12
    narrow: float = 0.7
    event: float = 4.6e12
    listing: float = 15e-6
    matmul_fp32: float = 50e12
    matmul_tf32: float = 430e12
    matmul_half: float = 720e12
    min_gain: float = 1.05


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
    if site.density is not None and site.groups == 1:
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
    weights = site.k * (site.c // site.groups) * site.r * site.s * weight_itemsize
    return inputs + weights + site.n * site.k * site.out_h * site.out_w * site.itemsize


def _inputs(site: SiteInfo) -> int:
    return site.n * site.c * site.h * site.w


def _dense_rate(site: SiteInfo, constants: Constants) -> float:
    if site.h == site.w == 1:
        tensor_core = constants.matmul_half if site.itemsize == 2 else constants.matmul_tf32
        return tensor_core if site.itemsize == 2 or site.tf32 else constants.matmul_fp32
    if site.itemsize == 4 and not site.tf32:
        return constants.dense_fp32
    share = _share(site, constants)
    if site.itemsize == 2:
        return share * (constants.dense_half_nhwc if site.channels_last else constants.dense_half_nchw)
    return share * (constants.dense_tf32_nhwc if site.channels_last else constants.dense_tf32_nchw)


def _share(site: SiteInfo, constants: Constants) -> float:
    return constants.narrow if site.k // site.groups <= 64 else 1.0


def _dense_seconds(site: SiteInfo, constants: Constants) -> float:
    traffic = _bytes(site, site.itemsize, site.itemsize) / constants.bandwidth
    seconds = max(traffic, _operations(site) / _dense_rate(site, constants))
    # whoever makes the spikes writes them at full width, where a fused site has them written as bytes
    return seconds + (_inputs(site) * (site.itemsize - 1) / constants.bandwidth if site.fused else 0.0)


def _binary_seconds(site: SiteInfo, constants: Constants) -> float:
    traffic = _bytes(site, 1, site.digits + site.itemsize) / constants.bandwidth
    seconds = max(traffic, _operations(site) * site.digits / (constants.int8 * _share(site, constants)))
    # unfused, a prescan reads the input at full width and writes it as bytes
    return seconds + (0.0 if site.fused else _inputs(site) * (site.itemsize + 1) / constants.bandwidth)


def _skip_seconds(site: SiteInfo, constants: Constants) -> float:
    assert site.active is not None
    # the prescan reads the input and lists pixels; then only listed rows are multiplied, but all are written
    traffic = _bytes(site, site.itemsize + 2, site.digits + site.itemsize) / constants.bandwidth
    work = _operations(site) * site.digits / (constants.int8 * _share(site, constants))
    return traffic + work * site.active + constants.listing


def _event_seconds(site: SiteInfo, constants: Constants) -> float:
    assert site.density is not None
    traffic = _bytes(site, 2 * site.itemsize, site.itemsize) / constants.bandwidth
    return traffic + _operations(site) * site.density / constants.event
