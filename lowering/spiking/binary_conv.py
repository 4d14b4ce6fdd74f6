"""The convolution on int8 tensor cores as an operation: int8 inputs with byte-split weights, joined in float32.

What bytes cannot do it does in float32, in the same launch: channels whose scale says that their digits were lost, and
all of them where the factor in front of the spikes is not finite. Nobody on the host knows which weights are there.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import contiguous_strides, random_tensor
from sparsecomp.lowering.spiking.convolution import CONV_TOLERANCE, Convolution, Selection, image_strides
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.digits import split_weight, used_weight
from sparsecomp.reference.geometry import KERNEL_DIMS


class BinaryConv(NamedTuple):
    """A convolution on int8 tensor cores.

    Attributes:
        conv: the convolution.
        digits: bytes a weight.
        weight: strides of the weight itself, (K, C / groups, …).
        select: `"all"` outputs, all if `"count"` exceeds `limit`, or the listed `"rows"`.
    """

    conv: Convolution
    digits: int
    weight: tuple[int, ...]
    select: str = "all"
    limit: int = 0

    @property
    def in_volumes(self) -> "BinaryConv":
        """The same with maps and window of three dimensions."""
        idle = KERNEL_DIMS - self.conv.dims
        lifted = (*self.weight[:2], *(0,) * (2 + KERNEL_DIMS - len(self.weight)), *self.weight[2:])
        return self._replace(conv=self.conv.lifted(idle), weight=lifted)

    def grid(self, pixels: int, channels: int) -> tuple[int]:
        """Programs for blocks of so many output pixels by output channels."""
        return (-(-self.conv.m // pixels) * -(-self.conv.kg // channels) * self.conv.groups,)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The run-time numbers of the kernels, in their order."""
        c = self.conv
        return (*c.maps, c.c, c.k, self.conv.cp, *c.geometry, *image_strides(self.weight), c.scale, self.limit)

    @property
    def constants(self) -> dict[str, int | bool]:
        """What every kernel is specialised on, whatever the configuration."""
        return {**self.conv.constants, "GROUPS": self.conv.groups, "DIGITS": self.digits}


def binary_conv(
    x: Tensor, planes: Tensor, scales: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor | None,
    conv: Convolution, out: Tensor, select: Selection | None = None,
) -> None:  # fmt: skip
    """Write the convolution of int8 `x`, channels-last, to `out`, all of it or what `select` says.

    `planes` and `scales` are `split_weight` of `weight`.
    """
    if out.numel() == 0:
        return
    count, rows, limit = (None, None, 0) if select is None else (select.count, select.rows, select.limit)
    chosen = "all" if count is None else "count" if rows is None else "rows"
    problem = BinaryConv(conv, planes.shape[0], weight.stride(), chosen, limit)
    dispatch.launch(BINARY_CONV, problem, x, planes, scales, weight, bias, factor, out, count, rows)


def _signature(problem: BinaryConv, device: Device) -> KernelSignature:
    parameters = (("groups", problem.conv.groups), ("digits", problem.digits), ("select", problem.select))
    dtypes = ("int8", problem.conv.dtype)
    return problem.conv.signature("binary_conv", device, parameters, dtypes=dtypes, accumulator="int32")


def _representative(signature: KernelSignature) -> BinaryConv:
    given = dict(signature.parameters)
    groups, digits = int(given["groups"]), int(given["digits"])
    return binary_conv_problem(
        Convolution.of_signature(signature, signature.dtypes[1], groups), digits, select=str(given["select"])
    )


def binary_conv_problem(conv: Convolution, digits: int, select: str = "all", limit: int = 0) -> BinaryConv:
    """The problem of a contiguous weight."""
    strides = contiguous_strides((conv.k, conv.c // conv.groups, *conv.window.kernel))
    return BinaryConv(conv, digits, strides, select, limit)


def _operands(problem: BinaryConv, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    random = torch.Generator(device).manual_seed(seed)

    def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
        return torch.randint(low, high, shape, generator=random, device=device, dtype=dtype)

    p, c = problem, problem.conv
    dtype = getattr(torch, c.dtype)
    x = (integers(0, 7, c.n, *c.size, c.c) == 0).to(torch.int8).movedim(-1, 1)
    weight = random_tensor((c.k, p.conv.cg, *c.window.kernel), p.weight, c.dtype, random)
    planes, scales = split_weight(weight, p.digits)
    bias = integers(-8, 9, c.k, dtype=dtype) if c.has_bias else None
    factor = torch.full((1,), -0.7, dtype=dtype, device=device) if c.has_factor else None
    out = c.poisoned_output(device)
    if p.select == "all":
        return x, planes, scales, weight, bias, factor, out, None, None
    rows = torch.arange(c.m, dtype=torch.int32, device=device) if p.select == "rows" else None
    count = torch.full((1,), max(c.m, p.limit + 1), dtype=torch.int32, device=device)
    return x, planes, scales, weight, bias, factor, out, count, rows


def _reference(problem: BinaryConv, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    x, planes, scales, weight, bias, factor, *_ = operands
    assert x is not None and planes is not None and scales is not None and weight is not None
    return (problem.conv.reference(x, used_weight(weight, planes, scales), bias, factor),)


BINARY_CONV = Operation(
    "binary_conv", _signature, _representative, _operands, (6,), _reference,
    lambda problem: CONV_TOLERANCE[problem.conv.dtype],
)  # fmt: skip
