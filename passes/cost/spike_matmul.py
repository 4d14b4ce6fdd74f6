"""Whether a product of two tensors of spikes is faster on bytes, its host included."""

from math import inf
from typing import NamedTuple

import torch

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.strided import name_of
from sparsecomp.lowering.spiking.spike_matmul import SPIKE_MATMUL, BatchStrides, SpikeMatmul
from sparsecomp.lowering.tuning import cost, host
from sparsecomp.lowering.tuning.cards import Card
from sparsecomp.lowering.tuning.host import Time
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.dense import matmul_work, time_of


class SpikeProduct(NamedTuple):
    """A batch of products (m, k) times (k, n).

    Attributes:
        fused: what makes the operands writes them as bytes; else a pass of its own does.
        trained: both gradients are taken, of operands that are kept as they are.
        hosted: the host calls the kernels each time.
    """

    batch: int
    m: int
    n: int
    k: int
    dtype: torch.dtype
    fused: bool
    trained: bool
    hosted: bool


def decide(site: SpikeProduct, device: Device, card: Card) -> Decision:
    """`binary` or `dense`, by estimate."""
    p, size = site, site.dtype.itemsize
    operands = p.batch * p.k * (p.m + p.n)
    work = matmul_work([p.batch, p.m, p.k], [p.batch, p.k, p.n], [p.batch, p.m, p.n], p.dtype)
    product = time_of(work, card)
    assert product is not None  # of all dtypes that kernels take
    wide = p.fused and not p.trained  # nobody else asks for the operands at full width
    dense = Time(product.device + wide * operands * (size - 1) / card.bandwidth, product.host)
    narrowing = p.trained if p.fused else size + 1
    casts = 0 if p.fused else 2
    ours = Time(
        _kernel_seconds(p, device, card) + narrowing * operands / card.bandwidth + casts * card.launch,
        host.OPERATOR + (1 + casts) * host.LAUNCH,
    )
    gradients = (product, product) if p.trained else ()
    times = {"dense": dense.plus(*gradients), "binary": ours.plus(*gradients)}
    return fastest({name: time.waited(replayed=not p.hosted) for name, time in times.items()})


def _kernel_seconds(site: SpikeProduct, device: Device, card: Card) -> float:
    p = site
    a, b = BatchStrides(0, p.m * p.k, p.k, 1), BatchStrides(0, p.k * p.n, p.n, 1)
    problem = SpikeMatmul(p.m, p.n, p.k, 1, p.batch, a, b, 1.0, name_of(p.dtype))
    return min((cost.seconds(one, problem, card) for one in SPIKE_MATMUL.candidates(problem, device)), default=inf)
