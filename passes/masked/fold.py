"""In which format a weight that is known beforehand multiplies fastest: dense, or one of the sparse kernels'."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.formats import NM
from sparsecomp.formats.best_format import FULL, StoredForm, forms
from sparsecomp.lowering.cache.signature import NO_TRITON, Device, has_triton
from sparsecomp.lowering.tuning.cards import Card
from sparsecomp.lowering.tuning.ceilings import target_of
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.sparse import Product, dense_seconds, sparse_seconds
from sparsecomp.passes.engine.rule import Context, known_sizes, replays
from sparsecomp.passes.graph.canonicalize import CanonicalOp
from sparsecomp.reference.patterns import Layout, skew_of_counts
from sparsecomp.reference.precision import KERNEL_DTYPES

_BLOCKS = (16, 32, 64)


class FoldedForm(NamedTuple):
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


def choose_fold(op: CanonicalOp, weight: Tensor, ctx: Context) -> FoldedForm:
    """The fastest format for a layer's weight by estimate; looks at its values."""
    where = ctx.device(weight.device)
    if op.name != "linear":
        return _dense(weight, f"{op.name} has no sparse kernel")
    if ctx.options.precision == "exact":
        return _dense(weight, "precision='exact' multiplies its zeros too, be the input NaN or infinite")
    if where.type != "cuda":
        return _dense(weight, "no CUDA device")
    if not has_triton():
        return _dense(weight, NO_TRITON)
    rows = known_sizes(op.input)
    if rows is None:
        return _dense(weight, "the input's shape is unknown")
    n, replayed = torch.Size(rows[:-1]).numel(), replays(ctx.options, where)
    bias = op.get("bias") is not None
    return compare_folds(weight, n, bias, *(ctx.target or target_of(where)), replayed=replayed, products=ctx.products)


def compare_folds(weight: Tensor, n: int, bias: bool, device: Device, card: Card, **how: int) -> FoldedForm:
    """`choose` for a linear layer of n rows on a CUDA device that is such a card.

    Args:
        weight: (m, k), on any device.
        how: `replayed` and `products`, as of `Product`.
    """
    if weight.dtype not in KERNEL_DTYPES:
        return _dense(weight, f"no sparse kernel of {weight.dtype}")
    products = [_product(weight, n, bias, form)._replace(**how) for form in forms_of(weight)]
    timed = [(*sparse_seconds(product, device, card), product) for product in products]
    seconds, kernel, best = min(timed, key=lambda one: one[0])
    # a fold has written the weight out already
    decision = fastest({kernel: seconds, "dense": dense_seconds(best._replace(constant=True), card)})
    if decision.dense:
        return FoldedForm("dense", (1, 1), _described(weight), decision)
    reason = f"{decision.reason}; for finite inputs"
    return FoldedForm(best.layout.format, best.layout.block, _described(weight), decision._replace(reason=reason))


def _dense(weight: Tensor, reason: str) -> FoldedForm:
    return FoldedForm("dense", (1, 1), _described(weight), Decision("dense", reason))


def _described(weight: Tensor) -> str:
    zeros = 1 - weight.count_nonzero().item() / max(weight.numel(), 1)
    return f"{'x'.join(map(str, weight.shape))} at {zeros:.1%} sparsity"


def forms_of(weight: Tensor) -> list[StoredForm]:
    """Formats that can hold the weight without much filler, of groups 2:4 alone."""
    shape, (row, col) = (weight.shape[0], weight.shape[1]), weight.nonzero().unbind(1)
    blocks = [side for side in _BLOCKS if not any(length % side for length in shape)]
    found = forms(row, col, shape, blocks, [4] if shape[1] % 4 == 0 else [])
    return [
        form._replace(block=(2, 4), counts=form.counts * 2 // form.block[0]) if form.format is NM else form
        for form in found
        if form.full > FULL or form.format is NM
    ]


def _product(weight: Tensor, n: int, bias: bool, form: StoredForm) -> Product:
    shape, skew = (weight.shape[0], weight.shape[1]), skew_of_counts(form.counts)
    return Product(
        torch.device("cuda"), Layout(form.format.OPERAND, form.block, shape, (skew, "even")), n, 1,
        int(form.counts.sum()), weight.dtype, True, bias, False, "none", described="",
    )  # fmt: skip
