"""CUDA implementation of a convolution on spikes with the neurons that read it, and the operation behind it.

The weight is split as for the convolution alone, in a launch before; the second does all the rest.
"""

from typing import Any

import torch
from torch import Tensor

from sparsecomp.errors import InputError
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name, side_by_side
from sparsecomp.lowering.spiking.binary_conv import BinaryConv, binary_conv_problem
from sparsecomp.lowering.spiking.convolution import Convolution
from sparsecomp.lowering.spiking.fused_layer import (
    FusedCall,
    FusedLayer,
    check_fused,
    empty_results,
    joins_of,
    lying_as_spikes,
    random_layer,
    reference_current,
)
from sparsecomp.lowering.spiking.lif import Lif
from sparsecomp.lowering.spiking.packing import PackWeight, to_bytes
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.connect import check_added, check_residual, connected
from sparsecomp.reference.geometry import Window, laid_out
from sparsecomp.reference.lif import behind_norm, lif_reference


def launch_conv_lif(
    counts, weight, bias, stride, padding, dilation, groups, digits, scale, spread, channels_last, steps,
    v, v0, mean, var, gamma, beta, eps, charge, tau, rate, decay_input, threshold, reset, keep, residual=None,
    connect="add", added=None, currents=False,
) -> tuple[Tensor, ...]:  # fmt: skip
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
        reset, keep, given, "" if residual is None else connect, "" if added is None else dtype_name(added),
        currents,
    )  # fmt: skip
    shape = (counts.shape[0] // steps, weight.shape[0], *size)
    check_residual(residual, connect, (steps, *shape))
    check_added(added, weight.dtype, (steps, *shape))
    if v is not None:
        v = laid_out(v.reshape(shape), channels_last)
    residual, added = (lying_as_spikes(one, shape, channels_last) for one in (residual, added))
    bias, *norm = map(side_by_side, (bias, mean, var, gamma, beta))
    return record(to_bytes(counts), weight, bias, v, *norm, rate, added, residual)


@dispatch.recorded
def _record(
    device: torch.device, shape: torch.Size, weight_shape: torch.Size, strides: tuple[int, ...],
    stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...], groups: int, digits: int,
    scale: float, spread: float, channels_last: bool, steps: int, v0: float, eps: float, charge: str, tau: float,
    decay_input: bool, threshold: float, reset: float | None, keep: bool, given: tuple[torch.Size | None, ...],
    connect: str, added: str, currents: bool,
) -> FusedCall:  # fmt: skip
    window = Window.of(weight_shape, stride, padding, dilation)
    v, bias, mean, _, gamma, beta = given
    conv = Convolution.of(shape, weight_shape, window, groups, "float32", channels_last, bias is not None, scale)
    check_fused(conv, weight_shape, steps, (v,), given[1:])
    has = (v is not None, mean is not None, gamma is not None, beta is not None)
    neuron = (v0, eps, tau, threshold, reset or 0.0, steps, charge, decay_input, reset is None, *has)
    weight = torch.empty_strided(weight_shape, strides, dtype=torch.float32, device="meta")
    problem = _problem(BinaryConv(conv, digits, strides), neuron, keep, connect, added, currents)
    return FusedCall(CONV_LIF, problem, PackWeight.of(weight, digits, spread), device)


def _problem(product: BinaryConv, neuron: tuple, *rest: Any) -> FusedLayer:
    conv, steps = product.conv, neuron[5]
    step = conv.n // steps * conv.out.image
    return FusedLayer(product, Lif(step, step, step, conv.k, conv.out.channel, *neuron), *rest)


def _signature(problem: FusedLayer, device: Device) -> KernelSignature:
    p = lif_of(problem)
    names = ("steps", "decay_input", "soft_reset", "has_v", "has_norm", "has_weight", "has_bias")
    neuron = (("charge", p.charge), *((f"neuron_{name}", int(getattr(p, name))) for name in names))
    parameters = (("groups", problem.conv.groups), ("digits", problem.digits), ("keep", int(problem.keep)), *neuron)
    parameters += joins_of(problem)
    return problem.conv.signature("conv_lif", device, parameters, dtypes=("int8", "float32"), accumulator="int32")


def _representative(signature: KernelSignature) -> FusedLayer:
    given = dict(signature.parameters)
    steps, groups = int(given["neuron_steps"]), int(given["groups"])
    conv = Convolution.of_signature(signature, "float32", groups)
    conv = conv._replace(n=conv.n // steps * steps)
    flags = [bool(given[f"neuron_{name}"]) for name in ("decay_input", "soft_reset")]
    has = [bool(given[f"neuron_has_{name}"]) for name in ("v", "norm", "weight", "bias")]
    neuron = (0.0, 1e-5, 2.0, 1.0, 0.0, steps, str(given["charge"]), *flags, *has)
    joins = str(given.get("connect", "")), str(given.get("added", "")), "currents" in given
    return conv_lif_problem(conv, int(given["digits"]), neuron, bool(given["keep"]), *joins)


def conv_lif_problem(
    conv: Convolution, digits: int, neuron: tuple, keep: bool = True, connect: str = "", added: str = "",
    currents: bool = False,
) -> FusedLayer:  # fmt: skip
    """The problem of a contiguous weight; `neuron` is what `Lif` has from `v0` on."""
    return _problem(binary_conv_problem(conv, digits), neuron, keep, connect, added, currents)


def lif_of(problem: FusedLayer) -> Lif:
    """The neurons of a layer."""
    assert isinstance(problem.neurons, Lif)
    return problem.neurons


def _operands(problem: FusedLayer, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random = lif_of(problem), torch.Generator(device).manual_seed(seed)
    norm = p.has_norm, p.has_weight, p.has_bias
    *layer, bias, mean, var, gamma, beta, added, residual = random_layer(problem, norm, device, random)
    spikes, *others = empty_results(problem, device, 1)
    assert spikes is not None
    v = torch.zeros_like(spikes[0], dtype=torch.float32).normal_(generator=random) if p.has_v else None
    rate = torch.full((1,), 0.5, device=device) if p.charge == "plif" else None
    return (*layer, bias, v, mean, var, gamma, beta, rate, added, residual, spikes, *others)


def _reference(problem: FusedLayer, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    p, (_, v, mean, var, gamma, beta, rate, added, residual, *_) = lif_of(problem), operands[4:]
    current = reference_current(problem, operands).float()
    if mean is not None:
        current = behind_norm(current, mean, var, gamma, beta, p.eps)
    current = current if added is None else current + added
    spikes, _ = lif_reference(
        current, v, p.v0, None, None, None, None, p.eps, p.charge, p.tau, rate, p.decay_input, p.threshold,
        None if p.soft_reset else p.reset,
    )  # fmt: skip
    return (spikes if residual is None else connected(spikes, residual, problem.connect),)


_SPIKES = 13
CONV_LIF = Operation("conv_lif", _signature, _representative, _operands, (_SPIKES,), _reference, lambda _: 3e-3)
"""Spikes alone are compared: they tell of the membranes of all steps but the last, which an operand need not hold. One
next to the threshold may fire where float64 does not, as of any two convolutions."""
