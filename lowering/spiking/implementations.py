"""The implementations of a layer on spikes as one operation, dense among them, so that a choice can be measured.

The gate estimates which pays; where tuning is asked for, it is measured on spikes of the site's density instead.
"""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature, density_bucket
from sparsecomp.lowering.spiking.convolution import as_image, labelled, numbered
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.geometry import IMAGE_DIMS, AnyWindow, TransposedWindow, Window, convolve, laid_out

_UNKNOWN_DENSITY = 0.15
"""Density of the trial where the site's is unknown: trained spiking networks fire at 8 to 20 %."""
_BLOCK = 8
_VECTOR = 16
EVENT_CAPACITY = 0.05
"""Densest input for the event path: its list holds a sixteenth of the elements; beyond, the work is done twice."""


class SiteInfo(NamedTuple):
    """One convolution, or a linear layer as one of a single pixel.

    Attributes:
        device: "cuda" or "cpu".
        itemsize: bytes of an input element, 4 or 2.
        n, c: images and channels of the input.
        size: of the input's maps.
        k: output channels.
        window, groups: the geometry.
        digits: int8 digits the weights are split into.
        density: share of non-zero inputs, None if unknown.
        active: share of output pixels whose window holds a non-zero input, None if unknown.
        tf32: the dense operator would run in TF32.
        channels_last: the input lies in channels_last (or is a linear layer's).
        fused: the cast to bytes costs no pass of its own, since Inductor or the neuron makes it.
        trained: both gradients are computed too.
        hosted: the host launches each kernel as it comes, and no CUDA graph replays them.
    """

    device: str
    itemsize: int
    n: int
    c: int
    size: tuple[int, ...]
    k: int
    window: AnyWindow
    groups: int
    digits: int
    density: float | None
    active: float | None
    tf32: bool
    channels_last: bool
    fused: bool
    trained: bool = False
    hosted: bool = False

    @property
    def out_size(self) -> tuple[int, ...]:
        """Of the output's maps."""
        return self.window.output_size(self.size)

    @property
    def in_pixels(self) -> int:
        """Of an image."""
        return prod(self.size)

    @property
    def out_pixels(self) -> int:
        """Of an output image."""
        return prod(self.out_size)

    @property
    def taps(self) -> int:
        """Pixels that a window sees."""
        return prod(self.window.kernel)

    @property
    def transposed(self) -> bool:
        """Whether it is a transposed convolution."""
        return isinstance(self.window, TransposedWindow)

    @property
    def walked(self) -> float:
        """Output pixels of an image, each times the share of the window's taps that it sees."""
        return self.out_pixels / prod(self.window.stride) if self.transposed else self.out_pixels

    @property
    def is_linear(self) -> bool:
        """Whether it is a product of matrices: maps and window of one pixel."""
        return self.in_pixels == self.taps == 1

    def signature(self, device: Device) -> KernelSignature:
        """Under which the times of this site's implementations on `device` are kept; bfloat16 counts as float16."""
        parameters = {name: int(getattr(self, name)) for name in ("c", "k", "groups", "digits", "tf32", "fused")}
        parameters |= labelled("", "trs", as_image(self.window.kernel, 1))
        parameters |= labelled("stride_", "dhw", as_image(self.window.stride, 1))
        return KernelSignature(
            "spike_conv", device, dtypes=(f"float{8 * self.itemsize}",),
            layouts=("nhwc" if self.channels_last else "nchw",),
            sizes=(("n", self.n), *labelled("", "dhw", as_image(self.size, 1)).items()),
            parameters=(*parameters.items(), ("active", density_bucket(self.active))), density=self.density,
        )  # fmt: skip


def able(site: SiteInfo) -> list[str]:
    """The implementations that can serve a site, by what is known of its input; dense first."""
    if site.transposed:
        return ["dense", "binary"]
    # the other two were measured, and pay, with whole vectors of channels only
    image = len(site.size) <= IMAGE_DIMS and not (site.c % _VECTOR or site.k % _VECTOR)
    sparse = image and site.density is not None and site.density < EVENT_CAPACITY and site.groups == 1
    active = image and site.active is not None
    few = ["direct"] if site.groups > 1 else []
    return ["dense", "binary", *few, *(["event"] if sparse else []), *(["skip"] if active else [])]


def _representative(signature: KernelSignature) -> SiteInfo:
    """A site with padding by half its kernel, at the signature's sizes."""
    sizes, given = dict(signature.sizes), dict(signature.parameters)
    c, k, groups, digits, tf32, fused = (int(given[name]) for name in ["c", "k", "groups", "digits", "tf32", "fused"])
    active = str(given["active"])
    return SiteInfo(
        "cuda", 2 if signature.dtypes[0] == "float16" else 4, int(sizes["n"]), c, numbered(sizes, "", "dhw"), k,
        Window.centred(numbered(given, "", "trs"), numbered(given, "stride_", "dhw")), groups, digits,
        signature.density, None if active == "unknown" else 2.0 ** int(active[2:]) if active != "0" else 0.0,
        bool(tf32), signature.layouts[0] == "nhwc", bool(fused),
    )  # fmt: skip


def _operands(site: SiteInfo, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    """Spikes at full width and as bytes, a weight, and the output."""
    random = torch.Generator(device).manual_seed(seed)
    dtype = torch.float16 if site.itemsize == 2 else torch.float32
    density = _UNKNOWN_DENSITY if site.density is None else site.density
    spikes = torch.rand(site.n, site.c, *site.size, generator=random, device=device) < density
    if site.active is not None and site.active < 1:
        blocks = torch.rand(site.n, 1, *(-(-extent // _BLOCK) for extent in site.size), generator=random, device=device)
        alive = blocks < site.active
        for dim, extent in enumerate(site.size, 2):
            alive = alive.repeat_interleave(_BLOCK, dim).narrow(dim, 0, extent)
        spikes &= alive
    weight = torch.randn(
        site.k, site.c // site.groups, *site.window.kernel, generator=random, device=device
    ).to(dtype)  # fmt: skip
    out = torch.full((site.n, site.k, *site.out_size), float("nan"), dtype=dtype, device=device)
    x, weight, out = (laid_out(tensor, site.channels_last) for tensor in (spikes.to(dtype), weight, out))
    return x, laid_out(x.to(torch.int8), channels_last=True), weight, out


def _reference(site: SiteInfo, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    x, _, weight, _ = operands
    assert x is not None and weight is not None
    return (convolve(x.double(), weight.double(), None, site.window, site.groups),)


def _tolerance(site: SiteInfo) -> float:
    """Of the dense operator's precision, which is one of the candidates."""
    return 2e-3 if site.tf32 or site.itemsize == 2 or site.digits < 3 else 2e-6


SPIKE_CONV = Operation(
    "spike_conv", SiteInfo.signature, _representative, _operands, (3,), _reference, _tolerance
)
