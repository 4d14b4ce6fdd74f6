"""Operators of sparsecomp: schemas, fakes, autograd and plain-PyTorch references.

Importing this package registers them under ``torch.ops.sparsecomp`` and needs no Triton; the CUDA implementations load
their kernels on first use.
"""

from sparsecomp.lowering.frozen import frozen_weights
from sparsecomp.ops.dense_copy import dense_copy_matmul
from sparsecomp.ops.lif import lif
from sparsecomp.ops.patterns import Layout
from sparsecomp.ops.sddmm import sddmm
from sparsecomp.ops.sparse_matmul import sparse_matmul
from sparsecomp.ops.sparse_rows import sparse_rows
from sparsecomp.ops.spike_conv import decompositions, pack_weight, spike_conv2d, spike_linear
from sparsecomp.ops.spmm import spmm
from sparsecomp.ops.weights import split_weight

__all__ = [
    "Layout",
    "decompositions",
    "dense_copy_matmul",
    "frozen_weights",
    "lif",
    "pack_weight",
    "sddmm",
    "sparse_matmul",
    "sparse_rows",
    "spike_conv2d",
    "spike_linear",
    "split_weight",
    "spmm",
]
