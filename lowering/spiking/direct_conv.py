"""The convolution of bytes with floats as an operation: what a group of few channels needs, a depthwise layer most."""

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import contiguous_strides, random_tensor
from sparsecomp.lowering.spiking.convolution import CONV_TOLERANCE, Convolution
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.geometry import KERNEL_DIMS


class DirectConv(NamedTuple):
    """A convolution of int8 counts with a weight as it is.

    Attributes:
        conv: the convolution.
        weight: strides of the weight, (K, C / groups, …).
    """

    conv: Convolution
    weight: tuple[int, ...]

    @property
    def products(self) -> int:
        """Of an output."""
        return self.conv.taps * self.conv.cg

    @property
    def lanes(self) -> int:
        """Channels that one load takes, up to a word of four bytes."""
        return gcd(self.conv.c, 4) if self.conv.cg == self.conv.kg == 1 else 1

    @property
    def in_volumes(self) -> "DirectConv":
        """The same with maps and window of three dimensions."""
        idle = KERNEL_DIMS - self.conv.dims
        weight = (*self.weight[:2], *(0,) * (2 + KERNEL_DIMS - len(self.weight)), *self.weight[2:])
        return DirectConv(self.conv.lifted(idle), weight)

    def grid(self, pixels: int, channels: int) -> tuple[int]:
        """Programs for blocks of so many output pixels by output channels."""
        return (-(-self.conv.m // pixels) * -(-self.conv.k // channels),)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The run-time numbers of the kernel, in its order; of a problem in volumes."""
        c = self.conv
        return (*c.maps, c.c, c.k, *c.geometry, *self.weight, c.scale)

    @property
    def constants(self) -> dict[str, int | bool]:
        """What the kernel is specialised on, whatever the configuration; of a problem in volumes."""
        return {**self.conv.constants, "CG": self.conv.cg, "KG": self.conv.kg}


def direct_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor | None, conv: Convolution, out: Tensor
) -> None:
    """Write the convolution of int8 `x`, channels-last, to `out`."""
    if out.numel():
        dispatch.launch(DIRECT_CONV, DirectConv(conv, weight.stride()), x, weight, bias, factor, out)


def direct_conv_problem(conv: Convolution) -> DirectConv:
    """The problem of a contiguous weight."""
    return DirectConv(conv, contiguous_strides((conv.k, conv.c // conv.groups, *conv.window.kernel)))


def _signature(problem: DirectConv, device: Device) -> KernelSignature:
    c = problem.conv
    return c.signature("direct_conv", device, (("groups", c.groups),), dtypes=("int8", c.dtype))


def _representative(signature: KernelSignature) -> DirectConv:
    groups = int(dict(signature.parameters)["groups"])
    return direct_conv_problem(Convolution.of_signature(signature, signature.dtypes[1], groups))


def _operands(problem: DirectConv, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    random, c = torch.Generator(device).manual_seed(seed), problem.conv
    dtype = getattr(torch, c.dtype)
    x = torch.randint(0, 7, (c.n, *c.size, c.c), generator=random, device=device) == 0
    weight = random_tensor((c.k, problem.conv.cg, *c.window.kernel), problem.weight, c.dtype, random)
    bias = torch.randint(-8, 9, (c.k,), generator=random, device=device).to(dtype) if c.has_bias else None
    factor = torch.full((1,), -0.7, dtype=dtype, device=device) if c.has_factor else None
    return x.to(torch.int8).movedim(-1, 1), weight, bias, factor, c.poisoned_output(device)


def _reference(problem: DirectConv, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    x, weight, bias, factor, _ = operands
    assert x is not None and weight is not None
    return (problem.conv.reference(x, weight, bias, factor),)


DIRECT_CONV = Operation(
    "direct_conv", _signature, _representative, _operands, (4,), _reference,
    lambda problem: CONV_TOLERANCE[problem.conv.dtype],
)  # fmt: skip
