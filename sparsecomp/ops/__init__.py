"""Operators of sparsecomp: schemas, fakes, autograd and plain-PyTorch references.

Importing this package registers them under ``torch.ops.sparsecomp`` and needs no Triton; the CUDA implementations load
their kernels on first use.
"""

from sparsecomp.ops import apart as _apart  # noqa: F401  (operators of rewrites, as all like it)
from sparsecomp.ops import promise as _promise  # noqa: F401
from sparsecomp.ops.attention.bias_table import table_rows
from sparsecomp.ops.attention.block_attention import block_attention
from sparsecomp.ops.attention.decode_attention import decode_attention
from sparsecomp.ops.attention.element_attention import element_attention
from sparsecomp.ops.attention.mask_scan import scanned_blocks
from sparsecomp.ops.attention.masked_decode import masked_decode_attention
from sparsecomp.ops.attention.packed_blocks import packed_blocks
from sparsecomp.ops.attention.spike_attention import spike_attention
from sparsecomp.ops.library import decompositions
from sparsecomp.ops.local.gather_dot import gather_dot
from sparsecomp.ops.local.residual_block import residual_block
from sparsecomp.ops.masked import folded_layer as _folded_layer  # noqa: F401
from sparsecomp.ops.masked import merged_weight as _merged_weight  # noqa: F401
from sparsecomp.ops.masked.effective_weight import effective_weight, split_pruned
from sparsecomp.ops.masked.elementwise import (
    gather_pruned,
    masked_add,
    masked_blend,
    masked_mul,
    scatter_pruned,
    select_largest,
    tournament,
)
from sparsecomp.ops.masked.selective_step import selective_step
from sparsecomp.ops.sparse import bitmap_linear as _bitmap_linear  # noqa: F401
from sparsecomp.ops.sparse import bitmap_pair as _bitmap_pair  # noqa: F401
from sparsecomp.ops.sparse import dense_copy as _dense_copy  # noqa: F401
from sparsecomp.ops.sparse import dense_linear as _dense_linear  # noqa: F401
from sparsecomp.ops.sparse import dense_weight as _dense_weight  # noqa: F401
from sparsecomp.ops.sparse import gated_pair as _gated_pair  # noqa: F401
from sparsecomp.ops.sparse import matrices as _matrices  # noqa: F401  (enters itself in sparsecomp.formats)
from sparsecomp.ops.sparse import packed_linear as _packed_linear  # noqa: F401
from sparsecomp.ops.sparse import row_products as _row_products  # noqa: F401  (its operators, for sparsecomp.formats)
from sparsecomp.ops.sparse import siblings as _siblings  # noqa: F401
from sparsecomp.ops.sparse import whole_product as _whole_product  # noqa: F401  (likewise)
from sparsecomp.ops.sparse.active_linear import active_linear
from sparsecomp.ops.sparse.linear import sparse_linear
from sparsecomp.ops.sparse.row_softmax import row_softmax
from sparsecomp.ops.sparse.rows import sparse_rows
from sparsecomp.ops.sparse.sddmm import sddmm
from sparsecomp.ops.sparse.sparse_matmul import sparse_matmul
from sparsecomp.ops.sparse.spmm import spmm
from sparsecomp.ops.spiking.conv_lif import conv_lif
from sparsecomp.ops.spiking.conv_neuron import conv_neuron
from sparsecomp.ops.spiking.lif import lif
from sparsecomp.ops.spiking.neuron import neuron, trained_neuron
from sparsecomp.ops.spiking.spike_conv import spike_conv, spike_linear
from sparsecomp.ops.spiking.spike_conv_transpose import spike_conv_transpose
from sparsecomp.ops.spiking.spike_matmul import spike_matmul
from sparsecomp.reference.digits import split_weight
from sparsecomp.reference.frozen import frozen_weights
from sparsecomp.reference.patterns import Layout

spike_conv2d = spike_conv
"""The name that `spike_conv` had when it took images only."""

__all__ = [
    "Layout",
    "active_linear",
    "block_attention",
    "conv_lif",
    "conv_neuron",
    "decode_attention",
    "decompositions",
    "effective_weight",
    "element_attention",
    "frozen_weights",
    "gather_dot",
    "gather_pruned",
    "lif",
    "masked_add",
    "masked_blend",
    "masked_decode_attention",
    "masked_mul",
    "neuron",
    "packed_blocks",
    "residual_block",
    "scanned_blocks",
    "scatter_pruned",
    "row_softmax",
    "sddmm",
    "select_largest",
    "selective_step",
    "sparse_linear",
    "sparse_matmul",
    "sparse_rows",
    "spike_attention",
    "spike_conv",
    "spike_conv2d",
    "spike_conv_transpose",
    "spike_linear",
    "spike_matmul",
    "split_pruned",
    "split_weight",
    "spmm",
    "table_rows",
    "tournament",
    "trained_neuron",
]
