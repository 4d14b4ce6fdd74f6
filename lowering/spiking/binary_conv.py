"""The binary convolution as an operation: int8 inputs with byte-split weights, joined in float32.

What bytes cannot do it does in float32, in the same launch: channels whose scale says that their digits were lost, and
all of them where the factor in front of the spikes is not finite. Nobody on the host knows which weights are there.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name, random_tensor
from sparsecomp.lowering.spiking.window import (
    TOLERANCE,
    Selection,
    Window,
    dense_strides,
    pixel_strides,
    poisoned_output,
)
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.digits import join_weight, padded_channels, split_weight
from sparsecomp.reference.geometry import output_size


class BinaryConv(NamedTuple):
    """Everything about a binary convolution but its addresses.

    Attributes:
        n, h, w, oh, ow: images, input and output maps.
        c, k: channels of input and output.
        cp: input channels of a group as padded in the packed weight.
        r, s: kernel, and the geometry as in ``Window``.
        out_pixel, out_channel, out_image: strides of the output.
        groups, digits: as in ``sparsecomp.ops.spike_conv2d``.
        has_bias: a bias is added.
        dtype: of weight, output and bias.
        select: ``"all"`` outputs, all if ``"count"`` exceeds ``limit``, or the listed ``"rows"``.
        weight_k, weight_c, weight_r, weight_s: strides of the weight itself.
        scale: the inputs are counts times this.
        has_factor: and times a factor, which the device knows.
    """

    n: int
    h: int
    w: int
    oh: int
    ow: int
    c: int
    k: int
    cp: int
    r: int
    s: int
    stride_h: int
    stride_w: int
    pad_h: int
    pad_w: int
    dil_h: int
    dil_w: int
    out_pixel: int
    out_channel: int
    out_image: int
    groups: int
    digits: int
    has_bias: bool
    dtype: str
    select: str
    limit: int
    weight_k: int = 0
    weight_c: int = 0
    weight_r: int = 0
    weight_s: int = 0
    scale: float = 1.0
    has_factor: bool = False

    @property
    def m(self) -> int:
        """Output pixels."""
        return self.n * self.oh * self.ow

    def grid(self, pixels: int, channels: int) -> tuple[int]:
        """Programs for blocks of so many output pixels by output channels."""
        return (-(-self.m // pixels) * -(-(self.k // self.groups) // channels) * self.groups,)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The run-time numbers of the kernels, in their order."""
        sizes = (self.m, self.h, self.w, self.oh, self.ow, self.c, self.k, self.cp)
        return (*sizes, *self[10:19], *self[25:30], self.limit)

    @property
    def constants(self) -> dict[str, int | bool]:
        """What every kernel is specialised on, whatever the configuration."""
        return {"R": self.r, "S": self.s, "GROUPS": self.groups, "DIGITS": self.digits, "HAS_BIAS": self.has_bias}


def problem_of(
    x: Tensor, weight: Tensor, window: Window, groups: int, digits: int, scale: float, out: Tensor,
    has_bias: bool, has_factor: bool, select: str = "all", limit: int = 0,
) -> BinaryConv:  # fmt: skip
    """The convolution of counts ``x`` (N, C, H, W) with ``weight`` into ``out``."""
    n, c, h, w = x.shape
    strides = weight.stride() if weight.dim() == 4 else (*weight.stride(), 0, 0)
    return BinaryConv._make((
        n, h, w, *out.shape[2:], c, weight.shape[0], padded_channels(c // groups), *window.kernel,
        *window.stride, *window.padding, *window.dilation, *pixel_strides(out), groups, digits,
        has_bias, dtype_name(out), select, limit, *strides, scale, has_factor,
    ))  # fmt: skip


def run(
    x: Tensor, planes: Tensor, scales: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor | None,
    window: Window, groups: int, scale: float, out: Tensor, select: Selection | None = None,
) -> None:  # fmt: skip
    """Write the binary convolution of int8 ``x`` to ``out``, all of it or what ``select`` says.

    ``planes`` and ``scales`` are ``split_weight`` of ``weight``.
    """
    if out.numel() == 0:
        return
    x = x.contiguous(memory_format=torch.channels_last)
    count, rows, limit = (None, None, 0) if select is None else (select.count, select.rows, select.limit)
    chosen = "all" if count is None else "count" if rows is None else "rows"
    given = (bias is not None, factor is not None)
    problem = problem_of(x, weight, window, groups, planes.shape[0], scale, out, *given, chosen, limit)
    dispatch.run(BINARY_CONV, problem, x, planes, scales, weight, bias, factor, out, count, rows)


def _signature(problem: BinaryConv, device: Device) -> KernelSignature:
    names = ("c", "k", "r", "s", "stride_h", "stride_w", "groups", "digits", "select")
    return KernelSignature(
        "binary_conv", device, dtypes=("int8", problem.dtype), accumulator="int32",
        layouts=("nhwc", "nhwc" if problem.out_channel == 1 else "nchw"),
        epilogue="bias" if problem.has_bias else "",
        sizes=(("n", problem.n), ("h", problem.h), ("w", problem.w)),
        parameters=tuple((name, getattr(problem, name)) for name in names),
    )  # fmt: skip


def _representative(signature: KernelSignature) -> BinaryConv:
    """A convolution with padding by half its kernel, at the signature's sizes."""
    sizes, given = dict(signature.sizes), dict(signature.parameters)
    n, h, w = (int(sizes[name]) for name in ("n", "h", "w"))
    names = "c k r s stride_h stride_w groups digits"
    c, k, r, s, stride_h, stride_w, groups, digits = (int(given[name]) for name in names.split())
    padding = (r // 2, s // 2)
    oh, ow = output_size((h, w), (r, s), (stride_h, stride_w), padding, (1, 1))
    strides = dense_strides(signature.layouts[1], k, oh, ow)
    return BinaryConv._make((
        n, h, w, oh, ow, c, k, padded_channels(c // groups), r, s, stride_h, stride_w, *padding, 1, 1, *strides,
        groups, digits, signature.epilogue == "bias", signature.dtypes[1], str(given["select"]), 0,
        c // groups * r * s, r * s, s, 1, 1.0, False,
    ))  # fmt: skip


def _operands(problem: BinaryConv, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    random = torch.Generator(device).manual_seed(seed)

    def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
        return torch.randint(low, high, shape, generator=random, device=device, dtype=dtype)

    p, dtype = problem, getattr(torch, problem.dtype)
    x = (integers(0, 7, p.n, p.h, p.w, p.c) == 0).to(torch.int8).permute(0, 3, 1, 2)
    shape, strides = (p.k, p.c // p.groups, p.r, p.s), (p.weight_k, p.weight_c, p.weight_r, p.weight_s)
    weight = random_tensor(shape, strides, p.dtype, random)
    planes, scales = split_weight(weight, p.digits)
    bias = integers(-8, 9, p.k, dtype=dtype) if p.has_bias else None
    factor = torch.full((1,), -0.7, dtype=dtype, device=device) if p.has_factor else None
    out = poisoned_output((p.n, p.k, p.oh, p.ow), (p.out_pixel, p.out_channel, p.out_image), dtype, device)
    if p.select == "all":
        return x, planes, scales, weight, bias, factor, out, None, None
    rows = torch.arange(p.m, dtype=torch.int32, device=device) if p.select == "rows" else None
    count = torch.full((1,), max(p.m, p.limit + 1), dtype=torch.int32, device=device)
    return x, planes, scales, weight, bias, factor, out, count, rows


def _reference(problem: BinaryConv, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    x, planes, scales, weight, bias, factor, *_ = operands
    assert x is not None and planes is not None and scales is not None and weight is not None
    p = problem
    split = join_weight(planes, scales, (p.r, p.s), p.c // p.groups)
    used = torch.where((scales > 0)[:, None, None, None], split, weight.double())
    geometry = ((p.stride_h, p.stride_w), (p.pad_h, p.pad_w), (p.dil_h, p.dil_w), p.groups)
    x = x.double() * p.scale * (1.0 if factor is None else factor.double())
    return (F.conv2d(x, used, None if bias is None else bias.double(), *geometry),)


BINARY_CONV = Operation(
    "binary_conv", _signature, _representative, _operands, (6,), _reference, lambda problem: TOLERANCE[problem.dtype]
)
