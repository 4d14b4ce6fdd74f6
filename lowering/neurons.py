"""CUDA implementation of the fused neuron operator."""

import torch
import triton
from torch import Tensor

from sparsecomp.lowering.launch import Launcher
from sparsecomp.lowering.templates.lif import lif_kernel

_BLOCK = 1024
_launch = Launcher(lif_kernel)


def lif(
    x, v, v0, mean, var, weight, bias, eps, charge, tau, rate, decay_input, threshold, reset
) -> tuple[Tensor, Tensor]:
    """See ``sparsecomp.ops.lif``."""
    spikes = torch.empty_like(x, dtype=torch.int8)
    last = torch.empty_like(x[0])
    if x.numel() == 0:
        return spikes, last
    if not x.stride()[1:] == spikes.stride()[1:] == last.stride():
        # a step is not one dense block of memory: run on a copy, answer in the layout asked for
        copy = x.contiguous()
        dense = lif(copy, v, v0, mean, var, weight, bias, eps, charge, tau, rate, decay_input, threshold, reset)
        return spikes.copy_(dense[0]), last.copy_(dense[1])
    if v is not None and (v.shape, v.stride()) != (last.shape, last.stride()):
        v = torch.empty_like(last).copy_(v)
    numel = last.numel()
    arguments = (
        x, v, mean, var, weight, bias, rate, spikes, last,
        numel, x.stride(0), spikes.stride(0), x.shape[2], last.stride(1), v0, eps, tau, threshold, reset or 0.0,
    )  # fmt: skip
    constants = {
        "STEPS": x.shape[0], "CHARGE": charge, "DECAY_INPUT": decay_input, "SOFT_RESET": reset is None,
        "HAS_V": v is not None, "HAS_NORM": mean is not None, "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None, "BLOCK": _BLOCK,
    }  # fmt: skip
    _launch((triton.cdiv(numel, _BLOCK),), arguments, constants, num_warps=4)
    return spikes, last
