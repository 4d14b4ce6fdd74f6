"""Operators of sparsecomp: schemas, fakes, autograd and plain-PyTorch references.

Importing this package registers them under ``torch.ops.sparsecomp`` and needs no Triton; the CUDA implementations load
their kernels on first use.
"""

from sparsecomp.lowering.frozen import frozen_weights
from sparsecomp.ops.effective_weight import effective_weight, split_pruned
from sparsecomp.ops.lif import lif
from sparsecomp.ops.masked_ops import (
    gather_pruned,
    masked_add,
    masked_blend,
    masked_mul,
    scatter_pruned,
    select_largest,
    tournament,
)
from sparsecomp.ops.patterns import Layout
from sparsecomp.ops.sddmm import sddmm
from sparsecomp.ops.selective_step import selective_step
from sparsecomp.ops.sparse_linear import sparse_linear
from sparsecomp.ops.sparse_matmul import sparse_matmul
from sparsecomp.ops.sparse_rows import sparse_rows
from sparsecomp.ops.spike_conv import decompositions, spike_conv2d, spike_linear
from sparsecomp.ops.spmm import spmm
from sparsecomp.ops.weights import split_weight

__all__ = [
    "Layout",
    "decompositions",
    "effective_weight",
    "frozen_weights",
    "gather_pruned",
    "lif",
    "masked_add",
    "masked_blend",
    "masked_mul",
    "scatter_pruned",
    "sddmm",
    "select_largest",
    "selective_step",
    "sparse_linear",
    "sparse_matmul",
    "sparse_rows",
    "spike_conv2d",
    "spike_linear",
    "split_pruned",
    "split_weight",
    "spmm",
    "tournament",
]
