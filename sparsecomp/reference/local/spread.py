"""How far apart neighbouring outputs read, which decides how a GPU gathers: one word for an index of fixed fan-in."""

import torch
from torch import Tensor

SPREADS = {"near": 3, "mixed": 10, "far": 32}
"""Lines of 128 bytes that 32 neighbouring outputs touch to read one input each, by word: what it stands for."""

_OUTPUTS, _LINE = 32, 32
_LIMITS = {"near": 6, "mixed": 18}


def spread_of(index: Tensor) -> str:
    """The word for an index (n_out, k), "far" for one on the meta device; waits for the device.

    Lines are counted for float32. Thirty-two outputs in a row read 1 or 2 lines where each reads the input next to that
    of the one before, and 32 where they read anywhere.
    """
    if index.is_meta:
        return "far"
    outputs = index.shape[0] // _OUTPUTS * _OUTPUTS
    if not outputs or not index.numel():
        return "near"
    lines = torch.div(index[:outputs], _LINE, rounding_mode="floor").view(-1, _OUTPUTS, index.shape[1])
    ordered = lines.sort(1).values
    distinct = 1 + (ordered.diff(dim=1) != 0).sum(1)
    mean = distinct.double().mean().item()
    return next((word for word, limit in _LIMITS.items() if mean <= limit), "far")
