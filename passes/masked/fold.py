"""In which format a weight that is known beforehand multiplies fastest: dense, or one of the sparse kernels'."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.tuning.cards import Card
from sparsecomp.lowering.tuning.ceilings import target_of
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.sparse import Product, dense_seconds, sparse_seconds
from sparsecomp.passes.engine.rule import Context, replays, sizes
from sparsecomp.passes.graph.canonicalize import CanonicalOp
from sparsecomp.reference.patterns import evenness
from sparsecomp.reference.precision import KERNEL_DTYPES

_BLOCKS = (16, 32, 64)
_FULL = 0.5
"""A weight counts as one of blocks if more than this share of the elements of blocks that hold any is not zero."""


class Choice(NamedTuple):
    """How a folded weight is kept.

    Attributes:
        format, block: as of `sparsecomp.ops.masked.folded_layer`.
        described: shape and sparsity, for the report.
        decision: what multiplies it, and why.
    """

    format: str
    block: tuple[int, int]
    described: str
    decision: Decision

    @property
    def name(self) -> str:
        """Of the implementation, for the report."""
        return f"folded {self.format}"

    @property
    def gain(self) -> float | None:
        """Over the layer as it was written; None without an estimate, such as of the masking that a fold saves."""
        return None if self.decision.dense else self.decision.gain


def choose(op: CanonicalOp, weight: Tensor, ctx: Context) -> Choice:
    """The fastest format for a layer's weight by estimate; looks at its values."""
    where = ctx.device(weight.device)
    if op.name != "linear":
        return _dense(weight, f"{op.name} has no sparse kernel")
    if ctx.options.precision == "exact":
        return _dense(weight, "precision='exact' multiplies its zeros too, be the input NaN or infinite")
    if where.type != "cuda":
        return _dense(weight, "no CUDA device")
    rows = sizes(op.input)
    if rows is None:
        return _dense(weight, "the input's shape is unknown")
    n, replayed = torch.Size(rows[:-1]).numel(), replays(ctx.options, where)
    bias = op.get("bias") is not None
    return compare(weight, n, bias, *(ctx.target or target_of(where)), replayed=replayed, products=ctx.products)


def compare(weight: Tensor, n: int, bias: bool, device: Device, card: Card, **how: int) -> Choice:
    """`choose` for a linear layer of n rows on a CUDA device that is such a card.

    Args:
        weight: (m, k), on any device.
        how: `replayed` and `products`, as of `Product`.
    """
    if weight.dtype not in KERNEL_DTYPES:
        return _dense(weight, f"no sparse kernel of {weight.dtype}")
    products = [_product(weight, n, bias, *form)._replace(**how) for form in _forms(weight)]
    timed = [(*sparse_seconds(product, device, card), product) for product in products]
    seconds, kernel, best = min(timed, key=lambda one: one[0])
    # a fold has written the weight out already
    decision = fastest({kernel: seconds, "dense": dense_seconds(best._replace(constant=True), card)})
    if decision.dense:
        return Choice("dense", (1, 1), _described(weight), decision)
    reason = f"{decision.reason}; for finite inputs"
    return Choice(best.format, best.block, _described(weight), decision._replace(reason=reason))


def _dense(weight: Tensor, reason: str) -> Choice:
    return Choice("dense", (1, 1), _described(weight), Decision("dense", None, reason))


def _described(weight: Tensor) -> str:
    zeros = 1 - weight.count_nonzero().item() / max(weight.numel(), 1)
    return f"{'x'.join(map(str, weight.shape))} at {zeros:.1%} sparsity"


def _forms(weight: Tensor) -> list[tuple[str, tuple[int, int], int, str]]:
    """Formats that can hold the weight without much filler: format, block, entries and skew."""
    stored = weight != 0
    forms = [("csr", (1, 1), *_counted(stored))]
    for size in _BLOCKS:
        if all(length % size == 0 for length in weight.shape):
            blocks = stored.unflatten(1, (-1, size)).unflatten(0, (-1, size)).any(-1).any(1)
            entries, skew = _counted(blocks)
            if forms[0][2] > _FULL * entries * size * size:
                forms.append(("bsr", (size, size), entries, skew))
    if weight.shape[1] % 4 == 0 and int(stored.unflatten(1, (-1, 4)).sum(-1).amax()) <= 2:
        forms.append(("nm", (2, 4), weight.numel() // 2, "even"))
    return forms


def _counted(stored: Tensor) -> tuple[int, str]:
    counts = stored.sum(1).double()
    total, mean, deviation = torch.stack([counts.sum(), counts.mean(), counts.std(correction=0)]).tolist()
    return int(total), evenness(deviation / mean if mean else 0.0)


def _product(
    weight: Tensor, n: int, bias: bool, format: str, block: tuple[int, int], entries: int, skew: str
) -> Product:
    m, k = weight.shape
    return Product(
        device=torch.device("cuda"), format=format, block=block, m=m, k=k, n=n, batch=1, entries=entries, skew=skew,
        dtype=weight.dtype, linear=True, bias=bias, residual=False, activation="none", described="",
    )  # fmt: skip
