"""A neuron of any small description over all time steps as one operator that returns spikes as bytes.

A rewrite for inference of neurons that are written by hand, step by step; see `sparsecomp.reference.neuron` for what a
description is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsecomp.ops.library import TAGS, implement, library
from sparsecomp.reference.neuron import STATES, neuron_reference

library.define(
    "neuron(Tensor x, Tensor?[] states, float[] starts, Tensor[] parameters, float[] numbers, str step, bool keep) "
    "-> (Tensor, Tensor, Tensor)",
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Spikes and last states of a layer of neurons, rounded after each operation of the description. No gradient.

    Args:
        x: (T, …), float32, T ≥ 1.
        states: each of the shape of `x[0]`, float32, before the first step; None for one number everywhere.
        starts: these numbers, one a state.
        parameters: float32 tensors that broadcast to `x[0]` and have several elements along one dimension at most.
        numbers: numbers of the description, rounded to float32.
        step: what a step does, such as `"t0 = add v0 x; t1 = ge t0 n0; t2 = where t1 n1 t0; spike t1; v0 t2"`.
        keep: whether the last states are asked for.

    Returns:
        `(spikes, v0, v1)`: int8 in {0, 1} of the shape and strides of `x`, and float32 of the shape of `x[0]`; states
        that there are not, or that are not asked for, are of no elements.

    Raises:
        InputError: `step` describes no neuron.
    """
    return torch.ops.sparsecomp.neuron.default(
        x, list(states), list(starts), list(parameters), list(numbers), step, keep
    )


def _cuda(x, states, starts, parameters, numbers, step, keep):
    from sparsecomp.lowering.spiking import neuron as neurons  # loads Triton

    return neurons.launch_neuron(x, states, starts, parameters, numbers, step, keep)


def _fake(x, states, starts, parameters, numbers, step, keep):
    last = [torch.empty_like(x[0]) for _ in states] if keep else []
    return torch.empty_like(x, dtype=torch.int8), *last, *(x.new_empty(0) for _ in range(STATES - len(last)))


implement("neuron", neuron_reference, _cuda, _fake)
