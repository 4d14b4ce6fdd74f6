"""Whether a float32 convolution is faster as three products of halves, its host included."""

from math import inf

import torch

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.spiking.halves_conv import HALVES_CONV, HalvesConv
from sparsecomp.lowering.tuning import cost, host
from sparsecomp.lowering.tuning.cards import Card
from sparsecomp.lowering.tuning.host import Time
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.dense import conv_work, time_of

_FEW_CHANNELS = 8
_OF_FEW = 20.5 / 80
"""Share of cuDNN's float32 rate that it reaches with few input channels: the stem of SEW-ResNet-34, 30.2 GFLOP in
1.47 ms on an H100. Of TF32 nothing is known, so that it counts as fast as with many."""


def decide(problem: HalvesConv, tf32: bool, trained: bool, hosted: bool, device: Device, card: Card) -> Decision:
    """`halves` or `dense`, by estimate.

    Args:
        tf32: the dense operator may use TF32.
        trained: gradients are taken, by the dense operator in either case.
        hosted: the host calls the kernels each time.
    """
    c = problem.conv
    shapes = [c.n, c.c, *c.size], [c.k, c.c, *c.window.kernel], [c.n, c.k, *c.out_size]
    dense = time_of(conv_work(*shapes, torch.float32, not problem.pixels_inner), card)
    assert dense is not None  # of float32
    if not tf32 and c.c <= _FEW_CHANNELS:
        dense = dense._replace(device=dense.device / _OF_FEW)
    seconds = min((cost.seconds(one, problem, card) for one in HALVES_CONV.candidates(problem, device)), default=inf)
    ours = Time(seconds, host.OPERATOR + 2 * host.LAUNCH + 3 * host.ALLOCATION)
    gradients = (dense, dense) if trained else ()
    times = {"dense": dense.plus(*gradients), "halves": ours.plus(*gradients)}
    return fastest({name: time.waited(replayed=not hosted) for name, time in times.items()})
