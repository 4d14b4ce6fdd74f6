"""Modules and parameters with sparse weights.

    layer = sparsecomp.nn.SparseLinear.from_linear(linear, sparsity=0.9)
    layer = sparsecomp.nn.SparseLinear.from_linear(linear, format=NM, n=2, m=4)

    model = sparsecomp.nn.wrap_module(model)  # its layers become prunable and resurrectable

Sparse modules take the formats of `sparsecomp.formats`; the RESU layers belong to `sparsecomp.runtime`.
"""

from sparsecomp.nn.embedding import SparseEmbedding
from sparsecomp.nn.linear import SparseLinear
from sparsecomp.nn.parameter import AllowGrowth, AllowShrinkage, ExactPattern, SparseParameter
from sparsecomp.nn.replicas import synchronize
from sparsecomp.runtime.layers import RESUConv2d, RESULinear, RESUMultiheadAttention, masked_weights, wrap_module

__all__ = [
    "AllowGrowth",
    "AllowShrinkage",
    "ExactPattern",
    "RESUConv2d",
    "RESULinear",
    "RESUMultiheadAttention",
    "SparseEmbedding",
    "SparseLinear",
    "SparseParameter",
    "masked_weights",
    "synchronize",
    "wrap_module",
]
