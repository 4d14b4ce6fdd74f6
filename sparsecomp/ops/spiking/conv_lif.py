"""A convolution on spikes and the integrate-and-fire neurons that read it, over all time steps, as one operator.

A rewrite for inference: between the two a float32 number would be written and read again for each neuron and step,
where the neuron keeps but one bit of it.
"""

import torch
from torch import Tensor

from sparsecomp.ops.library import TAGS, implement, library
from sparsecomp.ops.spiking.layer_spikes import fake_currents, fake_spikes, of_a_step
from sparsecomp.ops.spiking.spike_conv import reference_counts
from sparsecomp.reference.connect import check_added, check_residual, connected
from sparsecomp.reference.digits import check_digits
from sparsecomp.reference.layer_current import joined_current
from sparsecomp.reference.lif import lif_reference

library.define(
    "conv_lif(Tensor counts, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, "
    "int groups, int digits, float scale, float spread, bool channels_last, int steps, Tensor? v, float v0, "
    "Tensor? mean, Tensor? var, Tensor? gamma, Tensor? beta, float eps, str charge, float tau, Tensor? rate, "
    "bool decay_input, float threshold, float? reset, bool keep, Tensor? residual=None, str connect='add', "
    "Tensor? added=None, bool currents=False) "
    "-> (Tensor, Tensor, Tensor)",
    tags=TAGS,
)


def conv_lif(
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
    v: Tensor | None,
    v0: float,
    mean: Tensor | None,
    var: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    charge: str,
    tau: float,
    rate: Tensor | None,
    decay_input: bool,
    threshold: float,
    reset: float | None,
    keep: bool = True,
    residual: Tensor | None = None,
    connect: str = "add",
    added: Tensor | None = None,
    currents: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`lif` of :func:`spike_conv` with `implementation="binary"`: the same spikes, bit for bit. No gradient.

    Args:
        counts: (T · N, C, …), int8: the spikes of all steps, one step behind the other.
        weight: (K, C / groups, …) float32, or (K, C) for maps of one pixel.
        bias: (K,) or None.
        stride, padding, dilation, groups, digits, spread: as of `spike_conv`.
        scale: of the counts, a power of two.
        channels_last: how the results lie.
        steps: T.
        v: (N, K, …) float32, or (N, K) for maps of one pixel, or None for `v0` everywhere.
        mean, var, gamma, beta: (K,) batch-norm between the two, or None.
        eps, charge, tau, rate, decay_input, threshold, reset: as of `lif`.
        keep: whether the last membranes are asked for.
        residual: (T, N, K, …) int8, or (T, N, K) for maps of one pixel: what the spikes are joined with, or None.
        connect: how, as SEW-ResNet has it (Fang et al. 2021, arXiv:2102.04159): `add` (residual + spike),
            `and` (residual · spike) or `iand` (residual · (1 - spike)).
        added: (T, N, K, …) int8 or float32, or (T, N, K) for maps of one pixel: what is added to the batch-norm's
            result, as the blocks of MS-ResNet (Hu et al. 2021, arXiv:2112.08954) and of spiking ResNets are, or None.
        currents: whether what the neurons are given is asked for, as the next block of MS-ResNet reads it.

    Returns:
        `(spikes, v, currents)`: (T, N, K, …) int8, in {0, 1} without a residual, (N, K, …) float32, and (T, N, K, …)
        float32; the last two of no elements if not asked for. With a residual, what both join to in place of the
        spikes, as sums and products of int8 are.

    Raises:
        InputError: a residual, or something to add, of another dtype or shape, first membranes of another number, or
            an unknown `connect`; other digits than 2 to 4.
    """
    check_digits(digits)
    return torch.ops.sparsecomp.conv_lif.default(
        counts, weight, bias, stride, padding, dilation, groups, digits, scale, spread, channels_last, steps,
        v, v0, mean, var, gamma, beta, eps, charge, tau, rate, decay_input, threshold, reset, keep, residual, connect,
        added, currents,
    )  # fmt: skip


def _reference(
    counts, weight, bias, stride, padding, dilation, groups, digits, scale, spread, channels_last, steps,
    v, v0, mean, var, gamma, beta, eps, charge, tau, rate, decay_input, threshold, reset, keep, residual=None,
    connect="add", added=None, currents=False,
):  # fmt: skip
    current = reference_counts(
        counts, weight, bias, stride, padding, dilation, groups, digits, "binary", scale, None, spread, channels_last
    ).unflatten(0, (steps, counts.shape[0] // steps))
    check_added(added, weight.dtype, current.shape)
    current = joined_current(current, mean, var, gamma, beta, eps, added)
    neuron = (None, None, None, None, eps, charge, tau, rate, decay_input, threshold, reset)
    v = of_a_step(v, current.shape[1:])
    check_residual(residual, connect, current.shape)
    spikes, last = lif_reference(current, v, v0, *neuron)
    if residual is not None:
        spikes = connected(spikes, residual.reshape(spikes.shape), connect)
    return spikes, last if keep else last.new_empty(0), current if currents else current.new_empty(0)


def _cuda(*arguments):
    from sparsecomp.lowering.spiking import conv_lif as layer  # loads Triton

    return layer.launch_conv_lif(*arguments)


def _fake(
    counts, weight, bias, stride, padding, dilation, groups, digits, scale, spread, channels_last, steps,
    v, v0, mean, var, gamma, beta, eps, charge, tau, rate, decay_input, threshold, reset, keep, residual=None,
    connect="add", added=None, currents=False,
):  # fmt: skip
    spikes = fake_spikes(counts, weight, stride, padding, dilation, channels_last, steps, residual, connect, added)
    of_a_step(v, spikes.shape[1:])
    last = torch.empty_like(spikes[0], dtype=torch.float32) if keep else weight.new_empty(0)
    return spikes, last, fake_currents(spikes, weight, currents)


implement("conv_lif", _reference, _cuda, _fake)
