"""CUDA implementation of the gradients of described neurons, and the operation behind it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.spiking.neuron import (
    NEURON,
    Neurons,
    as_bits,
    code_of,
    is_dense,
    lying_as,
    operands,
    problem_of,
)
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.neuron import PARAMETERS, STATES, neuron_given
from sparsecomp.reference.neuron_gradient import step_back


class NeuronGradients(NamedTuple):
    """See `sparsecomp.ops.trained_neuron`.

    Attributes:
        neurons: the forward; `spikes` are the gradients for spikes and inputs.
        has_last: which gradients for last states there are.
        wanted: of which states, and then of which parameters, the gradient is written.
        summed: all steps are given the same, whose gradient is summed over them.
    """

    neurons: Neurons
    has_last: tuple[bool, ...]
    wanted: tuple[bool, ...]
    summed: bool = False

    @property
    def constants(self) -> dict[str, object]:
        """What the kernel is specialised on."""
        back, forward = step_back(self.neurons.neuron), self.neurons.constants
        return {
            "STEPS": forward["STEPS"], "CODE": forward["CODE"], "AFTER": forward["AFTER"],
            "WIDE": forward["WIDE"], "ALIKE": forward["ALIKE"], "SUMMED": self.summed,
            "BACK": code_of(back.code), "OF_X": back.x, "OF": (*back.states, *back.parameters),
        }  # fmt: skip


def launch_gradients(
    grads: Sequence[Tensor], x: Tensor, states: Sequence[Tensor | None], starts: Sequence[float],
    parameters: Sequence[Tensor], numbers: Sequence[float], step: str, wanted: Sequence[bool],
    times: int = 1,
) -> list[Tensor]:  # fmt: skip
    """See `sparsecomp.ops.trained_neuron`; gradients that are not `wanted` are of no elements, but for x's."""
    neuron_given(x, states, starts, parameters, numbers, step)
    if x.numel() == 0:
        likes = [x, *(x[0].float() for _ in states), *parameters]
        return [torch.zeros_like(one) if wants else x.new_empty(0) for one, wants in zip(likes, wanted, strict=True)]
    by_x = torch.empty_like(x)
    if x.stride()[1:] != by_x.stride()[1:] or not is_dense(x[0]):
        # a step is not one dense block of memory: run on a copy, answer in the layout asked for
        found = launch_gradients(grads, x.contiguous(), states, starts, parameters, numbers, step, wanted, times)
        likes = [x, *(x[0] if wants else x.new_empty(0) for wants in wanted[1 : 1 + len(states)])]
        lying = [torch.empty_like(like, dtype=one.dtype).copy_(one) for one, like in zip(found, likes, strict=False)]
        return lying + found[len(lying) :]
    given, read = operands(x, states, parameters)
    last = [lying_as(one, x[0]) for one in grads[1:]] + [None] * (STATES + 1 - len(grads))
    of_states = [*wanted[1 : 1 + len(states)], *[False] * (STATES - len(states))]
    of_parameters = [*wanted[1 + len(states) :], *[False] * (PARAMETERS - len(parameters))]
    # a parameter's gradient is summed over the elements that read it, in a pass of its own
    by = [torch.empty_like(x[0], dtype=torch.float32) if wants else None for wants in (*of_states, *of_parameters)]
    of_spikes = grads[0] if times > 1 and grads[0].stride()[1:] == x.stride()[1:] else None
    seen = x.expand(times, *x.shape[1:]) if times > 1 else x
    if of_spikes is None:
        of_spikes = lying_as(grads[0], by_x if times == 1 else seen)
    neurons = problem_of(seen, given, starts, read, numbers, step, of_spikes if times > 1 else by_x, keep=False)
    which = tuple(one is not None for one in last), tuple(one is not None for one in by)
    problem = NeuronGradients(neurons, *which, times > 1)
    dispatch.launch(NEURON_GRADIENTS, problem, x, *given, *read, of_spikes, *last, by_x, *by)
    found: list[Tensor] = [by_x]
    for one in by[: len(states)]:
        found.append(x.new_empty(0) if one is None else one)
    for one, parameter in zip(by[STATES:], parameters, strict=False):
        found.append(x.new_empty(0) if one is None else one.sum_to_size(parameter.shape).contiguous())
    return found


def _signature(problem: NeuronGradients, device: Device) -> KernelSignature:
    forward = NEURON.signature(problem.neurons, device)
    more = (("last", as_bits(problem.has_last)), ("wanted", as_bits(problem.wanted)))
    more += (("summed", 1),) if problem.summed else ()
    return replace(forward, op="neuron_gradients", parameters=(*forward.parameters, *more))


NEURON_GRADIENTS = Operation("neuron_gradients", _signature)
"""One configuration: nothing is measured."""
