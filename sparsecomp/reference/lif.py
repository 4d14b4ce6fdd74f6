"""Integrate-and-fire in plain torch: what the CPU runs, and what the kernel is held against."""

import torch


def lif_reference(x, v, v0, mean, var, weight, bias, eps, charge, tau, rate, decay_input, threshold, reset):
    if mean is not None:
        x = behind_norm(x, mean, var, weight, bias, eps)
    v = torch.full_like(x[0], v0) if v is None else v
    rest = 0.0 if reset is None else reset
    spikes = torch.empty_like(x, dtype=torch.int8)
    for step in range(x.shape[0]):
        if charge == "if":
            h = v + x[step]
        else:
            leak = x[step] - (v - rest) if decay_input else v - rest
            leak = leak * rate if charge == "plif" else leak / tau
            h = v + leak if decay_input else v - leak + x[step]
        fired = h >= threshold
        spikes[step] = fired
        spike = fired.to(h.dtype)
        v = h - spike * threshold if reset is None else spike * reset + (1.0 - spike) * h
    return spikes, torch.empty_like(x[0]).copy_(v)


def behind_norm(x, mean, var, weight, bias, eps):
    """A batch-norm in evaluation of x (T, N, C, …)."""
    shape = (-1, *(1,) * (x.dim() - 3))
    gain = torch.rsqrt(var + eps)
    gain = gain if weight is None else gain * weight
    x = (x - mean.reshape(shape)) * gain.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)
