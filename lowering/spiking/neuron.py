"""CUDA implementation of the operator of described neurons, and the operation behind it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name, name_of, random_tensor, side_by_side, strided
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.neuron import (
    NUMBERS,
    OPERATIONS,
    PARAMETERS,
    STATES,
    Instruction,
    Neuron,
    kept_in,
    neuron_given,
    neuron_of,
    neuron_reference,
    spikes_like,
)


class Axis(NamedTuple):
    """Which element of a parameter an element of the state reads: `place // stride % size`, in memory's order."""

    size: int
    stride: int


_ONE = Axis(1, 1)


class Neurons(NamedTuple):
    """The sizes and numbers of a layer of neurons; see `sparsecomp.ops.neuron`.

    Attributes:
        numel: elements of one time step, dense in memory.
        x_step, spikes_step: elements from one time step to the next.
        axes: of each parameter; `_ONE` where there is none.
        starts, numbers: as many as there is room for.
        steps: time steps.
        neuron: what a step does.
        has_state: which states are read from memory.
        has_parameter: which parameters there are.
        keep: the last states are written.
        spikes, x, states: their dtypes, of states first and last ones.
        parameters: dtypes of those that there are.
    """

    numel: int
    x_step: int
    spikes_step: int
    axes: tuple[Axis, ...]
    starts: tuple[float, ...]
    numbers: tuple[float, ...]
    steps: int
    neuron: Neuron
    has_state: tuple[bool, ...]
    has_parameter: tuple[bool, ...]
    keep: bool
    spikes: str = "int8"
    x: str = "float32"
    states: str = "float32"
    parameters: tuple[str, ...] = ()

    @property
    def all_numbers(self) -> tuple[float, ...]:
        """The run-time numbers of the kernel, in its order."""
        axes = (number for axis in self.axes for number in axis)
        return (self.numel, self.x_step, self.spikes_step, *axes, *self.starts, *self.numbers)

    @property
    def constants(self) -> dict[str, object]:
        """What the kernel is specialised on."""
        return {
            "STEPS": self.steps, "CODE": code_of(self.neuron.code), "SPIKE": self.neuron.spike,
            "AFTER": self.neuron.states, "KEEP": self.keep, "WIDE": self.numel >= 2**31,
            "ALIKE": tuple(map(self.axes.index, self.axes)),
        }  # fmt: skip


def code_of(code: Sequence[Instruction]) -> tuple[tuple[int, ...], ...]:
    """Instructions as kernels take them."""
    return tuple((OPERATIONS.index(one.operation), one.a, one.b, one.c) for one in code)


def launch_neuron(
    x: Tensor,
    states: Sequence[Tensor | None],
    starts: Sequence[float],
    parameters: Sequence[Tensor],
    numbers: Sequence[float],
    step: str,
    keep: bool,
    state_dtype: torch.dtype | None = None,
    spike_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """See `sparsecomp.ops.neuron`."""
    neuron_given(x, states, starts, parameters, numbers, step)
    kept = kept_in(state_dtype, x, states)
    last = [torch.empty_like(x[0], dtype=kept) for _ in states] if keep else []
    spikes = spikes_like(x, spike_dtype)
    _launch(x, states, starts, parameters, numbers, step, spikes, last, kept)
    none = (x.new_empty(0, dtype=kept) for _ in range(STATES - len(last)))
    return (spikes, *last, *none)


def launch_trained(
    x: Tensor, states: Sequence[Tensor | None], starts: Sequence[float], parameters: Sequence[Tensor],
    numbers: Sequence[float], step: str,
) -> list[Tensor]:  # fmt: skip
    """See `sparsecomp.ops.trained_neuron`."""
    neuron_given(x, states, starts, parameters, numbers, step)
    spikes, last = torch.empty_like(x), [torch.empty_like(x[0], dtype=torch.float32) for _ in states]
    _launch(x, states, starts, parameters, numbers, step, spikes, last)
    return [spikes, *last]


def _launch(
    x: Tensor, states: Sequence[Tensor | None], starts: Sequence[float], parameters: Sequence[Tensor],
    numbers: Sequence[float], step: str, spikes: Tensor, last: list[Tensor], kept: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """Write spikes, and last states where there are any; states are of the dtype `kept`."""
    if x.numel() == 0:
        return
    if x.stride()[1:] != spikes.stride()[1:] or not is_dense(x[0]):
        # a step is not one dense block of memory: run on a copy, answer in the layout asked for
        dense = x.contiguous()
        results = [torch.empty_like(dense, dtype=spikes.dtype)]
        results += [torch.empty_like(dense[0], dtype=one.dtype) for one in last]
        _launch(dense, states, starts, parameters, numbers, step, results[0], results[1:], kept)
        for ours, theirs in zip((spikes, *last), results, strict=True):
            ours.copy_(theirs)
        return
    given, read = operands(x, states, parameters)
    problem = problem_of(x, given, starts, read, numbers, step, spikes, bool(last))._replace(states=name_of(kept))
    dispatch.launch(NEURON, problem, x, *given, *read, spikes, *last, *[None] * (STATES - len(last)))


def operands(
    x: Tensor, states: Sequence[Tensor | None], parameters: Sequence[Tensor]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """States that lie as a step of x does, and parameters, as many as a kernel has room for."""
    given = [None if v is None else lying_as(v, x[0]) for v in states]
    read = [*map(side_by_side, parameters)]
    return given + [None] * (STATES - len(given)), read + [None] * (PARAMETERS - len(read))


def problem_of(
    x: Tensor, states: Sequence[Tensor | None], starts: Sequence[float], parameters: Sequence[Tensor | None],
    numbers: Sequence[float], step: str, spikes: Tensor, keep: bool,
) -> Neurons:  # fmt: skip
    """The problem of such operands, of which a step is one dense block of memory."""
    strides = x.stride()[1:]
    return Neurons(
        x[0].numel(), x.stride(0), spikes.stride(0), tuple(_axis(p, strides) for p in parameters),
        filled(starts, STATES), filled(numbers, NUMBERS), x.shape[0], neuron_of(step),
        tuple(v is not None for v in states), tuple(p is not None for p in parameters), keep, dtype_name(spikes),
        dtype_name(x), parameters=tuple(dtype_name(p) for p in parameters if p is not None),
    )  # fmt: skip


def is_dense(step: Tensor) -> bool:
    """Whether elements, no two of which share a place, leave no place free between them."""
    spread = sum((size - 1) * stride for size, stride in zip(step.shape, step.stride(), strict=True))
    return spread + 1 == step.numel()


def lying_as(v: Tensor, like: Tensor) -> Tensor:
    """`v` in the strides of `like`, whose shape it has or is broadcast to."""
    same = (v.shape, v.stride()) == (like.shape, like.stride())
    return v if same else torch.empty_like(like, dtype=v.dtype).copy_(v)


def _axis(parameter: Tensor | None, strides: Sequence[int]) -> Axis:
    """Along which dimension of the state a parameter has several elements, which lie one behind the other."""
    if parameter is None or parameter.numel() == 1:
        return _ONE
    (dim,) = (index - parameter.dim() for index, size in enumerate(parameter.shape) if size != 1)
    return Axis(parameter.numel(), strides[dim])


def filled(numbers: Sequence[float], count: int) -> tuple[float, ...]:
    """As many numbers as there is room for."""
    # a float, so that a kernel is not specialised on a whole number
    return (*map(float, numbers), *[0.0] * (count - len(numbers)))


def _signature(problem: Neurons, device: Device) -> KernelSignature:
    p = problem
    parameters = (
        ("steps", p.steps), ("step", str(p.neuron)), ("keep", int(p.keep)),
        ("states", as_bits(p.has_state)), ("parameters", as_bits(p.has_parameter)),
    )  # fmt: skip
    return KernelSignature(
        "neuron", device, dtypes=(p.x, p.spikes, p.states, *p.parameters), accumulator="float32",
        sizes=(("numel", p.numel),), parameters=parameters,
    )  # fmt: skip


def as_bits(flags: Sequence[bool]) -> str:
    """Flags for a signature, as text that is no number."""
    return "".join("y" if one else "n" for one in flags)


def _representative(signature: KernelSignature) -> Neurons:
    numel, given = int(dict(signature.sizes)["numel"]), dict(signature.parameters)
    states, parameters = ([one == "y" for one in str(given[name])] for name in ("states", "parameters"))
    return Neurons(
        numel, numel, numel, (_ONE,) * PARAMETERS, (0.0,) * STATES, (0.5,) * NUMBERS, int(given["steps"]),
        neuron_of(str(given["step"])), tuple(states), tuple(parameters), bool(given["keep"]), signature.dtypes[1],
        signature.dtypes[0], signature.dtypes[2], signature.dtypes[3:],
    )  # fmt: skip


def _operands(problem: Neurons, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)

    def normal(size: int, given: bool) -> Tensor | None:
        return torch.randn(size, generator=random, device=device) if given else None

    x = random_tensor((p.steps, p.numel), (p.x_step, 1), p.x, random)
    poison = torch.tensor(77, dtype=getattr(torch, p.spikes), device=device)
    spikes = strided((p.steps, p.numel), (p.spikes_step, 1), poison.repeat)
    kept = getattr(torch, p.states)
    states = [normal(p.numel, given) for given in p.has_state]
    states = [one if one is None else one.to(kept) for one in states]
    parameters = [normal(axis.size, given) for axis, given in zip(p.axes, p.has_parameter, strict=True)]
    types = iter(p.parameters)
    parameters = [one if one is None else one.to(getattr(torch, next(types, "float32"))) for one in parameters]
    count = len(p.neuron.states) * p.keep
    last = [torch.full((p.numel,), float("nan"), dtype=kept, device=device) for _ in range(count)]
    return (x, *states, *parameters, spikes, *last, *[None] * (STATES - len(last)))


def _reference(problem: Neurons, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    p, x, count = problem, operands[0], len(problem.neuron.states)
    assert x is not None
    place = torch.arange(p.numel, device=x.device)
    read = zip(operands[1 + STATES :], p.axes, strict=False)
    parameters = [given[place // axis.stride % axis.size] for given, axis in read if given is not None]
    states, step = operands[1 : 1 + count], str(p.neuron)
    given = parameters[: sum(p.has_parameter)]
    spikes, *_ = neuron_reference(x, states, p.starts[:count], given, p.numbers, step, False, getattr(torch, p.states))
    return (spikes,)


_SPIKES = 1 + STATES + PARAMETERS
NEURON = Operation("neuron", _signature, _representative, _operands, (_SPIKES,), _reference, lambda _: 0.0)
"""Spikes alone are compared: they tell of the states of all steps but the last, which an operand need not hold."""
