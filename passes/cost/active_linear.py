"""Whether a layer of one row is faster by the weights of its active inputs alone, its host included."""

from math import inf
from typing import NamedTuple

import torch

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.strided import name_of
from sparsecomp.lowering.sparse.active_linear import ACTIVE_LINEAR, ActiveLinear
from sparsecomp.lowering.tuning import cost, host
from sparsecomp.lowering.tuning.cards import Card
from sparsecomp.lowering.tuning.host import Time
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.dense import matmul_work, time_of

_ACTIVE = 0.5
"""Share of inputs that a ReLU of values around zero leaves."""
_SAVED = 0.5
"""Share of the time to read the weight that is saved where all inputs are zero (docs/results.md, one H200)."""


class ActiveLayer(NamedTuple):
    """A linear layer (1, k) to (1, n).

    Attributes:
        active: share of inputs that are not zero; None if unknown.
        hosted: the host calls the kernels each time.
        products: of the whole graph, which share what a call takes the host besides.
    """

    k: int
    n: int
    has_bias: bool
    dtype: torch.dtype
    active: float | None
    hosted: bool
    products: int = 1


def decide(layer: ActiveLayer, device: Device, card: Card) -> Decision:
    """`active` or `dense`, by estimate."""
    p = layer
    work = matmul_work([1, p.k], [p.k, p.n], [1, p.n], p.dtype)
    dense = time_of(work, card)
    assert dense is not None  # of all dtypes that kernels take
    problem = ActiveLinear(p.k, p.n, p.has_bias, name_of(p.dtype))
    whole = min((cost.seconds(one, problem, card) for one in ACTIVE_LINEAR.candidates(problem, device)), default=inf)
    active = _ACTIVE if p.active is None else p.active
    saved = _SAVED * (1 - active) * p.k * p.n * p.dtype.itemsize / card.bandwidth
    ours = Time(whole - saved, host.OPERATOR + 2 * host.LAUNCH + host.ALLOCATION)
    besides = host.besides(False, p.products)
    return fastest({name: time.waited(not p.hosted, besides) for name, time in (("dense", dense), ("active", ours))})
