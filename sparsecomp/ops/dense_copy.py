"""Products with a sparse weight that are faster dense: the weight is written out once, and kept as long as it stays.

A compiled model in inference takes these where tensor cores outrun what sparsity saves. What is noticed of changes is
said in `sparsecomp.ops.folded_weight`. Like there, the operators take what the copy is made of, so that the copy never
is a buffer of a graph.
"""

from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.formats import BSR, CSR, NM
from sparsecomp.ops.folded_weight import FOLDS, named_formula
from sparsecomp.ops.library import TAGS, library
from sparsecomp.ops.patterns import Layout, layout_of

library.define("dense_copy_matmul(Tensor sparse, Tensor dense, Tensor? bias, bool linear) -> Tensor", tags=TAGS)
library.define(
    "dense_copy_product(Tensor values, Tensor[] pattern, Tensor dense, Tensor? bias, str format, SymInt[] block, "
    "SymInt[] shape, str[] skews, bool transpose, bool linear) -> Tensor",
    tags=TAGS,
)


def dense_copy_matmul(sparse: Tensor, dense: Tensor, bias: Tensor | None = None, *, linear: bool = False) -> Tensor:
    """A product without gradients by a dense copy of ``sparse``, which is kept with it.

    Args:
        sparse: (m, k), a `SparseTensor` (or a dense tensor, of which no copy is made).
        dense: (..., k) if `linear`, the product being dense @ sparse.mT + bias, (..., m); else (..., k, n), the product
            being sparse @ dense. Of the dtype of `sparse`.
        bias: (m,), with `linear` only.
    """
    return torch.ops.sparsecomp.dense_copy_matmul.default(sparse, dense, bias, linear)


def _matmul(sparse: Tensor, dense: Tensor, bias: Tensor | None, linear: bool) -> Tensor:
    return F.linear(dense, sparse, bias) if linear else sparse @ dense


def _product(values, pattern, dense, bias, format, block, shape, skews, transpose, linear):
    layout = layout_of(format, block, shape, skews)
    copy = FOLDS.of([values, *pattern], _formula_of(layout, transpose), "dense", (1, 1)).values
    return _matmul(copy, dense, bias, linear)


@lru_cache(maxsize=8192)
def _formula_of(layout: Layout, transpose: bool) -> str:
    return named_formula(f"dense {layout} {transpose}", partial(_written_out, layout, transpose))


def _fake_product(values, pattern, dense, bias, format, block, shape, skews, transpose, linear):
    weight = values.new_empty(tuple(shape[::-1] if transpose else shape))
    return _matmul(weight, dense, bias, linear)


def _written_out(layout: Layout, transpose: bool, values: Tensor, *pattern: Tensor) -> Tensor:
    if layout.format == "nm":
        n, m = layout.block
        matrix = NM.from_arrays(values, pattern[0], layout.shape, n, m, check=False)
    else:
        kind = BSR if layout.format == "bsr" else CSR
        matrix = kind.from_arrays(pattern[0], pattern[1], values, layout.shape, check=False)
    dense = matrix.to_dense()
    return dense.mT.contiguous() if transpose else dense


def _backward(ctx: Any, grad: Tensor) -> Any:
    raise NotImplementedError("a product by a dense copy has no gradient: compile the model with gradients enabled")


def _registered(name: str, function: Any, fake: Any) -> None:
    library.impl(name, function, "CPU")
    library.impl(name, function, "CUDA")
    torch.library.register_fake(f"sparsecomp::{name}", fake, lib=library)
    torch.library.register_autograd(f"sparsecomp::{name}", _backward, lib=library)


_registered("dense_copy_matmul", _matmul, _matmul)
_registered("dense_copy_product", _product, _fake_product)
