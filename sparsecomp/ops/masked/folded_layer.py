"""Weights that are a formula of tensors that stay, and linear layers on sparse ones; see `folded_weight`.

The operators take the formula's sources and keep its result from call to call.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.ops.library import KEPT, TAGS, implement, library
from sparsecomp.ops.masked.folded_weight import Packed, Recipe, computed, weight_of
from sparsecomp.ops.sparse.spmm import spmm

library.define("folded_linear(Tensor x, Tensor[] sources, Tensor? bias, str recipe) -> Tensor", tags=TAGS)
library.define("folded_weight(Tensor[] sources, str recipe) -> Tensor", tags=TAGS)


def folded_linear(x: Tensor, sources: list[Tensor], bias: Tensor | None, recipe: Recipe) -> Tensor:
    """`F.linear(x, weight, bias)` of a computed weight (m, k).

    Args:
        x: (…, k), of the weight's dtype.
        sources: of the formula.
        bias: (m,) or None.
        recipe: how the weight is computed, and kept if it may be; else it is dense. A sparse product adds in another
            order than a dense one, and multiplies no zero of the weight: an infinite x gives NaN in fewer places.

    Returns:
        (…, m).

    Raises:
        NotImplementedError: something needs a gradient.
        FormatError: an unknown formula or format.
        FrozenWeightError: a source was written to; see `sparsecomp.reference.memo.Memo.kept`.
    """
    return torch.ops.sparsecomp.folded_linear.default(x, sources, bias, recipe.written())


def _refuse_gradients(*operands: Tensor | None) -> None:
    """Here, not in a backward: registering one costs each call 13 us."""
    if torch.is_grad_enabled() and any(read is not None and read.requires_grad for read in operands):
        raise NotImplementedError("a folded weight has no gradient: call it under torch.no_grad()")


def _linear(x, sources, bias, recipe):
    _refuse_gradients(x, bias, *sources)
    weight = weight_of(sources, recipe)
    return F.linear(x, weight.values, bias) if weight.layout is None else _sparse(x, weight, bias)


def _sparse(x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
    assert weight.layout is not None
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    out = spmm(weight.values, weight.pattern, rows.mT, weight.layout, bias=bias, bias_axis="row", by_column=True)
    return out.mT.view(*x.shape[:-1], weight.layout.shape[0])


def _weight(sources, recipe):
    _refuse_gradients(*sources)
    # not the tensor that is kept, on which a reader may set what belongs to no tensor of ours; a write is noticed
    return weight_of(sources, recipe).values.detach()


def _fake_linear(x, sources, bias, recipe):
    return F.linear(x, computed(sources, Recipe.read(recipe).folded.formula), bias)


def _fake_weight(sources, recipe):
    return computed(sources, Recipe.read(recipe).folded.formula)


implement("folded_linear", _linear, fake=_fake_linear)
implement("folded_weight", _weight, fake=_fake_weight)
KEPT.add(torch.ops.sparsecomp.folded_weight.default)
