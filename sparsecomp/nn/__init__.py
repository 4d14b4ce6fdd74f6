"""Modules with sparse weights.

    layer = sparsecomp.nn.SparseLinear.from_linear(linear, sparsity=0.9)
    layer = sparsecomp.nn.SparseLinear.from_linear(linear, format=NM, n=2, m=4)

    model = sparsecomp.nn.wrap_module(model)  # its layers become prunable and resurrectable

    net = sparsecomp.nn.GeoSparseNet(784, 10, shape=(28, 28))  # neurons on a grid that read 8 neurons each
    model = sparsecomp.nn.GeoSparseClassifier()  # the same for scikit-learn, which it needs

Sparse modules take the formats of `sparsecomp.formats`; `sparsecomp.runtime` trains the RESU layers, and has them under
the same names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparsecomp.nn.attention.longformer import LongformerAttention, LongformerBlock
from sparsecomp.nn.attention.multihead import SparseMultiheadAttention
from sparsecomp.nn.local.activations import PhaseSineParam, SineParam
from sparsecomp.nn.local.block import GeoSparseResidualBlock
from sparsecomp.nn.local.config import GeoSparseConfig
from sparsecomp.nn.local.linear import GeoSparseLinear, adopt_patterns
from sparsecomp.nn.local.net import GeoSparseNet
from sparsecomp.nn.local.parameters import (
    count_params,
    dense_linear_params,
    dense_mlp_params,
    geo_sparse_block_params,
    geo_sparse_net_params,
    match_dense,
    match_dense_width,
    sparse_linear_params,
)
from sparsecomp.nn.masked.layers import RESUConv2d, RESULinear, RESUMultiheadAttention, masked_weights, wrap_module
from sparsecomp.nn.masked.sparse_attention import RESUSparseMultiheadAttention
from sparsecomp.nn.sparse.embedding import SparseEmbedding
from sparsecomp.nn.sparse.linear import SparseLinear
from sparsecomp.reference.local.connectivity import (
    build_geo_connectivity,
    effective_fan_in,
    expand_in_indices_to_edges,
)
from sparsecomp.reference.local.drawing import field_figure
from sparsecomp.reference.local.graph import connectivity_graph, examine_connectivity, receptive_field

if TYPE_CHECKING:
    from sparsecomp.nn.local.estimators import GeoSparseClassifier as GeoSparseClassifier
    from sparsecomp.nn.local.estimators import GeoSparseRegressor as GeoSparseRegressor

__all__ = [
    "GeoSparseConfig",
    "GeoSparseLinear",
    "GeoSparseNet",
    "GeoSparseResidualBlock",
    "LongformerAttention",
    "LongformerBlock",
    "PhaseSineParam",
    "RESUConv2d",
    "RESULinear",
    "RESUMultiheadAttention",
    "RESUSparseMultiheadAttention",
    "SineParam",
    "SparseEmbedding",
    "SparseLinear",
    "SparseMultiheadAttention",
    "adopt_patterns",
    "build_geo_connectivity",
    "connectivity_graph",
    "count_params",
    "dense_linear_params",
    "dense_mlp_params",
    "effective_fan_in",
    "examine_connectivity",
    "expand_in_indices_to_edges",
    "field_figure",
    "geo_sparse_block_params",
    "geo_sparse_net_params",
    "masked_weights",
    "match_dense",
    "match_dense_width",
    "receptive_field",
    "sparse_linear_params",
    "wrap_module",
]


def __getattr__(name: str) -> Any:
    if name in ("GeoSparseClassifier", "GeoSparseRegressor"):  # they need scikit-learn
        return getattr(import_module("sparsecomp.nn.local.estimators"), name)
    raise AttributeError(f"module 'sparsecomp.nn' has no attribute {name!r}")
