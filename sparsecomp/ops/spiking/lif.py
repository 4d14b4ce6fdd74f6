"""Integrate-and-fire over all time steps as one operator that returns spikes as bytes.

A rewrite for inference: evaluation-mode batch-norm in front and the narrowing behind are part of it, so that a neuron
costs one pass over its input. Equations and their order are spikingjelly's (`activation_based/neuron`; Fang et al.,
2023), whose multi-step operators it replaces.
"""

import torch
from torch import Tensor

from sparsecomp.ops.library import TAGS, implement, library
from sparsecomp.reference.lif import lif_reference

library.define(
    "lif(Tensor x, Tensor? v, float v0, Tensor? mean, Tensor? var, Tensor? weight, Tensor? bias, float eps, "
    "str charge, float tau, Tensor? rate, bool decay_input, float threshold, float? reset) -> (Tensor, Tensor)",
    tags=TAGS,
)


def lif(
    x: Tensor,
    v: Tensor | None,
    v0: float,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    charge: str,
    tau: float,
    rate: Tensor | None,
    decay_input: bool,
    threshold: float,
    reset: float | None,
) -> tuple[Tensor, Tensor]:
    """Spikes and last membrane of a layer of neurons. No gradient.

    Each step: x' = (x - mean) / sqrt(var + eps) · weight + bias where `mean` is given; charge
    h = v + x' (`"if"`), h = v + (x' - (v - rest)) / tau or h = v - (v - rest) / tau + x' (`"lif"`, by
    `decay_input`), or the same with a product by `rate` for the division (`"plif"`), rest being `reset` or 0;
    spike = h ≥ threshold; v = reset where it fired, or h - threshold if `reset` is None.

    Args:
        x: (T, N, C, …) or (T, N, C), float32, T ≥ 1.
        v: membrane before the first step, shape of `x[0]`, or None for `v0` everywhere.
        mean, var, weight, bias: (C,) batch-norm statistics and parameters, or None.
        rate: one element, the inverse time constant of `"plif"`.

    Returns:
        `(spikes, v)`: int8 in {0, 1} of the shape and strides of `x`, and float32 of the shape of `x[0]`.
    """
    return torch.ops.sparsecomp.lif.default(
        x, v, v0, mean, var, weight, bias, eps, charge, tau, rate, decay_input, threshold, reset
    )


def _cuda(x, v, v0, mean, var, weight, bias, eps, charge, tau, rate, decay_input, threshold, reset):
    from sparsecomp.lowering.spiking import lif as neurons  # loads Triton

    return neurons.launch_lif(x, v, v0, mean, var, weight, bias, eps, charge, tau, rate, decay_input, threshold, reset)


def _fake(x, v, v0, mean, var, weight, bias, eps, charge, tau, rate, decay_input, threshold, reset):
    return torch.empty_like(x, dtype=torch.int8), torch.empty_like(x[0])


implement("lif", lif_reference, _cuda, _fake)
