"""A float32 convolution as three products of halves, as an operation: what is left dense of an exact network.

A network's first layer sees images, not spikes, so that bytes cannot compute it; in float32, without tensor cores, it
takes a quarter of a spiking ResNet's time (`bench/results/snn_sew_resnet34_profile.json`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import contiguous_strides, random_tensor
from sparsecomp.lowering.spiking.convolution import Convolution, empty_output
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.geometry import IMAGE_DIMS, Window

TOLERANCE = 1e-6
"""Relative Frobenius error beside float64."""


class HalvesConv(NamedTuple):
    """A convolution of images.

    Attributes:
        conv: the convolution, of one group.
        x: strides of the input, (N, C, H, W).
        channels_inner: a weight lies (K, R, S, C), not (K, C, R, S).
    """

    conv: Convolution
    x: tuple[int, ...]
    channels_inner: bool

    @property
    def depth(self) -> int:
        """Products of an output."""
        return self.conv.c * self.conv.taps

    @property
    def pixels_inner(self) -> bool:
        """Whether neighbours along a line of the input lie closer than those along channels."""
        return self.x[3] < self.x[1]


def launch_halves_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    channels_last: bool,
) -> Tensor:  # fmt: skip
    """CUDA implementation of `sparsecomp::halves_conv`, of what :func:`takes_images` says yes to."""
    window = Window.of(weight.shape, stride, padding, dilation)
    out = empty_output(x, window, weight.shape[0], x.dtype, channels_last)
    if out.numel() == 0:
        return out
    channels_inner = False
    if not weight.is_contiguous():
        channels_inner = weight.is_contiguous(memory_format=torch.channels_last)
        weight = weight if channels_inner else weight.contiguous()
    conv = Convolution.of(x.shape, weight.shape, window, channels_last=channels_last, has_bias=bias is not None)
    dispatch.launch(HALVES_CONV, HalvesConv(conv, x.stride(), channels_inner), x, weight, bias, out)
    return out


def takes_images(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel takes operands of a convolution of one group."""
    operands = [weight] if bias is None else [weight, bias]
    return (
        x.dtype is torch.float32
        and all(one.dtype is torch.float32 and one.device == x.device for one in operands)
        and x.dim() == weight.dim() == 2 + IMAGE_DIMS
        and x.shape[1] == weight.shape[1]
        and weight.numel() > 0
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
    )


def addressable(x: Tensor) -> bool:
    """Whether offsets in x have 32 bits."""
    return sum(size * stride for size, stride in zip(x.shape, x.stride(), strict=True)) < 2**31


def _signature(problem: HalvesConv, device: Device) -> KernelSignature:
    parameters = (("pixels_inner", int(problem.pixels_inner)), ("channels_inner", int(problem.channels_inner)))
    return problem.conv.signature("halves_conv", device, parameters, dtypes=("float32",), accumulator="float32")


def _representative(signature: KernelSignature) -> HalvesConv:
    given = dict(signature.parameters)
    conv = Convolution.of_signature(signature, "float32")
    return halves_conv_problem(conv, bool(given["pixels_inner"]), bool(given["channels_inner"]))


def halves_conv_problem(conv: Convolution, pixels_inner: bool, channels_inner: bool) -> HalvesConv:
    """The problem of an input that is contiguous (`pixels_inner`) or channels-last."""
    height, width = conv.size
    strides = contiguous_strides((conv.n, conv.c, height, width))
    if not pixels_inner:
        strides = (conv.c * height * width, 1, width * conv.c, conv.c)
    return HalvesConv(conv, strides, channels_inner)


def _operands(problem: HalvesConv, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    random, c = torch.Generator(device).manual_seed(seed), problem.conv
    x = random_tensor((c.n, c.c, *c.size), problem.x, "float32", random)
    shape = (c.k, c.c, *c.window.kernel)
    strides = contiguous_strides(shape)
    if problem.channels_inner:
        strides = (strides[0], 1, c.window.kernel[1] * c.c, c.c)
    weight = random_tensor(shape, strides, "float32", random)
    bias = random_tensor((c.k,), (1,), "float32", random) if c.has_bias else None
    return x, weight, bias, c.poisoned_output(device)


def _reference(problem: HalvesConv, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    x, weight, bias, _ = operands
    assert x is not None and weight is not None
    return (problem.conv.reference(x, weight, bias, None),)


HALVES_CONV = Operation(
    "halves_conv", _signature, _representative, _operands, (3,), _reference, lambda problem: TOLERANCE
)
