"""The transposed convolution on int8 tensor cores as an operation: int8 inputs with byte-split weights, gathered.

The weight is told and packed as a convolution's, (K, C / groups, …), so that one pass splits the weights of both.
"""

from math import gcd, prod
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name, random_tensor, side_by_side
from sparsecomp.lowering.spiking.convolution import CONV_TOLERANCE, Convolution, empty_output, numbered
from sparsecomp.lowering.spiking.packing import PackWeight, to_bytes
from sparsecomp.lowering.spiking.spike_conv import SplitProduct, returns_channels_last
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.digits import SPREAD, split_weight, used_weight
from sparsecomp.reference.geometry import KERNEL_DIMS, TransposedWindow, by_output


class TransposedConv(NamedTuple):
    """A transposed convolution on int8 tensor cores.

    Attributes:
        conv: its sizes; the window is a `TransposedWindow`.
        digits: bytes a weight.
        weight: strides of the weight as (K, C / groups, …).
    """

    conv: Convolution
    digits: int
    weight: tuple[int, ...]

    @property
    def phases(self) -> int:
        """Outputs that see different taps."""
        return prod(self.conv.window.stride)

    def grid(self, pixels: int, channels: int) -> tuple[int]:
        """Programs for blocks of so many output pixels of a phase by output channels."""
        each = self.conv.n * prod(-(-o // s) for o, s in zip(self.conv.out_size, self.conv.window.stride, strict=True))
        return (self.phases * -(-each // pixels) * -(-self.conv.kg // channels) * self.conv.groups,)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The run-time numbers of the kernel, in its order."""
        c = self.conv
        idle = (0,) * (KERNEL_DIMS - c.dims)
        weight = (*self.weight[:2], *idle, *self.weight[2:])
        sizes = (*_volume(c.size, 1), *_volume(c.out_size, 1))
        return (c.n, *sizes, c.c, c.k, self.conv.cp, *_volume(c.window.padding, 0), *c.out, *weight, c.scale)

    @property
    def constants(self) -> dict[str, int | bool]:
        """What the kernel is specialised on, whatever the configuration."""
        w = self.conv.window
        by_name = {"": w.kernel, "STRIDE_": w.stride, "DIL_": w.dilation}
        shared = tuple(gcd(s, d) for s, d in zip(w.stride, w.dilation, strict=True))
        by_name["SHARED_"] = shared
        by_name["INVERSE_"] = tuple(
            pow(d // g, -1, s // g) for s, d, g in zip(w.stride, w.dilation, shared, strict=True)
        )
        named = {
            prefix + letter: number
            for prefix, numbers in by_name.items()
            for letter, number in zip("DHW" if prefix else "TRS", _volume(numbers, 1), strict=True)
        }
        return {**named, "GROUPS": self.conv.groups, "DIGITS": self.digits, "HAS_BIAS": self.conv.has_bias}


def _volume(numbers: tuple[int, ...], idle: int) -> tuple[int, ...]:
    """A number a dimension for three, where `idle` changes nothing in those that there are not."""
    return (idle,) * (KERNEL_DIMS - len(numbers)) + numbers


def launch_transposed(
    x, weight, bias, stride, padding, output_padding, groups, dilation, digits,
    scale=1.0, factor=None, binary=False, spread=SPREAD,
) -> Tensor:  # fmt: skip
    """CUDA implementation of `sparsecomp::spike_conv_transpose`."""
    how = (stride, padding, output_padding, groups, dilation, digits, scale, factor, spread)
    counts = to_bytes(x, scale=scale, binary=binary)
    # of signals torch's own answers contiguous, whatever their layout
    channels_last = x.dim() > 3 and returns_channels_last(x, weight)
    return launch_transposed_counts(counts, weight, bias, *how, channels_last)


def launch_transposed_counts(
    x, weight, bias, stride, padding, output_padding, groups, dilation, digits, scale, factor, spread, channels_last
) -> Tensor:
    """CUDA implementation of `sparsecomp::spike_conv_transpose_counts`."""
    factor = factor if factor is None or factor.dtype is weight.dtype else factor.to(weight.dtype)
    x, weight = to_bytes(x), by_output(weight, groups)
    record = _record(
        x.device, x.shape, weight.shape, weight.stride(), weight.dtype, bias is not None, factor is not None,
        tuple(stride), tuple(padding), tuple(output_padding), groups, tuple(dilation), digits, scale, spread,
        channels_last,
    )  # fmt: skip
    return record(x, weight, side_by_side(bias), factor)


@dispatch.recorded
def _record(
    device: torch.device, shape: torch.Size, weight_shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype,
    has_bias: bool, has_factor: bool, stride: tuple[int, ...], padding: tuple[int, ...],
    output_padding: tuple[int, ...], groups: int, dilation: tuple[int, ...], digits: int, scale: float, spread: float,
    channels_last: bool,
) -> SplitProduct:  # fmt: skip
    x = torch.empty(shape, dtype=torch.int8, device="meta")
    weight = torch.empty_strided(weight_shape, strides, dtype=dtype, device="meta")
    window = TransposedWindow.of(weight_shape, stride, padding, output_padding, dilation)
    out = empty_output(x, window, weight_shape[0], dtype, channels_last)
    conv = Convolution.of(
        shape, weight_shape, window, groups, dtype_name(out), not out.is_contiguous(), has_bias, scale, has_factor
    )
    problem = TransposedConv(conv, digits, strides)
    return SplitProduct(TRANSPOSED_CONV, problem, PackWeight.of(weight, digits, spread), out, device)


def _signature(problem: TransposedConv, device: Device) -> KernelSignature:
    parameters = (("groups", problem.conv.groups), ("digits", problem.digits))
    dtypes = ("int8", problem.conv.dtype)
    return problem.conv.signature("transposed_conv", device, parameters, dtypes=dtypes, accumulator="int32")


def _representative(signature: KernelSignature) -> TransposedConv:
    given, sizes = dict(signature.parameters), dict(signature.sizes)
    kernel, stride = numbered(given, "", "trs"), numbered(given, "stride_", "dhw")
    padding = tuple((extent - 1) // 2 for extent in kernel)
    window = TransposedWindow(kernel, stride, padding, (0,) * len(kernel), (1,) * len(kernel))
    shapes = (int(sizes["n"]), int(given["c"]), *numbered(sizes, "", "dhw")), (int(given["k"]),)
    channels_last, has_bias = signature.layouts[1] == "nhwc", signature.epilogue == "bias"
    conv = Convolution.of(*shapes, window, int(given["groups"]), signature.dtypes[1], channels_last, has_bias)
    return transposed_conv_problem(conv, int(given["digits"]))


def transposed_conv_problem(conv: Convolution, digits: int) -> TransposedConv:
    """The problem of a weight that is contiguous as torch's operator takes it."""
    weight = torch.empty((conv.c, conv.k // conv.groups, *conv.window.kernel), device="meta")
    return TransposedConv(conv, digits, by_output(weight, conv.groups).stride())


def _operands(problem: TransposedConv, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    random = torch.Generator(device).manual_seed(seed)
    p, c = problem, problem.conv
    dtype = getattr(torch, c.dtype)
    x = torch.randint(0, 7, (c.n, *c.size, c.c), generator=random, device=device) == 0
    weight = random_tensor((c.k, p.conv.cg, *c.window.kernel), p.weight, c.dtype, random)
    planes, scales = split_weight(weight, p.digits)
    bias = torch.randint(-8, 9, (c.k,), generator=random, device=device).to(dtype) if c.has_bias else None
    factor = torch.full((1,), -0.7, dtype=dtype, device=device) if c.has_factor else None
    return x.to(torch.int8).movedim(-1, 1), planes, scales, weight, bias, factor, c.poisoned_output(device)


def _reference(problem: TransposedConv, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    x, planes, scales, weight, bias, factor, _ = operands
    assert x is not None and planes is not None and scales is not None and weight is not None
    used = by_output(used_weight(weight, planes, scales), problem.conv.groups)
    return (problem.conv.reference(x, used, bias, factor),)


TRANSPOSED_CONV = Operation(
    "transposed_conv", _signature, _representative, _operands, (6,), _reference,
    lambda problem: CONV_TOLERANCE[problem.conv.dtype],
)  # fmt: skip
