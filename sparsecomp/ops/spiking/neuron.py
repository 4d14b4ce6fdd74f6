"""A neuron of any small description over all time steps as one operator that returns spikes as bytes.

What neurons become that are written by hand, step by step; see `sparsecomp.reference.neuron` for what a description is.
One that is trained is an operator of its own, whose spikes are numbers, since bytes have no gradients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsecomp.errors import InputError
from sparsecomp.ops.library import TAGS, differentiable, implement, library
from sparsecomp.reference.neuron import (
    STATES,
    kept_in,
    neuron_given,
    neuron_of,
    neuron_reference,
    spikes_like,
    trained_reference,
)
from sparsecomp.reference.neuron_gradient import gradients_reference, known_sums
from sparsecomp.reference.precision import KERNEL_DTYPES, accumulator

library.define(
    "neuron(Tensor x, Tensor?[] states, float[] starts, Tensor[] parameters, float[] numbers, str step, bool keep, "
    "ScalarType? state_dtype=None, ScalarType? spike_dtype=None) -> (Tensor, Tensor, Tensor)",
    tags=TAGS,
)
library.define(
    "trained_neuron(Tensor x, Tensor?[] states, float[] starts, Tensor[] parameters, float[] numbers, str step, "
    "int times) -> (Tensor, Tensor, Tensor)",
    tags=TAGS,
)
library.define(
    "neuron_gradients(Tensor[] grads, Tensor x, Tensor?[] states, float[] starts, Tensor[] parameters, "
    "float[] numbers, str step, bool[] wanted, int times=1) -> Tensor[]",
    tags=TAGS,
)


def neuron(
    x: Tensor,
    states: Sequence[Tensor | None],
    starts: Sequence[float],
    parameters: Sequence[Tensor],
    numbers: Sequence[float],
    step: str,
    keep: bool = True,
    state_dtype: torch.dtype | None = None,
    spike_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Spikes and last states of a layer of neurons, rounded after each operation of the description. No gradient.

    Args:
        x: (T, …), T ≥ 1, float32, or of half precision, which becomes float32 first.
        states: each of the shape of `x[0]`, of `state_dtype`, before the first step; None for one number everywhere.
        starts: these numbers, one a state.
        parameters: tensors of float32 or half precision, which becomes float32 first, that broadcast to `x[0]` and have
            several elements along one dimension at most.
        numbers: numbers of the description, rounded to float32.
        step: what a step does, such as `"t0 = add v0 x; t1 = ge t0 n0; t2 = where t1 n1 t0; spike t1; v0 t2"`.
        keep: whether the last states are asked for.
        state_dtype: of first and last states, float32 by default. Of half precision where the description rounds them
            to it: they are what it leaves then, in half the bytes.
        spike_dtype: int8 by default, or float32 or half precision.

    Returns:
        `(spikes, v0, v1)`: `spike_dtype` in {0, 1} of the shape and strides of `x`, and `state_dtype` of the shape of
        `x[0]`; states that there are not, or that are not asked for, are of no elements.

    Raises:
        InputError: `step` describes no neuron, what is given does not fit it or a time step, a first state is not of
            `state_dtype`, or a dtype has no kernel.
    """
    return torch.ops.sparsecomp.neuron.default(
        x, list(states), list(starts), list(parameters), list(numbers), step, keep, state_dtype, spike_dtype
    )


def _cuda(x, states, starts, parameters, numbers, step, keep, state_dtype=None, spike_dtype=None):
    from sparsecomp.lowering.spiking import neuron as neurons  # loads Triton

    if x.dtype not in KERNEL_DTYPES:
        return neuron_reference(x, states, starts, parameters, numbers, step, keep, state_dtype, spike_dtype)
    return neurons.launch_neuron(x, states, starts, parameters, numbers, step, keep, state_dtype, spike_dtype)


def _fake(x, states, starts, parameters, numbers, step, keep, state_dtype=None, spike_dtype=None):
    neuron_given(x, states, starts, parameters, numbers, step)
    like = torch.empty_like(x[0], dtype=kept_in(state_dtype, x, states))
    last = [torch.empty_like(like) for _ in states] if keep else []
    return spikes_like(x, spike_dtype), *last, *(like.new_empty(0) for _ in range(STATES - len(last)))


implement("neuron", neuron_reference, _cuda, _fake)


def trained_neuron(
    x: Tensor, states: Sequence[Tensor | None], starts: Sequence[float], parameters: Sequence[Tensor],
    numbers: Sequence[float], step: str, times: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Spikes and last states of a layer of neurons, with gradients for `x`, `states` and `parameters`.

    Of a call nothing is kept but what it was given: its backward computes the states of all steps again, in the
    arithmetic of the forward, and goes back through them in the same kernel.

    Args:
        x, states, starts, parameters, numbers, step: as of :func:`neuron`, but that x may be of half precision, which
            becomes float32 first, as states and parameters are. `step` may fire with a gradient, as
            `"…; t3 = fire t2 t1; …; spike t3; v0 t5; b0 = mul g n4; pull b0"`.
        times: of x (1, …), how many steps there are that are given it alike: its gradient is then summed over them in
            the kernel, and none of either is written for each.

    Returns:
        `(spikes, v0, v1)`: 0 or 1, of the dtype of `x`, of all steps; and float32 of the shape of `x[0]`, or of no
        elements where there is no such state.

    Raises:
        InputError: `step` describes no neuron, what is given does not fit it or a time step, or `times` is not 1 and x
            is of several steps.
    """
    return torch.ops.sparsecomp.trained_neuron.default(
        x, list(states), list(starts), list(parameters), list(numbers), step, times
    )


def _all_steps(x: Tensor, times: int) -> Tensor:
    """What all steps are given, a view."""
    if times == 1:
        return x
    if x.shape[0] != 1 or times < 1:
        raise InputError(f"times={times} of x {tuple(x.shape)}: give one step, which is seen so many times")
    return x.expand(times, *x.shape[1:])


def _reference_trained(x, states, starts, parameters, numbers, step, times):
    x = _all_steps(x, times)
    with torch.no_grad():
        found = trained_reference(x, states, starts, parameters, numbers, step)
    like = [torch.empty_like(x), *(torch.empty_like(x[0], dtype=one.dtype) for one in found[1:])]
    return _three(x, [one.copy_(value) for one, value in zip(like, found, strict=True)])


def _three(x: Tensor, some: list[Tensor]) -> tuple[Tensor, ...]:
    return *some, *(x.new_empty(0) for _ in range(1 + STATES - len(some)))


def _cuda_trained(x, states, starts, parameters, numbers, step, times):
    from sparsecomp.lowering.spiking import neuron as neurons  # loads Triton

    if x.dtype not in KERNEL_DTYPES:
        return _reference_trained(x, states, starts, parameters, numbers, step, times)
    return _three(x, neurons.launch_trained(_all_steps(x, times), states, starts, parameters, numbers, step))


def _fake_trained(x, states, starts, parameters, numbers, step, times):
    x = _all_steps(x, times)
    neuron_given(x, states, starts, parameters, numbers, step)
    like = torch.empty_like(x[0], dtype=accumulator(x.dtype))
    return _three(x, [torch.empty_like(x), *(torch.empty_like(like) for _ in states)])


def _reference_gradients(grads, x, states, starts, parameters, numbers, step, wanted, times=1):
    of_x, *others = gradients_reference(grads, _all_steps(x, times), states, starts, parameters, numbers, step)
    found = [of_x if times == 1 else of_x.sum(0, keepdim=True), *others]
    likes = _fake_gradients(grads, x, states, starts, parameters, numbers, step, wanted, times)
    return [like.copy_(one) if wants else like for like, one, wants in zip(likes, found, wanted, strict=True)]


def _differentiated(grads, x, states, starts, parameters, numbers, step, times):
    """As `neuron_gradients`, for torch to differentiate again."""
    # views: of what is made of one another, or is one tensor, each gradient would be that of all
    x, parameters = x.view_as(x), [one.view_as(one) for one in parameters]
    states = [None if one is None else one.view_as(one) for one in states]
    given = [x, *states, *parameters]
    outs = trained_reference(_all_steps(x, times), states, starts, parameters, numbers, step)
    some = [(out, grad) for out, grad in zip(outs, grads, strict=True) if out.requires_grad]
    inputs = [one for one in given if one is not None and one.requires_grad]
    found = torch.autograd.grad(
        [out for out, _ in some], inputs, [grad for _, grad in some], create_graph=True, materialize_grads=True
    )
    rest = iter(found)
    return [x.new_empty(0) if one is None or not one.requires_grad else next(rest) for one in given]


def _cuda_gradients(grads, x, states, starts, parameters, numbers, step, wanted, times=1):
    from sparsecomp.lowering.spiking import neuron_gradients  # loads Triton

    if x.dtype not in KERNEL_DTYPES:
        return _reference_gradients(grads, x, states, starts, parameters, numbers, step, wanted, times)
    return neuron_gradients.launch_gradients(grads, x, states, starts, parameters, numbers, step, wanted, times)


def _fake_gradients(grads, x, states, starts, parameters, numbers, step, wanted, times=1):
    likes = [x, *(x[0].to(accumulator(x.dtype)) for _ in states), *parameters]
    return [torch.empty_like(like) if wants else x.new_empty(0) for like, wants in zip(likes, wanted, strict=True)]


def _save(ctx, inputs, output):
    x, states, ctx.starts, parameters, ctx.numbers, ctx.step, ctx.times = inputs
    ctx.given = [one is not None for one in states]
    ctx.save_for_backward(x, *(one for one in states if one is not None), *parameters)


def _backward(ctx, *grads):
    x, *rest = ctx.saved_tensors
    grads = grads[: 1 + len(ctx.given)]
    more = iter(rest)
    states = [next(more) if given else None for given in ctx.given]
    parameters, last = [*more], 1 + len(states)
    if torch.is_grad_enabled():  # a gradient of gradients
        found = _differentiated(grads, x, states, ctx.starts, parameters, ctx.numbers, ctx.step, ctx.times)
    else:
        of_x, of_states, _, of_parameters, *_ = ctx.needs_input_grad
        needed = _each(of_parameters, len(parameters))
        known = _known(parameters, needed, ctx.step)
        bases = {base for base, _ in known.values()}
        summed = [(wants and i not in known) or i in bases for i, wants in enumerate(needed)]
        found = torch.ops.sparsecomp.neuron_gradients.default(
            list(grads), x, states, ctx.starts, parameters, ctx.numbers, ctx.step,
            [of_x, *_each(of_states, len(states)), *summed], ctx.times,
        )  # fmt: skip
        for one, (base, factor) in known.items():
            found[last + one] = -(found[last + base] * parameters[factor])
    by_states = [one if given else None for one, given in zip(found[1:last], ctx.given, strict=True)]
    return found[0], by_states if any(ctx.given) else None, None, list(found[last:]) or None, None, None, None


def _known(parameters: list[Tensor], needed: list[bool], step: str) -> dict[int, tuple[int, int]]:
    """Which gradients follow from which others and from which parameters."""
    sums = known_sums(neuron_of(step)).items()
    return {
        one: by for one, by in sums
        if one < len(needed) and needed[one] and len({parameters[place].shape for place in (one, *by)}) == 1
    }  # fmt: skip


def _each(needed: bool | list[bool], count: int) -> list[bool]:
    """Of a list's tensors which need gradients; a list without tensors counts as one argument."""
    return list(needed) if isinstance(needed, list) else [False] * count


implement("trained_neuron", _reference_trained, _cuda_trained, _fake_trained)
implement("neuron_gradients", _reference_gradients, _cuda_gradients, _fake_gradients)
differentiable("trained_neuron", _backward, _save)
