"""CUDA implementation of a convolution on spikes with the neurons that read it, and the operation behind it.

The weight is split as for the convolution alone, in a launch before; the second does all the rest.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import InputError
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import contiguous_strides, random_tensor, side_by_side
from sparsecomp.lowering.spiking.binary_conv import BinaryConv, binary_conv_problem
from sparsecomp.lowering.spiking.convolution import Convolution, planar
from sparsecomp.lowering.spiking.lif import Lif
from sparsecomp.lowering.spiking.packing import PACK_WEIGHT, PackWeight, to_bytes
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.connect import check_residual, connected
from sparsecomp.reference.digits import split_weight, used_weight
from sparsecomp.reference.geometry import Window, laid_out
from sparsecomp.reference.lif import lif_reference


class ConvLif(NamedTuple):
    """A convolution of all time steps, and the neurons that take it step by step.

    Attributes:
        product: the convolution of `lif.steps` times as many images as a step has; its output lies as the spikes.
        lif: the neurons.
        keep: the last membranes are written.
        connect: how the spikes are joined with a residual that lies as they do; empty without one.
    """

    product: BinaryConv
    lif: Lif
    keep: bool
    connect: str = ""

    @property
    def conv(self) -> Convolution:
        """The convolution."""
        return self.product.conv

    @property
    def digits(self) -> int:
        """Bytes a weight."""
        return self.product.digits

    @property
    def residuals(self) -> int:
        """Residuals, each of a byte a spike."""
        return int(bool(self.connect))

    @property
    def slots(self) -> int:
        """Rows of a block that the steps of one output pixel take: a power of two."""
        return 1 << (self.lif.steps - 1).bit_length()

    @property
    def pixels(self) -> int:
        """Output pixels of a step."""
        return self.conv.m // self.lif.steps

    @property
    def in_volumes(self) -> "ConvLif":
        """The same with maps and window of three dimensions."""
        return self._replace(product=self.product.in_volumes)

    def grid(self, rows: int, channels: int) -> tuple[int]:
        """Programs for blocks of so many rows by output channels."""
        conv = self.conv
        return (-(-self.pixels * self.slots // rows) * -(-conv.kg // channels) * conv.groups,)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The run-time numbers of the kernels, in their order."""
        _, *product, _ = self.product.numbers
        return (self.pixels, self.conv.n // self.lif.steps, *product, *self.lif.step_numbers)

    @property
    def constants(self) -> dict[str, int | str | bool]:
        """What every kernel is specialised on, whatever the configuration."""
        rows = {"SLOTS": self.slots, "SCALED": self.conv.scale != 1.0, "CONNECT": self.connect}
        return {**self.product.constants, **self.lif.step_constants, **rows}


def launch_conv_lif(
    counts, weight, bias, stride, padding, dilation, groups, digits, scale, spread, channels_last, steps,
    v, v0, mean, var, gamma, beta, eps, charge, tau, rate, decay_input, threshold, reset, keep, residual=None,
    connect="add",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `sparsecomp.ops.conv_lif`.

    Raises:
        InputError: operands that do not fit each other, of which a kernel would read past the end.
    """
    weight = weight if weight.dim() > 2 else weight[..., None, None]
    if counts.dtype is not torch.int8 or weight.dtype is not torch.float32:
        raise InputError(f"conv_lif of {counts.dtype} and {weight.dtype}: give counts in int8 and a weight in float32")
    size = Window.of(weight.shape, stride, padding, dilation).output_size(counts.shape[2:])
    given = tuple(None if one is None else one.shape for one in (v, bias, mean, var, gamma, beta))
    record = _record(
        counts.device, counts.shape, weight.shape, weight.stride(), tuple(stride), tuple(padding), tuple(dilation),
        groups, digits, scale, spread, channels_last, steps, float(v0), eps, charge, tau, decay_input, threshold,
        reset, keep, given, "" if residual is None else connect,
    )  # fmt: skip
    shape = (counts.shape[0] // steps, weight.shape[0], *size)
    check_residual(residual, connect, (steps, *shape))
    if v is not None:
        v = laid_out(v.reshape(shape), channels_last)
    if residual is not None:
        residual = laid_out(residual.reshape(counts.shape[0], *shape[1:]), channels_last)
    bias, *norm = map(side_by_side, (bias, mean, var, gamma, beta))
    return record(to_bytes(counts), weight, bias, v, *norm, rate, residual)


class _FusedLayer:
    """The two launches of a call, and what it allocates."""

    def __init__(self, problem: ConvLif, split: PackWeight, device: torch.device) -> None:
        conv, steps = problem.conv, problem.lif.steps
        self._shape = (steps, conv.n // steps, conv.k, *conv.out_size)
        pixels = (conv.out.pixel * stride for stride in contiguous_strides(conv.out_size))
        images = (self._shape[1] * conv.out.image, conv.out.image)
        self._strides = (*images, conv.out.channel, *pixels)
        self._planes, self._device, self._keep = split.planes, device, problem.keep
        self._some = conv.m * conv.k > 0
        self._pack = dispatch.prepared(PACK_WEIGHT, split, device) if self._some else None
        self._run = dispatch.prepared(CONV_LIF, problem, device) if self._some else None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, *neuron: Tensor | None) -> tuple[Tensor, Tensor]:
        """Spikes and last membranes; `neuron` is v, mean, var, gamma, beta, rate and the residual."""
        device = self._device
        spikes = torch.empty_strided(self._shape, self._strides, dtype=torch.int8, device=device)
        shape, strides = (self._shape[1:], self._strides[1:]) if self._keep else ((0,), (1,))
        last = torch.empty_strided(shape, strides, dtype=torch.float32, device=device)
        if self._pack is not None and self._run is not None:
            planes = torch.empty(self._planes, dtype=torch.int8, device=device)
            scales = torch.empty(self._planes[1:2], dtype=torch.float32, device=device)
            self._pack(planar(weight), planes, scales)
            self._run(x, planes, scales, weight, bias, *neuron, spikes, last if self._keep else None)
        return spikes, last


@dispatch.recorded
def _record(
    device: torch.device, shape: torch.Size, weight_shape: torch.Size, strides: tuple[int, ...],
    stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...], groups: int, digits: int,
    scale: float, spread: float, channels_last: bool, steps: int, v0: float, eps: float, charge: str, tau: float,
    decay_input: bool, threshold: float, reset: float | None, keep: bool, given: tuple[torch.Size | None, ...],
    connect: str,
) -> _FusedLayer:  # fmt: skip
    window = Window.of(weight_shape, stride, padding, dilation)
    v, bias, mean, _, gamma, beta = given
    conv = Convolution.of(shape, weight_shape, window, groups, "float32", channels_last, bias is not None, scale)
    _check(conv, weight_shape, steps, given)
    has = (v is not None, mean is not None, gamma is not None, beta is not None)
    neuron = (v0, eps, tau, threshold, reset or 0.0, steps, charge, decay_input, reset is None, *has)
    weight = torch.empty_strided(weight_shape, strides, dtype=torch.float32, device="meta")
    problem = _problem(BinaryConv(conv, digits, strides), neuron, keep, connect)
    return _FusedLayer(problem, PackWeight.of(weight, digits, spread), device)


def _check(conv: Convolution, weight: torch.Size, steps: int, given: tuple[torch.Size | None, ...]) -> None:
    v, *by_channel = given
    if steps < 1 or conv.n % steps:
        raise InputError(f"{conv.n} images are no whole number for each of {steps} time steps")
    if conv.c != weight[1] * conv.groups or conv.k % conv.groups:
        raise InputError(f"a weight {tuple(weight)} in {conv.groups} groups does not fit {conv.c} channels")
    if v is not None and v.numel() != conv.m * conv.k // steps:
        raise InputError(f"membranes {tuple(v)} are not those of a step: {conv.n // steps, conv.k, *conv.out_size}")
    wrong = [tuple(shape) for shape in by_channel if shape is not None and shape.numel() != conv.k]
    if wrong or (by_channel[1] is None) != (by_channel[2] is None):
        raise InputError(f"bias or batch-norm of shapes {wrong}: give one number for each of {conv.k} channels")


def _problem(product: BinaryConv, neuron: tuple, keep: bool, connect: str) -> ConvLif:
    conv, steps = product.conv, neuron[5]
    step = conv.n // steps * conv.out.image
    return ConvLif(product, Lif(step, step, step, conv.k, conv.out.channel, *neuron), keep, connect)


def _signature(problem: ConvLif, device: Device) -> KernelSignature:
    p = problem.lif
    names = ("steps", "decay_input", "soft_reset", "has_v", "has_norm", "has_weight", "has_bias")
    neuron = (("charge", p.charge), *((f"neuron_{name}", int(getattr(p, name))) for name in names))
    parameters = (("groups", problem.conv.groups), ("digits", problem.digits), ("keep", int(problem.keep)), *neuron)
    parameters += (("connect", problem.connect),) if problem.connect else ()
    return problem.conv.signature("conv_lif", device, parameters, dtypes=("int8", "float32"), accumulator="int32")


def _representative(signature: KernelSignature) -> ConvLif:
    given = dict(signature.parameters)
    steps, groups = int(given["neuron_steps"]), int(given["groups"])
    conv = Convolution.of_signature(signature, "float32", groups)
    conv = conv._replace(n=conv.n // steps * steps)
    flags = [bool(given[f"neuron_{name}"]) for name in ("decay_input", "soft_reset")]
    has = [bool(given[f"neuron_has_{name}"]) for name in ("v", "norm", "weight", "bias")]
    neuron = (0.0, 1e-5, 2.0, 1.0, 0.0, steps, str(given["charge"]), *flags, *has)
    return conv_lif_problem(conv, int(given["digits"]), neuron, bool(given["keep"]), str(given.get("connect", "")))


def conv_lif_problem(
    conv: Convolution, digits: int, neuron: tuple, keep: bool = True, connect: str = ""
) -> ConvLif:  # fmt: skip
    """The problem of a contiguous weight; `neuron` is what `Lif` has from `v0` on."""
    return _problem(binary_conv_problem(conv, digits), neuron, keep, connect)


def _operands(problem: ConvLif, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, c, random = problem.lif, problem.conv, torch.Generator(device).manual_seed(seed)

    def normal(given: bool, *shape: int) -> Tensor | None:
        return torch.randn(shape, generator=random, device=device) if given else None

    x = torch.randint(0, 7, (c.n, *c.size, c.c), generator=random, device=device) == 0
    weight = random_tensor((c.k, c.cg, *c.window.kernel), problem.product.weight, "float32", random)
    planes, scales = split_weight(weight, problem.digits)
    like = c.poisoned_output(device)
    last = like[: c.n // p.steps]
    v = None if not p.has_v else torch.zeros_like(last).normal_(generator=random)
    var = torch.rand(c.k, generator=random, device=device) + 0.5 if p.has_norm else None
    rate = torch.full((1,), 0.5, device=device) if p.charge == "plif" else None
    spikes = torch.full_like(like, 77, dtype=torch.int8).unflatten(0, (p.steps, -1))
    residual = torch.full_like(spikes, 3) if problem.connect else None
    return (
        x.to(torch.int8).movedim(-1, 1), planes, scales, weight, normal(c.has_bias, c.k), v, normal(p.has_norm, c.k),
        var, normal(p.has_weight, c.k), normal(p.has_bias, c.k), rate, residual, spikes,
        last.clone() if problem.keep else None,
    )  # fmt: skip


def _reference(problem: ConvLif, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    x, planes, scales, weight, bias, v, mean, var, gamma, beta, rate, residual, *_ = operands
    assert x is not None and planes is not None and scales is not None and weight is not None
    p = problem.lif
    current = problem.conv.reference(x, used_weight(weight, planes, scales), bias, None).float()
    reset = None if p.soft_reset else p.reset
    spikes, _ = lif_reference(
        current.unflatten(0, (p.steps, -1)), v, p.v0, mean, var, gamma, beta, p.eps, p.charge, p.tau, rate,
        p.decay_input, p.threshold, reset,
    )  # fmt: skip
    return (spikes if residual is None else connected(spikes, residual, problem.connect),)


_SPIKES = 12
CONV_LIF = Operation("conv_lif", _signature, _representative, _operands, (_SPIKES,), _reference, lambda _: 3e-3)
"""Spikes alone are compared: they tell of the membranes of all steps but the last, which an operand need not hold. One
next to the threshold may fire where float64 does not, as of any two convolutions."""
