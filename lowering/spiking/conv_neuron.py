"""CUDA implementation of a convolution on spikes with described neurons, and the operation behind it.

As `conv_lif`, for neurons of any small description, and in half precision too.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import InputError
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name, name_of, side_by_side
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
from sparsecomp.lowering.spiking.neuron import as_bits, code_of, filled
from sparsecomp.lowering.spiking.packing import PackWeight, to_bytes
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.connect import check_added, check_residual, connected
from sparsecomp.reference.geometry import Window, laid_out
from sparsecomp.reference.layer_current import joined_current
from sparsecomp.reference.neuron import (
    NUMBERS,
    OPERATIONS,
    PARAMETERS,
    ROUNDINGS,
    STATES,
    Neuron,
    kept_in,
    neuron_of,
    neuron_reference,
    neuron_with,
)
from sparsecomp.reference.precision import KERNEL_DTYPES

NO_ROUNDING = -1


class Described(NamedTuple):
    """Neurons by their description; see `sparsecomp.ops.conv_neuron`.

    Attributes:
        steps: time steps.
        neuron: what a step does.
        dtype: what the layer gives is rounded to.
        eps: of the batch-norm.
        by_channel: which parameters have a number a channel; others have one, or are not there.
        starts, numbers: as many as there is room for.
        has_state, has_parameter: which states are read from memory, and which parameters there are.
        has_norm, has_weight, has_bias: which operands of a batch-norm are given.
        states: dtype of first and last states.
        operands: dtypes of what is given of bias, batch-norm and parameters: a launch is made for these.
    """

    steps: int
    neuron: Neuron
    dtype: str
    eps: float
    by_channel: tuple[bool, ...]
    starts: tuple[float, ...]
    numbers: tuple[float, ...]
    has_state: tuple[bool, ...]
    has_parameter: tuple[bool, ...]
    has_norm: bool
    has_weight: bool
    has_bias: bool
    states: str = "float32"
    operands: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of the operation on a layer with such neurons."""
        return "conv_neuron"

    @property
    def operations(self) -> float:
        """As of `StepNeurons`. Of the configurations of six layers of float16 on an H200
        (`bench/results/conv_neuron_half.json`), whose step has 12 instructions, what it puts first is within 9 % of the
        fastest, and 4 % in the mean."""
        return 5.0 * len(self.neuron.code)

    @property
    def waits(self) -> int:
        """As of `StepNeurons`."""
        return 1

    @property
    def step_numbers(self) -> tuple[float, ...]:
        """The numbers of a step, in every kernel's order."""
        return (self.eps, *map(int, self.by_channel), *self.starts, *self.numbers)

    @property
    def step_constants(self) -> dict[str, Any]:
        """What every kernel is specialised on."""
        rounding = OPERATIONS.index(self.dtype) if self.dtype in ROUNDINGS else NO_ROUNDING
        return {
            "STEPS": self.steps, "CODE": code_of(self.neuron.code), "SPIKE": self.neuron.spike,
            "AFTER": self.neuron.states, "ROUND": rounding,
        }  # fmt: skip


def launch_conv_neuron(
    counts, weight, bias, stride, padding, dilation, groups, digits, scale, spread, channels_last, steps,
    mean, var, gamma, beta, eps, states, starts, parameters, numbers, step, keep, residual=None, connect="add",
    added=None, currents=False, state_dtype=None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """See `sparsecomp.ops.conv_neuron`.

    Raises:
        InputError: operands that do not fit each other, of which a kernel would read past the end.
    """
    weight = weight if weight.dim() > 2 else weight[..., None, None]
    if counts.dtype is not torch.int8 or weight.dtype not in KERNEL_DTYPES:
        given = f"conv_neuron of {counts.dtype} and {weight.dtype}"
        raise InputError(f"{given}: give counts in int8 and a weight in float32, float16 or bfloat16")
    kept = kept_in(state_dtype, counts, states)
    size = Window.of(weight.shape, stride, padding, dilation).output_size(counts.shape[2:])
    by_channel = bias, mean, var, gamma, beta
    given = tuple(None if one is None else one.shape for one in by_channel)
    record = _record(
        counts.device, counts.shape, weight.shape, weight.stride(), dtype_name(weight), tuple(stride), tuple(padding),
        tuple(dilation), groups, digits, scale, spread, channels_last, steps, eps, tuple(map(float, starts)),
        tuple(map(float, numbers)), step, keep, given, tuple(None if v is None else v.shape for v in states),
        tuple(p.numel() for p in parameters), "" if residual is None else connect,
        "" if added is None else dtype_name(added), currents, kept,
        tuple(dtype_name(one) for one in (*by_channel, *parameters) if one is not None),
    )  # fmt: skip
    shape = (counts.shape[0] // steps, weight.shape[0], *size)
    check_residual(residual, connect, (steps, *shape))
    check_added(added, weight.dtype, (steps, *shape))
    residual, added = (lying_as_spikes(one, shape, channels_last) for one in (residual, added))
    given_states = [None if v is None else laid_out(v.reshape(shape), channels_last) for v in states]
    bias, *norm = map(side_by_side, by_channel)
    spikes, *lasts, made = record(
        to_bytes(counts), weight, bias, *norm, *_filled(given_states, STATES),
        *_filled([side_by_side(p) for p in parameters], PARAMETERS), added, residual,
    )  # fmt: skip
    return spikes, *lasts, *(spikes.new_empty(0, dtype=kept) for _ in range(STATES - len(lasts))), made


def _filled(tensors: Sequence[Tensor | None], count: int) -> list[Tensor | None]:
    return [*tensors, *[None] * (count - len(tensors))]


@dispatch.recorded
def _record(
    device: torch.device, shape: torch.Size, weight_shape: torch.Size, strides: tuple[int, ...], dtype: str,
    stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...], groups: int, digits: int,
    scale: float, spread: float, channels_last: bool, steps: int, eps: float, starts: tuple[float, ...],
    numbers: tuple[float, ...], step: str, keep: bool, given: tuple[torch.Size | None, ...],
    states: tuple[torch.Size | None, ...], parameters: tuple[int, ...], connect: str, added: str,
    currents: bool, kept: torch.dtype, operands: tuple[str, ...],
) -> FusedCall:  # fmt: skip
    window = Window.of(weight_shape, stride, padding, dilation)
    bias, mean, _, gamma, beta = given
    conv = Convolution.of(shape, weight_shape, window, groups, dtype, channels_last, bias is not None, scale)
    check_fused(conv, weight_shape, steps, states, given)
    wrong = [count for count in parameters if count not in (1, conv.k)]
    if wrong:
        raise InputError(f"parameters of {wrong} numbers: give one, or one for each of {conv.k} channels")
    neuron = neuron_with(step, states, starts, parameters, numbers)
    neurons = Described(
        steps, neuron, dtype, eps, _flags([count > 1 for count in parameters], PARAMETERS), filled(starts, STATES),
        filled(numbers, NUMBERS), _flags([v is not None for v in states], STATES),
        _flags([True] * len(parameters), PARAMETERS), mean is not None, gamma is not None, beta is not None,
        name_of(kept), operands,
    )  # fmt: skip
    problem = FusedLayer(BinaryConv(conv, digits, strides), neurons, keep, connect, added, currents)
    weight = torch.empty_strided(weight_shape, strides, dtype=getattr(torch, dtype), device="meta")
    split = PackWeight.of(weight, digits, spread)
    return FusedCall(CONV_NEURON, problem, split, device, len(neuron.states), STATES, kept)


def _flags(given: Sequence[bool], count: int) -> tuple[bool, ...]:
    return (*given, *[False] * (count - len(given)))


def described_of(problem: FusedLayer) -> Described:
    """The neurons of a layer."""
    assert isinstance(problem.neurons, Described)
    return problem.neurons


def _signature(problem: FusedLayer, device: Device) -> KernelSignature:
    p = described_of(problem)
    norm = as_bits((p.has_norm, p.has_weight, p.has_bias))
    neuron = (
        ("steps", p.steps), ("step", str(p.neuron)), ("states", as_bits(p.has_state)),
        ("parameters", as_bits(p.has_parameter)), ("by_channel", as_bits(p.by_channel)), ("norm", norm),
    )  # fmt: skip
    parameters = (("groups", problem.conv.groups), ("digits", problem.digits), ("keep", int(problem.keep)), *neuron)
    dtypes = ("int8", problem.conv.dtype, p.states)
    return problem.conv.signature(
        "conv_neuron", device, (*parameters, *joins_of(problem)), dtypes=dtypes, accumulator="int32"
    )


def _representative(signature: KernelSignature) -> FusedLayer:
    given = dict(signature.parameters)
    steps, groups = int(given["steps"]), int(given["groups"])
    conv = Convolution.of_signature(signature, signature.dtypes[1], groups)
    conv = conv._replace(n=conv.n // steps * steps)
    names = ("by_channel", "states", "parameters", "norm")
    by_channel, states, parameters, norm = (tuple(one == "y" for one in str(given[name])) for name in names)
    has_norm, has_weight, has_bias = norm
    neurons = Described(
        steps, neuron_of(str(given["step"])), conv.dtype, 1e-5, by_channel, (0.0,) * STATES, (0.5,) * NUMBERS, states,
        parameters, has_norm, has_weight, has_bias, signature.dtypes[2],
    )  # fmt: skip
    joins = str(given.get("connect", "")), str(given.get("added", "")), "currents" in given
    return conv_neuron_problem(conv, int(given["digits"]), neurons, bool(given["keep"]), *joins)


def conv_neuron_problem(
    conv: Convolution, digits: int, neurons: Described, keep: bool = True, connect: str = "", added: str = "",
    currents: bool = False,
) -> FusedLayer:  # fmt: skip
    """The problem of a contiguous weight."""
    return FusedLayer(binary_conv_problem(conv, digits), neurons, keep, connect, added, currents)


def _operands(problem: FusedLayer, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random = described_of(problem), torch.Generator(device).manual_seed(seed)
    norm = p.has_norm, p.has_weight, p.has_bias
    *layer, added, residual = random_layer(problem, norm, device, random)
    kept = getattr(torch, p.states)
    spikes, *lasts, current = empty_results(problem, device, len(p.neuron.states), kept)
    assert spikes is not None
    states = [torch.zeros_like(spikes[0], dtype=kept) if given else None for given in p.has_state]
    parameters = [
        torch.rand(problem.conv.k if several else 1, generator=random, device=device) if given else None
        for given, several in zip(p.has_parameter, p.by_channel, strict=True)
    ]
    return (*layer, *states, *parameters, added, residual, spikes, *_filled(lasts, STATES), current)


def _reference(problem: FusedLayer, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    p, (mean, var, gamma, beta), rest = described_of(problem), operands[5:9], operands[9:]
    states, parameters, joins = rest[:STATES], rest[STATES : STATES + PARAMETERS], rest[STATES + PARAMETERS :]
    added, residual, *_ = joins
    sums = reference_current(problem, operands).to(getattr(torch, p.dtype))
    current = joined_current(sums, mean, var, gamma, beta, p.eps, added).float()
    trailing = (-1, *[1] * (current.dim() - 3))
    given = [one.reshape(trailing) for one in parameters if one is not None]
    count = len(p.neuron.states)
    spikes, *_ = neuron_reference(
        current, states[:count], p.starts[:count], given, p.numbers, str(p.neuron), False, getattr(torch, p.states)
    )
    return (spikes if residual is None else connected(spikes, residual, problem.connect),)


_SPIKES = 5 + 4 + STATES + PARAMETERS + 2
CONV_NEURON = Operation(
    "conv_neuron", _signature, _representative, _operands, (_SPIKES,), _reference,
    lambda problem: 3e-3 if problem.conv.dtype == "float32" else 6e-2,
)  # fmt: skip
"""As of `conv_lif`, spikes alone are compared. Sums in half precision are rounded to it: more may lie on either side of
the threshold."""
