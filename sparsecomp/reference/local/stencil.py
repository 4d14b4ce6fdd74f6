"""Whether outputs read at fixed steps from their own number, as a stencil on a grid does.

Neuron (r, c) of a grid of width W that reads (r + down, c + right) reads, row by row, down · W + right further on than
its own number. Neurons at an edge that wraps or clamps read elsewhere.
"""

import torch
from torch import Tensor

_SAMPLED = 4096
_LEAST = 0.5


def steps_of(index: Tensor) -> tuple[int, ...]:
    """index[o, j] - o for each j, where at least half of all outputs agree; else nothing. Waits for the device.

    It is a hint: whoever goes by it finds out for each output whether it holds.
    """
    if index.is_meta or not index.numel():
        return ()
    own = torch.arange(index.shape[0], dtype=torch.int32, device=index.device)[:, None]
    every = index.shape[0] // _SAMPLED | 1  # odd, so as not to stay in one column of a grid
    steps = (index - own)[::every].mode(0).values
    share = (index == own + steps).all(1).double().mean()
    return tuple(steps.tolist()) if share >= _LEAST else ()
