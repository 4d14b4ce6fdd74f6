"""What every kernel of a convolution on spikes takes: its sizes, its window, its output, and a choice of rows.

Everything here has any number of dimensions. Kernels index two, so that maps of fewer are lifted to images; of more,
templates refuse (`beyond_images`) but `binary_conv`, which lifts all maps to three.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import InputError
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch.strided import contiguous_strides, dtype_name
from sparsecomp.reference.digits import padded_channels
from sparsecomp.reference.geometry import IMAGE_DIMS, AnyWindow, Window, convolve

CONV_TOLERANCE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
"""Relative Frobenius error of a convolution on spikes by dtype of its result: mostly that result's rounding."""


@dataclass(frozen=True)
class Selection:
    """Work that the device itself chose, for kernels whose grid cannot depend on it.

    Attributes:
        count: (1,) int32. A kernel does nothing unless `count > limit`.
        limit: see `count`.
        rows: int32 list whose first `count` entries are the output pixels to compute; None for all of them.
    """

    count: Tensor
    limit: int = 0
    rows: Tensor | None = None


class OutputStrides(NamedTuple):
    """Of a dense output (N, K, …)."""

    pixel: int
    channel: int
    image: int


class Maps(NamedTuple):
    """Maps of any strides as kernels read them: inputs (N, C, …), or a weight (K, C, …).

    Attributes:
        outer: images, or output channels.
        c: channels of each.
        size: of a map, of two dimensions at most.
        strides: one a dimension of the tensor.
        dtype: of the elements.
    """

    outer: int
    c: int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, x: Tensor) -> "Maps":
        """Those of a tensor that is `planar`."""
        outer, c, *size = x.shape
        return cls(outer, c, tuple(size), x.stride(), dtype_name(x))

    @property
    def pixels(self) -> int:
        """Of a map, at least one."""
        return max(prod(self.size), 1)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return getattr(torch, self.dtype).itemsize

    @property
    def numbers(self) -> tuple[int, ...]:
        """Run-time numbers of every kernel: strides by image, channel and two dimensions of a map."""
        return image_strides(self.strides)


class Convolution(NamedTuple):
    """A convolution of counts, whichever kernel computes it; a linear layer is one of a single pixel.

    Attributes:
        n: images.
        c, k: channels of input and output.
        size: of the input's maps.
        window, groups: the geometry.
        out: strides of the output.
        dtype: of weight, output and bias.
        has_bias: a bias is added.
        scale: the inputs are counts times this.
        has_factor: and times a factor, which the device knows.
    """

    n: int
    c: int
    k: int
    size: tuple[int, ...]
    window: AnyWindow
    groups: int
    out: OutputStrides
    dtype: str
    has_bias: bool = False
    scale: float = 1.0
    has_factor: bool = False

    @classmethod
    def of(
        cls, x: Sequence[int], weight: Sequence[int], window: AnyWindow, groups: int = 1, dtype: str = "float32",
        channels_last: bool = True, has_bias: bool = False, scale: float = 1.0, has_factor: bool = False,
    ) -> "Convolution":  # fmt: skip
        """The convolution of counts and weight of these shapes, into an output that is channels-last or not.

        A transposed convolution's weight is told as (K, C / groups, …) too; of either, only K is looked at.

        Raises:
            InputError: maps on which there is no place for the window, which a kernel would look for outside of them.
        """
        (n, c, *size), k = x, weight[0]
        made = window.output_size(size)
        if any(one < 1 for one in made):
            raise InputError(f"maps of {tuple(size)} would give maps of {made}: give larger ones, or pad them more")
        pixels = prod(made)
        out = OutputStrides(k, 1, k * pixels) if channels_last else OutputStrides(1, pixels, k * pixels)
        return cls(n, c, k, tuple(size), window, groups, out, dtype, has_bias, scale, has_factor)

    @property
    def cg(self) -> int:
        """Input channels of a group."""
        return self.c // self.groups

    @property
    def cp(self) -> int:
        """Input channels of a group as padded in a packed weight."""
        return padded_channels(self.cg)

    @property
    def kg(self) -> int:
        """Output channels of a group."""
        return self.k // self.groups

    @property
    def out_size(self) -> tuple[int, ...]:
        """Of the output's maps."""
        return self.window.output_size(self.size)

    @property
    def dims(self) -> int:
        """Spatial dimensions."""
        return len(self.size)

    @property
    def itemsize(self) -> int:
        """Bytes of a weight and of an output."""
        return getattr(torch, self.dtype).itemsize

    @property
    def m(self) -> int:
        """Output pixels."""
        return self.n * prod(self.out_size)

    @property
    def in_pixels(self) -> int:
        """Input pixels."""
        return self.n * prod(self.size)

    @property
    def taps(self) -> int:
        """Pixels that a window sees."""
        return prod(self.window.kernel)

    @property
    def maps(self) -> tuple[int, ...]:
        """Run-time numbers of every kernel: output pixels, size of input and output maps."""
        return (self.m, *as_image(self.size, 1), *as_image(self.out_size, 1))

    @property
    def geometry(self) -> tuple[int, ...]:
        """Run-time numbers of every kernel: stride, padding and dilation, strides of the output."""
        w = self.window
        return (*as_image(w.stride, 1), *as_image(w.padding, 0), *as_image(w.dilation, 1), *self.out)

    @property
    def constants(self) -> dict[str, int | bool]:
        """What every kernel is specialised on."""
        return {**kernel_constants(self.window.kernel), "HAS_BIAS": self.has_bias}

    def lifted(self, idle: int) -> "Convolution":
        """The same of maps with so many more dimensions of one pixel, outermost."""
        w, ones = self.window, (1,) * idle
        window = Window(ones + w.kernel, ones + w.stride, (0,) * idle + w.padding, ones + w.dilation)
        return self._replace(size=ones + self.size, window=window)

    def signature(
        self, op: str, device: Device, parameters: tuple[tuple[str, int | str], ...], **fields: Any
    ) -> KernelSignature:
        """Of an operation on this convolution, with what that alone depends on."""
        kernel, stride = as_image(self.window.kernel, 1), as_image(self.window.stride, 1)
        shared = {"c": self.c, "k": self.k, **labelled("", "trs", kernel), **labelled("stride_", "dhw", stride)}
        return KernelSignature(
            op, device, layouts=("nhwc", "nhwc" if self.out.channel == 1 else "nchw"),
            epilogue="bias" if self.has_bias else "",
            sizes=(("n", self.n), *labelled("", "dhw", as_image(self.size, 1)).items()),
            parameters=(*shared.items(), *parameters), **fields,
        )  # fmt: skip

    @classmethod
    def of_signature(
        cls, signature: KernelSignature, dtype: str, groups: int = 1, dilation: tuple[int, ...] = ()
    ) -> "Convolution":
        """A convolution with padding by half its kernel, at the sizes of a :meth:`signature`."""
        sizes, given = dict(signature.sizes), dict(signature.parameters)
        window = Window.centred(numbered(given, "", "trs"), numbered(given, "stride_", "dhw"), dilation)
        x = (int(sizes["n"]), int(given["c"]), *numbered(sizes, "", "dhw"))
        channels_last, has_bias = signature.layouts[1] == "nhwc", signature.epilogue == "bias"
        return cls.of(x, (int(given["k"]),), window, groups, dtype, channels_last, has_bias)

    def poisoned_output(self, device: torch.device) -> Tensor:
        """An output full of NaN."""
        memory = torch.full((self.n * self.out.image,), float("nan"), dtype=getattr(torch, self.dtype), device=device)
        pixels = (self.out.pixel * stride for stride in contiguous_strides(self.out_size))
        strides = (self.out.image, self.out.channel, *pixels)
        return memory.as_strided((self.n, self.k, *self.out_size), strides)

    def reference(self, x: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor | None) -> Tensor:
        """The dense convolution of counts `x` in float64; `weight` lies as torch's operator takes it."""
        x = x.double() * self.scale * (1.0 if factor is None else factor.double())
        return convolve(x, weight.double(), None if bias is None else bias.double(), self.window, self.groups)


def planar(x: Tensor) -> Tensor:
    """x (N, C, …) with at most two dimensions after its first two: others are joined, by a copy where they must be."""
    return x.flatten(2, -2) if x.dim() > 2 + IMAGE_DIMS else x


def as_image(numbers: Sequence[int], idle: int) -> tuple[int, ...]:
    """A number a dimension for at least two, where `idle` changes nothing in those that there are not."""
    return (idle,) * (IMAGE_DIMS - len(numbers)) + tuple(numbers)


def image_strides(strides: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of images, of one with maps of at most two dimensions."""
    return (*strides[:2], *as_image(strides[2:], 0))


def kernel_constants(kernel: tuple[int, ...]) -> dict[str, int]:
    """The extents of a weight as kernels name them: R and S, T before them in three dimensions."""
    return labelled("", "TRS", as_image(kernel, 1))


def beyond_images(conv: Convolution) -> str | None:
    """Why a kernel that indexes two dimensions cannot take a convolution, None if it can."""
    return f"it indexes images, not maps of {conv.dims} dimensions" if conv.dims > IMAGE_DIMS else None


def labelled(prefix: str, letters: str, numbers: Sequence[int]) -> dict[str, int]:
    """Numbers by the last of the `letters`, a letter a dimension."""
    return {prefix + letter: number for letter, number in zip(letters[-len(numbers) :], numbers, strict=True)}


def numbered(given: Mapping[str, Any], prefix: str, letters: str) -> tuple[int, ...]:
    """The inverse of :func:`labelled`."""
    return tuple(int(given[prefix + letter]) for letter in letters if prefix + letter in given)


def empty_output(x: Tensor, window: AnyWindow, channels: int, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """The uninitialised output (N, channels, …) of a convolution of `x` (N, C, …)."""
    size = window.output_size(x.shape[2:])
    shape = (x.shape[0], channels, *size)
    strides = contiguous_strides(shape)
    if channels_last:
        image, *pixels, channel = contiguous_strides((x.shape[0], *size, channels))
        strides = (image, channel, *pixels)
    return torch.empty_strided(shape, strides, dtype=dtype, device=x.device)
