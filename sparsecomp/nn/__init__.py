"""Modules and parameters with sparse weights.

    layer = sparsecomp.nn.SparseLinear.from_linear(linear, sparsity=0.9)
    layer = sparsecomp.nn.SparseLinear.from_linear(linear, format=NM, n=2, m=4)

Everything takes the formats of `sparsecomp.formats`.
"""

from sparsecomp.nn.embedding import SparseEmbedding
from sparsecomp.nn.linear import SparseLinear
from sparsecomp.nn.parameter import AllowGrowth, AllowShrinkage, ExactPattern, SparseParameter
from sparsecomp.nn.replicas import synchronize

__all__ = [
    "AllowGrowth",
    "AllowShrinkage",
    "ExactPattern",
    "SparseEmbedding",
    "SparseLinear",
    "SparseParameter",
    "synchronize",
]
