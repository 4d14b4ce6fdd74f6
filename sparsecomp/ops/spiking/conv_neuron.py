"""A convolution on spikes and the described neurons that read it, over all time steps, as one operator.

What :func:`conv_lif` is for integrate-and-fire neurons, for a neuron of any small description and in half precision
too: a rewrite for inference, which writes spikes in place of a number for each neuron and step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsecomp.ops.library import TAGS, implement, library
from sparsecomp.ops.spiking.layer_spikes import fake_currents, fake_spikes, of_a_step
from sparsecomp.ops.spiking.spike_conv import reference_counts
from sparsecomp.reference.connect import check_added, check_residual, connected
from sparsecomp.reference.digits import check_digits
from sparsecomp.reference.layer_current import joined_current
from sparsecomp.reference.neuron import STATES, kept_in, neuron_reference, neuron_with

library.define(
    "conv_neuron(Tensor counts, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, "
    "int groups, int digits, float scale, float spread, bool channels_last, int steps, "
    "Tensor? mean, Tensor? var, Tensor? gamma, Tensor? beta, float eps, Tensor?[] states, float[] starts, "
    "Tensor[] parameters, float[] numbers, str step, bool keep, Tensor? residual=None, str connect='add', "
    "Tensor? added=None, bool currents=False, ScalarType? state_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=TAGS,
)


def conv_neuron(
    counts: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    digits: int,
    scale: float,
    spread: float,
    channels_last: bool,
    steps: int,
    mean: Tensor | None,
    var: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    states: Sequence[Tensor | None],
    starts: Sequence[float],
    parameters: Sequence[Tensor],
    numbers: Sequence[float],
    step: str,
    keep: bool = True,
    residual: Tensor | None = None,
    connect: str = "add",
    added: Tensor | None = None,
    currents: bool = False,
    state_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`neuron` of :func:`spike_conv` with `implementation="binary"`: the same spikes. No gradient.

    What the layer gives is rounded to the dtype of its weight, and what a batch-norm and `added` make of it again, as
    torch's operators round it; sums and states are float32.

    Args:
        counts: (T · N, C, …), int8: the spikes of all steps, one step behind the other.
        weight: (K, C / groups, …) float32, float16 or bfloat16, or (K, C) for maps of one pixel.
        bias: (K,) or None.
        stride, padding, dilation, groups, digits, spread: as of `spike_conv`.
        scale: of the counts, a power of two.
        channels_last: how the results lie.
        steps: T.
        mean, var, gamma, beta: (K,) batch-norm between the two, or None.
        eps: its own.
        states: each (N, K, …) of `state_dtype`, or (N, K) for maps of one pixel, or None for its number of `starts`
            everywhere.
        starts, numbers, step: as of `neuron`.
        parameters: float32 tensors of one number, or of one for each of K channels.
        keep: whether the last states are asked for.
        residual, connect: as of `conv_lif`.
        added: (T, N, K, …) int8 or of the weight's dtype, or (T, N, K) for maps of one pixel: what is added to what
            neurons are given, or None.
        currents: whether what the neurons are given is asked for.
        state_dtype: of first and last states, as of `neuron`.

    Returns:
        `(spikes, v0, v1, currents)`: (T, N, K, …) int8, in {0, 1} without a residual, (N, K, …) of `state_dtype`, of no
        elements where there is no such state or it is not asked for, and (T, N, K, …) of the weight's dtype, or of no
        elements.

    Raises:
        InputError: a residual, or something to add, or a state, of another dtype or shape, an unknown `connect`, or a
            `step` that describes no neuron, or other ones than what is given; other digits than 2 to 4.
    """
    check_digits(digits)
    return torch.ops.sparsecomp.conv_neuron.default(
        counts, weight, bias, stride, padding, dilation, groups, digits, scale, spread, channels_last, steps,
        mean, var, gamma, beta, eps, list(states), list(starts), list(parameters), list(numbers), step, keep, residual,
        connect, added, currents, state_dtype,
    )  # fmt: skip


def _reference(
    counts, weight, bias, stride, padding, dilation, groups, digits, scale, spread, channels_last, steps,
    mean, var, gamma, beta, eps, states, starts, parameters, numbers, step, keep, residual=None, connect="add",
    added=None, currents=False, state_dtype=None,
):  # fmt: skip
    neuron_with(step, states, starts, parameters, numbers)
    sums = reference_counts(
        counts, weight, bias, stride, padding, dilation, groups, digits, "binary", scale, None, spread, channels_last
    ).unflatten(0, (steps, counts.shape[0] // steps))
    check_residual(residual, connect, sums.shape)
    check_added(added, weight.dtype, sums.shape)
    current = joined_current(sums, mean, var, gamma, beta, eps, added)
    states = [of_a_step(v, current.shape[1:]) for v in states]
    trailing = (-1, *[1] * (current.dim() - 3))
    parameters = [one.reshape(trailing) for one in parameters]
    spikes, *lasts = neuron_reference(current.float(), states, starts, parameters, numbers, step, keep, state_dtype)
    if residual is not None:
        spikes = connected(spikes, residual.reshape(spikes.shape), connect)
    return spikes, *lasts, current if currents else current.new_empty(0)


def _cuda(*arguments):
    from sparsecomp.lowering.spiking import conv_neuron as layer  # loads Triton

    return layer.launch_conv_neuron(*arguments)


def _fake(
    counts, weight, bias, stride, padding, dilation, groups, digits, scale, spread, channels_last, steps,
    mean, var, gamma, beta, eps, states, starts, parameters, numbers, step, keep, residual=None, connect="add",
    added=None, currents=False, state_dtype=None,
):  # fmt: skip
    neuron_with(step, states, starts, parameters, numbers)
    spikes = fake_spikes(counts, weight, stride, padding, dilation, channels_last, steps, residual, connect, added)
    kept = kept_in(state_dtype, spikes, [of_a_step(v, spikes.shape[1:]) for v in states])
    lasts = [torch.empty_like(spikes[0], dtype=kept) for _ in states] if keep else []
    unused = (spikes.new_empty(0, dtype=kept) for _ in range(STATES - len(lasts)))
    return spikes, *lasts, *unused, fake_currents(spikes, weight, currents)


implement("conv_neuron", _reference, _cuda, _fake)
