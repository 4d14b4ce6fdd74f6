"""The implementations of a layer on spikes as one operation, dense among them, so that a choice can be measured.

The gate estimates which pays; where tuning is asked for, it is measured on spikes of the site's density instead.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature, density_bucket
from sparsecomp.lowering.tuning.template import Operation

_UNKNOWN_DENSITY = 0.15
"""Density of the trial where the site's is unknown: trained spiking networks fire at 8 to 20 %."""
_BLOCK = 8
EVENT_CAPACITY = 0.05
"""Densest input for the event path: its list holds a sixteenth of the elements; beyond, the work is done twice."""


class SiteInfo(NamedTuple):
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
        stride: of the window, rows and columns.
        trained: both gradients are computed too.
        hosted: the host launches each kernel as it comes, and no CUDA graph replays them.
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
    stride: tuple[int, int] = (1, 1)
    trained: bool = False
    hosted: bool = False

    def signature(self, device: Device) -> KernelSignature:
        """Under which the times of this site's implementations on ``device`` are kept; bfloat16 counts as float16."""
        names = ("c", "k", "r", "s", "groups", "digits", "tf32", "fused")
        parameters = {name: int(getattr(self, name)) for name in names}
        stride = {"stride_h": self.stride[0], "stride_w": self.stride[1]}
        return KernelSignature(
            "spike_conv2d", device, dtypes=(f"float{8 * self.itemsize}",),
            layouts=("nhwc" if self.channels_last else "nchw",),
            sizes=(("n", self.n), ("h", self.h), ("w", self.w)),
            parameters=(*parameters.items(), *stride.items(), ("active", density_bucket(self.active))),
            density=self.density,
        )  # fmt: skip


def able(site: SiteInfo) -> list[str]:
    """The implementations that can serve a site, by what is known of its input; dense first."""
    sparse = site.density is not None and site.density < EVENT_CAPACITY and site.groups == 1
    return ["dense", "binary", *(["event"] if sparse else []), *(["skip"] if site.active is not None else [])]


def _representative(signature: KernelSignature) -> SiteInfo:
    """A site with padding by half its kernel, at the signature's sizes."""
    sizes, given = dict(signature.sizes), dict(signature.parameters)
    n, h, w = (int(sizes[name]) for name in ("n", "h", "w"))
    names = "c k r s groups digits tf32 fused stride_h stride_w"
    c, k, r, s, groups, digits, tf32, fused, stride_h, stride_w = (int(given[name]) for name in names.split())
    out = [(size + 2 * (window // 2) - window) // stride + 1
           for size, window, stride in ((h, r, stride_h), (w, s, stride_w))]  # fmt: skip
    active = str(given["active"])
    return SiteInfo._make((
        "cuda", 2 if signature.dtypes[0] == "float16" else 4, n, c, h, w, k, r, s, *out, groups, digits,
        signature.density, None if active == "unknown" else 2.0 ** int(active[2:]) if active != "0" else 0.0,
        bool(tf32), signature.layouts[0] == "nhwc", bool(fused), (stride_h, stride_w),
        False, False,
    ))  # fmt: skip


def _operands(site: SiteInfo, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    """Spikes at full width and as bytes, a weight, and the output."""
    random = torch.Generator(device).manual_seed(seed)
    dtype = torch.float16 if site.itemsize == 2 else torch.float32
    layout = torch.channels_last if site.channels_last else torch.contiguous_format
    density = _UNKNOWN_DENSITY if site.density is None else site.density
    spikes = torch.rand(site.n, site.c, site.h, site.w, generator=random, device=device) < density
    if site.active is not None and site.active < 1:
        blocks = torch.rand(site.n, 1, -(-site.h // _BLOCK), -(-site.w // _BLOCK), generator=random, device=device)
        alive = (blocks < site.active).repeat_interleave(_BLOCK, 2).repeat_interleave(_BLOCK, 3)
        spikes &= alive[:, :, : site.h, : site.w]
    x = spikes.to(dtype).contiguous(memory_format=layout)
    weight = torch.randn(site.k, site.c // site.groups, site.r, site.s, generator=random, device=device).to(dtype)
    x8 = x.to(torch.int8).contiguous(memory_format=torch.channels_last)
    out = torch.full((site.n, site.k, site.out_h, site.out_w), float("nan"), dtype=dtype, device=device)
    return x, x8, weight.contiguous(memory_format=layout), out.contiguous(memory_format=layout)


def padding(site: SiteInfo) -> list[int]:
    """Rows and columns of padding with which the site's output has its size."""
    sizes = ((site.out_h, site.stride[0], site.r, site.h), (site.out_w, site.stride[1], site.s, site.w))
    return [max(-(-((out - 1) * stride + window - size) // 2), 0) for out, stride, window, size in sizes]


def _reference(site: SiteInfo, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    x, _, weight, _ = operands
    assert x is not None and weight is not None
    return (F.conv2d(x.double(), weight.double(), None, list(site.stride), padding(site), 1, site.groups),)


def _tolerance(site: SiteInfo) -> float:
    """Of the dense operator's precision, which is one of the candidates."""
    return 2e-3 if site.tf32 or site.itemsize == 2 or site.digits < 3 else 2e-6


SPIKE_CONV = Operation(
    "spike_conv2d", SiteInfo.signature, _representative, _operands, (3,), _reference, _tolerance
)
