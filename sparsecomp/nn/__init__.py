"""Modules with sparse weights.

    layer = sparsecomp.nn.SparseLinear.from_linear(linear, sparsity=0.9)
    layer = sparsecomp.nn.SparseLinear.from_linear(linear, format=NM, n=2, m=4)

    model = sparsecomp.nn.wrap_module(model)  # its layers become prunable and resurrectable

Sparse modules take the formats of `sparsecomp.formats`; `sparsecomp.runtime` trains the RESU layers, and has them under
the same names.
"""

from sparsecomp.nn.masked.layers import RESUConv2d, RESULinear, RESUMultiheadAttention, masked_weights, wrap_module
from sparsecomp.nn.sparse.embedding import SparseEmbedding
from sparsecomp.nn.sparse.linear import SparseLinear

__all__ = [
    "RESUConv2d",
    "RESULinear",
    "RESUMultiheadAttention",
    "SparseEmbedding",
    "SparseLinear",
    "masked_weights",
    "wrap_module",
]
