"""Modules with sparse weights.

    layer = sparsecomp.nn.SparseLinear.from_linear(linear, sparsity=0.9)
    layer = sparsecomp.nn.SparseLinear.from_linear(linear, format=NM, n=2, m=4)

    model = sparsecomp.nn.wrap_module(model)  # its layers become prunable and resurrectable

Sparse modules take the formats of `sparsecomp.formats`; the RESU layers belong to `sparsecomp.runtime`.
"""

from sparsecomp.nn.local.linear import GeoSparseLinear, adopt_patterns
from sparsecomp.nn.masked.layers import RESUConv2d, RESULinear, RESUMultiheadAttention, masked_weights, wrap_module
from sparsecomp.nn.sparse.embedding import SparseEmbedding
from sparsecomp.nn.sparse.linear import SparseLinear
from sparsecomp.reference.local.connectivity import build_geo_connectivity, expand_in_indices_to_edges

__all__ = [
    "GeoSparseLinear",
    "RESUConv2d",
    "RESULinear",
    "RESUMultiheadAttention",
    "SparseEmbedding",
    "SparseLinear",
    "adopt_patterns",
    "build_geo_connectivity",
    "expand_in_indices_to_edges",
    "masked_weights",
    "wrap_module",
]
